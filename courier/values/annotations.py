"""Signatures and annotations that name what only type checkers import.

Since Python 3.14, annotations are evaluated when they are read, which fails for such a name.
"""

import inspect
import sys
from collections.abc import Callable
from typing import Any

_OPTIONS: dict[str, Any] = {}
if sys.version_info >= (3, 14):
    import annotationlib  # `inspect` has loaded it

    _OPTIONS["annotation_format"] = annotationlib.Format.FORWARDREF


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Returns a signature as `inspect.signature` does, in which unknown names stay names.

    Example:
        lowlevel.signature_of(make_program).bind(1)
    """
    return inspect.signature(function, **_OPTIONS)


def make_readable(function: Any) -> None:
    """Turns annotations that cannot be evaluated into text, so that the function can be pickled."""
    if sys.version_info >= (3, 14):
        try:
            _ = function.__annotations__
        except Exception:  # noqa: BLE001 - it is code of users
            text = annotationlib.get_annotations(function, format=annotationlib.Format.STRING)
            function.__annotations__ = text
