"""Average gradients over ranks.

`wrappers` contains four DDP implementations. `NaiveDDP` reduces gradients one by one, `FlatDDP` in a single all-reduce,
and `BucketDDP` in buckets during the backward pass. `TorchDDP` wraps PyTorch's DDP. `buckets` groups gradients, and
`hooks` defines communication hooks. `link` models the communication time and simulates slow links. `timeline` records
when each rank computes and communicates. `shared_memory` sums the gradients of two ranks on one host. `sync_bn`
implements BatchNorm over the global batch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
