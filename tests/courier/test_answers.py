"""Each call is answered, whatever its arguments, its result or its exception does."""

import concurrent.futures
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import courier
from tests.courier.conftest import Serve
from tests.courier.served import Node


def _interrupt() -> None:
    raise KeyboardInterrupt


class Leaving:
    """Wants to end the process that unpickles it."""

    def __reduce__(self) -> Any:
        return exec, ("import sys; sys.exit(3)",)


class Interrupted:
    """Its unpickling is interrupted, as if by a Ctrl-C."""

    def __reduce__(self) -> Any:
        return _interrupt, ()


class Unwilling:
    def __reduce__(self) -> Any:
        raise SystemExit


class Interrupting:
    def __reduce__(self) -> Any:
        raise KeyboardInterrupt


class Unlookable:
    """As a proxy of a web framework outside of a request."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise RuntimeError("look elsewhere")


class Unspeakable(Exception):  # noqa: N818 - a name for a test
    @property
    def args(self) -> Any:  # type: ignore[override]
        raise RuntimeError("look elsewhere")


#: What is sent, and what its caller is told.
_KINDS: dict[str, tuple[Callable[[], Any], tuple[type[Exception], ...], str]] = {
    "leaving": (Leaving, (courier.SerializationError,), "SystemExit"),
    "interrupted": (Interrupted, (courier.SerializationError,), "KeyboardInterrupt"),
    "unwilling": (Unwilling, (courier.SerializationError,), "SystemExit"),
    "lock": (threading.Lock, (courier.SerializationError,), "lock"),
    "interrupting": (Interrupting, (courier.RemoteError,), "KeyboardInterrupt"),
    "unlookable": (
        Unlookable,
        (courier.RemoteError, RuntimeError, courier.SerializationError),
        "look elsewhere",
    ),
}


class Odd(Node):
    def give(self, what: str = "") -> Any:
        return _KINDS[what][0]() if what else 1

    def later(self, what: str) -> Any:
        future = concurrent.futures.Future[Any]()
        future.set_result(_KINDS[what][0]())
        return future

    def stream(self, what: str) -> Iterator[Any]:
        yield _KINDS[what][0]()

    def fail_oddly(self) -> None:
        raise Unspeakable


@pytest.fixture(params=["wire", "copy"])
def odd(serve: Serve, request: pytest.FixtureRequest) -> Any:
    return serve(Odd(), in_process=request.param, client={"call_timeout": 3.0})[1]


# Not of "interrupted": it would interrupt this thread, as it should.
@pytest.mark.parametrize("what", [what for what in _KINDS if what != "interrupted"])
def test_a_result_that_cannot_be_sent_is_named_and_harms_no_thread(odd: Any, what: str) -> None:
    _, errors, match = _KINDS[what]
    for call in (
        odd.give,
        lambda what: odd.futures.give(what).result(20),
        odd.later,
        lambda what: list(odd.stream(what)),
    ):
        with pytest.raises(errors, match=match):
            call(what)
    for _ in range(100):  # known as fast, it runs where others wait for the thread
        odd.give()
    for _ in range(3):
        with pytest.raises(errors, match=match):
            odd.give(what)
    assert odd.give() == 1


@pytest.mark.parametrize("what", ["leaving", "interrupted", "lock"])
def test_arguments_that_cannot_be_sent_are_refused(odd: Any, what: str) -> None:
    make, _, match = _KINDS[what]
    with pytest.raises(courier.SerializationError, match=match) as caught:
        odd.echo(make())
    assert "arguments of 'echo'" in str(caught.value) or what != "lock"
    assert odd.echo(1) == 1


def test_an_exception_that_raises_when_it_is_looked_at_is_answered(odd: Any) -> None:
    with pytest.raises(Unspeakable):
        odd.fail_oddly()
