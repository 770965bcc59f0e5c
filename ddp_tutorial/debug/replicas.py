"""Check that all ranks have the same weights, by comparing checksums of parameters, optimizer state and buffers.

Replicas start with identical weights and receive the same gradients, so they stay bitwise identical. The check
therefore has no tolerance. Each rank sends one number that depends on all bits of its state. If the numbers differ, the
ranks compare the tensors one by one. Reading all bits is expensive, so the check runs only occasionally, or if the
averaged gradients differ between ranks.
"""

import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import nn

from ddp_tutorial.config import named_ranks
from ddp_tutorial.debug.detector import Detector, Finding, LocalReport, Program
from ddp_tutorial.debug.hash_weights import hash_weights
from ddp_tutorial.debug.instrumentation import StepObservation
from ddp_tutorial.zero.pieces import is_piece

# For tensors of at most this many bytes, zlib is faster than PyTorch.
_SMALL = 4096
_ROW = 1024  # number of 64-bit integers in a row
_WHOLE = 1 << 48  # a float64 represents every integer below this value exactly


class ReplicaDrift(Detector):
    """Detector of parameters, buffers, optimizer state and optimizer options that differ between ranks.

    The detector compares parameters and optimizer state after the first step, and then once per `every` steps, before
    the update. With `every=1`, the comparison runs after each step. In these steps, the detector also compares
    the buffers at the start of the first forward pass, just after DDP has broadcast the buffers.

    Differences caused by a gradient are detected at the next exchange, and reported with the gradient's step. To detect
    such differences, the ranks compare a sum of the averaged gradients in each step. Other differences, such as an
    option that one rank has changed, are detected up to `every - 1` steps later. The finding then contains the step of
    the detection, and the message contains the last step without a difference.

    A difference in the parameters or the optimizer is an error. A difference in the buffers is only reported, because
    training remains correct. However, a checkpoint contains only rank 0's buffers. The detector does not compare
    sharded state, such as DTensors, shards of `zero`, and the state of `ZeroRedundancyOptimizer` and
    `ShardedOptimizer`. Do not use this detector if ranks update their weights independently, as with local SGD.

    Args:
        every: The number of steps between two comparisons.
        ignore: Name patterns of tensors that may differ.

    Raises:
        ValueError: If `every` is below 1.
    """

    name: ClassVar[str] = "drift"
    size: ClassVar[int] = 3

    def __init__(self, every: int = 20, ignore: Sequence[str] = ()) -> None:
        """Store the arguments; see the class docstring."""
        if every < 1:
            raise ValueError(f"'every' must be at least 1 step, got {every}")
        self.every, self.ignore = every, tuple(ignore)
        self._buffers: dict[str, int] = {}
        self._reported: set[str] = set()

    def attach(self, program: Program) -> None:
        """Reset the detector for a new block."""
        super().attach(program)
        self._first, self._buffers = program.step, {}
        self._buffers_checksum = float(combine_checksums(self._buffers))
        self._has_begun, self._compares_gradients = False, True
        self._sizes: dict[int, Sequence[float | torch.Tensor]] = {}  # step -> gradient sizes, until exchanged
        self._sums: dict[int, dict[str, int]] = {}  # step -> checksums, until exchanged
        self._difference: tuple[int, dict[str, str]] | None = None  # a step with different gradients, and their sizes
        self._same_after: int | None = None
        self._compared: tuple[float, ...] = ()  # combined buffer checksums of the last comparison

    def _is_due(self, step: int) -> bool:
        return step == self._first or step % self.every == 0

    def before_forward(self, inputs: tuple[Any, ...]) -> None:
        """Compute the checksums of the buffers if a comparison is due."""
        if not self._has_begun and self.program.module.training and self._is_due(self.program.step):
            self._has_begun = True
            self._buffers = checksums(self._kept(dict(self.program.module.named_buffers())))
            self._buffers_checksum = float(combine_checksums(self._buffers))

    def local_report(self, observation: StepObservation) -> Sequence[float]:
        """Return the combined checksums of buffers and gradients and, if due, of parameters and optimizer state."""
        self._has_begun, step, state = False, self.program.step, 0.0
        if self._compares_gradients:
            self._sizes[step] = self.program.gradient_sizes()
        is_due = step != self._first and step % self.every == 0
        if is_due and self.every > 1 and self.program.world.size > 1:  # with every=1, `after_update` compares
            self._sums[step] = checksums(self._kept(dict(self._state())))
            state = float(combine_checksums(self._sums[step]))
        return [self._buffers_checksum, self.program.gradient(), state]

    def check(self, step: int, reports: LocalReport) -> list[Finding]:
        """Return the findings from the checksums of all ranks. Collective."""
        sizes, sums = self._sizes.pop(step, []), self._sums.pop(step, {})
        buffers, gradients, states = zip(*reports, strict=True)
        found = list[Finding]()
        if buffers != self._compared and len(set(buffers)) > 1:
            found, self._compared = self._compare_buffers(step), buffers
        if any(states):
            found += self._verdict(step, step - 1, sums, states)
        if self._difference is None and self._compares_gradients and len({each.hex() for each in gradients}) > 1:
            values = [float(each).hex() for each in sizes]
            self._difference = step, dict(zip(self.program.named_gradients(), values, strict=False))
            if step < self.program.step:  # otherwise the update has not used the gradients yet
                found += self._compare(self.program.step, self.program.step - 1)
        return found

    def _compare_buffers(self, step: int) -> list[Finding]:
        """Return a finding for the first buffer that differs, unless it has already been reported. Collective."""
        found = first_drift(self.program.gather(self._buffers))
        if found is None or found[0] in self._reported:
            return []
        name, ranks = found
        self._reported.add(name)
        differ = _differ(ranks, self.program.world.size)
        message = (
            f"buffer {name!r} is not the same on all ranks at the start of the step: {differ}. Metrics and checkpoints "
            "then depend on the rank. Let DDP broadcast buffers, or synchronize the statistics"
        )
        return [Finding(self.name, step, ranks, message, "warning", name)]

    def after_update(self, step: int) -> list[Finding]:
        """Compare parameters and optimizer state if a comparison is due or the gradients differed. Collective."""
        is_due = step == self._first or self.every == 1
        return self._compare(step, step) if is_due or self._difference else []

    def _compare(self, step: int, after: int) -> list[Finding]:
        """Compare the parameters and the optimizer state bitwise between ranks, after step `after`. Collective."""
        sums = checksums(self._kept(dict(self._state())))
        of_ranks = self.program.gather_numbers(torch.tensor([combine_checksums(sums)])).tolist()
        return self._verdict(step, after, sums, of_ranks)

    def _verdict(self, step: int, after: int, sums: dict[str, int], of_ranks: Sequence[object]) -> list[Finding]:
        """Return a finding if the ranks' combined checksums (`of_ranks`) differ. Collective.

        `sums` contains this rank's checksums after the update in step `after`.
        """
        if all(each == of_ranks[0] for each in of_ranks):
            # Gradients may differ without a problem if the ranks average their weights instead.
            self._compares_gradients = self._compares_gradients and not self._difference
            self._difference, self._same_after = None, after
            return []
        found = first_drift(self.program.gather(sums))
        assert found is not None, "the combined checksums differ, so those of one tensor differ"
        since = ""
        if self._difference and self._difference[0] < step:  # all tensors may differ now: compare that step's gradients
            step, sizes = self._difference
            found = first_drift(self.program.gather(self._kept(sizes))) or found
        elif self._same_after is not None and self._same_after < after - 1:
            since = f". After step {self._same_after}, the replicas were identical"
        name, ranks = found
        differ = _differ(ranks, self.program.world.size)
        message = f"the replicas have drifted apart: {name} is not the same on all ranks, {differ}{since}"
        return [Finding(self.name, step, ranks, message, "error", name)]

    def _state(self) -> Iterator[tuple[str, Any]]:
        """Yield the name and the value of all state that an update reads or writes.

        Options precede the parameters, because different options lead to different parameters.
        """
        names, optimizer = self.program.names, self.program.optimizer
        for number, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key != "params":
                    yield f"{key} of the optimizer's parameter group {number}", value
        yield from ((name, p) for name, p in self.program.module.named_parameters() if not is_piece(p))
        # The classes are compared by name, because importing ZeroRedundancyOptimizer logs a warning.
        if {"ZeroRedundancyOptimizer", "ShardedOptimizer"} & {each.__name__ for each in type(optimizer).__mro__}:
            return
        for parameter, state in optimizer.state.items():
            if is_piece(parameter):
                continue
            of = names.get(cast("nn.Parameter", parameter), "a parameter that is not the model's")
            for key, value in state.items() if isinstance(state, Mapping) else ():
                yield f"{key} of {of}", value

    def _kept(self, named: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: value for name, value in named.items() if not any(fnmatchcase(name, each) for each in self.ignore)
        }


def first_drift(of_ranks: Sequence[Mapping[str, object]]) -> tuple[str, tuple[int, ...]] | None:
    """Return the first name whose value differs between ranks, and the ranks that differ from the majority.

    Without a majority, return all ranks. Return None if all values are equal.
    """
    for name in dict.fromkeys(name for each in of_ranks for name in each):
        values = [each.get(name) for each in of_ranks]
        [(common, count), *others] = Counter(values).most_common(2)
        if others:
            is_most = count > others[0][1]
            return name, tuple(rank for rank, value in enumerate(values) if value != common or not is_most)
    return None


def _differ(ranks: Sequence[int], size: int) -> str:
    if len(ranks) == size:
        return f"{named_ranks(ranks)} differ"
    return f"{named_ranks(ranks)} {'differs' if len(ranks) == 1 else 'differ'} from the others"


@torch.no_grad()
def checksums(named: Mapping[str, Any]) -> dict[str, int]:
    """Return a number below 2**48 for each tensor and each plain value.

    Each number depends on all bits of the value and, with rare exceptions, on the positions of the bits.
    """
    sums: dict[str, int | torch.Tensor] = {}
    for name, value in named.items():
        if isinstance(value, torch.Tensor):
            if type(value).__name__ != "DTensor" and value.layout == torch.strided:
                sums[name] = _checksum(value)
        elif isinstance(value, (int, float, str, bool, tuple, type(None))):
            sums[name] = zlib.crc32(repr(value).encode())
    waiting = {name: value for name, value in sums.items() if isinstance(value, torch.Tensor)}
    if waiting:
        sums.update(zip(waiting, torch.stack([each.cpu() for each in waiting.values()]).tolist(), strict=True))
    return {name: int(value) % _WHOLE for name, value in sums.items()}


def _checksum(tensor: torch.Tensor) -> int | torch.Tensor:
    """Return a hash of all bits of the tensor.

    Large tensors are summed into 1,024 integers, and the hash is the dot product of these integers and random weights.
    Hashing is as fast as reading the memory. The hash detects moved values, unless they have moved by whole rows.
    """
    if tensor.dtype is torch.float32 and tensor.is_cpu:  # the most common case
        values = tensor.detach().contiguous().numpy()
        if values.nbytes <= _SMALL:
            return zlib.crc32(values.data)
        if values.nbytes % (8 * _ROW) == 0:  # the same hash, with less overhead
            sums = np.add.reduce(values.reshape(-1).view(np.int64).reshape(-1, _ROW))
            return int(np.dot(sums, hash_weights(_ROW).numpy()))
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    data = flat.view(torch.uint8)
    if data.device.type == "cpu" and len(data) <= _SMALL:
        return zlib.crc32(data.numpy().data)
    in_rows = len(data) // (8 * _ROW) * (8 * _ROW)
    rows, rest = data[:in_rows].view(torch.int64).view(-1, _ROW), data[in_rows:]
    weights = hash_weights(_ROW, data.device)
    sums = (rows.sum(0) * weights).sum()
    if not len(rest):
        return sums
    return sums + (rest.long() * hash_weights(8 * _ROW, data.device)[: len(rest)]).sum()


def combine_checksums(sums: Mapping[str, int]) -> int:
    """Combine the results of `checksums` into one number below 2**48 that depends on the names and their order."""
    text = repr(list(sums.items())).encode()
    return zlib.crc32(text) | zlib.adler32(text) % (1 << 16) << 32
