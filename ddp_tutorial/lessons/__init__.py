"""Algorithms written for reading, not for use in training. The notebooks explain and measure them.

The module `all_reduce` sums tensors over ranks around a ring or along a tree, using only send and receive. Training
uses `torch.distributed` instead. The package `train_script` contains the plain PyTorch training script that grows from
notebook to notebook. The module `restarts` starts jobs, injects faults, and reads the jobs' logs.
"""
