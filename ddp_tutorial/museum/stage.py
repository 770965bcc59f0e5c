"""Where a program is put to the test: played by all ranks or by one, and disturbed on the way, in one launch for many.

A program calls `torch.distributed` as it does anywhere. What it finds there is a group made for this play, which waits
for `PATIENCE` seconds and not for half an hour; or one of a single rank, and then it is the one-process run. So a play
that hangs is over soon, and the next one does not hear of it.
"""

import io
import itertools
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ddp_tutorial.collectives import all_gather
from ddp_tutorial.debug import Detector, checking
from ddp_tutorial.debug.checks import Checks
from ddp_tutorial.debug.hangs import Diagnosis, RankStatus, diagnose
from ddp_tutorial.debug.recorder import calls
from ddp_tutorial.museum.parts import Program
from ddp_tutorial.processes.errors import lost_connection
from ddp_tutorial.world import World

PATIENCE = 0.5  # seconds that a rank waits for the others
LONG_PATIENCE = 20.0  # where ranks that were late have waited in the same collective: a busy machine, not a hang


class CutError(BaseException):
    """Stands for a kill: nothing in a program should catch it."""


class StrikeError(RuntimeError):
    """An error such as any step may have."""


@dataclass
class Outcome:
    """How a play has gone on one rank.

    `error` is empty where the program has returned; `exit_code` is what it left with, 0 where it returned. `saves` has,
    for each file that was written, how many optimizer steps there had been.
    """

    result: Any = None
    error: str = ""
    exit_code: int = 0
    steps: int = 0
    saves: list[int] = field(default_factory=list)
    was_struck: bool = False
    findings: list[tuple[str, str]] = field(default_factory=list)
    hang: str = ""


Around = Callable[[Outcome], AbstractContextManager[None]]


class Stage:
    """The stage as one rank has it. All ranks play the same programs, in the same order. What these write goes below
    `scratch`, an empty folder that all ranks see; whoever has made it removes it, also where a rank has died."""

    def __init__(self, world: World, scratch: Path) -> None:
        if world.size < 2:
            raise ValueError(f"the world has {world.size} rank: what ranks do to one another takes two at least")
        self.world, self.scratch = world, scratch
        self._folders = itertools.count()
        self._kept: dict[Any, list[Outcome]] = {}
        self._alone = dist.new_group([world.rank], use_local_synchronization=True)

    def play(
        self,
        program: Program,
        *args: Any,
        alone: bool = False,
        around: Around | None = None,
        patience: float = PATIENCE,
        **settings: Any,
    ) -> list[Outcome]:
        """Run a program, and return what became of it on all ranks, rank 0's first, the same list on each. With
        `alone`, each rank plays it by itself, in a group of one."""
        limit = timedelta(seconds=patience)
        group = self._alone if alone else _impatient(limit)
        world = World() if alone else replace(self.world, timeout=limit)
        outcome, began = Outcome(), time.monotonic()
        torch.manual_seed(1000 + self.world.rank)
        with _default(group), _counted(outcome), (around or _undisturbed)(outcome):
            try:
                outcome.result = program(world, *args, **settings)
            except SystemExit as left:
                outcome.exit_code = left.code if isinstance(left.code, int) else 1
                outcome.error = f"SystemExit: {left.code}"
            except (Exception, CutError) as error:
                outcome.error, outcome.exit_code = f"{type(error).__name__}: {error}", 1
        has_waited = time.monotonic() - began >= patience or lost_connection(outcome.error)
        outcomes = all_gather(self.world, outcome)
        if alone or not any(all_gather(self.world, has_waited)):
            if not alone:
                with suppress(RuntimeError):
                    dist.destroy_process_group(group)
            return outcomes
        found = self._diagnosed(group, has_waited=has_waited)
        if found.kind in {"none", "slow"} and patience < LONG_PATIENCE:
            return self.play(program, *args, around=around, patience=LONG_PATIENCE, **settings)
        for each in outcomes:
            each.hang = found.verdict if found.kind not in {"none", "slow"} else ""
        return outcomes

    def folder(self) -> Path:
        """A new folder, the same on all ranks."""
        folder = self.scratch / str(next(self._folders))
        folder.mkdir(exist_ok=True)
        return folder

    def once(self, key: Any, play: Callable[[], list[Outcome]]) -> list[Outcome]:
        """What `play` returns, which is run the first time only: several laws may ask about the same play."""
        if key not in self._kept:
            self._kept[key] = play()
        return self._kept[key]

    def _diagnosed(self, group: dist.ProcessGroup, *, has_waited: bool) -> Diagnosis:
        """Which collectives of the group they have entered, and in which one they differ."""
        entered = [call for call in calls(2000) if call.group == group.group_name]
        if has_waited and entered:  # torch has given it up
            entered[-1] = replace(entered[-1], done=False)
        of_ranks = all_gather(self.world, entered)
        return diagnose({rank: RankStatus(tuple(each), left="well") for rank, each in enumerate(of_ranks)})


def _impatient(limit: timedelta) -> dist.ProcessGroup:
    """A group of all ranks, which wait in its collectives for `limit` at most. To make it may take longer than that."""
    group: dist.ProcessGroup = dist.new_group(timeout=timedelta(seconds=60))
    dist.distributed_c10d._set_pg_timeout(limit, group)
    return group


@contextmanager
def _default(group: dist.ProcessGroup) -> Iterator[None]:
    """Inside, `group` is the one that collectives use where none is named."""
    before, handler = dist.group.WORLD, signal.getsignal(signal.SIGTERM)
    dist.group.WORLD = group
    try:
        yield
    finally:
        dist.group.WORLD = before
        signal.signal(signal.SIGTERM, handler)


@contextmanager
def _counted(outcome: Outcome) -> Iterator[None]:
    def step(*_: Any) -> None:
        outcome.steps += 1

    real = torch.save

    def save(state: object, path: Any, *args: Any, **options: Any) -> None:
        real(state, path, *args, **options)
        outcome.saves.append(outcome.steps)

    hook = register_optimizer_step_post_hook(step)
    torch.save = save  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.save = real
        hook.remove()


@contextmanager
def _undisturbed(outcome: Outcome) -> Iterator[None]:
    yield


# ---------------------------------------------------------------------------------------------- what happens on the way


def cut_after_step(number: int) -> Around:
    """A disturbance: the program is cut right after the update of step `number`, before anything of it is saved."""

    @contextmanager
    def around(outcome: Outcome) -> Iterator[None]:
        def step(*_: Any) -> None:
            if outcome.steps == number:
                raise CutError(f"after step {number}")

        hook = register_optimizer_step_post_hook(step)
        try:
            yield
        finally:
            hook.remove()

    return around


def cut_in_write(number: int) -> Around:
    """A disturbance: the program is cut when half of the file that it writes as its `number`-th is written."""

    @contextmanager
    def around(outcome: Outcome) -> Iterator[None]:
        counted = torch.save

        def save(state: object, path: Any, *args: Any, **options: Any) -> None:
            if len(outcome.saves) + 1 < number:
                return counted(state, path, *args, **options)
            whole = io.BytesIO()
            counted(state, whole, *args, **options)
            outcome.saves.pop()
            Path(path).write_bytes(whole.getvalue()[: len(whole.getvalue()) // 2])
            raise CutError(f"in the middle of file {number}")

        torch.save = save  # type: ignore[assignment]
        try:
            yield
        finally:
            torch.save = counted

    return around


@contextmanager
def an_error(outcome: Outcome) -> Iterator[None]:
    """A disturbance: in the second forward a layer raises a `StrikeError`, once."""
    layers = 0

    def forward(module: nn.Module, _: Any) -> None:
        nonlocal layers
        layers += isinstance(module, nn.Linear)
        if layers == 3 and not outcome.was_struck:
            outcome.was_struck = True
            raise StrikeError("a bad batch")

    hook = register_module_forward_pre_hook(forward)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def a_sigterm(outcome: Outcome) -> Iterator[None]:
    """A disturbance: after the first update the process is sent SIGTERM."""

    def by_default(*_: Any) -> None:
        raise CutError("SIGTERM")

    def step(*_: Any) -> None:
        if not outcome.was_struck:
            outcome.was_struck = True
            signal.raise_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, by_default)
    hook = register_optimizer_step_post_hook(step)
    try:
        yield
    finally:
        hook.remove()


def checked(world: World, detectors: Callable[[], Sequence[Detector]]) -> Around:
    """`checking` is attached when the first optimizer makes its first step. What is found is told in the same step."""

    @contextmanager
    def around(outcome: Outcome) -> Iterator[None]:
        models: list[nn.Module] = []
        checks: list[Checks] = []

        def forward(module: nn.Module, _: Any) -> None:
            if torch.is_grad_enabled() and not models:
                models.append(module)

        with ExitStack() as stack:

            def step(optimizer: Optimizer, *_: Any) -> None:
                if not checks and models:
                    limit = replace(world, timeout=timedelta(seconds=LONG_PATIENCE))
                    checks.append(stack.enter_context(checking(limit, models[0], optimizer, detectors(), every=1)))

            for hook in (register_module_forward_pre_hook(forward), register_optimizer_step_pre_hook(step)):
                stack.callback(hook.remove)
            yield
            outcome.findings = [(finding.detector, str(finding)) for each in checks for finding in each.findings]

    return around
