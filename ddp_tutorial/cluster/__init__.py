"""Emulate several hosts on one machine, using Linux namespaces and a rate-limited network.

- `cluster` defines `Cluster`, which starts and stops the hosts.
- `running` manages commands and ranks on the hosts, and collects their output.
- `launching` runs a function on every rank.
- `network` names the hosts and creates namespaces, links and rate limits.
- `box` runs the cluster's main process, and `client` sends requests to this process.
- `rank` contains the code that each rank runs. Ranks are forked from the cluster's main process.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
