"""Simulate the exercises' scripts in one process, with and without common mistakes.

A run prints the loss and the number of letters for each step. The number of letters reveals which words the run read,
and the loss reveals how the run weighted the words. To diagnose an incorrect answer, the check simulates common
mistakes and compares their output with the run's output.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import count, islice, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_tutorial.exercises import WrongAnswerError, expect
from ddp_tutorial.sharding.stories import story

State = dict[str, Any]  # contents of a checkpoint

WORDS, BATCH = 200, 16
STEPS_AN_EPOCH = 13  # 12 steps with 16 words, and one step with 8 words
_LONGEST = 12
_CLOSE = 1e-3  # tolerance between losses, which may be printed with four digits


class Line(NamedTuple):
    """A line printed for a step, with the step number (from 1), and the loss and number of letters over all ranks."""

    step: int
    loss: float
    letters: int


def lines_of(printed: str) -> list[Line]:
    """Return the step lines in the output of a run."""
    found = re.findall(r"^step (\d+): loss (\S+) over (\d+) letters *$", printed, re.MULTILINE)
    return [Line(int(step), _number(loss), int(letters)) for step, loss, letters in found]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


@cache
def make_words() -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of 200 words from the course's stories, both of shape (200, 13).

    The inputs are the letters of each word, and the targets are the next letters. The codes of a to z are 1 to 26.
    Code 0 marks the start and the end of a word. Padding targets are -100.
    """
    found = sorted(
        {word for number in range(1000) for word in re.findall(rf"[a-z]{{2,{_LONGEST}}}", story(number).lower())}
    )
    letters = torch.zeros(WORDS, _LONGEST + 1, dtype=torch.int64)
    following = torch.full_like(letters, -100)
    for number, word in enumerate(found[:WORDS]):
        codes = torch.tensor([ord(letter) - ord("a") + 1 for letter in word])
        letters[number, 1 : len(word) + 1] = following[number, : len(word)] = codes
        following[number, len(word)] = 0
    return letters, following


# ------------------------------------------------------------------------------------------------ which words were read

_ORDERS = {
    "": "",
    "first": "Every epoch uses the order of epoch 0: call the sampler's set_epoch(epoch) before each epoch.",
    "file": "The words are read in file order: they are not shuffled.",
}
_SHARES = {
    "": "",
    "each": "Each rank reads 16 words per step, but all ranks together must read 16 words per step.",
    "same": "Both ranks read the same 16 words in a step. Pass the rank to the sampler.",
    "half": "Both ranks read the same 8 words in a step. Pass the rank to the sampler.",
}
_DROPS = {False: "", True: "The last, smaller step of each epoch is skipped."}
_REPORTS = {"": "", "own": "The number of letters includes only rank 0's letters. Sum the number over all ranks."}


def _read(order: str = "", share: str = "", drop: bool = False, epoch: int = 0) -> Iterator[list[Sequence[int]]]:
    """Yield, for each step from the start of `epoch`, the indices of the words that each of two ranks reads."""
    step = {"": BATCH, "each": 2 * BATCH, "same": BATCH, "half": BATCH // 2}[share]
    for number in count(epoch):
        generator = torch.Generator().manual_seed(0 if order == "first" else number)
        numbers = list(range(WORDS)) if order == "file" else torch.randperm(WORDS, generator=generator).tolist()
        for start in range(0, WORDS - step + 1 if drop else WORDS, step):
            taken = numbers[start : start + step]
            yield [taken, taken] if share in {"same", "half"} else [taken[0::2], taken[1::2]]


def _letters(steps: Iterator[list[Sequence[int]]], many: int, ranks: slice = slice(None)) -> list[int]:
    """Return the number of letters that the ranks in the slice `ranks` read in each of the first `many` steps."""
    of_word = _lengths()
    return [sum(of_word[word] for part in step[ranks] for word in part) for step in islice(steps, many)]


@cache
def _lengths() -> list[int]:
    return (make_words()[1] >= 0).sum(1).tolist()


def _wrong_words(lines: Sequence[Line]) -> str:
    """Return an explanation of the wrong words that a run read from step 1 on, or "" if all words are correct."""
    found = [line.letters for line in lines]
    for order, share, drop, report in product(_ORDERS, _SHARES, _DROPS, _REPORTS):
        if found == _letters(_read(order, share, drop), len(lines), slice(1 if report else 2)):
            return " ".join(filter(None, (_ORDERS[order], _SHARES[share], _DROPS[drop], _REPORTS[report])))
    right = _letters(_read(), len(lines))
    step = next(step for step, (mine, yours) in enumerate(zip(right, found, strict=True), start=1) if mine != yours)
    return (
        f"The words of step {step} must contain {right[step - 1]} letters over all ranks, got {found[step - 1]}. In "
        "epoch e, use the order of DistributedSampler with seed 0 after set_epoch(e)."
    )


# ------------------------------------------------------------------------------------------ how the words were weighted

_GRADIENTS = {
    "": "",
    "means": "The gradient is the mean of the ranks' means, so a letter has a larger weight on the rank with fewer "
    "letters. Divide by the number of letters on all ranks.",
    "half": "The gradient is half the correct gradient. DDP averages over the ranks, but you need the sum.",
    "double": "The gradient is twice the correct gradient. DDP has already averaged over the ranks.",
    "apart": "Each rank uses its own gradient, because the gradients are not averaged. Call the model through DDP.",
    "unclipped": "The gradient is not clipped to norm 0.4.",
    "without momentum": "The updates match SGD without momentum.",
}
_FACTORS = {"means": 0.5, "half": 0.5, "double": 2.0}


# Candidates for the printed loss of a step, computed from both ranks' loss sums and numbers of letters.
_LOSSES: dict[str, Callable[[Sequence[float], Sequence[int]], float]] = {
    "": lambda sums, letters: sum(sums) / sum(letters),
    "The loss includes only rank 0's letters.": lambda sums, letters: sums[0] / letters[0],
    "The loss includes only rank 1's letters.": lambda sums, letters: sums[1] / letters[1],
    "The loss is the mean of the ranks' means.": lambda sums, letters: (
        (sums[0] / letters[0] + sums[1] / letters[1]) / 2
    ),
    "The loss is half the correct loss.": lambda sums, letters: sum(sums) / sum(letters) / 2,
}


class Course(NamedTuple):
    """A reference run, with its lines, the lines for each candidate loss in `_LOSSES`, and the final weights."""

    lines: tuple[Line, ...]
    reports: dict[str, tuple[Line, ...]]
    weights: dict[str, Tensor]


@lru_cache(maxsize=16)
def course(steps: int, gradient: str = "") -> Course:
    """Simulate a run on two ranks in this process, with the correct gradient or the mistake that `gradient` names."""
    words = make_words()
    reports: dict[str, list[Line]] = {name: [] for name in _LOSSES}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(27, 16), nn.Linear(16, 27))
        models = [model, _copy(model)] if gradient == "apart" else [model, model]
    momentum = 0.0 if gradient == "without momentum" else 0.9
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5, momentum=momentum) for each in dict.fromkeys(models)]
    for step, parts in enumerate(islice(_read(), steps), start=1):
        sums = [_sum(each, [tensor[part] for tensor in words]) for each, part in zip(models, parts, strict=True)]
        own = [_letters(iter([[part]]), 1)[0] for part in parts]
        letters = sum(own)
        if gradient in {"means", "apart"}:
            shares = [each / many for each, many in zip(sums, own, strict=True)]
        else:
            shares = [each / letters for each in sums]
        (torch.stack(shares).sum() * _FACTORS.get(gradient, 1.0)).backward()
        for each, optimizer in zip(dict.fromkeys(models), optimizers, strict=True):
            if gradient != "unclipped":
                nn.utils.clip_grad_norm_(each.parameters(), 0.4)
            optimizer.step()
            optimizer.zero_grad()
        own_sums = [each.item() for each in sums]
        for name, loss_of in _LOSSES.items():
            reports[name].append(Line(step, loss_of(own_sums, own), letters))
    made = {name: tuple(lines) for name, lines in reports.items()}
    return Course(made[""], made, model.state_dict())


def _copy(model: nn.Sequential) -> nn.Sequential:
    twin = nn.Sequential(nn.Embedding(27, 16), nn.Linear(16, 27))
    twin.load_state_dict(model.state_dict())
    return twin


def _sum(model: nn.Module, part: Sequence[Tensor]) -> Tensor:
    letters, following = part
    return F.cross_entropy(model(letters).flatten(0, 1), following.flatten(), reduction="sum")


def _wrong_losses(lines: Sequence[Line]) -> str:
    """Return an explanation of wrong losses in a run that read the correct words, or "" if all losses are correct."""
    for loss, gradient in product(_LOSSES, _GRADIENTS):
        if not _apart(lines, course(len(lines), gradient).reports[loss]):
            return " ".join(filter(None, (loss, _GRADIENTS[gradient])))
    right = course(len(lines)).reports
    if all(_apart(lines[:1], report) for report in right.values()):
        return (
            f"{_apart(lines[:1], right[''])} Call torch.manual_seed(0) before creating the model. The loss is the "
            "sum over all ranks' letters, divided once by the number of these letters."
        )
    return _apart(lines, right[""])


def _apart(lines: Sequence[Line], right: Sequence[Line]) -> str:
    """Return a description of the first step with a wrong loss, or "" if all losses are correct."""
    for mine, yours in zip(right, lines, strict=False):
        if not abs(mine.loss - yours.loss) < _CLOSE:
            return f"The loss of step {mine.step} must be {mine.loss:.4f}, got {yours.loss:.4f}."
    return ""


# --------------------------------------------------------------------------------------------------------- the verdicts


def wrong_from_the_start(lines: Sequence[Line]) -> str:
    """Return a description of incorrect lines printed by a run that started at step 1, or "" if there are none."""
    if not lines:
        return ""
    if [line.step for line in lines] != list(range(1, len(lines) + 1)):
        steps = [line.step for line in lines]
        twice = "Print on rank 0 only. " if len(set(steps)) < len(steps) else ""
        return f"The first printed steps are {steps[:6]}. {twice}Print every step once, starting at 1."
    return _wrong_words(lines) or _wrong_losses(lines)


def wrong_after_resuming(lines: Sequence[Line], saved: int) -> str:
    """Return a description of incorrect lines printed after resuming from step `saved`, or "" if there are none."""
    if not lines:
        return ""
    steps = [line.step for line in lines]
    resumed = f"The checkpoint was saved after step {saved}, and the resumed run continues with "
    if steps[:1] == [1]:
        return f"{resumed}step 1: it starts over."
    if steps[:1] != [saved + 1]:
        return f"{resumed}step {steps[0]}. The next step is {saved + 1}: do not repeat or skip steps."
    if steps != list(range(saved + 1, saved + len(steps) + 1)):
        return f"{resumed}steps {steps}. Print every step once."
    right = course(saved + len(lines)).lines[saved:]
    epoch, taken = divmod(saved, STEPS_AN_EPOCH)
    found = [line.letters for line in lines][: STEPS_AN_EPOCH - taken]
    cases = {
        "": (epoch, taken),
        f"the first words of epoch {epoch}, but {taken} steps of that epoch are already done.": (epoch, 0),
        f"the order of epoch 0, but this is epoch {epoch}: call set_epoch before the first step, too.": (0, taken),
        f"the first words of epoch 0, but {taken} steps of epoch {epoch} are already done.": (0, 0),
    }
    for case, (begin, skipped) in cases.items():
        if found == _letters(islice(_read(epoch=begin), skipped, None), len(found)):
            if case:
                return f"{resumed}{case}"
            break
    for mine, yours in zip(right, lines, strict=True):
        if mine.letters != yours.letters:
            return (
                f"After resuming, the words of step {mine.step} must contain {mine.letters} letters, got "
                f"{yours.letters}."
            )
    difference = _apart(lines, right)
    if difference and abs(right[0].loss - lines[0].loss) < _CLOSE:
        return (
            f"{resumed}the right loss, but later losses differ. {difference} An optimizer step changes more than the "
            "weights: SGD's momentum is state, too."
        )
    if difference:
        return f"{resumed}different weights. {difference} Do all ranks load the weights?"
    return ""


def load_checkpoint(checkpoint: Path, when: str) -> State:
    """Load the checkpoint of a learner's script, or raise `WrongAnswerError`. Error messages start with `when`."""
    expect(
        checkpoint.exists(), f"{when}, and there is no checkpoint. Save every EVERY steps, and before the script exits."
    )
    try:
        saved = torch.load(checkpoint)
    except Exception as error:
        message = f"{when}, but torch.load cannot read the checkpoint. {type(error).__name__}: {str(error)[:200]}"
        raise WrongAnswerError(message) from None
    is_whole = isinstance(saved, dict) and isinstance(saved.get("step"), int) and isinstance(saved.get("model"), dict)
    expect(is_whole, "The checkpoint must be a dict with an integer 'step' and a state dict 'model'.")
    names, own = list(course(0).weights), list(saved["model"])
    advice = (
        " Save the state dict of the model inside DDP with ddp.module.state_dict()."
        if own[:1] == [f"module.{names[0]}"]
        else ""
    )
    expect(own == names, f"The keys of 'model' in the checkpoint must be {names}, got {own}.{advice}")
    return saved
