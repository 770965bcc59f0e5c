"""Several machines in one: hosts in the Linux kernel, joined by a network whose speed is real.

`Cluster` starts and ends them; `running` has what runs on them, commands and ranks, with what they print; `launching`
has ranks that call a function together; `network` names and addresses them, and asks the kernel for namespaces, links
and rates; `box` is the process that holds all of it, `client` asks it, and `rank` is what becomes of it where a
function runs on every rank.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
