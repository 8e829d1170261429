"""The front door: a gRPC server that hands proven calls to a dispatcher."""

import concurrent.futures
import contextlib
import functools
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from courier import _dispatch as outcomes
from courier._context import CallContext
from courier._dispatch import Answer, Dispatcher, Items, Outcome
from courier._engine.guest import Way
from courier._engine.host import Host
from courier._engine.reports import shortened
from courier._grpc.sessions import Sessions
from courier._grpc.wire import (
    COMMON_OPTIONS,
    PIECE_BYTES,
    SERVICE,
    describe,
    fits_inline,
    inline_parcel,
    parse,
    receive,
    sealed,
    send,
)
from courier._parcel import Parcel
from courier._pool import HandlerPool, overflowing
from courier._proto import courier_pb2 as pb
from courier._secret import Secret, SessionKey
from courier._timing import Timing
from courier._tls import TlsCredentials
from courier.errors import AuthenticationError, ProtocolError

#: How long an announced reply waits for its client to fetch it.
_PARKED_S = 60.0
#: Hellos, health checks and refusals, none of which blocks.
_CONTROL_THREADS = 16
#: Each large message under way and each open generator holds one; they mostly wait.
_TRANSFER_THREADS = 4096
#: How often a stop looks whether all have their answers.
_LOOK_S = 0.1

P = ParamSpec("P")
R = TypeVar("R")

Reply = tuple[pb.ReplyHead, Parcel | None]


@dataclass(slots=True)
class _Parked:
    """A reply that was announced and waits to be fetched by its session."""

    session: bytes
    what: Reply | Items
    call: CallContext
    expires_at: float


class _QueueFullError(Exception):
    """The call was not run, since too many wait already."""


class FrontDoor:
    """Listens at one address. Started and stopped once."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        handlers: HandlerPool,
        secret: Secret | None,
        tls: TlsCredentials | None,
        engine: Host,
        name: str | None,
        timing: Timing,
    ) -> None:
        """Listens inside of this process; serves from `start` on.

        Args:
            dispatcher: Runs methods.
            handlers: Where they run.
            secret: What clients must prove.
            tls: Certificates, if clients need them.
            engine: Takes the streams of our own clients.
            name: Of an abstract unix socket to listen at; None is a port of loopback.
            timing: How long to wait.
        """
        self._dispatcher = dispatcher
        self._engine = engine
        self._timing = timing

        self._sessions = Sessions(secret)
        self._lock = threading.Lock()
        self._parked: dict[bytes, _Parked] = {}
        #: Calls whose answer has not left.
        self._open: set[grpc.ServicerContext] = set()
        #: Our ends of the sockets that stand for streams of our own clients.
        self._streams: set[socket.socket] = set()
        self._reaper: threading.Timer | None = None
        self._stopped = False
        self._control = HandlerPool("courier-control", _CONTROL_THREADS, 0)
        self._transfers = HandlerPool("courier-transfer", _TRANSFER_THREADS, 0)
        self._handlers = _HandlerExecutor(handlers, self._control)
        self._health = health.HealthServicer()
        options = (
            *COMMON_OPTIONS,
            ("grpc.so_reuseport", 0),
            # Above 1,000 waiting calls the defaults drop some at random; our queue decides.
            ("grpc.server.max_pending_requests", 1_000_000),
            ("grpc.server.max_pending_requests_hard_limit", 2_000_000),
        )
        # Held: a grpc server that nobody refers to shuts down silently.
        self._server = grpc.server(self._control, options=options)
        self._server.add_generic_rpc_handlers((self._service(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        #: Where to connect to it.
        self.inner_address: Any
        if name is not None:
            self._bind(f"unix-abstract:{name}", tls)
            self.inner_address = f"\0{name}"
        else:
            self.inner_address = ("127.0.0.1", self._bind("127.0.0.1:0", tls))

    def _bind(self, listen: str, tls: TlsCredentials | None) -> int:
        if tls is None:
            return self._server.add_insecure_port(listen)
        credentials = grpc.ssl_server_credentials(
            [(tls.key, tls.certificate)], tls.authority, require_client_auth=True
        )
        return self._server.add_secure_port(listen, credentials)

    def _service(self) -> grpc.GenericRpcHandler:
        def call(request: bytes, context: grpc.ServicerContext) -> bytes:
            return self._guarded(context, functools.partial(self._call, request, context))

        def hello(request: bytes, context: grpc.ServicerContext) -> bytes:
            return self._guarded(context, functools.partial(self._hello, request))

        def send_pieces(pieces: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
            return self._guarded(context, functools.partial(self._send, pieces, context))

        def fetch(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
            parked, key, sequence = self._guarded(
                context, functools.partial(self._find_parked, request)
            )
            return self._fetch(parked, key, sequence, context)

        def connect(pieces: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            return self._connect(pieces, context)

        # Calls run where there is a thread for them, and nothing else runs there, so that a
        # health check passes however busy the handlers are. Known to grpc since 1.19.
        call.experimental_thread_pool = self._handlers  # type: ignore[attr-defined]
        send_pieces.experimental_thread_pool = self._transfers  # type: ignore[attr-defined]
        fetch.experimental_thread_pool = self._transfers  # type: ignore[attr-defined]
        connect.experimental_thread_pool = self._transfers  # type: ignore[attr-defined]
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Hello": grpc.unary_unary_rpc_method_handler(hello),
                "Call": grpc.unary_unary_rpc_method_handler(call),
                "Send": grpc.stream_unary_rpc_method_handler(send_pieces),
                "Fetch": grpc.unary_stream_rpc_method_handler(fetch),
                "Connect": grpc.stream_stream_rpc_method_handler(connect),
            },
        )

    def start(self) -> None:
        """Begins to serve."""
        self._server.start()
        self.set_healthy(True)

    def stop(self, grace_s: float) -> list[str]:
        """Stops serving; returns the names of threads that did not end in time."""
        self._health.enter_graceful_shutdown()
        give_up_at = time.monotonic() + grace_s
        pools = (self._transfers, self._control)
        stopped = self._server.stop(grace_s)
        was_idle = False
        while not stopped.wait(_LOOK_S) and time.monotonic() < give_up_at:
            # Streams last as long as their clients, who hang up when they please.
            if self._engine.is_idle:
                self._end_streams()
            # Seen twice, so that who has just come is let in. Older grpc would wait until clients
            # hang up, and those that have no call at the moment do not even notice.
            is_idle = not self._open and all(pool.is_idle for pool in (*pools, self._handlers))
            if is_idle and was_idle:
                break
            was_idle = is_idle
        self._server.stop(None)
        stopped.wait(1.0)
        self._empty_parked()
        give_up_at = max(give_up_at, time.monotonic() + self._timing.epilogue_s)
        for pool in pools:
            pool.stop(0.0)  # so that none uses up the time of the others
        return [
            name for pool in pools for name in pool.stop(max(0.0, give_up_at - time.monotonic()))
        ]

    def _note(self, context: grpc.ServicerContext) -> None:
        """Counts a call until its answer has left, which is later than the end of its handler."""
        with self._lock:
            self._open.add(context)
        if not context.add_callback(lambda: self._forget(context)):
            self._forget(context)

    def _forget(self, context: grpc.ServicerContext) -> None:
        with self._lock:
            self._open.discard(context)

    def _end_streams(self) -> None:
        """Ends streams that carry no call any more, after what the engine has sent already."""
        with self._lock:
            for outer in self._streams:
                with contextlib.suppress(OSError):  # the peer has ended it
                    outer.shutdown(socket.SHUT_RD)

    def _empty_parked(self) -> None:
        with self._lock:
            self._stopped = True
            parked = list(self._parked.values())
            self._parked.clear()
            reaper = self._reaper
        if reaper is not None:
            reaper.cancel()
        for entry in parked:
            _discard(entry)

    def set_healthy(self, healthy: bool) -> None:
        """Sets what the standard health service answers, overall and for this service."""
        states = health_pb2.HealthCheckResponse
        state = states.SERVING if healthy else states.NOT_SERVING
        for service in ("", SERVICE):
            self._health.set(service, state)

    def _guarded(self, context: grpc.ServicerContext, answer: Callable[[], R]) -> R:
        """Turns our errors into statuses; what a stranger learns is only a short text."""
        self._note(context)
        try:
            if overflowing():
                raise _QueueFullError
            return answer()
        except _QueueFullError:
            code, text = grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full"
        except AuthenticationError as error:
            code, text = grpc.StatusCode.UNAUTHENTICATED, str(error)
        except ProtocolError as error:
            code, text = grpc.StatusCode.INVALID_ARGUMENT, str(error)
        except concurrent.futures.CancelledError:
            code, text = grpc.StatusCode.UNAVAILABLE, "the server stops"
        context.abort(code, text)
        raise AssertionError("abort always raises")

    def _hello(self, request: bytes) -> bytes:
        names = self._dispatcher.idempotent_names()
        return self._sessions.hello(parse(pb.HelloRequest, request), names).SerializeToString()

    def _call(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        message = parse(pb.Sealed, request)
        head, key = self._sessions.open(message)
        arguments = inline_parcel(message, head.arguments)
        call = _watch(context, head.method)
        if not context.is_active():
            raise ProtocolError("cancelled while it waited")
        outcome = _settled(self._dispatcher.run(head.method, arguments, call), call)
        return self._answer(head, key, outcome, call)

    def _send(self, pieces: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        opening = next(pieces, None)
        if opening is None:
            raise ProtocolError("an empty stream")
        message = parse(pb.Piece, opening).opening
        head, key = self._sessions.open(message)
        arguments = receive(message, head.arguments, pieces)
        if next(pieces, None) is not None:
            raise ProtocolError("the peer sent more bytes than it had announced")
        call = _watch(context, head.method)
        running = self._handlers.submit(_run_if_wanted, self._dispatcher, head, arguments, call)
        del arguments
        return self._answer(head, key, _settled(running.result(), call), call)

    def _answer(
        self, head: pb.RequestHead, key: SessionKey, outcome: Answer, call: CallContext
    ) -> bytes:
        reply, parcel = _describe_outcome(outcome)
        if isinstance(outcome, Items):
            call.continue_as_generator()
            reply.ticket = self._park(head.session, outcome, call)
        elif parcel is not None and not fits_inline(parcel):
            ticket = self._park(head.session, (reply, parcel), call)
            reply, parcel = pb.ReplyHead(kind=pb.ReplyHead.LARGE, ticket=ticket), None
        return _seal_reply(reply, parcel, key, head.sequence).SerializeToString()

    def _park(self, session: bytes, what: Reply | Items, call: CallContext) -> bytes:
        ticket = os.urandom(16)
        entry = _Parked(session, what, call, time.monotonic() + _PARKED_S)
        with self._lock:
            is_wanted = not (self._stopped or call.cancelled)
            if is_wanted:
                self._parked[ticket] = entry
                self._reap_later()
        if not is_wanted:
            _discard(entry)
        return ticket

    def _reap_later(self) -> None:
        if self._reaper is None:
            self._reaper = threading.Timer(_PARKED_S, self._reap)
            self._reaper.name = "courier-reaper"
            self._reaper.daemon = True
            self._reaper.start()

    def _reap(self) -> None:
        """Drops what nobody fetched: its caller gave up while the answer was on its way."""
        now = time.monotonic()
        with self._lock:
            late = [name for name, entry in self._parked.items() if entry.expires_at <= now]
            expired = [self._parked.pop(name) for name in late]
            self._reaper = None
            if self._parked and not self._stopped:
                self._reap_later()
        for entry in expired:
            _discard(entry)

    def _find_parked(self, request: bytes) -> tuple[_Parked, SessionKey, int]:
        message = parse(pb.Sealed, request)
        head, key = self._sessions.open(message)
        with self._lock:
            parked = self._parked.get(head.ticket)
            if parked is None or parked.session != head.session:
                raise ProtocolError("no such reply; it was fetched, or waited too long")
            del self._parked[head.ticket]
        return parked, key, head.sequence

    def _connect(self, pieces: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Carries the frames of one of our own clients: the engine sees a socket like any other."""
        outer, inner = socket.socketpair()
        with self._lock:
            self._streams.add(outer)
        self._engine.admit(inner, context.peer(), Way.GRPC)

        def bring() -> None:
            with contextlib.suppress(Exception):  # the stream, or the engine, has ended
                for piece in pieces:
                    outer.sendall(piece)
            with contextlib.suppress(OSError):
                outer.shutdown(socket.SHUT_RDWR)

        bringer = self._transfers.submit(bring)
        context.add_callback(lambda: _shut(outer))
        try:
            while piece := outer.recv(PIECE_BYTES):
                yield piece
        except OSError:
            return
        finally:
            _shut(outer)
            with self._lock:
                self._streams.discard(outer)
            # Not waited for: a client that sends nothing is heard until it learns of this end.
            bringer.add_done_callback(lambda _: outer.close())

    def _fetch(
        self, parked: _Parked, key: SessionKey, sequence: int, context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        if not isinstance(parked.what, Items):
            reply, parcel = parked.what
            assert parcel is not None
            yield from send(_seal_reply(reply, None, key, sequence), parcel)
            return
        if not context.add_callback(parked.call.end):
            parked.call.end()
        try:
            yield from self._stream(parked.what, key, sequence, context)
        except concurrent.futures.CancelledError:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the server stops")
        finally:
            _discard(parked)

    def _stream(
        self, items: Items, key: SessionKey, sequence: int, context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        for position in itertools.count():
            # One step is one run of a handler, so that an open stream does not hold a thread
            # of the pool while its reader thinks.
            outcome = self._handlers.submit_anyway(items.next_item).result()
            reply, parcel = _describe_outcome(outcome)
            reply.item = position
            if parcel is None or fits_inline(parcel):
                message = _seal_reply(reply, parcel, key, sequence)
                yield pb.Piece(opening=message).SerializeToString()
            else:
                yield from send(_seal_reply(reply, None, key, sequence), parcel)
            if not isinstance(outcome, outcomes.Value) or not context.is_active():
                return


class _HandlerExecutor(concurrent.futures.ThreadPoolExecutor):
    """The pool of the server's handlers, as grpc wants to see it.

    It is the base class only since grpc asks for its type; no state of it is used.
    """

    def __init__(self, handlers: HandlerPool, overflow: HandlerPool) -> None:
        self._pool = handlers
        self._overflow = overflow

    @property
    def is_idle(self) -> bool:
        """Whether no handler runs or waits."""
        return self._pool.is_idle

    def submit(
        self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> "concurrent.futures.Future[R]":
        """Runs `fn` in a thread of the pool; in another, with `overflowing()` true, if it is full."""
        return self._pool.submit_or_overflow(self._overflow, fn, *args, **kwargs)

    def submit_anyway(self, fn: Callable[[], R]) -> "concurrent.futures.Future[R]":
        """Runs the next step of what was let in before."""
        return self._pool.submit_anyway(fn)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Does nothing: the pool belongs to the server."""


def _run_if_wanted(
    dispatcher: Dispatcher, head: pb.RequestHead, arguments: Parcel, call: CallContext
) -> Outcome:
    if overflowing():
        raise _QueueFullError
    if call.cancelled:
        raise ProtocolError("cancelled while it waited")
    return dispatcher.run(head.method, arguments, call)


def _settled(outcome: Outcome, call: CallContext) -> Answer:
    # In gRPC for Python each call holds a thread until it is answered.
    return outcome.wait(call) if isinstance(outcome, outcomes.Later) else outcome


def _watch(context: grpc.ServicerContext, method: str) -> CallContext:
    # A call without a deadline has one in the far future, or none, depending on the version.
    remaining: float | None = context.time_remaining()
    timeout_s = remaining if remaining is not None and remaining < 1e8 else None
    call = CallContext(method, context.peer(), timeout_s)
    if not context.add_callback(call.answered):
        call.end()
    return call


def _describe_outcome(outcome: Answer | outcomes.End) -> Reply:
    kinds = pb.ReplyHead
    if isinstance(outcome, outcomes.Value):
        return kinds(kind=kinds.VALUE, parcel=describe(outcome.parcel)), outcome.parcel
    if isinstance(outcome, outcomes.Failure):
        return _describe_failure(outcome)
    if isinstance(outcome, Items):
        return kinds(kind=kinds.GENERATOR), None
    if isinstance(outcome, outcomes.End):
        return kinds(kind=kinds.END), None
    if isinstance(outcome, outcomes.Unpicklable):
        return kinds(kind=kinds.UNPICKLABLE, text=_sendable(outcome.text)), None
    if isinstance(outcome, outcomes.BadArguments):
        return kinds(kind=kinds.BAD_ARGUMENTS, text=_sendable(outcome.text)), None
    return kinds(kind=kinds.UNKNOWN_METHOD, text=outcome.text), None


def _describe_failure(outcome: outcomes.Failure) -> Reply:
    report = outcome.report
    reply = pb.ReplyHead(
        kind=pb.ReplyHead.FAILURE,
        type_name=report.type_name,
        text=_sendable(report.message),
        traceback=_sendable(report.traceback),
    )
    if report.parcel is not None:
        reply.parcel.CopyFrom(describe(report.parcel))
    return reply, report.parcel


def _sendable(text: str) -> str:
    """Returns text that protobuf takes: without lone surrogates, and not without end."""
    return shortened(text).encode("utf-8", "replace").decode()


def _seal_reply(
    reply: pb.ReplyHead, parcel: Parcel | None, key: SessionKey, sequence: int
) -> pb.Sealed:
    reply.sequence = sequence
    head = reply.SerializeToString()
    return sealed(head, key.seal_reply(head), parcel)


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _discard(parked: _Parked) -> None:
    parked.call.end()
    if isinstance(parked.what, Items):
        parked.what.close()
