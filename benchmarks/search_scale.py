"""Measures how much brokers of a search do when it is large: their decisions alone, in virtual time.

    python -m benchmarks.search_scale --workers=10000 --brokers=8 --task-s=120

Each worker runs one task after the other, and shows itself each second. No message travels: what is
measured is the queue, in one thread. The table is printed.
"""

import argparse
import heapq
import random
import time
from collections.abc import Iterator

from benchmarks.environments import machine, revision
from launchpad_lite.search._messages import PYTHON, Life, TaskOutcome, TaskState, TaskSubmission
from launchpad_lite.search._queue import Queue
from launchpad_lite.search._timing import Timing

_TIMING = Timing()
#: Tasks that wait, for each worker.
_AHEAD = 0.5
#: A model collects so often.
_COLLECT_S = 0.1


class _Broker:
    def __init__(self, name: str, workers: int, task_s: float) -> None:
        self._name = name
        self._task_s = task_s
        self._queue = Queue(lease_s=_TIMING.lease_s, max_queued=1 << 30)
        self._ahead = int(_AHEAD * workers)
        self._asked = 0
        self._random = random.Random(name)  # noqa: S311 - no secret
        self._events = list(self._first(workers))
        heapq.heapify(self._events)
        self._held: list[dict[str, str]] = [{} for _ in range(workers)]
        self.messages = 0
        self.done = 0

    def _first(self, workers: int) -> Iterator[tuple[float, str, int]]:
        yield 0.0, "collect", 0
        yield 0.0, "tick", 0
        for index in range(workers):
            yield self._random.uniform(0, _TIMING.beat_s), "beat", index
            yield self._random.uniform(0, _TIMING.beat_s), "work", index

    def run(self, until: float) -> None:
        while self._events[0][0] < until:
            now, kind, index = heapq.heappop(self._events)
            again_at = getattr(self, f"_{kind}")(now, index)
            heapq.heappush(self._events, (again_at, kind, index))

    def _tick(self, now: float, _: int) -> float:
        self._queue.tick(now)
        self._queue.take_changes()
        return now + _TIMING.lease_s / 8

    def _collect(self, now: float, _: int) -> float:
        self.messages += 2
        outcomes, _progress = self._queue.collect("model", "session")
        self._queue.acknowledge("model", [each.id for each in outcomes])
        self.done += len(outcomes)
        room = self._ahead - self._queue.load(now).queued
        keys = range(self._asked, self._asked + max(0, room))
        self._asked = keys.stop
        self._queue.submit(
            "model", [TaskSubmission(f"{self._name} {key}", b"") for key in keys], now
        )
        return now + _COLLECT_S

    def _who(self, index: int) -> Life:
        return Life(f"{self._name} worker[{index}]", "life")

    def _beat(self, now: float, index: int) -> float:
        self.messages += 1
        stops = self._queue.beat(self._who(index), self._held[index], (), now)
        assert not stops, "a lease was lost"
        return now + _TIMING.beat_s

    def _work(self, now: float, index: int) -> float:
        self.messages += 1
        for key, token in self._held[index].items():
            self._queue.finish(TaskOutcome(key, token, TaskState.DONE, b"result"))
        found = self._queue.take(self._who(index), (), (PYTHON,), 1, now)
        shortest = 0.5 if self._held[index] else 0.0  # the first ones do not all end together
        self._held[index] = {each.id: each.token for each in found}
        return now + (self._random.uniform(shortest, 1.5) * self._task_s if found else _COLLECT_S)


def _measure(brokers: int, workers: int, task_s: float, seconds: float) -> tuple[float, ...]:
    """Returns messages and results per virtual second of a broker, and CPU seconds for them."""
    all_brokers = [
        _Broker(f"broker[{index}]", workers // brokers, task_s) for index in range(brokers)
    ]
    for each in all_brokers:
        each.run(5.0)  # all have their first task, and have shown themselves
    before = [(each.messages, each.done) for each in all_brokers]
    used: list[float] = []
    for each in all_brokers:
        begun_at = time.process_time()
        each.run(5.0 + seconds)
        used.append((time.process_time() - begun_at) / seconds)
    messages = [each.messages - sent for each, (sent, _) in zip(all_brokers, before, strict=True)]
    done = [each.done - told for each, (_, told) in zip(all_brokers, before, strict=True)]
    return max(messages) / seconds, max(done) / seconds, max(used)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=10_000)
    parser.add_argument("--brokers", type=int, default=8)
    parser.add_argument("--task-s", type=float, default=120.0)
    parser.add_argument("--seconds", type=float, default=60.0, help="virtual ones to measure")
    options = parser.parse_args()
    print(f"The busiest broker of each search, commit {revision()}, {machine()}.\n")
    print("| workers | brokers | tasks | messages/s | results/s | one core used |")
    print("|--:|--:|--:|--:|--:|--:|")
    for workers, brokers, task_s in (
        (options.workers // 10, options.brokers, options.task_s),
        (options.workers, options.brokers, options.task_s),
        (options.workers, options.brokers, options.task_s / 60),
        (options.workers, 1, options.task_s),
    ):
        messages, done, used = _measure(brokers, workers, task_s, options.seconds)
        print(
            f"| {workers:,} | {brokers} | {task_s:g} s | {messages:,.0f} | {done:,.1f} | {used:.1%} |"
        )


if __name__ == "__main__":
    main()
