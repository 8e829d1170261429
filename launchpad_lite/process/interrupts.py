"""The KeyboardInterrupt after a Ctrl-C that ended a program: scripts show no traceback for it."""

import functools
import sys
from types import TracebackType

#: Marks exceptions that need no traceback. Their type must be KeyboardInterrupt itself, with which
#: the interpreter ends by SIGINT.
_MARK = "_launchpad_lite_stopped_a_program"


def is_interactive() -> bool:
    """Returns whether a person types into this interpreter: at a prompt, or in a notebook."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def interrupt() -> KeyboardInterrupt:
    """Returns the exception to raise after SIGINT has ended a program in order."""
    _install()
    error = KeyboardInterrupt()
    setattr(error, _MARK, True)
    return error


@functools.cache
def _install() -> None:
    previous = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        if not hasattr(error, _MARK):
            previous(kind, error, traceback)

    sys.excepthook = hook
