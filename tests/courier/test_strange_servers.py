"""What clients make of servers that break, lie, or are none of ours."""

import concurrent.futures
import contextlib
import itertools
import pickle
import time
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

import courier
from courier.wire.frames import Kind
from tests.courier.by_hand import Visitor, answered_by_hand
from tests.courier.conftest import Connect, Meet

_NO_COURIER = (courier.ProtocolError, courier.ServerUnreachableError)


@contextlib.contextmanager
def grpc_server(answer: Any) -> Iterator[str]:
    """A gRPC server that answers all methods alike, and is none of ours."""

    class Everything(grpc.GenericRpcHandler):
        def service(self, handler_call_details: Any) -> Any:
            return answer and grpc.stream_stream_rpc_method_handler(answer)

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads, handlers=[Everything()])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait()


@pytest.mark.parametrize("code", list(grpc.StatusCode), ids=lambda code: code.name)
def test_no_status_of_any_server_leaks_an_error_of_grpc(
    code: grpc.StatusCode, connect: Connect
) -> None:
    def answer(_: Any, context: grpc.ServicerContext) -> Iterator[bytes]:
        context.set_code(code)
        context.set_details("on purpose")
        yield b"\xff\xff"

    with grpc_server(answer) as address:
        client = connect(address, call_timeout=10, wait_for_ready=False)
        error = client.futures.anything().exception(20)
        assert isinstance(error, _NO_COURIER)
        assert address in str(error)
        courier.close(client)


def test_a_grpc_server_that_is_none_of_ours_is_told_from_one_that_is_not_there(
    connect: Connect,
) -> None:
    with grpc_server(None) as address:
        client = connect(address, call_timeout=10)
        with pytest.raises(courier.ProtocolError, match=address):
            client.anything()
        courier.close(client)


@pytest.mark.parametrize("wait", [True, False], ids=["waits", "does not wait"])
@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 418 teapot\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"\xff\xff\xff\xff" + bytes(500),
        b"\x40\x00\x00\x00" + bytes(64),
        b"\x00\x00\x00\x00",
        b"\x01\x00\x00\x00x",
        b"\x10\x00\x00\x00" + bytes(16),
    ],
    ids=["http", "ssh", "long", "zeros", "empty", "short", "no proof"],
)
def test_something_that_is_no_server_of_ours_is_found_out_soon(
    meet: Meet, value_bomb: bytes, answer: bytes, wait: bool
) -> None:
    # Soon is long before the end of an attempt, also where the machine is slow.
    timing = courier.Timing(attempt_s=60.0)

    def behave(visitor: Visitor) -> None:
        visitor.receive(1)
        visitor.send([answer, value_bomb])
        while not visitor.is_hung_up_on():
            pass

    with meet(behave, wait_for_ready=wait, call_timeout=60, timing=timing) as client:
        begun_at = time.monotonic()
        with pytest.raises((courier.ProtocolError, courier.AuthenticationError)) as caught:
            client.fine()
        assert type(caught.value) in (courier.ProtocolError, courier.AuthenticationError)
        assert client.address in str(caught.value)
        assert time.monotonic() - begun_at < 20


def test_who_hangs_up_at_once_is_unreachable_after_some_attempts(connect: Connect) -> None:
    came: list[Visitor] = []

    with answered_by_hand(came.append) as address:
        for wait in (True, False):
            client = connect(address, wait_for_ready=wait, call_timeout=20)
            with pytest.raises(courier.ServerUnreachableError, match=address):
                client.fine()
            with pytest.raises(courier.ServerUnreachableError, match=address):
                client.futures.fine().result(20)
            courier.close(client)
    assert 4 <= len(came) < 50


def test_who_hangs_up_at_first_is_called_again(meet: Meet, secret: courier.Secret) -> None:
    came: list[Visitor] = []

    def behave(visitor: Visitor) -> None:
        came.append(visitor)
        if len(came) > 2:
            visitor.greet(secret)
            visitor.send(visitor.write(Kind.VALUE, visitor.read().call, pickle.dumps("fine")))

    with meet(behave) as client:
        assert client.fine() == "fine"


def test_who_never_says_a_word_is_given_up_in_time(connect: Connect) -> None:
    with answered_by_hand(lambda visitor: visitor.is_hung_up_on() or None) as address:
        for wait in (True, False):
            client = connect(address, wait_for_ready=wait, call_timeout=0.3)
            with pytest.raises(
                (courier.CallTimeoutError, courier.ServerUnreachableError), match=address
            ):
                client.fine()
            courier.close(client)


@pytest.mark.parametrize(
    "kind",
    [kind for kind in Kind if kind not in (Kind.GENERATOR, Kind.BUSY, Kind.STOPPING)],
    ids=lambda kind: kind.name,
)
def test_a_senseless_answer_of_a_proven_server_is_an_error_of_ours(
    meet: Meet, secret: courier.Secret, kind: Kind
) -> None:
    def behave(visitor: Visitor) -> None:
        visitor.greet(secret)
        visitor.send(visitor.write(kind, visitor.read().call, b"\x80senseless"))
        visitor.is_hung_up_on()

    with meet(behave) as client:
        with pytest.raises(courier.CourierError, match=client.address) as caught:
            client.fine()
        assert not isinstance(caught.value, courier.CallTimeoutError)


@pytest.mark.parametrize("tells", [True, False])
def test_a_call_whose_time_is_over_says_what_its_server_tells(
    meet: Meet, secret: courier.Secret, monkeypatch: pytest.MonkeyPatch, tells: bool
) -> None:
    if tells:
        for name in ("_TELLS", "_TELLS_S"):
            monkeypatch.setattr(f"courier.client._calls.{name}", 200.0)

    def behave(visitor: Visitor) -> None:
        visitor.greet(secret)
        visitor.send(visitor.write(Kind.VALUE, visitor.read().call, pickle.dumps("fine")))
        number = visitor.read().call
        assert visitor.read().kind == Kind.ASK
        if tells:
            visitor.send(visitor.write(Kind.TOLD, number, b"it waits"))
        visitor.is_hung_up_on()

    with meet(behave) as client:
        client.fine()  # is connected
        told = "within 0.1 s; it waits" if tells else "does not say what became of it"
        future = courier.with_timeout(client, 0.1).futures.fine()
        assert concurrent.futures.wait([future], timeout=20).done
        with pytest.raises(courier.CallTimeoutError, match=told):
            future.result()


def test_an_answer_counts_though_nonsense_follows_it(meet: Meet, secret: courier.Secret) -> None:
    def behave(visitor: Visitor) -> None:
        visitor.greet(secret)
        for nonsense in (b"", b"\xff" * 64):
            answer = visitor.write(Kind.VALUE, visitor.read().call, pickle.dumps("good"))
            visitor.send([b"".join([*answer, nonsense])])
        visitor.is_hung_up_on()

    with meet(behave, call_timeout=None) as client:
        # Without a limit of time, from the second call on, a call takes the shortest way.
        assert [client.fine(), client.fine()] == ["good", "good"]


def test_items_that_make_no_sense_are_an_error_of_ours(meet: Meet, secret: courier.Secret) -> None:
    def behave(visitor: Visitor) -> None:
        visitor.greet(secret)
        number = visitor.read().call
        visitor.send(visitor.write(Kind.GENERATOR, number))
        visitor.send(visitor.write(Kind.VALUE, number, pickle.dumps(1)))
        visitor.send(visitor.write(Kind.BUSY, number))
        visitor.is_hung_up_on()

    with meet(behave) as client:
        items = client.stream()
        assert next(items) == 1
        with pytest.raises(courier.CourierError, match=client.address):
            next(items)
        assert list(items) == []


class Breaking:
    """Breaks the connection in mid-answer, for some times."""

    def __init__(self, secret: courier.Secret, *, breaks: int, marked: bool) -> None:
        self._secret = secret
        self._breaks = breaks
        self._names = ("get",) if marked else ()
        #: The connections over which a call came.
        self.seen: list[int] = []
        self._connections = itertools.count()

    def __call__(self, visitor: Visitor) -> None:
        connection = next(self._connections)
        visitor.greet(self._secret, idempotent=self._names)
        number = visitor.read().call
        self.seen.append(connection)
        answer = b"".join(visitor.write(Kind.UNKNOWN_METHOD, number, b"the end" + bytes(100_000)))
        if self._breaks:
            self._breaks -= 1
            visitor.send([answer[:50_000]])
        else:
            visitor.send([answer])
            visitor.is_hung_up_on()


@pytest.mark.parametrize(
    ("breaks", "marked", "sent", "error"),
    [
        (2, True, 3, courier.UnknownMethodError),
        (100, True, 4, courier.ServerLostError),
        (100, False, 1, courier.ServerLostError),
    ],
    ids=["twice", "always", "not marked"],
)
def test_a_reply_that_is_lost_half_way_is_asked_for_a_few_times_if_that_is_allowed(
    meet: Meet, secret: courier.Secret, breaks: int, marked: bool, sent: int, error: type[Exception]
) -> None:
    fake = Breaking(secret, breaks=breaks, marked=marked)
    with meet(fake, call_timeout=30) as client, pytest.raises(error, match=f"{client.address}|end"):
        client.get()
    assert fake.seen == list(range(sent))  # each over a new connection


def test_a_call_that_a_stopping_server_refused_is_answered_by_the_next(
    connect: Connect, secret: courier.Secret
) -> None:
    """It did not run, so that it may be sent again though it is not marked."""
    seen: list[bytes] = []

    def behave(visitor: Visitor) -> None:
        visitor.greet(secret)
        frame = visitor.read()
        seen.append(b"".join(map(bytes, (frame.parcel.pickle, *frame.parcel.buffers))))
        if len(seen) == 1:
            visitor.send(visitor.write(Kind.GOODBYE, 0))
            visitor.send(visitor.write(Kind.STOPPING, frame.call))
        else:
            visitor.send(visitor.write(Kind.VALUE, frame.call, pickle.dumps("here")))
        visitor.is_hung_up_on()

    with answered_by_hand(behave) as address:
        client = connect(address, call_timeout=30)
        assert client.futures.get(np.arange(100_000)).result(20) == "here"
        courier.close(client)
        fleeting = connect(address, call_timeout=30, wait_for_ready=False)
        seen.clear()
        with pytest.raises(courier.ServerUnreachableError, match="nothing was run"):
            fleeting.get()
        courier.close(fleeting)
    assert len(seen) == 1
