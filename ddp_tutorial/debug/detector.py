"""What a detector is, what it finds, and what it knows of the program that it looks at.

`checks` puts detectors to work; each is in a module of its own.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_tutorial.compat import norms, sparse_values
from ddp_tutorial.config import FailedError
from ddp_tutorial.ddp.wrappers import DataParallel
from ddp_tutorial.debug.instrumentation import SHORT, Observable, StepObservation
from ddp_tutorial.world import World

T = TypeVar("T")
LocalReport = Sequence[Sequence[float]]  # what each rank has said, rank 0 first


@dataclass(frozen=True)
class Finding:
    """What a detector has found in the optimizer step `step`, which counts from 1; the same on all ranks.

    `ranks` are those with which something is wrong, `where` is the name of the tensor, parameter, module or phase.
    `seen` is the step in which the ranks told one another of it, where that was a later one than `step`; else 0.
    """

    detector: str
    step: int
    ranks: tuple[int, ...]
    message: str
    severity: Literal["error", "warning"] = "warning"
    where: str = ""
    seen: int = 0

    def __str__(self) -> str:
        return f"step {self.step}: {self.message}" + (f" (seen in step {self.seen})" if self.seen else "")


def named(ranks: Sequence[int]) -> str:
    """`rank 1`, `ranks 0 and 2`, `ranks 0, 1 and 2`: ranks in a sentence."""
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


class CheckError(FailedError):
    """What a check has found makes it pointless to go on. Raised on all ranks in the same step."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding

    def __reduce__(self) -> tuple[type, tuple[Finding]]:
        return CheckError, (self.finding,)


class Program:
    """A program that is checked, as one rank sees it: its model, without the wrapper, and the optimizer."""

    def __init__(
        self,
        world: World,
        model: nn.Module | DataParallel,
        optimizer: torch.optim.Optimizer,
        after: int | Callable[[], int] = 0,
    ) -> None:
        self.world, self.model, self.optimizer = world, model, optimizer
        is_wrapper = isinstance(model, (DistributedDataParallel, DataParallel))
        self.module: nn.Module = model.module if is_wrapper else model  # type: ignore[assignment]
        self.names = {parameter: name for name, parameter in self.module.named_parameters()}
        self.group: dist.ProcessGroup | None = None  # of the checks alone
        self.taken = 0  # steps since the block began
        self._after = after
        self._gradient_of, self._gradient = -1, 0.0  # of which step, and what it was
        self._sizes: Sequence[float | torch.Tensor] = ()

    def gradient(self) -> float:
        """One number for all gradients that the update will use, so after they were averaged; looked at once for each
        step. The same on two ranks with the same gradients, by and large only there. Not finite where one of them is
        not, or has numbers so large that their sum or their squares overflow."""
        if self._gradient_of != self.taken:
            self._sizes = _sizes(self.gradients())
            self._gradient_of, self._gradient = self.taken, _sum(self._sizes)
        return self._gradient

    def gradient_sizes(self) -> Sequence[float | torch.Tensor]:
        """The numbers that `gradient` has added up, one for each of `named_gradients`: sums, or norms on a GPU."""
        self.gradient()
        return self._sizes

    def gradients(self) -> list[torch.Tensor]:
        """The gradients that the optimizer will use; of a sparse one, the values that it holds."""
        found = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        return [sparse_values(each) if each.is_sparse else each for each in found]

    def named_gradients(self) -> list[str]:
        """The names of the parameters that have a gradient."""
        trained = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        return [self.names.get(p, "a parameter that is not the model's") for p in trained]

    @property
    def step(self) -> int:
        """The number of the optimizer step that is under way, or comes next."""
        return (self._after() if callable(self._after) else self._after + self.taken) + 1

    def gather_numbers(self, numbers: torch.Tensor) -> torch.Tensor:
        """[n] of each rank, on the CPU, the same n and type on all -> [ranks, n]. Collective."""
        rows, work = self.start_gather(numbers)
        if work:
            work.wait()
        return rows

    def start_gather(self, numbers: torch.Tensor) -> tuple[torch.Tensor, dist.Work | None]:
        """The same; the rows are complete once the work, if there is any, has been waited for."""
        rows = numbers.new_empty(self.world.size, len(numbers))
        if self.world.size == 1:
            return rows.copy_(numbers), None
        return rows, dist.all_gather(list(rows), numbers, group=self.group, async_op=True)

    def gather(self, obj: T) -> list[T]:
        """What the ranks gave, rank 0's first. Collective; for small things that can be pickled."""
        if self.world.size == 1:
            return [obj]
        things: list[Any] = [None] * self.world.size
        dist.all_gather_object(things, obj, group=self.group)
        return things


def _sizes(gradients: Sequence[torch.Tensor]) -> Sequence[float | torch.Tensor]:
    """Sums where they are on the CPU, in a third of the time that norms take. Elsewhere norms, in one call for all, as
    in torch's clip_grad_norm_: a call for each would be many kernels on a GPU."""
    if all(type(each) is torch.Tensor and each.is_cpu for each in gradients):
        return [(each.sum(dtype=torch.float32) if each.dtype in SHORT else each.sum()).item() for each in gradients]
    return norms(gradients)


def _sum(sizes: Sequence[float | torch.Tensor]) -> float:
    tensors = [each for each in sizes if isinstance(each, torch.Tensor)]
    if not tensors:
        return float(sum(sizes))
    try:
        return float(torch.stack(tensors).sum())
    except RuntimeError:  # they are on several devices
        return math.fsum(map(float, tensors))


class Detector:
    """One question about each optimizer step. A subclass overrides what it needs:

    - `observes`: what it wants to see of a step (see `Instrumentation`).
    - `before_forward`, `after_forward`: around each forward that trains.
    - `say`: before each update, `size` numbers about this rank's step. Local, and cheap.
    - `is_urgent`: after `say`; should the ranks not wait, and this rank's weights not be updated with that gradient?
    - `check`: what the numbers of all ranks come to, for one step after the other, when the ranks have exchanged them:
      before the update of `self.program.step`, which is `step` or a later one. All ranks run it with the same numbers,
      so they may answer with collectives, `self.program.gather`, as long as the numbers alone decide it.
    - `values_to_exchange`: whole numbers that go to all ranks with that exchange, as many on each rank; and
      `on_exchanged`, what the ranks have brought, once it is judged. For more than fits into a step's `size`.
    - `after_update`: after each update; may be collective as well.

    A detector belongs to one block of `checking` at a time.
    """

    name: ClassVar[str]
    size: ClassVar[int] = 0
    observes: ClassVar[frozenset[Observable]] = frozenset()
    program: Program

    def attach(self, program: Program) -> None:
        """The block begins. Collective."""
        self.program = program

    def before_forward(self, inputs: tuple[Any, ...]) -> None: ...

    def after_forward(self, output: Any) -> None: ...

    def local_report(self, observation: StepObservation) -> Sequence[float]:
        return ()

    def is_urgent(self) -> bool:
        return False

    def check(self, step: int, reports: LocalReport) -> list[Finding]:
        return []

    def values_to_exchange(self) -> torch.Tensor | None:
        return None

    def on_exchanged(self, step: int, of_ranks: torch.Tensor) -> list[Finding]:
        return []

    def after_update(self, step: int) -> list[Finding]:
        return []
