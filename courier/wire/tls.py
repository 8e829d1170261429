"""Certificates for connections between machines: they prove the peer and encrypt the data."""

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from courier.errors import AuthenticationError

if TYPE_CHECKING:
    import ssl  # imported at run time only for TLS

#: Seconds until a connection to a silent machine is closed.
KEEPALIVE_S = 20.0


class TlsCredentials:
    """A certificate, its key, and the authority of the other side's certificate.

    Both sides prove themselves (mutual TLS). The authority should belong to one program; a
    certificate of it is proof enough, with any names. (Where only gRPC passes, gRPC wants the
    server's certificate to have the name or number that the client calls.)

    Like a secret, credentials are never pickled: their pickle only names the authority, and loading
    works in processes that hold credentials of the same one. Thread-safe.

    Example:
        credentials = courier.TlsCredentials(
            certificate=Path("node.crt").read_bytes(),
            key=Path("node.key").read_bytes(),
            authority=Path("ca.crt").read_bytes(),
        )
        server = courier.Server(Counter(), host="0.0.0.0", secret=secret, tls=credentials)
    """

    __slots__ = ("__weakref__", "_contexts", "authority", "certificate", "key")

    def __init__(self, *, certificate: bytes, key: bytes, authority: bytes) -> None:
        """Wraps certificates and a key.

        Args:
            certificate: PEM; followed by intermediate ones, if there are any.
            key: PEM, not encrypted.
            authority: PEM of the certificates that sign the other side's.

        Raises:
            ValueError: They cannot be read, or do not belong together.
        """
        self.certificate = certificate
        self.key = key
        self.authority = authority
        self._contexts: dict[bool, ssl.SSLContext] = {}
        try:
            self.client_context()
        except (OSError, ValueError) as error:  # the error of `ssl` is an OSError
            raise ValueError(f"these certificates cannot be used: {error}") from error
        _held[id(self)] = self

    def client_context(self) -> "ssl.SSLContext":
        """Returns the context of a client."""
        return self._context(server=False)

    def server_context(self) -> "ssl.SSLContext":
        """Returns the context of a server."""
        return self._context(server=True)

    def _context(self, *, server: bool) -> "ssl.SSLContext":
        if server in self._contexts:
            return self._contexts[server]
        import ssl

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # The authority is the program's own: a peer with a certificate of it belongs to it,
        # at whatever address.
        context.check_hostname = False
        # A peer that leaves says so by the end of TCP; else OpenSSL would answer it with an alert.
        context.options |= getattr(ssl, "OP_IGNORE_UNEXPECTED_EOF", 0)
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self.authority.decode())
        with _as_file(self.certificate + b"\n" + self.key) as path:
            context.load_cert_chain(path, password=lambda: b"")
        if server:
            # Each connection is meant to last, and tickets would be sent while no thread reads.
            context.num_tickets = 0
        self._contexts[server] = context  # two threads may both make one
        return context

    def __repr__(self) -> str:
        return "TlsCredentials(...)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TlsCredentials) and (
            (self.certificate, self.key, self.authority)
            == (other.certificate, other.key, other.authority)
        )

    def __hash__(self) -> int:
        return hash(self.authority)

    def __reduce__(self) -> tuple[Callable[[bytes], "TlsCredentials"], tuple[Any, ...]]:
        return _find_held, (self.authority,)


#: Weak: credentials are known for as long as a client, a server or a program holds them.
_held: "weakref.WeakValueDictionary[int, TlsCredentials]" = weakref.WeakValueDictionary()


def _find_held(authority: bytes) -> TlsCredentials:
    for reference in _held.valuerefs():  # a copy: other threads make credentials, too
        held = reference()
        if held is not None and held.authority == authority:
            return held
    raise AuthenticationError(
        "this process holds no certificate of the authority of the program that the client "
        "belongs to; clients can be passed between nodes of one program only"
    )


@contextlib.contextmanager
def _as_file(data: bytes) -> Iterator[str]:
    """Writes data to a private file in a block, because `ssl` reads keys only from files."""
    if hasattr(os, "memfd_create"):
        with os.fdopen(os.memfd_create("courier-tls"), "wb", buffering=0) as file:
            file.write(data)
            yield f"/proc/self/fd/{file.fileno()}"
    else:
        import tempfile

        with tempfile.NamedTemporaryFile(buffering=0) as named:
            named.write(data)
            yield named.name
