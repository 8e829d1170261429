"""Programs under construction: labels, groups, nodes and their options."""

import copy
import pickle
from typing import Any

import pytest

import launchpad_lite as lp
from launchpad_lite.nodes.base import PlanContext


class Service:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args


def make_node() -> lp.CourierNode[Service]:
    return lp.CourierNode(Service)


@pytest.fixture
def program() -> lp.Program:
    return lp.Program("test")


def test_nodes_are_grouped_by_label_in_the_order_of_their_addition(program: lp.Program) -> None:
    first, second, third, fourth = (make_node() for _ in range(4))
    program.add_node(first, label="b")
    with program.group("a"):
        assert program.current_group == "a"
        program.add_node(second)
    program.add_node(third, "b")
    with program.group("a"):
        program.add_node(fourth)
    with program.group("without nodes"):
        pass
    assert program.groups == {"b": [first, third], "a": [second, fourth]}
    assert list(program.groups) == ["b", "a"]
    assert program.get_all_nodes() == [first, third, second, fourth]
    assert "b[2], a[2]" in repr(program)


def test_the_label_of_the_open_group_may_be_repeated_but_no_other_given(
    program: lp.Program,
) -> None:
    with program.group("a"):
        program.add_node(make_node(), label="a")
        for other in ("b", ""):
            with pytest.raises(ValueError, match="does not match the open group 'a'"):
                program.add_node(make_node(), label=other)
    assert len(program.get_all_nodes()) == 1


def test_groups_do_not_nest_and_the_outer_one_stays_open(program: lp.Program) -> None:
    with program.group("a"):
        with pytest.raises(ValueError, match="cannot be nested: 'a' is open"), program.group("b"):
            raise AssertionError
        program.add_node(make_node())
    assert list(program.groups) == ["a"]


def test_a_group_closes_when_its_block_raises(program: lp.Program) -> None:
    with pytest.raises(KeyError), program.group("a"):
        raise KeyError
    with pytest.raises(ValueError, match="no group is open"):
        _ = program.current_group
    with program.group("b"):
        pass


def test_nodes_with_labels_are_added_and_nothing_else(program: lp.Program) -> None:
    for empty in (None, ""):
        with pytest.raises(ValueError, match=r"a label cannot be empty.*program\.group"):
            program.add_node(make_node(), label=empty)
    wrong: Any
    for wrong in (0, 5, b"a", ["a"]):
        with pytest.raises(TypeError, match="is a string"):
            program.add_node(make_node(), label=wrong)
        with pytest.raises(TypeError, match="a program's name is a string"):
            lp.Program(wrong)
    for wrong in (Service, Service(), None, "node", make_node().create_handle()):
        with pytest.raises(TypeError, match="add_node takes a node"):
            program.add_node(wrong, label="a")
    assert program.groups == {}
    with pytest.raises(ValueError, match="a program's name cannot be empty") as refused:
        lp.Program("")
    assert "add_node" not in str(refused.value)


BAD_LABELS = [
    " a", "a ", "a  b", "a\tb", "a\nb", "a/b", "a\\b", "a[0]", "a]", "a\0", "a\x7f", "a\u2028b",
    "\ud800", ".", "..",
]  # fmt: skip


@pytest.mark.parametrize("label", BAD_LABELS, ids=ascii)
def test_labels_that_would_break_names_or_files_are_refused(
    program: lp.Program, label: str
) -> None:
    with pytest.raises(ValueError, match="printable"):
        program.add_node(make_node(), label=label)
    with pytest.raises(ValueError, match="printable"), program.group(label):
        raise AssertionError
    with pytest.raises(ValueError, match="printable"):
        lp.Program(label)
    with program.group("the failed one is not open"):
        pass


@pytest.mark.parametrize("label", ["a", "two words", "ä", "演员", 'a"b', "a&b", "<a>", "-x", "a.b"])
def test_other_printable_labels_are_fine(program: lp.Program, label: str) -> None:
    program.add_node(make_node(), label=label)
    assert list(program.groups) == [label]


def test_handles_made_before_and_after_add_node_are_of_the_same_node(program: lp.Program) -> None:
    node = make_node()
    before = node.create_handle()
    added = program.add_node(node, label="server")
    after = node.create_handle()
    caller = lp.CourierNode(Service, before, added, [after])
    program.add_node(caller, label="caller")
    assert lp.plan(program, "test_mt").executables[1].calls == ("server[0]",)


def test_configure_replaces_the_arguments_so_that_cycles_can_be_drawn(program: lp.Program) -> None:
    first = lp.CourierNode(Service, "to be replaced", unwanted=1)
    second = lp.CourierNode(Service, first.create_handle())
    first.configure(second.create_handle(), name="x")
    itself = make_node()
    itself.configure(itself.create_handle())
    for node, label in ((first, "first"), (second, "second"), (itself, "itself")):
        program.add_node(node, label=label)
    calls = {each.name: each.calls for each in lp.plan(program, "test_mt").executables}
    assert calls == {
        "first[0]": ("second[0]",),
        "second[0]": ("first[0]",),
        "itself[0]": ("itself[0]",),
    }


@pytest.mark.parametrize("kind", [lp.CourierNode, lp.PyClassNode])
def test_run_can_be_disabled_and_enabled(kind: Any) -> None:
    node = kind(Service)
    context = PlanContext("test_mt", "service", 0, lp.Resources())

    def run_enabled() -> bool:
        (task,) = node.to_executables(context)
        return bool(task.work.run_enabled)

    assert run_enabled()
    node.disable_run()
    assert not run_enabled()
    node.enable_run()
    assert run_enabled()


@pytest.mark.parametrize("kind", [lp.CourierNode, lp.PyClassNode, lp.PyNode])
@pytest.mark.parametrize("thing", [Service(), None, "Service", 3])
def test_a_node_of_something_that_cannot_be_called_is_refused(kind: Any, thing: Any) -> None:
    with pytest.raises(TypeError, match=rf"{kind.__name__} takes a class or function"):
        kind(thing)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"courier_kwargs": {"prot": 1}}, TypeError, r"courier_kwargs.*'prot'.*port"),
        ({"courier_client_kwargs": {"timeout": 1}}, TypeError, "'timeout'.*call_timeout"),
        ({"courier_kwargs": {"port": 0}}, ValueError, "not a port: 0"),
        ({"courier_kwargs": {"port": 65536}}, ValueError, "not a port: 65536"),
        ({"courier_kwargs": {"port": "80"}}, TypeError, "port.*'80'"),
        ({"courier_kwargs": {"port": True}}, TypeError, "port.*True"),
        ({"courier_kwargs": {"thread_pool_size": 0}}, ValueError, "thread_pool_size.*least 1"),
        ({"courier_kwargs": {"thread_pool_size": "8"}}, TypeError, "thread_pool_size.*'8'"),
        ({"courier_kwargs": {"queue_size": -1}}, ValueError, "queue_size.*least 1"),
    ],
)
def test_wrong_options_are_refused_when_the_node_is_made(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        lp.CourierNode(Service, **options)


def test_handles_survive_copies_and_explain_what_they_cannot_do_before_the_launch() -> None:
    handle = make_node().create_handle()
    for twin in (copy.deepcopy(handle), pickle.loads(pickle.dumps(handle))):
        assert (twin.node_key, twin.address) == (handle.node_key, handle.address)
    with pytest.raises(TypeError, match="'retries'"):
        handle.set_client_kwargs(retries=3)
    with pytest.raises(AttributeError, match=r"has no 'produce'.*CourierNode\(Service\)"):
        handle.produce()  # type: ignore[attr-defined]
    with pytest.raises(lp.UnresolvedAddressError, match="after launch"):
        handle.dereference()
    with pytest.raises(TypeError, match="serves nothing"):
        lp.PyNode(print).create_handle().dereference()


def test_names_that_no_file_could_bear_are_refused_at_once(program: lp.Program) -> None:
    program.add_node(make_node(), label="\u00e9" * 64)
    with pytest.raises(ValueError, match=r"at most 128 bytes.* has 300"):
        program.add_node(make_node(), label="a" * 300)
    with pytest.raises(ValueError, match=r"at most 128 bytes.* has 130"):
        lp.Program("\u00e9" * 65)
