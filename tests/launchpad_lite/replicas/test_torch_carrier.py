"""Process groups of PyTorch carry arrays between replicas, in threads and in processes."""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import courier
from launchpad_lite.replicas._call import Call
from launchpad_lite.replicas._torch_carrier import KeyValues, TorchCarrier
from launchpad_lite.replicas.errors import CollectiveMismatchError, ReplicaLostError
from tests.engines import needs_torch
from tests.launchpad_lite.replicas.torch_replicas import run_carriers

pytestmark = needs_torch

CALL = Call(0, "a call")


def reduced(array: Any, op: Any) -> Callable[[TorchCarrier], Any]:
    def run(carrier: TorchCarrier) -> Any:
        mine = array + np.asarray(carrier.rank).astype(array.dtype)
        carrier.all_reduce(mine, op, CALL)
        return mine

    return run


@pytest.mark.parametrize("dtype", ["f4", "f8", "f2", "i4", "i8", "i2", "u1", "u2", "u8", "c8"])
@pytest.mark.parametrize("size", [2, 3])
def test_sums_of_all_types(dtype: str, size: int) -> None:
    array = np.arange(7).astype(dtype)
    for result in run_carriers(size, reduced(array, "sum")):
        assert result.dtype == array.dtype
        assert result.tolist() == (array * size + sum(range(size))).tolist()


@pytest.mark.parametrize(
    ("op", "expected"), [("mean", 3.0), ("max", 4.0), ("min", 2.0), ("product", 24.0)]
)
@pytest.mark.parametrize("dtype", ["f4", "c8"])
def test_other_ways_to_combine(op: str, expected: float, dtype: str) -> None:
    if dtype == "c8" and op in ("max", "min"):
        return
    for result in run_carriers(3, reduced(np.full(5, 2, dtype), op)):
        assert result.tolist() == [expected] * 5


def test_tensors_and_empty_arrays() -> None:
    import torch

    def run(carrier: TorchCarrier) -> Any:
        tensor = torch.full((4,), float(carrier.rank), dtype=torch.bfloat16)
        carrier.all_reduce(tensor, "mean", CALL)
        empty = np.zeros(0, np.float32)
        carrier.all_reduce(empty, "sum", CALL)
        carrier.broadcast(empty, 0, CALL)
        return tensor.tolist()

    assert run_carriers(3, run) == [[1.0] * 4] * 3


@pytest.mark.parametrize("source", [0, 2])
def test_broadcast_from_any_replica(source: int) -> None:
    def run(carrier: TorchCarrier) -> Any:
        array = np.full(3, carrier.rank, np.uint16)
        carrier.broadcast(array, source, CALL)
        return array.tolist()

    assert run_carriers(3, run) == [[source] * 3] * 3


def test_gathers_values_that_differ_in_size_and_structure() -> None:
    def value(rank: int) -> Any:
        large = [np.full(100_000, float(each)) for each in range(rank)]
        return {"rank": rank, "small": np.arange(rank), "large": large}

    for found in run_carriers(3, lambda carrier: carrier.all_gather(value(carrier.rank), CALL)):
        for rank, each in enumerate(found):
            np.testing.assert_equal(each, value(rank))


def test_a_large_array_that_cannot_be_written_is_gathered() -> None:
    def run(carrier: TorchCarrier) -> Any:
        array = np.arange(100_000)
        array.flags.writeable = False
        return sum(each.sum() for each in carrier.all_gather(array, CALL))

    assert run_carriers(2, run) == [2 * sum(range(100_000))] * 2


def test_different_calls_raise_in_all_replicas_and_name_them() -> None:
    def run(carrier: TorchCarrier) -> Any:
        what = "loss: float32[2]" if carrier.rank != 1 else "accuracy: float32[3]"
        array = np.zeros(2 + (carrier.rank == 1), np.float32)
        with pytest.raises(CollectiveMismatchError, match="replica 1 calls something") as caught:
            carrier.all_reduce(array, "sum", Call(4, f"all_reduce(sum) of {what}", "train.py:3"))
        return str(caught.value)

    texts = run_carriers(3, run)
    assert len(set(texts)) == 1
    assert (
        "replica 1: all_reduce(sum) of accuracy: float32[3], its call 4, at train.py:3" in texts[0]
    )


@pytest.mark.parametrize("absent", [0, 2])
def test_abort_ends_calls_in_flight(absent: int) -> None:
    others_wait = threading.Barrier(3)

    def run(carrier: TorchCarrier) -> Any:
        carrier.all_gather(None, CALL)
        others_wait.wait(10)
        lost = ReplicaLostError("gone")
        if carrier.rank == absent:
            others_wait.wait(10)
            carrier.abort(lost)
            return None
        timer = threading.Timer(0.1, carrier.abort, [lost])
        timer.start()
        with pytest.raises(ReplicaLostError):  # the first to abort closes the connections of all
            carrier.all_gather(None, CALL)
        timer.join()
        with pytest.raises(ReplicaLostError, match="gone"):
            carrier.all_reduce(np.zeros(3), "sum", CALL)
        others_wait.wait(10)
        return None

    run_carriers(3, run)


def test_who_closes_first_waits_until_the_others_have_ended_their_calls() -> None:
    def run(carrier: TorchCarrier) -> Any:
        carrier.all_gather(None, CALL)
        begun_at = time.monotonic()
        if carrier.rank == 1:
            time.sleep(0.5)  # is busy
        carrier.close()
        return time.monotonic() - begun_at

    assert all(seconds > 0.4 for seconds in run_carriers(2, run))


def test_abort_ends_the_wait_for_a_replica_that_does_not_come() -> None:
    with courier.Server(KeyValues()) as server:
        client = courier.Client(server.address)
        carrier = TorchCarrier(client, 0, 2, host="127.0.0.1")
        timer = threading.Timer(0.1, carrier.abort, [ReplicaLostError("gone")])
        timer.start()
        with pytest.raises(ReplicaLostError, match="gone"):
            carrier.connect()
        timer.join()
        carrier.close()
        courier.close(client)


def _sum_in_process(address: str, rank: int, size: int, results: Any) -> None:
    carrier = TorchCarrier(courier.Client(address), rank, size, host="127.0.0.1")
    carrier.connect()
    array = np.full(1000, float(rank))
    carrier.all_reduce(array, "sum", CALL)
    results.put(array[-1])
    if rank == size - 1:
        results.close()
        results.join_thread()
        os._exit(0)  # is gone
    try:
        carrier.all_reduce(array, "sum", CALL)
    except ReplicaLostError as error:
        results.put(str(error))


@pytest.mark.slow
def test_processes_and_one_that_is_gone() -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with courier.Server(KeyValues()) as server:
        processes = [
            context.Process(target=_sum_in_process, args=(server.address, rank, 2, results))
            for rank in range(2)
        ]
        for process in processes:
            process.start()
        assert [results.get(timeout=60) for _ in range(2)] == [1.0, 1.0]
        assert "connection to another replica failed" in results.get(timeout=60)
        for process in processes:
            process.join(60)
            assert process.exitcode == 0


def test_keys_and_values() -> None:
    with courier.Server(KeyValues()) as server:
        client = courier.Client(server.address)
        assert client.get("a", 0.01) is None
        waiting = client.futures.get("a", 10.0)
        client.set("a", b"1")
        assert waiting.result(10) == b"1"
        assert [client.add("n", 2), client.add("n", 3)] == [2, 5]
        assert client.compare_set("b", b"", b"x") == b"x"
        assert client.compare_set("b", b"y", b"z") == b"x"
        assert client.check(["a", "b"])
        assert not client.check(["a", "c"])
        assert client.delete("a")
        assert not client.delete("a")
        courier.close(client)
