"""Exercise on a sum that does not depend on the number of ranks, for the `bitwise_identical_runs` deep dive."""

from collections.abc import Sequence

import torch

from ddp_tutorial.exercises import Answer, Exercise, expect

Parts = Sequence[torch.Tensor]


def _test_add_up(answer: Answer) -> str:
    for count in (1, 2, 4, 8):
        for seed in range(5):
            generator = torch.Generator().manual_seed(seed)
            parts = [torch.randn(1000, generator=generator) * 10.0 ** (number % 3) for number in range(count)]
            given = [part.clone() for part in parts]
            at_once = answer(list(given))
            expect(isinstance(at_once, torch.Tensor), f"The sum must be a tensor, got {type(at_once).__name__}.")
            changed = any(not torch.equal(a, b) for a, b in zip(parts, given, strict=True))
            expect(not changed, "Your function must not change its arguments. Sum into new tensors.")
            expect(at_once.dtype == torch.float32, f"The sum must be float32, like the parts, got {at_once.dtype}.")
            exact = torch.stack(parts).double().sum(0)
            scale = torch.stack(parts).double().abs().sum(0)
            off = float(((at_once - exact).abs() / scale).max())
            expect(off < 1e-5, f"The relative error for {count} parts must be less than 1e-05, got {off:.2g}.")
            for size in (size for size in (2, 4, 8) if size <= count):
                of_ranks = [answer(given[rank::size]) for rank in range(size)]
                differ = int((answer(of_ranks) != at_once).sum())
                expect(
                    not differ,
                    f"With {count} parts on {size} ranks, the sum must be bitwise identical to the sum on one rank, "
                    f"but {differ} of 1000 elements differ. With {size} ranks, rank 0 first sums parts "
                    f"{list(range(count))[::size]}. Does your function sum these parts first on one rank, too?",
                )
    return "The sums on 1, 2, 4 and 8 ranks are bitwise identical."


def _add_up(parts: "Parts") -> torch.Tensor:
    parts = list(parts)
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [parts[place] + parts[place + half] for place in range(half)]
    return parts[0]


def _from_the_left(parts: Parts) -> torch.Tensor:
    return torch.stack([*parts]).new_tensor(0.0) + sum(parts)


def _neighbors(parts: Parts) -> torch.Tensor:
    parts = list(parts)
    while len(parts) > 1:
        parts = [parts[place] + parts[place + 1] for place in range(0, len(parts), 2)]
    return parts[0]


def _rounded_double(parts: Parts) -> torch.Tensor:
    return torch.stack([*parts]).double().sum(0).float()


def _double(parts: Parts) -> torch.Tensor:
    return torch.stack([*parts]).double().sum(0)


def _smallest_first(parts: Parts) -> torch.Tensor:
    ordered = torch.stack([*parts]).abs().argsort(0)
    return _from_the_left([*torch.stack([*parts]).gather(0, ordered)])


def _in_place(parts: Parts) -> torch.Tensor:
    half = len(parts) // 2
    for place in range(half):
        parts[place].add_(parts[place + half])
    return _in_place(parts[:half]) if half else parts[0]


def _mean(parts: Parts) -> torch.Tensor:
    return _add_up(parts) / len(parts)


add_up = Exercise(
    task=(
        "add_up(parts): return the sum of 1, 2, 4 or 8 tensors. If each of W ranks sums parts[rank::W], the sum of the "
        "W results must be bitwise identical to the sum on one rank. Choose the order of the additions accordingly."
    ),
    test=_test_add_up,
    solution=_add_up,
    wrong={
        "sums from left to right": _from_the_left,
        "sums neighbors first": _neighbors,
        "sums in double precision, and rounds at the end": _rounded_double,
        "returns a double precision sum": _double,
        "sums the smallest values first": _smallest_first,
        "sums in place, into its arguments": _in_place,
        "returns the mean": _mean,
    },
    hints=(
        "With two ranks, does a rank have neighboring parts or every second part? Sum the parts of one rank first.",
        "With 4 parts, compute 0 + 2 and 1 + 3 first, then add the two sums. With 2 ranks, only the last addition "
        "requires communication.",
        "Add the second half of the list to the first half element by element, and repeat until one tensor is left.",
    ),
)
