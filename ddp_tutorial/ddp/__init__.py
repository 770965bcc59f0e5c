"""How do the ranks come to agree on a gradient?

`variants` has four ways: one all-reduce for each parameter, one for all, buckets that are sent while backward still
runs, and torch's own. `buckets` and `hooks` are their parts; `link` is a model of what sending costs, and a link slowed
down to it; `timeline` records when each rank computed and when its link carried something; `shared_memory` is for two
ranks of one host; `sync_bn` is BatchNorm over the batch of all ranks.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
