"""A second local user attacks a running job. The book's threat model (`book/threat_model.md`) states the same results.

The attacker is a child process that drops root's privileges, so these tests need root.
"""

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from ddp_tutorial.live.magics import RankMagics
from ddp_tutorial.live.script import assignment_step

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as a second user")

NOBODY = 65534
SECONDS = 60.0  # for each attack

# Two ranks train with shared memory. Each waits in the middle of the exchange of its memory files until it is told to
# go on, so that an attacker has all the time it needs.
JOB = """
import json, os, time
from pathlib import Path

import torch
from ddp_tutorial import TrainConfig, Trainer, launch, make_source
from ddp_tutorial.ddp import DDPConfig, shared_memory

def loss(model, batch):
    inputs, targets = batch
    return torch.nn.functional.mse_loss(model(inputs), targets, reduction="sum"), len(inputs)

def wait_for(path):
    while not path.exists():
        time.sleep(0.02)

def work(world):
    gather, here = shared_memory.all_gather, Path(f"rank_{world.rank}.json")

    def gather_late(world, value):
        if isinstance(value, str) and not here.exists():
            about = {"pid": os.getpid(), "port": int(os.environ["MASTER_PORT"]), "mailbox": value}
            here.with_suffix(".part").write_text(json.dumps(about))
            here.with_suffix(".part").rename(here)
            wait_for(Path("go"))
        return gather(world, value)

    shared_memory.all_gather = gather_late
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    data = torch.utils.data.TensorDataset(torch.rand(64, 8), torch.rand(64, 1))
    config = TrainConfig(steps=4, name="mine", ddp=DDPConfig(shared_memory=True), checkpoint={"every": 2})
    return Trainer(model, make_source(data, 8, world), loss, world, config).train().losses

if __name__ == "__main__":
    losses = launch(work, 2, device="cpu", threads=1, echo=False)
    Path("losses.json").write_text(json.dumps(losses))
"""


def as_nobody(attack: Callable[[], Any]) -> Any:
    """Call `attack` in a child process of the user `nobody`. Return its result, or the `OSError` that it raises."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(SECONDS))
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            assert os.getuid() == NOBODY
            try:
                result = attack()
            except OSError as error:
                result = error
            os.write(writing, pickle.dumps(result))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert answer, "the attack did not return"
    return pickle.loads(answer)


@pytest.fixture(scope="module")
def job() -> Iterator[SimpleNamespace]:
    """Start a job of root in a folder that every user may enter. Yield the output of the ranks and the folder."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "job.py").write_text(JOB)
        environment = os.environ | {"SECRET": "of root"}
        process = subprocess.Popen([sys.executable, "job.py"], cwd=folder, env=environment, start_new_session=True)
        files = [folder / f"rank_{rank}.json" for rank in range(2)]
        try:
            deadline = time.monotonic() + 300
            while not all(file.exists() for file in files):
                assert process.poll() is None, "the job ended"
                assert time.monotonic() < deadline, "the ranks did not start"
                time.sleep(0.05)
            ranks = [json.loads(file.read_text()) for file in files]
            yield SimpleNamespace(process=process, folder=folder, ranks=ranks, port=ranks[0]["port"])
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture(scope="module")
def results(job: SimpleNamespace) -> Path:
    """Return the run folder after the job. The tests of the running job precede those that use it."""
    (job.folder / "go").touch()
    assert job.process.wait(timeout=300) == 0
    losses = json.loads((job.folder / "losses.json").read_text())
    assert losses[0] == losses[1]
    assert all(0 < loss < 10 for loss in losses[0])
    return job.folder / "runs" / "mine"


# ------------------------------------------------------------------------------------- what succeeds, and is documented


def test_a_second_user_can_join_the_store_of_a_launch(job: SimpleNamespace) -> None:
    """TCPStore has no authentication. The threat model states this, and how to isolate a job."""

    def join() -> tuple[list[str], bytes]:
        store = dist.TCPStore("127.0.0.1", job.port, is_master=False, timeout=timedelta(seconds=30))
        store.set("from nobody", "written")
        return store.list_keys(), store.get("from nobody")

    keys, value = as_nobody(join)
    assert value == b"written"
    assert any("store_based_barrier_key" in key for key in keys)


# ------------------------------------------------------------------------------------------------------- what must fail


def test_a_launch_listens_on_the_loopback_interface_only(job: SimpleNamespace) -> None:
    processes = [job.process.pid, *(rank["pid"] for rank in job.ranks)]
    found = [each for pid in processes for each in psutil.Process(pid).net_connections("inet")]
    listening = [each.laddr for each in found if each.status == psutil.CONN_LISTEN]
    assert job.port in {address.port for address in listening}
    assert {address.ip for address in listening} == {"127.0.0.1"}


@pytest.mark.parametrize("name", ["environ", "maps", "fd", "mem"])
def test_a_second_user_cannot_read_a_ranks_process(job: SimpleNamespace, name: str) -> None:
    path = Path(f"/proc/{job.ranks[0]['pid']}/{name}")
    assert b"SECRET=of root" in Path(f"/proc/{job.ranks[0]['pid']}/environ").read_bytes()
    refused = as_nobody(lambda: list(path.iterdir()) if path.is_dir() else path.open("rb").read(1))
    assert isinstance(refused, PermissionError)


def test_a_second_user_cannot_send_memory_to_a_rank(job: SimpleNamespace) -> None:
    mailbox = job.ranks[0]["mailbox"]
    assert mailbox.replace("\0", "@") in Path("/proc/net/unix").read_text(), "every user can read the socket's name"

    def send() -> int:
        memory = os.memfd_create("poison")
        os.ftruncate(memory, 1 << 20)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.connect(mailbox)
            return socket.send_fds(sender, [b"!"], [memory, os.eventfd(0)])

    assert isinstance(as_nobody(send), PermissionError)


def test_a_second_user_cannot_read_a_run_folder_or_its_checkpoints(results: Path) -> None:
    written = [path for path in results.rglob("*") if path.is_file()]
    assert {"manifest.json", "metrics.jsonl", "config.json"} <= {path.name for path in written}
    assert isinstance(as_nobody(lambda: list(results.iterdir())), PermissionError)
    for path in written:
        assert isinstance(as_nobody(lambda path=path: path.read_bytes()), PermissionError), path


def test_a_second_user_cannot_read_the_script_of_live_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    magics = RankMagics(None)
    pool = SimpleNamespace(n=2, threads=1, device="cpu", backend="gloo", nodes=1)
    monkeypatch.setattr(magics, "_alive", lambda: pool)
    magics.steps = [assignment_step("token", "a secret")]
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        script = Path(name) / "out.py"
        magics.script([str(script)])
        assert "a secret" not in script.read_text()
        assert isinstance(as_nobody(script.read_text), PermissionError)
