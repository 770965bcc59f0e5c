"""The training loop, for any model, data and loss.

`step` is one optimiser step, `trainer` the loop around it, `config` what both are told. `evaluation`, `best`,
`stopping` and `profiling` are what the loop does now and then. `tasks` are built from a config; `gpt` is the model of
one.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
