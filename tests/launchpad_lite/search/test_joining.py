"""Workers join a running search by one command, and leave it in order."""

import json
import os
import signal
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import courier
import launchpad_lite as lp
from launchpad_lite.parts.joining import JOIN_FILE, JoinInfo
from launchpad_lite.search._command_line import main, outside_worker
from launchpad_lite.search._messages import Life, SearchMember
from launchpad_lite.search._presence import Presence
from launchpad_lite.search._timing import Timing
from launchpad_lite.search.errors import SearchError, WorkerMismatchError
from launchpad_lite.search.looking import read_join_file
from launchpad_lite.search.name_server import NameServer
from launchpad_lite.search.running import run
from launchpad_lite.search.tasks import Call
from tests.courier.certificates import Authority
from tests.courier.waiting import wait_until
from tests.launchpad_lite.search.searches import output_of, searching, worker
from tests.launchpad_lite.search.tasks_for_tests import Tasks, square


def hold(folder: Path) -> int:
    """Says that it runs, and waits until it may end; returns its process."""
    (folder / "begun").touch()
    while not (folder / "end").exists():
        time.sleep(0.01)
    return os.getpid()


def test_a_worker_joins_by_the_file_that_the_search_writes_and_ends_with_it(tmp_path: Path) -> None:
    path = tmp_path / JOIN_FILE
    model = Tasks(*(Call(square, number) for number in range(20)))
    with searching(model, tmp_path) as search:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        address = json.loads(path.read_text())["address"]
        with worker(path, "--name=guest") as process:
            text = output_of(process)
            assert process.returncode == 0, text
            assert text == f"guest works for the search at {address}\n"
        assert sorted(search.model().results) == [number**2 for number in range(20)]
        assert {trial.worker for trial in search.trials()} == {"guest"}
    assert not path.exists()


@pytest.mark.parametrize("is_file", [True, False])
def test_a_worker_joins_by_an_address_with_the_secret_beside_it(
    tmp_path: Path, is_file: bool
) -> None:
    with searching(Tasks(Call(square, 3)), tmp_path) as search:
        fields = json.loads((tmp_path / JOIN_FILE).read_text())
        (tmp_path / "secret").write_text(fields["secret"] + "\n")
        options = [f"--secret-file={tmp_path / 'secret'}"] if is_file else []
        variable = {} if is_file else {"LAUNCHPAD_SEARCH_SECRET": fields["secret"]}
        with worker(fields["address"], *options, **variable) as process:
            assert "error" not in output_of(process)
            assert process.returncode == 0
        assert search.model().results == [9]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_that_is_told_to_leave_ends_its_task_first(
    tmp_path: Path, number: signal.Signals
) -> None:
    model = Tasks(Call(hold, tmp_path), Call(square, 2), Call(square, 3))
    with searching(model, tmp_path) as search, worker(tmp_path / JOIN_FILE) as process:
        wait_until((tmp_path / "begun").exists)
        process.send_signal(number)
        assert "works for" in process.stdout.readline()
        assert "leaves after its task" in process.stdout.readline()
        (tmp_path / "end").touch()
        assert output_of(process) == ""
        assert process.returncode == 0
        wait_until(lambda: search.model().results == [process.pid])
        assert search.status().queued == 2


@pytest.mark.slow
def test_a_worker_that_waits_for_a_task_leaves_at_once(tmp_path: Path) -> None:
    with searching(Tasks(Call(hold, tmp_path)), tmp_path), worker(tmp_path / JOIN_FILE) as busy:
        wait_until((tmp_path / "begun").exists)
        with worker(tmp_path / JOIN_FILE) as idle:
            wait_until(lambda: members(tmp_path).workers == 2)
            idle.terminate()
            output_of(idle)
            assert idle.returncode == 0
            assert members(tmp_path).workers == 1
        assert busy.poll() is None


def members(folder: Path) -> Any:
    client = read_join_file(folder / JOIN_FILE).connect()
    try:
        return client.view()
    finally:
        courier.close(client)


def test_the_second_signal_ends_a_worker_at_once(tmp_path: Path) -> None:
    with searching(Tasks(Call(hold, tmp_path)), tmp_path), worker(tmp_path / JOIN_FILE) as process:
        wait_until((tmp_path / "begun").exists)
        process.terminate()
        process.stdout.readline()
        assert "leaves after its task" in process.stdout.readline()
        process.terminate()
        output_of(process)
        assert process.returncode == 128 + signal.SIGTERM


def test_a_worker_from_outside_hears_that_a_search_has_ended(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as thread:
        result = thread.submit(
            run, Tasks(Call(square, 3)), workers=0, folder=tmp_path, launcher="test_mt"
        )
        wait_until((tmp_path / JOIN_FILE).exists)
        with worker(tmp_path / JOIN_FILE) as process:
            assert "error" not in output_of(process)
            assert process.returncode == 0
        assert result.result(10).model.results == [9]


# What goes wrong.


@pytest.fixture
def names() -> Iterator[JoinInfo]:
    """A name server; returns what lets workers in."""
    secret = courier.Secret.generate()
    with courier.Server(NameServer(None, Timing()), secret=secret) as server:
        yield JoinInfo(server.address, secret)


def join(info: JoinInfo) -> None:
    stop = threading.Event()
    stop.set()
    outside_worker(info, "guest", stop).run()


def test_the_only_broker_is_chosen_before_it_has_registered(names: JoinInfo) -> None:
    client = names.connect()
    chosen = [
        Presence("worker", "guest", client, dict.fromkeys(brokers, client), Timing()).choose()
        for brokers in (["one"], ["one", "other"])
    ]
    assert chosen == ["one", ""]


def test_a_wrong_secret_is_refused(names: JoinInfo) -> None:
    with pytest.raises(SearchError, match="does not take this secret: it is that of another"):
        join(JoinInfo(names.address, courier.Secret.generate()))


def test_nobody_may_be_there() -> None:
    with pytest.raises(SearchError, match=r"no answer from 127\.0\.0\.1:1: the search has ended"):
        join(JoinInfo("127.0.0.1:1", courier.Secret.generate()))


def test_the_server_may_be_another_one(names: JoinInfo) -> None:
    with (
        courier.Server(Tasks(), secret=names.secret) as server,
        pytest.raises(SearchError, match="no name server of a search"),
    ):
        join(JoinInfo(server.address, names.secret))


def test_the_python_of_a_search_is_that_of_its_model(tmp_path: Path) -> None:
    with searching(Tasks(Call(square, 3)), tmp_path) as search:
        wait_until(lambda: search.status().unknown_kinds)
        names = read_join_file(tmp_path / JOIN_FILE).connect()
        first = SearchMember("worker", Life("first", "1"), version=lp.__version__, python="3.99")
        with pytest.raises(WorkerMismatchError, match=r"first runs on Python 3\.99, and this"):
            names.register(first)
        courier.close(names)


def test_a_worker_joins_a_search_with_certificates_by_the_file_alone(tmp_path: Path) -> None:
    tls = Authority().issue()
    secret = courier.Secret.generate()
    with courier.Server(NameServer(None, Timing()), secret=secret, tls=tls) as server:
        path = JoinInfo(server.address, secret, tls).write(tmp_path)
        info = read_join_file(path)
        assert info == JoinInfo(server.address, secret, tls)
        join(info)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / JOIN_FILE
    for text in ("[]", "{}", "no json", '{"address": "h:1", "secret": "xy", "tls": null}'):
        path.write_text(text)
        with pytest.raises(SearchError, match=r"join\.json is no join\.json of a search"):
            read_join_file(path)


def test_a_file_that_others_could_have_written_is_refused(tmp_path: Path) -> None:
    path = JoinInfo("h:1", None).write(tmp_path)
    path.chmod(0o660)
    with pytest.raises(SearchError, match=r"cannot read .*join\.json: it is -rw-rw----, of user"):
        read_join_file(path)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["10.0.0.7:1"], "no secret for 10.0.0.7:1: give it in a file by --secret-file"),
        (["10.0.0.7:1", "--secret-file=/nowhere"], "cannot read the secret from /nowhere"),
        (["learner"], "'learner' is neither host:port nor a file join.json"),
        (["learner:99999"], "'learner:99999' is neither host:port nor a file join.json"),
        (["nowhere/join.json"], "cannot read nowhere/join.json: No such file"),
        (["short:1"], "the secret in LAUNCHPAD_SEARCH_SECRET is none: a secret needs"),
    ],
)
def test_the_command_line_says_what_it_lacks(
    arguments: list[str],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if secret := {"learner": "00" * 16, "short": "abcd"}.get(arguments[0].partition(":")[0]):
        monkeypatch.setenv("LAUNCHPAD_SEARCH_SECRET", secret)
    assert main(["worker", *arguments]) == 1
    assert text in capfd.readouterr().err
