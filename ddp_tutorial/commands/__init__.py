"""The command line: one file for each family of commands.

What a command needs is imported when it is called, so that those which only read logs start at once.
"""

import click


def complete_runs(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """For the shell: the runs whose name begins like this."""
    from ddp_tutorial.files import RUNS
    from ddp_tutorial.runs.summaries import find_runs

    return [name for path in find_runs() if (name := str(path.relative_to(RUNS))).startswith(begun)]


# A run, as a folder or by its name below runs/; see `logs.find_run`.
a_run = click.argument("run", shell_complete=complete_runs)
