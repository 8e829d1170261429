"""The lane over gRPC: complete, and slower than what will stand beside it."""

import os
import threading
import weakref
from typing import Any

import grpc

from courier._grpc.client_call import GrpcCall
from courier._grpc.client_session import ClientSession
from courier._grpc.client_stream import Deadline
from courier._grpc.greetings import Greetings
from courier._grpc.interrupts import interrupts_deferred
from courier._grpc.wire import COMMON_OPTIONS, SERVICE, grpc_target
from courier._lane import LaneOptions, PendingCall, Reply
from courier._parcel import Parcel
from courier.errors import (
    CallCancelledError,
    CallTimeoutError,
    CourierError,
    ServerUnreachableError,
)

_CHANNEL_OPTIONS = (
    *COMMON_OPTIONS,
    # A server that comes back is found within a tenth of a second (the default is minutes).
    # Refused attempts are cheap; at 500 ms they were most of the time that a restart took.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 100),
    # Despite its name the time that one attempt has: a busy machine or a far one needs longer
    # than the pauses between attempts.
    ("grpc.min_reconnect_backoff_ms", 1_000),
    # At most once: gRPC must not send a call twice by itself.
    ("grpc.enable_retries", 0),
)

#: What grpc makes of a method; its typing knows neither raw bytes nor futures of all kinds.
_Method = Any


class GrpcLane:
    """Implements `courier._lane.Lane`."""

    def __init__(self, options: LaneOptions) -> None:
        self.options = options
        compression = grpc.Compression.Gzip if options.compress else None
        # gRPC shares connections between channels of equal options. The last one, which it does
        # not know, keeps a forked child from using the connection of its parent.
        channel_options = (*_CHANNEL_OPTIONS, ("courier.process", os.getpid()))
        self._channel = grpc.insecure_channel(
            grpc_target(options.address), options=channel_options, compression=compression
        )
        # Also at exit, before the interpreter is taken apart: later the channel would wait, for
        # ever, for a thread that no longer runs to take note of calls that were given up.
        weakref.finalize(self, self._channel.close)
        prefix = f"/{SERVICE}/"
        # None as serializers: what crosses this wall is bytes.
        self.hello: _Method = self._channel.unary_unary(f"{prefix}Hello")
        self.call: _Method = self._channel.unary_unary(f"{prefix}Call")
        self.send: _Method = self._channel.stream_unary(f"{prefix}Send")
        self.fetch: _Method = self._channel.unary_stream(f"{prefix}Fetch")
        self._lock = threading.Lock()
        self._pending: set[GrpcCall] = set()
        self.session: ClientSession | None = None
        self._closed = False
        #: Whether calls wait for a server that is not up; always by saying hello.
        self.waits = options.wait_for_ready
        self._greetings = Greetings()

    def submit(self, method: str, arguments: Parcel, timeout_s: float | None) -> PendingCall:
        call = GrpcCall(self, method, arguments, Deadline.after(timeout_s))
        with self._lock:
            self._pending.add(call)
        try:
            with interrupts_deferred():
                call.advance()
        except KeyboardInterrupt:
            call.cancel()
            raise
        return call

    def may_greet(self, call: GrpcCall, *, alone: bool) -> bool:
        """Tells whether a call shall say hello; if not, it is advanced when another call has.

        Args:
            call: Has no session.
            alone: The hello of another would not do.
        """
        with self._lock:
            return self._greetings.join(call, alone=alone)

    def use(self, session: ClientSession, greeter: GrpcCall) -> None:
        """Seals later calls with this session, and those that waited for one."""
        with self._lock:
            if self.session is None:
                self.session = session
            waiting = self._greetings.release()
            self._greetings.leave(greeter)
        for call in waiting:
            call.advance()

    def abandon(self, session: ClientSession | None) -> None:
        """Seals no later call with this session: the server does not know it."""
        with self._lock:
            if self.session is session:
                self.session = None

    def hello_failed(self, greeter: GrpcCall, error: CourierError) -> None:
        """Fails those that waited for this hello; the call itself goes on."""
        with self._lock:
            waiting = self._greetings.leave(greeter)
        for call in waiting:
            call.fail_as(error)

    def forget(self, call: GrpcCall, outcome: Reply | Exception) -> None:
        """Drops a call that has ended, and tells those that waited for its hello."""
        with self._lock:
            self._pending.discard(call)
            waiting = self._greetings.leave(call)
            closed = self._closed
        is_own = isinstance(outcome, CallTimeoutError | CallCancelledError)
        for other in waiting:
            if isinstance(outcome, CourierError) and (closed or not is_own):
                other.fail_as(outcome)
            else:
                other.advance()

    def stop_waiting(self) -> None:
        with self._lock:
            self.waits = False
            greeters = self._greetings.greeters()
        for greeter in greeters:
            # Those that wait for its hello fail with it.
            greeter.fail_as(
                ServerUnreachableError(f"{self.options.address}: no server answers any more")
            )

    def close(self) -> None:
        with self._lock:
            self._closed = True
            pending = list(self._pending)
        for call in pending:
            call.cancel()
        self._channel.close()
