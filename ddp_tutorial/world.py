"""Describe a rank with a frozen `World`, and create its process group.

Environment variables identify the launcher, which is torchrun, `launch`, or Slurm's `srun`. `launch` sets the same
variables as torchrun. Without a launcher, the world has one rank. A pure function reads the variables, so the tests do
not require a cluster.
"""

import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from ddp_tutorial import hosts
from ddp_tutorial.compat import abort_process_group
from ddp_tutorial.config import ConfigError
from ddp_tutorial.environment import integer_variable, variables_restored
from ddp_tutorial.slurm.step import has_gpu_per_task, world_of_step

# The default timeout of a collective.
COLLECTIVE_TIMEOUT = timedelta(minutes=10)
_INIT_BARRIER = "TORCH_DIST_INIT_BARRIER"
# NCCL 2.30 and later let ranks share a GPU if this variable is 1:
# https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-multi-rank-gpu-enable
NCCL_SHARES_GPUS = "NCCL_MULTI_RANK_GPU_ENABLE"


@dataclass(frozen=True)
class World:
    """The ranks that train together, as seen by one rank.

    Attributes:
        rank: The rank of this process among all processes on all machines, counted from 0.
        size: The number of ranks.
        local_rank: The rank of this process among the processes on this machine, counted from 0.
        local_size: The number of ranks on this machine.
        device: The device of this rank.
        init_method: The rendezvous URL of torch's process group.
        backend: The backend of the process group. The default is NCCL on GPUs and gloo on CPUs. On GPUs, gloo is slow,
            but allows ranks to share a GPU.
        timeout: The timeout of a collective.

    Raises:
        ConfigError: If a rank is out of range, or if the backend is unknown or does not support the device.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    device: torch.device = torch.device("cpu")
    init_method: str = "env://"
    backend: str = "auto"
    timeout: timedelta = COLLECTIVE_TIMEOUT

    def __post_init__(self) -> None:
        """Validate the ranks, and choose the backend."""
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"rank must be between 0 and {self.size - 1}, got {self.rank} (world size {self.size})")
        if not 0 <= self.local_rank < self.local_size:
            raise ConfigError(f"local rank must be between 0 and {self.local_size - 1}, got {self.local_rank}")
        object.__setattr__(self, "backend", choose_backend(self.backend, self.device))

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files and logs for all ranks."""
        return self.rank == 0

    @property
    def message_device(self) -> torch.device:
        """The device of tensors for point-to-point communication, which is the CPU if the backend is gloo.

        Gloo cannot send GPU memory; see "Backends" in https://docs.pytorch.org/docs/stable/distributed.html.
        """
        return torch.device("cpu") if self.backend == "gloo" else self.device

    @staticmethod
    def detect(
        environ: Mapping[str, str] = os.environ,
        device: str = "auto",
        gpus: int | None = None,
        *,
        backend: str = "auto",
        timeout: timedelta = COLLECTIVE_TIMEOUT,
    ) -> "World":
        """Return the world that the environment variables describe.

        Args:
            environ: The environment variables.
            device: "auto", "cpu", or "cuda".
            gpus: The number of GPUs visible to this process. By default, the visible GPUs are counted.
            backend: "auto", "gloo", or "nccl".
            timeout: The timeout of a collective.

        Raises:
            ConfigError: If the variables contradict each other, if a requested GPU does not exist, or if the backend
                does not support the device.
        """
        torchrun = _torchrun(environ)
        numbers = torchrun or world_of_step(environ) or {}
        world = World(**numbers)
        own_gpu = not torchrun and has_gpu_per_task(environ, world.local_size)
        chosen = choose_device(device, world.local_rank, world.local_size, gpus, backend, one_gpu_per_task=own_gpu)
        return replace(world, device=chosen, backend=backend, timeout=timeout)

    def __str__(self) -> str:
        """Return a description such as "rank 0 of 2 on cpu, gloo"."""
        return f"rank {self.rank} of {self.size} on {self.device}, {self.backend}"


def is_launched_rank(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether torchrun, `launch`, or srun with several tasks started this process.

    A launched process is already a rank, and does not launch other ranks.
    """
    return "RANK" in environ or World.detect(environ, device="cpu").size > 1


def choose_device(
    device: str,
    local_rank: int = 0,
    local_size: int = 1,
    gpus: int | None = None,
    backend: str = "auto",
    *,
    one_gpu_per_task: bool = False,
) -> torch.device:
    """Return a GPU if the machine has a GPU for each of its ranks, and the CPU otherwise.

    If there are fewer GPUs than ranks, the ranks share the GPUs only if `device` is "cuda" and the backend allows
    sharing. Gloo allows sharing. NCCL 2.30 and later allow sharing if NCCL_MULTI_RANK_GPU_ENABLE=1 is set. With
    `one_gpu_per_task`, the visible GPUs belong to this rank alone. `World.detect` describes the other arguments.

    Raises:
        ConfigError: If `device` is unknown. Also raised if `device` is "cuda", there are too few GPUs, and the ranks
            cannot share GPUs.
    """
    if device not in {"auto", "cpu", "cuda"}:
        raise ConfigError(f"device must be 'auto', 'cpu' or 'cuda', got {device!r}")
    if device == "cpu":
        return torch.device("cpu")
    gpus = torch.cuda.device_count() if gpus is None else gpus
    permitted = backend == "gloo" or os.environ.get(NCCL_SHARES_GPUS) == "1"
    may_share = one_gpu_per_task or (device == "cuda" and permitted)
    if gpus >= local_size or (gpus and may_share):
        return torch.device("cuda", local_rank % gpus)
    if device == "cuda":
        sharing = f". Ranks can share a GPU with backend='gloo', or with NCCL 2.30 or later and {NCCL_SHARES_GPUS}=1"
        raise ConfigError(
            f"device='cuda' requires one GPU for each of the {local_size} ranks on this machine, got {gpus}. "
            f"Use device='cpu', or start at most one rank per GPU{sharing if gpus else ''}."
        )
    return torch.device("cpu")


def choose_backend(backend: str, device: torch.device) -> str:
    """Return the process group backend for ranks on `device`.

    Raises:
        ConfigError: If `backend` is unknown, or if `backend` is "nccl" and `device` is a CPU.
    """
    if backend not in {"auto", "gloo", "nccl"}:
        reason = ", which PyTorch's prebuilt packages do not support" if backend == "mpi" else ""
        raise ConfigError(f"backend must be 'auto', 'gloo' or 'nccl', got {backend!r}{reason}")
    if backend == "nccl" and device.type != "cuda":
        raise ConfigError("backend='nccl' requires GPUs, but these ranks are on CPUs. Use backend='gloo' or 'auto'.")
    if backend == "auto":
        return "nccl" if device.type == "cuda" else "gloo"
    return backend


@contextmanager
def process_group(world: World) -> Iterator[World]:
    """Create the process group of `world` for the duration of the block. Collective. A single rank needs no group.

    If a process group already exists, as in a Ray Train worker, the block uses it. The block does not
    change the group's timeout, and the code that created the group must destroy it.

    Between hosts, gloo uses the network interface that routes to rank 0's host, unless GLOO_SOCKET_IFNAME specifies
    a different interface.

    In torch 2.13, the first `import torch._dynamo` in a process keeps the current group alive. As a result, gloo's
    threads keep running after the block. DistributedDataParallel, for example, triggers this import. To avoid this
    problem, import `torch._dynamo` before the block.

    Raises:
        RuntimeError: If the existing group has a different size or rank.
        ConfigError: If the existing group has a different backend, or if GLOO_SOCKET_IFNAME specifies an unknown
            interface.
        LostHostError: If an exception in the block indicates that a rank on a different host timed out or disconnected.
            The message contains the host name.
    """
    if world.size == 1:
        yield world
        return
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    if dist.is_initialized():
        _require_same(world)
        yield world
        return
    # torch and gloo read these variables when a group is created, including groups created inside the block.
    with variables_restored(_INIT_BARRIER, hosts.GLOO_INTERFACE):
        across = world.size > world.local_size and world.backend == "gloo"
        if across or (world.backend == "gloo" and hosts.GLOO_INTERFACE in os.environ):
            hosts.choose_interface(_meeting_place(world))
        # Wait for all ranks after the initialization. Otherwise, a rank could exit while others connect to it.
        os.environ.setdefault(_INIT_BARRIER, "1")
        shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and world.init_method == "env://"
        store = attempt_store(agent_store(world.timeout), world) if shared else None
        dist.init_process_group(
            backend=world.backend,
            init_method=None if shared else world.init_method,
            store=store,
            rank=world.rank,
            world_size=world.size,
            timeout=world.timeout,
            device_id=world.device if world.backend == "nccl" else None,
        )
        peers = hosts.peers(world.rank, world.size) if across else []
        try:
            yield world
        except BaseException as error:
            if dist.is_initialized():  # the block may have destroyed the group
                abandon_group(world)
            hosts.raise_if_lost(error, peers, world.rank)
            raise
        if dist.is_initialized():  # the control thread of a live rank may have aborted the group
            dist.destroy_process_group()


def _require_same(world: World) -> None:
    require_group(world)
    if dist.get_rank() != world.rank:
        raise RuntimeError(
            f"the World specifies rank {world.rank}, but the rank in the existing process group is {dist.get_rank()}. "
            "Use the World from launch(...) or World.detect()."
        )
    if dist.get_backend() != world.backend:
        raise ConfigError(
            f"the existing process group uses {dist.get_backend()}, but backend={world.backend!r} was requested on "
            f"{world.device}. Create the group with this backend, or change 'backend' or 'device' to match the group."
        )


def _meeting_place(world: World) -> str:
    """Return the address of rank 0's host, where the ranks rendezvous."""
    if world.init_method.startswith(("tcp://", "slurm://")):
        return urlsplit(world.init_method).hostname or ""
    return os.environ.get("MASTER_ADDR", "")


def agent_store(timeout: timedelta) -> dist.Store:
    """Return the store of torchrun's agent. The agent's ranks use this store for their rendezvous."""
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)


def attempt_store(store: dist.Store, world: World) -> dist.Store:
    """Return a view of `store` with a key prefix that is unique to this attempt. Collective.

    The torchrun agent keeps its store when it restarts the ranks. Without a new prefix, the new ranks would find the
    old ranks' addresses. In torch 2.13, most restarts would then fail or hang. Setting
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the agent's environment would also avoid this problem. No environment
    variable identifies the attempt reliably. Even TORCHELASTIC_RESTART_COUNT can differ between agents. Therefore, rank
    0 chooses a random prefix. Every other rank sends a request that contains a random number, and accepts only an
    answer with the same number. Answers from earlier attempts are therefore ignored.

    Raises:
        RuntimeError: If a rank does not join within `world.timeout`.
    """
    deadline = time.monotonic() + world.timeout.total_seconds()
    own = secrets.token_hex(8)
    if not world.is_main:
        store.set(f"asks/{world.rank}", own)
        while not (answer := _read(store, f"answer/{world.rank}")).startswith(own):
            _wait_until(deadline, "rank 0")
        own = answer.partition(" ")[2]
        store.set(f"knows/{world.rank}", own)
    else:
        for rank in range(1, world.size):
            while _read(store, f"knows/{rank}") != own:
                store.set(f"answer/{rank}", f"{_read(store, f'asks/{rank}')} {own}")
                _wait_until(deadline, f"rank {rank}")
    return dist.PrefixStore(own, store)


def _read(store: dist.Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def _wait_until(deadline: float, whom: str) -> None:
    if time.monotonic() > deadline:
        raise RuntimeError(f"{whom} did not join the rendezvous in time")
    time.sleep(0.01)


def abandon_group(world: World) -> None:
    """Leave the process group without waiting for the other ranks. Ranks that wait for this rank raise an error.

    With NCCL, the group is aborted, because destroying it would wait for collectives that cannot complete.
    """
    if world.backend == "nccl":
        abort_process_group()
    else:
        dist.destroy_process_group()


def require_group(world: World) -> None:
    """Raise `RuntimeError` if `world` contains several ranks but there is no process group of the same size.

    Without the group, the ranks would train separate models.
    """
    if world.size == 1:
        return
    if not dist.is_initialized():
        raise RuntimeError(
            f"the world has {world.size} ranks but no process group, so the ranks cannot communicate. "
            "Run this code inside 'with process_group(world):', or start it with launch(...)."
        )
    if dist.get_world_size() != world.size:
        raise RuntimeError(
            f"the world has {world.size} ranks, but the process group has {dist.get_world_size()}. "
            "Use the World from launch(...) or World.detect()."
        )


def _torchrun(environ: Mapping[str, str]) -> dict[str, int] | None:
    """Return the ranks and sizes from the variables that torchrun and `launch` set, or None if these are not set.

    Raises:
        ConfigError: If only some of the variables are set.
    """
    given = [name for name in ("RANK", "WORLD_SIZE") if name in environ]
    if not given:
        return None
    if len(given) == 1:
        missing = "WORLD_SIZE" if given == ["RANK"] else "RANK"
        raise ConfigError(f"{given[0]} is set but {missing} is not. Set both, as torchrun does, or neither.")
    rank, size = integer_variable(environ, "RANK"), integer_variable(environ, "WORLD_SIZE")
    missing_address = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]
    if size > 1 and missing_address:
        raise ConfigError(
            f"WORLD_SIZE={size} requires {' and '.join(missing_address)}, so that the ranks can connect. Start the "
            "ranks with torchrun, or set each missing variable to the same value on all ranks."
        )
    return {
        "rank": rank,
        "size": size,
        "local_rank": integer_variable(environ, "LOCAL_RANK", rank),
        "local_size": integer_variable(environ, "LOCAL_WORLD_SIZE", size),
    }
