"""Check that all ranks use the same units of the model in the same order."""

from ddp_tutorial.collectives import all_gather
from ddp_tutorial.world import World

_PRIME = 65521  # the sum of the squared digests of several hundred ranks is exact in float64


class DifferentPathsError(RuntimeError):
    """Raised if the ranks have used different units of a sharded model, or the same units in a different order."""

    def __init__(self, found: str) -> None:
        """Append advice to `found`, a sentence without a period that describes the difference."""
        super().__init__(
            f"{found}. If parameters are sharded, all ranks must use the same modules in the same order. Use "
            "strategy=zero2, or strategy=ddp with ddp.find_unused_parameters=true. With strategy=zero3, ranks may skip "
            "different modules"
        )


class ExecutionPath:
    """A digest of the sequence of units that this rank has used. The ranks compare their digests."""

    def __init__(self) -> None:
        """Start with an empty path."""
        self.digest = 0

    def add(self, number: int) -> None:
        """Record that this rank uses unit `number` next."""
        self.digest = (31 * self.digest + number + 1) % _PRIME


def require_same_unit(world: World, name: str) -> None:
    """Raise `DifferentPathsError` on all ranks unless all ranks have reached the unit `name`. Collective."""
    names = all_gather(world, name)
    for rank, other in enumerate(names):
        if other != names[0]:
            raise DifferentPathsError(
                f"in the first forward pass, rank 0 reached {names[0]}, but rank {rank} reached {other}"
            )
