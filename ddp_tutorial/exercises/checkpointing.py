"""The exercises of 10_checkpointing: save atomically, find all that has state, check that ranks are equal."""

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
    """The simulated machine has lost power."""


@dataclass
class Disk:
    """A simulated disk, with no more guarantees than a real one gives.

    What has been written is in memory only until `sync(name)`, and a new name, a rename or a removal until
    `sync_names()`. When the power fails, any part of what is in memory only may be lost.
    """

    names: dict[str, int] = field(default_factory=dict)  # name -> number of a file
    files: list[bytes] = field(default_factory=list)
    _safe_files: dict[int, bytes] = field(default_factory=dict)
    _safe_names: list[dict[str, int]] = field(
        default_factory=lambda: [{}]
    )  # what the directory may be after a power cut
    _left: float = float("inf")

    def write(self, name: str, data: bytes) -> None:
        """Replace the content of the file `name` by `data`; creates the file if there is none."""
        self._operation()
        if name not in self.names:
            self.names = {**self.names, name: len(self.files)}
            self.files.append(b"")
            self._safe_names.append(self.names)
        self.files[self.names[name]] = data

    def sync(self, name: str) -> None:
        """Return when all that was written to the file has reached the disk."""
        self._operation()
        self._safe_files[self.names[name]] = self.files[self.names[name]]

    def rename(self, old: str, new: str) -> None:
        """Give the file `old` the name `new`, in place of the file that had it."""
        self._operation()
        names = dict(self.names)
        names[new] = names.pop(old)
        self.names = names
        self._safe_names.append(names)

    def remove(self, name: str) -> None:
        """Remove a name, and with it the file."""
        self._operation()
        self.names = {other: number for other, number in self.names.items() if other != name}
        self._safe_names.append(self.names)

    def sync_names(self) -> None:
        """Return when all names have reached the disk as they are now."""
        self._operation()
        self._safe_names = [self.names]

    def _operation(self) -> None:
        if self._left <= 0:
            raise _PowerCutError
        self._left -= 1

    def after_power_cut(self, name: str) -> Iterator[bytes | None]:
        """Every content that the file `name` may have after a power cut now; None if there may be no such file."""
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
            what = "there is no checkpoint at all" if left is None else f"the checkpoint may be {left!r}"
            expect(False, f"If the power fails {when}, {what}: neither all of the old one nor all of the new.")
        if done:
            expect(found != {_OLD}, "When your function returns, the checkpoint is still the old one.")
            expect(
                found == {_NEW},
                "When your function has returned and the power fails, the old checkpoint may be back: the new name "
                "has to reach the disk as well.",
            )
            return f"Whichever of your {operations} operations is the last one, there is a whole checkpoint."
        expect(operations < 50, "Five operations are enough; yours are more than 50.")
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
        "atomic_save(disk, name, data): whenever the power fails, there is the old file or the new one, whole; and the "
        "new one, once you have returned."
    ),
    test=_test_atomic,
    solution=_atomic_save,
    wrong={
        "writes over the old one": _in_place,
        "renames what has not reached the disk": _rename_only,
        "syncs after the rename": _syncs_too_late,
        "removes the old one first": _old_one_removed_first,
        "does not sync the name": _name_not_synced,
        "never renames it": _never_renamed,
    },
    hints=(
        "Where can half a file be without being taken for the checkpoint? Under another name.",
        "A rename is atomic: there is the old file or the new one. But the new one has to be on the disk by then.",
        "Write under another name, sync, rename, sync_names. In this order.",
    ),
)

# ------------------------------------------------------------------------------------------------ 2. all that has state


class MiniTrainer:
    """A small training run in one process, with all that such a run has. `step()` makes one step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.8)
        self.noise = torch.Generator().manual_seed(1)  # of what is added to the inputs
        self.cursor = 0  # samples that have been seen
        self.average = [weight.detach().clone() for weight in self.model.parameters()]  # a slow copy of the weights
        self.data = torch.randn(64, 4, generator=torch.Generator().manual_seed(2))

    def step(self) -> None:
        """The next 4 samples, with noise."""
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
        """Put back what `state_of` has taken, attribute by attribute."""
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
    "optimizer": "AdamW begins anew: its averages of the gradient and of its square are gone.",
    "scheduler": "The learning rate is different.",
    "noise": "The random numbers are different: they begin again.",
    "cursor": "It sees different samples: it begins again with the first.",
    "average": "The slow copy of the weights begins anew.",
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
        expect(isinstance(state, dict), f"Return a dict, attribute by attribute; this is a {type(state).__name__}.")
        for name in state:
            expect(hasattr(whole, str(name)), f"{name!r} is no attribute of the trainer, so `restore` cannot set it.")
        for _ in range(3):
            whole.step()
        resumed = MiniTrainer()
        resumed.restore(state)
        for name in _STATE:
            if not _equal(_value_of(resumed, name), there[name]):
                what = "is not what it was when you took it"
                copied = name not in state or _equal(_value_of(resumed, name), _value_of(MiniTrainer(), name))
                if copied:
                    expect(False, f"Saved after step {saved_at}, {name!r} {what}. {_WHY[name]}")
                expect(
                    False,
                    f"Saved after step {saved_at}, {name!r} {what}: training went on, and changed what you have saved. "
                    "A state_dict holds the tensors themselves, so copy them.",
                )
        for _ in range(3):
            resumed.step()
        for name in _STATE:
            expect(_equal(_value_of(resumed, name), _value_of(whole, name)), f"{name!r} differs after 3 more steps.")
    return "The run that goes on has the bits of the one that was never interrupted, in every part."


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
        "state_of(trainer): return a dict, by the names of its attributes, of all that the trainer needs to go on "
        "exactly."
    ),
    test=_test_state,
    solution=_state_of,
    wrong={
        "the weights only": _without("optimizer", "scheduler", "noise", "cursor", "average"),
        "no optimizer": _without("optimizer"),
        "no scheduler": _without("scheduler"),
        "no random numbers": _without("noise"),
        "no cursor": _without("cursor"),
        "no slow copy": _without("average"),
        "does not copy": _not_copied,
        "copies the dicts, and not the tensors": _shallow,
    },
    hints=(
        "Go through __init__. What of it does step() change?",
        "Six attributes: model, optimizer, scheduler, noise, cursor, average. `noise.get_state()` is a tensor.",
        "copy.deepcopy of the whole dict: else the next step changes what you have saved.",
    ),
)

# -------------------------------------------------------------------------------------------------- 3. are ranks equal?

NAN = float("nan")
_CASES: dict[str, Callable[[int], dict[str, torch.Tensor]]] = {
    "equal tensors": lambda rank: {"a": torch.arange(4.0), "b": torch.ones(2)},
    "one element that differs by 1e-6": lambda rank: {"a": torch.arange(4.0), "b": torch.ones(2) + 1e-6 * (rank == 1)},
    "the same numbers in another order": lambda rank: {"a": torch.arange(4.0).roll(rank), "b": torch.ones(2)},
    "a NaN at the same place on all ranks": lambda rank: {"a": torch.tensor([1.0, NAN]), "b": torch.ones(2)},
    "another dtype": lambda rank: {"a": torch.arange(4.0), "b": torch.ones(2).to([torch.float32, torch.float64][rank])},
    "another shape": lambda rank: {"a": torch.arange(4.0), "b": torch.ones(2 + rank)},
    "two that differ": lambda rank: {"a": torch.arange(4.0) + rank, "b": torch.ones(2) - rank},
}
_DIFFERING = {
    "equal tensors": [],
    "one element that differs by 1e-6": ["b"],
    "the same numbers in another order": ["a"],
    "a NaN at the same place on all ranks": [],
    "another dtype": ["b"],
    "another shape": ["b"],
    "two that differ": ["a", "b"],
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
    stuck = "Some rank waits for ever: all ranks have to enter the same collectives."
    ranks = on_ranks(_run_differing, 2, answer, stuck=stuck, timeout=60)
    for case, expected in _DIFFERING.items():
        for rank, found in enumerate(ranks):
            expect(found[case] == expected, f"With {case}, rank {rank} should find {expected}; it found {found[case]}.")
    return "Every difference is found, down to a bit, on all ranks."


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
        "differing(world, tensors): return, on every rank, the names of the tensors that are not the same, bit for "
        "bit, on all ranks."
    ),
    test=_test_differing,
    solution=_differing,
    wrong={
        "compares sums": _sums,
        "compares numbers: a NaN is not equal to itself, and the dtype is ignored": _values,
        "nearly equal is enough": _nearly,
        "rank 0 compares with itself": _rank_zero_with_itself,
        "stops at the first": _first_only,
    },
    hints=(
        "all_gather(world, thing) gives every rank what each has. What is small, but differs if one bit does?",
        "digest({name: tensor}) is a hash of name, shape, dtype and bits.",
        "Compare the hashes of all ranks with those of rank 0, on every rank: then all have the same verdict.",
    ),
)
