"""Where a broker keeps its tasks, so that its end loses none."""

import contextlib
import json
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
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


#: A task as a row of a table, in this order.
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


def row_of(task: Task) -> tuple[object, ...]:
    """Returns a task as a row."""
    submission = task.submission
    return (
        submission.id,
        task.number,
        task.owner,
        submission.kind,
        submission.payload,
        submission.priority,
        submission.retries,
        json.dumps(submission.limits),
        *changing_of(task),
    )


def changing_of(task: Task) -> tuple[object, ...]:
    """Returns the values of `CHANGING`."""
    (worker, life), token = task.lease or ((None, None), None)
    outcome = task.outcome
    ended = (
        (None,) * 5
        if outcome is None
        else (
            outcome.state.value,
            outcome.payload,
            _storable(outcome.text),
            outcome.seconds,
            outcome.worker,
        )
    )
    return (worker, life, token, json.dumps(task.errors), task.losses, *ended)


def _storable(text: str) -> str:
    """Returns a text that databases take: messages of exceptions may have anything in them."""
    return text.encode(errors="backslashreplace").decode().replace("\0", "\\0")


def task_of(row: Sequence[Any]) -> Task:
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
        errors,
        losses,
        state,
        result,
        text,
        seconds,
        ran_by,
    ) = row
    submission = Submission(
        key, bytes(payload), kind, priority, retries, Limits(*json.loads(limits))
    )
    task = Task(submission, owner, number)
    if token is not None:
        task.lease = Life(worker, life), token
    task.errors = tuple(json.loads(errors))
    task.losses = losses
    if state is not None:
        ended = State(state)
        attempts = int(ended is not State.FAILED)  # besides errors and losses
        task.outcome = Outcome(key, "", ended, bytes(result), text, seconds, ran_by, attempts)
    return task


_TABLE = """
create table if not exists tasks (
    id text primary key, number integer, owner text, kind text, payload blob, priority real,
    retries integer, limits text, worker text, life text, token text,
    errors text, losses integer, state text, result blob, text text, seconds real, ran_by text
)
"""
_PUT = f"replace into tasks values ({','.join('?' * len(COLUMNS))})"  # noqa: S608 - question marks
_CHANGE = f"update tasks set {', '.join(f'{each} = ?' for each in CHANGING)} where id = ?"  # noqa: S608 - names of ours


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
        run("begin immediate")  # takes the lock, which the end of the process releases
        run(_TABLE)
        run("commit")
        (found,) = run("pragma quick_check").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError(found)

    def load(self) -> list[Task]:
        """As `Store.load`."""
        with self._explained():
            rows = self._database.execute(f"select {', '.join(COLUMNS)} from tasks")  # noqa: S608 - names of ours
            return [task_of(row) for row in rows]

    def write(self, changes: Changes) -> None:
        """As `Store.write`."""
        database = self._database
        with self._explained():
            database.execute("begin")
            try:
                database.executemany(_PUT, map(row_of, changes.new))
                database.executemany(
                    _CHANGE, [(*changing_of(task), task.submission.id) for task in changes.changed]
                )
                database.executemany(
                    "delete from tasks where id = ?", [(each,) for each in changes.removed]
                )
                database.execute("commit")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    database.execute("rollback")
                raise

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
