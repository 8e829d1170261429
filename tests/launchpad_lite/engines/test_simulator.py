"""Barriers with many workers in virtual time."""

import itertools
import math
import random
import statistics

import pytest

from launchpad_lite import engines


def test_stricter_barriers_are_slower_and_closer_together() -> None:
    results = [
        engines.simulate(barrier, workers=50, seconds=60.0)
        for barrier in (engines.BSP(), engines.PSP(5), engines.SSP(4), engines.ASP())
    ]
    steps = [statistics.mean(result.steps) for result in results]
    assert steps == sorted(steps)
    assert [result.waited for result in results] == sorted(
        (result.waited for result in results), reverse=True
    )
    bsp, _, ssp, asp = results
    assert max(bsp.steps) - min(bsp.steps) <= 1
    assert max(ssp.steps) - min(ssp.steps) <= 5
    assert max(asp.steps) - min(asp.steps) > 5


def test_without_a_barrier_workers_take_their_time_and_nothing_else() -> None:
    result = engines.simulate(engines.ASP(), workers=3, seconds=10.5, step_time=2.0)
    assert result.steps == [5, 5, 5]
    assert list(result.workers[0].finished_s) == [2, 4, 6, 8, 10]
    assert (result.messages, result.updates, result.waited) == (0, 15, 0)


def test_on_a_server_each_step_costs_a_report_and_a_permission() -> None:
    # Each step: 1 s of work, 0.1 s there, 0.1 s back.
    result = engines.simulate(engines.BSP(), workers=4, seconds=2.25, step_time=1.0, delay=0.1)
    assert result.steps == [2] * 4
    assert result.messages == 2 * 4 + 4  # the permissions for the third are on their way
    assert result.waited == pytest.approx((0.2 + 0.05) / 2.25)


def test_between_peers_a_sample_costs_questions_and_answers() -> None:
    result = engines.simulate(
        engines.PSP(2), workers=4, seconds=1.25, step_time=1.0, delay=0.1, distributed=True
    )
    assert result.messages == 4 * 2 * 2
    assert result.steps == [1] * 4


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("delay", [0.0, 0.3])
@pytest.mark.parametrize(
    "barrier",
    [
        engines.BSP(),
        engines.SSP(2),
        engines.PSP(3),
        engines.PSP(3, 1, "on_progress"),
        engines.PSP(3, resample=0.5),
    ],
    ids=str,
)
def test_nobody_waits_for_workers_that_left(
    barrier: engines.Barrier, delay: float, distributed: bool
) -> None:
    result = engines.simulate(
        barrier,
        workers=20,
        seconds=60.0,
        delay=lambda rng: rng.uniform(0, 2 * delay),
        churn=engines.Churn(leaves_per_s=0.5, joins_per_s=0.5),
        distributed=distributed,
        seed=3,
    )
    assert sum(trace.left_s is not None for trace in result.workers) > 15
    assert len(result.workers) > 35
    # All that were there long enough went on to the end: no gap is much longer than a step.
    for trace in result.workers:
        end = result.seconds if trace.left_s is None else trace.left_s
        times = [trace.joined_s, *trace.finished_s, end]
        assert max(b - a for a, b in itertools.pairwise(times)) < 25
    assert min(result.steps) > 5


def test_stragglers_hold_up_a_strict_barrier_most() -> None:
    def slowed(barrier: engines.Barrier) -> float:
        steps = [
            statistics.median(
                engines.simulate(barrier, workers=40, seconds=60, stragglers=stragglers).steps
            )
            for stragglers in (None, engines.Stragglers(0.1, slowdown=6))
        ]
        return steps[1] / steps[0]

    assert slowed(engines.BSP()) < slowed(engines.PSP(2, resample=0.1)) < slowed(engines.ASP())


def test_a_simulation_depends_on_its_seed_only() -> None:
    def run(seed: int) -> engines.Simulation:
        return engines.simulate(
            engines.PSP(3, 1, 0.5),
            workers=20,
            seconds=20,
            delay=lambda rng: rng.expovariate(20),
            churn=engines.Churn(0.5, 0.5),
            stragglers=engines.Stragglers(0.1, 3),
            seed=seed,
        )

    assert run(1) == run(1)
    assert run(1) != run(2)


class Mean:
    """Learns the mean of what workers draw, by gradients of the squared error."""

    def __init__(self) -> None:
        self.value = 0.0
        self._rng = random.Random(1)

    def read(self) -> float:
        return self.value

    def compute(self, values: float, worker: int, step: int) -> float:
        assert worker < 10
        return 0.01 * (self._rng.gauss(3, 0.1) - values)

    def apply(self, update: float) -> None:
        self.value += update

    def evaluate(self) -> float:
        return abs(self.value - 3)


@pytest.mark.parametrize("delay", [0.0, 0.5])
def test_a_model_learns_under_the_order_of_updates(delay: float) -> None:
    result = engines.simulate(
        engines.SSP(2), workers=10, seconds=60, delay=delay, model=Mean(), evaluate_every=50
    )
    assert [each.updates for each in result.evaluations] == [
        50 * (number + 1) for number in range(len(result.evaluations))
    ]
    assert len(result.evaluations) > 3
    assert result.evaluations[-1].value < 0.2 < result.evaluations[0].value
    assert result.evaluations[-1].time_s <= 60


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "at least 1"),
        ({"seconds": 0}, "seconds is above 0"),
        ({"step_time": -1.0}, "step_time is a number of seconds from 0 up, not -1.0"),
        ({"delay": math.nan}, "delay is a number of seconds from 0 up, not nan"),
        ({"step_time": lambda _: -1.0}, "a duration of -1.0 s was drawn"),
        ({"step_time": 0.0}, "1,000 steps of a worker took no time"),
        ({"step_time": lambda _: 0.0, "distributed": True}, "1,000 steps of a worker took no time"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engines.simulate(engines.BSP(), **{"workers": 2, **options})  # type: ignore[arg-type]
