"""A run as its launching process sees it, and other shells that attach to it.

The API, its controllers and the objects are those of the bed; machines are only pretended, so that a
test says when pods begin and end, and what the supervisor prints. Real pods are elsewhere.
"""

import contextlib
import json
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from traceback import format_stack
from typing import Any

import pytest

import launchpad_lite as lp
from courier import ExceptionReport
from launchers._kubernetes import (
    agreed,
    client as client_module,
    program as program_module,
    removal as removal_module,
)
from launchers._kubernetes.client import Api
from launchers._kubernetes.names import Names
from launchers._kubernetes.objects import Cluster, Files, Group, manifests, owned
from launchers._kubernetes.pods import PodOptions
from launchers._kubernetes.program import DetachedProgram, KubernetesProgram
from launchers._kubernetes.records import End, RecordWriter
from launchpad_lite._command_line import _do_with_run
from launchpad_lite._plan import LaunchPlan
from launchpad_lite.errors import LaunchError, NodeFailedError
from launchpad_lite.launching import (
    LaunchOptions,
    NodeFailure,
    NodeStatus,
    Outcome,
    ProgramResult,
    RestartPolicy,
)
from launchpad_lite.testing import poll_until
from tests.beds.kubernetes.controllers import (
    Events,
    GarbageCollector,
    JobController,
    JobSetController,
    Loop,
)
from tests.beds.kubernetes.logs import Log
from tests.beds.kubernetes.server import ApiServer, Failure
from tests.beds.kubernetes.store import ApiError, Object, Store, stamp

pytest.importorskip("kubernetes")
pytest.importorskip("kubernetes_validate")

NAMESPACE, TOKEN = "team", "of-the-researcher"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
LAUNCHER = "launchpad-lite/launcher"
KEY, ANOTHER_KEY = b"of this run", b"of another run"
#: Of the nodes, and of the supervisor.
MACHINE, ANOTHER_MACHINE = "machine-1", "machine-2"
COMPLETED = ProgramResult(Outcome.COMPLETED)
#: What the cluster says whose supervisor was told to end.
TOLD_TO_END = ProgramResult(Outcome.INTERRUPTED, reason="SIGTERM", signum=signal.SIGTERM)
#: What the documentation says that users need.
RIGHTS = frozenset(
    {
        *(("create", kind) for kind in ("services", "secrets", "networkpolicies")),
        *((verb, "jobs") for verb in ("create", "get", "list", "watch", "patch", "delete")),
        *((verb, "jobsets") for verb in ("create", "get", "patch", "delete")),
        *((verb, "pods") for verb in ("get", "list", "watch", "patch", "delete")),
        *((verb, "events") for verb in ("list", "watch")),
        ("get", "pods/log"),
    }
)


class Node:
    def run(self) -> None: ...


# A cluster whose machines are pretended


class Supervisor:
    """What is seen of a supervisor: its pod, and what it prints."""

    def __init__(self, pod: Object, log: Path) -> None:
        self.pod = pod
        self._log = log
        self._lock = threading.Lock()
        self._source, self._sink = os.pipe()
        self._records = RecordWriter(self._sink, KEY)

    def say(self, write: Callable[[RecordWriter], None]) -> None:
        """Prints records, few enough for a pipe."""
        with self._lock:
            write(self._records)
            os.write(self._sink, b"\0")
            said = b""
            while not said.endswith(b"\0"):
                said += os.read(self._source, 1 << 16)
            for line in said[:-1].splitlines():
                print_to(self._log, line)

    def place(self, program: KubernetesProgram) -> None:
        """Says that all nodes are placed and run."""
        hosts = {
            each.name: program.names.host(each.label, each.replica)
            for each in program.plan.executables
        }
        self.say(lambda records: records.up(hosts))
        self.tell(program)

    def tell(self, program: KubernetesProgram, **states: str) -> None:
        """Says that all nodes run, but for those of `actor_0="restarting"`."""
        status = [
            NodeStatus(
                each.name,
                states.get(f"{each.label}_{each.replica}", "running"),
                program.names.host(each.label, each.replica),
                1,
                {},
            )
            for each in program.plan.executables
        ]
        self.say(lambda records: records.status(status))

    def end(self, result: ProgramResult, **stacks: str) -> None:
        """Says how the program ended."""
        self.say(lambda records: records.end(End(result, stacks)))

    def close(self) -> None:
        os.close(self._source)
        os.close(self._sink)


class PretendedCluster:
    """A cluster with machines on which nothing runs: one for nodes, one for supervisors.

    Attributes:
        store: All objects.
        api: Its server.
        supervisors: Those that began, the newest last.
        places: Whether pods get to run.
        answers: Whether a supervisor that is told to end says so, and ends.
        is_lost: Whether all machines say nothing more, and do nothing that they are told.
        lost: The machines for which that holds.
        reads_logs: Whether the machine's agent can read logs. What it says instead looks like one.
        excuses: How often it has said so.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.store = Store()
        self.api = ApiServer(self.store, NAMESPACE, self._read_log, lambda _: "")
        self.api.tokens[TOKEN] = RIGHTS
        self.store.create("namespaces", {"metadata": {"name": NAMESPACE}})
        self.supervisors: list[Supervisor] = []
        self.places = self.answers = True
        self.is_lost = False
        self.lost: set[str] = set()
        self.reads_logs = True
        self.excuses = 0
        events = Events(self.store)
        self._loop = Loop(
            self.store,
            [
                JobSetController(self.store, self.api.admit, events.record).run,
                JobController(self.store, self.api.admit, events.record, backoff_s=0.1).run,
                self._run_machine,
                GarbageCollector(self.store).run,
            ],
        )
        self._own = {*threading.enumerate()}

    def close(self) -> None:
        self._loop.close()
        self.api.close()
        for each in self.supervisors:
            each.close()
        assert not self._loop.errors, self._loop.errors

    def write_config(self) -> Path:
        context = {"cluster": "bed", "user": "researcher", "namespace": NAMESPACE}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "bed",
            "clusters": [{"name": "bed", "cluster": {"server": self.api.url}}],
            "users": [{"name": "researcher", "user": {"token": TOKEN}}],
            "contexts": [{"name": "bed", "context": context}],
        }
        path = self._folder / "kubeconfig"
        path.write_text(json.dumps(config))
        return path

    # What tests ask

    def pods(self) -> list[Object]:
        return self.store.items("pods", NAMESPACE)

    def pod(self, host: str) -> Object:
        """Returns the pod of a node, once it runs."""

        def find() -> Object | None:
            found = (pod for pod in self.pods() if pod["spec"].get("hostname") == host)
            return next((pod for pod in found if pod["status"]["phase"] == "Running"), None)

        pod = poll_until(find)
        assert pod is not None
        return pod

    def supervisor(self, number: int = 1) -> Supervisor:
        """Returns a supervisor, once so many have begun."""
        poll_until(lambda: len(self.supervisors) >= number)
        return self.supervisors[number - 1]

    def beat(self, supervisor: Supervisor) -> str | None:
        """Returns what the launching process has told a supervisor."""
        pod = self.store.get("pods", NAMESPACE, supervisor.pod["metadata"]["name"])
        text: str | None = (pod["metadata"].get("annotations") or {}).get(LAUNCHER)
        return text

    def requests(self, start: str) -> list[str]:
        """Returns the requests that begin so."""
        return [text for _, text in self.api.requests if text.startswith(start)]

    def users(self) -> list[str]:
        """Names threads that have begun since: of programs, and of the server for each connection."""
        with self.store.changed:
            self.store.changed.notify_all()  # has the server look for who has left
        return [each.name for each in threading.enumerate() if each not in self._own]

    def left(self) -> list[str]:
        """Names all objects, but for what happened to them."""
        return [
            f"{kind} {item['metadata']['name']}"
            for kind, item in self.store.all()
            if kind not in ("namespaces", "events")
        ]

    # What tests do

    def print(self, pod: Object, line: bytes) -> None:
        print_to(self._log(pod), line, "stderr")

    def end(self, pod: Object, code: int, **how: str) -> None:
        """Has the container of a pod end."""
        state = {"terminated": {"exitCode": code, "reason": "Error", **how}}
        self._write(pod, "Succeeded" if code == 0 else "Failed", state)

    def end_together(self, hosts: Sequence[str], code: int) -> None:
        """Has the pods of nodes end, before anything follows from the end of one of them."""
        pods = [self.pod(host) for host in hosts]
        with self.store.changed:
            for pod in pods:
                self.end(pod, code)

    def condition(self, pod: Object, **condition: str) -> None:
        def write(item: Object) -> None:
            item["status"]["conditions"] = [condition]

        self.store.update("pods", NAMESPACE, pod["metadata"]["name"], write)

    def hold(self, name: str) -> None:
        """Has somebody hold a pod after its end."""
        self._set_finalizers(name, ["example.com/hold"])

    def release(self, name: str) -> None:
        self._set_finalizers(name, [])

    def _set_finalizers(self, name: str, finalizers: Sequence[str]) -> None:
        def write(item: Object) -> None:
            item["metadata"]["finalizers"] = [*finalizers]

        self.store.update("pods", NAMESPACE, name, write)

    def fail(self, status: int, matches: Callable[[str, str], bool] = lambda *_: True) -> None:
        """Has the server fail, until `heal`; open connections break."""
        self.api.faults.failures.append(Failure(status, 1 << 30, matches, 0))
        self.drop()

    def heal(self) -> None:
        self.api.faults.failures.clear()

    def drop(self) -> None:
        for kind in ("watch", "log"):
            self.api.faults.drop(kind)

    # The machine

    def _run_machine(self) -> None:
        for pod in self.pods():
            with contextlib.suppress(ApiError):  # somebody was faster
                self._advance(pod)

    def _advance(self, pod: Object) -> None:
        metadata, phase = pod["metadata"], pod["status"]["phase"]
        is_supervisor = container_of(pod) == "supervisor"
        is_lost = self.is_lost or pod["spec"].get("nodeName") in self.lost
        grace_s = metadata.get("deletionGracePeriodSeconds", 0)
        if "deletionTimestamp" not in metadata:
            if self.places and phase == "Pending":
                self._log(pod).touch()
                self._write(pod, "Running", {"running": {"startedAt": stamp()}})
                if is_supervisor:
                    self.supervisors.append(Supervisor(pod, self._log(pod)))
        elif phase in ("Succeeded", "Failed") or (phase == "Pending" and not is_lost):
            self.store.delete("pods", NAMESPACE, metadata["name"], grace_s=0)
        elif is_supervisor and grace_s > 0 and not self.answers:
            return
        elif not is_lost:
            if is_supervisor and grace_s > 0:
                for each in self.supervisors:
                    if each.pod["metadata"]["uid"] == metadata["uid"]:
                        each.end(TOLD_TO_END)
            self.end(pod, 128 + signal.SIGTERM if is_supervisor else 75)

    def _write(self, pod: Object, phase: str, state: Object) -> None:
        def write(item: Object) -> None:
            machine = ANOTHER_MACHINE if container_of(item) == "supervisor" else MACHINE
            item["spec"].setdefault("nodeName", machine)
            status = {"name": container_of(pod), "state": state}
            item["status"].update(phase=phase, containerStatuses=[status])

        metadata = pod["metadata"]
        self.store.update("pods", NAMESPACE, metadata["name"], write, uid=metadata["uid"])

    def _log(self, pod: Object) -> Path:
        return self._folder / f"{pod['metadata']['uid']}.log"

    def _read_log(self, pod: Object, container: str, previous: bool) -> Log:
        path = self._log(pod)
        if previous or container != container_of(pod) or not path.exists():
            raise ApiError(400, "BadRequest", f'container "{container}" is waiting to start')
        uid = pod["metadata"]["uid"]
        if not self.reads_logs:
            self.excuses += 1
            excuse = self._folder / "excuse"
            excuse.write_text("unable - F to retrieve container logs for containerd://5f3a\n")
            return Log(excuse, lambda: False)

        def is_open() -> bool:
            now = next((each for each in self.pods() if each["metadata"]["uid"] == uid), None)
            return now is not None and now["status"]["phase"] == "Running"

        return Log(path, is_open)


def print_to(log: Path, line: bytes, stream: str = "stdout") -> None:
    """Adds a line to a log as container runtimes write it."""
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%f000Z")
    with log.open("ab", buffering=0) as file:
        file.write(f"{now} {stream} F ".encode() + line + b"\n")


def container_of(pod: Object) -> str:
    name: str = pod["spec"]["containers"][0]["name"]
    return name


# Runs


class Lab:
    """Launches programs in a cluster, and attaches to them."""

    def __init__(self, cluster: PretendedCluster, folder: Path) -> None:
        self.cluster = cluster
        self.log_dir = folder / "logs"
        self._programs: list[KubernetesProgram] = []

    def plan(self, *, moves: bool = False) -> LaunchPlan:
        """Returns a program of two nodes, which may move to other machines or not."""
        program = lp.Program("demo")
        with program.group("actor"):
            for _ in range(2):
                program.add_node(lp.PyClassNode(Node))
        policy = RestartPolicy("on_failure") if moves else RestartPolicy("never")
        return lp.plan(program, "local_mp", restart=policy)

    def create(self, api: Api, names: Names, plan: LaunchPlan, notice_s: float = 2.0) -> None:
        """Creates all objects of a run."""
        cluster = Cluster(names, NAMESPACE, notice_s=notice_s, jobset=names.jobset)
        pod = PodOptions(image="research:1")
        objects = manifests(
            cluster, [Group("actor", plan.executables, pod)], Files({}, {}), pod, "demo"
        )
        root = api.create(objects[0])
        for each in objects[1:]:
            api.create(owned(each, root))

    def launch(
        self,
        *,
        moves: bool = False,
        jobset: bool = False,
        notice_s: float = 2.0,
        schedule_s: float = 30.0,
        launcher_silence_s: float = math.inf,
        key: bytes = KEY,
    ) -> KubernetesProgram:
        """Returns a run whose pods are about to begin."""
        plan = self.plan(moves=moves)
        names = Names.of("demo", plan.groups(), jobset=jobset)
        api = Api.connect()
        with contextlib.ExitStack() as undo:
            undo.callback(api.close)
            program = KubernetesProgram(
                plan,
                LaunchOptions(notice_s),
                api,
                names,
                key,
                schedule_s=schedule_s,
                is_launch=True,
                log_dir=self.log_dir,
                silence_s=0.2,
                launcher_silence_s=launcher_silence_s,
            )
            undo.pop_all()
        self.create(api, names, plan, notice_s)
        return self._watch(program)

    def detach(self, *, moves: bool = False) -> DetachedProgram:
        """Returns a run whose launch has left."""
        plan = self.plan(moves=moves)
        names = Names.of("demo", plan.groups())
        api = Api.connect()
        self.create(api, names, plan)
        return DetachedProgram(plan, LaunchOptions(2.0), api, names)

    def run(
        self,
        *,
        moves: bool = False,
        jobset: bool = False,
        notice_s: float = 2.0,
        launcher_silence_s: float = math.inf,
        key: bytes = KEY,
    ) -> tuple[KubernetesProgram, Supervisor]:
        """Returns a run that was launched, all of whose nodes are placed."""
        program = self.launch(
            moves=moves,
            jobset=jobset,
            notice_s=notice_s,
            launcher_silence_s=launcher_silence_s,
            key=key,
        )
        supervisor = self.cluster.supervisor()
        supervisor.place(program)
        program.await_up()
        return program, supervisor

    def attach(self, program: KubernetesProgram) -> KubernetesProgram:
        """Returns the same run as another shell has it."""
        return self._watch(
            KubernetesProgram(
                program.plan,
                LaunchOptions(2.0),
                Api.connect(),
                program.names,
                None,
                schedule_s=math.inf,
                is_launch=False,
                log_dir=None,
            )
        )

    def _watch(self, program: KubernetesProgram) -> KubernetesProgram:
        self._programs.append(program)
        program.watch()
        return program

    def end_all(self) -> None:
        for each in self._programs:
            each.kill()
            assert each.join(20)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedCluster]:
    folder = tmp_path / "cluster"
    folder.mkdir()
    found = PretendedCluster(folder)
    monkeypatch.setenv("KUBECONFIG", str(found.write_config()))
    yield found
    found.close()


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for long that is asked again, and nobody gives up soon."""
    for module, name in (
        (client_module, "_FIRST_PAUSE_S"),
        (client_module, "_LONGEST_PAUSE_S"),
        (client_module, "_WATCH_PAUSE_S"),
        (program_module, "_LOOK_S"),
        (program_module, "_LOG_PAUSE_S"),
        (program_module, "_GATHER_S"),
        (program_module, "_ASK_AGAIN_S"),
    ):
        monkeypatch.setattr(module, name, 0.05)
    monkeypatch.setattr(program_module, "_FIRST_STATUS_S", 30.0)


@pytest.fixture
def lab(cluster: PretendedCluster, tmp_path: Path, brief: None) -> Iterator[Lab]:
    """Each test fails that leaves objects, threads or connections to the server behind."""
    found = Lab(cluster, tmp_path)
    yield found
    cluster.heal()
    cluster.api.tokens[TOKEN] = RIGHTS
    cluster.answers, cluster.is_lost = True, False
    cluster.lost.clear()
    found.end_all()
    assert poll_until(lambda: not cluster.left(), must=False), cluster.left()
    assert poll_until(lambda: not cluster.users(), must=False), cluster.users()


def uids(cluster: PretendedCluster) -> Sequence[str]:
    return [pod["metadata"]["uid"] for pod in cluster.pods()]


def failed(node: str, host: str = "") -> ProgramResult:
    failure = NodeFailure(node, host, "its link broke", host_lost=bool(host))
    return ProgramResult(Outcome.FAILED, (failure,))


# A life


def test_output_notes_and_the_end_arrive_through_connections_that_break(
    lab: Lab, cluster: PretendedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    program, supervisor = lab.run()
    supervisor.say(lambda records: records.show("actor[0]", b"hello\nwor"))
    poll_until(lambda: {each.state for each in program.status()} == {"running"})
    cluster.drop()
    supervisor.say(lambda records: records.show("actor[0]", b"ld\n"))
    supervisor.say(lambda records: records.note("something to know"))
    supervisor.end(COMPLETED)
    assert program.wait(20).outcome is Outcome.COMPLETED
    assert cluster.left() == []
    assert (lab.log_dir / "actor" / "0.log").read_bytes() == b"hello\nworld\n"
    shown = capsys.readouterr()
    assert "[actor[0]] hello" in shown.out
    assert "[actor[0]] world" in shown.out
    assert "launchpad: something to know" in shown.err


def test_no_thread_and_no_connection_outlives_the_program(
    lab: Lab, cluster: PretendedCluster
) -> None:
    program, supervisor = lab.run()
    supervisor.end(COMPLETED)
    assert program.join(20)
    ended_at = time.monotonic()
    poll_until(lambda: not cluster.users())
    assert time.monotonic() < ended_at + 10.0


def test_no_thread_waits_for_a_server_that_fails_while_the_program_ends(
    lab: Lab, cluster: PretendedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, _ = lab.run()
    monkeypatch.setattr(client_module, "_FIRST_PAUSE_S", 30.0)
    # All but what removes the program.
    cluster.fail(503, lambda method, path: method == "GET" and "watch=true" in path)
    (failure,) = cluster.api.faults.failures
    poll_until(lambda: failure.left <= (1 << 30) - 3)
    program.kill()
    assert program.join(20)
    ended_at = time.monotonic()
    poll_until(lambda: not cluster.users())
    assert time.monotonic() < ended_at + 10.0


def test_a_jobset_is_a_root_as_well(lab: Lab, cluster: PretendedCluster) -> None:
    program, supervisor = lab.run(jobset=True)
    assert {each.state for each in program.status()} <= {"starting", "running"}
    assert any(kind == "jobsets" for kind, _ in cluster.store.all())
    supervisor.end(COMPLETED)
    assert program.wait(20).outcome is Outcome.COMPLETED
    assert cluster.left() == []


def test_a_folder_for_logs_that_cannot_be_written_is_told_before_anything_is_watched(
    lab: Lab, tmp_path: Path
) -> None:
    lab.log_dir = tmp_path / "file"
    lab.log_dir.write_text("")
    with pytest.raises(LaunchError, match=r"cannot write logs: .*file.*log_dir="):
        lab.launch()


# Stopping


def test_stop_lets_the_supervisor_end_all_in_order(lab: Lab, cluster: PretendedCluster) -> None:
    program, supervisor = lab.run()
    poll_until(lambda: cluster.beat(supervisor))
    result = program.stop(20)
    assert result.outcome is Outcome.STOPPED
    assert result.reason == "stop() was called"
    assert cluster.left() == []


def test_ctrl_c_ends_the_program_in_order(lab: Lab, cluster: PretendedCluster) -> None:
    program, _ = lab.run()
    program.handle_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        program.wait(20)
    assert cluster.left() == []


def test_a_second_ctrl_c_does_not_wait_for_the_notice(lab: Lab, cluster: PretendedCluster) -> None:
    cluster.answers = False
    program, supervisor = lab.run(notice_s=60.0)
    program.handle_signal(signal.SIGINT)
    name = supervisor.pod["metadata"]["name"]
    poll_until(
        lambda: "deletionTimestamp" in cluster.store.get("pods", NAMESPACE, name)["metadata"]
    )
    program.handle_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        program.wait(20)
    assert cluster.left() == []


def test_a_signal_handler_may_stop_a_program(lab: Lab, cluster: PretendedCluster) -> None:
    program, _ = lab.run()
    before = signal.signal(
        signal.SIGUSR1, lambda number, _: program.request_stop("a signal of ours", number)
    )
    try:
        for _ in range(100):  # also while one is being handled
            signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(SystemExit) as ended:
            program.wait(20)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert ended.value.code == 128 + signal.SIGUSR1
    assert program.result is not None
    assert program.result.reason == "a signal of ours"


def test_a_supervisor_that_does_not_stop_within_the_notice_is_removed_by_force(
    lab: Lab, cluster: PretendedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (agreed, program_module):
        monkeypatch.setattr(module, "SPARE_S", 0)
    monkeypatch.setattr(program_module, "_GONE_S", 6.0)
    cluster.answers = False
    program, _ = lab.run(notice_s=0.5)
    result = program.stop(20)
    assert "did not end within its notice" in result.reason
    assert cluster.left() == []


def test_a_supervisor_that_is_gone_before_it_is_told_to_stop_is_not_waited_for(
    lab: Lab, cluster: PretendedCluster
) -> None:
    program, supervisor = lab.run(moves=True, notice_s=60.0)
    cluster.fail(503, lambda method, path: method == "GET" and "watch" in path)
    cluster.places = False
    name = supervisor.pod["metadata"]["name"]
    cluster.end(supervisor.pod, 137)
    cluster.store.delete("pods", NAMESPACE, name, grace_s=0)
    poll_until(lambda: name not in [pod["metadata"]["name"] for pod in cluster.pods()])
    assert program.stop(20).outcome is Outcome.STOPPED
    assert cluster.left() == []


def test_kill_ends_what_is_being_removed_in_order(lab: Lab, cluster: PretendedCluster) -> None:
    program = lab.launch(notice_s=60.0)
    cluster.pod(program.names.host("actor", 1))
    cluster.is_lost = True
    program.request_stop("first in order")
    poll_until(lambda: any("deletionTimestamp" in pod["metadata"] for pod in cluster.pods()))
    assert not program.join(0.5)
    program.kill()
    assert program.join(20)
    assert cluster.left() == []


def test_who_kills_waits_no_longer_for_a_cluster_that_does_not_answer(
    lab: Lab,
    cluster: PretendedCluster,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(client_module, "_ATTEMPTS", 2)
    monkeypatch.setattr(program_module, "_GONE_S", 0.5)
    program, _ = lab.run()
    cluster.fail(503)
    said = ""

    def is_told() -> bool:
        nonlocal said
        said += capsys.readouterr().err
        return "the program cannot be stopped yet" in said

    program.request_stop("enough")
    poll_until(is_told)
    assert program.result is None
    program.kill()
    result = program.wait(20)
    assert "enough; the cluster does not answer" in result.reason
    assert "whether anything is left of it is not known" in result.reason
    # All that the Role of the documentation allows.
    assert "kubectl get pods,jobs -n team -l launchpad-lite/run=" in result.reason
    cluster.heal()
    cluster.store.delete("jobs", NAMESPACE, program.names.run)


def test_who_kills_does_not_wait_for_a_server_that_takes_requests_and_says_nothing(
    lab: Lab, cluster: PretendedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_module, "_GONE_S", 0.5)
    monkeypatch.setattr(program_module, "_PATIENCE_S", 0.2)
    program, _ = lab.run()
    send, asked = Api._send, list[str]()

    def say_nothing(api: Api, request: Any, *rest: Any) -> Any:
        if api is not program._api:
            return send(api, request, *rest)
        asked.append(threading.current_thread().name)
        time.sleep(0.3)
        raise TimeoutError("it says nothing")

    monkeypatch.setattr(Api, "_send", say_nothing)
    program.kill()
    result = program.wait(60)
    assert "the cluster does not answer" in result.reason
    # Of the same question, none is asked again at once: about one for each half of a second.
    deciding = [name for name in asked if name == program._thread.name]
    assert 2 <= len(deciding) <= 8
    cluster.store.delete("jobs", NAMESPACE, program.names.run)


# Until all nodes are placed


def test_what_pods_wait_for_is_told_and_the_reason_when_they_waited_too_long(
    lab: Lab, cluster: PretendedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.places = False
    program = lab.launch(schedule_s=8.0)
    poll_until(lambda: len(cluster.pods()) == 3)
    for pod in cluster.pods():
        cluster.condition(
            pod,
            type="PodScheduled",
            status="False",
            reason="Unschedulable",
            message="0/2 nodes are available: 2 Insufficient nvidia.com/gpu.",
        )
    with pytest.raises(LaunchError) as caught:
        program.await_up()
    assert "not all nodes were placed within 8 s" in str(caught.value)
    assert "Insufficient nvidia.com/gpu" in str(caught.value)
    said = capsys.readouterr().err
    # In one line if they were seen at the same time.
    pattern = r"^launchpad: (.+) waits?: .*Insufficient nvidia.com/gpu"
    lines = re.findall(pattern, said, re.MULTILINE)
    assert sorted(", ".join(lines).split(", ")) == ["actor[0]", "actor[1]", "supervisor"]
    assert cluster.left() == []


def test_a_node_that_cannot_start_ends_the_launch_with_what_it_printed(
    lab: Lab, cluster: PretendedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_module, "_EXPLAIN_S", 0.3)
    program = lab.launch()
    pod = cluster.pod(program.names.host("actor", 1))
    cluster.print(pod, b"SyntaxError: this Python is old")
    cluster.end(pod, 1)
    with pytest.raises(LaunchError, match=r"(?s)actor\[1\]: its pod.*SyntaxError: this Python"):
        program.await_up()
    assert cluster.left() == []


def test_a_launch_whose_nodes_have_lost_their_supervisor_says_where_that_is(
    lab: Lab, cluster: PretendedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_module, "_EXPLAIN_S", 0.3)
    program = lab.launch()
    supervisor = cluster.supervisor().pod["metadata"]["name"]
    cluster.end_together([program.names.host("actor", replica) for replica in (0, 1)], 75)
    where = (
        f"lost the link to the supervisor; its pod {supervisor} is on the machine {ANOTHER_MACHINE}"
    )
    with pytest.raises(LaunchError, match=rf"cannot start: actor\[\d\].* {where}"):
        program.await_up()
    assert cluster.left() == []


def test_a_stop_before_all_nodes_are_placed_ends_the_launch(
    lab: Lab, cluster: PretendedCluster
) -> None:
    cluster.places = False
    program = lab.launch()
    program.request_stop("somebody wants the end")
    with pytest.raises(LaunchError, match="somebody wants the end"):
        program.await_up()
    assert cluster.left() == []


def press_ctrl_c_in(*places: str) -> None:
    """Interrupts the main thread, once it is in all of these."""
    me = threading.main_thread().ident
    assert me is not None

    def is_there() -> bool:
        stack = "".join(format_stack(sys._current_frames()[me]))
        return all(place in stack for place in places)

    poll_until(is_there)
    signal.pthread_kill(me, signal.SIGINT)


def test_ctrl_c_ends_a_launch_and_a_second_one_at_once(lab: Lab, cluster: PretendedCluster) -> None:
    program = lab.launch(notice_s=600.0)
    cluster.pod(program.names.host("actor", 1))
    cluster.is_lost = True

    def press() -> None:
        press_ctrl_c_in("in await_up", "in wait")
        poll_until(lambda: any("deletionTimestamp" in pod["metadata"] for pod in cluster.pods()))
        press_ctrl_c_in("in _join_through_interrupts", "in wait")

    presses = threading.Thread(target=press)
    began = time.monotonic()
    presses.start()
    with pytest.raises(KeyboardInterrupt):
        program.await_up()
    presses.join()
    assert time.monotonic() < began + 60
    assert cluster.left() == []


def test_ctrl_c_during_a_launch_returns_only_when_nothing_is_left_of_it(
    lab: Lab, cluster: PretendedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (agreed, program_module):
        monkeypatch.setattr(module, "SPARE_S", 0)
    monkeypatch.setattr(program_module, "_GONE_S", 6.0)
    program = lab.launch(notice_s=0.5)
    cluster.pod(program.names.host("actor", 1))
    cluster.is_lost = True  # so that all must be removed by force, after the notice
    presses = threading.Thread(target=press_ctrl_c_in, args=("in await_up", "in wait"))
    presses.start()
    with pytest.raises(KeyboardInterrupt):
        program.await_up()
    presses.join()
    assert not [pod for pod in cluster.pods() if "deletionTimestamp" not in pod["metadata"]]
    assert program.result is not None
    assert cluster.left() == []


def test_a_launch_whose_failed_pods_are_gone_by_then_says_what_is_missing(
    lab: Lab, cluster: PretendedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = lab.launch()
    monkeypatch.setattr(program._sight, "failed", dict)
    assert "not all nodes were placed within 30 s" in program._early()


# Other shells


def test_another_shell_that_stops_a_program_ends_it_for_its_launcher_as_well(
    lab: Lab, cluster: PretendedCluster
) -> None:
    program, _ = lab.run()
    other = lab.attach(program)
    assert [each.state for each in other.status()] == ["running"] * 2
    assert other.stop(20).outcome is Outcome.STOPPED
    with pytest.raises(SystemExit) as ended:
        program.wait(20)
    assert ended.value.code == 128 + signal.SIGTERM
    assert cluster.left() == []


def test_status_tells_of_pods_as_long_as_the_supervisor_says_nothing(
    lab: Lab, cluster: PretendedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_module, "_FIRST_STATUS_S", 0.1)
    cluster.places = False
    program = lab.launch()
    other = lab.attach(program)
    for each in (program, other):
        poll_until(lambda each=each: {node.state for node in each.status()} == {"pending"})
    cluster.places = True
    for each in (program, other):
        poll_until(lambda each=each: {node.state for node in each.status()} == {"starting"})
    assert [node.host for node in other.status()] == [
        program.names.host("actor", replica) for replica in (0, 1)
    ]


@contextlib.contextmanager
def far_away(cluster: PretendedCluster) -> Iterator[None]:
    """Each request takes half a second, and a log comes slowly."""
    answer, logs = cluster.api.faults.answer, Api.logs

    def answer_late(method: str, path: str) -> ApiError | None:
        time.sleep(0.5)
        return answer(method, path)

    def read_slowly(*args: Any, **options: Any) -> Iterator[str]:
        for line in logs(*args, **options):
            time.sleep(0.05)
            yield line

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster.api.faults, "answer", answer_late)
        patch.setattr(Api, "logs", read_slowly)
        yield


def say_much(supervisor: Supervisor, program: KubernetesProgram) -> None:
    """Says how nodes were at first, and all that they print."""
    supervisor.tell(program, actor_0="starting", actor_1="starting")
    supervisor.say(lambda records: records.show("actor[0]", b"hello\n" * 30))


def test_the_status_in_another_shell_is_the_newest_one(
    lab: Lab, cluster: PretendedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    program = lab.detach()
    supervisor = cluster.supervisor()
    say_much(supervisor, program)
    supervisor.tell(program, actor_1="serving")
    with far_away(cluster):
        _do_with_run("status", lab.attach(program))
    title, _, *rows = capsys.readouterr().out.splitlines()
    assert title == "demo: running"
    assert [row.split()[:2] for row in rows] == [["actor[0]", "running"], ["actor[1]", "serving"]]


@pytest.mark.parametrize("is_explained", [True, False])
def test_another_shell_knows_by_the_status_that_a_run_has_ended(
    lab: Lab,
    cluster: PretendedCluster,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_explained: bool,
) -> None:
    monkeypatch.setattr(program_module, "_EXPLAIN_S", 3.0)
    program = lab.detach()
    supervisor = cluster.supervisor()
    say_much(supervisor, program)
    supervisor.tell(program, actor_0="failed")
    supervisor.end(failed("actor[0]", host="" if is_explained else "lost"))
    cluster.end(supervisor.pod, 1)
    with far_away(cluster):
        _do_with_run("status", lab.attach(program))
    title, _, *rows = capsys.readouterr().out.splitlines()
    assert title.startswith("demo: failed, ")
    assert [row.split()[:2] for row in rows] == [["actor[0]", "failed"], ["actor[1]", "running"]]
    lab.attach(program).stop(20)  # it is removed


def test_a_log_that_cannot_be_read_yet_is_no_status(lab: Lab, cluster: PretendedCluster) -> None:
    program = lab.detach()
    supervisor = cluster.supervisor()
    supervisor.tell(program)
    cluster.reads_logs = False
    other = lab.attach(program)
    poll_until(lambda: cluster.excuses >= 2)
    threading.Timer(0.5, setattr, (cluster, "reads_logs", True)).start()
    assert [each.state for each in other.status()] == ["running"] * 2


def test_another_shell_reads_what_all_supervisors_of_a_run_printed(
    lab: Lab, cluster: PretendedCluster
) -> None:
    program, first = lab.run(moves=True)
    first.say(lambda records: records.show("actor[0]", b"before\n"))
    cluster.store.delete("pods", NAMESPACE, first.pod["metadata"]["name"], grace_s=0)
    second = cluster.supervisor(2)
    second.say(lambda records: records.show("actor[1]", b"after\nunfinished"))
    second.say(lambda records: records.note("begun anew"))
    poll_until((lab.log_dir / "actor" / "1.log").read_bytes)
    poll_until(lambda: first.pod["metadata"]["uid"] not in uids(cluster))
    other = lab.attach(program)
    assert list(other.output()) == [("actor[1]", b"after\n"), ("supervisor", b"begun anew\n")]


def test_all_output_is_there_after_the_end_where_the_program_was_launched(
    lab: Lab, cluster: PretendedCluster
) -> None:
    program, supervisor = lab.run()
    supervisor.say(lambda records: records.show("actor[1]", b"hello\n"))
    supervisor.end(COMPLETED)
    program.wait(20)
    assert cluster.left() == []
    assert list(program.output()) == [("actor[1]", b"hello\n")]


def test_what_a_kubelet_says_instead_of_a_log_is_nobodys_output(
    lab: Lab, cluster: PretendedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.reads_logs = False
    program = lab.launch()
    supervisor = cluster.supervisor()
    poll_until(lambda: cluster.excuses >= 2)
    cluster.reads_logs = True
    supervisor.place(program)
    program.await_up()
    supervisor.end(COMPLETED)
    assert program.wait(20).outcome is Outcome.COMPLETED
    assert "unable to retrieve" not in capsys.readouterr().out
    assert program._last_words() == ""


def test_another_shell_removes_a_run_that_still_waits(lab: Lab, cluster: PretendedCluster) -> None:
    cluster.places = False
    program = lab.launch()
    assert lab.attach(program).stop(20).outcome is Outcome.STOPPED
    with pytest.raises(LaunchError, match="the run was deleted"):
        program.await_up()
    assert cluster.left() == []


def test_how_a_run_has_ended_is_known_also_where_its_jobs_are_seen_before_its_pods(
    lab: Lab, cluster: PretendedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = lab.detach()
    supervisor = cluster.supervisor()
    supervisor.end(COMPLETED)
    cluster.end(supervisor.pod, 0)
    jobs = ("jobs", NAMESPACE, program.names.supervisor_job)
    poll_until(lambda: cluster.store.get(*jobs)["status"].get("completionTime"))
    watch = Api.watch

    def watch_pods_late(api: Api, kind: str, *args: Any, **options: Any) -> Any:
        if kind == "Pod":
            time.sleep(1)
        return watch(api, kind, *args, **options)

    monkeypatch.setattr(Api, "watch", watch_pods_late)
    assert lab.attach(program).wait(20).outcome is Outcome.COMPLETED
    lab.attach(program).stop(20)  # it is removed


def test_a_launch_that_leaves_at_once_holds_nothing(lab: Lab, cluster: PretendedCluster) -> None:
    program = lab.detach()
    program.kill()
    assert program.wait(1).outcome is Outcome.COMPLETED
    poll_until(lambda: not cluster.users())
    assert lab.attach(program).stop(20).outcome is Outcome.STOPPED


# How it ends otherwise


def test_what_the_cluster_knows_of_a_lost_pod_is_part_of_the_failure(
    lab: Lab, cluster: PretendedCluster
) -> None:
    program, supervisor = lab.run()
    host = program.names.host("actor", 1)
    pod = cluster.pod(host)
    supervisor.say(
        lambda records: records.end(End(failed("actor[1]", host), {"actor[0]": "its threads"}))
    )
    cluster.end(pod, 137, reason="OOMKilled")
    with pytest.raises(NodeFailedError, match=f"its pod {host} was killed: out of memory"):
        program.wait(20)
    assert program.crash_dir == lab.log_dir
    assert (lab.log_dir / "stacks" / "actor[0].txt").read_text() == "its threads"
    assert cluster.left() == []


def test_a_supervisor_that_dies_without_a_word_is_named_with_what_it_printed_last(
    lab: Lab, cluster: PretendedCluster
) -> None:
    program, supervisor = lab.run()
    cluster.print(supervisor.pod, b"MemoryError: no more")
    cluster.end(supervisor.pod, 137)
    with pytest.raises(NodeFailedError) as caught:
        program.wait(20)
    name = supervisor.pod["metadata"]["name"]
    assert f"its supervisor's pod {name} was killed by SIGKILL" in str(caught.value)
    assert "MemoryError: no more" in str(caught.value)
    assert cluster.left() == []


@pytest.fixture
def late_pods(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """While set, what is said of pods comes later than what is said of Jobs, and than logs."""
    late, watch = threading.Event(), Api.watch

    def watch_late(self: Api, kind: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
        for each in watch(self, kind, *args, **kwargs):
            if kind == "Pod" and late.is_set():
                time.sleep(2)
            yield each

    monkeypatch.setattr(Api, "watch", watch_late)
    yield late
    late.clear()


def test_how_a_supervisor_died_is_known_though_its_watch_is_late(
    lab: Lab, cluster: PretendedCluster, late_pods: threading.Event
) -> None:
    program, supervisor = lab.run()
    late_pods.set()
    cluster.end(supervisor.pod, 137)
    with pytest.raises(NodeFailedError, match="was killed by SIGKILL"):
        program.wait(20)


def test_who_was_evicted_is_known_though_its_watch_is_late(
    lab: Lab, cluster: PretendedCluster, late_pods: threading.Event
) -> None:
    program, supervisor = lab.run()
    pod = cluster.pod(program.names.host("actor", 1))
    late_pods.set()
    cluster.condition(pod, type="DisruptionTarget", status="True", reason="EvictionByEvictionAPI")
    cluster.end(pod, 75)
    end = ProgramResult(Outcome.INTERRUPTED, reason="SIGTERM to actor[1]", signum=signal.SIGTERM)
    supervisor.end(end)
    cluster.end(supervisor.pod, 1)
    with pytest.raises(SystemExit):
        program.wait(20)
    assert "evicted" in program.result.reason


def test_a_program_that_begins_anew_is_followed(
    lab: Lab,
    cluster: PretendedCluster,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(program_module, "_BEAT_S", 0.05)
    program, first = lab.run(moves=True)
    cluster.store.delete("pods", NAMESPACE, first.pod["metadata"]["name"], grace_s=10)
    second = cluster.supervisor(2)
    second.place(program)
    poll_until(lambda: cluster.beat(second))
    second.end(COMPLETED)
    assert program.wait(20).outcome is Outcome.COMPLETED
    assert (
        f"the program begins anew, in {second.pod['metadata']['name']}" in capsys.readouterr().err
    )


def test_an_end_that_the_cluster_wanted_is_none_before_it_is_known_that_none_follows(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_module, "_EXPLAIN_S", 0.1)
    program, supervisor = lab.run(moves=True)
    looks = 0
    look = program._verdict

    def count() -> ProgramResult | None:
        nonlocal looks
        looks += 1
        return look()

    monkeypatch.setattr(program, "_verdict", count)
    supervisor.end(TOLD_TO_END)
    assert not program.join(1.0)
    assert looks < 50, "it does not wait, but looks all the time"
    program.request_stop("enough")
    assert program.wait(20).outcome is Outcome.STOPPED


def test_a_run_that_somebody_deletes_is_interrupted(lab: Lab, cluster: PretendedCluster) -> None:
    cluster.answers = False
    program, _ = lab.run()
    with cluster.store.changed:  # the cluster would do the same, at the same time
        cluster.store.delete("jobs", NAMESPACE, program.names.run)
        for pod in cluster.pods():
            cluster.store.delete("pods", NAMESPACE, pod["metadata"]["name"], grace_s=0)
    with pytest.raises(SystemExit) as ended:
        program.wait(20)
    assert ended.value.code == 128 + signal.SIGTERM
    assert program.result is not None
    assert "the run was deleted" in program.result.reason
    assert cluster.left() == []


@pytest.mark.parametrize("moves", [False, True])
def test_a_run_that_the_cluster_ends_after_its_longest_time_says_so(
    lab: Lab, cluster: PretendedCluster, moves: bool
) -> None:
    program, _ = lab.run(moves=moves)

    def limit(job: Object) -> None:
        job["spec"]["activeDeadlineSeconds"] = 0

    cluster.store.update("jobs", NAMESPACE, program.names.run, limit)
    with pytest.raises(SystemExit) as ended:
        program.wait(20)
    assert ended.value.code == 128 + signal.SIGTERM
    assert program.result is not None
    assert "it has run for as long as max_run_s says (DeadlineExceeded: " in program.result.reason


# An exception in the end that may be unpickled, or not


class MarkedError(Exception):
    """Leaves a trace where it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return (_unpickle, self.args)


def _unpickle(path: str) -> MarkedError:
    Path(path).touch()
    return MarkedError(path)


@pytest.mark.parametrize("key", [KEY, ANOTHER_KEY], ids=["the same key", "another key"])
def test_nothing_is_unpickled_that_the_run_has_not_sealed(
    lab: Lab, tmp_path: Path, key: bytes
) -> None:
    trace = tmp_path / "trace"
    report = ExceptionReport.of(MarkedError(str(trace)))
    trace.unlink(missing_ok=True)
    failure = NodeFailure("actor[0]", "somewhere", "MarkedError", report=report)
    program, supervisor = lab.run(key=key)
    supervisor.end(ProgramResult(Outcome.FAILED, (failure,)))
    with pytest.raises(NodeFailedError, match="MarkedError") as caught:
        program.wait(20)
    assert isinstance(caught.value.__cause__, MarkedError) == (key == KEY)
    assert trace.exists() == (key == KEY)


# Faults of the API


def test_an_end_is_known_though_the_server_fails_at_that_time(
    lab: Lab, cluster: PretendedCluster
) -> None:
    program, supervisor = lab.run()
    cluster.api.faults.failures.append(Failure(500, 12, lambda *_: True, 0))
    cluster.drop()
    supervisor.end(COMPLETED)
    assert program.wait(30).outcome is Outcome.COMPLETED
    assert cluster.left() == []


def test_a_program_outlives_a_server_that_is_away_for_longer_than_requests_are_tried_again(
    lab: Lab,
    cluster: PretendedCluster,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(client_module, "_ATTEMPTS", 2)
    monkeypatch.setattr(program_module, "_BEAT_S", 0.05)
    program, supervisor = lab.run()
    poll_until(lambda: cluster.beat(supervisor))
    said = ""

    def has_said(text: str) -> bool:
        nonlocal said
        said += capsys.readouterr().err
        return text in said

    cluster.fail(500)
    poll_until(lambda: has_said("the program is not told that this process waits: "))
    cluster.heal()
    poll_until(lambda: has_said("the program is told again that this process waits for it"))
    assert said.count("is not told") == 1
    assert program.result is None
    supervisor.end(COMPLETED)
    assert program.wait(20).outcome is Outcome.COMPLETED


@pytest.mark.parametrize(
    ("right", "rule"),
    [
        (("get", "pods/log"), '"resources": ["pods/log"], "verbs": ["get"]'),
        (("watch", "pods"), '"resources": ["pods"], "verbs": ["watch"]'),
        (("list", "jobs"), '"resources": ["jobs"], "verbs": ["list"]'),
    ],
    ids=["logs", "watch", "list"],
)
def test_a_right_without_which_nothing_is_seen_is_named_and_nothing_left(
    lab: Lab, cluster: PretendedCluster, right: tuple[str, str], rule: str
) -> None:
    cluster.api.tokens[TOKEN] = RIGHTS - {right}
    program = lab.launch()
    with pytest.raises(LaunchError) as caught:
        program.await_up()
    assert rule in str(caught.value)
    poll_until(lambda: not cluster.left())


def test_rights_that_are_taken_away_are_named_and_the_program_goes_on(
    lab: Lab,
    cluster: PretendedCluster,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(program_module, "_BEAT_S", 0.05)
    program, supervisor = lab.run()
    poll_until(lambda: cluster.beat(supervisor))
    said = ""

    def has_said(text: str) -> bool:
        nonlocal said
        said += capsys.readouterr().err
        return text in said

    cluster.api.tokens[TOKEN] = frozenset()
    cluster.drop()
    poll_until(lambda: has_said('"resources": ["pods"], "verbs": ["patch"]'))
    assert program.result is None
    cluster.api.tokens[TOKEN] = RIGHTS
    supervisor.end(COMPLETED)
    assert program.wait(20).outcome is Outcome.COMPLETED


def test_who_may_not_stop_a_program_is_told_so(lab: Lab, cluster: PretendedCluster) -> None:
    program, _ = lab.run()
    cluster.api.tokens[TOKEN] = RIGHTS - {("delete", "pods"), ("delete", "jobs")}
    program.request_stop("enough")
    with pytest.raises(NodeFailedError, match=r'"resources": \["pods"\], "verbs": \["delete"\]'):
        program.wait(20)
    cluster.store.delete("jobs", NAMESPACE, program.names.run)


# Machines that do not answer


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine is soon taken for one that does not answer."""
    monkeypatch.setattr(removal_module, "_STUCK_S", 0.3)
    monkeypatch.setattr(removal_module, "_LOOK_S", 0.05)
    monkeypatch.setattr(removal_module, "SPARE_S", 0)


def settle(cluster: PretendedCluster, program: KubernetesProgram, supervisor: Supervisor) -> None:
    """Waits until the supervisor's word came later than that all pods run."""
    for replica in (0, 1):
        cluster.pod(program.names.host("actor", replica))

    def is_known() -> bool:
        supervisor.tell(program)
        return len(program._departures._served) == 2

    poll_until(is_known)
    # What was said last may come after pods have ended, and then these served nobody.
    supervisor.tell(program, actor_0="serving")
    poll_until(lambda: any(each.state == "serving" for each in program.status()))


def hear(capsys: pytest.CaptureFixture[str]) -> Callable[[str], int]:
    """Returns what counts how often something was told so far."""
    said = ""

    def count(text: str) -> int:
        nonlocal said
        said += capsys.readouterr().err
        return said.count(text)

    return count


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("notice_s", [2.0, 600.0, -1.0], ids=["short", "long", "endless"])
def test_a_pod_is_removed_and_replaced_once_its_node_is_lost(
    lab: Lab,
    cluster: PretendedCluster,
    capsys: pytest.CaptureFixture[str],
    notice_s: float,
) -> None:
    program, supervisor = lab.run(moves=True, notice_s=notice_s)
    settle(cluster, program, supervisor)
    stuck = cluster.pod(program.names.host("actor", 0))["metadata"]
    cluster.lost.add(MACHINE)
    cluster.store.delete("pods", NAMESPACE, stuck["name"])
    supervisor.tell(program, actor_0="restarting")
    poll_until(lambda: stuck["uid"] not in uids(cluster))
    poll_until(lambda: len(cluster.pods()) == 3)
    count = hear(capsys)
    poll_until(lambda: count(f"pod {stuck['name']} is removed"))
    program.kill()


@pytest.mark.usefixtures("soon")
def test_a_pod_whose_node_is_at_work_is_not_removed_though_its_machine_does_not_answer(
    lab: Lab, cluster: PretendedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    program, supervisor = lab.run(moves=True, notice_s=0.0)
    settle(cluster, program, supervisor)
    works, lost = (cluster.pod(program.names.host("actor", each))["metadata"] for each in (0, 1))
    cluster.lost.add(MACHINE)
    for each in (works, lost):
        cluster.store.delete("pods", NAMESPACE, each["name"], grace_s=0)
    count = hear(capsys)
    waits = f"machine {MACHINE} does not answer; pod {works['name']} is replaced when it is back"
    poll_until(lambda: count(waits))
    supervisor.tell(program, actor_1="restarting")
    poll_until(lambda: lost["uid"] not in uids(cluster))
    assert works["uid"] in uids(cluster)
    assert not cluster.requests(f"DELETE {PODS}/{works['name']}")
    assert count(waits) == 1
    cluster.lost.clear()
    poll_until(lambda: works["uid"] not in uids(cluster))


@pytest.mark.usefixtures("soon")
def test_no_other_pod_is_made_for_a_node_that_may_not_be_restarted(
    lab: Lab, cluster: PretendedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    program, supervisor = lab.run()
    settle(cluster, program, supervisor)
    stuck = cluster.pod(program.names.host("actor", 0))["metadata"]
    cluster.lost.add(MACHINE)
    cluster.store.delete("pods", NAMESPACE, stuck["name"], grace_s=0)
    supervisor.tell(program, actor_0="ended")
    count = hear(capsys)
    poll_until(lambda: count(f"pod {stuck['name']} ends when it is back"))
    assert stuck["uid"] in uids(cluster)
    assert not cluster.requests("DELETE")


@pytest.mark.usefixtures("soon")
def test_a_supervisor_is_removed_once_all_others_have_lost_it_and_the_program_begins_anew(
    lab: Lab, cluster: PretendedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    program, supervisor = lab.run(moves=True, notice_s=600.0)
    settle(cluster, program, supervisor)
    stuck = supervisor.pod["metadata"]
    nodes = [cluster.pod(program.names.host("actor", each)) for each in (0, 1)]
    cluster.lost.add(ANOTHER_MACHINE)
    cluster.store.delete("pods", NAMESPACE, stuck["name"])
    cluster.end(nodes[0], 75)
    # One that has ended may have lost its link for another reason.
    poll_until(lambda: nodes[0]["metadata"]["uid"] not in running(cluster))
    assert not program.join(1.0)
    assert stuck["uid"] in uids(cluster)
    cluster.end(nodes[1], 75)
    second = cluster.supervisor(2)
    assert stuck["uid"] not in uids(cluster)
    count = hear(capsys)
    poll_until(lambda: count(f"the program begins anew, in {second.pod['metadata']['name']}"))
    program.kill()


def lose_machine_of(cluster: PretendedCluster, supervisor: Supervisor) -> str:
    """Has the cluster give a supervisor's pod up with its machine; returns the name of the pod."""
    name: str = supervisor.pod["metadata"]["name"]
    cluster.lost.add(ANOTHER_MACHINE)
    cluster.condition(
        supervisor.pod, type="DisruptionTarget", status="True", reason="DeletionByTaintManager"
    )
    cluster.store.delete("pods", NAMESPACE, name, grace_s=0)
    return name


def running(cluster: PretendedCluster) -> list[str]:
    return [pod["metadata"]["uid"] for pod in cluster.pods() if pod["status"]["phase"] == "Running"]


@pytest.mark.usefixtures("soon")
def test_a_supervisor_that_may_work_is_removed_only_after_it_has_missed_its_launcher(
    lab: Lab, cluster: PretendedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    program, supervisor = lab.run(moves=True, notice_s=0.0, launcher_silence_s=5.0)
    settle(cluster, program, supervisor)
    stuck = supervisor.pod["metadata"]
    cluster.lost.add(ANOTHER_MACHINE)
    deleted_at = time.monotonic()
    cluster.store.delete("pods", NAMESPACE, stuck["name"], grace_s=0)
    count = hear(capsys)
    waits = f"machine {ANOTHER_MACHINE} does not answer; pod {stuck['name']} is replaced when"
    poll_until(lambda: count(waits))
    poll_until(lambda: stuck["uid"] not in uids(cluster))
    assert time.monotonic() >= deleted_at + 5.0
    cluster.supervisor(2)
    assert count(waits) == 1


@pytest.mark.usefixtures("soon")
def test_a_program_that_may_not_begin_anew_ends_with_the_machine_of_its_supervisor(
    lab: Lab, cluster: PretendedCluster
) -> None:
    program, supervisor = lab.run(notice_s=0.0)
    settle(cluster, program, supervisor)
    name = lose_machine_of(cluster, supervisor)
    with pytest.raises(
        NodeFailedError,
        match=f"the machine {ANOTHER_MACHINE} of its supervisor is lost: its pod {name} was ended "
        "since its machine is not ready",
    ):
        program.wait(30)
    assert len(cluster.supervisors) == 1
    assert cluster.left() == []


@pytest.mark.usefixtures("soon")
def test_a_supervisor_that_has_ended_the_program_is_not_taken_for_lost(
    lab: Lab, cluster: PretendedCluster
) -> None:
    program, supervisor = lab.run(moves=True, notice_s=0.0, launcher_silence_s=300.0)
    settle(cluster, program, supervisor)
    name = lose_machine_of(cluster, supervisor)
    cluster.end_together([program.names.host("actor", replica) for replica in (0, 1)], 0)
    with pytest.raises(
        NodeFailedError,
        match=f"was ended by its supervisor, and how is not known: the machine {ANOTHER_MACHINE} of "
        f"its pod {name} does not answer. .* nothing of this process, for which it waits 300 s",
    ):
        program.wait(30)
    assert len(cluster.supervisors) == 1
    assert cluster.left() == []


@pytest.mark.usefixtures("soon")
def test_a_pod_that_has_ended_is_not_removed_by_force_whatever_holds_it(
    lab: Lab, cluster: PretendedCluster
) -> None:
    program, supervisor = lab.run(moves=True)
    settle(cluster, program, supervisor)
    held, stuck = (cluster.pod(program.names.host("actor", each))["metadata"] for each in (0, 1))
    cluster.is_lost = True
    for each in (held, stuck):
        cluster.store.delete("pods", NAMESPACE, each["name"], grace_s=1)
    cluster.hold(held["name"])
    cluster.end(cluster.store.get("pods", NAMESPACE, held["name"]), 75)
    supervisor.tell(program, actor_0="restarting", actor_1="restarting")
    poll_until(lambda: stuck["uid"] not in uids(cluster))
    assert held["uid"] in uids(cluster)
    assert not cluster.requests(f"DELETE {PODS}/{held['name']}")
    cluster.release(held["name"])


@pytest.mark.usefixtures("soon")
def test_a_shell_that_attaches_removes_no_pod(lab: Lab, cluster: PretendedCluster) -> None:
    program = lab.detach()
    other = lab.attach(program)
    stuck = cluster.pod(program.names.host("actor", 0))["metadata"]
    cluster.is_lost = True
    cluster.store.delete("pods", NAMESPACE, stuck["name"], grace_s=0)
    assert not other.join(1.0)
    assert stuck["uid"] in uids(cluster)
    assert not cluster.requests("DELETE")


@pytest.mark.usefixtures("soon")
def test_a_pod_that_cannot_be_removed_now_is_removed_later(
    lab: Lab, cluster: PretendedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "_ATTEMPTS", 1)
    program, supervisor = lab.run(moves=True)
    settle(cluster, program, supervisor)
    stuck = cluster.pod(program.names.host("actor", 0))["metadata"]
    path = f"{PODS}/{stuck['name']}"
    cluster.fail(503, lambda method, where: method == "DELETE" and where.startswith(path))
    cluster.is_lost = True
    cluster.store.delete("pods", NAMESPACE, stuck["name"], grace_s=0)
    supervisor.tell(program, actor_0="restarting")
    poll_until(lambda: len(cluster.requests(f"DELETE {path}")) >= 2)
    cluster.heal()
    poll_until(lambda: stuck["uid"] not in uids(cluster))
