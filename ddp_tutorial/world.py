"""Who am I, with whom, on which device? One frozen `World`, and the process group that goes with it.

Three launchers are understood, each by the environment variables that it sets: torchrun (and our own `launch`,
which sets the same), Slurm's `srun`, and none, which means one process. Reading them is a pure function, so it
is tested with a table rather than with a cluster.
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

# How long a rank waits in a collective for the others before it gives up.
COLLECTIVE_TIMEOUT = timedelta(minutes=10)
_INIT_BARRIER = "TORCH_DIST_INIT_BARRIER"


@dataclass(frozen=True)
class World:
    """The ranks that train together, seen by one of them.

    `rank` counts from 0 over all machines, `local_rank` over this machine. `backend` is the library that
    carries the collectives: by default NCCL between GPUs, gloo between CPUs; gloo also carries what is on GPUs, slowly,
    and lets ranks share one. `init_method` tells torch where the ranks meet, and `timeout` is how long a rank waits
    in a collective for the others. Raises `ConfigError` for a rank that is not below the size, on all machines or on
    this one, and for NCCL on a CPU.
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
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"rank {self.rank} is not one of 0 to {self.size - 1} (world size {self.size})")
        if not 0 <= self.local_rank < self.local_size:
            raise ConfigError(f"local rank {self.local_rank} is not one of 0 to {self.local_size - 1}")
        object.__setattr__(self, "backend", choose_backend(self.backend, self.device))

    @property
    def is_main(self) -> bool:
        """True on rank 0, the one that writes files and speaks for all."""
        return self.rank == 0

    @staticmethod
    def detect(
        environ: Mapping[str, str] = os.environ,
        device: str = "auto",
        gpus: int | None = None,
        *,
        backend: str = "auto",
        timeout: timedelta = COLLECTIVE_TIMEOUT,
    ) -> "World":
        """The world that the environment variables describe.

        `device` is "auto", "cpu" or "cuda", `backend` "auto", "gloo" or "nccl"; `gpus` is the number of GPUs that this
        process sees, counted if not given. Raises `ConfigError` where the variables contradict one another, a GPU is
        asked for that is not there, or device and backend do not go together.
        """
        torchrun = _torchrun(environ)
        numbers = torchrun or world_of_step(environ) or {}
        world = World(**numbers)
        dealt = not torchrun and has_gpu_per_task(environ, world.local_size)
        chosen = choose_device(device, world.local_rank, world.local_size, gpus, backend, one_gpu_per_task=dealt)
        return replace(world, device=chosen, backend=backend, timeout=timeout)

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size} on {self.device}, {self.backend}"


def is_launched_rank(environ: Mapping[str, str] = os.environ) -> bool:
    """True where torchrun, or srun with several tasks, started this process: it is a rank then, and starts none."""
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
    """The device of one rank: a GPU of its own where there is one for each rank of the machine, else the CPU.

    `gpus` is how many GPUs this process sees. With `one_gpu_per_task` they are its own. Otherwise they are those of all
    ranks of the machine, which share them if there are too few, the device is "cuda" and the backend "gloo". Raises
    `ConfigError` for an unknown `device`, and for "cuda" where there are too few GPUs and they cannot be shared.
    """
    if device not in {"auto", "cpu", "cuda"}:
        raise ConfigError(f"device={device!r} is not known. Use 'auto', 'cpu' or 'cuda'.")
    if device == "cpu":
        return torch.device("cpu")
    gpus = torch.cuda.device_count() if gpus is None else gpus
    may_share = one_gpu_per_task or (device == "cuda" and backend == "gloo")
    if gpus >= local_size or (gpus and may_share):
        return torch.device("cuda", local_rank % gpus)
    if device == "cuda":
        sharing = ", or backend='gloo', with which ranks may share one" if gpus else ""
        raise ConfigError(
            f"device='cuda' needs one GPU for each of the {local_size} ranks on this machine, found {gpus}. "
            f"Use device='cpu', or as many ranks as there are GPUs{sharing}."
        )
    return torch.device("cpu")


def choose_backend(backend: str, device: torch.device) -> str:
    """The library that carries collectives between ranks on such devices. Raises `ConfigError` for NCCL on CPUs."""
    if backend not in {"auto", "gloo", "nccl"}:
        raise ConfigError(f"backend={backend!r} is not known. Use 'auto', 'gloo' or 'nccl'.")
    if backend == "nccl" and device.type != "cuda":
        raise ConfigError("backend='nccl' connects GPUs, and these ranks are on CPUs. Use backend='gloo' or 'auto'.")
    if backend == "auto":
        return "nccl" if device.type == "cuda" else "gloo"
    return backend


@contextmanager
def process_group(world: World) -> Iterator[World]:
    """The process group of `world`, for the length of the block. One process needs none and gets none.

    A group that is up already, as in a worker of Ray Train, is used as it is: its time limit stays that of whoever has
    started it, who also ends it. Raises `RuntimeError` where it is of another size or rank, and `ConfigError` where its
    backend is another one than that of `world`.

    The first `import torch._dynamo` of a process (DistributedDataParallel does it) takes hold of the group that is
    there, and gloo's threads then run on after the block; torch 2.13. Import it before, where that matters.

    Between hosts gloo uses the interface that leads to the first of them, unless GLOO_SOCKET_IFNAME names one. An error
    in the block that comes from a rank on another host is raised as `LostHostError`, which names the host. Raises
    `ConfigError` where GLOO_SOCKET_IFNAME names an interface that is not there.
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
    # torch and gloo read these when a group is started, also one that is started inside the block.
    with variables_restored(_INIT_BARRIER, hosts.GLOO_INTERFACE):
        across = world.size > world.local_size and world.backend == "gloo"
        if across or (world.backend == "gloo" and hosts.GLOO_INTERFACE in os.environ):
            hosts.choose_interface(_meeting_place(world))
        # Leave the initialization together: a rank with nothing to do would be gone while others connect to it.
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
            abandon_group(world)
            hosts.raise_if_lost(error, peers, world.rank)
            raise
        dist.destroy_process_group()


def _require_same(world: World) -> None:
    """Raise an error where the group that is up is not the one that `world` describes."""
    require_group(world)
    if dist.get_rank() != world.rank:
        raise RuntimeError(f"this is rank {world.rank}, and in the process group that is up rank {dist.get_rank()}")
    if dist.get_backend() != world.backend:
        raise ConfigError(
            f"the process group that is up talks through {dist.get_backend()}, and backend={world.backend!r} is asked "
            f"for, on {world.device}. Start that group with the same backend, or set backend and device alike here."
        )


def _meeting_place(world: World) -> str:
    """The host where the ranks meet: rank 0's."""
    if world.init_method.startswith(("tcp://", "slurm://")):
        return urlsplit(world.init_method).hostname or ""
    return os.environ.get("MASTER_ADDR", "")


def agent_store(timeout: timedelta) -> dist.Store:
    """The store in which torchrun's ranks meet: its agent hosts it, for as long as the agent lives."""
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)


def attempt_store(store: dist.Store, world: World) -> dist.Store:
    """A part of `store` that is new to this life of the ranks. Every rank enters it; gives up after `world.timeout`.

    torchrun's agent keeps its store when it starts ranks again, so that these would find the addresses of dead ones,
    and most restarts fail or hang (torch 2.13; TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the agent's environment would
    also help). No environment variable numbers the lives: TORCHELASTIC_RESTART_COUNT is another on each agent. So rank
    0 makes up a name for that part. Each other rank asks for it with a random number of its own, and takes only an
    answer that repeats the number: what earlier lives have left there is none.

    Raises `RuntimeError` where some rank does not come.
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
        raise RuntimeError(f"{whom} has not come to meet the others in time")
    time.sleep(0.01)


def abandon_group(world: World) -> None:
    """Leave the process group without waiting for the others: those that wait for this rank hear that it is gone.

    NCCL's work cannot end where a rank has failed, and to destroy the group would wait for it.
    """
    if world.backend == "nccl":
        abort_process_group()
    else:
        dist.destroy_process_group()


def require_group(world: World) -> None:
    """Raise `RuntimeError` where `world` has several ranks but no group of that size: each would train alone."""
    if world.size == 1:
        return
    if not dist.is_initialized():
        raise RuntimeError(
            f"the world has {world.size} ranks but no process group, so they could not talk to one another. "
            "Write 'with process_group(world):' around this, or start it with launch(...)."
        )
    if dist.get_world_size() != world.size:
        raise RuntimeError(
            f"the world has {world.size} ranks, but the process group has {dist.get_world_size()}. "
            "Use the World that launch(...) or World.detect() gave you."
        )


def _torchrun(environ: Mapping[str, str]) -> dict[str, int] | None:
    """torchrun's variables, which `launch` sets too. RANK and WORLD_SIZE go together, or not at all."""
    given = [name for name in ("RANK", "WORLD_SIZE") if name in environ]
    if not given:
        return None
    if len(given) == 1:
        missing = "WORLD_SIZE" if given == ["RANK"] else "RANK"
        raise ConfigError(f"{given[0]} is set but {missing} is not. Set both (torchrun does), or neither.")
    rank, size = integer_variable(environ, "RANK"), integer_variable(environ, "WORLD_SIZE")
    missing_address = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]
    if size > 1 and missing_address:
        raise ConfigError(
            f"WORLD_SIZE={size} but {' and '.join(missing_address)} is not set, so the ranks cannot meet. "
            "Start them with torchrun, or set it on all ranks alike."
        )
    return {
        "rank": rank,
        "size": size,
        "local_rank": integer_variable(environ, "LOCAL_RANK", rank),
        "local_size": integer_variable(environ, "LOCAL_WORLD_SIZE", size),
    }
