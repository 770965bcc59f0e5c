"""Compare two checkpoints. The command `python -m ddp_tutorial checkpoint diff` prints the result."""

from pathlib import Path
from typing import Any

import torch

from ddp_tutorial.checkpoint.consistency import named_leaves, summary
from ddp_tutorial.checkpoint.manifest import differences, read_verified
from ddp_tutorial.checkpoint.storage import read_state


def compare(first: Path, second: Path) -> dict[str, str]:
    """Return the differences between the settings, files, and values of two checkpoints.

    Args:
        first: The folder of one checkpoint.
        second: The folder of the other checkpoint.

    Returns:
        A dict that maps each differing setting, file, or value to a description of the difference.

    Raises:
        CheckpointError: If a checkpoint is damaged.
    """
    one, other = read_verified(first), read_verified(second)
    result = {f"config {key}": f"{a!r} and {b!r}" for key, (a, b) in differences(one.config, other.config).items()}
    for name in dict.fromkeys(file.path for manifest in (one, other) for file in manifest.files):
        if not all((folder / name).is_file() for folder in (first, second)):
            result[name] = "only in one checkpoint"
            continue
        values, others = (dict(named_leaves(name, read_state(folder / name))) for folder in (first, second))
        for path in values | others:
            if description := _difference(values.get(path), others.get(path)):
                result[path] = description
    return result


def _difference(a: Any, b: Any) -> str | None:
    """Describe the difference between two values, or return None if they are equal."""
    if summary(a, "tensor") == summary(b, "tensor"):
        return None
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and (a.shape, a.dtype) == (b.shape, b.dtype):
        if torch.equal(a, b):  # 0.0 and -0.0
            return None
        most = (a.double() - b.double()).abs().max().item()
        return f"{int((a != b).sum())} of {a.numel()} elements differ, by at most {most:.3g}"
    return f"{_formatted(a)} and {_formatted(b)}"


def _formatted(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return repr(value)
