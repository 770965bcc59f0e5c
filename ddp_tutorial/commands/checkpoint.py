"""Commands that inspect checkpoints."""

import json
import sys
from pathlib import Path
from typing import Any

import click

from ddp_tutorial.commands import runs_dir
from ddp_tutorial.config import ConfigError


@click.group()
def checkpoint() -> None:
    """Inspect the checkpoints of a run.

    PATH is a run's directory, a run's name under runs/, or the path of a checkpoint.
    """


_a_path = click.argument("path", type=click.Path(path_type=Path))
_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def _checkpoints(path: Path) -> list[Path]:
    """Return the checkpoint at `path`, or all checkpoints if `path` is a run. Raise `ConfigError` if none exists."""
    from ddp_tutorial.checkpoint.manifest import CHECKPOINTS, MANIFEST, list_checkpoints
    from ddp_tutorial.files import RUNS
    from ddp_tutorial.runs.summaries import find_run

    for folder in (path, RUNS / path):  # a directory such as data/ does not hide a run with the same name
        if (folder / MANIFEST).is_file():
            return [folder]
        if found := list_checkpoints(folder / CHECKPOINTS) or list_checkpoints(folder):
            return found
    if not path.is_dir():
        path = find_run(str(path))
    raise ConfigError(f"{str(path)!r} does not contain a checkpoint")


@checkpoint.command("list")
@runs_dir
@_a_path
@_as_json
def checkpoint_list(path: Path, as_json: bool) -> None:
    """List a run's checkpoints, with the step, number of ranks, size and metrics of each checkpoint."""
    from ddp_tutorial.checkpoint.manifest import CheckpointError, read_manifest

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
@runs_dir
@_a_path
@_as_json
def checkpoint_inspect(path: Path, as_json: bool) -> None:
    """Show the components and files of a checkpoint, and the library versions.

    If PATH is a run, the command shows the newest checkpoint.
    """
    from ddp_tutorial.checkpoint.manifest import read_manifest

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
@runs_dir
@_a_path
@_as_json
def checkpoint_verify(path: Path, as_json: bool) -> None:
    """Compare every file with its checksum. The exit code is 1 if a file does not match."""
    from ddp_tutorial.checkpoint.manifest import verify

    found = {str(folder): verify(folder) for folder in _checkpoints(path)}
    if as_json:
        click.echo(json.dumps(found))
    else:
        for folder, problems in found.items():
            click.echo("\n".join(problems) or f"{folder}: intact")
    if any(found.values()):
        sys.exit(1)


@checkpoint.command("diff")
@runs_dir
@_a_path
@click.argument("other", type=click.Path(path_type=Path))
@_as_json
def checkpoint_diff(path: Path, other: Path, as_json: bool) -> None:
    """Compare the settings and all values of two checkpoints. The exit code is 1 if the checkpoints differ."""
    from ddp_tutorial.checkpoint.comparison import compare

    found = compare(_checkpoints(path)[-1], _checkpoints(other)[-1])
    click.echo(
        json.dumps(found) if as_json else "\n".join(f"{where}: {what}" for where, what in found.items()) or "equal"
    )
    if found:
        sys.exit(1)
