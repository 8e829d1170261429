"""The sessions of a server: who has proved the secret, and which calls came already."""

import collections
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from courier._grpc.wire import parse
from courier._proto import courier_pb2 as pb
from courier._secret import Secret, SequenceWindow, SessionKey, make_nonce
from courier.errors import AuthenticationError, ProtocolError

#: Sessions that only said hello are cheap and cannot crowd out those that proved themselves.
_MAX_UNPROVEN = 16_384
_MAX_PROVEN = 16_384
_NONCE_SIZES = range(16, 65)


@dataclass(slots=True)
class _Session:
    key: SessionKey
    window: SequenceWindow = field(default_factory=SequenceWindow)


class Sessions:
    """Opens sessions and opens sealed requests. Thread-safe.

    A session that was forgotten is no harm: its client says hello again.
    """

    def __init__(self, secret: Secret | None) -> None:
        self._secret = secret
        self._lock = threading.Lock()
        self._unproven: collections.OrderedDict[bytes, _Session] = collections.OrderedDict()
        self._proven: collections.OrderedDict[bytes, _Session] = collections.OrderedDict()

    def hello(self, request: pb.HelloRequest, idempotent: Iterable[str] = ()) -> pb.HelloReply:
        """Opens a session.

        Args:
            request: What the client said.
            idempotent: Methods of which it learns that they may be repeated.

        Raises:
            ProtocolError: The nonce has a wrong size.
        """
        if len(request.nonce) not in _NONCE_SIZES:
            raise ProtocolError("a nonce has 16 to 64 bytes")
        nonce, name = make_nonce(), os.urandom(16)
        session = _Session(SessionKey(self._secret, request.nonce, nonce))
        with self._lock:
            self._unproven[name] = session
            if len(self._unproven) > _MAX_UNPROVEN:
                self._unproven.popitem(last=False)
        reply = pb.HelloReply(nonce=nonce, session=name, idempotent=idempotent)
        reply.proof = session.key.prove(reply.idempotent)
        return reply

    def open(self, message: pb.Sealed) -> tuple[pb.RequestHead, SessionKey]:
        """Checks who sent a request, and that it did not come before.

        Raises:
            AuthenticationError: Unknown session, wrong seal, or a repeated request.
            ProtocolError: The head is no RequestHead.
        """
        head = parse(pb.RequestHead, message.head)
        with self._lock:
            session = self._proven.get(head.session) or self._unproven.get(head.session)
        if session is None:
            raise AuthenticationError("unknown session; say hello first")
        if not session.key.is_request(message.head, message.seal):
            raise AuthenticationError("wrong seal: the client does not hold the secret")
        with self._lock:
            if not session.window.admit(head.sequence):
                raise AuthenticationError("this request was already received")
            self._unproven.pop(head.session, None)
            self._proven[head.session] = session
            self._proven.move_to_end(head.session)
            if len(self._proven) > _MAX_PROVEN:
                self._proven.popitem(last=False)
        return head, session.key
