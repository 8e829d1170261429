"""The lane over gRPC: complete, and slower than what will stand beside it."""

import os
import threading
import weakref
from typing import Any

import grpc

from courier._grpc.client_call import GrpcCall
from courier._grpc.client_session import ClientSession
from courier._grpc.client_stream import Deadline
from courier._grpc.interrupts import interrupts_deferred
from courier._grpc.wire import COMMON_OPTIONS, SERVICE
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
    # A server that comes back is found within half a second (the default is minutes).
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
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
            _grpc_target(options.address), options=channel_options, compression=compression
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
        #: The call that says hello for all others, which wait for it.
        self._greeter: GrpcCall | None = None
        self._waiting: list[GrpcCall] = []

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

    def may_greet(self, call: GrpcCall) -> bool:
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

    def use(self, session: ClientSession) -> None:
        """Seals later calls with this session, and those that waited for one."""
        with self._lock:
            if self.session is None:
                self.session = session
            self._greeter = None
            waiting, self._waiting = self._waiting, []
        for call in waiting:
            call.advance()

    def abandon(self, session: ClientSession | None) -> None:
        """Seals no later call with this session: the server does not know it."""
        with self._lock:
            if self.session is session:
                self.session = None

    def forget(self, call: GrpcCall, outcome: Reply | Exception) -> None:
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

    def stop_waiting(self) -> None:
        with self._lock:
            self.waits = False
            greeter = self._greeter
        if greeter is not None:
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


def _grpc_target(address: str) -> str:
    # Without a scheme, gRPC would take some host names for one.
    return f"dns:///{address}"
