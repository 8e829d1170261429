"""Servers, clients and second processes, all of them real, cleaned up after each test."""

import contextlib
import itertools
import pickle
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import courier
from courier.client import _dialing
from tests.courier.by_hand import Visitor, answered_by_hand
from tests.courier.fuzzing import Target
from tests.courier.scripts import Process, started
from tests.courier.served import Node

Serve = Callable[..., tuple[courier.Server, Any]]
Script = Callable[..., Process]

_ROOT = Path(__file__).resolve().parents[2]

Connect = Callable[..., Any]
Reserve = Callable[[], int]
#: Gives the client; its `address` is that of who was made by hand.
Meet = Callable[..., contextlib.AbstractContextManager[Any]]


@pytest.fixture
def secret() -> courier.Secret:
    return courier.Secret.generate()


@pytest.fixture
def serve(secret: courier.Secret) -> Iterator[Serve]:
    """Starts a server for an object; returns it with a client of it that calls by the wire."""
    with contextlib.ExitStack() as stack:

        def start(
            obj: object = None, *, client: dict[str, Any] | None = None, **options: Any
        ) -> tuple[courier.Server, Any]:
            server = courier.Server(obj, **{"secret": secret, "in_process": "wire", **options})
            server.start()
            stack.callback(server.stop, 0.0)
            caller = courier.Client(server.address, **{"secret": server.secret, **(client or {})})
            stack.callback(courier.close, caller)
            return server, caller

        yield start


@pytest.fixture
def connect(secret: courier.Secret) -> Iterator[Connect]:
    """Makes clients with the secret of this test."""
    with contextlib.ExitStack() as stack:

        def make(address: str, **options: Any) -> Any:
            client = courier.Client(address, **{"secret": secret, **options})
            stack.callback(courier.close, client)
            return client

        yield make


@pytest.fixture
def script(tmp_path: Path, secret: courier.Secret) -> Iterator[Script]:
    """Runs source code as the `__main__` of another process that holds the secret."""
    numbers = itertools.count()

    def start(source: str, *args: object, within: Sequence[str] = ()) -> Process:
        path = tmp_path / f"script_{next(numbers)}.py"
        head = (
            f"import sys; sys.path.insert(0, {str(_ROOT)!r})\n"
            f"import courier\nsecret = courier.Secret({secret.reveal()!r})\n"
        )
        path.write_text(head + source)
        return run([*within, sys.executable, str(path), *map(str, args)])

    with started() as run:
        yield start


@pytest.fixture
def reserve() -> Iterator[Reserve]:
    """Picks ports that nobody else is given during the test; servers there need `share_port`."""
    with contextlib.ExitStack() as stack:

        def pick() -> int:
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            sock.bind(("127.0.0.1", 0))
            return int(sock.getsockname()[1])

        yield pick


@pytest.fixture
def meet(connect: Connect) -> Meet:
    """Has a client meet somebody made by hand, who treats each connection by `behave`."""

    @contextlib.contextmanager
    def meet(behave: Callable[[Visitor], None], **options: Any) -> Iterator[Any]:
        with answered_by_hand(behave) as address:
            client = connect(address, **{"call_timeout": 20, **options})
            yield client
            courier.close(client)

    return meet


class Bomb:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self._mark,)


@pytest.fixture
def value_bomb(tmp_path: Path) -> Iterator[bytes]:
    """A pickle that nobody may unpickle; looks afterwards whether anybody has."""
    mark = tmp_path / "mark"
    data = pickle.dumps(Bomb(mark))
    pickle.loads(data)
    assert mark.exists(), "a bomb that does not work proves nothing"
    mark.unlink()
    yield data
    assert not mark.exists()


@pytest.fixture
def bomb(tmp_path: Path, value_bomb: bytes) -> bytes:
    """The same as arguments of a call."""
    return pickle.dumps(((Bomb(tmp_path / "mark"),), {}))


def go_by(way: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Has clients connect by one way: unix, tcp, grpc, copy or share.

    Returns:
        Options that their servers need for it.
    """
    if way in ("copy", "share"):
        return {"in_process": way}
    if way != "unix":
        monkeypatch.setattr(_dialing, "_dial_local", lambda *_: None)
    if way == "grpc":

        def hang_up(*_: object) -> Any:
            raise _dialing.SpeechlessError("something in between hangs up")

        monkeypatch.setattr(_dialing, "_dial_directly", hang_up)
    return {}


@pytest.fixture(params=["unix", "tcp", "grpc", "copy", "share"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """By which way clients connect; options of the servers."""
    return go_by(request.param, monkeypatch)


@pytest.fixture(params=["wire", "copy", "share"])
def mode(request: pytest.FixtureRequest) -> str:
    """How calls reach a server of their own process: `in_process` of the server."""
    return str(request.param)


@pytest.fixture
def target() -> Target:
    return Target()


@pytest.fixture
def node() -> Iterator[Node]:
    """An object to be served; lets its calls end before servers are stopped."""
    made = Node()
    yield made
    made.release.set()


def our_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("courier")}


@pytest.fixture(autouse=True)
def _no_thread_of_ours_remains() -> Iterator[None]:
    before = our_threads()
    yield
    give_up_at = time.monotonic() + 30.0
    # Not joined: a thread that is just being started cannot be.
    while not our_threads() <= before and time.monotonic() < give_up_at:
        time.sleep(0.005)
    assert our_threads() <= before
