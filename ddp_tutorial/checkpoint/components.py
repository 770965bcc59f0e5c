"""What can be saved, and which ranks share it: the components that a `Checkpointer` is given."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from ddp_tutorial.checkpoint.manifest import CheckpointError
from ddp_tutorial.collectives import all_gather
from ddp_tutorial.config import ConfigError
from ddp_tutorial.world import World

Shared = Literal["replicated", "global", "per_rank", "per_node", "per_group", "sharded"]
State = dict[str, Any]


class Stateful(Protocol):
    """Anything with a state that can be saved and restored: a module, an optimizer, a source, ..."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


@runtime_checkable
class Reshardable(Protocol):
    """A `Stateful` that can also be restored on another number of ranks than it was saved on.

    Every rank gets the states of all ranks (or groups of ranks) that saved one, in the order of their ranks, and the
    step of the checkpoint.
    """

    def load_resharded(self, states: Sequence[State], step: int) -> None: ...


class StoredTensor(NamedTuple):
    """A tensor of a sharded component, as it is in a checkpoint: whole."""

    shape: torch.Size
    dtype: torch.dtype


@runtime_checkable
class LazyState(Protocol):
    """A sharded `Stateful` whose `state_dict` has no tensors yet to read into, as an optimizer's before its first step.

    `empty` is told what the checkpoint has, and returns what of that this rank is to read, and into what.
    """

    def empty(self, stored: Mapping[str, StoredTensor]) -> State: ...


@dataclass(frozen=True)
class Component:
    """A part of a run's state, and which ranks have the same of it; see `checkpointer` for the ways to share.

    `span` is for per_group: the number of ranks in a group.
    """

    stateful: Stateful
    shared: Shared = "replicated"
    span: int = 1

    def ranks_alike(self, world: World) -> int:
        """How many consecutive ranks have the same state; the first of them writes it.

        Raises `ValueError` where the world size is not a multiple of that.
        """
        spans = {
            "replicated": world.size,
            "global": world.size,
            "per_node": world.local_size,
            "per_rank": 1,
            "sharded": 1,
        }
        span = spans.get(self.shared, self.span)
        if span < 1 or world.size % span:
            raise ValueError(f"{world.size} ranks cannot be cut into groups of {span}")
        return span


def require_even_nodes(world: World, components: Mapping[str, Component]) -> None:
    """Raise `ValueError`, on all ranks, where a component is per node and machines have different numbers of ranks."""
    names = [name for name, component in components.items() if component.shared == "per_node"]
    sizes = sorted(set(all_gather(world, world.local_size))) if names else []
    if len(sizes) > 1:
        raise ValueError(f"{names[0]!r} is per_node, but some machines have {sizes[0]} ranks, and some {sizes[-1]}")


def require_unsharded(world: World, components: Mapping[str, Component]) -> None:
    """Raise `ConfigError` where a component is sharded, of which rank 0 does not write and read for all."""
    names = [name for name, component in components.items() if component.shared == "sharded"]
    if names and world.size > 1:
        raise ConfigError(
            f"'checkpoint.shared' false: each rank has a piece of {names[0]!r}, and rank 0 keeps whole states only. "
            "Use checkpoint.shared=true, on a disk that all nodes share, or a strategy whose ranks have the whole state"
        )


@dataclass(frozen=True)
class FunctionState:
    """A `Stateful` made of two functions, for an object whose methods have other names."""

    get: Callable[[], Mapping[str, Any]]
    put: Callable[[State], object]

    def state_dict(self) -> Mapping[str, Any]:
        return self.get()

    def load_state_dict(self, state: State) -> None:
        self.put(state)


class RandomState:
    """The random number generators of Python, NumPy, and torch on the CPU and on this rank's GPU, as a `Stateful`.

    `reseed(step)` seeds them anew when a checkpoint is loaded on another number of ranks.
    """

    def __init__(self, device: torch.device, reseed: Callable[[int], None] | None = None) -> None:
        self.device, self.reseed = device, reseed

    def state_dict(self) -> State:
        """Plain values and tensors."""
        python_version, numbers, gauss = random.getstate()
        kind, keys, position, has_gauss, cached = np.random.get_state()
        state: State = {
            "python": (python_version, numbers, gauss),
            "numpy": (
                kind,
                torch.from_numpy(np.asarray(keys).astype(np.int64)),
                int(position),
                int(has_gauss),
                float(cached),
            ),
            "torch": torch.get_rng_state(),
        }
        if self.device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self.device)
        return state

    def load_state_dict(self, state: State) -> None:
        """Set all generators back to where they were when the state was taken."""
        random.setstate(state["python"])
        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
        torch.set_rng_state(state["torch"])
        if "cuda" in state and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda"], self.device)

    def load_resharded(self, states: Sequence[State], step: int) -> None:
        """Seed anew: a generator's state cannot be divided among more ranks, or fewer. Raises `CheckpointError` without
        `reseed`."""
        if self.reseed is None:
            raise CheckpointError("the random numbers of another number of ranks need a 'reseed'")
        self.reseed(step)
