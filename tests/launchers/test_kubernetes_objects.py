"""What the cluster is asked for, held against what Kubernetes and its standards say."""

import base64
import contextlib
import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

import launchpad_lite as lp
from launchers.kubernetes import KubernetesLauncher
from launchers.kubernetes._names import Names
from launchers.kubernetes._objects import Cluster, Group, Manifests, owned
from launchers.kubernetes._order import PackedRun, WorkVolume
from launchers.kubernetes._pods import PodOptions, Volume
from launchpad_lite import __version__
from launchpad_lite.graph.freeze import FrozenWork
from launchpad_lite.launching import Address, Executable, LaunchOptions, Resources, RestartPolicy

Objects = list[dict[str, Any]]

#: The oldest release that knows backoffLimitPerIndex and podReplacementPolicy without feature gates;
#: kubernetes-validate knows older ones as well, which cannot have our Jobs.
OLDEST = "1.29.0"
LABELS = {
    "app.kubernetes.io/name": "program",
    "app.kubernetes.io/managed-by": "launchpad-lite",
    "launchpad-lite/run": "demo",
}
PLAIN = PodOptions(image="python:3.12-slim")
#: Names of fields that mean something to a merge, or to us.
FIELDS = ("spec", "patch", "securityContext", "image", "mount", "emptyDir", "tolerations")
MERGED = ("containers", "volumes", "env", "ports", "volumeMounts")
NAMING = ("name", "node", "mountPath", "containerPort", "$patch")
AFFINITY = ("affinity", "podAffinity", "requiredDuringSchedulingIgnoredDuringExecution")
KEYS = st.sampled_from([*FIELDS, *MERGED, *NAMING, *AFFINITY])
FILES = PackedRun(
    {"authority.pem": b"authority", "pod.py": b"print()"},
    {"begin.py": b"print()", "order.json": b"{}"},
    b"work",
)


def executables(label: str, count: int, ports: int = 0, **changes: Any) -> tuple[Executable, ...]:
    settings: dict[str, Any] = {"resources": Resources(), "description": f"CourierNode({label})"}
    return tuple(
        Executable(
            label,
            replica,
            FrozenWork(b"", ()),
            tuple(Address("courier", 4251 + port) for port in range(ports)),
            **(settings | changes),
        )
        for replica in range(count)
    )


def group(label: str, count: int = 1, pod: PodOptions = PLAIN, **changes: Any) -> Group:
    return Group(label, executables(label, count, **changes), pod)


def unlike(label: str, pod: PodOptions = PLAIN, **changes: Any) -> Group:
    """Returns two nodes, of which the second one differs."""
    first, second = executables(label, 2)
    return Group(label, (first, dataclasses.replace(second, **changes)), pod)


def made(
    *groups: Group,
    supervisor: PodOptions = PLAIN,
    files: PackedRun = FILES,
    suspended: bool = False,
    **changes: Any,
) -> Objects:
    labels = [each.label for each in groups]
    names = Names.of("program", labels, "demo", jobset=changes.pop("jobset", False))
    cluster = Cluster(names, **changes)
    manifests = Manifests(cluster, groups, supervisor, "program", files)
    if mistakes := manifests.mistakes():
        raise ValueError("; ".join(mistakes))
    return manifests.objects(suspended=suspended)


def find(objects: Objects, kind: str, name: str) -> dict[str, Any]:
    (found,) = [
        each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name)
    ]
    return found


def job_spec(objects: Objects, name: str) -> dict[str, Any]:
    spec: dict[str, Any] = find(objects, "Job", name)["spec"]
    return spec


def pod_of(*groups: Group, **changes: Any) -> dict[str, Any]:
    objects = made(*groups, **changes)
    template: dict[str, Any] = job_spec(objects, f"demo-{groups[0].label}")["template"]
    return template


# All of it


def everything() -> Objects:
    pod = PodOptions(
        image="registry.example.org/lab/actor:7",
        pull_policy="Always",
        pull_secrets=["registry"],
        service_account="researcher",
        node_selector={"pool": "gpu"},
        tolerations=[{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
        priority_class="high",
        env={"WANDB_API_KEY": {"secretKeyRef": {"name": "wandb", "key": "token"}}, "A": "1"},
        volumes={
            "data": Volume("/data", {"persistentVolumeClaim": {"claimName": "d"}}, read_only=True),
            "scratch": {"emptyDir": {"sizeLimit": "20Gi"}, "mount": "/tmp"},
        },
        run_as_user=1000,
        python="/opt/venv/bin/python",
        patch={
            "metadata": {"annotations": {"example.org/team": "rl"}},
            "spec": {
                "runtimeClassName": "gvisor",
                "containers": [{"name": "node", "env": [{"name": "A", "value": "2"}]}],
            },
        },
    )
    learner = group(
        "learner",
        pod=pod,
        ports=2,
        resources=Resources(cpu=7.5, ram_gib=16, gpu=2),
        restart=RestartPolicy(max_restarts=5, window_s=math.inf),
    )
    actors = group(
        "Actor",
        2,
        resources=Resources(cpu=2, ram_gib=0.25),
        restart=RestartPolicy("always"),
        together="5d41402a",
    )
    supervisor = {"name": "supervisor", "resources": {"limits": {"memory": "4Gi"}}}
    return made(
        learner,
        actors,
        supervisor=dataclasses.replace(PLAIN, patch={"spec": {"containers": [supervisor]}}),
        files=dataclasses.replace(FILES, blob=bytes(200_000)),
        namespace="lab",
        notice_s=29.5,
        schedule_s=120,
        ttl_s=3600,
        max_run_s=86_400,
        suspended=True,
    )


def jobset_with_kueue() -> Objects:
    return made(
        group("actor", 3, ports=1, resources=Resources(gpu=1), restart=RestartPolicy()),
        files=dataclasses.replace(
            FILES, place=WorkVolume("/", {"persistentVolumeClaim": {"claimName": "work"}})
        ),
        jobset=True,
        queue="research",
        ttl_s=60,
        gpu_resource="amd.com/gpu",
    )


SHAPES = {"everything": everything, "jobset_with_kueue": jobset_with_kueue}


def test_each_option_of_pods_stands_in_its_field() -> None:
    spec = job_spec(everything(), "demo-learner")["template"]["spec"]
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert spec["serviceAccountName"] == "researcher"
    assert spec["nodeSelector"] == {"pool": "gpu"}
    assert spec["tolerations"][0]["key"] == "gpu"
    assert spec["priorityClassName"] == "high"
    assert spec["runtimeClassName"] == "gvisor"
    assert {spec["securityContext"][each] for each in ("runAsUser", "fsGroup")} == {1000}
    (node,) = spec["containers"]
    assert (node["image"], node["imagePullPolicy"]) == (
        "registry.example.org/lab/actor:7",
        "Always",
    )
    assert node["command"] == ["/opt/venv/bin/python", "/launchpad/trust/pod.py"]
    key = {"secretKeyRef": {"name": "wandb", "key": "token"}}
    assert {"name": "WANDB_API_KEY", "valueFrom": key} in node["env"]
    assert [each["value"] for each in node["env"] if each["name"] == "A"] == ["2"]
    mounts = {each["mountPath"]: each["name"] for each in node["volumeMounts"]}
    own = {"/dev/shm": "shm", "/launchpad/trust": "trust"}
    assert mounts == {**own, "/data": "data", "/tmp": "scratch"}
    assert {each["name"] for each in spec["volumes"]} == {*mounts.values()}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_input_gives_the_same_bytes(shape: str) -> None:
    assert json.dumps(SHAPES[shape]()) == json.dumps(SHAPES[shape]())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("release", [OLDEST, "newest"])
def test_objects_fit_the_schema_of_releases(shape: str, release: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    version = kubernetes_validate.latest_version() if release == "newest" else release
    checked = [each for each in SHAPES[shape]() if each["kind"] != "JobSet"]
    # JobSet is not Kubernetes' own; what is Kubernetes' in it are Jobs.
    for each in SHAPES[shape]()[0]["spec"].get("replicatedJobs", []):
        job = each["template"]
        metadata = {"name": each["name"], **job["metadata"]}
        checked.append({"apiVersion": "batch/v1", "kind": "Job", **job, "metadata": metadata})
    assert len(checked) >= 7
    for each in checked:
        kubernetes_validate.validate(each, version, strict=True)


def test_objects_of_the_documentation_fit_the_schema_of_releases() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    yaml = pytest.importorskip("yaml")
    page = (Path(__file__).parents[2] / "docs" / "kubernetes.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    shown = {each["kind"]: each for block in blocks for each in yaml.safe_load_all(block)}
    assert {*shown} == {"Role", "ServiceAccount", "RoleBinding", "Pod"}
    for each in shown.values():
        for version in (OLDEST, kubernetes_validate.latest_version()):
            kubernetes_validate.validate(each, version, strict=True)
    account = shown["ServiceAccount"]["metadata"]["name"]
    assert shown["Pod"]["spec"]["serviceAccountName"] == account
    assert [each["name"] for each in shown["RoleBinding"]["subjects"]] == [account]
    assert shown["RoleBinding"]["roleRef"]["name"] == shown["Role"]["metadata"]["name"]


def replicated(objects: Objects) -> Objects:
    """Returns the jobs in a JobSet."""
    return [each["template"] for each in objects[0]["spec"].get("replicatedJobs", [])]


def templates(objects: Objects) -> Objects:
    jobs = [each for each in objects if each["kind"] == "Job"] + replicated(objects)
    return [each["spec"]["template"] for each in jobs]


# The restricted Pod Security Standard:
# https://kubernetes.io/docs/concepts/security/pod-security-standards/


@pytest.mark.parametrize("shape", SHAPES)
def test_pods_pass_the_restricted_pod_security_standard(shape: str) -> None:
    pods = [each["spec"] for each in templates(SHAPES[shape]())]
    assert len(pods) >= 2
    for pod in pods:
        assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & {*pod}
        assert pod["automountServiceAccountToken"] is False
        for volume in pod["volumes"]:
            safe = {"downwardAPI", "emptyDir", "persistentVolumeClaim", "projected", "secret"}
            assert {*volume} <= {"name", *safe}
        user = pod["securityContext"].pop("runAsUser")
        assert user in (1000, 65532)
        assert pod["securityContext"] == {
            "runAsNonRoot": True,
            "runAsGroup": user,
            "fsGroup": user,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        (container,) = pod["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        }
        assert not any("hostPort" in port for port in container.get("ports", ()))
        assert not {"livenessProbe", "readinessProbe", "startupProbe"} & {*container}


# Jobs


def test_the_root_comes_first_and_owns_the_others() -> None:
    root, *others = made(group("producer", ports=1), group("consumer"))
    assert (root["kind"], root["metadata"]["name"]) == ("Job", "demo")
    created = {**root, "metadata": {**root["metadata"], "uid": "12-34"}}
    for each in others:
        assert "ownerReferences" not in each["metadata"]
        assert owned(each, created)["metadata"]["ownerReferences"] == [
            {"apiVersion": "batch/v1", "kind": "Job", "name": "demo", "uid": "12-34"}
        ]
        assert "ownerReferences" not in each["metadata"]


@pytest.mark.parametrize("shape", SHAPES)
def test_all_objects_and_pods_have_the_labels_of_the_run(shape: str) -> None:
    objects = SHAPES[shape]()
    for each in [*objects, *templates(objects), *replicated(objects)]:
        assert LABELS.items() <= each["metadata"]["labels"].items()
    if shape == "everything":
        assert {each["metadata"]["namespace"] for each in objects} == {"lab"}


@pytest.mark.parametrize(
    ("policy", "limit", "moves"),
    [
        (RestartPolicy("never"), 0, False),
        (RestartPolicy("never", window_s=math.inf), 0, False),
        (RestartPolicy("on_failure", max_restarts=7, window_s=math.inf), 7, True),
        (RestartPolicy("on_failure", max_restarts=7), 1000, True),
        (RestartPolicy("always", moves=False), 1000, False),
    ],
)
def test_a_restart_policy_becomes_that_of_the_jobs(
    policy: RestartPolicy, limit: int, moves: bool
) -> None:
    objects = made(group("actor", restart=policy))
    job, root = job_spec(objects, "demo-actor"), job_spec(objects, "demo")
    assert job["backoffLimitPerIndex"] == limit
    for spec, action in ((job, "FailIndex"), (root, "FailJob")):
        rules = spec["podFailurePolicy"]["rules"]
        assert [each["action"] for each in rules] == [action, "Ignore"][: 2 if moves else 1]
        assert rules[0]["onExitCodes"]["values"] == [1]
        assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert root["backoffLimit"] == (3 if moves else 0)
    assert stays_s(job) == stays_s(root) == ([30, 30] if moves else [])


def stays_s(job: dict[str, Any]) -> list[int]:
    """Returns how long pods stay on machines that are lost, where that is not as usual."""
    tolerations = job["template"]["spec"].get("tolerations", ())
    return [each["tolerationSeconds"] for each in tolerations]


def test_a_supervisor_is_repeated_only_if_all_nodes_may_be() -> None:
    objects = made(group("actor", restart=RestartPolicy()), group("learner"))
    root, actor, learner = (
        job_spec(objects, name) for name in ("demo", "demo-actor", "demo-learner")
    )
    assert root["backoffLimit"] == 0
    assert actor["backoffLimitPerIndex"] == 1000
    assert [*map(stays_s, (root, actor, learner))] == [[], [30, 30], []]


def test_what_users_say_of_lost_machines_stands() -> None:
    unreachable = {"key": "node.kubernetes.io/unreachable", "operator": "Exists"}
    pod = PodOptions(image="python:3.12-slim", tolerations=[unreachable])
    moving, still = (
        pod_of(group("actor", pod=pod, restart=RestartPolicy(when)))["spec"]["tolerations"]
        for when in ("on_failure", "never")
    )
    assert still == [unreachable]
    assert moving[0] == unreachable
    assert [each["key"] for each in moving[1:]] == ["node.kubernetes.io/not-ready"]


def waits_s(template: dict[str, Any]) -> float:
    """Returns how long a pod waits for the supervisor."""
    env = {each["name"]: each.get("value") for each in template["spec"]["containers"][0]["env"]}
    return float(env["LAUNCHPAD_WAIT_S"])


def test_only_pods_that_come_back_wait_for_a_supervisor_in_the_place_of_a_lost_one() -> None:
    groups = (group("actor", restart=RestartPolicy()), group("learner"))
    objects = made(*groups, schedule_s=100, launcher_silence_s=300, notice_s=-1)
    assert [*map(waits_s, templates(objects)[1:])] == [1000, 100]


@pytest.mark.parametrize(
    ("options", "restart", "wait_s"),
    [
        ({}, "never", 7),
        # It may need long to remove a supervisor.
        ({"launcher_silence_s": 200}, "on_failure", 812),
        ({"launcher_silence_s": 200, "detach": True}, "on_failure", 607),
        # Where a queue admits each Job by itself, one may come at any time.
        ({"queue": "research"}, "never", math.inf),
        ({"queue": "research", "jobset": True}, "never", 7),
    ],
)
def test_the_launcher_tells_pods_how_long_they_wait(
    options: dict[str, Any], restart: str, wait_s: float
) -> None:
    launcher = KubernetesLauncher("image:1", schedule_s=7, **options)
    program = lp.Program("program")
    program.add_node(lp.PyNode(print), label="actor")
    plan = lp.plan(program, launcher, restart=restart)
    _, _, objects = launcher._make(plan, LaunchOptions(notice_s=5), suspended=True)
    assert [*map(waits_s, templates(objects)[1:])] == [wait_s]


def test_pods_that_come_back_do_not_outlive_the_longest_time_of_the_run() -> None:
    def deadlines(**changes: Any) -> list[int | None]:
        objects = made(group("actor", restart=RestartPolicy()), notice_s=29, **changes)
        specs = (job_spec(objects, name) for name in ("demo", "demo-actor"))
        return [spec.get("activeDeadlineSeconds") for spec in specs]

    assert deadlines() == [None, None]
    # The supervisor has the notice, and then some, to end them in order.
    assert deadlines(max_run_s=500) == [500, 539]
    # Its own time may begin long after theirs.
    assert deadlines(max_run_s=500, queue="research") == [500, None]


def test_a_job_gives_each_node_what_its_most_lasting_one_needs() -> None:
    job = job_spec(made(unlike("actor", restart=RestartPolicy())), "demo-actor")
    assert job["backoffLimitPerIndex"] == 1000
    assert [each["action"] for each in job["podFailurePolicy"]["rules"]] == ["FailIndex", "Ignore"]


@pytest.mark.parametrize(
    ("notice_s", "grace_s"), [(0, 10), (0.1, 11), (30, 40), (-1, 2_592_000), (math.inf, 2_592_000)]
)
def test_the_notice_becomes_the_grace_period(notice_s: float, grace_s: int) -> None:
    for pod in templates(made(group("actor"), notice_s=notice_s)):
        assert pod["spec"]["terminationGracePeriodSeconds"] == grace_s


@pytest.mark.parametrize(
    ("resources", "quantities"),
    [
        (Resources(), None),
        (Resources(cpu=0, ram_gib=0, gpu=0), None),
        (Resources(cpu=2), {"cpu": "2"}),
        (Resources(cpu=4.03), {"cpu": "4030m"}),  # times 1000 more than that, in binary
        (Resources(cpu=0.0001), {"cpu": "1m"}),
        (Resources(ram_gib=0.3), {"memory": "308Mi"}),
        (Resources(ram_gib=64), {"memory": "65536Mi"}),
        (Resources(gpu=4.0), {"nvidia.com/gpu": "4"}),
    ],
)
def test_resources_are_requests_and_limits(resources: Resources, quantities: object) -> None:
    (container,) = pod_of(group("actor", resources=resources))["spec"]["containers"]
    expected = None if quantities is None else {"requests": quantities, "limits": quantities}
    assert container.get("resources") == expected


def test_what_is_together_has_affinity_to_each_other_only() -> None:
    objects = made(
        group("a", together="x"), group("b", together="y"), group("c", together="x"), group("d")
    )
    pods = {name: job_spec(objects, f"demo-{name}")["template"] for name in "abcd"}
    words = {
        name: pod["metadata"]["labels"].get("launchpad-lite/together") for name, pod in pods.items()
    }
    assert words == {"a": "0", "b": "1", "c": "0", "d": None}
    (term,) = pods["c"]["spec"]["affinity"]["podAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    assert term["labelSelector"]["matchLabels"] == {
        "launchpad-lite/run": "demo",
        "launchpad-lite/together": "0",
    }
    assert "affinity" not in pods["d"]["spec"]


def test_nothing_secret_is_in_what_can_be_listed() -> None:
    secret = b"most secret"
    files = PackedRun({"key.pem": secret}, {"order.json": secret}, secret)
    text = json.dumps(
        [each for each in made(group("actor"), files=files) if each["kind"] != "Secret"]
    )
    assert base64.b64encode(secret).decode() not in text
    assert secret.decode() not in text


@pytest.mark.parametrize(
    ("size", "parts"), [(180_000, 1), (180_001, 2), (2_000_000, 12), (2_000_001, 3), (2_700_001, 4)]
)
def test_work_is_cut_into_secrets_and_is_whole_when_mounted(size: int, parts: int) -> None:
    work = bytes(i % 251 for i in range(size))
    objects = made(group("actor"), files=dataclasses.replace(FILES, blob=work))
    volumes = job_spec(objects, "demo")["template"]["spec"]["volumes"]
    (volume,) = [each for each in volumes if each["name"] == "work"]
    data: dict[str, str] = {}
    for source in volume["projected"]["sources"]:
        data |= find(objects, "Secret", source["secret"]["name"])["data"]
    assert len(data) == parts
    assert b"".join(base64.b64decode(data[name]) for name in sorted(data)) == work


def test_kubectl_apply_takes_each_object_with_the_copy_that_it_keeps_of_it() -> None:
    files = dataclasses.replace(FILES, blob=bytes(2_000_000))
    objects = made(group("producer", 20, ports=1), group("consumer", 20), files=files)
    for each in objects:
        annotations = dict(each["metadata"].get("annotations", {}))
        annotations["kubectl.kubernetes.io/last-applied-configuration"] = json.dumps(each)
        size = sum(len(name) + len(text) for name, text in annotations.items())
        assert size <= 256 << 10, each["metadata"]["name"]


def test_without_work_nothing_is_mounted_for_it() -> None:
    objects = made(group("actor"), files=dataclasses.replace(FILES, blob=b""))
    volumes = job_spec(objects, "demo")["template"]["spec"]["volumes"]
    assert "work" not in [each["name"] for each in volumes]
    assert not [each for each in objects if "work" in each["metadata"]["name"]]


def test_the_first_object_says_what_the_run_consists_of() -> None:
    large = made(group("actor", 900, description="é" * 200))
    plan = json.loads(large[0]["metadata"]["annotations"]["launchpad-lite/plan"])
    assert plan == {
        "program": "program",
        "notice_s": 10.0,
        "begins_anew": False,
        "groups": {"actor": 900},
        "version": __version__,
    }


def test_a_queue_starts_the_jobs_itself() -> None:
    objects = made(group("actor"), queue="research")
    for name in ("demo", "demo-actor"):
        job = find(objects, "Job", name)
        assert job["spec"]["suspend"] is True
        assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    assert "kueue.x-k8s.io/queue-name" not in find(objects, "Service", "demo")["metadata"]["labels"]


def test_only_the_root_waits_to_be_told() -> None:
    objects = made(group("actor"), suspended=True)
    assert job_spec(objects, "demo")["suspend"] is True
    assert "suspend" not in job_spec(objects, "demo-actor")
    assert job_spec(made(group("actor")), "demo")["suspend"] is False


def test_no_network_policy_when_the_cluster_is_to_decide() -> None:
    kinds = [each["kind"] for each in made(group("actor"), network_policy=False)]
    assert "NetworkPolicy" not in kinds


# Mistakes


def test_all_mistakes_are_told_at_once() -> None:
    groups = [
        unlike("actor", PodOptions(), resources=Resources(gpu=1)),
        group("half", resources=Resources(gpu=0.5)),
        group("bad", pod=PodOptions(image="i", patch={"spec": {"containers": None}})),
        unlike("pairs", together="x"),
    ]
    names = Names.of("program", [each.label for each in groups], "demo")
    found = Manifests(Cluster(names), groups, PodOptions(), "program").mistakes()
    expected = [
        r"no image for the pods of the supervisor, group 'actor'; name one that has launchpad-lite",
        r"actor\[0\] and actor\[1\] ask for different resources \(none; gpu=1\).*labels of their own",
        r"half\[0\] asks for gpu=0\.5",
        r"pods of group 'bad': patch\.spec\.containers: the container 'node'",
        r"pairs\[0\] and pairs\[1\] are to run together with different nodes",
    ]
    assert len(found) == len(expected)
    for pattern, mistake in zip(expected, found, strict=True):
        assert re.match(pattern, mistake)


def test_a_jobset_is_one_object_with_all_jobs_that_a_queue_admits_at_once() -> None:
    jobset, *others = jobset_with_kueue()
    assert jobset["kind"] == "JobSet"
    assert jobset["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    assert "launchpad-lite/plan" in jobset["metadata"]["annotations"]
    spec = dict(jobset["spec"])
    supervisor, actor = spec.pop("replicatedJobs")
    assert spec == {
        "suspend": True,
        "ttlSecondsAfterFinished": 60,
        "network": {"enableDNSHostnames": False},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ["supervisor"]},
        "failurePolicy": {"maxRestarts": 0},
    }
    assert [(each["name"], each["replicas"]) for each in (supervisor, actor)] == [
        ("supervisor", 1),
        ("actor", 1),
    ]
    pod = actor["template"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"] == {"amd.com/gpu": "1"}
    volumes = supervisor["template"]["spec"]["template"]["spec"]["volumes"]
    assert {"name": "work", "persistentVolumeClaim": {"claimName": "work"}} in volumes
    assert "Job" not in [each["kind"] for each in others]


# Patches


def test_a_patch_for_all_pods_may_speak_of_both_kinds() -> None:
    both = [{"name": name, "tty": True} for name in ("node", "supervisor", "sidecar")]
    pod = PodOptions(image="i", patch={"spec": {"containers": both}})
    objects = made(group("actor", pod=pod), supervisor=pod)
    for job, name in (("demo", "supervisor"), ("demo-actor", "node")):
        containers = job_spec(objects, job)["template"]["spec"]["containers"]
        assert [each["name"] for each in containers] == [name, "sidecar"]
        assert containers[0]["tty"] is True


def test_a_patch_keeps_what_runs_together_together() -> None:
    zone = {"labelSelector": {}, "topologyKey": "topology.kubernetes.io/zone"}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": [zone]}
    pod = PodOptions(image="i", patch={"spec": {"affinity": {"podAffinity": required}}})
    assert pod_of(group("actor", pod=pod))["spec"]["affinity"] == {"podAffinity": required}
    with pytest.raises(ValueError, match="what runs together needs its own term"):
        pod_of(group("actor", pod=pod, together="x"))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(KEYS, each, max_size=4),
    max_leaves=20,
)


@settings(max_examples=40)
@given(
    JSON,
    st.dictionaries(KEYS, JSON, max_size=3),
    st.dictionaries(KEYS, JSON, max_size=3),
    st.none() | st.just("x"),
)
def test_whatever_users_write_is_at_most_a_mistake(
    options: Any, first: dict[str, Any], second: dict[str, Any], together: str | None
) -> None:
    with contextlib.suppress(TypeError, ValueError):
        PodOptions.of(options)
    with contextlib.suppress(ValueError):
        base, over = (PodOptions(image="i", patch={"spec": patch}) for patch in (first, second))
        objects = made(group("actor", pod=over.over(base), together=together))
        json.dumps(objects, allow_nan=False)


@pytest.mark.parametrize("affinity", [None, {"podAffinity": None}, {"podAffinity": 7}, 7, [7]])
def test_a_patched_affinity_may_be_anything_where_nothing_runs_together(affinity: Any) -> None:
    pod = PodOptions(image="i", patch={"spec": {"affinity": affinity}})
    assert pod_of(group("actor", pod=pod))["spec"].get("affinity") in (affinity, {})
    with pytest.raises(ValueError, match=r"patch\.spec\.affinity"):
        pod_of(group("actor", pod=pod, together="x"))
