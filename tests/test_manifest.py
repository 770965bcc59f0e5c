"""Checkpoints on disk, without torch: which one is the newest, which are intact, which can be removed."""

import errno
import hashlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_tutorial.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    checkpoint_name,
    checkpoints_to_remove,
    differences,
    latest,
    list_checkpoints,
    read_manifest,
    read_verified,
    sha256_of_json,
    verify,
)
from ddp_tutorial.files import observe_disk
from disk import failing

CONTENT: dict[str, Any] = {
    "schema_version": 1,
    "step": 3,
    "world_size": 1,
    "versions": {},
    "config": {},
    "config_sha256": sha256_of_json({}),
    "metrics": {},
    "components": {},
}


def sealed(content: dict[str, Any]) -> str:
    return json.dumps(content | {"sha256": sha256_of_json(content)}, indent=2)


def made(parent: Path, step: int, **changes: Any) -> Path:
    folder = parent / checkpoint_name(step)
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_text(sealed(CONTENT | {"step": step} | changes))
    return folder


def test_the_newest_checkpoint_has_the_highest_step_and_a_manifest(tmp_path: Path) -> None:
    made(tmp_path, 200)
    made(tmp_path, 30)
    made(tmp_path, 123456789)
    (tmp_path / checkpoint_name(999999999)).mkdir()
    (tmp_path / ".step_00000500.17.part").mkdir()
    (tmp_path / "notes.txt").touch()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_00000030", "step_00000200", "step_123456789"]
    assert latest(tmp_path) == tmp_path / "step_123456789"
    assert latest(tmp_path / "nothing") is None


def test_listing_does_not_import_torch() -> None:
    code = "import sys; import ddp_tutorial.checkpoint.manifest; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("{", r"manifest\.json is damaged: "),
        ("[]", "is damaged"),
        (
            json.dumps(CONTENT | {"schema_version": 2}),
            r"newer version \(schema 2; this version supports schemas up to 1\)",
        ),
        (json.dumps({**CONTENT, "step": "three"}), r"is damaged: the content"),
        (sealed({**CONTENT, "step": "three"}), r"is damaged: step: "),
        ("[" * 200_000, "is damaged"),
        ('{"a":' * 200_000, "is damaged"),
        ('{"a":' * 900 + "1" + "}" * 900, "is damaged"),  # shallow enough to parse, but too deep to serialize
        ("1" * 5_000, "is damaged"),
        ('{"schema_version": 1e400}', "is damaged"),
        ('{"a": "\\ud800", "sha256": "0"}', "is damaged"),
    ],
)
def test_an_unusable_manifest_is_reported(written: str, told: str, tmp_path: Path) -> None:
    folder = made(tmp_path, 3)
    (folder / MANIFEST).write_text(written)
    with pytest.raises(CheckpointError, match=told):
        read_manifest(folder)
    assert len(verify(folder)) == 1


def listing(path: str) -> dict[str, Any]:
    """The components of a manifest with one file."""
    stored = {"path": path, "rank": 0, "nbytes": 6, "sha256": hashlib.sha256(b"secret").hexdigest()}
    return {"components": {"x": {"shared": "global", "span": 1, "files": [stored]}}}


@pytest.mark.parametrize(
    "path",
    [
        *("../secret.pt", "x/../../secret.pt", "..", "{outside}/secret.pt", "link.pt", "inner/secret.pt"),
        *(
            "..\\secret.pt",
            "x\\..\\..\\secret.pt",
            "\\secret.pt",
            "C:\\secret.pt",
            "C:secret.pt",
            "\\\\host\\secret.pt",
        ),
        *("secret.pt\0", "x\ud800.pt", "loop.pt"),
    ],
)
def test_a_manifest_cannot_name_a_file_outside_its_folder(path: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    folder = made(outside, 3, **listing(path.format(outside=outside)))
    (outside / "secret.pt").write_bytes(b"secret")
    (folder / "link.pt").symlink_to("../secret.pt")
    (folder / "loop.pt").symlink_to("loop.pt")
    (folder / "inner").symlink_to(outside)
    with pytest.raises(CheckpointError, match=r"is damaged|cannot be read"):
        read_verified(folder)


def test_a_manifest_may_name_files_in_its_folder_through_links(tmp_path: Path) -> None:
    """In contrast to the test above, these names are all valid."""
    real = made(tmp_path / "elsewhere", 3, **listing("part one/x..pt"))
    (real / "part one").mkdir()
    (real / "part one" / "file").write_bytes(b"secret")
    (real / "part one" / "x..pt").symlink_to("file")
    (tmp_path / "step_00000003").symlink_to(real)
    assert verify(tmp_path / "step_00000003") == []
    (real / "part one" / "file").unlink()
    os.mkfifo(real / "part one" / "file")
    assert verify(real) == [f"{real / 'part one' / 'x..pt'} is not a file"]


def test_any_changed_bit_of_a_manifest_is_detected(tmp_path: Path) -> None:
    folder = made(tmp_path, 3, metrics={"eval_loss": 1.25}, config={"model": {"width": 8}})
    written = (folder / MANIFEST).read_bytes()
    for place in range(len(written)):
        changed = bytearray(written)
        changed[place] ^= 1 << (place % 8)
        (folder / MANIFEST).write_bytes(changed)
        assert verify(folder), f"byte {place}: {changed.decode(errors='replace')}"


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
@pytest.mark.parametrize("file", [MANIFEST, "x.pt"])
def test_an_unreadable_file_is_reported_as_a_problem(file: str, number: int, tmp_path: Path) -> None:
    stored = {"path": "x.pt", "rank": 0, "nbytes": 1, "sha256": hashlib.sha256(b"x").hexdigest()}
    folder = made(tmp_path, 3, components={"x": {"shared": "global", "span": 1, "files": [stored]}})
    (folder / "x.pt").write_bytes(b"x")
    assert verify(folder) == []
    with observe_disk(failing(("read", file), number)):
        assert verify(folder) == [f"{folder / file} cannot be read: {os.strerror(number)}"]


def test_an_inaccessible_checkpoint_is_reported_and_not_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made(tmp_path, 3)
    stat = os.stat

    def refuse(path: Any, **options: Any) -> os.stat_result:
        if Path(path).parent == folder:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", refuse)  # root may read everything
    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert list_checkpoints(tmp_path) == [folder]
    assert verify(folder) == [f"{folder / MANIFEST} cannot be read: Permission denied"]


def test_a_folder_without_a_manifest_is_reported(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a checkpoint: it does not contain manifest"):
        read_manifest(tmp_path)


def test_unknown_fields_of_a_manifest_are_ignored(tmp_path: Path) -> None:
    assert read_manifest(made(tmp_path, 3, of_a_later_minor_version=1)).step == 3


values = st.none() | st.floats(allow_infinity=False) | st.just(0.0) | st.just(math.nan)


@given(st.lists(values, max_size=12), st.integers(1, 4), st.integers(0, 4), st.sampled_from(["min", "max"]))
def test_only_the_last_and_the_best_are_kept(found: list[float | None], last: int, best: int, mode: Any) -> None:
    metrics = {Path(checkpoint_name(step)): value for step, value in enumerate(found)}
    gone = checkpoints_to_remove(metrics, last, best, mode)
    stay = [path for path in metrics if path not in gone]
    assert stay[-last:] == list(metrics)[-last:]
    numbers = sorted((v for v in found if v is not None and not math.isnan(v)), reverse=mode == "max")
    kept = [metrics[path] for path in stay]
    for number in numbers[:best]:
        assert number in kept
    assert len(stay) <= last + best
    spared = gone[:1]
    assert not set(spared) & set(checkpoints_to_remove(metrics, last, best, mode, spared))


def test_zero_is_the_best_possible_loss() -> None:
    metrics = {Path("a"): 0.0, Path("b"): 1.0, Path("c"): None, Path("d"): 2.0}
    assert checkpoints_to_remove(metrics, 1, 1, "min") == [Path("b"), Path("c")]
    assert checkpoints_to_remove(metrics, 1, 1, "max") == [Path("a"), Path("b"), Path("c")]


def test_differences_have_dotted_names() -> None:
    before = {"a": 1, "model": {"width": 8, "layers": 2}, "old": None}
    assert differences(before, {"a": 1, "model": {"width": 16, "layers": 2}, "new": [1]}) == {
        "model.width": (8, 16),
        "new": (None, [1]),
    }
