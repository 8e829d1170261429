"""courier, as users use it; nodes are started as a program of launchpad_lite."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import harness

import courier


class CourierPeer(harness.Peer):
    """Serves with a secret, as programs do."""

    can_share = hasattr(courier, "Shared")

    def serve(self, setup: harness.Setup) -> str:
        """Starts a server."""
        share = getattr(courier, "Shared", None)
        self._server = courier.Server(
            harness.Handlers(share),
            host=setup.host,
            thread_pool_size=harness.THREADS,
            **protection(setup),
        )
        self._server.start()
        return self._server.address

    def connect(self, setup: harness.Setup) -> None:
        """Makes a client."""
        self._client = courier.Client(setup.address, **protection(setup))

    def method(self, name: str) -> Callable[..., Any]:
        """Returns a method of the client."""
        return getattr(self._client, name)

    def later(self, name: str) -> Callable[..., Any]:
        """Returns a method of `client.futures`."""
        return getattr(self._client.futures, name)

    @contextlib.contextmanager
    def started(self, setup: harness.Setup) -> Iterator[None]:
        """Launches a program of so many nodes and calls each."""
        import launchpad_lite as lp

        program = lp.Program("start")
        with program.group("echo"):
            handles = [
                program.add_node(lp.CourierNode(harness.Handlers)) for _ in range(setup.nodes)
            ]
        with lp.launch(program, "test_mp"):
            clients: list[Any] = [handle.dereference() for handle in handles]
            for future in [client.futures.echo(harness.PAYLOAD) for client in clients]:
                assert future.result() == harness.PAYLOAD
            yield


def protection(setup: harness.Setup) -> dict[str, Any]:
    """Returns the options of servers and clients that prove themselves."""
    protection: dict[str, Any] = {"secret": courier.Secret(bytes.fromhex(setup.secret))}
    if setup.tls:
        if not hasattr(courier, "TlsCredentials"):
            raise harness.UnsupportedError("no TLS yet")
        protection["tls"] = courier.TlsCredentials(
            certificate=setup.pem("certificate"),
            key=setup.pem("key"),
            authority=setup.pem("authority"),
        )
    return protection


if __name__ == "__main__":
    harness.main(CourierPeer())
