"""The assignment of gradients to buckets is pure arithmetic and equals torch's. A bucket's views are its gradients."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ddp_tutorial.ddp.buckets import MIB, Bucket, assign_buckets, make_buckets

# -------------------------------------------------------------------------------------------------- which goes where

KINDS = {"f": torch.float32, "d": torch.float64, "h": torch.float16}


@st.composite
def gradients(draw: st.DrawFn, kinds: str = "fdh") -> list[tuple[int, str]]:
    """Draw the number of elements and the kind of each gradient; some are empty."""
    return draw(st.lists(st.tuples(st.integers(0, 40), st.sampled_from(kinds)), max_size=30))


caps = st.integers(1, 400)


def nbytes_of(sizes: list[tuple[int, str]]) -> list[int]:
    return [elements * KINDS[kind].itemsize for elements, kind in sizes]


def assign(sizes: list[tuple[int, str]], cap: float, first_cap: float) -> list[list[int]]:
    return assign_buckets(nbytes_of(sizes), [kind for _, kind in sizes], cap, first_cap)


@given(gradients(), caps, caps)
def test_each_gradient_is_in_one_bucket_of_its_kind_in_the_given_order(
    sizes: list[tuple[int, str]], cap: int, first_cap: int
) -> None:
    buckets = assign(sizes, cap, first_cap)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(sizes)))
    for kind in KINDS:
        mine = [bucket for bucket in buckets if sizes[bucket[0]][1] == kind]
        assert [index for bucket in mine for index in bucket] == [i for i, (_, k) in enumerate(sizes) if k == kind]


@given(gradients(), caps, caps)
def test_the_gradient_that_fills_a_bucket_closes_it(sizes: list[tuple[int, str]], cap: int, first_cap: int) -> None:
    nbytes = nbytes_of(sizes)
    buckets = assign(sizes, cap, first_cap)
    for kind in KINDS:
        mine = [bucket for bucket in buckets if sizes[bucket[0]][1] == kind]
        for number, bucket in enumerate(mine):
            limit = cap if number else first_cap
            assert sum(nbytes[index] for index in bucket[:-1]) < limit, "it was full before its last gradient came"
            if number < len(mine) - 1:
                assert sum(nbytes[index] for index in bucket) >= limit, "only the last may be left half empty"


@given(gradients(), caps, caps)
def test_buckets_are_ordered_by_completion_and_incomplete_ones_come_last(
    sizes: list[tuple[int, str]], cap: int, first_cap: int
) -> None:
    nbytes = nbytes_of(sizes)
    buckets = assign(sizes, cap, first_cap)
    seen: set[str] = set()
    full = []
    for bucket in buckets:
        kind = sizes[bucket[0]][1]
        full.append(sum(nbytes[index] for index in bucket) >= (cap if kind in seen else first_cap))
        seen.add(kind)
    assert full == sorted(full, reverse=True)
    for state in (True, False):
        completed = [bucket[-1] for bucket, is_full in zip(buckets, full, strict=True) if is_full is state]
        assert completed == sorted(completed)


def torchs(sizes: list[tuple[int, str]], caps: list[int]) -> list[list[int]]:
    """Return torch's layout for gradients that become ready in this order."""
    tensors = [torch.empty(elements, dtype=KINDS[kind]) for elements, kind in sizes]
    buckets, _ = dist._compute_bucket_assignment_by_size(
        tensors, caps, [False] * len(tensors), list(range(len(tensors)))
    )
    return buckets


@given(gradients("f"), caps, caps)
def test_the_layout_equals_that_of_torch(sizes: list[tuple[int, str]], cap: int, first_cap: int) -> None:
    assert assign(sizes, cap, first_cap) == (torchs(sizes, [first_cap, cap]) if sizes else [])


@given(gradients(), caps, caps)
def test_the_layout_of_several_kinds_equals_that_of_torch_up_to_order(
    sizes: list[tuple[int, str]], cap: int, first_cap: int
) -> None:
    """torch keeps incomplete buckets in the order of a hash table."""
    expected = torchs(sizes, [first_cap, cap]) if sizes else []
    assert sorted(assign(sizes, cap, first_cap)) == sorted(expected)


def test_a_layout_computed_by_hand() -> None:
    #          100 bytes fill the first bucket, 250 each of the others; "d" has a first one of its own
    sizes = [("f", 60), ("f", 60), ("d", 80), ("f", 200), ("d", 40), ("f", 20), ("f", 40), ("d", 249), ("f", 1)]
    buckets = assign_buckets([size for _, size in sizes], [kind for kind, _ in sizes], 250, 100)
    #       f: 120    d: 120  f: 260     and what is left:
    assert buckets == [[0, 1], [2, 4], [3, 5, 6], [7], [8]]


def test_without_a_cap_each_kind_has_one_bucket() -> None:
    infinite = float("inf")
    assert assign_buckets([4, 8, 4], ["f", "d", "f"], infinite, infinite) == [[1], [0, 2]]
    assert assign_buckets([], [], infinite, infinite) == []


def test_assigning_ten_thousand_gradients_is_fast() -> None:
    assert len(assign_buckets([4] * 10_000, ["f"] * 10_000, 25 * MIB, MIB)) == 1


# ----------------------------------------------------------------------------------------------------- what is in it


def named(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[tuple[str, nn.Parameter]]:
    return [(f"p{number}", nn.Parameter(torch.ones(shape, dtype=dtype))) for number, shape in enumerate(shapes)]


def test_views_are_contiguous_in_the_buffer() -> None:
    bucket = Bucket.of("b", named((2, 3), (), (0,), (4,)))
    assert [view.shape for view in bucket.views] == [(2, 3), (), (0,), (4,)]
    for number, view in enumerate(bucket.views):
        view.fill_(number)
    assert bucket.buffer.tolist() == [0.0] * 6 + [1.0] + [3.0] * 4


def test_a_collected_gradient_is_divided_once_and_becomes_the_view() -> None:
    [(_, parameter)] = pairs = named((2, 2))
    bucket = Bucket.of("b", pairs)
    parameter.grad = torch.full((2, 2), 8.0)
    bucket.collect(0, 4)
    assert parameter.grad is bucket.views[0]
    assert bucket.buffer.tolist() == [2.0] * 4
    bucket.collect(0, 4)  # a gradient that is already in the bucket, as in the second step
    assert bucket.buffer.tolist() == [0.5] * 4
    assert parameter.grad.data_ptr() == bucket.buffer.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dividing_before_summing_avoids_overflow(dtype: torch.dtype) -> None:
    [(_, parameter)] = pairs = named((3,), dtype=dtype)
    bucket = Bucket.of("b", pairs)
    parameter.grad = torch.full((3,), torch.finfo(dtype).max, dtype=dtype)
    bucket.collect(0, 2)
    assert (bucket.buffer + bucket.buffer).isfinite().all()


def test_a_missing_gradient_contributes_zeros_and_stays_none() -> None:
    pairs = named((2,), (3,))
    bucket = Bucket.of("b", pairs)
    bucket.buffer.fill_(7.0)  # of the previous step
    bucket.collect(0, 2)
    assert bucket.buffer.tolist() == [0.0, 0.0, 7.0, 7.0, 7.0]
    assert pairs[0][1].grad is None


def test_a_strided_or_transposed_gradient_is_collected_correctly() -> None:
    [(_, parameter)] = pairs = named((2, 3))
    bucket = Bucket.of("b", pairs)
    parameter.grad = torch.arange(6.0).reshape(3, 2).t()
    bucket.collect(0, 1)
    assert bucket.buffer.tolist() == [0.0, 2.0, 4.0, 1.0, 3.0, 5.0]


def test_a_gradient_in_an_old_bucket_is_copied_to_the_new_bucket() -> None:
    [(_, parameter)] = pairs = named((2,))
    before, after = Bucket.of("before", pairs), Bucket.of("after", pairs)
    parameter.grad = torch.tensor([2.0, 4.0])
    before.collect(0, 1)
    after.collect(0, 2)
    assert parameter.grad is after.views[0]
    assert after.buffer.tolist() == [1.0, 2.0]
    assert before.buffer.tolist() == [2.0, 4.0]


def test_an_empty_parameter_needs_no_space() -> None:
    pairs = named((0,), (2,))
    bucket = Bucket.of("b", pairs)
    for _, parameter in pairs:
        parameter.grad = torch.ones_like(parameter)
    for place in range(2):
        bucket.collect(place, 2)
    assert bucket.buffer.tolist() == [0.5, 0.5]
    assert Bucket.of("nothing", named((0,))).buffer.numel() == 0


def test_a_sparse_gradient_is_rejected_by_name() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    bucket = Bucket.of("b", [("table.weight", table.weight)])
    with pytest.raises(ValueError, match=r"'table\.weight' must have a dense gradient.*sparse=False"):
        bucket.collect(0, 1)


def test_buckets_are_split_by_kind_and_size() -> None:
    pairs = [*named((64,), (64,), (64,)), ("wide", nn.Parameter(torch.ones(64, dtype=torch.float64)))]
    buckets = make_buckets(pairs, cap=512, first_cap=256)
    assert [(bucket.name, bucket.names) for bucket in buckets] == [
        ("bucket 0", ["p0"]),
        ("bucket 1", ["p1", "p2"]),
        ("bucket 2", ["wide"]),
    ]
    assert [bucket.buffer.dtype for bucket in buckets] == [torch.float32, torch.float32, torch.float64]
    assert [bucket.names for bucket in make_buckets(pairs)] == [["p0", "p1", "p2"], ["wide"]]
    assert [bucket.names for bucket in make_buckets(pairs, cap=512)] == [["p0", "p1"], ["wide"], ["p2"]]
    assert make_buckets([]) == []
