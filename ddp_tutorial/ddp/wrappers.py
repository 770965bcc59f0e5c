"""Four DDP implementations that average gradients over ranks.

All implementations share an interface, which consists of `forward`, `no_sync` and `finish`:

    model = data_parallel(module, world, DDPConfig(variant="bucket"))
    with model.no_sync():                  # all micro-batches of a step except the last
        loss(model(first)).backward()
    loss(model(last)).backward()
    model.finish()                         # now every rank has the mean of all ranks' gradients
    optimizer.step()

`NaiveDDP` and `FlatDDP` reduce gradients after the backward pass, and `BucketDDP` reduces them during the backward
pass. `TorchDDP` wraps PyTorch's implementation. The backward pass computes the gradient of this rank's loss. After
`finish`, `.grad` contains the mean over ranks.

Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import zip_longest
from typing import Any, ClassVar, NoReturn, cast
from weakref import WeakMethod, WeakSet, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ddp_tutorial.collectives import all_gather, broadcast_tensors, from_rank_zero
from ddp_tutorial.compat import forward_sync_buffers, is_compiled, uncompiled
from ddp_tutorial.config import ConfigError
from ddp_tutorial.ddp.buckets import MIB, Bucket, check_dense, make_buckets
from ddp_tutorial.ddp.config import CompileConfig, DDPConfig
from ddp_tutorial.ddp.hooks import AllReduceHook, CastHook, Hook, Pending, PowerSGD
from ddp_tutorial.ddp.link import DirectLink, Link, SimulatedLink
from ddp_tutorial.ddp.link_model import LinkModel
from ddp_tutorial.ddp.shared_memory import SharedMemory, add_in_memory
from ddp_tutorial.world import World, require_group


class DataParallel(ABC):
    """A model that is replicated on every rank and trained on each rank's shard of the batch.

    A wrapper is not an `nn.Module`. To save the model, save the state dict of `.module`. The constructor is collective.
    The ranks compare their models, and receive rank 0's weights and buffers. A wrapper averages the gradients of the
    parameters that are trainable when the wrapper is created. Wrap the module again after you unfreeze or replace
    parameters; the new wrapper replaces the previous wrapper.

    Raises:
        RuntimeError: On every rank, if the models differ between ranks, or if no parameter is trainable.
    """

    kept: PowerSGD | None = None  # the state of PowerSGD, which is different on each rank
    acts_in_backward: ClassVar[bool] = False  # if true, no other wrapper of the same parameters can be in use
    calls = 0  # forward passes so far

    def __init__(
        self,
        module: nn.Module,
        world: World,
        link: Link | None = None,
        *,
        find_unused_parameters: bool = False,
        sync_buffers: bool = True,
    ) -> None:
        """Check that all ranks have the same model, and broadcast rank 0's weights and buffers.

        Args:
            module: The model, on this rank's device.
            world: The participating ranks.
            link: The link that carries the gradients, or None if PyTorch's C++ code sends the gradients directly.
            find_unused_parameters: Whether to allow parameters without a gradient.
            sync_buffers: Whether to broadcast rank 0's buffers in each step.
        """
        sync_initial_state(module, world)
        self.module, self.world, self.link = module, world, link
        self.compiled: nn.Module | None = None
        self.find_unused_parameters = find_unused_parameters
        # A tied parameter has several names and is listed once; a frozen parameter has no gradient to average.
        self.trainable = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self._frozen = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]
        if not self.trainable:
            raise RuntimeError("the model must contain at least 1 parameter that requires a gradient, got 0")
        self.sync_buffers = sync_buffers
        self._is_replaced = False
        _replace_older(self)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Run the forward pass."""
        self.check()
        self.calls += 1
        return self.forward(*inputs, **named)

    @cached_property
    def loss_model(self) -> nn.Module:
        """The model that loss functions receive. A call runs the wrapper; class and attributes are from `module`."""
        wrapper = ref(self)

        def call(*inputs: Any, **named: Any) -> Any:
            alive = wrapper()
            assert alive is not None, "the wrapper no longer exists"
            return alive(*inputs, **named)

        return with_call(self.module, call)

    def __reduce__(self) -> NoReturn:
        """Raise `TypeError`, because a wrapper cannot be copied."""
        name = type(self).__name__
        raise TypeError(f"{name} cannot be copied or pickled: copy or save its .module, and wrap the copy")

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return the model's output for this rank's inputs."""
        return (self.module if self.compiled is None else self.compiled)(*inputs, **named)

    def compile(self, config: CompileConfig) -> None:
        """Compile this wrapper's forward and backward passes with `torch.compile`.

        `module` itself does not change. Direct calls to `module` are not compiled, and the names in its state dict stay
        the same.
        """
        self.compiled = cast("nn.Module", torch.compile(self.module, **config.model_dump()))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate this rank's gradients inside the block, without communication."""
        yield

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The buffers that `finish` broadcasts.

        The list is not cached, because an assignment such as `self.count = self.count + 1` replaces a buffer.
        """
        return list(self.module.buffers()) if self.sync_buffers else []

    @abstractmethod
    def finish(self) -> None:
        """Average every `.grad` over all ranks, and broadcast rank 0's buffers. Collective.

        Call `finish` after the last backward pass of a step. With `find_unused_parameters`, a rank without a gradient
        for a parameter contributes zeros. If no rank has a gradient for a parameter, its `.grad` is None afterward.

        Raises:
            RuntimeError: On all ranks, if any rank lacks a gradient for a parameter and `find_unused_parameters` is
                False. The error is also raised if parameters were unfrozen, or if a newer wrapper was created.
        """

    def check(self) -> None:
        """Raise `RuntimeError` if this wrapper would not average all gradients."""
        if self._is_replaced:
            raise RuntimeError(
                "this wrapper was replaced when its parameters were wrapped again. Use the newest wrapper. To train "
                "two models that share parameters, wrap one module that contains both."
            )
        require_frozen(self._frozen, "Wrap the model again")

    def detach(self) -> None:
        """Stop averaging gradients, because a newer wrapper averages them.

        Using this wrapper afterward raises an error.
        """
        self._is_replaced = True


def with_call(module: nn.Module, call: Callable[..., Any]) -> nn.Module:
    """Return an object that has the class and attributes of `module`, but runs `call` when it is called."""
    kind = type(module)
    own = {"__call__": lambda _, *inputs, **named: call(*inputs, **named), "__module__": kind.__module__}
    view: nn.Module = object.__new__(type(kind.__name__, (kind,), own))
    object.__setattr__(view, "__dict__", module.__dict__)  # nn.Module.__setattr__ would look for parameters first
    return view


def require_frozen(named: Iterable[tuple[str, nn.Parameter]], advice: str) -> None:
    """Raise `RuntimeError` if a parameter that was frozen when the model was wrapped now requires a gradient."""
    unfrozen = [name for name, parameter in named if parameter.requires_grad]
    if unfrozen:
        raise RuntimeError(
            f"parameters that were frozen when the model was wrapped now require gradients: "
            f"{', '.join(map(repr, unfrozen))}. Their gradients would not be averaged. {advice}."
        )


_wrappers: WeakSet[DataParallel] = (
    WeakSet()
)  # in use; a notebook may keep an old wrapper alive, for example in a traceback


def _replace_older(wrapper: DataParallel) -> None:
    """Detach older wrappers that share parameters with `wrapper`, to prevent gradients from being averaged twice.

    If neither wrapper averages gradients during the backward pass, the older wrapper stays attached.
    """
    parameters = {parameter for _, parameter in wrapper.trainable}
    for older in list(_wrappers):
        shares = not parameters.isdisjoint(parameter for _, parameter in older.trainable)
        if shares and (wrapper.acts_in_backward or older.acts_in_backward):
            older.detach()
            _wrappers.discard(older)
    _wrappers.add(wrapper)


class NaiveDDP(DataParallel):
    """The simplest DDP implementation, which runs one all-reduce per parameter after the backward pass."""

    link: Link

    @torch.no_grad()
    def finish(self) -> None:
        """Average each `.grad` in a separate all-reduce."""
        for name, parameter in all_reduce_used(self, self.link):
            check_dense(name, parameter.grad)
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            # Every rank needs the same memory layout. Otherwise, a channels_last gradient would be summed with zeros in
            # a different layout.
            parameter.grad = gradient.contiguous()
            parameter.grad /= self.world.size
            self.link.all_reduce(parameter.grad, name).wait()
        broadcast_tensors(self.world, self.buffers)


class FlatDDP(DataParallel):
    """A DDP implementation that copies all gradients into one flat buffer.

    One all-reduce after the backward pass averages the buffer, so the link's latency is incurred only once.
    """

    link: Link

    def __init__(self, module: nn.Module, world: World, link: Link, **options: bool) -> None:
        """Wrap `module`. The `options` are passed to `DataParallel`."""
        super().__init__(module, world, link, **options)
        self.buckets = make_buckets(self.trainable)  # one for each dtype and device

    def finish(self) -> None:
        """Average all gradients with one all-reduce per buffer."""
        used = all_reduce_used(self, self.link)
        for bucket in self.buckets:
            for place in range(len(bucket.parameters)):
                bucket.collect(place, self.world.size)
            self.link.all_reduce(bucket.buffer, bucket.name).wait()
        assign_grads(self.buckets, used)
        broadcast_tensors(self.world, self.buffers)


class BucketDDP(DataParallel):
    """A DDP implementation that overlaps the buckets' all-reduces with the backward pass.

    The all-reduce of a bucket starts as soon as the bucket is full, while the backward pass continues with earlier
    layers. The backward pass reaches the last layers first, so the first bucket contains the parameters that were
    registered last. After the first step, the buckets are rebuilt in the order in which gradients arrived. All-reduces
    are matched by order, not by name. All ranks therefore start the all-reduces in the same order, even if gradients
    arrive in different orders.
    """

    link: Link
    acts_in_backward = True

    def __init__(
        self, module: nn.Module, world: World, hook: Hook, *, bucket_cap_mb: float | None = None, **options: bool
    ) -> None:
        """Wrap `module`, and reduce each bucket with `hook`. The `options` are passed to `DataParallel`.

        The default `bucket_cap_mb` is 1 MiB for the first bucket and 25 MiB for all other buckets.
        """
        super().__init__(module, world, hook.link, **options)
        self.hook = hook
        self.kept = hook if isinstance(hook, PowerSGD) else None
        self.cap = (25 if bucket_cap_mb is None else bucket_cap_mb) * MIB
        self.first_cap = MIB if bucket_cap_mb is None else self.cap
        self._sync = True
        self._rebuilt = False
        self._build(range(len(self.trainable))[::-1])
        # The autograd nodes that accumulate the gradients. Their hooks run after all hooks of the parameters, which may
        # change the gradient. A parameter does not keep its node alive.
        self._nodes = [get_gradient_edge(parameter).node for _, parameter in self.trainable]
        arrive = WeakMethod(self._arrive)
        self._hooks = [node.register_hook(call_later(arrive, index)) for index, node in enumerate(self._nodes)]

    def detach(self) -> None:
        """Remove the autograd hooks."""
        super().detach()
        for hook in self._hooks:
            hook.remove()

    def _build(self, order: Sequence[int]) -> None:
        """Assign the parameters to buckets, in the order of the indices in `order`."""
        self.buckets = make_buckets([self.trainable[index] for index in order], self.cap, self.first_cap)
        slots = {name: (b, s) for b, bucket in enumerate(self.buckets) for s, name in enumerate(bucket.names)}
        self._slot = [slots[name] for name, _ in self.trainable]
        self._expect()

    def _expect(self) -> None:
        """Reset the state at the start of a step: no gradient has arrived, and no all-reduce has started."""
        self._missing = [len(bucket.parameters) for bucket in self.buckets]
        self._arrived: dict[int, None] = {}  # a set that keeps its order
        self._pending: list[Pending] = []

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return the model's output. Raise `RuntimeError` if `finish` was not called after a backward pass."""
        if self._arrived and torch.is_grad_enabled():
            raise RuntimeError(
                "a forward pass started, but finish() was not called after the previous backward pass. Call finish() "
                "before optimizer.step(). To accumulate gradients, run all but the last backward pass of each step "
                "inside no_sync()."
            )
        return super().forward(*inputs, **named)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients inside the block without starting all-reduces."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def _arrive(self, index: int) -> None:
        """Pass gradient `index` to `_fill_slot`, unless the backward pass runs inside `no_sync`.

        Autograd calls this method when the parameter's gradient is final for this backward pass.
        """
        if index in self._arrived:  # its bucket may be in an all-reduce; adding to it would corrupt the sum
            raise RuntimeError(
                f"parameter {self.trainable[index][0]!r} received a second gradient before finish(). Run all but the "
                "last backward pass of a step inside no_sync(). If a checkpointed layer is used twice, use "
                "checkpoint(..., use_reentrant=False)."
            )
        if not self._sync:
            return
        self._arrived[index] = None
        self._fill_slot(index)

    def _fill_slot(self, index: int) -> None:
        """Copy a gradient into its bucket, and start the all-reduces of the complete buckets that are next in order."""
        bucket, slot = self._slot[index]
        self.buckets[bucket].collect(slot, self.world.size)
        self._missing[bucket] -= 1
        while (following := len(self._pending)) < len(self.buckets) and not self._missing[following]:
            self._pending.append(self.hook.start(self.buckets[following]))

    def finish(self) -> None:
        """Start the remaining all-reduces, wait for all of them, and rebuild the buckets after the first step."""
        try:
            for index in range(len(self.trainable)):
                if index not in self._arrived:  # not used in this backward pass, but maybe in an earlier micro-batch
                    self._fill_slot(index)
            try:
                used = all_reduce_used(self, self.link)
            finally:  # also after an error: no all-reduce may be pending in the next backward pass
                for pending in self._pending:
                    pending.wait()
            assign_grads(self.buckets, used)
            if self.kept is not None:
                self.kept.restore_unused(self.buckets, {name for name, _ in used})
            if not self._rebuilt:
                self._rebuild()
        finally:
            self._expect()
        broadcast_tensors(self.world, self.buffers)

    def _rebuild(self) -> None:
        """Rebuild the buckets in the order in which rank 0's gradients arrived.

        Parameters whose gradients did not arrive are placed last.
        """
        self._rebuilt = True
        never = [index for index in range(len(self.trainable))[::-1] if index not in self._arrived]
        self._build(from_rank_zero(self.world, [*self._arrived, *never]))
        for bucket in self.buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                if parameter.grad is not None:  # a view of an old bucket, whose memory can then be freed
                    parameter.grad = view.copy_(parameter.grad)


def call_later(method: WeakMethod[Callable[..., None]], *args: Any) -> Callable[..., None]:
    """Return an autograd hook that calls `method` with `args`, unless the method's owner has been garbage-collected.

    Python cannot track autograd's references, and a graph can keep the hook alive longer than the owner.
    """

    def hook(*_: object) -> None:
        if (alive := method()) is not None:
            alive(*args)

    return hook


class TorchDDP(DataParallel):
    """A wrapper around PyTorch's `DistributedDataParallel`, whose backward pass waits for the all-reduces.

    `finish` differs from the other wrappers' `finish` in two ways. Buffers are broadcast before the next forward pass
    instead of in `finish`. For unused parameters, `finish` raises an error only on the ranks that did not use them. The
    other ranks may wait in the backward pass until the collective timeout.
    """

    acts_in_backward = True

    def __init__(self, module: nn.Module, world: World, config: DDPConfig, hook: Hook | None = None) -> None:
        """Wrap `module` with the options of `config`. Without a `hook`, PyTorch reduces the buckets itself."""
        super().__init__(
            module,
            world,
            hook.link if hook else None,
            find_unused_parameters=config.find_unused_parameters,
            sync_buffers=False,  # PyTorch broadcasts the buffers
        )
        self.ddp: DistributedDataParallel | None = None
        self._allows_unused = config.find_unused_parameters or config.static_graph
        if world.size == 1:
            return
        gpu = [world.device.index] if world.device.type == "cuda" else None
        if config.shared_memory:  # the config does not allow a hook in addition
            self.link = SharedMemory.connect(world, (p for p in module.parameters() if p.requires_grad))
        self.ddp = DistributedDataParallel(
            module,
            device_ids=config.device_ids or gpu,
            bucket_cap_mb=config.bucket_cap_mb,
            find_unused_parameters=config.find_unused_parameters,
            static_graph=config.static_graph,
            gradient_as_bucket_view=config.gradient_as_bucket_view,
            **forward_sync_buffers(enabled=config.sync_buffers),
            init_sync=False,  # sync_initial_state has done this, and its errors name the difference
        )
        if isinstance(self.link, SharedMemory):
            self.ddp.register_comm_hook(self.link, add_in_memory)
        elif hook is not None:
            self.ddp.register_comm_hook(hook, _reduce_with)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return the model's output for this rank's inputs."""
        return self.ddp(*inputs, **named) if self.ddp else super().forward(*inputs, **named)

    def compile(self, config: CompileConfig) -> None:
        """Compile the module inside torch's DDP, which splits the graph at the bucket boundaries.

        `torch.compile(ddp)` produces the same graphs, but also traces `DistributedDataParallel.forward`. With torch
        2.13, tracing this method causes a graph break and rules out `fullgraph`.
        """
        super().compile(config)
        if self.ddp is not None:
            self.ddp.module = self.compiled

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients inside the block without communication."""
        if self.ddp is None:
            yield
        else:
            with self.ddp.no_sync():
                yield

    def finish(self) -> None:
        """Check that all parameters have received a gradient. The backward pass has already averaged the gradients."""
        self.check()
        unused = [name for name, parameter in self.trainable if parameter.grad is None]
        if self.ddp is not None and unused and not self._allows_unused:
            raise _unused_error({self.world.rank: unused})

    def detach(self) -> None:
        """Release PyTorch's wrapper and its hooks."""
        super().detach()
        self.ddp = self.compiled = None


def _reduce_with(hook: Hook, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """Divide a bucket of PyTorch's DDP by the world size, and start the bucket's all-reduce with `hook`."""
    buffer = bucket.buffer().div_(dist.get_world_size())
    pending = hook.start(Bucket(f"bucket {bucket.index()}", buffer, [], [], bucket.gradients()))
    future = cast("Future[torch.Tensor]", pending)  # only PowerSGD returns a different type
    return future.then(
        lambda done: done.value()
    )  # value() raises a Python exception, which C++ would not see otherwise


def data_parallel(
    module: nn.Module, world: World, config: DDPConfig | None = None, compilation: CompileConfig | None = None
) -> DataParallel:
    """Wrap `module` so that its gradients are averaged over the ranks of `world`. Collective.

    Args:
        module: The model, which may already be compiled with `torch.compile(module)` or `module.compile()`.
        world: The participating ranks.
        config: The DDP implementation and its options.
        compilation: The options of `torch.compile`. By default, the wrapper does not compile the model.

    Raises:
        ConfigError: If `compilation` is given for a model that is already compiled, or if the buckets are too small for
            a compiled model.
        RuntimeError: On every rank, if the models differ between ranks, or if no parameter is trainable.
    """
    config = config or DDPConfig()
    if compilation or is_compiled(module):
        config.require_compilable()
    if compilation:
        require_uncompiled(module)
    wrapper = _wrap(uncompiled(module), world, config)
    if compilation:
        wrapper.compile(compilation)
    return wrapper


def require_uncompiled(module: nn.Module) -> None:
    """Raise `ConfigError` if `module` is already compiled."""
    if is_compiled(module):
        raise ConfigError(
            "'compile' must be false for a model that is already compiled: pass the uncompiled model, or set "
            "compile=false"
        )


def _wrap(module: nn.Module, world: World, config: DDPConfig) -> DataParallel:
    """Return the wrapper that `config` specifies. Collective."""
    link = make_link(config, world)
    options = {"find_unused_parameters": config.find_unused_parameters, "sync_buffers": config.sync_buffers}
    if config.variant == "naive":
        return NaiveDDP(module, world, link, **options)
    if config.variant == "flat":
        return FlatDDP(module, world, link, **options)
    if config.variant == "bucket":
        return BucketDDP(module, world, make_hook(link, world, config), bucket_cap_mb=config.bucket_cap_mb, **options)
    as_it_is = config.hook == "none" and config.simulated_link is None
    return TorchDDP(module, world, config, None if as_it_is else make_hook(link, world, config))


def make_link(config: DDPConfig, world: World) -> Link:
    """Return the machine's own link, or the simulated link that `config` describes. Collective."""
    if config.simulated_link is None:
        return DirectLink(world)
    return SimulatedLink(world, LinkModel.from_config(config.simulated_link))


def make_hook(link: Link, world: World, config: DDPConfig) -> Hook:
    """Return the hook that `config` specifies. With a world size of 1, no gradient is sent or compressed."""
    if config.hook == "none" or world.size == 1:
        return AllReduceHook(link)
    if config.hook == "powersgd":
        return PowerSGD(link, world.size, config.powersgd_rank)
    return CastHook(link, torch.float16 if config.hook == "fp16" else torch.bfloat16)


def sync_initial_state(module: nn.Module, world: World) -> None:
    """Check that all ranks have the same model, then broadcast rank 0's weights and buffers. Collective.

    Raises:
        RuntimeError: On every rank, if the models differ. The error message contains the first difference. Without this
            check, an all-reduce could sum tensors of different shapes, and gloo would not raise an error.
    """
    require_group(world)
    layouts = all_gather(world, _layout(module))
    for rank, layout in enumerate(layouts):
        for number, (first, other) in enumerate(zip_longest(layouts[0], layout, fillvalue="missing")):
            if first != other:
                raise RuntimeError(
                    f"the model must be the same on every rank, but parameter or buffer {number} is {first} on rank 0 "
                    f"and {other} on rank {rank}"
                )
    broadcast_tensors(world, [*module.parameters(), *module.buffers()])


def _layout(module: nn.Module) -> list[str]:
    """Return a description of each parameter and buffer, in the order of registration."""

    def described(kind: str, name: str, tensor: torch.Tensor) -> str:
        return f"{kind} {name!r} ({str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)})"

    lines = [
        described("parameter" if p.requires_grad else "frozen parameter", name, p)
        for name, p in module.named_parameters()
    ]
    return lines + [described("buffer", name, b) for name, b in module.named_buffers()]


@torch.no_grad()
def all_reduce_used(model: DataParallel, link: Link) -> list[tuple[str, nn.Parameter]]:
    """Return the trainable parameters that have a gradient on at least one rank. Collective.

    A single all-reduce counts, for every parameter, the ranks that have a gradient.

    Raises:
        RuntimeError: On all ranks, if any rank lacks a gradient for a parameter and `find_unused_parameters` is False.
    """
    model.check()
    mine = [parameter.grad is not None for _, parameter in model.trainable]
    counts = torch.tensor(mine, dtype=torch.int32, device=model.world.device)
    link.all_reduce(counts, "used parameters").wait()
    if not model.find_unused_parameters and bool((counts < model.world.size).any()):
        unused = all_gather(model.world, [name for name, parameter in model.trainable if parameter.grad is None])
        raise _unused_error(dict(enumerate(unused)))
    return [named for named, count in zip(model.trainable, counts.tolist(), strict=True) if count]


def _unused_error(unused: Mapping[int, Sequence[str]]) -> RuntimeError:
    listed = "; ".join(f"on rank {rank} {', '.join(map(repr, names))}" for rank, names in unused.items() if names)
    return RuntimeError(
        f"parameters that received no gradient: {listed}. The loss does not depend on them. Use them, freeze them with "
        "requires_grad_(False), or allow unused parameters with find_unused_parameters=True."
    )


def assign_grads(buckets: Sequence[Bucket], used: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Set `.grad` of each used parameter to its view of the bucket, and `.grad` of all other parameters to None."""
    names = {name for name, _ in used}
    for bucket in buckets:
        for name, parameter, view in zip(bucket.names, bucket.parameters, bucket.views, strict=True):
            parameter.grad = view if name in names else None
