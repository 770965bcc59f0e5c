"""Where does the first NaN or infinity come from: which rank, which phase, which module or parameter?

Once gradients are added up, all ranks have the NaN of one. So each notes the norms of loss and gradients before that.
An infinity on the way (a mask, or float16 overflowing under a `GradScaler`) is nothing wrong as long as it does not
reach an update: only there an alarm is raised, and the notes say where it began. Outputs of modules are not noted:
after an alarm, each rank computes its forwards of this step once more, with the same inputs, weights and random
numbers, and looks at all outputs of that. The weights are still those of the step, for the alarm comes before the
update. Where only some ranks have such a gradient, the alarm comes later, and the notes alone say where it began.
"""

import math
from collections.abc import Sequence
from typing import ClassVar

from ddp_tutorial.debug.detector import Detector, Finding, LocalReport, Program
from ddp_tutorial.debug.instrumentation import OUTPUT, Observable, StepObservation

# In this order within a step: of ranks that see one in the same step, those where it came first have it of their own.
_PHASES = ("update", "forward", "loss", "backward")


class NonFinite(Detector):
    """Is the gradient finite that the weights are about to be updated with? Asked in each step; no rank updates its
    weights with one that is not. The error comes before that update where all ranks have such a gradient, as they do
    once it is averaged; and when the ranks exchange their numbers where only some have.

    Until then the inputs of a step's forwards are kept. A model whose forward is another one the second time (it draws
    from Python's random numbers, or remembers its last batch) may be told of with its loss or a gradient instead of
    the module where it began; the rank is right all the same.
    """

    name: ClassVar[str] = "nonfinite"
    size: ClassVar[int] = 1
    observes: ClassVar[frozenset[Observable]] = frozenset({"forwards", "losses", "gradients"})

    def attach(self, program: Program) -> None:
        super().attach(program)
        self._seen, self._is_finite = StepObservation(), True
        self._noted: dict[int, tuple[str, str] | None] = {}  # step -> phase and name of the first, by the notes

    def local_report(self, observation: StepObservation) -> Sequence[float]:
        self._seen = observation
        # Numbers may be finite, and their sum or norm too large.
        self._is_finite = math.isfinite(self.program.gradient()) or all(
            bool(each.isfinite().all()) for each in self.program.gradients()
        )
        if not (self._is_finite and math.isfinite(sum(observation.norms))):
            self._noted[self.program.step] = self._spoilt() or observation.first_not_finite()
        return [0.0 if self._is_finite else 1.0]

    def is_urgent(self) -> bool:
        return not self._is_finite

    def after_update(self, step: int) -> list[Finding]:
        self._seen = StepObservation()  # its inputs are not kept through the next step
        return []

    def check(self, step: int, reports: LocalReport) -> list[Finding]:
        noted = self._noted.pop(step, None)
        if not any(numbers[0] for numbers in reports):
            return []
        is_now = step == self.program.step
        origins = self.program.gather(self._origin(self._seen) if is_now else noted)
        phases = [phase for phase in _PHASES for origin in origins if origin and origin[0] == phase]
        if not phases:
            everyone = tuple(rank for rank, numbers in enumerate(reports) if numbers[0])
            message = (
                "the gradient is not finite, though on each rank it was before the ranks added theirs up: the sum has "
                "overflowed, or what came between backward and the update has spoilt it"
            )
            return [Finding(self.name, step, everyone, message, "error", "reduction")]
        first = phases[0]
        at_fault = {rank: origin[1] for rank, origin in enumerate(origins) if origin and origin[0] == first}
        told = "; ".join(f"on rank {rank}, {_describe_origin(first, name)}" for rank, name in at_fault.items())
        where = next(iter(at_fault.values())) or first
        return [Finding(self.name, step, tuple(at_fault), f"a number is not finite. First {told}", "error", where)]

    def _origin(self, seen: StepObservation) -> tuple[str, str] | None:
        """Phase and name of the first on this rank."""
        # All ranks compute forward, whatever they find: there may be collectives in it.
        trace = seen.in_full(self.program.module, self.program.world.device)
        return self._spoilt() or next(((phase, name) for phase, name, norm in trace if not math.isfinite(norm)), None)

    def _spoilt(self) -> tuple[str, str] | None:
        """Weights that were not finite when the step began are the fault of the update before."""
        names = self.program.names.items()
        return next((("update", name) for parameter, name in names if not bool(parameter.isfinite().all())), None)


def _describe_origin(phase: str, name: str) -> str:
    if phase == "update":
        return f"parameter {name!r} was not finite when the step began: the update before it, or what was loaded"
    if phase == "forward":
        return f"in forward, the output of {f'module {name!r}' if name != OUTPUT else 'the model'}"
    if phase == "loss":
        return "the gradient of the loss with respect to the model's output" if name else "the loss"
    return f"in backward, the gradient for parameter {name!r}"
