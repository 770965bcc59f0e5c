"""Implement the same training run with several libraries, to compare their code, results and speed.

`work` defines the initial weights, the samples in each step and the number of steps. `plain` implements the run with
torch alone, `ours` with this package, and `accelerate`, `fabric`, `lightning` and `huggingface` with the corresponding
library. Each module provides a function `train`. `side_by_side` runs all trainers on the same ranks.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
