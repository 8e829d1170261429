"""An object that tests serve: it answers, fails or waits as asked, and says what its calls met."""

import threading
from collections.abc import Iterator
from typing import Any

import courier


def hear(client: Any) -> None:
    """Hears of a call of a node by its callback, and nothing else."""
    heard = threading.Event()
    client.futures.echo().add_done_callback(lambda _: heard.set())
    assert heard.wait(20)


class Node:
    def __init__(self) -> None:
        #: Calls of `block` and `hang` that have begun.
        self.calls = 0
        self.entered = threading.Semaphore(0)
        #: Lets `block` return, and what was cancelled.
        self.release = threading.Event()
        self.cancelled = threading.Event()
        self.generator_ended = threading.Event()
        self.kept: Any = None

    def echo(self, value: Any = None) -> Any:
        return value

    def keep(self, value: Any) -> Any:
        self.kept = value
        return value

    def apply(self, function: Any, *args: Any) -> Any:
        return function(*args)

    def fail(self) -> None:
        raise KeyError("as asked")

    def block(self, *_: Any) -> str:
        self._enter()
        self.release.wait(60)
        return "released"

    def hang(self, *_: Any) -> None:
        self._enter()
        self._linger()

    def count(self, end: int) -> Iterator[int]:
        try:
            yield from range(end)
        finally:
            self.generator_ended.set()

    def fail_later(self) -> Iterator[int]:
        yield 1
        raise KeyError("in mid-stream")

    def one_then_wait(self) -> Iterator[int]:
        try:
            yield 1
            self._enter()
            self._linger()
            yield 2
        finally:
            self.generator_ended.set()

    def await_calls(self, count: int = 1) -> None:
        """Returns when so many more calls have begun."""
        for _ in range(count):
            assert self.entered.acquire(timeout=20)

    def _linger(self) -> None:
        if courier.current_call().wait_cancelled(60):
            self.cancelled.set()
            # Its own clock may be ahead of the caller's: the answer must not come first.
            self.release.wait(3.0)

    def _enter(self) -> None:
        self.calls += 1
        self.entered.release()
