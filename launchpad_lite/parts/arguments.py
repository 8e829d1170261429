"""Arguments as users give them: their names; the types they may have; text as a value."""

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from courier.lowlevel import signature_of

_UNIONS = (types.UnionType, typing.Union)


def name_of(constructor: object) -> str:
    """Returns a readable name of a class or function."""
    inner = getattr(constructor, "func", constructor)  # of a functools.partial
    return str(getattr(inner, "__name__", None) or type(inner).__name__)


def one_of(name: str, value: Any, original_name: str, original: Any) -> Any:
    """Returns an argument that has a name of the original's, too; a TypeError if both are given."""
    if value is not None and original is not None:
        raise TypeError(f"{original_name} is the original's name of {name}; give one of them")
    return original if value is None else value


def parameters_of(taker: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Returns the parameters of a function or class, by name.

    `**options` of a class are replaced by the parameters of the class that it extends.
    """
    found = dict(signature_of(taker).parameters)
    for base in taker.__mro__[1:] if inspect.isclass(taker) else ():
        rest = [name for name, each in found.items() if each.kind is each.VAR_KEYWORD]
        if rest and "__init__" in vars(base) and base is not object:
            del found[rest[0]]
            found = {**signature_of(base).parameters, **found}
    return found


def kinds_of(taker: Callable[..., Any], name: str) -> Collection[Any]:
    """Returns the types that an argument may have, by its annotation, or else its default."""
    hints: dict[str, Any] = {}
    bases = taker.__mro__[::-1] if inspect.isclass(taker) else ()
    makers = [vars(base)["__init__"] for base in bases if "__init__" in vars(base)]
    for each in makers or [taker]:
        with suppress(Exception):  # annotations may be impossible to evaluate
            hints.update(typing.get_type_hints(each))
    kind = hints.get(name, type(parameters_of(taker)[name].default))
    return typing.get_args(kind) if typing.get_origin(kind) in _UNIONS else (kind,)


def convert(text: str, kinds: Collection[Any]) -> Any:
    """Returns a text as a value of one of some types; a ValueError if it fits none.

    Empty text is true where one is `bool`. A list is written as words of a shell, a mapping as JSON.
    """
    if bool in kinds:
        if text.lower() not in ("", "true", "1", "yes", "false", "0", "no"):
            raise ValueError("expected true or false")
        return text.lower() in ("", "true", "1", "yes")
    import json  # nodes import this module, and need neither
    import shlex

    expected = []
    for known in (int, float, Path):
        if known in kinds:
            with suppress(ValueError):
                return known(text)
            expected.append(known.__name__)
    if str in kinds:
        return text
    for kind in kinds:
        whole = typing.get_origin(kind) or kind
        if whole in (list, tuple, Sequence):
            of = typing.get_args(kind)[:1] or (str,)
            words = [convert(word, of) for word in shlex.split(text)]
            return tuple(words) if whole is tuple else words
        if whole in (dict, Mapping):
            with suppress(ValueError):
                if isinstance(value := json.loads(text), dict):
                    return value
            expected.append('JSON like {"key": "value"}')
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            expected.append(f"a {kind.__name__}, which only a script can give")
    if expected:
        raise ValueError(f"expected {' or '.join(expected)}")
    return text
