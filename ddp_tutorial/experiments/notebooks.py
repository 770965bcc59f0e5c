"""Execute notebooks, and save them reproducibly.

If the same source is executed twice, only the measurements differ. Saved notebooks contain no timestamps, progress bars
or widget state. Cell ids are derived from the cells' text, and execution counts are consecutive. The metadata contains
a digest of the source. A test compares this digest with the source, so committed outputs always belong to the committed
source. `make notebooks` uses the digest to skip notebooks whose source has not changed.

Modules that are required only to execute notebooks are imported inside functions. Importing these modules takes 1.5 s,
which would delay notebooks that only call `execute.read_parameters`.
"""

import base64
import hashlib
import io
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from importlib.metadata import metadata
from pathlib import Path
from typing import Any, NamedTuple

from ddp_tutorial.config import ConfigError
from ddp_tutorial.files import PACKAGE, PROJECT, directory_written_atomically
from ddp_tutorial.processes.console import PROGRESS

NOTEBOOKS = PROJECT / "notebooks"
CELL_TIMEOUT = 120  # seconds
WIDGET = "application/vnd.jupyter.widget-view+json"


def find_notebooks() -> list[Path]:
    """Return all notebooks of the project in reading order."""
    paths = NOTEBOOKS.rglob("*.ipynb")
    other = {"runs", "work", ".ipynb_checkpoints"}
    own = [path for path in paths if not other & set(path.relative_to(NOTEBOOKS).parts)]
    return sorted(own, key=lambda path: (len(path.parts), path))


class Chapter(NamedTuple):
    """A notebook and its entry in the README."""

    part: str  # such as "Ranks"; empty if the README does not list the notebook
    path: Path
    shows: str  # a short description in Markdown


def chapters() -> list[Chapter]:
    """Return all notebooks in the order of the README, which also groups them into parts.

    Notebooks that are not listed in the README are returned last, with an empty part name. Without a README, all
    notebooks have an empty part name. For an installed package, the README is read from the package's metadata.
    """
    readme = NOTEBOOKS.parent / "README.md"
    if PROJECT == PACKAGE:
        text = metadata("ddp-tutorial")["Description"]
    else:
        text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    named = list(_in_readme(text))
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
    """Execute and save the notebooks whose outputs are outdated.

    Args:
        paths: The notebooks. Defaults to all notebooks of the project.
        everything: Whether to also execute notebooks whose outputs are up to date.

    Raises:
        ConfigError: If no `paths` are passed and the project's notebooks are part of an installed package.
    """
    import nbformat

    if not paths and PROJECT == PACKAGE:
        raise ConfigError(
            "the installed package's notebooks cannot be executed in place. To work with them, copy them to a new "
            "folder: ddp-tutorial copy-notebooks FOLDER"
        )
    for path in paths or find_notebooks():
        notebook = nbformat.read(path, as_version=4)
        if not everything and is_current(notebook):
            print(f"{path.name}: current")
            continue
        print(f"{path.name}: executing", flush=True)
        execute(notebook, path.parent)
        nbformat.write(notebook, path)
        if path.resolve().is_relative_to(NOTEBOOKS):
            save_figures(notebook)


def copy_notebooks(folder: Path) -> None:
    """Copy the notebooks without their outputs to `folder/notebooks`, and copy the notebooks' data to `folder/data`.

    Raises:
        FileExistsError: If the folder already exists.
    """
    with directory_written_atomically(folder) as unfinished:
        for path in find_notebooks():
            copy = unfinished / "notebooks" / path.relative_to(NOTEBOOKS)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(_without_outputs(path.read_text(encoding="utf-8")), encoding="utf-8")
        shutil.copytree(PROJECT / "data", unfinished / "data")


def _without_outputs(text: str) -> str:
    """Return the JSON text of a notebook file, with all outputs removed.

    This function does not import packages that only the notebooks require.
    """
    notebook = json.loads(text)
    notebook["metadata"].pop("ddp_tutorial", None)  # the digest that belongs to the outputs
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell |= {"outputs": [], "execution_count": None}
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def save_figures(notebook: Any) -> None:
    """Write the figure of each cell tagged `save:NAME` to `notebooks/figures/NAME.png`, for the README."""
    for cell in notebook.cells:
        names = [tag.removeprefix("save:") for tag in cell.metadata.get("tags", []) if tag.startswith("save:")]
        images = [out.data["image/png"] for out in cell.get("outputs", []) if "image/png" in out.get("data", {})]
        for name, image in zip(names, images, strict=False):
            (NOTEBOOKS / "figures").mkdir(exist_ok=True)
            (NOTEBOOKS / "figures" / f"{name}.png").write_bytes(base64.b64decode(image))


def execute(notebook: Any, folder: Path) -> None:
    """Run all cells in a new kernel with working directory `folder`, then call `tidy` on the notebook.

    If a cell fails, nbclient raises a `CellExecutionError`.
    """
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
    """Remove data that is specific to one execution, such as timestamps, and store a digest of the source."""
    counted = 0
    taken: set[str] = set()
    for cell in notebook.cells:
        cell.id = _cell_id(cell, taken)
        cell.metadata = {key: cell.metadata[key] for key in ("tags", "jupyter") if cell.metadata.get(key)}
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
    """Return the part of an output that is meaningful without a kernel.

    For a widget, only the PNG image is kept. Progress output is removed.
    """
    data = output.get("data", {})
    if WIDGET in data:
        output["data"] = data = {kind: shown for kind, shown in data.items() if kind == "image/png"}
    if "image/png" in data:
        data["image/png"] = _smaller(data["image/png"])
    is_progress = output.get("metadata", {}) == PROGRESS
    return None if is_progress or ("data" in output and not data) else output


def _smaller(png: str) -> str:
    """Remove an image's alpha channel if the image is fully opaque, which reduces the file size by one eighth."""
    from PIL import Image

    picture: Image.Image = Image.open(io.BytesIO(base64.b64decode(png)))
    if picture.mode == "RGBA" and picture.getchannel("A").getextrema() == (255, 255):
        picture = picture.convert("RGB")
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


def is_current(notebook: Any) -> bool:
    """Return whether the outputs belong to the notebook's current source."""
    recorded = notebook.metadata.get("ddp_tutorial", {}).get("executed_source")
    return bool(recorded == source_digest(notebook))


def source_digest(notebook: Any) -> str:
    """Return a digest of all code cells and their tags. Text cells are excluded, because they do not affect outputs."""
    sha = hashlib.sha256()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            sha.update(repr((cell.source, sorted(cell.metadata.get("tags", [])))).encode())
    return sha.hexdigest()[:16]


def _cell_id(cell: Any, taken: set[str]) -> str:
    """Return a cell id derived from the cell's text, and add it to `taken`.

    The id changes only if the text changes.
    """
    digest = hashlib.sha256(f"{cell.cell_type}:{cell.source}".encode()).hexdigest()[:8]
    while digest in taken:
        digest = hashlib.sha256(digest.encode()).hexdigest()[:8]
    taken.add(digest)
    return digest
