"""Streams of bytes, by connections that were calls."""

import contextlib
import threading

import numpy as np
import pytest

import courier
from courier import lowlevel
from tests.courier.certificates import Authority
from tests.courier.conftest import Serve, go_by

_BYTES = 3 << 20


class Doubler:
    def double(self, size: int, aside: bool = False) -> None:
        """Sends each number twice as large, when all have come."""
        stream = lowlevel.take_stream()
        both = lowlevel.Duplex(stream, stream)
        numbers = np.empty(size, np.uint8)
        with both.sending(aside=aside):
            both.send(memoryview(b"!"))
            both.receive(numbers.data)
            numbers *= 2
            both.send(numbers.data)

    def refuse(self) -> None:
        raise ValueError("no streams here")

    def drain(self) -> None:
        lowlevel.take_stream().send(b"!")

    def echo(self, text: str) -> str:
        return text


def _first_byte(stream: lowlevel.ByteStream) -> bytes:
    first = bytearray(1)
    lowlevel.Duplex(stream, stream).receive(memoryview(first))
    return bytes(first)


@pytest.mark.parametrize("aside", [False, True])
@pytest.mark.parametrize("way", ["unix", "tcp", "grpc", "tls"])
def test_a_call_becomes_a_stream(
    way: str, aside: bool, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_by("tcp" if way == "tls" else way, monkeypatch)
    tls = Authority().issue() if way == "tls" else None
    _, client = serve(Doubler(), tls=tls, client={"tls": tls})
    stream = lowlevel.open_stream(client, "double", _BYTES, aside)
    assert _first_byte(stream) == b"!"
    both = lowlevel.Duplex(stream, stream)
    numbers = np.arange(_BYTES, dtype=np.uint8)
    results = np.empty_like(numbers)

    def exchange() -> None:
        with both.sending(aside=aside):
            both.send(numbers.data)
            both.receive(results.data)

    exchange()
    assert (results == numbers * 2).all()
    assert client.echo("calls go on") == "calls go on"
    with pytest.raises(courier.ServerLostError, match="the connection broke"):
        exchange()  # the method has returned, and dropped its end


def test_a_refused_stream_begins_otherwise(serve: Serve) -> None:
    _, client = serve(Doubler())
    assert _first_byte(lowlevel.open_stream(client, "refuse")) != b"!"
    assert _first_byte(lowlevel.open_stream(client, "unknown")) != b"!"


def test_a_call_without_a_connection_is_no_stream(serve: Serve) -> None:
    _, client = serve(Doubler(), in_process="copy")
    with pytest.raises(RuntimeError, match="did not come by a connection"):
        client.drain()


def test_shut_wakes_the_thread_that_waits(serve: Serve) -> None:
    _, client = serve(Doubler())
    stream = lowlevel.open_stream(client, "double", 1)
    assert _first_byte(stream) == b"!"
    ended = threading.Event()

    def wait() -> None:
        with contextlib.suppress(courier.ServerLostError):
            _first_byte(stream)
        ended.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    stream.shut()
    waiting.join(20)
    assert ended.is_set()
