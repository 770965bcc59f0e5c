"""Import the main script into every rank of `launch`, so that the script behaves as under torchrun.

Top-level statements of the script, such as `torch.manual_seed(0)` or `torch.set_default_dtype(...)`, therefore take
effect in every rank. The script's functions and classes belong to the imported module. As in `multiprocessing`, the
script's `__name__` is `__mp_main__` in a rank. Code under `if __name__ == "__main__":`, such as the call to `launch`,
runs only in the parent.

`multiprocessing` would import the script before the process knows its rank and before its output is redirected.
`main_module_hidden` prevents that import, and `Script.run` imports the script later.
"""

import importlib.util
import sys
import types
from dataclasses import dataclass
from pathlib import Path

from ddp_tutorial.config import ConfigError

_running: "Script | None" = None  # the script that this rank is importing now


class MissingGuardError(ConfigError):
    """Raised if a script launches ranks outside a `__main__` guard, because every rank would launch ranks again."""


@dataclass(frozen=True)
class Script:
    """The script file that Python is running.

    Attributes:
        path: Absolute path of the file.
        module: Module name from `python -m project.train`, or None under `python train.py`.
    """

    path: str
    module: str | None = None

    @staticmethod
    def of_this_process() -> "Script | None":
        """Return the script of this process.

        Returns:
            The script. The result is None in a notebook, in an interactive session and under `python -c`, because there
            is no script file. The result is also None for the `__main__.py` of a package, such as pytest's, because
            `multiprocessing` does not import such files either.
        """
        main = sys.modules["__main__"]
        path, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
        module = spec.name if spec is not None else None
        if path is None or hasattr(sys, "ps1") or (module or "").rpartition(".")[2] == "__main__":
            return None
        return Script(str(Path(path).absolute()), module)

    def defines(self, value: object) -> bool:
        """Return whether `value` is a function or class that a rank can import from the script by name."""
        if not isinstance(value, (types.FunctionType, type)) or value.__module__ not in {"__main__", "__mp_main__"}:
            return False
        found: object = sys.modules["__main__"]
        for name in value.__qualname__.split("."):
            found = getattr(found, name, None)
        return found is value

    def run(self) -> None:
        """Execute the script as this rank's `__main__` module."""
        global _running
        module = types.ModuleType("__mp_main__")
        module.__file__ = self.path
        if self.module is not None:
            module.__spec__ = importlib.util.find_spec(self.module)
            module.__package__ = self.module.rpartition(".")[0]
        sys.modules["__main__"] = sys.modules["__mp_main__"] = module
        _running = self
        try:
            exec(compile(Path(self.path).read_bytes(), self.path, "exec", dont_inherit=True), vars(module))
        finally:
            _running = None


def require_guard(call: str) -> None:
    """Raise `MissingGuardError` if a rank is importing a script that calls the function `call` at its top level."""
    if _running is not None:
        raise MissingGuardError(
            f"{_running.path} calls {call} at its top level. Every rank imports the script, so every rank would launch "
            f'ranks again. Move the call to the end of the script, under this guard:\n\nif __name__ == "__main__":\n'
            f"    {call}(...)"
        )
