"""Ranks on the hosts of a cluster: begun, waited for, ended; and which of them has failed first."""

import math
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Mapping, Set
from contextlib import ExitStack, suppress
from typing import IO, Any

from ddp_tutorial.cluster.running import Process, Runner, wait
from ddp_tutorial.processes.errors import RankError, RankTimeoutError, lost_connection

# For the other ranks, when one has failed. Who has lost another asks for 1.5 s which hosts are there: so where a link
# is cut, all ranks have ended within 5 s of the collective's time limit.
_GRACE_SECONDS = 3.0


class HostedRanks:
    """The ranks of one launch, `per_node` on each of the first nodes; they meet at `address` and `port`.

    `off` has the names of the nodes without power: it may change meanwhile.
    """

    def __init__(self, runner: Runner, off: Set[str], address: str, port: int, size: int, per_node: int) -> None:
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
        env: Mapping[str, str] | None,
        meanwhile: Callable[[], object] | None,
    ) -> list[Any]:
        """`fn(world, *args)` on every rank: the results. See `Cluster.launch`."""
        from ddp_tutorial.processes.transport import dump_call

        with ExitStack() as stack:
            call = stack.enter_context(tempfile.TemporaryFile())
            call.write(pickle.dumps((threads, collective_timeout, dump_call(fn, args))))
            call.flush()
            self._results = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(self._size)]
            environ = {"OMP_NUM_THREADS": str(threads)} | dict(env or {})
            self._ranks = self._runner.start_all(lambda rank: self._begin(rank, call, environ), self._size)
            try:
                if meanwhile:
                    self._wait_until_up(timeout)
                    meanwhile()
                self._wait(timeout, collective_timeout)
            finally:
                self._runner.end(self._ranks)
            outcomes = [_read(result) for result in self._results]
        # the cause among several failures: that of a rank which heard of no other; a host without power says nothing
        failed = [
            (self._ranks[rank].node in self._off, bool(outcome and lost_connection(str(outcome[1]))), rank)
            for rank, outcome in enumerate(outcomes)
            if outcome is None or outcome[0] == "raised"
        ]
        if failed:
            raise self._failure(min(failed)[-1], outcomes)
        return [pickle.loads(outcome[1]) for outcome in outcomes]

    def _begin(self, rank: int, call: IO[bytes], env: Mapping[str, str]) -> Process:
        node, local = divmod(rank, self._per_node)
        variables = {
            "RANK": rank,
            "WORLD_SIZE": self._size,
            "LOCAL_RANK": local,
            "LOCAL_WORLD_SIZE": self._per_node,
            "MASTER_ADDR": self._address,
            "MASTER_PORT": self._port,
        }
        environ = {name: str(value) for name, value in variables.items()} | dict(env)
        files = (call.fileno(), self._results[rank].fileno())
        return self._runner.start("fork", "ddp_tutorial.cluster.rank:call_here", node, environ, files)

    def _wait_until_up(self, timeout: float | None) -> None:
        """Until all ranks have met, or one has ended, or the time is up."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while not all(os.fstat(result.fileno()).st_size for result in self._results) and time.monotonic() < deadline:
            if any(rank.code is not None for rank in self._ranks):
                return
            with suppress(TimeoutError):
                wait(self._ranks, 0.02)

    def _wait(self, timeout: float | None, collective_timeout: float) -> None:
        try:
            wait(
                self._ranks, timeout, until=lambda: any(rank.code for rank in self._ranks if rank.node not in self._off)
            )
            with suppress(TimeoutError):  # where a host has gone in silence, the others wait in their collective
                wait(self._ranks, _GRACE_SECONDS + (collective_timeout if self._off else 0))
        except TimeoutError:
            printed = "\n".join(rank.output for rank in self._ranks)
            raise RankTimeoutError(0, f"was still running after {timeout} s", log=printed) from None

    def _failure(self, rank: int, outcomes: list[Any]) -> RankError:
        outcome, node = outcomes[rank], self._ranks[rank].node
        reason = f"raised {outcome[1]}" if outcome else f"has ended with {self._ranks[rank].code}"
        others = [f"rank {i} raised {each[1]}" for i, each in enumerate(outcomes) if i != rank and each]
        others = [line for line in others if "raised b'" not in line]
        raised = outcome[1] if outcome else None
        log = self._ranks[rank].output.strip()
        return RankError(rank, f"on {node} {reason}", log=log, others="\n".join(others), raised=raised)


def _read(result: IO[bytes]) -> Any:
    """A rank's outcome; None where it has left none."""
    result.seek(1)  # the byte before it said that it was up
    content = result.read()
    return pickle.loads(content) if content else None
