"""What travels between a parent and its ranks: calls and results by value, framed messages, file descriptors.

Something that cannot travel is reported by the name that its author gave it, not by pickle's.
"""

import inspect
import io
import os
import pickle
import selectors
import signal
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import reduction
from typing import Any

import cloudpickle
import torch

from ddp_tutorial.processes.script import Script

Message = tuple[Any, ...]
_LENGTH = struct.Struct("!Q")
_PIECE = 1 << 16


def dump_call(fn: Callable[..., object], args: tuple[object, ...], script: Script | None = None) -> bytes:
    """Serialize `fn` and `args` by value: also lambdas, closures, and functions and classes of a cell.

    Functions and classes that `script` defines are sent by name: the rank has imported the script.

    Raises:
        TypeError: Names the argument or variable that cannot be sent.
    """
    buffer = io.BytesIO()
    try:
        _CallPickler(buffer, script).dump((fn, args))
        return buffer.getvalue()
    except Exception as error:
        culprit = _culprit_in_call(fn, args) or f"the call of {name_of(fn)}"
        raise TypeError(
            f"{culprit} cannot be sent to another process: {error}. Create it inside the function instead."
        ) from None


def dump_result(result: object) -> bytes:
    """A result by value, its tensors moved to the CPU. Raises `TypeError` that names what cannot be sent."""
    buffer = io.BytesIO()
    try:
        _ResultPickler(buffer).dump(result)
    except Exception as error:
        culprit = _culprit(result, "result") or "the result"
        raise TypeError(f"{culprit} cannot be sent back to the parent: {error}. Return plain data instead.") from None
    return buffer.getvalue()


class _CallPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Sends by name what the rank's script defines. cloudpickle sends everything in `__main__` by value."""

    def __init__(self, buffer: io.BytesIO, script: Script | None) -> None:
        super().__init__(buffer)
        self._script = script

    def reducer_override(self, value: Any) -> Any:
        if self._script is not None and self._script.defines(value):
            return NotImplemented  # as pickle does: module and name
        return super().reducer_override(value)


class _ResultPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Tensors leave the GPU before they travel, as the parent may have none and should not wake it up; and of a view
    of a large tensor only the view travels, not all of its storage."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.Tensor:
            on_gpu = value.device.type != "cpu"
            if on_gpu or value.untyped_storage().nbytes() > value.numel() * value.element_size():
                return torch.Tensor.detach, (value.detach().cpu().clone(),)
        return super().reducer_override(value)


def name_of(fn: object) -> str:
    return f"{getattr(fn, '__qualname__', None) or repr(fn)}()".replace("<locals>.", "")


def _culprit_in_call(fn: Callable[..., object], args: tuple[object, ...]) -> str | None:
    try:
        parameters = inspect.signature(fn).parameters.values()
        names = [p.name for p in parameters if p.kind in {p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD}]
        names = names[1:]  # the first is the world
    except (TypeError, ValueError):
        names = []
    for index, value in enumerate(args):
        label = f"argument {names[index]!r}" if index < len(names) else f"argument {index + 1}"
        if found := _culprit(value, f"{label} of {name_of(fn)}"):
            return found
    with suppress(TypeError):  # not a plain function
        used = inspect.getclosurevars(fn)
        for kind, values in (("variable", used.nonlocals), ("global variable", used.globals)):
            for name, value in values.items():
                if found := _culprit(value, f"the {kind} {name!r} that {name_of(fn)} uses"):
                    return found
    return None


def _culprit(value: object, label: str) -> str | None:
    """`label`, narrowed down to the item of a dict, list or tuple that cannot be pickled; None if all can."""
    try:
        cloudpickle.dumps(value)
        return None
    except Exception:
        items: list[tuple[Any, Any]] = []
        if isinstance(value, dict):
            items = list(value.items())
        elif isinstance(value, (list, tuple)):
            items = list(enumerate(value))
        inner = (_culprit(item, f"{label}[{key!r}]") for key, item in items)
        return next(filter(None, inner), f"{label} ({type(value).__name__})")


class Sender:
    """The writing end of a pipe of messages. Any thread may send; a message arrives whole, and an interrupt waits."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()

    def __call__(self, *message: Any) -> None:
        data = memoryview(_framed(message))
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with self._lock:
                while data:
                    data = data[os.write(self._fd, data) :]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class Outbox:
    """The writing end of a pipe of messages, which never blocks. A selector sends them, as fast as they are read."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._unsent = bytearray()

    def put(self, message: Message, selector: selectors.BaseSelector) -> None:
        """Have `selector` send a message. It calls what is registered with a file, and passes itself."""
        if not self._unsent:
            selector.register(self._fd, selectors.EVENT_WRITE, self._send)
        self._unsent += _framed(message)

    def _send(self, selector: selectors.BaseSelector) -> None:
        try:
            del self._unsent[: os.write(self._fd, self._unsent[:_PIECE])]
        except BrokenPipeError:  # the reader has exited
            self._unsent.clear()
        if not self._unsent:
            selector.unregister(self._fd)

    def close(self, selector: selectors.BaseSelector) -> None:
        """Send nothing more. The file itself stays open."""
        if self._unsent:
            self._unsent.clear()
            selector.unregister(self._fd)


def _framed(message: Message) -> bytes:
    body = pickle.dumps(message)
    return _LENGTH.pack(len(body)) + body


def take_messages(inbox: bytearray) -> Iterator[Message]:
    """The whole messages at the front of `inbox`, which are taken out of it."""
    while len(inbox) >= _LENGTH.size:
        end = _LENGTH.size + _LENGTH.unpack_from(inbox)[0]
        if len(inbox) < end:
            return
        message = pickle.loads(inbox[_LENGTH.size : end])
        del inbox[:end]
        yield message


class Descriptor:
    """A file descriptor that arrives, as a duplicate, in a child that is being spawned."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[Callable[[Any], "Descriptor"], tuple[Any]]:
        return Descriptor._arrived, (reduction.DupFd(self.fd),)

    @staticmethod
    def _arrived(duplicate: Any) -> "Descriptor":
        return Descriptor(duplicate.detach())
