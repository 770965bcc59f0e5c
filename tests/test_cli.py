"""The command line, in a separate process where this matters."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from commands import call
from ddp_tutorial import __main__ as command_line
from ddp_tutorial.checkpoint.manifest import MANIFEST, CheckpointError
from ddp_tutorial.config import ConfigError
from ddp_tutorial.environment import cores
from ddp_tutorial.files import locked
from ddp_tutorial.processes.errors import Raised, RankError
from ranks import TORCHRUN

pytestmark = pytest.mark.usefixtures("workdir")

COMMAND = [sys.executable, "-m", "ddp_tutorial"]


def run(*arguments: str, command: list[str] = COMMAND, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"PYTHONWARNINGS": "default"} | environment,
    )
    assert "Traceback" not in done.stderr or done.returncode == 1
    return done


def weights_of(folder: Path) -> str:
    return str(json.loads((folder / "result.json").read_text())["metrics"]["weights"])


def test_checks_do_not_change_the_weights_and_report_an_injected_fault() -> None:
    task = ("train", "tiny", "device=cpu", "steps=12", "ddp.variant=torch")
    plain, checked = (call(*task, f"name={name}", *more) for name, more in (("plain", ()), ("checked", ("--check",))))
    assert plain.returncode == checked.returncode == 0, checked.stderr
    assert weights_of(Path("runs/checked")) == weights_of(Path("runs/plain"))
    assert json.loads(Path("runs/checked/result.json").read_text())["checks"] == []
    done = call(*task, "steps=25", "name=broken", "--check", "--fault", "corrupt rank=1 step=4 phase=update")
    said = "[rank 0] injected fault: corrupt on rank 1 in step 4, at update\n"
    assert (done.returncode, done.stdout) == (1, said)
    told = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    differs = r"the replicas have drifted apart: [\w.]+ is not the same on all ranks, ranks 0 and 1 differ"
    message = rf"step 4: {differs} \(seen in step 21\)"
    assert re.fullmatch(f"error: {message}", "\n".join(told)), done.stderr
    assert not Path("runs/broken/result.json").exists()
    noted = json.loads(Path("runs/broken/failed.json").read_text())
    assert re.fullmatch(f"CheckError: {message}", noted["error"])
    assert noted["step"] == 20, "what happened in step 4 was told in step 21"
    for rank in range(2):
        assert re.search(message, Path(f"runs/broken/rank_{rank}.log").read_text())


def test_the_result_mentions_a_simulated_link() -> None:
    slow = ("ddp.simulated_link.latency_ms=2", "ddp.simulated_link.megabytes_per_second=50")
    done = call("train", "tiny", "device=cpu", "steps=2", "name=slow", "ddp.variant=bucket", "ddp.hook=bf16", *slow)
    assert done.returncode == 0, done.stderr
    assert "on 2 ranks over a simulated link (2 ms, 50 MB/s): runs/slow" in done.stdout
    summary = json.loads(Path("runs/slow/result.json").read_text())
    assert summary["parameters"]["ddp"]["simulated_link"] == {"latency_ms": 2, "megabytes_per_second": 50}


def test_train_prints_one_line_and_gives_the_same_weights_as_torchrun() -> None:
    arguments = ("train", "tiny", "device=cpu")
    launched = call(*arguments, "name=launched")
    assert launched.returncode == 0, launched.stderr
    [line] = launched.stdout.splitlines()
    assert re.fullmatch(r"loss \d\.\d{3}, validation loss \d\.\d{3}, [\d,]+ tokens/s on 2 ranks: runs/launched", line)
    threads = str(max(1, cores() // 2))  # as `launch` divides the cores; the order of sums depends on it
    command = [*TORCHRUN, "-m", "ddp_tutorial"]
    joined = run(*arguments, "name=joined", "--json", command=command, OMP_NUM_THREADS=threads)
    assert joined.returncode == 0, joined.stderr
    summary = json.loads(joined.stdout)  # one object, because rank 0 prints for all ranks
    assert (summary["status"], summary["world_size"], summary["parameters"]["steps"]) == ("finished", 2, 20)
    assert json.loads((Path(summary.pop("run")) / "result.json").read_text()) == summary
    assert sorted(path.name for path in Path("runs").iterdir()) == ["joined", "launched"]
    assert weights_of(Path("runs/joined")) == weights_of(Path("runs/launched"))


def assert_refused_in_one_line(done: subprocess.CompletedProcess[str], told: str) -> None:
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert told in line
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("train", "gone.yaml"), "'gone.yaml' does not exist"),
        (("train", "tinny"), "Did you mean 'tiny'?"),
        (("train", "tiny", "stepz=3"), "unknown key 'stepz'. Did you mean 'steps'?"),
        (("train", "tiny", "steps=many"), "'steps' must be a valid integer, got 'many'"),
        (("train", "tiny", "nprocs=0"), "'nprocs' must be greater than or equal to 1, got 0"),
        (
            ("train", "tiny", "steps"),
            "an override must have the form key=value, such as steps=100 or model.layers=4, got 'steps'",
        ),
        (("train", "bad.yaml"), "bad.yaml, line 1, column 9: not valid YAML"),
        (("train", "tiny", "corpus=pyton"), "Did you mean 'python'?"),
        (("train", "tiny", "corpus=text:gone"), "there is no file or folder 'gone'"),
        (("train", "tiny", "corpus=text:empty.txt"), "is empty"),
        (("train", "tiny", "corpus=stories:2", "batch_size=1000"), "too few for one batch of 1000"),
        (("train", "tiny", "batch_size=1"), "at most 1 ranks have samples. Use fewer ranks."),
        (("train", "tiny", "ddp.varant=flat"), "unknown key 'ddp.varant'. Did you mean 'variant'?"),
        (
            ("train", "tiny", "ddp.variant=flat", "ddp.hook=fp16"),
            "'hook' requires variant=bucket or variant=torch, got variant=flat",
        ),
        (
            ("train", "tiny", "source.kind=streamed", "source.remainder=pad"),
            "'source.remainder' must be 'carry' for a stream",
        ),
        (("train", "tiny", "corpus=parquet:gone"), "there is no file or folder 'gone'"),
        (("train", "tiny", "--check", "strategy=zero2"), "must be 'ddp', 'invariant' or 'accelerate', got 'zero2'"),
        (("train", "tiny", "--check", "strategy=diloco"), "must be 'ddp', 'invariant' or 'accelerate', got 'diloco'"),
        (("train", "tiny", "strategy=local_sgd", "local.round=999"), "'local.round' must be at most 'steps' ("),
        (("stories", "10", "."), "already exists; choose a new folder"),
        (("evaluate", "runs/gone"), "there is no run named 'runs/gone'"),
        (("sample", "tests", "--prompt", "x"), "there is no run named 'tests'"),
        (("export", "runs/gone", "out"), "there is no run named 'runs/gone'"),
        (("stop", "runs/gone"), "there is no run named 'runs/gone'"),
        (("bench", "lunch"), "unknown benchmark 'lunch'. Did you mean 'launch'?"),
        (("bench", "hang"), "unknown benchmark 'hang'. Did you mean 'hangs'?"),
    ],
)
def test_a_mistake_is_reported_in_one_line_and_writes_nothing(arguments: tuple[str, ...], told: str) -> None:
    Path("empty.txt").touch()
    Path("bad.yaml").write_text("steps: 1: 2\n")
    done = call(*arguments)
    assert_refused_in_one_line(done, told)
    assert not Path("out").exists()


@pytest.mark.parametrize("arguments", [("train", "tiny", "batch_size=1"), ("export", "gone", "out")], ids=" ".join)
def test_a_new_process_reports_a_mistake_in_the_same_words(arguments: tuple[str, ...]) -> None:
    done, called = run(*arguments), call(*arguments)
    assert (done.returncode, done.stdout, done.stderr) == (called.returncode, called.stdout, called.stderr)
    assert done.returncode == 2


@pytest.mark.parametrize(
    ("arguments", "environment", "told"),
    [
        (("nprocs=1",), {"RANK": "0"}, "RANK is set but WORLD_SIZE is not"),
        (("nprocs=1",), {"RANK": "2", "WORLD_SIZE": "one"}, "WORLD_SIZE must be an integer, got 'one'"),
    ],
)
def test_an_impossible_world_is_reported_in_one_line(
    arguments: tuple[str, ...], environment: dict[str, str], told: str
) -> None:
    done = call("train", "tiny", *arguments, **environment)
    assert_refused_in_one_line(done, told)


class LaunchError(ConfigError):
    """Raised instead of launching."""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str | None]]:
    """Record the number of ranks and the visible GPUs of each launch, on a machine with four GPUs."""
    launches: list[tuple[int, str | None]] = []

    def launch(*_: object, nprocs: int, **options: object) -> None:
        launches.append((nprocs, os.environ.get("CUDA_VISIBLE_DEVICES")))
        raise LaunchError("instead of launching")

    monkeypatch.setattr("ddp_tutorial.processes.starting.run", launch)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return launches


def test_devices_select_the_gpus_of_the_ranks_and_their_default_number(
    launched: list[tuple[int, str | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    call("train", "tiny")
    call("train", "tiny", "nprocs=3", "device=cuda")
    call("train", "2proc")
    call("train", "tiny", "device=cpu")
    assert launched == [(4, ""), (3, ""), (2, ""), (2, "")]
    Path("mine").mkdir()
    Path("mine/base.yaml").write_text("extends: tiny\nnprocs: 2\n")
    call("train", "mine/base.yaml")
    call("train", "base")
    assert [launched.pop()[0], launched.pop()[0]] == [4, 2]
    call("train", "tiny", "--devices", "0,3,1")
    assert launched.pop() == (3, "0,3,1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-6, 7")
    call("train", "tiny", "nprocs=2", "--devices", "3,2")
    assert launched.pop() == (2, "7,GPU-6")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    call("train", "tiny")
    call("train", "tiny", "device=cuda")
    assert [nprocs for nprocs, _ in launched[-2:]] == [2, 1]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--devices", "0,1", "nprocs=3"), "--devices 0,1 selects 2 GPUs for 3 ranks on this machine"),
        (("--devices", "0,4"), "--devices 0,4: GPU numbers must be between 0 and 3, got 4"),
        (("--devices", "1,1"), "--devices 1,1 selects a GPU more than once"),
        (("--devices", "0;1"), "such as 0,1,3, got '0;1'"),
        (("--devices", "0", "device=cpu"), "--devices selects GPUs, but 'device' is cpu"),
    ],
)
def test_invalid_devices_are_rejected_in_one_line(
    arguments: tuple[str, ...], told: str, launched: list[tuple[int, str | None]]
) -> None:
    assert_refused_in_one_line(call("train", "tiny", *arguments), told)
    assert not launched


def test_mpi_is_rejected_with_its_reason() -> None:
    assert_refused_in_one_line(
        call("train", "tiny", "backend=mpi"), "got 'mpi', which PyTorch's prebuilt packages do not support"
    )
    assert_refused_in_one_line(call("train", "tiny", "backend=ucc"), "'backend' must be 'auto', 'gloo' or 'nccl'")


def test_gpus_on_a_machine_without_gpus_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert_refused_in_one_line(call("train", "tiny", "--devices", "0"), "but torch found none on this machine")
    assert_refused_in_one_line(call("train", "tiny", "device=cuda"), "device='cuda' requires one GPU for each")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("trian", "tiny"), "No such command 'trian'"),
        (("train",), "Missing argument 'CONFIG'"),
        (("train", "tiny", "--jsn"), "No such option"),
        (("bench", "launch", "--repeats", "1"), "1 is not in the range x>=5"),
        (("run", "--steps", "0"), "0 is not in the range x>=1"),
        (("notebooks", "gone.ipynb"), "'gone.ipynb' does not exist"),
    ],
)
def test_an_unknown_command_prints_the_usage(arguments: tuple[str, ...], told: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("Usage: ")
    assert told in done.stderr
    assert done.stdout == ""
    assert not Path("runs").exists()


def test_an_error_on_a_rank_is_an_error_of_the_run() -> None:
    Path("runs").write_text("a file where the folder should be")
    done = call("train", "tiny", "device=cpu")
    assert done.returncode == 1
    assert re.match("error: rank [01] raised FileExistsError: ", done.stderr)  # either process may be first
    assert done.stdout == ""


def test_a_config_error_that_only_a_rank_detects_is_reported_in_one_line() -> None:
    Path("runs/mine").mkdir(parents=True)
    with locked(Path("runs/mine")):
        done = call("train", "tiny", "device=cpu", "name=mine", "resume=auto")
    told = "error: runs/mine is in use by another run. Wait until it exits, or use a different name.\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", told)


def test_a_checkpoint_that_ranks_cannot_read_is_reported_in_one_line() -> None:
    Path("broken").mkdir()
    Path("broken", MANIFEST).write_text("{}")
    done = call("train", "tiny", "device=cpu", "resume=broken")
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("error: broken")
    assert done.stdout == ""


class _NotOursError(ConfigError):
    """A type that the command line does not know."""


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (ConfigError("wrong"), 2, "error: wrong"),
        (RankError(1, "raised X", "trace", raised=Raised.of(ConfigError("wrong"))), 2, "error: wrong"),
        (RankError(1, "raised X", "trace", raised=Raised.of(_NotOursError("wrong"))), 2, "error: wrong"),
        (CheckpointError("torn"), 1, "error: torn"),
        (PermissionError(13, "Permission denied", "x"), 1, "error: [Errno 13] Permission denied: 'x'"),
        (RankError(1, "raised X", "trace", raised=Raised.of(CheckpointError("torn"))), 1, "error: torn"),
        (RankError(1, "raised X", "trace", raised=Raised.of(KeyError("bug"))), 1, "error: rank 1 raised X\n\ntrace"),
        (RankError(1, "raised ConfigError: in words"), 1, "error: rank 1 raised ConfigError: in words"),
        (RankError(1, "was killed by SIGKILL"), 1, "error: rank 1 was killed by SIGKILL"),
        (KeyboardInterrupt(), 130, "error: interrupted; all ranks have been terminated"),
    ],
    ids=str,
)
def test_the_error_type_determines_the_exit_code_and_the_output(
    error: BaseException, code: int, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(command_line, "cli", fail)
    with pytest.raises(SystemExit) as left:
        command_line.main()
    assert left.value.code == code
    assert capsys.readouterr() == ("", f"{told}\n")


@pytest.mark.parametrize("error", [FileNotFoundError(2, "No such file or directory", "x"), TimeoutError()], ids=repr)
def test_an_internal_error_keeps_its_traceback(error: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(command_line, "cli", fail)
    with pytest.raises(type(error)):
        command_line.main()


def test_the_stories_command_writes_files_to_train_on() -> None:
    done = run("stories", "300", "stories", "--files", "2")
    assert (done.returncode, done.stdout) == (
        0,
        "wrote 300 stories to 2 files; train on them with corpus=parquet:stories\n",
    )
    assert sorted(path.name for path in Path("stories").iterdir()) == ["stories-0.parquet", "stories-1.parquet"]
    done = call("train", "tiny", "corpus=parquet:stories", "source.kind=fast_stream", "steps=2", "device=cpu", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["metrics"]["loss"] > 0


def test_help_lists_the_commands() -> None:
    done = run("--help")
    assert done.returncode == 0
    listed = re.findall(r"^  (\w[\w-]*) ", done.stdout.partition("Commands:")[2], flags=re.MULTILINE)
    assert {"bench", "notebooks", "run", "stories", "train"} <= set(listed)
    assert run("train", "-h").stdout.startswith("Usage: ")


def test_the_version_is_that_of_the_package() -> None:
    assert re.search(r"\d+\.\d+\.\d+", run("--version").stdout)


def test_runs_dir_selects_the_folder_and_debug_shows_all_log_lines() -> None:
    options = ("--runs-dir", "elsewhere", "--debug")
    done = run("train", "tiny", "device=cpu", "steps=1", "name=gpt", *options, NCCL_DEBUG="WARN")
    assert done.returncode == 0, done.stderr
    first = done.stderr.splitlines()[0]
    assert first.startswith("--debug: set DDP_TUTORIAL_DEBUG=1, TORCH_DISTRIBUTED_DEBUG=INFO, ")
    assert first.endswith("; already set NCCL_DEBUG=WARN")
    for rank in range(2):
        log = Path(f"elsewhere/gpt/rank_{rank}.log").read_text().splitlines()
        assert re.fullmatch(rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d rank {rank} DEBUG   debug variables: .*", log[0])
        assert "TORCH_DISTRIBUTED_DEBUG=INFO" in log[0]
        assert "NCCL_DEBUG=WARN" in log[0]
        assert any(re.search(r"training data: [\d.]+ steps per epoch, 8 samples per step", line) for line in log)
        assert any(re.search(r"validation data: \d+ samples", line) for line in log)
    assert "validation data" in done.stdout + done.stderr

    listed = run("logs", "list", DDP_TUTORIAL_RUNS="elsewhere")
    assert str(Path("elsewhere/gpt").absolute()) in listed.stdout
    assert "no runs under runs/" in run("logs", "list").stderr
    Path("file").touch()
    for refused in (run("train", "tiny", "--runs-dir", "file"), run("logs", "list", DDP_TUTORIAL_RUNS="file")):
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "Directory 'file' is a file." in refused.stderr
    assert sorted(path.name for path in Path().iterdir()) == ["elsewhere", "file"]
