"""Settings as users write them: an object, or a dict of its fields; numbers."""

import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import TypeVar

T = TypeVar("T")


def made_from(kind: type[T], given: object, expected: str, *, called: str = "setting") -> T:
    """Returns an object of a dataclass, as given or made from a dict; unknown names are a ValueError.

    For messages, `expected` names the types besides a dict, and `called` the kind of a field.
    """
    import dataclasses

    if isinstance(given, kind):
        return given
    if not isinstance(given, Mapping):
        raise TypeError(f"expected {expected} or a dict, got {given!r}")
    known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    if unknown := sorted(set(given) - set(known), key=repr):
        meant = did_you_mean(unknown[0], known)
        raise ValueError(f"unknown {called} {unknown[0]!r}{meant}; known are {', '.join(known)}")
    return kind(**given)


def nearest(name: object, known: Iterable[str]) -> str | None:
    """Returns the most similar name; None if none is similar."""
    import difflib

    alike = {each.replace("-", "_"): each for each in known}
    found = difflib.get_close_matches(str(name).replace("-", "_"), alike, 1, 0.75)
    return alike[found[0]] if found else None


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Returns the question for messages, with a space before it; empty if no name is similar."""
    near = nearest(name, known)
    return "" if near is None else f" (did you mean {near!r}?)"


def check_number(name: str, number: object, lowest: int) -> None:
    """Refuses what is no whole number (TypeError), or too low (ValueError)."""
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"{name} is a whole number, not {number!r}")
    if number < lowest:
        raise ValueError(f"{name} is at least {lowest}, not {number}")


def check_quantity(
    name: str, value: object, *, positive: bool = False, infinite: bool = False
) -> float:
    """Refuses what is no number (TypeError), or is below 0, 0 if `positive`, or not finite (ValueError).

    Returns it as a number of Python: the standard library does not wait for the seconds of numpy.
    """
    if isinstance(value, bool) or not isinstance(value, int | Real):
        raise TypeError(f"{name} is a number, not {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.nan
    too_small = number <= 0 if positive else number < 0
    if too_small or math.isnan(number) or (math.isinf(number) and not infinite):
        least = "above 0" if positive else "at least 0"
        raise ValueError(
            f"{name} cannot be {value}: it is {least}{'' if infinite else ' and finite'}"
        )
    return value if isinstance(value, int) else number
