"""Checkpointing bugs that change the resumed run. Each program resumes from the files in its folder."""

import os
import random
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import StepLR

from ddp_tutorial.museum.parts import Exhibit, Result, ddp, loader, net, weights, write
from ddp_tutorial.world import World


def _step(model: nn.Module, optimizer: Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def forgets_the_optimizer(world: World, folder: Path) -> Result:
    model, start, path = ddp(), 0, folder / "last.pt"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if path.exists():
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        start = saved["step"]
    for step, (_, x, y) in enumerate(loader(world)):
        if step >= start:
            _step(model, optimizer, x, y)
            if world.is_main:
                write(path, {"model": model.state_dict(), "step": step + 1})
    return {"weights": weights(model)}


def keeps_the_optimizer(world: World, folder: Path) -> Result:
    model, start, path = ddp(), 0, folder / "last.pt"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if path.exists():
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]
    for step, (_, x, y) in enumerate(loader(world)):
        if step >= start:
            _step(model, optimizer, x, y)
            if world.is_main:
                write(path, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1})
    return {"weights": weights(model)}


def forgets_the_schedule(world: World, folder: Path) -> Result:
    model, path, start = ddp(nn.LayerNorm(8)), folder / "state.pt", 0
    optimizer = Adam(model.parameters(), lr=0.05)
    schedule = StepLR(optimizer, step_size=2, gamma=0.1)
    if path.exists():
        start, parts, state = torch.load(path)
        model.load_state_dict(parts)
        optimizer.load_state_dict(state)
    for step, (_, x, y) in enumerate(loader(world, batch=6)):
        if step >= start:
            _step(model, optimizer, x, y)
            schedule.step()
            if world.is_main:
                write(path, (step + 1, model.state_dict(), optimizer.state_dict()))
    return {"weights": weights(model)}


# ------------------------------------------------------------------------------------ the step at which the run resumes


def runs_the_saved_epoch_again(world: World, folder: Path) -> Result:
    model, start, path = ddp(), 0, folder / "last.pt"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if path.exists():
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        start = saved["epoch"]
    for epoch in range(start, 3):
        for _, x, y in loader(world, batch=12):
            _step(model, optimizer, x, y)
        if world.is_main:
            write(path, {"model": model.state_dict(), "epoch": epoch})
    return {"weights": weights(model)}


def resumes_at_the_next_epoch(world: World, folder: Path) -> Result:
    model, start, path = ddp(), 0, folder / "last.pt"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if path.exists():
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        start = saved["epoch"] + 1
    for epoch in range(start, 3):
        for _, x, y in loader(world, batch=12):
            _step(model, optimizer, x, y)
        if world.is_main:
            write(path, {"model": model.state_dict(), "epoch": epoch})
    return {"weights": weights(model)}


def starts_the_epoch_anew(world: World, folder: Path) -> Result:
    """Save in the middle of an epoch, but start the epoch over after a resume."""
    model, epoch, path = ddp(), 0, folder / "now.pt"
    optimizer = Adam(model.parameters(), lr=0.01)
    if path.exists():
        epoch, of_model, of_optimizer = torch.load(path)
        model.load_state_dict(of_model)
        optimizer.load_state_dict(of_optimizer)
    for now in range(epoch, 2):
        for _, x, y in loader(world):
            _step(model, optimizer, x, y)
            if world.is_main:
                write(path, (now, model.state_dict(), optimizer.state_dict()))
    return {"weights": weights(model)}


# ------------------------------------------------------------------------------------ the choice of the checkpoint file


def takes_the_newest_file(world: World, folder: Path) -> Result:
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    latest = max(folder.glob("step-*.pt"), key=os.path.getmtime, default=None)
    start = int(latest.stem[5:]) if latest else 0
    if latest:
        model.load_state_dict(torch.load(latest))
    for step, (_, x, y) in enumerate(loader(world)):
        if step >= start:
            _step(model, optimizer, x, y)
            if world.is_main:
                write(folder / f"step-{step + 1}.pt", model.state_dict())
    return {"weights": weights(model)}


def takes_the_last_step(world: World, folder: Path) -> Result:
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    latest = max(folder.glob("step-*.pt"), key=lambda path: int(path.stem[5:]), default=None)
    start = int(latest.stem[5:]) if latest else 0
    if latest:
        model.load_state_dict(torch.load(latest))
    for step, (_, x, y) in enumerate(loader(world)):
        if step >= start:
            _step(model, optimizer, x, y)
            if world.is_main:
                write(folder / f"step-{step + 1}.pt", model.state_dict())
    return {"weights": weights(model)}


def takes_the_last_name(world: World, folder: Path) -> Result:
    """Sort file names as text, which puts "step-12" before "step-2"."""
    model = ddp(nn.LayerNorm(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = sorted(folder.glob("step-*.pt"))
    start = int(found[-1].stem[5:]) if found else 0
    if found:
        model.load_state_dict(torch.load(found[-1]))
    for step, (_, x, y) in enumerate(loader(world, batch=2)):
        if step >= start:
            _step(model, optimizer, x, y)
            if world.is_main:
                write(folder / f"step-{step + 1}.pt", model.state_dict())
    return {"weights": weights(model)}


def writes_over_the_last_one(world: World, folder: Path) -> Result:
    model, start, path = ddp(), 0, folder / "last.pt"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if path.exists():
        start, state = torch.load(path)
        model.load_state_dict(state)
    for step, (_, x, y) in enumerate(loader(world)):
        if step >= start:
            _step(model, optimizer, x, y)
            if world.is_main:
                torch.save((step + 1, model.state_dict()), path)
    return {"weights": weights(model)}


def writes_beside_the_last_one(world: World, folder: Path) -> Result:
    model, start, path = ddp(), 0, folder / "last.pt"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if path.exists():
        start, state = torch.load(path)
        model.load_state_dict(state)
    for step, (_, x, y) in enumerate(loader(world)):
        if step >= start:
            _step(model, optimizer, x, y)
            if world.is_main:
                torch.save((step + 1, model.state_dict()), folder / "new.pt")
                (folder / "new.pt").replace(path)
    return {"weights": weights(model)}


def writes_two_files(world: World, folder: Path) -> Result:
    """Replace two files atomically, but one after the other, so a crash can leave files from different steps."""
    model, start = ddp(), 0
    optimizer = Adam(model.parameters(), lr=0.01)
    if (folder / "model.pt").exists() and (folder / "optimizer.pt").exists():
        start, state = torch.load(folder / "model.pt")
        model.load_state_dict(state)
        optimizer.load_state_dict(torch.load(folder / "optimizer.pt"))
    for step, (_, x, y) in enumerate(loader(world)):
        if step >= start:
            _step(model, optimizer, x, y)
            if world.is_main:
                write(folder / "model.pt", (step + 1, model.state_dict()))
                write(folder / "optimizer.pt", optimizer.state_dict())
    return {"weights": weights(model)}


# ------------------------------------------------------------------------------------------------------ the saved state


def loads_nothing(world: World, folder: Path) -> Result:
    body, start, path = net(), 0, folder / "last.pt"
    if path.exists():
        start, state = torch.load(path)
        body.load_state_dict(state, strict=False)
    model = nn.parallel.DistributedDataParallel(body)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (_, x, y) in enumerate(loader(world)):
        if step >= start:
            _step(model, optimizer, x, y)
            if world.is_main:
                write(path, (step + 1, model.state_dict()))
    return {"weights": weights(model)}


def loads_the_model(world: World, folder: Path) -> Result:
    body, start, path = net(), 0, folder / "last.pt"
    if path.exists():
        start, state = torch.load(path)
        body.load_state_dict(state)
    model = nn.parallel.DistributedDataParallel(body)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (_, x, y) in enumerate(loader(world)):
        if step >= start:
            _step(model, optimizer, x, y)
            if world.is_main:
                write(path, (step + 1, model.module.state_dict()))
    return {"weights": weights(model)}


def saves_what_needs_a_gradient(world: World, folder: Path) -> Result:
    """Save only the parameters, so that BatchNorm's running mean is lost."""
    model, start, path = ddp(nn.BatchNorm1d(8)), 0, folder / "last.pt"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if path.exists():
        start, state = torch.load(path)
        model.load_state_dict(state, strict=False)
    for step, (_, x, y) in enumerate(loader(world)):
        if step >= start:
            _step(model, optimizer, x, y)
            if world.is_main:
                write(path, (step + 1, dict(model.named_parameters())))
    model.eval()
    return {"running": model.module[2].running_mean if world.size == 1 else None}


def drops_the_shuffle_buffer(world: World, folder: Path) -> Result:
    position, seen, path = 0, [], folder / f"stream-{world.rank}.pt"
    if path.exists():
        position, seen = torch.load(path)
    buffer: list[int] = []
    for number in range(position, 24):
        buffer.append(number)
        if len(buffer) == 6:
            seen.append(buffer.pop(random.Random(number).randrange(6)))
            if number % 4 == 0:
                write(path, (number + 1, seen))
    return {"order": torch.tensor(seen + buffer)}


def keeps_the_shuffle_buffer(world: World, folder: Path) -> Result:
    position, seen, path = 0, [], folder / f"stream-{world.rank}.pt"
    buffer: list[int] = []
    if path.exists():
        position, seen, buffer = torch.load(path)
    for number in range(position, 24):
        buffer.append(number)
        if len(buffer) == 6:
            seen.append(buffer.pop(random.Random(number).randrange(6)))
            if number % 4 == 0:
                write(path, (number + 1, seen, buffer))
    return {"order": torch.tensor(seen + buffer)}


def drops_the_random_state(world: World, folder: Path) -> Result:
    dealer, path = random.Random(0), folder / f"stream-{world.rank}.pt"
    left, seen = torch.load(path) if path.exists() else (list(range(12)), [])
    while left:
        seen.append(left.pop(dealer.randrange(len(left))))
        write(path, (left, seen))
    return {"order": torch.tensor(seen)}


def restores_random_numbers_too_early(world: World, folder: Path) -> Result:
    """Restore the random state too early, so that the loader's random draw changes the dropout masks."""
    model, start, path = ddp(nn.Dropout(0.3)), 0, folder / f"rank-{world.rank}.pt"
    torch.manual_seed(50 + world.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if path.exists():
        start, state, numbers = torch.load(path)
        model.load_state_dict(state)
        torch.set_rng_state(numbers)
    for step, (_, x, y) in enumerate(loader(world)):
        if step >= start:
            _step(model, optimizer, x, y)
            write(path, (step + 1, model.state_dict(), torch.get_rng_state()))
    return {"weights": weights(model)}


CHECKPOINTS: tuple[Exhibit, ...] = (
    Exhibit(
        "checkpoints",
        "The checkpoint contains the model but not the optimizer, so the momentum is reset to zero.",
        "The loss jumps after each restart.",
        forgets_the_optimizer,
        keeps_the_optimizer,
        ("cuts",),
        (forgets_the_schedule,),
    ),
    Exhibit(
        "checkpoints",
        "The resumed run starts at the epoch in the checkpoint, which has already been completed, and repeats it.",
        "No symptom. Each restart adds an epoch.",
        runs_the_saved_epoch_again,
        resumes_at_the_next_epoch,
        ("cuts",),
        (starts_the_epoch_anew,),
    ),
    Exhibit(
        "checkpoints",
        "The program resumes from the file with the latest modification time. After the folder is copied, any file can "
        "have the latest time.",
        "Days of training are repeated.",
        takes_the_newest_file,
        takes_the_last_step,
        ("cuts",),
        (takes_the_last_name,),
    ),
    Exhibit(
        "checkpoints",
        "The program overwrites its checkpoint in place, so a crash midway leaves no valid checkpoint.",
        "No symptom until a crash at the wrong moment.",
        writes_over_the_last_one,
        writes_beside_the_last_one,
        ("cuts",),
        (writes_two_files,),
    ),
    Exhibit(
        "checkpoints",
        "Parameter names saved from the DDP wrapper start with `module.`. With `strict=False`, `load_state_dict` "
        "ignores these names and loads nothing.",
        "After a restart, the loss is as high as in a new run.",
        loads_nothing,
        loads_the_model,
        ("cuts",),
        (saves_what_needs_a_gradient,),
    ),
    Exhibit(
        "checkpoints",
        "The checkpoint contains the position in the data stream, but not the shuffle buffer.",
        "No symptom. Some samples are never used.",
        drops_the_shuffle_buffer,
        keeps_the_shuffle_buffer,
        ("cuts",),
        (drops_the_random_state, restores_random_numbers_too_early),
    ),
)
