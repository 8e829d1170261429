"""Where pods call, and what carries their bytes: the exchange, pumps, logs, and what is told when."""

import contextlib
import errno
import itertools
import json
import math
import os
import random
import selectors
import signal
import socket
import ssl
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

import courier
from launchers._elsewhere import StopSignals
from launchers._kubernetes.exchange import Caller, Exchange, Line
from launchers._kubernetes.fleet import PodFleet, _Return
from launchers._kubernetes.order import read_trust
from launchers._kubernetes.supervise import _Pace, _Supervision
from launchers._kubernetes.timing import Timing
from launchers._trust import Authority
from launchers.host import pod as pod_module
from launchers.host.agent import _PodLog
from launchers.host.pod import MAX_GREETING_BYTES, MAY_COME_BACK, Pump, _part
from launchpad_lite._events import Start
from launchpad_lite.errors import LaunchError
from launchpad_lite.launching import NodeStatus
from launchpad_lite.testing import poll_until
from tests.launchers.pods import Pod, write_trust

PATIENT = Timing(greeting_s=300.0, part_s=60.0)


@pytest.fixture(scope="module")
def trust(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is mounted into each pod."""
    return write_trust(tmp_path_factory.mktemp("trust"))


# Who may call


@contextlib.contextmanager
def exchanging(trust: Path, *options: Any) -> Iterator[Exchange]:
    exchange = Exchange(read_trust(trust), 0, *options)
    yield exchange
    assert exchange._thread.is_alive(), "it failed"
    exchange.close()
    assert "launchpad-exchange" not in [thread.name for thread in threading.enumerate()]


@pytest.fixture
def exchange(trust: Path) -> Iterator[Exchange]:
    with exchanging(trust) as exchange:
        yield exchange


def dial(exchange: Exchange, tls: courier.TlsCredentials) -> ssl.SSLSocket:
    connection = socket.create_connection(("127.0.0.1", exchange.port), timeout=30)
    return tls.client_context().wrap_socket(connection)


def greet(exchange: Exchange, trust: Path, host: str, **fields: str) -> ssl.SSLSocket:
    """What a pod does first, without the pod."""
    connection = dial(exchange, read_trust(trust))
    connection.sendall(json.dumps({"host": host, **fields}).encode() + b"\n")
    return connection


def close(line: Line) -> None:
    line.terminate()
    line.wait(30)
    for stream in (line.stdin, line.stdout, line.stderr):
        assert stream is not None
        stream.close()


def say(line: Line, data: bytes) -> None:
    assert line.stdin is not None
    line.stdin.write(data)


def drain(line: Line) -> None:
    """Says that nothing more comes."""
    assert line.stdin is not None
    line.stdin.close()


def works(exchange: Exchange, trust: Path, host: str = "run-a-0") -> bool:
    """Tells whether a pod is let in."""
    line = exchange.expect(host)
    assert line.stdout is not None
    with greet(exchange, trust, host) as pod:
        say(line, b"ping")
        there = pod.recv(10)
        pod.sendall(b"pong")
        here = line.stdout.read(10)
    assert line.wait(30) == 255
    close(line)
    return (there, here) == (b"ping", b"pong")


def is_refused(connection: socket.socket) -> bool:
    connection.settimeout(30)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:  # an alert, or a reset
        return True


def test_a_pod_may_call_before_it_is_expected_and_tells_who_it_is(
    exchange: Exchange, trust: Path
) -> None:
    with greet(exchange, trust, "run-a-0", pod="run-a-0-x7", node="machine-3") as pod:
        poll_until(lambda: exchange.caller("run-a-0").node)
        assert exchange.caller("run-a-0") == Caller("run-a-0", "run-a-0-x7", "machine-3")
        line = exchange.expect("run-a-0")
        say(line, b"welcome")
        assert pod.recv(10) == b"welcome"
        close(line)
        assert pod.recv(10) == b""


def without_tls(exchange: Exchange, trust: Path) -> socket.socket:
    return socket.create_connection(("127.0.0.1", exchange.port))


def without_certificate(exchange: Exchange, trust: Path) -> socket.socket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(str(trust / "authority.pem"))
    return context.wrap_socket(socket.create_connection(("127.0.0.1", exchange.port)))


def of_another_run(exchange: Exchange, trust: Path) -> socket.socket:
    """It knows our authority, which is no secret, but has nothing of it."""
    ours, other = read_trust(trust), Authority("pods").issue("run")
    tls = courier.TlsCredentials(
        certificate=other.certificate, key=other.key, authority=ours.authority
    )
    return dial(exchange, tls)


@pytest.mark.parametrize("call", [without_tls, without_certificate, of_another_run])
def test_who_does_not_belong_to_the_run_is_refused(
    exchange: Exchange, trust: Path, call: Callable[[Exchange, Path], socket.socket]
) -> None:
    line = exchange.expect("run-a-0")
    with call(exchange, trust) as stranger:
        with contextlib.suppress(OSError):
            stranger.sendall(b'{"host": "run-a-0"}\n' * 100)
        assert is_refused(stranger)
    close(line)
    assert works(exchange, trust)


def test_a_pod_does_not_speak_with_the_supervisor_of_another_run(
    tmp_path: Path, trust: Path
) -> None:
    exchange = Exchange(Authority("pods").issue("run"), 0)
    line = exchange.expect("run-a-0")
    pod = Pod("run-a-0", tmp_path, trust, exchange.port, wait_s=0.5)
    assert pod.end() == 1
    assert "certificate verify failed" in pod.errors.read_text()
    close(line)
    exchange.close()


def test_a_greeting_that_is_none_does_no_harm(exchange: Exchange, trust: Path) -> None:
    nested, digits = (each * (MAX_GREETING_BYTES - 1) + b"\n" for each in (b"[", b"9"))
    texts = (b"\n", b"host\n", b"\xff\xfe\n", b'"run-a-0"\n')
    objects = (b'{"host": 3}\n', b'{"pod": "run-a-0"}\n')
    for greeting in (b"x" * (MAX_GREETING_BYTES + 1), *texts, *objects, nested, digits):
        with dial(exchange, read_trust(trust)) as stranger:
            stranger.sendall(greeting)
            assert is_refused(stranger), greeting[:20]
    assert works(exchange, trust)


def test_who_does_not_say_who_it_is_in_time_is_refused(trust: Path) -> None:
    with (
        exchanging(trust, Timing(greeting_s=0.5)) as exchange,
        socket.create_connection(("127.0.0.1", exchange.port)) as silent,
    ):
        # Its handshake may have taken too long already.
        with contextlib.suppress(OSError), dial(exchange, read_trust(trust)) as slow:
            slow.sendall(b'{"host": ')
            assert is_refused(slow)
        assert is_refused(silent)


def test_who_has_said_who_it_is_may_be_expected_late(trust: Path) -> None:
    now = [0.0]
    with (
        exchanging(trust, PATIENT, lambda: now[0]) as exchange,
        greet(exchange, trust, "run-b-0") as parked,
        socket.create_connection(("127.0.0.1", exchange.port)) as silent,
    ):
        poll_until(lambda: exchange._parked and exchange._strangers)
        now[0] += 301.0
        exchange.give_up("run-of-nobody")  # has it look at its clock
        assert is_refused(silent)
        line = exchange.expect("run-b-0")
        say(line, b"welcome")
        assert parked.recv(10) == b"welcome"
        close(line)


def test_when_files_run_out_the_exchange_pauses_and_goes_on(
    trust: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with exchanging(trust, Timing(exhausted_s=0.1)) as exchange:
        accept, refused = socket.socket.accept, []

        def refuse(self: socket.socket) -> Any:
            if self is exchange._listener:
                refused.append(time.monotonic())
                raise OSError(errno.EMFILE, "too many open files")
            return accept(self)

        monkeypatch.setattr(socket.socket, "accept", refuse)
        with socket.create_connection(("127.0.0.1", exchange.port)):
            poll_until(lambda: len(refused) >= 3)
        monkeypatch.undo()
        assert min(later - at for at, later in itertools.pairwise(refused)) > 0.09
        assert works(exchange, trust)


def test_what_was_said_last_arrives_though_the_pod_has_more_to_say(trust: Path) -> None:
    with exchanging(trust, PATIENT) as exchange:
        line = exchange.expect("run-a-0")
        with greet(exchange, trust, "run-a-0") as pod:
            pod.setblocking(False)
            # More than anybody takes in.
            with contextlib.suppress(ssl.SSLWantWriteError):
                while True:
                    pod.send(bytes(1 << 16))
            say(line, b"quit")
            drain(line)
            pod.setblocking(True)
            pod.settimeout(30)
            assert pod.recv(10) == b"quit"
            # An end, and no reset.
            assert pod.recv(10) == b""
            assert not line._ended.is_set()
        assert line.wait(30) == 255
        assert not exchange._parting
        close(line)


def test_a_pod_that_does_not_end_its_side_is_not_waited_for_without_end(trust: Path) -> None:
    with exchanging(trust, Timing(part_s=0.3)) as exchange:
        line = exchange.expect("run-a-0")
        with greet(exchange, trust, "run-a-0") as pod:
            drain(line)
            assert line.wait(30) == 255
            assert pod.recv(1) == b""
        close(line)


def test_a_pod_that_nobody_expects_does_no_harm(exchange: Exchange, trust: Path) -> None:
    with greet(exchange, trust, "run-of-nobody") as unknown:
        unknown.sendall(b"anything")
        assert works(exchange, trust)
    assert works(exchange, trust)


def test_strangers_that_say_nothing_do_not_keep_pods_out(trust: Path) -> None:
    with exchanging(trust, PATIENT) as exchange, contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(socket.create_connection(("127.0.0.1", exchange.port)))
        assert works(exchange, trust)


def test_a_pod_may_go_while_its_successor_comes(
    exchange: Exchange, trust: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, read = threading.Event(), Caller.read

    def read_late(line: bytes) -> Caller:
        caller = read(line)
        if caller.pod == "slow":
            released.wait(60)
        return caller

    monkeypatch.setattr(Caller, "read", staticmethod(read_late))
    tls = read_trust(trust)
    with greet(exchange, trust, "run-a-0") as old, dial(exchange, tls) as new:
        poll_until(lambda: exchange._parked)
        poll_until(lambda: any(each.is_proved for each in list(exchange._strangers)))
        with greet(exchange, trust, "run-b-0", pod="slow"):
            poll_until(lambda: any(each.greeting for each in list(exchange._strangers)))
            # While the exchange is held up; it sees both in its next look.
            new.sendall(b'{"host": "run-a-0", "pod": "new"}\n')
            old.close()
            released.set()
            poll_until(lambda: exchange.caller("run-a-0").pod == "new")
        line = exchange.expect("run-a-0")
        say(line, b"new")
        assert new.recv(10) == b"new"
        close(line)


def test_lines_that_end_while_much_comes_take_nothing_from_others(
    exchange: Exchange, trust: Path
) -> None:
    """Descriptors of a line that has ended are soon those of another one."""
    for index in range(12):
        line = exchange.expect("run-a-0")
        with greet(exchange, trust, "run-a-0") as pod:
            pod.sendall(bytes(50_000))
            line.terminate()
            other = exchange.expect(f"run-b-{index}")
            say(other, b"not lost")
            close(line)
            with greet(exchange, trust, other.host) as neighbour:
                assert neighbour.recv(10) == b"not lost"
            close(other)


def test_an_exchange_that_was_closed_expects_nobody(trust: Path) -> None:
    exchange = Exchange(read_trust(trust), 0)
    waiting = exchange.expect("run-a-0")
    exchange.close()
    exchange.close()
    late = exchange.expect("run-a-0")
    exchange.give_up("run-a-0")
    for line in (waiting, late):
        assert line.wait(1) == 255
        close(line)


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_pods_that_come_and_go_leave_nothing_behind(exchange: Exchange, trust: Path) -> None:
    assert works(exchange, trust)
    files, threads = open_files(), threading.active_count()
    for _ in range(10):
        assert works(exchange, trust)
        close(exchange.expect("run-c-0"))
        with greet(exchange, trust, "run-b-0"):
            pass
    poll_until(lambda: not exchange._parked)
    # Fewer, if what came before had not quite gone when they were counted.
    poll_until(lambda: open_files() <= files)
    assert threading.active_count() <= threads


# A pod's side


class Broken:
    """A link whose other end has gone."""

    def sendall(self, data: bytes) -> None:
        raise ConnectionResetError(errno.ECONNRESET, "it was reset")


@pytest.mark.parametrize("where", ["link", "agent"])
def test_a_pod_that_cannot_begin_may_be_followed_by_another(
    tmp_path: Path, trust: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "it is full")

    before = signal.getsignal(signal.SIGTERM)
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(pod_module, "__file__", str(trust / "pod.py"))
    monkeypatch.setattr(pod_module, "_dial", lambda *_: Broken() if where == "link" else ours)
    monkeypatch.setattr(pod_module, "subprocess", types.SimpleNamespace(Popen=refuse, PIPE=-1))
    monkeypatch.setenv("LAUNCHPAD_SUPERVISOR", "nobody:1")
    monkeypatch.setenv("LAUNCHPAD_WAIT_S", "1")
    try:
        with ours, theirs, pytest.raises(SystemExit) as caught:
            pod_module.main("")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert caught.value.code == MAY_COME_BACK


# The output of a pod


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        with contextlib.suppress(OSError):
            os.close(end)


def test_a_pods_log_says_how_much_it_lacks(pipe: tuple[int, int]) -> None:
    log = _PodLog(pipe[1])
    log.put(b"x" * (17 << 20))  # more than may wait
    log.put(b"y" * 123)
    while os.read(pipe[0], 1 << 20)[-1:] == b"x" and len(log):
        log.flush()
    log.put(b"z")
    assert os.read(pipe[0], 1 << 16).endswith(
        b"\n[123 bytes are missing: they came too fast for this log]\nz"
    )


def test_a_pods_log_that_cannot_be_written_is_given_up(pipe: tuple[int, int]) -> None:
    os.close(pipe[0])
    log = _PodLog(pipe[1])
    log.put(b"words")
    assert not len(log)


def test_a_pod_does_not_wait_for_ever_for_a_supervisor_that_goes_on_to_speak() -> None:
    here, there = socket.socketpair()
    over = threading.Event()

    def speak() -> None:
        with contextlib.suppress(OSError):
            while not over.wait(0.02):
                there.send(b".")

    def part() -> None:
        with contextlib.suppress(OSError):
            _part(here, within_s=0.3)  # type: ignore[arg-type]

    speaker, parting = threading.Thread(target=speak), threading.Thread(target=part)
    speaker.start()
    parting.start()
    parting.join(60)
    is_waiting = parting.is_alive()
    over.set()
    speaker.join()
    there.close()
    parting.join()
    assert not is_waiting


# The pump


class Pumps:
    """Two pumps with a connection between them. A context manager; for one thread."""

    def __init__(self, tls: courier.TlsCredentials) -> None:
        here, there = socket.socketpair()
        # Little is on its way at a time, so that either side has to wait for the other.
        for end in (here, there):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            end.setblocking(False)
        sides = [
            tls.client_context().wrap_socket(here, do_handshake_on_connect=False),
            tls.server_context().wrap_socket(
                there, server_side=True, do_handshake_on_connect=False
            ),
        ]
        waiting = list(sides)
        while waiting:
            side = waiting.pop(0)
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                waiting.append(side)
        self.sides = sides
        #: By side: where to write what is sent, and to read what is received.
        self.ends: list[tuple[int, int]] = []
        self.pumps = []
        self._inner = []
        for side in sides:
            source, entry = os.pipe()
            exit_, sink = os.pipe()
            for descriptor in (source, entry, exit_, sink):
                os.set_blocking(descriptor, False)
            self.ends.append((entry, exit_))
            self._inner += [source, sink]
            self.pumps.append(Pump(side, source, sink))

    def __enter__(self) -> "Pumps":
        return self

    def __exit__(self, *exc: object) -> None:
        for side in self.sides:
            side.close()
        for descriptor in [*self._inner, *(each for pair in self.ends for each in pair)]:
            with contextlib.suppress(OSError):
                os.close(descriptor)


@given(
    data=st.lists(
        st.tuples(st.integers(0, 200_000), st.integers(0, 2**32)), min_size=2, max_size=2
    ),
    cuts=st.lists(st.integers(1, 100_000), min_size=1, max_size=20),
)
@settings(max_examples=12)
def test_all_arrives_unchanged_both_ways_however_it_is_cut(
    pump_tls: courier.TlsCredentials, data: list[tuple[int, int]], cuts: list[int]
) -> None:
    sent = [random.Random(seed).randbytes(size) for size, seed in data]
    left, received = [memoryview(each) for each in sent], [bytearray(), bytearray()]
    chance = random.Random(sum(cuts))
    with Pumps(pump_tls) as pumps:
        while any(left) or [*map(bytes, received)] != sent[::-1]:
            side = chance.randrange(2)
            entry, exit_ = pumps.ends[side]
            size = chance.choice([*cuts, 1 << 16])
            with contextlib.suppress(BlockingIOError):
                left[side] = left[side][os.write(entry, left[side][:size]) :]
            with contextlib.suppress(BlockingIOError):
                received[side] += os.read(exit_, size)
            pumps.pumps[side].move()
            assert not pumps.pumps[side].is_over


@pytest.fixture(scope="module")
def pump_tls(trust: Path) -> courier.TlsCredentials:
    return read_trust(trust)


def test_what_a_pump_waits_for_is_what_it_lacks(pump_tls: courier.TlsCredentials) -> None:
    """Moved only when something has come that it waits for, it carries all."""
    sent = [random.Random(side).randbytes(2_000_000) for side in (0, 1)]
    left, received = [memoryview(each) for each in sent], [bytearray(), bytearray()]
    with Pumps(pump_tls) as pumps:
        waits = [pump.move() for pump in pumps.pumps]
        give_up_at = time.monotonic() + 60
        while [*map(bytes, received)] != sent[::-1]:
            assert time.monotonic() < give_up_at
            for side, pump in enumerate(pumps.pumps):
                entry, exit_ = pumps.ends[side]
                with contextlib.suppress(BlockingIOError):
                    left[side] = left[side][os.write(entry, left[side]) :]
                with contextlib.suppress(BlockingIOError):
                    received[side] += os.read(exit_, 1 << 16)
                if _has_come(waits[side]):
                    waits[side] = pump.move()
        # Now there is nothing to do: it must not be called all the time.
        waits = [pump.move() for pump in pumps.pumps]
        assert not any(map(_has_come, waits))


def _has_come(waits: Mapping[int, int]) -> bool:
    with selectors.DefaultSelector() as selector:
        for descriptor, events in waits.items():
            selector.register(descriptor, events)
        return bool(selector.select(0))


def test_a_pump_ends_with_its_source_and_so_does_the_other(
    pump_tls: courier.TlsCredentials,
) -> None:
    with Pumps(pump_tls) as pumps:
        here, there = pumps.pumps
        entry, _ = pumps.ends[0]
        os.write(entry, b"the last words")
        os.close(entry)
        assert here.move() == {}
        assert (here.is_over, here.is_drained) == (True, True)
        pumps.sides[0].close()
        assert there.move() == {}
        assert (there.is_over, there.is_drained) == (True, False)
        assert os.read(pumps.ends[1][1], 100) == b"the last words"


def test_a_pump_ends_when_nobody_takes_what_comes(pump_tls: courier.TlsCredentials) -> None:
    with Pumps(pump_tls) as pumps:
        os.close(pumps.ends[1][1])
        os.write(pumps.ends[0][0], b"words")
        pumps.pumps[0].move()
        pumps.pumps[1].move()
        assert pumps.pumps[1].is_over


def test_a_pump_leaves_others_their_turn(tmp_path: Path) -> None:
    class Endless:
        """Takes all that is sent, and says nothing."""

        def __init__(self) -> None:
            self.sent = 0

        def send(self, data: bytes) -> int:
            self.sent += 1
            assert self.sent < 1000, "it continues for as long as there is something"
            return len(data)

        def recv(self, size: int) -> bytes:
            raise ssl.SSLWantReadError

        def fileno(self) -> int:
            return -1

    with Path("/dev/zero").open("rb") as source, (tmp_path / "sink").open("wb") as sink:
        endless: Any = Endless()
        pump = Pump(endless, source.fileno(), sink.fileno())
        assert pump.move()[source.fileno()] == selectors.EVENT_READ
        assert not pump.is_over


# What the supervisor does


def test_a_signal_is_for_the_program_as_soon_as_anything_of_it_may_run(
    exchange: Exchange,
) -> None:
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
    got: list[int] = []
    starter: Any = types.SimpleNamespace(hosts=[], placement={}, release=lambda: None)
    program: Any = types.SimpleNamespace(handle_signal=got.append)
    order: Any = types.SimpleNamespace(schedule_s=math.inf, begins_anew=True)
    try:
        signals = StopSignals()
        supervision = _Supervision(order, exchange, signals, None)  # type: ignore[arg-type]
        with pytest.raises(SystemExit) as raised:
            signal.raise_signal(signal.SIGTERM)
        assert raised.value.code == 143
        supervision._make_fleet(starter, program)
        signal.raise_signal(signal.SIGTERM)
        assert got == [signal.SIGTERM]
        assert supervision.comes_back()
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def nodes(count: int, state: str) -> list[NodeStatus]:
    return [NodeStatus(f"node[{index}]", state, "h", None, {}) for index in range(count)]


def test_each_change_of_a_small_program_is_printed_and_what_does_not_change_seldom() -> None:
    pace = _Pace(100.0)
    assert pace.allows(nodes(10, "starting"), 100.0)
    assert not pace.allows(nodes(10, "starting"), 101.0)
    for second in range(102, 112):
        assert pace.allows(nodes(10, f"state {second}"), float(second))
    assert not pace.allows(nodes(10, "state 111"), 140.0)
    assert pace.allows(nodes(10, "state 111"), 142.0)


@pytest.mark.parametrize("count", [1000, 20_000])
def test_a_large_program_whose_nodes_change_all_the_time_does_not_fill_the_log(count: int) -> None:
    pace = _Pace(0.0)
    states = itertools.cycle([nodes(count, "up"), nodes(count, "restarting")])
    seconds, step = 1500, count // 200
    printed = sum(pace.allows(next(states), float(second)) for second in range(0, seconds, step))
    # At first, at once; then as much as 500 bytes per second allow.
    assert 1 <= printed * 200 * count <= 1e6 + seconds * 500 + 200 * count


def test_the_last_change_is_printed_as_soon_as_there_is_room() -> None:
    pace = _Pace(0.0)
    at = 0.0
    while pace.allows(nodes(1000, str(at)), at):
        at += 1.0
    last = nodes(1000, "the last")
    assert not pace.allows(last, at)
    poll = next(later for later in range(1, 1000) if pace.allows(last, at + later))
    assert poll <= 400
    assert not pace.allows(last, at + poll + 1)


def test_between_two_attempts_to_take_a_pod_in_there_is_a_pause(exchange: Exchange) -> None:
    attempts, pauses = [], []

    class Cancelled(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout)
            return len(pauses) == 3

    def readmit(*args: object) -> None:
        attempts.append(args)
        raise LaunchError("it has gone")

    starter: Any = types.SimpleNamespace(
        hosts=[], placement={}, release=lambda: None, readmit=readmit
    )
    program, host = types.SimpleNamespace(), types.SimpleNamespace()
    fleet = PodFleet(starter, program, math.inf, exchange, lambda: False)  # type: ignore[arg-type]
    with pytest.raises(LaunchError, match="it has gone"):
        fleet._readmit(host, _Return(Start("a", 1), Cancelled()), math.inf)  # type: ignore[arg-type]
    assert len(attempts) == len(pauses) == 3
    assert min(pauses) > 0
