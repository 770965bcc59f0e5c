"""The exercises of 06_plain_torch: where a run goes on, one step with torch's own DDP, and a whole script."""

import ast
import os
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ddp_tutorial.exercises import Answer, Exercise, WrongAnswerError, expect, numbers, on_ranks
from ddp_tutorial.exercises.torchrun import Torchrun
from ddp_tutorial.exercises.words import course, lines_of, make_words, wrong_after_resuming, wrong_from_the_start
from ddp_tutorial.world import World

# ----------------------------------------------------------------------------------------------- 1. where to go on


def _loader() -> Any:
    """Rank 1 of 2, 24 samples, 4 batches an epoch."""
    samples = range(24)
    return DataLoader(samples, 3, sampler=DistributedSampler(samples, 2, 1, seed=3))  # type: ignore[arg-type]


def _all_batches(epochs: int) -> list[list[list[int]]]:
    loader, found = _loader(), []
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        found.append([batch.tolist() for batch in loader])
    return found


def _test_position(answer: Answer) -> str:
    epochs = _all_batches(3)
    for step in (0, 1, 3, 4, 6, 8, 11):
        epoch, taken = divmod(step, 4)
        got = [batch.tolist() for batch in islice(answer(_loader(), step), 13)]
        left = epochs[epoch][taken:]
        said = f"4 batches an epoch, {step} steps made: left are {left}, and you gave {got}."
        found = [number for number, batches in enumerate(epochs) if got and got[-1] in batches]
        expect(not found or epoch in found, f"{said} They are of epoch {max(found, default=0)}, it is {epoch}.")
        expect(got == left or len(got) == len(left), f"{said} Of this epoch, {taken} have been taken.")
        expect(got == left, said)
    return "A run that goes on after any step sees what the uninterrupted one would have seen."


def _position(loader: Any, step: int) -> Iterator[Any]:
    epoch, taken = divmod(step, len(loader))
    loader.sampler.set_epoch(epoch)
    return islice(loader, taken, None)


def _position_without_epoch(loader: Any, step: int) -> Iterator[Any]:
    return islice(loader, step % len(loader), None)


def _position_from_the_start(loader: Any, step: int) -> Iterator[Any]:
    loader.sampler.set_epoch(step // len(loader))
    return iter(loader)


def _position_by_step(loader: Any, step: int) -> Iterator[Any]:
    loader.sampler.set_epoch(step)
    return islice(loader, step % len(loader), None)


def _position_one_too_far(loader: Any, step: int) -> Iterator[Any]:
    epoch, taken = divmod(step, len(loader))
    loader.sampler.set_epoch(epoch)
    return islice(loader, taken + 1, None)


position = Exercise(
    task="position(loader, step): return an iterator over the batches that are left of the epoch after `step` steps.",
    test=_test_position,
    solution=_position,
    wrong={
        "forgets set_epoch": _position_without_epoch,
        "begins the epoch anew": _position_from_the_start,
        "takes the step for the epoch": _position_by_step,
        "leaves one batch out": _position_one_too_far,
    },
    hints=(
        "len(loader) is how many batches an epoch has.",
        "loader.sampler is the DistributedSampler; it has to know the epoch before the loader is iterated over.",
        "itertools.islice(loader, n, None) leaves out the first n.",
    ),
)

# ---------------------------------------------------------------------------------- 2. a step of batches that differ


def _batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Two micro-batches: of 4 and 1 samples on rank 0, of 2 and 5 on rank 1."""
    generator = torch.Generator().manual_seed(rank)
    sizes = ((4, 1), (2, 5))[rank]
    return [(torch.randn(n, 3, generator=generator), 4 * torch.randn(n, 1, generator=generator)) for n in sizes]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def _expected() -> tuple[float, torch.Tensor]:
    """One process, all samples at once."""
    model = _model()
    pairs = [pair for rank in range(2) for pair in _batches(rank)]
    inputs, targets = (torch.cat(each) for each in zip(*pairs, strict=True))
    (loss := F.mse_loss(model(inputs), targets)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    _sgd(model).step()
    return loss.item(), nn.utils.parameters_to_vector(model.parameters()).detach()


def _counted(times: list[int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's own all-reduce, and a count of how often DDP asks for it."""
    times.append(1)
    return allreduce_hook(None, bucket)  # type: ignore[arg-type]  # None: the default group


def _take_ragged_step(world: World, answer: Answer) -> tuple[float, torch.Tensor, bool, int]:
    ddp, times = DistributedDataParallel(_model()), []  # type: ignore[var-annotated]
    ddp.register_comm_hook(times, _counted)
    returned = answer(ddp, _sgd(ddp), _batches(world.rank))
    clean = all(parameter.grad is None or not parameter.grad.any() for parameter in ddp.parameters())
    weights = nn.utils.parameters_to_vector(ddp.parameters()).detach()
    return float("nan" if returned is None else returned), weights, clean, len(times)


def _test_ragged_step(answer: Answer) -> str:
    stuck = "Some rank waits for the others for ever: does each enter the same collectives, in the same order?"
    results = on_ranks(_take_ragged_step, 2, answer, stuck=stuck, timeout=30)
    loss, weights = _expected()
    for rank, (returned, found, clean, times) in enumerate(results):
        expect(torch.equal(found, results[0][1]), "The ranks have different weights: some gradient was not averaged.")
        expect(times == 1, f"DDP talked {times} times in one step: all backwards but the last belong in no_sync().")
        told = f"On rank {rank} the weights are {numbers(found, 4)}, and one process comes to {numbers(weights, 4)}"
        expect(
            torch.allclose(found, weights, atol=1e-5),
            f"{told}. All 12 samples should weigh the same, and the gradient of all be clipped, once.",
        )
        expect(clean, "The gradients are still there: the next step would add to them.")
        expect(
            abs(returned - loss) < 1e-4, f"Rank {rank} returns {returned:.4f}; the mean over all samples is {loss:.4f}."
        )
    return "As one process with all samples at once, and every rank says the same loss."


def _ragged_step(ddp: Any, optimizer: Any, batches: Any) -> float:
    total = torch.tensor([0.0, sum(len(targets) for _, targets in batches)])
    dist.all_reduce(total[1:])  # the count of all ranks, before anything is divided by it
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


def _never_synchronised(ddp: Any, optimizer: Any, batches: Any) -> float:
    with ddp.no_sync():
        for inputs, targets in batches:
            (F.mse_loss(ddp(inputs), targets, reduction="sum") / 6).backward()
    nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return 0.0


def _always_synchronised(ddp: Any, optimizer: Any, batches: Any) -> float:
    ddp.no_sync = nullcontext
    return _ragged_step(ddp, optimizer, batches)


def _own_loss(ddp: Any, optimizer: Any, batches: Any) -> float:
    with torch.no_grad():
        own = sum(F.mse_loss(ddp.module(inputs), targets, reduction="sum").item() for inputs, targets in batches)
    _ragged_step(ddp, optimizer, batches)
    return own / sum(len(targets) for _, targets in batches)


ragged_step = Exercise(
    task="ragged_step(ddp, optimizer, batches): one step with the mean over the samples of all ranks; return it.",
    test=_test_ragged_step,
    solution=_ragged_step,
    wrong={
        "takes a mean of means": _mean_of_means,
        "never synchronises": _never_synchronised,
        "synchronises every micro-batch": _always_synchronised,
        "returns its own loss": _own_loss,
    },
    hints=(
        "The count of all ranks has to be known before the first backward: all-reduce it.",
        "DDP averages over ranks. Give it this rank's sum, times the world size, over the count of all ranks.",
        "`with nullcontext() if is_last else ddp.no_sync():` around forward and backward.",
    ),
)

# --------------------------------------------------------------------------------------------------- 3. a whole script

_EVERY = 17  # steps from one checkpoint to the next; an epoch has 13
_SEEN = _EVERY + 4  # steps before the kill: a checkpoint, and some that are lost
_LATER = 20  # steps after the checkpoint, to the end: over the end of an epoch
_FOREVER = 20_000  # steps of the run that is killed; should nobody kill it, it ends some time
_SOLUTION = Path(__file__).with_name("plain_torch_script.py")

State = dict[str, Any]


class Changed(NamedTuple):
    """A wrong script: the solution, with each text replaced by the one after it."""

    texts: tuple[str, ...]

    def write(self, path: Path) -> Path:
        text = _SOLUTION.read_text(encoding="utf-8")
        for old, new in zip(self.texts[::2], self.texts[1::2], strict=True):
            assert old in text, f"the solution has no {old!r}"
            text = text.replace(old, new)
        path.write_text(text, encoding="utf-8")
        return path


def _read_script(script: Path) -> None:
    """Refuse, before anything is started, what is no script of the learner's own."""
    expect(script.is_file(), f"There is no file {script}. Has the cell that writes it been run?")
    try:
        nodes = list(ast.walk(ast.parse(script.read_text(encoding="utf-8"))))
    except SyntaxError as error:
        raise WrongAnswerError(f"The script cannot be read: {error.msg}, in line {error.lineno}.") from None
    if any(isinstance(node, ast.Raise) and "NotImplementedError" in ast.unparse(node) for node in nodes):
        raise NotImplementedError
    imports = [ast.unparse(node) for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    expect(
        not any("ddp_tutorial" in each for each in imports), "Plain torch: the script should import nothing of ours."
    )


def _test_train_script(answer: Path | str | Changed) -> str:
    with TemporaryDirectory() as name:
        folder = Path(name)
        script = answer.write(folder / "train.py") if isinstance(answer, Changed) else Path(answer).resolve()
        _read_script(script)
        torch.save(make_words(), folder / "words.pt")
        saved = _kill_and_load(script, folder)
        stop, killed = saved["step"] + _LATER, folder / "killed.pt"
        with killed.open("rb") as before:  # a file that is open keeps its number: no other can have it
            with _torchrun(script, 2, folder, "killed", stop) as resumed:
                after_kill = _finished(resumed, "The run that went on after the kill", killed, stop, saved["step"])
            expect(
                os.fstat(before.fileno()).st_ino != killed.stat().st_ino,
                "The checkpoint is written over the one before it: a kill in the middle of that leaves half a file, "
                "and nothing to go on from. Write to another name, then os.replace.",
            )
        with _torchrun(script, 2, folder, "two", stop) as two, _torchrun(script, 1, folder, "one", stop) as one:
            undisturbed = _finished(two, "The run of two ranks that nobody disturbed", folder / "two.pt", stop)
            alone = _finished(one, "The run of one rank", folder / "one.pt", stop)
    right = course(stop).weights
    for ranks, model in (("two ranks", undisturbed), ("one rank", alone)):
        expect(
            (apart := _distance(model, right)) < 1e-4,
            f"The weights that {ranks} save after step {stop} are {apart:.1e} from those of one process; up to 1e-4 "
            "is rounding. The losses are right: are the weights of another step?",
        )
    expect(
        (apart := _distance(after_kill, undisturbed)) == 0.0,
        f"Killed and resumed, the weights are {apart:.1e} from those of the undisturbed run. They should be equal to "
        "the last bit: is all that a step changes saved, and saved as it is?",
    )
    return (
        "One rank and two come to the same weights, and report the loss of all. Rank 1 was killed, and the run that "
        "went on took no step twice: its weights are those of a run that nobody disturbed, bit for bit."
    )


def _torchrun(script: Path, nprocs: int, folder: Path, name: str, steps: int) -> Torchrun:
    return Torchrun(script, nprocs, folder / "words.pt", folder / f"{name}.pt", steps, _EVERY, folder=folder)


def _kill_and_load(script: Path, folder: Path) -> State:
    """Two ranks from the beginning, until rank 1 is killed; then the checkpoint that is left."""
    with _torchrun(script, 2, folder, "killed", _FOREVER) as run:
        code = run.wait(lambda printed: len(lines_of(printed)) >= _SEEN or printed.count("\n") > 9 * _SEEN)
        if code is None:
            run.kill(rank=1)
        printed = run.printed()
        lines = lines_of(printed)[:_SEEN]
        said = wrong_from_the_start(lines)
        expect(not said, f"On two ranks: {said}")
        expect(code is None, f"Two ranks should make {_FOREVER} steps, and ended after {len(lines)}. {run.error()}")
        expect(
            len(lines) == _SEEN,
            "For each step, print a line like 'step 1: loss 3.4675 over 83 letters'. The first that you print: "
            f"{printed[:60].splitlines()[0]!r}.",
        )
        run.wait()
    return _load(folder / "killed.pt", f"Rank 1 was killed after step {_SEEN}")


def _load(checkpoint: Path, when: str) -> State:
    expect(checkpoint.exists(), f"{when}, and there is no checkpoint. Save after each EVERY steps, and after the last.")
    try:
        saved = torch.load(checkpoint)
    except Exception as error:
        message = f"{when}, and torch.load cannot read the checkpoint. {type(error).__name__}: {str(error)[:200]}"
        raise WrongAnswerError(message) from None
    is_whole = isinstance(saved, dict) and isinstance(saved.get("step"), int) and isinstance(saved.get("model"), dict)
    expect(is_whole, "The checkpoint should be a dict, with a number as 'step' and a state dict as 'model'.")
    names, own = list(course(0).weights), list(saved["model"])
    advice = " Save the state dict of the model inside DDP, ddp.module." if own[:1] == [f"module.{names[0]}"] else ""
    expect(own == names, f"In the checkpoint, 'model' has {own}, and should have {names}.{advice}")
    return saved


def _finished(run: Torchrun, what: str, checkpoint: Path, stop: int, begin: int = 0) -> State:
    """The model that a run ends with which began after step `begin`. Checks all that it did."""
    code = run.wait(lambda printed: len(lines_of(printed)) > stop)
    lines = lines_of(run.printed())
    said = wrong_after_resuming(lines, begin) if begin else wrong_from_the_start(lines)
    expect(not said, said if begin else f"{what}: {said}")
    made = begin + len(lines)
    expect(code is not None and made == stop, f"{what} should end after step {stop}; it came to {made}. {run.error()}")
    expect(code == 0, f"{what} made all {stop} steps, and then torchrun ended with exit code {code}. {run.error()}")
    saved = _load(checkpoint, f"{what} has ended after step {stop}")
    expect(saved["step"] == stop, f"{what} ended after step {stop}; its last checkpoint is of step {saved['step']}.")
    return dict(saved["model"])


def _distance(model: State, other: State) -> float:
    return max(float((model[name] - other[name]).abs().max()) for name in other)


_SAVE = "torch.save(state, aside)\n"

train_script = Exercise(
    task="Write a script for torchrun that trains alike on one rank and two, and goes on exactly after a kill.",
    test=_test_train_script,
    solution=_SOLUTION,
    wrong={
        "gives both ranks the same words": Changed(("sampler=sampler", "shuffle=False")),
        "takes a mean of means": Changed(("* dist.get_world_size() / total[1]", "/ (following >= 0).sum()")),
        "reports the loss of rank 0's letters": Changed(
            ("total[0].item() / total[1].item()", "loss.item() / (following >= 0).sum().item()")
        ),
        "has a barrier that rank 0 alone enters": Changed((_SAVE, f"{_SAVE}                dist.barrier()\n")),
        "goes on without set_epoch": Changed(("sampler.set_epoch(epoch)", "taken or sampler.set_epoch(epoch)")),
        "saves without the optimizer": Changed(
            (', "optimizer": optimizer.state_dict()', "", 'optimizer.load_state_dict(saved["optimizer"])', "pass")
        ),
    },
    hints=(
        "Begin with the step: two all-reduces, of the number of letters before backward and of the loss after it. "
        "`following >= 0` says where there is a letter; reduction='sum' leaves out the -100.",
        "DDP divides the sum over ranks by their number. So this rank's sum, times the world size, over the letters of "
        "all ranks, becomes the gradient of the mean over all letters.",
        "DataLoader(data, 16 // size, sampler=DistributedSampler(data, size, rank, seed=0)) has 13 batches, the last "
        "one smaller. After `done` steps, divmod(done, 13) says which epoch it is, and how many batches to leave out.",
        "Load the model, the optimizer and the number of steps before DDP wraps the model. Rank 0 reads the file and "
        "sends its content with dist.broadcast_object_list. Save on rank 0, to a temporary name, and then rename.",
        "Leave with os._exit(0) after destroy_process_group(), as above.",
    ),
)
