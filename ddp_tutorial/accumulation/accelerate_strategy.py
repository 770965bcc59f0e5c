"""Define a strategy that trains with Hugging Face's Accelerate.

Accelerate wraps the model, selects the micro-batch in which the ranks communicate, and runs the backward pass. Losses,
mixed precision and checkpoints work as with `strategy=ddp`. Accelerate divides each loss by the number of
micro-batches, so this strategy first multiplies the loss by that number.
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
from ddp_tutorial.ddp.wrappers import sync_initial_state, with_call
from ddp_tutorial.phases import phase
from ddp_tutorial.world import World


def require_accelerate() -> None:
    """Raise `ConfigError` if the `accelerate` package is not installed."""
    if find_spec("accelerate") is None:
        raise ConfigError(
            "strategy=accelerate requires the 'accelerate' package, which is not installed. Run: "
            "pip install 'ddp-tutorial[peers]'"
        )


class AccelerateStrategy(ReplicatedStrategy):
    """A data-parallel strategy that uses Accelerate's `prepare`, `accumulate` and `backward`.

    The constructor is collective. The strategy uses only the `config` options that `FORWARDED_OPTIONS` lists.

    Raises:
        ConfigError: If Accelerate is not installed, or if ACCELERATE_* variables or an earlier `Accelerator` selected a
            different world, a different device, or unsupported features.
    """

    link: Link | None = None  # PyTorch's C++ code calls gloo or NCCL directly

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
        """Wrap the model, and broadcast rank 0's weights."""
        require_accelerate()
        precision = precision or Precision(world=world)
        _require_launch_options(precision.config.dtype, accumulation)
        from accelerate import Accelerator
        from accelerate.utils import DistributedDataParallelKwargs

        super().__init__(model, world)
        sync_initial_state(model, world)
        self.micro_batches_per_rank = accumulation
        self.loss = StepLoss(loss, world, precision)
        config = config or DDPConfig()
        options = {name: getattr(config, name) for name in FORWARDED_OPTIONS}
        if options["bucket_cap_mb"] is None:
            del options["bucket_cap_mb"]
        with _environment_of(world):
            self.accelerator = Accelerator(
                cpu=world.device.type == "cpu",
                mixed_precision="no",  # `Precision` handles it
                gradient_accumulation_steps=accumulation,
                kwargs_handlers=[DistributedDataParallelKwargs(**options)],
            )
        _require_fit(self.accelerator, world)
        self.wrapped = self.accelerator.prepare(model)
        self.loss_model = with_call(model, self.wrapped)
        self.calls = 0  # forward passes so far
        self.wrapped.register_forward_pre_hook(self._count_call)

    def _count_call(self, *_: object) -> None:
        self.calls += 1

    def backward(self, batches: Sequence[Any], stop_flags: float = 0.0) -> Totals:
        """Compute `.grad`, and return the totals over all ranks; see `Strategy.backward`."""
        if not batches:
            raise ValueError("a step must have at least 1 micro-batch, got 0")
        parts = len(batches)
        self.loss.begin(parts)
        # Accelerate counts micro-batches over all steps. Reset the count, because a failed step would shift it.
        self.accelerator.step, self.accelerator.gradient_accumulation_steps = 0, parts
        for number, batch in enumerate(batches):
            with self.accelerator.accumulate(self.wrapped):
                calls = self.calls
                with phase("forward"):
                    # Compensate for the averaging over ranks and micro-batches, because this loss is one term of a sum.
                    part = self.loss.forward(self.loss_model, batch, loss_multiplier=self.world.size * parts)
                require_call(self.calls > calls)
                if number == parts - 1:
                    self.loss.reduce(stop_flags)
                with phase("backward"):
                    self.accelerator.backward(part)
        with phase("finish"):
            return self.loss.finish(each for each in self.module.parameters() if each.requires_grad)


def _require_launch_options(dtype: str, accumulation: int) -> None:
    """Raise `ConfigError` if an option of `accelerate launch` contradicts the config."""
    for variable, used, instead in (
        ("ACCELERATE_MIXED_PRECISION", {"no" if dtype == "fp32" else dtype}, "set precision.dtype (fp32, bf16, fp16)"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", {str(accumulation)}, "set accumulation"),
        ("ACCELERATE_DYNAMO_BACKEND", set(), "set compile=true with strategy=ddp"),
    ):
        value = os.environ.get(variable, "no").lower()
        if value not in {"no", "1", *used}:
            option = variable.removeprefix("ACCELERATE_").lower()
            raise ConfigError(
                f"strategy=accelerate does not support 'accelerate launch --{option} {value}'. Remove the option, and "
                f"{instead}"
            )


@contextmanager
def _environment_of(world: World) -> Iterator[None]:
    """Set Accelerate's environment variables to match `world` for the duration of the block.

    Otherwise, Accelerate would ignore Slurm's variables, create a process group for a single torchrun rank, and change
    the number of threads.
    """
    configured = {
        "RANK": world.rank,
        "WORLD_SIZE": world.size,
        "LOCAL_RANK": world.local_rank,
        "LOCAL_WORLD_SIZE": world.local_size,
    }
    before = dict(os.environ)
    for name, number in configured.items():
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
    """Raise `ConfigError` if Accelerate's settings do not match `world`, or if ranks share a GPU."""
    kind = accelerator.distributed_type.value
    wanted = "NO" if world.size == 1 else f"MULTI_{'GPU' if world.device.type == 'cuda' else 'CPU'}"
    found = (kind, accelerator.process_index, accelerator.num_processes, str(accelerator.device))
    expected = (wanted, world.rank, world.size, str(world.device))
    if found != expected:
        raise ConfigError(
            "Accelerate must be configured with distributed type {}, rank {} of {} and device {}, got distributed type "
            "{}, rank {} of {} and device {}. Unset the ACCELERATE_* environment variables, and use only one "
            "Accelerator per process".format(*expected, *found)
        )
    if world.size > 1 and world.device.type == "cuda" and world.device.index != world.local_rank:
        raise ConfigError("strategy=accelerate requires one GPU per rank; use strategy=ddp for ranks that share a GPU")
