"""Algorithms that the notebooks explain and measure, written for reading rather than for training.

The `all_reduce` module implements ring and tree all-reduce, using only send and receive. Training uses
`torch.distributed` instead. The `train_script` package contains the plain PyTorch training script that grows from
notebook to notebook. The `restarts` module starts jobs, injects faults, and reads the jobs' logs.
"""
