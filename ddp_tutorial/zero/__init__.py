"""Whose memory is it? Each rank keeps a part of what data parallelism has W times.

`optimizer` shares out the optimizer's state (ZeRO-1), `gradients` the gradients too (ZeRO-2), `model` the weights as
well (ZeRO-3), `fsdp` does so with torch's own. `pieces` and `units` are what is cut and gathered, `memory` what it
comes to, `state` what a checkpoint keeps of it, `strategies` what the trainer steps. `reductions` overlaps the
reduce-scatters with the backward pass, `path` compares the order in which ranks use the units, and `elementwise` tells
which optimizers may step pieces.

Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter models", SC 2020.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
