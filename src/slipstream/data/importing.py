"""Importing what the user wrote as `package.module:name`."""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from slipstream.data.checks import nearest


def import_target(spec: str, setting: str) -> Any:
    """The object that `package.module:name` names; `setting` is where the user wrote it, such as `data.import`."""
    module_name, _, attribute = spec.partition(":")
    find_package(spec, setting)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise ValueError(f"{setting}: {spec}: there is no module {error.name!r}") from None
        raise ValueError(f"{setting}: {spec}: {module_name} needs the module {error.name!r}; install it") from error
    except Exception as error:
        raise ValueError(
            f"{setting}: {spec}: importing {module_name} raised {type(error).__name__}: {error}"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            owner = getattr(found, "__name__", attribute)
            raise ValueError(f"{setting}: {spec}: {owner} has no {part!r}{nearest(part, dir(found))}")
        found = getattr(found, part)
    return found


def find_package(spec: str, setting: str) -> None:
    """The package must be there; looked up without running its code, which may import torch."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # last: code that has travelled with a run comes before what is here now
    package = spec.partition(":")[0].partition(".")[0]
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        files = {path.stem for path in Path(here).glob("*.py")} | {
            path.parent.name for path in Path(here).glob("*/__init__.py")
        }
        hint = nearest(package, files)
        raise ValueError(
            f"{setting}: {spec}: there is no module {package!r}{hint}; "
            f"it must be installed, or stand in the folder you start from ({here})"
        )


def call_target(spec: str, arguments: dict[str, Any], setting: str) -> Any:
    """What the target returns when it is called with the user's arguments."""
    target = import_target(spec, setting)
    if not callable(target):
        raise ValueError(f"{setting}: {spec} is a {type(target).__name__}; it must be a class or a function")
    try:
        return target(**arguments)
    except Exception as error:
        given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        raise ValueError(f"{setting}: {spec}({given}) raised {type(error).__name__}: {error}") from error
