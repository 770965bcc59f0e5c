"""Several machines in this one."""

import os
import sys
from pathlib import Path

import click

from ddp_tutorial.config import FailedError


@click.group()
def cluster() -> None:
    """Run commands on several hosts in this machine's kernel, with a real network between them. Linux only."""


@cluster.command(context_settings={"ignore_unknown_options": True})
@click.option("--nodes", type=int, default=2, show_default=True, help="Hosts: n0, n1, and so on.")
@click.option("--rate", metavar="RATE", help="Of each host's link, such as 1gbit or 100mbit; unlimited if not given.")
@click.option("--delay", metavar="TIME", help="Of each message, such as 0.5ms, in one direction; none if not given.")
@click.option("--separate-folders", is_flag=True, help="Each host works in a folder of its own: n0/, n1/.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(nodes: int, rate: str | None, delay: str | None, separate_folders: bool, command: tuple[str, ...]) -> None:
    """Run COMMAND on every host, and print what each prints.

    \b
    cluster run --rate 1gbit -- torchrun --nproc-per-node 1 -m ddp_tutorial train 2proc
    cluster run --nodes 3 -- sh -c 'echo $NODE_RANK; hostname; ip addr'

    The hosts share this machine's cores and files, and nothing outside can connect to them. torchrun finds there, in
    variables PET_..., how many nodes there are, where they meet (n0:29500), and which one it is on. NODE_RANK counts
    the hosts from 0. The exit code is 0 if all end with 0.
    """
    from ddp_tutorial.cluster import Cluster

    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"  # torchrun is there, too
    with Cluster(nodes, rate, delay, shared_folder=not separate_folders) as hosts:
        env_of = [{**hosts.torchrun_env(node), "NODE_RANK": str(node), "PATH": path} for node in range(nodes)]
        ended = hosts.run(*command, env_of=env_of, line=lambda node, text: click.echo(f"[{node}] {text}"))
    if failed := [each for each in ended if each.code]:
        raise FailedError(", ".join(f"{each.node} ended with {each.code}" for each in failed))
