"""Exercises of 03_averaging_gradients: average by hand, weight unequal batches, start from the same model."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from ddp_tutorial.collectives import all_reduce_sum
from ddp_tutorial.exercises import Answer, Exercise, WrongAnswerError, expect, numbers, on_ranks
from ddp_tutorial.processes.errors import lost_connection
from ddp_tutorial.world import World

# --------------------------------------------------------------------------------------------------- 1. average by hand


class _Routes(nn.Module):
    """Three vectors of the same length: one that every rank uses, one that only some ranks use, and a frozen one.

    The loss is a product with the inputs, so the gradient of `always` is the input itself, and the gradient of
    `sometimes` is ten times the input.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sometimes = nn.Parameter(torch.tensor([1.0, 1.0]))
        self.always = nn.Parameter(torch.tensor([1.0, 1.0]))
        self.frozen = nn.Parameter(torch.tensor([1.0, 1.0]), requires_grad=False)

    def forward(self, x: torch.Tensor, *, detour: bool) -> torch.Tensor:
        y = (self.always * x).sum()
        return y + (self.sometimes * x).sum() * 10 if detour else y


def _run_average(world: World, answer: Answer) -> None:
    """Check two averages. Rank r has the input [r + 1, 0]. First all ranks use `sometimes`, then all but the last."""
    local = torch.tensor([world.rank + 1.0, 0.0])
    everyone = sum(range(1, world.size + 1)) / world.size
    with_detour = sum(range(1, world.size)) / world.size
    model = _Routes()
    model(local, detour=True).backward()
    answer(world, model)
    _expect_average(world, model, "always", local, torch.tensor([everyone, 0.0]))
    _expect_average(world, model, "sometimes", 10 * local, torch.tensor([10 * everyone, 0.0]))

    model, last = _Routes(), world.rank == world.size - 1
    model(local, detour=not last).backward()
    story = (
        f"Here the last rank, rank {world.size - 1}, does not use the weight `sometimes` in its loss, so "
        "`sometimes.grad` is None on that rank. It counts as zero in the average, and that rank must enter the "
        "all-reduce too."
    )
    try:
        answer(world, model)
    except (TypeError, AttributeError, RuntimeError) as error:
        raise WrongAnswerError(f"{story} Your function raised {type(error).__name__}: {error}") from None
    local = torch.tensor([0.0, 0.0]) if last else 10 * local
    _expect_average(world, model, "sometimes", local, torch.tensor([10 * with_detour, 0.0]), story)
    frozen = model.frozen.grad
    expect(frozen is None or not frozen.any(), "The frozen weight must have no gradient after averaging either.")


def _expect_average(
    world: World, model: nn.Module, name: str, local: torch.Tensor, average: torch.Tensor, story: str = ""
) -> None:
    weight = model.get_parameter(name)
    expect(bool((weight == 1).all()), f"The weights must not change, but `{name}` is now {numbers(weight)}.")
    expect(weight.grad is not None, f"{story} Rank {world.rank} still has no gradient for `{name}`.".strip())
    got = torch.zeros_like(weight) if weight.grad is None else weight.grad
    if torch.allclose(got, average):
        return
    if torch.allclose(got, local):
        found = "this is still the rank's own gradient"
    elif torch.allclose(got, average * world.size):
        found = "this is the sum over the ranks"
    elif torch.allclose(got, average / world.size):
        found = "this was divided twice"
    else:
        found = f"this is neither the average nor the rank's own gradient, {numbers(local)}"
    raise WrongAnswerError(
        f"{story} On rank {world.rank} of {world.size}, the gradient of `{name}` must be the average "
        f"{numbers(average)}, got {numbers(got)}: {found}.".strip()
    )


def _test_average(answer: Answer) -> str:
    stuck = "A rank waits forever for the others. Every rank must enter the same collectives in the same order."
    on_ranks(_run_average, 3, answer, stuck=stuck, timeout=15)
    return "Every rank has the average, even when a rank had no gradient, and the weights did not change."


def _average_gradients(world: World, model: nn.Module) -> None:
    for parameter in model.parameters():
        if not parameter.requires_grad:  # the same on all ranks
            continue
        if parameter.grad is None:  # may differ between ranks: contribute zeros
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        parameter.grad /= world.size


def _with(finish: Callable[[World, nn.Parameter, torch.Tensor], None]) -> Answer:
    """Return the solution with `finish` in place of the all-reduce and the division of each gradient."""

    def answer(world: World, model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                finish(world, parameter, parameter.grad)

    return answer


def _sum_only(world: World, parameter: nn.Parameter, grad: torch.Tensor) -> None:
    dist.all_reduce(grad)


def _divide_by_two(world: World, parameter: nn.Parameter, grad: torch.Tensor) -> None:
    dist.all_reduce(grad)
    grad /= 2


def _divide_twice(world: World, parameter: nn.Parameter, grad: torch.Tensor) -> None:
    grad /= world.size
    dist.all_reduce(grad)
    grad /= world.size


def _average_weight(world: World, parameter: nn.Parameter, grad: torch.Tensor) -> None:
    dist.all_reduce(parameter.data)
    parameter.data /= world.size


def _average_copy(world: World, parameter: nn.Parameter, grad: torch.Tensor) -> None:
    grad = all_reduce_sum(world, grad) / world.size


def _skips_missing(world: World, model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world.size


def _expects_all(world: World, model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(world.size)  # type: ignore[union-attr]


average_gradients = Exercise(
    task="average_gradients(world, model): after backward, replace each gradient with its average over the ranks.",
    test=_test_average,
    solution=_average_gradients,
    wrong={
        "sums without dividing": _with(_sum_only),
        "divides by two, whatever the number of ranks": _with(_divide_by_two),
        "divides before and after": _with(_divide_twice),
        "averages the weights": _with(_average_weight),
        "averages a copy": _with(_average_copy),
        "skips a weight that has a gradient on other ranks only": _skips_missing,
        "expects a gradient on every rank": _expects_all,
    },
    hints=(
        "dist.all_reduce(tensor) sums over the ranks in place and returns None. What is left to do?",
        "If a weight took no part in this rank's loss, its .grad is None. Do the other ranks know that?",
        "Let every rank all-reduce every weight with requires_grad; a rank without a gradient contributes zeros.",
    ),
)

# -------------------------------------------------------------------------------------------- 2. weight unequal batches

_PARTS: tuple[tuple[tuple[float, ...], ...], ...] = (((1, 2, 3), (9,)), ((2, 4, 6, 8), (1, 5)), ((3, 5), ()))
_ALL_ENTER = "every rank must enter the collective, even a rank that has no samples in this step."


def _run_ragged(world: World, answer: Answer) -> list[float]:
    """Return this rank's gradient for each case in `_PARTS`.

    The model is one weight w = 1, and a sample x has the loss w * x, so the gradient of a sum of losses is the sum of
    the samples.
    """
    gradients = []
    for parts in _PARTS:
        weight = torch.ones((), requires_grad=True)
        mine = torch.tensor(parts[world.rank], dtype=torch.float32)
        try:
            loss = answer(world, (weight * mine).sum(), len(mine))
        except RuntimeError as error:
            if not lost_connection(error):
                raise
            message = f"Rank {world.rank} waited in a collective that the other rank never entered: {_ALL_ENTER}"
            raise WrongAnswerError(message) from None
        expect(
            isinstance(loss, torch.Tensor) and loss.requires_grad,
            "The result must be a tensor that requires grad: otherwise backward would fail. Autograd does not record "
            "collectives, so all-reduce only the count, and keep the loss itself out of the collective.",
        )
        gradients.append(float(torch.autograd.grad(loss, weight)[0]))
    return gradients


def _test_ragged(answer: Answer) -> str:
    stuck = f"A rank waits forever for the others: {_ALL_ENTER}"
    results = on_ranks(_run_ragged, 2, answer, stuck=stuck, timeout=15)
    for parts, gradients in zip(_PARTS, zip(*results, strict=True), strict=True):
        union = [sample for part in parts for sample in part]
        averaged, true = sum(gradients) / len(parts), sum(union) / len(union)
        expect(
            abs(averaged - true) < 1e-5,
            f"With samples {list(parts[0])} on rank 0 and {list(parts[1])} on rank 1, the gradient of one batch with "
            f"all {len(union)} samples is {true:.4f}. Your gradient, averaged over the ranks, is {averaged:.4f}.",
        )
    return "The averaged gradient equals that of one large batch, even if one rank has no samples."


def _ragged_loss(world: World, loss_sum: torch.Tensor, count: int) -> torch.Tensor:
    total_count = torch.tensor(float(count))
    dist.all_reduce(total_count)  # number of samples on all ranks
    return loss_sum * world.size / total_count  # the averaging will divide by world.size


def _own_mean(world: World, loss_sum: torch.Tensor, count: int) -> torch.Tensor:
    return loss_sum / max(count, 1)


def _over_everyones_count(world: World, loss_sum: torch.Tensor, count: int) -> torch.Tensor:
    return loss_sum / all_reduce_sum(world, torch.tensor(float(count)))


def _sums_of_losses(world: World, loss_sum: torch.Tensor, count: int) -> torch.Tensor:
    return all_reduce_sum(world, loss_sum) / all_reduce_sum(world, torch.tensor(float(count)))


def _weighed_twice(world: World, loss_sum: torch.Tensor, count: int) -> torch.Tensor:
    return loss_sum * count / all_reduce_sum(world, torch.tensor(float(count)))


def _skips_when_empty(world: World, loss_sum: torch.Tensor, count: int) -> torch.Tensor:
    return _ragged_loss(world, loss_sum, count) if count else loss_sum


ragged_loss = Exercise(
    task=(
        "ragged_loss(world, loss_sum, count): return a loss whose gradients, averaged over the ranks, are those of the "
        "mean loss over all samples of all ranks."
    ),
    test=_test_ragged,
    solution=_ragged_loss,
    wrong={
        "takes the mean of its own samples": _own_mean,
        "forgets that averaging divides by the number of ranks": _over_everyones_count,
        "sums the losses, which detaches them from the weights": _sums_of_losses,
        "multiplies a sum by its count a second time": _weighed_twice,
        "does not enter the collective when it has no samples": _skips_when_empty,
    },
    hints=(
        "You want (sum of rank 0 + sum of rank 1 + ...) / (count of rank 0 + count of rank 1 + ...).",
        "A rank knows only its own count. One all-reduce returns the count over all ranks.",
        "The averaging divides by world.size afterwards. Multiply by it first.",
    ),
)

# ----------------------------------------------------------------------------------------- 3. start from the same model


def _make_own(rank: int) -> nn.Sequential:
    """Return a model whose weights (also in a frozen layer) and buffers (floats and a count) depend on the rank."""
    torch.manual_seed(100 + rank)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[2].requires_grad_(False)
    for _ in range(rank + 1):
        model(torch.randn(5, 3))  # batch norm counts batches, and keeps a running mean
    return model


def _run_start(world: World, answer: Answer) -> None:
    model = _make_own(world.rank)
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    own, rank_zero = _make_own(world.rank).state_dict(), _make_own(0).state_dict()
    answer(world, model)
    for name, parameter in model.named_parameters():
        expect(
            parameter.data_ptr() == before[name],
            f"`{name}` is a new tensor now. An existing optimizer would keep updating the old one: copy into the "
            "existing tensor.",
        )
    for name, got in model.state_dict().items():
        if torch.equal(got, rank_zero[name]):
            continue
        kind = "buffer" if name in dict(model.named_buffers()) else "weight"
        frozen = kind == "weight" and not model.get_parameter(name).requires_grad
        found = "still has its initial value" if torch.equal(got, own[name]) else "differs from its initial value too"
        raise WrongAnswerError(
            f"On rank {world.rank}, the {'frozen ' if frozen else ''}{kind} `{name}` {found}: it must start with rank "
            f"0's {numbers(rank_zero[name].flatten()[:2])}, got {numbers(got.flatten()[:2])}."
        )


def _test_start(answer: Answer) -> str:
    stuck = "A rank waits forever for the others. Every rank must enter the same collectives."
    on_ranks(_run_start, 2, answer, stuck=stuck, timeout=15)
    return "On every rank, the weights, frozen weights and buffers equal rank 0's, in the same tensors as before."


def _sync_initial_state(world: World, model: nn.Module) -> None:
    for tensor in model.state_dict().values():  # weights and buffers; these share memory with the model
        dist.broadcast(tensor, src=0)


def _weights_only(world: World, model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)


def _without_frozen(world: World, model: nn.Module) -> None:
    tensors = [p.data for p in model.parameters() if p.requires_grad] + list(model.buffers())
    for tensor in tensors:
        dist.broadcast(tensor, src=0)


def _broadcast_copies(world: World, model: nn.Module) -> None:
    for tensor in model.state_dict().values():
        dist.broadcast(tensor.clone(), src=0)


def _average_starts(world: World, model: nn.Module) -> None:
    for tensor in model.state_dict().values():
        tensor.copy_(all_reduce_sum(world, tensor) / world.size)


def _on_rank_zero(world: World, model: nn.Module) -> None:
    if world.rank == 0:
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, src=0)


def _new_tensors(world: World, model: nn.Module) -> None:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for tensor in state.values():
        dist.broadcast(tensor, src=0)
    model.load_state_dict(state, assign=True)


sync_initial_state = Exercise(
    task="sync_initial_state(world, model): give every rank all tensors of rank 0's model.state_dict().",
    test=_test_start,
    solution=_sync_initial_state,
    wrong={
        "leaves out the buffers": _weights_only,
        "leaves out frozen weights": _without_frozen,
        "broadcasts copies": _broadcast_copies,
        "averages the initial weights": _average_starts,
        "broadcasts on rank 0 only": _on_rank_zero,
        "replaces the tensors": _new_tensors,
    },
    hints=(
        "dist.broadcast(tensor, src=0) sends on rank 0 and receives on all other ranks: every rank must call it.",
        "A model contains more than its parameters(): for example, batch norm has buffers.",
        "model.state_dict() contains weights and buffers, and each of its tensors shares memory with the model.",
    ),
)
