"""A delay between hosts: each frame on its way from one host to another is held for a while, and then goes on.

     port0   port1          where frames from n0 and n1 come in; the kernel sends all of them on to `wire` (mirred)
        \\    /
        bridge --- wire     a TAP device: a process reads what is sent through it, holds it, and writes it back

What it writes comes into the bridge, which hands it on to the host that it is for, through the bucket of its port. So
the rate is the kernel's, as without a delay, and the delay this process's. (Linux has netem for that, but not every
kernel was built with it; TAP devices nearly all have.) Frames come and go as the kernel has them, several packets in
one, with their checksums still to do, so that a frame costs some 20 us of a processor, whatever its size.

Where it may (root), the process runs before all others that want a core (SCHED_FIFO): if it had to wait for the ranks,
whose messages it carries, their network would be slower the more they compute. `bench cluster` compares all-reduces of
1 kB to 16 MB with what rate and delay say.
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
_TAP, _NO_INFO, _WITH_HEADER = 0x0002, 0x1000, 0x4000  # frames, with virtio's header, which says how to cut them
_CHECKSUMS, _TCP4, _TCP6 = 1, 2, 4  # what may be left undone in them
_LARGEST = 66_000  # bytes of a frame, with its header
_AT_ONCE = 16  # frames that are read before those that are due go on
_TIMER_SLACK = 29  # <sys/prctl.h>
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_LONGEST = 10.0  # seconds

# What a frame needs on its way through the device and the process, beside the time for which it is held: a part of the
# delay. Seen: all-reduces of 1 kB, four messages, took 0.19 ms longer than without a delay, beside four delays.
_ON_THE_WAY = 50e-6  # seconds

# What the process was seen to carry, with room to spare, on a machine of two cores that had other work to do.
MOST_FRAMES = 15_000  # a second, from all hosts together
MOST_BITS = 2e9


def parse_delay(delay: str) -> float:
    """`"0.5ms"` -> 0.0005. Raises `ConfigError` for a number without a unit, or one that is out of range."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(us|ms|s)", str(delay).strip().lower())
    if found is None:
        raise ConfigError(f"delay={delay!r}: should be a number with a unit, us, ms or s, such as delay='0.5ms'")
    seconds = float(found[1]) * _UNITS[found[2]]
    if not 0 < seconds <= _LONGEST:
        raise ConfigError(f"delay={delay!r}: should be above 0 and at most {_LONGEST:g}s, or none for no delay")
    return seconds


def open_wire() -> int:
    """Make the TAP device `wire`: the file at which its frames are read and written. It ends when that is closed."""
    with refusals(f"no delay: the kernel refuses a TAP device, {_DEVICE}"):
        wire = os.open(_DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        flags = _TAP | _NO_INFO | _WITH_HEADER
        fcntl.ioctl(wire, _TUNSETIFF, struct.pack("16sH22x", WIRE.encode(), flags))
        fcntl.ioctl(wire, _TUNSETOFFLOAD, _CHECKSUMS | _TCP4 | _TCP6)
    return wire


def run_delay_line(wire: int, seconds: float) -> NoReturn:
    """Read frames, and write each back when it has been on its way for `seconds`. Their order stays, as all wait
    equally."""
    ctypes.CDLL(None).prctl(_TIMER_SLACK, 1, 0, 0, 0)  # to be woken on time, not within 50 us of it
    with suppress(OSError):  # where it may: before the ranks, which want all cores at the same time as their messages
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    gc.disable()
    seconds = max(0.0, seconds - _ON_THE_WAY)
    waiting: deque[tuple[float, bytes]] = deque()  # when it is due, and the frame
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
