"""Each call is answered, whatever its result, its exception or its sending does."""

import concurrent.futures
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import courier
from courier._engine import calls
from courier._engine.channel import Channel
from tests.courier.conftest import Connect, Reserve, Serve

_TIMEOUT_S = 3.0


class Unlookable:
    """As a proxy of a web framework outside of a request."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise RuntimeError("look elsewhere")


class Interrupting:
    """Its pickling is interrupted, as if by a Ctrl-C."""

    def __reduce__(self) -> Any:
        raise KeyboardInterrupt


class Interrupted:
    """Its unpickling is."""

    def __reduce__(self) -> Any:
        return _interrupt, ()


def _interrupt() -> None:
    raise KeyboardInterrupt


class Unspeakable(Exception):  # noqa: N818 - a name for a test
    @property
    def args(self) -> Any:  # type: ignore[override]
        raise RuntimeError("look elsewhere")


class Odd:
    def give(self, what: str = "") -> Any:
        return _KINDS[what]() if what else 1

    def later(self, what: str) -> Any:
        future = concurrent.futures.Future[Any]()
        future.set_result(_KINDS[what]())
        return future

    def stream(self, what: str) -> Iterator[Any]:
        yield _KINDS[what]()

    def fail(self) -> None:
        raise Unspeakable

    def take(self, value: Any) -> None:
        """Is never called."""


_KINDS = {"unlookable": Unlookable, "interrupting": Interrupting}


@pytest.fixture(params=["wire", "copy"])
def odd(serve: Serve, request: pytest.FixtureRequest) -> Any:
    _, client = serve(Odd(), in_process=request.param, client={"call_timeout": _TIMEOUT_S})
    return client


@pytest.mark.parametrize("what", _KINDS)
@pytest.mark.parametrize("method", ["give", "later"])
def test_a_result_that_raises_when_it_is_looked_at_is_answered(
    odd: Any, method: str, what: str
) -> None:
    with pytest.raises((courier.RemoteError, RuntimeError, courier.SerializationError)) as caught:
        getattr(odd, method)(what)
    assert "look elsewhere" in str(caught.value) or "KeyboardInterrupt" in str(caught.value)


@pytest.mark.parametrize("what", _KINDS)
def test_an_item_that_raises_when_it_is_pickled_ends_its_stream(odd: Any, what: str) -> None:
    with pytest.raises((courier.RemoteError, RuntimeError, courier.SerializationError)):
        list(odd.stream(what))


def test_a_fast_method_with_such_a_result_leaves_the_server_alive(odd: Any) -> None:
    for _ in range(100):
        odd.give()
    for _ in range(3):
        with pytest.raises(courier.RemoteError, match="KeyboardInterrupt"):
            odd.give("interrupting")
    assert odd.give() == 1


def test_an_exception_that_raises_when_it_is_looked_at_is_answered(odd: Any) -> None:
    with pytest.raises(courier.RemoteError, match="Unspeakable"):
        odd.fail()


def test_arguments_whose_unpickling_is_interrupted_are_refused(odd: Any) -> None:
    with pytest.raises(courier.SerializationError, match="KeyboardInterrupt"):
        odd.take(Interrupted())


@pytest.mark.parametrize("method", ["give", "stream"])
def test_an_answer_that_cannot_be_sent_loses_the_connection_and_not_the_call(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    _, client = serve(Odd(), client={"call_timeout": _TIMEOUT_S})
    assert client.give() == 1
    _fail_once(monkeypatch, Channel, "send" if method == "give" else "post", threads="handler")
    with caplog.at_level(logging.CRITICAL), pytest.raises(courier.ServerLostError):
        _ = list(client.stream("unlookable")) if method == "stream" else client.give()
    assert client.give() == 1


def test_a_call_that_cannot_be_sent_does_not_hold_up_those_that_waited_with_it(
    serve: Serve, reserve: Reserve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = reserve()
    client = connect(f"localhost:{port}", call_timeout=_TIMEOUT_S, compress=True)
    futures = [client.futures.give() for _ in range(3)]
    _fail_once(monkeypatch, calls, "compressed")
    serve(Odd(), port=port, share_port=True)
    with pytest.raises(courier.CourierError, match="MemoryError"):
        futures[0].result(_TIMEOUT_S)
    assert [future.result(_TIMEOUT_S) for future in futures[1:]] == [1, 1]


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
