"""Where pods call, and what carries their bytes: the exchange, pumps, logs, and what is told when."""

import contextlib
import errno
import itertools
import logging
import math
import os
import random
import signal
import socket
import ssl
import sys
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import pytest

import courier
from launchers.host.agent import _PodLog
from launchers.host.pod import MAY_COME_BACK
from launchers.hosts.elsewhere import StopSignals
from launchers.hosts.trust import Authority
from launchers.kubernetes._exchange import PodExchange, PodLine
from launchers.kubernetes._fleet import PodFleet, _Return
from launchers.kubernetes._order import read_trust
from launchers.kubernetes._supervise import _Pace, _Supervision
from launchers.kubernetes._timing import Timing
from launchpad_lite.errors import LaunchError
from launchpad_lite.launching import NodeStatus
from launchpad_lite.life.events import Start
from launchpad_lite.testing import poll_until
from tests.launchers.pods import Pod, open_files

PATIENT = Timing(greeting_s=300.0, part_s=60.0)


# Who may call


@contextlib.contextmanager
def exchanging(trust: Path, *options: Any) -> Iterator[PodExchange]:
    exchange = PodExchange(read_trust(trust), 0, *options)
    yield exchange
    assert exchange._thread.is_alive(), "it failed"
    exchange.close()
    assert "launchpad-exchange" not in [thread.name for thread in threading.enumerate()]


@pytest.fixture
def exchange(trust: Path) -> Iterator[PodExchange]:
    with exchanging(trust) as exchange:
        yield exchange


def dial(exchange: PodExchange, tls: courier.TlsCredentials) -> ssl.SSLSocket:
    connection = socket.create_connection(("127.0.0.1", exchange.port), timeout=30)
    return tls.client_context().wrap_socket(connection)


def greet(exchange: PodExchange, trust: Path, host: str) -> ssl.SSLSocket:
    """What a pod does first, without the pod."""
    connection = dial(exchange, read_trust(trust))
    connection.sendall(host.encode() + b"\n")
    return connection


def close(line: PodLine) -> None:
    line.terminate()
    line.wait(30)
    for stream in (line.stdin, line.stdout, line.stderr):
        stream.close()


@contextlib.contextmanager
def linked(exchange: PodExchange, trust: Path) -> Iterator[tuple[PodLine, ssl.SSLSocket]]:
    """A line, and the pod at its other end."""
    line = exchange.expect("run-a-0")
    with greet(exchange, trust, "run-a-0") as pod:
        yield line, pod
    close(line)


def framed(data: bytes) -> bytes:
    """A piece as it is on the link."""
    return len(data).to_bytes(4, "big") + data


def heard(pod: socket.socket) -> bytes:
    """The next piece that a pod gets; nothing at the end."""
    head = received(pod, 4)
    return received(pod, int.from_bytes(head, "big"))


def received(pod: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size and (piece := pod.recv(size - len(found))):
        found += piece
    return found


def read_all(stream: IO[bytes]) -> bytes:
    return b"".join(iter(lambda: stream.read(1 << 16), b""))


def works(exchange: PodExchange, trust: Path) -> bool:
    """Tells whether a pod is let in."""
    with linked(exchange, trust) as (line, pod):
        line.stdin.write(b"ping")
        there = heard(pod)
        pod.sendall(framed(b"pong"))
        here = line.stdout.read(10)
        pod.close()
        assert line.wait(30) == 255
    return (there, here) == (b"ping", b"pong")


def is_refused(connection: socket.socket) -> bool:
    connection.settimeout(30)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:  # an alert, or a reset
        return True


def test_a_pod_may_call_before_it_is_expected(exchange: PodExchange, trust: Path) -> None:
    with greet(exchange, trust, "run-a-0") as pod:
        poll_until(lambda: "run-a-0" in exchange._served)
        line = exchange.expect("run-a-0")
        line.stdin.write(b"welcome")
        assert heard(pod) == b"welcome"
        close(line)
        assert is_refused(pod)


def without_tls(exchange: PodExchange, trust: Path) -> socket.socket:
    return socket.create_connection(("127.0.0.1", exchange.port))


def without_certificate(exchange: PodExchange, trust: Path) -> socket.socket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(str(trust / "authority.pem"))
    return context.wrap_socket(socket.create_connection(("127.0.0.1", exchange.port)))


def of_another_run(exchange: PodExchange, trust: Path) -> socket.socket:
    """It knows our authority, which is no secret, but has nothing of it."""
    ours, other = read_trust(trust), Authority("pods").issue("run")
    tls = courier.TlsCredentials(
        certificate=other.certificate, key=other.key, authority=ours.authority
    )
    return dial(exchange, tls)


@pytest.mark.parametrize("call", [without_tls, without_certificate, of_another_run])
def test_who_does_not_belong_to_the_run_is_refused(
    exchange: PodExchange, trust: Path, call: Callable[[PodExchange, Path], socket.socket]
) -> None:
    line = exchange.expect("run-a-0")
    with call(exchange, trust) as stranger:
        with contextlib.suppress(OSError):
            stranger.sendall(b"run-a-0\n" * 100)
        assert is_refused(stranger)
    close(line)
    assert works(exchange, trust)


def test_a_pod_does_not_speak_with_the_supervisor_of_another_run(
    tmp_path: Path, trust: Path
) -> None:
    exchange = PodExchange(Authority("pods").issue("run"), 0)
    line = exchange.expect("run-a-0")
    pod = Pod("run-a-0", tmp_path, trust, exchange.port, wait_s=0.5)
    assert pod.end() == 1
    assert "certificate verify failed" in pod.errors.read_text()
    close(line)
    exchange.close()


def test_a_greeting_that_is_none_does_no_harm(exchange: PodExchange, trust: Path) -> None:
    for greeting in (b"x" * 200_000, b"\n", b"\xff\xfe\n"):
        with dial(exchange, read_trust(trust)) as stranger:
            with contextlib.suppress(OSError):  # a long one is refused before all of it is sent
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
            slow.sendall(b"run-")
            assert is_refused(slow)
        assert is_refused(silent)


def test_when_files_run_out_the_exchange_goes_on(
    exchange: PodExchange,
    trust: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    accept, refused = socket.socket.accept, []

    def refuse(self: socket.socket) -> Any:
        if self is exchange._listener and not refused:
            refused.append(True)
            raise OSError(errno.EMFILE, "too many open files")
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", refuse)
    with caplog.at_level(logging.CRITICAL, "asyncio"):
        assert works(exchange, trust)
    assert refused


def test_what_was_said_last_arrives_though_the_pod_has_more_to_say(trust: Path) -> None:
    with exchanging(trust, PATIENT) as exchange, linked(exchange, trust) as (line, pod):
        pod.settimeout(0.3)
        with contextlib.suppress(TimeoutError):
            while True:  # more than anybody takes in
                pod.sendall(framed(bytes(1 << 16)))
        line.stdin.write(b"quit")
        line.stdin.close()
        pod.settimeout(30)
        assert heard(pod) == b"quit"
        assert heard(pod) == b""
        assert not line._ended.is_set()
        pod.close()
        assert line.wait(30) == 255


def test_a_pod_that_does_not_end_its_side_is_not_waited_for_without_end(trust: Path) -> None:
    with exchanging(trust, Timing(part_s=0.3)) as exchange, linked(exchange, trust) as (line, pod):
        line.stdin.close()
        assert line.wait(30) == 255
        assert heard(pod) == b""


@pytest.mark.parametrize("cut", [1000, 1 << 16, 1_000_000])
def test_all_arrives_unchanged_both_ways_however_it_is_cut(
    exchange: PodExchange, trust: Path, cut: int
) -> None:
    sent = [random.Random(cut + side).randbytes(700_000) for side in (0, 1)]

    def speak(line: PodLine) -> None:
        for start in range(0, len(sent[0]), cut):
            line.stdin.write(sent[0][start : start + cut])

    with linked(exchange, trust) as (line, pod), ThreadPoolExecutor(2) as threads:
        speaking = threads.submit(speak, line)
        reading = threads.submit(read_all, line.stdout)
        found = b""
        while len(found) < len(sent[0]):
            found += heard(pod)
        speaking.result(30)
        assert found == sent[0]
        for start in range(0, len(sent[1]), cut):
            pod.sendall(framed(sent[1][start : start + cut]))
        pod.sendall(framed(b""))
        assert reading.result(30) == sent[1]


def test_a_line_that_nobody_reads_ends(exchange: PodExchange, trust: Path) -> None:
    with linked(exchange, trust) as (line, pod):
        line.stdout.close()
        with contextlib.suppress(OSError):
            for _ in range(100):
                pod.sendall(framed(b"words"))
        assert line.wait(30) == 255


def test_a_pod_that_nobody_expects_does_no_harm(exchange: PodExchange, trust: Path) -> None:
    with greet(exchange, trust, "run-of-nobody") as unknown:
        unknown.sendall(b"anything")
        assert works(exchange, trust)
    assert works(exchange, trust)


def test_strangers_that_say_nothing_do_not_keep_pods_out(trust: Path) -> None:
    with exchanging(trust, PATIENT) as exchange, contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(socket.create_connection(("127.0.0.1", exchange.port)))
        assert works(exchange, trust)


def test_a_pod_that_calls_under_the_name_of_another_takes_its_place(
    exchange: PodExchange, trust: Path
) -> None:
    with greet(exchange, trust, "run-a-0") as old:
        poll_until(lambda: "run-a-0" in exchange._served)
        with greet(exchange, trust, "run-a-0") as new:
            assert is_refused(old)
            line = exchange.expect("run-a-0")
            line.stdin.write(b"new")
            assert heard(new) == b"new"
            with greet(exchange, trust, "run-a-0"):
                assert line.wait(30) == 255
                assert line.stderr.read() == b"another pod has called in its place"
            close(line)


@pytest.mark.parametrize(
    ("leave", "reason"),
    [
        (lambda pod: pod.sendall(framed(b"")), "its agent has ended"),
        (ssl.SSLSocket.close, "its pod has closed the connection"),
    ],
)
def test_a_line_says_why_it_ended(
    exchange: PodExchange, trust: Path, leave: Callable[[ssl.SSLSocket], None], reason: str
) -> None:
    with linked(exchange, trust) as (line, pod):
        line.stdin.write(b"words")
        assert heard(pod) == b"words"
        leave(pod)
        assert line.stderr.read().decode().startswith(reason)


def test_pods_that_are_waited_for_are_known(exchange: PodExchange, trust: Path) -> None:
    lines = [exchange.expect(f"run-{name}-0") for name in "ba"]
    poll_until(lambda: exchange.awaited == ("run-a-0", "run-b-0"))
    with greet(exchange, trust, "run-a-0"), greet(exchange, trust, "run-c-0"):
        poll_until(lambda: exchange.awaited == ("run-b-0",))
    for line in lines:
        close(line)
    assert exchange.awaited == ()


def test_lines_that_end_while_much_comes_take_nothing_from_others(
    exchange: PodExchange, trust: Path
) -> None:
    """Descriptors of a line that has ended are soon those of another one."""
    for index in range(12):
        line = exchange.expect("run-a-0")
        with greet(exchange, trust, "run-a-0") as pod:
            pod.sendall(framed(bytes(50_000)))
            line.terminate()
            other = exchange.expect(f"run-b-{index}")
            other.stdin.write(b"not lost")
            close(line)
            with greet(exchange, trust, other.host) as neighbour:
                assert heard(neighbour) == b"not lost"
            close(other)


def test_an_exchange_that_was_closed_expects_nobody(trust: Path) -> None:
    exchange = PodExchange(read_trust(trust), 0)
    waiting = exchange.expect("run-a-0")
    exchange.close()
    exchange.close()
    late = exchange.expect("run-a-0")
    exchange.give_up("run-a-0")
    for line in (waiting, late):
        assert line.wait(1) == 255
        close(line)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_pods_that_come_and_go_leave_nothing_behind(exchange: PodExchange, trust: Path) -> None:
    assert works(exchange, trust)
    files, threads = open_files(), threading.active_count()
    for _ in range(10):
        assert works(exchange, trust)
        close(exchange.expect("run-c-0"))
        with greet(exchange, trust, "run-b-0"):
            pass
        # Fewer, if what came before had not quite gone when they were counted.
    poll_until(lambda: open_files() <= files)
    assert threading.active_count() <= threads


# A pod's side


def test_a_pod_that_cannot_begin_may_be_followed_by_another(
    tmp_path: Path, trust: Path, exchange: PodExchange
) -> None:
    # Its agent cannot be started: there is no such interpreter.
    pod = Pod("run-a-0", tmp_path, trust, exchange.port, first="import sys; sys.executable = '/no'")
    assert pod.end() == MAY_COME_BACK
    assert "the pod cannot begin its work" in pod.errors.read_text()


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
    log.show(b"x" * (17 << 20))  # more than may wait
    log.show(b"y" * 123)
    while os.read(pipe[0], 1 << 20)[-1:] == b"x" and len(log):
        log.flush()
    log.show(b"z")
    assert os.read(pipe[0], 1 << 16).endswith(
        b"\n[123 bytes are missing: they came too fast for this log]\nz"
    )


def test_a_pods_log_that_cannot_be_written_is_given_up(pipe: tuple[int, int]) -> None:
    os.close(pipe[0])
    log = _PodLog(pipe[1])
    log.show(b"words")
    assert not len(log)


# What the supervisor does


def test_a_signal_is_for_the_program_as_soon_as_anything_of_it_may_run(
    exchange: PodExchange,
) -> None:
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
    got: list[int] = []
    starter: Any = types.SimpleNamespace(hosts=[], placement={}, close=lambda: None)
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
    assert pace.allows(nodes(10, "starting"), (), 100.0)
    assert not pace.allows(nodes(10, "starting"), (), 101.0)
    for second in range(102, 112):
        assert pace.allows(nodes(10, f"state {second}"), (), float(second))
    assert not pace.allows(nodes(10, "state 111"), (), 140.0)
    assert pace.allows(nodes(10, "state 111"), (), 142.0)


@pytest.mark.parametrize("count", [1000, 20_000])
def test_a_large_program_whose_nodes_change_all_the_time_does_not_fill_the_log(count: int) -> None:
    pace = _Pace(0.0)
    states = itertools.cycle([nodes(count, "up"), nodes(count, "restarting")])
    seconds, step = 1500, count // 200
    printed = sum(
        pace.allows(next(states), (), float(second)) for second in range(0, seconds, step)
    )
    # At first, at once; then as much as 500 bytes per second allow.
    assert 1 <= printed * 200 * count <= 1e6 + seconds * 500 + 200 * count


def test_the_last_change_is_printed_as_soon_as_there_is_room() -> None:
    pace = _Pace(0.0)
    at = 0.0
    while pace.allows(nodes(1000, str(at)), (), at):
        at += 1.0
    last = nodes(1000, "the last")
    assert not pace.allows(last, (), at)
    poll = next(later for later in range(1, 1000) if pace.allows(last, (), at + later))
    assert poll <= 400
    assert not pace.allows(last, (), at + poll + 1)


def test_between_two_attempts_to_take_a_pod_in_there_is_a_pause(exchange: PodExchange) -> None:
    attempts, pauses = [], []

    class Cancelled(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout)
            return len(pauses) == 3

    def readmit(*args: object) -> None:
        attempts.append(args)
        raise LaunchError("it has gone")

    starter: Any = types.SimpleNamespace(
        hosts=[], placement={}, close=lambda: None, readmit=readmit
    )
    program, host = types.SimpleNamespace(), types.SimpleNamespace()
    fleet = PodFleet(starter, program, math.inf, exchange, lambda: False)  # type: ignore[arg-type]
    with pytest.raises(LaunchError, match="it has gone"):
        fleet._readmit(host, _Return(Start("a", 1), Cancelled()), math.inf)  # type: ignore[arg-type]
    assert len(attempts) == len(pauses) == 3
    assert min(pauses) > 0
