"""Where the threads of this process spend their time, by samples that a thread of it takes."""

import collections
import statistics
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

from launchpad_lite.life.events import COMPUTES, WAITS
from launchpad_lite.process import stacks
from launchpad_lite.process.activity import native_ids, scheduled_s

#: Seconds between two samples, at the least: taking them uses a twentieth of a core at most.
_PERIOD_S, _SHARE = 0.01, 0.05
#: The least part of that time for which a thread that computes has used a processor.
_LEAST = 0.1
_STATES = (WAITS, COMPUTES)

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
    period_s = _PERIOD_S
    began = taken_at = time.monotonic()
    while (due := time.monotonic() + period_s) < began + seconds and not is_over():
        queued_s = scheduled_s(threading.get_native_id())[1]
        time.sleep(period_s)
        last, taken_at = taken_at, time.monotonic()
        queued_s = scheduled_s(threading.get_native_id())[1] - queued_s
        delays.append(max(0.0, taken_at - due - queued_s))
        used_s = time.thread_time()
        ids, names = native_ids(), {each.ident: each.name for each in threading.enumerate()}
        chosen = threads()
        with stacks.stacks_of_threads() as taken:
            for ident, frames in taken.items():
                if ident == own or not (chosen is None or ident in chosen):
                    continue
                used_before, used[ident] = used.get(ident), scheduled_s(ids.get(ident))[0]
                if used_before is None:
                    continue
                computes = used[ident] - used_before > _LEAST * (taken_at - last)
                state = _STATES[computes] if sys.platform == "linux" else "runs or waits"
                if stack := tuple(_places(frames, kinds, everything=computes)):
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


def _places(stack: stacks.Stack, kinds: dict[str, str], *, everything: bool) -> Iterator[Place]:
    """Yields the places of a stack from the first one of the user on; if it has none, `everything`."""
    for file in {frame.f_code.co_filename for frame, _ in stack} - kinds.keys():
        kinds[file] = (
            "user" if stacks.is_of_user(file) else "ours" if stacks.package_of(file) else "library"
        )
    users = [kinds[frame.f_code.co_filename] == "user" for frame, _ in stack]
    begin = users.index(True) if True in users else 0 if everything else len(stack)
    before = ""
    for frame, line in stack[begin:]:
        code = frame.f_code
        kind, package = kinds[code.co_filename], stacks.package_of(code.co_filename)
        if not package:
            name = getattr(code, "co_qualname", code.co_name)  # from 3.11 on
            yield name, code.co_filename, line or 0, kind
        elif package != before:
            yield package, "", 0, kind
        before = package
