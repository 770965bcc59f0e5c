"""One optimizer step: micro-batches, loss, gradient, update.

`train_step` runs a step. `micro_batches` accumulates gradients, and `loss` sums losses and metrics. `strategy` defines
how a gradient is computed on several ranks; `strategies`, `accelerate_strategy` and `invariant` implement it with DDP,
with Hugging Face's Accelerate, and independently of the number of ranks. `out_of_memory` lets ranks agree to skip a
batch. `precision` updates the weights from the gradient.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
