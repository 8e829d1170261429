"""Searches as an executor."""

import asyncio
import concurrent.futures
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import courier
import launchpad_lite as lp
from launchpad_lite import search
from tests.courier.waiting import wait_until
from tests.launchpad_lite.search.tasks_for_tests import QUICK, climb, fail, square


@pytest.fixture(scope="module")
def executor():
    with search.Executor(workers=2, launcher="local_mt", timing=QUICK) as executor:
        yield executor


def test_results_come_in_order_and_as_they_are_completed(executor):
    assert list(executor.map(square, range(100))) == [x * x for x in range(100)]
    futures = [executor.submit(square, x) for x in range(10)]
    assert {future.result() for future in concurrent.futures.as_completed(futures)} == {
        x * x for x in range(10)
    }


def test_an_exception_arrives_as_itself(executor):
    with pytest.raises(KeyError, match="gone") as raised:
        executor.submit(fail, "gone").result()
    assert "executor_worker[" in str(raised.value.__cause__)


@pytest.mark.parametrize("error", [KeyboardInterrupt, GeneratorExit, asyncio.CancelledError])
def test_a_function_that_raises_what_ends_a_thread_fails_and_its_worker_lives(executor, error):
    def end():
        raise error("over")

    with pytest.raises(courier.RemoteError, match=rf"{error.__name__}: over") as raised:
        executor.submit(end).result(30)
    # Its file, though the function travelled by value.
    assert f'File "{__file__}"' in str(raised.value.__cause__)


def test_a_future_can_be_cancelled_and_others_go_on(executor):
    waiting = [executor.submit(climb, 0) for _ in range(4)]
    assert all(future.cancel() for future in waiting)
    assert executor.submit(square, 3).result(10) == 9


def test_who_waits_for_futures_hears_that_they_are_cancelled(executor):
    waiting = [executor.submit(climb, 0) for _ in range(4)]
    for future in waiting:
        future.cancel()
    done, _ = concurrent.futures.wait(waiting, timeout=5)
    assert done == set(waiting)


def test_a_shutdown_may_give_up_what_has_no_result():
    executor = search.Executor(workers=1, launcher="local_mt", timing=QUICK)
    waiting = [executor.submit(climb, 0) for _ in range(4)]
    executor.shutdown(cancel_futures=True)
    assert all(future.cancelled() for future in waiting)


def test_what_cannot_be_pickled_is_said_at_once(executor):
    with pytest.raises(search.TaskPickleError, match="cannot be pickled"):
        executor.submit(square, threading.Lock())


def test_nothing_is_taken_after_the_shutdown():
    executor = search.Executor(workers=1, launcher="local_mt", timing=QUICK)
    future = executor.submit(square, 2)
    executor.shutdown()
    assert future.result(0) == 4
    with pytest.raises(RuntimeError, match="shut down"):
        executor.submit(square, 2)


def test_an_executor_in_a_node_uses_workers_of_its_program():
    results = []

    def study(executor):
        with executor:
            results.extend(executor.map(square, range(5)))

    program = lp.Program("study")
    executor = search.Executor.add_to(program, workers=2, timing=QUICK)
    program.add_node(lp.PyNode(study, executor), label="study")
    assert lp.launch(program, "local_mt").wait(30).outcome is lp.Outcome.COMPLETED
    assert results == [0, 1, 4, 9, 16]


@pytest.mark.slow
def test_who_waits_for_a_future_hears_of_an_interrupt(tmp_path: Path):
    script = tmp_path / "wait.py"
    script.write_text(
        "import time\n"
        "from launchpad_lite import search\n"
        "if __name__ == '__main__':\n"
        "    with search.Executor(workers=1, notice_s=1) as executor:\n"
        "        executor.submit(abs, 1).result()\n"
        "        waiting = executor.submit(time.sleep, 60)\n"
        "        print('ready', flush=True)\n"
        "        waiting.result()\n"
    )
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode != 0
    assert "executor: interrupted" in errors


@pytest.mark.slow
def test_workers_without_a_task_stay_when_their_broker_is_asked_to_end():
    with search.Executor(workers=2, launcher="test_mp", timing=QUICK) as executor:
        assert executor.submit(square, 2).result(10) == 4
        running = executor._end.__self__
        nodes = {node.name: node for node in running.status()}
        os.kill(nodes["executor_broker[0]"].pid, signal.SIGTERM)
        assert executor.submit(square, 3).result(10) == 9
        assert [node.name for node in running.status() if node.state == "ended"] == []


def wait_at_first(folder: Path) -> str:
    if not (folder / "begun").exists():
        (folder / "begun").touch()
        time.sleep(60)
    return "done"


@pytest.mark.slow
def test_a_task_whose_worker_is_asked_to_end_runs_elsewhere_and_has_lost_no_worker(tmp_path: Path):
    with search.Executor(
        workers=2, launcher="test_mp", timing=QUICK, max_losses=0, notice_s=0.5
    ) as executor:
        future = executor.submit(wait_at_first, tmp_path)
        wait_until((tmp_path / "begun").exists)
        for node in executor._end.__self__.status():
            if "worker" in node.name:
                os.kill(node.pid, signal.SIGTERM)
        assert future.result(20) == "done"
