"""A server that comes back at another address is followed there, and no call is lost silently."""

import asyncio
import concurrent.futures
import gc
import itertools
import pickle
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import courier
from courier import lowlevel
from tests.courier.by_hand import relay
from tests.courier.certificates import Authority
from tests.courier.conftest import Connect, Reserve, Serve, go_by
from tests.courier.fuzzing import connections
from tests.courier.waiting import wait_until

_PATIENCE_S = 20.0


class Node:
    """Says which one it is, and what its calls meet."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.entered = threading.Semaphore(0)
        self.release = threading.Event()
        self.ran: list[object] = []

    def who(self) -> str:
        return self.name

    def note(self, what: object) -> str:
        self.ran.append(what)
        return self.name

    def block(self) -> str:
        self.entered.release()
        assert courier.current_call().wait_cancelled(60) or self.release.is_set()
        return self.name

    @courier.idempotent
    def ask(self, hangs_at: str) -> str:
        if self.name == hangs_at:
            self.entered.release()
            courier.current_call().wait_cancelled(60)
        return self.name

    def count(self) -> Iterator[tuple[str, int]]:
        number = 0
        while True:
            yield self.name, number
            number += 1
            courier.current_call().wait_cancelled(0.01)


class Pair:
    """Two servers, and a client of the first."""

    def __init__(self, serve: Serve, way: dict[str, Any]) -> None:
        self.first, self.second = Node("first"), Node("second")
        server, self.client = serve(self.first, **way)
        self.old = server.address
        self.new = serve(self.second, **way)[0].address

    def move(self) -> None:
        lowlevel.move(self.client, self.new)


_by_each_way = pytest.mark.parametrize(
    "pair", ["unix", "tcp", "copy", "share", "grpc"], indirect=True
)


@pytest.fixture(params=["unix"])
def pair(serve: Serve, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Pair:
    return Pair(serve, go_by(request.param, monkeypatch))


@pytest.fixture
def silent() -> Iterator[str]:
    """An address where somebody takes connections and says nothing, as a host that is cut off."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def _at(port: int) -> str:
    return f"127.0.0.1:{port}"


@_by_each_way
def test_calls_of_every_kind_go_to_the_new_address(pair: Pair) -> None:
    client = pair.client
    views = (client, client.futures, client.aio)
    assert client.who() == "first"
    pair.move()
    assert client.address == pair.new
    assert pair.new in repr(client)
    assert client.who() == "second"
    assert views[1].who().result(_PATIENCE_S) == "second"
    assert asyncio.run(views[2].who()) == "second"
    assert next(client.count()) == ("second", 0)
    assert courier.submit(client.who).result(_PATIENCE_S) == "second"


@_by_each_way
def test_calls_in_flight_and_generators_that_are_read_are_lost_at_once(pair: Pair) -> None:
    client = pair.client
    with concurrent.futures.ThreadPoolExecutor(1) as aside:
        waiting = aside.submit(client.block)
        future, items = client.futures.block(), client.count()
        assert next(items) == ("first", 0)
        called = threading.Event()
        future.add_done_callback(lambda _: called.set())
        for _ in range(2):
            assert pair.first.entered.acquire(timeout=_PATIENCE_S)
        began = time.monotonic()
        pair.move()
        for each in (waiting, future):
            with pytest.raises(courier.ServerLostError, match=r"moved.* may have run"):
                each.result(_PATIENCE_S)
    assert called.wait(_PATIENCE_S)
    with pytest.raises(courier.ServerLostError, match="moved"):
        list(itertools.islice(items, 1000))  # some had come already
    assert time.monotonic() - began < 15  # not after the keep-alive
    assert client.who() == "second"
    assert next(client.count()) == ("second", 0)


def test_a_client_that_reconnects_loses_calls_in_flight_and_goes_on(pair: Pair) -> None:
    future = courier.submit(pair.client.block)
    pair.first.entered.acquire(timeout=_PATIENCE_S)
    lowlevel.reconnect(pair.client)
    with pytest.raises(courier.ServerLostError, match=r"lost|moved"):
        future.result(_PATIENCE_S)
    assert pair.client.who() == "first"


def test_idempotent_calls_are_repeated_at_the_new_address(pair: Pair) -> None:
    futures = [pair.client.futures.ask("first") for _ in range(5)]
    for _ in futures:
        assert pair.first.entered.acquire(timeout=_PATIENCE_S)
    pair.move()
    assert [future.result(_PATIENCE_S) for future in futures] == ["second"] * 5


def test_nobody_waits_for_an_attempt_at_the_old_address(
    silent: str, serve: Serve, connect: Connect
) -> None:
    client = connect(silent, timing=courier.Timing(attempt_s=3 * _PATIENCE_S))
    future = client.futures.who()
    server, _ = serve(Node("second"))
    lowlevel.move(client, server.address)
    assert future.result(_PATIENCE_S) == "second"


def test_futures_with_less_time_than_an_attempt_to_connect_end_in_time(
    silent: str, connect: Connect
) -> None:
    client = connect(silent, timing=courier.Timing(attempt_s=3 * _PATIENCE_S))
    client.futures.who()  # has any time
    hasty = courier.with_timeout(client, 0.1)
    for callee in (hasty, courier.Pool([hasty])):
        with pytest.raises(courier.CallTimeoutError):
            callee.futures.who().result(_PATIENCE_S)


@pytest.mark.parametrize("wants", ["nothing", "certificates"])  # that would be final for a call
def test_a_server_that_answers_late_at_the_old_address_is_not_called_and_fails_no_call(
    serve: Serve, connect: Connect, reserve: Reserve, tmp_path: Any, wants: str
) -> None:
    late, second = Node("late"), Node("second")
    tls = Authority().issue() if wants == "certificates" else None
    old, _ = serve(late, tls=tls)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = connect(f"127.0.0.1:{listener.getsockname()[1]}")
        future = client.futures.note("call")
        near, _ = listener.accept()
        nowhere = reserve()
        lowlevel.move(client, _at(nowhere))
        # Only now the handshake with the old server can begin.
        with near:
            relay(near, old.address)
    assert not future.done()
    serve(second, port=nowhere, share_port=True)
    assert future.result(_PATIENCE_S) == "second"
    assert (late.ran, second.ran) == ([], ["call"])


def test_a_move_to_nowhere_and_back_makes_calls_wait_in_between(
    pair: Pair, reserve: Reserve
) -> None:
    client = pair.client
    assert client.who() == "first"
    blocked = client.futures.block()
    assert pair.first.entered.acquire(timeout=_PATIENCE_S)
    lowlevel.move(client, pair.old)  # to where it is: disturbs nothing
    assert not blocked.done()
    assert blocked.cancel()
    lowlevel.move(client, _at(reserve()))
    future = client.futures.who()
    with pytest.raises(courier.CallTimeoutError):
        courier.with_timeout(client, 0.1).who()
    assert not future.done()
    lowlevel.move(client, pair.old)
    assert future.result(_PATIENCE_S) == "first"
    assert client.address == pair.old


def test_each_of_many_calls_during_moves_runs_once_or_says_that_it_may_have(pair: Pair) -> None:
    client, moves = pair.client, 0
    made: list[object] = []
    answered: list[object] = []
    lost: list[object] = []

    def call(thread: int) -> None:
        for number in itertools.count():
            if number >= 150 and moves > 3:
                return
            what = (thread, number)
            made.append(what)
            try:
                if number % 3:
                    client.note(what)
                else:
                    client.futures.note(what).result(_PATIENCE_S)
            except courier.ServerLostError:
                lost.append(what)
            else:
                answered.append(what)

    threads = [threading.Thread(target=call, args=(thread,)) for thread in range(8)]

    def go_on() -> bool:
        return any(thread.is_alive() for thread in threads)

    for thread in threads:
        thread.start()
    while go_on():
        lowlevel.move(client, pair.old if moves % 2 else pair.new)
        goal = len(answered) + len(lost) + 20
        moves += 1
        # Calls in between: moves alone would prove little.
        wait_until(lambda goal=goal: len(answered) + len(lost) >= goal or not go_on())
    assert moves > 3
    assert len(answered) + len(lost) == len(made)
    ran = pair.first.ran + pair.second.ran
    assert len(set(ran)) == len(ran), "a call ran twice"
    assert set(answered) <= set(ran)
    assert set(ran) <= {*answered, *lost}
    assert len(answered) > len(lost)


def test_a_callback_of_a_lost_call_may_move_the_client_and_call(
    pair: Pair, reserve: Reserve
) -> None:
    client, nowhere = pair.client, _at(reserve())
    answers: list[Any] = []
    done = threading.Event()

    def go_on(future: Any) -> None:
        assert isinstance(future.exception(), courier.ServerLostError)
        lowlevel.move(client, pair.new)
        answers.append(client.who())
        done.set()

    future = client.futures.block()
    future.add_done_callback(go_on)
    assert pair.first.entered.acquire(timeout=_PATIENCE_S)
    lowlevel.move(client, nowhere)
    assert done.wait(_PATIENCE_S)
    assert answers == ["second"]
    assert client.address == pair.new


def test_a_pickled_client_carries_the_new_address(pair: Pair) -> None:
    before = pickle.dumps(pair.client)
    pair.move()
    for data, name in ((pickle.dumps(pair.client), "second"), (before, "first")):
        copy = pickle.loads(data)
        assert copy.who() == name
        courier.close(copy)


def test_closing_wins_over_moving_at_the_same_time(
    silent: str, connect: Connect, reserve: Reserve
) -> None:
    for _ in range(30):
        client = connect(silent)
        future = client.futures.who()
        mover = threading.Thread(target=lowlevel.move, args=(client, _at(reserve())))
        mover.start()
        courier.close(client)
        mover.join(_PATIENCE_S)
        assert isinstance(future.exception(_PATIENCE_S), courier.CallCancelledError)


def test_what_a_client_was_told_holds_at_the_new_address(
    pair: Pair, connect: Connect, reserve: Reserve
) -> None:
    closed = courier.with_timeout(pair.client, 1)
    courier.close(closed)
    lowlevel.stop_waiting(pair.client)
    lowlevel.move(pair.client, _at(reserve()))
    with pytest.raises(courier.ServerUnreachableError):
        pair.client.who()
    pair.move()
    assert pair.client.who() == "second"
    lowlevel.stop_calling(pair.client)
    lowlevel.move(pair.client, pair.old)
    with pytest.raises(courier.CallCancelledError):
        pair.client.who()
    assert closed.address == pair.old
    with pytest.raises(courier.CallCancelledError, match="closed"):
        closed.who()


def test_calls_that_a_stopping_server_still_had_are_lost_by_a_move(
    serve: Serve, connect: Connect, reserve: Reserve
) -> None:
    first = Node("first")
    old, client = serve(first, port=reserve(), share_port=True)  # no other test may take it
    future = client.futures.block()
    assert first.entered.acquire(timeout=_PATIENCE_S)
    # It says goodbye, and lets the call end: no new call begins on this connection.
    stopping = threading.Thread(target=old.stop, args=(_PATIENCE_S,))
    stopping.start()

    def a_new_call_waits() -> bool:
        try:
            courier.with_timeout(client, 0.2).who()
        except courier.CallTimeoutError:
            return True
        return False

    wait_until(a_new_call_waits)
    assert not future.done()
    new, _ = serve(Node("second"))
    lowlevel.move(client, new.address)
    with pytest.raises(courier.ServerLostError, match="moved"):
        future.result(_PATIENCE_S)
    assert client.who() == "second"
    stopping.join(_PATIENCE_S)


def test_a_client_moves_between_its_own_process_and_others(serve: Serve, connect: Connect) -> None:
    near, _ = serve(Node("near"), in_process="share")
    far, _ = serve(Node("far"), in_process="wire")
    value: list[object] = []

    class Mirror:
        def give(self) -> object:
            return value

    mirror, _ = serve(Mirror(), in_process="share")
    client = connect(far.address)
    for _ in range(2):
        assert client.who() == "far"
        lowlevel.move(client, near.address)
        assert client.who() == "near"
        lowlevel.move(client, mirror.address)
        assert client.give() is value  # handed over, not sent
        lowlevel.move(client, far.address)


def test_moves_leave_no_connection_behind(pair: Pair) -> None:
    assert pair.client.who() == "first"
    pair.move()
    assert pair.client.who() == "second"

    gc.collect()
    before = connections()
    for address in (pair.old, pair.new) * 10:
        lowlevel.move(pair.client, address)
        pair.client.who()
    wait_until(lambda: connections() <= before)
