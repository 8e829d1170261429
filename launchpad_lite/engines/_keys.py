"""Keys of values: which are allowed, and which node has which."""

import difflib
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

from launchpad_lite.engines.errors import UnknownKeyError

#: The key of a value: text, a whole number, bytes, or a tuple of these.
Key = str | int | bytes | tuple["Key", ...]


def check_key(key: object, at: str = "") -> None:
    """Raises a TypeError for a key of another type than those that are the same in every process."""
    if isinstance(key, tuple):
        for part in key:
            check_key(part, at)
    elif type(key) not in (str, int, bytes):  # others may equal these, and look different
        raise TypeError(
            f"{at}a key is text, a whole number, bytes or a tuple of these, not {key!r}"
        )


def check_first(what: str, values: Any) -> Mapping[Key, Any]:
    """Returns what `initial` has returned, or raises what is wrong with it, a TypeError."""
    if not isinstance(values, Mapping):
        raise TypeError(f"{what} returned {values!r}; it is to map keys to values")
    for key in values:
        check_key(key, f"{what}: ")
    return values


def listed(what: str, keys: Any) -> list[Key]:
    """Returns the keys that `schedule` has returned. None, and text, are a TypeError."""
    if isinstance(keys, str | bytes) or not isinstance(keys, Iterable):
        raise TypeError(f"{what} returned {keys!r}; it is to return keys, as ['a', 'b']")
    return list(keys)


def hash_of(key: Key) -> int:
    """Returns a number that is the same in every process; a whole number is its own."""
    check_key(key)
    if isinstance(key, int):  # so that blocks with numbers are divided evenly
        return key
    return zlib.crc32(repr(key).encode())


def unknown_key(where: str, key: object, known: Iterable[Key]) -> UnknownKeyError:
    names = [repr(each) for each in known]
    near = difflib.get_close_matches(repr(key), names, n=3)
    if near:
        hint = f"did you mean {' or '.join(near)}?"
    else:
        hint = f"it has {len(names)} keys" + (f", as {', '.join(names[:3])}" if names else "")
    return UnknownKeyError(f"{where}: no value of the key {key!r}; {hint}")
