"""Launch ranks on the hosts of a cluster, wait for them, and identify the first failure."""

import math
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Set
from contextlib import ExitStack, suppress
from typing import IO, Any

from ddp_tutorial.cluster.running import Process, Runner, wait
from ddp_tutorial.processes.errors import RankError, RankTimeoutError, lost_connection

# Timeout in seconds for the other ranks to exit after a failure. A rank that loses a peer checks for 1.5 s which hosts
# respond. If a link is cut, all ranks therefore exit within 5 s of the collective's timeout.
_GRACE_SECONDS = 3.0


class HostedRanks:
    """The ranks that one launch starts on a cluster's nodes. Each node runs the same number of ranks."""

    def __init__(self, runner: Runner, off: Set[str], address: str, port: int, size: int, per_node: int) -> None:
        """Store the settings. The method `call` starts the ranks, which rendezvous at `address` and `port`.

        `off` contains the names of killed nodes, and may change during the launch.
        """
        self._runner, self._off = runner, off
        self._address, self._port = address, port
        self._size, self._per_node = size, per_node
        self._ranks: list[Process] = []
        self._results: list[IO[bytes]] = []

    def call(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        threads: int,
        timeout: float | None,
        collective_timeout: float,
        meanwhile: Callable[[], object] | None,
    ) -> list[Any]:
        """Call `fn(world, *args)` on every rank, and return the results. See `Cluster.launch`."""
        from ddp_tutorial.processes.transport import dump_call

        with ExitStack() as stack:
            call = stack.enter_context(tempfile.TemporaryFile())
            call.write(pickle.dumps((threads, collective_timeout, dump_call(fn, args))))
            call.flush()
            self._results = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(self._size)]
            self._ranks = self._runner.start_all(lambda rank: self._begin(rank, call, threads), self._size)
            try:
                if meanwhile and self._are_up(timeout):
                    meanwhile()
                self._wait(timeout, collective_timeout)
            finally:
                stopped = [rank.code is None for rank in self._ranks]
                self._runner.end(self._ranks)
            outcomes = [_read(result) for result in self._results]
        # Prefer the failure of a rank that exited by itself and did not lose a connection. Ranks on killed hosts report
        # nothing.
        failed = [
            (
                stopped[rank],
                self._ranks[rank].node in self._off,
                bool(outcome and lost_connection(str(outcome[1]))),
                rank,
            )
            for rank, outcome in enumerate(outcomes)
            if outcome is None or outcome[0] == "raised"
        ]
        if failed:
            raise self._failure(min(failed)[-1], outcomes)
        return [pickle.loads(outcome[1]) for outcome in outcomes]

    def _begin(self, rank: int, call: IO[bytes], threads: int) -> Process:
        node, local = divmod(rank, self._per_node)
        variables = {
            "RANK": rank,
            "WORLD_SIZE": self._size,
            "LOCAL_RANK": local,
            "LOCAL_WORLD_SIZE": self._per_node,
            "MASTER_ADDR": self._address,
            "MASTER_PORT": self._port,
            "OMP_NUM_THREADS": threads,
        }
        environ = {name: str(value) for name, value in variables.items()}
        files = (call.fileno(), self._results[rank].fileno())
        return self._runner.start("fork", "ddp_tutorial.cluster.rank:call_here", node, environ, files)

    def _are_up(self, timeout: float | None) -> bool:
        """Wait until all ranks have joined the process group. Return False after the timeout, or if a rank exits."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while not all(os.fstat(result.fileno()).st_size for result in self._results):
            if time.monotonic() > deadline or any(rank.code is not None for rank in self._ranks):
                return False
            with suppress(TimeoutError):
                wait(self._ranks, 0.02)
        return True

    def _wait(self, timeout: float | None, collective_timeout: float) -> None:
        try:
            wait(
                self._ranks, timeout, until=lambda: any(rank.code for rank in self._ranks if rank.node not in self._off)
            )
            with suppress(TimeoutError):  # if a host is lost without notification, the other ranks wait in a collective
                wait(self._ranks, _GRACE_SECONDS + (collective_timeout if self._off else 0))
        except TimeoutError:
            late = next(number for number, rank in enumerate(self._ranks) if rank.code is None)
            printed = self._ranks[late].output.strip()
            raise RankTimeoutError(late, f"was still running after {timeout} s", log=printed) from None

    def _failure(self, rank: int, outcomes: list[Any]) -> RankError:
        outcome, node = outcomes[rank], self._ranks[rank].node
        reason = f"raised {outcome[1]}" if outcome else f"exited with code {self._ranks[rank].code}"
        others = [
            f"rank {i} raised {each[1]}"
            for i, each in enumerate(outcomes)
            if i != rank and each and each[0] == "raised"
        ]
        raised = outcome[1] if outcome else None
        log = self._ranks[rank].output.strip()
        return RankError(rank, f"on {node} {reason}", log=log, others="\n".join(others), raised=raised)


def _read(result: IO[bytes]) -> Any:
    """Return the outcome (result or exception) that a rank has written, or None if there is no outcome yet."""
    result.seek(1)  # the first byte only shows that the rank has joined the process group
    content = result.read()
    return pickle.loads(content) if content else None
