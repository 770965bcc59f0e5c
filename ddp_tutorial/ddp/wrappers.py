"""Four ways to average gradients over ranks, behind one small interface: `forward`, `no_sync`, `finish`.

    model = data_parallel(module, world, DDPConfig(variant="bucket"))
    with model.no_sync():                  # all micro-batches of a step but the last
        loss(model(first)).backward()
    loss(model(last)).backward()
    model.finish()                         # now every rank holds the mean of all ranks' gradients
    optimizer.step()

`NaiveDDP` and `FlatDDP` send gradients after backward, `BucketDDP` while backward is still running; `TorchDDP` is
torch's own. Backward computes the gradient of this rank's loss; `finish` leaves the mean over ranks in `.grad`.

Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import Any, ClassVar, NoReturn, cast
from weakref import WeakMethod, WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ddp_tutorial.collectives import all_gather, broadcast_tensors, from_rank_zero
from ddp_tutorial.ddp.buckets import MIB, Bucket, check_dense, make_buckets
from ddp_tutorial.ddp.config import DDPConfig
from ddp_tutorial.ddp.hooks import AllReduceHook, CastHook, Hook, Pending, PowerSGD
from ddp_tutorial.ddp.link import DirectLink, Link, LinkModel, SimulatedLink
from ddp_tutorial.ddp.shared_memory import SharedMemory, add_in_memory
from ddp_tutorial.world import World, require_group


class DataParallel(ABC):
    """A model that every rank holds a copy of, and trains on its own part of the batch.

    A wrapper is not an `nn.Module`: the model is `.module`, whose state dict is the one to save. Constructing is
    collective: the ranks compare their models, and start with rank 0's weights and buffers. A wrapper averages the
    parameters that are trainable when it is made. Wrap the module again after unfreezing parameters, and after any
    other change of its parameters; the new wrapper replaces the older one.

    Raises:
        RuntimeError: On every rank, if the ranks hold different models or nothing is trainable.
    """

    link: Link | None = None  # what carries the gradients; None where torch's C++ code sends them by itself
    kept: PowerSGD | None = None  # what this rank keeps of its own from one step to the next, if it compresses so
    acts_in_backward: ClassVar[bool] = False  # then no other wrapper of the same parameters can be in use
    calls = 0  # forward passes so far

    def __init__(
        self, module: nn.Module, world: World, *, find_unused_parameters: bool = False, sync_buffers: bool = True
    ) -> None:
        sync_initial_state(module, world)
        self.module, self.world = module, world
        self.find_unused_parameters = find_unused_parameters
        # A tied parameter has several names and is listed once; a frozen one has no gradient to average.
        self.trainable = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self._frozen = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]
        if not self.trainable:
            raise RuntimeError("the model has no parameter that requires a gradient: there is nothing to average")
        self.sync_buffers = sync_buffers
        self._is_replaced = False
        _replace_older(self)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        self.check()
        self.calls += 1
        return self.forward(*inputs, **named)

    def __reduce__(self) -> NoReturn:
        name = type(self).__name__
        raise TypeError(f"{name} cannot be copied or pickled: copy or save its .module, and wrap the copy again")

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The model's output on this rank's inputs."""
        return self.module(*inputs, **named)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forward and backward inside add to this rank's gradients, without any communication."""
        yield

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The buffers that `finish` broadcasts. Listed anew each time: `self.count = self.count + 1` replaces one."""
        return list(self.module.buffers()) if self.sync_buffers else []

    @abstractmethod
    def finish(self) -> None:
        """Average every `.grad` over all ranks, and broadcast rank 0's buffers. Collective.

        Call this method after the last backward of a step. With `find_unused_parameters`, a parameter without a
        gradient on some ranks counts as zero there. A parameter that no rank has used has no gradient afterwards.

        Raises:
            RuntimeError: On all ranks, if a parameter has no gradient on some rank and `find_unused_parameters` is
                False. Also if parameters were unfrozen, or a newer wrapper was made.
        """

    def check(self) -> None:
        """Raise `RuntimeError` if this wrapper would miss gradients."""
        if self._is_replaced:
            raise RuntimeError(
                "this wrapper was replaced: its parameters were wrapped again later. Use the newest wrapper. To train "
                "two models that share parameters, wrap one module that contains both."
            )
        require_frozen(self._frozen, "Wrap the model again")

    def detach(self) -> None:
        """Stop averaging gradients: a newer wrapper does it. Using this wrapper raises an error from now on."""
        self._is_replaced = True


def require_frozen(named: Iterable[tuple[str, nn.Parameter]], advice: str) -> None:
    """Raise `RuntimeError` if a parameter requires a gradient that was frozen when the model was wrapped."""
    unfrozen = [name for name, parameter in named if parameter.requires_grad]
    if unfrozen:
        raise RuntimeError(
            f"parameters that were frozen when the model was wrapped require gradients now: "
            f"{', '.join(map(repr, unfrozen))}. Their gradients would not be averaged. {advice}."
        )


_wrappers: WeakSet[DataParallel] = WeakSet()  # in use; a notebook may keep an old one alive, in a traceback for example


def _replace_older(wrapper: DataParallel) -> None:
    """Detach older wrappers that share parameters, if one of the two averages in backward: gradients would be averaged
    twice."""
    parameters = {parameter for _, parameter in wrapper.trainable}
    for older in list(_wrappers):
        shares = not parameters.isdisjoint(parameter for _, parameter in older.trainable)
        if shares and (wrapper.acts_in_backward or older.acts_in_backward):
            older.detach()
            _wrappers.discard(older)
    _wrappers.add(wrapper)


class NaiveDDP(DataParallel):
    """The simplest version: after backward, one all-reduce for each parameter, one after another."""

    link: Link

    def __init__(self, module: nn.Module, world: World, link: Link, **options: bool) -> None:
        super().__init__(module, world, **options)
        self.link = link

    @torch.no_grad()
    def finish(self) -> None:
        for name, parameter in all_reduce_used(self, self.link):
            check_dense(name, parameter.grad)
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            # The same layout on every rank: a gradient in channels_last would meet zeros in another order of elements.
            parameter.grad = gradient.contiguous()
            parameter.grad /= self.world.size
            self.link.all_reduce(parameter.grad, name).wait()
        broadcast_tensors(self.world, self.buffers)


class FlatDDP(DataParallel):
    """All gradients in one flat buffer: one all-reduce after backward, so its latency is paid once."""

    link: Link

    def __init__(self, module: nn.Module, world: World, link: Link, **options: bool) -> None:
        super().__init__(module, world, **options)
        self.link = link
        self.buckets = make_buckets(self.trainable)  # one for each dtype and device

    def finish(self) -> None:
        used = all_reduce_used(self, self.link)
        for bucket in self.buckets:
            for place in range(len(bucket.parameters)):
                bucket.collect(place, self.world.size)
            self.link.all_reduce(bucket.buffer, bucket.name).wait()
        assign_grads(self.buckets, used)
        broadcast_tensors(self.world, self.buffers)


class BucketDDP(DataParallel):
    """Buckets whose all-reduce starts as soon as they are full, while backward goes on with the layers below.

    Backward reaches the last layers first, so the first bucket has the parameters that were registered last. After the
    first step the buckets are cut anew, in the order in which gradients arrived. All ranks start the same buckets in
    the same order, whatever order their own gradients come in: all-reduces are matched by order, not by name.
    """

    link: Link
    acts_in_backward = True

    def __init__(
        self, module: nn.Module, world: World, hook: Hook, *, bucket_cap_mb: float | None = None, **options: bool
    ) -> None:
        super().__init__(module, world, **options)
        self.hook, self.link = hook, hook.link
        self.kept = hook if isinstance(hook, PowerSGD) else None
        self.cap = (25 if bucket_cap_mb is None else bucket_cap_mb) * MIB
        self.first_cap = MIB if bucket_cap_mb is None else self.cap
        self._sync = True
        self._rebuilt = False
        self._build(range(len(self.trainable))[::-1])
        # The autograd nodes that accumulate the gradients. Their hooks run after all hooks of the parameters: those may
        # still change the gradient. A parameter does not keep its node alive.
        self._nodes = [get_gradient_edge(parameter).node for _, parameter in self.trainable]
        arrive: WeakMethod[Callable[[int], None]] = WeakMethod(self._arrive)
        self._hooks = [node.register_hook(partial(_arrive_at, arrive, index)) for index, node in enumerate(self._nodes)]

    def detach(self) -> None:
        super().detach()
        for hook in self._hooks:
            hook.remove()

    def _build(self, order: Sequence[int]) -> None:
        """Cut the parameters into buckets, in the order of these indices."""
        self.buckets = make_buckets([self.trainable[index] for index in order], self.cap, self.first_cap)
        slots = {name: (b, s) for b, bucket in enumerate(self.buckets) for s, name in enumerate(bucket.names)}
        self._slot = [slots[name] for name, _ in self.trainable]
        self._expect()

    def _expect(self) -> None:
        """Begin a step: no gradient has arrived, and no bucket is under way."""
        self._missing = [len(bucket.parameters) for bucket in self.buckets]
        self._arrived: dict[int, None] = {}  # a set that keeps its order
        self._pending: list[Pending] = []

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if self._arrived and torch.is_grad_enabled():
            raise RuntimeError(
                "a forward came after a backward that no finish() has ended. Call finish() before the optimiser's "
                "step, or run all but the last backward of a step inside no_sync()."
            )
        return super().forward(*inputs, **named)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def _arrive(self, index: int) -> None:
        """Start the all-reduce of the parameter's bucket if the bucket is complete. Autograd calls this method once the
        parameter's gradient is final for this backward."""
        if index in self._arrived:  # its bucket may be under way, and adding to it, in no_sync too, would spoil the sum
            raise RuntimeError(
                f"parameter {self.trainable[index][0]!r} got a second gradient before finish(). Run all but the last "
                "backward of a step inside no_sync(). If a checkpointed layer is used twice, use "
                "checkpoint(..., use_reentrant=False)."
            )
        if not self._sync:
            return
        self._arrived[index] = None
        self._fill_slot(index)

    def _fill_slot(self, index: int) -> None:
        """Put a gradient into its bucket, then start every bucket that is complete and whose turn has come."""
        bucket, slot = self._slot[index]
        self.buckets[bucket].collect(slot, self.world.size)
        self._missing[bucket] -= 1
        while (following := len(self._pending)) < len(self.buckets) and not self._missing[following]:
            self._pending.append(self.hook.start(self.buckets[following]))

    def finish(self) -> None:
        try:
            for index in range(len(self.trainable)):
                if index not in self._arrived:  # unused in this backward; an earlier micro-batch may have used it
                    self._fill_slot(index)
            try:
                used = all_reduce_used(self, self.link)
            finally:  # after an error too: no bucket may be under way when the next backward begins
                for pending in self._pending:
                    pending.wait()
            assign_grads(self.buckets, used)
            if not self._rebuilt:
                self._rebuild()
        finally:
            self._expect()
        broadcast_tensors(self.world, self.buffers)

    def _rebuild(self) -> None:
        """Cut the buckets in the order in which rank 0's gradients arrived, then those that did not arrive."""
        self._rebuilt = True
        never = [index for index in range(len(self.trainable))[::-1] if index not in self._arrived]
        self._build(from_rank_zero(self.world, [*self._arrived, *never]))
        for bucket in self.buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                if parameter.grad is not None:  # a view of an old bucket, whose memory can then be freed
                    parameter.grad = view.copy_(parameter.grad)


def _arrive_at(arrive: WeakMethod[Callable[[int], None]], index: int, *_: object) -> None:
    """The hook of a node. A graph may keep the node, and with it this hook, longer than its `BucketDDP`."""
    if (method := arrive()) is not None:
        method(index)


class TorchDDP(DataParallel):
    """torch's own `DistributedDataParallel`. Its backward waits for the all-reduces.

    Two promises of `finish` are torch's. Buffers are broadcast before the next forward pass instead of in `finish`. And
    `finish` raises an error for unused parameters only on the ranks that did not use them; the other ranks may wait in
    backward until the collective timeout.
    """

    acts_in_backward = True

    def __init__(self, module: nn.Module, world: World, config: DDPConfig, hook: Hook | None = None) -> None:
        super().__init__(
            module,
            world,
            find_unused_parameters=config.find_unused_parameters,
            sync_buffers=False,  # torch does that itself
        )
        self.link = hook.link if hook else None  # without a hook, torch's C++ code calls gloo or NCCL by itself
        self.ddp: DistributedDataParallel | None = None
        self._allows_unused = config.find_unused_parameters or config.static_graph
        if world.size == 1:
            return
        gpu = [world.device.index] if world.device.type == "cuda" else None
        if config.shared_memory:  # which goes with none of these
            self.link = SharedMemory.connect(world, (p for p in module.parameters() if p.requires_grad))
        self.ddp = DistributedDataParallel(
            module,
            device_ids=config.device_ids or gpu,
            bucket_cap_mb=config.bucket_cap_mb,
            find_unused_parameters=config.find_unused_parameters,
            static_graph=config.static_graph,
            gradient_as_bucket_view=config.gradient_as_bucket_view,
            forward_sync_buffers=config.sync_buffers,
            init_sync=False,  # sync_initial_state has done it, and names what differs
        )
        if isinstance(self.link, SharedMemory):
            self.ddp.register_comm_hook(self.link, add_in_memory)
        elif hook is not None:
            self.ddp.register_comm_hook(hook, _reduce_with)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return (self.ddp or self.module)(*inputs, **named)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        if self.ddp is None:
            yield
        else:
            with self.ddp.no_sync():
                yield

    def finish(self) -> None:
        self.check()
        unused = [name for name, parameter in self.trainable if parameter.grad is None]
        if self.ddp is not None and unused and not self._allows_unused:
            raise _unused_error({self.world.rank: unused})

    def detach(self) -> None:
        super().detach()
        self.ddp = None


def _reduce_with(hook: Hook, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """One of our hooks in the form that torch's DDP calls, with a bucket that is not yet divided by the world size."""
    buffer = bucket.buffer().div_(dist.get_world_size())
    pending = hook.start(Bucket(f"bucket {bucket.index()}", buffer, [], [], bucket.gradients()))
    future = cast("Future[torch.Tensor]", pending)  # of the hooks here, only PowerSGD returns something else
    return future.then(lambda done: done.value())  # C++ sees an exception that Python has set only if value() raises it


def data_parallel(module: nn.Module, world: World, config: DDPConfig | None = None) -> DataParallel:
    """Wrap `module` so that its gradients are averaged over the ranks of `world`, as `config` says. Collective."""
    config = config or DDPConfig()
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
    """The machine's own link, or the simulated one that `config` describes. Collective."""
    if config.simulated_link is None:
        return DirectLink(world)
    return SimulatedLink(world, LinkModel.from_config(config.simulated_link))


def make_hook(link: Link, world: World, config: DDPConfig) -> Hook:
    """The hook that `config` names, over `link`; one rank alone sends nothing, so it compresses nothing."""
    if config.hook == "none" or world.size == 1:
        return AllReduceHook(link)
    if config.hook == "powersgd":
        return PowerSGD(link, world.size, config.powersgd_rank)
    return CastHook(link, torch.float16 if config.hook == "fp16" else torch.bfloat16)


def sync_initial_state(module: nn.Module, world: World) -> None:
    """Check that all ranks have the same model, then give all of them rank 0's weights and buffers. Collective.

    Raises `RuntimeError` on every rank, naming the first difference. Without the check, tensors of different shapes
    could meet in one all-reduce, and gloo would add up what fits without an error.
    """
    require_group(world)
    layouts = all_gather(world, _layout(module))
    for rank, layout in enumerate(layouts):
        for number, (first, other) in enumerate(zip_longest(layouts[0], layout, fillvalue="nothing")):
            if first != other:
                raise RuntimeError(
                    f"the ranks have different models: at place {number}, rank 0 has {first}, rank {rank} has {other}"
                )
    broadcast_tensors(world, [*module.parameters(), *module.buffers()])


def _layout(module: nn.Module) -> list[str]:
    """A line for each parameter and buffer, in the order of registration."""

    def described(kind: str, name: str, tensor: torch.Tensor) -> str:
        return f"{kind} {name!r}, {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"

    lines = [
        described("parameter" if p.requires_grad else "frozen parameter", name, p)
        for name, p in module.named_parameters()
    ]
    return lines + [described("buffer", name, b) for name, b in module.named_buffers()]


@torch.no_grad()
def all_reduce_used(model: DataParallel, link: Link) -> list[tuple[str, nn.Parameter]]:
    """The trainable parameters that have a gradient on some rank. Collective: one all-reduce of a number for each.

    Raises `RuntimeError`, on all ranks, for a parameter without a gradient on some rank, unless that is allowed.
    """
    model.check()
    mine = [parameter.grad is not None for _, parameter in model.trainable]
    counts = torch.tensor(mine, dtype=torch.int32, device=model.world.device)
    link.all_reduce(counts, "who uses what").wait()
    if not model.find_unused_parameters and bool((counts < model.world.size).any()):
        unused = all_gather(model.world, [name for name, parameter in model.trainable if parameter.grad is None])
        raise _unused_error(dict(enumerate(unused)))
    return [named for named, count in zip(model.trainable, counts.tolist(), strict=True) if count]


def _unused_error(unused: Mapping[int, Sequence[str]]) -> RuntimeError:
    """The error for parameters without a gradient: rank -> their names."""
    told = "; ".join(f"on rank {rank} {', '.join(map(repr, names))}" for rank, names in unused.items() if names)
    return RuntimeError(
        f"parameters that got no gradient: {told}. The loss does not depend on them. Use them, freeze them with "
        "requires_grad_(False), or allow it with find_unused_parameters=True."
    )


def assign_grads(buckets: Sequence[Bucket], used: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Set `.grad` of each used parameter to its view of the bucket, and that of all others to None."""
    names = {name for name, _ in used}
    for bucket in buckets:
        for name, parameter, view in zip(bucket.names, bucket.parameters, bucket.views, strict=True):
            parameter.grad = view if name in names else None
