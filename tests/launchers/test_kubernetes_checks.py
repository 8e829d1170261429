"""What a real API server would refuse, told before it is asked: all mistakes at once."""

import copy
import fnmatch
import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from launchers._kubernetes.checks import mistakes
from launchers.kubernetes import KubernetesLauncher, PodOptions
from launchpad_lite._freeze import FrozenWork
from launchpad_lite.launching import Executable, Resources

RUN = {"launchpad-lite/run": "run"}
FOLDER = Path(__file__).with_name("kubernetes_objects")
PLAIN, EVERYTHING = ((FOLDER / f"{name}.json").read_text() for name in ("plain", "every_field"))


def plain(kind: str) -> dict[str, Any]:
    """An object as we make it, without mistakes."""
    made: dict[str, Any] = json.loads(PLAIN)[kind]
    return made


def job() -> dict[str, Any]:
    return plain("Job")


def service() -> dict[str, Any]:
    return plain("Service")


def job_set() -> dict[str, Any]:
    template = {"metadata": {"labels": dict(RUN)}, "spec": job()["spec"]}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "run"},
        "spec": {
            "network": {"publishNotReadyAddresses": True},
            "replicatedJobs": [{"name": "actor", "replicas": 1, "template": template}],
        },
    }


BASES: Mapping[str, Callable[[], dict[str, Any]]] = {
    "JobSet": job_set,
    **{kind: partial(plain, kind) for kind in ("Job", "NetworkPolicy", "Secret", "Service")},
}

#: A value that takes its field away.
GONE = object()


def changed(base: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Sets one field, named by a path of keys between spaces; `+`: a new element of a list."""
    *parents, last = keys = path.split()
    at: Any = base
    for key, below in itertools.pairwise(keys):
        if key == "+":
            # What is said of a volume names it.
            at.append({"name": "x"} if parents[parents.index(key) - 1] == "volumes" else {})
            at = at[-1]
        else:
            missing: Any = [] if below == "+" else {}
            at = at[int(key)] if isinstance(at, list) else at.setdefault(key, missing)
    if value is GONE:
        del at[int(last) if isinstance(at, list) else last]
    elif last == "+":
        at.append(value)
    else:
        at[int(last) if isinstance(at, list) else last] = copy.deepcopy(value)
    return base


POD = "spec template spec"
NODE = f"{POD} containers 0"
VOLUMES = f"{POD} volumes"
CONTEXT = f"{NODE} securityContext"
RULES = "spec podFailurePolicy rules"
AFFINITY = f"{POD} affinity"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
HTTP = {"httpGet": {"port": 80}}

JOB_TABLE: Sequence[tuple[str, Any, str]] = [
    # What every object has.
    ("apiVersion", "batch/v1beta1", "apiVersion: expected 'batch/v1', got 'batch/v1beta1'"),
    ("apiVersion", GONE, "apiVersion: expected 'batch/v1', got None"),
    ("metadata name", GONE, "metadata.name: missing; name the object"),
    ("metadata name", "Run_actor", "'Run_actor' is no DNS name"),
    ("metadata name", "run\n", "is no DNS name"),
    ("metadata name", "a" * 62, "is no DNS label; take a name 1 characters shorter"),
    ("metadata name", "run.actor", "is no DNS label; leave out '.'"),
    ("metadata namespace", "my_space", "metadata.namespace: 'my_space' is no DNS label"),
    ("metadata labels", {"a b": "c"}, "metadata.labels['a b']: 'a b' is no qualified name"),
    ("metadata labels", {"_/b": "c"}, "has no DNS name before '/'"),
    ("metadata labels", {"/b": "c"}, "has no DNS name before '/'"),
    ("metadata labels", {"": "c"}, "metadata.labels['']: '' is no qualified name"),
    ("metadata labels", {"x": "-c"}, "metadata.labels.x: '-c' is no value of a label"),
    ("metadata labels", {"x": "c" * 64}, "has 64 characters; at most 63 are allowed"),
    ("metadata labels", {"x": 1}, "metadata.labels.x: expected text, got 1"),
    ("metadata labels", ["x"], "metadata.labels: expected an object of names and values"),
    ("metadata annotations", {"a b": "c"}, "'a b' is no qualified name"),
    ("metadata annotations", {"x": "é" * 140000}, "at most 262144 are allowed"),
    ("metadata resourceVersion", "1", "must not be given for an object to be created"),
    ("metadata ownerReferences", [{"kind": "Job"}], "ownerReferences[0].uid: missing"),
    ("metadata lables", {}, "metadata: unknown field 'lables'; did you mean 'labels'?"),
    ("metadata finalizers", ["a b"], "finalizers[0]: 'a b' is no qualified name"),
    # Jobs.
    ("spec", GONE, "spec.template: missing"),
    ("spec", "x", "spec: expected an object, got 'x'"),
    ("spec template", GONE, "spec.template: missing; give it"),
    ("spec completion_mode", "Indexed", "'completion_mode'; did you mean 'completionMode'?"),
    ("spec completionMode", "indexed", "'indexed' is unknown; did you mean 'Indexed'?"),
    ("spec completionMode", "NonIndexed", "backoffLimitPerIndex: needs completionMode: Indexed"),
    ("spec completions", GONE, "spec.completions: missing; an Indexed Job needs it"),
    ("spec completions", -1, "spec.completions: -1 is out of range; it must be at least 0"),
    ("spec completions", "3", "spec.completions: expected a whole number, got '3'"),
    ("spec completions", 3.0, "spec.completions: expected a whole number, got 3.0"),
    ("spec completions", True, "spec.completions: expected a whole number, got True"),
    ("spec completions", 2**31, "spec.completions: expected a whole number"),
    ("spec completions", 200_000, "with more than 100000 completions, give at most 10000"),
    ("spec parallelism", 100_001, "an Indexed Job has at most 100000"),
    ("spec maxFailedIndexes", 4, "4 is above completions"),
    ("spec backoffLimit", -1, "spec.backoffLimit: -1 is out of range"),
    ("spec backoffLimitPerIndex", -1, "spec.backoffLimitPerIndex: -1 is out of range"),
    ("spec backoffLimitPerIndex", GONE, "'FailIndex' needs backoffLimitPerIndex"),
    ("spec activeDeadlineSeconds", 0, "spec.activeDeadlineSeconds: 0 is out of range"),
    ("spec ttlSecondsAfterFinished", -1, "spec.ttlSecondsAfterFinished: -1 is out of range"),
    ("spec podReplacementPolicy", "TerminatingOrFailed", "only 'Failed' is allowed"),
    ("spec selector", {"matchLabels": RUN}, "the server makes the selector of a Job"),
    ("spec manualSelector", True, "the server makes the selector of a Job"),
    ("spec managedBy", "kueue", "'kueue' names no controller"),
    ("spec suspend", "yes", "spec.suspend: expected true or false, got 'yes'"),
    ("spec successPolicy", {"rules": []}, "successPolicy.rules: missing"),
    ("spec successPolicy", {"rules": [{}]}, "give succeededCount or succeededIndexes"),
    ("spec successPolicy", {"rules": [{"succeededCount": 4}]}, "must be between 0 and 3"),
    (f"{RULES}", [], "spec.podFailurePolicy.rules: missing"),
    (f"{RULES} 0 action", GONE, "rules[0].action: missing"),
    (f"{RULES} 0 onExitCodes containerName", "nodes", "'nodes' is no container of the pod"),
    (f"{RULES} 0 onExitCodes operator", "Not", "onExitCodes.operator: 'Not' is unknown"),
    (f"{RULES} 0 onExitCodes values", [], "onExitCodes.values: missing"),
    (f"{RULES} 0 onExitCodes values", [0, 1], "holds 0, which is no failure"),
    (f"{RULES} 0 onExitCodes values", [2, 1], "must be ascending"),
    (f"{RULES} 0 onExitCodes values", [1, 1], "must be ascending, each code once"),
    (f"{RULES} 0 onExitCodes values", list(range(1, 257)), "256 codes; at most 255"),
    (f"{RULES} 0 onExitCodes", GONE, "rules[0]: give either onExitCodes or onPodConditions"),
    (f"{RULES} 1 onPodConditions 0 type", GONE, "onPodConditions[0].type: missing"),
    (
        f"{RULES}",
        [{"action": "Count", "onPodConditions": [{"type": "a"}]}] * 21,
        "21 rules; at most 20",
    ),
    ("spec template metadata labels job-name", "x", "the server gives this label"),
    ("spec template metadata labels controller-uid", "x", "the server gives this label"),
    # Pods.
    (f"{POD}", GONE, "spec.template.spec: missing"),
    (f"{POD} containers", [], "spec.template.spec.containers: missing"),
    (f"{POD} containers", {}, "spec.template.spec.containers: expected a list"),
    (f"{POD} containers +", None, "containers[1]: null in a list"),
    (f"{POD} restartPolicy", GONE, "use 'Never' or 'OnFailure'"),
    (f"{POD} restartPolicy", "Always", "use 'Never' or 'OnFailure'"),
    (f"{POD} restartPolicy", "OnFailure", "'OnFailure' does not go with podFailurePolicy"),
    (f"{POD} dnsPolicy", "None", "dnsConfig.nameservers: missing"),
    (f"{POD} dnsConfig", {"nameservers": ["dns"]}, "'dns' is no IP address"),
    (f"{POD} dnsConfig", {"nameservers": ["1.1.1.1"] * 4}, "at most 3 are allowed"),
    (f"{POD} hostname", "a.b", "spec.template.spec.hostname: 'a.b' is no DNS label"),
    (f"{POD} nodeSelector", {"zone": "a b"}, "nodeSelector.zone: 'a b' is no value of a label"),
    (f"{POD} nodeSelector", {"gpu": True}, "nodeSelector.gpu: expected text, got True"),
    (f"{POD} imagePullSecrets", ["pull"], "imagePullSecrets[0]: expected an object, got 'pull'"),
    (f"{POD} terminationGracePeriodSeconds", -1, "-1 is out of range; it must be at least 0"),
    (f"{POD} activeDeadlineSeconds", 0, "spec.activeDeadlineSeconds: 0 is out of range"),
    (f"{POD} ephemeralContainers", [{"name": "debug"}], "not allowed in a template"),
    (f"{POD} priority", "high", "priority: expected a whole number, got 'high'"),
    (f"{POD} hostnetwork", True, "did you mean 'hostNetwork'?"),
    (f"{POD} readinessGates", [{"conditionType": "a b"}], "'a b' is no qualified name"),
    (f"{POD} schedulingGates", [{"name": "a"}, {"name": "a"}], "'a' is used twice"),
    (
        f"{POD} initContainers",
        [{"name": "node", "image": "i"}],
        "'node' is used twice; name each container differently",
    ),
    (
        f"{POD} initContainers",
        [{"name": "init", "image": "i", "lifecycle": {"preStop": {"sleep": {"seconds": 1}}}}],
        "an init container has none",
    ),
    # Containers.
    (f"{NODE} name", "No", "spec.template.spec.containers[No].name: 'No' is no DNS label"),
    (f"{NODE} image", GONE, "containers[node].image: missing"),
    (f"{NODE} image", "", "containers[node].image: missing"),
    (f"{NODE} image", "an image", "'an image' is no image"),
    (f"{NODE} command", "python3 pod.py", "command: expected a list, got 'python3 pod.py'"),
    (f"{NODE} command", ["sleep", 5], "command[1]: expected text, got 5"),
    (f"{NODE} workingDir", "tmp", "workingDir: 'tmp' is no absolute path; begin with '/'"),
    (f"{NODE} volumeMount", [], "did you mean 'volumeMounts'?"),
    (f"{NODE} ports 0 containerPort", 0, "containerPort: 0 is out of range; it must be between 1"),
    (f"{NODE} ports 0 containerPort", 65536, "65536 is out of range"),
    (f"{NODE} ports 0 containerPort", "http", "containerPort: expected a whole number"),
    (f"{NODE} ports 0 hostPort", 70000, "hostPort: 70000 is out of range"),
    (f"{NODE} ports 0 name", "a-port-name-too-long", "is no name of a port"),
    (f"{NODE} ports 0 name", "4251", "'4251' is no name of a port"),
    (f"{NODE} ports 0 name", "p--1", "'p--1' is no name of a port"),
    (f"{NODE} ports +", {"name": "p4251", "containerPort": 1}, "'p4251' is used twice"),
    (f"{NODE} env 0 name", "1A", "'1A' is no name of a variable"),
    (f"{NODE} env 0 name", GONE, "env[0].name: missing"),
    (f"{NODE} env 0 valueFrom", {}, "env[HOME].valueFrom: source is missing"),
    (f"{NODE} env 1 value", "x", "env[LAUNCHPAD_POD]: value and valueFrom are given"),
    (f"{NODE} env 1 valueFrom fieldRef fieldPath", "metadata.labels", "cannot be had here"),
    (f"{NODE} env 1 valueFrom fieldRef fieldPath", "spec.hostname", "cannot be had here"),
    (f"{NODE} env 1 valueFrom fieldRef fieldPath", "metadata.labels['a b']", "no qualified name"),
    (f"{NODE} env 1 valueFrom fieldRef", {}, "fieldRef.fieldPath: missing"),
    (f"{NODE} env 1 valueFrom", {"secretKeyRef": {"name": "s"}}, "secretKeyRef.key: missing"),
    (
        f"{NODE} env 1 valueFrom secretKeyRef",
        {"name": "s", "key": "k"},
        "fieldRef and secretKeyRef are given",
    ),
    (f"{NODE} envFrom", [{"prefix": "A"}], "envFrom[0]: source is missing"),
    (f"{NODE} envFrom", [{"prefix": "1", "secretRef": {"name": "s"}}], "no prefix of variables"),
    (f"{NODE} volumeMounts 0 name", "tpm", "'tpm' is no volume of the pod; did you mean 'tmp'?"),
    (f"{NODE} volumeMounts 0 mountPath", GONE, "volumeMounts[tmp].mountPath: missing"),
    (f"{NODE} volumeMounts 0 mountPath", "/a:b", "'/a:b' is no absolute path without ':'"),
    (f"{NODE} volumeMounts 0 mountPath", "/launchpad/trust", "'/launchpad/trust' is used twice"),
    (f"{NODE} volumeMounts 0 subPath", "../x", "'../x' leads out of the volume"),
    (f"{NODE} volumeMounts 0 subPath", "/x", "'/x' is absolute; give it relative"),
    (f"{NODE} volumeMounts 0 mountPropagation", "Bidirectional", "needs a privileged container"),
    (f"{NODE} volumeMounts 0 recursiveReadOnly", "Enabled", "needs readOnly: true"),
    (f"{NODE} volumeDevices", [{"name": "tmp", "devicePath": "/dev/x"}], "is no claim"),
    (f"{NODE} livenessProbe", {}, "livenessProbe: handler is missing"),
    (f"{NODE} livenessProbe", {**HTTP, "exec": {"command": ["x"]}}, "exec and httpGet are given"),
    (f"{NODE} livenessProbe", {"exec": {"command": []}}, "exec.command: missing"),
    (f"{NODE} livenessProbe", {**HTTP, "successThreshold": 2}, "successThreshold: must be 1 here"),
    (f"{NODE} livenessProbe", {**HTTP, "periodSeconds": -1}, "periodSeconds: -1 is out of range"),
    (f"{NODE} livenessProbe", {"httpGet": {"port": 0}}, "httpGet.port: 0 is out of range"),
    (f"{NODE} livenessProbe", {"httpGet": {"port": 1.5}}, "expected a number or a name, got 1.5"),
    (f"{NODE} livenessProbe", {"grpc": {"port": 0}}, "grpc.port: 0 is out of range"),
    (f"{NODE} readinessProbe", {**HTTP, "terminationGracePeriodSeconds": 5}, "not allowed here"),
    (f"{NODE} lifecycle", {"preStop": {}}, "lifecycle.preStop: handler is missing"),
    (f"{NODE} lifecycle preStop sleep seconds", 16, "is longer than terminationGracePeriodSeconds"),
    # Resources.
    (
        f"{NODE} resources limits memory",
        "12XB",
        "Job run-actor: spec.template.spec.containers[node].resources.limits.memory: '12XB' is no",
    ),
    (f"{NODE} resources limits cpu", "-1", "'-1' is negative"),
    (f"{NODE} resources limits cpu", "1 ", "'1 ' is no quantity"),
    (f"{NODE} resources limits cpu", True, "limits.cpu: expected text, got True"),
    (f"{NODE} resources requests cpu", "2001m", "'2001m' is above limits, '2'"),
    (f"{NODE} resources requests memory", "1Gi", "'1Gi' is above limits, '0.5Gi'"),
    (f"{NODE} resources requests memory", "1e9", "'1e9' is above limits"),
    (f"{NODE} resources limits", {"nvidia.com/gpu": "500m"}, "nvidia.com/gpu cannot be shared"),
    (f"{NODE} resources limits nvidia.com/gpu", 2, "must be equal to limits"),
    (f"{NODE} resources limits nvidia.com/gpu", GONE, "must be equal to limits"),
    (f"{NODE} resources limits gpu", 1, "unknown resource; known are cpu, memory"),
    (f"{NODE} resources limits mem", "1Gi", "limits.mem: unknown resource"),
    (f"{NODE} resources limits requests.a.com/b", 1, "begins with 'requests.'"),
    (f"{NODE} resources", {"limits": {"hugepages-2Mi": "4Mi"}}, "huge pages need cpu or memory"),
    (f"{NODE} resources claims", [{"name": "x"}], "'x' is not among resourceClaims"),
    (f"{POD} resourceClaims", [{"name": "x"}], "resourceClaims[x]: source is missing"),
    # Security.
    (f"{CONTEXT} runAsUser", 0, "0 is root, which runAsNonRoot: true forbids"),
    (f"{POD} securityContext runAsUser", 0, "0 is root, which runAsNonRoot: true forbids"),
    (f"{POD} securityContext runAsUser", -1, "runAsUser: -1 is out of range"),
    (f"{POD} securityContext runAsUser", "root", "runAsUser: expected a whole number"),
    (f"{POD} securityContext supplementalGroups", [-5], "supplementalGroups[0]: -5 is out of"),
    (f"{POD} securityContext sysctls", [{"name": "A", "value": "1"}], "'A' is no name of a sysctl"),
    (f"{POD} securityContext seccompProfile type", "Localhost", "localhostProfile: missing"),
    (f"{POD} securityContext seccompProfile localhostProfile", "x", "only type Localhost has it"),
    (f"{POD} securityContext seccompProfile", {}, "seccompProfile.type: missing"),
    (f"{POD} securityContext privileged", True, "securityContext: unknown field 'privileged'"),
    (f"{CONTEXT} privileged", True, "does not go with allowPrivilegeEscalation: false"),
    (f"{CONTEXT} capabilities add", ["CAP_SYS_ADMIN"], "CAP_SYS_ADMIN does not go with"),
    (f"{CONTEXT} capabilities add", ["net admin"], "'net admin' is no capability"),
    # Volumes.
    (f"{VOLUMES} 0", {"emptyDir": {}}, "volumes[0].name: missing"),
    (f"{VOLUMES} +", {"name": "tmp", "emptyDir": {}}, "'tmp' is used twice"),
    (f"{VOLUMES} +", {"name": "x"}, "volumes[x]: source is missing"),
    (
        f"{VOLUMES} +",
        {"name": "x", "emptyDir": {}, "nfs": {"server": "s", "path": "/"}},
        "emptyDir and nfs are given; a volume has only one source",
    ),
    (f"{VOLUMES} +", {"name": "x", "emptydir": {}}, "did you mean 'emptyDir'?"),
    (f"{VOLUMES} 0 emptyDir", {"medium": "memory"}, "'memory' is no medium"),
    (f"{VOLUMES} 1 secret", {}, "volumes[trust].secret.secretName: missing"),
    (f"{VOLUMES} 1 secret", {"name": "s"}, "unknown field 'name'"),
    (f"{VOLUMES} 1 secret defaultMode", 0o1000, "it must be between 0o0 and 0o777"),
    (f"{VOLUMES} 1 secret defaultMode", "0440", "defaultMode: expected a whole number"),
    (f"{VOLUMES} 1 secret items", [{"key": "a"}], "items[0].path: missing"),
    (f"{VOLUMES} 1 secret items", [{"key": "a", "path": "../b"}], "leads out of the volume"),
    (f"{VOLUMES} 1 secret items", [{"key": "a b", "path": "b"}], "'a b' is no key"),
    (
        f"{VOLUMES} 1 secret items",
        [{"key": "a", "path": "b"}, {"key": "c", "path": "b"}],
        "'b' is used twice; give each file its own path",
    ),
    (f"{VOLUMES} +", {"name": "x", "hostPath": {}}, "hostPath.path: missing"),
    (f"{VOLUMES} +", {"name": "x", "hostPath": {"path": "/a/.."}}, "must not have '..'"),
    (f"{VOLUMES} +", {"name": "x", "persistentVolumeClaim": {}}, "claimName: missing"),
    (f"{VOLUMES} +", {"name": "x", "projected": {"sources": [{}]}}, "sources[0]: source is"),
    (
        f"{VOLUMES} +",
        {"name": "x", "downwardAPI": {"items": [{"path": "seen"}]}},
        "downwardAPI.items[0]: source is missing",
    ),
    (
        f"{VOLUMES} +",
        {
            "name": "x",
            "downwardAPI": {"items": [{"path": "seen", "fieldRef": {"fieldPath": "status.podIP"}}]},
        },
        "'status.podIP' cannot be had here",
    ),
    (
        f"{VOLUMES} +",
        {
            "name": "x",
            "projected": {
                "sources": [{"serviceAccountToken": {"path": "t", "expirationSeconds": 60}}]
            },
        },
        "expirationSeconds: 60 is out of range",
    ),
    # Scheduling.
    (f"{POD} tolerations", [{"value": "a"}], "must be 'Exists' where no key is given"),
    (
        f"{POD} tolerations",
        [{"key": "a", "operator": "Exists", "value": "b"}],
        "operator Exists takes none",
    ),
    (
        f"{POD} tolerations",
        [{"key": "a", "effect": "NoSchedule", "tolerationSeconds": 5}],
        "must be 'NoExecute' where tolerationSeconds is given",
    ),
    (
        f"{POD} topologySpreadConstraints",
        [{"maxSkew": 0, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}],
        "maxSkew: 0 is out of range",
    ),
    (
        f"{POD} topologySpreadConstraints",
        [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}] * 2,
        "two have the same topologyKey",
    ),
    (
        f"{AFFINITY} podAffinity {REQUIRED} + labelSelector",
        {},
        f"podAffinity.{REQUIRED}[0].topologyKey: missing",
    ),
    (
        f"{AFFINITY} podAffinity {PREFERRED}",
        [{"weight": 101, "podAffinityTerm": {"topologyKey": "zone"}}],
        "weight: 101 is out of range; it must be between 1 and 100",
    ),
    (
        f"{AFFINITY} podAntiAffinity {REQUIRED}",
        [
            {
                "topologyKey": "zone",
                "labelSelector": {"matchExpressions": [{"key": "a", "operator": "In"}]},
            }
        ],
        "values: missing; operator In needs at least one",
    ),
    (
        f"{AFFINITY} nodeAffinity {REQUIRED} nodeSelectorTerms + matchExpressions",
        [{"key": "a", "operator": "In", "values": ["b c"]}],
        "values[0]: 'b c' is no value of a label",
    ),
    (f"{AFFINITY} nodeAffinity {REQUIRED} nodeSelectorTerms", [], "nodeSelectorTerms: missing"),
    (
        f"{AFFINITY} nodeAffinity {REQUIRED} nodeSelectorTerms + matchExpressions",
        [{"key": "a", "operator": "Gt", "values": ["x"]}],
        "operator Gt takes one whole number",
    ),
    (
        f"{AFFINITY} nodeAffinity {PREFERRED}",
        [{"weight": 1, "preference": {"matchFields": [{"key": "a", "operator": "In"}]}}],
        "only metadata.name with one value is allowed",
    ),
    # What is rarely used.
    (f"{POD} securityContext seLinuxChangePolicy", "x", "seLinuxChangePolicy: 'x' is unknown"),
    (f"{POD} securityContext supplementalGroupsPolicy", "x", "GroupsPolicy: 'x' is unknown"),
    (f"{POD} topologySpreadConstraints", [{"minDomains": 2}], "needs whenUnsatisfiable"),
    (f"{POD} topologySpreadConstraints", [{"matchLabelKeys": ["a"]}], "needs a labelSelector"),
    (f"{POD} nodeSelector", {"a b": "c"}, "nodeSelector['a b']: 'a b' is no qualified name"),
    (f"{POD} dnsConfig", {"searches": ["a.b"] * 33}, "at most 32"),
    (f"{NODE} envFrom", [{"secretRef": {"name": "A"}}], "secretRef.name: 'A' is no DNS name"),
    (f"{NODE} lifecycle", {"preStop": {"httpGet": {"port": 0}}}, "httpGet.port: 0 is out of"),
    (f"{NODE} lifecycle", {"preStop": {"sleep": {"seconds": 0}}}, "seconds: 0 is out of range"),
    (
        f"{NODE} lifecycle preStop httpGet",
        {"port": 1, "scheme": "ftp"},
        "preStop.httpGet.scheme: 'ftp' is unknown",
    ),
    (f"{NODE} ports 0 hostIP", "x", "hostIP: 'x' is no IP address"),
    (f"{NODE} resizePolicy", [{"resourceName": "gpu"}], "resourceName: 'gpu' is unknown"),
    (f"{NODE} resizePolicy", [{"restartPolicy": "x"}], "restartPolicy: 'x' is unknown"),
    (f"{NODE} restartPolicy", "Sometimes", "restartPolicy: 'Sometimes' is unknown"),
    (f"{CONTEXT} runAsGroup", -1, "runAsGroup: -1 is out of range"),
    (f"{NODE} volumeMounts 0", {"subPath": "a", "subPathExpr": "b"}, "not go with subPath"),
    (f"{NODE} livenessProbe", {**HTTP, "failureThreshold": -1}, "failureThreshold: -1 is out of"),
    (
        f"{NODE} livenessProbe",
        {**HTTP, "terminationGracePeriodSeconds": 0},
        "livenessProbe.terminationGracePeriodSeconds: 0 is out of range",
    ),
    (f"{VOLUMES} 1 secret items", [{"key": "a", "path": "b", "mode": 512}], "mode: 512 is out"),
    (f"{VOLUMES} +", {"name": "x", "csi": {"driver": "A"}}, "'A' is no name of a driver"),
    (f"{VOLUMES} +", {"name": "x", "image": {"reference": "a b"}}, "'a b' is no image"),
    (
        f"{VOLUMES} +",
        {"name": "x", "downwardAPI": {"items": [{"path": "/a"}]}},
        "downwardAPI.items[0].path: '/a' is absolute",
    ),
    (
        f"{VOLUMES} +",
        {"name": "x", "downwardAPI": {"items": [{"path": "a", "mode": -1}]}},
        "downwardAPI.items[0].mode: -1 is out of range",
    ),
    *(
        (f"{VOLUMES} +", {"name": "x", "projected": {"sources": [source]}}, message)
        for source, message in (
            ({"secret": {"name": "A"}}, "secret.name: 'A' is no DNS name"),
            ({"secret": {"items": [{"key": "a b"}]}}, "items[0].key: 'a b' is no key"),
            ({"secret": {"items": [{"path": "../a"}]}}, "'../a' leads out of the volume"),
            ({"configMap": {"items": [{"mode": 512}]}}, "items[0].mode: 512 is out of range"),
            ({"downwardAPI": {"items": [{"path": "/a"}]}}, "items[0].path: '/a' is absolute"),
            ({"downwardAPI": {"items": [{"mode": 512}]}}, "items[0].mode: 512 is out of range"),
            ({"serviceAccountToken": {"path": "/a"}}, "'/a' is absolute"),
        )
    ),
    *(
        (
            f"{VOLUMES} +",
            {"name": "x", "ephemeral": {"volumeClaimTemplate": {"spec": spec}}},
            message,
        )
        for spec, message in (
            ({"resources": {"requests": {"storage": "1TB"}}}, "storage: '1TB' is no quantity"),
            ({"storageClassName": "A"}, "storageClassName: 'A' is no DNS name"),
            ({"volumeMode": "File"}, "volumeMode: 'File' is unknown"),
        )
    ),
]

OTHER_TABLE: Sequence[tuple[str, str, Any, str]] = [
    ("Service", "metadata name", "4run", "'4run' is no name for a Service"),
    ("Service", "metadata name", "run.actor", "'run.actor' is no name for a Service"),
    ("Service", "spec type", "Headless", "spec.type: 'Headless' is unknown"),
    ("Service", "spec type", "NodePort", "'None' does not go with type NodePort"),
    (
        "Service",
        "spec",
        {"type": "ExternalName", "externalName": "a.b", "clusterIP": "10.0.0.7"},
        "clusterIP: '10.0.0.7' does not go with type ExternalName",
    ),
    ("Service", "spec clusterIP", "none", "'none' is no IP address"),
    ("Service", "spec ports 0 port", 0, "ports[p4251].port: 0 is out of range"),
    ("Service", "spec ports 0 name", GONE, "each needs a name"),
    ("Service", "spec ports 0 name", "p4252", "'p4252' is used twice"),
    ("Service", "spec ports 0 port", 4252, "4252 is used twice"),
    ("Service", "spec ports 0 protocol", "HTTP", "protocol: 'HTTP' is unknown"),
    ("Service", "spec ports 0 targetPort", "a b", "'a b' is no name of a port"),
    ("Service", "spec ports 0 nodePort", 30000, "only types NodePort and LoadBalancer have it"),
    ("Service", "spec selector", {"a b": "c"}, "'a b' is no qualified name"),
    ("Service", "spec sessionAffinity", "Client", "sessionAffinity: 'Client' is unknown"),
    ("Service", "spec publishNotReadyAdresses", True, "mean 'publishNotReadyAddresses'?"),
    ("Service", "spec ports 0 name", "a_b", "'a_b' is no DNS label"),
    ("Service", "spec ports 0 nodePort", 65536, "nodePort: 65536 is out of range"),
    ("Service", "spec externalIPs", ["x"], "externalIPs[0]: 'x' is no IP address"),
    ("Service", "spec externalIPs", ["fe80::1%eth0"], "externalIPs[0]: 'fe80::1%eth0' is no IP"),
    ("Service", "spec externalName", "A", "externalName: 'A' is no DNS name"),
    ("Service", "spec externalTrafficPolicy", "x", "externalTrafficPolicy: 'x' is unknown"),
    ("Service", "spec externalTrafficPolicy", "Local", "only types NodePort and LoadBalancer"),
    ("Service", "spec internalTrafficPolicy", "x", "internalTrafficPolicy: 'x' is unknown"),
    ("Service", "spec ipFamilies", ["x"], "ipFamilies[0]: 'x' is unknown"),
    ("Service", "spec ipFamilyPolicy", "x", "ipFamilyPolicy: 'x' is unknown"),
    ("Service", "spec", {"type": "ExternalName"}, "externalName: missing"),
    ("Service", "spec", {"type": "ClusterIP"}, "ports: missing; only a headless Service"),
    ("Secret", "data authority.pem", "not base64", "'not base64' is no base64"),
    ("Secret", "data authority.pem", "YQ", "'YQ' is no base64"),
    ("Secret", "data authority.pem", 5, ", got 5"),
    ("Secret", "data a/b", "", "'a/b' is no key"),
    ("Secret", "data", {"": ""}, "'' is no key"),
    ("Secret", "data ..b", "", "'..b' is no key"),
    ("Secret", "stringData", {"big": "x" * 2**20}, "at most 1048576 are allowed"),
    ("Secret", "type", "kubernetes.io/tls", "has no 'tls.crt'"),
    ("Secret", "metadata name", "Trust", "'Trust' is no DNS name"),
    ("NetworkPolicy", "spec ingress 0 from 0", {}, "ingress[0].from[0]: empty"),
    ("NetworkPolicy", "spec ingress 0 from 0 ipBlock", {"cidr": "::/0"}, "not go with selectors"),
    ("NetworkPolicy", "spec ingress 0 from 0", {"ipBlock": {"cidr": "1"}}, "no block of addresses"),
    (
        "NetworkPolicy",
        "spec ingress 0 from 0",
        {"ipBlock": {"cidr": "10.0.0.0/255.0.0.0"}},
        "'10.0.0.0/255.0.0.0' is no block of addresses",
    ),
    (
        "NetworkPolicy",
        "spec ingress 0 from 0",
        {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["11.0.0.0/16"]}},
        "'11.0.0.0/16' is no part of 10.0.0.0/8",
    ),
    ("NetworkPolicy", "spec ingress 0 ports", [{"port": 5, "endPort": 4}], "4 is below port, 5"),
    ("NetworkPolicy", "spec ingress 0 ports", [{"port": "a", "endPort": 4}], "needs a port that"),
    (
        "NetworkPolicy",
        "spec podSelector matchExpressions",
        [{"key": "a", "operator": "Exists", "values": ["b"]}],
        "operator Exists takes none",
    ),
    (
        "NetworkPolicy",
        "spec podSelector matchExpressions",
        [{"key": "a", "operator": "Is", "values": ["b"]}],
        "operator: 'Is' is unknown",
    ),
    ("JobSet", "metadata name", "Run", "'Run' is no"),
    ("JobSet", "metadata name", "r" * 48, "as the last pod is called, is no DNS label"),
    ("JobSet", "spec successPolicy", {"targetReplicatedJobs": ["act"]}, "mean 'actor'?"),
    ("JobSet", "spec", "x", "spec: expected an object, got 'x'"),
    ("JobSet", "spec replicatedJobs", "x", "spec.replicatedJobs: expected a list, got 'x'"),
    ("JobSet", "spec replicatedJobs +", 5, "spec.replicatedJobs[1]: expected an object, got 5"),
    ("JobSet", "spec replicatedJobs 0 replica", 1, "did you mean 'replicas'?"),
    ("JobSet", "spec replicatedJobs", [], "spec.replicatedJobs: missing"),
    ("JobSet", "spec replicatedJob", [], "did you mean 'replicatedJobs'?"),
    ("JobSet", "spec replicatedJobs 0 name", "Actor", "'Actor' is no name"),
    ("JobSet", "spec replicatedJobs 0 replicas", -1, "replicas: -1 is out of range"),
    ("JobSet", "spec replicatedJobs 0 template", GONE, "template: missing; give it"),
    (
        "JobSet",
        "spec replicatedJobs 0 template spec template spec containers 0 image",
        "",
        "replicatedJobs[actor].template.spec.template.spec.containers[node].image: missing",
    ),
    ("JobSet", "spec replicatedJobs 0 template spec paralelism", 1, "did you mean 'parallelism'?"),
    ("JobSet", "kind", "Pod", "kind: 'Pod' is unknown; known are"),
    ("JobSet", "kind", GONE, "kind: missing"),
]

TABLE = [*(("Job", *row) for row in JOB_TABLE), *OTHER_TABLE]
#: Where rows of Jobs belong; the first that fits.
PARTS = {CONTEXT: "security", NODE: "container", VOLUMES: "volumes", POD: "pod", "": "Job"}
TABLES: dict[str, list[tuple[str, str, Any, str]]] = {}
for row in TABLE:
    part = next(name for path, name in PARTS.items() if row[1].startswith(path))
    TABLES.setdefault(part if row[0] == "Job" else row[0], []).append(row)


@pytest.mark.parametrize("part", TABLES)
def test_what_is_refused(part: str) -> None:
    told = {
        (kind, path, expected): mistakes([changed(BASES[kind](), path, value)])
        for kind, path, value, expected in TABLES[part]
    }
    missed = {
        row: found for row, found in told.items() if not any(row[2] in each for each in found)
    }
    assert told
    assert missed == {}


def everything() -> dict[str, Any]:
    """A Job in which every field that we know of is right."""
    made: dict[str, Any] = json.loads(EVERYTHING)
    return made


def test_a_template_with_everything_set_passes() -> None:
    assert mistakes([everything()]) == []


def test_an_independent_validator_agrees_with_our_examples() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for each in (everything(), *(base() for kind, base in BASES.items() if kind != "JobSet")):
        kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)


def test_quantities_are_read_as_kubernetes_reads_them() -> None:
    def found(quantity: object) -> list[str]:
        path = f"{NODE} resources"
        return mistakes([changed(job(), path, {"requests": {"memory": quantity}})])

    right = ["0", "+1", "1.", ".5", "1.5", "100m", "5n", "1k", "1M", "1E", "1Ei", "1e3", "1E-3"]
    assert [each for each in (*right, 2, 0.5) if found(each)] == []
    for wrong in ("", " ", "1K", "1 Gi", "Gi", "1kk", "--1", "1e", "0x1", "1GB"):
        (mistake,) = found(wrong)
        assert "is no quantity" in mistake


def test_all_mistakes_are_told_at_once_object_by_object() -> None:
    first = changed(job(), f"{NODE} image", "")
    changed(first, "spec completions", -1)
    changed(first, f"{NODE} resources limits memory", "12XB")
    found = mistakes([first, changed(service(), "spec type", "x")])
    assert [each.split(":")[0] for each in found] == ["Job run-actor"] * 3 + ["Service run-actor"]
    assert found == mistakes([first, changed(service(), "spec type", "x")])


def test_two_objects_of_one_kind_and_name_are_refused() -> None:
    assert mistakes([base() for base in BASES.values()]) == []
    (found,) = mistakes([job(), service(), job()])
    assert found == "Job run-actor: metadata.name: given to two objects; give each its own"


def test_a_request_for_more_than_etcd_stores_is_refused() -> None:
    values = [{"name": "BIG", "value": "x" * 500_000}] * 4
    (found,) = mistakes([changed(job(), f"{NODE} env", values)])
    assert "bytes; an API server stores at most 1572864" in found


def test_names_of_jobs_may_be_as_long_as_their_pods_can_bear() -> None:
    assert mistakes([changed(job(), "metadata name", "a" * 61)]) == []
    assert mistakes([changed(job_set(), "metadata name", "r" * 47)]) == []


APP_ARMOR = f"{CONTEXT} appArmorProfile"
FIELD = f"{NODE} env 1 valueFrom fieldRef fieldPath"


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        # ':' is the runtime's separator only where it mounts something.
        ("Job", f"{NODE} workingDir", "/data:1"),
        ("Job", f"{VOLUMES} 0", {"name": "tmp", "nfs": {"server": "s", "path": "/a:b"}}),
        # The name of a loaded AppArmor profile is often a path; that of a seccomp profile is one.
        ("Job", APP_ARMOR, {"type": "Localhost", "localhostProfile": "/usr/bin/node"}),
        ("Job", f"{CONTEXT} capabilities add", ["SYS_ADMIN"]),
        ("Job", FIELD, "metadata.annotations['Lab.example.com/x']"),
        (
            "Job",
            f"{AFFINITY} nodeAffinity",
            {
                PREFERRED: [
                    {
                        "weight": 1,
                        "preference": {
                            "matchExpressions": [{"key": "a", "operator": "In", "values": ["b c"]}]
                        },
                    }
                ]
            },
        ),
        ("Service", "spec", {"type": "ExternalName", "externalName": "db.example.com."}),
        (
            "Service",
            "spec",
            {
                "externalIPs": ["10.0.0.7"],
                "externalTrafficPolicy": "Local",
                "ports": [{"port": 4250}],
            },
        ),
    ],
)
def test_what_a_server_lets_pass_is_no_mistake(kind: str, path: str, value: Any) -> None:
    assert mistakes([changed(BASES[kind](), path, value)]) == []


def test_null_means_absent() -> None:
    absent = changed(job(), f"{NODE} imagePullPolicy", None)
    assert mistakes([changed(absent, f"{POD} tolerations", None)]) == []


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"hostPID": True, "shareProcessNamespace": True}, "does not go with hostPID"),
        ({"hostIPC": True, "hostUsers": False}, "does not go with hostUsers: false"),
        (
            {"hostNetwork": True, "securityContext": {"sysctls": [{"name": "net.a"}]}},
            "'net.a' does not go with hostNetwork",
        ),
        (
            {"hostIPC": True, "securityContext": {"sysctls": [{"name": "kernel.shmmax"}]}},
            "'kernel.shmmax' does not go with hostIPC",
        ),
        (
            {
                "hostNetwork": True,
                "containers": [
                    {"name": "node", "image": "i", "ports": [{"containerPort": 1, "hostPort": 2}]}
                ],
            },
            "with hostNetwork it must be containerPort, 1",
        ),
        (
            {
                "containers": [
                    {"name": name, "image": "i", "ports": [{"containerPort": 1, "hostPort": 2}]}
                    for name in ("node", "other")
                ],
            },
            "containers[other].ports[0].hostPort: 2 is used twice",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(fields: dict[str, Any], expected: str) -> None:
    pod = job()
    for name, value in fields.items():
        changed(pod, f"{POD} {name}", value)
    found = mistakes([pod])
    assert [each for each in found if expected in each], found


def test_at_most_one_owner_controls_an_object() -> None:
    owner = {"apiVersion": "v1", "kind": "Job", "name": "a", "uid": "b", "controller": True}
    assert mistakes([changed(service(), "metadata ownerReferences", [owner])]) == []
    (found,) = mistakes([changed(service(), "metadata ownerReferences", [owner, owner])])
    assert "at most one may control it" in found


def test_a_name_that_only_its_pods_labels_cannot_hold_is_refused() -> None:
    (found,) = mistakes([changed(everything(), "metadata name", "a" * 64)])
    assert "a Job's has at most 63" in found


def test_without_the_official_client_the_other_rules_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong = changed(changed(job(), "spec nonsense", 1), f"{NODE} image", "")
    assert len(mistakes([wrong])) == 2
    monkeypatch.setitem(sys.modules, "kubernetes.client", None)
    assert mistakes([wrong]) == [
        "Job run-actor: spec.template.spec.containers[node].image: missing; give it"
    ]


def test_what_does_not_know_a_field_is_named() -> None:
    package = f"the package kubernetes {metadata.version('kubernetes')} does not know it"
    (found,) = mistakes([changed(job(), f"{POD} brandNewField", 1)])
    assert "unknown field 'brandNewField'; " in found
    assert found.endswith(f" ({package}; a newer one may)")
    (found,) = mistakes([changed(job(), f"{POD} node_selector", {})])
    assert found.endswith("unknown field 'node_selector'; did you mean 'nodeSelector'?")


def test_what_is_wrong_with_pods_is_said_of_their_group_and_of_no_object_yet_to_be_named() -> None:
    wrong = PodOptions(image="i", patch={"spec": {"priorityClassName": "A B"}})
    executables = [
        Executable(label, 0, FrozenWork(b"", ()), (), Resources(), "a node") for label in "ab"
    ]
    found = KubernetesLauncher("i", pods={"b": wrong, "supervisor": wrong}).mistakes(executables)
    assert [each.partition(": ")[0] for each in found] == [
        "Job of the supervisor",
        "Job of group 'b'",
    ]
    (found_in_all,) = KubernetesLauncher("i", pods={"b": wrong}, jobset=True).mistakes(executables)
    assert found_in_all.startswith("JobSet of the run: spec.replicatedJobs[b].")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all values in an object."""
    inner = value.items() if isinstance(value, dict) else ()
    inner = enumerate(value) if isinstance(value, list) else inner
    return [path, *(each for key, part in inner for each in places(part, (*path, key)))]


WHOLE = [everything(), *(base() for base in BASES.values())]
PLACES = [(index, path) for index, whole in enumerate(WHOLE) for path in places(whole) if path]


def with_value(place: tuple[int, tuple[Any, ...]], value: Any) -> dict[str, Any]:
    """An object that holds this value in one place."""
    index, (*parents, last) = place
    whole = copy.deepcopy(WHOLE[index])
    at: Any = whole
    for key in parents:
        at = at[key]
    at[last] = value
    return whole


@settings(max_examples=30)
@given(place=st.sampled_from(PLACES), value=JSON)
def test_any_json_in_any_place_is_judged_without_an_error(
    place: tuple[int, tuple[Any, ...]], value: Any
) -> None:
    assert all(isinstance(each, str) for each in mistakes([with_value(place, value)]))


#: Ends of fields that may hold any text, and of those that may hold a number in place of text.
FREE = (
    *("annotations *", "args *", "command *", "env * value", "path", "Path", "subPathExpr"),
    *("httpHeaders * name", "httpHeaders * value", "grpc service", "localhostProfile"),
    *("dnsConfig options * name", "dnsConfig options * value", "sysctls * value", "nfs server"),
    *("matchFields * values *", "matchLabelKeys *", "volumeAttributes *", "containerName"),
)
NUMBER_OR_TEXT = ("requests *", "limits *", "overhead *", "divisor", "sizeLimit", "port")
WRONG: Mapping[type, Any] = {str: 5, int: "x", float: "x", bool: "yes", list: {}, dict: "x"}


def ends(place: tuple[int, tuple[Any, ...]], patterns: Sequence[str]) -> bool:
    path = " ".join(map(str, place[1]))
    return any(fnmatch.fnmatch(path, f"*{pattern}") for pattern in patterns)


@pytest.mark.slow
def test_every_field_has_its_type_and_its_words() -> None:
    taken = []
    for index, path in PLACES:
        value: Any = WHOLE[index]
        for key in path:
            value = value[key]
        place = (index, path)
        if not (ends(place, NUMBER_OR_TEXT) and type(value) is not bool):
            taken += [place] * (not mistakes([with_value(place, WRONG[type(value)])]))
        if isinstance(value, str) and not ends(place, FREE):
            taken += [place] * (not mistakes([with_value(place, "No such word!")]))
    # JobSet is not Kubernetes' own.
    assert [path for _, path in taken] == [("spec", "network", "publishNotReadyAddresses")]


@settings(max_examples=50)
@given(st.lists(JSON, max_size=3))
def test_any_json_as_an_object_is_refused_without_an_error(values: list[Any]) -> None:
    found = mistakes(values)
    assert len(found) >= len(values)
