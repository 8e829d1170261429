"""What our own tests would not notice if the stand-in for a cluster were wrong.

Where it were wrong otherwise, tests of the launcher would fail: these are not tested here again.
"""

import base64
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
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
        self.networking = kubernetes.client.NetworkingV1Api(self.api)
        self.custom = kubernetes.client.CustomObjectsApi(self.api)
        self.watch = kubernetes.watch.Watch


@pytest.fixture(scope="module")
def bed() -> Iterator[KubernetesCluster]:
    with KubernetesCluster(gpus=1) as cluster:
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


def service(name: str, selector: dict[str, str], *ports: int, headless: bool = True) -> Any:
    spec: dict[str, Any] = {"publishNotReadyAddresses": True, "selector": selector}
    spec["ports"] = [{"name": f"p{port}", "port": port} for port in ports]
    if headless:
        spec["clusterIP"] = "None"
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}


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


def post(client: Clients, path: str, body: Any, query: Any = ()) -> None:
    """A request as it is."""
    json_type = {"Content-Type": "application/json", "Accept": "application/json"}
    request = client.api.param_serialize(
        "POST",
        path,
        body=body,
        query_params=[*query],
        header_params=json_type,
        auth_settings=["BearerToken"],
    )
    response = client.api.call_api(*request)
    response.read()
    client.api.response_deserialize(response, {})


def await_log(cluster: KubernetesCluster, name: str, text: str) -> None:
    """Waits until a pod has printed this."""

    def said() -> bool:
        running = [p for p in cluster.pods() if p["metadata"]["name"] == name]
        return running[0]["status"]["phase"] != "Pending" and text in cluster.log(name)

    poll_until(said, 60)


def await_no_streams(cluster: KubernetesCluster) -> None:
    """Waits until the server has noticed the ends of all that was read before."""
    poll_until(lambda: not any(cluster.open_streams().values()))


SLEEP = "import signal, time; signal.signal(15, lambda *_: exit(0)); print('up'); time.sleep(600)"
LISTEN = (
    "import socket; s = socket.create_server(('', 4250)); print('up')\n"
    "while 1: s.accept()[0].sendall(b'hello')"
)


def dial(address: str, timeout_s: float = 40.0) -> str:
    return f"""
import socket, time
until = time.time() + {timeout_s}
while True:
    try:
        print(socket.create_connection(("{address}", 4250), 0.5).recv(9))
        break
    except OSError as error:
        print(type(error).__name__, error)
        if time.time() > until:
            break
        time.sleep(0.05)
"""


def refused(call: Callable[[], Any]) -> tuple[int, str]:
    """The status and the text of an answer that is none of success."""
    from kubernetes.client import ApiException

    with pytest.raises(ApiException) as caught:
        call()
    return caught.value.status, caught.value.body


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


def test_root_is_refused_to_who_must_not_be_it(cluster: KubernetesCluster, client: Clients) -> None:
    client.core.create_namespaced_pod(
        TEAM, pod("root", SLEEP, securityContext={"runAsNonRoot": True})
    )

    def reason() -> Any:
        found = status_of(client, "root").container_statuses
        return found and found[0].state.waiting.reason == "CreateContainerConfigError"

    poll_until(reason)


def test_a_network_policy_keeps_others_out(cluster: KubernetesCluster, client: Clients) -> None:
    ours = {"launchpad-lite/run": "ours"}
    selector = {"podSelector": {"matchLabels": ours}}
    client.networking.create_namespaced_network_policy(
        TEAM,
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": "ours"},
            "spec": {**selector, "policyTypes": ["Ingress"], "ingress": [{"from": [selector]}]},
        },
    )
    client.core.create_namespaced_service(TEAM, service("server", ours, 4250))
    client.core.create_namespaced_pod(TEAM, pod("server", LISTEN, ours))
    await_log(cluster, "server", "up")
    client.core.create_namespaced_pod(TEAM, pod("stranger", dial("server", 5)))
    client.core.create_namespaced_pod(TEAM, pod("friend", dial("server"), ours))
    for name in ("stranger", "friend"):
        await_phase(client, name, "Succeeded")
    assert "b'hello'" not in cluster.log("stranger")
    assert "TimeoutError" in cluster.log("stranger")
    assert "b'hello'" in cluster.log("friend")


def test_a_cut_pod_is_silent_until_it_is_healed(
    cluster: KubernetesCluster, client: Clients
) -> None:
    client.core.create_namespaced_service(TEAM, service("server", {"app": "server"}, 4250))
    client.core.create_namespaced_pod(TEAM, pod("server", LISTEN))
    await_log(cluster, "server", "up")
    cluster.cut("server")
    client.core.create_namespaced_pod(TEAM, pod("caller", dial("server")))
    await_log(cluster, "caller", "TimeoutError")
    cluster.heal("server")
    await_phase(client, "caller", "Succeeded")
    assert cluster.log("caller").endswith("b'hello'\n")


def test_of_a_cut_node_nobody_hears_until_it_is_healed(
    cluster: KubernetesCluster, client: Clients
) -> None:
    client.core.create_namespaced_pod(TEAM, pod("far", SLEEP))
    await_phase(client, "far", "Running")
    node = client.core.read_namespaced_pod("far", TEAM).spec.node_name
    (pid,) = cluster.pids("far")
    cluster.cut_node(node)
    client.core.delete_namespaced_pod("far", TEAM)
    assert refused(lambda: client.core.read_namespaced_pod_log("far", TEAM))[0] == 500
    assert psutil.pid_exists(pid)
    assert cluster.pods()
    cluster.heal_node(node)
    poll_until(lambda: not cluster.pods())
    poll_until(lambda: not psutil.pid_exists(pid))


def test_an_owner_that_never_was_takes_its_objects_with_it(
    cluster: KubernetesCluster, client: Clients
) -> None:
    made = secret("orphan")
    made["metadata"]["ownerReferences"] = [
        {"apiVersion": "batch/v1", "kind": "Job", "name": "root", "uid": "none"}
    ]
    client.core.create_namespaced_secret(TEAM, made)
    poll_until(lambda: not cluster.objects("Secret"))


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


def test_a_suspended_job_has_no_pods_until_it_is_resumed(
    cluster: KubernetesCluster, client: Clients
) -> None:
    client.batch.create_namespaced_job(TEAM, job("later", SLEEP, 1, {"suspend": True}))
    poll_until(lambda: client.batch.read_namespaced_job("later", TEAM).status.conditions)
    assert not cluster.pods()
    client.batch.patch_namespaced_job("later", TEAM, {"spec": {"suspend": False}})
    poll_until(cluster.pods)


def test_a_watch_goes_on_from_where_it_was_lost(
    cluster: KubernetesCluster, client: Clients
) -> None:
    await_no_streams(cluster)
    names = []
    version = client.core.list_namespaced_secret(TEAM).metadata.resource_version

    def follow() -> None:
        nonlocal version
        while len(names) < 4:
            with contextlib.suppress(Exception):
                for event in client.watch().stream(
                    client.core.list_namespaced_secret,
                    TEAM,
                    resource_version=version,
                    timeout_seconds=10,
                ):
                    version = event["object"].metadata.resource_version
                    names.append((event["type"], event["object"].metadata.name))
                    if len(names) == 4:
                        break

    thread = threading.Thread(target=follow)
    thread.start()
    client.core.create_namespaced_secret(TEAM, secret("a"))
    poll_until(lambda: len(names) == 1)
    assert cluster.drop_watches() == 1
    client.core.create_namespaced_secret(TEAM, secret("b"))
    client.core.patch_namespaced_secret("b", TEAM, {"metadata": {"labels": {"x": "y"}}})
    client.core.delete_namespaced_secret("a", TEAM)
    thread.join(60)
    assert names == [("ADDED", "a"), ("ADDED", "b"), ("MODIFIED", "b"), ("DELETED", "a")]


def test_a_watch_from_a_version_too_old_is_told_so(
    cluster: KubernetesCluster, client: Clients
) -> None:
    version = client.core.list_namespaced_pod(TEAM).metadata.resource_version
    cluster.expire_versions()
    from kubernetes.client import ApiException

    with pytest.raises(ApiException) as caught:
        for _ in client.watch().stream(
            client.core.list_namespaced_pod, TEAM, resource_version=version, timeout_seconds=5
        ):
            pass
    assert caught.value.status == 410


def test_requests_fail_as_often_as_asked(cluster: KubernetesCluster, client: Clients) -> None:
    from kubernetes.client import ApiException

    for index, status in enumerate((409, 429, 500)):
        cluster.fail_requests(status, 1, "POST /api/v1/namespaces/team/secrets", retry_after_s=3)
        client.core.list_namespaced_secret(TEAM)
        with pytest.raises(ApiException) as caught:
            client.core.create_namespaced_secret(TEAM, secret(f"x{index}"))
        assert caught.value.status == status
        assert caught.value.headers.get("Retry-After") == ("3" if status == 429 else None)
        client.core.create_namespaced_secret(TEAM, secret(f"x{index}"))


def test_a_limited_token_may_do_no_more(cluster: KubernetesCluster, client: Clients) -> None:
    limited = Clients(cluster.limited([("list", "pods"), ("create", "secrets")]))
    limited.core.list_namespaced_pod(TEAM)
    limited.core.create_namespaced_secret(TEAM, secret("x"))
    code, text = refused(lambda: limited.core.delete_namespaced_secret("x", TEAM))
    assert code == 403
    assert 'cannot delete resource \\"secrets\\"' in text
    assert refused(lambda: limited.core.list_namespaced_pod("other"))[0] == 403
    assert refused(limited.core.list_node)[0] == 403
    limited.api.rest_client.pool_manager.clear()


def test_objects_are_refused_as_by_a_real_server(
    cluster: KubernetesCluster, client: Clients
) -> None:
    def create(namespace: str, body: Any, dry_run: str = "") -> None:
        """Not by the client's own method, which refuses much by itself."""
        query = [("dryRun", dry_run)] if dry_run else []
        path = f"/apis/batch/v1/namespaces/{namespace}/jobs"
        post(client, path, body, query)

    unknown = job("x", SLEEP)
    unknown["spec"]["template"]["spec"]["containers"][0]["imagepolicy"] = "Never"
    assert refused(lambda: create(TEAM, unknown))[0] == 400
    wrong_name = job("Actor_1", SLEEP)
    assert refused(lambda: create(TEAM, wrong_name))[0] == 422
    restarts = job("x", SLEEP, restartPolicy="Always")
    assert refused(lambda: create(TEAM, restarts))[0] == 422
    volume = job("x", SLEEP, container={"volumeMounts": [{"name": "v", "mountPath": "/v"}]})
    code, text = refused(lambda: create(TEAM, volume))
    assert (code, "spec.template.spec.containers[0].volumeMounts[0].name" in text) == (422, True)
    amount = job("x", SLEEP, container={"resources": {"limits": {"memory": "12XB"}}})
    assert refused(lambda: create(TEAM, amount))[0] == 422
    too_long = job("x" * 62, SLEEP)
    assert refused(lambda: create(TEAM, too_long))[0] == 422
    too_big = secret("big", data=b"x" * (1 << 20) + b"x")
    assert refused(lambda: client.core.create_namespaced_secret(TEAM, too_big))[0] == 422
    create(TEAM, job("x", SLEEP), dry_run="All")
    assert not cluster.objects("Job")
    create(TEAM, job("x", SLEEP))
    assert refused(lambda: create(TEAM, job("x", SLEEP)))[0] == 409
    change = {"spec": {"completions": 2}}
    assert refused(lambda: client.batch.patch_namespaced_job("x", TEAM, change))[0] == 422
    assert refused(lambda: client.batch.read_namespaced_job("y", TEAM))[0] == 404
    assert refused(lambda: client.core.create_namespaced_secret("other", secret("x")))[0] == 404
    stale = client.core.create_namespaced_secret(TEAM, secret("s"))
    client.core.patch_namespaced_secret("s", TEAM, {"metadata": {"labels": {"a": "b"}}})
    assert refused(lambda: client.core.replace_namespaced_secret("s", TEAM, stale))[0] == 409


def test_a_job_set_becomes_jobs_with_names_of_its_own(
    cluster: KubernetesCluster, client: Clients
) -> None:
    def replicated(name: str, code: str, replicas: int) -> Any:
        return {"name": name, "replicas": 1, "template": {"spec": job("x", code, replicas)["spec"]}}

    made = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "run"},
        "spec": {"replicatedJobs": [replicated("server", SLEEP, 1), replicated("actor", SLEEP, 2)]},
    }
    names = ("jobset.x-k8s.io", "v1alpha2", TEAM, "jobsets")
    client.custom.create_namespaced_custom_object(*names, made)
    poll_until(lambda: len(cluster.pods()) == 3, 60)
    hosts = {(p["spec"]["hostname"], p["spec"]["subdomain"]) for p in cluster.pods()}
    assert hosts == {(name, "run") for name in ("run-server-0-0", "run-actor-0-0", "run-actor-0-1")}


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
