"""Searches as an executor."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

import launchpad_lite as lp
from launchers.host.sweep import children_of
from launchpad_lite import search
from launchpad_lite.process.agent_process import agent_ahead
from tests.courier.waiting import wait_until
from tests.launchpad_lite.conftest import Run
from tests.launchpad_lite.search.tasks_for_tests import QUICK, climb, fail, square


@pytest.fixture(scope="module")
def executor():
    # Leases that outlast a pause of the machine: no task here runs twice.
    timing = dataclasses.replace(QUICK, lease_s=30.0, silence_s=30.0)
    with search.Executor(workers=2, launcher="local_mt", timing=timing) as executor:
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

    with pytest.raises(error, match="over") as raised:
        executor.submit(end).result(30)
    # Its file, though the function travelled by value.
    assert f'File "{__file__}"' in str(raised.value.__cause__)


class EndsItsReader:
    def __reduce__(self):
        return sys.exit, ("over",)


def test_a_result_that_ends_who_unpickles_it_fails_its_future_alone(executor):
    with pytest.raises(SystemExit, match="over"):
        executor.submit(EndsItsReader).result(10)
    assert executor.submit(square, 3).result(10) == 9


def wait_for(file: Path) -> str:
    wait_until(file.exists, 20)
    return file.name


@contextlib.contextmanager
def busy(executor, file: Path):
    """Has both workers run functions until the end of the block, or longer."""

    def begin_and_wait(me):
        file.with_name(f"{me} has begun").touch()
        return wait_for(file)

    futures = [executor.submit(begin_and_wait, me) for me in range(2)]
    # One worker may have fetched both: then the second begins once it is given back.
    wait_until(lambda: len([*file.parent.glob("* has begun")]) == 2)
    wait_until(lambda: all(future.running() for future in futures))
    try:
        yield futures
    finally:
        file.touch()


def test_what_runs_cannot_be_cancelled_and_what_waits_can(executor, tmp_path: Path):
    with busy(executor, tmp_path / "file") as running:
        waiting = [executor.submit(square, x) for x in range(4)]
        assert not any(future.running() or future.done() for future in waiting)
        assert all(future.cancel() for future in waiting)
        done, _ = concurrent.futures.wait(waiting, timeout=5)
        assert done == set(waiting)
        assert not any(future.cancel() for future in running)
    assert [future.result(10) for future in running] == ["file"] * 2
    assert executor.submit(square, 3).result(10) == 9


def test_what_runs_may_be_ended(executor):
    future = executor.submit(climb, 0)
    wait_until(future.running)
    assert future.cancel(kill=True)  # in a thread: at its next report
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(10)
    assert executor.submit(square, 3).result(10) == 9


def test_a_shutdown_may_give_up_what_has_not_begun(tmp_path: Path):
    executor = search.Executor(workers=2, launcher="local_mt", timing=QUICK)
    with busy(executor, tmp_path / "file") as running:
        waiting = [executor.submit(square, x) for x in range(4)]
        executor.shutdown(wait=False, cancel_futures=True)
        assert all(future.cancelled() for future in waiting)
    assert [future.result(10) for future in running] == ["file"] * 2
    executor.shutdown()


def test_map_draws_items_as_results_are_taken(executor):
    drawn = []

    def items():
        for x in itertools.count():
            drawn.append(x)
            yield x

    results = executor.map(square, items(), chunksize=3, buffersize=2)
    assert len(drawn) == 6
    assert list(itertools.islice(results, 4)) == [0, 1, 4, 9]
    assert len(drawn) == 12
    results.close()
    with pytest.raises(ValueError, match="at least 1"):
        executor.map(square, [1], chunksize=0)


def test_map_sends_so_many_calls_as_one_task(executor):
    runs = []  # of this function as a worker keeps it

    def count(x):
        runs.append(x)
        return len(runs)

    with pytest.raises(ZeroDivisionError):
        list(executor.map(lambda x: 1 / x, [1, 0], chunksize=2))
    assert list(executor.map(count, range(6), chunksize=6)) == [1, 2, 3, 4, 5, 6]


def test_map_returns_results_as_they_are_completed_within_a_time(executor, tmp_path: Path):
    files = [tmp_path / name for name in ("first", "second")]
    results = executor.map(wait_for, files, ordered=False, timeout=30)
    files[1].touch()
    assert next(results) == "second"
    for ordered in (True, False):
        with pytest.raises(concurrent.futures.TimeoutError):
            next(executor.map(wait_for, files[:1], ordered=ordered, timeout=0.05))
    files[0].touch()
    assert list(results) == ["first"]


def test_a_worker_keeps_globals_between_calls_of_a_function(executor):
    def make(start):
        loaded = [start]

        def count():
            loaded[0] += 1
            return loaded[0]

        return count

    one, other = make(0), make(10)
    assert [executor.submit(each).result(10) for each in (one, one, other, one)] == [1, 2, 11, 3]


started: list[str] = []


def start(text: str) -> None:
    started.append(text)
    if text == "bad":
        raise ValueError(text)


def test_an_initializer_is_called_once_by_each_worker():
    with search.Executor(
        workers=1, launcher="local_mt", timing=QUICK, initializer=start, initargs=("good",)
    ) as executor:
        assert list(executor.map(square, range(3))) == [0, 1, 4]
    assert started == ["good"]


def test_an_initializer_that_raises_ends_the_executor():
    with search.Executor(
        workers=1, launcher="local_mt", timing=QUICK, initializer=start, initargs=("bad",)
    ) as executor:
        for future in [executor.submit(square, x) for x in range(3)]:
            with pytest.raises(concurrent.futures.BrokenExecutor, match="ValueError"):
                future.result(10)
        with pytest.raises(concurrent.futures.BrokenExecutor, match="ValueError"):
            executor.submit(square, 3)


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


def test_the_agent_that_was_started_ahead_of_a_launch_runs_its_nodes():
    program = lp.Program("ahead")
    program.add_node(lp.PyNode(int), label="node")
    before = {*children_of(os.getpid())}
    with agent_ahead("test_mp"):
        (ahead,) = {*children_of(os.getpid())} - before
        running = lp.launch(program, "test_mp")
        assert {*children_of(os.getpid())} - before == {ahead}
    assert running.wait().outcome is lp.Outcome.COMPLETED
    assert not {*children_of(os.getpid())} - before


def test_an_executor_that_cannot_be_made_leaves_no_process():
    before = {*children_of(os.getpid())}
    with pytest.raises(ValueError, match="at least 1 broker"):
        search.Executor(workers=1, brokers=0, launcher="test_mp")
    assert not {*children_of(os.getpid())} - before


@pytest.mark.slow
def test_a_call_that_is_killed_ends_its_worker_and_another_one_comes():
    with search.Executor(workers=1, launcher="test_mp", timing=QUICK) as executor:
        pid = executor.submit(os.getpid).result(10)
        future = executor.submit(time.sleep, 60)
        wait_until(future.running)
        assert future.cancel(kill=True)
        with pytest.raises(concurrent.futures.CancelledError):
            future.result(10)
        assert executor.submit(os.getpid).result(10) != pid
        assert not psutil.pid_exists(pid)


@pytest.mark.slow
@pytest.mark.parametrize("code", [0, 1])
def test_a_script_without_shutdown_finishes_its_work_and_ends(run_script: Run, code: int):
    ended = run_script(
        "import sys, time\n"
        "from launchpad_lite import search\n"
        "def work(x):\n"
        "    time.sleep(0.2)\n"
        "    print('did', x)\n"
        "if __name__ == '__main__':\n"
        "    executor = search.Executor(workers=1)\n"
        "    futures = [executor.submit(work, x) for x in range(3)]\n"
        "    1 / (1 - int(sys.argv[1]))\n",
        str(code),
    )
    assert ended.returncode == code
    assert [line[-1] for line in ended.stdout.splitlines() if "did" in line] == ["0", "1", "2"]
    assert ("ZeroDivisionError" in ended.stderr) == bool(code)
