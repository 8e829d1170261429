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


@pytest.mark.parametrize("value", [None, 0, False, "", np.arange(5), np.zeros(1 << 20)])
def test_a_future_that_is_done_already_answers_at_once(
    serve: Serve, way: dict[str, Any], node: Node, value: Any
) -> None:
    _, client = serve(node, **way)
    np.testing.assert_array_equal(client.done(value), value)
    np.testing.assert_array_equal(client.futures.done(value).result(_PATIENCE_S), value)


def test_a_future_that_is_done_already_answers_methods_known_as_fast(
    serve: Serve, way: dict[str, Any], node: Node
) -> None:
    # After a few calls these run where they are read, or in the thread of the caller.
    _, client = serve(node, **way)
    calls = _call_aside(lambda: [client.done(index) for index in range(200)])
    assert calls.result(_PATIENCE_S) == list(range(200))


def test_fast_methods_may_answer_later(serve: Serve, way: dict[str, Any], node: Node) -> None:
    _, client = serve(node, **way)
    for index in range(30):
        call = _call_aside(client.later)
        node.await_opened(index + 1)
        assert not call.done()
        node.opened[index].set_result(index)
        assert call.result(_PATIENCE_S) == index


def test_a_future_that_another_thread_settles_answers_then(
    serve: Serve, way: dict[str, Any], node: Node
) -> None:
    _, client = serve(node, **way)
    blocking = _call_aside(client.later)
    future = client.futures.later()
    node.await_opened(2)
    assert not blocking.done()
    assert not future.done()
    for index, opened in enumerate(node.opened):
        opened.set_result(index)
    assert {blocking.result(_PATIENCE_S), future.result(_PATIENCE_S)} == {0, 1}


def test_it_may_be_awaited(serve: Serve, way: dict[str, Any], node: Node) -> None:
    _, client = serve(node, **way)

    async def call() -> Any:
        calls = [asyncio.create_task(client.aio.later()) for _ in range(5)]
        await asyncio.to_thread(node.await_opened, 5)
        for opened in node.opened:
            opened.set_result("here")
        return await asyncio.wait_for(asyncio.gather(*calls), _PATIENCE_S)

    assert asyncio.run(call()) == ["here"] * 5


def test_the_exception_of_a_future_arrives_as_itself(
    serve: Serve, way: dict[str, Any], node: Node
) -> None:
    _, client = serve(node, **way)
    with pytest.raises(KeyError, match="as asked"):
        client.failed()
    future = client.futures.later()
    node.await_opened()
    node.opened[0].set_exception(WeirdError(7, reason="odd"))
    with pytest.raises(WeirdError, match=r"odd \(7\)") as caught:
        future.result(_PATIENCE_S)
    assert caught.value.code == 7


def test_an_exception_that_ends_processes_ends_none(
    serve: Serve, way: dict[str, Any], node: Node
) -> None:
    _, client = serve(node, **way)
    future = client.futures.later()
    node.await_opened()
    node.opened[0].set_exception(SystemExit(3))
    with pytest.raises(courier.RemoteError, match="SystemExit"):
        future.result(_PATIENCE_S)
    assert client.echo(1) == 1


def test_an_exception_of_many_futures_does_not_gather_a_longer_traceback_for_each(
    serve: Serve, way: dict[str, Any], node: Node
) -> None:
    _, client = serve(node, **way)
    futures = [client.futures.later() for _ in range(20)]
    node.await_opened(20)
    error = KeyError("shared")
    for opened in node.opened:
        opened.set_exception(error)
    texts = set()
    for future in futures:
        with pytest.raises(KeyError) as caught:
            future.result(_PATIENCE_S)
        texts.add(courier.remote_traceback(caught.value))
    assert len(texts) == 1


def test_the_traceback_shows_where_it_failed(serve: Serve, way: dict[str, Any], node: Node) -> None:
    def fail_in_a_thread() -> None:
        raise KeyError("deep")

    _, client = serve(node, **way)
    future = client.futures.later()
    node.await_opened()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(fail_in_a_thread).add_done_callback(
            lambda done: node.opened[0].set_exception(done.exception())
        )
    with pytest.raises(KeyError) as caught:
        future.result(_PATIENCE_S)
    assert "fail_in_a_thread" in (courier.remote_traceback(caught.value) or "")


def test_a_future_that_is_cancelled_is_a_cancelled_call(
    serve: Serve, way: dict[str, Any], node: Node
) -> None:
    _, client = serve(node, **way)
    with pytest.raises(concurrent.futures.CancelledError):
        client.cancelled()
    future = client.futures.later()
    node.await_opened()
    node.opened[0].cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(_PATIENCE_S)
    assert client.echo(1) == 1


def test_a_result_that_cannot_be_pickled_is_an_error_of_its_call(
    serve: Serve, way: dict[str, Any], node: Node
) -> None:
    _, client = serve(node, **way)
    lock = threading.Lock()
    future = client.futures.later()
    node.await_opened()
    node.opened[0].set_result(lock)
    if way.get("in_process") == "share":
        assert future.result(_PATIENCE_S) is lock
    else:
        with pytest.raises(courier.SerializationError, match="lock"):
            future.result(_PATIENCE_S)
    assert client.echo(1) == 1


def test_a_result_may_be_shared(serve: Serve, way: dict[str, Any], node: Node) -> None:
    _, client = serve(node, **way)
    future = client.futures.later()
    node.await_opened()
    node.opened[0].set_result(courier.Shared({"w": np.arange(1 << 17)}))
    np.testing.assert_array_equal(future.result(_PATIENCE_S)["w"], np.arange(1 << 17))


def test_a_method_may_hand_on_the_future_of_another_client(
    serve: Serve, way: dict[str, Any], node: Node
) -> None:
    _, inner = serve(node, **way)
    _, outer = serve(Forwarder(inner), thread_pool_size=1, **way)
    assert outer.echo("through") == "through"
    with pytest.raises(KeyError, match="as asked"):
        outer.failed()
    futures = [outer.futures.later() for _ in range(10)]
    node.await_opened(10)
    assert outer.echo("meanwhile") == "meanwhile"
    for opened in node.opened:
        opened.set_result("far")
    assert [future.result(_PATIENCE_S) for future in futures] == ["far"] * 10


# No thread is held


def test_there_may_be_more_of_them_than_threads(
    serve: Serve, way: dict[str, Any], node: Node
) -> None:
    _, client = serve(node, thread_pool_size=1, queue_size=100, **way)
    futures = [client.futures.later() for _ in range(60)]
    node.await_opened(60)
    assert client.echo("meanwhile") == "meanwhile"
    for index, opened in reversed(list(enumerate(node.opened))):
        opened.set_result(index)
    # Calls need not run in the order in which they were made.
    assert sorted(future.result(_PATIENCE_S) for future in futures) == list(range(60))


def test_blocking_callers_may_be_more_than_threads(
    serve: Serve, way: dict[str, Any], node: Node
) -> None:
    _, client = serve(node, thread_pool_size=1, **way)
    calls = [_call_aside(client.later) for _ in range(20)]
    node.await_opened(20)
    assert client.echo("meanwhile") == "meanwhile"
    for opened in node.opened:
        opened.set_result(1)
    assert [call.result(_PATIENCE_S) for call in calls] == [1] * 20


# Callers that leave


def test_a_caller_that_cancels_is_noticed(serve: Serve, way: dict[str, Any], node: Node) -> None:
    _, client = serve(node, **way)
    future = client.futures.later()
    node.await_opened()
    assert future.cancel()
    wait_until(lambda: node.calls[0].cancelled)
    node.opened[0].set_result("too late")
    with pytest.raises(courier.CallCancelledError):
        future.result(_PATIENCE_S)
    assert client.echo(1) == 1


def test_a_caller_that_times_out_is_noticed(serve: Serve, way: dict[str, Any], node: Node) -> None:
    _, client = serve(node, client={"call_timeout": 0.3}, **way)
    for call in (client.later, lambda: client.futures.later().result(_PATIENCE_S)):
        before = len(node.opened)
        while len(node.opened) == before:  # to connect may take longer
            with pytest.raises(courier.CallTimeoutError):
                call()
    wait_until(lambda: all(call.cancelled for call in node.calls))
    for opened in node.opened:
        opened.set_result("too late")
    assert courier.with_timeout(client, None).echo(1) == 1


def test_a_caller_that_leaves_is_noticed(
    serve: Serve, connect: Callable[..., Any], way: dict[str, Any], node: Node
) -> None:
    server, client = serve(node, **way)
    other = connect(server.address)
    future = other.futures.later()
    node.await_opened()
    courier.close(other)
    with pytest.raises(courier.CallCancelledError):
        future.result(_PATIENCE_S)
    wait_until(lambda: node.calls[0].cancelled)
    node.opened[0].set_result("too late")
    assert client.echo(1) == 1


def test_what_callers_gave_up_holds_no_stop(serve: Serve, way: dict[str, Any], node: Node) -> None:
    server, client = serve(node, **way)
    futures = [client.futures.later() for _ in range(5)]
    node.await_opened(5)
    for future in futures:
        future.cancel()
    wait_until(lambda: all(call.cancelled for call in node.calls))
    # Their futures are never done: a stop that waited for them would take its whole grace.
    stopping = _call_aside(lambda: server.stop(grace_s=1e6))
    assert stopping.result(_PATIENCE_S) == []


def test_a_call_that_was_given_up_before_its_method_returned_holds_no_stop(serve: Serve) -> None:
    class Slow:
        def __init__(self) -> None:
            self.began, self.may_return = threading.Event(), threading.Event()

        def later(self) -> Any:
            self.began.set()
            self.may_return.wait(_PATIENCE_S)
            return Future()

    slow = Slow()
    server, client = serve(slow, in_process="copy")
    future = client.futures.later()
    assert slow.began.wait(_PATIENCE_S)
    future.cancel()
    slow.may_return.set()
    assert _call_aside(lambda: server.stop(grace_s=1e6)).result(_PATIENCE_S) == []


# The end of the server


#: Servers that stop at once wait for their threads, however slow the machine is.
_PATIENT = courier.Timing(epilogue_s=20.0)


def test_a_server_stops_while_calls_are_open(serve: Serve, way: dict[str, Any], node: Node) -> None:
    server, client = serve(node, timing=_PATIENT, **way)
    futures = [client.futures.later() for _ in range(10)]
    node.await_opened(10)
    assert _call_aside(lambda: server.stop(grace_s=0.0)).result(_PATIENCE_S) == []
    for future in futures:
        with pytest.raises(courier.ServerLostError):
            future.result(_PATIENCE_S)
    assert all(call.cancelled for call in node.calls)
    for opened in node.opened:
        opened.set_result("too late")  # must not fail where the futures are settled


def test_a_client_without_calls_holds_no_stop(
    serve: Serve, way: dict[str, Any], node: Node
) -> None:
    server, client = serve(node, **way)
    assert client.echo(1) == 1
    assert _call_aside(lambda: server.stop(grace_s=1e6)).result(_PATIENCE_S) == []


def test_a_server_that_stops_waits_for_what_is_open(
    serve: Serve, way: dict[str, Any], node: Node
) -> None:
    server, client = serve(node, **way)
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
    for _ in range(5):
        node = Node()
        server, client = serve(node, in_process="wire")
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
    server, _ = serve(node, timing=_PATIENT)
    with contextlib.closing(GrpcClient(server.address, secret)) as client:
        yield server, client


def test_a_plain_grpc_client_gets_what_comes_later(
    by_grpc: tuple[courier.Server, GrpcClient], node: Node
) -> None:
    _, client = by_grpc
    assert client.call("done", None) is None
    with pytest.raises(KeyError, match="as asked"):
        client.call("failed")
    call = _call_aside(lambda: client.call("later"))
    node.await_opened()
    node.opened[0].set_result("here")
    assert call.result(_PATIENCE_S) == "here"
    call = _call_aside(lambda: client.call("later"))
    node.await_opened(2)
    node.opened[1].set_result(threading.Lock())
    with pytest.raises(Refused, match="lock"):
        call.result(_PATIENCE_S)
    with pytest.raises(concurrent.futures.CancelledError):
        client.call("cancelled")


def test_large_calls_by_plain_grpc_hold_no_handler(
    serve: Serve, secret: courier.Secret, node: Node
) -> None:
    server, _ = serve(node, thread_pool_size=1)
    with contextlib.closing(GrpcClient(server.address, secret)) as client:
        large = np.zeros(1 << 20)
        calls = [_call_aside(lambda: client.call("later", large)) for _ in range(3)]
        node.await_opened(3)
        assert client.call("echo", 1) == 1
        for opened in node.opened:
            opened.set_result("here")
        assert [call.result(_PATIENCE_S) for call in calls] == ["here"] * 3


def test_a_plain_grpc_client_that_times_out_frees_its_thread(
    serve: Serve, secret: courier.Secret, node: Node
) -> None:
    server, _ = serve(node, thread_pool_size=1)
    with contextlib.closing(GrpcClient(server.address, secret)) as client:
        with pytest.raises(grpc.RpcError):
            client.call("later", timeout=1)
        assert client.call("echo", 1) == 1
        for opened in node.opened:
            opened.set_result("too late")


def test_a_server_stops_while_a_plain_grpc_client_waits(
    by_grpc: tuple[courier.Server, GrpcClient], node: Node
) -> None:
    server, client = by_grpc
    call = _call_aside(lambda: client.call("later"))
    node.await_opened()
    assert _call_aside(lambda: server.stop(grace_s=0.0)).result(_PATIENCE_S) == []
    with pytest.raises(grpc.RpcError):
        call.result(_PATIENCE_S)
