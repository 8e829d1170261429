"""All objects of a run, as plain JSON for the API. Pure: nothing is created here.

The run is owned by its first object, the root: the Job of the supervisor, or a JobSet. All others
get an owner reference to it once it exists, so deleting it leaves nothing.
"""

import base64
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from launchers.kubernetes._agreed import (
    DETACHED,
    GROUP_LABEL,
    LAUNCHER_ANNOTATION,
    LINK_PORT,
    LONGEST_BACKOFF_S,
    NODE,
    PLAN_ANNOTATION,
    ROLE_LABEL,
    RUN_LABEL,
    STACKS_ANNOTATION,
    SUPERVISOR,
    TOGETHER_LABEL,
    grace_s,
)
from launchers.kubernetes._client import KINDS
from launchers.kubernetes._names import Names
from launchers.kubernetes._order import PackedRun, WorkVolume
from launchers.kubernetes._pods import REQUIRED, PodOptions, pod_template
from launchpad_lite import __version__
from launchpad_lite.launching import Executable, Resources, RestartWhen

MANAGER = "launchpad-lite"

#: Bytes of work in one Secret: `kubectl apply` keeps a copy of each object in an annotation, and
#: all annotations of one may have 256 KiB. Base64 makes 4 bytes of 3.
_PART_BYTES = 180_000
#: Of more work than this, a Secret holds as much as fits into its 1 MiB: many objects are slow.
_MOST_IN_SMALL_PARTS = 2_000_000
_LARGE_PART_BYTES = 900_000
#: Kubernetes has no time window for failures, so the supervisor counts them and this is no limit.
_MANY_RESTARTS = 1000
_SUPERVISOR_RESTARTS = 3
#: Exit code after which the Job must not repeat the pod.
_FOR_GOOD = 1
#: Mode of the files of all Secrets: readable for the pod's own user and group.
_READABLE = 0o440
_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
#: Main memory that a supervisor may have, in MiB, beside what the work takes.
_SUPERVISOR_MIB = 1024


@dataclass(frozen=True)
class Cluster:
    """Settings of all objects of a run; `KubernetesLauncher` explains most of them.

    A notice below 0 has no end. Without `launcher_silence_s`, the run is detached: the supervisor
    expects no sign of life.
    """

    names: Names
    namespace: str | None = None
    notice_s: float = 10.0
    schedule_s: float = 600.0
    launcher_silence_s: float | None = None
    ttl_s: int = 3600
    max_run_s: int | None = None
    queue: str | None = None
    gpu_resource: str = "nvidia.com/gpu"
    network_policy: bool = True

    @property
    def grace_s(self) -> int:
        return grace_s(self.notice_s)


@dataclass(frozen=True)
class Group:
    """Nodes with one label: one Job, whose pods are all alike. Their addresses have ports."""

    label: str
    executables: tuple[Executable, ...]
    pod: PodOptions


def owned(obj: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an object as one that is removed with the root, which the API has returned."""
    # Without `controller`, because Kueue would take the Job for a part of the root; and without
    # `blockOwnerDeletion`, because some clusters require rights on the root's finalizers for it.
    reference = {
        "apiVersion": root["apiVersion"],
        "kind": root["kind"],
        "name": root["metadata"]["name"],
        "uid": root["metadata"]["uid"],
    }
    return {**obj, "metadata": {**obj["metadata"], "ownerReferences": [reference]}}


@dataclass(frozen=True)
class Manifests:
    """Makes all objects of a run: the same for the same attributes."""

    cluster: Cluster
    groups: Sequence[Group]
    supervisor: PodOptions
    program: str
    files: PackedRun = field(default_factory=lambda: PackedRun({}, {}))

    @property
    def _names(self) -> Names:
        return self.cluster.names

    def mistakes(self) -> list[str]:
        found = []
        pods = [("the supervisor", self.supervisor)]
        pods += [(f"group {group.label!r}", group.pod) for group in self.groups]
        if bare := [who for who, pod in pods if pod.image is None]:
            found.append(
                f"no image for the pods of {', '.join(bare)}; name one that has launchpad-lite, on "
                "Python {}.{}, as image=NAME (`make image` builds one)".format(*sys.version_info)
            )
        try:
            self._supervisor_template()
        except ValueError as error:
            found.append(f"the supervisor's pod: {error}")
        for group in self.groups:
            found += _group_mistakes(group)
            try:
                self._group_template(group)
            except ValueError as error:
                found.append(f"pods of group {group.label!r}: {error}")
        return found

    def objects(self, *, suspended: bool = False) -> list[dict[str, Any]]:
        """Returns all objects, the root first, which may be created suspended.

        With a queue, all Jobs are suspended in any case, until the queue admits them.
        """
        waits = suspended or self.cluster.queue is not None
        names = self._names
        supervisor = {ROLE_LABEL: SUPERVISOR}
        others = [self._service(names.run, supervisor, {"link": LINK_PORT}, type="ClusterIP")]
        for group in self.groups:
            own = self._group_labels(group)
            others.append(
                self._service(names.groups[group.label], own, _ports(group), clusterIP="None")
            )
        others += [
            self._secret(names.trust, self.files.trust),
            self._secret(names.order, self.files.order),
            *(
                self._secret(names.work(i), {f"part-{i:05}": part})
                for i, part in enumerate(self._parts())
            ),
        ]
        if self.cluster.network_policy:
            others.append(self._network_policy())
        root = self._object(names.root_kind, names.run, {} if names.jobset else supervisor)
        root["metadata"]["annotations"] = {PLAN_ANNOTATION: self._plan()}
        spec = self._jobset() if names.jobset else self._supervisor_job()
        ttl = {"ttlSecondsAfterFinished": self.cluster.ttl_s}
        root["spec"] = {"suspend": waits, **ttl, **spec}
        if names.jobset:
            return [root, *others]
        begins = {} if self.cluster.queue is None else {"suspend": True}
        jobs = [
            {
                **self._object("Job", names.groups[group.label], self._group_labels(group)),
                "spec": {**begins, **self._group_job(group)},
            }
            for group in self.groups
        ]
        return [root, *others, *jobs]

    def _parts(self) -> list[bytes]:
        blob = self.files.blob if self.files.place is None else b""
        size = _PART_BYTES if len(blob) <= _MOST_IN_SMALL_PARTS else _LARGE_PART_BYTES
        return [blob[start : start + size] for start in range(0, len(blob), size)]

    def _object(self, kind: str, name: str, labels: Mapping[str, str]) -> dict[str, Any]:
        metadata: dict[str, Any] = {"name": name}
        if self.cluster.namespace is not None:
            metadata["namespace"] = self.cluster.namespace
        metadata["labels"] = {**self._labels(), **labels}
        if kind in ("Job", "JobSet") and self.cluster.queue is not None:
            metadata["labels"][_QUEUE_LABEL] = self.cluster.queue
        return {"apiVersion": KINDS[kind][0], "kind": kind, "metadata": metadata}

    def _labels(self) -> dict[str, str]:
        return {
            "app.kubernetes.io/name": self._names.program,
            "app.kubernetes.io/managed-by": MANAGER,
            RUN_LABEL: self._names.run,
        }

    def _group_labels(self, group: Group) -> dict[str, str]:
        return {ROLE_LABEL: NODE, GROUP_LABEL: self._names.slug(group.label)}

    def _plan(self) -> str:
        plan = {
            "program": self.program,
            "notice_s": self.cluster.notice_s,
            "begins_anew": self._is_repeatable(),
            "groups": {group.label: len(group.executables) for group in self.groups},
            "version": __version__,
        }
        return json.dumps(plan)

    def _jobset(self) -> dict[str, Any]:
        jobs = [(SUPERVISOR, {ROLE_LABEL: SUPERVISOR}, self._supervisor_job())]
        jobs += [
            (self._names.slug(group.label), self._group_labels(group), self._group_job(group))
            for group in self.groups
        ]
        return {
            # The Services of the run name the pods. The JobSet's own Service would have the same name as
            # that of the supervisor.
            "network": {"enableDNSHostnames": False},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [SUPERVISOR]},
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": [
                {
                    "name": name,
                    "replicas": 1,
                    "template": {"metadata": {"labels": {**self._labels(), **labels}}, "spec": job},
                }
                for name, labels, job in jobs
            ],
        }

    def _service(
        self, name: str, labels: Mapping[str, str], ports: Mapping[str, int], **how: str
    ) -> dict[str, Any]:
        spec: dict[str, Any] = {
            **how,
            # Pods connect to the supervisor before they are ready, and it never becomes "ready".
            "publishNotReadyAddresses": True,
            "selector": {RUN_LABEL: self._names.run, **labels},
        }
        if ports:
            spec["ports"] = [
                {"name": each, "port": port, "targetPort": port, "protocol": "TCP"}
                for each, port in ports.items()
            ]
        return {**self._object("Service", name, labels), "spec": spec}

    def _secret(self, name: str, files: Mapping[str, bytes]) -> dict[str, Any]:
        return {
            **self._object("Secret", name, {}),
            "type": "Opaque",
            "data": {each: base64.b64encode(files[each]).decode() for each in files},
        }

    def _network_policy(self) -> dict[str, Any]:
        ours = {"matchLabels": {RUN_LABEL: self._names.run}}
        return {
            **self._object("NetworkPolicy", self._names.run, {}),
            "spec": {
                "podSelector": ours,
                "policyTypes": ["Ingress"],
                "ingress": [{"from": [{"podSelector": ours}]}],
            },
        }

    def _supervisor_job(self) -> dict[str, Any]:
        repeatable = self._is_repeatable()
        spec: dict[str, Any] = {
            "completions": 1,
            "parallelism": 1,
            "backoffLimit": _SUPERVISOR_RESTARTS if repeatable else 0,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {"rules": _failure_rules("FailJob", SUPERVISOR, repeatable)},
        }
        if self.cluster.max_run_s is not None:
            spec["activeDeadlineSeconds"] = self.cluster.max_run_s
        return {**spec, "template": self._supervisor_template()}

    def _group_job(self, group: Group) -> dict[str, Any]:
        replicas = len(group.executables)
        deadline = {}
        # Without this limit, a pod that comes back after the supervisor was stopped would wait for a
        # new one. Not with a queue that admits each Job by itself: it may start this Job long before.
        if self.cluster.max_run_s is not None and (
            self._names.jobset or self.cluster.queue is None
        ):
            deadline["activeDeadlineSeconds"] = self.cluster.max_run_s + self.cluster.grace_s
        return {
            **deadline,
            "completionMode": "Indexed",
            "completions": replicas,
            "parallelism": replicas,
            "backoffLimitPerIndex": max(map(_restarts, group.executables)),
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {"rules": _failure_rules("FailIndex", NODE, _come_back(group))},
            "template": self._group_template(group),
        }

    def _is_repeatable(self) -> bool:
        executables = [each for group in self.groups for each in group.executables]
        return all(each.restart.outlives_host for each in executables)

    def _supervisor_template(self) -> dict[str, Any]:
        launcher = DETACHED if self.cluster.launcher_silence_s is None else "launching"
        # The supervisor holds several copies of the work: packed, unpacked, and being sent to pods.
        limit_mib = _SUPERVISOR_MIB + 6 * len(self.files.blob) // (1 << 20)
        return pod_template(
            self.supervisor,
            container=SUPERVISOR,
            script="order/begin.py",
            env={},
            ports={"link": LINK_PORT},
            resources={
                "requests": {"cpu": "100m", "memory": "256Mi"},
                "limits": {"memory": f"{limit_mib}Mi"},
            },
            volumes=self._supervisor_volumes(),
            metadata={
                "labels": {**self._labels(), ROLE_LABEL: SUPERVISOR},
                "annotations": {LAUNCHER_ANNOTATION: launcher},
            },
            spec={"terminationGracePeriodSeconds": self.cluster.grace_s},
            moves=self._is_repeatable(),
        )

    def _group_template(self, group: Group) -> dict[str, Any]:
        executable = group.executables[0]
        env = {
            "LAUNCHPAD_SUPERVISOR": f"{self._names.run}:{LINK_PORT}",
            "LAUNCHPAD_WAIT_S": f"{self._wait_s(group):g}",
        }
        wishes = _resources(executable.resources, self.cluster.gpu_resource)
        labels = {**self._labels(), **self._group_labels(group)}
        spec: dict[str, Any] = {
            "subdomain": self._names.groups[group.label],
            "terminationGracePeriodSeconds": self.cluster.grace_s,
        }
        if executable.together is not None:
            # A number, because the words are random for each program and manifests shall not differ.
            words = (each.together for group in self.groups for each in group.executables)
            number = [*dict.fromkeys(filter(None, words))].index(executable.together)
            labels[TOGETHER_LABEL] = str(number)
            ours = {RUN_LABEL: self._names.run, TOGETHER_LABEL: labels[TOGETHER_LABEL]}
            term = {"labelSelector": {"matchLabels": ours}, "topologyKey": "kubernetes.io/hostname"}
            spec["affinity"] = {"podAffinity": {REQUIRED: [term]}}
        return pod_template(
            group.pod,
            container=NODE,
            script="trust/pod.py",
            env=env,
            ports=_ports(group),
            resources={"requests": wishes, "limits": wishes} if wishes else {},
            volumes=self._volumes(),
            metadata={"labels": labels},
            spec=spec,
            moves=_come_back(group),
        )

    def _wait_s(self, group: Group) -> float:
        """Returns the seconds that a pod waits for the supervisor; no other takes its place then."""
        wait_s = self.cluster.schedule_s
        if _come_back(group):
            # So long may a new supervisor take to come in place of a lost one, and the launching process
            # to remove a supervisor whose machine does not answer.
            wait_s += LONGEST_BACKOFF_S
            if self.cluster.launcher_silence_s is not None:
                wait_s += self.cluster.launcher_silence_s + max(self.cluster.notice_s, 0.0)
        return wait_s

    def _volumes(self) -> dict[str, dict[str, Any]]:
        trust = {"secretName": self._names.trust, "defaultMode": _READABLE}
        return {
            "tmp": {"emptyDir": {}},
            "shm": {"emptyDir": {"medium": "Memory"}},
            "trust": {"secret": trust},
        }

    def _supervisor_volumes(self) -> dict[str, dict[str, Any]]:
        told = {"seen": LAUNCHER_ANNOTATION, "stacks": STACKS_ANNOTATION}
        items = [
            {"path": path, "fieldRef": {"fieldPath": f"metadata.annotations['{annotation}']"}}
            for path, annotation in told.items()
        ]
        volumes: dict[str, dict[str, Any]] = {
            **self._volumes(),
            "order": {"secret": {"secretName": self._names.order, "defaultMode": _READABLE}},
            "launcher": {"downwardAPI": {"items": items}},
        }
        if isinstance(self.files.place, WorkVolume):
            volumes["work"] = {**self.files.place.volume}
        elif parts := self._parts():
            sources = [{"secret": {"name": self._names.work(i)}} for i in range(len(parts))]
            volumes["work"] = {"projected": {"sources": sources, "defaultMode": _READABLE}}
        return volumes


def _group_mistakes(group: Group) -> Iterator[str]:
    first, *others = group.executables
    how = "but on Kubernetes all pods of a group are alike; give these nodes labels of their own"
    if (odd := next((n for n in others if n.resources != first.resources), None)) is not None:
        wishes = f"{str(first.resources) or 'none'}; {str(odd.resources) or 'none'}"
        yield f"{first.name} and {odd.name} ask for different resources ({wishes}), {how}"
    if (odd := next((n for n in others if n.together != first.together), None)) is not None:
        yield f"{first.name} and {odd.name} are to run together with different nodes, {how}"
    for each in group.executables:
        gpu = each.resources.gpu
        if gpu is not None and not float(gpu).is_integer():
            yield (
                f"{each.name} asks for gpu={gpu:g}, but pods on Kubernetes have whole accelerators; "
                "ask for 1, and leave the sharing to the cluster"
            )


def _ports(group: Group) -> dict[str, int]:
    addresses = [address for each in group.executables for address in each.addresses]
    ports = {address.port for address in addresses if address.port is not None}
    return {f"p{port}": port for port in sorted(ports)}


def _resources(wishes: Resources, gpu_resource: str) -> dict[str, str]:
    quantities: dict[str, str] = {}
    if wishes.cpu:
        # Rounded first: 1.1 times 1000 is a little more than 1100 in binary.
        milli = math.ceil(round(wishes.cpu * 1000, 6))
        quantities["cpu"] = f"{milli}m" if milli % 1000 else str(milli // 1000)
    if wishes.ram_gib:
        quantities["memory"] = f"{math.ceil(round(wishes.ram_gib * 1024, 6))}Mi"
    if wishes.gpu:
        quantities[gpu_resource] = str(math.ceil(wishes.gpu))
    return quantities


def _restarts(executable: Executable) -> int:
    """Returns how many lost pods of the node are replaced."""
    policy = executable.restart
    if policy.when is RestartWhen.NEVER:
        return 0
    return policy.max_restarts if math.isinf(policy.window_s) else _MANY_RESTARTS


def _come_back(group: Group) -> bool:
    return any(each.restart.outlives_host for each in group.executables)


def _failure_rules(action: str, container: str, comes_back: bool) -> list[dict[str, Any]]:
    rules: list[dict[str, Any]] = [
        {
            "action": action,
            "onExitCodes": {"containerName": container, "operator": "In", "values": [_FOR_GOOD]},
        }
    ]
    if comes_back:
        disrupted = {"type": "DisruptionTarget", "status": "True"}
        rules.append({"action": "Ignore", "onPodConditions": [disrupted]})
    return rules
