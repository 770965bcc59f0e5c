"""Compare popular trainers and this package's trainer with a plain torch loop on the same work.

Only the training loop is timed, from the eleventh step to the last: forward pass, backward pass, update, and all other
work between steps. This package's trainer writes its log and TensorBoard events, as it does by default; the logs of the
other trainers are disabled. It is measured twice: configured for two ranks on one host (`ddp.shared_memory`), and with
gloo, which all other trainers use.
"""

import statistics
from typing import Any

from ddp_tutorial.benches import Samples, report
from ddp_tutorial.peers import NAMES, gpt, train_with
from ddp_tutorial.peers.work import Work
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.world import World

_ARMS = [*NAMES, "ours_through_gloo"]
# Name -> (layers, heads, width, steps per repeat), as in bench overhead. A repeat takes about a second.
_SIZES = {"tiny": (1, 1, 16, 150), "small": (2, 4, 64, 80), "large": (4, 4, 128, 40)}


def measure(repeats: int) -> dict[str, Any]:
    """Measure the samples per second of each trainer on two ranks with one thread each, for three model sizes."""
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
    result = report("peers", samples, "samples/s", ratios)
    for size in _SIZES:
        best = max(
            (name for name in NAMES if name not in {"plain", "ours"}),
            key=lambda name: result["ratios"][f"{name}_vs_plain_{size}"],
        )
        pairs = zip(samples[f"ours_{size}"], samples[f"{best}_{size}"], strict=True)
        result["ratios"][f"ours_vs_best_peer_{size}"] = statistics.median(a / b for a, b in pairs)
        result["best_peer"] = result.get("best_peer", {}) | {size: best}
    result["ratios"]["ours_vs_best_peer"] = result["ratios"]["ours_vs_best_peer_tiny"]  # the worst case
    return result


def _in_turn(world: World, work: Work, repeats: int) -> Samples:
    """Return the samples per second of each trainer in each repeat. Collective.

    The first turn is a warm-up, which imports the trainer's modules.
    """
    rates: Samples = {name: [] for name in _ARMS}
    for number in range(repeats + 1):
        for name in _ARMS[:: -1 if number % 2 else 1]:
            outcome = train_with(world, [name], work)[name]
            if number:
                rates[name].append(world.size * work.per_rank / outcome.seconds)
    return rates
