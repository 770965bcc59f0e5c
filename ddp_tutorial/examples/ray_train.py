"""The training of `digits`, as it is, on the workers of Ray Train, which starts them, and starts them again.

    pip install -c constraints.txt -e '.[ray]'
    python -m ddp_tutorial.examples.ray_train name=digits checkpoint.every=20                       # two workers, here
    RAY_ADDRESS=auto python -m ddp_tutorial.examples.ray_train name=digits checkpoint.every=20 nprocs=8  # on a cluster

Ray's storage is `runs/` in the folder where you say this, which all machines of the cluster have to see, and Ray calls
the experiment as the run is called: so what it keeps and what the run keeps lie in one folder. Ray is told of each
checkpoint with its metrics, does not copy it, and removes old ones. Where a worker is lost, Ray starts all of them
again, and the run goes on from its last checkpoint, to the bits of a run that has lost none.
"""

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would send them
if __name__ == "__main__" and "RAY_ADDRESS" not in os.environ:  # a Ray of our own: nobody else is to connect to it
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

FAILURES = 3  # of workers, after which Ray gives up
ALL = 10**9  # checkpoints that the run keeps: Ray removes them, as it wants to find those that it was told of


class Report:
    """Observes a run, and tells Ray of each checkpoint that it does not know. Collective, as saving is."""

    def __init__(self, name: str) -> None:
        self.folder, known = RUNS / name / "checkpoints", rt.get_checkpoint()
        self.told = read_manifest(Path(known.path)).step if known else 0

    def __call__(self, edge: PhaseEvent) -> None:
        if edge.name != "save" or edge.entered:
            return
        for saved in list_checkpoints(self.folder):
            manifest = read_manifest(saved)
            if manifest.step > self.told:
                self.told = manifest.step
                checkpoint = rt.Checkpoint(saved.absolute()) if rt.get_context().get_world_rank() == 0 else None
                metrics = {"step": manifest.step, **manifest.metrics}
                rt.report(metrics, checkpoint, checkpoint_upload_mode=rt.CheckpointUploadMode.NO_UPLOAD)


def work(asked: dict[str, Any]) -> None:
    """What each worker does, in a folder of its own and with a process group, both made by Ray; `run` joins that."""
    os.chdir(asked["folder"])
    options = digits.Options.model_validate_json(asked["options"])
    with observe(Report(options.name)):
        run(digits.main, options)


def trainer(options: digits.Options, work: Callable[[dict[str, Any]], None] = work) -> TorchTrainer:
    """Ray's trainer of a run that goes on where it was. Raises `ConfigError` where it could not."""
    if not options.name or not options.checkpoint.every or options.checkpoint.background:
        raise ConfigError("a run on Ray goes on where it was: give it a name=, checkpoint.every=, and no background")
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
    """Join the cluster of RAY_ADDRESS, or start a Ray that ends with this process. What workers print stays there."""
    if "RAY_ADDRESS" in os.environ:
        ray.init(log_to_driver=False)
    else:
        ray.init(num_cpus=processors, include_dashboard=False, object_store_memory=10**8, log_to_driver=False)


if __name__ == "__main__":
    chosen = from_arguments(digits.Options, sys.argv[1:])
    start(chosen.nprocs)
    print(trainer(chosen).fit().metrics)
