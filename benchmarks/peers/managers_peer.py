"""multiprocessing.managers at its default, a Unix socket."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from multiprocessing.managers import BaseManager
from typing import Any

import harness


class Manager(BaseManager):
    """Serves one object."""


_handlers = harness.Handlers()
Manager.register("handlers", lambda: _handlers)


class ManagersPeer(harness.Peer):
    """A thread for each connection, and a connection for each thread of a client."""

    def serve(self, setup: harness.Setup) -> str:
        """Starts a server."""
        server = Manager(f"{setup.scratch}/managers", setup.secret.encode()).get_server()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return str(server.address)

    def connect(self, setup: harness.Setup) -> None:
        """Makes a proxy."""
        manager = Manager(setup.address, setup.secret.encode())
        manager.connect()
        self._proxy = manager.handlers()  # type: ignore[attr-defined] # made by register()

    def method(self, name: str) -> Callable[..., Any]:
        """Returns a method of the proxy."""
        return getattr(self._proxy, name)

    @contextlib.contextmanager
    def started(self, setup: harness.Setup) -> Iterator[None]:
        """Starts managers the way they start themselves."""
        with contextlib.ExitStack() as stack:
            managers = [stack.enter_context(Manager()) for _ in range(setup.nodes)]
            proxies = [manager.handlers() for manager in managers]  # type: ignore[attr-defined] # as above
            for proxy in proxies:
                assert proxy.echo(harness.PAYLOAD) == harness.PAYLOAD
            yield


if __name__ == "__main__":
    harness.main(ManagersPeer())
