"""Select the network interface for communication between hosts, and detect hosts that no longer respond.

This module is not needed on a single host. By default, gloo uses the address to which the host's own name resolves. On
many systems, the name resolves to a loopback address (127.0.1.1), which other hosts cannot reach.
"""

import os
import socket
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import psutil
import torch.distributed as dist

from ddp_tutorial.config import ConfigError, FailedError, named_ranks

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_PROBE_SECONDS = 1.5
_PROBE_PORT = 9  # "discard": no process listens there, so a running host refuses the connection
# Substrings of gloo's error messages for a timeout or a lost connection.
_LOST = ("timed out", "timeout", "by peer", "connection refused", "no route to host", "broken pipe")


class LostHostError(FailedError):
    """Raised if a remote host, or a rank on that host, no longer responds."""


class Peer(NamedTuple):
    """The location of a rank."""

    rank: int
    host: str
    address: str


def interface_to(address: str) -> str | None:
    """Return the name of the network interface that routes to a host name or address. The function sends no data.

    Return None if the interface cannot be determined. Also return None for a loopback address, because all ranks are
    then on this host.
    """
    if address in {"", "localhost", "::1"} or address.startswith("127."):
        return None
    try:
        family, kind, _, _, where = socket.getaddrinfo(address, _PROBE_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)  # on a datagram socket, this only selects a route
            own = probe.getsockname()[0]
    except OSError:
        return None
    of = {name: {each.address.partition("%")[0] for each in each_of} for name, each_of in psutil.net_if_addrs().items()}
    found = next((name for name, addresses in of.items() if own in addresses), None)
    if found is not None and not found.startswith("lo"):
        return found
    # on this host, `address` resolves to the loopback interface; other hosts use a different interface
    others = [name for name, state in psutil.net_if_stats().items() if state.isup and not name.startswith("lo")]
    return others[0] if len(others) == 1 else None


def choose_interface(rendezvous_address: str) -> None:
    """Set GLOO_SOCKET_IFNAME to the interface that routes to `rendezvous_address`, unless the variable is already set.

    Raises:
        ConfigError: If the variable is already set to an interface that does not exist on this host.
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
            f"{GLOO_INTERFACE}={wanted}: {here} has no interface {missing[0]!r}. Its interfaces are {', '.join(known)}"
        )


def peers(rank: int, size: int) -> list[Peer]:
    """Return the locations of all ranks. Collective."""
    found: list[Any] = [None] * size
    dist.all_gather_object(found, Peer(rank, socket.gethostname(), own_address()))
    return found


def own_address() -> str:
    """Return the IPv4 address of the GLOO_SOCKET_IFNAME interface, or this host's name if there is no such address."""
    name = os.environ.get(GLOO_INTERFACE, "").partition(",")[0]
    found = [each.address for each in psutil.net_if_addrs().get(name, []) if each.family == socket.AF_INET]
    return found[0] if found else socket.gethostname()


def raise_if_lost(error: BaseException, peers: Sequence[Peer], rank: int) -> None:
    """Raise `LostHostError` if `error` indicates that a rank on a different host has timed out or disconnected.

    `peers` contains the locations of all ranks, or is empty if all ranks are on one host.
    """
    message = str(error).lower()
    if peers and isinstance(error, RuntimeError) and any(word in message for word in _LOST):
        raise describe_lost_host(error, peers, rank) from error


def describe_lost_host(error: BaseException, peers: Iterable[Peer], rank: int) -> LostHostError:
    """Probe all other hosts for up to `_PROBE_SECONDS`, and return an error that lists the unresponsive hosts."""
    here = next(peer for peer in peers if peer.rank == rank)
    # Hosts are identified by name and address, because several hosts may have the same name.
    others = dict.fromkeys(peer[1:] for peer in peers if peer[1:] != here[1:])
    with ThreadPoolExecutor(max(1, len(others))) as pool:
        answers = dict(zip(others, pool.map(_responds, [address for _, address in others]), strict=True))
    lost = [host for host, answered in answers.items() if not answered]
    named = ", ".join(_describe(host, peers) for host in lost or others)
    if not lost:
        story = f"the other hosts respond ({named}), so a rank there has exited or hangs; see that rank's log"
    elif len(lost) == len(others) > 1:
        story = f"no other host responds ({named}), so {here.host} is disconnected"
    else:
        story = f"lost {named}: no response within {_PROBE_SECONDS:g} s"
    return LostHostError(f"rank {rank} on {here.host}: {story}.\n{error}")


def _describe(host: tuple[str, str], peers: Iterable[Peer]) -> str:
    return f"{host[0]} at {host[1]} with {named_ranks([peer.rank for peer in peers if peer[1:] == host])}"


def _responds(address: str) -> bool:
    """Return whether the host responds. A refused connection counts as a response."""
    try:
        socket.create_connection((address, _PROBE_PORT), _PROBE_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True
