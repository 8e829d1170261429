"""What a notebook shows of programs, handles and clients."""

from typing import Any

import launchpad_lite as lp


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
