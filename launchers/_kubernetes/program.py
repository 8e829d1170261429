"""A program in a cluster, as seen from outside of it: from the process that launched it, or later.

All that this process knows comes from the API server: the objects of the run, and what its
supervisor prints. The one that launched the program shows the supervisor that it lives; who attaches
later does not. So a program whose launching process has died ends after `launcher_silence_s`, even if another
watches it.
"""

import contextlib
import dataclasses
import itertools
import logging
import math
import os
import queue
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launchers._console import Console, warn
from launchers._kubernetes import reasons
from launchers._kubernetes.agreed import (
    LAUNCHER_ANNOTATION,
    NODE,
    RUN_LABEL,
    STOP_ANNOTATION,
    SUPERVISOR,
    grace_s,
)
from launchers._kubernetes.client import Api, ApiError, Cancellation, ChangeKind, Json
from launchers._kubernetes.names import Names
from launchers._kubernetes.reasons import Sight
from launchers._kubernetes.records import (
    End,
    Note,
    Output,
    Record,
    RecordReader,
    Status,
    Up,
)
from launchers._kubernetes.removal import Departures, Fate
from launchers._kubernetes.timing import DEFAULT, Timing
from launchers._logs import NodeLogs
from launchers._run_folder import make_run_folder
from launchers._watched import WatchedProgram
from launchpad_lite._crash import write_crash_report
from launchpad_lite.errors import LaunchError
from launchpad_lite.launching import (
    LaunchOptions,
    LaunchPlan,
    NodeFailure,
    NodeStatus,
    Outcome,
    ProgramResult,
)

#: By this finalizer a Job holds its pods until it has counted them.
_JOB_TRACKING = "batch.kubernetes.io/job-tracking"
#: Seconds that threads have to end which ask the cluster; one that it does not answer may take longer.
_LEAVE_S = 1.0
#: Objects that are listed each second, at most.
_LISTED_RATE = 200.0
#: Seconds of a log that are read again after a break: what was printed then may have come late.
_OVERLAP_S = 60
#: Seconds that a shell waits that attaches, until it has read a log that it has found, because the
#: newest word is at its end.
_WHOLE_LOG_S = 30.0
#: Seconds that pods have to end of a launch that is given up.
_SOON_S = 1
#: Lines of the supervisor's own output that are shown with its end.
_LAST_LINES = 20
_KINDS_OF_RUN = ("Pod", "Job", "Service", "Secret", "NetworkPolicy")

_LOGGER = logging.getLogger(__name__)


# What the threads of a program tell the one that decides


@dataclass(frozen=True)
class _Changed:
    change: ChangeKind
    obj: Json


@dataclass(frozen=True)
class _Said:
    uid: str
    record: Record


@dataclass(frozen=True)
class _CaughtUp:
    """All was read that a log had when its reading began."""

    uid: str


@dataclass(frozen=True)
class _LogEnded:
    uid: str


@dataclass(frozen=True)
class _Asked:
    """The program is asked to end; None: at once."""

    stop: tuple[str, int | None] | None


@dataclass(frozen=True)
class _Broken:
    """Without this thread the program cannot be watched."""

    failure: Exception


_Event = _Changed | _Said | _CaughtUp | _LogEnded | _Asked | _Broken


class KubernetesProgram(WatchedProgram):
    """A program in a cluster.

    Attributes:
        names: Of its objects.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        options: LaunchOptions,
        api: Api,
        names: Names,
        key: bytes | None = None,
        *,
        schedule_s: float = math.inf,
        is_launch: bool = False,
        log_dir: Path | None = None,
        silence_s: float = math.inf,
        launcher_silence_s: float = math.inf,
        take_back: Callable[[], str] = str,
        timing: Timing = DEFAULT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepares to watch it.

        Args:
            plan: Work is not needed.
            options: How it was launched.
            api: Where its objects are; this closes it in the end.
            names: Of the objects.
            key: For the seal of its end; None: nothing of the cluster is unpickled.
            schedule_s: Seconds until all nodes are to be placed; for the launch only.
            is_launch: Whether this process launched it: it tells what happens, its end waits for
                that of the program, and it removes what is left.
            log_dir: Where to keep the output of the nodes; None: nowhere.
            silence_s: Seconds after which a pod ends that receives nothing from its supervisor.
            launcher_silence_s: Seconds after which a supervisor ends the program that sees nothing of
                this process.
            take_back: Removes what was put elsewhere for it; returns what is left there, for people.
            timing: Limits and pauses.
            clock: Returns seconds.

        Raises:
            LaunchError: Logs cannot be written.
        """
        tells = is_launch and not options.quiet
        super().__init__(plan, options, log_dir, is_launch=is_launch, tells_logs=tells)
        self.names = names
        self._api = api
        self._key = key
        self._schedule_s = schedule_s
        self._launcher_silence_s = launcher_silence_s
        self._take_back = take_back
        self._timing = timing
        self._clock = clock
        self._nodes = {each.name for each in plan.executables} | {SUPERVISOR}
        self._logs = (
            NodeLogs(log_dir, sorted(self._nodes), options.log_limit_bytes)
            if log_dir is not None
            else None
        )
        self._console = Console() if tells else None
        self._sight = Sight(
            names,
            [(each.label, each.replica) for each in plan.executables],
            [each.name for each in plan.executables if each.restart.outlives_host],
        )
        self._status: tuple[NodeStatus, ...] = ()
        #: Put from signal handlers, too: only a SimpleQueue allows that.
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._cancellation = Cancellation()
        #: Whether all nodes are placed, as the supervisor says.
        self._is_up = False
        self._end: End | None = None
        self._stop: tuple[str, int | None] | None = None
        self._root_deleted = False
        self._pods_killed = False
        #: The supervisor's pod whose log is followed, and whether there is more of it.
        self._followed: Json | None = None
        self._is_caught_up = False
        self._log_ended = False
        self._last_lines: deque[bytes] = deque(maxlen=_LAST_LINES)
        self._printed = set[tuple[str, str]]()
        self._tell_at = math.inf
        self._stop_limit = math.inf
        self._departures = Departures(
            {names.host(each.label, each.replica): each for each in plan.executables},
            silence_s=silence_s,
            launcher_silence_s=launcher_silence_s,
            schedule_s=schedule_s,
            notice_s=options.notice_s,
            timing=timing,
        )
        #: Whether the cluster may yet say what became of lost pods, and until when that counts.
        self._may_explain = False
        self._explain_limit = math.inf
        #: When pods that are not replaced end the launch.
        self._fail_limit = math.inf
        self._ask_at = math.inf
        #: What other threads may know of what was seen.
        self._supervisor: Json | None = None
        self._missing: frozenset[str] = frozenset()
        self._has_status = threading.Event()
        #: Those that ask the cluster for what is to be decided about.
        self._threads: list[threading.Thread] = []

    def detach(self, where: str) -> None:
        """Ends it for this process, which does not watch it: requests to end it do nothing."""
        super().detach(where)
        self._api.close()
        self._has_status.set()

    def _give_up(self, error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt):
            self.handle_signal(signal.SIGINT)  # so that the next one is the second
        else:
            super()._give_up(error)
        limit_s = self._notice_limit_s() + 2 * self._timing.gone_s + self._timing.spare_s
        self._join_through_interrupts(min(limit_s, threading.TIMEOUT_MAX))

    # What a RunningProgram can do

    def request_stop(self, reason: str, signum: int | None = None) -> None:
        """Asks all nodes to end; before all are placed, everything is deleted."""
        self._events.put(_Asked((reason, signum)))

    def kill(self) -> None:
        """Ends all nodes by force."""
        self._events.put(_Asked(None))

    def status(self) -> list[NodeStatus]:
        """Returns how each node was a few seconds ago."""
        if not self._is_launch and not self._has_status.wait(self._timing.first_status_s):
            if self._followed is not None:
                self._has_status.wait(_WHOLE_LOG_S)
        if known := self._status:
            return list(known)
        return [
            NodeStatus(
                each.name,
                "pending" if each.name in self._missing else "starting",
                self.names.host(each.label, each.replica),
                None,
                {},
            )
            for each in self.plan.executables
        ]

    def output(self) -> Iterator[tuple[str, bytes]]:
        """Yields what nodes printed: `label[replica]` and lines of it.

        Of a program that was launched here, that is all; else what the cluster has kept, and between
        it what the supervisor has to tell, under the name `supervisor`.

        Raises:
            ApiError: It cannot be had.
        """
        if self._log_dir is not None:
            yield from super().output()
            return
        pods = self._api.list("Pod", f"{RUN_LABEL}={self.names.run}")
        found = [pod for pod in pods if self._sight.is_supervisor(pod)]
        for pod in sorted(found, key=lambda pod: str(pod["metadata"].get("creationTimestamp"))):
            reader = RecordReader(None, is_stamped=True)
            for line in self._api.logs(pod["metadata"]["name"], SUPERVISOR, timestamps=True):
                for record in reader.feed(line):
                    if isinstance(record, Output):
                        yield record.node, record.data
                    elif isinstance(record, Note):
                        yield SUPERVISOR, f"{record.text}\n".encode()

    # Its thread

    def _run(self) -> None:
        super()._run()
        self._has_status.set()

    def _follow(self) -> ProgramResult:
        self._start("pods", lambda: self._mirror("Pod", f"{RUN_LABEL}={self.names.run}"))
        self._start("jobs", lambda: self._mirror("Job", f"{RUN_LABEL}={self.names.run}"))
        self._start("events", lambda: self._mirror("Event", "", "type=Warning"))
        self._start("root", self._look_for_root)
        if self._is_launch:
            self._start("beat", self._show_life)
        try:
            result = self._decide()
        except ApiError as error:
            result = self._failed(str(error))
        return self._conclude(result)

    def _broken(self, error: BaseException) -> ProgramResult:
        text = f"{type(error).__name__}: {error}"
        if self._is_launch:
            text += self._remove_all(text) + self._take_back()
        return self._failed(text)

    def _close(self, result: ProgramResult) -> None:
        self._cancellation.cancel()
        if self._console is not None:
            for node in sorted(self._nodes):
                self._console.finish(node)
        if not self._is_up and self._failure is None:
            self._failure = result.reason or "it ended before all nodes were placed"
        limit = time.monotonic() + _LEAVE_S
        for thread in self._threads:
            thread.join(max(0.0, limit - time.monotonic()))
        self._api.close()

    def _start(self, what: str, target: Callable[[], None]) -> None:
        def run() -> None:
            try:
                target()
            except Exception as error:  # noqa: BLE001 - the thread that decides raises it
                self._events.put(_Broken(error))

        name = f"launchpad-{what}-{self.names.run}"
        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _decide(self) -> ProgramResult:
        """Returns how the program ended; its objects may still be there."""
        place_limit = math.inf
        if self._is_launch:
            place_limit = self._clock() + self._schedule_s
        longest_s = self._timing.longest_wait_s
        while True:
            if place_limit < math.inf and self._sight.is_suspended:
                # The queue decides when it may begin.
                place_limit = self._clock() + self._schedule_s
            limits = (
                self._tell_at,
                self._stop_limit,
                self._explain_limit,
                self._ask_at,
                self._departures.look_at,
                math.inf if self._is_up else self._fail_limit,
                math.inf if self._is_up else place_limit,
            )
            with contextlib.suppress(queue.Empty):
                timeout_s = min(limits) - self._clock()
                # A notice of centuries is fine; a wait that long is not.
                self._take_in(self._events.get(timeout=min(max(timeout_s, 0.0), longest_s)))
            now = self._clock()
            if now >= self._tell_at:
                self._tell_waits()
            if now >= self._departures.look_at and (lost := self._look_at_stuck(now)) is not None:
                return lost
            if now >= self._explain_limit:
                self._explain_limit, self._may_explain = math.inf, False
            if (result := self._verdict()) is not None:
                return result
            if self._is_caught_up and self._explain_limit == math.inf:
                # No earlier: a shell that asks for the status wants to know as well whether all is over.
                self._has_status.set()
            if not self._is_up and now >= self._fail_limit:
                return self._failed(self._early())
            if not (self._is_up or self._sight.is_suspended) and now >= place_limit:
                return self._failed(self._late())
            if now >= self._ask_at:
                self._ask_at = math.inf
                self._ask_for_end()
            if now >= self._stop_limit:
                how = "the cluster does not answer"
                if not self._is_in_hurry:
                    self._is_in_hurry, how = True, "it did not end within its notice"
                return self._stopped(f"{self._stop_reason()}; {how}")

    def _take_in(self, event: _Event) -> None:
        if isinstance(event, _Changed):
            self._sight.take_in(event.change, event.obj)
            self._tell_at = min(self._tell_at, self._clock() + self._timing.gather_s)
            if event.obj["kind"] == "Pod" and self._is_launch:
                container = self._sight.container(event.obj)
                self._departures.take_in(event.change, event.obj, container, self._clock())
            self._follow_newest()
        elif isinstance(event, _Said):
            if self._followed is not None and event.uid == self._followed["metadata"]["uid"]:
                self._take_in_record(event.record)
        elif isinstance(event, _CaughtUp):
            if self._followed is not None and event.uid == self._followed["metadata"]["uid"]:
                self._is_caught_up = True
        elif isinstance(event, _LogEnded):
            if self._followed is not None and event.uid == self._followed["metadata"]["uid"]:
                self._log_ended = True
        elif isinstance(event, _Asked):
            self._obey(event.stop)
        else:
            raise event.failure

    def _look_at_stuck(self, now: float) -> ProgramResult | None:
        """Sees to pods of machines that do not answer; returns a result if the program is lost."""
        for pod, fate in self._departures.fates(now):
            if self._stop is not None or self._root_deleted:
                continue  # all goes
            name = pod["metadata"]["name"]
            if fate in (Fate.PROGRAM_LOST, Fate.PROGRAM_ENDED):
                if fate is Fate.PROGRAM_LOST:
                    how = reasons.supervisor_loss(pod, self._sight.events_of(pod))
                else:
                    how = reasons.supervisor_silence(pod, self._launcher_silence_s)
                self._tell(how)  # the removal of what is left may take a while
                return self._failed(how)
            if fate is not Fate.REMOVED:
                how = (
                    "is replaced when it is back, or once it is certain that nothing of the pod runs"
                    if fate is Fate.REPLACED_LATER
                    else "ends when it is back"
                )
                machine = pod["spec"].get("nodeName", "")
                self._tell(f"machine {machine} does not answer; pod {name} {how}")
                continue
            try:
                found = self._api.get("Pod", name)
                is_there = found is not None and found["metadata"]["uid"] == pod["metadata"]["uid"]
                if found is not None and is_there:
                    if reasons.has_ended(found, self._sight.container(found)):
                        continue
                    self._remove_pod(found)
                    self._tell(f"pod {name} is removed, because its machine does not answer")
                self._departures.forget(pod)
            except ApiError as error:
                _LOGGER.info("pod %s cannot be removed: %s", name, error)
        return None

    def _remove_pod(self, pod: Json) -> None:
        meta = pod["metadata"]
        self._api.delete("Pod", meta["name"], grace_s=0)
        # Its Job holds it until its machine has said how it ended.
        finalizers = meta.get("finalizers") or []
        if _JOB_TRACKING in finalizers:
            others = [each for each in finalizers if each != _JOB_TRACKING]
            self._api.patch("Pod", meta["name"], {"metadata": {"finalizers": others or None}})

    def _take_in_record(self, record: Record) -> None:
        if isinstance(record, Up):
            self._is_up = True
            self._departures.note_up()
            self._is_known.set()
        elif isinstance(record, Status):
            self._status = record.nodes
            self._departures.take_in_status(record.nodes, self._clock())
        elif isinstance(record, Note):
            self._tell(record.text)
        elif isinstance(record, End):
            self._end = record
            self._explain_limit, self._may_explain = self._clock() + self._timing.explain_s, True

    def _follow_newest(self) -> None:
        """Follows the log of the supervisor's newest pod, once it may have one."""
        pod = self._supervisor = self._sight.supervisor
        if pod is None or self._root_deleted:
            return
        uid = pod["metadata"]["uid"]
        if self._followed is not None and self._followed["metadata"]["uid"] == uid:
            self._followed = pod
            return
        has_begun = reasons.is_running(pod, SUPERVISOR) or reasons.has_ended(pod, SUPERVISOR)
        if not has_begun or self._sight.is_gone(pod):
            return
        if self._followed is not None:
            if self._stop is not None:
                return  # it is about to be deleted
            self._tell(f"the program starts again, in {pod['metadata']['name']}")
        self._followed, self._log_ended, self._end = pod, False, None
        self._is_caught_up = False
        self._explain_limit = math.inf
        self._status = ()
        self._departures.begin(self._clock())
        self._start("log", lambda: self._follow_log(pod))

    def _unexplained(self) -> bool:
        """Returns whether the cluster may still say what became of a lost pod."""
        losses = self._sight.losses
        failures = self._end.result.failures if self._end is not None else ()
        return any(each.host_lost and not losses.get(each.host) for each in failures)

    def _verdict(self) -> ProgramResult | None:
        """Returns how the program ended, once that is known for good."""
        is_over = self._sight.is_over or self._root_deleted
        if self._end is not None:
            if self._may_explain and self._unexplained():
                return None
            # Where the cluster has ended it, it may be about to start it again.
            is_foreign = self._end.result.signum == signal.SIGTERM and self._stop is None
            return None if is_foreign and not is_over else self._result_of(self._end)
        if self._root_deleted:
            return self._stopped(self._stop_reason())
        if self._log_ended and self._stop is not None:
            return self._stopped(self._stop_reason())
        if is_over and (self._log_ended or self._followed is None):
            self._find_supervisor()  # what is said of Jobs may come before what is said of pods
            if self._log_ended or self._followed is None:
                return self._lost()
        return None

    def _result_of(self, end: End) -> ProgramResult:
        result = reasons.explained(end.result, self._sight.losses, self._sight.machine)
        if self._stop is not None and result.outcome is Outcome.INTERRUPTED:
            reason, signum = self._stop
            outcome = Outcome.STOPPED if signum is None else Outcome.INTERRUPTED
            result = dataclasses.replace(result, outcome=outcome, reason=reason, signum=signum)
        elif result.signum == signal.SIGTERM:
            if (word := self._sight.stopped_by) is not None:
                return dataclasses.replace(
                    result, outcome=Outcome.STOPPED, reason=word, signum=None
                )
            self._see_pods()  # what became of one may come after what the program says of its end
            reason = self._sight.interruption(result.reason)
            result = dataclasses.replace(result, reason=reason)
        return result

    # What is asked of it

    def _obey(self, stop: tuple[str, int | None] | None) -> None:
        if stop is None:
            self._is_in_hurry = True
            # Who kills waits no longer for a cluster that does not answer.
            self._stop_limit = min(self._stop_limit, self._clock() + self._timing.gone_s)
        elif self._stop is not None:
            return
        if self._stop is None:
            self._stop = stop or ("kill() was called", None)
            if not self._is_launch:
                self._leave_word(self._stop[0])
        self._ask_for_end()

    def _leave_word(self, reason: str) -> None:
        """Lets the launching process know that the end that it is going to see was asked for."""
        word = f"{reason} in process {os.getpid()} on {socket.gethostname()}"
        change = {"metadata": {"annotations": {STOP_ANNOTATION: word}}}
        with contextlib.suppress(ApiError):  # to that process it is then as if it had got SIGTERM
            self._api.patch(
                "Job", self.names.supervisor_job, change, patience_s=self._timing.patience_s
            )

    def _ask_for_end(self) -> None:
        """Passes on to the cluster that the program is to end, now or as soon as it answers."""
        try:
            pod = self._who_is_to_end()
            limit_s = grace_s(self._options.notice_s, self._timing.spare_s)
            if pod is None or not self._delete("Pod", pod["metadata"]["name"], limit_s):
                self._delete_root()
                return
            if self._options.notice_s >= 0:
                self._stop_limit = self._clock() + limit_s + self._timing.gone_s
        except ApiError as error:
            if error.status in (401, 403):
                raise
            self._tell(f"the program cannot be stopped yet: {error}")
            self._ask_at = self._clock() + self._timing.ask_again_s

    def _who_is_to_end(self) -> Json | None:
        """Returns the supervisor's pod if it is to stop all in order; None: all is to be deleted."""
        if self._is_in_hurry or (self._is_launch and not self._is_up):
            return None
        pod = self._supervisor or self._find_supervisor()
        if pod is None or self._sight.is_gone(pod) or not reasons.is_running(pod, SUPERVISOR):
            return None
        return pod

    def _find_supervisor(self) -> Json | None:
        """Returns the supervisor's pod, also before a watch has shown it."""
        self._see_pods()
        self._follow_newest()
        return self._sight.supervisor

    def _see_pods(self) -> None:
        for pod in self._list("Pod"):
            self._sight.take_in("ADDED", pod)

    def _stop_reason(self) -> str:
        return self._stop[0] if self._stop is not None else "it was deleted"

    # What becomes of it

    def _conclude(self, result: ProgramResult) -> ProgramResult:
        """Removes what is left, if that is ours to do; writes down what is known of a failure."""
        if not self._is_up and self._is_launch:
            self._failure = self._failure or self._reason_of(result)
        elif self._stop is None and (
            result.outcome is Outcome.INTERRUPTED or self._sight.stopped_by is not None
        ):
            self._tell(f"the program was ended: {result.reason}")
        if self._is_launch or self._stop is not None:
            how = self._failure or f"the program has ended: {self._reason_of(result)}"
            if left := self._remove_all(how.partition("\n")[0]) + self._take_back():
                result = dataclasses.replace(result, reason=f"{result.reason}{left}")
                if self._failure is not None:
                    self._failure += left
                else:
                    self._tell(f"the program has ended{left}")
        if result.outcome is Outcome.FAILED and self._is_launch and self._is_up:
            stacks = self._end.stacks if self._end is not None else {}
            try:
                folder = self._log_dir or make_run_folder(self.plan.program, self._options.log_dir)
                write_crash_report(folder, self.plan, result, stacks)
                self._crash_dir = folder
            except (OSError, LaunchError) as error:
                warn(_LOGGER, "the crash folder of %s", self.names.run, error=error)
        return result

    def _reason_of(self, result: ProgramResult) -> str:
        if result.failures:
            first = result.failures[0]
            text = result.reason or first.headline()
            if first.last_output:
                text += f"\nWhat was printed last:\n{first.last_output}"
            return text
        return result.reason or "it ended before all nodes were placed"

    def _remove_all(self, how: str) -> str:
        """Deletes all objects and waits until they are gone; returns what remains, for people.

        Args:
            how: How it ended; printed if this takes a while.
        """
        tell_at = self._clock() + self._timing.tell_s
        limit = self._clock() + self._timing.gone_s
        if not self._is_in_hurry:
            limit += self._notice_limit_s()
        left: list[Json] | None = None
        failure: ApiError | None = None
        while left != []:
            try:
                self._delete_root()
                left, failure = self._left(), None
                if self._is_launch and not self._is_up:
                    self._hurry(left)
            except ApiError as error:
                failure = error
                if error.status in (401, 403) and not self._root_deleted:
                    break
            if left and self._clock() >= tell_at:
                tell_at = math.inf
                self._tell(f"{how}; waits for the end of what is left: {reasons.remaining(left)}")
            # A list of many pods is much to ask for.
            pause_s = max(self._timing.look_s, len(left or ()) / _LISTED_RATE)
            if left != [] and self._is_kill_asked(pause_s):
                limit = min(limit, self._clock())
            if left and self._clock() >= limit and not self._is_in_hurry:
                self._is_in_hurry = True
                limit = self._clock() + self._timing.gone_s
            elif left != [] and self._clock() >= limit:
                break
        if failure is not None and not self._root_deleted and failure.status in (401, 403):
            return (
                f"; the run could not be removed: {failure}. The cluster does so after `ttl_s`, or "
                f"a user who may: kubectl delete {self.names.root_kind.lower()} {self.names.run} "
                f"-n {self._api.namespace}"
            )
        if failure is not None:
            return (
                f"; whether anything is left of it is not known: {failure}. See for yourself: "
                f"kubectl get pods,jobs -n {self._api.namespace} -l "
                f"{RUN_LABEL}={self.names.run}"
            )
        return (
            f"; still there, until the cluster removes it: {reasons.remaining(left)}"
            if left
            else ""
        )

    def _notice_limit_s(self) -> float:
        """Returns the seconds that pods have until they must end."""
        notice_s = self._options.notice_s
        return notice_s + self._timing.spare_s if notice_s > 0 else 0.0

    def _is_kill_asked(self, timeout_s: float) -> bool:
        """Waits; returns whether all were asked to end at once in the meantime."""
        limit = time.monotonic() + timeout_s
        with contextlib.suppress(queue.Empty):
            while (left_s := limit - time.monotonic()) > 0:
                if self._events.get(timeout=left_s) == _Asked(None):
                    return True
        return False

    def _delete_root(self) -> None:
        """Deletes all objects; by force, pods as well, once that is what is wanted."""
        if not self._root_deleted:
            self._delete(self.names.root_kind, self.names.run)
            self._root_deleted = True
        if self._is_in_hurry and not self._pods_killed:
            for pod in self._list("Pod"):
                self._delete("Pod", pod["metadata"]["name"], 0)
            self._pods_killed = True

    def _list(self, kind: str) -> list[Json]:
        selector = f"{RUN_LABEL}={self.names.run}"
        return self._api.list(kind, selector, patience_s=self._timing.patience_s)

    def _delete(self, kind: str, name: str, grace_s: int | None = None) -> bool:
        return self._api.delete(kind, name, grace_s=grace_s, patience_s=self._timing.patience_s)

    def _hurry(self, left: Sequence[Json]) -> None:
        """Makes pods end soon that run nothing yet: one that has only begun may not get its notice."""
        with contextlib.suppress(ApiError):  # they end all the same
            for each in left:
                grace_s = each["metadata"].get("deletionGracePeriodSeconds", math.inf)
                if each["kind"] == "Pod" and grace_s > _SOON_S:
                    self._delete("Pod", each["metadata"]["name"], _SOON_S)

    def _left(self) -> list[Json]:
        """Returns the objects that are there."""
        found: list[Json] = []
        for kind in _KINDS_OF_RUN:
            try:
                found += self._list(kind)
            except ApiError as error:
                if error.status != 403:  # who creates secrets may not be let to list them
                    raise
            if found:
                break  # pods go first, and the others are many questions
        return found

    def _failed(self, text: str) -> ProgramResult:
        summary, _, details = text.partition("\n")
        failure = NodeFailure(
            SUPERVISOR, f"run {self.names.run}", summary, last_output=details or self._last_words()
        )
        return ProgramResult(Outcome.FAILED, (failure,), summary)

    def _lost(self) -> ProgramResult:
        """Returns how a program ended of which there is no word."""
        pod = self._sight.supervisor
        events = self._sight.events_of(pod) if pod is not None else ()
        job = self._sight.jobs.get(self.names.supervisor_job)
        text = reasons.supervisor_end(pod, job, events)
        if not self._is_up and (said := self._last_words().strip()):
            text += f". It said: {said.splitlines()[-1]}"
        if job is None and (word := self._sight.stopped_by) is not None:
            return ProgramResult(Outcome.STOPPED, reason=f"{text}: {word}")
        if job is None:  # a user has deleted it
            return ProgramResult(Outcome.INTERRUPTED, reason=text, signum=signal.SIGTERM)
        return self._failed(text)

    def _stopped(self, reason: str) -> ProgramResult:
        signum = self._stop[1] if self._stop is not None else None
        outcome = Outcome.STOPPED if signum is None else Outcome.INTERRUPTED
        return ProgramResult(outcome, reason=reason, signum=signum)

    def _early(self) -> str:
        """Returns which pods ended before all nodes were placed, and what the first one printed."""
        failed = self._sight.failed()
        if not failed:  # a user has removed them in the meantime
            return self._late()
        if all(reasons.has_lost_link(pod, self._sight.events_of(pod)) for pod in failed.values()):
            supervisor = self._sight.supervisor
            events = self._sight.events_of(supervisor) if supervisor is not None else ()
            how = reasons.lost_link([*failed], supervisor, events)
        else:
            how = reasons.named(
                [
                    f"{node}: its pod {reasons.failure_of(pod, self._sight.events_of(pod))}"
                    for node, pod in failed.items()
                ]
            )
        text = f"program {self.plan.program!r} cannot start: {how}"
        name = next(iter(failed.values()))["metadata"]["name"]
        with contextlib.suppress(ApiError):
            printed = [*self._api.logs(name, NODE, tail=_LAST_LINES)]
            text += "".join(f"\n{line}" for line in printed)
        return text

    def _late(self) -> str:
        lines = reasons.waiting_lines(self._sight.waits())
        lines += reasons.trouble_lines(self._sight.troubles())
        if not lines:
            missing = self._sight.missing()
            lines = [
                f"{reasons.named(missing)}: its pod does not run, and the cluster does not say why"
                if missing
                else "all pods run, but not all have reached the supervisor. Does the cluster's "
                "network let pods of the run talk, and has its DNS their names?"
            ]
        return (
            f"program {self.plan.program!r}: not all nodes were placed within {self._schedule_s:g} s: "
            f"{'; '.join(lines)}"
        )

    def _last_words(self) -> str:
        return b"".join(self._last_lines).decode(errors="replace")

    # What it tells

    def _tell_waits(self) -> None:
        """Prints what pods wait for, once each."""
        self._tell_at = math.inf
        self._missing = frozenset(self._sight.missing())
        if self._is_launch and self._sight.failed():
            # It may be that they began, and failed: the supervisor's word for it comes later.
            self._fail_limit = min(self._fail_limit, self._clock() + self._timing.explain_s)
        troubles = self._unprinted(self._sight.troubles())
        lines = reasons.waiting_lines(self._unprinted(self._sight.waits()))
        for line in lines + reasons.trouble_lines(troubles):
            self._tell(line)
        if self._is_up and any(SUPERVISOR in nodes for nodes in troubles.values()):
            self._tell(reasons.supervisor_away(self._launcher_silence_s))

    def _unprinted(self, known: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
        """Returns what was not printed before of nodes, and marks it as printed."""
        new = {}
        for what, nodes in known.items():
            fresh = [node for node in nodes if (node, what) not in self._printed]
            self._printed.update((node, what) for node in fresh)
            if fresh:
                new[what] = fresh
        return new

    # Other threads

    def _mirror(self, kind: str, selector: str, fields: str = "") -> None:
        """Passes on changes of objects."""
        changes = self._api.watch(kind, selector, fields=fields, cancellation=self._cancellation)
        try:
            for change, obj in changes:
                obj.setdefault("kind", kind)
                self._events.put(_Changed(change, obj))
        except ApiError as error:
            if kind != "Event":  # they only make messages better
                raise
            _LOGGER.info("no events of the run %s: %s", self.names.run, error)

    def _look_for_root(self) -> None:
        """Notices that the run was deleted before a watch has shown its supervisor's Job."""
        name = self.names.supervisor_job
        while not self._cancellation.wait(self._timing.look_s):
            if name in self._sight.jobs:
                return
            with contextlib.suppress(ApiError):  # it is asked again
                if self._api.get(self.names.root_kind, self.names.run) is None:
                    job = {"kind": "Job", "metadata": {"name": name}}
                    self._events.put(_Changed("DELETED", job))
                    return

    def _follow_log(self, pod: Json) -> None:
        """Passes on records of a supervisor until it has ended, and shows what nodes print."""
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        reader = RecordReader(self._key, is_stamped=True)
        answered_at = time.monotonic()
        since_s: int | None = None
        # Who attaches reads first what is there: a log that is followed does not say where that ends.
        is_caught_up = self._is_launch
        is_final = False
        while not self._cancellation.is_set:
            try:
                lines = self._api.logs(
                    name,
                    SUPERVISOR,
                    follow=is_caught_up and not is_final,
                    since_s=since_s,
                    timestamps=True,
                    whole_lines=not is_final,
                    cancellation=self._cancellation,
                )
                is_empty = True
                for line in lines:
                    is_empty = False
                    answered_at = time.monotonic()
                    for record in reader.feed(line):
                        if isinstance(record, Output):
                            self._show(record)
                        else:
                            self._events.put(_Said(uid, record))
                # What a kubelet says that cannot read a log is none.
                if not is_caught_up and (is_empty or reader.last_number):
                    is_caught_up = True
                    self._events.put(_CaughtUp(uid))
                if is_final:
                    break
            except ApiError as error:
                _LOGGER.debug("the log of %s: %s", name, error)
                if is_final or error.status == 404:
                    break
                if error.status == 403 and not reader.last_number:
                    raise
            if reader.last_number:
                since_s = math.ceil(time.monotonic() - answered_at) + _OVERLAP_S
            if self._cancellation.wait(0):
                return
            # What a connection that ended has left out is read once more.
            is_final = self._has_ended(name, uid)
            if not is_final:
                self._cancellation.wait(self._timing.log_pause_s)
        self._events.put(_LogEnded(uid))

    def _has_ended(self, name: str, uid: str) -> bool:
        try:
            pod = self._api.get("Pod", name)
        except ApiError:
            return False
        is_same = pod is not None and pod["metadata"]["uid"] == uid
        return not is_same or pod is None or reasons.has_ended(pod, SUPERVISOR)

    def _show(self, output: Output) -> None:
        if output.node == SUPERVISOR:
            self._last_lines.append(output.data)
        if self._console is not None:
            self._console.show(output.node, output.data)
        if self._logs is not None and output.node in self._nodes:
            self._logs.write(output.node, output.data)

    def _show_life(self) -> None:
        """Lets the supervisor know that this process waits for the program."""
        here = f"{socket.gethostname()}:{os.getpid()}"
        answers = True
        for beat in itertools.count():
            pod = self._supervisor
            if pod is not None:
                word = {"metadata": {"annotations": {LAUNCHER_ANNOTATION: f"{here} {beat}"}}}
                try:
                    self._api.patch("Pod", pod["metadata"]["name"], word)
                    if not answers:
                        self._tell("the program is told again that this process waits for it")
                    answers = True
                except ApiError as error:
                    if answers and error.status != 404 and not self._cancellation.is_set:
                        self._tell(f"the program is not told that this process waits: {error}")
                        answers = False
            pause_s = self._timing.beat_s if pod is not None else self._timing.look_s
            if self._cancellation.wait(pause_s):
                return
