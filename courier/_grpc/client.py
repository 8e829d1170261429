"""The lane over gRPC: complete, and slower than what will stand beside it."""

import itertools
import os
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

#: Times a call is sent at most when its server has forgotten, or never knew, the session.
_MAX_ATTEMPTS = 4


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
        # gRPC shares connections between channels of equal options. The last one, which it does
        # not know, keeps a forked child from using the connection of its parent.
        channel_options = (*_CHANNEL_OPTIONS, ("courier.process", os.getpid()))
        self._channel = grpc.insecure_channel(
            _grpc_target(options.address), options=channel_options, compression=compression
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
        self._closed = False
        #: The call that says hello for all others, which wait for it.
        self._greeter: _GrpcCall | None = None
        self._waiting: list[_GrpcCall] = []

    def submit(self, method: str, arguments: Parcel, timeout_s: float | None) -> PendingCall:
        call = _GrpcCall(self, method, arguments, _Deadline.after(timeout_s))
        with self._lock:
            self._pending.add(call)
        call.advance()
        return call

    def may_greet(self, call: "_GrpcCall") -> bool:
        """Tells whether a call shall say hello; if not, it is advanced when another call has.

        All calls of a lane have the same timeout, so a greeter times out before those that wait.
        """
        with self._lock:
            if self._greeter is None:
                self._greeter = call
            elif self.session is None:
                self._waiting.append(call)
                return False
            return True

    def use(self, session: _Session) -> None:
        """Seals later calls with this session, and those that waited for one."""
        with self._lock:
            if self.session is None:
                self.session = session
            self._greeter = None
            waiting, self._waiting = self._waiting, []
        for call in waiting:
            call.advance()

    def abandon(self, session: _Session | None) -> None:
        """Seals no later call with this session: the server does not know it."""
        with self._lock:
            if self.session is session:
                self.session = None

    def forget(self, call: "_GrpcCall", outcome: Reply | Exception) -> None:
        """Drops a call that has ended, and tells those that waited for its hello."""
        with self._lock:
            self._pending.discard(call)
            if call is not self._greeter:
                return
            self._greeter = None
            waiting, self._waiting = self._waiting, []
            closed = self._closed
        is_own = isinstance(outcome, CallTimeoutError | CallCancelledError)
        for other in waiting:
            if isinstance(outcome, CourierError) and (closed or not is_own):
                other.fail_as(outcome)
            else:
                other.advance()

    def close(self) -> None:
        with self._lock:
            self._closed = True
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
        self._attempts = 0
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
        return self._settle(CallCancelledError(f"{self._where}: the call was cancelled"))

    # Its stages

    def advance(self) -> None:
        """Starts the next stage: the call itself, or a hello first."""
        self._guard(self._advance)

    def _advance(self) -> None:
        if self._outcome is not None:
            return
        if self._deadline.remaining() == 0.0:
            raise CallTimeoutError(f"{self._where}: no answer in time; nothing was run")
        session = self._lane.session
        if session is not None:
            self._start_call(session)
        # Whoever was refused says hello for itself: another hello may be as old as its session.
        elif self._attempts or self._lane.may_greet(self):
            self._start_hello()

    def fail_as(self, error: CourierError) -> None:
        """Ends the call with what another one met when it said hello for both."""
        self._settle(type(error)(str(error)))

    def _start_hello(self) -> None:
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
                    f"{self._lane.options.address}: the server does not hold the secret of this client; "
                    "both must come from the same program"
                )
            )
            return
        self._lane.use(_Session(reply.session, key))
        self.advance()

    def _hello_error(self, rpc: Any) -> CourierError:
        code, details, where = rpc.code(), rpc.details() or "", self._lane.options.address
        if code is grpc.StatusCode.UNAVAILABLE:
            return ServerUnreachableError(f"{where}: no server answers ({details})")
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return CallTimeoutError(f"{where}: no server answered in time; nothing was run")
        return error_of(code, details, where)

    def _start_call(self, session: _Session) -> None:
        self._attempts += 1
        arguments = self._arguments
        if arguments is None:
            return  # given up meanwhile
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
        if code is grpc.StatusCode.UNAUTHENTICATED and self._attempts < _MAX_ATTEMPTS:
            # The server started anew, or forgot us. It did not run the call, so it may be sent
            # again, under a new number.
            self._lane.abandon(self._session)
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
        self._enter_stage(stream)
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
            rpc = method.future(
                request,
                timeout=self._deadline.remaining(),
                wait_for_ready=self._lane.options.wait_for_ready,
            )
            self._enter_stage(rpc)
            rpc.add_done_callback(lambda done: self._guard(lambda: after(done)))

        self._guard(start)

    def _enter_stage(self, rpc: Any) -> None:
        with self._lock:
            given_up = self._outcome is not None
            self._rpc = None if given_up else rpc
        if given_up:
            rpc.cancel()

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
            rpc = self._rpc
            # These refer to this call in turn, and to bytes that it needs no more.
            self._callback = self._rpc = None
        self._done.set()
        if rpc is not None and isinstance(outcome, Exception):
            rpc.cancel()  # does nothing if its end is what led here
        self._lane.forget(self, outcome)
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
            if code is grpc.StatusCode.UNAUTHENTICATED:
                # It knew us when it announced this stream, so it has started anew since.
                code = grpc.StatusCode.UNAVAILABLE
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
