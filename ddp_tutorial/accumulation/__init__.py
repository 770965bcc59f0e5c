"""Run one optimizer step, from the micro-batches to the weight update.

`train_step` runs a step. `micro_batches` accumulates gradients, and `loss` sums losses and metrics. `strategy` defines
the interface for computing a gradient on several ranks. `strategies` uses DDP to compute the gradient, and
`accelerate_strategy` uses Hugging Face's Accelerate. `invariant` computes gradients that do not depend on the number of
ranks. `out_of_memory` lets ranks agree to skip a batch. `precision` implements mixed precision and the weight update.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
