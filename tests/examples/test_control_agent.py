import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.control_agent.acting import NStep, act
from examples.control_agent.program import Settings, make_program
from examples.control_agent.replay import Replay
from launchpad_lite.testing import poll_until
from tests.engines import needs_torch
from tests.examples.running import run_example


def transitions(*values: float) -> dict[str, Any]:
    return {"value": np.array(values), "pair": np.array([[value, -value] for value in values])}


def make_replay(**options: Any) -> Replay:
    chosen = {"capacity": 8, "min_size": 2, "samples_per_insert": 2.0, "slack": 4.0, "seed": 0}
    return Replay(**(chosen | options))


def test_a_replay_buffer_keeps_the_newest_transitions() -> None:
    replay = make_replay(slack=1e9)
    for first in range(0, 15, 3):
        replay.insert(transitions(first, first + 1, first + 2))
    found = replay.sample(400, timeout_s=0)
    assert found is not None
    assert set(found["value"]) == set(range(7, 15))
    np.testing.assert_array_equal(found["pair"], found["value"][:, None] * [1, -1])
    assert replay.counts() == (15, 400)


def test_nothing_is_sampled_before_there_is_enough() -> None:
    replay = make_replay()
    replay.insert(transitions(0))
    assert replay.sample(1, timeout_s=0) is None
    replay.insert(transitions(1))
    assert replay.sample(1, timeout_s=0) is not None


def test_the_side_that_is_ahead_waits() -> None:
    replay = make_replay()
    replay.insert(transitions(0, 1))
    assert replay.sample(4, timeout_s=0) is not None  # 4 ahead
    assert replay.sample(1, timeout_s=0) is None
    for value in range(5):
        assert replay.insert(transitions(value), timeout_s=0), value
    assert not replay.insert(transitions(5), timeout_s=0)  # 6 behind, after the one that was not
    assert replay.sample(2, timeout_s=0) is not None
    assert replay.insert(transitions(5), timeout_s=0)


def test_who_waits_goes_on_when_the_other_side_has_come_after() -> None:
    replay = make_replay(slack=2.0)
    found: list[Any] = []
    learner = threading.Thread(target=lambda: found.append(replay.sample(2)))
    learner.start()
    replay.insert(transitions(0, 1))
    poll_until(lambda: bool(found), 10)
    learner.join()
    assert set(found[0]["value"]) <= {0, 1}


@pytest.mark.parametrize("terminated", [False, True])
def test_transitions_of_n_steps_are_those_of_their_definition(terminated: bool) -> None:
    rng = np.random.default_rng(0)
    length, n, discount = 7, 3, 0.9
    observations, rewards = rng.normal(size=(length + 1, 2)), rng.normal(size=length)
    actions = rng.normal(size=(length, 1))
    n_step = NStep(n, discount)
    found = []
    for step in range(length):
        over = step == length - 1
        arguments = observations[step], actions[step], float(rewards[step]), observations[step + 1]
        found += list(n_step.add(*arguments, terminated and over, over))
    assert len(found) == length
    for first, transition in enumerate(found):
        end = min(first + n, length)
        expected = sum(discount**k * rewards[first + k] for k in range(end - first))
        rest = 0.0 if terminated and end == length else discount ** (end - first)
        np.testing.assert_allclose(transition["reward"], expected, rtol=1e-5)
        np.testing.assert_allclose(transition["discount"], rest, rtol=1e-6)
        np.testing.assert_allclose(transition["observation"], observations[first], rtol=1e-6)
        np.testing.assert_allclose(transition["next_observation"], observations[end], rtol=1e-6)
        np.testing.assert_allclose(transition["action"], actions[first], rtol=1e-6)


@needs_torch
@pytest.mark.slow
def test_actors_choose_what_the_policy_of_the_learner_would_choose() -> None:
    import torch

    from examples.control_agent.d4pg import D4PG, Support

    agent = D4PG(3, 1, 16, Support())
    observations = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    with torch.no_grad():
        expected = agent.policy(torch.as_tensor(observations)).numpy()
    found = act(agent.policy_parameters(), observations)
    np.testing.assert_allclose(found, expected, atol=1e-6)


@needs_torch
@pytest.mark.slow
def test_a_projected_distribution_keeps_its_mean_and_stays_on_the_atoms() -> None:
    import torch

    from examples.control_agent.d4pg import Support

    support = Support(-3.0, 0.0, 7)
    atoms = support.returns()
    torch.testing.assert_close(support.project(atoms[None], torch.eye(7)[2:3]), torch.eye(7)[2:3])
    probabilities = torch.rand(5, 7).softmax(1)
    returns = 0.9 * atoms[None] - torch.linspace(0, 0.3, 5)[:, None]
    projected = support.project(returns, probabilities)
    torch.testing.assert_close(projected.sum(1), torch.ones(5))
    torch.testing.assert_close(projected @ atoms, (returns * probabilities).sum(1))
    beyond = support.project(torch.full((1, 7), -9.0), torch.full((1, 7), 1 / 7))
    torch.testing.assert_close(beyond, torch.eye(7)[:1])


@needs_torch
@pytest.mark.slow
@pytest.mark.xdist_group("training")  # one at a time: each takes all cores
def test_the_script_learns_with_a_learner_of_two_replicas(tmp_path: Path) -> None:
    # A policy that has not learned has a mean return of about -1200.
    done = run_example("control_agent", "--replicas=2", "--target=-500", f"--output={tmp_path}")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert result["solved"]
    assert result["final_return"] >= -500
    assert result["curve"][0][2] < -800
    assert result["ratio"] == pytest.approx(64, rel=0.2)
    assert (tmp_path / "learning_curve.svg").exists()


@needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("min_size", [500, 10**9])
def test_a_stop_from_outside_ends_nobody_by_force(launch_program: Any, min_size: int) -> None:
    program = make_program(1, 2, Settings(target=0.0, min_size=min_size))
    running = launch_program(program, "test_mp", notice_s=30)
    replay = running.client("replay")
    # They learn, or wait for the first batch.
    poll_until(lambda: replay.counts()[0 if min_size > 500 else 1] > 1000, 60)
    result = running.stop()
    assert not result.killed
    assert not result.failures
