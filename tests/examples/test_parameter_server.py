import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import launchpad_lite as lp
from examples.parameter_server import launch
from examples.parameter_server.program import (
    TOPOLOGIES,
    ParamServer,
    Regression,
    Result,
    make_program,
)
from tests.examples.running import run_example
from tests.launchers.scripts import without_logs_line

REGRESSION = Regression(dimension=8, samples=512)
REQUESTERS, STEPS = 4, 2000


def train(
    launch_program: Any, folder: Path, topology: str, steps: int = STEPS, **options: Any
) -> Result:
    output = folder / "result.json"
    program = make_program(
        topology, REQUESTERS, output, steps=steps, regression=REGRESSION, **options
    )
    assert launch_program(program, "test_mt").wait().outcome is lp.Outcome.COMPLETED
    return Result(**json.loads(output.read_text(encoding="utf-8")))


def best_weights() -> Any:
    # The normal equations, since the example itself uses lstsq.
    features, targets = REGRESSION.data()
    return np.linalg.solve(features.T @ features, features.T @ targets)


def calls_of(topology: str) -> dict[str, set[str]]:
    """Returns whom each node calls."""
    plan = lp.plan(make_program(topology, num_requesters=4))
    return {each.name: set(each.calls) for each in plan.executables}


@pytest.mark.slow
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_topology_learns_the_least_squares_weights(
    launch_program: Any, tmp_path: Path, topology: str
) -> None:
    result = train(
        launch_program,
        tmp_path,
        topology,
        num_cachers=1,
        # So long that also where steps take long several have the same weights, and not so long
        # that where they are quick all of those together go too far.
        refresh_s=0.01,
        stale_s=0.03,
        learning_rate=0.00125,
    )
    best = best_weights()
    error = np.linalg.norm(np.array(result.weights) - best) / np.linalg.norm(best)
    assert error < 0.03
    assert result.distance == pytest.approx(error)
    assert result.least_loss <= result.loss < 1.1 * result.least_loss
    assert result.topology == topology
    assert result.pulls == result.pushes == REQUESTERS * STEPS
    if topology == "cached":
        assert 1 <= result.server_pulls <= result.seconds / 0.01 + 1
        assert result.server_pulls < result.pulls / 2
    else:
        assert result.server_pulls == result.pulls


def test_the_topologies_are_those_of_the_paper() -> None:
    single, replicated, cached = (calls_of(topology) for topology in TOPOLOGIES)
    requesters = [f"requester[{index}]" for index in range(4)]
    assert [single[name] for name in requesters] == [{"server[0]", "evaluator[0]"}] * 4
    assert [replicated[name] for name in requesters] == [
        {"server[0]", "evaluator[0]"},
        {"server[1]", "evaluator[0]"},
    ] * 2
    assert [cached[name] for name in requesters] == [
        {"cacher[0]", "server[0]", "evaluator[0]"},
        {"cacher[1]", "server[0]", "evaluator[0]"},
    ] * 2
    assert cached["cacher[0]"] == cached["cacher[1]"] == {"server[0]"}


def test_a_server_steps_against_the_gradient_and_leaves_what_it_gave_out() -> None:
    server = ParamServer(dimension=2, learning_rate=0.5)
    pulled = server.pull()
    server.push(np.array([1.0, -2.0]))
    assert pulled.tolist() == [0.0, 0.0]
    served = server.served()
    assert served.weights.tolist() == [-0.5, 1.0]
    assert (served.pulls, served.pushes) == (1, 1)


def test_the_demo_compares_the_topologies(monkeypatch: Any, capsys: Any) -> None:
    arguments = ["--launcher=local_mt", "--requesters=2", "--steps=50"]
    monkeypatch.setattr(sys, "argv", ["launch", *arguments])
    launch.main()
    shown = capsys.readouterr().out
    assert "cached: 2 requesters (threads of this process)" in shown
    rows = [line.split() for line in shown.splitlines() if "%" in line]
    assert [row[0] for row in rows] == list(TOPOLOGIES)
    assert [row[2] for row in rows] == ["100"] * 3


@pytest.mark.slow
def test_the_demo_runs_one_topology_in_processes() -> None:
    arguments = ["--topology=cached", "--requesters=2", "--steps=50"]
    done = run_example("parameter_server", *arguments)
    assert (done.returncode, without_logs_line(done.stderr)) == (0, "")
    assert "cached: 2 requesters (processes of this machine)" in done.stdout
    (row,) = (line.split() for line in done.stdout.splitlines() if "%" in line)
    assert (row[0], row[2], row[4]) == ("cached", "100", "100")
    assert int(row[3]) < 100
