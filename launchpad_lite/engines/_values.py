"""Values by key: which keys are allowed, and which node has which; the user's code on them."""

import contextvars
import copy
import difflib
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from launchpad_lite.engines._user_code import run_user_code
from launchpad_lite.engines.barriers import BSP, Barrier
from launchpad_lite.engines.errors import UnknownKeyError, UpdateError

#: The key of a value: text, a whole number, bytes, or a tuple of these.
Key = str | int | bytes | tuple["Key", ...]

J = TypeVar("J", bound="KeyJob")

_pulls: contextvars.ContextVar[bool] = contextvars.ContextVar("pulls", default=False)


class KeyJob:
    """The code of nodes that have values by key, as users write it."""

    barrier: Barrier = BSP()

    #: Calls a method of the values, in a node of the engine.
    _ask: Callable[..., Any] | None = None

    def start(self) -> None:
        """Is called once in each node of the engine, before anything else: loads data, for instance."""

    # Keys of any type, so that a subclass may annotate its own: `values: dict[str, float]`.

    def initial(self) -> Mapping[Any, Any]:
        """Returns the first values by key. Called once, on the first node. None by default."""
        return {}

    def pull(self, key: Any, value: Any, update: Any) -> Any:  # noqa: ARG002
        """Returns the new value, where the key is. By default the sum of the value and the update.

        A node makes one call at a time. May not call `set`; on a server, no other method of values either.

        Args:
            key: Whose value it is.
            value: The value. Do not change it: others may be reading it.
            update: What `push` has computed.
        """
        return added(value, update)

    def _asked(self, method: str, *args: Any) -> Any:
        if self._ask is None:
            raise RuntimeError(
                f"{type(self).__name__} is in no node of the engine: add_to(program) puts it there; other "
                "nodes use the handle that it returns"
            )
        return self._ask(method, *args)

    def in_node(self: J, ask: Callable[..., Any]) -> J:
        """Returns a copy for a node of the engine. For the engine."""
        job = copy.copy(self)
        job._ask = ask
        return job


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


def check_outside_pull(name: str) -> None:
    """Raises an UpdateError in code of a `pull`, whose key is locked meanwhile."""
    if _pulls.get():
        raise UpdateError(
            f"pull may not call self.{name}: callers that wait for the key would wait for that, too"
        )


def added(value: Any, update: Any) -> Any:
    """Returns the sum of a value and an update of the same shape; numpy would repeat a smaller one."""
    shape, other = getattr(value, "shape", ()), getattr(update, "shape", ())
    if shape != other:
        raise ValueError(f"the value has the shape {shape}, the update {other}; write a pull")
    return value + update


def check_updates(updates: object, values: Mapping[Key, Any], worker: str, step: int) -> None:
    """Raises what is wrong with the updates that a `push` has returned for values, an UpdateError."""
    where = f"{worker}, step {step}: push"
    if not isinstance(updates, Mapping):
        raise UpdateError(f"{where} returned {updates!r}; it is to map keys to updates")
    if unknown := [key for key in updates if key not in values]:
        raise UpdateError(
            f"{where} returned an update for the key {unknown[0]!r}, which was not scheduled; "
            f"scheduled were {', '.join(map(repr, values)) or 'none'}"
        )


def pulled(
    job: object, node: str, key: Key, worker: str, step: int, value: Any, update: Any
) -> Any:
    """Returns the new value by the user's `pull`; an UpdateError if that fails.

    A worker made the update in a step; the node is where it is applied.
    """
    token = _pulls.set(True)
    try:
        return run_user_code(node, job, "pull", key, value, update)
    except Exception as error:
        raise UpdateError(
            f"{node}: the update of {key!r} that {worker} made in step {step} cannot be "
            f"applied: {type(error).__name__}: {error}"
        ) from error
    finally:
        _pulls.reset(token)
