import asyncio
import concurrent.futures
import contextlib
import datetime as dt
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import courier
from launchpad_lite.testing import poll_until
from tests.courier.conftest import Connect, Reserve, Script, Serve
from tests.courier.waiting import wait_until


class Handler:
    """Says what its calls meet."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.cancelled = threading.Event()
        self.release = threading.Event()
        self.calls = 0

    def wait_cancelled(self, *_: Any) -> None:
        self.calls += 1
        self.entered.release()
        if courier.current_call().wait_cancelled(30):
            self.cancelled.set()
            # Its own clock may be ahead of the caller's: the answer must not come first.
            self.release.wait(30)

    def block(self, *_: Any) -> str:
        self.calls += 1
        self.entered.release()
        self.release.wait(30)
        return "done"

    def remaining(self) -> float | None:
        return courier.current_call().time_remaining()

    def trickle(self) -> Iterator[int]:
        for number in range(10_000):
            yield number
            courier.current_call().wait_cancelled(0.05)

    def fail(self) -> None:
        raise ValueError("no")

    def fine(self, *_: Any) -> str:
        return "fine"


@pytest.fixture
def handler(serve: Serve) -> Iterator[Handler]:
    """Lets its calls end before servers are stopped."""
    handler = Handler()
    yield handler
    handler.release.set()


def test_an_unknown_method_is_named_with_those_that_exist(serve: Serve) -> None:
    _, client = serve(Handler())
    with pytest.raises(courier.UnknownMethodError, match=r"'nothing'.*fine"):
        client.nothing()
    with pytest.raises(AttributeError):
        client("not callable")
    with pytest.raises(AttributeError, match="private"):
        client._secret()


@pytest.mark.parametrize("timeout", [0.3, dt.timedelta(seconds=0.3)])
def test_a_timeout_raises_and_is_seen_by_the_handler(
    serve: Serve, handler: Handler, timeout: Any
) -> None:
    _, client = serve(handler, client={"call_timeout": timeout})
    for _ in range(20):
        start = time.monotonic()
        with pytest.raises(courier.CallTimeoutError, match="wait_cancelled"):
            client.wait_cancelled()
        assert 0.2 < time.monotonic() - start < 20
        # A busy machine may use up all of the time before the handler runs.
        if handler.calls:
            break
    assert handler.cancelled.wait(20)


def test_a_timeout_ends_futures_aio_and_large_calls_too(serve: Serve, handler: Handler) -> None:
    _, client = serve(handler, client={"call_timeout": 0.3})
    with pytest.raises(TimeoutError):
        client.wait_cancelled(np.zeros(1_000_000))
    assert isinstance(client.futures.wait_cancelled().exception(20), courier.CallTimeoutError)

    async def call() -> None:
        with pytest.raises(courier.CallTimeoutError):
            await client.aio.wait_cancelled()

    asyncio.run(call())


def test_a_timeout_covers_all_items_of_a_generator(serve: Serve) -> None:
    _, client = serve(Handler(), client={"call_timeout": 0.4})
    came: list[int] = []
    for _ in range(20):
        with pytest.raises(courier.CallTimeoutError):
            came.extend(client.trickle())
        # A busy machine may use up all of the time before the first item comes.
        if came:
            break
    assert came[:1] == [0]


@pytest.mark.parametrize("timeout", [None, 0, 0.0, dt.timedelta(0), float("inf")])
def test_none_and_zero_mean_no_timeout(serve: Serve, timeout: Any) -> None:
    _, client = serve(Handler(), client={"call_timeout": timeout})
    assert client.remaining() is None


def test_the_handler_sees_how_much_time_remains(serve: Serve) -> None:
    _, client = serve(Handler())
    remaining = courier.with_timeout(client, 50)
    assert 40 < remaining.remaining() < 51  # rounded up by some carriers
    courier.close(remaining)


@pytest.mark.parametrize(
    ("timeout", "error"),
    [(-1, ValueError), (float("nan"), ValueError), ("1", TypeError), (True, TypeError)],
)
def test_a_senseless_timeout_is_refused_at_once(timeout: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        courier.Client("127.0.0.1:1", call_timeout=timeout)


def test_an_unreachable_server_is_named_at_once_if_not_waited_for(
    connect: Connect, reserve: Reserve
) -> None:
    address = f"127.0.0.1:{reserve()}"
    client = connect(address, wait_for_ready=False)
    with pytest.raises(courier.ServerUnreachableError, match=address):
        client.fine()
    with pytest.raises(ConnectionError):
        client.fine(np.zeros(1_000_000))
    futures = [client.futures.fine() for _ in range(100)]
    for future in futures:
        assert isinstance(future.exception(20), courier.ServerUnreachableError)


def test_waiting_for_a_server_that_never_comes_times_out(
    connect: Connect, reserve: Reserve
) -> None:
    client = connect(f"127.0.0.1:{reserve()}", call_timeout=0.2)
    futures = [client.futures.fine() for _ in range(300)]
    with pytest.raises(courier.CallTimeoutError, match="nothing was run"):
        client.fine()
    for future in futures:
        assert isinstance(future.exception(20), courier.CallTimeoutError)
    with pytest.raises(courier.CallTimeoutError):
        courier.wait_until_ready(client, 0.1)


def test_a_client_told_to_stop_waiting_fails_calls_that_wait_and_later_ones(
    serve: Serve, connect: Connect, reserve: Reserve
) -> None:
    client = connect(f"127.0.0.1:{reserve()}")
    waiting = [client.futures.fine() for _ in range(3)]
    courier.stop_waiting(client)
    for future in (*waiting, client.futures.fine()):
        assert isinstance(future.exception(20), courier.ServerUnreachableError)
    _, answered = serve(Handler())
    courier.stop_waiting(answered)
    assert answered.fine() == "fine"


def test_a_call_that_waits_for_a_server_to_come_back_fails_too(serve: Serve) -> None:
    server, client = serve(Handler())
    assert client.fine() == "fine"
    server.stop()
    waiting = poll_until(lambda: _waiting_call(client))
    courier.stop_waiting(client)
    assert isinstance(waiting.exception(20), courier.ServerUnreachableError)


def _waiting_call(client: Any) -> Any:
    """A call that was not lost with the connection, but waits for the next one."""
    future = client.futures.fine()
    try:
        return None if isinstance(future.exception(0.3), courier.ServerLostError) else future
    except concurrent.futures.TimeoutError:
        return future


_LOST = """
import os, threading
class Lost:
    def __init__(self): self.calls = 0
    def hang(self, *_):
        self.calls += 1
        print("called\\n", end="", flush=True)  # in one piece
        threading.Event().wait()
    def stream(self):
        yield 1
        print("called\\n", end="", flush=True)  # in one piece
        threading.Event().wait()
    def count(self): return self.calls
with courier.Server(Lost(), secret=secret, port=int(sys.argv[1]), share_port=True) as server:
    print("ready", flush=True)
    sys.stdin.read()
"""


def _line(process: Any) -> str:
    line: str = process.stdout.readline().strip()
    return line


def test_calls_that_a_killed_server_had_are_lost_and_no_other_server_sees_them(
    script: Script, connect: Connect, reserve: Reserve
) -> None:
    port = reserve()
    first = script(_LOST, port)
    assert _line(first) == "ready"
    client = connect(f"127.0.0.1:{port}")
    futures = [client.futures.hang(bytes(size)) for size in (1, 8_000_000)]
    items = client.stream()
    assert next(items) == 1
    assert [_line(first) for _ in range(3)] == ["called"] * 3
    killed_at = time.monotonic()
    first.kill()
    for future in futures:
        with pytest.raises(courier.ServerLostError, match="hang"):
            future.result(20)
    with pytest.raises(courier.ServerLostError):
        next(items)
    assert time.monotonic() - killed_at < 15
    second = script(_LOST, port)
    assert _line(second) == "ready"
    assert client.count() == 0


def test_a_cancelled_future_is_seen_by_the_handler(serve: Serve, handler: Handler) -> None:
    _, client = serve(handler)
    future = client.futures.wait_cancelled()
    assert handler.entered.acquire(timeout=20)
    assert future.cancel()
    assert future.cancel()
    assert future.cancelled()
    with pytest.raises(courier.CallCancelledError, match="wait_cancelled"):
        future.result(1)
    with pytest.raises(concurrent.futures.CancelledError):
        future.exception(1)
    assert concurrent.futures.wait([future], 1).done == {future}
    assert handler.cancelled.wait(20)


def test_a_large_result_that_nobody_waits_for_is_not_kept(serve: Serve) -> None:
    made: list[weakref.ref[Any]] = []
    entered = threading.Event()

    def make() -> Any:
        entered.set()
        courier.current_call().wait_cancelled(30)
        array = np.zeros(1_000_000)
        made.append(weakref.ref(array))
        return array

    _, client = serve(make)
    future = client.futures()
    assert entered.wait(20)
    future.cancel()
    wait_until(lambda: made and made[0]() is None)


def test_an_answered_call_cannot_be_cancelled(serve: Serve) -> None:
    _, client = serve(Handler())
    future = client.futures.fine()
    future.result(20)
    assert not future.cancel()
    assert future.result() == "fine"


def test_a_cancelled_task_cancels_its_call(serve: Serve, handler: Handler) -> None:
    _, client = serve(handler)

    async def call() -> None:
        task = asyncio.ensure_future(client.aio.wait_cancelled())
        assert await asyncio.to_thread(handler.entered.acquire, timeout=20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(call())
    assert handler.cancelled.wait(20)


def test_cancelling_the_call_that_opens_the_session_spares_the_others(
    serve: Serve, connect: Connect, reserve: Reserve
) -> None:
    port = reserve()
    client = connect(f"127.0.0.1:{port}")
    futures = [client.futures.fine() for _ in range(50)]
    for future in futures[:-10]:
        assert future.cancel()
    serve(Handler(), port=port, share_port=True)
    assert [future.result(20) for future in futures[-10:]] == ["fine"] * 10


@pytest.mark.parametrize("size", [1, 1_000_000], ids=["small", "in pieces"])
def test_a_full_server_says_that_it_is_busy_and_runs_what_it_took(
    serve: Serve, handler: Handler, size: int
) -> None:
    _, client = serve(handler, thread_pool_size=2, queue_size=3)
    array = np.zeros(size)
    running = [client.futures.block(array) for _ in range(2)]
    for _ in running:
        assert handler.entered.acquire(timeout=20)
    more = [client.futures.block(array) for _ in range(8)]
    wait_until(lambda: sum(future.done() for future in more) == 5)
    handler.release.set()
    errors = [future.exception(20) for future in more]
    assert sum(isinstance(error, courier.ServerBusyError) for error in errors) == 5
    assert errors.count(None) == 3
    assert [future.result(20) for future in running] == ["done"] * 2
    assert handler.calls == 5


def test_a_burst_that_fits_is_not_refused(serve: Serve, handler: Handler) -> None:
    _, client = serve(handler, thread_pool_size=8, queue_size=1)
    futures = [client.futures.block() for _ in range(8)]
    for _ in futures:
        assert handler.entered.acquire(timeout=20)
    handler.release.set()
    assert [future.result(20) for future in futures] == ["done"] * 8


def test_a_wrong_secret_is_refused_by_the_client(serve: Serve, connect: Connect) -> None:
    server, _ = serve(Handler())
    for other in (courier.Secret.generate(), None):
        client = connect(server.address, secret=other)
        with pytest.raises(courier.AuthenticationError, match="secret"):
            client.fine()
        futures = [client.futures.fine() for _ in range(20)]
        for future in futures:
            assert isinstance(future.exception(20), PermissionError)


def test_a_failure_that_nobody_reads_is_logged_once(
    serve: Serve, handler: Handler, caplog: pytest.LogCaptureFixture
) -> None:
    _, client = serve(handler)
    for _ in range(2):
        concurrent.futures.wait([client.futures.fail()])
    poll_until(lambda: "its future was never read" in caplog.text)
    assert len(caplog.records) == 1
    assert "fail failed, and its future was never read" in caplog.text
    assert "raise ValueError(" in caplog.text  # where it was raised


@pytest.mark.parametrize("read", ["result", "exception", "callback", "aio", "all", "closed"])
def test_a_failure_that_is_known_to_somebody_is_not_logged(
    serve: Serve, handler: Handler, caplog: pytest.LogCaptureFixture, read: str
) -> None:
    _, client = serve(handler)
    if read == "aio":
        with pytest.raises(ValueError, match="no"):
            asyncio.run(client.aio.fail())
    elif read == "all":
        with pytest.raises(ValueError, match="no"):
            courier.Pool([client, client]).all.fail()
    else:
        future = client.futures.fail() if read != "closed" else client.futures.block()
        heard = threading.Event()
        if read == "callback":
            future.add_done_callback(lambda _: heard.set())
            assert heard.wait(30)
        elif read == "closed":
            courier.close(client)
        else:
            with contextlib.suppress(ValueError):
                getattr(future, read)()
        concurrent.futures.wait([future])
        del future
    gc.collect()
    assert caplog.text == ""
