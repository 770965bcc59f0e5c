"""Run commands on simulated hosts on this machine."""

import os
import sys
from pathlib import Path

import click

from ddp_tutorial.config import FailedError


@click.group()
def cluster() -> None:
    """Run commands on simulated hosts on this machine, with a real network stack. Requires Linux."""


@cluster.command(context_settings={"ignore_unknown_options": True})
@click.option("--nodes", type=int, default=2, show_default=True, help="Number of hosts: n0, n1, ...")
@click.option("--rate", metavar="RATE", help="Bandwidth of each host's link, such as 1gbit.  [default: unlimited]")
@click.option("--delay", metavar="TIME", help="One-way delay of each message, such as 0.5ms.  [default: none]")
@click.option("--separate-folders", is_flag=True, help="Run each host in its own directory: n0/, n1/, ...")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(nodes: int, rate: str | None, delay: str | None, separate_folders: bool, command: tuple[str, ...]) -> None:
    """Run COMMAND on every host, and print the output of all hosts.

    \b
    cluster run --rate 1gbit -- torchrun --nproc-per-node 1 -m ddp_tutorial train 2proc
    cluster run --nodes 3 -- sh -c 'echo $NODE_RANK; hostname; ip addr'

    The hosts share this machine's cores and files, and are not reachable from other machines. The PET_* variables set
    torchrun's number of nodes, rendezvous endpoint (n0:29500) and node rank. NODE_RANK is the index of the host,
    starting at 0. The exit code is 0 if COMMAND exits with code 0 on all hosts.
    """
    from ddp_tutorial.cluster import Cluster

    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"  # the directory of torchrun
    with Cluster(nodes, rate, delay, shared_folder=not separate_folders) as hosts:
        env_of = [{**hosts.torchrun_env(node), "NODE_RANK": str(node), "PATH": path} for node in range(nodes)]
        finished = hosts.run(*command, env_of=env_of, line=lambda node, text: click.echo(f"[{node}] {text}"))
    if failed := [each for each in finished if each.code]:
        raise FailedError(", ".join(f"{each.node} exited with code {each.code}" for each in failed))
