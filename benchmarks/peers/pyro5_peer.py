"""Pyro5 with the marshal serializer, the fastest of its own for bytes."""

import threading
from collections.abc import Callable
from typing import Any

import harness
import Pyro5.api

Pyro5.config.SERIALIZER = "marshal"
# Inherited methods are not exposed with those of the class.
for _handlers in (harness.Handlers, harness.BytesHandlers):
    Pyro5.api.expose(_handlers)


class Pyro5Peer(harness.BytesPeer):
    """A daemon at a Unix socket."""

    def serve(self, setup: harness.Setup) -> str:
        """Starts a daemon."""
        daemon = Pyro5.api.Daemon(unixsocket=f"{setup.scratch}/pyro5")
        uri = daemon.register(harness.BytesHandlers(), "handlers")
        threading.Thread(target=daemon.requestLoop, daemon=True).start()
        return str(uri)

    def connect(self, setup: harness.Setup) -> None:
        """Makes a proxy."""
        self._proxy = Pyro5.api.Proxy(setup.address)

    def bytes_method(self, name: str) -> Callable[..., Any]:
        """Returns a method of the proxy."""
        return getattr(self._proxy, name)


if __name__ == "__main__":
    harness.main(Pyro5Peer())
