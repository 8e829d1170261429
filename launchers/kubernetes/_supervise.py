"""The supervisor of a program, inside the cluster. Of Kubernetes, it knows only its own pods.

It prints records (`_records`) for the processes that watch the run. It needs no rights.
"""

import contextlib
import dataclasses
import math
import os
import pickle
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from launchers.hosts.arrival import Arrival, Hello
from launchers.hosts.deployment import Deployment, Starter, deploy
from launchers.hosts.elsewhere import FAILED, ProgramEnd, StopSignals, SupervisorChannel, supervise
from launchers.hosts.host_list import HostSpec
from launchers.hosts.host_options import HostOptions, Tunnel
from launchers.hosts.reachability import same_for_all
from launchers.hosts.shipping import Shipment
from launchers.kubernetes._agreed import DETACHED, LINK_PORT, LONGEST_BACKOFF_S, MOUNTS, SUPERVISOR
from launchers.kubernetes._exchange import PodExchange
from launchers.kubernetes._fleet import PodFleet
from launchers.kubernetes._order import PodOrder, read_trust
from launchers.kubernetes._records import AnswerRecord, RecordWriter, StatusRecord, Up
from launchers.supervision.supervised_program import SupervisedProgram
from launchpad_lite.launching import (
    LaunchPlan,
    NodeFailure,
    NodeStatus,
    Outcome,
    ProgramResult,
    Resources,
    RunningProgram,
)

#: Where a pod finds its certificates, and the signs of life of the launching process.
_TRUST = Path(MOUNTS, "trust")
_SEEN, _STACKS = Path(MOUNTS, "launcher", "seen"), Path(MOUNTS, "launcher", "stacks")
#: Seconds between two records of how nodes are if nothing changes.
_STATUS_S = 30.0
#: Bytes of status that may be printed per second on average, and at once, because the log has a
#: limited size. A node needs about `_NODE_BYTES`.
_STATUS_RATE = 500.0
_STATUS_BURST = 1e6
_NODE_BYTES = 200
#: Exit code after which Kubernetes may start the supervisor again.
_ENDED_FROM_OUTSIDE = 128 + signal.SIGTERM
#: Seconds that the supervisor waits at its end for a log reader that reads nothing.
_LOG_S = 10.0


def main(folder: str, members: dict[str, bytes]) -> int:
    """Runs the program and returns the exit code of the pod."""
    # For records alone. All other output goes to the other stream.
    descriptor = os.dup(1)
    os.dup2(2, 1)
    records = RecordWriter(descriptor, (Path(folder) / "key").read_bytes())
    order: PodOrder = pickle.loads(members["order"])
    signals = StopSignals()
    # Kubernetes does not send a log before its first line, and a process that waits for the log would
    # give up. So print a status now, although no pod has called yet.
    nodes = [NodeStatus(node, "starting", host, None, {}) for node, host in order.hosts.items()]
    records.say(StatusRecord(tuple(nodes), tuple(order.hosts.values())))
    with contextlib.closing(PodExchange(read_trust(_TRUST), LINK_PORT)) as exchange:
        supervision = _Supervision(order, exchange, signals, records)
        channel = _Log(records, exchange, order.launcher_silence_s)
        program = supervise(order, members, supervision.launch, channel, signals)
    if program is None:
        return FAILED
    result = program.result
    assert result is not None
    records.say(StatusRecord(tuple(program.status())))
    # Also if the program starts again: the user who ended it wants to know how it ended.
    channel.end(ProgramEnd(result, supervision.stacks()))
    if supervision.comes_back() and result.outcome is Outcome.INTERRUPTED:
        return _ENDED_FROM_OUTSIDE
    return 0 if result.outcome in (Outcome.COMPLETED, Outcome.STOPPED) else FAILED


class _Supervision:
    """Starts the program of an order, and knows at its end whether Kubernetes starts it again."""

    def __init__(
        self, order: PodOrder, exchange: PodExchange, signals: StopSignals, records: RecordWriter
    ) -> None:
        self._order = order
        self._exchange = exchange
        self._signals = signals
        self._records = records
        self._fleet: PodFleet | None = None

    def launch(self, plan: LaunchPlan, shipment: Shipment) -> RunningProgram:
        order = self._order
        tls = read_trust(_TRUST)
        deployment = Deployment(
            plan=self._in_pods(plan),
            options=dataclasses.replace(order.options, quiet=True),
            specs=tuple(HostSpec(host, address=at) for host, at in order.addresses.items()),
            wanted=HostOptions(order.hosts, tunnel=Tunnel.NEVER, silence_s=order.silence_s),
            shipment=shipment,
            reach_host=self._reach,
            ways=same_for_all(order.addresses),
            issue=lambda *_: tls,
            output=self._records,
            in_pods=True,
        )
        # Pods of an earlier supervisor may take so long to come back.
        limit_s = order.schedule_s + (LONGEST_BACKOFF_S if order.begins_anew else 0.0)
        return deploy(deployment, limit_s, self._make_fleet)

    def _in_pods(self, plan: LaunchPlan) -> LaunchPlan:
        """Returns the plan without cores and devices, which Kubernetes gives to each node's pod."""
        executables = (
            dataclasses.replace(
                each, resources=Resources(ram_gib=each.resources.ram_gib), together=None
            )
            for each in plan.executables
        )
        return dataclasses.replace(plan, executables=tuple(executables))

    def _reach(self, spec: HostSpec, hello: Hello) -> Arrival:
        return Arrival(spec.name, ("its pod",), hello, self._exchange.expect(spec.name))

    def _make_fleet(self, starter: Starter, program: SupervisedProgram) -> PodFleet:
        self._fleet = PodFleet(
            starter,
            program,
            # Kubernetes waits so long for pods that fail repeatedly, even if machines are free.
            self._order.schedule_s + LONGEST_BACKOFF_S,
            self._exchange,
            self.comes_back,
        )
        # Before any node runs: the nodes would miss a signal that comes during the start.
        self._signals.guard(program)
        return self._fleet

    def comes_back(self) -> bool:
        """Returns whether Kubernetes ended the program and will start it again."""
        return self._order.begins_anew and bool(self._signals.received)

    def stacks(self) -> Mapping[str, str]:
        return self._fleet.stacks() if self._fleet is not None else {}


class _Log(SupervisorChannel):
    """The log of this pod, and its annotations, through which other processes ask."""

    look_s = 1.0

    def __init__(self, records: RecordWriter, exchange: PodExchange, silence_s: float) -> None:
        self._records = records
        self._exchange = exchange
        self._silence_s = silence_s
        self._pace = _Pace(time.monotonic())
        self._is_up = False
        #: The last sign of life of the launching process, and when it came.
        self._seen = ""
        self._seen_at = time.monotonic()

    def tell(self, program: RunningProgram) -> None:
        if not self._is_up:
            self._records.say(Up())
            self._is_up = True
        status, awaited = program.status(), self._exchange.awaited
        if self._pace.allows(status, awaited, time.monotonic()):
            self._records.say(StatusRecord(tuple(status), awaited))
        if self._is_launcher_silent():
            program.request_stop(
                f"no message came from the launching process for {self._silence_s:g} s",
                signal.SIGHUP,
            )

    def _is_launcher_silent(self) -> bool:
        """Returns whether the signs of life of the launching process have stopped for too long."""
        if (seen := _read(_SEEN)) not in ("", self._seen):
            self._seen, self._seen_at = seen, time.monotonic()
        is_awaited = self._seen not in ("", DETACHED)
        return is_awaited and time.monotonic() - self._seen_at > self._silence_s

    def question(self) -> str:
        return _read(_STACKS)

    def answer(self, question: str, text: str) -> None:
        self._records.say(AnswerRecord(question, text))

    def fail(self, text: str) -> None:
        failure = NodeFailure(SUPERVISOR, socket.gethostname(), text.splitlines()[0])
        self.end(ProgramEnd(ProgramResult(Outcome.FAILED, (failure,), text)))

    def end(self, end: ProgramEnd) -> None:
        self._records.end(end)
        self._records.drain(_LOG_S)


class _Pace:
    """Decides when to print a status: each change at once, unless that is too much for the log."""

    def __init__(self, now: float) -> None:
        self._began_at = now
        self._printed_bytes = 0
        self._shown: object = None
        self._shown_at = -math.inf

    def allows(self, status: Sequence[NodeStatus], awaited: Sequence[str], now: float) -> bool:
        outline = [
            *((n.name, n.state, n.pid, n.restarts, n.memory_mib is None) for n in status),
            awaited,
        ]
        size = _NODE_BYTES * len(status)
        # Half the allowed rate, so that room is left for changes.
        is_old = now >= self._shown_at + max(_STATUS_S, 2 * size / _STATUS_RATE)
        room = _STATUS_BURST + _STATUS_RATE * (now - self._began_at)
        # The first status is always printed, however large.
        has_room = not self._printed_bytes or self._printed_bytes + size <= room
        if not has_room or not (is_old or outline != self._shown):
            return False
        self._printed_bytes += size
        self._shown, self._shown_at = outline, now
        return True


def _read(path: Path) -> str:
    """Returns the value of an annotation of this pod; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""
