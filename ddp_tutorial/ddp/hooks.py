"""How a bucket is sent: as it is, in 16 bits, or as two thin matrices (PowerSGD).

A hook starts the all-reduce of a bucket, which holds this rank's gradients divided by the world size, and returns a
`Pending` to wait for. After that the bucket holds the mean over ranks, or what the compression has left of it.
"""

import zlib
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch.futures import Future

from ddp_tutorial.collectives import copy_from_flat
from ddp_tutorial.ddp.buckets import Bucket
from ddp_tutorial.ddp.link import Link


class Pending(Protocol):
    """An all-reduce that has been started."""

    def wait(self) -> object:
        """Return when it is done. Raises if it failed."""
        ...


class Hook(Protocol):
    """How a bucket is averaged."""

    link: Link

    def start(self, bucket: Bucket) -> Pending:
        """Start to average the bucket over all ranks, without waiting."""
        ...


class AllReduceHook:
    """Send the gradients as they are."""

    def __init__(self, link: Link) -> None:
        self.link = link

    def start(self, bucket: Bucket) -> Future[torch.Tensor]:
        """Begin to sum the bucket over all ranks."""
        return self.link.all_reduce(bucket.buffer, bucket.name)


class CastHook:
    """Send gradients in `dtype`, of 16 bits: half of float32's bytes. A complex number is sent as two numbers.

    bfloat16 keeps float32's range, and 8 bits of precision. float16 keeps 11 bits, but anything below 6e-8 becomes zero
    and above 65,504 infinity. The sum is computed in `dtype` as well, so its error grows with the number of ranks.
    """

    def __init__(self, link: Link, dtype: torch.dtype) -> None:
        self.link, self.dtype = link, dtype

    def start(self, bucket: Bucket) -> Future[torch.Tensor]:
        """Begin to sum the bucket over all ranks; the sum is cast back as soon as it has arrived."""
        numbers = torch.view_as_real(bucket.buffer) if bucket.buffer.is_complex() else bucket.buffer
        summed = self.link.all_reduce(numbers.to(self.dtype), bucket.name)

        def cast_back(done: Future[torch.Tensor]) -> torch.Tensor:
            numbers.copy_(done.value())  # value() raises if the all-reduce failed
            return bucket.buffer

        return summed.then(cast_back)


class PowerSGD:
    """Send a gradient matrix M [n, m] as P = M Q [n, rank] and Q = M' P [m, rank]: one step of power iteration.

    The part of M that P Q' does not represent is kept on this rank and added to its next gradient (error feedback), so
    it arrives late instead of never. Q is kept too, as the start of the next step's iteration. Vectors, complex
    gradients, and matrices for which P and Q would not be smaller, are sent as they are. Raises `ValueError` for a
    `rank` below 1.

    Vogels, Karimireddy & Jaggi, "PowerSGD: Practical low-rank gradient compression for distributed optimization", 2019.
    """

    def __init__(self, link: Link, world_size: int, rank: int = 2, seed: int = 0) -> None:
        if rank < 1:
            raise ValueError(f"rank={rank}: should be 1 or more")
        self.link, self.world_size, self.rank, self.seed = link, world_size, rank, seed
        # By parameter, not by bucket: buckets are rebuilt after the first step.
        self.errors: dict[str, torch.Tensor] = {}
        self.qs: dict[str, torch.Tensor] = {}

    def start(self, bucket: Bucket) -> "_Factors":
        """Begin to sum the first factors, P, and all that is not compressed."""
        return _Factors(self, bucket)

    def state_dict(self) -> dict[str, Any]:
        """What is kept from one step to the next: of this rank, what it has yet to send."""
        return {"rank": self.rank, "errors": dict(self.errors), "qs": dict(self.qs)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there. With another `rank`, the iteration begins anew, and nothing that is yet to be sent is
        lost."""
        self.errors = dict(state["errors"])
        self.qs = dict(state["qs"]) if state["rank"] == self.rank else {}

    def is_compressible(self, shape: torch.Size) -> bool:
        """Are the two factors smaller than a gradient of this shape?"""
        rows, columns = shape[0] if len(shape) > 1 else 0, shape[1:].numel()
        return self.rank * (rows + columns) < rows * columns

    def first_q(self, name: str, columns: int, like: torch.Tensor) -> torch.Tensor:
        """A random start [columns, rank], the same on every rank."""
        generator = torch.Generator().manual_seed(self.seed ^ zlib.crc32(name.encode()))
        return torch.randn(columns, self.rank, generator=generator).to(like)


class _Factors:
    """The factors of one bucket: P's all-reduce has been started, Q's starts in `wait`, in the order of the buckets.

    Not in a callback of P's future: those of different buckets run in different orders on different ranks, and would
    start their all-reduces in different orders too.
    """

    @torch.no_grad()
    def __init__(self, hook: PowerSGD, bucket: Bucket) -> None:
        self.hook, self.bucket = hook, bucket
        self.as_they_are: list[torch.Tensor] = []
        self.matrices: dict[str, torch.Tensor] = {}
        for name, view in zip(bucket.names, bucket.views, strict=True):
            if hook.is_compressible(view.shape) and not view.is_complex():
                matrix = self.matrices[name] = view.reshape(view.shape[0], -1)
                if name in hook.errors:
                    matrix += hook.errors[name].to(matrix)
                if name not in hook.qs:
                    hook.qs[name] = hook.first_q(name, matrix.shape[1], matrix)
            else:
                self.as_they_are.append(view)
        self.ps = [matrix @ hook.qs[name].to(matrix) for name, matrix in self.matrices.items()]
        self.first = torch.cat([tensor.reshape(-1) for tensor in self.ps + self.as_they_are])
        self.pending = hook.link.all_reduce(self.first, bucket.name)

    @torch.no_grad()
    def wait(self) -> None:
        self.pending.wait()
        copy_from_flat(self.first, self.ps + self.as_they_are)
        if not self.matrices:
            return
        bases = [torch.linalg.qr(p if p.dtype == torch.float64 else p.float()).Q.to(p) for p in self.ps]
        qs = [matrix.t() @ basis for matrix, basis in zip(self.matrices.values(), bases, strict=True)]
        second = torch.cat([q.reshape(-1) for q in qs])
        self.hook.link.all_reduce(second, f"{self.bucket.name}, Q").wait()
        copy_from_flat(second, qs)
        for (name, matrix), basis, q in zip(self.matrices.items(), bases, qs, strict=True):
            mean = basis @ q.t()
            self.hook.errors[name] = matrix - mean / self.hook.world_size  # of this rank's share
            self.hook.qs[name] = q
            matrix.copy_(mean)
