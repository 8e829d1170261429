"""A client can be told that the servers it waits for do not come back."""

import concurrent.futures

import pytest

import courier
from launchpad_lite.testing import poll_until


class Echo:
    def echo(self, value):
        return value


def test_calls_that_wait_for_a_server_fail_and_so_do_later_ones(reserve):
    client = courier.Client(f"127.0.0.1:{reserve()}")
    waiting = [client.futures.echo(1) for _ in range(3)]
    courier.stop_waiting(client)
    for future in waiting:
        with pytest.raises(courier.ServerUnreachableError):
            future.result(20)
    with pytest.raises(courier.ServerUnreachableError):
        client.echo(1)
    courier.close(client)


def test_a_call_that_waits_for_a_server_to_come_back_fails_too(reserve):
    server = courier.Server(Echo(), port=reserve(), share_port=True)
    server.start()
    client = courier.Client(server.address)
    assert client.echo(1) == 1
    server.stop()
    waiting = poll_until(lambda: _waiting_call(client))
    courier.stop_waiting(client)
    with pytest.raises(courier.ServerUnreachableError):
        waiting.result(20)
    courier.close(client)


def _waiting_call(client):
    """A call that was not lost with the connection, but waits for the next one."""
    future = client.futures.echo(2)
    try:
        return None if isinstance(future.exception(0.3), courier.ServerLostError) else future
    except concurrent.futures.TimeoutError:
        return future


def test_calls_that_a_server_answers_are_not_touched():
    with courier.Server(Echo()) as server:
        client = courier.Client(server.address)
        courier.stop_waiting(client)
        assert client.echo(3) == 3
        courier.close(client)
