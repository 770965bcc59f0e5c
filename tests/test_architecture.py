"""Imports go to lower levels only, so that each file can be read with those below it and no others."""

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ddp_tutorial

PACKAGE = Path(ddp_tutorial.__file__).parent

# From the bottom to the top. A module imports from levels below its own; `a.*` stands for all modules of a folder.
LEVELS = [
    ["phases", "config", "files", "environment", "dice", "memory"],
    ["world", "console", "transport", "runs", "tales", "manifest", "tables"],
    ["rank", "collectives", "buckets", "sync_bn", "stopping", "logs", "rank_logs"],
    ["launcher", "link", "sharding", "corpus", "model", "checkpoint", "usage"],
    ["data", "metrics", "hooks", "timeline", "resuming", "scaling"],
    ["sharded", "ddp", "precision", "plots"],
    ["dispatched", "streamed", "accumulation", "profiling"],
    ["evaluation"],
    ["sources", "invariant", "strategy"],
    ["train_config"],
    ["trainer", "plan", "saved", "doctor"],
    ["arms"],
    ["notebooks", "benches", "benches.bare_rank", "exercises", "live", "configs"],
    ["benches.step", "run_plots"],
    ["experiments", "benches.*", "exercises.*"],
    ["sweeps"],
    ["commands"],
    ["commands.*"],
    ["__main__"],
]
FRONT_DOOR = "__init__"  # hands names on, each imported when it is asked for: no level of its own


def name_of(path: Path) -> str:
    """`benches/launch.py` -> `benches.launch`; a folder's `__init__.py` is the folder."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def level_of(module: str) -> int | None:
    for level, names in enumerate(LEVELS):
        if module in names or (("." in module) and f"{module.split('.', maxsplit=1)[0]}.*" in names):
            return level
    return None


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
    """The module that a dotted name is, or is in; a name of the front door stands for the module it comes from."""
    first, _, rest = target.partition(".")
    if first != "ddp_tutorial":
        return
    if rest in ddp_tutorial._HOME_OF:
        rest = ddp_tutorial._HOME_OF[rest]
    while rest and rest not in MODULES:
        rest = rest.rpartition(".")[0]
    yield rest or FRONT_DOOR, line


@pytest.mark.parametrize("module", [name for name in MODULES if name != FRONT_DOOR])
def test_a_module_imports_from_lower_levels_only(module: str) -> None:
    level = level_of(module)
    assert level is not None, f"{module} has no place yet: put it on a level in LEVELS, above what it imports"
    for imported, line in imports_of(module):
        there = level_of(imported)
        assert there is not None, f"{module}, line {line}: {imported} has no place in LEVELS yet"
        assert there < level, f"{module} (level {level}), line {line}: imports {imported} (level {there})"


def test_no_module_is_on_two_levels() -> None:
    placed = [name for names in LEVELS for name in names]
    assert len(placed) == len(set(placed))


def test_imports_inside_functions_count() -> None:
    imported = {name for name, _ in imports_of("commands.training")}
    assert {"config", "trainer", "world"} <= imported


# ------------------------------------------------------------------------------------------------- the front door


@pytest.mark.parametrize("name", ddp_tutorial.__all__)
def test_a_name_at_the_front_door_is_the_same_object_as_at_home(name: str) -> None:
    home = importlib.import_module(f"ddp_tutorial.{ddp_tutorial._HOME_OF[name]}")
    assert getattr(ddp_tutorial, name) is getattr(home, name)
    assert name in dir(ddp_tutorial)


def test_no_name_at_the_front_door_is_that_of_a_module() -> None:
    """Importing a module sets it on the package, over a function of the same name."""
    assert set(ddp_tutorial.__all__).isdisjoint(MODULES)


def test_type_checkers_see_the_names_that_are_handed_on() -> None:
    seen = {
        alias.name: (node.module or "").removeprefix("ddp_tutorial.")
        for block in ast.parse(MODULES[FRONT_DOOR].read_text()).body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == ddp_tutorial._HOME_OF
    assert len(ddp_tutorial.__all__) == sum(map(len, ddp_tutorial._HOMES.values()))  # none twice


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'lunch'"):
        ddp_tutorial.lunch  # noqa: B018


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_package_alone_loads_neither_torch_nor_anything_else_of_size() -> None:
    heavy = "{'torch', 'numpy', 'pydantic', 'yaml', 'matplotlib', 'datasets', 'pyarrow'}"
    assert python(f"import sys, ddp_tutorial; print(sorted({heavy} & set(sys.modules)))") == "[]"


def test_the_parts_that_read_logs_and_configs_do_not_load_torch() -> None:
    modules = [name for name in ("config", "files", "runs", "logs", "plots", "run_plots") if name in MODULES]
    imports = "; ".join(f"import ddp_tutorial.{name}" for name in modules)
    assert python(f"import sys; {imports}; print('torch' in sys.modules)") == "False"


def test_the_front_door_opens_in_a_fresh_process_whatever_was_imported_before() -> None:
    assert python("from ddp_tutorial import launch; print(callable(launch))") == "True"
    assert python("import ddp_tutorial.trainer; from ddp_tutorial import launch; print(callable(launch))") == "True"
