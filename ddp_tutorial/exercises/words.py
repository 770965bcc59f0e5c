"""What `train_script` of 06_plain_torch asks for, in one process; and what the usual mistakes make of it.

A run prints a loss and a number of letters for each step. The numbers of letters tell which words were read, the losses
how they were weighed; so a mistake is found by making it here, and comparing.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import count, islice, product
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_tutorial.sharding.stories import story

WORDS, BATCH = 200, 16
STEPS_AN_EPOCH = 13  # 12 of 16 words and one of 8
_LONGEST = 12
_CLOSE = 1e-3  # between losses, which may be printed with four digits


class Line(NamedTuple):
    """What is printed for a step: its number, from 1, the loss and the number of letters of all ranks."""

    step: int
    loss: float
    letters: int


def lines_of(printed: str) -> list[Line]:
    found = re.findall(r"^step (\d+): loss (\S+) over (\d+) letters *$", printed, re.MULTILINE)
    return [Line(int(step), _number(loss), int(letters)) for step, loss, letters in found]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


@cache
def make_words() -> tuple[Tensor, Tensor]:
    """200 words of the stories: their letters and the letter that follows each, both (200, 13).

    A word begins with a 0 and is followed by a 0; a is 1, and z is 26. Where there is no letter, the following is -100.
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


# -------------------------------------------------------------------------------------------- which words were read

_ORDERS = {
    "": "",
    "first": "Every epoch has the order of epoch 0: tell the sampler the epoch, with set_epoch.",
    "file": "The words come in the order of the file: they are not shuffled.",
}
_SHARES = {
    "": "",
    "each": "A step has 16 words on each rank; 16 is what all ranks have together.",
    "same": "Both ranks read the same 16 words in a step. Each has its own, from a sampler that knows the rank.",
    "half": "Both ranks read the same 8 words in a step. Each has its own, from a sampler that knows the rank.",
}
_DROPS = {False: "", True: "The last, smaller step of an epoch is left out."}
_REPORTS = {"": "", "own": "The number of letters is that of rank 0 alone: add up over all ranks."}


def _read(order: str = "", share: str = "", drop: bool = False, epoch: int = 0) -> Iterator[list[Sequence[int]]]:
    """The numbers of the words that each of two ranks reads, step by step, from the beginning of an epoch on."""
    step = {"": BATCH, "each": 2 * BATCH, "same": BATCH, "half": BATCH // 2}[share]
    for number in count(epoch):
        generator = torch.Generator().manual_seed(0 if order == "first" else number)
        numbers = list(range(WORDS)) if order == "file" else torch.randperm(WORDS, generator=generator).tolist()
        for start in range(0, WORDS - step + 1 if drop else WORDS, step):
            taken = numbers[start : start + step]
            yield [taken, taken] if share in {"same", "half"} else [taken[0::2], taken[1::2]]


def _letters(steps: Iterator[list[Sequence[int]]], many: int, ranks: slice = slice(None)) -> list[int]:
    """The number of letters in each of `many` steps, of some of the ranks."""
    of_word = _lengths()
    return [sum(of_word[word] for part in step[ranks] for word in part) for step in islice(steps, many)]


@cache
def _lengths() -> list[int]:
    return (make_words()[1] >= 0).sum(1).tolist()


def _wrong_words(lines: Sequence[Line]) -> str:
    """Whose words were read in a run from its beginning? "" for those that should have been."""
    found = [line.letters for line in lines]
    for order, share, drop, report in product(_ORDERS, _SHARES, _DROPS, _REPORTS):
        if found == _letters(_read(order, share, drop), len(lines), slice(1 if report else 2)):
            return " ".join(filter(None, (_ORDERS[order], _SHARES[share], _DROPS[drop], _REPORTS[report])))
    right = _letters(_read(), len(lines))
    step = next(step for step, (mine, yours) in enumerate(zip(right, found, strict=True), start=1) if mine != yours)
    return (
        f"The words of step {step} have {right[step - 1]} letters, on all ranks together; you print {found[step - 1]}. "
        "The order of epoch e is that of DistributedSampler with seed 0, after set_epoch(e)."
    )


# ---------------------------------------------------------------------------------------------- how they were weighed

_GRADIENTS = {
    "": "",
    "means": "The gradient is the mean of the ranks' means: a letter counts more on the rank that has fewer of them. "
    "Divide by the number of letters of all ranks.",
    "half": "The gradient is half of what it should be. DDP takes the mean over ranks, where you need the sum.",
    "double": "The gradient is twice what it should be. DDP has taken the mean over ranks already.",
    "apart": "Each rank trains on its own gradient: nobody averages them. Is the model called through DDP?",
    "unclipped": "The gradient is not clipped to norm 0.4.",
    "without momentum": "The steps are those of SGD without momentum.",
}
_FACTORS = {"means": 0.5, "half": 0.5, "double": 2.0}


# What could be taken for the loss of a step: of the sums and the numbers of letters of both ranks.
_LOSSES: dict[str, Callable[[Sequence[float], Sequence[int]], float]] = {
    "": lambda sums, letters: sum(sums) / sum(letters),
    "The loss is that of rank 0's letters alone.": lambda sums, letters: sums[0] / letters[0],
    "The loss is that of rank 1's letters alone.": lambda sums, letters: sums[1] / letters[1],
    "The loss is the mean of the ranks' means.": lambda sums, letters: (
        (sums[0] / letters[0] + sums[1] / letters[1]) / 2
    ),
    "The loss is half of what it should be.": lambda sums, letters: sum(sums) / sum(letters) / 2,
}


class Course(NamedTuple):
    """A run: what it prints, the same with losses that are none of all letters, and the weights after its last step."""

    lines: tuple[Line, ...]
    reports: dict[str, tuple[Line, ...]]
    weights: dict[str, Tensor]


@lru_cache(maxsize=16)
def course(steps: int, gradient: str = "") -> Course:
    """The run as it should be, or with another gradient, on two ranks that are played here."""
    words = make_words()
    reports: dict[str, list[Line]] = {said: [] for said in _LOSSES}
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
        for said, loss_of in _LOSSES.items():
            reports[said].append(Line(step, loss_of(own_sums, own), letters))
    made = {said: tuple(lines) for said, lines in reports.items()}
    return Course(made[""], made, model.state_dict())


def _copy(model: nn.Sequential) -> nn.Sequential:
    twin = nn.Sequential(nn.Embedding(27, 16), nn.Linear(16, 27))
    twin.load_state_dict(model.state_dict())
    return twin


def _sum(model: nn.Module, part: Sequence[Tensor]) -> Tensor:
    letters, following = part
    return F.cross_entropy(model(letters).flatten(0, 1), following.flatten(), reduction="sum")


def _wrong_losses(lines: Sequence[Line]) -> str:
    """What is wrong in a run that has read the right words? "" for nothing."""
    for loss, gradient in product(_LOSSES, _GRADIENTS):
        if not _apart(lines, course(len(lines), gradient).reports[loss]):
            return " ".join(filter(None, (loss, _GRADIENTS[gradient])))
    right = course(len(lines)).reports
    if all(_apart(lines[:1], report) for report in right.values()):
        return (
            f"{_apart(lines[:1], right[''])} Begin with torch.manual_seed(0), then the model. The loss is the sum over "
            "the letters of all ranks, divided once by their number."
        )
    return _apart(lines, right[""])


def _apart(lines: Sequence[Line], right: Sequence[Line]) -> str:
    """The first step whose loss is another than it should be. "" where there is none."""
    for mine, yours in zip(right, lines, strict=False):
        if not abs(mine.loss - yours.loss) < _CLOSE:
            return f"Step {mine.step} has loss {yours.loss:.4f}, and should have {mine.loss:.4f}."
    return ""


# ------------------------------------------------------------------------------------------------------- the verdicts


def wrong_from_the_start(lines: Sequence[Line]) -> str:
    """What is wrong with the lines of a run from its beginning; "" for nothing."""
    if not lines:
        return ""
    if [line.step for line in lines] != list(range(1, len(lines) + 1)):
        steps = [line.step for line in lines]
        twice = "Rank 0 alone should print. " if len(set(steps)) < len(steps) else ""
        return f"The steps that you print begin with {steps[:6]}. {twice}Each should be there once, from 1 on."
    return _wrong_words(lines) or _wrong_losses(lines)


def wrong_after_resuming(lines: Sequence[Line], saved: int) -> str:
    """What is wrong with the lines of a run that went on after step `saved`; "" for nothing."""
    if not lines:
        return ""
    steps = [line.step for line in lines]
    told = f"The checkpoint is of step {saved}, and the run that is started again goes on with "
    if steps[:1] == [1]:
        return f"{told}step 1: it begins anew."
    if steps[:1] != [saved + 1]:
        return f"{told}step {steps[0]}. The next one is {saved + 1}: none is taken again, and none left out."
    if steps != list(range(saved + 1, saved + len(steps) + 1)):
        return f"{told}steps {steps}. Each should be there once."
    right = course(saved + len(lines)).lines[saved:]
    epoch, taken = divmod(saved, STEPS_AN_EPOCH)
    found = [line.letters for line in lines][: STEPS_AN_EPOCH - taken]
    cases = {
        "": (epoch, taken),
        f"the first words of epoch {epoch}, of which {taken} steps have been taken already.": (epoch, 0),
        f"the words in the order of epoch 0. It is epoch {epoch}: set_epoch belongs before the first step, too.": (
            0,
            taken,
        ),
        f"the first words of epoch 0. It is epoch {epoch}, of which {taken} steps have been taken.": (0, 0),
    }
    for said, (begin, skipped) in cases.items():
        if found == _letters(islice(_read(epoch=begin), skipped, None), len(found)):
            if said:
                return f"{told}{said}"
            break
    for mine, yours in zip(right, lines, strict=True):
        if mine.letters != yours.letters:
            return f"After resuming, the words of step {mine.step} have {mine.letters} letters, not {yours.letters}."
    if abs(right[0].loss - lines[0].loss) < _CLOSE and (said := _apart(lines, right)):
        return (
            f"{told}the right loss; then the ways part: {said[0].lower()}{said[1:]} Weights are not all that an "
            "optimiser step changes: SGD's momentum is state, too."
        )
    if said := _apart(lines, right):
        return f"{told}other weights. {said} Are the weights loaded, on all ranks?"
    return ""
