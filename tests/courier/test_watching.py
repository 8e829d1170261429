"""What a system without epoll has instead does the same."""

import numpy as np
import pytest

import courier
from courier.client import _background_reader
from courier.server import host
from courier.wire.watching import PollWatcher
from tests.courier.conftest import Serve
from tests.courier.served import Node, hear


def test_calls_work_without_epoll(
    monkeypatch: pytest.MonkeyPatch, serve: Serve, node: Node
) -> None:
    monkeypatch.setattr(host, "make_watcher", lambda _: PollWatcher())
    monkeypatch.setattr(_background_reader, "make_watcher", PollWatcher)
    monkeypatch.setattr(_background_reader.BACKGROUND_READER, "_watcher", None)
    server, client = serve(node)
    assert client.echo(1) == 1
    futures = [client.futures.echo(number) for number in range(500)]
    assert [future.result(20) for future in futures] == list(range(500))
    hear(client)
    array = np.arange(1 << 20)
    assert (client.echo(array) == array).all()
    assert list(client.count(5_000)) == list(range(5_000))
    lost = client.futures.hang()
    node.await_calls()
    server.stop(0.0)
    with pytest.raises(courier.ServerLostError):
        lost.result(20)
