"""Keys of values: which are allowed, and which node has which."""

import difflib
import zlib
from collections.abc import Iterable

from launchpad_lite.engines.errors import UnknownKeyError

#: What a value is known by: text, a whole number, bytes, or a tuple of these.
Key = str | int | bytes | tuple["Key", ...]


def check_key(key: object) -> None:
    """Raises what is wrong with a key.

    Raises:
        TypeError: It is of another type than those that are the same in every process.
    """
    if isinstance(key, tuple):
        for part in key:
            check_key(part)
    elif type(key) not in (str, int, bytes):  # others may equal these, and look different
        raise TypeError(f"a key is text, a whole number, bytes or a tuple of these, not {key!r}")


def hash_of(key: Key) -> int:
    """Returns a number that is the same in every process; a whole number is its own.

    Raises:
        TypeError: It is no key.
    """
    check_key(key)
    if isinstance(key, int):  # so that blocks with numbers are divided evenly
        return key
    return zlib.crc32(repr(key).encode())


def unknown_key(where: str, key: object, known: Iterable[Key]) -> UnknownKeyError:
    """Returns the error of a key that nobody has set.

    Args:
        where: The node that was asked.
        key: The key.
        known: All keys that it has.
    """
    names = [repr(each) for each in known]
    near = difflib.get_close_matches(repr(key), names, n=3)
    if near:
        hint = f"did you mean {' or '.join(near)}?"
    else:
        hint = f"it has {len(names)} keys" + (f", as {', '.join(names[:3])}" if names else "")
    return UnknownKeyError(f"{where}: no value of the key {key!r}; {hint}")
