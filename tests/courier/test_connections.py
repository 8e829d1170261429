import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import courier
from tests.courier.conftest import Script, Serve

_OPEN_FILES = Path("/proc/self/fd")


class Counter:
    def __init__(self) -> None:
        self.total = 0

    def increment(self, by: int = 1) -> int:
        self.total += by
        return self.total


def test_a_client_may_call_before_its_server_exists(
    serve: Serve, connect: Callable[..., Any], reserve: Callable[[], int]
) -> None:
    port = reserve()
    client = connect(f"127.0.0.1:{port}")
    futures = [client.futures.increment() for _ in range(10)]
    ready = threading.Thread(target=courier.wait_until_ready, args=(client, 30))
    ready.start()
    serve(Counter(), port=port, share_port=True)
    assert sorted(future.result(20) for future in futures) == list(range(1, 11))
    ready.join(20)
    assert not ready.is_alive()


def test_a_client_finds_a_restarted_server_and_each_call_runs_once(
    serve: Serve, connect: Callable[..., Any], reserve: Callable[[], int]
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


@pytest.mark.parametrize("call", ["client.hang()", "next(client.stream())"])
def test_ctrl_c_interrupts_a_call_at_once(serve: Serve, script: Script, call: str) -> None:
    entered, left = threading.Event(), threading.Event()

    class Patient:
        def hang(self) -> None:
            entered.set()
            courier.current_call().wait_cancelled(60)
            left.set()

        def stream(self) -> Any:
            self.hang()
            yield 1

    server, _ = serve(Patient())
    caller = script(
        f"client = courier.Client({server.address!r}, secret=secret)\n"
        f"try: {call}\n"
        "except KeyboardInterrupt: print('interrupted', flush=True)\n"
    )
    assert entered.wait(30)
    sent_at = time.monotonic()
    caller.send_signal(signal.SIGINT)
    assert caller.stdout is not None
    assert caller.stdout.readline() == "interrupted\n"
    assert time.monotonic() - sent_at < 20
    assert left.wait(20)
    _, err = caller.communicate(timeout=20)
    assert caller.returncode == 0
    assert err == ""


def test_ctrl_c_interrupts_waiting_for_a_server(script: Script, reserve: Callable[[], int]) -> None:
    caller = script(
        f"client = courier.Client('127.0.0.1:{reserve()}')\n"
        "future = client.futures.hang()\n"
        "print('calling', flush=True)\n"
        "try: client.hang()\n"
        "except KeyboardInterrupt: print('interrupted', flush=True)\n"
    )
    assert caller.stdout is not None
    assert caller.stdout.readline() == "calling\n"
    caller.send_signal(signal.SIGINT)
    out, err = caller.communicate(timeout=30)
    # The signal may also come in the moment before the call.
    assert "interrupted" in out or "KeyboardInterrupt" in err


def test_a_client_pickles_without_its_secret(serve: Serve, secret: courier.Secret) -> None:
    server, client = serve(Counter(), client={"call_timeout": 20})
    data = pickle.dumps(client)
    assert secret.reveal() not in data
    copy = pickle.loads(data)
    assert copy.increment() == 1
    assert client.increment() == 2
    courier.close(client)
    assert copy.increment() == 3
    courier.close(copy)
    assert server.has_started


def test_a_client_travels_through_a_call(serve: Serve) -> None:
    _, counter = serve(Counter())
    _, relay = serve(lambda client: client.increment(5))
    assert relay(counter) == 5


def test_a_process_without_the_secret_cannot_load_a_client(serve: Serve, script: Script) -> None:
    _, client = serve(Counter())
    caller = script(
        "import pickle\n"
        "del secret\n"
        f"try: pickle.loads({pickle.dumps(client)!r})\n"
        "except courier.AuthenticationError as error: print(error)\n"
    )
    out, err = caller.communicate(timeout=30)
    assert "does not hold the secret" in out, err


@pytest.mark.parametrize("served", [True, False])
def test_a_closed_client_fails_its_pending_and_later_calls(
    serve: Serve, connect: Callable[..., Any], reserve: Callable[[], int], served: bool
) -> None:
    release = threading.Event()
    if served:
        _, client = serve(lambda: release.wait(30))
    else:
        client = connect(f"127.0.0.1:{reserve()}")
    pending = [client.futures() for _ in range(30 if served else 3_000)]
    courier.close(client)
    courier.close(client)
    for future in pending:
        with pytest.raises(courier.CallCancelledError):
            future.result(20)
    with pytest.raises(courier.CallCancelledError, match="closed"):
        client()
    release.set()


class Slow(Counter):
    def __init__(self) -> None:
        super().__init__()
        self.entered, self.release = threading.Semaphore(0), threading.Event()

    def block(self) -> str:
        self.entered.release()
        self.release.wait(30)
        return "done"

    def items(self) -> Iterator[int]:
        yield 1
        self.release.wait(30)
        yield 2


def test_clients_with_another_timeout_share_the_connection(serve: Serve) -> None:
    _, client = serve(Counter(), in_process="wire")
    client.increment()
    open_files = len(list(_OPEN_FILES.iterdir()))
    copies = [courier.with_timeout(client, 20 + number) for number in range(20)]
    copies += [courier.with_timeout(copy, None) for copy in copies]
    assert [copy.increment() for copy in copies] == list(range(2, 42))
    # Not ==: the server may just be closing the connection by which the first one introduced itself.
    assert len(list(_OPEN_FILES.iterdir())) <= open_files


def test_each_of_those_that_share_a_connection_has_its_own_timeout(serve: Serve) -> None:
    slow = Slow()
    _, client = serve(slow)
    hasty = courier.with_timeout(client, 0.1)
    future = client.futures.block()
    for call in (
        hasty.block,
        hasty.futures.block().result,
        pickle.loads(pickle.dumps(hasty)).block,
    ):
        with pytest.raises(courier.CallTimeoutError):
            call()
    slow.release.set()
    assert future.result(20) == "done"
    assert courier.with_timeout(hasty, 20).block() == "done"


def test_a_timeout_has_the_name_of_its_unit_or_the_one_it_has_in_launchpad(serve: Serve) -> None:
    slow = Slow()
    server, _ = serve(slow)
    for name in ("call_timeout_s", "call_timeout"):
        client = courier.Client(server.address, secret=server.secret, **{name: 0.05})
        with pytest.raises(courier.CallTimeoutError):
            client.block()
        courier.close(client)
    slow.release.set()
    with pytest.raises(TypeError, match="call_timeout is Launchpad's name of call_timeout_s"):
        courier.Client(server.address, call_timeout_s=1, call_timeout=1)


def test_closing_one_of_those_that_share_a_connection_leaves_the_others(serve: Serve) -> None:
    slow = Slow()
    _, client = serve(slow)
    copy = courier.with_timeout(client, 20)
    items = copy.items()
    assert next(items) == 1
    future, closed = client.futures.block(), copy.futures.block()
    for _ in range(2):
        assert slow.entered.acquire(timeout=20)
    courier.close(copy)
    with pytest.raises(courier.CallCancelledError):
        closed.result(20)
    with pytest.raises(courier.CallCancelledError, match="closed"):
        copy.increment()
    slow.release.set()
    assert future.result(20) == "done"
    assert list(items) == [2]
    assert client.increment() == 1
    copy = courier.with_timeout(client, 20)
    courier.close(client)
    with pytest.raises(courier.CallCancelledError, match="closed"):
        copy.increment()


def test_what_is_asked_of_one_holds_for_all_that_share_its_connection(
    serve: Serve, connect: Callable[..., Any], reserve: Callable[[], int]
) -> None:
    server, _ = serve(Counter())
    client = connect(f"127.0.0.1:{reserve()}")
    copy = courier.with_timeout(client, 20)
    waiting = client.futures.increment()
    courier.move(copy, server.address)
    assert waiting.result(20) == 1
    assert client.address == copy.address == server.address
    courier.move(client, f"127.0.0.1:{reserve()}")
    waiting = client.futures.increment()
    courier.stop_waiting(copy)
    assert isinstance(waiting.exception(20), courier.ServerUnreachableError)
    courier.stop_calling(client)
    with pytest.raises(courier.CallCancelledError, match="asked to stop"):
        copy.increment()


@pytest.mark.parametrize("address", ["", "host", ":1", "host:", "host:0", "host:70000", "host:x"])
def test_an_address_that_is_none_is_refused_at_once(address: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        courier.Client(address)


def test_what_acts_on_clients_refuses_anything_else() -> None:
    for function in (
        courier.close,
        courier.list_methods,
        courier.stop_calling,
        courier.wait_until_ready,
    ):
        with pytest.raises(TypeError, match="courier client"):
            function("client")
    with pytest.raises(TypeError, match="courier client"):
        courier.submit(print, 1)
