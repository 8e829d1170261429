"""Pods that are to leave their machines and do not: when they may be removed by force. Pure.

Kubernetes makes none in place of a pod that is there, and removes none whose machine does not
answer, until the machine is removed. Yet it may be only the machine's own agent that does
not answer, while the pod runs and is reached. Another one in its place would end a node that works; or
two supervisors would run. So only what is certain to have ended is removed.
"""

import enum
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from launchers._kubernetes.agreed import LONGEST_BACKOFF_S, NODE
from launchers._kubernetes.client import ChangeKind, Json
from launchers._kubernetes.reasons import exit_code, has_ended, host_of, is_running
from launchers._kubernetes.timing import DEFAULT, Timing
from launchers.host.pod import MAY_COME_BACK
from launchpad_lite.launching import Executable, NodeStatus


class Fate(enum.Enum):
    """What becomes of a pod whose machine does not answer."""

    #: Nothing of it runs, or a supervisor only with what is beside it: it may be removed, so that
    #: another takes its place.
    REMOVED = enum.auto()
    #: It may run; another takes its place later.
    REPLACED_LATER = enum.auto()
    #: It may run; no other takes its place.
    ENDS_LATER = enum.auto()
    #: It was the supervisor's, and the program does not start again.
    PROGRAM_LOST = enum.auto()
    #: It was the supervisor's, which has ended the program: what came of that is unknown.
    PROGRAM_ENDED = enum.auto()


@dataclass
class _Leaving:
    """A pod that is to leave.

    Attributes:
        pod: As the server had it last.
        since: When that was seen first.
        look_at: When it is looked at next.
        is_reported: Whether it was reported that it waits.
    """

    pod: Json
    since: float
    look_at: float
    is_reported: bool = False

    @property
    def grace_s(self) -> float:
        return float(self.pod["metadata"].get("deletionGracePeriodSeconds") or 0)


@dataclass(frozen=True)
class _Worker:
    """The last worker of a node that is known: processes of two pods may have one number."""

    attempt: int
    pid: int | None
    pod: str | None


class Departures:
    """The pods of a run that are to leave their machines. Not thread-safe.

    All times are of one clock that the caller reads.
    """

    def __init__(
        self,
        hosts: Mapping[str, Executable],
        *,
        silence_s: float,
        launcher_silence_s: float,
        schedule_s: float,
        notice_s: float,
        timing: Timing = DEFAULT,
    ) -> None:
        """Begins with none.

        Args:
            hosts: The nodes, by the host names of their pods.
            silence_s: Seconds after which a pod ends that receives nothing from its supervisor.
            launcher_silence_s: Seconds after which a supervisor ends the program that sees nothing of
                the launching process.
            schedule_s: Seconds within which all pods must have called their supervisor.
            notice_s: Seconds that nodes have to end; below 0: as long as they want.
            timing: Limits and pauses.
        """
        self._timing = timing
        self._nodes = {host: each.name for host, each in hosts.items()}
        self._movable = {each.name for each in hosts.values() if each.restart.outlives_host}
        self._silence_s = silence_s
        self._launch_s = schedule_s + LONGEST_BACKOFF_S
        self._supervisor_end_s = launcher_silence_s + timing.spare_s + timing.stuck_s
        self._supervisor_end_s += notice_s if notice_s >= 0 else math.inf
        self._leaving: dict[str, _Leaving] = {}
        #: Pods of nodes that run, by their host names, and those that the supervisor had when it was
        #: last heard, by uid.
        self._running: dict[str, Json] = {}
        self._served: dict[str, Json] = {}
        #: Those of supervisors before this one: they end with it, and serve no other.
        self._former: set[str] = set()
        #: When the last of those supervisors has ended that were removed.
        self._former_until = -math.inf
        #: Of this supervisor: when it was first heard, and whether it has placed all nodes.
        self._began_at = math.inf
        self._is_up = False
        self._workers: dict[str, _Worker] = {}
        #: Since when nodes are known to have no worker.
        self._idle: dict[str, float] = {}
        #: Since when the pods that have served the supervisor are known to have lost it.
        self._alone_since = math.inf

    @property
    def look_at(self) -> float:
        """When `fates` may have something to say, if nothing happens before; inf: never."""
        return min((each.look_at for each in self._leaving.values()), default=math.inf)

    # What is seen

    def take_in(self, change: ChangeKind, pod: Json, container: str, now: float) -> None:
        """Takes in a change of a pod.

        Args:
            change: What happened to it.
            pod: As the server has it, or had it last.
            container: The one that is ours.
            now: The time.
        """
        uid, host = pod["metadata"]["uid"], host_of(pod)
        if uid in self._served:
            self._served[uid] = pod
        is_there = change != "DELETED" and not has_ended(pod, container)
        if container == NODE:
            if is_there and is_running(pod, container):
                self._running[host] = pod
            elif host in self._running and self._running[host]["metadata"]["uid"] == uid:
                del self._running[host]
        if not is_there:
            self._leaving.pop(uid, None)
        elif uid in self._leaving:
            self._leaving[uid].pod = pod
        elif pod["metadata"].get("deletionTimestamp"):
            self._leaving[uid] = _Leaving(pod, now, now + self._timing.stuck_s)

    def begin(self, now: float) -> None:
        """Notes that another supervisor is in charge from now on."""
        self._former.update(self._served)
        self._served = {}
        self._began_at, self._is_up = now, False
        self._workers.clear()
        self._idle.clear()
        self._alone_since = math.inf

    def note_up(self) -> None:
        """Notes that the supervisor has placed all nodes."""
        self._is_up = True

    def take_in_status(self, nodes: Sequence[NodeStatus], now: float) -> None:
        """Takes in what the supervisor says of its nodes."""
        self._served = {pod["metadata"]["uid"]: pod for pod in self._running.values()}
        for each in nodes:
            pod = self._running.get(each.host)
            uid = str(pod["metadata"]["uid"]) if pod is not None else None
            worker = _Worker(each.restarts, each.pid, uid)
            if self._is_idle(each, worker):
                self._idle.setdefault(each.name, now)
            else:
                self._idle.pop(each.name, None)
                self._workers[each.name] = worker

    def _is_idle(self, status: NodeStatus, worker: _Worker) -> bool:
        """Returns whether a node waits, for a pod or for its next start."""
        if status.state != "starting":
            return status.state == "restarting"
        if worker.pid is None:
            return self._is_up
        # Its next worker is reported with a process of its own; until then the last one's is shown.
        last = self._workers.get(status.name)
        return (
            last is not None
            and last.attempt < worker.attempt
            and (last.pid, last.pod) == (worker.pid, worker.pod)
        )

    # What follows from it

    def fates(self, now: float) -> Iterator[tuple[Json, Fate]]:
        """Yields pods that do not leave, with what becomes of them now. That one waits is reported once."""
        for each in list(self._leaving.values()):
            if now < each.look_at:
                continue
            is_supervisor = host_of(each.pod) not in self._nodes
            fate = self._of_supervisor(each, now) if is_supervisor else self._of_node(each, now)
            # What was to be removed and is still there could not be.
            each.look_at = now + (
                self._timing.stuck_s if fate is Fate.REMOVED else self._timing.stuck_look_s
            )
            if fate in (Fate.REMOVED, Fate.PROGRAM_LOST, Fate.PROGRAM_ENDED):
                yield each.pod, fate
            elif not each.is_reported and now >= each.since + each.grace_s + self._timing.stuck_s:
                each.is_reported = True
                yield each.pod, fate

    def forget(self, pod: Json) -> None:
        """Notes that a pod was removed."""
        self._leaving.pop(pod["metadata"]["uid"], None)

    def _of_supervisor(self, leaving: _Leaving, now: float) -> Fate:
        codes = self._codes_elsewhere(leaving.pod)
        if not codes or any(code != MAY_COME_BACK for code in codes):
            self._alone_since = math.inf
        else:
            self._alone_since = min(self._alone_since, now)
        is_gone = now >= self._alone_since + self._timing.stuck_s
        is_over = 0 in codes  # it ended them
        if is_over or not self._movable.issuperset(self._nodes.values()):
            if not is_gone and now < leaving.since + leaving.grace_s + self._timing.stuck_s:
                return Fate.ENDS_LATER
            return Fate.PROGRAM_ENDED if is_over else Fate.PROGRAM_LOST
        # Its machine was away by the time that Kubernetes gave the pod up, and with it all that could
        # have shown it the launching process. It looks for that once it has placed all nodes.
        end_s = self._supervisor_end_s + (0.0 if self._is_up else self._launch_s)
        if not is_gone and now < leaving.since + end_s:
            return Fate.REPLACED_LATER
        # What is beside it, on a machine that is cut off, has not lost it: that ends with it.
        self._former_until = max(self._former_until, leaving.since + end_s)
        return Fate.REMOVED

    def _codes_elsewhere(self, supervisor: Json) -> list[int | None]:
        """Returns how the pods have ended that served a supervisor on other machines; None: not.

        Those that are to leave say nothing: they may be lost as it is, or were told to end.
        """
        machine = supervisor["spec"].get("nodeName")
        return [
            exit_code(pod, NODE)
            for pod in self._served.values()
            if pod["spec"].get("nodeName") != machine
            and not pod["metadata"].get("deletionTimestamp")
        ]

    def _of_node(self, leaving: _Leaving, now: float) -> Fate:
        node = self._nodes[host_of(leaving.pod)]
        if node not in self._movable:
            return Fate.ENDS_LATER
        return Fate.REMOVED if now >= self._certain_at(leaving, node) else Fate.REPLACED_LATER

    def _certain_at(self, leaving: _Leaving, node: str) -> float:
        """Returns when nothing of a node's pod can run any more; inf: not known."""
        if any(host_of(each.pod) not in self._nodes for each in self._leaving.values()):
            return math.inf  # what its supervisor said last may be long ago
        if leaving.pod["metadata"]["uid"] in self._former:
            return max(self._began_at, self._former_until) + self._silence_s + self._timing.stuck_s
        if not self._is_up:
            return math.inf
        # In its notice, a node has a worker; after it, the pod may take a while to end.
        wait_s = min(leaving.grace_s, self._silence_s)
        return max(leaving.since + wait_s, self._idle.get(node, math.inf)) + self._timing.stuck_s
