"""Tell a system on which no cluster can be built from a defect of this package."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from ddp_tutorial.config import ConfigError

# The kernel lacks a feature, forbids it to this user, or has reached a limit on namespaces.
_REFUSALS = {
    errno.EACCES,
    errno.EAFNOSUPPORT,
    errno.ENODEV,
    errno.ENOENT,
    errno.ENOSPC,
    errno.ENOSYS,
    errno.ENXIO,
    errno.EOPNOTSUPP,
    errno.EPERM,
    errno.EPROTONOSUPPORT,
    errno.EUSERS,
}


@contextmanager
def refusals(what: str) -> Iterator[None]:
    """Raise `ConfigError` if the kernel refuses the block, such as "no cluster: the kernel refuses a bridge".

    Any other error passes, such as a `TypeError` after an upgrade: it is a defect, not a fact about this system.
    """
    try:
        yield
    except Exception as error:
        code = getattr(error, "errno", None) or getattr(error, "code", None)  # of pyroute2's NetlinkError
        if code not in _REFUSALS:
            raise
        raise ConfigError(f"{what} ({os.strerror(code)})") from None
