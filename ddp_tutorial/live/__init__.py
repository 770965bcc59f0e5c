"""Inspect and change running ranks between calls.

`pool` defines `Ranks`, ranks that keep their variables from call to call and recover from errors, interrupts and hangs.
`controller` manages all ranks of a pool, and `worker_handle` one rank. `backends` starts the processes on this machine
or on the hosts of a cluster (`hosted`). `worker` is the rank's side, and `messages` defines the messages between the
two sides. `display` shows the output of a cell on each rank, `figures` sends matplotlib figures to the notebook, and
`script` writes the cells as a script for torchrun. `magics` defines the notebook magics: `%load_ext ddp_tutorial`,
`%ranks`, `%%ranks`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
