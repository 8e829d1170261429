"""How a client was made."""

from typing import NamedTuple

from courier._address import place
from courier._secret import Secret
from courier._timing import DEFAULT, Timing
from courier._tls import TlsCredentials


class ClientOptions(NamedTuple):
    """Everything that the pickle of a client keeps, and that its lane must know."""

    address: str
    secret: Secret | None
    timeout_s: float | None
    wait_for_ready: bool
    compress: bool
    tls: TlsCredentials | None
    keepalive_s: float
    timing: Timing = DEFAULT
    #: What errors and repr call the server; empty if it has only an address.
    name: str = ""
    #: Of which class the served object is, for repr; empty if that is not known.
    serves: str = ""

    @property
    def where(self) -> str:
        """The server, for messages."""
        return place(self.address, self.name)
