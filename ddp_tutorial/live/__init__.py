"""Run calls on persistent ranks, and inspect the ranks between calls.

- `pool` defines the `Ranks` class. Ranks keep variables between calls and recover from errors, interrupts and hangs.
- `controller` manages all ranks of a pool, and `worker_handle` manages one rank.
- `backends` starts the ranks on this machine or on a cluster. On a cluster, `hosted` runs each rank.
- `worker` contains the code that runs in each rank.
- `messages` defines the messages between the pool and its ranks.
- `display` shows each rank's cell output, and `figures` sends matplotlib figures to the notebook.
- `script` exports the cells as a script for torchrun.
- `magics` defines the notebook magics `%ranks` and `%%ranks`, which `%load_ext ddp_tutorial` loads.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
