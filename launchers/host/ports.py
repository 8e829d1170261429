"""Ports that are held before servers listen at them."""

import collections
import contextlib
import itertools
import os
import socket
from collections.abc import Iterable

from courier.lowlevel import bound, join_address, loopback
from launchpad_lite.worker.address import Address

#: By default, no system gives these to connections, or to programs that ask for any free port: Linux
#: begins at 32768, others at 49152. So no other program gets one by chance while its node restarts.
_LENDABLE = range(20_000, 30_000)


class PortTakenError(OSError):
    """A port that was asked for is not free."""


class PortReservations:
    """Bound sockets that never listen: they hold the ports, and our servers listen there, too.

    SO_REUSEPORT lets only processes of the same user share a port, so a worker that restarts finds
    it held. A foreign program shares none, so its port is held only until its node starts.
    """

    def __init__(self, host: str | None = None) -> None:
        """Holds nothing yet, at this IP address: `::` for all interfaces, None for loopback."""
        self._host = loopback() if host is None else host
        #: By the node whose foreign program will listen there; None: our servers.
        self._held = collections.defaultdict[str | None, list[socket.socket]](list)

    def reserve(self, port: int | None, *, lent_to: str | None = None) -> int:
        """Holds a port, any if None, for our servers or a foreign program of the node `lent_to`."""
        if port is not None:
            # Without SO_REUSEPORT, so that it fails for any holder of the port.
            self._bound(port, backlog=1).close()
        if lent_to is None:
            held = self._bound(port or 0, socket.SO_REUSEPORT)
        else:
            held = self._lendable_port() if port is None else self._bound(port)
        self._held[lent_to].append(held)
        # With SO_REUSEADDR, another user could listen there while none of our servers does.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        return int(held.getsockname()[1])

    def _bound(self, port: int, *options: int, backlog: int | None = None) -> socket.socket:
        try:
            # With SO_REUSEADDR, because connections of an earlier server may still be closing.
            return bound(self._host, port, socket.SO_REUSEADDR, *options, backlog=backlog)
        except OSError as error:
            where = join_address(self._host, port)
            raise PortTakenError(f"the port {where} is taken: {error}") from error

    def _lendable_port(self) -> socket.socket:
        first = int.from_bytes(os.urandom(4), "big")  # `random` belongs to the user's experiment
        for number in range(first, first + len(_LENDABLE)):
            with contextlib.suppress(OSError):
                return bound(self._host, _LENDABLE[number % len(_LENDABLE)])
        raise PortTakenError(f"no port from {_LENDABLE[0]} to {_LENDABLE[-1]} is free")

    def lend(self, node: str) -> None:
        """Releases the ports of the foreign programs of a node, which starts now."""
        for held in self._held.pop(node, ()):
            held.close()

    def reserve_all(self, wanted: Iterable[Address]) -> dict[str, int]:
        """Holds a port for each address, or none at all; returns them by address key."""
        held = PortReservations(self._host)  # separate from the ports of nodes that run
        reserved: dict[str, int] = {}
        owners: dict[int, str] = {}
        try:
            for address in wanted:
                if address.port in owners:
                    both = f"{owners[address.port]} and {address.node}"
                    raise PortTakenError(f"{both} ask for the same port, {address.port}")
                lent_to = address.node if address.is_foreign else None
                try:
                    port = held.reserve(address.port, lent_to=lent_to)
                except PortTakenError as error:
                    advice = "choose another port, or none: then a free one is found"
                    raise PortTakenError(f"{address.node}: {error}; {advice}") from error
                reserved[address.key], owners[port] = port, address.node
        except OSError:
            held.close()
            raise
        for node, sockets in held._held.items():
            self._held[node] += sockets
        return reserved

    def close(self) -> None:
        for held in itertools.chain(*self._held.values()):
            held.close()
        self._held.clear()
