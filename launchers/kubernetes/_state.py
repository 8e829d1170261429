"""What a launcher or an attached process knows of a run, and what it does next. Pure.

This state machine takes in changes of objects and records of the log, and calls `Hands` for what is
to be done. The caller passes the time.
"""

import dataclasses
import math
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from launchers.hosts.elsewhere import ProgramEnd
from launchers.kubernetes import _reasons
from launchers.kubernetes._agreed import LONGEST_BACKOFF_S, SUPERVISOR, grace_s
from launchers.kubernetes._client import ApiError, ChangeKind, Json
from launchers.kubernetes._names import Names
from launchers.kubernetes._records import Note, PrintedRecord, Record, StatusRecord, Up
from launchers.kubernetes._sight import Sight
from launchers.kubernetes._timing import DEFAULT, Timing
from launchers.supervision.stop_notices import MAX_NAMED, StopNotices
from launchpad_lite.launching import LaunchPlan, NodeFailure, NodeStatus, Outcome, ProgramResult
from launchpad_lite.life.events import Event, StopAsked
from launchpad_lite.life.result import named

_LAST_LINES = 20


@dataclass(frozen=True)
class WaitLimits:
    """Time limits that users set, in seconds; below 0, a notice has no end.

    A pod ends after `silence_s` without data from its supervisor.
    """

    notice_s: float
    schedule_s: float = math.inf
    silence_s: float = math.inf
    launcher_silence_s: float = math.inf


@dataclass(frozen=True)
class Hands:
    """Functions that carry out decisions. All but the first three may raise ApiError.

    `end` takes a pod's name and seconds. It has the supervisor in that pod end the program in order
    within these seconds; without a name, it deletes all objects. It returns whether a supervisor
    was asked. `remove` removes a pod though its machine does not answer.
    """

    tell: Callable[[str], None]
    read_log: Callable[[Json], object]
    last_lines: Callable[[Json], str]
    leave_word: Callable[[str], object]
    end: Callable[[str | None, int], bool]
    remove: Callable[[Json], object]


@dataclass
class _LeavingPod:
    """A pod that is to end: since when that is seen, when to look again, and whether it was told."""

    pod: Json
    since: float
    look_at: float
    is_told: bool = False


class RunState:
    """What is known of a run. Not thread-safe. The caller passes all times, from one clock.

    Attributes:
        nodes: How each node was a few seconds ago.
        end: The supervisor's account of the end; None: there is none.
        stop: Why this process was asked to end the run; None: it was not.
        is_up: Whether all nodes were placed.
        is_in_hurry: Whether the end must not wait for anything any more.
        is_deleted: Whether the first object was deleted, and all others with it.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        names: Names,
        hands: Hands,
        now: float,
        limits: WaitLimits,
        *,
        is_launch: bool,
        timing: Timing = DEFAULT,
    ) -> None:
        """Begins with nothing. The process that launched the run also removes what is left."""
        self._plan = plan
        self._names = names
        self._hands = hands
        self._limits = limits
        self._is_launch = is_launch
        self._timing = timing
        nodes = [(each.label, each.replica) for each in plan.executables]
        self._movable = {each.name for each in plan.executables if each.restart.outlives_host}
        self.sight = Sight(names, nodes, self._movable)
        self.nodes: tuple[NodeStatus, ...] = self.sight.status()
        self.supervisor: Json | None = None
        self.end: ProgramEnd | None = None
        self.stop: StopAsked | None = None
        self.is_up = self.is_in_hurry = self.is_deleted = False
        self._is_asked = False
        #: The supervisor's pod whose log is read, and what is known of that.
        self.followed: Json | None = None
        self._is_caught_up = self._is_log_over = False
        self._has_status = self._is_placed = False
        #: Kinds of which all existing objects were reported.
        self._listed = set[str]()
        self._last_lines: deque[bytes] = deque(maxlen=_LAST_LINES)
        self._printed = set[tuple[str, str]]()
        #: Pods that are to end, by uid, and since when the supervisor awaits pods, by host name.
        self._leaving: dict[str, _LeavingPod] = {}
        self._awaited: dict[str, float] = {}
        self._notices = StopNotices(plan.program, limits.notice_s, hands.tell)
        # When to do each thing; inf: never.
        self._place_limit = now + limits.schedule_s if is_launch else math.inf
        self._tell_at = self._ask_at = self._stop_limit = math.inf
        self._explain_limit = self._over_at = self._fail_limit = math.inf
        #: Until then it may be unknown whether the program was up, because its log is being read.
        self._read_limit = now + timing.first_status_s
        self._looked_at = now

    @property
    def due(self) -> float:
        """The time of the next `look`, if nothing happens before."""
        limits = (self._place_limit, self._fail_limit) if not self.is_up else ()
        leaving = (each.look_at for each in self._leaving.values())
        notices = math.inf if self._notices.due is None else self._notices.due
        every = (
            self._tell_at,
            self._ask_at,
            self._stop_limit,
            self._explain_limit,
            self._over_at + self._timing.settle_s,
            notices,
            *limits,
            *leaving,
        )
        return min((each for each in every if each > self._looked_at), default=math.inf)

    @property
    def is_settled(self) -> bool:
        """Whether the log was read up to its present end, and no explanation of an end is awaited."""
        return self._is_caught_up and self._explain_limit == math.inf

    # What is seen and heard

    def see(self, change: ChangeKind, obj: Json, now: float) -> None:
        """Takes in a change of an object; `LISTED` says that all of a kind were seen."""
        if change == "LISTED":
            self._listed.add(obj["kind"])
        self.sight.take_in(change, obj)
        self._tell_at = min(self._tell_at, now + self._timing.gather_s)
        self._follow_newest()
        if self._ask_at == self._read_limit:
            self._ask_at = now  # a supervisor to ask may be known by now
        if change != "LISTED" and obj["kind"] == "Pod":
            uid = obj["metadata"]["uid"]
            leaving = self._leaving.pop(uid, _LeavingPod(obj, now, now + self._timing.stuck_s))
            if "deletionTimestamp" in obj["metadata"] and self.sight.is_there(obj):
                leaving.pod = obj
                self._leaving[uid] = leaving

    def hear(self, uid: str, record: Record, now: float) -> None:
        """Takes in what the supervisor in a pod says."""
        if not self._is_followed(uid):
            return
        if isinstance(record, Up):
            self.is_up = self._is_placed = True
            self._awaited.clear()  # all have called
        elif isinstance(record, StatusRecord):
            self.nodes, self._has_status = record.nodes, True
            self._awaited = {host: self._awaited.get(host, now) for host in record.awaited}
        elif isinstance(record, Note):
            self._hands.tell(record.text)
        elif isinstance(record, PrintedRecord):
            self._last_lines.append(record.data)
        elif isinstance(record, ProgramEnd):
            self.end = record
            self._explain_limit = now + self._timing.explain_s

    def note_caught_up(self, uid: str, now: float) -> None:
        """Notes that the log of a pod was read up to where it ended when the reading began."""
        if self._is_followed(uid):
            self._is_caught_up = True
            if self._ask_at == self._read_limit:
                self._ask_at = now

    def note_log_over(self, uid: str, now: float) -> None:  # noqa: ARG002 - as the others
        """Notes that the supervisor in a pod says nothing more."""
        self._is_log_over |= self._is_followed(uid)

    def _is_followed(self, uid: str) -> bool:
        return self.followed is not None and self.followed["metadata"]["uid"] == uid

    def _follow_newest(self) -> None:
        """Follows the log of the supervisor's newest pod, once it may have one."""
        pod = self.supervisor = self.sight.supervisor
        if pod is None or self.is_deleted or self._is_followed(pod["metadata"]["uid"]):
            return
        has_begun = _reasons.is_running(pod) or _reasons.has_ended(pod)
        if not has_begun or self.sight.is_gone(pod):
            return
        if self.followed is not None:
            if self.stop is not None:
                return  # it is about to be deleted
            self._hands.tell(f"the program starts again, in {_reasons.name_of(pod)}")
        self.followed, self.end = pod, None
        self._is_caught_up = self._is_log_over = False
        self._has_status = self._is_placed = False
        self._explain_limit = math.inf
        self._awaited.clear()
        self._hands.read_log(pod)

    # What follows from it

    def look(self, now: float) -> ProgramResult | None:
        """Does what is due; returns how the program ended, once that is final."""
        self._looked_at = now
        if self._place_limit < math.inf and self.sight.is_suspended:
            # The time counts from the admission by the queue.
            self._place_limit = now + self._limits.schedule_s
        if now >= self._tell_at:
            self._tell_waits(now)
        if self._notices.is_due(now):
            over = ("pending", "ended", "failed")
            self._notices.look({n.name: True for n in self.nodes if n.state not in over}, now)
        result = self._look_at_leaving(now) or self._verdict(now) or self._too_late(now)
        if result is None and now >= self._ask_at:
            self._ask_for_end(now)
            result = self._verdict(now)
        return result

    def _verdict(self, now: float) -> ProgramResult | None:
        """Returns how the program ended, once that is final."""
        is_over = self.is_deleted or self.sight.is_over
        self._over_at = min(self._over_at, now) if is_over else math.inf
        # Changes of pods may arrive later than those of Jobs, and later than the log.
        is_settled = now >= self._over_at + self._timing.settle_s
        if self.end is not None:
            lost = {each.host for each in self.end.result.failures if each.host_lost}
            if now < self._explain_limit and not lost <= self.sight.losses.keys():
                return None  # the cluster may still say what became of a lost pod
            self._explain_limit = math.inf
            # If the cluster ended the program, the cluster may be about to start it again.
            is_foreign = self.end.result.signum == signal.SIGTERM and self.stop is None
            return None if is_foreign and not is_settled else self._result_of(self.end)
        if self.stop is not None and (self.is_deleted or self._is_log_over):
            return self._stopped(self.stop)
        if is_settled and (self._is_log_over or self.followed is None):
            return self._lost()
        return None

    def _result_of(self, end: ProgramEnd) -> ProgramResult:
        result = _reasons.explained(end.result, self.sight.losses, self.sight.machine)
        if self.stop is not None and result.outcome is Outcome.INTERRUPTED:
            stop = self.stop
            return dataclasses.replace(
                result, outcome=stop.outcome, reason=stop.reason, signum=stop.signum
            )
        if result.signum != signal.SIGTERM:
            return result
        if (word := self.sight.stopped_by) is not None:
            outcome = Outcome.STOPPED
            return dataclasses.replace(result, outcome=outcome, reason=word, signum=None)
        return dataclasses.replace(result, reason=self.sight.interruption(result.reason))

    def _lost(self) -> ProgramResult:
        pod = self.sight.supervisor
        events = self.sight.events_of(pod) if pod is not None else ()
        job = self.sight.jobs.get(self._names.supervisor_job)
        text = _reasons.supervisor_end(pod, job, events)
        if not self._has_status:
            self.nodes = self.sight.status()
        if not self.is_up and (lines := self.last_words.strip().splitlines()):
            text += f". It said: {lines[-1]}"
        if job is None and (word := self.sight.stopped_by) is not None:
            return ProgramResult(Outcome.STOPPED, reason=f"{text}: {word}")
        if job is None:  # a user has deleted it
            return ProgramResult(Outcome.INTERRUPTED, reason=text, signum=signal.SIGTERM)
        return self.failed(text)

    def _stopped(self, stop: StopAsked, how: str = "") -> ProgramResult:
        return ProgramResult(stop.outcome, reason=f"{stop.reason}{how}", signum=stop.signum)

    def failed(self, text: str) -> ProgramResult:
        """Returns the result of a program that cannot go on; in `text`, the last output may follow."""
        summary, _, details = text.partition("\n")
        failure = NodeFailure(
            SUPERVISOR, f"run {self._names.run}", summary, last_output=details or self.last_words
        )
        return ProgramResult(Outcome.FAILED, (failure,), summary)

    @property
    def last_words(self) -> str:
        """What the supervisor has printed last that is no record."""
        return b"".join(self._last_lines).decode(errors="replace")

    # Machines that do not answer

    def _look_at_leaving(self, now: float) -> ProgramResult | None:
        """Handles pods that do not end when they should; returns the result if the program ends by that.

        While the machine of a pod does not answer, Kubernetes neither removes the pod nor makes a new
        one, until the machine itself is removed. But perhaps only the kubelet does not answer, while
        the pod runs and is reached. A new pod would then end a node that works, or a second supervisor
        would run. So this removes only pods that have certainly ended.
        """
        for each in self._leaving.values():
            if now < each.look_at:
                continue
            pod = each.pod
            each.look_at = now + self._timing.stuck_look_s
            if self.stop is not None or self.is_deleted:
                continue  # all pods are being deleted
            is_late = now >= each.since + _grace_of(pod) + self._timing.stuck_s
            is_supervisor = _reasons.is_supervisor(pod)
            is_movable = self.sight.node(pod) in self._movable
            is_replaced = self._begins_anew if is_supervisor else is_movable
            if is_supervisor and is_late and not is_replaced:
                how = (
                    f"the machine {_reasons.machine_of(pod)} of its supervisor does not answer, and "
                    f"how the program ended is not known: its pod {_reasons.name_of(pod)} "
                    f"{self.sight.loss_of(pod) or 'is gone'}"
                )
                self._hands.tell(how)  # now, because the removal of the rest may take a while
                return self.failed(how)
            ended_at = self._supervisor_ends_at(each) if is_supervisor else self._ends_at(each)
            if is_replaced and self._is_launch and now >= ended_at:
                each.look_at = now + self._timing.stuck_s  # in case the removal fails
                self._hands.remove(pod)
            elif is_late and not each.is_told:
                each.is_told = True
                how = (
                    "is replaced when it is back, or once it is certain that nothing of the pod runs"
                    if is_replaced
                    else "ends when it is back"
                )
                machine, name = _reasons.machine_of(pod), _reasons.name_of(pod)
                self._hands.tell(f"machine {machine} does not answer; pod {name} {how}")
        return None

    @property
    def _begins_anew(self) -> bool:
        if len(self._movable) < len(self._plan.executables):
            return False
        # A pod ends with code 0 only if the supervisor told it that the program is over.
        return all(_reasons.exit_code(pod) != 0 for pod in self.sight.pods_of_nodes())

    def _supervisor_ends_at(self, leaving: _LeavingPod) -> float:
        """Returns when a supervisor whose machine is away has ended, and what it serves beside it."""
        # When Kubernetes gave the pod up, its machine was away already. Since then the supervisor gets
        # no sign of life of the launching process. It checks that once it has placed all nodes.
        launch_s = 0.0 if self._is_placed else self._limits.schedule_s + LONGEST_BACKOFF_S
        notice_s = self._limits.notice_s if self._limits.notice_s >= 0 else math.inf
        end_s = (
            self._limits.launcher_silence_s + notice_s + self._timing.spare_s + self._timing.stuck_s
        )
        return leaving.since + launch_s + end_s

    def _ends_at(self, leaving: _LeavingPod) -> float:
        """Returns when nothing of a node's pod can run any more; inf: not known."""
        if any(_reasons.is_supervisor(each.pod) for each in self._leaving.values()):
            return math.inf  # the last record of its supervisor may be old
        # A supervisor that awaits a new pod sends the old one nothing, so the old one ends by itself.
        awaited_at = self._awaited.get(_reasons.host_of(leaving.pod), math.inf)
        return max(leaving.since, awaited_at + self._limits.silence_s) + self._timing.stuck_s

    def silent_machines(self, now: float) -> set[str]:
        """Returns the machines that are away, and those that did not end a pod in its time."""
        found = [
            each.pod for each in self._leaving.values() if now > each.since + _grace_of(each.pod)
        ]
        found += filter(self.sight.is_away, self.sight.pods_of_nodes())
        return {_reasons.machine_of(pod) for pod in found}

    # What is asked of it

    def ask(self, event: Event, now: float) -> None:
        """Takes in a request to end the program: `StopAsked`, or `KillAsked` to end it at once."""
        is_kill = not isinstance(event, StopAsked)
        self.is_in_hurry |= is_kill
        if self.is_in_hurry or (self._is_launch and not self.is_up):
            self._stop_limit = min(self._stop_limit, now + self._timing.gone_s)
        if self.stop is not None and not is_kill:
            return
        if self.stop is None:
            self.stop = event if isinstance(event, StopAsked) else StopAsked("kill() was called")
            if self._is_launch:
                self._notices.begin(self.stop, now)
            else:
                self._hands.leave_word(self.stop.reason)
        self._ask_at = now

    def _ask_for_end(self, now: float) -> None:
        """Ends the program: in order by its supervisor, or by deleting all objects."""
        is_placed = self.is_up
        if not (self._is_launch or self.is_in_hurry or self.is_up or self._is_caught_up):
            # Only the log tells whether all nodes were placed.
            has_log = self.followed is not None or "Pod" not in self._listed
            if has_log and now < self._read_limit:
                self._ask_at = self._read_limit
                return
            is_placed = has_log
        self._ask_at = math.inf
        pod, name = self.supervisor, None
        if pod is not None and is_placed and not self.is_in_hurry:
            if _reasons.is_running(pod) and not self.sight.is_gone(pod):
                name = _reasons.name_of(pod)
        limit_s = grace_s(self._limits.notice_s, self._timing.spare_s)
        try:
            self._is_asked = self._hands.end(name, limit_s)
            self.is_deleted |= not self._is_asked
            if self._is_asked and self._limits.notice_s >= 0:
                self._stop_limit = now + limit_s + self._timing.gone_s
        except ApiError as error:
            if error.is_final:
                raise
            self._hands.tell(f"the program cannot be stopped yet: {error}")
            self._ask_at = now + self._timing.ask_again_s

    # What takes too long

    def _too_late(self, now: float) -> ProgramResult | None:
        if now >= self._stop_limit and self.stop is not None:
            how = (
                "it did not end within its notice"
                if self._is_asked
                else "the cluster does not answer"
            )
            self.is_in_hurry = True
            return self._stopped(self.stop, f"; {how}")
        if self.is_up or (now < self._fail_limit and now < self._place_limit):
            return None
        failed = self.sight.failed()
        if now < self._fail_limit or not failed:  # or a user has removed them in the meantime
            return self.failed(self._late())
        ends = [
            f"{node}: its pod {_reasons.failure_of(pod, self.sight.events_of(pod))}"
            for node, pod in failed.items()
        ]
        text = f"program {self._plan.program!r} cannot start: {named(ends, MAX_NAMED)}"
        return self.failed(
            f"{text}\n{self._hands.last_lines(next(iter(failed.values())))}".rstrip()
        )

    def _late(self) -> str:
        lines = _reasons.told(self.sight.waits(), self.sight.troubles())
        if not lines:
            missing = named(self.sight.missing(), MAX_NAMED)
            lines = [
                f"{missing}: its pod does not run, and the cluster does not say why"
                if missing
                else "all pods run, but not all have reached the supervisor. Does the cluster's "
                "network let pods of the run talk, and has its DNS their names?"
            ]
        return (
            f"program {self._plan.program!r}: not all nodes were placed within {self._limits.schedule_s:g} s: "
            f"{'; '.join(lines)}"
        )

    # What is told

    def _tell_waits(self, now: float) -> None:
        """Tells what pods wait for, once each."""
        self._tell_at = math.inf
        if not self._has_status:
            self.nodes = self.sight.status()
        if self._is_launch and self.sight.failed():
            # The nodes may have begun and then failed. The supervisor's record of that comes later.
            self._fail_limit = min(self._fail_limit, now + self._timing.explain_s)
        troubles = self._new(self.sight.troubles())
        for line in _reasons.told(self._new(self.sight.waits()), troubles):
            self._hands.tell(line)
        if self.is_up and any(SUPERVISOR in nodes for nodes in troubles.values()):
            how = "nothing is known of the program until the machine of its supervisor answers"
            if (limit_s := self._limits.launcher_silence_s) < math.inf:
                how += f"; after {limit_s:g} s the supervisor stops it, as it sees nothing of this process"
            self._hands.tell(how)

    def _new(self, known: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
        """Returns what the user was not told yet of these nodes, and marks it as told."""
        new = {}
        for what, nodes in known.items():
            fresh = [node for node in nodes if (node, what) not in self._printed]
            self._printed.update((node, what) for node in fresh)
            if fresh:
                new[what] = fresh
        return new


def _grace_of(pod: Json) -> float:
    return float(pod["metadata"].get("deletionGracePeriodSeconds") or 0)
