"""Distribute a dataset's samples across the ranks.

`permutation` computes the sample order of each epoch, and each rank's sample indices for each step. `samples` reads a
dataset's samples by index. `sharded`, `dispatched`, and `streamed` each define one kind of source. `make_source` in
`sources` creates a source of the kind that a config specifies. `corpus` loads training text, and `stories` generates
short stories.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
