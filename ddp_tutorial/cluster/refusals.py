"""Distinguish between a system that does not support clusters and a defect in this package."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from ddp_tutorial.config import ConfigError

# The kernel lacks a feature, denies it to this user, or has reached a limit on namespaces.
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
    """Raise `ConfigError` if the kernel rejects an operation in the block.

    Other errors, such as a `TypeError` after an upgrade, are raised unchanged, because they indicate a defect.

    Args:
        what: Start of the error message, such as "the cluster cannot be started: the kernel does not permit a bridge".
    """
    try:
        yield
    except Exception as error:
        code = getattr(error, "errno", None) or getattr(error, "code", None)  # `code`: pyroute2's NetlinkError
        if code not in _REFUSALS:
            raise
        raise ConfigError(f"{what} ({os.strerror(code)})") from None
