"""Several nodes that do the same, as one."""

from collections.abc import Iterable
from typing import Generic, TypeVar

import courier
from courier import PoolChoice
from launchpad_lite.graph.deferred import Deferred
from launchpad_lite.nodes.base import Handle
from launchpad_lite.nodes.courier import describe_target

T = TypeVar("T")


class Pool(Deferred[courier.Pool[T]], Generic[T]):
    """The handles of several nodes as one: in a running node it becomes a `courier.Pool`.

    Example:
        with program.group("server"):
            servers = [program.add_node(lp.CourierNode(Server)) for _ in range(3)]
        program.add_node(lp.CourierNode(Worker, lp.Pool(servers)), label="worker")

        class Worker:
            def __init__(self, servers):
                servers.get(key)                    # of one, in turns
                servers.by_key(key).get(key)        # always of the same one
                servers.futures.all.set(key, 1)     # of all: a list of futures
    """

    def __init__(self, handles: Iterable[Handle[T]], *, choose: PoolChoice = "round_robin") -> None:
        """Describes the pool.

        Args:
            handles: Of nodes that can be called.
            choose: Which one is called: "round_robin" takes turns, "least_loaded" prefers the one
                with the fewest calls of this pool in flight.

        Raises:
            TypeError: Something is no handle of a node that can be called.
            ValueError: There is no handle, or `choose` is unknown.
        """
        handles = list(handles)
        for handle in handles:
            describe_target(handle, "lp.Pool")
        if not handles:
            raise ValueError("lp.Pool needs at least one handle")
        if choose not in ("round_robin", "least_loaded"):
            raise ValueError(f"choose is 'round_robin' or 'least_loaded', not {choose!r}")
        super().__init__(courier.Pool, handles, choose=choose)
        self._handles = handles
        self._choose: PoolChoice = choose

    def dereference(self) -> courier.Pool[T]:
        """Returns the pool, in a running node or in the launching process."""
        clients = [handle.dereference() for handle in self._handles]
        return courier.Pool(clients, choose=self._choose)
