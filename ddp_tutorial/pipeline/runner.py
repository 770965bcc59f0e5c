"""Run one optimizer step of a pipeline: each rank executes its row of the schedule with send and receive.

After a forward pass, a rank sends the activation to the rank of the next stage. After a backward pass, it sends the
gradient of its input to the rank of the previous stage. Sends do not block (`isend`; the tensor is kept until the send
has completed), so a schedule that `schedules.check` accepts cannot deadlock. While a rank computes one action, it can
receive the message for the next one. Each message has a unique tag, made from the stage and the micro-batch, so
messages cannot be confused whatever the order of the actions.

The shape of a message depends only on the micro-batch, which all ranks of a pipeline have. Therefore, a header with the
shape is sent once for each shape of micro-batch, before the message. From the next step on, the shape is known.

A loss function is called as `loss(model, batch)`. It must call the model once, with inputs from the batch, and return a
sum and a count. On the first stage, the loss is called only to capture the inputs of the model, and is aborted there.
On the last stage, it is called with a stand-in for the model that returns the output of the last stage. Other stages do
not call the loss.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_tutorial.accumulation.loss import Loss, LossError, Number, call_loss
from ddp_tutorial.accumulation.precision import Precision
from ddp_tutorial.compat import tree_leaves
from ddp_tutorial.phases import phase
from ddp_tutorial.pipeline.schedules import BACKWARD, FORWARD, Action, Table, Timed, dependencies
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
_HEADER = 10  # integers: the dtype, the number of dimensions, and their sizes
_ACTIVATION, _GRADIENT, _SHAPE = range(3)  # the kind of a message, which is part of its tag
_WHAT = {FORWARD: _ACTIVATION, BACKWARD: _GRADIENT}

Like = tuple[torch.Size, torch.dtype]
Parts = dict[str, tuple[Number, Number]]


@dataclass
class _Step:
    """The state of a step in progress on one rank."""

    keys: list[str]  # identify the shapes of each micro-batch
    parts: list[Parts] = field(default_factory=list)  # one per micro-batch, on the last stage
    live: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = field(default_factory=dict)  # (in, out)
    here: dict[Action, torch.Tensor] = field(default_factory=dict)  # outputs for a different stage of this rank
    sending: list[tuple[dist.Work, torch.Tensor]] = field(default_factory=list)
    coming: dict[Action, tuple[dist.Work, torch.Tensor]] = field(default_factory=dict)
    learnt: dict[tuple[Action, str], Like] = field(default_factory=dict)


class StageRunner:
    """Executes one rank's row of a schedule."""

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
            stages: This rank's stages, by number.
            loss: The loss function.
            peers: The ranks of the pipeline, in order.
            place: The position of this rank in `peers`.
            precision: The mixed-precision settings.
            seed: The seed of dropout. With a seed, dropout depends only on the seed, the step, the stage, and the
                micro-batch. It is then the same for every schedule and every number of ranks with the same split into
                stages. Without a seed, dropout uses the rank's own random number generators.
        """
        self.table, self.stages, self.loss, self.peers, self.place = table, stages, loss, peers, place
        self.precision, self.seed = precision or Precision(), seed
        self.device = self.precision.world.device
        self.count = 1 + max(action.stage for actions in table for action in actions)  # stages of the full model
        self.number = 0  # completed steps
        self.ran: list[Timed] = []  # the actions of the last step, with times of the monotonic clock
        self.peak = 0  # the peak number of micro-batches with stored activations in the last step
        self._known: dict[tuple[Action, str], Like] = {}

    def run(self, batches: Sequence[Any]) -> list[Parts]:
        """Add the gradient of the loss, summed over all micro-batches, to `.grad`. Collective over the pipeline.

        The gradient is multiplied by `precision.loss_scale`.

        Args:
            batches: The micro-batches, the same on all ranks of the pipeline.

        Returns:
            The sums and counts of each micro-batch on the last stage, and an empty list on the other stages.

        Raises:
            LossError: If the loss does not call its model exactly once.
            ValueError: If the number of micro-batches differs from the schedule.
        """
        expected = 1 + max(action.micro_batch for action in self.table[self.place])
        if len(batches) != expected:
            raise ValueError(f"the schedule has {expected} micro-batches, found {len(batches)}")
        step = _Step([_key(batch) for batch in batches])
        self.ran, self.peak = [], 0
        row = self.table[self.place]
        for action, following in zip(row, [*row[1:], None], strict=True):
            received = self._receive(step, action)
            if following is not None:
                self._expect(step, following)
            start = time.monotonic()
            if action.kind == FORWARD:
                with phase("forward"):
                    made = self._forward(step, action, received, batches[action.micro_batch])
            else:
                with phase("backward"):
                    made = self._backward(step, action, received)
            self.ran.append(Timed(action, start, time.monotonic()))
            self.peak = max(self.peak, len(step.live))
            if made is not None:
                self._send(step, action, made)
        for work, _ in step.sending:
            work.wait()
        self._known |= step.learnt
        self.number += 1
        return step.parts

    # ----------------------------------------------------------------------------------------------- computing

    def _forward(self, step: _Step, action: Action, x: torch.Tensor | None, batch: Any) -> torch.Tensor | None:
        """Run a forward pass, and return the output for the next stage, or None on the last stage."""
        stage, is_last = self.stages[action.stage], action.stage == self.count - 1
        if x is not None and x.is_floating_point():
            x.requires_grad_()
        with _drawing(self.seed, self.number, action, self.device):
            if is_last:
                answer = _LastStageOutput(stage, x)
                with self.precision.autocast():
                    total, parts = call_loss(self.loss, answer, batch)
                answer.check()
                step.parts.append(parts)
                out = total * self.precision.loss_scale
            else:
                inputs, named = _inputs_of(self.loss, batch) if x is None else ((x,), {})
                with self.precision.autocast():
                    out = stage(*inputs, **named)
                _check_output(out, action.stage)
        step.live[action.stage, action.micro_batch] = x, out
        return None if is_last else out.detach()

    def _backward(self, step: _Step, action: Action, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Run a backward pass, and return the gradient for the previous stage.

        Returns None on the first stage, and if the input cannot have a gradient.
        """
        x, out = step.live.pop((action.stage, action.micro_batch))
        if out.requires_grad:
            out.backward(gradient)
        if x is None or not x.is_floating_point():
            return None
        return torch.zeros_like(x) if x.grad is None else x.grad

    # ------------------------------------------------------------------------------------------------ messages

    def _send(self, step: _Step, action: Action, made: torch.Tensor) -> None:
        to = action.stage + (1 if action.kind == FORWARD else -1)
        if to % len(self.peers) == self.place:
            step.here[action] = made
            return
        peer, made = self.peers[to % len(self.peers)], made.contiguous()
        step.sending = [(work, kept) for work, kept in step.sending if not work.is_completed()]
        if action.kind == FORWARD and (_from(action), step.keys[action.micro_batch]) not in self._known:
            header = _header(made)
            self._isend(step, header, peer, self._tag(action, _SHAPE))
            step.learnt[_from(action), step.keys[action.micro_batch]] = made.shape, made.dtype
        self._isend(step, made, peer, self._tag(action, _WHAT[action.kind]))

    def _isend(self, step: _Step, tensor: torch.Tensor, peer: int, tag: int) -> None:
        work = dist.isend(tensor, peer, tag=tag)
        assert work is not None
        step.sending.append((work, tensor))

    def _expect(self, step: _Step, action: Action) -> None:
        """Start to receive the message that `action` needs, if its shape is known."""
        need = self._awaited(step, action)
        if need is None or need in step.coming:
            return
        if need.kind == BACKWARD:
            out = step.live.get((action.stage, action.micro_batch))
            if out is None:
                return  # the shape is unknown until its forward pass, which comes first
            like = out[1].shape, out[1].dtype
        elif (_from(need), step.keys[need.micro_batch]) in self._known:
            like = self._known[_from(need), step.keys[need.micro_batch]]
        else:
            return
        self._irecv(step, need, like)

    def _receive(self, step: _Step, action: Action) -> torch.Tensor | None:
        """Return the input of `action`, from a different rank or a different stage of this rank, or None."""
        need = dependencies(action, self.count)
        if need is None or need.stage == action.stage:
            return None
        if need in step.here:
            return step.here.pop(need)
        if self._awaited(step, action) is None:
            return None
        self._expect(step, action)
        if need not in step.coming:  # a new shape
            peer = self.peers[need.stage % len(self.peers)]
            header = torch.empty(_HEADER, dtype=torch.int64)
            dist.recv(header, peer, tag=self._tag(need, _SHAPE))
            like = _like(header)
            step.learnt[_from(need), step.keys[need.micro_batch]] = like
            self._irecv(step, need, like)
        work, tensor = step.coming.pop(need)
        work.wait()
        return tensor

    def _awaited(self, step: _Step, action: Action) -> Action | None:
        """Return the action of a different rank whose message `action` needs, or None."""
        need = dependencies(action, self.count)
        if need is None or need.stage % len(self.peers) == self.place:
            return None
        if need.kind == BACKWARD:
            live = step.live.get((action.stage, action.micro_batch))
            if live is not None and not live[1].is_floating_point():
                return None  # integers have no gradient, so none is sent
        return need

    def _irecv(self, step: _Step, need: Action, like: Like) -> None:
        tensor = torch.empty(like[0], dtype=like[1], device=self.device)
        tag = self._tag(need, _WHAT[need.kind])
        work = dist.irecv(tensor, self.peers[need.stage % len(self.peers)], tag=tag)
        assert work is not None
        step.coming[need] = work, tensor

    def _tag(self, action: Action, which: int) -> int:
        return 3 * (action.micro_batch * self.count + action.stage) + which


def _from(action: Action) -> Action:
    """Return the action with micro-batch 0, as a key for the shape of its message.

    Micro-batches of the same shape have activations of the same shape.
    """
    return action._replace(micro_batch=0)


def _key(batch: Any) -> str:
    """Return a key for everything that the shapes of activations may depend on: tensor shapes and non-tensor values."""
    leaves = tree_leaves(batch)
    return repr([tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])


def _header(tensor: torch.Tensor) -> torch.Tensor:
    sizes = [*tensor.shape] + [0] * (_HEADER - 2 - tensor.dim())
    return torch.tensor([_DTYPES.index(tensor.dtype), tensor.dim(), *sizes], dtype=torch.int64)


def _like(header: torch.Tensor) -> Like:
    kind, dim, *sizes = header.tolist()
    return torch.Size(sizes[:dim]), _DTYPES[kind]


def _check_output(out: Any, stage: int) -> None:
    if not isinstance(out, torch.Tensor) or out.dim() > _HEADER - 2 or out.dtype not in _DTYPES:
        raise ValueError(
            f"stage {stage} gives a {type(out).__name__}; between stages goes one tensor of {_HEADER - 2} dimensions "
            "or fewer, of a common dtype"
        )


class _CapturedCall(BaseException):
    """Raised by the stand-in for a model, to abort the loss and return the arguments of the model.

    This is not an `Exception`, because a loss might catch that.
    """

    def __init__(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Store the arguments of the model."""
        super().__init__()
        self.inputs, self.named = inputs, named


def _inputs_of(loss: Loss, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments with which the loss calls its model.

    Raises:
        LossError: If the loss does not call its model.
    """

    def model(*inputs: Any, **named: Any) -> None:
        raise _CapturedCall(inputs, named)

    try:
        loss(model, batch)
    except _CapturedCall as found:
        return found.inputs, found.named
    raise LossError("the loss does not call its model; in a pipeline, it calls it once")


class _LastStageOutput:
    """A stand-in for the model on the last stage, which returns the output of that stage for any arguments.

    The input is `x`, from the previous stage. If there is only one stage, the stage is the model itself.
    """

    def __init__(self, stage: nn.Module, x: torch.Tensor | None) -> None:
        """Store the stage and its input."""
        self.stage, self.x, self.calls = stage, x, 0

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Return the output of the stage."""
        self.calls += 1
        return self.stage(*inputs, **named) if self.x is None else self.stage(self.x)

    def check(self) -> None:
        """Raise an error unless the loss has called the model exactly once.

        Raises:
            LossError: If the number of calls is not 1.
        """
        if self.calls != 1:
            raise LossError(f"the loss calls its model {self.calls} times; in a pipeline, it calls it once")


def _drawing(seed: int | None, step: int, action: Action, device: torch.device) -> Any:
    """Return a context manager for a forward pass that seeds the generators by step, stage, and micro-batch.

    Without a seed, the context manager does nothing.
    """
    if seed is None:
        return nullcontext()
    return seeded_rng(seed, step, action.stage, action.micro_batch, device=device)
