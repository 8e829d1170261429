"""The original Courier, in C++, from dm-launchpad."""

from collections.abc import Callable
from typing import Any

import harness

import courier

_NAMES = ("echo", "echo_array", "prepare", "snapshot", "burn")


class CppCourierPeer(harness.Peer):
    """Has no secret and no other transport than TCP."""

    def serve(self, _setup: harness.Setup) -> str:
        """Starts a server."""
        handlers = harness.Handlers()
        self._server = courier.Server(thread_pool_size=harness.THREADS)
        for name in _NAMES:
            self._server.Bind(name, getattr(handlers, name))
        self._server.Start()
        return str(self._server.address)

    def connect(self, setup: harness.Setup) -> None:
        """Makes a client."""
        self._client = courier.Client(setup.address)

    def method(self, name: str) -> Callable[..., Any]:
        """Returns a method of the client."""
        return getattr(self._client, name)

    def later(self, name: str) -> Callable[..., Any]:
        """Returns a method of `client.futures`."""
        return getattr(self._client.futures, name)


if __name__ == "__main__":
    harness.main(CppCourierPeer())
