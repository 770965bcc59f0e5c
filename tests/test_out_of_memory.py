"""A rank that runs out of memory in the forward pass costs all ranks this batch and nothing else.

If ranks cannot agree, the run is aborted with a reason. A data worker that dies has no effect on the result.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddp_tutorial.accumulation.out_of_memory import OutOfMemoryError, is_out_of_memory
from ddp_tutorial.accumulation.strategies import DDPStrategy, require_local_forward
from ddp_tutorial.accumulation.train_step import TrainStep
from ddp_tutorial.config import ConfigError
from ddp_tutorial.debug import Fault, inject_faults
from ddp_tutorial.processes.errors import RankError
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.training.config import TaskConfig
from ddp_tutorial.training.gpt import next_token_loss
from ddp_tutorial.training.tasks import make_trainer
from ddp_tutorial.world import World

pytestmark = pytest.mark.usefixtures("workdir")


def small(**settings: Any) -> TaskConfig:
    model = {"layers": 1, "heads": 1, "width": 16, "context": 16}
    values = {"model": model, "batch_size": 8, "steps": 5, "eval_samples": 4, "device": "cpu", "tensorboard": False}
    return TaskConfig.model_validate(values | settings)


def out_of_memory(step: int, rank: int = 1, phase: str = "forward") -> Fault:
    return Fault(action="oom", rank=rank, step=step, phase=phase)


def train_with(world: World, config: TaskConfig, *faults: Fault) -> dict[str, Any]:
    trainer = make_trainer(config, world)
    with inject_faults(world, *faults, model=trainer.model):
        try:
            result = trainer.train()
        except OutOfMemoryError as error:
            return {"raised": str(error), "ranks": error.ranks, "step": trainer.step_count}
    return {"losses": result.losses, "weights": result.weights, "left_out": trainer.train_step.left_out}


def without_a_batch(world: World, config: TaskConfig, left_out: int) -> list[float]:
    """Return the losses of a run that never sees the batch of one step."""
    trainer, losses = make_trainer(config, world), []
    step: TrainStep = trainer.train_step
    for number in range(1, config.steps + 1):
        if number == left_out:
            step.batches()
        losses.append(step().means["loss"])
    step.close()
    return losses


# (ddp.variant, other settings)
VARIANTS = {variant: {"ddp": {"variant": variant}} for variant in ("naive", "flat", "bucket", "torch")}
VARIANTS["accumulation"] = {"accumulation": 2}
VARIANTS["fp16"] = {"precision": {"dtype": "fp16", "initial_scale": 64.0}}


def everything(world: World) -> dict[str, Any]:
    """All scenarios in one launch."""
    found: dict[str, Any] = {}
    for name, settings in VARIANTS.items():
        config = small(oom_skips=1, name=name, **settings)
        found[name] = train_with(world, config, out_of_memory(3))
        found[f"{name}, as it should be"] = without_a_batch(world, small(name=f"{name}-2", **settings), 3)
    twice = [out_of_memory(3), out_of_memory(4, rank=0)]
    found["twice"] = train_with(world, small(oom_skips=2, name="twice"), *twice)
    found["both ranks"] = train_with(world, small(oom_skips=1, name="both"), out_of_memory(2), out_of_memory(2, rank=0))
    found["too often"] = train_with(world, small(oom_skips=1, name="often"), *twice)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("memory")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        of_ranks = launch(everything, 2, device="cpu", threads=1, echo=False, timeout=300)
        of_ranks[0]["result"] = json.loads((folder / "runs/torch/result.json").read_text())
        of_ranks[0]["log"] = [(folder / f"runs/torch/rank_{rank}.log").read_text() for rank in range(2)]
    return of_ranks


@pytest.mark.parametrize("name", VARIANTS)
def test_a_batch_is_skipped_on_all_ranks_without_other_effects(name: str, found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank[name]["left_out"] == 1
        assert rank[name]["losses"] == rank[f"{name}, as it should be"]
        assert rank[name]["weights"] == found[0][name]["weights"]


def test_a_skipped_batch_is_in_each_log_and_counted_in_the_result(found: list[dict[str, Any]]) -> None:
    assert found[0]["result"]["left_out"] == 1
    for log in found[0]["log"]:
        assert "WARNING step 3: rank 1 ran out of memory in the forward pass" in log
    assert "can't allocate memory" in found[0]["log"][1]


def test_a_resumed_run_counts_the_batches_that_were_skipped_before() -> None:
    config = small(oom_skips=1, name="first", steps=4, schedule_steps=5, checkpoint={"every": 4})
    assert train_with(World(), config, out_of_memory(3, rank=0))["left_out"] == 1
    again = {"name": "again", "steps": 5, "resume": "runs/first", "resume_allow": ("steps",)}
    assert train_with(World(), config.model_copy(update=again))["left_out"] == 1
    assert json.loads(Path("runs/again/result.json").read_text())["left_out"] == 1


def test_several_batches_are_skipped_up_to_the_limit(
    found: list[dict[str, Any]],
) -> None:
    for number, rank in enumerate(found):
        assert rank["twice"]["left_out"] == 2
        assert rank["both ranks"]["left_out"] == 1
        assert rank["too often"]["ranks"] == (0,)
        assert rank["too often"]["step"] == 2
        assert rank["too often"]["raised"].startswith("rank 0 ran out of memory in the forward pass") or number


@pytest.mark.parametrize(
    ("skips", "phase", "told"),
    [
        (1, "backward", "rank 1 ran out of memory in the backward pass: .*so this step cannot be skipped"),
        (0, "forward", "DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_a_batch_that_cannot_be_skipped_aborts_the_run_with_a_reason(skips: int, phase: str, told: str) -> None:
    with pytest.raises(RankError, match=told) as caught:
        launch(train_with, 2, small(oom_skips=skips), out_of_memory(3, phase=phase), device="cpu", echo=False)
    assert caught.value.rank == 1


def test_only_allocator_errors_count_as_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    for other in (
        RuntimeError("memory"),
        ValueError("DefaultCPUAllocator: "),
        OutOfMemoryError((1,), "DefaultCPUAllocator: x"),
    ):
        assert not is_out_of_memory(other)


def test_models_with_collectives_in_forward_are_rejected() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    with pytest.raises(ConfigError, match=r"'oom_skips' requires a forward pass without .* '1' is a SyncBatchNorm"):
        require_local_forward(model)
    with pytest.raises(ConfigError, match="'1' is a SyncBatchNorm"):
        DDPStrategy(model, World(), next_token_loss, agree_on_memory=True)
    DDPStrategy(model, World(), next_token_loss)
    with pytest.raises(ValueError, match="'oom_skips' requires strategy=ddp"):
        small(strategy="invariant", oom_skips=1)


# ------------------------------------------------------------------------------------------------------ data workers


def with_workers(world: World) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in ("sharded", "dispatched", "streamed"):
        for number, faults in enumerate([(), (Fault(action="kill_worker", rank=0, step=3, phase="update"),)]):
            config = small(name=f"{kind}{number}", source={"kind": kind, "workers": 1}, corpus="stories:200")
            found[f"{kind}{number}"] = train_with(world, config, *faults)
    return found


def test_a_dead_data_worker_is_restarted_without_changing_the_result() -> None:
    of_ranks = launch(with_workers, 2, device="cpu", threads=1, echo=False, timeout=300)
    for found in of_ranks:
        for kind in ("sharded", "dispatched", "streamed"):
            assert found[f"{kind}1"] == found[f"{kind}0"]
    for kind in ("sharded", "dispatched", "streamed"):
        log = Path(f"runs/{kind}1/rank_0.log").read_text()
        assert log.count("The workers restart and read the same samples again") == 1
        assert "WARNING rank 0, worker 0 of 1, " in log
