"""Exercises on manual averaging, unequal batches, and unknown faults, for notebook 03_averaging_gradients."""

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
    """A model with three weight vectors of the same length.

    Every rank uses `always`, only some ranks use `sometimes`, and `frozen` does not require a gradient. The loss is
    linear in the weights: the gradient of `always` is the input, and the gradient of `sometimes` is ten times the
    input.
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
    """Check two averages. Rank r's input is [r + 1, 0]. In the second, the last rank does not use `sometimes`."""
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
        f"Here, the last rank (rank {world.size - 1}) does not use the weight `sometimes` in its loss, so "
        "`sometimes.grad` is None on that rank. The missing gradient counts as zero in the average, so that rank must "
        "enter the all-reduce, too."
    )
    try:
        answer(world, model)
    except (TypeError, AttributeError, RuntimeError) as error:
        raise WrongAnswerError(f"{story} Your function raised {type(error).__name__}: {error}") from None
    local = torch.tensor([0.0, 0.0]) if last else 10 * local
    _expect_average(world, model, "sometimes", local, torch.tensor([10 * with_detour, 0.0]), story)
    frozen = model.frozen.grad
    expect(frozen is None or not frozen.any(), "The frozen weight must not receive a gradient.")


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
        found = "the sum was divided twice"
    else:
        found = f"this is neither the average nor the rank's own gradient, {numbers(local)}"
    raise WrongAnswerError(
        f"{story} On rank {world.rank} of {world.size}, the gradient of `{name}` must be the average "
        f"{numbers(average)}, got {numbers(got)}: {found}.".strip()
    )


def _test_average(answer: Answer) -> str:
    stuck = "A rank waits forever for the other ranks. Every rank must enter the same collectives in the same order."
    on_ranks(_run_average, 3, answer, stuck=stuck, timeout=15)
    return "All ranks compute the average gradients, even if a rank has no gradient, and the weights do not change."


def _average_gradients(world: World, model: nn.Module) -> None:
    for parameter in model.parameters():
        if not parameter.requires_grad:  # the same on all ranks
            continue
        if parameter.grad is None:  # may differ between ranks: contribute zeros
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        parameter.grad /= world.size


def _with(finish: Callable[[World, nn.Parameter, torch.Tensor], None]) -> Answer:
    """Return a variant of the solution in which a call to `finish` replaces the all-reduce and the division."""

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
        "divides by two regardless of the number of ranks": _with(_divide_by_two),
        "divides before and after": _with(_divide_twice),
        "averages the weights": _with(_average_weight),
        "averages a copy": _with(_average_copy),
        "skips a weight that has a gradient on other ranks only": _skips_missing,
        "expects a gradient on every rank": _expects_all,
    },
    hints=(
        "dist.all_reduce(tensor) sums over the ranks in place and returns None. What is left to do?",
        "If this rank's loss does not depend on a weight, the weight's .grad is None. Do the other ranks know that?",
        "Let every rank all-reduce the gradient of every weight with requires_grad. A rank without a "
        "gradient contributes zeros.",
    ),
)

# -------------------------------------------------------------------------------------------- 2. weight unequal batches

_PARTS: tuple[tuple[tuple[float, ...], ...], ...] = (((1, 2, 3), (9,)), ((2, 4, 6, 8), (1, 5)), ((3, 5), ()))
_ALL_ENTER = "every rank must enter the collective, even a rank that has no samples in this step."


def _run_ragged(world: World, answer: Answer) -> list[float]:
    """Return this rank's gradient for each case in `_PARTS`.

    The model is a single weight w = 1, and the loss of a sample x is w * x. The gradient of the summed loss is
    therefore the sum of the samples.
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
            "The result must be a tensor that requires grad; otherwise, backward would fail. Autograd does not record "
            "collectives, so all-reduce only the count, and keep the loss itself out of the collective.",
        )
        gradients.append(float(torch.autograd.grad(loss, weight)[0]))
    return gradients


def _test_ragged(answer: Answer) -> str:
    stuck = f"A rank waits forever for the other ranks: {_ALL_ENTER}"
    results = on_ranks(_run_ragged, 2, answer, stuck=stuck, timeout=15)
    for parts, gradients in zip(_PARTS, zip(*results, strict=True), strict=True):
        union = [sample for part in parts for sample in part]
        averaged, true = sum(gradients) / len(parts), sum(union) / len(union)
        expect(
            abs(averaged - true) < 1e-5,
            f"With samples {list(parts[0])} on rank 0 and {list(parts[1])} on rank 1, the average gradient must be "
            f"{true:.4f}, the gradient of one batch with all {len(union)} samples, got {averaged:.4f}.",
        )
    return "The averaged gradient equals the gradient of one large batch, even if one rank has no samples."


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
        "ragged_loss(world, loss_sum, count): return a loss. Its gradients, averaged over the ranks, must equal the "
        "gradients of the mean loss over the samples of all ranks."
    ),
    test=_test_ragged,
    solution=_ragged_loss,
    wrong={
        "takes the mean over its own samples only": _own_mean,
        "forgets that averaging divides by the number of ranks": _over_everyones_count,
        "sums the losses, which detaches them from the weights": _sums_of_losses,
        "multiplies the loss sum by the count": _weighed_twice,
        "does not enter the collective when it has no samples": _skips_when_empty,
    },
    hints=(
        "You need (sum of rank 0 + sum of rank 1 + ...) / (count of rank 0 + count of rank 1 + ...).",
        "A rank knows only its own count. One all-reduce returns the count over all ranks.",
        "The averaging divides by world.size afterward, so multiply by world.size first.",
    ),
)

# ------------------------------------------------------------------------------------- 3. name the fault of a black box

FAULTS = (
    "none",  # the loop is equivalent to one process on the union of all samples
    "sum",  # the gradients are summed but not divided
    "different starts",  # the ranks start with different weights
    "no sync",  # no gradient is averaged
    "skipped parameter",  # one of the two parameters is not averaged
    "mean of means",  # every rank has the same weight in the average, even with fewer samples
    "not reset",  # gradients of earlier steps are not set to zero
)


class BlackBoxLoop:
    """A training loop for a linear model on all ranks, with an unknown fault from `FAULTS`.

    Attributes:
        learning_rate: The learning rate of plain SGD.
    """

    def __init__(self, world: World, fault: str) -> None:
        """Create the model on every rank."""
        self.learning_rate = 0.1
        self._world, self._fault = world, fault
        self._weight = torch.tensor([0.5, -1.0, 2.0], requires_grad=True)
        self._bias = torch.tensor([0.25], requires_grad=True)
        if fault == "different starts" and world.rank == world.size - 1:
            self._bias = torch.tensor([0.75], requires_grad=True)
        self._gradients = [torch.zeros(3), torch.zeros(1)]

    def weights(self) -> torch.Tensor:
        """Return this rank's three input weights and bias as one tensor of shape [4]."""
        return torch.cat([self._weight, self._bias]).detach()

    def gradient(self, weights: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the mean loss over `samples` [n, 3] at the given weights, without communication."""
        leaf = weights.clone().requires_grad_()
        return torch.autograd.grad(self._loss(leaf[:3], leaf[3:], samples), leaf)[0]

    def step(self, samples: torch.Tensor) -> None:
        """Take one optimizer step on this rank's `samples` [n, 3], with n >= 1. Collective."""
        parameters = [self._weight, self._bias]
        loss = self._loss(self._weight, self._bias, samples)
        if self._fault != "mean of means":
            count = torch.tensor(float(len(samples)))
            dist.all_reduce(count)
            loss = loss * len(samples) * self._world.size / count
        for number, gradient in enumerate(torch.autograd.grad(loss, parameters)):
            if self._fault != "no sync" and not (self._fault == "skipped parameter" and number == 1):
                dist.all_reduce(gradient)
                gradient.div_(1 if self._fault == "sum" else self._world.size)
            self._gradients[number] = gradient + (self._gradients[number] if self._fault == "not reset" else 0)
            parameters[number].data -= self.learning_rate * self._gradients[number]

    @staticmethod
    def _loss(weight: torch.Tensor, bias: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
        return ((samples @ weight + bias - samples.sum(dim=1)) ** 2).mean()


def _run_black_box(world: World, answer: Answer) -> list[str]:
    """Return the answer's result for each fault in `_SHUFFLED`."""
    names = []
    for fault in _SHUFFLED:
        try:
            name = answer(world, BlackBoxLoop(world, fault))
        except RuntimeError as error:
            if isinstance(error, NotImplementedError) or not lost_connection(error):
                raise
            message = f"Rank {world.rank} waited in a collective that another rank never entered: {_SAME_CALLS}"
            raise WrongAnswerError(message) from None
        expect(name in FAULTS, f"The result must be one of {FAULTS}, got {name!r}.")
        names.append(name)
    return names


_SHUFFLED = ("sum", "none", "mean of means", "different starts", "not reset", "skipped parameter", "no sync")
_SAME_CALLS = "all ranks must take the same number of steps, and enter the same collectives."


def _test_black_box(answer: Answer) -> str:
    stuck = f"A rank waits forever for the other ranks: {_SAME_CALLS}"
    of_ranks = on_ranks(_run_black_box, 3, answer, stuck=stuck, timeout=30)
    for fault, names in zip(_SHUFFLED, zip(*of_ranks, strict=True), strict=True):
        expect(
            len(set(names)) == 1,
            f"For the same loop, all ranks must return the same name, got {', '.join(map(repr, names))}. Base the "
            "decision on values that all ranks know, such as the gathered weights.",
        )
        expect(names[0] == fault, f"The result must be {fault!r}, the fault of this loop, got {names[0]!r}.")
    return f"All three ranks return the correct fault for all {len(FAULTS)} loops."


def _gather(world: World, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors of all ranks. Collective."""
    tensors = [torch.empty_like(tensor) for _ in range(world.size)]
    dist.all_gather(tensors, tensor)
    return tensors


def _name_the_fault(world: World, loop: BlackBoxLoop) -> str:
    def gather(tensor: torch.Tensor) -> list[torch.Tensor]:
        tensors = [torch.empty_like(tensor) for _ in range(world.size)]
        dist.all_gather(tensors, tensor)
        return tensors

    def differ(tensors: list[torch.Tensor]) -> bool:
        return any(not torch.equal(tensor, tensors[0]) for tensor in tensors)

    def step(sizes: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Take a step. Return the gradient applied on rank 0, and the single-process gradient. Collective."""
        generator = torch.Generator().manual_seed(sum(sizes))
        parts = [torch.randn(size, 3, generator=generator) for size in sizes]
        before = gather(loop.weights())[0]
        loop.step(parts[world.rank])
        after = gather(loop.weights())
        return (before - after[0]) / loop.learning_rate, loop.gradient(before, torch.cat(parts))

    if differ(gather(loop.weights())):
        return "different starts"
    observed, expected = step([4] * world.size)
    after = gather(loop.weights())
    if differ(after):  # do all weights differ, or only some?
        unequal = [differ([weights[i] for weights in after]) for i in range(len(after[0]))]
        return "no sync" if all(unequal) else "skipped parameter"
    if not torch.allclose(observed, expected, rtol=1e-3, atol=1e-4):
        return "sum"
    observed, expected = step([4] * world.size)  # a second step: are gradients left over from the first?
    if not torch.allclose(observed, expected, rtol=1e-3, atol=1e-4):
        return "not reset"
    observed, expected = step([1, *[5] * (world.size - 1)])
    return "none" if torch.allclose(observed, expected, rtol=1e-3, atol=1e-4) else "mean of means"


def _parts(world: World, sizes: list[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(sizes))
    return [torch.randn(size, 3, generator=generator) for size in sizes]


def _equals_one_process(world: World, loop: BlackBoxLoop, sizes: list[int]) -> bool:
    """Take a step, and return whether rank 0's gradient equals the single-process gradient. Collective."""
    parts, before = _parts(world, sizes), _gather(world, loop.weights())[0]
    loop.step(parts[world.rank])
    observed = (before - _gather(world, loop.weights())[0]) / loop.learning_rate
    return torch.allclose(observed, loop.gradient(before, torch.cat(parts)), rtol=1e-3, atol=1e-4)


def _believes_the_loop(world: World, loop: BlackBoxLoop) -> str:
    return "none"


def _compares_ranks_only(world: World, loop: BlackBoxLoop) -> str:
    starts = _gather(world, loop.weights())
    if any(not torch.equal(each, starts[0]) for each in starts):
        return "different starts"
    loop.step(_parts(world, [4] * world.size)[world.rank])
    after = _gather(world, loop.weights())
    if all(torch.equal(each, after[0]) for each in after):
        return "none"
    return "skipped parameter" if all(torch.equal(each[:3], after[0][:3]) for each in after) else "no sync"


def _takes_equal_batches_only(world: World, loop: BlackBoxLoop) -> str:
    name = _compares_ranks_only(world, loop)
    if name != "none":
        return name
    fine = _equals_one_process(world, BlackBoxLoop(world, loop._fault), [4] * world.size)
    return "none" if fine else "sum"


def _takes_one_step_only(world: World, loop: BlackBoxLoop) -> str:
    fault = loop._fault
    return "none" if fault == "not reset" else _name_the_fault(world, loop)


def _compares_itself_with_rank_zero(world: World, loop: BlackBoxLoop) -> str:
    starts = _gather(world, loop.weights())
    name = _name_the_fault(world, loop)
    return "none" if name == "different starts" and torch.equal(starts[world.rank], starts[0]) else name


def _names_every_difference_no_sync(world: World, loop: BlackBoxLoop) -> str:
    name = _name_the_fault(world, loop)
    return "no sync" if name == "skipped parameter" else name


def _rank_zero_only(world: World, loop: BlackBoxLoop) -> str:
    return _name_the_fault(world, loop) if world.rank == 0 else "none"


name_the_fault = Exercise(
    task=(
        "name_the_fault(world, loop): the loop trains a linear model with plain SGD, and has at most one fault. Return "
        f"the name of the fault, one of {', '.join(map(repr, FAULTS))}. Use loop.weights(), loop.step(samples), "
        "loop.learning_rate, and loop.gradient(weights, samples), which returns the gradient of one process. `samples` "
        "must have the shape [n, 3]."
    ),
    test=_test_black_box,
    solution=_name_the_fault,
    wrong={
        "trusts the loop": _believes_the_loop,
        "compares only the ranks with each other": _compares_ranks_only,
        "uses batches of equal size only": _takes_equal_batches_only,
        "takes one step only": _takes_one_step_only,
        "lets each rank compare itself with rank 0": _compares_itself_with_rank_zero,
        "compares only whether all weights are equal": _names_every_difference_no_sync,
        "lets only rank 0 examine the loop": _rank_zero_only,
    },
    hints=(
        "Which faults make ranks disagree with each other, and which make them agree on a wrong result?",
        "After a step of plain SGD, (before - after) / learning_rate is the gradient that the loop used. Compare it "
        "with loop.gradient for the union of all ranks' samples. Generate all of these samples on every rank.",
        "Three experiments are enough: a step with equal batches, a second step, and a step with unequal batches. "
        "Gather the weights of all ranks before and after each step, so that all ranks make the same decision.",
    ),
)
