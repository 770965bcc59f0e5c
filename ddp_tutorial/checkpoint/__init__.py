"""What survives a run that is stopped or killed?

`checkpointer` saves and loads the state of a run on all ranks together: of `components`, checked by `replicas`, in the
files of `storage`. `manifest` says what a checkpoint is on the disk, `resuming` finds the one to go on from and whether
a run may, `retention` which ones stay, `comparison` where two of them differ.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
