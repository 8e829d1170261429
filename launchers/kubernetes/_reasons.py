"""Reads from objects what the pods of a run wait for, and how pods ended. Pure."""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from launchers.host.pod import MAY_COME_BACK
from launchers.kubernetes._agreed import NODE, ROLE_LABEL, SUPERVISOR
from launchers.supervision.stop_notices import MAX_NAMED
from launchpad_lite.launching import NodeFailure, ProgramResult
from launchpad_lite.life.result import named

#: JSON, as an API server has it.
Object = Mapping[str, Any]

#: Exit codes of a node's container that the supervisor explains better: the node ended, failed for
#: good, or may come back.
_CODES_WHEN_ASKED = frozenset({0, 1, MAY_COME_BACK})
_SIGKILL, _SIGNALLED = 9, 128
_MAX_SIGNAL = 64
#: Reasons of an end that the cluster did not observe: its exit code means nothing.
_UNSEEN = frozenset({"Unknown", "ContainerStatusUnknown"})
_ON_ITS_WAY = frozenset({"", "ContainerCreating", "PodInitializing"})
_DISRUPTIONS = {
    "PreemptionByScheduler": "was preempted by one of higher priority",
    "DeletionByTaintManager": "was ended because its machine is not ready or may not be used",
    "EvictionByEvictionAPI": "was evicted, as by a drain of its machine",
    "DeletionByPodGC": "was removed, as its machine was",
    "TerminationByKubelet": "was ended by its machine",
}
#: Reason of a Job whose pods failed too often. It says nothing new about the pods.
_NO_MORE_PODS = "BackoffLimitExceeded"
#: Fields of a Job's status that say that it has made a pod.
_HAD_PODS = ("active", "failed", "succeeded")
#: Events that say why there is no pod.
_NO_POD = frozenset({"FailedCreate", "ExceededQuota"})
_POD_NAME = re.compile(r'\b([Pp]ods? )"[^"]*"')
#: Events that say that the machine of a pod is lost. The first says that its kubelet is silent.
AWAY = "NodeNotReady"
LOST_MACHINE = frozenset({AWAY, "TaintManagerEviction"})
#: Text of a restart if the cluster asked the pod of a node to end.
_ASKED = "was asked from outside to end"
#: Number of the last of several pods with one host name.
_NEWEST = 1 << 30


def wait_of(pod: Object, events: Sequence[Object]) -> str | None:
    """Returns what a pod waits for, in one line; None if for nothing that is known."""
    status = pod.get("status", {})
    if status.get("phase") in ("Succeeded", "Failed"):
        return None
    scheduled = condition(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        return said(scheduled)
    for container in _containers(pod):
        waiting = container.get("state", {}).get("waiting") or {}
        if waiting.get("reason", "") not in _ON_ITS_WAY:
            return said(waiting)
    # The event that no machine has room stays for an hour, even after the pod got a machine.
    is_placed = scheduled.get("status") == "True"
    told = [each for each in events if not is_placed or each.get("reason") != "FailedScheduling"]
    if status.get("phase") == "Pending" and told:
        return said(told[-1])
    return None


def wait_of_job(job: Object, events: Sequence[Object]) -> str | None:
    """Returns why a Job makes no pods, in one line; None if it does, as far as is known."""
    queue = (job["metadata"].get("labels") or {}).get("kueue.x-k8s.io/queue-name")
    if job.get("spec", {}).get("suspend"):
        return f"its turn in the queue {queue!r}" if queue else "its admission"
    status = job.get("status", {})
    made = sum(status.get(name) or 0 for name in ("active", "succeeded"))
    if made >= job.get("spec", {}).get("parallelism", 1):
        return None
    failed = [event for event in events if event.get("reason") in _NO_POD]
    # Each attempt names a different pod.
    pods = f"{job['metadata']['name']}-*"
    return _POD_NAME.sub(rf'\1"{pods}"', said(failed[-1])) if failed else None


def told(waits: Mapping[str, Sequence[str]], troubles: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns a line for each reason to wait, and for each trouble, with the nodes that have it."""
    found = []
    for what, nodes in waits.items():
        verb = "waits" if len(nodes) == 1 else "wait"
        found.append(f"{named(nodes, MAX_NAMED)} {verb}: {what}")
    return found + [f"{named(nodes, MAX_NAMED)}: {what}" for what, nodes in troubles.items()]


def loss_of(pod: Object, events: Sequence[Object]) -> str | None:
    """Returns how a pod was lost, as in "its pod ..."; None if it is well or ended as it should."""
    status = pod.get("status", {})
    ended = _ended(pod)
    if ended.get("reason") == "OOMKilled":
        container = _own(pod, pod.get("spec", {}).get("containers") or ())
        limit = container.get("resources", {}).get("limits", {}).get("memory")
        return f"was killed: out of memory ({f'limit {limit}' if limit else 'it had no limit'})"
    message = _flat(status.get("message", ""))
    if status.get("reason") == "Evicted":
        return _with("was evicted by its machine", message)
    target = condition(pod, "DisruptionTarget")
    if target.get("status") == "True":
        how = _DISRUPTIONS.get(target.get("reason", ""), f"was ended ({target.get('reason')})")
        return _with(how, _flat(target.get("message", "")))
    if status.get("reason"):
        return _with(f"was ended ({status['reason']})", message)
    if ended and ended.get("exitCode") not in _CODES_WHEN_ASKED:
        return _exit(ended)
    if lost := [event for event in events if is_loss(event, pod)]:
        return _with(f"is on the machine {machine_of(pod)}, which is lost", said(lost[-1]))
    if pod["metadata"].get("deletionTimestamp") and not ended:
        return "was deleted"
    return None


def is_loss(event: Object, pod: Object) -> bool:
    """Returns whether an event says that the machine of a pod is lost, and the pod was not well since."""
    if event.get("reason") not in LOST_MACHINE:
        return False
    since = str(condition(pod, "Ready").get("lastTransitionTime", ""))
    at = str(event.get("lastTimestamp") or event.get("eventTime") or "")
    return not is_ready(pod) or at > since


def _exit(ended: Object) -> str:
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


def supervisor_end(pod: Object | None, job: Object | None, events: Sequence[Object]) -> str:
    """Returns why a program left no result, in one line."""
    failed = condition(job or {}, "Failed")
    is_told = failed.get("status") == "True" and failed.get("reason") != _NO_MORE_PODS
    how = "the run was deleted" if job is None else said(failed) if is_told else ""
    if pod is not None:
        code = exit_code(pod)
        ended = "is gone" if code is None else f"ended with exit code {code}"
        loss = f"its supervisor's pod {name_of(pod)} {loss_of(pod, events) or ended}"
    elif job is not None and any(job.get("status", {}).get(each) for each in _HAD_PODS):
        loss = "its supervisor's pod is gone"
    else:
        return _with("its supervisor never began", how)
    return f"{loss}; {how}" if job is None else _with(f"{loss}; it left no result", how)


def failure_of(pod: Object, events: Sequence[Object]) -> str:
    """Returns how a node's pod ended that should have continued, as in "its pod ..."."""
    if (loss := loss_of(pod, events)) is not None:
        return loss
    code = exit_code(pod)
    if code == MAY_COME_BACK:
        return "lost the link to the supervisor"
    return f"ended with exit code {'?' if code is None else code}"


def exit_code(pod: Object) -> int | None:
    """Returns how the container of a pod has ended; None: it has not, or that is not known."""
    code = _ended(pod).get("exitCode")
    return None if code is None else int(code)


def is_over(job: Object) -> bool:
    """Returns whether a Job makes no more pods."""
    ends = ("Complete", "Failed", "SuccessCriteriaMet", "FailureTarget")
    return any(condition(job, kind).get("status") == "True" for kind in ends)


def has_ended(pod: Object) -> bool:
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed") or bool(_ended(pod))


def is_running(pod: Object) -> bool:
    return _state(pod).get("running") is not None


def remaining(objects: Iterable[Object]) -> str:
    """Names objects that are still there, and the machines on which pods are."""
    parts = []
    for each in objects:
        machine = machine_of(each) if each["kind"] == "Pod" else ""
        parts.append(f"{each['kind']} {name_of(each)}{f' on {machine}' if machine else ''}")
    return named(parts, MAX_NAMED)


def explained(
    result: ProgramResult, losses: Mapping[str, Sequence[str]], machine: Callable[[str], str]
) -> ProgramResult:
    """Returns a supervisor's result with the cluster's explanation of each lost pod.

    The cluster also explains why a node was asked from outside to end. `losses` says what became of
    pods, by their host name, in order; `machine` returns the last known one of a host name.
    """

    def explain(failure: NodeFailure, number: int) -> NodeFailure:
        texts = losses.get(failure.host, ())
        loss = f"its pod {failure.host} {texts[min(number, len(texts) - 1)]}" if texts else ""
        if failure.host_lost and loss:
            summary = loss
        elif failure.host_lost and (where := machine(failure.host)):
            summary = f"{failure.summary} (its pod was on the machine {where})"
        elif _ASKED in failure.summary and number < len(texts):
            summary = f"{failure.summary}: {loss}"
        else:
            return failure
        return dataclasses.replace(failure, summary=summary)

    counts = Counter[str]()
    restarts = []
    for restart in result.restarts:
        failure = restart.failure
        if failure is not None and (failure.host_lost or _ASKED in failure.summary):
            explanation = explain(failure, counts[failure.host])
            restart = dataclasses.replace(restart, failure=explanation)
            counts[failure.host] += 1
        restarts.append(restart)
    failures = tuple(explain(each, _NEWEST) for each in result.failures)
    return dataclasses.replace(result, failures=failures, restarts=tuple(restarts))


def name_of(obj: Object) -> str:
    return str(obj["metadata"]["name"])


def host_of(pod: Object) -> str:
    """Returns the host name of a pod, which one that replaces it has as well."""
    return str(pod.get("spec", {}).get("hostname") or name_of(pod))


def machine_of(pod: Object) -> str:
    """Returns the machine of a pod, which Kubernetes calls a node; empty: it has none yet."""
    return str(pod.get("spec", {}).get("nodeName") or "")


def is_supervisor(pod: Object) -> bool:
    return bool((pod["metadata"].get("labels") or {}).get(ROLE_LABEL) == SUPERVISOR)


def created(pod: Object) -> str:
    """Returns when a pod was created, as texts that can be compared: whole seconds."""
    return str(pod["metadata"].get("creationTimestamp", ""))


def condition(obj: Object, kind: str) -> Object:
    conditions = obj.get("status", {}).get("conditions") or ()
    return next((each for each in conditions if each.get("type") == kind), {})


def is_ready(pod: Object) -> bool:
    return bool(condition(pod, "Ready").get("status") == "True")


def _containers(pod: Object) -> list[Mapping[str, Any]]:
    status = pod.get("status", {})
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]


def _own(pod: Object, containers: Iterable[Object]) -> Object:
    """Returns the one container of a pod that is ours."""
    own = SUPERVISOR if is_supervisor(pod) else NODE
    return next((each for each in containers if each.get("name") == own), {})


def _state(pod: Object) -> Object:
    state: Object = _own(pod, _containers(pod)).get("state") or {}
    return state


def _ended(pod: Object) -> Object:
    return _state(pod).get("terminated") or {}


def failed_indexes(job: Object) -> Iterator[int]:
    """Yields the indexes that a Job has given up: `1,3-5` in its status."""
    for part in filter(None, str(job.get("status", {}).get("failedIndexes") or "").split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def said(thing: Object) -> str:
    return _with(str(thing.get("reason", "")), _flat(thing.get("message", "")))


def _with(what: str, why: str) -> str:
    return f"{what}: {why}" if what and why else what or why


def _flat(text: str | None) -> str:
    return " ".join((text or "").split())
