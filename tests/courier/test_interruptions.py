"""Between any two steps of a call a signal handler may run, or a Ctrl-C come."""

import concurrent.futures
import contextlib
import itertools
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

import courier
from courier.client._calls import WireCall
from courier.threads.locks import Condition, Event, Lock, RLock
from tests.courier.certificates import Authority
from tests.courier.conftest import Connect, Reserve, Serve, go_by
from tests.courier.served import Node

_LARGE = bytes(1 << 18)
_PATIENCE_S = 20.0


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


@pytest.mark.parametrize("make", [Lock, RLock, lambda: Condition(Lock()), Condition])
def test_a_signal_handler_that_raises_leaves_no_lock_locked(make: Callable[[], Any]) -> None:
    lock = make()

    def take() -> bool:
        with contextlib.ExitStack() as leaves:
            taken: bool = lock.acquire(blocking=False)
            if taken:
                leaves.callback(lock.release)
            return taken

    def alarm() -> None:
        raise _AlarmError

    with concurrent.futures.ThreadPoolExecutor(1) as another:
        for step in range(1, 20):
            stepped = _at_step(step, alarm, ("courier", "threading"))
            with contextlib.suppress(_AlarmError), stepped, lock:
                pass
            assert another.submit(take).result()


def test_a_signal_handler_that_raises_leaves_an_event_that_can_be_set() -> None:
    def alarm() -> None:
        raise _AlarmError

    with concurrent.futures.ThreadPoolExecutor(1) as another:
        for step in range(1, 20):
            event = Event()
            with contextlib.suppress(_AlarmError), _at_step(step, alarm, ("courier", "threading")):
                event.set()
            another.submit(event.set).result(_PATIENCE_S)
            assert event.is_set()


def test_an_event_may_be_set_where_its_thread_begins_to_wait_for_it() -> None:
    for step in itertools.count(1):
        sets = [event := Event()]
        waiting = threading.Thread(target=_set_at_step, args=(step, sets, event), daemon=True)
        waiting.start()
        waiting.join(_PATIENCE_S)
        assert not waiting.is_alive()
        if sets:
            break
    assert step > 3


def _set_at_step(step: int, sets: list[Event], event: Event) -> None:
    with _at_step(step, lambda: sets.pop().set(), ("courier", "threading")):
        event.wait(0.01)


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


def test_a_signal_handler_calls_though_what_it_interrupted_holds_up_a_new_connection(
    serve: Serve, node: Node, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = serve(node)
    sends = WireCall.send
    for step in itertools.count(1):
        client = connect(server.address)
        sent, go_on = threading.Event(), threading.Event()

        def send(call: WireCall, link: Any, *, at_once: bool, its: Any = (sent, go_on)) -> None:
            sent, go_on = its
            sends(call, link, at_once=at_once)
            if not sent.is_set():  # as if it waited for a lock that the cancelling thread holds
                sent.set()
                go_on.wait(_PATIENCE_S)

        monkeypatch.setattr(WireCall, "send", send)
        future = client.futures.echo()
        assert sent.wait(_PATIENCE_S)
        answers: list[object] = []
        impatient = courier.with_timeout(client, _PATIENCE_S)

        def handle(answers: list[object] = answers, impatient: Any = impatient) -> None:
            answers.append(impatient.echo("handled"))

        with _at_step(step, handle, "courier.wire"):
            future.cancel()
        go_on.set()
        if not answers:
            break
        assert answers == ["handled"]
    assert step > 5


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


def _end_of_a_stream(client: Any) -> Callable[[], object]:
    stream = client.one_then_wait()
    next(stream)
    return stream.close  # type: ignore[no-any-return]


def _end_of_a_call(client: Any) -> Callable[[], object]:
    return client.futures.hang().cancel  # type: ignore[no-any-return]


@pytest.mark.parametrize("way", ["unix", "tls", "grpc", "copy"])
@pytest.mark.parametrize("begin", [_end_of_a_stream, _end_of_a_call])
def test_a_finaliser_may_end_what_the_same_server_does(
    serve: Serve,
    node: Node,
    way: str,
    begin: Callable[[Any], Callable[[], object]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = go_by("tcp" if way == "tls" else way, monkeypatch)
    tls = {"tls": Authority().issue()} if way == "tls" else {}
    _, client = serve(node, client=tls, **tls, **options)
    node.release.set()
    steps = itertools.count(1)

    def end_at_each_step() -> None:
        # As Python does with a generator that reads a stream, if that is in a cycle of garbage.
        for step in steps:
            ends = [begin(client)]
            with _at_step(step, lambda ends=ends: ends.pop()(), "courier"):
                assert list(client.count(2)) == [0, 1]
            if ends:
                ends.pop()()
                return

    # Where it hangs, a daemon does not hold up the other tests.
    thread = threading.Thread(target=end_at_each_step, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), f"it hangs where a finaliser runs at step {next(steps) - 1}"
    assert next(steps) > 20


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

    sending = tuple(
        f"courier.{each}"
        for each in ("client._calls", "client._link", "wire.channel", "wire.carrier")
    )
    for step in itertools.count(1):
        with contextlib.suppress(_AlarmError), _at_step(step, alarm, sending):
            _OPERATIONS[name](client)
            assert raised != step
            break
    assert step > 20


@contextlib.contextmanager
def _ended_by_an_alarm(when: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Expects that what runs here ends by the error of a signal handler, soon after `when`."""

    def alarm(*_: object) -> None:
        raise _AlarmError

    def ring() -> None:
        when()
        time.sleep(0.1)  # not while it still sends, which would end the connection
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, alarm)
    ringing = threading.Thread(target=ring)
    ringing.start()
    try:
        with pytest.raises(_AlarmError):
            yield
    finally:
        ringing.join()
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    "wait",
    [lambda client: client.hang(), lambda client: list(client.one_then_wait())],
    ids=["call", "generator"],
)
def test_a_call_that_an_alarm_ends_leaves_the_others_alone(
    serve: Serve, node: Node, wait: Callable[[Any], Any]
) -> None:
    _, client = serve(node)
    other = client.futures.block()
    node.await_calls()
    began_at = time.monotonic()
    with _ended_by_an_alarm(node.await_calls):
        wait(client)
    assert time.monotonic() - began_at < 20
    assert node.cancelled.wait(20)
    node.release.set()
    assert other.result() == "released"


def test_an_alarm_ends_waiting_for_a_server(connect: Connect, reserve: Reserve) -> None:
    client = connect(f"127.0.0.1:{reserve()}")
    client.futures.hang()
    with _ended_by_an_alarm():
        client.hang()


class _Calling:
    """Calls by a client where it is unpickled."""

    call: Callable[[], object]

    def __reduce__(self) -> tuple[Any, ...]:
        return _call, ()


def _call() -> object:
    return _Calling.call()


def test_an_answer_that_is_slow_to_unpickle_holds_up_no_other_call(
    serve: Serve, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client = serve(node)
    server.bind("calling", _Calling)
    begun, go_on = threading.Event(), threading.Event()

    def call() -> str:
        begun.set()
        assert go_on.wait(20)
        return client.echo("called")

    monkeypatch.setattr(_Calling, "call", call, raising=False)
    slow = client.futures.calling()
    assert concurrent.futures.wait([slow], 20).done
    readers = concurrent.futures.ThreadPoolExecutor(2)
    results = [readers.submit(slow.result) for _ in range(2)]  # it is unpickled once
    assert begun.wait(20)
    assert client.futures.echo("meanwhile").result(20) == "meanwhile"
    begun.clear()
    go_on.set()
    assert [each.result(20) for each in results] == ["called"] * 2
    assert not begun.is_set()
    readers.shutdown()


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
