"""What a supervisor can ask a node, and the answers."""

import os
import pkgutil
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from courier.lowlevel import call_records
from launchpad_lite.life.events import Answered, Ask
from launchpad_lite.parts.as_json import to_json
from launchpad_lite.worker.runtime import NodeRuntime

#: By name, the function that answers, as `module:name`; loaded at the first question. It gets the node,
#: the threads of it (None: all of this process) and the argument, and returns what `json.dumps` takes.
QUESTIONS = {
    "calls": "launchpad_lite.worker.questions:_calls",
    "debug": "launchpad_lite.worker.debugger:debug",
    "look": "launchpad_lite.worker.questions:_look",
    "numbers": "launchpad_lite.insight.metrics:numbers",
    "profile": "launchpad_lite.worker.questions:_profile",
    "trace": "launchpad_lite.worker.questions:_trace",
}
_TRACE_S = 1.0  # seconds between two answers for a trace of a whole run
_MOST_CALLS = 1000  # of an answer, unless seconds are asked for


def answer(
    runtime: NodeRuntime,
    ask: Ask,
    post: Callable[[Answered], object],
    idents: Collection[int] | None = None,
) -> None:
    """Posts the answer of a node to a question; `{"error": text}` if there is none."""

    def run() -> None:
        try:
            value = pkgutil.resolve_name(QUESTIONS[ask.question])(runtime, idents, ask.argument)
        except Exception as error:  # noqa: BLE001 - whoever asked reports it
            value = {"error": f"{type(error).__name__}: {error}"}
        post(Answered(ask.node, ask.number, value))

    if ask.question == "look":
        run()
    else:  # it may take long, and a stop does not wait for it
        threading.Thread(target=run, name=f"launchpad-{ask.question}", daemon=True).start()


def _look(runtime: NodeRuntime, idents: Collection[int] | None, argument: object) -> Any:  # noqa: ARG001
    from launchpad_lite.process.activity import watch_threads

    return to_json(runtime.look(watch_threads(), idents))


def _calls(runtime: NodeRuntime, idents: Collection[int] | None, argument: object) -> Any:  # noqa: ARG001
    """Answers with the newest calls of the node; those of the last seconds, if the argument says so."""
    now = time.perf_counter()
    since = now - argument if isinstance(argument, int | float) else 0.0
    most = _MOST_CALLS if argument is None else sys.maxsize
    calls = call_records.newest_calls(most, runtime.call_scopes(), since)
    threads = {each.ident: each.name for each in threading.enumerate()}
    return {
        "now": now,
        "threads": {str(each.thread): threads.get(each.thread, "") for each in calls},
        "calls": [
            each._asdict() | ({"seconds": now - each.began} if each.end == "runs" else {})
            for each in calls
        ],
    }


def _trace(
    runtime: NodeRuntime, idents: Collection[int] | None, argument: Mapping[str, float]
) -> Any:
    """Answers in a second, or when the node has ended, with the calls since a time, by its name."""
    runtime.wait_for_end(_TRACE_S)
    count = call_records.count()  # first: more may be missing, not less
    found = _calls(
        runtime, idents, time.perf_counter() - argument.get(runtime.name, runtime.made_at)
    )
    return {**found, "pid": os.getpid(), "count": count, "room": call_records.ROOM}


def _profile(runtime: NodeRuntime, idents: Collection[int] | None, argument: float) -> Any:
    from launchpad_lite.process.sampling import sample

    def threads() -> Collection[int] | None:
        return None if idents is None else {*idents, *runtime.threads_of_calls()}

    return sample(argument, threads, runtime.stop_event.is_set)
