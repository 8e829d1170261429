"""Arguments that plainly contradict the annotations of who takes them.

An error here would stop a right program, and annotations are often loose or wrong. So what is in doubt
passes: an int for a float, a float for an int, unions, protocols, text that cannot be resolved.
"""

import functools
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from launchpad_lite.nodes.base import DeclaredHandle, Handle, node_of

#: By annotation, types of which a value cannot be meant for it.
_WRONG: Mapping[Any, tuple[type, ...]] = {
    bool: (str, bytes),
    int: (str, bytes, list, dict),
    str: (bool, int, float, bytes, list, dict),
    bytes: (bool, int, float, str, list, dict),
    list: (bool, int, float, str, bytes, dict),
    dict: (bool, int, float, str, bytes, list),
}
#: Methods that are not for callers.
_HIDDEN = frozenset({"run", "save", "restore", "set_courier_server"})
_LONGEST = 60


def contradictions(function: Callable[..., Any], bound: inspect.BoundArguments) -> Iterator[str]:
    """Yields what is wrong with arguments, for people.

    Args:
        function: Takes them.
        bound: The arguments, as its signature has them.
    """
    hints = _hints_of(function)
    for name, value in bound.arguments.items():
        parameter = bound.signature.parameters[name]
        if name in hints and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            with suppress(Exception):  # annotations may be any objects
                if wrong := _contradiction(hints[name], value, parameter.default):
                    kind = inspect.formatannotation(hints[name])
                    yield f"argument {name!r} is annotated {kind}, and is {wrong}"


def _hints_of(function: Any) -> Mapping[str, Any]:
    while isinstance(function, functools.partial):
        function = function.func
    if inspect.isclass(function):
        # Others may take what their constructor does not.
        is_plain = type(function).__call__ is type.__call__ and function.__new__ is object.__new__
        function = function.__init__ if is_plain else None
    with suppress(Exception):
        if not hasattr(function, "__wrapped__"):  # a decorator may convert arguments
            return typing.get_type_hints(function)
    return {}


def _contradiction(kind: Any, value: object, default: object) -> str:
    """Returns what a value is, if that contradicts an annotation."""
    whole = typing.get_origin(kind) or kind
    if type(value) in _WRONG.get(whole, ()) and type(value) is not type(default):
        text = repr(value)
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    if isinstance(value, Handle) and inspect.isclass(whole):
        missing = _missing_methods(whole, _class_of(value))
        if missing:
            return f"{value!r}, which has no {' and no '.join(missing[:3])}"
    return ""


def _class_of(handle: Handle[Any]) -> Any:
    """Returns the class whose object a handle stands for, if a class makes it."""
    if isinstance(handle, DeclaredHandle) and handle.target is not None:
        handle = handle.target
    constructor = getattr(node_of(handle), "_constructor", None)
    while isinstance(constructor, functools.partial):
        constructor = constructor.func
    return constructor if inspect.isclass(constructor) else None


def _missing_methods(wanted: type, served: Any) -> list[str]:
    ours = wanted.__module__.partition(".")[0] in ("courier", "launchpad", "launchpad_lite")
    if (
        served is None
        or ours
        or getattr(wanted, "_is_protocol", False)
        or hasattr(served, "__getattr__")
        or issubclass(served, wanted)
    ):
        return []
    # What the constructor sets may be a method, too.
    set_by_it = getattr(getattr(served.__init__, "__code__", None), "co_names", ())
    known = _HIDDEN.union(dir(served), set_by_it)
    return [
        name
        for name in dir(wanted)
        if not name.startswith("_") and name not in known and callable(getattr(wanted, name))
    ]
