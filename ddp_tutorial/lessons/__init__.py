"""Algorithms written for reading, not for use in training. The notebooks explain and measure them.

`all_reduce` sums tensors over ranks around a ring and along a tree, using only send and receive. Training uses
`torch.distributed` instead. `train_script` contains the plain PyTorch training script that grows from notebook to
notebook. `restarts` starts jobs, injects faults, and reads the jobs' logs.
"""
