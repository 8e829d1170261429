"""The tasks of one broker in a file of SQLite."""

import contextlib
import itertools
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

from launchpad_lite.parts.private_files import make_own_folder
from launchpad_lite.search._queue import Changes, QueuedTask
from launchpad_lite.search._resuming import holder_of
from launchpad_lite.search._store import (
    CHANGING,
    COLUMNS,
    PART_BYTES,
    PAYLOAD,
    RESULT,
    Store,
    changing_of,
    row_of,
    task_of,
)
from launchpad_lite.search._timing import RETRY_S
from launchpad_lite.search.errors import StoreError, StoreInUseError

_VERSION = 4
_TABLES = """
create table if not exists tasks (
    id text primary key, number integer, owner text, options text, payload blob, status text, result blob
);
create table if not exists parts (
    id text, what text, part integer, data blob, primary key (id, what, part)
)
"""
_PUT = f"replace into tasks values ({','.join('?' * len(COLUMNS))})"  # noqa: S608 - question marks
_CHANGE = f"update tasks set {', '.join(f'{each} = ?' for each in CHANGING)} where id = ?"  # noqa: S608 - names of ours
#: Larger payloads are not in the row, because SQLite writes the whole row whenever it changes.
_ROW_BYTES = 4096
#: Private, in the folder of a search, which may be shared: the data of brokers is unpickled.
BROKERS = "brokers"
#: Changes of at most so many tasks, with so much data, count as quick to write.
_QUICK_TASKS = 16
_QUICK_BYTES = 1 << 16


class SqliteStore(Store):
    """A file, written by SQLite with a write-ahead log.

    Writes survive the end of the process. A loss of power loses the newest ones; models send such
    tasks again. The file is locked, so no other broker uses it.
    """

    def __init__(self, path: Path) -> None:
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
        run("delete from parts where id not in (select id from tasks)")  # without their task
        run(f"pragma user_version = {_VERSION}")
        run("commit")
        (found,) = run("pragma quick_check").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError(found)

    def load(self) -> list[QueuedTask]:
        with self._explained():
            run = self._database.execute
            parts: dict[tuple[str, str], list[bytes]] = {}
            for key, what, data in run("select id, what, data from parts order by id, what, part"):
                parts.setdefault((key, what), []).append(data)
            self._staged = {each: b"".join(parts[each]) for each in parts}
            rows = run(f"select {', '.join(COLUMNS)} from tasks")  # noqa: S608 - names of ours
            return [task_of(row, self._staged) for row in rows]

    def stage(self, key: str, what: str, body: bytes, part: int) -> bool:
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
        # 16 small tasks take some 0.2 ms.
        tasks = (*changes.new, *changes.changed)
        if len(tasks) + len(changes.removed) > _QUICK_TASKS:
            return False
        size = sum(len(task.submission.payload) for task in tasks)
        size += sum(len(task.outcome.payload) for task in tasks if task.outcome)
        return size <= _QUICK_BYTES

    def close(self) -> None:
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
    """Checks the stores of brokers, which would fail again and again with the same error.

    It waits some seconds for brokers that use them: they may be about to end.
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
                time.sleep(RETRY_S)
