"""Searches for bytes that the engine does not bear, guided by the code they reach.

Run `python -m tests.courier.fuzz_frames TARGET FINDINGS -max_total_time=60`, in an environment
with atheris; further arguments are libFuzzer's. Each kind of failure leaves one file in the folder
FINDINGS: the traceback, and the input in hex.
"""

import contextlib
import pickle
import select
import socket
import ssl
import sys
import time
import traceback
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import atheris

with atheris.instrument_imports(include=["courier"]):
    import courier
    from courier.calls import outcomes
    from courier.calls.dispatch import Dispatcher
    from courier.calls.outcomes import End, Items, Kind, Refusal, Value
    from courier.calls.records import numbers_of
    from courier.client._background_reader import BACKGROUND_READER
    from courier.client._calls import WireCall
    from courier.client._lane import Lane
    from courier.client._link import Link
    from courier.client.options import ClientOptions
    from courier.server._caller import ReceivedCall, ServedConnection
    from courier.server.unproven import UnprovenPeer, Way
    from courier.threads.handler_pool import HandlerPool
    from courier.values.parcel import Parcel
    from courier.wire import frames as protocol
    from courier.wire.carrier import UnixCarrier
    from courier.wire.channel import Channel
    from courier.wire.frames import FrameReader, Region, Seals, encode
    from courier.wire.handshake import (
        HELLO_BYTES,
        LENGTH,
        MAGIC,
        PROOF_BYTES,
        ClientHandshake,
        Introduction,
        Purpose,
        ServerHandshake,
        _mac,
        _session_key,
        _veil,
        prefix,
        read_prefix,
    )

KEY = courier.Secret(bytes(range(32)))
REFUSALS = (courier.errors.ProtocolError, courier.errors.AuthenticationError)
_KINDS = [int(kind) for kind in Kind]
#: What comes next is taken as it is, or made into frames that are nearly right.
_MAX_FRAMES = 12


def _map(regions: Sequence[Region]) -> list[memoryview]:
    if sum(region.size for region in regions) > 1 << 16:
        raise courier.errors.ProtocolError("too large for a test")
    return [memoryview(bytearray(region.size)) for region in regions]


def _stream(given: Any, seals: Seals | None = None) -> bytes:
    """Makes frames of the input, some of them wrong."""
    data = b""
    for _ in range(given.ConsumeIntInRange(0, _MAX_FRAMES)):
        if given.ConsumeBool():
            data += given.ConsumeBytes(given.ConsumeIntInRange(0, 80))
            continue
        kind = given.PickValueInList(_KINDS)
        number = given.ConsumeIntInRange(0, 4)
        meta = given.PickValueInList([b"value", b"items", b"later", b"", bytes(8) + b"value"])
        buffers = [memoryview(given.ConsumeBytes(8)) for _ in range(given.ConsumeIntInRange(0, 2))]
        parcel = Parcel(given.ConsumeBytes(given.ConsumeIntInRange(0, 32)), buffers)
        chunks = encode(kind, number, parcel, meta=meta, seals=seals)
        data += b"".join(bytes(chunk) for chunk in chunks)
    rest: bytes = given.ConsumeBytes(1 << 12)
    return data + rest


def frames(given: Any) -> None:
    sealed = given.ConsumeBool()
    reader = FrameReader(
        _map if given.ConsumeBool() else None, Seals(bytes(32)) if sealed else None
    )
    size = given.ConsumeIntInRange(1, 200)
    data = memoryview(_stream(given, Seals(bytes(32)) if sealed else None))
    came = 0
    try:
        while data:
            room = reader.room
            assert len(room), "no room: it would wait for ever"
            count = min(len(room), len(data), size)
            room[:count] = data[:count]
            data = data[count:]
            came += count
            for frame in reader.filled(count):
                frame_bytes = len(frame.parcel.pickle) + len(frame.meta)
                assert frame_bytes <= came, "more came out than went in"
                with contextlib.suppress(courier.errors.ProtocolError):
                    frame.method()
    except REFUSALS:
        return


def handshake(given: Any) -> None:
    which = given.ConsumeIntInRange(0, 3)
    data = given.ConsumeBytes(1 << 12)
    try:
        if which == 0:
            read_prefix(data)
        elif which == 1:
            ClientHandshake(KEY).prove(data)
        elif which == 2:
            client = ClientHandshake(KEY)
            nonce = bytes(32)
            key = _session_key(KEY, client.hello()[-32:], nonce)
            data = _veil(key, data)
            client.prove(nonce + _mac(key, b"server", client.hello()[:16] + data) + data)
        else:
            server = ServerHandshake(KEY, Introduction("ab" * 16))
            server.welcome(data[:HELLO_BYTES].ljust(HELLO_BYTES, b"\0"))
            server.check(data[HELLO_BYTES:])
            raise AssertionError("a proof out of nothing")
    except REFUSALS:
        return


class Reception:
    """Stands in for a host; all happens in one thread."""

    tls_context: ssl.SSLContext | None = None
    timing = courier.Timing()
    secret: courier.Secret | None = KEY
    is_healthy = True

    def __init__(self) -> None:
        self.dispatcher = Dispatcher()
        self.handlers = HandlerPool("fuzz", 1, 1)
        self.caller: ServedConnection | None = None
        self.gone = False
        self._steps: list[Callable[[], None]] = []

    def introduction(self) -> Introduction:
        return Introduction("ab" * 16, idempotent=("value",))

    def welcome(self, unproven: UnprovenPeer, channel: Channel) -> None:
        self.caller = ServedConnection(cast("Any", self), channel)
        self.caller.on_event(select.POLLIN)

    def redirect(self, unproven: UnprovenPeer, sock: socket.socket, data: bytes) -> None:
        assert not MAGIC.startswith(data[: len(MAGIC)]) or not data
        sock.close()
        self.gone = True

    def reject(self, unproven: UnprovenPeer) -> None:
        unproven.close()
        self.gone = True

    def forget(self, caller: ServedConnection) -> None:
        self.gone = True

    def watch(self, caller: ServedConnection, events: int) -> None:
        pass

    def run(self, received: ReceivedCall, *, is_alone: bool = False) -> None:
        caller, number, call = received.caller, received.number, received.call
        call.time_remaining()
        if call.method == "value":
            caller.answer(
                number, call, Value(Parcel(bytes(received.arguments.pickle))), at_once=True
            )
        elif call.method == "items":
            caller.answer(number, call, _items(), at_once=True)
        elif call.method != "later":
            refusal = Refusal(Kind.UNKNOWN_METHOD, call.method)
            caller.answer(number, call, refusal, at_once=True)

    def run_step(self, step: Callable[[], None]) -> None:
        self._steps.append(step)
        if len(self._steps) == 1:
            while self._steps:
                self._steps[0]()
                self._steps.pop(0)


class _Items(Items):
    def __init__(self) -> None:
        self._left = 3
        self._closed = False

    def next_item(self) -> Any:
        assert not self._closed
        self._left -= 1
        return Value(Parcel(bytes(700_000))) if self._left >= 0 else End()

    def close(self) -> None:
        self._closed = True


def _items() -> Items:
    return _Items()


def _pour(sock: socket.socket, data: bytes, take: Callable[[], object]) -> None:
    sock.setblocking(False)
    view = memoryview(data)
    while view:
        try:
            view = view[sock.send(view[:3_000]) :]
        except BlockingIOError:
            pass
        except OSError:
            return
        take()
        with contextlib.suppress(OSError):
            while sock.recv(1 << 18):
                pass


def guest(given: Any) -> None:
    """A server, from the first byte on; with a proof, also behind that."""
    ours, theirs = socket.socketpair()
    reception = Reception()
    way = given.PickValueInList(list(Way))
    someone = UnprovenPeer(cast("Any", reception), theirs, "x", way, on_welcome=lambda: None)

    def take() -> None:
        if reception.caller is not None:
            reception.caller.on_event(select.POLLIN | select.POLLOUT)
        elif not reception.gone:
            someone.on_event(select.POLLIN)

    with ours:
        if given.ConsumeBool():
            client = ClientHandshake(KEY)
            ours.sendall(prefix(Purpose.CALLS) + client.hello())
            take()
            welcome = ours.recv(1 << 16)
            proof, _, _ = client.prove(welcome[LENGTH.size :])
            if given.ConsumeIntInRange(0, 7) == 0:
                proof = given.ConsumeBytes(PROOF_BYTES)
            _pour(ours, proof + _stream(given), take)
        elif given.ConsumeBool():
            _pour(ours, prefix(Purpose.CALLS) + given.ConsumeBytes(500), take)
            assert reception.caller is None
        else:
            _pour(ours, given.ConsumeBytes(500), take)
            assert reception.caller is None
    take()
    if reception.caller is not None:
        reception.caller.hang_up()
    someone.close()


def link(given: Any) -> None:
    """A client whose server has proved itself, and then says anything."""
    ours, theirs = socket.socketpair()
    channel = Channel(UnixCarrier(ours, "x"), bytes(32), bytes(32))
    lane = Lane(ClientOptions("127.0.0.1:1", KEY, None, False, False, None, 20.0))
    connected = Link(channel, frozenset({"value"}), lambda _: None, BACKGROUND_READER)
    numbers = numbers_of(None, "server", "value")
    calls = [
        WireCall(lane, "value" if n else "other", Parcel(b""), None, numbers, is_shared=n == 2)
        for n in range(3)
    ]
    for call in calls:
        call.send(connected, at_once=True)
    with theirs:
        _pour(theirs, _stream(given), connected.read_now)
    connected.read_now()
    connected.fail("it is over")
    for call in calls:
        assert call.is_settled, "a call that nobody answers any more"
        with contextlib.suppress(courier.CourierError):
            outcome = call.wait()
            if isinstance(outcome, Items):
                while not isinstance(outcome.next_item(), End):
                    pass
                outcome.close()
    assert channel.is_closed


def _no_pickle(data: object, **_: object) -> object:
    raise ValueError(f"{len(memoryview(data))} bytes of no pickle")  # type: ignore[arg-type]


TARGETS = {target.__name__: target for target in (frames, handshake, guest, link)}


def main() -> None:
    target, findings = TARGETS[sys.argv[1]], Path(sys.argv[2])
    findings.mkdir(parents=True, exist_ok=True)
    # What is fuzzed must not become code.
    harmless: Any = types.SimpleNamespace(loads=_no_pickle, dumps=pickle.dumps)
    for module in (outcomes, protocol):
        vars(module)["pickle"] = harmless
    seen: set[str] = set()

    def run(data: bytes) -> None:
        began, story = time.monotonic(), "it took long"
        try:
            target(atheris.FuzzedDataProvider(data))
        except Exception as error:  # noqa: BLE001 - each is a finding
            story = traceback.format_exc()
            last = traceback.extract_tb(error.__traceback__)[-1]
            name = (
                f"{target.__name__}-{type(error).__name__}-{Path(last.filename).stem}-{last.lineno}"
            )
        else:
            if time.monotonic() - began < 5.0:
                return
            name = f"{target.__name__}-slow"
        if name not in seen:
            seen.add(name)
            (findings / f"{name}.txt").write_text(f"{story}\n{data.hex()}\n")

    atheris.Setup([sys.argv[0], *sys.argv[3:]], run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
