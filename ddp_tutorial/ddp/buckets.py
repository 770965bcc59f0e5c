"""Group gradients into buckets, each of which is reduced with one all-reduce."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

MIB = 2**20


def assign_buckets(nbytes: Sequence[int], kinds: Sequence[object], cap: float, first_cap: float) -> list[list[int]]:
    """Assign gradients to buckets, in the order in which the gradients become ready.

    A bucket is closed as soon as it contains at least `cap` bytes. A bucket may exceed `cap`, because gradients are
    never split. PyTorch uses the same rule. A small first bucket lets the first all-reduce start early.

    Args:
        nbytes: The size of each gradient in bytes.
        kinds: The kind of each gradient (dtype and device). All gradients in a bucket are of the same kind.
        cap: The size in bytes at which a bucket is closed.
        first_cap: The size in bytes at which the first bucket of each kind is closed.

    Returns:
        One list of gradient indices per bucket, in the order in which the buckets become complete.
    """
    buckets: list[list[int]] = []
    open_bucket: dict[object, list[int]] = {}
    held: dict[object, int] = {}
    cap_of: dict[object, float] = {}
    for index, kind in enumerate(kinds):
        open_bucket.setdefault(kind, []).append(index)
        held[kind] = held.get(kind, 0) + nbytes[index]
        if held[kind] >= cap_of.get(kind, first_cap):
            buckets.append(open_bucket.pop(kind))
            held[kind], cap_of[kind] = 0, cap
    rest = sorted(open_bucket.values(), key=lambda bucket: bucket[-1])
    return buckets + rest


@dataclass
class Bucket:
    """A flat buffer that stores several gradients, with one view per gradient."""

    name: str
    buffer: torch.Tensor
    names: list[str]
    parameters: list[nn.Parameter]
    views: list[torch.Tensor]

    @staticmethod
    def of(name: str, named: Sequence[tuple[str, nn.Parameter]]) -> "Bucket":
        """Return a zero-filled bucket for the `named` parameters, which must have the same dtype and device."""
        names, parameters = [name for name, _ in named], [parameter for _, parameter in named]
        sizes = [parameter.numel() for parameter in parameters]
        buffer = torch.zeros(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
        views = [piece.view(p.shape) for piece, p in zip(buffer.split(sizes), parameters, strict=True)]
        return Bucket(name, buffer, names, parameters, views)

    @torch.no_grad()
    def collect(self, place: int, world_size: int) -> None:
        """Divide the gradient of the parameter at index `place` by the world size, and copy the result into the buffer.

        The parameter's `.grad` becomes a view of the buffer. Because each rank divides its gradient first, the sum over
        ranks is the mean. Dividing first also avoids overflow in half precision. A missing gradient contributes zeros.
        """
        parameter, view = self.parameters[place], self.views[place]
        gradient = parameter.grad
        if gradient is None:
            view.zero_()
            return
        check_dense(self.names[place], gradient)
        if gradient.data_ptr() == view.data_ptr() and gradient.numel():  # already the view, since the last step
            view.mul_(1 / world_size)
        else:
            torch.mul(gradient, 1 / world_size, out=view)
        parameter.grad = view


def check_dense(name: str, gradient: torch.Tensor | None) -> None:
    """Raise `ValueError` if `gradient` is sparse, because the nonzero rows may differ between ranks."""
    if gradient is not None and gradient.is_sparse:
        raise ValueError(f"parameter {name!r} must have a dense gradient. Create its layer with sparse=False")


def make_buckets(
    parameters: Sequence[tuple[str, nn.Parameter]], cap: float = float("inf"), first_cap: float | None = None
) -> list[Bucket]:
    """Group the named parameters into buckets of about `cap` bytes, in the given order.

    Without a cap, there is one bucket for each combination of dtype and device.
    """
    tensors = [parameter for _, parameter in parameters]
    groups = assign_buckets(
        [tensor.nbytes for tensor in tensors],
        [(tensor.dtype, tensor.device) for tensor in tensors],
        cap,
        cap if first_cap is None else first_cap,
    )
    return [Bucket.of(f"bucket {number}", [parameters[i] for i in group]) for number, group in enumerate(groups)]
