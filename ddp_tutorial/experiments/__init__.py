"""Many runs, and what they show together.

`execute` runs a notebook with parameters, `notebooks` re-executes those of the project, `sweeps` runs one over a grid
of parameters and `tables` compares the results. `arms` times several ways to take the same step in turn, `scaling`
predicts the time of a step on more ranks.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
