"""Run a command with emulated GPUs: `python tests/emulated_gpu/run.py python -m pytest -m cuda`.

It requires gcc, and a CUDA build of torch in the Python that runs this file. `EMULATED_GPUS` is the number of GPUs,
2 by default. The README in this folder describes what is emulated.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = ("runtime.c", "nccl.c")
BUILD = HERE / "_build"


def build() -> Path:
    """Compile the C files if they are newer than the library, and return its path."""
    library, sources = BUILD / "libemulated_gpu.so", [HERE / name for name in SOURCES]
    newest = max(path.stat().st_mtime for path in [*sources, HERE / "runtime.h"])
    if not library.exists() or library.stat().st_mtime < newest:
        BUILD.mkdir(exist_ok=True)
        command = ["gcc", "-shared", "-fPIC", "-O1", "-pthread", "-Wno-builtin-declaration-mismatch"]
        subprocess.run([*command, f"-I{_headers()}", *map(str, sources), "-o", str(library)], check=True)
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):  # PyTorch loads them by these names
        if not (BUILD / name).exists():
            (BUILD / name).symlink_to(library.name)
    return library


def _headers() -> Path:
    """Return the folder with the headers of CUDA. They come with triton, which a CUDA build of torch requires."""
    triton = importlib.util.find_spec("triton")
    if triton is None or triton.origin is None:
        sys.exit(f"Emulated GPUs require a CUDA build of torch, and triton, but {sys.executable} has no triton.")
    return Path(triton.origin).parent / "backends" / "nvidia" / "include"


def environment() -> dict[str, str]:
    """Return the environment of a process with emulated GPUs."""
    library = build()
    added = {
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": str(BUILD),
        "PYTHONPATH": str(HERE / "startup"),
    }
    merged = {name: os.pathsep.join(filter(None, [value, os.environ.get(name)])) for name, value in added.items()}
    return {**os.environ, **merged, "EMULATED_GPU": "1"}


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(__doc__)
    os.execvpe(sys.argv[1], sys.argv[1:], environment())
