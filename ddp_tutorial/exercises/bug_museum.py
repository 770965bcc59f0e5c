"""The exercises of 13_bug_museum: repair a training loop and a checkpoint, and write a detector."""

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from ddp_tutorial.exercises import Answer, Exercise, expect, on_ranks
from ddp_tutorial.museum import LAWS, examine
from ddp_tutorial.museum.parts import Program, Result, ddp, loader, weights
from ddp_tutorial.processes.errors import RankTimeoutError
from ddp_tutorial.world import World

_SECONDS = 60.0


def _judge(programs: dict[str, Program]) -> None:
    """Raise `WrongAnswerError` for the first law that one of `programs` breaks; `NotImplementedError` as an answer
    does."""
    try:
        found = examine(programs, timeout=_SECONDS)
    except RankTimeoutError as error:
        expect(False, f"It does not come to an end.\n{error}")
    for name in programs:
        for law, alarm in found[name].items():
            if "NotImplementedError" in alarm:
                raise NotImplementedError
            said = alarm.partition("WrongAnswerError: ")[2]
            expect(not said, said)
            expect(not alarm, f"A law is broken: {LAWS[law]}. {alarm}")


def _apart(result: Any, wanted: Result) -> str:
    """How the weights that an answer claims differ from those that are right; empty where they do not."""
    if not isinstance(result, dict) or not isinstance(result.get("weights"), torch.Tensor):
        return 'Return {"weights": weights(model)}, as the broken program does.'
    got, want = result["weights"], wanted["weights"]
    if got.shape == want.shape and torch.allclose(got, want, rtol=1e-9, atol=1e-9):
        return ""
    return "All laws are kept, and yet it trains to other weights than the broken program was meant to."


# ----------------------------------------------------------------------------------------------- 1. the end of an epoch


def _train(world: World, accumulate: int = 2) -> Result:
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = loader(world, 8 // accumulate, samples=20)
    for _ in range(2):
        for i, (_, x, y) in enumerate(batches):
            first = i // accumulate * accumulate  # of this step
            together = min(accumulate, len(batches) - first)
            (F.mse_loss(model(x), y) / together).backward()
            if i + 1 == first + together:
                optimizer.step()
                optimizer.zero_grad()
    return {"weights": weights(model)}


def _test_train(answer: Answer) -> str:
    def compared(world: World, accumulate: int = 2) -> Result:
        said = _apart(answer(world, accumulate), _train(world, accumulate))
        expect(not said, said)
        return {}

    def train(world: World, accumulate: int = 2) -> Result:
        result: Result = answer(world, accumulate)
        return result

    _judge({"train": train, "compared": compared})
    return "Any number of micro-batches, any number of ranks: the same weights, and no sample is left over."


def _training(together: Callable[[int, int, int], int], *, stepping: Callable[[int, int, int], bool]) -> Answer:
    """The solution, but for what a loss is divided by, and after which micro-batches there is a step."""

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
            with model.no_sync() if (i + 1) % accumulate else nullcontext():  # at the end of an epoch as well
                (F.mse_loss(model(x), y) / together).backward()
            if _at_the_end(i, accumulate, len(batches)):
                optimizer.step()
                optimizer.zero_grad()
    return {"weights": weights(model)}


train = Exercise(
    task=(
        "repaired(world, accumulate): the training of leaks_into_the_next_epoch, repaired; return the weights as it "
        "does. The last step of an epoch has fewer micro-batches than the others."
    ),
    test=_test_train,
    solution=_train,
    wrong={
        "is the broken program": _training(lambda i, k, n: k, stepping=lambda i, k, n: (i + 1) % k == 0),
        "steps at the end, and divides by too many": _training(lambda i, k, n: k, stepping=_at_the_end),
        "steps after every micro-batch": _training(lambda i, k, n: 1, stepping=lambda i, k, n: True),
        "divides by what is left over, in every step": _training(lambda i, k, n: n % k or k, stepping=_at_the_end),
        "does not talk in the last step of an epoch": _without_talking,
        "trains nothing": lambda world, accumulate=2: {"weights": weights(ddp())},
    },
    hints=(
        "Two things are wrong at the end of an epoch: nobody steps, and what is left over is divided by `accumulate`.",
        "There is a step after every `accumulate` micro-batches, and after the last one: i + 1 == len(batches).",
        "The step that micro-batch i belongs to begins with number i // accumulate * accumulate. How many follow, at "
        "most `accumulate`, until len(batches)?",
    ),
)

# ------------------------------------------------------------------------------------------------------ 2. a checkpoint


def _goes_on(world: World, folder: Path) -> Result:
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


def _test_goes_on(answer: Answer) -> str:
    def compared(world: World, folder: Path) -> Result:
        parts = [folder / name for name in ("yours", "right")]
        for part in parts:
            part.mkdir(exist_ok=True)
        said = _apart(answer(world, parts[0]), _goes_on(world, parts[1]))
        expect(not said, said)
        files = [path for path in parts[0].rglob("*") if path.is_file()]
        expect(bool(files) or not world.is_main, "It leaves no file in its folder: what could it go on from?")
        return {}

    def goes_on(world: World, folder: Path) -> Result:
        result: Result = answer(world, folder)
        return result

    _judge({"goes_on": goes_on, "compared": compared})
    return "Cut after any step and in the middle of any file, it ends with the same bits, and repeats one step at most."


def _going_on(*, optimizer_too: bool = True, in_place: bool = False, off: int = 1, every: int = 1) -> Answer:
    """The solution with a part left out; with `every=0` it never saves."""

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


goes_on = Exercise(
    task=(
        "goes_on(world, folder): a training that goes on from its folder, wherever it was cut. The one above has two "
        "bugs: what it saves, and how it writes it. Return the weights as it does."
    ),
    test=_test_goes_on,
    solution=_goes_on,
    wrong={
        "forgets the optimizer and writes in place": _going_on(optimizer_too=False, in_place=True),
        "forgets the optimizer": _going_on(optimizer_too=False),
        "writes in place": _going_on(in_place=True),
        "runs the saved step again": _going_on(off=0),
        "saves nothing": _going_on(every=0),
    },
    hints=(
        "SGD with momentum has a state as well. And what is in last.pt while it is being written?",
        "optimizer.state_dict() belongs into the file, and optimizer.load_state_dict after it.",
        "Write to a file of another name, and give it its name when it is complete: Path.replace does it at once.",
    ),
)

# -------------------------------------------------------------------------------------------------------- 3. a detector

Deal = Callable[[int, int, int, int], Iterator[int]]


def _strided(samples: int, rank: int, size: int, epoch: int) -> Iterator[int]:
    return iter(range(rank, samples, size))


def _in_blocks(samples: int, rank: int, size: int, epoch: int) -> Iterator[int]:
    return iter(range(samples * rank // size, samples * (rank + 1) // size))


def _shuffled(samples: int, rank: int, size: int, epoch: int) -> Iterator[int]:
    order = random.Random(epoch).sample(range(samples), samples)
    return iter(order[rank::size])


def _all_to_the_last(samples: int, rank: int, size: int, epoch: int) -> Iterator[int]:
    """Unequal shares, and empty ones: unusual, and every sample comes once."""
    return iter(range(samples) if rank == size - 1 else ())


def _turns(samples: int, rank: int, size: int, epoch: int) -> Iterator[int]:
    return iter(range((rank + epoch) % size, samples, size))


def _everything(samples: int, rank: int, size: int, epoch: int) -> Iterator[int]:
    return iter(range(samples))


def _shuffled_by_rank(samples: int, rank: int, size: int, epoch: int) -> Iterator[int]:
    return iter(random.Random(100 * epoch + rank).sample(range(samples), samples)[rank::size])


def _padded(samples: int, rank: int, size: int, epoch: int) -> Iterator[int]:
    """Wrong where samples are not a multiple of ranks."""
    return iter(number % samples for number in range(rank, -(-samples // size) * size, size))


def _cropped(samples: int, rank: int, size: int, epoch: int) -> Iterator[int]:
    return iter(range(rank, samples // size * size, size))


def _dealt_twice(samples: int, rank: int, size: int, epoch: int) -> Iterator[int]:
    return iter(range(rank, samples, size)[rank::size])


def _for_two_ranks(samples: int, rank: int, size: int, epoch: int) -> Iterator[int]:
    """Wrong with three or more."""
    return iter(range(rank % 2, samples, min(size, 2)))


def _later(samples: int, rank: int, size: int, epoch: int) -> Iterator[int]:
    """Wrong from the second epoch on: all ranks begin somewhere else."""
    return iter(range(rank + epoch, samples, size))


def _without_end(samples: int, rank: int, size: int, epoch: int) -> Iterator[int]:
    return cycle(range(rank, samples, size))


def _swapped(samples: int, rank: int, size: int, epoch: int) -> Iterator[int]:
    """As many as there should be, but one twice and one never."""
    own = list(range(rank, samples, size))
    return iter([own[0], *own[:-1]] if rank == 1 and len(own) > 1 else own)


def _fails_without_samples(samples: int, rank: int, size: int, epoch: int) -> Iterator[int]:
    own = list(range(rank, samples, size))
    return iter([own[0], *own[1:]])


# What the learner is shown, and what is kept back.
RIGHT: dict[str, Deal] = {"round-robin": _strided, "blocks": _in_blocks, "shuffled by epoch": _shuffled}
WRONG: dict[str, Deal] = {"all samples on all ranks": _everything, "padded": _padded, "dealt twice": _dealt_twice}
UNSEEN_RIGHT: dict[str, Deal] = {"all to the last rank": _all_to_the_last, "by turns": _turns}
UNSEEN_WRONG: dict[str, Deal] = {
    "shuffled by rank": _shuffled_by_rank,
    "what does not divide is left out": _cropped,
    "right on one rank and on two": _for_two_ranks,
    "right in the first epoch": _later,
    "a share without end": _without_end,
    "one sample twice and one never": _swapped,
    "an error where a rank has no sample": _fails_without_samples,
}


def _verdicts(world: World, answer: Answer) -> dict[str, object]:
    return {name: answer(deal) for name, deal in {**RIGHT, **WRONG, **UNSEEN_RIGHT, **UNSEEN_WRONG}.items()}


def _test_detector(answer: Answer) -> str:
    stuck = "Your detector does not come back. A share may have no end: take as many as there can be, and one more."
    [said] = on_ranks(_verdicts, 1, answer, stuck=stuck, timeout=15)
    for name, verdict in said.items():
        expect(isinstance(verdict, bool), f"Return True for a bug, False for none; for {name!r} it is {verdict!r}.")
        is_right = name in RIGHT or name in UNSEEN_RIGHT
        unseen = " (you have not seen this one)" if name in UNSEEN_RIGHT or name in UNSEEN_WRONG else ""
        expect(not (is_right and verdict), f"A false alarm{unseen}: {name!r} hands out every sample once.")
        expect(is_right or bool(verdict), f"A bug that is missed{unseen}: {name!r}.")
    bugs, right = len(WRONG) + len(UNSEEN_WRONG), len(RIGHT) + len(UNSEEN_RIGHT)
    return f"All {bugs} bugs are caught, and none of {right} that are right is blamed."


def _find_bad_deal(deal: Deal) -> bool:
    for samples in (1, 2, 7, 12, 24, 25):
        for size in (1, 2, 3, 4, 5):
            for epoch in range(3):
                dealt: list[int] = []
                for rank in range(size):
                    try:
                        dealt += islice(deal(samples, rank, size, epoch), samples + 1)  # it may have no end
                    except Exception:
                        return True
                if sorted(dealt) != list(range(samples)):
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
    """The solution, looking at less, or otherwise."""

    def answer(deal: Deal) -> bool:
        for n in samples:
            for size in sizes:
                for epoch in range(epochs):
                    try:
                        shares = [deal(n, rank, size, epoch) for rank in range(size)]
                        if bad([list(islice(each, n + 1) if limited else each) for each in shares], n):
                            return True
                    except (IndexError, ValueError):
                        return True
        return False

    return answer


find_bad_deal = Exercise(
    task=(
        "find_bad_deal(deal): deal(samples, rank, size, epoch) is an iterator over the samples of one rank. Return "
        "True if there is a number of samples, of ranks, or an epoch in which some sample comes twice or never."
    ),
    test=_test_detector,
    solution=_find_bad_deal,
    wrong={
        "tries two ranks only": _looking(sizes=(2,)),
        "tries the first epoch only": _looking(epochs=1),
        "tries only what divides": _looking(samples=(12, 24), sizes=(1, 2, 3, 4)),
        "compares sets, in which nothing comes twice": _looking(bad=lambda s, n: set(_all(s)) != set(range(n))),
        "counts, and does not look": _looking(bad=lambda shares, n: sum(map(len, shares)) != n),
        "wants equal shares": _looking(
            bad=lambda s, n: _all(s) != list(range(n)) or max(map(len, s)) - min(map(len, s)) > 1
        ),
        "reads each share to its end": _looking(limited=False),
        "never raises an alarm": lambda deal: False,
    },
    hints=(
        "Ask for the shares of all ranks of one world, in one epoch, and put them together. What should come out?",
        "sorted(all of them) == list(range(samples)). Try 1 to 5 ranks, several epochs, numbers that do not divide, "
        "also fewer samples than ranks.",
        "An error is a bug as well. And a share may have no end: itertools.islice(share, samples + 1) is enough.",
    ),
)
