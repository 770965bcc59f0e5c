"""Save the state of a run and restore it on any number of ranks.

`checkpointer` saves and loads the state of all ranks together. `components` defines the components of a run's state,
and `consistency` checks that replicated components are identical on all ranks. `storage` writes and reads the component
files. `manifest` defines the layout of a checkpoint on disk. `resuming` selects the checkpoint to resume from and
validates the config against it. `retention` removes old checkpoints, and `comparison` lists the differences between two
checkpoints.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
