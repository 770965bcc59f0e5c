r"""Delay each network frame that is sent from one host to another.

     port0   port1          frames from n0 and n1 arrive here; the kernel redirects all of them to `wire` (mirred)
        \    /
        bridge --- wire     a TAP device: a process reads its frames, holds them, and writes them back.

A frame that the process writes back enters the bridge again. The bridge forwards the frame through the token bucket of
the destination port. The kernel therefore enforces the rate, and the process enforces only the delay. The process
replaces Linux's netem, because some kernels do not include netem, but almost all kernels include TAP devices. The
process reads and writes frames in the kernel's own format, in which a frame may contain several packets with incomplete
checksums. Each frame therefore takes about 20 us of CPU time, regardless of its size.

When run as root, the process has real-time priority (SCHED_FIFO). Without root privileges, the process competes with
the ranks for a core, and the network slows down while the ranks compute. `bench cluster` compares the measured
durations of all-reduces from 1 kB to 16 MB with predictions based on the rate and the delay.
"""

import ctypes
import fcntl
import gc
import os
import re
import select
import struct
import time
from collections import deque
from contextlib import suppress
from typing import NoReturn

from ddp_tutorial.cluster.refusals import refusals
from ddp_tutorial.config import ConfigError

WIRE = "wire"
_DEVICE = "/dev/net/tun"
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0  # <linux/if_tun.h>
_TAP, _NO_INFO, _WITH_HEADER = 0x0002, 0x1000, 0x4000  # frames with a virtio header, which describes segmentation
_CHECKSUMS, _TCP4, _TCP6 = 1, 2, 4  # work that the sender of a frame may leave to the receiver
_LARGEST = 66_000  # maximum size of a frame in bytes, including its header
_AT_ONCE = 16  # maximum number of frames to read before due frames are written
_TIMER_SLACK = 29  # <sys/prctl.h>
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_LONGEST = 10.0  # seconds

# Time that a frame spends in the device and the process, which is subtracted from the hold time. In a measurement, a
# 1 kB all-reduce (four messages in sequence) took four delays plus 0.19 ms longer than without a delay.
_ON_THE_WAY = 50e-6  # seconds

# Throughput that the process sustained on a busy two-core machine, minus a margin.
MOST_FRAMES = 15_000  # per second, from all hosts together
MOST_BITS = 2e9


def parse_delay(delay: str) -> float:
    """Convert a delay such as `"0.5ms"` to seconds.

    Raises:
        ConfigError: If the unit is missing, or the delay is out of range.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(us|ms|s)", str(delay).strip().lower())
    if found is None:
        raise ConfigError(f"'delay' must be a number with a unit (us, ms or s), such as '0.5ms', got {delay!r}")
    seconds = float(found[1]) * _UNITS[found[2]]
    if not 0 < seconds <= _LONGEST:
        raise ConfigError(
            f"'delay' must be above 0 and at most {_LONGEST:g}s, got {delay!r}. To disable the delay, omit 'delay'"
        )
    return seconds


def open_wire() -> int:
    """Create the TAP device `wire`, and return its file descriptor. Closing the descriptor removes the device."""
    with refusals(f"a delay is not available: the kernel does not permit the TAP device {_DEVICE}"):
        wire = os.open(_DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        flags = _TAP | _NO_INFO | _WITH_HEADER
        fcntl.ioctl(wire, _TUNSETIFF, struct.pack("16sH22x", WIRE.encode(), flags))
        fcntl.ioctl(wire, _TUNSETOFFLOAD, _CHECKSUMS | _TCP4 | _TCP6)
    return wire


def run_delay_line(wire: int, seconds: float) -> NoReturn:
    """Read frames, and write each frame back after `seconds` seconds. This function never returns.

    All frames have the same delay, so their order is preserved.
    """
    ctypes.CDLL(None).prctl(_TIMER_SLACK, 1, 0, 0, 0)  # wake up on time; the default timer slack is 50 us
    with suppress(OSError):  # needs root; otherwise the ranks compete with this process for the cores
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    gc.disable()
    seconds = max(0.0, seconds - _ON_THE_WAY)
    waiting: deque[tuple[float, bytes]] = deque()  # due time and frame
    while True:
        left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select([wire], [], [], left)
        if ready:
            due = time.monotonic() + seconds
            with suppress(BlockingIOError):
                for _ in range(_AT_ONCE):
                    waiting.append((due, os.read(wire, _LARGEST)))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            os.write(wire, waiting.popleft()[1])
