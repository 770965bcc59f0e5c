"""Commands that read run records. The commands import matplotlib only for figures, and never import torch."""

import csv
import json
import sys
import time
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ddp_tutorial.commands import a_run, complete_runs, runs_dir
from ddp_tutorial.config import ConfigError, FailedError, named_ranks, require_package

if TYPE_CHECKING:
    from ddp_tutorial.runs.speedup import Speedup
    from ddp_tutorial.runs.summaries import Summary, Values


@click.group()
def logs() -> None:
    """List, summarize, plot and follow runs.

    RUN is the path of a run's directory, or its name under runs/.
    """


_some_runs = click.argument("runs", nargs=-1, metavar="[RUN]...", shell_complete=complete_runs)
_all_runs = click.option("--all", "everything", is_flag=True, help="Select all runs in the runs directory.")
_open = click.option("-e", "--open", "opens", is_flag=True, help="Open the figure in a viewer, such as $BROWSER.")


def _chosen(names: tuple[str, ...], everything: bool) -> list[Path]:
    """Return the folders of the named runs. Without names, return the newest run, or all runs if `everything` is true.

    Paths that exist but are not runs are skipped with a message, because `runs/*` also matches figures, caches and
    sweeps.

    Raises:
        ConfigError: If a name does not exist, or if no run remains.
    """
    from ddp_tutorial.files import RUNS
    from ddp_tutorial.runs.summaries import find_run, find_runs

    if names and everything:
        raise ConfigError("specify run names or --all, not both")
    if not names:
        if there := find_runs():
            return there if everything else there[-1:]
        raise ConfigError(f"there are no runs under {RUNS}/. Start a run with: python -m ddp_tutorial train 2proc")
    found: dict[Path, None] = {}
    skipped = []
    for name in names:
        try:
            found[find_run(name)] = None
        except ConfigError as error:
            if not (Path(name).exists() or (RUNS / name).exists()):
                raise
            skipped.append(error)
    if not found:
        raise skipped[0]
    if skipped:
        click.echo(f"skipped {len(skipped)} of {len(names)} paths, because they are not runs", err=True)
    return list(found)


# ---------------------------------------------------------------------------------------------------------------- list


@logs.command("list")
@runs_dir
def list_runs() -> None:
    """List all runs under runs/, from oldest to newest.

    A run's state is finished, stopped, failed, killed or running. A run is listed as stopped if it exited before its
    last step, on request or after a signal. A run is listed as failed if it recorded a rank's error. A run is listed as
    killed if it exited without writing a result or an error.
    """
    from ddp_tutorial.files import RUNS
    from ddp_tutorial.runs.summaries import find_runs, summarize

    rows = [_cells(summarize(folder)) for folder in find_runs()]
    if not rows:
        click.echo(f"there are no runs under {RUNS}/. Start a run with: python -m ddp_tutorial train 2proc", err=True)
        return
    head = ["state", "step", "loss", "validation", "rate", "ranks", "took", "began", "run"]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    to_the_right = {1, 2, 3, 4, 5, 6}
    for row in (head, *rows):
        cells = [
            cell.rjust(width) if column in to_the_right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        click.echo("  ".join(cells).rstrip())


def _cells(run: "Summary") -> list[str]:
    return [
        run.state,
        f"{run.step:,}/{run.steps:,}",
        _last(run.loss),
        _last(run.eval_loss),
        _rate(run),
        str(run.ranks),
        _duration(run.seconds),
        _when(run.began),
        run.path,
    ]


def _last(values: "Values | None") -> str:
    from ddp_tutorial.runs.folder import format_loss

    return "-" if values is None else format_loss(values.last)


def _rate(run: "Summary") -> str:
    return "-" if run.rate is None else f"{run.rate:,.0f} {run.unit}/s"


def _duration(seconds: float | None) -> str:
    """Format a duration: 0.42 becomes "0.4 s", and 72 becomes "1 min 12 s"."""
    if seconds is None:
        return "-"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    for unit, part, name, part_name in ((86400, 3600, "d", "h"), (3600, 60, "h", "min"), (60, 1, "min", "s")):
        if round(seconds) >= unit:
            whole, rest = divmod(round(seconds / part) * part, unit)
            return f"{whole} {name} {rest // part:02} {part_name}"
    return f"{seconds:.0f} s"


def _when(began: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(began))


# ------------------------------------------------------------------------------------------------------------- summary


_BASELINE = "Baseline for the throughput.  [default: among runs with the same work, the run with the fewest ranks]"


@logs.command("summary")
@runs_dir
@_some_runs
@_all_runs
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "one-line", "md", "csv", "json"]),
    default="text",
    show_default=True,
    help="A page or a line of key=value pairs for each run, a Markdown or CSV table, or a list of JSON objects.",
)
@click.option("--baseline", metavar="RUN", shell_complete=complete_runs, help=_BASELINE)
def summary(runs: tuple[str, ...], everything: bool, form: str, baseline: str | None) -> None:
    """Summarize runs, by default the newest run.

    A summary contains the settings, result, losses, throughput, time by phase, memory and checkpoints. In the md,
    csv and json formats, the summaries also contain each run's speedup and efficiency relative to the baseline.
    """
    from ddp_tutorial.runs.summaries import summarize

    if baseline is not None and form in {"text", "one-line"}:
        raise ConfigError(f"--baseline requires --format md, csv or json, got --format {form}")
    summaries = [summarize(folder) for folder in _chosen(runs, everything)]
    if form in {"md", "csv", "json"}:
        speedups = _speedups(summaries, baseline)
    if form == "json":
        click.echo(json.dumps([asdict(run) | asdict(s) for run, s in zip(summaries, speedups, strict=True)], indent=2))
    elif form == "md":
        click.echo(_table(summaries, speedups))
    elif form == "csv":
        click.echo(_csv(summaries, speedups), nl=False)
    elif form == "one-line":
        click.echo("\n".join(map(_one_line, summaries)))
    else:
        click.echo("\n\n".join(map(_page, summaries)))


def _speedups(summaries: list["Summary"], name: str | None) -> list["Speedup"]:
    """Return each run's speedup over the baseline. Report the runs that are not comparable with the baseline."""
    from ddp_tutorial.runs.speedup import default_baseline, not_comparable, require_throughput, speedup
    from ddp_tutorial.runs.summaries import find_run, summarize

    baseline = default_baseline(summaries) if name is None else require_throughput(summarize(find_run(name)))
    if baseline is not None and (message := not_comparable(summaries, baseline)):
        click.echo(message, err=True)
    return [speedup(run, baseline) for run in summaries]


def _one_line(run: "Summary") -> str:
    """Return a summary as one line of key=value pairs, for use with grep. Unknown values are empty."""
    losses = {
        "loss": run.loss and run.loss.last,
        "eval_loss": run.eval_loss and run.eval_loss.last,
        "best_eval_loss": run.eval_loss and run.eval_loss.best,
    }
    values = {
        "state": run.state,
        "step": f"{run.step}/{run.steps}",
        **{name: None if value is None else f"{value:.4f}" for name, value in losses.items()},
        f"{run.unit}_per_second": None if run.rate is None else f"{run.rate:.0f}",
        "ranks": run.ranks,
        "seconds": None if run.seconds is None else f"{run.seconds:.1f}",
        "corpus": run.config.get("corpus"),
        "strategy": _strategy(run.config),
        "source": _get(run.config, "source.kind"),
        "batch_size": run.config.get("batch_size"),
    }
    if run.failure:
        values |= {"failed_rank": run.failure.rank, "error": json.dumps(_shortened(run.failure.error))}
    return " ".join([run.path, *(f"{key}={'' if value is None else value}" for key, value in values.items())])


def _shortened(error: str, longest: int = 160) -> str:
    """Return the first line of an error, truncated to `longest` characters."""
    line = next((line.strip() for line in error.splitlines() if line.strip()), "")
    return line if len(line) <= longest else f"{line[: longest - 3]}..."


def _table(summaries: list["Summary"], speedups: list["Speedup"]) -> str:
    """Return a Markdown table with a row for each run and a column for each setting that differs between runs."""
    from ddp_tutorial.runs.summaries import differing_settings

    settings = {name: values for name, values in differing_settings(summaries).items() if name != "nprocs"}
    head = ["run", *settings, "state", "step", "loss", "validation", "best validation", "rate", "ranks", "took"]
    head += ["speedup", "efficiency"]
    lines = [head, ["---"] * (1 + len(settings)) + ["---"] + ["---:"] * 9]
    for number, (run, relative) in enumerate(zip(summaries, speedups, strict=True)):
        best = run.eval_loss and run.eval_loss.best
        state, step, loss, validation_loss, rate, ranks, took, _, path = _cells(run)
        cells = [path, *(_plain(values[number]) for values in settings.values()), state, step, loss, validation_loss]
        cells += ["-" if best is None else f"{best:.3f}", rate, ranks, took]
        lines.append([*cells, _formatted(relative.speedup, "{:.2f}"), _formatted(relative.efficiency, "{:.0%}")])
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _formatted(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _csv(summaries: list["Summary"], speedups: list["Speedup"]) -> str:
    """Return a table of the runs as CSV. Unknown values are empty."""
    text = StringIO()
    table = csv.writer(text, lineterminator="\n")
    head = ["run", "state", "ranks", "step", "steps", "seconds", "loss", "eval_loss", "throughput", "unit"]
    table.writerow([*head, "speedup", "efficiency"])
    for run, relative in zip(summaries, speedups, strict=True):
        losses = [values and values.last for values in (run.loss, run.eval_loss)]
        cells = [run.path, run.state, run.ranks, run.step, run.steps, run.seconds, *losses, run.rate, f"{run.unit}/s"]
        table.writerow([*cells, relative.speedup, relative.efficiency])
    return text.getvalue()


def _plain(value: Any) -> str:
    return "-" if value is None else str(value)


def _page(run: "Summary") -> str:
    """Return a summary of one run, with one line per known value."""
    lines = {
        "state": _state(run),
        "error": run.failure and f"\n{'':14}".join(run.failure.error.strip().splitlines()),
        "text": f"{_plain(run.config.get('corpus'))}, {_plain(_get(run.config, 'model.context'))} tokens per sample",
        "model": _model(run.config),
        "ranks": _work(run),
        "strategy": _strategy_in_words(run.config),
        "source": _source(run.config),
        "loss": _losses(run.loss),
        "validation": _losses(run.eval_loss),
        "speed": _speed(run),
        "time": _time(run),
        "memory": _memory(run),
        "slowest": _slowest(run.straggler),
        "checkpoints": f"{len(run.checkpoints)}, the last in {run.checkpoints[-1]}" if run.checkpoints else None,
    }
    return "\n".join([run.path, *(f"  {name:12}{line}" for name, line in lines.items() if line)])


def _state(run: "Summary") -> str:
    where = f"{run.state} {'at' if run.state == 'running' else 'after'} step {run.step:,} of {run.steps:,}"
    if run.failure and run.failure.rank is not None:
        where += f", rank {run.failure.rank} first"
    return f"{where}{f': {run.reason}' if run.reason else ''} (began {_when(run.began)})"


def _model(config: dict[str, Any]) -> str | None:
    model = config.get("model")
    if not isinstance(model, dict):
        return None
    return f"GPT, layers {model.get('layers')}, heads {model.get('heads')}, width {model.get('width')}"


def _work(run: "Summary") -> str:
    """Return the number of ranks, their device, and the samples per step."""
    words = [f"{run.ranks} on {_plain(run.config.get('device'))}"]
    batch = run.config.get("batch_size")
    if isinstance(batch, int):
        words.append(f"{batch} samples per step" + (f", {batch / run.ranks:g} on each" if run.ranks > 1 else ""))
    parts = run.config.get("accumulation")
    if isinstance(parts, int) and parts > 1:
        words.append(f"in {parts} micro-batches")
    return ", ".join(words)


def _strategy(config: dict[str, Any]) -> str | None:
    """Return the strategy and its variant, such as `"ddp:torch"`."""
    strategy, variant = config.get("strategy"), _get(config, "ddp.variant")
    return f"{strategy}:{variant}" if strategy == "ddp" and variant else strategy


def _strategy_in_words(config: dict[str, Any]) -> str | None:
    if config.get("strategy") is None:
        return None
    words = [str(config["strategy"])]
    if words == ["ddp"]:
        words += [f"variant {_plain(_get(config, 'ddp.variant'))}"]
        words += [f"hook {hook}"] if (hook := _get(config, "ddp.hook")) not in {None, "none"} else []
    words += [str(_get(config, "precision.dtype") or "fp32")]
    link = _get(config, "ddp.simulated_link")
    if isinstance(link, dict):
        speed = f"{link.get('latency_ms')} ms, {link.get('megabytes_per_second')} MB/s"
        words.append(f"over a simulated link ({speed})")
    return ", ".join(words)


def _source(config: dict[str, Any]) -> str | None:
    source = config.get("source")
    if not isinstance(source, dict):
        return None
    workers = source.get("workers")
    return str(source.get("kind")) + (f", {workers} workers per rank" if workers else "")


def _get(config: dict[str, Any], name: str) -> Any:
    """Return a setting by its dotted name, or None if the config does not contain the setting."""
    value: Any = config
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _slowest(straggler: dict[str, Any] | None) -> str | None:
    if straggler is None:
        return None
    times = straggler["times"]
    waited = "the other ranks waited" if times is None else f"{times:g} times as slow as the other ranks, which waited"
    return f"rank {straggler['rank']}, in {straggler['phase']}: {waited} {straggler['seconds']:.1f} s"


def _losses(values: "Values | None") -> str | None:
    from ddp_tutorial.runs.folder import format_loss

    if values is None:
        return None
    best = "" if values.best is None else f", best {values.best:.3f} at step {values.best_step:,}"
    return f"first {format_loss(values.first)}, last {format_loss(values.last)}{best}"


def _speed(run: "Summary") -> str | None:
    if run.rate is None:
        return None
    return f"{_rate(run)} (median)" + (f", {run.count:,} {run.unit}" if run.count else "")


def _time(run: "Summary") -> str | None:
    """Return the total time and the share of each phase. `other` is the time outside all phases."""
    if run.seconds is None:
        return None
    shares = [
        f"{name} {_share(seconds, run.seconds)}{_parts(run) if name == 'grads' else ''}"
        for name, seconds in run.phases.items()
    ]
    other = run.seconds - sum(run.phases.values())
    if run.seconds_are == "measured" and other > 0.005 * run.seconds:
        shares.append(f"other {_share(other, run.seconds)}")
    whole = _duration(run.seconds) + ("" if run.seconds_are == "measured" else " in phases")
    return f"{whole}: {', '.join(shares)}"


def _parts(run: "Summary") -> str:
    parts = [f"{name} {_share(seconds, run.seconds or 1)}" for name, seconds in run.inside_grads.items()]
    return f" ({', '.join(parts)})" if parts else ""


def _share(part: float, whole: float) -> str:
    share = 100 * part / whole
    return f"{share:.0f} %" if share >= 1 else "below 1 %"


def _memory(run: "Summary") -> str | None:
    """Return each rank's peak memory, or the range over all ranks if there are more than 8 ranks."""
    words = []
    for kind, name in (("rss", ""), ("cuda", "on GPUs ")):
        values = run.memory_mb.get(kind, [])
        if len(values) > 8:
            words.append(f"{name}{min(values):,.0f} to {max(values):,.0f} MB per rank")
        elif values:
            words.append(f"{name}" + ", ".join(f"rank {rank} {value:,.0f} MB" for rank, value in enumerate(values)))
    return "; ".join(words) or None


# ---------------------------------------------------------------------------------------------------------------- plot


@logs.command("plot")
@runs_dir
@_some_runs
@_all_runs
@click.option("--metrics", help="Metric names, separated by commas.  [default: loss,grad_norm,learning_rate]")
@click.option("--x", "axis", type=click.Choice(["step", "time", "tokens"]), default="step", show_default=True)
@click.option(
    "--smooth",
    "window",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Number of values in the moving average, which is drawn over the original values.",
)
@click.option("--compare", is_flag=True, help="Draw all runs on the same axes, and list the settings that differ.")
@click.option("--loss-curves", "with_losses", is_flag=True, help="Draw a panel with training and validation losses.")
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Output file: .png, .svg or .pdf."
)
@_open
def plot(
    runs: tuple[str, ...],
    everything: bool,
    metrics: str | None,
    axis: str,
    window: int,
    compare: bool,
    with_losses: bool,
    output: Path | None,
    opens: bool,
) -> None:
    """Plot the metrics of one or more runs, by default of the newest run.

    The figure contains one panel for each metric of each run, or only one panel per metric with --compare.
    Without -o, the figure is written to runs/plot-RUN.png. The option --metrics also accepts eval_loss,
    tokens_per_second, loss_scale, and seconds.PHASE, such as seconds.data.
    """
    from ddp_tutorial.files import RUNS

    endings = [".png", ".svg", ".pdf"]
    if output is not None and output.suffix not in endings:
        raise ConfigError(f"'-o' must end in one of {', '.join(endings)}, got {output}")
    if output is not None and not output.parent.is_dir():
        raise ConfigError(f"'-o' {output}: the folder {str(output.parent)!r} does not exist")
    folders = _chosen(runs, everything)

    require_package("matplotlib", "notebooks")
    import matplotlib as mpl

    mpl.use("agg")  # no window, regardless of the environment

    from ddp_tutorial.figures.run_plots import LOSSES, draw_runs, write_figure

    default = [] if with_losses else ["loss", "grad_norm", "learning_rate"]
    names = [name.strip() for name in metrics.split(",")] if metrics is not None else default
    panels = [LOSSES] * with_losses + [name for name in names if not (with_losses and name in {"loss", "eval_loss"})]
    figure = draw_runs(folders, panels, axis, window, compare)  # type: ignore[arg-type]
    path = output or RUNS / f"plot-{_joined(folders)}.png"
    path.parent.mkdir(parents=True, exist_ok=True)  # runs/ may not exist if all runs are elsewhere
    write_figure(figure, path)
    _announce(path, opens)


def _announce(path: Path, opens: bool) -> None:
    """Print the path of a figure. If `opens` is true, open the figure in $BROWSER or the desktop's default program."""
    import webbrowser

    click.echo(str(path))
    if opens and not webbrowser.open(path.absolute().as_uri()):
        raise FailedError(f"no viewer was found for {path}. Set BROWSER to a program that displays images")


def _joined(folders: list[Path]) -> str:
    """Return a file name that depends only on the names of the runs."""
    from ddp_tutorial.files import RUNS

    names = [
        str(folder.relative_to(RUNS) if folder.is_relative_to(RUNS) else folder.resolve().name) for folder in folders
    ]
    more = f"-and-{len(names) - 3}-more" if len(names) > 3 else ""
    return "-".join(names[:3]).replace("/", "-") + more


# ------------------------------------------------------------------------------------------------------------ timeline


@logs.command("timeline")
@runs_dir
@a_run
@_open
def draw_timeline(run: str, opens: bool) -> None:
    """Draw a run's profiled steps, with all ranks on a common clock.

    The run's `profile` settings select the steps. The figure is written to profile/timeline.png in the run's directory.
    """
    from ddp_tutorial.runs.folder import RunFolder
    from ddp_tutorial.runs.summaries import find_run

    folder = RunFolder(find_run(run))
    if not folder.timeline.is_file():
        raise ConfigError(f"{folder.path} contains no profiled steps. Rerun the training with profile.steps=3")

    require_package("matplotlib", "notebooks")
    import matplotlib as mpl

    mpl.use("agg")

    from ddp_tutorial.ddp.timeline import Timeline
    from ddp_tutorial.figures.run_plots import write_figure
    from ddp_tutorial.figures.step_plots import profiled_steps

    path = folder.timeline.with_suffix(".png")
    write_figure(profiled_steps(Timeline.load_trace(folder.timeline)), path)
    _announce(path, opens)


# ---------------------------------------------------------------------------------------------------------------- tail


@logs.command("tail")
@runs_dir
@a_run
@click.option(
    "-n",
    "count",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    help="Number of existing lines to print first.",
)
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--metrics", is_flag=True, help="Follow the step metrics instead of the log.")
@click.option("-e", "--edit", is_flag=True, help="Open the file in $VISUAL or $EDITOR instead of following it.")
def tail(run: str, count: int, rank: int, metrics: bool, edit: bool) -> None:
    """Follow the log of one rank until the run exits.

    If rank 0's log does not exist, the command shows the metrics of each step.
    """
    from ddp_tutorial.runs.folder import RunFolder
    from ddp_tutorial.runs.summaries import find_run, follow, state_of, summarize

    folder = find_run(run)
    log = RunFolder(folder).rank_log(rank)
    if metrics or (rank == 0 and not log.is_file()):
        log = RunFolder(folder).metrics
    if not log.is_file() and rank > 0:
        there = sorted(int(path.stem.removeprefix("rank_")) for path in folder.glob("rank_*.log"))
        available = f"; it contains logs from {named_ranks(there)}" if there else " or any other rank"
        raise ConfigError(f"{folder} contains no log from rank {rank}{available}")
    if edit:
        click.edit(filename=str(log))
        return
    try:
        for line in follow(log, lambda: state_of(folder) != "running", count):
            click.echo(_step(line) if log.suffix == ".jsonl" else line)
    except KeyboardInterrupt:
        sys.exit(130)
    summary = summarize(folder)
    click.echo(_state(summary) + (f": {_shortened(summary.failure.error)}" if summary.failure else ""), err=True)


def _step(line: str) -> str:
    """Format a row of metrics as readable text. Return any other line unchanged."""
    from ddp_tutorial.runs.folder import format_loss
    from ddp_tutorial.runs.summaries import finite_number, unit_of

    try:
        row = json.loads(line)
    except ValueError:
        return line
    if not isinstance(row, dict) or "step" not in row:
        return line
    losses = {"loss": "loss", "eval_loss": "validation loss"}
    words = [f"{name} {format_loss(finite_number(row, key))}" for key, name in losses.items() if key in row]
    numbers = {"grad_norm": "grad norm {:.3f}", "learning_rate": "learning rate {:.3g}"}
    numbers |= {f"{unit}_per_second": f"{{:,.0f}} {unit}/s" for unit in [unit_of([row])]}
    words += [form.format(value) for key, form in numbers.items() if (value := finite_number(row, key)) is not None]
    return f"step {row['step']}: {', '.join(words)}"
