"""Algorithms written out to be read, not to be used: the notebooks explain and measure them.

`all_reduce` sums tensors over ranks around a ring and along a tree, with nothing but send and receive. Training uses
`torch.distributed`. `train_script` contains the training script in plain PyTorch that grows from notebook to notebook.
`restarts` starts jobs, causes faults in them, and reads their logs.
"""
