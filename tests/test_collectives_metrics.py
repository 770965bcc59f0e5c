"""Collectives, and numbers that mean the same for any number of ranks."""

import json
import math
import resource
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddp_tutorial.collectives import (
    all_gather,
    all_reduce_mean,
    all_reduce_sum,
    any_rank,
    assert_same,
    broadcast_tensors,
    decide_on_rank_zero,
    digest,
    from_rank_zero,
    rank_zero_first,
    run_on_all_ranks,
    to_rank_zero,
    to_vector,
)
from ddp_tutorial.config import ConfigError, FailedError, named_ranks
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.runs.step_log import StepLog
from ddp_tutorial.world import World
from ranks import error_of

# ----------------------------------------------------------------------------------------------------- with ranks


def talk(world: World) -> dict[str, Any]:
    """Call each helper once, and return the result on this rank."""
    rank = world.rank
    mine, square = torch.tensor([[1.0, rank]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    said: dict[str, Any] = {
        "total": all_reduce_sum(world, mine),
        "total of integers": all_reduce_sum(world, torch.tensor(2**40 + rank)),
        "mean": all_reduce_mean(world, mine),
        "mean of integers": all_reduce_mean(world, torch.tensor(rank)),
        "input": mine,
        "transposed on rank 0": all_reduce_sum(world, square if rank else square.t().contiguous().t()),
        "all_gather": all_gather(world, {"rank": rank, "square": rank * rank}),
        "from rank zero": from_rank_zero(world, f"said by rank {rank}"),
    }
    with torch.enable_grad():
        weight = torch.tensor(2.0, requires_grad=True)
        said["total needs no gradient"] = not all_reduce_sum(world, weight).requires_grad
    return said


def everything(world: World, folder: Path) -> dict[str, Any]:
    parts = (talk, take_turns, let_rank_zero_decide, run_together, compare, follow)
    return {each.__name__: each(world) for each in parts}


@pytest.fixture(scope="module", params=[2, 3])
def nprocs(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def folder(nprocs: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp(f"{nprocs}ranks")


@pytest.fixture(scope="module")
def heard(nprocs: int, folder: Path) -> list[dict[str, Any]]:
    """Return the results of each rank. The ranks are started once for all tests."""
    return launch(everything, nprocs, folder, device="cpu", threads=1, echo=False)


def test_every_rank_gets_the_same_correct_result(heard: list[dict[str, Any]], nprocs: int) -> None:
    said = [each["talk"] for each in heard]
    ranks = range(nprocs)
    for rank in ranks:
        mine = said[rank]
        assert mine["total"].tolist() == [[nprocs, sum(ranks)]]
        assert mine["total of integers"].item() == nprocs * 2**40 + sum(ranks)  # not representable in float32
        assert mine["total of integers"].dtype == torch.int64
        assert mine["mean"].tolist() == [[1.0, sum(ranks) / nprocs]]
        assert mine["mean of integers"].item() == sum(ranks) / nprocs
        assert mine["input"].tolist() == [[1.0, rank]]
        assert mine["all_gather"] == [{"rank": each, "square": each**2} for each in ranks]
        assert mine["from rank zero"] == "said by rank 0"
        assert mine["total needs no gradient"]


def test_the_sum_does_not_depend_on_the_memory_layout(heard: list[dict[str, Any]], nprocs: int) -> None:
    for each in heard:
        assert each["talk"]["transposed on rank 0"].tolist() == [[nprocs, 2 * nprocs], [3 * nprocs, 4 * nprocs]]


def run_together(world: World) -> dict[str, Any]:
    """Call `run_on_all_ranks` with functions that succeed, raise on one rank, or raise on all ranks."""

    def fail(*ranks: int, error: Exception) -> Any:
        if world.rank in ranks:
            raise error
        return world.rank

    def run(*ranks: int, error: Exception) -> Any:
        return run_on_all_ranks(world, lambda: fail(*ranks, error=error))

    last, everyone = world.size - 1, range(world.size)
    return {
        "none": run(error=ValueError()),
        "one": error_of(lambda: run(last, error=FailedError("the disk is full"))),
        "a bug": error_of(lambda: run(0, error=KeyError("name"))),
        "all": error_of(lambda: run(*everyone, error=FailedError("no such folder"))),
        "no message": error_of(lambda: run(last, error=FailedError())),
    }


def test_a_function_that_fails_on_one_rank_fails_on_all_ranks(heard: list[dict[str, Any]], nprocs: int) -> None:
    for rank, each in enumerate(heard):
        assert each["run_together"] == {
            "none": rank,
            "one": f"FailedError: rank {nprocs - 1}: the disk is full",
            "a bug": "FailedError: rank 0: KeyError: 'name'",
            "all": "FailedError: no such folder",
            "no message": f"FailedError: rank {nprocs - 1}: FailedError",
        }


def take_turns(world: World) -> dict[str, Any]:
    """Run blocks under `rank_zero_first`: one succeeds, one fails on rank 0, and one fails on the last rank."""
    said: dict[str, Any] = {}
    with rank_zero_first(world):
        began = time.monotonic()
        if world.is_main:
            time.sleep(0.3)
        said["block"] = (began, time.monotonic())

    entered = []

    def fail_on(rank: int) -> None:
        with rank_zero_first(world):
            entered.append(rank)
            if world.rank == rank:
                raise ValueError("the disk is full")

    said["rank 0 fails"] = error_of(lambda: fail_on(0))
    said["last rank fails"] = error_of(lambda: fail_on(world.size - 1))
    said["entered"] = entered
    said["afterwards"] = all_reduce_sum(world, torch.tensor(1)).item()  # the ranks are still synchronized
    return said


def test_rank_zero_runs_first_and_its_failure_reaches_the_other_ranks(heard: list[dict[str, Any]], nprocs: int) -> None:
    said = [each["take_turns"] for each in heard]
    last = nprocs - 1
    for rank in range(nprocs):
        if rank == 0:
            assert said[0]["rank 0 fails"] == "ValueError: the disk is full"
        else:
            assert said[rank]["block"][0] >= said[0]["block"][1]  # all processes share one clock
            told = (
                f"RankZeroFailedError: rank 0 failed while rank {rank} was waiting for it: ValueError: the disk is full"
            )
            assert said[rank]["rank 0 fails"] == told
        assert said[rank]["last rank fails"] == ("ValueError: the disk is full" if rank == last else "no error")
        assert said[rank]["entered"] == ([0, last] if rank == 0 else [last])
        assert said[rank]["afterwards"] == nprocs


def compare(world: World) -> dict[str, str]:
    """Return the errors of `assert_same` for tensors that differ on the last rank in various ways."""
    last = world.rank == world.size - 1
    same = {"a": torch.arange(4.0), "b": torch.ones(2, 2)}
    element, missing, extra = dict(same), dict(same), dict(same)
    element["b"] = torch.ones(2, 2)
    if last:
        element["b"][1, 0] += 2**-23  # the last bit
        del missing["b"]
        extra["c"] = torch.zeros(1)
    nan = {"a": torch.tensor([math.nan, 0.0])}
    cases = {
        "same": same,
        "nan": nan,
        "element": element,
        "missing": missing,
        "extra": extra,
        "shape": same | {"b": torch.ones(4) if last else torch.ones(2, 2)},
        "dtype": same | {"b": torch.ones(2, 2, dtype=torch.float64 if last else torch.float32)},
        "order": dict(reversed(same.items())) if last else same,
        "zero": {"a": torch.tensor(-0.0 if last else 0.0)},
        "none": {},
    }
    said = {name: error_of(lambda tensors=tensors: assert_same(world, tensors)) for name, tensors in cases.items()}
    said["first"] = error_of(lambda: assert_same(world, {"w": torch.tensor(float(world.is_main))}, "weight"))
    return said


class UnpicklableError(Exception):
    def __init__(self, path: str, number: int) -> None:  # pickle calls the class with `args`, which is one string
        super().__init__(f"{path} has number {number}")


FAILURES: dict[str, Exception] = {
    "of the disk": PermissionError(13, "Permission denied", "manifest.json"),
    "of Python": RecursionError("maximum recursion depth exceeded"),
    "of nobody's": UnpicklableError("manifest.json", 3),
}


def let_rank_zero_decide(world: World) -> dict[str, Any]:
    def fail(error: Exception) -> None:
        raise error

    said: dict[str, Any] = {
        "returned": decide_on_rank_zero(world, lambda: ValueError(f"returned by rank {world.rank}")).args
    }
    for name, error in FAILURES.items():
        said[name] = error_of(partial(decide_on_rank_zero, world, partial(fail, error)))
    said["afterwards"] = all_reduce_sum(world, torch.tensor(1)).item()
    return said


def test_any_exception_in_rank_zeros_decision_is_raised_on_all_ranks(heard: list[dict[str, Any]], nprocs: int) -> None:
    said = [each["let_rank_zero_decide"] for each in heard]
    for rank in range(nprocs):
        assert said[rank]["returned"] == ("returned by rank 0",)
        assert said[rank]["of the disk"] == "PermissionError: [Errno 13] Permission denied: 'manifest.json'"
        assert said[rank]["of Python"] == "RecursionError: maximum recursion depth exceeded"
        wanted = "UnpicklableError: manifest.json has number 3"
        assert said[rank]["of nobody's"] == (f"RankZeroFailedError: rank 0 failed: {wanted}" if rank else wanted)
        assert said[rank]["afterwards"] == nprocs


def test_tensors_that_differ_are_named_with_their_ranks_on_every_rank(heard: list[dict[str, Any]], nprocs: int) -> None:
    said = [each["compare"] for each in heard]
    last = nprocs - 1
    for mine in said:
        assert mine == said[0]
        assert mine["same"] == mine["nan"] == "no error"
        for case, name in [("element", "b"), ("missing", "b"), ("extra", "c"), ("shape", "b"), ("dtype", "b")]:
            told = f"RuntimeError: tensor '{name}' is not the same on all ranks: rank {last} differs from rank 0"
            assert mine[case] == told
        assert "'a' is not the same" in mine["zero"]  # bitwise: -0 is not 0
        assert mine["none"].startswith("ValueError: assert_same requires at least one tensor")
        differ = f"{named_ranks(range(1, nprocs))} {'differ' if nprocs > 2 else 'differs'}"
        assert mine["first"] == f"RuntimeError: weight 'w' is not the same on all ranks: {differ} from rank 0"


def test_a_different_order_of_tensors_is_detected_on_every_rank(heard: list[dict[str, Any]]) -> None:
    for each in heard:
        assert each["compare"]["order"].startswith("RuntimeError: the order of the tensors is not the same")


def _raise(error: Exception) -> None:
    raise error


def follow(world: World) -> dict[str, Any]:
    """Return the values that ranks receive from rank 0, and that rank 0 receives from them."""
    tensors = [torch.full((2, 3), world.rank), torch.tensor(world.rank + 0.5), torch.full((3, 2), world.rank + 7).t()]
    broadcast_tensors(world, tensors)

    def refuse(error: Exception) -> str:
        return error_of(lambda: decide_on_rank_zero(world, lambda: _raise(error)))

    return {
        "broadcast": [tensor.tolist() for tensor in tensors],
        "gathered": to_rank_zero(world, f"rank {world.rank}"),
        "decided": decide_on_rank_zero(world, lambda: f"rank {world.rank}"),
        "errors": [refuse(ConfigError("wrong")), refuse(OSError("full"))],
        "any": [any_rank(world, world.rank == world.size - 1), any_rank(world, False)],
    }


def test_rank_zero_sends_values_decisions_and_errors_to_all_ranks(heard: list[dict[str, Any]], nprocs: int) -> None:
    for rank, each in enumerate(heard):
        assert each["follow"] == {
            "broadcast": [[[0] * 3] * 2, 0.5, [[7] * 3] * 2],
            "gathered": [f"rank {other}" for other in range(nprocs)] if rank == 0 else [],
            "decided": "rank 0",
            "errors": ["ConfigError: wrong", "OSError: full"],
            "any": [True, False],
        }


# -------------------------------------------------------------------------------------------------- without ranks


def enter_rank_zero_first(world: World) -> None:
    with rank_zero_first(world):
        pass


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "helper",
    [
        lambda world: all_reduce_sum(world, torch.ones(1)),
        lambda world: all_reduce_mean(world, torch.ones(1)),
        lambda world: all_gather(world, 1),
        lambda world: from_rank_zero(world, 1),
        lambda world: to_rank_zero(world, 1),
        lambda world: decide_on_rank_zero(world, lambda: 1),
        lambda world: broadcast_tensors(world, [torch.ones(1)]),
        enter_rank_zero_first,
        lambda world: assert_same(world, {"a": torch.ones(1)}),
    ],
    ids=lambda helper: "_".join(helper.__code__.co_names[:1]) or helper.__name__,
)
def test_two_ranks_without_a_group_raise(helper: Callable[[World], object], rank: int) -> None:
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match="2 ranks but no process group"):
        helper(World(rank, 2, rank, 2))


def test_one_process_requires_no_group() -> None:
    world = World()
    assert all_reduce_sum(world, torch.tensor([1.0, 2.0])).tolist() == [1.0, 2.0]
    assert all_reduce_mean(world, torch.tensor(3)).item() == 3.0
    assert all_gather(world, "a") == ["a"]
    assert from_rank_zero(world, "a") == "a"
    assert to_rank_zero(world, "a") == ["a"]
    assert decide_on_rank_zero(world, lambda: "a") == "a"
    broadcast_tensors(world, [tensor := torch.tensor([1.0, 2.0])])
    assert tensor.tolist() == [1.0, 2.0]
    assert_same(world, {"a": torch.ones(1)})
    with pytest.raises(ValueError, match="at least one weight to compare"):
        assert_same(world, {}, "weight")
    with pytest.raises(ValueError, match="full"), rank_zero_first(world):
        raise ValueError("full")


def test_numbers_and_tensors_are_packed_into_one_float64_vector() -> None:
    vector = to_vector([1, 0.1, torch.tensor(2.5)], torch.device("cpu"))
    assert (vector.dtype, vector.tolist()) == (torch.float64, [1.0, 0.1, 2.5])


def test_the_sum_is_a_copy() -> None:
    mine = torch.ones(2)
    all_reduce_sum(World(), mine).add_(1)
    assert mine.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]
)
def test_digests_differ_for_every_dtype_shape_and_value(dtype: torch.dtype) -> None:
    shapes: list[tuple[int, ...]] = [(), (0,), (0, 3), (1,), (6,), (2, 3), (3, 2)]
    digests = {digest({"a": torch.ones(shape, dtype=dtype)}) for shape in shapes}
    digests |= {digest({"a": torch.zeros(shape, dtype=dtype)}) for shape in shapes if 0 not in shape}
    assert len(digests) == 7 + 5
    again = digest({"a": torch.ones(2, 3, dtype=dtype)})
    assert again in digests
    assert len(again) == 64


def test_a_digest_depends_on_dtype_name_order_and_every_bit() -> None:
    a, b = torch.zeros(3), torch.ones(3)
    seen = [
        digest({}),
        digest({"a": a}),
        digest({"b": a}),
        digest({"a": a.int()}),  # the same bytes with a different dtype
        digest({"a": a, "b": b}),
        digest({"b": b, "a": a}),
        digest({"a": torch.cat([a, b])}),
        *(digest({"a": a.view(torch.int32).index_fill(0, torch.tensor([1]), 1 << bit).view(torch.float32)})
          for bit in range(31)),
    ]  # fmt: skip
    assert len(set(seen)) == len(seen)


def test_a_digest_does_not_depend_on_the_memory_layout() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    assert digest({"a": tensor.t()}) == digest({"a": tensor.t().contiguous()})
    assert digest({"a": tensor[:, 1]}) == digest({"a": torch.tensor([1.0, 4.0])})
    assert digest({"a": tensor.to_sparse()}) == digest({"a": tensor})
    assert digest({"a": tensor.requires_grad_()}) == digest({"a": tensor.detach()})


# ------------------------------------------------------------------------------------------------------- the log


def records(path: Path) -> list[dict[str, Any]]:
    """Return all lines of a log, each complete and strict JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = path.read_text()
    assert not text or text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[StepLog]:
    log = StepLog(World(), tmp_path / "log.jsonl", "tokens")
    log.open()
    yield log
    log.close()


def add(log: StepLog, step: int, loss: float = 1.0) -> None:
    seconds = {"data": 0.1234567, "grads": 1.0}
    log.add(step, {"loss": loss, "accuracy": 0.5}, 100, torch.tensor(0.25), 0.125, seconds)


@pytest.mark.parametrize("name", ["step", "tokens", "seconds", "epoch"])
def test_a_metric_with_the_name_of_a_logged_value_is_rejected(name: str, log: StepLog) -> None:
    with pytest.raises(ConfigError, match=f"metric {name!r} must be renamed"):
        log.add(1, {"loss": 1.0, name: 0.5}, 100, torch.tensor(0.25), 0.125, {}, epoch=0.1)


def test_a_record_describes_its_step_completely(log: StepLog, tmp_path: Path) -> None:
    add(log, 1, loss=2.5)
    add(log, 2, loss=1.5)
    log.close()
    first, second = records(tmp_path / "log.jsonl")
    rate = first.pop("tokens_per_second")
    assert rate == second.pop("tokens_per_second") == round(log.rates[0], 1) > 0
    assert 0 <= first.pop("elapsed") <= second.pop("elapsed") < 60
    rest = {"learning_rate": 0.125, "accuracy": 0.5, "grad_norm": 0.25, "seconds": {"data": 0.123457, "grads": 1.0}}
    assert first == {"step": 1, "loss": 2.5, "tokens": 100, **rest}
    assert second == {"step": 2, "loss": 1.5, "tokens": 200, **rest}
    assert log.losses == [2.5, 1.5]


@pytest.mark.parametrize(("count", "written"), [(0.5, "10"), (1.9, "38"), (2.5, "50"), (0.125, "2.5")])
def test_fractional_counts_are_summed_in_the_log_and_the_rate(count: float, written: str, tmp_path: Path) -> None:
    log = StepLog(World(), tmp_path / "log.jsonl", events=True)
    log.open()
    for step in range(1, 21):
        log.add(step, {"loss": 1.0}, count, torch.tensor(0.25), 0.125, {})
    log.close()
    last = records(tmp_path / "log.jsonl")[-1]
    assert json.dumps(last["samples"]) == written
    assert log.rates[0] > 0
    [events] = tmp_path.glob("events.*")
    assert b"samples_per_second" in events.read_bytes()
    assert b"samples\x15" not in events.read_bytes(), "a total is not a curve"


def test_a_flush_writes_all_pending_steps(log: StepLog, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"

    def steps() -> list[int]:
        return [record["step"] for record in records(path)]

    assert steps() == []
    assert log.latest == {}
    add(log, 1)
    add(log, 2)
    assert (steps(), log.losses) == ([], [1.0, 1.0])
    log.flush()
    assert (steps(), len(log.rates)) == ([1, 2], 1)
    assert set(log.latest) == {"loss", "tokens_per_second"}
    log.flush()  # no new line
    assert (steps(), len(log.rates)) == ([1, 2], 1)
    log.write({"step": 2, "eval_loss": 1.0})
    assert records(path)[-1] == {"step": 2, "eval_loss": 1.0}
    add(log, 3)
    log.close()
    assert steps() == [1, 2, 2, 3]


def test_only_rank_zero_writes_the_log(tmp_path: Path) -> None:
    log = StepLog(World(1, 2, 1, 2), tmp_path / "log.jsonl")
    log.open()
    add(log, 1)
    log.close()
    assert log.losses == [1.0]
    assert not (tmp_path / "log.jsonl").exists()


def test_closing_twice_writes_nothing_twice(log: StepLog, tmp_path: Path) -> None:
    add(log, 1)
    log.close()
    log.close()
    assert [record["step"] for record in records(tmp_path / "log.jsonl")] == [1]
    assert len(log.losses) == 1


def test_a_line_truncated_by_a_full_disk_raises_an_error(log: StepLog, tmp_path: Path) -> None:
    """A file size limit simulates the disk: a write is truncated without an error."""
    add(log, 1)
    log.flush()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "log.jsonl").stat().st_size + 20, hard))
    try:
        add(log, 2)
        with pytest.raises(OSError, match="File too large"):
            log.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_non_finite_loss_is_null_in_the_file(log: StepLog, tmp_path: Path) -> None:
    for step, loss in enumerate([math.nan, math.inf, -math.inf, 1.0], start=1):
        add(log, step, loss)
    log.add(5, {"loss": 1.0}, 1, torch.tensor(math.nan), 0.1, {})
    log.close()
    found = records(tmp_path / "log.jsonl")
    assert [record["loss"] for record in found] == [None, None, None, 1.0, 1.0]
    assert found[4]["grad_norm"] is None
    assert math.isnan(log.losses[0])


def test_time_spent_while_paused_does_not_count(log: StepLog) -> None:
    before = time.monotonic()
    add(log, 1)
    log.flush()
    add(log, 2)
    with log.paused():
        began = time.monotonic()
        time.sleep(0.1)
        pause = time.monotonic() - began
    log.flush()
    assert 100 / log.rates[1] <= time.monotonic() - before - pause + 1e-6  # 100 tokens


def test_an_existing_log_is_appended_to(tmp_path: Path) -> None:
    for step in (1, 2):
        log = StepLog(World(), tmp_path / "log.jsonl")
        log.open()
        add(log, step)
        log.close()
    assert [record["step"] for record in records(tmp_path / "log.jsonl")] == [1, 2]
