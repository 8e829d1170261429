import json
from pathlib import Path
from typing import Any

import pytest

from examples.barriers.figures import bounds, progress, sample_sizes
from tests.examples.running import run_example


def test_larger_samples_bound_the_lag_more_tightly_where_workers_are_close() -> None:
    data = bounds()
    for kind in ("mean", "variance"):
        last = [values[-1] for values in data[kind].values()]
        assert last == sorted(last, reverse=True)


def _mean(steps: list[int]) -> float:
    return sum(steps) / len(steps)


def test_sampling_is_faster_than_asking_all_and_nearly_as_tight() -> None:
    steps: dict[str, list[int]] = progress(workers=60, seconds=60.0)["steps"]
    for strict, sampled in (("BSP", "pBSP(10)"), ("SSP(4)", "pSSP(10, 4)")):
        assert _mean(steps[strict]) < _mean(steps[sampled]) < _mean(steps["ASP"])
        assert steps[sampled][-1] - steps[sampled][0] < (steps["ASP"][-1] - steps["ASP"][0]) / 2


def test_larger_samples_are_slower() -> None:
    steps: dict[str, list[int]] = sample_sizes(workers=60, seconds=60.0)["steps"]
    means = [_mean(each) for each in steps.values()]
    assert means == sorted(means, reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize("figure", [4, 5, 6])
def test_a_figure_is_written_with_its_data(figure: int, tmp_path: Path) -> None:
    done = run_example("barriers", f"--figure={figure}", f"--output={tmp_path}", "--format=svg")
    assert done.returncode == 0, done.stderr
    data: dict[str, Any] = json.loads((tmp_path / f"figure-{figure}.json").read_text())
    assert data["assumptions"] in done.stdout
    assert (tmp_path / f"figure-{figure}.svg").read_text().count("<path") > 10


@pytest.mark.slow
def test_a_network_is_trained_under_each_barrier(tmp_path: Path) -> None:
    how = ["--seconds=4", "--mean-delay=0.05", "--launcher=local_mt"]
    done = run_example("barriers", "--figure=7", f"--output={tmp_path}", "--format=svg", *how)
    assert done.returncode == 0, done.stderr
    barriers = json.loads((tmp_path / "figure-7.json").read_text())["barriers"]
    assert list(barriers) == ["BSP", "SSP(4)", "ASP", "pBSP(2)", "pSSP(2, 4)"]
    for seen in barriers.values():
        assert seen["updates"][-1] > 20
        assert max(seen["accuracy"]) > seen["accuracy"][0] + 0.2
    assert (tmp_path / "figure-7.svg").read_text().count("<path") > 10
