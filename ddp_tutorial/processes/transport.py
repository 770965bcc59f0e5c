"""Send calls, results, messages and file descriptors between a parent and its ranks.

Calls and results are pickled by value. If an object cannot be pickled, the error message names its variable.
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
    """Pickle `fn` and `args` by value, including lambdas, closures, and functions and classes from notebook cells.

    Functions and classes that `script` defines are pickled by name, because the rank imports the script.

    Raises:
        TypeError: If an argument or variable cannot be pickled. The message names the argument or variable.
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
    """Pickle a result by value, with its tensors moved to the CPU.

    Raises:
        TypeError: If a part of the result cannot be pickled. The message contains the part's location in the result.
    """
    buffer = io.BytesIO()
    try:
        _ResultPickler(buffer).dump(result)
    except Exception as error:
        culprit = _culprit(result, "result") or "the result"
        raise TypeError(f"{culprit} cannot be sent back to the parent: {error}. Return plain data instead.") from None
    return buffer.getvalue()


class _CallPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickler that pickles the script's functions and classes by name.

    By default, cloudpickle pickles everything in `__main__` by value.
    """

    def __init__(self, buffer: io.BytesIO, script: Script | None) -> None:
        super().__init__(buffer)
        self._script = script

    def reducer_override(self, value: Any) -> Any:
        if self._script is not None and self._script.defines(value):
            return NotImplemented  # pickle by module and name
        return super().reducer_override(value)


class _ResultPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickler that copies tensors to the CPU, because the parent may have no GPU and should not initialize one.

    For a view, only the view's elements are copied, not the whole storage.
    """

    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.Tensor and not value.is_meta:
            on_gpu = value.device.type != "cpu"
            dense = value.layout == torch.strided  # a sparse tensor has no storage of its own
            if on_gpu or (dense and value.untyped_storage().nbytes() > value.numel() * value.element_size()):
                return torch.Tensor.detach, (value.detach().cpu().clone(),)
        return super().reducer_override(value)


def name_of(fn: object) -> str:
    """Return a function's name for error messages, such as "train()"."""
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
    """Return a label for the part of `value` that cannot be pickled, or None if `value` can be pickled.

    The label starts with `label`, the name of `value`, followed by keys and indices, such as `result["a"][0]`.
    """
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
    """Blocking writer for a message pipe.

    Any thread may send messages. Messages are never interleaved, and interrupts are deferred while a message is
    being written.
    """

    def __init__(self, fd: int) -> None:
        """Create a sender that writes to file descriptor `fd`."""
        self._fd = fd
        self._lock = threading.Lock()

    def __call__(self, *message: Any) -> None:
        """Send one message, and block while the pipe is full."""
        data = memoryview(_framed(message))
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with self._lock:
                while data:
                    data = data[os.write(self._fd, data) :]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class Outbox:
    """Non-blocking writer for a message pipe. Messages are written when a selector reports the pipe as writable."""

    def __init__(self, fd: int) -> None:
        """Create an outbox that writes to file descriptor `fd`."""
        self._fd = fd
        self._unsent = bytearray()

    def put(self, message: Message, selector: selectors.BaseSelector) -> None:
        """Queue a message, which is written when `selector` reports that the pipe is writable.

        The loop that runs the selector must call the registered callback and pass it the selector.
        """
        if not self._unsent:
            selector.register(self._fd, selectors.EVENT_WRITE, self._send)
        self._unsent += _framed(message)

    def _send(self, selector: selectors.BaseSelector) -> None:
        if not self._unsent:  # a different event of the same `select` call has closed the outbox
            return
        try:
            del self._unsent[: os.write(self._fd, self._unsent[:_PIECE])]
        except BrokenPipeError:  # the reader has exited
            self._unsent.clear()
        if not self._unsent:
            selector.unregister(self._fd)

    def close(self, selector: selectors.BaseSelector) -> None:
        """Discard queued messages. The file descriptor stays open."""
        if self._unsent:
            self._unsent.clear()
            selector.unregister(self._fd)


def _framed(message: Message) -> bytes:
    body = pickle.dumps(message)
    return _LENGTH.pack(len(body)) + body


def take_messages(inbox: bytearray) -> Iterator[Message]:
    """Remove the complete messages from the front of `inbox`, and yield them."""
    while len(inbox) >= _LENGTH.size:
        end = _LENGTH.size + _LENGTH.unpack_from(inbox)[0]
        if len(inbox) < end:
            return
        message = pickle.loads(inbox[_LENGTH.size : end])
        del inbox[:end]
        yield message


class Descriptor:
    """File descriptor that can be pickled while a child process is spawned. The child receives a duplicate."""

    def __init__(self, fd: int) -> None:
        """Wrap file descriptor `fd`."""
        self.fd = fd

    def __reduce__(self) -> tuple[Callable[[Any], "Descriptor"], tuple[Any]]:
        """Pickle the descriptor as a duplicate for the child process."""
        return Descriptor._arrived, (reduction.DupFd(self.fd),)

    @staticmethod
    def _arrived(duplicate: Any) -> "Descriptor":
        return Descriptor(duplicate.detach())
