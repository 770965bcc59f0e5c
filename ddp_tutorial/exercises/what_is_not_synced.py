"""Exercises on gradient clipping, batch counts, and a synchronized BatchNorm, for notebook 09_what_is_not_synced."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_tutorial.collectives import all_gather
from ddp_tutorial.exercises import Answer, Exercise, counted, expect, numbers, on_ranks
from ddp_tutorial.world import World

_STUCK = "A rank waits forever for the others. Every rank must enter the same collectives in the same order."

# ------------------------------------------------------------------------------------------- 1. clip a sharded gradient

Sum = Callable[[torch.Tensor], torch.Tensor]

# The shards of each rank, then the replicated gradients.
_GRADIENTS: dict[str, tuple[list[list[list[float]]], list[list[float]]]] = {
    "a long gradient": ([[[3.0, 0.0], [4.0]], [[12.0]]], [[84.0]]),
    "a rank without shards": ([[], [[6.0, 8.0]]], [[24.0], [0.0]]),
    "no replicated gradient": ([[[0.0, 15.0]], [[20.0]]], []),
    "a short gradient": ([[[0.1]], [[0.2]]], [[0.2]]),
}
_LIMIT = 2.0


def _run_clip(world: World, answer: Answer) -> list[tuple[Any, list[torch.Tensor]]]:
    results = []
    for shards, replicated in _GRADIENTS.values():
        gradients = [torch.tensor(values) for values in shards[world.rank]]
        copies = [torch.tensor(values) for values in replicated]

        def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
            summed = tensor.detach().clone()
            dist.all_reduce(summed)
            return summed

        norm = answer(gradients, copies, _LIMIT, sum_over_ranks)
        results.append((norm, [*gradients, *copies]))
        all_gather(world, "done")  # a rank that skipped a collective waits here, and the check times out
    return results


def _test_clip(answer: Answer) -> str:
    ranks = on_ranks(_run_clip, 2, answer, stuck=_STUCK, timeout=15)
    for number, (case, (shards, replicated)) in enumerate(_GRADIENTS.items()):
        everything = torch.tensor([value for part in (*shards[0], *shards[1], *replicated) for value in part])
        norm = everything.norm().item()
        factor = min(1.0, _LIMIT / norm)
        for rank, results in enumerate(ranks):
            returned, clipped = results[number]
            before = [torch.tensor(values) for values in (*shards[rank], *replicated)]
            where = f"In the case '{case}', rank {rank}"
            expect(
                isinstance(returned, float | torch.Tensor) and abs(float(returned) - norm) < 1e-4 * norm,
                f"{where} must return the norm of the whole gradient, {norm:.4g}, got {returned}. Count each element "
                "of the gradient once: shards differ between the ranks, and replicated gradients are equal.",
            )
            found = torch.cat([*clipped, torch.zeros(0)])
            wanted = torch.cat([*before, torch.zeros(0)]) * factor
            expect(
                torch.allclose(found, wanted, rtol=1e-4),
                f"{where}: the gradients must be multiplied in place by {factor:.4g}, from "
                f"{numbers(torch.cat(before), 4)} to {numbers(wanted, 4)}, got {numbers(found, 4)}.",
            )
    return "All ranks compute the norm of the whole gradient, and scale their gradients by the same factor."


def _clip_sharded(
    shards: Sequence[torch.Tensor], replicated: Sequence[torch.Tensor], limit: float, sum_over_ranks: Sum
) -> float:
    squares = sum_over_ranks(sum((shard.square().sum() for shard in shards), torch.tensor(0.0)))
    squares = squares + sum(gradient.square().sum() for gradient in replicated)  # equal on all ranks: count them once
    norm = squares.sqrt().item()
    for gradient in (*shards, *replicated):
        gradient.mul_(min(1.0, limit / norm))
    return norm


def _clipping(norm_of: Callable[..., float], *, scaled: str = "all", shortens_only: bool = True) -> Answer:
    """Return a variant of the solution with a different norm, or with a mistake in the scaling."""

    def answer(
        shards: Sequence[torch.Tensor], replicated: Sequence[torch.Tensor], limit: float, sum_over_ranks: Sum
    ) -> float:
        norm = norm_of(shards, replicated, sum_over_ranks)
        factor = min(1.0, limit / norm) if shortens_only else limit / norm
        for gradient in (*shards, *(replicated if scaled == "all" else ())):
            gradient.mul_(factor)
        return norm

    return answer


def _squares(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    return sum((gradient.square().sum() for gradient in gradients), torch.tensor(0.0))


def _whole_norm(shards: Sequence[torch.Tensor], replicated: Sequence[torch.Tensor], sum_over_ranks: Sum) -> float:
    return (sum_over_ranks(_squares(shards)) + _squares(replicated)).sqrt().item()


clip_sharded = Exercise(
    task=(
        "clip_sharded(shards, replicated, limit, sum_over_ranks): scale all gradients on this rank in place, so "
        "that the norm of the whole gradient is at most `limit`. Return the norm before clipping. `shards` are this "
        "rank's shards of the gradient, and may be empty. The `replicated` gradients are equal on all ranks."
    ),
    test=_test_clip,
    solution=_clip_sharded,
    wrong={
        "uses the norm of the rank's own gradients": _clipping(
            lambda shards, replicated, sum_over_ranks: _squares([*shards, *replicated]).sqrt().item()
        ),
        "counts replicated gradients once per rank": _clipping(
            lambda shards, replicated, sum_over_ranks: sum_over_ranks(_squares([*shards, *replicated])).sqrt().item()
        ),
        "sums norms instead of squares": _clipping(
            lambda shards, replicated, sum_over_ranks: (
                sum_over_ranks(_squares(shards).sqrt()) + _squares(replicated).sqrt()
            ).item()
        ),
        "forgets the replicated gradients in the norm": _clipping(
            lambda shards, replicated, sum_over_ranks: sum_over_ranks(_squares(shards)).sqrt().item()
        ),
        "scales the shards only": _clipping(_whole_norm, scaled="shards"),
        "lengthens short gradients": _clipping(_whole_norm, shortens_only=False),
    },
    hints=(
        "The squared norm is a sum of squares. Which squares are only on one rank, and which squares are on every "
        "rank?",
        "Sum the squares of the shards over the ranks. Add the squares of the replicated gradients once. Every rank "
        "must call sum_over_ranks, even without shards.",
    ),
)

# --------------------------------------------------------------------------------------------------- 2. unequal batches

Work = Callable[[str | None], None]
AnyRank = Callable[[bool], bool]

_STREAMS = {
    "both ranks have 2 batches": [2, 2],
    "rank 0 has 3 batches and rank 1 has 1": [3, 1],
    "rank 0 has no batch and rank 1 has 2": [0, 2],
    "no rank has a batch": [0, 0],
}
_TOO_OFTEN = 10


def _one_story(world: World, answer: Answer, counts: list[int]) -> list[str | None]:
    """Run the answer, and return the batches that this rank has processed.

    Raises:
        WrongAnswerError: On all ranks, if the ranks' calls differ.
    """
    own = [f"batch {number} of rank {world.rank}" for number in range(counts[world.rank])]
    worked: list[str | None] = []
    taken, given = 0, f"{counts[0]} and {counts[1]}"

    def stream() -> Iterator[str]:
        nonlocal taken
        for batch in own:
            taken += 1
            yield batch

    def meet(what: str, flag: bool = False) -> bool:
        """Check that all ranks take the same action, and return whether any rank's `flag` is True. Collective."""
        gathered = all_gather(world, (what, flag))
        doing = ", while ".join(f"rank {rank} {each}" for rank, (each, _) in enumerate(gathered))
        on_a_cluster = "On a cluster, the ranks would wait for each other forever."
        expect(len({each for each, _ in gathered}) == 1, f"With {given} batches, {doing}. {on_a_cluster}")
        return any(each for _, each in gathered)

    def work(batch: str | None) -> None:
        ahead = meet("calls work", taken > len(worked) + 2)
        expect(not ahead, "A rank reads batches ahead. A stream may be infinite, so take one batch per step.")
        expect(
            len(worked) < _TOO_OFTEN, f"With {given} batches, your function calls work more than {_TOO_OFTEN} times."
        )
        worked.append(batch)

    answer(stream(), work, lambda flag: meet("calls any_rank", bool(flag)))
    meet("has returned")
    return worked


def _all_stories(world: World, answer: Answer) -> list[list[str | None]]:
    return [_one_story(world, answer, counts) for counts in _STREAMS.values()]


def _test_streams(answer: Answer) -> str:
    ranks = on_ranks(_all_stories, 2, answer, stuck=_STUCK, timeout=12)
    for number, (story, counts) in enumerate(_STREAMS.items()):
        for rank, found in enumerate(each[number] for each in ranks):
            want = [f"batch {k} of rank {rank}" if k < counts[rank] else None for k in range(max(counts))]
            expect(
                found == want,
                f"If {story}, rank {rank} must call work with {want or 'nothing'}, got {found or 'nothing'}.",
            )
    return "Every batch is processed once, all ranks take the same number of steps, and no step is empty."


def _to_the_last_batch(batches: Iterator[Any], work: Work, any_rank: AnyRank) -> None:
    while True:
        batch = next(batches, None)
        if not any_rank(batch is not None):
            return
        work(batch)


def _to_its_own_end(batches: Iterator[Any], work: Work, any_rank: AnyRank) -> None:
    for batch in batches:
        work(batch)


def _to_the_first_end(batches: Iterator[Any], work: Work, any_rank: AnyRank) -> None:
    while not any_rank((batch := next(batches, None)) is None):
        work(batch)


def _asks_at_its_end(batches: Iterator[Any], work: Work, any_rank: AnyRank) -> None:
    for batch in batches:
        work(batch)
    while any_rank(False):
        work(None)


def _asks_too_late(batches: Iterator[Any], work: Work, any_rank: AnyRank) -> None:
    more = True
    while more:
        batch = next(batches, None)
        work(batch)
        more = any_rank(batch is not None)


def _loses_what_it_asked_about(batches: Iterator[Any], work: Work, any_rank: AnyRank) -> None:
    while any_rank(next(batches, None) is not None):
        work(next(batches, None))


def _repeats_the_last(batches: Iterator[Any], work: Work, any_rank: AnyRank) -> None:
    last = None
    while any_rank((batch := next(batches, None)) is not None):
        last = batch or last
        work(last)


def _reads_ahead(batches: Iterator[Any], work: Work, any_rank: AnyRank) -> None:
    waiting = list(batches)
    while any_rank(bool(waiting)):
        work(waiting.pop(0) if waiting else None)


to_the_last_batch = Exercise(
    task=(
        "to_the_last_batch(batches, work, any_rank): `batches` iterates over this rank's batches. The number of "
        "batches differs between ranks. Call work(batch) for each batch, and work(None) while only other ranks have "
        "batches. All ranks must make the same number of calls to work and any_rank(flag)."
    ),
    test=_test_streams,
    solution=_to_the_last_batch,
    wrong={
        "stops after its own batches": _to_its_own_end,
        "stops when the first rank has no batch left": _to_the_first_end,
        "calls any_rank only when it has no batch": _asks_at_its_end,
        "calls any_rank after the step": _asks_too_late,
        "takes a batch to check for one, and loses it": _loses_what_it_asked_about,
        "repeats its last batch": _repeats_the_last,
        "reads all its batches first": _reads_ahead,
    },
    hints=(
        "The number of batches is not known in advance, so the ranks must communicate before each step.",
        "next(batches, None) returns the next batch, or None at the end. any_rank(flag) returns true if `flag` "
        "is true on any rank.",
        "In each step, every rank takes a batch and calls any_rank. If no rank has a batch, all ranks return. "
        "Otherwise, all ranks call work.",
    ),
)

# -------------------------------------------------------------------------------------------- 3. synchronized BatchNorm

_COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast", "reduce"),
    *("reduce_scatter_tensor", "all_to_all_single", "all_to_all", "gather", "scatter", "barrier"),
)
_WEIGHT, _BIAS, _MOMENTUM = (1.5, -0.5), (0.25, 2.0), 0.1


@dataclass(frozen=True)
class _Samples:
    """A batch of 9 samples with 2 channels, the split over 3 ranks, and the tolerance of the check."""

    parts: tuple[int, int, int]
    dtype: torch.dtype = torch.float64
    center: float = 0.0
    tolerance: float = 1e-9

    def union(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the samples and the weight of each output in the loss."""
        generator = torch.Generator().manual_seed(0)
        x, weights = torch.randn(2, 9, 2, generator=generator, dtype=torch.float64)
        x = 0.3 * x + 0.1 * torch.arange(9.0, dtype=torch.float64)[:, None] + self.center
        return x.to(self.dtype), weights.to(self.dtype)


_BATCHES = {
    "Three ranks with 3 samples each": _Samples((3, 3, 3)),
    "Three ranks with 2, 0 and 7 samples": _Samples((2, 0, 7)),
    "Values around 1000 in float32": _Samples((3, 4, 2), torch.float32, 1000.0, 2e-2),
}


def _run_norm(world: World, answer: Answer) -> list[dict[str, Any]]:
    return [_one_batch(world, answer, samples) for samples in _BATCHES.values()]


def _one_batch(world: World, answer: Answer, samples: _Samples) -> dict[str, Any]:
    """Run one training step and one evaluation on this rank. `_check_batch` compares all ranks."""
    layer = answer(2, eps=1e-5, momentum=_MOMENTUM).to(samples.dtype)
    lacking = [name for name in ("weight", "bias", "running_mean", "running_var") if not hasattr(layer, name)]
    expect(
        not lacking,
        f"The layer must have the attributes weight, bias, running_mean and running_var, but lacks {lacking}.",
    )
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(_WEIGHT))
        layer.bias.copy_(torch.tensor(_BIAS))
    x, weights = (tensor.split(samples.parts)[world.rank] for tensor in samples.union())
    x = x.clone().requires_grad_()
    with counted(_COLLECTIVES) as calls:
        out = layer(x)
        in_forward = list(calls)
        shape = list(out.shape) if isinstance(out, torch.Tensor) else repr(out)
        expect(shape == list(x.shape), f"The output must have shape {list(x.shape)}, got {shape} on rank {world.rank}.")
        expect(out.requires_grad, "The outputs must require grad: do not detach them.")
        (out * weights).sum().backward()
        in_backward = calls[len(in_forward) :]
        layer.eval()
        before = len(calls)
        evaluated = layer(samples.union()[0][:2]).detach()
        in_eval = calls[before:]
    gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in (x, layer.weight, layer.bias)]
    return {
        "out": out.detach(),
        "gradients": gradients,
        "running": [layer.running_mean.detach().clone(), layer.running_var.detach().clone()],
        "evaluated": evaluated,
        "calls": {"forward": in_forward, "backward": in_backward, "evaluation": in_eval},
    }


def _check_batch(ranks: list[dict[str, Any]], where: str, samples: _Samples) -> None:
    x, weights = (tensor.double() for tensor in samples.union())
    reference = nn.BatchNorm1d(2, momentum=_MOMENTUM).double()
    with torch.no_grad():
        reference.weight.copy_(torch.tensor(_WEIGHT))
        reference.bias.copy_(torch.tensor(_BIAS))
    x.requires_grad_()
    out = reference(x)
    (out * weights).sum().backward()
    reference.eval()

    def compare(found: torch.Tensor, wanted: torch.Tensor | None, what: str, advice: str) -> None:
        assert wanted is not None
        difference = (found.double() - wanted).abs().max().item()
        limit = samples.tolerance * max(1.0, wanted.abs().max().item() if "mean" in what else 1.0)
        expect(
            difference <= limit,  # false for NaN
            f"{where}: the {what} must be {numbers(wanted, 4)}, got {numbers(found, 4)}. {advice}",
        )

    advice = "Count every sample of every rank once; a rank without samples has no mean."
    if samples.center:
        advice = (
            "In float32, the mean of squares minus the square of the mean loses all digits. Combine the ranks' means "
        )
        advice += "and their sums of squared differences instead."
    compare(torch.cat([rank["out"] for rank in ranks]), out, "outputs", advice)
    compare(
        torch.cat([rank["gradients"][0] for rank in ranks]),
        x.grad,
        "gradients of `x`",
        "Mean and variance depend on the samples of all ranks, so each rank needs the gradients of the other ranks.",
    )
    for number, parameter in ((1, reference.weight), (2, reference.bias)):
        summed = torch.stack([rank["gradients"][number] for rank in ranks]).sum(0)
        advice = (
            "Each rank contributes the gradient of its own samples. DDP reduces these gradients later, so do "
            "not reduce them."
        )
        compare(summed, parameter.grad, f"{('weight', 'bias')[number - 1]} gradients, summed over ranks,", advice)
    for rank, found in enumerate(ranks):
        advice = "Compute the running statistics over all ranks' samples, and divide by n - 1 for the variance."
        compare(found["running"][0], reference.running_mean, f"running mean of rank {rank}", advice)
        compare(found["running"][1], reference.running_var, f"running variance of rank {rank}", advice)
        advice = "In evaluation, normalize with the running statistics."
        compare(found["evaluated"], reference(x[:2]), f"outputs of rank {rank} in evaluation", advice)


def _test_norm(answer: Answer) -> str:
    ranks = on_ranks(_run_norm, 3, answer, stuck=_STUCK, timeout=20)
    for number, (where, samples) in enumerate(_BATCHES.items()):
        _check_batch([rank[number] for rank in ranks], where, samples)
    for rank, results in enumerate(ranks):
        for phase, most in (("forward", 1), ("backward", 1), ("evaluation", 0)):
            calls = results[0]["calls"][phase]
            expect(
                len(calls) <= most,
                f"The results are right, but rank {rank} must use at most {most} collectives in {phase}, got "
                f"{len(calls)} ({', '.join(calls)}). Concatenate the tensors that you send.",
            )
    return (
        "The layer is equivalent to BatchNorm on the global batch, with one collective in forward and one in backward."
    )


class _SyncNorm(nn.Module):
    class Normalize(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, eps: float) -> tuple[torch.Tensor, ...]:
            mean = x.sum(0) / max(1, len(x))
            squares = (x - mean).square().sum(0)
            own = torch.cat([mean, squares, x.new_tensor([len(x)])])
            gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(gathered, own)
            means, squares, counts = torch.stack(gathered).split([len(mean), len(mean), 1], dim=1)
            count = counts.sum()
            mean = (counts * means).sum(0) / count
            variance = (squares + counts * (means - mean).square()).sum(0) / count
            normalized = (x - mean) / (variance + eps).sqrt()
            ctx.save_for_backward(normalized, variance + eps, count)
            ctx.mark_non_differentiable(mean, variance, count)
            return normalized, mean, variance, count

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
            gradient = gradients[0]  # of normalized; the statistics are not differentiable
            normalized, variance, count = ctx.saved_tensors
            sums = torch.stack([gradient.sum(0), (gradient * normalized).sum(0)])
            dist.all_reduce(sums)
            return (gradient - (sums[0] + normalized * sums[1]) / count) / variance.sqrt(), None

    def __init__(self, channels: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.running_mean, self.running_var = nn.Buffer(torch.zeros(channels)), nn.Buffer(torch.ones(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            normalized, mean, variance, count = self.Normalize.apply(x, self.eps)
            with torch.no_grad():
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(variance * count / (count - 1), self.momentum)
        else:
            normalized = (x - self.running_mean) / (self.running_var + self.eps).sqrt()
        return normalized * self.weight + self.bias


class _SumOverRanks(torch.autograd.Function):
    """An autograd function that sums over the ranks in the forward pass and in the backward pass."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        summed = tensor.detach().clone()
        dist.all_reduce(summed)
        return summed

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return _SumOverRanks.forward(ctx, gradients[0].contiguous())


def _data_sum(tensor: torch.Tensor) -> torch.Tensor:
    return _SumOverRanks.forward(None, tensor)


def _sums(x: torch.Tensor, total: Sum) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the mean, variance and count, computed from one all-reduce of the sum, sum of squares and count."""
    first, second, count = total(torch.stack([x.sum(0), x.square().sum(0), torch.ones_like(x).sum(0)]))
    return first / count, second / count - (first / count).square(), count


def _three_sums(x: torch.Tensor, total: Sum) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    count = total(torch.ones_like(x).sum(0))
    mean = total(x.sum(0)) / count
    return mean, total((x - mean).square().sum(0)) / count, count


def _means_of_means(x: torch.Tensor, total: Sum) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ones = x.new_ones(1)
    mean = total(x.mean(0)) / total(ones)
    return mean, total((x - mean).square().mean(0)) / total(ones), total(torch.ones_like(x).sum(0))


def _norm_with(
    statistics: Callable[..., Any],
    total: Sum,
    *,
    unbiased: bool = True,
    own_running: bool = False,
    batch_in_eval: bool = False,
    reduced_weight: bool = False,
) -> Answer:
    """Return a variant of the solution that uses different statistics, or contains a different mistake."""

    class Layer(_SyncNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = self.weight
            if reduced_weight:  # the same value, with a gradient that is summed over the ranks
                weight = weight + _SumOverRanks.apply(weight) - _data_sum(weight)
            if not self.training and not batch_in_eval:
                return (x - self.running_mean) / (self.running_var + self.eps).sqrt() * weight + self.bias
            mean, variance, count = statistics(x, total)
            if self.training:
                with torch.no_grad():
                    kept = statistics(x, lambda tensor: tensor) if own_running else (mean, variance, count)
                    unbiasing = kept[2] / (kept[2] - 1) if unbiased else 1.0
                    self.running_mean.lerp_(kept[0].detach(), self.momentum)
                    self.running_var.lerp_(kept[1].detach() * unbiasing, self.momentum)
            return (x - mean) / (variance + self.eps).sqrt() * weight + self.bias

    return Layer


def _constant(x: torch.Tensor, total: Sum) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        return _three_sums(x, total)


def _forward_only(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + (_data_sum(tensor) - tensor).detach()


sync_norm = Exercise(
    task=(
        "SyncNorm(channels, eps, momentum): write a BatchNorm layer for x of shape [samples, channels] that "
        "normalizes over the samples of all ranks. Some ranks may have no samples. In training, use one collective "
        "in forward and one in backward. In evaluation, use no collectives. Like nn.BatchNorm1d, the layer has the "
        "attributes weight, bias, running_mean and running_var."
    ),
    test=_test_norm,
    solution=_SyncNorm,
    wrong={
        "normalizes over the rank's own samples": _norm_with(_three_sums, lambda tensor: tensor),
        "takes the mean of the ranks' means": _norm_with(_means_of_means, _SumOverRanks.apply),
        "hides the statistics from autograd": _norm_with(_constant, _data_sum),
        "ignores the other ranks in the backward pass": _norm_with(_three_sums, _forward_only),
        "uses three collectives": _norm_with(_three_sums, _SumOverRanks.apply),
        "subtracts the square of the mean in float32": _norm_with(_sums, _SumOverRanks.apply),
        "keeps a biased running variance": _norm_with(_three_sums, _SumOverRanks.apply, unbiased=False),
        "keeps the rank's own running statistics": _norm_with(_three_sums, _SumOverRanks.apply, own_running=True),
        "uses the batch in evaluation": _norm_with(_three_sums, _SumOverRanks.apply, batch_in_eval=True),
        "reduces the gradient of its weight": _norm_with(_three_sums, _SumOverRanks.apply, reduced_weight=True),
    },
    hints=(
        "Start without a limit on collectives: sum x, squared differences and counts with a differentiable sum over "
        "ranks. The backward pass of this sum is also a sum over ranks.",
        "To use one collective in forward, all-gather each rank's mean, its sum of squared differences from this "
        "mean, and its count. If m is the mean over all ranks' samples, a rank with mean r contributes its sum plus "
        "count * (r - m) ** 2.",
        "To use one collective in backward, all-reduce g.sum(0) and (g * z).sum(0), in which z is the normalized x "
        "and g is the gradient of z. If `first` and `second` are the results, the gradient of x is (g - (first + z "
        "* second) / count) / standard deviation.",
        "Implement both passes in a torch.autograd.Function. Apply the weight and the bias outside the function, so "
        "that autograd computes their gradients.",
    ),
)
