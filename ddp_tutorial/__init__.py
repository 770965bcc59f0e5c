"""Learn and practise PyTorch distributed data-parallel training: real ranks, on any machine."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_tutorial.collectives import all_gather, assert_same, from_rank_zero, mean, rank_zero_first, total
    from ddp_tutorial.config import ConfigError
    from ddp_tutorial.ddp import DDPConfig, data_parallel
    from ddp_tutorial.launcher import RankError, RankTimeoutError, launch
    from ddp_tutorial.model import GPT
    from ddp_tutorial.phases import observe, phase
    from ddp_tutorial.rank import progress
    from ddp_tutorial.train_config import TrainConfig
    from ddp_tutorial.trainer import Trainer, TrainResult, launch_training, train
    from ddp_tutorial.world import World, process_group

# Where each name lives. They are imported when first asked for, so that a rank that only needs `launch` does not
# load plotting, and the commands that only read logs do not load torch.
_HOMES = {
    "collectives": ["assert_same", "from_rank_zero", "all_gather", "mean", "rank_zero_first", "total"],
    "config": ["ConfigError"],
    "ddp": ["DDPConfig", "data_parallel"],
    "launcher": ["RankError", "RankTimeoutError", "launch"],
    "model": ["GPT"],
    "phases": ["observe", "phase"],
    "rank": ["progress"],
    "train_config": ["TrainConfig"],
    "trainer": ["TrainResult", "Trainer", "launch_training", "train"],
    "world": ["World", "process_group"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = list(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_HOME_OF)
