"""Models and training histories as data, and the ways to train them: plain torch, data parallelism, ZeRO.

A `History` is a small model and a list of events, such as "wrap", "backward", "step" and "freeze". `replay` executes
the events on an *arm* and yields what can be observed: gradients before each optimizer step, weights after it, and
outputs of evaluations. The arm `Plain` is one process with plain torch on the union of all ranks' samples. Every other
arm is one rank of a distributed run, and must show that rank's part of the same tensors.
"""

import copy
import io
import json
import pickle
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from ddp_tutorial.collectives import digest
from ddp_tutorial.ddp.buckets import MIB
from ddp_tutorial.ddp.config import DDPConfig
from ddp_tutorial.ddp.sync_bn import synchronize_batch_norm
from ddp_tutorial.ddp.wrappers import data_parallel
from ddp_tutorial.processes.errors import RankError
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.world import World
from ddp_tutorial.zero.fsdp import FSDPStrategy
from ddp_tutorial.zero.gradients import ShardedGradients
from ddp_tutorial.zero.model import ShardedModel
from ddp_tutorial.zero.optimizer import ShardedOptimizer
from ddp_tutorial.zero.pieces import piece_of
from ranks import error_of

WIDTH = 6
COLLECTIVE_TIMEOUT = 20.0  # seconds that a rank waits for a rank that has raised an error
INVALID = "invalid"
Tensors = Mapping[str, torch.Tensor | None]
Trace = list[tuple[str, Tensors]]

# ------------------------------------------------------------------------------------------------------- the models


@dataclass
class Answer:
    """The output of a block or a model that returns a dataclass."""

    value: torch.Tensor
    name: str = "answer"


WRAPPED: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda value: value,
    "tuple": lambda value: (value, None),
    "dict": lambda value: {"value": value},
    "dataclass": Answer,
}


def unwrapped(output: Any) -> torch.Tensor:
    if isinstance(output, Answer):
        return output.value
    if isinstance(output, dict):
        return output["value"]
    return output[0] if isinstance(output, tuple) else output


@dataclass(frozen=True)
class Block:
    """A residual block with its layer, its dtype, the samples that use it, and the type of its output."""

    kind: str
    dtype: str = "float64"
    used: str = "always"
    returns: str = "tensor"


class EvalBatchNorm(nn.BatchNorm1d):
    """BatchNorm that stays in evaluation mode, as in fine-tuning."""

    def train(self, mode: bool = True) -> "EvalBatchNorm":
        return super().train(False)


class Layers(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).tanh())


class Tied(Layers):
    """Two linear layers that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.down.weight = self.up.weight


def call(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x)


class Twice(nn.Module):
    """A layer that is used twice in a forward pass."""

    def __init__(self, call: Callable[..., torch.Tensor] = call) -> None:
        super().__init__()
        self.layer, self.call = Layers(), call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self.layer, self.call(self.layer, x))


class Once(Twice):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self.layer, x)


class Conv(nn.Module):
    """A convolution whose weight has the memory format channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.view(-1, 2, 3, 1)).tanh().reshape(len(x), -1)


class Raw(nn.Module):
    """A parameter [WIDTH, 5] in some memory layout, used as two matrices."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).tanh() @ self.weight.t()


class Views(nn.Module):
    """Two parameters that are views of one tensor, as in an RNN with flattened weights."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        both = torch.randn(2, WIDTH, WIDTH, dtype=dtype)
        self.first, self.second = nn.Parameter(both[0]), nn.Parameter(both[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.first).tanh() @ self.second


class Scale(nn.Module):
    """A parameter with one element or no element."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh() * (self.weight.sum() + 0.5)


class Complex(nn.Module):
    """A complex parameter."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        kind = torch.complex128 if dtype == torch.float64 else torch.complex64
        self.weight = nn.Parameter(torch.randn(WIDTH, dtype=kind))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = x.tanh() * self.weight
        return (turned.real + 0.5 * turned.imag).to(x.dtype)


reentrant, recompute = partial(checkpoint, use_reentrant=True), partial(checkpoint, use_reentrant=False)

KINDS: dict[str, Callable[[torch.dtype], nn.Module]] = {
    "linear": lambda dtype: Layers().to(dtype),
    "layer norm": lambda dtype: nn.LayerNorm(WIDTH).to(dtype),
    "batch norm in eval": lambda dtype: EvalBatchNorm(WIDTH).to(dtype).eval(),
    "sync batch norm": lambda dtype: nn.BatchNorm1d(WIDTH).to(dtype),
    "sync batch norm without statistics": lambda dtype: nn.BatchNorm1d(WIDTH, track_running_stats=False).to(dtype),
    "channels_last": lambda dtype: Conv().to(dtype),
    "embedding": lambda dtype: nn.Embedding(3, WIDTH, dtype=dtype),
    "tied": lambda dtype: Tied().to(dtype),
    "layer used twice": lambda dtype: Twice().to(dtype),
    "reentrant checkpoint": lambda dtype: Once(reentrant).to(dtype),
    "layer in two reentrant checkpoints": lambda dtype: Twice(reentrant).to(dtype),
    "checkpoint": lambda dtype: Once(recompute).to(dtype),
    "layer in two checkpoints": lambda dtype: Twice(recompute).to(dtype),
    "transposed": lambda dtype: Raw(torch.randn(5, WIDTH, dtype=dtype).t()),
    "strided": lambda dtype: Raw(torch.randn(WIDTH, 10, dtype=dtype)[:, ::2]),
    "views of one tensor": Views,
    "one number": lambda dtype: Scale(torch.randn((), dtype=dtype)),
    "no number": lambda dtype: Scale(torch.zeros(0, dtype=dtype)),
    "complex": Complex,
}


class Residual(nn.Module):
    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block, self.dtype = block, getattr(torch, block.dtype)
        self.layer = KINDS[block.kind](self.dtype)

    def forward(self, x: torch.Tensor, ranks: torch.Tensor, ids: torch.Tensor) -> Any:
        here = torch.ones_like(ranks) if self.block.used == "always" else ranks == 0
        if self.block.used != "never" and bool(here.any()):
            y = self.layer(ids if self.block.kind == "embedding" else x.to(self.dtype))
            x = x + torch.where(here[:, None].bool(), y.to(x.dtype), 0)
        return WRAPPED[self.block.returns](x)


class PlannedError(Exception):
    """An error that a history raises in the middle of a forward or backward pass, and catches."""


class FailInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise PlannedError("planned, in backward")


class Model(nn.Module):
    """Blocks between two linear layers. `fails` names the pass in which the next call fails, between its blocks."""

    fails = ""

    def __init__(self, blocks: Sequence[Block], returns: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, 2).double()
        self.blocks = nn.ModuleList(map(Residual, blocks))
        self.returns = returns

    def forward(self, x: torch.Tensor, ranks: torch.Tensor, ids: torch.Tensor) -> Any:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            if number == len(self.blocks) // 2:
                x = self._failing(x)
            x = unwrapped(block(x, ranks, ids))
        return WRAPPED[self.returns](self.last(x))

    def _failing(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails == "forward":
            raise PlannedError("planned, in forward")
        return FailInBackward.apply(x) if self.fails == "backward" else x


# ---------------------------------------------------------------------------------------------------- the histories


@dataclass(frozen=True)
class History:
    """A model, the settings of its training, and the events of the training, in order."""

    blocks: tuple[Block, ...]
    events: tuple[str, ...]
    returns: str = "tensor"
    optimizer: str = "sgd"
    find_unused: bool = False
    bucket_bytes: int = 300

    def features(self) -> set[str]:
        """Return the features to which the table of rejections can refer."""
        blocks = {each for block in self.blocks for each in (block.kind, block.dtype, f"used {block.used}")}
        options = {self.optimizer, "find_unused"} if self.find_unused else {self.optimizer}
        outputs = {f"block returns {block.returns}" for block in self.blocks} | {f"model returns {self.returns}"}
        reentrant = any("reentrant" in block.kind for block in self.blocks)
        both = {"reentrant and find_unused"} if reentrant and self.find_unused else set()
        events = self._events()
        if "two losses" in events and "used on rank 0" in blocks:
            both.add("two losses and used on rank 0")
        return blocks | options | outputs | both | events

    def _events(self) -> set[str]:
        """Yield each event, its position relative to the wrapping, and the combined effect of the events of a step."""
        wrapped = self.events.index("wrap")
        before, after = set(self.events[:wrapped]), set(self.events[wrapped + 1 :])
        features = before | after | {f"{each} before wrapping" for each in before}
        features |= {f"{each} after wrapping" for each in after}
        synced = total = 0
        stepped = reduced = False
        for event in self.events[wrapped:]:
            if stepped and event.endswith(("backward", "two losses")):
                features.add("gradients not zeroed")
            if reduced and "zero_grad" in event:
                features.add("gradients dropped")
            stepped = event in STEPS or (stepped and "zero_grad" not in event)
            reduced = event in {"backward", "no_sync backward", "two losses"} or (reduced and event not in STEPS)
            synced = 0 if event in STEPS else synced + event.startswith(("backward", "two losses"))
            total = 0 if event in STEPS else total + event.endswith(("backward", "two losses"))
            features |= {"backward without no_sync before another"} if synced > 1 or event == "two losses" else set()
            features |= {"several backwards in a step"} if total > 1 else set()
        return features

    def is_valid(self) -> bool:
        """Return whether each step follows a backward pass of the wrapped model, and the history ends with a step."""
        if "wrap" not in self.events or self.events[-1] not in STEPS or not self.blocks:
            return False
        pending = wrapped = False
        for event in self.events:
            if event in STEPS and not (pending and wrapped):
                return False
            if not wrapped and (event in NEED_WRAPPING or event.startswith("zero_grad")):
                return False
            wrapped = wrapped or event == "wrap"
            dropped = event in {*STEPS, "wrap", "rewrap"} or "zero_grad" in event
            pending = event in {"backward", "two losses"} or (pending and not dropped)
        return True

    def smaller(self) -> Iterator["History"]:
        """Yield simpler histories: without one event, block or option."""
        for number in range(len(self.events)):
            yield replace(self, events=self.events[:number] + self.events[number + 1 :])
        for number, block in enumerate(self.blocks):
            yield replace(self, blocks=self.blocks[:number] + self.blocks[number + 1 :])
            for simpler in (
                Block("linear", block.dtype, block.used, block.returns),
                replace(block, dtype="float64"),
                replace(block, used="always"),
                replace(block, returns="tensor"),
            ):
                yield replace(self, blocks=(*self.blocks[:number], simpler, *self.blocks[number + 1 :]))
        yield replace(self, returns="tensor")
        yield replace(self, optimizer="sgd")
        yield replace(self, find_unused=False)


STEPS = ("step", "step with scaled gradients")
NEED_WRAPPING = ("rewrap", "no_sync backward", *STEPS)
ZEROED = ("zero_grad to None", "zero_grad to zero", "module.zero_grad to None", "module.zero_grad to zero")
HOOKS = ("gradient hook", "tensor hook")
RARE = (*HOOKS, "freeze", "unfreeze", "evaluate", "inference", "copy")


class Draw(random.Random):
    """A generator of random histories, the same for the same seed."""

    def sometimes(self, probability: float, *events: str) -> list[str]:
        """Return one of the events, or none."""
        return [self.choice(events)] if self.random() < probability else []

    def history(self, kind: str) -> History:
        """Return a history whose first block is of this kind."""
        kinds = [kind, *self.choices(list(KINDS), k=self.choice([0, 1, 1, 2]))]
        # A BatchNorm cancels most of the gradient of a bias before it, which leaves rounding errors in 16 bits.
        small = ["float32"] if any("sync" in each for each in kinds) else ["float32", "bfloat16"]
        blocks = tuple(self.block(each, [*["float64"] * 4, *small]) for each in kinds)
        events = (*self.start(), *(event for number in range(self.choice([2, 3])) for event in self.step(number)))
        return History(
            blocks,
            events,
            self.choice(list(WRAPPED)),
            self.choice([each for each in OPTIMIZERS if each not in WHOLE]),
            any(block.used != "always" for block in blocks) or "freeze" in events or self.random() < 0.3,
            self.choice([1, 300, 25 * MIB]),
        )

    def block(self, kind: str, dtypes: Sequence[str]) -> Block:
        """Return a block of this kind.

        All ranks use the block if its forward pass is collective, or if a backward pass may reject it: an error on one
        rank would make the other ranks wait.
        """
        used = ["always"] if "sync" in kind or "reentrant" in kind else [*["always"] * 4, "never", "on rank 0"]
        return Block(kind, self.choice(dtypes), self.choice(used), self.choice(list(WRAPPED)))

    def start(self) -> list[str]:
        """Return the events before the wrapping, and the wrapping."""
        before = self.sometimes(0.4, *HOOKS, "freeze", "backward")
        if before == ["backward"]:
            before += self.sometimes(0.7, "module.zero_grad to None", "module.zero_grad to zero")
        return [*before, "wrap", *self.sometimes(0.1, "wrap")]

    def step(self, number: int) -> list[str]:
        """Return the events of one optimizer step."""
        events = [*self.sometimes(0.9, *ZEROED), *self.sometimes(0.1, "rewrap")] if number else []
        events += self.sometimes(0.3, *RARE) + self.sometimes(0.3, *RARE)
        if dropped := self.sometimes(0.3, "failing forward", "failing backward", "no_sync backward"):
            events += [*dropped, self.choice(ZEROED)]
        events += ["no_sync backward"] * self.choice([0, 0, 0, 1, 2])
        events += self.choice([*[["backward"]] * 8, ["two losses"], ["backward", "backward"]])
        return [*events, *self.sometimes(0.2, "evaluate on rank 0"), self.choice(["step", *STEPS])]


# ---------------------------------------------------------------------------------------------------------- the arms

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.02, eps=1e-3),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.02, eps=1e-3),
    "lbfgs": lambda parameters: torch.optim.LBFGS(list(parameters), lr=0.05, max_iter=1),
}
# An optimizer that treats all parameters as one vector. Its `step` requires a closure and contiguous gradients.
WHOLE = {"lbfgs"}


class Plain:
    """One process with plain torch and the samples of all ranks in one batch."""

    times = 1.0  # the factor of the loss: the world size where gradients are averaged, 1 where they are summed
    shares = 1  # the ranks whose gradients are summed without being averaged

    def __init__(self, history: History, world: World) -> None:
        self.history, self.world = history, world
        torch.manual_seed(0)
        self.module = Model(history.blocks, history.returns)
        self.made: list[Any] = []  # wrappers to keep alive

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks whose samples this arm computes."""
        return range(self.world.size)

    def wrap(self) -> None:
        self.optimizer = OPTIMIZERS[self.history.optimizer](self.parameters())

    def unwrap(self) -> None:
        """Release all wrappers."""
        self.made.clear()
        self.model: Any = None

    def parameters(self) -> list[nn.Parameter]:
        return list(self.module.parameters())

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        return unwrapped(self.module(*batch))

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def after_backward(self) -> None: ...

    def finish(self) -> None: ...

    def step(self, loss: torch.Tensor) -> None:
        self.optimizer.step(*([lambda: loss] if self.history.optimizer in WHOLE else []))

    def evaluated(self, *batch: torch.Tensor) -> torch.Tensor | None:
        """Return the output of the raw model."""
        return unwrapped(self.module(*batch))

    def evaluates_alone(self) -> bool:
        return True

    def gradients(self) -> dict[str, torch.Tensor | None]:
        return {name: parameter.grad for name, parameter in self.module.named_parameters()}

    def stepped(self) -> list[torch.Tensor]:
        """Return the parameters of the optimizer."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def weights(self) -> dict[str, torch.Tensor]:
        return self.module.state_dict()

    @contextmanager
    def whole(self) -> Iterator[nn.Module]:
        yield self.module

    def mine(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Return this arm's part of a gradient."""
        return gradient


class Replicated(Plain):
    """Data parallelism with these options of `DDPConfig`."""

    def __init__(self, history: History, world: World, **options: Any) -> None:
        super().__init__(history, world)
        self.times, self.options = float(world.size), options or {"variant": "bucket"}
        if self.options["variant"] in {"bucket", "torch"}:
            self.options["bucket_cap_mb"] = history.bucket_bytes / MIB
        if history.find_unused:
            self.options["find_unused_parameters"] = True
        for residual in self.module.blocks:
            if residual.block.kind.startswith("sync"):
                residual.layer = synchronize_batch_norm(residual.layer, world)

    @property
    def ranks(self) -> Sequence[int]:
        return [self.world.rank]

    def wrap(self) -> None:
        self.model = data_parallel(self.module, self.world, DDPConfig(**self.options))
        self.made.append(self.model)
        super().wrap()

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        return unwrapped(self.model(*batch)) if self.made else super().forward(*batch)

    def no_sync(self) -> AbstractContextManager[None]:
        return self.model.no_sync()

    def finish(self) -> None:
        self.model.finish()

    def evaluates_alone(self) -> bool:
        return self.world.is_main


class Zero1(Replicated):
    def wrap(self) -> None:
        super().wrap()
        self.optimizer = ShardedOptimizer(self.optimizer, self.world)


class Zero2(Replicated):
    def __init__(self, history: History, world: World) -> None:
        super().__init__(history, world)
        self.times, self.shares = 1.0, world.size

    def wrap(self) -> None:
        self.model = ShardedGradients(self.module, self.world, bucket_cap_mb=self.history.bucket_bytes / MIB)
        self.made.append(self.model)
        Plain.wrap(self)

    def parameters(self) -> list[nn.Parameter]:
        pieces = self.model.pieces
        return [pieces.get(parameter, parameter) for parameter in self.module.parameters()]

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        return Plain.forward(self, *batch)

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def after_backward(self) -> None:
        if self.made:
            self.model.reduce()

    def step(self, loss: torch.Tensor) -> None:
        super().step(loss)
        self.model.gather()

    def gradients(self) -> dict[str, torch.Tensor | None]:
        named = self.module.named_parameters()
        return {name: self.model.pieces[p].grad if p in self.model.pieces else p.grad for name, p in named}

    def mine(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is None:
            return None
        part = gradient.reshape(-1)[piece_of(gradient.numel(), self.world.rank, self.world.size)]
        return part if len(part) else None


class Zero3(Zero2):
    def wrap(self) -> None:
        self.model = ShardedModel(self.module, self.world)
        self.made.append(self.model)
        Plain.wrap(self)

    def parameters(self) -> list[nn.Parameter]:
        return list(self.module.parameters())

    def step(self, loss: torch.Tensor) -> None:
        Plain.step(self, loss)

    def evaluates_alone(self) -> bool:
        return True

    def gradients(self) -> dict[str, torch.Tensor | None]:
        return {name: parameter.grad for name, parameter in self.module.named_parameters()}

    def weights(self) -> dict[str, torch.Tensor]:
        with self.whole() as module:
            return {name: tensor.clone() for name, tensor in module.state_dict().items()}

    @contextmanager
    def whole(self) -> Iterator[nn.Module]:
        with self.model.full_parameters() as module:
            yield module


class FSDP(Zero3):
    """torch's `fully_shard`, by the package's strategy. It averages gradients."""

    def __init__(self, history: History, world: World) -> None:
        super().__init__(history, world)
        self.times, self.shares = float(world.size), 1

    def wrap(self) -> None:
        self.model = FSDPStrategy(self.module, self.world, lambda model, batch: (model, batch))
        Plain.wrap(self)
        self.optimizer = self.model.setup_optimizer(self.optimizer)
        self.made.append(self.model)
        self.rows = dict(self.module.named_parameters())  # a forward pass may leave whole parameters in the module

    def finish(self) -> None:
        self.model.assign_gradients()

    def gradients(self) -> dict[str, torch.Tensor | None]:
        return {name: full(rows.grad) for name, rows in self.rows.items()}

    def mine(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        return gradient


def full(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


ARMS: dict[str, Callable[[History, World], Plain]] = {
    "naive": partial(Replicated, variant="naive"),
    "flat": partial(Replicated, variant="flat"),
    "bucket": partial(Replicated, variant="bucket"),
    "torch": partial(Replicated, variant="torch"),
    "torch, shared memory": partial(Replicated, variant="torch", shared_memory=True),
    "zero1": Zero1,
    "zero2": Zero2,
    "zero3": Zero3,
    "fsdp": FSDP,
}

# ---------------------------------------------------------------------------------------------------------- replay


def samples(moment: int, ranks: Sequence[int]) -> list[torch.Tensor]:
    """Return inputs, the ranks that they belong to, ids for embeddings, and targets.

    Ranks have different numbers of samples.
    """
    parts = []
    for rank in ranks:
        count = count_of(moment, rank)
        generator = torch.Generator().manual_seed(1000 * moment + rank)
        x, y = torch.randn(2, count, WIDTH, dtype=torch.float64, generator=generator)
        # Targets far from the outputs: gradients of samples that cancel would leave rounding errors only.
        parts.append((x, torch.full((count,), rank), torch.arange(count) % 2, y[:, :2] + 3))
    return [torch.cat(part) for part in zip(*parts, strict=True)]


def count_of(moment: int, rank: int) -> int:
    return 2 + (3 * moment + 5 * rank) % 4


def replay(arm: Plain) -> Iterator[tuple[str, Tensors]]:
    """Execute the history's events on the arm. Yield a description and the tensors of each observation."""
    loss = torch.zeros(())
    for moment, event in enumerate(arm.history.events):
        at = f"event {moment}, {event!r}"
        if event in {"wrap", "rewrap"}:
            if event == "rewrap":
                arm.unwrap()
            arm.wrap()
        elif event in {"backward", "no_sync backward", "two losses"}:
            with arm.no_sync() if event == "no_sync backward" else nullcontext():
                loss = backward(arm, moment, twice=event == "two losses")
                arm.after_backward()
        elif event.startswith("failing"):
            with failing(arm.module, event.split()[1]):
                backward(arm, moment)
        elif event in STEPS:
            arm.finish()
            if event == "step with scaled gradients":
                scale_gradients(arm.stepped())
            yield f"{at}: gradient", {name: copied(each) for name, each in arm.gradients().items()}
            arm.step(loss)
            yield f"{at}: weights", {name: copied(each) for name, each in arm.weights().items()}
        elif "zero_grad" in event:
            zeroed = arm.module if event.startswith("module") else arm.optimizer
            zeroed.zero_grad(set_to_none=event.endswith("None"))
        elif event in {"freeze", "unfreeze"}:
            arm.module.blocks[0].requires_grad_(event == "unfreeze")
        elif event in HOOKS:
            add_hooks(arm, event)
        else:
            yield f"{at}: output", {"output": evaluate(arm, event, moment)}


def backward(arm: Plain, moment: int, *, twice: bool = False) -> torch.Tensor:
    """Compute the gradient of the mean over all ranks' samples. Return the loss, or this rank's part of it."""
    *inputs, y = samples(moment, arm.ranks)
    count = sum(count_of(moment, rank) for rank in range(arm.world.size))
    errors = (arm.forward(*inputs) - y).square().sum(0) * (arm.times / count)
    if twice:
        errors[0].backward(retain_graph=True)
        errors[1].backward()
    else:
        errors.sum().backward()
    return errors.detach().sum()


@contextmanager
def failing(module: Model, where: str) -> Iterator[None]:
    module.fails = where
    try:
        yield
    except PlannedError:
        pass
    else:
        raise AssertionError("the planned error was not raised")
    finally:
        module.fails = ""


def scale_gradients(parameters: Sequence[torch.Tensor]) -> None:
    """Replace each gradient by a new tensor."""
    for parameter in parameters:
        parameter.grad = None if parameter.grad is None else parameter.grad * 0.5


def add_hooks(arm: Plain, event: str) -> None:
    """Register hooks that change each gradient. A part of a sum gets the same part of the added constant."""
    constant = 0.01 / arm.shares
    for residual in arm.module.blocks:
        for parameter in residual.parameters() if residual.block.used == "always" else ():
            if parameter.requires_grad and event == "gradient hook":
                parameter.register_post_accumulate_grad_hook(lambda p: (p.grad.add_(constant), None)[1])
            elif parameter.requires_grad:
                parameter.register_hook(lambda gradient: 0.5 * gradient + constant)


def evaluate(arm: Plain, event: str, moment: int) -> torch.Tensor | None:
    """Return the output of the raw model in evaluation mode; None on a rank that does not compute."""
    modes = {each: each.training for each in arm.module.modules()}
    inputs = samples(moment, [0])[:-1]
    arm.module.eval()
    try:
        with torch.inference_mode() if event == "inference" else torch.no_grad():
            if event == "copy":
                return evaluate_copies(arm, inputs)
            if event == "evaluate on rank 0" and not arm.evaluates_alone():
                return None
            return arm.evaluated(*inputs)
    finally:
        for each, mode in modes.items():
            each.training = mode


def evaluate_copies(arm: Plain, inputs: list[torch.Tensor]) -> torch.Tensor:
    """Return the output of a deep copy that was saved and loaded.

    A backward pass of the copy must not affect the model.
    """
    with arm.whole() as module:
        file = io.BytesIO()
        torch.save(copy.deepcopy(module), file)
    file.seek(0)
    copied_module = torch.load(file, weights_only=False).eval()
    with torch.enable_grad():
        output = unwrapped(copied_module(*inputs))
        output.sum().backward()
    return output.detach()


def copied(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().clone()


# ------------------------------------------------------------------------------------------------------- comparisons

# For another order of summation, and for rounding to 16 bits. A gradient that is 2 % too small is off by 0.02.
TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 0.015}
FLOOR = 1e-2  # the tolerance is absolute for a tensor whose norm is smaller


def difference(found: torch.Tensor | None, expected: torch.Tensor | None, tolerance: float) -> str:
    """Describe how `found` differs from `expected`; empty if it does not."""
    if found is None or expected is None:
        return "" if found is expected else f"is {'None' if found is None else 'not None'}, unlike in one process"
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"has {found.dtype} {list(found.shape)}, expected {expected.dtype} {list(expected.shape)}"
    kind = torch.complex128 if found.is_complex() else torch.float64
    apart, size = float((found.to(kind) - expected.to(kind)).norm()), float(expected.to(kind).norm())
    return "" if apart <= tolerance * max(size, FLOOR) else f"is off by {apart / max(size, FLOOR):.2g} of its norm"


def by_one_process(history: History, world: World) -> Trace | str:
    """Return the observations of plain torch, or the error that it raises."""
    trace: Trace = []
    raised = error_of(lambda: trace.extend(replay(Plain(history, world))))
    return trace if raised == "no error" else raised


def outcome(name: str, history: History, world: World, expected: Trace | str) -> str:
    """The first difference between an arm's observations and those of one process, or the error; otherwise "equal",
    with a digest of the last weights. A history with which plain torch raises an error is invalid.

    A difference does not end the replay, because the other ranks may see none.
    """
    if isinstance(expected, str):
        return f"{INVALID}: plain torch raises {expected}"
    differences = []
    last: dict[str, Any] = {}

    def run() -> None:
        arm = ARMS[name](history, world)
        for (what, found), (_, wanted) in zip(replay(arm), expected, strict=True):
            differences.extend(compare(arm, what, found, wanted))
            last.update(found if what.endswith("weights") else {})

    raised = error_of(run)
    if raised != "no error":
        return f"raises {raised}" + (f"; before that, {differences[0]}" if differences else "")
    return f"differs: {differences[0]}" if differences else f"equal, {digest(last)[:16]}"


def compare(arm: Plain, what: str, found: Tensors, expected: Tensors) -> Iterator[str]:
    """Describe each difference between this arm's tensors and those of one process."""
    tolerance = max(TOLERANCES[block.dtype] for block in arm.history.blocks)
    for name, tensor in expected.items():
        wanted = arm.mine(tensor) if what.endswith("gradient") else tensor
        if what.endswith("output") and found[name] is None:
            continue  # this rank did not evaluate
        if told := difference(found[name], wanted, tolerance):
            yield f"{what} of {name!r} {told}"


class Group:
    """The process group of the ranks, created again after an error, and a store for comparing outcomes."""

    def __init__(self, world: World, file: str) -> None:
        self.world, self.made = world, 0
        self.store = dist.FileStore(file, world.size)
        self.store.set_timeout(timedelta(seconds=3 * COLLECTIVE_TIMEOUT))

    def gather(self, name: str, mine: str) -> list[str]:
        """Return every rank's text without using the process group, which may be out of step."""
        self.store.set(f"{name} {self.world.rank}", pickle.dumps(mine))
        return [pickle.loads(self.store.get(f"{name} {rank}")) for rank in range(self.world.size)]

    def renew(self) -> None:
        self.made += 1
        dist.destroy_process_group()
        store = dist.PrefixStore(f"group {self.made}", self.store)
        size, rank = self.world.size, self.world.rank
        dist.init_process_group("gloo", store=store, world_size=size, rank=rank, timeout=self.world.timeout)


def record_outcomes(world: World, cases: Sequence[tuple[str, History]], folder: str) -> None:
    """Append every rank's outcome of each case, an arm and a history, to a file of JSON lines. Collective."""
    group = Group(world, f"{folder}/store")
    expected: dict[History, Trace | str] = {}
    for number, (name, history) in enumerate(cases):
        if history not in expected:
            expected = {history: by_one_process(history, world)}
        ranks = group.gather(str(number), outcome(name, history, world, expected[history]))
        if world.is_main:
            with Path(folder, "outcomes").open("a") as file:
                file.write(json.dumps(ranks) + "\n")
        if not all(each.startswith("equal") for each in ranks):
            group.renew()


def run(cases: Sequence[tuple[str, History]], size: int, timeout: float = 550) -> list[list[str]]:
    """Return every rank's outcome of each case on `size` ranks. If a rank dies, this is the outcome of its case."""
    found: list[list[str]] = []
    while len(found) < len(cases):
        with TemporaryDirectory() as folder:
            error = None
            options = {
                "device": "cpu",
                "threads": 1,
                "echo": False,
                "collective_timeout": COLLECTIVE_TIMEOUT,
                "timeout": timeout,
            }
            try:
                launch(record_outcomes, size, cases[len(found) :], folder, **options)
            except RankError as failed:
                error = failed
            if Path(folder, "outcomes").exists():
                found += map(json.loads, Path(folder, "outcomes").read_text().splitlines())
        if error is not None:
            found.append([f"ends the ranks: {str(error).splitlines()[0]}"] * size)
    return found
