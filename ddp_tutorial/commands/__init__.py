"""The commands of the command line, one file for each family; what they need is imported when they are called."""

import click


def runs_begun(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """For the shell: the runs whose name begins like this."""
    from ddp_tutorial.files import RUNS
    from ddp_tutorial.logs import find_runs

    return [name for path in find_runs() if (name := str(path.relative_to(RUNS))).startswith(begun)]


# A run, as a folder or by its name below runs/; see `logs.find_run`.
a_run = click.argument("run", shell_complete=runs_begun)
