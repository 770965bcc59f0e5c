"""What is one optimiser step?

`micro_batches` cuts it, `loss` adds up what its parts return, `strategies` turn them into the gradient of all ranks,
`accelerated` has Hugging Face's Accelerate do so, `invariant` does it with the same bits on any number of ranks,
`out_of_memory` has ranks agree to leave a batch out, `precision` makes the update from the gradient.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
