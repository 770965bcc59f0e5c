"""Exercises on a shard check, exact evaluation, and a resumable sampler, for notebook 07_sharding_data."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from itertools import chain, islice, product, zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from ddp_tutorial.collectives import all_gather, all_reduce_sum
from ddp_tutorial.exercises import Answer, Exercise, WrongAnswerError, expect, on_ranks
from ddp_tutorial.world import World

# ------------------------------------------------------------------------------------- 1. a guard against wrong shards

# Description, and the indices that each of 3 ranks reads from 7 samples.
_SHARDS: tuple[tuple[str, list[list[int]]], ...] = (
    ("each sample is read once", [[0, 3, 6], [1, 4], [2, 5]]),
    ("each sample is read once, in a different order", [[6, 5], [4, 0, 3], [2, 1]]),
    ("rank 2 has no samples, and each sample is read once", [[0, 1, 2, 3], [4, 5, 6], []]),
    ("every rank reads all samples", [list(range(7))] * 3),
    ("samples 0 and 1 are repeated, as in DistributedSampler", [[0, 3, 6], [1, 4, 0], [2, 5, 1]]),
    ("sample 6 is skipped", [[0, 3], [1, 4], [2, 5]]),
    ("sample 0 is repeated and sample 6 is skipped", [[0, 3], [1, 4, 0], [2, 5]]),
    ("rank 1 reads sample 4 twice", [[0, 3, 6], [1, 4, 4], [2, 5]]),
    ("rank 0 reads sample 7 instead of sample 6", [[0, 3, 7], [1, 4], [2, 5]]),
)
_VALID = 3  # the number of correct cases, which come first


def _run_check(world: World, answer: Answer) -> list[tuple[bool, object]]:
    """For each case, return whether the answer raised `ValueError` on this rank, and the answer's result."""
    found: list[tuple[bool, object]] = []
    for _, shards in _SHARDS:
        indices = list(shards[world.rank])
        try:
            result = answer(world, indices, 7)
        except ValueError:
            found.append((True, None))
        else:
            found.append((False, result))
        expect(indices == shards[world.rank], "check_shards must not change the list `indices`.")
        dist.barrier()  # simulates the next collective of the training
    return found


def _test_check(answer: Answer) -> str:
    stuck = "A rank waits forever for the others. Every rank must enter the same collectives, and then raise or return."
    ranks = on_ranks(_run_check, 3, answer, stuck=stuck, timeout=60)
    for number, (name, shards) in enumerate(_SHARDS):
        raised = [rank[number][0] for rank in ranks]
        who = [rank for rank, each in enumerate(raised) if each]
        where = f"7 samples, the ranks read {shards}: {name}"
        if number < _VALID:
            expect(not who, f"{where}. No rank must raise ValueError, but ranks {who} do.")
        else:
            expect(who != [], f"{where}. Every rank must raise ValueError, but no rank does.")
            expect(
                all(raised),
                f"{where}. Every rank must raise ValueError, but only ranks {who} do. The other ranks would continue "
                "and wait for them in the next collective.",
            )
    return "Every rank raises ValueError for wrong shards, and no rank raises it for correct shards."


def _check_shards(world: World, indices: Sequence[int], samples: int) -> None:
    shards: list[Any] = [None] * world.size
    dist.all_gather_object(shards, list(indices))
    if sorted(chain(*shards)) != list(range(samples)):  # the same on every rank, so all ranks raise or none does
        raise ValueError(f"each of the {samples} samples must occur exactly once across the shards, got {shards}")


def _checks_counts(world: World, indices: Sequence[int], samples: int) -> None:
    if sum(all_gather(world, len(indices))) != samples:
        raise ValueError


def _checks_the_union(world: World, indices: Sequence[int], samples: int) -> None:
    if set(chain(*all_gather(world, list(indices)))) != set(range(samples)):
        raise ValueError


def _checks_for_copies(world: World, indices: Sequence[int], samples: int) -> None:
    if max(Counter(chain(*all_gather(world, list(indices)))).values()) > 1:
        raise ValueError


def _checks_its_own_indices(world: World, indices: Sequence[int], samples: int) -> None:
    own = set(indices)
    if len(own) < len(indices) or not own <= set(range(samples)):
        raise ValueError


def _compares_sets_of_ranks(world: World, indices: Sequence[int], samples: int) -> None:
    shards = [set(shard) for shard in all_gather(world, list(indices))]
    if sum(map(len, shards)) != samples or set().union(*shards) != set(range(samples)):
        raise ValueError  # misses a sample that one rank reads twice


def _raises_on_rank_zero(world: World, indices: Sequence[int], samples: int) -> None:
    wrong = sorted(chain(*all_gather(world, list(indices)))) != list(range(samples))
    if wrong and world.is_main:
        raise ValueError


def _expects_an_order(world: World, indices: Sequence[int], samples: int) -> None:
    if all_gather(world, list(indices)) != [list(range(rank, samples, world.size)) for rank in range(world.size)]:
        raise ValueError


def _expects_equal_lengths(world: World, indices: Sequence[int], samples: int) -> None:
    shards = all_gather(world, list(indices))
    if len(set(map(len, shards))) > 1 or sorted(chain(*shards)) != list(range(samples)):
        raise ValueError


def _returns_a_bool(world: World, indices: Sequence[int], samples: int) -> bool:
    return sorted(chain(*all_gather(world, list(indices)))) == list(range(samples))


check_shards = Exercise(
    task=(
        "check_shards(world, indices, samples): raise ValueError on every rank unless the ranks' indices together are "
        "0 to samples - 1, each exactly once."
    ),
    test=_test_check,
    solution=_check_shards,
    wrong={
        "compares the number of samples only": _checks_counts,
        "compares the union only": _checks_the_union,
        "looks for copies only": _checks_for_copies,
        "looks at its own indices only": _checks_its_own_indices,
        "ignores copies within a rank": _compares_sets_of_ranks,
        "raises on rank 0 only": _raises_on_rank_zero,
        "accepts a single order only": _expects_an_order,
        "rejects shards of different lengths": _expects_equal_lengths,
        "returns the result instead of raising": _returns_a_bool,
    },
    hints=(
        "A rank knows only its own indices. Which collective sends the indices of all ranks to every rank?",
        "dist.all_gather_object(shards, indices) fills a list of world.size elements on every rank.",
        "Sort all indices and compare them with list(range(samples)). Every rank computes the same result.",
    ),
)

# -------------------------------------------------------------------------------------------------- 2. evaluate exactly

_SETS = (8, 7, 5, 1)  # sample counts for 3 ranks: not divisible by 3, and fewer samples than ranks


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
    stuck = "A rank waits forever for the others. Every rank must enter the same collectives the same number of times."
    ranks = on_ranks(_run_evaluate, 3, answer, stuck=stuck, timeout=60)
    for number, samples in enumerate(_SETS):
        calls = ranks[0][number][1]
        times = [len(called) for called in calls]
        expect(
            len(set(times)) == 1,
            f"With {samples} samples, the 3 ranks must call loss_of the same number of times, got {times} calls. "
            "loss_of contains a collective, so a rank with more calls would wait forever. Pad with repeated samples.",
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
                found = f" This mean includes the {copies} padding calls, too."
            raise WrongAnswerError(
                f"The mean loss of {samples} samples must be {mean:.4f}, got {got:.4f} on rank {rank}.{found}"
            )
    return "All ranks make the same number of calls, each sample counts once, and every rank returns the correct mean."


def _evaluate(world: World, samples: int, loss_of: "Callable[[int], torch.Tensor]") -> float:
    loss_sum = torch.tensor(0.0)
    for first in range(0, samples, world.size):
        mine = first + world.rank
        loss = loss_of(mine if mine < samples else 0)  # padding: all ranks must make the same number of calls
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
        "evaluate(world, samples, loss_of): return, on every rank, the mean of loss_of(sample) over the samples 0 "
        "to samples - 1. Split the work between the ranks. All ranks must make the same number of calls to loss_of."
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
        "Pad the calls, not the mean: evaluate a repeated sample, and discard its loss.",
        "In round k, this rank's sample is k * world.size + world.rank. If this sample does not exist, evaluate "
        "a different sample.",
        "Sum the losses of real samples only, dist.all_reduce the sum over the ranks, and divide by `samples`.",
    ),
)

# ------------------------------------------------------------------------------------------ 3. a resumable step sampler

_WORLDS = (1, 2, 3, 4)
_SHAPES = ((24, 6), (23, 6), (19, 6), (7, 4), (5, 8), (1, 4))  # samples, and samples per step
_MANY = 60  # an answer that yields this many steps counts as never stopping

State = dict[str, Any]


def _steps_left(sampler: Any, where: str) -> list[list[int]]:
    """Return the steps that a sampler yields.

    Raises:
        WrongAnswerError: If a step is not a list of numbers, or if the sampler never stops.
    """
    try:
        steps = list(islice(iter(sampler), _MANY))
    except TypeError as error:
        raise WrongAnswerError(
            f"{where}: __iter__ must return an iterator over the remaining steps, for example by using yield. {error}"
        ) from None
    expect(len(steps) < _MANY, f"{where}: the sampler yields at least {_MANY} steps. Stop at the end of the epoch.")
    try:
        return [[int(number) for number in step] for step in steps]
    except TypeError:
        raise WrongAnswerError(
            f"{where}: each step must be a list of this rank's sample indices, got {steps[0]!r} as the first step."
        ) from None


def _length(sampler: Any, where: str) -> int:
    try:
        return len(sampler)
    except TypeError as error:
        raise WrongAnswerError(f"{where}: len() must return the number of remaining steps. {error}") from None


def _world_of(answer: Answer, samples: int, batch: int, size: int, seed: int = 5) -> list[Any]:
    return [answer(samples, batch, rank, size, seed) for rank in range(size)]


def _epoch_of(samplers: Sequence[Any], samples: int, batch: int, where: str) -> list[list[int]]:
    """Check that every sample occurs once in an epoch, and return the sorted samples of each step over all ranks."""
    count = -(-samples // batch)
    lengths = [_length(sampler, where) for sampler in samplers]
    parts = [_steps_left(sampler, where) for sampler in samplers]
    made = [len(steps) for steps in parts]
    advice = "The last step may be smaller."
    if len(set(made)) > 1:
        advice = (
            "In a step without a sample for this rank, yield an empty list, because the other ranks wait for this rank."
        )
    expect(
        made == [count] * len(made),
        f"{where}: an epoch must have {count} steps on every rank, got {made}. {advice}",
    )
    seen = Counter(number for steps in parts for step in steps for number in step)
    twice = sorted(number for number, times in seen.items() if times > 1)
    expect(
        not twice, f"{where}: samples {twice[:5]} occur more than once in one epoch. Do not pad with repeated samples."
    )
    missing = sorted(set(range(samples)) - set(seen))
    expect(not missing, f"{where}: no rank reads samples {missing[:5]} in this epoch.")
    strange = sorted(set(seen) - set(range(samples)))
    expect(not strange, f"{where}: indices {strange[:5]} are out of range.")
    expect(lengths == made, f"{where}: len() must be the number of remaining steps, {count}, got {lengths}.")
    for number, step in enumerate(zip(*parts, strict=True)):
        sizes = [len(part) for part in step]
        expect(
            sum(sizes) == min(batch, samples - batch * number) and max(sizes) - min(sizes) <= 1,
            f"{where}: step {number} must contain {min(batch, samples - batch * number)} samples over all ranks, and "
            f"the ranks' sample counts must differ by at most one, got {sizes}.",
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
                f"{samples} samples, {batch} per step: a step on {size} ranks must contain the same samples as a "
                "step on 1 rank. First take the next samples from a common order, then split them between the ranks.",
            )
        if samples > 20:
            other = _epoch_of(_world_of(answer, samples, batch, 1, seed=6), samples, batch, "a different seed")
            expect(orders[0][0] != orders[0][1], "Epoch 0 and epoch 1 must have different orders, got the same order.")
            expect(orders[0][0] != other, "Different seeds must produce different orders, got the same order.")


def _after(answer: Answer, samples: int, batch: int, size: int, epoch: int, done: int) -> list[State]:
    """Return the state that each rank saves inside the loop, after `done` steps of an epoch."""
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
            expect(
                len(saved) < 100,
                f"{where}: the state must be shorter than 100 characters, got {len(saved)} characters. Two numbers "
                "are enough.",
            )
            for rank, state in enumerate(states):
                expect(
                    state == states[0],
                    f"{where}: all ranks must save the same state, but rank 0 saves {states[0]}, and rank {rank} "
                    f"saves {state}. Count the samples that all ranks together have taken, so that the state is "
                    "valid for any rank and any number of ranks.",
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
        raise WrongAnswerError(f"{where}: the state must contain only plain numbers. {error}") from None


def _check_resumed(
    answer: Answer, shape: tuple[int, int, int], state: State, done: int, whole: dict[int, list[list[int]]], where: str
) -> None:
    """Check new samplers that resume from `state`, finish epoch 1, and run epoch 2."""
    samples, batch, size = shape
    where, left = f"{where}, resumed on {size} ranks", whole[1][done:]
    for note in ("", " The training loop called set_epoch(1) after load_state_dict, although the epoch was already 1."):
        samplers = _world_of(answer, samples, batch, size)
        for sampler in samplers:
            sampler.load_state_dict(deepcopy(state))
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
            lengths == [len(left)] * size,
            f"{where}: len() must be {len(left)}, the number of remaining steps, got {lengths}.",
        )
    for sampler in samplers:
        sampler.set_epoch(2)
    parts = [_steps_left(sampler, where) for sampler in samplers]
    found = [sorted(chain(*step)) for step in zip_longest(*parts, fillvalue=())]
    expect(
        found == whole[2],
        f"{where}: the epoch after the resumed epoch must have {len(whole[2])} steps with {samples} samples in the "
        f"order of epoch 2, got {len(found)} steps with {sum(map(len, found))} samples. set_epoch must start a new "
        "epoch at its first sample.",
    )


def _difference(found: list[list[int]], whole: dict[int, list[list[int]]], done: int) -> str:
    if done and found == whole[1]:
        return "the epoch starts over."
    taken, got = set(chain(*whole[1][:done])), list(chain(*found))
    if again := sorted(taken & set(got)):
        return f"samples {again[:5]} were taken before, and are yielded again."
    if lost := sorted(set(chain(*whole[1])) - taken - set(got)):
        return f"samples {lost[:5]} remain in this epoch, but no rank reads them."
    return f"the remaining steps must contain {whole[1][done:]} over all ranks, got {found}."


def _run_step_sampler(world: World, answer: Answer) -> tuple[int, list[list[int]]]:
    """Check simulated ranks on rank 0. Then iterate over a DataLoader on all ranks, with an all-reduce in each step."""
    checked = 0
    if world.is_main:
        _check_epochs(answer)
        checked = _check_resuming(answer)
    torch.manual_seed(world.rank)  # differs between ranks, as for dropout; the order must not depend on it
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
        f"Every epoch yields each sample once. {ranks[0][0]} resumes on 1 to 4 simulated ranks, and one on real "
        "ranks, are exact."
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
    """Yield the remaining steps' global batches in the solution's order, optionally with a different seed or epoch."""
    alone = _StepSampler(sampler.samples, sampler.batch, 0, 1, sampler.seed if seed is None else seed)
    alone.load_state_dict(sampler.state_dict() | ({} if epoch is None else {"epoch": epoch}))
    for step in alone:
        sampler.taken = alone.taken
        yield step


step_sampler = Exercise(
    task=(
        "StepSampler(samples, batch, rank, size, seed): write a sampler that iterates over the remaining steps of "
        "the epoch. Each step is a list of this rank's sample indices. Also support len(), set_epoch(epoch), "
        "state_dict() and load_state_dict(state)."
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
        "Keep two numbers: the epoch, and the number of samples in the epoch that all ranks together have taken.",
        "Over all ranks, a step is order[taken : taken + batch]. This rank's shard is the slice [rank::size], which "
        "may be empty. Add the length of the whole step to `taken` before you yield.",
        "The order is torch.randperm(samples, generator=torch.Generator().manual_seed(...)), seeded with a number that "
        "depends only on the seed and the epoch.",
        "set_epoch is also called after a resume. What should it do if the epoch has not changed?",
    ),
)
