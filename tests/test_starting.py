"""A script trains on the ranks that torchrun or Slurm started, or otherwise on ranks that it starts itself."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest
import torch

from ddp_tutorial import ConfigError, RankError, World, rank_zero_first, run
from ranks import TORCHRUN, free_port

SCRIPT = """
import os
import torch
import torch.distributed as dist
from ddp_tutorial import run

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
torch.nn.Linear.title = "an option of another module"
os.environ["FLAG"] = "set"
STARTED_AS = [os.environ.get("RANK")]

class Net(torch.nn.Linear):  # a class of the script, as people's models are
    pass

def say(line):  # in one write, which no other rank's can cut in two
    print(line + "\\n", end="", flush=True)

def main(world, start, kind):
    train, _ = torch.utils.data.random_split(range(100), [80, 20])
    model = kind(2, 1, bias=False)
    number = torch.tensor(start + world.rank)
    if world.size > 1:
        dist.all_reduce(number)
    STARTED_AS.append(model.title)
    say(f"rank {world.rank}: {train.indices[:9]} {model.weight.tolist()} {os.environ['FLAG']} {STARTED_AS}")
    return f"{number.item()} of {world.size}, group {dist.is_initialized()}, {isinstance(model, Net)}, {world.rank}"

say("top level")
if __name__ == "__main__":
    say(f"result {run(main, 10, Net, nprocs=2, device='cpu', threads=1)}")
    assert not dist.is_initialized()
"""


@pytest.fixture
def script(workdir: Path) -> Path:
    path = workdir / "train.py"
    path.write_text(SCRIPT)
    return path


def python(*command: str | Path, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )


def facts(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the observations of `main` on each rank."""
    return sorted(re.findall(r"rank \d: .*", done.stdout))


def test_a_script_behaves_the_same_under_python_and_torchrun(script: Path) -> None:
    """Every rank runs the top level: seeds, default dtypes, globals, options of other modules, the environment."""
    started = [python(sys.executable, *how, cwd=script.parent) for how in ([script], ["-m", "train"])]
    joined = python(*TORCHRUN, script)
    for done in started:
        assert (done.returncode, done.stderr) == (0, "")
        first, *others, last = done.stdout.splitlines()
        assert first == "top level"  # the process that starts the ranks
        assert {"[rank 0] top level", "[rank 1] top level"} < set(others)
        assert last == "result 21 of 2, group True, True, 0"  # 10 + 11
    assert joined.returncode == 0, joined.stderr
    assert [line for line in joined.stdout.splitlines() if line == "top level"] == ["top level"] * 2
    assert "result 21 of 2, group True, True, 1" in joined.stdout.splitlines()
    assert facts(started[0]) == facts(started[1]) == facts(joined)
    assert len(facts(joined)) == 2


def test_under_slurm_each_task_is_one_rank(script: Path) -> None:
    """The variables are those of `srun --ntasks 2`."""
    port = str(free_port())
    loopback = next(name for _, name in socket.if_nameindex() if name in {"lo", "lo0"})
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": loopback, "OMP_NUM_THREADS": "1"}
    tasks = [
        subprocess.Popen(
            [sys.executable, script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | step | meet | {"SLURM_PROCID": task, "SLURM_LOCALID": task},
        )
        for task in ("0", "1")
    ]
    try:
        for rank, task in enumerate(tasks):
            out, err = task.communicate(timeout=300)
            assert task.returncode == 0, err
            first, _, last = out.splitlines()
            assert (first, last) == ("top level", f"result 21 of 2, group True, True, {rank}")
    finally:
        for task in tasks:
            task.kill()
            task.communicate()


def test_a_single_rank_under_torchrun_has_no_group(script: Path) -> None:
    done = python(sys.executable, script, RANK="0", WORLD_SIZE="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[::2] == ["top level", "result 10 of 1, group False, True, 0"]


def shown(error: BaseException) -> str:
    """Return the text that Python prints for an uncaught error."""
    return "".join(traceback.format_exception(error))


def test_a_config_error_of_a_rank_is_raised_even_if_other_ranks_failed() -> None:
    def prepare(world: World) -> None:
        with rank_zero_first(world):
            raise ConfigError("'steps' is too few")

    with pytest.raises(ConfigError) as caught:
        run(prepare, nprocs=2, device="cpu", echo=False)
    assert str(caught.value) == "'steps' is too few"
    assert shown(caught.value).endswith("ddp_tutorial.config.ConfigError: 'steps' is too few\n")
    assert "launcher.py" not in shown(caught.value)
    assert "rank 1" not in shown(caught.value)


def test_other_errors_of_a_rank_show_its_own_traceback_only() -> None:
    def fail(world: World) -> None:
        raise KeyError("a bug")

    with pytest.raises(RankError) as caught:
        run(fail, nprocs=1, device="cpu", echo=False)
    assert caught.value.is_a(KeyError)
    assert "rank 0 raised KeyError: 'a bug'" in shown(caught.value)
    assert 'raise KeyError("a bug")' in shown(caught.value)
    assert "launcher.py" not in shown(caught.value)


def test_options_are_passed_to_launch_and_a_timeout_is_respected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankError, match="did not finish within 4 s"):
        run(lambda world: time.sleep(1000), nprocs=1, device="cpu", timeout=4)
    assert (
        run(lambda world: print("hidden") or torch.get_num_threads(), nprocs=1, device="cpu", echo=False, threads=3)
        == 3
    )
    assert capsys.readouterr().out == ""


def test_a_missing_device_is_rejected_before_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.multiprocessing, "spawn", lambda *_, **__: pytest.fail("a process was started"))
    with pytest.raises(ConfigError, match="device='cuda' requires one GPU for each of the 2 ranks"):
        run(print, device="cuda")


WAITING = """
import signal
import time
from ddp_tutorial import run

def main(world):
    asked = []  # not an Event: the handler would wait forever for the lock of an Event that this thread holds
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    print("ready", flush=True)
    while not asked:
        time.sleep(0.05)
    return f"rank {world.rank} was asked to end, and had time to"

print(run(main, nprocs=2, device="cpu", threads=1), flush=True)
"""


def test_a_signal_reaches_the_ranks_which_return_by_themselves(workdir: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", WAITING], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert sorted(process.stdout.readline() for _ in range(2)) == ["[rank 0] ready\n", "[rank 1] ready\n"]
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=90)
        assert (process.returncode, out) == (0, "rank 0 was asked to end, and had time to\n")
    finally:
        process.kill()
        process.communicate()
