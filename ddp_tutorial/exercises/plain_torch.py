"""Exercises on the step to resume from, one DDP step, and a complete script, for notebook 06_plain_torch."""

import os
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_tutorial.exercises import Answer, Exercise, expect, numbers, on_ranks
from ddp_tutorial.exercises.torchrun import Torchrun, WrongScript, read_script
from ddp_tutorial.exercises.words import (
    State,
    course,
    lines_of,
    load_checkpoint,
    make_words,
    wrong_after_resuming,
    wrong_from_the_start,
)
from ddp_tutorial.world import World

# ------------------------------------------------------------------------------------------- 1. the step to resume from

_ON_DISK = (  # steps of the checkpoints on each of three ranks
    ((20, 40), (20, 40), (20, 40)),
    ((20, 40, 60), (20, 60), (40, 20)),
    ((60, 20, 40), (40, 60), (20, 60, 40)),
    ((20,), (40,), (60,)),
    ((), (20,), (20, 40)),
)


def _find_steps(world: World, answer: Answer) -> list[Any]:
    return [answer(list(steps[world.rank])) for steps in _ON_DISK]


def _test_common_step(answer: Answer) -> str:
    stuck = (
        "A rank waits forever for the others. Every rank must enter the same collectives, even without a checkpoint."
    )
    results = on_ranks(_find_steps, 3, answer, stuck=stuck, timeout=30)
    for number, steps in enumerate(_ON_DISK):
        got = [result[number] for result in results]
        right = max(set(steps[0]).intersection(*steps[1:]), default=0)
        case = f"Three ranks store checkpoints of the steps {', '.join(map(str, map(list, steps)))}."
        expect(all(each == got[0] for each in got), f"{case} All ranks must return the same step, got {got}.")
        expect(
            got[0] == right,
            f"{case} The result must be {right}, the latest common step (0 if there is none), got {got[0]}.",
        )
    return "All ranks resume from the latest step for which every rank has a checkpoint."


def _common_step(steps: list[int]) -> int:
    lists: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(lists, steps)
    return max(set(lists[0]).intersection(*lists[1:]), default=0)


def _own_latest(steps: list[int]) -> int:
    return max(steps, default=0)


def _latest_of_rank_0(steps: list[int]) -> int:
    latest = torch.tensor([max(steps, default=0)])
    dist.broadcast(latest, src=0)
    return int(latest)


def _smallest_latest(steps: list[int]) -> int:
    latest = torch.tensor([max(steps, default=0)])
    dist.all_reduce(latest, op=dist.ReduceOp.MIN)
    return int(latest)


def _common_unless_empty(steps: list[int]) -> int:
    return _common_step(steps) if steps else 0


common_step = Exercise(
    task="common_step(steps): return the latest step for which every rank has a checkpoint, or 0 if there is no such "
    "step.",
    test=_test_common_step,
    solution=_common_step,
    wrong={
        "returns the latest step of each rank": _own_latest,
        "lets rank 0 decide": _latest_of_rank_0,
        "returns the smallest of the latest steps": _smallest_latest,
        "enters no collective without a checkpoint": _common_unless_empty,
    },
    hints=(
        "The smallest of the ranks' latest steps is not always a step that all ranks have.",
        "dist.all_gather_object sends each rank's list to all ranks. The lists may have different lengths.",
        "The intersection of sets contains the common steps. max(..., default=0) covers the empty intersection.",
    ),
)

# ---------------------------------------------------------------------------------------- 2. a step with ragged batches


def _batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return two micro-batches, with 4 and 1 samples on rank 0, and 2 and 5 samples on rank 1."""
    generator = torch.Generator().manual_seed(rank)
    sizes = ((4, 1), (2, 5))[rank]
    return [(torch.randn(n, 3, generator=generator), 4 * torch.randn(n, 1, generator=generator)) for n in sizes]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def _expected() -> tuple[float, torch.Tensor]:
    """Take one step on all ranks' samples in one process, and return the loss and the weights."""
    model = _model()
    pairs = [pair for rank in range(2) for pair in _batches(rank)]
    inputs, targets = (torch.cat(each) for each in zip(*pairs, strict=True))
    (loss := F.mse_loss(model(inputs), targets)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    _sgd(model).step()
    return loss.item(), nn.utils.parameters_to_vector(model.parameters()).detach()


def counted_hook(calls: list[int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Run PyTorch's `allreduce_hook`, and record the call in `calls`."""
    calls.append(1)
    return allreduce_hook(None, bucket)  # type: ignore[arg-type]  # None: the default group


def _take_ragged_step(world: World, answer: Answer) -> tuple[float, torch.Tensor, bool, int]:
    ddp, times = DistributedDataParallel(_model()), []  # type: ignore[var-annotated]
    ddp.register_comm_hook(times, counted_hook)
    returned = answer(ddp, _sgd(ddp), _batches(world.rank))
    clean = all(parameter.grad is None or not parameter.grad.any() for parameter in ddp.parameters())
    weights = nn.utils.parameters_to_vector(ddp.parameters()).detach()
    return float("nan" if returned is None else returned), weights, clean, len(times)


def _test_ragged_step(answer: Answer) -> str:
    stuck = "A rank waits forever for the others. Does every rank enter the same collectives in the same order?"
    results = on_ranks(_take_ragged_step, 2, answer, stuck=stuck, timeout=30)
    loss, weights = _expected()
    for rank, (returned, found, clean, times) in enumerate(results):
        expect(
            torch.equal(found, results[0][1]),
            "The weights differ between the ranks, because a gradient was not averaged.",
        )
        expect(
            times == 1,
            f"DDP must synchronize once per step, got {times} synchronizations. Run every backward pass except "
            "the last one in no_sync().",
        )
        expect(
            torch.allclose(found, weights, atol=1e-5),
            f"The weights on rank {rank} must be {numbers(weights, 4)}, as in one process, got {numbers(found, 4)}. "
            "All 12 samples must count equally, and the gradient over all samples must be clipped once.",
        )
        expect(clean, "The gradients were not cleared, so the next step would add to them.")
        expect(
            abs(returned - loss) < 1e-4,
            f"The loss must be the mean over all samples, {loss:.4f}, got {returned:.4f} on rank {rank}.",
        )
    return "The step is equivalent to a step on all samples in one process, and every rank returns the same loss."


def _ragged_step(ddp: Any, optimizer: Any, batches: Any) -> float:
    total = torch.tensor([0.0, sum(len(targets) for _, targets in batches)])
    dist.all_reduce(total[1:])  # number of samples on all ranks, needed before the first backward pass
    for number, (inputs, targets) in enumerate(batches):
        with nullcontext() if number == len(batches) - 1 else ddp.no_sync():
            loss = F.mse_loss(ddp(inputs), targets, reduction="sum")
            (loss * dist.get_world_size() / total[1]).backward()
        total[0] += loss.detach()
    nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total[:1])
    return float(total[0] / total[1])


def _mean_of_means(ddp: Any, optimizer: Any, batches: Any) -> float:
    total = torch.zeros(1)
    for number, (inputs, targets) in enumerate(batches):
        with nullcontext() if number == len(batches) - 1 else ddp.no_sync():
            loss = F.mse_loss(ddp(inputs), targets) / len(batches)
            loss.backward()
        total += loss.detach()
    nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total)
    return float(total / dist.get_world_size())


def _never_synchronized(ddp: Any, optimizer: Any, batches: Any) -> float:
    with ddp.no_sync():
        for inputs, targets in batches:
            (F.mse_loss(ddp(inputs), targets, reduction="sum") / 6).backward()
    nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return 0.0


def _always_synchronized(ddp: Any, optimizer: Any, batches: Any) -> float:
    ddp.no_sync = nullcontext
    return _ragged_step(ddp, optimizer, batches)


def _own_loss(ddp: Any, optimizer: Any, batches: Any) -> float:
    with torch.no_grad():
        own = sum(F.mse_loss(ddp.module(inputs), targets, reduction="sum").item() for inputs, targets in batches)
    _ragged_step(ddp, optimizer, batches)
    return own / sum(len(targets) for _, targets in batches)


ragged_step = Exercise(
    task="ragged_step(ddp, optimizer, batches): take one step on the mean loss over all ranks' samples, and return "
    "this loss.",
    test=_test_ragged_step,
    solution=_ragged_step,
    wrong={
        "takes a mean of means": _mean_of_means,
        "never synchronizes": _never_synchronized,
        "synchronizes every micro-batch": _always_synchronized,
        "returns the rank's own loss": _own_loss,
    },
    hints=(
        "Before the first backward pass, every rank needs the number of samples on all ranks. All-reduce the counts.",
        "DDP averages over ranks. Call backward on the rank's loss sum times the world size, divided by the number "
        "of samples on all ranks.",
        "Put `with nullcontext() if is_last else ddp.no_sync():` around the forward and backward pass.",
    ),
)

# ----------------------------------------------------------------------------------------------------- 3. a full script

_EVERY = 17  # steps between checkpoints; an epoch has 13 steps
_SEEN = _EVERY + 4  # steps before the kill: up to the checkpoint, and 4 that are lost
_LATER = 20  # steps after the checkpoint, across the end of an epoch
_FOREVER = 20_000  # steps of the run that is killed; finite in case the kill fails
_SOLUTION = Path(__file__).with_name("plain_torch_script.py")


def _test_train_script(answer: Path | str | WrongScript) -> str:
    with TemporaryDirectory() as name:
        folder = Path(name)
        script = answer.write(folder / "train.py") if isinstance(answer, WrongScript) else Path(answer).resolve()
        read_script(script)
        torch.save(make_words(), folder / "words.pt")
        saved = _kill_and_load(script, folder)
        stop, killed = saved["step"] + _LATER, folder / "killed.pt"
        with killed.open("rb") as before:  # while the file is open, its inode number is not reused
            with _torchrun(script, 2, folder, "killed", stop) as resumed:
                after_kill = _finished(resumed, "The run that resumed after the kill", killed, stop, saved["step"])
            expect(
                os.fstat(before.fileno()).st_ino != killed.stat().st_ino,
                "The script overwrites the previous checkpoint in place, so a crash midway leaves no valid "
                "checkpoint to resume from. Write to a temporary file, then call os.replace.",
            )
        with _torchrun(script, 2, folder, "two", stop) as two, _torchrun(script, 1, folder, "one", stop) as one:
            uninterrupted = _finished(two, "The uninterrupted run on two ranks", folder / "two.pt", stop)
            alone = _finished(one, "The run on one rank", folder / "one.pt", stop)
    right = course(stop).weights
    for ranks, model in (("two ranks", uninterrupted), ("one rank", alone)):
        expect(
            (apart := _distance(model, right)) < 1e-4,
            f"The losses are right, but the weights that {ranks} saved after step {stop} differ from those of one "
            f"process by {apart:.1e}. Differences up to 1e-4 are rounding errors. Did you save the weights of a "
            "different step?",
        )
    expect(
        (apart := _distance(after_kill, uninterrupted)) == 0.0,
        f"After the kill and the resume, the weights differ from the uninterrupted run's weights by {apart:.1e}. "
        "They must be bitwise identical. Does the checkpoint contain, unmodified, everything that a step changes?",
    )
    return (
        "One rank and two ranks reach the same weights, and report the loss over all ranks. After rank 1 was "
        "killed, the resumed run repeated no step, and its weights are bitwise identical to those of an "
        "uninterrupted run."
    )


def _torchrun(script: Path, nprocs: int, folder: Path, name: str, steps: int) -> Torchrun:
    return Torchrun(script, nprocs, folder / "words.pt", folder / f"{name}.pt", steps, _EVERY, folder=folder)


def _kill_and_load(script: Path, folder: Path) -> State:
    """Start two ranks, kill rank 1 after `_SEEN` steps, and return the remaining checkpoint."""
    with _torchrun(script, 2, folder, "killed", _FOREVER) as run:
        code = run.wait(lambda printed: len(lines_of(printed)) >= _SEEN or printed.count("\n") > 9 * _SEEN)
        if code is None:
            run.kill(rank=1)
        printed = run.printed()
        lines = lines_of(printed)[:_SEEN]
        mistake = wrong_from_the_start(lines)
        expect(not mistake, f"On two ranks: {mistake}")
        expect(code is None, f"Two ranks must take {_FOREVER} steps, but exited after {len(lines)}. {run.error()}")
        expect(
            len(lines) == _SEEN,
            "For each step, print a line like 'step 1: loss 3.4675 over 83 letters'. Your first line is "
            f"{printed[:60].splitlines()[0]!r}.",
        )
        run.wait()
    return load_checkpoint(folder / "killed.pt", f"Rank 1 was killed after step {_SEEN}")


def _finished(run: Torchrun, what: str, checkpoint: Path, stop: int, begin: int = 0) -> State:
    """Wait for a run that started after step `begin`, check its lines and checkpoint, and return its final model."""
    code = run.wait(lambda printed: len(lines_of(printed)) > stop)
    lines = lines_of(run.printed())
    mistake = wrong_after_resuming(lines, begin) if begin else wrong_from_the_start(lines)
    expect(not mistake, mistake if begin else f"{what}: {mistake}")
    made = begin + len(lines)
    expect(code is not None and made == stop, f"{what} must end after step {stop}, got {made} steps. {run.error()}")
    expect(code == 0, f"{what} took all {stop} steps, and then torchrun exited with code {code}. {run.error()}")
    saved = load_checkpoint(checkpoint, f"{what} finished step {stop}")
    expect(saved["step"] == stop, f"{what} finished step {stop}, but its last checkpoint is from step {saved['step']}.")
    return dict(saved["model"])


def _distance(model: State, other: State) -> float:
    return max(float((model[name] - other[name]).abs().max()) for name in other)


_SAVE = "torch.save(state, part)\n"

train_script = Exercise(
    task="Write a torchrun script that trains to the same weights on one rank and on two, and resumes exactly after "
    "a kill.",
    test=_test_train_script,
    solution=_SOLUTION,
    wrong={
        "gives both ranks the same words": WrongScript(_SOLUTION, ("sampler=sampler", "shuffle=False")),
        "takes a mean of means": WrongScript(
            _SOLUTION, ("* dist.get_world_size() / total[1]", "/ (following >= 0).sum()")
        ),
        "reports the loss of rank 0's letters": WrongScript(
            _SOLUTION, ("total[0].item() / total[1].item()", "loss.item() / (following >= 0).sum().item()")
        ),
        "calls a barrier on rank 0 only": WrongScript(_SOLUTION, (_SAVE, f"{_SAVE}                dist.barrier()\n")),
        "resumes without set_epoch": WrongScript(
            _SOLUTION, ("sampler.set_epoch(epoch)", "taken or sampler.set_epoch(epoch)")
        ),
        "saves without the optimizer": WrongScript(
            _SOLUTION,
            (', "optimizer": optimizer.state_dict()', "", 'optimizer.load_state_dict(saved["optimizer"])', "pass"),
        ),
    },
    hints=(
        "Write the step first. It needs two all-reduces: one for the number of letters before the backward pass, "
        "and one for the loss after the backward pass. `following >= 0` is true for letters; cross_entropy ignores "
        "targets of -100.",
        "DDP divides the sum over ranks by the world size. Call backward on this rank's loss sum times the world "
        "size, divided by the number of letters on all ranks. The result is the gradient of the mean over all "
        "letters.",
        "DataLoader(data, 16 // size, sampler=DistributedSampler(data, size, rank, seed=0)) yields 13 batches, and "
        "the last batch is smaller. After `done` steps, divmod(done, 13) returns the epoch and the number of "
        "batches to skip.",
        "Load the model, the optimizer and the number of steps before DDP wraps the model. Rank 0 reads the file "
        "and sends its contents with dist.broadcast_object_list. On rank 0, save to a temporary file, then rename "
        "it.",
        "After the function with the DDP model has returned, call destroy_process_group() and os._exit(0), as in the "
        "script of this notebook. With gloo, a DDP model that is freed after its process group can block forever.",
    ),
)
