"""Where a broker keeps its tasks: what all stores promise, and what is special about a file."""

import contextlib
import itertools
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launchpad_lite.search._messages import Life, Limits, TaskOutcome, TaskState, TaskSubmission
from launchpad_lite.search._postgres import PostgresStore
from launchpad_lite.search._queue import Changes, QueuedTask
from launchpad_lite.search._sqlite import SqliteStore, check_files
from launchpad_lite.search._store import PART_BYTES, PAYLOAD, RESULT, Store
from launchpad_lite.search.errors import StoreError, StoreInUseError
from tests.engines import needs_postgres


def task(key: str, payload: bytes = b"payload", owner: str = "model", **fields: Any) -> QueuedTask:
    return QueuedTask(TaskSubmission(key, payload), owner, 0, **fields)


def new(*tasks: QueuedTask) -> Changes:
    return Changes([*tasks], [], [])


def full() -> QueuedTask:
    submission = TaskSubmission(
        "full", b"\x00\xff", "rust", -1.5, 3, Limits(60.0, 5.0, 0.5, 1.0, 1 << 40)
    )
    text = (
        "a lone surrogate \udc80, a zero \0, and ü\n"  # a message of an exception may have anything
    )
    outcome = TaskOutcome("full", "", TaskState.FAILED, b"\x01", text, 1.25, "worker[3]", 0)
    lease = Life("worker[3]", "life"), "token"
    return QueuedTask(submission, "model", 7, False, lease, ("first", text), 2, outcome)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "brokers" / "broker.sqlite"


@pytest.fixture
def store(path: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(path)
    yield store
    store.close()


def reopened(store: Store, open_again: Callable[[], Store]) -> dict[str, QueuedTask]:
    store.close()
    with contextlib.closing(open_again()) as again:
        return {each.submission.id: each for each in again.load()}


@pytest.fixture(
    params=[
        "file",
        pytest.param(
            "database",
            marks=[pytest.mark.slow, needs_postgres, pytest.mark.xdist_group("postgres")],
        ),
    ]
)
def open_store(request: pytest.FixtureRequest, path: Path) -> Callable[[], Store]:
    """Opens a store, again perhaps."""
    if request.param == "file":
        return lambda: SqliteStore(path)
    url = request.getfixturevalue("url")
    return lambda: PostgresStore(url, "broker")


def test_every_field_comes_back(open_store: Callable[[], Store]) -> None:
    written = {"full": full(), "bare": task("bare")}
    store = open_store()
    store.write(new(*written.values()))
    assert reopened(store, open_store) == written


def test_changes_and_removals_are_taken_over(open_store: Callable[[], Store]) -> None:
    store = open_store()
    store.write(new(task("1"), task("2"), task("3")))
    again, leased = task("1", b"again", losses=1), task("2", lease=(Life("worker[0]", "life"), "t"))
    store.write(Changes([task("4"), again], [leased], ["3", "unknown"]))
    assert reopened(store, open_store) == {"1": again, "2": leased, "4": task("4")}


def test_a_write_is_taken_over_as_a_whole_or_not_at_all(open_store: Callable[[], Store]) -> None:
    store = open_store()
    store.write(new(task("1")))
    bad = task("bad")
    bad.number = 1 << 70  # no column takes that
    with pytest.raises(
        (OverflowError, StoreError), match=r"int too large|all that was accepted is kept"
    ):
        store.write(Changes([task("2"), bad], [], ["1"]))
    assert reopened(store, open_store) == {"1": task("1")}


def test_a_payload_is_written_once_whatever_becomes_of_its_task(
    store: SqliteStore, path: Path
) -> None:
    size = 10_000_000

    def written() -> int:
        counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(counts["wchar"])

    before = written()
    store.write(new(task("1", os.urandom(size))))
    lease = Life("worker[0]", "life"), "token"
    outcome = TaskOutcome("1", "", TaskState.DONE, b"result")
    for fields in ({"lease": lease}, {"outcome": outcome}):
        store.write(Changes([], [task("1", **fields)], []))
    store.write(Changes([], [], ["1"]))
    assert written() - before < 2.2 * size, "in the log, and from there in the file"


def stage(store: SqliteStore, what: str, body: bytes) -> None:
    """As for the task `1`."""
    for part in itertools.count():
        if store.stage("1", what, body, part):
            break


def test_what_is_large_comes_back_as_it_was_staged_last(store: SqliteStore, path: Path) -> None:
    payload, result = (os.urandom(size) for size in (2 * PART_BYTES, PART_BYTES + 1))
    stage(store, PAYLOAD, payload + bytes(PART_BYTES))
    stage(store, PAYLOAD, payload)
    stage(store, RESULT, result)
    whole = task("1", payload, outcome=TaskOutcome("1", "", TaskState.DONE, result))
    store.write(new(whole))
    store.write(Changes([], [whole], []))
    store.stage("never came", PAYLOAD, payload, 0)
    assert reopened(store, lambda: SqliteStore(path)) == {"1": whole}
    again = SqliteStore(path)
    assert again._database.execute("select distinct id from parts").fetchall() == [("1",)]
    small = task("1", b"small", outcome=TaskOutcome("1", "", TaskState.DONE, b"small"))
    again.write(new(small))
    assert again.load() == [small]
    again.write(Changes([], [], ["1"]))
    assert again._database.execute("select count(*) from parts").fetchone() == (0,)
    again.close()


def test_a_file_of_another_version_is_refused(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("create table tasks (id text primary key, payload blob)")
    with pytest.raises(StoreError, match=rf"{path}: another version .* name a new folder"):
        SqliteStore(path)


def test_its_files_are_for_this_user_only(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        store = SqliteStore(tmp_path / "run" / "brokers" / "broker.sqlite")
        store.write(new(task("1")))
        modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "run").rglob("*")}
        store.close()
    finally:
        os.umask(umask)
    files = {"broker.sqlite", "broker.sqlite-wal"}
    assert {name for name, mode in modes.items() if mode == 0o600} >= files
    assert {name: mode for name, mode in modes.items() if mode != 0o600} == {"brokers": 0o700}


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to others: needs root")
@pytest.mark.parametrize("planted", [".", "brokers"])
def test_what_another_user_has_put_there_is_not_read(tmp_path: Path, planted: str) -> None:
    folder = tmp_path / "tmp" / "run"
    SqliteStore(folder / "brokers" / "broker.sqlite").close()
    folder.parent.chmod(0o1777)
    os.chown(folder / planted, 4711, -1)
    for read in (lambda: check_files(folder, 0.0), lambda: SqliteStore(folder / "brokers" / "b")):
        with pytest.raises(StoreError, match=r"others could replace .*, of user 4711.*chown -R"):
            read()


def test_a_file_has_one_broker_until_it_is_closed(store: SqliteStore, path: Path) -> None:
    with pytest.raises(StoreInUseError, match=rf"{path}: another process uses this file"):
        SqliteStore(path)
    store.write(new(task("1")))
    store.close()
    store.close()
    SqliteStore(path).close()


def test_a_file_that_is_in_use_may_become_free(store: SqliteStore, path: Path) -> None:
    with pytest.raises(StoreInUseError, match="another process uses this file"):
        check_files(path.parent.parent, 0.0)
    closing = threading.Timer(0.2, store.close)
    closing.start()
    check_files(path.parent.parent, 20.0)
    closing.join()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        StoreError, match=r"file/broker.sqlite: a broker cannot keep its tasks here"
    ):
        SqliteStore(tmp_path / "file" / "broker.sqlite")


@pytest.mark.parametrize("where", [0, 5000])
def test_a_damaged_file_says_what_to_do(store: SqliteStore, path: Path, where: int) -> None:
    store.write(new(*[task(str(number), os.urandom(3000)) for number in range(30)]))
    store.close()
    with path.open("r+b") as file:
        file.seek(where)
        file.write(b"damage" * 2000)
    with pytest.raises(StoreError, match=rf"{path}: .*; if it is damaged, move it away and start"):
        SqliteStore(path)


def fill(store: SqliteStore) -> tuple[int, str]:
    """Writes until there is no room; returns how many tasks were accepted, and the error."""
    for number in itertools.count():
        try:
            store.write(new(task(str(number), bytes(10_000))))
        except StoreError as error:
            return number, str(error)
    raise AssertionError


def test_what_was_accepted_before_the_disk_was_full_is_kept(store: SqliteStore, path: Path) -> None:
    store._database.execute("pragma max_page_count = 100")
    count, message = fill(store)
    assert "make room on this disk and start again: all that was accepted" in message
    assert 10 < count < 100
    assert len(reopened(store, lambda: SqliteStore(path))) == count


_WRITER = """
import itertools, sys
from pathlib import Path
from launchpad_lite.search._messages import TaskSubmission
from launchpad_lite.search._queue import Changes, QueuedTask
from launchpad_lite.search._sqlite import SqliteStore

store = SqliteStore(Path(sys.argv[1]))
for number in itertools.count():
    tasks = [QueuedTask(TaskSubmission(f"{number} {part}", bytes(500)), "model", 0) for part in range(20)]
    removed = [f"{number - 50} {part}" for part in range(20)]
    store.write(Changes(tasks, [], removed))
    print(number, flush=True)
"""


def test_an_end_in_a_write_loses_only_what_was_not_acknowledged(path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _WRITER, path], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) == 60:
                break
        process.send_signal(signal.SIGKILL)
        last = [60, *map(int, process.stdout)][-1]
    store = SqliteStore(path)
    counts: dict[int, int] = {}
    for each in store.load():
        number = int(each.submission.id.split()[0])
        counts[number] = counts.get(number, 0) + 1
    store.close()
    assert set(counts.values()) == {20}, "all of a write, or nothing"
    assert list(counts) in (
        list(range(last - 49, last + 1)),
        list(range(last - 48, last + 2)),  # it was written, but not acknowledged yet
    )
