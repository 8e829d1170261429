"""Checks of numbers that users give."""


def check_number(name: str, number: object, lowest: int) -> None:
    """Refuses what is no whole number (TypeError), or too low (ValueError)."""
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"{name} is a whole number, not {number!r}")
    if number < lowest:
        raise ValueError(f"{name} is at least {lowest}, not {number}")
