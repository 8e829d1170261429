"""Runs a node outside of any program, in the calling thread: for tests of single nodes."""

import contextvars
from collections.abc import Sequence

from courier import Secret
from launchpad_lite.graph.freeze import freeze
from launchpad_lite.life.events import Leaving, LetGo, RequestStop, Said, StopAsked
from launchpad_lite.life.timing import DEFAULT
from launchpad_lite.nodes.base import Work
from launchpad_lite.worker.address import Address, AddressTable
from launchpad_lite.worker.runtime import NodeRuntime, NodeSetup


def run_alone(name: str, work: Work, addresses: Sequence[Address]) -> None:
    """Runs a node in this thread; returns when it has ended. Its addresses are bound already."""
    table = addresses[0].table() if addresses else AddressTable({}, Secret.generate())

    def supervise(said: Said) -> None:
        """Ends the node when its work is done, or when it asks for the stop."""
        if isinstance(said, Leaving):
            runtime.obey(LetGo(name))
        elif isinstance(said, StopAsked):
            runtime.obey(RequestStop(name))

    def run() -> None:
        with runtime.active():
            freeze(work, share=True).thaw()(runtime)
        runtime.join_stop_handlers(DEFAULT.handlers_s)

    runtime = NodeRuntime(NodeSetup("alone", name, 0), table, supervise)
    contextvars.copy_context().run(run)
