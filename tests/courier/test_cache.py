"""A cache: how old what it answers may be, who is called how often, and what passes through."""

import concurrent.futures
import itertools
import math
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import courier
from courier import _cache
from courier._context import CallContext
from courier._dispatch import Answer, Failure, Later, Value
from courier._lane import PendingCall, Raised, Reply, Returned
from courier._parcel import Parcel, pack, unpack
from tests.courier.conftest import Serve
from tests.courier.waiting import wait_until

_SIZE = 1 << 17  # of eight bytes each: more than what is sent inline


class Clock:
    """Stands for the module `time` in the cache; time passes when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(_cache, "time", clock)
    return clock


class Target:
    """Answers with the number of the call; may hold answers back, or raise."""

    def __init__(self) -> None:
        self.calls = 0
        self.entered = threading.Semaphore(0)
        self.go = threading.Semaphore(0)
        self.error: Exception | None = None
        self.array: Any = np.zeros(_SIZE)
        self.closed = threading.Event()
        self._lock = threading.Lock()

    def count(self, *_: Any) -> int:
        with self._lock:
            self.calls += 1
            number = self.calls
        if self.error is not None:
            raise self.error
        return number

    def held(self, *_: Any) -> int:
        number = self.count()
        self.entered.release()
        assert self.go.acquire(timeout=30)
        return number

    def params(self) -> Any:
        self.count()
        return {"w": self.array, "b": np.ones(3)}

    def blob(self, key: int, size: int) -> bytes:
        self.count()
        return bytes([key % 256]) * size

    def total(self, array: Any) -> float:
        self.count()
        return float(array.sum())

    def many(self, count: int, size: int) -> Any:
        self.count()
        return [np.full(size, index) for index in range(count)]

    def frozen(self) -> Any:
        array = np.arange(_SIZE)
        array.flags.writeable = False
        return array

    def unpicklable(self) -> Any:
        self.count()
        return threading.Lock()

    def items(self, count: int) -> Iterator[Any]:
        self.count()
        for index in range(count):
            yield index, np.full(_SIZE, index)

    def endless(self) -> Iterator[int]:
        try:
            yield 0
            self.entered.release()
            self.go.acquire(timeout=30)
            yield 1
        finally:
            self.closed.set()

    def fails_late(self) -> Iterator[int]:
        yield 1
        raise KeyError("late")

    def custom_items(self) -> Iterator[Any]:
        yield Touchy()

    def custom(self) -> Any:
        return Touchy()

    def either(self, streams: bool) -> Any:
        return iter_of(self.count()) if streams else self.count()


def iter_of(value: int) -> Iterator[int]:
    yield value


class Touchy:
    """Notes in which order it is pickled and unpickled, by anybody in this process."""

    events: list[str] = []

    def __reduce__(self) -> Any:
        self.events.append("pickled")
        return _rebuild, ()


def _rebuild() -> Touchy:
    Touchy.events.append("unpickled")
    return Touchy()


class Room:
    """A target, a cache for it, and a client of the cache."""

    def __init__(self, serve: Serve, connect: Callable[..., Any], **options: Any) -> None:
        self.target = Target()
        target_options = options.pop("target_options", {})
        cache_options = options.pop("cache_options", {})
        client_options = options.pop("client_options", {})
        self.server, self.direct = serve(self.target, client=client_options, **target_options)
        options = {"refresh_s": 10.0, "stale_s": 30.0, **options}
        self.cache = courier.Cache(self.direct, **options)
        self.cache_server, self.client = serve(self.cache, **cache_options)
        self._connect = connect

    def another(self, **options: Any) -> Any:
        return self._connect(self.cache_server.address, **options)

    def is_calm(self) -> bool:
        with self.cache._lock:
            return not any(entry.is_asked for entry in self.cache._entries.values())


@pytest.fixture
def make(serve: Serve, connect: Callable[..., Any]) -> Callable[..., Room]:
    return lambda **options: Room(serve, connect, **options)


def _descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def _shared_descriptors() -> int:
    targets = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            targets.append(str(entry.readlink()))
        except OSError:
            continue
    return sum("memfd:courier-shared" in target for target in targets)


# How old an answer is


def test_an_answer_is_given_again_until_it_is_to_be_refreshed(
    make: Callable[..., Room], clock: Clock
) -> None:
    room = make()
    assert [room.client.count() for _ in range(5)] == [1] * 5
    clock.now += 9.9
    assert room.client.count() == 1
    assert room.target.calls == 1


def test_who_comes_after_the_refresh_time_gets_the_old_answer_and_has_a_new_one_fetched(
    make: Callable[..., Room], clock: Clock
) -> None:
    room = make()
    assert room.client.count() == 1
    clock.now += 10
    assert room.client.count() == 1
    wait_until(lambda: room.target.calls == 2 and room.is_calm())
    assert [room.client.count() for _ in range(3)] == [2] * 3
    assert room.target.calls == 2


def test_nobody_is_called_while_nobody_asks(make: Callable[..., Room], clock: Clock) -> None:
    room = make(refresh_s=0)
    assert room.client.count() == 1
    clock.now += 1000
    assert room.is_calm()
    assert room.target.calls == 1


def test_a_stale_answer_is_waited_for(make: Callable[..., Room], clock: Clock) -> None:
    room = make()
    assert room.client.count() == 1
    clock.now += 30.1
    assert room.client.count() == 2


def test_an_answer_is_as_old_as_its_question(make: Callable[..., Room], clock: Clock) -> None:
    room = make()
    first = room.client.futures.held()
    assert room.target.entered.acquire(timeout=20)
    clock.now += 29
    room.target.go.release()
    assert first.result(20) == 1
    clock.now += 2
    room.target.go.release()
    assert room.client.held() == 2


def test_a_target_slower_than_the_stale_time_answers_everybody_with_two_calls_at_most(
    make: Callable[..., Room], clock: Clock
) -> None:
    room = make()
    first = room.client.futures.held()
    assert room.target.entered.acquire(timeout=20)
    clock.now += 31
    late = [room.client.futures.held() for _ in range(4)]
    (entry,) = room.cache._entries.values()
    wait_until(lambda: len(entry.waiting) == 5)
    room.target.go.release()
    assert first.result(20) == 1
    assert room.target.entered.acquire(timeout=20)
    clock.now += 31
    room.target.go.release()
    assert [future.result(20) for future in late] == [2] * 4
    assert room.target.calls == 2
    assert room.cache._entries == {}


def test_calls_at_once_are_one_call(make: Callable[..., Room]) -> None:
    room = make(refresh_s=0)
    clients = [room.another() for _ in range(4)]
    futures = [client.futures.held("x") for client in clients for _ in range(5)]
    other = room.client.futures.held("y")
    # Of a copy: another thread may bring an entry meanwhile.
    wait_until(lambda: sum(len(e.waiting) for e in list(room.cache._entries.values())) == 21)
    room.target.go.release()
    room.target.go.release()
    results = {future.result(20) for future in futures}
    assert results | {other.result(20)} == {1, 2}
    assert room.target.calls == 2


def test_a_slow_refresh_is_not_asked_for_twice(make: Callable[..., Room], clock: Clock) -> None:
    room = make()
    room.target.go.release()
    assert room.client.held() == 1
    clock.now += 11
    for _ in range(3):
        assert room.client.held() == 1
        clock.now += 2
    room.target.go.release()
    wait_until(lambda: room.client.held() == 2)
    assert room.target.calls == 2


# Errors


class FaultError(Exception):
    pass


def test_errors_reach_the_caller_and_are_not_kept(make: Callable[..., Room], clock: Clock) -> None:
    room = make()
    room.target.error = ValueError("broke")
    for calls in (1, 2):
        with pytest.raises(ValueError, match="broke"):
            room.client.count()
        assert room.target.calls == calls
    room.target.error = None
    assert room.client.count() == 3
    clock.now += 15
    room.target.error = ValueError("broke again")
    assert room.client.count() == 3
    wait_until(lambda: room.target.calls == 4 and room.is_calm())
    assert room.client.count() == 3  # and is not asked again at once
    assert room.target.calls == 4
    clock.now += 16
    with pytest.raises(ValueError, match="broke again"):
        room.client.count()
    room.target.error = None
    assert room.client.count() == 6


def test_an_unknown_method_is_one_here_too(make: Callable[..., Room]) -> None:
    room = make()
    with pytest.raises(courier.UnknownMethodError, match=r"'nothing'.*there are: .*count"):
        room.client.nothing()
    assert room.cache._entries == {}


def test_a_result_that_cannot_be_pickled_is_said_each_time(make: Callable[..., Room]) -> None:
    room = make()
    for calls in (1, 2):
        with pytest.raises(courier.SerializationError, match=r"(?i)lock"):
            room.client.unpicklable()
        assert room.target.calls == calls


def test_arguments_that_cannot_be_pickled_are_said(make: Callable[..., Room], way: Any) -> None:
    room = make(target_options=way, cache_options=way)
    with pytest.raises(courier.SerializationError, match=r"(?i)lock"):
        room.client.count(threading.Lock())


def test_a_closed_client_of_the_target_fails_calls_that_need_it(
    make: Callable[..., Room], clock: Clock
) -> None:
    room = make()
    assert room.client.count() == 1
    waiting = room.client.futures.held()
    assert room.target.entered.acquire(timeout=20)
    courier.close(room.direct)
    with pytest.raises(courier.CourierError, match="closed"):
        waiting.result(20)
    room.target.go.release()
    clock.now += 11
    assert room.client.count() == 1
    clock.now += 20
    for _ in range(2):
        with pytest.raises(courier.CourierError, match="closed"):
            room.client.count()
    assert room.cache._entries == {}


def test_the_timeout_of_the_client_of_the_target_counts(make: Callable[..., Room]) -> None:
    room = make(client_options={"call_timeout": 0.05})
    with pytest.raises(courier.CallTimeoutError):
        room.client.held()
    room.target.go.release()
    assert room.cache._entries == {}


def test_a_target_that_is_lost_and_comes_back(
    serve: Serve, secret: courier.Secret, clock: Clock, reserve: Callable[[], int]
) -> None:
    first = Target()
    port = reserve()
    server, direct = serve(first, port=port, share_port=True)
    _, client = serve(courier.Cache(direct, refresh_s=10, stale_s=30))
    assert client.count() == 1
    hanging = client.futures.held()
    assert first.entered.acquire(timeout=20)
    stopping = threading.Thread(target=server.stop, args=(0.0,))
    stopping.start()
    with pytest.raises(courier.ServerLostError):
        hanging.result(20)
    first.go.release()
    stopping.join(30)
    clock.now += 15
    assert client.count() == 1
    clock.now += 20
    waiting = client.futures.count()
    second = Target()
    second.calls = 40
    with courier.Server(second, port=port, share_port=True, secret=secret, in_process="wire"):
        assert waiting.result(30) > 40
        wait_until(lambda: client.count() > 40)


def test_without_a_target_that_is_waited_for_calls_fail(
    make: Callable[..., Room], clock: Clock
) -> None:
    room = make(client_options={"wait_for_ready": False})
    assert room.client.count() == 1
    room.server.stop(0.0)
    clock.now += 31
    with pytest.raises((courier.ServerUnreachableError, courier.ServerLostError)):
        room.client.count()


def test_a_node_that_is_to_end_still_answers_but_refreshes_no_more(
    make: Callable[..., Room], clock: Clock
) -> None:
    room = make()
    assert room.client.count() == 1
    courier.stop_calling(room.direct)
    clock.now += 15
    assert room.client.count() == 1
    wait_until(room.is_calm)
    assert room.target.calls == 1
    clock.now += 20
    assert room.client.count() == 2
    assert next(room.client.items(1))[0] == 0


def test_an_answer_for_which_there_is_no_memory_is_an_error_and_the_next_is_asked_for(
    make: Callable[..., Room], monkeypatch: pytest.MonkeyPatch
) -> None:
    room = make()

    def fail(_: object) -> Any:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(_cache, "freeze", fail)
        with pytest.raises(MemoryError, match="no room"):
            room.client.count()
    assert room.client.count() == 2


def test_a_caller_who_cannot_be_answered_does_not_keep_the_answer_from_others(
    make: Callable[..., Room], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    room = make()
    genuine, settled = Later.settle, itertools.count()

    def settle(later: Later, outcome: Answer) -> None:
        if next(settled) == 0:
            raise RuntimeError("a callback broke")
        genuine(later, outcome)

    first = room.client.futures.held()
    assert room.target.entered.acquire(timeout=20)
    others = [room.client.futures.held() for _ in range(3)]
    (entry,) = room.cache._entries.values()
    wait_until(lambda: len(entry.waiting) == 4)
    monkeypatch.setattr(Later, "settle", settle)
    room.target.go.release()
    futures = [first, *others]
    wait_until(lambda: sum(future.done() for future in futures) == 3)
    assert "could not be given" in caplog.text
    next(future for future in futures if not future.done()).cancel()


# Callers that leave


@pytest.mark.usefixtures("clock")
def test_callers_that_time_out_or_leave_do_not_pile_up(make: Callable[..., Room]) -> None:
    room = make()
    impatient = courier.with_timeout(room.client, 0.02)
    for _ in range(3):
        with pytest.raises(courier.CallTimeoutError):
            impatient.held()
    courier.close(impatient)
    leaving = room.another()
    futures = [leaving.futures.held() for _ in range(3)]
    wait_until(lambda: room.cache._entries)  # the impatient ones may not even have connected
    (entry,) = room.cache._entries.values()
    wait_until(lambda: len(entry.waiting) == 3)
    courier.close(leaving)
    assert all(isinstance(f.exception(20), courier.CallCancelledError) for f in futures)
    wait_until(lambda: not entry.waiting)
    staying = room.client.futures.held()
    room.target.go.release()
    assert staying.result(20) == 1
    assert room.client.held() == 1
    assert room.target.calls == 1


def test_calls_that_wait_end_when_the_server_stops(make: Callable[..., Room], way: Any) -> None:
    room = make(target_options=way, cache_options=way)
    future = courier.with_timeout(room.client, 30).futures.held()
    assert room.target.entered.acquire(timeout=20)
    room.cache_server.stop(0.0)
    with pytest.raises(courier.CourierError):
        future.result(30)
    room.target.go.release()


# What passes


@pytest.mark.usefixtures("clock")
def test_arguments_tell_answers_apart(make: Callable[..., Room], way: dict[str, Any]) -> None:
    room = make(target_options=way, cache_options=way)
    arrays = [np.full(_SIZE, value, dtype=float) for value in (1, 2, 3)]
    for _ in range(3):
        for value, array in enumerate(arrays, 1):
            assert room.client.total(array) == value * _SIZE
    assert room.target.calls == 3
    arrays[0][:] = 7
    assert room.client.total(arrays[0]) == 7 * _SIZE
    assert room.client.total(array=arrays[0]) == 7 * _SIZE
    assert room.target.calls == 5


@pytest.mark.usefixtures("clock")
def test_what_a_caller_writes_nobody_else_sees(
    make: Callable[..., Room], way: dict[str, Any]
) -> None:
    room = make(target_options=way, cache_options=way)
    first, second = room.client.params(), room.another().params()
    for result in (first, second):
        assert not result["w"].any()
        result["w"][:] = 7
        result["b"][:] = 7
    third = room.client.params()
    assert not third["w"].any()
    assert not (third["b"] - 1).any()
    assert room.target.calls == 1
    assert not room.target.array.any()


def test_what_the_target_writes_later_is_not_in_the_answer(
    make: Callable[..., Room], way: dict[str, Any]
) -> None:
    room = make(target_options=way, cache_options=way)
    room.client.params()
    room.target.array[:] = 9
    assert not room.client.params()["w"].any()


def test_what_was_read_only_stays_so(make: Callable[..., Room]) -> None:
    room = make()
    for _ in range(2):
        array = room.client.frozen()
        assert not array.flags.writeable
        np.testing.assert_array_equal(array, np.arange(_SIZE))


@pytest.mark.usefixtures("clock")
def test_nothing_is_unpickled_or_pickled_again(make: Callable[..., Room]) -> None:
    room = make()
    Touchy.events.clear()
    for _ in range(3):
        room.client.custom()
    assert Touchy.events == ["pickled", "unpickled", "unpickled", "unpickled"]
    Touchy.events.clear()
    list(room.client.custom_items())
    assert Touchy.events == ["pickled", "unpickled"]


def test_generators_pass_and_each_reader_has_its_own(
    make: Callable[..., Room], way: dict[str, Any]
) -> None:
    room = make(target_options=way, cache_options=way)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        readings = [pool.submit(lambda: list(room.client.items(4))) for _ in range(4)]
        for reading in readings:
            for expected, (index, array) in enumerate(reading.result(30)):
                assert index == expected
                assert (array == expected).all()
            assert len(reading.result()) == 4
    assert room.target.calls == 4


def test_a_generator_that_raises_does_so_at_its_reader(
    make: Callable[..., Room], way: dict[str, Any]
) -> None:
    room = make(target_options=way, cache_options=way)
    for _ in range(2):
        items = room.client.fails_late()
        assert next(items) == 1
        with pytest.raises(KeyError, match="late"):
            next(items)


def test_a_generator_whose_reader_leaves_ends(make: Callable[..., Room]) -> None:
    room = make()
    for _ in range(2):
        room.target.closed.clear()
        items = room.client.endless()
        assert next(items) == 0
        assert room.target.entered.acquire(timeout=20)
        items.close()  # while the cache waits for the next item
        wait_until(lambda: room.cache_server.handlers.is_idle)
        room.target.go.release()
        assert room.target.closed.wait(20)


def test_a_method_may_be_a_generator_at_times_only(make: Callable[..., Room]) -> None:
    room = make()
    assert list(room.client.either(True)) == [1]
    assert list(room.client.either(True)) == [2]
    room.client.either(False)
    result = room.client.either(False)
    assert [room.client.either(False) for _ in range(3)] == [result] * 3


def test_methods_are_listed_through_the_cache(make: Callable[..., Room]) -> None:
    room = make()
    courier.wait_until_ready(room.client, 30)
    assert courier.list_methods(room.client) == courier.list_methods(room.direct)


def test_what_is_bound_to_its_server_is_served_beside(
    make: Callable[..., Room], way: dict[str, Any]
) -> None:
    room = make(cache_options=way)
    room.cache_server.bind("here", lambda value: value + 1)
    assert room.client.here(1) == 2
    assert room.client.count() == 1
    room.cache_server.unbind("here")
    with pytest.raises(courier.UnknownMethodError):
        room.client.here(1)


def test_a_cache_of_a_cache(make: Callable[..., Room], serve: Serve) -> None:
    room = make()
    _, client = serve(courier.Cache(room.client, refresh_s=1, stale_s=2))
    assert client.count() == client.count() == 1
    assert not client.params()["w"].any()


def test_many_threads_get_answers_that_are_right(
    make: Callable[..., Room], way: dict[str, Any]
) -> None:
    room = make(target_options=way, cache_options=way, refresh_s=0, stale_s=0.001, max_entries=3)
    failures: list[object] = []

    def read(number: int) -> None:
        for index in range(30):
            key = (number + index) % 6
            result = room.client.blob(key, 5000)
            if result != bytes([key]) * 5000:
                failures.append(result)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not failures
    wait_until(room.is_calm)


# Memory


def test_thousands_of_keys_leave_few_entries(make: Callable[..., Room]) -> None:
    room = make(max_entries=10)
    futures = [room.client.futures.blob(key, 10) for key in range(3000)]
    concurrent.futures.wait(futures, 60)
    assert [f.result(0)[0] for f in futures] == [key % 256 for key in range(3000)]
    wait_until(lambda: len(room.cache._entries) <= 10)
    assert room.cache._bytes == sum(entry.size for entry in room.cache._entries.values())


def test_what_was_not_wanted_for_longest_goes_first(
    make: Callable[..., Room], clock: Clock
) -> None:
    room = make(max_entries=2)
    for key in (1, 2, 1, 3, 1):
        clock.now += 0.1
        room.client.blob(key, 10)
    assert room.target.calls == 3
    room.client.blob(2, 10)
    assert room.target.calls == 4
    room.client.blob(1, 10)
    assert room.target.calls == 4


def test_answers_of_too_many_bytes_are_given_and_not_kept(make: Callable[..., Room]) -> None:
    room = make(max_bytes=10_000)
    for calls in (1, 2):
        assert len(room.client.blob(1, 20_000)) == 20_000
        assert room.target.calls == calls
    assert (room.cache._entries, room.cache._bytes) == ({}, 0)
    for key in range(5):
        room.client.blob(key, 4_000)
    assert len(room.cache._entries) == 2
    assert 8_000 < room.cache._bytes <= 10_000


@pytest.mark.parametrize("limit", ["max_bytes", "max_entries"])
def test_a_cache_without_room_asks_each_time(make: Callable[..., Room], limit: str) -> None:
    room = make(**{limit: 0})
    assert [room.client.count() for _ in range(3)] == [1, 2, 3]
    assert (room.cache._entries, room.cache._bytes) == ({}, 0)


def test_what_nobody_wants_any_more_goes(make: Callable[..., Room], clock: Clock) -> None:
    room = make()
    room.client.blob(1, 1000)
    room.client.blob(2, 1000)
    clock.now += 31
    room.client.blob(3, 10)
    assert len(room.cache._entries) == 1
    assert room.cache._bytes < 1000


def test_a_stale_answer_that_cannot_be_replaced_is_not_held(
    make: Callable[..., Room], clock: Clock
) -> None:
    room = make()
    room.client.count()
    clock.now += 31
    room.target.error = FaultError()
    with pytest.raises(FaultError):
        room.client.count()
    assert (room.cache._entries, room.cache._bytes) == ({}, 0)


def test_refreshing_a_large_array_takes_no_more_and_more_descriptors(
    make: Callable[..., Room], way: dict[str, Any], clock: Clock
) -> None:
    room = make(target_options=way, cache_options=way, refresh_s=0, stale_s=0)
    counts = []
    for index in range(40):
        clock.now += 1
        room.target.array = np.full(_SIZE, index)
        assert (room.client.params()["w"] == index).all()
        counts.append(_descriptors())
    # Some mappings linger in either process until their segment is used again.
    assert max(counts[20:]) <= max(counts[:20]) + 15
    assert len(room.cache._entries) == 1


@pytest.mark.usefixtures("clock")
def test_arrays_beyond_the_descriptors_of_a_process_lie_in_its_own_memory(
    make: Callable[..., Room],
) -> None:
    room = make()
    room.cache._max_descriptors = 12
    before = _shared_descriptors()
    for count in (4, 8, 3):
        for _ in range(2):
            result = room.client.many(count, _SIZE)
            for index, array in enumerate(result):
                assert (array == index).all()
                array[:] = -1
            del result, array
    assert room.target.calls == 3
    assert room.cache._descriptors == 9
    assert _shared_descriptors() <= before + 3 * 12  # readers of this process map them too


# How it is made


def test_a_client_is_needed(connect: Callable[..., Any]) -> None:
    for thing in (None, "host:1", Target(), connect("127.0.0.1:1").futures):
        with pytest.raises(TypeError, match="courier client"):
            courier.Cache(thing, refresh_s=1, stale_s=2)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"refresh_s": -1, "stale_s": 1}, "below 0"),
        ({"refresh_s": 0, "stale_s": -1}, "below 0"),
        ({"refresh_s": math.nan, "stale_s": 1}, "below 0"),
        ({"refresh_s": 1, "stale_s": math.nan}, "below 0"),
        ({"refresh_s": 2, "stale_s": 1}, "stale after 1 s"),
        ({"refresh_s": 1, "stale_s": 2, "max_bytes": -1}, "less than nothing"),
        ({"refresh_s": 1, "stale_s": 2, "max_entries": -1}, "less than nothing"),
    ],
)
def test_numbers_that_contradict_are_refused(
    connect: Callable[..., Any], options: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        courier.Cache(connect("127.0.0.1:1"), **options)


def test_an_answer_may_be_good_for_ever(make: Callable[..., Room], clock: Clock) -> None:
    room = make(refresh_s=math.inf, stale_s=math.inf)
    assert room.client.count() == 1
    clock.now += 1e9
    assert room.client.count() == 1
    assert room.target.calls == 1


# By property, on a clock of its own


class FakePending:
    def __init__(self, key: int, asked_at: float) -> None:
        self.key = key
        self.asked_at = asked_at
        self.reply: Reply | None = None
        self.callback: Callable[[PendingCall], None] | None = None

    def wait(self) -> Reply:
        assert self.reply is not None
        return self.reply

    def when_done(self, callback: Callable[[Any], None]) -> None:
        self.callback = callback

    def wait_until(self, deadline: float | None) -> bool:
        return self.reply is not None

    def hurry(self) -> None: ...

    def cancel(self) -> bool:
        return False


class World:
    """In the place of a connection; calls are answered, and tasks run, when the test says so."""

    def __init__(self, clock: Clock) -> None:
        self.options = types.SimpleNamespace(address="host:1")
        self.clock = clock
        self.pending: list[FakePending] = []
        self.tasks: list[Callable[[], None]] = []
        self.asked: dict[int, list[float]] = {}
        self.refuses = False

    def forward(self, method: str, arguments: Parcel) -> FakePending:
        if self.refuses:
            raise courier.CallCancelledError("closed")
        (key,), _ = unpack(arguments)
        assert all(call.key != key for call in self.pending), "two calls for one key"
        self.pending.append(FakePending(key, self.clock.now))
        self.asked.setdefault(key, []).append(self.clock.now)
        return self.pending[-1]

    def run_aside(self, task: Callable[[], None]) -> None:
        self.tasks.append(task)


class Machine(RuleBasedStateMachine):
    """Callers come and leave, answers come and fail, in any order."""

    refresh_s, stale_s = 4.0, 9.0

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(_cache, "time", self.clock)
        self.world = World(self.clock)
        client = courier.Client("127.0.0.1:1")
        self.cache = courier.Cache(
            client, refresh_s=self.refresh_s, stale_s=self.stale_s, max_bytes=250, max_entries=2
        )
        self.cache._connection = self.world  # type: ignore[assignment]
        #: Those without an answer: key, when they came, their call.
        self.waiting: dict[int, tuple[int, float, CallContext]] = {}
        self.numbers = itertools.count()
        self.left: set[int] = set()

    def teardown(self) -> None:
        try:
            self.world.refuses = False
            while self.world.tasks or self.world.pending:
                while self.world.tasks:
                    self.world.tasks.pop(0)()
                if self.world.pending:
                    self._answer(0, None)
            assert not self.waiting, "somebody was not answered"
            assert all(not e.waiting and not e.is_asked for e in self.cache._entries.values())
        finally:
            self.patch.undo()

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0, 4.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(refuses=st.booleans())
    def target_can_be_called_or_not(self, refuses: bool) -> None:
        self.world.refuses = refuses

    @rule(key=st.integers(0, 3))
    def somebody_asks(self, key: int) -> None:
        number, came_at = next(self.numbers), self.clock.now
        call = CallContext("m", "test", None)
        before = self.world.asked.get(key, [])[-1:]
        asked_before = len(self.world.asked.get(key, []))
        outcome = self.cache.answer("m", pack(((key,), {})), call)
        if isinstance(outcome, Later):
            self.waiting[number] = (key, came_at, call)
            outcome.then(lambda answer: self._given(number, answer))
            return
        self._check(key, came_at, outcome)
        if len(self.world.asked.get(key, [])) > asked_before and before:
            assert self.clock.now - before[0] >= self.refresh_s, "asked too often while fresh"

    @rule(data=st.data())
    def somebody_leaves(self, data: st.DataObject) -> None:
        if self.waiting:
            number = data.draw(st.sampled_from(sorted(self.waiting)))
            call = self.waiting.pop(number)[2]
            self.left.add(number)
            call.end()

    @rule(data=st.data(), size=st.sampled_from([1, 60, 100, 400]) | st.none())
    def target_answers(self, data: st.DataObject, size: int | None) -> None:
        if self.world.pending:
            self._answer(data.draw(st.integers(0, len(self.world.pending) - 1)), size)

    @rule()
    def aside_goes_on(self) -> None:
        if self.world.tasks:
            self.world.tasks.pop(0)()

    def _answer(self, index: int, size: int | None) -> None:
        pending = self.world.pending.pop(index)
        if size is None:
            pending.reply = Raised(courier.ExceptionReport.of(FaultError()))
        else:
            # Made when it was asked for: the worst that a target can do.
            value = (pending.key, pending.asked_at, "x" * size)
            pending.reply = Returned(pack(value))
        assert pending.callback is not None
        pending.callback(pending)

    def _given(self, number: int, answer: Answer) -> None:
        if number in self.left:
            return
        key, came_at, call = self.waiting.pop(number)
        self._check(key, came_at, answer)
        call.answered()

    def _check(self, key: int, came_at: float, answer: Answer) -> None:
        if isinstance(answer, Failure):
            return
        assert isinstance(answer, Value)
        its_key, made_at, _ = unpack(answer.parcel)
        assert its_key == key
        is_own = made_at >= came_at
        assert is_own or self.clock.now - made_at <= self.stale_s, "older than allowed"

    @invariant()
    def memory_is_bounded_and_counted(self) -> None:
        kept = self.cache._kept
        assert len(kept) <= 2
        assert self.cache._bytes == sum(entry.size for entry in kept.values()) <= 250
        for key, entry in self.cache._entries.items():
            assert (entry.answer is not None) == (key in kept)
            assert entry.is_asked or entry.answer is not None
            assert entry.is_asked or not entry.waiting


TestOrdersOfEvents = Machine.TestCase
TestOrdersOfEvents.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True
)
