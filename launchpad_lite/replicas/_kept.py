"""The things that users keep of a training: their values are taken, and put back.

Containers are entered. Things that can change are changed in place, because the user's code holds
them. A value that never changes is replaced in the dict or list that holds it.
"""

import itertools
from collections.abc import Mapping, MutableMapping
from typing import Any

from launchpad_lite.parts import nests
from launchpad_lite.replicas.errors import ReplicaError


class State:
    """Values of a training as attributes, which the user's code replaces. `repl.state` makes it.

    Example:
        state = repl.state(best=0.0)
        state.best = max(state.best, score)
    """

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)

    def state_dict(self) -> dict[str, Any]:
        return {name: taken_from(value) for name, value in vars(self).items()}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Replaces the values; things with a state of their own get that."""
        for name, value in values.items():
            old = getattr(self, name, None)
            setattr(self, name, put_into(name, old, value) if _has_state(old) else value)


def check_can_be_kept(path: str, thing: Any, seen: "dict[int, str] | None" = None) -> None:
    """Raises TypeError if a thing, which the path names, cannot be put back.

    `seen` has paths of things checked in a dict or a list, by id, where another value can replace a
    thing; None: it is in none.
    """
    is_slot = seen is not None
    if seen is not None and not _is_value(thing) and not _has_state(thing):
        if (other := seen.setdefault(id(thing), path)) != path:
            raise TypeError(
                f"{path} cannot be kept, because it is the same as {other}: give a copy"
            )
    if _is_array(thing):
        flags = getattr(thing, "flags", None)
        if str(thing.dtype) == "object" or (flags is not None and not flags.writeable):
            raise TypeError(
                f"{path}: an array of objects, or one that is read-only, cannot be kept"
            )
    elif _has_state(thing) or (is_slot and _is_value(thing)):
        pass
    elif isinstance(thing, (MutableMapping, list, tuple)) and not _is_value(thing):
        inside = {} if seen is None and not isinstance(thing, tuple) else seen
        for name, part in (nests.children(thing) or {}).items():
            check_can_be_kept(path + name, part, inside)
    else:
        raise TypeError(
            f"{path}: a {type(thing).__name__} cannot be kept: it can only be replaced, and the code "
            "that holds it would keep the old one. Write state = repl.state(value=...), and "
            "state.value where it is used; or keep something with state_dict() and "
            "load_state_dict(), an array of numpy, a tensor, or a dict or list of these"
        )


def taken_from(thing: Any) -> Any:
    """Returns the present value of a kept thing; shares its arrays."""
    if _has_state(thing):
        return thing.state_dict()
    if isinstance(thing, MutableMapping):
        return {key: taken_from(value) for key, value in thing.items()}
    if isinstance(thing, (list, tuple)):
        return nests.sequence_like(thing, [taken_from(part) for part in thing])
    return thing


def put_into(path: str, thing: Any, value: Any) -> Any:
    """Puts a value back into a kept thing; returns it, or its replacement if it never changes.

    The value is as `taken_from` returned it; the thing may keep parts of it. ReplicaError: they do
    not fit. The path names the thing.
    """
    if _has_state(thing):
        thing.load_state_dict(value)
    elif isinstance(thing, MutableMapping) and isinstance(value, Mapping):
        for key in thing.keys() - value.keys():
            del thing[key]
        for key, part in value.items():
            old = thing[key] if key in thing or hasattr(thing, "__missing__") else None
            thing[key] = put_into(f"{path}[{key!r}]", old, part)
    elif isinstance(thing, (list, tuple)) and isinstance(value, type(thing)):
        olds = itertools.chain(thing, itertools.repeat(None))
        parts = [put_into(f"{path}[{at}]", next(olds), part) for at, part in enumerate(value)]
        if isinstance(thing, tuple):
            return nests.sequence_like(thing, parts)
        thing[:] = parts
    elif _is_value(thing):
        return value
    elif not _is_array(thing) or not _fill(thing, value):
        now, then = (_described(each) for each in (thing, value))
        raise ReplicaError(f"{path} is {now}, but {then} at the checkpoint, or in replica 0")
    return thing


def _has_state(thing: Any) -> bool:
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


def _is_array(thing: Any) -> bool:
    """Returns whether it is an array whose content can change."""
    return nests.kind(thing) in ("numpy", "torch") and hasattr(thing, "__setitem__")


def _is_value(thing: Any) -> bool:
    if isinstance(thing, (tuple, frozenset)):
        return all(map(_is_value, thing))
    is_leaf = bool(nests.kind(thing)) or isinstance(thing, (str, bytes, type(None)))
    return is_leaf and not _is_array(thing)


def _fill(array: Any, value: Any) -> bool:
    """Puts values into an array, unless they are of another kind, shape or type."""
    kind = nests.kind(array)
    if nests.kind(value) != kind or (array.shape, array.dtype) != (value.shape, value.dtype):
        return False
    (array.detach() if kind == "torch" else array)[...] = value
    return True


def _described(value: Any) -> str:
    array = f"{value.dtype}{list(value.shape)}, " if _is_array(value) else ""
    return f"{array}a {type(value).__name__}"
