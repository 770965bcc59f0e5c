"""Notebooks as experiments: parameters checked, executed by papermill, watched from the terminal.

An execution has succeeded if papermill's exit code is 0 and the notebook has written `result.json`, which it does last.
The executed notebook's metadata does not tell: it says "completed" even when the kernel has died.
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

from ddp_tutorial.config import ConfigError, FailedError, SomeConfig, check, did_you_mean, load, merge
from ddp_tutorial.experiments.notebooks import NOTEBOOKS
from ddp_tutorial.files import RUNS, new_directory, write_atomically, write_json
from ddp_tutorial.processes.process_tags import kill_tagged
from ddp_tutorial.runs.folder import PER_SECOND, RunFolder, format_loss, read_lines
from ddp_tutorial.runs.summaries import unit_of

# What a fresh IPython kernel has among its globals, besides names that begin with an underscore.
_KERNEL_NAMES = {"In", "Out", "get_ipython", "exit", "quit", "open"}
_LOG = "papermill.log"
_MARK = "DDP_TUTORIAL_NOTEBOOK"  # environment variable of all processes of an execution: the folder it writes to
_END_SECONDS = 3.0  # for papermill to shut its kernel down, before it is killed


class NotebookError(FailedError):
    """A notebook did not run to its end; the message has the last lines of its output."""


def read_parameters(cls: type[SomeConfig], names: Mapping[str, Any], also: tuple[str, ...] = ()) -> SomeConfig:
    """The config that a notebook's parameters describe: `config = read_parameters(TaskConfig, globals())`.

    `names` are the notebook's globals. If the parameter `extends` names a config, that gives the values of parameters
    that are None or missing. `also` are the notebook's own parameters, which are not part of the config. Call it right
    after the parameters cell: it takes every plain value among the globals for a parameter.

    Raises `ConfigError` for a wrong value, and for an unknown name, about which papermill only warns.
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
    values = load(base, cls).model_dump() if base else {}
    return check(cls, merge(values, given), origin="parameters")


def open_folder(name: str, kind: str) -> Path:
    """The folder of an experiment, `runs/NAME`, or without a name a new one, named after its kind and the time.

    An earlier `result.json` in it is removed, so that one that is there belongs to this execution.
    """
    folder = RUNS / name if name else new_directory(RUNS, time.strftime(f"{kind}-%Y%m%d-%H%M%S"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").unlink(missing_ok=True)
    return folder


def write_result(folder: Path, parameters: Mapping[str, Any], metrics: Mapping[str, Any], **others: Any) -> None:
    """Write `result.json`, as the last thing that an experiment does. Metrics that are one number become columns of a
    sweep's table; `others` are further entries of the file."""
    from ddp_tutorial.environment import describe_environment

    about = {"schema": 1, "status": "finished", "parameters": parameters, "environment": describe_environment()}
    write_json(folder / "result.json", about | {"metrics": metrics} | others)


def run_main_job(steps: int = 600) -> None:
    """`make run`: execute `experiments/train.ipynb`, with progress bars. Raises `NotebookError` if it fails."""
    folder = new_directory(RUNS, time.strftime("train-%Y%m%d-%H%M%S"))
    nprocs = _sensible_ranks()
    print(
        f"Executing notebooks/experiments/train.ipynb: {nprocs} ranks, then one process on the same work.", flush=True
    )
    parameters = {"name": folder.name, "nprocs": nprocs, "steps": steps}
    run_notebook(NOTEBOOKS / "experiments" / "train.ipynb", folder, parameters)
    result = json.loads((folder / "result.json").read_text())
    print()
    print(result["summary"])
    print(f"\nWhat the model writes after {result['prompt']!r}:\n")
    print("\n".join(f"    {line}" for line in result["sample"].split("\n")))
    print()
    for what, name in (("notebook", "train.ipynb"), ("page", "train.html"), ("result", "result.json")):
        print(f"{what:9} {folder / name}")


def _sensible_ranks() -> int:
    """How many ranks `make run` starts: two, or one for each GPU where there are several. Prints what to expect of this
    machine."""
    import torch

    from ddp_tutorial.environment import cores

    gpus = torch.cuda.device_count()
    if gpus >= 2:
        print(f"{gpus} GPUs found: one rank on each, with NCCL.")
        return gpus
    if gpus == 1:
        print("1 GPU found. Ranks need one each, so both runs train on the CPU.")
    elif cores() < 2:
        print("1 core found: two ranks take turns on it, so expect the right result, but no speed-up.")
    return 2


def run_notebook(notebook: Path, folder: Path, parameters: Mapping[str, Any]) -> None:
    """Execute `notebook` with papermill, with a progress bar for each run below `folder`; write the executed notebook
    and an HTML page of it to `folder`.

    The parameter `name` should tell the notebook to write there too, and `result.json` last. Raises `NotebookError`
    where it fails, or leaves no result.
    """
    with _Follower(folder) as follower:
        code = execute(notebook, folder, parameters, follower.look)
    executed = folder / notebook.name
    if code or not (folder / "result.json").is_file():
        raise NotebookError(
            f"{notebook.name} did not run to its end (papermill's exit code: {code}). "
            f"It got as far as {executed}, and said:\n" + "\n".join(last_lines(folder))
        )
    write_page(executed, executed.with_suffix(".html"))


def execute(
    notebook: Path,
    folder: Path,
    parameters: Mapping[str, Any],
    look: Callable[[], object] = lambda: None,
    limit: float | None = None,
) -> int | None:
    """Execute `notebook` with papermill into `folder`; returns papermill's exit code, or None after `limit` seconds.

    `look` is called several times a second meanwhile. Parameters are passed in a YAML file, which keeps their types; on
    the command line papermill would guess them. When it returns, all processes that it has started have ended.
    """
    write_atomically(folder / "parameters.yaml", yaml.safe_dump(dict(parameters), sort_keys=False).encode())
    command = [sys.executable, "-m", "papermill", str(notebook), str(folder / notebook.name), "-f"]
    command += [str(folder / "parameters.yaml"), "--cwd", str(Path.cwd()), "--no-progress-bar", "--kernel", "python3"]
    environment = {**os.environ, "PYDEVD_DISABLE_FILE_VALIDATION": "1", _MARK: str(folder.resolve())}
    end = math.inf if limit is None else time.monotonic() + limit
    with (folder / _LOG).open("wb") as log:
        # In a session of its own, so that an interrupt reaches it from here only, and not from the terminal as well.
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
    """When the block ends, interrupt papermill if it still runs, then kill whatever it has started."""
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
    """Kill all processes of executions into `folder`, or into one below it.

    A kernel that dies leaves the processes that it has started, and an execution outlives a parent that was killed. All
    of them have inherited an environment variable, by which they are found even when their parent has ended.
    """
    top = folder.resolve()
    kill_tagged(_MARK, lambda mark: Path(mark).is_relative_to(top))


def last_lines(folder: Path, count: int = 15) -> list[str]:
    """The last lines that papermill printed when it executed a notebook into `folder`."""
    return (folder / _LOG).read_text(errors="replace").strip().split("\n")[-count:]


class _Follower:
    """A progress bar for each run below a folder, moved on as its log file grows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bars: dict[Path, Any] = {}

    def __enter__(self) -> "_Follower":
        return self

    def __exit__(self, *_: object) -> None:
        for bar in self.bars.values():
            bar.close()

    def look(self) -> None:
        """Show what has been written since the last look."""
        from tqdm import tqdm

        for log in sorted(self.folder.glob("*/metrics.jsonl")):
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
    """Write an executed notebook as one HTML file, with its figures in it."""
    from nbconvert import HTMLExporter

    html, _ = HTMLExporter().from_filename(str(notebook))
    page.write_text(html, encoding="utf-8")
