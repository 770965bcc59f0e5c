"""Run a part of the tests with other versions of Python, torch and the direct dependencies: `make matrix`.

One cell of the matrix: `.nox/tool/bin/nox -s "cell(torch 2.12)"`. An environment takes up to 7 GB, because PyPI has
torch with CUDA only. It is removed after the tests, unless KEEP is set. book/contributing.md records the results.
"""

import os
import shutil
from pathlib import Path

import nox

EXTRAS = ("notebooks", "peers")  # those that the tests below import
TOOLS = ("pytest", "pytest-timeout", "hypothesis")
TESTS = [
    f"tests/test_{name}.py"
    for name in ("compat", "world", "ddp", "hooks", "zero", "pipeline_training", "checkpoint", "trainer", "detectors")
]
LOWEST = Path(".nox", "lowest.txt")  # the lowest versions of the direct dependencies that fit together
# By name: the version of Python, and where the versions of the packages come from. "pinned" is constraints.txt; with a
# version of torch, constraints.txt applies to all other packages.
CELLS = {
    "torch 2.12": ("3.11", "2.12"),
    "torch 2.13": ("3.11", "pinned"),
    "torch 2.14": ("3.11", "2.14"),
    "Python 3.12": ("3.12", "pinned"),
    "Python 3.13": ("3.13", "pinned"),
    "Python 3.14": ("3.14", "pinned"),
    "lowest": ("3.11", "lowest"),
    "newest": ("3.11", "newest"),
}


@nox.session(venv_backend="none")
@nox.parametrize("name", list(CELLS), ids=list(CELLS))
def cell(session: nox.Session, name: str) -> None:
    """Create the environment of a cell, print its versions, and run the tests."""
    version, packages = CELLS[name]
    interpreter = shutil.which(f"python{version}")
    if interpreter is None:
        session.skip(f"python{version} is not installed")
    environment = Path(".nox", name.replace(" ", "-"))
    python = str(environment / "bin" / "python")
    try:
        session.run(interpreter, "-m", "venv", "--clear", str(environment))
        if packages == "lowest":
            session.run(python, "-m", "pip", "install", "--quiet", "uv")
            uv = [str(environment / "bin" / "uv"), "pip", "compile", "--quiet", "--resolution=lowest-direct"]
            extras = [f"--extra={extra}" for extra in EXTRAS]
            session.run(*uv, "pyproject.toml", *extras, f"--python={python}", f"--output-file={LOWEST}")
        session.run(python, "-m", "pip", "install", "--quiet", *_requirements(packages))
        session.run(python, "-m", "pip", "list", "--format=freeze")
        session.run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS, *session.posargs)
    finally:
        if "KEEP" not in os.environ:
            shutil.rmtree(environment)


def _requirements(versions: str) -> list[str]:
    """Return the arguments of `pip install` for a cell."""
    package = ["-e", f".[{','.join(EXTRAS)}]", *TOOLS]
    if versions == "newest":
        return ["--upgrade", *package]
    if versions == "lowest":
        return [*package, "--constraint", str(LOWEST)]
    if versions == "pinned":
        return [*package, "--constraint", "constraints.txt"]
    others = Path(".nox", "constraints-without-torch.txt")
    pins = Path("constraints.txt").read_text(encoding="utf-8").splitlines()
    others.write_text("\n".join(pin for pin in pins if not pin.startswith("torch==")), encoding="utf-8")
    return [*package, f"torch=={versions}.*", "--constraint", str(others)]
