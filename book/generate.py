"""Write the generated files of this directory: `python book/generate.py`; `make book` runs it.

The files are committed, so that GitHub shows them. A test fails if they are out of date.
"""

from collections.abc import Callable
from pathlib import Path

from architecture import svg
from planning_page import planning_page
from settings import configuration_page

BOOK = Path(__file__).parent
GENERATED: dict[str, Callable[[], str]] = {
    "configuration.md": configuration_page,
    "planning.md": planning_page,
    "architecture.svg": svg,
}


def main() -> None:
    for name, make in GENERATED.items():
        (BOOK / name).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
