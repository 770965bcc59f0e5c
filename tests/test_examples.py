"""The examples do what they claim: equal on one process and two ranks, after a kill, and in plain torch."""

import ast
import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
import pyarrow.parquet
import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import OneCycleLR

from ddp_tutorial import TrainConfig, Trainer, TrainResult, World, launch, synchronize_batch_norm
from ddp_tutorial.config import ConfigError, from_arguments
from ddp_tutorial.examples import digits, plain
from ddp_tutorial.runs.folder import load_run
from ddp_tutorial.sharding import GlobalBatchSampler, Permutation, ShardedSource, as_samples
from ranks import TORCHRUN

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "ddp_tutorial" / "examples"
NAMES = ["digits", "finetune", "plain"]
# One thread, as the ranks of `launch` get here: the number of threads decides in which order some sums are added up.
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs of all tests in this file."""
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(autouse=True)
def inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def finished(*command: str) -> str:
    """Return rank 0's output of a command that has succeeded."""
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def killed(*command: str, when: Callable[[], bool]) -> None:
    """Start a command, and kill all of its processes with SIGKILL when `when` returns true."""
    process = psutil.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 300
        while not when():
            assert process.poll() is None, "it has ended by itself"
            assert time.monotonic() < deadline
            time.sleep(0.002)
    finally:
        everyone = [process, *process.children(recursive=True)] if process.is_running() else []
        for each in everyone:
            with suppress(psutil.NoSuchProcess):  # it exited by itself, because torchrun was killed
                each.kill()
        psutil.wait_procs(everyone)


def held_script(text: str) -> str:
    """Write a script that runs an example, but cannot finish before it is killed. Return the script's path."""
    Path("held.py").write_text(text)
    return "held.py"


def apart(one: Sequence[float], other: Sequence[float], steps: int) -> float:
    """Return the largest difference of the first losses of two runs."""
    assert min(len(one), len(other)) >= steps
    return max(abs(a - b) for a, b in zip(one[:steps], other[:steps], strict=True))


# --------------------------------------------------------------------------------------------------------- the data


def test_the_digits_are_those_of_scikit_learn() -> None:
    tables = [
        pyarrow.parquet.read_table(ROOT / "data" / "digits" / f"{part}.parquet") for part in ("train", "validation")
    ]
    assert [table.num_rows for table in tables] == [1437, 360]
    pixels = np.array([row for table in tables for row in table["pixels"].to_pylist()])
    digit = np.array([row for table in tables for row in table["digit"].to_pylist()])
    assert pixels.shape == (1797, 64)
    assert (pixels.min(), pixels.max()) == (0, 16)
    assert np.bincount(digit).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    # of load_digits() of scikit-learn 1.9.1, in its order
    content = pixels.astype(np.uint8).tobytes() + digit.astype("<i8").tobytes()
    assert hashlib.sha256(content).hexdigest() == "65e5b4619795efb40c1082f4c350c049e4ad552200d369b6ae99e21eef5e72c5"


# -------------------------------------------------------------------------------------------------------- the files


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_short_and_describes_how_to_run_it(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text()
    assert len(text.splitlines()) <= 107
    doc = ast.get_docstring(ast.parse(text)) or ""
    assert f"python -m ddp_tutorial.examples.{name}" in doc
    assert f"torchrun --nproc-per-node 2 -m ddp_tutorial.examples.{name}" in doc


def test_plain_does_not_import_this_package() -> None:
    tree = ast.walk(ast.parse((EXAMPLES / "plain.py").read_text()))
    imported = [alias.name for node in tree if isinstance(node, ast.Import) for alias in node.names]
    tree = ast.walk(ast.parse((EXAMPLES / "plain.py").read_text()))
    imported += [node.module or "." for node in tree if isinstance(node, ast.ImportFrom)]
    packages = {name.partition(".")[0] for name in imported} - sys.stdlib_module_names
    assert packages == {"torch", "pyarrow"}


def test_a_misspelled_option_is_named() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'stepz'\. Did you mean 'steps'"):
        from_arguments(digits.Options, ["stepz=3"])
    assert from_arguments(digits.Options, ["checkpoint.every=5"]).checkpoint.every == 5


# ----------------------------------------------------------------------------------------------------------- digits

QUIET = ["tensorboard=false", "log_every=1"]
SHORT = ["steps=40", "schedule_steps=200", "eval_every=40", *QUIET]


def trained(nprocs: int, *arguments: str) -> TrainResult:
    """Train the digits with `launch`, check that all ranks agree, and return rank 0's result."""
    options = from_arguments(digits.Options, arguments)
    results: list[TrainResult] = launch(digits.main, nprocs, options, threads=1, echo=False, timeout=300)
    assert all(each.losses == results[0].losses and each.weights == results[0].weights for each in results)
    return results[0]


@pytest.fixture(scope="module")
def alone(folder: Path) -> TrainResult:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return trained(1, "name=alone", *QUIET)


@pytest.fixture(scope="module")
def two(folder: Path) -> TrainResult:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return trained(2, "name=two", *SHORT)


def test_over_95_percent_of_the_validation_digits_are_predicted_correctly(alone: TrainResult) -> None:
    result = json.loads((alone.run / "result.json").read_text())
    assert result["metrics"]["eval_accuracy"] == alone.evaluations[200]["accuracy"] > 0.95
    assert round(alone.evaluations[200]["accuracy"] * 360, 6).is_integer()  # each image counts once


def test_two_ranks_have_the_losses_of_one_process(alone: TrainResult, two: TrainResult) -> None:
    assert apart(alone.losses, two.losses, 20) < 1e-5


# Reading the validation images never returns. The only evaluation is after the last step.
HELD_DIGITS = """
import sys, time
from ddp_tutorial import run
from ddp_tutorial.config import from_arguments
from ddp_tutorial.examples import digits

class Held:
    def __len__(self):
        return 360

    def __getitem__(self, index):
        time.sleep(1000)

read = digits.images
digits.images = lambda part: read(part) if part == "train" else Held()
run(digits.main, from_arguments(digits.Options, sys.argv[1:]))
"""


def test_a_run_killed_under_torchrun_resumes_bitwise_identically(two: TrainResult) -> None:
    arguments = ["name=torchrun", "resume=auto", "checkpoint.every=4", *SHORT]
    step, log = random.randint(5, 30), Path("runs/torchrun/metrics.jsonl")
    killed(
        *TORCHRUN,
        held_script(HELD_DIGITS),
        *arguments,
        when=lambda: log.is_file() and len(log.read_bytes().splitlines()) >= step,
    )
    assert not Path("runs/torchrun/result.json").exists(), f"killed after step {step}"
    assert list(Path("runs/torchrun/checkpoints").iterdir())
    assert "accuracy" in finished(*TORCHRUN, "-m", "ddp_tutorial.examples.digits", *arguments)
    run = load_run("runs/torchrun")
    assert run.result is not None
    assert run.series("loss")[1] == two.losses, f"killed after step {step}"
    assert run.result["metrics"]["weights"] == two.weights


# ------------------------------------------------------------------------------------------------------------ plain

PLAIN_STEPS = 40  # an epoch has 22 steps, so all shuffle twice; a checkpoint is saved every 20 steps


class TorchOrder(Permutation):
    """Samples in the order of torch's DistributedSampler, whose ranks take them in turn, as this package's ranks do."""

    def __call__(self, epoch: int, positions: Any) -> Any:
        generator = torch.Generator().manual_seed((self.seed or 0) + epoch)
        return torch.randperm(self.samples, generator=generator).numpy()[positions]


def train_like_plain(world: World, accumulation: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train the digits on the samples in the order of `plain`."""
    torch.manual_seed(0)
    samples = as_samples(digits.images("train"))
    trainer = Trainer(
        synchronize_batch_norm(digits.Net(), world),
        ShardedSource(samples, GlobalBatchSampler(TorchOrder(len(samples), 0), 64, "drop"), world),
        digits.loss,
        world,
        TrainConfig(steps=PLAIN_STEPS, accumulation=accumulation, clip=1.0, tensorboard=False),
        optimizer=digits.sgd,
        scheduler=partial(OneCycleLR, max_lr=0.05, total_steps=PLAIN_STEPS),
    )
    return trainer.train().losses, trainer.model.state_dict()


def train_both_ways(world: World) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    """Return the results of this package. `plain` saves its own results."""
    found = [train_like_plain(world, accumulation) for accumulation in (1, 2)]
    with ExitStack() as stack:
        if world.size == 1:  # as without torchrun, `plain` initializes the group
            for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
                del os.environ[name]
        else:  # launch has initialized the group
            stack.enter_context(mock.patch.object(dist, "init_process_group"))
        for accumulation in (1, 2):
            plain.main(f"plain-{world.size}-{accumulation}.pt", PLAIN_STEPS, accumulation)
            if world.size == 1:
                dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def both_ways(folder: Path) -> dict[int, list[list[tuple[list[float], dict[str, torch.Tensor]]]]]:
    """The results of `train_both_ways` on each rank, for one process and two ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return {nprocs: launch(train_both_ways, nprocs, threads=1, echo=False, timeout=300) for nprocs in (1, 2)}


@pytest.mark.parametrize("nprocs", [1, 2])
def test_plain_torch_and_the_package_give_bitwise_identical_weights(
    nprocs: int, both_ways: dict[int, list[list[tuple[list[float], dict[str, torch.Tensor]]]]]
) -> None:
    """Sums over samples are divided by 64, a power of two, so the order of division does not affect rounding, and the
    sum of two ranks has one order. Therefore, no tolerance is needed.
    """
    for results in both_ways[nprocs]:
        for accumulate, (losses, weights) in zip((1, 2), results, strict=True):
            plain_losses, plain_weights, *_ = torch.load(f"plain-{nprocs}-{accumulate}.pt")
            assert apart(losses, plain_losses, PLAIN_STEPS) < 1e-6  # summed in double precision there, but not here
            compared = [name for name in weights if not name.endswith("num_batches_tracked")]
            assert compared == [name for name in plain_weights if not name.endswith("num_batches_tracked")]
            assert [name for name in compared if not torch.equal(weights[name], plain_weights[name])] == []


# Saving the second checkpoint, after the last step, never returns.
HELD_PLAIN = """
import sys, time, torch
from pathlib import Path
from ddp_tutorial.examples import plain

def save(content, path):
    if Path(sys.argv[1]).exists():
        time.sleep(1000)
    write(content, path)

write, torch.save = torch.save, save
plain.main(sys.argv[1], int(sys.argv[2]))
"""


@pytest.mark.usefixtures("both_ways")
def test_plain_torch_resumes_bitwise_identically() -> None:
    path, moment = Path("new folder/killed.pt"), random.uniform(0, 0.05)

    def some_time_after_a_checkpoint() -> bool:
        if path.exists():
            time.sleep(moment)
        return path.exists()

    killed(*TORCHRUN, held_script(HELD_PLAIN), str(path), str(PLAIN_STEPS), when=some_time_after_a_checkpoint)
    assert len(torch.load(path)[0]) == 20, f"killed {moment:.3f} s after the first checkpoint"
    command = [*TORCHRUN, "-m", "ddp_tutorial.examples.plain", f"steps={PLAIN_STEPS}", f"checkpoint={path}"]
    assert "validation accuracy" in finished(*command)
    (losses, weights, *_), (losses_again, weights_again, *_) = torch.load("plain-2-1.pt"), torch.load(path)
    assert losses == losses_again
    assert all(torch.equal(weights[name], weights_again[name]) for name in weights)


# --------------------------------------------------------------------------------------------------------- finetune


FEW = ["eval_samples=19", "eval_every=6"]
RESUMED = [*FEW, "schedule_steps=6", "checkpoint.every=3"]
SPLIT: list[tuple[str, list[str]]] = [
    (f"split-{parts}", ["steps=6", f"accumulation={parts}", *FEW]) for parts in (1, 2)
]
RESUMES: list[tuple[str, list[str]]] = [
    ("whole", ["steps=6", *RESUMED]),
    ("cut", ["steps=3", *RESUMED]),
    ("cut", ["steps=6", "resume=auto", "resume_allow=[steps]", *RESUMED]),
]


def finetune_in_several_ways(world: World, ways: list[tuple[str, list[str]]]) -> list[TrainResult]:
    from ddp_tutorial.examples import finetune

    return [
        finetune.main(world, from_arguments(finetune.Options, [f"name={name}-{world.size}", *QUIET, *arguments]))
        for name, arguments in ways
    ]


@pytest.fixture(scope="module")
def finetuned(folder: Path) -> dict[int, list[list[TrainResult]]]:
    """The results of each rank, for one process and two ranks."""
    pytest.importorskip("transformers")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return {
            nprocs: launch(finetune_in_several_ways, nprocs, ways, threads=1, echo=False, timeout=300)
            for nprocs, ways in ((1, SPLIT), (2, SPLIT + RESUMES))
        }


def test_ragged_texts_give_the_same_losses_for_any_distribution(finetuned: dict[int, list[list[TrainResult]]]) -> None:
    for rank in finetuned[2]:
        assert [each.weights for each in rank] == [each.weights for each in finetuned[2][0]]
    results = [*finetuned[1][0], *finetuned[2][0][: len(SPLIT)]]
    assert all(apart(results[0].losses, other.losses, 6) < 1e-5 for other in results[1:])
    validation = [each.eval_losses[6] for each in results]
    assert max(validation) - min(validation) < 1e-5


def test_finetune_resumes_bitwise_identically(finetuned: dict[int, list[list[TrainResult]]]) -> None:
    for rank in finetuned[2]:
        whole, cut, resumed = rank[len(SPLIT) :]
        assert (len(cut.losses), len(resumed.losses)) == (3, 6)
        assert (resumed.losses, resumed.weights) == (whole.losses, whole.weights)
