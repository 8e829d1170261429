"""Keys of datasets: which are equal, in whatever process, and where they go. Pure.

A key has a canonical form, made of its values. Equal keys have equal forms, so they meet, also if
their pickles differ, or if Python takes them for different in one process (NaN).
"""

import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import functools
import pathlib
import types
import uuid
import zlib
from collections.abc import Callable
from typing import Any

#: These are their own forms.
PLAIN = frozenset([str, bytes, int, bool, types.NoneType])
#: The form of all that does not equal itself.
_NAN = (float, "nan")
_MICROSECOND = dt.timedelta(microseconds=1)
_EPOCH = dt.datetime(1970, 1, 1)  # noqa: DTZ001 - as the times that are compared with it
#: Units of numpy's times, in attoseconds; years and months differ in length.
_UNITS = {unit: 1000**place for place, unit in enumerate(["as", "fs", "ps", "ns", "us", "ms", "s"])}
_UNITS |= {unit: n * _UNITS["s"] for unit, n in (("m", 60), ("h", 3600), ("D", 86400))}
_32_BITS = 2**32 - 1


def canonical(key: Any) -> Any:
    """Returns the form of a key. Two keys are equal exactly if their forms are.

    A form is text, bytes, a number, None, or a tuple or frozenset of forms. If the type decides, too,
    it is a tuple that begins with it. What cannot be a key is a TypeError.
    """
    kind: Any = type(key)
    if kind in PLAIN:
        return key
    hash(key)  # says what is wrong if it cannot be a key
    return _rule(kind)(key)


def stable_hash(key: Any) -> int:
    """Returns 32 bits that are the same in every process, and for equal keys."""
    kind = type(key)
    if kind is str:
        return zlib.crc32(key.encode("utf-8", "surrogatepass"))
    if kind is int:
        return _mixed(key)
    if kind is tuple:  # with its form it would take twice as long
        return hash(tuple(map(stable_hash, key))) & _32_BITS
    return _hash(key if kind in PLAIN else canonical(key))


def first_of(firsts: dict[Any, Any], key: Any) -> Any:
    """Returns the first of equal keys, which a dictionary may take for different.

    `firsts` has those that came so far, by their forms.
    """
    kind = type(key)  # the most frequent ones are their own forms
    if (kind is float and key == key) or (kind is tuple and PLAIN.issuperset(map(type, key))):
        return key
    return firsts.setdefault(canonical(key), key)


def _hash(form: Any) -> int:
    # Python randomises hashes of text and bytes only.
    if isinstance(form, tuple):
        return hash(tuple(map(_hash, form))) & _32_BITS
    if isinstance(form, frozenset):
        form = sum(map(_hash, form))
    if isinstance(form, type):
        form = f"{form.__module__}.{form.__qualname__}"
    if isinstance(form, str):
        form = form.encode("utf-8", "surrogatepass")
    if isinstance(form, bytes):
        return zlib.crc32(form)
    return _mixed(form or 0)  # the hash of None is an address


def _mixed(number: Any) -> int:
    # Low bits of hashes of numbers are often zero; that of a tuple depends on all of them.
    mixed = hash((number,))
    return (mixed ^ mixed >> 32) & _32_BITS


@functools.lru_cache
def _rule(kind: type) -> Callable[[Any], Any]:
    """Returns what makes the form of keys of a type."""
    if kind.__module__ == "numpy" and not kind.__name__.endswith("longdouble"):
        return _of_numpy
    for base, rule in _RULES:
        # A type with an equality of its own may disagree with ours.
        if issubclass(kind, base) and _equality(kind) is _equality(base):
            return rule
    if dataclasses.is_dataclass(kind) and (names := _compared(kind)) is not None:
        return lambda key: (kind, *(canonical(getattr(key, name)) for name in names))
    raise _unknown(kind)


def _unknown(kind: type) -> TypeError:
    return TypeError(
        f"{kind.__module__}.{kind.__qualname__} cannot be the type of a key: it is not known in "
        "other processes which of them are equal; use a tuple of what they are equal by"
    )


def _equality(kind: Any) -> Any:
    return kind.__eq__


def _compared(kind: type) -> list[str] | None:
    """Returns the fields that make two of a dataclass equal; None: it says so itself."""
    names = [field.name for field in dataclasses.fields(kind) if field.compare]
    # Compares the code with what `dataclasses` would generate, because nothing marks generated
    # methods.
    made = dataclasses.make_dataclass("_", names).__eq__.__code__
    code = getattr(_equality(kind), "__code__", None)
    same = code and (code.co_code, code.co_names) == (made.co_code, made.co_names)
    return names if same else None


def _itself(key: Any) -> Any:
    return key if key == key else _NAN


def _of_datetime(key: dt.datetime) -> Any:
    key = key.replace(fold=0)  # as Python's hash
    offset = key.utcoffset()
    since = key.replace(tzinfo=None) - _EPOCH - (offset or dt.timedelta(0))
    return dt.datetime, offset is None, since // _MICROSECOND * _UNITS["us"]


def _of_numpy(key: Any) -> Any:
    import numpy as np

    if key != key:
        return _NAN
    if not isinstance(key, np.datetime64 | np.timedelta64):
        return canonical(key.item())
    # As those of the standard library, which they equal.
    is_date = isinstance(key, np.datetime64)
    unit, count = np.datetime_data(key.dtype)
    if unit == "W" or (unit in "YM" and is_date):
        key, unit, count = key.astype(f"{key.dtype.kind}8[D]"), "D", 1
    if unit not in _UNITS:
        raise _unknown(type(key))
    number = int(key.astype(np.int64)) * count * _UNITS[unit]
    return (dt.datetime, True, number) if is_date else (dt.timedelta, number)


#: The first one that fits decides.
_RULES: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (str, lambda key: key),
    (bytes, lambda key: key),
    (int, _itself),
    (float, _itself),
    (complex, _itself),
    (decimal.Decimal, _itself),
    (fractions.Fraction, _itself),
    (tuple, lambda key: tuple(map(canonical, key))),
    (frozenset, lambda key: frozenset(map(canonical, key))),
    (enum.Enum, lambda key: (type(key), key.name or key.value)),
    (dt.datetime, _of_datetime),
    (dt.date, lambda key: (dt.date, key.toordinal())),
    (dt.timedelta, lambda key: (dt.timedelta, key // _MICROSECOND * _UNITS["us"])),
    (uuid.UUID, lambda key: (uuid.UUID, key.int)),
    (pathlib.PurePosixPath, lambda key: (pathlib.PurePosixPath, str(key))),
)
