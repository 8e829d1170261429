import collections
import contextlib
import errno
import os
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest

from courier.lowlevel import split_address
from launchers.host.link import LinkFrame
from launchers.host.relay import Relay
from launchpad_lite.testing import poll_until

_WINDOW_BYTES = 1 << 20
_HOST = "far"


class Pair:
    """The two ends of a relay, each other's link, in a thread of their own; a context manager.

    Attributes:
        near: Where ports are opened.
        on_their_way: Bytes that were sent to the far end and not delivered there.
        most: The most that these ever were.
        ops: What the two said, as "near relay_open".
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._near_says: collections.deque[LinkFrame] = collections.deque()
        self._far_says: collections.deque[LinkFrame] = collections.deque()
        self.near = Relay(self._selector, self._near_says.append)
        self._far = Relay(self._selector, self._far_says.append)
        self.on_their_way = self.most = 0
        self.ops: list[str] = []
        self._tasks: collections.deque[Callable[[], None]] = collections.deque()
        self._wake_read, self._wake_write = socket.socketpair()
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._on_wake)
        self._open = True
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *exc: object) -> None:
        self.do(self._leave)
        self._thread.join()
        self.near.close()
        self._far.close()
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()
        assert self._failure is None

    def _leave(self) -> None:
        self._open = False

    def do(self, task: Callable[[], None]) -> None:
        """Has the thread of both ends do something."""
        self._tasks.append(task)
        self._wake_write.send(b"\0")

    def listen(self, port: int) -> int:
        endpoints: list[str] = []
        self.do(lambda: endpoints.append(self.near.listen(_HOST, port)))
        poll_until(lambda: endpoints)
        return split_address(endpoints[0])[1]

    def tell(self, frame: LinkFrame) -> None:
        """Tells both ends something that neither of them said."""
        self.do(lambda: (self.near.handle(frame), self._far.handle(frame), None)[-1])

    def registered(self) -> int:
        """How many sockets are watched, our own aside."""
        return len(self._selector.get_map()) - 1

    def _on_wake(self) -> None:
        self._wake_read.recv(1)
        self._tasks.popleft()()

    def _run(self) -> None:
        try:
            while self._open:
                for key, _ in self._selector.select():
                    if self._selector.get_map().get(key.fd) == key:
                        key.data()
                self._exchange()
        except Exception as error:
            self._failure = error
            raise

    def _exchange(self) -> None:
        while self._near_says or self._far_says:
            while self._near_says:
                frame = self._near_says.popleft()
                self.ops.append(f"near {frame.op}")
                self.on_their_way += len(frame.body)
                self.most = max(self.most, self.on_their_way)
                self._far.handle(frame)
            while self._far_says:
                frame = self._far_says.popleft()
                self.ops.append(f"far {frame.op}")
                if frame.op == "relay_taken":
                    self.on_their_way -= frame["bytes"]
                self.near.handle(frame)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with Pair() as pair:
        yield pair


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        listener.settimeout(20)
        yield listener


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), 20)


def connected(pair: Pair, listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    """The two ends of a relayed connection."""
    client = connect(pair.listen(listener.getsockname()[1]))
    server, _ = listener.accept()
    server.settimeout(20)
    return client, server


def receive(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = sock.recv(min(1 << 20, size - len(data)))
        assert piece, f"the connection ended after {len(data)} bytes of {size}"
        data += piece
    return bytes(data)


def reset(sock: socket.socket) -> None:
    """Ends a connection as a machine does that forgot it."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def fill(sock: socket.socket) -> int:
    """Sends until nothing more is taken, for half a second."""
    sock.settimeout(0.5)
    sent = 0
    with contextlib.suppress(TimeoutError):
        while sent < 64 << 20:
            sent += sock.send(bytes(1 << 16))
    sock.settimeout(20)
    return sent


def test_bytes_arrive_as_they_were_in_both_directions(pair: Pair, listener: socket.socket) -> None:
    client, server = connected(pair, listener)
    forth, back = os.urandom(8 << 20), os.urandom(8 << 20)

    def answer() -> None:
        assert receive(server, len(forth)) == forth
        server.sendall(back)

    with client, server:
        thread = threading.Thread(target=answer)
        thread.start()
        client.sendall(forth)
        assert receive(client, len(back)) == back
        thread.join()


@pytest.mark.parametrize("size", [1 << 19, 3 << 20], ids=["one window", "several windows"])
def test_what_was_said_before_the_end_is_delivered(
    pair: Pair, listener: socket.socket, size: int
) -> None:
    client, server = connected(pair, listener)
    data = os.urandom(size)
    with client:

        def say() -> None:
            with server:
                server.sendall(data)

        sender = threading.Thread(target=say)
        sender.start()
        if size < _WINDOW_BYTES:  # the server need not wait for the client
            poll_until(lambda: "far relay_end" in pair.ops)
        assert receive(client, len(data)) == data
        assert client.recv(1) == b""
        sender.join()


@pytest.mark.parametrize("end", [socket.socket.close, reset])
@pytest.mark.parametrize("which", ["client", "server"])
def test_the_end_of_one_side_is_the_end_of_the_other(
    pair: Pair, listener: socket.socket, which: str, end: Callable[[socket.socket], None]
) -> None:
    client, server = connected(pair, listener)
    left, other = (client, server) if which == "client" else (server, client)
    with other:
        end(left)
        assert other.recv(1) == b""
    poll_until(lambda: pair.registered() == 1)  # the port


def test_who_writes_to_a_side_that_is_gone_is_told(pair: Pair, listener: socket.socket) -> None:
    client, server = connected(pair, listener)
    reset(server)
    with client, pytest.raises((ConnectionResetError, BrokenPipeError)):
        client.sendall(bytes(64 << 20))


def test_a_connection_ends_at_once_where_nobody_listens(pair: Pair) -> None:
    with socket.socket() as held:  # nobody else may listen there meanwhile
        held.bind(("127.0.0.1", 0))
        with connect(pair.listen(held.getsockname()[1])) as client:
            assert client.recv(1) == b""


def test_a_server_that_answers_nobody_holds_up_no_other(
    pair: Pair, listener: socket.socket
) -> None:
    with contextlib.ExitStack() as stack:
        stuck = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        # Its queue is full: who connects now waits until the system gives up.
        for _ in range(2):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(stuck.getsockname())
        stack.enter_context(connect(pair.listen(stuck.getsockname()[1])))
        poll_until(lambda: "near relay_open" in pair.ops)
        client, server = connected(pair, listener)
        with client, server:
            server.sendall(b"at once")
            assert receive(client, 7) == b"at once"


def test_a_slow_reader_fills_no_memory_is_still_heard_and_holds_up_no_other(
    pair: Pair, listener: socket.socket
) -> None:
    slow, unread = connected(pair, listener)
    fast, server = connected(pair, listener)
    with slow, unread, fast, server:
        sent = fill(slow)
        # Beyond the window are what two pairs of sockets hold.
        assert 0 < sent < 32 << 20
        assert pair.most <= _WINDOW_BYTES
        fast.sendall(b"x" * (4 << 10))
        assert receive(server, 4 << 10) == b"x" * (4 << 10)
        unread.sendall(b"wait")
        assert receive(slow, 4) == b"wait"
        # And when it reads on, all of it comes.
        assert len(receive(unread, sent)) == sent
        slow.sendall(b"more")
        assert receive(unread, 4) == b"more"


def test_hundreds_of_connections_at_once(pair: Pair, listener: socket.socket) -> None:
    count = 300
    port = pair.listen(listener.getsockname()[1])
    with contextlib.ExitStack() as stack:
        clients = []
        for index in range(count):
            client = stack.enter_context(connect(port))
            client.sendall(struct.pack("!I", index))
            clients.append(client)
        for _ in range(count):
            server = stack.enter_context(listener.accept()[0])
            server.settimeout(20)
            server.sendall(receive(server, 4) * 1000)
        for index, client in enumerate(clients):
            assert receive(client, 4000) == struct.pack("!I", index) * 1000
    poll_until(lambda: pair.registered() == 1)


def test_words_about_a_connection_that_is_over_are_ignored(
    pair: Pair, listener: socket.socket
) -> None:
    for op, fields in (("data", {}), ("taken", {"bytes": 5}), ("end", {})):
        pair.tell(
            LinkFrame(f"relay_{op}", {"key": "gone", **fields}, b"late" if op == "data" else b"")
        )
    client, server = connected(pair, listener)
    with client, server:
        client.sendall(b"ok")
        assert receive(server, 2) == b"ok"


def test_closing_ends_all_connections_and_ports(listener: socket.socket) -> None:
    with Pair() as pair:
        port = pair.listen(listener.getsockname()[1])
        client = connect(port)
        server, _ = listener.accept()
    with client, server:
        assert client.recv(1) == b""
        assert server.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        connect(port)


def test_a_host_without_descriptors_ends_the_connection_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[LinkFrame] = []
    with selectors.DefaultSelector() as selector:
        relay = Relay(selector, said.append)

        def no_socket(*_: object) -> None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        monkeypatch.setattr(socket, "socket", no_socket)
        relay.handle(LinkFrame("relay_open", {"key": "k", "host": _HOST, "port": 1}))
        assert [(frame.op, frame["key"]) for frame in said] == [("relay_end", "k")]
