"""Plain grpcio: unary calls of bytes, no serialisation."""

import concurrent.futures
from collections.abc import Callable
from typing import Any

import grpc
import harness

_SERVICE = "benchmark"
_UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


class _Service(grpc.GenericRpcHandler):
    def __init__(self) -> None:
        self._handlers = harness.BytesHandlers()

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        name = call.method.rpartition("/")[2]
        return grpc.unary_unary_rpc_method_handler(
            lambda request, _context: harness.handle_bytes(self._handlers, name, request)
        )


class GrpcioPeer(harness.BytesPeer):
    """Over a Unix socket; with TLS at a port."""

    def serve(self, setup: harness.Setup) -> str:
        """Starts a server."""
        pool = concurrent.futures.ThreadPoolExecutor(harness.THREADS)
        self._server = grpc.server(pool, handlers=[_Service()], options=_UNLIMITED)
        if setup.tls:
            credentials = grpc.ssl_server_credentials(
                [(setup.pem("key"), setup.pem("certificate"))],
                setup.pem("authority"),
                require_client_auth=True,
            )
            port = self._server.add_secure_port(f"{setup.host}:0", credentials)
            address = f"{setup.host}:{port}"
        else:
            address = f"unix:{setup.scratch}/grpcio"
            self._server.add_insecure_port(address)
        self._server.start()
        return address

    def connect(self, setup: harness.Setup) -> None:
        """Makes a channel."""
        if setup.tls:
            credentials = grpc.ssl_channel_credentials(
                setup.pem("authority"), setup.pem("key"), setup.pem("certificate")
            )
            self._channel = grpc.secure_channel(setup.address, credentials, _UNLIMITED)
        else:
            self._channel = grpc.insecure_channel(setup.address, _UNLIMITED)

    def bytes_method(self, name: str) -> Callable[..., Any]:
        """Returns a callable of the channel."""
        serializer = None if name.startswith("echo") else harness.encode
        return self._channel.unary_unary(f"/{_SERVICE}/{name}", request_serializer=serializer)

    def later(self, name: str) -> Callable[..., Any]:
        """Returns the callable's futures."""
        return self._channel.unary_unary(f"/{_SERVICE}/{name}").future


if __name__ == "__main__":
    harness.main(GrpcioPeer())
