"""The command line: `python -m ddp_tutorial COMMAND`, also installed as `ddp-tutorial`.

Exit codes: 0 done, 1 something failed while running, 2 something in the command or a config is wrong (and nothing
was started), 75 a run was stopped before its last step, 130 interrupted.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import click

from ddp_tutorial.config import ConfigError, FailedError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ddp-tutorial")
def cli() -> None:
    """Learn and practise PyTorch distributed data-parallel training: real ranks, on any machine."""


@cli.command()
@click.argument("config")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
def train(config: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Train as CONFIG says: a YAML file, or the name of one of the package's configs.

    Starts config.nprocs ranks on this machine. Under torchrun, or srun on Slurm, it joins the world it finds.
    """
    from ddp_tutorial import config as configs
    from ddp_tutorial.runs import shown
    from ddp_tutorial.stopping import EXIT_CODE
    from ddp_tutorial.trainer import TrainConfig, launch_training
    from ddp_tutorial.trainer import train as train_here
    from ddp_tutorial.world import World, process_group

    settings = configs.load(config, TrainConfig, overrides)
    world = World.detect(device=settings.device)
    if world.size > 1 or "RANK" in os.environ:  # somebody else starts the ranks, be it only one
        import torch._dynamo  # noqa: F401  before the group, which would else outlive its block: see process_group

        if world.is_main:
            click.echo(str(world), err=True)
        with process_group(world):
            result = train_here(world, settings)
    else:
        result = launch_training(settings, echo=not as_json)
    if world.is_main:
        summary = json.loads((result.run / "result.json").read_text())
        numbers = summary["metrics"]
        link = settings.ddp.simulated_link
        slowed = f" over a simulated link ({link.model()})" if link else ""
        text = (
            f"loss {shown(numbers['loss'])}, held out {shown(numbers['eval_loss'])}, "
            f"{numbers['tokens_per_second']:,.0f} tokens/s on {summary['world_size']} ranks{slowed}: {result.run}"
        )
        if result.stopped_at is not None:
            text = f"stopped after step {result.stopped_at} of {settings.steps}: {result.run}"
        click.echo(json.dumps({"run": str(result.run), **summary}) if as_json else text)
    if result.stopped_at is not None:
        sys.exit(EXIT_CODE)


@cli.command()
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--save", is_flag=True, help="With a checkpoint of the step that it stops after.")
def stop(run: Path, save: bool) -> None:
    """Ask a run, by its folder, to stop after the step that it is at."""
    if not (run / "config.json").is_file():
        raise ConfigError(f"{str(run)!r} is not the folder of a run: there is no config.json in it")
    (run / "stop").write_text("save" if save else "stop")  # see stopping.py, which takes torch to import
    click.echo(f"{run} will stop{' and save' if save else ''} after its step")


@cli.group()
def checkpoint() -> None:
    """Look at what a run has saved. PATH is a run's folder, or one checkpoint in it."""


_a_path = click.argument("path", type=click.Path(exists=True, file_okay=False, path_type=Path))
_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def _checkpoints(path: Path) -> list[Path]:
    """The checkpoint itself, or those of the run; one at least."""
    from ddp_tutorial.manifest import CHECKPOINTS, MANIFEST, folders

    if (path / MANIFEST).is_file():
        return [path]
    found = folders(path / CHECKPOINTS) or folders(path)
    if not found:
        raise ConfigError(f"there is no checkpoint in {str(path)!r}")
    return found


@checkpoint.command("list")
@_a_path
@_as_json
def checkpoint_list(path: Path, as_json: bool) -> None:
    """The checkpoints of a run: step, ranks, size, metrics."""
    from ddp_tutorial.manifest import CheckpointError, read_manifest

    rows: list[dict[str, Any]] = []
    for folder in _checkpoints(path):
        try:
            manifest = read_manifest(folder)
        except CheckpointError as error:
            rows.append({"path": str(folder), "problem": str(error)})
            continue
        row = {"step": manifest.step, "world_size": manifest.world_size, "nbytes": manifest.nbytes}
        rows.append({"path": str(folder), **row, "metrics": manifest.metrics})
    if as_json:
        click.echo(json.dumps(rows))
        return
    for row in rows:
        click.echo(row["problem"] if "problem" in row else _line(row))


def _line(row: dict[str, Any]) -> str:
    metrics = "".join(f"  {name} {value:.4f}" for name, value in row["metrics"].items() if value is not None)
    return f"step {row['step']:>8}  {row['world_size']} ranks  {row['nbytes'] / 1e6:8.2f} MB{metrics}  {row['path']}"


@checkpoint.command("inspect")
@_a_path
@_as_json
def checkpoint_inspect(path: Path, as_json: bool) -> None:
    """What is in a checkpoint (of a run, the newest): components, who shares them, files, versions."""
    from ddp_tutorial.manifest import read_manifest

    folder = _checkpoints(path)[-1]
    manifest = read_manifest(folder)
    if as_json:
        click.echo(json.dumps({"path": str(folder), **manifest.model_dump()}))
        return
    versions = ", ".join(f"{name} {number}" for name, number in manifest.versions.items())
    click.echo(f"{folder}: step {manifest.step} on {manifest.world_size} ranks, {versions}")
    for name, component in manifest.components.items():
        for file in component.files:
            click.echo(
                f"  {name:12} {component.shared:11} {file.path:24} {file.nbytes:>12,} bytes, from rank {file.rank}"
            )


@checkpoint.command("verify")
@_a_path
@_as_json
def checkpoint_verify(path: Path, as_json: bool) -> None:
    """Compare every file with its checksum. Exit code 1 if something is wrong."""
    from ddp_tutorial.manifest import verify

    found = {str(folder): verify(folder) for folder in _checkpoints(path)}
    if as_json:
        click.echo(json.dumps(found))
    else:
        for folder, problems in found.items():
            click.echo("\n".join(problems) or f"{folder}: as it was written")
    if any(found.values()):
        sys.exit(1)


@checkpoint.command("diff")
@_a_path
@click.argument("other", type=click.Path(exists=True, file_okay=False, path_type=Path))
@_as_json
def checkpoint_diff(path: Path, other: Path, as_json: bool) -> None:
    """Compare two checkpoints: settings, and every value in them. Exit code 1 if they differ."""
    from ddp_tutorial.checkpoint import compare

    found = compare(_checkpoints(path)[-1], _checkpoints(other)[-1])
    click.echo(
        json.dumps(found) if as_json else "\n".join(f"{where}: {what}" for where, what in found.items()) or "equal"
    )
    if found:
        sys.exit(1)


@cli.command()
@click.option("--steps", type=click.IntRange(min=1), default=600, show_default=True, help="Optimiser steps.")
def run(steps: int) -> None:
    """The main job: train on two ranks and on one process, on real text, and compare. Two to three minutes."""
    from ddp_tutorial.experiments import run_main_job

    run_main_job(steps)


@cli.command()
@click.argument("paths", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--all", "everything", is_flag=True, help="Also those whose source has not changed.")
def notebooks(paths: tuple[Path, ...], everything: bool) -> None:
    """Execute the notebooks whose source has changed (or just PATHS), and save them with their outputs."""
    from ddp_tutorial.notebooks import refresh

    refresh(paths, everything=everything or bool(paths))


@cli.command()
@click.argument("count", type=click.IntRange(min=1))
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--files", type=click.IntRange(min=1), default=8, show_default=True, help="Parquet files to make.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Another seed, other stories.")
def tales(count: int, folder: Path, files: int, seed: int) -> None:
    """Make COUNT short stories, as Parquet files in a new FOLDER: data to try sources on, as large as you like."""
    from ddp_tutorial.tales import write_tales

    try:
        write_tales(count, folder, files, seed)
    except FileExistsError as error:
        raise ConfigError(f"{error}: name a new folder") from None
    click.echo(f"{count:,} stories in {files} files: train on them with corpus=parquet:{folder}")


@cli.command()
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--repeats", type=click.IntRange(min=5), default=7, show_default=True, help="Repeats of each arm.")
@click.option("--kills", type=click.IntRange(min=1), default=200, show_default=True, help="Of chaos only.")
def bench(name: str, as_json: bool, repeats: int, kills: int) -> None:
    """Measure a claim of the project: launch, overhead, ddp, buckets, sources, accumulation, checkpoint, or chaos.

    chaos kills ranks of small runs at random, and sees whether each run ends as if nothing had happened.
    """
    from ddp_tutorial.benches import as_text, run_bench

    if name == "chaos":
        from ddp_tutorial.benches.chaos import measure_chaos

        found = measure_chaos(kills, tell=lambda line: click.echo(line, err=True))
        click.echo(json.dumps(found, indent=2) if as_json else f"bit_equal = {found['bit_equal']}")
        sys.exit(not found["bit_equal"])
    result = run_bench(name, repeats)
    click.echo(json.dumps(result, indent=2) if as_json else as_text(result))


def main() -> None:
    """Run a command. Whatever goes wrong is told in one message, without the frames of this program."""
    try:
        cli(standalone_mode=False)
    except click.exceptions.Exit as leave:
        sys.exit(leave.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except ConfigError as error:
        sys.exit(_told(str(error), 2))
    except (click.Abort, KeyboardInterrupt):
        sys.exit(_told("interrupted; all ranks have been ended", 130))
    except FailedError as error:
        in_a_rank = "raised ConfigError: "
        reason = getattr(error, "reason", "")
        if reason.startswith(in_a_rank):  # found out late, on a rank, but all the same wrong from the start
            sys.exit(_told(reason.removeprefix(in_a_rank), 2))
        if reason.startswith("raised CheckpointError: "):  # where in the program it was found is of no help
            sys.exit(_told(reason.removeprefix("raised CheckpointError: "), 1))
        sys.exit(_told(str(error), 1))


def _told(message: str, code: int) -> int:
    click.echo(f"error: {message}", err=True)
    return code


if __name__ == "__main__":
    main()
