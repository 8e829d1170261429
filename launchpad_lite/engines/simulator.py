"""Simulates a barrier with many workers: discrete events in virtual time.

The barriers are the same objects that the engines use, and so is the code that applies them
(`_population`). Nothing but the seed decides what happens.
"""

import abc
import array
import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from launchpad_lite.engines._population import Gate, Population, Verdict
from launchpad_lite.engines.barriers import Barrier, check_barrier

#: Seconds, always the same or drawn each time.
Duration = float | Callable[[random.Random], float]


@dataclass(frozen=True)
class Stragglers:
    """Workers that are always slower than the others.

    Attributes:
        fraction: How many of all workers, from 0 to 1; which ones is drawn.
        slowdown: By which factor their steps take longer.

    Example:
        engines.simulate(engines.BSP(), stragglers=engines.Stragglers(0.05, slowdown=4))
    """

    fraction: float
    slowdown: float

    def __post_init__(self) -> None:
        if not 0 <= self.fraction <= 1:
            raise ValueError(f"Stragglers: fraction is from 0 to 1, not {self.fraction!r}")
        if not 0 < self.slowdown < math.inf:
            raise ValueError(f"Stragglers: slowdown is a factor above 0, not {self.slowdown!r}")


@dataclass(frozen=True)
class Churn:
    """Workers that leave without notice, and new ones that come.

    Attributes:
        leaves_per_s: How many leave in a second, on average.
        joins_per_s: How many come; each begins where the slowest is.

    Example:
        engines.simulate(engines.BSP(), churn=engines.Churn(leaves_per_s=1, joins_per_s=1))
    """

    leaves_per_s: float
    joins_per_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.leaves_per_s < math.inf or not 0 <= self.joins_per_s < math.inf:
            raise ValueError(f"Churn: rates are numbers from 0 up, not {self}")


class SimulatedModel(Protocol):
    """The model that workers train: see `simulate(model=...)`. Numbers of workers begin at 0.

    Example:
        class Line:
            def __init__(self):
                self.slope = 0.0

            def read(self):
                return self.slope

            def compute(self, values, worker, step):
                return 0.1 * (3 - values)  # a gradient at what was read

            def apply(self, update):
                self.slope += update

            def evaluate(self):
                return -abs(self.slope - 3)
    """

    def read(self) -> Any:
        """Returns what a worker computes with: a copy, when its step begins."""

    def compute(self, values: Any, worker: int, step: int) -> Any:
        """Returns the update that a worker computes from what it has read."""

    def apply(self, update: Any) -> None:
        """Takes in an update, when it arrives."""

    def evaluate(self) -> float:
        """Returns how good the model is now."""


@dataclass(frozen=True)
class Evaluation:
    """How good the model was.

    Attributes:
        time_s: When, in virtual seconds.
        updates: How many updates had been applied.
        value: What `evaluate` returned.

    Example:
        result = engines.simulate(engines.SSP(4), model=model)
        accuracy_by_time = [(each.time_s, each.value) for each in result.evaluations]
    """

    time_s: float
    updates: int
    value: float


@dataclass
class WorkerTrace:
    """The record of one worker.

    Attributes:
        joined_s: When it came, in virtual seconds.
        left_s: When it left; None if it stayed.
        first_step: How many steps it counted as finished when it came.
        finished_s: When it finished each of its steps.
        waited_s: How long it waited at the barrier, in all.

    Example:
        slowest = min(engines.simulate(engines.ASP()).workers, key=lambda trace: trace.step)
    """

    joined_s: float
    first_step: int
    finished_s: Sequence[float]
    left_s: float | None = None
    waited_s: float = 0.0

    @property
    def step(self) -> int:
        """How many steps it had finished at the end."""
        return self.first_step + len(self.finished_s)


@dataclass(frozen=True)
class Simulation:
    """The result of a simulation.

    Attributes:
        barrier: The rule.
        seconds: How long it lasted, in virtual seconds.
        workers: All that took part; the first ones are those that were there from the beginning.
        messages: How many were sent for the sake of the barrier. On a server: the report of each step
            and the permission for the next. Between peers: each question and each answer.
        evaluations: Of the model; empty without one.

    Example:
        result = engines.simulate(engines.PSP(10), workers=200, seconds=200)
        print(min(result.steps), max(result.steps), result.messages)
    """

    barrier: Barrier
    seconds: float
    workers: Sequence[WorkerTrace]
    messages: int
    evaluations: Sequence[Evaluation]

    @property
    def steps(self) -> list[int]:
        """How many steps each worker that was there at the end had finished."""
        return [trace.step for trace in self.workers if trace.left_s is None]

    @property
    def updates(self) -> int:
        """How many steps were finished, in all."""
        return sum(len(trace.finished_s) for trace in self.workers)

    @property
    def waited(self) -> float:
        """The part of their time that workers waited, from 0 to 1."""
        there = sum(
            (self.seconds if trace.left_s is None else trace.left_s) - trace.joined_s
            for trace in self.workers
        )
        return sum(trace.waited_s for trace in self.workers) / there if there else 0.0


def simulate(
    barrier: Barrier,
    *,
    workers: int = 200,
    seconds: float = 200.0,
    step_time: Duration = lambda rng: rng.expovariate(1.0),
    delay: Duration = 0.0,
    churn: Churn | None = None,
    stragglers: Stragglers | None = None,
    distributed: bool = False,
    model: SimulatedModel | None = None,
    evaluate_every: int = 100,
    seed: int = 0,
) -> Simulation:
    """Returns what workers do under a barrier, in virtual time. The same seed gives the same result.

    Args:
        barrier: The rule, as the engines take it.
        workers: How many there are at the beginning.
        seconds: Virtual seconds that are simulated.
        step_time: How long a worker computes in one step, in seconds: a number, or a function of a
            generator of random numbers. By default exponential with a mean of 1 s.
        delay: How long a message travels, in the same way.
        churn: Workers that leave and come.
        stragglers: Workers that are slower.
        distributed: Whether workers ask each other, and none knows all steps. By default they ask a
            server that does.
        model: What is learned. A worker reads it when its step begins, and its update arrives when
            the step has ended, after the `delay`. So gradients are computed from values that are as
            old as they would be in reality.
        evaluate_every: After how many updates the model is evaluated.
        seed: Decides all random numbers.

    Raises:
        TypeError: `barrier` is no barrier.
        ValueError: A number makes no sense.

    Example:
        for barrier in (engines.BSP(), engines.SSP(4), engines.ASP(), engines.PSP(10)):
            result = engines.simulate(barrier, workers=200, seconds=200.0)
            print(barrier, statistics.mean(result.steps))
    """
    check_barrier(barrier)
    if workers < 1 or evaluate_every < 1:
        raise ValueError("simulate: workers and evaluate_every are at least 1")
    if not 0 < seconds < math.inf:
        raise ValueError(f"simulate: seconds is above 0, not {seconds!r}")
    kind = _Peers if distributed else _SimulatedServer
    run = kind(
        barrier,
        seconds,
        _drawing("step_time", step_time),
        _drawing("delay", delay),
        stragglers,
        model,
        evaluate_every,
        seed,
    )
    for _ in range(workers):
        run.join(0)
    if churn is not None:
        run.at_rate(churn.leaves_per_s, run.leave)
        run.at_rate(churn.joins_per_s, run.join)
    return run.run()


def _drawing(name: str, duration: Duration) -> Callable[[random.Random], float]:
    if callable(duration):
        return duration
    if not 0 <= duration < math.inf:
        raise ValueError(f"simulate: {name} is a number of seconds from 0 up, not {duration!r}")
    return lambda _: duration


@dataclass(eq=False)
class _SimulatedWorker:
    number: int
    trace: WorkerTrace
    slowdown: float
    #: Its own: it takes the same times under each barrier.
    rng: random.Random
    finished_s: "array.array[float]"
    step: int = 0
    waits_since: float | None = None
    #: The values that it read when its step began.
    values: Any = None
    # Between peers: where it waits, and the others that wait for its next step.
    gate: "Gate[_SimulatedWorker] | None" = None
    watchers: "dict[Gate[_SimulatedWorker], _SimulatedWorker]" = field(default_factory=dict)

    @property
    def is_there(self) -> bool:
        return self.trace.left_s is None

    def end_wait(self, now: float) -> None:
        if self.waits_since is not None:
            self.trace.waited_s += now - self.waits_since
            self.waits_since = None


_Gate = Gate[_SimulatedWorker]


@dataclass(eq=False)
class _Run(abc.ABC):
    """A simulation; subclasses say who decides."""

    barrier: Barrier
    end: float
    step_time: Callable[[random.Random], float]
    delay: Callable[[random.Random], float]
    stragglers: Stragglers | None
    model: SimulatedModel | None
    evaluate_every: int
    seed: int

    def __post_init__(self) -> None:
        self.now = 0.0
        #: Events to come, with numbers that keep the order of those of the same time.
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = itertools.count()
        self.messages = 0
        #: For all that does not belong to one worker.
        self.rng = random.Random(self.seed)  # noqa: S311 - no secret
        self._evaluations: list[Evaluation] = []
        #: Those that the model has taken in.
        self._updates = 0
        self._workers: list[_SimulatedWorker] = []
        #: The present workers.
        self.population: Population[_SimulatedWorker] = Population(self.barrier, self.rng)

    def after(self, delay_s: float, action: Callable[..., None], *args: Any) -> None:
        """Adds an event; events of the same time happen in the order of these calls."""
        if not delay_s >= 0:
            raise ValueError(f"simulate: a duration of {delay_s!r} s was drawn")
        heapq.heappush(self._events, (self.now + delay_s, next(self._number), action, args))

    def run(self) -> Simulation:
        while self._events and self._events[0][0] <= self.end:
            self.now, _, action, args = heapq.heappop(self._events)
            action(*args)
        self.now = self.end
        for worker in self._workers:
            worker.end_wait(self.now)
        traces = [worker.trace for worker in self._workers]
        return Simulation(self.barrier, self.end, traces, self.messages, self._evaluations)

    @abc.abstractmethod
    def asks(self, worker: _SimulatedWorker) -> None:
        """A worker has finished a step, and wants to begin the next."""

    @abc.abstractmethod
    def forgets(self, worker: _SimulatedWorker) -> None:
        """A worker has left."""

    def join(self, first_step: int | None = None) -> None:
        number = len(self._workers)
        rng = random.Random(f"{self.seed} {number}")  # noqa: S311 - no secret
        slowdown = 1.0
        if self.stragglers is not None and rng.random() < self.stragglers.fraction:
            slowdown = self.stragglers.slowdown
        finished_s = array.array("d")
        trace = WorkerTrace(self.now, 0, finished_s)
        worker = _SimulatedWorker(number, trace, slowdown, rng, finished_s)
        trace.first_step = worker.step = self.population.add(worker, first_step)
        self._workers.append(worker)
        self.begin(worker)

    def leave(self) -> None:
        if len(self.population):
            worker = self.rng.choice(self.population.workers)
            worker.end_wait(self.now)
            worker.trace.left_s = self.now
            self.forgets(worker)

    def at_rate(self, per_s: float, action: Callable[[], None]) -> None:
        def happen() -> None:
            action()
            self.after(self.rng.expovariate(per_s), happen)

        if per_s:
            self.after(self.rng.expovariate(per_s), happen)

    def begin(self, worker: _SimulatedWorker) -> None:
        if worker.is_there:
            worker.end_wait(self.now)
            if self.model is not None:
                worker.values = self.model.read()
            duration = self.step_time(worker.rng) * worker.slowdown
            self.after(duration, self._finish, worker)

    def _finish(self, worker: _SimulatedWorker) -> None:
        if worker.is_there:
            delay_s = self.delay(self.rng)
            if self.model is not None:
                update = self.model.compute(worker.values, worker.number, worker.step)
                # If at once, before the model is read again.
                self._happen(delay_s, self._apply, self.model, update)
            worker.step += 1
            finished_s = worker.finished_s
            finished_s.append(self.now)
            if len(finished_s) > 999 and finished_s[-1000] == self.now:
                raise ValueError("simulate: 1,000 steps of a worker took no time at all")
            worker.waits_since = self.now
            self.asks(worker)

    def _apply(self, model: SimulatedModel, update: Any) -> None:
        model.apply(update)
        self._updates += 1
        if self._updates % self.evaluate_every == 0:
            self._evaluations.append(Evaluation(self.now, self._updates, model.evaluate()))

    def send(self, action: Callable[..., None], *args: Any) -> None:
        """Has something happen when a message has arrived."""
        self.messages += 1
        self._happen(self.delay(self.rng), action, *args)

    def _happen(self, delay_s: float, action: Callable[..., None], *args: Any) -> None:
        if delay_s:
            self.after(delay_s, action, *args)
        else:
            action(*args)


class _SimulatedServer(_Run):
    """Workers report to a server, which knows all steps and decides which of them go on."""

    #: When it looks next whether a worker is to draw another sample.
    _looks_at = math.inf

    def asks(self, worker: _SimulatedWorker) -> None:
        if self.barrier.sample_size == 0:
            self.population.finish(worker, self.now)
            self.begin(worker)
        else:
            self.send(self._receive, worker)

    def _receive(self, worker: _SimulatedWorker) -> None:
        if worker in self.population:
            self._permit(self.population.finish(worker, self.now))

    def _permit(self, workers: Sequence[_SimulatedWorker]) -> None:
        for worker in workers:
            self.send(self.begin, worker)
        due = self.population.next_draw()
        if due is not None and due < self._looks_at:
            self._looks_at = due
            self.after(due - self.now, self._look)

    def _look(self) -> None:
        self._looks_at = math.inf
        self._permit(self.population.draw_due(self.now))

    def forgets(self, worker: _SimulatedWorker) -> None:
        self._permit(self.population.remove(worker))


class _Peers(_Run):
    """Workers ask each other: each question is answered once the other is past a step."""

    def join(self, first_step: int | None = None) -> None:
        if first_step is None:
            first_step = min((worker.step for worker in self.population.workers), default=0)
        super().join(first_step)

    def asks(self, worker: _SimulatedWorker) -> None:
        watchers, worker.watchers = worker.watchers, {}
        for gate, watcher in watchers.items():
            self.send(self._answered, watcher, gate, worker, worker.step)
        self._draw(worker)

    def _draw(self, worker: _SimulatedWorker) -> None:
        sample = self.barrier.sample(self.population.others(worker), self.rng)
        worker.gate = gate = Gate(self.barrier, worker.step, sample)
        if sample:
            self._ask(worker, gate)
        else:
            self._pass(worker)

    def _ask(self, worker: _SimulatedWorker, gate: _Gate) -> None:
        for other, beyond in gate.questions():
            self.send(self._asked, other, worker, gate, beyond)

    def _draw_again(self, worker: _SimulatedWorker, gate: _Gate) -> None:
        if worker.gate is gate:
            self._draw(worker)

    def _asked(
        self, other: _SimulatedWorker, worker: _SimulatedWorker, gate: _Gate, beyond: int
    ) -> None:
        if not other.is_there:
            self._answered(worker, gate, other, None)
        elif other.step > beyond:
            self.send(self._answered, worker, gate, other, other.step)
        else:
            other.watchers[gate] = worker

    def _answered(
        self, worker: _SimulatedWorker, gate: _Gate, other: _SimulatedWorker, step: int | None
    ) -> None:
        """A worker learns how many steps another has finished; None: that has left."""
        if worker.gate is not gate:
            return
        was_complete = gate.is_complete
        verdict = gate.drop(other) if step is None else gate.observe(other, step)
        if verdict is Verdict.ADVANCE:
            self._pass(worker)
        elif verdict is Verdict.DRAW_AGAIN:
            self._draw(worker)
        elif gate.is_complete:
            if not was_complete and not isinstance(self.barrier.resample, str):
                self.after(self.barrier.resample, self._draw_again, worker, gate)
            self._ask(worker, gate)

    def _pass(self, worker: _SimulatedWorker) -> None:
        worker.gate = None
        self.begin(worker)

    def forgets(self, worker: _SimulatedWorker) -> None:
        worker.gate = None
        self.population.remove(worker)
        for gate, watcher in worker.watchers.items():
            self._answered(watcher, gate, worker, None)
