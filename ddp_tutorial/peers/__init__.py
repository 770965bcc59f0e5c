"""Implement the same training run in popular trainers, to compare their code, results and speed.

`work` defines the run: the same initial weights, the same samples in each step, and the same number of steps. `plain`,
`accelerate`, `fabric`, `lightning` and `huggingface` implement the run in these libraries. `ours` uses this package.
Each module contains one function, `train`. `side_by_side` runs the trainers in the same ranks.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
