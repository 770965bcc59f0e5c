"""Algorithms written for reading, not for use in training. The notebooks explain and measure them.

The `all_reduce` module implements ring and tree all-reduce, using only send and receive. Training uses
`torch.distributed` instead. The `train_script` package contains the plain PyTorch training script that grows from
notebook to notebook. The `restarts` module starts jobs, injects faults, and reads the jobs' logs.
"""
