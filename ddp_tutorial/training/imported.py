"""Construct an object of a class that a config names by its import path."""

import importlib
from typing import Any, TypeVar

from ddp_tutorial.config import ConfigError, did_you_mean
from ddp_tutorial.training.config import ClassSetting

Base = TypeVar("Base")


def import_class(name: str, path: str, base: type[Base]) -> type[Base]:
    """Import a class. This executes the module that contains the class.

    Args:
        name: The setting that contains the path, for the error.
        path: The module and the class, such as `"torch.optim.SGD"`.
        base: The class of which it must be a subclass.

    Raises:
        ConfigError: If the module cannot be imported, or if it does not contain such a class.
    """
    module_name, _, class_name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"'{name}.class' {path!r}: the module {module_name!r} cannot be imported: {_in_one_line(error)}"
        ) from None
    found = getattr(module, class_name, None)
    if isinstance(found, type) and issubclass(found, base):
        return found
    if found is not None:
        raise ConfigError(f"'{name}.class' must be a subclass of {base.__module__}.{base.__name__}, got {path!r}")
    known = [key for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, base)]
    raise ConfigError(
        f"'{name}.class' {path!r}: the module {module_name!r} does not contain {class_name!r}."
        + (did_you_mean(class_name, known) if known else "")
    )


def construct(name: str, setting: ClassSetting, base: type[Base], *args: Any, **defaults: Any) -> Base:
    """Import the class of a setting and construct an object with the arguments of the setting.

    Args:
        name: The setting, for the error.
        setting: The path of the class, and its keyword arguments.
        base: The class of which it must be a subclass.
        args: Positional arguments.
        defaults: Keyword arguments that the setting may override.

    Raises:
        ConfigError: If the class cannot be imported, or if it does not accept the arguments.
    """
    kind = import_class(name, setting["class"], base)
    try:
        return kind(*args, **(defaults | setting["args"]))
    except Exception as error:
        raise ConfigError(f"'{name}': {setting['class']} does not accept 'args': {_in_one_line(error)}") from None


def _in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
