"""Define communication hooks that send buckets uncompressed, in a 16-bit dtype, or as low-rank matrices (PowerSGD).

A bucket contains this rank's gradients, divided by the world size. A hook starts the bucket's all-reduce and returns a
`Pending` object. After `Pending.wait` returns, the bucket contains the mean over ranks. If the hook compresses
gradients, the bucket contains an approximation of the mean.
"""

import zlib
from collections.abc import Container, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch.futures import Future

from ddp_tutorial.collectives import copy_from_flat
from ddp_tutorial.ddp.buckets import Bucket
from ddp_tutorial.ddp.link import Link


class Pending(Protocol):
    """Interface of an all-reduce in progress."""

    def wait(self) -> object:
        """Wait until the all-reduce is complete. If the all-reduce failed, raise its error."""
        ...


class Hook(Protocol):
    """Interface of the communication hooks, which average a bucket over the ranks."""

    link: Link

    def start(self, bucket: Bucket) -> Pending:
        """Start averaging the bucket over all ranks, without waiting for the result."""
        ...


class AllReduceHook:
    """A hook that sends the gradients uncompressed."""

    def __init__(self, link: Link) -> None:
        """Create a hook that sends gradients over `link`."""
        self.link = link

    def start(self, bucket: Bucket) -> Future[torch.Tensor]:
        """Start summing the bucket over all ranks."""
        return self.link.all_reduce(bucket.buffer, bucket.name)


class CastHook:
    """A hook that sends gradients in a 16-bit `dtype`, which halves the number of bytes compared with float32.

    A complex number is sent as two real numbers. The dtype bfloat16 covers float32's range with 8 bits of precision.
    With float16 (11 bits of precision), magnitudes below about 3e-8 become 0, and magnitudes above 65,504 overflow.
    The sum is also computed in `dtype`, so the rounding error grows with the number of ranks.
    """

    def __init__(self, link: Link, dtype: torch.dtype) -> None:
        """Create a hook that sends gradients over `link` in `dtype`."""
        self.link, self.dtype = link, dtype

    def start(self, bucket: Bucket) -> Future[torch.Tensor]:
        """Start summing the bucket over all ranks. The completed sum is cast back to the gradients' dtype."""
        numbers = torch.view_as_real(bucket.buffer) if bucket.buffer.is_complex() else bucket.buffer
        summed = self.link.all_reduce(numbers.to(self.dtype), bucket.name)

        def cast_back(done: Future[torch.Tensor]) -> torch.Tensor:
            numbers.copy_(done.value())  # value() raises if the all-reduce failed
            return bucket.buffer

        return summed.then(cast_back)


class PowerSGD:
    """A hook that approximates a gradient matrix M [n, m] by the factors P = M Q [n, rank] and Q = M' P [m, rank].

    The approximation uses one step of power iteration. The residual M - P Q' stays on this rank and is added to the
    next gradient (error feedback). Residuals are therefore delayed, not lost. The power iteration starts from the Q of
    the previous step. Vectors, complex gradients, and matrices not larger than P and Q together are sent uncompressed.

    Do not use loss scaling with this hook. After an overflow, the residual and all later gradients would be NaN.

    Vogels, Karimireddy & Jaggi, "PowerSGD: Practical low-rank gradient compression for distributed optimization", 2019.
    """

    def __init__(self, link: Link, world_size: int, rank: int = 2, seed: int = 0) -> None:
        """Create a hook with zero residuals. `seed` determines the initial Q.

        Raises:
            ValueError: If `rank`, the rank of the approximation, is less than 1.
        """
        if rank < 1:
            raise ValueError(f"the rank of the PowerSGD approximation ('rank') must be at least 1, got {rank}")
        self.link, self.world_size, self.rank, self.seed = link, world_size, rank, seed
        # By parameter, because buckets are rebuilt after the first step.
        self.errors: dict[str, torch.Tensor] = {}
        self.qs: dict[str, torch.Tensor] = {}

    def start(self, bucket: Bucket) -> "_Factors":
        """Start summing the factors P and the uncompressed gradients over all ranks."""
        return _Factors(self, bucket)

    @torch.no_grad()
    def restore_unused(self, buckets: Iterable[Bucket], used: Container[str]) -> None:
        """Add this rank's part of the mean back to the residual of each parameter that no rank used.

        The `.grad` of an unused parameter is None. `used` contains the names of all used parameters.
        """
        for bucket in buckets:
            for name, view in zip(bucket.names, bucket.views, strict=True):
                if name in self.errors and name not in used:
                    self.errors[name] += view.view_as(self.errors[name]) / self.world_size

    def state_dict(self) -> dict[str, Any]:
        """Return the approximation rank, and the residuals and Q factors that this rank keeps between steps."""
        return {"rank": self.rank, "errors": dict(self.errors), "qs": dict(self.qs)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state`. If the approximation rank changed, restore only the residuals."""
        self.errors = dict(state["errors"])
        self.qs = dict(state["qs"]) if state["rank"] == self.rank else {}

    def is_compressible(self, shape: torch.Size) -> bool:
        """Return whether P and Q together are smaller than a gradient of this shape."""
        rows, columns = shape[0] if len(shape) > 1 else 0, shape[1:].numel()
        return self.rank * (rows + columns) < rows * columns

    def first_q(self, name: str, columns: int, like: torch.Tensor) -> torch.Tensor:
        """Return a random initial Q [columns, rank] that is the same on all ranks."""
        generator = torch.Generator().manual_seed(self.seed ^ zlib.crc32(name.encode()))
        return torch.randn(columns, self.rank, generator=generator).to(like)


class _Factors:
    """The factors of one bucket. The constructor starts the all-reduce of P, and `wait` runs the all-reduce of Q.

    All ranks call `wait` in bucket order, so the all-reduces of Q also start in bucket order. Callbacks on P's futures
    would not guarantee this order.
    """

    @torch.no_grad()
    def __init__(self, hook: PowerSGD, bucket: Bucket) -> None:
        self.hook, self.bucket = hook, bucket
        self.uncompressed: list[torch.Tensor] = []
        self.matrices: dict[str, torch.Tensor] = {}
        for name, view in zip(bucket.names, bucket.views, strict=True):
            if hook.is_compressible(view.shape) and not view.is_complex():
                matrix = self.matrices[name] = view.reshape(view.shape[0], -1)
                if name in hook.errors:
                    matrix += hook.errors[name].to(matrix)
                if name not in hook.qs:
                    hook.qs[name] = hook.first_q(name, matrix.shape[1], matrix)
            else:
                if name in hook.errors:  # the parameter was compressible with an earlier approximation rank
                    view.add_(hook.errors.pop(name).to(view).view_as(view))
                self.uncompressed.append(view)
        self.ps = [matrix @ hook.qs[name].to(matrix) for name, matrix in self.matrices.items()]
        self.first = torch.cat([tensor.reshape(-1) for tensor in self.ps + self.uncompressed])
        self.pending = hook.link.all_reduce(self.first, bucket.name)

    @torch.no_grad()
    def wait(self) -> None:
        self.pending.wait()
        copy_from_flat(self.first, self.ps + self.uncompressed)
        if not self.matrices:
            return
        bases = [torch.linalg.qr(p if p.dtype == torch.float64 else p.float()).Q.to(p) for p in self.ps]
        qs = [matrix.t() @ basis for matrix, basis in zip(self.matrices.values(), bases, strict=True)]
        second = torch.cat([q.reshape(-1) for q in qs])
        self.hook.link.all_reduce(second, f"{self.bucket.name}, Q").wait()
        copy_from_flat(second, qs)
        for (name, matrix), basis, q in zip(self.matrices.items(), bases, qs, strict=True):
            mean = basis @ q.t()
            self.hook.errors[name] = matrix - mean / self.hook.world_size  # this rank's part of the error
            self.hook.qs[name] = q
            matrix.copy_(mean)
