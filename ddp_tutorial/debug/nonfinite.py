"""Where does the first NaN or infinity come from: which rank, which phase, which module or parameter?

Once gradients are added up, all ranks have the NaN of one. So each notes the norms of loss and gradients before that.
An infinity on the way (a mask, or float16 overflowing under a `GradScaler`) is nothing wrong as long as it does not
reach an update: only there an alarm is raised, and the notes say where it began. Outputs of modules are not noted:
after an alarm, each rank computes its forwards of this step once more, with the same inputs, weights and random
numbers, and looks at all outputs of that. The weights are still those of the step, for the alarm comes before the
update.
"""

import math
from collections.abc import Sequence
from typing import ClassVar

from ddp_tutorial.debug.detector import Detector, Finding, Said
from ddp_tutorial.debug.taps import OUTPUT, Seen, Sight

# In this order within a step: of ranks that see one in the same step, those where it came first have it of their own.
_PHASES = ("update", "forward", "loss", "backward")


class NonFinite(Detector):
    """Is the gradient finite that the weights are about to be updated with? The error comes before that, in each step.

    Until then the inputs of a step's forwards are kept. A model whose forward is another one the second time (it draws
    from Python's random numbers, or remembers its last batch) may be told of with its loss or a gradient instead of
    the module where it began; the rank is right all the same.
    """

    name: ClassVar[str] = "nonfinite"
    size: ClassVar[int] = 1
    sights: ClassVar[frozenset[Sight]] = frozenset({"forwards", "losses", "gradients"})

    def say(self, seen: Seen) -> Sequence[float]:
        self._seen = seen
        if math.isfinite(self.program.gradient()):
            return [0.0]
        # Numbers above 1e19 are finite, and their norm is not.
        return [0.0 if all(bool(each.isfinite().all()) for each in self.program.gradients()) else 1.0]

    def judge(self, step: int, said: Said) -> list[Finding]:
        seen, self._seen = self._seen, Seen()  # its inputs are not kept through the next step
        if not any(numbers[0] for numbers in said):
            return []
        origins = self.program.gather(self._origin(seen))
        phases = [phase for phase in _PHASES for origin in origins if origin and origin[0] == phase]
        if not phases:
            everyone = tuple(rank for rank, numbers in enumerate(said) if numbers[0])
            message = (
                "the gradient is not finite, though on each rank it was before the ranks added theirs up: the sum has "
                "overflowed, or what came between backward and the update has spoilt it"
            )
            return [Finding(self.name, step, everyone, message, "error", "reduction")]
        first = phases[0]
        at_fault = {rank: origin[1] for rank, origin in enumerate(origins) if origin and origin[0] == first}
        told = "; ".join(f"on rank {rank}, {_told(first, name)}" for rank, name in at_fault.items())
        where = next(iter(at_fault.values())) or first
        return [Finding(self.name, step, tuple(at_fault), f"a number is not finite. First {told}", "error", where)]

    def _origin(self, seen: Seen) -> tuple[str, str] | None:
        """Phase and name of the first on this rank. Weights that were not finite when the step began are the fault of
        the update before."""
        # All ranks compute forward, whatever they find: there may be collectives in it.
        trace = seen.in_full(self.program.module, self.program.world.device)
        spoilt = [name for parameter, name in self.program.names.items() if not bool(parameter.isfinite().all())]
        if spoilt:
            return "update", spoilt[0]
        return next(((phase, name) for phase, name, norm in trace if not math.isfinite(norm)), None)


def _told(phase: str, name: str) -> str:
    if phase == "update":
        return f"parameter {name!r} was not finite when the step began: the update before it, or what was loaded"
    if phase == "forward":
        return f"in forward, the output of {f'module {name!r}' if name != OUTPUT else 'the model'}"
    if phase == "loss":
        return "the gradient of the loss with respect to the model's output" if name else "the loss"
    return f"in backward, the gradient for parameter {name!r}"
