"""Exercises on complete state, atomic multi-file saves, and surviving kills, for notebook 10_checkpointing."""

import copy
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_tutorial.exercises import Answer, Exercise, WrongAnswerError, expect, on_ranks
from ddp_tutorial.world import World

# ---------------------------------------------------------------------------------------------------- 1. find all state


class MiniTrainer:
    """A small training run in one process, with the state of a typical run. `step()` takes one step."""

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
        """Train on the next 4 samples, after adding random noise to their inputs."""
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
        """Restore the attributes from `state`, the dict returned by `state_of`."""
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
    "model": "The model starts over with its initial weights.",
    "optimizer": "AdamW starts over without its moving averages of the gradient and the squared gradient.",
    "scheduler": "The learning rate is different.",
    "noise": "The generator starts over, so the random numbers are different.",
    "cursor": "The run starts over at the first sample, so it reads different samples.",
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
            expect(hasattr(whole, str(name)), f"The keys must be names of trainer attributes, got {name!r}.")
        for _ in range(3):
            whole.step()
        resumed = MiniTrainer()
        resumed.restore(state)
        for name in _STATE:
            if not _equal(_value_of(resumed, name), there[name]):
                why = (
                    f". {_WHY[name]}"
                    if name not in state or _equal(_value_of(resumed, name), _value_of(MiniTrainer(), name))
                    else ": further training changed the saved state. A state_dict contains references to the tensors, "
                    "so copy the tensors."
                )
                raise WrongAnswerError(
                    f"{name!r} must be restored to its saved value from step {saved_at}, but differs{why}"
                )
        for _ in range(3):
            resumed.step()
        for name in _STATE:
            expect(_equal(_value_of(resumed, name), _value_of(whole, name)), f"{name!r} differs after 3 more steps.")
    return "The state of the resumed run is bitwise identical to the state of the uninterrupted run."


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
        "There are six attributes: model, optimizer, scheduler, noise, cursor, average. `noise.get_state()` is a "
        "tensor.",
        "Return a deep copy of the whole dict (copy.deepcopy). Otherwise, the next step changes the saved state.",
    ),
)

# ------------------------------------------------------------------------------------- 2. save several files atomically


class _PowerCutError(Exception):
    """Raised when the simulated machine loses power."""


@dataclass
class Disk:
    """A simulated disk with the durability guarantees of a real disk, but without folders.

    Written data stays in memory until `sync(name)`. New names, renames and removals stay in memory until
    `sync_names()`. A power failure may lose any data that is only in memory. The disk applies name changes in order.
    """

    _names: dict[str, int] = field(default_factory=dict)  # name -> index in `_files`
    _files: list[bytes] = field(default_factory=list)
    _safe_files: dict[int, bytes] = field(default_factory=dict)
    _safe_names: list[dict[str, int]] = field(default_factory=lambda: [{}])  # the possible names after a power failure
    _left: float = float("inf")

    def names(self) -> list[str]:
        """Return the names of all files."""
        return sorted(self._names)

    def read(self, name: str) -> bytes:
        """Return the contents of the file `name`."""
        return self._files[self._names[name]]

    def write(self, name: str, data: bytes) -> None:
        """Replace the contents of the file `name` with `data`, or create the file."""
        self._operation()
        if name not in self._names:
            self._change({**self._names, name: len(self._files)})
            self._files.append(b"")
        self._files[self._names[name]] = data

    def sync(self, name: str) -> None:
        """Block until all data written to the file `name` has reached the disk."""
        self._operation()
        self._safe_files[self._names[name]] = self._files[self._names[name]]

    def rename(self, old: str, new: str) -> None:
        """Rename the file `old` to `new`, and replace any existing file `new`."""
        self._operation()
        names = dict(self._names)
        names[new] = names.pop(old)
        self._change(names)

    def remove(self, name: str) -> None:
        """Remove the file `name`."""
        self._operation()
        self._change({other: number for other, number in self._names.items() if other != name})

    def sync_names(self) -> None:
        """Block until all name changes have reached the disk."""
        self._operation()
        self._safe_names = [self._names]

    def _change(self, names: dict[str, int]) -> None:
        self._names = names
        self._safe_names = [*self._safe_names, names]

    def _operation(self) -> None:
        if self._left <= 0:
            raise _PowerCutError
        self._left -= 1

    def _after_power_cut(self) -> Iterator["Disk"]:
        """Yield every possible state of the disk after a power failure at this moment."""
        for names in self._safe_names:
            numbers = sorted(set(names.values()))
            for contents in itertools.product(*(sorted(self._contents(number)) for number in numbers)):
                renumbered = {name: numbers.index(number) for name, number in names.items()}
                yield Disk(renumbered, list(contents), dict(enumerate(contents)), [renumbered])

    def _contents(self, number: int) -> set[bytes]:
        written, safe = self._files[number], self._safe_files.get(number)
        return {written} if safe == written else {written, safe or b"", written[: len(written) // 2]}


def read_files(disk: Disk) -> dict[str, bytes]:
    """Return the files of a checkpoint. The manifest maps each file's name to the name under which it is stored."""
    stored = json.loads(disk.read("manifest"))
    return {name: disk.read(under) for name, under in stored.items()}


_CHECKPOINTS = [
    {"rank_0": b"rank 0, step 1", "rank_1": b"rank 1, step 1"},
    {"rank_0": b"rank 0, step 2, longer", "rank_1": b"rank 1, step 2, longer"},
    {"rank_0": b"rank 0, step 3, even longer", "rank_1": b"rank 1, step 3, even longer"},
]


def _saved_normally(disk: Disk, answer: Answer, which: int) -> None:
    answer(disk, dict(_CHECKPOINTS[which]))
    for after in disk._after_power_cut():
        found = _found(after)
        expect(
            found == which,
            f"If the power fails after your function has returned, {_description(found)}. The disk must contain the "
            "new checkpoint.",
        )
    used = len(disk._names)
    expect(used <= 3, f"The disk must contain at most two files and the manifest, got {', '.join(disk.names())}.")


def _found(disk: Disk) -> int | str:
    """Return the index of the checkpoint on the disk, or a description of the problem."""
    try:
        files = read_files(disk)
    except Exception as error:
        return f"`read_files` raises {type(error).__name__}: {error}"
    return _CHECKPOINTS.index(files) if files in _CHECKPOINTS else f"`read_files` returns {files}"


def _description(found: int | str) -> str:
    return found if isinstance(found, str) else f"the disk contains the checkpoint from step {found + 1}"


def _test_save_files(answer: Answer) -> str:
    first = Disk()
    _saved_normally(first, answer, 0)
    for operations in itertools.count():
        disk = copy.deepcopy(first)
        disk._left = operations
        done = True
        try:
            answer(disk, dict(_CHECKPOINTS[1]))
        except _PowerCutError:
            done = False
        after_cut = {json.dumps([each.names(), str(each._files)]): each for each in disk._after_power_cut()}
        for after in after_cut.values():
            found = _found(after)
            expect(
                found in (0, 1),
                f"If the power fails after operation {operations} of your function, {_description(found)}. The disk "
                "must contain the complete old checkpoint or the complete new checkpoint.",
            )
            _saved_normally(after, answer, 2)  # leftover files of an aborted save must not break the next save
        if done:
            disk._left = float("inf")
            _saved_normally(disk, answer, 2)
            return f"A power failure after any of your {operations} operations leaves a complete checkpoint."
        expect(operations < 60, "Your function used more than 60 operations. Ten to fifteen are enough.")
    raise AssertionError("unreachable")


def _save_files(disk: Disk, files: dict[str, bytes]) -> None:
    old = set(json.loads(disk.read("manifest")).values()) if "manifest" in disk.names() else set()
    stored = {name: next(free for free in (f"{name}.a", f"{name}.b") if free not in old) for name in files}
    for name, data in files.items():
        disk.write(stored[name], data)
        disk.sync(stored[name])
    disk.write("manifest.part", json.dumps(stored).encode())
    disk.sync("manifest.part")
    disk.sync_names()
    disk.rename("manifest.part", "manifest")
    disk.sync_names()
    for name in disk.names():
        if name not in {"manifest", *stored.values()}:
            disk.remove(name)
    disk.sync_names()


def _variant(
    *,
    in_place: bool = False,
    skip_sync: bool = False,
    renamed: bool = True,
    manifest_first: bool = False,
    remove_first: bool = False,
    clean: bool = True,
    names_synced: bool = True,
    manifest_synced: bool = True,
) -> Callable[[Disk, dict[str, bytes]], None]:
    """Return a variant of `_save_files` with a mistake."""

    def save_files(disk: Disk, files: dict[str, bytes]) -> None:
        old = set(json.loads(disk.read("manifest")).values()) if "manifest" in disk.names() else set()
        stored = {name: next(free for free in (f"{name}.a", f"{name}.b") if free not in old) for name in files}
        if in_place:
            stored = {name: name for name in files}
        if remove_first:
            for name in disk.names():
                disk.remove(name)

        def write_manifest() -> None:
            part = "manifest.part" if renamed else "manifest"
            disk.write(part, json.dumps(stored).encode())
            if manifest_synced:
                disk.sync(part)
            if renamed:
                disk.rename(part, "manifest")
            if names_synced:
                disk.sync_names()

        if manifest_first:
            write_manifest()
        for name, data in files.items():
            disk.write(stored[name], data)
            if not skip_sync:
                disk.sync(stored[name])
        if not manifest_first:
            write_manifest()
        if clean:
            for name in disk.names():
                if name not in {"manifest", *stored.values()}:
                    disk.remove(name)
            if names_synced:
                disk.sync_names()

    return save_files


save_files = Exercise(
    task=(
        "save_files(disk, files): save a checkpoint that consists of several files. A power failure at any time must "
        "leave either the complete old checkpoint or the complete new checkpoint."
    ),
    test=_test_save_files,
    solution=_save_files,
    wrong={
        "overwrites the old files": _variant(in_place=True),
        "does not sync the files": _variant(skip_sync=True),
        "does not sync the manifest": _variant(manifest_synced=False),
        "overwrites the manifest": _variant(renamed=False),
        "writes the manifest first": _variant(manifest_first=True),
        "removes the old checkpoint first": _variant(remove_first=True),
        "does not sync the names": _variant(names_synced=False),
        "keeps the old files": _variant(clean=False),
    },
    hints=(
        "One rename is atomic, but several renames are not. Which single file selects the old or the new checkpoint?",
        "Write the new files under names that the old manifest does not contain, and sync them. Then rename a new "
        "manifest to `manifest`.",
        "Remove the old files last. An aborted save may have left files behind; remove them, too.",
    ),
)

# ----------------------------------------------------------------------------------- 3. survive kills at random moments

_RANKS, _STEPS, _NUMBERS = 2, 6, 2000
_HANG_SECONDS = 30.0  # an attempt that takes longer counts as hanging
_KILLS = 20


def _new_state(rank: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rank)
    return {"weights": torch.zeros(_NUMBERS), "rng": generator.get_state(), "steps": 0}


def _next_state(state: dict[str, Any]) -> dict[str, Any]:
    """Return a rank's state after one more step. The states of the ranks differ."""
    generator = torch.Generator()
    generator.set_state(state["rng"])
    weights = 0.9 * state["weights"] + torch.randn(_NUMBERS, generator=generator)
    return {"weights": weights, "rng": generator.get_state(), "steps": state["steps"] + 1}


def _final_state(rank: int) -> dict[str, Any]:
    state = _new_state(rank)
    for _ in range(_STEPS):
        state = _next_state(state)
    return state


class _Killer:
    """A trace function that counts the Python lines executed within the answer, and kills the rank at one of the lines.

    Half of the kills occur at a line of the answer itself. The other kills can occur at any line, for example in
    `torch.save`.
    """

    def __init__(self, answer: Any, own: int | None = None, line: int | None = None) -> None:
        self.file = getattr(getattr(answer.save, "__code__", None), "co_filename", "")
        self.own, self.line = own, line
        self.seen = [0, 0]  # own lines, and all lines
        self.note = Path()  # created before the kill

    def trace(self, frame: Any, event: str, _: Any) -> Any:
        if event == "line":
            self.seen[1] += 1
            if frame.f_code.co_filename == self.file:
                self.seen[0] += 1
                if self.seen[0] == self.own:
                    self.kill()
            if self.seen[1] == self.line:
                self.kill()
        return self.trace

    def kill(self) -> None:
        sys.settrace(None)
        self.note.write_text("true")
        os.kill(os.getpid(), signal.SIGKILL)

    def __enter__(self) -> "_Killer":
        sys.settrace(self.trace)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)


def _train(rank: int, answer: Any, folder: Path, notes: Path, killer: _Killer) -> None:
    """Run one rank in one attempt: load a checkpoint, train, save after each step, and record the progress."""
    dist.init_process_group("gloo", init_method=f"file://{notes}/store", rank=rank, world_size=_RANKS)
    dist.barrier()  # if a rank exited earlier, gloo would print "connectFullMesh failed" on the other rank
    with killer:
        saver = answer(folder)
        found = saver.load()
    step, state = (0, _new_state(rank)) if found is None else found
    _note(notes, f"loaded.{rank}", step)
    steps: list[Any] = [None] * _RANKS
    dist.all_gather_object(steps, step)
    if steps[0] != steps[1]:
        return
    while step < _STEPS:
        state, step = _next_state(state), step + 1
        with killer:
            saver.save(step, state)
        _note(notes, f"saved.{rank}", step)
    right = _equal(state, _final_state(rank))
    _note(notes, f"done.{rank}", [right, killer.seen])
    while len(_noted(notes, "done")) < _RANKS:  # a rank that exits closes the connections of the other rank
        time.sleep(0.002)


def _note(notes: Path, name: str, content: Any) -> None:
    aside = notes / f"{name}.part"
    aside.write_text(json.dumps(content))
    aside.rename(notes / name)


def _noted(notes: Path, kind: str) -> dict[int, Any]:
    return {
        rank: json.loads((notes / f"{kind}.{rank}").read_text())
        for rank in range(_RANKS)
        if (notes / f"{kind}.{rank}").exists()
    }


def _run_rank(rank: int, answer: Any, folder: Path, notes: Path, killer: _Killer) -> None:
    """Run a rank in this forked process, and exit without finalizing Python."""
    code = 1
    try:
        killer.note = notes / f"killed.{rank}"
        _train(rank, answer, folder, notes, killer)
        code = 0
    except NotImplementedError:
        _note(notes, f"unwritten.{rank}", True)
    except BaseException as error:
        _note(notes, f"error.{rank}", f"{type(error).__name__}: {error}")
    finally:
        os._exit(code)


def _attempt(answer: Any, folder: Path, killers: Mapping[int, _Killer]) -> dict[str, dict[int, Any]]:
    """Start both ranks, wait until they exit, and return the recorded progress. If one rank fails, kill the other."""
    with TemporaryDirectory(prefix="attempt-") as name:
        notes, ranks = Path(name), {}
        for rank in range(_RANKS):
            child = os.fork()
            if child == 0:
                _run_rank(rank, answer, folder, notes, killers.get(rank, _Killer(answer)))
            ranks[child] = rank
        codes: dict[int, int] = {}  # by rank
        deadline, late = time.monotonic() + _HANG_SECONDS, False
        while len(codes) < _RANKS:
            for child, rank in ranks.items():
                if rank not in codes and (waited := os.waitpid(child, os.WNOHANG))[0]:
                    codes[rank] = os.waitstatus_to_exitcode(waited[1])
            late = time.monotonic() > deadline
            if late or any(codes.values()):
                time.sleep(0.02)  # the other rank may continue for a moment, as on a cluster
                for child in (child for child, rank in ranks.items() if rank not in codes):
                    os.kill(child, signal.SIGKILL)
            time.sleep(0.002)
        if any(_noted(notes, "unwritten").values()):
            raise NotImplementedError
        errors = _noted(notes, "error")
        expect(not late, f"A rank waits forever. All ranks must enter the same collectives. {_errors(errors)}")
        return {kind: _noted(notes, kind) for kind in ("loaded", "saved", "done", "error", "killed")}


def _errors(errors: Mapping[int, str]) -> str:
    """Return a description of the errors, excluding connection errors caused by the other rank's failure."""
    causes = {rank: error for rank, error in errors.items() if "gloo" not in error} or errors
    return " ".join(f"Rank {rank} raised {error}." for rank, error in causes.items())


def _judge(notes: dict[str, dict[int, Any]], durable: int, happened: str) -> int:
    """Check the recorded progress of one attempt, and return the earliest step that later attempts may load."""
    loaded = set(notes["loaded"].values())
    expect(len(loaded) < 2, f"{happened} Then both ranks must load the same step, got steps {sorted(loaded)}.")
    if not notes["killed"]:  # otherwise, the other rank's error may be a consequence of the kill
        complete = len(notes["done"]) == _RANKS
        expect(complete, f"{happened} Then the ranks failed. {_errors(notes['error'])}")
    for step in loaded:
        expect(
            step >= durable,
            f"{happened} Then `load` must return step {durable} or later, because this step was saved, got step "
            f"{step}.",
        )
    for rank, (right, _) in notes["done"].items():
        expect(right, f"{happened} Then rank {rank} finished with a state that differs from an uninterrupted run.")
    return max([durable, *loaded, *notes["saved"].values()])


def _damage(folder: Path, chance: random.Random) -> str:
    """Flip a bit of the newest large file, or truncate the file, at random. Return a description of the damage."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > _NUMBERS]
    path = max(files, key=lambda each: each.stat().st_mtime_ns)
    if chance.random() < 0.5:
        os.truncate(path, path.stat().st_size // 2)
        return f"{path.name} was truncated."
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return f"One bit of {path.name} was flipped."


def _survive(world: World, answer: Any) -> str:
    """Run the attempts in a single-threaded process, which can safely fork ranks."""
    chance = random.Random(0)
    torch.set_num_threads(1)
    with TemporaryDirectory(prefix="chaos-") as name:
        first = _attempt(answer, Path(name) / "uninterrupted", {})
        _judge(first, 0, "No rank was killed.")
        lines = {rank: seen for rank, (_, seen) in first["done"].items()}
        kills, runs = 0, 0
        while kills < _KILLS:
            folder, durable, happened, done = Path(name) / f"run{runs}", 0, "A new run was started.", False
            while not done:
                rank, own = chance.randrange(_RANKS), kills % 2 == 0
                moment = chance.randint(1, max(1, lines[rank][0 if own else 1]))
                killer = _Killer(answer, moment if own else None, None if own else moment)
                both = chance.random() < 0.2
                killers = {each: copy.deepcopy(killer) for each in range(_RANKS) if both or each == rank}
                notes = _attempt(answer, folder, killers if kills < _KILLS else {})
                durable = _judge(notes, durable, happened)
                done = len(notes["done"]) == _RANKS
                if not done:
                    kills += 1
                    happened = f"{'Both ranks were' if both else f'Rank {rank} was'} killed, and the run was restarted."
            runs += 1
            used = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            one = sum(_size(rank) for rank in range(_RANKS))
            expect(
                used <= 4 * one,
                f"After {kills} kills, the folder must contain at most {4 * one:,} bytes, got {used:,}. Keep 2 or 3 "
                f"checkpoints of about {one:,} bytes, and remove unfinished files.",
            )
            happened = f"A run had finished. {_damage(folder, chance)} The run was restarted."
            notes = _attempt(answer, folder, {})
            loaded = sorted(set(notes["loaded"].values()))
            expect(
                loaded in ([], [_STEPS - 1]),
                f"{happened} Then `load` must return step {_STEPS - 1}, the latest undamaged checkpoint, on both "
                f"ranks, got steps {loaded}.",
            )
            _judge(notes, 0, happened)
    return f"Your class survived {kills} kills in {runs} runs, and {runs} damaged files."


def _size(rank: int) -> int:
    return sum(value.nbytes for value in _new_state(rank).values() if isinstance(value, torch.Tensor)) + 2000


def _test_checkpoints(answer: Answer) -> str:
    methods = [getattr(answer, name, None) for name in ("save", "load")]
    expect(all(map(callable, methods)), "Checkpoints must be a class with the methods `save` and `load`.")
    [praise] = on_ranks(_survive, 1, answer, stuck="The check did not finish.", timeout=300)
    return str(praise)


class _Checkpoints:
    keep = 2  # checkpoints

    def __init__(self, folder: Path) -> None:
        self.folder, self.rank = folder, dist.get_rank()

    def save(self, step: int, state: dict[str, Any]) -> None:
        aside = self.folder / "unfinished"
        if self.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
        dist.barrier()
        path = aside / f"rank_{self.rank}.pt"
        torch.save(state, path)
        self.sync(path)
        hashes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(hashes, hashlib.sha256(path.read_bytes()).hexdigest())
        if self.rank == 0:
            (aside / "manifest.json").write_text(json.dumps(hashes))
            self.sync(aside / "manifest.json")
            self.sync(aside)
            aside.rename(self.folder / f"step_{step:08}")
            self.sync(self.folder)
            for old in sorted(self.folder.glob("step_*"))[: -self.keep]:
                shutil.rmtree(old)
        dist.barrier()

    def load(self) -> tuple[int, dict[str, Any]] | None:
        newest: list[Any] = [None]
        if self.rank == 0:
            for found in sorted(self.folder.glob("step_*"), reverse=True):
                if newest[0] is None and self.is_valid(found):
                    newest = [found.name]
                elif newest[0] is None:
                    shutil.rmtree(found)  # otherwise, this step could not be saved again
        dist.broadcast_object_list(newest)
        if newest[0] is None:
            return None
        return int(newest[0].removeprefix("step_")), torch.load(self.folder / newest[0] / f"rank_{self.rank}.pt")

    def is_valid(self, folder: Path) -> bool:
        try:
            hashes = json.loads((folder / "manifest.json").read_text())
            files = [folder / f"rank_{rank}.pt" for rank in range(len(hashes))]
            return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files] == hashes
        except (OSError, ValueError):
            return False

    def sync(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


class _InPlace(_Checkpoints):
    """A variant in which each rank overwrites its own file."""

    def save(self, step: int, state: dict[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        torch.save([step, state], self.folder / f"rank_{self.rank}.pt")
        dist.barrier()

    def load(self) -> tuple[int, dict[str, Any]] | None:
        path = self.folder / f"rank_{self.rank}.pt"
        return tuple(torch.load(path)) if path.exists() else None


class _RanksApart(_InPlace):
    """A variant in which each rank replaces its own file atomically, independently of the other rank."""

    def save(self, step: int, state: dict[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        part = self.folder / f"rank_{self.rank}.part"
        torch.save([step, state], part)
        self.sync(part)
        part.rename(self.folder / f"rank_{self.rank}.pt")
        self.sync(self.folder)
        dist.barrier()


class _DoesNotWait(_Checkpoints):
    """A variant in which rank 1 continues before rank 0 has renamed the folder."""

    def save(self, step: int, state: dict[str, Any]) -> None:
        parts = self.folder / f"step_{step:08}.part"
        parts.mkdir(parents=True, exist_ok=True)
        path = parts / f"rank_{self.rank}.pt"
        torch.save(state, path)
        hashes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(hashes, hashlib.sha256(path.read_bytes()).hexdigest())
        if self.rank == 0:
            for file in parts.iterdir():
                with file.open("rb") as opened:
                    while opened.read(100):  # rank 1 does not wait for this slow check
                        pass
            shutil.rmtree(self.folder / f"step_{step:08}", ignore_errors=True)
            (parts / "manifest.json").write_text(json.dumps(hashes))
            parts.rename(self.folder / f"step_{step:08}")
            for old in sorted(self.folder.glob("step_????????"))[:-2]:
                shutil.rmtree(old)

    def load(self) -> tuple[int, dict[str, Any]] | None:
        if self.rank == 0:
            for part in self.folder.glob("*.part"):
                shutil.rmtree(part)
        return super().load()


class _NoChecksums(_Checkpoints):
    """A variant that accepts every checkpoint that contains a manifest."""

    def is_valid(self, folder: Path) -> bool:
        return (folder / "manifest.json").exists()


class _OnlyTheNewest(_Checkpoints):
    """A variant that keeps only the latest checkpoint."""

    keep = 1


class _KeepsAll(_Checkpoints):
    """A variant that never removes a checkpoint."""

    keep = 1000


class _KeepsTheDamaged(_Checkpoints):
    """A variant that does not remove a damaged checkpoint, so the checkpoint's step cannot be saved again."""

    def load(self) -> tuple[int, dict[str, Any]] | None:
        newest: list[Any] = [None]
        if self.rank == 0:
            valid = [found.name for found in sorted(self.folder.glob("step_*")) if self.is_valid(found)]
            newest = valid[-1:] or [None]
        dist.broadcast_object_list(newest)
        if newest[0] is None:
            return None
        return int(newest[0].removeprefix("step_")), torch.load(self.folder / newest[0] / f"rank_{self.rank}.pt")


checkpoints = Exercise(
    task=(
        "Checkpoints(folder): write a class with the collective methods save(step, state) and load(), for two ranks "
        "with different states. load returns (step, state) from the latest complete checkpoint, or None. If a rank is "
        "killed at any moment, or if a file is damaged, at most one step may be lost."
    ),
    test=_test_checkpoints,
    solution=_Checkpoints,
    wrong={
        "overwrites the files": _InPlace,
        "replaces each rank's file separately": _RanksApart,
        "does not wait for rank 0": _DoesNotWait,
        "does not compare checksums": _NoChecksums,
        "keeps only the newest checkpoint": _OnlyTheNewest,
        "keeps all checkpoints": _KeepsAll,
        "leaves a damaged checkpoint in place": _KeepsTheDamaged,
    },
    hints=(
        "All ranks write to one temporary folder. When all ranks have finished, rank 0 renames the folder, for example "
        "to step_00000003.",
        "A manifest with the SHA-256 of each file lets `load` detect a damaged file. Rank 0 chooses the checkpoint and "
        "sends its name to the other ranks with dist.broadcast_object_list.",
        "Keep the last two checkpoints. Remove invalid checkpoints in `load`: a rename to a non-empty folder fails.",
        "`save` may return only when the checkpoint is complete, so call dist.barrier() at the end.",
    ),
)
