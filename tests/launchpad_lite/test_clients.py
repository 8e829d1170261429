"""All clients of a node: what is done to them, and where they follow their servers."""

import gc
import threading
from typing import Any

import pytest

import courier
from courier import lowlevel
from launchpad_lite.worker._clients import Clients
from tests.courier.waiting import wait_until


class Town:
    """Addresses that nobody listens at; clients of them are never called."""

    def __init__(self) -> None:
        self.clients = Clients()

    def keep(self, name: str) -> Any:
        client = courier.Client(f"{name}:1")
        self.clients.keep(client)
        return client

    def move(self, *moves: str) -> None:
        self.clients.note_moved({f"{old}:1": f"{new}:1" for old, new in moves})


@pytest.fixture
def town() -> Town:
    return Town()


@pytest.mark.parametrize(
    ("moves", "addresses"),
    [
        ([["ac"]], "cb"),  # all clients of an address, and no others
        ([["ab"], ["bc"]], "cc"),
        ([["ab"], ["ba"]], "aa"),  # it is found again where it was
        ([["ab", "ba"], ["xy"]], "ba"),  # two may swap places
        ([["ab"], ["xa"]], "bb"),  # another server took its address over
    ],
)
def test_clients_follow_their_servers_wherever_they_move(
    town: Town, moves: list[list[str]], addresses: str
) -> None:
    early = [town.keep("a"), town.keep("b")]
    for each in moves:
        town.move(*each)
    expected = [f"{name}:1" for name in addresses]
    assert [client.address for client in early] == expected


def test_clients_that_come_later_follow_moves_from_before(town: Town) -> None:
    town.move("ab")
    town.move("bc")
    assert [town.keep(name).address for name in "ab"] == ["c:1", "c:1"]
    town.move("xa")
    assert town.keep("a").address == "a:1"  # that of the other server


def test_a_move_that_overtakes_another_is_the_one_that_holds(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, move = town.keep("a"), lowlevel.move

    def be_overtaken(moved: Any, address: str) -> None:
        monkeypatch.setattr(lowlevel, "move", move)
        town.move("bc")
        move(moved, address)

    monkeypatch.setattr(lowlevel, "move", be_overtaken)
    town.move("ab")
    assert client.address == "c:1"


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
        thread.join(20)
    assert kept
    assert {client.address for client in kept} == {"h200:1"}
