"""Packages whose names load their modules when they are first used."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def later(
    package: dict[str, Any], modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the `__getattr__` and the `__dir__` of a package.

    Args:
        package: Its globals.
        modules: For each module its names, with spaces between: `name`, or `name=theirs`. Modules
            below the package begin with a dot. `name=` is the module itself.

    Example:
        __getattr__, __dir__ = lowlevel.later(globals(), {".client": "Client close"})
    """
    places = {
        name: (module, theirs if renames else name)
        for module, listed in modules.items()
        for name, renames, theirs in (each.partition("=") for each in listed.split())
    }
    here = package["__name__"]

    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {here!r} has no attribute {name!r}")
        module, theirs = places[name]
        found = importlib.import_module(module, here)
        value = package[name] = getattr(found, theirs) if theirs else found
        return value

    return get, lambda: [*{**package, **places}]
