"""What makes tests with beds trustworthy: what they leave is told, and none outlives its run."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from launchpad_lite.testing import poll_until
from tests.beds.ssh_hosts import SshHosts, lend
from tests.engines import needs_kubernetes, needs_ssh_hosts

_CHECKOUT = Path(__file__).resolve().parents[2]

pytestmark = [needs_ssh_hosts, pytest.mark.slow]


def test_leftovers_are_told_and_ended_and_files_removed() -> None:
    files = "mkdir -p ~/.cache/a; touch ~/.cache/a/b /tmp/c /dev/shm/d"
    with SshHosts() as bed:
        with bed.run(["ssh", "h1", files]) as client:
            assert client.wait(60) == 0
        assert bed.files("h1") == ["/dev/shm/d", "/tmp/c", "~/.cache/a/b"]
        with bed.run(["ssh", "h3", "sleep 600"], stderr=subprocess.DEVNULL) as client:
            poll_until(lambda: [each for each in bed.leftovers() if each.endswith(" sleep 600")])
            client.kill()
        (left,) = bed.leftovers()
        assert left.startswith("h3: ")
        lent = lend(bed, within_s=0.1)
        next(lent)
        with pytest.raises(AssertionError, match=r"h3: .* sleep 600"):
            next(lent)
        assert bed.leftovers() == []
        assert bed.files("h1") == []


#: Beds in which something runs; each prints its folder, and ids of processes that are no children.
_SSH = """
from tests.beds.ssh_hosts import SshHosts
with SshHosts(1) as hosts:
    hosts.run_service(["sleep", "600"])
    print(hosts.shared.parent, flush=True)
    sys.stdin.read()
"""
_KUBERNETES = """
import kubernetes
from launchpad_lite.testing import poll_until
from tests.beds.kubernetes.cluster import BARE_IMAGE, KubernetesCluster
node = {"name": "node", "image": BARE_IMAGE, "command": ["sleep", "600"]}
spec = {"restartPolicy": "Never", "automountServiceAccountToken": False, "containers": [node]}
pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "left"}, "spec": spec}
with KubernetesCluster() as cluster:
    kubernetes.config.load_kube_config(str(cluster.kubeconfig))
    kubernetes.client.CoreV1Api().create_namespaced_pod(cluster.namespace, pod)
    poll_until(lambda: cluster.pods()[0]["status"]["phase"] == "Running")
    print(cluster.kubeconfig.parent, *cluster.pids("left"), flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("begin", [_SSH, pytest.param(_KUBERNETES, marks=needs_kubernetes)])
def test_a_killed_test_run_leaves_nothing(begin: str) -> None:
    source = f"import sys; sys.path.insert(0, {str(_CHECKOUT)!r})\n{begin}"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", source], stdin=pipe, stdout=pipe) as run:
        assert run.stdout is not None
        folder, *pids = run.stdout.readline().decode().split()
        begun = psutil.Process(run.pid).children(recursive=True)
        begun += [psutil.Process(int(pid)) for pid in pids]
        assert Path(folder).is_dir()
        run.kill()
    poll_until(lambda: not Path(folder).exists())
    poll_until(lambda: not any(process.is_running() for process in begun))
