"""Ports that are held before anybody listens at them."""

import contextlib
import os
import socket
from collections.abc import Iterable

from launchpad_lite._address import Address

LOOPBACK = "127.0.0.1"

#: By default, no system gives these to connections, or to programs that ask for any free port: Linux
#: begins at 32768, others at 49152. So nobody gets one by chance while the node that it is lent to restarts.
_LENDABLE = range(20_000, 30_000)


class PortTakenError(OSError):
    """A port that was asked for is not free."""


class PortReservations:
    """Bound sockets that never listen: the port is ours, servers of ours listen beside.

    SO_REUSEPORT lets only processes of the same user share the port. A worker that is
    restarted finds its port still held.

    A foreign program does not share: its port is held until its node starts.
    """

    def __init__(self, host: str = LOOPBACK) -> None:
        """Holds nothing yet.

        Args:
            host: Number of the interface whose ports are held; 0.0.0.0 for all.
        """
        self._host = host
        #: With the node that a port is lent to.
        self._sockets: dict[socket.socket, str | None] = {}

    def reserve(self, port: int | None, *, lent_to: str | None = None) -> int:
        """Holds a port and returns it.

        Args:
            port: Which; None takes a free one.
            lent_to: The node in which a foreign program listens there; None: one of ours does.

        Raises:
            PortTakenError: Another process listens there, or it is reserved already.
        """
        if port is not None:
            self._check_free(port)
        held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._sockets[held] = lent_to
        if lent_to is not None and port is None:
            return self._bind_lendable(held)
        option = socket.SO_REUSEPORT if lent_to is None else socket.SO_REUSEADDR
        held.setsockopt(socket.SOL_SOCKET, option, 1)
        held.bind((self._host, port or 0))
        return int(held.getsockname()[1])

    def _bind_lendable(self, held: socket.socket) -> int:
        first = int.from_bytes(os.urandom(4), "big")  # `random` belongs to the user's experiment
        for number in range(first, first + len(_LENDABLE)):
            port = _LENDABLE[number % len(_LENDABLE)]
            with contextlib.suppress(OSError):
                held.bind((self._host, port))
                return port
        raise PortTakenError(f"no port from {_LENDABLE[0]} to {_LENDABLE[-1]} is free")

    def lend(self, node: str) -> None:
        """Lets go of the ports at which foreign programs listen in a node, which starts now."""
        for held in [held for held, lent_to in self._sockets.items() if lent_to == node]:
            held.close()
            del self._sockets[held]

    def reserve_all(self, wanted: Iterable[Address]) -> dict[str, int]:
        """Holds a port for each address; returns them by address key.

        Raises:
            PortTakenError: One that was asked for is not free; none is held then.
        """
        reserved: dict[str, int] = {}
        owners: dict[int, str] = {}
        try:
            for address in wanted:
                if address.port in owners:
                    both = f"{owners[address.port]} and {address.node}"
                    raise PortTakenError(f"{both} ask for the same port, {address.port}")
                lent_to = address.node if address.is_foreign else None
                try:
                    port = self.reserve(address.port, lent_to=lent_to)
                except PortTakenError as error:
                    advice = "choose another port, or none: then a free one is found"
                    raise PortTakenError(f"{address.node}: {error}; {advice}") from error
                reserved[address.key], owners[port] = port, address.node
        except OSError:
            self.close()
            raise
        return reserved

    def _check_free(self, port: int) -> None:
        # Without SO_REUSEPORT, so that it fails for any holder of the port.
        with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
            # Connections of an earlier server that are still closing do not matter.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self._host, port))
                probe.listen()
            except OSError as error:
                raise PortTakenError(f"the port {self._host}:{port} is taken: {error}") from error

    def close(self) -> None:
        """Gives all ports back."""
        for held in self._sockets:
            held.close()
        self._sockets.clear()


def endpoint(port: int, host: str = LOOPBACK) -> str:
    """Returns what is published for a port."""
    return f"{host}:{port}"
