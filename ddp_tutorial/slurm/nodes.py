"""Expand Slurm's notation for node lists and for the number of tasks per node."""

import re
from itertools import cycle, product

from ddp_tutorial.config import ConfigError

_HOST = r"(?:[\w.-]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+"
_HOSTS = rf"{_HOST}(?:,{_HOST})*"


def node_names(nodelist: str) -> list[str]:
    """Expand a node list, such as `"gpu[03-05,9],login"`, to `["gpu03", "gpu04", "gpu05", "gpu9", "login"]`.

    Raises:
        ConfigError: If `nodelist` is invalid, contains a descending range, or contains a node twice.
    """
    if not re.fullmatch(_HOSTS, nodelist):
        raise ConfigError(f"a node list must have the form 'node[01-03]', got {nodelist!r}")
    found = []
    for pattern in re.findall(_HOST, nodelist):
        parts = re.split(r"\[(.*?)\]", pattern)  # outside brackets, inside, outside ...
        choices = [_numbers(part) if inside else [part] for part, inside in zip(parts, cycle([False, True]))]
        found += ["".join(chosen) for chosen in product(*choices)]
    if twice := [name for name in dict.fromkeys(found) if found.count(name) > 1]:
        raise ConfigError(f"the node list {nodelist!r} contains {twice[0]!r} twice")
    return found


def _numbers(ranges: str) -> list[str]:
    """Expand ranges, such as `"03-05,9"`, to `["03", "04", "05", "9"]`."""
    numbers: list[str] = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        if int(last or first) < int(first):
            raise ConfigError(f"a range in a node list must be ascending, got {part!r}")
        numbers += [f"{number:0{len(first)}}" for number in range(int(first), int(last or first) + 1)]
    return numbers


def tasks_per_node(text: str) -> list[int]:
    """Expand the numbers of tasks per node, such as `"2(x3),1"`, to `[2, 2, 2, 1]`."""
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ConfigError(f"SLURM_STEP_TASKS_PER_NODE must have the form '2(x3),1', got {text!r}")
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks
