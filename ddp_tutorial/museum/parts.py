"""What the programs of the museum are made of: 24 numbered samples, a small model, and a file written at once."""

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
    """A bug: the smallest program that has it, and the same one without.

    `story` says what is wrong, `seen` what one sees of it. `caught_by` names the laws that
    are made for it; one of them, at least, is broken. `variants` make the same mistake in another way or place.
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
        return self.broken.__name__


def _data() -> TensorDataset:
    """24 samples: their numbers, inputs [4] and targets [1], in double precision so that sums can be compared."""
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return TensorDataset(torch.arange(24), x, x.sum(1, keepdim=True).sin() + 2 * (x[:, :1] > 0))


DATA = _data()


def net(*layers: nn.Module) -> nn.Sequential:
    """The same weights each time: 4 inputs, `layers` in the middle, 1 output."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), *layers, nn.Linear(8, 1)).double()


def ddp(*layers: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(net(*layers), **options)


def loader(world: World, batch: int = 8, samples: int = 24) -> DataLoader[Any]:
    """This rank's part of the first `samples`, in batches that are `batch` samples over all ranks."""
    data: Dataset[Any] = Subset(DATA, range(samples))
    sampler: DistributedSampler[Any] = DistributedSampler(data, world.size, world.rank, shuffle=False)
    return DataLoader(data, batch // world.size, sampler=sampler)


def pieces(world: World, accumulate: int, batch: int = 8) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Micro-batches of this rank, each with its place in its batch."""
    for _, x, y in loader(world, batch):
        yield from zip(range(accumulate), x.chunk(accumulate), y.chunk(accumulate), strict=True)


def weights(model: nn.Module) -> torch.Tensor:
    """All weights of a model in one vector [elements], without a graph."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def write(path: Path, state: object) -> None:
    """Save `state` to `path` atomically: after a kill the file is there with all of it, or as it was before."""
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)
