"""Where threads are, as text for people: user code first, our own frames left out."""

import contextlib
import gc
import os
import sys
import threading
import traceback
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from courier._connection import Connection
from courier._future import CallFuture
from launchpad_lite._result import named

_ROOT = str(Path(__file__).parents[1]) + "/"
_OURS = tuple(f"{_ROOT}{package}/" for package in ("launchpad_lite", "courier", "launchers"))
_STANDARD = str(Path(os.__file__).parent) + "/"
#: Threads at the same place that are named; the others are counted.
_MAX_NAMED = 3
_Stack = list[tuple[FrameType, int]]
_INSTALLED = ("/site-packages/", "/dist-packages/")
_looking = threading.RLock()
#: Whether garbage is not collected because of that.
_rests = False


@contextlib.contextmanager
def frames_of_threads() -> Iterator[dict[int, FrameType]]:
    """Gives the frame of each thread of this process, by its ident. Look at them in the block only.

    No garbage is collected meanwhile. CPython 3.11 may collect when it makes the object of a frame, for
    `f_back` too. If code of a destructor then has another thread run, it crashes, or stands still for
    ever (python/cpython#106883).
    """
    global _rests
    with _looking:
        begins = gc.isenabled()
        _rests |= begins
        gc.disable()
        try:
            yield sys._current_frames()
        finally:
            if begins:
                _end_rest()


def _end_rest() -> None:
    global _rests
    if _rests:
        _rests = False
        gc.enable()


def _survive_fork() -> None:
    global _looking
    _looking = threading.RLock()  # its holder is not in the child
    _end_rest()


os.register_at_fork(after_in_child=_survive_fork)


def describe_threads(idents: Collection[int] | None = None) -> str:
    """Returns where threads of this process are, and the tasks of their event loops.

    Args:
        idents: Of the threads; None: of all but the one that asks.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks: list[tuple[str, _Stack]] = []
    with frames_of_threads() as frames:
        chosen = frames.keys() - {threading.get_ident()} if idents is None else idents
        for ident, frame in frames.items():
            if ident in chosen:
                stack = [*traceback.walk_stack(frame)][::-1]
                stacks.append((names.get(ident, f"thread {ident}"), stack))
                stacks += _tasks_below(stack)
        return _describe(stacks)


def _tasks_below(stack: _Stack) -> Iterator[tuple[str, _Stack]]:
    """Yields the tasks that wait in the event loop that a thread runs, if it runs one."""
    if "asyncio" not in sys.modules:
        return
    import asyncio  # slow to import, and loaded where there is a loop

    runs = asyncio.BaseEventLoop.run_forever.__code__
    for loop in [frame.f_locals["self"] for frame, _ in stack if frame.f_code is runs]:
        for task in sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name()):
            if not getattr(task.get_coro(), "cr_running", False):
                yield task.get_name(), [*_awaited(task.get_coro())]


def _awaited(coroutine: Any) -> Iterator[tuple[FrameType, int]]:
    """Yields the frames of a coroutine, and of what it awaits, the innermost last."""
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        yield frame, frame.f_lineno
        coroutine = coroutine.cr_await


def _describe(stacks: Iterable[tuple[str, _Stack]]) -> str:
    """Returns the stacks of those threads and tasks that run user code.

    Each begins at the first line of user code; what happens within this library is one line. Those
    that are at the same place share one entry.

    Args:
        stacks: Names of threads and tasks, and their frames, the innermost last.
    """
    names: dict[str, list[str]] = {}
    for name, stack in stacks:
        if text := "".join(_lines(stack)).rstrip():
            names.setdefault(text, []).append(name)
    parts = [f"{named(sorted(found), _MAX_NAMED)}:\n{text}" for text, found in names.items()]
    return "\n\n".join(parts) or "no user code runs"


def _lines(stack: _Stack) -> Iterator[str]:
    files = [frame.f_code.co_filename for frame, _ in stack]
    if len(stack) > 1 and files[0] == "<string>" and _is_ours(files[1]):
        stack = stack[1:]  # `python -c` that runs nothing but us: how a host agent is started
    inside = ""
    called = ""
    has_begun = False
    for frame, line in stack:
        code = frame.f_code
        if _is_ours(code.co_filename):
            inside = code.co_filename.removeprefix(_ROOT).partition("/")[0]
            called = called or _called(frame)
            continue
        if not (_is_users(code.co_filename) or (has_begun and not inside)):
            continue
        if has_begun and inside:
            yield _note(inside, called)
        has_begun, inside, called = True, "", ""
        yield from traceback.format_list([(code.co_filename, line, code.co_name, None)])
    if has_begun and inside:
        yield _note(inside, called)


def _called(frame: FrameType) -> str:
    """Returns which method of which node a frame of courier waits for, if it does."""
    values = frame.f_locals
    if frame.f_code is Connection.finish.__code__:
        return str(values["self"].where(values["method"]))
    if frame.f_code is CallFuture.result.__code__:
        return str(values["self"].where)
    return ""


def _note(package: str, called: str) -> str:
    return f"    (waits for {called})\n" if called else f"    (inside {package})\n"


def _is_ours(filename: str) -> bool:
    return filename.startswith(_OURS)


def _is_users(filename: str) -> bool:
    if filename.startswith((_STANDARD, "<frozen ")):
        return any(part in filename for part in _INSTALLED)
    return not _is_ours(filename)
