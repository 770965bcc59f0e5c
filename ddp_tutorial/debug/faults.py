"""Inject faults that make a rank crash, raise an error, hang, pause, or corrupt its data.

    with inject_faults(world, Fault(action="kill", rank=1, step=3, phase="backward")):
        train(world)

A fault occurs at the start of a phase (see `phases`), so the training code does not depend on this module. If a fault
does not occur, for example because the run finishes before the fault's step, this module logs a warning.
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

import torch
import torch.distributed as dist
from torch import nn

from ddp_tutorial.config import ConfigError
from ddp_tutorial.debug.config import Fault
from ddp_tutorial.files import Operation, observe_disk
from ddp_tutorial.phases import PhaseEvent, observe
from ddp_tutorial.world import World

LOG = logging.getLogger(__name__)

MIB = 1 << 20


class InjectedError(RuntimeError):
    """Raised by the fault action "raise"."""


def check_ranks(faults: Sequence[Fault], ranks: int) -> None:
    """Raise `ConfigError` if a fault's rank does not exist in a world of `ranks` ranks."""
    for fault in faults:
        if fault.rank >= ranks:
            raise ConfigError(f"fault '{fault}': 'rank' must be below the number of ranks ({ranks}), got {fault.rank}")


@contextmanager
def inject_faults(world: World, *faults: Fault, model: nn.Module | None = None) -> Iterator[None]:
    """Inject this rank's `faults` inside the context.

    Faults that do not occur are logged as warnings at the end of the block, or after a `Trainer` writes its result.

    Args:
        world: The participating ranks.
        *faults: The faults of all ranks.
        model: The model, which is required for the actions "corrupt", "nan" and "oom".

    Raises:
        ConfigError: If a fault's rank does not exist, or if a fault requires `model` and `model` is None.
    """
    check_ranks(faults, world.size)
    for fault in faults:
        if fault.action in {"corrupt", "nan", "oom"} and model is None:
            raise ConfigError(f"fault '{fault}' requires the model: use inject_faults(world, fault, model=model)")
    with ExitStack() as stack:
        for fault in faults:
            if fault.rank == world.rank:
                injector = stack.enter_context(observe(_FaultInjector(fault, model, stack)))
                stack.callback(injector.warn_if_missed)
        yield


class _FaultInjector:
    """Phase observer that executes a fault's action when the fault is due."""

    def __init__(self, fault: Fault, model: nn.Module | None, stack: ExitStack) -> None:
        """Store the arguments. `stack` undoes the action's effects at the end of the block."""
        self._fault, self._model, self._stack = fault, model, stack
        self._data = self._own = 0  # number of times that the phase "data" and the fault's phase have started
        self._has_occurred = self._has_warned = False
        self._kept: list[torch.Tensor] = []

    def __call__(self, edge: PhaseEvent) -> None:
        """Count the phases, and execute the action if it is due."""
        if not edge.entered:
            if edge.name == "result":  # warn while the run's log is still open
                self.warn_if_missed()
            return
        self._data += edge.name == "data"
        self._own += edge.name == self._fault.phase
        step = self._data or self._own
        if edge.name != self._fault.phase or step < self._fault.step:
            return
        if self._fault.action == "leak":
            self._has_occurred = True
            self._kept.append(torch.ones(int(self._fault.megabytes * MIB / 4)))
        elif step == self._fault.step and not self._has_occurred:
            self._has_occurred = True
            self._inject()

    def warn_if_missed(self) -> None:
        """Log a single warning if the fault has not occurred."""
        if self._has_occurred or self._has_warned:
            return
        self._has_warned = True
        name, own, data = self._fault.phase, self._own, self._data
        if not own:
            why = f"phase {name!r} was never entered"
        elif (data or own) < self._fault.step:
            why = f"the last step was {data or own}"
        else:
            why = f"phase {name!r} was not entered in that step"
        LOG.warning("the fault '%s' did not occur: %s", self._fault, why)

    def _inject(self) -> None:  # one case for each action
        match self._fault.action:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "raise":
                raise InjectedError(f"injected fault: {self._fault}")
            case "hang":
                while True:
                    time.sleep(3600)
            case "delay":
                time.sleep(self._fault.seconds)
            case "corrupt":
                self._corrupt()
            case "nan":

                def spoil(gradient: torch.Tensor) -> torch.Tensor:
                    hook.remove()
                    return gradient * math.nan

                hook = next(self._parameters()).register_hook(spoil)
                self._stack.callback(hook.remove)
            case "skip":
                self._stack.enter_context(_skip_next_all_reduce())
            case "oom" if self._fault.phase == "forward":  # after DDP's work at the start of the forward pass
                self._stack.enter_context(_fail_in_next_forward(self._model, self._take_all_memory))
            case "oom":
                self._take_all_memory()
            case "kill_worker":
                self._kill_worker()
            case "fill_disk":
                self._stack.enter_context(observe_disk(_no_space))

    def _corrupt(self) -> None:
        gradient = next((p.grad for p in self._parameters() if p.grad is not None), None)
        if gradient is None:
            raise ConfigError(
                f"fault '{self._fault}' requires a gradient, but there is none at the start of this phase. Use a phase "
                "after the backward pass, such as phase=update"
            )
        gradient[(0,) * gradient.dim()] += 1

    def _kill_worker(self) -> None:
        workers = multiprocessing.active_children()
        if not workers:
            raise ConfigError(
                f"fault '{self._fault}' requires a data-loading worker, but this rank has none. Set source.workers=1"
            )
        workers[0].kill()

    def _take_all_memory(self) -> None:
        """Allocate more memory than any machine can address, so that the allocation fails."""
        torch.empty(1 << 50, dtype=torch.uint8, device=next(self._parameters()).device)

    def _parameters(self) -> Iterator[nn.Parameter]:
        assert self._model is not None, "inject_faults requires the model"
        return (parameter for parameter in self._model.parameters() if parameter.requires_grad)


@contextmanager
def _fail_in_next_forward(model: nn.Module | None, fail: Callable[[], None]) -> Iterator[None]:
    """Call `fail` at the end of the model's next forward pass."""
    assert model is not None, "inject_faults requires the model"

    def fail_at_end(*_: object) -> None:
        hook.remove()
        fail()

    hook = model.register_forward_hook(fail_at_end)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _skip_next_all_reduce() -> Iterator[None]:
    """Make the next call to `dist.all_reduce` in this process return without effect."""
    real: Callable[..., object] = dist.all_reduce

    def restore() -> None:
        dist.all_reduce = real

    def skip(*_: object, async_op: bool = False, **__: object) -> object:
        restore()
        return _CompletedWork() if async_op else None

    dist.all_reduce = skip
    try:
        yield
    finally:
        restore()


class _CompletedWork:
    """Completed work handle that represents the skipped collective."""

    def wait(self) -> bool:
        """Return True immediately."""
        return True


def _no_space(operation: Operation, path: Path) -> None:
    if operation in {"write", "fsync"}:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
