"""Names, quantities and sizes that no cluster takes: told by a plan, all of them at once."""

from typing import Any

import pytest

from launchers.kubernetes import KubernetesLauncher, PodOptions
from launchers.kubernetes._checks import mistakes
from launchers.kubernetes._names import Names
from launchpad_lite.graph.freeze import FrozenWork
from launchpad_lite.launching import Executable, Resources


def told(pod: dict[str, Any] | None = None, **options: Any) -> list[str]:
    """Returns the mistakes of a program whose group `b` has these pods."""
    executables = [
        Executable(label, 0, FrozenWork(b"", ()), (), Resources(gpu=1), "a node") for label in "ab"
    ]
    pods = {"b": PodOptions(**pod)} if pod is not None else {}
    return [*KubernetesLauncher("i", pods=pods, **options).mistakes(executables)]


def patched(**spec: Any) -> dict[str, Any]:
    return {"patch": {"spec": spec}}


def node(**fields: Any) -> dict[str, Any]:
    return patched(containers=[{"name": "node", **fields}])


def memory(quantity: object) -> dict[str, Any]:
    return node(resources={"requests": {"memory": quantity}})


NO_NAME = "is no DNS name"


@pytest.mark.parametrize(
    ("pod", "expected"),
    [
        ({"service_account": "A B"}, f"spec.serviceAccountName: 'A B' {NO_NAME}"),
        ({"priority_class": "high\n"}, f"spec.priorityClassName: 'high\\n' {NO_NAME}"),
        ({"pull_secrets": ["A"]}, f"spec.imagePullSecrets[A].name: 'A' {NO_NAME}"),
        ({"node_selector": {"a b": "c"}}, "spec.nodeSelector: 'a b' is no name like"),
        ({"node_selector": {"/a": "c"}}, "spec.nodeSelector: '/a' is no name like"),
        ({"node_selector": {"zone": "a b"}}, "spec.nodeSelector['zone']: 'a b' is no value of"),
        ({"node_selector": {"zone": "c" * 64}}, "has 64 characters; at most 63 are allowed"),
        (
            {"env": {"A": {"secretKeyRef": {"name": "A", "key": "k"}}}},
            f"containers[node].env[A].valueFrom.secretKeyRef.name: 'A' {NO_NAME}",
        ),
        (
            {"volumes": {"d": {"persistentVolumeClaim": {"claimName": "D"}, "mount": "/d"}}},
            f"volumes[d].persistentVolumeClaim.claimName: 'D' {NO_NAME}",
        ),
        (
            {"volumes": {"d": {"emptyDir": {"sizeLimit": "1GB"}, "mount": "/d"}}},
            "volumes[d].emptyDir.sizeLimit: '1GB' is no quantity; write it like",
        ),
        ({"patch": {"metadata": {"labels": {"x": "-c"}}}}, "labels['x']: '-c' is no value of a"),
        (
            {"patch": {"metadata": {"annotations": {"x": "é" * 140_000}}}},
            "annotations: 280001 bytes; an API server takes at most 262144",
        ),
        (patched(volumes=[{"name": "a_b", "emptyDir": {}}]), "'a_b' is no DNS label"),
        (patched(containers=[{"name": "No", "image": "i"}]), "containers[No].name: 'No' is no DNS"),
        (memory("12XB"), "containers[node].resources.requests['memory']: '12XB' is no quantity"),
        (memory(True), "True is no quantity"),
        (node(env=[{"name": "BIG", "value": "x" * 2_000_000}]), "the object: 20"),
    ],
)
def test_what_no_cluster_takes_is_told_of_its_group(pod: dict[str, Any], expected: str) -> None:
    (found,) = told(pod)
    assert found.startswith("Job of group 'b': ")
    assert expected in found


def test_all_is_told_at_once_also_of_what_is_for_all_jobs() -> None:
    found = told({"service_account": "A", "priority_class": "B"}, queue="a b")
    assert [each.partition(": ")[0] for each in found] == [
        "Job of the supervisor",
        "Job of group 'a'",
        *["Job of group 'b'"] * 3,
    ]
    assert sum("queue-name']: 'a b' is no value of a label" in each for each in found) == 3
    assert sum(NO_NAME in each for each in found) == 2
    (in_all,) = told({"service_account": "A"}, jobset=True)
    assert in_all.startswith("JobSet of the run: spec.replicatedJobs[b].template.")


def test_quantities_are_read_as_kubernetes_reads_them() -> None:
    right = ["0", "+1", "1.", ".5", "1.5", "100m", "5n", "1k", "1M", "1E", "1Ei", "1e3", "1E-3"]
    assert [each for each in (*right, 2, 0.5) if told(memory(each))] == []
    for wrong in ("", " ", "-1", "1K", "1 Gi", "Gi", "1kk", "--1", "1e", "0x1", "1GB"):
        (mistake,) = told(memory(wrong))
        assert "is no quantity" in mistake


def test_what_has_the_name_of_a_field_but_is_the_users_own_may_be_anything() -> None:
    attributes = {"claimName": "Any Thing", "limits": {"a b": "c"}}
    volume = {"csi": {"driver": "d", "volumeAttributes": attributes}, "mount": "/d"}
    pod = {"volumes": {"d": volume}, "env": {"claimName": "Any Thing"}}
    assert told(pod) == told(pod, jobset=True) == told() == []


def test_a_secret_holds_at_most_what_a_server_stores() -> None:
    secret = {"kind": "Secret", "metadata": {"name": "demo-order"}}
    names = Names.of("program", [], "demo")
    assert mistakes([{**secret, "data": {"a": "x" * 1_398_000}}], names) == []
    (found,) = mistakes([{**secret, "data": {"a": "x" * 1_399_000}}], names)
    assert found.startswith("Secret demo-order: data: 1049250 bytes; an API server takes at most")
