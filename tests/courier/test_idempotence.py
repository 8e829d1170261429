"""Calls to idempotent methods are repeated when their connection breaks; all others are not."""

import asyncio
import concurrent.futures
import gc
import itertools
import pickle
import signal
import subprocess
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import courier
from courier._engine import calls as client_call
from courier._engine.frames import Kind
from courier._idempotence import is_idempotent
from courier._secret import SessionKey
from tests.courier.by_hand import Visitor, answered_by_hand
from tests.courier.conftest import Script, Serve
from tests.courier.waiting import wait_until

#: Counts its lives in a file. In its first ones (argument 3), it says so and hangs or dies.
_SERVER = """
import os, pathlib, signal, threading
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
    @courier.idempotent
    def deadly(self):
        said.wait()
        print("called\\n", end="", flush=True)  # in one piece
        os.kill(os.getpid(), signal.SIGKILL)
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

Start = Callable[[], subprocess.Popen[str]]


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.fixture
def port(reserve: Callable[[], int]) -> int:
    return reserve()


@pytest.fixture
def start(script: Script, port: int, tmp_path: Any) -> Start:
    """Starts the server whose first life hangs in its calls."""

    def run(deadly_lives: int = 1) -> subprocess.Popen[str]:
        process = script(_SERVER, port, tmp_path / "lives", deadly_lives)
        assert _line(process) == "ready"
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
    async def call() -> Any:
        return await client.aio.safe(*args)

    return _in_thread(lambda: asyncio.run(call()))


@pytest.mark.parametrize("call", [_blocking, _future, _aio])
@pytest.mark.parametrize("size", [1, 1_000_000], ids=["small", "in pieces"])
def test_a_lost_call_to_an_idempotent_method_is_answered_by_the_next_server(
    start: Start, port: int, connect: Callable[..., Any], call: Any, size: int
) -> None:
    first = start()
    client = connect(f"127.0.0.1:{port}", call_timeout=60)
    futures = [call(client, np.zeros(size)) for _ in range(3)]
    for _ in futures:
        assert _line(first) == "called"
    _kill(first)
    start()
    assert [future.result(30) for future in futures] == [1, 1, 1]
    assert client.count() == 3


def test_other_calls_are_lost_and_never_repeated(
    start: Start, port: int, connect: Callable[..., Any]
) -> None:
    first = start()
    client = connect(f"127.0.0.1:{port}")
    safe, unsafe = client.futures.safe(), client.futures.unsafe()
    assert [_line(first), _line(first)] == ["called", "called"]
    _kill(first)
    assert isinstance(unsafe.exception(20), courier.ServerLostError)
    start()
    assert safe.result(30) == 1
    assert client.count() == 1


def test_a_call_that_kills_its_servers_is_given_up(
    start: Start, port: int, connect: Callable[..., Any]
) -> None:
    client = connect(f"127.0.0.1:{port}")
    future = client.futures.deadly()
    for _ in range(1 + client_call._MAX_REPEATS):
        assert not future.done()
        process = start()
        assert _line(process) == "called"
        process.wait()
    assert isinstance(future.exception(20), courier.ServerLostError)
    start()
    assert client.count() == 0


def test_a_method_that_the_next_server_does_not_mark_is_not_repeated(
    start: Start, port: int, connect: Callable[..., Any]
) -> None:
    first = start()
    client = connect(f"127.0.0.1:{port}")
    future = client.futures.safe_in_first_life()
    assert _line(first) == "called"
    _kill(first)
    start()
    with pytest.raises(courier.ServerLostError, match="idempotent"):
        future.result(20)
    assert client.count() == 0


@pytest.mark.parametrize("told", [True, False], ids=["stop_waiting", "wait_for_ready=False"])
def test_a_repeat_that_finds_no_server_is_a_lost_call_if_it_must_not_wait(
    start: Start, port: int, connect: Callable[..., Any], told: bool
) -> None:
    first = start()
    client = connect(f"127.0.0.1:{port}", wait_for_ready=told)
    futures = [client.futures.safe() for _ in range(3)]
    for _ in futures:
        assert _line(first) == "called"
    _kill(first)
    if told:
        late = client.futures.safe()  # repeated or never sent, it waits with the others
        courier.stop_waiting(client)
        assert isinstance(late.exception(20), ConnectionError)
    for future in futures:
        with pytest.raises(courier.ServerLostError, match="may have run"):
            future.result(20)


def test_a_repeat_keeps_to_the_timeout_of_its_call(
    start: Start, port: int, connect: Callable[..., Any]
) -> None:
    first = start()
    # Long enough to be sent, and lost, before its time is over.
    client = connect(f"127.0.0.1:{port}", call_timeout=10)
    future = client.futures.safe()
    assert _line(first) == "called"
    _kill(first)
    with pytest.raises(courier.CallTimeoutError, match="may have run"):
        future.result(30)


class Breaking:
    """Breaks the connection in mid-answer, for some times."""

    def __init__(self, secret: courier.Secret, *, breaks: int, marked: bool = True) -> None:
        self._secret = secret
        self._breaks = breaks
        self._names = ("get",) if marked else ()
        #: The calls that came, by the connections they came over.
        self.seen: list[tuple[int, int]] = []
        self._connections = itertools.count()

    def __call__(self, visitor: Visitor) -> None:
        connection = next(self._connections)
        visitor.greet(self._secret, idempotent=self._names)
        number = visitor.read().call
        self.seen.append((connection, number))
        answer = b"".join(visitor.write(Kind.UNKNOWN_METHOD, number, b"the end" + bytes(100_000)))
        if self._breaks:
            self._breaks -= 1
            visitor.send([answer[:50_000]])
        else:
            visitor.send([answer])
            visitor.is_hung_up_on()


def test_a_reply_that_is_lost_half_way_is_asked_for_again_over_a_new_connection(
    connect: Callable[..., Any], secret: courier.Secret
) -> None:
    fake = Breaking(secret, breaks=2)
    with answered_by_hand(fake) as address:
        client = connect(address, call_timeout=30)
        with pytest.raises(courier.UnknownMethodError, match="the end"):
            client.get()
        courier.close(client)
    assert [connection for connection, _ in fake.seen] == [0, 1, 2]


@pytest.mark.parametrize(("marked", "sent"), [(True, 4), (False, 1)])
def test_a_reply_that_is_always_lost_is_asked_for_a_few_times_if_that_is_allowed(
    connect: Callable[..., Any], secret: courier.Secret, marked: bool, sent: int
) -> None:
    fake = Breaking(secret, breaks=100, marked=marked)
    with answered_by_hand(fake) as address:
        client = connect(address, call_timeout=30)
        with pytest.raises(courier.ServerLostError, match=f"{address}: get"):
            client.get()
        courier.close(client)
    assert len(fake.seen) == sent


def test_a_call_that_a_stopping_server_refused_is_answered_by_the_next(
    connect: Callable[..., Any], secret: courier.Secret
) -> None:
    """It did not run, so that it may be sent again though it is not marked."""
    seen: list[bytes] = []

    def behave(visitor: Visitor) -> None:
        visitor.greet(secret)
        frame = visitor.read()
        seen.append(b"".join(map(bytes, (frame.parcel.pickle, *frame.parcel.buffers))))
        if len(seen) == 1:
            visitor.send(visitor.write(Kind.GOODBYE, 0))
            visitor.send(visitor.write(Kind.STOPPING, frame.call))
        else:
            visitor.send(visitor.write(Kind.VALUE, frame.call, pickle.dumps("here")))
        visitor.is_hung_up_on()

    with answered_by_hand(behave) as address:
        client = connect(address, call_timeout=30)
        assert client.futures.get(np.arange(100_000)).result(20) == "here"
        courier.close(client)
        fleeting = connect(address, call_timeout=30, wait_for_ready=False)
        seen.clear()
        with pytest.raises(courier.ServerUnreachableError, match="nothing was run"):
            fleeting.get()
        courier.close(fleeting)
    assert len(seen) == 1


def test_a_proof_tells_lists_of_names_apart(secret: courier.Secret) -> None:
    key = SessionKey(secret, bytes(16), bytes(32))
    lists = [[], [""], ["", ""], ["ab"], ["a", "b"], ["b", "a"], ["a\0b"], ["é"]]
    proofs = {key.prove(names) for names in lists}
    assert len(proofs) == len(lists)
    assert all(key.is_proof(key.prove(names), names) for names in lists)
    assert not key.is_proof(key.prove(["a"]), [])


def test_arguments_go_when_the_answer_is_here(serve: Serve) -> None:
    server, client = serve()
    server.bind("get", courier.idempotent(lambda _: None))
    array = np.zeros(1_000_000)
    gone = weakref.ref(array)
    future = client.futures.get(array)
    future.result(20)
    del array
    # The thread that sent it may not have left its functions yet.
    wait_until(lambda: gc.collect() is not None and gone() is None)


def test_every_kind_of_method_can_be_marked() -> None:
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

    server = courier.Server(Object())
    assert server.dispatcher.idempotent_names() == sorted(
        ["plain", "static_below", "static_above", "class_below", "class_above"]
    )
    bound = Object().unmarked
    server.bind("bound", courier.idempotent(bound))
    server.bind("builtin", courier.idempotent(len))
    server.bind("plain", Derived().plain)
    server.unbind("class_above")
    names = server.dispatcher.idempotent_names()
    assert {"bound", "builtin"} < set(names)
    assert not {"plain", "class_above", "unmarked"} & set(names)
    assert not is_idempotent(bound)
    assert courier.Server(courier.idempotent(lambda: 1)).dispatcher.idempotent_names() == [
        "__call__"
    ]


def test_what_answers_any_question_is_not_taken_for_marked() -> None:
    class Yes:
        def __getattr__(self, name: str) -> Any:
            return Yes()

        def __call__(self) -> None: ...

    class Fails(Yes):
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError

    assert not is_idempotent(Yes())
    assert not is_idempotent(Fails())


def test_generators_and_what_cannot_be_called_are_refused_at_once() -> None:
    def items() -> Iterator[int]:
        yield 1

    async def later() -> Any:
        yield 1

    for wrong in (items, later, staticmethod(items), classmethod(items), property(items), 1):
        with pytest.raises(TypeError):
            courier.idempotent(wrong)
