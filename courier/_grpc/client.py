"""The lane over gRPC: complete, and slower than what will stand beside it."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc

from courier._exceptions import ExceptionReport
from courier._grpc.status import error_of, was_never_sent
from courier._grpc.wire import (
    COMMON_OPTIONS,
    SERVICE,
    describe,
    fits_inline,
    parse,
    receive,
    sealed,
    send,
)
from courier._lane import (
    LaneOptions,
    PendingCall,
    Raised,
    Refused,
    Reply,
    Returned,
    Streams,
)
from courier._parcel import Parcel
from courier._proto import courier_pb2 as pb
from courier._secret import SessionKey, make_nonce
from courier.errors import (
    AuthenticationError,
    CallCancelledError,
    CallTimeoutError,
    CourierError,
    ProtocolError,
    SerializationError,
    ServerUnreachableError,
    UnknownMethodError,
)

_CHANNEL_OPTIONS = (
    *COMMON_OPTIONS,
    # A server that comes back is found within half a second (the default is minutes).
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    # At most once: gRPC must not send a call twice by itself.
    ("grpc.enable_retries", 0),
)

#: Times a call is sent anew since its server had forgotten, or never knew, the session.
_MAX_HELLOS = 3


#: What grpc makes of a method; its typing knows neither raw bytes nor futures of all kinds.
_Method = Any


class _Session:
    """What a hello gave: seals requests and numbers them."""

    def __init__(self, name: bytes, key: SessionKey) -> None:
        self.name = name
        self.key = key
        self._numbers = itertools.count(1)

    def request(self, method: str, arguments: Parcel) -> tuple[pb.Sealed, int]:
        """Returns a sealed request without its parcel, and its number."""
        return self._seal(pb.RequestHead(method=method, arguments=describe(arguments)))

    def fetch(self, ticket: bytes) -> tuple[pb.Sealed, int]:
        return self._seal(pb.RequestHead(ticket=ticket))

    def _seal(self, head: pb.RequestHead) -> tuple[pb.Sealed, int]:
        head.session = self.name
        # next() of a count is atomic.
        head.sequence = next(self._numbers)
        data = head.SerializeToString()
        return sealed(data, self.key.seal_request(data), None), head.sequence

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


@dataclass(frozen=True, slots=True)
class _Deadline:
    at: float | None

    @classmethod
    def after(cls, timeout_s: float | None) -> "_Deadline":
        return cls(None if timeout_s is None else time.monotonic() + timeout_s)

    def remaining(self) -> float | None:
        return None if self.at is None else max(0.0, self.at - time.monotonic())


class GrpcLane:
    """Implements `courier._lane.Lane`."""

    def __init__(self, options: LaneOptions) -> None:
        self.options = options
        compression = grpc.Compression.Gzip if options.compress else None
        self._channel = grpc.insecure_channel(
            _grpc_target(options.address), options=_CHANNEL_OPTIONS, compression=compression
        )
        prefix = f"/{SERVICE}/"
        # None as serializers: what crosses this wall is bytes.
        self.hello: _Method = self._channel.unary_unary(f"{prefix}Hello")
        self.call: _Method = self._channel.unary_unary(f"{prefix}Call")
        self.send: _Method = self._channel.stream_unary(f"{prefix}Send")
        self.fetch: _Method = self._channel.unary_stream(f"{prefix}Fetch")
        self._lock = threading.Lock()
        self._pending: set[_GrpcCall] = set()
        self.session: _Session | None = None

    def submit(self, method: str, arguments: Parcel, timeout_s: float | None) -> PendingCall:
        call = _GrpcCall(self, method, arguments, _Deadline.after(timeout_s))
        with self._lock:
            self._pending.add(call)
        call.advance()
        return call

    def forget(self, call: "_GrpcCall") -> None:
        """Drops a call that has ended."""
        with self._lock:
            self._pending.discard(call)

    def close(self) -> None:
        with self._lock:
            pending = list(self._pending)
        for call in pending:
            call.cancel()
        self._channel.close()


class _GrpcCall:
    """One call through its stages: hello if needed, the call, fetching a large reply.

    Each stage is a gRPC future whose completion starts the next; no thread
    waits, except one that reads a large reply.
    """

    def __init__(self, lane: GrpcLane, method: str, arguments: Parcel, deadline: _Deadline) -> None:
        self._lane = lane
        self._method = method
        self._arguments: Parcel | None = arguments
        self._deadline = deadline
        self._where = f"{lane.options.address}: {method}"
        self._hellos = 0
        self._sequence = 0
        self._session: _Session | None = None
        self._lock = threading.Lock()
        self._done = threading.Event()
        #: What to cancel in the current stage.
        self._rpc: Any = None
        self._outcome: Reply | Exception | None = None
        self._callback: Callable[[PendingCall], None] | None = None

    # What a client sees

    def wait(self) -> Reply:
        try:
            self._done.wait()
        except BaseException:
            self.cancel()
            raise
        outcome = self._outcome
        if isinstance(outcome, Exception):
            raise outcome
        assert outcome is not None
        return outcome

    def when_done(self, callback: Callable[[PendingCall], None]) -> None:
        with self._lock:
            if self._outcome is None:
                self._callback = callback
                return
        callback(self)

    def cancel(self) -> bool:
        with self._lock:
            rpc = self._rpc
        settled = self._settle(CallCancelledError(f"{self._where}: the call was cancelled"))
        if rpc is not None:
            rpc.cancel()
        return settled

    # Its stages

    def advance(self) -> None:
        """Starts the next stage: the call itself, or a hello first."""
        session = self._lane.session
        if session is None:
            self._start_hello()
        else:
            self._start_call(session)

    def _start_hello(self) -> None:
        self._hellos += 1
        nonce = make_nonce()
        request = pb.HelloRequest(nonce=nonce).SerializeToString()
        self._start(self._lane.hello, request, lambda rpc: self._after_hello(rpc, nonce))

    def _after_hello(self, rpc: Any, nonce: bytes) -> None:
        if rpc.code() is not grpc.StatusCode.OK:
            self._settle(self._hello_error(rpc))
            return
        reply = parse(pb.HelloReply, rpc.result())
        key = SessionKey(self._lane.options.secret, nonce, reply.nonce)
        if not key.is_proof(reply.proof):
            self._settle(
                AuthenticationError(
                    f"{self._where}: the server does not hold the secret of this client; "
                    "both must come from the same program"
                )
            )
            return
        if self._lane.session is None:
            self._lane.session = _Session(reply.session, key)
        self.advance()

    def _hello_error(self, rpc: Any) -> CourierError:
        code, details = rpc.code(), rpc.details() or ""
        if code is grpc.StatusCode.UNAVAILABLE:
            return ServerUnreachableError(f"{self._where}: no server answers ({details})")
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return CallTimeoutError(f"{self._where}: no server answered in time; nothing was run")
        return error_of(code, details, self._where)

    def _start_call(self, session: _Session) -> None:
        arguments = self._arguments
        assert arguments is not None
        message, self._sequence = session.request(self._method, arguments)
        self._session = session
        if fits_inline(arguments):
            message.pickle = bytes(arguments.pickle)
            message.buffers.extend(bytes(buffer) for buffer in arguments.buffers)
            self._start(self._lane.call, message.SerializeToString(), self._after_call)
        else:
            self._start(self._lane.send, send(message, arguments), self._after_call)

    def _after_call(self, rpc: Any) -> None:
        code = rpc.code()
        if code is grpc.StatusCode.UNAUTHENTICATED and self._hellos < _MAX_HELLOS:
            # The server started anew, or forgot us. It did not run the call, so it may be sent
            # again, under a new number.
            if self._lane.session is self._session:
                self._lane.session = None
            self.advance()
            return
        if code is not grpc.StatusCode.OK:
            self._settle(self._call_error(rpc))
            return
        self._arguments = None
        session = self._session
        assert session is not None
        message = parse(pb.Sealed, rpc.result())
        head = session.open(message, self._sequence, self._where)
        if head.kind == pb.ReplyHead.LARGE:
            self._start_fetch(session, head.ticket)
        elif head.kind == pb.ReplyHead.GENERATOR:
            stream = _GrpcStream(self._lane, session, head.ticket, self._deadline, self._where)
            if not self._settle(Streams(stream)):
                stream.close()
        else:
            self._settle(_to_reply(message, head, iter(())))

    def _call_error(self, rpc: Any) -> CourierError:
        code, details = rpc.code(), rpc.details() or ""
        if was_never_sent(code, details):
            return ServerUnreachableError(f"{self._where}: no server answers ({details})")
        return error_of(code, details, self._where)

    def _start_fetch(self, session: _Session, ticket: bytes) -> None:
        stream = _GrpcStream(self._lane, session, ticket, self._deadline, self._where)
        with self._lock:
            self._rpc = stream
        thread = threading.Thread(
            target=self._guard, args=(lambda: self._fetch(stream),), name="courier-fetch"
        )
        thread.daemon = True
        thread.start()

    def _fetch(self, stream: "_GrpcStream") -> None:
        reply = stream.next_reply()
        if reply is None:
            raise ProtocolError(f"{self._where}: an announced reply did not come")
        self._settle(reply)

    # How they hang together

    def _start(self, method: Any, request: Any, after: Callable[[Any], None]) -> None:
        def start() -> None:
            timeout_s = self._deadline.remaining()
            if timeout_s == 0.0:
                raise CallTimeoutError(f"{self._where}: no answer in time; nothing was run")
            rpc = method.future(
                request, timeout=timeout_s, wait_for_ready=self._lane.options.wait_for_ready
            )
            with self._lock:
                self._rpc = rpc
                given_up = self._outcome is not None
            if given_up:
                rpc.cancel()
            rpc.add_done_callback(lambda done: self._guard(lambda: after(done)))

        self._guard(start)

    def _guard(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as error:  # noqa: BLE001 - the caller must hear of it, whatever it is
            self._settle(error if isinstance(error, CourierError) else self._surprise(error))

    def _surprise(self, error: Exception) -> CourierError:
        if isinstance(error, ValueError) and "closed channel" in str(error).lower():
            return CallCancelledError(f"{self._where}: the client was closed")
        wrapped = ProtocolError(f"{self._where}: {type(error).__name__}: {error}")
        wrapped.__cause__ = error
        return wrapped

    def _settle(self, outcome: Reply | Exception) -> bool:
        with self._lock:
            if self._outcome is not None:
                return False
            self._outcome = outcome
            self._arguments = None
            callback = self._callback
        self._lane.forget(self)
        self._done.set()
        if callback is not None:
            callback(self)
        return True


class _GrpcStream:
    """The items of a generator, or the one value of a large reply."""

    def __init__(
        self, lane: GrpcLane, session: _Session, ticket: bytes, deadline: _Deadline, where: str
    ) -> None:
        message, self._sequence = session.fetch(ticket)
        self._session = session
        self._where = where
        self._items = 0
        self._over = False
        self._rpc = lane.fetch(message.SerializeToString(), timeout=deadline.remaining())
        self._pieces: Iterator[bytes] = iter(self._rpc)

    def next_reply(self) -> Returned | Raised | Refused | None:
        if self._over:
            return None
        try:
            reply = self._receive()
        except grpc.RpcError:
            self._over = True
            code, details = self._rpc.code(), self._rpc.details() or ""
            if self._rpc.cancelled():
                raise CallCancelledError(f"{self._where}: the stream was closed") from None
            raise error_of(code, details, self._where) from None
        if not isinstance(reply, Returned):
            self._over = True
        return reply

    def _receive(self) -> Returned | Raised | Refused | None:
        opening = next(self._pieces, None)
        if opening is None:
            raise ProtocolError(f"{self._where}: the stream ended without saying so")
        message = parse(pb.Piece, opening).opening
        head = self._session.open(message, self._sequence, self._where)
        if head.item != self._items:
            raise AuthenticationError(f"{self._where}: an item of the stream is out of order")
        self._items += 1
        if head.kind == pb.ReplyHead.END:
            return None
        return _to_reply(message, head, self._pieces)

    def close(self) -> None:
        self._over = True
        self._rpc.cancel()

    cancel = close


def _to_reply(
    message: pb.Sealed, head: pb.ReplyHead, pieces: Iterator[bytes]
) -> Returned | Raised | Refused:
    kinds = pb.ReplyHead
    if head.kind == kinds.VALUE:
        return Returned(receive(message, head.parcel, pieces))
    if head.kind == kinds.FAILURE:
        has_pickle = head.HasField("parcel")
        pickled = receive(message, head.parcel, pieces) if has_pickle else None
        return Raised(ExceptionReport(head.type_name, head.text, head.traceback, pickled))
    if head.kind == kinds.UNKNOWN_METHOD:
        return Refused(UnknownMethodError, head.text)
    if head.kind == kinds.UNPICKLABLE:
        return Refused(SerializationError, f"the method ran, but cannot send {head.text}")
    if head.kind == kinds.BAD_ARGUMENTS:
        return Refused(SerializationError, f"cannot unpickle the arguments of {head.text}")
    raise ProtocolError(f"an answer of unknown kind {head.kind}")


def _grpc_target(address: str) -> str:
    # Without a scheme, gRPC would take some host names for one.
    return f"dns:///{address}"
