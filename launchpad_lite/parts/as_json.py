"""States and results of programs as JSON, for files and logs that other processes read."""

import base64
import dataclasses
import enum
import functools
import math
import os
import types
import typing
from collections.abc import Mapping
from typing import Any

from courier.lowlevel import Parcel


def to_json(value: Any, *, most_bytes: float = math.inf) -> Any:
    """Returns a dataclass, or a value of its fields, for `json.dumps`.

    Pickled exceptions above `most_bytes` are left out; their text stays.
    """
    if isinstance(value, Parcel):
        if value.total_bytes > most_bytes:
            return None
        return [base64.b64encode(part).decode() for part in (value.pickle, *value.buffers)]
    if dataclasses.is_dataclass(value):
        value = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: to_json(each, most_bytes=most_bytes) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(each, most_bytes=most_bytes) for each in value]
    if isinstance(value, enum.Enum):
        return value.value
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def from_json(kind: Any, found: Any, *, is_trusted: bool = True) -> Any:
    """Undoes `to_json`: returns a value of a type.

    That is a dataclass, or the type of a field of one. `is_trusted` says whether a process of the
    program has written it: nothing else is ever unpickled.

    Raises:
        Exception: It is of another type: `ArithmeticError`, `AttributeError`, `LookupError`,
            `RecursionError`, `TypeError` or `ValueError`.
    """
    read = functools.partial(from_json, is_trusted=is_trusted)
    inner = typing.get_args(kind)
    if isinstance(kind, types.UnionType):  # with None
        return None if found is None else read(inner[0], found)
    if kind is Any:
        return found
    if kind is Parcel:
        pickle, *buffers = map(base64.b64decode, found)
        return Parcel(pickle, [bytearray(each) for each in buffers]) if is_trusted else None
    if dataclasses.is_dataclass(kind):
        hints = _hints(typing.cast("type", kind))
        return kind(**{name: read(hint, found[name]) for name, hint in hints.items()})  # type: ignore[operator]
    if typing.get_origin(kind) is tuple:
        return tuple(read(inner[0], each) for each in found)
    if inner:
        return {str(name): read(inner[1], each) for name, each in found.items()}
    return kind(found)


_hints = functools.cache(typing.get_type_hints)
