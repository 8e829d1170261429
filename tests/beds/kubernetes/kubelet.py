"""Runs pods for real, with podman: what is bound to a node gets containers, volumes and a status.

Images are this machine's /usr and the interpreter of the tests, mounted read-only over folders with
nothing in them.
"""

import base64
import contextlib
import functools
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.beds.kubernetes.admission import memory_bytes
from tests.beds.kubernetes.logs import Log
from tests.beds.kubernetes.network import DOMAIN, PodNetwork, Wire
from tests.beds.kubernetes.store import ApiError, Object, Store, now, stamp

_LOOK_S = 0.03
_RETRY_S = 0.2
_CONFIG = """[containers]
default_ulimits = ["nofile=20000:20000", "nproc=32768:32768"]
log_driver = "k8s-file"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "none"
lock_type = "file"
runtime = "runc"
[network]
network_backend = "netavark"
"""
_FOLDERS = ("usr", "proc", "sys", "dev", "tmp", "etc", "run", "var/tmp", "root", "home")
_LINKS = ("bin", "lib", "lib64", "sbin")
_FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/sbin/nologin\n",
    "etc/group": "root:x:0:\nnogroup:x:65534:\n",
    "etc/nsswitch.conf": "hosts: files dns\n",
}


class _StoppedError(Exception):
    """The pod is to end before it ran."""


class _BlockedError(Exception):
    """What keeps a container from running, as the kubelet names it."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass
class Container:
    """One run of a container."""

    name: str
    id: str
    """podman's name for it."""
    folder: Path
    pid: int = 0
    pidfd: int = -1
    started: str = ""
    terminated: Object | None = None

    @property
    def log(self) -> Path:
        return self.folder / "log"


@dataclass(frozen=True)
class Image:
    """What a container sees beside /usr.

    Attributes:
        path: The PATH inside.
        folders: Of this machine, at the same places, read-only.
    """

    path: str
    folders: tuple[Path, ...]


class Podman:
    """Podman with a store of its own in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "containers.conf").write_text(_CONFIG)
        parts = {"--root": "root", "--runroot": "run", "--tmpdir": "tmp"}
        self._command = ["podman", "--storage-driver", "vfs"]
        for option, name in parts.items():
            (folder / name).mkdir()
            self._command += [option, str(folder / name)]
        self._environment = {**os.environ, "CONTAINERS_CONF": str(folder / "containers.conf")}

    def call(self, *arguments: str, cwd: Path | None = None) -> str:
        done = subprocess.run(
            [*self._command, *arguments],
            env=self._environment,
            cwd=cwd or self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            start_new_session=True,
            timeout=120,
        )
        if done.returncode:
            raise RuntimeError(done.stderr.strip())
        return done.stdout.strip()


class Kubelet:
    """The kubelets of all nodes.

    Args:
        store: Of the API.
        network: Of the pods.
        images: By name; no other is found.
        folder: For what pods need.
        memory_folder: As that, in memory.
        record: Notes an event: object, type, reason, message.

    Attributes:
        offline: Nodes that nobody hears of.
    """

    def __init__(
        self,
        store: Store,
        network: PodNetwork,
        images: Mapping[str, Image],
        folder: Path,
        memory_folder: Path,
        record: Callable[[Object, str, str, str], None],
    ) -> None:
        self.store = store
        self.network = network
        self.images = images
        self.folder = folder
        self.memory_folder = memory_folder
        self.record = record
        self.offline: set[str] = set()
        self.podman = Podman(folder / "podman")
        self.runs: dict[str, PodRun] = {}
        self._lock = threading.Lock()
        (folder / "pods").mkdir()

    def make_root(self, root: Path, places: Iterable[str]) -> None:
        """Makes a root with nothing in it but places to mount at."""
        for name in (*_FOLDERS, *(place.strip("/") for place in places)):
            (root / name).mkdir(parents=True, exist_ok=True)
        for name in _LINKS:
            with contextlib.suppress(FileExistsError):
                (root / name).symlink_to(f"usr/{name}")
        for name, text in _FILES.items():
            (root / name).write_text(text)
        (root / "tmp").chmod(0o1777)
        (root / "var/tmp").chmod(0o1777)

    def look(self) -> None:
        """Starts what is bound and does not run yet."""
        for pod in self.store.items("pods"):
            uid = pod["metadata"]["uid"]
            phase = pod.get("status", {}).get("phase")
            with self._lock:
                if "nodeName" not in pod["spec"] or uid in self.runs:
                    continue
                if phase in ("Succeeded", "Failed"):
                    continue
                # It may have gone since, and its run with it.
                metadata = pod["metadata"]
                now_there = self.store.find("pods", metadata["namespace"], metadata["name"])
                if now_there is None or now_there["metadata"]["uid"] != uid:
                    continue
                run = self.runs[uid] = PodRun(self, pod)
            run.thread.start()

    def read_log(self, pod: Object, container: str) -> Log:
        """Where the log of a container is; raises ApiError as the API does."""
        name, spec = pod["metadata"]["name"], pod["spec"]
        if "nodeName" not in spec:
            raise _bad_request(f"pod {name} does not have a host assigned")
        if spec["nodeName"] in self.offline:
            raise ApiError(
                500,
                "InternalError",
                'Get "https://10.0.0.2:10250/containerLogs": dial tcp: i/o timeout',
            )
        run = self.runs.get(pod["metadata"]["uid"])
        runs = [*run.history] if run else []
        found = [one for one in runs if one.name == container and one.started]
        if not found:
            waiting = (run.waiting.get(container) if run else None) or "ContainerCreating"
            reason = f"waiting to start: {waiting}"
            if "ImagePull" in waiting:
                reason = "waiting to start: trying and failing to pull image"
            raise _bad_request(f'container "{container}" in pod "{name}" is {reason}')
        last = found[-1]
        return Log(last.log, lambda: last.terminated is None)

    def close(self) -> None:
        for run in [*self.runs.values()]:
            run.gone.set()
        for run in [*self.runs.values()]:
            run.thread.join()


class PodRun:
    """A pod on its node, by a thread of its own, until its object is gone."""

    def __init__(self, kubelet: Kubelet, pod: Object) -> None:
        self.kubelet = kubelet
        self.pod = pod
        metadata = pod["metadata"]
        self.uid: str = metadata["uid"]
        self.namespace: str = metadata["namespace"]
        self.name: str = metadata["name"]
        self.spec: Mapping[str, Any] = pod["spec"]
        self.node: str = pod["spec"]["nodeName"]
        self.folder = kubelet.folder / "pods" / self.uid
        self.memory = kubelet.memory_folder / self.uid
        self.history: list[Container] = []
        self.current: dict[str, Container] = {}
        self.waiting: dict[str, str] = {}
        self.gone = threading.Event()
        """Set: the bed wants it to end at once."""
        self.wire: Wire | None = None
        self._messages: dict[str, str] = {}
        #: No descriptor is closed while one is used by another thread.
        self._closing = threading.Lock()
        self._refresh: list[tuple[Path, Callable[[Object], Mapping[str, bytes]], int]] = []
        self._known_annotations: Any = None
        self.thread = threading.Thread(target=self._run, name=f"pod {self.name}", daemon=True)

    @property
    def is_alive(self) -> bool:
        return any(one.pid and one.terminated is None for one in self.history)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal to the first process of all containers."""
        for one in [*self.current.values()]:
            with self._closing, contextlib.suppress(ProcessLookupError):
                if one.terminated is None and one.pidfd >= 0:
                    signal.pidfd_send_signal(one.pidfd, number)

    # What follows runs in the thread of the pod.

    def _run(self) -> None:
        try:
            with contextlib.suppress(_StoppedError):
                self._live()
            self._end()
        finally:
            self._tidy()

    def _live(self) -> None:
        self._set_up()
        for container in self.spec["containers"]:
            self._start(container)
        while True:
            self._report("Running")
            self._watch_containers()
            codes = [self._code(one["name"]) for one in self.spec["containers"]]
            if None not in codes:
                self._report("Failed" if any(codes) else "Succeeded")
                return

    def _look(self) -> Object | None:
        """The pod as it is now, where its node may know; raises _StoppedError when it is to end."""
        if self.gone.is_set():
            raise _StoppedError
        if self.node in self.kubelet.offline:
            return None
        pod = self.kubelet.store.find("pods", self.namespace, self.name)
        if pod is None or pod["metadata"]["uid"] != self.uid:
            raise _StoppedError
        if "deletionTimestamp" in pod["metadata"]:
            self.pod = pod
            raise _StoppedError
        if pod is not self.pod:
            self.pod = pod
            annotations = (pod["metadata"].get("annotations"), pod["metadata"].get("labels"))
            if annotations != self._known_annotations:
                self._known_annotations = annotations
                for folder, files, mode in self._refresh:
                    _write_volume(folder, files(pod), mode, self._group)
        return pod

    @property
    def _group(self) -> int:
        return int((self.spec.get("securityContext") or {}).get("fsGroup") or 0)

    def _retry(self, container: str, attempt: Callable[[], Any], reason: str) -> Any:
        """Tries until it works, and tells what keeps it."""
        count = 0
        while True:
            self._look()
            try:
                result = attempt()
            except _BlockedError as blocked:
                count += 1
                self.waiting[container] = reason or blocked.reason
                self._messages[container] = "" if reason else str(blocked)
                if blocked.reason == "ErrImagePull":
                    self._tell_of_image(container, str(blocked), count)
                else:
                    self.kubelet.record(
                        self.pod,
                        "Warning",
                        "FailedMount" if reason else "Failed",
                        f"{'' if reason else 'Error: '}{blocked}",
                    )
                self._report("Pending")
                ends_at = time.monotonic() + _RETRY_S
                while time.monotonic() < ends_at:
                    self._look()
                    self.gone.wait(_LOOK_S)
                continue
            self.waiting.pop(container, None)
            self._messages.pop(container, None)
            return result

    def _tell_of_image(self, container: str, message: str, count: int) -> None:
        image = next(one["image"] for one in self.spec["containers"] if one["name"] == container)
        record = self.kubelet.record
        if count == 1:
            record(self.pod, "Warning", "Failed", f'Failed to pull image "{image}": {message}')
            record(self.pod, "Warning", "Failed", "Error: ErrImagePull")
            return
        self.waiting[container] = "ImagePullBackOff"
        self._messages[container] = f'Back-off pulling image "{image}": ErrImagePull: {message}'
        record(self.pod, "Warning", "Failed", "Error: ImagePullBackOff")

    def _set_up(self) -> None:
        self.folder.mkdir()
        self.memory.mkdir()
        for one in self.spec["containers"]:
            self.waiting[one["name"]] = "ContainerCreating"
        self.wire = self.kubelet.network.add(self.uid)
        self._report("Pending")
        self.kubelet.network.sync()
        host = self.spec.get("hostname") or self.name
        names = host
        if self.spec.get("subdomain"):
            place = f"{self.spec['subdomain']}.{self.namespace}.svc.{DOMAIN}"
            names = f"{host}.{place} {host}"
        loopback = self.kubelet.network.loopback
        (self.folder / "hosts").write_text(f"{loopback} localhost\n{self.wire.address} {names}\n")
        search = f"{self.namespace}.svc.{DOMAIN} svc.{DOMAIN} {DOMAIN}"
        (self.folder / "resolv.conf").write_text(
            f"search {search}\nnameserver {self.kubelet.network.dns}\noptions ndots:5\n"
        )
        first = self.spec["containers"][0]["name"]
        for volume in self.spec.get("volumes") or []:
            self._retry(first, functools.partial(self._make_volume, volume), "ContainerCreating")
        for one in self.spec["containers"]:
            self.waiting[one["name"]] = "ContainerCreating"

    def _make_volume(self, volume: Mapping[str, Any]) -> None:
        name = volume["name"]
        path = self.folder / "volumes" / name
        if "hostPath" in volume:
            return
        if "emptyDir" in volume:
            if volume["emptyDir"].get("medium") == "Memory":
                path = self.memory / name
            path.mkdir(parents=True, exist_ok=True)
            os.chown(path, 0, self._group)
            path.chmod(0o2777 if self._group else 0o777)
            return
        sources = [volume]
        default = 0o644
        for kind in ("projected", "secret", "downwardAPI"):
            if kind in volume:
                default = volume[kind].get("defaultMode", 0o644)
        if "projected" in volume:
            sources = volume["projected"]["sources"]

        def files(pod: Object) -> Mapping[str, bytes]:
            found: dict[str, bytes] = {}
            for source in sources:
                found.update(self._files_of(name, source, pod))
            return found

        _write_volume(path, files(self.pod), default, self._group)
        if any("downwardAPI" in source for source in sources):
            self._refresh.append((path, files, default))

    def _files_of(self, name: str, source: Mapping[str, Any], pod: Object) -> dict[str, bytes]:
        if "secret" in source:
            part = source["secret"]
            title = part.get("secretName") or part.get("name")
            found = self.kubelet.store.find("secrets", self.namespace, title)
            if found is None:
                raise _BlockedError(
                    "FailedMount",
                    f'MountVolume.SetUp failed for volume "{name}" : secret "{title}" not found',
                )
            return {key: base64.b64decode(text) for key, text in (found.get("data") or {}).items()}
        if "downwardAPI" in source:
            annotations = pod["metadata"].get("annotations") or {}
            paths = {each["path"]: each["fieldRef"] for each in source["downwardAPI"]["items"]}
            names = {
                path: field["fieldPath"].removeprefix("metadata.annotations['").removesuffix("']")
                for path, field in paths.items()
            }
            return {path: annotations.get(name, "").encode() for path, name in names.items()}
        raise _BlockedError(
            "FailedMount", f'MountVolume.SetUp failed for volume "{name}" : unknown to this bed'
        )

    def _image(self, container: Mapping[str, Any]) -> Image:
        name = container["image"]
        image = self.kubelet.images.get(name)
        if image is None:
            raise _BlockedError(
                "ErrImagePull",
                f'rpc error: code = NotFound desc = failed to pull and unpack image "{name}": '
                f'failed to resolve reference "{name}": {name}: not found',
            )
        return image

    def _environment(self, container: Mapping[str, Any], image: Image) -> dict[str, str]:
        result = {
            "PATH": image.path,
            "HOSTNAME": self.spec.get("hostname") or self.name,
            "KUBERNETES_SERVICE_HOST": str(self.kubelet.network.services[1]),
            "KUBERNETES_SERVICE_PORT": "443",
        }
        return result | {one["name"]: one["value"] for one in container.get("env") or ()}

    def _start(self, container: Mapping[str, Any]) -> None:
        name = container["name"]
        image = self._retry(name, lambda: self._image(container), "")
        environment, user = self._environment(container, image), self._user(container)
        count = sum(one.name == name for one in self.history)
        folder = self.folder / f"{name}-{count}"
        folder.mkdir()
        one = Container(name, f"{self.uid[:13]}-{name}-{count}", folder)
        self.history.append(one)
        self.current[name] = one
        one.log.touch()
        arguments = self._arguments(container, image, environment, user, one)
        try:
            self._look()
            self.kubelet.podman.call(*arguments, cwd=folder)
        except RuntimeError as error:
            message = f"failed to create containerd task: {error}"
            one.started = one.started or stamp()
            one.terminated = {
                "exitCode": 128,
                "reason": "StartError",
                "message": message,
                "startedAt": "1970-01-01T00:00:00Z",
                "finishedAt": stamp(),
            }
            self.kubelet.record(self.pod, "Warning", "Failed", f"Error: {message}")
            return
        one.pid = int((folder / "pid").read_text())
        with contextlib.suppress(ProcessLookupError):
            one.pidfd = os.pidfd_open(one.pid)
        one.started = stamp()
        self.waiting.pop(name, None)

    def _user(self, container: Mapping[str, Any]) -> tuple[int, int]:
        pod_context = self.spec.get("securityContext") or {}
        context = {**pod_context, **(container.get("securityContext") or {})}
        user = int(context.get("runAsUser") or 0)
        return user, int(context.get("runAsGroup") or 0)

    def _arguments(
        self,
        container: Mapping[str, Any],
        image: Image,
        environment: Mapping[str, str],
        user: tuple[int, int],
        one: Container,
    ) -> list[str]:
        assert self.wire is not None
        pod_context = self.spec.get("securityContext") or {}
        context = container.get("securityContext") or {}
        capabilities = context.get("capabilities") or {}
        limits = (container.get("resources") or {}).get("limits") or {}
        root = one.folder / "root"
        mounts = [*self._mounts(container)]
        self.kubelet.make_root(root, [place for _, place, _ in mounts])
        for name in ("hosts", "resolv.conf"):
            (root / "etc" / name).touch()
            mounts.append((self.folder / name, f"/etc/{name}", "ro" if name != "hosts" else "rw"))
        mounts += [(folder, str(folder), "ro") for folder in image.folders]
        options = [
            "run", "-d", "--rootfs",
            f"--name={one.id}",
            f"--pidfile={one.folder / 'pid'}",
            f"--log-opt=path={one.log}",
            f"--network=ns:{self.wire.path}",
            f"--hostname={self.spec.get('hostname') or self.name}",
            f"--user={user[0]}:{user[1]}",
            "--no-hosts", "--passwd=false", "--unsetenv-all", "--pids-limit=0",
        ]  # fmt: skip
        options += [f"--cap-drop={name.lower()}" for name in capabilities.get("drop") or []]
        if pod_context.get("fsGroup"):
            options.append(f"--group-add={pod_context['fsGroup']}")
        if context.get("allowPrivilegeEscalation") is False:
            options.append("--security-opt=no-new-privileges")
        if context.get("readOnlyRootFilesystem"):
            options += ["--read-only", "--read-only-tmpfs=false"]
        if "memory" in limits:
            limit = memory_bytes(limits["memory"])
            options += [f"--memory={limit}b", f"--memory-swap={limit}b"]
        for source, place, mode in mounts:
            options.append(f"--volume={source}:{place}:{mode}")
        options += [f"--env={name}={value}" for name, value in environment.items()]
        return [*options, str(root), *container["command"]]

    def _mounts(self, container: Mapping[str, Any]) -> Iterable[tuple[Path, str, str]]:
        volumes = {one["name"]: one for one in self.spec.get("volumes") or []}
        for mount in container.get("volumeMounts") or []:
            volume = volumes[mount["name"]]
            path = self.folder / "volumes" / mount["name"]
            mode = "ro" if mount.get("readOnly") else "rw"
            if "hostPath" in volume:
                path = Path(volume["hostPath"]["path"])
            elif "emptyDir" in volume:
                if volume["emptyDir"].get("medium") == "Memory":
                    path = self.memory / mount["name"]
            else:
                mode = "ro"
            yield path, mount["mountPath"], mode
        if self.spec.get("automountServiceAccountToken") is not False:
            token = self.folder / "token"
            account = {"namespace": self.namespace.encode(), "token": b"of-the-pod", "ca.crt": b""}
            _write_volume(token, account, 0o644, self._group)
            yield token, "/var/run/secrets/kubernetes.io/serviceaccount", "ro"

    def _watch_containers(self) -> None:
        """Waits until a container has ended."""
        names = [one["name"] for one in self.spec["containers"]]
        running = [self.current[name] for name in names if self.current[name].terminated is None]
        while not any(self._has_ended(one) for one in running) and running:
            self._look()

    def _has_ended(self, one: Container, wait_s: float = _LOOK_S) -> bool:
        if one.terminated is not None:
            return True
        if (one.folder / "oom").exists():  # the whole container goes, as with cgroups v2
            with contextlib.suppress(ProcessLookupError, OSError):
                signal.pidfd_send_signal(one.pidfd, signal.SIGKILL)
        if one.pidfd >= 0:
            poll = select.poll()
            poll.register(one.pidfd, select.POLLIN)
            if not poll.poll(wait_s * 1000):
                return False
        code = int(self.kubelet.podman.call("wait", "--interval=20ms", one.id))
        reason = "Completed" if code == 0 else "Error"
        if (one.folder / "oom").exists() and code == 137:
            reason = "OOMKilled"
        one.terminated = {
            "exitCode": code,
            "reason": reason,
            "startedAt": one.started,
            "finishedAt": stamp(),
            "containerID": f"podman://{one.id}",
        }
        self._close(one)
        return True

    def _close(self, one: Container) -> None:
        with self._closing:
            if one.pidfd >= 0:
                os.close(one.pidfd)
                one.pidfd = -1

    def _code(self, name: str) -> int | None:
        terminated = self.current[name].terminated
        return None if terminated is None else int(terminated["exitCode"])

    def _end(self) -> None:
        """Stops what runs, and ends the object's deletion."""
        graceful = not self.gone.is_set()
        while graceful:  # the pod is over, but its object is there: its log can be read
            pod = None
            if self.node not in self.kubelet.offline:
                pod = self.kubelet.store.find("pods", self.namespace, self.name)
                if pod is None or pod["metadata"]["uid"] != self.uid:
                    break
                if "deletionTimestamp" in pod["metadata"]:
                    self._stop()
                    self._finalize()
            if self.gone.wait(_LOOK_S):
                break
        self.kill()
        for one in self.history:
            while one.pid and not self._has_ended(one):
                pass

    def _stop(self) -> None:
        running = [one for one in self.current.values() if one.pid and one.terminated is None]
        if not running:
            if self.pod.get("status", {}).get("phase") in ("Pending", "Running"):
                self._finish()
            return
        self.kill(signal.SIGTERM)
        began = time.monotonic()
        while running:
            pod = self.kubelet.store.find("pods", self.namespace, self.name)
            if pod is None or pod["metadata"]["uid"] != self.uid or self.gone.is_set():
                break
            grace = pod["metadata"].get("deletionGracePeriodSeconds", 0)
            if time.monotonic() - began >= grace:
                self.kill()
            running = [one for one in running if not self._has_ended(one)]
        self._finish()

    def _finish(self) -> None:
        """The last status of a pod that was told to end: failed, unless all ended well."""
        if self.gone.is_set():
            return
        for one in self.spec["containers"]:
            self.waiting.setdefault(one["name"], "ContainerCreating")
        ended = [self.current.get(one["name"]) for one in self.spec["containers"]]
        good = all(one and one.terminated and one.terminated["exitCode"] == 0 for one in ended)
        self._report("Succeeded" if good else "Failed")

    def _finalize(self) -> None:
        with contextlib.suppress(ApiError):
            self.kubelet.store.delete("pods", self.namespace, self.name, grace_s=0, uid=self.uid)

    def _tidy(self) -> None:
        for one in self.history:
            if one.pid:
                with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
                    self.kubelet.podman.call("rm", "--force", "--time=0", "--ignore", one.id)
            self._close(one)
            if one.terminated is None:
                one.terminated = {}
        if self.wire is not None:
            self.kubelet.network.remove(self.wire)
        for folder in (self.folder, self.memory):
            shutil.rmtree(folder, ignore_errors=True)
        self.kubelet.runs.pop(self.uid, None)

    def _report(self, phase: str) -> None:
        """Writes the status, as soon as the node is heard of."""
        while self.node in self.kubelet.offline and not self.gone.is_set():
            self.gone.wait(_LOOK_S)
        specified = {one["name"] for one in self.spec["containers"]}
        ready = phase == "Running" and all(
            name in self.current and self.current[name].terminated is None for name in specified
        )

        def write(pod: Object) -> None:
            status = pod.setdefault("status", {})
            status["phase"] = phase
            if self.wire is not None:
                status["podIP"] = self.wire.address
            conditions = status.setdefault("conditions", [])
            found = next((one for one in conditions if one["type"] == "Ready"), None)
            if found is None:
                conditions.append(found := {"type": "Ready"})
            if found.get("status") != str(ready):
                found.update(status=str(ready), lastTransitionTime=stamp())
            status["containerStatuses"] = [self._status(one) for one in self.spec["containers"]]

        with contextlib.suppress(ApiError):  # it is gone
            self.pod = self.kubelet.store.update(
                "pods", self.namespace, self.name, write, uid=self.uid
            )

    def _status(self, container: Mapping[str, Any]) -> Object:
        name = container["name"]
        one = self.current.get(name)
        state: Object
        if one is not None and one.terminated is not None and name not in self.waiting:
            state = {"terminated": one.terminated}
        elif one is not None and one.started and one.terminated is None:
            state = {"running": {"startedAt": one.started}}
        else:
            waiting = {"reason": self.waiting.get(name, "ContainerCreating")}
            if self._messages.get(name):
                waiting["message"] = self._messages[name]
            state = {"waiting": waiting}
        image, ready = container["image"], "running" in state
        required = {"image": image, "imageID": image, "ready": ready, "restartCount": 0}
        return {"name": name, "state": state, **required}


def _write_volume(folder: Path, files: Mapping[str, bytes], mode: int, group: int) -> None:
    """Writes files as the kubelet does: a new folder, then one link is turned to it."""
    folder.mkdir(parents=True, exist_ok=True)
    fresh = folder / f"..{now().strftime('%Y_%m_%d_%H_%M_%S.%f')}"
    for name, data in files.items():
        path = fresh / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        os.chown(path, 0, group)
        path.chmod(mode | (0o440 if group else 0))
    fresh.mkdir(exist_ok=True)
    for part in (folder, fresh, *(path for path in fresh.rglob("*") if path.is_dir())):
        os.chown(part, 0, group)
        part.chmod(0o2755 if group else 0o755)
    data_link = folder / "..data"
    old = data_link.resolve() if data_link.is_symlink() else None
    turned = folder / "..data_tmp"
    turned.symlink_to(fresh.name)
    turned.rename(data_link)
    for name in {Path(name).parts[0] for name in files}:
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(f"..data/{name}")
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def _bad_request(message: str) -> ApiError:
    return ApiError(400, "BadRequest", message)


def interpreter_folders() -> list[Path]:
    """Where the interpreter of the tests lives, its virtual environment aside; not below /usr."""
    base = Path(sys.base_prefix).resolve()
    beside = base.parent  # links to it by another version's name stand there
    home = Path.home()
    wanted = base if beside in (home, *home.parents, Path("/")) else beside
    return [] if wanted.is_relative_to("/usr") else [wanted]
