"""What several tests do on a rank."""

from collections.abc import Callable
from typing import Any

from ddp_tutorial.ddp.link import Transfer


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
