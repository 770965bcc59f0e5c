"""Commands for the project's main job, notebooks, synthetic stories and benchmarks."""

import json
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import click

from ddp_tutorial.commands import runs_dir
from ddp_tutorial.config import ConfigError, require_package


@click.command()
@runs_dir
@click.option("--steps", type=click.IntRange(min=1), default=600, show_default=True, help="Number of optimizer steps.")
def run(steps: int) -> None:
    """Train a small GPT on two ranks and in one process, and compare the runs. The command takes 2 to 3 minutes."""
    require_package("papermill", "notebooks")
    from ddp_tutorial.experiments.execute import run_main_job

    run_main_job(steps)


@click.command()
@click.argument("paths", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--all", "everything", is_flag=True, help="Also execute notebooks whose source has not changed.")
def notebooks(paths: tuple[Path, ...], everything: bool) -> None:
    """Execute the notebooks at PATHS, or all notebooks whose source has changed, and save the outputs."""
    require_package("nbclient", "notebooks")
    from ddp_tutorial.experiments.notebooks import refresh

    refresh(paths, everything=everything or bool(paths))


@click.command(name="copy-notebooks")
@click.argument("folder", type=click.Path(path_type=Path))
def copy_notebooks(folder: Path) -> None:
    """Copy the notebooks, without outputs, and their data to a new FOLDER.

    You can edit the copies freely, without changing the project's notebooks.
    """
    from ddp_tutorial.experiments.notebooks import copy_notebooks

    try:
        copy_notebooks(folder)
    except FileExistsError as error:
        raise ConfigError(f"{error}; choose a new folder") from None
    click.echo(f"Open the first notebook: jupyter lab {shlex.quote(str(folder / 'notebooks' / '00_quickstart.ipynb'))}")


@click.command()
@click.argument("count", type=click.IntRange(min=1))
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--files", type=click.IntRange(min=1), default=8, show_default=True, help="Number of Parquet files.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the random numbers.")
def stories(count: int, folder: Path, files: int, seed: int) -> None:
    """Write COUNT synthetic short stories to Parquet files in a new FOLDER, to test sources with data of any size."""
    from ddp_tutorial.sharding.stories import write_stories

    try:
        write_stories(count, folder, files, seed)
    except FileExistsError as error:
        raise ConfigError(f"{error}; choose a new folder") from None
    click.echo(f"wrote {count:,} stories to {files} files; train on them with corpus=parquet:{folder}")


@click.command()
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--repeats", type=click.IntRange(min=5), default=7, show_default=True, help="Repetitions of each arm.")
@click.option("--kills", type=click.IntRange(min=1), help="Number of kills.  [default: chaos 200, restarts 20]")
def bench(name: str, as_json: bool, repeats: int, kills: int | None) -> None:
    """Run the benchmark NAME.

    NAME is launch, overhead, compile, ddp, buckets, sources, accumulation, checkpoint, scaling, debug, sharded,
    pipeline, cluster, ranks, peers, chaos, restarts or hangs.

    `chaos` kills ranks of small runs, or makes disk operations fail, at every injection point during saving and
    resuming. `chaos` also fills up disks, and starts runs on nodes without a shared folder. The benchmark checks that
    no checkpoint is lost, no process keeps running, and each resumed run is bitwise identical to an uninterrupted run.
    `restarts` kills ranks under torchrun, which restarts them. `hangs` makes ranks hang in eight ways, and checks that
    each report names the line at which each rank waits, and that no process keeps running.
    """
    from ddp_tutorial.benches import as_text, run_bench

    def report(line: str) -> None:
        click.echo(line, err=True)

    if name == "chaos":
        from ddp_tutorial.benches import chaos

        _print_and_exit(chaos.measure_chaos(kills or 200, report=report), chaos.is_good, chaos.describe, as_json)
    if name == "restarts":
        from ddp_tutorial.benches import restarts

        found = restarts.measure_restarts(kills or 20, report=report)
        _print_and_exit(found, restarts.is_good, restarts.describe, as_json)
    if name == "hangs":
        from ddp_tutorial.benches import hangs

        _print_and_exit(hangs.measure_hangs(repeats, report=report), hangs.is_good, hangs.describe, as_json)
    result = run_bench(name, repeats)
    click.echo(json.dumps(result, indent=2) if as_json else as_text(result))


@click.command()
@click.argument("name", type=click.Choice(["scaling", "data", "accumulation", "checkpoint"]))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--repeats", type=click.IntRange(min=5), default=7, show_default=True, help="Repetitions of each arm.")
def reproduce(name: str, as_json: bool, repeats: int) -> None:
    """Measure variants of one workload, and print a Markdown table with published results, if available."""
    from ddp_tutorial.benches import published

    result = published.reproduce(name, repeats)
    click.echo(json.dumps(result, indent=2) if as_json else published.as_markdown(result))


def _print_and_exit(
    found: Mapping[str, Any],
    is_good: Callable[[Mapping[str, Any]], bool],
    describe: Callable[[Mapping[str, Any]], str],
    as_json: bool,
) -> NoReturn:
    """Print the result of a benchmark that can fail, and exit. The exit code is 1 if the benchmark failed."""
    click.echo(json.dumps(found, indent=2) if as_json else describe(found))
    sys.exit(not is_good(found))
