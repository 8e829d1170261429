"""Each call is answered, whatever its result, its exception or its sending does."""

import concurrent.futures
from collections.abc import Iterator
from typing import Any

import pytest

import courier
from tests.courier.conftest import Serve


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
    return serve(Odd(), in_process=request.param, client={"call_timeout": 3.0})[1]


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
