"""One optimiser step of a pipeline: a rank does what its row of a schedule's table says, over send and receive.

What is sent: after a forward the activation, to the rank of the next stage; after a backward the gradient of what was
received, to the rank of the stage before. A send waits for nobody (`isend`; the tensor is kept until it has left), so a
table that `schedules.check` accepts does not get stuck. While one action is computed, the message for the next one may
come in. Each message has a tag of its own, made from stage and micro-batch: in whatever order a table does things,
nothing is taken for something else.

The shape of a message depends on the micro-batch alone, which all ranks of a pipeline have. So it is said once for each
shape of micro-batch, ahead of the message, and known from the next step on.

What `loss(model, batch)` means here. The loss calls the model once, with what it has taken from the batch, and makes a
sum and a count of what comes out. On the first stage we call the loss only to see with what it calls the model, and go
no further. On the last stage we call it with a stand-in for the model, whose answer is the last stage's output. Ranks
between do not call it.
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
_HEADER = 10  # numbers: the dtype, how many dimensions, and their sizes
_ACTIVATION, _GRADIENT, _SHAPE = range(3)  # what a message is: a part of its tag
_WHAT = {FORWARD: _ACTIVATION, BACKWARD: _GRADIENT}

Like = tuple[torch.Size, torch.dtype]
Parts = dict[str, tuple[Number, Number]]


@dataclass
class _Step:
    """What a rank has of a step that is under way."""

    keys: list[str]  # what the shapes of a micro-batch depend on
    parts: list[Parts] = field(default_factory=list)  # of the last stage, a micro-batch each
    live: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = field(default_factory=dict)  # (in, out)
    here: dict[Action, torch.Tensor] = field(default_factory=dict)  # made for another stage of this rank
    sending: list[tuple[dist.Work, torch.Tensor]] = field(default_factory=list)
    coming: dict[Action, tuple[dist.Work, torch.Tensor]] = field(default_factory=dict)
    learnt: dict[tuple[Action, str], Like] = field(default_factory=dict)


class StageRunner:
    """Executes one rank's row of `table`. `stages` are those of this rank, by number; `peers` the ranks of the pipeline
    in the process group, in order, of which this one has place `place`.

    With `seed`, dropout is drawn for (seed, step, stage, micro-batch): the same for every schedule and number of ranks,
    as long as the model is cut alike. Without, from the rank's own random numbers.
    """

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
        self.table, self.stages, self.loss, self.peers, self.place = table, stages, loss, peers, place
        self.precision, self.seed = precision or Precision(), seed
        self.device = self.precision.world.device
        self.count = 1 + max(action.stage for actions in table for action in actions)  # stages of the whole model
        self.number = 0  # of steps
        self.ran: list[Timed] = []  # what this rank did in the last step, by the machine's monotonic clock
        self.peak = 0  # most micro-batches whose activations it kept at a time, in the last step
        self._known: dict[tuple[Action, str], Like] = {}

    def run(self, batches: Sequence[Any]) -> list[Parts]:
        """Add the gradient of the sum of the loss over all micro-batches to `.grad` of this rank's parameters, times
        `precision.loss_scale`. Returns the sums and counts of each micro-batch on the last stage, else nothing.

        Collective over the ranks of the pipeline, which all have the same `batches`. Raises `LossError` for a loss that
        does not call its model exactly once, and `ValueError` for another number of micro-batches than the table has.
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
        """Compute a forward; returns what the next stage needs, or None on the last stage."""
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
        """Compute a backward; returns what the stage before needs: the gradient of what it has sent, or None where that
        can have none."""
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
        """Let the message that `action` needs come in from now on, if its shape is known."""
        need = self._awaited(step, action)
        if need is None or need in step.coming:
            return
        if need.kind == BACKWARD:
            out = step.live.get((action.stage, action.micro_batch))
            if out is None:
                return  # its forward is what comes next; then the shape is known
            like = out[1].shape, out[1].dtype
        elif (_from(need), step.keys[need.micro_batch]) in self._known:
            like = self._known[_from(need), step.keys[need.micro_batch]]
        else:
            return
        self._irecv(step, need, like)

    def _receive(self, step: _Step, action: Action) -> torch.Tensor | None:
        """What `action` takes, from another rank or another stage of this one; None where it takes nothing."""
        need = dependencies(action, self.count)
        if need is None or need.stage == action.stage:
            return None
        if need in step.here:
            return step.here.pop(need)
        if self._awaited(step, action) is None:
            return None
        self._expect(step, action)
        if need not in step.coming:  # a shape that is new
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
        """The action of another rank whose message this one needs."""
        need = dependencies(action, self.count)
        if need is None or need.stage % len(self.peers) == self.place:
            return None
        if need.kind == BACKWARD:
            live = step.live.get((action.stage, action.micro_batch))
            if live is not None and not live[1].is_floating_point():
                return None  # whole numbers have no gradient, and none is sent
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
    """The action with micro-batch 0, as a key: micro-batches of one shape have activations of one shape."""
    return action._replace(micro_batch=0)


def _key(batch: Any) -> str:
    """What the shapes of activations may depend on: the shapes of the batch, and what in it is no tensor."""
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
    """Raised by the stand-in for a model, to leave the loss with what it has called its model with. It is no
    `Exception`, which a loss might catch."""

    def __init__(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        super().__init__()
        self.inputs, self.named = inputs, named


def _inputs_of(loss: Loss, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and the named arguments with which the loss calls its model. Raises `LossError` where it does
    not."""

    def model(*inputs: Any, **named: Any) -> None:
        raise _CapturedCall(inputs, named)

    try:
        loss(model, batch)
    except _CapturedCall as found:
        return found.inputs, found.named
    raise LossError("the loss does not call its model; in a pipeline, it calls it once")


class _LastStageOutput:
    """Stands for the whole model on the last stage: whatever it is called with, it answers with that stage's output for
    `x`, which has come from the stage before. Where there is only one stage, that is the model."""

    def __init__(self, stage: nn.Module, x: torch.Tensor | None) -> None:
        self.stage, self.x, self.calls = stage, x, 0

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        self.calls += 1
        return self.stage(*inputs, **named) if self.x is None else self.stage(self.x)

    def check(self) -> None:
        if self.calls != 1:
            raise LossError(f"the loss calls its model {self.calls} times; in a pipeline, it calls it once")


def _drawing(seed: int | None, step: int, action: Action, device: torch.device) -> Any:
    """What a forward runs in: random numbers seeded by (seed, step, stage, micro-batch), or the rank's own without
    seed."""
    if seed is None:
        return nullcontext()
    return seeded_rng(seed, step, action.stage, action.micro_batch, device=device)
