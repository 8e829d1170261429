"""The client's half of a session: seals requests, checks replies."""

import itertools
from collections.abc import Iterable

from courier._grpc.wire import describe, fits_inline, parse, sealed
from courier._parcel import Parcel
from courier._proto import courier_pb2 as pb
from courier._secret import SessionKey
from courier.errors import AuthenticationError


class ClientSession:
    """What a hello gave: seals requests and numbers them."""

    def __init__(self, name: bytes, key: SessionKey, idempotent: Iterable[str]) -> None:
        self.name = name
        self.key = key
        #: Methods that the server says to be harmless when they run twice.
        self.idempotent = frozenset(idempotent)
        self._numbers = itertools.count(1)

    def request(self, method: str, arguments: Parcel) -> tuple[pb.Sealed, int]:
        """Returns a sealed request, with its arguments inside if they fit, and its number."""
        head = pb.RequestHead(method=method, arguments=describe(arguments))
        return self._seal(head, arguments if fits_inline(arguments) else None)

    def fetch(self, ticket: bytes) -> tuple[pb.Sealed, int]:
        return self._seal(pb.RequestHead(ticket=ticket), None)

    def _seal(self, head: pb.RequestHead, parcel: Parcel | None) -> tuple[pb.Sealed, int]:
        head.session = self.name
        # next() of a count is atomic.
        head.sequence = next(self._numbers)
        data = head.SerializeToString()
        return sealed(data, self.key.seal_request(data), parcel), head.sequence

    def open(self, message: pb.Sealed, sequence: int, where: str) -> pb.ReplyHead:
        """Checks that a reply comes from the server and answers this request.

        Raises:
            AuthenticationError: It does not.
        """
        if not self.key.is_reply(message.head, message.seal):
            raise AuthenticationError(f"{where}: the reply does not carry the program's seal")
        head = parse(pb.ReplyHead, message.head)
        if head.sequence != sequence:
            raise AuthenticationError(f"{where}: the reply belongs to another call")
        return head
