"""Detect ranks that use the same samples or draw the same random numbers."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import combinations
from typing import Any, ClassVar
from zlib import crc32

import torch

from ddp_tutorial.compat import tree_leaves
from ddp_tutorial.config import named_ranks
from ddp_tutorial.debug.detector import Detector, Finding, LocalReport, Program
from ddp_tutorial.debug.hash_weights import hash_weights
from ddp_tutorial.debug.instrumentation import StepObservation

# Maximum number of samples to remember before the comparison starts over.
_MOST = 500_000
# Maximum number of 64-bit numbers to read from a sample. In larger samples, evenly spaced numbers are read.
_NUMBERS = 1 << 14
# Two ranks overlap if they share half of their samples in `_STEPS` consecutive steps, and `_SAMPLES` in total.
_STEPS, _SAMPLES = 3, 3

_CAPACITY = 256  # initial number of values per rank and exchange, which grows to twice the largest demand

Steps = Sequence[Sequence[int]]  # the sample hashes of one rank for each step


class DataOverlap(Detector):
    """Detector of samples that two ranks use in the same step or in the same epoch.

    The sample hashes are exchanged together with the other statistics, so this detector requires no additional
    collective.

    A sample is a row of the model's inputs during training. The detector starts over when a rank uses one of its own
    samples again, which indicates a new epoch. Within an epoch, no sample should be used twice. A few duplicates are
    allowed, because samplers may pad the data or draw samples with replacement. Samples with random augmentation differ
    each time, so their duplicates are not detected.
    """

    name: ClassVar[str] = "overlap"

    def attach(self, program: Program) -> None:
        """Reset the detector for a new block."""
        super().attach(program)
        self._now: list[torch.Tensor] = []  # hashes of the current step
        self._mine: list[list[torch.Tensor]] = []  # hashes of each step since the last exchange
        self._left: list[int] = []  # values that exceeded the capacity
        self._capacity = _CAPACITY  # capacity of the next exchange, the same on all ranks
        self._incomplete: list[list[int]] = [[] for _ in range(program.world.size)]  # values of incomplete steps
        self._seen = Epoch(program.world.size)
        self._is_done = program.world.size == 1

    def before_forward(self, inputs: tuple[Any, ...]) -> None:
        """Hash the samples of a forward pass in training."""
        if self.program.module.training and not self._is_done:
            self._now.append(rows_hashed(inputs))

    def local_report(self, observation: StepObservation) -> Sequence[float]:
        """Store the hashes of this step, and return an empty report."""
        if not self._is_done:
            self._mine.append(self._now)
            self._now = []
        return ()

    def values_to_exchange(self) -> torch.Tensor | None:
        """Return the number of pending values, followed by the values that fit into this exchange.

        The next exchange sends the remaining values. A step's values are the number of samples and the sample hashes.
        """
        if self._is_done:
            return None
        mine = self._left
        for parts in self._mine:
            mine.append(sum(map(len, parts)))
            for part in parts:
                mine += part.tolist()
        self._mine, self._left = [], mine[self._capacity :]
        return torch.tensor(
            [len(mine), *mine[: self._capacity], *[0] * (self._capacity - len(mine))], dtype=torch.int64
        )

    def on_exchanged(self, step: int, of_ranks: torch.Tensor) -> list[Finding]:
        """Return a finding if the ranks' samples overlap."""
        capacity = self._capacity
        for pending, (count, *numbers) in zip(self._incomplete, of_ranks.tolist(), strict=True):
            pending.extend(numbers[: min(count, capacity)])
            self._capacity = max(self._capacity, 2 * count)
        found = self._seen.add(self._steps())
        if found is None:
            return []
        self._is_done = True
        ranks, message = found
        return [Finding(self.name, step, ranks, message, "warning", "data")]

    def _steps(self) -> list[Steps]:
        """Remove and return each rank's samples from all steps that every rank has sent completely."""
        of_ranks = []
        for pending in self._incomplete:
            steps, place = [], 0
            while place < len(pending) and place + pending[place] < len(pending):
                steps.append(pending[place + 1 : (place := place + 1 + pending[place])])
            of_ranks.append(steps)
        complete = min(map(len, of_ranks))
        for pending, steps in zip(self._incomplete, of_ranks, strict=True):
            del pending[: sum(1 + len(each) for each in steps[:complete])]
        return [steps[:complete] for steps in of_ranks]


class Epoch:
    """The samples of all ranks since the comparison started.

    All ranks store the same samples, so all ranks reach the same conclusion.
    """

    def __init__(self, size: int) -> None:
        """Create an empty epoch for `size` ranks."""
        self.size = size
        # After the end of an epoch, samples are assigned to ranks at random. The probability that none of this many
        # samples returns to its previous rank is (1 - 1 / size) ** (20 size), which is about e ** -20.
        self.enough = 20 * size

        self._in_row: Counter[tuple[int, int]] = Counter()  # pair of ranks -> consecutive steps with shared samples
        self._common: defaultdict[tuple[int, int], set[int]] = defaultdict(set)  # pair -> the shared samples
        self._forget()

    def _forget(self) -> None:
        self._of: list[set[int]] = [set() for _ in range(self.size)]
        self._owner: dict[int, int] = {}  # sample -> the rank that used it first
        self._twice: Counter[tuple[int, int]] = Counter()  # pair of ranks -> number of samples that both used

    def add(self, of_ranks: Sequence[Steps]) -> tuple[tuple[int, ...], str] | None:
        """Add each rank's samples from several steps. If ranks share samples, return these ranks and a message."""
        for steps in zip(*of_ranks, strict=False):
            for pair in combinations(range(self.size), 2):
                if self._share_a_step(pair, steps):
                    common = len(self._common[pair])
                    return pair, (
                        f"{named_ranks(pair)} train on the same samples: in {_STEPS} consecutive steps, they shared at "
                        f"least half of their samples, {common} in total. Shard the data by rank, as "
                        "DistributedSampler does"
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
        pairs = ", ".join(f"{named_ranks(pair)} shared {count}" for pair, count in sorted(self._twice.items()))
        return ranks, (
            f"samples are used twice within an epoch: of {len(self._owner)} samples, {pairs}. Use the same seed for "
            "the sampler on all ranks, and assign each rank its own shard of the shuffled samples"
        )


class SameRandomNumbers(Detector):
    """Detector of ranks that draw the same random numbers in the forward pass, for example for dropout.

    If the forward pass draws random numbers, the detector compares the ranks' generator states in the first three steps
    and then in every tenth step. Ranks with the same state draw the same numbers in every step.
    """

    name: ClassVar[str] = "same_random"
    size: ClassVar[int] = 1

    def attach(self, program: Program) -> None:
        """Reset the detector for a new block."""
        super().attach(program)
        self._before = self._drawn = 0
        self._first = program.step
        self._has_reported = False

    def before_forward(self, inputs: tuple[Any, ...]) -> None:
        """Store the state of the random number generator if a comparison is due."""
        step = self.program.step
        if step < self._first + _STEPS or step % 10 == 0:
            self._before = self._state()

    def after_forward(self, output: Any) -> None:
        """Keep the stored state if the forward pass has drawn random numbers."""
        if not self._drawn and self._before and self._state() != self._before:
            self._drawn = self._before
        self._before = 0

    def local_report(self, observation: StepObservation) -> Sequence[float]:
        """Return the checksum of the state, or 0 if no random numbers were drawn."""
        drawn, self._drawn = self._drawn, 0
        return [float(drawn)]

    def check(self, step: int, reports: LocalReport) -> list[Finding]:
        """Return a finding the first time that at least two ranks have the same state."""
        by_state: defaultdict[float, list[int]] = defaultdict(list)
        for rank, [state] in enumerate(reports):
            if state:
                by_state[state].append(rank)
        ranks = next((tuple(each) for each in by_state.values() if len(each) > 1), ())
        if not ranks or self._has_reported:
            return []
        self._has_reported = True
        message = (
            f"{named_ranks(ranks)} draw the same random numbers in the forward pass: their dropout masks are "
            "identical. After the model is built, seed each rank differently, as in "
            "torch.manual_seed(rng.seed_of(seed, rank))"
        )
        return [Finding(self.name, step, ranks, message, "warning", "forward")]

    def _state(self) -> int:
        device = self.program.world.device
        state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        return crc32(state.numpy().data) + 1  # 0 means that no numbers were drawn


def rows_hashed(inputs: Any) -> torch.Tensor:
    """Return a 64-bit hash of each row of a batch as a tensor [rows], which is empty if the batch contains no tensors.

    The hash covers all dense tensors of the batch that have the same number of rows as the first dense tensor.
    """
    if len(inputs) == 1 and isinstance(inputs[0], torch.Tensor):  # a fast path for the most common case
        leaves = [inputs[0]]
    else:
        leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    dense = [leaf.detach() for leaf in leaves if leaf.layout == torch.strided and leaf.dim() and leaf.numel()]
    if not dense:
        return torch.empty(0, dtype=torch.int64)
    first, *others = alike = [leaf for leaf in dense if len(leaf) == len(dense[0])]
    if not others and first.dtype is torch.int64 and first.dim() == 2 and first.is_cpu and first.shape[1] <= _NUMBERS:
        # Batches are usually token ids. NumPy computes the same sum in a third of the time.
        return torch.from_numpy(first.numpy() @ hash_weights(first.shape[1]).numpy())
    words = torch.cat([_words(leaf) for leaf in alike], 1) if others else _words(first)
    if words.shape[1] > _NUMBERS:
        words = words[:, :: -(-words.shape[1] // _NUMBERS)]
    weights = hash_weights(words.shape[1], words.device)
    if words.device.type == "cpu":
        return torch.mv(words, weights)  # the same sum; `mv` does not support integers on GPUs
    return (words * weights).sum(1)


def _words(leaf: torch.Tensor) -> torch.Tensor:
    """Reinterpret the bits of a tensor [rows, ...] of any type as 64-bit integers [rows, words]."""
    rows = leaf.reshape(len(leaf), -1).resolve_conj().contiguous()
    if rows.element_size() == 8 and not rows.is_complex():
        return rows.view(torch.int64)
    data = rows.view(torch.uint8)
    if short := -data.shape[1] % 8:
        data = torch.nn.functional.pad(data, (0, short))
    elif data.storage_offset() % 8:
        data = data.clone()
    return data.view(torch.int64)
