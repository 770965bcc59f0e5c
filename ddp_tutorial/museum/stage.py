"""Test harness that runs many programs per launch, on all ranks or as single processes, and can inject faults.

A program calls `torch.distributed` as usual. Each run uses a new default group, or a single-rank group if the run uses
one process. A group's timeout is `TIMEOUT` seconds instead of 30 minutes. A run that hangs is therefore aborted
quickly, and does not affect the next run.
"""

import io
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ddp_tutorial.collectives import all_gather
from ddp_tutorial.debug import Detector, checking
from ddp_tutorial.debug.checks import Checks
from ddp_tutorial.debug.hangs import RankStatus, diagnose
from ddp_tutorial.debug.recorder import Call, calls
from ddp_tutorial.museum.parts import Program
from ddp_tutorial.processes.errors import lost_connection
from ddp_tutorial.world import World

TIMEOUT = 0.5  # timeout of collectives, in seconds
LONG_TIMEOUT = 20.0  # timeout of a second run if the first may have been slow (a busy machine, no hang)


class CutError(BaseException):
    """Simulated kill, derived from `BaseException` so that `except Exception` does not catch it."""


class StrikeError(RuntimeError):
    """Simulated error in a step."""


@dataclass
class Outcome:
    """Outcome of a run on one rank.

    `error` is "" and `exit_code` is 0 if the program exited normally. For each written file, `saves` contains the
    number of preceding optimizer steps.
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
    """Test harness on one rank. All ranks must run the same programs in the same order.

    Programs write under `scratch`, an empty folder that all ranks share. The creator of `scratch` removes it, even if a
    rank has crashed.
    """

    def __init__(self, world: World, scratch: Path) -> None:
        """Create the harness. Collective.

        Raises:
            ValueError: If the world size is 1.
        """
        if world.size < 2:
            raise ValueError(f"the world size must be at least 2, got {world.size}")
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
        timeout: float = TIMEOUT,
        **settings: Any,
    ) -> list[Outcome]:
        """Run a program, and return its outcomes in rank order on every rank. Collective.

        If `alone` is true, each rank runs the program separately, in a single-rank group.
        """
        limit = timedelta(seconds=timeout)
        group = self._alone if alone else _new_group(limit)
        world = World() if alone else replace(self.world, timeout=limit)
        outcome, began = Outcome(), time.monotonic()
        torch.manual_seed(1000 + self.world.rank)
        with _default(group), _counted(outcome), around(outcome) if around else nullcontext():
            try:
                outcome.result = program(world, *args, **settings)
            except SystemExit as left:
                outcome.exit_code = left.code if isinstance(left.code, int) else 1
                outcome.error = f"SystemExit: {left.code}"
            except (Exception, CutError) as error:
                outcome.error, outcome.exit_code = f"{type(error).__name__}: {error}", 1
        has_waited = time.monotonic() - began >= timeout or lost_connection(outcome.error)
        outcomes = all_gather(self.world, outcome)
        if alone:
            return outcomes
        waited = all_gather(self.world, has_waited)
        if not any(waited):
            with suppress(RuntimeError):
                dist.destroy_process_group(group)
            return outcomes
        of_ranks = self._entered(group, has_waited=has_waited)
        found = diagnose({rank: RankStatus(tuple(each), left="finished") for rank, each in enumerate(of_ranks)})
        # A rank that waited too long for a paused rank raises an error, and therefore misses the next collective.
        gave_up = around is None and any(
            each.error and has_waited and found.collective not in {(call.group, call.number) for call in entered}
            for each, has_waited, entered in zip(outcomes, waited, of_ranks, strict=True)
        )
        if (found.kind in {"none", "slow"} or gave_up) and timeout < LONG_TIMEOUT:
            return self.play(program, *args, around=around, timeout=LONG_TIMEOUT, **settings)
        for each in outcomes:
            each.hang = found.verdict if found.kind not in {"none", "slow"} else ""
        return outcomes

    def folder(self) -> Path:
        """Create a new folder, and return its path, which is the same on all ranks."""
        folder = self.scratch / str(next(self._folders))
        folder.mkdir(exist_ok=True)
        return folder

    def once(self, key: Any, play: Callable[[], list[Outcome]]) -> list[Outcome]:
        """Call `play` once per `key`, and return the cached result, because several invariants use the same run."""
        if key not in self._kept:
            self._kept[key] = play()
        return self._kept[key]

    def _entered(self, group: dist.ProcessGroup, *, has_waited: bool) -> list[list[Call]]:
        """Return the collectives of the group that each rank has entered. Collective."""
        entered = [call for call in calls(2000) if call.group == group.group_name]
        if has_waited and entered:  # torch has aborted the last call
            entered[-1] = replace(entered[-1], done=False)
        return all_gather(self.world, entered)


def _new_group(limit: timedelta) -> dist.ProcessGroup:
    """Create a process group of all ranks with the timeout `limit`. Collective."""
    group: dist.ProcessGroup = dist.new_group(timeout=timedelta(seconds=60))
    dist.distributed_c10d._set_pg_timeout(limit, group)
    return group


@contextmanager
def _default(group: dist.ProcessGroup) -> Iterator[None]:
    """Make `group` the default group for the duration of the block."""
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

    def save(obj: object, f: Any, *args: Any, **options: Any) -> None:
        real(obj, f, *args, **options)
        outcome.saves.append(outcome.steps)

    with register_optimizer_step_post_hook(step), patch.object(torch, "save", save):
        yield


# ---------------------------------------------------------------------------------------------------- faults and checks


def cut_after_step(number: int) -> Around:
    """Return a fault that kills the program immediately after the update of step `number`, before the step is saved."""

    @contextmanager
    def around(outcome: Outcome) -> Iterator[None]:
        def step(*_: Any) -> None:
            if outcome.steps == number:
                raise CutError(f"killed after step {number}")

        with register_optimizer_step_post_hook(step):
            yield

    return around


def cut_in_write(number: int) -> Around:
    """Return a fault that kills the program halfway through writing file `number`, counted from 1."""

    @contextmanager
    def around(outcome: Outcome) -> Iterator[None]:
        counted = torch.save

        def save(obj: object, f: Any, *args: Any, **options: Any) -> None:
            if len(outcome.saves) + 1 < number:
                return counted(obj, f, *args, **options)
            whole = io.BytesIO()
            counted(obj, whole, *args, **options)
            outcome.saves.pop()
            half = whole.getvalue()[: len(whole.getvalue()) // 2]
            if isinstance(f, (str, os.PathLike)):
                Path(f).write_bytes(half)
            else:  # an open file
                f.write(half)
            raise CutError(f"killed while writing file {number}")

        with patch.object(torch, "save", save):
            yield

    return around


@contextmanager
def an_error(outcome: Outcome) -> Iterator[None]:
    """Inject an error by raising `StrikeError` once, in a layer during the second forward pass."""
    layers = 0

    def forward(module: nn.Module, _: Any) -> None:
        nonlocal layers
        layers += isinstance(module, nn.Linear)
        if layers == 3 and not outcome.was_struck:
            outcome.was_struck = True
            raise StrikeError("a bad batch")

    with register_module_forward_pre_hook(forward):
        yield


@contextmanager
def a_sigterm(outcome: Outcome) -> Iterator[None]:
    """Inject a fault by sending SIGTERM to the process after the first optimizer step."""

    def by_default(*_: Any) -> None:
        raise CutError("SIGTERM")

    def step(*_: Any) -> None:
        if not outcome.was_struck:
            outcome.was_struck = True
            signal.raise_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, by_default)  # `_default` restores the handler
    with register_optimizer_step_post_hook(step):
        yield


def checked(world: World, detectors: Callable[[], Sequence[Detector]]) -> Around:
    """Return a wrapper that attaches `checking` (`every=1`) at the first optimizer step, and records its findings."""

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
                    limit = replace(world, timeout=timedelta(seconds=LONG_TIMEOUT))
                    checks.append(stack.enter_context(checking(limit, models[0], optimizer, detectors(), every=1)))

            stack.enter_context(register_module_forward_pre_hook(forward))
            stack.enter_context(register_optimizer_step_pre_hook(step))
            yield
            outcome.findings = [(finding.detector, str(finding)) for each in checks for finding in each.findings]

    return around
