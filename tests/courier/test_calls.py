import asyncio
import concurrent.futures
import gc
import re
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import courier
from tests.courier.conftest import Script, Serve
from tests.courier.waiting import wait_until


class Calculator:
    def __init__(self) -> None:
        self.ended = threading.Event()

    def add(self, left: Any, right: Any = 1) -> Any:
        return left + right

    def echo(self, value: Any) -> Any:
        return value

    def apply(self, function: Any, *args: Any) -> Any:
        return function(*args)

    def count(self, end: int) -> Iterator[int]:
        try:
            yield from range(end)
        finally:
            self.ended.set()

    def arrays(self, count: int, size: int) -> Iterator[Any]:
        for index in range(count):
            yield np.full(size, index, np.uint8)

    def stumble(self) -> Iterator[int]:
        yield 1
        raise KeyError("in mid-stream")

    def unpicklable_item(self) -> Iterator[Any]:
        yield 1
        yield threading.Lock()

    def _hidden(self) -> None: ...


class Doubler:
    def __call__(self, value: int) -> int:
        return 2 * value


def test_a_method_is_called_and_waited_for_in_each_way(serve: Serve) -> None:
    _, client = serve(Calculator())
    assert client.add(1, right=2) == 3
    future = client.futures.add(1)
    assert isinstance(future, concurrent.futures.Future)
    assert future.result(20) == 2
    assert future.exception() is None
    assert courier.submit(client.add, 1, right=5).result(20) == 6

    async def call() -> list[int]:
        return await asyncio.gather(*(client.aio.add(number) for number in range(50)))

    assert asyncio.run(call()) == list(range(1, 51))


def test_type_checkers_have_spellings_of_their_own(serve: Serve) -> None:
    _, client = serve(Calculator())
    assert asyncio.run(courier.call_aio(client.add, 1, right=5)) == 6
    assert courier.as_remote(client) is client
    assert isinstance(client, courier.Remote)
    for spelling in (
        courier.as_remote,
        courier.submit,
        lambda it: asyncio.run(courier.call_aio(it)),
    ):
        with pytest.raises(TypeError, match="expected a"):
            spelling(print)


def test_a_callable_object_answers_calls_of_the_client(serve: Serve) -> None:
    _, client = serve(Doubler())
    assert client(4) == 8
    assert client.futures(5).result(20) == 10

    async def call() -> int:
        return await client.aio(6)

    assert asyncio.run(call()) == 12


def test_methods_can_be_bound_and_unbound_while_serving(serve: Serve) -> None:
    server, client = serve()
    server.bind("triple", lambda value: 3 * value)
    assert client.triple(2) == 6
    assert courier.list_methods(client) == ["triple"]
    server.unbind("triple")
    with pytest.raises(courier.UnknownMethodError, match="triple"):
        client.triple(2)


def test_only_public_methods_are_listed(serve: Serve) -> None:
    _, client = serve(Calculator())
    methods = courier.list_methods(client)
    assert "add" in methods
    assert "_hidden" not in methods
    assert "ended" not in methods


def test_lambdas_and_local_classes_travel(serve: Serve) -> None:
    class Local:
        def __init__(self, value: int) -> None:
            self.value = value

    _, client = serve(Calculator())
    offset = 10
    assert client.apply(lambda value: value + offset, 1) == 11
    assert client.echo(Local(7)).value == 7
    assert client.apply(lambda: lambda: 5)() == 5


def test_a_function_that_travelled_is_named_with_its_file(serve: Serve) -> None:
    _, client = serve(Calculator())
    with pytest.raises(ZeroDivisionError) as raised:
        client.apply(lambda value: value // 0, 1)
    where = rf'{re.escape(__file__)}", line \d+, in <lambda>'
    assert re.search(where, courier.remote_traceback(raised.value) or "")


def test_what_main_defines_travels_by_value(serve: Serve, script: Script) -> None:
    server, _ = serve(Calculator())
    caller = script(
        "class Mine:\n"
        "    def __init__(self, value): self.value = value\n"
        "    def __add__(self, other): return Mine(self.value + other.value)\n"
        "client = courier.Client(sys.argv[1], secret=secret)\n"
        "total = client.add(Mine(1), Mine(2))\n"
        "print(type(total).__name__, total.value)\n",
        server.address,
    )
    out, err = caller.communicate(timeout=60)
    assert out == "Mine 3\n", err


def test_received_arrays_are_equal_and_writable_at_every_size(serve: Serve) -> None:
    class Checker:
        def is_writable(self, array: Any) -> bool:
            array += 1
            return bool(array.flags.writeable)

        def make(self, size: int) -> Any:
            return np.arange(size)

    _, client = serve(Checker())
    for size in (0, 1, 1_000, 600_000, 2_000_000):
        assert client.is_writable(np.zeros(size))
        array = client.make(size)
        assert np.array_equal(array, np.arange(size))
        array += 1


def test_arrays_of_every_layout_travel_and_frozen_ones_stay_frozen(serve: Serve) -> None:
    _, client = serve(Calculator())
    base = np.arange(24.0).reshape(2, 3, 4)
    for array in (base, base.T, base[:, ::2], np.asfortranarray(base), base[..., 0], np.array(5)):
        assert np.array_equal(client.echo(array), array)
    base.flags.writeable = False
    assert not client.echo(base).flags.writeable


def test_the_callers_array_is_not_changed_by_the_method(serve: Serve) -> None:
    def overwrite(array: Any) -> None:
        array[:] = 7

    _, client = serve(overwrite)
    for size in (10, 2_000_000):
        array = np.zeros(size)
        client(array)
        assert not array.any()


@pytest.mark.slow
def test_many_small_arrays_cost_few_messages(serve: Serve) -> None:
    _, client = serve(Calculator())
    sent = [np.full(9, index) for index in range(70_000)]
    received = client.echo(sent)
    assert len(received) == len(sent)
    assert all((received[index] == index).all() for index in range(0, 70_000, 997))


def test_a_large_value_without_arrays_travels(serve: Serve) -> None:
    _, client = serve(Calculator())
    text = "ä" * 5_000_000
    assert client.echo(text) == text


def test_several_large_arrays_at_once_keep_apart(serve: Serve) -> None:
    _, client = serve(Calculator())
    arrays = [np.full(megabytes << 20, megabytes, np.uint8) for megabytes in (5, 40, 17, 32, 6)]
    futures = [client.futures.echo(array) for array in arrays]
    for array, future in zip(arrays, futures, strict=True):
        assert np.array_equal(future.result(60), array)


@pytest.mark.slow
def test_an_array_of_3_gib_passes_both_ways(serve: Serve) -> None:
    _, client = serve(Calculator())
    array = np.zeros(3 << 30, np.uint8)
    array[[0, 1 << 31, -1]] = 1, 2, 3
    received = client.echo(array)
    assert received.shape == array.shape
    assert received[[0, 1 << 31, -1]].tolist() == [1, 2, 3]


def test_compressed_calls_give_the_same(serve: Serve) -> None:
    _, client = serve(Calculator(), client={"compress": True})
    array = np.zeros(1_000_000)
    assert client.add(1) == 2
    assert np.array_equal(client.echo(array), array)


def test_a_generator_method_streams_its_items(serve: Serve) -> None:
    calculator = Calculator()
    _, client = serve(calculator)
    assert list(client.count(100)) == list(range(100))
    assert calculator.ended.wait(20)
    assert list(client.count(0)) == []
    assert list(client.futures.count(3).result(20)) == [0, 1, 2]

    async def collect() -> list[int]:
        return [item async for item in await client.aio.count(10)]

    assert asyncio.run(collect()) == list(range(10))


def test_a_cancelled_task_leaves_an_endless_async_iteration(serve: Serve) -> None:
    silent, ended = threading.Event(), threading.Event()

    def silence() -> Iterator[None]:
        call = courier.current_call()
        try:
            yield None
            silent.set()
            call.wait_cancelled(60)
            yield None
        finally:
            ended.set()

    _, client = serve(silence)

    async def read(arrived: asyncio.Event) -> None:
        async for _ in await client.aio():
            arrived.set()

    async def give_up() -> None:
        arrived = asyncio.Event()
        reading = asyncio.create_task(read(arrived))
        await asyncio.wait_for(arrived.wait(), 20)
        assert await asyncio.to_thread(silent.wait, 20)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

    asyncio.run(give_up())
    assert ended.wait(20)


def test_items_come_while_the_generator_still_runs_and_is_not_cancelled(serve: Serve) -> None:
    go_on = threading.Event()

    def generate() -> Iterator[bool]:
        call = courier.current_call()
        yield call.cancelled
        assert go_on.wait(20)
        yield call.cancelled

    _, client = serve(generate)
    items = client()
    assert next(items) is False
    go_on.set()
    assert next(items) is False
    with pytest.raises(StopIteration):
        next(items)


def test_a_generator_of_small_items_runs_ahead_by_a_thousand(serve: Serve) -> None:
    made: list[int] = []

    def generate() -> Iterator[int]:
        for number in range(5_000):
            made.append(number)
            yield number

    _, client = serve(generate)
    items = client()
    wait_until(lambda: len(made) > 500)
    for number in range(5_000):
        assert next(items) == number
        assert len(made) <= number + 2_000


@pytest.mark.parametrize("leave", ["close", "drop"])
def test_leaving_early_ends_the_generator(serve: Serve, leave: str) -> None:
    calculator = Calculator()
    _, client = serve(calculator)
    items = client.count(1 << 60)
    assert next(items) == 0
    if leave == "close":
        items.close()
        items.close()
        assert list(items) == []
    del items
    wait_until(calculator.ended.is_set)


def test_a_generator_that_fails_when_left_harms_nobody(serve: Serve) -> None:
    failed = threading.Event()

    def stubborn() -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            failed.set()
            raise RuntimeError("in finally")

    _, client = serve(stubborn)
    items = client()
    next(items)
    items.close()
    assert failed.wait(20)
    assert next(client()) == 1


def test_an_error_in_mid_stream_comes_after_the_items_before_it(serve: Serve) -> None:
    _, client = serve(Calculator())
    items = client.stumble()
    assert next(items) == 1
    with pytest.raises(KeyError, match="in mid-stream") as caught:
        next(items)
    assert "stumble" in (courier.remote_traceback(caught.value) or "")
    assert list(items) == []
    items = client.unpicklable_item()
    assert next(items) == 1
    with pytest.raises(courier.SerializationError, match="lock"):
        next(items)


def test_a_stream_carries_large_items(serve: Serve) -> None:
    _, client = serve(Calculator())
    sums = [int(item.sum(dtype=np.int64)) for item in client.arrays(4, 6 << 20)]
    assert sums == [index * (6 << 20) for index in range(4)]


def test_more_open_streams_than_handler_threads_all_advance(serve: Serve) -> None:
    _, client = serve(Calculator(), thread_pool_size=2)
    streams = [client.count(1 << 60) for _ in range(40)]
    assert [next(stream) for stream in streams] == [0] * 40
    assert [next(stream) for stream in streams] == [1] * 40
    for stream in streams:
        stream.close()


def test_five_thousand_calls_in_flight_each_get_their_own_reply(serve: Serve) -> None:
    _, client = serve(Calculator())
    futures = [client.futures.echo(number) for number in range(5_000)]
    assert [future.result(60) for future in futures] == list(range(5_000))


def test_a_blocking_callback_does_not_delay_other_calls(serve: Serve) -> None:
    _, client = serve(Calculator())
    release, entered = threading.Event(), threading.Event()

    def block(future: Any) -> None:
        entered.set()
        release.wait(30)

    client.futures.add(1).add_done_callback(block)
    try:
        # The callback may also have run in this thread's stead, before it was added.
        assert entered.wait(20)
        assert client.futures.add(2).result(20) == 3
    finally:
        release.set()


def test_callbacks_run_in_order_and_a_failing_one_does_not_stop_the_next(serve: Serve) -> None:
    go_on = threading.Event()
    _, client = serve(lambda: go_on.wait(20))
    ran: list[int] = []
    done = threading.Event()
    future = client.futures()
    future.add_done_callback(lambda _: ran.append(1))
    future.add_done_callback(lambda _: 1 / 0)
    future.add_done_callback(lambda _: ran.append(2))
    future.add_done_callback(lambda _: done.set())
    go_on.set()
    assert done.wait(20)
    assert ran == [1, 2]


def test_wait_and_as_completed_know_our_futures(serve: Serve) -> None:
    _, client = serve(Calculator())
    futures = [client.futures.add(number) for number in range(20)]
    assert concurrent.futures.wait(futures, 20).done == set(futures)
    futures = [client.futures.add(number) for number in range(20)]
    results = [future.result() for future in concurrent.futures.as_completed(futures, 20)]
    assert sorted(results) == list(range(1, 21))


class Marked:
    """Weakly referable, so that a test sees it go."""


def test_a_served_argument_and_a_result_are_not_kept(serve: Serve) -> None:
    seen: list[weakref.ref[Any]] = []

    def take(value: Any) -> Any:
        seen.append(weakref.ref(value))
        return Marked()

    _, client = serve(take)
    gc.disable()  # nothing may wait for the collector: the values may be gigabytes
    try:
        future = client.futures(Marked())
        result = weakref.ref(future.result(20))
        del future
        wait_until(lambda: result() is None)
        wait_until(lambda: seen[0]() is None)
    finally:
        gc.enable()


def test_what_cannot_be_pickled_is_named_and_harms_no_thread(serve: Serve) -> None:
    class Poison:
        def __reduce__(self) -> Any:
            return exec, ("import sys; sys.exit(3)",)

    class Unwilling:
        def __reduce__(self) -> Any:
            raise SystemExit

    _, client = serve(Calculator())
    for make in (Poison, Unwilling, lambda: __import__("threading").Lock()):
        with pytest.raises(courier.SerializationError, match="apply"):
            client.apply(make)
        with pytest.raises(courier.SerializationError, match="apply"):
            client.futures.apply(make).result(20)
    with pytest.raises(courier.SerializationError):
        client.echo(Poison())
    with pytest.raises(courier.SerializationError, match=r"arguments of 'echo'.*lock"):
        client.echo(threading.Lock())
    assert client.add(1) == 2
