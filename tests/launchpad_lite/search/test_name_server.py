"""What the name server knows: who is there, and who uses which broker."""

import asyncio
import collections
from typing import Any

import pytest

import launchpad_lite as lp
from launchpad_lite.search._messages import Life, Load, SearchMember
from launchpad_lite.search._timing import Timing
from launchpad_lite.search.errors import WorkerMismatchError
from launchpad_lite.search.name_server import NameServer

SILENCE_S = 5.0


class Registry:
    """A name server that is called directly, at a time that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        timing = Timing(silence_s=SILENCE_S)
        self._server = NameServer(None, timing, clock=lambda: self.now)

    def call(self, method: str, *args: Any, at: float | None = None) -> Any:
        self.now = self.now if at is None else at
        return asyncio.run(getattr(self._server, method)(*args))


def add(
    registry: Registry, role: str, name: str, life: str = "a", now: float = 0.0, python: str = ""
) -> Life:
    who = Life(name, life)
    member = SearchMember(role, who, f"{name}:1", version=lp.__version__, python=python)
    registry.call("register", member, at=now)
    return who


def test_the_silent_are_dropped_and_told_to_register_again() -> None:
    registry = Registry()
    loud, silent = (add(registry, "broker", f"broker[{index}]") for index in range(2))
    for now in (2.0, 4.0):
        assert registry.call("beat", "broker", loud, Load(queued=3), "", at=now).is_known
    assert registry.call("view", at=5.0).brokers == {loud.name: ("broker[0]:1", Load(queued=3))}
    assert not registry.call("beat", "broker", silent, Load(), "", at=5.0).is_known
    add(registry, "broker", silent.name, now=6.0)
    assert set(registry.call("view", at=6.0).brokers) == {loud.name, silent.name}


def test_a_name_server_that_stood_still_drops_nobody() -> None:
    registry = Registry()
    add(registry, "worker", "worker[0]")
    assert registry.call("view", at=100.0).workers == 1
    for now in (102.0, 104.0, 106.0):
        registry.call("view", at=now)
    assert registry.call("view", at=106.0).workers == 0


def test_an_earlier_life_is_not_known_and_cannot_leave_for_the_later_one() -> None:
    registry = Registry()
    old = add(registry, "worker", "worker[0]", "a")
    new = add(registry, "worker", "worker[0]", "b")
    assert not registry.call("beat", "worker", old, Load(), "", at=1.0).is_known
    registry.call("leave", "worker", old)
    assert registry.call("view", at=1.0).workers == 1
    registry.call("leave", "worker", new)
    assert registry.call("view", at=1.0).workers == 0


def test_all_hear_that_the_search_is_over() -> None:
    registry = Registry()
    who = add(registry, "worker", "worker[0]")
    assert not registry.call("beat", "worker", who, Load(), "", at=0.0).is_closed
    registry.call("close")
    assert registry.call("beat", "worker", who, Load(), "", at=0.0).is_closed


@pytest.mark.parametrize("beats", [False, True])
def test_workers_that_start_together_are_spread_evenly(beats: bool) -> None:
    registry = Registry()
    for index in range(4):
        add(registry, "broker", f"broker[{index}]")
    places = []
    for index in range(10):
        who = add(registry, "worker", f"worker[{index}]")
        places.append(registry.call("place", "worker", who, (), at=0.0))
        if beats:  # sent before it had its place
            registry.call("beat", "worker", who, Load(), "", at=0.0)
    assert sorted(collections.Counter(places).values()) == [2, 2, 3, 3]


def test_who_moves_is_counted_once_and_models_do_not_count_as_workers() -> None:
    registry = Registry()
    add(registry, "broker", "broker[0]")
    add(registry, "broker", "broker[1]")
    model, worker = add(registry, "model", "model"), add(registry, "worker", "worker[0]")
    assert registry.call("place", "model", model, (), at=0.0) == "broker[0]"
    assert registry.call("place", "worker", worker, (), at=0.0) == "broker[0]"
    assert registry.call("place", "worker", worker, (), at=0.0) == "broker[0]"
    assert registry.call("place", "worker", worker, ["broker[0]"], at=0.0) == "broker[1]"
    assert (
        registry.call("place", "worker", worker, (), at=0.0) == "broker[1]"
    )  # as good as another one
    assert (
        registry.call("place", "worker", worker, ["broker[0]", "broker[1]"], at=0.0) == "broker[1]"
    )
    assert registry.call("place", "worker", Life("stranger", ""), (), at=0.0) == "broker[0]"


@pytest.mark.parametrize(
    ("version", "python", "message"),
    [
        ("2", "", rf"worker\[1\] has launchpad-lite 2, and this search {lp.__version__}; install"),
        ("", "", r"worker\[1\] has launchpad-lite of no version"),
        (lp.__version__, "3.9", r"worker\[1\] runs on Python 3.9, and this search on 3.12"),
    ],
)
def test_who_does_not_fit_is_turned_away(version: str, python: str, message: str) -> None:
    registry = Registry()
    add(registry, "worker", "worker[0]", python="3.12")
    add(registry, "worker", "foreign")  # says nothing of Python
    member = SearchMember("worker", Life("worker[1]", ""), version=version, python=python)
    with pytest.raises(WorkerMismatchError, match=message):
        registry.call("register", member, at=0.0)
    assert registry.call("view", at=0.0).workers == 2
