"""Programs survive what machines do to them, and know afterwards what happened."""

import collections
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import launchpad_lite as lp
from examples.evolution_strategies.program import Problem, Result, Search, make_program, rosenbrock
from launchpad_lite.testing import Fault, Injected, Monkey, poll_until

#: As often as there are faults, and with little delay.
RESTART = lp.RestartPolicy(max_restarts=10_000, backoff_s=0.01, max_backoff_s=0.2)
#: Seconds between checkpoints of the evolver.
CHECKPOINT_S = 0.3
#: Less than the longest pause: who is paused may be taken for hung, and is ended then.
HUNG = lp.Liveness(health_s=1.5)
#: A worker as the history knows it: its node, and how many came before it there.
Worker = tuple[str, int]


@dataclass(frozen=True)
class Chaos:
    """What a program must go through.

    Attributes:
        seed: Of the faults and of the search.
        evaluator_faults: So many at least on the evaluators, before it may go on in peace.
        evolver_kills: So many at least on the evolver.
        dimension: Of the search: how long it takes in evaluations.
        cost_ms: Of each evaluation. All of them take longer than the faults.
        interval_s: Seconds between two faults on evaluators, on average.
        max_pause_s: The longest pause.
        liveness: When a node is taken for hung.
    """

    seed: int
    evaluator_faults: int = 28
    evolver_kills: int = 1
    dimension: int = 8
    cost_ms: float = 14.0
    interval_s: float = 0.15
    max_pause_s: float = 0.8
    liveness: lp.Liveness | None = None


def short(chaos: Chaos) -> Any:
    return pytest.param(chaos, id=f"seed-{chaos.seed}", marks=pytest.mark.slow)


def long(chaos: Chaos) -> Any:
    chaos = replace(chaos, evaluator_faults=300, evolver_kills=10, dimension=16, cost_ms=40.0)
    marks = [pytest.mark.long, pytest.mark.timeout(600)]
    return pytest.param(chaos, id=f"long-seed-{chaos.seed}", marks=marks)


@pytest.mark.parametrize(
    "chaos",
    [
        short(Chaos(seed=1)),
        short(Chaos(seed=2, liveness=HUNG, max_pause_s=4.0)),
        long(Chaos(seed=11)),
        long(Chaos(seed=12, liveness=HUNG, max_pause_s=4.0)),
    ],
)
def test_chaos_changes_no_result_and_the_history_accounts_for_every_kill(
    launch_program: Any, tmp_path: Path, chaos: Chaos
) -> None:
    output = tmp_path / "result.json"
    program = make_program(
        8, "rosenbrock", chaos.dimension, chaos.seed, output, cost_ms=chaos.cost_ms
    )
    launched = launch_program(
        program,
        "test_mp",
        restart=RESTART,
        liveness=chaos.liveness,
        checkpoints={"evolver": lp.Checkpoints(tmp_path / "checkpoints", CHECKPOINT_S)},
    )
    faults = inject(launched, chaos)
    # While a program ends, nobody is started anew whose restart could be counted.
    assert not output.exists(), "the search was over before the faults were"
    ended = launched.wait(300)
    result = Result(**json.loads(output.read_text(encoding="utf-8")))
    print(f"{count(faults)}; {len(ended.restarts)} restarts, {result.lost_calls} calls lost")
    assert (ended.outcome, ended.failures, ended.killed) == (lp.Outcome.COMPLETED, (), ())
    assert result.solved
    assert replace(result, lost_calls=0) == undisturbed(chaos)
    account(faults, ended.restarts, may_hang=chaos.liveness is not None)


def inject(launched: Any, chaos: Chaos) -> list[Injected]:
    """Hits evaluators and the evolver until it is enough."""
    common = {"seed": chaos.seed, "max_pause_s": chaos.max_pause_s}
    # One monkey for each group: one of nine nodes would be hit too rarely. It must have the time
    # to write a checkpoint, or else would never come to an end.
    evaluators = Monkey(launched, labels=["evaluator"], mean_interval_s=chaos.interval_s, **common)
    evolver = Monkey(
        launched, labels=["evolver"], mean_interval_s=1.0, minimum_uptime_s=1.0, **common
    )
    with evaluators, evolver:
        poll_until(
            lambda: (
                len(evaluators.injected) >= chaos.evaluator_faults
                and count(evolver.injected)[Fault.KILL] >= chaos.evolver_kills
            ),
            300,
        )
    return evaluators.injected + evolver.injected


def undisturbed(chaos: Chaos) -> Result:
    """Returns what the same search finds in peace."""
    search = Search(Problem("rosenbrock", chaos.dimension, chaos.seed, 16, 1e-8, 100_000))
    while not search.over:
        search.tell([rosenbrock(candidate) for candidate in search.candidates])
    return search.result(0)


def account(faults: Sequence[Injected], restarts: Sequence[lp.Restart], *, may_hang: bool) -> None:
    """Finds for each kill the one restart that followed from it, and for each restart its fault."""
    ends = {
        (restart.node, restart.attempt - 1): restart.failure
        for restart in restarts
        if restart.failure is not None
    }
    assert len(ends) == len(restarts)
    assert all(worker == (end.node, end.attempt) for worker, end in ends.items())
    killed = workers(faults, Fault.KILL)
    assert len(killed) == count(faults)[Fault.KILL]
    hung = {worker for worker, end in ends.items() if "it is hung" in end.summary}
    assert hung <= workers(faults, Fault.PAUSE, Fault.DELAY)
    assert may_hang or not hung
    # Who is just being ended for being hung may be killed besides.
    assert killed <= ends.keys() <= killed | hung
    wrong = [ends[worker] for worker in killed - hung if "SIGKILL" not in ends[worker].summary]
    assert not wrong


def workers(faults: Sequence[Injected], *kinds: Fault) -> set[Worker]:
    return {(fault.node, fault.attempt) for fault in faults if fault.fault in kinds}


def count(faults: Sequence[Injected]) -> "collections.Counter[Fault]":
    return collections.Counter(fault.fault for fault in faults)
