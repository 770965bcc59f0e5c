"""Exercises on ZeRO memory, a minimal reduce-scatter, ZeRO-3, and ZeRO-2, for notebook 17_sharded_state."""

import gc
import time
from collections.abc import Callable
from copy import deepcopy
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_tutorial.accumulation.memory import count_saved_bytes
from ddp_tutorial.compat import default_store
from ddp_tutorial.debug.memory import live_tensors
from ddp_tutorial.debug.recorder import calls
from ddp_tutorial.exercises import Answer, Exercise, WrongAnswerError, expect, numbers, on_ranks
from ddp_tutorial.world import World
from ddp_tutorial.zero.memory import model_state_bytes

# --------------------------------------------------------------------------------------------------------- 1. what fits

_GB = 10**9
_ASKED = [  # parameters, ranks, bytes per rank
    (1 * _GB, 8, 80 * _GB),
    (7 * _GB, 8, 80 * _GB),
    (7 * _GB, 4, 80 * _GB),
    (13 * _GB, 8, 80 * _GB),
    (30 * _GB, 8, 80 * _GB),
    (70 * _GB, 8, 80 * _GB),
    (70 * _GB, 64, 80 * _GB),
    (3 * _GB, 1, 40 * _GB),
    (2 * _GB, 2, 25 * _GB),
]
_STAGES = ("ddp", "zero1", "zero2", "zero3")


def _test_fits(answer: Answer) -> str:
    for parameters, ranks, memory in _ASKED:
        got = answer(parameters, ranks, memory)
        if got is not None and got not in _STAGES:
            raise WrongAnswerError(f"The result must be one of {', '.join(map(repr, _STAGES))} or None, got {got!r}.")
        needed = {name: sum(model_state_bytes(name, parameters, ranks).values()) for name in _STAGES}
        right = next((name for name in _STAGES if needed[name] <= memory), None)
        sizes = ", ".join(f"{name} {nbytes / _GB:g}" for name, nbytes in needed.items())
        expect(
            got == right,
            f"With {parameters / _GB:g} billion parameters and {ranks} ranks with {memory / _GB:g} GB each, the "
            f"result must be {right!r}, got {got!r}. Memory per rank in GB: {sizes}.",
        )
    return "This is a computed lower bound; activations and temporarily gathered parameters need additional memory."


def _first_that_fits(parameters: int, ranks: int, memory: int) -> str | None:
    for name, divided in {"ddp": "", "zero1": "o", "zero2": "og", "zero3": "ogw"}.items():
        sizes = {"w": 4, "g": 4, "o": 8}
        if parameters * sum(size / (ranks if part in divided else 1) for part, size in sizes.items()) <= memory:
            return name
    return None


def _first(parameters: int, ranks: int, memory: int, needed: Callable[[int], list[float]]) -> str | None:
    """Return the first stage that fits. `needed(ranks)` returns the number of bytes per parameter for each stage."""
    fits = [name for name, each in zip(_STAGES, needed(ranks), strict=True) if parameters * each <= memory]
    return fits[0] if fits else None


def _without_averages(parameters: int, ranks: int, memory: int) -> str | None:
    return _first(parameters, ranks, memory, lambda size: [8, 8, 4 + 4 / size, 8 / size])


def _gradients_first(parameters: int, ranks: int, memory: int) -> str | None:
    return _first(parameters, ranks, memory, lambda size: [16, 12 + 4 / size, 4 + 12 / size, 16 / size])


def _one_average(parameters: int, ranks: int, memory: int) -> str | None:
    return _first(parameters, ranks, memory, lambda size: [12, 8 + 4 / size, 4 + 8 / size, 12 / size])


def _weights_stay(parameters: int, ranks: int, memory: int) -> str | None:
    return _first(parameters, ranks, memory, lambda size: [16, 8 + 8 / size, 4 + 12 / size, 4 + 12 / size])


def _the_last_that_fits(parameters: int, ranks: int, memory: int) -> str | None:
    return "zero3" if 16 * parameters / ranks <= memory else None


first_that_fits = Exercise(
    task=(
        "first_that_fits(parameters, ranks, memory): return the first of 'ddp', 'zero1', 'zero2', 'zero3' for which "
        "parameters, gradients and Adam's state, all in float32, fit in `memory` bytes per rank, or None if no "
        "stage fits."
    ),
    test=_test_fits,
    solution=_first_that_fits,
    wrong={
        "forgets the optimizer's state": _without_averages,
        "shards the gradients before the optimizer's state": _gradients_first,
        "counts only one of Adam's two averages": _one_average,
        "never shards the weights": _weights_stay,
        "returns the last stage that fits": _the_last_that_fits,
    },
    hints=(
        "A parameter requires 4 bytes, its gradient 4 bytes, and Adam's two averages 8 bytes. Which tensors "
        "does each stage shard?",
        "Per parameter, zero1 needs 4 + 4 + 8 / ranks bytes, zero2 4 + (4 + 8) / ranks, zero3 (4 + 4 + 8) / ranks.",
        "Check the stages in order, and return the first stage that needs at most `memory` bytes.",
    ),
)

# ------------------------------------------------------------------------------------------ 2. a minimal reduce-scatter

_LENGTH = 5_000  # elements per row


def _test_scatter(answer: Answer) -> str:
    for size in (2, 3):
        on_ranks(_scatter, size, answer, stuck="Your reduce-scatter did not return.", timeout=30)
    return "Each rank returns the sum of its row, and sends one row to every other rank."


def _scatter(world: World, answer: Answer) -> None:
    rows = (torch.arange(float(world.size)) + 1)[:, None] * 10.0**world.rank + torch.zeros(world.size, _LENGTH)
    expected = torch.full((_LENGTH,), (world.rank + 1) * sum(10.0**rank for rank in range(world.size)))
    dist.barrier()
    before = len(calls(2_000))
    got = answer(rows)
    entered = calls(2_000)[before:]
    shape = torch.Size([_LENGTH])
    if not isinstance(got, torch.Tensor) or got.shape != shape:
        what = list(got.shape) if isinstance(got, torch.Tensor) else repr(got)
        raise WrongAnswerError(
            f"The result must have the shape of a row, {list(shape)}, got {what} on rank {world.rank}."
        )
    expect(
        torch.equal(got, expected),
        f"On {world.size} ranks, rank {world.rank} must return the sum of row {world.rank} over all ranks, "
        f"{numbers(expected[:1])}, got {numbers(got[:1])}.",
    )
    each = {"all_reduce": 2 / world.size, "all_gather": 1.0}  # elements sent per input element to every other rank
    sent = sum((world.size - 1) * each.get(call.op, 1 / world.size) * _elements(call.sizes) for call in entered)
    least = (world.size - 1) * _LENGTH
    expect(
        sent <= 1.01 * least,
        f"The sum is right, but rank {world.rank} sent {sent / least:.1f} times as many bytes as necessary. "
        f"PyTorch's flight recorder reports these collectives: {', '.join(call.what for call in entered)}.",
    )


def _elements(sizes: tuple[tuple[int, ...], ...]) -> int:
    return sum(torch.Size(each).numel() for each in sizes)


def _reduce_scatter(rows: torch.Tensor) -> torch.Tensor:
    received = torch.empty_like(rows)
    dist.all_to_all_single(received, rows)
    return received.sum(0)


def _all_reduced(rows: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(rows)
    return rows[dist.get_rank()]


def _torchs_own(rows: torch.Tensor) -> torch.Tensor:
    row = torch.empty_like(rows[0])
    dist.reduce_scatter_tensor(row, rows.flatten())
    return row


def _gathers_everything(rows: torch.Tensor) -> torch.Tensor:
    everything = rows.new_empty(dist.get_world_size(), *rows.shape)
    dist.all_gather_into_tensor(everything.view(-1), rows.flatten())
    return everything[:, dist.get_rank()].sum(0)


def _adds_its_own_rows(rows: torch.Tensor) -> torch.Tensor:
    received = torch.empty_like(rows)
    dist.all_to_all_single(received, rows)
    return rows.sum(0)


def _takes_one(rows: torch.Tensor) -> torch.Tensor:
    received = torch.empty_like(rows)
    dist.all_to_all_single(received, rows)
    return received[dist.get_rank()]


def _averages(rows: torch.Tensor) -> torch.Tensor:
    received = torch.empty_like(rows)
    dist.all_to_all_single(received, rows)
    return received.mean(0)


reduce_scatter = Exercise(
    task=(
        "reduce_scatter(rows): `rows` has shape [W, n] on each of W ranks. On rank r, return the sum of row r over "
        "all ranks, a tensor of shape [n]. Send at most one row to every other rank. Gloo's own reduce-scatter "
        "sends twice as many bytes."
    ),
    test=_test_scatter,
    solution=_reduce_scatter,
    wrong={
        "all-reduces everything, and returns its row": _all_reduced,
        "uses torch's own reduce-scatter on gloo": _torchs_own,
        "gathers everything": _gathers_everything,
        "sums its own rows": _adds_its_own_rows,
        "returns one of the rows it received": _takes_one,
        "averages": _averages,
    },
    hints=(
        "Rank r needs only row r from every rank. Which collective sends different data to every rank?",
        "dist.all_to_all_single(received, rows) sends row k of `rows` to rank k; row k of `received` is from rank k.",
        "Then sum the received rows: received.sum(0).",
    ),
)

# ------------------------------------------------------------------------ 3. a fully sharded module (a longer exercise)


def _test_sharded(answer: Answer) -> str:
    for size in (2, 3):
        on_ranks(_check_sharded_module, size, answer, stuck="Your sharded module did not return.", timeout=60)
    return "The gradients match those of one process, and between uses, no rank holds more than its shard."


def _module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(31, 300), nn.GELU(), nn.LayerNorm(300), nn.Linear(300, 31))


def _check_sharded_module(world: World, answer: Answer) -> None:
    truth, generator = _module(), torch.Generator().manual_seed(0)
    sizes = [parameter.numel() for parameter in truth.parameters()]
    each, whole = -(-sum(sizes) // world.size), 4 * sum(sizes)
    before = _live()
    made = answer(deepcopy(truth), world)
    try:
        piece, forward = made
    except (TypeError, ValueError):
        raise WrongAnswerError(f"The result must be a pair (piece, forward), got {made!r}.") from None
    where = f"rank {world.rank} of {world.size}"
    expect(isinstance(piece, nn.Parameter), f"piece must be an nn.Parameter, got {type(piece).__name__} on {where}.")
    expect(piece.shape == (each,), f"piece must be a vector of {each} elements, got {list(piece.shape)} on {where}.")
    for step in (1, 2):
        inputs = torch.randn(world.size, 2, 31, generator=generator)
        all_x, x = inputs.clone().requires_grad_(), inputs[world.rank].clone().requires_grad_()
        right = truth(all_x)
        right.square().sum().backward()
        gradient = _flat([parameter.grad for parameter in truth.parameters()])
        truth.zero_grad()
        with count_saved_bytes(nn.ParameterList([piece])) as kept:
            y = forward(x)
        same = torch.allclose(y, right[world.rank], atol=1e-5)
        expect(same, f"In step {step}, the output of forward on {where} differs from module(x).")
        expect(
            kept.nbytes < whole / 4,
            f"After forward, autograd keeps {_part(kept.nbytes, whole)} for backward, but must keep less than a "
            "quarter.",
        )
        _expect_piece(before + gradient.nbytes, whole, world, "Between the forward and backward passes")
        y.square().sum().backward()
        _expect_gradients(piece.grad, x.grad, gradient, all_x.grad, world)
        with torch.no_grad():  # train the piece; the next forward must use the updated piece
            piece.sub_(0.01 * _piece_of(gradient, world))
            for parameter, part in zip(truth.parameters(), gradient.split(sizes), strict=True):
                parameter.sub_(0.01 * part.view_as(parameter))
            del part  # this view would keep the whole gradient alive
        piece.grad = None
        _expect_piece(before + gradient.nbytes, whole, world, "After the backward pass")


def _flat(tensors: list[torch.Tensor | None]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors if tensor is not None])


def _piece_of(flat: torch.Tensor, world: World) -> torch.Tensor:
    return F.pad(flat, (0, -len(flat) % world.size)).view(world.size, -1)[world.rank]


def _live() -> int:
    gc.collect()
    return sum(
        live.nbytes for kind, live in live_tensors().items() if kind.device != "meta"
    )  # meta tensors use no memory


def _part(nbytes: float, whole: int) -> str:
    return f"{nbytes / whole:.1f} times the bytes of all parameters"


_RELEASE_SECONDS = 2.0


def _expect_piece(ours: int, whole: int, world: World, when: str) -> None:
    """Raise `WrongAnswerError` if the rank still holds more than its shard after `_RELEASE_SECONDS`.

    The check's own tensors occupy `ours` bytes. Gloo's thread may release a collective's tensors some time after the
    collective has completed.
    """
    most, deadline = whole / world.size + whole / 4, time.monotonic() + _RELEASE_SECONDS
    while (held := _live() - ours) > most and time.monotonic() < deadline:
        time.sleep(0.01)
    expect(
        held <= most,
        f"{when}, rank {world.rank} of {world.size} holds {_part(held, whole)}, but its shard is only "
        f"{_part(whole / world.size, whole)}.",
    )


def _expect_gradients(
    got: torch.Tensor | None, of_x: torch.Tensor | None, gradient: torch.Tensor, all_x: Any, world: World
) -> None:
    right = _piece_of(gradient, world)
    where = f"rank {world.rank} of {world.size}"
    if got is None or of_x is None:
        missing = "piece.grad" if got is None else "x.grad (the gradient of the input)"
        raise WrongAnswerError(f"After the backward pass, {missing} must be a tensor, got None on {where}.")
    expect(
        torch.allclose(got, right, atol=1e-4),
        f"piece.grad on {where} must be the rank's shard of the gradient summed over ranks, starting with "
        f"{numbers(right[:3])}, got {numbers(got[:3])}.",
    )
    expect(torch.allclose(of_x, all_x[world.rank], atol=1e-4), f"The gradient of the input on {where} is wrong.")


def _sharded_module(module: nn.Module, world: World) -> tuple[nn.Parameter, Callable[[torch.Tensor], torch.Tensor]]:
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    sizes = [shape.numel() for shape in shapes.values()]
    flat = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    rows = F.pad(flat, (0, -len(flat) % world.size)).view(world.size, -1)
    piece = nn.Parameter(rows[world.rank].clone())
    module.to("meta")  # keeps the structure, and frees the memory

    def gather(piece: torch.Tensor) -> torch.Tensor:
        whole = piece.new_empty(world.size * len(piece))
        dist.all_gather_into_tensor(whole, piece.detach())
        return whole

    def run(x: torch.Tensor, whole: torch.Tensor) -> Any:
        parts = whole[: sum(sizes)].split(sizes)
        named = {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)}
        return torch.func.functional_call(module, named, x)

    class Gathered(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, piece: torch.Tensor) -> Any:
            ctx.save_for_backward(x, piece)
            return run(x, gather(piece))  # autograd is disabled here, so nothing is saved

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            x, piece = ctx.saved_tensors
            with torch.enable_grad():  # gather and compute again
                x, whole = x.detach().requires_grad_(), gather(piece).requires_grad_()
                of_x, of_whole = torch.autograd.grad(run(x, whole), (x, whole), gradient)
            mine = torch.empty_like(piece)
            dist.reduce_scatter_tensor(mine, of_whole)
            return of_x, mine

    return piece, lambda x: Gathered.apply(x, piece)


def _mistaken(
    module: nn.Module,
    world: World,
    *,
    keeps: str = "",
    reduce: str = "sum",
    leave: bool = False,
    of_input: bool = True,
    stale: bool = False,
) -> Any:
    """Return the solution with a mistake."""
    named = dict(module.named_parameters())
    shapes, sizes = [p.shape for p in named.values()], [p.numel() for p in named.values()]
    flat = torch.cat([parameter.detach().flatten() for parameter in named.values()])
    piece = nn.Parameter(F.pad(flat, (0, -len(flat) % world.size)).view(world.size, -1)[world.rank].clone())
    names = list(named)
    del named, flat
    if not leave:
        module.to("meta")
    first: list[torch.Tensor] = []

    def gather(piece: torch.Tensor) -> torch.Tensor:
        if stale and first:
            return first[0]
        whole = piece.new_empty(world.size * len(piece))
        dist.all_gather_into_tensor(whole, piece.detach())
        first.extend([whole] if stale else [])
        return whole

    def scattered(of_whole: torch.Tensor) -> torch.Tensor:
        mine = torch.empty_like(piece)
        if reduce == "none":
            return of_whole.view(world.size, -1)[world.rank].clone()
        dist.reduce_scatter_tensor(mine, of_whole)
        return mine / world.size if reduce == "mean" else mine

    def run(x: torch.Tensor, whole: torch.Tensor) -> Any:
        parts = whole[: sum(sizes)].split(sizes)
        given = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
        return torch.func.functional_call(module, given, x)

    class Gathered(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, piece: torch.Tensor) -> Any:
            ctx.save_for_backward(x, piece)
            whole = gather(piece)
            ctx.whole = whole if keeps == "whole" else None
            return run(x, whole)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            x, piece = ctx.saved_tensors
            whole = gather(piece) if ctx.whole is None else ctx.whole
            with torch.enable_grad():
                x, whole = x.detach().requires_grad_(), whole.detach().requires_grad_()
                of_x, of_whole = torch.autograd.grad(run(x, whole), (x, whole), gradient)
            return of_x if of_input else None, scattered(of_whole)

    class Whole(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, piece: torch.Tensor) -> torch.Tensor:
            return gather(piece)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return scattered(gradient)

    if keeps == "autograd":
        return piece, lambda x: run(x, Whole.apply(piece))
    return piece, lambda x: Gathered.apply(x, piece)


def _with(**mistake: Any) -> Answer:
    def sharded(module: nn.Module, world: World) -> Any:
        return _mistaken(module, world, **mistake)

    return sharded


sharded_module = Exercise(
    task=(
        "sharded_module(module, world): return (piece, forward). `piece` is an nn.Parameter that contains this "
        "rank's 1/W of the parameters of `module`, concatenated into a vector and padded with zeros. forward(x) "
        "returns module(x). After backward, piece.grad is this rank's shard of the gradient summed over ranks. "
        "Between uses, and between forward and backward, a rank holds only `piece`."
    ),
    test=_test_sharded,
    solution=_sharded_module,
    wrong={
        "lets autograd keep the gathered parameters": _with(keeps="autograd"),
        "keeps the gathered parameters for backward": _with(keeps="whole"),
        "does not free the module's parameters": _with(leave=True),
        "gathers once for all steps": _with(stale=True),
        "does not sum the gradients over ranks": _with(reduce="none"),
        "averages": _with(reduce="mean"),
        "forgets the gradient of the input": _with(of_input=False),
    },
    hints=(
        "Autograd keeps saved tensors until backward. In a custom torch.autograd.Function, you choose which "
        "tensors are saved.",
        "In forward, save x and `piece`, gather the parameters, and compute the output. In backward, gather "
        "again, and rerun forward with gradients enabled.",
        "torch.func.functional_call(module, named, x) computes with the given parameters; module.to('meta') frees "
        "the module's own parameters. torch.autograd.grad(y, (x, whole), gradient) returns both gradients.",
        "Concatenate the flattened parameters with torch.cat, pad the vector to a multiple of W with F.pad, and use "
        "row r on rank r. dist.all_gather_into_tensor restores the vector, and dist.reduce_scatter_tensor reduces "
        "its gradient.",
    ),
)

# --------------------------------------------------------------- 4. ZeRO-2 with buckets and overlap (a longer exercise)

_WIDTH, _LAYERS, _STRAGGLER_SECONDS = 41, 4, 3.0
_STEPS = ("the same layers on all ranks", "a rank that starts late", "layers in a different order", "a skipped layer")


def _test_gradients(answer: Answer) -> str:
    for size in (2, 3):
        on_ranks(_check_gradients, size, answer, stuck="Your ZeRO-2 implementation did not return.", timeout=60)
    return "Each rank returns its shard of the summed gradients, and buckets are reduced during the backward pass."


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS))

    def forward(self, x: torch.Tensor, order: list[int], first: Callable[[], None] | None = None) -> torch.Tensor:
        """Apply the layers in `order`. The backward pass calls `first` before computing the first layer's gradients."""
        for number in order:
            x = self.layers[number](x)
            if number == order[0] and first is not None:
                x.register_hook(lambda _: first())
            x = x.tanh()
        return x


def _buckets(model: _Layers) -> list[list[nn.Parameter]]:
    return [list(layer.parameters()) for layer in reversed(model.layers)]


def _check_gradients(world: World, answer: Answer) -> None:
    truth, model = _Layers(), _Layers()
    finish = answer(_buckets(model), world)
    expect(callable(finish), f"The result must be a function, got {finish!r}.")
    orders = {"layers in a different order": [0, 2, 1, 3], "a skipped layer": [0, 1, 3]}
    is_last = world.rank == world.size - 1
    for number, step in enumerate(_STEPS):
        order = orders.get(step, [0, 1, 2, 3]) if is_last else [0, 1, 2, 3]
        x = torch.randn(2, _WIDTH, generator=torch.Generator().manual_seed(10 * number + world.rank))
        right = _summed_rows(truth, x, order, world)
        entered: list[int] = []
        y = model(x, order, partial(_expect_overlap, model, entered) if step == _STEPS[0] else None)
        waited = step == _STEPS[1] and is_last and not _arrives(f"{world.size} ranks, step {number}")
        entered.append(len(calls(2_000)))
        y.square().sum().backward()
        if world.is_main:
            default_store().set(f"{world.size} ranks, step {number}", "done")
        got = finish()
        expect(
            not waited,
            f"Rank 0 waits in its backward pass until rank {world.rank} has started. Start each reduction with "
            "async_op=True, and wait in finish.",
        )
        _expect_rows(got, right, f"With {step}, rank {world.rank} of {world.size}")
        full = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
        expect(
            not full,
            f"After finish, .grad must be None, but rank {world.rank} keeps the gradients of {', '.join(full)}.",
        )


def _arrives(key: str) -> bool:
    """Return whether rank 0 sets the key `key` in the store within `_STRAGGLER_SECONDS`."""
    try:
        default_store().wait([key], timedelta(seconds=_STRAGGLER_SECONDS))
    except RuntimeError:  # includes torch's DistStoreError
        return False
    return True


def _summed_rows(truth: _Layers, x: torch.Tensor, order: list[int], world: World) -> list[torch.Tensor]:
    truth.zero_grad()
    truth(x, order).square().sum().backward()
    found = []
    for bucket in _buckets(truth):
        flat = _flat([torch.zeros_like(p) if p.grad is None else p.grad for p in bucket])
        dist.all_reduce(flat)
        found.append(_piece_of(flat, world))
    return found


def _expect_overlap(model: _Layers, before: list[int]) -> None:
    """Check the state in the backward pass when only the first layer's gradients are missing."""
    entered = len(calls(2_000)) - before[0]
    expect(
        entered >= _LAYERS - 2,
        f"In the backward pass, {_LAYERS - 1} buckets are complete before the first layer's gradients arrive, but "
        f"only {entered} reductions have started. Start each reduction as soon as its bucket is complete.",
    )
    full = [p for layer in list(model.layers)[2:] for p in layer.parameters() if p.grad is not None]
    expect(not full, "When a bucket's reduction has started, set .grad of its parameters to None.")


def _expect_rows(got: Any, right: list[torch.Tensor], where: str) -> None:
    shapes = [list(row.shape) for row in right]
    if not isinstance(got, list | tuple) or not all(isinstance(row, torch.Tensor) for row in got):
        raise WrongAnswerError(f"finish must return a list with one tensor per bucket, got {got!r}.")
    expect(
        [list(row.shape) for row in got] == shapes,
        f"The rows must have the shapes {shapes}, got {[*map(list, (row.shape for row in got))]}.",
    )
    for number, (row, expected) in enumerate(zip(got, right, strict=True)):
        expect(
            torch.allclose(row, expected, atol=1e-4),
            f"{where} must return the row {numbers(expected[:3])}... for bucket {number}, got {numbers(row[:3])}...",
        )


def _sharded_gradients(buckets: list[list[nn.Parameter]], world: World) -> Callable[[], list[torch.Tensor]]:
    bucket_of = {parameter: number for number, bucket in enumerate(buckets) for parameter in bucket}
    missing = [set(bucket) for bucket in buckets]  # parameters whose gradients have not arrived
    started: list[tuple[torch.Tensor, Any]] = []

    def start() -> None:
        bucket = buckets[len(started)]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in bucket])
        rows = F.pad(flat, (0, -len(flat) % world.size))
        for parameter in bucket:
            parameter.grad = None
        row = rows.new_empty(len(rows) // world.size)
        started.append((row, dist.reduce_scatter_tensor(row, rows, async_op=True)))

    def arrive(parameter: nn.Parameter) -> None:
        missing[bucket_of[parameter]].discard(parameter)
        while len(started) < len(buckets) and not missing[len(started)]:  # in the order of the list
            start()

    for parameter in bucket_of:
        parameter.register_post_accumulate_grad_hook(arrive)

    def finish() -> list[torch.Tensor]:
        while len(started) < len(buckets):
            start()
        for _, work in started:
            work.wait()
        found = [row for row, _ in started]
        started.clear()
        missing[:] = [set(bucket) for bucket in buckets]
        return found

    return finish


def _zero2(
    buckets: list[list[nn.Parameter]],
    world: World,
    *,
    in_finish: bool = False,
    is_async: bool = True,
    in_order: bool = True,
    free: bool = True,
    reset: bool = True,
    factor: float = 1.0,
    whole: bool = False,
) -> Callable[[], list[torch.Tensor]]:
    """Return the solution with a mistake."""
    bucket_of = {parameter: number for number, bucket in enumerate(buckets) for parameter in bucket}
    missing = [set(bucket) for bucket in buckets]
    started: dict[int, tuple[torch.Tensor, Any]] = {}

    def start(number: int) -> None:
        flat = _flat([torch.zeros_like(p) if p.grad is None else p.grad for p in buckets[number]])
        rows = F.pad(flat, (0, -len(flat) % world.size))
        for parameter in buckets[number] if free else ():
            parameter.grad = None
        if whole:
            started[number] = rows, dist.all_reduce(rows, async_op=True)
            return
        row = rows.new_empty(len(rows) // world.size)
        started[number] = row, dist.reduce_scatter_tensor(row, rows, async_op=is_async)

    def arrive(parameter: nn.Parameter) -> None:
        number = bucket_of[parameter]
        missing[number].discard(parameter)
        if not in_order and not missing[number]:
            start(number)
        while in_order and not in_finish and len(started) < len(buckets) and not missing[len(started)]:
            start(len(started))

    for parameter in bucket_of:
        parameter.register_post_accumulate_grad_hook(arrive)

    def finish() -> list[torch.Tensor]:
        for number in range(len(buckets)):
            if number not in started:
                start(number)
        for _, work in started.values():
            if work is not None:
                work.wait()
        rows = [started[number][0] * factor for number in range(len(buckets))]
        if reset:
            started.clear()
            missing[:] = [set(bucket) for bucket in buckets]
        return rows

    return finish


def _zero2_with(**mistake: Any) -> Answer:
    def sharded(buckets: list[list[nn.Parameter]], world: World) -> Any:
        return _zero2(buckets, world, **mistake)

    return sharded


sharded_gradients = Exercise(
    task=(
        "sharded_gradients(buckets, world): return a function finish(). `buckets` is a list of lists of parameters, "
        "approximately in the order of the backward pass. During the backward pass, start the reduction of each "
        "bucket when the bucket is complete, in the order of the list, and set .grad to None. After the backward "
        "pass, finish() waits for the reductions and returns one tensor per bucket, which contains this rank's 1/W "
        "of the concatenated gradients, padded with zeros and summed over ranks. A missing gradient counts as zero. "
        "Every step calls finish() once."
    ),
    test=_test_gradients,
    solution=_sharded_gradients,
    wrong={
        "reduces after the backward pass": _zero2_with(in_finish=True),
        "waits in the hook": _zero2_with(is_async=False),
        "starts buckets in the order of completion": _zero2_with(in_order=False),
        "keeps the full gradients": _zero2_with(free=False),
        "returns the first step's gradients again": _zero2_with(reset=False),
        "averages": _zero2_with(factor=0.5),
        "returns the full sums": _zero2_with(whole=True),
    },
    hints=(
        "parameter.register_post_accumulate_grad_hook(f) calls f(parameter) when its gradient is complete.",
        "For each bucket, keep the set of parameters without a gradient. A rank may complete bucket 2 before bucket "
        "1, but all ranks must start the reductions in the same order.",
        "dist.reduce_scatter_tensor(row, rows, async_op=True) returns a work object. Call its wait() in finish.",
        "In finish, first start the reductions of the buckets that are still incomplete on this rank, with "
        "zeros for missing gradients.",
    ),
)
