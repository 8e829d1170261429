"""What the threads of this process do now: which calls they answer, and what they wait for."""

import inspect
import linecache
import os
import re
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from courier import CallContext
from courier.lowlevel import Parcel, answered_call, awaited_call
from launchpad_lite.life.events import (
    AT_MOST,
    COMPUTES,
    IN_LIBRARY,
    READS,
    SLEEPS,
    WAITS,
    WAITS_FOR_FILES,
    WAITS_FOR_PROCESS,
    ThreadActivity,
)
from launchpad_lite.process.stacks import Stack, is_of_user, is_ours, walk_threads

#: Seconds for which threads are watched; one that computes wants a twentieth of them at least.
_WATCH_S, _LEAST = 0.05, 0.05
#: What a thread does in a call of the system; "{}" is the file that its first argument names.
_READS, _WRITES, _WAITS_FOR_LOCK = f"{READS}{{}}", "writes {}", "waits for a lock"
_WAITS_FOR_FILE_LOCK, _WAITS_FOR_DISK = "waits for a lock of {}", "waits until {} is on the disk"
#: Texts by the numbers of such calls.
_CALLS_BY_MACHINE: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "x86_64": {
        _READS: (0, 17, 19, 45, 47),
        _WRITES: (1, 18, 20, 44, 46),
        SLEEPS: (35, 230),
        _WAITS_FOR_LOCK: (202,),
        WAITS_FOR_PROCESS: (61, 247),
        WAITS_FOR_FILES: (7, 23, 42, 43, 232, 270, 271, 281, 288),
        _WAITS_FOR_FILE_LOCK: (72, 73),
        _WAITS_FOR_DISK: (74, 75),
    },
    "aarch64": {
        _READS: (63, 65, 67, 207, 212),
        _WRITES: (64, 66, 68, 206, 211),
        SLEEPS: (101, 115),
        _WAITS_FOR_LOCK: (98,),
        WAITS_FOR_PROCESS: (95, 260),
        WAITS_FOR_FILES: (22, 72, 73, 202, 203, 242),
        _WAITS_FOR_FILE_LOCK: (25, 32),
        _WAITS_FOR_DISK: (82, 83),
    },
}
_CALLS = {
    str(number): text
    for text, numbers in _CALLS_BY_MACHINE.get(os.uname().machine, {}).items()
    for number in numbers
}
#: What waits in functions of the standard library, by file and function.
_WAITS_IN = {
    ("queue.py", "get"): "waits for an item of a queue",
    ("queue.py", "put"): "waits for room in a queue",
    ("subprocess.py", ""): WAITS_FOR_PROCESS,
    ("tasks.py", "sleep"): SLEEPS,  # of asyncio
    ("threading.py", "wait"): "waits for an event",
}
_NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
_OWNER = re.compile(r"owner=(\d+)")


class _Wait(NamedTuple):
    """What a thread does; `behind`: the thread for which it waits, 0 if for none."""

    text: str
    behind: int = 0


def watch_threads() -> Mapping[int, str]:
    """Watches for 50 ms what threads do: `computes`, `sleeps`, `reads standard input`, ...

    Returns it by the ident of the thread; those of which the system tells nothing are missing.
    """
    ids = native_ids()
    before = {ident: sum(scheduled_s(native)) for ident, native in ids.items()}
    time.sleep(_WATCH_S)
    found: dict[int, str] = {}
    for ident, native in ids.items():
        computes = sum(scheduled_s(native)) - before[ident] > _LEAST * _WATCH_S
        if ident is not None and (text := COMPUTES if computes else _call_of_system(native)):
            found[ident] = text
    return found


def native_ids() -> dict[int | None, int | None]:
    """Returns the numbers of the system for threads, by ident."""
    ids = {each.ident: each.native_id for each in threading.enumerate()}
    if sys.platform == "linux":  # after a fork, some Pythons know the number of the parent's
        ids[threading.main_thread().ident] = os.getpid()
    return ids


def scheduled_s(native_id: int | None) -> tuple[float, float]:
    """Returns for how long a thread has used a processor, and waited for one, in seconds."""
    try:
        ran, queued, _ = Path(f"/proc/self/task/{native_id}/schedstat").read_text().split()
    except OSError:  # it has ended, or the system is another one
        return 0.0, 0.0
    return int(ran) * 1e-9, int(queued) * 1e-9


def _call_of_system(native_id: int | None) -> str:
    try:
        call, *arguments = Path(f"/proc/self/task/{native_id}/syscall").read_text().split()
        text = _CALLS.get(call, "")
        return text.format(_file(int(arguments[0], 16))) if "{}" in text else text
    except (OSError, ValueError):
        return ""


def _file(descriptor: int) -> str:
    if descriptor == 0:
        return "standard input"
    kind, _, number = str(Path(f"/proc/self/fd/{descriptor}").readlink()).partition(":[")
    return f"a {kind}" if number else kind


def activities(
    doing: Mapping[int, str],
    idents: Collection[int] | None = None,
    dispatchers: Collection[Any] | None = None,
) -> tuple[ThreadActivity, ...]:
    """Returns what threads, and tasks of their event loops, do: in user code, and in calls.

    Looks at the threads `idents` (None: all but the calling one), and at calls to servers of these
    `dispatchers` (None: all). `doing` is what `watch_threads` has returned.
    """
    found: list[ThreadActivity] = []
    #: By the call that is answered: a task may do that, while a thread waits for it.
    answers: dict[CallContext, ThreadActivity] = {}
    for ident, _, stack in walk_threads(idents):
        wait = _wait(stack, doing.get(ident, "") if ident is not None else "")
        for call, activity in _activities(stack, dispatchers, ident or 0, wait):
            if call is None:
                found.append(activity)
            elif call not in answers or activity.place != IN_LIBRARY:
                answers[call] = activity
    later = [  # no link of a deadlock: when others were looked at, it may have been otherwise
        ThreadActivity(method, reason, "unknown", server, is_limited=True)
        for each in dispatchers or ()
        for method, server, reason in each.waiting()
    ]
    told = {each.runs for each in later}  # the library's own wait tells less
    known = (
        each for each in answers.values() if not (each.place == IN_LIBRARY and each.runs in told)
    )
    return (*found, *known, *later)


def places(dispatcher: object) -> dict[CallContext, str]:
    """Returns where the methods are that answer calls to a server of this process now."""
    found = {}
    for _, _, stack in walk_threads(None):
        for call, does in _activities(stack, (dispatcher,), 0, _Wait("")):
            if call is not None:
                wait = f" and waits for {does.server}: {does.method}" if does.server else ""
                found[call] = f"{wait} ({does.place})"
    return found


def _activities(
    stack: Stack, dispatchers: Collection[object] | None, ident: int, wait: _Wait
) -> Iterator[tuple[CallContext | None, ThreadActivity]]:
    """Yields what a thread does in its own code (None), and in each call that it answers.

    It answers several where methods call others of the same process.
    """
    calls = [(index, answered_call(frame)) for index, (frame, _) in enumerate(stack)]
    begins = [(0, None), *((index, call) for index, call in calls if call is not None)]
    ends = [*(index for index, _ in begins[1:]), len(stack)]
    for (begin, call), end in zip(begins, ends, strict=True):
        part = stack[begin:end]
        if call is not None and dispatchers is not None:
            server = part[0][0].f_locals.get("self")  # a task has none: its loop is of the node
            if server is not None and all(each is not server for each in dispatchers):
                continue
        files = [frame.f_code.co_filename for frame, _ in part]
        # Before our frames there is how the process was started.
        begun = next((index for index, file in enumerate(files) if is_ours(file)), 0)
        users = [index for index in range(begun, len(part)) if is_of_user(files[index])]
        waits = next(filter(None, (awaited_call(frame) for frame, _ in reversed(part))), None)
        if users or waits or call:
            own = part[users[0]][0].f_code.co_name if users else "run"
            is_last = end == len(stack)
            # Before 3.12, `asyncio.wait_for` makes a task of the call alone.
            may_end = ident == 0 and not users and sys.version_info < (3, 12)
            caller = part[0][0].f_back if call and part else None
            arguments = None if caller is None else caller.f_locals.get("arguments")
            doing = wait.text if is_last else WAITS
            yield (
                call,
                ThreadActivity(
                    own if call is None else call.method,
                    _place(*part[users[-1]]) if users else IN_LIBRARY,
                    "" if call is None else call.peer,
                    "" if waits is None else waits.server,
                    "" if waits is None else waits.method,
                    doing,
                    (waits.is_limited or may_end) if waits else doing.endswith(AT_MOST),
                    ident,
                    wait.behind if is_last else 0,
                    0.0 if call is None else round(time.perf_counter() - call.began, 3),
                    arguments.total_bytes if isinstance(arguments, Parcel) else 0,
                ),
            )


def _wait(stack: Stack, doing: str) -> _Wait:
    """Returns what a thread does, by its stack, and by what the system says."""
    names: dict[int | None, str] = {each.ident: each.name for each in threading.enumerate()}
    limit = ""
    if doing == COMPUTES or not stack:
        return _Wait(doing or WAITS)
    for frame, _ in reversed(stack):
        file, function = Path(frame.f_code.co_filename).name, frame.f_code.co_name
        if is_of_user(frame.f_code.co_filename) or is_ours(frame.f_code.co_filename):
            break
        timeout = frame.f_locals.get("timeout")
        if isinstance(timeout, int | float) and timeout >= 0:  # -1 is none
            limit = AT_MOST
        if (file, function) == ("threading.py", "join"):
            thread = frame.f_locals.get("self")
            if isinstance(thread, threading.Thread) and thread.ident is not None:
                return _Wait(f"waits for the thread {names.get(thread.ident)}{limit}", thread.ident)
        if text := _WAITS_IN.get((file, function)) or _WAITS_IN.get((file, "")):
            doing = text
    if doing in ("", _WAITS_FOR_LOCK):
        for owner in _owners(*stack[-1]):
            return _Wait(f"waits for a lock that {names.get(owner, 'no thread')} holds", owner)
    return _Wait((doing or WAITS) + limit)


def _owners(frame: FrameType, line: int) -> Iterator[int]:
    """Yields the threads that hold locks which a line of code names. Runs no code of the user."""
    source = linecache.getline(frame.f_code.co_filename, line, frame.f_globals)
    if "with" not in source and "acquire" not in source:
        return
    for name in _NAME.findall(source):
        root, *attributes = name.split(".")
        value: Any = frame.f_locals.get(root, frame.f_globals.get(root))
        for each in attributes:
            found = inspect.getattr_static(value, each, None)
            value = value if each == "acquire" else found
        if type(value) is threading.Condition:
            value = vars(value)["_lock"]
        if type(value) is _RLOCK and (owner := _OWNER.search(repr(value))) and owner[1] != "0":
            yield int(owner[1])


_RLOCK = type(threading.RLock())


def _place(frame: FrameType, line: int) -> str:
    file = frame.f_code.co_filename
    source = linecache.getline(file, line, frame.f_globals).strip()
    return f"{Path(file).name}:{line}: {source}".rstrip(": ")
