"""What pods of a run wait for, and what became of those that are gone: read from objects. Pure."""

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from launchers._kubernetes.agreed import NODE, ROLE_LABEL, STOP_ANNOTATION, SUPERVISOR
from launchers._kubernetes.client import ChangeKind, Json
from launchers._kubernetes.names import Names
from launchers.host.pod import MAY_COME_BACK
from launchpad_lite._result import Restart
from launchpad_lite.launching import NodeFailure, ProgramResult

#: Exit codes of a node's container that say nothing more than the supervisor does: it ended, failed
#: for good, or may come back.
_CODES_WHEN_ASKED = frozenset({0, 1, MAY_COME_BACK})
_SIGKILL, _SIGNALLED = 9, 128
_MAX_SIGNAL = 64
#: Reasons of an end that was not observed: the exit code is made up.
_UNSEEN = frozenset({"Unknown", "ContainerStatusUnknown"})
#: States of a container that every one passes.
_ON_ITS_WAY = frozenset({"", "ContainerCreating", "PodInitializing"})
#: What a cluster's reasons to end a pod mean.
_DISRUPTIONS = {
    "PreemptionByScheduler": "was preempted by one of higher priority",
    "DeletionByTaintManager": "was ended because its machine is not ready or may not be used",
    "EvictionByEvictionAPI": "was evicted, as by a drain of its machine",
    "DeletionByPodGC": "was removed, as its machine was",
    "TerminationByKubelet": "was ended by its machine",
}
#: What a Job says whose pods failed too often: nothing beyond what is known of these.
_NO_MORE_PODS = "BackoffLimitExceeded"
#: What a Job says that had more time than it may have.
_TOO_LONG = "DeadlineExceeded"
#: Events that say why there is no pod.
_NO_POD = frozenset({"FailedCreate", "ExceededQuota"})
_POD_NAME = re.compile(r'\b([Pp]ods? )"[^"]*"')
#: Events that say that the machine of a pod is lost, the first that its agent is silent.
_AWAY = "NodeNotReady"
_LOST_MACHINE = frozenset({_AWAY, "TaintManagerEviction"})
#: Nodes that are named before the others are counted.
_MAX_NAMED = 3
#: What a restart says of a node whose pod was asked to end.
_ASKED = "was asked from outside to end"
#: Of several pods with one host name, the last.
_NEWEST = 1 << 30


# Waiting


def wait_of(pod: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns what a pod waits for, in one line; None if nothing is known to hold it up.

    Args:
        pod: As the server has it.
        events: Warnings about it, the latest last.
    """
    status = pod.get("status", {})
    if status.get("phase") in ("Succeeded", "Failed"):
        return None
    scheduled = _condition(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        return _said(scheduled)
    for container in _containers(pod):
        waiting = container.get("state", {}).get("waiting") or {}
        if waiting.get("reason", "") not in _ON_ITS_WAY:
            return _said(waiting)
    # The event that no machine was found stays for an hour, also once the pod has one.
    is_placed = scheduled.get("status") == "True"
    told = [each for each in events if not is_placed or each.get("reason") != "FailedScheduling"]
    if status.get("phase") == "Pending" and told:
        return _said(told[-1])
    return None


def wait_of_job(job: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns why a Job makes no pods, in one line; None if it does, as far as is known.

    Args:
        job: As the server has it.
        events: Warnings about it, the latest last.
    """
    queue = (job["metadata"].get("labels") or {}).get("kueue.x-k8s.io/queue-name")
    if job.get("spec", {}).get("suspend"):
        return f"its turn in the queue {queue!r}" if queue else "its admission"
    status = job.get("status", {})
    made = sum(status.get(name) or 0 for name in ("active", "succeeded"))
    if made >= job.get("spec", {}).get("parallelism", 1):
        return None
    failed = [event for event in events if event.get("reason") in _NO_POD]
    # Each attempt names another pod that it did not make.
    pods = f"{job['metadata']['name']}-*"
    return _POD_NAME.sub(rf'\1"{pods}"', _said(failed[-1])) if failed else None


def waiting_lines(waits: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns a line for each reason, with the nodes that wait for it.

    Args:
        waits: Nodes by what they wait for.
    """
    return [
        f"{named(nodes)} {'waits' if len(nodes) == 1 else 'wait'}: {what}"
        for what, nodes in waits.items()
    ]


def trouble_lines(troubles: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns a line for each trouble, with the nodes that have it.

    Args:
        troubles: Nodes by what has happened to their pods.
    """
    return [f"{named(nodes)}: {what}" for what, nodes in troubles.items()]


def named(nodes: Sequence[str]) -> str:
    """Names some nodes and counts the others."""
    if len(nodes) <= _MAX_NAMED + 1:
        return ", ".join(nodes)
    return f"{', '.join(nodes[:_MAX_NAMED])} and {len(nodes) - _MAX_NAMED} more"


# The end


def loss_of(
    pod: Mapping[str, Any], events: Sequence[Mapping[str, Any]], container: str
) -> str | None:
    """Returns what became of a pod, as in "its pod ...": None if it is well, or ended as it should.

    Args:
        pod: As the server had it last.
        events: Warnings about it, the latest last.
        container: The one that matters.
    """
    status = pod.get("status", {})
    ended = _ended(pod, container)
    if ended.get("reason") == "OOMKilled":
        limit = _memory_limit(pod, container)
        return f"was killed: out of memory ({f'limit {limit}' if limit else 'it had no limit'})"
    message = _flat(status.get("message", ""))
    if status.get("reason") == "Evicted":
        return _with("was evicted by its machine", message)
    target = _condition(pod, "DisruptionTarget")
    if target.get("status") == "True":
        how = _DISRUPTIONS.get(target.get("reason", ""), f"was ended ({target.get('reason')})")
        return _with(how, _flat(target.get("message", "")))
    if status.get("reason"):
        return _with(f"was ended ({status['reason']})", message)
    if ended and ended.get("exitCode") not in _CODES_WHEN_ASKED:
        return _exit(ended)
    if lost := [event for event in events if _is_loss(event, pod)]:
        machine = pod.get("spec", {}).get("nodeName", "")
        return _with(f"is on the machine {machine}, which is lost", _said(lost[-1]))
    if pod["metadata"].get("deletionTimestamp") and not ended:
        return "was deleted"
    return None


def _is_loss(event: Mapping[str, Any], pod: Mapping[str, Any]) -> bool:
    """Returns whether an event says that the machine of a pod is lost, and the pod was not well since."""
    if event.get("reason") not in _LOST_MACHINE:
        return False
    since = str(_condition(pod, "Ready").get("lastTransitionTime", ""))
    return not _is_ready(pod) or _time_of(event) > since


def _exit(ended: Mapping[str, Any]) -> str:
    code, why = ended.get("exitCode", 0), _flat(ended.get("message", ""))
    if ended.get("reason") in ("StartError", "ContainerCannotRun"):
        return _with("could not be started", why)
    if ended.get("reason") in _UNSEEN:
        return _with("was lost, as when its machine or the runtime there restarts", why)
    if code == _SIGNALLED + _SIGKILL:
        return _with("was killed by SIGKILL", why)
    if _SIGNALLED < code <= _SIGNALLED + _MAX_SIGNAL:
        return _with(f"was ended by signal {code - _SIGNALLED}", why)
    return _with(f"ended with exit code {code}", why)


def supervisor_end(
    pod: Mapping[str, Any] | None,
    job: Mapping[str, Any] | None,
    events: Sequence[Mapping[str, Any]],
) -> str:
    """Returns why there is no word of how a program ended, in one line.

    Args:
        pod: That of its supervisor, as the server had it last.
        job: The supervisor's, if it is still there.
        events: Warnings about the pod, the latest last.
    """
    if pod is None:
        how = "the run was deleted" if job is None else _job_failure(job)
        return _with("its supervisor never began", how)
    loss = loss_of(pod, events, SUPERVISOR)
    ended = _ended(pod, SUPERVISOR)
    if loss is None and ended:
        loss = f"ended with exit code {ended.get('exitCode')}"
    where = f"its supervisor's pod {pod['metadata']['name']}"
    if loss is None:
        loss = "is gone"
    if job is None:
        return f"{where} {loss}; the run was deleted"
    return _with(f"{where} {loss}; it left no result", _job_failure(job))


def supervisor_loss(pod: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> str:
    """Returns that the end of a program will not be known, because its supervisor's machine is lost.

    Args:
        pod: That of its supervisor, as the server had it last.
        events: Warnings about the pod, the latest last.
    """
    machine = pod.get("spec", {}).get("nodeName", "")
    how = loss_of(pod, events, SUPERVISOR) or "is gone"
    return (
        f"the machine {machine} of its supervisor is lost: its pod {pod['metadata']['name']} {how}"
    )


def supervisor_silence(pod: Mapping[str, Any], launcher_silence_s: float) -> str:
    """Returns that a supervisor whose machine does not answer has ended the program.

    Args:
        pod: That of the supervisor.
        launcher_silence_s: Seconds after which it does so that sees nothing of the launching process.
    """
    machine = pod.get("spec", {}).get("nodeName", "")
    name = pod["metadata"]["name"]
    how = (
        f"the program was ended by its supervisor, and how is not known: the machine {machine} of its "
        f"pod {name} does not answer"
    )
    if launcher_silence_s == math.inf:
        return how
    # Only the machine's agent lets it see that process.
    return (
        f"{how}. On such a machine it sees nothing of this process, for which it waits "
        f"{launcher_silence_s:g} s"
    )


def supervisor_away(launcher_silence_s: float) -> str:
    """Returns what follows while the machine's agent of a supervisor is silent.

    Args:
        launcher_silence_s: Seconds after which it ends the program that sees nothing of the launching
            process.
    """
    how = "nothing is known of the program until the machine of its supervisor answers"
    if launcher_silence_s == math.inf:
        return how
    return f"{how}; after {launcher_silence_s:g} s the supervisor stops it, as it sees nothing of this process"


def lost_link(
    nodes: Sequence[str], supervisor: Mapping[str, Any] | None, events: Sequence[Mapping[str, Any]]
) -> str:
    """Returns that pods have ended because they lost the link to their supervisor.

    Args:
        nodes: Those whose pods they were.
        supervisor: Its pod, as the server had it last, if there was any.
        events: Warnings about that, the latest last.
    """
    how = f"{named(nodes)} lost the link to the supervisor"
    if supervisor is None:
        return how
    machine = supervisor.get("spec", {}).get("nodeName", "")
    loss = loss_of(supervisor, events, SUPERVISOR)
    return (
        f"{how}; its pod {supervisor['metadata']['name']} {loss or f'is on the machine {machine}'}"
    )


def has_lost_link(pod: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether a node's pod has ended since its link did, and for no other reason."""
    return exit_code(pod, NODE) == MAY_COME_BACK and loss_of(pod, events, NODE) is None


def failure_of(pod: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> str:
    """Returns how a node's pod ended that was to run on, as in "its pod ..."."""
    code = exit_code(pod, NODE)
    return loss_of(pod, events, NODE) or f"ended with exit code {'?' if code is None else code}"


def exit_code(pod: Mapping[str, Any], container: str) -> int | None:
    """Returns how a container of a pod has ended; None: it has not, or that is not known."""
    code = _ended(pod, container).get("exitCode")
    return None if code is None else int(code)


def is_over(job: Mapping[str, Any]) -> bool:
    """Returns whether a Job makes no more pods."""
    ends = ("Complete", "Failed", "SuccessCriteriaMet", "FailureTarget")
    return any(_condition(job, kind).get("status") == "True" for kind in ends)


def has_ended(pod: Mapping[str, Any], container: str) -> bool:
    """Returns whether a container of a pod has ended for good."""
    is_final = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
    return is_final or bool(_ended(pod, container))


def is_running(pod: Mapping[str, Any], container: str) -> bool:
    """Returns whether a container of a pod runs."""
    return any(
        each.get("name") == container and each.get("state", {}).get("running") is not None
        for each in _containers(pod)
    )


def remaining(objects: Iterable[Mapping[str, Any]]) -> str:
    """Names objects that are still there, and the machines on which pods are."""
    parts = []
    for each in objects:
        machine = each.get("spec", {}).get("nodeName") if each["kind"] == "Pod" else None
        where = f" on {machine}" if machine else ""
        parts.append(f"{each['kind']} {each['metadata']['name']}{where}")
    return named(parts)


def explained(
    result: ProgramResult,
    losses: Mapping[str, Sequence[str]],
    machine: Callable[[str], str],
) -> ProgramResult:
    """Returns a result whose lost pods are said to be lost as the cluster knows it.

    A node that was asked from outside to end is said to have been so as the cluster knows it, too.

    Args:
        result: As the supervisor saw it.
        losses: What became of pods, by their host name, in order.
        machine: Returns the machine of a pod by its host name; empty: not known.
    """
    counts: dict[str, int] = {}

    def explain(failure: NodeFailure, number: int) -> NodeFailure:
        if not failure.host_lost:
            return failure
        texts = losses.get(failure.host, ())
        if texts:
            summary = f"its pod {failure.host} {texts[min(number, len(texts) - 1)]}"
        elif where := machine(failure.host):
            summary = f"{failure.summary} (its pod was on the machine {where})"
        else:
            return failure
        return dataclasses.replace(failure, summary=summary)

    def explain_restart(restart: Restart) -> Restart:
        failure = restart.failure
        if failure is None or not (failure.host_lost or _ASKED in failure.summary):
            return restart
        number = counts.get(failure.host, 0)
        counts[failure.host] = number + 1
        texts = losses.get(failure.host, ())
        if failure.host_lost:
            failure = explain(failure, number)
        elif number < len(texts):
            summary = f"{failure.summary}: its pod {failure.host} {texts[number]}"
            failure = dataclasses.replace(failure, summary=summary)
        return dataclasses.replace(restart, failure=failure)

    failures = tuple(explain(each, _NEWEST) for each in result.failures)
    restarts = tuple(explain_restart(each) for each in result.restarts)
    return dataclasses.replace(result, failures=failures, restarts=restarts)


# All of a run


class Sight:
    """What was seen of a run's objects. Takes in changes, answers questions; not thread-safe."""

    def __init__(
        self, names: Names, nodes: Iterable[tuple[str, int]], movable: Collection[str] = ()
    ) -> None:
        """Begins with nothing.

        Args:
            names: Of the run.
            nodes: Label and replica of each.
            movable: Those that go on in another pod when theirs is lost.
        """
        self._names = names
        self._movable = frozenset(movable)
        self._nodes = {names.host(*each): f"{each[0]}[{each[1]}]" for each in nodes}
        self._labels = {names.job(label): label for label in names.groups}
        #: In the order in which they were first seen, those that are gone, too.
        self._pods: dict[str, Json] = {}
        self._supervisors: dict[str, Json] = {}
        self._gone: set[str] = set()
        #: Those that are there, by name.
        self.jobs: dict[str, Json] = {}
        self._deleted_jobs = set[str]()
        #: Who has asked for the end of the program from another process, if anybody has.
        self.stopped_by: str | None = None
        self._events: dict[str, list[Json]] = {}
        #: Times up to which pods were well, whatever the events about their machines say, by name.
        self._forgiven: dict[str, str] = {}
        self._losses: dict[str, dict[str, str]] = {}

    @property
    def is_suspended(self) -> bool:
        """Whether a Job of the run waits to be admitted."""
        return any(job.get("spec", {}).get("suspend") for job in self.jobs.values())

    def take_in(self, change: ChangeKind, obj: Json) -> None:
        """Takes in a change of a pod, Job or event."""
        metadata = obj["metadata"]
        if obj["kind"] == "Pod":
            self._take_in_pod(change, obj)
        elif obj["kind"] == "Job" and change == "DELETED":
            self.jobs.pop(metadata["name"], None)
            self._deleted_jobs.add(metadata["name"])
        elif obj["kind"] == "Job":
            self.jobs[metadata["name"]] = obj
            self._deleted_jobs.discard(metadata["name"])
            if (word := (metadata.get("annotations") or {}).get(STOP_ANNOTATION)) is not None:
                self.stopped_by = word
        elif obj["kind"] == "Event" and change != "DELETED":
            about = obj.get("involvedObject", {}).get("name", "")
            is_ours = about == self._names.run or about.startswith(f"{self._names.run}-")
            if is_ours and not self._is_forgiven(about, obj):
                told = self._events.setdefault(about, [])
                told[:] = [each for each in told if each["metadata"]["name"] != metadata["name"]]
                told.append(obj)
                self._look_again(about)

    def _take_in_pod(self, change: ChangeKind, pod: Json) -> None:
        uid = pod["metadata"]["uid"]
        before = self._pods.get(uid)
        self._pods[uid] = pod
        if self.is_supervisor(pod):
            self._supervisors[uid] = pod
        if change == "DELETED":
            self._gone.add(uid)
        if _is_ready(pod):
            # It may be said to have been so all the time: its machine has not seen itself away.
            self._forgive(uid, pod, is_back=before is not None and not _is_ready(before))
        self._note_loss(uid, pod)

    def _forgive(self, uid: str, pod: Json, *, is_back: bool) -> None:
        """Forgets that a machine was away for a moment: it is no reason for what comes later."""
        name = pod["metadata"]["name"]
        told = self._events.get(name, [])
        past = [
            each
            for each in told
            if each.get("reason") in _LOST_MACHINE and (is_back or not _is_loss(each, pod))
        ]
        if past:
            told[:] = [each for each in told if each not in past]
            self._forgiven[name] = max(map(_time_of, past))
            self._losses.get(host_of(pod), {}).pop(uid, None)

    def _is_forgiven(self, name: str, event: Json) -> bool:
        """Returns whether an event is known to be no matter, though a server may list it again."""
        if event.get("reason") not in _LOST_MACHINE or name not in self._forgiven:
            return False
        return _time_of(event) <= self._forgiven[name]

    def _look_again(self, name: str) -> None:
        for uid, pod in self._pods.items():
            if pod["metadata"]["name"] == name:
                self._note_loss(uid, pod)

    def _note_loss(self, uid: str, pod: Json) -> None:
        loss = loss_of(pod, self._about(pod), NODE)
        if self.is_supervisor(pod) or loss is None:
            return
        known = self._losses.setdefault(host_of(pod), {})
        if loss != "was deleted" or uid not in known:  # the end of what is better known
            known[uid] = loss

    @property
    def losses(self) -> Mapping[str, Sequence[str]]:
        """What became of pods that were lost, by their host name, in order."""
        return {
            host: [texts[uid] for uid in sorted(texts, key=lambda uid: _created(self._pods[uid]))]
            for host, texts in self._losses.items()
        }

    def waits(self) -> dict[str, list[str]]:
        """Returns nodes by what they wait for."""
        found: dict[str, list[str]] = {}
        present = set[str]()
        for uid, pod in self._pods.items():
            if uid in self._gone or pod["metadata"].get("deletionTimestamp"):
                continue
            if not has_ended(pod, NODE):
                present.add(host_of(pod))
            if (wait := wait_of(pod, self._about(pod))) is not None:
                found.setdefault(wait, []).append(self._node(pod))
        for pod, loss in self._lost():
            if self._node(pod) in self._movable and host_of(pod) not in present:
                nodes = found.setdefault(f"another pod; the last one {loss}", [])
                if self._node(pod) not in nodes:  # several of its pods may have gone the same way
                    nodes.append(self._node(pod))
        for name, job in self.jobs.items():
            if is_over(job):
                continue
            wait = wait_of_job(job, self._events.get(name, ()))
            if wait is not None:
                label = self._labels.get(name)
                missing = [
                    node
                    for host, node in self._nodes.items()
                    if label is not None and node.startswith(f"{label}[") and host not in present
                ]
                found.setdefault(wait, []).extend(missing or [label or SUPERVISOR])
        return found

    def troubles(self) -> dict[str, list[str]]:
        """Returns nodes by what has happened to their pods that nothing else follows from yet."""
        found: dict[str, list[str]] = {}
        for pod, loss in self._lost():
            if self._node(pod) not in self._movable:
                found.setdefault(f"its pod {host_of(pod)} {loss}", []).append(self._node(pod))
        for uid, pod in self._pods.items():
            if uid in self._gone or has_ended(pod, self.container(pod)):
                continue
            if any(
                each.get("reason") == _AWAY and _is_loss(each, pod) for each in self._about(pod)
            ):
                machine = pod.get("spec", {}).get("nodeName", "")
                # It may be only its agent that is silent, and the pod continues.
                what = f"the cluster gets no signal from the machine {machine}"
                found.setdefault(what, []).append(self._node(pod))
        return found

    def _lost(self) -> Iterator[tuple[Json, str]]:
        """Yields pods of nodes that have ended, and not as they should, with what became of them."""
        for uid, pod in self._pods.items():
            loss = self._losses.get(host_of(pod), {}).get(uid)
            # One whose machine does not answer may serve for long, also once it is to leave.
            if loss is not None and (uid in self._gone or has_ended(pod, NODE)):
                yield pod, loss

    def missing(self) -> list[str]:
        """Returns nodes of which no pod runs."""
        running = {
            host_of(pod)
            for uid, pod in self._pods.items()
            if uid not in self._gone and is_running(pod, NODE)
        }
        return [node for host, node in self._nodes.items() if host not in running]

    @property
    def supervisor(self) -> Json | None:
        """The newest pod of the supervisor, though it may be gone and an earlier one still there."""
        # Times have whole seconds; of those that are alike, the newest was seen last.
        return max(reversed(self._supervisors.values()), key=self._age, default=None)

    def _age(self, pod: Mapping[str, Any]) -> tuple[str, bool, bool]:
        metadata = pod["metadata"]
        is_going = "deletionTimestamp" in metadata
        return _created(pod), not self.is_gone(pod), not is_going

    def _oldest_first(self) -> list[Json]:
        """Returns all pods; a server lists them in the order of their names, which says nothing."""
        return sorted(self._pods.values(), key=_created)

    def failed(self) -> dict[str, Json]:
        """Returns nodes that get no other pod, with the last one: their Jobs have given them up."""
        given_up = {
            host
            for name, job in self.jobs.items()
            for host in (f"{name}-{index}" for index in _failed_indexes(job))
            if host in self._nodes
        }
        return {self._node(pod): pod for pod in self._oldest_first() if host_of(pod) in given_up}

    def interruption(self, reason: str) -> str:
        """Adds what the cluster knows to the reason of an end that was not asked for here.

        Args:
            reason: As the supervisor has it: a signal to itself, or to a node.
        """
        if said := self._deadline():
            return f"{reason}: it has run for as long as max_run_s says ({said})"
        if self._names.supervisor_job in self._deleted_jobs:
            return f"{reason}: the run was deleted"
        for host, node in self._nodes.items():
            if reason.endswith(f" to {node}") and (losses := self.losses.get(host)):
                return f"{reason}: its pod {host} {losses[-1]}"
        pod = self.supervisor
        loss = loss_of(pod, self._about(pod), SUPERVISOR) if pod is not None else None
        if pod is None or loss is None:
            return reason
        return f"{reason}: its supervisor's pod {pod['metadata']['name']} {loss}"

    def _deadline(self) -> str:
        """Returns what the cluster says where it has ended the run after its longest time."""
        job = self.jobs.get(self._names.supervisor_job, {})
        # The first is there before its pods have ended, the second after that.
        conditions = (_condition(job, "FailureTarget"), _condition(job, "Failed"))
        ends = (each for each in conditions if each.get("reason") == _TOO_LONG)
        return next((_said(each) for each in ends if each.get("status") == "True"), "")

    @property
    def is_over(self) -> bool:
        """Whether there will be no other pod of the supervisor."""
        name = self._names.supervisor_job
        return name in self._deleted_jobs or (name in self.jobs and is_over(self.jobs[name]))

    def is_gone(self, pod: Mapping[str, Any]) -> bool:
        """Returns whether a pod is no more."""
        return pod["metadata"]["uid"] in self._gone

    def events_of(self, pod: Mapping[str, Any]) -> Sequence[Json]:
        """Returns the warnings about a pod, the latest last."""
        return self._about(pod)

    def container(self, pod: Mapping[str, Any]) -> str:
        """Returns the name of the one container of a pod that is ours."""
        return SUPERVISOR if self.is_supervisor(pod) else NODE

    def is_supervisor(self, pod: Mapping[str, Any]) -> bool:
        """Returns whether a pod is the supervisor's."""
        return (pod["metadata"].get("labels") or {}).get(ROLE_LABEL) == SUPERVISOR

    def machine(self, host: str) -> str:
        """Returns the machine of a pod by its host name, which Kubernetes calls a node."""
        machines = (
            pod.get("spec", {}).get("nodeName", "")
            for pod in reversed(self._oldest_first())
            if host_of(pod) == host
        )
        return next(filter(None, machines), "")

    def _about(self, pod: Mapping[str, Any]) -> Sequence[Json]:
        return self._events.get(pod["metadata"]["name"], ())

    def _node(self, pod: Mapping[str, Any]) -> str:
        if self.is_supervisor(pod):
            return SUPERVISOR
        return self._nodes.get(host_of(pod), host_of(pod))


def host_of(pod: Mapping[str, Any]) -> str:
    """Returns the host name of a pod, which one that replaces it has as well."""
    return str(pod.get("spec", {}).get("hostname") or pod["metadata"]["name"])


# Fields


def _created(pod: Mapping[str, Any]) -> str:
    """Returns when a pod was created, as texts that can be compared: whole seconds."""
    return str(pod["metadata"].get("creationTimestamp", ""))


def _condition(obj: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    conditions = obj.get("status", {}).get("conditions") or ()
    return next((each for each in conditions if each.get("type") == kind), {})


def _is_ready(pod: Mapping[str, Any]) -> bool:
    return bool(_condition(pod, "Ready").get("status") == "True")


def _time_of(event: Mapping[str, Any]) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or "")


def _containers(pod: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    status = pod.get("status", {})
    return [
        *(status.get("initContainerStatuses") or ()),
        *(status.get("containerStatuses") or ()),
    ]


def _ended(pod: Mapping[str, Any], container: str) -> Mapping[str, Any]:
    for each in _containers(pod):
        if each.get("name") == container:
            return each.get("state", {}).get("terminated") or {}
    return {}


def _memory_limit(pod: Mapping[str, Any], container: str) -> str:
    for each in pod.get("spec", {}).get("containers") or ():
        if each.get("name") == container:
            return str(each.get("resources", {}).get("limits", {}).get("memory", ""))
    return ""


def _failed_indexes(job: Mapping[str, Any]) -> Iterator[int]:
    """Yields the indexes that a Job has given up: `1,3-5` in its status."""
    for part in filter(None, str(job.get("status", {}).get("failedIndexes") or "").split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _job_failure(job: Mapping[str, Any]) -> str:
    failed = _condition(job, "Failed")
    if failed.get("status") != "True" or failed.get("reason") == _NO_MORE_PODS:
        return ""
    return _said(failed)


def _said(thing: Mapping[str, Any]) -> str:
    return _with(str(thing.get("reason", "")), _flat(thing.get("message", "")))


def _with(what: str, why: str) -> str:
    return f"{what}: {why}" if what and why else what or why


def _flat(text: str | None) -> str:
    return " ".join((text or "").split())
