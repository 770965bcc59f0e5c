"""Set up every Python process that the tests start.

Collect garbage less often. With Python's default thresholds, `make test` spent 13 % of its CPU time on garbage
collection, mostly during imports.

Choose the ports of Jupyter kernels outside the range from which the system assigns ports. Jupyter chooses five free
ports, and the new kernel opens them seconds later. If a different process opens one of them first, the kernel exits.
"""

import gc
import sys

gc.set_threshold(50_000, 20, 20)


class _KernelPorts:
    """Replace Jupyter's choice of ports when a process imports the module that starts kernels."""

    def find_spec(self, name, path=None, target=None):
        if name == "jupyter_client.provisioning.local_provisioner":
            sys.meta_path.remove(self)
            from jupyter_client.connect import LocalPortCache

            LocalPortCache.find_available_port = _find_available_port


def _find_available_port(cache, ip):
    """Return a free port. Linux assigns ports from 32768 on."""
    import random
    import socket

    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        if port not in cache.currently_used_ports:
            try:
                socket.create_server((ip, port)).close()
            except OSError:  # in use
                continue
            cache.currently_used_ports.add(port)
            return port


sys.meta_path.insert(0, _KernelPorts())
