"""Commands about the project: its main job, its notebooks, made-up stories, its benchmarks."""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import click

from ddp_tutorial.commands import runs_dir
from ddp_tutorial.config import ConfigError


@click.command()
@runs_dir
@click.option("--steps", type=click.IntRange(min=1), default=600, show_default=True, help="Optimiser steps.")
def run(steps: int) -> None:
    """The main job: train on two ranks and on one process, on real text, and compare. Two to three minutes."""
    from ddp_tutorial.experiments.execute import run_main_job

    run_main_job(steps)


@click.command()
@click.argument("paths", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--all", "everything", is_flag=True, help="Also those whose source has not changed.")
def notebooks(paths: tuple[Path, ...], everything: bool) -> None:
    """Execute the notebooks whose source has changed (or just PATHS), and save them with their outputs."""
    from ddp_tutorial.experiments.notebooks import refresh

    refresh(paths, everything=everything or bool(paths))


@click.command()
@click.argument("count", type=click.IntRange(min=1))
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--files", type=click.IntRange(min=1), default=8, show_default=True, help="Parquet files to make.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Another seed, other stories.")
def stories(count: int, folder: Path, files: int, seed: int) -> None:
    """Make COUNT short stories, as Parquet files in a new FOLDER: data to try sources on, as large as you like."""
    from ddp_tutorial.sharding.stories import write_stories

    try:
        write_stories(count, folder, files, seed)
    except FileExistsError as error:
        raise ConfigError(f"{error}: name a new folder") from None
    click.echo(f"{count:,} stories in {files} files: train on them with corpus=parquet:{folder}")


@click.command()
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--repeats", type=click.IntRange(min=5), default=7, show_default=True, help="Repeats of each arm.")
@click.option("--kills", type=click.IntRange(min=1), help="Of chaos, by default 200, and restarts, 20.")
def bench(name: str, as_json: bool, repeats: int, kills: int | None) -> None:
    """Measure a claim: launch, overhead, ddp, buckets, sources, accumulation, checkpoint, scaling, debug, sharded,
    pipeline, cluster, ranks, peers, chaos, restarts or hangs.

    chaos kills ranks of small runs, fails and fills their disks, at every named point of saving and resuming, and
    starts them on nodes that share no folder. It checks that no checkpoint is lost, each resumed run ends with the same
    bits, and no process is left. restarts does so with torchrun, which starts the ranks again. hangs lets ranks hang in
    eight ways, and checks that each time the verdict names ranks and lines, and no process is left.
    """
    from ddp_tutorial.benches import as_text, run_bench

    def tell(line: str) -> None:
        click.echo(line, err=True)

    if name == "chaos":
        from ddp_tutorial.benches import chaos

        _judged(chaos.measure_chaos(kills or 200, report=tell), chaos.is_good, chaos.describe, as_json)
    if name == "restarts":
        from ddp_tutorial.benches import restarts

        _judged(restarts.measure_restarts(kills or 20, report=tell), restarts.is_good, restarts.describe, as_json)
    if name == "hangs":
        from ddp_tutorial.benches import hangs

        _judged(hangs.measure_hangs(repeats, report=tell), hangs.is_good, hangs.describe, as_json)
    result = run_bench(name, repeats)
    click.echo(json.dumps(result, indent=2) if as_json else as_text(result))


@click.command()
@click.argument("name", type=click.Choice(["scaling", "data", "accumulation", "checkpoint"]))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--repeats", type=click.IntRange(min=5), default=7, show_default=True, help="Repeats of each arm.")
def reproduce(name: str, as_json: bool, repeats: int) -> None:
    """Measure a table of equal work, and print it as Markdown beside published numbers, if there are any."""
    from ddp_tutorial.benches import published

    result = published.reproduce(name, repeats)
    click.echo(json.dumps(result, indent=2) if as_json else published.as_markdown(result))


def _judged(
    found: Mapping[str, Any],
    is_good: Callable[[Mapping[str, Any]], bool],
    describe: Callable[[Mapping[str, Any]], str],
    as_json: bool,
) -> NoReturn:
    """Say what a benchmark has found that is passed or failed, and exit: with 1 where it is not good."""
    click.echo(json.dumps(found, indent=2) if as_json else describe(found))
    sys.exit(not is_good(found))
