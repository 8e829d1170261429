import socket
from typing import Any

import pytest

from courier._connecting import connect
from tests.courier.conftest import Serve


@pytest.fixture
def mirrored(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has the first attempt to connect end at itself, as by chance; lists all ports tried."""
    create, tried = socket.create_connection, list[int]()

    def create_connection(address: tuple[Any, int], *args: Any, **kwargs: Any) -> socket.socket:
        tried.append(address[1])
        if len(tried) > 1:
            return create(address, *args, **kwargs)
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        sock.connect(sock.getsockname())
        return sock

    monkeypatch.setattr(socket, "create_connection", create_connection)
    return tried


def test_nobody_is_connected_to_themselves(mirrored: list[int]) -> None:
    with pytest.raises(ConnectionRefusedError, match="no server listens"):
        connect("127.0.0.1", 1, 1.0)
    assert mirrored == [1]


def test_a_client_that_met_itself_tries_again(serve: Serve, mirrored: list[int]) -> None:
    _, client = serve(lambda value: value)
    assert client(1) == 1
    assert len(mirrored) > 1
