"""One refusal of a thread by the system, or one error, ends nothing that others depend on."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import courier
from tests.courier import served
from tests.courier.conftest import Connect, Serve
from tests.courier.served import hear
from tests.courier.waiting import wait_until

Refuse = Callable[[str], None]


class Node(served.Node):
    @courier.batched_handler(batch_size=4, timeout=0.0)
    def batch(self, value: Any) -> Any:
        return value

    def block_or_answer(self, blocks: bool = False) -> Any:
        return self.block() if blocks else 1


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


def test_callbacks_are_called_without_threads_and_those_of_others_afterwards(
    serve: Serve, refuse: Refuse
) -> None:
    _, one = serve(Node())
    _, other = serve(Node())
    refuse("courier-callback")
    hear(one)
    refuse("")
    hear(other)
    hear(one)


_BUSY = courier.ServerBusyError
_NO_THREAD = "can't start new thread"


@pytest.mark.parametrize(
    ("thread", "mode", "method", "error", "match"),
    [
        ("courier-dial", "wire", "echo", courier.ServerUnreachableError, _NO_THREAD),
        ("courier-handler", "wire", "echo", _BUSY, "."),
        ("courier-handler", "copy", "echo", _BUSY, "."),
        ("courier-batch", "wire", "batch", _BUSY, "can be started"),
        ("courier-batch", "copy", "batch", _BUSY, "can be started"),
    ],
)
def test_a_call_that_lacks_a_thread_fails_and_later_ones_do_not(
    serve: Serve,
    refuse: Refuse,
    thread: str,
    mode: str,
    method: str,
    error: type[Exception],
    match: str,
) -> None:
    _, client = serve(Node(), in_process=mode, client={"call_timeout": 10})
    for call in (
        getattr(client, method),
        lambda it: getattr(client.futures, method)(it).result(10),
    ):
        refuse(thread)
        with pytest.raises(error, match=match):
            call(1)
        refuse("")
    assert getattr(client, method)(2) == 2


def test_the_attendant_begins_when_there_is_a_thread_for_it(
    serve: Serve, connect: Connect, refuse: Refuse
) -> None:
    wait_until(lambda: all(each.name != "courier-background" for each in threading.enumerate()))
    refuse("courier-background")
    _, client = serve(Node())
    with pytest.raises(courier.CourierError, match="can't start new thread"):
        client.echo(1)
    refuse("")
    hear(client)


def test_a_fast_method_is_answered_though_nobody_can_watch_it(serve: Serve, refuse: Refuse) -> None:
    _, client = serve(Node(), client={"call_timeout": 10})
    refuse("courier-watch")
    for _ in range(200):
        assert client.echo(1) == 1
    refuse("")


def test_a_poller_that_cannot_be_replaced_goes_on_later(serve: Serve, refuse: Refuse) -> None:
    node = Node()
    _, client = serve(node, client={"call_timeout": 10})
    for _ in range(200):
        client.block_or_answer()
    refuse("courier-poller")
    slow = client.futures.block_or_answer(blocks=True)
    slow.add_done_callback(lambda _: None)
    threading.Timer(0.2, node.release.set).start()
    assert slow.result(10) == "released"
    refuse("")
    assert client.echo(1) == 1


def test_the_clock_of_calls_begins_when_there_is_a_thread_for_it(
    serve: Serve, refuse: Refuse
) -> None:
    node = Node()
    _, client = serve(node, in_process="copy", client={"call_timeout": 0.2})
    refuse("courier-clock")
    with pytest.raises(RuntimeError, match=_NO_THREAD):
        client.futures.block().add_done_callback(lambda _: None)
    refuse("")
    heard = threading.Event()
    client.futures.block().add_done_callback(lambda _: heard.set())
    assert heard.wait(10)
    node.release.set()
