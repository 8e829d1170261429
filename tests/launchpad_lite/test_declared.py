"""Handles to nodes that are added later, and programs made of nodes alone."""

import copy
from typing import Any

import pytest

import launchpad_lite as lp

LAUNCHERS = ["test_mt", "local_mt", "test_mp"]


class Peer:
    """Knows another one, and asks it."""

    def __init__(self, name: str, other: Any) -> None:
        self._name = name
        self._other = other

    def name(self) -> str:
        return self._name

    def other(self) -> str:
        return str(self._other.name())


class HTTPServer:
    pass


def function() -> None:
    pass


def peer(name: str, other: Any = None) -> lp.CourierNode[Peer]:
    return lp.CourierNode(Peer, name, other)


@pytest.fixture
def program() -> lp.Program:
    return lp.Program("declared")


def calls(program: lp.Program, launcher: str = "test_mt") -> dict[str, tuple[str, ...]]:
    return {each.name: each.calls for each in lp.plan(program, launcher).executables}


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_nodes_call_each_other_in_a_circle(
    launch_program: Any, program: lp.Program, launcher: str, size: int
) -> None:
    labels = "abc"[:size]
    handle = program.declare(labels[-1])
    for label in labels:
        handle = program.add_node(peer(label, handle), label=label)
    ring = {label: labels[index - 1] for index, label in enumerate(labels)}
    if size > 1:
        expected = {f"{label}[0]": (f"{other}[0]",) for label, other in ring.items()}
        assert calls(program, launcher) == expected
    running = launch_program(program, launcher)
    assert {label: running.client(label).other() for label in labels} == ring


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_node_that_was_declared_and_never_added_is_a_mistake_that_names_it(
    program: lp.Program, launcher: str
) -> None:
    program.add_node(peer("a", [program.declare("b")]), label="a")
    program.add_node(peer("c", program.declare("c", 1)), label="c")
    with pytest.raises(lp.ProgramError) as caught:
        lp.plan(program, launcher)
    first, second = caught.value.mistakes
    assert "a[0] CourierNode(Peer): argument 1[0] is a handle to b[0], which was declared" in first
    assert "c[0] CourierNode(Peer): argument 1 is a handle to c[1], which was declared" in second


def test_a_replica_is_declared_by_its_index(program: lp.Program) -> None:
    handles = [program.declare("b", index) for index in range(3)]
    for handle in handles:
        program.add_node(peer("a", handle), label="a")
    for _ in range(3):
        program.add_node(peer("b"), label="b")
    assert {name: each for name, each in calls(program).items() if each} == {
        f"a[{index}]": (f"b[{index}]",) for index in range(3)
    }


def test_groups_that_are_open_count_replicas_too(program: lp.Program) -> None:
    handle = program.declare("b", 1)
    with program.group("b"):
        program.add_node(peer("b"))
        program.add_node(peer("b", handle))
        program.add_node(peer("b", handle))
    assert calls(program)["b[2]"] == ("b[1]",)


def test_what_was_added_before_can_be_declared(launch_program: Any, program: lp.Program) -> None:
    program.add_node(peer("b"), label="b")
    program.add_node(peer("a", program.declare("b")), label="a")
    assert calls(program)["a[0]"] == ("b[0]",)
    assert launch_program(program).client("a").other() == "b"


def test_one_node_may_be_declared_several_times(program: lp.Program) -> None:
    first, second = program.declare("b"), program.declare("b")
    program.add_node(peer("a", [first, second]), label="a")
    program.add_node(peer("b"), label="b")
    program.add_node(peer("c", program.declare("b")), label="c")
    assert calls(program) == {"a[0]": ("b[0]",), "b[0]": (), "c[0]": ("b[0]",)}


def test_a_node_that_is_declared_but_not_used_is_no_mistake(program: lp.Program) -> None:
    program.declare("b")
    program.add_node(peer("a"), label="a")
    assert calls(program) == {"a[0]": ()}


def test_a_copy_of_arguments_made_before_the_node_was_added_is_fine(program: lp.Program) -> None:
    arguments = {"other": program.declare("b")}
    program.add_node(peer("a", copy.deepcopy(arguments)), label="a")
    program.add_node(peer("c", copy.copy(arguments["other"])), label="c")
    program.add_node(peer("b"), label="b")
    assert calls(program) == {"a[0]": ("b[0]",), "c[0]": ("b[0]",), "b[0]": ()}


def test_a_node_that_serves_nothing_can_be_declared_but_not_called(program: lp.Program) -> None:
    program.add_node(peer("a", program.declare("b")), label="a")
    program.add_node(lp.PyNode(function), label="b")
    with pytest.raises(lp.ProgramError, match=r"b\[0\], but a PyNode\(function\) serves nothing"):
        lp.plan(program, "test_mt")


def test_a_node_of_another_program_was_never_added_to_this_one(program: lp.Program) -> None:
    other = lp.Program("other")
    handle = other.declare("b")
    other.add_node(peer("b"), label="b")
    program.add_node(peer("a", handle), label="a")
    with pytest.raises(lp.ProgramError, match="never added"):
        lp.plan(program, "test_mt")


def test_an_outer_process_dereferences_it_too(launch_program: Any, program: lp.Program) -> None:
    handle = program.declare("b")
    with pytest.raises(ValueError, match=r"b\[0\] was declared, but never added"):
        handle.dereference()
    program.add_node(peer("b"), label="b")
    with pytest.raises(lp.UnresolvedAddressError):
        handle.dereference()
    launch_program(program)
    assert handle.dereference().name() == "b"


@pytest.mark.parametrize(
    ("label", "replica", "kind"),
    [
        ("", 0, ValueError),
        ("a/b", 0, ValueError),
        (5, 0, TypeError),
        ("a", -1, ValueError),
        ("a", "0", TypeError),
        ("a", True, TypeError),
        ("a", 1.0, TypeError),
        ("a", None, TypeError),
    ],
)
def test_wrong_labels_and_replicas_are_refused(
    program: lp.Program, label: Any, replica: Any, kind: type[Exception]
) -> None:
    with pytest.raises(kind):
        program.declare(label, replica)


# Programs made of nodes alone


def test_a_program_is_made_of_nodes_and_its_groups_are_named_after_them() -> None:
    nodes = [
        peer("a"),
        lp.CourierNode(HTTPServer),
        lp.PyNode(function),
        peer("b"),
        lp.PyNode(lambda: None),
        lp.MultiThreadingColocation([peer("c"), peer("d")]),
    ]
    program = lp.make_program(*nodes, name="small")
    assert program.name == "small"
    assert program.groups == {
        "peer": [nodes[0], nodes[3]],
        "http_server": [nodes[1]],
        "function": [nodes[2]],
        "lambda": [nodes[4]],
        "multi_threading_colocation": [nodes[5]],
    }


def test_a_program_of_nodes_runs(launch_program: Any) -> None:
    first = peer("a")
    program = lp.make_program(first, peer("b", first.create_handle()))
    assert program.name == "launchpad"
    assert launch_program(program).client("peer", 1).other() == "a"


def test_a_program_is_made_of_nodes_only_each_once() -> None:
    with pytest.raises(TypeError, match="takes a node"):
        lp.make_program(peer("a"), Peer)  # type: ignore[arg-type]
    node = peer("a")
    with pytest.raises(ValueError, match="already added"):
        lp.make_program(node, node)
    assert lp.make_program().get_all_nodes() == []
