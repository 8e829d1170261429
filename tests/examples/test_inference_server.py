import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

import launchpad_lite as lp
from examples.inference_server.program import SOLVED, Result, make_program, seeds_of
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


def test_each_actor_plays_its_own_episodes_and_waits_for_no_batch_that_cannot_fill(
    launch_program: Any, tmp_path: Path
) -> None:
    result = play(
        launch_program, tmp_path, num_actors=2, episodes=2, batch_size=100, timeout_ms=0.5
    )
    assert result.largest_batch <= 2
    assert result.returns == [[play_alone(seed) for seed in seeds] for seeds in ([0, 1], [2, 3])]
    assert [list(seeds_of(actor, 2)) for actor in range(2)] == [[0, 1], [2, 3]]


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
