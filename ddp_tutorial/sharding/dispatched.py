"""Define a source in which rank 0 reads the data and sends each rank its shard."""

import pickle
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ddp_tutorial.collectives import from_rank_zero, rank_zero_first
from ddp_tutorial.compat import tree_flatten, tree_unflatten
from ddp_tutorial.sharding.permutation import global_micro_batch_sizes, shard_micro_batches
from ddp_tutorial.sharding.samples import as_batch, select_rows
from ddp_tutorial.sharding.sharded import pickled, to_device
from ddp_tutorial.sharding.source import LocalBatch, Source, SourceState, Tree
from ddp_tutorial.sharding.workers import SourceError, require_prefetch
from ddp_tutorial.world import World, require_group


class DispatchedSource:
    """A source for data that only one process can read. Rank 0 reads the samples for all ranks.

    While the ranks compute, a thread on rank 0 reads the next batches and sends their shards through a separate process
    group. On every other rank, a thread receives that rank's shards. A batch can be any tree of tensors with one row
    per sample. The batch size need not be a multiple of the world size. If `collate_fn` pads samples, it pads them to
    the length of the longest sample in the global batch. A read error on rank 0 raises a `SourceError` on all ranks.

    If reading uses the process's random number generators (see `uses_local_rng`), rank 0 reads in the main thread and
    does not prefetch. Threads share the random number generators, so reading in a different thread would change the
    random numbers that training draws.
    """

    def __init__(
        self,
        make: Callable[[], Source],
        world: World,
        *,
        prefetch: int = 2,
    ) -> None:
        """Create the inner source on rank 0, and broadcast its batch size, steps per epoch, and state. Collective.

        Args:
            make: A function that creates the inner source for a world of one rank. Only rank 0 calls this function.
            world: The ranks of the run.
            prefetch: The number of steps to prefetch.

        Raises:
            ConfigError: If `prefetch` is less than 1.
        """
        require_group(world)
        require_prefetch(prefetch)
        self.world = world
        with rank_zero_first(world):
            self._inner = make() if world.is_main else None
            inner = self._inner
            first = (inner.batch_size, inner.steps_per_epoch, inner.state_dict()) if inner else None
        self._group: dist.ProcessGroup | None = None
        self._ahead: queue.Queue[tuple[list[LocalBatch], SourceState] | Exception] = queue.Queue(prefetch)
        self._parts = 1  # micro-batches per step
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_open = False  # on rank 0: whether the other ranks wait for a step
        received = from_rank_zero(world, first)
        assert received is not None  # rank 0 sends a tuple
        self.batch_size: int = received[0]
        self.steps_per_epoch: float | None = received[1]
        self._state: SourceState = received[2]

    def __next__(self) -> LocalBatch:
        """Return this rank's samples for the next step as one batch. Collective."""
        return self.take(1)[0]

    def take(self, micro_batches: int) -> list[LocalBatch]:
        """Return this rank's samples for the next step, split into micro-batches. Collective.

        Raises:
            SourceError: On all ranks, if rank 0 cannot read the samples.
        """
        if micro_batches != self._parts:
            self.load_state_dict(self._state)  # the prefetched steps have a different number of micro-batches
            self._parts = micro_batches
        if self._group is None and self.world.size > 1:
            # Use gloo even on GPUs, because the samples are in CPU memory. A separate group separates the threads'
            # messages from the main thread's collectives.
            self._group = dist.new_group(backend="gloo", timeout=self.world.timeout)
        shares, self._state = self._next_here() if getattr(self._inner, "uses_local_rng", False) else self._next_ahead()
        return [replace(share, samples=to_device(share.samples, self.world.device)) for share in shares]

    def _next_here(self) -> tuple[list[LocalBatch], SourceState]:
        self._is_open = True
        return self._step()

    def _next_ahead(self) -> tuple[list[LocalBatch], SourceState]:
        if self._thread is None:
            self._closing.clear()
            self._is_open = True
            work = self._serve if self.world.is_main else self._receive
            self._thread = threading.Thread(target=work, name="dispatch", daemon=True)
            self._thread.start()
        step = self._ahead.get()
        if isinstance(step, Exception):
            self._thread = None
            raise step
        return step

    def _serve(self) -> None:
        try:
            while not self._closing.is_set():
                self._put(self._step())
        except Exception as error:
            self._put(error)

    def _step(self) -> tuple[list[LocalBatch], SourceState]:
        """Read a batch, send every other rank its shard, and return rank 0's shard. On failure, send the error."""
        assert self._inner is not None
        before = self._inner.state_dict()
        try:
            share, state = next(self._inner), self._inner.state_dict()
            samples = as_batch(share.samples, share.count)
            counts = global_micro_batch_sizes(share.count, self.world.size, self._parts)

            def batches_of(rank: int) -> list[tuple[Tree, int, int]]:
                parts = shard_micro_batches(torch.arange(share.count), rank, self.world.size, self._parts)
                return [
                    (select_rows(samples, part), len(part), count) for part, count in zip(parts, counts, strict=True)
                ]

            for rank in range(1, self.world.size):
                self._send((batches_of(rank), state), rank)
            return [LocalBatch(*each) for each in batches_of(0)], state
        except Exception as error:
            self._inner.load_state_dict(before)  # so that the caller can retry the step
            message = f"rank 0 failed to read: {error}"
            self._end_others(message)
            raise SourceError(message) from error
        except BaseException:  # an interrupt; the next step reads the same samples again
            self._inner.load_state_dict(before)
            raise

    def _end_others(self, error: str | None = None) -> None:
        """Notify the other ranks that rank 0 has stopped sending, and send them the `error` message, if any."""
        self._is_open = False
        for rank in range(1, self.world.size):
            with suppress(RuntimeError):  # the rank has exited
                self._send(error, rank)

    def _receive(self) -> None:
        try:
            while (received := self._recv()) is not None:
                if isinstance(received, str):
                    return self._put(SourceError(received))
                batches, state = received
                self._put(([LocalBatch(*each) for each in batches], state))
        except Exception as error:  # the connection is lost; the main thread raises the error
            self._put(error)

    def _put(self, found: tuple[list[LocalBatch], SourceState] | Exception) -> None:
        """Pass a batch or error to the main thread when the queue has capacity, unless the source is being closed."""
        while not self._closing.is_set():
            try:
                return self._ahead.put(found, timeout=0.1)
            except queue.Full:
                continue

    def _send(self, thing: object, rank: int) -> None:
        """Serialize an object and send `rank` two messages: the size in bytes, and then the data."""
        data = pack(thing)
        dist.send(torch.tensor(len(data)), rank, group=self._group)
        dist.send(data, rank, group=self._group)

    def _recv(self) -> Any:
        length = torch.tensor(0)
        dist.recv(length, 0, group=self._group)
        data = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(data, 0, group=self._group)
        return unpack(data)

    def state_dict(self) -> SourceState:
        """Return the state of rank 0's source after the most recent step."""
        return self._state

    def load_state_dict(self, state: SourceState) -> None:
        """Resume from a state that `state_dict` returned. Collective."""
        self._state = state
        self._stop()

    def close(self) -> None:
        """Stop reading, and destroy the process group. Collective."""
        self._stop()
        if self._group is not None:
            with suppress(ValueError):  # destroyed together with the default group
                dist.destroy_process_group(self._group)
            self._group = None

    def _stop(self) -> None:
        """Stop sending on rank 0, and receive all pending batches on the other ranks. Collective."""
        if self._thread is not None:
            self._closing.set()
            self._thread.join()
            self._thread = None
        if self.world.is_main and self._is_open:
            self._end_others()
        while not self._ahead.empty():
            self._ahead.get()
        if self._inner:
            self._inner.close()
            self._inner.load_state_dict(self._state)  # prefetched steps are read again


class _Leaf(NamedTuple):
    """A placeholder for a tensor in the pickled structure."""

    dtype: torch.dtype
    shape: tuple[int, ...]


_ALIGN = 16  # bytes; each tensor starts at a multiple of this number, because dtypes require alignment


def pack(thing: object) -> torch.Tensor:
    """Serialize an object, including its tensors, as a uint8 tensor.

    The result contains the pickled structure, followed by the raw tensor data.
    """
    leaves, tree = tree_flatten(thing)
    tensors = [leaf.detach().cpu().resolve_conj().resolve_neg() for leaf in leaves if torch.is_tensor(leaf)]
    placeholders = [_Leaf(leaf.dtype, tuple(leaf.shape)) if torch.is_tensor(leaf) else leaf for leaf in leaves]
    head = pickled(tree_unflatten(placeholders, tree))
    parts = [torch.tensor([len(head)]).view(torch.uint8), torch.frombuffer(bytearray(head), dtype=torch.uint8)]
    for part in [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]:
        parts += [torch.zeros(-sum(map(len, parts)) % _ALIGN, dtype=torch.uint8), part]
    return torch.cat(parts)


def unpack(data: torch.Tensor) -> Any:
    """Deserialize a tensor that `pack` returned.

    Unpickling can execute code, so unpack only data from a rank of the same run.
    """
    length = int(data[:8].view(torch.int64))
    at = 8 + length
    leaves, tree = tree_flatten(pickle.loads(bytes(data[8:at].numpy())), is_leaf=lambda leaf: isinstance(leaf, _Leaf))
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, _Leaf):
            at += -at % _ALIGN
            nbytes = int(np.prod(leaf.shape)) * leaf.dtype.itemsize
            leaves[number] = data[at : at + nbytes].view(leaf.dtype).view(leaf.shape)
            at += nbytes
    return tree_unflatten(leaves, tree)
