"""Set the environment variables for `train --debug`.

This module does not import torch, because torch reads some of the variables at import time.
"""

import os

# The debug mode of this package, which shows all log lines on the console.
DEBUG = "DDP_TUTORIAL_DEBUG"

VARIABLES = {
    DEBUG: "1",
    "TORCH_DISTRIBUTED_DEBUG": "INFO",  # DETAIL crashes DistributedDataParallel with gloo (torch 2.13)
    "TORCH_LOGS": "distributed,ddp",
    "TORCH_SHOW_CPP_STACKTRACES": "1",
    "NCCL_DEBUG": "INFO",
    "NCCL_DEBUG_SUBSYS": "INIT,COLL",
    "CUDA_LAUNCH_BLOCKING": "1",
}


def set_variables() -> str:
    """Set the variables that are not set yet, for this process and the ranks that it starts.

    Call this function before torch is imported.

    Returns:
        A line that lists the variables that this function set and the variables that already had a value.
    """
    kept = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    added = {name: value for name, value in VARIABLES.items() if name not in kept}
    os.environ.update(added)
    lists = {"set": added, "already set": kept}
    return "--debug: " + "; ".join(
        f"{what} {', '.join(f'{name}={value}' for name, value in each.items())}" for what, each in lists.items() if each
    )
