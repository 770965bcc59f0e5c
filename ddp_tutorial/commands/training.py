"""Start a run, and stop one."""

import json
import os
import sys
from pathlib import Path

import click


@click.command()
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


@click.command()
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--save", is_flag=True, help="With a checkpoint of the step that it stops after.")
def stop(run: Path, save: bool) -> None:
    """Ask a run, by its folder, to stop after the step that it is at."""
    from ddp_tutorial.runs import request_stop

    request_stop(run, "save" if save else "stop")
    click.echo(f"{run} will stop{' and save' if save else ''} after its step")
