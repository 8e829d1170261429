"""Runs a node in a worker process, from its payload to its exit code."""

import atexit
import contextlib
import faulthandler
import functools
import io
import os
import pickle
import selectors
import signal
import sys
import threading
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from courier import ExceptionReport, dumps
from courier.lowlevel import call_records, loaded_module, surviving
from launchers.host.link import FrameDecoder, LinkFrame, read_some, write_all
from launchers.host.stacks import write_stacks
from launchers.host.sweep import name_process
from launchpad_lite.graph.freeze import FrozenWork
from launchpad_lite.life.events import (
    Answered,
    Ask,
    DumpStacks,
    Failed,
    Failing,
    Kill,
    NodeAction,
    Preempted,
    Said,
    Start,
    Terminate,
    from_fields,
    to_fields,
)
from launchpad_lite.nodes.base import Work
from launchpad_lite.process.flag_values import FlagSnapshot
from launchpad_lite.process.flags import loaded_flags, parse_known
from launchpad_lite.process.forcing import ForcedExit
from launchpad_lite.process.script import Script
from launchpad_lite.process.signal_waker import SIGNAL_WAKER
from launchpad_lite.worker.address import AddressTable, OpenTable
from launchpad_lite.worker.running import report_on, run_node
from launchpad_lite.worker.runtime import NodeRuntime, NodeSetup

if TYPE_CHECKING:
    from launchpad_lite.launching import LaunchOptions, LaunchPlan

_LISTENER = "the thread that reads what is asked of the node"
#: Seconds after which the process of a node that has ended prints what it waits for.
_LINGERING_S = 5.0


class Payload(NamedTuple):
    """All that a worker must know. It holds the secret, so it goes through pipes only."""

    setup: NodeSetup
    work: FrozenWork
    addresses: OpenTable
    argv: list[str]
    flags: FlagSnapshot
    #: What the launching process was started with.
    script: Script
    #: The flags among `argv` that are for this node only.
    own_flags: list[str]

    def encode(self) -> bytes:
        """Returns it pickled, with the classes of the user's script by value.

        The setup comes first, by itself, so that a worker knows its name if the rest exceeds its memory.
        """
        return dumps(self.setup) + dumps(self)


def payloads(
    plan: "LaunchPlan", table: AddressTable, options: "LaunchOptions", *, has_terminal: bool = False
) -> dict[str, Payload]:
    """Returns the payload of each node's worker, at its first start. Called where the program is launched."""
    flags, script, addresses = FlagSnapshot.take(), Script.here(), OpenTable.of(table)
    return {
        each.name: Payload(
            setup=each.setup(plan.program, 0, options.notice_s)._replace(has_terminal=has_terminal),
            work=each.work,
            addresses=addresses,
            argv=[*sys.argv, *each.process.flags()],
            flags=flags,
            script=script,
            own_flags=each.process.flags(),
        )
        for each in plan.executables
    }


class _LinkToAgent:
    """Sends reports of a worker to its agent. Thread-safe."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._lock = threading.Lock()

    def post(self, said: Said | Answered) -> None:
        data = LinkFrame(*to_fields(said)).encode()
        with self._lock:
            write_all(self.fd, data)


class _Termination:
    """What SIGTERM does to a worker.

    From outside (a batch system, a spot machine, a user) it is a notice: it asks the node to end.
    When that is over, `force` makes the main thread leave at once, and SIGTERM does nothing more.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._is_forced = self._is_leaving = False
        self.notice_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        signal.signal(signal.SIGTERM, self._on_signal)
        os.register_at_fork(after_in_child=self._forget)
        SIGNAL_WAKER.install()
        # Blocked since before the fork, so that no signal is lost.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def _forget(self) -> None:
        """Restores the default in a child that the node forks, where a handler would wait for Python code."""
        if signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def force(self) -> None:
        """Raises ForcedExit in the main thread, once, and sends what the node started SIGTERM."""
        self._is_forced = True
        os.killpg(os.getpgrp(), signal.SIGTERM)

    def _on_signal(self, signum: int, stack: object) -> None:  # noqa: ARG002
        if os.getpid() != self._pid:
            # A child that was just forked: SIGTERM ends it, as in any program.
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
        elif self._is_leaving:
            pass  # a second exception could hit the clean-up that the first one led to
        elif self._is_forced:
            self._is_leaving = True
            raise ForcedExit(128 + signum)
        else:
            # The interrupted code may hold any lock, so another thread does the rest.
            with contextlib.suppress(OSError):
                os.write(self._write_fd, bytes([signum]))


class _Control:
    """The thread that reads requests to the node, whatever the node does."""

    def __init__(
        self, link: _LinkToAgent, runtime: NodeRuntime, termination: _Termination, stacks_fd: int
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
                            # Reported first, because a node that was asked may end before the report.
                            self._runtime.say(Preempted, signum)
                            self._runtime.request_stop(interrupts=True)

    def _on_frames(self) -> None:
        data = read_some(self._link.fd)
        if not data:
            # The agent is gone. Children of this process may clean up; then the reaper ends them.
            os.killpg(os.getpgrp(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGKILL)
        for frame in self._decoder.feed(data):
            with surviving(_LISTENER, 0.0):
                self._obey(from_fields(frame.op, frame.fields))

    def _obey(self, action: NodeAction) -> None:
        match action:
            case DumpStacks():
                write_stacks(self._stacks_fd)
            case Ask():
                from launchpad_lite.worker.questions import answer  # few nodes are ever asked

                answer(self._runtime, action, self._link.post)
            case Terminate():
                self._runtime.prepare_force()
                self._termination.force()
            case Start() | Kill():
                pass  # the agent carries these out
            case _:
                self._runtime.obey(action)


def prepare_output() -> None:
    """Makes this process write output line by line, and print its stacks at a crash in C code."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # Python 3.14 adds addresses of C code, which would push out what the node printed last.
    if sys.version_info >= (3, 14):
        faulthandler.enable(c_stack=False)
    else:
        faulthandler.enable()


def run_worker(data: bytes, control_fd: int, stacks_fd: int) -> int:
    """Runs the node of an encoded `Payload`; returns the exit code. The socket is blocking."""
    if (coverage := loaded_module("coverage")) and (counts := coverage.Coverage.current()):
        atexit.register(counts.save)  # as coverage itself did before the fork
    call_records.keep_in(stacks_fd)
    link, stream = _LinkToAgent(control_fd), io.BytesIO(data)
    setup: NodeSetup = pickle.load(stream)
    name_process(setup.name, f"{setup.name} of {setup.program}")

    def tell(kind: type[Failing | Failed], report: ExceptionReport) -> None:
        link.post(kind(setup.name, setup.attempt, setup.failure(report)))

    try:
        payload: Payload = pickle.load(stream)
        sys.argv[:] = payload.argv
        payload.script.stand_in()
        runtime = NodeRuntime(setup, payload.addresses.table(), link.post, has_process=True)
        _Control(link, runtime, _Termination(), stacks_fd).start()
        sys.breakpointhook = functools.partial(_stop_at_breakpoint, runtime, os.getpid())
    except BaseException as error:  # noqa: BLE001 - the launcher reports it
        report = report_on(error, functools.partial(tell, Failing))
        tell(Failed, report)
        sys.stderr.write(report.traceback)
        return 1
    with runtime.active():
        failed = run_node(functools.partial(_thaw, payload), runtime)
    if failed:
        sys.stderr.write(failed)
        return 1
    _explain_lingering()
    return 0


def _stop_at_breakpoint(runtime: NodeRuntime, pid: int, *args: object, **kwargs: object) -> object:
    """Does what `breakpoint()` does in a node, whose process has no terminal."""
    if os.environ.get("PYTHONBREAKPOINT"):  # it names another debugger
        return sys.__breakpointhook__(*args, **kwargs)  # noqa: T100
    from launchpad_lite.worker.debugger import debugger_of

    debugger_of(runtime).stop(sys._getframe(1), is_child=os.getpid() != pid)
    return None


def _explain_lingering() -> None:
    """Makes this process print which threads it waits for, if it still waits after some seconds."""

    def waited_for() -> list[str]:
        threads = set(threading.enumerate()) - {threading.main_thread()}
        return sorted(each.name for each in threads if not each.daemon)

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


def _thaw(payload: Payload) -> Work:
    """Loads the work, which imports the user's modules, then gives their flags values."""
    flags = payload.flags.prepare()
    work = payload.work.thaw()
    flags.apply()
    if payload.own_flags or loaded_flags() is not None:
        # Flags that neither the script nor the user's modules define stay in sys.argv.
        parse_known([sys.argv[0], *payload.own_flags])
    return work


def leave(code: int) -> NoReturn:
    """Ends a forked worker as an interpreter ends: threads, exit functions, streams.

    It never returns or raises, because the callers on the stack are the agent's.
    """
    try:
        # The work is done, so another SIGTERM must not make this end a failure.
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
