"""Exercises on `ddp.module`, a bfloat16 hook, and a faulty DDP script, for notebook 05_inside_torch_ddp."""

import time
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from ddp_tutorial.collectives import all_gather
from ddp_tutorial.exercises import Answer, Exercise, WrongAnswerError, expect, numbers, on_ranks
from ddp_tutorial.world import World

# ------------------------------------------------------------------------------------------------- 1. ddp or ddp.module

Evaluated = tuple[float, dict[str, torch.Tensor]] | None


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def _not_alone(ddp: DistributedDataParallel, _: object) -> None:
    """Raise an error if rank 0 evaluates through `ddp`. This function is a forward pre-hook of `ddp`."""
    if not ddp.training or not torch.is_grad_enabled():
        raise WrongAnswerError(
            "The evaluation called ddp(...). The model contains BatchNorm buffers, which ddp broadcasts before "
            "the forward pass. All ranks must enter this broadcast, but only rank 0 did. Evaluate through ddp.module "
            "instead."
        )


def _run_train_and_evaluate(world: World, answer: Answer) -> None:
    model = _model()
    ddp = DistributedDataParallel(model)
    ddp.register_forward_pre_hook(_not_alone)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(world.rank)
    for step in (1, 2):
        x, validation = torch.randn(8, 2, generator=generator) + world.rank, torch.randn(5, 2, generator=generator)
        before = model.get_parameter("0.weight").detach().clone()
        result = answer(world, ddp, optimizer, x, validation)
        _expect_in_step(world, model, before, step)
        _expect_evaluated(world, model, validation, result)
        expect(
            ddp.training and model.training,
            "The model is still in evaluation mode at the next training step: switch back with .train().",
        )


def _expect_in_step(world: World, model: nn.Sequential, before: torch.Tensor, step: int) -> None:
    weight = model.get_parameter("0.weight").detach()
    everyones = all_gather(world, (weight.tolist(), bool((weight != before).any())))
    expect(all(moved for _, moved in everyones), f"In step {step}, the weights did not change. Call optimizer.step().")
    apart = max(abs(weight - torch.tensor(other)).max().item() for other, _ in everyones)
    expect(
        apart == 0,
        f"After step {step}, the ranks' weights differ by up to {apart:.4f}, because the gradients were not "
        "averaged. DDP averages gradients only after a forward pass through ddp(x); ddp.module(x) bypasses DDP.",
    )


def _expect_evaluated(world: World, model: nn.Sequential, validation: torch.Tensor, result: Any) -> None:
    if not world.is_main:
        expect(result is None, f"Rank {world.rank} must return None, got {result!r}.")
        return
    expect(
        isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], float) and isinstance(result[1], dict),
        f"Rank 0 must return (loss, weights), a float and a state dict, got {result!r}.",
    )
    loss, weights = result
    prefixed = [key for key in weights if key.startswith("module.")]
    expect(
        not prefixed,
        f"A plain model cannot load these weights, because it has no key {prefixed and prefixed[0]!r}. DDP adds the "
        "prefix 'module.'. Return ddp.module.state_dict() instead.",
    )
    bare = _model()
    problem = bare.load_state_dict(weights, strict=False)
    expect(not any(problem), f"A plain model cannot load these weights: {problem}.")
    with torch.no_grad():
        in_training = float(bare.train()(validation).square().mean())
        bare.load_state_dict(weights)  # a forward pass in training mode changes the buffers
        true = float(bare.eval()(validation).square().mean())
    if abs(loss - in_training) < 1e-6 < abs(loss - true):
        found = "This is the loss in training mode: call .eval() first."
    else:
        found = "Evaluate after the step, with BatchNorm in evaluation mode."
    expect(abs(loss - true) < 1e-6, f"The validation loss must be {true:.5f}, got {loss:.5f}. {found}")


def _test_train_and_evaluate(answer: Answer) -> str:
    stuck = "A rank waits forever for the others. All ranks must train through ddp, and only rank 0 must evaluate."
    on_ranks(_run_train_and_evaluate, 2, answer, stuck=stuck, timeout=40)
    return "The ranks train together, only rank 0 evaluates, and a plain model can load the saved weights."


def _train_and_evaluate(
    world: World,
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    x: torch.Tensor,
    validation: torch.Tensor,
) -> Evaluated:
    optimizer.zero_grad()
    ddp(x).square().mean().backward()  # through ddp, which averages the gradients
    optimizer.step()
    if world.rank != 0:
        return None
    ddp.module.eval()
    with torch.no_grad():
        loss = ddp.module(validation).square().mean()  # through the module, because only rank 0 evaluates
    ddp.module.train()
    return loss.item(), ddp.module.state_dict()


def _with_ways(
    train: str = "ddp", evaluate: str = "module", save: str = "module", mode: bool = False, back: bool = True
) -> Answer:
    """Return a variant of the solution.

    `train`, `evaluate` and `save` are "ddp" or "module", and specify how each operation accesses the model. `mode`
    specifies whether the model is in training mode during the evaluation, and `back` specifies its mode afterward.
    """

    def answer(
        world: World,
        ddp: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        x: torch.Tensor,
        validation: torch.Tensor,
    ) -> Evaluated:
        ways = {"ddp": ddp, "module": ddp.module}
        optimizer.zero_grad()
        ways[train](x).square().mean().backward()
        optimizer.step()
        if world.rank != 0:
            return None
        ddp.train(mode)
        with torch.no_grad():
            loss = ways[evaluate](validation).square().mean()
        ddp.train(back)
        return loss.item(), ways[save].state_dict()

    return answer


train_and_evaluate = Exercise(
    task=(
        "train_and_evaluate(world, ddp, optimizer, x, validation): take one SGD step on all ranks, with the mean "
        "squared output for x as the loss. Then, on rank 0 only, evaluate the model on validation and return (loss, "
        "state dict for a plain model)."
    ),
    test=_test_train_and_evaluate,
    solution=_train_and_evaluate,
    wrong={
        "trains through ddp.module": _with_ways(train="module"),
        "evaluates through ddp": _with_ways(evaluate="ddp"),
        "saves the state dict of the wrapper": _with_ways(save="ddp"),
        "evaluates in training mode": _with_ways(mode=True),
        "stays in evaluation mode": _with_ways(back=False),
    },
    hints=(
        "You can call the model as ddp(x) or as ddp.module(x). Only one of these calls may enter collectives.",
        "Train through ddp on all ranks. On rank 0, use ddp.module to evaluate and save the model.",
        "BatchNorm behaves differently in evaluation mode. Call .eval() before the evaluation and .train() "
        "after it, and use torch.no_grad().",
    ),
)

# ---------------------------------------------------------------------------------------- 2. a hook that sends bfloat16

_LATE = 1.5  # seconds by which rank 1 delays the first bucket
# Gradients of the two ranks. The mean of the last numbers overflows float16.
_GRADIENTS = ((1.0, 100.0, 3e-8, 1e5), (3.0, -40.0, 1e-8, 3e5))


class _Weights(nn.Module):
    """A model with two weight vectors. The gradient of each vector is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.first * x).sum() + (self.second * x).sum()


# Collectives that a hook may use, with the position and name of the argument that contains the sent tensor.
_SENDS = {"all_reduce": (0, "tensor"), "all_gather": (1, "tensor"), "all_gather_into_tensor": (1, "input_tensor")}


class WatchedHook:
    """A communication hook that times the learner's hook, and records each message's dtype and the total bytes sent."""

    def __init__(self, world: World, answer: Answer, advice: str = "") -> None:
        """Watch `answer` on this rank. If `answer` raises an error, `advice` is appended to the error message."""
        self.world, self.answer, self.advice = world, answer, advice
        self.sent: list[torch.dtype] = []
        self.nbytes = 0
        self.seconds: list[float] = []

    def hook(self, state: object, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        """Call the answer, and check that it returns a future. Rank 1 delays the first bucket."""
        if not self.seconds and self.world.rank == 1:
            time.sleep(_LATE)
        began = time.monotonic()
        try:
            with ExitStack() as stack:
                for name in _SENDS:
                    stack.enter_context(patch.object(dist, name, self._recorded(name)))
                future = self.answer(state, bucket)
        except NotImplementedError:
            raise
        except Exception as error:
            raise WrongAnswerError(f"Your hook raised {type(error).__name__}: {error}{self.advice}") from None
        self.seconds.append(time.monotonic() - began)
        expect(
            isinstance(future, torch._C.Future),  # torch returns this base class of torch.futures.Future
            f"A hook must return a future of the averaged gradients, got {type(future).__name__}. "
            "dist.all_reduce(tensor, async_op=True).get_future() returns a future.",
        )
        return future

    def _recorded(self, name: str) -> Any:
        collective, (place, keyword) = getattr(dist, name), _SENDS[name]

        def recorded(*args: Any, **named: Any) -> Any:
            tensor = args[place] if len(args) > place else named[keyword]
            self.sent.append(tensor.dtype)
            self.nbytes += tensor.nbytes
            return collective(*args, **named)

        return recorded

    def expect_overlap(self) -> None:
        """Raise `WrongAnswerError` if rank 0's hook waited for rank 1, whose first bucket was delayed."""
        if self.world.rank == 0:
            expect(
                self.seconds[0] < 0.8 * _LATE,
                "The gradients are right, but your hook blocks the backward pass, so communication does not overlap "
                f"with computation. Rank 1 delayed the first bucket by {_LATE} s, and rank 0 spent "
                f"{self.seconds[0]:.1f} s in the hook. Start the collective with async_op=True, and process its "
                "result in the future's then().",
            )


def _run_hook(world: World, answer: Answer) -> None:
    model, watched = _Weights(), WatchedHook(world, answer)
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-5)
    ddp.register_comm_hook(None, watched.hook)
    x = torch.tensor(_GRADIENTS[world.rank])
    exact = torch.tensor(_GRADIENTS).mean(0)
    for _ in range(2):  # DDP uses one bucket in the first step, and two in the second
        ddp.zero_grad()
        dist.barrier()
        try:
            ddp(x).backward()
        except RuntimeError as error:
            if "isPyObject" in str(error):
                raise WrongAnswerError(
                    "The future that get_future() returns for an all-reduce contains a list of tensors, but DDP "
                    "requires one tensor. Append .then(lambda done: bucket.buffer().copy_(done.value()[0])), which "
                    "also casts the result to the buffer's dtype."
                ) from None
            raise
        _expect_mean(world, [model.first.grad, model.second.grad], x, exact)
    expect(bool(watched.sent), "Your hook must call dist.all_reduce, but it never did.")
    wide = [dtype for dtype in watched.sent if dtype != torch.bfloat16]
    expect(
        not wide,
        f"The all-reduce must send torch.bfloat16 (2 bytes per element), got {wide and wide[0]}.",
    )
    watched.expect_overlap()


def _expect_mean(world: World, grads: list[torch.Tensor | None], local: torch.Tensor, exact: torch.Tensor) -> None:
    for got in grads:
        if got is not None and torch.allclose(got, exact, rtol=0.02):
            continue
        if got is None or not got.isfinite().all():
            found = "float16 overflows above 65,504; send bfloat16, or divide before the sum"
        elif torch.allclose(got, exact * world.size, rtol=0.02):
            found = "this is the sum over the ranks; with a hook, DDP does not divide by the world size"
        elif torch.allclose(got, exact / world.size, rtol=0.02):
            found = "this is the average divided by the world size; divide only once"
        elif torch.allclose(got, local, rtol=0.02) or torch.allclose(got, local / world.size, rtol=0.02):
            found = "this is only the rank's own gradient; the future must contain the reduced tensor"
        elif torch.allclose(got[:2], exact[:2], rtol=0.02):
            found = "small or large values are lost; bfloat16 covers the range of float32, but float16 does not"
        else:
            found = f"this is neither the average nor the rank's own gradient, {numbers(local, digits=3)}"
        raise WrongAnswerError(
            f"On rank {world.rank}, every averaged gradient must be within 2 % of {numbers(exact, digits=3)}, got "
            f"{'None' if got is None else numbers(got, digits=3)}: {found}."
        )


def _test_hook(answer: Answer) -> str:
    stuck = "A rank waits forever. Make sure that the returned future completes."
    on_ranks(_run_hook, 2, answer, stuck=stuck, timeout=40)
    return "The hook sends two bytes per element, averages to within 2 %, and does not block the backward pass."


def _bf16_hook(state: object, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    buffer = bucket.buffer()
    small = buffer.to(torch.bfloat16) / dist.get_world_size()
    summed = dist.all_reduce(small, async_op=True).get_future()
    return summed.then(lambda done: buffer.copy_(done.value()[0]))


def _sending(before: int = 1, after: int = 1, dtype: torch.dtype = torch.bfloat16, wait: bool = False) -> Answer:
    """Return a variant of the solution.

    The arguments specify the divisors before and after the sum, the dtype, and whether the hook blocks until the sum is
    complete.
    """

    def answer(state: object, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        buffer = bucket.buffer()
        small = buffer.to(dtype) / before
        work = dist.all_reduce(small, async_op=True)
        if wait:
            work.wait()
            future: Future[torch.Tensor] = Future()
            future.set_result(buffer.copy_(small))
            return future
        return work.get_future().then(lambda done: buffer.copy_(done.value()[0] / after))

    return answer


def _no_future(state: object, bucket: dist.GradBucket) -> torch.Tensor:
    small = bucket.buffer().to(torch.bfloat16) / dist.get_world_size()
    dist.all_reduce(small)
    return small.float()


def _list_of_tensors(state: object, bucket: dist.GradBucket) -> Any:
    small = bucket.buffer().to(torch.bfloat16) / dist.get_world_size()
    return dist.all_reduce(small, async_op=True).get_future()


def _returns_what_it_was_given(state: object, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    buffer = bucket.buffer() / dist.get_world_size()
    summed = dist.all_reduce(buffer.to(torch.bfloat16), async_op=True).get_future()
    return summed.then(lambda done: buffer)


bf16_hook = Exercise(
    task="bf16_hook(state, bucket): start averaging bucket.buffer() over the ranks in bfloat16, and return a future "
    "of the result.",
    test=_test_hook,
    solution=_bf16_hook,
    wrong={
        "does not divide": _sending(),
        "divides before and after": _sending(before=2, after=2),
        "sends all 32 bits": _sending(before=2, dtype=torch.float32),
        "sends float16": _sending(before=2, dtype=torch.float16),
        "waits inside the hook": _sending(before=2, wait=True),
        "returns a tensor": _no_future,
        "returns the future of the all-reduce unchanged": _list_of_tensors,
        "returns the rank's own gradients": _returns_what_it_was_given,
    },
    hints=(
        "The notebook's hook `counting` sends 32 bits per element. Which tensor must you cast before the "
        "all-reduce, and cast back afterward?",
        "tensor.to(torch.bfloat16) returns a smaller copy. Divide the copy by dist.get_world_size(), and start an "
        "all-reduce with async_op=True.",
        "Return work.get_future().then(lambda done: buffer.copy_(done.value()[0])), with `work` from the "
        "all-reduce. copy_ casts back to the buffer's dtype.",
    ),
)

# --------------------------------------------------------------------------- 3. a script that trains worse on two ranks

_FEATURES, _BATCH, _EPOCHS = 4, 16, 4


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(_FEATURES, 32), nn.Tanh(), nn.Linear(32, 1))


def _samples(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets. The first feature is evenly spaced from -1 to 1, and identifies the sample."""
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, _FEATURES, generator=generator)
    x[:, 0] = torch.linspace(-1, 1, count)
    return x, torch.sin(x.sum(1, keepdim=True)) + 0.3 * torch.randn(count, 1, generator=generator)


def _weights(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def _of_one_process(count: int) -> torch.Tensor:
    """Run the correct script in one process, and return the final weights."""
    model, (x, y) = _net(), _samples(count)
    _train(0, 1, model, x, y, _EPOCHS, _BATCH)
    return _weights(model)


class _Seen:
    """A recorder of the samples in each forward pass on all ranks.

    Each forward pass enters a collective, so a rank that takes fewer steps is detected and does not cause a hang.
    """

    def __init__(self, world: World, count: int, story: str) -> None:
        self.world, self.count, self.story = world, count, story
        self.group = dist.new_group(backend="gloo")
        self.ranks: list[list[int]] = [[] for _ in range(world.size)]
        self.forwards = 0

    def on_forward(self, model: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        x = inputs[0].detach()
        self._gather([round((each + 1) / 2 * (self.count - 1)) for each in x[:, 0].tolist()])
        self.forwards += 1

    def end(self) -> None:
        """Raise `WrongAnswerError` if a different rank is still taking steps. Collective."""
        self._gather(None)

    def _gather(self, mine: list[int] | None) -> None:
        everyones: list[Any] = [None] * self.world.size
        dist.all_gather_object(everyones, mine, group=self.group)
        for rank, seen in enumerate(everyones):
            expect(
                (seen is None) == (mine is None),
                f"{self.story} one rank finished after {self.forwards} forward passes, but the other rank continues, "
                "and its backward pass would wait forever. All ranks must participate in every step, even without "
                "samples.",
            )
            self.ranks[rank] += seen or []


def _run_repaired(world: World, answer: Answer, counts: tuple[int, ...]) -> None:
    for count in counts:
        last = count % _BATCH
        story = f"With {count} samples on {world.size} ranks,"
        if last:
            story = f"{story[:-1]}, and {last} in the last batch{' (none on rank 1)' if last == 1 else ''},"
        model, (x, y) = _net(), _samples(count)
        seen = _Seen(world, count, story)
        handle = model.register_forward_pre_hook(seen.on_forward)
        answer(world.rank, world.size, model, x, y, _EPOCHS, _BATCH)
        seen.end()
        handle.remove()
        _expect_repaired(world, story, model, seen)


def _expect_repaired(world: World, story: str, model: nn.Module, seen: _Seen) -> None:
    mine, one = _weights(model), _of_one_process(seen.count)
    expect(bool(mine.isfinite().all()), f"{story} the weights are not finite. What is the mean of an empty batch?")
    apart = max(float((torch.tensor(each) - mine).abs().max()) for each in all_gather(world, mine.tolist()))
    expect(
        apart < 1e-6,
        f"{story} the final weights of the ranks differ by up to {apart:.1g}: each rank trains on its own. Which call "
        "makes DDP average the gradients?",
    )
    total = _EPOCHS * seen.count
    expect(
        max(map(len, seen.ranks)) < total,
        f"{story} a rank processes all {seen.count} samples of an epoch, so a second rank saves no time. Split every "
        "batch between the ranks.",
    )
    first = [each[: seen.count // world.size] for each in seen.ranks] if seen.count % _BATCH == 0 else []
    twice = len(set.intersection(*map(set, first))) if first else 0
    expect(
        not twice,
        f"{story} both ranks process the same {twice} samples in the first epoch, and {twice} samples are skipped. "
        "Do both ranks shuffle in the same order?",
    )
    far = float((mine - one).abs().max())
    hint = (
        "The ranks agree, and every sample is processed once per epoch. What else in the script depends on `rank` "
        "or `size`, or should depend on it?"
        if seen.count % _BATCH == 0
        else "With full batches, the weights match those of one process. How does each rank weight the samples of "
        "the short batch?"
    )
    expect(far < 1e-4, f"{story} the weights differ from the weights of one process by up to {far:.1g}. {hint}")


def _run_alone(world: World, answer: Answer) -> None:
    count = 53
    model, (x, y) = _net(), _samples(count)
    answer(0, 1, model, x, y, _EPOCHS, _BATCH)
    far = float((_weights(model) - _of_one_process(count)).abs().max())
    expect(
        far < 1e-6,
        f"On one process, the weights of your version differ from the original script's by up to {far:.1g}. The "
        "script is right on one process. Keep every sample, every batch (including the last one), and the learning "
        "rate.",
    )


def _test_repaired(answer: Answer) -> str:
    stuck = "A rank waits forever. Do both ranks take the same number of steps?"
    on_ranks(_run_alone, 1, answer, stuck=stuck, timeout=40)
    on_ranks(_run_repaired, 2, answer, (64, 53, 49), stuck=stuck, timeout=40)
    return "Two ranks produce the same weights as one rank, even if the last batch is short or too small for two ranks."


def _train(
    rank: int, size: int, model: nn.Module, x: torch.Tensor, y: torch.Tensor, epochs: int = 8, batch: int = 16
) -> None:
    ddp = DistributedDataParallel(model) if size > 1 else model
    optimizer = torch.optim.SGD(
        ddp.parameters(), lr=0.02, momentum=0.9
    )  # the global batch size does not depend on size
    for epoch in range(epochs):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))  # the same on every rank
        for together in order.split(batch):
            mine = together[rank::size]
            loss = F.mse_loss(ddp(x[mine]), y[mine], reduction="sum") * size / len(together)  # DDP divides by size
            optimizer.zero_grad()
            loss.backward()
            clip_grad_norm_(ddp.parameters(), 1.0)
            optimizer.step()


def _with_faults(
    through: str = "ddp",
    rate: bool = False,
    own_order: bool = False,
    loss: str = "weighed",
    skip: bool = False,
    whole: bool = False,
    drop: bool = False,
    weights: bool = False,
) -> Answer:
    """Return the solution with the given faults."""

    def answer(
        rank: int, size: int, model: nn.Module, x: torch.Tensor, y: torch.Tensor, epochs: int = 8, batch: int = 16
    ) -> None:
        ddp = DistributedDataParallel(model) if size > 1 and not weights else model
        net = {"ddp": ddp, "model": model}[through]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * (size if rate else 1), momentum=0.9)
        for epoch in range(epochs):
            seed = epoch + (1000 * rank if own_order else 0)
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
            for together in order[: len(order) // batch * batch if drop else None].split(batch):
                mine = together if whole else together[rank::size]
                if skip and not len(mine):
                    continue
                summed = F.mse_loss(net(x[mine]), y[mine], reduction="sum")
                counts = {"weighed": len(together) / size, "own mean": len(mine), "not averaged": len(together)}
                optimizer.zero_grad()
                (summed / (len(mine) if whole else counts[loss])).backward()
                clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                for parameter in model.parameters() if weights and size > 1 else ():
                    dist.all_reduce(parameter.data)
                    parameter.data /= size

    return answer


repair = Exercise(
    task="train(rank, size, model, x, y, epochs, batch): find out why it trains worse on two ranks, and fix it.",
    test=_test_repaired,
    solution=_train,
    wrong={
        "is the original script": _with_faults(through="model", rate=True, own_order=True, loss="own mean"),
        "calls ddp in the forward pass, and fixes nothing else": _with_faults(
            rate=True, own_order=True, loss="own mean"
        ),
        "gives both ranks the same order as well": _with_faults(rate=True, loss="own mean"),
        "leaves the mean of unequal means": _with_faults(loss="own mean"),
        "leaves the larger learning rate": _with_faults(rate=True),
        "forgets that DDP divides by the number of ranks": _with_faults(loss="not averaged"),
        "gives every rank the whole batch": _with_faults(whole=True),
        "skips the short batch": _with_faults(drop=True),
        "skips a step for which a rank has no samples": _with_faults(skip=True),
        "averages the weights after each step": _with_faults(weights=True),
    },
    hints=(
        "The script contains four faults. It is right on one process, so check for each line how its effect "
        "changes if size is 2.",
        "What averages the gradients, and which forward pass does it require? Which samples does rank 1 process?",
        "The global batch contains 16 samples on one rank and on two ranks. Is there a reason for a larger "
        "learning rate?",
        "With a batch of 5 samples, the ranks compute means over 3 and 2 samples. Exercise 2 in notebook 03 shows "
        "how to weight these means. A sum is well defined even without samples.",
    ),
)
