"""Notebooks as experiments: parameters checked, executed by papermill, watched from the terminal.

Whether an execution went well is told by papermill's exit code and by `result.json`, which the notebook writes last;
the notebook's own metadata says "completed" even when its kernel has died.
"""

import json
import os
import subprocess
import sys
import time
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ddp_tutorial.config import ConfigError, FailedError, SomeConfig, check, did_you_mean, load, merge
from ddp_tutorial.files import RUNS, new_directory
from ddp_tutorial.notebooks import NOTEBOOKS
from ddp_tutorial.runs import read_lines, shown

# What a fresh IPython kernel has among its globals, besides names that begin with an underscore.
_KERNEL_NAMES = {"In", "Out", "get_ipython", "exit", "quit", "open"}


class NotebookError(FailedError):
    """A notebook did not run to its end; the message holds the end of what it said."""


def read_parameters(cls: type[SomeConfig], names: Mapping[str, Any], also: tuple[str, ...] = ()) -> SomeConfig:
    """The config that a notebook's parameters describe: `config = read_parameters(TrainConfig, globals())`.

    Starts from the config that `extends` names, if that is among them; None stands for what is said there. `also` are
    the notebook's own parameters, which are not part of the config. Call it right after the parameters cell: every
    plain value found is taken for a parameter, so a misspelt one is found too, of which papermill only warns.

    Raises `ConfigError`.
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


def run_main_job(steps: int = 600) -> None:
    """`make run`: execute `experiments/train.ipynb` and show how far it is. Raises `NotebookError` if it fails."""
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
    """Two, or one for each GPU where there are several; says what to expect of this machine."""
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
    """Execute `notebook` with papermill into `folder`, together with its page of HTML, and follow its runs.

    The notebook is told to train below `folder` (parameter `name`) and to write `folder/result.json` last.
    """
    executed = folder / notebook.name
    settings = [part for key, value in parameters.items() for part in ("-p", key, str(value))]
    command = [sys.executable, "-m", "papermill", str(notebook), str(executed), *settings]
    command += ["--cwd", str(Path.cwd()), "--no-progress-bar", "--execution-timeout", "3600", "--kernel", "python3"]
    with (folder / "papermill.log").open("wb") as log:
        environment = {**os.environ, "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        with _ended(process), _Follower(folder) as follower:
            while process.poll() is None:
                follower.look()
                time.sleep(0.2)
            follower.look()
    if process.returncode or not (folder / "result.json").is_file():
        tail = (folder / "papermill.log").read_text(errors="replace").strip().split("\n")[-15:]
        raise NotebookError(
            f"{notebook.name} did not run to its end (papermill's exit code: {process.returncode}). "
            f"It got as far as {executed}, and said:\n" + "\n".join(tail)
        )
    write_page(executed, executed.with_suffix(".html"))


@contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """On the way out, wait for papermill to shut its kernel down. An interrupt has reached it as well."""
    try:
        yield
    finally:
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class _Follower:
    """Progress bars made from the log files of the runs below a folder, as they grow."""

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
                config = json.loads((log.parent / "config.json").read_text())
                self.bars[log] = tqdm(total=config["steps"], desc=f"{log.parent.name:12}", unit="step", mininterval=0)
            bar = self.bars[log]
            rows = [row for row in read_lines(log) if "loss" in row]
            if rows and rows[-1]["step"] > bar.n:
                last = rows[-1]
                rate = f"{last['tokens_per_second']:,.0f} tokens/s"
                bar.set_postfix_str(f"loss {shown(last['loss'])}, {rate}", refresh=False)
                bar.update(last["step"] - bar.n)
                if bar.n == bar.total:
                    bar.close()


def write_page(notebook: Path, page: Path) -> None:
    """An executed notebook as one HTML file, with its figures in it."""
    from nbconvert import HTMLExporter

    html, _ = HTMLExporter().from_filename(str(notebook))
    page.write_text(html, encoding="utf-8")
