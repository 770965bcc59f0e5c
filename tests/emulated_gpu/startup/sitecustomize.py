"""Install the kernels of the emulated GPUs when a process has imported torch. Python runs this file at startup."""

import importlib.util
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


class _AfterTorch(MetaPathFinder):
    """Find torch as usual, and have its loader install the kernels afterwards."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            kernels = importlib.util.spec_from_file_location(
                "emulated_gpu_kernels", Path(__file__).parent.parent / "kernels.py"
            )
            assert kernels is not None
            assert kernels.loader is not None
            loaded = importlib.util.module_from_spec(kernels)
            sys.modules["emulated_gpu_kernels"] = loaded
            kernels.loader.exec_module(loaded)
            loaded.install()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "EMULATED_GPU" in os.environ:
    sys.meta_path.insert(0, _AfterTorch())
