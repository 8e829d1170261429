"""A cache: how old what it answers may be, who is called how often, and what passes through."""

import concurrent.futures
import gc
import math
import resource
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import courier
from courier import lowlevel
from courier.server import cache
from tests.courier import fuzzing, shared_memory
from tests.courier.conftest import Connect, Reserve, Serve
from tests.courier.waiting import wait_until

_SIZE = 1 << 17  # of eight bytes each: more than what is sent inline


class Clock:
    """Time passes when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


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
        return (item for item in [self.count()]) if streams else self.count()


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

    def __init__(self, serve: Serve, connect: Connect, **options: Any) -> None:
        self.target = Target()
        target_options = options.pop("target_options", {})
        cache_options = options.pop("cache_options", {})
        client_options = options.pop("client_options", {})
        self.server, self.direct = serve(self.target, client=client_options, **target_options)
        self.clock = Clock()
        options = {"refresh_s": 10.0, "stale_s": 30.0, "clock": self.clock, **options}
        self.cache = courier.Cache(self.direct, **options)
        self.cache_server, self.client = serve(self.cache, **cache_options)
        self._connect = connect

    def another(self) -> Any:
        return self._connect(self.cache_server.address)

    def hold(self, count: int = 1) -> list[Any]:
        """Has so many callers wait for the target, which waits for `target.go`."""
        calls = [self.client.futures.held() for _ in range(count)]
        assert self.target.entered.acquire(timeout=20)
        wait_until(lambda: self.waiting == count)
        return calls

    @property
    def waiting(self) -> int:
        """Callers that wait."""
        with self.cache._lock:
            return sum(len(entry.waiting) for entry in self.cache._entries.values())

    @property
    def memory(self) -> tuple[int, int]:
        """Answers, and calls on their way; and the bytes of them."""
        with self.cache._lock:
            return len(self.cache._entries), self.cache._bytes

    def is_calm(self) -> bool:
        with self.cache._lock:
            return not any(entry.is_asked for entry in self.cache._entries.values())


Make = Callable[..., Room]


@pytest.fixture
def make(serve: Serve, connect: Connect) -> Make:
    return lambda **options: Room(serve, connect, **options)


# How old an answer is


def test_an_answer_is_given_again_until_it_is_old_and_waited_for_only_when_stale(
    make: Make,
) -> None:
    room = make()
    assert [room.client.count() for _ in range(5)] == [1] * 5
    room.clock.now += 9.9
    assert room.client.count() == 1
    assert room.target.calls == 1
    room.clock.now += 0.1  # time to refresh: in vain for who comes now
    assert room.client.count() == 1
    wait_until(lambda: room.target.calls == 2 and room.is_calm())
    assert [room.client.count() for _ in range(3)] == [2] * 3
    room.clock.now += 30.1
    assert room.is_calm()  # nobody is called while nobody asks
    assert room.target.calls == 2
    assert room.client.count() == 3


def test_calls_at_once_are_one_call(make: Make) -> None:
    room = make(refresh_s=0)
    clients = [room.another() for _ in range(4)]
    futures = [client.futures.held("x") for client in clients for _ in range(5)]
    other = room.client.futures.held("y")
    wait_until(lambda: room.waiting == 21)
    room.target.go.release()
    room.target.go.release()
    results = {future.result(20) for future in futures}
    assert results | {other.result(20)} == {1, 2}
    assert room.target.calls == 2


# Errors


class FaultError(Exception):
    pass


def test_errors_reach_the_caller_and_are_not_kept(make: Make) -> None:
    room = make()
    room.target.error = ValueError("broke")
    for calls in (1, 2):
        with pytest.raises(ValueError, match="broke"):
            room.client.count()
        assert room.target.calls == calls
    room.target.error = None
    assert room.client.count() == 3
    room.clock.now += 15
    room.target.error = ValueError("broke again")
    assert room.client.count() == 3
    wait_until(lambda: room.target.calls == 4 and room.is_calm())
    assert room.client.count() == 3  # and is not asked again at once
    assert room.target.calls == 4
    room.clock.now += 16
    with pytest.raises(ValueError, match="broke again"):
        room.client.count()
    room.target.error = None
    assert room.client.count() == 6


def test_an_answer_for_which_there_is_no_memory_is_an_error_and_the_next_is_asked_for(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = make()

    def fail(*_: object, **__: object) -> Any:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(cache, "freeze", fail)
        with pytest.raises(MemoryError, match="no room"):
            room.client.count()
    assert room.client.count() == 2


def test_what_cannot_be_answered_is_said_each_time(make: Make) -> None:
    room = make()
    with pytest.raises(courier.UnknownMethodError, match=r"'nothing'.*there are: .*count"):
        room.client.nothing()
    for calls in (1, 2):
        with pytest.raises(courier.SerializationError, match=r"(?i)lock"):
            room.client.unpicklable()
        assert room.target.calls == calls
    assert room.memory == (0, 0)
    with pytest.raises(courier.SerializationError, match=r"(?i)lock"):
        room.client.count(threading.Lock())


def test_a_closed_client_of_the_target_fails_calls_that_need_it(make: Make) -> None:
    room = make()
    assert room.client.count() == 1
    (waiting,) = room.hold()
    courier.close(room.direct)
    with pytest.raises(courier.CourierError, match="closed"):
        waiting.result(20)
    room.target.go.release()
    room.clock.now += 11
    assert room.client.count() == 1
    room.clock.now += 20
    for _ in range(2):
        with pytest.raises(courier.CourierError, match="closed"):
            room.client.count()
    assert room.memory == (0, 0)


def test_the_options_of_the_client_of_the_target_count(make: Make) -> None:
    room = make(client_options={"call_timeout": 0.05})
    with pytest.raises(courier.CallTimeoutError):
        room.client.held()
    room.target.go.release()
    assert room.memory == (0, 0)
    room = make(client_options={"wait_for_ready": False})
    assert room.client.count() == 1
    room.server.stop(0.0)
    room.clock.now += 31
    with pytest.raises(courier.ServerGoneError):
        room.client.count()


def test_a_target_that_is_lost_and_comes_back(make: Make, serve: Serve, reserve: Reserve) -> None:
    there = {"port": reserve(), "share_port": True}
    room = make(target_options=there)
    assert room.client.count() == 1
    (hanging,) = room.hold()
    room.server.stop(0.0)
    with pytest.raises(courier.ServerLostError):
        hanging.result(20)
    room.target.go.release()
    room.clock.now += 15
    assert room.client.count() == 1
    room.clock.now += 20
    waiting = room.client.futures.count()
    second = Target()
    second.calls = 40
    serve(second, **there)
    assert waiting.result(30) > 40
    wait_until(lambda: room.client.count() > 40)


def test_a_node_that_is_to_end_still_answers_but_refreshes_no_more(make: Make) -> None:
    room = make()
    assert room.client.count() == 1
    lowlevel.stop_calling(room.direct)
    room.clock.now += 15
    assert room.client.count() == 1
    wait_until(room.is_calm)
    assert room.target.calls == 1
    room.clock.now += 20
    assert room.client.count() == 2
    assert next(room.client.items(1))[0] == 0


# Callers that leave


def test_callers_that_time_out_or_leave_do_not_pile_up(make: Make) -> None:
    room = make()
    impatient = courier.with_timeout(room.client, 0.02)
    for _ in range(3):
        with pytest.raises(courier.CallTimeoutError):
            impatient.held()
    courier.close(impatient)
    leaving = room.another()
    futures = [leaving.futures.held() for _ in range(3)]
    wait_until(lambda: room.waiting == 3)
    courier.close(leaving)
    assert all(isinstance(f.exception(20), courier.CallCancelledError) for f in futures)
    wait_until(lambda: not room.waiting)
    staying = room.client.futures.held()
    room.target.go.release()
    assert staying.result(20) == 1
    assert room.client.held() == 1
    assert room.target.calls == 1


# What passes


def test_arguments_tell_answers_apart(make: Make, way: dict[str, Any]) -> None:
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


def test_what_a_caller_writes_nobody_else_sees(make: Make, way: dict[str, Any]) -> None:
    room = make(target_options=way, cache_options=way)
    first, second = room.client.params(), room.another().params()
    for result in (first, second):
        assert not result["w"].any()
        result["w"][:] = 7
        result["b"][:] = 7
    third = room.client.params()
    assert not third["w"].any()
    assert not (third["b"] - 1).any()
    assert not room.target.array.any()
    room.target.array[:] = 9
    assert not room.client.params()["w"].any()
    assert room.target.calls == 1


def test_nothing_is_unpickled_or_pickled_again(make: Make) -> None:
    room = make()
    Touchy.events.clear()
    for _ in range(3):
        room.client.custom()
    assert Touchy.events == ["pickled", "unpickled", "unpickled", "unpickled"]
    Touchy.events.clear()
    list(room.client.custom_items())
    assert Touchy.events == ["pickled", "unpickled"]


def test_generators_pass_and_each_reader_has_its_own(make: Make, way: dict[str, Any]) -> None:
    room = make(target_options=way, cache_options=way)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for reading in [pool.submit(lambda: list(room.client.items(4))) for _ in range(4)]:
            items = reading.result(30)
            assert [index for index, _ in items] == [0, 1, 2, 3]
            assert all((array == index).all() for index, array in items)
    assert room.target.calls == 4
    for _ in range(2):
        items = room.client.fails_late()
        assert next(items) == 1
        with pytest.raises(KeyError, match="late"):
            next(items)
    # A method may be a generator at times only.
    assert list(room.client.either(True)) == [5]
    assert list(room.client.either(True)) == [6]
    room.client.either(False)
    result = room.client.either(False)
    assert [room.client.either(False) for _ in range(3)] == [result] * 3


def test_a_generator_whose_reader_leaves_ends(make: Make) -> None:
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


def test_what_is_bound_to_its_server_is_served_beside(make: Make) -> None:
    room = make()
    courier.wait_until_ready(room.client, 30)
    assert courier.list_methods(room.client) == courier.list_methods(room.direct)
    room.cache_server.bind("here", lambda value: value + 1)
    assert room.client.here(1) == 2
    assert room.client.count() == 1
    room.cache_server.unbind("here")
    with pytest.raises(courier.UnknownMethodError):
        room.client.here(1)


@pytest.mark.parametrize("way", ["wire", "copy"])
def test_many_threads_get_answers_that_are_right(make: Make, way: str) -> None:
    options = {"in_process": way}
    room = make(
        target_options=options,
        cache_options=options,
        refresh_s=0,
        stale_s=0.001,
        max_entries=3,
        clock=time.monotonic,
    )

    def read(number: int) -> set[bool]:
        keys = [(number + index) % 6 for index in range(30)]
        return {room.client.blob(key, 5000) == bytes([key]) * 5000 for key in keys}

    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        assert all(right == {True} for right in threads.map(read, range(6)))
    wait_until(room.is_calm)


# Memory


def test_what_was_not_wanted_for_longest_goes_first(make: Make) -> None:
    room = make(max_entries=2)
    for key in (1, 2, 1, 3, 1):
        room.clock.now += 0.1
        room.client.blob(key, 10)
    assert room.target.calls == 3
    for key in (2, 1):
        room.client.blob(key, 10)
        assert room.target.calls == 4


def test_answers_of_too_many_bytes_are_given_and_not_kept(make: Make) -> None:
    room = make(max_bytes=10_000)
    for calls in (1, 2):
        assert len(room.client.blob(1, 20_000)) == 20_000
        assert room.target.calls == calls
    assert room.memory == (0, 0)
    for key in range(5):
        room.client.blob(key, 4_000)
    assert room.memory[0] == 2
    assert 8_000 < room.memory[1] <= 10_000
    # What nobody wanted for long goes, and what is stale and cannot be replaced.
    room.clock.now += 31
    room.client.blob(6, 10)
    assert room.memory[0] == 1
    room.clock.now += 31
    room.target.error = FaultError()
    with pytest.raises(FaultError):
        room.client.blob(6, 10)
    assert room.memory == (0, 0)


def test_refreshing_a_large_array_takes_no_more_and_more_descriptors(make: Make) -> None:
    room = make(refresh_s=0, stale_s=0)
    counts = []
    gc.disable()  # answers are freed when they are not needed any more, not some time later
    try:
        for index in range(40):
            room.clock.now += 1
            room.target.array = np.full(_SIZE, index)
            assert (room.client.params()["w"] == index).all()
            counts.append(len(fuzzing.descriptors()))
    finally:
        gc.enable()
    # Some mappings linger in either process until their segment is used again.
    assert max(counts[20:]) <= max(counts[:20]) + 15
    assert room.memory[0] == 1


def test_arrays_beyond_the_descriptors_of_a_process_lie_in_its_own_memory(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A quarter of what a process may have is for answers.
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4 * 12, 4 * 12))
    room = make()
    before = shared_memory.descriptors()
    for count in (4, 8, 3):
        for _ in range(2):
            result = room.client.many(count, _SIZE)
            for index, array in enumerate(result):
                assert (array == index).all()
                array[:] = -1
            del result, array
    assert room.target.calls == 3
    assert shared_memory.descriptors() <= before + 3 * 12  # readers of this process map them too


# How it is made


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
def test_what_is_no_client_and_numbers_that_contradict_are_refused(
    connect: Connect, options: dict[str, Any], match: str
) -> None:
    client = connect("127.0.0.1:1")
    with pytest.raises(ValueError, match=match):
        courier.Cache(client, **options)
    for thing in (None, "host:1", Target(), client.futures):
        with pytest.raises(TypeError, match="courier client"):
            courier.Cache(thing, refresh_s=1, stale_s=2)
