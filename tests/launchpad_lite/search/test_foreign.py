"""Workers in other languages: they speak gRPC, and take tasks of their kind beside others."""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

import courier
from courier.wire.secret import SessionKey
from launchpad_lite.parts.joining import JOIN_FILE, JoinInfo
from launchpad_lite.search._proto import search_pb2 as pb
from launchpad_lite.search._sqlite import SqliteStore
from launchpad_lite.search._timing import Timing
from launchpad_lite.search.models import TrialState
from launchpad_lite.search.name_server import NameServer
from launchpad_lite.search.tasks import Call, Foreign
from tests.courier.certificates import Authority
from tests.courier.waiting import wait_until
from tests.launchpad_lite.search.grpc_worker import GrpcMember
from tests.launchpad_lite.search.searches import ROOT, output_of, searching
from tests.launchpad_lite.search.tasks_for_tests import Tasks, square


class ForeignWorker(GrpcMember):
    """A worker that does what a test says."""

    def __init__(self, folder: Path, name: str = "foreign") -> None:
        super().__init__(folder / JOIN_FILE, name)
        self.ask(self.names, "NameServer/Register", pb.RegisterRequest(worker=self.me))
        request = pb.PlaceRequest(worker=self.me)
        while not (place := self.ask(self.names, "NameServer/Place", request)).broker:
            time.sleep(0.01)
        self.broker, self.broker_name = place.address, place.broker

    def work(self, *outcomes: Any, held: "tuple[str, ...]" = (), wait_s: float = 10) -> Any:
        request = pb.WorkRequest(
            worker=self.me, held=held, outcomes=outcomes, kinds=["js"], count=1, wait_s=wait_s
        )
        return self.ask(self.broker, "Broker/Work", request)

    def beat(self, *assignments: Any, progress: "tuple[Any, ...]" = ()) -> "list[str]":
        held = [pb.Held(id=each.id, token=each.token) for each in assignments]
        request = pb.BeatRequest(worker=self.me, held=held, progress=progress)
        return list(self.ask(self.broker, "Broker/Beat", request).stops)

    def show(self) -> tuple[bool, bool]:
        """Returns whether it is known, and whether the search is over."""
        presence = pb.PresenceRequest(worker=self.me, broker=self.broker_name)
        reply = self.ask(self.names, "NameServer/Beat", presence)
        return reply.is_known, reply.is_over

    def leave(self, *outcomes: Any) -> None:
        request = pb.LeaveRequest(worker=self.me, outcomes=outcomes)
        self.ask(self.broker, "Broker/Leave", request)
        self.ask(self.names, "NameServer/Leave", request)


def done(assignment: Any, payload: bytes) -> Any:
    return outcome(assignment, pb.Outcome.DONE, payload=payload)


def outcome(assignment: Any, state: Any, **fields: Any) -> Any:
    return pb.Outcome(id=assignment.id, token=assignment.token, state=state, seconds=0.5, **fields)


Come = Callable[..., ForeignWorker]


@pytest.fixture
def come(tmp_path: Path) -> Iterator[Come]:
    workers: list[ForeignWorker] = []

    def start(**options: Any) -> ForeignWorker:
        workers.append(ForeignWorker(tmp_path, **options))
        return workers[-1]

    yield start
    for each in workers:
        each.close()


class Patient(Tasks):
    """Goes on when tasks fail or are stopped."""

    def __init__(self, *tasks: Any) -> None:
        super().__init__(*tasks)
        self.errors: list[str] = []
        self.points: list[tuple[int, float]] = []

    def report(self, task: Any, step: int, value: float) -> bool:
        self.points.append((step, value))
        return value < 0

    def fail(self, task: Any, error: Exception) -> None:
        self.errors.append(str(error))


def test_a_worker_of_another_language_runs_tasks_of_its_kind(tmp_path: Path, come: Come) -> None:
    with searching(Tasks(Foreign("js", b"one"), Foreign("js", b"two")), tmp_path) as search:
        earlier = come(name="earlier")
        assert len(earlier.work().assignments) == 1
        earlier.leave()  # its task goes to another one at once
        worker = come()
        (first,) = worker.work().assignments
        assert (first.kind, first.payload) == ("js", b"one")
        assert worker.beat(first) == []
        assert worker.show() == (True, False)
        (second,) = worker.work(done(first, b"ONE")).assignments
        assert worker.work(done(second, b"TWO")).is_over
        assert worker.show() == (True, True)
        worker.leave()
        assert worker.show()[0] is False
        assert search.model().results == [b"ONE", b"TWO"]
        trial = search.trials()[0]
        assert (trial.worker, trial.seconds) == ("foreign", 0.5)


def test_a_failure_has_a_text_and_nothing_that_would_be_unpickled(
    tmp_path: Path, come: Come
) -> None:
    model = Patient(Foreign("js", b"1"))
    with searching(model, tmp_path) as search:
        worker = come()
        (task,) = worker.work().assignments
        worker.work(outcome(task, pb.Outcome.FAILED, text="no such function", payload=b"evil"))
        worker.leave()
        wait_until(lambda: search.status().is_over)
        (error,) = search.model().errors
        assert error == "Foreign('js', 1 bytes) on foreign: no such function"


def test_a_task_that_reports_can_be_stopped_early(tmp_path: Path, come: Come) -> None:
    with searching(Patient(Foreign("js", b"1")), tmp_path) as search:
        worker = come()
        (task,) = worker.work().assignments
        points = tuple(
            pb.Progress(id=task.id, step=step, value=value) for step, value in ((0, 0.5), (1, -1))
        )
        assert worker.beat(task, progress=points) == []
        wait_until(lambda: worker.beat(task) == [task.id])
        worker.leave(outcome(task, pb.Outcome.STOPPED))
        wait_until(lambda: search.status().is_over)
        assert search.trials()[0].state is TrialState.STOPPED
        assert search.model().points == [(0, 0.5), (1, -1)]


def test_a_worker_that_gives_up_while_its_task_is_stored_harms_nobody(
    tmp_path: Path, come: Come, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = SqliteStore.write

    written: list[Any] = []

    def write_slowly(store: SqliteStore, changes: Any) -> None:
        time.sleep(0.3)
        write(store, changes)
        written.append(changes)

    monkeypatch.setattr(SqliteStore, "write", write_slowly)
    with searching(Tasks(Foreign("js", b"1")), tmp_path) as search:
        worker = come()
        wait_until(lambda: written)  # the task
        request = pb.WorkRequest(worker=worker.me, kinds=["js"], count=1)
        with pytest.raises(grpc.RpcError, match="DEADLINE_EXCEEDED"):
            worker.ask(worker.broker, "Broker/Work", request, 0.1)
        (task,) = worker.work().assignments
        assert worker.work(done(task, b"2")).is_over
        worker.leave()
        assert search.model().results == [b"2"]


def test_a_message_without_a_name_is_refused(tmp_path: Path, come: Come) -> None:
    with searching(Tasks(Foreign("js", b"1")), tmp_path):
        worker = come()
        with pytest.raises(grpc.RpcError, match="a worker has a name and a life"):
            worker.ask(worker.broker, "Broker/Work", pb.WorkRequest(count=1))
        with pytest.raises(grpc.RpcError, match="the outcome of task x has no state"):
            worker.work(pb.Outcome(id="x"))


def test_the_numbers_of_the_page_for_other_languages_are_right() -> None:
    page = (ROOT / "docs" / "other_languages.md").read_text()
    numbers = [bytes.fromhex(each) for each in re.findall(r"\b[0-9a-f]{24,}\b", page)]
    secret, mine, its, key, proof, request, digest, seal, reply, answer = numbers
    session = SessionKey(courier.Secret(secret), mine, its)
    path = "/search.v1.NameServer/Register"
    worker = pb.Worker(name="w1", life="0001")
    assert request == pb.RegisterRequest(worker=worker).SerializeToString()
    assert reply == pb.RegisterReply(beat_s=1, poll_s=5).SerializeToString()
    assert (key, proof) == (session._key, session.prove())
    assert digest == hashlib.sha256(request).digest()
    assert seal == session.seal_service(b"request", path, 1, request)
    assert answer == session.seal_service(b"reply", path, 1, reply)


def test_who_speaks_python_only_loads_neither_grpc_nor_protobuf() -> None:
    script = (
        "import sys, launchpad_lite.search._command_line; "
        "assert not {'grpc', 'google.protobuf'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


# A worker in JavaScript.

_EXAMPLE = ROOT / "examples" / "search_worker_js"
_PACKAGES = ROOT / ".cache" / "search_worker_js"


def _needs_node() -> None:
    """Installs what the worker needs, once; CI has Node, other machines need not have it."""
    missing = [program for program in ("node", "npm") if shutil.which(program) is None]
    if missing and os.environ.get("CI") != "true":
        pytest.skip(f"needs {' and '.join(missing)}: the Debian packages nodejs and npm")
    assert not missing, f"CI runs a worker in JavaScript: install {missing}"
    wanted = (_EXAMPLE / "package.json").read_text()
    ready = _PACKAGES / "ready.json"  # what was installed; written last
    _PACKAGES.mkdir(parents=True, exist_ok=True)
    with (_PACKAGES / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests that run at the same time want the same
        if ready.exists() and ready.read_text() == wanted:
            return
        shutil.copy(_EXAMPLE / "package.json", _PACKAGES)
        options = ["--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts"]
        command = ["npm", "install", *options, "--prefix", str(_PACKAGES)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        ready.write_text(wanted)


@contextlib.contextmanager
def javascript(path: Path) -> Iterator["subprocess.Popen[str]"]:
    """Has a worker in JavaScript run in a block."""
    _needs_node()
    process = subprocess.Popen(
        ["node", str(_EXAMPLE / "worker.js"), str(path), "node"],
        env={**os.environ, "NODE_PATH": str(_PACKAGES / "node_modules")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def rosenbrock(x: float, y: float) -> Foreign:
    return Foreign("js", json.dumps([x, y]).encode())


@pytest.mark.slow
@pytest.mark.timeout(300)  # the first run installs packages
def test_workers_in_python_and_in_javascript_work_for_one_search(tmp_path: Path) -> None:
    tasks = [task for n in range(20) for task in (rosenbrock(n, n), Call(square, n))]
    model = Patient(*tasks, Foreign("js", b"nonsense"))
    with (
        searching(model, tmp_path, launcher="test_mp", workers=1) as search,
        javascript(tmp_path / JOIN_FILE) as process,
    ):
        wait_until(lambda: search.status().is_over, timeout_s=60)
        text = output_of(process)
        assert (process.returncode, "error" in text) == (0, False), text
        model = search.model()
        found = {result for result in model.results if isinstance(result, int)}
        assert found == {n * n for n in range(20)}
        values = {float(result) for result in model.results if isinstance(result, bytes)}
        assert values == {(1 - n) ** 2 + 100 * (n - n * n) ** 2 for n in range(20)}
        (error,) = model.errors
        assert "on node: SyntaxError" in error
        workers = {trial.task.startswith("Foreign"): trial.worker for trial in search.trials()}
        assert workers == {True: "node", False: "s_worker[0]"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_worker_in_javascript_passes_all_checks(tmp_path: Path) -> None:
    _needs_node()
    command = [sys.executable, "-m", "launchpad_lite.search", "check-worker", "--kind=js"]
    for option, text in (("", "[1, 2]"), ("long-", "[1, 2, 5]"), ("bad-", "nonsense")):
        (tmp_path / f"{option}payload").write_text(text)
        command.append(f"--{option}payload={tmp_path / f'{option}payload'}")
    done = subprocess.run(
        [*command, "--", "node", str(_EXAMPLE / "worker.js")],
        env={**os.environ, "NODE_PATH": str(_PACKAGES / "node_modules")},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not checked" not in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_worker_in_javascript_joins_a_search_with_certificates(tmp_path: Path) -> None:
    tls = Authority().issue(names=())  # none is that of the host
    secret = courier.Secret.generate()
    names = NameServer(None, Timing(beat_s=0.1))
    with courier.Server(names, secret=secret, tls=tls) as server:
        info = JoinInfo(server.address, secret, tls)
        client = info.connect()
        with javascript(info.write(tmp_path)) as process:
            wait_until(lambda: client.view().workers == 1, timeout_s=60)
            client.close()  # the search is over
            text = output_of(process)
            assert process.returncode == 0, text
            assert client.view().workers == 0
        courier.close(client)
