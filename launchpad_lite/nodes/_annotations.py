"""Finds arguments that clearly contradict annotations.

An error here would stop a correct program, and annotations are often loose. So doubtful cases pass.
"""

import inspect
import reprlib
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from launchpad_lite.nodes.base import NODES, Handle
from launchpad_lite.nodes.courier import CourierNode

_PLAIN = {bool, int, float, str, bytes, list, dict}
#: By annotation, types whose values cannot be meant for it.
_WRONG: Mapping[Any, set[type]] = {
    **{kind: _PLAIN - {kind} for kind in (str, bytes, list, dict)},
    int: {str, bytes, list, dict},
    bool: {str, bytes},
}
#: Types whose clients have attributes that no class shows.
_OURS = ("courier", "launchpad_lite")
#: Methods that are not for callers.
_HIDDEN = frozenset({"run", "save", "restore", "set_courier_server"})


def contradictions(function: Callable[..., Any], bound: inspect.BoundArguments) -> Iterator[str]:
    """Yields mistakes in arguments of a function, as text."""
    hints = _hints_of(function)
    for name, value in bound.arguments.items():
        parameter = bound.signature.parameters[name]
        if name not in hints or parameter.kind is parameter.VAR_KEYWORD:
            continue
        kind, wrong = hints[name], ""
        whole = typing.get_origin(kind) or kind
        with suppress(Exception):  # annotations may be any objects
            if type(value) in _WRONG.get(whole, ()) and type(value) is not type(parameter.default):
                wrong = reprlib.repr(value)
            elif isinstance(value, Handle) and (missing := _missing_methods(whole, value)):
                wrong = f"{value!r}, which has no {' and no '.join(missing[:3])}"
        if wrong:
            yield f"argument {name!r} is annotated {inspect.formatannotation(kind)}, and is {wrong}"


def _hints_of(function: Any) -> Mapping[str, Any]:
    if inspect.isclass(function):
        # Others may take more than their constructor.
        is_plain = type(function).__call__ is type.__call__ and function.__new__ is object.__new__
        function = function.__init__ if is_plain else None
    with suppress(Exception):
        # A decorator may convert arguments. An object has the annotations of its attributes.
        if inspect.isroutine(function) and not hasattr(function, "__wrapped__"):
            return typing.get_type_hints(function)
    return {}


def _missing_methods(wanted: Any, handle: Handle[Any]) -> list[str]:
    """Returns the methods of an annotated class that the class behind a handle lacks."""
    node = NODES.get(handle.node_key)
    if type(node) is not CourierNode:  # others may serve more than their constructor makes
        return []
    served: Any = typing.get_origin(node._constructor) or node._constructor
    if (
        not (inspect.isclass(wanted) and inspect.isclass(served))
        or not {each.__module__.partition(".")[0] for each in (wanted, served)}.isdisjoint(_OURS)
        or getattr(wanted, "_is_protocol", False)
        or hasattr(served, "__getattr__")
        or hasattr(served, "set_courier_server")  # it may bind others
        or issubclass(served, wanted)
    ):
        return []
    # Attributes that code of the class sets may be methods, too.
    parts = [part for each in served.__mro__ for part in vars(each).values()]
    named = [part.__code__.co_names for part in parts if inspect.isfunction(part)]
    known = _HIDDEN.union(dir(served), *named)
    public = [name for name in dir(wanted) if not name.startswith("_") and name not in known]
    # Callers need neither its class methods nor classes in it.
    found = [name for name in public if inspect.isroutine(getattr(wanted, name))]
    return [name for name in found if not hasattr(getattr(wanted, name), "__self__")]
