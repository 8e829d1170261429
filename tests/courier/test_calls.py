import asyncio
import concurrent.futures
import contextlib
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
from tests.courier.served import Node
from tests.courier.waiting import wait_until

_PATIENCE_S = 20.0


# Ways to call


def test_a_method_is_called_and_waited_for_in_each_way(serve: Serve, node: Node, mode: str) -> None:
    _, client = serve(node, in_process=mode)
    assert client.echo(1) == client.echo(value=1) == 1
    assert courier.submit(client.echo, value=6).result(_PATIENCE_S) == 6
    futures = [client.futures.echo(number) for number in range(5_000)]
    assert isinstance(futures[0], concurrent.futures.Future)
    # It does not call the constructor of the standard library, which takes too long.
    assert all(hasattr(futures[0], name) for name in vars(concurrent.futures.Future()))
    assert [future.result(_PATIENCE_S) for future in futures] == list(range(5_000))
    assert futures[0].exception() is None
    futures = [client.futures.echo(number) for number in range(20)]
    assert concurrent.futures.wait(futures, _PATIENCE_S).done == set(futures)
    futures = [client.futures.echo(number) for number in range(20)]
    completed = concurrent.futures.as_completed(futures, _PATIENCE_S)
    assert sorted(future.result() for future in completed) == list(range(20))
    called: list[int] = []
    for future in (*futures, *(client.futures.echo(number) for number in range(20))):
        future.add_done_callback(lambda it: called.append(it.result()))
    wait_until(lambda: len(called) == 40)
    assert sorted(called) == sorted([*range(20)] * 2)

    async def call() -> Any:
        return await asyncio.gather(*(client.aio.echo(number) for number in range(300)))

    assert asyncio.run(call()) == list(range(300))


def test_functions_that_type_checkers_follow_take_methods_and_clients(
    serve: Serve, node: Node
) -> None:
    _, client = serve(node)
    _, double = serve(lambda value: 2 * value)
    assert courier.submit(client.futures.echo, 6).result(_PATIENCE_S) == 6
    assert courier.submit(double, 4).result(_PATIENCE_S) == 8

    async def call() -> Any:
        items = [item async for item in courier.call_aio(client.count, end=3)]
        return (
            await courier.call_aio(client.echo, value=6),
            await courier.call_aio(double, 4),
            items,
        )

    assert asyncio.run(call()) == (6, 8, [0, 1, 2])
    for function in (courier.submit, courier.call_aio):
        with pytest.raises(TypeError, match="expected a method of a courier client, got <built-in"):
            function(print)


def test_public_methods_are_listed_and_more_can_be_bound_and_unbound(
    serve: Serve, node: Node
) -> None:
    server, client = serve(node)
    methods = set(courier.list_methods(client))
    assert methods >= {"echo", "count"}
    assert not methods & {"_enter", "entered", "kept"}
    server.bind("triple", lambda value: 3 * value)
    assert client.triple(2) == 6
    assert set(courier.list_methods(client)) == methods | {"triple"}
    server.unbind("triple")
    with pytest.raises(courier.UnknownMethodError, match="triple"):
        client.triple(2)


def test_a_handler_may_call_its_own_server(serve: Serve, mode: str) -> None:
    client: Any = None

    def factorial(number: int) -> int:
        return 1 if number == 0 else number * client(number - 1)

    _, client = serve(factorial, in_process=mode, thread_pool_size=8)
    with concurrent.futures.ThreadPoolExecutor(1) as aside:
        calls = aside.submit(lambda: [client(5) for _ in range(100)])
        assert calls.result(_PATIENCE_S) == [120] * 100
    assert client(5) == 120


# Values


def test_functions_and_local_classes_travel(serve: Serve, node: Node) -> None:
    class Local:
        def __init__(self, value: int) -> None:
            self.value = value

    _, client = serve(node)
    offset = 10
    assert client.apply(lambda value: value + offset, 1) == 11
    assert client.echo(Local(7)).value == 7
    assert client.apply(lambda: lambda: 5)() == 5
    with pytest.raises(ZeroDivisionError) as raised:
        client.apply(lambda value: value // 0, 1)
    where = rf'{re.escape(__file__)}", line \d+, in <lambda>'
    assert re.search(where, courier.remote_traceback(raised.value) or "")


def test_what_main_defines_travels_by_value(serve: Serve, node: Node, script: Script) -> None:
    server, _ = serve(node)
    caller = script(
        "class Mine:\n"
        "    def __init__(self, value): self.value = value\n"
        "    def plus(self, other): return Mine(self.value + other.value)\n"
        "client = courier.Client(sys.argv[1], secret=secret)\n"
        "total = client.apply(Mine(1).plus, Mine(2))\n"
        "print(type(total).__name__, total.value)\n",
        server.address,
    )
    assert caller.output() == "Mine 3"


@pytest.mark.slow
def test_an_array_of_3_gib_passes_both_ways(serve: Serve, node: Node) -> None:
    _, client = serve(node)
    array = np.zeros(3 << 30, np.uint8)
    array[[0, 1 << 31, -1]] = 1, 2, 3
    received = client.echo(array)
    assert received.shape == array.shape
    assert received[[0, 1 << 31, -1]].tolist() == [1, 2, 3]


class Marked:
    """Weakly referable, so that a test sees it go."""


def test_what_a_call_brings_and_takes_is_not_kept(serve: Serve, mode: str) -> None:
    seen: list[weakref.ref[Any]] = []

    def take(value: Any) -> Any:
        seen.append(weakref.ref(value))
        return Marked()

    server, client = serve(take, in_process=mode)
    server.bind("again", courier.idempotent(lambda value: None))
    gc.disable()  # nothing may wait for the collector: the values may be gigabytes
    try:
        argument, array = Marked(), np.zeros(1 << 18)
        mine = [weakref.ref(argument), weakref.ref(array)]
        future = client.futures(argument)
        result = weakref.ref(future.result(_PATIENCE_S))
        client(argument)
        client.again(array)  # kept until it need not be repeated
        del argument, array, future
        wait_until(lambda: result() is None)
        wait_until(lambda: all(each() is None for each in (*seen, *mine)))
    finally:
        gc.enable()


# Generators


def test_a_generator_method_streams_its_items(serve: Serve, node: Node, mode: str) -> None:
    _, client = serve(node, in_process=mode)
    assert list(client.count(500)) == list(range(500))
    assert node.generator_ended.wait(_PATIENCE_S)
    assert list(client.count(0)) == []
    assert list(client.futures.count(5).result(_PATIENCE_S)) == [0, 1, 2, 3, 4]

    async def collect() -> list[int]:
        return [item async for item in await client.aio.count(5)]

    assert asyncio.run(collect()) == [0, 1, 2, 3, 4]


def test_an_error_in_mid_stream_comes_after_the_items_before_it(
    serve: Serve, node: Node, mode: str
) -> None:
    _, client = serve(node, in_process=mode)
    items = client.fail_later()
    assert next(items) == 1
    with pytest.raises(KeyError, match="in mid-stream") as caught:
        next(items)
    assert "fail_later" in (courier.remote_traceback(caught.value) or "")
    assert list(items) == []


def test_items_come_while_the_generator_still_runs_and_is_not_cancelled(serve: Serve) -> None:
    go_on = threading.Event()

    def generate() -> Iterator[bool]:
        call = courier.current_call()
        yield call.cancelled
        assert go_on.wait(_PATIENCE_S)
        yield call.cancelled

    _, client = serve(generate)
    items = client()
    assert next(items) is False
    go_on.set()
    assert list(items) == [False]


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
def test_leaving_early_ends_the_generator(serve: Serve, node: Node, mode: str, leave: str) -> None:
    _, client = serve(node, in_process=mode)
    items = client.count(1 << 60)
    assert next(items) == 0
    if leave == "close":
        items.close()
        items.close()
        assert list(items) == []
    del items
    gc.collect()
    assert node.generator_ended.wait(_PATIENCE_S)


def test_a_cancelled_task_leaves_an_endless_async_iteration(serve: Serve, node: Node) -> None:
    _, client = serve(node)

    async def read(arrived: asyncio.Event) -> None:
        async for _ in await client.aio.one_then_wait():
            arrived.set()

    async def give_up() -> None:
        arrived = asyncio.Event()
        reading = asyncio.create_task(read(arrived))
        await asyncio.wait_for(arrived.wait(), _PATIENCE_S)
        await asyncio.to_thread(node.await_calls)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

    asyncio.run(give_up())
    node.release.set()
    assert node.generator_ended.wait(_PATIENCE_S)


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
    assert failed.wait(_PATIENCE_S)
    with contextlib.closing(client()) as items:
        assert next(items) == 1


def test_open_streams_hold_no_handler_and_all_advance(serve: Serve, node: Node, mode: str) -> None:
    _, client = serve(node, in_process=mode, thread_pool_size=1)
    streams = [client.count(1 << 60) for _ in range(40)]
    assert [next(stream) for stream in streams] == [0] * 40
    assert client.echo(1) == 1
    assert [next(stream) for stream in streams] == [1] * 40
    for stream in streams:
        stream.close()


# Callbacks


def test_a_blocking_callback_does_not_delay_other_calls(serve: Serve, node: Node) -> None:
    _, client = serve(node)
    release, entered = threading.Event(), threading.Event()

    def block(future: Any) -> None:
        entered.set()
        release.wait(30)

    client.futures.echo(1).add_done_callback(block)
    try:
        # The callback may also have run in this thread's stead, before it was added.
        assert entered.wait(_PATIENCE_S)
        assert client.futures.echo(2).result(_PATIENCE_S) == 2
    finally:
        release.set()


def test_callbacks_run_in_order_and_a_failing_one_does_not_stop_the_next(
    serve: Serve, node: Node, mode: str
) -> None:
    _, client = serve(node, in_process=mode, thread_pool_size=1)
    ran: list[Any] = []
    done = threading.Event()
    future = client.futures.block()
    future.add_done_callback(lambda _: ran.append(1))
    future.add_done_callback(lambda _: 1 / 0)
    future.add_done_callback(lambda it: ran.append((it.result(), client.echo("called again"))))
    future.add_done_callback(lambda _: done.set())
    node.release.set()
    assert done.wait(_PATIENCE_S)
    assert ran == [1, ("released", "called again")]


def test_a_callback_that_hears_of_a_stop_is_told_in_one_line(
    serve: Serve, node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    _, client = serve(node)
    future = client.futures.block()
    future.add_done_callback(lambda it: it.result())
    node.await_calls()
    courier.close(client, "the program has ended")
    wait_until(lambda: "a callback failed" in caplog.text)
    future.add_done_callback(lambda it: it.result())  # that is too late, and called at once
    records = [each for each in caplog.records if "a callback failed" in each.getMessage()]
    assert len(records) == 2
    assert all("has ended" in each.getMessage() and not each.exc_info for each in records)


def test_thousands_of_futures_with_a_timeout_need_no_thread_each(
    serve: Serve, node: Node, mode: str
) -> None:
    _, client = serve(node, in_process=mode, thread_pool_size=1, client={"call_timeout": 60})
    blocker = client.futures.block()
    node.await_calls()
    before = threading.active_count()
    futures = [client.futures.echo(index) for index in range(1000)]
    threads = threading.active_count() - before
    node.release.set()
    assert [future.result(_PATIENCE_S) for future in futures] == list(range(1000))
    assert blocker.result(_PATIENCE_S) == "released"
    assert threads < 50
