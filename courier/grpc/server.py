"""The front door: a gRPC server that hands proven calls to a dispatcher.

It runs in an event loop, so that a client that has only begun a request holds no thread.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import itertools
import os
import shutil
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from courier._proto import courier_pb2 as pb
from courier.calls.context import CallContext
from courier.calls.dispatch import Dispatcher
from courier.calls.outcomes import Answer, End, Failure, Given, Items, Kind, Later, Refusal, Value
from courier.errors import AuthenticationError, CourierError, ProtocolError, ServerBusyError
from courier.grpc import _wire
from courier.grpc._sessions import SEAL_KEY, Sessions
from courier.server.host import ConnectionServer
from courier.server.relay import GrpcRelay
from courier.server.unproven import Way
from courier.values.parcel import Parcel
from courier.values.texts import shortened
from courier.wire.place import ABSTRACT
from courier.wire.secret import SessionKey
from courier.wire.tls import TlsCredentials

#: Seconds that an announced reply waits for its client to fetch it.
_PARKED_S = 60.0
#: Seconds between two checks of a stop whether all calls have their answers.
_LOOK_S = 0.02
_OPTIONS = (*_wire.COMMON_OPTIONS, ("grpc.so_reuseport", 0))

_STOPS = "the server stops"
_CODES: dict[type[CourierError], grpc.StatusCode] = {
    AuthenticationError: grpc.StatusCode.UNAUTHENTICATED,
    ProtocolError: grpc.StatusCode.INVALID_ARGUMENT,
    ServerBusyError: grpc.StatusCode.RESOURCE_EXHAUSTED,
}

R = TypeVar("R")

Reply = tuple[pb.ReplyHead, Parcel | None]


@dataclass(slots=True, eq=False)
class _Parked:
    session: bytes
    what: Reply | Items
    call: CallContext
    expiry: asyncio.TimerHandle


class FrontDoor(grpc.GenericRpcHandler):
    """Speaks gRPC. For the thread that runs its event loop. Started and stopped once."""

    def __init__(
        self, engine: ConnectionServer, relay: GrpcRelay, tls: TlsCredentials | None
    ) -> None:
        """Listens inside of this process, where `relay` connects; serves from `start` on."""
        self._dispatcher = engine.dispatcher
        self._handlers = engine.handlers
        self._engine = engine
        self._relay = relay
        self._loop = asyncio.get_running_loop()
        is_protected = engine.secret is not None or tls is not None
        self._sessions = Sessions(engine.secret, is_protected=is_protected)
        self._parked: dict[bytes, _Parked] = {}
        #: Calls whose answers are not sent yet.
        self._open: set[Any] = set()
        #: Our ends of the sockets for streams of our own clients.
        self._streams: set[socket.socket] = set()
        self._stopping = False
        self._health = health.aio.HealthServicer()
        # Kept, because a grpc server without a reference shuts down silently.
        self._server = grpc.aio.server(options=_OPTIONS)
        self._server.add_generic_rpc_handlers((self._own_service(), self))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._bind(tls)

    def _bind(self, tls: TlsCredentials | None) -> None:
        """Listens at a socket to which no other process can connect, past the relay."""
        if not ABSTRACT:
            self._port = self._add_port("127.0.0.1:0", tls)
            return
        folder = tempfile.mkdtemp(prefix="courier-")
        try:
            # By a descriptor, because the path of a socket has at most 107 bytes.
            descriptor = os.open(folder, os.O_PATH)
            try:
                self._add_port(f"unix:/proc/self/fd/{descriptor}/grpc", tls)
            finally:
                os.close(descriptor)
            self._socket = os.open(f"{folder}/grpc", os.O_PATH)
        finally:
            shutil.rmtree(folder)

    def _add_port(self, address: str, tls: TlsCredentials | None) -> int:
        if tls is None:
            return self._server.add_insecure_port(address)
        credentials = grpc.ssl_server_credentials(
            [(tls.key, tls.certificate)], tls.authority, require_client_auth=True
        )
        return self._server.add_secure_port(address, credentials)

    def connect(self) -> tuple[socket.socket, str]:
        """Returns a connection to gRPC, and its name in `ServicerContext.peer`."""
        sock = socket.socket(socket.AF_UNIX if ABSTRACT else socket.AF_INET, socket.SOCK_STREAM)
        try:
            if not ABSTRACT:
                sock.connect(("127.0.0.1", self._port))
                return sock, f"ipv4:127.0.0.1:{sock.getsockname()[1]}"
            sock.bind("")  # the system chooses a name
            sock.connect(f"/proc/self/fd/{self._socket}")
            return sock, f"unix-abstract:{sock.getsockname()[1:].decode()}"
        except BaseException:
            sock.close()
            raise

    def service(self, handler_call_details: Any) -> Any:
        """Finds the method of the object that answers another service; more may be bound later."""
        path: str = handler_call_details.method
        name = self._dispatcher.method_of_path(path)
        if name is None:
            return None
        answer = functools.partial(self._serve_other, name, path)
        return grpc.unary_unary_rpc_method_handler(self._guarded(answer))

    def _own_service(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            _wire.SERVICE,
            {
                "Hello": grpc.unary_unary_rpc_method_handler(self._guarded(self._hello)),
                "Call": grpc.unary_unary_rpc_method_handler(self._guarded(self._call)),
                "Send": grpc.stream_unary_rpc_method_handler(self._guarded(self._send)),
                "Fetch": grpc.unary_stream_rpc_method_handler(self._guarded(self._fetch)),
                "Connect": grpc.stream_stream_rpc_method_handler(self._guarded(self._connect)),
            },
        )

    async def start(self) -> None:
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        self._stopping = True
        await self._health.enter_graceful_shutdown()
        give_up_at = time.monotonic() + grace_s
        was_idle = False
        while (left := give_up_at - time.monotonic()) > 0:
            await asyncio.sleep(min(left, _LOOK_S))
            # Streams last until their clients close them.
            if self._engine.is_idle:
                self._end_streams()
            # Checked twice, so that a new watcher gets the state.
            if not self._open and was_idle:
                break
            was_idle = not self._open
        # Only once, without a grace: a second call during the grace crashes the process.
        await self._server.stop(None)
        for ticket in list(self._parked):
            self._discard(self._unpark(ticket))
        if ABSTRACT:
            os.close(self._socket)

    def _end_streams(self) -> None:
        """Ends streams without calls, after all that the engine has sent already."""
        for outer in self._streams:
            with contextlib.suppress(OSError):  # the peer has ended it
                outer.shutdown(socket.SHUT_RD)

    async def set_healthy(self, healthy: bool) -> None:
        states = health_pb2.HealthCheckResponse
        state = states.SERVING if healthy else states.NOT_SERVING
        for service in ("", _wire.SERVICE):
            await self._health.set(service, state)

    def _guarded(
        self, answer: Callable[[Any, Any], Awaitable[R]]
    ) -> Callable[[Any, Any], Awaitable[R]]:
        """Turns our errors into statuses; a stranger gets only a short text."""

        async def guarded(request: Any, context: Any) -> R:
            if self._stopping:
                await context.abort(grpc.StatusCode.UNAVAILABLE, _STOPS)
            self._open.add(context)
            context.add_done_callback(self._open.discard)
            try:
                return await answer(request, context)
            except CourierError as error:
                # UNKNOWN: the method of another service has raised.
                code, text = _CODES.get(type(error), grpc.StatusCode.UNKNOWN), str(error)
            except asyncio.CancelledError:
                if not self._stopping:
                    raise  # the client has left
                code, text = grpc.StatusCode.UNAVAILABLE, _STOPS
            await context.abort(code, text)
            raise AssertionError("abort always raises")

        return guarded

    async def _hello(self, request: bytes, _: Any) -> bytes:
        return self._sessions.hello(_wire.parse(pb.HelloRequest, request)).SerializeToString()

    def _admit(self, message: pb.Sealed, context: Any) -> tuple[pb.RequestHead, SessionKey]:
        head, key = self._sessions.open(message)
        self._relay.prove(context.peer())
        return head, key

    async def _call(self, request: bytes, context: Any) -> bytes:
        message = _wire.parse(pb.Sealed, request)
        head, key = self._admit(message, context)
        return await self._answer(head, key, [_wire.inside(message)], context)

    async def _send(self, pieces: AsyncIterator[bytes], context: Any) -> bytes:
        opening = await anext(pieces, None)
        if opening is None:
            raise ProtocolError("an empty stream")
        message = _wire.parse(pb.Piece, opening).opening
        head, key = self._admit(message, context)
        received = [await _wire.receive(message, head.arguments, pieces)]
        if await anext(pieces, None) is not None:
            raise ProtocolError("the peer sent more bytes than it had announced")
        return await self._answer(head, key, received, context)

    async def _answer(
        self, head: pb.RequestHead, key: SessionKey, received: list[Parcel], context: Any
    ) -> bytes:
        """Runs a method; takes its arguments out of the list, so that only the step holds them."""
        call = self._begin(context, head.method)
        outcome: Reply | Items | Later | None = None
        try:
            outcome = await self._handled(
                functools.partial(_run, self._dispatcher, head, received.pop(), call)
            )
            if isinstance(outcome, Later):
                outcome = _describe_outcome(await _settled(outcome))
        finally:
            if not isinstance(outcome, Items):  # a generator's call ends with its items
                call.end()
        if isinstance(outcome, Items):
            ticket = self._park(head.session, outcome, call)
            reply, parcel = pb.ReplyHead(kind=pb.ReplyHead.GENERATOR, ticket=ticket), None
        else:
            reply, parcel = outcome
            if parcel is not None and not _wire.fits_inline(parcel):
                ticket = self._park(head.session, outcome, call)
                reply, parcel = pb.ReplyHead(kind=pb.ReplyHead.LARGE, ticket=ticket), None
        return _seal_reply(reply, parcel, key, head.sequence).SerializeToString()

    async def _handled(self, step: Callable[[], R]) -> R:
        running = self._handlers.try_submit(step)
        del step
        if running is None:
            raise ServerBusyError("the queue is full")
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            running.add_done_callback(self._close_unwanted)
            raise

    async def _serve_other(self, name: str, path: str, request: bytes, context: Any) -> bytes:
        metadata = dict(context.invocation_metadata())
        sequence, key = self._sessions.open_service(path, request, metadata)
        self._relay.prove(context.peer())
        reply = await self._call_other(name, path, request, context)
        seal = key.seal_service(b"reply", path, sequence, reply)
        context.set_trailing_metadata(((SEAL_KEY, seal),))
        return reply

    async def _call_other(self, name: str, path: str, request: bytes, context: Any) -> bytes:
        arguments = (path.rpartition("/")[2], request)
        call = self._begin(context, name)
        try:
            outcome: Any = await self._handled(
                lambda: self._dispatcher.run_shared(name, arguments, {}, call)
            )
            if isinstance(outcome, Later):
                outcome = await _settled(outcome)
        finally:
            call.end()
        if isinstance(outcome, Given) and isinstance(outcome.value, bytes):
            return outcome.value
        if isinstance(outcome, Failure):
            raise CourierError(_sendable(f"{outcome.report.type_name}: {outcome.report.message}"))
        if isinstance(outcome, Items):
            self._close(outcome)
        raise CourierError(f"{path} is answered by {name}, which has not returned bytes")

    def _begin(self, context: Any, method: str) -> CallContext:
        # A call without a deadline has one in the far future, or none, depending on the version.
        remaining: float | None = context.time_remaining()
        timeout_s = remaining if remaining is not None and remaining < 1e8 else None
        call = CallContext(method, self._relay.peer_of(context.peer()), timeout_s)
        call.came = time.perf_counter()
        self._engine.foreign.add(call)
        call.on_end(lambda: self._engine.foreign.discard(call))
        return call

    def _park(self, session: bytes, what: Reply | Items, call: CallContext) -> bytes:
        ticket = os.urandom(16)
        expiry = self._loop.call_later(
            _PARKED_S, lambda: self._discard(self._unpark(ticket))
        )  # its caller cancelled before the answer came
        self._parked[ticket] = _Parked(session, what, call, expiry)
        return ticket

    def _unpark(self, ticket: bytes) -> _Parked:
        parked = self._parked.pop(ticket)
        parked.expiry.cancel()
        return parked

    def _discard(self, parked: _Parked) -> None:
        parked.call.end()
        if isinstance(parked.what, Items):
            self._close(parked.what)

    def _close(self, items: Items) -> None:
        """Ends a generator in a thread of the handlers, because it runs code of the object."""
        self._engine.run_step(items.close)

    def _close_unwanted(self, running: "concurrent.futures.Future[Any]") -> None:
        if not running.cancelled() and running.exception() is None:
            outcome = running.result()
            if isinstance(outcome, Items):
                self._close(outcome)
            elif isinstance(outcome, Later):
                outcome.then(lambda _: None)  # it counts until it has ended

    async def _fetch(self, request: bytes, context: Any) -> None:
        head, key = self._admit(_wire.parse(pb.Sealed, request), context)
        parked = self._parked.get(head.ticket)
        if parked is None or parked.session != head.session:
            raise ProtocolError("no such reply; it was fetched, or waited too long")
        self._unpark(head.ticket)
        if isinstance(parked.what, Items):
            await self._stream(parked.what, parked.call, key, head.sequence, context)
            return
        reply, parcel = parked.what
        assert parcel is not None
        del parked
        for piece in _wire.send(_seal_reply(reply, None, key, head.sequence), parcel):
            await context.write(piece)

    async def _stream(
        self, items: Items, call: CallContext, key: SessionKey, sequence: int, context: Any
    ) -> None:
        step: concurrent.futures.Future[Reply] | None = None
        try:
            for position in itertools.count():
                # One step is one run of a handler, so that an open stream holds no thread of the
                # pool while its reader is busy.
                step = self._handlers.submit(lambda: _describe_outcome(items.next_item()))
                reply, parcel = await asyncio.wrap_future(step)
                reply.item = position
                if parcel is None or _wire.fits_inline(parcel):
                    message = _seal_reply(reply, parcel, key, sequence)
                    await context.write(pb.Piece(opening=message).SerializeToString())
                else:
                    for piece in _wire.send(_seal_reply(reply, None, key, sequence), parcel):
                        await context.write(piece)
                if reply.kind != pb.ReplyHead.VALUE:
                    return
        finally:
            call.end()
            if step is not None:
                step.add_done_callback(lambda _: self._close(items))

    async def _connect(self, pieces: AsyncIterator[bytes], context: Any) -> None:
        """Carries the frames of one of our own clients: the engine sees an ordinary socket."""
        outer, inner = socket.socketpair()
        outer.setblocking(False)
        name = context.peer()

        def welcomed() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._relay.prove, name)

        self._engine.admit(inner, self._relay.peer_of(name), Way.GRPC, welcomed)
        self._streams.add(outer)
        with outer, contextlib.suppress(OSError):
            bringing = self._loop.create_task(self._bring(pieces, outer))
            try:
                while piece := await self._loop.sock_recv(outer, _wire.PIECE_BYTES):
                    await context.write(piece)
            finally:
                self._streams.discard(outer)
                bringing.cancel()
                await asyncio.wait([bringing])

    async def _bring(self, pieces: AsyncIterator[bytes], outer: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the engine has ended it
            async for piece in pieces:
                await self._loop.sock_sendall(outer, piece)
        with contextlib.suppress(OSError):
            outer.shutdown(socket.SHUT_RDWR)


def _run(
    dispatcher: Dispatcher, head: pb.RequestHead, arguments: Parcel, call: CallContext
) -> Reply | Items | Later:
    if call.cancelled:
        raise ProtocolError("cancelled while it waited")
    outcome = dispatcher.run(head.method, _wire.checked(arguments, head.arguments), call)
    return outcome if isinstance(outcome, Items | Later) else _describe_outcome(outcome)


async def _settled(outcome: Later) -> Answer:
    settled: concurrent.futures.Future[Answer] = concurrent.futures.Future()

    def settle(answer: Answer) -> None:
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # the caller has given up
            settled.set_result(answer)

    outcome.then(settle)
    return await asyncio.wrap_future(settled)


def _describe_outcome(outcome: Answer | End) -> Reply:
    """Returns a reply; its kind has the same name as in frames."""
    kind = Kind(outcome.kind).name
    if isinstance(outcome, Value):
        return pb.ReplyHead(kind=kind, parcel=_wire.describe(outcome.parcel)), outcome.parcel
    if isinstance(outcome, Failure):
        report = outcome.report
        reply = pb.ReplyHead(
            kind=kind,
            type_name=report.type_name,
            text=_sendable(report.message),
            traceback=_sendable(report.traceback),
        )
        if report.parcel is not None:
            reply.parcel.CopyFrom(_wire.describe(report.parcel))
        return reply, report.parcel
    text = _sendable(outcome.text) if isinstance(outcome, Refusal) else ""
    return pb.ReplyHead(kind=kind, text=text), None


def _sendable(text: str) -> str:
    """Returns text for protobuf: without lone surrogates, and limited in length."""
    return shortened(text).encode("utf-8", "replace").decode()


def _seal_reply(
    reply: pb.ReplyHead, parcel: Parcel | None, key: SessionKey, sequence: int
) -> pb.Sealed:
    reply.sequence = sequence
    head = reply.SerializeToString()
    return _wire.sealed(head, key.seal_reply(head), parcel)
