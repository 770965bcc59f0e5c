"""One function to start a script's ranks with, wherever the script is started.

def main(world):
    ...

if __name__ == "__main__":
    run(main, nprocs=2)

python train.py                               # starts two ranks on this machine
torchrun --nproc-per-node 4 train.py          # torchrun has started four; each of them is a rank
srun --ntasks 8 python train.py               # and so with Slurm
"""

import gc
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from ddp_tutorial.compat import import_dynamo
from ddp_tutorial.config import ConfigError
from ddp_tutorial.processes.errors import RankError
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.processes.script import require_guard
from ddp_tutorial.processes.signals import SIGNALS, die_with_parent
from ddp_tutorial.world import COLLECTIVE_TIMEOUT, World, is_launched_rank, process_group

Result = TypeVar("Result")


def run(
    main: Callable[..., Result],
    *args: Any,
    nprocs: int = 2,
    device: str = "auto",
    backend: str = "auto",
    collective_timeout: float = COLLECTIVE_TIMEOUT.total_seconds(),
    **launch_options: Any,
) -> Result:
    """Call `main(world, *args)` on every rank, with the process group up, and return its result.

    Where torchrun or Slurm's `srun` started this process, it is one of the ranks: it joins the others, and returns what
    `main` returned here. Else `nprocs` ranks are started on this machine, and rank 0's result is returned.

    `device` is "cpu", "cuda" or "auto", `backend` "gloo", "nccl" or "auto", and `collective_timeout` how many seconds a
    rank waits in a collective for the others. `launch_options` are those of `launch`, and of use only where ranks are
    started here: `threads`, `echo`, and so on. Unlike `launch`, it passes SIGTERM and SIGUSR1 on to the ranks, so that
    training may save before it ends; ranks that do not handle them, or not yet, end, and `StoppedError` is raised.

    Raises `ConfigError` where a setting or the environment cannot be used, also if that is found on a rank. Whatever
    else goes wrong on a rank arrives as it was raised where this process is that rank, and as a `RankError` where the
    ranks were started here.
    """
    require_guard("run")
    if is_launched_rank():
        here = World.detect(device=device, backend=backend, timeout=timedelta(seconds=collective_timeout))
        return _join(main, args, here)
    options: dict[str, Any] = {"device": device, "backend": backend, "collective_timeout": collective_timeout}
    options |= {"forward_signals": SIGNALS} | launch_options
    try:
        return launch(main, nprocs, *args, **options)[0]
    except RankError as error:
        if error.is_a(ConfigError):  # one line for the person who set it; the ranks' tracebacks would hide it
            raise ConfigError(error.message) from None
        # without the frames inside `launch`, which say nothing about the fault
        raise error.with_traceback(None) from error.__cause__


def _join(main: Callable[..., Result], args: tuple[Any, ...], here: World) -> Result:
    if "TORCHELASTIC_RUN_ID" in os.environ:  # else a killed agent's ranks train on, with nobody to start them again
        die_with_parent()
    import_dynamo()  # before the process group, which it would otherwise keep alive: see `process_group`

    with process_group(here) as world:
        try:
            return main(world, *args)
        except BaseException as error:
            _let_go_of_frames(error)
            raise
        finally:
            gc.collect()  # what is held by a cycle, such as a Trainer's


def _let_go_of_frames(error: BaseException | None) -> None:
    """Clear the variables that an error's traceback keeps alive, in functions that it has ended.

    A `DistributedDataParallel` among them would outlive its group, and gloo's threads with it; those can abort or hang
    a process that ends by itself; torch 2.13. Ranks of `launch` do not: see `rank`.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
