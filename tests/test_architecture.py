"""The subpackages and the direction of their imports: downward only, so that a subpackage can be read with those below
it.
"""

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

# Each room with the rooms that it may import, from the bottom to the top. Every room may also import the root: the
# modules in no room, and the package `slurm`, which `world` imports. `__main__` is the command line.
ROOMS = {
    "lessons": "",
    "processes": "",
    "cluster": "processes",
    "sharding": "processes",
    "ddp": "",
    "accumulation": "sharding ddp",
    "checkpoint": "",
    "zero": "ddp accumulation checkpoint",
    "planning": "ddp zero",
    "pipeline": "ddp accumulation checkpoint zero",
    "local_sgd": "ddp accumulation checkpoint",
    "runs": "processes checkpoint",
    "figures": "lessons ddp pipeline runs",
    "training": "processes sharding ddp accumulation checkpoint zero pipeline local_sgd runs",
    "experiments": "processes ddp accumulation checkpoint zero pipeline runs training",
    "debug": "processes ddp accumulation zero runs training",
    "live": "processes cluster debug",
    "museum": "processes debug",
    "exercises": "processes cluster sharding ddp accumulation zero pipeline planning experiments debug live museum",
    "examples": "processes sharding ddp checkpoint training",
    "configs": "",
    "peers": "sharding ddp checkpoint training examples",
    "benches": (
        "processes cluster sharding ddp accumulation checkpoint zero pipeline training experiments debug live peers"
    ),
    "commands": "processes cluster sharding ddp checkpoint planning runs figures training experiments debug benches",
    "__main__": "processes commands",
}
ROOT = {
    *("phases", "compat", "config", "files", "environment", "intervals", "rng", "slurm"),
    *("hosts", "world", "groups", "mesh", "collectives"),
}
NAMED_FOR = {"ddp", "sharding", "accumulation", "checkpoint"}  # the main concepts of the project
FRONT_DOOR = "__init__"  # of the package, which exports names that are imported on first use


def name_of(path: Path) -> str:
    """Return a module's name: `benches/launch.py` -> `benches.launch`. A folder's `__init__.py` is the folder."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
HANDING_ON = [name for name, path in MODULES.items() if path.with_suffix(".pyi").is_file()]


def room_of(module: str) -> str:
    first = module.partition(".")[0]
    return "" if first in ROOT else first


def handed_on(module: str) -> dict[str, str]:
    """Return the names that a package exports, according to its stub: name -> its module."""
    package = "" if module == FRONT_DOOR else f"{module}."
    tree = ast.parse(MODULES[module].with_suffix(".pyi").read_text())
    nodes = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert all(node.level == 1 for node in nodes)
    return {alias.name: f"{package}{node.module}" for node in nodes for alias in node.names}


def imports_of(module: str) -> Iterator[tuple[str, int]]:
    """Return the modules of the package that `module` imports anywhere, and the line of each import."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}, line {node.lineno}: write imports out in full, from ddp_tutorial"
            for alias in node.names:
                yield from resolve(f"{node.module}.{alias.name}", node.lineno)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield from resolve(alias.name, node.lineno)


def resolve(target: str, line: int) -> Iterator[tuple[str, int]]:
    """Return the module of a dotted name. An exported name stands for the module that defines it."""
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


def test_subpackages_are_ordered_so_that_imports_point_downward() -> None:
    above = set(ROOMS)
    for room, below in ROOMS.items():
        assert above.isdisjoint(below.split()), room
        above.remove(room)


@pytest.mark.parametrize("module", MODULES_TO_PLACE)
def test_a_module_imports_only_its_own_and_listed_subpackages(module: str) -> None:
    room = room_of(module)
    assert room in {"", *ROOMS}, f"{module} is in no room: move it into one, or add its room to ROOMS"
    allowed = {"", room, *ROOMS.get(room, "").split()}
    for imported, line in imports_of(module):
        assert room_of(imported) in allowed, f"{module}, line {line}: room {room!r} may not import {imported}"


def test_imports_are_not_circular() -> None:
    graph = {name: {imported for imported, _ in imports_of(name)} - {name} for name in MODULES_TO_PLACE}
    assert list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError with the cycle


def test_the_four_main_concepts_are_four_subpackages() -> None:
    assert all((PACKAGE / noun / "__init__.py").is_file() for noun in NAMED_FOR)


def test_the_root_contains_only_modules_that_everything_depends_on() -> None:
    assert {name.partition(".")[0] for name in MODULES} - set(ROOMS) == {*ROOT, FRONT_DOOR}


@pytest.mark.parametrize("room", [room for room in ROOMS if (PACKAGE / room / "__init__.py").is_file()])
def test_every_subpackage_has_a_description(room: str) -> None:
    doc = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text()))
    assert doc is not None
    assert len(doc.splitlines()) >= 3


def test_imports_inside_functions_count() -> None:
    imported = {name for name, _ in imports_of("commands.training")}
    assert {"config", "training.tasks", "world"} <= imported


# ------------------------------------------------------------------------------------------- the core, and settings


def loaded_by(module: str) -> set[str]:
    """Return the modules that importing `module` loads, without packages' `__init__.py`, which import nothing."""
    found, left = set(), [module]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += [each for each, line in imports_of(name) if line in top_level_lines(name)]
    return {name for name in found if MODULES[name].name != "__init__.py"}


def top_level_lines(module: str) -> set[int]:
    """Return the lines of the imports outside functions."""
    tree = ast.parse(MODULES[module].read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    inner = {each for node in ast.walk(tree) if isinstance(node, functions) for each in ast.walk(node)}
    imports = (ast.Import, ast.ImportFrom)
    return {node.lineno for node in ast.walk(tree) if isinstance(node, imports) and node not in inner}


def test_a_training_step_loads_at_most_25_files_and_5500_lines() -> None:
    modules = loaded_by("accumulation.train_step")
    assert {"accumulation.strategy", "accumulation.loss", "world"} <= modules
    assert len(modules) <= 25, sorted(modules)
    assert sum(len(MODULES[name].read_text().splitlines()) for name in modules) <= 5500


def settings_of(module: str, bases: set[str]) -> list[str]:
    """Return the classes in `module` that inherit from one of `bases`."""
    classes = [node for node in ast.walk(ast.parse(MODULES[module].read_text())) if isinstance(node, ast.ClassDef)]
    return [node.name for node in classes if {base.id for base in node.bases if isinstance(base, ast.Name)} & bases]


SETTINGS = [name for name in MODULES if name.rpartition(".")[2] == "config" or name == "mesh"]


def test_settings_are_defined_in_config_modules() -> None:
    bases = {"Config"}
    while more := {name for module in SETTINGS for name in settings_of(module, bases)} - bases:
        bases |= more
    assert {"TaskConfig", "DDPConfig"} <= bases
    elsewhere = {name: settings_of(name, bases) for name in set(MODULES) - set(SETTINGS)}
    assert {name for name, found in elsewhere.items() if found} <= {"examples.digits", "examples.finetune"}


@pytest.mark.parametrize("module", [name for name in SETTINGS if name != "config"])
def test_settings_import_only_pydantic_and_other_settings(module: str) -> None:
    assert {name for name, _ in imports_of(module)} <= {*SETTINGS, "slurm.nodes", "intervals"}  # which parse values
    tree = ast.parse(MODULES[module].read_text())
    others = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    others |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in others} <= {"pydantic", "pydantic_core", TOP, *sys.stdlib_module_names}


# ------------------------------------------------------------------------------------------------- the front doors


@pytest.mark.parametrize("module", HANDING_ON)
def test_a_reexported_name_is_the_same_object_as_in_its_module(module: str) -> None:
    package = importlib.import_module(TOP if module == FRONT_DOOR else f"{TOP}.{module}")
    names = handed_on(module)
    assert set(package.__all__) == set(names)
    for name, home in names.items():
        assert getattr(package, name) is getattr(importlib.import_module(f"{TOP}.{home}"), name)
        assert name in dir(package)


def test_no_exported_name_is_the_name_of_a_module() -> None:
    """Importing a module sets an attribute of the package, which would replace a function of the same name."""
    assert set(ddp_tutorial.__all__).isdisjoint(name.partition(".")[0] for name in MODULES)


def test_an_unknown_name_raises_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="lunch"):
        ddp_tutorial.lunch  # noqa: B018


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_loads_no_large_dependency() -> None:
    heavy = "{'torch', 'numpy', 'pydantic', 'yaml', 'matplotlib', 'datasets', 'pyarrow'}"
    assert python(f"import sys, ddp_tutorial; print(sorted({heavy} & set(sys.modules)))") == "[]"


def test_modules_that_read_logs_and_configs_do_not_load_torch() -> None:
    modules = ["config", "files", "checkpoint.manifest", "runs.folder", "runs.summaries", "figures.plots"]
    modules += ["figures.run_plots", "experiments.tables", "planning.step"]
    assert set(modules) <= set(MODULES)
    imports = "; ".join(f"import ddp_tutorial.{name}" for name in modules)
    assert python(f"import sys; {imports}; print('torch' in sys.modules)") == "False"


def test_training_with_ddp_does_not_load_sharded_state() -> None:
    """Loading it would take half a second in the process that starts the ranks."""
    heavy = {"torch.distributed.tensor", "ddp_tutorial.zero.state", "sympy"}
    assert python(f"import sys, ddp_tutorial.training.tasks; print(sorted({heavy} & set(sys.modules)))") == "[]"


def test_exported_names_can_be_imported_in_a_fresh_process_in_any_order() -> None:
    for first in ("", "import ddp_tutorial.training.trainer; "):
        assert python(f"{first}from ddp_tutorial import launch; print(callable(launch))") == "True"
