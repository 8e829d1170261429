"""Nodes as threads of this process: they start at once and are easy to debug, but are not isolated."""

import logging
import os
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from courier import Secret
from courier.lowlevel import join_address, loopback
from launchers.host.ports import PortReservations, PortTakenError
from launchers.host.usage import Usage
from launchers.supervision.allotment import notes_of_threads
from launchers.supervision.answers import Answers
from launchers.supervision.console import warn
from launchers.supervision.supervised_program import SupervisedProgram
from launchpad_lite.errors import LaunchError
from launchpad_lite.launching import (
    AddressTable,
    Executable,
    Launcher,
    LaunchOptions,
    LaunchPlan,
    RunningProgram,
)
from launchpad_lite.life.events import Ask, Looked, Start
from launchpad_lite.life.timing import DEFAULT, Timing
from launchpad_lite.parts.as_json import to_json
from launchpad_lite.process.activity import activities, watch_threads
from launchpad_lite.process.set_up import call
from launchpad_lite.process.stacks import describe_threads, stacks_of_threads
from launchpad_lite.worker.questions import answer
from launchpad_lite.worker.running import run_node
from launchpad_lite.worker.runtime import NodeRuntime
from launchpad_lite.worker.threads import NodeThread, ThreadHost

_LOGGER = logging.getLogger(__name__)


class ThreadLauncher(Launcher):
    """Runs each node in a thread of this process.

    Arguments that hold no handles are shared, not copied: a test may look at a list that its
    nodes filled. A node that ignores a request to end can be ended by force only while it runs Python code.
    Otherwise the result names it, and it stays behind as a daemon thread.
    """

    description = "threads of this process"
    shares_memory = True

    def __init__(self, *, timing: Timing = DEFAULT) -> None:
        self._timing = timing  # only tests set it

    def notes(self, executables: Sequence[Executable]) -> Sequence[str]:
        """Returns notes on what nodes ask for and threads cannot have."""
        return notes_of_threads(executables)

    def start(self, plan: LaunchPlan, options: LaunchOptions) -> RunningProgram:
        """Starts all nodes; LaunchError if a port is taken, or a function of `lp.set_up` raises."""
        call()
        for note in plan.notes:
            warn(_LOGGER, "program %r: %s", plan.program, note)
        ports = PortReservations()
        try:
            reserved = ports.reserve_all(plan.addresses)
        except PortTakenError as error:
            raise LaunchError(f"program {plan.program!r}: {error}") from error
        here = loopback()
        endpoints = {key: join_address(here, port) for key, port in reserved.items()}
        table = AddressTable(endpoints, Secret.generate())
        program = SupervisedProgram(plan, options, table, log_dir=None, timing=self._timing)
        host = _ThisProcess(plan, table, options.notice_s, program, ports, self._timing.handlers_s)
        program.supervise(host)
        return program


class CopyingThreadLauncher(ThreadLauncher):
    """A thread launcher that copies arguments, for tests of programs that will run in processes."""

    description = "threads of this process, with copied arguments"
    shares_memory = False


class _ThisProcess(ThreadHost):
    """Implements `launchers.supervision.Host`."""

    def __init__(
        self,
        plan: LaunchPlan,
        table: AddressTable,
        notice_s: float,
        program: SupervisedProgram,
        ports: PortReservations,
        handlers_s: float,
    ) -> None:
        super().__init__("this process", program.post, handlers_s)
        self._plan = plan
        self._table = table
        self._notice_s = notice_s
        self._program = program
        self._ports = ports
        self._executables = {each.name: each for each in plan.executables}

    def make(self, start: Start) -> NodeThread:
        if start.cause is not None:
            warn(_LOGGER, "restart %d: %s", start.attempt, start.cause.describe())
        executable = self._executables[start.node]
        setup = executable.setup(self._plan.program, start.attempt, self._notice_s)
        runtime = NodeRuntime(setup._replace(host=self.name), self._table, self._program.post)
        self._ports.lend(start.node)
        return NodeThread(runtime, lambda: run_node(executable.work.thaw, runtime))

    def host_of(self, node: str) -> str:  # noqa: ARG002 - all are here
        return self.name

    def usage(self) -> Mapping[str, Usage]:
        return {}

    def close(self) -> None:
        super().close()
        self._ports.close()

    def pids(self) -> Mapping[str, int]:
        return dict.fromkeys(self.nodes, os.getpid())

    def ask(
        self, question: str, argument: Any, nodes: Collection[str] | None, timeout_s: float
    ) -> Mapping[str, Any]:
        present = tuple(self.nodes.items())
        if question == "look":
            alive = {name: node for name, node in present if node.is_alive}
            return {name: to_json(each) for name, each in self._look(alive).items()}
        living = {name: node for name, node in present if node.answers}
        answers = Answers()
        number = answers.begin()
        asked = living.keys() if nodes is None else living.keys() & set(nodes)
        for name in asked:
            request = Ask(name, number, question, argument)
            answer(living[name].runtime, request, answers.take_in, living[name].threads())
        return answers.end(number, asked, timeout_s)

    def _look(self, nodes: Mapping[str, NodeThread]) -> Mapping[str, Looked]:
        doing = watch_threads()
        with stacks_of_threads() as stacks:  # once for all nodes
            found = {name: node.runtime.look(doing, node.threads()) for name, node in nodes.items()}
            own = {threading.get_ident()}.union(*(node.threads() for node in nodes.values()))
            others = stacks.keys() - own
        rest = f"other threads of process {os.getpid()}"
        calling = (each for each in activities(doing, others) if each.server)
        return {**found, rest: Looked(rest, describe_threads(others), tuple(calling))}
