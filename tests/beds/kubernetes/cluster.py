"""A Kubernetes cluster of two virtual nodes on this machine, for tests."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil

from launchpad_lite.testing import poll_until
from tests.beds.bed import Bed
from tests.beds.kubernetes.controllers import (
    Events,
    GarbageCollector,
    JobController,
    JobSetController,
    Loop,
    Node,
    Scheduler,
)
from tests.beds.kubernetes.kubeconfig import write_config
from tests.beds.kubernetes.kubelet import Image, Kubelet, interpreter_folders
from tests.beds.kubernetes.logs import read
from tests.beds.kubernetes.network import PodNetwork
from tests.beds.kubernetes.server import ApiServer, evict, give_up
from tests.beds.kubernetes.store import RESOURCES, ApiError, Object, Store

_CHECKOUT = Path(__file__).resolve().parents[3]
_PACKAGES = ("courier", "launchpad_lite", "launchers")
_TOKEN = "of-the-researcher"

IMAGE = "localhost/research:1"
"""The environment of the tests, without this checkout."""
INSTALLED_IMAGE = "localhost/installed:1"
"""As IMAGE, with the packages of this checkout."""
BARE_IMAGE = "localhost/bare:1"
"""Python and its standard library."""


class KubernetesCluster(Bed):
    """A cluster as its users see it: a server, a namespace, pods that run; a context manager.

    The API is a fake, at the HTTP edge; pods are real, run by podman with the memory limits,
    users, mounts and signals that their objects ask for, each with an address and DNS names.
    Programs talk to it from this machine by `kubeconfig`; pods see neither this machine's network
    nor its files, but /usr and the interpreter.

    Needs root, podman, runc, netavark and iproute2 with iptables. Thread-safe.

    Args:
        backoff_s: Seconds before a job replaces a failed pod, doubled each time; 10 in truth.
        ipv6: Whether pods and services have IPv6 alone.

    Attributes:
        namespace: The only one.
        kubeconfig: For all of what users of one namespace may do.
    """

    namespace = "team"

    def __init__(self, *, backoff_s: float = 0.2, ipv6: bool = False) -> None:
        self._backoff_s = backoff_s
        self._is_ipv6 = ipv6
        self._nodes = [
            Node(f"node-{number}", {"kubernetes.io/hostname": f"node-{number}"})
            for number in (1, 2)
        ]
        super().__init__()

    def objects(self, kind: str) -> list[Object]:
        """The objects of a kind as they are now, by name.

        Args:
            kind: As "Job" or "jobs".
        """
        plural = next(one.plural for one in RESOURCES.values() if kind in (one.kind, one.plural))
        return json.loads(json.dumps(self._store.items(plural)))  # type: ignore[no-any-return]

    def pods(self) -> list[Object]:
        """All pods, by name."""
        return self.objects("Pod")

    def events(self) -> list[str]:
        """What was told of all objects, as "Pod x: Warning Failed: Error: ErrImagePull"."""
        return [
            f"{event['involvedObject']['kind']} {event['involvedObject']['name']}: "
            f"{event['type']} {event['reason']}: {event['message']}"
            for event in sorted(
                self._store.items("events"),
                key=lambda event: int(event["metadata"]["resourceVersion"]),
            )
        ]

    def log(self, pod: str) -> str:
        """What the first container of a pod has written since it last began; "" before that."""
        found = self._store.get("pods", self.namespace, pod)
        try:
            log = self._kubelet.read_log(found, found["spec"]["containers"][0]["name"])
        except ApiError:
            return ""
        return b"".join(read(log.path, lambda: False, {})).decode(errors="replace")

    def pids(self, pod: str) -> list[int]:
        """The first processes of a pod's containers, as pids of this machine."""
        run = self._run(pod)
        return [one.pid for one in run.current.values() if one.pid and one.terminated is None]

    def publish(self, port: int) -> str:
        """Lets pods reach a port of this machine's loopback; returns the address for them."""
        return self._network.publish(port)

    def limited(self, rules: Iterable[tuple[str, str]]) -> Path:
        """A kubeconfig that may do only this, in the namespace.

        Args:
            rules: Pairs of verb and resource, as ("create", "jobs") and ("get", "pods/log").
        """
        token = f"limited-{len(self._api.tokens)}"
        self._api.tokens[token] = frozenset(rules)
        return self._write_config(token)

    def kill_container(self, pod: str) -> None:
        """Kills all containers of a pod at once."""
        self._run(pod).kill()

    def pending(
        self,
        predicate: Callable[[Object], bool],
        reason: str = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu.",
    ) -> None:
        """Lets new pods stay unscheduled, for a reason, until all is restored."""
        self._scheduler.pending.append((predicate, reason))

    def evict(self, pod: str) -> None:
        """Deletes a pod as the eviction API does."""
        evict(self._store, self._store.get("pods", self.namespace, pod))

    def delete(self, kind: str, name: str) -> None:
        """Deletes an object, as `kubectl delete`; what it owns goes with it.

        Args:
            kind: As "jobs".
            name: Its name.
        """
        self._store.delete(kind, self.namespace, name)

    def admit(self, job: str) -> None:
        """Resumes a job, as a queue does."""
        self._store.update(
            "jobs", self.namespace, job, lambda one: one["spec"].update(suspend=False)
        )

    def drain(self, node: str) -> None:
        """Evicts all pods of a node, which takes no new ones until all is restored."""
        self._node(node).unschedulable = True
        for pod in self._store.items("pods", self.namespace):
            if pod["spec"].get("nodeName") == node:
                with contextlib.suppress(ApiError):
                    evict(self._store, pod)

    def cut(self, pod: str) -> None:
        """Drops all packets from and to a pod; nobody is told."""
        self._network.cut(self._uid(pod))

    def heal(self, pod: str) -> None:
        self._network.heal(self._uid(pod))

    def cut_node(self, node: str) -> None:
        """Cuts off a node: its pods run on, unreached; of them nobody hears, and none ends."""
        self.stop_kubelet(node)
        for pod in self._store.items("pods", self.namespace):
            if pod["spec"].get("nodeName") == node:
                self._network.cut(pod["metadata"]["uid"])

    def stop_kubelet(self, node: str) -> None:
        """Ends the kubelet of a node, until `heal_node`: its pods run on and are reached.

        Their logs are not; all that are being followed break.
        """
        self._kubelet.offline.add(node)
        self._api.drop("log")

    def give_up_node(self, node: str) -> None:
        """Deletes the pods of a node that is not ready, as a cluster does after a while.

        It takes no new ones until all is restored.
        """
        self._node(node).unschedulable = True
        for pod in self._store.items("pods", self.namespace):
            if pod["spec"].get("nodeName") == node:
                with contextlib.suppress(ApiError):
                    give_up(self._store, pod)

    def heal_node(self, node: str) -> None:
        self._kubelet.offline.discard(node)
        for pod in self._store.items("pods", self.namespace):
            if pod["spec"].get("nodeName") == node:
                self._network.heal(pod["metadata"]["uid"])

    def leftovers(self) -> list[str]:
        """What is there: objects but events, containers that run, and networks of pods."""
        lines = [
            f"{item['kind']} {item['metadata']['name']}"
            for resource, item in self._store.all()
            if resource != "events"
        ]
        runs = [*self._kubelet.runs.values()]
        lines += [f"container of pod {run.name}" for run in runs if run.is_alive]
        lines += [f"network {wire.link} of pod {wire.uid}" for wire in self._network.wires()]
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if (
                    words
                    and "conmon" in words[0]
                    and any(str(self._folder) in one for one in words)
                ):
                    lines.append(f"process {process.pid} {words[0]}")
        return lines

    def restore(self) -> None:
        """Makes all as it was at the start: nothing stored, nothing runs, no faults."""
        self._heal_all()
        for _ in range(2):  # a controller may just be making one more
            with self._store.changed:
                for resource, item in [*self._store.all()]:
                    self._store.drop(resource, item)
            poll_until(lambda: not self._kubelet.runs, 30)
        self._raise_errors()

    def _heal_all(self) -> None:
        self._scheduler.pending.clear()
        self._kubelet.offline.clear()
        self._network.heal()
        self._api.tokens = {_TOKEN: None}
        for node in self._nodes:
            node.unschedulable = False

    def _raise_errors(self) -> None:
        errors = [*self._loop.errors]
        self._loop.errors.clear()
        if errors:
            raise RuntimeError("a controller of the bed failed") from errors[0]

    def _build(self, stack: contextlib.ExitStack) -> None:
        folder = Path(tempfile.mkdtemp(prefix="launchpad-bed-", dir="/var/tmp"))
        memory = Path(tempfile.mkdtemp(prefix="launchpad-bed-", dir="/dev/shm"))
        self._folder = folder
        for one in (folder, memory):
            one.chmod(0o755)
        life, held = os.pipe()
        janitor = subprocess.Popen(
            ["/bin/bash", "-c", _JANITOR, "janitor", str(folder), str(memory)],
            stdin=life,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(life)
        stack.callback(janitor.wait)
        stack.callback(os.close, held)

        self._store = Store()
        recorder = Events(self._store)
        self._network = PodNetwork(self._store, ipv6=self._is_ipv6)
        stack.callback(self._network.close)
        interpreter = interpreter_folders()
        beside = Path(sys.prefix)
        system = "/usr/local/bin:/usr/bin:/bin"
        usr = Path("/usr")
        environment = () if beside.is_relative_to(usr) else (beside,)
        packages = tuple(_CHECKOUT / name for name in _PACKAGES)
        full = f"{beside}/bin:{system}"
        base = f"{Path(sys.base_prefix)}/bin:{system}"
        images = {
            IMAGE: Image(full, (usr, *interpreter, *environment)),
            INSTALLED_IMAGE: Image(full, (usr, *interpreter, *environment, *packages)),
            BARE_IMAGE: Image(base, (usr, *interpreter)),
        }
        self._kubelet = Kubelet(self._store, self._network, images, folder, memory, recorder.record)
        stack.callback(self._kubelet.close)
        self._api = ApiServer(
            self._store, self.namespace, self._kubelet.read_log, self._network.services
        )
        stack.callback(self._api.close)
        self._api.tokens[_TOKEN] = None
        self._scheduler = Scheduler(self._store, self._nodes, recorder.record)
        controllers = [
            JobSetController(self._store, self._api.admit).run,
            JobController(self._store, self._api.admit, recorder.record, self._backoff_s).run,
            self._scheduler.run,
            self._kubelet.look,
            GarbageCollector(self._store).run,
        ]
        self._loop = Loop(self._store, controllers)
        stack.callback(self._loop.close)
        network = Loop(self._store, [self._network.sync])
        stack.callback(network.close)
        self.kubeconfig = self._write_config(_TOKEN)

    def _write_config(self, token: str) -> Path:
        folder = self._folder / f"kubeconfig-{token}"
        folder.mkdir(exist_ok=True)
        user, namespace = {"token": token}, self.namespace
        return write_config(folder, self._api.url, user=user, namespace=namespace)

    def _uid(self, pod: str) -> str:
        return str(self._store.get("pods", self.namespace, pod)["metadata"]["uid"])

    def _run(self, pod: str) -> Any:
        return self._kubelet.runs[self._uid(pod)]

    def _node(self, name: str) -> Node:
        return next(node for node in self._nodes if node.name == name)


# The pipe that bash reads from never brings anything; its end is the bed's. A container that is
# killed is cleaned up after by podman, at the same time: hence the loop.
_JANITOR = """read -r _
for file in "$1"/pods/*/*/pid; do [ -e "$file" ] && kill -9 "$(cat "$file")"; done
for _ in {1..100}; do
    grep -o " $1/[^ ]*" /proc/mounts | xargs -r umount
    rm -rf -- "$1" "$2" && break
    sleep 0.1
done
"""
