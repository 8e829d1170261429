"""Between any two steps of a call a signal handler may run, or a Ctrl-C come."""

import asyncio
import contextlib
import itertools
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

import courier
from tests.courier.conftest import Connect, Serve
from tests.courier.served import Node

_LARGE = bytes(1 << 18)


def _cancel(client: Any) -> None:
    client.futures.echo().cancel()


_OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "call": lambda client: client.echo(1),
    "large call": lambda client: client.echo(_LARGE) == _LARGE,
    "futures": lambda client: [
        each.result() for each in [client.futures.echo(number) for number in range(2)]
    ],
    "stream": lambda client: list(client.count(2)),
    "cancelled": _cancel,
}
each_operation = pytest.mark.parametrize("operation", _OPERATIONS.values(), ids=_OPERATIONS)


@contextlib.contextmanager
def _at_step(
    number: int, act: Callable[[], object], within: str | tuple[str, ...] = ""
) -> Iterator[None]:
    """Has this thread act where the interpreter looks for signals for the n-th time.

    It does so where a function begins, and where one that is written in C has ended.
    """
    left = number

    def watch(frame: FrameType, event: str, _: object) -> None:
        nonlocal left
        if event in ("call", "c_return") and frame.f_globals["__name__"].startswith(within):
            left -= 1
            if not left:
                sys.setprofile(None)
                act()

    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(None)


@each_operation
def test_a_signal_handler_may_call_the_same_server(
    serve: Serve, node: Node, operation: Callable[[Any], Any]
) -> None:
    _, client = serve(node)
    expected = operation(client)
    for step in itertools.count(1):
        answers: list[object] = []
        with _at_step(step, lambda answers=answers: answers.append(client.echo("handled"))):
            assert operation(client) == expected
        if not answers:
            break
        assert answers == ["handled"]
    assert step > 20


def test_who_holds_the_lock_of_a_future_may_call_the_same_server(serve: Serve, node: Node) -> None:
    _, client = serve(node)
    future = client.futures.echo("first")
    with future._condition:  # as where a signal handler interrupts cancel(); another thread reads
        beside = threading.Thread(target=client.echo)
        beside.start()
        beside.join(20)
        assert not beside.is_alive()
    assert future.result(20) == "first"


@pytest.mark.parametrize("name", ["call", "futures"])
def test_a_signal_handler_may_close_the_client(
    serve: Serve, connect: Connect, node: Node, name: str
) -> None:
    server, _ = serve(node)
    for step in itertools.count(1):
        client = connect(server.address)
        client.echo()
        closed = False

        def close(client: Any = client) -> None:
            nonlocal closed
            closed = True
            courier.close(client)

        with contextlib.suppress(courier.CallCancelledError), _at_step(step, close):
            _OPERATIONS[name](client)
        if not closed:
            break
        with pytest.raises(courier.CallCancelledError):
            client.echo()
    assert step > 20


# In a finaliser Python ignores it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@each_operation
def test_a_ctrl_c_harms_no_later_call(
    serve: Serve, node: Node, operation: Callable[[Any], Any]
) -> None:
    _, client = serve(node)
    client.echo()
    ends = threading.Event()
    wrong: list[object] = []

    def call_beside() -> None:
        number = 0
        while not ends.is_set():
            number += 1
            with contextlib.suppress(courier.ServerLostError):
                answer = client.echo(number)
                if answer != number:
                    wrong.append(answer)

    interrupted = 0

    def interrupt() -> None:
        nonlocal interrupted
        interrupted = step
        raise KeyboardInterrupt

    beside = threading.Thread(target=call_beside)
    beside.start()
    try:
        for step in itertools.count(1):
            broken_off = contextlib.suppress(KeyboardInterrupt, courier.ServerLostError)
            with broken_off, _at_step(step, interrupt, "courier"):
                operation(client)
            if interrupted != step:
                break
            assert client.echo(step) == step
    finally:
        ends.set()
        beside.join(20)
    assert not beside.is_alive()
    assert not wrong
    assert interrupted > 20


class _AlarmError(TimeoutError):
    """Of a kind that connections raise, too."""


@pytest.mark.parametrize("name", ["call", "large call", "stream"])
def test_what_a_signal_handler_raises_arrives_as_itself(
    serve: Serve, node: Node, name: str
) -> None:
    _, client = serve(node)
    client.echo()
    raised = 0

    def alarm() -> None:
        nonlocal raised
        raised = step
        raise _AlarmError

    sending = tuple(f"courier._engine.{each}" for each in ("calls", "link", "channel", "carrier"))
    for step in itertools.count(1):
        with contextlib.suppress(_AlarmError), _at_step(step, alarm, sending):
            _OPERATIONS[name](client)
            assert raised != step
            break
    assert step > 20


def test_a_call_that_an_alarm_ends_leaves_the_others_alone(serve: Serve, node: Node) -> None:
    _, client = serve(node)
    other = client.futures.block()
    node.await_calls()

    def alarm(*_: object) -> None:
        raise _AlarmError

    before = signal.signal(signal.SIGALRM, alarm)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(_AlarmError):
            client.hang()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert node.cancelled.wait(20)
    node.release.set()
    assert other.result() == "released"


class _Calling:
    """Calls by a client where it is unpickled."""

    call: Callable[[], object]

    def __reduce__(self) -> tuple[Any, ...]:
        return _call, ()


def _call() -> object:
    return _Calling.call()


class _Chain:
    """Its answers call, and the next answer comes while that call lasts."""

    def __init__(self, length: int) -> None:
        self.calls = 0
        self.turns = [asyncio.Event() for _ in range(length)]
        self.turns[0].set()
        self.over = asyncio.Event()

    async def answer(self, number: int) -> _Calling:
        await self.turns[number].wait()
        return _Calling()

    async def call(self) -> str:
        self.calls += 1
        if self.calls == 1:
            asyncio.get_running_loop().call_later(1.0, self.end)
        self.turns[min(self.calls, len(self.turns) - 1)].set()
        await self.over.wait()
        return "called"

    def end(self) -> None:
        for event in (self.over, *self.turns):
            event.set()


def test_any_number_of_answers_may_call_where_they_are_unpickled(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, client = serve(_Chain(70))
    monkeypatch.setattr(_Calling, "call", client.call, raising=False)
    futures = [client.futures.answer(number) for number in range(70)]
    assert [each.result() for each in futures] == ["called"] * 70


def test_an_answer_may_wait_where_it_is_unpickled_for_one_that_came_with_it(
    serve: Serve, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client = serve(node)
    server.bind("calling", _Calling)
    sent: queue.SimpleQueue[Any] = queue.SimpleQueue()
    monkeypatch.setattr(_Calling, "call", lambda: sent.get(timeout=20).result(), raising=False)
    for _ in range(20):
        first = client.futures.calling()
        sent.put(client.futures.echo("second"))
        assert first.result() == "second"
