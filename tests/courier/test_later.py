"""Methods that return a future: answered when it is done, and no thread is held meanwhile."""

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

import courier
from tests.courier.conftest import Serve
from tests.courier.grpc_client import GrpcClient, Refused
from tests.courier.waiting import wait_until

Future = concurrent.futures.Future
_PATIENCE_S = 20.0
#: Servers that stop at once wait for their threads, however slow the machine is.
_PATIENT = courier.Timing(epilogue_s=_PATIENCE_S)


class WeirdError(Exception):
    """Wants other arguments than it hands to its base."""

    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(f"{reason} ({code})")
        self.code = code


class Node:
    """Opens futures that a test settles."""

    def __init__(self) -> None:
        self.opened: list[Future[Any]] = []
        self.calls: list[courier.CallContext] = []

    def later(self, *_: Any) -> Any:
        future: Future[Any] = Future()
        self.calls.append(courier.current_call())
        self.opened.append(future)
        return future

    def done(self, value: Any) -> Any:
        future: Future[Any] = Future()
        future.set_result(value)
        return future

    def failed(self) -> Any:
        future: Future[Any] = Future()
        future.set_exception(KeyError("as asked"))
        return future

    def cancelled(self) -> Any:
        future: Future[Any] = Future()
        future.cancel()
        return future

    def echo(self, value: Any) -> Any:
        return value

    def await_opened(self, count: int = 1) -> None:
        wait_until(lambda: len(self.opened) >= count)


class Forwarder:
    def __init__(self, client: Any) -> None:
        self._client = client

    def later(self) -> Any:
        return self._client.futures.later()

    def echo(self, value: Any) -> Any:
        return self._client.futures.echo(value)

    def failed(self) -> Any:
        return self._client.futures.failed()


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node()
    yield node
    for future in node.opened:
        future.cancel()


@pytest.fixture(params=["wire", "copy"])
def client(serve: Serve, node: Node, request: pytest.FixtureRequest) -> Any:
    """Calls by the wire, or within the process."""
    return serve(node, in_process=request.param, thread_pool_size=1)[1]


def _call_aside(call: Callable[[], Any]) -> "Future[Any]":
    """Calls in a thread, which the main thread and futures do not do."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


# What comes of it


def test_a_future_that_another_thread_settles_answers_then(
    serve: Serve, way: dict[str, Any], node: Node
) -> None:
    _, client = serve(node, **way)
    blocking = _call_aside(client.later)
    future = client.futures.later()
    node.await_opened(2)
    assert not blocking.done()
    assert not future.done()
    node.opened[0].set_result("here")
    node.opened[1].set_exception(WeirdError(7, reason="odd"))
    outcomes = [call.exception(_PATIENCE_S) or call.result() for call in (blocking, future)]
    outcomes.sort(key=str)
    assert outcomes[0] == "here"
    assert isinstance(outcomes[1], WeirdError)
    assert (str(outcomes[1]), outcomes[1].code) == ("odd (7)", 7)


@pytest.mark.parametrize("value", [None, 0, np.arange(5), np.zeros(1 << 20)])
def test_a_future_that_is_done_already_answers_at_once(client: Any, value: Any) -> None:
    np.testing.assert_array_equal(client.done(value), value)
    np.testing.assert_array_equal(client.futures.done(value).result(_PATIENCE_S), value)


def test_methods_known_as_fast_may_answer_later(client: Any, node: Node) -> None:
    # After a few calls these run where they are read, or in the thread of the caller.
    calls = _call_aside(lambda: [client.done(index) for index in range(200)])
    assert calls.result(_PATIENCE_S) == list(range(200))
    for index in range(30):
        call = _call_aside(client.later)
        node.await_opened(index + 1)
        assert not call.done()
        node.opened[index].set_result(index)
        assert call.result(_PATIENCE_S) == index


def test_an_exception_of_many_futures_does_not_gather_a_longer_traceback_for_each(
    client: Any, node: Node
) -> None:
    def fail_in_a_thread() -> None:
        raise KeyError("shared")

    futures = [client.futures.later() for _ in range(20)]
    node.await_opened(20)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        error = pool.submit(fail_in_a_thread).exception()
    for opened in node.opened:
        opened.set_exception(error)
    texts = set()
    for future in futures:
        with pytest.raises(KeyError) as caught:
            future.result(_PATIENCE_S)
        texts.add(courier.remote_traceback(caught.value))
    (text,) = texts
    assert "fail_in_a_thread" in (text or "")


def test_a_future_that_is_cancelled_is_a_cancelled_call(client: Any, node: Node) -> None:
    with pytest.raises(concurrent.futures.CancelledError):
        client.cancelled()
    future = client.futures.later()
    node.await_opened()
    node.opened[0].cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(_PATIENCE_S)
    assert client.echo(1) == 1


def test_what_cannot_be_sent_is_an_error_of_its_call(client: Any, node: Node) -> None:
    futures = [client.futures.later() for _ in range(2)]
    node.await_opened(2)
    node.opened[0].set_exception(SystemExit(3))
    node.opened[1].set_result(threading.Lock())
    errors = {type(future.exception(_PATIENCE_S)) for future in futures}
    assert errors == {courier.RemoteError, courier.SerializationError}
    assert client.echo(1) == 1


def test_a_caller_who_shares_objects_gets_the_result_itself(serve: Serve, node: Node) -> None:
    _, client = serve(node, in_process="share")
    lock = threading.Lock()
    future = client.futures.later()
    node.await_opened()
    node.opened[0].set_result(lock)
    assert future.result(_PATIENCE_S) is lock


def test_a_method_may_hand_on_the_future_of_another_client(
    serve: Serve, client: Any, node: Node
) -> None:
    for way in ("wire", "copy"):
        _, outer = serve(Forwarder(client), thread_pool_size=1, in_process=way)
        assert outer.echo("through") == "through"
        with pytest.raises(KeyError, match="as asked"):
            outer.failed()
        node.opened.clear()
        futures = [outer.futures.later() for _ in range(10)]
        node.await_opened(10)
        assert outer.echo("meanwhile") == "meanwhile"
        for opened in node.opened:
            opened.set_result("far")
        assert [future.result(_PATIENCE_S) for future in futures] == ["far"] * 10


def test_there_may_be_more_of_them_than_threads_in_each_way_of_calling(
    client: Any, node: Node
) -> None:
    async def call() -> Any:
        return await asyncio.gather(*(client.aio.later() for _ in range(5)))

    calls = [client.futures.later() for _ in range(60)]
    calls += [_call_aside(client.later) for _ in range(20)]
    awaited = _call_aside(lambda: asyncio.run(call()))
    node.await_opened(85)
    assert client.echo("meanwhile") == "meanwhile"
    for index, opened in reversed(list(enumerate(node.opened))):
        opened.set_result(index)
    # Calls need not run in the order in which they were made.
    results = [call.result(_PATIENCE_S) for call in calls] + awaited.result(_PATIENCE_S)
    assert sorted(results) == list(range(85))


# Callers that leave


@pytest.mark.parametrize("leave", ["cancels", "closes its client", "times out"])
def test_a_caller_that_leaves_is_noticed(client: Any, node: Node, leave: str) -> None:
    other = courier.with_timeout(client, 0.3 if leave == "times out" else None)
    future = None
    while not node.opened:  # to connect may take longer than the timeout
        future = other.futures.later()
        with contextlib.suppress(courier.CallTimeoutError, concurrent.futures.TimeoutError):
            future.result(0.5)
    assert future is not None
    if leave == "cancels":
        assert future.cancel()
    elif leave == "times out":
        with pytest.raises(courier.CallTimeoutError):
            other.later()
    courier.close(other)
    with pytest.raises((courier.CallCancelledError, courier.CallTimeoutError)):
        future.result(_PATIENCE_S)
    wait_until(lambda: all(call.cancelled for call in node.calls))
    for opened in node.opened:
        opened.set_result("too late")
    assert client.echo(1) == 1


@pytest.mark.parametrize("way", ["wire", "copy"])
def test_what_callers_gave_up_holds_no_stop(serve: Serve, way: str, node: Node) -> None:
    server, client = serve(node, in_process=way)
    futures = [client.futures.later() for _ in range(5)]
    node.await_opened(5)
    for future in futures:
        future.cancel()
    wait_until(lambda: all(call.cancelled for call in node.calls))
    # Their futures are never done: a stop that waited for them would take its whole grace.
    stopping = _call_aside(lambda: server.stop(grace_s=1e6))
    assert stopping.result(_PATIENCE_S) == []


def test_a_call_that_was_given_up_before_its_method_returned_holds_no_stop(serve: Serve) -> None:
    began, may_return = threading.Event(), threading.Event()

    def later() -> Any:
        began.set()
        may_return.wait(_PATIENCE_S)
        return Future()

    server, client = serve(later, in_process="copy")
    future = client.futures()
    assert began.wait(_PATIENCE_S)
    future.cancel()
    may_return.set()
    assert _call_aside(lambda: server.stop(grace_s=1e6)).result(_PATIENCE_S) == []


# The end of the server


@pytest.mark.parametrize("way", ["wire", "copy"])
def test_a_server_stops_while_calls_are_open(serve: Serve, way: str, node: Node) -> None:
    server, client = serve(node, in_process=way, timing=_PATIENT)
    futures = [client.futures.later() for _ in range(10)]
    node.await_opened(10)
    assert _call_aside(lambda: server.stop(grace_s=0.0)).result(_PATIENCE_S) == []
    for future in futures:
        with pytest.raises(courier.ServerLostError):
            future.result(_PATIENCE_S)
    assert all(call.cancelled for call in node.calls)
    for opened in node.opened:
        opened.set_result("too late")  # must not fail where the futures are settled


@pytest.mark.parametrize("way", ["wire", "copy"])
def test_a_server_that_stops_waits_for_what_is_open(serve: Serve, way: str, node: Node) -> None:
    server, client = serve(node, in_process=way)
    future = client.futures.later()
    node.await_opened()
    stopping = _call_aside(lambda: server.stop(grace_s=60.0))
    wait_until(lambda: not server.has_started)
    assert not stopping.done()
    node.opened[0].set_result("just in time")
    assert future.result(_PATIENCE_S) == "just in time"
    assert stopping.result(_PATIENCE_S) == []


def test_a_large_answer_is_not_lost_when_its_server_stops_just_then(serve: Serve) -> None:
    answer = np.zeros(64 << 20, np.uint8)  # takes a while to be put where the client reads it
    for _ in range(3):
        node = Node()
        server, client = serve(node)
        future = client.futures.later()
        node.await_opened()
        stopping = _call_aside(lambda server=server: server.stop(grace_s=60.0))
        wait_until(lambda server=server: not server.has_started)
        node.opened[0].set_result(answer)
        assert future.result(_PATIENCE_S).shape == answer.shape
        assert stopping.result(_PATIENCE_S) == []


# Clients that know gRPC only


@pytest.fixture
def by_grpc(
    serve: Serve, secret: courier.Secret, node: Node
) -> Iterator[tuple[courier.Server, GrpcClient]]:
    server, _ = serve(node, thread_pool_size=1, timing=_PATIENT)
    with contextlib.closing(GrpcClient(server.address, secret)) as client:
        yield server, client


def test_a_plain_grpc_client_gets_what_comes_later_and_holds_no_handler(
    by_grpc: tuple[courier.Server, GrpcClient], node: Node
) -> None:
    _, client = by_grpc
    assert client.call("done", None) is None
    with pytest.raises(KeyError, match="as asked"):
        client.call("failed")
    with pytest.raises(concurrent.futures.CancelledError):
        client.call("cancelled")
    large = np.zeros(1 << 20)
    calls = [_call_aside(lambda size=size: client.call("later", large[:size])) for size in (1, -1)]
    node.await_opened(2)
    assert client.call("echo", 1) == 1
    for opened in node.opened:
        opened.set_result("here")
    assert [call.result(_PATIENCE_S) for call in calls] == ["here"] * 2
    call = _call_aside(lambda: client.call("later"))
    node.await_opened(3)
    node.opened[2].set_result(threading.Lock())
    with pytest.raises(Refused, match="lock"):
        call.result(_PATIENCE_S)


def test_a_server_stops_while_a_plain_grpc_client_waits(
    by_grpc: tuple[courier.Server, GrpcClient], node: Node
) -> None:
    server, client = by_grpc
    call = _call_aside(lambda: client.call("later"))
    node.await_opened()
    assert _call_aside(lambda: server.stop(grace_s=0.0)).result(_PATIENCE_S) == []
    with pytest.raises(grpc.RpcError):
        call.result(_PATIENCE_S)
