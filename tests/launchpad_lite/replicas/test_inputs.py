"""Input pipelines of replicas."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

import courier
from launchpad_lite import replicas
from launchpad_lite.replicas import ReplicaLostError
from launchpad_lite.replicas._carrier import Carrier
from launchpad_lite.replicas._collectives import Collectives
from launchpad_lite.replicas._inputs import Pipeline, SharedPipeline, opened, split_leading


def test_a_batch_is_divided_along_the_first_dimension() -> None:
    batch = {"x": np.arange(8).reshape(4, 2), "y": [np.arange(4)]}
    first, second = split_leading(batch, 2)
    np.testing.assert_array_equal(first["x"], [[0, 1], [2, 3]])
    np.testing.assert_array_equal(second["y"][0], [2, 3])


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": np.zeros((5, 2))}, r"\['x'\] of the batch has 5 examples"),
        ([np.zeros(2), 3.0], "no first dimension.*input_split_fn"),
    ],
)
def test_a_batch_that_cannot_be_divided_is_named(batch: Any, message: str) -> None:
    with pytest.raises(replicas.InputSplitError, match=message):
        split_leading(batch, 2)


def test_each_replica_of_a_worker_gets_its_part_of_each_batch_until_the_end() -> None:
    batches = iter([np.arange(4), np.arange(4) + 10])
    pipeline = SharedPipeline(Pipeline(lambda: next(batches)), 2, split_leading)
    np.testing.assert_array_equal(pipeline.take(0, 1).value, [2, 3])
    np.testing.assert_array_equal(pipeline.take(1, 1).value, [12, 13])
    np.testing.assert_array_equal(pipeline.take(0, 0).value, [0, 1])
    assert not pipeline.take(2, 1).is_there
    assert not pipeline.take(2, 0).is_there


def test_a_split_function_that_returns_too_few_parts_is_an_error() -> None:
    pipeline = SharedPipeline(Pipeline(lambda: 1), 3, lambda batch, parts: [batch])
    with pytest.raises(replicas.InputSplitError, match="1 parts for 3 replicas"):
        pipeline.take(0, 0)


def test_a_pipeline_goes_on_where_the_training_was() -> None:
    pipeline = opened(lambda index: range(10), 0, step=4)
    assert pipeline.take().value == 4


def test_a_pipeline_that_takes_the_step_begins_there_by_itself() -> None:
    def numbers(index: int, step: int) -> Iterator[int]:
        return iter(range(100 * index + step, 1000))

    pipeline = opened(numbers, 2, step=4)
    assert pipeline.take().value == 204


def test_a_callable_is_asked_for_each_batch() -> None:
    assert opened(lambda index: lambda: index, 3, step=4).take().value == 3


def test_what_is_no_pipeline_is_refused() -> None:
    with pytest.raises(TypeError, match="input_fn returned int: it returns an iterable"):
        opened(lambda index: 5, 0, step=0)


def test_a_replica_that_waits_for_the_input_of_a_lost_one_learns_of_the_loss() -> None:
    collectives, answer = Collectives(Carrier()), Future[Any]()
    answer.set_exception(courier.ServerLostError("no answer came"))
    timer = threading.Timer(0.05, collectives.abort, [ReplicaLostError("replica[0] was lost")])
    timer.start()
    with pytest.raises(ReplicaLostError, match="was lost"):
        collectives.result_of(answer)
    timer.join()


def test_a_replica_that_waits_for_input_reads_the_answer_itself() -> None:
    class Call(Future[str]):
        def result(self, timeout: float | None = None) -> str:
            if not self.done():
                self.set_result("batch")
            return super().result(timeout)

    assert Collectives(Carrier()).result_of(Call()) == "batch"


def test_an_abort_ends_the_wait_for_input() -> None:
    collectives, calls = Collectives(Carrier()), [Future[Any](), Future[Any]()]
    timer = threading.Timer(0.05, collectives.abort, [ReplicaLostError("replica[0] was lost")])
    timer.start()
    for call in calls:
        with pytest.raises(ReplicaLostError, match="was lost"):
            collectives.result_of(call)
        assert call.cancelled()
    timer.join()
