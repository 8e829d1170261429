"""What a notebook shows of programs, handles and clients."""

import re
from typing import Any

import pytest

import launchpad_lite as lp
from launchpad_lite.launching.status_table import mimes


class Learner:
    def step(self) -> int:
        return 1


class Actor:
    def __init__(self, learner: Any) -> None:
        self._learner = learner

    def describe(self) -> str:
        return repr(self._learner)


def make_program() -> lp.Program:
    program = lp.Program("shown")
    with program.group("learner"):
        handles = [program.add_node(lp.CourierNode(Learner)) for _ in range(2)]
    program.add_node(lp.CourierNode(Actor, handles[1]), label="actor")
    return program


def test_a_client_is_named_after_its_node_and_class(launch_program: Any) -> None:
    program = launch_program(make_program())
    assert repr(program.client("learner")) == "Client(learner[0]: Learner)"
    assert program.client("actor").describe() == "Client(learner[1]: Learner)"


def test_a_running_program_tells_its_nodes_and_its_state(launch_program: Any) -> None:
    running = launch_program(make_program()).running
    assert re.fullmatch(r"RunningProgram\('shown', 3 nodes, running \d+ s\)", repr(running))
    running.stop()
    assert repr(running) == "RunningProgram('shown', 3 nodes, stopped)"


def test_without_a_kernel_a_running_program_is_text_in_ipython(launch_program: Any) -> None:
    running = launch_program(make_program()).running
    with pytest.raises(NotImplementedError):
        running._ipython_display_()


def test_names_in_the_table_of_a_notebook_are_no_markup(launch_program: Any) -> None:
    program = lp.Program("<i>&")
    program.add_node(lp.CourierNode(Learner), label="<b>")
    text, markup = mimes(launch_program(program).running).values()
    assert "<b>[0]" in text
    assert "&lt;b&gt;[0]" in markup
    assert "&lt;i&gt;&amp;" in markup


def test_handles_and_nodes_tell_what_they_stand_for() -> None:
    program, node = lp.Program("shown"), lp.CourierNode(Learner)
    handle = node.create_handle()
    assert repr(node) == "CourierNode(Learner)"
    assert repr(handle) == "CourierHandle(Learner)"
    program.add_node(node, label="learner")
    assert repr(handle) == "CourierHandle(learner[0]: Learner)"
    assert repr(program.declare("actor", 1)) == "DeclaredHandle(actor[1])"
