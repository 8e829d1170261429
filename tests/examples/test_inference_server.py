import json
import re
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import launchpad_lite as lp
from examples.inference_server import launch
from examples.inference_server.program import (
    SOLVED,
    Result,
    make_program,
    policy,
    seeds_of,
    table,
)
from launchpad_lite.testing import poll_until
from tests.examples.running import run_example
from tests.launchers.scripts import without_logs_line


def play(launch_program: Any, folder: Path, **options: Any) -> Result:
    output = folder / "result.json"
    program = make_program(output=output, **options)
    assert launch_program(program, "test_mt").wait().outcome is lp.Outcome.COMPLETED
    return Result(**json.loads(output.read_text(encoding="utf-8")))


def play_alone(seed: int) -> float:
    environment = gym.make("CartPole-v1")
    observation, _ = environment.reset(seed=seed)
    total, over = 0.0, False
    while not over:
        # The pole's angle and angular velocity.
        action = int(observation[2] + 0.5 * observation[3] > 0)
        observation, reward, terminated, truncated, _ = environment.step(action)
        total += float(reward)
        over = terminated or truncated
    environment.close()
    return total


def test_actors_balance_as_well_as_alone(launch_program: Any, tmp_path: Path) -> None:
    # Patient, so that nobody has played to the end before another one has begun.
    result = play(launch_program, tmp_path, num_actors=3, timeout_ms=50)
    assert result.returns == [[play_alone(seed)] for seed in range(3)]
    assert result.mean_return >= SOLVED
    assert result.actions == sum(map(sum, result.returns))
    # The actors begin one after the other, and then keep step.
    assert 1 < result.largest_batch <= result.batch_size == 3
    assert result.mean_batch > 1
    assert result.batches < result.actions


def test_batches_of_one_are_no_batches(launch_program: Any, tmp_path: Path) -> None:
    result = play(launch_program, tmp_path, num_actors=2, batch_size=1)
    assert result.largest_batch == result.mean_batch == 1
    assert result.batches == result.actions
    assert result.mean_return >= SOLVED


def test_each_actor_plays_its_own_episodes_and_waits_for_no_batch_that_cannot_fill(
    launch_program: Any, tmp_path: Path
) -> None:
    result = play(
        launch_program, tmp_path, num_actors=2, episodes=2, batch_size=100, timeout_ms=0.5
    )
    assert result.largest_batch <= 2
    assert result.returns == [[play_alone(seed) for seed in seeds] for seeds in ([0, 1], [2, 3])]
    assert [list(seeds_of(actor, 2)) for actor in range(2)] == [[0, 1], [2, 3]]


def test_the_policy_pushes_to_where_the_pole_falls() -> None:
    observations = np.array([[0, 0, 0.1, 0], [0, 0, -0.1, 0], [9, 9, 0.1, -1], [-9, -9, -0.1, 1]])
    assert policy(observations).tolist() == [1, 0, 0, 1]


def test_a_run_can_be_stopped(launch_program: Any, tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    running = launch_program(make_program(2, output=output, episodes=10**6), "test_mt")
    inference = running.client("inference")
    poll_until(inference.batches)
    assert running.stop().outcome is lp.Outcome.STOPPED
    assert not output.exists()


def test_without_an_output_the_reporter_prints_the_table(launch_program: Any, capsys: Any) -> None:
    launch_program(make_program(1), "test_mt").wait()
    header, row = capsys.readouterr().out.splitlines()
    assert header == table([])
    assert row.split()[:3] == ["1", "1.00", "1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_actors": 0}, "at least one actor, not 0"),
        ({"episodes": 0}, "at least one episode, not 0"),
        ({"batch_size": 0}, "at least one observation in a batch, not 0"),
        ({"timeout_ms": -1}, "an observation cannot wait for -1 ms"),
        ({"timeout_ms": float("nan")}, "an observation cannot wait for nan ms"),
        ({"cost_ms": -1}, "a batch cannot take -1 ms"),
    ],
)
def test_programs_that_make_no_sense_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make_program(**arguments)


@pytest.mark.slow
def test_the_demo_compares_with_batches_of_one() -> None:
    # Patient, so that nobody has played to the end before the other one has begun.
    done = run_example("inference_server", "--actors=2", "--compare", "--timeout=50")
    assert (done.returncode, without_logs_line(done.stderr)) == (0, "")
    shown = done.stdout.splitlines()
    assert shown[:2] == ["2 actors (processes of this machine)"] * 2
    batched, single = (line.split() for line in shown[-2:])
    assert (batched[0], batched[2], single[0]) == ("2", "2", "1")
    assert float(batched[1]) > 1 == float(single[1])
    assert float(batched[-1]) >= SOLVED <= float(single[-1])


def test_the_demo_explains_bad_flags(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["launch", "--actors=0"])
    with pytest.raises(SystemExit, match="2"):
        launch.main()
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "inference_server needs at least one actor, not 0" in shown.err
