"""Run a config as a Slurm job."""

import sys

import click

from ddp_tutorial.commands import runs_dir
from ddp_tutorial.commands.training import config_argument, overrides_argument
from ddp_tutorial.processes.signals import stopped_by_signals


@click.command()
@runs_dir
@config_argument
@overrides_argument
@click.option("--submit", is_flag=True, help="Submit the script to Slurm instead of printing it.")
def slurm(config: str, overrides: tuple[str, ...], submit: bool) -> None:
    """Print a Slurm batch script that trains with CONFIG.

    \b
    slurm 2proc nodes=2 time=2h partition=gpu
    slurm my.yaml nprocs=8 nodes=2 steps=5000 --submit
    slurm my.yaml nodes=2 starter=torchrun > job.sh

    The job starts config.nprocs ranks, the same number on each node. The command accepts the settings of the `slurm`
    section; the `slurm.` prefix is optional. If the job is preempted or about to reach its time limit, it saves a
    checkpoint, is requeued, and resumes from the checkpoint. All nodes must share the working directory. To stop the
    job permanently, use scancel.
    """
    with stopped_by_signals():
        from ddp_tutorial.commands.slurm_script import slurm_script
        from ddp_tutorial.debug.config import FaultyConfig
        from ddp_tutorial.slurm.job import OUTPUT
        from ddp_tutorial.slurm.job import submit as submit_script

        script = slurm_script(config, overrides, python=sys.executable, kind=FaultyConfig)
        if submit:
            job = submit_script(script)
            click.echo(f"submitted job {job}, which writes to {str(OUTPUT).replace('%j', str(job))}")
        else:
            click.echo(script, nl=False)
