"""Define the command-line interface, with one file for each group of commands.

A command imports its dependencies when it is called, so commands that only read logs start quickly.
"""

import os
from pathlib import Path

import click


def complete_runs(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the run names that start with `incomplete`, for shell completion."""
    from ddp_tutorial.files import RUNS
    from ddp_tutorial.runs.summaries import find_runs

    return [name for path in find_runs() if (name := str(path.relative_to(RUNS))).startswith(incomplete)]


def _use_runs_dir(context: click.Context, parameter: click.Parameter, folder: Path | None) -> None:
    """Set $DDP_TUTORIAL_RUNS, which `ddp_tutorial.files` and all child processes read."""
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

# The path of a run's directory, or its name under runs/; see `summaries.find_run`.
a_run = click.argument("run", shell_complete=complete_runs)
