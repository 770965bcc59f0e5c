"""A fault occurs on the rank, step and phase that it names, and nowhere else."""

import errno
import json
import math
import re
from pathlib import Path
from typing import Any, get_args

import psutil
import pytest
import torch
import torch.distributed as dist
import yaml
from torch import nn

import ddp_tutorial
from commands import call
from ddp_tutorial.checkpoint.resuming import latest_valid
from ddp_tutorial.collectives import all_gather, digest
from ddp_tutorial.config import ConfigError, load
from ddp_tutorial.debug import Fault, inject_faults
from ddp_tutorial.debug.config import FaultyConfig, PhaseName, parse
from ddp_tutorial.debug.faults import InjectedError
from ddp_tutorial.phases import phase
from ddp_tutorial.processes.errors import RankError
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.training.config import TaskConfig
from ddp_tutorial.training.tasks import make_trainer
from ddp_tutorial.world import World
from ranks import error_of

pytestmark = pytest.mark.usefixtures("workdir")


def small(**settings: Any) -> TaskConfig:
    model = {"layers": 1, "heads": 1, "width": 16, "context": 16}
    values = {"model": model, "batch_size": 4, "steps": 5, "eval_samples": 4, "device": "cpu", "name": "mine"}
    return TaskConfig.model_validate(values | settings)


def train_with(world: World, config: TaskConfig, *faults: Fault) -> Any:
    trainer = make_trainer(config, world)
    with inject_faults(world, *faults, model=trainer.model):
        return trainer.train()


def failure(config: TaskConfig, *faults: Fault) -> RankError:
    with pytest.raises(RankError) as caught:
        launch(train_with, 2, config, *faults, device="cpu", echo=False, timeout=300)
    return caught.value


def test_a_rank_is_killed_in_its_step() -> None:
    error = failure(small(log_every=1), Fault(action="kill", rank=1, step=3, phase="forward"))
    assert (error.rank, error.reason) == (1, "was killed by SIGKILL")
    assert len(Path("runs/mine/metrics.jsonl").read_text().splitlines()) == 2


def test_a_rank_raises_an_error_that_names_the_fault() -> None:
    error = failure(small(), Fault(action="raise", rank=1, step=2, phase="update"))
    assert error.is_a(InjectedError)
    assert error.message == "injected fault: raise on rank 1 in step 2, at update"


def test_a_nan_is_found_on_its_rank() -> None:
    error = failure(small(), Fault(action="nan", rank=1, step=2))
    assert "step 2: the gradient is not finite" in error.message


def test_a_corrupt_gradient_makes_the_replicas_drift_apart() -> None:
    assert "weight" in failure(small(), Fault(action="corrupt", rank=1, step=4, phase="update")).message


def fill_up(world: World, config: TaskConfig) -> str:
    return error_of(lambda: train_with(world, config, Fault(action="fill_disk", rank=0, step=4, phase="data")))


def test_a_full_disk_leaves_the_previous_checkpoint_valid() -> None:
    errors = launch(fill_up, 2, small(checkpoint={"every": 2, "keep_last": 1}), device="cpu", echo=False, timeout=300)
    assert "No space left on device" in errors[0]
    assert errors[1]  # this error or a lost connection: rank 0's log contains its own error
    assert latest_valid(World(), Path("runs/mine/checkpoints")) == (Path("runs/mine/checkpoints/step_00000002"), [])


def steps(world: World, *faults: Fault) -> list[str]:
    """Run three steps of two phases. Return the faults that occurred, with their steps."""
    struck = []
    with inject_faults(world, *faults):
        for number in range(1, 4):
            for name in ("data", "update"):
                try:
                    with phase(name):
                        pass
                except InjectedError:
                    struck.append(f"{name} {number}")
    return struck


@pytest.mark.parametrize("name", ["data", "update"])
@pytest.mark.parametrize("step", [1, 3])
def test_a_fault_occurs_once_in_its_step_phase_and_rank(name: str, step: int) -> None:
    fault = Fault(action="raise", rank=1, step=step, phase=name)
    assert steps(World(rank=1, size=2), fault) == [f"{name} {step}"]
    assert steps(World(rank=0, size=2), fault) == []


def test_without_a_data_phase_the_faults_own_phase_is_counted() -> None:
    with inject_faults(World(), Fault(action="raise", step=2, phase="save")):
        with phase("save"):
            pass
        with pytest.raises(InjectedError), phase("save"):
            pass


def test_a_fault_may_name_any_phase_of_the_package_and_no_other() -> None:
    package = Path(ddp_tutorial.__file__).parent
    calls = [call for path in package.rglob("*.py") for call in re.findall(r"\bphase\(([^)]*)\)", path.read_text())]
    entered = {name for call in calls for name in re.findall(r'"([^"]+)"', call)}
    assert entered == set(get_args(PhaseName))


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (Fault(action="raise", step=9, phase="update"), "the last step was 3"),
        (Fault(action="leak", step=4, phase="data"), "the last step was 3"),
        (Fault(action="raise", step=2, phase="evaluate"), "phase 'evaluate' was never entered"),
    ],
)
def test_a_fault_that_did_not_occur_is_reported_on_its_rank(
    fault: Fault, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert steps(World(), fault) == []
    assert [each.getMessage() for each in caplog.records] == [f"the fault '{fault}' did not occur: {why}"]
    caplog.clear()
    assert steps(World(rank=1, size=2), fault) == []
    assert steps(World(), Fault(action="leak", phase="data", megabytes=1), Fault(action="raise", phase="update"))
    assert caplog.records == [], "on another rank, or having struck"


def test_a_run_that_ends_before_its_fault_logs_this_on_its_rank() -> None:
    fault = Fault(action="kill", rank=1, step=3, phase="update")
    launch(train_with, 2, small(steps=2), fault, device="cpu", echo=False, timeout=300)
    told = f"WARNING the fault '{fault}' did not occur: the last step was 2"
    assert [Path(f"runs/mine/rank_{rank}.log").read_text().count(told) for rank in range(2)] == [0, 1]


def skipping(world: World) -> list[float]:
    value = torch.ones(1)
    with inject_faults(world, Fault(action="skip", step=1, phase="data")), phase("data"):
        dist.all_reduce(value) if world.rank == 0 else None
        dist.all_reduce(value)
    return all_gather(world, float(value))


def test_skipping_an_all_reduce_affects_only_the_next_one() -> None:
    assert launch(skipping, 2, device="cpu", echo=False, timeout=300) == [[2.0, 2.0]] * 2


def test_a_leak_grows_in_each_step_from_its_first_step() -> None:
    process = psutil.Process()
    used = []
    with inject_faults(World(), Fault(action="leak", step=2, phase="data", megabytes=50)):
        for _ in range(4):
            with phase("data"):
                pass
            used.append(process.memory_info().rss / 1e6)
    assert used[1] - used[0] > 40
    assert used[3] - used[1] > 80


def test_a_gradient_is_nan_in_one_step_only() -> None:
    model, sums = nn.Linear(2, 1), []
    with inject_faults(World(), Fault(action="nan", step=2), model=model):
        for _ in range(3):
            with phase("data"):
                pass
            with phase("grads"):
                model.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
            sums.append(sum(float(p.grad.sum()) for p in model.parameters() if p.grad is not None))
    assert [math.isnan(each) for each in sums] == [False, True, False]


def test_a_gradient_in_any_memory_format_can_be_corrupted() -> None:
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model(torch.ones(1, 3, 3, 3).to(memory_format=torch.channels_last)).sum().backward()
    before = model.weight.grad.clone()
    with inject_faults(World(), Fault(action="corrupt", phase="update"), model=model), phase("update"):
        pass
    assert (model.weight.grad != before).sum() == 1


def test_a_gradient_that_does_not_exist_yet_cannot_be_corrupted() -> None:
    with (
        inject_faults(World(), Fault(action="corrupt", phase="forward"), model=nn.Linear(2, 1)),
        pytest.raises(ConfigError, match="requires a gradient, but there is none at the start of this phase"),
        phase("forward"),
    ):
        pass


def test_the_effects_of_a_fault_end_with_its_block() -> None:
    real, model = dist.all_reduce, nn.Linear(2, 1)
    before = digest(dict(model.named_parameters()))
    faults = [Fault(action=action, phase="data") for action in ("skip", "nan")]  # type: ignore[arg-type]
    with inject_faults(World(), *faults, model=model):
        with phase("data"):
            pass
        assert dist.all_reduce is not real
        model(torch.ones(1, 2)).sum().backward()
        assert model.weight.grad is not None
        assert model.weight.grad.isnan().all()
    assert dist.all_reduce is real
    model.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.isfinite().all()
    assert digest(dict(model.named_parameters())) == before


def test_a_disk_is_full_only_inside_the_block_and_only_for_writing(tmp_path: Path) -> None:
    from ddp_tutorial.files import notify_observers

    with inject_faults(World(), Fault(action="fill_disk", phase="data")), phase("data"):
        notify_observers("read", tmp_path)
        with pytest.raises(OSError, match="No space") as caught:
            notify_observers("write", tmp_path)
        assert caught.value.errno == errno.ENOSPC
    notify_observers("write", tmp_path)


def test_a_fault_is_parsed_from_text() -> None:
    assert parse("delay rank=1 step=3 phase=update seconds=0.5") == Fault(
        action="delay", rank=1, step=3, phase="update", seconds=0.5
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("explode", "'action' must be"),
        ("", "'action' must be"),
        ("kill 3", "a setting must have the form name=value, got '3'"),
        ("kill rnk=1", "rnk"),
        ("kill step=soon", "'step' must be"),
        ("kill step=0", "'step' must be"),
        ("kill phase=updat", "'phase' must be 'load', 'data', 'grads', 'forward',"),
    ],
)
def test_an_invalid_fault_is_reported_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        parse(text)
    assert "\n" not in str(caught.value)


def written(**settings: Any) -> str:
    """A config file with faults. Returns its name."""
    faults = settings.pop("faults", [])
    values = small(**settings).model_dump(mode="json", exclude_unset=True) | {"faults": faults, "nprocs": 2}
    Path("my.yaml").write_text(yaml.safe_dump(values))
    return "my.yaml"


def test_a_config_lists_faults_as_text_or_mappings_outside_its_identity() -> None:
    faults = ["delay rank=1 step=3 phase=update seconds=0.5", {"action": "kill", "step": 2}]
    config = load(written(faults=faults), FaultyConfig)
    assert config.faults == (parse(faults[0]), Fault(action="kill", step=2))  # type: ignore[arg-type]
    assert "faults" not in config.model_dump()
    assert config.remarks[-1] == "injected fault: kill on rank 0 in step 2, at grads"
    assert load("my.yaml", FaultyConfig, ["faults=[]"]).faults == ()
    done = call("train", "my.yaml", "--dry-run", "--fault", "raise rank=1")
    assert done.stdout.splitlines()[-1] == "fault    raise on rank 1 in step 1, at grads", done.stderr


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("kil rank=1", "my.yaml: fault 'kil rank=1': 'action' must be"),
        ({"action": "kill", "rnk": 1}, "my.yaml: unknown key 'faults.0.rnk'. Did you mean 'rank'?"),
        ({"action": "kill", "step": 0}, "my.yaml: 'faults.0.step' must be greater than or equal to 1, got 0"),
        ({"action": "kill", "phase": "fwd"}, "my.yaml: 'faults.0.phase' must be 'load', 'data', 'grads', 'forward',"),
        ("kill phase=fwd", "my.yaml: fault 'kill phase=fwd': 'phase' must be 'load', 'data', 'grads', 'forward',"),
        ({"action": "kill", "rank": 2}, "fault 'kill on rank 2 in step 1, at grads': 'rank' must be below"),
    ],
)
def test_a_config_with_an_impossible_fault_is_rejected_in_one_line(fault: Any, told: str) -> None:
    done = call("train", written(faults=[fault]))
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith(f"error: {told}")
    assert not Path("runs").exists()


def test_an_injected_kill_recurs_after_each_restart() -> None:
    """The run saves every 2 steps and is killed in its third step: after step 2, then after step 4."""
    saving = {"checkpoint": {"every": 2}, "resume": "auto", "steps": 6}
    assert call("train", written(**saving, name="plain")).returncode == 0
    config = written(**saving, faults=["kill rank=1 step=3"])
    for saved in (2, 4):
        done = call("train", config)
        assert done.returncode == 1
        assert "rank 1 was killed by SIGKILL" in done.stderr
        assert latest_valid(World(), Path("runs/mine/checkpoints"))[0] == Path(
            f"runs/mine/checkpoints/step_0000000{saved}"
        )
    assert "injected fault: kill on rank 1 in step 3, at grads" in Path("runs/mine/rank_0.log").read_text()
    assert "faults" not in Path("runs/mine/config.json").read_text()
    done = call("train", config, "faults=[]")
    assert done.returncode == 0, done.stderr
    plain, mine = (json.loads(Path(f"runs/{name}/result.json").read_text()) for name in ("plain", "mine"))
    assert mine["metrics"]["weights"] == plain["metrics"]["weights"]


def test_a_fault_without_its_rank_or_model_is_rejected() -> None:
    with (
        pytest.raises(ConfigError, match=r"'rank' must be below the number of ranks \(2\), got 2"),
        inject_faults(World(size=2), Fault(action="kill", rank=2)),
    ):
        pass
    with (
        pytest.raises(ConfigError, match="requires the model: use"),
        inject_faults(World(), Fault(action="nan")),
    ):
        pass
