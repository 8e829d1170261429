"""Texts about errors, cut to a limit of length."""

#: Longer texts of exceptions are cut.
MOST_CHARACTERS = 1 << 16


def shortened(text: str, most: int = MOST_CHARACTERS) -> str:
    """Cuts a text to `most` characters in its middle."""
    if len(text) <= most:
        return text
    # Keeps both ends: a message begins with the error, a traceback ends with it.
    half = most // 2 - 40
    missing = len(text) - 2 * half
    return f"{text[:half]} ... [{missing:,} characters are left out] ... {text[-half:]}"


def said_by(error: object) -> str:
    """Returns the message of an exception, or the text of a note, even if its code raises."""
    try:
        return str(error)
    except BaseException:  # noqa: BLE001 - a broken __str__ must not hide the failure
        return "<its __str__ failed>"
