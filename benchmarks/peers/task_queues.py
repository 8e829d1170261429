"""What the peers of `benchmarks.tasks` have in common: empty tasks, and how long they take."""

import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import harness

#: A rate counts once so many tasks were measured, or `Engine.rate_s`.
_MOST_TASKS = 10_000
#: Delays are measured so often, or for so long.
_DELAYS = 200
_DELAYS_S = 3.0


class Engine:
    """Runs empty tasks on some workers. Each peer is one.

    Attributes:
        rate_s: Seconds after which a rate counts.
    """

    rate_s = 2.0

    def start(self, workers: int, folder: str, **options: Any) -> None:
        """Starts the workers.

        Args:
            workers: How many.
            folder: An empty folder, for what the peer writes.
            **options: Of a row of the table.
        """
        raise NotImplementedError

    def submit(self, count: int) -> Any:
        """Submits so many empty tasks; returns what `wait` takes."""
        raise NotImplementedError

    def wait(self, submitted: Any) -> None:
        """Waits for the results of tasks."""
        raise NotImplementedError

    def stop(self) -> None:
        """Stops the workers."""


def _begin(engine: Engine, **arguments: Any) -> None:
    engine.start(**arguments)
    engine.wait(engine.submit(100))  # each worker has run some


def _rate(engine: Engine) -> float:
    """Returns tasks per second: all are submitted, then waited for."""
    count = 100
    while True:
        start = time.perf_counter()
        engine.wait(engine.submit(count))
        seconds = time.perf_counter() - start
        if seconds > engine.rate_s or count == _MOST_TASKS:
            return count / seconds
        # A little more than enough, and at most 4 times as many as those that say so.
        count = min(_MOST_TASKS, int(count * min(4.0, 1.5 * engine.rate_s / seconds)) + 1)


def _delay(engine: Engine, queued: int) -> float:
    """Returns median seconds from the submission of a task to its result.

    Args:
        engine: Whose.
        queued: How many tasks are submitted just before it.
    """
    delays: list[float] = []
    end = time.perf_counter() + _DELAYS_S
    while len(delays) < _DELAYS and time.perf_counter() < end:
        before = engine.submit(queued) if queued else None
        start = time.perf_counter()
        engine.wait(engine.submit(1))
        delays.append(time.perf_counter() - start)
        if before is not None:
            engine.wait(before)
    return statistics.median(delays)


def main(engine: Engine) -> None:
    """Does what is asked of an engine, until nothing more is asked."""
    calls = {"start": _begin, "rate": _rate, "delay": _delay}
    serve({name: functools.partial(call, engine) for name, call in calls.items()})
    engine.stop()


def serve(calls: Mapping[str, Callable[..., Any]]) -> None:
    """Does what is asked, a line of JSON at a time, until nothing more is asked."""
    answers = harness.open_answers()
    sys.stdin.readline()  # the set-up of other peers
    for line in sys.stdin:
        request = json.loads(line)
        call = functools.partial(calls[request.pop("do")], **request)
        harness.answer(answers, call)
