"""All clients of a node: what is done to them, and where they follow their servers."""

import gc
import threading
from typing import Any

import pytest

import courier
from launchpad_lite._clients import Clients
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


def test_all_clients_of_an_address_follow_and_no_others(town: Town) -> None:
    clients = [town.keep(name) for name in "aab"]
    town.move("ac")
    assert [client.address for client in clients] == ["c:1", "c:1", "b:1"]


def test_later_clients_of_old_addresses_follow_chains_of_moves(town: Town) -> None:
    early = town.keep("a")
    town.move("ab")
    town.move("bc")
    assert [client.address for client in (early, town.keep("a"), town.keep("b"))] == ["c:1"] * 3


def test_a_server_that_moved_back_is_found_where_it_was(town: Town) -> None:
    early = town.keep("a")
    town.move("ab")
    town.move("ba")
    assert [client.address for client in (early, town.keep("a"), town.keep("b"))] == ["a:1"] * 3


def test_a_move_that_overtakes_another_is_the_one_that_holds(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, move = town.keep("a"), courier.move

    def be_overtaken(moved: Any, address: str) -> None:
        monkeypatch.setattr(courier, "move", move)
        town.move("bc")
        move(moved, address)

    monkeypatch.setattr(courier, "move", be_overtaken)
    town.move("ab")
    assert client.address == "c:1"


def test_two_servers_may_swap_places(town: Town) -> None:
    first, second = town.keep("a"), town.keep("b")
    town.move("ab", "ba")
    assert (first.address, second.address) == ("b:1", "a:1")
    town.move("xy")
    assert (first.address, second.address) == ("b:1", "a:1")


def test_an_address_that_another_server_took_over_is_that_ones(town: Town) -> None:
    first, second = town.keep("a"), town.keep("x")
    town.move("ab")
    town.move("xa")
    assert (first.address, second.address, town.keep("a").address) == ("b:1", "a:1", "a:1")


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
