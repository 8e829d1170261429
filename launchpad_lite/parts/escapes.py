"""Output of nodes in a form that is safe for terminals."""

import re

#: Control characters, with the rest of a movement or a link. Compiled at the first use, which takes
#: half a millisecond.
_OBEYED = (
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]"
    r"(?!(?<=\x1b)\[[0-9;:]*m)"  # a colour
    r"(?:(?<=\x1b)(?:\[[0-?]*[ -/]*[@-~]|\]8;[^\x00-\x1f\x7f-\x9f]*(?:\x07|\x1b\\)))?"
)


def shown(text: str) -> str:
    """Returns text that changes only its own lines in a terminal.

    Colours, tabs, returns and ends of lines stay. Movements of the cursor and links are left out.
    Other control characters, and bytes that are no text, become their escapes in Python. May be
    applied again.
    """
    return text if text.isprintable() else re.sub(_OBEYED, _harmless, text)


def _harmless(found: re.Match[str]) -> str:
    return "" if len(found[0]) > 1 else found[0].encode("unicode_escape").decode()
