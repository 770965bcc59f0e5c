"""The rooms of the package, and the direction of imports: downward only, so that a room reads with those below it."""

import ast
import graphlib
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ddp_tutorial

PACKAGE = Path(ddp_tutorial.__file__).parent
TOP = "ddp_tutorial"

# From the bottom to the top. "" is the root: the modules in no room, and the package `slurm`, which `world` imports.
# Rooms on one line do not import one another; `__main__` is the command line.
ROOMS = [
    [""],
    ["lessons"],
    ["processes"],
    ["cluster"],
    ["sharding"],
    ["ddp"],
    ["accumulation"],
    ["checkpoint"],
    ["zero"],
    ["pipeline"],
    ["local_sgd"],
    ["runs"],
    ["figures"],
    ["training"],
    ["experiments"],
    ["debug"],
    ["live"],
    ["museum"],
    ["exercises", "examples", "configs"],
    ["peers"],
    ["benches"],
    ["commands"],
    ["__main__"],
]
ROOT = {
    *("phases", "compat", "config", "files", "environment", "rng", "slurm"),
    *("hosts", "world", "mesh", "collectives"),
}
NAMED_FOR = {"ddp", "sharding", "accumulation", "checkpoint"}  # what the project is named for
FRONT_DOOR = "__init__"  # of the package; it hands names on, each imported when it is asked for
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}


def name_of(path: Path) -> str:
    """`benches/launch.py` -> `benches.launch`; a folder's `__init__.py` is the folder."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
HANDING_ON = [name for name, path in MODULES.items() if path.with_suffix(".pyi").is_file()]


def room_of(module: str) -> str:
    first = module.partition(".")[0]
    return "" if first in ROOT else first


def handed_on(module: str) -> dict[str, str]:
    """What a package hands on, by its stub: name -> the module where it lives."""
    package = "" if module == FRONT_DOOR else f"{module}."
    tree = ast.parse(MODULES[module].with_suffix(".pyi").read_text())
    nodes = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert all(node.level == 1 for node in nodes)
    return {alias.name: f"{package}{node.module}" for node in nodes for alias in node.names}


def imports_of(module: str) -> Iterator[tuple[str, int]]:
    """The modules of the package that `module` imports, anywhere in it, and the line where it does."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}, line {node.lineno}: write imports out in full, from ddp_tutorial"
            for alias in node.names:
                yield from resolve(f"{node.module}.{alias.name}", node.lineno)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield from resolve(alias.name, node.lineno)


def resolve(target: str, line: int) -> Iterator[tuple[str, int]]:
    """The module that a dotted name is, or is in; a name that is handed on stands for the module it comes from."""
    first, _, rest = target.partition(".")
    if first != TOP:
        return
    package, _, name = rest.rpartition(".")
    if (package or FRONT_DOOR) in HANDING_ON and name in (names := handed_on(package or FRONT_DOOR)):
        rest = names[name]
    while rest and rest not in MODULES:
        rest = rest.rpartition(".")[0]
    yield rest or FRONT_DOOR, line


MODULES_TO_PLACE = [name for name in MODULES if name != FRONT_DOOR]


@pytest.mark.parametrize("module", MODULES_TO_PLACE)
def test_a_module_imports_from_its_own_room_and_those_below(module: str) -> None:
    room = room_of(module)
    assert room in LEVEL, f"{module} is in no room: move it into one, or name its room in ROOMS"
    for imported, line in imports_of(module):
        there = room_of(imported)
        assert there == room or LEVEL[there] < LEVEL[room], f"{module}, line {line}: {imported} is above it"


def test_no_two_modules_import_one_another_directly_or_through_others() -> None:
    graph = {name: {imported for imported, _ in imports_of(name)} - {name} for name in MODULES_TO_PLACE}
    assert list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError with the cycle


def test_the_four_nouns_of_the_project_are_four_rooms() -> None:
    assert all((PACKAGE / noun / "__init__.py").is_file() for noun in NAMED_FOR)


def test_the_root_holds_what_everything_stands_on_and_nothing_else() -> None:
    assert {name.partition(".")[0] for name in MODULES} - set(LEVEL) == {*ROOT, FRONT_DOOR}


@pytest.mark.parametrize(
    "room", [room for rooms in ROOMS for room in rooms if (PACKAGE / room / "__init__.py").is_file()]
)
def test_a_room_says_what_it_is_for(room: str) -> None:
    doc = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text()))
    assert doc is not None
    assert len(doc.splitlines()) >= 3


def test_imports_inside_functions_count() -> None:
    imported = {name for name, _ in imports_of("commands.training")}
    assert {"config", "training.tasks", "world"} <= imported


# ------------------------------------------------------------------------------------------------- the front doors


@pytest.mark.parametrize("module", HANDING_ON)
def test_a_name_that_is_handed_on_is_the_same_object_as_at_home(module: str) -> None:
    package = importlib.import_module(TOP if module == FRONT_DOOR else f"{TOP}.{module}")
    names = handed_on(module)
    assert set(package.__all__) == set(names)
    for name, home in names.items():
        assert getattr(package, name) is getattr(importlib.import_module(f"{TOP}.{home}"), name)
        assert name in dir(package)


def test_no_name_at_the_front_door_is_that_of_a_module() -> None:
    """Importing a module sets it on the package, over a function of the same name."""
    assert set(ddp_tutorial.__all__).isdisjoint(name.partition(".")[0] for name in MODULES)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="lunch"):
        ddp_tutorial.lunch  # noqa: B018


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_package_alone_loads_neither_torch_nor_anything_else_of_size() -> None:
    heavy = "{'torch', 'numpy', 'pydantic', 'yaml', 'matplotlib', 'datasets', 'pyarrow'}"
    assert python(f"import sys, ddp_tutorial; print(sorted({heavy} & set(sys.modules)))") == "[]"


def test_the_parts_that_read_logs_and_configs_do_not_load_torch() -> None:
    modules = ["config", "files", "checkpoint.manifest", "runs.folder", "runs.summaries", "figures.plots"]
    modules += ["figures.run_plots", "experiments.tables"]
    assert set(modules) <= set(MODULES)
    imports = "; ".join(f"import ddp_tutorial.{name}" for name in modules)
    assert python(f"import sys; {imports}; print('torch' in sys.modules)") == "False"


def test_training_by_ddp_does_not_load_what_sharded_state_needs() -> None:
    """Half a second, in the process that starts the ranks."""
    heavy = {"torch.distributed.tensor", "ddp_tutorial.zero.state", "sympy"}
    assert python(f"import sys, ddp_tutorial.training.tasks; print(sorted({heavy} & set(sys.modules)))") == "[]"


def test_the_front_door_opens_in_a_fresh_process_whatever_was_imported_before() -> None:
    for first in ("", "import ddp_tutorial.training.trainer; "):
        assert python(f"{first}from ddp_tutorial import launch; print(callable(launch))") == "True"
