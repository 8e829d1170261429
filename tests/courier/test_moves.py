"""A server that comes back at another address is followed there, and no call is lost silently."""

import asyncio
import contextlib
import gc
import itertools
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

import courier
from courier._engine.handshake import LENGTH, TLS_WANTED
from launchpad_lite._clients import Clients
from tests.courier.certificates import Authority
from tests.courier.conftest import Script, Serve, go_by
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
        courier.move(self.client, self.new)


#: Without gRPC streams, which are only tried when something has hung up first: that takes time, and
#: clients that do not wait do not get so far.
_WAYS = ("unix", "tcp", "copy", "share")
_by_each_way = pytest.mark.parametrize("pair", [*_WAYS, "grpc"], indirect=True)


@pytest.fixture(params=_WAYS)
def pair(serve: Serve, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Pair:
    return Pair(serve, go_by(request.param, monkeypatch))


@pytest.fixture
def silent() -> Iterator[str]:
    """An address where somebody takes connections and says nothing, as a host that is cut off."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def _dialling() -> int:
    return sum(thread.name == "courier-dial" for thread in threading.enumerate())


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

    async def call() -> Any:
        return await views[2].who()

    assert asyncio.run(call()) == "second"
    assert next(client.count()) == ("second", 0)
    assert courier.submit(client.who).result(_PATIENCE_S) == "second"


def test_a_client_that_never_called_moves(pair: Pair) -> None:
    pair.move()
    assert pair.client.who() == "second"


@_by_each_way
def test_calls_in_flight_are_lost_at_once(pair: Pair) -> None:
    client = pair.client
    lost = threading.Event()

    def call() -> None:
        with contextlib.suppress(courier.ServerLostError):
            client.block()
            return
        lost.set()

    waiting = threading.Thread(target=call)
    waiting.start()
    future = client.futures.block()
    called = threading.Event()
    future.add_done_callback(lambda _: called.set())
    for _ in range(2):
        assert pair.first.entered.acquire(timeout=_PATIENCE_S)
    began = time.monotonic()
    pair.move()
    waiting.join(_PATIENCE_S)
    with pytest.raises(courier.ServerLostError, match=r"moved.* may have run"):
        future.result(_PATIENCE_S)
    assert lost.is_set()
    assert called.wait(_PATIENCE_S)
    assert time.monotonic() - began < 15  # not after the keep-alive
    assert client.who() == "second"


@_by_each_way
def test_a_client_that_reconnects_loses_calls_in_flight_and_goes_on(pair: Pair) -> None:
    future = courier.submit(pair.client.block)
    pair.first.entered.acquire(timeout=_PATIENCE_S)
    courier.reconnect(pair.client)
    with pytest.raises(courier.ServerLostError, match=r"lost|moved"):
        future.result(_PATIENCE_S)
    assert pair.client.who() == "first"


def test_awaited_calls_in_flight_are_lost_at_once(pair: Pair) -> None:
    async def call() -> None:
        awaited = asyncio.ensure_future(pair.client.aio.block())
        await asyncio.to_thread(pair.first.entered.acquire, timeout=_PATIENCE_S)
        pair.move()
        with pytest.raises(courier.ServerLostError, match="moved"):
            await asyncio.wait_for(awaited, _PATIENCE_S)
        assert await pair.client.aio.who() == "second"

    asyncio.run(call())


@_by_each_way
def test_generators_that_are_read_end(pair: Pair) -> None:
    items = pair.client.count()
    assert next(items) == ("first", 0)
    pair.move()
    with pytest.raises(courier.ServerLostError, match="moved"):
        list(itertools.islice(items, 1000))  # some had come already
    assert next(pair.client.count()) == ("second", 0)


def test_handlers_at_the_old_address_hear_that_nobody_waits(pair: Pair) -> None:
    future = pair.client.futures.block()
    assert pair.first.entered.acquire(timeout=_PATIENCE_S)
    pair.move()
    assert isinstance(future.exception(_PATIENCE_S), courier.ServerLostError)
    wait_until(lambda: pair.client.who() == "second")


def test_idempotent_calls_are_repeated_at_the_new_address(serve: Serve) -> None:
    pair = Pair(serve, {})
    futures = [pair.client.futures.ask("first") for _ in range(5)]
    for _ in futures:
        assert pair.first.entered.acquire(timeout=_PATIENCE_S)
    pair.move()
    assert [future.result(_PATIENCE_S) for future in futures] == ["second"] * 5


def test_calls_that_wait_for_a_server_find_it_at_the_new_address(
    serve: Serve, connect: Callable[..., Any], reserve: Callable[[], int]
) -> None:
    client = connect(_at(reserve()))
    futures = [client.futures.who() for _ in range(5)]
    ready = threading.Thread(target=courier.wait_until_ready, args=(client, _PATIENCE_S))
    ready.start()
    server, _ = serve(Node("second"))
    courier.move(client, server.address)
    assert [future.result(_PATIENCE_S) for future in futures] == ["second"] * 5
    ready.join(_PATIENCE_S)
    assert not ready.is_alive()


def test_nobody_waits_for_an_attempt_at_the_old_address(
    silent: str, serve: Serve, connect: Callable[..., Any]
) -> None:
    client = connect(silent, timing=courier.Timing(attempt_s=3 * _PATIENCE_S))
    future = client.futures.who()
    server, _ = serve(Node("second"))
    courier.move(client, server.address)
    assert future.result(_PATIENCE_S) == "second"


def test_what_goes_wrong_at_the_old_address_harms_no_call_to_the_new_one(
    serve: Serve, connect: Callable[..., Any], reserve: Callable[[], int]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = connect(f"127.0.0.1:{listener.getsockname()[1]}")
        future = client.futures.who()
        sock, _ = listener.accept()
        nowhere = reserve()
        courier.move(client, _at(nowhere))
        with sock:  # what answers now wants certificates, which is final for who called it
            sock.sendall(LENGTH.pack(TLS_WANTED))
            wait_until(lambda: _dialling() == 1)
        assert not future.done()
        serve(Node("second"), port=nowhere, share_port=True)
        assert future.result(_PATIENCE_S) == "second"


def test_a_server_that_answers_late_at_the_old_address_is_not_called(
    serve: Serve, connect: Callable[..., Any], reserve: Callable[[], int]
) -> None:
    late, second = Node("late"), Node("second")
    old, _ = serve(late)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = connect(f"127.0.0.1:{listener.getsockname()[1]}")
        future = client.futures.note("call")
        near, _ = listener.accept()
        nowhere = reserve()
        courier.move(client, _at(nowhere))
        # Only now the handshake with the old server can begin.
        with near, socket.create_connection(("127.0.0.1", old.port), _PATIENCE_S) as far:
            back = threading.Thread(target=_copy, args=(far, near))
            back.start()
            _copy(near, far)
            back.join(_PATIENCE_S)
    serve(second, port=nowhere, share_port=True)
    assert future.result(_PATIENCE_S) == "second"
    assert (late.ran, second.ran) == ([], ["call"])


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(4096):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def test_a_move_to_nowhere_and_back_makes_calls_wait_in_between(
    pair: Pair, reserve: Callable[[], int]
) -> None:
    client = pair.client
    assert client.who() == "first"
    courier.move(client, _at(reserve()))
    future = client.futures.who()
    with pytest.raises(courier.CallTimeoutError):
        courier.with_timeout(client, 0.1).who()
    assert not future.done()
    courier.move(client, pair.old)
    assert future.result(_PATIENCE_S) == "first"
    assert client.address == pair.old


def test_a_move_to_where_the_client_is_disturbs_nothing(pair: Pair) -> None:
    future = pair.client.futures.block()
    assert pair.first.entered.acquire(timeout=_PATIENCE_S)
    courier.move(pair.client, pair.old)
    assert not future.done()
    assert future.cancel()


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
        courier.move(client, pair.old if moves % 2 else pair.new)
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


def test_of_moves_at_a_time_one_wins_for_the_client_and_all_made_of_it(
    serve: Serve, connect: Callable[..., Any], reserve: Callable[[], int]
) -> None:
    servers = {server.address: name for name in "abcd" for server, _ in [serve(Node(name))]}
    client = connect(_at(reserve()))
    copies = [courier.with_timeout(client, _PATIENCE_S) for _ in range(3)]
    futures = [each.futures.who() for each in (client, *copies)]
    for _ in range(20):
        threads = [
            threading.Thread(target=courier.move, args=(client, address)) for address in servers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_PATIENCE_S)
        assert {each.address for each in copies} == {client.address}
        assert {each.who() for each in (client, *copies)} == {servers[client.address]}
    for future in futures:
        assert isinstance(future.exception(_PATIENCE_S), courier.ServerLostError | None)
    for copy in copies:
        courier.close(copy)


def test_a_callback_of_a_lost_call_may_move_the_client_and_call(
    pair: Pair, reserve: Callable[[], int]
) -> None:
    client, nowhere = pair.client, _at(reserve())
    answers: list[Any] = []
    done = threading.Event()

    def go_on(future: Any) -> None:
        assert isinstance(future.exception(), courier.ServerLostError)
        courier.move(client, pair.new)
        answers.append(client.who())
        done.set()

    future = client.futures.block()
    future.add_done_callback(go_on)
    assert pair.first.entered.acquire(timeout=_PATIENCE_S)
    courier.move(client, nowhere)
    assert done.wait(_PATIENCE_S)
    assert answers == ["second"]
    assert client.address == pair.new


def test_what_was_made_of_a_client_moves_along(pair: Pair) -> None:
    copy = courier.with_timeout(pair.client, _PATIENCE_S)
    copy_of_copy = courier.with_timeout(copy, _PATIENCE_S)
    pool: Any = courier.Pool([pair.client])
    assert [each.who() for each in (copy, copy_of_copy, pool)] == ["first"] * 3
    pair.move()
    assert [each.who() for each in (copy, copy_of_copy)] == ["second"] * 2
    assert pool.who() == "second"
    for each in (copy, copy_of_copy):
        courier.close(each)


def test_clients_made_of_one_are_not_kept_by_it(
    connect: Callable[..., Any], reserve: Callable[[], int]
) -> None:
    client = connect(_at(reserve()))
    for _ in range(100):
        courier.with_timeout(client, 1)
    gc.collect()
    assert len(client._connection._derived) == 0


def test_a_pickled_client_carries_the_new_address(pair: Pair) -> None:
    before = pickle.dumps(pair.client)
    pair.move()
    for data, name in ((pickle.dumps(pair.client), "second"), (before, "first")):
        copy = pickle.loads(data)
        assert copy.who() == name
        courier.close(copy)


def test_a_closed_client_that_moves_stays_closed(pair: Pair) -> None:
    courier.close(pair.client)
    pair.move()
    assert pair.client.address == pair.new
    with pytest.raises(courier.CallCancelledError, match="closed"):
        pair.client.who()


def test_closing_wins_over_moving_at_the_same_time(
    silent: str, connect: Callable[..., Any], reserve: Callable[[], int]
) -> None:
    for _ in range(30):
        client = connect(silent)
        future = client.futures.who()
        mover = threading.Thread(target=courier.move, args=(client, _at(reserve())))
        mover.start()
        courier.close(client)
        mover.join(_PATIENCE_S)
        assert isinstance(future.exception(_PATIENCE_S), courier.CallCancelledError)
    # Gone already, so that attempts at it end, and with them their threads.


def test_what_a_client_was_told_holds_at_the_new_address(
    pair: Pair, connect: Callable[..., Any], reserve: Callable[[], int]
) -> None:
    courier.stop_waiting(pair.client)
    courier.move(pair.client, _at(reserve()))
    with pytest.raises(courier.ServerUnreachableError):
        pair.client.who()
    pair.move()
    assert pair.client.who() == "second"
    courier.stop_calling(pair.client)
    courier.move(pair.client, pair.old)
    with pytest.raises(courier.CallCancelledError):
        pair.client.who()


def test_calls_that_a_stopping_server_still_had_are_lost_by_a_move(
    serve: Serve, connect: Callable[..., Any]
) -> None:
    first = Node("first")
    old, client = serve(first)
    future = client.futures.block()
    assert first.entered.acquire(timeout=_PATIENCE_S)
    # It says goodbye, and lets the call end: no new call begins on this connection.
    stopping = threading.Thread(target=old.stop, args=(_PATIENCE_S,))
    stopping.start()
    lane = client._connection._lane._wire
    wait_until(lambda: lane._link is None)
    assert not future.done()
    new, _ = serve(Node("second"))
    courier.move(client, new.address)
    with pytest.raises(courier.ServerLostError, match="moved"):
        future.result(_PATIENCE_S)
    assert client.who() == "second"
    stopping.join(_PATIENCE_S)


def test_a_client_moves_between_its_own_process_and_others(
    serve: Serve, connect: Callable[..., Any]
) -> None:
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
        courier.move(client, near.address)
        assert client.who() == "near"
        courier.move(client, mirror.address)
        assert client.give() is value  # handed over, not sent
        courier.move(client, far.address)


def test_moves_leave_no_connection_behind(pair: Pair) -> None:
    process = psutil.Process()
    assert pair.client.who() == "first"
    pair.move()
    assert pair.client.who() == "second"

    def connections() -> int:
        # Unix sockets by which others connect to us count, too: both ends are here.
        ask = getattr(process, "net_connections", None) or process.connections  # before psutil 6
        return len(ask("all"))

    gc.collect()
    before = connections()
    for address in (pair.old, pair.new) * 10:
        courier.move(pair.client, address)
        pair.client.who()
    wait_until(lambda: connections() <= before)


def test_what_is_no_address_or_no_client_is_refused(pair: Pair) -> None:
    with pytest.raises(ValueError, match="not an address"):
        courier.move(pair.client, "h1")
    assert pair.client.address == pair.old
    assert pair.client.who() == "first"
    with pytest.raises(TypeError, match="courier client"):
        courier.move("client", "h1:1")


def test_a_client_under_tls_moves(tmp_path: Any, serve: Serve) -> None:
    authority = Authority(tmp_path)
    _, client = serve(Node("first"), tls=authority.issue(), client={"tls": authority.issue()})
    new, _ = serve(Node("second"), tls=authority.issue())
    assert client.who() == "first"
    courier.move(client, new.address)
    assert client.who() == "second"


_FORK = """
import os
old, new = sys.argv[1:]
client = courier.Client(old, secret=secret)
copy = courier.with_timeout(client, 20)
assert client.who() == copy.who() == "first"
courier.move(client, new)
child = os.fork()
if not child:
    assert client.who() == copy.who() == "second"
    courier.move(client, old)
    print(client.who(), copy.who(), flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(client.who(), copy.who())
"""


def test_a_forked_child_goes_to_the_new_address_and_moves_by_itself(
    serve: Serve, script: Script
) -> None:
    old, new = serve(Node("first"))[0], serve(Node("second"))[0]
    out, err = script(_FORK, old.address, new.address).communicate(timeout=60)
    assert out.splitlines() == ["first first", "second second"], err


# All clients of a node


class Town:
    """Addresses that nobody listens at; clients of them are never called."""

    def __init__(self, connect: Callable[..., Any]) -> None:
        self.connect = connect
        self.clients = Clients()

    def keep(self, name: str) -> Any:
        client = self.connect(f"{name}:1")
        self.clients.keep(client)
        return client

    def move(self, *moves: str) -> None:
        self.clients.note_moved({f"{old}:1": f"{new}:1" for old, new in moves})


@pytest.fixture
def town(connect: Callable[..., Any]) -> Town:
    return Town(connect)


def test_all_clients_of_an_address_follow_and_no_others(town: Town) -> None:
    clients = [town.keep(name) for name in "aab"]
    town.move("ac")
    assert [client.address for client in clients] == ["c:1", "c:1", "b:1"]


def test_later_clients_of_old_addresses_follow_chains_of_moves(town: Town) -> None:
    early = town.keep("a")
    town.move("ab")
    town.move("bc")
    assert [client.address for client in (early, town.keep("a"), town.keep("b"))] == ["c:1"] * 3


def test_a_server_that_moved_back_is_found_where_it_was(town: Town) -> None:
    early = town.keep("a")
    town.move("ab")
    town.move("ba")
    assert [client.address for client in (early, town.keep("a"), town.keep("b"))] == ["a:1"] * 3


def test_a_move_that_overtakes_another_is_the_one_that_holds(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, move = town.keep("a"), courier.move

    def be_overtaken(moved: Any, address: str) -> None:
        monkeypatch.setattr(courier, "move", move)
        town.move("bc")
        move(moved, address)

    monkeypatch.setattr(courier, "move", be_overtaken)
    town.move("ab")
    assert client.address == "c:1"


def test_two_servers_may_swap_places(town: Town) -> None:
    first, second = town.keep("a"), town.keep("b")
    town.move("ab", "ba")
    assert (first.address, second.address) == ("b:1", "a:1")
    town.move("xy")
    assert (first.address, second.address) == ("b:1", "a:1")


def test_an_address_that_another_server_took_over_is_that_ones(town: Town) -> None:
    first, second = town.keep("a"), town.keep("x")
    town.move("ab")
    town.move("xa")
    assert (first.address, second.address, town.keep("a").address) == ("b:1", "a:1", "a:1")


def _waits(client: Any) -> bool:
    return bool(client._connection.options.wait_for_ready)


def test_clients_of_addresses_that_ended_do_not_wait_unless_those_moved(town: Town) -> None:
    town.clients.note_ended(["a:1", "b:1", "c:1"])
    assert [_waits(town.keep(name)) for name in "abcd"] == [False, False, False, True]
    town.move("ad", "xb")
    assert [_waits(town.keep(name)) for name in "abcd"] == [True, True, False, True]


def test_clients_are_kept_for_no_longer_than_others_hold_them(town: Town) -> None:
    for _ in range(20):
        town.clients.keep(courier.Client("a:1"))
    gc.collect()
    assert len(town.clients._clients) == 0


def test_clients_that_come_while_servers_move_end_where_those_are(town: Town) -> None:
    kept: list[Any] = []
    ended = threading.Event()

    def come() -> None:
        for _ in range(200):  # of so many, even if the one that moves them does not get on
            kept.append(town.keep("h0"))
            if ended.wait(0.0005):
                return

    threads = [threading.Thread(target=come) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: kept)
    for number in range(200):
        town.clients.note_moved({f"h{number}:1": f"h{number + 1}:1"})
    ended.set()
    for thread in threads:
        thread.join(_PATIENCE_S)
    assert kept
    assert {client.address for client in kept} == {"h200:1"}
