"""Pods and their supervisor, without Kubernetes: real processes on this machine in the place of pods.

A test is what Kubernetes is to them: it starts the first process of each pod, ends it as a
container is ended, and starts another one of the same host name in its place.
"""

import base64
import contextlib
import errno
import io
import itertools
import json
import math
import os
import pickle
import random
import selectors
import signal
import socket
import ssl
import subprocess
import sys
import tarfile
import threading
import time
import types
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import portpicker
import psutil
import pytest
from hypothesis import given, settings, strategies as st

import courier
import launchpad_lite as lp
from launchers._deployment import Deployment, Starter, Tunnel, deploy
from launchers._hosts import HostSpec
from launchers._kubernetes.exchange import Caller, Exchange, Line
from launchers._kubernetes.fleet import PodFleet, _Return
from launchers._kubernetes.names import Names
from launchers._kubernetes.order import _trust, read_trust
from launchers._kubernetes.supervise import _Pace, _Signals, _Supervision
from launchers._placement import Strategy
from launchers._reachability import SameForAll
from launchers._shipping import pack_up
from launchers._supervisor import SupervisedProgram
from launchers._trust import Authority
from launchers.host import pod as pod_module
from launchers.host.agent import _PodLog
from launchers.host.arrival import Arrival, Hello
from launchers.host.pod import MAX_GREETING_BYTES, Pump, _part
from launchers.kubernetes import KubernetesLauncher
from launchpad_lite._launch import plan as make_plan
from launchpad_lite.errors import LaunchError
from launchpad_lite.launching import LaunchOptions, NodeStatus
from launchpad_lite.testing import LaunchedProgram, poll_until
from launchpad_lite.testing.programs import call_until_answered


@pytest.fixture(autouse=True, scope="module")
def _travels_by_value() -> Iterator[None]:
    """Pods are up sooner if they need not import what tests need."""
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    yield
    cloudpickle.unregister_pickle_by_value(module)


QUICK = lp.RestartPolicy(backoff_s=0.01, max_restarts=50)
MAY_COME_BACK = 75
_TAG = "LAUNCHERS_TEST_POD"
_LINUX = sys.platform == "linux"


# Nodes


class Counter:
    """Its state is a number."""

    def __init__(self) -> None:
        self._value = 0

    def add(self, by: int = 1) -> int:
        self._value += by
        return self._value

    def pid(self) -> int:
        return os.getpid()

    def restarts(self) -> int:
        return lp.restart_count()

    def save(self, folder: Path) -> None:
        (folder / "value").write_text(str(self._value))

    def restore(self, folder: Path) -> None:
        self._value = int((folder / "value").read_text())


def add_some(counter: Any, calls: int) -> None:
    for _ in range(calls):
        print("it is", counter.add(), flush=True)


def fail() -> None:
    raise ValueError("boom")


def wait_for_stop() -> None:
    lp.wait_for_stop()


def call_until_stopped(counter: Any, marks: Path) -> None:
    """Calls without pause; the file of marks grows with each call that was answered."""
    while not lp.wait_for_stop(0.01):
        with contextlib.suppress(courier.ServerLostError):
            counter.add()
            with marks.open("ab") as file:
                file.write(b".")


def note_stop(marks: Path) -> None:
    lp.wait_for_stop()
    with marks.open("ab") as file:
        file.write(b"told ")


def never_listen() -> None:
    threading.Event().wait()


def start_family() -> None:
    """Leaves processes behind that nobody finds by session or group."""
    subprocess.Popen(["sleep", "1000"])
    subprocess.Popen([sys.executable, "-c", "import os, time; os.setsid(); time.sleep(1000)"])
    lp.wait_for_stop()


def print_much(megabytes: int) -> None:
    line = b"x" * 999 + b"\n"
    for _ in range(megabytes):
        os.write(1, line * 100)
        for _ in range(9):
            os.write(1, line * 100)


def write_here() -> None:
    Path("what-the-node-wrote").write_text("words")
    print(Path.cwd(), flush=True)


def check_size(work: bytes, size: int) -> None:
    assert len(work) == size


def call_all(counters: list[Any]) -> None:
    assert [counter.add() for counter in counters] == [1] * len(counters)


def print_and_check(work: bytes, size: int, megabytes: int) -> None:
    check_size(work, size)
    print_much(megabytes)


# What stands for a cluster


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
    ) -> None:
        self._tag = uuid.uuid4().hex
        self.errors = folder / f"{host}-{self._tag}.stderr"
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(trust / "pod.py")],
                env={
                    **os.environ,
                    "LAUNCHPAD_SUPERVISOR": f"127.0.0.1:{port}",
                    "LAUNCHPAD_WAIT_S": str(wait_s),
                    "LAUNCHPAD_HOST": host,
                    "LAUNCHPAD_POD": f"pod-of-{host}",
                    "LAUNCHPAD_NODE": "machine",
                    _TAG: self._tag,
                },
                stdin=subprocess.DEVNULL,
                stderr=errors if output is None else output,
                start_new_session=True,
            )

    def processes(self) -> list[psutil.Process]:
        """All that runs in it."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(_TAG) == self._tag and process.is_running():
                    found.append(process)
        return [each for each in found if _is_alive(each)]

    def crash(self) -> None:
        """Ends everything in it at once, as the kernel does when the first process is killed."""
        # By its number as well: while it is being started, its environment is not there yet.
        self.process.kill()
        while processes := self.processes():
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    process.kill()
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


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


class Shown:
    """Output of nodes, as it came."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.last: dict[str, bytes] = {}
        #: What agents have put in.
        self.note = b""

    def show(self, node: str, data: bytes) -> None:
        self.sizes[node] = self.sizes.get(node, 0) + len(data)
        if b"were lost" in data:
            self.note += data
        self.last[node] = (self.last.get(node, b"") + data)[-4096:]

    def finish(self, node: str) -> None: ...


class Cluster:
    """A supervisor in this process, and pods. A context manager: nothing is left behind it."""

    def __init__(self, folder: Path, trust: Path, cache: Path, port: int = 0) -> None:
        self.folder = folder
        self.trust = trust
        self._cache = cache
        self.exchange = Exchange(read_trust(trust), port)
        self.pods: dict[str, Pod] = {}
        self.gone: list[Pod] = []
        self.shown = Shown()
        #: Whether the supervisor is about to wait for a pod, and whether it may.
        self.is_about_to_wait, self.may_wait = threading.Event(), threading.Event()
        self.may_wait.set()
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

    def start(self, host: str) -> Pod:
        """Starts the pod of a host, or another one in its place."""
        if host in self.pods:
            self.gone.append(self.pods[host])
        self.pods[host] = Pod(host, self.folder, self.trust, self.exchange.port)
        return self.pods[host]

    def launch(
        self,
        program: lp.Program,
        *,
        restart: Any = None,
        checkpoints: Path | None = None,
        silence_s: float = 8.0,
        wait_s: float = 60.0,
        limit_s: float = 60.0,
        notice_s: float = 20.0,
        comes_back: bool = False,
        pods: bool = True,
    ) -> LaunchedProgram:
        """Starts all pods, and the program in them."""
        plan = make_plan(program, "local_mp", restart=restart, checkpoints=checkpoints)
        for address in plan.addresses:
            address.port = portpicker.pick_unused_port()
        hosts = {each.name: _host(each.name) for each in plan.executables}
        if pods:
            for host in hosts.values():
                self.start(host)
        tls = read_trust(self.trust)
        deployment = Deployment(
            plan=plan,
            options=LaunchOptions(notice_s, self.folder / "crash"),
            specs=tuple(HostSpec(host, address="127.0.0.1") for host in hosts.values()),
            choice=hosts,
            strategy=Strategy.SPREAD,
            shipment=pack_up(plan.executables),
            tunnel=Tunnel.NEVER,
            silence_s=silence_s,
            cache=str(self._cache),
            ways=SameForAll(dict.fromkeys(hosts.values(), "127.0.0.1")),
            issue=lambda *_: tls,
            output=self.shown,
            keeps_logs=False,
            in_pods=True,
        )

        def reach(spec: HostSpec, hello: Hello) -> Arrival:
            self.is_about_to_wait.set()
            self.may_wait.wait()
            return Arrival(spec.name, ("its pod",), hello, self.exchange.expect(spec.name))

        def make_fleet(starter: Starter, supervised: SupervisedProgram) -> PodFleet:
            return PodFleet(starter, supervised, wait_s, self.exchange, lambda: comes_back)

        running = deploy(deployment, reach, limit_s, make_fleet)
        self._launched = LaunchedProgram(program, running)
        return self._launched

    def ends(self) -> dict[str, int]:
        """Waits for the ends of all pods; returns exit codes by host."""
        return {host: pod.end() for host, pod in self.pods.items()}


def _host(node: str) -> str:
    label, _, replica = node.rstrip("]").partition("[")
    return f"run-{label}-{replica}"


@pytest.fixture(scope="module")
def trust(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is mounted into each pod."""
    folder = tmp_path_factory.mktemp("trust")
    for name, content in _trust("pods", Names.of("pods", ["counter"])).items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Code that pods have: shipped to the first of them only."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def cluster(tmp_path: Path, trust: Path, cache: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, trust, cache) as cluster:
        yield cluster


def counting(*others: lp.PyNode) -> lp.Program:
    """A program with a service, and nodes that run."""
    program = lp.Program("pods")
    program.add_node(lp.CourierNode(Counter), label="counter")
    for index, other in enumerate(others):
        program.add_node(other, label=f"runner{index}")
    return program


def with_caller(marks: Path) -> lp.Program:
    """A service, and a node that calls it until it is stopped."""
    marks.touch()
    program = lp.Program("pods")
    counter = program.add_node(lp.CourierNode(Counter), label="counter")
    program.add_node(lp.PyNode(call_until_stopped, counter, marks), label="caller")
    return program


def goes_on(marks: Path) -> None:
    """Waits until calls are answered that began after this one was called."""
    size = marks.stat().st_size
    poll_until(lambda: marks.stat().st_size >= size + 3, 60)


def restarts(launched: LaunchedProgram) -> dict[str, int]:
    return {each.name: each.restarts for each in launched.running.status()}


# How pods end


def test_pods_of_a_program_that_ends_well_end_well(cluster: Cluster) -> None:
    program = lp.Program("pods")
    counter = program.add_node(lp.CourierNode(Counter), label="counter")
    program.add_node(lp.PyNode(add_some, counter, 3), label="caller")
    result = cluster.launch(program).wait()
    assert result.outcome is lp.Outcome.COMPLETED
    assert cluster.ends() == {"run-counter-0": 0, "run-caller-0": 0}
    assert cluster.shown.last["caller[0]"] == b"it is 1\nit is 2\nit is 3\n"
    # `kubectl logs` of a pod shows it, too.
    assert cluster.pods["run-caller-0"].errors.read_bytes() == cluster.shown.last["caller[0]"]


def test_the_pod_of_a_node_that_failed_and_no_other_fails(cluster: Cluster) -> None:
    launched = cluster.launch(counting(lp.PyNode(fail), lp.PyNode(wait_for_stop)))
    with pytest.raises(lp.NodeFailedError, match="boom"):
        launched.wait()
    assert cluster.ends() == {"run-counter-0": 0, "run-runner0-0": 1, "run-runner1-0": 0}


# Pods that are lost


@pytest.fixture
def marks(tmp_path: Path) -> Path:
    """A file that nodes write to."""
    path = tmp_path / "marks"
    path.touch()
    return path


def test_a_node_goes_on_in_the_next_pod_and_its_callers_with_it(
    cluster: Cluster, marks: Path
) -> None:
    launched = cluster.launch(with_caller(marks), restart=QUICK)
    goes_on(marks)
    for _ in range(2):
        before = restarts(launched)["counter[0]"]
        cluster.pods["run-counter-0"].crash()
        cluster.start("run-counter-0")
        poll_until(lambda: restarts(launched)["counter[0]"] > before)  # noqa: B023
        goes_on(marks)
    assert restarts(launched) == {"counter[0]": 2, "caller[0]": 0}
    assert launched.stop().outcome is lp.Outcome.STOPPED
    assert cluster.ends() == {"run-counter-0": 0, "run-caller-0": 0}


def test_without_a_policy_the_loss_of_a_pod_ends_the_program_and_is_told(
    cluster: Cluster, marks: Path
) -> None:
    launched = cluster.launch(with_caller(marks))
    goes_on(marks)
    cluster.pods["run-counter-0"].crash()
    with pytest.raises(lp.NodeFailedError, match="run-counter-0 is lost: the link to it broke"):
        launched.wait()
    failure = launched.running.result.failures[0]
    assert (failure.node, failure.host, failure.host_lost) == ("counter[0]", "run-counter-0", True)
    # The caller may have failed of the loss before it was asked to end.
    assert cluster.pods["run-caller-0"].end() in (0, 1)


def test_a_pod_that_comes_before_its_predecessor_was_missed_takes_its_place(
    cluster: Cluster, marks: Path
) -> None:
    launched = cluster.launch(with_caller(marks), restart=QUICK)
    goes_on(marks)
    before = cluster.pods["run-counter-0"]
    cluster.may_wait.clear()  # until the port is free, which here it shares with the next pod
    cluster.start("run-counter-0")
    assert before.end() == MAY_COME_BACK
    cluster.may_wait.set()
    poll_until(lambda: restarts(launched)["counter[0]"] == 1)
    goes_on(marks)
    launched.stop()
    assert cluster.ends() == {"run-counter-0": 0, "run-caller-0": 0}


def test_the_failure_tells_that_no_other_pod_has_come(cluster: Cluster, marks: Path) -> None:
    launched = cluster.launch(with_caller(marks), restart=QUICK, wait_s=0.3)
    cluster.pods["run-counter-0"].crash()
    with pytest.raises(lp.NodeFailedError) as raised:
        launched.wait()
    assert "run-counter-0 is lost" in str(raised.value)
    assert "no pod could take its place: run-counter-0: it did not answer in time" in str(
        raised.value
    )


@pytest.mark.parametrize("is_waiting", [True, False])
@pytest.mark.parametrize(("how", "code"), [("stop", 0), ("kill", 1)])
def test_a_program_that_is_ended_waits_for_no_pod(
    cluster: Cluster, marks: Path, how: str, code: int, is_waiting: bool
) -> None:
    launched = cluster.launch(with_caller(marks), restart=QUICK, wait_s=300.0)
    cluster.pods["run-counter-0"].crash()
    if is_waiting:
        poll_until(lambda: restarts(launched)["counter[0]"] == 1)
    if how == "kill":
        launched.running.kill()
    else:
        launched.running.request_stop("enough")
    assert launched.running.join(60)
    assert cluster.pods["run-caller-0"].end() == code


def test_a_program_that_is_ended_when_it_was_about_to_wait_does_not_begin_to(
    cluster: Cluster, marks: Path
) -> None:
    launched = cluster.launch(with_caller(marks), restart=QUICK, wait_s=300.0)
    cluster.is_about_to_wait.clear()
    cluster.may_wait.clear()
    cluster.pods["run-counter-0"].crash()
    assert cluster.is_about_to_wait.wait(60)
    launched.running.request_stop("enough")
    poll_until(lambda: {each.state for each in launched.running.status()} == {"ended"})
    cluster.may_wait.set()
    assert launched.running.join(60)
    assert cluster.pods["run-caller-0"].end() == 0


def test_a_pod_that_is_lost_while_it_takes_the_place_of_another_has_a_successor(
    cluster: Cluster, marks: Path
) -> None:
    launched = cluster.launch(with_caller(marks), restart=QUICK)
    goes_on(marks)
    cluster.pods["run-counter-0"].crash()
    for _ in range(3):
        pod = cluster.start("run-counter-0")
        poll_until(lambda: cluster.exchange.caller("run-counter-0").pod != "")
        pod.crash()
    cluster.start("run-counter-0")
    goes_on(marks)
    launched.stop()
    assert cluster.ends() == {"run-counter-0": 0, "run-caller-0": 0}


def test_a_pod_that_is_silent_for_too_long_is_lost_and_ends(cluster: Cluster, marks: Path) -> None:
    launched = cluster.launch(with_caller(marks), restart=QUICK, silence_s=8.0)
    goes_on(marks)
    before = cluster.pods["run-counter-0"]
    before.process.send_signal(signal.SIGSTOP)
    poll_until(lambda: restarts(launched)["counter[0]"] == 1)
    # Its node ends by itself and frees the port, which here it shares with the next pod.
    poll_until(lambda: len(before.processes()) == 1)
    cluster.start("run-counter-0")
    goes_on(marks)
    before.process.send_signal(signal.SIGCONT)
    assert before.end() == MAY_COME_BACK
    goes_on(marks)
    launched.stop()
    assert cluster.ends() == {"run-counter-0": 0, "run-caller-0": 0}


def test_a_pod_that_is_lost_before_its_node_is_started_has_a_successor(
    cluster: Cluster, marks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = cluster.launch(with_caller(marks), restart=QUICK)
    goes_on(marks)
    readmit, lost = Starter.readmit, []
    is_started = threading.Event()

    def readmit_and_lose(*args: Any) -> Any:
        again = readmit(*args)
        if not lost:
            is_started.wait(60)  # a pod may call before its start has returned
            lost.append(again)
            cluster.pods["run-counter-0"].crash()
            poll_until(lambda: again.is_lost)
            cluster.start("run-counter-0")
        return again

    monkeypatch.setattr(Starter, "readmit", readmit_and_lose)
    cluster.pods["run-counter-0"].crash()
    cluster.start("run-counter-0")
    is_started.set()
    poll_until(lambda: restarts(launched)["counter[0]"] == 2)
    goes_on(marks)
    launched.stop()
    assert cluster.ends() == {"run-counter-0": 0, "run-caller-0": 0}


def test_pods_are_waited_for_without_end_where_a_queue_decides_when_they_come(
    cluster: Cluster, marks: Path
) -> None:
    for host in ("run-counter-0", "run-caller-0"):
        cluster.pods[host] = Pod(
            host, cluster.folder, cluster.trust, cluster.exchange.port, math.inf
        )
    launched = cluster.launch(
        with_caller(marks), restart=QUICK, limit_s=math.inf, wait_s=math.inf, pods=False
    )
    goes_on(marks)
    cluster.pods["run-counter-0"].crash()
    poll_until(lambda: restarts(launched)["counter[0]"] == 1)
    cluster.start("run-counter-0")
    goes_on(marks)
    cluster.pods["run-counter-0"].crash()
    poll_until(lambda: restarts(launched)["counter[0]"] == 2)
    # Nor do they hold up the end.
    assert launched.stop().outcome is lp.Outcome.STOPPED
    assert cluster.pods["run-caller-0"].end() == 0


def how_long_pods_and_supervisor_wait(**options: Any) -> tuple[str, float]:
    """Returns what pods are told, and the supervisor."""
    launcher = KubernetesLauncher("image:1", schedule_s=7, **options)
    files = launcher.emit(lp.plan(counting(), launcher), LaunchOptions())
    objects = [json.loads(text) for name, text in files.items() if name.endswith(".json")]
    (told,) = _waits(objects)
    parts = {
        name: base64.b64decode(data)
        for each in objects
        for name, data in (each.get("data") or {}).items()
        if name.startswith("part-")
    }
    blob = io.BytesIO(b"".join(parts[name] for name in sorted(parts)))
    with tarfile.open(fileobj=blob) as tar:
        member = tar.extractfile("order.pickle")
        assert member is not None
        return told, pickle.loads(member.read()).schedule_s


def _waits(objects: list[dict[str, Any]]) -> set[str]:
    return {each["value"] for each in _dicts(objects) if each.get("name") == "LAUNCHPAD_WAIT_S"}


def _dicts(item: Any) -> Iterator[dict[str, Any]]:
    if isinstance(item, dict):
        yield item
        item = list(item.values())
    if isinstance(item, list):
        for each in item:
            yield from _dicts(each)


def test_where_a_queue_admits_each_job_by_itself_pods_and_supervisor_have_no_limit() -> None:
    assert how_long_pods_and_supervisor_wait(queue="research") == ("inf", math.inf)
    assert how_long_pods_and_supervisor_wait(queue="research", jobset=True) == ("7", 7)
    assert how_long_pods_and_supervisor_wait() == ("7", 7)


@pytest.mark.parametrize(("detach", "wait_s"), [(True, "607"), (False, "812")])
def test_pods_wait_for_another_supervisor_as_long_as_the_launcher_may_need_to_remove_one(
    detach: bool, wait_s: str
) -> None:
    launcher = KubernetesLauncher("image:1", schedule_s=7, launcher_silence_s=200, detach=detach)
    plan = lp.plan(counting(), launcher, restart=QUICK)
    _, _, objects = launcher._make(plan, LaunchOptions(notice_s=5), suspended=True)
    assert _waits(objects) == {wait_s}


def test_when_pods_can_call_no_more_nodes_do_not_wait_for_new_ones(
    cluster: Cluster, marks: Path
) -> None:
    launched = cluster.launch(with_caller(marks), restart=QUICK, wait_s=300.0)
    goes_on(marks)
    cluster.exchange.close()
    assert launched.running.join(60)
    result = launched.running.result
    assert result.outcome is lp.Outcome.FAILED
    assert "the supervisor takes no calls any more" in str(launched.running.failure())
    launched.running.collected = True


def test_between_two_attempts_to_take_a_pod_in_there_is_a_pause(exchange: Exchange) -> None:
    attempts, pauses = [], []

    class Cancelled(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout)
            return len(pauses) == 3

    def readmit(*args: object) -> None:
        attempts.append(args)
        raise LaunchError("it has gone")

    starter: Any = types.SimpleNamespace(
        hosts=[], placement={}, release=lambda: None, readmit=readmit
    )
    program, host = types.SimpleNamespace(), types.SimpleNamespace()
    fleet = PodFleet(starter, program, math.inf, exchange, lambda: False)  # type: ignore[arg-type]
    with pytest.raises(LaunchError, match="it has gone"):
        fleet._readmit(host, _Return("a", 1, None, Cancelled()), math.inf)  # type: ignore[arg-type]
    assert len(attempts) == len(pauses) == 3
    assert min(pauses) > 0


def binds(listener: socket.socket, port: int) -> bool:
    with contextlib.suppress(OSError):
        listener.bind(("127.0.0.1", port))
        return True
    return False


def test_a_pod_that_cannot_take_its_node_may_be_followed_by_another(
    cluster: Cluster, marks: Path
) -> None:
    launched = cluster.launch(with_caller(marks), restart=QUICK)
    goes_on(marks)
    cluster.pods["run-counter-0"].crash()
    (address,) = launched.running.plan.addresses
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        poll_until(lambda: binds(taken, address.port))
        taken.listen()
        assert cluster.start("run-counter-0").end() == MAY_COME_BACK
    cluster.start("run-counter-0")
    goes_on(marks)
    launched.stop()
    assert cluster.ends() == {"run-counter-0": 0, "run-caller-0": 0}


# Pods that are told to end


def test_a_node_saves_its_state_when_its_pod_is_told_to_end_and_has_it_in_the_next(
    cluster: Cluster, tmp_path: Path
) -> None:
    # The policy allows no failure: a notice is none.
    policy = lp.RestartPolicy(max_restarts=0, backoff_s=0.01)
    launched = cluster.launch(
        counting(lp.PyNode(wait_for_stop)), restart=policy, checkpoints=tmp_path / "checkpoints"
    )
    client = launched.client("counter")
    assert client.add(5) == 5
    before = cluster.pods["run-counter-0"]
    before.terminate()
    assert before.end() == MAY_COME_BACK
    cluster.start("run-counter-0")
    assert call_until_answered(client.add) == 6
    assert restarts(launched) == {"counter[0]": 1, "runner0[0]": 0}
    (restart,) = launched.stop().restarts
    assert "told from outside to end, by SIGTERM" in restart.failure.summary
    assert cluster.ends() == {"run-counter-0": 0, "run-runner0-0": 0}


def test_a_node_hears_of_the_end_of_its_pod(cluster: Cluster, marks: Path) -> None:
    launched = cluster.launch(counting(lp.PyNode(note_stop, marks)), restart=QUICK)
    poll_until(lambda: launched.running.status()[1].state == "running")
    cluster.pods["run-runner0-0"].terminate()
    assert cluster.pods["run-runner0-0"].end() == MAY_COME_BACK
    assert marks.read_bytes() == b"told "
    cluster.start("run-runner0-0")
    poll_until(lambda: restarts(launched)["runner0[0]"] == 1)
    poll_until(lambda: launched.running.status()[1].state == "running")
    launched.stop()
    assert marks.read_bytes() == b"told told "
    assert cluster.ends() == {"run-counter-0": 0, "run-runner0-0": 0}


def test_a_node_that_does_not_listen_is_ended_after_its_notice_and_goes_on_elsewhere(
    cluster: Cluster,
) -> None:
    launched = cluster.launch(counting(lp.PyNode(never_listen)), restart=QUICK, notice_s=0.3)
    poll_until(lambda: launched.running.status()[1].state == "running")
    cluster.pods["run-runner0-0"].terminate()
    assert cluster.pods["run-runner0-0"].end() == MAY_COME_BACK
    cluster.start("run-runner0-0")
    poll_until(lambda: restarts(launched)["runner0[0]"] == 1)
    poll_until(lambda: launched.running.status()[1].state == "running")


def test_without_a_policy_the_end_of_a_pod_is_that_of_the_program(cluster: Cluster) -> None:
    launched = cluster.launch(counting(lp.PyNode(wait_for_stop)))
    poll_until(lambda: launched.running.status()[0].state == "serving")
    cluster.pods["run-counter-0"].terminate()
    assert launched.running.join(60)
    result = launched.running.result
    assert (result.outcome, result.signum) == (lp.Outcome.INTERRUPTED, signal.SIGTERM)
    assert result.reason == "SIGTERM to counter[0]"
    assert cluster.ends() == {"run-counter-0": MAY_COME_BACK, "run-runner0-0": 0}


def test_a_pod_whose_node_has_ended_may_be_replaced_by_one_that_does_nothing(
    cluster: Cluster,
) -> None:
    launched = cluster.launch(counting(lp.PyNode(print_much, 0), lp.PyNode(wait_for_stop)))
    poll_until(lambda: launched.running.status()[1].state == "ended")
    cluster.pods["run-runner0-0"].terminate()
    assert cluster.pods["run-runner0-0"].end() == MAY_COME_BACK
    other = cluster.start("run-runner0-0")
    poll_until(lambda: len(other.processes()) == 2)
    assert launched.stop().outcome is lp.Outcome.STOPPED
    cluster.exchange.close()
    assert cluster.ends() == {
        "run-counter-0": 0,
        "run-runner0-0": MAY_COME_BACK,
        "run-runner1-0": 0,
    }


def test_a_pod_ends_by_a_signal_before_anybody_has_answered_it(tmp_path: Path, trust: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        pod = Pod("run-a-0", tmp_path, trust, server.getsockname()[1])
        connection, _ = server.accept()
        with connection:
            assert connection.recv(1)
            pod.terminate()
            assert pod.end() == MAY_COME_BACK


class Broken:
    """A link whose other end has gone."""

    def sendall(self, data: bytes) -> None:
        raise ConnectionResetError(errno.ECONNRESET, "it was reset")


@pytest.mark.parametrize("where", ["link", "agent"])
def test_a_pod_that_cannot_begin_may_be_followed_by_another(
    tmp_path: Path, trust: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "it is full")

    before = signal.getsignal(signal.SIGTERM)
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(pod_module, "__file__", str(trust / "pod.py"))
    monkeypatch.setattr(pod_module, "_dial", lambda *_: Broken() if where == "link" else ours)
    monkeypatch.setattr(pod_module, "subprocess", types.SimpleNamespace(Popen=refuse, PIPE=-1))
    monkeypatch.setenv("LAUNCHPAD_SUPERVISOR", "nobody:1")
    monkeypatch.setenv("LAUNCHPAD_WAIT_S", "1")
    try:
        with ours, theirs, pytest.raises(SystemExit) as caught:
            pod_module.main("")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert caught.value.code == MAY_COME_BACK


def test_a_pod_gives_up_when_there_is_no_supervisor(tmp_path: Path, trust: Path) -> None:
    with socket.socket() as held:  # so that nobody else listens there
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        pod = Pod("run-a-0", tmp_path, trust, port, wait_s=0.5)
        # Nor is another one needed: the run may be over, with nobody left to say so.
        assert pod.end() == 1
    assert f"the supervisor, 127.0.0.1:{port}, is not there" in pod.errors.read_text()


def test_nodes_begin_where_they_can_write(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most of a pod's files are read-only, the folder that its image begins in, too."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir("/proc")
    program = lp.Program("pods")
    program.add_node(lp.PyNode(write_here), label="writer")
    assert cluster.launch(program).wait().outcome is lp.Outcome.COMPLETED
    assert cluster.shown.last["writer[0]"].decode().strip() == str(tmp_path)
    assert (tmp_path / "what-the-node-wrote").read_text() == "words"


def test_nodes_begin_where_the_supervisor_did_if_they_can_write_there(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program = lp.Program("pods")
    program.add_node(lp.PyNode(write_here), label="writer")
    assert cluster.launch(program).wait().outcome is lp.Outcome.COMPLETED
    assert cluster.shown.last["writer[0]"].decode().strip() == str(tmp_path)


def test_a_log_that_nobody_reads_holds_up_neither_the_node_nor_the_end_of_its_pod(
    cluster: Cluster,
) -> None:
    read, write = os.pipe()
    try:
        host = "run-runner0-0"
        cluster.start("run-counter-0")
        cluster.pods[host] = Pod(
            host, cluster.folder, cluster.trust, cluster.exchange.port, output=write
        )
        launched = cluster.launch(counting(lp.PyNode(print_much, 1)), pods=False, silence_s=20.0)
        assert launched.wait(60).outcome is lp.Outcome.COMPLETED
        assert cluster.shown.sizes["runner0[0]"] == 1_000_000
        assert cluster.ends() == {"run-counter-0": 0, "run-runner0-0": 0}
    finally:
        os.close(read)
        os.close(write)


# What the supervisor does


def test_a_signal_is_for_the_program_as_soon_as_anything_of_it_may_run(
    exchange: Exchange,
) -> None:
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
    got: list[int] = []
    starter: Any = types.SimpleNamespace(hosts=[], placement={}, release=lambda: None)
    program: Any = types.SimpleNamespace(handle_signal=got.append)
    order: Any = types.SimpleNamespace(schedule_s=math.inf, begins_anew=True)
    try:
        signals = _Signals()
        supervision = _Supervision(order, exchange, signals, None)  # type: ignore[arg-type]
        with pytest.raises(SystemExit) as raised:
            signal.raise_signal(signal.SIGTERM)
        assert raised.value.code == 143
        supervision._make_fleet(starter, program)
        signal.raise_signal(signal.SIGTERM)
        assert got == [signal.SIGTERM]
        assert supervision.comes_back()
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def nodes(count: int, state: str) -> list[NodeStatus]:
    return [NodeStatus(f"node[{index}]", state, "h", None, {}) for index in range(count)]


def test_each_change_of_a_small_program_is_printed_and_what_does_not_change_seldom() -> None:
    pace = _Pace(100.0)
    assert pace.allows(nodes(10, "starting"), 100.0)
    assert not pace.allows(nodes(10, "starting"), 101.0)
    for second in range(102, 112):
        assert pace.allows(nodes(10, f"state {second}"), float(second))
    assert not pace.allows(nodes(10, "state 111"), 140.0)
    assert pace.allows(nodes(10, "state 111"), 142.0)


@pytest.mark.parametrize("count", [1000, 20_000])
def test_a_large_program_whose_nodes_change_all_the_time_does_not_fill_the_log(count: int) -> None:
    pace = _Pace(0.0)
    states = itertools.cycle([nodes(count, "up"), nodes(count, "restarting")])
    seconds, step = 1500, count // 1000
    printed = sum(pace.allows(next(states), float(second)) for second in range(0, seconds, step))
    # At first, at once; then as much as 500 bytes per second allow.
    assert 1 <= printed * 200 * count <= 1e6 + seconds * 500 + 200 * count


def test_the_last_change_is_printed_as_soon_as_there_is_room() -> None:
    pace = _Pace(0.0)
    at = 0.0
    while pace.allows(nodes(1000, str(at)), at):
        at += 1.0
    last = nodes(1000, "the last")
    assert not pace.allows(last, at)
    poll = next(later for later in range(1, 1000) if pace.allows(last, at + later))
    assert poll <= 400
    assert not pace.allows(last, at + poll + 1)


# The end of the supervisor


def test_pods_of_a_program_that_begins_anew_may_come_back(cluster: Cluster, marks: Path) -> None:
    launched = cluster.launch(with_caller(marks), restart=QUICK, comes_back=True)
    goes_on(marks)
    launched.stop()
    assert cluster.ends() == {"run-counter-0": MAY_COME_BACK, "run-caller-0": MAY_COME_BACK}


def test_pods_end_with_all_that_nodes_started_when_the_supervisor_has_gone(
    cluster: Cluster,
) -> None:
    # They end long before they are silent for too long.
    cluster.launch(counting(lp.PyNode(start_family)), silence_s=300.0)
    poll_until(lambda: len(cluster.pods["run-runner0-0"].processes()) >= 6)
    cluster.exchange.close()
    assert set(cluster.ends().values()) == {MAY_COME_BACK}


def supervise(port: int, folder: Path, trust: Path, cache: Path) -> None:
    """For a process of its own: the supervisor of pods that others start."""
    with Cluster(folder, trust, cache, port) as cluster:
        cluster.launch(counting(lp.PyNode(wait_for_stop)), pods=False, silence_s=8.0).wait()


@pytest.mark.parametrize(
    "signum", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_pods_end_when_the_supervisor_dies_or_says_nothing_any_more(
    tmp_path: Path, trust: Path, cache: Path, signum: int
) -> None:
    port = portpicker.pick_unused_port()
    pods = [Pod(host, tmp_path, trust, port) for host in ("run-counter-0", "run-runner0-0")]
    call = f"supervise({port}, Path({str(tmp_path)!r}), Path({str(trust)!r}), Path({str(cache)!r}))"
    script = f"from tests.launchers.test_kubernetes_pods import *\n{call}"
    supervisor = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[2])
    try:
        # Warden, agent and worker.
        poll_until(lambda: all(len(pod.processes()) >= 4 for pod in pods), 60)
        supervisor.send_signal(signum)
        # 8 s of silence; their own end; and up to 5 s in which the supervisor might take it in.
        assert [pod.end() for pod in pods] == [MAY_COME_BACK] * 2
    finally:
        supervisor.kill()
        supervisor.wait()
        for pod in pods:
            pod.crash()


# Who may call


@pytest.fixture
def exchange(trust: Path) -> Iterator[Exchange]:
    exchange = Exchange(read_trust(trust), 0)
    yield exchange
    assert exchange._thread.is_alive(), "it failed"
    exchange.close()
    assert "launchpad-exchange" not in [thread.name for thread in threading.enumerate()]


def dial(exchange: Exchange, tls: courier.TlsCredentials) -> ssl.SSLSocket:
    connection = socket.create_connection(("127.0.0.1", exchange.port), timeout=30)
    return tls.client_context().wrap_socket(connection)


def greet(exchange: Exchange, trust: Path, host: str, **fields: str) -> ssl.SSLSocket:
    """What a pod does first, without the pod."""
    connection = dial(exchange, read_trust(trust))
    connection.sendall(json.dumps({"host": host, **fields}).encode() + b"\n")
    return connection


def close(line: Line) -> None:
    line.terminate()
    line.wait(30)
    for stream in (line.stdin, line.stdout, line.stderr):
        assert stream is not None
        stream.close()


def works(exchange: Exchange, trust: Path, host: str = "run-a-0") -> bool:
    """Tells whether a pod is let in."""
    line = exchange.expect(host)
    assert line.stdin is not None
    assert line.stdout is not None
    with greet(exchange, trust, host) as pod:
        line.stdin.write(b"ping")
        there = pod.recv(10)
        pod.sendall(b"pong")
        here = line.stdout.read(10)
    assert line.wait(30) == 255
    close(line)
    return (there, here) == (b"ping", b"pong")


def is_refused(connection: socket.socket) -> bool:
    connection.settimeout(30)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:  # an alert, or a reset
        return True


def test_a_pod_may_call_before_it_is_expected_and_tells_who_it_is(
    exchange: Exchange, trust: Path
) -> None:
    with greet(exchange, trust, "run-a-0", pod="run-a-0-x7", node="machine-3") as pod:
        poll_until(lambda: exchange.caller("run-a-0").node)
        assert exchange.caller("run-a-0") == Caller("run-a-0", "run-a-0-x7", "machine-3")
        line = exchange.expect("run-a-0")
        assert line.stdin is not None
        line.stdin.write(b"welcome")
        assert pod.recv(10) == b"welcome"
        close(line)
        assert pod.recv(10) == b""


def test_who_does_not_speak_tls_is_refused(exchange: Exchange, trust: Path) -> None:
    with socket.create_connection(("127.0.0.1", exchange.port)) as stranger:
        stranger.sendall(b'{"host": "run-a-0"}\n' * 100)
        assert is_refused(stranger)
    assert works(exchange, trust)


def test_who_has_no_certificate_is_refused(exchange: Exchange, trust: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(str(trust / "authority.pem"))
    line = exchange.expect("run-a-0")
    with (
        socket.create_connection(("127.0.0.1", exchange.port)) as plain,
        context.wrap_socket(plain) as stranger,
    ):
        with contextlib.suppress(OSError):
            stranger.sendall(b'{"host": "run-a-0"}\n')
        assert is_refused(stranger)
    close(line)
    assert works(exchange, trust)


def test_who_has_a_certificate_of_another_run_is_refused(exchange: Exchange, trust: Path) -> None:
    ours, other = read_trust(trust), Authority("pods").issue("run")
    # It knows our authority, which is no secret, but has nothing of it.
    tls = courier.TlsCredentials(
        certificate=other.certificate, key=other.key, authority=ours.authority
    )
    line = exchange.expect("run-a-0")
    with dial(exchange, tls) as stranger:
        with contextlib.suppress(OSError):
            stranger.sendall(b'{"host": "run-a-0"}\n')
        assert is_refused(stranger)
    close(line)
    assert works(exchange, trust)


def test_a_pod_does_not_speak_with_the_supervisor_of_another_run(
    tmp_path: Path, trust: Path
) -> None:
    exchange = Exchange(Authority("pods").issue("run"), 0)
    line = exchange.expect("run-a-0")
    pod = Pod("run-a-0", tmp_path, trust, exchange.port, wait_s=0.5)
    assert pod.end() == 1
    assert "certificate verify failed" in pod.errors.read_text()
    close(line)
    exchange.close()


@pytest.mark.parametrize(
    "greeting",
    [
        b"x" * (MAX_GREETING_BYTES + 1),
        b"\n",
        b"host\n",
        b"\xff\xfe\n",
        b'"run-a-0"\n',
        b'{"host": 3}\n',
        b'{"pod": "run-a-0"}\n',
        b"[" * (MAX_GREETING_BYTES - 1) + b"\n",
        b"9" * (MAX_GREETING_BYTES - 1) + b"\n",
    ],
    ids=["long", "empty", "text", "bytes", "name", "number", "nobody", "nested", "digits"],
)
def test_a_greeting_that_is_none_does_no_harm(
    exchange: Exchange, trust: Path, greeting: bytes
) -> None:
    with dial(exchange, read_trust(trust)) as stranger:
        stranger.sendall(greeting)
        assert is_refused(stranger)
    assert works(exchange, trust)


def test_who_does_not_say_who_it_is_in_time_is_refused(
    exchange: Exchange, trust: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launchers._kubernetes.exchange._GREETING_S", 5.0)
    with (
        socket.create_connection(("127.0.0.1", exchange.port)) as silent,
        dial(exchange, read_trust(trust)) as slow,
    ):
        slow.sendall(b'{"host": ')
        assert is_refused(silent)
        assert is_refused(slow)
    # Who has said it may take its time.
    with greet(exchange, trust, "run-b-0") as parked:
        poll_until(lambda: exchange._parked)
        monkeypatch.undo()
        assert works(exchange, trust)
        parked.settimeout(5.5)
        with pytest.raises(TimeoutError):
            parked.recv(1)


def test_when_files_run_out_the_exchange_pauses_and_goes_on(
    exchange: Exchange, trust: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, refused = socket.socket.accept, []

    def refuse(self: socket.socket) -> Any:
        if self is exchange._listener:
            refused.append(time.monotonic())
            raise OSError(errno.EMFILE, "too many open files")
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", refuse)
    with socket.create_connection(("127.0.0.1", exchange.port)):
        poll_until(lambda: len(refused) >= 3)
    monkeypatch.undo()
    assert min(later - at for at, later in itertools.pairwise(refused)) > 0.4
    assert works(exchange, trust)


def test_what_was_said_last_arrives_though_the_pod_has_more_to_say(
    exchange: Exchange, trust: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launchers._kubernetes.exchange._PART_S", 60.0)
    line = exchange.expect("run-a-0")
    assert line.stdin is not None
    with greet(exchange, trust, "run-a-0") as pod:
        pod.setblocking(False)
        # More than anybody takes in.
        with contextlib.suppress(ssl.SSLWantWriteError):
            while True:
                pod.send(bytes(1 << 16))
        line.stdin.write(b"quit")
        line.stdin.close()
        pod.setblocking(True)
        pod.settimeout(30)
        assert pod.recv(10) == b"quit"
        # An end, and no reset.
        assert pod.recv(10) == b""
        assert not line._ended.is_set()
    assert line.wait(30) == 255
    assert not exchange._parting
    close(line)


def test_a_pod_that_does_not_end_its_side_is_not_waited_for_without_end(
    exchange: Exchange, trust: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launchers._kubernetes.exchange._PART_S", 0.3)
    line = exchange.expect("run-a-0")
    assert line.stdin is not None
    with greet(exchange, trust, "run-a-0") as pod:
        line.stdin.close()
        assert line.wait(30) == 255
        assert pod.recv(1) == b""
    close(line)


def test_a_pod_that_nobody_expects_does_no_harm(exchange: Exchange, trust: Path) -> None:
    with greet(exchange, trust, "run-of-nobody") as unknown:
        unknown.sendall(b"anything")
        assert works(exchange, trust)
    assert works(exchange, trust)


def test_strangers_that_say_nothing_do_not_keep_pods_out(
    exchange: Exchange, trust: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launchers._kubernetes.exchange._GREETING_S", 300.0)
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(socket.create_connection(("127.0.0.1", exchange.port)))
        assert works(exchange, trust)


def test_a_pod_may_go_while_its_successor_comes(
    exchange: Exchange, trust: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, read = threading.Event(), Caller.read

    def read_late(line: bytes) -> Caller:
        caller = read(line)
        if caller.pod == "slow":
            released.wait(60)
        return caller

    monkeypatch.setattr(Caller, "read", staticmethod(read_late))
    tls = read_trust(trust)
    with greet(exchange, trust, "run-a-0") as old, dial(exchange, tls) as new:
        poll_until(lambda: exchange._parked)
        poll_until(lambda: any(each.is_proved for each in list(exchange._strangers)))
        with greet(exchange, trust, "run-b-0", pod="slow"):
            poll_until(lambda: any(each.greeting for each in list(exchange._strangers)))
            # While the exchange is held up; it sees both in its next look.
            new.sendall(b'{"host": "run-a-0", "pod": "new"}\n')
            old.close()
            released.set()
            poll_until(lambda: exchange.caller("run-a-0").pod == "new")
        line = exchange.expect("run-a-0")
        assert line.stdin is not None
        line.stdin.write(b"new")
        assert new.recv(10) == b"new"
        close(line)


def test_lines_that_end_while_much_comes_take_nothing_from_others(
    exchange: Exchange, trust: Path
) -> None:
    """Descriptors of a line that has ended are soon those of another one."""
    for index in range(30):
        line = exchange.expect("run-a-0")
        with greet(exchange, trust, "run-a-0") as pod:
            pod.sendall(bytes(50_000))
            line.terminate()
            other = exchange.expect(f"run-b-{index}")
            assert other.stdin is not None
            other.stdin.write(b"not lost")
            close(line)
            with greet(exchange, trust, other.host) as neighbour:
                assert neighbour.recv(10) == b"not lost"
            close(other)


def test_an_exchange_that_was_closed_expects_nobody(trust: Path) -> None:
    exchange = Exchange(read_trust(trust), 0)
    waiting = exchange.expect("run-a-0")
    exchange.close()
    exchange.close()
    late = exchange.expect("run-a-0")
    exchange.give_up("run-a-0")
    for line in (waiting, late):
        assert line.wait(1) == 255
        close(line)


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.skipif(not _LINUX, reason="looks into /proc")
def test_pods_that_come_and_go_leave_nothing_behind(exchange: Exchange, trust: Path) -> None:
    assert works(exchange, trust)
    files, threads = open_files(), threading.active_count()
    for _ in range(30):
        assert works(exchange, trust)
        close(exchange.expect("run-c-0"))
        with greet(exchange, trust, "run-b-0"):
            pass
    poll_until(lambda: not exchange._parked)
    # Fewer, if what came before had not quite gone when they were counted.
    poll_until(lambda: open_files() <= files)
    assert threading.active_count() <= threads


# Much at once


@pytest.mark.slow
def test_output_that_comes_fast_holds_up_nobody(cluster: Cluster, marks: Path) -> None:
    program = with_caller(marks)
    program.add_node(lp.PyNode(print_much, 50), label="printer")
    launched = cluster.launch(program, silence_s=10.0)
    poll_until(lambda: launched.running.status()[2].state == "ended", 60)
    size = cluster.shown.sizes["printer[0]"]
    assert size == 50_000_000 or b"were lost: they came too fast" in cluster.shown.note
    goes_on(marks)
    assert launched.stop().outcome is lp.Outcome.STOPPED
    assert set(cluster.ends().values()) == {0}
    assert cluster.pods["run-printer-0"].errors.stat().st_size == 50_000_000


@pytest.mark.slow
def test_work_may_be_large(cluster: Cluster) -> None:
    work = random.Random(0).randbytes(30_000_000)
    launched = cluster.launch(
        counting(*(lp.PyNode(print_and_check, work, len(work), 10) for _ in range(2)))
    )
    assert launched.wait().outcome is lp.Outcome.COMPLETED
    assert set(cluster.ends().values()) == {0}


@pytest.mark.slow
@pytest.mark.slow
def test_many_pods_may_call_at_once(cluster: Cluster) -> None:
    program = lp.Program("pods")
    with program.group("counter"):
        counters = [program.add_node(lp.CourierNode(Counter)) for _ in range(30)]
    program.add_node(lp.PyNode(call_all, counters), label="caller")
    launched = cluster.launch(program, silence_s=30.0, limit_s=90.0)
    assert launched.wait(100).outcome is lp.Outcome.COMPLETED
    assert list(cluster.ends().values()) == [0] * 31


@pytest.mark.skipif(not _LINUX, reason="looks into /proc")
def test_a_program_leaves_no_files_and_threads_behind(cluster: Cluster, marks: Path) -> None:
    files = open_files()
    threads = {thread.name for thread in threading.enumerate()}
    launched = cluster.launch(with_caller(marks), restart=QUICK)
    for _ in range(3):
        goes_on(marks)
        cluster.pods["run-counter-0"].crash()
        cluster.start("run-counter-0")
    goes_on(marks)
    launched.stop()
    # Fewer, if what came before had not quite gone when they were counted.
    poll_until(lambda: {thread.name for thread in threading.enumerate()} <= threads)
    poll_until(lambda: open_files() <= files)


# The output of a pod


def test_a_pods_log_takes_what_it_can_and_keeps_the_rest() -> None:
    read, write = os.pipe()
    data = random.Random(0).randbytes(1_000_000)
    try:
        log = _PodLog(write)
        log.put(data[:500_000])
        log.put(data[500_000:])
        assert len(log)
        received = b""
        while len(received) < len(data):
            received += os.read(read, 1 << 16)
            log.flush()
        assert received == data
        assert not len(log)
    finally:
        os.close(read)
        os.close(write)


def test_what_is_left_of_a_pods_log_is_written_at_the_end_as_far_as_somebody_reads() -> None:
    read, write = os.pipe()
    data = random.Random(0).randbytes(1_000_000)
    received = bytearray()

    def take() -> None:
        while piece := os.read(read, 1 << 16):
            received.extend(piece)

    reader = threading.Thread(target=take, daemon=True)
    try:
        log = _PodLog(write)
        log.put(data)
        log.finish(time.monotonic() + 0.1)
        assert len(log), "nobody has read"
        reader.start()
        log.finish(time.monotonic() + 60)
        assert not len(log)
    finally:
        os.close(write)
        reader.join(60)
        os.close(read)
    assert bytes(received) == data


def test_a_pods_log_says_how_much_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launchers.host.agent._MAX_WAITING_BYTES", 1000)
    read, write = os.pipe()
    try:
        log = _PodLog(write)
        log.put(b"x" * 100_000)
        log.put(b"y" * 123)
        while os.read(read, 1 << 16)[-1:] == b"x" and len(log):
            log.flush()
        log.put(b"z")
        assert os.read(read, 1 << 16).endswith(
            b"\n[123 bytes are missing: they came too fast for this log]\nz"
        )
    finally:
        os.close(read)
        os.close(write)


def test_a_pods_log_that_cannot_be_written_is_given_up() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        log = _PodLog(write)
        log.put(b"words")
        assert not len(log)
    finally:
        os.close(write)


def test_a_pod_does_not_wait_for_ever_for_a_supervisor_that_goes_on_to_speak(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("launchers.host.pod._PART_S", 0.3)
    here, there = socket.socketpair()
    over = threading.Event()

    def speak() -> None:
        with contextlib.suppress(OSError):
            while not over.wait(0.02):
                there.send(b".")

    def part() -> None:
        with contextlib.suppress(OSError):
            _part(here)  # type: ignore[arg-type]

    speaker, parting = threading.Thread(target=speak), threading.Thread(target=part)
    speaker.start()
    parting.start()
    parting.join(60)
    is_waiting = parting.is_alive()
    over.set()
    speaker.join()
    there.close()
    parting.join()
    assert not is_waiting


# The pump


class Pumps:
    """Two pumps with a connection between them. A context manager; for one thread."""

    def __init__(self, tls: courier.TlsCredentials) -> None:
        here, there = socket.socketpair()
        # Little is on its way at a time, so that either side has to wait for the other.
        for end in (here, there):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            end.setblocking(False)
        sides = [
            tls.client_context().wrap_socket(here, do_handshake_on_connect=False),
            tls.server_context().wrap_socket(
                there, server_side=True, do_handshake_on_connect=False
            ),
        ]
        waiting = list(sides)
        while waiting:
            side = waiting.pop(0)
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                waiting.append(side)
        self.sides = sides
        #: By side: where to write what is sent, and to read what is received.
        self.ends: list[tuple[int, int]] = []
        self.pumps = []
        self._inner = []
        for side in sides:
            source, entry = os.pipe()
            exit_, sink = os.pipe()
            for descriptor in (source, entry, exit_, sink):
                os.set_blocking(descriptor, False)
            self.ends.append((entry, exit_))
            self._inner += [source, sink]
            self.pumps.append(Pump(side, source, sink))

    def __enter__(self) -> "Pumps":
        return self

    def __exit__(self, *exc: object) -> None:
        for side in self.sides:
            side.close()
        for descriptor in [*self._inner, *(each for pair in self.ends for each in pair)]:
            with contextlib.suppress(OSError):
                os.close(descriptor)


@given(
    data=st.lists(
        st.tuples(st.integers(0, 200_000), st.integers(0, 2**32)), min_size=2, max_size=2
    ),
    cuts=st.lists(st.integers(1, 100_000), min_size=1, max_size=20),
)
@settings(max_examples=20, deadline=None)
def test_all_arrives_unchanged_both_ways_however_it_is_cut(
    pump_tls: courier.TlsCredentials, data: list[tuple[int, int]], cuts: list[int]
) -> None:
    sent = [random.Random(seed).randbytes(size) for size, seed in data]
    left, received = [memoryview(each) for each in sent], [bytearray(), bytearray()]
    chance = random.Random(sum(cuts))
    with Pumps(pump_tls) as pumps:
        while any(left) or [*map(bytes, received)] != sent[::-1]:
            side = chance.randrange(2)
            entry, exit_ = pumps.ends[side]
            size = chance.choice([*cuts, 1 << 16])
            with contextlib.suppress(BlockingIOError):
                left[side] = left[side][os.write(entry, left[side][:size]) :]
            with contextlib.suppress(BlockingIOError):
                received[side] += os.read(exit_, size)
            pumps.pumps[side].move()
            assert not pumps.pumps[side].is_over


@pytest.fixture(scope="module")
def pump_tls(trust: Path) -> courier.TlsCredentials:
    return read_trust(trust)


def test_what_a_pump_waits_for_is_what_it_lacks(pump_tls: courier.TlsCredentials) -> None:
    """Moved only when something has come that it waits for, it carries all."""
    sent = [random.Random(side).randbytes(2_000_000) for side in (0, 1)]
    left, received = [memoryview(each) for each in sent], [bytearray(), bytearray()]
    with Pumps(pump_tls) as pumps:
        waits = [pump.move() for pump in pumps.pumps]
        give_up_at = time.monotonic() + 60
        while [*map(bytes, received)] != sent[::-1]:
            assert time.monotonic() < give_up_at
            for side, pump in enumerate(pumps.pumps):
                entry, exit_ = pumps.ends[side]
                with contextlib.suppress(BlockingIOError):
                    left[side] = left[side][os.write(entry, left[side]) :]
                with contextlib.suppress(BlockingIOError):
                    received[side] += os.read(exit_, 1 << 16)
                if _has_come(waits[side]):
                    waits[side] = pump.move()
        # Now there is nothing to do: it must not be called all the time.
        waits = [pump.move() for pump in pumps.pumps]
        assert not any(map(_has_come, waits))


def _has_come(waits: Mapping[int, int]) -> bool:
    with selectors.DefaultSelector() as selector:
        for descriptor, events in waits.items():
            selector.register(descriptor, events)
        return bool(selector.select(0))


def test_a_pump_ends_with_its_source_and_so_does_the_other(
    pump_tls: courier.TlsCredentials,
) -> None:
    with Pumps(pump_tls) as pumps:
        here, there = pumps.pumps
        entry, _ = pumps.ends[0]
        os.write(entry, b"the last words")
        os.close(entry)
        assert here.move() == {}
        assert (here.is_over, here.is_drained) == (True, True)
        pumps.sides[0].close()
        assert there.move() == {}
        assert (there.is_over, there.is_drained) == (True, False)
        assert os.read(pumps.ends[1][1], 100) == b"the last words"


def test_a_pump_ends_when_nobody_takes_what_comes(pump_tls: courier.TlsCredentials) -> None:
    with Pumps(pump_tls) as pumps:
        os.close(pumps.ends[1][1])
        os.write(pumps.ends[0][0], b"words")
        pumps.pumps[0].move()
        pumps.pumps[1].move()
        assert pumps.pumps[1].is_over


def test_a_pump_leaves_others_their_turn(tmp_path: Path) -> None:
    class Endless:
        """Takes all that is sent, and says nothing."""

        def __init__(self) -> None:
            self.sent = 0

        def send(self, data: bytes) -> int:
            self.sent += 1
            assert self.sent < 1000, "it goes on for as long as there is something"
            return len(data)

        def recv(self, size: int) -> bytes:
            raise ssl.SSLWantReadError

        def fileno(self) -> int:
            return -1

    with Path("/dev/zero").open("rb") as source, (tmp_path / "sink").open("wb") as sink:
        endless: Any = Endless()
        pump = Pump(endless, source.fileno(), sink.fileno())
        assert pump.move()[source.fileno()] == selectors.EVENT_READ
        assert not pump.is_over
