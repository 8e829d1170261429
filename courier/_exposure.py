"""Which methods of an object can be called from afar."""

from collections.abc import Callable, Collection
from typing import Any


def exposed_methods(obj: object, hidden: Collection[str] = ()) -> dict[str, Callable[..., Any]]:
    """Returns the public methods of an object by name.

    Asks the object (`dir` and `getattr`), not its type, so that wrappers which
    forward attributes expose what they wrap. A callable object also has `__call__`.

    Args:
        obj: What is served.
        hidden: Names to leave out.
    """
    methods: dict[str, Callable[..., Any]] = {}
    for name in dir(obj):
        if (name.startswith("_") and name != "__call__") or name in hidden:
            continue
        attribute = _get(obj, name)
        if callable(attribute) and not _is_client(attribute):
            answers_later = name == "__call__" and hasattr(obj, "__courier_call__")
            methods[name] = obj if answers_later else attribute  # type: ignore[assignment]
    if not callable(obj):
        methods.pop("__call__", None)
    return methods


def _get(obj: object, name: str) -> Any:
    try:
        return getattr(obj, name)
    except Exception:  # noqa: BLE001 - a property that fails now is not a method
        return None


def _is_client(attribute: object) -> bool:
    # Clients are callable, because a served object may be; one kept in an attribute is no method.
    from courier._client import Client  # the client room knows this one

    return isinstance(attribute, Client)
