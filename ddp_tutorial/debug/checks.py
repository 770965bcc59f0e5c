"""Checks of a training program while it runs, on all ranks alike: of any loop over an optimizer, ours or yours.

    with checking(world, model, optimizer) as checks:
        for batch in loader:
            loss(model(batch)).backward()
            optimizer.step()                  # raises CheckError, on all ranks, where something is wrong
            optimizer.zero_grad()
    checks.findings                           # the warnings

Nothing has to be called in the loop. Before each optimizer step every rank says a few numbers about the step, one line
of them goes to all in one all-gather, and all judge them alike: so all raise, or none does. The ranks talk in a process
group of their own. A rank that does not come to its optimizer step makes the others wait for it there, as it would in
backward: put `watching` around it, which says where everybody is. Of a rank that has left the block the others hear
in the same step.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_tutorial.config import FailedError
from ddp_tutorial.ddp.variants import DataParallel
from ddp_tutorial.debug.taps import Seen, Sight, Taps
from ddp_tutorial.world import World, require_group

LOG = logging.getLogger(__name__)
Thing = TypeVar("Thing")
Said = Sequence[Sequence[float]]  # what each rank has said, rank 0 first


@dataclass(frozen=True)
class Finding:
    """What a detector has found in the optimizer step `step`, which counts from 1; the same on all ranks.

    `ranks` are those with which something is wrong, `where` is the name of the tensor, parameter, module or phase.
    """

    detector: str
    step: int
    ranks: tuple[int, ...]
    message: str
    severity: Literal["error", "warning"] = "warning"
    where: str = ""

    def __str__(self) -> str:
        return f"step {self.step}: {self.message}"


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


class Detector:
    """One question about each optimizer step. A subclass overrides what it needs:

    - `sights`: what it wants to see of a step (see `Taps`).
    - `forward_begins`, `forward_ends`: around each forward that trains.
    - `say`: before the update, `size` numbers about this rank's step. Local, and cheap.
    - `judge`: what the numbers of all ranks come to. All ranks run it with the same numbers, so they may answer with
      collectives, `self.checks.gather`, as long as the numbers alone decide it.
    - `updated`: after the update; may be collective as well.

    A detector belongs to one block of `checking` at a time.
    """

    name: ClassVar[str]
    size: ClassVar[int] = 0
    sights: ClassVar[frozenset[Sight]] = frozenset()
    checks: "Checks"

    def attach(self, checks: "Checks") -> None:
        """The block begins. Collective."""
        self.checks = checks

    def forward_begins(self, inputs: tuple[Any, ...]) -> None: ...

    def forward_ends(self, output: Any) -> None: ...

    def say(self, seen: Seen) -> Sequence[float]:
        return ()

    def judge(self, step: int, said: Said) -> list[Finding]:
        return []

    def updated(self, step: int) -> list[Finding]:
        return []


class Checks:
    """The detectors of one block on one rank, and what they have found so far, in `findings`."""

    def __init__(
        self,
        world: World,
        model: nn.Module | DataParallel,
        optimizer: torch.optim.Optimizer,
        detectors: Sequence[Detector],
        *,
        strict: bool,
        after: int | Callable[[], int],
    ) -> None:
        is_wrapper = isinstance(model, (DistributedDataParallel, DataParallel))
        self.module: nn.Module = model.module if is_wrapper else model  # type: ignore[assignment]
        self.world, self.optimizer, self.detectors, self.strict = world, optimizer, list(detectors), strict
        self.findings: list[Finding] = []
        self.names = {parameter: name for name, parameter in self.module.named_parameters()}
        self._after, self._taken = after, 0
        self._group: dist.ProcessGroup | None = None
        self._store: dist.Store | None = None
        begins = [each for each in detectors if type(each).forward_begins is not Detector.forward_begins]
        ends = [each for each in detectors if type(each).forward_ends is not Detector.forward_ends]
        self._taps = Taps(
            self.module,
            frozenset[Sight]().union(*(each.sights for each in detectors)),
            [each.forward_begins for each in begins],
            [each.forward_ends for each in ends],
        )

    @property
    def step(self) -> int:
        """The number of the optimizer step that is under way, or comes next."""
        return (self._after() if callable(self._after) else self._after + self._taken) + 1

    def gather(self, thing: Thing) -> list[Thing]:
        """What the ranks gave, rank 0's first. Collective; for small things that can be pickled."""
        if self.world.size == 1:
            return [thing]
        things: list[Any] = [None] * self.world.size
        dist.all_gather_object(things, thing, group=self._group)
        return things

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Inside, the detectors are at work. Collective to enter."""
        world = self.world
        require_group(world)
        with ExitStack() as stack:
            if world.size > 1:
                self._group = dist.new_group(timeout=world.timeout, backend="gloo")  # on GPUs too: small things
                store = dist.distributed_c10d._get_default_store()
                self._store = dist.PrefixStore(f"checking {self._group.group_name}", store)
                stack.push(self._leave)
                names = self.gather([each.name for each in self.detectors])
                if any(each != names[0] for each in names):
                    raise ValueError(f"the ranks have different detectors: {names}")
            for each in self.detectors:
                each.attach(self)
            stack.enter_context(self._taps)
            for hook in (
                self.optimizer.register_step_pre_hook(self._before_update),
                self.optimizer.register_step_post_hook(self._after_update),
            ):
                stack.callback(hook.remove)
            yield

    def _leave(self, kind: type[BaseException] | None, *_: object) -> None:
        """The block is over for this rank, and others may wait for it. Where an error ends it, that says more."""
        if kind is None and self._store is not None:
            with suppress(RuntimeError):  # the store is gone, and with it all the others
                self._store.set(str(self.world.rank), str(self.step - 1))
        group, self._group = self._group, None
        with suppress(RuntimeError, ValueError):
            dist.destroy_process_group(group)

    def _before_update(self, *_: Any) -> None:
        step, seen = self.step, self._taps.take()
        said = [list(each.say(seen)) for each in self.detectors]
        of_ranks = self._exchange([number for each in said for number in each])
        place = 0
        for each, numbers in zip(self.detectors, said, strict=True):
            part = slice(place, place + len(numbers))
            self._report(each.judge(step, [row[part] for row in of_ranks]))
            place += len(numbers)

    def _after_update(self, *_: Any) -> None:
        step = self.step
        for each in self.detectors:
            self._report(each.updated(step))
        self._taken += 1

    def _exchange(self, numbers: list[float]) -> list[list[float]]:
        """A row of numbers from each rank. Raises `CheckError` where one has left the block."""
        if self.world.size == 1 or not numbers:
            return [numbers] * self.world.size
        mine = torch.tensor(numbers, dtype=torch.float64)
        rows = torch.empty(self.world.size * len(numbers), dtype=torch.float64)
        try:
            dist.all_gather_into_tensor(rows, mine, group=self._group)
        except RuntimeError as error:
            gone = self._gone()
            if not gone:
                raise
            told = ", ".join(f"rank {rank} after step {step}" for rank, step in gone.items())
            message = f"the ranks take different numbers of steps: {told} has left the block that is checked"
            raise CheckError(Finding("steps", self.step, tuple(gone), message, "error")) from error
        of_ranks: list[list[float]] = rows.view(self.world.size, -1).tolist()
        return of_ranks

    def _gone(self) -> dict[int, int]:
        """The ranks that have left without an error, and after which step."""
        gone: dict[int, int] = {}
        with suppress(RuntimeError):
            for rank in range(self.world.size):
                if self._store is not None and self._store.check([str(rank)]):
                    gone[rank] = int(self._store.get(str(rank)))
        return gone

    def _report(self, findings: Sequence[Finding]) -> None:
        """Keep them; warn; raise where one is an error, the first of them."""
        self.findings += findings
        for finding in findings:
            if finding.severity == "error" or self.strict:
                raise CheckError(finding)
            if self.world.is_main:
                LOG.warning("%s", finding)


def default_detectors() -> list[Detector]:
    """The set that `checking` uses where none is named."""
    from ddp_tutorial.debug.nonfinite import NonFinite
    from ddp_tutorial.debug.overlap import DataOverlap, SameRandomNumbers
    from ddp_tutorial.debug.replicas import ReplicaDrift

    return [NonFinite(), ReplicaDrift(), DataOverlap(), SameRandomNumbers()]


@contextmanager
def checking(
    world: World,
    model: nn.Module | DataParallel,
    optimizer: torch.optim.Optimizer,
    detectors: Sequence[Detector] | None = None,
    *,
    strict: bool = False,
    after: int | Callable[[], int] = 0,
) -> Iterator[Checks]:
    """Inside, each step of `optimizer` is checked by `detectors`, by default `default_detectors()`. Collective.

    Raises `CheckError` from `optimizer.step()`, on all ranks, for what makes it pointless to go on; with `strict`, for
    all findings. Others are warnings in the log, of rank 0. `after` is how many steps have been taken before, or a
    function that says how many have been so far. Raises `ValueError` where the ranks have different detectors.
    """
    checks = Checks(
        world,
        model,
        optimizer,
        default_detectors() if detectors is None else detectors,
        strict=strict,
        after=after,
    )
    with checks.attached():
        yield checks
