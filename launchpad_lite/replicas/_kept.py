"""What users keep of a training: what is taken of it, and how it is put back.

Containers are entered. What can change is changed where it lies, because the user's code holds it.
A value that never changes is replaced in the dict, list or `State` that holds it.
"""

import itertools
import operator
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from launchpad_lite.replicas import _nests
from launchpad_lite.replicas.errors import ReplicaError

_VALUES = (int, float, complex, str, bytes, type(None))
_ABSENT = object()


class State:
    """Values of a training as attributes, which the user's code replaces. `repl.state` makes it.

    Example:
        state = repl.state(best=0.0)
        state.best = max(state.best, score)
    """

    def __init__(self, **values: Any) -> None:
        """Makes it with the first values."""
        vars(self).update(values)

    def __repr__(self) -> str:
        return f"State({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


def check_can_be_kept(path: str, thing: Any, *, is_slot: bool = False) -> None:
    """Checks that a thing can be put back.

    Args:
        path: Names it.
        thing: What is kept.
        is_slot: Whether it lies in a dict or a list, where another value can take its place.

    Raises:
        TypeError: It cannot.
    """
    if isinstance(thing, State) or _has_state(thing):
        return
    if _is_array(thing):
        is_writeable = getattr(getattr(thing, "flags", None), "writeable", True)
        if not is_writeable or str(thing.dtype) == "object":
            raise TypeError(
                f"{path}: an array of objects, or one that is read-only, cannot be kept"
            )
    elif isinstance(thing, (MutableMapping, list, tuple)) and not (
        _is_value(thing) and not is_slot
    ):
        for name, part in (_nests.children(thing) or {}).items():
            check_can_be_kept(path + name, part, is_slot=is_slot or not isinstance(thing, tuple))
    elif not (is_slot and _is_value(thing)):
        raise TypeError(
            f"{path}: a {type(thing).__name__} cannot be kept: it can only be replaced, and the code "
            "that holds it would keep the old one. Write state = repl.state(value=...), and "
            "state.value where it is used; or keep something with state_dict() and "
            "load_state_dict(), an array of numpy, a tensor, or a dict or list of these"
        )


def taken_from(thing: Any) -> Any:
    """Returns what a kept thing is now; arrays in it are the very same."""
    if isinstance(thing, State):
        return {name: taken_from(value) for name, value in vars(thing).items()}
    if _has_state(thing):
        return thing.state_dict()
    if isinstance(thing, MutableMapping):
        return {key: taken_from(value) for key, value in thing.items()}
    if isinstance(thing, (list, tuple)):
        return _like(thing, map(taken_from, thing))
    return thing


def put_into(path: str, thing: Any, value: Any, *, in_state: bool = False) -> Any:
    """Makes a kept thing what it was.

    Args:
        path: Names it.
        thing: What is kept.
        value: What it was, as `taken_from` had it; the thing may hold on to parts of it.
        in_state: Whether it lies in a `State`, where an array may be replaced by any other.

    Returns:
        The thing; what takes its place, if it never changes.

    Raises:
        ReplicaError: It is not what it was.
    """
    if isinstance(thing, State):
        _put_into_all(path, vars(thing), value, in_state=True)
    elif _has_state(thing):
        thing.load_state_dict(value)
    elif isinstance(thing, MutableMapping) and isinstance(value, Mapping):
        _put_into_all(path, thing, value, in_state=in_state)
    elif isinstance(thing, (list, tuple)) and isinstance(value, type(thing)):
        pairs = zip(itertools.chain(thing, itertools.repeat(_ABSENT)), value, strict=False)
        parts = [
            put_into(f"{path}[{index}]", old, new, in_state=in_state)
            for index, (old, new) in enumerate(pairs)
        ]
        if isinstance(thing, list):
            thing[:] = parts
        elif len(parts) != len(thing) or not all(map(operator.is_, parts, thing)):
            return _like(thing, parts)
    elif _nests.kind(thing) == _nests.kind(value) == "jax" and thing.committed:
        import jax

        return jax.device_put(value, thing.sharding)
    elif not (_is_array(thing) and _fill(thing, value)):
        if not in_state and (_is_array(thing) or isinstance(thing, (MutableMapping, list, tuple))):
            raise ReplicaError(
                f"{path} is {_described(thing)}, but {_described(value)} at the checkpoint, or in "
                "replica 0"
            )
        return value
    return thing


def _put_into_all(path: str, things: Any, values: Any, *, in_state: bool) -> None:
    for name in things.keys() - values.keys():
        del things[name]
    for name, value in values.items():
        has_it = name in things or hasattr(things, "__missing__")
        old = things[name] if has_it else _ABSENT
        things[name] = put_into(f"{path}[{name!r}]", old, value, in_state=in_state)


def arrays_of_jax(thing: Any) -> "Iterator[Any]":
    """Yields the arrays of JAX in dicts and lists: code that replaces them may not tell these."""
    if _nests.kind(thing) == "jax":
        yield thing
    elif not _has_state(thing) and isinstance(thing, (MutableMapping, list, tuple)):
        for part in (_nests.children(thing) or {}).values():
            yield from arrays_of_jax(part)


def _has_state(thing: Any) -> bool:
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


def _is_array(thing: Any) -> bool:
    """Returns whether it is an array whose content can change."""
    return _nests.kind(thing) == "torch" or (
        _nests.kind(thing) == "numpy" and hasattr(thing, "__setitem__")
    )


def _is_value(thing: Any) -> bool:
    """Returns whether it never changes."""
    if isinstance(thing, (tuple, frozenset)):
        return all(map(_is_value, thing))
    return isinstance(thing, _VALUES) or (bool(_nests.kind(thing)) and not _is_array(thing))


def _fill(array: Any, value: Any) -> bool:
    """Puts values into an array, unless they are of another kind, shape or type."""
    kind = _nests.kind(array)
    if _nests.kind(value) != kind or (array.shape, array.dtype) != (value.shape, value.dtype):
        return False
    if kind == "torch":
        array.detach().copy_(value)
    else:
        array[...] = value
    return True


def _described(value: Any) -> str:
    shape = f"{value.dtype}{list(value.shape)}, " if _nests.kind(value) else ""
    return f"{shape}a {type(value).__name__}"


def _like(sequence: Any, parts: "Iterator[Any] | list[Any]") -> Any:
    """Returns parts as a list, or the kind of tuple that another one is."""
    if isinstance(sequence, list):
        return list(parts)
    return type(sequence)(*parts) if hasattr(sequence, "_fields") else tuple(parts)
