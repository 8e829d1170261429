"""Nodes as threads of this process: starts at once, easy to debug, no protection."""

import contextlib
import contextvars
import logging
import os
import threading
from collections.abc import Mapping, Sequence

from courier import ExceptionReport, Secret
from launchers._allotment import notes_of_threads
from launchers._console import warn
from launchers._ports import PortReservations, PortTakenError, endpoint
from launchers._supervisor import SupervisedProgram
from launchers.host.usage import Usage
from launchpad_lite._events import (
    Constructed,
    CutShort,
    DumpStacks,
    EndCalls,
    Ended,
    Healthy,
    Heartbeat,
    Kill,
    Leaving,
    LetGo,
    NodeAction,
    RequestStop,
    Start,
    StopAsked,
    StopReceived,
    Terminate,
)
from launchpad_lite._exit import leave_behind
from launchpad_lite._forcing import ForcedExit, settle
from launchpad_lite._result import advice_on
from launchpad_lite._runtime import NodeRuntime, WorkerLink
from launchpad_lite._set_up import call
from launchpad_lite._stacks import describe_threads, frames_of_threads
from launchpad_lite._timing import DEFAULT, Timing
from launchpad_lite._worker import run_work
from launchpad_lite.errors import LaunchError
from launchpad_lite.launching import (
    AddressTable,
    Executable,
    Launcher,
    LaunchOptions,
    LaunchPlan,
    NodeFailure,
    RunningProgram,
)

_LOGGER = logging.getLogger(__name__)


class ThreadLauncher(Launcher):
    """Runs each node in a thread of this process.

    Arguments that hold no handles are shared, not copied: a test may look at a list that its
    nodes filled. A node that does not end when asked cannot be ended by force, unless it runs
    Python code; it is named in the result and left behind as a daemon thread.
    """

    description = "threads of this process"
    shares_memory = True

    def __init__(self, *, timing: Timing = DEFAULT) -> None:
        """Prepares it.

        Args:
            timing: How long its programs wait for what; for tests.
        """
        self._timing = timing

    def notes(self, executables: Sequence[Executable]) -> Sequence[str]:
        """Returns what threads cannot have of their own."""
        return notes_of_threads(executables)

    def start(self, plan: LaunchPlan, options: LaunchOptions) -> RunningProgram:
        """Starts all nodes.

        Raises:
            LaunchError: A port that was asked for is taken, or a function of `lp.set_up` raises.
        """
        call()
        for note in plan.notes:
            warn(_LOGGER, "program %r: %s", plan.program, note)
        ports = PortReservations()
        try:
            reserved = ports.reserve_all(plan.addresses)
        except PortTakenError as error:
            raise LaunchError(f"program {plan.program!r}: {error}") from error
        endpoints = {key: endpoint(port) for key, port in reserved.items()}
        table = AddressTable(endpoints, Secret.generate())
        program = SupervisedProgram(plan, options, table, log_dir=None, timing=self._timing)
        host = _ThreadHost(plan, table, options.notice_s, program, ports, self._timing.handlers_s)
        program.supervise(host)
        return program


class CopyingThreadLauncher(ThreadLauncher):
    """The same for tests of programs that will run in processes: arguments are copied."""

    description = "threads of this process, with copied arguments"
    shares_memory = False


class _Link(WorkerLink):
    """How a node's thread speaks to the supervisor."""

    def __init__(self, node: str, attempt: int, program: SupervisedProgram) -> None:
        self._node = node
        self._attempt = attempt
        self._program = program

    def constructed(self, runs: bool) -> None:
        self._program.post(Constructed(self._node, self._attempt, runs))

    def ask_stop(self) -> None:
        self._program.post(StopAsked(f"lp.stop() in {self._node}"))

    def leaving(self) -> None:
        self._program.post(Leaving(self._node, self._attempt))

    def cut_short(self, report: ExceptionReport) -> None:
        failure = NodeFailure.of_exception(self._node, _ThreadHost.name, report)
        self._program.post(CutShort(self._node, self._attempt, failure))

    def stop_received(self, listens: bool) -> None:
        self._program.post(StopReceived(self._node, self._attempt, listens))

    def healthy(self) -> None:
        self._program.post(Healthy(self._node, self._attempt))

    def heartbeat(self) -> None:
        self._program.post(Heartbeat(self._node, self._attempt))


class _ThreadNode:
    """One start of a node: a thread that supervises another, in which the user's code runs."""

    def __init__(self, executable: Executable, runtime: NodeRuntime, handlers_s: float) -> None:
        self.runtime = runtime
        self._handlers_s = handlers_s
        self._work = executable.work
        #: May be ended at any point; the other one cleans up.
        self._runner: threading.Thread | None = None
        self._report: ExceptionReport | None = None
        # They may block; the supervisor continues.
        self._handlers = threading.Thread(
            target=runtime.run_stop_handlers, name="launchpad-stop-handlers", daemon=True
        )

    def run(self) -> ExceptionReport | None:
        """Runs the node to its end, in a thread of its own; returns how it failed."""
        with self.runtime.active():
            context = contextvars.copy_context()
            self._runner = threading.Thread(
                target=context.run, args=(self._run_work,), name=self.runtime.name, daemon=True
            )
            self._runner.start()
            self._runner.join()
        if self._handlers.is_alive():
            self._handlers.join(self._handlers_s)
        return self._report  # None, too, if it was ended by force

    def _run_work(self) -> None:
        # It may be forced before it begins, or behind its end.
        with contextlib.suppress(ForcedExit):
            self._report = self.runtime.forcing.run(lambda: run_work(self._work, self.runtime))

    def request_stop(self, *, interrupts: bool) -> None:
        """Asks the node to end. May be repeated."""
        if not self.runtime.is_asked:
            with contextlib.suppress(RuntimeError):  # the interpreter ends already
                self._handlers.start()
        self.runtime.request_stop(interrupts=interrupts)

    @property
    def is_alive(self) -> bool:
        """Whether its code still runs."""
        return self._runner is not None and self._runner.is_alive()

    def threads(self) -> set[int]:
        """Returns the idents of the threads that run its code: its own, and those of its calls."""
        own = self._runner.ident if self._runner is not None else None
        return self.runtime.threads_of_calls() | ({own} if own is not None else set())

    def force(self) -> None:
        """Does what SIGTERM is to a process: calls that wait fail, Python code gets ForcedExit."""
        # Its way out may ask whether it was asked to stop.
        self.request_stop(interrupts=True)
        self.runtime.force()

    def leave_behind(self) -> None:
        """Lets the interpreter exit although the node's code runs."""
        assert self._runner is not None
        leave_behind(self._runner)

    def stack(self) -> str:
        """Returns where the user's code is."""
        return describe_threads(self.threads())


class _ThreadHost:
    """Implements `launchers._supervisor.Host`."""

    name = "this process"

    def __init__(
        self,
        plan: LaunchPlan,
        table: AddressTable,
        notice_s: float,
        program: SupervisedProgram,
        ports: PortReservations,
        handlers_s: float,
    ) -> None:
        self._plan = plan
        self._table = table
        self._notice_s = notice_s
        self._program = program
        self._ports = ports
        self._handlers_s = handlers_s
        self._executables = {each.name: each for each in plan.executables}
        self._nodes: dict[str, _ThreadNode] = {}
        self._threads: list[threading.Thread] = []
        self._stacks: dict[str, str] = {}
        #: Addresses of servers that have ended.
        self._ended: list[str] = []

    def perform(self, action: NodeAction) -> None:
        match action:
            case Start():
                self._start(action.node, action.attempt, action.cause)
            case RequestStop():
                self._nodes[action.node].request_stop(interrupts=action.interrupts)
            case LetGo():
                self._nodes[action.node].runtime.let_go()
            case EndCalls():
                self._nodes[action.node].runtime.end_calls()
            case DumpStacks():
                self._stacks[action.node] = self._nodes[action.node].stack()
            case Terminate() | Kill():
                self._nodes[action.node].force()

    def _start(self, node: str, attempt: int, cause: NodeFailure | None) -> None:
        if cause is not None:
            warn(_LOGGER, "restart %d: %s", attempt, cause.describe())
        executable = self._executables[node]
        setup = executable.setup(self._plan.program, attempt, self._notice_s)
        runtime = NodeRuntime(setup, self._table, _Link(node, attempt, self._program))
        runtime.note_ended(self._ended)
        self._nodes[node] = _ThreadNode(executable, runtime, self._handlers_s)
        self._stacks.pop(node, None)
        self._ports.lend(node)
        thread = threading.Thread(
            target=self._look_after,
            args=(self._nodes[node], attempt),
            name=f"launchpad-{node}",
            daemon=True,
        )
        self._threads = [each for each in self._threads if each.is_alive()]
        try:
            thread.start()
        except RuntimeError as error:  # the system gives no more
            failure = NodeFailure(
                node, self.name, f"it cannot be started: {error}{advice_on(error)}"
            )
            self._program.post(Ended(node, attempt, failure))
        else:
            self._threads.append(thread)

    def _look_after(self, node: _ThreadNode, attempt: int) -> None:
        try:
            report = node.run()
        except BaseException as error:  # noqa: BLE001 - the supervisor would wait for ever
            report = ExceptionReport.of(error)
        name, failure = node.runtime.name, None
        if report is not None:
            failure = NodeFailure.of_exception(name, self.name, report)
        self._program.post(Ended(name, attempt, failure, self._stacks.get(name, "")))

    def host_of(self, node: str) -> str:  # noqa: ARG002 - all are here
        """Returns what all have for a host."""
        return self.name

    def usage(self) -> Mapping[str, Usage]:
        """Threads of one process use it together."""
        return {}

    def tell_ended(self, callers: Sequence[str], keys: Sequence[str]) -> None:
        self._ended += keys
        for caller in callers:
            if caller in self._nodes:
                self._nodes[caller].runtime.note_ended(keys)

    def tell_lost(self, keys: Sequence[str]) -> None:
        """Does nothing: this process is not lost while it runs."""

    def close(self) -> None:
        for node in self._nodes.values():
            if node.is_alive:  # given up, or the supervisor failed
                node.force()
                node.leave_behind()
                settle()
        for thread in self._threads:
            if not thread.is_alive():
                thread.join()
        self._ports.close()

    def pids(self) -> Mapping[str, int]:
        return dict.fromkeys(self._nodes, os.getpid())

    def stacks(self) -> Mapping[str, str]:
        return dict(self._stacks)

    def look(self, timeout_s: float) -> Mapping[str, str]:  # noqa: ARG002 - answers at once
        nodes = {name: node for name, node in tuple(self._nodes.items()) if node.is_alive}
        with frames_of_threads() as frames:
            others = frames.keys() - {threading.get_ident()}
        for node in nodes.values():
            others -= node.threads()
        found = {name: node.stack() for name, node in nodes.items()}
        return {**found, f"other threads of process {os.getpid()}": describe_threads(others)}
