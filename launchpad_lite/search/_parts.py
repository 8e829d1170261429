"""The nodes that all searches have: a name server, brokers and workers.

A process that only describes them does not load their dependencies.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import launchpad_lite as lp
from launchpad_lite.search._timing import Timing
from launchpad_lite.search.name_server import NameServer

if TYPE_CHECKING:
    from launchpad_lite.search._broker import Broker
    from launchpad_lite.search.executor import Executor  # noqa: F401 - named in a string below

#: Nodes that are lost come back.
RESTART = lp.RestartPolicy("on_failure", max_restarts=1000, max_backoff_s=1.0)
#: Seconds that brokers of an earlier call have to end.
RELEASE_S = 5.0


class BrokerOptions(NamedTuple):
    timing: Timing
    #: Where it keeps its tasks; None: in memory only.
    folder: str | None = None
    #: Where it keeps them instead, as for `add_to`.
    database: str | None = None
    #: As for `Queue`.
    max_losses: int = 5


def make_broker(
    me: Any, name_server: Any, peers: Mapping[str, Any], options: BrokerOptions
) -> "Broker":
    from launchpad_lite.search._broker import Broker

    return Broker(me, name_server, peers, options)


def work(name_server: Any, brokers: Mapping[str, Any], timing: Timing) -> None:
    from launchpad_lite.search._presence import Presence
    from launchpad_lite.search.worker import Worker

    me = lp.current_node().name
    presence = Presence("worker", me, name_server, brokers, timing)
    worker = Worker(presence, lp.stop_event(), lp.heartbeat)
    lp.register_stop_handler(worker.wake)
    try:
        worker.run()
    finally:
        lp.unregister_stop_handler(worker.wake)


class SearchHandles(NamedTuple):
    """The handles that models need; of brokers by name."""

    name_server: lp.Handle[NameServer]
    brokers: "Mapping[str, lp.Handle[Broker]]"


def add_parts(
    program: lp.Program, *, workers: int, brokers: int, label: str, options: BrokerOptions
) -> SearchHandles:
    least = 0 if options.folder else 1  # others join by a file there
    if workers < least or brokers < 1:
        raise ValueError(
            f"a search has at least 1 broker and {least} workers, not {brokers} and {workers}; with folder=, "
            "all workers may come from outside"
        )
    groups = {part: f"{label}_{part}" for part in ("name_server", "broker", "worker")}
    if taken := [group for group in groups.values() if group in program.groups]:
        raise ValueError(f"the program has a group {taken[0]!r}; give another label=")
    names = lp.CourierNode(NameServer)
    name_server = names.create_handle()
    names.configure(name_server, options.timing, options.folder)
    nodes = [lp.CourierNode(make_broker) for _ in range(brokers)]
    handles = {
        f"{groups['broker']}[{index}]": node.create_handle() for index, node in enumerate(nodes)
    }
    with program.group(groups["broker"]):  # these start first, because others wait for them
        for name, node in zip(handles, nodes, strict=True):
            peers = {other: handle for other, handle in handles.items() if other != name}
            node.configure(handles[name], name_server, peers, options)
            program.add_node(node)
    program.add_node(names, label=groups["name_server"])
    with program.group(groups["worker"]):
        for _ in range(workers):
            program.add_node(lp.PyNode(work, name_server, handles, options.timing))
    return SearchHandles(name_server, handles)


class ExecutorHandle(lp.Deferred["Executor"]):
    """A handle of workers: becomes an `Executor` in one other node of the program.

    Example:
        executor = search.Executor.add_to(program, workers=4)
        program.add_node(lp.PyClassNode(Study, executor), label="study")
    """

    def __init__(self, parts: SearchHandles, timing: Timing) -> None:
        from launchpad_lite.search import executor

        super().__init__(executor.Executor.of, parts.name_server, dict(parts.brokers), timing)
