r"""Create hosts and a network between them. Each host is a Linux network namespace with its own host name.

           bridge                      a switch
          /      \
     port0        port1                veth pairs: a packet that enters one end leaves at the other end
       |            |
     eth0          eth0                in the namespaces of n0 and n1, 10.0.0.1 and 10.0.0.2.

A token bucket (tbf, see tc-tbf(8)) at each end of a veth pair limits the rate at which packets leave or enter a host.
Each host's send rate and receive rate are therefore at most `rate`, as with a real network card. If a delay is set,
frames that arrive at the bridge are first redirected to a process, which delays them; see `delay`.

This module's functions must be called inside namespaces in which the caller has all privileges; see `box`.
"""

import ctypes
import math
import os
import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_tutorial.cluster.delay import MOST_BITS, MOST_FRAMES, WIRE, open_wire
from ddp_tutorial.cluster.refusals import refusals
from ddp_tutorial.config import ConfigError

_NEWNET, _NEWUTS = 0x40000000, 0x04000000  # <sched.h>
_MS_BIND, _MNT_DETACH = 4096, 2
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_FASTEST = 30e9  # bits per second; the kernel stores bytes per second in 32 bits
# Size of a token bucket, which is also the burst that may leave after a pause. The kernel's timer is about 10 us late,
# or 100 us on a busy core. Tokens that arrive at a full bucket during this time are lost, which slows the link. A
# bucket therefore holds two of the largest frames, so that it is not full while it collects tokens for one frame.
_FRAME_SECONDS, _SMALLEST_FRAME = 150e-6, 4_000
_FRAMES_IN_BUCKET, _SMALLEST_BURST = 2, 6_000
# The process that delays frames needs the same time for small and large frames, so frames are larger with a delay. Even
# larger frames would require larger buckets, whose bursts make messages of about 100 kB faster than the rate.
_DELAYED_FRAME_SECONDS = 200e-6
# Packets arrive at the sender's rate, and exceed the receiver's rate only if several hosts send at the same time. The
# receiver's bucket is larger, so that its late timers do not slow the packets of a single sender a second time.
_ARRIVING = 8
_INGRESS, _ALL_PROTOCOLS = 0xFFFF0000, 3  # <linux/pkt_sched.h>, <linux/if_ether.h>
_FRAMES = 20_000  # maximum number of frames that wait for the process that delays them
_QUEUE = 8 * 2**20  # maximum number of queued bytes; further packets are dropped
MOST_NODES = 250


def name_of(node: int) -> str:
    """Return the name of a host, such as n0."""
    return f"n{node}"


def address_of(node: int) -> str:
    """Return a host's IP address on the cluster's network."""
    return f"10.0.0.{node + 1}"


def bits_per_second(rate: str) -> float:
    """Convert a rate such as `"100mbit"` to bits per second.

    Raises:
        ConfigError: If the unit is missing, or the rate is out of range.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]bit)", str(rate).strip().lower())
    if found is None:
        raise ConfigError(f"'rate' must be a number with a unit (kbit, mbit or gbit), such as '1gbit', got {rate!r}")
    bits = float(found[1]) * _UNITS[found[2]]
    if not 8e3 <= bits <= _FASTEST:
        raise ConfigError(
            f"'rate' must be between 8kbit and {_FASTEST / 1e9:.0f}gbit, got {rate!r}. For unlimited links, omit 'rate'"
        )
    return bits


def _bucket(rate: float, frame_seconds: float) -> int:
    """Return the size of a token bucket in bytes, for `rate` in bytes per second."""
    return max(_SMALLEST_BURST, int(_FRAMES_IN_BUCKET * rate * frame_seconds))


def _largest_frame(rate: float, frame_seconds: float) -> int:
    """Return the maximum frame size in bytes, for `rate` in bytes per second.

    The kernel splits a large frame into packets only at the end of the frame's path.
    """
    return min(65536, max(_SMALLEST_FRAME, int(rate * frame_seconds)))


def check_delayed(nodes: int, rate: str | None) -> None:
    """Raise `ConfigError` if the hosts' combined rate exceeds the capacity of the process that delays frames."""
    bits = bits_per_second(rate) if rate else math.inf
    most = MOST_BITS / nodes
    if nodes / _FRAME_SECONDS > MOST_FRAMES:  # limit the number of small frames through a lower rate
        most = min(most, MOST_FRAMES * _SMALLEST_FRAME * 8 / nodes)
    if bits > most:
        found = f"{rate!r}" if rate else "no limit"
        raise ConfigError(
            f"with 'delay', 'rate' must be at most '{most / 1e6:.0f}mbit' for {nodes} nodes, got {found}. A single "
            "process forwards and delays all network traffic"
        )


@dataclass
class Host:
    """A host, its port on the bridge, and the open files that keep its namespaces alive."""

    name: str
    net: int
    uts: int
    port: int  # index of the interface
    mac: str  # address of eth0


class Network:
    """Hosts connected by one bridge."""

    def __init__(self, nodes: int, rate: str | None, delayed: bool = False) -> None:
        """Create the hosts and the bridge.

        Args:
            nodes: Number of hosts.
            rate: Rate of the links, or None for no limit.
            delayed: Whether the method `divert` will be called.

        Raises:
            ConfigError: If the kernel does not support a required feature.
        """
        self.bits = bits_per_second(rate) if rate else None
        self.frame_seconds = _DELAYED_FRAME_SECONDS if delayed else _FRAME_SECONDS
        self.shaped = False
        self.home = os.open("/proc/self/ns/net", os.O_RDONLY)
        self.uts = os.open("/proc/self/ns/uts", os.O_RDONLY)
        _write_hosts([(address_of(node), name_of(node)) for node in range(nodes)])
        with _rtnl() as kernel:
            with refusals("the cluster cannot be started: the kernel does not permit a bridge"):
                kernel.link("add", ifname="bridge", kind="bridge", br_stp_state=0)
            self.bridge = _index(kernel, "bridge")
            _quiet_ipv6()
            kernel.link("set", index=self.bridge, state="up")
            kernel.link("set", index=_index(kernel, "lo"), state="up")
            self.hosts = [self._host(kernel, node) for node in range(nodes)]

    def _host(self, kernel: Any, node: int) -> Host:
        _libc("unshare", _NEWNET | _NEWUTS)
        socket.sethostname(name_of(node))
        net, uts = (os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts"))
        _libc("setns", self.home, 0)
        _libc("setns", self.uts, 0)
        port = f"port{node}"
        peer = {"ifname": "eth0", "net_ns_fd": net}
        with refusals("the cluster cannot be started: the kernel does not permit a veth pair"):
            kernel.link("add", ifname=port, kind="veth", peer=peer)
        index = _index(kernel, port)
        kernel.link("set", index=index, master=self.bridge, state="up")
        self._shape(kernel, index, _ARRIVING)
        _libc("setns", net, 0)
        try:
            _quiet_ipv6()
            # No packet is lost here, so the simplest congestion control fills the link. The machine's default may be an
            # algorithm that probes for the rate. The second setting keeps the window after a pause, such as between two
            # steps.
            for name, value in (("tcp_congestion_control", "reno"), ("tcp_slow_start_after_idle", "0")):
                with suppress(OSError):
                    Path(f"/proc/sys/net/ipv4/{name}").write_text(value)
            with _rtnl() as inside:
                eth0 = _index(inside, "eth0")
                inside.link("set", index=_index(inside, "lo"), state="up")
                inside.addr("add", index=eth0, address=address_of(node), prefixlen=24)
                inside.link("set", index=eth0, state="up")
                self._shape(inside, eth0)
                mac = inside.get_links(eth0)[0].get("address")
        finally:
            _libc("setns", self.home, 0)
        return Host(name_of(node), net, uts, index, mac)

    def divert(self) -> int:
        """Redirect all incoming frames of the bridge to a TAP device, and return the device's file descriptor.

        The bridge forwards all frames that are written to the descriptor.
        """
        wire = open_wire()
        with _rtnl() as kernel:
            index = _index(kernel, WIRE)
            kernel.link("set", index=index, master=self.bridge, txqlen=_FRAMES, state="up")
            # All frames now arrive from the wire, so the bridge must not learn addresses from it.
            kernel.brport("set", index=index, learning=0)
            for host in self.hosts:
                kernel.fdb("replace", ifindex=host.port, lladdr=host.mac, state="noarp")
                with refusals("a delay is not available: the kernel does not permit an ingress filter"):
                    kernel.tc("add", "ingress", index=host.port)
                action = {"kind": "mirred", "direction": "egress", "action": "redirect", "ifindex": index}
                everything = {"keys": ["0x0/0x0+0"], "protocol": _ALL_PROTOCOLS, "parent": _INGRESS, "prio": 1}
                with refusals("a delay is not available: the kernel does not permit a redirection (u32 and mirred)"):
                    kernel.tc("add-filter", "u32", index=host.port, target=1, action=action, **everything)
        return wire

    def _shape(self, kernel: Any, index: int, larger: int = 1) -> None:
        if self.bits is None and not self.shaped:
            return
        self.shaped = True
        rate = int((self.bits or _FASTEST) / 8)
        burst = larger * _bucket(rate, self.frame_seconds)
        # Segmenting a frame that is larger than the bucket is expensive, so the sender's frame size is limited.
        kernel.link("set", index=index, gso_max_size=_largest_frame(rate, self.frame_seconds))
        with refusals("the cluster cannot be started: the kernel does not permit a token bucket (tbf)"):
            kernel.tc("replace", "tbf", index=index, rate=rate, burst=burst, limit=_QUEUE)

    def set_rate(self, rate: str | None) -> None:
        """Set the rate of all links."""
        self.bits = bits_per_second(rate) if rate else None
        for host in self.hosts:
            with _rtnl() as kernel:
                self._shape(kernel, host.port, _ARRIVING)
            _libc("setns", host.net, 0)
            try:
                with _rtnl() as inside:
                    self._shape(inside, _index(inside, "eth0"))
            finally:
                _libc("setns", self.home, 0)

    def connect(self, node: int, up: bool) -> None:
        """Plug in or unplug the host's cable. While the cable is unplugged, packets are lost without notification."""
        with _rtnl() as kernel:
            kernel.link("set", index=self.hosts[node].port, state="up" if up else "down")

    def enter(self, node: int) -> None:
        """Move this process, and all processes that it later starts, to the host. The move cannot be undone."""
        _libc("setns", self.hosts[node].net, _NEWNET)
        _libc("setns", self.hosts[node].uts, _NEWUTS)

    def processes_of(self, node: int) -> list[int]:
        """Return the IDs of all processes on the host."""
        there = os.fstat(self.hosts[node].net).st_ino
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # the process has just exited
                if (process / "ns/net").stat().st_ino == there:
                    found.append(int(process.name))
        return found


def _libc(name: str, *args: int | bytes | None) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with refusals(f"the cluster cannot be started: the kernel does not permit the call to {name}"):
        if getattr(libc, name)(*args) != 0:
            raise OSError(number := ctypes.get_errno(), os.strerror(number), name)


def _rtnl() -> Any:
    """Return a context manager that connects to the kernel's netlink interface in the current network namespace."""
    from pyroute2 import IPRoute

    return IPRoute()


def _index(kernel: Any, name: str) -> int:
    return int(kernel.link_lookup(ifname=name)[0])


def _quiet_ipv6() -> None:
    """Disable IPv6, so that interfaces do not generate and announce additional addresses."""
    for which in ("all", "default"):
        with suppress(OSError):
            Path(f"/proc/sys/net/ipv6/conf/{which}/disable_ipv6").write_text("1")


def _write_hosts(names: list[tuple[str, str]]) -> None:
    """Mount an in-memory file over /etc/hosts. The file is visible only in this mount namespace."""
    over = b"/tmp"
    _libc("mount", b"tmpfs", over, b"tmpfs", 0, b"size=64k")
    try:
        hosts = Path("/tmp/hosts")
        hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for address, name in names))
        _libc("mount", bytes(hosts), b"/etc/hosts", None, _MS_BIND, None)
    finally:
        _libc("umount2", over, _MNT_DETACH)
