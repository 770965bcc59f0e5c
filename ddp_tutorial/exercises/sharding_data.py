"""Exercises of 07_sharding_data: the rest of an epoch, exact evaluation, worker samples, and a resumable sampler."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice, product, zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from ddp_tutorial.collectives import all_gather, all_reduce_sum
from ddp_tutorial.exercises import Answer, Exercise, WrongAnswerError, expect, on_ranks
from ddp_tutorial.sharding.permutation import Permutation
from ddp_tutorial.world import World

# ---------------------------------------------------------------------------------------------- 1. the rest of an epoch


def _steps_by_rank(answer: Answer, order: Permutation, cursor: int, batch: int, size: int) -> list[list[list[int]]]:
    """Return the samples as [rank][step]. Raises `WrongAnswerError` if the answer yields anything else."""
    found = []
    for rank in range(size):
        steps = answer(order, cursor, batch, rank, size)
        expect(steps is not None, "Got None. Yield this rank's samples, one step after another.")
        try:
            found.append([[int(sample) for sample in step] for step in steps])
        except TypeError as error:
            raise WrongAnswerError(f"Each step must be a sequence of sample indices: {error}") from None
    return found


def _merged(parts: Sequence[Sequence[int]]) -> list[int]:
    """Return a step before the split: the first sample of every rank, then the second sample, and so on."""
    longest = max(map(len, parts))
    return [part[place] for place in range(longest) for part in parts if place < len(part)]


def _check_rest(answer: Answer, order: Permutation, cursor: int, batch: int, size: int) -> None:
    where = f"{order.samples} samples, batch {batch}, cursor {cursor}, {size} ranks"
    epoch, start = divmod(cursor, order.samples)
    whole = order.take(epoch * order.samples, order.samples).tolist()
    rest = whole[start:]
    expected = [rest[begin : begin + batch] for begin in range(0, len(rest), batch)]
    found = _steps_by_rank(answer, order, cursor, batch, size)
    counts = Counter(sample for steps in found for part in steps for sample in part)
    again = sorted(set(counts) & set(whole[:start]))
    expect(not again, f"{where}: samples {again[:5]} were read before the cursor, and are yielded again.")
    strange = sorted(set(counts) - set(whole))
    expect(not strange, f"{where}: indices {strange[:5]} are out of range.")
    missing = [sample for sample in rest if sample not in counts]
    expect(not missing, f"{where}: samples {missing[:5]} remain in this epoch, but no rank gets them.")
    twice = [sample for sample, count in counts.items() if count > 1]
    expect(not twice, f"{where}: samples {twice[:5]} are yielded more than once.")
    lengths = {len(steps) for steps in found}
    expect(
        lengths == {len(expected)},
        f"{where}: every rank must yield {len(expected)} steps, got {sorted(lengths)}. In a step without samples for "
        "this rank, yield an empty list, because the other ranks wait for this rank.",
    )
    for number, want in enumerate(expected):
        got = [steps[number] for steps in found]
        expect(
            sorted(_merged(got)) == sorted(want),
            f"{where}: step {number} must contain the samples {want} over all ranks, got {got}. First take the samples "
            "of the step, then split them between the ranks.",
        )
        sizes = [len(part) for part in got]
        expect(
            max(sizes) - min(sizes) <= 1,
            f"{where}: in step {number}, the ranks' sample counts must differ by at most one, got {sizes}.",
        )


def _test_rest(answer: Answer) -> str:
    for samples, cursor, batch, size in [(24, 0, 6, 2), (24, 12, 6, 3), (22, 12, 6, 3), (22, 22 + 12, 6, 3)]:
        _check_rest(answer, Permutation(samples, seed=0), cursor, batch, size)
    for cursor in range(0, 50, 7):
        for size in (1, 2, 4):
            _check_rest(answer, Permutation(25, seed=1), cursor, 8, size)
    return "For every cursor and every number of ranks, the ranks read exactly the rest of the epoch."


def _rest_of_epoch(order: Permutation, cursor: int, batch: int, rank: int, size: int) -> "Iterator[Sequence[int]]":
    end = (cursor // order.samples + 1) * order.samples
    while cursor < end:
        count = min(batch, end - cursor)  # the last step may be smaller
        yield order.take(cursor, count)[rank::size].tolist()
        cursor += count


def _from_the_start(order: Permutation, cursor: int, batch: int, rank: int, size: int) -> Iterator[Sequence[int]]:
    return _rest_of_epoch(order, cursor - cursor % order.samples, batch, rank, size)


def _into_the_next_epoch(order: Permutation, cursor: int, batch: int, rank: int, size: int) -> Iterator[Sequence[int]]:
    end = (cursor // order.samples + 1) * order.samples
    for begin in range(cursor, end, batch):
        yield order.take(begin, batch)[rank::size].tolist()


def _drops_the_last(order: Permutation, cursor: int, batch: int, rank: int, size: int) -> Iterator[Sequence[int]]:
    end = (cursor // order.samples + 1) * order.samples
    for begin in range(cursor, end - batch + 1, batch):
        yield order.take(begin, batch)[rank::size].tolist()


def _deals_first(order: Permutation, cursor: int, batch: int, rank: int, size: int) -> Iterator[Sequence[int]]:
    end = (cursor // order.samples + 1) * order.samples
    own = order.take(cursor, end - cursor)[rank::size].tolist()
    each = batch // size
    for begin in range(0, len(own), each):
        yield own[begin : begin + each]


def _not_dealt(order: Permutation, cursor: int, batch: int, rank: int, size: int) -> Iterator[Sequence[int]]:
    return _rest_of_epoch(order, cursor, batch, 0, 1)


def _always_epoch_zero(order: Permutation, cursor: int, batch: int, rank: int, size: int) -> Iterator[Sequence[int]]:
    return _rest_of_epoch(order, cursor % order.samples, batch, rank, size)


def _in_pieces(order: Permutation, cursor: int, batch: int, rank: int, size: int) -> Iterator[Sequence[int]]:
    end = (cursor // order.samples + 1) * order.samples
    each = -(-batch // size)
    for begin in range(cursor, end, batch):
        yield order.take(begin, min(batch, end - begin))[rank * each : (rank + 1) * each].tolist()


rest_of_epoch = Exercise(
    task=(
        "rest_of_epoch(order, cursor, batch, rank, size): for each remaining step of the epoch after `cursor` samples, "
        "yield this rank's samples. The last step may be smaller."
    ),
    test=_test_rest,
    solution=_rest_of_epoch,
    wrong={
        "starts the epoch over": _from_the_start,
        "reads on into the next epoch": _into_the_next_epoch,
        "drops the last, smaller step": _drops_the_last,
        "splits by rank first and by step second": _deals_first,
        "gives every rank every sample": _not_dealt,
        "ignores the epoch": _always_epoch_zero,
        "splits the last step unevenly": _in_pieces,
    },
    hints=(
        "The cursor counts samples from the start of epoch 0. This epoch ends at the next multiple of order.samples.",
        "order.take(cursor, count) returns the next `count` samples. What is the count of the last step?",
        "Use count = min(batch, end - cursor), then split: order.take(cursor, count)[rank::size].",
    ),
)

# -------------------------------------------------------------------------------------------------- 2. evaluate exactly

_SETS = (8, 7, 5, 1)  # numbers of samples for 3 ranks: not divisible, and fewer than ranks


def _loss(sample: int) -> float:
    return float((sample * 7 + 3) % 11)


def _run_evaluate(world: World, answer: Answer) -> list[tuple[object, list[list[int]]]]:
    found = []
    for samples in _SETS:
        called: list[int] = []

        def loss_of(sample: int, samples: int = samples, called: list[int] = called) -> torch.Tensor:
            expect(0 <= sample < samples, f"loss_of(sample) must be called with 0 to {samples - 1}, got {sample}.")
            called.append(int(sample))
            return torch.tensor(_loss(sample))

        result = answer(world, samples, loss_of)
        found.append((float(result) if isinstance(result, (float, int, torch.Tensor)) else result, called))
    return [(result, all_gather(world, called)) for result, called in found]


def _test_evaluate(answer: Answer) -> str:
    stuck = "A rank waits forever for the others. Every rank must enter the same collectives equally often."
    ranks = on_ranks(_run_evaluate, 3, answer, stuck=stuck, timeout=60)
    for number, samples in enumerate(_SETS):
        calls = ranks[0][number][1]
        times = [len(called) for called in calls]
        expect(
            len(set(times)) == 1,
            f"With {samples} samples, the 3 ranks call loss_of {times} times. loss_of contains a collective, so a rank "
            "with more calls would wait forever. Pad with copies until all ranks make the same number of calls.",
        )
        missing = sorted(set(range(samples)) - {sample for called in calls for sample in called})
        expect(not missing, f"With {samples} samples on 3 ranks, no rank evaluates samples {missing}.")
        fewest = -(-samples // 3)
        expect(
            times[0] == fewest,
            f"With {samples} samples, each of 3 ranks must call loss_of {fewest} times, got {times[0]}.",
        )
        mean = sum(map(_loss, range(samples))) / samples
        for rank, results in enumerate(ranks):
            got = results[number][0]
            expect(isinstance(got, float), f"The result must be the mean loss, a number, got {got!r} on rank {rank}.")
            assert isinstance(got, float)
            if abs(got - mean) < 1e-4:
                continue
            copies = 3 * times[0] - samples
            evaluated = [_loss(sample) for called in calls for sample in called]
            found = ""
            if abs(got - sum(evaluated) / len(evaluated)) < 1e-4:
                found = f" This mean counts {copies} copies too."
            raise WrongAnswerError(
                f"The mean loss of {samples} samples must be {mean:.4f}, got {got:.4f} on rank {rank}.{found}"
            )
    return "All ranks make the same number of calls, each sample counts once, and every rank has the right mean."


def _evaluate(world: World, samples: int, loss_of: "Callable[[int], torch.Tensor]") -> float:
    loss_sum = torch.tensor(0.0)
    for first in range(0, samples, world.size):
        mine = first + world.rank
        loss = loss_of(mine if mine < samples else 0)  # or a copy, so that all ranks make the same number of calls
        if mine < samples:
            loss_sum += loss
    dist.all_reduce(loss_sum)
    return float(loss_sum) / samples


def _counts_copies(world: World, samples: int, loss_of: Callable[[int], torch.Tensor]) -> float:
    firsts = range(0, samples, world.size)
    loss_sum = sum((loss_of((first + world.rank) % samples) for first in firsts), torch.tensor(0.0))
    return float(all_reduce_sum(world, loss_sum)) / (len(firsts) * world.size)


def _leaves_out_copies(world: World, samples: int, loss_of: Callable[[int], torch.Tensor]) -> float:
    loss_sum = sum((loss_of(mine) for mine in range(world.rank, samples, world.size)), torch.tensor(0.0))
    return float(all_reduce_sum(world, loss_sum)) / samples


def _own_mean(world: World, samples: int, loss_of: Callable[[int], torch.Tensor]) -> float:
    loss_sum, count = torch.tensor(0.0), 0
    for first in range(0, samples, world.size):
        mine = first + world.rank
        loss = loss_of(min(mine, samples - 1))
        if mine < samples:
            loss_sum, count = loss_sum + loss, count + 1
    return float(loss_sum) / max(1, count)


def _mean_of_means(world: World, samples: int, loss_of: Callable[[int], torch.Tensor]) -> float:
    return float(all_reduce_sum(world, torch.tensor(_own_mean(world, samples, loss_of)))) / world.size


def _everyone_everything(world: World, samples: int, loss_of: Callable[[int], torch.Tensor]) -> float:
    return float(sum((loss_of(sample) for sample in range(samples)), torch.tensor(0.0))) / samples


def _drops_the_tail(world: World, samples: int, loss_of: Callable[[int], torch.Tensor]) -> float:
    whole = samples // world.size * world.size
    loss_sum = sum((loss_of(mine) for mine in range(world.rank, whole, world.size)), torch.tensor(0.0))
    return float(all_reduce_sum(world, loss_sum)) / max(1, whole)


def _past_the_end(world: World, samples: int, loss_of: Callable[[int], torch.Tensor]) -> float:
    firsts = range(0, samples, world.size)
    loss_sum = sum((loss_of(first + world.rank) for first in firsts), torch.tensor(0.0))
    return float(all_reduce_sum(world, loss_sum)) / samples


evaluate = Exercise(
    task=(
        "evaluate(world, samples, loss_of): return, on every rank, the mean of loss_of(sample) over the samples 0 to "
        "samples - 1. Split the work; all ranks must make the same number of calls to loss_of."
    ),
    test=_test_evaluate,
    solution=_evaluate,
    wrong={
        "counts the copies": _counts_copies,
        "makes no call when it has no sample left": _leaves_out_copies,
        "returns the mean of the rank's own samples": _own_mean,
        "takes the mean of unequal means": _mean_of_means,
        "evaluates every sample on every rank": _everyone_everything,
        "drops the remainder": _drops_the_tail,
        "reads past the end of the data": _past_the_end,
    },
    hints=(
        "Pad the calls, not the mean: evaluate a copy, and discard its loss.",
        "In round k, this rank's sample is k * world.size + world.rank. If it does not exist, evaluate another one.",
        "Sum the losses of real samples only, dist.all_reduce the sum over the ranks, and divide by `samples`.",
    ),
)

# ------------------------------------------------------------------------------------------------ 3. a worker's samples


def _all_parts(answer: Answer, samples: int, size: int, workers: int) -> list[list[list[int]]]:
    """Return the samples as [rank][worker]."""
    parts = [[answer(samples, rank, size, worker, workers) for worker in range(workers)] for rank in range(size)]
    for part in [part for rank in parts for part in rank]:
        expect(part is not None, "Got None. Return the sample indices of this worker.")
    return [[[int(sample) for sample in part] for part in rank] for rank in parts]


def _test_worker(answer: Answer) -> str:
    for samples, size, workers in [(12, 2, 2), (12, 1, 3), (12, 3, 1), (13, 2, 3), (7, 4, 2), (2, 2, 2)]:
        where = f"{samples} samples, {size} ranks with {workers} workers each"
        parts = _all_parts(answer, samples, size, workers)
        counts = Counter(sample for rank in parts for part in rank for sample in part)
        missing = sorted(set(range(samples)) - set(counts))
        expect(not missing, f"{where}: no worker reads samples {missing[:6]}. The parts are {parts}.")
        twice = sorted(sample for sample, count in counts.items() if count > 1)
        expect(not twice, f"{where}: samples {twice[:6]} are read more than once. The parts are {parts}.")
        strange = sorted(set(counts) - set(range(samples)))
        expect(not strange, f"{where}: indices {strange[:6]} are out of range.")
        of_ranks = [sum(map(len, rank)) for rank in parts]
        expect(
            max(of_ranks) - min(of_ranks) <= 1,
            f"{where}: the ranks' sample counts must differ by at most one, got {of_ranks}. First split between the "
            "ranks, then between each rank's workers.",
        )
        for rank, own in enumerate(parts):
            lengths = [len(part) for part in own]
            expect(
                max(lengths) - min(lengths) <= 1,
                f"{where}: the sample counts of rank {rank}'s workers must differ by at most one, got {lengths}.",
            )
    return "Exactly one worker of one rank reads each sample, and the work is split evenly."


def _own_samples(samples: int, rank: int, size: int, worker: int, workers: int) -> list[int]:
    of_rank = list(range(samples))[rank::size]
    return of_rank[worker::workers]


def _offset_twice(samples: int, rank: int, size: int, worker: int, workers: int) -> list[int]:
    of_rank = list(range(samples))[rank::size]
    number = rank * workers + worker
    return of_rank[number :: size * workers]


def _no_workers(samples: int, rank: int, size: int, worker: int, workers: int) -> list[int]:
    return list(range(samples))[rank::size]


def _no_ranks(samples: int, rank: int, size: int, worker: int, workers: int) -> list[int]:
    return list(range(samples))[worker::workers]


def _stride_of_all(samples: int, rank: int, size: int, worker: int, workers: int) -> list[int]:
    return list(range(samples))[rank::size][worker :: size * workers]


def _workers_of_all(samples: int, rank: int, size: int, worker: int, workers: int) -> list[int]:
    return list(range(samples))[rank * workers + worker :: size * workers]


own_samples = Exercise(
    task=(
        "own_samples(samples, rank, size, worker, workers): return the sample indices that worker `worker` of "
        "`workers` on rank `rank` of `size` reads, so that every sample is read once."
    ),
    test=_test_worker,
    solution=_own_samples,
    wrong={
        "applies the rank's offset twice": _offset_twice,
        "gives every worker all samples of the rank": _no_workers,
        "ignores the ranks": _no_ranks,
        "strides over the workers of all ranks": _stride_of_all,
        "gives rank 0 too many samples of a small dataset": _workers_of_all,
    },
    hints=(
        "Print each worker's samples for 12 samples, 2 ranks and 2 workers. Which worker has none?",
        "[rank::size] already selects this rank's samples. Which processes still have to split them?",
        "Split the rank's samples between its own workers: [worker::workers].",
    ),
)

# -------------------------------------------------------------------------------------- 4. a resumable sampler of steps

_WORLDS = (1, 2, 3, 4)
_SHAPES = ((24, 6), (23, 6), (19, 6), (7, 4), (5, 8), (1, 4))  # samples, and samples per step
_MANY = 60  # steps; an answer that yields more in an epoch never stops

State = dict[str, Any]


def _steps_left(sampler: Any, where: str) -> list[list[int]]:
    """Return the steps that a sampler yields.

    Raises:
        WrongAnswerError: If a step is not a list of numbers, or the sampler never stops.
    """
    try:
        steps = list(islice(iter(sampler), _MANY))
    except TypeError as error:
        raise WrongAnswerError(
            f"{where}: __iter__ must iterate over the remaining steps, for example with yield. {error}"
        ) from None
    expect(len(steps) < _MANY, f"{where}: the sampler yields at least {_MANY} steps. Stop at the end of the epoch.")
    try:
        return [[int(number) for number in step] for step in steps]
    except TypeError:
        raise WrongAnswerError(
            f"{where}: each step must be a list of this rank's sample indices, got {steps[0]!r} first."
        ) from None


def _length(sampler: Any, where: str) -> int:
    try:
        return len(sampler)
    except TypeError as error:
        raise WrongAnswerError(f"{where}: len() must return the number of remaining steps. {error}") from None


def _world_of(answer: Answer, samples: int, batch: int, size: int, seed: int = 5) -> list[Any]:
    return [answer(samples, batch, rank, size, seed) for rank in range(size)]


def _epoch_of(samplers: Sequence[Any], samples: int, batch: int, where: str) -> list[list[int]]:
    """Return the sorted samples over all ranks of each step of an epoch. Checks that every sample occurs once."""
    count = -(-samples // batch)
    lengths = [_length(sampler, where) for sampler in samplers]
    parts = [_steps_left(sampler, where) for sampler in samplers]
    made = [len(steps) for steps in parts]
    advice = "The last step may be smaller."
    if len(set(made)) > 1:
        advice = "In a step without a sample for this rank, yield an empty list: the other ranks wait for this rank."
    expect(
        made == [count] * len(made),
        f"{where}: an epoch must have {count} steps on every rank, got {made}. {advice}",
    )
    seen = Counter(number for steps in parts for step in steps for number in step)
    twice = sorted(number for number, times in seen.items() if times > 1)
    expect(not twice, f"{where}: samples {twice[:5]} occur more than once in one epoch. Do not pad with copies.")
    missing = sorted(set(range(samples)) - set(seen))
    expect(not missing, f"{where}: no rank gets samples {missing[:5]} in this epoch.")
    strange = sorted(set(seen) - set(range(samples)))
    expect(not strange, f"{where}: indices {strange[:5]} are out of range.")
    expect(lengths == made, f"{where}: len() must be the number of remaining steps, {count}, got {lengths}.")
    for number, step in enumerate(zip(*parts, strict=True)):
        sizes = [len(part) for part in step]
        expect(
            sum(sizes) == min(batch, samples - batch * number) and max(sizes) - min(sizes) <= 1,
            f"{where}: step {number} must have {min(batch, samples - batch * number)} samples over all ranks, and the "
            f"ranks' counts must differ by at most one, got {sizes}.",
        )
    return [sorted(chain(*step)) for step in zip(*parts, strict=True)]


def _check_epochs(answer: Answer) -> None:
    for samples, batch in _SHAPES:
        orders = []
        for size in _WORLDS:
            where = f"{samples} samples, {batch} per step, {size} ranks"
            samplers = _world_of(answer, samples, batch, size)
            epochs = []
            for epoch in (0, 1, 0):
                for sampler in samplers:
                    sampler.set_epoch(epoch)
                epochs.append(_epoch_of(samplers, samples, batch, f"{where}, epoch {epoch}"))
            expect(epochs[0] == epochs[2], f"{where}: set_epoch(0) after epoch 1 must restore the order of epoch 0.")
            orders.append(epochs)
        for size, epochs in zip(_WORLDS, orders, strict=True):
            expect(
                epochs == orders[0],
                f"{samples} samples, {batch} per step: a step on {size} ranks contains different samples than on 1 "
                "rank. First take the next samples of one common order, then split them.",
            )
        if samples > 20:
            other = _epoch_of(_world_of(answer, samples, batch, 1, seed=6), samples, batch, "another seed")
            expect(orders[0][0] != orders[0][1], "Epoch 0 and epoch 1 must have different orders, got the same order.")
            expect(orders[0][0] != other, "Two seeds must give different orders, got the same order.")


def _after(answer: Answer, samples: int, batch: int, size: int, epoch: int, done: int) -> list[State]:
    """Return each rank's state after `done` steps of an epoch, taken inside the loop as for a checkpoint."""
    states = []
    for sampler in _world_of(answer, samples, batch, size):
        sampler.set_epoch(epoch)
        steps = iter(sampler)
        for _ in range(done):
            next(steps)
        states.append(sampler.state_dict())
        for _ in islice(steps, 1):  # continuing the run must not change a saved state
            pass
    return states


def _check_resuming(answer: Answer) -> int:
    checked = 0
    for samples, batch in _SHAPES[1:4]:
        whole = {}
        for epoch in (1, 2):
            samplers = _world_of(answer, samples, batch, 1)
            samplers[0].set_epoch(epoch)
            whole[epoch] = [sorted(step) for step in _steps_left(samplers[0], "1 rank")]
        for size, done in product(_WORLDS, range(len(whole[1]) + 1)):
            states = _after(answer, samples, batch, size, 1, done)
            where = f"{samples} samples, {batch} per step, after {done} steps of epoch 1 on {size} ranks"
            saved = _as_json(states[0], where)
            expect(len(saved) < 100, f"{where}: the state is {len(saved)} characters long. Two numbers are enough.")
            for rank, state in enumerate(states):
                expect(
                    state == states[0],
                    f"{where}: rank 0 saves {states[0]}, but rank {rank} saves {state}. Count the samples that all "
                    "ranks have taken: then one state fits every rank, and every number of ranks.",
                )
            for later in _WORLDS:
                _check_resumed(answer, (samples, batch, later), json.loads(saved), done, whole, where)
                checked += 1
    return checked


def _as_json(state: State, where: str) -> str:
    expect(state is not None, f"{where}: state_dict() must return a dict, got None.")
    try:
        return json.dumps(state)
    except TypeError as error:
        raise WrongAnswerError(f"{where}: the state must contain plain numbers only. {error}") from None


def _check_resumed(
    answer: Answer, shape: tuple[int, int, int], state: State, done: int, whole: dict[int, list[list[int]]], where: str
) -> None:
    """Check new samplers that resume from `state`, finish epoch 1, and run epoch 2."""
    samples, batch, size = shape
    where, left = f"{where}, resumed on {size} ranks", whole[1][done:]
    for note in ("", " The training loop called set_epoch(1) after load_state_dict, although it is epoch 1 already."):
        samplers = _world_of(answer, samples, batch, size)
        for sampler in samplers:
            sampler.load_state_dict(state)
            if note:
                sampler.set_epoch(1)
        lengths = [_length(sampler, where) for sampler in samplers]
        parts = [_steps_left(sampler, where) for sampler in samplers]
        found = [sorted(chain(*step)) for step in zip_longest(*parts, fillvalue=())]
        if found != left:
            raise WrongAnswerError(f"{where}: {_difference(found, whole, done)}{note}")
        made = [len(steps) for steps in parts]
        expect(set(made) == {len(left)}, f"{where}: every rank must yield {len(left)} steps, got {made}.")
        expect(
            lengths == [len(left)] * size, f"{where}: len() must be {len(left)}, the remaining steps, got {lengths}."
        )
    for sampler in samplers:
        sampler.set_epoch(2)
    parts = [_steps_left(sampler, where) for sampler in samplers]
    found = [sorted(chain(*step)) for step in zip_longest(*parts, fillvalue=())]
    expect(
        found == whole[2],
        f"{where}: the epoch after the resumed one must have {len(whole[2])} steps with {samples} samples in the order "
        f"of epoch 2, got {len(found)} steps with {sum(map(len, found))} samples. set_epoch must start a new epoch at "
        "its first sample.",
    )


def _difference(found: list[list[int]], whole: dict[int, list[list[int]]], done: int) -> str:
    if done and found == whole[1]:
        return "the epoch starts over."
    taken, got = set(chain(*whole[1][:done])), list(chain(*found))
    if again := sorted(taken & set(got)):
        return f"samples {again[:5]} were taken before, and are yielded again."
    if lost := sorted(set(chain(*whole[1])) - taken - set(got)):
        return f"samples {lost[:5]} remain in this epoch, but no rank gets them."
    return f"the remaining steps must contain {whole[1][done:]} over all ranks, got {found}."


def _run_step_sampler(world: World, answer: Answer) -> tuple[int, list[list[int]]]:
    """Check the arithmetic on rank 0, then loop over a DataLoader on all ranks with an all-reduce in every step."""
    checked = 0
    if world.is_main:
        _check_epochs(answer)
        checked = _check_resuming(answer)
    torch.manual_seed(world.rank)  # as for dropout: the order must not depend on it
    samples, batch, state, seen = 19, 6, None, []
    for stop in (2, None):  # a crash after two steps, then the rest
        sampler = answer(samples, batch, world.rank, world.size, 5)
        if state is not None:
            sampler.load_state_dict(state)
        loader: Any = DataLoader(range(samples), batch_sampler=sampler, collate_fn=list)  # type: ignore[arg-type]
        for step in islice(loader, stop):
            all_reduce_sum(world, torch.tensor(float(len(step))))
            seen.append(step)
            state = sampler.state_dict()
    return checked, seen


def _test_step_sampler(answer: Answer) -> str:
    stuck = "A rank waits forever for the others, or your sampler never returns."
    ranks = on_ranks(_run_step_sampler, 2, answer, stuck=stuck, timeout=60)
    steps = [sorted(chain(*parts)) for parts in zip(*[seen for _, seen in ranks], strict=True)]
    expect(
        sorted(chain(*steps)) == list(range(19)),
        f"On 2 real ranks with different torch seeds, the steps must contain every sample once, got {steps}. All ranks "
        "must shuffle the same way, with a generator seeded only from `seed` and the epoch.",
    )
    return (
        f"Every epoch yields each sample once, and {ranks[0][0]} resumes on 1 to 4 ranks and one real loop are exact."
    )


class _StepSampler:
    def __init__(self, samples: int, batch: int, rank: int, size: int, seed: int) -> None:
        self.samples, self.batch, self.rank, self.size, self.seed = samples, batch, rank, size, seed
        self.epoch = self.taken = 0

    def __iter__(self) -> "Iterator[list[int]]":
        generator = torch.Generator().manual_seed(1000003 * self.seed + self.epoch)
        order = torch.randperm(self.samples, generator=generator).tolist()
        while self.taken < self.samples:
            step = order[self.taken : self.taken + self.batch]
            self.taken += len(step)
            yield step[self.rank :: self.size]

    def __len__(self) -> int:
        return (self.samples - self.taken + self.batch - 1) // self.batch

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self.taken = epoch, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.taken = state["epoch"], state["taken"]


class _PadsTheEnd(_StepSampler):
    def __iter__(self) -> Iterator[list[int]]:
        for step in _together(self):
            short = -len(step) % self.size
            yield (step + step[:1] * short)[self.rank :: self.size]


class _DropsTheEnd(_StepSampler):
    def __iter__(self) -> Iterator[list[int]]:
        for step in _together(self):
            if len(step) == self.batch:
                yield step[self.rank :: self.size]


class _LeavesOutEmptySteps(_StepSampler):
    def __iter__(self) -> Iterator[list[int]]:
        yield from filter(None, super().__iter__())


class _OwnPartFirst(_StepSampler):
    def __iter__(self) -> Iterator[list[int]]:
        own = [step[self.rank :: self.size] for step in _together(self)][::-1]
        yield from own[1:] + own[:1] if self.size > 1 else own


class _ForgetsTheEpoch(_StepSampler):
    def __iter__(self) -> Iterator[list[int]]:
        for step in _together(self, epoch=0):
            yield step[self.rank :: self.size]


class _SeededByTheRank(_StepSampler):
    def __iter__(self) -> Iterator[list[int]]:
        for step in _together(self, seed=torch.initial_seed() + self.seed):
            yield step[self.rank :: self.size]


class _CountsItsOwn(_StepSampler):
    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "taken": len(range(self.rank, self.taken, self.size))}


class _CountsSteps(_StepSampler):
    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "taken": -(-self.taken // self.batch)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.taken = state["epoch"], state["taken"] * (self.batch // self.size) * self.size


class _SetEpochStartsAnew(_StepSampler):
    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.taken = epoch, 0


class _KeepsItsPlace(_StepSampler):
    def __iter__(self) -> Iterator[list[int]]:
        if self.taken >= self.samples:
            self.taken = 0
        yield from super().__iter__()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class _SavesOnlyTheEpoch(_StepSampler):
    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "taken": 0}


class _HandsOutItsOwnState(_StepSampler):
    def state_dict(self) -> dict[str, int]:
        return vars(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.taken = state["epoch"], state["taken"]


class _LengthOfAWholeEpoch(_StepSampler):
    def __len__(self) -> int:
        return (self.samples + self.batch - 1) // self.batch


class _NoLength(_StepSampler):
    __len__ = None  # type: ignore[assignment]


class _NeverEnds(_StepSampler):
    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield from super().__iter__()
            self.taken = 0


def _together(sampler: _StepSampler, seed: int | None = None, epoch: int | None = None) -> Iterator[list[int]]:
    """Yield the remaining steps over all ranks as the right answer does, optionally with a different seed or epoch."""
    alone = _StepSampler(sampler.samples, sampler.batch, 0, 1, sampler.seed if seed is None else seed)
    alone.load_state_dict(sampler.state_dict() | ({} if epoch is None else {"epoch": epoch}))
    for step in alone:
        sampler.taken = alone.taken
        yield step


step_sampler = Exercise(
    task=(
        "StepSampler(samples, batch, rank, size, seed): iterate over the remaining steps of the epoch, each a list of "
        "this rank's sample indices; also write len(), set_epoch(epoch), state_dict() and load_state_dict(state)."
    ),
    test=_test_step_sampler,
    solution=_StepSampler,
    wrong={
        "pads the last step with copies": _PadsTheEnd,
        "drops the last, smaller step": _DropsTheEnd,
        "skips steps without a sample for this rank": _LeavesOutEmptySteps,
        "orders its steps differently from the other ranks": _OwnPartFirst,
        "shuffles every epoch the same way": _ForgetsTheEpoch,
        "shuffles by torch's seed, which differs between ranks": _SeededByTheRank,
        "counts the samples of its own rank": _CountsItsOwn,
        "counts steps, whose size depends on the world size": _CountsSteps,
        "starts over when set_epoch repeats the same epoch": _SetEpochStartsAnew,
        "keeps its position when a new epoch starts": _KeepsItsPlace,
        "saves the epoch only": _SavesOnlyTheEpoch,
        "returns its own __dict__, which keeps changing": _HandsOutItsOwnState,
        "returns the length of the whole epoch after a resume": _LengthOfAWholeEpoch,
        "has no length": _NoLength,
        "never ends": _NeverEnds,
    },
    hints=(
        "Keep two numbers: the epoch, and the number of its samples that all ranks together have taken.",
        "For all ranks, a step is order[taken : taken + batch]. This rank's part is [rank::size], which may be empty. "
        "Count the whole step before you yield.",
        "The order is torch.randperm(samples, generator=torch.Generator().manual_seed(...)), seeded with a number that "
        "depends only on the seed and the epoch.",
        "set_epoch is also called after a resume. What should it do if its epoch is the loaded one?",
    ),
)
