"""The files around the package are consistent with each other."""

import re
import tomllib
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

COMBINED = "ddp-tutorial[data,logging]"  # the extra `notebooks` contains these two


@pytest.fixture
def project(root: Path) -> dict[str, Any]:
    return dict(tomllib.loads((root / "pyproject.toml").read_text())["project"])


@pytest.fixture
def requirements(project: dict[str, Any]) -> list[str]:
    extras = project["optional-dependencies"]
    names = ("data", "logging", "notebooks", "examples", "dev")
    return [*project["dependencies"], *(each for name in names for each in extras[name] if each != COMBINED)]


@pytest.fixture
def conda(root: Path) -> dict[str, Any]:
    return dict(yaml.safe_load((root / "environment.yml").read_text()))


@pytest.fixture
def pins(root: Path) -> dict[str, Version]:
    """Return the version of each package. The file contains only `name==version`."""
    lines = (root / "constraints.txt").read_text().splitlines()
    found = [re.fullmatch(r"([\w.-]+)==(\S+)", line) for line in lines if line and not line.startswith("#")]
    assert None not in found
    pinned = [(canonicalize_name(match[1]), Version(match[2])) for match in found if match]
    assert len(dict(pinned)) == len(pinned)  # no duplicates
    return dict(pinned)


def parsed(requirements: list[str]) -> set[tuple[str, SpecifierSet, str]]:
    """Return the name, the versions, and the platforms of a requirement."""
    each = [Requirement(text) for text in requirements]
    assert not any(one.extras or one.url for one in each)
    return {(canonicalize_name(one.name), one.specifier, str(one.marker or "")) for one in each}


def test_the_conda_environment_matches_pyproject(conda: dict[str, Any], requirements: list[str]) -> None:
    [from_pip] = [each["pip"] for each in conda["dependencies"] if isinstance(each, dict)]
    assert from_pip.pop(0) == "-e ."  # this package
    assert parsed(from_pip) == parsed(requirements)
    assert len(from_pip) == len(set(from_pip)) == len(requirements)


def test_conda_provides_python_and_pip_provides_the_packages(conda: dict[str, Any], project: dict[str, Any]) -> None:
    assert conda["name"] == "ddp-tutorial"
    assert conda["channels"] == ["conda-forge"]
    assert set(conda) == {"name", "channels", "dependencies"}
    from_conda = [each for each in conda["dependencies"] if isinstance(each, str)]
    assert "pip" in from_conda  # else conda warns, and adds one of its own choice
    [python] = [Requirement(each) for each in from_conda if each.startswith("python")]
    assert str(python.specifier) == project["requires-python"] == ">=3.11"
    assert not any("torch" in each for each in from_conda)  # conda's and pip's do not mix


def test_all_parts_of_the_project_are_documented(conda: dict[str, Any]) -> None:
    [[_, *from_pip]] = [each["pip"] for each in conda["dependencies"] if isinstance(each, dict)]
    names = {name for name, _, _ in parsed(from_pip)}
    assert {"torch", "jupyterlab", "ipywidgets", "datasets", "matplotlib", "nbval", "papermill"} <= names


def test_every_direct_dependency_is_pinned_to_an_allowed_version(
    pins: dict[str, Version], project: dict[str, Any]
) -> None:
    requirements = {*chain(project["dependencies"], *project["optional-dependencies"].values())} - {COMBINED}
    for name, specifier, _ in parsed(list(requirements)):
        assert name in pins, f"{name} is not in constraints.txt"
        assert pins[name] in specifier, f"{name}=={pins[name]} is not {specifier}"


def test_pins_apply_to_cpus_and_gpus(pins: dict[str, Version]) -> None:
    assert [name for name, version in pins.items() if version.local] == []  # such as +cpu
