"""A supervisor and its pods without Kubernetes: processes of this machine in place of pods.

A test is what Kubernetes is to them: it starts the first process of each pod, ends it as a container
is ended, and starts another one of the same host name in its place.
"""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

import psutil

import launchpad_lite as lp
from courier.lowlevel import bound
from launchers.hosts.arrival import Arrival, Hello
from launchers.hosts.deployment import _LISTEN_HOST, Deployment, Starter, deploy
from launchers.hosts.host_list import HostSpec
from launchers.hosts.host_options import HostOptions, Tunnel
from launchers.hosts.reachability import same_for_all
from launchers.hosts.shipping import pack_up
from launchers.kubernetes._exchange import PodExchange
from launchers.kubernetes._fleet import PodFleet
from launchers.kubernetes._names import Names
from launchers.kubernetes._order import _trust, read_trust
from launchers.supervision.remote import AgentHost
from launchers.supervision.supervised_program import SupervisedProgram
from launchpad_lite.launching import LaunchOptions
from launchpad_lite.launching.launch import plan as make_plan
from launchpad_lite.testing import LaunchedProgram, poll_until
from tests.launchers.marks import MARK, Marked

#: Runs what is mounted, after something else.
_RUN = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"


def write_trust(folder: Path) -> Path:
    """Writes what is mounted into each pod of a run; returns the folder."""
    for name, content in _trust("pods", Names.of("pods", ["counter"])).items():
        (folder / name).write_bytes(content)
    return folder


def open_files() -> int:
    """Returns how many files this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


class Pod:
    """What a container is: a first process, and all that it started."""

    def __init__(
        self,
        host: str,
        folder: Path,
        trust: Path,
        port: int,
        wait_s: float = 60.0,
        *,
        output: int | None = None,
        first: str = "",
    ) -> None:
        mark = uuid.uuid4().hex
        self._inside = Marked(mark)
        self.errors = folder / f"{host}-{mark}.stderr"
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-c", f"{first}\n{_RUN}", str(trust / "pod.py")]
                if first
                else [sys.executable, str(trust / "pod.py")],
                env={
                    **os.environ,
                    "LAUNCHPAD_SUPERVISOR": f"127.0.0.1:{port}",
                    "LAUNCHPAD_WAIT_S": str(wait_s),
                    "LAUNCHPAD_HOST": host,
                    MARK: mark,
                },
                stdin=subprocess.DEVNULL,
                stderr=errors if output is None else output,
                start_new_session=True,
            )

    def processes(self) -> list[psutil.Process]:
        """All that runs in it."""
        return self._inside.processes()

    def crash(self) -> None:
        """Ends everything in it at once, as the kernel does when the first process is killed."""
        # By its number as well: while it is being started, its environment is not there yet.
        self.process.kill()
        while self.processes():
            self._inside.kill()
            self.process.poll()
        self.process.wait()

    def terminate(self) -> None:
        """As Kubernetes does first: the first process, and no other, gets SIGTERM."""
        self.process.terminate()

    def end(self, timeout_s: float = 60.0) -> int:
        """Waits for its end and returns its exit code; nothing of it may be left."""
        code = self.process.wait(timeout_s)
        # With the first process the kernel ends all others; they should be gone without that.
        left = [" ".join(each.cmdline()) for each in self.processes()]
        assert not left, left
        return code


class Shown:
    """Output of nodes, as it came."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.last: dict[str, bytes] = {}

    def show(self, node: str, data: bytes) -> None:
        self.sizes[node] = self.sizes.get(node, 0) + len(data)
        self.last[node] = (self.last.get(node, b"") + data)[-4096:]

    def finish(self, node: str) -> None: ...


class Cluster:
    """A supervisor in this process, and pods. A context manager: nothing is left behind it."""

    def __init__(self, folder: Path, trust: Path, cache: Path) -> None:
        self.folder = folder
        self.trust = trust
        self._cache = cache
        self.exchange = PodExchange(read_trust(trust), 0)
        self._ports = contextlib.ExitStack()
        self.pods: dict[str, Pod] = {}
        self.gone: list[Pod] = []
        self.shown = Shown()
        #: Whether the supervisor is about to wait for a pod, and whether it may.
        self.is_about_to_wait, self.may_wait = threading.Event(), threading.Event()
        self.may_wait.set()
        self.is_started = threading.Event()
        self._unlucky: set[str] = set()
        self._launched: LaunchedProgram | None = None

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *exc: object) -> None:
        self.may_wait.set()
        if self._launched is not None:
            self._launched.close()
        self.exchange.close()
        for pod in [*self.pods.values(), *self.gone]:
            pod.crash()
        self._ports.close()

    def lose_the_next(self, host: str) -> None:
        """Has the next pod of a host be lost when its agent is up, before its node is started."""
        self._unlucky.add(host)

    def start(self, host: str, **options: Any) -> Pod:
        """Starts the pod of a host, or another one in its place."""
        if host in self.pods:
            self.gone.append(self.pods[host])
        self.pods[host] = Pod(host, self.folder, self.trust, self.exchange.port, **options)
        return self.pods[host]

    def replace(self, host: str) -> None:
        """Loses the pod of a host, and starts another one in its place."""
        self.is_started.clear()
        self.pods[host].crash()
        self.start(host)
        self.is_started.set()

    def launch(
        self,
        program: lp.Program,
        *,
        restart: Any = None,
        checkpoints: Path | None = None,
        silence_s: float = 8.0,
        wait_s: float = 60.0,
        notice_s: float = 20.0,
        comes_back: bool = False,
        pods: bool = True,
    ) -> LaunchedProgram:
        """Starts all pods, and the program in them."""
        plan = make_plan(program, "local_mp", restart=restart, checkpoints=checkpoints)
        for address in plan.addresses:
            address.port = self._hold_port()
        hosts = {each.name: _host(each.name) for each in plan.executables}
        if pods:
            for host in hosts.values():
                self.start(host)
        tls = read_trust(self.trust)

        def reach(spec: HostSpec, hello: Hello) -> Arrival:
            self.is_about_to_wait.set()
            self.may_wait.wait()
            return Arrival(spec.name, ("its pod",), hello, self.exchange.expect(spec.name))

        deployment = Deployment(
            plan=plan,
            options=LaunchOptions(notice_s, self.folder / "crash"),
            specs=tuple(HostSpec(host, address="127.0.0.1") for host in hosts.values()),
            wanted=HostOptions(
                hosts, tunnel=Tunnel.NEVER, silence_s=silence_s, cache=str(self._cache)
            ),
            shipment=pack_up(plan.executables),
            reach_host=reach,
            ways=same_for_all(dict.fromkeys(hosts.values(), "127.0.0.1")),
            issue=lambda *_: tls,
            output=self.shown,
            in_pods=True,
        )

        def make_fleet(starter: Starter, supervised: SupervisedProgram) -> PodFleet:
            readmit = starter.readmit

            def readmit_and_lose(host: AgentHost, *args: Any) -> AgentHost:
                again = readmit(host, *args)
                if host.name in self._unlucky:
                    self._unlucky.remove(host.name)
                    self.is_started.wait(60)  # a pod may call before its start has returned
                    self.pods[host.name].crash()
                    poll_until(lambda: again.is_lost)
                    self.start(host.name)
                return again

            starter.readmit = readmit_and_lose  # type: ignore[method-assign]
            return PodFleet(starter, supervised, wait_s, self.exchange, lambda: comes_back)

        running = deploy(deployment, 60.0, make_fleet)
        self._launched = LaunchedProgram(program, running)
        return self._launched

    def _hold_port(self) -> int:
        """Holds a port, beside which the agents of pods hold it, too, and servers listen."""
        # Where agents do: of one that is held on loopback alone, others may have another address.
        options = socket.SO_REUSEADDR, socket.SO_REUSEPORT
        held = self._ports.enter_context(bound(_LISTEN_HOST, 0, *options))
        return int(held.getsockname()[1])

    def ends(self) -> dict[str, int]:
        """Waits for the ends of all pods; returns exit codes by host."""
        return {host: pod.end() for host, pod in self.pods.items()}


def _host(node: str) -> str:
    label, _, replica = node.rstrip("]").partition("[")
    return f"run-{label}-{replica}"
