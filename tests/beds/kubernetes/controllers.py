"""The controllers of a cluster: scheduler, jobs, job sets, garbage collector; and events."""

import contextlib
import json
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.beds.kubernetes.store import ApiError, Object, Store, owned_by, random_suffix, stamp

_TRACKING = "batch.kubernetes.io/job-tracking"
_INDEX = "batch.kubernetes.io/job-completion-index"
_FAILURES = "batch.kubernetes.io/job-index-failure-count"
_IGNORED = "batch.kubernetes.io/job-index-ignored-failure-count"
_MAX_BACKOFF_S = 600.0

Admit = Callable[[str, Object], Object]


class Events:
    """Notes events about objects, as `kubectl describe` shows them; the same again is none."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def record(self, item: Object, kind: str, reason: str, message: str) -> None:
        metadata = item["metadata"]
        namespace = metadata.get("namespace", "")
        with self._store.changed:
            for old in self._store.items("events", namespace):
                same = (old["involvedObject"]["uid"], old["reason"], old["message"])
                if same == (metadata["uid"], reason, message):
                    return
            self._store.create(
                "events",
                {
                    "metadata": {
                        "name": f"{metadata['name']}.{uuid.uuid4().hex[:16]}",
                        "namespace": namespace,
                    },
                    "involvedObject": {
                        "kind": item["kind"],
                        "namespace": namespace,
                        "name": metadata["name"],
                        "uid": metadata["uid"],
                    },
                    "type": kind,
                    "reason": reason,
                    "message": message,
                    "lastTimestamp": stamp(),
                },
            )


@dataclass
class Node:
    """A virtual machine of the cluster."""

    name: str
    labels: dict[str, str] = field(default_factory=dict)
    unschedulable: bool = False


class Scheduler:
    """Binds pods to nodes.

    Args:
        store: Of the API.
        nodes: All there are.
        record: Notes an event.

    Attributes:
        pending: Pairs of a predicate of pods and why those stay unscheduled.
    """

    def __init__(self, store: Store, nodes: Sequence[Node], record: Callable[..., None]) -> None:
        self.store = store
        self.nodes = nodes
        self.record = record
        self.pending: list[tuple[Callable[[Object], bool], str]] = []

    def run(self) -> None:
        pods = self.store.items("pods")
        for pod in pods:
            if "nodeName" in pod["spec"] or "deletionTimestamp" in pod["metadata"]:
                continue
            why = next((reason for matches, reason in self.pending if matches(pod)), "")
            wanted = (pod["spec"].get("nodeSelector") or {}).items()
            load = {
                node.name: 0
                for node in self.nodes
                if not node.unschedulable and wanted <= node.labels.items()
            }
            if why or not load:
                self._refuse(pod, why or f"0/{len(self.nodes)} nodes are available.")
                continue
            for other in _active(self.store.items("pods")):
                if other["spec"].get("nodeName") in load:
                    load[other["spec"]["nodeName"]] += 1
            self._bind(pod, min(load, key=lambda name: load[name]))

    def _refuse(self, pod: Object, why: str) -> None:
        conditions = pod["status"].get("conditions", [])
        found: Object = next((one for one in conditions if one["type"] == "PodScheduled"), {})
        if found.get("message") == why:
            return
        self.record(pod, "Warning", "FailedScheduling", why)
        condition = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": why,
        }
        self._write(pod, lambda one: _set_condition(one, condition))

    def _bind(self, pod: Object, node: str) -> None:
        condition = {"type": "PodScheduled", "status": "True"}

        def bind(one: Object) -> None:
            one["spec"]["nodeName"] = node
            _set_condition(one, condition)

        self._write(pod, bind)

    def _write(self, pod: Object, change: Callable[[Object], object]) -> None:
        metadata = pod["metadata"]
        with contextlib.suppress(ApiError):
            self.store.update(
                "pods", metadata["namespace"], metadata["name"], change, uid=metadata["uid"]
            )


@dataclass
class _Count:
    """What is known of a job beside its objects."""

    seen: set[str] = field(default_factory=set)
    """Pods that were counted."""
    succeeded: set[int | None] = field(default_factory=set)
    """Indexes; None: that of a job of one pod."""
    failed_indexes: set[int] = field(default_factory=set)
    failures: int = 0
    counted: int = 0
    """Failures that count against the limit."""
    by_index: dict[int, int] = field(default_factory=dict)
    ignored_by_index: dict[int, int] = field(default_factory=dict)
    not_before: dict[int | None, float] = field(default_factory=dict)
    verdict: tuple[str, str, str] | None = None
    """The condition that ends it: type, reason, message."""
    clock: float | None = None
    """When it began to run, by time.monotonic()."""
    ended: float | None = None


class JobController:
    """Makes pods of jobs as our launcher writes them: with indexes, or of one pod.

    Args:
        store: Of the API.
        admit: Creates an object.
        record: Notes an event.
        backoff_s: The first pause before a failed pod is replaced; doubled with each.
    """

    def __init__(
        self, store: Store, admit: Admit, record: Callable[..., None], backoff_s: float
    ) -> None:
        self.store = store
        self.admit = admit
        self.record = record
        self.backoff_s = backoff_s
        self._counts: dict[str, _Count] = {}

    def run(self) -> None:
        jobs = self.store.items("jobs")
        alive = {job["metadata"]["uid"] for job in jobs}
        for uid in {*self._counts} - alive:
            del self._counts[uid]
        for job in jobs:
            with contextlib.suppress(ApiError):
                self._sync(job)
        for pod in self.store.items("pods"):  # whose job is gone: nobody counts them
            finalizers = pod["metadata"].get("finalizers") or []
            owners = pod["metadata"].get("ownerReferences") or []
            if _TRACKING in finalizers and not any(one["uid"] in alive for one in owners):
                self._release(pod)

    def _sync(self, job: Object) -> None:
        metadata, spec = job["metadata"], job["spec"]
        uid = metadata["uid"]
        count = self._counts.setdefault(uid, _Count())
        pods = [
            pod for pod in self.store.items("pods", metadata["namespace"]) if owned_by(pod, uid)
        ]
        conditions = job["status"].get("conditions") or []
        over = any(
            c["type"] in ("Complete", "Failed") and c["status"] == "True" for c in conditions
        )
        self._count(job, count, pods)
        if over:
            self._expire(job, count)
            return
        if "deletionTimestamp" in metadata:
            return
        active = [pod for pod in pods if _is_active(pod)]
        running = [pod for pod in active if "deletionTimestamp" not in pod["metadata"]]
        if spec.get("suspend") and count.verdict is None:
            count.clock = None
            self._write(job, count, pods)
            return
        if count.clock is None:
            count.clock = time.monotonic()
        limit = spec.get("activeDeadlineSeconds")
        if count.verdict is None and limit is not None and time.monotonic() - count.clock > limit:
            count.verdict = (
                "Failed",
                "DeadlineExceeded",
                "Job was active longer than specified deadline",
            )
        if count.verdict is None:
            count.verdict = self._judge(job, count)
        if count.verdict is not None:
            for pod in running:
                self._delete(pod)
        else:
            self._create(job, count, active)
        fresh = [
            pod for pod in self.store.items("pods", metadata["namespace"]) if owned_by(pod, uid)
        ]
        self._write(job, count, fresh)

    def _count(self, job: Object, count: _Count, pods: Sequence[Object]) -> None:
        for pod in pods:
            uid = pod["metadata"]["uid"]
            phase = pod["status"].get("phase")
            lost = "deletionTimestamp" in pod["metadata"] and "nodeName" not in pod["spec"]
            if uid not in count.seen and (phase in ("Succeeded", "Failed") or lost):
                count.seen.add(uid)
                self._note(job, count, pod, succeeded=phase == "Succeeded")
            if phase in ("Succeeded", "Failed") or "nodeName" not in pod["spec"]:
                if uid in count.seen and not _is_kept(job, count, pod, pods):
                    self._release(pod)

    def _note(self, job: Object, count: _Count, pod: Object, *, succeeded: bool) -> None:
        spec = job["spec"]
        index = _index(pod)
        if succeeded:
            count.succeeded.add(index)
            return
        count.failures += 1
        action, why = _policy(spec, pod)
        if action == "FailJob":
            count.verdict = count.verdict or ("Failed", "PodFailurePolicy", why)
        if index is not None:
            counts = count.ignored_by_index if action == "Ignore" else count.by_index
            counts[index] = counts.get(index, 0) + 1
            total = count.by_index.get(index, 0) + count.ignored_by_index.get(index, 0)
            if action == "FailIndex" or count.by_index.get(index, 0) > spec["backoffLimitPerIndex"]:
                count.failed_indexes.add(index)
            count.not_before[index] = time.monotonic() + self._pause(total)
        if action != "Ignore":
            count.counted += 1
            if index is None:
                count.not_before[None] = time.monotonic() + self._pause(count.counted)

    def _pause(self, failures: int) -> float:
        return float(min(self.backoff_s * 2 ** (failures - 1), _MAX_BACKOFF_S))

    def _judge(self, job: Object, count: _Count) -> tuple[str, str, str] | None:
        spec = job["spec"]
        if len(count.succeeded | count.failed_indexes) >= spec["completions"]:
            if count.failed_indexes:
                return "Failed", "FailedIndexes", "Job has failed indexes"
            return "Complete", "CompletionsReached", "Reached expected number of succeeded pods"
        if count.counted > spec["backoffLimit"]:
            message = "Job has reached the specified backoff limit"
            return "Failed", "BackoffLimitExceeded", message
        return None

    def _create(self, job: Object, count: _Count, held: Sequence[Object]) -> None:
        spec = job["spec"]
        clock = time.monotonic()
        indexed = spec["completionMode"] == "Indexed"
        wanted: Iterable[int | None] = range(spec["completions"]) if indexed else (None,)
        taken = {_index(pod) for pod in held} | count.succeeded | count.failed_indexes
        for index in wanted:
            if index not in taken and count.not_before.get(index, 0) <= clock:
                self._create_pod(job, count, index)

    def _create_pod(self, job: Object, count: _Count, index: int | None) -> None:
        metadata, template = job["metadata"], json.loads(json.dumps(job["spec"]["template"]))
        name = metadata["name"]
        pod: Object = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                **(template.get("metadata") or {}),
                "namespace": metadata["namespace"],
                "finalizers": [_TRACKING],
                "ownerReferences": [_owner(job)],
            },
            "spec": template["spec"],
        }
        base = name if index is None else f"{name}-{index}"
        pod["metadata"]["name"] = f"{base[:57]}-{random_suffix()}"
        if index is not None:
            pod["metadata"].setdefault("labels", {})[_INDEX] = str(index)
            annotations = pod["metadata"].setdefault("annotations", {})
            annotations[_INDEX] = str(index)
            annotations[_FAILURES] = str(count.by_index.get(index, 0))
            if index in count.ignored_by_index:
                annotations[_IGNORED] = str(count.ignored_by_index[index])
            pod["spec"].setdefault("hostname", base)
        try:
            with self.store.changed:
                found = self.store.find("jobs", metadata["namespace"], name)
                if found is None or found["metadata"]["uid"] != metadata["uid"]:
                    return  # its pods may be nobody's by now, and not be missing
                self.admit("pods", pod)
        except ApiError as error:
            self.record(job, "Warning", "FailedCreate", f"Error creating: {error}")
            count.not_before[index] = time.monotonic() + self.backoff_s

    def _write(self, job: Object, count: _Count, pods: Sequence[Object]) -> None:
        active = [pod for pod in pods if _is_active(pod)]
        terminating = sum("deletionTimestamp" in pod["metadata"] for pod in active)
        verdict = count.verdict
        ends = verdict is not None and not active

        def write(one: Object) -> None:
            status = one["status"]
            status["active"] = len(active) - terminating
            status["terminating"] = terminating
            status["succeeded"] = len(count.succeeded)
            status["failed"] = count.failures
            if job["spec"]["completionMode"] == "Indexed":
                status["failedIndexes"] = ",".join(map(str, sorted(count.failed_indexes)))
            if verdict is not None:
                kind, reason, message = verdict
                first = "SuccessCriteriaMet" if kind == "Complete" else "FailureTarget"
                _set_condition(one, _condition(first, reason, message))
                if ends:
                    _set_condition(one, _condition(kind, reason, message))

        metadata = job["metadata"]
        self.store.update(
            "jobs", metadata["namespace"], metadata["name"], write, uid=metadata["uid"]
        )
        if ends and verdict is not None:
            count.ended = time.monotonic()
            kind, reason, message = verdict
            if kind == "Failed":
                self.record(job, "Warning", reason, message)

    def _expire(self, job: Object, count: _Count) -> None:
        ttl = job["spec"].get("ttlSecondsAfterFinished")
        if ttl is None or "deletionTimestamp" in job["metadata"]:
            return
        if time.monotonic() - (count.ended or 0.0) >= ttl:
            self.store.delete("jobs", job["metadata"]["namespace"], job["metadata"]["name"])

    def _delete(self, pod: Object) -> None:
        metadata = pod["metadata"]
        with contextlib.suppress(ApiError):
            self.store.delete("pods", metadata["namespace"], metadata["name"], uid=metadata["uid"])

    def _release(self, pod: Object) -> None:
        metadata = pod["metadata"]

        def release(one: Object) -> None:
            kept = [name for name in one["metadata"].get("finalizers") or [] if name != _TRACKING]
            one["metadata"]["finalizers"] = kept
            if not kept:
                del one["metadata"]["finalizers"]

        if _TRACKING in (metadata.get("finalizers") or []):
            with contextlib.suppress(ApiError):
                self.store.update(
                    "pods", metadata["namespace"], metadata["name"], release, uid=metadata["uid"]
                )


class JobSetController:
    """Makes jobs of job sets, which our launcher removes itself when its program has ended."""

    def __init__(self, store: Store, admit: Admit) -> None:
        self.store = store
        self.admit = admit

    def run(self) -> None:
        for jobset in self.store.items("jobsets"):
            if "deletionTimestamp" not in jobset["metadata"]:
                with contextlib.suppress(ApiError):
                    self._sync(jobset)

    def _sync(self, jobset: Object) -> None:
        metadata, spec = jobset["metadata"], jobset["spec"]
        jobs = {
            job["metadata"]["name"]: job
            for job in self.store.items("jobs", metadata["namespace"])
            if owned_by(job, metadata["uid"])
        }
        for one in spec.get("replicatedJobs") or []:
            for index in range(one["replicas"]):
                name = f"{metadata['name']}-{one['name']}-{index}"
                if name not in jobs:
                    self._make_job(jobset, one, index)
                elif bool(jobs[name]["spec"].get("suspend")) != bool(spec.get("suspend")):
                    self.store.update("jobs", metadata["namespace"], name, _turned)

    def _make_job(self, jobset: Object, one: Mapping[str, Any], index: int) -> None:
        metadata = jobset["metadata"]
        template = json.loads(json.dumps(one["template"]))
        name = f"{metadata['name']}-{one['name']}-{index}"
        job = template | {"apiVersion": "batch/v1", "kind": "Job"}
        given = job.setdefault("metadata", {})
        given.update(name=name, namespace=metadata["namespace"], ownerReferences=[_owner(jobset)])
        job["spec"]["suspend"] = bool(jobset["spec"].get("suspend"))
        # Unless the set is gone by now.
        with self.store.changed:
            found = self.store.find("jobsets", metadata["namespace"], metadata["name"])
            if found is not None and found["metadata"]["uid"] == metadata["uid"]:
                self.admit("jobs", job)


class GarbageCollector:
    """Deletes objects whose owners are gone."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def run(self) -> None:
        with self.store.changed:
            everything = [*self.store.all()]
        alive = {item["metadata"]["uid"] for _, item in everything}
        for resource, item in everything:
            metadata = item["metadata"]
            owners = metadata.get("ownerReferences") or []
            lost = bool(owners) and not any(one["uid"] in alive for one in owners)
            if lost and "deletionTimestamp" not in metadata:
                with contextlib.suppress(ApiError):
                    self.store.delete(resource, metadata.get("namespace", ""), metadata["name"])


class Loop:
    """Runs controllers whenever something has changed, and a few times a second."""

    def __init__(
        self, store: Store, steps: Sequence[Callable[[], None]], tick_s: float = 0.1
    ) -> None:
        self._store = store
        self._steps = steps
        self._tick_s = tick_s
        self._closing = False
        self.errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, name="controllers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing = True
        with self._store.changed:
            self._store.changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        seen = 0
        while not self._closing:
            with self._store.changed:
                if self._store.version == seen:
                    self._store.changed.wait(self._tick_s)
                seen = self._store.version
            for step in self._steps:
                try:
                    step()
                except Exception as error:  # noqa: BLE001 - the others still run; `restore` raises it
                    self.errors.append(error)
            time.sleep(0.005)  # changes come in groups


def _is_kept(job: Object, count: _Count, pod: Object, pods: Sequence[Object]) -> bool:
    """Whether a failed pod is kept until there is another one of its index, which counts from it."""
    index = _index(pod)
    if job["spec"].get("backoffLimitPerIndex") is None or pod["status"].get("phase") != "Failed":
        return False
    is_over = count.verdict is not None or "deletionTimestamp" in job["metadata"]
    if is_over or job["spec"].get("suspend") or index in count.failed_indexes:
        return False
    number = _failure_count(pod)
    return all(_index(one) != index or _failure_count(one) <= number for one in pods)


def _failure_count(pod: Object) -> int:
    """How many pods of its index had failed when it was made."""
    annotations = pod["metadata"].get("annotations") or {}
    return sum(int(annotations.get(name, 0)) for name in (_FAILURES, _IGNORED))


def _index(pod: Object) -> int | None:
    text = (pod["metadata"].get("annotations") or {}).get(_INDEX)
    return None if text is None else int(text)


def _is_active(pod: Object) -> bool:
    return pod["status"].get("phase") not in ("Succeeded", "Failed")


def _active(pods: Iterable[Object]) -> list[Object]:
    return [pod for pod in pods if _is_active(pod)]


def _policy(spec: Mapping[str, Any], pod: Object) -> tuple[str, str]:
    """What the failure policy says about a failed pod, and why."""
    metadata, status = pod["metadata"], pod["status"]
    name = f"{metadata['namespace']}/{metadata['name']}"
    for rule in (spec.get("podFailurePolicy") or {}).get("rules") or []:
        codes = rule.get("onExitCodes")
        if codes:
            for container in status.get("containerStatuses") or []:
                code = ((container["state"].get("terminated")) or {}).get("exitCode", 0)
                if code == 0 or codes.get("containerName") not in (None, container["name"]):
                    continue
                if (code in codes["values"]) is (codes["operator"] == "In"):
                    return rule["action"], f"{container['name']} of {name} failed with code {code}"
        for pattern in rule.get("onPodConditions") or []:
            for condition in status.get("conditions") or []:
                if (condition["type"], condition["status"]) == (pattern["type"], pattern["status"]):
                    return rule["action"], f"{name} has condition {condition['type']}"
    return "Count", ""


def _condition(kind: str, reason: str, message: str) -> Object:
    return {"type": kind, "status": "True", "reason": reason, "message": message}


def _set_condition(item: Object, condition: Object) -> None:
    status = item.setdefault("status", {})
    others = [old for old in status.get("conditions", ()) if old["type"] != condition["type"]]
    status["conditions"] = [*others, condition]


def _turned(job: Object) -> None:
    """Suspends a job, or resumes it."""
    job["spec"]["suspend"] = not job["spec"].get("suspend")


def _owner(item: Object) -> Object:
    return {
        "apiVersion": item["apiVersion"],
        "kind": item["kind"],
        "name": item["metadata"]["name"],
        "uid": item["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
