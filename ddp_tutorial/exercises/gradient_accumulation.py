"""Exercises on the last micro-batch, ragged batches, and unknown counts, for notebook 08_gradient_accumulation."""

import math
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_tutorial.exercises import Answer, Exercise, counted, expect, numbers, on_ranks
from ddp_tutorial.exercises.plain_torch import counted_hook
from ddp_tutorial.world import World

# ---------------------------------------------------------------------------------------------- 1. the last micro-batch

_COUNTS = (3, 1, 0, 5)


class _Loader:
    """An iterator that counts the returned tensors."""

    def __init__(self, batches: list[torch.Tensor]) -> None:
        self.batches, self.returned = batches, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self

    def __next__(self) -> torch.Tensor:
        if self.returned == len(self.batches):
            raise StopIteration
        self.returned += 1
        return self.batches[self.returned - 1]


def _linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def _loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().sum()
    return loss


def _run_synchronize_last(world: World, answer: Answer) -> tuple[list[dict[str, Any]], int]:
    """Return a record for each micro-batch count, and the number of all-reduces in a run that exits the loop early."""
    records = []
    for count in _COUNTS:
        ddp, calls = DistributedDataParallel(_linear()), []  # type: ignore[var-annotated]
        ddp.register_comm_hook(calls, counted_hook)
        batches = [torch.full((2, 3), 1.0 + world.rank + 2 * number) for number in range(count)]
        loader, seen, ahead = _Loader(batches), [], 0
        for batch in answer(ddp, loader):
            seen.append(float(batch[0, 0]) if isinstance(batch, torch.Tensor) else batch)
            ahead = max(ahead, loader.returned - len(seen))
            _loss(ddp, batch).backward()
        gradient = ddp.module.weight.grad
        records.append({"seen": seen, "given": [float(batch[0, 0]) for batch in batches], "ahead": ahead})
        records[-1] |= {"calls": len(calls), "gradient": None if gradient is None else gradient.clone()}
    ddp, calls = DistributedDataParallel(_linear()), []
    ddp.register_comm_hook(calls, counted_hook)
    loop = answer(ddp, _Loader([torch.ones(2, 3)] * 4))
    _loss(ddp, next(loop)).backward()
    loop.close()  # has the same effect as a `break` in the loop
    _loss(ddp, torch.ones(2, 3)).backward()
    return records, len(calls)


def _test_synchronize_last(answer: Answer) -> str:
    stuck = "A rank waits forever: all ranks must start the same number of all-reduces."
    results = on_ranks(_run_synchronize_last, 2, answer, stuck=stuck, timeout=60)
    for number, count in enumerate(_COUNTS):
        case = f"With {count} micro-batches"
        for records, _ in results:
            record = records[number]
            expect(
                record["seen"] == record["given"],
                f"{case}, yield each micro-batch once, in order. Expected {len(record['given'])} micro-batches, got "
                f"{len(record['seen'])}.",
            )
            expect(
                record["ahead"] <= 1,
                f"{case}, your generator reads {record['ahead']} micro-batches ahead of the loop, and so many "
                "may not fit into memory. Read at most one micro-batch ahead.",
            )
            expect(
                record["calls"] == min(count, 1),
                f"{case}, the number of all-reduces must be {min(count, 1)}, got {record['calls']}. Run only the "
                "last micro-batch outside no_sync().",
            )
        if count:
            model = _linear()
            for batch in (each for records, _ in results for each in records[number]["given"]):
                (_loss(model, torch.full((2, 3), batch)) / len(results)).backward()
            true = model.weight.grad
            assert isinstance(true, torch.Tensor)
            for records, _ in results:
                expect(
                    torch.allclose(records[number]["gradient"], true),
                    f"{case}, there was one all-reduce, but the gradient does not include all micro-batches. "
                    "Synchronize in the last micro-batch.",
                )
    expect(
        all(calls for _, calls in results),
        "After an early exit from the loop, the next backward pass did not synchronize the gradients. Exit "
        "no_sync() when the generator is closed, for example by using a `with` statement.",
    )
    return "Only the last micro-batch synchronizes, and at most one micro-batch is read ahead."


Batches = Iterable[torch.Tensor]


def _synchronize_last(ddp: "Any", batches: "Batches") -> "Iterator[torch.Tensor]":
    held: list[torch.Tensor] = []  # at most one micro-batch
    for batch in batches:
        if held:
            with ddp.no_sync():
                yield held.pop()
        held.append(batch)
    yield from held


def _reads_all(ddp: Any, batches: Batches) -> Iterator[torch.Tensor]:
    yield from _synchronize_last(ddp, list(batches))


def _always(ddp: Any, batches: Batches) -> Iterator[torch.Tensor]:
    yield from batches


def _never(ddp: Any, batches: Batches) -> Iterator[torch.Tensor]:
    with ddp.no_sync():
        yield from batches


def _first(ddp: Any, batches: Batches) -> Iterator[torch.Tensor]:
    batches = iter(batches)
    yield from islice(batches, 1)
    with ddp.no_sync():
        yield from batches


def _drops_the_last(ddp: Any, batches: Batches) -> Iterator[torch.Tensor]:
    held: list[torch.Tensor] = []
    for batch in batches:
        if held:
            yield held.pop()
        held.append(batch)


def _by_hand(ddp: Any, batches: Batches) -> Iterator[torch.Tensor]:
    held: list[torch.Tensor] = []
    for batch in batches:
        ddp.require_backward_grad_sync = False  # no_sync() sets and resets this
        if held:
            yield held.pop()
        held.append(batch)
    ddp.require_backward_grad_sync = True
    yield from held


synchronize_last = Exercise(
    task=(
        "synchronize_last(ddp, batches): yield the micro-batches from an iterator of unknown length. DDP must "
        "synchronize only in the last micro-batch."
    ),
    test=_test_synchronize_last,
    solution=_synchronize_last,
    wrong={
        "reads all micro-batches first": _reads_all,
        "does not use no_sync": _always,
        "runs the last micro-batch inside no_sync, too": _never,
        "synchronizes in the first micro-batch": _first,
        "drops the last micro-batch": _drops_the_last,
        "disables synchronization by hand": _by_hand,
    },
    hints=(
        "A micro-batch is not the last one if you can read a next micro-batch. Read one micro-batch ahead, and "
        "yield the previous one.",
        "While a generator waits at `yield`, the loop body runs. A `with ddp.no_sync():` block around the `yield` "
        "is also active in the loop body.",
    ),
)

# ---------------------------------------------------------------------------------------- 2. an epoch of ragged batches

_CASES = ((4, 2), (5, 2), (3, 4), (7, 3), (2, 1))  # micro-batches in the loader, and micro-batches per step
_VOCAB, _CLIP = 11, 0.5
Pair = tuple[torch.Tensor, torch.Tensor]


class _Letters(nn.Module):
    """A model that records the number of samples in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(_VOCAB, 8), nn.Linear(8, _VOCAB)
        self.sizes: list[int] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(inputs))
        logits: torch.Tensor = self.head(self.embedding(inputs))
        return logits


def _ragged_loader(count: int) -> list[Pair]:
    """Return `count` micro-batches of 2 samples. Each sample contains 2 to 12 tokens."""
    generator = torch.Generator().manual_seed(count)
    pairs = []
    for _ in range(count):
        inputs, targets = torch.randint(_VOCAB, (2, 2, 12), generator=generator)
        lengths = torch.randint(2, 13, (2, 1), generator=generator)
        targets[torch.arange(12) >= lengths] = -100
        pairs.append((inputs, targets))
    return pairs


def _vector(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def _tools(model: nn.Module) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


def _expected_epoch(count: int, k: int) -> tuple[nn.Module, list[float], float]:
    """Train for one epoch with one large batch per step, and return the model, losses and final learning rate."""
    model, losses = _Letters(), []
    optimizer, scheduler = _tools(model)
    pairs = _ragged_loader(count)
    for start in range(0, count, k):
        inputs, targets = (torch.cat(each) for each in zip(*pairs[start : start + k], strict=True))
        (loss := F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())).backward()
        nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses, scheduler.get_last_lr()[0]


def _test_train_epoch(answer: Answer) -> str:
    for count, k in _CASES:
        case = f"A loader of {count} micro-batches, k = {k}"
        model = _Letters()
        optimizer, scheduler = _tools(model)
        returned = answer(model, optimizer, scheduler, iter(_ragged_loader(count)), k)
        true, losses, rate = _expected_epoch(count, k)
        expect(
            model.sizes == [2] * count,
            f"{case}: the model must process {count} micro-batches of 2 samples, got micro-batches of {model.sizes} "
            "samples. A larger batch does not fit into memory.",
        )
        expect(
            isinstance(returned, list) and len(returned) == len(losses),
            f"{case}: the result must be a list of {len(losses)} losses, one per optimizer step, got {returned!r}. "
            "The remaining micro-batches form a step, too.",
        )
        expect(
            scheduler.get_last_lr()[0] == rate,
            f"{case}: after {len(losses)} optimizer steps, the learning rate must be {rate:g}, got "
            f"{scheduler.get_last_lr()[0]:g}. Call scheduler.step() once per optimizer step.",
        )
        for number, (loss, right) in enumerate(zip(returned, losses, strict=True)):
            expect(
                abs(float(loss) - right) < 1e-4,
                f"{case}: the loss of step {number + 1} must be {right:.4f}, the mean over the step's tokens, got "
                f"{float(loss):.4f}.",
            )
        off = float((_vector(model) - _vector(true)).norm() / _vector(true).norm())
        expect(
            off < 1e-5,
            f"{case}: the losses are right, but the final weights differ from the expected weights by {off:.1%}. "
            "Weight all tokens of a step equally, and clip the gradient of the whole step once.",
        )
        clean = all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())
        expect(clean, f"{case}: the last step's gradient was not cleared, and would leak into the next epoch.")
    return "Every step is equivalent to a step on one large batch, and the remaining micro-batches form their own step."


Loader = Iterable[Pair]


def _train_epoch(model: "nn.Module", optimizer: "Any", scheduler: "Any", loader: "Loader", k: int) -> list[float]:
    loader, losses = iter(loader), []
    while window := list(islice(loader, k)):  # contains only inputs and targets, which are small
        count = sum((targets != -100).sum() for _, targets in window)
        total = 0.0
        for inputs, targets in window:
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum") / count
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def _epoch_with(
    divisor: str = "tokens",
    clip_each: bool = False,
    schedule_each: bool = False,
    drop: bool = False,
    at_once: bool = False,
) -> Answer:
    """Return a variant of `train_epoch` with one mistake."""

    def train_epoch(model: nn.Module, optimizer: Any, scheduler: Any, loader: Loader, k: int) -> list[float]:
        loader, losses = iter(loader), []
        while window := list(islice(loader, k)):
            if drop and len(window) < k:
                break
            tokens = sum(int((targets != -100).sum()) for _, targets in window)
            pairs = [tuple(torch.cat(each) for each in zip(*window, strict=True))] if at_once else window
            total = 0.0
            for inputs, targets in pairs:
                loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
                own = int((targets != -100).sum())
                (loss / {"tokens": tokens, "means": own * len(window), "k": own * k}[divisor]).backward()
                total += loss.item() / tokens
                if clip_each:
                    nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
            nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
            optimizer.step()
            for _ in window if schedule_each else window[:1]:
                scheduler.step()
            optimizer.zero_grad()
            losses.append(total)
        return losses

    return train_epoch


def _usual_loop(model: nn.Module, optimizer: Any, scheduler: Any, loader: Loader, k: int) -> list[float]:
    losses, total = [], 0.0
    for number, (inputs, targets) in enumerate(loader):
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()) / k
        loss.backward()
        total += loss.item()
        if (number + 1) % k == 0:
            nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(total)
            total = 0.0
    return losses


train_epoch = Exercise(
    task=(
        "train_epoch(model, optimizer, scheduler, loader, k): train one epoch with k micro-batches per step. Clip "
        "the gradient to norm 0.5, and return the mean loss of each step."
    ),
    test=_test_train_epoch,
    solution=_train_epoch,
    wrong={
        "takes a mean of means": _epoch_with(divisor="means"),
        "always divides by k": _epoch_with(divisor="k"),
        "clips after every micro-batch": _epoch_with(clip_each=True),
        "advances the schedule with every micro-batch": _epoch_with(schedule_each=True),
        "drops the remainder": _epoch_with(drop=True),
        "computes each step at once": _epoch_with(at_once=True),
        "is the usual loop, which keeps the remainder in .grad": _usual_loop,
    },
    hints=(
        "After loader = iter(loader), list(islice(loader, k)) returns up to k micro-batches. At the end, the "
        "list is empty.",
        "Inputs and targets are small, but activations are large. You can therefore read all micro-batches of a "
        "step, and count their tokens, before the first forward pass.",
        "Divide F.cross_entropy(..., reduction='sum') by the number of tokens in the step. Every token then has the "
        "same weight, and the sum of these losses is the mean loss of the step.",
    ),
)

# --------------------------------------------------------------------------------------- 3. counts not known in advance


class _Heads(nn.Module):
    """A model with three linear heads. Each micro-batch uses one head, and no micro-batch uses the last head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList(nn.Linear(2, 1) for _ in range(3))

    def forward(self, inputs: torch.Tensor, head: int) -> torch.Tensor:
        output: torch.Tensor = self.heads[head](inputs)
        return output


# For each step and each rank, the number of samples and the head of each micro-batch.
_STEPS = (
    (((3, 0), (1, 0)), ((5, 1),)),
    ((), ((2, 0), (4, 0), (1, 0))),
    ((), ()),
    (((1, 0),), ((1, 1), (6, 0))),
)
_TINY = 300  # number of one-sample micro-batches on each rank; in bfloat16, 256 + 1 is 256
_COLLECTIVES = (
    *("all_reduce", "reduce", "broadcast", "broadcast_object_list", "barrier", "all_gather", "all_gather_object"),
    *("all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor", "gather", "gather_object", "scatter"),
    *("all_to_all", "all_to_all_single", "send", "recv"),
)


def _samples(step: int, rank: int) -> list[tuple[torch.Tensor, int]]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return [(3 * torch.randn(samples, 2, generator=generator), head) for samples, head in _STEPS[step][rank]]


def _square(model: nn.Module, inputs: torch.Tensor, head: int) -> torch.Tensor:
    loss: torch.Tensor = (model(inputs, head) - 1).square().sum()
    return loss


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)


def _expected_steps() -> list[tuple[float, torch.Tensor]]:
    """Return the loss and the weights after each step, computed by one process on all samples at once."""
    model = _Heads()
    optimizer, results = _adamw(model), []
    for step in range(len(_STEPS)):
        pairs = [pair for rank in range(2) for pair in _samples(step, rank)]
        if not pairs:
            results.append((math.nan, _vector(model)))
            continue
        loss = sum(_square(model, *pair) for pair in pairs) / sum(len(inputs) for inputs, _ in pairs)
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        results.append((loss.item(), _vector(model)))
    return results


def _run_accumulator(world: World, answer: Answer) -> tuple[list[tuple[Any, torch.Tensor, list[str]]], float]:
    """Return each step's loss, weights and collectives, and the final weight of a small bfloat16 model."""
    model = _Heads()
    optimizer, accumulator, results = _adamw(model), answer(model), []
    for step in range(len(_STEPS)):
        with counted(_COLLECTIVES) as called:
            for pair in _samples(step, world.rank):
                accumulator.backward(_square(model, *pair), len(pair[0]))
            loss = accumulator.step(optimizer, 1.0)
        results.append((loss, _vector(model), called))
    tiny = nn.Linear(1, 1, bias=False).bfloat16()
    nn.init.zeros_(tiny.weight)
    accumulator = answer(tiny)
    for _ in range(_TINY):
        accumulator.backward(tiny(torch.ones(1, 1, dtype=torch.bfloat16)).sum(), 1)
    accumulator.step(torch.optim.SGD(tiny.parameters(), lr=1.0), 10.0)
    return results, float(tiny.weight.detach())


def _test_accumulator(answer: Answer) -> str:
    stuck = "A rank waits forever. Every rank must call the same collectives, even without a micro-batch."
    results = on_ranks(_run_accumulator, 2, answer, stuck=stuck, timeout=60)
    for step, (loss, weights) in enumerate(_expected_steps()):
        per_rank = [len(batches) for batches in _STEPS[step]]
        case = f"Step {step + 1}, with {per_rank[0]} and {per_rank[1]} micro-batches on the two ranks"
        for rank, (of_steps, _) in enumerate(results):
            got, found, called = of_steps[step]
            expect(
                called == ["all_reduce"],
                f"{case}: there must be one all-reduce and no other communication, got {', '.join(called) or 'none'}.",
            )
            expect(isinstance(got, float), f"{case}: step must return a float, got {type(got).__name__}.")
            expect(
                torch.allclose(found, weights, atol=1e-4),
                f"{case}: the weights on rank {rank} must be {numbers(weights, 3)}, got {numbers(found, 3)}. The "
                "last three weights belong to an unused head. A parameter without a gradient on any rank must not "
                "change. Without samples on any rank, no parameter may change. Clip the gradient of the mean loss "
                "over all ranks' samples.",
            )
            expect(
                math.isnan(got) if math.isnan(loss) else abs(got - loss) < 1e-3,
                f"{case}: the mean loss over all samples of all ranks must be {loss:.4f}, got {got:.4f} on rank "
                f"{rank}.",
            )
    for rank, (_, weight) in enumerate(results):
        expect(
            abs(weight + 1) < 0.01,
            f"After {_TINY} bfloat16 micro-batches with gradient 1 and one SGD step with lr=1, the weight must be "
            f"-1, got {weight:.3f} on rank {rank}. Accumulate in float32, because 256 + 1 is 256 in bfloat16.",
        )
    return "One all-reduce per step is enough, for any distribution of the micro-batches over the ranks."


class _Accumulator:
    def __init__(self, model: nn.Module) -> None:
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.clear()

    def clear(self) -> None:
        self.sums = [torch.zeros(parameter.shape) for parameter in self.parameters]  # float32
        self.used = torch.zeros(len(self.sums))
        self.loss_and_count = torch.zeros(2)

    def backward(self, loss: torch.Tensor, count: int) -> None:
        loss.backward()
        self.loss_and_count += torch.tensor([loss.item(), count])
        for number, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                self.sums[number] += parameter.grad
                self.used[number] = 1
                parameter.grad = None

    def step(self, optimizer: torch.optim.Optimizer, max_norm: float) -> float:
        pieces = [*self.sums, self.used, self.loss_and_count]
        buffer = torch.cat([piece.flatten() for piece in pieces])
        dist.all_reduce(buffer)
        *sums, used, (loss, count) = buffer.split([piece.numel() for piece in pieces])
        self.clear()
        if count == 0:
            return math.nan
        for parameter, total, users in zip(self.parameters, sums, used, strict=True):
            parameter.grad = (total / count).view_as(parameter).to(parameter.dtype) if users else None
        nn.utils.clip_grad_norm_(self.parameters, max_norm)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss / count)


class _CountsFirst(_Accumulator):
    def step(self, optimizer: torch.optim.Optimizer, max_norm: float) -> float:
        dist.all_reduce(self.loss_and_count)
        self.loss_and_count /= dist.get_world_size()
        return super().step(optimizer, max_norm)


class _MeanOfRanks(_Accumulator):
    def step(self, optimizer: torch.optim.Optimizer, max_norm: float) -> float:
        count = self.loss_and_count[1].item()
        for total in chain(self.sums, [self.loss_and_count]):
            total.div_(max(count, 1))
        return super().step(optimizer, max_norm)


class _KeepsDtype(_Accumulator):
    def clear(self) -> None:
        super().clear()
        self.sums = [torch.zeros_like(parameter) for parameter in self.parameters]


class _ZerosForUnused(_Accumulator):
    def step(self, optimizer: torch.optim.Optimizer, max_norm: float) -> float:
        self.used.fill_(1)
        return super().step(optimizer, max_norm)


class _StepsWithoutSamples(_Accumulator):
    def step(self, optimizer: torch.optim.Optimizer, max_norm: float) -> float:
        self.loss_and_count[1] += 1e-9
        return super().step(optimizer, max_norm)


class _OwnLoss(_Accumulator):
    def step(self, optimizer: torch.optim.Optimizer, max_norm: float) -> float:
        loss, count = self.loss_and_count.tolist()
        super().step(optimizer, max_norm)
        return loss / count if count else math.nan


class _ClipsItsPart(_Accumulator):
    def step(self, optimizer: torch.optim.Optimizer, max_norm: float) -> float:
        norm = torch.cat([total.flatten() for total in self.sums]).norm()
        for total in self.sums:
            total.mul_(min(1.0, max_norm / (float(norm) + 1e-6)))
        return super().step(optimizer, max_norm)


class _NeverClears(_Accumulator):
    def clear(self) -> None:
        if not hasattr(self, "sums"):
            super().clear()


accumulator = Exercise(
    task=(
        "Write a class with __init__(model), backward(loss, count) for each micro-batch, and step(optimizer, "
        "max_norm). step performs one all-reduce, and returns the mean loss over all samples of all ranks."
    ),
    test=_test_accumulator,
    solution=_Accumulator,
    wrong={
        "reduces the counts separately": _CountsFirst,
        "takes the mean of the ranks' means": _MeanOfRanks,
        "accumulates in the parameter's dtype": _KeepsDtype,
        "gives unused parameters a gradient of zeros": _ZerosForUnused,
        "takes a step without samples": _StepsWithoutSamples,
        "returns the rank's own loss": _OwnLoss,
        "clips each rank's part": _ClipsItsPart,
        "adds to the sums of the previous step": _NeverClears,
    },
    hints=(
        "Accumulating a sum does not require the count. Accumulate the gradients of the loss sums, and divide "
        "by the count after the all-reduce.",
        "One flat float32 buffer can hold all values that are summed over the ranks: the gradients, the loss, the "
        "count, and a flag for each parameter, which is nonzero if this rank has used the parameter.",
        "torch.cat([piece.flatten() for piece in pieces]) packs the buffer, and buffer.split([piece.numel() for "
        "piece in pieces]) unpacks it. Set .grad to None for parameters that no rank has used.",
        "After each backward pass, add .grad to a float32 tensor, and then set .grad to None.",
    ),
)
