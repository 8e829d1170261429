"""A search as a program of its own, or as a part of one."""

import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import courier
import launchpad_lite as lp
from launchpad_lite.search._broker import Broker, BrokerOptions
from launchpad_lite.search._messages import Life, Member
from launchpad_lite.search._name_server import NameServer
from launchpad_lite.search._presence import Presence
from launchpad_lite.search._timing import Timing
from launchpad_lite.search._worker import Worker

__all__ = ["add_parts"]

MAX_RESULT_BYTES = 256 << 20


class WorkerNode:
    """A worker as a node of a program."""

    def __init__(
        self, name_server: Any, brokers: Mapping[str, Any], timing: Timing, max_result_bytes: int
    ) -> None:
        """Makes one.

        Args:
            name_server: A client of it.
            brokers: Clients by name.
            timing: Of the search.
            max_result_bytes: Larger results fail.
        """
        who = Life(lp.current_node().name, uuid.uuid4().hex)
        python = f"{sys.version_info[0]}.{sys.version_info[1]}"
        member = Member("worker", who, version=lp.__version__, python=python)
        presence = Presence(member, name_server, brokers, courier.Client, timing)
        self._worker = Worker(presence, timing, lp.stop_event(), max_result_bytes, lp.heartbeat)

    def run(self) -> None:
        """Works until the search is over, or the program stops."""
        lp.register_stop_handler(self._worker.wake)
        try:
            self._worker.run()
        finally:
            lp.unregister_stop_handler(self._worker.wake)


@dataclass(frozen=True)
class Parts:
    """Handles of what models and workers need."""

    name_server: Any
    brokers: Mapping[str, Any]


def add_parts(
    program: lp.Program, label: str, workers: int, brokers: int, options: BrokerOptions
) -> Parts:
    """Adds name server, brokers and workers to a program."""
    name_server = program.add_node(
        lp.CourierNode(NameServer, options.timing), label=f"{label}_names"
    )
    nodes = [lp.CourierNode(Broker) for _ in range(brokers)]
    handles = {f"{label}_broker[{index}]": node.create_handle() for index, node in enumerate(nodes)}
    with program.group(f"{label}_broker"):
        for (name, handle), node in zip(handles.items(), nodes, strict=True):
            peers = {other: each for other, each in handles.items() if other != name}
            node.configure(handle, name_server, peers, options)
            program.add_node(node)
    with program.group(f"{label}_worker"):
        for _ in range(workers):
            node_ = lp.PyClassNode(
                WorkerNode, name_server, handles, options.timing, MAX_RESULT_BYTES
            )
            program.add_node(node_)
    return Parts(name_server, handles)
