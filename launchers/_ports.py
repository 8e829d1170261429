"""Ports that are held before anybody listens at them."""

import contextlib
import socket
from collections.abc import Iterable

from launchpad_lite._address import Address

LOOPBACK = "127.0.0.1"


class PortTakenError(OSError):
    """A port that was asked for is not free."""


class PortReservations:
    """Bound sockets that never listen: the port is ours, servers of ours listen beside.

    SO_REUSEPORT lets only processes of the same user share the port. A worker that is
    restarted finds its port still held.
    """

    def __init__(self, host: str = LOOPBACK) -> None:
        """Holds nothing yet.

        Args:
            host: Number of the interface whose ports are held; 0.0.0.0 for all.
        """
        self._host = host
        self._sockets: list[socket.socket] = []

    def reserve(self, port: int | None, *, is_foreign: bool = False) -> int:
        """Holds a port and returns it.

        Args:
            port: Which; None takes a free one.
            is_foreign: The program that listens there does not set SO_REUSEPORT. SO_REUSEADDR will do, which
                nearly all servers set, because we do not listen; then others could take the port,
                too.

        Raises:
            PortTakenError: Another process listens there, or it is reserved already.
        """
        if port is not None:
            self._check_free(port)
        held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._sockets.append(held)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if is_foreign:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((self._host, port or 0))
        return int(held.getsockname()[1])

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
                try:
                    port = self.reserve(address.port, is_foreign=address.is_foreign)
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

    def filenos(self) -> list[int]:
        """Returns the descriptors, for a forked child to close."""
        return [held.fileno() for held in self._sockets]


def endpoint(port: int, host: str = LOOPBACK) -> str:
    """Returns what is published for a port."""
    return f"{host}:{port}"
