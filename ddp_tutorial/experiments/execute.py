"""Execute notebooks as experiments: check the parameters, run papermill, and show progress in the terminal.

A notebook run is successful if papermill exits with code 0 and the notebook has written `result.json` as its last
action. The executed notebook's recorded status is not sufficient, because it is "completed" even if the kernel died.
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from ddp_tutorial.config import ConfigError, FailedError, SomeConfig, check, did_you_mean, load_with
from ddp_tutorial.experiments.notebooks import NOTEBOOKS
from ddp_tutorial.files import RUNS, new_directory, write_atomically, write_json
from ddp_tutorial.processes.process_tags import kill_tagged
from ddp_tutorial.runs.folder import PER_SECOND, RunFolder, format_loss, read_lines
from ddp_tutorial.runs.summaries import unit_of

# The globals of a fresh IPython kernel, except names that begin with an underscore.
_KERNEL_NAMES = {"In", "Out", "get_ipython", "exit", "quit", "open"}
_LOG = "papermill.log"
_MARK = "DDP_TUTORIAL_NOTEBOOK"  # environment variable that marks a notebook run's processes; its value is the folder
_END_SECONDS = 3.0  # papermill is killed if it does not shut down its kernel within this time


class NotebookError(FailedError):
    """Raised when a notebook fails. The message contains the last lines of the notebook's output."""


def read_parameters(cls: type[SomeConfig], names: Mapping[str, Any], also: tuple[str, ...] = ()) -> SomeConfig:
    """Return the config that a notebook's parameters specify.

    Call this function right after the parameters cell, as in `config = read_parameters(TaskConfig, globals())`. Every
    public global that is not a module, a callable or None is treated as a parameter.

    Args:
        cls: The config class.
        names: The notebook's globals. If the parameter `extends` names a base config, that config provides the values
            of parameters that are missing or None.
        also: The notebook's own parameters, which are not part of the config.

    Raises:
        ConfigError: If a value is invalid, or a name is unknown. Papermill only warns about unknown names.
    """
    given = {
        name: value
        for name, value in names.items()
        if not name.startswith("_")
        and name not in {*_KERNEL_NAMES, *also, "extends"}
        and value is not None
        and not isinstance(value, types.ModuleType)
        and not callable(value)
    }
    unknown = [name for name in given if name not in cls.model_fields]
    if unknown:
        known = sorted({*cls.model_fields, *also, "extends"})
        raise ConfigError(f"unknown parameter {unknown[0]!r}.{did_you_mean(unknown[0], known)}")
    base = names.get("extends")
    return load_with(base, cls, given, "parameters") if base else check(cls, given, "parameters")


def open_folder(name: str, kind: str) -> Path:
    """Create the folder of an experiment and return its path.

    An existing `result.json` in the folder is removed, so a `result.json` always belongs to the current run.

    Args:
        name: The folder under `runs/`. If `name` is empty, the folder is named after `kind` and the current time.
        kind: The kind of experiment.
    """
    folder = RUNS / name if name else new_directory(RUNS, time.strftime(f"{kind}-%Y%m%d-%H%M%S"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").unlink(missing_ok=True)
    return folder


def write_result(folder: Path, parameters: Mapping[str, Any], metrics: Mapping[str, Any], **others: Any) -> None:
    """Write `result.json`. An experiment must call this function as its last action.

    Args:
        folder: The experiment's folder.
        parameters: The notebook's parameters.
        metrics: The results. Scalar metrics become columns of a sweep's table.
        others: Additional entries for the file.
    """
    from ddp_tutorial.environment import describe_environment

    about = {"schema": 1, "status": "finished", "parameters": parameters, "environment": describe_environment()}
    write_json(folder / "result.json", about | {"metrics": metrics} | others)


def run_main_job(steps: int = 600) -> None:
    """Execute `experiments/train.ipynb` with progress bars, as `make run` does.

    Raises:
        NotebookError: If the notebook failed.
    """
    folder = new_directory(RUNS, time.strftime("train-%Y%m%d-%H%M%S"))
    nprocs = _sensible_ranks()
    print(f"Executing notebooks/experiments/train.ipynb on {nprocs} ranks, then the same work on one rank.", flush=True)
    parameters = {"extends": "base", "name": folder.name, "nprocs": nprocs, "steps": steps}
    run_notebook(NOTEBOOKS / "experiments" / "train.ipynb", folder, parameters)
    result = json.loads((folder / "result.json").read_text())
    print()
    print(result["summary"])
    print(f"\nText that the model generates after {result['prompt']!r}:\n")
    print("\n".join(f"    {line}" for line in result["sample"].split("\n")))
    print()
    for what, name in (("notebook", "train.ipynb"), ("page", "train.html"), ("result", "result.json")):
        print(f"{what:9} {folder / name}")


def _sensible_ranks() -> int:
    """Return the number of ranks for `make run`: one per GPU if there are at least two GPUs, otherwise 2.

    Depending on the hardware, also print one line about the expected behavior.
    """
    import torch

    from ddp_tutorial.environment import cores

    gpus = torch.cuda.device_count()
    if gpus >= 2:
        print(f"{gpus} GPUs found. Each GPU runs one rank, with NCCL.")
        return gpus
    if gpus == 1:
        print("1 GPU found. Each rank requires its own GPU, so both runs train on the CPU.")
    elif cores() < 2:
        print("1 core found. Two ranks share it, so the results are correct, but there is no speedup.")
    return 2


def run_notebook(notebook: Path, folder: Path, parameters: Mapping[str, Any]) -> None:
    """Execute `notebook` with papermill, and write the executed notebook and its HTML page to `folder`.

    A progress bar is displayed for each training run that starts under `folder`. The parameter `name` must be the path
    of `folder` relative to `runs/`.

    Raises:
        NotebookError: If the notebook failed or did not write `result.json`.
    """
    with _Follower(folder) as follower:
        code = execute(notebook, folder, parameters, follower.look)
    executed = folder / notebook.name
    if code or not (folder / "result.json").is_file():
        raise NotebookError(
            f"{notebook.name} did not finish (papermill exited with code {code}). "
            f"Its outputs so far are in {executed}. The last lines of its log:\n" + "\n".join(last_lines(folder))
        )
    write_page(executed, executed.with_suffix(".html"))


def execute(
    notebook: Path,
    folder: Path,
    parameters: Mapping[str, Any],
    look: Callable[[], object] = lambda: None,
    limit: float | None = None,
) -> int | None:
    """Execute `notebook` with papermill, and write the output to `folder`.

    When this function returns, all processes that it started have exited. The parameters are passed in a YAML file to
    preserve their types; papermill would guess the types of command-line arguments.

    Args:
        notebook: The notebook to execute.
        folder: The folder for the executed notebook and papermill's log.
        parameters: The notebook's parameters.
        look: A function to call several times per second during the execution.
        limit: The timeout in seconds.

    Returns:
        Papermill's exit code, or None after a timeout.
    """
    write_atomically(folder / "parameters.yaml", yaml.safe_dump(dict(parameters), sort_keys=False).encode())
    command = [sys.executable, "-m", "papermill", str(notebook), str(folder / notebook.name), "-f"]
    command += [str(folder / "parameters.yaml"), "--cwd", str(Path.cwd()), "--no-progress-bar", "--kernel", "python3"]
    environment = {**os.environ, "PYDEVD_DISABLE_FILE_VALIDATION": "1", _MARK: str(folder.resolve())}
    end = math.inf if limit is None else time.monotonic() + limit
    with (folder / _LOG).open("wb") as log:
        # Papermill runs in its own session, so that Ctrl-C in the terminal interrupts only this process.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )
        with _ended(process, folder):
            while process.poll() is None and time.monotonic() < end:
                look()
                time.sleep(0.1)
            look()
            return process.poll()


@contextmanager
def _ended(process: subprocess.Popen[bytes], folder: Path) -> Iterator[None]:
    """At the end of the block, interrupt papermill if it is still running, and then kill all of its processes."""
    try:
        yield
    finally:
        try:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            pass  # a kernel in the middle of a cell may take much longer to shut down
        finally:
            end_processes_of(folder)
            process.wait()


def end_processes_of(folder: Path) -> None:
    """Kill all processes of notebook runs that write to `folder` or its subfolders.

    If a kernel crashes, its child processes keep running. If the process that called `execute` is killed, papermill
    keeps running. All processes inherit an environment variable, which identifies them even if their parent exits.
    """
    top = folder.resolve()
    kill_tagged(_MARK, lambda mark: Path(mark).is_relative_to(top))


def last_lines(folder: Path, count: int = 15) -> list[str]:
    """Return the last `count` lines of papermill's log in `folder`."""
    return (folder / _LOG).read_text(errors="replace").strip().split("\n")[-count:]


class _Follower:
    """Progress bars for the runs that start under a folder, updated from the runs' log files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.earlier = set(folder.glob("*/metrics.jsonl"))  # such as those of a sweep's points
        self.bars: dict[Path, Any] = {}

    def __enter__(self) -> "_Follower":
        return self

    def __exit__(self, *_: object) -> None:
        for bar in self.bars.values():
            bar.close()

    def look(self) -> None:
        """Update the bars with the log lines written since the last call."""
        from tqdm import tqdm

        for log in sorted(set(self.folder.glob("*/metrics.jsonl")) - self.earlier):
            if log not in self.bars:
                config = json.loads(RunFolder(log.parent).config.read_text())
                self.bars[log] = tqdm(total=config["steps"], desc=f"{log.parent.name:12}", unit="step", mininterval=0)
            bar = self.bars[log]
            rows = [row for row in read_lines(log) if "loss" in row]
            if rows and rows[-1]["step"] > bar.n:
                last = rows[-1]
                unit = unit_of([last])
                rate = f"{last[unit + PER_SECOND]:,.0f} {unit}/s"
                bar.set_postfix_str(f"loss {format_loss(last['loss'])}, {rate}", refresh=False)
                bar.update(last["step"] - bar.n)
                if bar.n == bar.total:
                    bar.close()


def write_page(notebook: Path, page: Path) -> None:
    """Write an executed notebook as a single HTML file with embedded figures."""
    from nbconvert import HTMLExporter

    html, _ = HTMLExporter().from_filename(str(notebook))
    write_atomically(page, html.encode())  # a sweep skips its comparison if the page exists
