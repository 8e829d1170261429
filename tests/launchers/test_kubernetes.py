"""What users see of programs in a cluster, in real pods, beside what all engines do.

Faults of the cluster are in `test_kubernetes_faults`, what needs no cluster in
`test_kubernetes_emission`.
"""

import base64
import contextlib
import http.server
import json
import math
import re
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from launchpad_lite.testing import poll_until
from tests.beds.kubernetes.cluster import BARE_IMAGE, IMAGE, INSTALLED_IMAGE, KubernetesCluster
from tests.engines import needs_kubernetes
from tests.launchers.host_engines import PROGRAM, KubernetesDesk, desk_on
from tests.launchers.interpreters import find_other_minor_version
from tests.launchers.kubernetes_access import documented_role, serving

pytest.importorskip("kubernetes")
pytestmark = [needs_kubernetes, pytest.mark.slow, pytest.mark.timeout(300)]

_BRIEF = {"brief": True}
_DETACHED = """
if __name__ == "__main__":
    lp.launch(make_program(), LAUNCHER, detach=True, **OPTIONS)
"""


def assert_nothing_is_left(user: KubernetesDesk) -> None:
    user.assert_no_object_is_left()
    user.assert_nothing_is_left()


# Programs


def test_pods_that_have_ipv6_alone_call_each_other(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(KubernetesCluster(ipv6=True))
        desk = stack.enter_context(desk_on(cluster, lambda: KubernetesDesk(cluster, tmp_path)))
        output = desk.launch(how=_BRIEF).check()
    assert "0 on counting-caller-0 called counting-store-0" in output


# Images


def test_images_without_packages_or_python_are_named(kubernetes: KubernetesDesk) -> None:
    pods = kubernetes.pods(caller={"image": BARE_IMAGE})
    refusal = kubernetes.launch(pods=pods).refusal()
    for replica in (0, 1):
        words = rf"counting-caller-{replica}: the program needs .*\(none there\)"
        assert re.search(words, refusal), refusal
    assert "-store-0: " not in refusal
    assert " called counting" not in refusal
    assert_nothing_is_left(kubernetes)

    pods = kubernetes.pods(caller={"python": "/no/python"})
    refusal = kubernetes.launch(pods=pods, schedule_s=10).refusal()
    assert re.search("caller.*/no/python", refusal), refusal
    assert_nothing_is_left(kubernetes)


@pytest.mark.parametrize("group", ["caller", "supervisor"])
def test_another_python_in_an_image_is_named(kubernetes: KubernetesDesk, group: str) -> None:
    python = find_other_minor_version()
    if python is None or Path(python).is_relative_to("/usr/bin"):
        pytest.skip("there is no other Python here that can be mounted")
    prefix = str(Path(python).parents[1])
    volume = {"hostPath": {"path": prefix}, "mount": prefix, "read_only": True}
    pods = {group: {"python": python, "volumes": {"python": volume}}}
    refusal = kubernetes.launch(pods=kubernetes.pods(**pods)).refusal()
    theirs = re.search(r"3\.\d+", Path(python).name)
    assert theirs
    assert re.search(rf"C?Python {theirs[0]}", refusal), refusal
    assert "{}.{}".format(*sys.version_info) in refusal
    assert group in refusal
    assert_nothing_is_left(kubernetes)


# Runs that others look at, or end


def test_a_run_that_has_ended_can_be_looked_at_until_it_is_removed(
    kubernetes: KubernetesDesk,
) -> None:
    kubernetes.launch(_DETACHED, how=_BRIEF, name="short").check()
    poll_until(lambda: kubernetes.job_has_succeeded("short"), 90)
    status = kubernetes.command_line("status", "short").check()
    assert status.startswith("counting: completed, "), status
    logs = kubernetes.command_line("logs", "short").check()
    assert "[caller[0]] 0 on short-caller-0 called short-store-0" in logs
    kubernetes.command_line("stop", "short").check()
    assert_nothing_is_left(kubernetes)
    words = "there is no run 'short'"
    assert words in kubernetes.command_line("status", "short").refusal()


def test_another_shell_follows_the_output_until_the_end(kubernetes: KubernetesDesk) -> None:
    kubernetes.launch(_DETACHED).check()
    follower = kubernetes.command_line("logs", "-f", "counting")
    follower.until(r"\[caller\[0\]\] 0 on counting-caller-0 called counting-store-0")
    assert "stopped" in kubernetes.command_line("stop", "counting").check()
    follower.check()
    assert_nothing_is_left(kubernetes)


# The objects


def test_emitted_objects_run_when_any_client_creates_them(kubernetes: KubernetesDesk) -> None:
    from kubernetes import config, utils

    kubernetes.write(PROGRAM, "counting.py")
    volume = f'{{ hostPath = {{ path = "{kubernetes.shared}" }}, mount = "{kubernetes.there}" }}'
    kubernetes.write(f'["*"]\nvolumes = {{ shared = {volume} }}\n', "pods.toml")
    options = (f"--image={IMAGE}", "--name=by-hand", "--pods=pods.toml")
    kubernetes.command_line(*options, "emit", "counting.py", "-o", "review", how=_BRIEF).check()
    folder = kubernetes.folder / "review"
    objects = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    with config.new_client_from_config(str(kubernetes.kubeconfig)) as client:
        for each in objects:
            utils.create_from_dict(client, each, namespace=kubernetes.cluster.namespace)

    poll_until(lambda: kubernetes.job_has_succeeded("by-hand"), 90)
    logs = kubernetes.command_line("logs", "by-hand").check()
    assert "[caller[1]] 1 on by-hand-caller-1 called by-hand-store-0" in logs
    kubernetes.cluster.restore()  # they have no owner


# Work that is too large for Secrets


_LARGE = """
class Worker(Caller):
    def __init__(self, store, index, data):
        super().__init__(store, index, HOW)
        self.data = data

    def work(self):
        print(f"{len(self.data)} bytes", flush=True)
        lp.stop()

def make_program(size):
    program = lp.Program("large")
    store = program.add_node(lp.CourierNode(Store, HOW), label="store")
    program.add_node(lp.CourierNode(Worker, store, 0, os.urandom(size)), label="worker")
    return program
"""


def test_work_that_is_too_large_for_secrets_goes_by_a_volume(kubernetes: KubernetesDesk) -> None:
    source = """
    from launchers.kubernetes import WorkVolume
    volume = {"hostPath": {"path": os.path.abspath("work")}}
    try:
        lp.launch(make_program(17_000_000), LAUNCHER, **OPTIONS)
    except lp.LaunchError as error:
        print("REFUSED", error, flush=True)
    work = WorkVolume("work", volume)
    lp.launch(make_program(17_000_000), LAUNCHER, work=work, **OPTIONS).wait()
    print("LEFT", os.listdir("work"))
    """
    work = kubernetes.folder / "work"
    work.mkdir()
    work.chmod(0o777)
    output = kubernetes.launch(_LARGE, source).check()
    assert re.search(r"REFUSED the work and code of the nodes are \d\d MB, and Secrets", output)
    assert "work=WorkVolume(...)" in output
    assert "17000000 bytes" in output
    assert "LEFT []" in output
    assert_nothing_is_left(kubernetes)


class Bucket(http.server.BaseHTTPRequestHandler):
    """An object store: what was put can be got, unless it is said to spoil it."""

    kept: dict[str, bytes] = {}

    def do_PUT(self) -> None:
        self.kept[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def do_GET(self) -> None:
        body = self.kept[self.path.removeprefix("/spoilt")]
        if self.path.startswith("/spoilt"):
            body = body.replace(b"Caller", b"Baller")
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def bucket(kubernetes: KubernetesDesk) -> Iterator[tuple[str, str]]:
    """Addresses of an object store: from here, and from pods."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Bucket)
    with serving(server) as here:
        there = kubernetes.cluster.publish(server.server_port)
        yield f"http://{here}", f"http://{there}"


def test_work_goes_by_an_object_store_and_is_refused_when_it_was_changed(
    kubernetes: KubernetesDesk, bucket: tuple[str, str]
) -> None:
    here, there = bucket
    source = f"""
        from launchers.kubernetes import WorkStore
        work = WorkStore("{here}/a", "{there}/a")
        lp.launch(make_program(), LAUNCHER, work=work, **OPTIONS).wait()
        print("FIRST IS OVER", flush=True)
        work = WorkStore("{here}/b?signature=geheim", "{there}/spoilt/b?signature=geheim")
        lp.launch(make_program(), LAUNCHER, work=work, **OPTIONS).wait()
    """
    launch = kubernetes.launch(source, how=_BRIEF)
    refusal = launch.refusal()
    first, second = launch.output.split("FIRST IS OVER")
    assert "1 on counting-" in first
    assert "its digest differs" in refusal
    assert " called counting-" not in second
    assert "geheim" not in launch.output
    assert_nothing_is_left(kubernetes)


# JobSet and Kueue


def test_a_jobset_runs_as_one(kubernetes: KubernetesDesk) -> None:
    jobsets = {(verb, "jobsets") for verb in ("create", "get", "patch", "delete")}
    kubernetes.kubeconfig = kubernetes.cluster.limited(documented_role() | jobsets)
    launch = kubernetes.begin(jobset=True)
    (jobset,) = kubernetes.cluster.objects("JobSet")
    assert jobset["metadata"]["name"] == "counting"
    assert "1 on counting-caller-0-1 called counting-store-0-0" in launch.output
    assert launch.host("caller[1]") == "counting-caller-0-1"
    launch.finish()
    assert not kubernetes.cluster.objects("JobSet")


@pytest.mark.parametrize("last", ["counting-store", "counting"])
def test_jobs_that_a_queue_admits_one_after_the_other_wait_for_each_other(
    kubernetes: KubernetesDesk, last: str
) -> None:
    schedule_s = 1
    kubernetes.launch(_DETACHED, queue="research", schedule_s=schedule_s, how=_BRIEF).check()
    jobs = kubernetes.cluster.objects("Job")
    names = {each["metadata"]["name"] for each in jobs}
    assert names == {"counting", "counting-store", "counting-caller"}
    for each in jobs:
        assert each["spec"]["suspend"] is True
        assert each["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    assert not kubernetes.cluster.pods()

    def phases() -> list[str]:
        return [str(each["status"].get("phase")) for each in kubernetes.cluster.pods()]

    for name in names - {last}:
        kubernetes.cluster.admit(name)
    poll_until(lambda: phases() == ["Running"] * 3, 60)
    begin = time.monotonic()
    poll_until(lambda: time.monotonic() > begin + 4 * schedule_s or "Failed" in phases())
    assert {*phases()} == {"Running"}
    kubernetes.cluster.admit(last)
    poll_until(lambda: kubernetes.job_has_succeeded("counting"), 60)
    kubernetes.command_line("stop", "counting").check()
    assert_nothing_is_left(kubernetes)


# Rights and security


def test_an_image_may_have_our_packages_and_events_and_a_limit_are_no_need(
    kubernetes: KubernetesDesk,
) -> None:
    rights = {(verb, resource) for verb, resource in documented_role() if resource != "events"}
    kubernetes.kubeconfig = kubernetes.cluster.limited(rights)
    kubernetes.launch(how=_BRIEF, image=INSTALLED_IMAGE, schedule_s=math.inf).check()
    assert_nothing_is_left(kubernetes)


def secrets_of(user: KubernetesDesk) -> list[bytes]:
    """Everything of the run that nobody else may know, in the ways it may be written."""
    found = []
    for each in user.cluster.objects("Secret"):
        for name, value in each["data"].items():
            content = base64.b64decode(value)
            if name == "key":
                found += [content, content.hex().encode(), base64.b64encode(content)]
            elif name == "key.pem":
                found += [line for line in content.splitlines() if b"-----" not in line]
    assert len(found) > 3
    return found


def processes_of(user: KubernetesDesk) -> list[psutil.Process]:
    first = [
        psutil.Process(pid)
        for pod in user.cluster.pods()
        for pid in user.cluster.pids(pod["metadata"]["name"])
    ]
    return [*first, *(child for each in first for child in each.children(recursive=True))]


def test_pods_are_nobody_and_hold_no_secret_where_others_look(kubernetes: KubernetesDesk) -> None:
    source = """
    class Caller(Caller):
        def run(self):
            status = pathlib.Path("/proc/self/status").read_text()
            print("USER", os.getuid(), os.getgid(), "CAPS", *[
                line.split()[1] for line in status.splitlines() if line.startswith("CapEff")
            ], flush=True)
            for folder in ("/", "/tmp", "/dev/shm", "/launchpad/trust", os.path.expanduser("~")):
                try:
                    pathlib.Path(folder, "new").write_text("")
                    print("WRITES", folder, flush=True)
                except OSError as error:
                    print("REFUSED", folder, flush=True)
            print("TOKEN", os.path.exists("/var/run/secrets/kubernetes.io"), flush=True)
            super().run()
    """
    launch = kubernetes.launch(source)
    launch.await_calls()
    secrets = secrets_of(kubernetes)
    # The supervisor; of each node three. They may be at work before their kubelets know of them.
    poll_until(lambda: len(processes_of(kubernetes)) >= 7)
    processes = processes_of(kubernetes)
    for process in processes:
        seen = Path(f"/proc/{process.pid}/environ").read_bytes()
        seen += Path(f"/proc/{process.pid}/cmdline").read_bytes()
        assert process.uids().effective == 65532
        assert not [secret for secret in secrets if secret in seen], process
    containers = [pod["spec"]["containers"][0] for pod in kubernetes.cluster.pods()]
    for container in containers:
        words = json.dumps([container["command"], container.get("args"), container["env"]]).encode()
        assert not [secret for secret in secrets if secret in words]
    assert launch.output.count("USER 65532 65532 CAPS 0000000000000000") == 2
    assert launch.output.count("TOKEN False") == 2
    assert {*re.findall(r"(WRITES|REFUSED) (\S+)", launch.output)} == {
        ("REFUSED", "/"),
        ("REFUSED", "/launchpad/trust"),
        ("WRITES", "/tmp"),
        ("WRITES", "/dev/shm"),
    }
    launch.finish()
    assert_nothing_is_left(kubernetes)


_STRANGER = """
import pickle, socket, ssl, sys

class Bomb:
    def __reduce__(self):
        return print, ("UNPICKLED",)

bomb = pickle.dumps([Bomb()] * 100)
context = ssl.create_default_context()
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE

def knock(target, wrap):
    host, _, port = target.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), connect_s) as plain, wrap(plain) as connection:
            connection.settimeout(30)
            connection.sendall(bomb + b"\\n")
            while piece := connection.recv(1 << 16):
                pass
            return "is hung up on"
    except (ConnectionError, ssl.SSLError):
        return "is refused"
    except TimeoutError:
        return "times out"

connect_s = float(sys.argv[1])
for target in sys.argv[2:]:
    print("raw", knock(target, lambda plain: plain), flush=True)
    print("tls", knock(target, context.wrap_socket), flush=True)
print("DONE", flush=True)
"""


def stranger(user: KubernetesDesk, name: str, targets: Sequence[str], connect_s: float) -> str:
    """Lets a pod that is not of the run call these; returns what it says of it."""
    from kubernetes import client, config

    container = {
        "name": "it",
        "image": BARE_IMAGE,
        "command": ["python3", "-c", _STRANGER, str(connect_s), *targets],
    }
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"restartPolicy": "Never", "containers": [container]},
    }
    namespace = user.cluster.namespace
    with config.new_client_from_config(str(user.cluster.kubeconfig)) as api:
        core = client.CoreV1Api(api)
        core.create_namespaced_pod(namespace, pod)

        def phase() -> str:
            (found,) = (p for p in user.cluster.pods() if p["metadata"]["name"] == name)
            return str(found.get("status", {}).get("phase"))

        poll_until(lambda: phase() in ("Succeeded", "Failed"), 150)
        said = user.cluster.log(name)
        core.delete_namespaced_pod(name, namespace, grace_period_seconds=0)
    return said


@pytest.mark.parametrize("network_policy", [True, False])
def test_who_does_not_belong_to_the_run_is_not_heard(
    kubernetes: KubernetesDesk, network_policy: bool
) -> None:
    launch = kubernetes.begin(network_policy=network_policy)
    targets = [
        "counting:4250",
        "counting-store-0.counting-store:4251",
        "counting-caller-1.counting-caller:4251",
    ]
    if network_policy:
        said = stranger(kubernetes, "stranger", targets[:1], connect_s=2)
    else:
        said = stranger(kubernetes, "stranger", targets, connect_s=30)
    assert "DONE" in said, said
    answers = {*re.findall(r"^(?:raw|tls) (.*)$", said, re.MULTILINE)}
    if network_policy:
        assert answers == {"times out"}, said
    else:
        assert answers <= {"is refused", "is hung up on"}, said
    launch.finish()
    logs = kubernetes.log("store/0") + kubernetes.log("caller/1")
    assert "UNPICKLED" not in launch.output + logs
