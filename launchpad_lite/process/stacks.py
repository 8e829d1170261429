"""Stacks of threads as text: user code first, without our own frames."""

import contextlib
import gc
import os
import sys
import threading
import traceback
from collections.abc import Collection, Iterator
from pathlib import Path
from types import CoroutineType, FrameType
from typing import Any

from courier.lowlevel import AwaitedCall, awaited_call
from launchpad_lite.life.result import named

_ROOT = str(Path(__file__).parents[2]) + "/"
_OURS = tuple(f"{_ROOT}{package}/" for package in ("launchpad_lite", "courier", "launchers"))
_STANDARD = str(Path(os.__file__).parent) + "/"
_MAX_NAMED = 3  # threads at the same place to name; more are counted
Stack = list[tuple[FrameType, int]]  # frames and their lines, the innermost last
_INSTALLED = ("/site-packages/", "/dist-packages/")
_looking = threading.RLock()
_rests = False  # whether the garbage collector is off because of that
_stacks: dict[int, Stack] = {}  # of the block that looks at them now


@contextlib.contextmanager
def stacks_of_threads() -> Iterator[dict[int, Stack]]:
    """Gives the stack of each thread of this process, by its ident. Use them in the block only.

    All are taken at once: threads run on, and a frame that has returned knows no longer who called it.
    A block inside another gets the same stacks. The garbage collector is off meanwhile. CPython
    3.11 may collect when it makes the object of a frame, for `f_back` too. If code of a destructor
    then lets another thread run, it crashes or hangs (python/cpython#106883).
    """
    global _rests
    with _looking:
        if _stacks:
            yield _stacks
            return
        _rests = gc.isenabled()
        gc.disable()
        try:
            _stacks.update({ident: _stack_of(it) for ident, it in sys._current_frames().items()})
            yield _stacks
        finally:
            for stack in _stacks.values():
                stack.clear()  # frames that have looked at it would keep what its thread uses
            _stacks.clear()
            _end_rest()


def _end_rest() -> None:
    global _rests
    if _rests:
        _rests = False
        gc.enable()


def _survive_fork() -> None:
    global _looking
    _looking = threading.RLock()  # its owner is not in the child
    _stacks.clear()
    _end_rest()


os.register_at_fork(after_in_child=_survive_fork)


def describe_threads(idents: Collection[int] | None = None) -> str:
    """Returns the stacks of threads, and of tasks of their loops; None: all but this thread.

    Only those that run user code are shown; threads at the same place share an entry.
    """
    names: dict[str, list[str]] = {}
    for _, name, stack in walk_threads(idents):
        if text := "".join(_lines(stack)).rstrip():
            names.setdefault(text, []).append(name)
    parts = [f"{named(sorted(found), _MAX_NAMED)}:\n{text}" for text, found in names.items()]
    return "\n\n".join(parts) or "no user code runs"


def walk_threads(idents: Collection[int] | None) -> Iterator[tuple[int | None, str, Stack]]:
    """Yields ident, name and stack of each thread, then None, name and stack of each of its tasks.

    Use a stack before the next one is taken. `idents` as for `describe_threads`.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    with stacks_of_threads() as stacks:
        chosen = stacks.keys() - {threading.get_ident()} if idents is None else idents
        for ident, stack in stacks.items():
            if ident in chosen:
                yield ident, names.get(ident, f"thread {ident}"), stack
                for name, stack_of_task in _tasks_below(stack):
                    yield None, name, stack_of_task


def _stack_of(frame: FrameType) -> Stack:
    """Returns the stack of a thread, without `python -c`, by which a host agent is started."""
    stack = [*traceback.walk_stack(frame)][::-1]
    files = [each.f_code.co_filename for each, _ in stack[:2]]
    return stack[1:] if files[0] == "<string>" and is_ours(files[-1]) else stack


def _tasks_below(stack: Stack) -> Iterator[tuple[str, Stack]]:
    """Yields the tasks that wait in the event loop that a thread runs, if it runs one."""
    if "asyncio" not in sys.modules:
        return
    import asyncio  # slow to import, and loaded if there is a loop

    runs = asyncio.BaseEventLoop.run_forever.__code__
    for loop in [frame.f_locals["self"] for frame, _ in stack if frame.f_code is runs]:
        for task in sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name()):
            coroutine = task.get_coro()
            if not (type(coroutine) is CoroutineType and coroutine.cr_running):
                yield task.get_name(), [*_awaited(coroutine)]


def _awaited(coroutine: Any) -> Iterator[tuple[FrameType, int]]:
    """Yields the frames of a coroutine, and of its awaited coroutines, the innermost last."""
    # By types: other objects may answer any name of an attribute, by code of the user.
    while coroutine is not None:
        if type(coroutine) is CoroutineType and (frame := coroutine.cr_frame) is not None:
            yield frame, frame.f_lineno
            coroutine = coroutine.cr_await
        else:  # around another coroutine: our call, or what its `__await__` has returned
            is_wrapper = type(coroutine).__name__ in ("AioCall", "coroutine_wrapper")
            inner = gc.get_referents(coroutine) if is_wrapper else ()
            coroutine = next((each for each in inner if type(each) is CoroutineType), None)


def _lines(stack: Stack) -> Iterator[str]:
    inside = ""
    called: AwaitedCall | None = None
    has_begun = False
    for frame, line in stack:
        code = frame.f_code
        if is_ours(code.co_filename):
            inside = package_of(code.co_filename)
            called = called or awaited_call(frame)
            continue
        if not (is_of_user(code.co_filename) or (has_begun and not inside)):
            continue
        if has_begun and inside:
            yield _note(inside, called)
        has_begun, inside, called = True, "", None
        yield from traceback.format_list([(code.co_filename, line, code.co_name, None)])
    if has_begun and inside:
        yield _note(inside, called)


def _note(package: str, called: AwaitedCall | None) -> str:
    return f"    (waits for {called.where})\n" if called else f"    (inside {package})\n"


def is_ours(filename: str) -> bool:
    return filename.startswith(_OURS)


def package_of(filename: str) -> str:
    """Returns which package of ours has a file; "" for others."""
    return filename.removeprefix(_ROOT).partition("/")[0] if is_ours(filename) else ""


def is_of_user(filename: str) -> bool:
    """Returns whether code of a file is the user's, or of a package that is installed."""
    if filename.startswith((_STANDARD, "<frozen ")):
        return any(part in filename for part in _INSTALLED)
    return not is_ours(filename)
