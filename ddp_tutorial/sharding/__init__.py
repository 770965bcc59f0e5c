"""Distribute a dataset's samples to the ranks.

`permutation` computes the sample order of an epoch and each rank's samples in a step, without starting processes.
`samples` makes any dataset readable by sample index. `sharded`, `dispatched`, and `streamed` implement three ways to
read samples, and `make_source` in `sources` selects one of them. `corpus` loads training text, and `stories` generates
text.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
