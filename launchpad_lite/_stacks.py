"""Where threads are, as text for people: user code first, our own frames left out."""

import os
import sys
import threading
import traceback
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from types import FrameType

_ROOT = str(Path(__file__).parents[1]) + "/"
_OURS = tuple(f"{_ROOT}{package}/" for package in ("launchpad_lite", "courier", "launchers"))
_STANDARD = str(Path(os.__file__).parent) + "/"
_INSTALLED = ("/site-packages/", "/dist-packages/")


def describe_threads(idents: Collection[int] | None = None) -> str:
    """Returns where threads of this process are.

    Args:
        idents: Of the threads; None: of all but the one that asks.
    """
    frames = sys._current_frames()
    chosen = frames.keys() - {threading.get_ident()} if idents is None else idents
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return describe_stacks(
        (names.get(ident, f"thread {ident}"), frame)
        for ident, frame in frames.items()
        if ident in chosen
    )


def describe_stacks(stacks: Iterable[tuple[str, FrameType]]) -> str:
    """Returns the stacks of those threads that run user code.

    Each begins at the first line of user code; what happens within this library is one line.

    Args:
        stacks: Names of threads and their innermost frames.
    """
    parts = [
        f"{name}:\n{text}"
        for name, frame in stacks
        if (text := "".join(_lines(traceback.extract_stack(frame))).rstrip())
    ]
    return "\n\n".join(parts) or "no user code runs"


def _lines(stack: list[traceback.FrameSummary]) -> Iterator[str]:
    if len(stack) > 1 and stack[0].filename == "<string>" and _is_ours(stack[1].filename):
        stack = stack[1:]  # `python -c` that runs nothing but us: how a host agent is started
    inside = ""
    has_begun = False
    for each in stack:
        if _is_ours(each.filename):
            package = each.filename.removeprefix(_ROOT).partition("/")[0]
            if has_begun and package != inside:
                yield f"    (inside {package})\n"
            inside = package
        elif _is_users(each.filename) or (has_begun and not inside):
            has_begun, inside = True, ""
            yield from traceback.format_list([each])


def _is_ours(filename: str) -> bool:
    return filename.startswith(_OURS)


def _is_users(filename: str) -> bool:
    if filename.startswith((_STANDARD, "<frozen ")):
        return any(part in filename for part in _INSTALLED)
    return not _is_ours(filename)
