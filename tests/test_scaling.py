"""The step model gives values computed by hand, and the arms of the benchmark do equal work."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddp_tutorial.benches import as_text
from ddp_tutorial.benches.scaling import BATCH, FOUR_RANK_ARMS, Setup, arm_of, race, two_rank_arms
from ddp_tutorial.ddp.config import LinkConfig
from ddp_tutorial.ddp.link import LinkModel
from ddp_tutorial.experiments import sleeping
from ddp_tutorial.experiments.arms import Arm
from ddp_tutorial.experiments.scaling import BACKWARD, NETWORKS, StepModel, fit_step
from ddp_tutorial.experiments.sleeping import Sleeper, SleepingModel
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.world import World

# ------------------------------------------------------------------------------------------------------- the model

# A fixed second, a second a sample; 8 bytes at 2 bytes a second and no latency: 4 seconds a pass over two ranks.
BY_HAND = StepModel(fixed=1, per_sample=1, nbytes=8, link=LinkModel(0, 2))


@pytest.mark.parametrize(
    ("model", "batch", "ranks", "seconds"),
    [
        (BY_HAND, 8, 1, 9.0),  # 1 + 8, and nobody to talk to
        (BY_HAND, 8, 2, 5.0 + 4.0),  # 1 + 4; 2 * 1/2 of 8 bytes at 2 a second
        (BY_HAND, 8, 4, 3.0 + 6.0),  # 1 + 2; 2 * 3/4 of 8 bytes
        (BY_HAND, 7, 2, 5.0 + 4.0),  # one rank has 4 of the 7, and the other waits for it
        (replace(BY_HAND, overlap=1.0), 8, 2, 5.0 + 4.0 - 10 / 3),  # hides 2/3 of 5 seconds, of 4
        (replace(BY_HAND, overlap=0.5), 8, 2, 5.0 + 4.0 - 5 / 3),
        (replace(BY_HAND, overlap=1.0), 16, 2, 9.0),  # 2/3 of 9 seconds hide all of 4
        (replace(BY_HAND, sharing=1.2), 8, 2, 6.0 + 4.0),
        (replace(BY_HAND, sharing=1.2), 8, 1, 9.0),  # a single rank shares nothing
        (replace(BY_HAND, link=LinkModel(0.5, 2)), 8, 4, 9.0 + 3.0),  # 2 * 3 rounds of half a second
        (replace(BY_HAND, link=LinkModel(0.5, 2), buckets=2), 8, 4, 9.0 + 6.0),  # and for each bucket
    ],
)
def test_step_times_equal_values_computed_by_hand(model: StepModel, batch: int, ranks: int, seconds: float) -> None:
    assert model.seconds(batch, ranks) == pytest.approx(seconds)


def test_an_efficiency_equals_the_value_computed_by_hand() -> None:
    assert BY_HAND.weak_efficiency(8, 2) == pytest.approx(9 / 13)  # 16 samples in 9 + 4 seconds, against 8 in 9


def test_a_cluster_has_one_machine_per_rank() -> None:
    model = replace(BY_HAND, sharing=1.5).on(LinkModel(0, 8), faster=10)
    assert model.seconds(8, 1) == pytest.approx(0.9)
    assert model.seconds(8, 2) == pytest.approx(0.5 + 1.0)
    larger = BY_HAND.on(LinkModel(0, 2), faster=10, larger=10)
    assert larger.seconds(8, 2) == pytest.approx(5.0 + 40.0)  # the same computation, ten times the bytes
    assert replace(BY_HAND, nbytes=1e6).on(LinkModel(0, 2), larger=105).buckets == 5  # of 25 MiB


models = st.builds(
    StepModel,
    fixed=st.floats(0, 1),
    per_sample=st.floats(1e-6, 1),
    nbytes=st.floats(0, 1e9),
    link=st.builds(LinkModel, st.floats(0, 1e-2), st.floats(1e6, 1e12)),
    buckets=st.integers(1, 50),
    overlap=st.floats(0, 1),
    sharing=st.floats(1, 3),
)
ROUNDING = 1 + 1e-9


@given(models, st.integers(1, 4096), st.integers(1, 4096))
def test_no_efficiency_is_above_one(model: StepModel, batch: int, ranks: int) -> None:
    assert 0 < model.weak_efficiency(batch, ranks) <= ROUNDING


@given(models, st.integers(1, 512), st.integers(1, 2048))
def test_weak_efficiency_falls_as_ranks_are_added(model: StepModel, batch: int, ranks: int) -> None:
    assert model.weak_efficiency(batch, ranks + 1) <= model.weak_efficiency(batch, ranks) * ROUNDING


@given(models, st.integers(1, 512), st.integers(1, 2048))
def test_a_free_link_scales_perfectly(model: StepModel, batch: int, ranks: int) -> None:
    free = model.on(LinkModel(0, float("inf")))
    assert free.weak_efficiency(batch, ranks) == pytest.approx(1)


@given(models, st.integers(1, 512), st.integers(2, 2048))
def test_a_better_network_is_never_slower(model: StepModel, batch: int, ranks: int) -> None:
    seconds = [model.on(link).seconds(batch, ranks) for link in NETWORKS.values()]
    assert seconds == sorted(seconds, reverse=True)


@given(
    models.filter(lambda model: model.nbytes > 1e5),
    st.sampled_from([None, LinkConfig(latency_ms=1, megabytes_per_second=1)]),
)
def test_the_fit_recovers_the_model_of_the_measurements(model: StepModel, slow: LinkConfig | None) -> None:
    link = LinkModel.from_config(slow) if slow else model.link
    found = fit_step(
        alone={samples: model.compute(samples) for samples in (4, 32)},
        side_by_side=(32, model.compute(16, ranks=2)),
        all_reduces={n: model.link.ring_seconds(n, 2) for n in (1e3, 1e6, 1e8)},
        trained=(32, replace(model, link=link).seconds(32, 2)),
        nbytes=model.nbytes,
        buckets=model.buckets,
        trained_on=slow,
    )
    assert found.seconds(32, 2) == pytest.approx(model.seconds(32, 2), rel=1e-3)
    assert found.seconds(24, 1) == pytest.approx(model.seconds(24, 1), rel=1e-3)
    assert found.communication(8) == pytest.approx(model.communication(8), rel=1e-3, abs=1e-6)
    assert found.sharing == pytest.approx(model.sharing, rel=1e-3)


def test_noise_does_not_make_a_fit_impossible() -> None:
    """Two ranks were faster than one, as happens on a busy machine: no sharing, and full overlap."""
    found = fit_step({8: 1.0, 32: 4.0}, (32, 1.5), {1000: 0.1, 10**6: 0.2}, (32, 1.5), nbytes=10**6)
    assert (found.sharing, found.overlap) == (1.0, 1.0)


def test_invalid_values_are_rejected() -> None:
    with pytest.raises(ValueError, match="must grow with the number of samples"):
        fit_step({8: 2.0, 32: 1.0}, (32, 1.0), {1000: 0.1, 10**6: 0.2}, (32, 1.0), nbytes=10**6)
    with pytest.raises(ValueError, match="'overlap' must be between 0 and 1"):
        replace(BY_HAND, overlap=1.1)
    with pytest.raises(ValueError, match="'per_sample' must be > 0"):
        replace(BY_HAND, per_sample=0)
    with pytest.raises(ValueError, match="at least 1, got 0 and 2"):
        BY_HAND.seconds(0, 2)
    assert BACKWARD < 1


# ------------------------------------------------------------------------------------------------ ranks that sleep


def test_a_sleeping_rank_takes_the_requested_time_and_has_all_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(sleeping, "time", SimpleNamespace(sleep=slept.append))
    sleeper = Sleeper(fixed=0.05, per_sample=0.01, nbytes=2**19, layers=4)
    assert sleeper.seconds(5) == pytest.approx(0.1)
    model = SleepingModel(sleeper)
    assert sum(weight.nbytes for weight in model.parameters()) == sleeper.nbytes
    lost = model(5)
    assert slept == pytest.approx([0.1 / 3 / 4] * 4), "a third of it is forward"
    lost.backward()
    assert slept[4:] == pytest.approx([0.2 / 3 / 4] * 4)
    assert all(bool((weight.grad == 1).all()) for weight in model.parameters() if weight.grad is not None)
    assert all(weight.grad is not None for weight in model.parameters())


# ---------------------------------------------------------------------------------------------------- the benchmark


def sent_in(arm: Arm, times: int) -> list[str]:
    """Return the collectives of `times` steps on this rank, from torch's flight recorder."""

    def recorded() -> list[str]:
        entries = json.loads(torch._C._distributed_c10d._dump_fr_trace_json()).get("entries", [])
        return [entry["profiling_name"] for entry in entries]

    arm()  # in the first step, ranks agree on the result of the loss
    before = len(recorded())
    for _ in range(times):
        arm()
    return recorded()[before:]


def flat(arm: Arm) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in arm.step.model.parameters()])


class Noting:
    """A source that records the bytes of its samples."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.read, self.shares = inner, [], []

    def take(self, parts: int) -> Any:
        shares = self.inner.take(parts)
        self.read += [sample.numpy().tobytes() for share in shares for sample in share.samples["tokens"]]
        self.shares.append(sum(share.count for share in shares))
        return shares


def work_of(world: World, setups: dict[str, Setup], steps: int) -> dict[str, Any]:
    """Return for each arm this rank's steps, samples, bytes of each sample, collectives, and final weights."""
    found: dict[str, Any] = {}
    for name, setup in setups.items():
        arm = arm_of(setup, world)
        if arm is None:
            continue
        source = Noting(arm.step.source)
        arm.step.source = source  # type: ignore[assignment]
        start = flat(arm)
        sent = sent_in(arm, steps - 1)
        moved = flat(arm) - start
        found[name] = {
            "steps": len(source.shares),
            "samples": sum(source.shares),
            "read": source.read,
            "sent": sent,
            "moved": moved,
        }
    return found


@pytest.fixture
def flight_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "2000")


@pytest.mark.parametrize(("arms", "size"), [(two_rank_arms(), 2), (FOUR_RANK_ARMS, 4)], ids=["two", "four"])
def test_all_arms_do_equal_work_and_only_synchronized_arms_send(
    arms: dict[str, Setup], size: int, flight_recorder: None
) -> None:
    steps = 3
    ranks = launch(work_of, size, arms, steps, device="cpu", threads=1, echo=False)
    alone = ranks[0]["one_thread" if size == 2 else "one_thread_of_four"]
    for name, arm in arms.items():
        of_ranks = [rank[name] for rank in ranks if name in rank]
        assert len(of_ranks) == arm.readers
        assert {each["steps"] for each in of_ranks} == {steps}
        assert [each["samples"] for each in of_ranks] == [steps * arm.batch // arm.readers] * arm.readers
        talks = arm.talk and arm.readers > 1
        for each in of_ranks:
            assert bool(each["sent"]) == talks, f"{name}: {each['sent']}"
        if arm.batch == BATCH:  # the weak arms have twice the samples
            assert sorted(sample for each in of_ranks for sample in each["read"]) == sorted(alone["read"])
        if talks:
            assert all(torch.equal(each["moved"], of_ranks[0]["moved"]) for each in of_ranks)
        # AdamW takes steps of one size wherever a gradient is not zero, also where its sign is a matter of rounding.
        apart = float((of_ranks[0]["moved"] - alone["moved"]).norm() / alone["moved"].norm())
        if arm.batch == BATCH and (talks or arm.readers == 1):
            assert apart < 0.05, f"{name}: other steps than those of one process"
        else:
            assert apart > 0.2, f"{name}: trained on other samples, it should have gone elsewhere"


def test_the_race_returns_one_value_per_repeat_and_ranks_end_equal() -> None:
    arms = {"one": Setup(1, batch=4), "two": Setup(2, batch=4), "apart": Setup(2, batch=4, talk=False)}
    samples = launch(race, 2, arms, 2, 1, 1, device="cpu", threads=1, echo=False)[0]
    assert {name: len(values) for name, values in samples.items()} == {"one": 2, "two": 2, "apart": 2}
    assert all(value > 0 for values in samples.values() for value in values)


def test_the_table_marks_arms_with_more_processes_than_cores() -> None:
    arm = {"median": 1.0, "low": 1.0, "high": 1.0, "unit": "samples/s", "repeats": 5}
    result = {"bench": "scaling", "environment": {}, "arms": {"four_ranks": arm}, "ratios": {}}
    assert "cores" not in as_text(result)
    assert as_text(result | {"oversubscribed": ["four_ranks"]}).endswith("with more processes than cores: four_ranks")
