"""At any moment, a file is the complete old or the complete new file, and no other files are left."""

import errno
import json
import math
import os
import stat
import threading
import time
from pathlib import Path

import pytest

from ddp_tutorial.files import (
    build_once,
    directory_replaced_atomically,
    directory_written_atomically,
    is_locked,
    locked,
    new_directory,
    observe_disk,
    recover,
    remove_temporary,
    replaced_path,
    write_atomically,
    write_json,
)
from disk import failing, noting
from ranks import open_files


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_writing_creates_and_replaces_a_file(tmp_path):
    path = tmp_path / "state.bin"
    write_atomically(path, b"old, and longer")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["state.bin"]


def fail(*_args, **_options):
    raise OSError("No space left on device")


@pytest.mark.parametrize("broken", [(os, "fsync"), (Path, "rename")], ids=["while writing", "while renaming"])
@pytest.mark.parametrize("old", [b"old", None], ids=["replacing", "new"])
def test_a_failure_leaves_the_old_file_and_no_temporary_files(tmp_path, monkeypatch, broken, old):
    path = tmp_path / "state.bin"
    if old is not None:
        path.write_bytes(old)
    before = names(tmp_path)
    monkeypatch.setattr(*broken, fail)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    assert names(tmp_path) == before
    assert old is None or path.read_bytes() == old


def test_a_reader_never_sees_a_partial_file(tmp_path):
    path = tmp_path / "state.bin"
    versions = [bytes([number]) * 200_000 for number in (1, 2)]
    write_atomically(path, versions[0])
    stop = threading.Event()
    seen = set()

    def read():
        while not stop.is_set():
            seen.add(path.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    deadline = time.monotonic() + 60
    turn = 0
    while turn < 20 or (len(seen) < 2 and time.monotonic() < deadline):  # a reader that has not read yet sees nothing
        turn += 1
        write_atomically(path, versions[turn % 2])
    stop.set()
    reader.join()
    assert seen == set(versions)


def test_json_is_indented_and_ends_with_a_newline(tmp_path):
    path = tmp_path / "result.json"
    write_json(path, {"loss": 0.1, "ranks": [0, 1]})
    text = path.read_text()
    assert json.loads(text) == {"loss": 0.1, "ranks": [0, 1]}
    assert text.startswith('{\n  "loss": 0.1')
    assert text.endswith("}\n")


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_json_rejects_invalid_values_and_keeps_the_old_file(tmp_path, number):
    path = tmp_path / "result.json"
    write_json(path, {"loss": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"loss": number})
    assert json.loads(path.read_text()) == {"loss": 1}
    assert names(tmp_path) == ["result.json"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_only_folders_may_not_support_flushing(tmp_path, monkeypatch, number):
    """9p, CIFS and some FUSE file systems return EINVAL or ENOTSUP for folders."""
    refused = {"folders": False, "files": False}
    fsync = os.fsync

    def refusing(fd):
        if refused["folders" if stat.S_ISDIR(os.fstat(fd).st_mode) else "files"]:
            raise OSError(number, os.strerror(number))
        fsync(fd)

    def write():
        write_atomically(tmp_path / "x", b"x")
        with directory_replaced_atomically(tmp_path / "folder") as aside:
            (aside / "x").write_bytes(b"x")

    monkeypatch.setattr(os, "fsync", refusing)
    refused["folders"] = True
    if number == errno.EIO:
        with pytest.raises(OSError, match=os.strerror(number)):
            write()
    else:
        write()
        assert names(tmp_path / "folder") == ["x"]
    refused.update(folders=False, files=True)
    with pytest.raises(OSError, match=os.strerror(number)):
        write()


def test_a_directory_gets_its_name_when_it_is_complete(tmp_path):
    path = tmp_path / "parent" / "step-5"
    with directory_written_atomically(path) as aside:
        (aside / "model").mkdir()
        (aside / "model" / "weights").write_bytes(b"w")
        (aside / "manifest.json").write_text("{}")
        assert not path.exists()
        assert aside.parent == path.parent  # the same file system, so that the rename is one step
    assert sorted(str(each.relative_to(path)) for each in path.rglob("*")) == [
        "manifest.json",
        "model",
        "model/weights",
    ]
    assert names(path.parent) == ["step-5"]


def test_a_directory_is_completely_on_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    synced, fsync, rename = set(), os.fsync, Path.rename

    def noting(fd):
        synced.add(os.fstat(fd).st_ino)
        fsync(fd)

    def renaming(aside, path):
        inside = {each.stat().st_ino for each in (aside, *aside.rglob("*"))}
        assert len(inside) == 4
        assert inside <= synced
        return rename(aside, path)

    monkeypatch.setattr(os, "fsync", noting)
    monkeypatch.setattr(Path, "rename", renaming)
    with directory_written_atomically(tmp_path / "step-5") as aside:
        (aside / "model").mkdir()
        (aside / "model" / "weights").write_bytes(b"w")
        (aside / "manifest.json").write_text("{}")
    assert tmp_path.stat().st_ino in synced


def test_a_directory_that_fails_is_removed(tmp_path, monkeypatch):
    path = tmp_path / "step-5"

    def fill(error=None):
        with directory_written_atomically(path) as aside:
            (aside / "whole").write_bytes(b"w")
            if error:
                raise error

    with pytest.raises(KeyError, match="in the middle"):
        fill(KeyError("in the middle"))
    assert names(tmp_path) == []
    for broken in [(os, "fsync"), (Path, "rename")]:
        with monkeypatch.context() as patch:
            patch.setattr(*broken, fail)
            with pytest.raises(OSError, match="No space left"):
                fill()
        assert names(tmp_path) == []
    fill()  # the name is still free
    assert names(path) == ["whole"]


def test_an_existing_directory_is_not_changed(tmp_path):
    path = tmp_path / "step-5"
    path.mkdir()
    (path / "kept").write_bytes(b"k")
    with pytest.raises(FileExistsError, match="step-5 already exists"), directory_written_atomically(path):
        pytest.fail("the block was entered")
    assert names(path) == ["kept"]
    assert names(tmp_path) == ["step-5"]


def test_new_directories_are_numbered_if_the_name_exists(tmp_path):
    parent = tmp_path / "runs" / "today"
    made = [new_directory(parent, "quick") for _ in range(3)]
    assert [path.name for path in made] == ["quick", "quick-2", "quick-3"]
    made[1].rmdir()
    assert new_directory(parent, "quick").name == "quick-2"
    (parent / "file").write_bytes(b"")
    assert new_directory(parent, "file").name == "file-2"  # a file of that name also counts
    assert new_directory(parent, "sweep/lr").relative_to(parent) == Path("sweep/lr")


def test_threads_that_request_the_same_name_get_different_directories(tmp_path):
    start = threading.Barrier(8)
    made = []

    def make():
        start.wait()
        made.append(new_directory(tmp_path / "runs", "quick"))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(path.name for path in made) == ["quick", *(f"quick-{number}" for number in range(2, 9))]
    assert names(tmp_path / "runs") == sorted(path.name for path in made)


def test_leftovers_of_a_killed_process_do_no_harm(tmp_path):
    path = tmp_path / "model"
    killed = directory_written_atomically(path)  # whose process has the same number in its next life, in a container
    (killed.__enter__() / "half").write_bytes(b"h")
    with directory_written_atomically(path) as aside:
        (aside / "whole").write_bytes(b"w")
    assert names(path) == ["whole"]
    write_atomically(tmp_path / "log", b"")
    assert len(names(tmp_path)) == 3
    remove_temporary(tmp_path, "mod")
    assert len(names(tmp_path)) == 3
    remove_temporary(tmp_path, "model")
    assert names(tmp_path) == ["log", "model"]


def test_a_directory_is_replaced_without_an_incomplete_state(tmp_path):
    path, moments = tmp_path / "model", []

    def look(*_):
        there = path if path.exists() else replaced_path(path)
        moments.append((there / "weights").read_bytes())

    def write(data):
        with directory_replaced_atomically(path) as aside:
            (aside / "weights").write_bytes(data)

    write(b"old")
    with observe_disk(look):
        write(b"new")
    look()
    assert moments == sorted(moments, reverse=True)
    assert set(moments) == {b"old", b"new"}
    for at in (("fsync", "weights"), ("rename", "model")):
        with pytest.raises(OSError, match="Input/output"), observe_disk(failing(at, errno.EIO)):
            write(b"never")
        look()
        assert moments[-1] == b"new"
        recover(path)  # a disk that does not give the new one the name does not give it back to the old one either
        assert names(tmp_path) == ["model"]
    path.rename(replaced_path(path))  # as a kill between two names leaves it
    recover(path)
    assert names(tmp_path) == ["model"]


def test_an_interrupt_between_the_two_renames_restores_the_old_directory(tmp_path):
    path, interrupts = tmp_path / "model", [KeyboardInterrupt()]
    path.mkdir()
    (path / "weights").write_bytes(b"old")

    def interrupt(operation, name):
        if (operation, name) == ("rename", path) and interrupts:
            raise interrupts.pop()

    with pytest.raises(KeyboardInterrupt), observe_disk(interrupt), directory_replaced_atomically(path) as aside:
        (aside / "weights").write_bytes(b"new")
    assert names(tmp_path) == ["model"]
    assert (path / "weights").read_bytes() == b"old"


def test_observers_of_the_disk_see_every_operation_on_a_directory(tmp_path):
    points = []
    with observe_disk(noting(points)), directory_written_atomically(tmp_path / "step-5") as aside:
        (aside / "weights").write_bytes(b"w")
    parent = ("fsync", tmp_path.name)
    assert points == [("write", "step-5"), ("fsync", "step-5"), ("fsync", "weights"), ("rename", "step-5"), parent]


def test_several_processes_build_a_directory_once(tmp_path):
    folder = tmp_path / "cache"

    def fill(aside):
        (aside / "data").write_bytes(b"first")

    def lose(aside):  # a different process finishes first
        build_once(folder, fill)
        (aside / "data").write_bytes(b"second")

    with pytest.raises(OSError, match="No space left"):
        build_once(folder, fail)
    assert names(tmp_path) == []
    build_once(folder, lose)
    build_once(folder, fail)  # not called
    assert (folder / "data").read_bytes() == b"first"
    assert names(tmp_path) == ["cache"]


def test_no_file_descriptor_stays_open(tmp_path):
    """Other descriptors may be closed meanwhile: after a failed launch, those of its ranks wait for the collector."""
    before = open_files()
    write_atomically(tmp_path / "state", b"s")
    with locked(tmp_path):
        pass
    assert not is_locked(tmp_path)
    assert open_files() <= before


def test_a_nonexistent_directory_is_not_locked(tmp_path):
    assert not is_locked(tmp_path / "gone")
