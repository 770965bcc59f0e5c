"""Define the notebook magics `%ranks` and `%%ranks`, which `%load_ext ddp_tutorial` loads. `%ranks?` shows help."""

import argparse
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult, context_matcher
from IPython.core.magic import Magics, cell_magic, line_cell_magic, magics_class

from ddp_tutorial.cluster.cluster import Cluster
from ddp_tutorial.config import ConfigError, did_you_mean, named_ranks
from ddp_tutorial.debug.hangs import CollectiveError
from ddp_tutorial.files import write_atomically
from ddp_tutorial.live.display import RankResults
from ddp_tutorial.live.pool import Ranks
from ddp_tutorial.live.script import ScriptStep, assignment_step, launch_command, make_script
from ddp_tutorial.processes.errors import RankError

COMMANDS = ["start", "status", "stop", "restart", "get", "put", "rate", "script"]
_ASKS = re.compile(r"([\w.\[\]'\"]+)(\?{1,2})")


class MagicError(ConfigError):
    """Raised when a magic is called incorrectly. A notebook shows only the message, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return f"{type(self).__name__}: {self}".split("\n")


class _Parser(argparse.ArgumentParser):
    """Argument parser that raises `MagicError` for invalid arguments instead of exiting."""

    def error(self, message: str) -> NoReturn:
        """Raise `MagicError` with the message."""
        raise MagicError(f"%ranks {self.prog}: {message}")


@magics_class
class RankMagics(Magics):
    """The magics of one notebook, and the ranks that they have started."""

    def __init__(self, shell: Any) -> None:
        """Create the magics for an IPython shell, without starting ranks."""
        super().__init__(shell)
        self.notebook = shell
        self.pool: Ranks | None = None
        self.steps: list[ScriptStep] = []

    @line_cell_magic
    def ranks(self, line: str, cell: str | None = None) -> Any:
        """Run cells on live ranks, which keep their variables from cell to cell.

        %ranks start -n 2      Start two ranks in place of the current ranks. More options:
               [--threads 1] [--device cpu] [--backend gloo] [--wait-timeout 10]
               [--nodes 2 [--rate 1gbit] [--delay 0.5ms]]
                               Run half of the ranks on each of two simulated hosts. --rate and --delay apply to the
                               link between the hosts (Linux; see ddp_tutorial.cluster).
        %ranks status          Show the state and the location of each rank.
        %ranks restart [--all] Restart the dead ranks. With --all, or if no rank is dead, restart all ranks.
        %ranks stop            Stop the ranks.
        %ranks get NAME        Return the values of NAME as a list, and assign the list to NAME in the notebook.
        %ranks put NAME        Copy the notebook's variable NAME to all ranks.
        %ranks rate 100mbit    Set the rate of the links between nodes.
        %ranks script out.py   Write all cells executed so far to a script for torchrun. The script omits
                               non-numeric values assigned with %ranks put.

        %%ranks                Run the cell on all ranks. Select ranks with %%ranks 0, %%ranks 1-3 or %%ranks 0,2;
                               %%rank0 selects rank 0.
        %%ranks --raises       Run a cell that must fail, and print its error. The notebook then continues.
        """
        if cell is not None:
            return self._cell(line, cell)
        try:
            command, *arguments = shlex.split(line) or [""]
        except ValueError:
            raise MagicError(f"%ranks {line}: a quotation mark must be closed") from None
        if command not in COMMANDS:
            raise MagicError(
                f"the %ranks command must be one of {', '.join(COMMANDS)}, got {command!r}."
                f"{did_you_mean(command, COMMANDS)}"
            )
        try:
            return getattr(self, command)(arguments)
        except ConfigError as error:  # the message is sufficient without a traceback
            raise MagicError(str(error)) from None

    @cell_magic
    def rank0(self, line: str, cell: str) -> RankResults | None:
        """Run a cell on rank 0 only."""
        return self._cell("0", cell)

    def start(self, arguments: Sequence[str]) -> None:
        """Start new ranks, and stop the current ranks."""
        parser = _Parser("start", add_help=False)
        parser.add_argument("-n", type=int, default=2)
        parser.add_argument("--threads", type=int)
        parser.add_argument("--wait-timeout", type=float, default=10.0)
        parser.add_argument("--device", default="auto")
        parser.add_argument("--backend", default="auto")
        parser.add_argument("--nodes", type=int)
        parser.add_argument("--rate")
        parser.add_argument("--delay")
        asked = vars(parser.parse_args(arguments))
        nodes, rate, delay = (asked.pop(name) for name in ("nodes", "rate", "delay"))
        if nodes is None and (rate or delay):
            raise MagicError("--rate and --delay require --nodes: add, for example, --nodes 2")
        cluster = None if nodes is None else Cluster(nodes, rate, delay)
        pool = Ranks(asked.pop("n"), cluster=cluster, **asked)
        self.end()
        self.pool = pool
        self.steps = []
        print(self.pool.description)

    def status(self, arguments: Sequence[str]) -> None:
        """Print the state and the location of each rank."""
        _Parser("status", add_help=False).parse_args(arguments)
        pool = self._alive()
        for each in pool.status():
            on = f" on {each['node']}" if each["node"] else ""
            more = f", process {each['pid']}, {each['memory'] / 1e6:.0f} MB" if each["pid"] else ""
            print(f"rank {each['rank']}{on}: {each['state']}{more}")
        if pool.cluster:
            print(f"{pool.nodes} node{'s' if pool.nodes > 1 else ''}, {pool.cluster.description}")

    def stop(self, arguments: Sequence[str]) -> None:
        """Stop the ranks."""
        _Parser("stop", add_help=False).parse_args(arguments)
        self._alive()
        self.end()

    def restart(self, arguments: Sequence[str]) -> None:
        """Restart the dead ranks. With `--all`, or if no rank is dead, restart all ranks."""
        parser = _Parser("restart", add_help=False)
        parser.add_argument("--all", action="store_true")
        everything = parser.parse_args(arguments).all
        pool = self._alive()
        restarted = pool.restart(everything=everything or None)
        if len(restarted) == pool.n:
            self.steps = []
            print(f"restarted: {pool.description}")
        else:
            print(f"restarted: {named_ranks(restarted)}; the other ranks keep their variables")

    def get(self, arguments: Sequence[str]) -> list[Any]:
        """Return the value of a name on each rank, as a list.

        If the argument is a plain name, the list is also assigned to that name in the notebook.
        """
        [name] = self._names("get", arguments)
        values = self._alive().get(name)
        if name.isidentifier():
            self.notebook.user_ns[name] = values
        return values

    def put(self, arguments: Sequence[str]) -> None:
        """Copy variables of this notebook to all ranks."""
        names, variables = self._names("put", arguments), self.notebook.user_ns
        for name in names:
            if name not in variables:
                raise MagicError(f"%ranks put {name}: this notebook has no variable {name!r}")
        values = {name: variables[name] for name in names}
        self._alive().assign(values)
        self.steps += [assignment_step(name, value) for name, value in values.items()]

    def rate(self, arguments: Sequence[str]) -> None:
        """Set the rate of the links between nodes."""
        [rate] = self._names("rate", arguments, "one rate, for example: %ranks rate 100mbit")
        cluster = self._alive().cluster
        if cluster is None:
            raise MagicError(
                "%ranks rate requires ranks on different nodes, but all ranks run on one node. Start ranks on two "
                "nodes with: %ranks start -n 2 --nodes 2"
            )
        cluster.set_rate(rate)
        print(cluster.description)

    def script(self, arguments: Sequence[str]) -> None:
        """Write all cells executed so far to one script for torchrun. Only the current user can read the file.

        The script omits cells that failed, and non-numeric values assigned with `put`.
        """
        [given] = self._names("script", arguments, "one file name, for example: %ranks script out.py")
        pool, path = self._alive(), Path(given).expanduser()
        name = str(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = make_script(self.steps, name, pool.n, pool.threads, pool.device, pool.backend, pool.nodes)
        write_atomically(path, text.encode(), mode=0o600)
        print(f"{name}: {launch_command(name, pool.n, pool.nodes)}")
        if lacking := dict.fromkeys(step.lacks for step in self.steps if step.lacks):
            print(
                f"First assign a value to {', '.join(lacking)} in the script. The script contains values from %ranks "
                "put only if they are numbers."
            )

    def end(self) -> None:
        """Stop the ranks if they are running."""
        if self.pool is not None:
            self.pool.stop()
        self.pool = None

    def _cell(self, line: str, cell: str) -> RankResults | None:
        pool = self._alive()
        if line.startswith("--raises"):
            self._raises(line.removeprefix("--raises").strip(), cell)
            return None
        on = _ranks_of(line, pool.n)
        if asked := _ASKS.fullmatch(cell.strip()):
            print(pool.ask("inspect", asked[1], len(asked[2]) - 1, rank=on[0] if on else 0))
            return None
        whole = f"%%ranks {line}".rstrip() + f"\n{cell}"
        name = f"Cell In[{len(self.notebook.history_manager.input_hist_parsed) - 1}]"  # begins with an empty In[0]
        values = pool.execute(cell, on, name=name, cell=whole, offset=1)
        self.steps.append(ScriptStep(cell, tuple(on) if on is not None else None))
        return values if values else None

    def _raises(self, line: str, cell: str) -> None:
        try:
            self._cell(line, cell)
        except (RankError, CollectiveError) as error:
            print(f"{type(error).__name__}: {error}")
        else:
            raise MagicError("%%ranks --raises: the cell must fail on at least one rank, but it succeeded")

    def _alive(self) -> Ranks:
        if self.pool is None:
            raise MagicError("no ranks are running. Start them with: %ranks start -n 2")
        return self.pool

    def _names(self, command: str, arguments: Sequence[str], wanted: str = "") -> Sequence[str]:
        if not arguments or (command != "put" and len(arguments) > 1):
            raise MagicError(f"%ranks {command} requires {wanted or f'one name, for example: %ranks {command} loss'}")
        return arguments


def _ranks_of(text: str, n: int) -> list[int] | None:
    """Parse ranks such as `"0"`, `"1-3"` or `"0,2"`. Return None if `text` is empty, which selects all ranks."""
    if not text.strip():
        return None
    found: list[int] = []
    for part in re.split(r"[,\s]+", text.strip()):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        chosen = range(int(match[1]), int(match[2] or match[1]) + 1) if match else ()
        if not chosen:
            raise MagicError(f"%%ranks {text}: ranks must be specified as in %%ranks 0, %%ranks 1-3 or %%ranks 0,2")
        found += chosen
    if wrong := [rank for rank in found if rank >= n]:
        raise MagicError(f"%%ranks {text}: ranks must be between 0 and {n - 1}, got {wrong[0]}")
    return sorted(set(found))


def load(shell: Any) -> None:
    """Register the magics with an IPython shell, and complete names in `%%ranks` cells from rank 0's namespace."""
    magics = RankMagics(shell)
    shell.register_magics(magics)

    @context_matcher()  # type: ignore[untyped-decorator]
    def complete(context: CompletionContext) -> SimpleMatcherResult:
        found: list[str] = []
        if magics.pool is not None and context.full_text.startswith("%%rank") and context.cursor_line and context.token:
            with suppress(Exception):  # rank 0 is busy or dead, so no completions are available
                found = magics.pool.ask("names", context.token)
        return {"completions": [SimpleCompletion(text=each, type="on rank 0") for each in found]}

    shell.Completer.custom_matchers.append(complete)


def unload(shell: Any) -> None:
    """Stop the ranks."""
    magics = shell.magics_manager.registry.get(RankMagics.__name__)
    if magics is not None:
        magics.end()
