"""Log each rank's messages to a separate file, and important messages to the console.

`rank_0.log`, `rank_1.log`, ... in the run's folder contain all messages. The console shows rank 0's messages of level
INFO and above, and the warnings of all ranks. With `train --debug`, the console shows all messages.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from ddp_tutorial.files import rename, temporary_path, write_json
from ddp_tutorial.processes.console import in_notebook
from ddp_tutorial.processes.debug_variables import DEBUG, VARIABLES
from ddp_tutorial.runs.folder import RunFolder
from ddp_tutorial.world import World

LOG = logging.getLogger("ddp_tutorial")


@contextmanager
def rank_log(world: World, run: RunFolder) -> Iterator[None]:
    """Inside the block, send log messages and Python's warnings to the console and to this rank's log file."""
    run.create()  # the folder does not exist yet on a machine that does not share rank 0's disk
    file = logging.FileHandler(run.rank_log(world.rank), encoding="utf-8")
    form = f"%(asctime)s rank {world.rank} %(levelname)-7s %(message)s"
    file.setFormatter(logging.Formatter(form, "%Y-%m-%d %H:%M:%S"))
    # A notebook highlights stderr like an error. In a terminal, stdout is reserved for results.
    console = logging.StreamHandler(sys.stdout if in_notebook() else sys.stderr)
    level = logging.INFO if world.is_main else logging.WARNING
    console.setLevel(logging.DEBUG if os.environ.get(DEBUG) else level)
    console.addFilter(lambda record: not record.exc_info)  # the launcher reports exceptions
    with ExitStack() as stack:
        stack.callback(file.close)
        stack.callback(logging.captureWarnings, capture=False)
        logging.captureWarnings(capture=True)
        for logger in (LOG, logging.getLogger("py.warnings")):
            stack.callback(logger.setLevel, logger.level)
            stack.callback(setattr, logger, "propagate", logger.propagate)
            logger.setLevel(logging.DEBUG)
            logger.propagate = False
            for handler in (file, console):
                stack.callback(logger.removeHandler, handler)
                logger.addHandler(handler)
        if os.environ.get(DEBUG):
            LOG.debug("debug variables: %s", ", ".join(f"{name}={os.environ.get(name, '')}" for name in VARIABLES))
        yield


@contextmanager
def record_failure(world: World, run: RunFolder, step: Callable[[], int]) -> Iterator[None]:
    """Log an exception's traceback. If no rank has failed before, also record the failure in the run folder.

    Later failures are usually caused by the exit of the first failed rank, so they do not replace the first record.
    `step` is a function that returns the current step.
    """
    try:
        yield
    except Exception as error:
        LOG.exception("failed after step %d", step())
        note = {"rank": world.rank, "step": step(), "error": f"{type(error).__name__}: {error}"}
        aside = temporary_path(run.failure)
        with suppress(OSError):  # such as a full disk; the original error is more important
            write_json(aside, note)
            try:
                os.link(aside, run.failure)  # unlike a rename, a link does not replace an existing file
            except OSError:  # a different rank failed first, or the file system does not support hard links
                if not run.failure.exists():
                    rename(aside, run.failure)
            finally:
                aside.unlink(missing_ok=True)
        raise
