"""Decides which workers may go on: applies barriers to workers that work, wait, come and leave.

State machines without I/O and without a clock. `Gate` is one worker that waits; a peer has one, and
asks the others itself. `Population` is all workers, for a server that knows them all. Not
thread-safe.
"""

import enum
import itertools
import random
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from launchpad_lite.engines.barriers import Barrier, Steps

W = TypeVar("W", bound=Hashable)


class Verdict(enum.Enum):
    """The next action of a worker at a barrier."""

    ADVANCE = "advance"
    WAIT = "wait"
    DRAW_AGAIN = "draw again"


class Gate(Generic[W]):
    """A worker at a barrier, with the sample that it observes.

    `questions` returns the workers to ask now, if this one has to ask.
    """

    def __init__(self, barrier: Barrier, step: int, sample: Iterable[W]) -> None:
        #: How many steps each has finished, as far as that is known; without those that cannot hold
        #: the worker up any more.
        self.observed: dict[W, int | None] = dict.fromkeys(sample)
        self._barrier = barrier
        self._step = step
        self._unknown = len(self.observed)
        self._asked: set[W] = set()

    @property
    def is_complete(self) -> bool:
        return not self._unknown

    def questions(self) -> list[tuple[W, int]]:
        """Returns the workers to ask, and steps: each answers once it has finished more."""
        found = [
            (worker, -1 if step is None else step)
            for worker, step in self.observed.items()
            if worker not in self._asked
        ]
        self._asked.update(worker for worker, _ in found)
        return found

    def observe(self, worker: W, step: int) -> Verdict:
        """Notes how many steps one of the sample has finished."""
        if worker not in self.observed:
            return Verdict.WAIT  # it cannot hold the worker up any more
        self._asked.discard(worker)
        before = self.observed[worker]
        self.observed[worker] = step
        if before is None:
            self._unknown -= 1
        verdict = self.verdict()
        if verdict is Verdict.WAIT and not self._unknown:
            for other in [worker] if before is not None else list(self.observed):
                if not self._barrier.can_hold_up(self._step, self.observed[other] or 0):
                    del self.observed[other]
            if before is not None and self._barrier.resample == "on_progress":
                return Verdict.DRAW_AGAIN
        return verdict

    def drop(self, worker: W) -> Verdict:
        """Notes that one of the sample has left: the worker does not wait for it."""
        if worker not in self.observed:
            return Verdict.WAIT
        if self.observed.pop(worker) is None:
            self._unknown -= 1
        return self.verdict()

    def verdict(self) -> Verdict:
        """Returns whether the worker may go on, by what is known so far."""
        if self._unknown:
            return Verdict.WAIT
        steps = [step for step in self.observed.values() if step is not None]
        # Without others to observe, a worker goes on under every rule.
        if not steps or self._barrier.may_advance(self._step, steps):
            return Verdict.ADVANCE
        return Verdict.WAIT


class Population(Generic[W]):
    """The workers of a program and their steps; decides who goes on.

    Methods that change it return the workers that may begin their next step now.
    """

    def __init__(self, barrier: Barrier, rng: random.Random) -> None:
        self._barrier = barrier
        self._rng = rng
        self._steps: dict[W, int] = {}
        #: Where a worker begins that finds no others.
        self._last = 0
        self._all = Steps()
        #: All workers; `_place` has the index of each, so that one is removed in constant time.
        self._workers: list[W] = []
        self._place: dict[W, int] = {}
        #: Workers that wait and observe all, by their steps: the rule is the same for all of one
        #: step.
        self._waiting: dict[int, dict[W, None]] = {}
        #: Workers that wait and observe a sample.
        self._gates: dict[W, Gate[W]] = {}
        #: By worker, the others that have it in their samples.
        self._observers: dict[W, dict[W, None]] = {}
        #: When workers draw another sample after a time, the next one first.
        self._draws: dict[W, float] = {}

    @property
    def slowest(self) -> int:
        """How many steps the slowest has finished, or had the last one that left."""
        return int(self._all.lowest) if self._steps else self._last

    def begin_at(self, step: int) -> None:
        """Has the first worker begin as if it had finished so many steps."""
        self._last = step

    def __len__(self) -> int:
        return len(self._steps)

    def __contains__(self, worker: W) -> bool:
        return worker in self._steps

    @property
    def workers(self) -> Sequence[W]:
        return self._workers

    @property
    def steps(self) -> dict[W, int]:
        return dict(self._steps)

    @property
    def waiting(self) -> int:
        return len(self._gates) + sum(map(len, self._waiting.values()))

    def others(self, worker: W) -> Sequence[W]:
        """Returns all workers but one; the last one takes its place."""
        return _Without(self._workers, self._place[worker])

    def step_of(self, worker: W) -> int:
        return self._steps[worker]

    def add(self, worker: W, step: int | None = None) -> int:
        """Adds a worker that begins a step now; returns how many it counts as finished.

        By default as many as the slowest worker, or the last one that left.
        """
        if step is None:
            step = self.slowest
        self._steps[worker] = step
        self._all.add(step)
        self._place[worker] = len(self._workers)
        self._workers.append(worker)
        return step

    def remove(self, worker: W) -> list[W]:
        """Removes a worker, whatever it does at the moment."""
        step = self._last = self._steps.pop(worker)
        self._all.remove(step)
        place, last = self._place.pop(worker), self._workers.pop()
        if last != worker:
            self._workers[place] = last
            self._place[last] = place
        group = self._waiting.get(step, {})
        group.pop(worker, None)
        if not group:
            self._waiting.pop(step, None)
        self._close(worker)
        released = self._release()
        for observer in list(self._observers.pop(worker, ())):
            if self._gates[observer].drop(worker) is Verdict.ADVANCE:
                self._close(observer)
                released.append(observer)
        return released

    def finish(self, worker: W, now: float) -> list[W]:
        """Notes that a worker has finished one more step, and wants to begin the next.

        `now` is in seconds of any clock.
        """
        step = self._steps[worker] + 1
        self._steps[worker] = step
        self._all.remove(step - 1)
        self._all.add(step)
        released: list[W] = []
        if self._barrier.sample_size is None:
            self._waiting.setdefault(step, {})[worker] = None
            released = self._release()
        elif self._draw(worker, now):
            released.append(worker)
        for observer in list(self._observers.get(worker, ())):
            gate = self._gates[observer]
            verdict = gate.observe(worker, step)
            if worker not in gate.observed:
                del self._observers[worker][observer]
            if verdict is Verdict.ADVANCE:
                self._close(observer)
                released.append(observer)
            elif verdict is Verdict.DRAW_AGAIN and self._draw(observer, now):
                released.append(observer)
        return released

    def next_draw(self) -> float | None:
        """Returns when a worker draws another sample without any progress; None for never."""
        return next(iter(self._draws.values()), None)

    def draw_due(self, now: float) -> list[W]:
        due = itertools.takewhile(lambda worker: self._draws[worker] <= now, self._draws)
        return [worker for worker in list(due) if self._draw(worker, now)]

    def _release(self) -> list[W]:
        released: list[W] = []
        for step, group in list(self._waiting.items()):
            self._all.remove(step)  # the others: the worker itself is none of them
            try:
                may_advance = not self._all or self._barrier.may_advance(step, self._all)
            finally:
                self._all.add(step)
            if may_advance:
                released.extend(self._waiting.pop(step, group))
        return released

    def _draw(self, worker: W, now: float) -> bool:
        """Draws a sample; returns whether the worker may go on."""
        self._close(worker)
        sample = self._barrier.sample(self.others(worker), self._rng)
        gate = Gate(self._barrier, self._steps[worker], sample)
        verdict = gate.verdict()
        for other in sample:
            verdict = gate.observe(other, self._steps[other])
        if verdict is Verdict.ADVANCE:
            return True
        self._gates[worker] = gate
        for other in gate.observed:
            self._observers.setdefault(other, {})[worker] = None
        if not isinstance(self._barrier.resample, str):
            self._draws[worker] = now + self._barrier.resample  # at the end: the latest
        return False

    def _close(self, worker: W) -> None:
        gate = self._gates.pop(worker, None)
        if gate is not None:
            for other in gate.observed:
                self._observers.get(other, {}).pop(worker, None)
            self._draws.pop(worker, None)


class _Without(Sequence[W]):
    """Items but one; making one takes the same time for any number of them."""

    def __init__(self, items: Sequence[W], place: int) -> None:
        self._items = items
        self._place = place

    def __len__(self) -> int:
        return len(self._items) - 1

    def __getitem__(self, index: Any) -> Any:
        place = range(len(self))[index]
        if isinstance(place, range):
            return [self[each] for each in place]
        return self._items[-1 if place == self._place else place]
