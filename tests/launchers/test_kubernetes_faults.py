"""What a program in a cluster does when one of its parts, or the cluster, fails.

The API is that of the bed, pods are real. Of each fault are measured: the seconds until the launcher
has ended, or until calls go on, and until nothing of the program is left; `pytest -s` shows them.
"""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launchpad_lite.testing import poll_until
from tests.beds.kubernetes.cluster import BARE_IMAGE, IMAGE, KubernetesCluster
from tests.engines import needs_kubernetes

# A launch alone takes half a minute on a machine that is busy.
pytestmark = [needs_kubernetes, pytest.mark.slow, pytest.mark.timeout(180)]

CHECKOUT = Path(__file__).resolve().parents[2]
RUN = "faults"
#: Resources of which a launcher leaves no objects.
KINDS = ("Pod", "Job", "Service", "Secret", "NetworkPolicy")
SILENCE_S = 8.0
#: For what takes seconds; the rest is for a machine that is busy.
WITHIN_S = 60.0
LAUNCH_S = 60.0

PROGRAM = """
import json, os, pathlib, signal, socket, sys, threading, time
import courier
import launchpad_lite as lp

SHARED = pathlib.Path("/shared")


def tell(folder, name, value):
    aside = folder / f"{name}.{os.getpid()}.{threading.get_ident()}"
    aside.write_text(json.dumps(value))
    os.replace(aside, folder / name)


class Store:
    def __init__(self):
        self.total = 0
        self.restored = 0

    def add(self):
        self.total += 1
        if (SHARED / "eat").exists():
            (SHARED / "eat").unlink()
            print("eating", flush=True)
            kept = []
            while True:
                kept.append(b"x" * (1 << 24))
        return self.total

    def save(self, folder):
        (folder / "total").write_text(str(self.total))

    def restore(self, folder):
        self.total = int((folder / "total").read_text())
        print("restored", self.total, flush=True)


class Worker:
    def __init__(self, store, index, is_patient, lines):
        self.store, self.index, self.lines = store, index, lines
        # Callers that are to be patient go on when a call fails.
        self.gone = (courier.ServerLostError, courier.ServerUnreachableError)
        self.gone = self.gone if is_patient else ()

    def run(self):
        calls = lost = printed = 0
        while not lp.wait_for_stop(0.02):
            if (SHARED / "finish").exists():
                break
            if (SHARED / f"fail{self.index}").exists():
                raise RuntimeError("the fault of the program")
            if printed < self.lines:
                for printed in range(printed + 1, printed + 11):
                    print("line", printed, flush=True)
                if printed == self.lines:
                    tell(SHARED, f"printed{self.index}", True)
            try:
                total = self.store.add()
            except self.gone:
                lost += 1
                continue
            calls += 1
            tell(SHARED, f"worker{self.index}", [socket.gethostname(), total, calls, time.time()])
        print(f"{calls} calls, {lost} lost", flush=True)


if __name__ == "__main__":
    options = json.loads(sys.argv.pop(1))
    folder = pathlib.Path(options.pop("folder"))
    workers, patient, lines = (options.pop(name) for name in ("workers", "patient", "lines"))
    if "restart" in options:
        options["restart"] = lp.RestartPolicy(options["restart"], max_restarts=100)
    if "checkpoints" in options:
        options["checkpoints"] = lp.Checkpoints(SHARED / "checkpoints", options["checkpoints"])
    if "launcher_silence_s" in options:
        # What users may choose is for clusters, which tell pods late of changes.
        from launchers import kubernetes
        from launchers._kubernetes import program as outside

        outside._BEAT_S = options["launcher_silence_s"] / 6
        kubernetes.KubernetesLauncher._option_mistakes = lambda self: ()
    if "longest_backoff_s" in options:
        from launchers._kubernetes import objects

        objects.LONGEST_BACKOFF_S = options.pop("longest_backoff_s")
    if "stuck_s" in options:
        from launchers._kubernetes import removal

        removal._STUCK_S = options.pop("stuck_s")
    if "dies_after" in options:
        from launchers._kubernetes.client import Api

        create, last = Api.create, options.pop("dies_after")

        def create_and_die(api, obj, **how):
            made = create(api, obj, **how)
            if obj["kind"] == "Job" and obj["metadata"]["name"] == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return made

        Api.create = create_and_die
    program = lp.Program("faults")
    with program.group("store"):
        store = program.add_node(lp.CourierNode(Store))
    with program.group("worker"):
        for index in range(workers):
            program.add_node(lp.PyClassNode(Worker, store, index, patient, lines))
    running = lp.launch(program, "kubernetes", **options)

    def watch():
        while running.result is None:
            tell(folder, "status", {n.name: [n.state, n.host, n.restarts] for n in running.status()})
            time.sleep(0.05)

    threading.Thread(target=watch, daemon=True).start()
    try:
        running.wait()
    finally:
        result = running.result
        tell(folder, "result", {
            "outcome": result.outcome.name,
            "reason": result.reason,
            "failures": [[each.node, each.host, each.summary] for each in result.failures],
            "restarts": [
                [each.node, each.failure and each.failure.summary] for each in result.restarts
            ],
        })
"""


class Run:
    """A program that was launched into the cluster, and a clock that runs from the last fault on."""

    def __init__(self, cluster: KubernetesCluster, folder: Path, options: dict[str, Any]) -> None:
        self.cluster = cluster
        self.folder = folder
        self.workers = options.setdefault("workers", 1)
        self.shared = folder / "shared"
        self.shared.mkdir(mode=0o777, exist_ok=True)
        self.shared.chmod(0o777)
        for each in (folder, *folder.parents[:2]):
            each.chmod(0o755)
        self._output = folder / "output"
        script = folder / "faults.py"
        script.write_text(PROGRAM)
        shared = {"hostPath": {"path": str(self.shared)}, "mount": "/shared"}
        pods = options.pop("pods", {})
        pods["*"] = {**pods.get("*", {}), "volumes": {"shared": shared}}
        kubeconfig = options.pop("kubeconfig", cluster.kubeconfig)
        chosen = {
            "image": IMAGE,
            "name": RUN,
            "silence_s": SILENCE_S,
            "folder": str(folder),
            "log_dir": str(folder / "logs"),
            "patient": False,
            "lines": 0,
            "pods": pods,
            **options,
        }
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
        }
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(script), json.dumps(chosen)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=folder,
                env={
                    **environment,
                    "KUBECONFIG": str(kubeconfig),
                    "PYTHONUNBUFFERED": "1",
                    "PYTHONPATH": str(CHECKOUT),
                },
                start_new_session=True,
            )
        self.struck_at = time.monotonic()

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    @property
    def story(self) -> str:
        """All that tells what went on."""
        return "\n".join([self.output, *self.cluster.events()])

    @property
    def result(self) -> Any:
        return json.loads((self.folder / "result").read_text())

    def said(self, pattern: str) -> bool:
        """Whether the user has seen that."""
        return re.search(pattern, self.output) is not None

    def await_words(self, pattern: str, timeout_s: float = WITHIN_S) -> None:
        poll_until(
            lambda: self.said(pattern) or self.process.poll() is not None, timeout_s, must=False
        )
        assert self.said(pattern), self.story
        self.note(f"{pattern!r} was told")

    def strike(self) -> None:
        """Starts the clock."""
        self.struck_at = time.monotonic()

    def note(self, what: str) -> None:
        """Shows how long something took, from the fault on."""
        print(f"\n{what} after {time.monotonic() - self.struck_at:.1f} s", end="")

    def told(self, name: str) -> Any:
        """What a node told last under a name; None: nothing yet."""
        try:
            return json.loads((self.shared / name).read_text())
        except FileNotFoundError:
            return None

    def states(self) -> set[str]:
        """What the nodes do, as the launcher knows it."""
        return {state for state, *_ in self.status().values()}

    def status(self) -> Any:
        """How the nodes are, as the launcher knows it; nothing before it says that all run."""
        try:
            return json.loads((self.folder / "status").read_text())
        except FileNotFoundError:
            return {}

    def await_calls(self, timeout_s: float = WITHIN_S) -> None:
        """Waits until all workers have got answers, from now on."""
        now = time.time()

        def all_do() -> bool:
            assert self.process.poll() is None, self.story
            told = [self.told(f"worker{index}") for index in range(self.workers)]
            return all(each and each[3] > now for each in told)

        try:
            poll_until(all_do, timeout_s)
        except TimeoutError:
            raise AssertionError(f"no calls: {self.story}") from None
        self.note("calls went on")

    def await_restart(self, node: str, restarts: int = 1) -> None:
        """Waits until a node is at work after so many restarts."""

        def there() -> bool:
            assert self.process.poll() is None, self.story
            state, _, count = self.status()[node]
            return state in ("running", "serving") and count == restarts

        try:
            poll_until(there, WITHIN_S)
        except TimeoutError:
            raise AssertionError(f"{self.status()}:\n{self.story}") from None

    def pods(self, group: str) -> list[dict[str, Any]]:
        """The pods of a group that are there, or of the supervisor."""
        label, value = ("group", group) if group != "supervisor" else ("role", group)
        return [
            pod
            for pod in self.cluster.objects("Pod")
            if pod["metadata"]["labels"].get(f"launchpad-lite/{label}") == value
        ]

    def pod(self, group: str, replica: int = 0) -> str:
        """Name of the pod that runs now."""
        host = f"{RUN}-{group}-{replica}"

        def names() -> list[str]:
            return [
                each["metadata"]["name"]
                for each in self.pods(group)
                if each["status"].get("phase") == "Running"
                and "deletionTimestamp" not in each["metadata"]
                and (group == "supervisor" or each["spec"]["hostname"] == host)
            ]

        # Its node may be at work before its kubelet has said that it runs.
        assert poll_until(lambda: len(names()) == 1, must=False), self.story
        return names()[0]

    def machine(self, group: str, replica: int = 0) -> str:
        """The machine of the pod that runs now."""
        name = self.pod(group, replica)
        (pod,) = (each for each in self.pods(group) if each["metadata"]["name"] == name)
        return str(pod["spec"]["nodeName"])

    def finish(self) -> None:
        """Has the program end by itself."""
        self.strike()
        (self.shared / "finish").touch()

    def end(self, within_s: float = WITHIN_S) -> int:
        """Waits for the launcher's end; nothing is left then. Returns the exit code."""
        try:
            code = self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it goes on after {within_s} s:\n{self.story}") from None
        self.note(f"launcher ended with {code}")
        print(f"\n{self.output}")
        objects = [
            f"{kind} {each['metadata']['name']}"
            for kind in KINDS
            for each in self.cluster.objects(kind)
        ]
        assert not objects, f"{objects}: {self.story}"
        # Containers and networks go a moment after their objects.
        assert poll_until(lambda: not self.cluster.leftovers(), WITHIN_S, must=False), self.story
        return code


Launch = Callable[..., Run]


@pytest.fixture(scope="module")
def bed() -> Iterator[KubernetesCluster]:
    with KubernetesCluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(bed: KubernetesCluster) -> Iterator[KubernetesCluster]:
    """An empty cluster without faults."""
    yield bed
    bed.restore()


@pytest.fixture
def launch(cluster: KubernetesCluster, tmp_path: Path) -> Iterator[Launch]:
    """Launches the program and waits until all its nodes are at work."""
    runs = []

    def start(*, wait: bool = True, **options: Any) -> Run:
        run = Run(cluster, tmp_path, options)
        runs.append(run)
        if wait:
            run.await_calls(LAUNCH_S)
            # Nodes may be at work before the launch has returned.
            poll_until(lambda: run.status() and run.states() <= {"running", "serving"}, WITHIN_S)
        run.strike()
        return run

    yield start
    for run in runs:
        with contextlib.suppress(ProcessLookupError):
            run.process.kill()
        run.process.wait()


def delete(cluster: KubernetesCluster, path: str) -> None:
    """As `kubectl delete`."""
    config = json.loads(cluster.kubeconfig.read_text())
    request = urllib.request.Request(
        f"{config['clusters'][0]['cluster']['server']}{path.format(cluster.namespace)}",
        data=json.dumps({"propagationPolicy": "Background"}).encode(),
        headers={
            "Authorization": f"Bearer {config['users'][0]['user']['token']}",
            "Content-Type": "application/json",
        },
        method="DELETE",
    )
    urllib.request.urlopen(request).close()


JOB = "/apis/batch/v1/namespaces/{}/jobs/"
SECRET = "/api/v1/namespaces/{}/secrets/"
#: With `ram=`, allocations would fail before.
LITTLE_MEMORY = {
    "patch": {
        "spec": {"containers": [{"name": "node", "resources": {"limits": {"memory": "256Mi"}}}]}
    }
}
#: The agent may have told first, in the moment before it was killed as well.
OUT_OF_MEMORY = r"out of memory \((limit 256Mi|it had up to \d+ MiB)\)"
KILLED = "its pod faults-store-0 was killed by SIGKILL"


# A node's pod goes


def test_a_killed_pod_is_the_first_cause_with_what_the_cluster_knows(
    launch: Launch, cluster: KubernetesCluster
) -> None:
    run = launch(workers=2)  # these fail as well: their calls do
    cluster.kill_container(run.pod("store"))
    assert run.end() == 1
    assert run.result["failures"][0] == ["store[0]", "faults-store-0", KILLED]
    assert run.said(rf"store\[0\].*{KILLED}")


def test_a_killed_pod_is_replaced_under_the_same_name_and_callers_go_on(
    launch: Launch, cluster: KubernetesCluster
) -> None:
    run = launch(restart="on_failure", patient=True)
    before = run.pod("store")
    cluster.kill_container(before)
    run.await_restart("store[0]")
    run.await_calls()
    assert run.pod("store") != before
    assert cluster.resolve("faults-store-0.faults-store")
    assert run.status()["store[0]"] == ["serving", "faults-store-0", 1]
    run.finish()
    assert run.end() == 0
    assert run.result["restarts"] == [["store[0]", KILLED]]


def test_a_pod_out_of_memory_is_named(launch: Launch, cluster: KubernetesCluster) -> None:
    run = launch(pods={"store": LITTLE_MEMORY})
    (run.shared / "eat").touch()
    assert run.end() == 1
    node, _, summary = run.result["failures"][0]
    assert node == "store[0]"
    assert re.search(OUT_OF_MEMORY, summary), summary


def test_a_pod_out_of_memory_is_replaced(launch: Launch, cluster: KubernetesCluster) -> None:
    run = launch(pods={"store": LITTLE_MEMORY}, restart="on_failure", patient=True)
    (run.shared / "eat").touch()
    run.await_restart("store[0]")
    run.await_calls()
    run.finish()
    assert run.end() == 0
    ((node, summary),) = run.result["restarts"]
    assert node == "store[0]"
    assert re.search(OUT_OF_MEMORY, summary), summary


def test_a_node_that_fails_is_named_before_those_that_fail_without_it(launch: Launch) -> None:
    run = launch(workers=2)
    (run.shared / "fail0").touch()
    assert run.end() == 1
    assert run.result["failures"][0] == [
        "worker[0]",
        "faults-worker-0",
        "RuntimeError: the fault of the program",
    ]


# A pod does not come


@pytest.mark.parametrize(
    ("options", "who"),
    [
        ({"image": "localhost/none:1"}, ("supervisor",)),
        ({"pods": {"worker": {"image": "localhost/none:1"}}}, ("worker[0]", "worker[1]")),
    ],
    ids=["of all", "of a group"],
)
def test_an_image_that_does_not_exist_is_named_at_once_and_ends_the_launch(
    launch: Launch, options: dict[str, Any], who: tuple[str, ...]
) -> None:
    run = launch(wait=False, schedule_s=10, workers=2, **options)
    for each in who:  # in one line, or each in its own if the cluster tells of them apart
        run.await_words(
            rf"launchpad: .*{re.escape(each)}.* waits?: (ErrImagePull|ImagePullBackOff).*none:1"
        )
    assert run.end() == 1
    assert run.said(r"LaunchError: .*not all nodes were placed within 10 s: .*ImagePullBackOff")


def test_pods_that_fit_nowhere_end_the_launch_with_the_reason(
    launch: Launch, cluster: KubernetesCluster
) -> None:
    cluster.pending(lambda pod: "worker" in pod["metadata"]["name"])
    run = launch(wait=False, schedule_s=10, workers=2)
    for index in range(2):
        run.await_words(rf"launchpad: .*worker\[{index}\].* waits?: .*Insufficient nvidia.com/gpu")
    assert run.end() == 1
    assert run.said(
        r"LaunchError: .*within 10 s: worker.*Unschedulable.*Insufficient nvidia.com/gpu"
    )


def test_pods_that_wait_for_room_start_once_there_is_some(
    launch: Launch, cluster: KubernetesCluster
) -> None:
    cluster.pending(lambda pod: "worker-1" in pod["metadata"]["name"])
    run = launch(wait=False, workers=2)
    run.await_words(r"launchpad: worker\[1\] waits: .*Insufficient nvidia.com/gpu")
    run.strike()
    cluster.schedule()
    run.await_calls(LAUNCH_S)
    run.finish()
    assert run.end() == 0


def test_a_quota_ends_the_launch_and_is_named(launch: Launch, cluster: KubernetesCluster) -> None:
    cluster.limit_pods(2)
    run = launch(wait=False, schedule_s=10, workers=2)
    run.await_words(r"launchpad: .* waits?: FailedCreate: .*exceeded quota")
    assert run.end() == 1
    assert run.said(r"LaunchError: .*within 10 s: .*exceeded quota")


# The API fails


def test_each_line_is_shown_once_and_in_order_though_connections_break(
    launch: Launch, cluster: KubernetesCluster
) -> None:
    count = 3000
    run = launch(wait=False, lines=count, workers=2)
    cuts = 0
    chance = random.Random(7)
    while not all(run.told(f"printed{index}") for index in range(run.workers)):
        assert run.process.poll() is None, run.story
        poll_until(lambda: cluster.open_streams().get("log", 0) > 0, WITHIN_S)
        time.sleep(chance.uniform(0, 0.5))  # a time at which it does not expect it
        cuts += cluster.drop_logs()
        cluster.drop_watches()
    assert cuts >= 3
    run.finish()
    assert run.end() == 0
    print(f"{cuts} cuts", end="")
    for index in range(run.workers):
        lines = [f"line {number}" for number in range(1, count + 1)]
        shown = re.findall(rf"^\[worker\[{index}\]\] (line \d+)$", run.output, re.MULTILINE)
        assert shown == lines
        log = (run.folder / "logs" / "worker" / f"{index}.log").read_text()
        assert re.findall(r"^line \d+$", log, re.MULTILINE) == lines


@pytest.mark.parametrize("status", [409, 429, 500])
def test_requests_that_fail_in_passing_are_made_again(
    launch: Launch, cluster: KubernetesCluster, status: int
) -> None:
    changes = ["PATCH", "DELETE"] if status == 409 else ["POST", "PATCH", "DELETE"]
    for part in [*changes, "GET"]:
        if status != 409 or part != "GET":
            cluster.fail_requests(status, 2, part)
    run = launch()
    run.finish()
    assert run.end() == 0
    assert not run.said("Traceback")


def test_what_a_launch_without_all_rights_has_made_is_removed(
    launch: Launch, cluster: KubernetesCluster
) -> None:
    rules = [(verb, kind) for verb in ("create", "get", "delete") for kind in ("jobs", "services")]
    rules += [(verb, "pods") for verb in ("get", "list", "watch")]
    run = launch(wait=False, kubeconfig=cluster.limited(rules))
    assert run.process.wait(LAUNCH_S) == 1
    # What belonged to the first object goes a moment after it, and nobody waits for that.
    poll_until(lambda: not cluster.leftovers(), WITHIN_S)
    assert run.end() == 1
    assert run.said(r"ApiError: we may not create secrets in namespace 'team'")


def test_versions_that_the_server_has_forgotten_are_listed_anew(
    launch: Launch, cluster: KubernetesCluster
) -> None:
    run = launch(restart="on_failure", patient=True)
    cluster.expire_versions()
    cluster.drop_watches()
    cluster.fail_requests(410, 3, "watch")
    cluster.kill_container(run.pod("store"))
    run.await_restart("store[0]")
    cluster.expire_versions()
    run.finish()
    assert run.end() == 0
    assert run.result["restarts"] == [["store[0]", KILLED]]


def test_a_program_goes_on_while_the_server_is_away(
    launch: Launch, cluster: KubernetesCluster
) -> None:
    run = launch(lines=50_000)  # more than it prints until the end
    until = time.monotonic() + 10
    cluster.fail_requests(503, 1 << 20, lambda method, path: time.monotonic() < until)
    cluster.drop_logs()
    cluster.drop_watches()
    poll_until(lambda: time.monotonic() > until, 20)
    calls = run.told("worker0")[2]
    run.strike()
    run.await_calls()
    assert calls > 50  # meanwhile
    printed = len(re.findall(r"\[worker\[0\]\] line", run.output))
    run.await_words(rf"\[worker\[0\]\] line {printed + 1}\n")
    run.finish()
    assert run.end() == 0


# Pods are told to go


def test_an_evicted_node_saves_its_state_and_comes_back_without_a_failure(
    launch: Launch, cluster: KubernetesCluster
) -> None:
    run = launch(restart="on_failure", patient=True, checkpoints=None)
    total = run.told("worker0")[1]
    cluster.evict(run.pod("store"))
    run.await_restart("store[0]")
    run.await_words(r"\[store\[0\]\] restored")
    run.await_calls()
    assert run.told("worker0")[1] > total
    run.finish()
    assert run.end() == 0
    ((node, summary),) = run.result["restarts"]
    assert node == "store[0]"
    assert "was told from outside to end" in summary
    assert "its pod faults-store-0 was evicted" in summary


def test_an_evicted_node_without_a_policy_ends_the_program(
    launch: Launch, cluster: KubernetesCluster
) -> None:
    run = launch()
    cluster.evict(run.pod("store"))
    assert run.end() == 143
    assert run.result["outcome"] == "INTERRUPTED"
    assert run.said(r"the program was ended: .*its pod faults-store-0 was evicted, as by a drain")


def test_nodes_of_a_drained_machine_come_back_elsewhere(
    launch: Launch, cluster: KubernetesCluster
) -> None:
    run = launch(
        workers=2,
        restart="on_failure",
        patient=True,
        checkpoints=None,
        pods={"supervisor": {"node_selector": {"kubernetes.io/hostname": "node-2"}}},
    )
    moving = [
        f"{group}[{replica}]"
        for group, replica in (("store", 0), ("worker", 0), ("worker", 1))
        if run.machine(group, replica) == "node-1"
    ]
    assert moving
    cluster.drain("node-1")
    for node in moving:
        run.await_restart(node)
    run.await_calls()
    run.finish()
    assert run.end() == 0
    assert sorted(node for node, _ in run.result["restarts"]) == moving


# The supervisor goes


def test_the_loss_of_the_supervisor_ends_the_program(
    launch: Launch, cluster: KubernetesCluster
) -> None:
    run = launch()
    pod = run.pod("supervisor")
    cluster.kill_container(pod)
    assert run.end() == 1
    assert run.said(rf"its supervisor's pod {pod} was killed by SIGKILL")


@pytest.mark.parametrize("how", ["kill_container", "evict", "drain"])
def test_a_program_begins_anew_when_its_supervisor_is_lost(
    launch: Launch, cluster: KubernetesCluster, how: str
) -> None:
    run = launch(restart="on_failure", patient=True, checkpoints=0.2)
    run.await_calls()
    poll_until(lambda: [*(run.shared / "checkpoints").rglob("0*/**/total")], WITHIN_S)
    what = run.machine("supervisor") if how == "drain" else run.pod("supervisor")
    getattr(cluster, how)(what)
    run.await_words(r"the program begins anew")
    run.await_words(r"\[store\[0\]\] restored")
    run.await_calls()
    run.finish()
    assert run.end() == 0
    assert run.result["outcome"] == "COMPLETED"


def test_an_evicted_supervisor_that_cannot_come_back_ends_the_program_in_order(
    launch: Launch, cluster: KubernetesCluster
) -> None:
    run = launch()
    cluster.evict(run.pod("supervisor"))
    assert run.end() == 143
    assert run.said(r"\[worker\[0\]\] \d+ calls, 0 lost")
    assert run.said(r"launchpad: the program was ended: .*supervisor's pod \S+ was evicted")


# The network goes


def test_a_short_cut_of_a_pod_is_not_noticed(launch: Launch, cluster: KubernetesCluster) -> None:
    run = launch(silence_s=30.0)
    pod = run.pod("worker")
    cluster.cut(pod)
    time.sleep(1)  # what is measured is that nothing comes of it
    cluster.heal(pod)
    run.strike()
    run.await_calls()
    run.finish()
    assert run.end() == 0
    assert run.result["restarts"] == []


def test_a_pod_that_is_cut_off_is_lost(launch: Launch, cluster: KubernetesCluster) -> None:
    run = launch()
    cluster.cut(run.pod("store"))
    assert run.end() == 1
    node, host, summary = run.result["failures"][0]
    assert (node, host) == ("store[0]", "faults-store-0")
    assert "faults-store-0" in summary


def test_a_pod_that_is_cut_off_is_replaced(launch: Launch, cluster: KubernetesCluster) -> None:
    run = launch(restart="on_failure", patient=True)
    cluster.cut(run.pod("store"))
    run.await_restart("store[0]")
    run.await_calls()
    run.finish()
    assert run.end() == 0
    assert [node for node, _ in run.result["restarts"]] == ["store[0]"]


def test_nodes_of_a_machine_that_was_cut_off_come_back_with_it(
    launch: Launch, cluster: KubernetesCluster
) -> None:
    here, there = (
        {"node_selector": {"kubernetes.io/hostname": name}} for name in ("node-1", "node-2")
    )
    run = launch(
        restart="on_failure",
        patient=True,
        pods={"supervisor": here, "worker": here, "store": there},
    )
    cluster.cut_node("node-2")
    run.await_words(r"store\[0\] waits for a new pod")
    run.strike()
    cluster.heal_node("node-2")
    run.await_restart("store[0]")
    run.await_calls()
    run.finish()
    assert run.end() == 0
    assert [node for node, _ in run.result["restarts"]] == ["store[0]"]


# The launcher goes


def test_a_program_whose_launcher_is_killed_ends_in_order_and_leaves_what_its_ttl_says(
    launch: Launch, cluster: KubernetesCluster
) -> None:
    run = launch(launcher_silence_s=8, ttl_s=8)
    supervisor = run.pod("supervisor")
    run.process.kill()
    run.process.wait()

    def is_over() -> bool:
        pods = cluster.objects("Pod")
        return all(each["status"]["phase"] in ("Succeeded", "Failed") for each in pods)

    poll_until(is_over, WITHIN_S)
    run.note("nothing runs")
    assert "nothing was heard of the launching process for 8 s" in cluster.log(supervisor)
    poll_until(lambda: not cluster.leftovers(), WITHIN_S)
    run.note("nothing was left")


def test_nothing_is_left_of_a_run_whose_launcher_is_killed_while_it_creates_it(
    launch: Launch, cluster: KubernetesCluster
) -> None:
    run = launch(wait=False, dies_after="faults-store", schedule_s=3, ttl_s=1)
    assert run.process.wait(LAUNCH_S) == -signal.SIGKILL
    run.strike()
    assert {job["metadata"]["name"] for job in cluster.objects("Job")} >= {"faults-store"}
    poll_until(lambda: not cluster.leftovers(), WITHIN_S)
    run.note("nothing was left")


def pods_have_ended(run: Run) -> bool:
    """Whether no pod of a node runs, or is going to."""
    jobs = [each for each in run.cluster.objects("Job") if each["metadata"]["name"] != RUN]
    conditions = [each["status"].get("conditions") or [] for each in jobs]
    return all(
        any(each["type"] in ("Complete", "Failed") for each in found) for found in conditions
    )


def test_pods_of_a_detached_run_do_not_wait_without_end_for_a_supervisor(launch: Launch) -> None:
    run = launch(
        wait=False,
        detach=True,
        restart="on_failure",
        schedule_s=2,
        longest_backoff_s=0,
        pods={"supervisor": {"image": BARE_IMAGE}},  # which it cannot run in
    )
    assert run.process.wait(LAUNCH_S) == 0
    run.strike()
    poll_until(lambda: pods_have_ended(run), WITHIN_S)
    run.note("nothing ran")


def test_a_detached_run_ends_after_its_longest_time(launch: Launch) -> None:
    run = launch(wait=False, detach=True, restart="on_failure", max_run_s=5, notice_s=1)
    assert run.process.wait(LAUNCH_S) == 0
    run.strike()
    poll_until(lambda: pods_have_ended(run), WITHIN_S)
    run.note("nothing ran")


def test_a_launcher_that_stood_still_goes_on(launch: Launch, cluster: KubernetesCluster) -> None:
    run = launch(launcher_silence_s=20)
    run.process.send_signal(signal.SIGSTOP)
    time.sleep(4)  # what is measured is that nothing comes of it
    run.process.send_signal(signal.SIGCONT)
    run.strike()
    run.await_calls()
    run.finish()
    assert run.end() == 0
    assert run.result["outcome"] == "COMPLETED"


# Somebody else deletes objects


def test_a_run_that_somebody_deletes_is_interrupted_and_says_so(
    launch: Launch, cluster: KubernetesCluster
) -> None:
    run = launch()
    delete(cluster, f"{JOB}faults")
    assert run.end() == 143
    assert run.result["outcome"] == "INTERRUPTED"
    assert run.said(r"launchpad: the program was ended: .*the run was deleted")


def test_a_job_of_a_group_that_somebody_deletes_ends_the_program(
    launch: Launch, cluster: KubernetesCluster
) -> None:
    run = launch()
    delete(cluster, f"{JOB}faults-store")
    assert run.end() == 143
    assert run.said(r"launchpad: the program was ended: .*its pod faults-store-0 was deleted")


def test_a_deleted_secret_does_nothing_to_pods_that_run(
    launch: Launch, cluster: KubernetesCluster
) -> None:
    run = launch()
    delete(cluster, f"{SECRET}faults-trust")
    run.await_calls()
    run.finish()
    assert run.end() == 0


# All at random


def test_a_program_reaches_its_end_though_pods_are_killed_at_random(
    launch: Launch, cluster: KubernetesCluster
) -> None:
    run = launch(
        workers=3,
        patient=True,
        restart="on_failure",
        checkpoints=0.2,
    )
    chance = random.Random(8)
    killed: list[str] = []
    nodes = ["store[0]", *(f"worker[{index}]" for index in range(run.workers))]
    limit = time.monotonic() + 20
    while time.monotonic() < limit:
        node = chance.choice(nodes)
        group, replica = node.rstrip("]").split("[")
        state, _, restarts = run.status()[node]
        # One that is not at work yet is not restarted either.
        if state in ("running", "serving") and restarts == killed.count(node):
            cluster.kill_container(run.pod(group, int(replica)))
            killed.append(node)
        time.sleep(chance.uniform(0.2, 1.5))
    run.strike()
    run.await_calls()
    run.finish()
    assert run.end() == 0
    restarted = [node for node, _ in run.result["restarts"]]
    print(f"{len(killed)} kills, {len(restarted)} restarts", end="")
    assert sorted(restarted) == sorted(killed)


# A machine does not answer, and its pods are given up


@pytest.mark.parametrize("how", ["cut_node", "stop_kubelet"])
def test_a_node_comes_back_elsewhere_only_when_it_is_certain_that_it_does_not_run(
    launch: Launch, cluster: KubernetesCluster, how: str
) -> None:
    there = {"node_selector": {"kubernetes.io/hostname": "node-2"}}
    run = launch(
        restart="on_failure",
        patient=True,
        notice_s=1,
        stuck_s=2,
        pods={"supervisor": there, "worker": there},
    )
    before = run.pod("store")
    assert run.machine("store") == "node-1"
    getattr(cluster, how)("node-1")
    cluster.give_up_node("node-1")
    if how == "stop_kubelet":
        run.await_words(
            rf"machine node-1 does not answer; pod {before} is replaced when it is back"
        )
        run.await_calls()  # by the same pod
        assert run.status()["store[0]"][2] == 0
        cluster.heal_node("node-1")
    else:
        run.await_words(rf"pod {before} is removed, since its machine does not answer")
    run.await_restart("store[0]")
    run.await_calls()
    assert run.machine("store") == "node-2"
    cluster.heal_node("node-1")
    run.finish()
    assert run.end() == 0
    assert [node for node, _ in run.result["restarts"]] == ["store[0]"]


@pytest.mark.parametrize("restart", ["on_failure", "never"])
def test_the_machine_of_the_supervisor_is_lost(
    launch: Launch, cluster: KubernetesCluster, restart: str
) -> None:
    there = {"node_selector": {"kubernetes.io/hostname": "node-2"}}
    run = launch(
        restart=restart,
        patient=True,
        checkpoints=0.2,
        notice_s=1,
        stuck_s=2,
        pods={"store": there, "worker": there},
    )
    run.await_calls()
    before = run.pod("supervisor")
    assert run.machine("supervisor") == "node-1"
    cluster.cut_node("node-1")
    cluster.give_up_node("node-1")
    if restart == "never":
        run.await_words(
            rf"the machine node-1 of its supervisor is lost: its pod {before} was ended"
        )
        cluster.heal_node("node-1")
        assert run.process.wait(WITHIN_S) == 1
        assert not run.said("begins anew")
        poll_until(lambda: not cluster.leftovers(), WITHIN_S)
        return
    run.await_words(rf"pod {before} is removed, since its machine does not answer")
    run.await_words(r"the program begins anew")
    run.await_words(r"\[store\[0\]\] restored")
    run.await_calls()
    assert run.machine("supervisor") == "node-2"
    cluster.heal_node("node-1")
    run.finish()
    assert run.end() == 0


def test_a_program_goes_on_while_the_kubelet_of_its_supervisor_is_away(
    launch: Launch, cluster: KubernetesCluster
) -> None:
    there = {"node_selector": {"kubernetes.io/hostname": "node-2"}}
    run = launch(
        restart="on_failure",
        patient=True,
        checkpoints=0.2,
        notice_s=1,
        stuck_s=2,
        pods={"store": there, "worker": there},
    )
    run.await_calls()
    before = run.pod("supervisor")
    cluster.stop_kubelet("node-1")
    cluster.give_up_node("node-1")
    run.await_words(rf"machine node-1 does not answer; pod {before} is replaced when it is back")
    calls = run.told("worker0")[2]
    run.await_calls()
    assert run.told("worker0")[2] > calls  # of the same worker
    cluster.heal_node("node-1")
    run.await_words(r"the program begins anew")
    run.await_calls()
    run.finish()
    assert run.end() == 0
