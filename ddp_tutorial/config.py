"""Load YAML files into frozen, typed objects. Error messages include an example of a valid value.

A file takes precedence over the file that it extends, and `overrides` take precedence over both files. Loading never
executes code, because YAML is read with a safe loader. Example:

    # my.yaml
    extends: base            # a file in the same folder, or the name of a config in the package
    steps: 300

    config = load("my.yaml", TaskConfig, overrides=["model.layers=4"])
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

CONFIGS = Path(__file__).parent / "configs"
BASE = CONFIGS / "base.yaml"  # contains all settings with their defaults


class ConfigError(ValueError):
    """Raised if a setting, an argument, or an environment variable is invalid. The message fits on a single line."""


class MissingPackageError(ConfigError, ImportError):
    """Raised if a feature requires an optional package that is not installed."""


def require_package(name: str, extra: str) -> None:
    """Raise `MissingPackageError` with the install command if the package `name` is not installed."""
    if find_spec(name) is None:
        raise MissingPackageError(
            f"the package {name} is required, but is not installed. Run: pip install 'ddp-tutorial[{extra}]'"
        )


class FailedError(RuntimeError):
    """Raised for a runtime failure that is not a bug, such as a full disk.

    The message fully describes the failure, so the command-line interface prints no traceback.
    """


class Config(BaseModel):
    """Base class of all configs. Configs are frozen, and reject unknown keys and implicit type conversions.

    Attributes:
        alternatives: Pairs of settings that specify the same quantity, such as `steps` and `num_epochs`. If a file or
            an override sets one setting of a pair, earlier values of the other setting are discarded.
    """

    alternatives: ClassVar[tuple[tuple[str, str], ...]] = ()

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy of the config, updated with the settings in `update` and validated.

        Pydantic's own `model_copy` does not validate `update`, so it would accept a misspelled setting such as `nproc`.

        Raises:
            ConfigError: If a setting is unknown or invalid.
        """
        if not update:
            return super().model_copy(deep=deep)
        try:
            changed = type(self).model_validate(dict(self) | dict(update))
        except ValidationError as error:
            raise ConfigError(f"model_copy: {_explain(type(self), error.errors()[0], typed=False)}") from None
        object.__setattr__(changed, "__pydantic_fields_set__", self.model_fields_set | update.keys())
        return changed


SomeConfig = TypeVar("SomeConfig", bound=Config)
COMMAND_LINE = "command line"
Layer = tuple[str, dict[str, Any]]  # (the file name or COMMAND_LINE, the settings)


def load(source: str | Path, cls: type[SomeConfig], overrides: Iterable[str] = ()) -> SomeConfig:
    """Read and validate a config file. `source` is the path of a YAML file, or the name of a config in `configs/`.

    Raises:
        ConfigError: If a file is missing or malformed, `extends` is circular, an override is not of the form
            `key=value`, or a setting is unknown or invalid.
    """
    return _validated(cls, layers(source, overrides))


def from_arguments(cls: type[SomeConfig], arguments: Iterable[str]) -> SomeConfig:
    """Return a config of type `cls`, with defaults for all settings that the `key=value` arguments do not set.

    Raises:
        ConfigError: If an argument is not of the form `key=value`, or a setting is unknown or invalid.
    """
    return _validated(cls, [(COMMAND_LINE, _override(argument)) for argument in arguments])


def load_with(source: str | Path, cls: type[SomeConfig], values: Mapping[str, Any], origin: str) -> SomeConfig:
    """Read a config file, override its settings with `values`, and validate the result.

    Error messages about a setting in `values` start with `origin`.
    """
    return _validated(cls, [*layers(source), (origin, dict(values))])


def layers(source: str | Path, overrides: Iterable[str] = ()) -> list[Layer]:
    """Return one layer per file, from the base config to `source`, followed by one layer per override."""
    files = [(path.name, values) for path, values in _read(find_config(source), seen=())]
    return [*files, *((COMMAND_LINE, _override(override)) for override in overrides)]


def is_chosen(name: str, source: str | Path, overrides: Iterable[str] = ()) -> bool:
    """Return whether the setting `name` is set by an override, or by a file other than the package's base config.

    The base config contains only the defaults, so its settings do not count as chosen.
    """
    files = [values for path, values in _read(find_config(source), seen=()) if path.resolve() != BASE.resolve()]
    return any(name in values for values in (*files, *map(_override, overrides)))


def merged(layers: Iterable[Layer], alternatives: Iterable[tuple[str, str]] = ()) -> dict[str, Any]:
    """Merge the layers. Each setting overrides the same setting and its `alternatives` in earlier layers."""
    both_ways = [*alternatives, *((other, one) for one, other in alternatives)]
    values: dict[str, Any] = {}
    for _, above in layers:
        replaced = {other for one, other in both_ways if above.get(one) is not None}
        values = merge({name: value for name, value in values.items() if name not in replaced}, above)
    return values


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings: `{"model": {"layers": 4}}` becomes `{"model.layers": 4}`."""
    leaves: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        leaves |= flat(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return leaves


def check(cls: type[SomeConfig], values: Mapping[str, Any], origin: str) -> SomeConfig:
    """Validate `values`, and return them as an instance of `cls`.

    Raises:
        ConfigError: If a value is invalid. The message is one line that starts with `origin` and describes the first
            problem.
    """
    return _validated(cls, [(origin, dict(values))])


def _validated(cls: type[SomeConfig], layers: Sequence[Layer]) -> SomeConfig:
    try:
        return cls.model_validate(merged(layers, cls.alternatives))
    except ValidationError as error:
        first = error.errors()[0]
        origin = _origin(layers, first)
        raise ConfigError(f"{origin}: {_explain(cls, first, typed=origin == COMMAND_LINE)}") from None


def _origin(layers: Sequence[Layer], error: ErrorDetails) -> str:
    """Return the origin of the last layer that contains the invalid setting, or the last file name if no layer does."""
    place = ".".join(map(str, error["loc"]))
    groups = [[place]] if place else []
    if error["type"] == "value_error":  # raised by a validator of several settings; the message contains their names
        named = re.findall(r"'([\w.]+)'", str(error["ctx"]["error"]))
        groups.insert(0, [*named, *(f"{place}.{name}" for name in named if place)])
    for names in groups:
        for origin, values in reversed(layers):
            if any(_overlap(name, key) for name in names for key in flat(values)):
                return origin
    return next((origin for origin, _ in reversed(layers) if origin != COMMAND_LINE), COMMAND_LINE)


def _overlap(one: str, other: str) -> bool:
    """Return whether two dotted names are equal, or one name is a prefix of the other."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return `below` with overrides from `above`. Nested mappings are merged key by key; other values are replaced."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def config_names() -> list[str]:
    """Return the names of the configs in the package."""
    return sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def find_config(source: str | Path) -> Path:
    """Return the path of a config file. `source` is the path of a YAML file, or the name of a config in `configs/`.

    Raises:
        ConfigError: If there is no such file or config.
    """
    path = Path(source)
    if path.is_file():
        return path
    named = CONFIGS / f"{source}.yaml"
    if named.is_file():
        return named
    if path.is_dir():
        raise ConfigError(f"config {str(source)!r} must be a YAML file, got a folder")
    if path.suffix in {".yaml", ".yml"} or len(path.parts) > 1:
        raise ConfigError(f"config file {str(source)!r} does not exist (looked in {Path.cwd().name}/)")
    raise ConfigError(f"there is no config named {str(source)!r}.{did_you_mean(str(source), config_names())}")


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """Return an error message suffix that suggests a name similar to `name`, or lists `known` if none is similar."""
    close = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else f" Known: {', '.join(known)}."


def named_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text, such as "rank 1", "ranks 0 and 2" or "ranks 0, 1 and 3"."""
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


class _Loader(yaml.SafeLoader):
    """A safe YAML loader that implements two rules from YAML 1.2.

    The loader parses 1e-3 as a number, whereas YAML 1.1 requires 1.0e-3 and parses 1e-3 as a string. The loader parses
    1:30:00 as a string, whereas YAML 1.1 parses this value as the integer 5400.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012  as in the base class
        first: [(tag, regexp) for tag, regexp in resolvers if tag != "tag:yaml.org,2002:int"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Return the value of a node. Raise `ConstructorError` if the value contains itself."""
        if node in self.recursive_objects:
            problem = "the value of an anchor must not contain an alias of the same anchor"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_object(node, deep=True)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"^[-+]?(0b[0-1_]+|0x[0-9a-fA-F_]+|0[0-7_]*|[1-9][0-9_]*)$"),
    list("-+0123456789"),
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def parse_yaml(text: str, origin: str) -> Any:
    """Parse a YAML string, and return its value.

    Raises:
        ConfigError: If the YAML is malformed. The message contains the line and column.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{origin}{place}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:  # e.g. 2024-02-30
        raise ConfigError(f"{origin}: not valid YAML: {' '.join(str(error).split())}") from None


def _read(path: Path, seen: tuple[Path, ...]) -> list[tuple[Path, dict[str, Any]]]:
    """Return the path and settings of each file in the `extends` chain, from the base config to `path`."""
    if path.resolve() in seen:
        circle = " -> ".join(each.name for each in (*seen, path.resolve()))
        raise ConfigError(f"'extends' is circular: {circle}. Remove 'extends' from one of these files.")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {str(path)!r} cannot be read: {error}") from None
    values = parse_yaml(text, path.name)
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path.name}: the file must contain a mapping such as 'steps: 100', got {_got(values)}")
    base = values.pop("extends", None)
    if base is None:
        return [(path, values)]
    if not isinstance(base, str):
        raise ConfigError(f"{path.name}: 'extends' must be one file or config name, got {_got(base)}")
    beside = path.parent / base
    return [*_read(beside if beside.is_file() else find_config(base), (*seen, path.resolve())), (path, values)]


def _override(text: str) -> dict[str, Any]:
    """Parse an override: `"model.layers=4"` becomes `{"model": {"layers": 4}}`."""
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(
            f"an override must have the form key=value, such as steps=100 or model.layers=4, got {text!r}"
        )
    nested: Any = parse_yaml(value, f"override {text!r}")
    for part in reversed(parts):
        nested = {part: nested}
    return dict(nested)


def _explain(cls: type[Config], error: ErrorDetails, *, typed: bool) -> str:
    """Describe a pydantic error in one line that contains the setting, the problem, and an example of a valid value.

    The example is a command-line argument if `typed` is true, and a line of YAML otherwise.
    """
    key = ".".join(str(part) for part in error["loc"])
    owner = _owner(cls, error["loc"])
    if error["type"] == "extra_forbidden":
        return f"unknown key {key!r}.{did_you_mean(str(error['loc'][-1]), sorted(owner.model_fields))}"
    if error["type"] == "missing":
        return f"{key!r} is missing; add a line '{key}: ...'"
    if error["type"] == "value_error":  # raised by a validator of several fields; the message contains their names
        return str(error["ctx"]["error"])
    wanted = (error["msg"][0].lower() + error["msg"][1:]).replace("input should be", "must be")
    name = str(error["loc"][-1])
    right = _example(owner.model_fields[name]) if name in owner.model_fields else None
    example = "" if right is None else f", for example {_typed(key, right) if typed else f'{name}: {_flow(right)}'}"
    return f"{key!r} {wanted}, got {_got(error['input'])}{example}"


def _example(field: FieldInfo) -> Any:
    """Return a field's first example, or its default value. A group's example contains only its first setting."""
    if field.examples:
        return field.examples[0]
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    if not isinstance(default, Config):
        return default
    name, first = next(iter(type(default).model_fields.items()))
    return {name: _example(first)}


def _flow(value: Any) -> str:
    """Format a value as one line of YAML."""
    return yaml.safe_dump(value, default_flow_style=True, width=1000).partition("\n")[0]


def _typed(key: str, value: Any) -> str:
    """Format a setting as command-line arguments."""
    if isinstance(value, Mapping):
        return " ".join(_typed(f"{key}.{name}", inner) for name, inner in value.items())
    return f"{key}={_flow(value)}"


def _owner(cls: type[Config], location: tuple[int | str, ...]) -> type[Config]:
    """Return the config class that declares the setting at `location`."""
    for part in location[:-1]:
        field = cls.model_fields.get(str(part))
        group = None if field is None else group_of(field)
        if group is None:
            break
        cls = group
    return cls


def group_of(field: FieldInfo) -> type[Config] | None:
    """Return the config class if `field` is a group of settings, and None if `field` is a single setting."""
    kinds = (field.annotation, *get_args(field.annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Config)), None)


def _got(value: Any) -> str:
    kinds = {str: "text", int: "a whole number", float: "a number", bool: "true or false", list: "a list"}
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return "a mapping"
    return f"{value!r} ({kinds.get(type(value), type(value).__name__)})"
