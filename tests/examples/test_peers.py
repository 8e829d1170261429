import re

import numpy as np
import pytest

import launchpad_lite as lp
from examples.peers.program import FEATURES, ColumnSgd, solution
from launchpad_lite import engines
from tests.examples.running import run_example


class _Learner(ColumnSgd):
    """Writes the found matrix down when the last step is over."""

    found: dict[int, np.ndarray] = {}

    def finish(self) -> None:
        columns = [self.get(column) for column in range(10)]
        if sum(column.version for column in columns) == 3 * 60:
            self.found.update(enumerate(column.value for column in columns))


def test_the_peers_find_the_matrix() -> None:
    _Learner.found.clear()
    program = lp.Program("peers")
    _Learner(60, engines.PSP(1), 0.0).add_to(program, peers=3)
    lp.launch(program, "local_mt").wait()
    found = np.stack([_Learner.found[column] for column in range(10)], axis=1)
    assert found.shape == (FEATURES, 10)
    assert np.sqrt(np.mean((found - solution()) ** 2)) < 0.5 * np.sqrt(np.mean(solution() ** 2))


@pytest.mark.slow
def test_the_example_runs_as_processes() -> None:
    done = run_example("peers", "--peers=20", "--steps=40")
    assert done.returncode == 0, done.stderr
    assert re.search(r"800 steps of 20 peers, error 0\.0\d+$", done.stdout, re.MULTILINE)
