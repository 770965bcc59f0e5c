"""Do two ranks learn from the same samples, or draw the same random numbers? Then they do each other's work again."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import combinations
from typing import Any, ClassVar
from zlib import crc32

import torch

from ddp_tutorial.compat import tree_leaves
from ddp_tutorial.debug.detector import Detector, Finding, LocalReport, Program, named
from ddp_tutorial.debug.hash_weights import hash_weights, numpy_hash_weights
from ddp_tutorial.debug.instrumentation import StepObservation

# So many samples of an epoch are remembered; then the comparison begins anew.
_MOST = 500_000
# Of a sample with more numbers of 64 bits than this, evenly spaced ones are read.
_NUMBERS = 1 << 14
# Steps in a row in which two ranks have half of their samples in common, and samples that they share.
_STEPS, _SAMPLES = 3, 3

_ROOM = 256  # numbers that a rank brings at first; then there is room for twice the most that one has had

Steps = Sequence[Sequence[int]]  # the samples of one rank, as hashes, step by step


class DataOverlap(Detector):
    """Samples that two ranks see in the same step, or within an epoch. The ranks compare them with the other numbers
    that they exchange, so this takes no collective of its own.

    A sample is a row of the model's inputs while it trains. Where an epoch ends need not be told: as long as no rank
    has seen a sample of its own again, none has ended since the comparison began, and no sample should come twice. A
    few are let pass, for samplers pad; so are samples that are drawn with replacement. Samples that are changed at
    random are others each time: nothing is found there.
    """

    name: ClassVar[str] = "overlap"

    def attach(self, program: Program) -> None:
        super().attach(program)
        self._now: list[torch.Tensor] = []  # of the step that is under way
        self._mine: list[list[torch.Tensor]] = []  # of each step that nobody has heard of
        self._left: list[int] = []  # what there was no room for
        self._room = _ROOM  # numbers that each rank brings; the same on all
        self._heard: list[list[int]] = [[] for _ in range(program.world.size)]  # of steps that not all have told yet
        self._seen = Epoch(program.world.size)
        self._is_done = program.world.size == 1

    def before_forward(self, inputs: tuple[Any, ...]) -> None:
        if self.program.module.training and not self._is_done:
            self._now.append(rows_hashed(inputs))

    def local_report(self, observation: StepObservation) -> Sequence[float]:
        if not self._is_done:
            self._mine.append(self._now)
            self._now = []
        return ()

    def values_to_exchange(self) -> torch.Tensor | None:
        """How many numbers there are, and as many of them as there is room for; the others come the next time. The
        numbers: of each step how many samples, and then their hashes."""
        if self._is_done:
            return None
        mine = self._left
        for parts in self._mine:
            mine.append(sum(map(len, parts)))
            for part in parts:
                mine += part.tolist()
        self._mine, self._left = [], mine[self._room :]
        return torch.tensor([len(mine), *mine[: self._room], *[0] * (self._room - len(mine))], dtype=torch.int64)

    def on_exchanged(self, step: int, of_ranks: torch.Tensor) -> list[Finding]:
        room = self._room
        for heard, (count, *numbers) in zip(self._heard, of_ranks.tolist(), strict=True):
            heard.extend(numbers[: min(count, room)])
            self._room = max(self._room, 2 * count)
        found = self._seen.add(self._steps())
        if found is None:
            return []
        self._is_done = True
        ranks, message = found
        return [Finding(self.name, step, ranks, message, "warning", "data")]

    def _steps(self) -> list[Steps]:
        """The samples of all ranks, of the steps that have been told in full by all. They are taken off."""
        of_ranks = []
        for heard in self._heard:
            steps, place = [], 0
            while place < len(heard) and place + heard[place] < len(heard):
                steps.append(heard[place + 1 : (place := place + 1 + heard[place])])
            of_ranks.append(steps)
        told = min(map(len, of_ranks))
        for heard, steps in zip(self._heard, of_ranks, strict=True):
            del heard[: sum(1 + len(each) for each in steps[:told])]
        return [steps[:told] for steps in of_ranks]


class Epoch:
    """What the ranks have seen since the comparison began. The same on all ranks, so they come to the same verdict."""

    def __init__(self, size: int) -> None:
        self.size = size
        # Should an epoch have ended, samples come to the ranks by chance. That so many come to others only, and none to
        # the rank that had it before, has a probability of (1 - 1 / size) ** (20 size), which is about e ** -20.
        self.enough = 20 * size

        self._in_row: Counter[tuple[int, int]] = Counter()  # two ranks -> steps that they share, without a break
        self._common: defaultdict[tuple[int, int], set[int]] = defaultdict(set)  # and the samples in them
        self._forget()

    def _forget(self) -> None:
        self._of: list[set[int]] = [set() for _ in range(self.size)]
        self._owner: dict[int, int] = {}  # sample -> the rank that has seen it first
        self._twice: Counter[tuple[int, int]] = Counter()  # two ranks -> samples that both have seen

    def add(self, of_ranks: Sequence[Steps]) -> tuple[tuple[int, ...], str] | None:
        """Some steps more, of each rank. Returns ranks and a sentence once it is sure that they overlap."""
        for steps in zip(*of_ranks, strict=False):
            for pair in combinations(range(self.size), 2):
                if self._share_a_step(pair, steps):
                    common = len(self._common[pair])
                    return pair, (
                        f"{named(pair)} learn from the same samples: in each of {_STEPS} steps in a row they had most "
                        f"samples in common, {common} in all. Shard the data by rank, as DistributedSampler does"
                    )
            self._add_step(steps)
            if sum(self._twice.values()) >= self.enough:
                return self._overlap()
        return None

    def _share_a_step(self, pair: tuple[int, int], steps: Sequence[Sequence[int]]) -> bool:
        ours, theirs = (set(steps[rank]) for rank in pair)
        both = ours & theirs
        if 2 * len(both) >= max(len(ours), len(theirs)) > 0:
            self._in_row[pair] += 1
            self._common[pair] |= both
        else:
            self._in_row[pair] = 0
            self._common[pair] = set()
        return self._in_row[pair] >= _STEPS and len(self._common[pair]) >= _SAMPLES

    def _add_step(self, steps: Sequence[Sequence[int]]) -> None:
        for rank, samples in enumerate(steps):
            mine = self._of[rank]
            for sample in samples:
                if sample in mine:  # an epoch has ended, or samples are drawn with replacement
                    return self._forget()
                mine.add(sample)
                first = self._owner.setdefault(sample, rank)
                if first != rank:
                    self._twice[first, rank] += 1
        if len(self._owner) > _MOST:
            self._forget()

    def _overlap(self) -> tuple[tuple[int, ...], str]:
        ranks = tuple(sorted({rank for pair in self._twice for rank in pair}))
        pairs = ", ".join(f"{count} by {named(pair)}" for pair, count in sorted(self._twice.items()))
        return ranks, (
            f"samples are seen twice within an epoch: of {len(self._owner)}, {pairs}. Give the sampler the same seed "
            "on all ranks, and each rank a shard of the order that comes of it"
        )


class SameRandomNumbers(Detector):
    """Do two ranks draw the same random numbers in forward, as for dropout? Looked at where forward draws any, in the
    first three steps and then in each tenth: what draws alike does so in every step."""

    name: ClassVar[str] = "same_random"
    size: ClassVar[int] = 1

    def attach(self, program: Program) -> None:
        super().attach(program)
        self._before = self._drawn = 0
        self._first = program.step
        self._has_told = False

    def before_forward(self, inputs: tuple[Any, ...]) -> None:
        step = self.program.step
        if step < self._first + _STEPS or step % 10 == 0:
            self._before = self._state()

    def after_forward(self, output: Any) -> None:
        if not self._drawn and self._before and self._state() != self._before:
            self._drawn = self._before
        self._before = 0

    def local_report(self, observation: StepObservation) -> Sequence[float]:
        drawn, self._drawn = self._drawn, 0
        return [float(drawn)]

    def check(self, step: int, reports: LocalReport) -> list[Finding]:
        by_state: defaultdict[float, list[int]] = defaultdict(list)
        for rank, [state] in enumerate(reports):
            if state:
                by_state[state].append(rank)
        ranks = next((tuple(each) for each in by_state.values() if len(each) > 1), ())
        if not ranks or self._has_told:
            return []
        self._has_told = True
        message = (
            f"{named(ranks)} draw the same random numbers in forward: their dropout masks are copies of each other. "
            "Once the model is made, seed each rank differently, as in torch.manual_seed(rng.seed_of(seed, rank))"
        )
        return [Finding(self.name, step, ranks, message, "warning", "forward")]

    def _state(self) -> int:
        device = self.program.world.device
        state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        return crc32(state.numpy().data) + 1  # 0 is for none


def rows_hashed(inputs: Any) -> torch.Tensor:
    """A number of 64 bits for each row of a batch [rows], made from that row of all its tensors; empty without any."""
    if len(inputs) == 1 and isinstance(inputs[0], torch.Tensor):
        [leaf] = inputs
        if leaf.dtype is torch.int64 and leaf.dim() == 2 and leaf.is_cpu and 0 < leaf.shape[1] <= _NUMBERS:
            # Most often it is numbers of tokens. The same sum, in a third of the time: numpy has less to do around it.
            return torch.from_numpy(leaf.numpy() @ numpy_hash_weights(leaf.shape[1]))
    return _rows_hashed(inputs)


@torch.no_grad()
def _rows_hashed(inputs: Any) -> torch.Tensor:
    if len(inputs) == 1 and isinstance(inputs[0], torch.Tensor):  # most often, so it is made short
        leaves = [inputs[0].detach()] if inputs[0].dim() else []
    else:
        leaves = [leaf.detach() for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    alike = [leaf for leaf in leaves if len(leaf) == len(leaves[0]) and leaf.layout == torch.strided]
    if not alike or not alike[0].numel():
        return torch.empty(0, dtype=torch.int64)
    words = _words(alike[0]) if len(alike) == 1 else torch.cat([_words(leaf) for leaf in alike], 1)
    if words.shape[1] > _NUMBERS:
        words = words[:, :: -(-words.shape[1] // _NUMBERS)]
    weights = hash_weights(words.shape[1], words.device)
    if words.device.type == "cpu":
        return torch.mv(words, weights)  # the same sum; not for whole numbers on a GPU
    return (words * weights).sum(1)


def _words(leaf: torch.Tensor) -> torch.Tensor:
    """[rows, ...] of any type -> [rows, numbers of 64 bits], the same bits."""
    rows = leaf.reshape(len(leaf), -1).contiguous()
    if rows.element_size() == 8 and not rows.is_complex():
        return rows.view(torch.int64)
    data = rows.view(torch.uint8)
    if short := -data.shape[1] % 8:
        data = torch.nn.functional.pad(data, (0, short))
    elif data.storage_offset() % 8:
        data = data.clone()
    return data.view(torch.int64)
