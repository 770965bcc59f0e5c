"""Exercises of 10_checkpointing: save atomically, find all state, and check that ranks are bitwise identical."""

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ddp_tutorial.collectives import all_gather, digest
from ddp_tutorial.exercises import Answer, Exercise, expect, on_ranks
from ddp_tutorial.world import World

# --------------------------------------------------------------------------------------------------- 1. save atomically


class _PowerCutError(Exception):
    """Power failure of the simulated machine."""


@dataclass
class Disk:
    """A simulated disk with the guarantees of a real one.

    Written data stays in memory until `sync(name)`; new names, renames and removals stay in memory until
    `sync_names()`. A power failure may lose any part of what is only in memory.
    """

    names: dict[str, int] = field(default_factory=dict)  # name -> index in `files`
    files: list[bytes] = field(default_factory=list)
    _safe_files: dict[int, bytes] = field(default_factory=dict)
    _safe_names: list[dict[str, int]] = field(
        default_factory=lambda: [{}]
    )  # what the directory may be after a power cut
    _left: float = float("inf")

    def write(self, name: str, data: bytes) -> None:
        """Replace the content of the file `name` with `data`. Creates the file if it does not exist."""
        self._operation()
        if name not in self.names:
            self.names = {**self.names, name: len(self.files)}
            self.files.append(b"")
            self._safe_names.append(self.names)
        self.files[self.names[name]] = data

    def sync(self, name: str) -> None:
        """Block until all data written to the file has reached the disk."""
        self._operation()
        self._safe_files[self.names[name]] = self.files[self.names[name]]

    def rename(self, old: str, new: str) -> None:
        """Rename the file `old` to `new`, replacing any file of that name."""
        self._operation()
        names = dict(self.names)
        names[new] = names.pop(old)
        self.names = names
        self._safe_names.append(names)

    def remove(self, name: str) -> None:
        """Remove the file `name`."""
        self._operation()
        self.names = {other: number for other, number in self.names.items() if other != name}
        self._safe_names.append(self.names)

    def sync_names(self) -> None:
        """Block until all current names have reached the disk."""
        self._operation()
        self._safe_names = [self.names]

    def _operation(self) -> None:
        if self._left <= 0:
            raise _PowerCutError
        self._left -= 1

    def after_power_cut(self, name: str) -> Iterator[bytes | None]:
        """Yield every possible content of the file `name` after a power failure now; None for a missing file."""
        for names in self._safe_names:
            if name not in names:
                yield None
                continue
            number = names[name]
            written, safe = self.files[number], self._safe_files.get(number)
            yield from {written, safe or b"", written[: len(written) // 2]} if safe != written else {written}


_OLD, _NEW = b"the old checkpoint", b"the new checkpoint, a bit longer"


def _disk_with_old(operations: float) -> Disk:
    disk = Disk()
    disk.write("checkpoint", _OLD)
    disk.sync("checkpoint")
    disk.sync_names()
    disk._left = operations
    return disk


def _test_atomic(answer: Answer) -> str:
    for operations in itertools.count():
        disk = _disk_with_old(operations)
        done = True
        try:
            answer(disk, "checkpoint", _NEW)
        except _PowerCutError:
            done = False
        found = set(disk.after_power_cut("checkpoint"))
        when = "after your function has returned" if done else f"after operation {operations} of your function"
        for left in found:
            if left in (_OLD, _NEW):
                continue
            what = "the checkpoint may be missing" if left is None else f"the checkpoint may be {left!r}"
            expect(False, f"If the power fails {when}, {what}. It must be the complete old or the complete new one.")
        if done:
            expect(found != {_OLD}, "When your function returns, the checkpoint must be the new one, got the old one.")
            expect(
                found == {_NEW},
                "If the power fails after your function has returned, the old checkpoint may reappear: the new name "
                "must reach the disk as well.",
            )
            return f"A power failure after any of your {operations} operations leaves a complete checkpoint."
        expect(operations < 50, "Five operations are enough; your function used more than 50.")
    raise AssertionError("unreachable")


def _atomic_save(disk: Disk, name: str, data: bytes) -> None:
    disk.write(f"{name}.part", data)
    disk.sync(f"{name}.part")
    disk.rename(f"{name}.part", name)
    disk.sync_names()


def _in_place(disk: Disk, name: str, data: bytes) -> None:
    disk.write(name, data)
    disk.sync(name)
    disk.sync_names()


def _rename_only(disk: Disk, name: str, data: bytes) -> None:
    disk.write(f"{name}.part", data)
    disk.rename(f"{name}.part", name)
    disk.sync_names()


def _syncs_too_late(disk: Disk, name: str, data: bytes) -> None:
    disk.write(f"{name}.part", data)
    disk.rename(f"{name}.part", name)
    disk.sync(name)
    disk.sync_names()


def _old_one_removed_first(disk: Disk, name: str, data: bytes) -> None:
    disk.write(f"{name}.part", data)
    disk.sync(f"{name}.part")
    disk.remove(name)
    disk.rename(f"{name}.part", name)
    disk.sync_names()


def _name_not_synced(disk: Disk, name: str, data: bytes) -> None:
    disk.write(f"{name}.part", data)
    disk.sync(f"{name}.part")
    disk.rename(f"{name}.part", name)


def _never_renamed(disk: Disk, name: str, data: bytes) -> None:
    disk.write(f"{name}.part", data)
    disk.sync(f"{name}.part")
    disk.sync_names()


atomic_save = Exercise(
    task=(
        "atomic_save(disk, name, data): save so that a power failure at any time leaves the complete old or the "
        "complete new file, and the new file once your function has returned."
    ),
    test=_test_atomic,
    solution=_atomic_save,
    wrong={
        "overwrites the old file": _in_place,
        "renames before the data has reached the disk": _rename_only,
        "syncs after the rename": _syncs_too_late,
        "removes the old file first": _old_one_removed_first,
        "does not sync the name": _name_not_synced,
        "never renames it": _never_renamed,
    },
    hints=(
        "Write the file under a different name, so that half a file cannot be mistaken for the checkpoint.",
        "A rename is atomic: the name refers to the old or the new file. The new file must be on the disk before it.",
        "In this order: write under a different name, sync, rename, sync_names.",
    ),
)

# ---------------------------------------------------------------------------------------------------- 2. find all state


class MiniTrainer:
    """A small training run in one process, with all the usual state. `step()` takes one step."""

    def __init__(self) -> None:
        """Create the run before its first step."""
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.8)
        self.noise = torch.Generator().manual_seed(1)  # for the noise added to the inputs
        self.cursor = 0  # number of samples seen
        self.average = [weight.detach().clone() for weight in self.model.parameters()]  # moving average of the weights
        self.data = torch.randn(64, 4, generator=torch.Generator().manual_seed(2))

    def step(self) -> None:
        """Train on the next 4 samples, with noise."""
        x = self.data[torch.arange(self.cursor, self.cursor + 4) % len(self.data)]
        self.cursor += 4
        x = x + 0.1 * torch.randn(x.shape, generator=self.noise)
        (self.model(x)[:, 0] - x.sum(1)).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for slow, weight in zip(self.average, self.model.parameters(), strict=True):
                slow.lerp_(weight, 0.2)

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the attributes in the result of `state_of`."""
        for name, saved in state.items():
            mine = getattr(self, name)
            if isinstance(mine, torch.Generator):
                mine.set_state(saved)
            elif hasattr(mine, "load_state_dict"):
                mine.load_state_dict(saved)
            else:
                setattr(self, name, saved)


_STATE = ("model", "optimizer", "scheduler", "noise", "cursor", "average")
_WHY = {
    "model": "The weights are those of a new model.",
    "optimizer": "AdamW starts over: its averages of the gradient and of the squared gradient are lost.",
    "scheduler": "The learning rate is different.",
    "noise": "The random numbers are different: the generator starts over.",
    "cursor": "The run reads different samples: it starts over at the first sample.",
    "average": "The moving average of the weights starts over.",
}


def _value_of(trainer: MiniTrainer, name: str) -> Any:
    thing = getattr(trainer, name)
    if isinstance(thing, torch.Generator):
        return thing.get_state()
    return copy.deepcopy(thing.state_dict()) if hasattr(thing, "state_dict") else copy.deepcopy(thing)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(itertools.starmap(_equal, zip(a, b, strict=True)))
    return bool(a == b)


def _test_state(answer: Answer) -> str:
    for saved_at in (1, 3):
        whole = MiniTrainer()
        for _ in range(saved_at):
            whole.step()
        there = {name: _value_of(whole, name) for name in _STATE}
        state = answer(whole)
        expect(isinstance(state, dict), f"The state must be a dict of attributes, got {type(state).__name__}.")
        for name in state:
            expect(hasattr(whole, str(name)), f"Keys must be attributes of the trainer for `restore`, got {name!r}.")
        for _ in range(3):
            whole.step()
        resumed = MiniTrainer()
        resumed.restore(state)
        for name in _STATE:
            if not _equal(_value_of(resumed, name), there[name]):
                what = "is not restored to its value at the time of saving"
                copied = name not in state or _equal(_value_of(resumed, name), _value_of(MiniTrainer(), name))
                if copied:
                    expect(False, f"Saved after step {saved_at}, {name!r} {what}. {_WHY[name]}")
                expect(
                    False,
                    f"Saved after step {saved_at}, {name!r} {what}: further training changed the saved state. A "
                    "state_dict contains the tensors themselves, so copy them.",
                )
        for _ in range(3):
            resumed.step()
        for name in _STATE:
            expect(_equal(_value_of(resumed, name), _value_of(whole, name)), f"{name!r} differs after 3 more steps.")
    return "Every part of the resumed run is bitwise identical to the uninterrupted run."


def _state_of(trainer: MiniTrainer) -> dict[str, Any]:
    return copy.deepcopy(
        {
            "model": trainer.model.state_dict(),
            "optimizer": trainer.optimizer.state_dict(),
            "scheduler": trainer.scheduler.state_dict(),
            "noise": trainer.noise.get_state(),
            "cursor": trainer.cursor,
            "average": trainer.average,
        }
    )


def _without(*names: str) -> Callable[[MiniTrainer], dict[str, Any]]:
    def state_of(trainer: MiniTrainer) -> dict[str, Any]:
        return {name: value for name, value in _state_of(trainer).items() if name not in names}

    return state_of


def _not_copied(trainer: MiniTrainer) -> dict[str, Any]:
    return {
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "scheduler": trainer.scheduler.state_dict(),
        "noise": trainer.noise.get_state(),
        "cursor": trainer.cursor,
        "average": trainer.average,
    }


def _shallow(trainer: MiniTrainer) -> dict[str, Any]:
    return {name: copy.copy(value) for name, value in _not_copied(trainer).items()}


state_of = Exercise(
    task=(
        "state_of(trainer): return a dict, keyed by attribute name, with all the state that the trainer needs to "
        "resume exactly."
    ),
    test=_test_state,
    solution=_state_of,
    wrong={
        "saves the weights only": _without("optimizer", "scheduler", "noise", "cursor", "average"),
        "forgets the optimizer": _without("optimizer"),
        "forgets the scheduler": _without("scheduler"),
        "forgets the random numbers": _without("noise"),
        "forgets the cursor": _without("cursor"),
        "forgets the moving average": _without("average"),
        "does not copy": _not_copied,
        "copies the dicts, but not the tensors": _shallow,
    },
    hints=(
        "Read __init__. Which of the attributes does step() change?",
        "Six attributes: model, optimizer, scheduler, noise, cursor, average. `noise.get_state()` is a tensor.",
        "Return a copy.deepcopy of the whole dict. Otherwise the next step changes the saved state.",
    ),
)

# ------------------------------------------------------------------------------------------------- 3. compare the ranks

NAN = float("nan")
_CASES: dict[str, Callable[[int], dict[str, torch.Tensor]]] = {
    "equal tensors": lambda rank: {"a": torch.arange(4.0), "b": torch.ones(2)},
    "one element that differs by 1e-6": lambda rank: {"a": torch.arange(4.0), "b": torch.ones(2) + 1e-6 * (rank == 1)},
    "the same numbers in a different order": lambda rank: {"a": torch.arange(4.0).roll(rank), "b": torch.ones(2)},
    "a NaN at the same place on all ranks": lambda rank: {"a": torch.tensor([1.0, NAN]), "b": torch.ones(2)},
    "a different dtype": lambda rank: {
        "a": torch.arange(4.0),
        "b": torch.ones(2).to([torch.float32, torch.float64][rank]),
    },
    "a different shape": lambda rank: {"a": torch.arange(4.0), "b": torch.ones(2 + rank)},
    "two different tensors": lambda rank: {"a": torch.arange(4.0) + rank, "b": torch.ones(2) - rank},
}
_DIFFERING = {
    "equal tensors": [],
    "one element that differs by 1e-6": ["b"],
    "the same numbers in a different order": ["a"],
    "a NaN at the same place on all ranks": [],
    "a different dtype": ["b"],
    "a different shape": ["b"],
    "two different tensors": ["a", "b"],
}


def _run_differing(world: World, answer: Answer) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for case, make in _CASES.items():
        try:
            result = answer(world, make(world.rank))
            found[case] = sorted(result) if isinstance(result, (list, tuple, set)) else repr(result)
        except NotImplementedError:
            raise
        except Exception as error:
            found[case] = f"an error, {type(error).__name__}: {error}"
    return found


def _test_differing(answer: Answer) -> str:
    stuck = "A rank waits forever: all ranks must enter the same collectives."
    ranks = on_ranks(_run_differing, 2, answer, stuck=stuck, timeout=60)
    for case, expected in _DIFFERING.items():
        for rank, found in enumerate(ranks):
            expect(found[case] == expected, f"For {case}, rank {rank} must return {expected}, got {found[case]}.")
    return "All ranks find every difference, down to a single bit."


def _differing(world: World, tensors: dict[str, torch.Tensor]) -> list[str]:
    of_ranks = all_gather(world, {name: digest({name: tensor}) for name, tensor in tensors.items()})
    return [name for name in tensors if any(each[name] != of_ranks[0][name] for each in of_ranks)]


def _sums(world: World, tensors: dict[str, torch.Tensor]) -> list[str]:
    of_ranks = all_gather(world, {name: float(tensor.sum()) for name, tensor in tensors.items()})
    return [name for name in tensors if any(each[name] != of_ranks[0][name] for each in of_ranks)]


def _values(world: World, tensors: dict[str, torch.Tensor]) -> list[str]:
    of_ranks = all_gather(world, tensors)
    return [name for name in tensors if any(each[name].tolist() != of_ranks[0][name].tolist() for each in of_ranks)]


def _nearly(world: World, tensors: dict[str, torch.Tensor]) -> list[str]:
    def close(a: torch.Tensor, b: torch.Tensor) -> bool:
        same_kind = a.shape == b.shape and a.dtype == b.dtype
        return same_kind and torch.allclose(a, b, rtol=1e-4, equal_nan=True)

    of_ranks = all_gather(world, tensors)
    return [name for name in tensors if not all(close(each[name], of_ranks[0][name]) for each in of_ranks)]


def _rank_zero_with_itself(world: World, tensors: dict[str, torch.Tensor]) -> list[str]:
    of_ranks = all_gather(world, {name: digest({name: tensor}) for name, tensor in tensors.items()})
    return [name for name in tensors if of_ranks[world.rank][name] != of_ranks[0][name]]


def _first_only(world: World, tensors: dict[str, torch.Tensor]) -> list[str]:
    return _differing(world, tensors)[:1]


differing = Exercise(
    task=(
        "differing(world, tensors): return, on every rank, the names of the tensors that are not bitwise identical on "
        "all ranks."
    ),
    test=_test_differing,
    solution=_differing,
    wrong={
        "compares sums": _sums,
        "compares numbers, ignoring that NaN is not equal to NaN, and the dtype": _values,
        "accepts nearly equal tensors": _nearly,
        "compares only its own rank with rank 0": _rank_zero_with_itself,
        "stops at the first difference": _first_only,
    },
    hints=(
        "all_gather(world, thing) returns all ranks' objects. Which small object changes with every bit?",
        "digest({name: tensor}) is a hash of name, shape, dtype and bits.",
        "On every rank, compare the hashes of all ranks with rank 0's: then all ranks return the same list.",
    ),
)
