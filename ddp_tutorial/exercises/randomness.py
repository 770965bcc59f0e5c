"""Exercise on dropout masks that do not depend on ranks or micro-batches, for the `randomness` deep dive."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ddp_tutorial.exercises import Answer, Exercise, expect
from ddp_tutorial.rng import preserved_rng, seed_of

_UNITS, _P = 4000, 0.25


def _kept(out: Any, rows: int) -> torch.Tensor:
    """Check the shape and the values of `out`, and return a mask of the kept values."""
    found = list(out.shape) if isinstance(out, torch.Tensor) else repr(out)
    expect(found == [rows, _UNITS], f"The result must have shape {[rows, _UNITS]}, got {found}.")
    kept = out != 0
    values = sorted(set(out[kept].tolist()))
    right = len(values) == 1 and abs(values[0] - 2 / (1 - _P)) < 1e-4
    expect(right, f"With inputs of 2 and p = {_P}, a kept value must become {2 / (1 - _P):.4g}, got {values[:3]}.")
    return kept


def _test_dropout(answer: Answer) -> str:
    indices = [40, 7, 13, 8, 41, 39]

    def mask_of(rows: Sequence[int], seed: int = 0, step: int = 0) -> torch.Tensor:
        x = torch.full((len(rows), _UNITS), 2.0)  # a new tensor, because the answer may change it in place
        return _kept(answer(x, [indices[row] for row in rows], _P, seed, step), len(rows))

    torch.manual_seed(5)
    np.random.seed(5)
    before = torch.get_rng_state(), np.random.get_state(legacy=False)["state"]["pos"]
    masks = mask_of(range(6))
    after = torch.get_rng_state(), np.random.get_state(legacy=False)["state"]["pos"]
    expect(
        torch.equal(before[0], after[0]) and before[1] == after[1],
        "Your function changes a global generator, so the number of calls affects all other random numbers.",
    )
    for row, share in enumerate(masks.double().mean(1).tolist()):
        expect(
            abs(share - (1 - _P)) < 0.05,
            f"With p = {_P}, row {row} must keep about {1 - _P:.0%} of its values, got {share:.0%}.",
        )
    torch.manual_seed(6)
    again = mask_of(range(6))
    expect(
        torch.equal(masks, again), "The mask depends on the global generator: a second call returns a different mask."
    )
    parts = [mask_of(rows) for rows in ([2, 5], [4, 0], [3, 1])]
    expect(
        torch.equal(torch.cat(parts), masks[[2, 5, 4, 0, 3, 1]]),
        "If three ranks split the same 6 samples in a different order, the samples' masks change. A mask must "
        "depend on the sample's index, not on its row in `x`.",
    )
    named = {f"sample {index}": mask for index, mask in zip(indices, masks, strict=True)}
    for seed, step in ((0, 1), (1, 0), (1, 1)):
        for index, mask in zip(indices, mask_of(range(6), seed, step), strict=True):
            named[f"sample {index} with seed {seed} in step {step}"] = mask
    masks_of: dict[bytes, str] = {}
    for name, mask in named.items():
        other = masks_of.setdefault(mask.numpy().tobytes(), name)
        expect(
            other == name,
            f"The masks of {other} and {name} must differ, but are equal (seed and step are 0 unless mentioned).",
        )
    return "Each sample has its own mask in each step, on any rank, and the global generators are unchanged."


def _sample_dropout(x: torch.Tensor, indices: Sequence[int], p: float, seed: int, step: int) -> torch.Tensor:
    generators = [torch.Generator().manual_seed(seed_of(seed, step, int(index))) for index in indices]
    noise = torch.stack([torch.rand(x.shape[1:], generator=generator) for generator in generators])
    return x * (noise >= p) / (1 - p)


def _dropout_with(
    seed_for: Callable[[int, int, int, int], int], *, global_generator: bool = False, scaled: bool = True
) -> Answer:
    """Return a variant of the solution that seeds each row with `seed_for`. The other arguments select mistakes."""

    def answer(x: torch.Tensor, indices: Sequence[int], p: float, seed: int, step: int) -> torch.Tensor:
        rows = []
        for row, index in enumerate(indices):
            number = seed_for(seed, step, index, row)
            if global_generator:
                torch.manual_seed(number)
                rows.append(torch.rand(x.shape[1:]))
            else:
                rows.append(torch.rand(x.shape[1:], generator=torch.Generator().manual_seed(number)))
        return x * (torch.stack(rows) >= p) / (1 - p if scaled else 1)

    return answer


def _built_in(x: torch.Tensor, indices: Sequence[int], p: float, seed: int, step: int) -> torch.Tensor:
    with preserved_rng():
        torch.manual_seed(seed_of(seed, step))
        return torch.nn.functional.dropout(x, p)


sample_dropout = Exercise(
    task=(
        "sample_dropout(x, indices, p, seed, step): apply dropout with probability p to x, and return the result. "
        "The mask of row r must depend only on seed, step and indices[r], the index of the sample. Leave the global "
        "generators unchanged."
    ),
    test=_test_dropout,
    solution=_sample_dropout,
    wrong={
        "draws one mask for the whole tensor": _built_in,
        "seeds by the row": _dropout_with(lambda seed, step, index, row: seed_of(seed, step, row)),
        "adds the numbers": _dropout_with(lambda seed, step, index, row: seed + step + index),
        "forgets the step": _dropout_with(lambda seed, step, index, row: seed_of(seed, index)),
        "ignores the seed": _dropout_with(lambda seed, step, index, row: seed_of(step, index)),
        "uses the same mask for all samples": _dropout_with(lambda seed, step, index, row: seed_of(seed, step)),
        "seeds the global generator": _dropout_with(
            lambda seed, step, index, row: seed_of(seed, step, index), global_generator=True
        ),
        "forgets to scale": _dropout_with(lambda seed, step, index, row: seed_of(seed, step, index), scaled=False),
    },
    hints=(
        "A separate torch.Generator leaves the global generator unchanged. Call torch.rand(..., generator=generator).",
        "Mix the three numbers into one seed, for example with seed_of(seed, step, index). With a sum, "
        "different samples share masks.",
        "Draw one row per sample, keep the values where the random number is at least p, and divide by 1 - p.",
    ),
)
