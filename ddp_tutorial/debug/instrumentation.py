"""Observe the optimizer steps of one rank through hooks on the model.

    with Instrumentation(model, {"forwards", "gradients"}) as instrumentation:
        loss(model(batch)).backward()
        seen = instrumentation.take()
        seen.trace                 # PhaseMark("backward", "2.bias", norm), PhaseMark("backward", "2.weight", norm), ...
        seen.in_full(model, device)  # ("forward", "0", norm of the output), ("forward", "1", norm), ...

On a GPU, hooks compute norms but do not read them, because reading would synchronize the CPU with the GPU. Computing
the norms of all outputs would increase the step time by 10 %. The hooks therefore record only the inputs of each
forward pass, and `in_full` recomputes the outputs on request. Forward passes without gradients, such as those of an
evaluation, are not recorded.
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

# "forwards": the inputs of each forward pass; "losses": the tensors on which `backward` is called; "gradients": the
# parameters' gradients before they are reduced; "seconds": the time of each phase.
Observable = Literal["forwards", "losses", "gradients", "seconds"]
OUTPUT = "the model's output"
SHORT = frozenset({torch.float16, torch.bfloat16})


Phase = Literal["forward", "loss", "backward"]


class PhaseMark(NamedTuple):
    """The recorded norm of a tensor.

    Attributes:
        phase: The phase that produced the tensor.
        name: The name of the module, or of the parameter whose gradient is measured.
        norm: The norm, which is a float if it was computed on the CPU, and a tensor otherwise.
    """

    phase: Phase
    name: str
    norm: torch.Tensor | float


@dataclass(frozen=True)
class Forward:
    """The inputs and the state that are required to repeat a forward pass.

    Attributes:
        place: The index in the trace at which this forward pass's marks are inserted.
        inputs: The positional arguments.
        named: The keyword arguments.
        random: The state of PyTorch's random number generator on the model's device.
        autocast: Whether autocast is enabled, and its dtype.
    """

    place: int
    inputs: tuple[Any, ...]
    named: Mapping[str, Any]
    random: torch.Tensor
    autocast: tuple[bool, torch.dtype]

    def again(self, module: nn.Module, device: torch.device) -> list[PhaseMark]:
        """Repeat the forward pass, and return the norms of all outputs in the order of computation.

        If the forward pass fails, the result contains the norms up to the failure. The buffers and the random number
        generator are restored afterward. Collective if the model's forward pass contains collectives.
        """
        marks: list[PhaseMark] = []
        last: Any = None

        def record(name: str, _: nn.Module, __: Any, output: Any) -> None:
            nonlocal last
            if output is not last:  # a container returns the output of its last module
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
                stack.callback(part.register_forward_hook(partial(record, name)).remove)
            torch.cuda.set_rng_state(self.random, device) if device.type == "cuda" else torch.set_rng_state(self.random)
            with suppress(Exception):  # for example, if the model depends on its last batch
                module(*self.inputs, **self.named)
            for buffer, before in buffers:
                buffer.copy_(before)
        return marks


@dataclass
class StepObservation:
    """A rank's observations since its last optimizer step, in chronological order.

    Attributes:
        trace: The recorded norms.
        losses: The indices of the losses in the trace.
        forwards: The recorded forward passes.
        seconds: Dict from phase to time in seconds. "data" is the time spent waiting for data. "backward" ends with
            this rank's last gradient, so it excludes waits for other ranks. "step" is the time between optimizer steps.
    """

    trace: list[PhaseMark] = field(default_factory=list)
    losses: list[int] = field(default_factory=list)
    forwards: list[Forward] = field(default_factory=list)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    @cached_property
    def norms(self) -> list[float]:
        """The norms of the trace as floats."""
        norms = [mark.norm for mark in self.trace]
        on_gpu = [norm.double() for norm in norms if isinstance(norm, torch.Tensor)]
        if not on_gpu or len(on_gpu) < len(norms):
            return [float(norm) for norm in norms]
        values: list[float] = torch.stack(on_gpu).tolist()  # one synchronization for all norms
        return values

    def in_full(self, module: nn.Module, device: torch.device) -> list[tuple[Phase, str, float]]:
        """Repeat each forward pass, and return the trace with the norms of all outputs.

        The weights must not have changed since the step. Collective if the model's forward pass contains collectives.
        """
        marks = list(self.trace)
        for forward in reversed(self.forwards):
            marks[forward.place : forward.place] = forward.again(module, device)
        return [(mark.phase, mark.name, float(mark.norm)) for mark in marks]

    @cached_property
    def loss(self) -> float:
        """Mean loss over the micro-batches, or NaN if no loss was recorded."""
        norms = self.norms
        return sum(norms[place] for place in self.losses) / len(self.losses) if self.losses else math.nan

    @cached_property
    def gradients(self) -> dict[str, float]:
        """Dict from parameter name to the combined norm of this rank's local gradients in all micro-batches."""
        norms: dict[str, float] = {}
        for (phase, name, _), norm in zip(self.trace, self.norms, strict=True):
            if phase == "backward":
                norms[name] = math.hypot(norms[name], norm) if name in norms else norm
        return norms

    def first_not_finite(self) -> tuple[str, str] | None:
        """Return the phase and the name of the first mark whose norm is not finite, or None if all norms are finite."""
        marks = zip(self.trace, self.norms, strict=True)
        return next(((phase, name) for (phase, name, _), norm in marks if not math.isfinite(norm)), None)


class Instrumentation:
    """Context manager that attaches hooks to a model. Inside the context, compiled models run in eager mode."""

    def __init__(
        self,
        module: nn.Module,
        observes: Collection[Observable],
        begins: Sequence[Callable[[tuple[Any, ...]], object]] = (),
        ends: Sequence[Callable[[Any], object]] = (),
        device: torch.device = torch.device("cpu"),
    ) -> None:
        """Store the arguments.

        Args:
            module: The model without its data-parallel wrapper.
            observes: The observations to record.
            begins: Functions to call with the inputs before each forward pass in training.
            ends: Functions to call with the output after each forward pass in training.
            device: The device of the model.
        """
        self.module, self.observes, self.device = module, frozenset(observes), device
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
        """Attach the hooks."""
        self._begin()
        with ExitStack() as stack:
            self._attach(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        """Remove the hooks."""
        self._stack.close()

    def take(self) -> StepObservation:
        """Return the observations since the last call."""
        self._backward_has_ended()
        now = time.perf_counter()
        seen, self._seen = self._seen, StepObservation()
        seen.seconds["step"] = now - self._since
        self._since = now
        return seen

    def _attach(self, stack: ExitStack) -> None:
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # hooks would cause graph breaks
        hooks: list[Any] = []
        if self._begins or self.observes & {"forwards", "seconds"}:
            hooks.append(self.module.register_forward_pre_hook(self._forward_begins, with_kwargs=True))
        if self._ends or self.observes & {"forwards", "seconds"}:
            hooks.append(self.module.register_forward_hook(self._forward_ends))
        if self.observes & {"gradients", "seconds"}:
            # A hook on the node that accumulates into `.grad` receives the local gradient. The hook runs after the
            # parameter's own hooks, and before any code reads `.grad`.
            nodes = list[Any]()  # PyTorch drops the hook if the node is deleted
            for name, parameter in self.module.named_parameters():
                if parameter.requires_grad:
                    nodes.append(get_gradient_edge(parameter).node)
                    hooks.append(nodes[-1].register_prehook(self._gradient(name)))
            stack.callback(nodes.clear)
        for hook in hooks:
            stack.callback(hook.remove)
        if "losses" in self.observes:
            stack.enter_context(_observe_losses(self._loss))
        if "seconds" in self.observes:
            stack.enter_context(_observe_loaders(self._waits_for_data))
            stack.enter_context(observe(self._phase))

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
                    # This hook records the output's gradient. leaf.register_hook would be several times slower.
                    leaf.grad_fn.register_prehook(partial(self._record, "loss", OUTPUT, leaf.output_nr))
        now = time.perf_counter()
        self._seen.seconds["forward"] += now - self._mark
        self._mark = now
        for ends in self._ends:
            ends(output)

    def _loss(self, loss: torch.Tensor, factor: float) -> None:
        seen = self._seen
        seen.losses.append(len(seen.trace))
        seen.trace.append(PhaseMark("loss", "", _read_if_on_cpu(loss.detach().reshape(())) / factor))

    def _gradient(self, name: str) -> Callable[[tuple[torch.Tensor | None, ...]], None]:
        """Return the gradient hook of one parameter. The hook must be fast, because it runs in every step."""
        is_noted, is_timed = "gradients" in self.observes, "seconds" in self.observes
        usual, norm, is_on_cpu = torch.float32, torch.linalg.vector_norm, self.device.type == "cpu"
        now, mark = time.perf_counter, partial(tuple.__new__, PhaseMark)  # a faster PhaseMark(...)

        def arrives(gradients: tuple[torch.Tensor | None, ...]) -> None:
            gradient = gradients[0]
            if is_noted and gradient is not None:
                if gradient.dtype is usual and not gradient.is_sparse:
                    # On the CPU, reading the number now is faster than storing the tensor.
                    value = norm(gradient).item() if is_on_cpu else norm(gradient)
                else:
                    value = norm_of(gradient)
                self._seen.trace.append(mark(("backward", name, value)))
            if is_timed:
                self._arrived = now()

        return arrives

    def _backward_has_ended(self) -> None:
        """Add the duration of the backward pass, up to this rank's last gradient, to the phase times."""
        if self._arrived > self._mark:
            self._seen.seconds["backward"] += self._arrived - self._mark
            self._mark = self._arrived

    def _record(self, phase: Phase, name: str, place: int, gradients: tuple[torch.Tensor | None, ...]) -> None:
        gradient = gradients[place]
        if gradient is not None:
            self._seen.trace.append(PhaseMark(phase, name, _read_if_on_cpu(norm_of(gradient))))

    def _waits_for_data(self, entered: bool) -> None:
        """Add the duration of the training thread's outermost wait for data to the phase times."""
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
            else:  # replaces the time of a DataLoader inside the phase
                self._seen.seconds["data"] = self._data_before + now - self._phase_since


def _read_if_on_cpu(value: torch.Tensor) -> torch.Tensor | float:
    """Return a CPU tensor as a float. Return a GPU tensor unchanged, because reading it would block the CPU."""
    return float(value.item()) if value.is_cpu else value


def norm_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's 2-norm in float32 or higher precision.

    The norm is not finite if an element is not finite, or if the magnitude of an element exceeds about 1e19.
    """
    values = tensor.detach()
    if values.is_sparse:
        values = sparse_values(values)
    if values.dtype in SHORT:
        return torch.linalg.vector_norm(values, dtype=torch.float32)
    return torch.linalg.vector_norm(values)


def _norms_of(output: Any) -> list[torch.Tensor]:
    leaves = [output] if isinstance(output, torch.Tensor) else tree_leaves(output)
    return [norm_of(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


@contextmanager
def _observe_losses(see: Callable[[torch.Tensor, float], object]) -> Iterator[None]:
    """Inside the context, call `see` with the loss and its scale on each call of `backward()`.

    The context replaces `torch.autograd.backward`, because `loss.backward()` looks up this function on each call. If
    the backward pass starts at several tensors, the first tensor is the loss, unless a gradient is passed for it.
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
def _observe_loaders(see: Callable[[bool], object]) -> Iterator[None]:
    """Inside the context, call `see(True)` before and `see(False)` after each wait for a `DataLoader`."""
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
