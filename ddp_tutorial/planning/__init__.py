"""Predict the time, memory and cost of a training step on many devices, without running it.

- `hardware` describes devices and networks.
- `transformer` counts the parameters, FLOPs and activations of a model.
- `plan` defines the strategy, micro-batches, tensor and pipeline parallelism, and recomputation of a step.
- `computation` computes the duration of the forward and backward passes. `communication` computes the duration of
  collectives on a two-level network.
- `memory` computes the memory required on a device.
- `step` combines these results into an estimate.
- `choice` compares plans. `published` lists training runs published by other organizations, and `comparison` compares
  the predictions with these runs.

Importing these modules does not import torch. For example:

    plan = Plan("zero3", devices=64, micro_batch=2)
    estimate = estimate_step(MODELS["Llama 2 7B"], plan, DEVICES["H100"], NETWORKS["DGX H100"])
    print(estimate.seconds, estimate.mfu, estimate.memory.total)
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
