"""Run a notebook with many parameters."""

import json
import signal
import sys
from pathlib import Path
from typing import Any

import click

from ddp_tutorial.commands import runs_dir


@click.command()
@runs_dir
@click.argument("notebook", type=click.Path(path_type=Path))
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE,VALUE...]...")
@click.option("--repeats", type=click.IntRange(min=1), default=1, show_default=True, help="Executions of each point.")
@click.option("--name", default="", help="Folder below runs/sweeps/; by default the notebook's name.")
@click.option(
    "--timeout", type=click.FloatRange(min=0, min_open=True), default=1800.0, show_default=True, help="Seconds a point."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def sweep(notebook: Path, settings: tuple[str, ...], repeats: int, name: str, timeout: float, as_json: bool) -> None:
    """Run NOTEBOOK with papermill at every point of a grid, and compare: source=sharded,streamed steps=10,20.

    Points that have finished are not run again, unless they or the code have changed: after an interrupt, or a failure,
    the same command carries on. Exit code 1 if a point failed, when all others have been run.
    """
    from ddp_tutorial.experiments.sweeps import SweepInterruptedError, failure_of, plan_sweep, run_sweep

    plan = plan_sweep(notebook, settings, repeats, name)
    for number in (signal.SIGTERM, signal.SIGHUP):  # a job that has to go, a terminal that is closed: as Ctrl-C
        signal.signal(number, signal.default_int_handler)
    try:
        outcome = run_sweep(plan, timeout, tell=_tell)
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
        }
        click.echo(json.dumps(summary))
    else:
        click.echo(_as_text(outcome))
        for point, record in failures:
            click.echo(failure_of(point, record))
    if failures:
        sys.exit(1)


def _tell(line: str) -> None:
    from tqdm import tqdm

    tqdm.write(line, file=sys.stderr)  # above the bar


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
    return "\n".join([*lines, f"table       {plan.folder / 'results.parquet'}, results.csv"])
