"""Nodes as threads of this process: starts at once, easy to debug, no protection."""

import ctypes
import os
import threading
from collections.abc import Mapping

from courier import Secret
from launchers._ports import PortReservations, PortTakenError, endpoint
from launchers._supervisor import SupervisedProgram
from launchpad_lite._life import Constructed, Ended, StopAsked
from launchpad_lite._runtime import NodeRuntime
from launchpad_lite._stop_handlers import STOP_HANDLERS
from launchpad_lite._worker import run_node
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

#: Seconds that stop handlers have to return once all nodes have ended.
_HANDLERS_S = 2.0


class ThreadLauncher(Launcher):
    """Runs each node in a thread of this process.

    Arguments that hold no handles are shared, not copied: a test may look at a list that its
    nodes filled. A node that does not end when asked cannot be ended by force, unless it runs
    Python code; it is named in the result and left behind as a daemon thread.
    """

    description = "threads of this process"
    shares_memory = True

    def start(self, plan: LaunchPlan, options: LaunchOptions) -> RunningProgram:
        """Starts all nodes.

        Raises:
            LaunchError: A port that was asked for is taken.
        """
        ports = PortReservations()
        try:
            reserved = ports.reserve_all(plan.addresses)
        except PortTakenError as error:
            raise LaunchError(f"program {plan.program!r}: {error}") from error
        endpoints = {key: endpoint(port) for key, port in reserved.items()}
        table = AddressTable(endpoints, Secret.generate())
        program = SupervisedProgram(plan, options, table, log_dir=None)
        host = _ThreadHost(plan, table, options.notice_s, program, ports)
        program.supervise(host)
        host.start()
        return program


class CopyingThreadLauncher(ThreadLauncher):
    """The same for tests of programs that will run in processes: arguments are copied."""

    description = "threads of this process, with copied arguments"
    shares_memory = False


class _Link:
    """How a node's thread speaks to the supervisor."""

    def __init__(self, node: str, program: SupervisedProgram) -> None:
        self._node = node
        self._program = program

    def constructed(self, runs: bool) -> None:
        self._program.post(Constructed(self._node, runs))

    def ask_stop(self) -> None:
        self._program.post(StopAsked(f"lp.stop() in {self._node}"))


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
    ) -> None:
        self._program = program
        self._ports = ports
        self._runtimes = {
            each.name: NodeRuntime(
                each.label,
                each.replica,
                plan.program,
                table,
                _Link(each.name, program),
                notice_s,
            )
            for each in plan.executables
        }
        self._threads = {
            each.name: threading.Thread(target=self._run, args=(each,), name=each.name, daemon=True)
            for each in plan.executables
        }
        self._handlers: threading.Thread | None = None

    def start(self) -> None:
        for thread in self._threads.values():
            thread.start()

    def _run(self, executable: Executable) -> None:
        report = run_node(executable.work, self._runtimes[executable.name])
        failure = None
        if report is not None:
            failure = NodeFailure.of_exception(executable.name, self.name, report)
        self._program.post(Ended(executable.name, failure))

    def request_stop(self, node: str) -> None:
        if self._handlers is None:
            # They may block or raise what they like; the supervisor goes on.
            self._handlers = threading.Thread(
                target=STOP_HANDLERS.call_all, name="launchpad-stop-handlers", daemon=True
            )
            self._handlers.start()
        self._runtimes[node].request_stop()

    def terminate(self, node: str) -> None:
        # What SIGTERM is to a process: calls that wait fail, Python code gets a SystemExit.
        self._runtimes[node].close_clients()
        thread = self._threads[node]
        if thread.is_alive() and thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
            )

    def kill(self, node: str) -> None:
        self._runtimes[node].request_stop()
        self.terminate(node)

    def close(self) -> None:
        for thread in self._threads.values():
            if not thread.is_alive():
                thread.join()
        if self._handlers is not None:
            self._handlers.join(_HANDLERS_S)
        self._ports.close()

    def pids(self) -> Mapping[str, int]:
        return dict.fromkeys(self._threads, os.getpid())
