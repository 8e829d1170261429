"""A node outside of any program, in the thread that calls it: for tests of single nodes."""

import contextvars
from collections.abc import Sequence

from courier import Secret
from launchpad_lite._address import Address, AddressTable
from launchpad_lite._freeze import freeze
from launchpad_lite._runtime import NodeRuntime, NodeSetup, WorkerLink
from launchpad_lite.nodes.base import Work


class _Alone(WorkerLink):
    """A `WorkerLink` to nobody: the node ends when its work is done, or when it asks for the stop."""

    def __init__(self, name: str, table: AddressTable) -> None:
        self.runtime = NodeRuntime(NodeSetup("alone", name, 0), table, self)

    def ask_stop(self) -> None:
        self.runtime.request_stop()

    def leaving(self) -> None:
        self.runtime.let_go()

    def run(self, work: Work) -> None:
        with self.runtime.active():
            freeze(work, share=True).thaw()(self.runtime)


def run_alone(name: str, work: Work, addresses: Sequence[Address]) -> None:
    """Does what a node does, in this thread; returns when it has ended.

    Args:
        name: What messages call the node.
        work: What it does. Handles in it become clients.
        addresses: Where it listens; see `Address.bind`.
    """
    table = addresses[0].table() if addresses else AddressTable({}, Secret.generate())
    contextvars.copy_context().run(_Alone(name, table).run, work)
