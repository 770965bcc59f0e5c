"""The script that a launch is called from. Every rank imports it, as every rank of torchrun runs it.

What a script does at its top level, such as `torch.manual_seed(0)` or `torch.set_default_dtype(...)`, has then been
done in every rank, and the functions and classes of the script are those of that module. The mechanism is that of
`multiprocessing`: in a rank, the script's `__name__` is `__mp_main__`, so that `if __name__ == "__main__":` guards what
only the parent should do, such as starting ranks.

`multiprocessing` would import the script before the rank knows its number and prints into its pipe. So it is kept from
doing that (`main_module_hidden`), and `Script.run` does it when the process is a rank.
"""

import importlib.util
import sys
import types
from dataclasses import dataclass
from pathlib import Path

from ddp_tutorial.config import ConfigError

_running: "Script | None" = None  # the script that this rank is importing


class MissingGuardError(ConfigError):
    """A script starts ranks at its top level, so that every rank would start ranks again."""


@dataclass(frozen=True)
class Script:
    """The file that Python was started with: `python train.py`, or `python -m project.train` with its module's name."""

    path: str
    module: str | None = None

    @staticmethod
    def of_this_process() -> "Script | None":
        """Return the script of this process.

        Returns:
            None in a notebook, an interactive session and under `python -c`, which have no file; and for the
            `__main__.py` of a package, such as pytest's: `multiprocessing` does not import those either.
        """
        main = sys.modules["__main__"]
        path, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
        module = spec.name if spec is not None else None
        if path is None or hasattr(sys, "ps1") or (module or "").rpartition(".")[2] == "__main__":
            return None
        return Script(str(Path(path).absolute()), module)

    def defines(self, value: object) -> bool:
        """Return whether `value` is a function or class that a rank finds in the script by its name."""
        if not isinstance(value, (types.FunctionType, type)) or value.__module__ not in {"__main__", "__mp_main__"}:
            return False
        found: object = sys.modules["__main__"]
        for name in value.__qualname__.split("."):
            found = getattr(found, name, None)
        return found is value

    def run(self) -> None:
        """Run the script in this rank, as its `__main__` module."""
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
    """Raise `MissingGuardError` where a rank is importing the script: `call` is at its top level."""
    if _running is not None:
        raise MissingGuardError(
            f"{_running.path} calls {call} at its top level. Every rank imports the script, and would start ranks "
            f'again. Put the call under this line, as the last lines of the script:\n\nif __name__ == "__main__":\n'
            f"    {call}(...)"
        )
