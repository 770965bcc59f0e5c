"""Jobs for Slurm: a batch script made from a few settings, and its submission.

The script is text, to read, to change and to submit by hand, and each line of it is in Slurm's manual. A library such
as submitit (1.5) makes one as well, and requeues, too. But it hands the job a pickled function to load, and loading
executes nothing here; and what this job runs is a command line, which saves and goes on by itself.

How a job ends, and what becomes of it:

- its time is nearly up: Slurm sends every rank USR1 (`--signal`). They save after the same step and end with code 75,
  and the script has the job requeued;
- it is preempted, and its partition has a grace time: so with TERM, or USR1 if the cluster is set up that way;
- it is preempted or requeued without notice: ranks and script get TERM, and Slurm requeues it. Ranks have saved when
  they do so within KillWait, usually 30 seconds;
- it is cancelled: the same signals, and it stays away, for the script is gone by then. That is why it traps nothing;
- a node is lost: Slurm requeues it, and it goes on from the last checkpoint.
"""

import math
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from ddp_tutorial.config import Config, ConfigError
from ddp_tutorial.files import RUNS
from ddp_tutorial.processes.signals import EXIT_CODE
from ddp_tutorial.world import node_names

OUTPUT = RUNS / "slurm-%j.out"  # of all lives of a job; Slurm puts its number in
_DONE = '"status": "finished"|"reason": "a request"'  # in the result of a run that is not to go on
_UNITS = r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m(?:in)?)?(?:(\d+)s)?"
_CLOCK = r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)"


class SlurmConfig(Config):
    """Where a job runs, and for how long. How many ranks it has says the run's `nprocs`: as many on each node."""

    nodes: int = Field(1, ge=1)
    nodelist: str = Field("", examples=["node01"], description="which nodes, as in node[01-03]; or else Slurm chooses")
    starter: Literal["srun", "torchrun"] = Field(
        "srun", description="of ranks: a task each, or a torchrun on each node"
    )
    partition: str = Field("", examples=["gpu"])
    account: str = Field("", examples=["project1"])
    time: str = Field("1h", examples=["90min"], description="limit: 90min, 2h, 1d12h, or as 1:30:00 and 1-12:00:00")
    warning: int = Field(120, ge=1, description="seconds before that in which ranks save")
    cpus: int = Field(1, ge=1, description="cores for each rank, and its threads")
    gpus: int = Field(0, ge=0, description="of each node")
    options: tuple[str, ...] = Field((), strict=False, examples=[["--mem=32G"]], description="others of sbatch")
    setup: tuple[str, ...] = Field(
        (), strict=False, examples=[["module load cuda"]], description="lines of shell that come before"
    )

    @property
    def seconds(self) -> int:
        """The time limit."""
        return seconds_of(self.time)

    @field_validator("time")
    @classmethod
    def _has_a_unit(cls, time: str) -> str:
        seconds_of(time)
        return time

    @field_validator("partition", "account", "nodelist")
    @classmethod
    def _is_one_word(cls, word: str, info: ValidationInfo) -> str:
        if not re.fullmatch(r"[^\s#'\"]*", word):
            raise ValueError(f"'slurm.{info.field_name}' {word!r} should be one word")
        return word

    @field_validator("options")
    @classmethod
    def _are_options(cls, options: tuple[str, ...]) -> tuple[str, ...]:
        for option in options:
            if not re.fullmatch(r"--?\w\S*", option):
                raise ValueError(f"'slurm.options' {option!r} should be an option of sbatch, such as --mem=32G")
        return options

    @model_validator(mode="after")
    def _is_warned_in_time(self) -> "SlurmConfig":
        if self.warning >= self.seconds:
            raise ValueError(f"'slurm.warning' {self.warning} seconds before the end of {self.time!r} is no warning")
        return self

    @model_validator(mode="after")
    def _nodes_are_those_listed(self) -> "SlurmConfig":
        listed = node_names(self.nodelist) if self.nodelist else []
        if listed and len(listed) != self.nodes:
            raise ValueError(f"'slurm.nodelist' {self.nodelist} are {len(listed)}, and 'slurm.nodes' says {self.nodes}")
        return self


def seconds_of(time: str) -> int:
    """A time limit in seconds: "90min" -> 5400, "1d12h", "1:30:00", "1-12:00:00".

    Raises `ConfigError` for one without a unit, or which could mean two things, as Slurm's own "90" and "90:00".
    """
    match = re.fullmatch(_UNITS, time) or re.fullmatch(_CLOCK, time)
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups()) if match else (0, 0, 0, 0)
    found = seconds + 60 * (minutes + 60 * (hours + 24 * days))
    if not found:
        raise ConfigError(
            f"'slurm.time' {time!r} should be a time with its units: 90min, 2h, 1d12h, or 1:30:00, 1-12:00:00"
        )
    return found


def ranks_per_node(ranks: int, slurm: SlurmConfig) -> int:
    """How many of `ranks` ranks each node has. Raises `ConfigError` where the nodes would have unequally many."""
    if ranks % slurm.nodes:
        fewer = ranks - ranks % slurm.nodes
        counts = " or ".join(str(count) for count in (fewer, fewer + slurm.nodes) if count)
        raise ConfigError(
            f"'nprocs' {ranks} ranks on 'slurm.nodes' {slurm.nodes} are unequally many on each: use nprocs={counts}"
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
    patience: float = 600,
) -> str:
    """The sbatch script of a job in which `ranks` ranks run `python COMMAND`, a piece of shell that may use "$run".

    `run` is the run that COMMAND goes on with when it is said again: also a piece of shell. `name` is what Slurm calls
    the job, `about` is told at the top. When a rank has ended, the others are given `patience` seconds to end, too.

    Raises `ConfigError` where nodes would have unequally many ranks.
    """
    here = ranks_per_node(ranks, slurm)
    by_srun = slurm.starter == "srun"
    tasks, cpus = (here, slurm.cpus) if by_srun else (1, here * slurm.cpus)
    chosen = {"partition": slurm.partition, "account": slurm.account, "nodelist": slurm.nodelist}
    srun = f"srun --cpus-per-task={cpus} --kill-on-bad-exit=0 --wait={math.ceil(patience)}"
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
        f"# {slurm.warning} seconds before the time is up, every rank gets this signal, and saves",
        f"#SBATCH --signal=USR1@{slurm.warning}",
        "# a job that is preempted, or loses a node, is queued again, under the same number",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        f"#SBATCH --output={OUTPUT}",
        "",
        *slurm.setup,
        f"export OMP_NUM_THREADS={slurm.cpus}",
        f"run={run}",
        "",
        "# A rank that ends before the others is no reason to kill them: they may still be saving.",
        *(_tasks(srun, python, command) if by_srun else _agents(srun, python, command, slurm.nodes, here)),
        "",
        f"# {EXIT_CODE}: told to stop, and saved. 138, 143: ended by USR1 or TERM, as Python was not up yet.",
        f'case $code in {EXIT_CODE} | 138 | 143) scontrol requeue "$SLURM_JOB_ID" ;; esac',
        "exit $code",
    ]
    return "\n".join(lines) + "\n"


def _tasks(srun: str, python: str, command: str) -> Iterable[str]:
    return (
        "# Each task is a rank. Its number, the world's size and the first node, where they meet, are in SLURM_*.",
        f"{srun} \\",
        f"    {shlex.quote(python)} {command}",
        "code=$?",
    )


def _agents(srun: str, python: str, command: str, nodes: int, here: int) -> Iterable[str]:
    return (
        f"# Each task is a torchrun, which starts {here} of the ranks. They meet on the first node, where this script",
        "# runs, at a port that is free now. A signal is for the ranks: torchrun ignores it, and exits after them.",
        'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        f"port=$({shlex.quote(python)} -c 'import socket; print(socket.create_server((\"\", 0)).getsockname()[1])')",
        f"{srun} \\",
        """    bash -c 'trap "" TERM USR1; PET_RDZV_CONF=is_host=$((SLURM_NODEID == 0)) exec "$@"' on_each_node \\""",
        f"    {shlex.quote(python)} -m torch.distributed.run --nnodes={nodes} --nproc-per-node={here} \\",
        '    --rdzv-backend=c10d --rdzv-endpoint="$first:$port" \\',
        '    --rdzv-id="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" --max-restarts=3 --signals-to-handle=SIGINT \\',
        f"    {command}",
        "code=$?",
        "# It ends with 0 where ranks were told to stop, too. The result says if it is done, or was asked to stop.",
        f"""if [ $code = 0 ] && ! grep -qsE '{_DONE}' "runs/$run/result.json"; then code={EXIT_CODE}; fi""",
    )


def _clock(seconds: int) -> str:
    """As Slurm writes it: 5400 -> 0-01:30:00."""
    minutes, hours = seconds // 60, seconds // 3600
    return f"{hours // 24}-{hours % 24:02}:{minutes % 60:02}:{seconds % 60:02}"


def submit(script: str) -> int:
    """Hand a batch script to Slurm; the number of the job. Its ranks run where this process does, in a folder that all
    nodes have to share.

    Raises `ConfigError` where Slurm is not installed, or refuses: an unknown partition, say.
    """
    if shutil.which("sbatch") is None:
        raise ConfigError("Slurm is not installed here: there is no sbatch. Without --submit the script is printed")
    Path(OUTPUT).parent.mkdir(parents=True, exist_ok=True)  # Slurm would not make it, and lose the output
    try:
        done = subprocess.run(
            ["sbatch", "--parsable"], input=script, capture_output=True, text=True, check=False, timeout=120
        )
    except subprocess.TimeoutExpired:
        raise ConfigError("sbatch had no answer from Slurm in 120 seconds") from None
    if done.returncode:
        why = [
            line.removeprefix("sbatch: ").removeprefix("error: ") for line in done.stderr.splitlines() if line.strip()
        ]
        raise ConfigError(f"Slurm refuses the job: {why[-1] if why else f'sbatch ended with {done.returncode}'}")
    return int(done.stdout.partition(";")[0])  # NUMBER, or NUMBER;CLUSTER
