"""Import the functions and classes that a config specifies by import path."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from ddp_tutorial.config import ConfigError, did_you_mean
from ddp_tutorial.training.config import ClassSetting

Base = TypeVar("Base")


def import_object(name: str, path: str, is_known: Callable[[Any], bool]) -> Any:
    """Import the object at `path`, such as "torch.optim.SGD", for the setting `name`. The import executes the module.

    If the object is missing, the error message suggests only the module's objects for which `is_known` returns true.

    Raises:
        ConfigError: If the module cannot be imported, or if it does not contain the object.
    """
    module_name, _, attribute = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
        is_found = hasattr(module, attribute)  # a module may import an attribute lazily
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"'{name}' is {path!r}, but the module {module_name!r} cannot be imported: {_in_one_line(error)}"
        ) from None
    if is_found:
        return getattr(module, attribute)
    known = [key for key, value in vars(module).items() if is_known(value)]
    raise ConfigError(
        f"'{name}' is {path!r}, but the module {module_name!r} does not contain {attribute!r}."
        + (did_you_mean(attribute, known) if known else "")
    )


def import_class(name: str, path: str, base: type[Base]) -> type[Base]:
    """Import a class; see `import_object`. Raise `ConfigError` if the object is not a subclass of `base`."""

    def is_class(value: Any) -> bool:
        return isinstance(value, type) and issubclass(value, base)

    found: Any = import_object(f"{name}.class", path, is_class)
    if not is_class(found):
        raise ConfigError(f"'{name}.class' must be a subclass of {base.__module__}.{base.__name__}, got {path!r}")
    return found


def import_callable(name: str, setting: str | ClassSetting) -> Callable[..., Any]:
    """Import a function, or construct a callable object from a class and its arguments.

    Raises:
        ConfigError: If the function or the class cannot be imported, or if the class does not accept its arguments.
    """
    if isinstance(setting, str):
        found = import_object(name, setting, inspect.isfunction)
        if isinstance(found, type) or not callable(found):
            raise ConfigError(
                f"'{name}' must be the import path of a function, but {setting!r} is of type {type(found).__name__}"
            )
        return found
    found = construct(name, setting, object)
    if not callable(found):
        raise ConfigError(
            f"'{name}.class' must be a class with callable instances, got {setting['class']!r}. Define a "
            "__call__ method"
        )
    return found


def check_arguments(name: str, setting: ClassSetting, base: type) -> None:
    """Import a setting's class. Raise `ConfigError` if the class does not accept the setting's arguments.

    The class is not instantiated, because a model may be large.
    """
    kind: type[Any] = import_class(name, setting["class"], base)
    try:
        inspect.signature(kind).bind(**setting["args"])
    except TypeError as error:
        raise _refusal(name, setting, error) from None


def construct(name: str, setting: ClassSetting, base: type[Base], *args: Any, **defaults: Any) -> Base:
    """Import a setting's class, and construct an object with `args` and the setting's keyword arguments.

    The class must be a subclass of `base`. `defaults` are keyword arguments that the setting may override.

    Raises:
        ConfigError: If the class cannot be imported, or if it does not accept the arguments.
    """
    kind = import_class(name, setting["class"], base)
    try:
        return kind(*args, **(defaults | setting["args"]))
    except Exception as error:
        raise _refusal(name, setting, error) from None


def _refusal(name: str, setting: ClassSetting, error: Exception) -> ConfigError:
    return ConfigError(f"'{name}': {setting['class']} does not accept 'args': {_in_one_line(error)}")


def _in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
