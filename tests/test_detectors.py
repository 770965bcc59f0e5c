"""Detectors find problems with step, rank and name, the same on all ranks, and report nothing for a correct
program.
"""

import json
import time
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from ddp_tutorial.compat import forward_sync_buffers
from ddp_tutorial.debug import (
    CheckError,
    DataOverlap,
    DataStarvation,
    Detector,
    Fault,
    Finding,
    GradientSpike,
    LossDivergence,
    MemoryGrowth,
    NonFinite,
    ReplicaDrift,
    SameRandomNumbers,
    Straggler,
    UnusedParameters,
    checking,
    default_detectors,
    inject_faults,
    instrumentation,
)
from ddp_tutorial.debug import checks as module
from ddp_tutorial.debug.detector import LocalReport
from ddp_tutorial.debug.instrumentation import StepObservation
from ddp_tutorial.processes.errors import RankError
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.training.config import TaskConfig
from ddp_tutorial.training.tasks import make_trainer
from ddp_tutorial.world import World

pytestmark = pytest.mark.usefixtures("workdir")


class Net(nn.Module):
    """A model with BatchNorm, dropout, and an optional part."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, width), nn.BatchNorm1d(width), nn.Linear(width, 1)
        self.extra, self.dropout = nn.Linear(8, 1), nn.Dropout(0.1)
        self.with_extra = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.last(self.dropout(self.norm(self.first(x)).relu()))
        return y + self.extra(x) if self.with_extra else y


class Job:
    """A program in plain torch. A scenario overrides parts of it."""

    steps = 12
    micro_batches = 1
    broadcast_buffers = True

    def __init__(self, world: World) -> None:
        self.world, self.rank, self.last = world, world.rank, world.size - 1
        torch.manual_seed(0)
        self.net = Net()
        self.model = DistributedDataParallel(self.net, **forward_sync_buffers(enabled=self.broadcast_buffers))
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        torch.manual_seed(world.rank)
        self.data = torch.randn(4000, 8, generator=torch.Generator().manual_seed(1))

    def batch(self, number: int) -> torch.Tensor:
        """Return this rank's part [8, 8] of a batch."""
        return self.data[8 * (number * self.world.size + self.rank) :][:8]

    def loss(self, step: int, x: torch.Tensor) -> torch.Tensor:
        return (self.model(x) - x.sum(1, keepdim=True)).pow(2).mean()

    def spoil(self, step: int) -> None:
        """Change gradients after the backward pass and before the update."""

    def update(self, step: int) -> None:
        self.optimizer.step()

    def clock(self) -> AbstractContextManager[object]:
        """Return a context in which the detectors measure this job's time."""
        return nullcontext()

    def train(self) -> None:
        for step in range(1, self.steps + 1):
            for part in range(self.micro_batches):
                is_last = part == self.micro_batches - 1
                self.model.require_backward_grad_sync = is_last  # as in no_sync()
                self.loss(step, self.batch(step * self.micro_batches + part)).backward()
            self.spoil(step)
            self.update(step)
            self.optimizer.zero_grad()


def run_job(world: World, kind: type[Job], detectors: list[Detector] | None, every: int = 1) -> list[Finding] | str:
    """Return all findings, and an error of the program as text."""
    job = kind(world)
    checks = None
    try:
        with job.clock(), checking(world, job.model, job.optimizer, detectors, every=every) as checks:
            job.train()
    except CheckError as error:
        if checks is None or checks.findings[-1] != error.finding:
            return f"raised {error.finding}, which is not the last of the findings"
    dist.barrier()
    return checks.findings if checks else "nothing"


# -------------------------------------------------------------------------------------------- what goes wrong, and how


class Corrupt(Job):
    def spoil(self, step: int) -> None:
        if step == 3 and self.rank == self.last:
            self.net.first.weight.grad[0, 0] += 1


class OwnRate(Job):
    def spoil(self, step: int) -> None:
        if step == 2 and self.rank == self.last:
            self.optimizer.param_groups[0]["lr"] /= 2


class OwnState(Job):
    """The optimizer state differs between ranks, but the parameters do not yet."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.optimizer.param_groups[0]["lr"] = 0.0

    def update(self, step: int) -> None:
        super().update(step)
        if step == 4 and self.rank == self.last:
            self.optimizer.state[self.net.extra.bias]["exp_avg_sq"] += 1e-8


class OwnBuffers(Job):
    broadcast_buffers = False


class SkippedStep(Job):
    """One rank decides by its own loss."""

    def update(self, step: int) -> None:
        if step == 4 and self.rank == self.last:
            for parameter in self.net.parameters():
                parameter.grad.zero_()
        super().update(step)


class NaNInput(Job):
    def batch(self, number: int) -> torch.Tensor:
        x = super().batch(number).clone()
        if number == 3 and self.rank == self.last:
            x[0, 0] = float("inf")
        return x


class NaNLoss(Job):
    def loss(self, step: int, x: torch.Tensor) -> torch.Tensor:
        factor = float("nan") if step == 3 and self.rank == self.last else 1.0
        return super().loss(step, x) * factor


class NaNGradient(Job):
    """The square root has a value at 0, but no finite gradient."""

    def loss(self, step: int, x: torch.Tensor) -> torch.Tensor:
        if step == 3 and self.rank == self.last:
            return super().loss(step, x) + (self.net.extra.bias * 0).sqrt().sum()
        return super().loss(step, x)


class NaNUpdate(Job):
    def update(self, step: int) -> None:
        super().update(step)
        if step == 3 and self.rank == self.last:
            with torch.no_grad():
                self.net.last.weight[0, 0] = float("nan")


class NaNReduction(Job):
    def spoil(self, step: int) -> None:
        if step == 3:
            self.net.last.weight.grad[0, 0] = float("inf")


class Spike(Job):
    steps = 30

    def batch(self, number: int) -> torch.Tensor:
        return super().batch(number) * (1000 if number == 25 and self.rank == self.last else 1)


class Diverge(Job):
    steps = 60

    def loss(self, step: int, x: torch.Tensor) -> torch.Tensor:
        return super().loss(step, x) * (1 if step < 20 else step)


class SameShard(Job):
    def batch(self, number: int) -> torch.Tensor:
        return self.data[8 * number :][:8]


class OwnPermutation(Job):
    """Each rank reads all data in its own order."""

    steps = 20

    def batch(self, number: int) -> torch.Tensor:
        order = torch.randperm(240, generator=torch.Generator().manual_seed(self.rank))
        return self.data[order[8 * (number - 1) :][:8]]


class SameDropout(Job):
    def __init__(self, world: World) -> None:
        super().__init__(world)
        torch.manual_seed(7)


class Timed(Job):
    """A program whose clock advances only when the program says so. A paused rank would otherwise be slower."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.now = 0.0

    def advance(self, seconds: float) -> float:
        self.now += seconds
        return self.now

    def clock(self) -> AbstractContextManager[object]:
        return patch.object(instrumentation, "time", SimpleNamespace(perf_counter=lambda: self.advance(1e-4)))


class Slow(Timed):
    steps = 30

    def __init__(self, world: World) -> None:
        super().__init__(world)
        if self.rank == self.last:
            self.net.norm.register_forward_pre_hook(lambda *_: self.advance(0.06) and None)


class SlowData(Timed):
    steps = 26

    def __init__(self, world: World) -> None:
        super().__init__(world)
        rows = TensorDataset(self.data[: 8 * 26])
        self.loader = iter(DataLoader(rows, 8, collate_fn=self.read))

    def read(self, rows: list[Any]) -> torch.Tensor:
        if self.rank == self.last:
            self.advance(0.06)
        return torch.stack([row for [row] in rows])

    def batch(self, number: int) -> torch.Tensor:
        return next(self.loader) + self.rank


class Leak(Job):
    steps = 45

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.kept: list[torch.Tensor] = []

    def spoil(self, step: int) -> None:
        if self.rank == self.last:
            self.kept.append(torch.ones(500_000))


WRONG: dict[type[Job], list[Detector]] = {
    Corrupt: [ReplicaDrift(every=1)],
    OwnRate: [ReplicaDrift(every=1)],
    OwnState: [ReplicaDrift(every=1)],
    SkippedStep: [ReplicaDrift(every=1)],
    OwnBuffers: [ReplicaDrift(every=2)],
    NaNInput: [NonFinite()],
    NaNLoss: [NonFinite()],
    NaNGradient: [NonFinite()],
    NaNUpdate: [NonFinite()],
    NaNReduction: [NonFinite()],
    Spike: [GradientSpike()],
    Diverge: [LossDivergence()],
    SameShard: [DataOverlap()],
    OwnPermutation: [DataOverlap()],
    SameDropout: [SameRandomNumbers()],
    Slow: [Straggler()],
    SlowData: [DataStarvation()],
    Leak: [MemoryGrowth(window=20)],
}

# Kind -> step (None: any), the ranks at fault ("last", "all"), where, and a part of the message.
EXPECTED: dict[type[Job], tuple[int | None, str, str, str]] = {
    Corrupt: (3, "last", "first.weight", "the replicas have drifted apart: first.weight"),
    OwnRate: (2, "last", "lr of the optimizer's parameter group 0", "drifted apart"),
    OwnState: (5, "last", "exp_avg_sq of extra.bias", "drifted apart"),
    SkippedStep: (4, "last", "first.weight", "drifted apart"),
    OwnBuffers: (2, "all", "norm.running_mean", "buffer 'norm.running_mean' is not the same"),
    NaNInput: (3, "last", "first", "in the output of module 'first' in the forward pass (rank"),
    NaNLoss: (3, "last", "loss", "the loss"),
    NaNGradient: (3, "last", "extra.bias", "in the gradient of parameter 'extra.bias' in the backward pass (rank"),
    NaNUpdate: (4, "last", "last.weight", "in parameter 'last.weight' at the start of the step"),
    NaNReduction: (3, "all", "reduction", "it was finite on each rank before the all-reduce"),
    Spike: (25, "last", "", "the gradient norm jumps"),
    Diverge: (None, "all", "loss", "the loss diverges"),
    SameShard: (3, "first two", "data", "train on the same samples"),
    OwnPermutation: (None, "all", "data", "samples are used twice within an epoch"),
    SameDropout: (1, "all", "forward", "draw the same random numbers"),
    Slow: (22, "last", "forward", "the other ranks wait for rank"),
    SlowData: (22, "last", "data", "waits for data"),
    Leak: (40, "last", "10 of [500000] float32 (20.0 MB)", "MB per step"),
}


def run_all(world: World, jobs: dict[type[Job], list[Detector] | None]) -> dict[str, Any]:
    return {kind.__name__: run_job(world, kind, detectors) for kind, detectors in jobs.items()}


@cache
def found_by_ranks(nprocs: int) -> list[dict[str, Any]]:
    """Return the findings if each step is evaluated immediately."""
    return launch(run_all, nprocs, WRONG, device="cpu", threads=1, echo=False, timeout=300)


@pytest.mark.parametrize("nprocs", [2, 3])
@pytest.mark.parametrize("kind", WRONG, ids=lambda kind: kind.__name__)
def test_a_fault_is_found_on_all_ranks_with_its_step_rank_and_name(kind: type[Job], nprocs: int) -> None:
    of_ranks = [found[kind.__name__] for found in found_by_ranks(nprocs)]
    assert all(each == of_ranks[0] for each in of_ranks), "all ranks are told the same"
    step, at_fault, where, message = EXPECTED[kind]
    assert of_ranks[0], "nothing was found"
    finding = of_ranks[0][0]
    is_drift = finding.detector == "drift"
    everyone = tuple(range(nprocs))
    ranks = {"all": everyone, "first two": (0, 1), "last": (nprocs - 1,)}[at_fault]
    if is_drift and nprocs == 2:
        ranks = everyone  # with two ranks, there is no majority
    assert (finding.detector, finding.ranks) == (WRONG[kind][0].name, ranks), finding
    assert step in {None, finding.step}, finding
    assert where in {"", finding.where}, finding
    assert message in finding.message
    assert len(of_ranks[0]) == 1, "told once"


# ------------------------------------------------------------------------------------------------- correct programs


class Accumulated(Job):
    micro_batches = 3
    steps = 25


class Clipped(Job):
    """SGD with momentum, a schedule, and evaluations between the steps."""

    steps = 25

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, self.steps)

    def update(self, step: int) -> None:
        nn.utils.clip_grad_norm_(self.net.parameters(), 0.1)
        super().update(step)
        self.scheduler.step()
        self.net.eval()
        with torch.no_grad():
            self.net(self.data[:50])  # the same on all ranks
        self.net.train()


class Epochs(Job):
    """Few samples, reshuffled in each epoch and padded to a multiple of the ranks; the last batch is smaller."""

    steps = 60

    def __init__(self, world: World) -> None:
        super().__init__(world)
        rows = TensorDataset(self.data[:101])
        sampler = torch.utils.data.DistributedSampler(rows, world.size, world.rank)
        loader = DataLoader(rows, 6, sampler=sampler)

        def batches() -> Any:
            for epoch in range(100):
                sampler.set_epoch(epoch)
                for [batch] in loader:
                    yield batch

        self.batches = batches()

    def batch(self, number: int) -> torch.Tensor:
        return next(self.batches)


class Overflowing(Job):
    """The initial loss scale is too high, so that all ranks skip steps."""

    steps = 30

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=2)

    def loss(self, step: int, x: torch.Tensor) -> torch.Tensor:
        return self.scaler.scale(super().loss(step, x))

    def update(self, step: int) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Masked(Job):
    """Intermediate infinities that reach no gradient."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.net.extra.register_forward_hook(lambda _, __, y: torch.where(y > 1e6, y, -torch.inf))

    def loss(self, step: int, x: torch.Tensor) -> torch.Tensor:
        return torch.where(self.model(x).isfinite(), 1.0, 0.0).mean() + sum(p.sum() for p in self.net.parameters())


class UsedInTurn(Job):
    """Each rank occasionally skips a part of the model, which DDP allows."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.model = DistributedDataParallel(self.net, find_unused_parameters=True)

    def batch(self, number: int) -> torch.Tensor:
        self.net.with_extra = (number + self.rank) % 3 > 0
        return super().batch(number)


class Sharded(Job):
    def __init__(self, world: World) -> None:
        super().__init__(world)
        kind = type("ZeroRedundancyOptimizer", (torch.optim.AdamW,), {})  # torch's own module warns at import
        self.optimizer = kind(self.net.parameters(), lr=0.0)

    def update(self, step: int) -> None:
        super().update(step)
        self.optimizer.state[self.net.extra.bias]["exp_avg"] += self.rank  # its part is on a different rank


class Replaced(Job):
    """Samples drawn with replacement, which are occasionally the same on all ranks."""

    steps = 25

    def batch(self, number: int) -> torch.Tensor:
        return self.data[torch.randint(40, (8,))]


class Resumed(Job):
    steps = 25

    def __init__(self, world: World) -> None:
        super().__init__(world)
        for step in range(1, 4):
            self.loss(step, self.batch(100 + step)).backward()
            self.optimizer.step()
        state, model = self.optimizer.state_dict(), self.net.state_dict()
        self.net.load_state_dict(model)
        self.optimizer.load_state_dict(state)
        self.loss(1, self.batch(1)).backward()  # a warm-up, which is discarded
        self.optimizer.zero_grad()


RIGHT = [Job, Accumulated, Clipped, Epochs, Overflowing, Masked, UsedInTurn, Sharded, Replaced, Resumed]


def always() -> list[Detector]:
    """Return the default detectors, with periodic checks in each step and without tolerance for a busy machine."""
    timed = (Straggler, DataStarvation)
    others = [each for each in default_detectors() if not isinstance(each, (ReplicaDrift, DataOverlap, *timed))]
    return [*others, ReplicaDrift(every=1), DataOverlap()]


@cache
def found_in_right_programs(nprocs: int) -> list[dict[str, Any]]:
    jobs = {kind: always() for kind in RIGHT}
    return launch(run_all, nprocs, jobs, device="cpu", threads=1, echo=False, timeout=300)


@pytest.mark.parametrize("nprocs", [2, 3])
@pytest.mark.parametrize("kind", RIGHT, ids=lambda kind: kind.__name__)
def test_a_correct_program_raises_no_alarm(kind: type[Job], nprocs: int) -> None:
    assert [found[kind.__name__] for found in found_in_right_programs(nprocs)] == [[]] * nprocs


# ---------------------------------------------------------------------------------------------------- the Trainer


def small(**settings: Any) -> TaskConfig:
    model = {"layers": 1, "heads": 1, "width": 16, "context": 16}
    values = {"model": model, "batch_size": 12, "steps": 12, "eval_every": 5, "eval_samples": 4, "device": "cpu"}
    return TaskConfig.model_validate(values | settings)


def trained(world: World, config: TaskConfig, *faults: Fault, every: int = 1) -> list[Finding]:
    trainer = make_trainer(config, world)
    optimizer = trainer.train_step.optimizer
    with (
        inject_faults(world, *faults, model=trainer.model),
        checking(world, trainer.model, optimizer, always(), after=lambda: trainer.step_count, every=every) as checks,
    ):
        try:
            trainer.train()
        except CheckError as error:
            return [error.finding]
        return checks.findings


def trainers(world: World) -> dict[str, list[Finding]]:
    variants = {
        variant: small(name=variant, ddp={"variant": variant}, accumulation=2)
        for variant in ("naive", "flat", "bucket", "torch")
    }
    saving = {"checkpoint": {"every": 4}, "name": "saved"}
    others = {
        "invariant": small(name="invariant", strategy="invariant", micro_batches=4),
        "fp16": small(name="fp16", precision={"dtype": "fp16", "initial_scale": 2.0**20}),
        "before": small(**saving, steps=8),
        "resumed": small(**saving, resume="auto", resume_allow=["steps"]),
    }
    found = {name: trained(world, config) for name, config in {**variants, **others}.items()}
    corrupt = Fault(action="corrupt", rank=1, step=7, phase="update")
    found["by default"] = trained(world, small(name="default", steps=25), every=10)
    return found | {"corrupt": trained(world, small(name="corrupt"), corrupt)}


def test_the_trainer_is_checked_without_changes() -> None:
    of_ranks = launch(trainers, 2, device="cpu", threads=1, echo=False, timeout=300)
    assert all(found == of_ranks[0] for found in of_ranks)
    [corrupt] = of_ranks[0].pop("corrupt")
    assert {name: found for name, found in of_ranks[0].items() if found} == {}
    assert (corrupt.detector, corrupt.step) == ("drift", 7)
    assert 1 in corrupt.ranks


class AtTheEnd(Detector):
    """A problem in the last step that only the numbers of all ranks show."""

    name: ClassVar[str] = "at_the_end"
    size: ClassVar[int] = 1

    def local_report(self, observation: StepObservation) -> list[float]:
        return [float(self.program.step == 12)]

    def check(self, step: int, reports: LocalReport) -> list[Finding]:
        return [Finding(self.name, step, (0, 1), "something is wrong", "error")] if reports[0][0] else []


def alarmed_at_the_end(world: World) -> list[str]:
    module._FINAL_TIMEOUT = 60.0
    trainer = make_trainer(small(name="late", checkpoint={"every": 4}), world)
    try:
        with checking(
            world, trainer.model, trainer.train_step.optimizer, [AtTheEnd()], after=lambda: trainer.step_count
        ):
            trainer.train()
    except CheckError as error:
        return [str(error), *sorted(path.name for path in trainer.run.path.glob("*.json"))]
    return ["no alarm"]


def test_alarms_of_the_last_steps_precede_the_result_and_are_recorded() -> None:
    left = ["config.json", "failed.json"]
    told = launch(alarmed_at_the_end, 2, device="cpu", threads=1, echo=False, timeout=300)
    assert told == [["step 12: something is wrong", *left]] * 2
    noted = json.loads(Path("runs/late/failed.json").read_text())
    assert (noted["error"], noted["step"]) == ("CheckError: step 12: something is wrong", 12)
    assert "CheckError" in Path("runs/late/rank_1.log").read_text()


# ------------------------------------------------------------------------------------- told once in several steps


class CorruptLater(Corrupt):
    """A corrupted tensor in the middle of the model; when the ranks report it, all tensors differ."""

    def spoil(self, step: int) -> None:
        if step == 5 and self.rank == self.last:
            self.net.last.weight.grad[0, 0] += 1


class NaNLater(NaNInput):
    steps = 8

    def batch(self, number: int) -> torch.Tensor:
        return super().batch(3 if number == 7 else 100 + number)


class OwnRateLater(Job):
    steps = 25

    def spoil(self, step: int) -> None:
        if step == 13 and self.rank == self.last:
            self.optimizer.param_groups[0]["lr"] /= 2


class UnusedOnce(Job):
    def loss(self, step: int, x: torch.Tensor) -> torch.Tensor:
        self.net.with_extra = step != 6
        return super().loss(step, x)

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.model = self.net  # DDP rejects the next step; a custom average may not


class OnOneRankOnly(Job):
    """One rank's gradient is corrupted after averaging, which the other ranks do not notice."""

    steps, at = 12, 5

    def spoil(self, step: int) -> None:
        if step == self.at and self.rank == self.last:
            self.net.last.weight.grad[0, 0] = float("nan")


class InTheLastStep(OnOneRankOnly):
    at = 12


# Kind -> step, step in which it is seen, where, detector
LATER: dict[type[Job], tuple[int, int, str, str]] = {
    CorruptLater: (5, 11, "last.weight", "drift"),
    NaNLater: (7, 0, "first", "nonfinite"),
    OwnRateLater: (20, 21, "lr of the optimizer's parameter group 0", "drift"),
    Spike: (25, 30, "", "spike"),
    UnusedOnce: (6, 11, "extra.weight", "unused"),
    SameDropout: (1, 0, "forward", "same_random"),
    OnOneRankOnly: (5, 11, "reduction", "nonfinite"),
    InTheLastStep: (12, 0, "reduction", "nonfinite"),
}


class Kept(NamedTuple):
    """The findings of a rank, whether its weights are finite, and the steps that changed the weights."""

    findings: list[Finding] | str
    is_finite: bool
    moved: list[int]


def run_later(world: World, kinds: list[type[Job]]) -> list[Kept]:
    return [run_with_weights(world, kind) for kind in kinds]


def run_with_weights(world: World, kind: type[Job]) -> Kept:
    moved: list[int] = []
    last: list[Job] = []

    class Watched(kind):  # type: ignore[misc, valid-type]
        def update(self, step: int) -> None:
            last[:] = [self]
            weights = nn.utils.parameters_to_vector(self.net.parameters()).clone()
            super().update(step)
            if not torch.equal(weights, nn.utils.parameters_to_vector(self.net.parameters())):
                moved.append(step)
            assert all(p.grad is not None for p in self.net.last.parameters()), "gradients are given back"

    module._FINAL_TIMEOUT = 60.0  # all ranks arrive; without a pause, at once
    module._TIMEOUT = 60.0 if kind is NaNLater else 1.0  # the other kinds have ranks that never arrive
    detectors = [each for each in default_detectors() if each.name == LATER[kind][3]]
    findings = run_job(world, Watched, detectors, every=10)
    return Kept(findings, all(bool(p.isfinite().all()) for p in last[0].net.parameters()), moved)


def test_a_delayed_report_has_its_own_step_and_no_weight_is_corrupted() -> None:
    ranks = launch(run_later, 2, list(LATER), device="cpu", threads=1, echo=False, timeout=300)
    for place, (kind, (step, seen, where, detector)) in enumerate(LATER.items()):
        of_ranks = [kept[place] for kept in ranks]
        assert of_ranks[0].findings == of_ranks[1].findings, "all ranks are told the same"
        [finding] = of_ranks[0].findings
        assert (finding.detector, finding.step, finding.seen) == (detector, step, seen), finding
        assert where in {"", finding.where}, finding
        assert str(finding).endswith(f"(seen in step {seen})") == bool(seen)
        if detector == "nonfinite":
            assert all(kept.is_finite for kept in of_ranks), kind
    by_kind = {kind: [kept[place] for kept in ranks] for place, kind in enumerate(LATER)}
    assert "After step 1, the replicas were identical" in by_kind[OwnRateLater][0].findings[0].message
    assert [kept.moved for kept in by_kind[NaNLater]] == [[*range(1, 7)]] * 2, "all raise before the update"
    assert by_kind[OnOneRankOnly][0].moved == [*range(1, 11)]
    assert by_kind[OnOneRankOnly][1].moved == [1, 2, 3, 4, 6, 7, 8, 9, 10], (
        "the rank that has it leaves that update out"
    )
    assert by_kind[InTheLastStep][1].moved == [*range(1, 12)]


# ------------------------------------------------------------------------------------------------- the front door


def skips_an_update(world: World) -> list[str]:
    """Return the other ranks' errors if a rank skips an update but counts the step, in the block or at its end."""
    module._FINAL_TIMEOUT = 60.0
    told = []
    for steps in (10, 8):
        job, taken = Job(world), [0]
        job.steps = steps

        def update(step: int, job: Job = job, taken: list[int] = taken) -> None:
            if step != 6 or world.is_main:
                job.optimizer.step()
            taken[0] = step

        job.update = update
        try:
            with checking(world, job.model, job.optimizer, [NonFinite()], after=partial(taken.__getitem__, 0)):
                job.train()
        except CheckError as error:
            told.append(str(error))
        dist.barrier()
    return told


def test_a_rank_that_skips_an_update_is_reported_on_all_ranks() -> None:
    message = "step 6: the ranks do not update their weights in the same steps: rank 0 in step 6, rank 1 in step 7"
    assert launch(skips_an_update, 2, device="cpu", echo=False, timeout=300) == [[message] * 2] * 2


def ends_late(world: World) -> list[Any]:
    """Let one rank reach the end of the block after the others have stopped waiting."""
    module._FINAL_TIMEOUT = 0.2
    job = Job(world)
    job.steps = 5
    began = time.monotonic()
    with checking(world, job.model, job.optimizer, [NonFinite()]) as checks:
        job.train()
        if world.is_main:
            time.sleep(1.5)
    return [checks.findings, time.monotonic() - began < 30]


def test_a_rank_that_reaches_the_end_late_does_not_block_the_others() -> None:
    assert launch(ends_late, 2, device="cpu", echo=False, timeout=300) == [[[], True]] * 2


def ends_differently(world: World, kind: str) -> str:
    job = Job(world)
    try:
        with checking(world, job.model, job.optimizer, [ReplicaDrift(), NonFinite()]):
            job.steps = 3 if world.rank == 0 and kind == "leaves" else 4
            if kind == "raises":
                job.spoil = lambda step: 1 / (step - 3 or world.rank)
            job.train()
    except CheckError as error:
        return f"{error.finding.detector}: {error}"
    return "left"


def test_a_rank_that_takes_fewer_steps_is_reported_on_the_others() -> None:
    [first, *others] = launch(lambda world: ends_differently(world, "leaves"), 3, device="cpu", echo=False, timeout=300)
    assert first == "left"
    message = "the ranks take different numbers of steps: rank 0 left the block after step 3"
    assert others == [f"steps: step 4: {message}"] * 2


def test_a_ranks_own_error_is_raised_unchanged() -> None:
    with pytest.raises(RankError, match="ZeroDivisionError") as caught:
        launch(lambda world: ends_differently(world, "raises"), 3, device="cpu", echo=False, timeout=300)
    assert caught.value.rank == 0


class InStepTen(AtTheEnd):
    def local_report(self, observation: StepObservation) -> list[float]:
        return [float(self.program.step == 10)]


def fails_in_step_eleven(world: World, which: tuple[int, ...]) -> str:
    """Fail in step 11 while the report of step 10 is in transit."""
    module._TIMEOUT = 60.0 if len(which) == world.size else 1.0  # whether all ranks fail in the same step
    job = Job(world)

    def loss(step: int, x: torch.Tensor) -> torch.Tensor:
        if step == 11 and world.rank in which:
            raise ValueError("no loss")
        return Job.loss(job, step, x)

    job.loss = loss  # type: ignore[method-assign]
    try:
        with checking(world, job.model, job.optimizer, [InStepTen()], every=10):
            job.train()
    except CheckError as error:
        return f"{error}, {error.__context__}"
    return "no alarm"


def test_a_pending_alarm_is_raised_if_all_ranks_fail() -> None:
    fail = partial(launch, fails_in_step_eleven, 2, device="cpu", echo=False, timeout=300)
    assert fail((0, 1)) == ["step 10: something is wrong (seen in step 11), no loss"] * 2
    with pytest.raises(RankError, match="no loss") as caught:
        fail((0,))
    assert caught.value.rank == 0


def strictly(world: World) -> list[Any]:
    job = SameDropout(world)
    hooks = len(job.optimizer._optimizer_step_pre_hooks), len(job.net._forward_pre_hooks)
    backward = torch.autograd.backward
    try:
        with checking(world, job.model, job.optimizer, strict=True):
            job.train()
    except CheckError as error:
        left = len(job.optimizer._optimizer_step_pre_hooks), len(job.net._forward_pre_hooks)
        return [error.finding.detector, left == hooks, backward is torch.autograd.backward]
    return []


def test_strict_also_raises_warnings_and_removes_all_hooks() -> None:
    assert launch(strictly, 2, device="cpu", echo=False, timeout=300) == [["same_random", True, True]] * 2


def with_other_detectors(world: World) -> None:
    job = Job(world)
    with checking(world, job.model, job.optimizer, [ReplicaDrift()] if world.is_main else [NonFinite()]):
        pass


def test_ranks_with_different_detectors_are_rejected() -> None:
    with pytest.raises(RankError, match="all ranks must use the same detectors"):
        launch(with_other_detectors, 2, device="cpu", echo=False, timeout=300)


def test_a_single_process_is_checked_too() -> None:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    with checking(World(), net, optimizer) as checks:
        for _ in range(3):
            net(torch.randn(8, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        (net(torch.randn(8, 8)).sum() * float("nan")).backward()
        with pytest.raises(CheckError, match="the loss") as caught:
            optimizer.step()
    assert checks.findings == [caught.value.finding]
    assert (caught.value.finding.step, caught.value.finding.ranks) == (4, (0,))


def test_unused_parameters_are_named_once_unless_allowed() -> None:
    net = Net()
    net.with_extra = False
    net.first.bias.requires_grad_(False)  # frozen, not unused
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with checking(World(), net, optimizer, [UnusedParameters()]) as checks:
        for _ in range(3):
            net(torch.randn(8, 8)).sum().backward()
            optimizer.step()
    [finding] = checks.findings
    assert (finding.step, finding.ranks, finding.where) == (1, (0,), "extra.weight")
    assert "parameters that received no gradient: 'extra.weight', 'extra.bias'." in finding.message


def test_a_check_error_survives_pickling() -> None:
    import pickle

    error = CheckError(Finding("drift", 3, (1,), "it has", "error", "weight"))
    again = pickle.loads(pickle.dumps(error))
    assert (again.finding, str(again)) == (error.finding, "step 3: it has")
