"""The program's secret, and keys and seals derived from it.

Pure: no I/O. The protocol is written down at the head of `courier.proto`;
it follows the challenge of `multiprocessing.connection`, made mutual, and
seals each message so that another process cannot replay a proof.
"""

import hashlib
import hmac
import os
import weakref
from collections.abc import Callable

from courier.errors import AuthenticationError

_MIN_SECRET_BYTES = 16
#: How many later requests of a session may overtake one.
_WINDOW = 1 << 16


class Secret:
    """A key that only the members of one program know.

    A secret is never pickled: its pickle only names it, and loading works in
    processes that already hold the same secret. So a client may travel inside
    a program, and a pickle on disk gives nothing away.

    Example:
        secret = courier.Secret.generate()
        with courier.Server(Counter(), secret=secret) as server:
            client = courier.Client(server.address, secret=secret)
    """

    __slots__ = ("__weakref__", "_key", "name")

    def __init__(self, key: bytes) -> None:
        """Wraps a key.

        Args:
            key: At least 16 bytes that cannot be guessed.

        Raises:
            ValueError: The key is too short.
        """
        if len(key) < _MIN_SECRET_BYTES:
            raise ValueError(f"a secret needs at least {_MIN_SECRET_BYTES} bytes, got {len(key)}")
        self._key = bytes(key)
        #: Safe to show: identifies the secret without revealing it.
        self.name = hashlib.sha256(b"courier.v1 name" + self._key).hexdigest()[:16]
        _held[id(self)] = self

    @classmethod
    def generate(cls) -> "Secret":
        """Makes a new random secret."""
        return cls(os.urandom(32))

    def reveal(self) -> bytes:
        """Returns the key, for handing it to a member through a private channel."""
        return self._key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self._key, other._key)

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"Secret(name={self.name!r})"

    def __reduce__(self) -> tuple[Callable[[str], "Secret"], tuple[str]]:
        return _find_held, (self.name,)


#: Weak: a secret is known for as long as a client, a server or a program holds it.
_held: "weakref.WeakValueDictionary[int, Secret]" = weakref.WeakValueDictionary()


def _find_held(name: str) -> Secret:
    for reference in _held.valuerefs():  # a copy: other threads make secrets, too
        held = reference()
        if held is not None and held.name == name:
            return held
    raise AuthenticationError(
        f"this process does not hold the secret {name!r} of the program that the client "
        "belongs to; clients can be passed between nodes of one program only"
    )


class SessionKey:
    """Seals and checks the messages of one session. Safe to use from several threads."""

    __slots__ = ("_key",)

    def __init__(self, secret: Secret | None, client_nonce: bytes, server_nonce: bytes) -> None:
        key = secret.reveal() if secret is not None else b""
        # Lengths are fixed or checked by the caller, so the parts cannot shift.
        parts = b"courier.v1 session" + client_nonce + server_nonce
        self._key = hmac.digest(key, parts, "sha256")

    def prove(self) -> bytes:
        return hmac.digest(self._key, b"courier.v1 server", "sha256")

    def seal_request(self, head: bytes) -> bytes:
        return hmac.digest(self._key, b"courier.v1 request" + head, "sha256")

    def seal_reply(self, head: bytes) -> bytes:
        return hmac.digest(self._key, b"courier.v1 reply" + head, "sha256")

    def seal_service(self, direction: bytes, path: str, sequence: int, message: bytes) -> bytes:
        """Seals a message of another gRPC service; `direction` is `b"request"` or `b"reply"`."""
        content = path.encode() + sequence.to_bytes(8, "big") + hashlib.sha256(message).digest()
        return hmac.digest(self._key, b"courier.v1 service " + direction + content, "sha256")


class SequenceWindow:
    """Admits every sequence number once: the server's half of "at most once". Not thread-safe."""

    __slots__ = ("_ahead", "_floor")

    def __init__(self) -> None:
        #: Every number up to here counts as used.
        self._floor = 0
        #: Used numbers above the floor, which overtook others. At most `_WINDOW`.
        self._ahead: dict[int, None] = {}

    def admit(self, number: int) -> bool:
        if number <= self._floor or number in self._ahead:
            return False
        self._ahead[number] = None
        while self._floor + 1 in self._ahead:
            self._floor += 1
            del self._ahead[self._floor]
        if len(self._ahead) > _WINDOW:
            # A number was never sent, because its call was cancelled before: stop waiting for it.
            self._floor = min(self._ahead) - 1
        return True
