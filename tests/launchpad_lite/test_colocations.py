"""Colocations before anything runs: descriptions, bad input, plans, names, edges."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import launchpad_lite as lp


class Service:
    def __init__(self, *args: Any) -> None: ...


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


def test_make_program_finds_a_label_for_a_colocation() -> None:
    program = lp.make_program(lp.ColocationNode([lp.CourierNode(Service)]))
    assert list(program.groups) == ["colocation_node"]


def test_the_addresses_are_those_of_the_inner_nodes() -> None:
    first, second = lp.CourierNode(Service), lp.CourierNode(Service)
    colocation = lp.ColocationNode([first, lp.PyNode(_main), second])
    assert list(colocation.addresses) == [first.courier_address, second.courier_address]
    assert list(colocation.inner_nodes) == list(colocation.with_inner())[1:]


def test_any_iterable_of_nodes_will_do() -> None:
    colocation = lp.ColocationNode(lp.PyNode(_main) for _ in range(3))
    assert len(colocation.inner_nodes) == 3


# Bad input


@pytest.mark.parametrize(
    "make", [lp.ColocationNode, lp.MultiThreadingColocation, lp.MultiProcessingColocation]
)
def test_a_colocation_refuses_what_it_cannot_run(make: Callable[..., Any]) -> None:
    node = lp.CourierNode(Service)
    with pytest.raises(ValueError, match="at least one node"):
        make([])
    with pytest.raises(ValueError, match="can be colocated once"):
        make([node, node])
    with pytest.raises(TypeError, match="consists of nodes"):
        make([node.create_handle()])
    with pytest.raises(TypeError, match="consists of nodes"):
        make([Service])


def test_a_node_cannot_be_in_a_colocation_and_in_one_inside_of_it() -> None:
    node = lp.CourierNode(Service)
    with pytest.raises(ValueError, match="can be colocated once"):
        lp.ColocationNode([lp.ColocationNode([node]), node])


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="'thread' or 'process', not 'fibre'"):
        lp.ColocationNode([lp.PyNode(_main)], "fibre")  # type: ignore[arg-type]


def test_the_first_end_ends_threads_only() -> None:
    with pytest.raises(ValueError, match="threads only"):
        lp.ColocationNode([lp.PyNode(_main)], "process", return_on_first_completed=True)


@pytest.mark.parametrize(
    ("tries", "error"), [(-1, ValueError), (True, TypeError), ("2", TypeError)]
)
def test_a_number_of_retries_is_a_whole_number(tries: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="num_retries_on_failure"):
        lp.MultiProcessingColocation([lp.PyNode(_main)], num_retries_on_failure=tries)


def test_processes_cannot_be_parts_of_a_thread() -> None:
    inner = lp.ColocationNode([lp.PyNode(_main)], "process")
    with pytest.raises(ValueError, match="cannot be a part of one with threads"):
        lp.ColocationNode([inner])
    with pytest.raises(ValueError, match="cannot be a part of one with threads"):
        lp.ColocationNode([lp.ColocationNode([inner], "process"), lp.PyNode(_main)])


def test_a_node_is_either_added_or_colocated_once() -> None:
    node = lp.CourierNode(Service)
    program = lp.Program("twice")
    program.add_node(node, label="single")
    with pytest.raises(ValueError, match="a node in it was already added, to the group 'single'"):
        program.add_node(lp.ColocationNode([node]), label="together")

    program = lp.Program("twice")
    colocation = lp.ColocationNode([lp.ColocationNode([node])])
    program.add_node(colocation, label="together")
    with pytest.raises(ValueError, match="already added, to the group 'together'"):
        program.add_node(node, label="single")
    with pytest.raises(ValueError, match="already added, to the group 'together'"):
        program.add_node(colocation, label="together")
    with pytest.raises(ValueError, match="already added, to the group 'together'"):
        program.add_node(lp.ColocationNode([node, lp.PyNode(_main)]), label="other")
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


@pytest.mark.parametrize("mode", MODES)
def test_a_node_in_the_place_of_a_handle_is_a_mistake(mode: Any) -> None:
    service = lp.CourierNode(Service)
    program = lp.Program("misplaced")
    nodes = [lp.PyNode(_main, [service]), lp.PyNode(_main, [service]), service]
    program.add_node(lp.ColocationNode(nodes, mode), label="group")
    with pytest.raises(lp.ProgramError) as wrong:
        lp.plan(program, "test_mp")
    assert len(wrong.value.mistakes) == 2
    assert all("a node where a handle should be" in each for each in wrong.value.mistakes)


# Plans


def test_threads_are_one_executable_and_processes_are_several() -> None:
    for mode, expected in (("thread", ["group[0]"]), ("process", ["group[0]", "group[1]"])):
        program = lp.Program("plan")
        nodes = [lp.CourierNode(Service), lp.PyNode(_main)]
        program.add_node(lp.ColocationNode(nodes, mode), label="group")  # type: ignore[arg-type]
        assert _names(lp.plan(program)) == expected


def test_colocations_and_plain_nodes_share_a_group() -> None:
    program = lp.Program("mixed")
    inner = [lp.CourierNode(Service) for _ in range(4)]
    with program.group("group"):
        program.add_node(lp.ColocationNode(inner[:2], "process"))
        program.add_node(lp.ColocationNode(inner[2:]))
        last = program.add_node(lp.CourierNode(Service))
    handles = [*(node.create_handle() for node in inner), last]
    program.add_node(lp.PyNode(_main, handles), label="caller")
    plan = lp.plan(program)
    assert _names(plan) == [*(f"group[{index}]" for index in range(4)), "caller[0]"]
    assert _calls(plan)["caller[0]"] == tuple(f"group[{index}]" for index in range(4))
    assert [len(executable.addresses) for executable in plan.executables] == [1, 1, 2, 1, 0]


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


def test_the_tree_shows_what_runs_together() -> None:
    replay = lp.CourierNode(Service)
    learner = lp.CourierNode(Service, replay.create_handle())
    program = lp.Program("tree")
    program.add_node(lp.ColocationNode([learner, replay]), label="learner")
    program.add_node(lp.PyNode(_main, replay.create_handle()), label="actor")
    lines = str(lp.plan(program, resources={"learner": {"cpu": 2}})).splitlines()
    assert lines[1].startswith("├── learner  1 node, each ")
    assert lines[2].endswith(
        "learner[0]  ColocationNode(CourierNode(Service), CourierNode(Service))"
    )
    assert lines[4].endswith("actor[0]  PyNode(_main)  calls learner[0]")


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


def test_a_colocation_of_what_runs_already_starts_nothing() -> None:
    program = lp.Program("external")
    external = lp.ExternalNode("localhost:1234")
    program.add_node(lp.ColocationNode([external]), label="external")
    program.add_node(lp.PyNode(_main, external.create_handle()), label="caller")
    assert _calls(lp.plan(program)) == {"caller[0]": ()}


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


def test_without_retries_nothing_is_restarted() -> None:
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
