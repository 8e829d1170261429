import asyncio
import concurrent.futures
import contextlib
import contextvars
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import courier
from tests.courier.conftest import Script, Serve
from tests.courier.waiting import wait_until

_PATIENCE_S = 20.0
#: A busy machine may use up all of a short timeout before the handler runs.
_TRIES = 20
everywhere = pytest.mark.parametrize("mode", ["copy", "share", "wire"])
_variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


class Node:
    def __init__(self) -> None:
        self.kept: Any = None
        self.started = threading.Event()
        self.release = threading.Event()
        self.cancelled = threading.Event()
        self.generator_ended = threading.Event()
        self.linger_s = 0.0
        self.runs = 0

    def echo(self, value: Any) -> Any:
        return value

    def keep(self, value: Any) -> Any:
        self.kept = value
        return value

    def thread(self) -> threading.Thread:
        return threading.current_thread()

    def thread_number(self) -> int:
        return threading.get_ident()

    def fail(self) -> None:
        raise KeyError("as asked")

    def fail_with(self, error: BaseException) -> None:
        raise error

    def lock(self) -> Any:
        return threading.Lock()

    def call(self, function: Any) -> Any:
        return function()

    def wait(self) -> str:
        self.runs += 1
        self.started.set()
        self.release.wait(60)
        return "released"

    def hang(self) -> str:
        self.started.set()
        courier.current_call().wait_cancelled(60)
        self.cancelled.set()
        self.release.wait(self.linger_s)
        return "too late"

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def describe_call(self) -> tuple[str, str, bool, bool]:
        call = courier.current_call()
        return call.method, call.peer, call.time_remaining() is None, call.cancelled

    def variable(self) -> str:
        value = _variable.get()
        _variable.set("set by a handler")
        return value

    def starts_a_loop(self) -> str:
        async def answer() -> str:
            return "from a loop"

        return asyncio.run(answer())

    def count(self, end: int) -> Iterator[int]:
        try:
            yield from range(end)
        finally:
            self.generator_ended.set()

    def arrays(self) -> Iterator[Any]:
        self.kept = np.zeros(3)
        for _ in range(3):
            yield self.kept

    def stumble(self) -> Iterator[int]:
        yield 1
        raise KeyError("in mid-stream")

    def one_then_wait(self) -> Iterator[int]:
        try:
            yield 1
            self.started.set()
            self.release.wait(60)
            yield 2
        finally:
            self.generator_ended.set()


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    made.release.set()


@pytest.fixture(params=["copy", "share"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _in_thread(function: Callable[[], Any]) -> Any:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result(_PATIENCE_S)


def _came_from_here(peer: str) -> bool:
    return "own" in peer


def _make_fast(client: Any, method: str, *args: Any) -> None:
    for _ in range(50):
        getattr(client, method)(*args)


def test_copies_are_the_default(secret: courier.Secret) -> None:
    node = Node()
    with courier.Server(node, secret=secret) as server:
        client = courier.Client(server.address, secret=secret)
        array = np.zeros(3)
        result = client.keep(array)
        assert _came_from_here(client.describe_call()[1])
        courier.close(client)
    assert node.kept is not array
    assert result is not node.kept


@pytest.mark.parametrize("size", [3, 1 << 10, 1 << 18, 1 << 20])
def test_copied_arrays_are_independent_on_all_sides(serve: Serve, node: Node, size: int) -> None:
    _, client = serve(node, in_process="copy")
    array = np.zeros(size)
    for call in (client.keep, lambda value: client.futures.keep(value).result(_PATIENCE_S)):
        array[:] = 0
        result = call(array)
        array[:] = 1
        result[:] = 2
        assert (node.kept == 0).all()
        node.kept[:] = 3
        assert (array == 1).all()
        assert (result == 2).all()
    value = [bytearray(b"abc")]
    result = client.keep(value)
    value[0][:] = result[0][:] = b"xyz"
    assert node.kept == [b"abc"]


def test_copied_arrays_keep_what_they_are(serve: Serve, node: Node) -> None:
    _, client = serve(node, in_process="copy")
    base = np.arange(1 << 16).reshape(256, 256)
    for array in (base, np.asfortranarray(base), base[::2, ::3], base[::-1], base[:0]):
        result = client.echo(array)
        np.testing.assert_array_equal(result, array)
        assert result.flags.writeable
    base.flags.writeable = False
    assert not client.echo(base).flags.writeable


def test_shared_objects_are_the_same_on_both_sides(serve: Serve, node: Node) -> None:
    _, client = serve(node, in_process="share")
    for value in (object(), np.zeros(3), [1], threading.Lock(), lambda: None):
        assert client.keep(value) is value
        assert node.kept is value
        assert client.futures.keep(value).result(_PATIENCE_S) is value
        assert asyncio.run(_await(client.aio.keep, value)) is value
    assert all(item is node.kept for item in client.arrays())
    _, copying = serve(node, in_process="copy")
    assert not any(item is node.kept for item in copying.arrays())


async def _await(method: Any, *args: Any) -> Any:
    return await method(*args)


def test_what_cannot_be_pickled_is_refused_where_copies_are_made(serve: Serve, node: Node) -> None:
    _, client = serve(node, in_process="copy")
    with pytest.raises(courier.SerializationError, match="arguments of 'echo'"):
        client.echo(threading.Lock())
    with pytest.raises(courier.SerializationError, match=r"lock: .*result"):
        client.lock()
    assert client.echo(1) == 1


def test_calls_by_the_wire_come_from_a_socket(serve: Serve, node: Node) -> None:
    _, client = serve(node, in_process="wire")
    assert not _came_from_here(client.describe_call()[1])
    assert client.keep([]) is not node.kept


def test_an_unknown_way_is_a_value_error(secret: courier.Secret) -> None:
    with pytest.raises(ValueError, match="teleport"):
        courier.Server(Node(), secret=secret, in_process="teleport")  # type: ignore[arg-type]


@everywhere
def test_exceptions_carry_the_traceback_of_the_method(serve: Serve, node: Node, mode: str) -> None:
    _, client = serve(node, in_process=mode)
    _make_fast(client, "echo", 1)
    with pytest.raises(KeyError, match="as asked") as caught:
        client.fail()
    assert "in fail" in (courier.remote_traceback(caught.value) or "")
    with pytest.raises(KeyError, match="as asked"):
        client.futures.fail().result(_PATIENCE_S)


@everywhere
@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_no_exception_of_a_method_harms_the_server(
    serve: Serve, node: Node, mode: str, error: BaseException
) -> None:
    _, client = serve(node, in_process=mode)
    for _ in range(3):
        with pytest.raises(courier.RemoteError, match=type(error).__name__):
            client.fail_with(error)
        assert client.echo(1) == 1


def test_unknown_methods_and_private_ones_are_refused(serve: Serve, node: Node, mode: str) -> None:
    _, client = serve(node, in_process=mode)
    with pytest.raises(courier.UnknownMethodError, match="nothing"):
        client.nothing()
    assert "echo" in courier.list_methods(client)
    courier.wait_until_ready(client, _PATIENCE_S)


def test_a_handler_knows_its_call(serve: Serve, node: Node, mode: str) -> None:
    _, client = serve(node, in_process=mode)
    timed = courier.with_timeout(client, 30)
    for caller, is_endless in ((client, True), (timed, False)):
        method, peer, endless, cancelled = caller.describe_call()
        assert (method, endless, cancelled) == ("describe_call", is_endless, False)
        assert _came_from_here(peer)
    with pytest.raises(RuntimeError, match="inside a method"):
        courier.current_call()


def test_a_fast_method_runs_in_the_thread_of_a_caller_who_waits(
    serve: Serve, node: Node, mode: str
) -> None:
    _, client = serve(node, in_process=mode)

    # A run that the system interrupts is not fast, so that the next may be elsewhere again.
    _in_thread(lambda: wait_until(lambda: client.thread_number() == threading.get_ident()))


def test_a_method_that_has_not_shown_to_be_fast_runs_in_a_thread_of_the_server(
    serve: Serve, node: Node
) -> None:
    _, client = serve(node, in_process="share")
    assert _in_thread(client.thread).name.startswith("courier-handler")

    def slow_then_fast() -> str:
        _make_fast(client, "call", threading.current_thread)
        for _ in range(20):
            client.call(lambda: time.sleep(0.01))
        return str(client.call(threading.current_thread).name)

    assert _in_thread(slow_then_fast).startswith("courier-handler")


def test_no_method_runs_in_the_main_thread(serve: Serve, node: Node) -> None:
    assert threading.current_thread() is threading.main_thread()
    _, client = serve(node, in_process="share")
    _make_fast(client, "thread")
    assert client.thread().name.startswith("courier-handler")


def test_no_method_runs_below_an_event_loop(serve: Serve, node: Node) -> None:
    _, client = serve(node, in_process="share")

    async def call() -> list[str]:
        await asyncio.sleep(0)
        names = [client.thread().name, (await client.aio.thread()).name]
        return [*names, client.starts_a_loop()]

    def in_a_loop() -> list[str]:
        _make_fast(client, "thread")
        for _ in range(50):
            client.starts_a_loop()
        return asyncio.run(call())

    first, second, text = _in_thread(in_a_loop)
    assert first.startswith("courier-handler")
    assert second.startswith("courier-handler")
    assert text == "from a loop"


def test_methods_see_the_context_of_who_made_the_server(
    serve: Serve, node: Node, mode: str
) -> None:
    token = _variable.set("of the maker")
    try:
        _, client = serve(node, in_process=mode)
    finally:
        _variable.reset(token)

    def in_another_context() -> None:
        _variable.set("of the caller")
        for _ in range(60):
            assert client.variable() == "of the maker"
        assert _variable.get() == "of the caller"

    _in_thread(in_another_context)
    assert client.variable() == "of the maker"


@pytest.mark.parametrize("size", [1, 3])
def test_no_more_handlers_run_at_once_than_threads_were_given(
    serve: Serve, connect: Callable[..., Any], mode: str, size: int, script: Script
) -> None:
    lock = threading.Lock()
    running = most = total = 0

    def enter(seconds: float) -> None:
        nonlocal running, most, total
        with lock:
            running += 1
            total += 1
            most = max(most, running)
        if seconds:
            time.sleep(seconds)
        with lock:
            running -= 1

    server, local = serve(enter, in_process=mode, thread_pool_size=size)
    elsewhere = script(
        "client = courier.Client(sys.argv[1], secret=secret, call_timeout=60)\n"
        "for index in range(120):\n"
        "    client(0.003 if index % 40 == 39 else 0)\n"
        "assert all(f.result() is None for f in [client.futures(0) for _ in range(120)])\n",
        server.address,
    )

    def call(thread: int) -> None:
        for index in range(150):
            seconds = 0.003 if index % 40 == thread else 0
            if thread % 3:
                local(seconds)
            else:
                local.futures(seconds).result(_PATIENCE_S)

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        list(pool.map(call, range(6)))
    _, err = elsewhere.communicate(timeout=60)
    assert elsewhere.returncode == 0, err
    assert most <= size
    assert total == 6 * 150 + 240
    assert running == 0


@everywhere
def test_a_full_queue_is_a_busy_server(serve: Serve, node: Node, mode: str) -> None:
    _, client = serve(node, in_process=mode, thread_pool_size=1, queue_size=2)
    running = client.futures.wait()
    assert node.started.wait(_PATIENCE_S)
    waiting = [client.futures.echo(index) for index in range(2)]
    with pytest.raises(courier.ServerBusyError, match="nothing was run"):
        client.echo(9)
    with pytest.raises(courier.ServerBusyError, match="nothing was run"):
        client.futures.echo(9).result(_PATIENCE_S)
    node.release.set()
    assert running.result(_PATIENCE_S) == "released"
    assert [future.result(_PATIENCE_S) for future in waiting] == [0, 1]


def _hang(client: Any, how: str) -> None:
    if how == "blocking":
        client.hang()
    elif how == "awaited":
        asyncio.run(asyncio.wait_for(client.aio.hang(), _PATIENCE_S))
    else:  # nobody waits for the future
        done = threading.Event()
        future = client.futures.hang()
        future.add_done_callback(lambda _: done.set())
        assert done.wait(_PATIENCE_S)
        future.result(0)


@everywhere
@pytest.mark.parametrize("how", ["blocking", "awaited", "future"])
def test_a_call_ends_at_its_timeout(serve: Serve, node: Node, mode: str, how: str) -> None:
    _, client = serve(node, in_process=mode, client={"call_timeout": 0.2})
    node.linger_s = 3.0  # the caller's own clock may be late
    for _ in range(_TRIES):
        with pytest.raises(courier.CallTimeoutError, match="hang"):
            _hang(client, how)
        if node.started.is_set():
            break
    assert node.cancelled.wait(_PATIENCE_S)


@everywhere
def test_a_call_whose_time_is_over_in_the_queue_does_not_run(
    serve: Serve, node: Node, mode: str
) -> None:
    _, client = serve(node, in_process=mode, thread_pool_size=1)
    for tried in range(_TRIES):
        node.runs = 0
        node.started.clear()
        node.release.clear()
        blocker = client.futures.wait()
        assert node.started.wait(_PATIENCE_S)
        with pytest.raises(courier.CallTimeoutError):
            courier.with_timeout(client, 0.1).wait()
        time.sleep(0.1 * tried)  # the server reads of it when it gets to run
        node.release.set()
        assert blocker.result(_PATIENCE_S) == "released"
        client.sleep(0.001)  # not so fast that it may overtake
        if node.runs == 1:
            break
    assert node.runs == 1


@everywhere
def test_thousands_of_futures_with_a_timeout_need_no_thread_each(
    serve: Serve, node: Node, mode: str
) -> None:
    _, client = serve(node, in_process=mode, thread_pool_size=1, client={"call_timeout": 60})
    blocker = client.futures.wait()
    assert node.started.wait(_PATIENCE_S)
    before = threading.active_count()
    futures = [client.futures.echo(index) for index in range(1000)]
    threads = threading.active_count() - before
    node.release.set()
    assert [future.result(_PATIENCE_S) for future in futures] == list(range(1000))
    assert blocker.result(_PATIENCE_S) == "released"
    assert threads < 50


@everywhere
def test_a_cancelled_future_or_task_reaches_its_handler(
    serve: Serve, node: Node, mode: str
) -> None:
    _, client = serve(node, in_process=mode)
    future = client.futures.hang()
    assert node.started.wait(_PATIENCE_S)
    assert future.cancel()
    assert node.cancelled.wait(_PATIENCE_S)
    with pytest.raises(courier.CallCancelledError):
        future.result(_PATIENCE_S)
    done = client.futures.echo(1)
    assert done.result(_PATIENCE_S) == 1
    assert not done.cancel()
    node.started.clear()
    node.cancelled.clear()

    async def call() -> None:
        task = asyncio.ensure_future(client.aio.hang())
        await asyncio.to_thread(node.started.wait, _PATIENCE_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(call())
    assert node.cancelled.wait(_PATIENCE_S)


@everywhere
def test_futures_and_awaited_calls_are_answered(serve: Serve, node: Node, mode: str) -> None:
    _, client = serve(node, in_process=mode)
    futures = [client.futures.echo(index) for index in range(2000)]
    assert [future.result(_PATIENCE_S) for future in futures] == list(range(2000))
    done = threading.Semaphore(0)
    for index in range(100):
        client.futures.echo(index).add_done_callback(lambda _: done.release())
    assert all(done.acquire(timeout=_PATIENCE_S) for _ in range(100))

    async def call() -> Any:
        return await asyncio.gather(*(client.aio.echo(index) for index in range(300)))

    assert asyncio.run(call()) == list(range(300))


@everywhere
def test_a_callback_may_call_the_same_server(serve: Serve, node: Node, mode: str) -> None:
    _, client = serve(node, in_process=mode, thread_pool_size=1)
    answers: list[Any] = []
    done = threading.Event()

    def call_again(future: Any) -> None:
        answers.append((future.result(), client.echo(2)))
        done.set()

    client.futures.echo(1).add_done_callback(call_again)
    assert done.wait(_PATIENCE_S)
    assert answers == [(1, 2)]


@everywhere
def test_generators_bring_their_items(serve: Serve, node: Node, mode: str) -> None:
    _, client = serve(node, in_process=mode)
    assert list(client.count(500)) == list(range(500))
    assert node.generator_ended.wait(_PATIENCE_S)
    assert list(client.futures.count(5).result(_PATIENCE_S)) == [0, 1, 2, 3, 4]

    async def collect() -> list[int]:
        return [item async for item in await client.aio.count(5)]

    assert asyncio.run(collect()) == [0, 1, 2, 3, 4]
    items = client.stumble()
    assert next(items) == 1
    with pytest.raises(KeyError, match="in mid-stream"):
        next(items)
    assert list(items) == []


@everywhere
@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_generator_ends_when_its_reader_leaves(
    serve: Serve, node: Node, mode: str, how: str
) -> None:
    _, client = serve(node, in_process=mode)
    items = client.count(10)
    assert next(items) == 0
    if how == "close":
        items.close()
    del items
    gc.collect()
    assert node.generator_ended.wait(_PATIENCE_S)


@everywhere
def test_an_open_generator_holds_no_handler(serve: Serve, node: Node, mode: str) -> None:
    _, client = serve(node, in_process=mode, thread_pool_size=1)
    items = client.count(10)
    assert next(items) == 0
    assert client.echo(1) == 1
    assert next(items) == 1
    items.close()


@everywhere
def test_the_items_of_a_generator_end_with_the_timeout_of_its_call(
    serve: Serve, node: Node, mode: str
) -> None:
    _, client = serve(node, in_process=mode, client={"call_timeout": 0.5})
    items: Any = None
    while items is None:  # to connect may take longer
        with contextlib.suppress(courier.CallTimeoutError):
            opened = client.one_then_wait()
            assert next(opened) == 1
            items = opened
    rescue = threading.Timer(30.0, node.release.set)
    rescue.start()
    try:
        with pytest.raises(courier.CallTimeoutError, match="one_then_wait"):
            next(items)
        assert not node.release.is_set()
    finally:
        rescue.cancel()


@everywhere
def test_closing_a_client_ends_its_calls(serve: Serve, node: Node, mode: str) -> None:
    _, client = serve(node, in_process=mode)
    items = client.count(1_000_000)  # more than what can be on its way already
    assert next(items) == 0
    futures = [client.futures.hang() for _ in range(5)]
    assert node.started.wait(_PATIENCE_S)
    courier.close(client)
    for future in futures:
        with pytest.raises(courier.CallCancelledError):
            future.result(_PATIENCE_S)
    assert node.cancelled.wait(_PATIENCE_S)
    with pytest.raises(courier.CallCancelledError):
        list(items)
    assert node.generator_ended.wait(_PATIENCE_S)
    with pytest.raises(courier.CallCancelledError, match="closed"):
        client.echo(1)


@everywhere
def test_a_client_may_be_closed_while_others_call(serve: Serve, node: Node, mode: str) -> None:
    server, _ = serve(node, in_process=mode)
    for _ in range(20):
        client = courier.Client(server.address, secret=server.secret)

        def call(client: Any = client) -> None:
            for index in range(1_000_000):
                try:
                    assert client.futures.echo(index).result(_PATIENCE_S) == index
                except courier.CallCancelledError:
                    return
            pytest.fail("the client was not closed")

        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            calls = [pool.submit(call) for _ in range(3)]
            time.sleep(0.005)
            courier.close(client)
            for done in calls:
                done.result(_PATIENCE_S)


@everywhere
def test_a_server_that_stops_lets_calls_end_within_their_grace(
    serve: Serve, node: Node, mode: str
) -> None:
    server, client = serve(node, in_process=mode)
    future = client.futures.wait()
    assert node.started.wait(_PATIENCE_S)
    threading.Timer(0.1, node.release.set).start()
    assert server.stop(_PATIENCE_S) == []
    assert future.result(_PATIENCE_S) == "released"


def test_calls_that_outlast_the_grace_are_lost(serve: Serve, node: Node, mode: str) -> None:
    timing = courier.Timing(epilogue_s=20.0)
    server, client = serve(node, in_process=mode, thread_pool_size=2, timing=timing)
    items = client.count(1000)
    assert next(items) == 0
    futures = [client.futures.hang() for _ in range(4)]
    assert node.started.wait(_PATIENCE_S)
    assert server.stop(0.1) == []
    for future in futures:
        with pytest.raises(courier.ServerLostError, match="may have run"):
            future.result(_PATIENCE_S)
    assert node.cancelled.wait(_PATIENCE_S)
    with pytest.raises(courier.ServerLostError, match="count"):
        list(items)
    assert node.generator_ended.wait(_PATIENCE_S)


def test_a_generator_that_waits_for_a_handler_is_lost_when_the_server_stops(
    serve: Serve, node: Node, mode: str
) -> None:
    server, client = serve(node, in_process=mode, thread_pool_size=1)
    items = client.count(1000)
    assert next(items) == 0
    blocker = client.futures.wait()  # to the end: a handler that is free would give the item
    assert node.started.wait(_PATIENCE_S)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        reader = pool.submit(lambda: next(items))
        wait_until(lambda: server.handlers.has_waiting)
        server.stop(0.1)
        with pytest.raises(courier.ServerLostError):
            reader.result(_PATIENCE_S)
    with pytest.raises(courier.ServerLostError):
        blocker.result(_PATIENCE_S)
    node.release.set()


@everywhere
def test_a_generator_is_read_to_its_end_within_the_grace_of_a_server_that_stops(
    serve: Serve, node: Node, mode: str
) -> None:
    server, client = serve(node, in_process=mode)
    items = client.count(100)
    assert next(items) == 0
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        stop = pool.submit(server.stop, _PATIENCE_S)
        wait_until(lambda: not server.has_started)
        assert list(items) == list(range(1, 100))
        assert stop.result(_PATIENCE_S) == []


def test_a_wrong_secret_is_refused(serve: Serve, node: Node, mode: str) -> None:
    for wrong in (courier.Secret.generate(), None):
        _, client = serve(node, in_process=mode, client={"secret": wrong, "call_timeout": 20})
        with pytest.raises(courier.AuthenticationError, match="secret"):
            client.keep("nothing of this arrives")
        assert node.kept is None


def test_another_server_at_the_same_port_answers_next(
    serve: Serve, node: Node, reserve: Callable[[], int], mode: str
) -> None:
    there = {"port": reserve(), "share_port": True}
    first, client = serve(node, in_process=mode, **there)
    assert client.echo(1) == 1
    first.stop(0.0)
    for next_mode in ("wire", "share", "copy"):
        other = Node()
        server, _ = serve(other, in_process=next_mode, **there)
        value = [next_mode]
        assert client.keep(value) == value
        assert other.kept == value
        assert (other.kept is value) == (next_mode == "share")
        server.stop(0.0)
    assert node.kept is None


@everywhere
def test_a_handler_may_call_its_own_server(
    serve: Serve, connect: Callable[..., Any], mode: str
) -> None:
    client: Any = None

    def factorial(number: int) -> int:
        return 1 if number == 0 else number * client(number - 1)

    _, client = serve(factorial, in_process=mode, thread_pool_size=8)
    for _ in range(30):
        assert client(5) == 120
    assert _in_thread(lambda: [client(5) for _ in range(100)]) == [120] * 100
    _, wired = serve(factorial, in_process="wire", thread_pool_size=8)
    assert wired(3) == 6


def test_memory_of_a_call_is_free_when_it_has_ended(serve: Serve, mode: str) -> None:
    def length(array: Any) -> int:
        return len(array)

    _, client = serve(length, in_process=mode)

    array = np.zeros(1 << 18)
    reference = weakref.ref(array)
    future = client.futures(array)
    assert future.result(_PATIENCE_S) == 1 << 18
    assert client(array) == 1 << 18
    del array, future
    wait_until(lambda: gc.collect() is not None and reference() is None)


_FORK = """
import os, threading

class Counter:
    def __init__(self):
        self.count = 0
    def add(self):
        self.count += 1
        return self.count, os.getpid()

counter = Counter()
server = courier.Server(counter, secret=secret, in_process=sys.argv[1])
server.start()
client = courier.Client(server.address, secret=secret, call_timeout=30)
assert client.add() == (1, os.getpid())
futures = [client.futures.add() for _ in range(10)]
assert {future.result()[1] for future in futures} == {os.getpid()}
parent = os.getpid()
child = os.fork()
if child == 0:
    ok = client.add() == (12, parent) and counter.count == 11
    os._exit(0 if ok else 1)
print(os.waitpid(child, 0)[1], client.add()[0])
courier.close(client)
server.stop()
"""


def test_a_forked_child_calls_the_server_of_its_parent_and_not_its_copy(
    script: Script, mode: str
) -> None:
    process = script(_FORK, mode)
    out, err = process.communicate(timeout=60)
    assert out == "0 13\n", err
