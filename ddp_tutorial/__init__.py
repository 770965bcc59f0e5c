"""Learn and practice PyTorch distributed data-parallel training with several processes, on any machine.

This module exports the names that a training script needs. `__init__.pyi` lists these names. Names are imported on
first use, so a rank that needs only `launch` does not load plotting libraries. Commands that only read logs do not load
torch.
"""

from typing import Any

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def load_ipython_extension(shell: Any) -> None:
    """Register the `%ranks` and `%%ranks` magics when `%load_ext ddp_tutorial` runs."""
    from IPython import version_info
    from IPython.core.error import UsageError

    if version_info[0] < 9:
        version = ".".join(map(str, version_info[:3]))
        raise UsageError(
            f"live ranks require IPython 9 or newer, got {version}. Run pip install 'ipython>=9', then restart "
            "the kernel"
        )
    from ddp_tutorial.live.magics import load

    load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """Stop any live ranks when `%unload_ext ddp_tutorial` runs."""
    from ddp_tutorial.live.magics import unload

    unload(shell)
