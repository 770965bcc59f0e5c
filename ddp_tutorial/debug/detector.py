"""Define `Detector`, `Finding`, and the `Program` that detectors check.

`checks` runs the detectors. Each detector has its own module.
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
LocalReport = Sequence[Sequence[float]]  # the reported values of each rank, in rank order


@dataclass(frozen=True)
class Finding:
    """A problem that a detector reports. All ranks report the same findings.

    Attributes:
        detector: The name of the detector.
        step: The optimizer step in which the problem occurred, counted from 1.
        ranks: The ranks on which the problem occurred.
        message: A description of the problem.
        severity: "error" for a finding that is raised as `CheckError`, or "warning" for a finding that is logged.
        where: The name of the affected tensor, parameter, module or phase.
        seen: The step in which the ranks detected the problem, if that step is later than `step`; otherwise 0.
    """

    detector: str
    step: int
    ranks: tuple[int, ...]
    message: str
    severity: Literal["error", "warning"] = "warning"
    where: str = ""
    seen: int = 0

    def __str__(self) -> str:
        """Return the step and the message."""
        return f"step {self.step}: {self.message}" + (f" (seen in step {self.seen})" if self.seen else "")


class CheckError(FailedError):
    """Raised on all ranks in the same step if a finding is an error or, in strict mode, if there is any finding."""

    def __init__(self, finding: Finding) -> None:
        """Store the finding, and use its text as the error message."""
        super().__init__(str(finding))
        self.finding = finding

    def __reduce__(self) -> tuple[type, tuple[Finding]]:
        """Pickle the exception as its class and its finding."""
        return CheckError, (self.finding,)


class Program:
    """The model and the optimizer that are checked on one rank."""

    def __init__(
        self,
        world: World,
        model: nn.Module | DataParallel,
        optimizer: torch.optim.Optimizer,
        after: int | Callable[[], int] = 0,
    ) -> None:
        """Store the arguments.

        Args:
            world: The participating ranks.
            model: The model, with or without its data-parallel wrapper.
            optimizer: The optimizer of the loop.
            after: The number of steps before the block, or a function that returns the number of completed steps.
        """
        self.world, self.model, self.optimizer = world, model, optimizer
        is_wrapper = isinstance(model, (DistributedDataParallel, DataParallel))
        self.module: nn.Module = model.module if is_wrapper else model  # type: ignore[assignment]
        self.names = {parameter: name for name, parameter in self.module.named_parameters()}
        self.group: dist.ProcessGroup | None = None  # used only by the checks
        self.taken = 0  # steps since the block began
        self._after = after
        self._gradient_of, self._gradient = -1, 0.0  # the step of the cached value, and the value
        self._sizes: Sequence[float | torch.Tensor] = ()

    def gradient(self) -> float:
        """Return one number that represents all gradients of the update. The number is cached until the next step.

        The number is computed from the averaged gradients. The number is the same on ranks with the same gradients, and
        almost always different otherwise. The number is non-finite if a gradient is non-finite, or if the sum of a
        gradient's elements or of their squares overflows.
        """
        if self._gradient_of != self.taken:
            self._sizes = _sizes(self.gradients())
            self._gradient_of, self._gradient = self.taken, _sum(self._sizes)
        return self._gradient

    def gradient_sizes(self) -> Sequence[float | torch.Tensor]:
        """Return the values that the method `gradient` sums, in the order of `named_gradients`.

        On the CPU, each value is the sum of a gradient's elements. On a GPU, each value is the norm of a gradient.
        """
        self.gradient()
        return self._sizes

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients that the optimizer will use, as dense tensors of real numbers.

        A sparse gradient is represented by its values, and a complex gradient by its real and imaginary parts.
        """
        found = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        values = [sparse_values(each) if each.is_sparse else each for each in found]
        return [torch.view_as_real(each.resolve_conj()) if each.is_complex() else each for each in values]

    def named_gradients(self) -> list[str]:
        """Return the names of the parameters that have a gradient."""
        trained = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        return [self.names.get(p, "a parameter that is not the model's") for p in trained]

    @property
    def step(self) -> int:
        """Number of the current optimizer step, or of the next step if no step is in progress."""
        return (self._after() if callable(self._after) else self._after + self.taken) + 1

    def gather_numbers(self, numbers: torch.Tensor) -> torch.Tensor:
        """Gather the tensors of all ranks into one tensor. Collective.

        Args:
            numbers: A CPU tensor [n] with the same length and dtype on all ranks.

        Returns:
            A tensor [ranks, n].
        """
        rows, work = self.start_gather(numbers)
        if work:
            work.wait()
        return rows

    def start_gather(self, numbers: torch.Tensor) -> tuple[torch.Tensor, dist.Work | None]:
        """Start `gather_numbers` asynchronously. Collective.

        Returns:
            The gathered tensor and its work handle. The tensor is valid after the work completes. The handle is None if
            there is only one rank.
        """
        rows = numbers.new_empty(self.world.size, len(numbers))
        if self.world.size == 1:
            return rows.copy_(numbers), None
        return rows, dist.all_gather(list(rows), numbers, group=self.group, async_op=True)

    def gather(self, obj: T) -> list[T]:
        """Return a list with one object from each rank, in rank order. Collective.

        Args:
            obj: A small object that can be pickled.
        """
        if self.world.size == 1:
            return [obj]
        things: list[Any] = [None] * self.world.size
        dist.all_gather_object(things, obj, group=self.group)
        return things


def _sizes(gradients: Sequence[torch.Tensor]) -> Sequence[float | torch.Tensor]:
    """Return each gradient's sum if all gradients are plain CPU tensors; otherwise, return each gradient's norm.

    On the CPU, computing a sum is three times as fast as computing a norm. On a GPU, one call computes all norms, as in
    PyTorch's `clip_grad_norm_`, because separate calls would launch many kernels.
    """
    if all(type(each) is torch.Tensor and each.is_cpu for each in gradients):
        return [(each.sum(dtype=torch.float32) if each.dtype in SHORT else each.sum()).item() for each in gradients]
    return norms(gradients)


def _sum(sizes: Sequence[float | torch.Tensor]) -> float:
    tensors = [each for each in sizes if isinstance(each, torch.Tensor)]
    if not tensors:
        return float(sum(sizes))
    try:
        return float(torch.stack(tensors).sum())
    except RuntimeError:  # the tensors are on several devices
        return math.fsum(map(float, tensors))


class Detector:
    """Base class of detectors. Each detector checks one property of every optimizer step.

    Subclasses override the methods that they need. A detector belongs to one `checking` block at a time.

    Attributes:
        name: The name of the detector in its findings.
        size: The number of values that `local_report` returns.
        observes: The observations that the detector requires; see `Instrumentation`.
        program: The program to check, which the method `attach` sets.
    """

    name: ClassVar[str]
    size: ClassVar[int] = 0
    observes: ClassVar[frozenset[Observable]] = frozenset()
    program: Program

    def attach(self, program: Program) -> None:
        """Prepare the detector for a block that checks `program`. Collective."""
        self.program = program

    def before_forward(self, inputs: tuple[Any, ...]) -> None:
        """Observe the inputs of the model before each forward pass in training."""

    def after_forward(self, output: Any) -> None:
        """Observe the output of the model after each forward pass in training."""

    def local_report(self, observation: StepObservation) -> Sequence[float]:
        """Return `size` numbers that describe this rank's step.

        This method runs before each update. An implementation must be fast, and must not call collectives.
        """
        return ()

    def is_urgent(self) -> bool:
        """Return whether this rank must not update its weights with the current gradient."""
        return False

    def check(self, step: int, reports: LocalReport) -> list[Finding]:
        """Evaluate the reports of all ranks for one step, and return the findings.

        After the exchange, all ranks call this method once per step, with the same arguments. During the call,
        `self.program.step` is at least `step`, and the update of step `self.program.step` is still pending. The method
        may call collectives, such as `self.program.gather`, if the decision to call them depends only on the arguments.

        Args:
            step: The step that the reports describe.
            reports: The values that `local_report` returned on each rank.
        """
        return []

    def values_to_exchange(self) -> torch.Tensor | None:
        """Return a tensor of 64-bit integers to exchange together with the local reports, or None.

        All ranks must return the same number of integers. Use this method for data that does not fit into the `size`
        numbers of a local report.
        """
        return None

    def on_exchanged(self, step: int, of_ranks: torch.Tensor) -> list[Finding]:
        """Evaluate the exchanged values, and return the findings.

        Args:
            step: The last step that the exchange covers.
            of_ranks: The values of all ranks, as a tensor [ranks, n].
        """
        return []

    def after_update(self, step: int) -> list[Finding]:
        """Check the state after the update in step `step`, and return the findings. The method may be collective."""
        return []
