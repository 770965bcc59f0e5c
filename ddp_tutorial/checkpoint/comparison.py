"""Compare two checkpoints. The command `python -m ddp_tutorial checkpoint diff` prints the differences."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ddp_tutorial.checkpoint.components import State
from ddp_tutorial.checkpoint.consistency import named_leaves, summary
from ddp_tutorial.checkpoint.manifest import Manifest, differences, read_verified
from ddp_tutorial.checkpoint.storage import read_full, read_state


def compare(first: Path, second: Path) -> dict[str, str]:
    """Return the differences between the settings, files, and values of two checkpoint folders.

    Returns:
        A dict that maps each differing setting, file, or value to a description of the difference.

    Raises:
        CheckpointError: If a checkpoint is damaged.
    """
    one, other = read_verified(first), read_verified(second)
    result = {f"config {key}": f"{a!r} and {b!r}" for key, (a, b) in differences(one.config, other.config).items()}
    states, other_states = _states(first, one), _states(second, other)
    for name in states | other_states:
        if name not in states or name not in other_states:
            result[name] = "only in one checkpoint"
            continue
        values, others = (dict(named_leaves(name, of[name]())) for of in (states, other_states))
        for path in values | others:
            if description := _difference(values.get(path), others.get(path)):
                result[path] = description
    return result


def _states(folder: Path, manifest: Manifest) -> dict[str, Callable[[], State]]:
    """Map the path of each unsharded file, and the name of each sharded component, to a function that reads the state.

    Shards are not compared file by file, because they depend on the number of ranks.
    """
    states: dict[str, Callable[[], State]] = {}
    for name, component in manifest.components.items():
        if component.shared == "sharded":
            states[name] = partial(read_full, folder / name)
        else:
            states |= {file.path: partial(read_state, folder / file.path) for file in component.files}
    return states


def _difference(a: Any, b: Any) -> str | None:
    """Describe the difference between two values, or return None if they are equal."""
    if summary(a, "tensor") == summary(b, "tensor"):
        return None
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and (a.shape, a.dtype) == (b.shape, b.dtype):
        if torch.equal(a, b):  # 0.0 and -0.0
            return None
        wide = torch.complex128 if a.is_complex() else torch.float64
        most = (a.to(wide) - b.to(wide)).abs().max().item()
        return f"{int((a != b).sum())} of {a.numel()} elements differ, by at most {most:.3g}"
    return f"{_formatted(a)} and {_formatted(b)}"


def _formatted(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return repr(value)
