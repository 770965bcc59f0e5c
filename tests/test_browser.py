"""The notebooks in JupyterLab, as a learner uses them: running, interrupting, answering, sliders and live ranks."""

import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_notebook

browser = pytest.importorskip("browser", reason="an extra: pip install 'ddp-tutorial[dev]'")
pytestmark = pytest.mark.skipif(browser.CHROMIUM is None, reason=browser.ADVICE)

WAIT = """
import os, time
from pathlib import Path
from ddp_tutorial import launch

def wait(world):
    Path(f"{world.rank}.pid").write_text(str(os.getpid()))
    while not Path("go").exists():
        time.sleep(0.05)
    return world.rank

launch(wait, 2, device="cpu")
""".strip()
SLIDERS = """
import matplotlib.pyplot as plt
from ddp_tutorial.figures.live import explore

def bar(height):
    figure, axes = plt.subplots()
    axes.bar([0], [height])
    return figure

explore(bar, height=[1, 5, 9])
""".strip()
# In the page: record the values of all progress bars that appear, because a busy page shows each only for a moment.
RECORD_PROGRESS = """() => {
    window.progressSeen = [];
    new MutationObserver(records => {
        const elements = records.flatMap(record => [...record.addedNodes]).filter(node => node.querySelectorAll);
        const bars = elements.flatMap(node => [node, ...node.querySelectorAll('*')]);
        window.progressSeen.push(...bars.filter(node => node.localName === 'progress').map(bar => bar.value));
    }).observe(document.body, {childList: true, subtree: true});
}"""
KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}}
QUICKSTART, WITH_WIDGETS = "00_quickstart", "07_sharding_data"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = Path(__file__).parent.parent
    folder = tmp_path_factory.mktemp("lab")
    shutil.copy(root / "notebooks" / f"{WITH_WIDGETS}.ipynb", folder)
    text, found = re.subn(
        r"steps: int = \d+ ", "steps: int = 40 ", (root / "notebooks" / f"{QUICKSTART}.ipynb").read_text()
    )
    assert found == 1
    (folder / f"{QUICKSTART}.ipynb").write_text(text)
    live = ["%load_ext ddp_tutorial", "%ranks start -n 2", "%%ranks\nmine = world.rank + 10\nmine"]
    live += ["%%ranks\nimport time\nprint('asleep')\ntime.sleep(1000)", "%ranks get mine", "%ranks stop"]
    for name, cells in {"launch": [WAIT], "live": live, "sliders": [SLIDERS]}.items():
        notebook = new_notebook(cells=[new_code_cell(cell) for cell in cells], metadata=KERNEL)
        nbformat.write(notebook, folder / f"{name}.ipynb")
    return folder


@pytest.fixture(scope="module")
def opener(folder: Path) -> Iterator[Callable[[str], "browser.Notebook"]]:
    with browser.jupyterlab(folder) as address, browser.chromium() as chromium:
        page = chromium.new_page(viewport={"width": 1400, "height": 1000})
        page.set_default_timeout(150_000)
        yield lambda name: browser.Notebook(page, address, f"{name}.ipynb")


@pytest.fixture
def opened(
    opener: Callable[[str], "browser.Notebook"], request: pytest.FixtureRequest, root: Path
) -> Iterator[Callable[[str], "browser.Notebook"]]:
    """Open a notebook. If a test fails, it saves a screenshot."""
    notebooks = []
    failed = request.session.testsfailed
    yield lambda name: notebooks.append(opener(name)) or notebooks[-1]
    for notebook in notebooks[-1:]:
        if request.session.testsfailed > failed:
            picture = root / "runs" / "browser" / f"{request.node.name}.png"
            picture.parent.mkdir(parents=True, exist_ok=True)
            notebook.page.screenshot(path=picture)
        notebook.ask("(await kernel.shutdown(), true)")


def ranks_of(folder: Path, count: int = 2) -> list[psutil.Process]:
    """Return the ranks that have written their process IDs, once all have."""
    deadline = time.monotonic() + 300
    while len(found := [path.read_text() for path in folder.glob("*.pid")]) < count or not all(found):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    for path in folder.glob("*.pid"):
        path.unlink()
    return [psutil.Process(int(number)) for number in found]


def are_gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=60)[1]


@pytest.mark.timeout(900)
def test_training_shows_its_progress_and_an_answer_is_checked(opened) -> None:
    """Run only the cells that training and the exercise need. nbval runs the whole notebook."""
    notebook = opened(QUICKSTART)
    for start in ('corpus: str = "python"', "import os\nfrom inspect", "text = load_corpus("):
        notebook.run(notebook.cell(start))
    training, exercise = notebook.cell("one = launch_training"), notebook.cell("def shard(")
    notebook.show(training)
    notebook.page.evaluate(RECORD_PROGRESS)
    notebook.run(training)
    seen = set(notebook.page.evaluate("window.progressSeen"))
    assert len(seen) >= 3, seen
    assert notebook.errors() == []
    assert "loss" in notebook.text(training)

    check = "\n\n\nexercises.shard_samples.check(shard)"
    notebook.write(exercise, "def shard(indices, rank, size):\n    return indices" + check)
    wrong = notebook.run(exercise)
    notebook.write(exercise, "def shard(indices, rank, size):\n    return indices[rank::size]" + check)
    right = notebook.run(exercise)
    assert "Not yet" in wrong
    assert "Right" in right
    assert notebook.errors() == []


def test_moving_a_slider_of_a_notebook_changes_its_figure(opened) -> None:
    """Run only the cells that the sliders need. nbval runs the whole notebook."""
    notebook = opened(WITH_WIDGETS)
    for start in (
        "epochs: int",
        "import os",
        "SAMPLES, BATCH, SIZE",
        "def by_sample(",
        "def ranks_of_samples(",
        "explore(",
    ):
        notebook.run(notebook.cell(start))
    assert notebook.errors() == []
    notebook.show(notebook.cell("explore("))
    picture, said = notebook.page.locator("img.widget-image"), notebook.page.locator(".widget-readout")
    before = picture.get_attribute("src"), said.nth(2).inner_text()
    notebook.page.locator(".noUi-handle").nth(2).focus()
    notebook.page.keyboard.press("ArrowRight")
    notebook.page.wait_for_function("was => document.querySelector('img.widget-image').src !== was", arg=before[0])
    assert said.nth(2).inner_text() != before[1]


def test_saved_sliders_appear_with_their_figure_in_a_reopened_notebook(opened) -> None:
    """This requires the settings of `make lab`. Without them, JupyterLab shows "Error displaying widget"."""
    notebook = opened("sliders")
    notebook.run(0)
    before = notebook.page.locator("img.widget-image").get_attribute("src")
    notebook.page.locator(".noUi-handle").focus()
    notebook.page.keyboard.press("ArrowRight")
    notebook.page.wait_for_function("was => document.querySelector('img.widget-image').src !== was", arg=before)
    notebook.ask("(await panel.context.save(), await kernel.shutdown(), true)")

    again = opened("sliders")
    picture = again.page.locator("img.widget-image")
    picture.wait_for()
    assert again.page.locator(".widget-readout").inner_text() == "5"
    assert again.page.get_by_text("Error displaying widget").count() == 0
    assert picture.evaluate("image => image.clientWidth === image.naturalWidth"), "stretched"


def test_a_launch_interrupted_from_the_menu_can_be_rerun(opened, folder: Path) -> None:
    notebook = opened("launch")
    notebook.start(0)
    ranks = ranks_of(folder)
    notebook.menu("Kernel", "Interrupt Kernel")
    assert notebook.wait_for(0).lstrip().startswith("KeyboardInterrupt")  # below the live area, which is empty now
    assert are_gone(ranks)

    notebook.start(0)
    ranks = ranks_of(folder)
    (folder / "go").touch()
    assert notebook.wait_for(0).endswith("[0, 1]")
    (folder / "go").unlink()
    assert are_gone(ranks)


def test_restarting_a_kernel_leaves_no_rank_behind(opened, folder: Path) -> None:
    notebook = opened("launch")
    notebook.start(0)
    ranks = ranks_of(folder)
    notebook.menu("Kernel", "Restart Kernel…")
    notebook.page.locator(".jp-Dialog-button.jp-mod-accept").click()
    assert are_gone(ranks)
    notebook.until(browser.READY, "a new kernel")
    (folder / "go").touch()
    assert notebook.run(0).endswith("[0, 1]")
    (folder / "go").unlink()


def test_live_ranks_work_again_after_an_interrupt(opened) -> None:
    notebook = opened("live")
    notebook.run(0)
    notebook.run(1)
    first = notebook.run(2).strip()  # the live area can leave an empty line
    assert {"10", "11"} <= set(first.split()), first
    notebook.start(3)
    notebook.until(
        "JSON.stringify(nb.widgets[3].model.outputs.toJSON()).split('asleep').length > 2", "both ranks asleep"
    )
    notebook.menu("Kernel", "Interrupt Kernel")
    assert "KeyboardInterrupt" in notebook.wait_for(3)
    assert "[10, 11]" in notebook.run(4)
    assert notebook.run(2).strip() == first
    notebook.run(5)
