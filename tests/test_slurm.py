"""A run that Slurm preempts and requeues is bitwise identical to an uninterrupted run."""

import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import slurm
from ddp_tutorial.commands.slurm_script import slurm_script
from ddp_tutorial.config import ConfigError, check, from_arguments, layers, load
from ddp_tutorial.processes.signals import EXIT_CODE
from ddp_tutorial.runs.folder import RunFolder, request_stop
from ddp_tutorial.slurm import rendezvous
from ddp_tutorial.slurm.config import SlurmConfig, parse_time
from ddp_tutorial.slurm.job import batch_script, ranks_per_node, submit
from ddp_tutorial.slurm.nodes import node_names
from ddp_tutorial.training.config import TaskConfig
from ddp_tutorial.training.plan import plan
from ddp_tutorial.training.tasks import launch_training
from ddp_tutorial.world import World
from ranks import wait_until

# ------------------------------------------------------------------------------------------------------- the script


def options(script: str) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", script, re.MULTILINE))


def is_shell(script: str) -> bool:
    return subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def of(slurm_config: SlurmConfig, ranks: int) -> str:
    return batch_script("train.py", ranks, slurm_config, run="mine", name="mine", about="a test")


def test_a_job_writes_to_the_runs_folder_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun = check(SlurmConfig, {"starter": "torchrun"}, "test")
    assert "DDP_TUTORIAL_RUNS" not in of(torchrun, 1)
    monkeypatch.setattr("ddp_tutorial.slurm.job.RUNS", Path("/scratch/my runs"))
    monkeypatch.setattr("ddp_tutorial.slurm.job.OUTPUT", Path("/scratch/my runs/slurm-%j.out"))
    script = of(torchrun, 1)
    assert is_shell(script)
    assert "export DDP_TUTORIAL_RUNS='/scratch/my runs'\n" in script
    assert options(script)["output"] == "'/scratch/my runs/slurm-%j.out'", "sbatch splits options at spaces"
    assert """ '/scratch/my runs'/"$run/result.json"; then""" in script


@given(
    nodes=st.integers(1, 64),
    here=st.integers(1, 16),
    cpus=st.integers(1, 16),
    starter=st.sampled_from(["srun", "torchrun"]),
)
def test_the_world_size_is_nodes_times_ranks_per_node(nodes: int, here: int, cpus: int, starter: str) -> None:
    script = of(check(SlurmConfig, {"nodes": nodes, "cpus": cpus, "starter": starter}, "test"), nodes * here)
    asked = options(script)
    tasks, cores = int(asked["ntasks-per-node"]), int(asked["cpus-per-task"])
    below = int(re.search(r"--nproc-per-node=(\d+)", script)[1]) if starter == "torchrun" else 1
    assert int(asked["nodes"]) * tasks * below == nodes * here
    assert tasks * cores == here * cpus
    if starter == "torchrun":
        assert f"--nnodes={nodes} " in script
        assert tasks == 1
    else:
        step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
        step |= {"SLURM_STEP_NUM_TASKS": str(nodes * tasks), "SLURM_STEP_TASKS_PER_NODE": f"{tasks}(x{nodes})"}
        step |= {"SLURM_STEP_NODELIST": f"n[1-{nodes}]"}
        assert World.detect(step, "cpu").size == nodes * here


@given(ranks=st.integers(1, 200), nodes=st.integers(1, 200))
def test_an_uneven_number_of_ranks_per_node_is_rejected_with_a_valid_one(ranks: int, nodes: int) -> None:
    slurm_config = SlurmConfig(nodes=nodes)
    if ranks % nodes == 0:
        assert ranks_per_node(ranks, slurm_config) * nodes == ranks
        return
    with pytest.raises(ConfigError, match=r"must be a multiple of 'slurm\.nodes'") as caught:
        ranks_per_node(ranks, slurm_config)
    for advised in re.findall(r"\d+", str(caught.value).partition("use nprocs=")[2]):
        assert ranks_per_node(int(advised), slurm_config)


@pytest.mark.parametrize(
    "words",
    [
        ("tiny", "nprocs=4", "nodes=2"),
        ("tiny", "nprocs=4", "nodes=2", "starter=torchrun", "accumulation=2", "name=deep/one"),
        ("2proc", "slurm.time=1:30:00", "corpus=stories", "model.dropout=0.5", "slurm={cpus: 3}"),
        ("invariant", "nprocs=4", "nodes=4", "corpus=stories", "gpus=1", "device=cpu", "account=me", "partition=long"),
    ],
)
def test_the_script_and_a_dry_run_agree_and_the_job_trains_the_config(words: tuple[str, ...], workdir: Path) -> None:
    script = slurm_script(words[0], words[1:])
    assert is_shell(script)
    asked = options(script)
    said = shlex.split(re.search(r"-m (ddp_tutorial train .*)", script)[1])
    assert said[-2:] == ["name=$run", "resume=auto"]
    source, of_run = said[2], said[3:-2]
    config = load(source, TaskConfig, of_run)
    dry = plan(config, layers(source, of_run), {})
    nodes, tasks = int(asked["nodes"]), int(asked["ntasks-per-node"])
    ranks = nodes * tasks * int((re.search(r"--nproc-per-node=(\d+)", script) or [0, 1])[1])
    told = re.search(r"^# (\d+) ranks, \d+ on each of (\d+) nodes; (\d+) samples in a", script, re.MULTILINE)
    assert tuple(map(int, told.groups())) == (dry["world"]["ranks"], nodes, dry["batch"]["samples"])
    assert ranks == dry["world"]["ranks"]
    in_step = {"RANK": "0", "WORLD_SIZE": str(ranks), "MASTER_ADDR": "n0", "MASTER_PORT": "1"}
    if asked["ntasks-per-node"] != "1" or "torchrun" not in str(words):
        in_step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": str(ranks), "SLURM_NODEID": "0"}
        in_step |= {"SLURM_STEP_TASKS_PER_NODE": f"{tasks}(x{nodes})"}
    there = plan(config, layers(source, of_run), in_step)
    assert (there["world"]["ranks"], there["batch"]) == (dry["world"]["ranks"], dry["batch"])
    of_run = [
        word for word in words[1:] if re.split("[.=]", word)[0] in set(TaskConfig.model_fields) - {"slurm", "name"}
    ]
    assert config == load(words[0], TaskConfig, of_run)


def test_a_gpu_job_requests_one_gpu_per_rank_and_the_other_settings(workdir: Path) -> None:
    asked = options(slurm_script("tiny", ["device=cuda", "nprocs=8", "nodes=2", "nodelist=g[1-2]", "account=me"]))
    assert (asked["gpus-per-node"], asked["nodelist"], asked["account"]) == ("4", "g[1-2]", "me")
    assert "checkpoint.every" in slurm_script("tiny")
    assert "checkpoint.every" not in slurm_script("tiny", ["checkpoint={every: 5}"]).partition("srun")[0]
    script = slurm_script("tiny", ["partition=long", "options=[--mem=3G]", "setup=[module load x]", "time=1d2h"])
    assert "gpus-per-node" not in script
    assert (
        options(script).items()
        >= {"partition": "long", "mem": "3G", "time": "1-02:00:00", "signal": "USR1@120"}.items()
    )
    assert script.index("#SBATCH --mem=3G") < script.index("module load x") < script.index("srun")
    assert slurm_script("tiny", python="a b").count("'a b' -m ddp_tutorial") == 1


STUBS = {"srun": 'exit "$CODE"', "scontrol": 'echo "scontrol $@" >> said; echo n0', "python": "echo 4000"}


@pytest.mark.parametrize(
    ("starter", "code", "result", "requeued", "ends_with"),
    [
        ("srun", 0, None, False, 0),
        ("srun", EXIT_CODE, None, True, EXIT_CODE),
        ("srun", 128 + 10, None, True, 138),
        ("srun", 128 + 15, None, True, 143),
        ("srun", 1, None, False, 1),
        ("srun", 2, None, False, 2),
        ("srun", 128 + 9, None, False, 137),
        ("torchrun", 0, {"status": "finished", "reason": ""}, False, 0),
        ("torchrun", 0, {"status": "stopped", "reason": "a signal"}, True, EXIT_CODE),
        ("torchrun", 0, {"status": "stopped", "reason": "a request"}, False, 0),
        ("torchrun", 0, None, True, EXIT_CODE),
        ("torchrun", 1, {"status": "stopped", "reason": "a signal"}, False, 1),
        ("torchrun", 128 + 15, None, True, 143),
    ],
)
def test_a_job_is_requeued_only_if_the_cluster_stopped_it(
    starter: str, code: int, result: dict[str, str] | None, requeued: bool, ends_with: int, workdir: Path
) -> None:
    for name, body in STUBS.items():
        stub = workdir / "bin" / name
        stub.parent.mkdir(exist_ok=True)
        stub.write_text(f"#!/bin/bash\n{body}\n")
        stub.chmod(0o755)
    if result is not None:
        folder = workdir / "runs" / "mine"
        folder.mkdir(parents=True)
        RunFolder(folder).result.write_text(json.dumps(result, indent=2))
    script = of(check(SlurmConfig, {"starter": starter}, "test"), 2)
    here = {"PATH": f"{workdir}/bin:{os.environ['PATH']}", "CODE": str(code), "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash"], input=script, text=True, env=os.environ | here, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (ends_with, "")
    said = (workdir / "said").read_text() if (workdir / "said").exists() else ""
    assert ("scontrol requeue 7" in said) == requeued


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("90min", 5400), ("90m", 5400), ("2h", 7200), ("1d12h", 129_600), ("1:30:00", 5400), ("2-00:00:01", 172_801)],
)
def test_a_time_limit_with_units_is_passed_to_slurm(time: str, seconds: int) -> None:
    asked = from_arguments(SlurmConfig, [f"time={time}", "warning=1"])
    assert asked.seconds == seconds
    days, _, clock = options(of(asked, 1))["time"].partition("-")
    hours, minutes, rest = map(int, clock.split(":"))
    assert ((int(days) * 24 + hours) * 60 + minutes) * 60 + rest == seconds


@pytest.mark.parametrize("time", ["90", "1:30", "0min", "", "2 hours", "1:75:00", "1-12", "h", "-5min"])
def test_a_time_limit_without_units_or_an_ambiguous_one_is_rejected(time: str) -> None:
    with pytest.raises(ConfigError, match=r"'slurm.time' must be a duration, such as 90min, 2h"):
        parse_time(time)


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["nprocs=3", "nodes=2"], r"'nprocs' must be a multiple of 'slurm\.nodes' \(2\), got 3: use nprocs=2 or 4$"),
        (["time=30"], r"'slurm.time' .* got 30 \(a whole number\), for example slurm.time=90min"),
        (["time=90:00"], r"'slurm.time' must be a duration, such as 90min, .*, got '90:00'"),
        (["time=1min"], r"'slurm.warning' must be shorter than 'slurm.time' \(1min\), got 120 seconds"),
        (
            ["nodes=2", "nodelist=n[1-3]"],
            r"'slurm.nodes' must be 3, the number of nodes in 'slurm.nodelist' \(n\[1-3\]\), got 2",
        ),
        (["nodes=2", "nodelist=n[2-1]"], "must be ascending, got '2-1'"),
        (["nodes=2", "nodelist='n1,n1'"], "contains 'n1' twice"),
        (["partition=a b"], "'slurm.partition' must be one word, got 'a b'"),
        (["options=[mem=3]"], "'slurm.options' must contain sbatch options, such as --mem=32G, got 'mem=3'"),
        (["starter=mpirun"], "'slurm.starter' must be 'srun' or 'torchrun'"),
        (["slurm.node=2"], "unknown key 'slurm.node'. Did you mean 'nodes'"),
        (["resume=runs/other", "name=mine"], "'resume' must be 'never' or 'auto' for a Slurm job, got 'runs/other'"),
        (
            ["strategy=invariant", "nprocs=3", "micro_batches=4"],
            r"must be a power of two and at most 'micro_batches' \(4\), got 3",
        ),
        (["steps=0"], "'steps' must be greater than or equal to 1"),
    ],
)
def test_an_impossible_job_is_rejected_in_one_line(words: list[str], advice: str, workdir: Path) -> None:
    with pytest.raises(ConfigError, match=advice) as caught:
        slurm_script("tiny", words)
    assert len(str(caught.value).splitlines()) == 1


def test_without_slurm_submission_is_rejected_and_leaves_nothing(
    workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(workdir))
    with pytest.raises(ConfigError, match=r"Slurm is not installed: sbatch was not found\. To print the script"):
        submit("#!/bin/bash\n")
    assert not list(workdir.iterdir())


def test_job_settings_are_not_settings_of_the_run() -> None:
    """A checkpoint does not contain them, so a job may resume with a different time limit or on different nodes."""
    assert "slurm" not in TaskConfig().model_dump()
    assert not set(SlurmConfig.model_fields) & set(TaskConfig.model_fields)


# --------------------------------------------------------------------------------------------- where the ranks meet

STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
STEP |= {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "localhost", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}


def meet(environ: dict[str, str], rank: int) -> Iterator[tuple[dist.Store, int, int]]:
    """Call the rendezvous of `init_process_group` with the address in the rank's environment."""
    address = World.detect(environ, "cpu").init_method
    return dist.rendezvous(address, rank, 2, timeout=timedelta(seconds=20))


def test_ranks_of_a_step_rendezvous_at_a_private_random_port(workdir: Path) -> None:
    seen = {}
    for restart in ("0", "1"):
        start = STEP | {"SLURM_RESTART_COUNT": restart}
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(next, meet(start, rank=1))  # before rank 0 has published its address
            hosting = meet(start, rank=0)
            store, *_ = next(hosting)
            [file] = rendezvous.FOLDER.iterdir()
            seen[file.name] = store.port
            assert (stat.S_IMODE(file.parent.stat().st_mode), stat.S_IMODE(file.stat().st_mode)) == (0o700, 0o600)
            other, rank, size = waiting.result(timeout=300)
        assert (rank, size) == (1, 2)
        store.set("from rank 0", restart)
        assert other.get("from rank 0").decode() == restart
        hosting.close()  # as torch does after the initialization
        assert list(rendezvous.FOLDER.iterdir()) == []
    assert set(seen) == {"slurm-7.0.0", "slurm-7.1.0"}
    assert len(set(seen.values())) == 2


def test_a_rank_never_uses_the_store_of_an_earlier_job(workdir: Path) -> None:
    stale = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    stale.set("nonce", "of another job")
    rendezvous.FOLDER.mkdir(mode=0o700, parents=True)
    left = rendezvous.FOLDER / "slurm-7.0.0"
    left.write_text(json.dumps({"host": "localhost", "port": stale.port, "nonce": "of a dead job"}))
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(next, meet(STEP, rank=1))
        time.sleep(0.5)  # it reads the stale file in the meantime
        assert not waiting.done()
        hosting = meet(STEP, rank=0)
        assert next(hosting)[0].port == waiting.result(timeout=300)[0].port != stale.port


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rendezvous_folder_that_others_may_enter_is_rejected(workdir: Path, rank: int) -> None:
    rendezvous.FOLDER.mkdir(parents=True)
    rendezvous.FOLDER.chmod(0o755)
    with pytest.raises(ConfigError, match="must belong to the job's user and be inaccessible to other users"):
        next(meet(STEP, rank))


# ------------------------------------------------------------------------------------------------------ a real Slurm


@pytest.fixture(scope="module")
def cluster() -> Iterator[slurm.Slurm]:
    if why := slurm.missing():
        pytest.skip(why)
    with ExitStack() as after:
        with slurm.Slurm() as running:
            namespace = after.enter_context(slurm.namespace_of(running.first))
            yield running

            def of_jobs() -> list[str]:
                found = slurm.inside(namespace)
                return [command for command in found if "ddp_tutorial" in command or command.startswith("srun")]

            def daemons() -> list[str]:
                return [command for command in slurm.inside(namespace) if command.startswith("slurmd ")]

            assert wait_until(lambda: not of_jobs(), seconds=120), of_jobs()  # srun exits some time after its tasks
            assert wait_until(lambda: len(daemons()) == 2, seconds=120), daemons()  # a daemon may be forking
        assert wait_until(lambda: not slurm.inside(namespace), seconds=120), slurm.inside(namespace)


CONFIG = """
extends: tiny
device: cpu
model: {layers: 2, heads: 2, width: 64, context: 64}
batch_size: 16
steps: 150
log_every: 1
eval_every: 150
checkpoint: {every: 1000}
tensorboard: false
collective_timeout: 60
"""


def submitted(cluster: slurm.Slurm, *words: str) -> int:
    done = cluster(sys.executable, "-m", "ddp_tutorial", "slurm", "job.yaml", "nodes=2", *words, "--submit")
    assert done.returncode == 0, done.stderr
    number = int(re.match(r"submitted job (\d+), which writes to runs/slurm-\1\.out\n", done.stdout)[1])
    cluster.until_state(number, "RUNNING")
    return number


def until_trained(cluster: slurm.Slurm, number: int, run: Path, steps: int) -> None:
    log = run / "metrics.jsonl"

    def is_so() -> bool:
        found = cluster.job(number)
        assert found["JobState"] == "RUNNING", f"{found}\n{Path(found['StdOut']).read_text()}"
        return log.exists() and len(log.read_bytes().splitlines()) >= steps

    cluster.until(is_so, f"job {number} trains")


def preempt(cluster: slurm.Slurm) -> None:
    """Submit a job of a higher tier that requires both nodes, and wait for its end."""
    urgent = int(cluster("sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--wrap=true").stdout)
    cluster.until_state(urgent, "COMPLETED")


@pytest.mark.slurm
def test_a_preempted_job_on_two_nodes_resumes_bitwise_identically(cluster: slurm.Slurm, workdir: Path) -> None:
    (workdir / "job.yaml").write_text(CONFIG)
    whole = launch_training(load("job.yaml", TaskConfig, ["name=whole"]), echo=False, threads=1)
    number = submitted(cluster, "faults=[delay rank=0 step=20 seconds=12]")  # of each attempt, so that Slurm catches up
    run = workdir / "runs" / f"slurm-{number}"
    output = workdir / "runs" / f"slurm-{number}.out"

    until_trained(cluster, number, run, 10)  # so that the ranks handle signals
    preempt(cluster)
    cluster.start_again(number, 1)
    cluster.until_state(number, "COMPLETED")

    told = json.loads((run / "result.json").read_text())
    assert (told["status"], told["world_size"], told["metrics"]["weights"]) == ("finished", 2, whole.weights)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 151))
    said = output.read_text()
    stopped = re.findall(r"^stopped after step (\d+) of 150", said, re.M)
    assert len(stopped) == 1, said
    assert stopped == re.findall(r"resuming after step (\d+)", said), said
    assert cluster.job(number)["BatchHost"] == "n0"
    assert cluster.job(number)["NodeList"] == "n[0-1]"


@pytest.mark.slurm
def test_torchrun_on_each_node_is_requeued_until_asked_to_stop(cluster: slurm.Slurm, workdir: Path) -> None:
    (workdir / "job.yaml").write_text(CONFIG)
    number = submitted(cluster, "starter=torchrun", "name=mine", "steps=1000")
    run = workdir / "runs" / "mine"
    until_trained(cluster, number, run, 5)
    cluster("scancel", "--signal=TERM", str(number))
    cluster.until_state(number, "PENDING")
    first = json.loads((run / "result.json").read_text())
    assert (first["status"], first["reason"]) == ("stopped", "a signal")
    cluster.start_again(number, 1)
    until_trained(cluster, number, run, first["step"] + 2)
    request_stop(run, "save")
    cluster.until_state(number, "COMPLETED")
    last = json.loads((run / "result.json").read_text())
    assert (last["status"], last["reason"]) == ("stopped", "a request")
    assert last["step"] > first["step"]


@pytest.mark.slurm
def test_unknown_partitions_are_reported_by_slurm_in_one_line(cluster: slurm.Slurm, workdir: Path) -> None:
    refused = cluster(sys.executable, "-m", "ddp_tutorial", "slurm", "tiny", "partition=nowhere", "--submit")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert re.fullmatch(r"error: Slurm rejected the job: .*[Ii]nvalid partition.*\n", refused.stderr)


TASK = """
import os, signal, sys, time
from pathlib import Path

how = sys.argv[1]
def note(number, frame):
    time.sleep(0.3 * int(os.environ["SLURM_PROCID"]))
    Path(f"saved.{os.environ['SLURM_PROCID']}").write_text(how)
    sys.exit(75)
if how != "not up yet":
    signal.signal(signal.SIGTERM, note)
    signal.signal(signal.SIGUSR1, note)
Path(f"up.{os.environ.get('SLURM_RESTART_COUNT', '0')}.{os.environ['SLURM_PROCID']}").touch()
time.sleep(60)
"""


@pytest.mark.slurm
def test_a_job_of_any_program_is_requeued_after_saving_unless_canceled(cluster: slurm.Slurm, workdir: Path) -> None:
    """KillOnBadExit or a trap in the script would prevent this; see `slurm.job`."""
    (workdir / "task.py").write_text(textwrap.dedent(TASK))

    def start(how: str) -> int:
        script = batch_script(
            f"task.py {shlex.quote(how)}", 2, SlurmConfig(nodes=2), run="x", name="x", about="a test", python="python3"
        )
        (workdir / "job.sh").write_text(script.replace("runs/slurm", "slurm"))
        return int(cluster("sbatch", "--parsable", "job.sh").stdout)

    def up(life: int) -> None:
        cluster.until(lambda: len(list(workdir.glob(f"up.{life}.*"))) == 2, f"life {life} is up")

    number = start("not up yet")
    up(0)
    cluster("scancel", "--signal=USR1", str(number))
    cluster.start_again(number, 1)
    cluster("scancel", str(number))
    cluster.until_state(number, "CANCELLED")

    for path in workdir.glob("up.*"):
        path.unlink()
    number = start("saves")
    up(0)
    cluster("scancel", "--signal=USR1", str(number))
    cluster.start_again(number, 1)
    saved = sorted(workdir.glob("saved.*"))
    assert len(saved) == 2
    for path in saved:
        path.unlink()
    up(1)
    cluster("scontrol", "requeue", str(number))
    cluster.start_again(number, 2)
    assert sorted(workdir.glob("saved.*")) == saved
    for path in saved:
        path.unlink()
    up(2)
    cluster("scancel", str(number))
    cluster.until_state(number, "CANCELLED")
    cluster.until(lambda: sorted(workdir.glob("saved.*")) == saved, "a cancelled run saves")
    time.sleep(1)
    assert cluster.job(number)["JobState"] == "CANCELLED"


@pytest.mark.slurm
def test_a_node_list_is_expanded_as_by_slurm(cluster: slurm.Slurm) -> None:
    lists = ["gpu[03-05,9],login", "r[0-1]n[2-3]", "n[008-011]", "n[9-11]", "a-1.b,c[7]", "x[1-2]y[1]"]
    told = [cluster("scontrol", "show", "hostnames", each).stdout.split() for each in lists]
    assert [node_names(each) for each in lists] == told


@pytest.mark.slurm
def test_a_killed_test_leaves_no_slurm_process() -> None:
    if why := slurm.missing():
        pytest.skip(why)
    owner = "import slurm, time; up = slurm.Slurm().__enter__(); print(up.first, up.folder, flush=True); time.sleep(60)"
    here = str(Path(slurm.__file__).parent)
    with subprocess.Popen([sys.executable, "-c", owner], cwd=here, stdout=subprocess.PIPE, text=True) as process:
        first, folder = process.stdout.readline().split()
        with slurm.namespace_of(first) as namespace:
            assert len(slurm.inside(namespace)) > 4
            process.kill()
            assert wait_until(lambda: not slurm.inside(namespace), seconds=120), slurm.inside(namespace)
    shutil.rmtree(folder)  # no process writes there any more
