"""A Slurm cluster of two nodes for tests: its own daemons on its own network, which disappear when it is closed.

Everything runs in one set of Linux namespaces: processes, mounts, host names, and a network that is not reachable from
outside. It contains munged, slurmctld, a bridge, and two slurmd, each with its own host name and address. When the
process that created the namespaces exits, the kernel kills all processes in them.
"""

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
TOOLS = ("slurmctld", "slurmd", "sbatch", "munged", "unshare", "nsenter", "setpriv", "ip")
NAMESPACES = ["--net", "--mount", "--uts", "--pid"]
# Whoever is not root is so in a namespace of users. There slurmctld, as root, could not drop its groups: it, and all
# that speak with it, are `nobody` in another one.
IS_ROOT = os.geteuid() == 0
USERS = [] if IS_ROOT else ["--user", "--preserve-credentials"]
NOBODY = [] if IS_ROOT else ["unshare", "--user", "--map-user=65534", "--map-group=65534", "--"]
ROOT_THERE = [] if IS_ROOT else ["--user", "--map-root-user"]
UNSHARE = ["unshare", *ROOT_THERE, *NAMESPACES, "--fork", "--kill-child", "--mount-proc"]
DIES_WITH_US = ["setpriv", "--pdeathsig", "KILL", "--"]
Text = subprocess.CompletedProcess[str]

CONF = """
ClusterName=box
SlurmctldHost=control(10.9.0.254)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/%n.pid
SlurmctldPidFile={folder}/control.pid
SlurmctldLogFile={folder}/control.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
SchedulerParameters=sched_interval=1,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=30
NodeName=n0 NodeAddr=10.9.0.1 NodeHostname=n0 Port=17000 CPUs=1
NodeName=n1 NodeAddr=10.9.0.2 NodeHostname=n1 Port=17001 CPUs=1
PartitionName=main Nodes=n[0-1] Default=YES PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=n[0-1] PriorityTier=2 PreemptMode=OFF
"""

BOX = """
set -eu
mount --bind hosts /etc/hosts
hostname control
ip link set lo up
ip link add bridge type bridge
ip address add 10.9.0.254/24 dev bridge
ip link set bridge up
mkdir state n0 n1
head -c 1024 /dev/urandom > munge.key
chmod 600 munge.key
$NOBODY munged --force --foreground --key-file="$PWD/munge.key" --socket="$PWD/munge.socket" \
    --pid-file="$PWD/munge.pid" --log-file="$PWD/munge.log" --seed-file="$PWD/munge.seed" &
until [ -e munge.socket ]; do sleep 0.02; done
$NOBODY slurmctld -D -c &
for node in 0 1; do
    unshare --net --uts bash -c '
        hostname n'$node'
        ip link set lo up
        until ip link show eth0 > /dev/null 2>&1; do sleep 0.02; done
        ip address add 10.9.0.$(('$node' + 1))/24 dev eth0
        ip link set eth0 up
        exec $NOBODY slurmd -D -N n'$node &
    until [ "$(readlink /proc/$!/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.02; done
    ip link add port$node type veth peer name eth0 netns $!
    ip link set port$node master bridge up
done
wait
"""


def missing() -> str:
    """Return the reason why this machine cannot run Slurm, or ""."""
    without = [tool for tool in TOOLS if not shutil.which(tool, path=PATH)]
    if without:
        return f"{', '.join(without)} not installed (Debian: slurm-wlm, munge, iproute2)"
    tried = subprocess.run(
        [*UNSHARE, "ip", "link", "add", "x", "type", "bridge"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"the kernel does not permit namespaces: {tried.stderr.strip()}" if tried.returncode else ""


class Slurm:
    """Two nodes with one core each, for the duration of a block. Commands run on the host `control`."""

    def __enter__(self) -> "Slurm":
        # a short name: sockets are made in it, whose paths have at most 107 characters
        self.folder = Path(tempfile.mkdtemp(prefix="slurm", dir="/tmp"))
        (self.folder / "slurm.conf").write_text(CONF.format(folder=self.folder, user="root" if IS_ROOT else "nobody"))
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n10.9.0.254 control\n10.9.0.1 n0\n10.9.0.2 n1\n")
        self.environment = os.environ | {
            "PATH": PATH,
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "NOBODY": " ".join(NOBODY),
        }
        with (self.folder / "box.log").open("w") as log:
            self.box = subprocess.Popen(
                [*DIES_WITH_US, *UNSHARE, "bash", "-c", BOX],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            children = Path(f"/proc/{self.box.pid}/task/{self.box.pid}/children")
            self.until(lambda: children.read_text().strip(), "a first process in the box")
            self.first = int(children.read_text().split()[0])
            self.until(lambda: self("sinfo", "-h", "-t", "idle", "-p", "main", "-o", "%D").stdout.strip() == "2", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.box.kill()
        self.box.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __call__(self, *command: str, cwd: Path | None = None, environment: Mapping[str, str] | None = None) -> Text:
        """Run a command in the namespaces."""
        enter = ["nsenter", f"--target={self.first}", *USERS, *NAMESPACES, f"--wd={cwd or Path.cwd()}", "--", *NOBODY]
        return subprocess.run(
            [*enter, *command],
            env=self.environment | dict(environment or {}),
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    def until(self, holds: Callable[[], object], what: str, seconds: float = 300) -> None:
        """Wait for a condition. The timeout error contains the logs of the daemons."""
        deadline = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > deadline or self.box.poll() is not None:
                said = (self.folder / "box.log").read_text()[-3000:]
                raise AssertionError(f"{what}: not within {seconds} s. Slurm says:\n{said}")
            time.sleep(0.2)  # most conditions ask Slurm in a new process

    def job(self, number: int) -> dict[str, str]:
        """Return Slurm's fields of a job: JobState, Restarts, ..."""
        return dict(re.findall(r"(\S+?)=(\S*)", self("scontrol", "show", "job", str(number)).stdout))

    def until_state(self, number: int, state: str) -> None:
        self.until(lambda: self.job(number).get("JobState") == state, f"job {number} {state}")

    def start_again(self, number: int, life: int) -> None:
        """Start a requeued job after two seconds instead of two minutes. `life` counts attempts from 0.

        The wait is necessary because slurmd revokes the credentials of the last attempt with a resolution of one
        second: a credential that is issued in the same second is void ("Job credential revoked").
        """
        self.until(lambda: self.job(number).get("JobState") == "PENDING", f"job {number} is queued again")
        self("scontrol", "update", f"JobId={number}", "StartTime=now+2")

        def is_running() -> bool:
            found = self.job(number)
            return found.get("JobState") == "RUNNING" and found.get("Restarts") == str(life)

        self.until(is_running, f"life {life} of job {number}")


def namespace_of(process: int | str) -> IO[bytes]:
    """Open the namespace of a process. Until the file is closed, no other namespace gets the namespace's number."""
    return open(f"/proc/{process}/ns/pid", "rb", buffering=0)


def inside(namespace: IO[bytes]) -> list[str]:
    """Return the processes in the namespace, by their command lines."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (process / "ns/pid").samefile(f"/proc/self/fd/{namespace.fileno()}"):
                found.append((process / "cmdline").read_text().replace("\0", " "))
    return found
