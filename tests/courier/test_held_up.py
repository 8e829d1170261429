"""One thread is held up, or its memory ends: no call is lost silently, nothing is left."""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import courier
from courier.client import _calls
from courier.client._background_reader import BACKGROUND_READER
from courier.client._link import Link
from courier.server import host
from courier.server._caller import ServedConnection
from courier.server.host import ConnectionServer
from courier.server.unproven import UnprovenPeer
from courier.values.parcel import Parcel
from courier.wire.carrier import UnixCarrier
from courier.wire.channel import Channel, NothingSentError
from courier.wire.frames import Kind
from tests.courier.conftest import Connect, Reserve, Serve
from tests.courier.served import Node, hear
from tests.courier.waiting import wait_until

_PATIENCE_S = 20.0
#: Longer than anybody was once waited for.
_HELD_UP_S = 1.5


def _hold_up(
    monkeypatch: pytest.MonkeyPatch, where: type, name: str, thread: str, seconds: float
) -> None:
    """Has a thread stand still before each call of a method."""
    method = getattr(where, name)

    def slow(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread().name == thread:
            time.sleep(seconds)
        return method(*args, **kwargs)

    monkeypatch.setattr(where, name, slow)


def test_what_a_server_sent_before_it_left_is_read_though_nothing_can_be_sent_to_it(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, is_over = threading.Event(), threading.Event()
    read_now = Link.read_now

    def read_late(self: Link) -> bool:
        if threading.current_thread().name == "courier-background":
            is_over.wait(_PATIENCE_S)
        return read_now(self)

    def items() -> Iterator[bytes]:
        yield b""
        go_on.wait(_PATIENCE_S)
        # As much as a connection takes at once, and more than is read at once.
        for _ in range(80):
            yield bytes(1000)

    monkeypatch.setattr(Link, "read_now", read_late)
    server, client = serve(items)
    reader = client()
    assert next(reader) == b""
    go_on.set()
    assert server.stop(_PATIENCE_S) == []
    try:
        assert len(list(reader)) == 80
    finally:
        is_over.set()


@pytest.mark.parametrize("waits", [True, False])
def test_a_client_at_rest_that_has_not_seen_its_server_leave_finds_the_next(
    serve: Serve, connect: Connect, reserve: Reserve, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    port = reserve()
    client = connect(f"127.0.0.1:{port}", wait_for_ready=waits)
    _hold_up(monkeypatch, Link, "_read", "courier-background", _HELD_UP_S)
    for number in range(2):
        server, _ = serve(lambda number=number: number, port=port, share_port=True)
        assert client() == number
        server.stop(0)
        time.sleep(0.1)  # the background reader has begun to look


def test_calls_wait_for_the_next_server_while_one_is_held_up_in_its_stop(
    serve: Serve, reserve: Reserve, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = reserve()
    server, client = serve(Node(), port=port, share_port=True)
    assert client.echo(1) == 1
    remove = ConnectionServer._remove

    def slow(self: ConnectionServer, descriptor: int) -> None:
        if threading.current_thread() is stop and descriptor == self._listener.fileno():
            time.sleep(_HELD_UP_S)
        remove(self, descriptor)

    stop = threading.Thread(target=server.stop, args=(0.3,))
    monkeypatch.setattr(ConnectionServer, "_remove", slow)
    stop.start()
    wait_until(lambda: not server.has_started)
    waiting = [client.futures.echo(index) for index in range(20)]
    stop.join()
    serve(Node(), port=port, share_port=True)
    assert [each.result(_PATIENCE_S) for each in waiting] == list(range(20))


def test_a_poller_that_is_held_up_is_waited_for(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client = serve(Node())
    assert client.echo(1) == 1
    _hold_up(monkeypatch, ConnectionServer, "_reject_all", "courier-poller", _HELD_UP_S)
    assert server.stop(_PATIENCE_S) == []


@pytest.mark.parametrize("kind", [UnprovenPeer, ServedConnection])
def test_nobody_stays_connected_who_was_let_in_by_the_last_turn_of_the_poller(
    secret: courier.Secret, monkeypatch: pytest.MonkeyPatch, kind: type
) -> None:
    entered, ended = threading.Event(), threading.Event()

    class Held(kind):  # type: ignore[misc]
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            entered.set()
            assert ended.wait(_PATIENCE_S)

    monkeypatch.setattr(host, kind.__name__, Held)
    server = courier.Server(
        lambda: 1, secret=secret, in_process="wire", timing=courier.Timing(poller_end_s=0.1)
    )
    server.start()
    client = courier.Client(server.address, secret=secret, wait_for_ready=False)
    future = client.futures()
    assert entered.wait(_PATIENCE_S)
    assert server.stop(0.0) == ["courier-poller"]
    ended.set()
    with pytest.raises(courier.CourierError):
        future.result(_PATIENCE_S)
    server.stop(0.0)
    courier.close(client)
    poller = server._host
    wait_until(lambda: not poller._unproven and not poller._callers)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_call_that_begins_as_its_server_leaves_goes_to_the_next_one(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, reserve: Reserve, blocking: bool
) -> None:
    there = {"port": reserve(), "share_port": True}
    server, client = serve(lambda: "first", **there)
    assert client() == "first"
    server.stop(0.0)
    serve(lambda: "next", **there)
    begin, send = Link.begin, Channel.send
    began: list[Link] = []

    def note_begin(link: Link, *args: Any, **kwargs: Any) -> None:
        began.append(link)
        begin(link, *args, **kwargs)

    def send_too_late(channel: Channel, *args: Any) -> bool:
        if len(began) > 1 or args[0] == 0:
            return send(channel, *args)
        # Another thread reads the end of the connection before this one can write to it.
        reader = threading.Thread(target=began[0].fail, args=("the server closed the connection",))
        reader.start()
        reader.join()
        raise NothingSentError("broken pipe")

    # The quick way looks at the connection first, and does not take it if it sees the end.
    monkeypatch.setattr(Link, "ask", lambda *_: None)
    # As if nobody had looked at the connection since its server left.
    monkeypatch.setattr(Link, "refresh", lambda _: True)
    monkeypatch.setattr(Link, "begin", note_begin)
    monkeypatch.setattr(Channel, "send", send_too_late)
    assert (client() if blocking else client.futures().result(20)) == "next"


# Errors inside


def test_an_error_of_one_connection_is_not_that_of_others(
    serve: Serve, node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, one = serve(node)
    _, other = serve(Node())
    hear(one)
    hear(other)
    # Nothing is open but what comes next, so that it is the first that the background reader looks at.
    wait_until(lambda: not BACKGROUND_READER._attended)
    real = Link.expire
    broken = []

    def expire(link: Link, now: float) -> float | None:
        if threading.current_thread().name == "courier-background" and not broken:
            broken.append(link)
            raise MemoryError("for once")
        return real(link, now)

    monkeypatch.setattr(Link, "expire", expire)
    future = one.futures.block()
    future.add_done_callback(lambda _: None)
    with pytest.raises(courier.ServerLostError, match="for once"):
        future.result(10)
    node.release.set()
    assert other.echo(1) == 1
    hear(other)
    hear(one)
    assert "continues" in caplog.text
    caplog.clear()


@pytest.mark.parametrize("method", ["echo", "count"])
def test_an_answer_that_cannot_be_sent_loses_the_connection_and_not_the_call(
    serve: Serve,
    node: Node,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    method: str,
) -> None:
    _, client = serve(node, client={"call_timeout": 3.0})
    assert client.echo(1) == 1
    _fail_once(monkeypatch, Channel, "send" if method == "echo" else "post", threads="handler")
    with caplog.at_level(logging.CRITICAL), pytest.raises(courier.ServerLostError):
        _ = list(client.count(3)) if method == "count" else client.echo(1)
    assert client.echo(1) == 1


def test_a_call_that_cannot_be_sent_does_not_hold_up_those_that_waited_with_it(
    serve: Serve, node: Node, reserve: Reserve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = reserve()
    client = connect(f"localhost:{port}", call_timeout=3.0)
    futures = [client.futures.echo(1) for _ in range(3)]
    _fail_once(monkeypatch, _calls, "call_meta")
    serve(node, port=port, share_port=True)
    with pytest.raises(courier.CourierError, match="MemoryError"):
        futures[0].result(3.0)
    assert [future.result(3.0) for future in futures[1:]] == [1, 1]


def _fail_once(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, threads: str = "") -> None:
    """Has the memory end, for once, in threads of this kind."""
    real = getattr(where, name)
    left = [1]

    def failing(*args: Any, **kwargs: Any) -> Any:
        if threads in threading.current_thread().name and left:
            left.pop()
            raise MemoryError
        return real(*args, **kwargs)

    monkeypatch.setattr(where, name, failing)


def test_a_frame_that_is_posted_while_another_leaves_is_not_left_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = (
        Channel(UnixCarrier(end, "the test"), receive_key=bytes(32), send_key=bytes(32))
        for end in socket.socketpair()
    )
    send_now: Any = ours._send_now

    def send_and_be_overtaken(*what: Any) -> object:
        result: object = send_now(*what)
        # It finds that somebody sends, and leaves its frame to them.
        other = threading.Thread(target=ours.send, args=(Kind.VALUE, 2, Parcel(b"2"), b""))
        other.start()
        other.join()
        return result

    monkeypatch.setattr(ours, "_send_now", send_and_be_overtaken)
    with contextlib.closing(ours), contextlib.closing(theirs):
        assert ours.send(Kind.VALUE, 1, Parcel(b"1"), b"")
        frames = list(theirs.receive(wait=False) or ())
        assert [frame.call for frame in frames] == [1, 2]
