import concurrent.futures
import contextlib
import gc
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import courier
from courier import lowlevel
from courier.client import _link
from courier.wire.carrier import SocketCarrier
from courier.wire.channel import Channel
from courier.wire.watching import Events, Spin
from tests.courier.conftest import Connect, Reserve, Serve, our_threads
from tests.courier.fuzzing import descriptors
from tests.courier.served import Node
from tests.courier.waiting import wait_until


class Counter:
    def __init__(self) -> None:
        self.total = 0

    def increment(self, by: int = 1) -> int:
        self.total += by
        return self.total


def test_many_that_wait_for_servers_leave_them_the_time_to_start(
    serve: Serve, connect: Connect, reserve: Reserve, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients, port = 200, reserve()
    attempts: list[object] = []
    create = socket.create_connection

    def counted(address: tuple[str, int], timeout: float) -> socket.socket:
        attempts.append(address)
        return create(address, timeout)

    monkeypatch.setattr(socket, "create_connection", counted)
    began_at = time.monotonic()
    futures = [connect(f"127.0.0.1:{port}").futures.increment() for _ in range(clients)]
    time.sleep(0.5)
    lasted_s = time.monotonic() - began_at
    assert len(attempts) < 2 * clients + 500 * lasted_s
    with concurrent.futures.ThreadPoolExecutor(1) as aside:
        ready = aside.submit(courier.wait_until_ready, connect(f"127.0.0.1:{port}"), 30)
        serve(Counter(), port=port, share_port=True)
        ready.result(20)
    assert sorted(future.result(20) for future in futures) == list(range(1, clients + 1))


def test_a_client_finds_a_restarted_server_and_each_call_runs_once(
    serve: Serve, connect: Connect, reserve: Reserve
) -> None:
    port = reserve()
    first, _ = serve(Counter(), port=port, share_port=True)
    client = connect(f"127.0.0.1:{port}")
    assert client.increment() == 1
    first.stop(0)
    # Sent while nobody listens, sealed for a session that nobody will know.
    waiting = [client.futures.increment() for _ in range(20)]
    serve(Counter(), port=port, share_port=True)
    outcomes = [future.exception(20) for future in waiting]
    ran = outcomes.count(None)
    assert all(error is None or isinstance(error, courier.ServerLostError) for error in outcomes)
    assert client.increment() == ran + 1


def test_a_signal_handler_cannot_wait_for_a_call_that_was_made_before(serve: Serve) -> None:
    main = threading.get_ident()

    class Interrupting:
        def __init__(self) -> None:
            self.called = threading.Event()

        def interrupt(self) -> str:
            wait_until(lambda: sys._current_frames()[main].f_code.co_name == "receive")
            signal.pthread_kill(main, signal.SIGUSR1)
            assert self.wait()
            return "interrupted"

        def call(self) -> str:
            self.called.set()
            return "called"

        def wait(self) -> bool:
            return self.called.wait(20)

    interrupting = Interrupting()
    _, client = serve(interrupting)
    client.call()
    interrupting.called.clear()
    waiting = client.futures.wait()
    answers = []

    def handle(*_: object) -> None:
        with pytest.raises(RuntimeError, match="signal handler"):
            waiting.result()
        answers.append(client.call())

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        answers.append(client.interrupt())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert [*answers, client.call()] == ["called", "interrupted", "called"]
    assert waiting.result()


def test_ctrl_c_while_a_connection_ends_leaves_no_other_thread_waiting(
    serve: Serve, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, client = serve(node)
    real = SocketCarrier.shut

    def shut(carrier: SocketCarrier) -> None:
        real(carrier)
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt

    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(client.hang)
        node.await_calls()
        monkeypatch.setattr(SocketCarrier, "shut", shut)
        with pytest.raises(KeyboardInterrupt):
            courier.close(client)
        monkeypatch.undo()
        with pytest.raises(courier.CallCancelledError):
            waiting.result(20)


def test_ctrl_c_before_an_answer_comes_harms_no_other_call(
    serve: Serve, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, client = serve(node)
    client.echo()
    waiting = []

    def look(*_: object) -> Events:
        if threading.current_thread() is not threading.main_thread():
            return []
        monkeypatch.undo()
        waiting.append(threads.submit(client.block))  # by the same connection
        node.await_calls()
        raise KeyboardInterrupt

    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        # What came last stays noted, as in a quick row of calls.
        monkeypatch.setattr(_link, "_REST_S", 60.0)
        monkeypatch.setattr(Spin, "look", look)
        with pytest.raises(KeyboardInterrupt):
            client.echo()
        node.release.set()
        assert [future.result(20) for future in waiting] == ["released"]
    assert client.echo(1) == 1


def test_a_client_and_its_methods_pickle_without_its_secret_and_travel_through_calls(
    serve: Serve, secret: courier.Secret
) -> None:
    server, client = serve(Counter(), client={"call_timeout": 20})
    data = pickle.dumps((client, client.increment, client.futures.increment))
    assert secret.reveal() not in data
    copy, blocking, later = pickle.loads(data)
    assert copy.increment() == 1
    assert [blocking(), later().result(20)] == [2, 3]
    _, relay = serve(lambda client: client.increment(5))
    assert relay(client) == 8
    courier.close(client)
    assert copy.increment() == 9
    courier.close(copy)
    assert server.has_started


def test_a_pickled_client_loads_as_long_as_any_equal_secret_is_held() -> None:
    first, second = (courier.Secret(bytes(range(32))) for _ in range(2))
    data = pickle.dumps(courier.Client("127.0.0.1:1", secret=second))
    del first
    gc.collect()
    pickle.loads(data)


def test_a_closed_client_fails_its_pending_and_later_calls(
    serve: Serve, node: Node, mode: str
) -> None:
    _, client = serve(node, in_process=mode)
    items = client.count(1_000_000)  # more than what can be on its way already
    assert next(items) == 0
    futures = [client.futures.hang() for _ in range(30)]
    node.await_calls()
    courier.close(client)
    courier.close(client)
    for future in futures:
        with pytest.raises(courier.CallCancelledError):
            future.result(20)
    assert node.cancelled.wait(20)
    node.release.set()  # they may hold all threads, and the generator needs one to end
    with pytest.raises(courier.CallCancelledError):
        list(items)
    assert node.generator_ended.wait(20)
    with pytest.raises(courier.CallCancelledError, match="closed"):
        client.echo(1)


def test_a_client_may_be_closed_while_others_call(
    serve: Serve, node: Node, connect: Connect, mode: str
) -> None:
    server, _ = serve(node, in_process=mode)

    def call(client: Any) -> None:
        for index in range(1_000_000):
            try:
                assert client.futures.echo(index).result(20) == index
            except courier.CallCancelledError:
                return
        pytest.fail("the client was not closed")

    for _ in range(20):
        client = connect(server.address)
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            calls = [pool.submit(call, client) for _ in range(3)]
            time.sleep(0.005)
            courier.close(client)
            for done in calls:
                done.result(20)


def test_clients_with_another_timeout_share_the_connection(serve: Serve) -> None:
    _, client = serve(Counter(), in_process="wire")
    client.increment()
    open_files = len(descriptors())
    copies = [courier.with_timeout(client, 20 + number) for number in range(20)]
    copies += [courier.with_timeout(copy, None) for copy in copies]
    assert [copy.increment() for copy in copies] == list(range(2, 42))
    # Not ==: the server may just be closing the connection by which the first one introduced itself.
    assert len(descriptors()) <= open_files


def test_each_of_those_that_share_a_connection_has_its_own_timeout(
    serve: Serve, node: Node
) -> None:
    _, client = serve(node)
    hasty = courier.with_timeout(client, 0.1)
    future = client.futures.block()
    for call in (
        hasty.block,
        hasty.futures.block().result,
        pickle.loads(pickle.dumps(hasty)).block,
    ):
        with pytest.raises(courier.CallTimeoutError):
            call()
    node.release.set()
    assert future.result(20) == "released"
    assert courier.with_timeout(hasty, 20).block() == "released"


def test_a_timeout_has_the_name_of_its_unit_or_the_one_it_has_in_launchpad(
    serve: Serve, node: Node
) -> None:
    server, _ = serve(node)
    for name in ("call_timeout_s", "call_timeout"):
        client = courier.Client(server.address, secret=server.secret, **{name: 0.05})
        with pytest.raises(courier.CallTimeoutError):
            client.block()
        courier.close(client)
    node.release.set()
    with pytest.raises(TypeError, match="call_timeout is Launchpad's name of call_timeout_s"):
        courier.Client(server.address, call_timeout_s=1, call_timeout=1)


def test_closing_one_of_those_that_share_a_connection_leaves_the_others(
    serve: Serve, node: Node
) -> None:
    _, client = serve(node)
    copy = courier.with_timeout(client, 20)
    items = copy.count(3)
    assert next(items) == 0
    future, closed = client.futures.block(), copy.futures.block()
    node.await_calls(2)
    courier.close(copy)
    with pytest.raises(courier.CallCancelledError):
        closed.result(20)
    with pytest.raises(courier.CallCancelledError, match="closed"):
        copy.echo(1)
    node.release.set()
    assert future.result(20) == "released"
    assert list(items) == [1, 2]
    assert client.echo(1) == 1
    copy = courier.with_timeout(client, 20)
    courier.close(client)
    with pytest.raises(courier.CallCancelledError, match="closed"):
        copy.echo(1)


def test_what_is_asked_of_one_holds_for_all_that_share_its_connection(
    serve: Serve, connect: Connect, reserve: Reserve
) -> None:
    server, _ = serve(Counter())
    client = connect(f"127.0.0.1:{reserve()}")
    copy = courier.with_timeout(client, 20)
    waiting = client.futures.increment()
    lowlevel.move(copy, server.address)
    assert waiting.result(20) == 1
    assert client.address == copy.address == server.address
    pool = courier.Pool([client])
    assert pool.increment() == 2
    second, _ = serve(Counter())
    lowlevel.move(client, second.address)
    assert [pool.increment(), copy.increment()] == [1, 2]
    lowlevel.move(client, f"127.0.0.1:{reserve()}")
    waiting = client.futures.increment()
    lowlevel.stop_waiting(copy)
    assert isinstance(waiting.exception(20), courier.ServerUnreachableError)
    lowlevel.stop_calling(client)
    with pytest.raises(courier.CallCancelledError, match="asked to stop"):
        copy.increment()


@pytest.mark.parametrize("in_process", ["wire", "copy"])
def test_forgotten_futures_are_waited_for_by_the_client_that_made_them(
    serve: Serve, node: Node, in_process: str
) -> None:
    server, client = serve(node, in_process=in_process)
    copy = courier.with_timeout(client, 20)
    client.futures.block()
    copy.futures.block()
    node.await_calls(2)
    name = f"{server.address}: block"
    assert courier.wait_for_futures(copy, 0) == [name]
    assert courier.wait_for_futures(client, 0) == [name] * 2
    node.release.set()
    assert courier.wait_for_futures(client, 20) == courier.wait_for_futures(copy, 20) == []


@pytest.mark.parametrize(
    "address",
    ["", "host", ":1", "host:", "host:0", "host:70000", "host:x", "[::1]", "::1:80", "[]:80"],
)
def test_an_address_that_is_none_is_refused_at_once(address: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        courier.Client(address)


@pytest.mark.parametrize("host", ["127.0.0.1", "h1.example", "fd00::1", "fe80::1%eth0"])
def test_an_address_that_is_joined_splits_into_its_parts(host: str) -> None:
    address = lowlevel.join_address(host, 4711)
    assert lowlevel.split_address(address) == (host, 4711)
    assert address.startswith("[") == (":" in host)


def test_of_a_name_with_two_addresses_the_first_may_not_answer(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = serve(lambda: 1, host="127.0.0.2")
    resolve = socket.getaddrinfo

    def getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        hosts = ("127.0.0.1", "127.0.0.2") if host == b"both.example" else (host,)
        return [found for each in hosts for found in resolve(each, *args, **kwargs)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with contextlib.ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", server.port), backlog=0))
        for _ in range(2):  # its queue is full
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(silent.getsockname())
        timing = courier.Timing(attempt_s=0.4)
        client = connect(f"both.example:{server.port}", timing=timing)
        assert courier.with_timeout(client, 20)() == 1


def test_what_acts_on_clients_refuses_anything_else() -> None:
    for function in (
        courier.close,
        courier.list_methods,
        courier.wait_until_ready,
        lowlevel.credentials,
        lowlevel.stop_calling,
        lambda client: lowlevel.move(client, "h1:1"),
    ):
        with pytest.raises(TypeError, match="courier client"):
            function("client")
    with pytest.raises(TypeError, match="courier client"):
        courier.submit(print, 1)


def test_a_client_that_met_itself_tries_again(
    serve: Serve, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system may give the first attempt the port that it wants to reach."""
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
    server, client = serve(node)
    assert client.echo(1) == 1
    assert tried[:2] == [server.port] * 2


@pytest.mark.parametrize("what", ["future", "generator"])
def test_what_one_thread_gives_up_wakes_the_one_that_waits_for_it(
    serve: Serve, node: Node, what: str
) -> None:
    _, client = serve(node)
    if what == "future":
        future = client.futures.hang()
        wait, give_up = (lambda: future.exception(60)), future.cancel
    else:
        items = client.one_then_wait()
        assert next(items) == 1
        wait, give_up = (lambda: next(items, "end")), items.close
    node.await_calls()
    with concurrent.futures.ThreadPoolExecutor(1) as aside:
        waiting = aside.submit(wait)
        time.sleep(0.1)  # mostly it waits by now; if not, it must end as well
        give_up()
        with contextlib.suppress(courier.CallCancelledError):
            waiting.result(25)


def _held() -> tuple[int, int]:
    return len(descriptors()), len(our_threads())


class Source(Node):
    def large(self, count: int) -> Iterator[bytes]:
        for index in range(count):
            yield bytes([index]) * (2 << 20)


def test_what_a_full_connection_did_not_take_goes_though_the_one_who_reads_sleeps(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source()
    _, client = serve(source, in_process="wire", client={"call_timeout": 20})
    items = client.large(3)
    me, refusals = threading.get_ident(), [True]
    send_all = Channel._send_all

    def send_or_be_full(channel: Channel) -> bool:
        if refusals and threading.get_ident() == me:
            refusals.clear()
            return False
        return send_all(channel)

    sleeps = threading.Thread(target=client.block)
    sleeps.start()
    source.await_calls()
    time.sleep(0.1)  # until it is the one that reads, and has nothing to send
    # It asks for more after the first item, and nothing comes until that has gone.
    monkeypatch.setattr(Channel, "_send_all", send_or_be_full)
    began_at = time.monotonic()
    assert [item[0] for item in items] == [0, 1, 2]
    assert not refusals
    assert time.monotonic() - began_at < 10, "it went when the other's call timed out"
    source.release.set()
    sleeps.join()


def test_a_client_that_nobody_closes_leaves_nothing_behind(
    serve: Serve, node: Node, secret: courier.Secret
) -> None:
    server, _ = serve(node, thread_pool_size=2)

    def use() -> None:
        client: Any = courier.Client(server.address, secret=secret)
        assert client.echo(1) == 1
        assert client.futures.echo(2).result(20) == 2
        assert client.echo(np.zeros(100_000)).sum() == 0
        assert next(client.count(1_000_000)) == 0

    use()
    gc.collect()
    before = _held()
    for _ in range(20):
        use()

    def is_given_back() -> bool:
        gc.collect()  # again: a thread of ours may only now let go of the last clients
        files, threads = _held()
        return files <= before[0] + 6 and threads <= before[1] + 2

    wait_until(is_given_back)


def test_what_a_client_proves_itself_with_makes_other_clients(
    serve: Serve, node: Node, secret: courier.Secret
) -> None:
    server, client = serve(node)
    known, tls = lowlevel.credentials(client)
    assert (known, tls) == (secret, None)
    assert courier.list_methods(courier.Client(server.address, secret=known)) == server.methods()
