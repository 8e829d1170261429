"""Calls to idempotent methods are repeated when their connection breaks; all others are not."""

import asyncio
import concurrent.futures
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import courier
from courier import lowlevel
from tests.courier.by_hand import Stranger
from tests.courier.conftest import Connect, Reserve, Script
from tests.courier.scripts import Process

#: Counts its lives in a file. In its first ones (argument 3), it says so and hangs or dies.
_SERVER = """
import pathlib, threading
port, lives, deadly = int(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3])
life = len(lives.read_text()) if lives.exists() else 0
lives.write_text("x" * (life + 1))
said = threading.Event()  # calls that waited come before the server has said that it is there
class Object:
    def __init__(self): self.calls = 0
    def _meet(self):
        said.wait()
        self.calls += 1
        print("called\\n", end="", flush=True)  # in one piece
        if life < deadly: threading.Event().wait()
        return life
    @courier.idempotent
    def safe(self, *_): return self._meet()
    def unsafe(self, *_): return self._meet()
    def unsafe_items(self):
        yield 0
        yield self._meet()
    @courier.idempotent
    def safe_in_first_life(self): return self._meet()
    if life:
        safe_in_first_life = lambda self: self._meet()
    def count(self): return self.calls
with courier.Server(Object(), secret=secret, port=port, share_port=True) as server:
    print("ready", flush=True)
    said.set()
    sys.stdin.read()
"""

Start = Callable[[], Process]


def _kill(process: Process) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.fixture
def port(reserve: Reserve) -> int:
    return reserve()


@pytest.fixture
def start(script: Script, port: int, tmp_path: Any) -> Start:
    """Starts the server whose first life hangs in its calls."""

    def run(deadly_lives: int = 1) -> Process:
        process = script(_SERVER, port, tmp_path / "lives", deadly_lives)
        assert process.line() == "ready"
        return process

    return run


def _future(client: Any, *args: Any) -> Any:
    return client.futures.safe(*args)


def _in_thread(call: Callable[[], Any]) -> Any:
    threads = concurrent.futures.ThreadPoolExecutor(1)
    future = threads.submit(call)
    threads.shutdown(wait=False)
    return future


def _blocking(client: Any, *args: Any) -> Any:
    return _in_thread(lambda: client.safe(*args))


def _aio(client: Any, *args: Any) -> Any:
    return _in_thread(lambda: asyncio.run(client.aio.safe(*args)))


def test_a_lost_call_to_an_idempotent_method_is_answered_by_the_next_server_and_no_other_is(
    start: Start, port: int, connect: Connect
) -> None:
    first = start()
    client = connect(f"127.0.0.1:{port}", call_timeout=60)
    calls = [
        call(client, bytes(size)) for call in (_blocking, _future, _aio) for size in (1, 8_000_000)
    ]
    unsafe = [client.futures.unsafe(bytes(size)) for size in (1, 8_000_000)]
    items, dropped = client.unsafe_items(), client.futures.safe_in_first_life()
    assert next(items) == 0
    for _ in (*calls, *unsafe, items, dropped):
        assert first.line() == "called"
    killed_at = time.monotonic()
    _kill(first)
    for each in unsafe:
        assert isinstance(each.exception(20), courier.ServerLostError)
    with pytest.raises(courier.ServerLostError):
        next(items)
    assert time.monotonic() - killed_at < 15
    start()
    assert [call.result(30) for call in calls] == [1] * 6
    with pytest.raises(courier.ServerLostError, match="idempotent"):
        dropped.result(20)  # the next server does not mark it
    assert client.count() == 6


@pytest.mark.parametrize("told", [True, False], ids=["stop_waiting", "wait_for_ready=False"])
def test_a_repeat_that_finds_no_server_is_a_lost_call_if_it_must_not_wait(
    start: Start, port: int, connect: Connect, told: bool
) -> None:
    first = start()
    client = connect(f"127.0.0.1:{port}", wait_for_ready=told)
    futures = [client.futures.safe() for _ in range(3)]
    for _ in futures:
        assert first.line() == "called"
    _kill(first)
    if told:
        late = client.futures.safe()  # repeated or never sent, it waits with the others
        lowlevel.stop_waiting(client)
        assert isinstance(late.exception(20), ConnectionError)
    for future in futures:
        with pytest.raises(courier.ServerLostError, match="may have run"):
            future.result(20)


@pytest.mark.slow
def test_a_repeat_keeps_to_the_timeout_of_its_call(
    start: Start, port: int, connect: Connect
) -> None:
    first = start()
    # Long enough to be sent, and lost, before its time is over.
    client = connect(f"127.0.0.1:{port}", call_timeout=5)
    future = client.futures.safe()
    assert first.line() == "called"
    _kill(first)
    with pytest.raises(courier.CallTimeoutError, match="may have run"):
        future.result(30)


def test_every_kind_of_method_can_be_marked(secret: courier.Secret) -> None:
    class Object:
        @courier.idempotent
        def plain(self) -> None: ...

        @courier.idempotent
        @staticmethod
        def static_below() -> None: ...

        @staticmethod
        @courier.idempotent
        def static_above() -> None: ...

        @courier.idempotent
        @classmethod
        def class_below(cls) -> None: ...

        @classmethod
        @courier.idempotent
        def class_above(cls) -> None: ...

        def unmarked(self) -> None: ...

    class Derived(Object):
        def plain(self) -> None: ...

    class Yes:
        """Has every attribute, and is not marked."""

        def __getattr__(self, name: str) -> Any:
            return Yes()

        def __call__(self) -> None: ...

    def marked(obj: object, **bound: Any) -> list[str]:
        """What a server tells those who connect."""
        server = courier.Server(obj, secret=secret)
        for name, method in bound.items():
            server.bind(name, method)
        with server, Stranger(server.address, secret) as client:
            return list(client.introduction.idempotent)

    names = ["class_above", "class_below", "plain", "static_above", "static_below"]
    assert marked(Object()) == names
    method = Object().unmarked
    bound = {"bound": courier.idempotent(method), "builtin": courier.idempotent(len)}
    bound |= {"plain": Derived().plain, "yes": Yes(), "method": method}
    assert marked(Object(), **bound) == sorted({*names, "bound", "builtin"} - {"plain"})
    assert marked(courier.idempotent(lambda: 1)) == ["__call__"]


def test_generators_and_what_cannot_be_called_are_refused_at_once() -> None:
    def items() -> Iterator[int]:
        yield 1

    async def later() -> Any:
        yield 1

    for wrong in (items, later, staticmethod(items), classmethod(items), property(items), 1):
        with pytest.raises(TypeError):
            courier.idempotent(wrong)
