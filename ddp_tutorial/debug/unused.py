"""Which parameters get no gradient in a step, and on which ranks? The loss does not depend on them there."""

from collections.abc import Sequence
from typing import ClassVar
from zlib import crc32

from ddp_tutorial.debug.detector import Detector, Finding, LocalReport, Program
from ddp_tutorial.debug.instrumentation import Observable, StepObservation

# So often the ranks tell one another names, at most: which parameters are used may change with every step.
_MOST = 20


class UnusedParameters(Detector):
    """Parameters without a gradient in a step, by name, each told once. A model that is wrapped with
    `find_unused_parameters=True` is let pass.

    Where only some ranks have not used a parameter, torch's DDP may never come to the end of backward on the others,
    and so to no optimizer step: `watching` tells that.
    """

    name: ClassVar[str] = "unused"
    size: ClassVar[int] = 1
    observes: ClassVar[frozenset[Observable]] = frozenset({"gradients"})

    def attach(self, program: Program) -> None:
        super().attach(program)
        self._trained = {name: p for p, name in program.names.items() if p.requires_grad}
        self._is_allowed = bool(getattr(program.model, "find_unused_parameters", False))
        self._known: set[tuple[float, ...]] = set()
        self._told: set[str] = set()
        self._mine: dict[float, list[str]] = {}  # what was said -> the names

    def local_report(self, observation: StepObservation) -> Sequence[float]:
        arrived = observation.gradients.keys()
        if self._is_allowed or not arrived or self._trained.keys() <= arrived:
            return [0.0]
        names = [name for name, p in self._trained.items() if p.requires_grad and name not in arrived]
        said = float(crc32(repr(names).encode())) if names else 0.0
        self._mine[said] = names
        return [said]

    def check(self, step: int, reports: LocalReport) -> list[Finding]:
        key = tuple(number for [number] in reports)
        if not any(key) or key in self._known or len(self._known) == _MOST:
            return []
        self._known.add(key)
        of_ranks = self.program.gather(self._mine.get(key[self.program.world.rank], []))
        names = [name for name in dict.fromkeys(name for each in of_ranks for name in each) if name not in self._told]
        if not names:
            return []
        self._told |= set(names)
        ranks = tuple(rank for rank, each in enumerate(of_ranks) if set(each) & set(names))
        told = ", ".join(f"{name!r}{_on(name, of_ranks)}" for name in names)
        message = (
            f"parameters that got no gradient: {told}. The loss does not depend on them. Use them, freeze them with "
            "requires_grad_(False), or allow it with find_unused_parameters=True"
        )
        return [Finding(self.name, step, ranks, message, "warning", names[0])]


def _on(name: str, of_ranks: Sequence[Sequence[str]]) -> str:
    ranks = [rank for rank, each in enumerate(of_ranks) if name in each]
    return "" if len(ranks) == len(of_ranks) else f" (rank {', '.join(map(str, ranks))} only)"
