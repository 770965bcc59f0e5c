"""Private interfaces of torch that the package uses: one function each, so that a new version of torch has one place to
break. Each one was tested with torch 2.13."""

from collections.abc import Callable

import torch
from torch.autograd.variable import Variable


def is_in_backward() -> bool:
    """Return whether autograd is running a backward pass in this thread, for example while it recomputes activations.

    torch has no public way to ask. `torch.utils.checkpoint` uses the same function.
    """
    return torch._C._current_graph_task_id() != -1


def after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the backward pass that is running has finished. A pass that raises does not call it.

    torch has no public way to ask for it. `fully_shard` uses the same function.
    """
    Variable._execution_engine.queue_callback(callback)
