"""Addresses that exist before servers listen at them."""

import abc
import os
from typing import Any

import launchpad_lite as lp
from courier.lowlevel import bound, join_address, loopback


class Address(lp.Address):
    """A placeholder for where a service will listen.

    A launch fills it in; so does `bind`, for callers that resolve addresses without launching.
    """

    __slots__ = ("_fixed", "_owner")

    def __init__(self, name: str | None = None) -> None:
        # Programs listen there with any server.
        super().__init__("unnamed" if name is None else name, is_foreign=True)
        self._fixed: str | None = None
        self._owner: object = None

    def bind(self, builder: Any) -> None:
        """Fills it in with the result of `builder.build()`; launchers have their own tables."""
        if isinstance(builder, AbstractAddressBuilder):
            self._fixed = builder.build()
        else:
            super().bind(builder)

    def resolve(self) -> str:
        """Returns `host:port`; raises a RuntimeError if it is not filled in yet."""
        return self._fixed if self._fixed is not None else super().resolve()

    def assign(self, node: Any) -> None:
        """Makes it one of a node's addresses; a ValueError if another node has it."""
        if self._owner not in (None, node):
            raise ValueError(f"{self!r} belongs to {self._owner!r} already")
        if self._owner is None:
            self._owner = node
            node._own_addresses = (*node._own_addresses, self)

    def __getstate__(self) -> Any:
        return super().__getstate__(), self._fixed

    def __setstate__(self, state: Any) -> None:
        known, self._fixed = state
        super().__setstate__(known)
        self._owner = None


class AbstractAddressBuilder(abc.ABC):
    """Makes the address of a service."""

    @abc.abstractmethod
    def build(self) -> str:
        """Returns `host:port`."""


class SimpleLocalAddressBuilder(AbstractAddressBuilder):
    """An address on this machine, with a port that is free now."""

    def __init__(self) -> None:
        with bound(loopback(), 0) as free:
            self._address = join_address(*free.getsockname()[:2])

    def build(self) -> str:
        """Returns `host:port`; always the same."""
        return self._address


def get_port_from_address(address: str) -> int:
    """Returns the port; one with a name is the number in the environment variable `LP_PORT_<name>`."""
    port = address.rpartition(":")[2]
    if not port.isdigit():
        port = os.environ.get(f"LP_PORT_{port}", port)
    if not port.isdigit():
        raise ValueError(f"no port in {address!r}, and LP_PORT_{port} is not set")
    return int(port)
