"""Run one optimizer step of a pipeline. Each rank executes its part of the schedule with sends and receives.

After a forward pass, a rank sends the activation to the rank of the next stage. After a backward pass, the rank sends
the gradient of its input to the rank of the previous stage. The sends and receives are issued in batches
(`batch_isend_irecv`), in the order of `exchanges.slots_of`. Therefore, a schedule that passes `schedules.check` cannot
deadlock with gloo or NCCL. While a rank computes one action, it can receive the message for its next action.

The shape of a message depends only on the micro-batch, which is the same on all ranks of a pipeline. If a step contains
a micro-batch with a new shape or dtype, a header with the shape is sent before each activation. After that step, all
ranks know the shape.

In this project, pipelines have been run only with gloo. For NCCL, the order of the batches is tested in a simulation.

A loss function is called as `loss(model, batch)`. The loss function must call the model once, with inputs from the
batch, and return a sum and a count. On the first stage, the loss function is called only to capture the model's inputs,
and is aborted when it calls the model. On the last stage, the loss function receives a stand-in model that returns the
last stage's output. Other stages do not call the loss function. With a seed, the calls on the first and last stages
draw the same random numbers, for example to add noise to the inputs.
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ddp_tutorial.accumulation.loss import Loss, LossError, Number, call_loss
from ddp_tutorial.accumulation.precision import Precision
from ddp_tutorial.compat import tree_leaves
from ddp_tutorial.phases import phase
from ddp_tutorial.pipeline.exchanges import Transfer, slots_of
from ddp_tutorial.pipeline.schedules import BACKWARD, FORWARD, Action, Table, Timed, dependencies
from ddp_tutorial.pipeline.stages import writable
from ddp_tutorial.rng import seeded_rng

_DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]
_MOST_KEYS = 1000  # text, for example, is different in every micro-batch
_HEADER = 10  # integers: the dtype, the number of dimensions, and their sizes

Like = tuple[torch.Size, torch.dtype]
Parts = dict[str, tuple[Number, Number]]


@dataclass
class _Step:
    """The state of a step in progress on one rank."""

    keys: list[str | None]  # identify the shapes of each micro-batch; None if they must be sent
    parts: list[Parts] = field(default_factory=list)  # one per micro-batch, on the last stage
    live: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = field(default_factory=dict)  # (in, out)
    made: dict[Action, torch.Tensor] = field(default_factory=dict)  # outputs of this rank, until they are used
    sending: list[tuple[dist.Work, torch.Tensor]] = field(default_factory=list)
    receiving: dict[Transfer, tuple[dist.Work, torch.Tensor]] = field(default_factory=dict)


class StageRunner:
    """An executor for one rank's part of a schedule."""

    def __init__(
        self,
        table: Table,
        stages: Mapping[int, nn.Module],
        loss: Loss,
        *,
        peers: Sequence[int] = (0,),
        place: int = 0,
        precision: Precision | None = None,
        seed: int | None = None,
    ) -> None:
        """Store the arguments.

        Args:
            table: The schedule.
            stages: This rank's stages, by stage number.
            loss: The loss function.
            peers: The ranks of the pipeline, in order.
            place: The position of this rank in `peers`.
            precision: The mixed-precision settings.
            seed: The seed for dropout and for random numbers in the loss function. With a seed, dropout depends only on
                the seed, the step, the stage, and the micro-batch. With the same split into stages, dropout is the same
                for every schedule and number of ranks. Without a seed, each rank uses its own random number generators,
                so the loss function must not draw random numbers.
        """
        self.table, self.stages, self.loss, self.peers, self.place = table, stages, loss, peers, place
        self.precision, self.seed = precision or Precision(), seed
        self.device, self.message_device = self.precision.world.device, self.precision.world.message_device
        self.count = 1 + max(action.stage for actions in table for action in actions)  # stages of the full model
        self.number = 0  # completed calls of `run`
        self.ran: list[Timed] = []  # the actions of the last call, with times of the monotonic clock
        self.peak = 0  # the peak number of micro-batches with stored activations in the last call
        self._slots = [slots_of(table, with_shapes=new)[place] for new in (False, True)]
        self._seen: set[str | None] = set()  # the keys of micro-batches whose shapes are known on all ranks
        self._shapes: dict[tuple[int, str | None], Like] = {}  # of received activations, by stage and key

    def run(self, batches: Sequence[Any]) -> list[Parts]:
        """Add the gradient of the loss, summed over all micro-batches, to `.grad`. Collective over the pipeline.

        The gradient is multiplied by `precision.loss_scale`. The micro-batches must be the same on all ranks.

        Returns:
            The sums and counts of each micro-batch on the last stage, and an empty list on the other stages.

        Raises:
            LossError: If the loss does not call the model exactly once.
            ValueError: If the schedule requires a different number of micro-batches.
        """
        expected = 1 + max(action.micro_batch for action in self.table[self.place])
        if len(batches) != expected:
            raise ValueError(f"the schedule requires {expected} micro-batches, got {len(batches)}")
        if len(self._seen) > _MOST_KEYS:  # the same on all ranks, because the micro-batches are
            self._seen.clear()
            self._shapes.clear()
        step = _Step([_key(batch) for batch in batches])
        self.ran, self.peak = [], 0
        for slot in self._slots[not self._seen.issuperset(step.keys)]:
            self._exchange(step, slot.transfers)
            if slot.action is not None:
                self._execute(step, slot.action, batches[slot.action.micro_batch])
        for work, _ in step.sending:
            work.wait()
        self._seen |= set(step.keys) - {None}
        self.number += 1
        return step.parts

    # ----------------------------------------------------------------------------------------------- computing

    def _execute(self, step: _Step, action: Action, batch: Any) -> None:
        """Run a forward or backward pass, and store its output."""
        received = self._input_of(step, action)
        start = time.monotonic()
        if action.kind == FORWARD:
            with phase("forward"):
                made = self._forward(step, action, received, batch)
        else:
            with phase("backward"):
                made = self._backward(step, action, received)
        self.ran.append(Timed(action, start, time.monotonic()))
        self.peak = max(self.peak, len(step.live))
        if made is not None:
            step.made[action] = made

    def _forward(self, step: _Step, action: Action, x: torch.Tensor | None, batch: Any) -> torch.Tensor | None:
        """Run a forward pass, and return the output for the next stage, or None on the last stage."""
        stage, is_last = self.stages[action.stage], action.stage == self.count - 1
        if x is not None and x.is_floating_point():
            x.requires_grad_()

        def run_stage(*inputs: Any, **named: Any) -> Any:
            with self._seeded(action.stage, action.micro_batch):
                return stage(*inputs, **named) if x is None else stage(writable(x))

        with self._seeded(self.count, action.micro_batch), self.precision.autocast():  # for the loss function
            if is_last:
                answer = _LastStageOutput(run_stage)
                total, parts = call_loss(self.loss, answer, batch)
                answer.check()
                step.parts.append(parts)
                out = total * self.precision.loss_scale
            else:
                inputs, named = _inputs_of(self.loss, batch) if x is None else ((), {})
                out = run_stage(*inputs, **named)
                _check_output(out, action.stage)
        step.live[action.stage, action.micro_batch] = x, out
        return None if is_last else out.detach()

    def _seeded(self, stage: int, micro_batch: int) -> AbstractContextManager[None]:
        """Seed the generators for a stage or, if `stage` is the number of stages, for the loss function."""
        if self.seed is None:
            return nullcontext()
        return seeded_rng(self.seed, self.number, stage, micro_batch, device=self.device)

    def _backward(self, step: _Step, action: Action, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Run a backward pass, and return the gradient for the previous stage.

        The result is None on the first stage, or if the input cannot have a gradient.
        """
        x, out = step.live.pop((action.stage, action.micro_batch))
        if out.requires_grad:
            out.backward(gradient)
        if x is None or not x.is_floating_point():
            return None
        return torch.zeros_like(x) if x.grad is None else x.grad

    # ------------------------------------------------------------------------------------------------ messages

    def _exchange(self, step: _Step, transfers: Sequence[Transfer]) -> None:
        """Issue one batch of sends and receives, without waiting for the batch to complete."""
        # Gloo reports a send as completed only after `wait`, so with gloo, sent tensors are kept until the step ends.
        step.sending = [(work, kept) for work, kept in step.sending if not work.is_completed()]
        transfers = [transfer for transfer in transfers if self._is_needed(step, transfer)]
        if not transfers:
            return
        operations = [
            self._send(step, transfer) if transfer.source == self.place else self._receive(step, transfer)
            for transfer in transfers
        ]
        works = dist.batch_isend_irecv(operations)
        if len(works) < len(operations):  # NCCL returns one handle per batch, gloo one per operation
            works *= len(operations)
        for transfer, operation, work in zip(transfers, operations, works, strict=True):
            if transfer.source == self.place:
                step.sending.append((work, operation.tensor))
            else:
                step.receiving[transfer] = work, operation.tensor

    def _is_needed(self, step: _Step, transfer: Transfer) -> bool:
        """Return whether the message exists. An integer activation has no gradient, so no gradient is sent."""
        if transfer.action.kind == FORWARD:
            return True
        if transfer.source == self.place:
            return transfer.action in step.made
        return step.live[transfer.action.stage - 1, transfer.action.micro_batch][1].is_floating_point()

    def _send(self, step: _Step, transfer: Transfer) -> dist.P2POp:
        if transfer.part == "shape":
            tensor = _header(step.made[transfer.action])
        else:
            tensor = step.made.pop(transfer.action).contiguous()
        tensor = tensor.to(self.message_device)
        return dist.P2POp(dist.isend, tensor, self.peers[transfer.target], tag=self._tag(transfer))

    def _receive(self, step: _Step, transfer: Transfer) -> dist.P2POp:
        if transfer.part == "shape":
            tensor = torch.empty(_HEADER, dtype=torch.int64, device=self.message_device)
        else:
            shape, dtype = self._like(step, transfer)
            tensor = torch.empty(shape, dtype=dtype, device=self.message_device)
        return dist.P2POp(dist.irecv, tensor, self.peers[transfer.source], tag=self._tag(transfer))

    def _like(self, step: _Step, transfer: Transfer) -> Like:
        """Return a message's shape and dtype, which are read from the message's header if there is one."""
        kind, stage, m = transfer.action
        if kind == BACKWARD:
            out = step.live[stage - 1, m][1]
            return out.shape, out.dtype
        header = step.receiving.pop(transfer._replace(part="shape"), None)
        if header is not None:
            work, tensor = header
            work.wait()
            self._shapes[stage, step.keys[m]] = _from_header(tensor)
        return self._shapes[stage, step.keys[m]]

    def _input_of(self, step: _Step, action: Action) -> torch.Tensor | None:
        """Return the input of `action`, which a different rank or stage has computed.

        The result is None if there is no such input.
        """
        need = dependencies(action, self.count)
        if need is None or need.stage == action.stage:
            return None
        source = need.stage % len(self.peers)
        if source == self.place:
            return step.made.pop(need, None)
        if (message := Transfer(need, source, self.place)) not in step.receiving:
            return None
        work, tensor = step.receiving.pop(message)
        work.wait()
        return tensor.to(self.device)

    def _tag(self, transfer: Transfer) -> int:
        """Return a tag that is unique within a step."""
        kind, stage, m = transfer.action
        part = 2 if transfer.part == "shape" else int(kind == BACKWARD)
        return 3 * (m * self.count + stage) + part


def _key(batch: Any) -> str | None:
    """Return a digest of the tensors' shapes and dtypes, and of all other values in the batch.

    The result is None if a value is neither a tensor nor a plain value, because the `repr` of equal objects may differ.
    """
    values = list[Any]()
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            values.append((tuple(leaf.shape), str(leaf.dtype)))
        elif leaf is None or isinstance(leaf, str | bytes | int | float | complex | np.generic):
            values.append(leaf)
        else:
            return None
    return hashlib.blake2b(repr(values).encode(errors="surrogatepass"), digest_size=16).hexdigest()


def _header(tensor: torch.Tensor) -> torch.Tensor:
    sizes = [*tensor.shape] + [0] * (_HEADER - 2 - tensor.dim())
    return torch.tensor([_DTYPES.index(tensor.dtype), tensor.dim(), *sizes], dtype=torch.int64)


def _from_header(header: torch.Tensor) -> Like:
    kind, dim, *sizes = header.tolist()
    return torch.Size(sizes[:dim]), _DTYPES[kind]


def _check_output(out: Any, stage: int) -> None:
    if not isinstance(out, torch.Tensor) or out.dim() > _HEADER - 2 or out.dtype not in _DTYPES:
        is_tensor = isinstance(out, torch.Tensor)
        found = f"dtype {out.dtype} and shape {list(out.shape)}" if is_tensor else f"type {type(out).__name__}"
        raise ValueError(
            f"stage {stage} must return one tensor with a supported dtype and at most {_HEADER - 2} dimensions, got "
            f"{found}"
        )


class _CapturedCall(BaseException):
    """Raised by a stand-in model to abort the loss function and capture the arguments of the model call.

    The class does not derive from `Exception`, because a loss function might catch an `Exception`.
    """

    def __init__(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        super().__init__()
        self.inputs, self.named = inputs, named


def _inputs_of(loss: Loss, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments with which the loss calls its model.

    Raises:
        LossError: If the loss does not call the model.
    """
    try:
        loss(_FirstStageInput(), batch)
    except _CapturedCall as found:
        return found.inputs, found.named
    raise LossError("in a pipeline, the loss function must call the model exactly once, but it did not call the model")


class _FirstStageInput(nn.Module):
    """The first stage's stand-in model, which raises a `_CapturedCall` with the arguments of the model call."""

    def forward(self, *inputs: Any, **named: Any) -> None:
        raise _CapturedCall(inputs, named)


class _LastStageOutput(nn.Module):
    """The last stage's stand-in model, which returns the stage's output and counts its own calls."""

    def __init__(self, run_stage: Callable[..., Any]) -> None:
        super().__init__()
        self.run_stage, self.calls = run_stage, 0

    def forward(self, *inputs: Any, **named: Any) -> Any:
        self.calls += 1
        return self.run_stage(*inputs, **named)

    def check(self) -> None:
        """Raise `LossError` unless the loss has called the model exactly once."""
        if self.calls != 1:
            raise LossError(
                f"in a pipeline, the loss function must call the model exactly once, got {self.calls} calls"
            )
