"""The command line: one file for each family of commands.

What a command needs is imported when it is called, so that those which only read logs start at once.
"""

import os
from pathlib import Path

import click


def complete_runs(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """For the shell: the runs whose name begins like this."""
    from ddp_tutorial.files import RUNS
    from ddp_tutorial.runs.summaries import find_runs

    return [name for path in find_runs() if (name := str(path.relative_to(RUNS))).startswith(begun)]


def _use_runs_dir(context: click.Context, parameter: click.Parameter, folder: Path | None) -> None:
    """Set the environment variable that `ddp_tutorial.files` and all processes started from here read."""
    if folder is not None:
        os.environ["DDP_TUTORIAL_RUNS"] = str(folder.absolute())


runs_dir = click.option(
    "--runs-dir",
    metavar="DIR",
    envvar="DDP_TUTORIAL_RUNS",
    type=click.Path(file_okay=False, path_type=Path),
    callback=_use_runs_dir,
    expose_value=False,
    help="Directory of all runs.  [default: $DDP_TUTORIAL_RUNS or runs]",
)

# A run, as a folder or by its name below runs/; see `logs.find_run`.
a_run = click.argument("run", shell_complete=complete_runs)
