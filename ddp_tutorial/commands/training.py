"""Commands that start and stop runs."""

import json
import os
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import yaml
from click.shell_completion import CompletionItem

from ddp_tutorial import config as configs
from ddp_tutorial.commands import a_run, runs_dir
from ddp_tutorial.processes.signals import exit_code, stopped_by_signals

if TYPE_CHECKING:
    from ddp_tutorial.debug.config import FaultyConfig
    from ddp_tutorial.debug.detector import Finding
    from ddp_tutorial.runs.folder import RunFolder
    from ddp_tutorial.training.trainer import TrainResult
    from ddp_tutorial.world import World

# Default of --watch with --check, in seconds. A checkpoint or an evaluation on one rank takes less time.
CHECK_WATCH_SECONDS = 60.0
_WATCH = "If a rank waits this long in a collective, report where each rank waits."
_CHECK = "Check each step for diverging replicas, NaN, samples that ranks share, leaks, and more. Implies --watch."
_DEBUG = "Show all log lines, and set all unset debug variables of PyTorch, NCCL and CUDA. Slows down the run."
_DEVICES = "GPUs for the ranks on this machine, one GPU per rank."
_FAULT = "Inject a fault, such as 'kill rank=1 step=3', in addition to the config's `faults`. Can be repeated."


def _configs(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a config in the package, or a file name if no config matches."""
    names = [CompletionItem(name) for name in configs.config_names() if name.startswith(incomplete)]
    return names or [CompletionItem(incomplete, type="file")]


def _settings(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Complete the name of a setting in base.yaml, such as `learning_rate=`, without importing torch."""
    known = configs.flat(yaml.safe_load((configs.CONFIGS / "base.yaml").read_text()))
    return [f"{name}=" for name in ["name", *known] if name.startswith(incomplete)]


config_argument = click.argument("config", shell_complete=_configs)
overrides_argument = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=_settings)


@click.command()
@runs_dir
@config_argument
@overrides_argument
@click.option("--dry-run", is_flag=True, help="Print the plan of the run, with the origin of each setting.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
@click.option("--watch", metavar="SECONDS", type=click.FloatRange(min=0, min_open=True), help=_WATCH)
@click.option("--check", is_flag=True, help=_CHECK)
@click.option("--fault", "faults", multiple=True, metavar="TEXT", help=_FAULT)
@click.option("--debug", is_flag=True, help=_DEBUG)
@click.option("--devices", metavar="0,1,3", help=_DEVICES)
def train(
    config: str,
    overrides: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
    watch: float | None,
    check: bool,
    faults: tuple[str, ...],
    debug: bool,
    devices: str | None,
) -> None:
    """Train with CONFIG, which is a YAML file or the name of one of the package's configs.

    \b
    train 2proc
    train 2proc steps=300 model.layers=2 source.kind=dispatched
    train my.yaml --dry-run
    train 2proc --watch 10 --fault 'hang rank=1 step=5 phase=backward'
    train 2proc --check --fault 'corrupt rank=1 step=5 phase=update'
    train 2proc 'faults=[kill rank=1 step=3]'
    train my.yaml --devices 0,1,3

    The command starts config.nprocs ranks on this machine. If nprocs is not set, a run on GPUs starts one rank per GPU.
    Under torchrun or Slurm's srun, the command joins the existing world.

    On SIGTERM or SIGUSR1, the run saves a checkpoint after the current step and exits with code 75. The run exits
    immediately if there is nothing to save yet. The command `stop` also stops a run. To resume, rerun the command with
    resume=auto.

    Under torchrun, the exit code is 0 instead of 75, because torchrun would restart the ranks after a nonzero code. The
    exit code is also 0 in a Slurm step after `stop`, because code 75 would requeue the job. The file result.json
    records the reason for the stop.
    """
    if debug:
        from ddp_tutorial.processes.debug_variables import set_variables

        click.echo(set_variables(), err=True)
    with stopped_by_signals():  # until the launch or the Trainer handles signals; importing torch takes seconds
        options = DebugOptions(watch or (CHECK_WATCH_SECONDS if check else None), check)
        _train(config, overrides, dry_run, as_json, options, faults, devices)


@dataclass(frozen=True)
class DebugOptions:
    """Options of `train` for debugging, except faults, which are part of the run's config."""

    watch: float | None  # seconds in a collective after which all ranks are inspected
    check: bool  # whether each step is checked


def _train(
    config: str,
    overrides: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
    debug: DebugOptions,
    faults: tuple[str, ...],
    devices: str | None,
) -> None:
    from ddp_tutorial.debug.config import FaultyConfig, parse
    from ddp_tutorial.debug.faults import check_ranks
    from ddp_tutorial.processes.starting import run
    from ddp_tutorial.world import World, is_launched_rank

    settings, layers = configs.load(config, FaultyConfig, overrides), configs.layers(config, overrides)
    joins = is_launched_rank()
    is_chosen = joins or configs.is_chosen("nprocs", config, overrides)
    placement = _placement(settings, devices, is_chosen=is_chosen, joins=joins)
    if placement:
        layers.append(("GPUs", placement))
        settings = settings.model_copy(update=placement)
    if faults:
        settings = settings.model_copy(update={"faults": (*settings.faults, *map(parse, faults))})
    if debug.check and settings.strategy not in {"ddp", "invariant", "accelerate"}:
        raise configs.ConfigError(
            "--check compares replicas, so 'strategy' must be 'ddp', 'invariant' or 'accelerate', got "
            f"{settings.strategy!r}. Debug with strategy=ddp, or use --watch instead of --check"
        )
    # only rank 0 prints
    world = World.detect(device=settings.device, backend=settings.backend) if joins else World()
    check_ranks(settings.faults, world.size if joins else settings.nprocs)
    if dry_run:
        if world.is_main:
            _print_plan(settings, layers, as_json)
        return
    if joins and world.is_main:
        click.echo(str(world), err=True)
    needs_check = settings.strategy not in {"ddp", "invariant"} or settings.names_classes or settings.compile
    if not joins and needs_check:
        from ddp_tutorial.training.tasks import check_world

        check_world(settings, settings.nprocs)
    options = settings.group_options
    result = run(_train_on_a_rank, settings, debug, nprocs=settings.nprocs, echo=not as_json, **options)
    if world.is_main:
        summary = json.loads((result.run / "result.json").read_text())
        click.echo(json.dumps({"run": str(result.run), **summary}) if as_json else _summary_line(result.run, summary))
        if slow := summary["ranks"]["straggler"]:
            click.echo("the other ranks waited {seconds:.1f} s for rank {rank}, in {phase}".format(**slow), err=True)
    if result.stopped_at is not None:
        sys.exit(exit_code(by_signal=result.by_signal))


def _placement(settings: "FaultyConfig", devices: str | None, *, is_chosen: bool, joins: bool) -> dict[str, Any]:
    """Make the selected GPUs visible to the ranks, and return the settings that depend on the number of GPUs.

    `is_chosen` is true if a setting or a launcher determines the number of ranks. `joins` is true if this process joins
    an existing world.
    """
    from ddp_tutorial.processes.devices import VISIBLE, default_nprocs, visible_devices
    from ddp_tutorial.world import World

    if devices is not None:
        if settings.device == "cpu":
            raise configs.ConfigError("--devices selects GPUs, but 'device' is cpu. Use device=cuda, or omit --devices")
        here = World.detect(device="cpu").local_size if joins else settings.nprocs
        os.environ[VISIBLE] = ",".join(names := visible_devices(devices, here if is_chosen else None))
        return {} if is_chosen else {"nprocs": len(names)}
    nprocs = settings.nprocs if is_chosen else default_nprocs(settings.device, settings.nprocs)
    return {} if nprocs == settings.nprocs else {"nprocs": nprocs}


def _train_on_a_rank(world: "World", settings: "FaultyConfig", debug: DebugOptions) -> "TrainResult":
    """Train on this rank, with the configured watchdog, checks and faults. Collective.

    If a check fails, all ranks raise an error in the same step. Like any other failure, the error is recorded in
    `failed.json` and in the logs. The last steps are checked before the run writes its result. Warnings are recorded in
    the log and in `result.json`.
    """
    from ddp_tutorial.debug.checks import checking
    from ddp_tutorial.debug.faults import inject_faults
    from ddp_tutorial.debug.hangs import watching
    from ddp_tutorial.training.tasks import make_trainer

    with ExitStack() as stack:
        if debug.watch:
            stack.enter_context(watching(world, debug.watch))
        trainer = make_trainer(settings, world)
        stack.enter_context(inject_faults(world, *settings.faults, model=trainer.model))
        if not debug.check:
            return trainer.train()
        model = getattr(trainer.train_step.strategy, "model", trainer.model)  # the wrapper, which knows its options
        optimizer = trainer.train_step.optimizer
        has_ended = False
        try:
            with checking(world, model, optimizer, after=lambda: trainer.step_count) as checks:
                result = trainer.train()
                has_ended = True
        finally:
            if has_ended and world.is_main and checks.program.taken:
                _add_findings(trainer.run, checks.findings)
        return result


def _add_findings(run: "RunFolder", findings: "list[Finding]") -> None:
    """Add the findings of the checks to `result.json`."""
    from ddp_tutorial.files import write_json

    checks = [{"detector": each.detector, "ranks": each.ranks, "message": str(each)} for each in findings]
    write_json(run.result, json.loads(run.result.read_text()) | {"checks": checks})


def _print_plan(settings: "FaultyConfig", layers: list[configs.Layer], as_json: bool) -> None:
    from ddp_tutorial.training.plan import as_text, plan

    found = plan(settings, layers)
    if settings.faults:
        found["faults"] = [str(fault) for fault in settings.faults]
    faults = "".join(f"\nfault    {fault}" for fault in found.get("faults", ()))
    click.echo(json.dumps(found) if as_json else as_text(found) + faults)


def _summary_line(run: Path, summary: dict[str, Any]) -> str:
    """Return a run's result as text. If the run was stopped, the text names the setting that resumes it."""
    from ddp_tutorial.ddp.config import LinkConfig
    from ddp_tutorial.ddp.link_model import LinkModel
    from ddp_tutorial.files import RUNS
    from ddp_tutorial.runs.folder import PER_SECOND, format_loss

    parameters, metrics = summary["parameters"], summary["metrics"]
    if summary["status"] == "stopped":
        stopped = f"stopped after step {summary['step']} of {parameters['steps']}: {run}"
        how = "auto" if run == RUNS / parameters["name"] else run  # a number may have been appended to the name
        is_saved = any((run / "checkpoints").glob("step_*"))
        return f"{stopped}\nto resume, rerun the command with resume={how}" if is_saved else stopped
    unit, rate = next((name.removesuffix(PER_SECOND), metrics[name]) for name in metrics if name.endswith(PER_SECOND))
    link = parameters["ddp"]["simulated_link"]
    slowed = f" over a simulated link ({LinkModel.from_config(LinkConfig(**link))})" if link else ""
    early = f" after {summary['step']} steps, {summary['reason']}" if summary["reason"] else ""
    return (
        f"loss {format_loss(metrics['loss'])}, validation loss {format_loss(metrics['eval_loss'])}{early}, "
        f"{rate:,.0f} {unit}/s on {summary['world_size']} ranks{slowed}: {run}"
    )


@click.command()
@runs_dir
@a_run
@click.option("--save", is_flag=True, help="Save a checkpoint before the run stops.")
def stop(run: str, save: bool) -> None:
    """Stop a run after its current step. RUN is the run's directory, or its name under runs/."""
    from ddp_tutorial.runs.folder import request_stop
    from ddp_tutorial.runs.summaries import find_run, state_of

    folder = find_run(run)
    if (state := state_of(folder)) != "running":  # the request would stop a later attempt after its first step
        raise configs.ConfigError(f"{folder} is not running, so it cannot be stopped; its state is {state}")
    request_stop(folder, "save" if save else "stop")
    click.echo(f"{folder} will {'save and ' if save else ''}stop after its current step")
