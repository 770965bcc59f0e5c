"""Batch normalisation over the batch of all ranks, with two all-reduces.

A BatchNorm layer subtracts the mean of the batch and divides by its standard deviation. Under data parallelism "the
batch" is a rank's part of it, so the output for a sample depends on which samples are on the same rank: four ranks with
two samples each do not compute what one process with eight does. Here the sums are taken over all ranks, in forward
and, because every output depends on every input, in backward. torch's `SyncBatchNorm` does the same, on GPUs only.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_tutorial.world import World, require_group

Batched = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


class _AllReduce(torch.autograd.Function):
    """The sum over ranks. Each rank's input is in the output of every rank, so its gradient is the sum of theirs."""

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


class SyncBatchNorm(nn.Module):
    """[samples, channels, ...] -> the same, each channel normalised over the samples of all ranks.

    Made by `synchronise_batch_norm`, with the weights and running statistics of the layer that it replaces. A rank may
    have fewer samples than others, or none. Raises `ValueError`, on all ranks, where all of them together have fewer
    than two values for a channel, which have no standard deviation.
    """

    def __init__(self, layer: Batched, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.eps, self.momentum = layer.eps, layer.momentum
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(layer, name))
        self.running_mean: torch.Tensor | None
        self.running_var: torch.Tensor | None
        self.num_batches_tracked: torch.Tensor | None
        self.group = group
        self.train(layer.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training and self.running_mean is not None:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        over = [dim for dim in range(x.dim()) if dim != 1]
        shape = [1, -1] + [1] * (x.dim() - 2)  # that broadcasts one number for each channel over x
        values = x.to(torch.promote_types(x.dtype, torch.float32))
        here = torch.cat([values.sum(over), values.new_tensor([x.numel() // x.shape[1]])])
        sums, count = _AllReduce.apply(here, self.group).split([x.shape[1], 1])
        count = count.detach()
        if count < 2:
            raise ValueError(f"{int(count)} value for each channel, on all ranks together: there should be 2 or more")
        mean = sums / count
        # Not the mean of squares minus the square of the mean: the difference of two large, nearly equal numbers is
        # mostly rounding error.
        deviations = values - mean.view(shape)
        variance = _AllReduce.apply(deviations.square().sum(over), self.group) / count
        if self.training:
            self._remember(mean.detach(), variance.detach() * count / (count - 1))
        normal = deviations * (variance + self.eps).rsqrt().view(shape)
        if self.weight is not None:
            normal = normal * self.weight.view(shape) + self.bias.view(shape)
        return normal.to(x.dtype)

    def _remember(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Update the running statistics as BatchNorm does: with momentum None to the mean of all batches so far."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked += 1
        factor = float(1 / self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, factor)
        self.running_var.lerp_(variance, factor)


def synchronise_batch_norm(module: nn.Module, world: World) -> nn.Module:
    """Replace each BatchNorm layer inside `module` by a `SyncBatchNorm`; returns the module, or its replacement.

    Collective. The layers get a process group of their own: they start all-reduces during backward, while another
    thread may be sending buckets of gradients. In one group, ranks could start these in different orders, and would add
    up each other's numbers.
    """
    require_group(world)
    group = dist.new_group() if world.size > 1 else None

    def replaced(child: nn.Module) -> nn.Module:
        if isinstance(child, Batched):
            return SyncBatchNorm(child, group)
        for name, grandchild in child.named_children():
            setattr(child, name, replaced(grandchild))
        return child

    return replaced(module)
