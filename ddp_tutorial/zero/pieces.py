"""Which elements of a tensor are whose: pure arithmetic, the same on every rank.

A tensor is cut as one long vector, whatever its shape, into as many pieces as there are ranks; the last ones may be
shorter, or empty. Several tensors travel in one collective, in rows, one for each rank:

    a of 5 elements, b of 2, on 2 ranks         row 0:  a0 a1 a2 b0
                                                row 1:  a3 a4  . b1        . is padding, zero

An all-gather of rows gives every rank all rows; a reduce-scatter adds the rows of all ranks up, and gives row r to rank
r.
"""

from collections.abc import Sequence

import torch

from ddp_tutorial.config import ConfigError


def piece_of(count: int, rank: int, size: int) -> slice:
    """Rank's piece of `count` elements: ceil(count / size) of them, in the order of the ranks, until there are no more.
    As `torch.chunk` and DTensor cut."""
    each = -(-count // size)
    return slice(min(rank * each, count), min((rank + 1) * each, count))


def mark_as_piece(parameter: torch.Tensor) -> None:
    """Mark a parameter as a piece, of which each rank has another, so that a check of replicas does not compare it."""
    parameter.is_piece = True  # type: ignore[attr-defined]


def is_piece(parameter: torch.Tensor) -> bool:
    return getattr(parameter, "is_piece", False)


def require_no_gradient(name: str, parameter: torch.Tensor) -> None:
    """Raise `ConfigError` if a parameter that is about to be sharded has a gradient."""
    if parameter.grad is not None:
        raise ConfigError(f"parameter {name!r} has a gradient, which sharding would lose. Call zero_grad() first")


class Layout:
    """Where the pieces of several tensors are in the rows."""

    def __init__(self, shapes: Sequence[torch.Size], size: int) -> None:
        self.shapes, self.size = list(shapes), size
        self.counts = [shape.numel() for shape in shapes]
        self.each = [-(-count // size) for count in self.counts]  # places of a tensor in a row
        self.first = [sum(self.each[:index]) for index in range(len(self.each))]
        self.length = sum(self.each)  # of a row

    def pack(self, rows: torch.Tensor, index: int, tensor: torch.Tensor) -> None:
        """Copy a whole tensor into its places in `rows` [size, length], cast to their type. Padding stays."""
        full, block, rest = self._block(rows, index)
        flat = tensor.reshape(-1)
        block.copy_(flat[: block.numel()].view(block.shape))
        if rest:
            rows[full, self.first[index] : self.first[index] + rest] = flat[-rest:]

    def unpack(self, rows: torch.Tensor, index: int, tensor: torch.Tensor) -> None:
        """Copy a tensor out of `rows` into `tensor`, which is contiguous and of its shape."""
        full, block, rest = self._block(rows, index)
        flat = tensor.view(-1)
        flat[: block.numel()].view(block.shape).copy_(block)
        if rest:
            flat[-rest:] = rows[full, self.first[index] : self.first[index] + rest]

    def pieces(self, row: torch.Tensor, rank: int) -> list[torch.Tensor]:
        """Views of `rank`'s row [length], one of its piece of each tensor, without padding."""
        cuts = [piece_of(count, rank, self.size) for count in self.counts]
        return [row[first : first + cut.stop - cut.start] for first, cut in zip(self.first, cuts, strict=True)]

    def _block(self, rows: torch.Tensor, index: int) -> tuple[int, torch.Tensor, int]:
        """How many rows a tensor fills, its places in those, and how many elements are in the next one."""
        first, each = self.first[index], self.each[index]
        full, rest = divmod(self.counts[index], each) if each else (0, 0)
        return full, rows[:full, first : first + each], rest
