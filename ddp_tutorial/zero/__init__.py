"""Whose memory is it? Each rank keeps a part of what data parallelism has W times.

`optimizer` shares out the optimizer's state (ZeRO-1), `gradients` the gradients too (ZeRO-2), `model` the weights as
well (ZeRO-3); `pieces` is the arithmetic of cutting, `state` what a checkpoint keeps, `strategies` what the trainer
steps, `fsdp` torch's own. Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter models".
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
