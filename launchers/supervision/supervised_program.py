"""A running program: it carries out what the state machine of its life decides."""

import functools
import logging
import math
import os
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from courier.lowlevel import surviving
from launchers.host.usage import UNKNOWN, Usage
from launchers.supervision.console import warn
from launchers.supervision.deadlock_watch import DeadlockWatch
from launchers.supervision.run_folder import make_run_folder
from launchers.supervision.stop_notices import MAX_NAMED, StopNotices
from launchers.supervision.watched import WatchedProgram
from launchpad_lite.launching import (
    LOOK_S,
    AddressTable,
    LaunchOptions,
    LaunchPlan,
    NodeFailure,
    NodeStatus,
    Outcome,
    ProgramResult,
)
from launchpad_lite.life.events import (
    Action,
    Constructed,
    Ended,
    Event,
    Finish,
    HostLost,
    KillAsked,
    Logged,
    Looked,
    NodeAction,
    RequestStop,
    ServersEnded,
    ServersLost,
    Start,
    StopAsked,
    Terminate,
    Tick,
)
from launchpad_lite.life.program_life import NodeTerms, ProgramLife
from launchpad_lite.life.result import indented, named
from launchpad_lite.life.timing import DEFAULT, Timing
from launchpad_lite.parts.as_json import from_json
from launchpad_lite.process.stop_handlers import STOP_HANDLERS

if TYPE_CHECKING:
    from launchpad_lite.insight.history import RunHistory
    from launchpad_lite.life.waits import ServingNode

_IDLE_CPU = 0.05  # a node that uses fewer cores than this is idle
_UP = ("starting", "running", "serving")  # states in which a node can wait for others
_LONG_DELAY_S = 1.0  # seconds of the shortest wait for a restart that is shown
_LOOK_BEFORE_FORCE_S = (
    0.3  # seconds that nodes have to say whom they wait for, before some are ended
)
_REST_S = 10.0  # seconds in which that is not asked again
_MAX_PLACES = 4  # how many nodes that were ended by force are shown with their stacks

_LOGGER = logging.getLogger(__name__)


class Host(Protocol):
    """Where nodes run. All calls come from one thread."""

    def host_of(self, node: str) -> str:
        """Returns the name of the host where a node runs. From any thread."""

    def perform(self, action: NodeAction) -> None:
        """Carries out an action on nodes. Events report the result."""

    def close(self) -> None:
        """Ends what still runs, and releases everything."""

    def pids(self) -> Mapping[str, int]:
        """Returns the process of each node that was started. From any thread."""

    def usage(self) -> Mapping[str, Usage]:
        """Returns what nodes use of their hosts, as far as it is known. From any thread."""

    def stacks(self) -> Mapping[str, str]:
        """Returns the stacks that each node has written."""

    def ask(
        self, question: str, argument: Any, nodes: Collection[str] | None, timeout_s: float
    ) -> Mapping[str, Any]:
        """Returns what nodes (None: all) answer to `Ask`, for those that do in time.

        From any thread.
        """


class SupervisedProgram(WatchedProgram):
    """A program that this process supervises, whose nodes run on a host, or on several as one."""

    def __init__(
        self,
        plan: LaunchPlan,
        options: LaunchOptions,
        table: AddressTable,
        log_dir: Path | None,
        blame_s: float | None = None,
        *,
        tells_logs: bool = False,
        timing: Timing = DEFAULT,
    ) -> None:
        """Prepares it.

        Args:
            plan: What is launched.
            options: How.
            table: Where its nodes listen.
            log_dir: Folder with the output of the nodes, if it is kept.
            blame_s: Seconds within which the cause of a failure is known, after nodes that it made fail;
                None: as in `timing`.
            tells_logs: Whether to print at a good end where that output is.
            timing: All other limits of time.
        """
        super().__init__(plan, options, log_dir, tells_logs=tells_logs)
        self._table = table
        self._blame_s = blame_s
        self._timing = timing
        #: Whether it was asked to end; from then on its thread waits for no answers.
        self.is_ending = False
        self._states = {executable.name: "starting" for executable in plan.executables}
        #: The time at which each entered its state.
        self._since = dict.fromkeys(self._states, time.time())
        self._failed: set[str] = set()  # nodes that have failed, in whatever state
        self._attempts = {executable.name: 0 for executable in plan.executables}
        #: Addresses of ended servers, by the nodes that call them: a node that starts again must know.
        self._ended_for: dict[str, tuple[str, ...]] = {}
        self._host: Host  # set by `supervise`
        #: Who waited for whom when nodes were last ended by force, and when that was.
        self._waits, self._looked_at = "", -math.inf
        self._stopping = threading.Event()
        # In their own thread, because handlers may block or raise. It starts with the program, because at
        # the end the interpreter may be ending too, and start no threads.
        self._handlers = threading.Thread(
            target=self._handle_stop, name="launchpad-stop-handlers", daemon=True
        )
        tell = functools.partial(warn, _LOGGER, "%s: %s", plan.program)
        self._deadlocks = DeadlockWatch(self.why, self._idle_nodes, tell, timing)
        self._history: RunHistory | None = None

    def supervise(self, host: Host) -> None:
        """Starts the nodes on a host and supervises them."""
        self._host = host
        for address in self.plan.addresses:
            address.bind(self._table)
        try:
            self._handlers.start()
            self.watch()
            self._begin_history()
        except RuntimeError:  # the system gives no more threads: no thread would close the host
            host.close()
            self._table.clients.close("the program could not be started")
            raise
        except BaseException:
            # An interrupt: the thread may run already, and would wait for nodes of a closed host.
            self.kill()
            raise
        # Last, so that it does not outlive a program that could not be started.
        self._deadlocks.start()

    def _begin_history(self) -> None:
        if self._log_dir is not None:
            from launchpad_lite.insight.history import RunHistory  # while nodes start

            tell = functools.partial(warn, _LOGGER, "%s: %s", self.plan.program)
            self._history = RunHistory(self._log_dir, self.plan, self.status, tell)
            if not self._stopping.is_set():  # else nobody might end it
                self._history.start()

    def post(self, event: Event) -> None:
        """Queues an event of the host. From any thread."""
        super().post(event)
        # Set after the event is queued: threads that see it give nodes up, and report that after the event.
        if isinstance(event, StopAsked | KillAsked):
            self.is_ending = True

    # What a RunningProgram can do

    def status(self) -> list[NodeStatus]:
        """Returns how each node is."""
        host = self._host
        pids, usage = host.pids(), host.usage()
        # In this order: a node that ended because another failed must not be seen before that failure.
        states = self._states.copy()
        states.update(dict.fromkeys(self._failed, "failed"))
        return [
            NodeStatus(
                executable.name,
                states[executable.name],
                host.host_of(executable.name),
                pids.get(executable.name),
                {
                    address.name: self._table.endpoints[address.key]
                    for address in executable.addresses
                },
                self._attempts[executable.name],
                usage.get(executable.name, UNKNOWN)["cpu"],
                usage.get(executable.name, UNKNOWN)["memory_mib"],
                since=self._since[executable.name],
                gpu_memory_mib=usage.get(executable.name, UNKNOWN)["gpu_memory_mib"],
            )
            for executable in self.plan.executables
        ]

    def ask(
        self,
        question: str,
        argument: Any = None,
        *,
        nodes: Collection[str] | None = None,
        timeout_s: float = LOOK_S,
    ) -> Mapping[str, Any]:
        """Returns what nodes answer to a question."""
        found = self._host.ask(question, argument, nodes, timeout_s)
        if question == "numbers" and self._history is not None:
            self._history.note({node: each for node, each in found.items() if "error" not in each})
        return found

    def _look(self, timeout_s: float = LOOK_S) -> dict[str, Looked]:
        found = self.ask("look", timeout_s=timeout_s)
        return {
            node: from_json(Looked, each) for node, each in found.items() if "error" not in each
        }

    def stacks(self) -> Mapping[str, str]:
        """Returns where the threads of each node are now, by `label[replica]`: user code first."""
        from launchpad_lite.life.waits import silence

        looks = self._look()
        # Stacks have names of files, which need not be valid text.
        found = {
            node: each.stacks.encode(errors="replace").decode() for node, each in looks.items()
        }
        usage = self._host.usage()
        silent = {
            node: f"it {silence(state, usage.get(node, UNKNOWN)['kernel_state'])}"
            for node, state in self._states.items()
        }
        return {**silent, **found}

    def why(self, timeout_s: float = LOOK_S) -> str:
        """Returns who waits for whom, and why the program does not go on."""
        from launchpad_lite.life.waits import explain

        return explain(self._serving_nodes(timeout_s))

    def wait_graph(self) -> Mapping[str, Any]:
        """Returns what `why` says, and what it is made of."""
        from launchpad_lite.life.waits import graph

        return graph(self._serving_nodes())

    def _serving_nodes(self, timeout_s: float = LOOK_S) -> "dict[str, ServingNode]":
        from launchpad_lite.life.waits import ServingNode

        before = self._states.copy()
        looks = self._look(timeout_s)
        usage = self._host.usage()
        nodes = {
            each.name: ServingNode(
                # One that has begun to answer meanwhile is not silent.
                before[each.name] if each.name not in looks and each.state in _UP else each.state,
                [each.name, *each.endpoints, *each.endpoints.values()],
                each.pid,
                looks.pop(each.name, None),
                usage.get(each.name, UNKNOWN)["kernel_state"],
            )
            for each in self.status()
        }
        # Where nodes are threads, the threads that they have started belong to no node.
        for look in looks.values():
            nodes[f"process {os.getpid()}"] = ServingNode("running", [], os.getpid(), look)
        return nodes

    def _idle_nodes(self) -> tuple[frozenset[str], bool]:
        usage = self._host.usage()
        busy = {node for node, each in usage.items() if (each["cpu"] or 0.0) >= _IDLE_CPU}
        # Only nodes that have a process: a program whose processes are still being made is left alone.
        up = frozenset(node for node in self._host.pids() if self._states[node] in _UP)
        return up - busy, busy.isdisjoint(up)

    # Its thread

    def _close(self, result: ProgramResult) -> None:
        for step in (self._host.close, lambda: self._end_here(result), lambda: self._keep(result)):
            try:
                step()
            except BaseException as error:  # noqa: BLE001 - it is reported
                warn(_LOGGER, "an error at the end of %r", self.plan.program, error=error)

    def _end_here(self, result: ProgramResult) -> None:
        self._deadlocks.end()
        self._stopping.set()
        if self._history is not None:
            self._history.end(result)
        self._handlers.join(self._timing.handlers_s)
        self._table.clients.close(f"program {self.plan.program!r} has ended: {result.summary}")

    def _keep(self, result: ProgramResult) -> None:
        """Removes incomplete checkpoints, names slow nodes, and writes the report of a failure."""
        for executable in self.plan.executables:
            if (kept := executable.checkpoints) is not None:
                from launchpad_lite.worker.checkpoints import CheckpointStore

                CheckpointStore(kept.folder, kept.keep).discard_incomplete()
        for why, nodes in _by_summary(result.cut_short).items():
            text = "%s: a call of %s failed while the program stopped (%s)"
            warn(_LOGGER, text, self.plan.program, named(nodes, MAX_NAMED), why)
        if result.killed:
            names, where = ", ".join(result.killed), _places(result.killed, self._host.stacks())
            where = (self._waits and f"\n\n{self._waits}") + where
            warn(_LOGGER, "%s: ended by force: %s%s", self.plan.program, names, where)
        if result.outcome is Outcome.FAILED:
            folder = self._log_dir or make_run_folder(self.plan.program, self._options.log_dir)
            from launchpad_lite.launching.crash import write_crash_report

            write_crash_report(folder, self.plan, result, self._host.stacks(), self._waits)
            self._crash_dir = folder

    def _follow(self) -> ProgramResult:
        host_of = self._host.host_of
        terms = [
            NodeTerms(each.name, host_of(each.name), each.calls, each.restart, each.liveness)
            for each in self.plan.executables
        ]
        life = ProgramLife(
            terms,
            self._options.notice_s,
            timing=self._timing,
            blame_s=self._blame_s,
            now=time.monotonic(),
        )
        notices = StopNotices(self.plan.program, self._options.notice_s, self._tell)
        event: Event = Tick()
        while True:
            if isinstance(event, HostLost) and not life.stopping:
                # At once, because the end of the program, or the next host of a node, may take long.
                warn(_LOGGER, "%s", event.reason)
            actions = life.handle(event, time.monotonic())
            if isinstance(event, HostLost) and not life.stopping:
                self._tell_lost(event)  # before its nodes are started elsewhere
            self._note(event, life)
            if not isinstance(event, KillAsked):
                self._look_before_force(actions, life)
            for action in actions:
                if isinstance(action, Finish):
                    self._states = dict.fromkeys(self._states, "ended")
                    return action.result
                self._perform(action)
            if isinstance(event, HostLost) and life.stopping:
                # After the actions, because a node that was asked to end does not fail when its calls fail.
                self._tell_lost(event)
            now = time.monotonic()
            if life.stopping:
                notices.begin(event, now)
                if notices.is_due(now):
                    notices.look(life.waited_for(), now)
            deadlines = [each for each in (life.deadline, notices.due) if each is not None]
            event = self._next(min(deadlines, default=math.inf) - now) or Tick()

    def _look_before_force(self, actions: Sequence[Action], life: ProgramLife) -> None:
        forced = [each.node for each in actions if isinstance(each, Terminate)]
        if forced and (now := time.monotonic()) - self._looked_at > _REST_S:
            self._looked_at = now
            with surviving("the look at nodes before their end", 0.0):
                self._waits = self.why(_LOOK_BEFORE_FORCE_S)
            if not life.stopping:  # else it is told at the end
                text = "%s: %s is hung, and ended by force: %s"
                warn(_LOGGER, text, self.plan.program, named(forced, MAX_NAMED), self._waits)

    def _perform(self, action: NodeAction) -> None:
        if isinstance(action, RequestStop):
            # Handlers of this process are called before any node can have ended.
            self._stopping.set()
        if isinstance(action, Start):
            self._attempts[action.node] = action.attempt
            self._enter(action.node, "starting")
        self._host.perform(action)
        if isinstance(action, Start) and (keys := self._ended_for.get(action.node)):
            self._host.perform(ServersEnded(action.node, keys))

    def _handle_stop(self) -> None:
        self._stopping.wait()
        STOP_HANDLERS.call_all()

    def _note(self, event: Event, life: ProgramLife) -> None:
        self._failed = life.failed  # first: see the order in `status`
        match event:
            case Constructed() if event.attempt == self._attempts[event.node]:
                self._enter(event.node, "running" if event.runs else "serving")
            case Ended():
                self._note_end(event.node, life)
            case HostLost():
                for node in event.nodes:
                    # A node that was started elsewhere meanwhile is alive.
                    if event.attempts is None or event.attempts[node] == self._attempts[node]:
                        self._note_end(node, life)
            case Logged() if self._history is not None:
                self._history.note(event)
            case _:
                pass

    def _enter(self, node: str, state: str) -> None:
        self._states[node], self._since[node] = state, time.time()

    def _note_end(self, node: str, life: ProgramLife) -> None:
        goes_on = life.restarts_of(node) > self._attempts[node]
        self._enter(node, "restarting" if goes_on else "ended")
        if goes_on:
            delay_s = life.restart_at(node) - time.monotonic()
            if delay_s >= _LONG_DELAY_S:
                warn(_LOGGER, "%s: %s is restarted in %.1f s", self.plan.program, node, delay_s)
        elif not life.stopping and not life.over:
            self._tell_ended(node)

    def _tell_lost(self, event: HostLost) -> None:
        """Fails calls to a lost host at once: its connections may look alive for long."""
        if keys := self._keys([n for n in event.nodes if self._host.host_of(n) == event.host]):
            self._host.perform(ServersLost(keys))
            self._table.clients.note_lost({self._table.endpoints[key] for key in keys})

    def _tell_ended(self, node: str) -> None:
        """Fails calls to a node that has ended, which would wait forever."""
        if keys := self._keys([node]):
            for caller in (each.name for each in self.plan.executables if node in each.calls):
                self._ended_for[caller] = (*self._ended_for.get(caller, ()), *keys)
                self._host.perform(ServersEnded(caller, keys))
            self._table.clients.note_ended([self._table.endpoints[key] for key in keys])

    def _keys(self, nodes: Sequence[str]) -> tuple[str, ...]:
        servers = (each for each in self.plan.executables if each.name in nodes)
        return tuple(address.key for each in servers for address in each.addresses)


def _by_summary(failures: Sequence[NodeFailure]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for each in failures:
        found.setdefault(each.summary, []).append(each.node)
    return found


def _places(nodes: Sequence[str], stacks: Mapping[str, str]) -> str:
    known = [node for node in nodes if stacks.get(node)]
    parts = [f"{node} was here:\n\n{indented(stacks[node])}" for node in known[:_MAX_PLACES]]
    if more := known[_MAX_PLACES:]:
        parts.append(f"Not shown: {', '.join(more)}")
    return "".join(f"\n\n{part}" for part in parts)
