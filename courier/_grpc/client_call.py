"""One call on its way through the lane over gRPC."""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc

from courier._grpc.client_session import ClientSession
from courier._grpc.client_stream import Deadline, GrpcStream, to_reply
from courier._grpc.status import error_of, was_never_sent
from courier._grpc.wire import fits_inline, parse, send
from courier._lane import PendingCall, Reply, Streams
from courier._parcel import Parcel
from courier._proto import courier_pb2 as pb
from courier._secret import SessionKey, make_nonce
from courier.errors import (
    AuthenticationError,
    CallCancelledError,
    CallTimeoutError,
    CourierError,
    ProtocolError,
    ServerLostError,
    ServerUnreachableError,
)

if TYPE_CHECKING:
    from courier._grpc.client import GrpcLane

#: Times a server is greeted, or a call sent, again at most when its server went meanwhile, or has
#: forgotten, or never knew, the session.
_MAX_ATTEMPTS = 4
#: Times a call to an idempotent method is sent again when its connection broke. It may be what
#: killed its server, and must not do so to each one that comes after it.
_MAX_REPEATS = 3


class GrpcCall:
    """One call through its stages: hello if needed, the call, fetching a large reply.

    Each stage is a gRPC future whose completion starts the next; no thread
    waits, except one that reads a large reply.
    """

    def __init__(
        self, lane: "GrpcLane", method: str, arguments: Parcel, deadline: Deadline
    ) -> None:
        self._lane = lane
        self._method = method
        self._arguments: Parcel | None = arguments
        self.deadline = deadline
        self._where = f"{lane.options.address}: {method}"
        self._attempts = 0
        #: Above 0 the call may have run.
        self._repeats = 0
        self._sequence = 0
        self._session: ClientSession | None = None
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
        if self.deadline.remaining() == 0.0:
            raise CallTimeoutError(f"{self._where}: no answer in time; {self._what_ran()}")
        session = self._lane.session
        if session is not None:
            self._start_call(session)
        # Whoever was refused says hello for itself: another hello may be as old as its session.
        elif self._lane.may_greet(self, alone=self._attempts > 0):
            self._start_hello()

    def fail_as(self, error: CourierError) -> None:
        """Ends the call with what a hello met: its own, or that of another for both."""
        if self._repeats and isinstance(error, ServerUnreachableError):
            # Of those that wait for this hello, some were never sent: theirs is another error.
            self._lane.hello_failed(self, error)
            lost = ServerLostError(f"{self._where}: {self._what_ran()} ({error})")
            if self._lane.waits:
                self._lose(lost)
            else:
                self._settle(lost)
        else:
            self._settle(type(error)(str(error)))

    def _fail(self, error: CourierError) -> None:
        if isinstance(error, ServerLostError):
            self._lose(error)
        else:
            self._settle(error)

    def _lose(self, error: ServerLostError) -> None:
        """Repeats a call that may have run, if that does no harm; otherwise ends it."""
        session = self._session
        assert session is not None
        # Calls that follow say hello first: a hello may come twice, if that connection is still the
        # broken one.
        self._lane.abandon(session)
        if self._method not in session.idempotent or self._repeats == _MAX_REPEATS:
            self._settle(error)
            return
        self._repeats += 1
        self.advance()

    def _what_ran(self) -> str:
        return "it was sent before and may have run" if self._repeats else "nothing was run"

    def _start_hello(self) -> None:
        nonce = make_nonce()
        request = pb.HelloRequest(nonce=nonce).SerializeToString()
        # All waiting for a server is done here: a hello may come twice, a call may not.
        self._start(
            self._lane.hello,
            request,
            lambda rpc: self._after_hello(rpc, nonce),
            wait_for_ready=self._lane.waits,
        )

    def _after_hello(self, rpc: Any, nonce: bytes) -> None:
        code = rpc.code()
        if code is grpc.StatusCode.UNAVAILABLE and self._may_greet_again():
            self._attempts += 1
            self._start_hello()
            return
        if code is not grpc.StatusCode.OK:
            self.fail_as(self._hello_error(rpc))
            return
        reply = parse(pb.HelloReply, rpc.result())
        key = SessionKey(self._lane.options.secret, nonce, reply.nonce)
        if not key.is_proof(reply.proof, reply.idempotent):
            self._settle(
                AuthenticationError(
                    f"{self._lane.options.address}: the server does not hold the secret of this client; "
                    "both must come from the same program"
                )
            )
            return
        self._lane.use(ClientSession(reply.session, key, reply.idempotent), self)
        self.advance()

    def _may_greet_again(self) -> bool:
        # The server went just then, and may come back: nothing was run. Not for ever, since it
        # may be something that never lets anybody speak.
        return self._lane.waits and self._attempts < _MAX_ATTEMPTS

    def _hello_error(self, rpc: Any) -> CourierError:
        code, details, where = rpc.code(), rpc.details() or "", self._lane.options.address
        if code is grpc.StatusCode.UNAVAILABLE:
            return ServerUnreachableError(f"{where}: no server answers ({details})")
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return CallTimeoutError(f"{where}: no server answered in time; {self._what_ran()}")
        return error_of(code, details, where)

    def _start_call(self, session: ClientSession) -> None:
        arguments = self._arguments
        if arguments is None:
            return  # given up meanwhile
        if self._repeats and self._method not in session.idempotent:
            raise ServerLostError(
                f"{self._where}: {self._what_ran()}; the server that answers now does not call "
                "the method idempotent"
            )
        message, self._sequence = session.request(self._method, arguments)
        self._session = session
        if fits_inline(arguments):
            self._start(self._lane.call, message.SerializeToString(), self._after_call)
        else:
            self._start(self._lane.send, send(message, arguments), self._after_call)

    def _after_call(self, rpc: Any) -> None:
        code = rpc.code()
        if code is grpc.StatusCode.UNAUTHENTICATED and self._attempts < _MAX_ATTEMPTS:
            # The server started anew, or forgot us. It did not run the call, so it may be sent
            # again, under a new number.
            self._attempts += 1
            self._lane.abandon(self._session)
            self.advance()
            return
        if self._lane.waits and was_never_sent(code, rpc.details() or ""):
            self._lane.abandon(self._session)
            self.advance()
            return
        if code is not grpc.StatusCode.OK:
            self._fail(self._call_error(rpc))
            return
        session = self._session
        assert session is not None
        if self._method not in session.idempotent:
            self._arguments = None  # never sent again
        message = parse(pb.Sealed, rpc.result())
        head = session.open(message, self._sequence, self._where)
        if head.kind == pb.ReplyHead.LARGE:
            self._start_fetch(session, head.ticket)
        elif head.kind == pb.ReplyHead.GENERATOR:
            stream = GrpcStream(self._lane, session, head.ticket, self.deadline, self._where)
            if not self._settle(Streams(stream)):
                stream.close()
        else:
            self._settle(to_reply(message, head, iter(())))

    def _call_error(self, rpc: Any) -> CourierError:
        code, details = rpc.code(), rpc.details() or ""
        if was_never_sent(code, details) and not self._repeats:
            return ServerUnreachableError(f"{self._where}: no server answers ({details})")
        return error_of(code, details, self._where)

    def _start_fetch(self, session: ClientSession, ticket: bytes) -> None:
        stream = GrpcStream(self._lane, session, ticket, self.deadline, self._where)
        self._enter_stage(stream)
        thread = threading.Thread(
            target=self._guard, args=(lambda: self._fetch(stream),), name="courier-fetch"
        )
        thread.daemon = True
        thread.start()

    def _fetch(self, stream: "GrpcStream") -> None:
        try:
            reply = stream.next_reply()
        except ServerLostError as error:
            self._lose(error)
            return
        if reply is None:
            raise ProtocolError(f"{self._where}: an announced reply did not come")
        self._settle(reply)

    # How they hang together

    def _start(
        self,
        method: Any,
        request: Any,
        after: Callable[[Any], None],
        *,
        wait_for_ready: bool = False,
    ) -> None:
        def start() -> None:
            rpc = method.future(
                request, timeout=self.deadline.remaining(), wait_for_ready=wait_for_ready
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
