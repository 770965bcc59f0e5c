"""Who sees which sample when: pure index arithmetic, no processes.

Samples form one endless sequence: the order of epoch 0, then that of epoch 1, and so on. A step takes the next
`batch` of them for the whole world and deals them out to the ranks. Where the world stands in that sequence is
one number, the cursor; it means the same for every world size.

    sequence   7 2 5 0 | 3 6 1 4 | ...        8 samples, 4 a step
    step 0     7 2 5 0                        rank 0 of 2: 7 5      rank 1 of 2: 2 0
"""

from functools import lru_cache

import numpy as np
import torch


@lru_cache(maxsize=2)  # each step asks for the order of its epoch, at the end of one for two
def epoch_order(samples: int, seed: int, epoch: int) -> torch.Tensor:
    """A permutation of `samples` indices [samples] (int64) that depends on seed and epoch alone. Not to be changed."""
    # Not torch's generator: on a CPU it takes the low 32 bits of its seed only, too few for two numbers.
    return torch.from_numpy(np.random.default_rng([seed, epoch]).permutation(samples))


def take(samples: int, seed: int, cursor: int, count: int) -> torch.Tensor:
    """The next `count` sample indices [count] of the endless sequence, from position `cursor`."""
    parts = []
    while count:
        epoch, start = divmod(cursor, samples)
        part = epoch_order(samples, seed, epoch)[start : start + count]
        parts.append(part)
        cursor, count = cursor + len(part), count - len(part)
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def deal(indices: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """This rank's part, like cards: every `size`-th, so that the parts differ in length by one at most."""
    return indices[rank::size]
