"""The launcher's side of a host: speaks with its agent."""

import contextlib
import dataclasses
import logging
import math
import os
import pickle
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launchers._console import Output, warn
from launchers._logs import NodeLogs, log_path
from launchers._supervisor import SupervisedProgram
from launchers.host.agent_link import AgentLink
from launchers.host.grant import Grant
from launchers.host.link import (
    OVERSLEPT_S,
    SIGNS_PER_SILENCE,
    Frame,
    write_all,
)
from launchers.host.relay import RELAYED
from launchers.host.usage import Usage
from launchers.host.worker import Payload
from launchpad_lite._events import (
    Constructed,
    CutShort,
    DumpStacks,
    EndCalls,
    Ended,
    Event,
    Failed,
    Healthy,
    Heartbeat,
    HostLost,
    Kill,
    Leaving,
    LetGo,
    NodeAction,
    NodeEvent,
    Preempted,
    RequestStop,
    Start,
    StopAsked,
    StopReceived,
    Terminate,
)
from launchpad_lite.errors import LaunchError
from launchpad_lite.launching import Address, NodeFailure

if TYPE_CHECKING:
    from courier import ExceptionReport

_LOGGER = logging.getLogger(__name__)

_QUIT_S = 5.0
#: Seconds for which an agent whose workers are all being ended by force may leave a question without
#: an answer: less than there is between SIGTERM and SIGKILL, and between that and giving up.
_MUTE_S = 0.9
#: Seconds in which the warden ends what its agent left.
_SWEEP_S = 5.0
#: How often an agent is asked for a sign of life and what its workers use.
_PING_S = 5.0
#: In the place of a frame that did not come.
_NOTHING = Frame("")
_ANSWERS = ("surveyed", "probed", "relaying", "reserved", "taken")
#: Seconds in which an agent answers questions about its host.
_ANSWER_S = 20.0
#: How soon a thread that waits for one notices that the program is to end.
_LOOK_S = 0.1
#: The start of a node that was not started here: it is not lost with the host.
_NEVER = -1
#: What ssh ends with when the connection is the trouble.
_LINK_BROKE = 255


class EndingError(LaunchError):
    """Something was not done, because the program was asked to end."""


class AgentHost:
    """One host with its agent. Implements `launchers._supervisor.Host`, from any thread."""

    def __init__(self, name: str, link: AgentLink, console: Output | None) -> None:
        """Takes over the link to the agent.

        Args:
            name: What the host is called.
            link: How its agent is reached.
            console: Where to show the output of nodes, if it is shown.
        """
        self.name = name
        self._link = link
        self._process = link.process
        self._console = console
        self._logs: NodeLogs | None = None
        self._program: SupervisedProgram | None = None
        self._payloads: dict[str, Payload] = {}
        self._grants: dict[str, Grant] = {}
        self._log_dir = Path()
        self._log_limit_bytes = math.inf
        #: The last start of each node.
        self._attempts: dict[str, int] = {}
        self._pids: dict[str, int] = {}
        self._usage: Mapping[str, Usage] = {}
        self._failures: dict[str, NodeFailure] = {}
        #: Whose last worker failed.
        self._failed: set[str] = set()
        self._stacks: dict[str, str] = {}
        #: Answers to `look`, by node.
        self._looks: dict[str, str] = {}
        self._looked = threading.Condition()
        #: Nodes that were started and have not ended, and those that are being ended by SIGKILL.
        self._living: set[str] = set()
        self._killed: set[str] = set()
        #: Whether all nodes are to end.
        self._stopping = False
        #: When the agent was asked for a sign of life to which the answer matters.
        self._questioned_at = math.inf
        self._closing = False
        self._close_by = math.inf
        #: Whether its agent can be spoken to no more.
        self.is_lost = False
        #: Whether it was asked from outside to end, and starts nothing any more.
        self.is_departing = False
        self._lost_since = ""
        self._asking = threading.Lock()
        #: Seconds after which a sign of life is sent if there is nothing else.
        self._period_s = min(_PING_S, link.silence_s / SIGNS_PER_SILENCE)
        #: Answers to questions; None at the end of the link.
        self._answers: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        #: What is to be sent; None at the end.
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._writer = threading.Thread(
            target=self._write_all, name=f"launchpad-send-{name}", daemon=True
        )
        self._on_relayed: Callable[[Frame | None], None] = lambda _: None
        self._reader = threading.Thread(
            target=self._read_all, name=f"launchpad-link-{name}", daemon=True
        )
        try:
            self._writer.start()
            self._reader.start()
        except BaseException:
            self._give_up()
            raise

    def _give_up(self) -> None:
        """Ends an agent whose output cannot be read."""
        assert self._process.stdin is not None
        self._outgoing.put(None)
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # with its input, the agent ends
        try:
            self._process.wait(_QUIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._link.release()

    # Before there is a program

    def ask(self, question: Frame) -> Frame:
        """Asks the agent something and waits for the answer.

        Raises:
            LaunchError: It has ended, or does not answer.
            EndingError: The program was asked to end meanwhile; nothing more can be asked.
        """
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
                    # What it answers later would be taken for the answer to something else.
                    self._check_goes_on()
                    if left_s == 0.0:
                        self._process.kill()
                        raise LaunchError(
                            f"the agent of {self.name} did not answer within {_ANSWER_S:g} s"
                        ) from None
        if answer is None:
            self._answers.put(None)  # for the next question
            raise LaunchError(self._how_it_ended())
        return answer

    def _check_goes_on(self) -> None:
        # While the program runs, only its supervisor asks, and a Ctrl-C would wait for it.
        if self._program is not None and self._program.is_ending:
            raise EndingError(f"the program ends; {self.name} was not asked any more")

    def _how_it_ended(self) -> str:
        if self._link.via:
            return self._lost_since
        try:
            code = self._process.wait(_QUIT_S)
        except subprocess.TimeoutExpired:
            return f"the agent of {self.name} hung up"
        said = self._link.explain() or "; its message is above"
        return f"the agent of {self.name} ended at once with exit code {code}{said}"

    def reserve(self, addresses: Sequence[Address]) -> dict[str, int]:
        """Makes the agent hold a port for each address; returns them by address key.

        Raises:
            LaunchError: A port is taken, or the agent did not come up.
        """
        wanted = [[each.key, each.port, each.is_foreign, each.node] for each in addresses]
        answer = self.ask(Frame("reserve", {"addresses": wanted}))
        if answer.op == "reserved":
            ports: dict[str, int] = answer["ports"]
            return ports
        raise LaunchError(str(answer["text"]))

    def listen(
        self,
        program: SupervisedProgram,
        log_dir: Path,
        logs: NodeLogs | None,
        log_limit_bytes: float,
    ) -> None:
        """Passes on, from now on, what the agent says.

        Args:
            program: Whom to tell.
            log_dir: Folder for the output of nodes, if the agent keeps it.
            logs: Where to keep it, if the agent does not.
            log_limit_bytes: How much the agent keeps of each node.
        """
        self._log_dir = log_dir
        self._log_limit_bytes = log_limit_bytes
        self._logs = logs
        self._program = program
        if self.is_lost:
            self._tell_lost()

    def take(self, node: str, payload: Payload, grant: Grant) -> None:
        """Makes a node one of this host.

        Args:
            node: `label[replica]`.
            payload: What its worker must know, at its first start.
            grant: What it gets of the host.
        """
        self._payloads[node] = payload
        self._grants[node] = grant

    def payload(self, node: str) -> Payload:
        """Returns what the worker of a node of this host must know."""
        return self._payloads[node]

    def give_up(self, node: str) -> None:
        """Takes back what `take` did."""
        del self._payloads[node], self._grants[node]

    @property
    def grants(self) -> Mapping[str, Grant]:
        """What its nodes were given."""
        return dict(self._grants)

    def pass_relayed_to(self, listener: Callable[[Frame | None], None]) -> None:
        """Passes relayed connections to another object; None at the end of the link."""
        self._on_relayed = listener

    def relay(self, frame: Frame) -> bool:
        """Sends the agent something about a relayed connection; returns whether that was possible."""
        self._send(frame)
        return not self.is_lost

    # The link

    def _send(self, frame: Frame) -> None:
        # Nothing can be sent to an agent that is gone; the reader sees that it is.
        self._outgoing.put(frame.encode())

    def _write_all(self) -> None:
        """Writes what is to be sent; a link that is stuck blocks only this thread."""
        assert self._process.stdin is not None
        try:
            while (data := self._next_outgoing()) is not None:
                write_all(self._process.stdin.fileno(), data)
        finally:  # whatever it was: the agent gets no more, and ends, which the reader sees
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def _next_outgoing(self) -> bytes | None:
        """Waits for what is to be sent; a sign of life while there is nothing.

        From here, because the reader may be held up by a terminal or a disk.
        """
        try:
            return self._outgoing.get(timeout=self._period_s)
        except queue.Empty:
            return Frame("ping").encode()

    def _read_all(self) -> None:
        try:
            self._lost_since = self._read_until_lost()
        except Exception as error:  # noqa: BLE001 - it is reported
            # A mistake of ours must not become a wait without end.
            warn(_LOGGER, "the link to %s failed", self.name, error=error)
            self._lost_since = f"the link to {self.name} failed: {error!r}"
        self.is_lost = True
        if self._console is not None:
            for node in sorted(self._living):  # no more comes of what they left unfinished
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
            attempts = {node: self._attempts.get(node, _NEVER) for node in tuple(self._payloads)}
            self._program.post(HostLost(self.name, tuple(attempts), self._lost_since, attempts))

    def _read_until_lost(self) -> str:
        """Takes in what the agent says; returns why it says no more."""
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
                # This process was stopped, or its machine slept: the host may tell how it is.
                last_read_at, slept_s = time.monotonic(), late_s
            # Much of a long frame may have come without its end.
            last_read_at = max(last_read_at, self._link.frames.last_read_at)
            if frame is _NOTHING:
                # Not before a look at the input: what came meanwhile has been read.
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
        lost = f"{self.name} is lost: "
        via, said = self._link.via, self._link.explain()
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(_QUIT_S)
            if via and code < 0:
                return f"{lost}{via} was killed here by {signal.Signals(-code).name}{said}"
            if code == _LINK_BROKE:
                return f"{lost}the link to it broke{said}"
        return f"the agent of {self.name} died{said}"

    def post(self, event: Event) -> None:
        """Reports to the program something that happened to this host's nodes."""
        if self._program is not None:
            self._program.post(event)

    def _take_in(self, frame: Frame) -> None:
        if frame.op == "alive":
            self._usage = frame["usage"]
            return
        if frame.op == "terminated":
            self.post(StopAsked(f"the agent of {self.name} got a signal", frame["signum"]))
            return
        if frame.op == "departing":
            self.is_departing = True
            return
        if frame.op in _ANSWERS:
            self._answers.put(frame)
            return
        if frame.op in RELAYED:
            self._on_relayed(frame)
            return
        node: str = frame["node"]
        if frame.op == "output":
            if self._logs is not None:
                self._logs.write(node, frame.body)
            if self._console is not None:
                self._console.show(node, frame.body)
        elif frame.op == "started":
            self._pids[node] = frame["pid"]
            self._stacks.pop(node, None)
            self._failed.discard(node)
        elif frame.op == "stop":
            self.post(StopAsked(f"lp.stop() in {node}"))
        elif frame.op in ("failing", "failed"):
            report: ExceptionReport = pickle.loads(frame.body)
            failure = NodeFailure.of_exception(node, self.name, report)
            if (limit := self._grants[node].ram_bytes) and "MemoryError" in report.type_name:
                asked = f"it asked for ram_gib={limit / (1 << 30):g}, and may have no more"
                failure = dataclasses.replace(failure, summary=f"{failure.summary} ({asked})")
            self._failures[node] = failure
            if frame.op == "failed":  # else its worker may yet say more
                self.post(Failed(node, frame["attempt"], failure, frame["unasked"]))
        elif frame.op == "looked":
            with self._looked:
                self._looks[node] = frame.body.decode(errors="replace")
                self._looked.notify_all()
        elif frame.op == "cut_short":
            failure = NodeFailure.of_exception(node, self.name, pickle.loads(frame.body))
            self.post(CutShort(node, frame["attempt"], failure))
        elif frame.op == "stacks":
            self._stacks[node] = frame.body.decode(errors="replace")
        else:
            self.post(self._event(node, frame))

    def _event(self, node: str, frame: Frame) -> NodeEvent:
        attempt: int = frame["attempt"]
        if frame.op == "constructed":
            return Constructed(node, attempt, frame["runs"])
        if frame.op == "leaving":
            return Leaving(node, attempt, frame["unasked"])
        if frame.op == "stop_received":
            return StopReceived(node, attempt, frame["listens"])
        if frame.op == "preempted":
            return Preempted(node, attempt, frame["signum"])
        if frame.op == "healthy":
            return Healthy(node, attempt)
        if frame.op == "heartbeat":
            return Heartbeat(node, attempt)
        self._living.discard(node)
        if frame.op == "refused":
            return Ended(node, attempt, NodeFailure(node, self.name, str(frame["text"])))
        if frame.op == "exited":
            return Ended(
                node,
                attempt,
                self._failure(node, frame),
                self._stacks.get(node, ""),
                dead_s=frame["dead_s"],
                unasked=frame["unasked"],
                wants_restart=frame["status"] == os.EX_TEMPFAIL,
            )
        raise ValueError(f"the agent said {frame.op!r}")

    def _failure(self, node: str, frame: Frame) -> NodeFailure | None:
        """Returns how a worker failed that has exited; None if it did not."""
        if self._console is not None:
            self._console.finish(node)
        failure = self._failures.pop(node, None)
        if failure is not None or frame["status"] != 0:
            self._failed.add(node)
        if failure is not None or frame["status"] == 0:
            return failure
        return NodeFailure.of_exit(
            node,
            self.name,
            frame["status"],
            last_output=frame.body.decode(errors="replace"),
            peak_mib=frame["peak_mib"],
            out_of_memory=frame["out_of_memory"],
        )

    # What the supervisor asks for

    def host_of(self, node: str) -> str:  # noqa: ARG002 - all are here
        """Returns the name of the host."""
        return self.name

    def perform(self, action: NodeAction) -> None:
        """Does what was decided about a node."""
        node = {"node": action.node}
        match action:
            case Start():
                self._start(action.node, action.attempt, action.cause)
            case RequestStop():
                self._stopping = True
                self._send(Frame("stop", {**node, "interrupts": action.interrupts}))
            case LetGo():
                self._send(Frame("let_go", node))
            case EndCalls():
                self._send(Frame("end_calls", node))
            case DumpStacks():
                self._send(Frame("dump", node))
            case Terminate():
                self._send(Frame("terminate", node))
                if self._stopping:
                    self._question()
            case Kill():
                self._send(Frame("kill", node))
                if self._stopping:
                    self._question()
                    self._killed.add(action.node)
                    # That of the agent does no harm now.
                    if self._killed.issuperset(tuple(self._living)):
                        self._force_if_mute()

    def _start(self, node: str, attempt: int, cause: NodeFailure | None) -> None:
        """Starts a worker; its output begins with the reason of a restart."""
        self._attempts[node] = attempt
        self._living.add(node)
        if self.is_lost and self._link.via:
            # It was lost in the meantime: there may be another one for the node.
            self.post(HostLost(self.name, (node,), self._lost_since, {node: attempt}))
            return
        if self.is_lost:
            failure = NodeFailure(node, self.name, self._lost_since, host_lost=True)
            self.post(Ended(node, attempt, failure, for_good=True))
            return
        payload = self._payloads[node]
        setup = payload.setup._replace(attempt=attempt)
        log = str(log_path(self._log_dir, node)) if self._link.keeps_logs else None
        fields: dict[str, Any] = {"node": node, "attempt": attempt, "log": log}
        fields["log_limit_bytes"] = self._log_limit_bytes
        fields["grant"] = self._grants[node].encode()
        fields["has_flags"] = bool(payload.flags.values)
        if attempt:
            why = "it is always restarted" if cause is None else cause.summary
            fields["note"] = f"[restart {attempt}: {why}]\n"
        if setup.checkpoints is not None:
            fields["checkpoints"] = str(setup.checkpoints.folder)
        body = dataclasses.replace(payload, setup=setup).encode()
        self._send(Frame("start", fields, body))

    def tell_ended(self, callers: Sequence[str], keys: Sequence[str]) -> None:
        """Informs workers, later ones too, that the servers at these addresses have ended."""
        self._send(Frame("ended", {"callers": list(callers), "keys": list(keys)}))

    def _question(self) -> None:
        """Asks the agent for a sign of life, unless an answer is waited for."""
        if math.isinf(self._questioned_at) or self._has_answered():
            self._questioned_at = time.monotonic()
            self._send(Frame("ping"))

    def _has_answered(self) -> bool:
        return self._link.frames.last_read_at > self._questioned_at

    def _force_if_mute(self) -> None:
        """Ends an agent by force that was asked long ago and says nothing: stopped, or stuck."""
        mute_s = time.monotonic() - self._questioned_at
        if self._link.force is not None and mute_s >= _MUTE_S and not self._has_answered():
            self._link.force()

    def tell_lost(self, keys: Sequence[str]) -> None:
        """Fails calls in flight to these addresses, whose host is lost."""
        self._send(Frame("lost", {"keys": list(keys)}))

    def tell_moved(self, endpoints: Mapping[str, str]) -> None:
        """Informs workers, later ones too, where services listen from now on.

        Args:
            endpoints: `host:port` by address key, as this host reaches them.
        """
        for node, payload in self._payloads.items():
            self._payloads[node] = dataclasses.replace(
                payload, endpoints={**payload.endpoints, **endpoints}
            )
        self._send(Frame("moved", {"endpoints": dict(endpoints)}))

    def pids(self) -> Mapping[str, int]:
        """Returns the process of each node that was started."""
        return dict(self._pids)

    def usage(self) -> Mapping[str, Usage]:
        """Returns what workers use, as it was reported last."""
        return dict(self._usage)

    def stacks(self) -> Mapping[str, str]:
        """Returns where the threads of workers were that were asked for it."""
        return dict(self._stacks)

    def look(self, timeout_s: float) -> Mapping[str, str]:
        """Returns where the threads of workers are now; not of those that do not answer in time.

        Thread-safe.
        """
        return self.await_look(self.ask_for_look(), timeout_s)

    def ask_for_look(self) -> Collection[str]:
        """Asks workers where their threads are; returns which nodes were asked."""
        asked = set(self._living)
        with self._looked:
            self._looks = {}
        for node in asked:
            self._send(Frame("look", {"node": node}))
        return asked

    def await_look(self, asked: Collection[str], timeout_s: float) -> Mapping[str, str]:
        """Returns what nodes that were asked have answered, at the latest after a while."""
        with self._looked:
            self._looked.wait_for(lambda: self._looks.keys() >= set(asked), timeout_s)
            return dict(self._looks)

    def begin_to_close(self) -> None:
        """Asks the agent to end all that is left of its workers, and itself. May be repeated."""
        if not self._closing:
            self._closing = True
            self._close_by = time.monotonic() + _QUIT_S
            self._send(Frame("quit", {"code": self._link.failure_code if self._failed else 0}))
            self._outgoing.put(None)

    def hang_up(self) -> None:
        """Leaves the agent alone, which ends all by itself. May be repeated."""
        if not self._closing:
            self._closing = True
            self._close_by = time.monotonic() + _QUIT_S
            self._process.terminate()
            self._outgoing.put(None)

    def close(self) -> None:
        """Ends the agent and all that is left of its workers. May be repeated."""
        assert self._process.stdout is not None
        if self._process.stdout.closed:
            return
        self.begin_to_close()
        self._force_if_mute()
        code = self._await_end(self._close_by)
        if code is None and self._link.force is not None:
            # The process that was started here is the warden: without it, no process finds all that the
            # agent leaves.
            self._link.force()
            code = self._await_end(time.monotonic() + _SWEEP_S)
        if code is None:
            self._process.kill()
            code = self._process.wait()
        if code != 0:
            self._link.tidy()
        self._reader.join()
        self._writer.join()
        self._process.stdout.close()
        self._link.release()

    def _await_end(self, give_up_at: float) -> int | None:
        """Waits for the end of the agent; returns its exit code, None if it has not ended."""
        # The link ends with the agent. The process that was started here may be gone before.
        self._reader.join(max(0.0, give_up_at - time.monotonic()))
        try:
            return self._process.wait(max(0.0, give_up_at - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None
