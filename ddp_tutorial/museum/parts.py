"""Building blocks of the museum's programs: 24 numbered samples, a small model, and an atomic write."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset

from ddp_tutorial.world import World

Result = dict[str, Any]
Program = Callable[..., Any]


@dataclass(frozen=True)
class Exhibit:
    """A bug, a minimal program that contains the bug, and a fixed version of the program.

    `story` explains the bug, and `seen` describes its symptoms. The broken program violates at least one of the
    invariants in `caught_by`. `variants` are programs with the same bug in a different form or place.
    """

    subject: str
    story: str
    seen: str
    broken: Program
    fixed: Program
    caught_by: tuple[str, ...]
    variants: tuple[Program, ...]

    @property
    def name(self) -> str:
        """Name of the broken program."""
        return self.broken.__name__


def _data() -> TensorDataset:
    """Return 24 samples with indices, inputs [4] and targets [1], in double precision so that sums can be compared."""
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return TensorDataset(torch.arange(24), x, x.sum(1, keepdim=True).sin() + 2 * (x[:, :1] > 0))


DATA = _data()


def net(*layers: nn.Module) -> nn.Sequential:
    """Return a model with 4 inputs, 1 output, and `layers` in the middle. The initial weights are fixed."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), *layers, nn.Linear(8, 1)).double()


def ddp(*layers: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(net(*layers), **options)


def loader(world: World, batch: int = 8, samples: int = 24) -> DataLoader[Any]:
    """Return a loader for this rank's shard of the first `samples` samples. `batch` is the global batch size."""
    data: Dataset[Any] = Subset(DATA, range(samples))
    sampler: DistributedSampler[Any] = DistributedSampler(data, world.size, world.rank, shuffle=False)
    return DataLoader(data, batch // world.size, sampler=sampler)


def pieces(world: World, accumulate: int, batch: int = 8) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield this rank's micro-batches, each with its index within the batch."""
    for _, x, y in loader(world, batch):
        yield from zip(range(accumulate), x.chunk(accumulate), y.chunk(accumulate), strict=True)


def weights(model: nn.Module) -> torch.Tensor:
    """Return all weights of a model as one detached vector [elements]."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def write(path: Path, state: object) -> None:
    """Save `state` to `path` atomically: a crash midway leaves the old file intact."""
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)
