"""Before a run writes any files, check that its model can be compiled."""

import os
import shutil
import sys

import torch
from torch import nn

from ddp_tutorial.collectives import any_rank
from ddp_tutorial.compat import is_compiled
from ddp_tutorial.config import ConfigError, did_you_mean
from ddp_tutorial.ddp.config import CompileConfig
from ddp_tutorial.ddp.wrappers import require_uncompiled
from ddp_tutorial.training.config import TrainConfig
from ddp_tutorial.world import World

# Strategies that can train a compiled model. The other strategies split the model: their hooks gather and free weights
# between the modules, or they call the modules one by one.
_CALL_THE_MODEL = {"ddp", "zero1", "invariant", "accelerate", "local_sgd", "post_local_sgd", "diloco"}


def require_compilable(model: nn.Module, config: TrainConfig, world: World) -> None:
    """Raise `ConfigError` on all ranks if `model` cannot be compiled, or if the strategy cannot train a compiled model.

    Collective.
    """
    if is_compiled(model) and config.strategy not in _CALL_THE_MODEL:
        raise ConfigError(
            f"strategy={config.strategy} cannot train a compiled model: pass the uncompiled model, or use "
            "strategy=ddp or strategy=zero1"
        )
    if config.compile:
        require_uncompiled(model)
        require_backend(config.compile)
        if any_rank(world, not has_compiler(config.compile, world.device)):
            raise ConfigError(_NO_COMPILER)


def require_backend(config: CompileConfig) -> None:
    """Raise `ConfigError` if `config.backend` is not an available PyTorch compiler backend."""
    known = torch.compiler.list_backends(exclude_tags=())
    if config.backend not in known:
        raise ConfigError(f"unknown 'compile.backend' {config.backend!r}.{did_you_mean(config.backend, known)}")


def require_compiler(config: CompileConfig, device: torch.device) -> None:
    """Raise `ConfigError` if the inductor backend requires a C++ compiler that this host lacks."""
    if not has_compiler(config, device):
        raise ConfigError(_NO_COMPILER)


_NO_COMPILER = (
    "'compile' requires a C++ compiler on CPUs, but none was found: install g++ (Debian, Ubuntu: apt install g++), set "
    "CXX to the path of a compiler, or use compile.backend=aot_eager to test without a compiler"
)


def has_compiler(config: CompileConfig, device: torch.device) -> bool:
    """Return whether this host can compile for `device`. On CPUs, the inductor backend requires a C++ compiler."""
    default = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    is_needed = config.backend == "inductor" and device.type == "cpu"
    return not is_needed or shutil.which(os.environ.get("CXX", default)) is not None
