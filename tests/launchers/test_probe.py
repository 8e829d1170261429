"""Trying which addresses of a host can be reached from here."""

import contextlib
import fcntl
import select
import socket
import struct
import termios
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import psutil
import pytest

from launchers.host.probe import ProbeServer, Target, candidate_addresses, reach
from launchpad_lite.testing import poll_until

_WORD = "0f" * 16
_PATIENCE_S = 30.0
_HERE = "127.0.0.1"


@pytest.fixture
def probe_server() -> Iterator[ProbeServer]:
    """One that answers."""
    with contextlib.closing(ProbeServer(_WORD)) as probe_server:
        closed = threading.Event()

        def answer() -> None:
            while not closed.is_set():
                probe_server.answer()
                closed.wait(0.01)

        thread = threading.Thread(target=answer)
        thread.start()
        yield probe_server
        closed.set()
        thread.join()


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A port where nobody answers."""
    with socket.create_server((_HERE, 0)) as listener:
        yield listener


def target(door: ProbeServer | socket.socket, *addresses: str, word: str = _WORD) -> Target:
    port = door.port if isinstance(door, ProbeServer) else door.getsockname()[1]
    return Target("h1", addresses or (_HERE,), port, word)


@pytest.mark.parametrize(
    ("addresses", "word", "reached"),
    [
        # Those that answer keep their order.
        (["127.0.0.3", "127.0.0.1", "127.0.0.2"], _WORD, ["127.0.0.3", "127.0.0.1", "127.0.0.2"]),
        # What is no address harms no other.
        (["no such name.invalid", _HERE, "999.1.1.1"], _WORD, [_HERE]),
        # Another host has the same address.
        ([_HERE], "0e" * 16, []),
    ],
)
def test_addresses_that_answer_with_the_word_are_reached(
    probe_server: ProbeServer, addresses: Sequence[str], word: str, reached: list[str]
) -> None:
    wanted = [target(probe_server, *addresses, word=word)]
    # The others may answer a while later.
    found = reach(wanted, None, _PATIENCE_S, soon_s=_PATIENCE_S)
    assert found == {"h1": reached}


def test_a_port_that_refuses_is_not_reached() -> None:
    with socket.socket() as held:  # bound, so that nobody else listens there
        held.bind((_HERE, 0))
        assert reach([target(held)], None, _PATIENCE_S) == {"h1": []}


def test_who_is_silent_is_given_up(silent: socket.socket) -> None:
    times = iter([0.0, 0.2])
    assert reach([target(silent)], None, 0.2, clock=lambda: next(times)) == {"h1": []}


def test_who_tries_others_answers_them_meanwhile(silent: socket.socket) -> None:
    with contextlib.closing(ProbeServer(_WORD)) as probe_server:
        thread = threading.Thread(target=reach, args=([target(silent)], probe_server, 60.0))
        thread.start()
        found = reach([target(probe_server)], None, _PATIENCE_S)
        visitor, _ = silent.accept()
        visitor.close()
        thread.join()
        assert found == {"h1": [_HERE]}


def test_a_visitor_who_hangs_up_at_once_harms_nobody(probe_server: ProbeServer) -> None:
    for _ in range(50):
        socket.create_connection((_HERE, probe_server.port)).close()
    assert reach([target(probe_server)], None, _PATIENCE_S) == {"h1": [_HERE]}


def test_an_answer_counts_that_came_while_this_process_stood_still(silent: socket.socket) -> None:
    with contextlib.ExitStack() as stack:
        looks = 0

        def clock() -> float:
            nonlocal looks
            looks += 1
            if looks == 2:  # all attempts have begun
                select.select([silent], [], [], _PATIENCE_S)
                visitor = stack.enter_context(silent.accept()[0])
                visitor.sendall(bytes.fromhex(_WORD))
                poll_until(lambda: not unsent_bytes(visitor))
            return 0.0 if looks == 1 else 60.0

        assert reach([target(silent)], None, 0.5, clock=clock) == {"h1": [_HERE]}


def unsent_bytes(sock: socket.socket) -> int:
    (count,) = struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))
    return int(count)


def test_where_ssh_came_in_is_tried_first_and_what_means_nothing_elsewhere_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kinds = {True: socket.AF_INET6, False: socket.AF_INET}
    cards = {
        card: [SimpleNamespace(family=kinds[":" in each], address=each) for each in addresses]
        for card, addresses in {
            "eth0": ["fd00::2", "fe80::2%eth0", "10.0.0.2", "fd00::3"],
            "lo": ["127.0.0.1", "::1"],
        }.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: cards)
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    assert candidate_addresses() == ["10.0.0.2", "fd00::2", "fd00::3"]
    monkeypatch.setenv("SSH_CONNECTION", "fd00::1 55555 fd00::3 22")
    assert candidate_addresses() == ["fd00::3", "10.0.0.2", "fd00::2"]
