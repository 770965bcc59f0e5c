"""Exercises on buckets, a fixed bucket order, `no_sync`, and a DDP class, for notebook 04_ddp_from_scratch."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from ddp_tutorial.exercises import Answer, Exercise, WrongAnswerError, expect, numbers, on_ranks
from ddp_tutorial.processes.errors import lost_connection
from ddp_tutorial.world import World

# ------------------------------------------------------------------------------------------------ 1. split into buckets

_CUTS = (
    ([4, 4, 4, 4], 8, [[3, 2], [1, 0]]),
    ([10, 1, 1, 1, 6], 5, [[4], [3, 2, 1, 0]]),
    ([2, 3, 2, 4, 1], 6, [[4, 3, 2], [1, 0]]),
    ([1, 1, 9, 1, 1], 4, [[4, 3, 2], [1, 0]]),
    ([3, 2, 1], 100, [[2, 1, 0]]),
    ([5, 5, 5], 1, [[2], [1], [0]]),
)


def _test_assign(answer: Answer) -> str:
    for sizes, cap, true in _CUTS:
        got = [list(bucket) for bucket in answer(list(sizes), cap)]
        case = f"assign({sizes}, cap={cap}) must be {true}, got {got}."
        places = [place for bucket in got for place in bucket]
        missing = sorted(set(range(len(sizes))) - set(places))
        expect(
            not missing,
            f"{case} Parameter {missing and missing[0]} is not in a bucket, so its gradient is never averaged.",
        )
        expect(len(places) == len(sizes), f"{case} A parameter is in two buckets, or an index is out of range.")
        expect(all(got), f"{case} An empty bucket is never sent.")
        expect(
            places == list(reversed(range(len(sizes)))),
            f"{case} The backward pass reaches the last parameter first, so the first bucket must start with this "
            "parameter. Otherwise, every bucket waits for the end of the backward pass.",
        )
        if got != true:
            held = next(sum(sizes[i] for i in found) for found, right in zip(got, true, strict=False) if found != right)
            raise WrongAnswerError(
                f"{case} Fill a bucket until it contains at least {cap} bytes, then start the next bucket. "
                f"One of your buckets contains {held} bytes."
            )
    return "Every parameter is in one bucket, the last parameter is first, and all buckets except the last are full."


def _assign(sizes: Sequence[int], cap: int) -> list[list[int]]:
    buckets: list[list[int]] = []
    bucket: list[int] = []
    for index in reversed(range(len(sizes))):
        bucket.append(index)
        if sum(sizes[i] for i in bucket) >= cap:  # full
            buckets.append(bucket)
            bucket = []
    return [*buckets, bucket] if bucket else buckets  # the last bucket may be partly filled


def _assign_forward(sizes: Sequence[int], cap: int) -> list[list[int]]:
    last = len(sizes) - 1
    return [[last - index for index in bucket] for bucket in _assign(sizes[::-1], cap)]


def _assign_below_cap(sizes: Sequence[int], cap: int) -> list[list[int]]:
    buckets: list[list[int]] = []
    for index in reversed(range(len(sizes))):
        if not buckets or sum(sizes[i] for i in buckets[-1]) + sizes[index] > cap:
            buckets.append([])
        buckets[-1].append(index)
    return buckets


def _assign_only_full(sizes: Sequence[int], cap: int) -> list[list[int]]:
    return [bucket for bucket in _assign(sizes, cap) if sum(sizes[i] for i in bucket) >= cap]


def _assign_beyond_cap(sizes: Sequence[int], cap: int) -> list[list[int]]:
    return _assign(sizes, cap + 1)


def _assign_by_count(sizes: Sequence[int], cap: int) -> list[list[int]]:
    return _assign([1] * len(sizes), cap)


assign = Exercise(
    task=(
        "assign(sizes, cap): split parameters whose gradients have these sizes (in bytes) into buckets of at least cap "
        "bytes, starting with the last parameter. Return lists of indices."
    ),
    test=_test_assign,
    solution=_assign,
    wrong={
        "starts with the first parameter": _assign_forward,
        "closes a bucket before it is full": _assign_below_cap,
        "loses the last, partly filled bucket": _assign_only_full,
        "keeps filling a bucket that contains exactly cap bytes": _assign_beyond_cap,
        "counts parameters, not bytes": _assign_by_count,
    },
    hints=(
        "Iterate over reversed(range(len(sizes))), and append each index to one open bucket.",
        "After appending, if the open bucket contains at least cap bytes, close it and open a new one.",
        "At the end, return the open bucket too, but only if it is not empty.",
    ),
)

# --------------------------------------------------------------------------- 2. start all-reduces in the same order

_SIDE = 4  # each layer's weight is a 4 x 4 matrix in float32, which has 64 bytes


class _Branches(nn.Module):
    """A model with five layers. A forward pass can skip `left` and `right`, or run them in either order."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.left, self.right, self.last = (
            nn.Linear(_SIDE, _SIDE, bias=False) for _ in range(5)
        )
        if kind == "tied":
            self.last.weight = self.first.weight
        if kind == "frozen":
            self.middle.requires_grad_(False)

    def forward(self, x: torch.Tensor, branches: Sequence[str]) -> torch.Tensor:
        x = self.middle(self.first(x))
        for name in branches:
            x = x + torch.tanh(self.get_submodule(name)(x))
        return self.last(x)


def _inputs(rank: int, step: int, micro: int) -> torch.Tensor:
    return torch.randn(3, _SIDE, generator=torch.Generator().manual_seed(100 * step + 10 * rank + micro))


@dataclass
class _Bucket:
    """An element of the answer's argument `buckets`."""

    parameters: list[nn.Parameter]
    buffer: torch.Tensor
    missing: int
    work: Any = None


@dataclass
class _Log:
    """A record of the all-reduces that the answer starts on this rank during a step."""

    started: int = 0
    blocking: bool = False
    waited: bool = False
    in_backward: bool = True


class _Watched:
    """An asynchronous all-reduce handle that records whether `wait` is called during the backward pass."""

    def __init__(self, work: Any, log: _Log) -> None:
        self.work, self.log = work, log

    def wait(self, *timeout: Any) -> Any:
        self.log.waited |= self.log.in_backward
        return self.work.wait(*timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)


def _watch(log: _Log) -> Any:
    """Return a patch that makes `dist.all_reduce` record its calls in `log`."""
    all_reduce = dist.all_reduce

    def watched(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        log.started += 1
        work = all_reduce(tensor, *args, **options)
        log.blocking |= work is None
        return work and _Watched(work, log)

    return patch.object(dist, "all_reduce", watched)


def _run_in_turn(world: World, answer: Answer) -> None:
    """Check two steps with five layers in four buckets. Rank 1 runs two of the layers in reverse order."""
    model = _Branches()
    names = {parameter: name.removesuffix(".weight") for name, parameter in model.named_parameters()}
    first, middle, left, right, last = model.parameters()
    parts = [last], [right], [left], [middle, first]
    buckets = [_Bucket(part, torch.zeros(_SIDE * _SIDE * len(part)), len(part)) for part in parts]
    branches = [("left", "right"), ("right", "left")]
    inputs = [_inputs(rank, 0, 0) for rank in range(world.size)]
    losses = [model(inputs[rank], branches[rank]).square().mean() for rank in range(world.size)]
    gradients = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    log, complete = _Log(), []

    def on_gradient(parameter: nn.Parameter) -> None:
        complete.append(names[parameter])
        try:
            answer(world, buckets, parameter)
        except NotImplementedError:
            raise
        except (TypeError, AttributeError, RuntimeError, LookupError, ValueError, StopIteration) as error:
            if lost_connection(error):  # the other rank has exited, and reports the reason
                raise
            raise WrongAnswerError(
                f"When the gradients of {_listed(complete)} were complete, your function raised "
                f"{type(error).__name__}: {error}."
            ) from None
        _expect_started(world, log, complete, [[names[p] for p in bucket.parameters] for bucket in buckets])

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(on_gradient)
    for _ in range(2):
        model.zero_grad()
        complete.clear()
        log.started, log.in_backward = 0, True
        with _watch(log):
            model(inputs[world.rank], branches[world.rank]).square().mean().backward()
        log.in_backward = False
        for bucket in buckets:  # this is finish()
            expect(
                bucket.work is not None,
                "After the backward pass, bucket.work must be an all-reduce handle for which finish can wait, got None "
                f"for the bucket with {_listed([names[p] for p in bucket.parameters])}.",
            )
            bucket.work.wait()
            for parameter, piece in zip(bucket.parameters, bucket.buffer.split(_SIDE * _SIDE), strict=True):
                assert parameter.grad is not None
                parameter.grad.copy_(piece.view_as(parameter))
            bucket.missing, bucket.work = len(bucket.parameters), None
        for number, (parameter, name) in enumerate(names.items()):
            _compare(world, name, parameter, weights[number], [each[number] for each in gradients])


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _expect_started(world: World, log: _Log, complete: Sequence[str], parts: Sequence[Sequence[str]]) -> None:
    """Check that the expected number of all-reduces has started when the gradients in `complete` are complete."""
    expect(
        not log.blocking and not log.waited,
        "Your function must not wait for an all-reduce: waiting blocks the backward pass, so communication does not "
        "overlap with computation. Store the result of all_reduce(..., async_op=True) in bucket.work; finish waits for "
        "this handle.",
    )
    full = [set(part) <= set(complete) for part in parts]
    due = full.index(False) if False in full else len(full)
    expect(
        log.started == due,
        f"On rank {world.rank}, when the gradients of {_listed(complete)} were complete, {due} all-reduces must have "
        f"started, got {log.started}. The buckets contain {'; '.join(map(_listed, parts))}, in this order. Start each "
        "full bucket exactly once, but only after all earlier buckets.",
    )


def _compare(
    world: World, name: str, parameter: nn.Parameter, weight: torch.Tensor, gradients: Sequence[torch.Tensor]
) -> None:
    expect(torch.equal(parameter, weight), f"The weight of `{name}` changed, but only gradients may change.")
    got, mean = parameter.grad, torch.stack(list(gradients)).mean(0)
    assert got is not None
    if torch.allclose(got, mean, atol=1e-6):
        return
    if torch.allclose(got, mean * world.size, atol=1e-6):
        found = "this is the sum over the ranks; one division is missing"
    elif torch.allclose(got, mean / world.size, atol=1e-6):
        found = "the sum was divided twice"
    elif torch.allclose(got, weight) or torch.allclose(got, weight * world.size):
        found = "these are the weights. The hook receives the parameter, whose gradient is in .grad"
    elif torch.allclose(got, gradients[world.rank], atol=1e-6):
        found = "this is still the rank's own gradient"
    else:
        found = "this is neither the mean, nor the sum, nor the rank's own gradient. Check the order of the all-reduces"
    should, is_now = (numbers(gradient.flatten()[:2], digits=4) for gradient in (mean, got))
    raise WrongAnswerError(
        f"On rank {world.rank}, the gradient of `{name}` must start with {should}, got {is_now}: {found}."
    )


def _launch(run: Callable[[World, Answer], None], answer: Answer) -> None:
    stuck = "A rank waits forever for the other ranks. Every rank must start the same all-reduces."
    on_ranks(run, 2, answer, stuck=stuck, timeout=20)


def _test_in_turn(answer: Answer) -> str:
    _launch(_run_in_turn, answer)
    return (
        "Both ranks start the four buckets in the same order, although their gradients become ready in different "
        "orders. No all-reduce blocks the backward pass, and both ranks have the mean gradients in both steps."
    )


def _start(world: Any, bucket: Any) -> None:
    """Start a bucket's all-reduce. Only the wrong answers call this function."""
    torch.cat([p.grad.flatten() for p in bucket.parameters], out=bucket.buffer)
    bucket.buffer /= world.size
    bucket.work = dist.all_reduce(bucket.buffer, async_op=True)


def _count(buckets: Sequence[_Bucket], parameter: nn.Parameter) -> _Bucket:
    """Decrement `missing` of the parameter's bucket, and return the bucket."""
    [bucket] = [bucket for bucket in buckets if any(p is parameter for p in bucket.parameters)]
    bucket.missing -= 1
    return bucket


def _on_gradient(world: World, buckets: Any, parameter: nn.Parameter) -> None:
    for bucket in buckets:
        bucket.missing -= any(p is parameter for p in bucket.parameters)
    for bucket in buckets:
        if bucket.missing:
            break  # later buckets must wait, so that all ranks use the same order
        if bucket.work is None:
            torch.cat([p.grad.flatten() for p in bucket.parameters], out=bucket.buffer)
            bucket.buffer /= world.size
            bucket.work = dist.all_reduce(bucket.buffer, async_op=True)


def _waits_inside(world: World, buckets: Sequence[_Bucket], parameter: nn.Parameter) -> None:
    _on_gradient(world, buckets, parameter)
    for bucket in buckets:
        if bucket.work:
            bucket.work.wait()


def _is_not_asynchronous(world: World, buckets: Sequence[_Bucket], parameter: nn.Parameter) -> None:
    _count(buckets, parameter)
    for bucket in buckets:
        if bucket.missing:
            break
        if bucket.work is None:
            torch.cat([p.grad.flatten() for p in bucket.parameters], out=bucket.buffer)  # type: ignore[union-attr]
            bucket.buffer /= world.size
            bucket.work = dist.all_reduce(bucket.buffer)


def _sends_weights(world: World, buckets: Sequence[_Bucket], parameter: nn.Parameter) -> None:
    _count(buckets, parameter)
    for bucket in buckets:
        if bucket.missing:
            break
        if bucket.work is None:
            bucket.buffer.copy_(torch.cat([p.detach().flatten() for p in bucket.parameters]) / world.size)
            bucket.work = dist.all_reduce(bucket.buffer, async_op=True)


def _does_not_divide(world: World, buckets: Sequence[_Bucket], parameter: nn.Parameter) -> None:
    alone = SimpleNamespace(size=1)
    _on_gradient(alone, buckets, parameter)  # type: ignore[arg-type]


def _starts_as_they_fill(world: World, buckets: Sequence[_Bucket], parameter: nn.Parameter) -> None:
    bucket = _count(buckets, parameter)
    if bucket.missing == 0:
        _start(world, bucket)


def _starts_only_its_own(world: World, buckets: Sequence[_Bucket], parameter: nn.Parameter) -> None:
    """Start the all-reduce of the parameter's bucket, but not of full buckets that were waiting for this bucket."""
    bucket = _count(buckets, parameter)
    place = next(number for number, each in enumerate(buckets) if each is bucket)
    if bucket.missing == 0 and all(each.work is not None for each in buckets[:place]):
        _start(world, bucket)


def _starts_at_the_end(world: World, buckets: Sequence[_Bucket], parameter: nn.Parameter) -> None:
    _count(buckets, parameter)
    if not any(bucket.missing for bucket in buckets):
        for bucket in buckets:
            _start(world, bucket)


def _starts_again(world: World, buckets: Sequence[_Bucket], parameter: nn.Parameter) -> None:
    _count(buckets, parameter)
    for bucket in buckets:
        if bucket.missing:
            break
        _start(world, bucket)


def _forgets_the_work(world: World, buckets: Sequence[_Bucket], parameter: nn.Parameter) -> None:
    _on_gradient(world, buckets, parameter)
    for bucket in buckets:
        bucket.work = None


on_gradient = Exercise(
    task=(
        "on_gradient(world, buckets, parameter): this function is called when parameter.grad is complete. Start "
        "asynchronous all-reduces of full buckets in list order, and store each handle in bucket.work."
    ),
    test=_test_in_turn,
    solution=_on_gradient,
    wrong={
        "waits inside the hook": _waits_inside,
        "forgets async_op": _is_not_asynchronous,
        "sends the weights that the hook receives": _sends_weights,
        "forgets to divide": _does_not_divide,
        "starts buckets in the order in which they fill": _starts_as_they_fill,
        "leaves full buckets waiting forever": _starts_only_its_own,
        "starts everything after the last gradient": _starts_at_the_end,
        "starts a bucket again with every gradient": _starts_again,
        "does not keep the handle": _forgets_the_work,
    },
    hints=(
        "bucket.missing is the number of gradients that are not complete yet. Your function must decrement it. Find "
        "the bucket with any(p is parameter for p in bucket.parameters): == would compare the elements of the tensors.",
        "Iterate over the buckets in order. Stop at the first bucket that is not full, and skip buckets with a handle.",
        "torch.cat([p.grad.flatten() for p in bucket.parameters], out=bucket.buffer) fills the buffer. Divide the "
        "buffer by world.size, and set bucket.work = dist.all_reduce(bucket.buffer, async_op=True).",
    ),
)

# --------------------------------------------------------------------------------------------- 3. pause synchronization


class _Pausable:
    """A model with one weight w = 1 and the loss w * x. A hook averages the gradient x unless `sync` is False."""

    def __init__(self, world: World) -> None:
        self.world, self.sync = world, True
        self.weight = nn.Parameter(torch.ones(()))
        self.weight.register_post_accumulate_grad_hook(self._average)

    def _average(self, weight: nn.Parameter) -> None:
        if self.sync:
            assert weight.grad is not None
            dist.all_reduce(weight.grad)
            weight.grad /= self.world.size

    def backward(self, x: float) -> None:
        (self.weight * x).backward()

    def gradient(self) -> float:
        """Return the accumulated gradient, and set `.grad` to None."""
        assert self.weight.grad is not None
        value, self.weight.grad = float(self.weight.grad), None
        return value


def _pause(answer: Answer, model: _Pausable) -> AbstractContextManager[None]:
    """Return the answer's context manager. Convert a generator function to a context manager."""
    made = answer(model)
    if isinstance(made, AbstractContextManager):
        return made
    expect(isinstance(made, Iterator), "Your function must contain a yield. Put the yield where the block should run.")
    return contextmanager(lambda: made)()


def _run_pause(world: World, answer: Answer) -> None:
    model, pause = _Pausable(world), partial(_pause, answer)
    mine, mean = 1.0 + world.rank, 1.5
    with pause(model):
        model.backward(mine)
        expect(
            float(model.weight.grad or 0) == mine,
            f"Inside the block, rank {world.rank} must keep its own gradient {mine}, got {model.weight.grad}: do "
            "not start an all-reduce.",
        )
        with pause(model):
            model.backward(mine)
        expect(
            not model.sync,
            "After a nested block, model.sync must be False, its value before the nested block, got True. The outer "
            "block is still active.",
        )
    model.backward(mine)
    _expect_gradient(world, model, 3 * mean, "After two micro-batches inside the block and one after it")

    interrupted = False
    try:
        with pause(model):
            model.backward(mine)
            raise KeyError("the sample cannot be read")
    except KeyError:
        interrupted = True
    expect(interrupted, "An exception inside the block must propagate; your function swallowed it.")
    model.weight.grad = None
    model.backward(mine)
    _expect_gradient(world, model, mean, "In the step after an exception inside the block")


def _expect_gradient(world: World, model: _Pausable, true: float, when: str) -> None:
    got = model.gradient()
    expect(
        abs(got - true) < 1e-6,
        f"{when}, the gradient on rank {world.rank} must be {true:g}, the mean over the ranks, got {got:g}. "
        f"model.sync is {model.sync}"
        + ("." if model.sync else ": from now on, the ranks train independently, without an error."),
    )


def _test_pause(answer: Answer) -> str:
    _launch(_run_pause, answer)
    return "All-reduces run only after the block, the gradient sum is averaged, and exceptions restore model.sync."


def _no_sync(model: Any) -> Iterator[None]:
    before, model.sync = model.sync, False
    try:
        yield
    finally:  # also after an exception
        model.sync = before


def _not_after_an_exception(model: _Pausable) -> Iterator[None]:
    before, model.sync = model.sync, False
    yield
    model.sync = before


def _always_true_again(model: _Pausable) -> Iterator[None]:
    model.sync = False
    try:
        yield
    finally:
        model.sync = True


def _never_ends(model: _Pausable) -> Iterator[None]:
    model.sync = False
    yield


def _swallows(model: _Pausable) -> Iterator[None]:
    before, model.sync = model.sync, False
    try:
        yield
    except Exception:
        pass
    finally:
        model.sync = before


def _does_not_pause(model: _Pausable) -> Iterator[None]:
    yield


no_sync = Exercise(
    task=(
        "no_sync(model): set model.sync to False, yield once, and always restore the previous value, even after an "
        "exception. (The check turns your function into a context manager.)"
    ),
    test=_test_pause,
    solution=_no_sync,
    wrong={
        "does not restore model.sync after an exception": _not_after_an_exception,
        "sets model.sync to True instead of the previous value": _always_true_again,
        "never restores model.sync": _never_ends,
        "swallows the exception": _swallows,
        "does not pause": _does_not_pause,
    },
    hints=(
        "Code before the yield runs before the block; code after it runs after the block. If the block raises, so does "
        "the yield.",
        "Remember the previous value of model.sync: blocks can be nested.",
        "Put the yield in a try block, and restore the previous value in the finally block.",
    ),
)

# -------------------------------------------------------------------------------------- 4. a longer exercise: the class

_BOTH = ("left", "right")
_Passes = tuple[tuple[str, ...], ...]  # the branches that each micro-batch of a step runs


class _Case(NamedTuple):
    """A test case. `ranks[rank]` lists each micro-batch's branches. All micro-batches except the last use `no_sync`."""

    story: str
    ranks: tuple[_Passes, _Passes]
    kind: str = ""
    cap: int = 100  # bytes: two layers fill a bucket
    sent: int | None = None  # number of all-reduces that backward must start


_CASES = (
    _Case("The model has five layers of 64 bytes, and the cap is 100 bytes", ((_BOTH,), (_BOTH,)), sent=3),
    _Case("The first and the last layer share their weight (tied)", ((_BOTH,), (_BOTH,)), "tied", sent=2),
    _Case("The second layer is frozen (requires_grad=False)", ((_BOTH,), (_BOTH,)), "frozen", sent=2),
    _Case(
        "Every layer is a bucket, and rank 1 runs `left` and `right` in reverse order",
        ((_BOTH,), (_BOTH[::-1],)),
        cap=1,
        sent=5,
    ),
    _Case("Rank 1 does not use the layer `left`", ((_BOTH,), (("right",),))),
    _Case("No rank uses the layer `left`", ((("right",),), (("right",),))),
    _Case("There are three micro-batches, and the first two run in no_sync", ((_BOTH,) * 3, (_BOTH,) * 3), sent=3),
    _Case("Only the first of two micro-batches, which runs in no_sync, uses `left`", ((_BOTH, ("right",)),) * 2),
)


def _pass(model: nn.Module, rank: int, step: int, micro: int, branches: Sequence[str]) -> None:
    model(_inputs(rank, step, micro), branches).square().mean().backward()


def _gradients_of_one_process(case: _Case, model: nn.Module, rank: int, step: int) -> dict[str, torch.Tensor | None]:
    """Return the gradients that plain torch computes for the micro-batches of `rank`."""
    alone = _Branches(case.kind)
    alone.load_state_dict(model.state_dict())
    for micro, branches in enumerate(case.ranks[rank]):
        _pass(alone, rank, step, micro, branches)
    return {name: parameter.grad for name, parameter in alone.named_parameters()}


def _run_class(world: World, answer: Answer) -> None:
    """Check three steps of each case. Gradients are zero at the start of step 2, and None at the start of step 3."""
    for case in _CASES:
        print(f"Case: {case.story}.")  # the report about a hanging rank contains the rank's last printed line
        try:
            _run_case(world, answer, case)
        except NotImplementedError:
            raise
        except (TypeError, AttributeError, RuntimeError, LookupError, ValueError) as error:
            if lost_connection(error):  # the other rank has exited, and reports the reason
                raise
            raise WrongAnswerError(f"{case.story}. Your class raised {type(error).__name__}: {error}") from None
    _run_interrupted(world, answer)


def _run_case(world: World, answer: Answer, case: _Case) -> None:
    model, log = _Branches(case.kind), _Log()
    parallel = answer(world, model, case.cap)
    passes = case.ranks[world.rank]
    for step in range(3):
        model.zero_grad(set_to_none=step != 1)
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        log.started, log.in_backward = 0, True
        with _watch(log):
            for micro, branches in enumerate(passes):
                last = micro == len(passes) - 1
                with nullcontext() if last else parallel.no_sync():
                    _pass(model, world.rank, step, micro, branches)
                expect(
                    last or not log.started,
                    f"{case.story}. A backward pass in no_sync must not start all-reduces, but only accumulate this "
                    f"rank's gradients, got {log.started} all-reduces.",
                )
            log.in_backward = False
            _expect_in_flight(case, log)
            parallel.finish()
        for name, parameter in model.named_parameters():
            expect(torch.equal(parameter, before[name]), f"{case.story}. The weight of `{name}` must not change.")
        everyones = [_gradients_of_one_process(case, model, rank, step) for rank in range(world.size)]
        for name, parameter in model.named_parameters():
            _expect_mean(
                world, f"{case.story}. In step {step + 1}", name, parameter, [each[name] for each in everyones]
            )
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(0.1 * parameter.grad)


def _expect_in_flight(case: _Case, log: _Log) -> None:
    expect(
        not log.blocking and not log.waited,
        f"{case.story}. A hook must not wait for its all-reduce: waiting blocks the backward pass, so communication "
        "does not overlap with computation. Start the all-reduce with async_op=True, and wait in finish.",
    )
    expect(
        case.sent is None or log.started == case.sent,
        f"{case.story}. The last micro-batch's backward pass must start {case.sent} all-reduces, one for each bucket "
        f"as soon as the bucket is full, got {log.started}.",
    )


def _expect_mean(
    world: World, when: str, name: str, parameter: nn.Parameter, everyones: Sequence[torch.Tensor | None]
) -> None:
    if not parameter.requires_grad:
        expect(
            parameter.grad is None or not parameter.grad.any(),
            f"{when}, the frozen weight `{name}` must not have a gradient.",
        )
        return
    filled = [torch.zeros_like(parameter) if each is None else each for each in everyones]
    mean, own, got = torch.stack(filled).mean(0), filled[world.rank], parameter.grad
    if got is None:
        expect(
            all(each is None for each in everyones),
            f"{when}, rank {world.rank} must have the mean gradient for `{name}`, got None. The other rank has a "
            "gradient, and a missing gradient counts as zero.",
        )
        return
    if torch.allclose(got, mean, atol=1e-6):
        return
    if torch.allclose(got, mean * world.size, atol=1e-6):
        found = "this is the sum over the ranks; one division is missing"
    elif torch.allclose(got, mean / world.size, atol=1e-6):
        found = "the sum was divided twice"
    elif torch.allclose(got, own, atol=1e-6):
        found = "this is still the rank's own gradient; the bucket was not sent, or not copied back"
    elif torch.allclose(got, own / world.size, atol=1e-6):
        found = "this is the rank's own gradient divided by the number of ranks; the bucket was not all-reduced"
    else:
        found = (
            "this is neither the mean, nor the sum, nor the rank's own gradient. Check for state left over from the "
            "previous step, and that all ranks send the same buckets in the same order"
        )
    should, is_now = (numbers(gradient.flatten()[:2], digits=4) for gradient in (mean, got))
    raise WrongAnswerError(
        f"{when}, the gradient of `{name}` on rank {world.rank} must start with {should}, got {is_now}: {found}."
    )


def _run_interrupted(world: World, answer: Answer) -> None:
    model = _Branches()
    parallel = answer(world, model, 100)
    interrupted = False
    try:
        with parallel.no_sync():
            raise KeyError("the sample cannot be read")
    except KeyError:
        interrupted = True
    expect(interrupted, "An exception inside no_sync must propagate; your no_sync swallowed it.")
    case, log = _Case("The step after an exception inside no_sync", ((_BOTH,), (_BOTH,)), sent=3), _Log()
    with _watch(log):
        _pass(model, world.rank, 0, 0, _BOTH)
        log.in_backward = False
        _expect_in_flight(case, log)
        parallel.finish()
    everyones = [_gradients_of_one_process(case, model, rank, 0) for rank in range(world.size)]
    for name, parameter in model.named_parameters():
        gradients = [each[name] for each in everyones]
        _expect_mean(world, "In the step after an exception inside no_sync", name, parameter, gradients)


def _test_class(answer: Answer) -> str:
    stuck = (
        "A rank waits forever. The last line printed by the ranks names the case. Every rank must start the same "
        "all-reduces, even if some of the rank's gradients are missing."
    )
    on_ranks(_run_class, 2, answer, stuck=stuck, timeout=25)
    return (
        f"In {len(_CASES)} cases of three steps on two ranks, buckets of the right size are sent during the backward "
        "pass, and the gradients equal the gradients of one process. The check also covers an exception in no_sync."
    )


class _Buckets:
    def __init__(self, world: Any, model: nn.Module, cap: int) -> None:
        self.world, self.sync = world, True
        self.buckets: list[list[nn.Parameter]] = [[]]
        for parameter in [p for p in model.parameters() if p.requires_grad][::-1]:  # contains a tied weight once
            if sum(p.nbytes for p in self.buckets[-1]) >= cap:  # full: open a new bucket
                self.buckets.append([])
            self.buckets[-1].append(parameter)
            parameter.register_post_accumulate_grad_hook(self.on_gradient)
        self.begin()

    def begin(self) -> None:
        self.arrived: set[nn.Parameter] = set()
        self.sent: list[tuple[torch.Tensor, dist.Work]] = []

    def on_gradient(self, parameter: nn.Parameter) -> None:
        if self.sync:
            self.arrived.add(parameter)
            self.send()

    def send(self, rest: bool = False) -> None:
        """Start the all-reduces of the full buckets in order. If `rest` is true, start all remaining all-reduces."""
        for bucket in self.buckets[len(self.sent) :]:
            if not rest and not self.arrived.issuperset(bucket):
                return  # later buckets must wait, so that all ranks use the same order
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
            buffer = torch.cat([grad.flatten() for grad in grads]) / self.world.size
            self.sent.append((buffer, dist.all_reduce(buffer, async_op=True)))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before

    def finish(self) -> None:
        self.send(rest=True)
        for bucket, (buffer, work) in zip(self.buckets, self.sent, strict=True):
            work.wait()
            pieces = buffer.split([p.numel() for p in bucket])
            for parameter, piece in zip(bucket, pieces, strict=True):
                parameter.grad = piece.view_as(parameter)
        self.begin()


class _DoesNotDivide(_Buckets):
    def finish(self) -> None:
        super().finish()
        for parameter in [p for bucket in self.buckets for p in bucket]:
            assert parameter.grad is not None
            parameter.grad *= self.world.size


class _NothingBeforeFinish(_Buckets):
    def on_gradient(self, parameter: nn.Parameter) -> None:
        pass


class _WaitsInTheHook(_Buckets):
    def send(self, rest: bool = False) -> None:
        super().send(rest)
        for _, work in self.sent:
            work.wait()


class _OneEach(_Buckets):
    def __init__(self, world: Any, model: nn.Module, cap: int) -> None:
        super().__init__(world, model, 1)


class _ListsTiedOnesTwice(_Buckets):
    """A variant that iterates over the modules, and therefore visits a tied weight twice."""

    def __init__(self, world: Any, model: nn.Module, cap: int) -> None:
        listed = [p for module in model.modules() for p in module.parameters(recurse=False)]
        super().__init__(world, SimpleNamespace(parameters=lambda: listed), cap)  # type: ignore[arg-type]


class _HooksWhatIsFrozen(_Buckets):
    def __init__(self, world: Any, model: nn.Module, cap: int) -> None:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: None)
        super().__init__(world, model, cap)


class _WaitsForWhatIsFrozen(_Buckets):
    """A variant that puts frozen weights into the first bucket, which therefore never fills."""

    def __init__(self, world: Any, model: nn.Module, cap: int) -> None:
        super().__init__(world, model, cap)
        self.buckets[0] += [p for p in model.parameters() if not p.requires_grad]


class _SendsOnlyWhatIsFull(_Buckets):
    def finish(self) -> None:
        for bucket, (buffer, work) in zip(self.buckets, self.sent, strict=False):
            work.wait()
            for parameter, piece in zip(bucket, buffer.split([p.numel() for p in bucket]), strict=True):
                parameter.grad = piece.view_as(parameter)
        self.begin()


class _WaitsForAllGradients(_Buckets):
    """A variant that waits in `finish` until every gradient has arrived, although some gradients never arrive."""

    def finish(self) -> None:
        while len(self.sent) < len(self.buckets):
            time.sleep(0.01)
        super().finish()


class _AsTheyFill(_Buckets):
    """A variant that sends a bucket when it is full, even if an earlier bucket is not full."""

    def begin(self) -> None:
        super().begin()
        self.order: list[int] = []

    def send(self, rest: bool = False) -> None:
        for number, bucket in enumerate(self.buckets):
            if number not in self.order and (rest or self.arrived.issuperset(bucket)):
                self.order.append(number)
                grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
                buffer = torch.cat([grad.flatten() for grad in grads]) / self.world.size
                self.sent.append((buffer, dist.all_reduce(buffer, async_op=True)))

    def finish(self) -> None:
        self.send(rest=True)
        self.sent = [self.sent[self.order.index(number)] for number in range(len(self.buckets))]
        super().finish()


class _ForgetsTheNextStep(_Buckets):
    def finish(self) -> None:
        kept = self.arrived
        super().finish()
        self.arrived = kept


class _SendsInNoSync(_Buckets):
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        yield


class _LosesEarlierMicroBatches(_Buckets):
    """A variant that treats a gradient as zero if it did not arrive in the last backward pass."""

    def send(self, rest: bool = False) -> None:
        if rest:
            for parameter in {p for bucket in self.buckets for p in bucket} - self.arrived:
                parameter.grad = None
        super().send(rest)


class _StaysInNoSync(_Buckets):
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.sync = False
        yield
        self.sync = True


bucket_ddp = Exercise(
    task=(
        "Write a class with __init__(world, model, cap) that averages the gradients in buckets of at least cap bytes, "
        "sent during the backward pass. All micro-batches except the last run inside no_sync(). finish() is called "
        "after the last backward pass."
    ),
    test=_test_class,
    solution=_Buckets,
    wrong={
        "does not divide the sum": _DoesNotDivide,
        "sends everything in finish": _NothingBeforeFinish,
        "waits inside the hook": _WaitsInTheHook,
        "sends every gradient separately": _OneEach,
        "puts a tied weight into two buckets": _ListsTiedOnesTwice,
        "registers a hook on a frozen weight": _HooksWhatIsFrozen,
        "waits for the gradient of a frozen weight": _WaitsForWhatIsFrozen,
        "never sends a bucket that is not full": _SendsOnlyWhatIsFull,
        "waits until every gradient has arrived": _WaitsForAllGradients,
        "sends buckets in the order in which they fill": _AsTheyFill,
        "does not reset the arrived gradients after a step": _ForgetsTheNextStep,
        "sends inside no_sync": _SendsInNoSync,
        "treats the gradient of an earlier micro-batch as zero": _LosesEarlierMicroBatches,
        "stays in no_sync after an exception": _StaysInNoSync,
    },
    hints=(
        "Combine exercises 1 to 3. model.parameters() contains a tied weight once. Skip weights with "
        "requires_grad=False.",
        "Keep a set of the parameters whose gradients have arrived. After each arrival, send the full buckets in "
        "order, and stop at the first bucket that is not full, so that all ranks send in the same order.",
        "In finish, send the remaining buckets, with zeros if p.grad is None. Wait for all buckets, copy the averages "
        "back, and reset the state. A gradient from an earlier micro-batch stays in p.grad, even if it does not arrive "
        "in the last backward pass.",
    ),
)
