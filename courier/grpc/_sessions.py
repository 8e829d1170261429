"""The sessions of a server: clients that have proved the secret, and the calls that came."""

import collections
import hmac
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from courier._proto import courier_pb2 as pb
from courier.errors import AuthenticationError, ProtocolError
from courier.grpc._wire import parse
from courier.wire.secret import Secret, SequenceWindow, SessionKey

#: Limits of unproven and proven sessions, so that the first cannot displace the second.
_MAX_UNPROVEN = 16_384
_MAX_PROVEN = 16_384
_NONCE_SIZES = range(16, 65)
#: Metadata of calls of other services.
SESSION_KEY = "courier-session-bin"
SEQUENCE_KEY = "courier-sequence"
SEAL_KEY = "courier-seal-bin"
#: Fits into 8 bytes.
_MAX_DIGITS = 19
_UNPROTECTED = (
    "this server has no secret, so gRPC cannot tell who calls; give it secret=courier.Secret(...)"
)


@dataclass(slots=True)
class _Session:
    key: SessionKey
    window: SequenceWindow = field(default_factory=SequenceWindow)


class Sessions:
    """Opens sessions, and sealed requests. A forgotten client says hello again. Not thread-safe."""

    def __init__(self, secret: Secret | None, *, is_protected: bool) -> None:
        """Begins without sessions. `is_protected`: something proves who calls."""
        self._secret = secret
        self._is_protected = is_protected
        self._unproven: collections.OrderedDict[bytes, _Session] = collections.OrderedDict()
        self._proven: collections.OrderedDict[bytes, _Session] = collections.OrderedDict()

    def hello(self, request: pb.HelloRequest) -> pb.HelloReply:
        """Opens a session, or raises AuthenticationError where any process could be the client."""
        if not self._is_protected:
            raise AuthenticationError(_UNPROTECTED)
        if len(request.nonce) not in _NONCE_SIZES:
            raise ProtocolError("a nonce has 16 to 64 bytes")
        nonce, name = os.urandom(32), os.urandom(16)
        session = _Session(SessionKey(self._secret, request.nonce, nonce))
        self._unproven[name] = session
        if len(self._unproven) > _MAX_UNPROVEN:
            self._unproven.popitem(last=False)
        return pb.HelloReply(nonce=nonce, session=name, proof=session.key.prove())

    def open(self, message: pb.Sealed) -> tuple[pb.RequestHead, SessionKey]:
        """Checks the sender of a request, and that it is no repetition; raises an error if not."""
        head = parse(pb.RequestHead, message.head)
        session, number = head.session, head.sequence
        key = self._admit(session, number, message.seal, lambda key: key.seal_request(message.head))
        return head, key

    def open_service(
        self, path: str, request: bytes, metadata: Mapping[str, str | bytes]
    ) -> tuple[int, SessionKey]:
        """As `open`, for `/service/method`; returns the request's number and its session's key."""
        name, seal = metadata.get(SESSION_KEY), metadata.get(SEAL_KEY)
        number = metadata.get(SEQUENCE_KEY)
        if not isinstance(name, bytes) or not isinstance(seal, bytes):
            raise AuthenticationError("no session and no seal; say hello first")
        if not isinstance(number, str) or not number.isdecimal() or len(number) > _MAX_DIGITS:
            raise ProtocolError(f"{SEQUENCE_KEY} is a number with at most {_MAX_DIGITS} digits")
        sequence = int(number)

        def sealed(key: SessionKey) -> bytes:
            return key.seal_service(b"request", path, sequence, request)

        return sequence, self._admit(name, sequence, seal, sealed)

    def _admit(
        self, name: bytes, sequence: int, seal: bytes, seal_of: Callable[[SessionKey], bytes]
    ) -> SessionKey:
        session = self._proven.get(name) or self._unproven.get(name)
        if session is None:
            raise AuthenticationError("unknown session; say hello first")
        if not hmac.compare_digest(seal_of(session.key), seal):
            raise AuthenticationError("wrong seal: the client does not hold the secret")
        if not session.window.admit(sequence):
            raise AuthenticationError("this request was already received")
        self._unproven.pop(name, None)
        self._proven[name] = session
        self._proven.move_to_end(name)
        if len(self._proven) > _MAX_PROVEN:
            self._proven.popitem(last=False)
        return session.key
