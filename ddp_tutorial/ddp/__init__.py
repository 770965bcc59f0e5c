"""Average gradients over ranks.

`wrappers` contains four implementations: one all-reduce per parameter, one for all parameters, buckets that are reduced
during the backward pass, and PyTorch's own. `buckets` and `hooks` are their parts. `link` models the cost of
communication and simulates slow links. `timeline` records when each rank computes and communicates. `shared_memory` is
a transport for two ranks of one host. `sync_bn` is BatchNorm over the batch of all ranks.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
