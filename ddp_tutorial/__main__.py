"""The command line: `python -m ddp_tutorial COMMAND`, also installed as `ddp-tutorial`.

Exit codes: 0 done, 1 something failed while running, 2 something in the command or a config is wrong (and nothing
was started), 130 interrupted.
"""

import json
import os
import sys
from pathlib import Path

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
        click.echo(json.dumps({"run": str(result.run), **summary}) if as_json else text)


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
def bench(name: str, as_json: bool, repeats: int) -> None:
    """Measure a claim of the project: NAME is launch, overhead, ddp, buckets, sources or accumulation."""
    from ddp_tutorial.benches import as_text, run_bench

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
        sys.exit(_told(str(error), 1))


def _told(message: str, code: int) -> int:
    click.echo(f"error: {message}", err=True)
    return code


if __name__ == "__main__":
    main()
