"""One refusal of a thread by the system, or one error, ends nothing that others depend on."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import courier
from tests.courier.conftest import Connect, Serve
from tests.courier.waiting import wait_until

Refuse = Callable[[str], None]


class Node:
    def __init__(self) -> None:
        self.release = threading.Event()

    def answer(self) -> int:
        return 1

    def answer_or_wait(self, waits: bool = False) -> int:
        if waits:
            self.release.wait(20)
        return 1

    @courier.batched_handler(batch_size=4, timeout=0.0)
    def batch(self, value: Any) -> Any:
        return value


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Iterator[Refuse]:
    """Has the system give no more threads whose names begin so; "" is none of them."""
    refused = [""]
    start = threading.Thread.start

    def start_or_raise(thread: threading.Thread) -> None:
        if refused[0] and thread.name.startswith(refused[0]):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_raise)

    def set_name(name: str) -> None:
        refused[0] = name

    yield set_name
    set_name("")


def _hear(client: Any) -> None:
    """Hears of a call by its callback, and nothing else."""
    heard = threading.Event()
    client.futures.answer().add_done_callback(lambda _: heard.set())
    assert heard.wait(10)


def test_callbacks_are_called_without_threads_and_those_of_others_afterwards(
    serve: Serve, refuse: Refuse
) -> None:
    _, one = serve(Node())
    _, other = serve(Node())
    refuse("courier-callback")
    _hear(one)
    refuse("")
    _hear(other)
    _hear(one)


def test_the_attendant_begins_when_there_is_a_thread_for_it(
    serve: Serve, connect: Connect, refuse: Refuse
) -> None:
    wait_until(lambda: all(each.name != "courier-background" for each in threading.enumerate()))
    refuse("courier-background")
    _, client = serve(Node())
    with pytest.raises(courier.CourierError, match="can't start new thread"):
        client.answer()
    refuse("")
    _hear(client)


@pytest.mark.parametrize("is_future", [False, True])
def test_calls_fail_when_nobody_can_dial_and_later_ones_do_not(
    serve: Serve, refuse: Refuse, is_future: bool
) -> None:
    _, client = serve(Node())
    refuse("courier-dial")
    with pytest.raises(courier.ServerUnreachableError, match="can't start new thread"):
        _ = client.futures.answer().result(10) if is_future else client.answer()
    refuse("")
    assert client.answer() == 1


@pytest.mark.parametrize("way", ["wire", "copy"])
def test_a_server_without_threads_says_that_it_is_busy(
    serve: Serve, refuse: Refuse, way: str
) -> None:
    _, client = serve(Node(), in_process=way)
    refuse("courier-handler")
    with pytest.raises(courier.ServerBusyError):
        client.answer()
    refuse("")
    assert client.answer() == 1


def test_a_fast_method_is_answered_though_nobody_can_watch_it(serve: Serve, refuse: Refuse) -> None:
    _, client = serve(Node(), client={"call_timeout": 10})
    refuse("courier-watch")
    for _ in range(200):
        assert client.answer() == 1
    refuse("")


def test_a_poller_that_cannot_be_replaced_goes_on_later(serve: Serve, refuse: Refuse) -> None:
    node = Node()
    _, client = serve(node, client={"call_timeout": 10})
    for _ in range(200):
        client.answer_or_wait()
    refuse("courier-poller")
    slow = client.futures.answer_or_wait(waits=True)
    slow.add_done_callback(lambda _: None)
    threading.Timer(0.2, node.release.set).start()
    assert slow.result(10) == 1
    refuse("")
    assert client.answer() == 1


@pytest.mark.parametrize("way", ["wire", "copy"])
def test_a_batch_that_no_thread_could_run_is_refused_and_later_ones_run(
    serve: Serve, refuse: Refuse, way: str
) -> None:
    _, client = serve(Node(), in_process=way, client={"call_timeout": 10})
    refuse("courier-batch")
    with pytest.raises(courier.ServerBusyError, match="can be started"):
        client.batch(1)
    refuse("")
    assert client.batch(2) == 2


def test_the_clock_of_calls_begins_when_there_is_a_thread_for_it(
    serve: Serve, refuse: Refuse
) -> None:
    node = Node()
    _, client = serve(node, in_process="copy", client={"call_timeout": 0.2})
    refuse("courier-clock")
    with pytest.raises(RuntimeError, match="can't start new thread"):
        client.futures.answer_or_wait(waits=True).add_done_callback(lambda _: None)
    refuse("")
    heard = threading.Event()
    client.futures.answer_or_wait(waits=True).add_done_callback(lambda _: heard.set())
    assert heard.wait(10)
    node.release.set()
