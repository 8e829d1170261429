"""A client can be told to begin no more calls: for when its node is to end."""

import asyncio
import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import courier
from courier import lowlevel
from tests.courier.conftest import Connect, Reserve, Serve
from tests.courier.served import Node


def test_new_calls_of_all_kinds_fail_at_once(serve: Serve, node: Node) -> None:
    _, client = serve(node)
    assert client.echo(1) == 1
    lowlevel.stop_calling(client)
    lowlevel.stop_calling(client)

    for begin in (
        lambda: client.echo(1),
        lambda: client.futures.echo(1),
        lambda: courier.submit(client.echo, 1),
        lambda: asyncio.run(client.aio.echo(1)),
        lambda: courier.list_methods(client),
        lambda: courier.wait_until_ready(client, 20),
        lambda: courier.with_timeout(client, 20).echo(1),
    ):
        with pytest.raises(courier.CallCancelledError, match="asked to stop"):
            begin()


def test_calls_in_flight_go_on_to_their_end(serve: Serve, node: Node) -> None:
    _, client = serve(node)
    blocking, items = client.futures.block(), client.count(3)
    node.await_calls()
    lowlevel.stop_calling(client)
    node.release.set()
    assert blocking.result(20) == "released"
    assert list(items) == [0, 1, 2]


def test_a_call_that_waits_for_its_server_goes_on(
    serve: Serve, node: Node, connect: Connect, reserve: Reserve
) -> None:
    port = reserve()
    client = connect(f"127.0.0.1:{port}")
    waiting = client.futures.echo(1)
    lowlevel.stop_calling(client)
    serve(node, port=port, share_port=True)
    assert waiting.result(20) == 1


def test_a_handler_may_finish_its_answer_with_calls(serve: Serve, node: Node) -> None:
    _, inner = serve(node)
    entered, release = threading.Event(), threading.Event()

    class Relay:
        def relay(self) -> list[int]:
            entered.set()
            release.wait(30)
            return [inner.echo(1), inner.futures.echo(2).result(20)]

        def stream(self) -> Iterator[int]:
            for number in range(3):
                yield inner.echo(number)

    _, outer = serve(Relay())
    answer, items = outer.futures.relay(), outer.stream()
    assert next(items) == 0
    assert entered.wait(20)
    lowlevel.stop_calling(inner)
    release.set()
    assert answer.result(20) == [1, 2]
    assert list(items) == [1, 2]
    with pytest.raises(courier.CallCancelledError):
        inner.echo(1)


@pytest.mark.parametrize("copied", [copy.copy, lambda client: pickle.loads(pickle.dumps(client))])
def test_a_copy_belongs_to_somebody_else_and_may_call(
    serve: Serve, node: Node, copied: Callable[[Any], Any]
) -> None:
    _, client = serve(node)
    own = copied(client)
    lowlevel.stop_calling(client)
    twin = copied(client)
    assert twin.echo(1) == own.echo(1) == 1
    courier.close(twin)
    assert own.echo(1) == 1
    courier.close(own)
