"""Report the rank, the phase, and the module or parameter of the first NaN or infinity.

The reduction of the gradients spreads a NaN from one rank to all ranks. Each rank therefore records the norms of the
losses and gradients before the reduction. An infinity is not a problem unless it reaches an update. For example,
attention masks contain infinities, and float16 gradients overflow under a `GradScaler`. The detector therefore raises
an error only before an update, and the recorded norms then show the origin.

Module outputs are not recorded. If a gradient is not finite, each rank repeats the step's forward passes with the same
inputs, weights and random numbers, and checks all outputs. The weights have not changed yet, because the check precedes
the update. If only some ranks have a non-finite gradient, the error is raised later, and only the recorded norms show
the origin.
"""

import math
from collections.abc import Sequence
from typing import ClassVar

from ddp_tutorial.debug.detector import Detector, Finding, LocalReport, Program
from ddp_tutorial.debug.instrumentation import OUTPUT, Observable, StepObservation

# In chronological order. If several ranks report an origin, the ranks with the earliest phase are at fault.
_PHASES = ("update", "forward", "loss", "backward")


class NonFinite(Detector):
    """Detector of non-finite gradients. No rank updates its weights with a non-finite gradient.

    If the gradient is non-finite on all ranks, as is the case after averaging, the error is raised before the update.
    If the gradient is non-finite on only some ranks, the error is raised when the ranks exchange their statistics.

    The inputs of the forward passes stay in memory until the update. A repeated forward pass differs from the original
    if the model uses Python's random numbers or depends on the previous batch. The reported origin may then be the loss
    or a gradient instead of the module, but the reported rank is correct.
    """

    name: ClassVar[str] = "nonfinite"
    size: ClassVar[int] = 1
    observes: ClassVar[frozenset[Observable]] = frozenset({"forwards", "losses", "gradients"})

    def attach(self, program: Program) -> None:
        """Reset the detector for a new block."""
        super().attach(program)
        self._seen, self._is_finite = StepObservation(), True
        self._first_norms: dict[int, tuple[str, str] | None] = {}  # step -> phase and name of the first non-finite norm

    def local_report(self, observation: StepObservation) -> Sequence[float]:
        """Return 1 if the gradient is not finite, otherwise 0."""
        self._seen = observation
        # The sum or the norm of finite numbers may overflow.
        self._is_finite = math.isfinite(self.program.gradient()) or all(
            bool(each.isfinite().all()) for each in self.program.gradients()
        )
        if not (self._is_finite and math.isfinite(sum(observation.norms))):
            self._first_norms[self.program.step] = self._first_nonfinite_parameter() or observation.first_not_finite()
        return [0.0 if self._is_finite else 1.0]

    def is_urgent(self) -> bool:
        """Return whether the gradient of this step is not finite."""
        return not self._is_finite

    def after_update(self, step: int) -> list[Finding]:
        """Release the inputs of the step."""
        self._seen = StepObservation()  # do not keep the inputs during the next step
        return []

    def check(self, step: int, reports: LocalReport) -> list[Finding]:
        """Return a finding with the origin if a rank's gradient is not finite. Collective."""
        recorded = self._first_norms.pop(step, None)
        if not any(numbers[0] for numbers in reports):
            return []
        is_now = step == self.program.step
        origins = self.program.gather(self._origin(self._seen) if is_now else recorded)
        phases = [phase for phase in _PHASES for origin in origins if origin and origin[0] == phase]
        if not phases:
            everyone = tuple(rank for rank, numbers in enumerate(reports) if numbers[0])
            message = (
                "the gradient is not finite, although it was finite on each rank before the all-reduce: the sum has "
                "overflowed, or code between the backward pass and the update has changed the gradient"
            )
            return [Finding(self.name, step, everyone, message, "error", "reduction")]
        first = phases[0]
        at_fault = {rank: origin[1] for rank, origin in enumerate(origins) if origin and origin[0] == first}
        description = "; ".join(f"{_describe_origin(first, name)} (rank {rank})" for rank, name in at_fault.items())
        where = next(iter(at_fault.values())) or first
        return [
            Finding(self.name, step, tuple(at_fault), f"a value is not finite, first in {description}", "error", where)
        ]

    def _origin(self, seen: StepObservation) -> tuple[str, str] | None:
        """Locate this rank's first non-finite value. Collective if the forward pass contains collectives."""
        # All ranks repeat the forward pass, because it may contain collectives.
        trace = seen.in_full(self.program.module, self.program.world.device)
        return self._first_nonfinite_parameter() or next(
            ((phase, name) for phase, name, norm in trace if not math.isfinite(norm)), None
        )

    def _first_nonfinite_parameter(self) -> tuple[str, str] | None:
        """Return the first parameter that is not finite before the update of this step, or None."""
        names = self.program.names.items()
        return next((("update", name) for parameter, name in names if not bool(parameter.isfinite().all())), None)


def _describe_origin(phase: str, name: str) -> str:
    if phase == "update":
        return f"parameter {name!r} at the start of the step, after the last update or after loading"
    if phase == "forward":
        return f"the output of {f'module {name!r}' if name != OUTPUT else 'the model'} in the forward pass"
    if phase == "loss":
        return "the gradient of the loss with respect to the model's output" if name else "the loss"
    return f"the gradient of parameter {name!r} in the backward pass"
