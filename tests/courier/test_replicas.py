"""Pools: several servers that do the same, called as if they were one."""

import asyncio
import collections
import concurrent.futures
import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest

import courier
from courier import lowlevel
from launchpad_lite.testing.programs import call_until_answered
from tests.courier.conftest import Connect, Reserve, Script, Serve, our_threads
from tests.courier.fuzzing import connections
from tests.courier.waiting import wait_until

KEYS = [f"key {number}" for number in range(60)]


class Replica:
    def __init__(self, name: int) -> None:
        self.name = name
        self.calls = 0
        self.gate = threading.Event()
        self.waiting = 0
        self.was_cancelled = False

    def who(self) -> int:
        self.calls += 1
        return self.name

    def start(self, value: int) -> int:
        return value + 1

    call = count = start

    def wait(self) -> int:
        self.waiting += 1
        call = courier.current_call()
        while not self.gate.wait(0.01):
            if call.cancelled:
                self.was_cancelled = True
                break
        return self.name

    def fail(self, kind: type[Exception]) -> None:
        self.calls += 1
        raise kind("by the method")

    def items(self, count: int) -> Any:
        for index in range(count):
            yield self.name, index

    def __call__(self, value: int) -> int:
        return value * 2


class Group:
    """Servers in this process, with their objects and clients."""

    def __init__(self, serve: Serve, size: int, **options: Any) -> None:
        self.objects = [Replica(index) for index in range(size)]
        served = [serve(each, **options) for each in self.objects]
        self.servers = [server for server, _ in served]
        self.clients = [client for _, client in served]

    def pool(self, choose: Any = "round_robin") -> "courier.Pool[Any]":
        return courier.Pool(self.clients, choose=choose)

    def open_gates(self) -> None:
        for each in self.objects:
            each.gate.set()


@pytest.fixture
def three(serve: Serve) -> Group:
    return Group(serve, 3)


@pytest.fixture
def away(connect: Connect, reserve: Reserve) -> Connect:
    """Makes clients of servers that were never started."""

    def make(**options: Any) -> Any:
        return connect(f"127.0.0.1:{reserve()}", **options)

    return make


# Who is asked


def test_calls_take_turns_also_from_several_threads(three: Group) -> None:
    pool = three.pool()
    assert [pool.who() for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert [pool.futures.who().result(20) for _ in range(3)] == [1, 2, 0]
    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        names = list(threads.map(lambda _: pool.who(), range(300)))
    assert collections.Counter(names) == {0: 100, 1: 100, 2: 100}
    assert len(pool) == 3
    assert all(server.address in repr(pool) for server in three.servers)


def test_the_idle_one_is_preferred_if_asked_for(three: Group) -> None:
    pool = three.pool("least_loaded")
    busy = [pool.futures.wait(), pool.futures.wait()]
    wait_until(lambda: sum(each.waiting for each in three.objects) == 2)
    (idle,) = [each for each in three.objects if not each.waiting]
    assert {pool.who() for _ in range(10)} == {idle.name}
    three.open_gates()
    assert {future.result(20) for future in busy} == {0, 1, 2} - {idle.name}
    assert {pool.who() for _ in range(3)} == {0, 1, 2}


def test_a_key_has_a_home_that_depends_on_the_order_of_servers_and_not_on_pickling(
    three: Group,
) -> None:
    pool = three.pool()
    keys = [*KEYS, 5, -1.5, None, b"x", ("user", 7), "\ud800", ""]
    homes = [pool.by_key(key).who() for key in keys]
    assert set(homes) == {0, 1, 2}
    assert homes == [pool.by_key(key).futures.who().result(20) for key in keys]
    turned = courier.Pool(reversed(three.clients))
    assert [turned.by_key(key).who() for key in keys] == [2 - home for home in homes]
    loaded = pickle.loads(pickle.dumps(pool))
    assert [loaded.by_key(key).who() for key in pickle.loads(pickle.dumps(keys))] == homes
    for client in loaded.clients:
        courier.close(client)
    for number in range(30):
        # Whether or not equal parts of keys are one object.
        text = f"text {number}"
        other = f"text {number}x"[:-1]
        assert text is not other
        assert pool.by_key((text, text)).who() == pool.by_key((text, other)).who()


def test_only_the_keys_of_a_lost_server_move(three: Group) -> None:
    pool = three.pool()
    homes = {key: pool.by_key(key).who() for key in KEYS}
    three.servers[1].stop(0.0)
    # The first call may be on its way before the end of the connection is noticed.
    moved = {key: call_until_answered(pool.by_key(key).who) for key in KEYS}
    assert all(moved[key] == home for key, home in homes.items() if home != 1)
    assert {moved[key] for key, home in homes.items() if home == 1} == {0, 2}


def test_all_are_called_at_once_and_answer_in_their_order(three: Group) -> None:
    pool = three.pool()
    assert pool.all.who() == [0, 1, 2]
    futures = pool.futures.all.wait()
    wait_until(lambda: all(each.waiting for each in three.objects))
    for each in reversed(three.objects):
        each.gate.set()
    assert [future.result(20) for future in futures] == [0, 1, 2]
    assert [list(items) for items in pool.all.items(1)] == [[(0, 0)], [(1, 0)], [(2, 0)]]
    with pytest.raises(KeyError, match="by the method"):
        pool.all.fail(KeyError)


# Methods


def test_methods_of_any_name_can_be_called(three: Group) -> None:
    pool = three.pool()
    for name in ("start", "call", "count"):
        assert getattr(pool, name)(1) == 2
        assert getattr(pool.futures, name)(1).result(20) == 2
        assert getattr(pool.all, name)(1) == [2, 2, 2]
    assert pool(4) == pool.by_key("x")(4) == pool.futures(4).result(20) == 8
    assert pool.all(4) == [8, 8, 8]
    assert pool.who.__name__ == pool.all.who.__name__ == "who"
    items = list(pool.items(3))
    assert len({name for name, _ in items}) == 1
    assert [number for _, number in items] == [0, 1, 2]
    with pytest.raises(courier.UnknownMethodError, match="who"):
        pool.nothing()


def test_functions_that_type_checkers_follow_call_pools_too(three: Group, away: Connect) -> None:
    pool, keyed = three.pool(), three.pool().by_key("x")
    assert [courier.submit(pool.who).result(20) for _ in range(4)] == [0, 1, 2, 0]
    assert courier.submit(keyed.who).result(20) == keyed.who()
    assert courier.submit(keyed, 4).result(20) == courier.submit(pool, 4).result(20) == 8
    with pytest.raises(TypeError, match=r"call pool\.futures\.all\.who"):
        courier.submit(pool.all.who)

    async def call() -> None:
        later = courier.call_aio(pool.who)  # begins when it is awaited
        assert [pool.who(), await later, pool.who()] == [2, 0, 1]
        assert await courier.call_aio(keyed.who) == keyed.who()
        assert await courier.call_aio(pool, 4) == 8
        assert [item async for item in courier.call_aio(pool.items, 2)] == [(0, 0), (0, 1)]
        with pytest.raises(courier.RemoteError, match="StopIteration: by the method"):
            await courier.call_aio(pool.fail, StopIteration)
        partly = courier.Pool([away(), three.clients[1]])
        assert await asyncio.gather(*(courier.call_aio(partly.who) for _ in range(4))) == [1] * 4

    asyncio.run(call())


def test_private_names_are_no_methods(three: Group) -> None:
    pool = three.pool()
    for view in (pool, pool.futures, pool.all, pool.by_key(1), pool.futures.all):
        with pytest.raises(AttributeError, match="private"):
            _ = view._secret
    copy.copy(pool.by_key(1))
    assert copy.copy(pool).who() in (0, 1, 2)


@pytest.mark.parametrize(
    "kind",
    [courier.ServerUnreachableError, courier.ServerLostError, courier.ServerBusyError, KeyError],
)
def test_what_a_method_raises_is_not_taken_for_a_lost_server(
    three: Group, kind: type[Exception]
) -> None:
    pool = three.pool()
    with pytest.raises(kind, match="by the method"):
        pool.fail(kind)
    with pytest.raises(kind, match="by the method"):
        pool.futures.fail(kind).result(20)
    assert [each.calls for each in three.objects] == [1, 1, 0]
    assert [pool.who() for _ in range(3)] == [2, 0, 1]


def test_arguments_that_cannot_be_pickled_are_an_error(three: Group) -> None:
    pool = three.pool("least_loaded")
    with pytest.raises(courier.SerializationError, match="'start' cannot be pickled"):
        pool.start(threading.Lock())
    with pytest.raises(courier.SerializationError, match="'start' cannot be pickled"):
        pool.futures.start(threading.Lock())
    assert {pool.who() for _ in range(3)} == {0, 1, 2}  # they count as no load


def test_wrong_arguments_are_refused(three: Group) -> None:
    with pytest.raises(ValueError, match="at least one"):
        courier.Pool([])
    with pytest.raises(ValueError, match="'random'"):
        three.pool("random")
    with pytest.raises(TypeError, match="pickle"):
        three.pool().by_key(threading.Lock())
    with pytest.raises(TypeError, match="courier client, got str"):
        courier.Pool([*three.clients, "127.0.0.1:1"])
    with pytest.raises(TypeError, match="courier client, got Pool"):
        courier.Pool([three.pool()])


# Servers that are away


@pytest.mark.parametrize("waits", [True, False])
def test_a_server_that_was_never_started_is_passed_over_and_turns_are_even(
    three: Group, away: Connect, waits: bool
) -> None:
    clients = [away(wait_for_ready=waits), *three.clients]
    timing = courier.Timing(pool_start_s=0.2, pool_down_s=1000.0)
    pool = courier.Pool(clients, timing=timing)
    pool.who()
    assert collections.Counter(pool.who() for _ in range(30)) == {0: 10, 1: 10, 2: 10}
    assert {pool.futures.who().result(20) for _ in range(12)} == {0, 1, 2}
    assert {pool.by_key(key).who() for key in KEYS} == {0, 1, 2}


def test_a_pool_does_not_wait_where_a_call_of_its_client_does(three: Group, away: Connect) -> None:
    client = away()
    waiting = client.futures.who()
    assert courier.Pool([client, *three.clients]).who() in (0, 1, 2)
    assert not waiting.done()
    courier.close(client)


def test_a_lost_server_is_replaced_by_the_others_and_comes_back_at_its_port(
    connect: Connect, serve: Serve, reserve: Reserve
) -> None:
    port = reserve()
    first, _ = serve(Replica(0), port=port, share_port=True)
    _, other = serve(Replica(1))
    pool = courier.Pool([connect(f"127.0.0.1:{port}"), other])
    assert {pool.who() for _ in range(2)} == {0, 1}
    first.stop(0.0)
    assert {call_until_answered(pool.who) for _ in range(6)} == {1}
    serve(Replica(2), port=port, share_port=True)
    wait_until(lambda: pool.who() == 2)
    assert {pool.who() for _ in range(2)} == {1, 2}


def test_a_call_in_flight_on_a_lost_server_is_lost_and_not_run_again(serve: Serve) -> None:
    group = Group(serve, 2)
    pool = group.pool()
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(pool.wait) for _ in range(2)]
        calls += [pool.futures.wait() for _ in range(2)]
        wait_until(lambda: [each.waiting for each in group.objects] == [2, 2])
        group.servers[0].stop(0.0)
        wait_until(lambda: sum(call.done() for call in calls) == 2)
        errors = [call.exception(0) for call in calls if call.done()]
        assert {type(error) for error in errors} == {courier.ServerLostError}
        assert all(group.servers[0].address in str(error) for error in errors)
        assert {pool.who() for _ in range(4)} == {1}
        group.open_gates()
    assert [each.waiting for each in group.objects] == [2, 2]


def test_calls_wait_until_one_of_the_servers_is_there(
    serve: Serve, connect: Connect, reserve: Reserve
) -> None:
    ports = [reserve() for _ in range(3)]
    clients = [connect(f"127.0.0.1:{port}") for port in ports]
    pool = courier.Pool(clients, timing=courier.Timing(pool_start_s=0.2))
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        calls = [threads.submit(pool.who), pool.by_key("x").futures.who()]
        calls += [pool.futures.who() for _ in range(100)]
        assert not concurrent.futures.wait(calls, 0.3).done
        serve(Replica(7), port=ports[1], share_port=True)
        assert {call.result(20) for call in calls} == {7}


def test_calls_fail_when_none_is_there_and_they_do_not_wait_any_more(away: Connect) -> None:
    pool = courier.Pool([away(wait_for_ready=False) for _ in range(2)])
    for call in (pool.who, pool.futures.who().result, pool.by_key("x").who, pool.all.who):
        with pytest.raises(courier.ServerUnreachableError):
            call()
    pool = courier.Pool([away(call_timeout=0.2) for _ in range(2)])
    future = pool.futures.who()
    with pytest.raises(courier.CallTimeoutError, match="nothing was run"):
        pool.who()
    assert isinstance(future.exception(20), courier.CallTimeoutError)


def test_a_timeout_ends_a_call_and_is_seen_by_the_handler(serve: Serve, connect: Connect) -> None:
    group = Group(serve, 1)
    pool = courier.Pool([connect(group.servers[0].address, call_timeout=0.2)])

    def handler_was_told() -> bool:  # on a busy machine, a call may end before it has begun
        for call in (pool.wait, pool.futures.wait().result):
            with pytest.raises(courier.CallTimeoutError):
                call()
        return group.objects[0].was_cancelled

    wait_until(handler_was_told)


def test_a_key_waits_for_its_server_while_that_may_be_starting(
    serve: Serve, connect: Connect, reserve: Reserve
) -> None:
    port = reserve()
    group = Group(serve, 1)
    clients = [*group.clients, connect(f"127.0.0.1:{port}")]
    pool = courier.Pool(clients, timing=courier.Timing(pool_start_s=1000.0))
    assert pool.who() == 0
    calls = {pool.by_key(key).futures.who(): key for key in KEYS}
    waiting = concurrent.futures.wait(calls, 0.5).not_done
    assert 0 < len(waiting) < len(KEYS)
    second, _ = serve(Replica(1), port=port, share_port=True)
    assert {future.result(20) for future in waiting} == {1}
    second.stop(0.0)
    assert call_until_answered(pool.by_key(calls[waiting.pop()]).who) == 0


# Servers that are busy


def busy_group(serve: Serve, size: int = 2) -> Group:
    return Group(serve, size, thread_pool_size=1, queue_size=1)


def occupy(group: Group, index: int) -> list[Any]:
    """Has the handler and the queue of one server be full."""
    futures = [group.clients[index].futures.wait()]
    wait_until(lambda: group.objects[index].waiting)

    def is_full() -> bool:
        future = group.clients[index].futures.wait()
        try:
            return isinstance(future.exception(0.1), courier.ServerBusyError)
        except concurrent.futures.TimeoutError:
            futures.append(future)
            return False

    wait_until(is_full)
    return futures


def test_another_one_is_asked_in_the_place_of_a_busy_one_except_for_its_keys(serve: Serve) -> None:
    group = busy_group(serve)
    pool = group.pool()
    key = next(key for key in KEYS if pool.by_key(key).who() == 0)
    futures = occupy(group, 0)
    assert {pool.who() for _ in range(4)} == {1}
    assert {pool.futures.who().result(20) for _ in range(4)} == {1}
    for call in (pool.by_key(key).who, pool.by_key(key).futures.who().result):
        with pytest.raises(courier.ServerBusyError):
            call()
    futures += occupy(group, 1)
    for call in (pool.who, pool.futures.who().result):
        with pytest.raises(courier.ServerBusyError):
            call()
    group.open_gates()
    concurrent.futures.wait(futures, 20)
    assert {pool.who() for _ in range(2)} == {0, 1}


# Futures


def test_any_number_of_futures_goes_on_elsewhere_and_calls_back(
    serve: Serve, away: Connect
) -> None:
    many = 160
    meeting = threading.Barrier(many)
    _, client = serve(lambda: meeting.wait(10) >= 0, thread_pool_size=many, queue_size=many)
    pool = courier.Pool([away(), client], timing=courier.Timing(pool_down_s=0.0))
    heard: list[Any] = []
    futures = [pool.futures() for _ in range(many)]
    for future in futures:
        future.add_done_callback(lambda done: heard.append(done.result()))
    assert set(concurrent.futures.as_completed(futures, 20)) == set(futures)
    wait_until(lambda: heard == [True] * many)


def test_cancelling_reaches_the_handler_that_a_call_went_on_to(three: Group, away: Connect) -> None:
    pool = courier.Pool([away(), three.clients[1]])
    future = pool.futures.wait()
    wait_until(lambda: three.objects[1].waiting)
    assert future.cancel()
    assert future.cancel()
    with pytest.raises(courier.CallCancelledError):
        future.result(20)
    wait_until(lambda: three.objects[1].was_cancelled)
    wait_until(lambda: [member.load for member in pool._members] == [0, 0])


def test_a_call_that_was_cancelled_while_none_was_there_does_not_run(
    serve: Serve, connect: Connect, reserve: Reserve
) -> None:
    port, replica = reserve(), Replica(0)
    pool = courier.Pool([connect(f"127.0.0.1:{port}")])
    futures = [pool.futures.wait() for _ in range(5)]
    concurrent.futures.wait(futures, 0.1)
    assert all(future.cancel() for future in futures)
    assert concurrent.futures.wait(futures, 20).not_done == set()
    # Who was about to ask once more is to find nobody.
    wait_until(lambda: not any(t.name.startswith("courier-callback") for t in our_threads()))
    serve(replica, port=port, share_port=True)
    assert pool.who() == 0
    assert not replica.waiting


# The end


def refuses_calls(pool: courier.Pool, why: str) -> None:
    for call in (pool.who, pool.futures.who, pool.by_key("x").who, pool.all.who):
        with pytest.raises(courier.CallCancelledError, match=why):
            call()
    with pytest.raises(courier.CallCancelledError, match=why):
        courier.Pool(pool.clients).who()


def test_closing_the_clients_ends_all_calls_and_connections(three: Group, away: Connect) -> None:
    clients = [away(), *three.clients]
    before = connections()
    pool = courier.Pool(clients)
    futures = [pool.futures.wait() for _ in range(8)]
    wait_until(lambda: all(each.waiting for each in three.objects))
    for client in clients:
        courier.close(client)
    for future in futures:
        assert isinstance(future.exception(20), courier.CallCancelledError)
    refuses_calls(pool, "closed")
    wait_until(lambda: connections() <= before)


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (courier.close, concurrent.futures.CancelledError),
        (lowlevel.stop_waiting, courier.ServerUnreachableError),
    ],
)
def test_calls_that_wait_for_servers_end_when_no_client_waits_any_more(
    away: Connect, end: Callable[[Any], None], error: type[BaseException]
) -> None:
    clients = [away(), away()]
    pool = courier.Pool(clients)
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        calls = [threads.submit(pool.who), pool.futures.who()]
        lowlevel.stop_waiting(clients[0])
        assert not concurrent.futures.wait(calls, 0.1).done
        for client in clients:
            end(client)
        for call in calls:
            with pytest.raises(error):
                call.result(20)
    with pytest.raises(error):
        pool.who()


def test_clients_that_stop_calling_have_the_pool_do_so_but_calls_in_flight_go_on(
    three: Group,
) -> None:
    pool = three.pool()
    futures = [pool.futures.wait() for _ in range(3)]
    wait_until(lambda: all(each.waiting for each in three.objects))
    for client in three.clients:
        lowlevel.stop_calling(client)
    refuses_calls(pool, "asked to stop")
    three.open_gates()
    assert {future.result(20) for future in futures} == {0, 1, 2}


class Front:
    """Answers by calling a pool, even when its node was asked to stop."""

    def __init__(self, pool: courier.Pool) -> None:
        self._pool = pool

    def ask(self) -> list[int]:
        for client in self._pool.clients:
            lowlevel.stop_calling(client)
        return [self._pool.who(), self._pool.futures.who().result(20)]


def test_a_handler_may_still_call_a_pool_whose_clients_stop_calling(
    serve: Serve, three: Group, away: Connect
) -> None:
    # Also where a future continues elsewhere, in another thread.
    pool = courier.Pool([three.clients[0], away(), three.clients[2]])
    first, second = serve(Front(pool))[1].ask()
    assert (first, second in (0, 2)) == (0, True)


def test_another_process_and_its_children_find_the_same_homes(
    script: Script, three: Group, tmp_path: Any
) -> None:
    pool = three.pool("least_loaded")
    path = tmp_path / "pool"
    path.write_bytes(pickle.dumps(pool))
    process = script(
        "import gc, os, pickle\n"
        "pool = pickle.load(open(sys.argv[1], 'rb'))\n"
        "homes = [pool.by_key(f'key {n}').who() for n in range(60)]\n"
        "calls = [pool.futures.wait(), pool.futures.wait()]\n"
        "pool._lock.acquire()\n"  # as another thread of the parent may
        "child = os.fork()\n"
        "if child == 0:\n"
        "    calls.clear(), gc.collect()\n"  # the child has none of them
        "    os._exit({pool.who() for _ in range(3)} != {0, 1, 2})\n"
        "print(os.waitpid(child, 0)[1], homes)\n",
        path,
    )
    assert process.output() == f"0 {[pool.by_key(key).who() for key in KEYS]}"
