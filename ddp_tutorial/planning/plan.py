"""Define how a training step is distributed over devices."""

import math
from dataclasses import dataclass
from typing import Literal

from ddp_tutorial.planning.transformer import Recomputation

Strategy = Literal["ddp", "zero1", "zero2", "zero3", "hsdp"]


@dataclass(frozen=True)
class Precision:
    """The number of bytes per parameter. The defaults, which sum to 16, are for mixed precision with AdamW.

    Attributes:
        weights: Bytes per weight, in computation and in all-gathers.
        gradients: Bytes per gradient, in memory and in reductions.
        optimizer: Bytes of optimizer state per weight. The default covers a float32 copy and two float32 moments.
    """

    weights: int = 2
    gradients: int = 2
    optimizer: int = 12


@dataclass(frozen=True)
class Plan:
    """The distribution of a training step over devices.

    The devices form a data x pipeline x tensor mesh. As in Megatron-LM, the tensor-parallel index varies fastest,
    then the data-parallel index, then the pipeline stage.

    Attributes:
        strategy: The kind of data parallelism: DDP, a ZeRO stage ("zero3" is FSDP), or hybrid sharding ("hsdp").
        devices: The number of devices.
        micro_batch: Sequences per micro-batch.
        accumulation: Micro-batches per step per replica, which fill the pipeline if there is one.
        tensor: The degree of tensor (and sequence) parallelism.
        pipeline: The number of pipeline stages.
        interleaving: The number of model chunks on each stage of an interleaved schedule.
        shard: With "hsdp", the number of devices that shard one replica (default: the data-parallel devices per node).
        recomputation: The activations that the backward pass recomputes.
        fused_attention: Whether a fused kernel (FlashAttention) computes attention.
        precision: The number of bytes per parameter.
    """

    strategy: Strategy
    devices: int
    micro_batch: int = 1
    accumulation: int = 1
    tensor: int = 1
    pipeline: int = 1
    interleaving: int = 1
    shard: int | None = None
    recomputation: Recomputation = "none"
    fused_attention: bool = True
    precision: Precision = Precision()

    def __post_init__(self) -> None:
        """Validate the fields."""
        sizes = [self.devices, self.micro_batch, self.accumulation, self.tensor, self.pipeline, self.interleaving]
        if min(sizes) < 1 or (self.shard is not None and self.shard < 1):
            raise ValueError(f"all numbers in a plan must be at least 1, got {self}")
        if self.devices % (self.tensor * self.pipeline):
            raise ValueError(
                f"'devices' must be a multiple of tensor x pipeline ({self.tensor * self.pipeline}), got {self.devices}"
            )
        if self.strategy == "hsdp" and self.pipeline > 1:
            raise ValueError(f"'hsdp' does not support pipelines, got pipeline={self.pipeline}: use 'zero1'")

    @property
    def data(self) -> int:
        """The data-parallel degree, that is, the number of devices or device groups that process different samples."""
        return self.devices // (self.tensor * self.pipeline)

    @property
    def sharding(self) -> Strategy:
        """The effective strategy, which determines memory usage and communication.

        As in `torch.distributed.pipelining`, a pipeline stage keeps gathered weights and accumulated gradients across
        all micro-batches. Therefore, "zero2" and "zero3" are equivalent to "zero1" in a pipeline.
        """
        return "zero1" if self.pipeline > 1 and self.strategy in {"zero2", "zero3"} else self.strategy

    def stage_layers(self, layers: int) -> int:
        """Return the number of layers in the largest pipeline stage, for a model with `layers` layers."""
        return self.interleaving * math.ceil(layers / (self.pipeline * self.interleaving))

    def device_parameters(self, parameters: int) -> float:
        """Return the number of parameters per device before data-parallel sharding. `parameters` is the total."""
        return parameters / (self.tensor * self.pipeline)

    @property
    def sequences(self) -> int:
        """The global batch size in sequences."""
        return self.data * self.micro_batch * self.accumulation

    @property
    def label(self) -> str:
        """The plan as a table label, for example "zero3, tensor 8, pipeline 4, full recomputation"."""
        parts: list[str] = [self.strategy]
        parts += [f"tensor {self.tensor}"] if self.tensor > 1 else []
        parts += [f"pipeline {self.pipeline}"] if self.pipeline > 1 else []
        parts += [f"{self.recomputation} recomputation"] if self.recomputation != "none" else []
        return ", ".join(parts)
