"""Compare measured step times with predictions that `predict_step` computes from one measured backward pass."""

import time
from typing import Any

import torch.distributed as dist

from ddp_tutorial.accumulation.loss import call_loss
from ddp_tutorial.accumulation.strategies import DDPStrategy
from ddp_tutorial.accumulation.train_step import TrainStep
from ddp_tutorial.benches import Samples, report
from ddp_tutorial.benches.step import random_step
from ddp_tutorial.ddp.config import DDPConfig, LinkConfig
from ddp_tutorial.ddp.link_model import LinkModel
from ddp_tutorial.ddp.timeline import arrivals, predict_step, ready_times
from ddp_tutorial.ddp.wrappers import BucketDDP
from ddp_tutorial.phases import Stopwatch, observe
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.world import World

_SAMPLES = 8  # per rank per step
_CAPS = [0.1, 0.4, 1.6, 6.4, 25.6]  # MiB
_LINKS = {
    "latency_bound": LinkConfig(latency_ms=5, megabytes_per_second=1000),
    "balanced": LinkConfig(latency_ms=1, megabytes_per_second=200),
    "bandwidth_bound": LinkConfig(latency_ms=0.5, megabytes_per_second=50),
}


def measure(repeats: int) -> dict[str, Any]:
    """Measure and predict the step time for each bucket size on three simulated links.

    The two ranks are single-threaded. The ratios of predicted to measured time should be close to 1.
    """
    samples = launch(_sweep, 2, repeats, device="cpu", threads=1, echo=False)[0]
    points = [name.removesuffix("_measured") for name in samples if name.endswith("_measured")]
    ratios = {point: (f"{point}_predicted", f"{point}_measured") for point in points}
    return report("buckets", samples, "s", ratios)


def _sweep(world: World, repeats: int) -> Samples:
    samples: Samples = {}
    for regime, link in _LINKS.items():
        for cap in _CAPS:
            step = random_step(world, _SAMPLES, ddp=DDPConfig(variant="bucket", bucket_cap_mb=cap, simulated_link=link))
            step()  # rebuilds the buckets
            point = f"{regime}_{cap}"
            samples |= {f"{point}_predicted": [], f"{point}_measured": []}
            for _ in range(repeats):  # alternate, so that background load affects both arms equally
                dist.barrier()
                before_and_after, arrived = _alone(step)
                dist.barrier()
                start = time.perf_counter()
                with observe(Stopwatch()) as watch:
                    step()
                samples[f"{point}_measured"].append(time.perf_counter() - start)
                rest = before_and_after + watch.take()["update"]
                samples[f"{point}_predicted"].append(_predict(step, arrived, LinkModel.from_config(link), rest))
    return samples


def _alone(step: TrainStep) -> tuple[float, dict[str, float]]:
    """Return the forward time in seconds, and each gradient's arrival time in a backward pass without all-reduces."""
    model, [batch] = _model(step), step.batches()
    start = time.perf_counter()
    with model.no_sync():
        loss, _ = call_loss(step.loss, model, batch)
        forward = time.perf_counter() - start
        arrived = arrivals(step.model, loss.backward)
    step.optimizer.zero_grad()
    return forward, arrived


def _predict(step: TrainStep, arrived: dict[str, float], link: LinkModel, rest: float) -> float:
    model = _model(step)
    size, backward = model.world.size, max(arrived.values())
    seconds = [link.ring_seconds(bucket.buffer.nbytes, size) for bucket in model.buckets]
    who_uses_what = link.ring_seconds(4 * len(arrived), size)
    ready = ready_times(model.buckets, arrived)
    return predict_step([*ready, backward], [*seconds, who_uses_what], backward, rest)


def _model(step: TrainStep) -> BucketDDP:
    assert isinstance(step.strategy, DDPStrategy)
    assert isinstance(step.strategy.model, BucketDDP)
    return step.strategy.model
