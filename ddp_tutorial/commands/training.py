"""Start a run, and stop one."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import yaml
from click.shell_completion import CompletionItem

from ddp_tutorial import config as configs
from ddp_tutorial.commands import a_run

if TYPE_CHECKING:
    from ddp_tutorial.train_config import TrainConfig


def _configs(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """For the shell: the configs of the package, then files."""
    names = [CompletionItem(name) for name in configs.names() if name.startswith(incomplete)]
    return names or [CompletionItem(incomplete, type="file")]


def _settings(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """For the shell: `learning_rate=` and so on. base.yaml has them all, and needs no torch to be read."""
    known = configs.flat(yaml.safe_load((configs.CONFIGS / "base.yaml").read_text()))
    return [f"{name}=" for name in ["name", *known] if name.startswith(incomplete)]


@click.command()
@click.argument("config", shell_complete=_configs)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=_settings)
@click.option("--dry-run", is_flag=True, help="Say what would be done, and with which settings from where.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
def train(config: str, overrides: tuple[str, ...], dry_run: bool, as_json: bool) -> None:
    """Train as CONFIG says: a YAML file, or the name of one of the package's configs.

    \b
    train 2proc
    train 2proc steps=300 model.layers=2 source.kind=dispatched
    train my.yaml --dry-run

    Starts config.nprocs ranks on this machine. Under torchrun, or srun on Slurm, it joins the world it finds. Exit code
    75 if it was stopped before its last step; the same command with resume=auto carries on.
    """
    from ddp_tutorial.stopping import EXIT_CODE
    from ddp_tutorial.train_config import TrainConfig
    from ddp_tutorial.trainer import launch_training
    from ddp_tutorial.trainer import train as train_here
    from ddp_tutorial.world import World, joins_others, process_group

    settings = configs.load(config, TrainConfig, overrides)
    joins = joins_others()
    world = World.detect(device=settings.device) if joins else World()
    if dry_run:
        if world.is_main:
            _tell_plan(settings, configs.layers(config, overrides), as_json)
        return
    if joins:
        import torch._dynamo  # noqa: F401  before the group, which would else outlive its block: see process_group

        if world.is_main:
            click.echo(str(world), err=True)
        with process_group(world):
            result = train_here(world, settings)
    else:
        result = launch_training(settings, echo=not as_json)
    if world.is_main:
        summary = json.loads((result.run / "result.json").read_text())
        click.echo(json.dumps({"run": str(result.run), **summary}) if as_json else _in_a_line(result.run, summary))
        if slow := summary["ranks"]["straggler"]:
            click.echo("the others waited {seconds:.1f} s for rank {rank}, in {phase}".format(**slow), err=True)
    if result.stopped_at is not None:
        sys.exit(EXIT_CODE)


def _tell_plan(settings: "TrainConfig", layers: list[configs.Layer], as_json: bool) -> None:
    from ddp_tutorial.plan import as_text, plan

    found = plan(settings, layers)
    click.echo(json.dumps(found) if as_json else as_text(found))


def _in_a_line(run: Path, summary: dict[str, Any]) -> str:
    """How a run has ended."""
    from ddp_tutorial.ddp import LinkConfig
    from ddp_tutorial.runs import shown

    parameters, metrics = summary["parameters"], summary["metrics"]
    if summary["status"] == "stopped":
        return f"stopped after step {summary['step']} of {parameters['steps']}: {run}"
    link = parameters["ddp"]["simulated_link"]
    slowed = f" over a simulated link ({LinkConfig(**link).model()})" if link else ""
    early = f" after {summary['step']} steps, {summary['reason']}" if summary["reason"] else ""
    return (
        f"loss {shown(metrics['loss'])}, held out {shown(metrics['eval_loss'])}{early}, "
        f"{metrics['tokens_per_second']:,.0f} tokens/s on {summary['world_size']} ranks{slowed}: {run}"
    )


@click.command()
@a_run
@click.option("--save", is_flag=True, help="With a checkpoint of the step that it stops after.")
def stop(run: str, save: bool) -> None:
    """Ask RUN, a folder or a name below runs/, to stop after the step that it is at."""
    from ddp_tutorial.logs import find_run
    from ddp_tutorial.runs import request_stop

    folder = find_run(run)
    request_stop(folder, "save" if save else "stop")
    click.echo(f"{folder} will stop{' and save' if save else ''} after its step")
