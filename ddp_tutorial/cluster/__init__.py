"""Emulate several hosts on one machine, with Linux namespaces and a network of limited speed between them.

- `cluster` defines `Cluster`, which starts and stops the hosts.
- `running` manages commands and ranks on the hosts, and collects their output.
- `launching` runs a function on ranks.
- `network` names the hosts, and creates namespaces, links and rate limits.
- `box` is the process that holds the cluster, and `client` sends requests to the box.
- `rank` contains the code that runs in each rank, which is a fork of the box.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
