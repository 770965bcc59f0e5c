"""Distribute the samples of a dataset to the ranks.

`permutation` computes the order of an epoch and each rank's samples of a step, without any processes. `samples` makes
any dataset readable by sample index. `sharded`, `dispatched`, and `streamed` are the three ways to read samples, and
`make_source` in `sources` selects one of them. `corpus` loads text to train on, and `stories` generates text.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
