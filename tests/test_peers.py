"""The trainers that people use, on the same work, in the same ranks."""

from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader

from ddp_tutorial.peers import NAMES, Outcome, Work, digits, gpt, stories, train_with
from ddp_tutorial.processes.launcher import launch

for package in ("accelerate", "lightning", "transformers"):
    pytest.importorskip(package, reason="an extra: pip install 'ddp-tutorial[peers]'")

Outcomes = list[dict[str, Outcome]]


def on_ranks(count: int, names: list[str], work: Work) -> Outcomes:
    return launch(train_with, count, names, work, device="cpu", threads=1, echo=False, timeout=150)


def one_process(work: Work, batch_size: int) -> Outcome:
    """The same training without ranks, all samples of a step in one batch."""
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


def test_all_trainers_come_to_the_weights_of_plain_torch_where_batches_are_even() -> None:
    ranks = on_ranks(2, NAMES, gpt(steps=8))
    plain = ranks[0]["plain"]
    distances = {name: [rank[name].distance(plain) for rank in ranks] for name in NAMES}
    exact = {name for name, found in distances.items() if found == [0.0, 0.0]}
    assert {"plain", "ours", "fabric", "lightning"} <= exact, distances
    # Accelerate, and so Hugging Face's Trainer, give other samples of the same step to a rank: sums in another order.
    assert all(max(found) < 1e-5 for found in distances.values()), distances


def test_only_who_counts_tokens_over_ranks_has_the_gradient_of_one_process_on_ragged_batches() -> None:
    work = stories(steps=8)
    ranks, one = on_ranks(2, NAMES, work), one_process(work, 2 * work.per_rank)
    distances = {name: max(rank[name].distance(one) for rank in ranks) for name in NAMES}
    close = {name for name, found in distances.items() if found < 1e-4}
    assert close == {"ours", "huggingface"}, distances
    assert all(found > 1e-3 for name, found in distances.items() if name not in close), distances


def test_only_ours_ends_with_the_same_batch_norm_on_all_ranks() -> None:
    names = ["plain", "ours", "fabric"]
    first, second = on_ranks(2, names, digits(steps=6))
    apart = {name: second[name].distance(first[name]) for name in names}
    assert apart["ours"] == 0.0
    assert apart["plain"] == apart["fabric"] > 0.0, apart
