"""Faults on purpose: a rank that is killed, raises, hangs, is late, or spoils what the others rely on.

    with inject(world, Fault(action="kill", rank=1, step=3, phase="backward")):
        train(world)

They strike where a phase begins (see `phases`), so what trains need not know of them. A fault whose moment does not
come, since a run ends before its step, say, or never enters its phase, is told of in a warning.
"""

import errno
import logging
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from pydantic import Field
from torch import nn

from ddp_tutorial.config import Config, ConfigError, check, parse_yaml
from ddp_tutorial.files import Operation, observe_disk
from ddp_tutorial.phases import PhaseEvent, observe
from ddp_tutorial.world import World

LOG = logging.getLogger(__name__)

MIB = 1 << 20

Action = Literal["kill", "raise", "hang", "delay", "corrupt", "nan", "skip", "leak", "fill_disk", "oom", "kill_worker"]
# All that this package enters with `phases.phase`, in the order of a run; "gather" and "average" of some strategies.
PhaseName = Literal[
    "load", "data", "grads", "forward", "backward", "finish", "gather", "update", "average", "evaluate", "save",
    "save: collect", "save: copy", "save: write", "save: sync", "save: manifest", "save: rename", "profile", "result",
]  # fmt: skip


class Fault(Config):
    """What goes wrong, on which rank, in which step, at the beginning of which phase.

    - `kill`: SIGKILL. `raise`: an `InjectedError`. `hang`: for ever. `delay`: for `seconds`.
    - `corrupt`: one number of this rank's first gradient is changed, once the ranks have agreed on it.
    - `nan`: this rank's gradient is NaN, before the ranks add theirs up.
    - `skip`: this rank leaves out the next all-reduce that Python asks for.
    - `leak`: from this step on, `megabytes` are kept in each.
    - `oom`: memory runs out; at phase "forward" in the middle of it, else where the phase begins.
    - `kill_worker`: SIGKILL for a process that reads ahead for this rank.
    - `fill_disk`: from then on, no file of this rank can be written that has to survive.
    """

    action: Action = Field(description="What happens; see the list above.")
    rank: int = Field(0, ge=0, description="Rank on which the fault occurs.")
    step: int = Field(1, ge=1, description="Step in which the fault occurs, from 1.")
    phase: PhaseName = Field("grads", description="Phase at whose start the fault occurs.")
    seconds: float = Field(1.0, gt=0, description="Duration of a delay.")
    megabytes: float = Field(10.0, gt=0, description="Size of a leak per step.")

    def __str__(self) -> str:
        return f"{self.action} on rank {self.rank} in step {self.step}, at {self.phase}"


class InjectedError(RuntimeError):
    """The error of a fault that raises."""


def parse(text: str) -> Fault:
    """`kill rank=1 step=3 phase=backward` -> a `Fault`. Raises `ConfigError`."""
    action, *settings = text.split() or [""]
    values: dict[str, object] = {"action": action}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"fault {text!r}: {setting!r} should be of the form name=value, such as rank=1")
        values[name] = parse_yaml(value, f"fault {text!r}")
    return check(Fault, values, f"fault {text!r}")


def check_ranks(faults: Sequence[Fault], ranks: int) -> None:
    """Raise `ConfigError` for a fault of a rank that is not among so many."""
    for fault in faults:
        if fault.rank >= ranks:
            raise ConfigError(f"fault '{fault}': there are {ranks} ranks, so 'rank' is below that")


@contextmanager
def inject_faults(world: World, *faults: Fault, model: nn.Module | None = None) -> Iterator[None]:
    """Inside, what `faults` say goes wrong on this rank. `corrupt`, `nan` and `oom` need the `model`.

    A fault of this rank that has not struck when a `Trainer` has written its result, or else when the block ends, is a
    warning in this rank's log.

    Raises `ConfigError` for a fault of a rank that is not there, or one that lacks its model.
    """
    check_ranks(faults, world.size)
    for fault in faults:
        if fault.action in {"corrupt", "nan", "oom"} and model is None:
            raise ConfigError(f"fault '{fault}': give inject the model, as in inject(world, fault, model=model)")
    with ExitStack() as stack:
        for fault in faults:
            if fault.rank == world.rank:
                striker = stack.enter_context(observe(_Striker(fault, model, stack)))
                stack.callback(striker.tell)
        yield


class _Striker:
    """Waits for the beginning of its phase in its step; what it leaves behind ends with `stack`."""

    def __init__(self, fault: Fault, model: nn.Module | None, stack: ExitStack) -> None:
        self._fault, self._model, self._stack = fault, model, stack
        self._data = self._own = 0  # how often these phases have begun
        self._has_struck = self._has_told = False
        self._kept: list[torch.Tensor] = []

    def __call__(self, edge: PhaseEvent) -> None:
        if not edge.entered:
            if edge.name == "result":  # while the run still has its log
                self.tell()
            return
        self._data += edge.name == "data"
        self._own += edge.name == self._fault.phase
        step = self._data or self._own
        if edge.name != self._fault.phase or step < self._fault.step:
            return
        if self._fault.action == "leak":
            self._has_struck = True
            self._kept.append(torch.ones(int(self._fault.megabytes * MIB / 4)))
        elif step == self._fault.step and not self._has_struck:
            self._has_struck = True
            self._strike()

    def tell(self) -> None:
        """Once, that the fault has not struck, where it has not."""
        if self._has_struck or self._has_told:
            return
        self._has_told = True
        name, own, data = self._fault.phase, self._own, self._data
        if not own:
            why = f"phase {name!r} was never entered"
        elif (data or own) < self._fault.step:
            why = f"the last step was {data or own}"
        else:
            why = f"phase {name!r} was not entered in that step"
        LOG.warning("the fault '%s' has not struck: %s", self._fault, why)

    def _strike(self) -> None:  # a case for each action
        match self._fault.action:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "raise":
                raise InjectedError(f"on purpose: {self._fault}")
            case "hang":
                while True:
                    time.sleep(3600)
            case "delay":
                time.sleep(self._fault.seconds)
            case "corrupt":
                gradient = next(p.grad for p in self._parameters() if p.grad is not None)
                gradient.view(-1)[0] += 1
            case "nan":
                parameter = next(self._parameters())
                spoilt = parameter.register_hook(lambda gradient: gradient * math.nan)
                self._stack.callback(spoilt.remove)
            case "skip":
                self._stack.enter_context(_one_all_reduce_left_out())
            case "oom" if self._fault.phase == "forward":  # after what DDP does at the beginning
                self._stack.enter_context(_failing_once(self._model, self._take_all_memory))
            case "oom":
                self._take_all_memory()
            case "kill_worker":
                self._kill_worker()
            case "fill_disk":
                self._stack.enter_context(observe_disk(_no_space))

    def _kill_worker(self) -> None:
        workers = multiprocessing.active_children()
        if not workers:
            raise ConfigError(f"fault '{self._fault}': nothing reads ahead for this rank: use source.workers=1")
        workers[0].kill()

    def _take_all_memory(self) -> None:
        """More than any machine has addresses for: the error is the allocator's own."""
        torch.empty(1 << 50, dtype=torch.uint8, device=next(self._parameters()).device)

    def _parameters(self) -> Iterator[nn.Parameter]:
        assert self._model is not None, "inject has checked it"
        return (parameter for parameter in self._model.parameters() if parameter.requires_grad)


@contextmanager
def _failing_once(model: nn.Module | None, fail: Callable[[], None]) -> Iterator[None]:
    """The next forward of the model fails at its end."""
    assert model is not None, "inject has checked it"

    def end(*_: object) -> None:
        hook.remove()
        fail()

    hook = model.register_forward_hook(end)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _one_all_reduce_left_out() -> Iterator[None]:
    """The next `dist.all_reduce` of this process returns without doing anything."""
    real: Callable[..., object] = dist.all_reduce

    def put_back() -> None:
        dist.all_reduce = real

    def left_out(*_: object, async_op: bool = False, **__: object) -> object:
        put_back()
        return _Nothing() if async_op else None

    dist.all_reduce = left_out
    try:
        yield
    finally:
        put_back()


class _Nothing:
    """The work of a collective that was left out."""

    def wait(self) -> bool:
        return True


def _no_space(operation: Operation, path: Path) -> None:
    if operation in {"write", "fsync"}:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
