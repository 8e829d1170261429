"""Tasks that use devices: no two use the same, unless they ask for parts of it. In processes."""

import os
import time
from pathlib import Path

import pytest

from launchpad_lite import search
from launchpad_lite.errors import NodeFailedError
from launchpad_lite.launching import VISIBLE_DEVICES
from launchpad_lite.parts.joining import JOIN_FILE
from launchpad_lite.search import _process
from launchpad_lite.search.executor import Executor
from launchpad_lite.search.tasks import Call, submission_of
from tests.courier.waiting import wait_until
from tests.launchpad_lite.search.searches import output_of, searching, start_worker
from tests.launchpad_lite.search.tasks_for_tests import Tasks


@search.needs(gpus=1)
def seen(folder: Path) -> "str | None":
    """Waits until another one runs as well; returns the devices that it sees."""
    (folder / f"task-{os.getpid()}").touch()
    while len(list(folder.glob("task-*"))) < 2:
        time.sleep(0.01)
    return os.environ.get(VISIBLE_DEVICES)


@search.needs(gpus=2)
def seen_by_both() -> "str | None":
    return os.environ.get(VISIBLE_DEVICES)


@pytest.mark.slow
def test_tasks_see_a_device_each_and_then_one_sees_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the last one, a worker starts again, which then sees other devices."""
    monkeypatch.setenv(VISIBLE_DEVICES, "4,GPU-x")
    with Executor(workers=2, launcher="test_mp") as executor:
        assert set(executor.map(seen, [tmp_path] * 2)) == {"4", "GPU-x"}
        assert executor.submit(seen_by_both).result() == "4,GPU-x"


@pytest.mark.slow
def test_workers_from_outside_share_the_devices_of_their_machine(tmp_path: Path) -> None:
    model = Tasks(Call(seen, tmp_path), Call(seen, tmp_path))
    path = tmp_path / JOIN_FILE
    with searching(model, tmp_path) as running:
        workers = [start_worker(path, CUDA_VISIBLE_DEVICES="3,5") for _ in range(2)]
        try:
            assert "error" not in "".join(map(output_of, workers))
            assert sorted(running.model().results) == ["3", "5"]
        finally:
            for each in workers:
                each.kill()


def test_workers_that_are_threads_run_no_tasks_with_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launchpad_lite.search._process.visible_devices", lambda: (("0",), ""))
    monkeypatch.setattr("launchpad_lite.search._process._machine", _process._machine.__wrapped__)
    with searching(Tasks(Call(seen, tmp_path)), tmp_path, workers=1) as running:
        wait_until(lambda: running.status().is_over)
        (trial,) = running.trials()
        assert "need a launcher that starts processes" in trial.error


def test_what_a_function_needs_comes_with_its_task() -> None:
    @search.needs(cpus=2, gpus=0.5, memory_bytes=7)
    def train(params: object) -> float:
        return 0.0

    for task in (train, Call(train, None), search.RandomSearch(train, lambda _: None, 1).ask()):
        assert submission_of(task, "1").limits.needs == (2.0, 0.5, 7)
    with pytest.raises(TypeError, match=r"takes retries, .*memory_bytes, not gpu"):
        search.needs(gpu=1)
    for wrong in ({"gpus": 1.5}, {"cpus": -1}, {"gpus": float("nan")}):
        with pytest.raises(ValueError, match="gpus a whole number, or a part of one below 1"):
            submission_of(search.needs(**wrong)(lambda: None), "1")


def test_with_several_brokers_nobody_counts_what_a_machine_has() -> None:
    model = Tasks(Call(seen, Path()))
    with pytest.raises(NodeFailedError, match="need a search with brokers=1"):
        search.run(model, workers=1, brokers=2, launcher="local_mt", progress=False)
