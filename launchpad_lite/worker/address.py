"""Addresses that exist before servers listen at them."""

import contextvars
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

from courier import Secret, TlsCredentials
from launchpad_lite.errors import UnresolvedAddressError
from launchpad_lite.worker._clients import Clients

_NAME = re.compile(r"[a-z][a-z0-9]*")


class Address:
    """A placeholder for where a service will listen.

    Copies of an address, pickled ones included, mean the same place.

    Example:
        class Replay(lp.Node):
            def __init__(self):
                super().__init__()
                self.address = lp.Address("replay")  # where it listens is known after launch
    """

    __slots__ = ("_table", "is_foreign", "key", "name", "node", "port")

    def __init__(
        self, name: str = "courier", port: int | None = None, *, is_foreign: bool = False
    ) -> None:
        """Makes a new placeholder.

        Args:
            name: The service there: lower-case letters and digits.
            port: Ask for this port; None takes a free one.
            is_foreign: Whether the program that listens there does not share its port with the
                launcher (SO_REUSEPORT), as our servers do. The launcher holds it until the node
                starts.

        Raises:
            TypeError: The port is no number.
            ValueError: The name or the port is malformed.
        """
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"an address is named with lower-case letters and digits, not {name!r}"
            )
        if port is not None and (isinstance(port, bool) or not isinstance(port, int)):
            raise TypeError(f"a port is a whole number, not {port!r}")
        if port is not None and not 0 < port < 65536:
            raise ValueError(f"not a port: {port}")
        self.key = uuid.uuid4().hex
        self.name = name
        self.port = port
        self.is_foreign = is_foreign
        #: `label[replica]` of the node that listens there; empty before that is added to a program.
        self.node = ""
        #: The table in which this process has published it; not pickled.
        self._table: AddressTable | None = None

    def bind(self, table: "AddressTable") -> None:
        """Publishes the address in this process, for any current program."""
        self._table = table

    def table(self) -> "AddressTable":
        for table in (_current_table.get(), self._table):
            if table is not None and self.key in table.endpoints:
                return table
        raise UnresolvedAddressError(
            f"the address of {self.node or 'a node'} is not known yet: handles can be dereferenced "
            "in running nodes, and in the launching process after launch()"
        )

    def resolve(self) -> str:
        """Returns `host:port`.

        Raises:
            UnresolvedAddressError: No program that runs here has published it.
        """
        return self.table().endpoints[self.key]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Address) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"Address({self.name!r}, key={self.key[:8]})"

    def __getstate__(self) -> tuple[str, str, int | None, bool, str]:
        return self.key, self.name, self.port, self.is_foreign, self.node

    def __setstate__(self, state: tuple[str, str, int | None, bool, str]) -> None:
        self.key, self.name, self.port, self.is_foreign, self.node = state
        self._table = None


@dataclass(frozen=True)
class AddressTable:
    """The addresses of one launched program, and the secret of its nodes.

    Attributes:
        endpoints: `host:port` by address key, as this host reaches it.
        secret: Shared by all nodes of the program.
        tls: Certificates of the program's own authority, where nodes run on several hosts.
        listen_host: Where servers of this process listen; None: on loopback.
    """

    endpoints: dict[str, str]
    secret: Secret = field(repr=False)
    tls: TlsCredentials | None = field(default=None, repr=False)
    listen_host: str | None = None
    #: Clients made in this process outside of nodes; they end with the program.
    clients: Clients = field(default_factory=Clients, repr=False, compare=False)

    def move(self, endpoints: Mapping[str, str]) -> dict[str, str]:
        """Publishes new endpoints; returns new ones by old ones.

        Args:
            endpoints: `host:port` by address key.
        """
        moves = {
            old: new
            for key, new in endpoints.items()
            if (old := self.endpoints.get(key)) is not None and old != new
        }
        self.endpoints.update(endpoints)
        return moves


@dataclass(frozen=True)
class OpenTable:
    """An address table in a form that can be sent, to processes that may read the secret."""

    endpoints: Mapping[str, str]  # `host:port` by address key, as it is reached there
    secret: str = field(repr=False)  # of the program, in hexadecimal digits
    #: Certificate, key and authority, as PEM; none if all nodes run on one host.
    credentials: tuple[str, ...] = field(repr=False)
    listen_host: str | None  # where servers listen there; None: on loopback

    @classmethod
    def of(cls, table: AddressTable) -> "OpenTable":
        tls = table.tls
        credentials = () if tls is None else (tls.certificate, tls.key, tls.authority)
        return cls(
            dict(table.endpoints),
            table.secret.reveal().hex(),
            tuple(each.decode() for each in credentials),
            table.listen_host,
        )

    def table(self) -> AddressTable:
        tls = None
        if self.credentials:
            certificate, key, authority = (each.encode() for each in self.credentials)
            tls = TlsCredentials(certificate=certificate, key=key, authority=authority)
        secret = Secret(bytes.fromhex(self.secret))
        return AddressTable(dict(self.endpoints), secret, tls, self.listen_host)


_current_table: contextvars.ContextVar[AddressTable | None] = contextvars.ContextVar(
    "launchpad_lite_addresses", default=None
)


def enter_table(table: AddressTable) -> None:
    _current_table.set(table)
