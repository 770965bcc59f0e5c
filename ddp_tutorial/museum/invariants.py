"""Invariants that every distributed training program must satisfy, and a function that detects violations.

For example, `examine({"mine": train})` returns `{"mine": {"hang": "", "one process": "weights: ...", ...}}`.

A program is a function in plain PyTorch. A program's parameters determine which invariants apply:

- `world`: the program trains. `accumulate` and `scale` are optional parameters.
- `folder`: the program trains, and resumes from this folder.
- `losses`: the program selects the best loss.
- `model` and `optimizer`: the program compares the replicas.

A program returns a dict of results. Numbers and tensors in the dict must not depend on the number of ranks. Three keys
are special. `seen` contains one epoch's training samples, and `held_out` contains the validation samples. If the
program shuffles, `orders` contains the sample order of each epoch.

No invariant refers to a particular bug. The tests also check that correct programs do not violate any invariant.
"""

import inspect
import itertools
import json
import math
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ddp_tutorial.config import named_ranks
from ddp_tutorial.debug import DataOverlap, ReplicaDrift, SameRandomNumbers
from ddp_tutorial.museum.parts import DATA, Program
from ddp_tutorial.museum.stage import Outcome, Stage, a_sigterm, an_error, checked, cut_after_step, cut_in_write
from ddp_tutorial.processes.errors import RankError, RankTimeoutError
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.world import World

INVARIANTS = {
    "hang": "all ranks enter the same collectives and return",
    "drift": "the replicas are identical after each step",
    "copies": "no two ranks use the same samples or random numbers",
    "agreement": "all ranks return the same results",
    "one process": "the results do not depend on the number of ranks",
    "division": "the results do not depend on the number of micro-batches or the loss scale",
    "once": "each sample is used once per training epoch, or is in every rank's validation set",
    "epochs": "if the program shuffles, each epoch uses a different order",
    "errors": "an error or a stop signal that changes the results is reported",
    "cuts": "a killed and resumed run is bitwise identical to an uninterrupted run, and repeats no saved step",
    "best": "the program keeps the model with the best loss",
    "check": "if any replica differs, the check fails on all ranks",
}

_TOLERANCE = 1e-9  # in double precision; summing in a different order changes results by 1e-15


def examine(
    programs: Mapping[str, Program], nprocs: int = 2, timeout: float | None = 600.0
) -> dict[str, dict[str, str]]:
    """Check programs against all invariants that apply to them.

    One launch runs all programs. If a rank crashes, the current program counts as violating the current invariant, and
    the remaining programs run in a new launch. After a program hangs, its remaining invariants are not checked.

    Returns:
        For each program, a dict that maps each invariant to its violation, or to "" if there is no violation.

    Raises:
        RankTimeoutError: If a launch takes longer than `timeout` seconds, for example because a program never returns.
    """
    found: dict[str, dict[str, str]] = {name: {} for name in programs}
    left = dict(programs)
    with tempfile.TemporaryDirectory() as folder:
        while left:
            scratch, notes = Path(folder, str(len(left))), Path(folder, f"{len(left)}.jsonl")
            scratch.mkdir()
            notes.touch()
            died = ""
            try:
                launch(_on_ranks, nprocs, left, notes, scratch, device="cpu", echo=False, threads=1, timeout=timeout)
            except RankTimeoutError:
                raise
            except RankError as error:
                died = f"a rank crashed: {str(error).splitlines()[0]}"
            for line in notes.read_text().splitlines():
                name, invariant, alarm = json.loads(line)
                found[name][invariant] = died if alarm is None else alarm
                left.pop(name, None)
            if not died:
                break
            if not notes.read_text():
                raise RuntimeError(died)
    return found


def _on_ranks(world: World, programs: Mapping[str, Program], notes: Path, scratch: Path) -> None:
    stage = Stage(world, scratch)
    for name, program in programs.items():
        for invariant in applying(program):
            if world.is_main:
                _note(notes, name, invariant, None)
            alarm = _INVARIANTS[invariant](stage, program)
            if world.is_main:
                _note(notes, name, invariant, alarm)
            if invariant == "hang" and alarm:
                break


def _note(notes: Path, *what: str | None) -> None:
    with notes.open("a") as file:
        file.write(json.dumps(what) + "\n")


def applying(program: Program) -> list[str]:
    """Return the invariants that apply to a program, according to its parameters."""
    takes = set(inspect.signature(program).parameters)
    if "losses" in takes:
        return ["best"]
    if "model" in takes:
        return ["check"]
    if "folder" in takes:
        return ["hang", "drift", "agreement", "cuts"]
    divided = ["division"] if takes & {"accumulate", "scale"} else []
    return ["hang", "drift", "copies", "agreement", "one process", *divided, "once", "epochs", "errors"]


# --------------------------------------------------------------------------------------------- invariants about one run


def _settings(stage: Stage, program: Program) -> dict[str, Any]:
    """Return a dict with a new `folder` if the program has a `folder` parameter, and an empty dict otherwise."""
    return {"folder": stage.folder()} if "folder" in inspect.signature(program).parameters else {}


def _plain(stage: Stage, program: Program) -> list[Outcome]:
    return stage.once((program, "plain"), lambda: stage.play(program, **_settings(stage, program)))


def _alone(stage: Stage, program: Program) -> Outcome:
    return stage.once((program, "alone"), lambda: stage.play(program, alone=True))[0]


def _hang(stage: Stage, program: Program) -> str:
    outcomes = _plain(stage, program)
    for outcome in outcomes:
        if outcome.hang:
            return re.sub(r'File "[^"]*?([^/"]+)"', r"\1", outcome.hang)
    return next((f"rank {rank} fails with {each.error}" for rank, each in enumerate(outcomes) if each.error), "")


def _drift(stage: Stage, program: Program) -> str:
    return _finding(stage, program, {"drift"})


def _copies(stage: Stage, program: Program) -> str:
    return _finding(stage, program, {"overlap", "same_random"})


def _finding(stage: Stage, program: Program, names: set[str]) -> str:
    """Return the first finding of the detectors in `names`, or "" if there is none."""
    every_step = checked(stage.world, lambda: [DataOverlap(), SameRandomNumbers(), ReplicaDrift(every=1)])
    outcomes = stage.once(
        (program, "checked"), lambda: stage.play(program, around=every_step, **_settings(stage, program))
    )
    return next((finding for each in outcomes for name, finding in each.findings if name in names), "")


def _claims(outcome: Outcome) -> dict[str, Any]:
    result = outcome.result if isinstance(outcome.result, dict) else {}
    special = {"seen", "held_out", "orders"}
    return {name: value for name, value in result.items() if name not in special and value is not None}


def _agreement(stage: Stage, program: Program) -> str:
    mine, *others = (_claims(each) for each in _plain(stage, program))
    for rank, other in enumerate(others, start=1):
        for name in mine:
            if other.get(name) is not None and not _equal(mine[name], other[name]):
                return f"{name}: {_describe_difference(mine[name], other[name], 'rank 0', f'rank {rank}')}"
    return ""


def _one_process(stage: Stage, program: Program) -> str:
    together, alone = _plain(stage, program)[0], _alone(stage, program)
    return _difference(_claims(together), _claims(alone), f"{stage.world.size} ranks", "one process")


def _division(stage: Stage, program: Program) -> str:
    takes = inspect.signature(program).parameters
    first = _claims(_plain(stage, program)[0])
    for name, values in {"accumulate": (1, 2), "scale": (1.0, 2.0**15)}.items():
        for value in values if name in takes else ():
            if value == takes[name].default:
                continue
            setting: dict[str, Any] = {name: value}
            other = _claims(stage.play(program, **setting)[0])
            compared = f"{name}={takes[name].default:g}", f"{name}={value:g}"
            if alarm := _difference(first, other, *compared):
                return alarm
    return ""


def _difference(first: Mapping[str, Any], second: Mapping[str, Any], of_first: str, of_second: str) -> str:
    """Return a description of the first number or tensor that differs between two results, or "" if none differs.

    Strings, such as folder names, may differ between runs.
    """
    for name, value in first.items():
        other = second.get(name)
        if not isinstance(value, str) and other is not None and not _equal(value, other):
            return f"{name}: {_describe_difference(value, other, of_first, of_second)}"
    return ""


def _equal(first: Any, second: Any, tolerance: float = _TOLERANCE) -> bool:
    """Return whether two results are equal. NaN equals NaN, because two runs may diverge in the same way."""
    if not all(isinstance(each, torch.Tensor | int | float) for each in (first, second)):
        return bool(first == second)
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):  # a number equals a tensor without axes
        first, second = _as_tensors(first, second)
        return first.shape == second.shape and torch.allclose(
            first, second, rtol=tolerance, atol=tolerance, equal_nan=True
        )
    if isinstance(first, float) or isinstance(second, float):
        both_nan = math.isnan(first) and math.isnan(second)
        return both_nan or math.isclose(first, second, rel_tol=tolerance, abs_tol=tolerance)
    return bool(first == second)


def _as_tensors(first: Any, second: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a tensor and a tensor or number as tensors of the same dtype. A number is not rounded to float32 first."""
    dtype = torch.result_type(first, second)
    return torch.as_tensor(first, dtype=dtype), torch.as_tensor(second, dtype=dtype)


def _describe_difference(first: Any, second: Any, of_first: str, of_second: str) -> str:
    numbers = all(isinstance(each, torch.Tensor | int | float) for each in (first, second))
    if numbers and (isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor)):
        first, second = _as_tensors(first, second)
        if first.shape != second.shape:
            return f"{first.numel()} values for {of_first}, {second.numel()} for {of_second}"
        return f"differences of up to {(first - second).abs().max():.2g} between {of_first} and {of_second}"
    if numbers and isinstance(first, float):
        return f"{first:.4g} for {of_first}, {second:.4g} for {of_second}"
    return f"{of_first} and {of_second} return different values"


def _once(stage: Stage, program: Program) -> str:
    results = [each.result for each in _plain(stage, program)]
    if not all(isinstance(each, dict) and "seen" in each for each in results):
        return ""
    seen = Counter(number for each in results for number in each["seen"])
    for rank, each in enumerate(results):
        if both := sorted(set(each.get("held_out", ())) & set(seen)):
            return (
                f"{len(both)} of rank {rank}'s validation samples are also training samples, such as sample {both[0]}"
            )
    if often := [number for number, times in seen.items() if times > 1]:
        return f"{len(often)} samples are used more than once, such as sample {often[0]}"
    held_out = {number for each in results for number in each.get("held_out", ())}
    if never := set(range(len(DATA))) - set(seen) - held_out:
        return f"{len(never)} samples are never used, such as sample {min(never)}"
    return ""


def _epochs(stage: Stage, program: Program) -> str:
    results = [each.result for each in _plain(stage, program)]
    if not all(isinstance(each, dict) and "orders" in each for each in results):
        return ""
    epochs = list(zip(*(each["orders"] for each in results), strict=False))  # for each epoch, the orders of all ranks
    for first, second in itertools.combinations(range(len(epochs)), 2):
        if epochs[first] == epochs[second]:
            start = ", ".join(map(str, epochs[first][0][:4]))
            return f"epochs {first} and {second} use the same order, which starts with {start} on rank 0"
    return ""


def _errors(stage: Stage, program: Program) -> str:
    whole = _alone(stage, program)
    for what, around in {
        "an error in the second forward pass": an_error,
        "SIGTERM after the first step": a_sigterm,
    }.items():
        outcome = stage.play(program, alone=True, around=around)[0]
        if outcome.was_struck and outcome.exit_code == 0:
            if outcome.error:
                return f"{what}: the program exits with code 0 after {outcome.steps} of {whole.steps} steps"
            if alarm := _difference(_claims(whole), _claims(outcome), "an undisturbed run", "this run"):
                return f"{what} is not reported, but changes the results ({alarm})"
    return ""


# ------------------------------------------------------------------------------------------------------ kill and resume


def _cuts(stage: Stage, program: Program) -> str:
    """Kill the program after each step and during each write, resume it, and compare it with an uninterrupted run.

    Each rank runs the program as a single process, because killing one rank terminates all ranks anyway.
    """
    with tempfile.TemporaryDirectory(dir=stage.scratch) as scratch:
        folders = _folders(Path(scratch))
        whole = stage.play(program, next(folders), alone=True)[0]
        cuts = [(f"killed after step {step}", cut_after_step(step), False) for step in range(1, whole.steps + 1)]
        cuts += [(f"killed during write {k}", cut_in_write(k), False) for k in range(1, len(whole.saves) + 1)]
        if whole.steps:
            last = (
                f"killed after step {whole.steps}, folder copied before the restart",
                cut_after_step(whole.steps),
                True,
            )
            cuts.append(last)
        for what, around, copied in cuts:
            folder = next(folders)
            first = stage.play(program, folder, alone=True, around=around)[0]
            if copied:
                _touch_in_reverse(folder)
            second = stage.play(program, folder, alone=True)[0]
            if alarm := _after_a_cut(whole, first, second):
                return f"{what}: {alarm}"
    return ""


def _folders(scratch: Path) -> Iterator[Path]:
    """Yield new empty folders under `scratch`, forever."""
    for number in itertools.count():
        folder = scratch / str(number)
        folder.mkdir()
        yield folder


def _after_a_cut(whole: Outcome, first: Outcome, second: Outcome) -> str:
    if second.error:
        return f"the restart fails with {second.error.splitlines()[0][:90]}"
    for name, value in _claims(whole).items():
        other = _claims(second).get(name)
        if other is None:
            return f"{name}: the resumed run does not return this value"
        if not _equal(value, other, tolerance=0.0):
            return f"{name}: {_describe_difference(value, other, 'the uninterrupted run', 'the resumed run')}"
    saved = max((steps for steps in first.saves if steps < first.steps), default=0)
    if second.steps > whole.steps - saved:
        return f"step {saved} was saved, but the resumed run executes {second.steps} of the {whole.steps} steps"
    return ""


def _touch_in_reverse(folder: Path) -> None:
    """Reverse the order of the files' modification times, as copying may do."""
    paths = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    for age, path in enumerate(paths):
        os.utime(path, (10**9 - age, 10**9 - age))


# ---------------------------------------------------------------------------------------- invariants about one function

_NAN = math.nan
_LOSSES = [
    (3.0, 1.0, 2.0, 4.0),
    (1.0, 0.0, 2.0, 3.0),
    (0.5, _NAN, 0.7, 0.2),
    (0.0, 1.0, 2.0),
    (_NAN, 1.0, 2.0, 3.0),
    (-1.0, -2.0, -1.0, 0.0),
    (1.0, 1.0, 1.0),
    (0.2, 0.4, 0.3, _NAN),
]


def _best(stage: Stage, program: Program) -> str:
    for losses in _LOSSES:
        kept = program(losses)
        best = min(loss for loss in losses if not math.isnan(loss))
        formatted = ", ".join(f"{loss:g}" for loss in losses)
        if losses[kept] != best:
            return f"for the losses {formatted}, the program keeps the model with loss {losses[kept]:g}"
    return ""


def _check(stage: Stage, program: Program) -> str:
    for changed_rank in (None, *range(stage.world.size)):
        for number in range(1 if changed_rank is None else len(_replica()[2])):
            model, optimizer, tensors = _replica()
            name = list(tensors)[number]
            if stage.world.rank == changed_rank:
                tensors[name].view(-1)[0] += 0.001
            outcomes = stage.play(program, model, optimizer)
            what = "the replicas are identical" if changed_rank is None else f"{name} differs on rank {changed_rank}"
            if any(each.hang for each in outcomes):
                return f"{what}, and the check hangs"
            passed = [bool(each.result) and not each.error for each in outcomes]
            if passed != [changed_rank is None] * len(passed):
                wrong = [rank for rank, each in enumerate(passed) if each != (changed_rank is None)]
                verdict = "fails" if changed_rank is None else "passes"
                return f"{what}, but the check {verdict} on {named_ranks(wrong)}"
    return ""


def _replica() -> tuple[nn.Module, torch.optim.Optimizer, dict[str, torch.Tensor]]:
    """Return a model after one step, its optimizer, and some of their tensors, which are equal on all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(first := nn.Linear(4, 2), nn.Linear(2, 1)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    F.mse_loss(model(DATA[:8][1]), DATA[:8][2]).backward()
    optimizer.step()
    last = list(model.parameters())[-1]
    tensors = {"0.weight": first.weight.detach(), "1.bias": last.detach()}
    return model, optimizer, tensors | {"the momentum of 1.bias": optimizer.state[last]["exp_avg"]}


Invariant = Callable[[Stage, Program], str]
_INVARIANTS: dict[str, Invariant] = {
    "hang": _hang,
    "drift": _drift,
    "copies": _copies,
    "agreement": _agreement,
    "one process": _one_process,
    "division": _division,
    "once": _once,
    "epochs": _epochs,
    "errors": _errors,
    "cuts": _cuts,
    "best": _best,
    "check": _check,
}
