"""Each private API in `ddp_tutorial/compat.py` does what the package needs, in the installed version of PyTorch."""

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from inspect import Parameter, Signature
from multiprocessing import forkserver
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, get_worker_info

from ddp_tutorial import compat
from ranks import is_gone, wait_until


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.Store]:
    """A process group of one rank; yields its store."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield store
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:Guards may run slower:RuntimeWarning")  # Python 3.13.0
def test_an_unwrapped_compiled_model_stays_compiled_with_its_names() -> None:
    compiled: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        compiled.append(graph)
        return graph

    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert not compat.is_compiled(plain)
    assert compat.uncompiled(plain) is plain
    names = list(plain.state_dict())
    model = nn.Sequential(plain[0], torch.compile(plain[1], backend=backend))
    assert compat.is_compiled(model)
    assert compat.uncompiled(torch.compile(model, backend=backend)) is model
    assert list(model.state_dict()) == names
    assert compat.is_compiled(model)
    with torch.no_grad():
        assert torch.equal(model(torch.ones(1, 2)), plain(torch.ones(1, 2)))
    assert compiled


def test_a_recomputed_forward_pass_runs_inside_the_backward_pass() -> None:
    seen: list[bool] = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        seen.append(compat.is_in_backward())
        return x.exp()

    checkpoint(layer, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()  # type: ignore[union-attr]
    assert seen == [False, True]
    assert not compat.is_in_backward()


def test_after_backward_runs_once_after_all_gradients() -> None:
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    seen: list[bool] = []

    def complete() -> None:
        seen.append(all(parameter.grad is not None for parameter in layers.parameters()))

    layers[1].weight.register_hook(lambda _: compat.after_backward(complete))
    layers(torch.ones(1, 2)).sum().backward()
    assert seen == [True]


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")  # torch 2.12
def test_is_profiling_is_true_only_inside_a_profiler() -> None:
    assert not compat.is_profiling()
    with profile(activities=[ProfilerActivity.CPU]):
        assert compat.is_profiling()
    assert not compat.is_profiling()


def test_multiply_and_norms_equal_a_loop_over_the_tensors() -> None:
    tensors = [torch.randn(shape) for shape in ((3,), (2, 5), ())]
    expected = [tensor * 0.3 for tensor in tensors]
    assert torch.equal(torch.stack(compat.norms(tensors)), torch.stack([tensor.norm() for tensor in tensors]))
    compat.multiply_(tensors, 0.3)
    assert all(map(torch.equal, tensors, expected))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch 2.12
def test_sparse_values_are_not_coalesced() -> None:
    tensor = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([2.0, 3.0]), (4,), check_invariants=True)
    assert compat.sparse_values(tensor).tolist() == [2.0, 3.0]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_that_share_storage_have_the_same_storage_id(device: str) -> None:
    tensor, other = torch.ones(4, device=device), torch.ones(4, device=device)
    assert compat.storage_id(tensor) == compat.storage_id(tensor[1:]) != compat.storage_id(other)


def test_argument_names_match_the_schema() -> None:
    assert compat.argument_names(torch.ops.aten.mul.Tensor) == ["self", "other"]


def test_removed_step_hooks_are_not_called() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.step()
    compat.remove_step_hooks(optimizer)
    optimizer.step()
    assert calls == ["before", "after"]


def test_the_default_store_belongs_to_the_process_group(group: dist.Store) -> None:
    compat.default_store().set("key", "value")
    keys = [key for key in ("key", "default_pg/0//key", "0//key") if group.check([key])]
    assert len(keys) == 1
    assert group.get(keys[0]) == b"value"


def test_group_ranks_lists_every_group_of_this_rank(group: dist.Store) -> None:
    other = dist.new_group([0])
    assert compat.group_ranks() == {each.group_name: [0] for each in (dist.group.WORLD, other) if each is not None}


def test_group_ranks_omits_a_group_that_a_different_thread_is_creating(group: dist.Store) -> None:
    names = dist.distributed_c10d._world.pg_names
    with mock.patch.dict(names, {dist.ProcessGroup(0, 1): "new"}):  # torch registers the ranks after the name
        assert list(compat.group_ranks()) == [dist.group.WORLD.group_name]


def test_used_groups_omits_a_group_without_a_collective(group: dist.Store) -> None:
    other = dist.new_group([0])
    assert compat.used_groups() == set()
    dist.barrier(other)
    assert compat.used_groups() == {other.group_name}


def test_an_aborted_process_group_is_destroyed(group: dist.Store) -> None:
    compat.abort_process_group()
    assert not dist.is_initialized()


def test_the_flight_recorder_contains_each_collective_and_its_stack() -> None:
    code = """
import torch, torch.distributed as dist
from ddp_tutorial.compat import flight_record

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(3))
[entry] = flight_record()["entries"]
print(entry["profiling_name"], entry["input_sizes"], any("<string>" in str(frame) for frame in entry["frames"]))
record = flight_record(entries=False)
print(record.get("entries"), [each["last_enqueued_collective"] for each in record["pg_status"].values()])
dist.destroy_process_group()
"""
    assert python(code, TORCH_FR_BUFFER_SIZE="10") == "gloo:all_reduce [[3]] True\nNone [1]"


def test_compat_imports_no_other_module_and_dynamo_only_on_request() -> None:
    code = """
import sys, ddp_tutorial.compat
print(sorted(name for name in sys.modules if name.startswith("ddp_tutorial.")), "torch._dynamo" in sys.modules)
ddp_tutorial.compat.import_dynamo()
print("torch._dynamo" in sys.modules)
"""
    assert python(code) == "['ddp_tutorial.compat'] False\nTrue"


def python(code: str, **variables: str) -> str:
    """Run `code` in a new interpreter and return its output."""

    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_stopped_forkserver_can_be_restarted() -> None:
    multiprocessing.get_context("forkserver").set_forkserver_preload([])
    forkserver.ensure_running()
    compat.stop_forkserver()
    process = multiprocessing.get_context("forkserver").Process(target=int)
    process.start()
    process.join(30)
    compat.stop_forkserver()
    assert process.exitcode == 0


class WorkerIds(torch.utils.data.IterableDataset[list[bool]]):
    """One row: whether `get_worker_info` finds a worker before, inside and after the block."""

    def __iter__(self) -> Iterator[list[bool]]:
        before = get_worker_info() is not None
        with compat.hidden_worker_info():
            inside = get_worker_info() is not None
        yield [before, inside, get_worker_info() is not None]


def test_hidden_worker_info_hides_the_worker_inside_the_block() -> None:
    loader = DataLoader(WorkerIds(), batch_size=None, num_workers=1, multiprocessing_context="fork")
    assert list(loader) == [[True, False, True]]


@pytest.mark.parametrize("workers", [0, 1])
def test_every_data_loader_uses_the_patched_method(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    real = compat.DataLoaderIterator.__next__

    def counted(self: object) -> object:
        nonlocal calls
        calls += 1
        return real(self)

    monkeypatch.setattr(compat.DataLoaderIterator, "__next__", counted)
    context = "fork" if workers else None
    loader = DataLoader([1, 2], batch_size=None, num_workers=workers, multiprocessing_context=context)
    assert list(loader) == [1, 2]
    assert calls == 3


class Blocked:
    def __getitem__(self, _: int) -> int:
        time.sleep(1000)
        return 0

    def __len__(self) -> int:
        return 1


def test_the_death_of_a_worker_raises_an_error_only_while_it_is_monitored() -> None:
    with compat.unmonitored_workers():
        batches = iter(DataLoader(Blocked(), num_workers=1, timeout=1, multiprocessing_context="fork"))  # type: ignore[arg-type]
    [worker] = compat.worker_processes(batches)
    worker.kill()
    assert wait_until(lambda: is_gone(worker.pid or 0))  # torch's handler of SIGCHLD would raise the error here
    # The message depends on whether torch's handler or `next` finds the exited process first.
    with (
        pytest.raises(RuntimeError, match=rf"DataLoader worker \(pid.* {worker.pid}\) "),
        compat.monitored_workers(batches),
    ):
        next(batches)


def test_shutdown_workers_terminates_the_worker_processes() -> None:
    batches = iter(DataLoader([1, 2], batch_size=None, num_workers=2, multiprocessing_context="fork"))
    workers = compat.worker_processes(batches)
    assert [worker.is_alive() for worker in workers] == [True, True]
    compat.shutdown_workers(batches)
    assert [worker.is_alive() for worker in workers] == [False, False]


def test_inspection_text_equals_the_output_of_a_question_mark() -> None:
    text = compat.inspection_text(python, "python", 0)
    assert "Run `code` in a new interpreter" in text
    assert "subprocess.run" not in text
    assert "subprocess.run" in compat.inspection_text(python, "python", 1)


def test_a_dispatch_mode_sees_every_operation() -> None:
    seen: list[str] = []

    class Record(compat.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Record():
        torch.ones(2).mul(3)
    assert seen == ["ones", "mul"]


def test_a_tree_keeps_its_structure() -> None:
    tree = {"a": [torch.ones(1), (2, None)], "b": torch.zeros(1)}
    leaves, structure = compat.tree_flatten(tree)
    assert compat.tree_leaves(tree) == leaves
    assert compat.tree_unflatten(leaves, structure) == tree
    assert compat.tree_map(str, tree)["a"][1] == ("2", "None")
    assert [len(path) for path, _ in compat.tree_flatten_with_path(tree)[0]] == [2, 3, 3, 1]


@pytest.mark.parametrize("name", ["forward_sync_buffers", "broadcast_buffers"])
def test_ddp_gets_the_argument_that_its_version_has(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrapper:
        __signature__ = Signature([Parameter(name, Parameter.KEYWORD_ONLY)])

    monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel", Wrapper)
    assert compat.forward_sync_buffers(enabled=False) == {name: False}
