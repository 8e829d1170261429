import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import launchpad_lite as lp
from examples.actor_learner.launch import CURVE_FILE, main
from examples.actor_learner.ppo import ActorCritic, Batch, Segment, advantages_of
from examples.actor_learner.program import make_program, read_result, table
from launchpad_lite.testing import poll_until
from tests.examples.running import run_example, run_python
from tests.launchers.scripts import without_logs_line

_PNG = b"\x89PNG\r\n\x1a\n"

#: A target that is reached after one update or two.
EASY = {"target": 60.0, "episodes": 4, "max_seconds": 60.0, "steps_per_update": 1024}


def make_agent(seed: int = 0) -> ActorCritic:
    agent = ActorCritic(observation_size=3, num_actions=2, hidden=5, dtype=np.float64)
    agent.parameters[:] = np.random.default_rng(seed).normal(0, 0.7, agent.parameters.shape)
    return agent


def make_batch(agent: ActorCritic, size: int = 40) -> Batch:
    rng = np.random.default_rng(1)
    observations = rng.normal(size=(size, 3))
    actions = rng.integers(2, size=size)
    # Ratios on both sides of the clip, advantages of both signs.
    old = agent.log_probabilities(observations, actions) + rng.normal(0, 0.3, size)
    return Batch(observations, actions, old, rng.normal(size=size), rng.normal(size=size))


def make_segment(size: int) -> Segment:
    rng = np.random.default_rng(2)
    terminated = rng.random(size) < 0.15
    truncated = (rng.random(size) < 0.15) & ~terminated
    assert terminated.any()
    assert truncated.any()
    return Segment(
        rng.normal(size=(size, 3)),
        rng.integers(2, size=size),
        rng.normal(size=size),
        rng.normal(size=(size, 3)),
        terminated,
        truncated,
    )


def test_the_gradient_is_that_of_finite_differences() -> None:
    agent = make_agent()
    batch = make_batch(agent)
    ratios = np.exp(
        agent.log_probabilities(batch.observations, batch.actions) - batch.log_probabilities
    )
    assert (abs(ratios - 1) > 0.2).any()
    assert (abs(ratios - 1) < 0.2).any()

    _, gradient = agent.loss(batch, clip=0.2, entropy=0.1)
    found = np.empty_like(gradient)
    for index, value in enumerate(agent.parameters.copy()):
        losses = []
        for moved in (value + 1e-6, value - 1e-6):
            agent.parameters[index] = moved
            losses.append(agent.loss(batch, clip=0.2, entropy=0.1)[0])
        agent.parameters[index] = value
        found[index] = (losses[0] - losses[1]) / 2e-6
    np.testing.assert_allclose(gradient, found, rtol=1e-5, atol=1e-8)


def test_advantages_are_the_weighted_sums_of_their_definition() -> None:
    segment = make_segment(60)
    rng = np.random.default_rng(3)
    values, next_values = rng.normal(size=60), rng.normal(size=60)
    expected = []
    for start in range(60):
        total, weight = 0.0, 1.0
        for step in range(start, 60):
            following = 0.0 if segment.terminated[step] else next_values[step]
            total += weight * (segment.rewards[step] + 0.9 * following - values[step])
            weight *= 0.9 * 0.8
            if segment.terminated[step] or segment.truncated[step]:
                break
        expected.append(total)
    np.testing.assert_allclose(advantages_of(segment, values, next_values, 0.9, 0.8), expected)


def test_it_ends_by_itself_once_it_is_solved(launch_program: Any, tmp_path: Path) -> None:
    folder = tmp_path / "made" / "for it"
    result = launch_program(make_program(output=folder, **EASY), "test_mt", notice_s=30).wait()
    assert (result.outcome, result.reason) == (lp.Outcome.STOPPED, "lp.stop() in evaluator[0]")
    assert not result.killed
    found = read_result(folder)
    last = found.evaluations[-1]
    assert (found.solved, last.episodes) == (True, 4)
    assert last.mean_return >= 60
    assert (found.updates, found.steps) == (last.updates, 1024 * last.updates)
    assert [point.updates for point in found.curve] == list(range(1, len(found.curve) + 1))


@pytest.mark.slow
def test_the_same_seed_learns_the_same_as_threads_and_as_processes(
    launch_program: Any, tmp_path: Path
) -> None:
    curves = []
    for launcher in ("test_mt", "test_mp"):
        program = make_program(2, seed=7, output=tmp_path / launcher, **EASY)
        launch_program(program, launcher).wait()
        curve = read_result(tmp_path / launcher).curve
        curves.append([(point.steps, point.training_return) for point in curve])
    common = min(map(len, curves))
    assert common > 0
    assert curves[0][:common] == curves[1][:common]


@pytest.mark.slow
def test_a_stop_from_outside_keeps_what_was_found_and_ends_nobody_by_force(
    launch_program: Any, tmp_path: Path
) -> None:
    program = make_program(3, output=tmp_path, target=500.0)
    running = launch_program(program, "test_mp", notice_s=30)
    learner = running.client("learner")
    poll_until(lambda: learner.progress().updates > 1, 60)
    assert not running.stop().killed
    found = read_result(tmp_path)
    assert not found.solved
    assert found.updates > 1


@pytest.mark.slow
def test_an_actor_that_is_killed_is_replaced_and_learning_goes_on(
    launch_program: Any, tmp_path: Path
) -> None:
    program = make_program(2, output=tmp_path, target=500.0)
    restart = {"actor": lp.RestartPolicy(backoff_s=0.01)}
    running = launch_program(program, "test_mp", restart=restart)
    learner = running.client("learner")
    poll_until(lambda: learner.progress().updates > 1, 60)
    (actor,) = (each for each in running.running.status() if each.name == "actor[1]")
    os.kill(actor.pid, signal.SIGKILL)
    known = learner.progress().updates
    # One update may be on its way; a second one needs the new actor.
    poll_until(lambda: learner.progress().updates > known + 2, 60)
    result = running.stop()
    assert [each.node for each in result.restarts] == ["actor[1]"]


@pytest.mark.slow
def test_hosts_must_have_what_only_some_nodes_import(tmp_path: Path) -> None:
    # In a process of its own: here other tests may have loaded it.
    done = run_python(
        *("-m", "launchpad_lite.launch", "--launcher=ssh", "--hosts=h1"),
        *("emit", "examples.actor_learner.program", f"--output={tmp_path}"),
    )
    assert (done.returncode, done.stderr) == (0, "")
    packages = (tmp_path / "packages.txt").read_text().splitlines()
    assert [line.partition("==")[0] for line in packages] == ["gymnasium", "numpy"]


@pytest.mark.slow
def test_the_script_shows_a_table_and_keeps_the_result(tmp_path: Path) -> None:
    arguments = ("--actors=1", "--target=60", "--episodes=4", f"--output={tmp_path}")
    done = run_example("actor_learner", *arguments)
    assert (done.returncode, without_logs_line(done.stderr)) == (0, "")
    found = read_result(tmp_path)
    assert found.solved
    assert f"\n\n{table(found)}\n\n" in done.stdout
    assert str(tmp_path / CURVE_FILE) in done.stdout
    assert (tmp_path / CURVE_FILE).read_bytes().startswith(_PNG)


def test_the_script_says_that_the_target_was_not_reached(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(sys, "argv", ["launch", "--launcher=local_mt", "--max-seconds=0.3"])
    assert main() == 1
    assert "475 NOT reached" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_solves_cartpole(launch_program: Any, tmp_path: Path) -> None:
    launch_program(make_program(output=tmp_path, max_seconds=240.0), "test_mp").wait(260.0)
    found = read_result(tmp_path)
    assert found.solved
    assert found.evaluations[-1].mean_return >= 475
    assert found.evaluations[-1].episodes == 100
    assert found.steps <= 200_000
