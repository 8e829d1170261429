"""Ctrl-C that ended a program: a script that it leaves shows no traceback of ours."""

import sys
from types import TracebackType

#: Set on the exceptions that need no traceback. They must be KeyboardInterrupt itself: only that
#: makes the interpreter end by SIGINT.
_MARK = "_launchpad_lite_stopped_a_program"
_is_installed = False


def is_interactive() -> bool:
    """Returns whether a person types into this interpreter: at a prompt, or in a notebook."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def interrupt() -> KeyboardInterrupt:
    """Returns what to raise when SIGINT has ended a program, in order."""
    global _is_installed
    if not _is_installed:
        _is_installed = True
        _install()
    error = KeyboardInterrupt()
    setattr(error, _MARK, True)
    return error


def _install() -> None:
    previous = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        if not hasattr(error, _MARK):
            previous(kind, error, traceback)

    sys.excepthook = hook
