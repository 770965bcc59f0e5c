"""Exercise on a top-k hook with error feedback, for the `hooks_and_shared_memory` deep dive."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ddp_tutorial.exercises import Answer, Exercise, WrongAnswerError, expect, on_ranks
from ddp_tutorial.exercises.inside_torch_ddp import WatchedHook
from ddp_tutorial.world import World

_FRACTION, _SIZES, _TRAINED, _FLUSHED = 0.25, (12, 20), 3, 5


class _TwoVectors(nn.Module):
    """A model with two weight vectors, for which DDP uses one bucket in step 1 and two buckets in later steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.zeros(size)) for size in _SIZES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.first * x).sum() + (self.second * y).sum()


def _gradients(rank: int, step: int) -> torch.Tensor:
    """Return both vectors' gradients on a rank as one tensor, in the order of the first step's bucket."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(sum(_SIZES), generator=generator) if step < _TRAINED else torch.zeros(sum(_SIZES))


def _largest(gradient: torch.Tensor, *, signed: bool = False) -> torch.Tensor:
    """Return `gradient` with all but the largest elements replaced by zeros."""
    places = (gradient if signed else gradient.abs()).topk(int(_FRACTION * len(gradient))).indices
    return torch.zeros_like(gradient).index_put((places,), gradient[places])


def _run_topk(world: World, answer: Answer) -> None:
    advice = (
        ". After the first backward pass, DDP rebuilds its buckets, so a bucket with the same index contains "
        "different parameters. Store the unsent elements per parameter, with bucket.parameters() and "
        "bucket.gradients()."
    )
    model, watched, state = _TwoVectors(), WatchedHook(world, answer, advice), {"fraction": _FRACTION}
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-5)
    ddp.register_comm_hook(state, watched.hook)
    received = torch.zeros(sum(_SIZES))
    for step in range(_TRAINED + _FLUSHED):
        ddp.zero_grad()
        dist.barrier()
        ddp(*_gradients(world.rank, step).split(_SIZES)).backward()
        averaged = torch.cat([vector.grad for vector in (model.first, model.second) if vector.grad is not None])
        received += averaged
        if step == 0:
            _expect_sparse_mean(watched, averaged)
    each = [[_gradients(rank, step) for step in range(_TRAINED)] for rank in range(world.size)]
    exact = sum((torch.stack(gradients).sum(0) for gradients in each), torch.zeros(sum(_SIZES))) / world.size
    wrong = int((received - exact).abs().gt(1e-4).sum())
    expect(
        not wrong,
        f"The first step is right. {_TRAINED - 1} more steps with random gradients and {_FLUSHED} steps with zero "
        f"gradients followed, which are enough to send all elements. However, in the sum over all steps, {wrong} of "
        f"{len(exact)} elements differ from the sum of the exact averages, by up to "
        f"{float((received - exact).abs().max()):.2g}. Add the elements that a step does not send to the next "
        "gradient of the same parameter, and keep only the elements that remain unsent.",
    )
    watched.expect_overlap()


def _expect_sparse_mean(watched: WatchedHook, averaged: torch.Tensor) -> None:
    """Check the first step, which has one bucket and no unsent elements from earlier steps."""
    dense = averaged.nbytes
    expect(bool(watched.sent), "Your hook must call dist.all_gather or dist.all_reduce, but called neither.")
    expect(
        watched.nbytes <= 0.75 * dense,
        f"Your hook sent {watched.nbytes} bytes for a bucket of {dense} bytes. Send only the selected elements and "
        "their indices in the bucket.",
    )
    gradients = [_gradients(rank, 0) for rank in range(watched.world.size)]
    exact = torch.stack([_largest(gradient) for gradient in gradients]).mean(0)
    if torch.allclose(averaged, exact, atol=1e-6):
        return
    own = _largest(gradients[watched.world.rank])
    if torch.allclose(averaged, exact * watched.world.size, atol=1e-6):
        found = "This is the sum over the ranks; divide by the world size"
    elif torch.allclose(averaged, torch.stack([_largest(each, signed=True) for each in gradients]).mean(0), atol=1e-6):
        found = "Your hook selects the largest signed values; select by absolute value"
    elif torch.equal(averaged.ne(0), own.ne(0)):
        found = (
            "The result is nonzero only at the indices that this rank selected. The ranks select different indices, "
            "so an all-reduce cannot sum the values. Gather the values and the indices of all ranks"
        )
    else:
        found = f"The result must contain {int(exact.ne(0).sum())} nonzero elements, got {int(averaged.ne(0).sum())}"
    raise WrongAnswerError(
        f"On rank {watched.world.rank}, the first averaged gradient is wrong. Each rank must send only the largest "
        f"{_FRACTION:.0%} of its elements by absolute value. The result must be the average over the ranks, counting "
        f"elements that a rank did not send as zeros. {found}."
    )


def _test_topk(answer: Answer) -> str:
    stuck = "A rank waits forever. Make sure that the returned future completes."
    on_ranks(_run_topk, 2, answer, stuck=stuck, timeout=40)
    return "The hook sends only the largest elements, and no gradient is lost in the sum over all steps."


def _topk_hook(state: dict[Any, Any], bucket: dist.GradBucket) -> Future[torch.Tensor]:
    buffer, size = bucket.buffer(), dist.get_world_size()
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        if parameter in state:
            gradient.add_(state[parameter])  # in place, because `gradient` is a view of the buffer
    places = buffer.abs().topk(int(state["fraction"] * buffer.numel())).indices
    message = torch.cat([buffer[places], places.int().view(torch.float32)])  # one message instead of two
    buffer[places] = 0  # the rest is not sent in this step
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        state[parameter] = gradient.clone()
    messages = [torch.empty_like(message) for _ in range(size)]

    def average(done: Future[Any]) -> torch.Tensor:
        done.value()  # raises if the all-gather failed
        buffer.zero_()
        for received in messages:
            values, indices = received.chunk(2)
            buffer.index_add_(0, indices.view(torch.int32), values / size)
        return buffer

    return dist.all_gather(messages, message, async_op=True).get_future().then(average)


def _topk_with(
    key: str = "parameter",
    divide: bool = True,
    signed: bool = False,
    keep: str = "rest",
    send: str = "sparse",
    wait: bool = False,
) -> Answer:
    """Return the solution with the given mistakes."""

    def answer(state: dict[Any, Any], bucket: dist.GradBucket) -> Future[torch.Tensor]:
        buffer, size = bucket.buffer(), dist.get_world_size()
        keys = list(bucket.parameters()) if key == "parameter" else [bucket.index()]
        pieces = list(bucket.gradients()) if key == "parameter" else [buffer]
        for each, piece in zip(keys, pieces, strict=True):
            if each in state:
                piece.add_(state[each])
        magnitude = buffer if signed else buffer.abs()
        places = magnitude.topk(int(state["fraction"] * buffer.numel())).indices
        values, all_of_it = buffer[places], buffer.clone()
        buffer[places] = 0
        for each, piece in zip(keys, pieces, strict=True):
            if keep != "nothing":
                state[each] = piece.clone()
        if keep == "everything":
            for each, piece in zip(bucket.parameters(), all_of_it.split([g.numel() for g in pieces]), strict=True):
                state[each] = piece.clone()
        message = torch.cat([values, places.int().view(torch.float32)])
        if send == "dense":
            message = torch.zeros_like(buffer).index_put((places,), values)
        elif send == "values":
            message = values
        messages = [torch.empty_like(message) for _ in range(size)]
        work = dist.all_gather(messages, message, async_op=True)
        if wait:
            work.wait()

        def average(done: Future[Any]) -> torch.Tensor:
            done.value()
            buffer.zero_()
            for received in messages:
                if send == "dense":
                    buffer.add_(received / size)
                    continue
                indices = places if send == "values" else received.chunk(2)[1].view(torch.int32)
                buffer.index_add_(0, indices, received[: len(places)] / (size if divide else 1))
            return buffer

        return work.get_future().then(average)

    return answer


topk_hook = Exercise(
    task=(
        'topk_hook(state, bucket): let k be state["fraction"] times the number of elements in the bucket. Send only '
        "the k elements with the largest absolute values, and their indices. Average them over the ranks, and "
        "return a future of the averaged bucket. Add the unsent elements to the next gradient. `state` is a dict in "
        "which you may store them."
    ),
    test=_test_topk,
    solution=_topk_hook,
    wrong={
        "forgets what it does not send": _topk_with(keep="nothing"),
        "keeps what it has sent as well": _topk_with(keep="everything"),
        "keeps the rest by the index of the bucket": _topk_with(key="index"),
        "selects the largest signed numbers": _topk_with(signed=True),
        "sums instead of averaging": _topk_with(divide=False),
        "sends a bucket full of zeros": _topk_with(send="dense"),
        "sends the values without their places": _topk_with(send="values"),
        "waits inside the hook": _topk_with(wait=True),
    },
    hints=(
        "Each rank selects different indices, so an all-reduce of the values would sum unrelated elements. "
        "dist.all_gather collects the values and the indices of all ranks.",
        "Let indices = tensor.abs().topk(k).indices. indices.int().view(torch.float32) reinterprets the bits, so "
        "that values and indices fit in one message.",
        "bucket.gradients() returns views of bucket.buffer(), in the order of bucket.parameters(). Store the unsent "
        "elements per parameter, because DDP rebuilds its buckets after the first backward pass.",
        "Keep the list of received messages, and use it in the function that you pass to .get_future().then(...).",
    ),
)
