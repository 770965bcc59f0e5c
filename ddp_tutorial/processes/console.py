"""What a person sees of the ranks while they run: their output in order, and one progress bar.

In a terminal, lines appear as they come, each marked with its rank. In a notebook they are printed when the
ranks have ended, grouped by rank: a cell's output is then the same each time it runs, so that it can be
compared in a test, and nothing lands in another cell.
"""

import base64
import codecs
import html
import sys
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TextIO

# Lines of one rank that are kept for the notebook and for error messages; a runaway print must not fill memory.
KEPT_LINES = 2_000
# Characters of a line; what has no newline for longer is shown, and kept, as several lines.
LONGEST_LINE = 1 << 14
# Of the output that is a notebook's progress bar: whoever saves a notebook without what differs each time can find it.
PROGRESS = {"ddp_tutorial": "progress"}


class RankLog:
    """Turns the bytes that one rank writes into lines, each of them passed through `edit`, and keeps the last."""

    def __init__(
        self, rank: int, show: Callable[[int, str], None], edit: Callable[[str], str] = lambda line: line
    ) -> None:
        self.rank = rank
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.dropped = 0
        self._show, self._edit = show, edit
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._partial = ""

    def feed(self, data: bytes, *, final: bool = False) -> None:
        """Take bytes that the rank has written, and show the lines that are whole; with `final` also what is left."""
        text = self._partial + self._decoder.decode(data, final)
        *lines, rest = text.split("\n")
        if final and rest:
            lines, rest = [*lines, rest], ""
        for line in lines:
            self._take(_pieces(line))
        *full, unfinished = _pieces(rest)
        self._take(full)
        # what a carriage return has overwritten is not needed, except that this might be half of "\r\n"
        self._partial = unfinished + ("\r" if rest.endswith("\r") else "")

    def _take(self, lines: list[str]) -> None:
        for line in map(self._edit, lines):
            self.dropped += len(self.lines) == KEPT_LINES
            self.lines.append(line)
            self._show(self.rank, line)

    def tail(self, count: int = 20) -> str:
        """The last `count` lines, as one text."""
        return "\n".join(list(self.lines)[-count:])


def _pieces(line: str) -> list[str]:
    """What a terminal would show at last of a line that was redrawn in place with carriage returns, in pieces of
    `LONGEST_LINE`; before it, the pieces of earlier states that were full, and so shown, before they were redrawn."""
    pieces: list[str] = []
    for state in line.removesuffix("\r").split("\r"):
        pieces = pieces[:-1]  # drawn over
        pieces += [state[start : start + LONGEST_LINE] for start in range(0, len(state) or 1, LONGEST_LINE)]
    return pieces


class Console:
    """Where the output and the progress of ranks go. This base class shows nothing."""

    environment: ClassVar[dict[str, str]] = {}  # variables for ranks that are shown here

    def line(self, rank: int, text: str) -> None:
        """One line that a rank printed."""

    def message(self, text: str) -> None:
        """One line from the launcher itself."""

    def progress(self, done: int, total: int, numbers: dict[str, Any]) -> None:
        """Rank 0 says how far it is."""

    def figure(self, rank: int, png: bytes) -> None:
        """A rank shows a picture."""

    def close(self, logs: Iterable[RankLog]) -> None:
        """All ranks have ended."""


class TerminalConsole(Console):
    """Live lines with the rank in front; a bar on stderr where that is a terminal."""

    def __init__(self, out: TextIO | None = None) -> None:
        self.out = out or sys.stdout
        self.bar: Any = None

    def line(self, rank: int, text: str) -> None:
        self.message(f"[rank {rank}] {text}")

    def message(self, text: str) -> None:
        if self.bar is not None:
            self.bar.write(text, file=self.out)
        else:
            print(text, file=self.out, flush=True)

    def progress(self, done: int, total: int, numbers: dict[str, Any]) -> None:
        if self.bar is None:
            from tqdm import tqdm  # only where a bar is shown

            self.bar = tqdm(total=total, disable=None, file=sys.stderr, leave=True, dynamic_ncols=True)
        self.bar.total = total
        self.bar.set_postfix_str(describe(numbers), refresh=False)
        self.bar.update(done - self.bar.n)

    def close(self, logs: Iterable[RankLog]) -> None:
        if self.bar is not None:
            self.bar.close()


class NotebookConsole(Console):
    """A bar while the ranks run; their lines, and then their figures, grouped by rank, at the end.

    The bar is HTML and no widget: a widget's state is not saved with a notebook, which would show an error in its place
    when it is opened again.
    """

    environment: ClassVar[dict[str, str]] = {"MPLBACKEND": "module://ddp_tutorial.processes.figures"}

    def __init__(self) -> None:
        self.said: list[str] = []
        self.figures: list[tuple[int, bytes]] = []
        self.bar: Any = None

    def message(self, text: str) -> None:
        self.said.append(text)

    def progress(self, done: int, total: int, numbers: dict[str, Any]) -> None:
        if self.bar is None:
            from IPython.display import display

            # Empty at first: nbval compares what is displayed, but reads no updates of it.
            self.bar = display({}, raw=True, display_id=True)
        text = f"{done}/{total}  {describe(numbers)}"
        bar = f'<progress value="{done}" max="{total}"></progress> {html.escape(text)}'
        self.bar.update({"text/plain": text, "text/html": bar}, raw=True, metadata=PROGRESS)

    def figure(self, rank: int, png: bytes) -> None:
        self.figures.append((rank, png))

    def close(self, logs: Iterable[RankLog]) -> None:
        lines = list(self.said)
        for log in logs:
            if log.dropped:
                lines.append(f"[rank {log.rank}] ({log.dropped} earlier lines dropped)")
            lines += [f"[rank {log.rank}] {line}" for line in log.lines]
        if lines:
            print("\n".join(lines))
        for rank, png in sorted(self.figures, key=lambda each: each[0]):
            from IPython.display import display

            print(f"[rank {rank}]", flush=True)
            picture = {"text/plain": "<Figure>", "image/png": base64.b64encode(png).decode()}
            display(picture, raw=True)


def describe(numbers: dict[str, Any]) -> str:
    """`{"loss": 2.1234, "tokens_per_second": 31234.5}` -> `"loss 2.123, 31,234 tokens/s"`."""
    rates = {name.removesuffix("_per_second"): numbers[name] for name in numbers if name.endswith("_per_second")}
    others = {name: value for name, value in numbers.items() if name.removesuffix("_per_second") not in rates}
    parts = [f"{name.replace('_', ' ')} {value:.4g}" for name, value in others.items() if value is not None]
    return ", ".join(parts + [f"{rate:,.0f} {unit}/s" for unit, rate in rates.items() if rate])


def in_notebook() -> bool:
    """True inside a Jupyter kernel (JupyterLab, papermill, nbval), false in a terminal, IPython's too."""
    return getattr(ipython_shell(), "kernel", None) is not None


def ipython_shell() -> Any:
    """The IPython that this process runs cells in, in a Jupyter kernel or a terminal; None where it is neither."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython else None


def make_console(echo: bool) -> Console:
    if not echo:
        return Console()
    return NotebookConsole() if in_notebook() else TerminalConsole()
