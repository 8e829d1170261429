"""A running program: obeys the state machine of its life.

What all launchers share that supervise nodes themselves. Where and how nodes
run is behind `Host`; this module decides nothing.
"""

import logging
import queue
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from courier import ExceptionReport
from launchers._console import warn
from launchers._run_folder import make_run_folder
from launchers._stop_notices import MAX_NAMED, StopNotices
from launchers._watched import WatchedProgram
from launchers.host.usage import Usage
from launchpad_lite._events import (
    Constructed,
    Ended,
    Event,
    Finish,
    HostLost,
    KillAsked,
    NodeAction,
    RequestStop,
    Start,
    StopAsked,
    Tick,
)
from launchpad_lite._life import NodeTerms, ProgramLife
from launchpad_lite._result import indented, named
from launchpad_lite._stop_handlers import STOP_HANDLERS
from launchpad_lite._timing import DEFAULT, Timing
from launchpad_lite.launching import (
    AddressTable,
    LaunchOptions,
    LaunchPlan,
    NodeFailure,
    NodeStatus,
    Outcome,
    ProgramResult,
)

_LONGEST_WAIT_S = 3600.0
#: Seconds in which a node tells where its threads are.
_LOOK_S = 2.0

#: Seconds from which on a wait for a restart is shown.
_LONG_DELAY_S = 1.0
#: Nodes that were ended by force of which it is shown where they were.
_MAX_PLACES = 4

_LOGGER = logging.getLogger(__name__)


class Host(Protocol):
    """Where nodes run. All calls come from one thread."""

    name: str

    def host_of(self, node: str) -> str:
        """Returns the name of the host where a node runs. From any thread."""

    def perform(self, action: NodeAction) -> None:
        """Does what was decided about a node. Events report what comes of it.

        The worker before has ended when a `Start` comes. Nodes may ignore `DumpStacks` and `Terminate`.
        """

    def tell_ended(self, callers: Sequence[str], keys: Sequence[str]) -> None:
        """Informs nodes, also when they start again, that servers have ended for good.

        Args:
            callers: Whom to tell.
            keys: Of the addresses of these servers.
        """

    def tell_lost(self, keys: Sequence[str]) -> None:
        """Fails calls in flight to servers whose host is lost.

        Args:
            keys: Of the addresses on it.
        """

    def close(self) -> None:
        """Ends what is left and gives everything back."""

    def pids(self) -> Mapping[str, int]:
        """Returns the process of each node that was started. From any thread."""

    def usage(self) -> Mapping[str, Usage]:
        """Returns what nodes use of their hosts, as far as it is known. From any thread."""

    def stacks(self) -> Mapping[str, str]:
        """Returns what was written down of each node."""

    def look(self, timeout_s: float) -> Mapping[str, str]:
        """Returns where the threads of nodes are now; not of those that do not answer in time.

        From any thread.
        """


class SupervisedProgram(WatchedProgram):
    """A program whose nodes run on a host, or several as one, that this process supervises."""

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
            blame_s: Seconds within which the cause of a failure is known that others may have
                felt before; None: as `timing` says.
            tells_logs: Whether to print at a good end where that output is.
            timing: How long it waits for what else.
        """
        super().__init__(plan, options, log_dir, tells_logs=tells_logs)
        self._table = table
        self._blame_s = blame_s
        self._timing = timing
        #: Put from any thread and from signal handlers: only a SimpleQueue allows that.
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        #: Whether it was asked to end, maybe a moment ago: its thread waits for nothing any more.
        self.is_ending = False
        self._states = {executable.name: "starting" for executable in plan.executables}
        #: Nodes that have failed, whatever their state was last.
        self._failed: set[str] = set()
        self._attempts = {executable.name: 0 for executable in plan.executables}
        #: Known when it is supervised.
        self._host: Host
        self._stopping = threading.Event()
        # They may block or raise what they like; the supervisor continues. Started with the program:
        # at its end the interpreter may be ending too, and start no threads.
        self._handlers = threading.Thread(
            target=self._handle_stop, name="launchpad-stop-handlers", daemon=True
        )

    def supervise(self, host: Host) -> None:
        """Starts the nodes on a host and supervises them."""
        self._host = host
        for address in self.plan.addresses:
            address.bind(self._table)
        try:
            self._handlers.start()
            self.watch()
        except RuntimeError:  # the system gives no more threads: it would never be closed
            host.close()
            self._table.clients.close("the program could not be started")
            raise
        except BaseException:
            # An interrupt: the thread may run all the same, and would wait for nodes of a host that
            # is about to be closed.
            self.kill()
            raise

    def post(self, event: Event) -> None:
        """Takes in what happened on the host. From any thread."""
        self._events.put(event)
        # Not before: reports of a node that is given up for it must come after it.
        if isinstance(event, StopAsked | KillAsked):
            self.is_ending = True

    # What a RunningProgram can do

    def request_stop(self, reason: str, signum: int | None = None) -> None:
        """Asks all nodes to end."""
        self.post(StopAsked(reason, signum))

    def kill(self) -> None:
        """Ends all nodes by force."""
        self._is_in_hurry = True
        self.post(KillAsked())

    def status(self) -> list[NodeStatus]:
        """Returns how each node is."""
        host = self._host
        pids, usage = host.pids(), host.usage()
        # In this order: whoever ends because another failed is not seen without that.
        states = self._states.copy()
        states.update(dict.fromkeys(self._failed, "failed"))
        unknown: Usage = {"cpu": None, "memory_mib": None}
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
                **usage.get(executable.name, unknown),
            )
            for executable in self.plan.executables
        ]

    def stacks(self) -> Mapping[str, str]:
        """Returns where the threads of each node are now, by `label[replica]`: user code first."""
        found = self._host.look(_LOOK_S)
        silent = {
            node: f"it is {state}"
            if state in ("ended", "restarting")
            else f"no answer within {_LOOK_S:g} s: it was stopped, or runs code that holds the GIL"
            for node, state in self._states.items()
        }
        return {**silent, **found}

    # Its thread

    def _broken(self, error: BaseException) -> ProgramResult:
        report = ExceptionReport.of(error)
        failure = NodeFailure.of_exception("supervisor", self._host.name, report)
        return ProgramResult(Outcome.FAILED, (failure,), failure.summary)

    def _close(self, result: ProgramResult) -> None:
        host = self._host
        for step in (host.close, lambda: self._end_here(result), lambda: self._keep(result, host)):
            try:
                step()
            except BaseException as error:  # noqa: BLE001 - it is reported
                warn(_LOGGER, "the end of %r", self.plan.program, error=error)

    def _end_here(self, result: ProgramResult) -> None:
        """Ends what of the program is in this process."""
        self._stopping.set()
        self._handlers.join(self._timing.handlers_s)
        self._table.clients.close(f"program {self.plan.program!r} has ended: {result.summary}")

    def _keep(self, result: ProgramResult, host: Host) -> None:
        """Tidies the folders of checkpoints, names slow nodes, writes down what is known of a failure."""
        for executable in self.plan.executables:
            if (kept := executable.checkpoints) is not None:
                from launchpad_lite._checkpoints import CheckpointStore

                CheckpointStore(kept.folder, kept.keep).discard_incomplete()
        for why, nodes in _by_summary(result.cut_short).items():
            text = "%s: a call of %s failed while the program stopped (%s)"
            warn(_LOGGER, text, self.plan.program, named(nodes, MAX_NAMED), why)
        if result.killed:
            names = ", ".join(result.killed)
            text = "%s: ended by force: %s%s"
            where = _places(result.killed, host.stacks())
            warn(_LOGGER, text, self.plan.program, names, where)
        if result.outcome is Outcome.FAILED:
            folder = self._log_dir or make_run_folder(self.plan.program, self._options.log_dir)
            from launchpad_lite._crash import write_crash_report

            write_crash_report(folder, self.plan, result, host.stacks())
            self._crash_dir = folder

    def _follow(self) -> ProgramResult:
        host = self._host
        terms = [
            NodeTerms(each.name, host.host_of(each.name), each.calls, each.restart, each.liveness)
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
                # At once: the end of the program, or the next host of a node, may be far away.
                warn(_LOGGER, "%s", event.reason)
            actions = life.handle(event, time.monotonic())
            if isinstance(event, HostLost) and not life.stopping:
                self._tell_lost(event, host)  # before its nodes are started elsewhere
            self._note(event, life, host)
            for action in actions:
                if isinstance(action, Finish):
                    self._states = dict.fromkeys(self._states, "ended")
                    return action.result
                self._perform(host, action)
            if isinstance(event, HostLost) and life.stopping:
                # Not before: a node that was asked to end does not fail when its calls do.
                self._tell_lost(event, host)
            now = time.monotonic()
            if life.stopping:
                signum = event.signum if isinstance(event, StopAsked) else None
                reason = event.reason if isinstance(event, StopAsked) else ""
                notices.begin(reason, signum == signal.SIGINT, signum is not None, now)
                if notices.is_due(now):
                    notices.look(life.waited_for(), now)
            event = self._next_event(life.deadline, notices.due)

    def _perform(self, host: Host, action: NodeAction) -> None:
        if isinstance(action, Start):
            self._attempts[action.node] = action.attempt
            self._states[action.node] = "starting"
        elif isinstance(action, RequestStop):
            # What was registered in this process is called before any node can have ended.
            self._stopping.set()
        host.perform(action)

    def _handle_stop(self) -> None:
        self._stopping.wait()
        STOP_HANDLERS.call_all()

    def _next_event(self, *deadlines: float | None) -> Event:
        timeout_s = None
        deadline = min((each for each in deadlines if each is not None), default=None)
        if deadline is not None:
            # A notice of centuries is fine; a wait that long is not.
            timeout_s = min(max(0.0, deadline - time.monotonic()), _LONGEST_WAIT_S)
        try:
            return self._events.get(timeout=timeout_s)
        except queue.Empty:
            return Tick()

    def _note(self, event: Event, life: ProgramLife, host: Host) -> None:
        self._failed = life.failed  # before the state of another tells that it has ended
        if isinstance(event, Constructed):
            if event.attempt == self._attempts[event.node]:
                self._states[event.node] = "running" if event.runs else "serving"
        elif isinstance(event, Ended):
            self._note_end(event.node, life, host)
        elif isinstance(event, HostLost):
            for node in event.nodes:
                # One that has been started elsewhere meanwhile lives.
                if event.attempts is None or event.attempts[node] == self._attempts[node]:
                    self._note_end(node, life, host)

    def _note_end(self, node: str, life: ProgramLife, host: Host) -> None:
        goes_on = life.restarts_of(node) > self._attempts[node]
        self._states[node] = "restarting" if goes_on else "ended"
        if goes_on:
            delay_s = life.restart_at(node) - time.monotonic()
            if delay_s >= _LONG_DELAY_S:
                text = "%s: %s is restarted in %.1f s"
                warn(_LOGGER, text, self.plan.program, node, delay_s)
        elif not life.stopping and not life.over:
            self._tell_ended(node, host)

    def _tell_lost(self, event: HostLost, host: Host) -> None:
        """Fails calls to a lost host at once: its connections may look alive for long."""
        lost = set(event.nodes)
        keys = [
            address.key
            for executable in self.plan.executables
            if executable.name in lost and host.host_of(executable.name) == event.host
            for address in executable.addresses
        ]
        if keys:
            host.tell_lost(keys)
            self._table.clients.note_lost({self._table.endpoints[key] for key in keys})

    def _tell_ended(self, node: str, host: Host) -> None:
        """Fails calls to a node that would wait for it without end."""
        keys = [
            address.key
            for executable in self.plan.executables
            if executable.name == node
            for address in executable.addresses
        ]
        if keys:
            callers = [each.name for each in self.plan.executables if node in each.calls]
            host.tell_ended(callers, keys)
            self._table.clients.note_ended([self._table.endpoints[key] for key in keys])


def _by_summary(failures: Sequence[NodeFailure]) -> dict[str, list[str]]:
    """Returns the names of nodes by how they failed."""
    found: dict[str, list[str]] = {}
    for each in failures:
        found.setdefault(each.summary, []).append(each.node)
    return found


def _places(nodes: Sequence[str], stacks: Mapping[str, str]) -> str:
    """Returns, for people, where nodes were."""
    known = [node for node in nodes if stacks.get(node)]
    parts = [f"{node} was here:\n\n{indented(stacks[node])}" for node in known[:_MAX_PLACES]]
    if more := known[_MAX_PLACES:]:
        parts.append(f"Not shown: {', '.join(more)}")
    return "".join(f"\n\n{part}" for part in parts)
