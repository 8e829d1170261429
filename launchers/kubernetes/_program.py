"""A program in a cluster, watched by the process that launched it, or by one that attached later.

This process learns all from the API server: the objects of the run, and the log of its supervisor.
`_state` decides; this module makes the requests. The launching process sends the supervisor signs of
life, and attached processes do not. So a program whose launching process has died ends after
`launcher_silence_s`, even if another process watches it.
"""

import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from launchers.hosts.elsewhere import ProgramElsewhere
from launchers.kubernetes import _reasons
from launchers.kubernetes._agreed import (
    LAUNCHER_ANNOTATION,
    NODE,
    ROLE_LABEL,
    RUN_LABEL,
    STACKS_ANNOTATION,
    STOP_ANNOTATION,
    SUPERVISOR,
)
from launchers.kubernetes._client import Api, ApiError, Cancellation, Json
from launchers.kubernetes._names import Names
from launchers.kubernetes._records import AnswerRecord, Note, PrintedRecord, Record, RecordReader
from launchers.kubernetes._state import Hands, RunState, WaitLimits
from launchers.kubernetes._timing import DEFAULT, Timing
from launchers.supervision.console import Console, warn
from launchers.supervision.logs import NodeLogs
from launchers.supervision.run_folder import make_run_folder
from launchpad_lite.errors import LaunchError
from launchpad_lite.launching import LaunchOptions, LaunchPlan, NodeStatus, Outcome, ProgramResult
from launchpad_lite.launching.crash import write_crash_report
from launchpad_lite.life.events import Event

#: The finalizer by which a Job keeps its pods until it has counted them.
_JOB_TRACKING = "batch.kubernetes.io/job-tracking"
#: Seconds that watching threads have to end. A thread that waits for the cluster may take longer.
_LEAVE_S = 1.0
#: Objects that are listed each second, at most.
_LISTED_RATE = 200.0
#: Seconds of a log that are read again after a break, because lines may arrive late.
_OVERLAP_S = 60
#: Seconds that an attached shell reads a log that it has found: the newest status is at its end.
_WHOLE_LOG_S = 30.0
#: Seconds that the pods of a launch that failed have to end.
_SOON_S = 1
_LAST_LINES = 20
#: Kinds of objects, beside Jobs and pods, that a user may create, but perhaps not list.
_OTHER_KINDS = frozenset({"Service", "Secret", "NetworkPolicy"})

_LOGGER = logging.getLogger(__name__)


class KubernetesProgram(ProgramElsewhere):
    launcher = "kubernetes"
    answer_s = 120.0  # the kubelet passes a question on once a minute, or more often

    def __init__(
        self,
        plan: LaunchPlan,
        options: LaunchOptions,
        api: Api,
        names: Names,
        key: bytes | None = None,
        *,
        limits: WaitLimits | None = None,
        is_launch: bool = False,
        log_dir: Path | None = None,
        take_back: Callable[[], str] = str,
        timing: Timing = DEFAULT,
    ) -> None:
        """Prepares to watch it; closes the API in the end.

        The `key` is for the seal of the end; without it, nothing of the cluster is unpickled. The
        process that launched the run tells what happens, and removes what is left. `take_back`
        removes work outside of the cluster, and returns what is left of it, for people. Of a run
        that was launched elsewhere, only the notice of the `limits` is known.
        """
        super().__init__(plan, options, log_dir, is_launch=is_launch)
        self.names = names
        self._selector = f"{RUN_LABEL}={names.run}"
        self._api = api
        self._key = key
        self._take_back = take_back
        self._timing = timing
        self._nodes = {each.name for each in plan.executables} | {SUPERVISOR}
        self._logs = (
            NodeLogs(log_dir, sorted(self._nodes), options.log_limit_bytes)
            if log_dir is not None
            else None
        )
        self._console = Console() if is_launch and not options.quiet else None
        hands = Hands(
            tell=self._tell,
            read_log=lambda pod: self._start("log", lambda: self._follow_log(pod)),
            last_lines=self._last_lines,
            leave_word=self._leave_word,
            end=self._end_or_delete,
            remove=self._remove_pod,
        )
        limits = limits or WaitLimits(options.notice_s)
        #: Belongs to the deciding thread; other threads read single attributes.
        self._state = RunState(
            plan, names, hands, time.monotonic(), limits, is_launch=is_launch, timing=timing
        )
        self._cancellation = Cancellation()
        self._has_status = threading.Event()
        #: The newest answer to where threads are.
        self._answered: AnswerRecord | None = None
        #: Whether it has removed what is left, or tried to.
        self._has_removed = False
        #: Whether objects without an owner were seen, which this launcher did not create.
        self._has_orphans = False
        #: Kinds of objects that we may not see, or not delete.
        self._hidden: set[str] = set()
        self._threads: list[threading.Thread] = []

    def detach(self, kind: str, reference: str, how: str) -> None:
        """Ends the watching in this process: later requests to end the program do nothing."""
        super().detach(kind, reference, how)
        self._api.close()
        self._has_status.set()

    def _give_up_s(self) -> float:
        limit_s = self._notice_limit_s() + 2 * self._timing.gone_s + self._timing.spare_s
        return min(limit_s, threading.TIMEOUT_MAX)

    # What a RunningProgram can do

    def post(self, event: Event) -> None:
        """Takes in a request to end; before all nodes are placed, everything is deleted."""
        self._put(self._state.ask, event)

    def status(self) -> list[NodeStatus]:
        """Returns how each node was a few seconds ago."""
        if not self._is_launch and not self._has_status.wait(self._timing.first_status_s):
            if self._state.followed is not None:
                self._has_status.wait(_WHOLE_LOG_S)
        return list(self._state.nodes)

    def output(self) -> Iterator[tuple[str, bytes]]:
        """Yields what nodes printed: `label[replica]` and lines of it.

        For a program that this process launched, that is everything. Otherwise it is what the
        cluster has kept, with the notes of the supervisor under the name `supervisor`.
        """
        if self._log_dir is not None:
            yield from super().output()
            return
        for pod in self._supervisors():
            reader = RecordReader(None)
            for line in self._api.logs(pod["metadata"]["name"], SUPERVISOR, timestamps=True):
                yield from _words(reader.feed(line))

    def follow(self) -> Iterator[tuple[str, bytes]]:
        """Yields what nodes print until the program ends, as `output` does."""
        begun = set[str]()
        is_over = False
        while not is_over:
            is_over = self.join(self._timing.log_pause_s if begun else 0.0)
            for pod in self._supervisors():
                if pod["metadata"]["uid"] not in begun:
                    begun.add(pod["metadata"]["uid"])
                    reader = RecordReader(None)
                    for records in self._read_log(pod, reader, Cancellation()):
                        yield from _words(records or ())

    def _ask_supervisor(self, question: str) -> None:
        running = (pod for pod in reversed(self._supervisors()) if _reasons.is_running(pod))
        if (pod := next(running, None)) is None:
            raise LaunchError(f"no supervisor of the run {self.names.run} runs")
        word = {"metadata": {"annotations": {STACKS_ANNOTATION: question}}}
        self._api.patch("Pod", pod["metadata"]["name"], word)

    def _answer(self, question: str) -> str | None:
        found = self._answered
        return found.text if found is not None and found.question == question else None

    def _supervisors(self) -> list[Json]:
        """Returns the pods of supervisors that have a log, the oldest first."""
        pods = self._api.list("Pod", f"{self._selector},{ROLE_LABEL}={SUPERVISOR}")
        begun = [pod for pod in pods if _reasons.is_running(pod) or _reasons.has_ended(pod)]
        return sorted(begun, key=_reasons.created)

    # Its thread

    def _run(self) -> None:
        super()._run()
        self._has_status.set()

    def _follow(self) -> ProgramResult:
        self._start("pods", lambda: self._mirror("Pod", self._selector))
        self._start("jobs", lambda: self._mirror("Job", self._selector))
        self._start("events", lambda: self._mirror("Event", "", "type=Warning"))
        if self._is_launch:
            self._start("beat", self._show_life)
        try:
            result = self._decide()
        except ApiError as error:
            result = self._state.failed(str(error))
        return self._conclude(result)

    def join(self, timeout_s: float | None = None) -> bool:
        if not super().join(timeout_s):
            return False
        if self._was_asked and not self._has_removed and self._result is not None:
            # Its thread had seen the end already when it was asked.
            self._result = self._conclude(self._result)
            self._api.close()
        return True

    def _broken(self, error: BaseException) -> ProgramResult:
        text = f"{type(error).__name__}: {error}"
        if self._is_launch:
            text += self._remove_all(text) + self._take_back()
        return self._state.failed(text)

    def _close(self, result: ProgramResult) -> None:  # noqa: ARG002
        self._cancellation.cancel()
        if self._console is not None:
            for node in sorted(self._nodes):
                self._console.finish(node)
        limit = time.monotonic() + _LEAVE_S
        for thread in self._threads:
            thread.join(max(0.0, limit - time.monotonic()))
        self._api.close()

    def _start(self, what: str, target: Callable[[], None]) -> None:
        def run() -> None:
            try:
                target()
            except Exception as error:  # noqa: BLE001 - the thread that decides raises it
                self._events.put(error)

        name = f"launchpad-{what}-{self.names.run}"
        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _decide(self) -> ProgramResult:
        """Returns how the program ended; its objects may still be there."""
        state = self._state
        while (result := state.look(time.monotonic())) is None:
            if state.is_settled:
                # Not before: `status` shall also tell a shell whether the program is over.
                self._has_status.set()
            self._take_in(state.due - time.monotonic())
        self._is_in_hurry = state.is_in_hurry
        return result

    def _put(self, take_in: Callable[..., None], *what: object) -> None:
        """Passes something to the deciding thread, which adds the time."""
        self._events.put(functools.partial(take_in, *what))

    def _take_in(self, timeout_s: float) -> None:
        """Waits for news or requests from other threads, and takes one in."""
        if (news := self._next(timeout_s)) is not None:
            if isinstance(news, Exception):
                raise news
            news(time.monotonic())
            self._is_in_hurry = self._state.is_in_hurry
            if self._state.is_up:
                self._is_known.set()

    # What the state has done

    def _leave_word(self, reason: str) -> None:
        """Tells the launching process that the end was requested, and why."""
        word = f"{reason} in process {os.getpid()} on {socket.gethostname()}"
        change = {"metadata": {"annotations": {STOP_ANNOTATION: word}}}
        with contextlib.suppress(ApiError):  # that process then reports SIGTERM as the reason
            self._api.patch(
                "Job", self.names.supervisor_job, change, patience_s=self._timing.patience_s
            )

    def _end_or_delete(self, pod: str | None, grace_s: int) -> bool:
        """Has a supervisor end all in order, or deletes all; returns whether a supervisor was asked."""
        is_asked = pod is not None and self._delete("Pod", pod, grace_s)
        if not is_asked:
            self._delete(self.names.root_kind, self.names.run)
        return is_asked

    def _last_lines(self, pod: Json) -> str:
        with contextlib.suppress(ApiError):
            return "\n".join(self._api.logs(pod["metadata"]["name"], NODE, tail=_LAST_LINES))
        return ""

    def _remove_pod(self, pod: Json) -> None:
        """Removes a pod whose machine does not answer, unless it has just ended."""
        meta = pod["metadata"]
        try:
            if (found := self._newest(pod)) is None:
                return
            self._api.delete("Pod", meta["name"], grace_s=0)
            # Its Job keeps the pod until the machine has reported how it ended.
            finalizers = found["metadata"].get("finalizers") or []
            if _JOB_TRACKING in finalizers:
                others = [each for each in finalizers if each != _JOB_TRACKING]
                self._api.patch("Pod", meta["name"], {"metadata": {"finalizers": others or None}})
            self._tell(f"pod {meta['name']} is removed, because its machine does not answer")
        except ApiError as error:
            _LOGGER.info("pod %s cannot be removed: %s", meta["name"], error)

    # What becomes of it

    def _conclude(self, result: ProgramResult) -> ProgramResult:
        """Removes what is left, if this process has to; writes a crash report of a failure."""
        state = self._state
        fails_launch = self._is_launch and self._fails_launch(result)
        if state.stop is None and not fails_launch:
            if state.sight.stopped_by is not None or result.outcome is Outcome.INTERRUPTED:
                self._tell(f"the program was ended: {result.reason}")
        if self._is_launch or self._was_asked:
            why = self._why(result)
            how = why if fails_launch else f"the program has ended: {why}"
            if left := self._remove_all(how.partition("\n")[0]) + self._take_back():
                result = dataclasses.replace(result, reason=f"{result.reason or why}{left}")
                if not fails_launch or self._was_asked:
                    # A user who interrupts a launch does not see the text of its error.
                    self._tell(f"the program has ended{left}")
        if result.outcome is Outcome.FAILED and self._is_launch and state.is_up:
            stacks = state.end.stacks if state.end is not None else {}
            try:
                folder = self._log_dir or make_run_folder(self.plan.program, self._options.log_dir)
                write_crash_report(folder, self.plan, result, stacks)
                self._crash_dir = folder
            except (OSError, LaunchError) as error:
                warn(_LOGGER, "the crash folder of %s", self.names.run, error=error)
        return result

    def _why(self, result: ProgramResult) -> str:
        """Returns why a program ended, with the last output of the first node that failed."""
        if not result.failures:
            return result.reason or "it ended before all nodes were placed"
        first = result.failures[0]
        text = result.reason or first.headline()
        return f"{text}\nWhat was printed last:\n{first.last_output}" if first.last_output else text

    def _remove_all(self, how: str) -> str:
        """Deletes all objects and waits until they are gone; returns what remains, for people."""
        state, self._has_removed = self._state, True
        tell_at = time.monotonic() + self._timing.tell_s
        limit = time.monotonic() + self._timing.gone_s
        if not state.is_in_hurry:
            limit += self._notice_limit_s()
        left: list[Json] | None = None
        forced: list[Json] | None = None
        failure: ApiError | None = None
        while True:
            try:
                if not state.is_deleted:
                    self._end_or_delete(None, 0)
                    state.is_deleted = True
                if state.is_in_hurry and forced is None:
                    forced = self._kill_pods()
                left, failure = self._left(), None
            except ApiError as error:
                failure = error
            now = time.monotonic()
            is_refused = failure is not None and failure.is_final and not state.is_deleted
            if left == [] or is_refused or (now >= limit and state.is_in_hurry):
                return self._remains(left, forced, failure)
            if left and now >= tell_at:
                tell_at = math.inf
                self._tell(f"{how}; waits for the end of what is left: {_reasons.remaining(left)}")
            # Long lists are asked for less often, to spare the server.
            look_at = now + max(self._timing.look_s, len(left or ()) / _LISTED_RATE)
            was_in_hurry = state.is_in_hurry
            state.is_in_hurry |= now >= limit
            while state.is_in_hurry == was_in_hurry and time.monotonic() < look_at:
                with contextlib.suppress(ApiError):  # the watch that failed is no longer needed
                    self._take_in(look_at - time.monotonic())
            if state.is_in_hurry and not was_in_hurry:
                limit = time.monotonic() + self._timing.gone_s

    def _remains(
        self, left: list[Json] | None, forced: list[Json] | None, failure: ApiError | None
    ) -> str:
        """Returns what is left of a run after its removal, for people; `left` is None if unknown."""
        where = f"-n {self._api.namespace} -l {self._selector}"
        if failure is not None and not self._state.is_deleted:
            return (
                f"; the run could not be removed: {failure}. The cluster does so after `ttl_s`, or "
                f"a user who may: kubectl delete {self.names.root_kind.lower()} {self.names.run} "
                f"-n {self._api.namespace}"
            )
        if failure is not None:
            return (
                f"; whether anything is left of it is not known: {failure}. See for yourself: "
                f"kubectl get pods,jobs {where}"
            )
        if left:
            return f"; still there: {_reasons.remaining(left)}. See: kubectl get pods,jobs {where}"
        if self._has_orphans and self._hidden:
            kinds = ",".join(f"{each.lower()}s" for each in sorted(self._hidden))
            return f"; what was created by others is left: kubectl delete {kinds} {where}"
        if forced:
            return (
                "; removed from the cluster, but they may still run, as their machines do not "
                f"answer: {_reasons.remaining(forced)}"
            )
        return ""

    def _notice_limit_s(self) -> float:
        notice_s = self._options.notice_s
        return notice_s + self._timing.spare_s if notice_s > 0 else 0.0

    def _kill_pods(self) -> list[Json]:
        found = self._list("Pod")
        for pod in found:
            self._delete("Pod", pod["metadata"]["name"], 0)
        silent = self._state.silent_machines(time.monotonic())
        return [pod for pod in found if pod.get("spec", {}).get("nodeName") in silent]

    def _list(self, kind: str) -> list[Json]:
        return self._api.list(kind, self._selector, patience_s=self._timing.patience_s)

    def _delete(self, kind: str, name: str, grace_s: int | None = None) -> bool:
        return self._api.delete(kind, name, grace_s=grace_s, patience_s=self._timing.patience_s)

    def _left(self) -> list[Json]:
        """Returns the objects that exist and are not hidden; deletes those without an owner.

        Before the program is up, it shortens the end of pods: one that just began may miss SIGTERM.
        """
        found = self._list("Pod") + self._list("Job")
        orphans = [each for each in found if _is_orphan(each)]
        self._has_orphans |= bool(orphans)
        if self._has_orphans or not found:  # pods and Jobs go first; the rest costs many requests
            for kind in sorted(_OTHER_KINDS - self._hidden):
                with self._hiding(kind):
                    found += self._list(kind)
        for each in found:
            if _is_orphan(each):
                with self._hiding(each["kind"]):
                    self._delete(each["kind"], each["metadata"]["name"])
            grace_s = each["metadata"].get("deletionGracePeriodSeconds", math.inf)
            if each["kind"] == "Pod" and grace_s > _SOON_S and not self._state.is_up:
                self._delete("Pod", each["metadata"]["name"], _SOON_S)
        return [each for each in found if each["kind"] not in self._hidden]

    @contextlib.contextmanager
    def _hiding(self, kind: str) -> Iterator[None]:
        """Skips a kind from now on if we may not list or delete its objects."""
        try:
            yield
        except ApiError as error:
            if not error.is_final or kind not in _OTHER_KINDS:
                raise
            self._hidden.add(kind)

    # Other threads

    def _mirror(self, kind: str, selector: str, fields: str = "") -> None:
        """Passes changes of objects to the deciding thread."""
        changes = self._api.watch(kind, selector, fields=fields, cancellation=self._cancellation)
        try:
            for change, obj in changes:
                self._put(self._state.see, change, obj)
        except ApiError as error:
            if kind != "Event":  # events only improve messages
                raise
            _LOGGER.info("no events of the run %s: %s", self.names.run, error)

    def _follow_log(self, pod: Json) -> None:
        """Passes the records of a supervisor on until it has ended, and shows what nodes print."""
        uid = pod["metadata"]["uid"]
        reader = RecordReader(self._key)
        for records in self._read_log(pod, reader, self._cancellation):
            if records is None:
                self._put(self._state.note_caught_up, uid)
            for record in records or ():
                if isinstance(record, PrintedRecord):
                    if self._console is not None:
                        self._console.show(record.node, record.data)
                    if self._logs is not None and record.node in self._nodes:
                        self._logs.write(record.node, record.data)
                if isinstance(record, AnswerRecord):
                    self._answered = record
                elif not isinstance(record, PrintedRecord) or record.node == SUPERVISOR:
                    self._put(self._state.hear, uid, record)
        self._put(self._state.note_log_over, uid)

    def _read_log(
        self, pod: Json, reader: RecordReader, cancellation: Cancellation
    ) -> Iterator[Sequence[Record] | None]:
        """Yields the records of a supervisor until it has ended; reconnects when a connection breaks.

        It yields None once it has read what the log held at first.
        """
        name = pod["metadata"]["name"]
        answered_at = time.monotonic()
        since_s: int | None = None
        # An attached process reads the present log first, because a followed log does not show where
        # that part ends.
        is_caught_up = self._is_launch
        is_final = False
        while not cancellation.is_set():
            try:
                is_empty = True
                for line in self._api.logs(
                    name,
                    SUPERVISOR,
                    follow=is_caught_up and not is_final,
                    since_s=since_s,
                    timestamps=True,
                    whole_lines=not is_final,
                    cancellation=cancellation,
                ):
                    is_empty = False
                    answered_at = time.monotonic()
                    yield reader.feed(line)
                # A log without a record is not the log: the kubelet printed an error instead.
                if not is_caught_up and (is_empty or reader.last_number):
                    is_caught_up = True
                    yield None
                if is_final:
                    return
            except ApiError as error:
                _LOGGER.debug("the log of %s: %s", name, error)
                if is_final or error.status == 404:
                    return
                if error.is_final and not reader.last_number:
                    raise
            if reader.last_number:
                since_s = math.ceil(time.monotonic() - answered_at) + _OVERLAP_S
            # At the end, the log is read once more for what a broken connection has left out.
            is_final = self._ended.is_set()
            with contextlib.suppress(ApiError):
                is_final = is_final or self._newest(pod) is None
            cancellation.wait(0.0 if is_final else self._timing.log_pause_s)

    def _newest(self, pod: Json) -> Json | None:
        """Returns a pod as it is now; None if it has ended or is gone."""
        found = self._api.get("Pod", pod["metadata"]["name"])
        if found is None or found["metadata"]["uid"] != pod["metadata"]["uid"]:
            return None
        return None if _reasons.has_ended(found) else found

    def _show_life(self) -> None:
        here = f"{socket.gethostname()}:{os.getpid()}"
        answers = True
        for beat in itertools.count():
            pod = self._state.supervisor
            if pod is not None:
                word = {"metadata": {"annotations": {LAUNCHER_ANNOTATION: f"{here} {beat}"}}}
                try:
                    self._api.patch("Pod", pod["metadata"]["name"], word)
                    if not answers:
                        self._tell("the program is told again that this process waits for it")
                    answers = True
                except ApiError as error:
                    if answers and error.status != 404 and not self._cancellation.is_set():
                        self._tell(f"the program is not told that this process waits: {error}")
                        answers = False
            pause_s = self._timing.beat_s if pod is not None else self._timing.look_s
            if self._cancellation.wait(pause_s):
                return


def _is_orphan(obj: Json) -> bool:
    """Returns whether an object stays when the first one of the run is deleted."""
    meta = obj["metadata"]
    return not meta.get("ownerReferences") and "deletionTimestamp" not in meta


def _words(records: Iterable[Record]) -> Iterator[tuple[str, bytes]]:
    for record in records:
        if isinstance(record, PrintedRecord):
            yield record.node, record.data
        elif isinstance(record, Note):
            yield SUPERVISOR, f"{record.text}\n".encode()
