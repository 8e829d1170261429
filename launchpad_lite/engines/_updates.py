"""Updates that workers compute: checks what `push` returns, and applies it by `pull`."""

import contextvars
from collections.abc import Mapping
from typing import Any

from launchpad_lite.engines._keys import Key
from launchpad_lite.engines._user_code import run_user_code
from launchpad_lite.engines.errors import UpdateError

_pulls: contextvars.ContextVar[bool] = contextvars.ContextVar("pulls", default=False)


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
