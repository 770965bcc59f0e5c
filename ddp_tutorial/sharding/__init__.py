"""Which sample does a rank see next, and who reads it?

`order` is the arithmetic, without processes: the order of an epoch, and what each rank gets of a step. `samples` makes
samples that are read by number of any dataset. `sharded`, `dispatched` and `streamed` are the three ways of reading
them, and `make_source` in `sources` chooses one. `corpus` is text to learn from, `stories` makes some up.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
