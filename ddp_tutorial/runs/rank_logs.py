"""What a rank says while it trains: all of it in a file of its own, on the console what a person should see.

`rank_0.log`, `rank_1.log`, ... in the run's folder hold everything. The console has what rank 0 tells, and the
warnings of all.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from ddp_tutorial.files import temporary_path, write_json
from ddp_tutorial.processes.console import in_notebook
from ddp_tutorial.runs.folder import RunFolder
from ddp_tutorial.world import World

LOG = logging.getLogger("ddp_tutorial")


@contextmanager
def rank_log(world: World, run: RunFolder) -> Iterator[None]:
    """Inside, `LOG` and Python's warnings go to this rank's file in the folder of the run, and to the console."""
    run.create()  # on another machine, without a common disk, it does not exist yet
    file = logging.FileHandler(run.rank_log(world.rank), encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S"))
    # A notebook shows stderr as an alarm; in a terminal, stdout is for results.
    console = logging.StreamHandler(sys.stdout if in_notebook() else sys.stderr)
    console.setLevel(logging.INFO if world.is_main else logging.WARNING)
    console.addFilter(lambda record: not record.exc_info)  # whoever launched the ranks tells how one failed
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
        yield


@contextmanager
def record_failure(world: World, run: RunFolder, step: Callable[[], int]) -> Iterator[None]:
    """An exception leaves its traceback in the rank's log; that of the first rank to fail, a note in the run's folder.

    Those that fail after it do so because it is gone.
    """
    try:
        yield
    except Exception as error:
        LOG.exception("failed after step %d", step())
        note = {"rank": world.rank, "step": step(), "error": f"{type(error).__name__}: {error}"}
        aside = temporary_path(run.failure)
        with suppress(OSError):  # a full disk, say: the error itself is what matters
            write_json(aside, note)
            try:
                os.link(aside, run.failure)  # unlike a rename, this leaves alone what is there
            finally:
                aside.unlink()
        raise
