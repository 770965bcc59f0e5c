"""Read the environment variables that Slurm's `srun` sets for each task of a job step."""

import re
from collections.abc import Mapping

from ddp_tutorial.config import ConfigError
from ddp_tutorial.environment import integer_variable
from ddp_tutorial.slurm.nodes import node_names, tasks_per_node
from ddp_tutorial.slurm.rendezvous import slurm_address


def world_of_step(environ: Mapping[str, str]) -> dict[str, int | str] | None:
    """Return the fields of `World` for this task of a job step, or None outside a step.

    SLURM_PROCID is also 0 in batch scripts and interactive shells, but SLURM_STEP_ID is set only in a step.

    Raises:
        ConfigError: If the variables contradict each other.
    """
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
        return None
    size = integer_variable(environ, "SLURM_STEP_NUM_TASKS", integer_variable(environ, "SLURM_NTASKS", 1))
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", str(size)))
    per_node, node = tasks_per_node(tasks), integer_variable(environ, "SLURM_NODEID", 0)
    if not 0 <= node < len(per_node):
        raise ConfigError(
            f"SLURM_NODEID must be between 0 and {len(per_node) - 1}, got {node} (SLURM_STEP_TASKS_PER_NODE={tasks!r})"
        )
    if "SLURM_STEP_TASKS_PER_NODE" in environ and sum(per_node) != size:
        raise ConfigError(
            f"SLURM_STEP_TASKS_PER_NODE={tasks!r} specifies {sum(per_node)} tasks, but the step has {size}"
        )
    names = node_names(environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_JOB_NODELIST", "localhost")))
    if {"SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST"} <= environ.keys() and len(names) != len(per_node):
        raise ConfigError(
            f"SLURM_STEP_NODELIST={environ['SLURM_STEP_NODELIST']!r} contains {len(names)} nodes, but "
            f"SLURM_STEP_TASKS_PER_NODE={tasks!r} specifies {len(per_node)}"
        )
    return {
        "rank": integer_variable(environ, "SLURM_PROCID"),
        "size": size,
        "local_rank": integer_variable(environ, "SLURM_LOCALID", 0),
        "local_size": per_node[node],
        "init_method": _init_method(environ, names[0]),
    }


def _init_method(environ: Mapping[str, str], first_node: str) -> str:
    host = environ.get("MASTER_ADDR", first_node)
    if port := environ.get("MASTER_PORT"):
        return f"tcp://{host}:{port}"
    job, restarts, step = (
        integer_variable(environ, f"SLURM_{name}", 0) for name in ("JOB_ID", "RESTART_COUNT", "STEP_ID")
    )
    return slurm_address(host, environ.get("SLURM_CLUSTER_NAME", "slurm"), job, restarts, step)


def has_gpu_per_task(environ: Mapping[str, str], local_size: int) -> bool:
    """Return whether Slurm allocated at least one GPU per task on the node, as with `srun --gpus-per-task=1`.

    If a task of such a step sees fewer GPUs than there are tasks on the node, all visible GPUs belong to the task.
    """
    if "SLURM_STEP_ID" not in environ:
        return False
    on_node = re.search(r"\d+$", environ.get("SLURM_GPUS_ON_NODE", ""))
    if on_node is not None:
        return int(on_node[0]) >= local_size
    return "SLURM_GPUS_PER_TASK" in environ or environ.get("SLURM_NTASKS_PER_GPU") == "1"
