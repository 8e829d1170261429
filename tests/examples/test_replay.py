import json
from pathlib import Path

import numpy as np
import pytest

from examples.replay.program import ERROR_BUFFER, MIN_SIZE, QNetwork, forward
from tests.engines import needs_reverb
from tests.examples.running import run_example


def test_the_network_learns_the_values_of_the_actions_that_were_taken() -> None:
    rng = np.random.default_rng(0)
    network = QNetwork(seed=1)
    observations = rng.normal(size=(256, 4)).astype(np.float32)
    actions = rng.integers(2, size=256)
    targets = np.where(actions == 0, observations[:, 0], -observations[:, 1])
    rows = np.arange(256)

    def error() -> float:
        values = forward(network.params, observations)[-1][rows, actions]
        return float(np.mean((values - targets) ** 2))

    before = error()
    for _ in range(500):
        network.step(observations, actions, targets)
    assert error() < 0.01 * before


@pytest.mark.slow
@pytest.mark.timeout(300)
@needs_reverb
def test_the_script_learns_at_the_ratio_that_was_asked_for(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    done = run_example("replay", "--ratio=8", f"--output={output}", timeout_s=240)
    assert done.returncode == 0, done.stderr
    assert "[evaluator[0]] learner step" in done.stdout
    result = json.loads(output.read_text(encoding="utf-8"))
    assert result["mean_return"] >= 150
    assert result["asked_ratio"] == 8
    # Numbers of samples may differ by the buffer, and those of inserts by one for each actor.
    ahead = result["samples"] - 8 * (result["inserts"] - MIN_SIZE)
    assert abs(ahead) <= ERROR_BUFFER + 8 * 2, result
    assert result["ratio"] == pytest.approx(8, rel=0.2)
