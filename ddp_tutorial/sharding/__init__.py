"""Distribute a dataset's samples across the ranks.

`permutation` computes the sample order of an epoch and each rank's samples in a step, without starting processes.
`samples` makes any dataset readable by sample index. `sharded`, `dispatched`, and `streamed` each define one kind of
source, and `make_source` in `sources` selects the kind. `corpus` loads training text, and `stories` generates short
stories.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
