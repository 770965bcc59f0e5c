"""Define the components of a run's state, and the ranks that share each component."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

import numpy as np
import torch
from torch import nn

from ddp_tutorial.checkpoint.manifest import CheckpointError
from ddp_tutorial.collectives import all_gather
from ddp_tutorial.compat import uncompiled
from ddp_tutorial.config import ConfigError
from ddp_tutorial.world import World

Shared = Literal["replicated", "global", "per_rank", "per_node", "per_group", "sharded"]
State = dict[str, Any]


class Stateful(Protocol):
    """An object whose state can be saved and restored, such as a module, an optimizer, or a data source."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state as nested dicts, lists, and tuples of tensors and plain values."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Restore a state that `state_dict` returned."""


@runtime_checkable
class Reshardable(Protocol):
    """A `Stateful` that can also be restored on a different number of ranks."""

    def load_resharded(self, states: Sequence[State], step: int) -> None:
        """Restore this rank's state from all states that were saved at `step`.

        `states` contains one state per rank or group of ranks, in rank order.
        """


class StoredTensor(NamedTuple):
    """The full shape and the dtype of a sharded tensor in a checkpoint."""

    shape: torch.Size
    dtype: torch.dtype


@runtime_checkable
class LazyState(Protocol):
    """A sharded `Stateful` whose `state_dict` contains no tensors yet, such as an optimizer before its first step."""

    def empty(self, stored: Mapping[str, StoredTensor]) -> State:
        """Return tensors to be filled with this rank's part of the `stored` tensors."""


@dataclass(frozen=True)
class Component:
    """A part of a run's state, and the ranks that share it.

    Attributes:
        stateful: The object to save and restore. If the object is a model wrapped by `torch.compile`, the original
            model is stored.
        shared: The ranks that hold the same state; see `checkpointer` for the possible values.
        span: The number of ranks in a group. `span` is ignored unless `shared` is `"per_group"`.
    """

    stateful: Stateful
    shared: Shared = "replicated"
    span: int = 1

    def __post_init__(self) -> None:
        """Unwrap a compiled model, so that compiled and uncompiled models have the same parameter names.

        Raises:
            ValueError: If `shared` is not a known value.
        """
        if self.shared not in get_args(Shared):
            raise ValueError(f"shared must be one of {', '.join(get_args(Shared))}, got {self.shared!r}")
        if isinstance(self.stateful, nn.Module):
            object.__setattr__(self, "stateful", uncompiled(self.stateful))

    def ranks_alike(self, world: World) -> int:
        """Return the number of consecutive ranks that hold the same state. The first of these ranks writes the state.

        Raises:
            ValueError: If the world size is not a multiple of the group size.
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
            raise ValueError(f"{world.size} ranks cannot be divided into groups of {span}")
        return span


def require_even_nodes(world: World, components: Mapping[str, Component]) -> None:
    """Raise an error on all ranks if a `"per_node"` component does not fit the nodes. Collective.

    Raises:
        ValueError: If a component's `shared` is `"per_node"`, and the number of ranks differs between nodes or the
            ranks of a node are not consecutive.
    """
    names = [name for name, component in components.items() if component.shared == "per_node"]
    if not names:
        return
    local_ranks, local_sizes = zip(*all_gather(world, (world.local_rank, world.local_size)), strict=True)
    sizes = sorted(set(local_sizes))
    if len(sizes) > 1:
        raise ValueError(
            f"{names[0]!r} is per_node, so all nodes must have the same number of ranks, got {sizes[0]} and {sizes[-1]}"
        )
    if wrong := [rank for rank, local in enumerate(local_ranks) if local != rank % sizes[0]]:
        raise ValueError(
            f"{names[0]!r} is per_node, so the ranks of a node must be consecutive, but rank {wrong[0]} has local rank "
            f"{local_ranks[wrong[0]]} of {sizes[0]}. Start the ranks with torchrun, or with srun --distribution=block"
        )


def require_unsharded(world: World, components: Mapping[str, Component]) -> None:
    """Raise an error if a component is sharded, because rank 0 cannot write and read shards for all ranks.

    Raises:
        ConfigError: If a component is sharded and there is more than one rank.
    """
    names = [name for name, component in components.items() if component.shared == "sharded"]
    if names and world.size > 1:
        raise ConfigError(
            f"'checkpoint.shared' must be true, because {names[0]!r} is sharded and rank 0 cannot save all shards. Use "
            "checkpoint.shared=true on a disk that all nodes share, or a strategy that does not shard the state"
        )


@dataclass(frozen=True)
class FunctionState:
    """A `Stateful` that wraps two functions, for an object without `state_dict` and `load_state_dict`.

    `get` returns the state, and `put` restores it.
    """

    get: Callable[[], Mapping[str, Any]]
    put: Callable[[State], object]

    def state_dict(self) -> Mapping[str, Any]:
        """Return the result of `get`."""
        return self.get()

    def load_state_dict(self, state: State) -> None:
        """Pass `state` to `put`."""
        self.put(state)


class RandomState:
    """The states of this rank's random number generators, as a `Stateful`.

    The state covers the generators of Python, NumPy, torch on the CPU, and torch on this rank's GPU.
    """

    def __init__(self, device: torch.device, reseed: Callable[[int], None] | None = None) -> None:
        """Store the arguments.

        Args:
            device: The device of this rank. The CUDA generator is saved only if this device is a GPU.
            reseed: A function that reseeds the generators. Loading a checkpoint from a different number of ranks calls
                `reseed` with the checkpoint's step.
        """
        self.device, self.reseed = device, reseed

    def state_dict(self) -> State:
        """Return the states of all generators as plain values and tensors."""
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
        """Restore all generators to the saved states."""
        random.setstate(state["python"])
        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
        torch.set_rng_state(state["torch"])
        if "cuda" in state and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda"], self.device)

    def load_resharded(self, states: Sequence[State], step: int) -> None:
        """Reseed the generators, because their states cannot be redistributed to a different number of ranks.

        Raises:
            CheckpointError: If there is no `reseed` function.
        """
        if self.reseed is None:
            raise CheckpointError("RandomState requires 'reseed' to load a checkpoint from a different number of ranks")
        self.reseed(step)
