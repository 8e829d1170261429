import asyncio
import concurrent.futures
import contextlib
import datetime as dt
import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import courier
from courier import lowlevel
from tests.courier.conftest import Connect, Reserve, Serve
from tests.courier.served import Node
from tests.courier.waiting import wait_until

_PATIENCE_S = 20.0
#: A busy machine may use up all of a short timeout before the handler runs.
_TRIES = 20


def test_an_unknown_method_is_named_with_those_that_exist(
    serve: Serve, node: Node, mode: str
) -> None:
    _, client = serve(node, in_process=mode)
    with pytest.raises(courier.UnknownMethodError, match=r"'nothing'.*echo"):
        client.nothing()
    with pytest.raises(AttributeError):
        client("not callable")
    assert "echo" in courier.list_methods(client)
    courier.wait_until_ready(client, _PATIENCE_S)
    with pytest.raises(AttributeError, match="private"):
        client._secret()


# Timeouts


def _hang(client: Any, how: str) -> None:
    if how == "blocking":
        client.hang()
    elif how == "large":
        client.hang(np.zeros(1_000_000))
    elif how == "awaited":
        asyncio.run(asyncio.wait_for(client.aio.hang(), _PATIENCE_S))
    else:  # nobody waits for the future
        done = threading.Event()
        future = client.futures.hang()
        future.add_done_callback(lambda _: done.set())
        assert done.wait(_PATIENCE_S)
        future.result(0)


@pytest.mark.parametrize("how", ["blocking", "large", "awaited", "future"])
def test_a_timeout_ends_a_call_and_is_seen_by_the_handler(
    serve: Serve, node: Node, mode: str, how: str
) -> None:
    timeout = dt.timedelta(seconds=0.2) if how == "future" else 0.2
    _, client = serve(node, in_process=mode, client={"call_timeout": timeout})
    for _ in range(_TRIES):
        start = time.monotonic()
        with pytest.raises(courier.CallTimeoutError, match="hang"):
            _hang(client, how)
        assert 0.1 < time.monotonic() - start < 20
        if node.calls:
            break
    assert node.cancelled.wait(_PATIENCE_S)


def test_a_call_whose_time_is_over_in_the_queue_does_not_run(
    serve: Serve, node: Node, mode: str
) -> None:
    _, client = serve(node, in_process=mode, thread_pool_size=1)
    for tried in range(_TRIES):
        node.calls = 0
        node.release.clear()
        blocker = client.futures.block()
        node.await_calls()
        with pytest.raises(courier.CallTimeoutError):
            courier.with_timeout(client, 0.1).block()
        time.sleep(0.1 * tried)  # the server reads of it when it gets to run
        node.release.set()
        assert blocker.result(_PATIENCE_S) == "released"
        client.apply(time.sleep, 0.001)  # not so fast that it may overtake
        if node.calls == 1:
            break
    assert node.calls == 1


def test_a_timeout_covers_all_items_of_a_generator(serve: Serve, node: Node, mode: str) -> None:
    _, client = serve(node, in_process=mode, client={"call_timeout": 0.5})
    items: Any = None
    while items is None:  # to connect may take longer
        with contextlib.suppress(courier.CallTimeoutError):
            opened = client.one_then_wait()
            assert next(opened) == 1
            items = opened
    with pytest.raises(courier.CallTimeoutError, match="one_then_wait"):
        next(items)
    node.release.set()
    assert node.generator_ended.wait(_PATIENCE_S)


@pytest.mark.parametrize("timeout", [None, 0, 0.0, dt.timedelta(0), float("inf")])
def test_none_and_zero_mean_no_timeout(serve: Serve, timeout: Any) -> None:
    _, client = serve(lambda: courier.current_call().time_remaining())
    assert courier.with_timeout(client, timeout)() is None


@pytest.mark.parametrize(
    ("timeout", "error"),
    [(-1, ValueError), (float("nan"), ValueError), ("1", TypeError), (True, TypeError)],
)
def test_a_senseless_timeout_is_refused_at_once(timeout: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        courier.Client("127.0.0.1:1", call_timeout=timeout)


# Servers that are away


def test_an_unreachable_server_is_named_at_once_if_not_waited_for(
    connect: Connect, reserve: Reserve
) -> None:
    address = f"127.0.0.1:{reserve()}"
    client = connect(address, wait_for_ready=False)
    with pytest.raises(courier.ServerUnreachableError, match=address):
        client.echo()
    with pytest.raises(courier.ServerGoneError) as gone:
        client.echo(np.zeros(1_000_000))
    assert isinstance(gone.value, ConnectionError)
    futures = [client.futures.echo() for _ in range(100)]
    for future in futures:
        assert isinstance(future.exception(20), courier.ServerUnreachableError)


def test_waiting_for_a_server_that_never_comes_times_out(
    connect: Connect, reserve: Reserve
) -> None:
    client = connect(f"127.0.0.1:{reserve()}", call_timeout=0.2)
    futures = [client.futures.echo() for _ in range(300)]
    with pytest.raises(courier.CallTimeoutError, match="nothing was run"):
        client.echo()
    for future in futures:
        assert isinstance(future.exception(20), courier.CallTimeoutError)
    with pytest.raises(courier.CallTimeoutError):
        courier.wait_until_ready(client, 0.1)


def test_a_client_told_to_stop_waiting_fails_calls_that_wait_and_later_ones(
    serve: Serve, node: Node, connect: Connect, reserve: Reserve
) -> None:
    client = connect(f"127.0.0.1:{reserve()}")
    waiting = [client.futures.echo() for _ in range(3)]
    lowlevel.stop_waiting(client)
    for future in (*waiting, client.futures.echo()):
        assert isinstance(future.exception(20), courier.ServerUnreachableError)
    _, answered = serve(node)
    lowlevel.stop_waiting(answered)
    assert answered.echo("fine") == "fine"


# Callers that leave


def test_a_cancelled_future_or_task_reaches_its_handler(
    serve: Serve, node: Node, mode: str
) -> None:
    _, client = serve(node, in_process=mode)
    future = client.futures.hang()
    node.await_calls()
    assert future.cancel()
    assert future.cancel()
    assert future.cancelled()
    with pytest.raises(courier.CallCancelledError, match="hang"):
        future.result(1)
    with pytest.raises(concurrent.futures.CancelledError):
        future.exception(1)
    assert concurrent.futures.wait([future], 1).done == {future}
    assert node.cancelled.wait(_PATIENCE_S)
    answered = client.futures.echo(1)
    assert answered.result(_PATIENCE_S) == 1
    assert not answered.cancel()
    assert answered.result() == 1
    node.cancelled.clear()

    async def call() -> None:
        task = asyncio.ensure_future(client.aio.hang())
        await asyncio.to_thread(node.await_calls)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(call())
    assert node.cancelled.wait(_PATIENCE_S)


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


# Servers that are busy


def test_a_full_server_says_that_it_is_busy_and_runs_what_it_took(
    serve: Serve, node: Node, mode: str
) -> None:
    _, client = serve(node, in_process=mode, thread_pool_size=2, queue_size=3)
    futures = [client.futures.block() for _ in range(2)]
    node.await_calls(2)
    more = [client.futures.block() for _ in range(8)]
    wait_until(lambda: sum(future.done() for future in more) == 5)
    with pytest.raises(courier.ServerBusyError, match="nothing was run"):
        client.echo(9)
    node.release.set()
    errors = [future.exception(20) for future in (*futures, *more)]
    assert sum(isinstance(error, courier.ServerBusyError) for error in errors) == 5
    assert errors.count(None) == node.calls == 5


def test_a_burst_that_fits_is_not_refused(serve: Serve, node: Node) -> None:
    _, client = serve(node, thread_pool_size=8, queue_size=1)
    futures = [client.futures.block() for _ in range(8)]
    node.await_calls(8)
    node.release.set()
    assert [future.result(20) for future in futures] == ["released"] * 8


def test_a_wrong_secret_is_refused(serve: Serve, node: Node, mode: str) -> None:
    for wrong in (courier.Secret.generate(), None):
        _, client = serve(node, in_process=mode, client={"secret": wrong, "call_timeout": 20})
        with pytest.raises(courier.AuthenticationError, match="secret"):
            client.keep("nothing of this arrives")
        futures = [client.futures.keep("nor of this") for _ in range(20)]
        assert all(isinstance(future.exception(20), PermissionError) for future in futures)
        assert node.kept is None


# Failures that nobody reads


def test_a_failure_that_nobody_reads_is_logged_once(
    serve: Serve, node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    _, client = serve(node)
    for _ in range(2):
        concurrent.futures.wait([client.futures.fail()])
    wait_until(lambda: "its future was never read" in caplog.text)
    assert len(caplog.records) == 1
    assert "fail failed, and its future was never read" in caplog.text
    assert "raise KeyError(" in caplog.text  # where it was raised


def _read_by_callback(client: Any) -> None:
    heard = threading.Event()
    client.futures.fail().add_done_callback(lambda _: heard.set())
    assert heard.wait(30)


def _close(client: Any) -> None:
    future = client.futures.block()
    courier.close(client)
    concurrent.futures.wait([future])


@pytest.mark.parametrize(
    "read",
    [
        lambda client: client.futures.fail().result(),
        lambda client: client.futures.fail().exception(),
        lambda client: asyncio.run(client.aio.fail()),
        lambda client: courier.Pool([client, client]).all.fail(),
        _read_by_callback,
        _close,
    ],
    ids=["result", "exception", "aio", "all", "callback", "closed"],
)
def test_a_failure_that_is_known_to_somebody_is_not_logged(
    serve: Serve, node: Node, caplog: pytest.LogCaptureFixture, read: Callable[[Any], Any]
) -> None:
    _, client = serve(node)
    with contextlib.suppress(KeyError):
        read(client)
    gc.collect()
    assert caplog.text == ""
