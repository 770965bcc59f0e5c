"""Compute the layout of tensors that are split across ranks. The layout is the same on every rank.

A tensor is flattened and split into one shard per rank. The last shards may be shorter, or empty. To send several
tensors in one collective, their shards are packed into one row per rank. An all-gather sends all rows to every rank. A
reduce-scatter sums the rows over all ranks, and sends row r to rank r. Example:

    a of 5 elements, b of 2, on 2 ranks         row 0:  a0 a1 a2 b0
                                                row 1:  a3 a4  . b1        . is zero padding
"""

from collections.abc import Sequence

import torch

from ddp_tutorial.config import ConfigError


def piece_of(count: int, rank: int, size: int) -> slice:
    """Return the slice that `rank` stores if `count` elements are split over `size` ranks.

    In rank order, each shard receives ceil(count / size) elements until no elements are left. `torch.chunk` and DTensor
    split tensors in the same way.
    """
    each = -(-count // size)
    return slice(min(rank * each, count), min((rank + 1) * each, count))


def mark_as_piece(parameter: torch.Tensor) -> None:
    """Mark a parameter as a shard, so that replica checks do not compare the parameter across ranks."""
    parameter.is_piece = True  # type: ignore[attr-defined]


def is_piece(parameter: torch.Tensor) -> bool:
    """Return whether `mark_as_piece` has marked the parameter."""
    return getattr(parameter, "is_piece", False)


def require_no_gradient(name: str, parameter: torch.Tensor) -> None:
    """Raise `ConfigError` if a parameter that is about to be sharded has a gradient."""
    if parameter.grad is not None:
        raise ConfigError(f"parameter {name!r} has a gradient, which sharding would discard. Call zero_grad() first")


class Layout:
    """A layout that packs the shards of several tensors into one row per rank."""

    def __init__(self, shapes: Sequence[torch.Size], size: int) -> None:
        """Compute the position of each shard in a row, given the full shapes and the number of ranks."""
        self.shapes, self.size = list(shapes), size
        self.counts = [shape.numel() for shape in shapes]
        self.each = [-(-count // size) for count in self.counts]  # number of elements of each tensor in a row
        self.first = [sum(self.each[:index]) for index in range(len(self.each))]
        self.length = sum(self.each)  # number of elements in a row

    def pack(self, rows: torch.Tensor, index: int, tensor: torch.Tensor) -> None:
        """Copy the full tensor with index `index` into `rows` [size, length], without changing the padding."""
        full, block, rest = self._block(rows, index)
        flat = tensor.reshape(-1)
        block.copy_(flat[: block.numel()].view(block.shape))
        if rest:
            rows[full, self.first[index] : self.first[index] + rest] = flat[-rest:]

    def unpack(self, rows: torch.Tensor, index: int, tensor: torch.Tensor) -> None:
        """Copy tensor `index` from `rows` into `tensor`, which must be contiguous and have the full shape."""
        full, block, rest = self._block(rows, index)
        flat = tensor.view(-1)
        flat[: block.numel()].view(block.shape).copy_(block)
        if rest:
            flat[-rest:] = rows[full, self.first[index] : self.first[index] + rest]

    def pieces(self, row: torch.Tensor, rank: int) -> list[torch.Tensor]:
        """Return a view of each tensor's shard in `row` [length], which is `rank`'s row, without the padding."""
        cuts = [piece_of(count, rank, self.size) for count in self.counts]
        return [row[first : first + cut.stop - cut.start] for first, cut in zip(self.first, cuts, strict=True)]

    def _block(self, rows: torch.Tensor, index: int) -> tuple[int, torch.Tensor, int]:
        """Return the number of rows that tensor `index` fills, its block in these rows, and its remainder's size."""
        first, each = self.first[index], self.each[index]
        full, rest = divmod(self.counts[index], each) if each else (0, 0)
        return full, rows[:full, first : first + each], rest
