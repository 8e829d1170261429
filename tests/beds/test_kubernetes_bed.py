"""What our own tests would not notice if the stand-in for a cluster were wrong.

Where it were wrong otherwise, tests of the launcher would fail: these are not tested here again.
"""

import base64
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from launchpad_lite.testing import poll_until
from tests.beds.kubernetes.cluster import BARE_IMAGE, IMAGE, INSTALLED_IMAGE, KubernetesCluster
from tests.engines import needs_kubernetes

pytestmark = [needs_kubernetes, pytest.mark.slow]

TEAM = KubernetesCluster.namespace


class Clients:
    """The official client's parts for one kubeconfig."""

    def __init__(self, kubeconfig: Path) -> None:
        kubernetes = pytest.importorskip("kubernetes")
        configuration = kubernetes.client.Configuration()
        kubernetes.config.load_kube_config(str(kubeconfig), client_configuration=configuration)
        self.api = kubernetes.client.ApiClient(configuration)
        self.core = kubernetes.client.CoreV1Api(self.api)
        self.batch = kubernetes.client.BatchV1Api(self.api)
        self.watch = kubernetes.watch.Watch


@pytest.fixture(scope="module")
def bed() -> Iterator[KubernetesCluster]:
    with KubernetesCluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(bed: KubernetesCluster) -> Iterator[KubernetesCluster]:
    yield bed
    bed.restore()


@pytest.fixture
def client(cluster: KubernetesCluster) -> Iterator[Clients]:
    clients = Clients(cluster.kubeconfig)
    yield clients
    clients.api.rest_client.pool_manager.clear()


def pod_spec(code: str, **options: Any) -> dict[str, Any]:
    container = {"name": "node", "image": BARE_IMAGE, "command": ["python3", "-u", "-c", code]}
    container |= options.pop("container", {})
    spec = {"restartPolicy": "Never", "automountServiceAccountToken": False}
    return spec | {"terminationGracePeriodSeconds": 1, "containers": [container], **options}


def pod(name: str, code: str, labels: dict[str, str] | None = None, **options: Any) -> Any:
    metadata = {"name": name, "labels": labels or {"app": name}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": pod_spec(code, **options),
    }


def job(name: str, code: str, replicas: int = 1, options: Any = None, **pod_options: Any) -> Any:
    spec = {"completions": replicas, "parallelism": replicas, "completionMode": "Indexed"}
    spec["template"] = {"spec": pod_spec(code, subdomain=name, **pod_options)}
    metadata = {"name": name}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": spec | (options or {}),
    }


def secret(name: str, **data: bytes) -> Any:
    encoded = {key: base64.b64encode(value).decode() for key, value in data.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "data": encoded}


def status_of(client: Clients, name: str) -> Any:
    return client.core.read_namespaced_pod(name, TEAM).status


def await_phase(client: Clients, name: str, *phases: str) -> Any:
    return poll_until(lambda: (s := status_of(client, name)).phase in phases and s, 60)


def await_job(client: Clients, name: str) -> Any:
    """The status of a job that is over, and the condition that says so."""

    def over() -> Any:
        status = client.batch.read_namespaced_job(name, TEAM).status
        ends = [c for c in status.conditions or [] if c.type in ("Complete", "Failed")]
        return ends and (status, ends[0])

    return poll_until(over, 90)


def run(cluster: KubernetesCluster, client: Clients, code: str, **options: Any) -> str:
    """What a pod printed that ran to its end."""
    client.core.create_namespaced_pod(TEAM, pod("once", code, **options))
    await_phase(client, "once", "Succeeded", "Failed")
    return cluster.log("once")


def await_log(cluster: KubernetesCluster, name: str, text: str) -> None:
    """Waits until a pod has printed this."""

    def said() -> bool:
        running = [p for p in cluster.pods() if p["metadata"]["name"] == name]
        return running[0]["status"]["phase"] != "Pending" and text in cluster.log(name)

    poll_until(said, 60)


SLEEP = "import signal, time; signal.signal(15, lambda *_: exit(0)); print('up'); time.sleep(600)"


def test_images_are_the_environments_they_promise(
    cluster: KubernetesCluster, client: Clients
) -> None:
    code = "import importlib.util as i; print([bool(i.find_spec(m)) for m in ('grpc', 'courier')])"
    seen = {}
    for image in (BARE_IMAGE, IMAGE, INSTALLED_IMAGE):
        place = {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
        env = [{"name": name, "value": value} for name, value in place.items()]
        seen[image] = run(cluster, client, code, container={"image": image, "env": env})
        client.core.delete_namespaced_pod("once", TEAM)
        poll_until(lambda: not cluster.pods())
    assert [*seen.values()] == ["[False, False]\n", "[True, False]\n", "[True, True]\n"]


def test_exit_codes_decide_what_a_failed_index_means(
    cluster: KubernetesCluster, client: Clients
) -> None:
    code = "import os; exit({'0': 0, '1': 1, '2': 75}[os.environ['JOB_COMPLETION_INDEX']])"
    rule = {"onExitCodes": {"containerName": "node", "operator": "In", "values": [1]}}
    options = {
        "backoffLimitPerIndex": 1,
        "podFailurePolicy": {"rules": [{"action": "FailIndex", **rule}]},
    }
    client.batch.create_namespaced_job(TEAM, job("codes", code, 3, options))
    status, end = await_job(client, "codes")
    assert (end.type, end.reason) == ("Failed", "FailedIndexes")
    assert (status.completed_indexes, status.failed_indexes) == ("0", "1,2")
    tries = [
        one["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"]
        for one in cluster.pods()
    ]
    assert sorted(tries) == ["0", "1", "2", "2"]


def test_a_pod_has_its_grace_to_end(cluster: KubernetesCluster, client: Clients) -> None:
    stubborn = (
        "import signal, time; signal.signal(15, signal.SIG_IGN); print('up'); time.sleep(600)"
    )
    for name, code in (("polite", SLEEP), ("stubborn", stubborn)):
        client.core.create_namespaced_pod(TEAM, pod(name, code))
    phases: dict[str, list[str]] = {"polite": [], "stubborn": []}
    for name in phases:
        await_log(cluster, name, "up")
    version = client.core.list_namespaced_pod(TEAM).metadata.resource_version
    began = time.monotonic()
    for name in phases:
        client.core.delete_namespaced_pod(name, TEAM, grace_period_seconds=10)
    took = {}
    for event in client.watch().stream(
        client.core.list_namespaced_pod, TEAM, resource_version=version, timeout_seconds=60
    ):
        name = event["object"].metadata.name
        phases[name].append(event["object"].status.phase)
        if event["type"] == "DELETED":
            took[name] = time.monotonic() - began
        if len(took) == 2:
            break
    assert phases["polite"][-1] == "Succeeded"
    assert phases["stubborn"][-1] == "Failed"
    assert took["polite"] < took["stubborn"]
    assert took["stubborn"] >= 10


def test_security_is_enforced(cluster: KubernetesCluster, client: Clients) -> None:
    client.core.create_namespaced_secret(TEAM, secret("trust", **{"key.pem": b"secret"}))
    code = """
import os
print(os.getuid(), os.getgid(), 65532 in os.getgroups())
status = open("/proc/self/status").read()
print([line.split()[1] for line in status.splitlines() if line.startswith(("CapBnd", "NoNewPrivs"))])
for place in ("/etc/x", "/trust/x", "/tmp/x", "/dev/shm/x"):
    try:
        open(place, "w").write("1")
        print(place, "written")
    except OSError as error:
        print(place, error.errno)
print(open("/trust/key.pem").read(), oct(os.stat("/trust/key.pem").st_mode), os.listdir("/trust/..data"))
print(os.path.exists("/var/run/secrets"), os.environ["WHERE"], os.environ["HOME"])
"""
    output = run(
        cluster,
        client,
        code,
        securityContext={
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "runAsGroup": 65532,
            "fsGroup": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        volumes=[
            {"name": "trust", "secret": {"secretName": "trust", "defaultMode": 0o440}},
            {"name": "tmp", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
        container={
            "env": [
                {"name": "WHERE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
                {"name": "HOME", "value": "/tmp"},
            ],
            "volumeMounts": [
                {"name": "trust", "mountPath": "/trust", "readOnly": True},
                {"name": "tmp", "mountPath": "/tmp"},
                {"name": "shm", "mountPath": "/dev/shm"},
            ],
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
        },
    ).splitlines()
    assert output[0] == "65532 65532 True"
    assert output[1] == "['0000000000000000', '1']"
    assert output[2:6] == ["/etc/x 30", "/trust/x 30", "/tmp/x written", "/dev/shm/x written"]
    assert output[6] == "secret 0o100440 ['key.pem']"
    assert output[7] in ("False node-1 /tmp", "False node-2 /tmp")


def test_a_job_deleted_without_a_policy_leaves_its_pods(
    cluster: KubernetesCluster, client: Clients
) -> None:
    client.batch.create_namespaced_job(TEAM, job("left", SLEEP))
    poll_until(lambda: [p for p in cluster.pods() if p["status"]["phase"] == "Running"])
    client.batch.delete_namespaced_job("left", TEAM)
    poll_until(lambda: not cluster.objects("Job"))
    (pod,) = cluster.pods()
    assert "deletionTimestamp" not in pod["metadata"]
    assert not pod["metadata"].get("ownerReferences")


def test_nothing_outlives_a_killed_bed(tmp_path: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r})
from tests.beds.kubernetes.cluster import KubernetesCluster
from tests.beds.test_kubernetes_bed import Clients, SLEEP, TEAM, pod, poll_until
with KubernetesCluster() as cluster:
    Clients(cluster.kubeconfig).core.create_namespaced_pod(TEAM, pod("left", SLEEP))
    poll_until(lambda: cluster.pods()[0]["status"]["phase"] == "Running")
    print(cluster.kubeconfig.parent, *cluster.pids("left"), flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        folder, pid = process.stdout.readline().split()
        os.kill(process.pid, signal.SIGKILL)
    poll_until(lambda: not psutil.pid_exists(int(pid)))
    poll_until(lambda: not Path(folder).exists())
