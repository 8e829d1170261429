"""Settings as users write them down: an object, or a dict of its fields."""

import dataclasses
from collections.abc import Mapping
from typing import Any


def checked_fields(
    kind: type, given: object, expected: str, *, called: str = "setting"
) -> dict[str, Any]:
    """Returns the fields of a dataclass that a dict gives.

    Args:
        kind: The dataclass.
        given: What the user wrote.
        expected: What it may be besides a dict; for messages.
        called: What one field is; for messages.

    Raises:
        TypeError: It is no mapping.
        ValueError: A name is unknown.
    """
    if not isinstance(given, Mapping):
        raise TypeError(f"expected {expected} or a dict, got {given!r}")
    known = [field.name for field in dataclasses.fields(kind)]
    if unknown := sorted(set(given) - set(known), key=repr):
        raise ValueError(f"unknown {called} {unknown[0]!r}; known are {', '.join(known)}")
    return dict(given)
