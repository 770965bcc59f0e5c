"""Nothing valid is removed before something newer is valid, and damaged checkpoints are kept."""

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddp_tutorial.checkpoint.checkpointer import Checkpointer
from ddp_tutorial.checkpoint.components import Component, FunctionState
from ddp_tutorial.checkpoint.manifest import checkpoint_name, list_checkpoints, read_manifest, verify
from ddp_tutorial.checkpoint.resuming import latest_valid
from ddp_tutorial.checkpoint.storage import read_state
from ddp_tutorial.files import observe_disk, replaced_path
from ddp_tutorial.world import World
from disk import Point, failing, noting
from ranks import error_of

PART = Component(FunctionState(lambda: {"x": 1}, lambda _: None))


def saved(folder: Path, *steps: int, **options: Any) -> list[int]:
    """Save these steps in one attempt. Return the steps that exist afterward."""
    checkpointer = Checkpointer(folder, {"part": PART}, World(), **options)
    for number in steps:
        checkpointer.save(number, {"eval_loss": float(number)})
    checkpointer.close()
    return [read_manifest(path).step for path in list_checkpoints(folder)]


def spoil(folder: Path) -> None:
    (folder / "part.pt").write_bytes(b"?")


@pytest.mark.parametrize("keep_last", [1, 2])
def test_a_new_checkpoint_is_kept_if_later_ones_are_damaged(keep_last: int, tmp_path: Path) -> None:
    assert saved(tmp_path, 15, 20) == [15, 20]
    spoil(tmp_path / checkpoint_name(15))
    spoil(tmp_path / checkpoint_name(20))
    for number in (5, 10):  # one after another, each by a process that is killed after its save
        saved(tmp_path, number, keep_last=keep_last)
        assert latest_valid(World(), tmp_path)[0] == tmp_path / checkpoint_name(number)
    assert saved(tmp_path, 15, keep_last=keep_last) == [10, 15, 20][2 - keep_last :]
    assert verify(tmp_path / checkpoint_name(15)) == []
    assert (tmp_path / checkpoint_name(20) / "part.pt").read_bytes() == b"?", "somebody has to look at it"


def test_a_new_checkpoint_is_kept_if_later_ones_are_valid(tmp_path: Path) -> None:
    saved(tmp_path, 15, 20)
    assert saved(tmp_path, 5) == [5, 15, 20]
    assert saved(tmp_path, 10) == [10, 15, 20]


def test_a_damaged_checkpoint_does_not_count_as_one_of_the_best(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3)
    options: dict[str, Any] = {"keep_last": 1, "keep_best": 1}
    spoil(tmp_path / checkpoint_name(2))
    assert saved(tmp_path, 4, **options) == [2, 3, 4]
    assert saved(tmp_path, 5, **options) == [2, 3, 5]


def test_checkpoints_of_earlier_attempts_are_verified_once(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, keep_last=9)
    spoil(tmp_path / checkpoint_name(1))
    checkpointer = Checkpointer(tmp_path, {"part": PART}, World(), keep_last=9)
    seen: list[Path] = []
    with observe_disk(lambda operation, path: seen.append(path) if operation == "read" else None):
        for number in (3, 4, 5):
            checkpointer.save(number)
        checkpointer.close()
    verified = [path for path in seen if path.parent in (tmp_path / checkpoint_name(1), tmp_path / checkpoint_name(2))]
    assert [path.name for path in verified] == ["manifest.json", "manifest.json", "part.pt"]
    assert not [
        path for path in seen if path.parent.parent == tmp_path and path not in verified and path.parent.name[0] != "."
    ]


def test_a_checkpoint_that_cannot_be_removed_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpointer = Checkpointer(tmp_path, {"part": PART}, World(), keep_last=1)
    checkpointer.save(1)
    with observe_disk(failing(("rename", checkpoint_name(1)), errno.EIO)):
        checkpointer.save(2)
        checkpointer.close()
    assert f"cannot remove {tmp_path / checkpoint_name(1)}: [Errno 5]" in caplog.text
    checkpointer.save(3)
    checkpointer.close()
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint_name(3)]


# ------------------------------------------------------------------------------------------- one step saved again


class Counting:
    """A state that counts how often it was saved."""

    def __init__(self) -> None:
        self.times = 0

    def state_dict(self) -> dict[str, int]:
        self.times += 1
        return {"times": self.times}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.times = state["times"]


def as_kills_would_leave_it(folder: Path, copies: Path, work: Callable[[], object]) -> list[Path]:
    """Yield copies of `folder`, as a kill before or after each disk operation would leave it."""
    found: list[Path] = []

    def copy(*_: object) -> None:
        found.append(copies / f"{len(found)}")
        shutil.copytree(folder, found[-1])

    with observe_disk(copy):
        work()
    copy()
    return found


def newest(folder: Path) -> int:
    """Return the number of the save of the newest valid checkpoint, or 0."""
    found, problems = latest_valid(World(), folder)
    return 0 if found is None or problems else read_state(found / "part.pt")["times"]


def test_a_kill_while_saving_a_step_again_leaves_a_valid_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    parts = {"part": Component(Counting())}
    checkpointer = Checkpointer(folder, parts, World(), keep_last=1)
    checkpointer.save(1)

    def save_again() -> None:
        checkpointer.save(1)
        checkpointer.close()

    copies = as_kills_would_leave_it(folder, tmp_path / "killed", save_again)
    assert len(copies) > 10
    seen = []
    for copy in copies:
        seen.append(newest(copy))
        Checkpointer(copy, parts, World()).recover()
        assert [path.name for path in copy.iterdir()] == [checkpoint_name(1)]
        assert newest(copy) == seen[-1]
    assert seen == sorted(seen)
    assert set(seen) == {1, 2}


@pytest.mark.parametrize("damaged", [(), (1,), (0,), (0, 1)])
def test_of_an_interrupted_replacement_the_newest_intact_checkpoint_is_kept(
    damaged: tuple[int, ...], tmp_path: Path
) -> None:
    checkpointer = Checkpointer(tmp_path, {"part": Component(Counting())}, World())
    checkpointer.save(1)
    new = tmp_path / checkpoint_name(1)
    old = shutil.copytree(new, tmp_path / "kept")
    checkpointer.save(1)
    old.rename(replaced_path(new))
    for which in damaged:
        spoil((replaced_path(new), new)[which])
    checkpointer.recover()
    assert [path.name for path in tmp_path.iterdir()] == [new.name]
    assert newest(tmp_path) == {(): 2, (0,): 2, (1,): 1, (0, 1): 0}[damaged]


def test_a_disk_failure_while_saving_a_step_again_leaves_a_valid_one(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, {"part": Component(Counting())}, World(), keep_last=1)
    checkpointer.save(1)
    points: list[Point] = []
    with observe_disk(noting(points)):
        checkpointer.save(1)
    for index, at in enumerate(points):
        before = newest(tmp_path)
        with observe_disk(failing(at, errno.EIO, points[:index].count(at))):
            told = error_of(lambda: checkpointer.save(1))
        assert told == "no error" if at[0] == "remove" else "Input/output error" in told, at
        assert newest(tmp_path) >= before, at
        Checkpointer(tmp_path, checkpointer.components, World()).recover()
        assert [path.name for path in tmp_path.iterdir()] == [checkpoint_name(1)], at
