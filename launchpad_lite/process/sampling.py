"""Where the threads of this process spend their time, by samples that a thread of it takes."""

import collections
import math
import statistics
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import Any

from launchpad_lite.process.activity import native_ids, scheduled_s
from launchpad_lite.process.stacks import frames_of_threads, is_of_user, package_of

#: Seconds between two samples, at the least: taking them uses a twentieth of a core at most.
_PERIOD_S, _SHARE = 0.01, 0.05
#: The least part of that time for which a thread that computes has used a processor.
_LEAST = 0.1
_STATES = ("waits", "computes")

#: Name, file, line and kind of a frame: `user`, `library`, or `ours`, which have no file.
Place = tuple[str, str, int, str]


def sample(
    seconds: float, threads: Callable[[], Collection[int] | None], is_over: Callable[[], bool]
) -> dict[str, Any]:
    """Returns the samples of some seconds, for JSON: which stacks were seen how often.

    Threads without code of the user count only while they compute. `lock_s` has how long this
    thread waited for the interpreter lock when it woke up: the mean, and that of one time in a
    hundred. It is how late it was, less the time for which it waited for a processor. `threads`
    returns which threads are meant; None: all.
    """
    found: collections.Counter[tuple[str, str, tuple[Place, ...]]] = collections.Counter()
    kinds: dict[str, str] = {}
    used: dict[int, float] = {}  # seconds of a processor, by thread
    delays: list[float] = []
    own = threading.get_ident()
    began, period_s = time.monotonic(), _PERIOD_S
    taken_at = began
    while (due := time.monotonic() + period_s) < began + seconds and not is_over():
        queued_s = scheduled_s(threading.get_native_id())[1]
        time.sleep(period_s)
        last, taken_at = taken_at, time.monotonic()
        queued_s = scheduled_s(threading.get_native_id())[1] - queued_s
        delays.append(max(0.0, taken_at - due - queued_s))
        used_s = time.thread_time()
        ids, names = native_ids(), {each.ident: each.name for each in threading.enumerate()}
        chosen = threads()
        with frames_of_threads() as frames:
            for ident, frame in frames.items():
                if ident == own or not (chosen is None or ident in chosen):
                    continue
                before = used.get(ident, math.inf)
                used[ident] = scheduled_s(ids.get(ident))[0]
                computes = used[ident] - before > _LEAST * (taken_at - last)
                state = _STATES[computes] if sys.platform == "linux" else "runs or waits"
                if stack := tuple(_stack(frame, kinds, everything=computes)):
                    name = names.get(ident, f"thread {ident}")
                    found[state, name, stack] += 1
        period_s = max(_PERIOD_S, (time.thread_time() - used_s) / _SHARE)
    places = {place: i for i, place in enumerate(dict.fromkeys(p for key in found for p in key[2]))}
    late = sorted(delays) or [0.0]
    return {
        "seconds": time.monotonic() - began,
        "samples": len(delays),
        "lock_s": [statistics.fmean(late), late[int(0.99 * (len(late) - 1))]],
        "places": list(places),
        "stacks": [
            [state, name, [places[each] for each in stack], count]
            for (state, name, stack), count in found.items()
        ],
    }


def _stack(innermost: FrameType, kinds: dict[str, str], *, everything: bool) -> Iterator[Place]:
    """Yields the places of a stack from the first one of the user on; if it has none, `everything`."""
    frames: list[tuple[FrameType, str]] = []
    frame: FrameType | None = innermost
    while frame is not None:
        file = frame.f_code.co_filename
        if (kind := kinds.get(file)) is None:
            kind = "user" if is_of_user(file) else "ours" if package_of(file) else "library"
            kinds[file] = kind
        frames.append((frame, kind))
        frame = frame.f_back
    if (
        len(frames) > 1
        and frames[-1][0].f_code.co_filename == "<string>"
        and frames[-2][1] == "ours"
    ):
        frames.pop()  # how a host agent is started
    begun, before = everything and all(kind != "user" for _, kind in frames), ""
    for frame, kind in reversed(frames):
        begun = begun or kind == "user"
        code = frame.f_code
        package = package_of(code.co_filename) if kind == "ours" else ""
        if begun and not (package and package == before):
            name = getattr(code, "co_qualname", code.co_name)  # from 3.11 on
            line = frame.f_lineno or 0
            yield (package, "", 0, kind) if package else (name, code.co_filename, line, kind)
        before = package
