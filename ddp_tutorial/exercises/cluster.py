"""Exercises on unreachable hosts, NCCL's transports, and a hierarchical all-reduce, for notebook 15_cluster."""

import os
import re
import socket
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ddp_tutorial.cluster import Cluster, unsupported_reason
from ddp_tutorial.exercises import Answer, Exercise, WrongAnswerError, expect, on_ranks
from ddp_tutorial.processes.errors import RankTimeoutError
from ddp_tutorial.world import World

# ------------------------------------------------------------------------------------------------- 1. unreachable hosts

Missed = Mapping[str, set[str]]


def _who_is_lost(missed: Missed) -> set[str]:
    named = set().union(*missed.values())
    return {host for host in named if all(host in missed[other] for other in missed if other != host)}


def _anybody_misses(missed: Missed) -> set[str]:
    return set().union(*missed.values())


def _asks_the_first(missed: Missed) -> set[str]:
    return set(missed[min(missed)])


def _asks_the_lost(missed: Missed) -> set[str]:
    return {host for host in missed if len(missed[host]) == len(missed) - 1}


def _test_who_is_lost(answer: Answer) -> str:
    cases: list[tuple[str, Missed, set[str]]] = [
        ("n1's cable is cut", {"n0": {"n1"}, "n1": {"n0", "n2"}, "n2": {"n1"}}, {"n1"}),
        ("n0's cable is cut", {"n0": {"n1", "n2"}, "n1": {"n0"}, "n2": {"n0"}}, {"n0"}),
        ("n2 has no power, and does not report", {"n0": {"n2"}, "n1": {"n2"}}, {"n2"}),
        ("only the link between n0 and n2 is broken", {"n0": {"n2"}, "n1": set(), "n2": {"n0"}}, set()),
        ("with two hosts, it is unknown whose cable is cut", {"n0": {"n1"}, "n1": {"n0"}}, {"n0", "n1"}),
    ]
    for story, missed, right in cases:
        got = answer({host: set(each) for host, each in missed.items()})
        if not isinstance(got, (set, frozenset)):
            raise WrongAnswerError(f"The result must be a set of host names, got {got!r}.")
        expect(got == right, f"{story}: for {missed}, the result must be {right or 'empty'}, got {got or 'empty'}.")
    return "One host's view is not enough: if n1 is unplugged, n1 cannot reach any other host."


who_is_lost = Exercise(
    task=(
        "who_is_lost(missed): return the set of hosts that no other host can reach. `missed` maps each host that still "
        "reports to the set of hosts that it cannot reach, such as {'n0': {'n1'}, 'n2': {'n1'}}."
    ),
    test=_test_who_is_lost,
    solution=_who_is_lost,
    wrong={
        "returns every host that any host misses": _anybody_misses,
        "trusts the first host": _asks_the_first,
        "returns only hosts that still report": _asks_the_lost,
    },
    hints=(
        "To decide about n1, use the reports of all hosts except n1 itself.",
        "A host without power is not a key of `missed`, but may be lost. Collect host names from the sets, too.",
        "A host is lost if it is in missed[other] for every other host that reports.",
    ),
)

# ------------------------------------------------------------------------------------------ 2. transports in NCCL's log

Links = dict[tuple[str, str], set[str]]

# Two hosts with two GPUs each. n1 has no InfiniBand device, so n1 sends and receives through TCP sockets, but n0 sends
# through InfiniBand in one channel. The lines are unsorted, as in a real log.
_LOG = """\
n0:919:1150 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>
n0:919:1150 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB ; OOB eth0:10.0.0.1<0>
n0:919:1150 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
n1:404:771 [1] NCCL INFO Channel 00/0 : 1[1] -> 3[1] [receive] via NET/IB/0
n0:920:1151 [1] NCCL INFO Channel 01/0 : 1[1] -> 0[0] via P2P/CUMEM
n1:403:770 [0] NCCL INFO Channel 00/0 : 2[0] -> 0[0] [send] via NET/Socket/3
n1:403:770 [0] NCCL INFO Channel 01/0 : 0[0] -> 2[0] [receive] via NET/Socket/0
n0:920:1151 [1] NCCL INFO Channel 00/0 : 1[1] -> 3[1] [send] via NET/IB/1/GDRDMA
n1:404:771 [1] NCCL INFO Channel 00/0 : 3[1] -> 2[0] via P2P/CUMEM
n1:404:771 [1] NCCL INFO Connected all rings
"""
# One rank per host, so no communication stays inside a host. Of n3's lines, only the [receive] line is included.
_LOG_OF_FOUR = """\
n3:12:51 [0] NCCL INFO Channel 00/0 : 2[0] -> 3[0] [receive] via NET/IB/10/GDRDMA
n2:12:51 [0] NCCL INFO Channel 00/0 : 2[0] -> 3[0] [send] via NET/IB/10/GDRDMA
n0:12:51 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/1
n1:12:51 [0] NCCL INFO Channel 00/0 : 1[0] -> 2[0] [send] via NET/IB/10
n2:12:51 [0] NCCL INFO Trees [0] 3/-1/-1->2->1
n0:12:51 [0] NCCL INFO Channel 00/0 : 3[0] -> 0[0] [receive] via NET/Socket/1
"""
_LINKS: list[tuple[str, str, Links]] = [
    (
        "two hosts with two ranks each",
        _LOG,
        {
            ("n0", "n1"): {"NET/IB/GDRDMA", "NET/IB", "NET/Socket"},
            ("n1", "n0"): {"NET/Socket"},
        },
    ),
    (
        "four hosts with one rank each",
        _LOG_OF_FOUR,
        {
            ("n0", "n1"): {"NET/Socket"},
            ("n1", "n2"): {"NET/IB"},
            ("n2", "n3"): {"NET/IB/GDRDMA"},
            ("n3", "n0"): {"NET/Socket"},
        },
    ),
]
_CHANNEL = r"(\w+):\S+ \[\d+\] NCCL INFO Channel \S+ : (\d+)\[\d+\] -> (\d+)\[\d+\] (?:\[(\w+)\] )?via (\S+)"


def _links(log: str) -> Links:
    lines = re.findall(
        r"(\w+):\S+ \[\d+\] NCCL INFO Channel \S+ : (\d+)\[\d+\] -> (\d+)\[\d+\] (?:\[(\w+)\] )?via (\S+)", log
    )
    host_of = {}
    for host, sender, receiver, direction, _ in lines:
        host_of[receiver if direction == "receive" else sender] = host  # the rank that prints the line
    found: Links = {}
    for _, sender, receiver, _, transport in lines:
        pair = host_of[sender], host_of.get(receiver, "")
        if transport.startswith("NET/"):
            found.setdefault(pair, set()).add(re.sub(r"/\d+", "", transport))  # without the NIC number
    return found


def _keeps_the_number(log: str) -> Links:
    lines = re.findall(_CHANNEL, log)
    host_of = {(line[2] if line[3] == "receive" else line[1]): line[0] for line in lines}
    found: Links = {}
    for _, sender, receiver, _, transport in lines:
        if transport.startswith("NET/"):
            found.setdefault((host_of[sender], host_of[receiver]), set()).add(transport)
    return found


def _sender_prints_every_line(log: str) -> Links:
    lines = re.findall(_CHANNEL, log)
    host_of = {line[1]: line[0] for line in lines}
    found: Links = {}
    for _, sender, receiver, _, transport in lines:
        if transport.startswith("NET/"):
            found.setdefault((host_of[sender], host_of.get(receiver, "?")), set()).add(re.sub(r"/\d+", "", transport))
    return found


def _send_lines_only(log: str) -> Links:
    return _links("".join(line for line in log.splitlines(keepends=True) if "[receive]" not in line))


def _with_links_inside(log: str) -> Links:
    found = _links(log)
    for host, *_, transport in re.findall(_CHANNEL, log):
        if transport.startswith("P2P"):
            found.setdefault((host, host), set()).add("P2P/CUMEM")
    return found


def _cuts_after_net(log: str) -> Links:
    return {pair: {"/".join(each.split("/")[:2]) for each in names} for pair, names in _links(log).items()}


def _test_links(answer: Answer) -> str:
    for case, log, right in _LINKS:
        got = answer(log)
        if not isinstance(got, dict) or not all(isinstance(each, (set, frozenset)) for each in got.values()):
            raise WrongAnswerError(f"The result must be a dict of sets, got {got!r}.")
        for pair in sorted(right.keys() | got.keys(), key=str):
            expect(
                got.get(pair, set()) == right.get(pair, set()),
                f"{case}: for {pair}, the result must be {sorted(right.get(pair, set())) or 'missing'}, got "
                f"{sorted(got.get(pair, set()), key=str) or 'nothing'}. The log is:\n{log}",
            )
    return "If one host falls back to TCP, every all-reduce becomes slower, but no error is raised."


links = Exercise(
    task=(
        "links(log): `log` is the NCCL_DEBUG=INFO output of all ranks. Return a dict that maps each pair of different "
        "hosts (sender, receiver), such as ('n0', 'n1'), to the set of transports between them without NIC numbers, "
        "such as {'NET/IB/GDRDMA', 'NET/Socket'}."
    ),
    test=_test_links,
    solution=_links,
    wrong={
        "keeps the NIC number": _keeps_the_number,
        "assumes that the sender prints every line": _sender_prints_every_line,
        "reads only the sending side": _send_lines_only,
        "includes the links inside a host": _with_links_inside,
        "does not distinguish GPUDirect RDMA": _cuts_after_net,
    },
    hints=(
        "In '1[1] -> 3[1]', the numbers are ranks, and the numbers in brackets are GPUs. The line starts with the host "
        "of the rank that prints it: the receiver if the line contains [receive], and otherwise the sender.",
        "First read all lines to find the host of each rank. Then read them again to collect the transports.",
        "NET/IB/3/GDRDMA uses NIC 3: re.sub(r'/\\d+', '', transport) removes the number.",
    ),
)

# ----------------------------------------------------------------------------------------- 3. a hierarchical all-reduce

AllReduce = Callable[[torch.Tensor], None]
_HOSTS = (2, 3)
_PER_HOST = 2
_LENGTHS = (1, 7, 500_001)  # not divisible by the number of ranks; the last is long enough to measure
_MOST = 1.2  # maximum ratio of sent bytes to payload bytes; allows for headers and protocol messages


class _Reduced(NamedTuple):
    """The result of the check on one rank."""

    right: list[bool]  # for each length
    sent: int  # bytes that this rank sent to other hosts for the last tensor


def _bytes_sent_away() -> dict[int, int]:
    """Return the number of bytes that each TCP socket delivered to other hosts, keyed by file descriptor."""
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        try:
            duplicate = os.dup(int(path.name))
        except OSError:  # the descriptor of the listing itself
            continue
        try:
            connection = socket.socket(fileno=duplicate)
        except OSError:  # not a socket
            os.close(duplicate)
            continue
        with closing(connection):
            try:
                away = connection.getpeername()[0] != connection.getsockname()[0]
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)
            except (OSError, IndexError):  # a socket that listens, or that is not TCP
                continue
            if away:
                found[int(path.name)] = struct.unpack_from("Q", info, 120)[0]  # tcpi_bytes_acked
    return found


def _reduce_on_rank(world: World, make: Callable[[World], AllReduce], measure: bool) -> _Reduced:
    all_reduce = make(world)
    if not callable(all_reduce):
        raise WrongAnswerError(f"hierarchical(world) must return a function, got {all_reduce!r}.")
    right, before = [], {}
    for length in _LENGTHS:
        tensor = (torch.arange(float(length)) % 100 + 1) * 2**world.rank
        true = (torch.arange(float(length)) % 100 + 1) * (2**world.size - 1)
        dist.barrier()
        before = _bytes_sent_away() if measure else {}
        all_reduce(tensor)
        right.append(torch.equal(tensor, true))
    dist.barrier()
    time.sleep(0.05)  # the kernel counts bytes after the other host has acknowledged them
    after = _bytes_sent_away() if measure else {}
    return _Reduced(right, sum(count - before.get(fd, 0) for fd, count in after.items()))


def _on_one_machine(world: World, make: Callable[[World], AllReduce]) -> _Reduced:
    local = world.rank % _PER_HOST
    return _reduce_on_rank(replace(world, local_rank=local, local_size=_PER_HOST), make, measure=False)


def _check_reduced(hosts: int, ranks: list[_Reduced], measured: bool) -> None:
    case = f"With {hosts} hosts, {_PER_HOST} ranks per host"
    for length, *right in zip(_LENGTHS, *(rank.right for rank in ranks), strict=True):
        wrong = [rank for rank, is_right in enumerate(right) if not is_right]
        expect(
            not wrong,
            f"{case} and a tensor of {length:,} elements, the tensor must contain the sum over all ranks, but does not "
            f"on ranks {wrong}. Write the sum to the tensor itself.",
        )
    if not measured:
        return
    payload = 4 * _LENGTHS[-1]
    fewest = 2 * (hosts - 1) / hosts * payload
    sent = [sum(rank.sent for rank in ranks[first : first + _PER_HOST]) for first in range(0, len(ranks), _PER_HOST)]
    expect(
        max(sent) < _MOST * fewest,
        f"{case} and a tensor of {payload:,} bytes, each host needs to send only {fewest:,.0f} bytes, but a host sent "
        f"{max(sent):,}. Send only sums over the host's ranks to other hosts, and each element only once.",
    )
    share, most = fewest / _PER_HOST, max(rank.sent for rank in ranks)
    expect(
        most < _MOST * share,
        f"{case} and a tensor of {payload:,} bytes, each rank needs to send only {share:,.0f} bytes to other hosts, "
        f"but one rank sent {most:,}. If every rank has a NIC, the other NICs are idle. Split the bytes among the "
        "ranks.",
    )


def _require_an_answer(answer: Answer) -> None:
    """If the answer is not filled in yet, raise `NotImplementedError` before the hosts are created."""
    try:
        answer(World(0, 1))
    except NotImplementedError:
        raise
    except Exception:  # the answer needs a process group
        return


def _test_hierarchical(answer: Answer) -> str:
    _require_an_answer(answer)
    stuck = "A rank waits forever. Every rank must create all groups in the same order, even the groups of other ranks."
    if reason := unsupported_reason():
        for hosts in _HOSTS:
            ranks = on_ranks(_on_one_machine, hosts * _PER_HOST, answer, stuck=stuck, timeout=60)
            _check_reduced(hosts, ranks, measured=False)
        return f"The sums are correct. The bytes between hosts were not measured ({reason})."
    with Cluster(max(_HOSTS), "1gbit") as cluster:
        for hosts in _HOSTS:
            try:
                ranks = cluster.launch(
                    _reduce_on_rank,
                    answer,
                    True,
                    nodes=hosts,
                    ranks_per_node=_PER_HOST,
                    timeout=60,
                    collective_timeout=30,
                )
            except RankTimeoutError as error:
                raise WrongAnswerError(f"{stuck}\n{error}") from None
            _check_reduced(hosts, ranks, measured=True)
    return "Each host sends fewer bytes than in one ring over all ranks, and its ranks send equal numbers of bytes."


def _hierarchical(world: World) -> AllReduce:
    size, hosts = world.local_size, world.size // world.local_size
    # Every rank creates all groups, in the same order, and uses two of them.
    groups_inside = [dist.new_group([host * size + local for local in range(size)]) for host in range(hosts)]
    groups_across = [dist.new_group([host * size + local for host in range(hosts)]) for local in range(size)]
    inside, across = groups_inside[world.rank // size], groups_across[world.local_rank]

    def all_reduce(tensor: torch.Tensor) -> None:
        padded = F.pad(tensor, (0, -len(tensor) % size))
        part = padded.new_empty(len(padded) // size)
        dist.reduce_scatter_tensor(part, padded, group=inside)
        dist.all_reduce(part, group=across)
        dist.all_gather_into_tensor(padded, part, group=inside)
        tensor.copy_(padded[: len(tensor)])

    return all_reduce


def _groups(world: World) -> tuple[Any, Any]:
    """Return the group of all ranks on this host, and the group of all ranks with the same local rank. Collective."""
    size, hosts = world.local_size, world.size // world.local_size
    inside = [dist.new_group([host * size + local for local in range(size)]) for host in range(hosts)]
    across = [dist.new_group([host * size + local for host in range(hosts)]) for local in range(size)]
    return inside[world.rank // size], across[world.local_rank]


def _in_three_steps(world: World, inside: Any, across: Any, tensor: torch.Tensor) -> None:
    parts = dist.get_world_size(inside)
    padded = F.pad(tensor, (0, -len(tensor) % parts))
    part = padded.new_empty(len(padded) // parts)
    dist.reduce_scatter_tensor(part, padded, group=inside)
    if across is not None:
        dist.all_reduce(part, group=across)
    dist.all_gather_into_tensor(padded, part, group=inside)
    tensor.copy_(padded[: len(tensor)])


def _one_ring(world: World) -> AllReduce:
    return lambda tensor: dist.all_reduce(tensor) and None


def _whole_tensors(world: World) -> AllReduce:
    inside, across = _groups(world)

    def all_reduce(tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor, group=inside)
        dist.all_reduce(tensor, group=across)

    return all_reduce


def _by_the_first_rank(world: World) -> AllReduce:
    inside, across = _groups(world)
    first = world.rank - world.local_rank

    def all_reduce(tensor: torch.Tensor) -> None:
        dist.reduce(tensor, first, group=inside)
        if world.local_rank == 0:
            dist.all_reduce(tensor, group=across)
        dist.broadcast(tensor, first, group=inside)

    return all_reduce


def _groups_swapped(world: World) -> AllReduce:
    inside, across = _groups(world)
    return lambda tensor: _in_three_steps(world, across, inside, tensor)


def _inside_only(world: World) -> AllReduce:
    inside, _ = _groups(world)
    return lambda tensor: _in_three_steps(world, inside, None, tensor)


def _drops_the_remainder(world: World) -> AllReduce:
    inside, across = _groups(world)

    def all_reduce(tensor: torch.Tensor) -> None:
        even = tensor[: len(tensor) // world.local_size * world.local_size].clone()
        if len(even):
            _in_three_steps(world, inside, across, even)
        tensor[: len(even)] = even

    return all_reduce


hierarchical = Exercise(
    task=(
        "hierarchical(world): return a function that sums a one-dimensional tensor of any length over all ranks, in "
        "place. With H hosts, each host must send only 2 (H - 1) / H times the tensor's bytes to other hosts, split "
        "equally among its ranks. Ranks are numbered host by host. world.local_rank is the rank within the host, and "
        "world.local_size is the number of ranks per host."
    ),
    test=_test_hierarchical,
    solution=_hierarchical,
    wrong={
        "uses one ring over all ranks": _one_ring,
        "sends whole tensors between the hosts": _whole_tensors,
        "lets one rank of each host send everything": _by_the_first_rank,
        "swaps the two kinds of groups": _groups_swapped,
        "sums inside the hosts only": _inside_only,
        "drops the remainder": _drops_the_remainder,
    },
    hints=(
        "Use two kinds of groups: the ranks of one host, and the ranks of all hosts that have the same local rank.",
        "dist.new_group(ranks) is collective: every rank calls it for every group, in the same order, and keeps the "
        "two groups that it belongs to.",
        "Reduce-scatter inside the host, all-reduce the chunk across hosts, and all-gather inside the host. Pad the "
        "tensor to a multiple of world.local_size.",
    ),
)
