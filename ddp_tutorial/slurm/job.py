"""Write batch scripts for Slurm, and submit them.

The script is plain text that users can read, edit and submit by hand. The script uses only documented features of
Slurm. Libraries such as submitit (1.5) also write scripts and requeue jobs, but their jobs load a pickled function.
This package's jobs run a command that saves checkpoints and resumes from them.

A job can be interrupted in these ways:

- The time limit is near: Slurm sends USR1 to every rank (`--signal`). The ranks save a checkpoint after the same step
  and exit with code 75, and the script requeues the job.
- The job is preempted, and its partition has a grace time: Slurm sends TERM or, if configured to do so, USR1. The ranks
  and the script respond as they do near the time limit.
- The job is preempted or requeued without notice: the ranks and the script receive TERM, and Slurm requeues the job.
  The ranks can save a checkpoint only if they finish within KillWait, usually 30 seconds.
- The job is canceled: Slurm sends the same signals, but the job is not requeued, because the signals also terminate the
  script. For this reason, the script does not trap signals.
- A node fails: Slurm requeues the job, which resumes from the latest checkpoint.
"""

import math
import shlex
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from ddp_tutorial.config import ConfigError
from ddp_tutorial.files import RUNS
from ddp_tutorial.slurm.config import SlurmConfig

OUTPUT = RUNS / "slurm-%j.out"  # output of all attempts of a job; Slurm inserts the job ID
REQUEUE_CODE = 75  # exit code of a rank that has saved and stopped on request: `processes.signals.EXIT_CODE`
_DONE = '"status": "finished"|"reason": "a request"'  # in the result file of a run that must not be resumed


def ranks_per_node(ranks: int, slurm: SlurmConfig) -> int:
    """Return the number of ranks per node. Raise `ConfigError` if the ranks cannot be split evenly among the nodes."""
    if ranks % slurm.nodes:
        fewer = ranks - ranks % slurm.nodes
        counts = " or ".join(str(count) for count in (fewer, fewer + slurm.nodes) if count)
        raise ConfigError(
            f"'nprocs' must be a multiple of 'slurm.nodes' ({slurm.nodes}), got {ranks}: use nprocs={counts}"
        )
    return ranks // slurm.nodes


def batch_script(
    command: str,
    ranks: int,
    slurm: SlurmConfig,
    *,
    run: str,
    name: str,
    about: str,
    python: str = "python",
    timeout: float = 600,
) -> str:
    """Return the batch script of a job in which each rank runs `python COMMAND`.

    Args:
        command: The arguments of `python`, as shell code that may use "$run".
        ranks: The total number of ranks on all nodes.
        slurm: The settings of the job.
        run: Shell code for the name of the run that `command` resumes.
        name: The job name.
        about: A comment for the top of the script.
        python: The Python interpreter.
        timeout: Maximum time in seconds between the exit of the first rank and the exit of the other ranks.

    Raises:
        ConfigError: If the ranks cannot be divided evenly among the nodes.
    """
    here = ranks_per_node(ranks, slurm)
    by_srun = slurm.starter == "srun"
    tasks, cpus = (here, slurm.cpus) if by_srun else (1, here * slurm.cpus)
    chosen = {"partition": slurm.partition, "account": slurm.account, "nodelist": slurm.nodelist}
    srun = f"srun --cpus-per-task={cpus} --kill-on-bad-exit=0 --wait={math.ceil(timeout)}"
    lines = [
        "#!/bin/bash",
        f"# {ranks} ranks, {here} on each of {slurm.nodes} nodes; {about}",
        f"#SBATCH --job-name={name}",
        f"#SBATCH --nodes={slurm.nodes}",
        f"#SBATCH --ntasks-per-node={tasks}",
        f"#SBATCH --cpus-per-task={cpus}",
        *([f"#SBATCH --gpus-per-node={slurm.gpus}"] if slurm.gpus else []),
        *(f"#SBATCH --{option}={value}" for option, value in chosen.items() if value),
        *(f"#SBATCH {option}" for option in slurm.options),
        f"#SBATCH --time={_clock(slurm.seconds)}",
        f"# {slurm.warning} seconds before the time limit, every rank receives this signal and saves a checkpoint",
        f"#SBATCH --signal=USR1@{slurm.warning}",
        "# if the job is preempted or loses a node, Slurm requeues it under the same job ID",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        f"#SBATCH --output={shlex.quote(str(OUTPUT))}",
        "",
        *slurm.setup,
        *([f"export DDP_TUTORIAL_RUNS={shlex.quote(str(RUNS))}"] if str(RUNS) != "runs" else []),
        f"export OMP_NUM_THREADS={slurm.cpus}",
        f"run={run}",
        "",
        "# srun must not kill the other ranks when one rank exits: they may still be saving.",
        *(_tasks(srun, python, command) if by_srun else _agents(srun, python, command, slurm.nodes, here)),
        "",
        f"# {REQUEUE_CODE}: stopped by a signal, and saved. 138, 143: killed by USR1 or TERM during startup.",
        f'case $code in {REQUEUE_CODE} | 138 | 143) scontrol requeue "$SLURM_JOB_ID" ;; esac',
        "exit $code",
    ]
    return "\n".join(lines) + "\n"


def _tasks(srun: str, python: str, command: str) -> Iterable[str]:
    return (
        "# Each task is a rank. The SLURM_* variables contain the rank, the world size and the rendezvous node.",
        f"{srun} \\",
        f"    {shlex.quote(python)} {command}",
        "code=$?",
    )


def _agents(srun: str, python: str, command: str, nodes: int, here: int) -> Iterable[str]:
    return (
        f"# Each task is a torchrun agent, which starts {here} of the ranks. The agents rendezvous on the first node,",
        "# which runs this script, at a free port. The signals are for the ranks: the agents ignore them.",
        'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        f"port=$({shlex.quote(python)} -c 'import socket; print(socket.create_server((\"\", 0)).getsockname()[1])')",
        f"{srun} \\",
        """    bash -c 'trap "" TERM USR1; PET_RDZV_CONF=is_host=$((SLURM_NODEID == 0)) exec "$@"' on_each_node \\""",
        f"    {shlex.quote(python)} -m torch.distributed.run --nnodes={nodes} --nproc-per-node={here} \\",
        '    --rdzv-backend=c10d --rdzv-endpoint="$first:$port" \\',
        '    --rdzv-id="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" --max-restarts=3 --signals-to-handle=SIGINT \\',
        f"    {command}",
        "code=$?",
        "# torchrun also exits with 0 if a signal stopped the ranks. The result file records whether the run finished.",
        f"if [ $code = 0 ] && ! grep -qsE '{_DONE}' "
        f"""{shlex.quote(str(RUNS))}/"$run/result.json"; then code={REQUEUE_CODE}; fi""",
    )


def _clock(seconds: int) -> str:
    """Return a duration in Slurm's format, such as 0-01:30:00 for 5400 seconds."""
    minutes, hours = seconds // 60, seconds // 3600
    return f"{hours // 24}-{hours % 24:02}:{minutes % 60:02}:{seconds % 60:02}"


def submit(script: str) -> int:
    """Submit a batch script, and return the job ID.

    The ranks run in this process's working directory, which all nodes must share.

    Raises:
        ConfigError: If Slurm is not installed or rejects the job, for example because the partition is unknown.
    """
    if shutil.which("sbatch") is None:
        raise ConfigError("Slurm is not installed: sbatch was not found. To print the script instead, omit --submit")
    Path(OUTPUT).parent.mkdir(parents=True, exist_ok=True)  # without the folder, Slurm drops the output
    try:
        done = subprocess.run(
            ["sbatch", "--parsable"], input=script, capture_output=True, text=True, check=False, timeout=120
        )
    except subprocess.TimeoutExpired:
        raise ConfigError("Slurm did not respond to sbatch within 120 seconds") from None
    if done.returncode:
        why = [
            line.removeprefix("sbatch: ").removeprefix("error: ") for line in done.stderr.splitlines() if line.strip()
        ]
        raise ConfigError(f"Slurm rejected the job: {why[-1] if why else f'sbatch exited with code {done.returncode}'}")
    return int(done.stdout.partition(";")[0])  # NUMBER, or NUMBER;CLUSTER
