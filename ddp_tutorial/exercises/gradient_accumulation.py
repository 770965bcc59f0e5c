"""Exercises of 08_gradient_accumulation: the last micro-batch, an epoch of ragged steps, and unknown counts."""

import math
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_tutorial.exercises import Answer, Exercise, expect, numbers, on_ranks
from ddp_tutorial.world import World

# ------------------------------------------------------------------------------------------- 1. the last of an iterator

_COUNTS = (3, 1, 0, 5)


class _Loader:
    """An iterator of tensors that counts how many it has returned."""

    def __init__(self, batches: list[torch.Tensor]) -> None:
        self.batches, self.returned = batches, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self

    def __next__(self) -> torch.Tensor:
        if self.returned == len(self.batches):
            raise StopIteration
        self.returned += 1
        return self.batches[self.returned - 1]


def _counted(calls: list[int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Run torch's own all-reduce, and count the calls."""
    calls.append(1)
    return allreduce_hook(None, bucket)  # type: ignore[arg-type]  # None: the default group


def _linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def _loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().sum()
    return loss


def _run_synchronize_last(world: World, answer: Answer) -> tuple[list[dict[str, Any]], int]:
    """Return one record for each number of micro-batches, and the number of all-reduces after a loop that broke off."""
    records = []
    for count in _COUNTS:
        ddp, calls = DistributedDataParallel(_linear()), []  # type: ignore[var-annotated]
        ddp.register_comm_hook(calls, _counted)
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
    ddp.register_comm_hook(calls, _counted)
    loop = answer(ddp, _Loader([torch.ones(2, 3)] * 4))
    _loss(ddp, next(loop)).backward()
    loop.close()  # as a `break` in the loop does
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
                f"{case}, yield each of them once, in order: expected {len(record['given'])}, got "
                f"{len(record['seen'])}.",
            )
            expect(
                record["ahead"] <= 1,
                f"{case}, you read {record['ahead']} micro-batches ahead of the loop. All of them may not fit into "
                "memory: read one ahead.",
            )
            expect(
                record["calls"] == min(count, 1),
                f"{case}, there must be {min(count, 1)} all-reduce, got {record['calls']}: the loop must run the last "
                "micro-batch, and no other, outside no_sync().",
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
                    f"{case}, there was one all-reduce, but the gradient misses some micro-batches: synchronize in the "
                    "last one.",
                )
    expect(
        all(calls for _, calls in results),
        "A loop that breaks off early leaves DDP without synchronization: the next backward pass sent nothing. Leave "
        "no_sync() when the generator is closed, which `with` does.",
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
        "synchronize_last(ddp, batches): yield the micro-batches of an iterator of unknown length, so that DDP "
        "synchronizes in the last one only."
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
        "A micro-batch is not the last one if you can read another one. So read one ahead, and yield the one before.",
        "While a generator waits at `yield`, the loop body runs. A `with ddp.no_sync():` around the `yield` is active "
        "in the body.",
    ),
)

# ---------------------------------------------------------------------------------------- 2. an epoch of ragged batches

_CASES = ((4, 2), (5, 2), (3, 4), (7, 3), (2, 1))  # micro-batches of the loader, and micro-batches per step
_VOCAB, _CLIP = 11, 0.5
Pair = tuple[torch.Tensor, torch.Tensor]


class _Letters(nn.Module):
    """A model that records the number of samples of each forward pass."""

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
    """Return micro-batches of 2 samples with 2 to 12 tokens each."""
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
    """Return the model, the losses and the learning rate of an epoch whose steps compute one batch each."""
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
            f"{case}: the model must see {count} micro-batches of 2 samples, got {model.sizes}. A larger batch does "
            "not fit into memory.",
        )
        expect(
            isinstance(returned, list) and len(returned) == len(losses),
            f"{case}: return a list of {len(losses)} losses, one per optimizer step, got {returned!r}. The remainder "
            "of the loader is a step, too.",
        )
        expect(
            scheduler.get_last_lr()[0] == rate,
            f"{case}: after {len(losses)} optimizer steps, the learning rate must be {rate:g}, got "
            f"{scheduler.get_last_lr()[0]:g}. The schedule counts optimizer steps.",
        )
        for number, (loss, right) in enumerate(zip(returned, losses, strict=True)):
            expect(
                abs(float(loss) - right) < 1e-4,
                f"{case}: the loss of step {number + 1} must be {right:.4f}, the mean over its tokens, got "
                f"{float(loss):.4f}.",
            )
        off = float((_vector(model) - _vector(true)).norm() / _vector(true).norm())
        expect(
            off < 1e-5,
            f"{case}: the losses are right, but the final weights differ by {off:.1%}. Is every token of a step "
            "weighted equally, and is the gradient of the whole step clipped once?",
        )
        clean = all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())
        expect(clean, f"{case}: the last gradient was not cleared. It would leak into the next epoch.")
    return "Every step equals a step on one large batch, and the remainder of the loader is a step of its own."


Loader = Iterable[Pair]


def _train_epoch(model: "nn.Module", optimizer: "Any", scheduler: "Any", loader: "Loader", k: int) -> list[float]:
    loader, losses = iter(loader), []
    while window := list(islice(loader, k)):  # tokens and targets only, which are small
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
        "train_epoch(model, optimizer, scheduler, loader, k): train one epoch with k micro-batches per step, clip at "
        "norm 0.5, and return the mean loss of each step."
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
        "list(islice(loader, k)) with loader = iter(loader) reads up to k micro-batches. The list is empty at the end.",
        "Inputs and targets are small; activations are large. So you may read a whole step, and count its tokens, "
        "before you compute.",
        "F.cross_entropy(..., reduction='sum') divided by the tokens of the step gives every token the same weight. "
        "The sum of these losses is the mean loss of the step.",
    ),
)

# ------------------------------------------------------------------------------------ 3. counts that nobody knows first


class _Heads(nn.Module):
    """Three linear heads. A micro-batch uses one of them, and no micro-batch uses the last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList(nn.Linear(2, 1) for _ in range(3))

    def forward(self, inputs: torch.Tensor, head: int) -> torch.Tensor:
        output: torch.Tensor = self.heads[head](inputs)
        return output


# For each step and rank: the samples and the head of each micro-batch.
_STEPS = (
    (((3, 0), (1, 0)), ((5, 1),)),
    ((), ((2, 0), (4, 0), (1, 0))),
    ((), ()),
    (((1, 0),), ((1, 1), (6, 0))),
)
_TINY = 300  # micro-batches of one sample on each rank; in bfloat16, 256 + 1 is 256
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
    """Return the loss and the weights after each step of one process that computes all samples at once."""
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
    """Return the loss, the weights and the collectives of each step, and the weight of the bfloat16 model."""
    called: list[str] = []
    for name in _COLLECTIVES:
        original = getattr(dist, name)

        def counted(*args: Any, _name: str = name, _original: Any = original, **options: Any) -> Any:
            called.append(_name)
            return _original(*args, **options)

        setattr(dist, name, counted)  # in this rank's process only
    model = _Heads()
    optimizer, accumulator, results = _adamw(model), answer(model), []
    called.clear()
    for step in range(len(_STEPS)):
        for pair in _samples(step, world.rank):
            accumulator.backward(_square(model, *pair), len(pair[0]))
        loss = accumulator.step(optimizer, 1.0)
        results.append((loss, _vector(model), list(called)))
        called.clear()
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
                f"{case}: the weights on rank {rank} must be {numbers(weights, 3)}, got {numbers(found, 3)}. The last "
                "three belong to a head that nothing uses. A parameter without a gradient on any rank must not change, "
                "nor may any if there are no samples. Clip the gradient of the mean, over all ranks.",
            )
            expect(
                math.isnan(got) if math.isnan(loss) else abs(got - loss) < 1e-3,
                f"{case}: the mean loss over all samples of all ranks is {loss:.4f}, got {got:.4f} on rank {rank}.",
            )
    for rank, (_, weight) in enumerate(results):
        expect(
            abs(weight + 1) < 0.01,
            f"{_TINY} micro-batches with the gradient 1, in bfloat16: after one step of SGD with lr=1, the weight must "
            f"be -1, got {weight:.3f} on rank {rank}. Accumulate in float32: in bfloat16, 256 + 1 is 256.",
        )
    return "One all-reduce per step carries everything, however the micro-batches are distributed over the ranks."


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
        "Write a class with __init__(model), backward(loss, count) for each micro-batch, and step(optimizer, max_norm) "
        "with one all-reduce, which returns the mean loss over all samples of all ranks."
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
        "A sum does not need the count. Accumulate the gradients of the loss sums, and divide after the all-reduce.",
        "Everything that is summed over the ranks fits into one flat float32 buffer: the gradients, the loss, the "
        "count, and for each parameter whether this rank has used it.",
        "torch.cat([piece.flatten() for piece in pieces]) packs the buffer, and buffer.split([piece.numel() for piece "
        "in pieces]) unpacks it. Assign .grad = None to parameters that no rank has used.",
        "After each backward pass, move .grad into a float32 tensor and set .grad to None.",
    ),
)
