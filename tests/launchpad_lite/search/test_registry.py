"""What the name server knows: who is there, and who uses which broker."""

import collections

import pytest

from launchpad_lite.search._messages import Life, Load, Member
from launchpad_lite.search._registry import Registry
from launchpad_lite.search.errors import WorkerMismatchError

SILENCE_S = 5.0


def make_registry() -> Registry:
    return Registry(silence_s=SILENCE_S, version="1", now=0.0)


def add(
    registry: Registry, role: str, name: str, life: str = "a", now: float = 0.0, python: str = ""
) -> Life:
    who = Life(name, life)
    registry.register(Member(role, who, f"{name}:1", version="1", python=python), now)
    return who


def test_the_silent_are_dropped_and_told_to_register_again() -> None:
    registry = make_registry()
    loud, silent = (add(registry, "broker", f"broker[{index}]") for index in range(2))
    for now in (2.0, 4.0):
        assert registry.beat("broker", loud, Load(queued=3), "", now).is_known
    assert registry.view(5.0).brokers == {loud.name: ("broker[0]:1", Load(queued=3))}
    assert not registry.beat("broker", silent, Load(), "", 5.0).is_known
    add(registry, "broker", silent.name, now=6.0)
    assert set(registry.view(6.0).brokers) == {loud.name, silent.name}


def test_a_name_server_that_stood_still_drops_nobody() -> None:
    registry = make_registry()
    add(registry, "worker", "worker[0]")
    assert registry.view(100.0).workers == 1
    for now in (102.0, 104.0, 106.0):
        registry.view(now)
    assert registry.view(106.0).workers == 0


def test_an_earlier_life_is_not_known_and_cannot_leave_for_the_later_one() -> None:
    registry = make_registry()
    old = add(registry, "worker", "worker[0]", "a")
    new = add(registry, "worker", "worker[0]", "b")
    assert not registry.beat("worker", old, Load(), "", 1.0).is_known
    registry.leave("worker", old)
    assert registry.view(1.0).workers == 1
    registry.leave("worker", new)
    assert registry.view(1.0).workers == 0


def test_all_hear_that_the_search_is_over() -> None:
    registry = make_registry()
    who = add(registry, "worker", "worker[0]")
    assert not registry.beat("worker", who, Load(), "", 0.0).is_closed
    registry.close()
    assert registry.beat("worker", who, Load(), "", 0.0).is_closed


@pytest.mark.parametrize("beats", [False, True])
def test_workers_that_start_together_are_spread_evenly(beats: bool) -> None:
    registry = make_registry()
    for index in range(4):
        add(registry, "broker", f"broker[{index}]")
    places = []
    for index in range(10):
        who = add(registry, "worker", f"worker[{index}]")
        places.append(registry.place("worker", who, (), 0.0))
        if beats:  # sent before it had its place
            registry.beat("worker", who, Load(), "", 0.0)
    assert sorted(collections.Counter(places).values()) == [2, 2, 3, 3]


def test_who_moves_is_counted_once_and_models_do_not_count_as_workers() -> None:
    registry = make_registry()
    add(registry, "broker", "broker[0]")
    add(registry, "broker", "broker[1]")
    model, worker = add(registry, "model", "model"), add(registry, "worker", "worker[0]")
    assert registry.place("model", model, (), 0.0) == "broker[0]"
    assert registry.place("worker", worker, (), 0.0) == "broker[0]"
    assert registry.place("worker", worker, (), 0.0) == "broker[0]"
    assert registry.place("worker", worker, ["broker[0]"], 0.0) == "broker[1]"
    assert registry.place("worker", worker, (), 0.0) == "broker[1]"  # as good as another one
    assert registry.place("worker", worker, ["broker[0]", "broker[1]"], 0.0) == ""
    assert registry.place("worker", Life("stranger", ""), (), 0.0) == "broker[0]"


@pytest.mark.parametrize(
    ("version", "python", "message"),
    [
        ("2", "", r"worker\[1\] has launchpad-lite 2, and this search 1; install the same"),
        ("", "", r"worker\[1\] has launchpad-lite of no version"),
        ("1", "3.9", r"worker\[1\] runs on Python 3.9, and this search on 3.12"),
    ],
)
def test_who_does_not_fit_is_turned_away(version: str, python: str, message: str) -> None:
    registry = make_registry()
    add(registry, "worker", "worker[0]", python="3.12")
    add(registry, "worker", "foreign")  # says nothing of Python
    member = Member("worker", Life("worker[1]", ""), version=version, python=python)
    with pytest.raises(WorkerMismatchError, match=message):
        registry.register(member, 0.0)
    assert registry.view(0.0).workers == 2
