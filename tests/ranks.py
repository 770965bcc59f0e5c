"""What several tests do on a rank."""

import sys
from collections.abc import Callable
from typing import Any

from ddp_tutorial.ddp.link import Transfer

# Two ranks, started by torch itself; what they run comes after it.
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def error_of(function: Callable[[], object]) -> str:
    """What it raises, as text; a rank reports it rather than end all of them."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def watched(link: Any) -> list[Transfer]:
    """What the link will have carried, from now on."""
    transfers: list[Transfer] = []
    link.observer = transfers.append
    return transfers
