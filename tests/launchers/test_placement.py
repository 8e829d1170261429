"""Which executable runs on which host, and why some programs fit on none."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, strategies as st

from launchers.host.machine import Machine
from launchers.hosts.host_list import HostSpec as Room
from launchers.hosts.placement import Placement, PlacementChoice, Strategy, place
from launchers.supervision.allotment import allot
from launchpad_lite.launching import Executable
from tests.launchers.wishes import Wish, cpu, executables, gpu

SPREAD, PACK = Strategy.SPREAD, Strategy.PACK


def placed(
    groups: Mapping[str, Sequence[Wish]],
    rooms: Sequence[Room],
    strategy: Strategy = SPREAD,
    choice: PlacementChoice = None,
) -> dict[str, str]:
    """Returns the hosts of the nodes of each group, in the order of the replicas."""
    nodes = executables(groups)
    placement = place(nodes, rooms, choice, strategy)
    assert not placement.mistakes
    return {
        label: " ".join(placement.hosts[each.name] for each in nodes if each.label == label)
        for label in groups
    }


def mistakes(
    groups: Mapping[str, Sequence[Wish]],
    rooms: Sequence[Room],
    choice: Any = None,
    strategy: Strategy = SPREAD,
) -> Sequence[str]:
    placement = place(executables(groups), rooms, choice, strategy)
    assert not placement.hosts
    assert placement.mistakes
    return placement.mistakes


H1, H2, H3 = Room("h1"), Room("h2"), Room("h3")
BIG = Room("big", cpu=16, ram_gib=64, gpu=4)
SMALL = Room("small", cpu=4, ram_gib=8, gpu=0)


def cores(*counts: float) -> list[Room]:
    return [Room(f"h{number}", cpu=count) for number, count in enumerate(counts, 1)]


def devices(*counts: int) -> list[Room]:
    return [Room(f"h{number}", gpu=count) for number, count in enumerate(counts, 1)]


@pytest.mark.parametrize(
    ("groups", "rooms", "strategy", "expected"),
    [
        # Nothing is asked for.
        ({"a": [{}] * 3}, [H1, H2], PACK, {"a": "h1 h1 h1"}),
        ({"a": [{}], "b": [{}] * 4}, [H1, H2, H3], SPREAD, {"a": "h1", "b": "h2 h3 h1 h2"}),
        # What is asked for. Most cores are free on the big one, also when the learner is there.
        (
            {"actor": cpu(1, 1, 1, 1), "learner": gpu(1)},
            [SMALL, BIG],
            SPREAD,
            {"actor": "big big big big", "learner": "big"},
        ),
        (
            {"actor": [{}] * 4, "learner": gpu(1)},
            [SMALL, BIG],
            SPREAD,
            {"actor": "small small big small", "learner": "big"},
        ),
        ({"a": gpu(1, 1, 1, 1)}, devices(2, 2), SPREAD, {"a": "h1 h2 h1 h2"}),
        ({"a": gpu(1, 1, 1)}, devices(2, 2), PACK, {"a": "h1 h1 h2"}),
        ({"a": cpu(3, 3, 3)}, [SMALL, BIG], PACK, {"a": "small big big"}),
        # What is not known does not limit.
        ({"a": [{"cpu": 99, "gpu": 9}] * 2}, [H1, H2], SPREAD, {"a": "h1 h2"}),
        ({"a": cpu(3, 3, 3)}, [SMALL, H1], SPREAD, {"a": "small h1 h1"}),
        # Big ones first, small ones where they are left room.
        ({"a": cpu(1, 1), "b": cpu(4)}, cores(2, 4), SPREAD, {"a": "h1 h1", "b": "h2"}),
        # Parts share devices, and lie on one each.
        ({"part": gpu(0.5, 0.5), "b": gpu(1)}, devices(2), SPREAD, {"part": "h1 h1", "b": "h1"}),
        ({"part": gpu(0.6, 0.6, 0.6, 0.6)}, devices(2, 2), PACK, {"part": "h1 h1 h2 h2"}),
        # Those that run together.
        (
            {"a": [{"together": "x"}, {}], "b": [{"together": "x"}, {}]},
            [H1, H2],
            SPREAD,
            {"a": "h1 h2", "b": "h1 h2"},
        ),
        (
            {"a": [{"together": "x", "cpu": 3}], "b": [{"together": "x", "cpu": 3}]},
            [SMALL, BIG],
            PACK,
            {"a": "big", "b": "big"},
        ),
        # Where big ones first fails: 3 + 3 + 2 + 2 + 2 in two times 6.
        ({"a": cpu(3, 3), "b": cpu(2, 2, 2)}, cores(6, 6), SPREAD, {"a": "h1 h1", "b": "h2 h2 h2"}),
        # Hosts of different sizes do not stand for each other.
        (
            {"a": cpu(5, 5), "b": cpu(3, 3, 3)},
            cores(10, 9),
            SPREAD,
            {"a": "h1 h1", "b": "h2 h2 h2"},
        ),
    ],
)
def test_nodes_are_placed_as_recorded(
    groups: Mapping[str, Sequence[Wish]],
    rooms: Sequence[Room],
    strategy: Strategy,
    expected: Mapping[str, str],
) -> None:
    assert placed(groups, rooms, strategy) == expected


@pytest.mark.parametrize(
    ("groups", "choice", "expected"),
    [
        ({"a": [{}] * 3}, {"a": "h2"}, {"a": "h2 h2 h2"}),
        ({"a": [{}] * 3}, {"a": "h2", "a[1]": "h1"}, {"a": "h2 h1 h2"}),
        ({"a": [{}] * 3}, {"a": ["h3", "h2"]}, {"a": "h2 h3 h2"}),
        # Those that have no choice come first, so that the others can make up for it.
        ({"a": [{}] * 4, "b": [{}] * 2}, {"b": "h1"}, {"a": "h2 h3 h2 h3", "b": "h1 h1"}),
        (
            {"a": [{"together": "x"}], "b": [{"together": "x"}]},
            {"a": ["h1", "h2"], "b": ["h2", "h3"]},
            {"a": "h2", "b": "h2"},
        ),
    ],
)
def test_users_choose_hosts_of_groups_and_nodes(
    groups: Mapping[str, Sequence[Wish]], choice: PlacementChoice, expected: Mapping[str, str]
) -> None:
    assert placed(groups, [H1, H2, H3], SPREAD, choice) == expected


def test_a_program_without_nodes_is_placed() -> None:
    assert place([], [H1], None, SPREAD) == Placement({})


_NO_WAY = "; ask for less, choose other hosts by placement, or add some"
_FEWER = "; ask for less, start fewer nodes, or add hosts"


@pytest.mark.parametrize(
    ("groups", "rooms", "choice", "expected"),
    [
        ({"a": [{}]}, [], None, ["there are no hosts to place nodes on"]),
        (
            {"learner": gpu(2)},
            devices(1, 0, 1),
            None,
            [
                (
                    "learner[0] wants gpu=2; h1 has gpu=1 left of 1, h2 has gpu=0 left of 0, h3 has "
                    f"gpu=1 left of 1{_NO_WAY}"
                )
            ],
        ),
        (
            {"a": [{"cpu": 3, "together": "x"}], "b": [{"cpu": 2, "together": "x"}]},
            [SMALL],
            None,
            [
                "cpu: a 1 x 3 + b 1 x 2 = 5 cores are asked for, the hosts have 4 (small 4)"
                + _FEWER,
                f"a[0] (with b[0]) wants cpu=5; small has cpu=4 left of 4{_NO_WAY}",
            ],
        ),
        (
            {"learner": cpu(4), "actor": [{"cpu": 1, "ram": 4}] * 8},
            [Room("h1", cpu=4, ram_gib=15.6219), Room("h2", cpu=4, ram_gib=8)],
            None,
            [
                (
                    "cpu: learner 1 x 4 + actor 8 x 1 = 12 cores are asked for, the hosts have 8 "
                    f"(h1 4, h2 4){_FEWER}"
                ),
                (
                    "ram_gib: actor 8 x 4 = 32 GiB are asked for, the hosts have 23.62 (h1 15.62, "
                    f"h2 8){_FEWER}"
                ),
                f"learner[0] wants cpu=4; h1 has cpu=1 left of 4, h2 has cpu=2 left of 4{_NO_WAY}",
                (
                    "actor[5], actor[6], actor[7] each want cpu=1, ram_gib=4; h1 has ram_gib=3.62 left "
                    f"of 15.62, h2 has ram_gib=0 left of 8{_NO_WAY}"
                ),
            ],
        ),
        (
            {"a": gpu(0.6, 0.6, 0.5)},
            devices(2),
            None,
            [f"a[2] wants gpu=0.5; h1 has gpu=2 x 0.4 left of 2{_NO_WAY}"],
        ),
        (
            {"a": gpu(0.7, 2)},
            devices(2, 2),
            {"a": "h2"},
            [f"a[0] wants gpu=0.7; h2 has gpu=0 left of 2{_NO_WAY}"],
        ),
        (
            {"a": [{}], "b": [{}], "d": [{}]},
            [H1, H2],
            {"c": "h1", "a[1]": "h1", "b": "h9", "a": [], "d": 1},
            [
                "placement of an unknown group 'c'; the groups are: a, b, d",
                "placement of an unknown node 'a[1]'; the groups are: a, b, d",
                "placement of group 'b': there is no host 'h9'; the hosts are: h1, h2",
                "placement of group 'a': expected the name of a host, or several, got []",
                "placement of group 'd': expected the name of a host, or several, got 1",
            ],
        ),
        ({"a": [{}]}, [H1], "h1", ["placement is a dict of hosts by group or node, not 'h1'"]),
        (
            {each: [{"together": "x"}] for each in "abc"},
            [H1, H2, H3],
            {"a": "h1", "b": ["h2", "h3"]},
            [
                (
                    "a[0] (with b[0], c[0]) run together, but the placement leaves them no common "
                    "host; name the same for all of them"
                )
            ],
        ),
    ],
)
def test_what_cannot_be_placed_is_explained(
    groups: Mapping[str, Sequence[Wish]], rooms: Sequence[Room], choice: Any, expected: list[str]
) -> None:
    assert mistakes(groups, rooms, choice) == expected


def test_of_one_node_that_does_not_fit_no_sum_is_shown() -> None:
    (told,) = mistakes({"a": cpu(5)}, cores(4, 0))
    assert told == f"a[0] wants cpu=5; h1 has cpu=4 left of 4, h2 has cpu=0 left of 0{_NO_WAY}"


def test_messages_about_many_hosts_and_nodes_stay_short() -> None:
    rooms = [Room(f"h{number}", gpu=0) for number in range(30)]
    told = mistakes({"a": [{"gpu": 1}] * 50}, rooms)
    assert told[1].startswith("a[0], a[1], a[2], a[3], a[4], and 45 more each want gpu=1; h0 has")
    assert "h4 has gpu=0 left of 0, and 25 more; " in told[1]
    told = [*told, *mistakes({"a": [{"gpu": i} for i in range(50)]}, [BIG])]
    assert max(map(len, told)) < 300


def test_a_large_program_is_placed_soon() -> None:
    rooms = [Room(f"h{number}", cpu=64, ram_gib=256, gpu=8) for number in range(30)]
    groups = {"learner": [{"gpu": 1, "cpu": 4}] * 200, "actor": [{"cpu": 1, "gpu": 0.1}] * 390}
    assert not place(executables(groups), rooms, None, SPREAD).mistakes


# Properties

_AMOUNTS = st.none() | st.sampled_from([0, 0.5, 1, 1.5, 2, 3, 4])
_GPUS = st.none() | st.sampled_from([0, 0.25, 0.4, 0.5, 0.6, 1, 2])


@st.composite
def _programs(draw: st.DrawFn) -> list[Executable]:
    wish = st.fixed_dictionaries(
        {"cpu": _AMOUNTS, "ram_gib": _AMOUNTS, "gpu": _GPUS},
        optional={"together": st.sampled_from(["x", "y"])},
    )
    wishes = draw(st.lists(wish, min_size=1, max_size=10))
    cut = draw(st.integers(0, len(wishes)))
    return executables({"a": wishes[:cut], "b": wishes[cut:]})


@st.composite
def _some_rooms(draw: st.DrawFn) -> list[Room]:
    amount = st.none() | st.integers(0, 8)
    count = draw(st.integers(1, 4))
    return [
        Room(
            f"h{number}",
            cpu=draw(amount),
            ram_gib=draw(amount),
            gpu=draw(st.none() | st.integers(0, 4)),
        )
        for number in range(count)
    ]


_STRATEGIES = st.sampled_from(Strategy)


def _fits(nodes: Sequence[Executable], room: Room) -> bool:
    """Asks who divides a host among its nodes, whether that can be done."""
    plenty = 50  # more than all of them ask for
    machine = Machine(
        tuple(range(plenty if room.cpu is None else int(room.cpu))),
        (plenty if room.ram_gib is None else int(room.ram_gib)) << 30,
        tuple(map(str, range(plenty if room.gpu is None else int(room.gpu)))),
    )
    return not allot(nodes, machine).mistakes


def _is_right(
    hosts: Mapping[str, str],
    nodes: Sequence[Executable],
    rooms: Sequence[Room],
    allowed: Mapping[str, Sequence[str]],
) -> bool:
    by_word: dict[str | None, set[str]] = {}
    for each in nodes:
        by_word.setdefault(each.together, set()).add(hosts[each.name])
    return (
        all(len(there) == 1 for word, there in by_word.items() if word is not None)
        and all(hosts[each.name] in allowed.get(each.label, hosts.values()) for each in nodes)
        and all(
            _fits([each for each in nodes if hosts[each.name] == room.name], room) for room in rooms
        )
    )


@given(_programs(), _some_rooms(), _STRATEGIES, st.data())
def test_placements_fit_as_hosts_are_divided_and_are_as_users_chose(
    nodes: list[Executable], rooms: list[Room], strategy: Strategy, data: st.DataObject
) -> None:
    names = [room.name for room in rooms]
    some = st.lists(st.sampled_from(names), min_size=1, unique=True)
    labels = {each.label for each in nodes}
    choice = {
        label: chosen
        for label in sorted(labels)
        if (chosen := data.draw(st.none() | some)) is not None
    }
    placement = place(nodes, rooms, choice, strategy)
    assert placement == place(list(nodes), list(rooms), choice, strategy)
    assert bool(placement.hosts) != bool(placement.mistakes)
    if placement.hosts:
        assert list(placement.hosts) == [each.name for each in nodes]
        assert _is_right(placement.hosts, nodes, rooms, choice)


@given(st.integers(0, 30), st.integers(0, 30), st.integers(1, 6))
def test_nodes_that_ask_for_nothing_are_spread_evenly(first: int, second: int, count: int) -> None:
    rooms = [Room(f"h{number}", cpu=number) for number in range(count)]
    nodes = executables({"a": [{}] * first, "b": [{}] * second})
    hosts = place(nodes, rooms, None, SPREAD).hosts
    for label in ("a", "b", ""):
        load = Counter(hosts[each.name] for each in nodes if each.label.startswith(label))
        each_has = [load[room.name] for room in rooms]
        assert max(each_has) - min(each_has) <= 1
