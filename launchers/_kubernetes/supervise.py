"""The supervisor of a program, inside the cluster. It knows nothing of Kubernetes but its own pods.

What it prints are records (`records`), for processes that watch from outside. It needs no rights.
"""

import contextlib
import dataclasses
import math
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from launchers._deployment import Deployment, Starter, Tunnel, allow_many_files, deploy
from launchers._elsewhere import StopSignals
from launchers._hosts import HostSpec
from launchers._kubernetes.agreed import DETACHED, LINK_PORT, LONGEST_BACKOFF_S, MOUNTS, SUPERVISOR
from launchers._kubernetes.exchange import Exchange
from launchers._kubernetes.fleet import PodFleet
from launchers._kubernetes.order import PodOrder, read_order, read_trust, read_work
from launchers._kubernetes.records import End, RecordWriter
from launchers._placement import Strategy
from launchers._reachability import SameForAll
from launchers._shipping import Shipment, Tree
from launchers._supervisor import SupervisedProgram
from launchers.host.arrival import Arrival, Hello
from launchpad_lite.errors import LaunchpadError
from launchpad_lite.launching import (
    LaunchPlan,
    NodeFailure,
    NodeStatus,
    Outcome,
    ProgramResult,
    Resources,
    RunningProgram,
)

#: Where a pod finds what it is to trust, and what the launching process shows of itself.
_TRUST = Path(MOUNTS, "trust")
_SEEN = Path(MOUNTS, "launcher", "seen")
#: Seconds between two looks at how nodes are, and between two records of it if nothing changes.
_LOOK_S = 1.0
_STATUS_S = 30.0
#: Bytes of status that are printed each second on average, and at once: it goes into a log of limited
#: size. About so many are needed for each node.
_STATUS_RATE = 500.0
_STATUS_BURST = 1e6
_NODE_BYTES = 200
#: Exit codes: Kubernetes takes the first as it is, and may start again after the second.
_FAILED, _ENDED_FROM_OUTSIDE = 1, 128 + signal.SIGTERM
#: Seconds for which the reader of the log may take nothing, at the end.
_LOG_S = 10.0


def main(folder: str, members: Mapping[str, bytes], trees: Sequence[str]) -> int:
    """Runs the program and returns the exit code of the pod.

    Args:
        folder: With the order.
        members: Of the blob.
        trees: Folders with the code, in the order of the path.
    """
    allow_many_files()
    records = RecordWriter(_records_descriptor(), (Path(folder) / "key").read_bytes())
    order = read_order(members)
    signals = StopSignals()
    # A log is not sent before it has a line, and a process that waits for it would give up.
    records.status(
        [NodeStatus(node, "starting", host, None, {}) for node, host in order.hosts.items()]
    )
    order.stand_in()
    try:
        with contextlib.closing(Exchange(read_trust(_TRUST), LINK_PORT)) as exchange:
            supervision = _Supervision(order, exchange, signals, records)
            program = supervision.launch(read_work(members, order), _shipment(order, trees))
            records.up(order.hosts)
            _look_after(program, records, _Watch(_SEEN, order.launcher_silence_s))
    except LaunchpadError as error:
        failure = NodeFailure(SUPERVISOR, socket.gethostname(), str(error).splitlines()[0])
        records.end(End(ProgramResult(Outcome.FAILED, (failure,), str(error)), {}))
        records.drain(_LOG_S)
        return _FAILED
    result = program.result
    assert result is not None
    records.status(program.status())
    # Also of a program that starts again: the one who ended it wants to know how.
    records.end(End(result, supervision.stacks()))
    records.drain(_LOG_S)
    if supervision.comes_back() and result.outcome is Outcome.INTERRUPTED:
        return _ENDED_FROM_OUTSIDE
    return 0 if result.outcome in (Outcome.COMPLETED, Outcome.STOPPED) else _FAILED


def _records_descriptor() -> int:
    """Returns a descriptor for records; what anybody else prints goes to the other stream."""
    descriptor = os.dup(1)
    os.dup2(2, 1)
    return descriptor


def _shipment(order: PodOrder, trees: Sequence[str]) -> Shipment:
    found = []
    for folder in map(Path, trees):
        files = {
            path.relative_to(folder).as_posix(): path
            for path in folder.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        size = sum(path.stat().st_size for path in files.values())
        found.append(Tree(folder.name, files, size))
    return Shipment(tuple(found), order.requires)


class _Supervision:
    """Makes a program of an order, and knows at its end whether it is going to start again."""

    def __init__(
        self, order: PodOrder, exchange: Exchange, signals: StopSignals, records: RecordWriter
    ) -> None:
        self._order = order
        self._exchange = exchange
        self._signals = signals
        self._records = records
        self._fleet: PodFleet | None = None

    def launch(self, plan: LaunchPlan, shipment: Shipment) -> SupervisedProgram:
        """Starts the program, when all its pods have called."""
        order = self._order
        tls = read_trust(_TRUST)
        deployment = Deployment(
            plan=self._in_pods(plan),
            options=dataclasses.replace(order.options, quiet=True),
            specs=tuple(HostSpec(host, address=order.names[host]) for host in order.hosts.values()),
            choice=order.hosts,
            strategy=Strategy.SPREAD,
            shipment=shipment,
            tunnel=Tunnel.NEVER,
            silence_s=order.silence_s,
            ways=SameForAll(order.names),
            issue=lambda *_: tls,
            output=self._records,
            keeps_logs=False,
            in_pods=True,
        )
        # Pods that served a supervisor before this one may come back as late as that.
        limit_s = order.schedule_s + (LONGEST_BACKOFF_S if order.begins_anew else 0.0)
        program = deploy(deployment, self._reach, limit_s, self._make_fleet)
        assert isinstance(program, SupervisedProgram)
        return program

    def _in_pods(self, plan: LaunchPlan) -> LaunchPlan:
        """Returns the plan as it is for one pod each: Kubernetes gives them cores and devices."""
        executables = []
        for each in plan.executables:
            for address in each.addresses:
                address.port = self._order.ports[address.key]
            resources = Resources(ram_gib=each.resources.ram_gib)
            executables.append(dataclasses.replace(each, resources=resources, together=None))
        return dataclasses.replace(plan, executables=tuple(executables))

    def _reach(self, spec: HostSpec, hello: Hello) -> Arrival:
        return Arrival(spec.name, ("its pod",), hello, self._exchange.expect(spec.name))

    def _make_fleet(self, starter: Starter, program: SupervisedProgram) -> PodFleet:
        self._fleet = PodFleet(
            starter,
            program,
            # Pods that fail again and again come as late as that, whatever is free.
            self._order.schedule_s + LONGEST_BACKOFF_S,
            self._exchange,
            self.comes_back,
        )
        # Before anything runs: a signal between the start and its return would be lost on the nodes.
        self._signals.guard(program)
        return self._fleet

    def comes_back(self) -> bool:
        """Returns whether Kubernetes starts the program again that it has ended itself."""
        return self._order.begins_anew and bool(self._signals.received)

    def stacks(self) -> Mapping[str, str]:
        """Returns where the threads of nodes were that were asked for it."""
        return self._fleet.stacks() if self._fleet is not None else {}


def _look_after(program: RunningProgram, records: RecordWriter, watch: "_Watch") -> None:
    """Keeps those outside informed until the program has ended."""
    pace = _Pace(time.monotonic())
    while True:
        status = program.status()
        if pace.allows(status, time.monotonic()):
            records.status(status)
        if watch.is_silent():
            program.request_stop(
                f"no message came from the launching process for {watch.silence_s:g} s",
                signal.SIGHUP,
            )
        if program.join(_LOOK_S):
            return


class _Pace:
    """Decides when to print how nodes are: every change at once, unless that is too much for the log."""

    def __init__(self, now: float) -> None:
        self._shown: list[tuple[object, ...]] = []
        self._shown_at = -math.inf
        self._free_bytes = _STATUS_BURST
        self._counted_at = now

    def allows(self, status: Sequence[NodeStatus], now: float) -> bool:
        """Returns whether to print this one.

        Args:
            status: How all nodes are.
            now: Monotonic time.
        """
        grown = self._free_bytes + _STATUS_RATE * (now - self._counted_at)
        self._free_bytes, self._counted_at = min(grown, _STATUS_BURST), now
        outline = [_outline(each) for each in status]
        size = _NODE_BYTES * len(status)
        # Twice as seldom as there is room for, so that some is left for changes.
        is_old = now >= self._shown_at + max(_STATUS_S, 2 * size / _STATUS_RATE)
        # A single one that is larger than all room there ever is waits for that.
        has_room = self._free_bytes >= min(size, _STATUS_BURST)
        if not has_room or not (is_old or outline != self._shown):
            return False
        self._free_bytes -= size
        self._shown, self._shown_at = outline, now
        return True


def _outline(status: NodeStatus) -> tuple[object, ...]:
    is_measured = status.memory_mib is not None
    return status.name, status.state, status.pid, status.restarts, is_measured


class _Watch:
    """Returns whether the launching process lives, as it shows through an annotation of this pod."""

    def __init__(self, path: Path, silence_s: float) -> None:
        self._path = path
        self.silence_s = silence_s
        self._seen = ""
        self._changed_at = time.monotonic()

    def is_silent(self) -> bool:
        """Returns whether it has shown itself before, and not for too long."""
        with contextlib.suppress(OSError):
            seen = self._path.read_text()
            if seen != self._seen:
                self._seen, self._changed_at = seen, time.monotonic()
        is_awaited = self._seen not in ("", DETACHED)
        return is_awaited and time.monotonic() - self._changed_at > self.silence_s
