"""Exercises on fixing a training loop and a checkpoint, and on writing a detector, for notebook 13_bug_museum."""

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from ddp_tutorial.exercises import Answer, Exercise, expect, on_ranks
from ddp_tutorial.museum import INVARIANTS, examine
from ddp_tutorial.museum.parts import Program, Result, ddp, loader, weights
from ddp_tutorial.processes.errors import RankTimeoutError
from ddp_tutorial.world import World

_SECONDS = 60.0


def _judge(programs: dict[str, Program]) -> None:
    """Check `programs` against all invariants.

    Raises:
        WrongAnswerError: If a program violates an invariant.
        NotImplementedError: If the answer raises `NotImplementedError`.
    """
    try:
        found = examine(programs, timeout=_SECONDS)
    except RankTimeoutError as error:
        expect(False, f"Your program does not return.\n{error}")
    for name in programs:
        for invariant, alarm in found[name].items():
            if "NotImplementedError" in alarm:
                raise NotImplementedError
            difference = alarm.partition("WrongAnswerError: ")[2]
            expect(not difference, difference)
            expect(not alarm, f"Your program violates an invariant ({INVARIANTS[invariant]}): {alarm}")


def _apart(result: Any, wanted: Result) -> str:
    """Return an explanation of how an answer's weights differ from the expected weights, or "" if they are equal."""
    if not isinstance(result, dict) or not isinstance(result.get("weights"), torch.Tensor):
        return 'Return {"weights": weights(model)}, as the broken program does.'
    got, want = result["weights"], wanted["weights"]
    if got.shape == want.shape and torch.allclose(got, want, rtol=1e-9, atol=1e-9):
        return ""
    return "Your program satisfies all invariants, but its final weights differ from the correct program's weights."


# ----------------------------------------------------------------------------------------------- 1. the end of an epoch


def _repaired(world: World, accumulate: int = 2) -> Result:
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = loader(world, 8 // accumulate, samples=20)
    for _ in range(2):
        for i, (_, x, y) in enumerate(batches):
            first = i // accumulate * accumulate  # first micro-batch of this step
            together = min(accumulate, len(batches) - first)
            (F.mse_loss(model(x), y) / together).backward()
            if i + 1 == first + together:
                optimizer.step()
                optimizer.zero_grad()
    return {"weights": weights(model)}


def _test_train(answer: Answer) -> str:
    def compared(world: World, accumulate: int = 2) -> Result:
        difference = _apart(answer(world, accumulate), _repaired(world, accumulate))
        expect(not difference, difference)
        return {}

    def train(world: World, accumulate: int = 2) -> Result:
        result: Result = answer(world, accumulate)
        return result

    _judge({"train": train, "compared": compared})
    return "The weights do not depend on the number of micro-batches or ranks, and every sample is used."


def _training(together: Callable[[int, int, int], int], *, stepping: Callable[[int, int, int], bool]) -> Answer:
    """Return a variant of the solution with a different loss divisor and a different condition for taking a step."""

    def answer(world: World, accumulate: int = 2) -> Result:
        model = ddp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = loader(world, 8 // accumulate, samples=20)
        for _ in range(2):
            for i, (_, x, y) in enumerate(batches):
                (F.mse_loss(model(x), y) / together(i, accumulate, len(batches))).backward()
                if stepping(i, accumulate, len(batches)):
                    optimizer.step()
                    optimizer.zero_grad()
        return {"weights": weights(model)}

    return answer


def _at_the_end(i: int, accumulate: int, batches: int) -> bool:
    return (i + 1) % accumulate == 0 or i + 1 == batches


def _without_talking(world: World, accumulate: int = 2) -> Result:
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = loader(world, 8 // accumulate, samples=20)
    for _ in range(2):
        for i, (_, x, y) in enumerate(batches):
            together = min(accumulate, len(batches) - i // accumulate * accumulate)
            with model.no_sync() if (i + 1) % accumulate else nullcontext():  # also at the end of an epoch
                (F.mse_loss(model(x), y) / together).backward()
            if _at_the_end(i, accumulate, len(batches)):
                optimizer.step()
                optimizer.zero_grad()
    return {"weights": weights(model)}


train = Exercise(
    task=(
        "repaired(world, accumulate): fix the training loop in leaks_into_the_next_epoch, and return the weights in "
        "the same form. The last step of an epoch contains fewer micro-batches than the other steps."
    ),
    test=_test_train,
    solution=_repaired,
    wrong={
        "is the broken program": _training(lambda i, k, n: k, stepping=lambda i, k, n: (i + 1) % k == 0),
        "steps at the end, but divides by too many micro-batches": _training(lambda i, k, n: k, stepping=_at_the_end),
        "steps after every micro-batch": _training(lambda i, k, n: 1, stepping=lambda i, k, n: True),
        "divides every step by the remainder": _training(lambda i, k, n: n % k or k, stepping=_at_the_end),
        "does not synchronize in the last step of an epoch": _without_talking,
        "does not train": lambda world, accumulate=2: {"weights": weights(ddp())},
    },
    hints=(
        "There are two bugs at the end of an epoch: the optimizer step is missing, and the losses of the last "
        "micro-batches are divided by `accumulate`.",
        "Take a step after every `accumulate` micro-batches, and after the last micro-batch (i + 1 == len(batches)).",
        "The step that contains micro-batch i starts at index i // accumulate * accumulate. The step contains at most "
        "`accumulate` micro-batches, and fewer at the end of `batches`. How many?",
    ),
)

# ------------------------------------------------------------------------------------------------------ 2. a checkpoint


def _resume(world: World, folder: Path) -> Result:
    model, start, path = ddp(), 0, folder / "last.pt"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if path.exists():
        start, of_model, of_optimizer = torch.load(path)
        model.load_state_dict(of_model)
        optimizer.load_state_dict(of_optimizer)
    for step, (_, x, y) in enumerate(loader(world)):
        if step >= start:
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if world.is_main:
                torch.save((step + 1, model.state_dict(), optimizer.state_dict()), folder / "new.pt")
                (folder / "new.pt").replace(path)
    return {"weights": weights(model)}


def _test_resume(answer: Answer) -> str:
    def compared(world: World, folder: Path) -> Result:
        parts = [folder / name for name in ("yours", "right")]
        for part in parts:
            part.mkdir(exist_ok=True)
        difference = _apart(answer(world, parts[0]), _resume(world, parts[1]))
        expect(not difference, difference)
        files = [path for path in parts[0].rglob("*") if path.is_file()]
        expect(bool(files) or not world.is_main, "Your program must save a file in its folder, got none.")
        return {}

    def resume(world: World, folder: Path) -> Result:
        result: Result = answer(world, folder)
        return result

    _judge({"resume": resume, "compared": compared})
    return "After a kill in any step or write, the run resumes bitwise identically and repeats at most one step."


def _going_on(*, optimizer_too: bool = True, in_place: bool = False, off: int = 1, every: int = 1) -> Answer:
    """Return a variant of the solution with the given mistakes. If `every` is 0, the variant never saves."""

    def answer(world: World, folder: Path) -> Result:
        model, start, path = ddp(), 0, folder / "last.pt"
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        if path.exists():
            start, of_model, of_optimizer = torch.load(path)
            model.load_state_dict(of_model)
            if optimizer_too:
                optimizer.load_state_dict(of_optimizer)
        for step, (_, x, y) in enumerate(loader(world)):
            if step >= start:
                F.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                if world.is_main and every:
                    state = (step + off, model.state_dict(), optimizer.state_dict())
                    torch.save(state, path if in_place else folder / "new.pt")
                    if not in_place:
                        (folder / "new.pt").replace(path)
        return {"weights": weights(model)}

    return answer


resume = Exercise(
    task=(
        "resume(world, folder): train so that the run resumes from its folder after a kill at any time. The program "
        "above has two bugs, one in the contents of its file and one in the way it writes the file. Return the weights "
        "in the same form."
    ),
    test=_test_resume,
    solution=_resume,
    wrong={
        "forgets the optimizer and writes in place": _going_on(optimizer_too=False, in_place=True),
        "forgets the optimizer": _going_on(optimizer_too=False),
        "writes in place": _going_on(in_place=True),
        "runs the saved step again": _going_on(off=0),
        "saves nothing": _going_on(every=0),
    },
    hints=(
        "SGD with momentum has state, too. What does last.pt contain while it is being written?",
        "Save optimizer.state_dict(), and restore it with optimizer.load_state_dict.",
        "Write the file under a different name, and rename it when it is complete: Path.replace is atomic.",
    ),
)

# -------------------------------------------------------------------------------------------------------- 3. a detector

Sharding = Callable[[int, int, int, int], Iterator[int]]


def _strided(samples: int, rank: int, size: int, epoch: int) -> Iterator[int]:
    return iter(range(rank, samples, size))


def _in_blocks(samples: int, rank: int, size: int, epoch: int) -> Iterator[int]:
    return iter(range(samples * rank // size, samples * (rank + 1) // size))


def _shuffled(samples: int, rank: int, size: int, epoch: int) -> Iterator[int]:
    order = random.Random(epoch).sample(range(samples), samples)
    return iter(order[rank::size])


def _all_to_the_last(samples: int, rank: int, size: int, epoch: int) -> Iterator[int]:
    """Return all samples if `rank` is the last rank, and otherwise none. Such shards are unusual, but correct."""
    return iter(range(samples) if rank == size - 1 else ())


def _turns(samples: int, rank: int, size: int, epoch: int) -> Iterator[int]:
    return iter(range((rank + epoch) % size, samples, size))


def _everything(samples: int, rank: int, size: int, epoch: int) -> Iterator[int]:
    return iter(range(samples))


def _shuffled_by_rank(samples: int, rank: int, size: int, epoch: int) -> Iterator[int]:
    return iter(random.Random(100 * epoch + rank).sample(range(samples), samples)[rank::size])


def _padded(samples: int, rank: int, size: int, epoch: int) -> Iterator[int]:
    """Return a padded shard, which is wrong unless the number of samples is a multiple of the number of ranks."""
    return iter(number % samples for number in range(rank, -(-samples // size) * size, size))


def _cropped(samples: int, rank: int, size: int, epoch: int) -> Iterator[int]:
    return iter(range(rank, samples // size * size, size))


def _sharded_twice(samples: int, rank: int, size: int, epoch: int) -> Iterator[int]:
    return iter(range(rank, samples, size)[rank::size])


def _for_two_ranks(samples: int, rank: int, size: int, epoch: int) -> Iterator[int]:
    """Return a shard that is wrong if there are more than two ranks."""
    return iter(range(rank % 2, samples, min(size, 2)))


def _later(samples: int, rank: int, size: int, epoch: int) -> Iterator[int]:
    """Return a shard that is wrong from the second epoch on, because the dataset's first samples are missing."""
    return iter(range(rank + epoch, samples, size))


def _without_end(samples: int, rank: int, size: int, epoch: int) -> Iterator[int]:
    return cycle(range(rank, samples, size))


def _swapped(samples: int, rank: int, size: int, epoch: int) -> Iterator[int]:
    """Return a shard of the correct size. On rank 1, one sample is duplicated and one is missing."""
    own = list(range(rank, samples, size))
    return iter([own[0], *own[:-1]] if rank == 1 and len(own) > 1 else own)


def _fails_without_samples(samples: int, rank: int, size: int, epoch: int) -> Iterator[int]:
    own = list(range(rank, samples, size))
    return iter([own[0], *own[1:]])


# The first two dicts are shown to the learner. The other two are hidden.
RIGHT: dict[str, Sharding] = {"round-robin": _strided, "blocks": _in_blocks, "shuffled by epoch": _shuffled}
WRONG: dict[str, Sharding] = {
    "all samples on all ranks": _everything,
    "padded": _padded,
    "sharded twice": _sharded_twice,
}
UNSEEN_RIGHT: dict[str, Sharding] = {"all to the last rank": _all_to_the_last, "by turns": _turns}
UNSEEN_WRONG: dict[str, Sharding] = {
    "shuffled by rank": _shuffled_by_rank,
    "the remainder is dropped": _cropped,
    "right on one and two ranks only": _for_two_ranks,
    "right in the first epoch only": _later,
    "an infinite shard": _without_end,
    "one sample duplicated and one missing": _swapped,
    "an error if a rank has no samples": _fails_without_samples,
}


def _verdicts(world: World, answer: Answer) -> dict[str, object]:
    return {name: answer(sharding) for name, sharding in {**RIGHT, **WRONG, **UNSEEN_RIGHT, **UNSEEN_WRONG}.items()}


def _test_detector(answer: Answer) -> str:
    stuck = "Your detector does not return. A shard may be infinite, so read at most samples + 1 of its elements."
    [verdicts] = on_ranks(_verdicts, 1, answer, stuck=stuck, timeout=15)
    for name, verdict in verdicts.items():
        expect(
            isinstance(verdict, bool),
            f"The result must be True for a bug and False otherwise, got {verdict!r} for {name!r}.",
        )
        is_right = name in RIGHT or name in UNSEEN_RIGHT
        unseen = " (a hidden case)" if name in UNSEEN_RIGHT or name in UNSEEN_WRONG else ""
        expect(not (is_right and verdict), f"False alarm{unseen}: {name!r} yields every sample exactly once.")
        expect(is_right or bool(verdict), f"Missed bug{unseen}: the result must be True for {name!r}, got False.")
    bugs, right = len(WRONG) + len(UNSEEN_WRONG), len(RIGHT) + len(UNSEEN_RIGHT)
    return f"Your detector finds all {bugs} bugs, and raises no false alarms for the {right} correct functions."


def _find_bad_sharding(sharding: Sharding) -> bool:
    for samples in (1, 2, 7, 12, 24, 25):
        for size in (1, 2, 3, 4, 5):
            for epoch in range(3):
                found: list[int] = []
                for rank in range(size):
                    try:
                        found += islice(sharding(samples, rank, size, epoch), samples + 1)  # the shard may be infinite
                    except Exception:
                        return True
                if sorted(found) != list(range(samples)):
                    return True
    return False


def _all(shares: list[list[int]]) -> list[int]:
    return sorted(chain.from_iterable(shares))


def _looking(
    *,
    samples: tuple[int, ...] = (1, 7, 12),
    sizes: tuple[int, ...] = (1, 2, 3, 4),
    epochs: int = 3,
    bad: Callable[[list[list[int]], int], bool] = lambda shares, n: _all(shares) != list(range(n)),
    limited: bool = True,
) -> Answer:
    """Return a variant of the solution with fewer or different checks."""

    def answer(sharding: Sharding) -> bool:
        for n in samples:
            for size in sizes:
                for epoch in range(epochs):
                    try:
                        shares = [sharding(n, rank, size, epoch) for rank in range(size)]
                        if bad([list(islice(each, n + 1) if limited else each) for each in shares], n):
                            return True
                    except (IndexError, ValueError):
                        return True
        return False

    return answer


find_bad_sharding = Exercise(
    task=(
        "find_bad_sharding(sharding): sharding(samples, rank, size, epoch) returns an iterator over one rank's "
        "samples. Return True if, for some number of samples, number of ranks or epoch, a sample occurs twice or never."
    ),
    test=_test_detector,
    solution=_find_bad_sharding,
    wrong={
        "tries two ranks only": _looking(sizes=(2,)),
        "tries the first epoch only": _looking(epochs=1),
        "tries divisible numbers only": _looking(samples=(12, 24), sizes=(1, 2, 3, 4)),
        "compares sets, which ignore duplicates": _looking(bad=lambda s, n: set(_all(s)) != set(range(n))),
        "compares the number of samples only": _looking(bad=lambda shares, n: sum(map(len, shares)) != n),
        "requires shards of equal size": _looking(
            bad=lambda s, n: _all(s) != list(range(n)) or max(map(len, s)) - min(map(len, s)) > 1
        ),
        "reads each shard to its end": _looking(limited=False),
        "never raises an alarm": lambda sharding: False,
    },
    hints=(
        "Concatenate the shards of all ranks for one world size and one epoch. What must the result contain?",
        "Check sorted(all samples) == list(range(samples)). Try 1 to 5 ranks, several epochs, numbers of samples that "
        "are not multiples of the number of ranks, and fewer samples than ranks.",
        "An error is a bug, too. A shard may be infinite, so read only itertools.islice(shard, samples + 1).",
    ),
)
