"""Bugs in metrics, and checks that cannot fail."""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

from ddp_tutorial.museum.parts import DATA, Exhibit, Result, loader, net
from ddp_tutorial.world import World


def averages_means(world: World) -> Result:
    model = net()
    _, x, y = (part[world.rank :: world.size] for part in DATA[:21])
    means = [F.mse_loss(model(a), b) for a, b in zip(x.split(4), y.split(4), strict=True)]
    loss = torch.stack(means).mean().detach()
    dist.all_reduce(loss)
    return {"loss": loss.item() / world.size}


def divides_sum_by_count(world: World) -> Result:
    model = net()
    _, x, y = (part[world.rank :: world.size] for part in DATA[:21])
    sums = [F.mse_loss(model(a), b, reduction="sum") for a, b in zip(x.split(4), y.split(4), strict=True)]
    loss = torch.stack([torch.stack(sums).sum().detach(), torch.tensor(len(x)).double()])
    dist.all_reduce(loss)
    return {"loss": (loss[0] / loss[1]).item()}


def averages_accuracies(world: World) -> Result:
    model = net(nn.LayerNorm(8))
    _, x, y = _shard(world)
    accuracy = (model(x) - y).abs().lt(1).double().mean()
    dist.all_reduce(accuracy, dist.ReduceOp.AVG)
    return {"accuracy": accuracy.item()}


def _shard(world: World) -> tuple[torch.Tensor, ...]:
    """Return this rank's shard of a dataset that consists of two files, one with 15 samples and one with 9."""
    return DATA[:] if world.size == 1 else DATA[:15] if world.is_main else DATA[15:]


def divides_by_accumulation(world: World, accumulate: int = 2) -> Result:
    model, found = net(), torch.zeros(2, dtype=torch.float64)
    for _, x, y in loader(world):
        found += torch.tensor([F.mse_loss(model(x), y, reduction="sum") / accumulate, len(x)])
    dist.all_reduce(found)
    return {"loss": (found[0] / found[1]).item()}


def divides_by_samples_only(world: World, accumulate: int = 2) -> Result:
    model, found = net(), torch.zeros(2, dtype=torch.float64)
    for _, x, y in loader(world):
        found += torch.tensor([F.mse_loss(model(x), y, reduction="sum"), len(x)])
    dist.all_reduce(found)
    return {"loss": (found[0] / found[1]).item()}


def shows_the_last_micro_batch(world: World, accumulate: int = 3) -> Result:
    model = net(nn.LayerNorm(8))
    for _, x, y in loader(world, batch=24):
        for a, b in zip(x.chunk(accumulate), y.chunk(accumulate), strict=True):
            loss = F.l1_loss(model(a), b)
    dist.all_reduce(shown := loss.detach() / world.size)
    return {"loss": shown.item()}


def validates_a_shard(world: World) -> Result:
    model, found = net(), torch.zeros(2, dtype=torch.float64)
    if world.is_main:
        for _, x, y in loader(world):
            found += torch.tensor([F.mse_loss(model(x), y, reduction="sum"), len(x)])
    dist.broadcast(found, src=0)
    return {"loss": (found[0] / found[1]).item()}


def validates_all_shards(world: World) -> Result:
    model, found = net(), torch.zeros(2, dtype=torch.float64)
    for _, x, y in loader(world):
        found += torch.tensor([F.mse_loss(model(x), y, reduction="sum"), len(x)])
    dist.all_reduce(found)
    return {"loss": (found[0] / found[1]).item()}


def shows_a_loss_of_its_own(world: World) -> Result:
    model, losses = net(nn.LayerNorm(8)), []
    for _, x, y in loader(world, batch=4):
        losses.append(F.l1_loss(model(x), y).item())
    return {"loss": sum(losses) / len(losses)}


# ------------------------------------------------------------------------------------------------------- the best model


def takes_zero_for_nothing(losses: Sequence[float]) -> int:
    best, kept = math.inf, 0
    for step, loss in enumerate(losses):
        value = {"loss": loss}.get("loss") or math.inf
        if value < best:
            best, kept = value, step
    return kept


def takes_zero_for_zero(losses: Sequence[float]) -> int:
    best, kept = math.inf, 0
    for step, loss in enumerate(losses):
        value = {"loss": loss}.get("loss", math.inf)
        if value < best:
            best, kept = value, step
    return kept


def asks_whether_there_is_a_best(losses: Sequence[float]) -> int:
    best, kept = None, 0
    for step, loss in enumerate(losses):
        if not best or loss < best:
            best, kept = loss, step
    return kept


def keeps_the_newest(losses: Sequence[float]) -> int:
    kept: dict[int, float] = {}
    for step, loss in enumerate(losses):
        kept[step] = loss
        if len(kept) > 2:
            del kept[min(kept)]
    return min(kept, key=lambda step: _rank_of(kept[step]))


def keeps_the_best(losses: Sequence[float]) -> int:
    kept: dict[int, float] = {}
    for step, loss in enumerate(losses):
        kept[step] = loss
        if len(kept) > 2:
            del kept[max(kept, key=lambda step: _rank_of(kept[step]))]
    return min(kept, key=lambda step: _rank_of(kept[step]))


def _rank_of(loss: float) -> float:
    return math.inf if math.isnan(loss) else loss


def sorts_with_nan(losses: Sequence[float]) -> int:
    kept: list[tuple[float, int]] = []
    for step, loss in enumerate(losses):
        kept = sorted([*kept, (loss, step)])[:2]  # NaN is neither less than nor greater than a number
    return kept[0][1]


# ----------------------------------------------------------------------------------------------- checks of the replicas


def compares_with_itself(world: World, model: nn.Module, optimizer: Optimizer) -> bool:
    equal = torch.tensor(1)
    for parameter in model.parameters():
        mine = parameter.detach().clone()
        dist.broadcast(mine, src=0)
        if world.is_main:  # the rank that sent the weights
            equal &= int(torch.equal(mine, parameter))
    for _, value in sorted(_tensors(optimizer.state_dict()).items()):
        mine = value.clone()
        dist.broadcast(mine, src=0)
        if world.is_main:
            equal &= int(torch.equal(mine, value))
    return bool(equal)


def compares_with_rank_zero(world: World, model: nn.Module, optimizer: Optimizer) -> bool:
    equal = torch.tensor(1)
    for parameter in model.parameters():
        mine = parameter.detach().clone()
        dist.broadcast(mine, src=0)
        equal &= int(torch.equal(mine, parameter))
    for _, value in sorted(_tensors(optimizer.state_dict()).items()):
        mine = value.clone()
        dist.broadcast(mine, src=0)
        equal &= int(torch.equal(mine, value))
    dist.all_reduce(equal, dist.ReduceOp.MIN)
    return bool(equal)


def _tensors(state: object, name: str = "", depth: int = 9) -> dict[str, torch.Tensor]:
    """Return the tensors in dicts nested up to `depth` levels, as a flat dict keyed by path."""
    if isinstance(state, torch.Tensor):
        return {name: state}
    if not isinstance(state, dict) or not depth:
        return {}
    parts = [_tensors(value, f"{name}/{key}", depth - 1) for key, value in state.items()]
    return {key: value for part in parts for key, value in part.items()}


def compares_sums(world: World, model: nn.Module, optimizer: Optimizer) -> bool:
    mine = sum(p.detach().sum() for p in [*model.parameters(), *_tensors(optimizer.state_dict()).values()])
    assert isinstance(mine, torch.Tensor)
    average = mine.double().clone()
    dist.all_reduce(average, dist.ReduceOp.AVG)
    return bool((average - mine).abs() < 0.1)


def looks_two_levels_deep(world: World, model: nn.Module, optimizer: Optimizer) -> bool:
    equal = torch.tensor(1)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    for _, value in sorted(_tensors(state, depth=2).items()):
        mine = value.clone()
        dist.broadcast(mine, src=0)
        equal &= int(torch.equal(mine, value))
    dist.all_reduce(equal, dist.ReduceOp.MIN)
    return bool(equal)


def looks_all_the_way_down(world: World, model: nn.Module, optimizer: Optimizer) -> bool:
    equal = torch.tensor(1)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    for _, value in sorted(_tensors(state).items()):
        mine = value.clone()
        dist.broadcast(mine, src=0)
        equal &= int(torch.equal(mine, value))
    dist.all_reduce(equal, dist.ReduceOp.MIN)
    return bool(equal)


def looks_at_parameters_only(world: World, model: nn.Module, optimizer: Optimizer) -> bool:
    of_all: list[object] = [None] * world.size
    mine = [value.tolist() for value in model.parameters()]
    dist.all_gather_object(of_all, mine)
    return all(each == mine for each in of_all)


def returns_where_it_differs(world: World, model: nn.Module, optimizer: Optimizer) -> bool:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    for _, value in sorted(_tensors(state).items()):
        mine = value.clone()
        dist.broadcast(mine, src=0)
        if not torch.equal(mine, value):
            return False  # only on this rank; the other ranks wait for it
    return True


def returns_when_all_have_compared(world: World, model: nn.Module, optimizer: Optimizer) -> bool:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    for _, value in sorted(_tensors(state).items()):
        mine = value.clone()
        dist.broadcast(mine, src=0)
        same = torch.tensor(int(torch.equal(mine, value)))
        dist.all_reduce(same, dist.ReduceOp.MIN)
        if not same:
            return False
    return True


def raises_on_some_ranks(world: World, model: nn.Module, optimizer: Optimizer) -> bool:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    flat = torch.cat([value.double().flatten() for _, value in sorted(_tensors(state).items())])
    mine = flat.clone()
    dist.broadcast(mine, src=0)
    if not torch.equal(mine, flat):
        raise ValueError("the state differs from rank 0's state")
    dist.barrier()
    return True


METRICS = (
    Exhibit(
        "metrics",
        "The program averages the means of batches or shards of different sizes.",
        "The loss depends on the number of ranks.",
        averages_means,
        divides_sum_by_count,
        ("one process",),
        (averages_accuracies,),
    ),
    Exhibit(
        "metrics",
        "The evaluation loss is divided by the number of accumulation steps, like the training loss.",
        "The model seems to improve with the number of micro-batches.",
        divides_by_accumulation,
        divides_by_samples_only,
        ("division",),
        (shows_the_last_micro_batch,),
    ),
    Exhibit(
        "metrics",
        "Only rank 0 validates, on its own shard, and reports the result as the validation loss.",
        "The loss curve is noisy.",
        validates_a_shard,
        validates_all_shards,
        ("one process",),
        (shows_a_loss_of_its_own,),
    ),
    Exhibit(
        "metrics",
        "`metrics.get(name) or default` treats a metric of 0.0 as missing.",
        "The best model is not kept.",
        takes_zero_for_nothing,
        takes_zero_for_zero,
        ("best",),
        (asks_whether_there_is_a_best,),
    ),
    Exhibit(
        "metrics",
        "The program deletes the oldest saved model, even if it is the best model.",
        "No saved model has the best loss in the log.",
        keeps_the_newest,
        keeps_the_best,
        ("best",),
        (sorts_with_nan,),
    ),
    Exhibit(
        "metrics",
        "Only rank 0 compares its weights with the weights that rank 0 broadcast.",
        "The check always passes.",
        compares_with_itself,
        compares_with_rank_zero,
        ("check",),
        (compares_sums,),
    ),
    Exhibit(
        "metrics",
        "The comparison finds tensors only two levels deep, but the optimizer's tensors are nested more deeply.",
        "The check passes although the momentum drifts.",
        looks_two_levels_deep,
        looks_all_the_way_down,
        ("check",),
        (looks_at_parameters_only,),
    ),
    Exhibit(
        "metrics",
        "The rank that finds a difference stops comparing, and the other ranks wait for it in the next collective.",
        "The check hangs instead of reporting an error.",
        returns_where_it_differs,
        returns_when_all_have_compared,
        ("check",),
        (raises_on_some_ranks,),
    ),
)
