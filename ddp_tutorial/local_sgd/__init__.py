"""When is once a step too often? Ranks that take several steps by themselves, and then average their weights.

`rounds` says when, `averaging` how and with how many bytes, `outer` is DiLoCo's second optimizer, `state` what a
checkpoint keeps of ranks whose weights differ, and `strategies` what the trainer steps.

Stich, "Local SGD converges fast and communicates little", ICLR 2019. Lin et al., "Don't use large mini-batches, use
local SGD", ICLR 2020. Douillard et al., "DiLoCo: Distributed low-communication training of language models", 2023.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
