"""The launcher's side of a host: exchanges messages with its agent."""

import contextlib
import dataclasses
import functools
import logging
import math
import os
import queue
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from courier.lowlevel import loaded_module
from launchers.host.link import OVERSLEPT_S, SIGNS_PER_SILENCE, LinkFrame, write_all
from launchers.host.relay import RELAYED
from launchers.host.usage import Usage
from launchers.supervision.agent_link import AgentLink
from launchers.supervision.answers import Answers
from launchers.supervision.breakpoints import Breakpoints
from launchers.supervision.console import Output, warn
from launchers.supervision.logs import CALLS, NodeLogs
from launchers.supervision.supervised_program import SupervisedProgram
from launchpad_lite.errors import LaunchError
from launchpad_lite.launching import Address, NodeFailure
from launchpad_lite.life.events import (
    Answered,
    Ask,
    Debugged,
    Ended,
    Event,
    Failed,
    Failing,
    HostLost,
    Kill,
    NodeAction,
    RequestStop,
    Said,
    ServersMoved,
    Start,
    StopAsked,
    Terminate,
    from_fields,
    to_fields,
)
from launchpad_lite.life.result import MOST_CALLS
from launchpad_lite.parts.as_json import to_json
from launchpad_lite.parts.log_file import log_path
from launchpad_lite.parts.private_files import make_folder, write_private

if TYPE_CHECKING:
    from launchers.host.grant import Grant
    from launchers.host.worker import Payload

_LOGGER = logging.getLogger(__name__)

_QUIT_S = 5.0
#: Seconds for which an agent may leave a ping unanswered while all its workers are ended by force: less
#: than the time from SIGTERM to SIGKILL, and from SIGKILL to giving up.
_SILENT_S = 0.9
_SWEEP_S = 5.0  # seconds that the reaper has to end what its agent left
#: Seconds between two pings of an agent, whose answer tells what its workers use.
_PING_S = 5.0
_NOTHING = LinkFrame("")  # stands for a frame that did not come in time
_ANSWERS = ("surveyed", "probed", "relaying", "reserved", "unable")
_ANSWER_S = 20.0  # seconds that an agent has to answer a question about its host
#: Seconds after which a thread that waits for an answer notices that the program is to end.
_LOOK_S = 0.1
_NEVER = -1  # the attempt of a node that was not started here, so that it is not lost with the host
_PROCESS = re.compile(r"process (\d+) of this machine")  # a peer in the records of calls
_LINK_BROKE = 255  # exit code of ssh when the connection failed


class EndingError(LaunchError):
    """Something was not done, because the program was asked to end."""


class AgentHost:
    """One host with its agent. Implements `launchers.supervision.Host`, from any thread."""

    def __init__(self, name: str, link: AgentLink, console: Output | None) -> None:
        """Takes over the link to the agent; `console` shows the output of nodes, if it is shown."""
        self.name = name
        self._link = link
        self._process = link.process
        self._console = console
        self._logs: NodeLogs | None = None
        self._program: SupervisedProgram | None = None
        #: By node: what its worker must know, and what it gets of the host.
        self.payloads: dict[str, Payload] = {}
        self.grants: dict[str, Grant] = {}
        self._log_dir = Path()
        self._log_limit_bytes = math.inf
        self._attempts: dict[str, int] = {}  # the last start of each node
        self._pids: dict[str, int] = {}
        self._usage: Mapping[str, Usage] = {}
        self._failed: set[str] = set()  # nodes whose last worker failed
        self._stacks: dict[str, str] = {}
        self._said_when_asked = Answers()
        self._breakpoints = Breakpoints(self.ask)
        #: Nodes that were started and have not ended, and those that are being ended by SIGKILL.
        self._living: set[str] = set()
        self._killed: set[str] = set()
        self._stopping = False  # whether all nodes are to end
        #: When the agent got the ping whose answer tells that it is not stuck.
        self._questioned_at = math.inf
        self._closing = False
        self._close_by = math.inf
        self.is_lost = False  # whether the link to its agent has ended
        #: Whether the agent was asked from outside to end; then it starts no more nodes.
        self.is_departing = False
        self._lost_since = ""
        self._asking = threading.Lock()
        #: Seconds between two pings, and when the last was sent.
        self._pinged_at = time.monotonic()
        self._period_s = min(_PING_S, link.silence_s / SIGNS_PER_SILENCE)
        #: Answers to questions; None at the end of the link.
        self._answers: queue.SimpleQueue[LinkFrame | None] = queue.SimpleQueue()
        #: What is to be sent; None at the end.
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._writer = threading.Thread(
            target=self._write_all, name=f"launchpad-send-{name}", daemon=True
        )
        self._on_relayed: Callable[[LinkFrame | None], None] = lambda _: None
        self._reader = threading.Thread(
            target=self._read_all, name=f"launchpad-link-{name}", daemon=True
        )
        try:
            self._writer.start()
            self._reader.start()
        except BaseException:
            self.close()
            raise

    # Before there is a program

    def ask_agent(self, question: LinkFrame) -> LinkFrame:
        """Asks the agent and waits for its answer; EndingError: the program is to end meanwhile."""
        with self._asking:
            self._check_goes_on()
            self._send(question)
            give_up_at = time.monotonic() + _ANSWER_S
            while True:
                left_s = max(0.0, give_up_at - time.monotonic())
                try:
                    answer = self._answers.get(timeout=min(left_s, _LOOK_S))
                    break
                except queue.Empty:
                    # It may ask no more after this: a late answer would count as that of another question.
                    self._check_goes_on()
                    if left_s == 0.0:
                        self._process.kill()
                        raise LaunchError(
                            f"the agent of {self.name} did not answer within {_ANSWER_S:g} s"
                        ) from None
        if answer is None:
            self._answers.put(None)  # for the next question
            hint = "" if self._link.via else "; what it printed is above"
            raise LaunchError(self._lost_since + hint)
        if answer.op == "unable":
            where = f"{self.name}: " if self._link.via else ""
            raise LaunchError(f"{where}{answer['text']}")
        return answer

    def _check_goes_on(self) -> None:
        # While the program runs, only its supervisor asks, and a Ctrl-C would wait for the answer.
        if self._program is not None and self._program.is_ending:
            raise EndingError(f"the program ends; {self.name} was not asked any more")

    def reserve(self, addresses: Sequence[Address]) -> dict[str, int]:
        """Makes the agent hold a port for each address; returns them by address key."""
        wanted = [[each.key, each.port, each.is_foreign, each.node] for each in addresses]
        ports: dict[str, int] = self.ask_agent(LinkFrame("reserve", {"addresses": wanted}))["ports"]
        if loaded_module("launchpad_lite.search._parts") is not None:
            self._send(LinkFrame("load_search"))
        return ports

    def listen(
        self,
        program: SupervisedProgram,
        log_dir: Path,
        logs: NodeLogs | None,
        log_limit_bytes: float,
    ) -> None:
        """Forwards what the agent reports from now on; `logs` keep output if the agent does not."""
        self._log_dir = log_dir
        self._log_limit_bytes = log_limit_bytes
        self._logs = logs
        self._program = program
        if self.is_lost:
            self._tell_lost()

    def pass_relayed_to(self, listener: Callable[[LinkFrame | None], None]) -> None:
        """Sets the function that gets frames of relayed connections, and None at the end of the link."""
        self._on_relayed = listener

    def relay(self, frame: LinkFrame) -> bool:
        """Sends the agent a frame of a relayed connection; returns whether the link still works."""
        self._send(frame)
        return not self.is_lost

    # The link

    def _send(self, frame: LinkFrame) -> None:
        # No error if the agent is gone: the reading thread notices that.
        self._outgoing.put(frame.encode())

    def _write_all(self) -> None:
        """Writes what is to be sent; a link that is stuck blocks only this thread."""
        try:
            while (data := self._next_outgoing()) is not None:
                if not write_all(self._process.stdin.fileno(), data):
                    break
        finally:  # even after an error: then the agent ends, which the reading thread notices
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def _next_outgoing(self) -> bytes | None:
        """Returns what to send, or a ping if one is due: a disk may block the reading thread."""
        left_s = self._pinged_at + self._period_s - time.monotonic()
        try:
            return self._outgoing.get(timeout=max(0.0, left_s))
        except queue.Empty:
            self._pinged_at = time.monotonic()
            return LinkFrame("ping").encode()

    def _read_all(self) -> None:
        try:
            self._lost_since = self._read_until_lost()
        except Exception as error:  # noqa: BLE001 - it is reported
            # An internal error must not become an endless wait.
            warn(_LOGGER, "the link to %s failed", self.name, error=error)
            self._lost_since = f"the link to {self.name} failed: {error!r}"
        self.is_lost = True
        if self._console is not None:
            for node in sorted(self._living):  # their unfinished lines get no end
                self._console.finish(node)
        self._answers.put(None)
        try:
            self._on_relayed(None)
        finally:
            if self._program is not None:
                self._tell_lost()

    def _tell_lost(self) -> None:
        if not self._closing:
            assert self._program is not None
            # A copy: nodes may be moving from here or to here.
            attempts = {node: self._attempts.get(node, _NEVER) for node in tuple(self.payloads)}
            self._program.post(HostLost(self.name, tuple(attempts), self._lost_since, attempts))

    def _read_until_lost(self) -> str:
        """Handles messages of the agent until the link ends; returns why it has ended."""
        silence_s = self._link.silence_s
        last_read_at = time.monotonic()
        slept_s = 0.0
        while True:
            give_up_at = last_read_at + silence_s
            if not math.isinf(silence_s):
                # Often enough to notice that this process was stopped.
                give_up_at = min(give_up_at, time.monotonic() + self._period_s)
            try:
                frame = self._link.frames.read(give_up_at)
            except TimeoutError:
                frame = _NOTHING
            if (late_s := time.monotonic() - give_up_at) > OVERSLEPT_S:
                # This process was stopped, or its machine slept: the host gets time to send a message.
                last_read_at, slept_s = time.monotonic(), late_s
            # Parts of a long frame count as signs of life, too.
            last_read_at = max(last_read_at, self._link.frames.last_read_at)
            if frame is _NOTHING:
                # Checked after a read, because what came meanwhile counts.
                if time.monotonic() - last_read_at >= silence_s:
                    self._process.kill()
                    return f"{self.name} is lost: no message came from it for {silence_s:g} s"
                continue
            if frame is None:
                return self._why_it_ended()
            if frame.op == "abandoned":
                self._process.kill()
                why = (
                    f" (this process was stopped for {slept_s:.1f} s)"
                    if slept_s > silence_s / 2
                    else ""
                )
                return f"{self.name} is lost: {frame['text']}{why}"
            last_read_at = time.monotonic()
            self._take_in(frame)

    def _why_it_ended(self) -> str:
        lost, via, how = f"{self.name} is lost: ", self._link.via, ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(_QUIT_S)
            said = self._link.explain()
            if via and code < 0:
                return f"{lost}{via} was killed here by {signal.Signals(-code).name}{said}"
            if code == _LINK_BROKE:
                return f"{lost}the link to it broke{said}"
            how = f" (exit code {code})"
        return f"the agent of {self.name} died{how}{self._link.explain()}"

    def post(self, event: Event) -> None:
        if self._program is not None:
            self._program.post(event)

    def _take_in(self, frame: LinkFrame) -> None:
        match frame.op:
            case "alive":
                self._usage = frame["usage"]
            case "terminated":
                self.post(StopAsked(f"the agent of {self.name} got a signal", frame["signum"]))
            case "departing":
                self.is_departing = True
            case "output":
                if self._logs is not None:
                    self._logs.write(frame["node"], frame.body)
                if self._console is not None:
                    self._console.show(frame["node"], frame.body)
            case "started":
                self._pids[frame["node"]] = frame["pid"]
                self._stacks.pop(frame["node"], None)
                self._failed.discard(frame["node"])
            case "stacks":
                self._stacks[frame["node"]] = frame.body.decode(errors="replace")
            case "refused":
                failure = NodeFailure(frame["node"], self.name, str(frame["text"]))
                self._note_end(Ended(frame["node"], frame["attempt"], failure))
            case "exited":
                self._note_end(self._ended(frame))
            case op if op in _ANSWERS:
                self._answers.put(frame)
            case op if op in RELAYED:
                self._on_relayed(frame)
            case op:
                self._take_in_said(from_fields(op, frame.fields))

    def _take_in_said(self, said: Said | Answered) -> None:
        match said:
            case Answered():
                self._said_when_asked.take_in(said)
            case Failing() | Failed():
                self._failed.add(said.node)
                self.post(said)
            case Debugged():
                if said.place:
                    self._breakpoints.announce(said.node, said.place)
                self.post(said)
            case _:
                self.post(said)

    def _note_end(self, ended: Ended) -> None:
        self._living.discard(ended.node)
        self._said_when_asked.note_end(ended.node)
        if ended.failure is not None:
            self._failed.add(ended.node)
        self.post(ended)

    def _ended(self, frame: LinkFrame) -> Ended:
        """Returns how a worker has ended, without what it reported itself."""
        node, status = frame["node"], frame["status"]
        if self._console is not None:
            self._console.finish(node)
        failure = None
        calls = self._keep_calls(node, frame["calls"])
        if status != 0:
            failure = NodeFailure.of_exit(
                node,
                self.name,
                status,
                last_output=frame.body.decode(errors="replace"),
                peak_mib=frame["peak_mib"],
                out_of_memory=frame["out_of_memory"],
            )
        return Ended(
            node,
            frame["attempt"],
            failure,
            self._stacks.get(node, ""),
            "\n".join(calls[-MOST_CALLS:]),
            dead_s=frame["dead_s"],
            unasked=frame["unasked"],
            wants_restart=status == os.EX_TEMPFAIL,
        )

    def _keep_calls(self, node: str, calls: Sequence[str]) -> list[str]:
        """Writes the last calls of a worker beside its log; returns them with names of nodes."""
        if not calls:  # as nearly always: not for each of a thousand nodes that end
            return []
        nodes = {str(pid): name for name, pid in self._pids.items()}
        named = [_PROCESS.sub(lambda it: nodes.get(it[1], it[0]), each) for each in calls]
        path = log_path(self._log_dir, node).with_suffix(CALLS)
        with contextlib.suppress(OSError):  # a full disk must not end the program
            if self._log_dir.is_absolute():  # in a pod there is no folder
                make_folder(path.parent)
                write_private(path, "\n".join([*named, ""]).encode(errors="replace"))
        return named

    # What the supervisor asks for

    def host_of(self, node: str) -> str:  # noqa: ARG002 - all are here
        return self.name

    def perform(self, action: NodeAction) -> None:
        if isinstance(action, Start):
            self._start(action.node, action.attempt, action.cause)
            return
        self._send(LinkFrame(*to_fields(action)))
        if isinstance(action, RequestStop):
            self._stopping = True
        elif isinstance(action, Terminate | Kill) and self._stopping:
            self._question()
            if isinstance(action, Kill):
                self._killed.add(action.node)
                # The end of the agent does no harm now, because all its workers are ended by force.
                if self._killed.issuperset(tuple(self._living)):
                    self._force_if_silent()

    def _start(self, node: str, attempt: int, cause: NodeFailure | None) -> None:
        """Starts a worker; its output begins with the reason of a restart."""
        self._attempts[node] = attempt
        self._living.add(node)
        if self.is_lost and self._link.via:
            # The host was lost meanwhile: there may be another host for the node.
            self.post(HostLost(self.name, (node,), self._lost_since, {node: attempt}))
            return
        if self.is_lost:
            failure = NodeFailure(node, self.name, self._lost_since, host_lost=True)
            self.post(Ended(node, attempt, failure, for_good=True))
            return
        payload = self.payloads[node]
        grant = self.grants[node]
        setup = payload.setup._replace(attempt=attempt, host=self.name, ram_bytes=grant.ram_bytes)
        log = str(log_path(self._log_dir, node)) if self._link.keeps_logs else None
        fields: dict[str, Any] = {"node": node, "attempt": attempt, "log": log}
        fields["log_limit_bytes"] = self._log_limit_bytes
        fields["grant"] = to_json(grant)
        fields["has_flags"] = bool(payload.flags.values)
        if attempt:
            why = "it is always restarted" if cause is None else cause.summary
            fields["note"] = f"[restart {attempt}: {why}]\n"
        if setup.checkpoints is not None:
            fields["checkpoints"] = str(setup.checkpoints.folder)
        body = payload._replace(setup=setup).encode()
        self._send(LinkFrame("start", fields, body))

    def _question(self) -> None:
        """Sends the agent a ping, unless the answer to one is still due."""
        if math.isinf(self._questioned_at) or self._has_answered():
            self._questioned_at = time.monotonic()
            self._send(LinkFrame("ping"))

    def _has_answered(self) -> bool:
        return self._link.frames.last_read_at > self._questioned_at

    def _force_if_silent(self) -> None:
        """Ends the agent by force if its answer is long overdue: it was stopped, or is stuck."""
        silent_s = time.monotonic() - self._questioned_at
        if self._link.force is not None and silent_s >= _SILENT_S and not self._has_answered():
            self._link.force()

    def tell_moved(self, endpoints: Mapping[str, str]) -> None:
        """Informs workers, later ones too, where services listen from now on, by address key."""
        for node, payload in self.payloads.items():
            known = {**payload.addresses.endpoints, **endpoints}
            addresses = dataclasses.replace(payload.addresses, endpoints=known)
            self.payloads[node] = payload._replace(addresses=addresses)
        self.perform(ServersMoved(endpoints))

    def pids(self) -> Mapping[str, int]:
        return dict(self._pids)

    def usage(self) -> Mapping[str, Usage]:
        return dict(self._usage)

    def stacks(self) -> Mapping[str, str]:
        return dict(self._stacks)

    def ask(
        self, question: str, argument: Any, nodes: Collection[str] | None, timeout_s: float
    ) -> Mapping[str, Any]:
        return self.begin_to_ask(question, argument, nodes)(timeout_s)

    def begin_to_ask(
        self, question: str, argument: Any, nodes: Collection[str] | None
    ) -> Callable[[float], Mapping[str, Any]]:
        """Asks nodes (None: all); returns a function that waits so many seconds for the answers."""
        number = self._said_when_asked.begin()
        asked = self._living.intersection(self._living if nodes is None else nodes)
        for node in asked:
            self.perform(Ask(node, number, question, argument))
        if question == "look":
            self._send(LinkFrame("ping"))  # of those that do not answer, the agent tells the state
        return functools.partial(self._said_when_asked.end, number, asked)

    def begin_to_close(self) -> None:
        """Asks the agent to end all that is left of its workers, and itself. May be repeated."""
        if not self._closing:
            self._closing = True
            self._close_by = time.monotonic() + _QUIT_S
            self._send(LinkFrame("quit", {"code": self._link.failure_code if self._failed else 0}))
            self._outgoing.put(None)

    def hang_up(self) -> None:
        """Ends the link, after which the agent ends everything by itself. May be repeated."""
        if not self._closing:
            self._closing = True
            self._close_by = time.monotonic() + _QUIT_S
            self._process.terminate()
            self._outgoing.put(None)

    def close(self) -> None:
        """Ends the agent and all that is left of its workers. May be repeated."""
        if self._process.stdout.closed:
            return
        self.begin_to_close()
        if (
            self._writer.ident is None
        ):  # there was no thread left for it: the agent ends with its input
            self._process.stdin.close()
        self._force_if_silent()
        code = self._await_end(self._close_by)
        if code is None and self._link.force is not None:
            # The process that was started here is the reaper. No other finds all that the agent leaves.
            self._link.force()
            code = self._await_end(time.monotonic() + _SWEEP_S)
        if code is None:
            self._process.kill()
            code = self._process.wait()
        if code != 0:
            self._link.tidy()
        _join(self._reader)
        _join(self._writer)
        self._process.stdout.close()
        self._link.release()

    def _await_end(self, give_up_at: float) -> int | None:
        """Waits for the end of the agent; returns its exit code, None if it has not ended."""
        # The link ends with the agent. The process that was started here may end before.
        _join(self._reader, max(0.0, give_up_at - time.monotonic()))
        try:
            return self._process.wait(max(0.0, give_up_at - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None


def close_all(hosts: Iterable[AgentHost]) -> None:
    """Ends all agents, and all that is left of their workers. May be repeated."""
    with contextlib.ExitStack() as stack:
        for host in hosts:
            stack.callback(host.close)
            host.begin_to_close()  # all end at the same time; then this waits for each


def _join(thread: threading.Thread, timeout_s: float | None = None) -> None:
    if thread.ident is not None:  # it was started
        thread.join(timeout_s)
