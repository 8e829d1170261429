"""Replicas as users write them, in programs."""

import contextlib
import copy
import itertools
import os
import pickle
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import courier
import launchpad_lite as lp
from launchpad_lite import replicas
from launchpad_lite.replicas._node import ReplicaNode
from launchpad_lite.testing import poll_until

TARGET = np.array([1.0, -2.0, 3.0])


def batches(index: int, step: int) -> Iterator[Any]:
    """Yields inputs and targets: what is at a step depends on the step only."""
    while True:
        inputs = np.random.default_rng([step, index]).normal(size=(8, 3))
        yield inputs, inputs @ TARGET
        step += 1


def fit(repl: replicas.Replicator, steps: int, pause_s: float = 0.0) -> Any:
    """Fits weights; returns them, and the number of results of the last step."""
    weights = np.zeros(3)
    repl.keep(weights=weights)

    def step_fn(batch: Any) -> float:
        inputs, targets = batch
        errors = inputs @ weights - targets
        weights[...] -= 0.1 * repl.all_reduce(inputs.T @ errors / len(errors), "mean")
        time.sleep(pause_s)
        return float((errors**2).mean())

    for losses in repl.run(step_fn, batches, steps=steps):
        assert len(losses) == repl.num_replicas
    return weights.tolist(), repl.step


@pytest.mark.parametrize(
    "repl",
    [
        replicas.NonReplicator(),
        replicas.MultiGpuReplicator(num_gpus=2),
        replicas.MultiWorkerReplicator(num_workers=3),
        replicas.MultiWorkerReplicator(2, num_gpus_per_worker=2),
        replicas.MultiWorkerReplicator(
            2, 2, input_replication=replicas.InputReplication.PER_REPLICA
        ),
    ],
    ids=str,
)
def test_replicas_learn_the_same(repl: replicas.Replicator) -> None:
    results = repl.launch(fit, 60, launcher="test_mt")
    assert len(results) == repl.num_replicas
    weights, steps = results[0]
    np.testing.assert_allclose(weights, TARGET, atol=0.05)
    assert steps == 60
    assert results == [results[0]] * repl.num_replicas


def test_replicas_of_one_worker_with_a_whole_batch_learn_what_one_replica_learns() -> None:
    alone = fit(replicas.NonReplicator(), 50)
    many = replicas.MultiGpuReplicator(num_gpus=4).launch(fit, 50, launcher="test_mt")
    np.testing.assert_allclose(many[0][0], alone[0], rtol=1e-9)


@pytest.mark.parametrize("pipeline", [range, lambda number: iter(range(number)).__next__])
def test_steps_end_for_all_when_one_input_ends(pipeline: Any) -> None:
    def count(repl: replicas.Replicator) -> int:
        return len(list(repl.run(lambda number: number, lambda index: pipeline(3 + 2 * index))))

    repl = replicas.MultiWorkerReplicator(2)
    assert repl.launch(count, launcher="test_mt") == [3, 3]


def test_the_replica_whose_input_ends_before_that_of_others_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def count(repl: replicas.Replicator, *lengths: int) -> None:
        list(repl.run(lambda _: None, lambda index: range(lengths[index])))

    replicas.MultiWorkerReplicator(3).launch(count, 2, 2, 2, launcher="test_mt")
    assert "has ended" not in caplog.text
    replicas.MultiWorkerReplicator(3).launch(count, 2, 3, 2, launcher="test_mt")
    assert "input of replica 0, 2 has ended before that of others, after step 2" in caplog.text


@pytest.mark.parametrize("lengths", [(2, 4, 3), (0, 3, 2), (3, 0, 0)])
def test_replicas_without_input_join_the_steps_of_the_others(lengths: tuple[int, ...]) -> None:
    ops: Any = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min, "product": np.prod}
    values = np.arange(1.0, 13.0).reshape(3, 4)

    def work(repl: replicas.Replicator) -> Any:
        def step_fn(number: float) -> Any:
            kinds = np.float32, np.int64
            return {
                op: [repl.all_reduce(kind(number), op) for kind in kinds]  # type: ignore[arg-type]
                for op in ops
            }

        def input_fn(index: int) -> Any:
            return values[index, : lengths[index]]

        found = [*repl.run(step_fn, input_fn, uneven="join")]
        return found, repl.all_sum(1), repl.report.examples

    outcomes = replicas.MultiWorkerReplicator(3).launch(work, launcher="test_mt")
    assert [examples for _, _, examples in outcomes] == [*lengths]
    for steps, members, _ in outcomes:
        assert members == 3
        assert len(steps) == max(lengths)
        for number, results in enumerate(steps):
            there = [values[rank, number] for rank in range(3) if lengths[rank] > number]
            expected = {op: [function(there)] * 2 for op, function in ops.items()}
            assert results == [pytest.approx(expected)] * len(there)


@pytest.mark.parametrize(
    "repl",
    [
        replicas.MultiWorkerReplicator(1),
        replicas.MultiGpuReplicator(num_gpus=2),
        replicas.MultiWorkerAsyncReplicator(1),
    ],
    ids=str,
)
def test_an_iterable_is_asked_for_the_next_batch_while_a_step_is_made(
    repl: replicas.Replicator,
) -> None:
    def work(repl: replicas.Replicator) -> Any:
        asked = [threading.Event() for _ in range(6)]

        def input_fn(index: int) -> Iterator[Any]:
            for number, event in enumerate(asked):
                event.set()
                time.sleep(0.002)  # it pays
                yield np.full(2, number)

        def step_fn(batch: Any) -> Any:
            number = batch.tolist()[0]
            # The second batch shows that they do not lie in the same memory.
            overlaps = repl.replica_id > 0 or number in (0, 5) or asked[number + 1].wait(5)
            return number, overlaps

        for results in repl.run(step_fn, input_fn, steps=6):
            number, overlaps = zip(*results, strict=True)
            assert all(overlaps)
            if repl.replica_id == 0:
                # One that shares the input may be a step further.
                ahead = 1 + repl.num_replicas
                assert not any(event.is_set() for event in asked[number[0] + ahead :])
        return number

    for numbers in repl.launch(work, launcher="test_mt"):
        assert set(numbers) == {5}


@pytest.mark.parametrize("kind", ["callable", "iterable that fills the same memory"])
def test_what_cannot_overlap_a_step_is_asked_after_it(kind: str) -> None:
    buffer, is_stepping = np.zeros(1), threading.Event()

    def fill(number: int) -> Any:
        assert not is_stepping.is_set()
        buffer[...] = number
        time.sleep(0.002)
        return buffer if kind == "callable" else {"x": buffer[:]}

    numbers = map(fill, range(4))

    def step_fn(batch: Any) -> float:
        is_stepping.set()
        time.sleep(0.02)  # an asker of its own would have come by now
        is_stepping.clear()
        return float(buffer[0])

    pipeline = numbers.__next__ if kind == "callable" else numbers
    assert [*replicas.NonReplicator().run(step_fn, lambda _: pipeline)] == [[0], [1], [2], [3]]


def test_what_the_input_raises_ends_the_run_after_the_steps_before_it() -> None:
    def input_fn(index: int) -> Iterator[int]:
        yield from range(4)
        raise LookupError("batch 4 is lost")

    steps = replicas.NonReplicator().run(lambda number: number, input_fn)
    assert [next(steps) for _ in range(3)] == [[0], [1], [2]]
    with pytest.raises(LookupError, match="batch 4 is lost"):
        next(steps)


def test_waiting_for_input_is_called_so(capsys: pytest.CaptureFixture[str]) -> None:
    def input_fn(index: int) -> Iterator[int]:
        for number in range(4):
            time.sleep(0.1)
            yield number

    repl = replicas.NonReplicator()
    list(repl.run(lambda number: number, input_fn, progress_s=0.15))
    shares = re.findall(r"(\d+)% waiting for input", capsys.readouterr().err)
    assert min(map(int, shares)) > 50
    assert 0.4 <= repl.report.input_s <= repl.report.seconds


@pytest.mark.parametrize(
    "kind", [replicas.MultiWorkerReplicator, replicas.MultiWorkerAsyncReplicator]
)
def test_no_batch_is_fetched_that_no_step_needs(kind: Any) -> None:
    def fetched(repl: replicas.Replicator) -> int:
        source = itertools.count()
        list(repl.run(lambda number: number, lambda index: source, steps=3))
        return next(source)

    assert kind(1).launch(fetched, launcher="test_mt") == [3]


def test_results_of_all_replicas_come_after_each_step() -> None:
    def collect(repl: replicas.Replicator) -> Any:
        return list(repl.run(lambda: {"id": repl.replica_id, "step": repl.step}, steps=2))

    [first, second] = replicas.MultiWorkerReplicator(2).launch(collect, launcher="test_mt")
    assert first == second == [[{"id": i, "step": step} for i in (0, 1)] for step in (0, 1)]


def test_items_are_shared_and_their_results_combined() -> None:
    def work(repl: replicas.Replicator) -> Any:
        done: list[int] = []

        def square(number: int) -> Any:
            done.append(number)
            return {"square": number**2}

        gathered = repl.map_gather(square, range(5))
        return gathered, repl.map_reduce(square, range(5), "max"), done

    for gathered, reduced, done in replicas.MultiWorkerReplicator(2).launch(
        work, launcher="test_mt"
    ):
        assert gathered == [{"square": number**2} for number in range(5)]
        assert reduced == {"square": 16}
        assert done in ([0, 1] * 2, [2, 3, 4] * 2)


def test_replicas_that_call_different_things_are_told_what_and_where() -> None:
    def disagree(repl: replicas.Replicator) -> None:
        if repl.replica_id == 1:
            repl.broadcast(np.zeros(3), label="weights")
        else:
            repl.all_sum({"loss": 1.0})

    with pytest.raises(lp.NodeFailedError) as caught:
        replicas.MultiWorkerReplicator(3).launch(disagree, launcher="test_mt")
    text = str(caught.value)
    assert "replica 1 calls something else than the others" in text
    assert "replica 0: all_reduce(sum): ['loss'] float64[], its call 1, at " in text
    assert "replica 1: broadcast from 0 of weights: float64[3], its call 1, at " in text
    assert "test_replicators.py" in text
    assert "in disagree" in text


def test_the_replica_that_fails_is_the_one_that_is_named() -> None:
    def fail(repl: replicas.Replicator) -> None:
        for _ in repl.run(lambda: 1, steps=5):
            if repl.replica_id == 1 and repl.step == 3:
                raise ValueError("the data of step 3 are bad")
        lp.wait_for_stop()

    with pytest.raises(lp.NodeFailedError, match=r"replica\[1\].*\n?.*the data of step 3"):
        replicas.MultiWorkerReplicator(2).launch(fail, launcher="test_mt")


class FirstEndsBadly(ReplicaNode):
    """When all have ended, one of the replicas fails, and tells nobody of the results."""

    victim = 0

    def run(self) -> None:
        stays, self._stays = self._stays, False
        super().run()
        if self._is_unlucky():
            raise OSError("the disk is full")
        if stays:
            lp.wait_for_stop()

    def replica_results(self) -> Any:
        return Future() if self._is_unlucky() else super().replica_results()

    def _is_unlucky(self) -> bool:
        return self._rank == self.victim and lp.restart_count() == 0


class LastEndsBadly(FirstEndsBadly):
    victim = 2


class FirstUnlucky(replicas.MultiWorkerReplicator):
    _node_type = FirstEndsBadly


class LastUnlucky(replicas.MultiWorkerReplicator):
    _node_type = LastEndsBadly


def two_steps(repl: replicas.Replicator) -> int:
    return len(list(repl.run(lambda: 1, steps=2)))


@pytest.mark.slow
@pytest.mark.parametrize("make", [FirstUnlucky, LastUnlucky])
def test_a_replica_that_is_lost_when_all_have_ended_ends_as_well(make: Any) -> None:
    program = lp.Program("ends")
    make(3).add_to(program, two_steps)
    with lp.launch(program, "test_mp", restart="on_failure") as running:
        assert running.join(20)
        assert running.wait().outcome is lp.Outcome.COMPLETED


@pytest.mark.slow
def test_results_that_the_first_replica_has_lost_come_from_another_one() -> None:
    again = {"restart": "on_failure"}
    results = FirstUnlucky(3).launch(two_steps, launcher="test_mp", launch_options=again)
    assert results == [2] * 3


class Learner:
    """Counts steps, once `has_callers` is set; other nodes may ask for them at any time."""

    has_callers = threading.Event()
    callers = threading.Barrier(12)

    def __init__(self, repl: replicas.Replicator) -> None:
        assert self.has_callers.wait(20)
        self.repl = repl
        self.total = repl.all_sum(np.ones(100_000)).size

    def run(self) -> None:
        for results in self.repl.run(lambda: 1, steps=10):
            self.total += sum(results)
        lp.wait_for_stop()

    def total_so_far(self) -> int:
        return self.total

    async def total_later(self) -> int:
        return self.total

    def total_when_all_call(self) -> int:
        self.callers.wait(20)
        return self.total


class Asker:
    def __init__(self, learner: Any) -> None:
        self.learner = learner

    def run(self) -> None:
        early = [self.learner.futures.total_so_far() for _ in range(20)]
        with pytest.raises(courier.CallTimeoutError):
            courier.with_timeout(self.learner, 0.05).total_later()
        early.append(self.learner.futures.total_later())
        early += [self.learner.futures.total_when_all_call() for _ in range(12)]
        Learner.has_callers.set()
        assert all(call.result(20) >= 100_000 for call in early)
        poll_until(lambda: self.learner.total_so_far() == 100_020, 10)
        lp.stop()


def test_more_callers_than_threads_may_wait_for_the_object_of_a_replica() -> None:
    program = lp.Program("learning")
    learner = replicas.MultiWorkerReplicator(2).add_to(program, Learner, label="learner")
    program.add_node(lp.CourierNode(Asker, learner), label="asker")
    lp.launch(program, "test_mt").wait()


def test_a_program_that_stops_ends_between_two_steps() -> None:
    def forever(repl: replicas.Replicator) -> None:
        for _ in repl.run(lambda: time.sleep(0.01)):
            pass

    program = lp.Program("endless")
    handle = replicas.MultiWorkerReplicator(3).add_to(program, forever)
    with lp.launch(program, "test_mt") as running:
        handle.dereference()
        time.sleep(0.3)
        running.stop()
        assert running.wait().outcome is lp.Outcome.STOPPED


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: replicas.MultiGpuReplicator(3, 2), "3 devices cannot be divided"),
        (lambda: replicas.MultiWorkerReplicator(0), "at least 1 of workers, not 0"),
        (lambda: replicas.MultiWorkerReplicator(1, 2, 3), "2 devices cannot be divided"),
        (lambda: replicas.MultiWorkerReplicator(2, min_workers=3), "min_workers is 1 to 2"),
        (lambda: replicas.MultiWorkerReplicator(2, 2, min_workers=1), "workers of one replica"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(make: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


def test_a_replicator_outside_of_a_replica_says_how_to_use_it() -> None:
    with pytest.raises(replicas.ReplicaError, match=r"repl.launch\(train\)"):
        replicas.MultiWorkerReplicator(2).all_sum(1)


def test_models_that_call_a_replicator_may_be_copied_and_saved() -> None:
    repl = replicas.NonReplicator()
    repl.all_sum(1)
    assert copy.deepcopy({"model": repl})["model"] is repl
    assert pickle.loads(pickle.dumps(repl)).num_replicas == 1


def test_a_device_beyond_those_of_the_replica_is_refused() -> None:
    with pytest.raises(ValueError, match=r"logical_device\(1\): replica 0 has 1 device"):
        replicas.NonReplicator().logical_device(1)


def test_a_result_that_cannot_be_gathered_is_named() -> None:
    repl = replicas.MultiWorkerReplicator(2)
    with pytest.raises(lp.NodeFailedError, match="what step_fn returns cannot be gathered"):
        repl.launch(lambda repl: list(repl.run(threading.Lock, steps=1)), launcher="test_mt")
    with pytest.raises(lp.NodeFailedError, match="what the replicas return cannot be gathered"):
        repl.launch(lambda _: threading.Lock(), launcher="test_mt")


def test_a_result_of_a_class_that_only_its_replica_knows_is_gathered() -> None:
    repl = replicas.MultiWorkerReplicator(2)
    results = repl.launch(lambda _: type("Local", (), {"x": 1})(), launcher="test_mp")
    assert [each.x for each in results] == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victims", "signum"),
    [([0], signal.SIGKILL), ([1], signal.SIGTERM), ([0, 1, 2, 3], signal.SIGKILL)],
    ids=["first", "second is asked", "any"],
)
def test_replicas_that_are_killed_cost_no_step_of_the_training(
    tmp_path: Path, victims: list[int], signum: signal.Signals
) -> None:
    count = max(2, len(victims))
    program = lp.Program("killed")

    def train(repl: replicas.Replicator) -> None:
        result = fit(repl, 300, 0.01)
        (tmp_path / f"done{repl.replica_id}").write_text(repr(result))

    replicas.MultiGpuReplicator(count).add_to(program, train)
    random = Random(1)
    kills, kills_wanted = 0, 3 if len(victims) == 1 else 8
    with lp.launch(
        program,
        "test_mp",
        restart=lp.RestartPolicy("on_failure", max_restarts=1000, backoff_s=0.05, window_s=1.0),
        checkpoints={"replica": lp.Checkpoints(tmp_path / "checkpoints", period_s=0.1)},
    ) as running:
        while not running.join(random.uniform(0.2, 1.0)):
            pids = {node.name: node.pid for node in running.status() if node.pid}
            pid = pids.get(f"replica[{random.choice(victims)}]")
            has_begun = any((tmp_path / "checkpoints").glob("replica/*/0*/state"))
            if pid and kills < kills_wanted and has_begun:
                with contextlib.suppress(ProcessLookupError):  # it has ended since the look
                    os.kill(pid, signum)
                    kills += 1
    assert kills >= kills_wanted // 2  # the training may have ended before
    expected = replicas.MultiGpuReplicator(count).launch(fit, 300, launcher="test_mt")
    for index in range(count):
        assert eval((tmp_path / f"done{index}").read_text()) == expected[index]


@pytest.mark.slow
def test_fewer_replicas_go_on_while_a_lost_one_is_away(tmp_path: Path) -> None:
    def count(repl: replicas.Replicator) -> None:
        repl.keep(steps=[])
        for results in repl.run(lambda: time.sleep(0.01)):
            if repl.replica_id == 0:
                with (tmp_path / "sizes").open("a") as sizes:
                    sizes.write(f"{len(results)}")

    def sizes() -> str:
        return (tmp_path / "sizes").read_text() if (tmp_path / "sizes").exists() else ""

    repl = replicas.MultiWorkerReplicator(3, min_workers=2, patience_s=0.1)
    program = lp.Program("elastic")
    repl.add_to(program, count)
    again = lp.RestartPolicy("on_failure", backoff_s=2.0)
    with lp.launch(program, "test_mp", restart=again) as running:
        poll_until(lambda: "3" in sizes(), 20)
        [pid] = [node.pid for node in running.status() if node.name == "replica[1]"]
        os.kill(pid or 0, signal.SIGKILL)
        poll_until(lambda: sizes().endswith("2"), 20)
        poll_until(lambda: sizes().endswith("3"), 20)
    assert {*sizes()} == {"2", "3"}
