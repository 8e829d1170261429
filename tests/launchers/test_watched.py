"""What programs share that a thread supervises or watches."""

from collections.abc import Sequence

import launchpad_lite as lp
from launchers.supervision.watched import WatchedProgram
from launchpad_lite.launching import LaunchOptions, NodeStatus, ProgramResult


class Broken(WatchedProgram):
    """Can neither be followed nor explained."""

    def _follow(self) -> ProgramResult:
        raise OSError("the cluster is away")

    def _broken(self, error: BaseException) -> ProgramResult:
        raise RuntimeError("and so is the log")

    def status(self) -> Sequence[NodeStatus]:
        return []

    def request_stop(self, reason: str, signum: int | None = None) -> None:
        pass

    def kill(self) -> None:
        pass


def test_a_program_ends_even_if_what_explains_its_end_raises() -> None:
    program = lp.Program("broken")
    program.add_node(lp.PyNode(print), label="node")
    watched = Broken(lp.plan(program, "test_mt"), LaunchOptions(1.0, quiet=True), None)
    watched.watch()
    assert watched.join(10)
    assert watched.result is not None
    assert watched.result.outcome is lp.Outcome.FAILED
    assert "the cluster is away" in watched.result.failures[0].summary
