"""Exercises on splitting a batch, averaging a loss, and porting a script to DDP, for notebook 00_quickstart."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_tutorial.collectives import all_reduce_sum
from ddp_tutorial.exercises import Answer, Exercise, expect, on_ranks
from ddp_tutorial.world import World

# ------------------------------------------------------------------------------------------------- 1. split the samples


def _test_shard(answer: Answer) -> str:
    for samples, size in ((8, 2), (7, 2), (10, 3), (3, 4), (0, 2), (1, 1)):
        indices = list(range(100, 100 + samples))
        parts = [[int(i) for i in answer(list(indices), rank, size)] for rank in range(size)]
        assigned = sorted(index for part in parts for index in part)
        case = f"For {samples} samples and {size} ranks, your function returned {parts}"
        padded = len(assigned) == -(-samples // size) * size and set(assigned) == set(indices)
        note = " (DistributedSampler pads like this by default. Here, every sample must count once.)" if padded else ""
        expect(len(assigned) == len(set(assigned)), f"{case}: at least one sample is assigned more than once.{note}")
        expect(assigned == indices, f"{case}: not every sample is assigned to a rank.")
        lengths = [len(part) for part in parts]
        expect(
            max(lengths) - min(lengths) <= 1,
            f"{case}: the ranks' sample counts differ by more than one, so some ranks must wait for others.",
        )
    return "Every sample is assigned to exactly one rank, and the ranks' sample counts differ by at most one."


def _shard(indices: list[int], rank: int, size: int) -> list[int]:
    return indices[rank::size]


def _shard_floor(indices: list[int], rank: int, size: int) -> list[int]:
    share = len(indices) // size
    return indices[rank * share : (rank + 1) * share]


def _shard_all(indices: list[int], rank: int, size: int) -> list[int]:
    return indices


def _shard_padded(indices: list[int], rank: int, size: int) -> list[int]:
    padded = indices + indices[: -len(indices) % size]
    return padded[rank::size]


def _shard_rest_to_last(indices: list[int], rank: int, size: int) -> list[int]:
    share = len(indices) // size
    return indices[rank * share :] if rank == size - 1 else indices[rank * share : (rank + 1) * share]


shard_samples = Exercise(
    task="shard(indices, rank, size): return the indices that this rank should process.",
    test=_test_shard,
    solution=_shard,
    wrong={
        "drops the remainder": _shard_floor,
        "gives every sample to every rank": _shard_all,
        "pads with copies": _shard_padded,
        "gives the remainder to the last rank": _shard_rest_to_last,
    },
    hints=(
        "Think of dealing cards: deal one card to each player, then start again with the first player.",
        "A Python slice has three parts: start, stop and step.",
    ),
)

# ---------------------------------------------------------------------------------------- 2. the mean loss of all ranks


def _uneven_loss(world: World, answer: Answer) -> tuple[float, float]:
    """Return the answer's result and the true mean loss. Rank r has 2 r + 1 tokens, each with loss r + 1."""
    count = 2 * world.rank + 1
    loss_sum = torch.tensor(float(count * (world.rank + 1)))
    true = all_reduce_sum(world, torch.stack([loss_sum, torch.tensor(float(count))]))
    return float(answer(world, loss_sum, count)), float(true[0] / true[1])


def _test_mean_loss(answer: Answer) -> str:
    stuck = "A rank waits forever for the others. Every rank must enter the collective."
    results = on_ranks(_uneven_loss, 2, answer, stuck=stuck, timeout=20)
    for rank, (got, true) in enumerate(results):
        expect(
            abs(got - true) < 1e-6,
            f"Rank 0 has 1 token with loss 1, and rank 1 has 3 tokens with loss 2 each. The mean over the 4 tokens "
            f"must be {true:.4f}, got {got:.4f} on rank {rank}.",
        )
    return f"Both ranks return {results[0][0]:.4f}, the mean over all tokens."


def _mean_loss(world: World, loss_sum: torch.Tensor, count: int) -> float:
    both = all_reduce_sum(
        world, torch.stack([loss_sum, torch.tensor(float(count))])
    )  # loss sum and token count over all ranks
    return float(both[0] / both[1])


def _mean_of_means(world: World, loss_sum: torch.Tensor, count: int) -> float:
    mean = loss_sum / count
    dist.all_reduce(mean)
    return float(mean / world.size)


def _local_mean(world: World, loss_sum: torch.Tensor, count: int) -> float:
    return float(loss_sum / count)


def _sum_over_local_count(world: World, loss_sum: torch.Tensor, count: int) -> float:
    summed = loss_sum.clone()
    dist.all_reduce(summed)
    return float(summed / (count * world.size))


def _on_rank_zero_only(world: World, loss_sum: torch.Tensor, count: int) -> float:
    both = torch.stack([loss_sum, torch.tensor(float(count))])
    dist.reduce(both, dst=0)
    return float(both[0] / both[1]) if world.rank == 0 else 0.0


mean_loss = Exercise(
    task=(
        "mean_loss(world, loss_sum, count): on every rank, return the mean loss over the tokens of all ranks, as a "
        "float. loss_sum is a tensor with one element, and count is an int."
    ),
    test=_test_mean_loss,
    solution=_mean_loss,
    wrong={
        "takes the mean of means": _mean_of_means,
        "returns the rank's own loss": _local_mean,
        "assumes equal counts": _sum_over_local_count,
        "returns the mean on rank 0 only": _on_rank_zero_only,
    },
    hints=(
        "A mean of means gives too much weight to the tokens on a rank with few tokens.",
        "Both loss sums and counts can be summed over the ranks. Divide once, at the end.",
        "Put both numbers into one tensor and call all_reduce_sum(world, tensor), which returns the sum over all "
        "ranks on every rank.",
    ),
)

# ----------------------------------------------------------------------------------- 3. port a training program to DDP

Data = tuple[torch.Tensor, torch.Tensor]  # inputs and targets


def train_alone(
    make_model: Callable[[], nn.Module], train: Data, valid: Data, log: Callable[[str], None]
) -> list[float]:
    """Train in one process until the validation loss stops improving, and return each epoch's validation loss."""
    inputs, targets = train
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses: list[float] = []
    for epoch in range(20):
        random = torch.Generator().manual_seed(epoch)
        for batch in torch.randperm(len(inputs), generator=random).split(24):
            noise = 0.1 * torch.randn(len(batch), 8, generator=random)
            loss = F.mse_loss(model(inputs[batch] + noise), targets[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            losses.append(F.mse_loss(model(valid[0]), valid[1]).item())
        log(f"epoch {epoch}: validation loss {losses[-1]:.4f}")
        if epoch > 0 and losses[-1] > 0.9 * losses[-2]:
            break
    return losses


TRAINING, VALIDATION, RANKS = 96, 31, 3  # samples; 31 is not divisible by 3


class _Counted(nn.Module):
    """A model that records the number of samples in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.training_samples: list[int] = []
        self.validation_samples = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.training_samples.append(len(inputs))
        else:
            self.validation_samples += len(inputs)
        output: torch.Tensor = self.layers(inputs)
        return output


def _data(samples: int, seed: int) -> Data:
    inputs = torch.randn(samples, 8, generator=torch.Generator().manual_seed(seed))
    return inputs, inputs[:, :1] - 0.5 * inputs[:, 1:2]


@dataclass
class _Outcome:
    """The result of a training run on one rank."""

    losses: list[float]
    lines: list[str]  # arguments of the calls to `log`
    model: _Counted


def _run_training(answer: Answer) -> _Outcome:
    models: list[_Counted] = []
    lines: list[str] = []

    def make_model() -> _Counted:
        models.append(_Counted())
        return models[-1]

    losses = answer(make_model, _data(TRAINING, 1), _data(VALIDATION, 2), lines.append)
    return _Outcome(losses, lines, models[-1])


def _run_on_rank(world: World, answer: Answer) -> _Outcome:
    return _run_training(lambda *args: answer(world, *args))


def _test_training(answer: Answer) -> str:
    alone = _run_training(train_alone)
    stuck = (
        "A rank waits forever for the others. Every rank must enter every collective, and all ranks must stop after "
        "the same epoch."
    )
    ranks = on_ranks(_run_on_rank, RANKS, answer, stuck=stuck, timeout=60)
    for rank, each in enumerate(ranks):
        sizes = sorted(set(each.model.training_samples))
        expect(
            sizes == [24 // RANKS],
            f"A step contains 24 samples, so each of the {RANKS} ranks must train on {24 // RANKS} samples per step, "
            f"got {sizes} on rank {rank}.",
        )
        most = -(-VALIDATION // RANKS) * len(alone.losses)
        expect(
            each.model.validation_samples <= most,
            f"Rank {rank} evaluated {each.model.validation_samples} samples in {len(each.losses)} epochs. Each rank "
            f"must evaluate only its shard of the {VALIDATION} validation samples.",
        )
        expect(
            len(each.losses) == len(alone.losses)
            and all(abs(a - b) < 1e-5 for a, b in zip(each.losses, alone.losses, strict=True)),
            f"The validation losses must be {_rounded(alone.losses)}, as in one process, got {_rounded(each.losses)} "
            f"on rank {rank}.",
        )
    for rank, each in enumerate(ranks):
        pairs = zip(each.model.parameters(), alone.model.parameters(), strict=True)
        expect(
            all(torch.allclose(a, b, atol=1e-5) for a, b in pairs),
            f"The final weights on rank {rank} differ from the final weights of one process.",
        )
    counts = [len(each.lines) for each in ranks]
    expect(
        counts == [len(alone.losses), *[0] * (RANKS - 1)],
        f"Only rank 0 must call log, once in each of {len(alone.losses)} epochs, got {counts} calls on the ranks.",
    )
    return f"{RANKS} ranks compute the same losses and weights as one process, and each rank processes only its shard."


def _rounded(losses: list[float]) -> str:
    return "[" + ", ".join(f"{loss:.4f}" for loss in losses) + "]"


def _train_on_ranks(
    world: World, make_model: Callable[[], nn.Module], train: Data, valid: Data, log: Callable[[str], None]
) -> list[float]:
    inputs, targets = train
    own = slice(world.rank, None, world.size)  # the samples of this rank
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses: list[float] = []
    for epoch in range(20):
        random = torch.Generator().manual_seed(epoch)  # the same order and noise on all ranks
        for batch in torch.randperm(len(inputs), generator=random).split(24):
            noise = 0.1 * torch.randn(len(batch), 8, generator=random)
            loss = F.mse_loss(model(inputs[batch][own] + noise[own]), targets[batch][own])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            errors = (model.module(valid[0][own]) - valid[1][own]) ** 2
        total = torch.stack([errors.sum(), torch.tensor(float(len(errors)))])
        dist.all_reduce(total)  # sums and counts, because the shards differ in size
        losses.append(float(total[0] / total[1]))
        if world.rank == 0:
            log(f"epoch {epoch}: validation loss {losses[-1]:.4f}")
        if epoch > 0 and losses[-1] > 0.9 * losses[-2]:  # the same on all ranks, so all ranks stop here
            break
    return losses


def _wrong_training(
    ddp: bool = True, whole_batch: bool = False, own_noise: bool = False, validation: str = "sum", log_all: bool = False
) -> Answer:
    """Return a variant of the solution with one mistake."""

    def train_on_ranks(
        world: World, make_model: Callable[[], nn.Module], train: Data, valid: Data, log: Callable[[str], None]
    ) -> list[float]:
        inputs, targets = train
        own = slice(world.rank, None, world.size)
        mine = slice(None) if whole_batch else own
        model = make_model()
        wrapped = DistributedDataParallel(model) if ddp else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        losses: list[float] = []
        for epoch in range(20):
            random = torch.Generator().manual_seed(epoch)
            for batch in torch.randperm(len(inputs), generator=random).split(24):
                used = batch[mine]
                rows = len(used) if own_noise else len(batch)
                noise = 0.1 * torch.randn(rows, 8, generator=random)
                optimizer.zero_grad()
                F.mse_loss(wrapped(inputs[used] + (noise if own_noise else noise[mine])), targets[used]).backward()
                optimizer.step()
            seen = slice(None) if validation == "everything" else own
            with torch.no_grad():
                mean = F.mse_loss(model(valid[0][seen]), valid[1][seen])
            if validation == "mean of means":
                dist.all_reduce(mean)
                mean /= world.size
            elif validation == "sum":
                count = len(valid[0][own])
                total = torch.tensor([float(mean) * count, count])
                dist.all_reduce(total)
                mean = total[0] / total[1]
            losses.append(float(mean))
            if world.rank == 0 or log_all:
                log(f"epoch {epoch}: validation loss {losses[-1]:.4f}")
            if epoch > 0 and losses[-1] > 0.9 * losses[-2]:
                break
        return losses

    return train_on_ranks


port_training = Exercise(
    task=(
        "train_on_ranks(world, make_model, train, valid, log): port train_alone to DDP. Compute the same validation "
        "losses and weights, with a shard of the samples on each rank."
    ),
    test=_test_training,
    solution=_train_on_ranks,
    wrong={
        "trains separate models": _wrong_training(ddp=False),
        "trains on the whole batch on every rank": _wrong_training(whole_batch=True),
        "adds different noise": _wrong_training(own_noise=True),
        "evaluates a share and does not combine": _wrong_training(validation="own share"),
        "averages means of unequal shares": _wrong_training(validation="mean of means"),
        "evaluates everything on every rank": _wrong_training(validation="everything"),
        "logs on every rank": _wrong_training(log_all=True),
    },
    hints=(
        "Five things change: the model, the samples per step, the noise, the validation loss, and the call to log.",
        "All ranks must draw the order and the noise of the whole batch. Each rank then selects its own rows of both.",
        "The shards of the 31 validation samples differ in size. As in exercise 2, sum errors and counts over "
        "the ranks.",
        "All ranks must compare the same validation loss, so that all of them leave the loop after the same epoch.",
    ),
)
