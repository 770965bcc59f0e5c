"""Run notebooks as experiments and compare their results.

`execute` runs a notebook with parameters, and `notebooks` re-executes the project's notebooks. `sweeps` runs a notebook
over a grid of parameters, and `tables` compares the results. `arms` compares the step times of several variants of
a training step, and `scaling` predicts the step time on any number of ranks.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
