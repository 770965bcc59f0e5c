"""Show the ranks' output and one progress bar.

In a terminal, each line appears as soon as a rank prints it, prefixed with the rank. In a notebook, the lines appear
after the ranks have exited, grouped by rank. A cell's output is therefore the same in every run, so tests can compare
it. No line appears under the wrong cell. While the ranks run, a live area shows their most recent lines.
"""

import base64
import codecs
import html
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TextIO

# Maximum number of lines kept per rank for the notebook and for error messages. This bounds the memory use.
KEPT_LINES = 2_000
# Maximum number of characters in a line. Longer lines are split.
LONGEST_LINE = 1 << 14
# Seconds between two progress lines if stderr is redirected to a file.
PROGRESS_SECONDS = 10.0
# Seconds before the live area of a notebook appears. Most cells of live ranks finish sooner.
LIVE_SECONDS = 0.5
# Minimum number of seconds between two updates of the live area.
REFRESH_SECONDS = 0.2
# Number of lines per rank in the live area.
LIVE_LINES = 3
# Metadata of the progress bar's output, so that a tool can remove the bar when it saves a notebook.
PROGRESS = {"ddp_tutorial": "progress"}


class RankLog:
    """Line buffer for one rank's output. The buffer displays every line, and stores the last `KEPT_LINES` lines."""

    def __init__(
        self, rank: int, show: Callable[[int, str], None], edit: Callable[[str], str] = lambda line: line
    ) -> None:
        """Create an empty log that calls `show(rank, edit(line))` for each line."""
        self.rank = rank
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.dropped = 0
        self._show, self._edit = show, edit
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._partial = ""

    def feed(self, data: bytes, *, final: bool = False) -> None:
        """Decode `data`, and show its complete lines. If `final` is true, also show an incomplete last line."""
        text = self._partial + self._decoder.decode(data, final)
        *lines, rest = text.split("\n")
        if final and rest:
            lines, rest = [*lines, rest], ""
        for line in lines:
            self._take(_pieces(line))
        *full, unfinished = _pieces(rest)
        self._take(full)
        # Text before a carriage return is overwritten, so it is dropped. A trailing "\r" may be the first half of
        # "\r\n".
        self._partial = unfinished + ("\r" if rest.endswith("\r") else "")

    def _take(self, lines: list[str]) -> None:
        for line in map(self._edit, lines):
            self.dropped += len(self.lines) == KEPT_LINES
            self.lines.append(line)
            self._show(self.rank, line)

    def tail(self, count: int = 20) -> str:
        """Return the last `count` lines as one string."""
        return "\n".join(list(self.lines)[-count:])


def _pieces(line: str) -> list[str]:
    """Return a line as a terminal would display it, split into chunks of at most `LONGEST_LINE` characters.

    A carriage return overwrites the last chunk of the preceding text. Earlier chunks are complete, and are preserved
    because they have already been displayed.
    """
    pieces: list[str] = []
    for state in line.removesuffix("\r").split("\r"):
        pieces = pieces[:-1]  # overwritten
        pieces += [state[start : start + LONGEST_LINE] for start in range(0, len(state) or 1, LONGEST_LINE)]
    return pieces


class Console:
    """Base class of the consoles that show the ranks' output and progress. The base class itself shows nothing."""

    environment: ClassVar[dict[str, str]] = {}  # variables to set in the ranks

    def line(self, rank: int, text: str) -> None:
        """Show one line that a rank printed."""

    def message(self, text: str) -> None:
        """Show one message line from the launcher."""

    def status(self, text: str) -> None:
        """Show the status of the ranks, such as "starting 2 ranks"."""

    def tick(self) -> None:
        """Update the elapsed time. Call this method about once per second while the ranks run."""

    def progress(self, done: int, total: int, numbers: dict[str, Any]) -> None:
        """Show rank 0's progress in steps, and the values in `numbers` beside the bar."""

    def figure(self, rank: int, png: bytes) -> None:
        """Show a PNG image that a rank sent."""

    def close(self, logs: Iterable[RankLog] = ()) -> None:
        """Finish the output after all ranks have exited."""


class TerminalConsole(Console):
    """Console that prints lines immediately, and shows a progress bar on stderr.

    If stderr is not a terminal, the console prints a progress line instead of the bar, at most once every
    `PROGRESS_SECONDS` seconds.
    """

    def __init__(self, out: TextIO | None = None) -> None:
        """Create a console that prints to `out`, by default to `sys.stdout`."""
        self.out = out or sys.stdout
        self.bar: Any = None
        self.printed = time.monotonic()  # the time of the last progress line

    def line(self, rank: int, text: str) -> None:
        """Print one line, prefixed with the rank."""
        self.message(f"[rank {rank}] {text}")

    def message(self, text: str) -> None:
        """Print one line above the progress bar. Characters that the output cannot encode are replaced."""
        encoding = getattr(self.out, "encoding", None) or "utf-8"
        text = text.encode(encoding, "replace").decode(encoding)
        if self.bar is not None:
            self.bar.write(text, file=self.out)
        else:
            print(text, file=self.out, flush=True)

    def progress(self, done: int, total: int, numbers: dict[str, Any]) -> None:
        """Update the progress bar, or print a progress line if one is due. The first call creates the bar."""
        if not sys.stderr.isatty():
            if time.monotonic() - self.printed >= PROGRESS_SECONDS:
                self.printed = time.monotonic()
                print(f"step {done}/{total}: {describe(numbers)}", file=sys.stderr, flush=True)
            return
        if self.bar is None:
            from tqdm import tqdm  # imported only if a bar is shown

            self.bar = tqdm(total=total, file=sys.stderr, leave=True, dynamic_ncols=True)
        self.bar.total = total
        self.bar.set_postfix_str(describe(numbers), refresh=False)
        self.bar.update(done - self.bar.n)

    def close(self, logs: Iterable[RankLog] = ()) -> None:
        """Close the progress bar."""
        if self.bar is not None:
            self.bar.close()


class NotebookConsole(Console):
    """Console that shows the ranks' lines and figures after the ranks have exited, grouped by rank.

    While the ranks run, the console shows a progress bar. If the cell is run interactively, the console also shows a
    live area with the status, the elapsed time and each rank's latest lines. If a program executes the notebook, there
    is no live area, so that the outputs are the same in every run. The bar and the live area are plain HTML rather than
    widgets. Jupyter does not save the state of a widget, so a reopened notebook would show an error instead.
    """

    environment: ClassVar[dict[str, str]] = {"MPLBACKEND": "module://ddp_tutorial.processes.figures"}

    def __init__(self) -> None:
        """Create an empty console."""
        self.messages: list[str] = []
        self.figures: list[tuple[int, bytes]] = []
        self.area: Any = None  # the display of the bar and the live area
        self.bar: tuple[str, str] | None = None  # the progress as text and as HTML
        self.is_live = a_person_is_there()
        self.now = "running"
        self.last_lines: dict[int, deque[str]] = {}
        self.created = self.drawn = time.monotonic()

    def line(self, rank: int, text: str) -> None:
        """Show a line in the live area."""
        self.last_lines.setdefault(rank, deque(maxlen=LIVE_LINES)).append(text)
        self.tick()

    def message(self, text: str) -> None:
        """Store a message line from the launcher until `close` prints the line."""
        self.messages.append(text)

    def status(self, text: str) -> None:
        """Show the status in the live area."""
        self.now = text
        self.tick()

    def tick(self) -> None:
        """Redraw the live area, at most once every `REFRESH_SECONDS` seconds."""
        now = time.monotonic()
        if self.is_live and now - self.created >= LIVE_SECONDS and now - self.drawn >= REFRESH_SECONDS:
            self._draw(live=True)

    def progress(self, done: int, total: int, numbers: dict[str, Any]) -> None:
        """Update the progress bar. The first call displays it."""
        text = f"{done}/{total}  {describe(numbers)}"
        self.bar = text, f'<progress value="{done}" max="{total}"></progress> {html.escape(text)}'
        self._draw(live=self.is_live)

    def _draw(self, *, live: bool) -> None:
        """Draw the progress bar, if it exists. If `live` is true, also draw the live area below the bar."""
        if self.area is None:
            from IPython.display import display

            # The first display is empty, because nbval compares it but ignores later updates.
            self.area = display({}, raw=True, display_id=True)
        self.drawn = time.monotonic()
        text, markup = self.bar or ("", "")
        if live:
            lines = [f"{self.now}, {self.drawn - self.created:.0f} s"]
            lines += [f"[rank {rank}] {line}" for rank in sorted(self.last_lines) for line in self.last_lines[rank]]
            text = "\n".join([*filter(None, [text]), *lines])
            shown = html.escape("\n".join(lines))
            markup += f'<pre style="opacity: 0.6; white-space: pre-wrap; overflow-wrap: anywhere">{shown}</pre>'
        self.area.update({"text/plain": text, "text/html": markup}, raw=True, metadata=PROGRESS)

    def figure(self, rank: int, png: bytes) -> None:
        """Store a figure until `close` displays the figure."""
        self.figures.append((rank, png))

    def close(self, logs: Iterable[RankLog] = ()) -> None:
        """Remove the live area, print the messages and the ranks' lines, then display the figures in rank order."""
        if self.is_live and self.area is not None:
            self._draw(live=False)
        self.is_live = False
        lines = list(self.messages)
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
    """Format metrics as one line.

    Example:
        `{"loss": 2.1234, "tokens_per_second": 31234.5}` becomes `"loss 2.123, 31,234 tokens/s"`.
    """
    rates = {name.removesuffix("_per_second"): numbers[name] for name in numbers if name.endswith("_per_second")}
    others = {name: value for name, value in numbers.items() if name.removesuffix("_per_second") not in rates}
    parts = [f"{name.replace('_', ' ')} {value:.4g}" for name, value in others.items() if value is not None]
    return ", ".join(parts + [f"{rate:,.0f} {unit}/s" for unit, rate in rates.items() if rate])


def in_notebook() -> bool:
    """Return whether this process is a Jupyter kernel, as under JupyterLab, papermill or nbval.

    IPython in a terminal is not a Jupyter kernel.
    """
    return getattr(ipython_shell(), "kernel", None) is not None


def a_person_is_there() -> bool:
    """Return whether this cell was run interactively.

    For each cell, the front end reports whether it can ask a user for input. JupyterLab can ask for input, but programs
    that execute notebooks cannot. Without a kernel, for example in a script, the result is False.
    """
    kernel = getattr(ipython_shell(), "kernel", None)
    return kernel is not None and bool(kernel.get_parent().get("content", {}).get("allow_stdin"))


def ipython_shell() -> Any:
    """Return the IPython shell that runs the cells of this process, or None outside IPython."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython else None


def make_console(echo: bool) -> Console:
    """Return the console for a notebook or a terminal, or a silent console if `echo` is false."""
    if not echo:
        return Console()
    return NotebookConsole() if in_notebook() else TerminalConsole()
