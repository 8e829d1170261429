"""What users see of programs in a cluster, in real pods; faults of the cluster are elsewhere."""

import base64
import contextlib
import http.server
import json
import math
import os
import re
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

import launchpad_lite as lp
from launchers._kubernetes.checks import mistakes
from launchers.kubernetes import PodOptions
from launchpad_lite.errors import ProgramError
from launchpad_lite.testing import poll_until
from tests.beds.kubernetes.cluster import BARE_IMAGE, IMAGE, INSTALLED_IMAGE, KubernetesCluster
from tests.beds.ssh_hosts import lend
from tests.engines import needs_kubernetes
from tests.launchers.interpreters import find_other_minor_version

yaml = pytest.importorskip("yaml")
pytest.importorskip("kubernetes")
# A launch alone takes half a minute on a machine that is busy.
pytestmark = [needs_kubernetes, pytest.mark.slow, pytest.mark.timeout(300)]

_CHECKOUT = Path(__file__).resolve().parents[2]
_RUN = "launchpad-lite/run"
_ROLE = "launchpad-lite/role"
#: Resources whose objects an ordinary run consists of.
_KINDS = ("Job", "Service", "Secret", "NetworkPolicy")

_PROGRAM = """
import json, os, pathlib, socket, sys, time
import launchpad_lite as lp

class Store:
    def __init__(self):
        self.seen = []

    def add(self, name):
        self.seen.append(name)
        return socket.gethostname()

    def count(self):
        return len(self.seen)

    def run(self):
        lp.wait_for_stop()
        print("the store leaves", flush=True)

class Worker:
    def __init__(self, store, index):
        self.store, self.index = store, index

    def run(self):
        host = self.store.add(self.index)
        print(f"{self.index} on {socket.gethostname()} called {host}", flush=True)
        self.work()

    def work(self):
        pass

class Staying(Worker):
    def work(self):
        lp.wait_for_stop()
        print("the worker leaves", self.store.count(), flush=True)

class Waiting(Worker):
    def work(self):
        while self.store.count() < 2 and not lp.wait_for_stop(0.05):
            pass
        if self.index == 0:
            lp.stop()

def make_program(workers: int = 2, worker: str = "Waiting"):
    program = lp.Program("counting")
    with program.group("store"):
        store = program.add_node(lp.CourierNode(Store))
    with program.group("worker"):
        for index in range(workers):
            program.add_node(lp.CourierNode(globals()[worker], store, index))
    return program

OPTIONS = json.loads(os.environ.get("LAUNCH_OPTIONS", "{}"))
"""
_LAUNCH = """
if __name__ == "__main__":
    lp.launch(make_program(), "kubernetes", **OPTIONS).wait()
"""
_LAUNCH_STAYING = """
if __name__ == "__main__":
    running = lp.launch(make_program(worker="Staying"), "kubernetes", **OPTIONS)
    print("ALL ARE PLACED", flush=True)
    running.wait()
"""


def role() -> set[tuple[str, str]]:
    """What the documentation says that users need, as verb and resource."""
    text = (_CHECKOUT / "docs" / "kubernetes.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (found,) = (
        each for block in blocks for each in yaml.safe_load_all(block) if each["kind"] == "Role"
    )
    return {
        (verb, resource)
        for rule in found["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


class Command:
    """A command of the user, with what it has printed so far."""

    def __init__(self, command: Sequence[str], folder: Path, env: Mapping[str, str]) -> None:
        self.begin = time.monotonic()
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
            env=env,
        )
        self.output = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.output += line

    def until(self, words: str, count: int = 1, timeout_s: float = 100.0) -> float:
        """Waits until words were printed; returns the seconds since the start."""
        poll_until(
            lambda: self.output.count(words) >= count or not self._reader.is_alive(),
            timeout_s,
            must=False,
        )
        assert self.output.count(words) >= count, self.output
        return time.monotonic() - self.begin

    def until_all_are_at_work(self) -> None:
        """Waits until two workers have called, and the launch, which may be later, has returned."""
        self.until("called", 2)
        self.until("ALL ARE PLACED")

    def end(self, timeout_s: float = 100.0) -> int:
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it goes on:\n{self.output}") from None
        self._reader.join(timeout_s)
        return code

    def check(self, timeout_s: float = 100.0) -> str:
        """Waits for a good end; returns what was printed."""
        assert self.end(timeout_s) == 0, self.output
        return self.output

    def refusal(self, timeout_s: float = 100.0) -> str:
        """Waits for the end by an error; returns its text."""
        assert self.end(timeout_s) == 1, self.output
        return self.output.partition("errors.LaunchError: ")[2] or self.output


class User:
    """Somebody at this machine who may do in the cluster what the documentation asks for."""

    def __init__(self, cluster: KubernetesCluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.logs = folder / "logs"
        self.kubeconfig = cluster.limited(role())
        self.commands: list[Command] = []
        (folder / "counting.py").write_text(_PROGRAM)

    def run(self, *command: str, **options: Any) -> Command:
        env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
            "KUBECONFIG": str(self.kubeconfig),
            "LAUNCHPAD_LOGGING_DIR": str(self.logs),
            "LAUNCH_OPTIONS": json.dumps({"image": IMAGE, **options}),
            "PYTHONUNBUFFERED": "1",
        }
        self.commands.append(Command(command, self.folder, env))
        return self.commands[-1]

    def launch(self, *source: str, **options: Any) -> Command:
        """Runs a script that has what `_PROGRAM` defines, with options for `lp.launch`."""
        script = self.folder / "script.py"
        script.write_text("".join([_PROGRAM, *map(textwrap.dedent, source or [_LAUNCH])]))
        return self.run(sys.executable, str(script), **options)

    def command_line(self, *arguments: str) -> Command:
        module = ("-m", "launchpad_lite.launch", "--launcher=kubernetes")
        return self.run(sys.executable, *module, *arguments)

    def log(self, node: str) -> str:
        (path,) = self.logs.glob(f"*/{node}.log")
        return path.read_text()

    def name_of_run(self) -> str:
        """Of the only run there is."""
        (name,) = {each["metadata"]["labels"][_RUN] for each in self.cluster.objects("Service")}
        return str(name)

    def shared_folder(self) -> Path:
        """A folder of the machine that pods may write to."""
        folder = self.folder / "shared"
        folder.mkdir()
        folder.chmod(0o777)
        return folder

    def leave(self) -> None:
        for command in self.commands:
            with contextlib.suppress(ProcessLookupError):
                command.process.kill()
            command.end()


@pytest.fixture(scope="module")
def cluster() -> Iterator[KubernetesCluster]:
    with KubernetesCluster(gpus=4) as bed:
        yield bed


@pytest.fixture
def user(cluster: KubernetesCluster, tmp_path: Path) -> Iterator[User]:
    """At an empty cluster; the test fails if it leaves anything there."""
    with contextlib.contextmanager(lend)(cluster):
        here = User(cluster, tmp_path)
        try:
            yield here
        finally:
            here.leave()


def assert_nothing_is_left(user: User) -> None:
    """What the launch promises when it returns; containers end a moment after their objects."""
    objects = [
        f"{kind} {each['metadata']['name']}"
        for kind in ("Pod", *_KINDS)
        for each in user.cluster.objects(kind)
    ]
    assert not objects
    assert poll_until(lambda: not user.cluster.leftovers(), must=False), user.cluster.leftovers()


# Programs


@pytest.mark.parametrize(
    ("example", "arguments", "first_call", "last_words"),
    [
        ("consumer_producers", (), "first numbers of all", "[consumer[0]] total: 190"),
        # A pod for each file, and two interpreters in each.
        ("map_reduce", ("--num_files=6",), " files", "6/6 files"),
        ("actor_learner", (), "[evaluator[0]]", "475 reached"),
    ],
)
def test_examples_run_unchanged_from_the_command_line(
    user: User, example: str, arguments: Sequence[str], first_call: str, last_words: str
) -> None:
    program = str(_CHECKOUT / "examples" / example / "program.py")
    launch = user.command_line(f"--image={IMAGE}", program, *arguments)
    print(f"\n{example}: {launch.until(first_call):.1f} s until the first call")
    count = sum(len(user.cluster.objects(kind)) for kind in _KINDS)
    output = launch.check(200)
    assert last_words in output
    assert "Traceback" not in output
    print(f"{count} objects, {time.monotonic() - launch.begin:.1f} s in all")
    assert_nothing_is_left(user)


def test_output_logs_status_and_result_are_here_as_with_other_launchers(user: User) -> None:
    source = """
    from launchpad_lite.testing import poll_until

    class Staying(Staying):
        def run(self):
            sys.stdout.write("\\x1b[1munfinished")
            sys.stdout.flush()
            super().run()

    if __name__ == "__main__":
        running = lp.launch(make_program(worker="Staying"), "kubernetes", **OPTIONS)
        # Numbers of a node that has just begun are not there yet.
        poll_until(lambda: all(each.memory_mib for each in running.status()), 60)
        poll_until(lambda: all(each.cpu is not None for each in running.status()), 60)
        poll_until(lambda: all(each.state == "running" for each in running.status()), 60)
        for each in running.status():
            print("STATUS", each.name, each.state, each.host, each.pid > 0, each.endpoints)
        result = running.stop()
        print("RESULT", result.outcome.name, result.reason)
        print("LOGS", running.log_dir)
    """
    output = user.launch(source).check(200)
    run = re.search(r"STATUS store\[0\] \w+ (counting-\w{5})-store-0 True", output)
    assert run, output
    endpoint = f"{run[1]}-store-0.{run[1]}-store:4251"
    assert f"STATUS store[0] running {run[1]}-store-0 True {{'courier': '{endpoint}'}}" in output
    assert f"STATUS worker[1] running {run[1]}-worker-1 True" in output
    assert "RESULT STOPPED stop() was called" in output
    assert re.search(
        rf"^\[worker\[1\]\] .*1 on {run[1]}-worker-1 called {run[1]}-store-0$", output, re.MULTILINE
    )
    assert f"1 on {run[1]}-worker-1 called {run[1]}-store-0\n" in user.log("worker/1")
    assert "unfinished" in user.log("worker/0")
    assert "the store leaves" in user.log("store/0")
    assert_nothing_is_left(user)


def test_a_node_stops_the_program_without_rights_in_the_cluster(user: User) -> None:
    output = user.launch().check()
    assert "[worker[1]] 1 on counting-" in output
    assert "[store[0]] the store leaves" in output
    assert_nothing_is_left(user)


# Ends


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, -2), (signal.SIGTERM, 143)])
def test_a_signal_stops_callers_first_within_the_notice(user: User, signum: int, code: int) -> None:
    source = """
    class Staying(Worker):
        def work(self):
            lp.wait_for_stop()
            time.sleep(1.5)  # it takes its time to save, and has it
            print("the worker leaves", self.store.count(), flush=True)
    """
    launch = user.launch(source, _LAUNCH_STAYING, notice_s=20)
    launch.until_all_are_at_work()
    launch.process.send_signal(signum)
    assert launch.end() == code, launch.output
    leaving = re.findall(r"(store|worker) leaves(?: (\d))?", launch.output)
    assert leaving == [("worker", "2"), ("worker", "2"), ("store", "")], launch.output
    assert_nothing_is_left(user)


_STUBBORN = """
import signal

class Staying(Worker):
    def work(self):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        lp.wait_for_stop()
        print("asked", flush=True)
        while True:
            time.sleep(1)
"""


def test_a_second_interrupt_ends_everything_at_once(user: User) -> None:
    launch = user.launch(_STUBBORN, _LAUNCH_STAYING, notice_s=300)
    launch.until_all_are_at_work()
    launch.process.send_signal(signal.SIGINT)
    launch.until("asked", 2)
    begin = time.monotonic()
    launch.process.send_signal(signal.SIGINT)
    assert launch.end() == -signal.SIGINT, launch.output
    assert time.monotonic() - begin < 60
    assert_nothing_is_left(user)


def test_who_does_not_end_within_the_notice_is_ended(user: User) -> None:
    source = """
    if __name__ == "__main__":
        running = lp.launch(make_program(worker="Staying"), "kubernetes", **OPTIONS)
        poll = lambda: all(each.state == "running" for each in running.status()[1:])
        while not poll():
            time.sleep(0.1)
        begin = time.monotonic()
        result = running.stop()
        print("KILLED", sorted(result.killed), result.outcome.name)
        assert 1 < time.monotonic() - begin < 100
    """
    output = user.launch(_STUBBORN, source, notice_s=8).check(200)
    assert "KILLED ['worker[0]', 'worker[1]'] STOPPED" in output
    assert_nothing_is_left(user)


# Failures


_TELL = """
if __name__ == "__main__":
    running = lp.launch(make_program(worker="Staying"), "kubernetes", **OPTIONS)
    try:
        running.wait()
    except lp.NodeFailedError as error:
        print("FAILED", error.failure.node, "on", error.failure.host, flush=True)
        print("CAUSE", repr(error.__cause__), type(error.__cause__).__mro__[1:2], flush=True)
        print("FOLDER", error.folder, flush=True)
        raise
"""


def test_a_failure_is_told_with_its_exception_and_its_remote_traceback(user: User) -> None:
    source = """
    class Trouble(LookupError):
        pass

    class Staying(Staying):
        def work(self):
            if self.index == 1:
                while self.store.count() < 2:  # the other one is to be there, too
                    time.sleep(0.01)
                raise Trouble("no data")
            super().work()
    """
    launch = user.launch(source, _TELL)
    assert launch.end() == 1, launch.output
    assert re.search(r"FAILED worker\[1\] on counting-\w{5}-worker-1", launch.output)
    assert "CAUSE Trouble('no data') (<class 'LookupError'>,)" in launch.output
    assert re.search(r'script.py", line \d+, in work', launch.output), launch.output
    assert "What followed" not in launch.output
    assert launch.output.count("the worker leaves") == 1
    folder = re.search("FOLDER (.*)", launch.output)
    assert folder
    assert "no data" in (Path(folder[1]) / "report.txt").read_text()
    assert {each.name for each in (Path(folder[1]) / "stacks").iterdir()} == {
        "store[0].txt",
        "worker[0].txt",
    }
    assert_nothing_is_left(user)


def test_a_node_that_cannot_be_constructed_and_one_that_exits_are_told(user: User) -> None:
    source = """
    class Staying(Staying):
        def __init__(self, store, index):
            if index == 0:
                raise ValueError("no such index")
            super().__init__(store, index)
    """
    launch = user.launch(source, _TELL)
    assert launch.end() == 1, launch.output
    assert "CAUSE ValueError('no such index')" in launch.output
    assert_nothing_is_left(user)

    source = """
    class Staying(Staying):
        def work(self):
            if self.index == 0:
                os._exit(7)
            super().work()
    """
    launch = user.launch(source, _TELL)
    assert launch.end() == 1, launch.output
    assert "FAILED worker[0] on counting-" in launch.output
    assert "exit code 7" in launch.output
    assert_nothing_is_left(user)


def test_what_cannot_be_pickled_is_refused_before_the_cluster_is_asked(user: User) -> None:
    program = lp.Program("lock")
    with program.group("node"):
        program.add_node(lp.CourierNode(print, threading.Lock()))
    before = len(user.cluster.requests)
    with pytest.raises(ProgramError, match=r"node\[0\].*lock"):
        lp.launch(program, "kubernetes", image=IMAGE, context="bed")
    assert len(user.cluster.requests) == before


# Images


def test_packages_that_an_image_lacks_are_named_before_anything_runs(user: User) -> None:
    pods = {"worker": {"image": BARE_IMAGE}}
    refusal = user.launch(_LAUNCH_STAYING, pods=pods).refusal()
    for replica in (0, 1):
        assert re.search(
            rf"counting-\w{{5}}-worker-{replica}: the program needs .*\(none there\)", refusal
        ), refusal
    assert "-store-0: " not in refusal
    assert " called counting" not in refusal
    assert_nothing_is_left(user)


def test_an_image_without_our_packages_is_named(user: User) -> None:
    refusal = user.launch(image=BARE_IMAGE).refusal()
    assert re.search(r"No module named '\w+' in the image of the supervisor", refusal), refusal
    assert_nothing_is_left(user)


def test_an_image_without_python_is_named(user: User) -> None:
    pods = {"worker": {"python": "/no/python"}}
    refusal = user.launch(pods=pods, schedule_s=20).refusal()
    assert "worker" in refusal
    assert "/no/python" in refusal
    assert_nothing_is_left(user)


@pytest.mark.parametrize("group", ["worker", "supervisor"])
def test_another_python_in_an_image_is_named(user: User, group: str) -> None:
    python = find_other_minor_version()
    if python is None or Path(python).is_relative_to("/usr/bin"):
        pytest.skip("there is no other Python here that can be mounted")
    prefix = str(Path(python).parents[1])
    volume = {"hostPath": {"path": prefix}, "mount": prefix, "read_only": True}
    pods = {group: {"python": python, "volumes": {"python": volume}}}
    refusal = user.launch(pods=pods).refusal()
    ours = "{}.{}".format(*sys.version_info)
    theirs = re.search(r"3\.\d+", Path(python).name)
    assert theirs
    assert f"Python {theirs[0]}" in refusal or f"CPython {theirs[0]}" in refusal, refusal
    assert ours in refusal
    assert group in refusal
    assert_nothing_is_left(user)


# Policies


_COUNTING = """
class Store(Store):
    def save(self, folder):
        (pathlib.Path(folder) / "seen").write_text(json.dumps(self.seen))

    def restore(self, folder):
        self.seen = json.loads((pathlib.Path(folder) / "seen").read_text())
        print("restored", len(self.seen), flush=True)
"""


def test_nodes_are_restarted_in_their_pods_and_state_is_kept_on_a_volume(user: User) -> None:
    source = """
    class Worker(Worker):
        def run(self):
            super().run()
            if self.store.count() < 3:
                raise RuntimeError("not yet")
            lp.wait_for_stop()

    if __name__ == "__main__":
        program = make_program(1, "Worker")
        running = lp.launch(program, "kubernetes", restart={"worker": "on_failure"}, **OPTIONS)
        worker = lambda: next(each for each in running.status() if each.name == "worker[0]")
        while worker().restarts < OPTIONS_RESTARTS:
            time.sleep(0.1)
        pods = {each.host for each in running.status()}
        while worker().state != "running":
            time.sleep(0.1)
        result = running.stop()
        print("RESTARTS", [each.failure.node for each in result.restarts])
    """
    shared = user.shared_folder()
    pods = {"*": {"volumes": {"shared": {"hostPath": {"path": str(shared)}, "mount": "/shared"}}}}
    options = {"pods": pods, "checkpoints": "/shared/state"}
    first = user.launch(_COUNTING, "OPTIONS_RESTARTS = 2\n", source, **options).check()
    assert len(re.findall(r"0 on counting-\w{5}-worker-0 called", first)) == 3, first
    assert len({*re.findall(r"0 on (counting-\w{5}-worker-0) called", first)}) == 1
    assert "RESTARTS ['worker[0]', 'worker[0]']" in first
    second = user.launch(_COUNTING, "OPTIONS_RESTARTS = 0\n", source, **options).check()
    assert "[store[0]] restored 3" in second
    assert "RESTARTS []" in second
    assert_nothing_is_left(user)


# Runs without a launching process


def test_a_detached_run_is_looked_at_and_stopped_from_another_shell(user: User) -> None:
    source = """
    if __name__ == "__main__":
        program = make_program(worker="Staying")
        lp.launch(program, "kubernetes", detach=True, **OPTIONS).wait()
        print("the script goes on")
    """
    launch = user.launch(source, name="far-away")
    assert "run far-away is created in namespace team" in launch.check()
    assert "the script goes on" in launch.output

    def told(*command: str) -> str:
        return user.command_line(*command).check()

    def status_of_all() -> str:
        status = told("status", "far-away")
        return status if status.count(" running ") == 3 else ""

    status = poll_until(status_of_all, 90)
    assert re.search(r"^counting: running$", status, re.MULTILINE), status
    assert re.search(r"^store\[0\] +running +far-away-store-0 +\d+ +0 ", status, re.MULTILINE)
    words = "[worker[1]] 1 on far-away-worker-1 called far-away-store-0"
    poll_until(lambda: words in told("logs", "far-away"), 90)  # it may run and not have called yet
    assert "counting: stopped, stop() was called" in told("stop", "far-away")
    assert_nothing_is_left(user)
    assert "there is no run 'far-away'" in user.command_line("status", "far-away").refusal()


def test_a_run_that_has_ended_can_be_looked_at_until_it_is_removed(user: User) -> None:
    arguments = (f"--image={IMAGE}", "--name=short", "--detach", "counting.py", "--workers=2")
    user.command_line(*arguments).check()
    poll_until(
        lambda: any(
            each["status"].get("succeeded") and each["metadata"]["name"] == "short"
            for each in user.cluster.objects("Job")
        ),
        90,
    )
    status = user.command_line("status", "short").check()
    assert status.startswith("counting: stopped, "), status
    logs = user.command_line("logs", "short").check()
    assert "[worker[0]] 0 on short-worker-0 called short-store-0" in logs
    user.command_line("stop", "short").check()
    assert_nothing_is_left(user)


def test_a_run_that_waits_for_its_pods_can_be_stopped(user: User) -> None:
    user.cluster.pending(lambda pod: True)
    arguments = (f"--image={IMAGE}", "--name=early", "--detach", "counting.py")
    user.command_line(*arguments).check()
    assert "pending" in user.command_line("status", "early").check()
    assert "counting: stopped" in user.command_line("stop", "early").check()
    assert_nothing_is_left(user)


def test_a_launch_that_waits_for_its_pods_can_be_told_to_end(user: User) -> None:
    user.cluster.pending(lambda pod: True)
    launch = user.launch("", _LAUNCH_STAYING)
    launch.until("wait", 1)
    launch.process.send_signal(signal.SIGTERM)
    assert launch.end() == 143, launch.output
    assert_nothing_is_left(user)


def test_when_the_launching_process_is_killed_the_run_ends_by_itself(user: User) -> None:
    source = """
    from launchers import kubernetes
    from launchers._kubernetes import program

    # In truth, Kubernetes may take minutes to tell a pod.
    kubernetes.KubernetesLauncher._option_mistakes = lambda self: ()
    program._BEAT_S = 0.5
    """
    options = {"launcher_silence_s": 8, "ttl_s": 0}
    launch = user.launch(source, _LAUNCH_STAYING, **options)
    launch.until_all_are_at_work()
    launch.process.kill()
    begin = time.monotonic()
    assert poll_until(lambda: not user.cluster.leftovers(), 90, must=False)
    print(f"\nafter kill -9, nothing was left after {time.monotonic() - begin:.1f} s")


# The objects


def files_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Emitted objects by the names of their files, in their order."""
    return {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def emit(user: User, folder: str, *options: str) -> Path:
    program = (*options, "counting.py", "-o", folder)
    user.kubeconfig = Path("/nonexistent")
    module = (sys.executable, "-m", "launchpad_lite.launch", "emit", "kubernetes")
    user.run(*module, f"--image={IMAGE}", *program).check()
    user.kubeconfig = user.cluster.limited(role())
    return user.folder / folder


def differences(ours: Any, theirs: Any, where: str = "") -> Iterator[str]:
    """What of ours the cluster has otherwise; it may have more."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name, value in ours.items():
            yield from differences(value, theirs.get(name), f"{where}.{name}")
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for index, value in enumerate(ours):
            yield from differences(value, theirs[index], f"{where}[{index}]")
    elif ours != theirs:
        yield f"{where}: {ours!r} here, {theirs!r} there"


def secretless(obj: dict[str, Any]) -> dict[str, Any]:
    if obj["kind"] == "Secret":
        return {**obj, "data": sorted(obj["data"])}
    spec = {name: value for name, value in obj["spec"].items() if name != "suspend"}
    return {**obj, "spec": spec}


def test_emitted_objects_are_those_that_a_launch_creates(user: User) -> None:
    emitted = files_of(emit(user, "review", "--name=same"))
    user.command_line(f"--image={IMAGE}", "--name=same", "--detach", "counting.py").check()
    there = {
        (each["kind"], each["metadata"]["name"]): each
        for kind in _KINDS
        for each in user.cluster.objects(kind)
    }
    here = {(each["kind"], each["metadata"]["name"]): each for each in emitted.values()}
    assert here.keys() == there.keys()
    found = [
        f"{kind} {name}{difference}"
        for (kind, name), obj in here.items()
        for difference in differences(secretless(obj), secretless(there[kind, name]))
    ]
    assert not found
    owners = {
        key: [owner["name"] for owner in each["metadata"].get("ownerReferences", ())]
        for key, each in there.items()
    }
    assert owners.pop(("Job", "same")) == []
    assert all(names == ["same"] for names in owners.values()), owners
    user.command_line("stop", "same").check()
    assert_nothing_is_left(user)


def test_emitted_objects_run_when_any_client_creates_them(user: User) -> None:
    from kubernetes import config, utils

    folder = emit(user, "review", "--name=by-hand")
    modes = {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    objects = files_of(folder)
    assert not mistakes([*objects.values()])
    with config.new_client_from_config(str(user.kubeconfig)) as client:
        for each in objects.values():
            utils.create_from_dict(client, each, namespace=user.cluster.namespace)
    poll_until(
        lambda: any(
            each["status"].get("succeeded") and each["metadata"]["name"] == "by-hand"
            for each in user.cluster.objects("Job")
        ),
        90,
    )
    logs = user.command_line("logs", "by-hand").check()
    assert "[worker[1]] 1 on by-hand-worker-1 called by-hand-store-0" in logs
    user.cluster.restore()  # they have no owner


def test_pods_may_be_waited_for_without_end(user: User) -> None:
    user.launch(schedule_s=math.inf).check()
    assert_nothing_is_left(user)


class Script:
    """The emitted script, with what it asks of kubectl."""

    def __init__(self, user: User, folder: Path, *failing: str) -> None:
        """Runs it.

        Args:
            user: Whoever runs it.
            folder: Where it is.
            *failing: Ends of the commands that fail.
        """
        script = folder / "create.sh"
        subprocess.run(["sh", "-n", script], check=True)
        programs = user.folder / "bin"
        programs.mkdir()
        kubectl = programs / "kubectl"
        fails = "".join(f"case \"$*\" in *'{each}') exit 1;; esac\n" for each in failing)
        kubectl.write_text(
            f"""#!/bin/sh
echo "$@" >> {user.folder}/calls
{fails}
case "$*" in
    'patch --local'*) cat "$4";;
    *' -f -'*jsonpath*) cat > {user.folder}/root; printf 123-456;;
    *' -f -') cat >> {user.folder}/made;;
esac
"""
        )
        kubectl.chmod(0o755)
        env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
        self.code = subprocess.run(["sh", script], env=env, cwd="/").returncode
        self.calls = (user.folder / "calls").read_text().splitlines()


@pytest.mark.parametrize("queue", [False, True])
def test_the_emitted_script_creates_all_objects_and_makes_them_belong_to_the_first(
    user: User, queue: bool
) -> None:
    options = ("--queue=research",) if queue else ()
    folder = emit(user, "review", "--name=by-hand", "--namespace=lab", *options)
    script = Script(user, folder)
    assert script.code == 0
    files = sorted(files_of(folder))
    jobs = [name for name in files[:-1] if files_of(folder)[name]["kind"] == "Job"]
    others = script.calls[2:]
    # It must not begin without the others.
    suspension = '--type=merge -p {"spec":{"suspend":true}} -o json'
    assert sorted(script.calls[:2]) == [
        "create --namespace=lab -f - -o jsonpath={.metadata.uid}",
        f"patch --local -f {files[-1]} {suspension}",
    ]
    if not queue:  # which starts it by itself
        resumption = '--type=merge -p {"spec":{"suspend":false}}'
        # Each takes two calls; pods come last.
        number = 2 * (len(files) - 1 - len(jobs))
        assert others.pop(number) == f"patch --namespace=lab Job by-hand {resumption}"
    assert sorted(others)[: len(files) - 1] == ["create --namespace=lab -f -"] * (len(files) - 1)
    patches = [line for line in others if line.startswith("patch")]
    assert len(patches) == len(files) - 1 == len(others) // 2
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "by-hand", "uid": "123-456"}
    assert files[-1 - len(jobs) : -1] == jobs
    for line, name in zip(patches, files, strict=False):
        words = line.removesuffix(" -o json").split(" -p ")
        assert words[0] == f"patch --local -f {name} --type=merge"
        assert json.loads(words[1]) == {"metadata": {"ownerReferences": [owner]}}


@pytest.mark.parametrize("failing", ["-f -", '{"spec":{"suspend":false}}'])
def test_the_emitted_script_removes_what_it_created_when_it_breaks_off(
    user: User, failing: str
) -> None:
    script = Script(user, emit(user, "review", "--name=by-hand"), failing)
    assert script.code == 1
    assert script.calls[-1] == "delete Job by-hand --wait=false"


def test_the_emitted_script_leaves_alone_what_it_did_not_create(user: User) -> None:
    script = Script(user, emit(user, "review", "--name=by-hand"), "jsonpath={.metadata.uid}")
    assert script.code == 1
    assert not [each for each in script.calls if each.startswith("delete")]


def test_kubectl_apply_takes_emitted_objects(user: User) -> None:
    # It keeps a copy of each in an annotation, and all annotations of one may have 256 KiB.
    for path in emit(user, "review", "--name=by-hand").glob("*.json"):
        obj = json.loads(path.read_text())
        texts = [json.dumps(obj), *obj["metadata"].get("annotations", {}).values()]
        assert sum(map(len, texts)) < 256_000, path.name


# Work that is too large for Secrets


_LARGE = """
class Worker(Worker):
    def __init__(self, store, index, data):
        super().__init__(store, index)
        self.data = data

    def work(self):
        print(f"{len(self.data)} bytes", flush=True)
        lp.stop()

def make_program(size):
    program = lp.Program("large")
    store = program.add_node(lp.CourierNode(Store), label="store")
    program.add_node(lp.CourierNode(Worker, store, 0, os.urandom(size)), label="worker")
    return program
"""


def test_work_that_is_too_large_for_secrets_goes_by_a_volume(user: User) -> None:
    source = """
    from launchers.kubernetes import WorkVolume
    volume = {"hostPath": {"path": os.path.abspath("shared")}}
    try:
        lp.launch(make_program(17_000_000), "kubernetes", **OPTIONS)
    except lp.LaunchError as error:
        print("REFUSED", error, flush=True)
    work = WorkVolume("shared", volume)
    lp.launch(make_program(17_000_000), "kubernetes", work=work, **OPTIONS).wait()
    print("LEFT", os.listdir("shared"))
    """
    user.shared_folder()
    output = user.launch(_LARGE, source).check()
    assert re.search(r"REFUSED the work and code of the nodes are \d\d MB, and Secrets", output)
    assert "work=WorkVolume(...)" in output
    assert "17000000 bytes" in output
    assert "LEFT []" in output
    assert_nothing_is_left(user)


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
            body = body.replace(b"Worker", b"Porker")
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def bucket(user: User) -> Iterator[tuple[str, str]]:
    """Addresses of an object store: from here, and from pods."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Bucket) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        port = server.server_address[1]
        yield f"http://127.0.0.1:{port}", f"http://{user.cluster.publish(port)}"
        server.shutdown()
        thread.join()


def test_work_goes_by_an_object_store_and_is_refused_when_it_was_changed(
    user: User, bucket: tuple[str, str]
) -> None:
    source = """
    from launchers.kubernetes import WorkStore
    here, there = sys.argv[1:]
    lp.launch(make_program(), "kubernetes", work=WorkStore(here + "/a", there + "/a"), **OPTIONS).wait()
    print("FIRST IS OVER", flush=True)
    work = WorkStore(here + "/b?signature=geheim", there + "/spoilt/b?signature=geheim")
    lp.launch(make_program(), "kubernetes", work=work, **OPTIONS).wait()
    """
    script = user.folder / "script.py"
    script.write_text(_PROGRAM + textwrap.dedent(source))
    launch = user.run(sys.executable, str(script), *bucket)
    refusal = launch.refusal()
    assert "1 on counting-" in launch.output.partition("FIRST IS OVER")[0]
    assert "its digest differs" in refusal
    assert " called counting-" not in launch.output.partition("FIRST IS OVER")[2]
    assert "geheim" not in launch.output
    assert_nothing_is_left(user)


# What users say of pods


def small_program() -> lp.Program:
    program = lp.Program("small")
    for group in ("actor", "learner"):
        with program.group(group):
            program.add_node(lp.CourierNode(dict))
    return program


def test_all_mistakes_are_told_at_once_before_a_cluster_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nonexistent")
    with pytest.raises(ProgramError) as caught:
        lp.launch(
            small_program(),
            "kubernetes",
            resources={"actor": {"gpu": 0.5}},
            pods={"actors": PodOptions(image=IMAGE), "learner": {"image": IMAGE}},
        )
    text = str(caught.value)
    assert "pods= of an unknown group 'actors'; the groups are: actor, learner" in text
    assert "no image for the pods of the supervisor, group 'actor'" in text
    assert re.search("actor.*gpu.*0.5", text), text


def test_options_of_pods_come_from_a_file_and_its_mistakes_are_named(user: User) -> None:
    (user.folder / "pods.toml").write_text(
        f"""
        ["*"]
        image = "{IMAGE}"
        node_selector = {{ zone = "a" }}
        [worker]
        node_selector = {{ gpu = "a100" }}
        priority_class = "high"
        [supervisor]
        env = {{ GREETING = "hello" }}
        """
    )
    user.kubeconfig = Path("/nonexistent")
    module = (sys.executable, "-m", "launchpad_lite.launch")
    emission = ("emit", "kubernetes", "--pods=pods.toml", "--name=x", "counting.py", "-o", "out")
    user.run(*module, *emission).check()
    jobs = {
        each["metadata"]["name"]: each["spec"]["template"]["spec"]
        for each in files_of(user.folder / "out").values()
        if each["kind"] == "Job"
    }
    selectors = {name: spec["nodeSelector"] for name, spec in jobs.items()}
    assert selectors == {
        "x": {"zone": "a"},
        "x-store": {"zone": "a"},
        "x-worker": {"zone": "a", "gpu": "a100"},
    }
    assert jobs["x-worker"]["priorityClassName"] == "high"
    assert {"name": "GREETING", "value": "hello"} in jobs["x"]["containers"][0]["env"]

    (user.folder / "pods.toml").write_text('[worker]\nimgae = "a"\n[store]\npython = 3\n')
    wrong = user.run(*module, "--launcher=kubernetes", "--pods=pods.toml", "plan", "counting.py")
    assert wrong.end() == 2, wrong.output
    assert "pods['worker']: unknown pod option 'imgae'; known are image," in wrong.output
    assert "pods['store']: python: a text, not 3" in wrong.output


# JobSet and Kueue


def test_a_jobset_runs_as_one(user: User) -> None:
    jobsets = {(verb, "jobsets") for verb in ("create", "get", "patch", "delete")}
    user.kubeconfig = user.cluster.limited(role() | jobsets)
    launch = user.launch(_LAUNCH_STAYING, jobset=True, name="as-one")
    launch.until_all_are_at_work()
    (jobset,) = user.cluster.objects("JobSet")
    assert jobset["metadata"]["name"] == "as-one"
    assert "1 on as-one-worker-0-1 called as-one-store-0-0" in launch.output
    running = re.compile(r"^worker\[1\] +running +as-one-worker-0-1 ", re.MULTILINE)
    # It is that of a few seconds ago.
    poll_until(lambda: running.search(user.command_line("status", "as-one").check()), 60)
    launch.process.send_signal(signal.SIGINT)
    assert launch.end() == -signal.SIGINT, launch.output
    assert launch.output.count("the worker leaves 2") == 2
    assert not user.cluster.objects("JobSet")
    assert_nothing_is_left(user)


def test_without_jobsets_in_the_cluster_it_is_told(user: User) -> None:
    user.cluster.without_jobset()
    refusal = user.launch(jobset=True).refusal()
    assert "has no JobSets; launch without jobset=True, or have them installed" in refusal
    assert_nothing_is_left(user)


def test_a_queue_admits_every_job_of_a_run(user: User) -> None:
    from kubernetes import client, config

    launch = user.launch(queue="research", name="queued")
    poll_until(lambda: len(user.cluster.objects("Job")) == 3 or launch.process.poll(), 90)
    jobs = user.cluster.objects("Job")
    assert {each["metadata"]["name"] for each in jobs} == {
        "queued",
        "queued-store",
        "queued-worker",
    }
    for each in jobs:
        assert each["spec"]["suspend"] is True
        assert each["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    assert not user.cluster.pods()
    with config.new_client_from_config(str(user.cluster.kubeconfig)) as api:
        batch = client.BatchV1Api(api)
        for each in jobs:  # as Kueue does
            batch.patch_namespaced_job(
                each["metadata"]["name"], user.cluster.namespace, {"spec": {"suspend": False}}
            )
    launch.check()
    assert_nothing_is_left(user)


@pytest.mark.slow
@pytest.mark.parametrize("first", [("late", "late-worker"), ("late-store", "late-worker")])
def test_jobs_that_a_queue_admits_one_after_the_other_wait_for_each_other(
    user: User, first: tuple[str, ...]
) -> None:
    from kubernetes import client, config

    source = """
    if __name__ == "__main__":
        lp.launch(make_program(), "kubernetes", detach=True, **OPTIONS)
    """
    schedule_s = 1
    user.launch(source, queue="research", name="late", schedule_s=schedule_s).check()

    def phases() -> list[str]:
        return [str(each["status"].get("phase")) for each in user.cluster.pods()]

    def has_succeeded() -> bool:
        return any(
            each["status"].get("succeeded") and each["metadata"]["name"] == "late"
            for each in user.cluster.objects("Job")
        )

    with config.new_client_from_config(str(user.cluster.kubeconfig)) as api:

        def admit(name: str) -> None:
            batch = client.BatchV1Api(api)
            batch.patch_namespaced_job(name, user.cluster.namespace, {"spec": {"suspend": False}})

        for name in first:
            admit(name)
        poll_until(lambda: phases() == ["Running"] * 3)
        begin = time.monotonic()
        poll_until(lambda: time.monotonic() > begin + 4 * schedule_s or "Failed" in phases())
        assert phases() == ["Running"] * 3
        (last,) = {"late", "late-store", "late-worker"} - set(first)
        admit(last)
        poll_until(has_succeeded, 60)
    user.command_line("stop", "late").check()
    assert_nothing_is_left(user)


# Rights and security


def test_an_image_may_have_our_packages_and_events_are_no_need(user: User) -> None:
    user.kubeconfig = user.cluster.limited(
        {(verb, resource) for verb, resource in role() if resource != "events"}
    )
    user.launch(image=INSTALLED_IMAGE).check()
    assert_nothing_is_left(user)


def test_a_right_that_is_missing_is_named_with_the_rule_for_it(user: User) -> None:
    user.kubeconfig = user.cluster.limited(role() - {("create", "secrets")})
    refusal = user.launch().refusal()
    assert "we may not create secrets in namespace 'team'" in refusal
    rule = re.search(r"must have the rule (\{.*\})", refusal)
    assert rule
    assert json.loads(rule[1]) == {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create"]}
    # What belonged to the first object goes a moment after it, and nobody waits for that.
    poll_until(lambda: not user.cluster.leftovers())
    assert_nothing_is_left(user)


def secrets_of(user: User) -> list[bytes]:
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


def processes_of(user: User) -> list[psutil.Process]:
    first = [
        psutil.Process(pid)
        for pod in user.cluster.pods()
        for pid in user.cluster.pids(pod["metadata"]["name"])
    ]
    return [*first, *(child for each in first for child in each.children(recursive=True))]


def test_pods_are_nobody_and_hold_no_secret_where_others_look(user: User) -> None:
    source = """
    class Staying(Staying):
        def work(self):
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
            super().work()
    """
    launch = user.launch(source, _LAUNCH_STAYING)
    launch.until("TOKEN", 2)
    secrets = secrets_of(user)
    # The supervisor; of each node three. They may be at work before their kubelets know of them.
    poll_until(lambda: len(processes_of(user)) >= 7)
    processes = processes_of(user)
    for process in processes:
        seen = Path(f"/proc/{process.pid}/environ").read_bytes()
        seen += Path(f"/proc/{process.pid}/cmdline").read_bytes()
        assert process.uids().effective == 65532
        assert not [secret for secret in secrets if secret in seen], process
    containers = [pod["spec"]["containers"][0] for pod in user.cluster.pods()]
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
    launch.process.send_signal(signal.SIGINT)
    launch.end()
    assert_nothing_is_left(user)


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
    except ConnectionError as error:
        return "is refused"
    except ssl.SSLError as error:
        return "is refused"
    except TimeoutError:
        return "times out"

connect_s = float(sys.argv[1])
for target in sys.argv[2:]:
    print("raw", knock(target, lambda plain: plain), flush=True)
    print("tls", knock(target, context.wrap_socket), flush=True)
print("DONE", flush=True)
"""


def stranger(user: User, name: str, targets: Sequence[str], connect_s: float) -> str:
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
def test_who_does_not_belong_to_the_run_is_not_heard(user: User, network_policy: bool) -> None:
    launch = user.launch(_LAUNCH_STAYING, network_policy=network_policy, name="closed")
    launch.until_all_are_at_work()
    targets = [
        "closed:4250",
        "closed-store-0.closed-store:4251",
        "closed-worker-1.closed-worker:4251",
    ]
    if network_policy:
        said = stranger(user, "stranger", targets[:1], connect_s=2)
    else:
        said = stranger(user, "stranger", targets, connect_s=30)
    assert "DONE" in said, said
    answers = {*re.findall(r"^(?:raw|tls) (.*)$", said, re.MULTILINE)}
    if network_policy:
        assert answers == {"times out"}, said
    else:
        assert answers <= {"is refused", "is hung up on"}, said
    launch.process.send_signal(signal.SIGTERM)
    assert launch.end() == 143, launch.output
    assert launch.output.count("the worker leaves 2") == 2
    assert "UNPICKLED" not in launch.output + user.log("store/0") + user.log("worker/1")
    assert_nothing_is_left(user)
