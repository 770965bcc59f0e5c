"""Detect parameters that receive no gradient in a step because the loss does not depend on them."""

from collections.abc import Sequence
from typing import ClassVar
from zlib import crc32

from ddp_tutorial.config import named_ranks
from ddp_tutorial.debug.detector import Detector, Finding, LocalReport, Program
from ddp_tutorial.debug.instrumentation import Observable, StepObservation

# Maximum number of times that the ranks exchange names, because the unused parameters may change in every step.
_MOST = 20


class UnusedParameters(Detector):
    """Detector of parameters without a gradient. The detector reports each parameter once, by name.

    The detector skips models with `find_unused_parameters=True`. If only some ranks use a parameter, these ranks may
    block in the backward pass of PyTorch's DDP, before the optimizer step. Use `watching` to detect such a hang.
    """

    name: ClassVar[str] = "unused"
    size: ClassVar[int] = 1
    observes: ClassVar[frozenset[Observable]] = frozenset({"gradients"})

    def attach(self, program: Program) -> None:
        """Reset the detector for a new block."""
        super().attach(program)
        self._trained = {name: p for p, name in program.names.items() if p.requires_grad}
        self._is_allowed = bool(getattr(program.model, "find_unused_parameters", False))
        self._known: set[tuple[float, ...]] = set()
        self._named: set[str] = set()
        self._mine: dict[int, list[str]] = {}  # step -> the names, until exchanged

    def local_report(self, observation: StepObservation) -> Sequence[float]:
        """Return a checksum of the names of the unused parameters, or 0 if all parameters are used."""
        arrived = observation.gradients.keys()
        if self._is_allowed or not arrived or self._trained.keys() <= arrived:
            return [0.0]
        names = [name for name, p in self._trained.items() if p.requires_grad and name not in arrived]
        if not names:
            return [0.0]
        self._mine[self.program.step] = names
        return [float(crc32(repr(names).encode()))]

    def check(self, step: int, reports: LocalReport) -> list[Finding]:
        """Return a finding for new unused parameters. Collective if the checksums are new."""
        mine = self._mine.pop(step, [])
        key = tuple(number for [number] in reports)
        if not any(key) or key in self._known or len(self._known) == _MOST:
            return []
        self._known.add(key)
        of_ranks = self.program.gather(mine)
        names = [name for name in dict.fromkeys(name for each in of_ranks for name in each) if name not in self._named]
        if not names:
            return []
        self._named |= set(names)
        ranks = tuple(rank for rank, each in enumerate(of_ranks) if set(each) & set(names))
        unused = ", ".join(f"{name!r}{_on(name, of_ranks)}" for name in names)
        message = (
            f"parameters that received no gradient: {unused}. The loss does not depend on them. Use them, freeze them "
            "with requires_grad_(False), or allow unused parameters with find_unused_parameters=True"
        )
        return [Finding(self.name, step, ranks, message, "warning", names[0])]


def _on(name: str, of_ranks: Sequence[Sequence[str]]) -> str:
    ranks = [rank for rank, each in enumerate(of_ranks) if name in each]
    return "" if len(ranks) == len(of_ranks) else f" ({named_ranks(ranks)} only)"
