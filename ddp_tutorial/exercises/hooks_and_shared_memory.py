"""Exercise of the deep dive hooks_and_shared_memory: a top-k hook with error feedback."""

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
    """Model with two vectors, which are in one bucket at first, and then in two. Their gradients are the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.zeros(size)) for size in _SIZES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.first * x).sum() + (self.second * y).sum()


def _gradients(rank: int, step: int) -> torch.Tensor:
    """Return the gradients of both vectors on a rank, in the order of the bucket of the first step."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(sum(_SIZES), generator=generator) if step < _TRAINED else torch.zeros(sum(_SIZES))


def _largest(gradient: torch.Tensor, *, signed: bool = False) -> torch.Tensor:
    """Return `gradient` with all but its largest numbers replaced by zeros."""
    places = (gradient if signed else gradient.abs()).topk(int(_FRACTION * len(gradient))).indices
    return torch.zeros_like(gradient).index_put((places,), gradient[places])


def _run_topk(world: World, answer: Answer) -> None:
    advice = (
        ". After the first backward pass DDP rebuilds its buckets, so a bucket with the same index contains different "
        "parameters. Store what was not sent for each parameter: bucket.parameters() and bucket.gradients()."
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
        f"The first step is right. Then {_TRAINED - 1} more steps had random gradients, and {_FLUSHED} steps had "
        f"gradients of zero, which is enough to send everything that was left out. But in the sum over all steps, "
        f"{wrong} of {len(exact)} numbers differ from the sum of the exact averages, by up to "
        f"{float((received - exact).abs().max()):.2g}. Add what a step does not send to the next gradient of the same "
        "parameter, and keep only what is still not sent.",
    )
    watched.expect_overlap()


def _expect_sparse_mean(watched: WatchedHook, averaged: torch.Tensor) -> None:
    """Check the first step: one bucket, and nothing was left out before."""
    dense = averaged.nbytes
    expect(bool(watched.sent), "Your hook must send with dist.all_gather or dist.all_reduce, but it used neither.")
    expect(
        watched.nbytes <= 0.75 * dense,
        f"The bucket has {dense} bytes, and your hook sent {watched.nbytes}. Send only the selected numbers and their "
        "places in the bucket.",
    )
    gradients = [_gradients(rank, 0) for rank in range(watched.world.size)]
    exact = torch.stack([_largest(gradient) for gradient in gradients]).mean(0)
    if torch.allclose(averaged, exact, atol=1e-6):
        return
    own = _largest(gradients[watched.world.rank])
    if torch.allclose(averaged, exact * watched.world.size, atol=1e-6):
        found = "This is the sum over the ranks; divide it by the world size"
    elif torch.allclose(averaged, torch.stack([_largest(each, signed=True) for each in gradients]).mean(0), atol=1e-6):
        found = "Your hook selects the largest signed numbers; select by absolute value"
    elif torch.equal(averaged.ne(0), own.ne(0)):
        found = (
            "The result is nonzero only where this rank selected. The ranks select different places, so the values "
            "cannot be summed with an all-reduce: gather the values and the places of all ranks"
        )
    else:
        found = f"{int(averaged.ne(0).sum())} numbers are nonzero, expected {int(exact.ne(0).sum())}"
    raise WrongAnswerError(
        f"On rank {watched.world.rank}, the first averaged gradient is wrong. It must be the mean over the ranks of "
        f"each rank's {_FRACTION:.0%} largest numbers. {found}."
    )


def _test_topk(answer: Answer) -> str:
    stuck = "A rank waits forever. Does the future that you return ever get a value?"
    on_ranks(_run_topk, 2, answer, stuck=stuck, timeout=40)
    return "The hook sends only the largest numbers, and in the sum over all steps nothing is lost."


def _topk_hook(state: dict[Any, Any], bucket: dist.GradBucket) -> Future[torch.Tensor]:
    buffer, size = bucket.buffer(), dist.get_world_size()
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        if parameter in state:
            gradient.add_(state[parameter])  # in place: it is a view of the buffer
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
    """Return the solution with these mistakes."""

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
        'topk_hook(state, bucket): let state["fraction"] of the numbers in the bucket be k. Send only the k numbers of '
        "largest absolute value and their places, average them over the ranks, and return a future of the averaged "
        "bucket. Add what a step does not send to the next gradient; `state` is a dict that you may use for this."
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
        "Each rank selects different places, so an all-reduce of the values would add unrelated numbers. "
        "dist.all_gather collects the values and the places of all ranks.",
        "tensor.abs().topk(k).indices are the places. places.int().view(torch.float32) reinterprets them, so that "
        "values and places fit in one message.",
        "bucket.gradients() are views of bucket.buffer(), in the order of bucket.parameters(). Store what was not "
        "sent for each parameter, because DDP rebuilds its buckets after the first backward pass.",
        "Keep the list of received messages, and use it in the function that you pass to .get_future().then(...).",
    ),
)
