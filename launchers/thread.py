"""Nodes as threads of this process: starts at once, easy to debug, no protection."""

import contextvars
import ctypes
import os
import threading
from collections.abc import Mapping

from courier import ExceptionReport, Secret
from launchers._ports import PortReservations, PortTakenError, endpoint
from launchers._supervisor import SupervisedProgram
from launchpad_lite._life import Constructed, Ended, StopAsked
from launchpad_lite._runtime import NodeRuntime
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
            each.name: threading.Thread(
                target=self._look_after, args=(each,), name=f"launchpad-{each.name}", daemon=True
            )
            for each in plan.executables
        }
        #: The threads in which users' code runs.
        self._nodes: dict[str, threading.Thread] = {}

    def start(self) -> None:
        for thread in self._threads.values():
            thread.start()

    def _look_after(self, executable: Executable) -> None:
        """Runs a node in a thread of its own, which may be ended at any point, and cleans up."""
        runtime = self._runtimes[executable.name]
        reports: list[ExceptionReport | None] = []
        with runtime.active():
            context = contextvars.copy_context()
            node = threading.Thread(
                target=context.run,
                args=(lambda: reports.append(run_work(executable.work, runtime)),),
                name=executable.name,
                daemon=True,
            )
            self._nodes[executable.name] = node
            node.start()
            node.join()
        # Without a report it was ended by force.
        report = reports[0] if reports else None
        failure = None
        if report is not None:
            failure = NodeFailure.of_exception(executable.name, self.name, report)
        self._program.post(Ended(executable.name, failure))

    def request_stop(self, node: str) -> None:
        self._runtimes[node].request_stop()

    def terminate(self, node: str) -> None:
        # What SIGTERM is to a process: calls that wait fail, Python code gets a SystemExit.
        self._runtimes[node].close_clients()
        thread = self._nodes.get(node)
        if thread is not None and thread.is_alive() and thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
            )

    def kill(self, node: str) -> None:
        # A second SystemExit could hit the clean-up that the first one led to.
        if not self._runtimes[node].stop_event.is_set():
            self._runtimes[node].request_stop()
            self.terminate(node)

    def close(self) -> None:
        for thread in self._threads.values():
            if not thread.is_alive():
                thread.join()
        self._ports.close()

    def pids(self) -> Mapping[str, int]:
        return dict.fromkeys(self._threads, os.getpid())
