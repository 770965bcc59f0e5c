"""Normalize over the global batch. Each layer runs two all-reduces per forward pass and two per backward pass.

A BatchNorm layer subtracts the batch mean and divides by the batch standard deviation. Under data parallelism, each
rank processes only its shard of the batch. The output for a sample then depends only on samples on the same rank. The
results of four ranks with two samples each therefore differ from those of one process with eight samples.
In the forward pass, `SyncBatchNorm` sums the batch statistics over all ranks. Every output then depends on every input,
so the backward pass sums gradients over ranks. PyTorch's `SyncBatchNorm` is equivalent, but supports only GPUs.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_tutorial.groups import group_of, shared_group
from ddp_tutorial.world import World

# The layers use their own process group, because they start all-reduces in the backward pass, while a different thread
# may be reducing buckets. In one group, ranks could start these all-reduces in different orders and sum unrelated
# numbers.
_PURPOSE = "batch norm"

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm


class _AllReduce(torch.autograd.Function):
    """A differentiable sum over ranks.

    Every rank's output depends on every rank's input, so the gradient is also a sum over ranks.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        return _summed(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _summed(gradients[0], ctx.group), None


def _summed(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    total = tensor.contiguous().clone()
    if group is not None:
        dist.all_reduce(total, group=group)
    return total


class SyncBatchNorm(nn.BatchNorm1d):
    """A layer that normalizes each channel of an input [samples, channels, ...] over the samples of all ranks.

    The results match those of `torch.nn.SyncBatchNorm`.

    In training mode, the forward and backward passes are collective. A rank may have fewer samples than other ranks, or
    no samples. In evaluation mode, the layer behaves like a plain BatchNorm layer and does not communicate.

    The layer does not store a process group, so it can be copied, saved and loaded.

    Raises:
        ValueError: On all ranks, if the global batch contains fewer than two values per channel.
    """

    @classmethod
    def from_layer(cls, layer: BatchNorm) -> "SyncBatchNorm":
        """Return a synchronized layer that shares the parameters and running statistics of `layer`."""
        synced = cls(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
        synced.weight, synced.bias = layer.weight, layer.bias
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            synced.register_buffer(name, getattr(layer, name))
        return synced.train(layer.training)

    def _check_input_dim(self, x: torch.Tensor) -> None:
        if x.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {x.dim()}D input)")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalized `x`. Collective in training mode."""
        if not self.training:
            return super().forward(x)
        self._check_input_dim(x)
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        group = shared_group(range(world_size), _PURPOSE) if world_size > 1 else None
        dims = [dim for dim in range(x.dim()) if dim != 1]
        channels = x.shape[1]
        shape = [1, channels] + [1] * (x.dim() - 2)  # broadcasts one number per channel over x
        values = x.to(torch.promote_types(x.dtype, torch.float32))
        sums_and_count = torch.cat([values.sum(dims), values.new_tensor([x.numel() // channels])])
        sums, count = _AllReduce.apply(sums_and_count, group).split([channels, 1])
        count = count.detach()
        if count < 2:
            raise ValueError(f"expected more than 1 value per channel across all ranks, got {int(count)}")
        mean = sums / count
        # Not the mean of squares minus the square of the mean: the difference of two large, nearly equal numbers is
        # mostly rounding error.
        deviations = values - mean.view(shape)
        variance = _AllReduce.apply(deviations.square().sum(dims), group) / count
        self._update_running(mean.detach(), variance.detach() * count / (count - 1))
        normal = deviations * (variance + self.eps).rsqrt().view(shape)
        if self.weight is not None:
            normal = normal * self.weight.view(shape)
        if self.bias is not None:
            normal = normal + self.bias.view(shape)
        return normal.to(x.dtype)

    def _update_running(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Update the running statistics as BatchNorm does. With `momentum=None`, average over all processed batches."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        factor = float(1 / self.num_batches_tracked) if self.momentum is None else self.momentum
        for running, new in ((self.running_mean, mean), (self.running_var, variance)):
            running.copy_(running.to(new.dtype).lerp(new, factor))


def synchronize_batch_norm(module: nn.Module, world: World) -> nn.Module:
    """Replace each BatchNorm layer of `module` with a `SyncBatchNorm`. Collective.

    A layer that occurs several times in `module` is replaced with the same new layer everywhere.

    Returns:
        `module`, or its replacement if `module` is a BatchNorm layer.
    """
    group_of([range(world.size)], world, _PURPOSE)
    synced: dict[nn.Module, nn.Module] = {
        layer: SyncBatchNorm.from_layer(layer)
        for layer in module.modules()
        if isinstance(layer, BatchNorm) and not isinstance(layer, SyncBatchNorm)
    }
    for name, layer in list(module.named_modules(remove_duplicate=False)):
        if name and layer in synced:
            module.set_submodule(name, synced[layer])
    return synced.get(module, module)
