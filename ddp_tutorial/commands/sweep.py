"""Command that runs a notebook with many combinations of parameters."""

import json
import signal
import sys
from pathlib import Path
from typing import Any

import click

from ddp_tutorial.commands import runs_dir
from ddp_tutorial.config import require_package


class _Sweep(click.Command):
    """Command whose help text lists the experiments."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the names of the experiments."""
        from ddp_tutorial.experiments.sweeps import experiments_by_name

        self.epilog = f"Experiments: {', '.join(experiments_by_name())}."
        super().format_epilog(ctx, formatter)


@click.command(cls=_Sweep)
@runs_dir
@click.argument("notebook", type=click.Path(path_type=Path))
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE,VALUE...]...")
@click.option(
    "--points", metavar="FILE", type=click.Path(path_type=Path), help="YAML, JSON or CSV file with a list of points."
)
@click.option("--repeats", type=click.IntRange(min=1), default=1, show_default=True, help="Number of runs per point.")
@click.option("--name", default="", help="Directory under runs/sweeps/.  [default: the notebook's name]")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=1800.0,
    show_default=True,
    help="Timeout of each point in seconds.",
)
@click.option("--dry-run", is_flag=True, help="Print the papermill command of each point, and run nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def sweep(
    notebook: Path,
    settings: tuple[str, ...],
    points: Path | None,
    repeats: int,
    name: str,
    timeout: float,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Run NOTEBOOK with papermill for every point of a grid, such as source=sharded,streamed steps=10,20.

    NOTEBOOK is a path, or the name of one of the experiments below. KEY=@FILE reads the values of parameter KEY from a
    file with a YAML or JSON list. Each point of --points FILE is combined with all values of the settings. In a CSV
    file, the header contains the parameter names, and each row is a point.

    The output ends with the papermill command of each point. Add --dry-run to print only these commands.

    A finished point is skipped unless its parameters or the code has changed. To continue after an interrupt or a
    failure, rerun the command. If a point fails, the other points still run, and the exit code is 1.
    """
    require_package("papermill", "notebooks")
    from ddp_tutorial.experiments.sweeps import SweepInterruptedError, failure_of, plan_sweep, run_sweep

    plan = plan_sweep(notebook, settings, repeats, name, points)
    if dry_run:
        click.echo(json.dumps({"commands": plan.commands}) if as_json else "\n".join(plan.commands))
        return
    for number in (signal.SIGTERM, signal.SIGHUP):  # a terminated job or a closed terminal acts like Ctrl-C
        if signal.getsignal(number) != signal.SIG_IGN:  # `nohup` ignores SIGHUP
            signal.signal(number, signal.default_int_handler)
    try:
        outcome = run_sweep(plan, timeout, report=_print_line)
    except SweepInterruptedError as interrupt:
        click.echo(f"error: {interrupt}", err=True)
        sys.exit(130)
    failures = outcome.failures
    if as_json:
        summary: dict[str, Any] = {
            "folder": str(plan.folder),
            "table": str(plan.folder / "results.parquet"),
            "points": len(plan.points),
            "skipped": outcome.skipped,
            "failed": [{"folder": str(point.folder), **record} for point, record in failures],
            "rows": outcome.rows,
            "commands": plan.commands,
        }
        click.echo(json.dumps(summary))
    else:
        click.echo(_as_text(outcome))
        for point, record in failures:
            click.echo(failure_of(point, record))
    if failures:
        sys.exit(1)


def _print_line(line: str) -> None:
    from tqdm import tqdm

    tqdm.write(line, file=sys.stderr)  # above the progress bar


def _as_text(outcome: Any) -> str:
    from ddp_tutorial.experiments.tables import as_text, differences, groups_of, metrics_of

    plan, failed = outcome.plan, len(outcome.failures)
    lines = [f"{len(plan.points)} points: {len(plan.points) - failed} finished ({outcome.skipped} of them before)"]
    lines[0] += f", {failed} failed" if failed else ""
    if failed < len(plan.points):
        metric = metrics_of(outcome.rows)[0]
        groups = groups_of(outcome.rows, metric)
        lines += ["", as_text(groups, metric), "", *differences(groups), ""]
        lines += [f"comparison  {plan.folder / 'compare.ipynb'}", f"page        {plan.folder / 'compare.html'}"]
    lines += [f"table       {plan.folder / 'results.parquet'}, results.csv"]
    return "\n".join([*lines, "", "papermill command of each point:", *plan.commands])
