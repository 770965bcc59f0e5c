"""Signal handlers are restored after a block that has set its own, including handlers that only the kernel knows."""

import subprocess
import sys

# SIGUSR1 kills this process if faulthandler's handler is lost. The second block finds what the first has restored.
KEEPS_FAULTHANDLER = """
import faulthandler, os, signal
from ddp_tutorial.processes.signals import handling

def note(number, frame):
    print("noted", signal.Signals(number).name)

before = signal.signal(signal.SIGTERM, note)
faulthandler.register(signal.SIGUSR1)
for _ in range(2):
    with handling([signal.SIGUSR1, signal.SIGTERM], lambda number, frame: print("inside", number)):
        os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGTERM)
"""


def test_handlers_set_from_c_and_python_are_restored_after_a_block() -> None:
    done = subprocess.run(
        [sys.executable, "-u", "-c", KEEPS_FAULTHANDLER], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout.split("\n")) == (0, ["inside 10", "noted SIGTERM"] * 2 + [""])
    assert done.stderr.count("most recent call first") == 2
