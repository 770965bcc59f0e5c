"""Learn and practise PyTorch distributed data-parallel training: real ranks, on any machine.

What a script needs stands here; `__init__.pyi` lists it. Each name is imported when it is first asked for, so that a
rank that only needs `launch` does not load plotting, and the commands that only read logs do not load torch.
"""

from typing import Any

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext ddp_tutorial` brings `%ranks` and `%%ranks` into a notebook."""
    from ddp_tutorial.live.magics import load

    load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """`%unload_ext ddp_tutorial` ends the ranks that `%ranks start` has started."""
    from ddp_tutorial.live.magics import unload

    unload(shell)
