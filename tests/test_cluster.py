"""Training on two hosts is bitwise identical to one host, losses are reported in time, and nothing is left of a
cluster.
"""

import errno
import fcntl
import os
import resource
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from commands import call
from ddp_tutorial import cluster as clusters
from ddp_tutorial import hosts
from ddp_tutorial.benches.cluster import delays_in
from ddp_tutorial.cluster import Cluster
from ddp_tutorial.cluster import delay as delays
from ddp_tutorial.cluster.box import NO_DELAY
from ddp_tutorial.cluster.client import BoxClient
from ddp_tutorial.cluster.delay import parse_delay
from ddp_tutorial.cluster.network import address_of, bits_per_second
from ddp_tutorial.cluster.refusals import refusals
from ddp_tutorial.config import ConfigError, FailedError, load
from ddp_tutorial.ddp.link import LinkModel
from ddp_tutorial.processes.errors import RankError, RankTimeoutError
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.processes.signals import handling
from ddp_tutorial.training.config import TaskConfig
from ddp_tutorial.training.tasks import train
from ddp_tutorial.world import World
from ranks import wait_until

RATE = 200e6  # bits per second
LATE = 0.02  # seconds
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def allowed() -> None:
    if reason := clusters.unsupported_reason():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def cluster(allowed: None, folder: Path) -> Iterator[Cluster]:
    with Cluster(3, f"{RATE / 1e6:.0f}mbit", folder=folder) as three:
        yield three


@pytest.fixture(scope="module")
def separate(allowed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster whose nodes do not share a folder."""
    with Cluster(2, "1gbit", folder=tmp_path_factory.mktemp("separate"), shared_folder=False) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def delayed(allowed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(3, "100mbit", f"{LATE * 1e3:.0f}ms", folder=tmp_path_factory.mktemp("delayed")) as cluster:
        yield cluster


@pytest.fixture
def two(allowed: None, tmp_path: Path) -> Iterator[Cluster]:
    """A cluster that tests may break."""
    with Cluster(2, "1gbit", folder=tmp_path) as cluster:
        yield cluster


# -------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(("rate", "bits"), [("1gbit", 1e9), ("100mbit", 1e8), ("1.5 Mbit", 1.5e6), ("64kbit", 64e3)])
def test_a_rate_is_a_number_with_a_unit(rate: str, bits: float) -> None:
    assert bits_per_second(rate) == bits


@pytest.mark.parametrize("rate", ["1", "1000", "fast", "1 gigabit", "-1gbit", "1gbyte", "0kbit", "100gbit", ""])
def test_an_invalid_rate_is_reported_in_one_line_with_an_example(rate: str) -> None:
    with pytest.raises(ConfigError, match="'rate' must be") as told:
        Cluster(2, rate)
    assert "\n" not in str(told.value)


def test_a_cluster_that_is_not_running_keeps_its_rate() -> None:
    cluster = Cluster(2, "1gbit")
    with pytest.raises(RuntimeError, match="the cluster is not running"):
        cluster.set_rate("100mbit")
    assert cluster.rate == "1gbit"


@pytest.mark.parametrize(("delay", "seconds"), [("0.5ms", 5e-4), ("20us", 2e-5), ("1 S", 1.0), ("50ms", 0.05)])
def test_a_delay_is_a_number_with_a_unit(delay: str, seconds: float) -> None:
    assert parse_delay(delay) == pytest.approx(seconds)


@pytest.mark.parametrize("delay", ["1", "soon", "-1ms", "0ms", "11s", "1m", ""])
def test_an_invalid_delay_is_reported_in_one_line_with_an_example(delay: str) -> None:
    with pytest.raises(ConfigError, match=r"'delay' must be .*such as '0\.5ms'|'delay' must be .*at most 10s") as told:
        Cluster(2, "1gbit", delay)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("nodes", "rate", "at_most"),
    [(2, None, 1000), (2, "10gbit", 1000), (3, "200mbit", 160), (8, "100mbit", 60), (32, "20mbit", 15)],
)
def test_a_rate_that_is_too_high_for_a_delay_is_rejected_with_the_limit(
    nodes: int, rate: str | None, at_most: int
) -> None:
    with pytest.raises(ConfigError, match=f"must be at most '{at_most}mbit'"):
        Cluster(nodes, rate, "1ms")
    Cluster(nodes, f"{at_most}mbit", "1ms")


@pytest.mark.parametrize("wrong", [{"nodes": 0}, {"nodes": True}, {"nodes": 251}, {"folder": "nowhere"}])
def test_invalid_settings_are_rejected_before_anything_starts(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Cluster(**wrong)


def test_other_operating_systems_get_a_message_that_linux_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert clusters.unsupported_reason() == (
        "a cluster requires Linux, because it uses kernel namespaces; got platform 'darwin'"
    )


def test_a_system_without_namespaces_reports_this_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(psutil.Process().children())  # such as the fork servers of other tests
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (
        clusters.unsupported_reason()
        == "a cluster requires the command 'unshare', which was not found. Install the package util-linux"
    )
    refusing = tmp_path / "unshare"
    refusing.write_text("#!/bin/sh\necho 'unshare: unshare failed: Operation not permitted' >&2\nexit 1\n")
    refusing.chmod(0o755)
    kernel = "the kernel does not permit namespaces (unshare: unshare failed: Operation not permitted)"
    wanted = f"the cluster cannot be started: {kernel}"
    assert clusters.unsupported_reason() == wanted
    refusing.write_text("#!/bin/sh\necho 'TypeError: main() takes no arguments' >&2\nexit 1\n")
    with pytest.raises(FailedError, match=r"did not start: its first process exited with code 1\nTypeError: main\(\)"):
        clusters.unsupported_reason()
    assert set(psutil.Process().children()) <= before


class SlowToExit:
    """The process `unshare`, paused by a busy machine after its child has exited."""

    returncode: int | None = None

    def wait(self, timeout: float) -> None:
        if timeout < 30:
            raise subprocess.TimeoutExpired("unshare", timeout)
        self.returncode = NO_DELAY


def test_the_reason_why_a_cluster_stopped_is_found_on_a_busy_machine() -> None:
    client = BoxClient()
    client._box = SlowToExit()  # type: ignore[assignment]
    client._channel, its = socket.socketpair(type=socket.SOCK_SEQPACKET)
    its.close()
    with client._channel, pytest.raises(FailedError, match="the process that delays its messages has exited"):
        client.ask("hello")


class NetlinkError(Exception):
    """An error like pyroute2's: not an `OSError`, with the error number in `code`."""

    code = errno.EOPNOTSUPP


def test_only_missing_kernel_features_count_as_unsupported() -> None:
    for refused in (PermissionError(errno.EPERM, "no"), OSError(errno.ENOENT, "no such qdisc"), NetlinkError()):
        with pytest.raises(ConfigError, match=r"^no bridge \([A-Z][a-z ]+\)$"), refusals("no bridge"):
            raise refused
    for defect in (TypeError("link() got an unexpected argument"), OSError(errno.EINVAL, "a wrong call"), EOFError()):
        with pytest.raises(type(defect)), refusals("no bridge"):
            raise defect


def test_the_command_line_exits_with_code_2_if_unsupported(tmp_path: Path) -> None:
    for option in ("rate", "delay"):
        done = command("cluster", "run", f"--{option}", "1", "--", "true", folder=tmp_path)
        assert done.returncode == 2
        assert done.stderr.startswith(f"error: '{option}' must be a number with a unit")
        assert done.stderr.count("\n") == 1


RANK_0 = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
RANK_0 |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
REFUSED: dict[str, tuple[str, dict[str, str], str]] = {
    "no namespaces": ("cluster run -- true", {"PATH": "{bin}"}, "the kernel does not permit namespaces"),
    "no interface": ("train tiny device=cpu", RANK_0 | {"GLOO_SOCKET_IFNAME": "lo77"}, "GLOO_SOCKET_IFNAME=lo77: "),
    "no Slurm": ("slurm tiny --submit", {"PATH": "{bin}"}, "Slurm is not installed: "),
    "other nodes": (
        "slurm tiny nprocs=2 nodes=2 nodelist=n[1-3]",
        {},
        "'slurm.nodes' must be 3, the number of nodes in 'slurm.nodelist' (n[1-3]), got 2",
    ),
    "unequal nodes": ("slurm tiny nprocs=3 nodes=2", {}, "'nprocs' must be a multiple of 'slurm.nodes' (2), got 3"),
}


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: elsewhere a cluster is refused for another reason")
@pytest.mark.parametrize("name", REFUSED)
def test_an_invalid_command_is_rejected_in_one_line_and_writes_nothing(
    name: str, tmp_path: Path, workdir: Path
) -> None:
    """A rate without a unit is tested below."""
    unshare = tmp_path / "bin" / "unshare"
    unshare.parent.mkdir()
    unshare.write_text("#!/bin/sh\necho 'unshare: unshare failed: Operation not permitted' >&2\nexit 1\n")
    unshare.chmod(0o755)
    words, variables, message = REFUSED[name]
    environment = {variable: value.format(bin=unshare.parent) for variable, value in variables.items()}
    done = call(*words.split(), **environment)
    assert done.returncode == 2
    [line] = [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith("rank 0 of 2 on ")]
    assert line.startswith("error: ")
    assert message in line
    assert not list(workdir.iterdir())


def command(*args: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-m", "ddp_tutorial", *args]
    return subprocess.run(line, capture_output=True, text=True, timeout=300, check=False, env=env, cwd=folder)


# ------------------------------------------------------------------------------------------------------- hosts


def test_hosts_have_own_names_addresses_and_processes_and_one_folder(cluster: Cluster, folder: Path) -> None:
    told = cluster.run("sh", "-c", "hostname; hostname -I; pwd; echo $WHO; exit $WHO", env_of=[{"WHO": "0"}] * 3)
    assert [each.output.split() for each in told] == [
        [name, address, str(folder), "0"] for name, address in zip(cluster.names, cluster.addresses, strict=True)
    ]
    program = (
        "from pathlib import Path; from pyroute2 import IPRoute\n"
        "print(Path('/proc/sys/net/ipv4/tcp_congestion_control').read_text().strip())\n"
        "with IPRoute() as kernel: print(kernel.get_links(ifname='eth0')[0].get('gso_max_size'))"
    )
    said = cluster.run(sys.executable, "-c", program)
    assert [each.output.split() for each in said] == [["reno", "4000"]] * 3, "frames of 150 us, at least 4,000 bytes"
    assert [each.code for each in cluster.run("sh", "-c", "exit 3")] == [3] * 3
    assert [each.code for each in cluster.run("no such command")] == [127] * 3


def test_every_line_of_output_is_reported_even_without_a_newline_at_the_end(cluster: Cluster) -> None:
    heard: list[tuple[str, str]] = []
    cluster.run("printf", "one\n\ntwo", line=lambda node, text: heard.append((node, text)))
    assert sorted(heard, key=lambda each: each[0]) == [
        (name, text) for name in cluster.names for text in ("one", "", "two")
    ]


def test_a_server_on_a_host_is_reachable_from_other_hosts_only(cluster: Cluster) -> None:
    serve = "import socket; s = socket.create_server(('', 8765)); print('up', flush=True); s.accept()[0].send(b'hello')"
    heard: list[str] = []
    server = cluster.start(sys.executable, "-c", serve, node=0, line=lambda node, text: heard.append(text))
    clusters.wait([server], 120, until=lambda: bool(heard))
    listening = {each.laddr.port for each in psutil.net_connections() if each.status == psutil.CONN_LISTEN}
    assert 8765 not in listening, "it listens on this machine's own interfaces"
    ask = "import socket; print(socket.create_connection(('n0', 8765), 60).recv(9))"
    assert "hello" in cluster.start(sys.executable, "-c", ask, node=2).wait(120).output


def test_each_host_may_have_its_own_folder(separate: Cluster) -> None:
    separate.run("touch", "here")
    root = separate.folders[0].parent
    assert sorted(str(path.relative_to(root)) for path in root.rglob("here")) == ["n0/here", "n1/here"]


def test_the_command_line_reports_output_and_failures_by_host(allowed: None, tmp_path: Path) -> None:
    line = "echo $PET_NNODES $NODE_RANK; exit $NODE_RANK"
    done = command("cluster", "run", "--nodes", "2", "--rate", "1gbit", "--", "sh", "-c", line, folder=tmp_path)
    assert sorted(done.stdout.splitlines()) == ["[n0] 2 0", "[n1] 2 1"]
    assert (done.returncode, done.stderr) == (1, "error: n1 exited with code 1\n")


OWNER = """
import sys, time
from ddp_tutorial.cluster import Cluster
from ddp_tutorial.cluster.delay import parse_delay
with Cluster(2, "1gbit") as cluster:
    several = [cluster.start("sh", "-c", "trap '' TERM INT HUP; sleep 4321.25 & wait", node=node) for node in (0, 1)]
    print("up", flush=True)
    time.sleep(60)
"""


def sleepers() -> list[int]:
    return [each.pid for each in psutil.process_iter(["cmdline"]) if "4321.25" in " ".join(each.info["cmdline"] or [])]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_cluster_whose_owner_is_killed_leaves_nothing_behind(allowed: None, tmp_path: Path, number: int) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env, cwd=tmp_path
    )
    assert owner.stdout is not None
    with owner, owner.stdout:
        assert owner.stdout.readline() == b"up\n"
        wait_until(lambda: len(sleepers()) >= 2, 120)
        assert sleepers(), "nothing to be left behind"
        owner.send_signal(number)
        owner.wait(30)
    wait_until(lambda: not sleepers(), 120)
    assert not sleepers()
    assert not list(tmp_path.iterdir())


@contextmanager
def interrupted(cluster: Cluster) -> Iterator[None]:
    """Interrupt the next request. Until then, the process that holds the cluster is stopped, and cannot answer."""
    [box] = psutil.Process(cluster._box.pid).children()
    is_interrupted = threading.Event()

    def interrupt(number: int, frame: FrameType | None) -> None:
        is_interrupted.set()
        signal.default_int_handler(number, frame)

    def act() -> None:
        if wait_until(lambda: has_unread_request(cluster), 120):
            os.kill(os.getpid(), signal.SIGINT)
            is_interrupted.wait(120)
        box.resume()

    box.suspend()
    thread = threading.Thread(target=act)
    with handling([signal.SIGINT], interrupt):
        thread.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                yield
        finally:
            thread.join()


def has_unread_request(cluster: Cluster) -> bool:
    """Return whether the socket to the process that holds the cluster contains a request."""
    assert cluster._box._channel is not None
    nbytes = fcntl.ioctl(cluster._box._channel, termios.TIOCOUTQ, bytes(4))
    return int.from_bytes(nbytes, sys.byteorder) > 0


def test_an_interrupt_leaves_no_stale_answer_and_no_process(two: Cluster) -> None:
    with interrupted(two):
        two.set_rate("100mbit")
    assert two.rate == "100mbit", "the links have that rate, whether we have heard of it or not"
    asleep = two.start("sleep", "4321.25", node=0)  # the number of this request, not the answer to the previous one
    asleep.kill()
    assert asleep.wait(20).code == -signal.SIGKILL
    with interrupted(two):
        two.run("sleep", "4321.25")
    wait_until(lambda: not sleepers(), 120)
    assert not sleepers(), "a command goes on which nobody has heard of"
    assert [each.output for each in two.run("hostname")] == ["n0\n", "n1\n"]


def test_an_interrupt_while_a_cluster_starts_leaves_no_process(
    allowed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(BoxClient, "ask", interrupt)
    starting = Cluster(2, folder=tmp_path)
    with pytest.raises(KeyboardInterrupt), starting:
        pass
    assert not psutil.pid_exists(starting._box.pid)


def test_a_failed_request_does_not_stop_the_cluster(two: Cluster) -> None:
    for entry, why in (("no_such_module:f", "ModuleNotFoundError"), ("os:no_such_function", "AttributeError")):
        with pytest.raises(FailedError, match=f"cluster request 'fork' failed: {why}"):
            two.fork(entry, node=0, env={}, files=(1, 1))
    box = psutil.Process(two._box.pid).children()[0]
    limit, room = resource.prlimit(box.pid, resource.RLIMIT_NOFILE), box.num_fds()
    for more in range(6):  # from no room for the request's files, to room for all but one of the box's own
        resource.prlimit(box.pid, resource.RLIMIT_NOFILE, (room + more, limit[1]))
        with suppress(FailedError):
            assert [each.code for each in two.run("true")] == [0, 0]
    resource.prlimit(box.pid, resource.RLIMIT_NOFILE, limit)
    # The box reports an exit code before it closes the file of that report.
    wait_until(lambda: box.num_fds() == room, 120)
    assert box.num_fds() == room, "a failed request left files open"


def test_requests_have_no_size_limit(two: Cluster) -> None:
    """A packet holds 128 KiB. Linux allows 128 KiB for one argument, and several megabytes for all arguments."""
    many = {f"BIG{i}": "x" * 100_000 for i in range(4)}
    told = two.run("sh", "-c", "echo ${#BIG0} ${#BIG3} $#", "sh", *["y" * 100_000] * 4, env=many)
    assert [each.output for each in told] == ["100000 100000 4\n"] * 2


def test_nodes_import_the_same_modules_but_not_this_pythons_library(
    two: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "found_only_here.py").write_text("answer = 42")
    monkeypatch.syspath_prepend(tmp_path / "mine")
    program = "import os, found_only_here, torch; print(found_only_here.answer, os.environ['PYTHONPATH'])"
    said = two.start(sys.executable, "-c", program, node=0).wait(60).output.split()
    assert said[0] == "42"
    folders = {Path(folder) for folder in said[1].split(os.pathsep)}
    assert tmp_path / "mine" in folders
    assert folders.isdisjoint({Path(os.__file__).parent, Path(torch.__file__).parents[1]})


def test_if_one_node_rejects_a_command_no_node_runs_it(two: Cluster) -> None:
    two.kill(1)
    for run in (two.run, two.torchrun):
        with pytest.raises(ConfigError, match="n1 has been killed"):
            run("sleep", "4321.25")
    assert [each.name() for each in psutil.Process(two._box.pid).children(recursive=True)[1:]] == []


# ------------------------------------------------------------------------------------------------------- ranks


def look(world: World, sizes: tuple[int, ...] = (2**10, 2**14, 2**18, 2**22)) -> dict[str, Any]:
    """Return the observations of a rank on its host."""
    seconds = {}
    for nbytes in sizes:
        tensor, taken = torch.zeros(nbytes // 4), []
        for _ in range(20 if nbytes < 2**14 else 5):  # other programs can only delay a message
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(tensor)
            taken.append(time.perf_counter() - began)
        seconds[nbytes] = min(taken)
    return {"host": socket.gethostname(), "interface": os.environ["GLOO_SOCKET_IFNAME"], "seconds": seconds}


def test_ranks_communicate_at_the_rate_of_the_link(cluster: Cluster) -> None:
    told = cluster.launch(look)
    assert [(each["host"], each["interface"]) for each in told] == [(name, "eth0") for name in cluster.names]
    seconds = {nbytes: max(each["seconds"][nbytes] for each in told) for nbytes in told[0]["seconds"]}
    # a ring of three: 4 rounds, in each of which a third is sent; 1,514 bytes on the wire carry 1,448
    wire = {nbytes: 4 / 3 * nbytes * 1514 / 1448 * 8 / RATE for nbytes in seconds}
    assert wire[2**22] * 0.9 < seconds[2**22] < wire[2**22] * 5, (seconds, wire)  # 5 allows for a busy machine
    assert seconds[2**10] < 0.5 * seconds[2**22], "a small message waits for a large one's time"
    cluster.set_rate("20mbit")
    try:
        slower = max(each["seconds"][2**18] for each in cluster.launch(look, (2**18,)))
    finally:
        cluster.set_rate(f"{RATE / 1e6:.0f}mbit")
    assert slower > 9 * wire[2**18]


def test_a_delay_applies_in_each_direction_and_the_rate_is_unchanged(delayed: Cluster) -> None:
    """Two ranks send to each other at the same time, in two rounds."""
    small, large, sizes = 4, 2**20, (2**10, 2**18, 2**20, 5 * 2**20)
    told = delayed.launch(look, (small, *sizes), nodes=2)
    assert [each["host"] for each in told] == ["n0", "n1"], "the third has no rank"
    seconds = {nbytes: max(each["seconds"][nbytes] for each in told) for nbytes in (small, *sizes)}
    with pytest.raises(ConfigError, match="must be at most '160mbit'"):
        delayed.set_rate("1gbit")
    delayed.disconnect(1)
    ping = "import socket, sys; socket.create_connection(('n1', 9), float(sys.argv[1]))"
    assert "timed out" in delayed.start(sys.executable, "-c", ping, "0.3", node=0).wait(20).output
    delayed.reconnect(1)
    assert "refused" in delayed.start(sys.executable, "-c", ping, "10", node=0).wait(20).output, "it has no way back"
    assert 0.99 * 2 * LATE <= seconds[small] < 3.5 * LATE, seconds  # adding the delay twice would give 4 delays
    wire = large / delayed.bytes_per_second
    assert 2 * LATE + 0.9 * wire < seconds[large] < 4 * (2 * LATE + wire), (seconds, wire)
    link = LinkModel(LATE, delayed.bytes_per_second)
    for nbytes in sizes:  # never faster than the link; slower on a busy machine
        assert seconds[nbytes] > 0.9 * link.seconds(nbytes, delays_in(nbytes, 2)), (nbytes, seconds)


@pytest.mark.parametrize(
    ("nbytes", "ranks", "delays"), [(2**10, 2, 4), (2**22, 2, 4), (2**24, 2, 16), (2**10, 3, 8), (2**10, 4, 12)]
)
def test_an_all_reduce_has_one_delay_per_piece_that_a_rank_sends(nbytes: int, ranks: int, delays: int) -> None:
    """Measured with 1 and 5 ms at 1 Gbit/s: on two hosts, 16 MiB take 12 more delays than 4 MiB."""
    assert delays_in(nbytes, ranks) == delays


def test_the_hold_time_of_a_frame_excludes_its_transit_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measured transit time of 50 us is too short for a test that measures it."""

    class WaitsError(Exception):
        pass

    def select(files: list[int], _: object, __: object, left: float | None) -> tuple[list[int], ...]:
        if left is None:
            return files, [], []
        raise WaitsError(left)

    monkeypatch.setattr(delays.os, "sched_setscheduler", lambda *_: None)
    monkeypatch.setattr(delays.gc, "disable", lambda: None)
    monkeypatch.setattr(delays.time, "monotonic", lambda: 100.0)
    monkeypatch.setattr(delays.select, "select", select)
    wire, other = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with wire, other:
        wire.setblocking(False)
        other.send(b"a frame")
        with pytest.raises(WaitsError) as waits:
            delays.run_delay_line(wire.fileno(), 0.5e-3)
        assert waits.value.args[0] == pytest.approx(0.45e-3)


def test_a_delay_without_tap_devices_is_rejected_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delays, "_DEVICE", "/dev/net/none")
    refused = (
        r"^a delay is not available: the kernel does not permit the TAP device /dev/net/none "
        r"\(No such file or directory\)$"
    )
    with pytest.raises(ConfigError, match=refused):
        delays.open_wire()


def test_the_command_line_rejects_a_delay_without_tap_devices(allowed: None, tmp_path: Path) -> None:
    """In this mount namespace, /dev/net is empty, as in many containers."""
    whom = () if os.geteuid() == 0 else ("-U", "-r")
    hide = ["unshare", *whom, "--mount", "sh", "-c", 'mount -t tmpfs none /dev/net && exec "$@"', "sh"]
    line = [sys.executable, "-m", "ddp_tutorial", "cluster", "run", "--rate", "1gbit", "--delay", "1ms", "--", "true"]
    env, before = os.environ | {"PYTHONPATH": str(ROOT)}, boxes()
    done = subprocess.run(
        [*hide, *line], capture_output=True, text=True, timeout=300, check=False, env=env, cwd=tmp_path
    )
    refused = (
        "error: a delay is not available: the kernel does not permit the TAP device /dev/net/tun "
        "(No such file or directory)\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", refused)
    assert boxes() == before


def boxes() -> set[int]:
    """Return the processes that hold clusters of this file's tests, and their forks. Other groups have clusters."""

    def is_ours(process: psutil.Process) -> bool:
        test = (process.info["environ"] or {}).get("PYTEST_CURRENT_TEST", "")
        return "test_cluster.py" in test and "ddp_tutorial.cluster.box" in (process.info["cmdline"] or [])

    return {process.pid for process in psutil.process_iter(["cmdline", "environ"]) if is_ours(process)}


def who_delays() -> psutil.Process:
    """Return the process that has opened the TAP device."""

    def has_it(process: psutil.Process) -> bool:
        with suppress(OSError):  # other processes may open and close files, or exit
            return any(str(fd.readlink()) == "/dev/net/tun" for fd in Path(f"/proc/{process.pid}/fd").iterdir())
        return False

    [found] = [each for each in psutil.Process().children(recursive=True) if has_it(each)]
    return found


def test_the_cluster_stops_if_the_process_that_delays_messages_dies(delayed: Cluster) -> None:
    killed, said = 0.0, "^the cluster has stopped: the process that delays its messages has exited$"
    others = boxes() - {each.pid for each in psutil.Process(delayed._box.pid).children(recursive=True)}
    others -= {delayed._box.pid}
    assert boxes() > others

    def kill_it() -> None:
        nonlocal killed
        time.sleep(0.3)
        killed = time.monotonic()
        who_delays().kill()

    beside = delayed.start("sleep", "4321.25", node=1)
    with pytest.raises(FailedError, match=said):
        delayed.launch(talk_on, collective_timeout=60, meanwhile=kill_it)
    assert time.monotonic() - killed < 30, "ranks waited for messages that nobody carries"
    with pytest.raises(FailedError, match=said):
        delayed.finish([beside], 10)
    with pytest.raises(FailedError, match=said):
        delayed.run("true")
    assert (boxes(), sleepers()) == (others, [])


def settings(*overrides: str) -> TaskConfig:
    small = ("device=cpu", "steps=6", "eval_samples=8")
    return load("tiny", TaskConfig, [*small, *overrides])


def trained(world: World, config: TaskConfig) -> str:
    return str(train(world, config).run)


def weights(folder: Path, name: str) -> bytes:
    return (folder / "runs" / name / "model" / "model.safetensors").read_bytes()


def test_one_host_resumes_a_run_of_two_hosts_bitwise_identically(
    cluster: Cluster, separate: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If each host has its own folder, the first host has the checkpoints."""
    for two, shared in ((cluster, "true"), (separate, "false")):
        saving = ("checkpoint.every=3", f"checkpoint.shared={shared}", "schedule_steps=6", "warmup_steps=2")
        two.launch(trained, settings("name=two", "steps=3", *saving), nodes=2)
        first = two.folders[0]
        monkeypatch.chdir(first)
        for name, going_on in (("two", ["resume=auto", "resume_allow=[steps]"]), ("one", [])):
            launch(trained, 2, settings(f"name={name}", *saving, *going_on), device="cpu", threads=1, echo=False)
        assert weights(first, "two") == weights(first, "one")
    assert not (separate.folders[1] / "runs/two/checkpoints").exists()


def test_hosts_without_a_shared_folder_train_but_cannot_save_checkpoints(separate: Cluster) -> None:
    separate.launch(trained, settings("name=mine"))
    with pytest.raises(RankError, match="on a disk that all nodes share") as told:
        separate.launch(trained, settings("name=saving", "checkpoint.every=3"))
    assert told.value.is_a(ConfigError)
    assert weights(separate.folders[0], "mine")
    for folder in separate.folders:
        assert not (folder / "runs/saving").exists()
    assert not (separate.folders[1] / "runs/mine/model").exists()


def talk_on(world: World) -> None:
    while True:
        dist.all_reduce(torch.ones(1000))
        time.sleep(0.01)


def talk_and_say_when(world: World, folder: str) -> None:
    """Run `talk_on`.

    The pipe of this rank reports the start of the last all-reduce, and is closed when the process exits.
    """
    pipe, began = os.open(f"{folder}/{world.rank}", os.O_WRONLY), 0.0
    try:
        while True:
            began = time.monotonic()
            dist.all_reduce(torch.ones(1000))
            time.sleep(0.01)
    finally:
        os.write(pipe, str(began).encode())


@contextmanager
def seconds_at_the_end(folder: Path, ranks: int) -> Iterator[dict[str, float]]:
    """Yield, for each rank, the seconds from the start of its last all-reduce to its exit. Known after the block."""
    seconds: dict[str, float] = {}

    def listen(pipe: Path) -> None:
        began = pipe.read_text()  # waits until the rank has exited
        seconds[pipe.name] = time.monotonic() - float(began or 0)

    threads = []
    for rank in range(ranks):
        os.mkfifo(folder / str(rank))
        threads.append(threading.Thread(target=listen, args=(folder / str(rank),), daemon=True))
        threads[-1].start()
    yield seconds
    for thread in threads:
        thread.join(30)


def test_a_cut_link_stops_all_ranks_in_time_and_the_lost_host_is_named(cluster: Cluster, tmp_path: Path) -> None:
    """A rank waits for `limit`, probes hosts for 1.5 s, and exits, even if eight busy loops run on two cores.

    The limit is long enough that a rank that is paused for some seconds before the cut does not exceed it.
    """
    limit = 10.0

    def cut_soon() -> None:
        time.sleep(0.5)
        cluster.disconnect(1)

    with seconds_at_the_end(tmp_path, 3) as seconds, pytest.raises(RankError) as told:
        cluster.launch(talk_and_say_when, str(tmp_path), collective_timeout=limit, meanwhile=cut_soon)
    cluster.reconnect(1)
    assert sorted(seconds) == ["0", "1", "2"], "a rank is still there"
    assert all(limit - 0.5 < each < limit + 20 for each in seconds.values()), seconds  # without it, ten minutes
    said = str(told.value)
    assert "rank 0 on n0: lost n1 at 10.0.0.2 with rank 1: no response" in said
    assert "rank 2 on n2: lost n1 at 10.0.0.2 with rank 1: no response" in said
    assert "rank 1 on n1: no other host responds (n0 at 10.0.0.1 with rank 0, n2 at 10.0.0.3 with rank 2)" in said
    assert not any(name in cluster.launch(look)[1]["host"] for name in ("n0", "n2")), "the cable is in again"


def slow_step(world: World, last: Path) -> float:
    """Return the longest of many all-reduces, in seconds. The file `last` stops them."""
    longest = 0.0
    while True:
        began = time.monotonic()
        going_on = torch.tensor(float(not last.exists()))
        dist.all_reduce(going_on)
        longest = max(longest, time.monotonic() - began)
        if going_on < world.size:
            return longest


def test_a_link_that_recovers_in_time_costs_one_slow_step(cluster: Cluster, tmp_path: Path) -> None:
    def interrupt() -> None:
        time.sleep(0.5)
        cluster.disconnect(2)
        time.sleep(1)
        cluster.reconnect(2)
        (tmp_path / "last").touch()

    longest = cluster.launch(slow_step, tmp_path / "last", collective_timeout=30, meanwhile=interrupt)
    assert all(0.8 < each < 25 for each in longest), longest


def test_a_host_that_loses_power_is_named_by_the_other_host(two: Cluster) -> None:
    def kill_soon() -> None:
        time.sleep(0.5)
        two.kill(1)

    with pytest.raises(RankError, match=r"rank 0 on n0: lost n1 at 10\.0\.0\.2 with rank 1: no response"):
        two.launch(talk_on, collective_timeout=10, meanwhile=kill_soon)
    with pytest.raises(ConfigError, match="n1 has been killed"):
        two.run("true")
    assert two.start("hostname", node=0).wait(120).output == "n0\n"


def misbehave(world: World, how: str) -> None:
    if world.rank == 1:
        if how == "raise":
            raise KeyError("no such thing")
        time.sleep(60)
    dist.barrier()


def test_the_first_rank_that_fails_or_times_out_is_named(cluster: Cluster) -> None:
    with pytest.raises(RankError, match="rank 1 on n1 raised KeyError: 'no such thing'"):
        cluster.launch(misbehave, "raise")
    with pytest.raises(RankTimeoutError, match=r"still running after 1\.5 s"):
        cluster.launch(misbehave, "sleep", timeout=1.5)


def return_or(world: World, how: str) -> str:
    if world.rank == 1 and how == "raise":
        raise KeyError("no such thing")
    if world.rank == 1:
        print("rank 1 sleeps", flush=True)
        Path("printed").touch()
        time.sleep(600)
    return "it's"


def test_a_failure_states_only_what_the_other_ranks_did(two: Cluster, tmp_path: Path) -> None:
    [box] = psutil.Process(two._box.pid).children()

    def only_rank_1_is_running() -> bool:
        return (tmp_path / "printed").exists() and len(box.children()) == 1

    with pytest.raises(
        RankTimeoutError, match=r"^rank 1 was still running after 5 s\s+Last lines .* rank 1 printed:\s"
    ):
        two.launch(return_or, "sleep", timeout=5, meanwhile=lambda: wait_until(only_rank_1_is_running, 120))
    with pytest.raises(RankError) as caught:
        two.launch(return_or, "raise")
    assert caught.value.others == "", "rank 0 has returned a string whose pickle contains a quotation mark"
    with pytest.raises(ConfigError, match="'ranks_per_node' must be a positive integer, got 0"):
        two.launch(return_or, "raise", ranks_per_node=0)
    with pytest.raises(ConfigError, match="'nodes' must be between 1 and 2, got 0"):
        two.launch(return_or, "raise", nodes=0)


def print_without_a_newline(world: World) -> None:
    print("no newline", end="")
    raise KeyError("no such thing")


def test_the_log_of_a_rank_includes_a_last_line_without_a_newline(two: Cluster) -> None:
    with pytest.raises(RankError) as caught:
        two.launch(print_without_a_newline, nodes=1)
    assert caught.value.log == "no newline"


def raise_while_rank_0_sleeps(world: World) -> None:
    if world.rank == 1:
        raise KeyError("no such thing")
    time.sleep(60)


def test_a_rank_that_was_stopped_after_a_failure_is_not_named(two: Cluster) -> None:
    with pytest.raises(RankError, match="rank 1 on n1 raised KeyError: 'no such thing'"):
        two.launch(raise_while_rank_0_sleeps)


class FailsToArrive:
    """An argument that rank 1 cannot unpickle, so that rank 1 never joins the process group."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("import os\nif os.environ['RANK'] == '1': raise KeyError('no such thing')",)


def test_meanwhile_is_not_called_if_a_rank_fails_before_it_joins(two: Cluster) -> None:
    called: list[bool] = []
    with pytest.raises(RankError, match="rank 1 on n1 raised KeyError: 'no such thing'"):
        two.launch(return_or, FailsToArrive(), meanwhile=lambda: called.append(True))
    assert called == []


# ---------------------------------------------------------------------------------------------------- torchrun


def test_torchrun_trains_bitwise_identically_over_the_link(
    two: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    args = ["-m", "ddp_tutorial", "train", "tiny", "name=torchrun", "device=cpu", "steps=6", "eval_samples=8"]
    ended = two.torchrun(*args, timeout=300)
    assert [each.code for each in ended] == [0, 0], ended
    launch(trained, 2, settings("name=one"), device="cpu", threads=1, echo=False)
    assert weights(tmp_path, "torchrun") == weights(tmp_path, "one")


# ----------------------------------------------------------------------------------------------- interfaces


def test_the_interface_leads_to_the_other_hosts_and_must_exist(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(hosts.GLOO_INTERFACE, "lo77")
    with pytest.raises(
        ConfigError, match=r"GLOO_SOCKET_IFNAME=lo77: .* has no interface 'lo77'. Its interfaces are .*lo"
    ):
        hosts.choose_interface("127.0.0.1")
    assert hosts.interface_to("no-such-host.invalid") is None


def test_a_loopback_name_is_not_used_to_reach_other_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On many systems, /etc/hosts maps the host's own name to 127.0.1.1."""
    up = type("State", (), {"isup": True})()
    looped = [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.0.1", 9))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: looped)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {"lo": up, "eth5": up})
    assert hosts.interface_to("myself") == "eth5"
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {"lo": up, "eth5": up, "eth6": up})
    assert hosts.interface_to("myself") is None


@pytest.mark.parametrize("address", ["", "localhost", "127.0.0.1", "::1"])
def test_ranks_on_the_loopback_interface_stay_there(address: str) -> None:
    assert hosts.interface_to(address) is None


def test_hosts_that_respond_are_not_reported_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    # Port 9 refuses the connection, so the host is up.
    peers = [hosts.Peer(0, "a", "127.0.0.1"), hosts.Peer(1, "b", "127.0.0.1")]
    told = str(hosts.describe_lost_host(RuntimeError("Connection closed by peer"), peers, 0))
    assert "the other hosts respond (b at 127.0.0.1 with rank 1), so a rank there has exited" in told


def test_a_lost_host_is_reported_even_if_all_hosts_have_the_same_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_responds", lambda address: address != "10.0.0.2")
    peers = [hosts.Peer(rank, "box", f"10.0.0.{1 + rank // 2}") for rank in range(6)]
    told = str(hosts.describe_lost_host(RuntimeError("Connection closed by peer"), peers, 0))
    assert told.startswith("rank 0 on box: lost box at 10.0.0.2 with ranks 2 and 3: no response within 1.5 s")


def test_each_node_has_its_own_address() -> None:
    assert len({address_of(node) for node in range(250)}) == 250
