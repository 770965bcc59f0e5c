"""`launch` in a Jupyter kernel, as JupyterLab runs it: cells, interrupts, and the kernel's exit."""

import base64
import io
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output
from PIL import Image

from ddp_tutorial.experiments.notebooks import tidy
from kernel import Kernel
from ranks import wait_until

ROOT = Path(__file__).parent.parent
HANG = """
import os, time
from ddp_tutorial import launch
def hang(world):
    open(f"{folder}/{world.rank}", "w").write(str(os.getpid()))
    time.sleep(1000)
launch(hang, 2, device="cpu")
"""


@pytest.fixture
def kernel(tmp_path):
    kernel = Kernel(tmp_path)
    yield kernel
    kernel.end()


def pids_in(folder, count=2):
    """Return the process IDs of the ranks, once all have written them."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        found = [path.read_text() for path in folder.iterdir()]
        if len(found) == count and all(found):
            return [int(text) for text in found]
        time.sleep(0.05)
    raise TimeoutError("the ranks did not start")


def gone(pids):
    return wait_until(lambda: not any(map(psutil.pid_exists, pids)))


def test_functions_and_classes_of_cells_work_and_output_is_grouped(kernel):
    said = kernel.run(
        "from dataclasses import dataclass\n"
        "from ddp_tutorial import launch\n"
        "@dataclass\n"
        "class Found:\n"
        "    rank: int\n"
        "offset = 10\n"
        "def work(world):\n"
        "    for i in range(3):\n"
        "        print('line', i, flush=True)\n"
        "    return Found(world.rank + offset)\n"
        "found = launch(work, 2)\n"
        "print(found, isinstance(found[0], Found), launch(lambda world: world.size, 2, device='cpu'))\n"
    )
    assert not said["error"]
    assert said["printed"].splitlines() == [
        "2 ranks on cpu, gloo",
        *[f"[rank {rank}] line {i}" for rank in (0, 1) for i in range(3)],
        "[Found(rank=10), Found(rank=11)] True [2, 2]",
    ]


def test_progress_is_an_html_bar_that_is_not_saved_with_a_notebook(kernel):
    said = kernel.run(
        "from ddp_tutorial import launch\n"
        "def work(world):\n"
        "    from ddp_tutorial.processes.rank import progress\n"
        "    for done in (1, 2):\n"
        "        progress(done, 2, loss=1 / done)\n"
        "launch(work, 2, device='cpu', echo=True)\n"
    )
    assert said["shown"] == [{}]  # nbval compares the displayed output, but not its updates
    assert [data["text/plain"] for data, _ in said["updates"]] == ["1/2  loss 1", "2/2  loss 0.5"]
    data, metadata = said["updates"][-1]
    assert data["text/html"] == '<progress value="2" max="2"></progress> 2/2  loss 0.5'
    cell = new_code_cell("x", outputs=[new_output("display_data", data=data, metadata=metadata)])
    tidy(new_notebook(cells=[cell]))
    assert cell.outputs == []


def test_a_person_sees_what_the_ranks_do_while_they_run(kernel, tmp_path):
    """The ranks run until the kernel has shown that they run, and what rank 1 has printed."""

    def release_ranks(text):
        if text.startswith("running, ") and "[rank 1] a line" in text:
            (tmp_path / "seen").touch()

    said = kernel.run(
        "import time\n"
        "from pathlib import Path\n"
        "from ddp_tutorial import launch\n"
        "def work(world):\n"
        "    print('a line', flush=True)\n"
        "    while not Path('seen').exists():\n"
        "        time.sleep(0.05)\n"
        "launch(work, 2, device='cpu')\n",
        person=True,
        on_update=release_ranks,
    )
    texts = [data["text/plain"] for data, _ in said["updates"]]
    assert texts[0].startswith("starting 2 ranks, ")
    assert (tmp_path / "seen").exists()
    assert texts[-1] == ""
    assert said["printed"] == "[rank 0] a line\n[rank 1] a line\n"


def test_a_hidden_cell_stays_hidden():
    hidden = {"source_hidden": True}
    cell = new_code_cell("assert True", metadata={"jupyter": hidden, "collapsed": True})
    tidy(new_notebook(cells=[cell]))
    assert cell.metadata == {"jupyter": hidden}


@pytest.mark.parametrize("opacity", [255, 128])
def test_an_image_is_stored_in_fewer_bytes_with_the_same_pixels(opacity):
    drawn = Image.new("RGBA", (300, 200), (255, 255, 255, opacity))
    drawn.paste((0, 114, 178, 255), (40, 30, 250, 90))
    buffer = io.BytesIO()
    drawn.save(buffer, "PNG", compress_level=1)
    cell = new_code_cell(
        "x", outputs=[new_output("display_data", {"image/png": base64.b64encode(buffer.getvalue()).decode()})]
    )
    tidy(new_notebook(cells=[cell]))
    kept = cell.outputs[0].data["image/png"]
    picture = Image.open(io.BytesIO(base64.b64decode(kept)))
    assert picture.mode == ("RGB" if opacity == 255 else "RGBA")
    assert picture.convert("RGBA").tobytes() == drawn.tobytes()
    assert len(base64.b64decode(kept)) < len(buffer.getvalue())
    tidy(new_notebook(cells=[cell]))
    assert cell.outputs[0].data["image/png"] == kept


def test_an_error_names_the_rank_and_shows_the_line_of_the_cell(kernel):
    kernel.run("from ddp_tutorial import launch")
    said = kernel.run(
        "def work(world):\n"
        "    if world.rank == 1:\n"
        "        raise ValueError('a bad sample')\n"
        "launch(work, 2, device='cpu')"
    )
    assert "RankError: rank 1 raised ValueError: a bad sample" in said["error"]
    assert re.search(r"Cell In\[\d+\], line 3, in work\n +raise ValueError\('a bad sample'\)", said["error"])
    assert "launcher.py" not in said["error"], "the parent's own frames say nothing about the fault"


def test_warnings_of_a_rank_name_the_line_of_the_cell(kernel):
    """Warnings about a slow rank and stacks do so, too."""
    kernel.run("from ddp_tutorial import launch")
    said = kernel.run(
        "def work(world):\n    import traceback\n    traceback.print_stack()\nlaunch(work, 1, device='cpu')"
    )
    assert not said["error"]
    assert re.search(r"Cell In\[\d+\], line 3, in work", said["printed"])
    assert "ipykernel_" not in said["printed"]


def test_an_interrupt_stops_the_ranks_and_leaves_a_working_kernel(kernel, tmp_path):
    folder = tmp_path / "pids"
    folder.mkdir()
    hung = kernel.interrupted(f"folder = {str(folder)!r}\n{HANG}", when=lambda: pids_in(folder))
    assert hung["error"] == "KeyboardInterrupt: interrupted; all ranks have been terminated"
    assert gone(pids_in(folder))
    said = kernel.run("print(launch(lambda world: world.rank, 2, device='cpu'))")
    assert (said["printed"], said["error"]) == ("[0, 1]\n", "")


@pytest.mark.parametrize("now", [True, False], ids=["killed", "shut down"])
def test_ranks_exit_with_their_kernel(kernel, tmp_path, now):
    folder = tmp_path / "pids"
    folder.mkdir()
    kernel.client.execute(f"folder = {str(folder)!r}\n{HANG}")
    pids = pids_in(folder)
    kernel.manager.shutdown_kernel(now=now)
    assert gone(pids)


def test_only_notebooks_that_failed_are_executed_again(tmp_path):
    once = "from pathlib import Path; first = not Path('ran').exists(); Path('ran').touch()"
    for name, sources in {"good": ["pass"], "flaky": [once, "assert not first"]}.items():
        nbformat.write(new_notebook(cells=[new_code_cell(source) for source in sources]), tmp_path / f"{name}.ipynb")
    (tmp_path / "pytest.ini").touch()  # makes the folder pytest's root, with a cache of its own

    def run(options):
        command = [sys.executable, "-m", "pytest", *f"-p tests.kernels --nbval --nbval-current-env {options}".split()]
        environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'startup'}"}
        return subprocess.run(
            [*command, "."], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, check=False
        )

    assert "1 failed, 2 passed" in run("").stdout
    again = run("--failed-notebooks")
    assert again.returncode == 0, again.stdout
    assert "2 passed" in again.stdout
    assert "good" not in again.stdout
