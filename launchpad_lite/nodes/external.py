"""Services that run already, outside of the program."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import courier
from launchpad_lite.nodes.base import Handle, Node, PlanContext, Task
from launchpad_lite.worker.runtime import keep_client

T = TypeVar("T")


class ExternalHandle(Handle[T]):
    """A handle to a service outside of the program; dereferences to a client of it."""

    def __init__(self, node: "ExternalNode[T]", make_client: Callable[[str], T]) -> None:
        super().__init__(node)
        self.address = node.address
        self._make_client = make_client

    def with_client(self, make_client: Callable[[str], Any]) -> "ExternalHandle[Any]":
        """Returns a handle to the same service that dereferences to something else."""
        twin: ExternalHandle[Any] = copy.copy(self)
        twin._make_client = make_client
        return twin

    def dereference(self) -> T:
        """Returns a client; anywhere, also without a running program."""
        client = self._make_client(self.address)
        if isinstance(client, courier.Client):
            keep_client(client)
        return client


class ExternalNode(Node[T]):
    """A service that runs already: nothing is started for it, and nothing ended.

    Example:
        database = program.add_node(
            lp.ExternalNode("db.example.org:6379", client=connect_to_redis), label="database"
        )
    """

    def __init__(self, address: str, *, client: Callable[[str], T] | None = None) -> None:
        """Describes the service.

        Args:
            address: `host:port`.
            client: Makes the object in place of the handle in other nodes; called there with the
                address. None makes a `courier.Client` without a secret, for a server of the same
                user on the machine of the node.

        Raises:
            TypeError: `client` cannot be called.
            ValueError: `address` is not host:port.
        """
        super().__init__()
        courier.Client(address)  # raises if it is malformed
        if client is not None and not callable(client):
            raise TypeError(f"client is a function that takes the address, not {client!r}")
        self.address = self._named_after = address
        self._make_client = client or cast("Callable[[str], Any]", courier.Client)

    def create_handle(self) -> ExternalHandle[T]:
        """Returns a new handle to the service."""
        return ExternalHandle(self, self._make_client)

    def to_executables(self, context: PlanContext) -> Sequence[Task]:  # noqa: ARG002
        """Returns none: it runs already."""
        return []
