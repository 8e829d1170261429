"""Colocations before anything runs: descriptions, bad input, plans, names, edges."""

from pathlib import Path
from typing import Any

import pytest

import launchpad_lite as lp


class Service:
    def __init__(self, *args: Any) -> None: ...

    def save(self, folder: Path) -> None: ...

    def restore(self, folder: Path) -> None: ...


def _main(*args: Any) -> None: ...


def _names(plan: Any) -> list[str]:
    return [executable.name for executable in plan.executables]


def _calls(plan: Any) -> dict[str, tuple[str, ...]]:
    return {executable.name: executable.calls for executable in plan.executables}


MODES = ["thread", "process"]


# Descriptions


def test_a_colocation_is_described_by_what_it_consists_of() -> None:
    nodes = [lp.CourierNode(Service), lp.PyNode(_main)]
    described = "(CourierNode(Service), PyNode(_main))"
    assert lp.ColocationNode(nodes).description == f"ColocationNode{described}"
    assert lp.MultiThreadingColocation(nodes).description == f"MultiThreadingColocation{described}"


# Bad input


def test_a_colocation_refuses_what_it_cannot_run() -> None:
    node = lp.CourierNode(Service)
    for make in (lp.ColocationNode, lp.MultiThreadingColocation, lp.MultiProcessingColocation):
        refused: list[tuple[list[Any], type[Exception], str]] = [
            ([], ValueError, "at least one node"),
            ([node, node], ValueError, "can be colocated once"),
            ([lp.MultiThreadingColocation([node]), node], ValueError, "can be colocated once"),
            ([node.create_handle()], TypeError, "consists of nodes"),
            ([Service], TypeError, "consists of nodes"),
        ]
        for nodes, error, words in refused:
            with pytest.raises(error, match=words):
                make(nodes)


def test_processes_cannot_be_parts_of_a_thread() -> None:
    inner = lp.ColocationNode([lp.PyNode(_main)], "process")
    for nodes in ([inner], [lp.ColocationNode([inner], "process"), lp.PyNode(_main)]):
        with pytest.raises(ValueError, match="cannot be a part of one with threads"):
            lp.ColocationNode(nodes)


def test_wrong_options_are_refused() -> None:
    nodes, wrong = [lp.PyNode(_main)], "fibre"
    with pytest.raises(ValueError, match="'thread' or 'process', not 'fibre'"):
        lp.ColocationNode(nodes, wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="threads only"):
        lp.ColocationNode(nodes, "process", return_on_first_completed=True)
    tries: Any
    for tries, error in ((-1, ValueError), (True, TypeError), ("2", TypeError)):
        with pytest.raises(error, match="num_retries_on_failure"):
            lp.MultiProcessingColocation(nodes, num_retries_on_failure=tries)


def test_a_node_is_either_added_or_colocated_once() -> None:
    node = lp.CourierNode(Service)
    program = lp.Program("twice")
    program.add_node(node, label="single")
    with pytest.raises(ValueError, match="a node in it was already added, to the group 'single'"):
        program.add_node(lp.ColocationNode([node]), label="together")

    program = lp.Program("twice")
    colocation = lp.ColocationNode([lp.ColocationNode([node])])
    program.add_node(colocation, label="together")
    for again in (node, colocation, lp.ColocationNode([node, lp.PyNode(_main)])):
        with pytest.raises(ValueError, match="already added, to the group 'together'"):
            program.add_node(again, label="other")
    assert list(program.groups) == ["together"]


# Mistakes


@pytest.mark.parametrize("mode", MODES)
def test_the_handle_of_a_colocation_cannot_be_called(mode: Any) -> None:
    program = lp.Program("silent")
    handle = program.add_node(lp.ColocationNode([lp.CourierNode(Service)], mode), label="group")
    program.add_node(lp.PyNode(_main, handle), label="caller")
    with pytest.raises(lp.ProgramError, match=r"group\[0\], but a ColocationNode.*serves nothing"):
        lp.plan(program)


def test_mistakes_tell_equal_inner_nodes_apart() -> None:
    lost = lp.CourierNode(Service).create_handle()
    program = lp.Program("mistakes")
    nodes = [lp.CourierNode(Service, lost), lp.CourierNode(Service), lp.PyNode(_main)]
    program.add_node(lp.ColocationNode(nodes), label="group")
    with pytest.raises(lp.ProgramError) as wrong:
        lp.plan(program)
    (mistake,) = wrong.value.mistakes
    assert "CourierNode(Service) 1: argument 0 is a handle to a node that was never" in mistake


@pytest.mark.parametrize("launcher", ["test_mp", "local_mt"])
@pytest.mark.parametrize("mode", MODES)
def test_a_node_in_the_place_of_a_handle_is_a_mistake(mode: Any, launcher: str) -> None:
    service = lp.CourierNode(Service)
    program = lp.Program("misplaced")
    nodes = [lp.PyNode(_main, [service]), lp.PyNode(_main, [service]), service]
    program.add_node(lp.ColocationNode(nodes, mode), label="group")
    with pytest.raises(lp.ProgramError) as wrong:
        lp.plan(program, launcher)
    assert len(wrong.value.mistakes) == 2
    for each in wrong.value.mistakes:
        assert "argument 0[0] " in each
        assert "a node where a handle should be" in each
        assert "create_handle()" in each


# Plans


def test_colocations_and_plain_nodes_share_a_group() -> None:
    program = lp.Program("mixed")
    inner = [lp.CourierNode(Service) for _ in range(4)]
    with program.group("group"):
        program.add_node(lp.ColocationNode(inner[:2], "process"))
        program.add_node(lp.ColocationNode(inner[2:]))
        last = program.add_node(lp.CourierNode(Service))
    external = lp.ExternalNode("localhost:1234")
    program.add_node(lp.ColocationNode([external]), label="external")
    handles = [*(node.create_handle() for node in (*inner, external)), last]
    program.add_node(lp.PyNode(_main, handles), label="caller")
    plan = lp.plan(program)
    assert _names(plan) == [*(f"group[{index}]" for index in range(4)), "caller[0]"]
    assert _calls(plan)["caller[0]"] == tuple(f"group[{index}]" for index in range(4))
    assert [len(executable.addresses) for executable in plan.executables] == [1, 1, 2, 1, 0]
    both = "ColocationNode(CourierNode(Service), CourierNode(Service))"
    assert any(line.endswith(f"group[2]  {both}") for line in str(plan).splitlines())


@pytest.mark.parametrize("mode", MODES)
def test_edges_between_inner_nodes_are_those_between_executables(mode: Any) -> None:
    first, second = lp.CourierNode(Service), lp.CourierNode(Service)
    first.configure(second.create_handle())
    second.configure(first.create_handle())
    program = lp.Program("cycle")
    program.add_node(lp.ColocationNode([first, second], mode), label="group")
    threads: dict[str, tuple[str, ...]] = {"group[0]": ()}
    processes = {"group[0]": ("group[1]",), "group[1]": ("group[0]",)}
    assert _calls(lp.plan(program)) == (threads if mode == "thread" else processes)


def test_resources_of_the_group_are_those_of_each_of_its_executables() -> None:
    program = lp.Program("resources")
    nodes = [lp.PyNode(_main), lp.PyNode(_main)]
    program.add_node(lp.ColocationNode(nodes, "process"), label="group")
    plan = lp.plan(program, resources={"group": {"cpu": 0.5}})
    assert [executable.resources.cpu for executable in plan.executables] == [0.5, 0.5]


def test_nested_colocations_are_flattened_as_far_as_they_go() -> None:
    def nest(mode: Any) -> lp.Program:
        inner = lp.ColocationNode([lp.CourierNode(Service), lp.CourierNode(Service)])
        program = lp.Program("nested")
        outer = lp.ColocationNode([inner, lp.PyNode(_main)], mode)
        program.add_node(outer, label="group")
        handles = [node.create_handle() for node in inner.inner_nodes]
        program.add_node(lp.PyNode(_main, handles), label="caller")
        return program

    assert _names(lp.plan(nest("thread"))) == ["group[0]", "caller[0]"]
    plan = lp.plan(nest("process"))
    assert _names(plan) == ["group[0]", "group[1]", "caller[0]"]
    assert _calls(plan)["caller[0]"] == ("group[0]",)


# Restarts


def _retried(tries: int = 2) -> lp.Program:
    program = lp.Program("retries")
    nodes = [lp.PyNode(_main), lp.PyNode(_main)]
    program.add_node(lp.MultiProcessingColocation(nodes, tries), label="group")
    program.add_node(lp.PyNode(_main), label="other")
    return program


def _restarts(**options: Any) -> list[tuple[str, int]]:
    plan = lp.plan(_retried(), **options)
    return [
        (str(getattr(each.restart.when, "value", None)), each.restart.max_restarts)
        for each in plan.executables
    ]


def test_retries_hold_unless_the_launch_says_otherwise() -> None:
    never, default = ("never", 3), ("on_failure", 3)
    assert _restarts() == [("on_failure", 2), ("on_failure", 2), never]
    assert _restarts(restart={"other": "on_failure"})[0] == ("on_failure", 2)
    assert _restarts(restart="on_failure") == [default, default, default]
    assert _restarts(restart={"group": "on_failure"})[:2] == [default, default]
    assert _restarts(restart={"group": "never"})[:2] == [never, never]
    assert _restarts(restart="never") == [never, never, never]
    plan = lp.plan(_retried(0))
    assert {getattr(each.restart.when, "value", None) for each in plan.executables} == {"never"}


# Checkpoints


@pytest.mark.parametrize("mode", MODES)
def test_each_executable_keeps_its_checkpoints_in_a_folder_of_its_own(
    mode: Any, tmp_path: Path
) -> None:
    program = lp.Program("kept")
    with program.group("group"):
        for _ in range(2):
            nodes = [lp.CourierNode(Service), lp.CourierNode(Service)]
            program.add_node(lp.ColocationNode(nodes, mode))
    plan = lp.plan(program, checkpoints=tmp_path)
    kept = [each.checkpoints for each in plan.executables if each.checkpoints is not None]
    folders = {each.folder for each in kept}
    parts = {each.of_part(index).folder for each in kept for index in range(12)}
    deeper = {each.of_part(index).of_part(3).folder for each in kept for index in range(12)}
    assert len(folders) == len(plan.executables)
    assert len(folders | parts | deeper) == len(folders) * 25
