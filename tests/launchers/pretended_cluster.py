"""A cluster whose machines are pretended: a test says when pods begin and end, and what they print.

The API, its controllers and the objects are those of the bed. Real pods are elsewhere.
"""

import contextlib
import dataclasses
import math
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import launchpad_lite as lp
from launchers._kubernetes.client import Api
from launchers._kubernetes.names import Names
from launchers._kubernetes.objects import Cluster, Files, Group, manifests, owned
from launchers._kubernetes.program import KubernetesProgram
from launchers._kubernetes.records import End, RecordWriter
from launchers._kubernetes.timing import Timing
from launchers.kubernetes import PodOptions
from launchpad_lite.launching import (
    LaunchOptions,
    LaunchPlan,
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
from tests.launchers.kubernetes_access import documented_role, write_config

NAMESPACE, TOKEN = "team", "of-the-researcher"
LAUNCHER = "launchpad-lite/launcher"
KEY, ANOTHER_KEY = b"of this run", b"of another run"
#: Of the nodes, and of the supervisor.
MACHINE, ANOTHER_MACHINE = "machine-1", "machine-2"
#: What the cluster says whose supervisor was told to end.
TOLD_TO_END = ProgramResult(Outcome.INTERRUPTED, reason="SIGTERM", signum=signal.SIGTERM)
RIGHTS = documented_role() | {(verb, "jobsets") for verb in ("create", "get", "patch", "delete")}
#: Nothing waits for long that is asked again, and nobody gives up soon.
BRIEF = Timing(
    request_pause_s=0.05,
    longest_request_pause_s=0.05,
    watch_pause_s=0.05,
    look_s=0.05,
    log_pause_s=0.05,
    gather_s=0.05,
    ask_again_s=0.05,
    first_status_s=30.0,
    longest_wait_s=0.05,
    stuck_look_s=0.05,
)


class Node:
    def run(self) -> None: ...


class Clock:
    """The time, which a test may set forward.

    Attributes:
        reads: How often each thread looked at it, by its name.
    """

    def __init__(self) -> None:
        self.reads: Counter[str] = Counter()
        self._ahead_s = 0.0

    def __call__(self) -> float:
        self.reads[threading.current_thread().name] += 1
        return time.monotonic() + self._ahead_s

    def wait_for_looks(self, program: KubernetesProgram) -> None:
        """Returns when the thread that decides has acted on what there was, and waits again."""
        thread = f"launchpad-{program.plan.program}"
        before = self.reads[thread]
        poll_until(lambda: self.reads[thread] >= before + 5)

    def advance(self, seconds: float) -> None:
        self._ahead_s += seconds


class SlowApi(Api):
    """Logs come slowly."""

    def logs(self, *args: Any, **options: Any) -> Iterator[str]:
        for line in super().logs(*args, **options):
            time.sleep(0.01)
            yield line


class LateApi(Api):
    """While `late` is set, nothing is said of pods to who watches them."""

    late = threading.Event()

    def watch(self, kind: str, *args: Any, **options: Any) -> Iterator[Any]:
        for each in super().watch(kind, *args, **options):
            while kind == "Pod" and self.late.is_set():
                if options["cancellation"].wait(0.01):
                    return
            yield each


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
            self._records.drain(20.0)
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
        self._events = events = Events(self.store)
        self._loop = Loop(
            self.store,
            [
                JobSetController(self.store, self.api.admit).run,
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
        user = {"token": TOKEN}
        return write_config(self._folder, self.api.url, user=user, namespace=NAMESPACE)

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
        # That of signals stays as their handlers do.
        found = [each.name for each in threading.enumerate() if each not in self._own]
        return [name for name in found if not name.startswith("signal-")]

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

    def warn(self, pod: Object, reason: str, message: str) -> None:
        """Notes an event about a pod."""
        self._events.record(pod, "Warning", reason, message)

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

    def _read_log(self, pod: Object, container: str) -> Log:
        path = self._log(pod)
        if container != container_of(pod) or not path.exists():
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


class Lab:
    """Launches programs in a cluster, and attaches to them.

    Attributes:
        log_dir: Of the programs that it launches.
        timing: Of those that come next.
        clock: Of all.
        api: What they speak with the cluster by.
    """

    def __init__(self, cluster: PretendedCluster, folder: Path) -> None:
        self.cluster = cluster
        self.log_dir = folder / "logs"
        self.timing = BRIEF
        self.clock = Clock()
        self.api: type[Api] = Api
        self._programs: list[KubernetesProgram] = []

    def wait_for(self, **seconds: float) -> None:
        """Has the programs that come next wait for other times."""
        self.timing = dataclasses.replace(self.timing, **seconds)  # type: ignore[arg-type] # numbers

    def launch(
        self,
        *,
        moves: bool = False,
        jobset: bool = False,
        queue: str | None = None,
        notice_s: float = 2.0,
        schedule_s: float = 30.0,
        launcher_silence_s: float = math.inf,
        key: bytes = KEY,
    ) -> KubernetesProgram:
        """Returns a run whose pods are about to begin; its nodes may move to other machines or not."""
        plan = _plan(moves=moves)
        names = Names.of("demo", plan.groups(), jobset=jobset)
        api = self._connect()
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
                timing=self.timing,
                clock=self.clock,
            )
            undo.pop_all()
        _create(api, names, plan, notice_s, queue)
        return self._watch(program)

    def run(self, **options: Any) -> tuple[KubernetesProgram, Supervisor]:
        """Returns a run that was launched, all of whose nodes are placed; takes what `launch` does."""
        program = self.launch(**options)
        supervisor = self.cluster.supervisor()
        supervisor.place(program)
        program.await_up()
        return program, supervisor

    def detach(self, *, jobset: bool = False) -> KubernetesProgram:
        """Returns a run whose launch has left."""
        plan = _plan(moves=False)
        names = Names.of("demo", plan.groups(), jobset=jobset)
        api = self._connect()
        _create(api, names, plan, 2.0)
        program = KubernetesProgram(plan, LaunchOptions(2.0), api, names)
        program.detach(f"run {names.run}")
        return program

    def attach(self, program: KubernetesProgram) -> KubernetesProgram:
        """Returns the same run as another shell has it."""
        return self._watch(
            KubernetesProgram(
                program.plan,
                LaunchOptions(2.0),
                self._connect(),
                program.names,
                None,
                schedule_s=math.inf,
                is_launch=False,
                log_dir=None,
                timing=self.timing,
                clock=self.clock,
            )
        )

    def _connect(self) -> Api:
        return self.api.connect(timing=self.timing)

    def _watch(self, program: KubernetesProgram) -> KubernetesProgram:
        self._programs.append(program)
        program.watch()
        return program

    def end_all(self) -> None:
        for each in self._programs:
            each.kill()
            assert each.join(20)


def _plan(*, moves: bool) -> LaunchPlan:
    program = lp.Program("demo")
    with program.group("actor"):
        for _ in range(2):
            program.add_node(lp.PyClassNode(Node))
    policy = RestartPolicy("on_failure") if moves else RestartPolicy("never")
    return lp.plan(program, "local_mp", restart=policy)


def _create(
    api: Api, names: Names, plan: LaunchPlan, notice_s: float, queue: str | None = None
) -> None:
    """Creates all objects of a run."""
    cluster = Cluster(names, NAMESPACE, notice_s=notice_s, jobset=names.jobset, queue=queue)
    pod = PodOptions(image="research:1")
    group = Group("actor", plan.executables, pod)
    first, *others = manifests(cluster, [group], Files({}, {}), pod, "demo")
    root = api.create(first)
    for each in others:
        api.create(owned(each, root))
