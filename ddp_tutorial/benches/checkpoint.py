"""Measure the training stall that a checkpoint causes, and the time to write the checkpoint to disk."""

import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ddp_tutorial.benches import report
from ddp_tutorial.checkpoint.checkpointer import Checkpointer
from ddp_tutorial.checkpoint.components import Component
from ddp_tutorial.checkpoint.manifest import MANIFEST, Manifest, checkpoint_name, latest, sha256_of_json
from ddp_tutorial.experiments.arms import alternate, seconds_of
from ddp_tutorial.world import World

WIDTH, LAYERS = 1024, 12  # a model of 50 MB; 150 MB with AdamW's state


def measure(repeats: int) -> dict[str, Any]:
    """Measure the cost of a checkpoint in one process, in seconds.

    Three arms save the same state: with a synchronous save, with a background save (only the training stall is
    measured), and with `torch.save` and fsync. The fourth arm measures the search for the newest of 1,000 checkpoints.
    """
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-") as name:
        folder = Path(name)
        parts = _parts()
        saver = Checkpointer(folder / "sync", parts, World())
        background = Checkpointer(folder / "background", parts, World(), background=True)
        many = _thousand(folder / "many")
        steps = itertools.count()
        samples = alternate(
            {
                "async_stall": lambda: _stall(background, next(steps)),
                "latest_of_1000": lambda: _timed(lambda: latest(many)),
                "sync_save": lambda: _save(saver, next(steps)),
                "torch_save": lambda: _timed(lambda: _torch_save(parts, folder / "plain.pt")),
            },
            repeats,
        )
    ratios = {
        "async_stall_vs_sync": ("async_stall", "sync_save"),
        "sync_bandwidth_vs_torch_save": ("torch_save", "sync_save"),  # the times are for the same bytes
    }
    return report("checkpoint", samples, "s", ratios)


def _parts() -> dict[str, Component]:
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(1, WIDTH)).sum().backward()
    optimizer.step()
    return {"model": Component(model), "optimizer": Component(optimizer)}


def _timed(work: Callable[[], object]) -> float:
    os.sync()  # exclude earlier writes
    return seconds_of(work)


def _save(checkpointer: Checkpointer, step: int) -> float:
    seconds = _timed(lambda: checkpointer.save(step))
    checkpointer.close()  # otherwise, a thread would remove the old checkpoint while the next arm runs
    return seconds


def _stall(checkpointer: Checkpointer, step: int) -> float:
    """Return the total time in seconds for which a background save stalls training, in `save` and in `poll`."""
    stalled = _timed(lambda: checkpointer.save(step))
    while checkpointer.is_writing:
        time.sleep(0.01)
    stalled += _timed(checkpointer.poll)
    checkpointer.close()
    return stalled


def _torch_save(parts: dict[str, Component], path: Path) -> None:
    with path.open("wb") as file:
        torch.save({name: part.stateful.state_dict() for name, part in parts.items()}, file)
        file.flush()
        os.fsync(file.fileno())


def _thousand(folder: Path) -> Path:
    for step in range(1000):
        there = folder / checkpoint_name(step)
        there.mkdir(parents=True)
        manifest = Manifest(
            schema_version=1,
            step=step,
            world_size=1,
            versions={},
            config={},
            config_sha256=sha256_of_json({}),
            metrics={},
            components={},
        )
        (there / MANIFEST).write_text(json.dumps(manifest.sealed()))
    return folder
