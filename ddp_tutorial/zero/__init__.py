"""Implement ZeRO, in which each rank stores only a shard of the state that plain data parallelism replicates.

`optimizer` shards the optimizer state (ZeRO-1), `gradients` also shards the gradients (ZeRO-2), and `model` also shards
the weights (ZeRO-3). `fsdp` uses PyTorch's own implementation of ZeRO-3. All other modules support `optimizer`,
`gradients`, `model`, and `fsdp`.

`pieces` defines how tensors are split, and `units` defines which parameters are gathered together. `shards` defines the
ranks that share one replica of the model. `reductions` overlaps the reduce-scatters with the backward pass. `path`
checks that all ranks use the units in the same order. `elementwise` tests whether an optimizer can update flat shards
of a parameter. `memory` calculates the memory usage and the communication volume of each stage. `state` defines the
checkpoint format of sharded state. `strategies` implements the training strategies.

Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter models", SC 2020.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
