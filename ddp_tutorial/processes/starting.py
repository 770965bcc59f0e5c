"""Start a script's ranks with the same function call under any launcher.

    def main(world):
        ...

    if __name__ == "__main__":
        run(main, nprocs=2)

The same script supports three launchers:

    python train.py                               # starts two ranks on this machine
    torchrun --nproc-per-node 4 train.py          # torchrun starts four processes, and each process is a rank
    srun --ntasks 8 python train.py               # Slurm starts eight processes
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
    """Call `main(world, *args)` on every rank with an initialized process group, and return the result.

    If torchrun or Slurm's `srun` started this process, the process is one of the ranks. In that case, `run` joins the
    process group and returns this rank's result. Otherwise, `run` launches `nprocs` ranks on this machine and returns
    rank 0's result.

    Unlike `launch`, `run` forwards SIGTERM and SIGUSR1 to the ranks, so that the ranks can save a checkpoint before
    they exit. If a rank has not installed a handler for the signal, `run` raises `StoppedError`.

    Args:
        main: Function to run on every rank, with the rank's `World` as its first argument.
        *args: Additional arguments for `main`.
        nprocs: Number of ranks to launch if no launcher started this process.
        device: "cpu", "cuda" or "auto".
        backend: "gloo", "nccl" or "auto".
        collective_timeout: Timeout in seconds for each collective, after which the waiting ranks raise an error.
        **launch_options: Additional arguments for `launch`, such as `threads` and `echo`, which have no effect under
            torchrun and Slurm.

    Raises:
        ConfigError: If a setting or the environment is invalid. The error may originate on any rank.
        RankError: If a rank that was launched here failed. Under torchrun and Slurm, this rank's exception is raised
            unchanged.
        StoppedError: If a signal stopped ranks that were launched here and had not installed a handler for the signal.
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
        if error.is_a(ConfigError):  # a one-line message; the ranks' tracebacks would hide it
            raise ConfigError(error.message) from None
        # omit the frames inside `launch`, which do not explain the failure
        raise error.with_traceback(None) from error.__cause__


def _join(main: Callable[..., Result], args: tuple[Any, ...], here: World) -> Result:
    if "TORCHELASTIC_RUN_ID" in os.environ:  # otherwise the ranks of a killed agent would keep training
        die_with_parent()
    import_dynamo()  # an import after `process_group` would keep the group alive; see `process_group`

    with process_group(here) as world:
        try:
            return main(world, *args)
        except BaseException as error:
            _clear_frames(error)
            raise
        finally:
            gc.collect()  # free objects in reference cycles, such as a Trainer


def _clear_frames(error: BaseException | None) -> None:
    """Clear the local variables in the frames of an error's traceback.

    A `DistributedDataParallel` among these variables would outlive its process group. Gloo's threads would then also
    survive, and could abort or hang the process on exit (torch 2.13). Ranks of `launch` are not affected (see `rank`).
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
