import collections
import re
from pathlib import Path

import numpy as np
import pytest

from examples.datasets.program import blobs, count_words, k_means
from launchpad_lite import engines
from tests.examples.running import run_example


def test_words_are_counted_and_ranked(tmp_path: Path) -> None:
    text = "The cat and the hat.\nA hat, the cat!\n" * 3
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_text(text)
    expected = collections.Counter(re.findall(r"[a-z]{2,}", 2 * text.lower()))
    with engines.MapReduce(2, launcher="local_mt") as mr:
        found = count_words(mr, str(tmp_path / "*.txt"))
    assert dict(found) == expected
    assert [count for _, count in found] == sorted(expected.values(), reverse=True)


def test_k_means_is_the_algorithm_of_lloyd() -> None:
    points, _ = blobs(3, 500, 2, seed=1)
    with engines.MapReduce(2, launcher="local_mt") as mr:
        centres, inertia = k_means(mr, points, 3, 4)
    plain = points[np.random.default_rng(0).choice(len(points), size=3, replace=False)]
    for expected in inertia:
        distances = ((points[:, None] - plain) ** 2).sum(axis=2)
        assert expected == pytest.approx(distances.min(axis=1).sum())
        nearest = distances.argmin(axis=1)
        plain = np.array([points[nearest == cluster].mean(axis=0) for cluster in range(3)])
    assert centres == pytest.approx(plain)


@pytest.mark.slow
def test_the_example_runs_as_processes() -> None:
    done = run_example("datasets", "--points=2000")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^ +[\d,]+  self$", done.stdout, re.MULTILINE)
    assert "2,000 points in 8 clusters" in done.stdout
