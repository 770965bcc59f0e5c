"""What one rank sees of one optimizer step, from hooks that are attached to its model from outside.

    with Taps(model, {"forwards", "gradients"}) as taps:
        loss(model(batch)).backward()
        seen = taps.take()
        seen.trace             # ..., Mark("backward", "2.bias", norm of it), Mark("backward", "2.weight", norm), ...
        seen.in_full(model)    # Mark("forward", "0", norm of the output), Mark("forward", "1", norm), ...

A hook notes the norm of a tensor and does not look at it: on a GPU that would make the processor wait. Norms of all
outputs would cost a tenth of a step, so what is kept of a forward is what it began with, and the outputs are computed
once more when somebody asks. Evaluation, and whatever else runs without gradients, is not looked at.
"""

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from ddp_tutorial.accumulation.loss import StepLoss
from ddp_tutorial.compat import DataLoaderIterator, sparse_values, tree_leaves
from ddp_tutorial.phases import PhaseEvent, observe

# What can be listened to: what each forward began with, what backward is called on, the gradients of parameters before
# they are added up over the ranks, and where the time goes.
Observable = Literal["forwards", "losses", "gradients", "seconds"]
OUTPUT = "the model's output"
SHORT = frozenset({torch.float16, torch.bfloat16})


Phase = Literal["forward", "loss", "backward"]


class PhaseMark(NamedTuple):
    """The norm of a tensor that came by: in which phase, and whose it is."""

    phase: Phase
    name: str  # of the module, or of the parameter that the gradient is for
    norm: torch.Tensor | float  # a number where it was computed on the CPU


@dataclass(frozen=True)
class Forward:
    """What a forward of the model began with, so that it can be computed once more. `place` is where its marks belong
    in the trace."""

    place: int
    inputs: tuple[Any, ...]
    named: Mapping[str, Any]
    random: torch.Tensor  # the state of torch's random numbers, of the device that computes
    autocast: tuple[bool, torch.dtype]

    def again(self, module: nn.Module, device: torch.device) -> list[PhaseMark]:
        """The norms of all outputs, in the order in which they come; up to where it fails, if it does. Nothing of the
        module is changed, nor of torch's random numbers. Collective where the model's forward is."""
        marks: list[PhaseMark] = []
        last: Any = None

        def note(name: str, _: nn.Module, __: Any, output: Any) -> None:
            nonlocal last
            if output is not last:  # a container hands on what its last part returned
                last = output
                marks.extend(PhaseMark("forward", name, norm) for norm in _norms_of(output))

        buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
        named = [(name, part) for name, part in module.named_modules() if part is not module]
        is_on, dtype = self.autocast
        with (
            ExitStack() as stack,
            torch.no_grad(),
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            torch.autocast(device.type, dtype, enabled=is_on),
        ):
            for name, part in [*named, (OUTPUT, module)]:
                stack.callback(part.register_forward_hook(partial(note, name)).remove)
            _set_random_state(device, self.random)
            with suppress(Exception):  # a model that remembers its last batch, say: what came before is known
                module(*self.inputs, **self.named)
            for buffer, before in buffers:
                buffer.copy_(before)
        return marks


@dataclass
class StepObservation:
    """What a rank has seen since its last optimizer step, in that order."""

    trace: list[PhaseMark] = field(default_factory=list)
    losses: list[int] = field(default_factory=list)  # where in the trace they are
    forwards: list[Forward] = field(default_factory=list)
    # "data": waiting for it; "forward"; "backward": until its own last gradient has come, so without the others;
    # "step": from one optimizer step to the next.
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    @cached_property
    def norms(self) -> list[float]:
        """Those of the trace, as numbers."""
        norms = [mark.norm for mark in self.trace]
        on_gpu = [norm.double() for norm in norms if isinstance(norm, torch.Tensor)]
        if not on_gpu or len(on_gpu) < len(norms):
            return [float(norm) for norm in norms]
        values: list[float] = torch.stack(on_gpu).tolist()  # one wait, not many
        return values

    def in_full(self, module: nn.Module, device: torch.device) -> list[tuple[Phase, str, float]]:
        """The trace, with the outputs of each forward, which are computed once more. The weights have to be those of
        the step. Collective where the model's forward is."""
        marks = list(self.trace)
        for forward in reversed(self.forwards):
            marks[forward.place : forward.place] = forward.again(module, device)
        return [(mark.phase, mark.name, float(mark.norm)) for mark in marks]

    @cached_property
    def loss(self) -> float:
        """The mean of what backward was called on, over the micro-batches; NaN without any."""
        norms = self.norms
        return sum(norms[place] for place in self.losses) / len(self.losses) if self.losses else math.nan

    @cached_property
    def gradients(self) -> dict[str, float]:
        """The norm of this rank's own gradient for each parameter that got one, over all micro-batches."""
        norms: dict[str, float] = {}
        for (phase, name, _), norm in zip(self.trace, self.norms, strict=True):
            if phase == "backward":
                norms[name] = math.hypot(norms[name], norm) if name in norms else norm
        return norms

    def first_not_finite(self) -> tuple[str, str] | None:
        """Phase and name of the first mark that is not finite."""
        marks = zip(self.trace, self.norms, strict=True)
        return next(((phase, name) for (phase, name, _), norm in marks if not math.isfinite(norm)), None)


class Instrumentation:
    """Hooks on a model, for what is in `observes`; they are gone when its block ends.

    `begins` and `ends` are called around each forward of the model that trains, with its inputs and its output.
    """

    def __init__(
        self,
        module: nn.Module,
        sights: Collection[Observable],
        begins: Sequence[Callable[[tuple[Any, ...]], object]] = (),
        ends: Sequence[Callable[[Any], object]] = (),
        device: torch.device = torch.device("cpu"),
    ) -> None:
        self.module, self.observes, self.device = module, frozenset(sights), device
        self._begins, self._ends = begins, ends
        self._stack = ExitStack()
        self._seen = StepObservation()
        self._thread = threading.get_ident()
        self._data_since: float | None = None
        self._begin()

    def _begin(self) -> None:
        self._mark = self._since = self._arrived = self._phase_since = time.perf_counter()
        self._data_before = 0.0

    def __enter__(self) -> "Instrumentation":
        self._begin()
        with ExitStack() as stack:
            self._attach(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def take(self) -> StepObservation:
        """What has been seen since the last call."""
        self._backward_has_ended()
        now = time.perf_counter()
        seen, self._seen = self._seen, StepObservation()
        seen.seconds["step"] = now - self._since
        self._since = now
        return seen

    def _attach(self, stack: ExitStack) -> None:
        hooks: list[Any] = []
        if self._begins or self.observes & {"forwards", "seconds"}:
            hooks.append(self.module.register_forward_pre_hook(self._forward_begins, with_kwargs=True))
        if self._ends or self.observes & {"forwards", "seconds"}:
            hooks.append(self.module.register_forward_hook(self._forward_ends))
        if self.observes & {"gradients", "seconds"}:
            hooks += [self._gradient_hook(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        for hook in hooks:
            stack.callback(hook.remove)
        if "losses" in self.observes:
            stack.enter_context(_seeing_losses(self._loss))
        if "seconds" in self.observes:
            stack.enter_context(_seeing_loaders(self._waits_for_data))
            stack.enter_context(observe(self._phase))

    def _gradient_hook(self, name: str, parameter: nn.Parameter) -> Any:
        """On the node that adds to `.grad`, before all that looks at `.grad`: there it is this rank's own gradient, as
        the hooks of the parameter have left it."""
        node: Any = get_gradient_edge(parameter).node
        hook = node.register_prehook(self._gradient(name))
        self._stack.callback(lambda: node)  # torch forgets the hook with the node
        return _Kept(hook, node)

    # ------------------------------------------------------------------------------------------------------- events

    def _forward_begins(self, _: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        self._backward_has_ended()
        self._mark = time.perf_counter()
        if "forwards" in self.observes:
            kind = self.device.type
            is_on = torch.is_autocast_enabled(kind)
            autocast = is_on, torch.get_autocast_dtype(kind) if is_on else torch.float32
            state = torch.get_rng_state() if kind != "cuda" else torch.cuda.get_rng_state(self.device)
            self._seen.forwards.append(Forward(len(self._seen.trace), inputs, named, state, autocast))
        for begins in self._begins:
            begins((*inputs, *named.values()))

    def _forward_ends(self, _: nn.Module, __: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if "forwards" in self.observes:
            for leaf in [output] if isinstance(output, torch.Tensor) else tree_leaves(output):
                if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                    # Its gradient: what the loss makes of it. As leaf.register_hook, which takes several times as long.
                    leaf.grad_fn.register_prehook(partial(self._note, "loss", OUTPUT, leaf.output_nr))
        now = time.perf_counter()
        self._seen.seconds["forward"] += now - self._mark
        self._mark = now
        for ends in self._ends:
            ends(output)

    def _loss(self, loss: torch.Tensor, factor: float) -> None:
        seen = self._seen
        seen.losses.append(len(seen.trace))
        seen.trace.append(PhaseMark("loss", "", _at_hand(loss.detach().reshape(())) / factor))

    def _gradient(self, name: str) -> Callable[[tuple[torch.Tensor | None, ...]], None]:
        """The hook for one parameter. It is called for each in each step, so it does little."""
        is_noted, is_timed = "gradients" in self.observes, "seconds" in self.observes
        usual, norm, is_on_cpu = torch.float32, torch.linalg.vector_norm, self.device.type == "cpu"
        now, mark = time.perf_counter, partial(tuple.__new__, PhaseMark)  # as Mark(...), without its detour

        def arrives(gradients: tuple[torch.Tensor | None, ...]) -> None:
            gradient = gradients[0]
            if is_noted and gradient is not None:
                if gradient.dtype is usual and not gradient.is_sparse:
                    # A number now, while it is at hand, is faster than a tensor that is kept.
                    value = norm(gradient).item() if is_on_cpu else norm(gradient)
                else:
                    value = norm_of(gradient)
                self._seen.trace.append(mark(("backward", name, value)))
            if is_timed:
                self._arrived = now()

        return arrives

    def _backward_has_ended(self) -> None:
        """Count it, until its last gradient."""
        if self._arrived > self._mark:
            self._seen.seconds["backward"] += self._arrived - self._mark
            self._mark = self._arrived

    def _note(self, phase: Phase, name: str, place: int, gradients: tuple[torch.Tensor | None, ...]) -> None:
        gradient = gradients[place]
        if gradient is not None:
            self._seen.trace.append(PhaseMark(phase, name, _at_hand(norm_of(gradient))))

    def _waits_for_data(self, entered: bool) -> None:
        """The outermost wait counts, of the thread that trains."""
        if threading.get_ident() != self._thread:
            return
        now = time.perf_counter()
        if entered and self._data_since is None:
            self._data_since = now
        elif not entered and self._data_since is not None:
            self._seen.seconds["data"] += now - self._data_since
            self._data_since = None

    def _phase(self, edge: PhaseEvent) -> None:
        if edge.name == "data" and threading.get_ident() == self._thread:
            now = time.perf_counter()
            if edge.entered:
                self._phase_since = now
                self._data_before = self._seen.seconds["data"]
            else:  # instead of what a loader inside has counted
                self._seen.seconds["data"] = self._data_before + now - self._phase_since


class _Kept(NamedTuple):
    """A hook, and what has to live as long as it."""

    hook: Any
    node: Any

    def remove(self) -> None:
        self.hook.remove()


def _at_hand(value: torch.Tensor) -> torch.Tensor | float:
    """A number now, where nobody has to wait for it."""
    return float(value.item()) if value.is_cpu else value


def norm_of(tensor: torch.Tensor) -> torch.Tensor:
    """The 2-norm, in float32 or better; not finite where a number is not, or where some are above 1e19."""
    values = tensor.detach()
    if values.is_sparse:
        values = sparse_values(values)
    if values.dtype in SHORT:
        return torch.linalg.vector_norm(values, dtype=torch.float32)
    return torch.linalg.vector_norm(values)


def _norms_of(output: Any) -> list[torch.Tensor]:
    leaves = [output] if isinstance(output, torch.Tensor) else tree_leaves(output)
    return [norm_of(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def _set_random_state(device: torch.device, state: torch.Tensor) -> None:
    torch.cuda.set_rng_state(state, device) if device.type == "cuda" else torch.set_rng_state(state)


@contextmanager
def _seeing_losses(see: Callable[[torch.Tensor, float], object]) -> Iterator[None]:
    """What `backward()` is called on is the loss, times its scale, where it has one for float16: `see` gets both.

    `loss.backward()` looks this function up each time. If backward begins at several tensors, the first is the loss,
    unless it has a gradient of its own.
    """
    real, real_scale, real_forward = torch.autograd.backward, torch.amp.GradScaler.scale, StepLoss.forward
    factor = 1.0

    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **named: Any) -> None:
        nonlocal factor
        is_one = not isinstance(tensors, Sequence)
        first, weight = (tensors, grad_tensors) if is_one else (tensors[0], grad_tensors and grad_tensors[0])
        if weight is None and isinstance(first, torch.Tensor) and first.numel() == 1:
            see(first, factor)
            factor = 1.0
        real(tensors, grad_tensors, *args, **named)

    def scale(self: torch.amp.GradScaler, outputs: Any) -> Any:
        nonlocal factor
        scaled = real_scale(self, outputs)
        factor = self.get_scale()
        return scaled

    def forward(self: StepLoss, *args: Any, **named: Any) -> torch.Tensor:
        nonlocal factor
        factor = self.precision.loss_scale
        return real_forward(self, *args, **named)

    torch.autograd.backward = backward
    torch.amp.GradScaler.scale = scale  # type: ignore[method-assign]
    StepLoss.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autograd.backward = real
        torch.amp.GradScaler.scale = real_scale  # type: ignore[method-assign]
        StepLoss.forward = real_forward  # type: ignore[method-assign]


@contextmanager
def _seeing_loaders(see: Callable[[bool], object]) -> Iterator[None]:
    """Both ends of each wait for the next batch of a `DataLoader`, whichever it is."""
    real = DataLoaderIterator.__next__

    def following(self: Any) -> Any:
        see(True)
        try:
            return real(self)
        finally:
            see(False)

    DataLoaderIterator.__next__ = following  # type: ignore[method-assign]
    try:
        yield
    finally:
        DataLoaderIterator.__next__ = real  # type: ignore[method-assign]
