"""Measure the training stall that a checkpoint causes, and the speed of writing the checkpoint to disk."""

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ddp_tutorial.benches import Samples, report
from ddp_tutorial.checkpoint.checkpointer import Checkpointer
from ddp_tutorial.checkpoint.components import Component
from ddp_tutorial.checkpoint.manifest import MANIFEST, Manifest, checkpoint_name, latest, sha256_of_json
from ddp_tutorial.world import World

WIDTH, LAYERS = 1024, 12  # a model of 50 MB; 150 MB with AdamW's state


def measure(repeats: int) -> dict[str, Any]:
    """Measure the cost of a checkpoint in one process, in seconds.

    Three arms save the same state. They measure a synchronous save, the training stall of a background save, and
    `torch.save` followed by fsync. The fourth arm measures the search for the newest of 1,000 checkpoints.
    """
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-") as name:
        folder = Path(name)
        parts = _parts()
        saver = Checkpointer(folder / "sync", parts, World())
        background = Checkpointer(folder / "background", parts, World(), background=True)
        many = _thousand(folder / "many")
        arms: dict[str, Callable[[int], float]] = {
            "sync_save": lambda step: _timed(lambda: saver.save(step)),
            "async_stall": lambda step: _stall(background, step),
            "torch_save": lambda step: _timed(lambda: _torch_save(parts, folder / "plain.pt")),
            "latest_of_1000": lambda step: _timed(lambda: latest(many)),
        }
        samples: Samples = {arm: [] for arm in arms}
        for repeat in range(repeats + 1):
            for arm in sorted(arms, reverse=bool(repeat % 2)):
                seconds = arms[arm](repeat)
                if repeat:  # the first repeat is a warm-up, which allocates memory and creates folders
                    samples[arm].append(seconds)
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
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _stall(checkpointer: Checkpointer, step: int) -> float:
    """Return the total time in seconds for which a background save stalls training, while saving and publishing."""
    stalled = _timed(lambda: checkpointer.save(step))
    while checkpointer.is_writing:
        time.sleep(0.01)
    return stalled + _timed(checkpointer.poll)


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
