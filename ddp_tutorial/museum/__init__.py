"""Bugs from real distributed training programs, each with its fix, and invariants that catch all these bugs.

Most bugs cause no error or warning: the loss falls, but the model is wrong. The modules `gradients`, `accumulation`,
`data`, `control`, `checkpoints` and `metrics` reproduce the bugs in plain PyTorch. `correct` contains correct programs.
`invariants` defines properties of every correct program, and detects violations without knowledge of the bugs.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
