import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from launchers._reachability import LAUNCHER, choose_addresses
from launchers.host import probe
from launchers.host.probe import Doorbell, Target, candidate_addresses, reach

_WORD = "0f" * 16
_BRIDGE = "172.17.0.1"
_PATIENCE_S = 30.0


def everybody_reaches(**addresses: list[str]) -> dict[str, dict[str, list[str]]]:
    return {
        caller: {host: found for host, found in addresses.items() if host != caller}
        for caller in (LAUNCHER, *addresses)
    }


def test_the_address_that_answers_is_chosen_and_not_the_likeliest() -> None:
    views = choose_addresses(
        {"h1": [_BRIDGE, "10.0.0.1"], "h2": [_BRIDGE, "10.0.0.2"]},
        everybody_reaches(h1=["10.0.0.1"], h2=["10.0.0.2"]),
    )
    assert views.address("h1", "h2") == "10.0.0.2"
    assert views.address("h2", "h1") == "10.0.0.1"
    assert views.address(LAUNCHER, "h1") == "10.0.0.1"


def test_a_host_calls_itself_as_others_call_it() -> None:
    views = choose_addresses(
        {"h1": [_BRIDGE, "10.0.0.1"], "h2": ["10.0.0.2"]},
        everybody_reaches(h1=["10.0.0.1"], h2=["10.0.0.2"]),
    )
    assert views.address("h1", "h1") == "10.0.0.1"


def test_of_several_that_answer_all_take_the_likeliest() -> None:
    both = ["10.0.0.1", "192.168.0.1"]
    views = choose_addresses(
        {"h1": both, "h2": ["10.0.0.2"]}, everybody_reaches(h1=both, h2=["10.0.0.2"])
    )
    assert {views.address(caller, "h1") for caller in (LAUNCHER, "h1", "h2")} == {"10.0.0.1"}


def test_the_address_that_most_can_use_is_preferred_to_the_likeliest() -> None:
    views = choose_addresses(
        {"h1": ["10.0.0.1", "192.168.0.1"], "h2": [], "h3": []},
        {
            LAUNCHER: {"h1": ["192.168.0.1"]},
            "h1": {},
            "h2": {"h1": ["10.0.0.1", "192.168.0.1"]},
            "h3": {"h1": ["192.168.0.1"]},
        },
    )
    assert {views.address(each, "h1") for each in (LAUNCHER, "h2", "h3")} == {"192.168.0.1"}


def test_who_cannot_use_the_common_address_uses_another() -> None:
    views = choose_addresses(
        {"h1": ["10.0.0.1", "192.168.0.1"], "h2": [], "h3": []},
        {
            LAUNCHER: {"h1": ["192.168.0.1"]},
            "h1": {},
            "h2": {"h1": ["10.0.0.1"]},
            "h3": {"h1": ["10.0.0.1"]},
        },
    )
    assert views.address("h2", "h1") == "10.0.0.1"
    assert views.address(LAUNCHER, "h1") == "192.168.0.1"


def test_who_is_reached_by_nobody_is_missing_and_it_is_known_what_was_tried() -> None:
    views = choose_addresses(
        {"h1": ["10.0.0.1"], "h2": ["10.0.0.2"]},
        {LAUNCHER: {"h1": ["10.0.0.1"]}, "h1": {}, "h2": {"h1": ["10.0.0.1"]}},
    )
    assert views.missing([("h1", "h2"), ("h2", "h1"), ("h1", "h1"), ("h1", "h2")]) == [("h1", "h2")]
    assert views.tried["h2"] == ["10.0.0.2"]


def test_a_host_without_any_address_is_missing() -> None:
    views = choose_addresses({"h1": []}, {LAUNCHER: {}, "h1": {}})
    assert views.missing([(LAUNCHER, "h1")]) == [(LAUNCHER, "h1")]
    assert views.address("h1", "h1") is None


# Trying


@pytest.fixture
def doorbell() -> Iterator[Doorbell]:
    """One that answers."""
    with contextlib.closing(Doorbell(_WORD)) as doorbell:
        closed = threading.Event()

        def answer() -> None:
            while not closed.is_set():
                doorbell.answer()
                closed.wait(0.01)

        thread = threading.Thread(target=answer)
        thread.start()
        yield doorbell
        closed.set()
        thread.join()


def target(doorbell: Doorbell, *addresses: str, word: str = _WORD) -> Target:
    return Target("h1", addresses, doorbell.port, word)


def test_an_address_that_answers_is_reached(doorbell: Doorbell) -> None:
    assert reach([target(doorbell, "127.0.0.1")], None, _PATIENCE_S) == {"h1": ["127.0.0.1"]}


def test_addresses_that_answer_keep_their_order(
    doorbell: Doorbell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_SOON_S", _PATIENCE_S)  # the others may answer a while later
    addresses = ("127.0.0.3", "127.0.0.1", "127.0.0.2")
    assert reach([target(doorbell, *addresses)], None, _PATIENCE_S) == {"h1": list(addresses)}


def test_another_host_at_the_same_address_is_not_reached(doorbell: Doorbell) -> None:
    stranger = target(doorbell, "127.0.0.1", word="0e" * 16)
    assert reach([stranger], None, _PATIENCE_S) == {"h1": []}


def test_what_is_no_address_is_not_reached_and_harms_no_other(doorbell: Doorbell) -> None:
    addresses = ("no such name.invalid", "127.0.0.1", "999.1.1.1")
    assert reach([target(doorbell, *addresses)], None, _PATIENCE_S) == {"h1": ["127.0.0.1"]}


def test_a_port_that_refuses_or_hangs_up_is_not_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    assert reach([Target("h1", ("127.0.0.1",), port, _WORD)], None, 1.0) == {"h1": []}


def test_who_is_silent_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        targets = [Target("h1", ("127.0.0.1",), silent.getsockname()[1], _WORD)]
        assert reach(targets, None, timeout_s=0.2) == {"h1": []}


def test_who_tries_others_answers_them_meanwhile() -> None:
    with (
        contextlib.closing(Doorbell(_WORD)) as doorbell,
        socket.create_server(("127.0.0.1", 0)) as silent,
    ):
        wait = Target("silent", ("127.0.0.1",), silent.getsockname()[1], _WORD)
        thread = threading.Thread(target=reach, args=([wait], doorbell, 60.0))
        thread.start()
        found = reach([target(doorbell, "127.0.0.1")], None, _PATIENCE_S)
        visitor, _ = silent.accept()
        visitor.close()
        thread.join()
        assert found == {"h1": ["127.0.0.1"]}


def test_a_visitor_who_hangs_up_at_once_harms_nobody(doorbell: Doorbell) -> None:
    for _ in range(50):
        socket.create_connection(("127.0.0.1", doorbell.port)).close()
    assert reach([target(doorbell, "127.0.0.1")], None, _PATIENCE_S) == {"h1": ["127.0.0.1"]}


def test_an_answer_counts_that_came_while_this_process_stood_still(
    doorbell: Doorbell, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = probe._attempts

    def stand_still(targets: Sequence[Target]) -> Iterator[object]:
        yield from begin(targets)
        time.sleep(2.0)

    monkeypatch.setattr(probe, "_attempts", stand_still)
    assert reach([target(doorbell, "127.0.0.1")], None, 0.5) == {"h1": ["127.0.0.1"]}


def test_loopback_is_no_candidate() -> None:
    assert not [each for each in candidate_addresses() if each.startswith("127.")]
