"""Popular trainers on the same work, in the same ranks."""

import sys
from collections import Counter
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from ddp_tutorial.peers import NAMES, Outcome, Work, digits, gpt, perceptron, resume_with, stories, train_with
from ddp_tutorial.peers import plain as plain_torch
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.world import World

for package in ("accelerate", "lightning", "transformers"):
    pytest.importorskip(package, reason="an extra: pip install 'ddp-tutorial[peers]'")

# 20 steps of 8 samples, 64 samples in an epoch: a checkpoint after step 8 is one between epochs, after step 12 one in
# the middle of the second.
SITUATIONS = {
    "at the end of an epoch": (perceptron(), 8),
    "with dropout": (perceptron(dropout=0.1), 8),
    "shuffled": (replace(perceptron(), shuffle=True), 8),
    "in the middle of an epoch": (perceptron(), 12),
    "all of it": (replace(perceptron(dropout=0.1), shuffle=True), 12),
}

Outcomes = dict[str, Outcome]
Runs = dict[str, tuple[Outcome, Outcome]]  # trainer -> uninterrupted, resumed


def error_of_a_trainer_that_starts_over(world: World) -> str:
    def train(world: World, work: Work) -> Any:
        return plain_torch.train(world, replace(work, resume=False))

    sys.modules["ddp_tutorial.peers.forgetful"] = SimpleNamespace(train=train)  # type: ignore[assignment]
    try:
        resume_with(world, ["forgetful"], perceptron(), 12)
    except AssertionError as error:
        return str(error)
    return "no error"


def all_work(world: World) -> tuple[Outcomes, Outcomes, Outcomes, dict[str, Runs], str]:
    """Run everything in one launch, because importing the trainers takes several seconds on each rank."""
    return (
        train_with(world, NAMES, gpt(steps=8)),
        train_with(world, NAMES, stories(steps=8)),
        train_with(world, ["plain", "ours", "fabric"], digits(steps=6)),
        {situation: resume_with(world, NAMES, work, after) for situation, (work, after) in SITUATIONS.items()},
        error_of_a_trainer_that_starts_over(world),
    )


@pytest.fixture(scope="module")
def results() -> list[tuple[Outcomes, Outcomes, Outcomes, dict[str, Runs], str]]:
    return launch(all_work, 2, device="cpu", threads=1, echo=False, timeout=500)


@pytest.fixture(scope="module")
def ranks(results: list[Any]) -> list[dict[str, Runs]]:
    return [of_rank[3] for of_rank in results]


def distance(one: Outcome, other: Outcome) -> float:
    """Return the largest absolute difference between corresponding weights."""
    return max(float((one.weights[name] - each).abs().max()) for name, each in other.weights.items())


def one_process(work: Work, batch_size: int) -> Outcome:
    """Train without ranks, with all samples of a step in one batch."""
    model = work.model()
    optimizer = work.optimizer(model)
    scheduler = work.scheduler(optimizer)
    for batch in islice(DataLoader(work.samples, batch_size), work.steps):
        work.mean(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), work.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return Outcome({name: value.detach() for name, value in model.state_dict().items()}, 0.0)


def test_on_even_batches_all_trainers_equal_plain_torch(results: list[Any]) -> None:
    ranks = [of_rank[0] for of_rank in results]
    plain = ranks[0]["plain"]
    distances = {name: [distance(rank[name], plain) for rank in ranks] for name in NAMES}
    exact = {name for name, found in distances.items() if found == [0.0, 0.0]}
    assert {"plain", "ours", "fabric", "lightning"} <= exact, distances
    # Accelerate, and so Hugging Face's Trainer, give other samples of the same step to a rank: sums in another order.
    assert all(max(found) < 1e-5 for found in distances.values()), distances
    for rank in ranks:
        for name in NAMES:  # Hugging Face's Trainer rounds to four decimals
            assert rank[name].losses == pytest.approx(plain.losses, abs=2e-4), name
    assert len(plain.losses) == 8


def test_only_global_token_counts_give_the_right_gradient_if_ragged(results: list[Any]) -> None:
    work = stories(steps=8)
    ranks, one = [of_rank[1] for of_rank in results], one_process(work, 2 * work.per_rank)
    distances = {name: max(distance(rank[name], one) for rank in ranks) for name in NAMES}
    close = {name for name, found in distances.items() if found < 1e-4}
    assert close == {"ours", "huggingface"}, distances
    assert all(found > 1e-3 for name, found in distances.items() if name not in close), distances


def test_only_this_package_keeps_batch_norm_equal_on_all_ranks(results: list[Any]) -> None:
    first, second = (of_rank[2] for of_rank in results)
    apart = {name: distance(second[name], first[name]) for name in first}
    assert apart["ours"] == 0.0
    assert apart["plain"] == apart["fabric"] > 0.0, apart


def exact(ranks: list[dict[str, Runs]], situation: str) -> set[str]:
    """Return the trainers whose resumed runs are bitwise identical on both ranks."""
    return {name for name in NAMES if all(distance(again, whole) == 0 for whole, again in both(ranks, situation, name))}


def both(ranks: list[dict[str, Runs]], situation: str, name: str) -> list[tuple[Outcome, Outcome]]:
    return [of_rank[situation][name] for of_rank in ranks]


def rest_of_the_epoch(ranks: list[dict[str, Runs]], situation: str, name: str) -> Counter[int]:
    """Return how often the second epoch uses each of the 64 samples, half of them before the checkpoint."""
    seen: Counter[int] = Counter()
    for whole, again in both(ranks, situation, name):
        for step in whole.seen[8:12] + again.seen[:4]:
            seen.update(step)
    return seen


def test_all_trainers_resume_weights_optimizer_and_schedule(ranks: list[dict[str, Runs]]) -> None:
    assert exact(ranks, "at the end of an epoch") == set(NAMES)


def test_a_trainer_that_starts_over_is_not_taken_for_resumed(results: list[Any], ranks: list[dict[str, Runs]]) -> None:
    error = "forgetful did not resume after step 12: it took 20 steps"
    assert [of_rank[4] for of_rank in results] == [error, error]
    for situation, (work, after) in SITUATIONS.items():
        for name in NAMES:
            for whole, again in both(ranks, situation, name):
                assert [len(whole.seen), len(again.seen)] == [work.steps, work.steps - after], (situation, name)


def test_half_of_the_trainers_resume_random_numbers(
    ranks: list[dict[str, Runs]],
) -> None:
    assert exact(ranks, "with dropout") == {"ours", "accelerate", "huggingface"}


def test_a_trainer_that_loses_the_epoch_repeats_the_first_shuffle(ranks: list[dict[str, Runs]]) -> None:
    assert exact(ranks, "shuffled") == {"plain", "ours", "lightning", "huggingface"}
    for name in ("accelerate", "fabric"):
        assert all(again.seen[:8] == whole.seen[:8] for whole, again in both(ranks, "shuffled", name))


def test_half_of_the_trainers_repeat_samples_when_resuming_mid_epoch(ranks: list[dict[str, Runs]]) -> None:
    situation = "in the middle of an epoch"
    assert exact(ranks, situation) == {"ours", "accelerate", "huggingface"}
    for name in NAMES:
        seen = rest_of_the_epoch(ranks, situation, name)
        assert set(seen.values()) == ({1} if name in exact(ranks, situation) else {2}), name
        assert len(seen) == (64 if name in exact(ranks, situation) else 32), name
    for name in ("plain", "fabric"):  # they restart the epoch, and reach the other half later
        assert all(again.seen[4:8] == whole.seen[12:16] for whole, again in both(ranks, situation, name))
    # The epoch ends as planned, so half of the samples are never used.
    for _, again in both(ranks, situation, "lightning"):
        assert again.seen[4:8] == again.seen[:4]


def test_only_this_package_and_hugging_face_resume_bitwise_identically(ranks: list[dict[str, Runs]]) -> None:
    assert exact(ranks, "all of it") == {"ours", "huggingface"}
    for name in NAMES:
        distances = [distance(again, whole) for whole, again in both(ranks, "all of it", name)]
        assert max(distances) == 0 or min(distances) > 1e-3, f"{name}: {distances}"
