"""Compare popular trainers and this package's trainer with a plain torch loop on the same work.

Trainers are timed from the eleventh to the last step, including their work between steps. Every arm reports the global
mean loss of every step, which requires one small all-reduce. This package's trainer also writes its log and TensorBoard
events, as in normal use.

The arm `ours` sends gradients through gloo, as all other trainers do. The arm `shared_memory` is the same
trainer with `ddp.shared_memory`, for two ranks on one host.
"""

import statistics
from functools import partial
from typing import Any

from ddp_tutorial.benches import Samples, report
from ddp_tutorial.experiments.arms import alternate
from ddp_tutorial.peers import NAMES, gpt, train_with
from ddp_tutorial.peers.work import Work
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.world import World

_ARMS = [*NAMES, "shared_memory"]
_PEERS = [name for name in NAMES if name not in {"plain", "ours"}]
_NOTE = "Every arm reports the global mean loss of every step."
# Name -> (layers, heads, width, steps per repeat), as in bench overhead. A repeat takes about a second.
_SIZES = {"tiny": (1, 1, 16, 150), "small": (2, 4, 64, 80), "large": (4, 4, 128, 40)}


def measure(repeats: int) -> dict[str, Any]:
    """Measure each trainer's samples per second on two single-threaded ranks, for three model sizes."""
    samples: Samples = {}
    for size, (layers, heads, width, steps) in _SIZES.items():
        work = gpt(steps, layers=layers, heads=heads, width=width)
        rates = launch(_in_turn, 2, work, repeats, device="cpu", threads=1, echo=False, timeout=600)[0]
        samples |= {f"{name}_{size}": values for name, values in rates.items()}
    ratios = {
        f"{name}_vs_plain_{size}": (f"{name}_{size}", f"plain_{size}")
        for size in _SIZES
        for name in _ARMS
        if name != "plain"
    }
    best = {size: _best_peer(samples, size) for size in _SIZES}
    ratios |= {
        f"{name}_vs_best_peer_{size}": (f"{name}_{size}", f"{best[size]}_{size}")
        for name in ("ours", "shared_memory")
        for size in _SIZES
    }
    return report("peers", samples, "samples/s", ratios) | {"best_peer": best, "note": _NOTE}


def _best_peer(samples: Samples, size: str) -> str:
    """Return the peer with the highest speed relative to the plain loop (median of the per-repeat ratios)."""

    def ratio(name: str) -> float:
        pairs = zip(samples[f"{name}_{size}"], samples[f"plain_{size}"], strict=True)
        return statistics.median(rate / plain for rate, plain in pairs)

    return max(_PEERS, key=ratio)


def _in_turn(world: World, work: Work, repeats: int) -> Samples:
    """Return the samples per second of each trainer in each repeat. Collective.

    Each trainer's first turn is a warm-up, which imports the trainer's modules.
    """

    def rate(name: str) -> float:
        return world.size * work.per_rank / train_with(world, [name], work)[name].seconds

    return alternate({name: partial(rate, name) for name in _ARMS}, repeats)
