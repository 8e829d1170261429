"""Inside a worker process: from its payload to its exit code."""

import atexit
import contextlib
import faulthandler
import os
import pickle
import selectors
import signal
import sys
import threading
from dataclasses import dataclass, field
from typing import NoReturn

from courier import ExceptionReport, Secret, TlsCredentials
from courier._modules import loaded_module
from courier._parcel import dumps
from courier._surviving import surviving
from launchers._ports import LOOPBACK
from launchers.host.link import Frame, FrameDecoder, read_some, write_all
from launchers.host.stacks import write_stacks
from launchpad_lite._address import AddressTable
from launchpad_lite._flag_values import FlagSnapshot
from launchpad_lite._flags import loaded_flags, parse_known
from launchpad_lite._forcing import ForcedExit
from launchpad_lite._freeze import FrozenWork
from launchpad_lite._runtime import NodeRuntime, NodeSetup, WorkerLink
from launchpad_lite._script import Script
from launchpad_lite._signal_waker import SIGNAL_WAKER
from launchpad_lite._stacks import describe_threads
from launchpad_lite._worker import report_on, run_node
from launchpad_lite.nodes.base import Work

_LISTENER = "the thread that reads what is asked of the node"
#: After so long, the process of a node that has ended says what it waits for.
_LINGERING_S = 5.0


@dataclass(frozen=True)
class Payload:
    """All that a worker must know. Travels through pipes only: it holds the secret."""

    setup: NodeSetup
    work: FrozenWork = field(repr=False)
    endpoints: dict[str, str]
    secret: bytes = field(repr=False)
    argv: list[str]
    flags: FlagSnapshot
    #: What the launching process was started with.
    script: Script
    #: Those among `argv` that are for this node only.
    own_flags: list[str] = field(default_factory=list)
    #: Where its servers listen.
    listen_host: str = LOOPBACK
    #: Certificate, key and authority, as PEM: credentials themselves do not travel.
    certificates: tuple[bytes, bytes, bytes] | None = field(default=None, repr=False)

    def encode(self) -> bytes:
        """Pickles it; classes of the user's script travel by value."""
        return dumps(self)

    def table(self) -> AddressTable:
        """Returns where everything of the program listens, and what it takes to talk to it."""
        tls = None
        if self.certificates is not None:
            certificate, key, authority = self.certificates
            tls = TlsCredentials(certificate=certificate, key=key, authority=authority)
        return AddressTable(self.endpoints, Secret(self.secret), tls, self.listen_host)


class _Link(WorkerLink):
    """How a worker speaks to its agent."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._lock = threading.Lock()

    def constructed(self, runs: bool) -> None:
        self.send(Frame("constructed", {"runs": runs}))

    def ask_stop(self) -> None:
        self.send(Frame("stop"))

    def leaving(self) -> None:
        self.send(Frame("leaving"))

    def failing(self, report: ExceptionReport) -> None:
        self.send(Frame("failing", body=pickle.dumps(report)))

    def cut_short(self, report: ExceptionReport) -> None:
        self.send(Frame("cut_short", body=pickle.dumps(report)))

    def stop_received(self, listens: bool) -> None:
        self.send(Frame("stop_received", {"listens": listens}))

    def healthy(self) -> None:
        self.send(Frame("healthy"))

    def heartbeat(self) -> None:
        self.send(Frame("heartbeat"))

    def preempted(self, signum: int) -> None:
        self.send(Frame("preempted", {"signum": signum}))

    def send(self, frame: Frame) -> None:
        with self._lock:
            write_all(self.fd, frame.encode())


class _Termination:
    """What SIGTERM does to a worker.

    From outside (a batch system, a spot machine, a user) it is a notice: the node is asked to end.
    When the notice is over, `force` has the main thread leave at once. On the way out nothing more
    happens: SIGKILL is for those who cannot wait.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._is_forced = self._is_leaving = False
        self.notice_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        signal.signal(signal.SIGTERM, self._on_signal)
        os.register_at_fork(after_in_child=self._forget)
        SIGNAL_WAKER.install()
        # Held back since before the fork, so that none is lost.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def _forget(self) -> None:
        """In a child that the node forks: a handler would wait until its main thread runs Python."""
        if signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def force(self) -> None:
        """Raises ForcedExit in the main thread, once, and sends what the node started SIGTERM."""
        self._is_forced = True
        os.killpg(os.getpgrp(), signal.SIGTERM)

    def _on_signal(self, signum: int, stack: object) -> None:  # noqa: ARG002
        if os.getpid() != self._pid:
            # A child that was just forked: there it does what it does in any program.
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
        elif self._is_leaving:
            pass  # a second exception could hit the clean-up that the first one led to
        elif self._is_forced:
            self._is_leaving = True
            raise ForcedExit(128 + signum)
        else:
            # Anything may be under way here, and hold any lock: another thread continues with it.
            with contextlib.suppress(OSError):
                os.write(self._write_fd, bytes([signum]))


class _Control:
    """The thread that reads what is asked of the node, whatever the node does."""

    def __init__(
        self, link: _Link, runtime: NodeRuntime, termination: _Termination, stacks_fd: int
    ) -> None:
        self._link = link
        self._stacks_fd = stacks_fd
        self._runtime = runtime
        self._termination = termination
        self._decoder = FrameDecoder()

    def start(self) -> None:
        threading.Thread(target=self._listen, name="launchpad-control", daemon=True).start()

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._link.fd, selectors.EVENT_READ)
            selector.register(self._termination.notice_fd, selectors.EVENT_READ)
            while True:
                # Without this thread the node would notice no stop, nor the agent's end.
                with surviving(_LISTENER):
                    for key, _ in selector.select():
                        if key.fd == self._link.fd:
                            self._on_frames()
                        else:
                            (signum,) = os.read(key.fd, 1)
                            # First, because a node that was asked may end before more can be said.
                            self._link.preempted(signum)
                            self._request_stop(interrupts=True)

    def _on_frames(self) -> None:
        data = read_some(self._link.fd)
        if not data:
            # The agent is gone. What this process has started gets the chance to tidy up, and is
            # ended by the warden.
            os.killpg(os.getpgrp(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGKILL)
        for frame in self._decoder.feed(data):
            with surviving(_LISTENER, 0.0):
                self._obey(frame)

    def _obey(self, frame: Frame) -> None:
        if frame.op == "stop":
            self._request_stop(interrupts=frame["interrupts"])
        elif frame.op == "let_go":
            self._runtime.let_go()
        elif frame.op == "end_calls":
            self._runtime.end_calls()
        elif frame.op == "dump":
            write_stacks(self._stacks_fd)
        elif frame.op == "look":
            self._link.send(Frame("looked", body=describe_threads().encode(errors="replace")))
        elif frame.op == "leave":
            self._runtime.prepare_force()
            self._termination.force()
        elif frame.op == "ended":
            self._runtime.note_ended(frame["keys"])
        elif frame.op == "lost":
            self._runtime.note_lost(frame["keys"])
        elif frame.op == "moved":
            self._runtime.note_moved(frame["endpoints"])

    def _request_stop(self, *, interrupts: bool) -> None:
        # They may block; the end of the agent must be noticed all the same. Started before the
        # node can end, and no daemon: the process ends when they have returned.
        with contextlib.suppress(RuntimeError):  # the interpreter ends already
            threading.Thread(
                target=self._runtime.run_stop_handlers,
                name="launchpad-stop-handlers",
                daemon=False,
            ).start()
        self._runtime.request_stop(interrupts=interrupts)


def prepare_output() -> None:
    """Makes output leave this process line by line, and crashes in C code leave their stacks."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()


def run_worker(data: bytes, control_fd: int, stacks_fd: int) -> int:
    """Runs one node in this process; returns the exit code.

    Args:
        data: An encoded `Payload`.
        control_fd: The socket to the agent, blocking.
        stacks_fd: Where it writes down its stacks.
    """
    link = _Link(control_fd)
    try:
        if (coverage := loaded_module("coverage")) and (counts := coverage.Coverage.current()):
            atexit.register(counts.save)  # as it had done itself, before the fork
        payload: Payload = pickle.loads(data)
        sys.argv[:] = payload.argv
        payload.script.stand_in()
        runtime = NodeRuntime(payload.setup, payload.table(), link)
        _Control(link, runtime, _Termination(), stacks_fd).start()
    except BaseException as error:  # noqa: BLE001 - the launcher reports it
        report: ExceptionReport | None = report_on(error, link.failing)
    else:
        report = run_node(_WithFlags(payload), runtime)
    if report is None:
        _explain_lingering()
        return 0
    link.send(Frame("failed", body=pickle.dumps(report)))
    sys.stderr.write(report.traceback)
    return 1


def _explain_lingering() -> None:
    """Has this process say which threads it waits for, if it still does after some seconds."""

    def waited_for() -> list[str]:
        others = [each for each in threading.enumerate() if each is not threading.main_thread()]
        return [each.name for each in others if not each.daemon]

    def tell() -> None:
        if names := waited_for():
            sys.stderr.write(
                f"launchpad: the node has ended, but its process waits for {', '.join(names)}: end "
                "such threads, or make them daemons\n"
            )

    if waited_for():
        timer = threading.Timer(_LINGERING_S, tell)
        timer.daemon = True
        timer.start()


class _WithFlags:
    """Loads the work, which imports the user's modules, then gives their flags values."""

    def __init__(self, payload: Payload) -> None:
        self._payload = payload

    def thaw(self) -> Work:
        flags = self._payload.flags.prepare()
        work = self._payload.work.thaw()
        flags.apply()
        if self._payload.own_flags or loaded_flags() is not None:
            # What neither the script nor the user's modules define is left in sys.argv.
            parse_known([sys.argv[0], *self._payload.own_flags])
        return work


def leave(code: int) -> NoReturn:
    """Ends a forked worker as an interpreter ends: threads, exit functions, streams.

    It goes no further, whatever happens: above is the agent's stack.
    """
    try:
        # The work is done; to be asked once more to end is no reason to end badly.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(BaseException):
                stream.flush()
    finally:
        os._exit(code)
