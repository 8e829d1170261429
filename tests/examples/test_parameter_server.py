import json
import re
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
    table,
)
from launchpad_lite.testing import poll_until
from tests.examples.running import run_example
from tests.launchers.scripts import without_logs_line

REGRESSION = Regression(dimension=8, samples=512)
REQUESTERS, STEPS = 4, 2000


def train(
    launch_program: Any,
    folder: Path,
    topology: str,
    steps: int = STEPS,
    **options: Any,
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


def test_a_cacher_whose_weights_last_asks_the_server_once(
    launch_program: Any, tmp_path: Path
) -> None:
    result = train(
        launch_program,
        tmp_path,
        "cached",
        steps=50,
        num_cachers=2,
        refresh_s=60,
        stale_s=60,
    )
    assert (result.pulls, result.pushes, result.server_pulls) == (200, 200, 2)


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


def test_a_training_can_be_stopped(launch_program: Any, tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    running = launch_program(make_program("cached", 2, output, steps=10**9), "test_mt")
    server = running.client("server")
    poll_until(lambda: server.served().pushes)
    result = running.stop()
    assert result.outcome is lp.Outcome.STOPPED
    assert not output.exists()


def test_without_an_output_the_evaluator_prints_the_table(launch_program: Any, capsys: Any) -> None:
    launch_program(make_program("single", 1, steps=3, regression=REGRESSION), "test_mt").wait()
    header, row = capsys.readouterr().out.splitlines()
    assert header == table([])
    assert row.split()[0] == "single"
    assert row.split()[2:5] == ["3", "3", "3"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_requesters": 0}, "at least one requester, not 0"),
        ({"num_servers": 0}, "at least one server, not 0"),
        ({"num_cachers": -1}, "at least one cacher, not -1"),
        ({"steps": 0}, "at least one step, not 0"),
        ({"batch_size": 0}, "at least one sample in a batch, not 0"),
        ({"topology": "ring"}, "no topology 'ring'; there are: single, replicated, cached"),
        (
            {"topology": "replicated", "num_requesters": 2, "num_servers": 3},
            "each of 3 servers needs a requester that trains it, and there are only 2",
        ),
        (
            {"topology": "cached", "refresh_s": 5, "stale_s": 1},
            "stale_s=1 is below refresh_s=5",
        ),
    ],
)
def test_programs_that_make_no_sense_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make_program(**arguments)


def test_a_regression_needs_as_many_samples_as_weights() -> None:
    with pytest.raises(ValueError, match="dimension=3 and samples=2"):
        Regression(dimension=3, samples=2)


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


def test_the_demo_explains_bad_flags(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["launch", "--requesters=0"])
    with pytest.raises(SystemExit, match="2"):
        launch.main()
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "parameter_server needs at least one requester, not 0" in shown.err
