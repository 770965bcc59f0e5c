"""Hugging Face's Accelerate as a strategy: it wraps the model, decides which micro-batch talks, and runs backward.

What it does not do for its users stays as with the other strategies: the gradient is that of a sum over a count of all
ranks, half precision is that of `Precision`, and a checkpoint has the parts that it has with strategy ddp. Accelerate
divides each loss by the number of micro-batches; so the loss is multiplied by that before.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from ddp_tutorial.accumulation.config import FORWARDED_OPTIONS
from ddp_tutorial.accumulation.loss import Loss, StepLoss, Totals, require_call
from ddp_tutorial.accumulation.precision import Precision
from ddp_tutorial.accumulation.strategies import ReplicatedStrategy
from ddp_tutorial.config import ConfigError
from ddp_tutorial.ddp.config import DDPConfig
from ddp_tutorial.ddp.link import Link
from ddp_tutorial.ddp.wrappers import sync_initial_state
from ddp_tutorial.phases import phase
from ddp_tutorial.world import World

# Of `DDPConfig`: what Accelerate hands on to torch's DistributedDataParallel.


def require_accelerate() -> None:
    """Raise `ConfigError` where the package is not installed."""
    if find_spec("accelerate") is None:
        raise ConfigError(
            "strategy accelerate needs the package of that name, which is not installed: "
            "pip install -c constraints.txt -e '.[peers]'"
        )


class AccelerateStrategy(ReplicatedStrategy):
    """Every rank has the whole model, which `Accelerator.prepare` wraps; `accumulate` and `backward` are Accelerate's.

    Of `config`, only what is in `FORWARDED_OPTIONS` has a meaning. Collective. Raises `ConfigError` where Accelerate
    is not installed, and where this process has told it, by ACCELERATE_* variables or an `Accelerator` of its own, of
    another world, another device or more than averaging gradients.
    """

    link: Link | None = None  # torch's C++ code calls gloo or NCCL by itself

    def __init__(
        self,
        model: nn.Module,
        world: World,
        loss: Loss,
        config: DDPConfig | None = None,
        *,
        accumulation: int = 1,
        precision: Precision | None = None,
    ) -> None:
        require_accelerate()
        from accelerate import Accelerator
        from accelerate.utils import DistributedDataParallelKwargs

        super().__init__(model, world)
        sync_initial_state(model, world)
        self.accumulation = accumulation
        self.loss = StepLoss(loss, world, precision)
        config = config or DDPConfig()
        options = {name: getattr(config, name) for name in FORWARDED_OPTIONS}
        if options["bucket_cap_mb"] is None:
            del options["bucket_cap_mb"]
        with _environment_of(world):
            self.accelerator = Accelerator(
                cpu=world.device.type == "cpu",
                mixed_precision="no",  # that is for `Precision`
                gradient_accumulation_steps=accumulation,
                kwargs_handlers=[DistributedDataParallelKwargs(**options)],
            )
        _require_fit(self.accelerator, world)
        self.wrapped = self.accelerator.prepare(model)
        self.calls = 0  # forward passes so far
        self.wrapped.register_forward_pre_hook(self._count_call)

    def _count_call(self, *_: object) -> None:
        self.calls += 1

    @property
    def micro_batches_per_rank(self) -> int:
        return self.accumulation

    def backward(self, batches: Sequence[Any], stop_flags: float = 0.0) -> Totals:
        if not batches:
            raise ValueError("a step has 1 micro-batch or more, found 0")
        parts = len(batches)
        self.loss.begin(parts)
        # Accelerate counts micro-batches over all steps; one that has failed is not to shift the next.
        self.accelerator.step, self.accelerator.gradient_accumulation_steps = 0, parts
        for number, batch in enumerate(batches):
            with self.accelerator.accumulate(self.wrapped):
                calls = self.calls
                with phase("forward"):
                    # Gradients are averaged over ranks and micro-batches, and this is a part of a sum.
                    part = self.loss.forward(self.wrapped, batch, loss_multiplier=self.world.size * parts)
                require_call(self.calls > calls)
                if number == parts - 1:
                    self.loss.reduce(stop_flags)
                with phase("backward"):
                    self.accelerator.backward(part)
        with phase("finish"):
            return self.loss.finish(each for each in self.module.parameters() if each.requires_grad)


@contextmanager
def _environment_of(world: World) -> Iterator[None]:
    """Inside, the environment says of the world what `world` does: Accelerate reads it, knows nothing of Slurm's, would
    start a group for one rank of torchrun's, and set the number of threads."""
    told = {
        "RANK": world.rank,
        "WORLD_SIZE": world.size,
        "LOCAL_RANK": world.local_rank,
        "LOCAL_WORLD_SIZE": world.local_size,
    }
    before = dict(os.environ)
    for name, number in told.items():
        os.environ.pop(name, None)
        if world.size > 1:
            os.environ[name] = str(number)
    os.environ |= {"ACCELERATE_TORCH_DEVICE": str(world.device), "OMP_NUM_THREADS": str(torch.get_num_threads())}
    try:
        yield
    finally:
        for name in [name for name in os.environ if name not in before]:
            del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


def _require_fit(accelerator: Any, world: World) -> None:
    """Raise `ConfigError` where Accelerate does not do what this strategy is for."""
    kind = accelerator.distributed_type.value
    wanted = "NO" if world.size == 1 else f"MULTI_{'GPU' if world.device.type == 'cuda' else 'CPU'}"
    found = (kind, accelerator.process_index, accelerator.num_processes, str(accelerator.device))
    expected = (wanted, world.rank, world.size, str(world.device))
    if found != expected:
        raise ConfigError(
            "Accelerate is set up as {} for rank {} of {} on {}, and strategy accelerate needs {} for rank {} of {} on "
            "{}. Leave out what has set it up in this process: ACCELERATE_* variables, or an Accelerator".format(
                *found, *expected
            )
        )
    if world.size > 1 and world.device.type == "cuda" and world.device.index != world.local_rank:
        raise ConfigError(
            "strategy accelerate gives each rank a GPU of its own: ranks that share one need strategy=ddp"
        )
