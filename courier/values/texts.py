"""Texts about errors, cut to a limit of length."""

from collections.abc import Iterable

#: Longer texts of exceptions are cut.
MOST_CHARACTERS = 1 << 16


def shortened(text: str, most: int = MOST_CHARACTERS, *, left_out: int = 0) -> str:
    """Cuts a text to `most` characters in its middle, where `left_out` are missing already."""
    if len(text) <= most:
        return text
    # Keeps both ends: a message begins with the error, a traceback ends with it.
    half = most // 2 - 40
    missing = len(text) - 2 * half + left_out
    return f"{text[:half]} ... [{missing:,} characters are left out] ... {text[-half:]}"


def joined(pieces: Iterable[str]) -> str:
    """Returns the pieces as one shortened text; never holds much more than that."""
    text, left_out, half = "", 0, MOST_CHARACTERS // 2
    for piece in pieces:
        text += piece
        if (extra := len(text) - 2 * MOST_CHARACTERS) > 0:
            text = text[:half] + text[half + extra :]
            left_out += extra
    return shortened(text, left_out=left_out)


def said_by(error: object) -> str:
    """Returns the message of an exception, or the text of a note, even if its code raises."""
    try:
        return str(error)
    except BaseException:  # noqa: BLE001 - a broken __str__ must not hide the failure
        return "<its __str__ failed>"
