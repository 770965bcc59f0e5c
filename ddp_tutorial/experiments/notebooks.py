"""Execute notebooks and save them so that two executions of the same source differ only in what they measured.

No timestamps, no progress, no widget state, cell ids made from the cells' text, execution counts in order. A digest of
the source is kept in the metadata. A test compares it, so that committed outputs come from the committed source, and
`make notebooks` executes only notebooks whose source has changed.

What is needed to execute one is imported where it is used: it takes a second and a half, which a notebook should not
wait for that asks for its parameters (`execute`).
"""

import base64
import hashlib
import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ddp_tutorial.processes.console import PROGRESS

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
CELL_TIMEOUT = 120  # seconds
WIDGET = "application/vnd.jupyter.widget-view+json"


def find_notebooks() -> list[Path]:
    """All notebooks of the project, in the order in which they are read."""
    found = NOTEBOOKS.rglob("*.ipynb")
    other = {"runs", "work", ".ipynb_checkpoints"}
    own = [path for path in found if not other & set(path.relative_to(NOTEBOOKS).parts)]
    return sorted(own, key=lambda path: (len(path.parts), path))


class Chapter(NamedTuple):
    """A notebook among the others."""

    part: str  # such as Ranks; "" where no README says which
    path: Path
    shows: str  # what it shows, in a few words of Markdown


def chapters() -> list[Chapter]:
    """All notebooks in the order in which the README has them, which is where their parts are told. A notebook that it
    does not name comes at the end, in a part without a name; all do where the README is not there."""
    readme = NOTEBOOKS.parent / "README.md"
    named = list(_in_readme(readme.read_text(encoding="utf-8"))) if readme.is_file() else []
    paths = {chapter.path for chapter in named}
    return [*named, *(Chapter("", path, "") for path in find_notebooks() if path not in paths)]


def _in_readme(text: str) -> Iterator[Chapter]:
    part = ""
    for line in text.splitlines():
        if heading := re.match(r"\*\*([^*]+)\*\*", line):
            part = heading[1]
        elif row := re.match(r"\| \[[\w/]+\]\(notebooks/([\w/]+\.ipynb)\) \| (.+) \|$", line):
            yield Chapter(part, NOTEBOOKS / row[1], row[2])


def refresh(paths: Sequence[Path] = (), *, everything: bool = False) -> None:
    """Execute and save the given notebooks (all, if none is given), unless their outputs are current; with `everything`
    those too."""
    import nbformat

    for path in paths or find_notebooks():
        notebook = nbformat.read(path, as_version=4)
        if not everything and is_current(notebook):
            print(f"{path.name}: current")
            continue
        print(f"{path.name}: executing", flush=True)
        execute(notebook, path.parent)
        nbformat.write(notebook, path)
        save_figures(notebook)


def save_figures(notebook: Any) -> None:
    """Write the figure of each cell tagged `save:NAME` to `notebooks/figures/NAME.png`, for the README."""
    for cell in notebook.cells:
        names = [tag.removeprefix("save:") for tag in cell.metadata.get("tags", []) if tag.startswith("save:")]
        images = [out.data["image/png"] for out in cell.get("outputs", []) if "image/png" in out.get("data", {})]
        for name, image in zip(names, images, strict=False):
            (NOTEBOOKS / "figures").mkdir(exist_ok=True)
            (NOTEBOOKS / "figures" / f"{name}.png").write_bytes(base64.b64decode(image))


def execute(notebook: Any, folder: Path) -> None:
    """Run all cells in a fresh kernel whose working directory is `folder`, then `tidy`. Raises where a cell fails."""
    from nbclient import NotebookClient

    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT,
        kernel_name="python3",
        record_timing=False,
        store_widget_state=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute()
    tidy(notebook)


def tidy(notebook: Any) -> None:
    """Remove what differs between two executions of the same source, and keep a digest of that source."""
    counted = 0
    taken: set[str] = set()
    for cell in notebook.cells:
        cell.id = _cell_id(cell, taken)
        cell.metadata = {key: cell.metadata[key] for key in ("tags",) if cell.metadata.get(key)}
        if cell.cell_type == "code":
            cell.outputs = [each for each in map(_static, cell.outputs) if each is not None]
            if cell.source.strip():
                counted += 1
                cell.execution_count = counted
            for output in cell.outputs:
                if "execution_count" in output:
                    output["execution_count"] = counted
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
        "language_info": {"name": "python", "file_extension": ".py", "mimetype": "text/x-python"},
        "ddp_tutorial": {"executed_source": source_digest(notebook)},
    }


def _static(output: Any) -> Any:
    """What is left of an output when no kernel runs: of a widget the picture that came with it, of progress nothing."""
    data = output.get("data", {})
    if WIDGET in data:
        output["data"] = data = {kind: shown for kind, shown in data.items() if kind == "image/png"}
    if "image/png" in data:
        data["image/png"] = _smaller(data["image/png"])
    is_progress = output.get("metadata", {}) == PROGRESS
    return None if is_progress or ("data" in output and not data) else output


def _smaller(png: str) -> str:
    """The same pixels in an eighth fewer bytes: Matplotlib gives each an opacity, though none lets anything through."""
    from PIL import Image

    picture: Image.Image = Image.open(io.BytesIO(base64.b64decode(png)))
    if picture.mode == "RGBA" and picture.getchannel("A").getextrema() == (255, 255):
        picture = picture.convert("RGB")
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


def is_current(notebook: Any) -> bool:
    """Do the outputs come from the notebook's present source?"""
    noted = notebook.metadata.get("ddp_tutorial", {}).get("executed_source")
    return bool(noted == source_digest(notebook))


def source_digest(notebook: Any) -> str:
    """A digest of all code cells and their tags. Text cells do not count: they change no output."""
    sha = hashlib.sha256()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            sha.update(repr((cell.source, sorted(cell.metadata.get("tags", [])))).encode())
    return sha.hexdigest()[:16]


def _cell_id(cell: Any, taken: set[str]) -> str:
    """The id of a cell, made from its text, so that it stays the same until that changes. Adds it to `taken`."""
    digest = hashlib.sha256(f"{cell.cell_type}:{cell.source}".encode()).hexdigest()[:8]
    while digest in taken:
        digest = hashlib.sha256(digest.encode()).hexdigest()[:8]
    taken.add(digest)
    return digest
