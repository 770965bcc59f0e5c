"""Run the `digits` example, unchanged, on workers that Ray Train starts and restarts.

    pip install -c constraints.txt -e '.[ray]'
    python -m ddp_tutorial.examples.ray_train name=digits checkpoint.every=20          # two workers on this machine
    RAY_ADDRESS=auto python -m ddp_tutorial.examples.ray_train name=digits checkpoint.every=20 nprocs=8  # on a cluster

Ray stores its files in `runs/` in the current folder. All machines in the cluster must share this folder. The run
reports its checkpoints to Ray, which removes old checkpoints but does not copy them. If a worker is lost, Ray restarts
all workers, and the run resumes from its last checkpoint. The result is bitwise identical to an uninterrupted run's.
"""

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # do not send usage statistics
if __name__ == "__main__" and "RAY_ADDRESS" not in os.environ:  # a local Ray instance, on the loopback interface only
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", next(n for _, n in socket.if_nameindex() if n in {"lo", "lo0"}))

import ray
import ray.train as rt
from ray.train.torch import TorchTrainer

from ddp_tutorial import observe, run
from ddp_tutorial.checkpoint.manifest import list_checkpoints, read_manifest
from ddp_tutorial.config import ConfigError, from_arguments
from ddp_tutorial.examples import digits
from ddp_tutorial.files import RUNS
from ddp_tutorial.phases import PhaseEvent

FAILURES = 3  # the maximum number of worker failures
ALL = 10**9  # the run keeps all checkpoints; Ray removes old ones, because reported checkpoints must exist


class Report:
    """An observer that reports each new checkpoint to Ray. Calls are collective, like saves."""

    def __init__(self, name: str) -> None:
        """Observe the run `name`. Only checkpoints newer than Ray's latest checkpoint are reported."""
        self.folder, known = RUNS / name / "checkpoints", rt.get_checkpoint()
        self.reported_step = read_manifest(Path(known.path)).step if known else 0

    def __call__(self, edge: PhaseEvent) -> None:
        """Report new checkpoints after each save."""
        if edge.name != "save" or edge.entered:
            return
        for saved in list_checkpoints(self.folder):
            manifest = read_manifest(saved)
            if manifest.step > self.reported_step:
                self.reported_step = manifest.step
                checkpoint = rt.Checkpoint(saved.absolute()) if rt.get_context().get_world_rank() == 0 else None
                metrics = {"step": manifest.step, **manifest.metrics}
                rt.report(metrics, checkpoint, checkpoint_upload_mode=rt.CheckpointUploadMode.NO_UPLOAD)


def work(asked: dict[str, Any]) -> None:
    """Train on one worker. `run` joins the process group that Ray created."""
    os.chdir(asked["folder"])
    options = digits.Options.model_validate_json(asked["options"])
    with observe(Report(options.name)):
        run(digits.main, options)


def trainer(options: digits.Options, work: Callable[[dict[str, Any]], None] = work) -> TorchTrainer:
    """Return a Ray `TorchTrainer` for a resumable run, or raise `ConfigError` if `options` do not allow resuming."""
    if not options.name or not options.checkpoint.every or options.checkpoint.background:
        raise ConfigError("a Ray run must be resumable. Set 'name', 'checkpoint.every' and checkpoint.background=false")
    kept = options.checkpoint.keep_last
    checkpoint = options.checkpoint.model_copy(update={"keep_last": ALL})
    options = options.model_copy(update={"resume": "auto", "checkpoint": checkpoint})
    return TorchTrainer(
        work,
        train_loop_config={"options": options.model_dump_json(), "folder": str(Path.cwd())},
        scaling_config=rt.ScalingConfig(num_workers=options.nprocs, use_gpu=bool(ray.cluster_resources().get("GPU"))),
        run_config=rt.RunConfig(
            name=options.name,
            storage_path=str(RUNS.absolute()),
            failure_config=rt.FailureConfig(max_failures=FAILURES),
            checkpoint_config=rt.CheckpointConfig(num_to_keep=kept),
        ),
    )


def start(processors: int) -> None:
    """Connect to the cluster at RAY_ADDRESS, or start a Ray instance that stops when this process exits."""
    if "RAY_ADDRESS" in os.environ:
        ray.init(log_to_driver=False)
    else:
        ray.init(num_cpus=processors, include_dashboard=False, object_store_memory=10**8, log_to_driver=False)


if __name__ == "__main__":
    chosen = from_arguments(digits.Options, sys.argv[1:])
    start(chosen.nprocs)
    print(trainer(chosen).fit().metrics)
