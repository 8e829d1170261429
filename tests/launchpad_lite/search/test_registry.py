"""What the name server knows: who is there, who uses which broker, and which device is whose."""

import collections
import itertools

import pytest
from hypothesis import given, strategies as st

from launchpad_lite.search._messages import Life, Load, Member
from launchpad_lite.search._registry import Registry
from launchpad_lite.search.errors import SearchError, WorkerMismatchError

SILENCE_S = 5.0


def make_registry(*, is_first: bool = False) -> Registry:
    return Registry(silence_s=SILENCE_S, version="1", now=0.0, is_first=is_first)


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


def test_who_was_silent_may_have_lost_its_device() -> None:
    registry = make_registry(is_first=True)
    silent = add(registry, "worker", "worker[0]")
    assert registry.claim(silent, "host", ["gpu0"], 1.0, 0.0) == "gpu0"
    for now in (2.0, 4.0, 6.0):
        registry.view(now)
    other = add(registry, "worker", "worker[1]", now=6.0)
    assert registry.claim(other, "host", ["gpu0"], 1.0, 6.0) == "gpu0"
    back = Member("worker", silent, version="1", machine="host", device=("gpu0", 1.0))
    with pytest.raises(SearchError, match="others got its device gpu0"):
        registry.register(back, 7.0)


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


def test_devices_are_given_once_all_are_known_that_have_some() -> None:
    registry = make_registry()
    who = add(registry, "worker", "worker[0]")
    registry.beat("worker", who, Load(), "", SILENCE_S - 0.1)
    assert registry.claim(who, "host", ["gpu0"], 1.0, SILENCE_S - 0.1) is None
    assert registry.claim(who, "host", ["gpu0"], 1.0, SILENCE_S) == "gpu0"
    assert registry.claim(who, "host", ["gpu0"], 1.0, SILENCE_S) == "gpu0", "its own"


def test_shares_fill_one_device_before_the_next() -> None:
    registry = make_registry(is_first=True)
    workers = [add(registry, "worker", f"worker[{index}]") for index in range(5)]
    devices = ["gpu0", "gpu1"]
    found = [registry.claim(who, "host", devices, 0.5, 1.0) for who in workers[:4]]
    assert found == ["gpu0", "gpu0", "gpu1", "gpu1"]
    with pytest.raises(SearchError, match=r"no device of host has 0.5 of it left: gpu0: 1 used"):
        registry.claim(workers[4], "host", devices, 0.5, 1.0)
    assert registry.claim(workers[4], "another host", devices, 0.5, 1.0) == "gpu0"


def test_a_stranger_is_to_ask_for_a_device_again() -> None:
    registry = make_registry(is_first=True)
    assert registry.claim(Life("worker[0]", ""), "host", ["gpu0"], 1.0, 0.0) is None


_STEPS = st.tuples(
    st.sampled_from(["claim", "leave", "restart", "beat", "wait"]),
    st.integers(0, 3),
    st.sampled_from([1.0, 0.5, 0.4, 1 / 3]),
)


@given(st.lists(_STEPS, max_size=40))
def test_devices_are_never_given_more_than_once(steps: list[tuple[str, int, float]]) -> None:
    registry = make_registry(is_first=True)
    lives = itertools.count()
    now = 0.0
    names = [f"worker[{index}]" for index in range(4)]
    alive = {name: add(registry, "worker", name, str(next(lives)), now) for name in names}
    seen_at = dict.fromkeys(names, now)
    held: dict[str, tuple[str, float]] = {}
    for what, index, share in steps:
        now += 1.0
        name = names[index]
        for silent in [each for each in names if seen_at[each] + SILENCE_S <= now]:
            held.pop(silent, None)
        if what == "claim":
            if not registry.beat("worker", alive[name], Load(), "", now).is_known:
                continue
            seen_at[name] = now
            try:
                device = registry.claim(alive[name], "host", ["gpu0", "gpu1"], share, now)
            except SearchError:
                continue
            assert device is not None
            held[name] = device, share
        elif what == "leave":
            registry.leave("worker", alive[name])
            held.pop(name, None)
        elif what == "restart":
            alive[name] = add(registry, "worker", name, str(next(lives)), now)
            seen_at[name] = now
            held.pop(name, None)
        elif what == "beat" and registry.beat("worker", alive[name], Load(), "", now).is_known:
            seen_at[name] = now
        for device in ("gpu0", "gpu1"):
            assert sum(part for each, part in held.values() if each == device) <= 1 + 1e-9
