"""The rules, and the state machines that apply them to workers that come, wait and leave."""

import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, strategies as st

from launchpad_lite import engines
from launchpad_lite.engines._population import Gate, Population, Verdict


@pytest.mark.parametrize(
    ("barrier", "step", "observed", "may"),
    [
        (engines.BSP(), 3, [3, 9], True),
        (engines.BSP(), 3, [3, 2], False),
        (engines.SSP(4), 7, [3, 9], True),
        (engines.SSP(4), 7, [2, 9], False),
        (engines.SSP(math.inf), 10**9, [0], True),
        (engines.ASP(), 10**9, [0], True),
        (engines.PSP(2), 1, [1, 0], False),
        (engines.PSP(2, staleness=1), 1, [1, 0], True),
        (engines.PSP(2, staleness=math.inf), 10**9, [0, 0], True),
    ],
)
def test_the_rules(barrier: engines.Barrier, step: int, observed: list[int], may: bool) -> None:
    assert barrier.may_advance(step, observed) is may


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: engines.PSP(-1), "sample_size is at least 0, not -1"),
        (lambda: engines.PSP(2.0), "sample_size is a whole number, not 2.0"),  # type: ignore[arg-type]
        (lambda: engines.SSP(-1), "staleness is at least 0, not -1"),
        (lambda: engines.SSP(math.nan), "staleness is at least 0, not nan"),
        (lambda: engines.SSP("4"), "staleness is a number of steps, not '4'"),  # type: ignore[arg-type]
        (lambda: engines.PSP(2, resample="always"), "'never', 'on_progress' or a number"),  # type: ignore[arg-type]
        (lambda: engines.PSP(2, resample=0), "a number of seconds above 0, not 0"),
        (lambda: engines.simulate(engines.BSP), "an object, as BSP"),  # type: ignore[arg-type]
        (lambda: engines.simulate("BSP"), "an engines.Barrier, as engines.BSP"),  # type: ignore[arg-type]
    ],
)
def test_a_barrier_that_makes_no_sense_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()


@dataclasses.dataclass(frozen=True)
class Recorded(engines.PSP):
    """Notes whom each draw has chosen."""

    drawn: list[list[Any]] = dataclasses.field(default_factory=list)

    def sample(self, others: Any, rng: random.Random) -> list[Any]:
        self.drawn.append(super().sample(others, rng))
        return list(self.drawn[-1])


@dataclasses.dataclass(frozen=True)
class Majority(engines.Barrier):
    """A user's own rule: half of the others have finished as much."""

    def may_advance(self, step: int, observed_steps: Any) -> bool:
        return 2 * sum(other < step for other in observed_steps) <= len(observed_steps)


class Oracle:
    """Workers under a barrier, and what must be true of them whatever happens."""

    def __init__(self, barrier: engines.Barrier, workers: int, seed: int) -> None:
        self.barrier = barrier
        self.population: Population[int] = Population(barrier, random.Random(seed))
        for number in range(workers):
            self.population.add(number)
        self.working = set(range(workers))
        self.now = 0.0
        self.next = workers

    def happen(self, draw: Callable[[int], int]) -> None:
        self.now += 0.4
        released: list[int] = []
        match draw(6):
            case 0 if len(self.population) > 1:
                gone = self.population.workers[draw(len(self.population))]
                self.working.discard(gone)
                released = self.population.remove(gone)
            case 1:
                self.population.add(self.next)
                self.working.add(self.next)
                self.next += 1
            case 2:
                released = self.population.draw_due(self.now)
            case _ if self.working:
                worker = sorted(self.working)[draw(len(self.working))]
                self.working.remove(worker)
                released = self.population.finish(worker, self.now)
        assert not self.working.intersection(released)
        self.working.update(released)

    def may_go(self, worker: int, observed: list[int]) -> bool:
        steps = self.population.steps
        seen = [steps[other] for other in observed if other in steps]
        return not seen or self.barrier.may_advance(steps[worker], seen)


_DECISIONS = st.lists(st.integers(0, 10**6), min_size=10, max_size=300)
_ALL = [engines.BSP(), engines.SSP(0), engines.SSP(2), engines.ASP(), Majority()]


@pytest.mark.parametrize("barrier", _ALL, ids=str)
@given(workers=st.integers(1, 7), decisions=_DECISIONS)
def test_with_all_steps_known_a_worker_goes_on_exactly_when_its_rule_says(
    barrier: engines.Barrier, workers: int, decisions: list[int]
) -> None:
    oracle = Oracle(barrier, workers, 0)
    chances = iter(decisions)
    try:
        while True:
            waiting = set(oracle.population.workers) - oracle.working
            oracle.happen(lambda bound: next(chances) % bound)
            present = oracle.population.workers
            for worker in waiting.intersection(present):
                others = [other for other in present if other != worker]
                assert oracle.may_go(worker, others) is (worker in oracle.working)
    except StopIteration:
        pass


@pytest.mark.parametrize("resample", ["never", "on_progress", 1.0])
@pytest.mark.parametrize("staleness", [0, 2])
@given(workers=st.integers(2, 7), decisions=_DECISIONS, seed=st.integers(0, 99))
def test_with_a_sample_a_worker_goes_on_only_by_its_rule_and_none_waits_for_who_has_left(
    resample: Any, staleness: int, workers: int, decisions: list[int], seed: int
) -> None:
    barrier = Recorded(2, staleness, resample)
    oracle = Oracle(barrier, workers, seed)
    chances = iter(decisions)
    try:
        while True:
            before = set(oracle.working)
            barrier.drawn.clear()
            oracle.happen(lambda bound: next(chances) % bound)
            steps = oracle.population.steps
            for worker in oracle.working - before:
                if worker in steps and len(steps) > 2 and barrier.drawn:
                    # Who was let go had a sample, this or an earlier one, that fits.
                    lag = [steps[worker] - step for step in steps.values()]
                    assert sum(each <= staleness for each in lag) >= min(2, len(steps) - 1)
            waits = set(steps) - oracle.working
            assert oracle.population.waiting == len(waits)
            for worker in waits:
                assert any(steps[worker] - step > staleness for step in steps.values())
    except StopIteration:
        pass


@given(
    staleness=st.integers(0, 2),
    resample=st.sampled_from(["never", "on_progress"]),
    chances=st.lists(st.integers(0, 10**6), min_size=20, max_size=200),
)
def test_a_worker_that_asks_by_itself_never_passes_against_its_rule_in_any_order_of_messages(
    staleness: int, resample: Any, chances: list[int]
) -> None:
    barrier = engines.PSP(3, staleness, resample)
    steps = dict.fromkeys("abc", 0)
    gate = Gate(barrier, 4, steps)
    questions: list[tuple[str, int]] = gate.questions()
    answers: list[tuple[str, int]] = []
    verdict = Verdict.WAIT
    for chance in chances:
        match chance % 3:
            case 0:
                steps["abc"[chance // 3 % 3]] += 1
            case 1 if questions:
                other, beyond = questions[chance // 3 % len(questions)]
                if steps[other] > beyond:  # otherwise it does not answer yet
                    questions.remove((other, beyond))
                    answers.append((other, steps[other]))
            case 2 if answers:
                other, step = answers.pop(chance // 3 % len(answers))
                verdict = gate.observe(other, step)
                if verdict is not Verdict.WAIT:
                    break
                if gate.is_complete:
                    questions += gate.questions()
    least = min(steps.values())
    if verdict is Verdict.ADVANCE:
        assert 4 - least <= staleness
    elif verdict is Verdict.WAIT and not answers:
        # Whoever holds it up has been asked.
        asked = {other for other, _ in questions}
        assert asked
        if None not in gate.observed.values():
            assert asked == set(gate.observed)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (engines.SSP(0), engines.BSP()),
        (engines.SSP(math.inf), engines.ASP()),
        (engines.PSP(0, 3), engines.ASP()),
        (engines.PSP(11, 3), engines.SSP(3)),
        (engines.PSP(11, 3, "on_progress"), engines.SSP(3)),
        (engines.PSP(99), engines.BSP()),
        (engines.PSP(11, math.inf), engines.ASP()),
    ],
    ids=str,
)
@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("seed", [1, 2])
def test_barriers_that_are_the_same_rule_do_the_same(
    one: engines.Barrier, other: engines.Barrier, distributed: bool, seed: int
) -> None:
    traces = [
        engines.simulate(
            barrier, workers=12, seconds=30, distributed=distributed, seed=seed
        ).workers
        for barrier in (one, other)
    ]
    assert traces[0] == traces[1]


def test_the_bounds_are_those_of_the_paper() -> None:
    # Computed by hand. For sample 1, r = 0, F(r) = 1/2, T = 1: a = 1/2, S = 1.
    assert engines.mean_bound(1, 0, 0.5, 1) == pytest.approx(4)
    assert engines.variance_bound(1, 0, 0.5, 1) == pytest.approx(16)
    # For sample 2, r = 1, F(r) = 1/2, T = 3: a = 1/4, S = 0.75 / 0.609375.
    assert engines.mean_bound(2, 1, 0.5, 3) == pytest.approx(0.75 / 0.609375 * (1 + 4 / 3))
    assert engines.variance_bound(2, 1, 0.5, 3) == pytest.approx(
        0.75 / 0.609375 * (1 + 1.25 / 0.421875)
    )
    # Nobody is asked: nothing is promised. Many are: only the staleness is left.
    assert engines.mean_bound(0, 4, 0.9, 10_000) == math.inf
    assert engines.mean_bound(1000, 4, 0.9, 10_000) == pytest.approx(4 * 5 / 2 / 0.9)
    with pytest.raises(ValueError, match="above 0 and below 1, not 1"):
        engines.mean_bound(1, 0, 1, 1)
