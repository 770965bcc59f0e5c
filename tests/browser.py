"""Run JupyterLab as `make lab` does, and operate notebooks in a real browser with mouse and keyboard."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ADVICE = "chromium not installed (Debian: chromium)"
SETTINGS = Path(__file__).parent.parent / "notebooks" / ".jupyter"  # as `make lab` does
NEWS = "@jupyterlab/apputils-extension/notification.jupyterlab-settings"  # their dialog would cover the page
# In the page: the visible notebook, its cells and its kernel.
HERE = "const panel = window.jupyterapp.shell.currentWidget, nb = panel.content, kernel = panel.sessionContext;"
READY = "kernel.session?.kernel?.status === 'idle' && nb.widgets.every(cell => !cell.isPlaceholder())"


@contextmanager
def jupyterlab(folder: Path) -> Iterator[str]:
    """Run JupyterLab in `folder` with its own settings. Yield the address of its pages.

    All of its processes end with the block.
    """
    own = Path(tempfile.mkdtemp(prefix="lab"))
    places = {name: own / name.lower() for name in ("CONFIG_DIR", "RUNTIME_DIR")}
    environment = os.environ | {f"JUPYTER_{name}": str(path) for name, path in places.items()}
    environment["JUPYTER_CONFIG_PATH"] = str(SETTINGS)
    environment |= {f"JUPYTERLAB_{name}_DIR": str(own / name.lower()) for name in ("SETTINGS", "WORKSPACES")}
    settings = own / "settings" / NEWS
    settings.parent.mkdir(parents=True)
    settings.write_text(json.dumps({"fetchNews": "false"}))
    command = [sys.executable, "-m", "jupyterlab", str(folder), "--no-browser", "--ip=127.0.0.1", "--port=0"]
    command += ["--expose-app-in-browser", *(["--allow-root"] if os.geteuid() == 0 else [])]
    with (own / "log").open("w") as log:
        lab = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 300
        while not (server := _described_server(places["RUNTIME_DIR"])):
            assert lab.poll() is None, (own / "log").read_text()
            assert time.monotonic() < deadline, (own / "log").read_text()
            time.sleep(0.1)
        yield f"http://127.0.0.1:{server['port']}/lab/tree/{{name}}?reset&token={server['token']}"
    finally:
        _end(lab)
        shutil.rmtree(own, ignore_errors=True)


def _described_server(folder: Path) -> dict[str, Any]:
    """Return the description that JupyterLab writes to `folder`. It is empty until the file is complete."""
    for path in folder.glob("jpserver-*.json"):
        with suppress(json.JSONDecodeError):
            return json.loads(path.read_text())
    return {}


def _end(lab: "subprocess.Popen[bytes]") -> None:
    """Interrupt JupyterLab and confirm, then kill remaining processes."""
    started = psutil.Process(lab.pid).children(recursive=True)
    lab.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        lab.wait(15)
    for process in psutil.wait_procs(started, timeout=5)[1]:
        with suppress(psutil.Error):
            process.kill()
    lab.kill()
    lab.wait()


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        yield browser
        browser.close()


class Notebook:
    """A notebook that is open in a page. Cells and their texts are counted from 0."""

    def __init__(self, page: Page, address: str, name: str) -> None:
        self.page = page
        page.goto(address.format(name=name))
        self.until("!!window.jupyterapp?.shell.currentWidget?.content?.widgets", "open", here="")
        self.until(READY, "ready")

    def ask(self, script: str, *, here: str = HERE) -> Any:
        return self.page.evaluate(f"async () => {{ {here} return {script}; }}")

    def until(self, script: str, what: str, seconds: float = 300, *, here: str = HERE) -> None:
        """Wait until the application reports the condition."""
        deadline = time.monotonic() + seconds
        while not self.ask(script, here=here):
            assert time.monotonic() < deadline, f"{what}: not within {seconds} s; {self.outputs()}"
            self.page.wait_for_timeout(100)

    def cell(self, start: str) -> int:
        """Return the cell whose source starts with this text."""
        return next(
            i
            for i, text in enumerate(self.ask("nb.widgets.map(cell => cell.model.sharedModel.getSource())"))
            if text.startswith(start)
        )

    def outputs(self, cell: int | None = None) -> list[dict[str, Any]]:
        """Return the outputs of a cell, or of all cells."""
        found = self.ask("nb.widgets.map(cell => cell.model.outputs ? cell.model.outputs.toJSON() : [])")
        return found[cell] if cell is not None else [output for each in found for output in each]

    def text(self, cell: int) -> str:
        """Return the text of the cell's outputs: streams, results, and the name and message of an error."""
        return "\n".join(map(_text, self.outputs(cell)))

    def menu(self, *path: str) -> None:
        for kind, label in zip([".lm-MenuBar-itemLabel", ".lm-Menu-itemLabel"], path, strict=True):
            self.page.locator(kind, has_text=label).filter(visible=True).first.click()

    def show(self, cell: int) -> None:
        """Select the cell and scroll to it, because a cell out of view is not in the page."""
        self.ask(f"(nb.activeCellIndex = {cell}, await nb.scrollToItem({cell}, 'center'), true)")

    def start(self, cell: int) -> None:
        """Run the cell without waiting."""
        self.ask(f"(nb.widgets[{cell}].model.executionCount = null, true)")
        self.show(cell)
        self.page.locator(".jp-Notebook-cell.jp-mod-active .cm-content").click()
        self.page.keyboard.press("Control+Enter")
        self.until(f"nb.widgets[{cell}].model.executionState === 'running' || {done(cell)}", f"cell {cell} runs")

    def wait_for(self, cell: int, seconds: float = 300) -> str:
        self.until(f"{READY} && {done(cell)}", f"cell {cell} done", seconds)
        return self.text(cell)

    def run(self, cell: int, seconds: float = 300) -> str:
        """Run the cell and return its text."""
        self.start(cell)
        return self.wait_for(cell, seconds)

    def write(self, cell: int, source: str) -> None:
        """Replace the source of the cell by typing."""
        self.show(cell)
        self.page.locator(".jp-Notebook-cell.jp-mod-active .cm-content").click()
        self.page.keyboard.press("Control+A")
        self.page.keyboard.insert_text(source)
        assert self.ask(f"nb.widgets[{cell}].model.sharedModel.getSource()") == source

    def errors(self) -> list[str]:
        return [_text(output) for output in self.outputs() if output["output_type"] == "error"]


def done(cell: int) -> str:
    model = f"nb.widgets[{cell}].model"
    return f"({model}.executionState === 'idle' && {model}.executionCount)"


def _text(output: dict[str, Any]) -> str:
    if output["output_type"] == "error":
        return f"{output['ename']}: {output['evalue']}"
    found = output.get("text") or output.get("data", {}).get("text/plain", "")
    return found if isinstance(found, str) else "".join(found)
