"""Handles to nodes that are added later, and programs made of nodes alone."""

import copy
from typing import Any

import pytest

import launchpad_lite as lp


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


def calls(program: lp.Program) -> dict[str, tuple[str, ...]]:
    return {each.name: each.calls for each in lp.plan(program, "test_mt").executables}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_nodes_call_each_other_in_a_circle(
    launch_program: Any, program: lp.Program, size: int
) -> None:
    labels = "abc"[:size]
    handle = program.declare(labels[-1])
    for label in labels:
        handle = program.add_node(peer(label, handle), label=label)
    ring = {label: labels[index - 1] for index, label in enumerate(labels)}
    if size > 1:
        expected = {f"{label}[0]": (f"{other}[0]",) for label, other in ring.items()}
        assert calls(program) == expected
    running = launch_program(program)
    assert {label: running.client(label).other() for label in labels} == ring


def test_a_node_may_be_declared_whenever_and_as_often_as_one_likes(program: lp.Program) -> None:
    program.declare("nobody uses it")
    first, second = program.declare("b"), program.declare("b")
    arguments = {"other": first}
    program.add_node(peer("a", [first, second]), label="a")
    program.add_node(peer("copied", copy.deepcopy(arguments)), label="a")
    program.add_node(peer("copied", copy.copy(second)), label="a")
    program.add_node(peer("b"), label="b")
    program.add_node(peer("c", program.declare("b")), label="c")
    to_b = ("b[0]",)
    assert calls(program) == {"a[0]": to_b, "a[1]": to_b, "a[2]": to_b, "b[0]": (), "c[0]": to_b}


def test_a_replica_is_declared_by_its_index(program: lp.Program) -> None:
    handles = [program.declare("b", index) for index in range(3)]
    for handle in handles:
        program.add_node(peer("a", handle), label="a")
    with program.group("b"):
        program.add_node(peer("b"))
        program.add_node(peer("b", handles[1]))
        program.add_node(peer("b"))
    edges = {name: each for name, each in calls(program).items() if each}
    assert edges == {**{f"a[{n}]": (f"b[{n}]",) for n in range(3)}, "b[1]": ("b[1]",)}


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
    [("a/b", 0, ValueError), ("a", -1, ValueError), ("a", "0", TypeError), ("a", True, TypeError)],
)
def test_wrong_labels_and_replicas_are_refused(
    program: lp.Program, label: Any, replica: Any, kind: type[Exception]
) -> None:
    with pytest.raises(kind):
        program.declare(label, replica)


# Programs made of nodes alone


def test_a_program_is_made_of_nodes_and_its_groups_are_named_after_them() -> None:
    first = peer("a")
    nodes = [
        first,
        lp.CourierNode(HTTPServer),
        lp.PyNode(function),
        peer("b", first.create_handle()),
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
    assert calls(program)["peer[1]"] == ("peer[0]",)


def test_a_program_is_made_of_nodes_only_each_once() -> None:
    with pytest.raises(TypeError, match="takes a node"):
        lp.make_program(peer("a"), Peer)  # type: ignore[arg-type]
    node = peer("a")
    with pytest.raises(ValueError, match="already added"):
        lp.make_program(node, node)
    assert lp.make_program().get_all_nodes() == []
    assert lp.make_program().name == "launchpad"
