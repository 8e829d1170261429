"""Where a broker keeps its tasks, so that its end loses none."""

import contextlib
import itertools
import json
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from launchpad_lite._private_files import make_own_folder
from launchpad_lite.search._messages import Life, Limits, Outcome, State, Submission
from launchpad_lite.search._queue import Changes, Task
from launchpad_lite.search._resuming import holder_of
from launchpad_lite.search.errors import StoreError, StoreInUseError


class Store(Protocol):
    """Keeps the tasks of one broker. Used by one thread at a time."""

    def load(self) -> list[Task]:
        """Returns all tasks.

        Raises:
            StoreError: They cannot be read.
        """

    def write(self, changes: Changes) -> None:
        """Takes changes over, all or none.

        Raises:
            StoreError: They cannot be written.
        """

    def stage(self, key: str, what: str, body: bytes, part: int) -> bool:
        """Takes over a part of something large, ahead of the write of its task; returns if it was the last.

        Args:
            key: Of the task.
            what: `PAYLOAD` or `RESULT`.
            body: All of it. `write` leaves this very object out.
            part: Which one, from 0 on.

        Raises:
            StoreError: It cannot be written.
        """

    def is_quick(self, changes: Changes) -> bool:
        """Returns whether to write changes takes less time than to have another thread do it."""

    def beat(self) -> None:
        """Shows other brokers that this one is there.

        Raises:
            StoreError: Another one has taken its tasks over.
        """

    def take_over(self, owner: str, silence_s: float) -> list[Task]:
        """Moves tasks of lost brokers to this one, and ends the right to write of those.

        Args:
            owner: The model whose tasks they are.
            silence_s: A broker is lost if it has not shown itself for so long.

        Raises:
            StoreError: They cannot be moved.
        """

    def close(self) -> None:
        """Lets another broker use it. Safe to call twice."""


#: Other writes pass between two parts of what is larger.
PART_BYTES = 1 << 20
PAYLOAD, RESULT = "payload", "result"
#: What was staged, by task and what it is.
Bodies = Mapping[tuple[str, str], bytes]
_NOTHING: Bodies = MappingProxyType({})
#: A task as a row, in this order.
COLUMNS = (
    "id",
    "number",
    "owner",
    "kind",
    "payload",
    "priority",
    "retries",
    "limits",
    "worker",
    "life",
    "token",
    "place",
    "errors",
    "losses",
    "state",
    "result",
    "text",
    "seconds",
    "ran_by",
)
#: Those of them that change.
CHANGING = COLUMNS[8:]


def row_of(task: Task, staged: Bodies = _NOTHING) -> tuple[object, ...]:
    """Returns a task as a row, without what was staged."""
    submission = task.submission
    is_staged = staged.get((submission.id, PAYLOAD)) is submission.payload
    return (
        submission.id,
        task.number,
        task.owner,
        submission.kind,
        None if is_staged else submission.payload,
        submission.priority,
        submission.retries,
        json.dumps(submission.limits),
        *changing_of(task, staged),
    )


def changing_of(task: Task, staged: Bodies = _NOTHING) -> tuple[object, ...]:
    """Returns the values of `CHANGING`."""
    (worker, life), token = task.lease or ((None, None), None)
    outcome = task.outcome
    ended = (
        (None,) * 5
        if outcome is None
        else (
            outcome.state.value,
            None if staged.get((outcome.id, RESULT)) is outcome.payload else outcome.payload,
            _storable(outcome.text),
            outcome.seconds,
            outcome.worker,
        )
    )
    return (
        worker,
        life,
        token,
        json.dumps(task.place) if task.place[0] else None,
        json.dumps(task.errors) if task.errors else "[]",
        task.losses,
        *ended,
    )


def _storable(text: str) -> str:
    """Returns a text that databases take: messages of exceptions may have anything in them."""
    return text.encode(errors="backslashreplace").decode().replace("\0", "\\0")


def task_of(row: Sequence[Any], staged: Bodies = _NOTHING) -> Task:
    """Returns the task of a row."""
    (
        key,
        number,
        owner,
        kind,
        payload,
        priority,
        retries,
        limits,
        worker,
        life,
        token,
        place,
        errors,
        losses,
        state,
        result,
        text,
        seconds,
        ran_by,
    ) = row
    payload = staged.get((key, PAYLOAD), b"") if payload is None else payload
    submission = Submission(
        key, bytes(payload), kind, priority, retries, Limits(*json.loads(limits))
    )
    task = Task(submission, owner, number)
    if token is not None:
        task.lease = Life(worker, life), token
        if place is not None:
            name, devices = json.loads(place)
            task.place = name, tuple(devices)
    task.errors = tuple(json.loads(errors))
    task.losses = losses
    if state is not None:
        ended = State(state)
        result = staged.get((key, RESULT), b"") if result is None else result
        attempts = int(ended is not State.FAILED)  # besides errors and losses
        task.outcome = Outcome(key, "", ended, bytes(result), text, seconds, ran_by, attempts)
    return task


#: Of the tables.
_VERSION = 2
_TABLES = """
create table if not exists tasks (
    id text primary key, number integer, owner text, kind text, payload blob, priority real,
    retries integer, limits text, worker text, life text, token text, place text,
    errors text, losses integer, state text, result blob, text text, seconds real, ran_by text
);
create table if not exists parts (
    id text, what text, part integer, data blob, primary key (id, what, part)
)
"""
_PUT = f"replace into tasks values ({','.join('?' * len(COLUMNS))})"  # noqa: S608 - question marks
_CHANGE = f"update tasks set {', '.join(f'{each} = ?' for each in CHANGING)} where id = ?"  # noqa: S608 - names of ours
#: Larger payloads are no part of the row, which SQLite writes as a whole whenever it changes.
_ROW_BYTES = 4096


#: Folder in that of a search, which may be shared: what brokers keep is unpickled.
BROKERS = "brokers"
#: Seconds until a file that is in use is looked at again.
_RETRY_S = 0.1
#: So many tasks, with so much data, are written at once.
_QUICK_TASKS = 16
_QUICK_BYTES = 1 << 16


def _size(task: Task) -> int:
    return len(task.submission.payload) + len(task.outcome.payload if task.outcome else b"")


class SqliteStore:
    """A file, written by SQLite with a write-ahead log.

    What was written survives the end of the process. At a loss of power, what the system had not
    written yet is lost; models send such tasks again.
    """

    def __init__(self, path: Path) -> None:
        """Opens a file, or makes it.

        Raises:
            StoreInUseError: Another broker uses it.
            StoreError: It is damaged, or cannot be made.
        """
        self._path = path
        self._staged: dict[tuple[str, str], bytes] = {}
        try:
            make_own_folder(path.parent)
            path.touch(mode=0o600)  # the files that SQLite puts beside it have its mode
            # Autocommit: transactions are begun by hand. Written by another thread than it is read.
            self._database = sqlite3.connect(
                path, timeout=0.0, isolation_level=None, check_same_thread=False
            )
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"{path}: a broker cannot keep its tasks here: {error}") from error
        try:
            with self._explained():
                self._open()
        except BaseException:
            self._database.close()
            raise

    def _open(self) -> None:
        run = self._database.execute
        run("pragma locking_mode = exclusive")
        run("pragma journal_mode = wal")
        run("pragma synchronous = normal")
        run("pragma secure_delete = off")  # in some builds it writes zeros over all that is removed
        run("begin immediate")  # takes the lock, which the end of the process releases
        is_new = run("select 1 from sqlite_master").fetchone() is None
        if not is_new and run("pragma user_version").fetchone() != (_VERSION,):
            raise StoreError(
                f"{self._path}: another version of launchpad-lite has kept tasks here, which this one "
                "cannot read; name a new folder"
            )
        for table in _TABLES.split(";"):
            run(table)
        run("delete from parts where id not in (select id from tasks)")  # their task never came
        run(f"pragma user_version = {_VERSION}")
        run("commit")
        (found,) = run("pragma quick_check").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError(found)

    def load(self) -> list[Task]:
        """As `Store.load`."""
        with self._explained():
            run = self._database.execute
            parts: dict[tuple[str, str], list[bytes]] = {}
            for key, what, data in run("select id, what, data from parts order by id, what, part"):
                parts.setdefault((key, what), []).append(data)
            self._staged = {each: b"".join(parts[each]) for each in parts}
            rows = run(f"select {', '.join(COLUMNS)} from tasks")  # noqa: S608 - names of ours
            return [task_of(row, self._staged) for row in rows]

    def stage(self, key: str, what: str, body: bytes, part: int) -> bool:
        """As `Store.stage`."""
        data = body[part * PART_BYTES : (part + 1) * PART_BYTES]
        with self._explained():
            run = self._database.execute
            run("replace into parts values (?, ?, ?, ?)", (key, what, part, data))
            if (part + 1) * PART_BYTES < len(body):
                return False
            run("delete from parts where id = ? and what = ? and part > ?", (key, what, part))
        self._staged[key, what] = body
        return True

    def write(self, changes: Changes) -> None:
        """As `Store.write`."""
        database, staged = self._database, self._staged
        with self._explained():
            database.execute("begin")
            try:
                for key, payload, *_ in [task.submission for task in changes.new]:
                    if len(payload) > _ROW_BYTES and staged.get((key, PAYLOAD)) is not payload:
                        parts = itertools.count()
                        while not self.stage(key, PAYLOAD, payload, next(parts)):
                            pass
                database.executemany(_PUT, [row_of(task, staged) for task in changes.new])
                database.executemany(
                    _CHANGE,
                    [(*changing_of(task, staged), task.submission.id) for task in changes.changed],
                )
                removed = [(each,) for each in changes.removed]
                database.executemany("delete from tasks where id = ?", removed)
                if staged:
                    database.executemany("delete from parts where id = ?", removed)
                database.execute("commit")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    database.execute("rollback")
                raise
        for each in changes.removed:
            for what in (PAYLOAD, RESULT):
                staged.pop((each, what), None)

    def is_quick(self, changes: Changes) -> bool:
        """As `Store.is_quick`: 16 small tasks take some 0.2 ms."""
        tasks = (*changes.new, *changes.changed)
        if len(tasks) + len(changes.removed) > _QUICK_TASKS:
            return False
        return sum(map(_size, tasks)) <= _QUICK_BYTES

    def beat(self) -> None:
        """Does nothing: the file is locked."""

    def take_over(self, owner: str, silence_s: float) -> list[Task]:  # noqa: ARG002 - as `Store`
        """Returns nothing: no other broker uses the file."""
        return []

    def close(self) -> None:
        """As `Store.close`."""
        self._database.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            text = str(error)
            if "locked" in text:
                raise StoreInUseError(
                    f"{self._path}: {holder_of(self._path.parents[1])} uses this file; give each search a "
                    "folder of its own, or end the other one"
                ) from error
            if "full" in text or "disk I/O" in text:
                raise StoreError(
                    f"{self._path}: {text}; make room on this disk and start again: all that was "
                    "accepted before is kept"
                ) from error
            raise StoreError(
                f"{self._path}: {text}; if it is damaged, move it away and start again: models send "
                "what has no result yet"
            ) from error


def check_files(folder: Path, seconds: float) -> None:
    """Raises what brokers would over and over, for they are started again.

    Args:
        folder: Of the search.
        seconds: To wait for brokers that use them, and may be about to end.

    Raises:
        StoreInUseError: A broker uses one of them.
        StoreError: One of them is damaged, or others could have put it there.
    """
    give_up_at = time.monotonic() + seconds
    try:
        if folder.exists():
            make_own_folder(folder / BROKERS)
    except OSError as error:
        raise StoreError(f"brokers cannot keep their tasks here: {error}") from error
    for path in (folder / BROKERS).glob("*.sqlite"):
        while True:
            try:
                SqliteStore(path).close()
                break
            except StoreInUseError:
                if time.monotonic() >= give_up_at:
                    raise
                time.sleep(_RETRY_S)
