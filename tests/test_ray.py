"""The trainer in Ray Train, with a private Ray instance and a killed worker: bitwise identical to `launch`."""

import ast
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ddp_tutorial import launch
from ddp_tutorial.checkpoint import read_manifest, verify
from ddp_tutorial.config import from_arguments
from ddp_tutorial.examples import digits
from ddp_tutorial.runs.folder import load_run
from ranks import wait_until

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "ddp_tutorial" / "examples" / "ray_train.py"
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="Ray is not installed: pip install -c constraints.txt -e '.[ray]'",
)
ARGUMENTS = ["steps=14", "checkpoint.every=4", "eval_every=14", "log_every=1", "tensorboard=false"]

# Rank 1 is killed in the 7th step of its first life.
SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
import psutil
from ddp_tutorial import observe
from ddp_tutorial.config import ConfigError, from_arguments
from ddp_tutorial.examples import digits
from ddp_tutorial.examples import ray_train

REFUSED = (["checkpoint.every=4"], ["name=a"], ["name=a", "checkpoint.every=4", "checkpoint.background=true"])

def work(asked):
    steps, has_died = [], Path(asked["folder"], "has_died")
    def fate(edge):
        if edge.entered and edge.name == "update":
            steps.append(edge)
            if len(steps) == 7 and os.environ["RANK"] == "1" and not has_died.exists():
                has_died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
    with observe(fate):
        ray_train.work(asked)

def listening():  # the addresses on which Ray's processes listen
    found = set()
    for process in psutil.Process().children(recursive=True):
        try:
            found |= {each.laddr.ip for each in process.net_connections("tcp") if each.status == "LISTEN"}
        except psutil.Error:  # it has just ended
            pass
    return sorted(found)

def listening_without_workers():  # rank 0's store, part of torch, listens on all interfaces until the worker exits
    deadline = time.monotonic() + 300
    while "::" in (found := listening()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found

if __name__ == "__main__":
    for attempt in range(3):  # on a machine that is busy with other tests, Ray may give up on its own processes
        try:
            ray_train.start(2)
            break
        except Exception as error:
            print(error, file=sys.stderr)
            ray_train.ray.shutdown()
    else:
        sys.exit("Ray did not start in three attempts")
    refused = []
    for arguments in REFUSED:
        try:
            ray_train.trainer(from_arguments(digits.Options, arguments))
        except ConfigError as error:
            refused.append(str(error))
    options = from_arguments(digits.Options, sys.argv[1:])
    for attempt in range(3):  # Ray chooses a port before torch listens on it; another test may take the port meanwhile
        try:
            result = ray_train.trainer(options, work).fit()
            break
        except ray_train.rt.ControllerError as error:
            if "EADDRINUSE" not in str(error):
                raise
            print(error, file=sys.stderr)
    else:
        sys.exit("other processes took the ports that Ray chose in three attempts")
    told = {
        "refused": refused,
        "metrics": result.metrics,
        "checkpoint": result.checkpoint.path,
        "kept": [each.path for each, _ in result.best_checkpoints],
        "listening": listening_without_workers(),
    }
    print(json.dumps(told))
"""


def test_the_example_is_short_and_describes_how_to_run_it() -> None:
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) <= 100
    assert "python -m ddp_tutorial.examples.ray_train" in (ast.get_docstring(ast.parse(text)) or "")


@pytest.fixture
def folder_of_ray() -> Iterator[Path]:
    """A short path, because the names of Ray's sockets start with it."""
    folder = Path(tempfile.mkdtemp(prefix="ray"))
    yield folder
    for process in below(folder):  # after a failed test
        process.kill()
    shutil.rmtree(folder, ignore_errors=True)


def logs_of(folder: Path) -> str:
    """Return the ends of the logs of Ray's processes."""
    logs = sorted(folder.glob("ray/session_2*/logs/*.*"))
    ends = {path.name: path.read_text(errors="replace")[-1500:] for path in logs if path.is_file()}
    return "".join(f"\n---- {name}\n{end}" for name, end in ends.items() if end)


def below(folder: Path) -> list[psutil.Process]:
    """Return the processes of a Ray instance in `folder`."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("RAY_TMPDIR") == str(folder):
                found.append(process)
        except psutil.Error:
            pass
    return [process for process in found if process.pid != os.getpid()]


@needs_ray
@pytest.mark.timeout(1700)  # 100 s alone, but more than 400 s on a slow machine that runs other tests too
def test_a_ray_run_that_loses_a_worker_is_bitwise_identical(workdir: Path, folder_of_ray: Path) -> None:
    """One Ray instance serves all checks, because it takes half a minute."""
    (workdir / "on_ray.py").write_text(SCRIPT)
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{workdir}",
        "OMP_NUM_THREADS": "1",
        "RAY_TMPDIR": str(folder_of_ray),
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "240",  # the machine may be busy with other tests
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # as the example does
        "GLOO_SOCKET_IFNAME": next(name for _, name in socket.if_nameindex() if name in {"lo", "lo0"}),
        "RAY_raylet_start_wait_time_s": "60",
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # one process less
        "RAY_TRAIN_METRICS_ENABLED": "0",
    }
    environment.pop("RAY_ADDRESS", None)
    command = [sys.executable, str(workdir / "on_ray.py"), "name=on-ray", *ARGUMENTS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr + logs_of(folder_of_ray)
    told = json.loads(done.stdout.splitlines()[-1])

    assert all(
        "Set 'name', 'checkpoint.every' and checkpoint.background=false" in message for message in told["refused"]
    )
    assert len(told["refused"]) == 3

    # What Ray knows: the last checkpoint, where the run has it, its metrics, and as many as are to be kept.
    checkpoints = (workdir / "runs" / "on-ray" / "checkpoints").resolve()
    last = checkpoints / "step_00000014"
    assert told["checkpoint"] == str(last)
    assert verify(last) == []
    assert told["kept"] == [str(checkpoints / "step_00000012"), str(last)]
    assert sorted(map(str, checkpoints.iterdir())) == told["kept"]  # Ray removes the other checkpoints
    assert told["metrics"] == {"step": 14, **read_manifest(last).metrics}
    assert {"loss", "eval_loss", "eval_accuracy"} <= set(told["metrics"])

    # Rank 1 was killed in step 7; the run has gone on after step 4, from its own checkpoint.
    log = (workdir / "runs" / "on-ray" / "rank_0.log").read_text()
    assert (workdir / "has_died").exists()
    assert log.count("resuming after step 4, from ") == log.count("resuming after") == 1

    # The bits of a run that nobody has killed.
    options = from_arguments(digits.Options, ["name=launched", *ARGUMENTS])
    launched = launch(digits.main, 2, options, threads=1, echo=False, timeout=300)[0]
    run = load_run("runs/on-ray")
    assert run.result is not None
    assert run.series("loss")[1] == launched.losses
    assert run.result["metrics"]["weights"] == launched.weights

    # Ray itself listens on the loopback interface only, and all of its processes exit.
    assert {address.removeprefix("::ffff:") for address in told["listening"]} == {"127.0.0.1"}
    wait_until(lambda: not below(folder_of_ray), 120)
    assert [" ".join(process.cmdline()[:3]) for process in below(folder_of_ray)] == []
