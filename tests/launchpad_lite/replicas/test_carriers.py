"""Carriers: what all of them promise, and what is special about the one over courier."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from courier.lowlevel import ByteStream
from launchpad_lite import replicas
from launchpad_lite.replicas._carrier import Carrier, CollectiveCall
from launchpad_lite.replicas._mailbox import Box, Mailbox
from launchpad_lite.replicas._operations import ArrayOperation
from launchpad_lite.replicas.errors import CollectiveMismatchError, ReplicaLostError
from tests.launchpad_lite.replicas.carriers import (
    Makers,
    apart,
    call_all,
    courier_carriers,
    one_machine,
    processes,
    run,
    shared_memories,
    two_machines,
)
from tests.launchpad_lite.replicas.together import in_memory, together

CARRIERS = {
    "one_machine": courier_carriers(one_machine),
    "apart": courier_carriers(apart),
    "two_machines": courier_carriers(two_machines),
    "threads": lambda size: contextlib.nullcontext(in_memory(size)),
    "threads of processes": lambda size: contextlib.nullcontext(
        in_memory(size, size if size % 2 else size // 2)
    ),
}
DEFINITIONS: dict[str, Any] = {
    "sum": lambda arrays: np.sum(arrays, axis=0),
    "mean": lambda arrays: np.mean(arrays, axis=0),
    "max": lambda arrays: np.max(arrays, axis=0),
    "min": lambda arrays: np.min(arrays, axis=0),
    "product": lambda arrays: np.prod(arrays, axis=0),
}
DTYPES = {
    "float16": DEFINITIONS.keys(),
    "float32": DEFINITIONS.keys(),
    "float64": DEFINITIONS.keys(),
    "int8": ("sum", "max", "min", "product"),
    "int64": ("sum", "max", "min", "product"),
    "uint16": ("sum", "max", "min", "product"),
    "bool": ("max", "min"),
    "complex64": ("sum", "mean", "product"),
}
COMBINATIONS = [(dtype, op) for dtype, ops in DTYPES.items() for op in ops]
LARGE = 1 << 19


@pytest.fixture(params=CARRIERS)
def make(request: pytest.FixtureRequest) -> Makers:
    return CARRIERS[request.param]


def arrays_of(dtype: str, length: int, size: int, seed: int = 0) -> list[Any]:
    generator = np.random.default_rng(seed)
    values = [generator.uniform(-2, 2, length) for _ in range(size)]
    if dtype == "bool":
        return [value > 0 for value in values]
    if dtype == "complex64":
        return [(value + 1j * value[::-1]).astype(dtype) for value in values]
    return [value.astype(dtype) for value in values]


def check_reduced(results: Sequence[Any], arrays: Sequence[Any], op: str) -> None:
    """Checks results against the definition, and that they are the same bits."""
    assert not [result for result in results if isinstance(result, Exception)]
    expected = DEFINITIONS[op](np.stack(arrays)).astype(arrays[0].dtype)
    if arrays[0].dtype.kind in "fc":
        digits = 1e-2 if arrays[0].dtype == np.float16 else 1e-5
        np.testing.assert_allclose(results[0], expected, rtol=digits, atol=digits)
    else:
        np.testing.assert_array_equal(results[0], expected)
    assert len({result.tobytes() for result in results}) == 1


def reduce_all(carriers: Sequence[Carrier], arrays: Sequence[Any], op: Any, number: int = 0) -> Any:
    def reduce(carrier: Carrier) -> Any:
        array = arrays[carrier.rank].copy()
        carrier.all_reduce(array, op, CollectiveCall(number, f"all_reduce({op})"))
        return array

    return run(carriers, reduce)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("length", [0, 7, 3 * LARGE // 4 + 1])
def test_the_sum_is_that_of_all_replicas(make: Makers, size: int, length: int) -> None:
    arrays = arrays_of("float32", length, size)
    with make(size) as carriers:
        check_reduced(reduce_all(carriers, arrays, "sum"), arrays, "sum")


@pytest.mark.parametrize("length", [5, 40_000])
def test_every_operation_and_dtype(make: Makers, length: int) -> None:
    with make(3) as carriers:
        for number, (dtype, op) in enumerate(COMBINATIONS):
            arrays = arrays_of(dtype, length, 3)
            check_reduced(reduce_all(carriers, arrays, op, number), arrays, op)


def test_buffers_are_freed_when_nobody_uses_them(make: Makers) -> None:
    def reduce(carrier: Carrier) -> Any:
        counts = []
        for number in range(0, 30, 3):
            buffers = [carrier.buffer(LARGE).view(np.float32) for _ in range(2)]
            for each in buffers:
                each[:] = carrier.rank
                carrier.all_reduce(each, "sum", CollectiveCall(number, "all_reduce"))
                assert set(each.tolist()) == {1.0}
            del buffers, each
            carrier.all_gather(None, CollectiveCall(number + 1, "all have dropped theirs"))
            counts.append(shared_memories())
            carrier.all_gather(None, CollectiveCall(number + 2, "all have counted"))
        return max(counts) - counts[0]

    with make(2) as carriers:
        assert run(carriers, reduce) == [0, 0]


@pytest.mark.parametrize("length", [3, LARGE // 2])
def test_an_array_may_change_as_soon_as_the_call_returns(make: Makers, length: int) -> None:
    def call(carrier: Carrier) -> set[float]:
        array = np.zeros(length, np.float32)
        sums = set()
        for number in range(20):
            array[:] = 1
            carrier.all_reduce(array, "sum", CollectiveCall(number, "all_reduce"))
            sums |= {float(array[0]), float(array[-1])}
            array[:] = 1
            carrier.broadcast(array, number % 4, CollectiveCall(number, "broadcast"))
            sums |= {4 * float(array[0])}
            array[:] = -1
        return sums

    with make(4) as carriers:
        assert run(carriers, call) == [{4.0}] * 4


def test_values_of_any_size_are_gathered(make: Makers) -> None:
    def gather(carrier: Carrier) -> Any:
        mine = {"rank": carrier.rank, "data": np.full(carrier.rank * 200_000, carrier.rank)}
        gathered = carrier.all_gather(mine, CollectiveCall(0, "all_gather"))
        mine["data"][:] = -1  # others must not see it
        for value in gathered:
            value["data"] += 1  # nor this
        return [
            (value["rank"], len(value["data"]), set(np.unique(value["data"]).tolist()))
            for value in gathered
        ]

    with make(4) as carriers:
        results = run(carriers, gather)
    expected = [(rank, rank * 200_000, {rank + 1} if rank else set()) for rank in range(4)]
    assert results == [expected] * 4


@pytest.mark.parametrize("length", [3, LARGE + 3])
def test_any_replica_can_be_the_source(make: Makers, length: int) -> None:
    def pass_around(carrier: Carrier) -> Any:
        results = []
        for source in range(5):
            array = np.full(length, carrier.rank)
            carrier.broadcast(array, source, CollectiveCall(source, "broadcast"))
            results.append(set(np.unique(array).tolist()))
        return results

    with make(5) as carriers:
        results = run(carriers, pass_around)
    assert results == [[{source} for source in range(5)]] * 5


def small(carrier: Carrier, call: CollectiveCall) -> None:
    carrier.all_reduce(np.ones(3, np.float32), "sum", call)


def large(carrier: Carrier, call: CollectiveCall) -> None:
    carrier.all_reduce(np.ones(LARGE, np.float32), "sum", call)


def gather(carrier: Carrier, call: CollectiveCall) -> None:
    carrier.all_gather("value", call)


def broadcast(carrier: Carrier, call: CollectiveCall) -> None:
    carrier.broadcast(np.ones(3, np.float32), 1, call)


def in_buffer(carrier: Carrier, call: CollectiveCall) -> None:
    carrier.all_reduce(carrier.buffer(LARGE), "sum", call)


@pytest.mark.parametrize("make", ["one_machine", "apart", "two_machines", "threads"], indirect=True)
@pytest.mark.parametrize(
    ("most", "other"),
    [
        (small, small),
        (small, large),
        (small, gather),
        (small, broadcast),
        (large, small),
        (large, in_buffer),
        (gather, small),
        (broadcast, large),
    ],
)
def test_different_calls_are_an_error_in_all_replicas(make: Makers, most: Any, other: Any) -> None:
    def call(carrier: Carrier) -> None:
        small(carrier, CollectiveCall(0, "the same"))
        function = other if carrier.rank == 2 else most
        function(carrier, CollectiveCall(1, function.__name__, f"train.py:{carrier.rank}"))

    with make(4) as carriers:
        results = run(carriers, call)
        again = reduce_all(carriers, arrays_of("int64", 10, 4), "max", 2)
    if most is other:
        assert results == [None] * 4
        return
    assert {type(result) for result in results} == {CollectiveMismatchError}
    assert len({str(result) for result in results}) == 1
    assert "replica 2 calls something else than the others" in str(results[0])
    assert f"replica 2: {other.__name__}, its call 1, at train.py:2" in str(results[0])
    check_reduced(again, arrays_of("int64", 10, 4), "max")


def test_the_replica_of_a_process_that_calls_something_else_is_named() -> None:
    def story(repl: replicas.Replicator) -> Any:
        repl.all_sum(1.0)
        if repl.replica_id == 1:
            return repl.all_gather(1, "the odd one")
        return repl.all_sum({"loss": np.zeros(3)})

    outcomes = together(in_memory(4, processes=2), story)
    texts = [str(each) for each in outcomes if isinstance(each, CollectiveMismatchError)]
    assert texts
    for text in texts:
        assert "replica 1 calls something else" in text
        assert "all_gather of the odd one, its call 2, at " in text
    assert all(isinstance(each, replicas.ReplicaError) for each in outcomes)


def test_different_arrays_are_an_error_even_if_the_signature_is_the_same(make: Makers) -> None:
    def call(carrier: Carrier) -> None:
        carrier.all_reduce(np.zeros(3 + carrier.rank // 2), "sum", CollectiveCall(0, "gradients"))

    with make(3) as carriers:
        results = run(carriers, call)
    assert {type(result) for result in results} == {CollectiveMismatchError}
    assert "replica 2: gradients (all_reduce(sum) of <f8[4])" in str(results[0])


@pytest.mark.parametrize("function", [small, large, gather, broadcast])
def test_abort_ends_calls_soon(make: Makers, function: Any) -> None:
    def call(carrier: Carrier) -> float:
        small(carrier, CollectiveCall(0, "the same"))
        if carrier.rank == 1:
            return 0.0  # never comes
        timer = threading.Timer(0.1, carrier.abort, [ReplicaLostError("replica 1 is lost")])
        timer.start()
        with pytest.raises(ReplicaLostError):
            function(carrier, CollectiveCall(1, "all"))
        took_s = time.monotonic() - began_at
        timer.join()
        with pytest.raises(ReplicaLostError):
            function(carrier, CollectiveCall(2, "later"))
        return took_s

    with make(3) as carriers:
        began_at = time.monotonic()
        results = run(carriers, call)
    assert max(results) < 1.0, results


def test_what_cannot_be_combined_is_refused(make: Makers) -> None:
    with make(1) as (carrier,):
        for array, op in (
            (np.zeros(3, int), "mean"),
            (np.zeros(3, bool), "sum"),
            (np.zeros(3, complex), "max"),
            (np.array([None]), "sum"),
        ):
            with pytest.raises(TypeError):
                carrier.all_reduce(array, op, CollectiveCall(0, "all_reduce"))  # type: ignore[arg-type] # as above
        with pytest.raises(ValueError, match="operation"):
            carrier.all_reduce(np.zeros(3), "median", CollectiveCall(0, "all_reduce"))  # type: ignore[arg-type] # as above


# Real processes


def _all_kinds(carrier: Carrier) -> list[float]:
    results = []
    for number, length in enumerate([10, 2 * LARGE]):
        array = np.full(length, carrier.rank + 1, np.float32)
        carrier.all_reduce(array, "sum", CollectiveCall(2 * number, "all_reduce"))
        buffer = carrier.buffer(4 * length).view(np.float32)
        buffer[:] = array
        carrier.all_reduce(buffer, "mean", CollectiveCall(2 * number + 1, "all_reduce"))
        results += [float(array[-1]), float(buffer[0])]
    gathered = carrier.all_gather(
        np.full(100_000 * carrier.rank, 1), CollectiveCall(4, "all_gather")
    )
    return [*results, *(float(each.sum()) for each in gathered)]


@pytest.mark.parametrize("machines", [one_machine, apart, two_machines])
def test_processes(machines: Any) -> None:
    with processes(machines(4)) as members:
        results = call_all(members, _all_kinds)
    assert results == [[10.0] * 4 + [0.0, 1e5, 2e5, 3e5]] * 4


def _first(carrier: Carrier) -> None:
    small(carrier, CollectiveCall(0, "first"))


def _second(carrier: Carrier) -> None:
    large(carrier, CollectiveCall(1, "second"))


@pytest.mark.parametrize(
    ("machines", "killed", "pause_s"),
    [
        pytest.param(one_machine, 0, None, id="first neighbour, before the call"),
        pytest.param(one_machine, 2, None, id="other neighbour, before the call"),
        pytest.param(one_machine, 0, 0.0, id="first neighbour, in the call"),
        pytest.param(one_machine, 2, 0.0, id="other neighbour, in the call"),
        pytest.param(apart, 0, 0.2, id="server, while others wait for it"),
    ],
)
def test_a_killed_replica_ends_the_calls_of_the_others(
    machines: Any, killed: int, pause_s: float | None
) -> None:
    with processes(machines(4)) as members:
        assert call_all(members, _first) == [None] * 4
        process, others = members[killed].process, members[:killed] + members[killed + 1 :]
        if pause_s is None:
            process.kill()
            process.join()
        for each in others:
            each.begin(_second)
        time.sleep(pause_s or 0.0)
        process.kill()
        results = [each.result() for each in others]
    assert {type(result) for result in results} == {ReplicaLostError}
    if machines is one_machine and pause_s is not None:
        assert any(f"replica {killed}: its process" in str(result) for result in results)


def _third(carrier: Carrier) -> None:
    large(carrier, CollectiveCall(2, "third"))


def _ends_in_a_sum(carrier: Carrier) -> None:
    monkey = pytest.MonkeyPatch()
    monkey.setattr(ArrayOperation, "combine", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    _third(carrier)


def test_a_leader_that_is_killed_between_two_pieces_is_named() -> None:
    with processes(apart(2)) as members:
        for step in (_first, _second):
            assert call_all(members, step) == [None] * 2
        members[0].begin(_third)
        members[1].begin(_ends_in_a_sum)
        result = members[0].result()
    assert isinstance(result, ReplicaLostError)
    assert "replica 1: the connection broke" in str(result)


def test_on_hosts_with_cores_another_thread_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    names = set[str]()
    send = ByteStream.send

    def note_and_send(stream: ByteStream, data: Any) -> int:
        names.add(threading.current_thread().name)
        return send(stream, data)

    arrays = arrays_of("int64", 3 << 20, 3)
    with CARRIERS["apart"](3) as carriers:
        run(carriers, _second)  # which opens the streams
        monkeypatch.setattr(ByteStream, "send", note_and_send)

        def add(carrier: Carrier) -> Any:
            result = arrays[carrier.rank].copy()
            carrier.all_reduce(result, "sum", CollectiveCall(2, "sum"))
            return result

        results = run(carriers, add)
    assert names == {"courier-sender"}
    for result in results:
        assert (result == np.sum(arrays, axis=0)).all()


def test_who_waits_in_a_meeting_is_told_while_more_come() -> None:
    box, others = Box(), iter(range(2, 10))

    class Rank(int):
        def __lt__(self, other: int) -> bool:  # called while those that are there are sorted
            box.meet(0, 1, next(others), None, None)
            return int(self) < int(other)

    for rank in (1, 0):
        box.meet(0, 1, Rank(rank), None, None)
    assert (
        Mailbox(box).__courier_waits__("replica_meet")
        == [("", "of the replicas in this step, only [0, 1] are there")] * 2
    )
