"""Async methods and async generators, one method at a time, and callers that are async."""

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

import courier
from courier.lowlevel import Tasks
from tests.courier.conftest import Serve
from tests.courier.waiting import wait_until

_PATIENCE_S = 20.0

ways = pytest.mark.parametrize("way", ["wire", "copy", "share"])


class Service:
    """Async methods, and what became of them."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.ended: list[str] = []
        self._open = asyncio.Event()

    async def __call__(self, value: Any) -> Any:
        return value

    async def add(self, one: int, other: int) -> int:
        await asyncio.sleep(0)
        return one + other

    async def who(self) -> tuple[str, str]:
        await asyncio.sleep(0)
        return courier.current_call().method, threading.current_thread().name

    async def raises(self) -> None:
        await asyncio.sleep(0)
        raise KeyError("of the method")

    async def leaves(self, error: type[BaseException]) -> None:
        raise error

    async def wait(self) -> str:
        self.begun.append("wait")
        try:
            await self._open.wait()
        finally:
            self.ended.append("wait")
        return "open"

    async def hand_over(self, heirs: int) -> None:
        try:
            await self.wait()
        finally:
            if heirs:
                self.heir = asyncio.ensure_future(self.hand_over(heirs - 1))
                await asyncio.sleep(0)  # it begins

    async def insist(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await self.wait()
        await self.wait()

    async def open(self) -> None:
        self._open.set()

    async def count(self, end: int, *, fails: bool = False) -> AsyncIterator[int]:
        try:
            for number in range(end):
                self.begun.append("item")
                yield number
                await asyncio.sleep(0)
            if fails:
                raise KeyError("of the generator")
        finally:
            await asyncio.sleep(0)
            self.ended.append("count")

    async def listen(self) -> AsyncIterator[str]:
        self.begun.append("listen")
        await self._open.wait()
        yield "open"

    def numbers(self, end: int) -> Iterator[int]:
        yield from range(end)

    def plain(self) -> int:
        return 1


def _until(condition: Callable[[], bool]) -> None:
    wait_until(condition, _PATIENCE_S)


@ways
def test_callers_see_ordinary_methods_and_iterators(serve: Serve, way: str) -> None:
    _, client = serve(Service(), in_process=way)
    assert client.add(1, 2) == 3
    assert client(7) == 7
    assert client.who() == ("who", "courier-loop")
    assert list(client.count(3)) == [0, 1, 2]
    with pytest.raises(KeyError, match="of the method") as caught:
        client.raises()
    assert "in raises" in (courier.remote_traceback(caught.value) or "")
    items = client.count(1, fails=True)
    assert next(items) == 0
    with pytest.raises(KeyError, match="of the generator"):
        next(items)


@ways
def test_calls_that_wait_hold_no_thread(serve: Serve, way: str) -> None:
    service = Service()
    _, client = serve(service, in_process=way, thread_pool_size=1)
    waiting = [client.futures.wait() for _ in range(20)]
    streams = [client.listen() for _ in range(3)]
    readers = concurrent.futures.ThreadPoolExecutor(len(streams))
    items = [readers.submit(next, stream) for stream in streams]
    _until(lambda: service.begun.count("wait") == 20 and service.begun.count("listen") == 3)
    assert client.plain() == 1
    client.open()
    assert {future.result(_PATIENCE_S) for future in waiting} == {"open"}
    assert {item.result(_PATIENCE_S) for item in items} == {"open"}
    readers.shutdown()
    for stream in streams:
        stream.close()


@ways
def test_who_leaves_has_the_task_cancelled(serve: Serve, way: str) -> None:
    service = Service()
    _, client = serve(service, in_process=way)
    future = client.futures.wait()
    _until(lambda: service.begun == ["wait"])
    future.cancel()
    _until(lambda: service.ended == ["wait"])
    with pytest.raises(courier.CallTimeoutError):
        courier.with_timeout(client, 0.05).wait()
    _until(lambda: service.ended == ["wait", "wait"])
    items = client.count(10**9)
    assert next(items) == 0
    items.close()
    _until(lambda: service.ended[2:] == ["count"])


class _Blocked:
    """Async methods of which one holds up the loop."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.gate = threading.Event()

    async def hold(self) -> None:
        self.begun.append("hold")
        self.gate.wait(_PATIENCE_S)

    async def note(self, what: str) -> None:
        self.begun.append(what)


@ways
def test_who_leaves_before_the_method_begins_has_it_not_begun(serve: Serve, way: str) -> None:
    service = _Blocked()
    _, client = serve(service, in_process=way)
    held = client.futures.hold()
    _until(lambda: service.begun == ["hold"])
    with pytest.raises(courier.CallTimeoutError):
        courier.with_timeout(client, 0.1).note("late")
    service.gate.set()
    held.result(_PATIENCE_S)
    client.note("last")
    assert service.begun == ["hold", "last"]


def test_a_generator_runs_ahead_of_its_reader_by_a_limit(serve: Serve) -> None:
    service = Service()
    _, client = serve(service)
    items = client.count(10**9)
    assert next(items) == 0
    _until(lambda: len(service.begun) > 900)
    assert client.add(1, 1) == 2
    assert len(service.begun) < 3000
    items.close()


@ways
@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_no_exception_of_a_method_ends_the_loop(
    serve: Serve, way: str, error: type[BaseException]
) -> None:
    _, client = serve(Service(), in_process=way)
    with pytest.raises(courier.CourierError):
        client.leaves(error)
    assert client.add(1, 2) == 3


def test_the_stop_cancels_calls_and_what_they_begin_as_they_clean_up(serve: Serve) -> None:
    service = Service()
    server, client = serve(service)
    waiting = client.futures.hand_over(3)
    _until(lambda: service.begun == ["wait"])
    assert server.stop(0.05) == []
    with pytest.raises(courier.ServerLostError):
        waiting.result(_PATIENCE_S)
    assert service.ended[0] == "wait"
    assert service.heir.cancelled()


def test_the_end_cancels_what_was_begun_while_the_loop_ran_in_another_thread() -> None:
    ended: list[str] = []

    async def stay() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            ended.append("stay")

    async def begin() -> "asyncio.Task[None]":
        task = asyncio.create_task(stay())
        await asyncio.sleep(0)
        return task

    tasks = Tasks()
    task = tasks.run(begin())  # in this thread; from then on in one of its own
    assert tasks.end(10) == []
    assert ended == ["stay"]
    assert task.cancelled()


def test_the_stop_cancels_what_goes_on_without_its_caller(serve: Serve) -> None:
    service = Service()
    server, client = serve(service)
    future = client.futures.insist()
    _until(lambda: service.begun == ["wait"])
    future.cancel()
    _until(lambda: service.begun == ["wait"] * 2)
    assert server.stop(0.05) == []
    assert service.ended == ["wait"] * 2


def test_too_many_are_refused(serve: Serve) -> None:
    service = Service()
    _, client = serve(service, thread_pool_size=1, queue_size=1)
    waiting = [client.futures.wait() for _ in range(1)]
    _until(lambda: len(service.begun) == 1)
    waiting.append(client.futures.wait())
    _until(lambda: len(service.begun) == 2)
    with pytest.raises(courier.ServerBusyError):
        client.wait()
    for future in waiting:
        future.cancel()


class Serial:
    """Notices when two of its methods run at the same time."""

    def __init__(self) -> None:
        self._inside = threading.Lock()
        self.met = 0

    def _enter(self) -> None:
        if not self._inside.acquire(blocking=False):
            self.met += 1

    def block(self) -> None:
        self._enter()
        time.sleep(0.001)
        self._inside.release()

    async def wait(self) -> None:
        self._enter()
        await asyncio.sleep(0.001)
        self._inside.release()

    async def items(self) -> AsyncIterator[int]:
        for number in range(10):
            self._enter()
            await asyncio.sleep(0.001)
            self._inside.release()
            yield number

    def how_often(self) -> int:
        return self.met


@ways
def test_serial_methods_never_run_at_the_same_time(serve: Serve, way: str) -> None:
    _, client = serve(Serial(), in_process=way, serial=True)
    unread = client.items()  # holds up nobody
    assert next(unread) == 0
    calls = [method() for _ in range(10) for method in (client.futures.block, client.futures.wait)]
    assert list(client.items()) == list(range(10))
    for call in calls:
        call.result(_PATIENCE_S)
    unread.close()
    assert client.how_often() == 0


def test_serial_with_several_threads_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="Give one of them"):
        courier.Server(Service(), serial=True, thread_pool_size=2)


@ways
def test_async_callers_read_generators_and_make_tasks_of_calls(serve: Serve, way: str) -> None:
    service = Service()
    _, client = serve(service, in_process=way)

    async def call() -> None:
        aio = client.aio
        assert await asyncio.create_task(aio.add(1, 2)) == 3
        assert await asyncio.gather(aio.add(1, 1), aio(5)) == [2, 5]
        for items in (aio.count(3), aio.numbers(3), await aio.count(3), await aio.numbers(3)):
            assert [item async for item in items] == [0, 1, 2]
        with pytest.raises(TypeError, match="no generator"):
            async for _ in aio.plain():
                pass
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(aio.wait(), 0.05)
        aio.add(1, 2).close()

    asyncio.run(call())
    _until(lambda: "wait" in service.ended)


def test_a_method_calls_its_own_server(serve: Serve) -> None:
    class Relay:
        client: Any = None

        async def one(self) -> int:
            return 1

        async def two(self) -> int:
            return 1 + int(await self.client.aio.one())

    relay = Relay()
    _, client = serve(relay, in_process="copy")
    relay.client = client
    assert client.two() == 2


@pytest.mark.parametrize("value", [[1], ValueError("of the method")], ids=["value", "error"])
def test_a_future_that_nobody_has_read_is_what_it_will_be_read_as(serve: Serve, value: Any) -> None:
    def method() -> Any:
        if isinstance(value, Exception):
            raise value
        return value

    _, client = serve(method)
    future: Any = client.futures()
    wait_until(future.done)
    assert repr(future).endswith("state=finished, not read yet>")
    # What asyncio copies of it, from Python 3.14 on.
    done, cancelled, result, error = future._get_snapshot()
    assert (done, cancelled) == (True, False)
    assert (result, repr(error)) == ((None, repr(value)) if error else (value, "None"))
    assert not repr(future).endswith("not read yet>")
