"""The options of a client."""

from typing import NamedTuple

from courier._timing import DEFAULT, Timing
from courier.wire.secret import Secret
from courier.wire.tls import TlsCredentials


class ClientOptions(NamedTuple):
    """The options that the pickle of a client keeps, and that its lane needs."""

    address: str
    secret: Secret | None
    timeout_s: float | None
    wait_for_ready: bool
    compress: bool
    tls: TlsCredentials | None
    keepalive_s: float
    timing: Timing = DEFAULT
    #: The name of the server in errors and repr; empty if it has only an address.
    name: str = ""
    #: The class of the served object, for repr; empty if that is not known.
    serves: str = ""

    @property
    def where(self) -> str:
        return f"{self.name} ({self.address})" if self.name else self.address
