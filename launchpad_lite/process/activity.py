"""What the threads of this process do now: which calls they answer, and what they wait for."""

import linecache
import os
import sys
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from courier import CallContext
from courier.lowlevel import answered_call, awaited_call
from launchpad_lite.life.events import IN_LIBRARY, ThreadActivity
from launchpad_lite.process.stacks import Stack, is_of_user, is_ours, walk_threads

#: Seconds for which threads are watched; one that computes uses a tenth of them at least.
_WATCH_S, _LEAST = 0.05, 0.1


def computing_threads() -> Collection[int]:
    """Watches for 50 ms which threads use the processor; none where the system does not tell."""
    ids = native_ids()
    before = {ident: scheduled_s(native)[0] for ident, native in ids.items()}
    time.sleep(_WATCH_S)
    return {
        ident
        for ident, native in ids.items()
        if ident is not None and scheduled_s(native)[0] - before[ident] > _LEAST * _WATCH_S
    }


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


def activities(
    computing: Collection[int],
    idents: Collection[int] | None = None,
    dispatchers: Collection[Any] | None = None,
) -> tuple[ThreadActivity, ...]:
    """Returns what threads, and tasks of their event loops, do: in user code, and in calls.

    Looks at the threads `idents` (None: all but the calling one), and at calls to servers of these
    `dispatchers` (None: all). The threads `computing` use the processor.
    """
    found: list[ThreadActivity] = []
    #: By the call that is answered: a task may do that, while a thread waits for it.
    answers: dict[CallContext, ThreadActivity] = {}
    for ident, _, stack in walk_threads(idents):
        for call, activity in _activities(stack, dispatchers, computes=ident in computing):
            if call is None:
                found.append(activity)
            elif call not in answers or activity.place != IN_LIBRARY:
                answers[call] = activity
    later = [  # no link of a deadlock: when others were looked at, it may have been otherwise
        ThreadActivity(method, reason, "unknown", server, is_limited=True)
        for each in dispatchers or ()
        for method, server, reason in each.waiting()
    ]
    return (*found, *answers.values(), *later)


def _activities(
    stack: Stack, dispatchers: Collection[object] | None, *, computes: bool
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
            yield (
                call,
                ThreadActivity(
                    own if call is None else call.method,
                    _place(*part[users[-1]]) if users else IN_LIBRARY,
                    "" if call is None else call.peer,
                    "" if waits is None else waits.server,
                    "" if waits is None else waits.method,
                    computes and end == len(stack),
                    waits is not None and waits.is_limited,
                ),
            )


def _place(frame: FrameType, line: int) -> str:
    file = frame.f_code.co_filename
    source = linecache.getline(file, line, frame.f_globals).strip()
    return f"{Path(file).name}:{line}: {source}".rstrip(": ")
