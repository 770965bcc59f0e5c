"""Average gradients over ranks.

`wrappers` contains four DDP implementations. They reduce gradients with one all-reduce per parameter, with one
all-reduce for all parameters, in buckets during the backward pass, or through PyTorch's implementation. `buckets` and
`hooks` contain the components of the implementations. `link` models the cost of communication and simulates slow links.
`timeline` records when each rank computes and communicates. `shared_memory` sums the gradients of two ranks on one
host. `sync_bn` implements BatchNorm over the global batch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
