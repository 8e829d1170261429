import concurrent.futures
import contextlib
import contextvars
import ctypes
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import courier
from courier.python import client as original_client, py_server
from courier.server import host as engine_host
from courier.server._caller import ServedConnection
from tests.courier.by_hand import OPENING
from tests.courier.conftest import Connect, Script, Serve, our_threads
from tests.courier.served import Node
from tests.courier.waiting import wait_until

#: Servers that stop at once wait for their threads, however slow the machine is.
_PATIENT = courier.Timing(epilogue_s=20.0)


def test_the_steps_of_generators_count_as_handlers_and_are_never_refused(serve: Serve) -> None:
    running = threading.Lock()

    def enter() -> None:
        assert running.acquire(blocking=False), "two at once"
        running.release()

    def stream(end: int) -> Iterator[int]:
        for number in range(end):
            enter()
            yield number

    server, client = serve(enter, thread_pool_size=1, queue_size=1)
    server.bind("stream", stream)
    entered = threading.Event()
    stop = threading.Event()

    def flood() -> None:
        while not stop.is_set():
            errors = [future.exception(20) for future in [client.futures() for _ in range(9)]]
            assert {type(error) for error in errors} <= {type(None), courier.ServerBusyError}
            entered.set()

    def open_stream() -> Any:
        while True:  # the call itself may be refused
            with contextlib.suppress(courier.ServerBusyError):
                return client.stream(2_000)

    with concurrent.futures.ThreadPoolExecutor(1) as aside:
        flooding = aside.submit(flood)
        try:
            assert entered.wait(20)
            assert list(open_stream()) == list(range(2_000))
        finally:
            stop.set()
        flooding.result(20)


_variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


def test_methods_see_the_context_of_who_made_the_server(serve: Serve, mode: str) -> None:
    def read_and_change() -> str:
        value = _variable.get()
        _variable.set("set by a handler")
        return value

    token = _variable.set("of the maker")
    try:
        _, client = serve(read_and_change, in_process=mode)
    finally:
        _variable.reset(token)

    def in_another_context() -> None:
        _variable.set("of the caller")
        for _ in range(60):  # after a few, it may run in the thread of the caller
            assert client() == "of the maker"
        assert _variable.get() == "of the caller"

    with concurrent.futures.ThreadPoolExecutor(1) as aside:
        aside.submit(in_another_context).result(20)
    assert client() == "of the maker"


def _describe_call() -> tuple[str, str, float | None, bool]:
    call = courier.current_call()
    return call.method, call.peer, call.time_remaining(), call.cancelled


def test_a_handler_knows_its_call(serve: Serve, mode: str) -> None:
    server, client = serve(in_process=mode)
    server.bind("describe_call", _describe_call)
    method, peer, remaining, cancelled = client.describe_call()
    assert (method, remaining, cancelled) == ("describe_call", None, False)
    assert ("own" in peer) == (mode != "wire")
    assert mode != "wire" or f"process {os.getpid()}" in peer
    remaining = courier.with_timeout(client, 50).describe_call()[2]
    assert 40 < remaining < 51  # rounded up by some carriers
    with pytest.raises(RuntimeError, match="inside a method"):
        courier.current_call()


# The end


def test_a_server_that_stops_lets_calls_and_generators_end_within_their_grace(
    serve: Serve, node: Node, mode: str
) -> None:
    server, client = serve(node, in_process=mode)
    future, items = client.futures.block(), client.count(100)
    node.await_calls()
    assert next(items) == 0
    with concurrent.futures.ThreadPoolExecutor(1) as aside:
        stopping = aside.submit(server.stop, 20)
        wait_until(lambda: not server.has_started)
        assert list(items) == list(range(1, 100))
        node.release.set()
        assert future.result(20) == "released"
        assert stopping.result(20) == []
    assert server.join(1)


def test_calls_that_outlast_the_grace_are_cancelled_and_lost(
    serve: Serve, node: Node, mode: str
) -> None:
    server, client = serve(node, in_process=mode, thread_pool_size=2, timing=_PATIENT)
    items = client.count(1_000_000)  # more than what can be on its way already
    assert next(items) == 0
    futures = [client.futures.hang() for _ in range(2)]
    node.await_calls(2)
    # Those that came after the stop would wait for the next server. The generator may wait, too.
    waiting = len(server.handlers._tasks)
    futures += [client.futures.hang() for _ in range(2)]
    wait_until(lambda: len(server.handlers._tasks) == waiting + 2)
    node.release.set()  # who was cancelled ends at once
    assert server.stop(0.1) == []
    for future in futures:
        with pytest.raises(courier.ServerLostError, match="may have run"):
            future.result(20)
    assert node.cancelled.wait(20)
    with pytest.raises(courier.ServerLostError, match="count"):
        list(items)
    assert mode == "wire" or node.generator_ended.wait(20)


def test_a_generator_that_waits_for_a_handler_is_lost_when_the_server_stops(
    serve: Serve, node: Node, mode: str
) -> None:
    server, client = serve(node, in_process=mode, thread_pool_size=1)
    items = client.count(1_000_000)
    assert next(items) == 0
    blocker = client.futures.block()  # to the end: a handler that is free would give the item
    node.await_calls()
    with concurrent.futures.ThreadPoolExecutor(1) as aside:
        reader = aside.submit(list, items)
        wait_until(lambda: server.handlers.has_waiting)
        server.stop(0.1)
        with pytest.raises(courier.ServerLostError):
            reader.result(20)
    with pytest.raises(courier.ServerLostError):
        blocker.result(20)


def test_stop_keeps_its_deadline_and_names_the_threads_that_are_stuck(serve: Serve) -> None:
    release, entered = threading.Event(), threading.Semaphore(0)

    def stuck(*_: Any) -> None:
        entered.release()
        release.wait(60)

    def endless() -> Iterator[int]:
        yield 1
        stuck()

    server, client = serve(thread_pool_size=3)
    server.bind("stuck", stuck)
    server.bind("endless", endless)
    futures = [client.futures.stuck(), client.futures.stuck(np.zeros(1_000_000))]
    items = client.endless()
    assert next(items) == 1
    for _ in range(3):
        assert entered.acquire(timeout=20)
    futures += [client.futures.stuck(), client.futures.stuck(np.zeros(1_000_000))]
    wait_until(lambda: len(server.handlers._tasks) == 2)
    start = time.monotonic()
    names = server.stop(0.3)
    assert time.monotonic() - start < 20
    assert sum(name.startswith("courier-handler") for name in names) == 3
    for future in futures:
        assert isinstance(future.exception(20), courier.ServerLostError)
    with pytest.raises(courier.ServerLostError):
        next(items)
    assert server.stop() == []
    release.set()


def test_what_is_bound_need_not_have_a_truth_value(serve: Serve) -> None:
    class Unclear:
        def __bool__(self) -> bool:
            raise ValueError("neither")

        def __call__(self) -> int:
            return 3

    server, client = serve()
    server.bind("unclear", Unclear())
    assert client.unclear() == 3


def test_a_thread_that_is_ended_by_force_while_it_stops_a_server_ends_that(serve: Serve) -> None:
    class Forced(BaseException):
        pass

    before = our_threads()
    entered, release = threading.Event(), threading.Event()

    def work() -> None:
        entered.set()
        release.wait(20)

    server, client = serve(work)
    ended: list[BaseException] = []

    def stop() -> None:
        try:
            server.stop(60)
        except Forced as error:
            ended.append(error)

    future = client.futures()
    assert entered.wait(20)
    stopping = threading.Thread(target=stop)
    stopping.start()
    ident = stopping.ident or 0
    # It waits for the handler.
    wait_until(lambda: sys._current_frames()[ident].f_code.co_name == "_stop")
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(Forced))
    stopping.join(20)
    assert ended
    assert server.join(0)
    assert server.stop() == []
    assert isinstance(future.exception(20), courier.ServerLostError)
    release.set()
    courier.close(client)
    wait_until(lambda: our_threads() <= before)
    with socket.create_server(("127.0.0.1", int(server.address.rpartition(":")[2]))):
        pass


def test_a_process_with_a_stuck_handler_can_exit(script: Script) -> None:
    process = script(
        "import threading\n"
        "entered = threading.Event()\n"
        "def stuck():\n"
        "    entered.set()\n"
        "    threading.Event().wait()\n"
        "server = courier.Server(stuck, secret=secret)\n"
        "server.start()\n"
        "client = courier.Client(server.address, secret=secret)\n"
        "future = client.futures()\n"
        "entered.wait()\n"
        "print(sum('handler' in name for name in server.stop(0.1)))\n"
    )
    out, err = process.communicate(timeout=60)
    assert (out, err, process.returncode) == ("1\n", "", 0)


def test_servers_end_all_their_threads_at_whatever_moment_they_are_stopped(serve: Serve) -> None:
    before = our_threads()
    for _ in range(3):
        served = [serve(Node(), timing=_PATIENT) for _ in range(12)]
        for _, client in served:
            for number in range(9):  # known to be fast, so that a watch looks after it
                client.echo(number)
        for server, _ in served:
            time.sleep(0.003)  # their watches fall asleep one after the other
            assert server.stop(0) == []
    for _, client in served:
        courier.close(client)
    wait_until(lambda: not any(t.name == "courier-watch" for t in our_threads() - before))


def test_a_server_hangs_up_on_whoever_came_just_as_it_stopped(secret: courier.Secret) -> None:
    for number in range(200):
        server = courier.Server(Node(), secret=secret)
        server.start()
        # Comes at another moment of the stop each time.
        stopping = threading.Thread(target=_stop_after, args=(server, number % 20 * 2e-5))
        stopping.start()
        with (
            contextlib.suppress(ConnectionError),
            socket.create_connection(("127.0.0.1", server.port)) as guest,
        ):
            guest.settimeout(20)
            guest.sendall(OPENING)  # the kernel forgets whoever says nothing
            assert guest.recv(1) == b""
        stopping.join()


def _stop_after(server: courier.Server, pause_s: float) -> None:
    time.sleep(pause_s)
    server.stop(0)


# How it is made


def test_a_server_listens_beyond_loopback_only_with_a_secret(serve: Serve) -> None:
    for host in ("0.0.0.0", "::", "example.org", ""):
        with pytest.raises(courier.UnprotectedServerError, match="secret"):
            courier.Server(print, host=host)
    assert serve(lambda: 1, host="0.0.0.0", advertised_host="127.0.0.1")[1]() == 1
    assert serve(lambda: 1, host="localhost", secret=None)[1]() == 1


def test_without_a_secret_nobody_serves_where_users_cannot_be_told_apart(
    monkeypatch: pytest.MonkeyPatch, secret: courier.Secret
) -> None:
    monkeypatch.setattr("courier.server.server.host_name", lambda: "")  # as on macOS
    with pytest.raises(courier.UnprotectedServerError, match=r"pass secret=courier\.Secret"):
        courier.Server(print)
    courier.Server(print, secret=secret)


def test_a_taken_port_is_named(serve: Serve) -> None:
    server, _ = serve(print)
    second = courier.Server(print, port=server.port)
    with pytest.raises(courier.AddressInUseError, match=str(server.port)) as caught:
        second.start()
    assert isinstance(caught.value, OSError)
    with socket.create_server(("127.0.0.1", 0)) as other:
        third = courier.Server(print, port=other.getsockname()[1])
        with pytest.raises(courier.AddressInUseError):
            third.start()
    server.stop()
    second.start()
    second.stop()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="the kernel has no IPv6")
def test_no_server_listens_by_ipv4_alone_because_its_port_is_taken_by_ipv6(
    secret: courier.Secret,
) -> None:
    with socket.create_server(("::", 0), family=socket.AF_INET6) as other:
        server = courier.Server(print, host="::", port=other.getsockname()[1], secret=secret)
        with pytest.raises(courier.AddressInUseError, match=rf"listen at \[::\]:{server.port}"):
            server.start()


def test_the_address_is_known_before_the_start_which_calls_wait_for() -> None:
    server = py_server.Server(
        "a name", in_process="wire"
    )  # as programs of the original Launchpad begin
    server.Bind("double", lambda x: 2 * x)
    future = original_client.Client(server.address).futures.double(21)
    with pytest.raises(concurrent.futures.TimeoutError):
        future.result(0.05)
    server.Start()
    assert future.result(20) == 42
    server.Unbind("double")
    server.Stop()
    server.Join()


def test_a_server_says_when_it_is_used_at_the_wrong_time() -> None:
    server = courier.Server(print)
    for early in (server.stop, server.join, lambda: server.set_healthy(True)):
        with pytest.raises(courier.ServerStateError):
            early()
    with server:
        assert server.has_started
        with pytest.raises(courier.ServerStateError, match="already started"):
            server.start()
        assert not server.join(0.01)
    assert server.join()
    with pytest.raises(courier.ServerStateError, match="stopped"):
        server.start()


def test_senseless_options_are_refused_at_once() -> None:
    for options in ({"thread_pool_size": 0}, {"queue_size": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            courier.Server(print, **options)
    with pytest.raises(ValueError, match="_private"):
        courier.Server(print).bind("_private", print)


def test_what_a_wrapper_forwards_is_served_and_what_is_hidden_is_not(serve: Serve) -> None:
    class Inner:
        def run(self) -> None: ...
        def work(self) -> str:
            return "worked"

        @property
        def broken(self) -> None:
            raise ValueError

    class Wrapper:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def __dir__(self) -> list[str]:
            return dir(self._inner)

    _, client = serve(Wrapper(Inner()), hidden=["run"])
    assert client.work() == "worked"
    assert courier.list_methods(client) == ["work"]


_SERVE_ONCE = """
import sys, courier
with courier.Server([3, 1, 2]) as server:
    assert courier.Client(server.address).index(1) == 1
print(*{"asyncio", "encodings.idna", "grpc", "ssl"}.intersection(sys.modules))
"""


def test_a_plain_call_loads_no_event_loop_no_tls_and_no_codec_of_names() -> None:
    ran = subprocess.run([sys.executable, "-c", _SERVE_ONCE], capture_output=True, text=True)
    assert (ran.stdout, ran.stderr) == ("\n", "")


# By the thread that polls, which runs what has been fast: one that sleeps does not notice.
_CLOSE_ALL = """
import os, time, courier
server = courier.Server(os.closerange, in_process="wire")
server.start()
client = courier.Client(server.address)
for _ in range(50):
    client(3, 3)
client.futures(3, 256)
time.sleep(0.4)
os._exit(0)
"""


def test_a_server_whose_descriptors_were_closed_neither_spins_nor_fills_a_disk() -> None:
    ran = subprocess.run([sys.executable, "-c", _CLOSE_ALL], capture_output=True, text=True)
    assert 1 <= ran.stderr.count("a courier server met an error of its own") <= 5


def test_a_connection_on_which_the_server_errs_is_closed_and_delays_no_other(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client = serve(Node(), client={"call_timeout": 10})
    assert client.echo(1) == 1
    on_event, (good,) = ServedConnection.on_event, server._host._callers.values()

    def err(caller: ServedConnection, events: int) -> None:
        if caller is not good:
            raise ValueError("for once")
        on_event(caller, events)

    monkeypatch.setattr(engine_host, "PAUSE_S", 20.0)
    monkeypatch.setattr(ServedConnection, "on_event", err)
    with pytest.raises(courier.ServerLostError):
        connect(server.address).echo(2)
    assert client.echo(3) == 3


@pytest.mark.skipif(not Path("/proc/self/syscall").exists(), reason="the system does not tell")
def test_a_server_that_nobody_calls_makes_no_system_call(serve: Serve) -> None:
    before = our_threads()
    _, client = serve(Node(), timing=courier.Timing(tidy_s=0.05, segment_idle_s=0.1))
    assert len(client.apply(np.zeros, 1 << 20)) == 1 << 20  # in memory that it gives back later
    (poller,) = [each for each in our_threads() - before if each.name == "courier-poller"]

    def waits_for_ever() -> bool:
        # Number, arguments, ...: the timeout of epoll_wait is the fourth.
        _, *arguments = Path(f"/proc/self/task/{poller.native_id}/syscall").read_text().split()
        return len(arguments) > 3 and int(arguments[3], 16) & 0xFFFFFFFF == 0xFFFFFFFF

    wait_until(waits_for_ever)
    assert client.echo(1) == 1
    wait_until(waits_for_ever)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the system does not tell")
def test_calls_are_rarely_disturbed_by_the_watch_over_methods_that_block(serve: Serve) -> None:
    before = our_threads()
    _, client = serve(Node())

    def call_for(seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            client.echo(1)

    def watches() -> list[threading.Thread]:
        return [each for each in our_threads() - before if each.name == "courier-watch"]

    def rests() -> int:
        (watch,) = watches()
        status = Path(f"/proc/self/task/{watch.native_id}/status").read_text()
        return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])

    while not watches():
        call_for(0.05)
    seen = rests()
    call_for(0.25)
    # Each look is two: it sleeps, and waits for the interpreter. Every 2 ms would be 250 and more.
    assert rests() - seen < 130


_SERVE_ASYNC = """
import sys, courier
class Echo:
    async def echo(self, value): return value
courier.Server(Echo())
print("asyncio" in sys.modules)
"""


def test_a_server_of_async_methods_has_loaded_what_runs_them_before_it_starts() -> None:
    # A thread that imports while another forks leaves the child with a lock that nobody opens.
    ran = subprocess.run([sys.executable, "-c", _SERVE_ASYNC], capture_output=True, text=True)
    assert (ran.stdout, ran.stderr) == ("True\n", "")
