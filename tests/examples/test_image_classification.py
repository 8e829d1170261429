import re

import numpy as np
import pytest

from examples.image_classification.program import Settings, batches
from tests.engines import needs_jax, needs_torch
from tests.examples.running import run_example


def test_the_rate_warms_up_and_falls_three_times() -> None:
    settings = Settings(epochs=100, rate=1.0)
    total = settings.epochs * settings.steps_per_epoch
    shares = (0.03, 0.06, 0.29, 0.31, 0.61, 0.81)
    rates = [settings.rate_at(int(share * total)) for share in shares]
    np.testing.assert_allclose(rates, [0.5, 1, 1, 0.1, 0.01, 0.001], rtol=0.05)


def test_batches_of_all_replicas_are_one_epoch_whoever_begins_where() -> None:
    settings = Settings(batch=64)
    seen = []
    for index in (0, 1):
        pipeline = batches(settings, 32, index, step=0)
        seen += [next(pipeline)[0] for _ in range(settings.steps_per_epoch)]
    whole = [batch for batch, _ in zip(batches(settings, 64, 0, 0), range(22), strict=False)]
    assert settings.steps_per_epoch == 22
    np.testing.assert_allclose(
        np.concatenate(seen).sum(0), np.concatenate([images for images, _ in whole]).sum(0)
    )
    later, _ = next(batches(settings, 64, 0, step=5))
    np.testing.assert_array_equal(later, whole[5][0])


@pytest.mark.slow
@pytest.mark.xdist_group("training")  # one at a time: each takes all cores
@pytest.mark.parametrize(
    "replicator",
    [
        *(pytest.param(name, marks=needs_torch) for name in ("none", "multi_gpu", "async")),
        pytest.param("multi_worker", marks=needs_torch),
        pytest.param("tpu", marks=needs_jax),
    ],
)
def test_it_learns_with_each_replicator(replicator: str) -> None:
    done = run_example("image_classification", f"--replicator={replicator}", "--epochs=3")
    assert done.returncode == 0, done.stderr
    shares = re.findall(r"replica \d: reads (\d+\.\d)% of the test images right", done.stdout)
    assert len(shares) == (1 if replicator == "none" else 2)
    assert min(map(float, shares)) > 85
