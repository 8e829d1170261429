"""The tasks of all brokers of a search in one PostgreSQL database.

Each broker writes its own rows. A new life of it, and a broker that takes tasks over, end the right
to write of the one before: its next write fails.
"""

import contextlib
import time
import zlib
from collections.abc import Iterator
from typing import Any

from courier.lowlevel import join_address
from launchpad_lite.search._queue import Changes, QueuedTask
from launchpad_lite.search._resuming import process_here
from launchpad_lite.search._store import CHANGING, COLUMNS, Store, changing_of, row_of, task_of
from launchpad_lite.search._timing import RETRY_S
from launchpad_lite.search.errors import StoreError, StoreInUseError

_TABLES = """
create table if not exists search_brokers (
    name text primary key, epoch bigint not null, seen_at timestamptz not null, process text
);
create table if not exists search_tasks (
    broker text, id text, number bigint, owner text, options text, payload bytea, status text, result bytea,
    primary key (broker, id)
);
"""
_NO_SUCH_COLUMN = "42703"
#: Held while tables are made, so that two brokers do not make them at once.
_LOCK = zlib.crc32(b"launchpad_lite.search")
#: Held by the script of a search.
_SEARCH = _LOCK + 1
_HOLDER = """
select 'its script', application_name from pg_locks join pg_stat_activity using (pid)
where locktype = 'advisory' and granted and pg_locks.database = pg_stat_activity.datid and objid = %s
"""
_OPEN = """
insert into search_brokers values (%s, 1, clock_timestamp(), %s)
on conflict (name) do update
    set epoch = search_brokers.epoch + 1, seen_at = clock_timestamp(), process = excluded.process
returning epoch
"""
_CLOSE = "update search_brokers set seen_at = '-infinity' where name = %s and epoch = %s"
_SEEN = """
select name, process from search_brokers
where seen_at > clock_timestamp() - make_interval(secs => %s) order by name
"""
_HOLD = "update search_brokers set seen_at = clock_timestamp() where name = %s and epoch = %s"
_INSERT = (
    f"insert into search_tasks (broker, {', '.join(COLUMNS)}) "  # noqa: S608 - names of ours
    f"values (%s, {', '.join(['%s'] * len(COLUMNS))}) on conflict (broker, id) do "
)
_PUT = f"{_INSERT} update set {', '.join(f'{each} = excluded.{each}' for each in COLUMNS)}"
_CHANGE = (
    f"update search_tasks set {', '.join(f'{each} = %s' for each in CHANGING)} "  # noqa: S608 - as above
    "where broker = %s and id = %s"
)
_DELETE = "delete from search_tasks where broker = %s and id = any(%s)"
_LOAD = f"select {', '.join(COLUMNS)} from search_tasks where broker = %s"  # noqa: S608 - as above
# Waits for locked rows, and reads them again.
_SILENT = """
select name from search_brokers
where name <> %s and seen_at < clock_timestamp() - make_interval(secs => %s)
    and exists (select from search_tasks where broker = name and owner = %s)
order by name for update
"""
_FENCE = "update search_brokers set epoch = epoch + 1 where name = any(%s)"
_TAKE = (
    f"delete from search_tasks where broker = any(%s) and owner = %s returning {', '.join(COLUMNS)}"  # noqa: S608 - as above
)


@contextlib.contextmanager
def held_database(url: str | None, silence_s: float) -> Iterator[None]:
    """Holds a database for one search in a block, if it can be reached from here."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError):
            import psycopg

            with contextlib.suppress(psycopg.Error):  # brokers report what is wrong
                if url is not None:
                    held = psycopg.connect(
                        url, autocommit=True, connect_timeout=10, application_name=process_here()
                    )
                    stack.callback(held.close)
                    _take_hold(held, silence_s)
        yield


def _take_hold(connection: Any, silence_s: float) -> None:
    """Locks a database until the connection is closed, once no other search uses it."""
    give_up_at = time.monotonic() + 2 * silence_s
    while True:
        ((is_mine,),) = connection.execute("select pg_try_advisory_lock(%s)", (_SEARCH,))
        query, argument = (_SEEN, silence_s) if is_mine else (_HOLDER, _SEARCH)
        found = connection.execute(query, (argument,)).fetchone()
        if is_mine and found is None:
            return
        if found is not None and time.monotonic() > give_up_at:
            raise StoreInUseError(
                f"database {connection.info.dbname}: another search uses it, by {found[0]}, "
                f"{found[1]}. End that one, or give each search a database of its own"
            )
        time.sleep(RETRY_S)


class PostgresStore(Store):
    """The rows of one broker. The server's settings decide if they survive a loss of power."""

    def __init__(self, url: str, broker: str) -> None:
        """Connects, and ends the right to write of an earlier life of the broker."""
        try:
            import psycopg
        except ImportError as error:
            raise StoreError(
                f"{broker}: a store in PostgreSQL needs psycopg: pip install 'launchpad-lite[postgres]'"
            ) from error
        self._broker = broker
        self._error = psycopg.Error
        self._where = broker
        with self._explained():
            self._connection = psycopg.connect(
                url,
                autocommit=True,
                connect_timeout=10,
                # Others do not wait for a machine that is lost in the middle of a write.
                options="-c idle_in_transaction_session_timeout=5000",
            )
        info = self._connection.info
        self._where = f"{broker}, database {info.dbname} of {join_address(info.host, info.port)}"
        try:
            with self._explained(), self._connection.transaction():
                run = self._connection.execute
                run("select pg_advisory_xact_lock(%s)", (_LOCK,))
                run(_TABLES)
                ((self._epoch,),) = run(_OPEN, (broker, process_here())).fetchall()
        except BaseException:
            self._connection.close()
            raise

    def load(self) -> list[QueuedTask]:
        with self._explained():
            return [task_of(row) for row in self._connection.execute(_LOAD, (self._broker,))]

    def write(self, changes: Changes) -> None:
        me = self._broker
        with self._held() as cursor:
            if changes.new:
                cursor.executemany(_PUT, [(me, *row_of(task)) for task in changes.new])
            if changes.changed:
                rows = [(*changing_of(task), me, task.submission.id) for task in changes.changed]
                cursor.executemany(_CHANGE, rows)
            if changes.removed:
                cursor.execute(_DELETE, (me, list(changes.removed)))

    def is_quick(self, changes: Changes) -> bool:  # noqa: ARG002 - a server may not answer
        return False

    def beat(self) -> None:
        with self._held():
            pass

    def take_over(self, owner: str, silence_s: float) -> list[QueuedTask]:
        with self._held() as cursor:
            cursor.execute(_SILENT, (self._broker, silence_s, owner))
            silent = [name for (name,) in cursor]
            if not silent:
                return []
            cursor.execute(_FENCE, (silent,))
            rows = cursor.execute(_TAKE, (silent, owner)).fetchall()
            cursor.executemany(f"{_INSERT} nothing", [(self._broker, *row) for row in rows])
        return [task_of(row) for row in rows]

    def close(self) -> None:
        # Another search may use the database at once.
        with contextlib.suppress(self._error):
            self._connection.execute(_CLOSE, (self._broker, self._epoch))
        self._connection.close()

    @contextlib.contextmanager
    def _held(self) -> Iterator[Any]:
        """Begins a transaction, in which no other broker takes the tasks of this one."""
        with self._explained(), self._connection.transaction(), self._connection.cursor() as cursor:
            if cursor.execute(_HOLD, (self._broker, self._epoch)).rowcount == 0:
                raise StoreError(
                    f"{self._where}: its tasks were taken over, by another life of it or by another "
                    "broker after a silence; it ends, and started again has what is still its own. "
                    "If two searches use this database, give each one of its own"
                )
            yield cursor

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except self._error as error:
            if error.sqlstate == _NO_SUCH_COLUMN:
                raise StoreError(
                    f"{self._where}: another version of launchpad-lite has made its tables, which this one "
                    "cannot read; name another database"
                ) from error
            raise StoreError(
                f"{self._where}: {str(error).strip()}; start it again when the database answers: all "
                "that was accepted is kept"
            ) from error
