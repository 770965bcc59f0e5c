"""The exercises of 07_sharding_data: go on from a cursor, evaluate exactly and in step, find a worker's samples, and
write a sampler that goes on anywhere."""

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


def _hands(answer: Answer, order: Permutation, cursor: int, batch: int, size: int) -> list[list[list[int]]]:
    """The samples as [rank][step]. Raises `WrongAnswerError` where the answer yields anything else."""
    found = []
    for rank in range(size):
        steps = answer(order, cursor, batch, rank, size)
        expect(steps is not None, "Nothing came back. Yield this rank's samples of one step after another.")
        try:
            found.append([[int(sample) for sample in step] for step in steps])
        except TypeError as error:
            raise WrongAnswerError(
                f"Yield, for each step, a sequence of sample numbers; this is something else: {error}"
            ) from None
    return found


def _merged(hands: Sequence[Sequence[int]]) -> list[int]:
    """A step as it was before it was dealt out: every rank's first sample, every rank's second, ..."""
    longest = max(map(len, hands))
    return [hand[place] for place in range(longest) for hand in hands if place < len(hand)]


def _check_rest(answer: Answer, order: Permutation, cursor: int, batch: int, size: int) -> None:
    where = f"{order.samples} samples, batch {batch}, cursor {cursor}, {size} ranks"
    epoch, start = divmod(cursor, order.samples)
    whole = order.take(epoch * order.samples, order.samples).tolist()
    rest = whole[start:]
    expected = [rest[begin : begin + batch] for begin in range(0, len(rest), batch)]
    found = _hands(answer, order, cursor, batch, size)
    counts = Counter(sample for steps in found for hand in steps for sample in hand)
    again = sorted(set(counts) & set(whole[:start]))
    expect(not again, f"{where}: samples {again[:5]} were seen before the cursor, and come again.")
    strange = sorted(set(counts) - set(whole))
    expect(not strange, f"{where}: {strange[:5]} are not samples of these data.")
    missing = [sample for sample in rest if sample not in counts]
    expect(not missing, f"{where}: samples {missing[:5]} are left in this epoch, and no rank gets them.")
    twice = [sample for sample, count in counts.items() if count > 1]
    expect(not twice, f"{where}: samples {twice[:5]} come more than once.")
    lengths = {len(steps) for steps in found}
    expect(
        lengths == {len(expected)},
        f"{where}: {len(expected)} steps are left, for every rank; yours take {sorted(lengths)}. In a step without "
        "samples for this rank, yield an empty list: the other ranks wait for it.",
    )
    for number, want in enumerate(expected):
        got = [steps[number] for steps in found]
        expect(
            sorted(_merged(got)) == sorted(want),
            f"{where}: step {number} should have samples {want}, on all ranks together; yours have {got}. "
            "First take the samples of the step, then deal them to the ranks.",
        )
        sizes = [len(hand) for hand in got]
        expect(
            max(sizes) - min(sizes) <= 1,
            f"{where}: in step {number} the ranks get {sizes} samples. They should differ by one at most.",
        )


def _test_rest(answer: Answer) -> str:
    for samples, cursor, batch, size in [(24, 0, 6, 2), (24, 12, 6, 3), (22, 12, 6, 3), (22, 22 + 12, 6, 3)]:
        _check_rest(answer, Permutation(samples, seed=0), cursor, batch, size)
    for cursor in range(0, 50, 7):
        for size in (1, 2, 4):
            _check_rest(answer, Permutation(25, seed=1), cursor, 8, size)
    return "From every cursor and for every number of ranks: exactly the rest of the epoch, step by step."


def _rest_of_epoch(order: Permutation, cursor: int, batch: int, rank: int, size: int) -> "Iterator[Sequence[int]]":
    end = (cursor // order.samples + 1) * order.samples
    while cursor < end:
        count = min(batch, end - cursor)  # the last one may be smaller
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
        "rest_of_epoch(order, cursor, batch, rank, size): yield, step after step, the samples that this rank gets in "
        "what is left of the epoch after `cursor` samples. The last step may be a smaller one."
    ),
    test=_test_rest,
    solution=_rest_of_epoch,
    wrong={
        "begins the epoch again": _from_the_start,
        "reads on into the next epoch": _into_the_next_epoch,
        "drops the last, smaller step": _drops_the_last,
        "deals first and slices then": _deals_first,
        "gives every rank everything": _not_dealt,
        "forgets which epoch it is": _always_epoch_zero,
        "cuts the last step into pieces that are unequal": _in_pieces,
    },
    hints=(
        "The cursor counts samples from the start of epoch 0. This epoch ends at the next multiple of order.samples.",
        "order.take(cursor, count) gives the next `count` samples. Which count has the last step?",
        "count = min(batch, end - cursor); then deal: order.take(cursor, count)[rank::size].",
    ),
)

# -------------------------------------------------------------------------------------------------- 2. evaluate in step

_SETS = (8, 7, 5, 1)  # numbers of samples, for 3 ranks: divisible or not, and too few for all


def _loss(sample: int) -> float:
    return float((sample * 7 + 3) % 11)


def _run_evaluate(world: World, answer: Answer) -> list[tuple[object, list[list[int]]]]:
    found = []
    for samples in _SETS:
        called: list[int] = []

        def loss_of(sample: int, samples: int = samples, called: list[int] = called) -> torch.Tensor:
            expect(0 <= sample < samples, f"loss_of({sample}) was called; the samples are 0 to {samples - 1}, so pad.")
            called.append(int(sample))
            return torch.tensor(_loss(sample))

        result = answer(world, samples, loss_of)
        found.append((float(result) if isinstance(result, (float, int, torch.Tensor)) else result, called))
    return [(result, all_gather(world, called)) for result, called in found]


def _test_evaluate(answer: Answer) -> str:
    stuck = "Some rank waits for the others for ever. Every rank must enter the same collectives, equally often."
    ranks = on_ranks(_run_evaluate, 3, answer, stuck=stuck, timeout=60)
    for number, samples in enumerate(_SETS):
        calls = ranks[0][number][1]
        times = [len(called) for called in calls]
        expect(
            len(set(times)) == 1,
            f"With {samples} samples on 3 ranks, they call loss_of {times} times. It has a collective in it: the ranks "
            "that call it more often would wait for ever. Pad with copies until all have equally many.",
        )
        missing = sorted(set(range(samples)) - {sample for called in calls for sample in called})
        expect(not missing, f"With {samples} samples on 3 ranks, nobody evaluates samples {missing}.")
        fewest = -(-samples // 3)
        expect(
            times[0] == fewest,
            f"With {samples} samples, {fewest} calls on each of 3 ranks are enough; yours are {times[0]}.",
        )
        mean = sum(map(_loss, range(samples))) / samples
        for rank, results in enumerate(ranks):
            got = results[number][0]
            expect(isinstance(got, float), f"Return the mean loss, a number; rank {rank} returned {got!r}.")
            assert isinstance(got, float)
            if abs(got - mean) < 1e-4:
                continue
            copies = 3 * times[0] - samples
            evaluated = [_loss(sample) for called in calls for sample in called]
            found = "something else"
            if abs(got - sum(evaluated) / len(evaluated)) < 1e-4:
                found = f"the mean with {copies} copies counted too"
            raise WrongAnswerError(
                f"The mean loss of {samples} samples is {mean:.4f}. Rank {rank} returned {got:.4f}: {found}."
            )
    return "All ranks call equally often, each sample counts once, and every rank has the same, right mean."


def _evaluate(world: World, samples: int, loss_of: "Callable[[int], torch.Tensor]") -> float:
    loss_sum = torch.tensor(0.0)
    for first in range(0, samples, world.size):
        mine = first + world.rank
        loss = loss_of(mine if mine < samples else 0)  # a copy, so that all ranks call loss_of equally often
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
        "samples - 1. All ranks must call loss_of equally often, and share the work."
    ),
    test=_test_evaluate,
    solution=_evaluate,
    wrong={
        "counts the copies": _counts_copies,
        "makes no call when it has no sample left": _leaves_out_copies,
        "returns the mean of its own samples": _own_mean,
        "takes the mean of unequal means": _mean_of_means,
        "lets every rank do everything": _everyone_everything,
        "drops what does not divide": _drops_the_tail,
        "goes past the end of the data": _past_the_end,
    },
    hints=(
        "Pad the calls, not the mean: evaluate a copy, and throw its loss away.",
        "In round k, this rank's sample is k * world.size + world.rank. If there is none, evaluate any other.",
        "Add up the losses of real samples only, dist.all_reduce the sum over the ranks, and divide by `samples`.",
    ),
)

# ------------------------------------------------------------------------------------------------- 3. the worker's part


def _all_parts(answer: Answer, samples: int, size: int, workers: int) -> list[list[list[int]]]:
    """The samples as [rank][worker]."""
    parts = [[answer(samples, rank, size, worker, workers) for worker in range(workers)] for rank in range(size)]
    for part in [part for rank in parts for part in rank]:
        expect(part is not None, "Nothing came back. Return the sample numbers of this worker.")
    return [[[int(sample) for sample in part] for part in rank] for rank in parts]


def _test_worker(answer: Answer) -> str:
    for samples, size, workers in [(12, 2, 2), (12, 1, 3), (12, 3, 1), (13, 2, 3), (7, 4, 2), (2, 2, 2)]:
        where = f"{samples} samples, {size} ranks with {workers} workers each"
        parts = _all_parts(answer, samples, size, workers)
        counts = Counter(sample for rank in parts for part in rank for sample in part)
        missing = sorted(set(range(samples)) - set(counts))
        expect(not missing, f"{where}: nobody reads samples {missing[:6]}. The parts are {parts}.")
        twice = sorted(sample for sample, count in counts.items() if count > 1)
        expect(not twice, f"{where}: samples {twice[:6]} are read more than once. The parts are {parts}.")
        strange = sorted(set(counts) - set(range(samples)))
        expect(not strange, f"{where}: {strange[:6]} are not samples of these data.")
        of_ranks = [sum(map(len, rank)) for rank in parts]
        expect(
            max(of_ranks) - min(of_ranks) <= 1,
            f"{where}: the ranks get {of_ranks} samples. First share out among ranks, then among a rank's workers, so "
            "that no rank has more than one sample more than another.",
        )
        for rank, own in enumerate(parts):
            lengths = [len(part) for part in own]
            expect(
                max(lengths) - min(lengths) <= 1,
                f"{where}: the workers of rank {rank} get {lengths} samples. They should differ by one at most.",
            )
    return "Every sample is read by exactly one worker of one rank, and the work is shared out evenly."


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
        "own_samples(samples, rank, size, worker, workers): return the sample numbers that worker `worker` of "
        "`workers` on rank `rank` of `size` reads, so that all are read once."
    ),
    test=_test_worker,
    solution=_own_samples,
    wrong={
        "applies the offset of the rank twice": _offset_twice,
        "lets every worker read all of the rank": _no_workers,
        "forgets the ranks": _no_ranks,
        "strides over the workers of all ranks": _stride_of_all,
        "gives rank 0 too much of a small data set": _workers_of_all,
    },
    hints=(
        "Print who gets what, for 12 samples, 2 ranks and 2 workers. Who has nothing?",
        "[rank::size] has already taken this rank's samples. What is left to share out, and among whom?",
        "What is left belongs to this rank alone: share it out among its workers, [worker::workers].",
    ),
)

# ----------------------------------------------------------------------------------- 4. a sampler of steps that goes on

_WORLDS = (1, 2, 3, 4)
_SHAPES = ((24, 6), (23, 6), (19, 6), (7, 4), (5, 8), (1, 4))  # samples, and samples a step
_PLENTY = 60  # steps; an answer that yields more in an epoch never stops

State = dict[str, Any]


def _steps_left(sampler: Any, where: str) -> list[list[int]]:
    """What an answer's sampler yields. Raises `WrongAnswerError` where that is no list of numbers, or has no end."""
    try:
        steps = list(islice(iter(sampler), _PLENTY))
    except TypeError as error:
        raise WrongAnswerError(
            f"{where}: iterate over the steps that are left, for instance with yield. {error}"
        ) from None
    expect(len(steps) < _PLENTY, f"{where}: it yields {_PLENTY} steps and more. End where the epoch ends.")
    try:
        return [[int(number) for number in step] for step in steps]
    except TypeError:
        raise WrongAnswerError(
            f"{where}: yield, for each step, the list of this rank's numbers; the first that came is {steps[0]!r}."
        ) from None


def _length(sampler: Any, where: str) -> int:
    try:
        return len(sampler)
    except TypeError as error:
        raise WrongAnswerError(f"{where}: len() is the number of steps that are left. {error}") from None


def _world_of(answer: Answer, samples: int, batch: int, size: int, seed: int = 5) -> list[Any]:
    return [answer(samples, batch, rank, size, seed) for rank in range(size)]


def _epoch_of(samplers: Sequence[Any], samples: int, batch: int, where: str) -> list[list[int]]:
    """A whole epoch: the sorted samples of each step, over all ranks. Checks that each sample comes once."""
    count = -(-samples // batch)
    lengths = [_length(sampler, where) for sampler in samplers]
    parts = [_steps_left(sampler, where) for sampler in samplers]
    made = [len(steps) for steps in parts]
    advice = "The last step may be a smaller one."
    if len(set(made)) > 1:
        advice = "In a step without a sample for this rank, yield an empty list: the others wait for it."
    expect(
        made == [count] * len(made),
        f"{where}: an epoch has {count} steps, on every rank; yours have {made}. {advice}",
    )
    seen = Counter(number for steps in parts for step in steps for number in step)
    twice = sorted(number for number, times in seen.items() if times > 1)
    expect(not twice, f"{where}: samples {twice[:5]} come more than once in one epoch. Nothing is made up with copies.")
    missing = sorted(set(range(samples)) - set(seen))
    expect(not missing, f"{where}: samples {missing[:5]} are given to no rank in this epoch.")
    strange = sorted(set(seen) - set(range(samples)))
    expect(not strange, f"{where}: {strange[:5]} are not samples of these data.")
    expect(lengths == made, f"{where}: len() is the number of steps that are left, {count}; yours is {lengths}.")
    for number, step in enumerate(zip(*parts, strict=True)):
        sizes = [len(part) for part in step]
        expect(
            sum(sizes) == min(batch, samples - batch * number) and max(sizes) - min(sizes) <= 1,
            f"{where}: step {number} has {sizes} samples on the ranks. All together have {batch}, or what is left of "
            "the epoch, and no rank has more than one sample more than another.",
        )
    return [sorted(chain(*step)) for step in zip(*parts, strict=True)]


def _check_epochs(answer: Answer) -> None:
    for samples, batch in _SHAPES:
        orders = []
        for size in _WORLDS:
            where = f"{samples} samples, {batch} a step, {size} ranks"
            samplers = _world_of(answer, samples, batch, size)
            epochs = []
            for epoch in (0, 1, 0):
                for sampler in samplers:
                    sampler.set_epoch(epoch)
                epochs.append(_epoch_of(samplers, samples, batch, f"{where}, epoch {epoch}"))
            expect(epochs[0] == epochs[2], f"{where}: set_epoch(0), said after epoch 1, should bring back its order.")
            orders.append(epochs)
        for size, epochs in zip(_WORLDS, orders, strict=True):
            expect(
                epochs == orders[0],
                f"{samples} samples, {batch} a step: {size} ranks have other samples in a step than 1 rank. Take the "
                "next samples of one order first, then share them out.",
            )
        if samples > 20:
            other = _epoch_of(_world_of(answer, samples, batch, 1, seed=6), samples, batch, "another seed")
            expect(orders[0][0] != orders[0][1], "Epoch 0 and epoch 1 have the same order.")
            expect(orders[0][0] != other, "Two seeds give the same order.")


def _after(answer: Answer, samples: int, batch: int, size: int, epoch: int, done: int) -> list[State]:
    """The state on each rank after `done` steps of an epoch, taken inside the loop, as a checkpoint is."""
    states = []
    for sampler in _world_of(answer, samples, batch, size):
        sampler.set_epoch(epoch)
        steps = iter(sampler)
        for _ in range(done):
            next(steps)
        states.append(sampler.state_dict())
        for _ in islice(steps, 1):  # the run goes on, and must not change a state that has been saved
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
            where = f"{samples} samples, {batch} a step, {done} steps of epoch 1 made by {size} ranks"
            told = _as_json(states[0], where)
            expect(len(told) < 100, f"{where}: the state is {len(told)} characters long. Two numbers are enough.")
            for rank, state in enumerate(states):
                expect(
                    state == states[0],
                    f"{where}: rank 0 saves {states[0]} and rank {rank} saves {state}. Count what all ranks have "
                    "taken: then one state is right for every rank, also for one that was not there.",
                )
            for later in _WORLDS:
                _check_resumed(answer, (samples, batch, later), json.loads(told), done, whole, where)
                checked += 1
    return checked


def _as_json(state: State, where: str) -> str:
    expect(state is not None, f"{where}: state_dict() returned nothing.")
    try:
        return json.dumps(state)
    except TypeError as error:
        raise WrongAnswerError(f"{where}: save plain numbers, which every file format can hold. {error}") from None


def _check_resumed(
    answer: Answer, shape: tuple[int, int, int], state: State, done: int, whole: dict[int, list[list[int]]], where: str
) -> None:
    """A fresh world goes on from `state`, to the end of epoch 1 and through epoch 2."""
    samples, batch, size = shape
    where, left = f"{where}, resumed on {size} ranks", whole[1][done:]
    for told in ("", " The loop has called set_epoch(1) after load_state_dict, as loops do: it is that epoch already."):
        samplers = _world_of(answer, samples, batch, size)
        for sampler in samplers:
            sampler.load_state_dict(state)
            if told:
                sampler.set_epoch(1)
        lengths = [_length(sampler, where) for sampler in samplers]
        parts = [_steps_left(sampler, where) for sampler in samplers]
        found = [sorted(chain(*step)) for step in zip_longest(*parts, fillvalue=())]
        if found != left:
            raise WrongAnswerError(f"{where}: {_difference(found, whole, done)}{told}")
        made = [len(steps) for steps in parts]
        expect(set(made) == {len(left)}, f"{where}: the ranks make {made} steps, {len(left)} are left.")
        expect(lengths == [len(left)] * size, f"{where}: {len(left)} steps are left; len() says {lengths}.")
    for sampler in samplers:
        sampler.set_epoch(2)
    parts = [_steps_left(sampler, where) for sampler in samplers]
    found = [sorted(chain(*step)) for step in zip_longest(*parts, fillvalue=())]
    expect(
        found == whole[2],
        f"{where}: the epoch after the resumed one has {len(found)} steps, {sum(map(len, found))} samples, not "
        f"{len(whole[2])} steps, {samples} samples, in their order. set_epoch begins a new epoch at its first sample.",
    )


def _difference(found: list[list[int]], whole: dict[int, list[list[int]]], done: int) -> str:
    if done and found == whole[1]:
        return "the epoch begins again."
    taken, got = set(chain(*whole[1][:done])), list(chain(*found))
    if again := sorted(taken & set(got)):
        return f"samples {again[:5]} were taken before, and come again."
    if lost := sorted(set(chain(*whole[1])) - taken - set(got)):
        return f"samples {lost[:5]} are left in this epoch, and no rank gets them."
    return f"the steps that are left should hold {whole[1][done:]}, on all ranks together; they hold {found}."


def _run_step_sampler(world: World, answer: Answer) -> tuple[int, list[list[int]]]:
    """The arithmetic, on rank 0, then a real loop over a DataLoader on all ranks, which enters an all-reduce a step."""
    checked = 0
    if world.is_main:
        _check_epochs(answer)
        checked = _check_resuming(answer)
    torch.manual_seed(world.rank)  # as dropout wants it: the order must not depend on it
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
    stuck = "Some rank waits for the others for ever, or your sampler never comes back."
    ranks = on_ranks(_run_step_sampler, 2, answer, stuck=stuck, timeout=60)
    steps = [sorted(chain(*parts)) for parts in zip(*[seen for _, seen in ranks], strict=True)]
    expect(
        sorted(chain(*steps)) == list(range(19)),
        f"On 2 real ranks, each with torch seeded in its own way, the steps hold {steps}: not every sample once. All "
        "ranks must shuffle alike, with a generator made from `seed` and the epoch, and nothing else.",
    )
    return f"Every sample once an epoch; {ranks[0][0]} resumes on 1 to 4 ranks and one in a real loop went on exactly."


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
    """The steps of all ranks together that are left, as the right answer counts them; or shuffled as for another seed
    or epoch."""
    alone = _StepSampler(sampler.samples, sampler.batch, 0, 1, sampler.seed if seed is None else seed)
    alone.load_state_dict(sampler.state_dict() | ({} if epoch is None else {"epoch": epoch}))
    for step in alone:
        sampler.taken = alone.taken
        yield step


step_sampler = Exercise(
    task=(
        "StepSampler(samples, batch, rank, size, seed): iterate over the steps left of the epoch, each the list of "
        "this rank's numbers; len(), set_epoch(epoch), state_dict() and load_state_dict(state) beside that."
    ),
    test=_test_step_sampler,
    solution=_StepSampler,
    wrong={
        "makes the last step up with copies": _PadsTheEnd,
        "drops the last, smaller step": _DropsTheEnd,
        "leaves out steps without a sample for this rank": _LeavesOutEmptySteps,
        "takes its steps in an order of its own": _OwnPartFirst,
        "shuffles alike in each epoch": _ForgetsTheEpoch,
        "shuffles by torch's seed, which differs between ranks": _SeededByTheRank,
        "counts the samples of its own rank": _CountsItsOwn,
        "counts steps, of another size in another world": _CountsSteps,
        "begins again when set_epoch says the same epoch": _SetEpochStartsAnew,
        "keeps its place when a new epoch begins": _KeepsItsPlace,
        "saves the epoch alone": _SavesOnlyTheEpoch,
        "hands out all of itself, which goes on changing": _HandsOutItsOwnState,
        "len() of the whole epoch after a resume": _LengthOfAWholeEpoch,
        "has no length": _NoLength,
        "never ends": _NeverEnds,
    },
    hints=(
        "Keep two numbers: the epoch, and how many of its samples all ranks together have taken.",
        "A step is order[taken : taken + batch], for all ranks; this rank's part of it is [rank::size], which may be "
        "empty. Count the whole step before you yield.",
        "The order: torch.randperm(samples, generator=torch.Generator().manual_seed(...)), of a number made from seed "
        "and epoch, and from nothing else.",
        "set_epoch is called after a resume, too. What should it do if the epoch is the one that was loaded?",
    ),
)
