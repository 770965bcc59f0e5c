"""Where do two checkpoints differ? `python -m ddp_tutorial checkpoint diff` shows it."""

from pathlib import Path
from typing import Any

import torch

from ddp_tutorial.checkpoint.consistency import named_leaves, summary
from ddp_tutorial.checkpoint.manifest import differences, read_verified
from ddp_tutorial.checkpoint.storage import read_state


def compare(first: Path, second: Path) -> dict[str, str]:
    """Where two checkpoints differ, and how: settings, files, values. Raises `CheckpointError` for damaged ones."""
    one, other = read_verified(first), read_verified(second)
    found = {f"config {key}": f"{a!r} and {b!r}" for key, (a, b) in differences(one.config, other.config).items()}
    for name in dict.fromkeys(file.path for manifest in (one, other) for file in manifest.files):
        if not all((folder / name).is_file() for folder in (first, second)):
            found[name] = "in one of them only"
            continue
        values, others = (dict(named_leaves(name, read_state(folder / name))) for folder in (first, second))
        for where in values | others:
            if told := _difference(values.get(where), others.get(where)):
                found[where] = told
    return found


def _difference(a: Any, b: Any) -> str | None:
    """How two values differ, in words; None if they are the same."""
    if summary(a, "tensor") == summary(b, "tensor"):
        return None
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and (a.shape, a.dtype) == (b.shape, b.dtype):
        if torch.equal(a, b):  # 0.0 and -0.0
            return None
        most = (a.double() - b.double()).abs().max().item()
        return f"{int((a != b).sum())} of {a.numel()} elements differ, by {most:.3g} at most"
    return f"{_shown(a)} and {_shown(b)}"


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return repr(value)
