"""One training in the trainers that people use: how they are written, and what comes of it.

`work` is what all of them train: the same weights to begin with, the same samples in each step, the same number of
steps. `plain`, `accelerate`, `fabric`, `lightning` and `huggingface` train it as their users would write it, `ours` by
this package; each has one function, `train`. `side_by_side` runs them in the same ranks.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
