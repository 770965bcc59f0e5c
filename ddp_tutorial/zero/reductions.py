"""Overlap gradient reduce-scatters with the backward pass, and start them in the same order on every rank."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_tutorial.collectives import all_reduce_sum
from ddp_tutorial.compat import after_backward, is_in_backward, tree_leaves
from ddp_tutorial.ddp.buckets import check_dense
from ddp_tutorial.world import World
from ddp_tutorial.zero.pieces import Layout
from ddp_tutorial.zero.shards import Shards


class Reduction:
    """A joint reduction of the gradients of several parameters.

    Each gradient is packed into one row per rank. The rows are summed over the ranks that share one replica of the
    model, and rank r keeps row r. If there are several replicas, each row is then summed over the replicas. The results
    of several backward passes are summed.
    """

    def __init__(self, named: Mapping[str, nn.Parameter], dtype: torch.dtype, shards: Shards) -> None:
        """Compute the layout of rows with dtype `dtype` for the gradients of the parameters in `named`."""
        self.names, self.dtype, self.shards = list(named), dtype, shards
        self.layout = Layout([parameter.shape for parameter in named.values()], shards.size)
        self.used: set[int] = set()  # indices of the parameters that got a gradient on this rank since the last `take`
        self._begin()
        self.forget()

    def _begin(self) -> None:
        self._packed: set[int] = set()
        self._rows: torch.Tensor | None = None
        self._row: torch.Tensor | None = None
        self._late: dict[int, torch.Tensor] = {}
        self._work: dist.Work | None = None
        self._crossing: dist.Work | None = None

    def forget(self) -> None:
        """Discard the gradients of all backward passes before the last `wait`."""
        self.used.clear()
        self._kept: torch.Tensor | None = None  # this rank's row, summed over ranks and backward passes
        self._kept_late: dict[int, torch.Tensor] = {}

    @property
    def is_complete(self) -> bool:
        """Whether the gradients of all parameters have arrived."""
        return len(self._packed) == len(self.names)

    @property
    def has_late(self) -> bool:
        """Whether a parameter received a second gradient before a `wait`, possibly after the rows were sent."""
        return bool(self._kept_late)

    def put(self, index: int, gradient: torch.Tensor) -> None:
        """Pack the gradient of parameter `index`. A second gradient is stored until the next call to `put_late`."""
        if index not in self._packed:
            self.layout.pack(self._zeros(), index, gradient)
            self._packed.add(index)
        else:
            _add(self._late, index, gradient)

    def put_late(self) -> None:
        """Pack the second gradients for the next reduction."""
        late, self._kept_late = self._kept_late, {}
        for index, gradient in late.items():
            self.put(index, gradient)

    def _zeros(self) -> torch.Tensor:
        if self._rows is None:
            self._rows = torch.zeros(
                self.shards.size, self.layout.length, dtype=self.dtype, device=self.shards.world.device
            )
        return self._rows

    def start(self) -> None:
        """Start the reduction. A missing gradient counts as zero. Collective.

        Every rank must start the same reductions in the same order.
        """
        rows = self._zeros()
        if self.shards.size == 1:
            self._row = rows[0]
        elif self.shards.world.backend == "gloo":  # its reduce-scatter is an all-reduce, which sends twice the bytes
            self._row = torch.empty_like(rows)
            flat = self._row.view(-1), rows.view(-1)
            self._work = dist.all_to_all_single(*flat, group=self.shards.inside, async_op=True)
        else:
            self._row = rows.new_empty(self.layout.length)
            self._work = dist.reduce_scatter_tensor(self._row, rows.view(-1), group=self.shards.inside, async_op=True)

    def cross(self, wait: bool) -> bool:
        """Start the sum over the replicas if the sum within this replica is complete. Collective.

        All ranks must call this method for the same reductions in the same order. If `wait` is true, wait for the sum
        within this replica. Return whether the sum over the replicas has started, or True if there is only one replica.
        """
        if self._crossing is None and self.shards.copies > 1:
            if self._work is not None and not (wait or self._work.is_completed()):
                return False
            self._arrive()
            self._crossing = dist.all_reduce(self._row, group=self.shards.across, async_op=True)
        return True

    def _arrive(self) -> None:
        """Wait for the sum within this replica."""
        assert self._row is not None, "the reduction was not started"
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._row.dim() > 1:  # this rank's row, as packed by each rank
            self._row = self._row.sum(0)

    def _complete(self) -> None:
        """Wait for the sum over all ranks."""
        self.cross(wait=True)
        self._arrive()
        if self._crossing is not None:
            self._crossing.wait()

    def wait(self) -> None:
        """Wait for the sum over all ranks, and add the sum to those of earlier backward passes."""
        self._complete()
        assert self._row is not None, "start() sets self._row"
        self._kept = self._row if self._kept is None else self._kept.add_(self._row)
        self.used |= self._packed
        for index, gradient in self._late.items():
            _add(self._kept_late, index, gradient)
        self._begin()

    def discard(self) -> None:
        """Discard the gradients that have been packed since the last `wait`."""
        if self._row is not None:
            self._complete()  # a collective that has started on one rank must complete on all ranks
        self._begin()

    def take(self) -> list[torch.Tensor]:
        """Return this rank's shards of the summed gradients, in the order of the parameters."""
        assert self._kept is not None, "wait() must run before take()"
        row, self._kept = self._kept, None
        self.used.clear()
        return self.layout.pieces(row, self.shards.rank)


def _add(gradients: dict[int, torch.Tensor], index: int, gradient: torch.Tensor) -> None:
    gradients[index] = gradients[index].add_(gradient) if index in gradients else gradient


class Reductions:
    """Reductions of a model. Each reduction starts when its gradients are complete and the previous one has started."""

    def __init__(self, reductions: Iterable[Reduction], world: World) -> None:
        """Store the reductions in the order in which they start, which must be the same on every rank."""
        self.ordered, self.world = list(reductions), world
        self._started = 0
        self._is_open = False  # whether a backward pass has reached the model and has not finished

    def watch(self, output: Any) -> None:
        """Detect when a backward pass reaches `output`, the output of the model.

        The first gradient may arrive in the inner backward pass of a reentrant checkpoint. The end of the inner pass
        must not hide a later error in the outer pass.
        """
        for tensor in tensors_of(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(lambda _: self._open())

    def arrive(self, reduction: Reduction, index: int, parameter: torch.Tensor) -> None:
        """Pack the gradient of `parameter`, clear `.grad`, and start the next reductions whose gradients are complete.

        Autograd calls this method as soon as the gradient is complete.
        """
        check_dense(reduction.names[index], parameter.grad)
        assert parameter.grad is not None, "autograd has just accumulated the gradient"
        self._open()
        reduction.put(index, parameter.grad)
        parameter.grad = None
        while self._started < len(self.ordered) and self.ordered[self._started].is_complete:
            self._start()

    def _open(self) -> None:
        if not self._is_open:
            self._is_open = True
            after_backward(self._close)

    def _close(self) -> None:
        self._is_open = False

    def _start(self) -> None:
        self.ordered[self._started].start()
        self._started += 1
        # NCCL requires the same order over all process groups on every rank, so the order must not depend on timing.
        is_fixed = self.world.backend != "gloo"
        for reduction in self.ordered[: self._started - is_fixed]:
            if not reduction.cross(wait=is_fixed):
                return

    def reduce(self) -> None:
        """Complete all reductions of a backward pass. Collective. Call this method after each backward pass."""
        while self._started < len(self.ordered):
            self._start()
        self._started = 0
        for reduction in self.ordered:
            reduction.wait()

    @property
    def was_interrupted(self) -> bool:
        """Whether the last backward pass raised an error."""
        return self._is_open and not is_in_backward()

    def discard(self) -> None:
        """Discard the gradients that have arrived since the last `reduce`. Collective.

        Call this method after a backward pass that raised an error on all ranks. Ranks that use different parameters
        may have started different reductions, so this method starts the remaining reductions before it discards the
        gradients.
        """
        while self._started < len(self.ordered):
            self._start()
        for reduction in self.ordered:
            reduction.discard()
        self._started, self._is_open = 0, False

    def forget(self) -> None:
        """After a failed step, discard the gradients that have been reduced since the last `take`."""
        for reduction in self.ordered:
            reduction.forget()

    def take(self) -> dict[str, torch.Tensor]:
        """Return this rank's shards of the summed gradients, by parameter name. Collective.

        The result omits empty shards and parameters that no rank has used. To identify unused parameters, the ranks run
        a single all-reduce of one number per parameter.
        """
        names = [name for reduction in self.ordered for name in reduction.names]
        used, has_late = self._agree()
        if has_late:
            for reduction in self.ordered:
                reduction.put_late()
            self.reduce()
        pieces = [piece for reduction in self.ordered for piece in reduction.take()]
        named = zip(names, pieces, used, strict=True)
        return {name: piece for name, piece, is_used in named if is_used and len(piece)}

    def _agree(self) -> tuple[list[bool], bool]:
        """Return whether each parameter was used on any rank, and whether any rank has a second gradient to reduce."""
        flags = [index in each.used for each in self.ordered for index in range(len(each.names))]
        counts = torch.tensor([*flags, any(each.has_late for each in self.ordered)], dtype=torch.int32)
        *used, late = (all_reduce_sum(self.world, counts.to(self.world.device)) > 0).tolist()
        return used, late


def tensors_of(output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a module's output, which may contain pytrees and dataclasses."""
    for leaf in tree_leaves(output):
        if torch.is_tensor(leaf):
            yield leaf
        elif is_dataclass(leaf):
            yield from tensors_of([getattr(leaf, field.name) for field in fields(leaf)])
