"""Ranks on several hosts: through which interface they reach one another, and which of them does not answer any more.

On one host none of this matters. On several, gloo would take the address that the host's own name stands for, which on
many systems is one of the loopback interface (127.0.1.1), where no other host can come.
"""

import os
import socket
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import psutil
import torch.distributed as dist

from ddp_tutorial.config import ConfigError, FailedError

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_PROBE_SECONDS = 1.5
_PROBE_PORT = 9  # "discard": nobody listens, and a host that is there says so
# What gloo says when it has waited for too long, or the connection is gone.
_LOST = ("timed out", "timeout", "by peer", "connection refused", "no route to host", "broken pipe")


class LostHostError(FailedError):
    """Another host, or a rank on it, is gone."""


class Peer(NamedTuple):
    """Where a rank is."""

    rank: int
    host: str
    address: str


def interface_to(address: str) -> str | None:
    """The name of this host's interface through which it and `address`, a name or a number, reach one another. Sends
    nothing. None where that cannot be said, and for the loopback interface's own address: then all are on this host."""
    if address in {"", "localhost", "::1"} or address.startswith("127."):
        return None
    try:
        family, kind, _, _, where = socket.getaddrinfo(address, _PROBE_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)  # of a datagram's socket: only looks for the way
            own = probe.getsockname()[0]
    except OSError:
        return None
    of = {name: {each.address.partition("%")[0] for each in each_of} for name, each_of in psutil.net_if_addrs().items()}
    found = next((name for name, addresses in of.items() if own in addresses), None)
    if found is not None and not found.startswith("lo"):
        return found
    # our own name, and it stands for the loopback interface here: the others come in through another one
    others = [name for name, state in psutil.net_if_stats().items() if state.isup and not name.startswith("lo")]
    return others[0] if len(others) == 1 else None


def choose_interface(rendezvous_address: str) -> None:
    """Tell gloo, by GLOO_SOCKET_IFNAME, to use the interface that leads to `rendezvous_address`, unless that is set.

    Raises `ConfigError` where it is set to an interface that this host does not have.
    """
    wanted = os.environ.get(GLOO_INTERFACE)
    if not wanted:
        if (found := interface_to(rendezvous_address)) is not None:
            os.environ[GLOO_INTERFACE] = found
        return
    known = [name for _, name in socket.if_nameindex()]
    if missing := [name for name in wanted.split(",") if name not in known]:
        here = socket.gethostname()
        raise ConfigError(
            f"{GLOO_INTERFACE}={wanted}: {here} has no interface called {missing[0]!r}, but {', '.join(known)}"
        )


def peers(rank: int, size: int) -> list[Peer]:
    """Where all ranks are. Collective."""
    found: list[Any] = [None] * size
    dist.all_gather_object(found, Peer(rank, socket.gethostname(), own_address()))
    return found


def own_address() -> str:
    """The address of the interface that gloo uses here, as GLOO_SOCKET_IFNAME names it; else this host's name."""
    name = os.environ.get(GLOO_INTERFACE, "").partition(",")[0]
    found = [each.address for each in psutil.net_if_addrs().get(name, []) if each.family == socket.AF_INET]
    return found[0] if found else socket.gethostname()


def raise_if_lost(error: BaseException, peers: Sequence[Peer], rank: int) -> None:
    """Raise `LostHostError` from `error`, if ranks are on several hosts (`peers`, else it is empty), and `error` says
    that one has not answered or has gone."""
    said = str(error).lower()
    if peers and isinstance(error, RuntimeError) and any(word in said for word in _LOST):
        raise describe_lost_host(error, peers, rank) from error


def describe_lost_host(error: BaseException, peers: Iterable[Peer], rank: int) -> LostHostError:
    """What to tell the user of rank `rank`, where `error` says that another has not answered: which hosts are gone.

    Asks each of the others whether it is there, which takes `_PROBE_SECONDS` if some are not.
    """
    here = next(peer for peer in peers if peer.rank == rank)
    others = {peer.host: peer.address for peer in peers if peer.host != here.host}
    with ThreadPoolExecutor(max(1, len(others))) as pool:
        answers = dict(zip(others, pool.map(_answers, others.values()), strict=True))
    gone = [host for host, answered in answers.items() if not answered]
    named = ", ".join(_described(host, peers) for host in gone or others)
    if not gone:
        story = f"the other hosts ({named}) answer, so a rank there has ended, or hangs; its own log says more"
    elif len(gone) == len(others) > 1:
        story = f"no other host answers ({named}): {here.host}, this one, is cut off"
    else:
        story = f"lost {named}: no answer within {_PROBE_SECONDS:g} s"
    return LostHostError(f"rank {rank} on {here.host}: {story}.\n{error}")


def _described(host: str, peers: Iterable[Peer]) -> str:
    there = [peer for peer in peers if peer.host == host]
    ranks = ", ".join(str(peer.rank) for peer in there)
    return f"{host} at {there[0].address} with rank{'s' if len(there) > 1 else ''} {ranks}"


def _answers(address: str) -> bool:
    """Is the host there? Nobody need listen: a refusal is an answer."""
    try:
        socket.create_connection((address, _PROBE_PORT), _PROBE_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True
