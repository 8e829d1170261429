"""Where brokers keep their tasks: in a database, where they take over from each other."""

import collections
import contextlib
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import launchpad_lite as lp
from launchpad_lite import search
from launchpad_lite.search._messages import TaskOutcome, TaskState
from launchpad_lite.search._model_node import ModelNode
from launchpad_lite.search._parts import BrokerOptions, add_parts
from launchpad_lite.search._postgres import PostgresStore, held_database
from launchpad_lite.search._queue import Changes
from launchpad_lite.search._timing import Timing
from launchpad_lite.search.errors import StoreError, StoreInUseError
from launchpad_lite.search.tasks import Call
from launchpad_lite.testing import poll_until
from tests.engines import needs_postgres
from tests.launchpad_lite.search.tasks_for_tests import QUICK, Counting, Tasks
from tests.launchpad_lite.search.test_store import new, task

pytestmark = [pytest.mark.slow, needs_postgres, pytest.mark.xdist_group("postgres")]
Open = Callable[[str], PostgresStore]


@pytest.fixture
def open_store(url: str) -> Iterator[Open]:
    opened: list[PostgresStore] = []

    def open_store(broker: str) -> PostgresStore:
        opened.append(PostgresStore(url, broker))
        return opened[-1]

    yield open_store
    for each in opened:
        each.close()


def ids(store: PostgresStore) -> list[str]:
    return sorted(each.submission.id for each in store.load())


def test_tables_of_another_version_are_refused(url: str, open_store: Open) -> None:
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("create table search_tasks (broker text, id text, worker text)")
    with pytest.raises(StoreError, match="another version of launchpad-lite has made its tables"):
        open_store("broker").load()


def test_a_broker_changes_its_own_rows_only(open_store: Open) -> None:
    mine, others = open_store("mine"), open_store("others")
    for store in (mine, others):
        store.write(new(task("1"), task("2"), task("3")))
    mine.write(Changes([task("1", losses=1)], [], ["3"]))
    assert ids(others) == ["1", "2", "3"]
    assert others.load()[0].losses == 0


def test_an_earlier_life_can_write_no_more(open_store: Open) -> None:
    old = open_store("broker")
    old.write(new(task("1")))
    open_store("broker").write(new(task("2")))
    for write in (lambda: old.write(new(task("3"))), old.beat, lambda: old.take_over("model", 0.0)):
        with pytest.raises(
            StoreError, match=r"broker, database test_\w+ of .*: its tasks were taken"
        ):
            write()
    assert ids(old) == ["1", "2"]


def test_tasks_of_a_silent_broker_are_taken_over_and_it_can_write_no_more(open_store: Open) -> None:
    lost, other = open_store("lost"), open_store("other")
    outcome = TaskOutcome("2", "", TaskState.DONE, b"result", worker="worker[0]")
    lost.write(new(task("1"), task("2", outcome=outcome), task("another's", owner="another")))
    assert other.take_over("model", 5.0) == [], "it has just been heard of"
    time.sleep(0.06)
    other.beat()
    found = other.take_over("model", 0.05)
    assert sorted(found, key=lambda each: each.submission.id) == [
        task("1"),
        task("2", outcome=outcome),
    ]
    assert ids(other) == ["1", "2"]
    assert other.take_over("model", 0.0) == []
    with pytest.raises(StoreError, match="after a silence"):
        lost.write(new(task("3")))
    again = open_store("lost")
    assert ids(again) == ["another's"], "what is still its own"
    again.write(new(task("4")))


def test_a_broker_that_shows_itself_keeps_its_tasks(open_store: Open) -> None:
    lively, other = open_store("lively"), open_store("other")
    lively.write(new(task("1")))
    time.sleep(0.3)
    lively.beat()
    assert other.take_over("model", 0.2) == []
    lively.write(new(task("2")))


def test_a_task_that_both_have_stays_as_the_living_one_has_it(open_store: Open) -> None:
    lost, other = open_store("lost"), open_store("other")
    lost.write(new(task("1", losses=1)))
    other.write(new(task("1", losses=2)))
    assert other.take_over("model", 0.0) == [task("1", losses=1)]
    assert other.load() == [task("1", losses=2)]


def test_of_many_that_take_over_at_once_one_gets_each_task(open_store: Open) -> None:
    lost = open_store("lost")
    lost.write(new(*[task(str(number)) for number in range(200)]))
    takers = [open_store(f"taker[{index}]") for index in range(4)]
    found: list[str] = []

    def take(store: PostgresStore) -> None:
        # Only the first one is silent for so long.
        found.extend(each.submission.id for each in store.take_over("model", 0.5))

    poll_until(lambda: all(each.beat() is None for each in takers) and age(lost) > 0.6)
    threads = [threading.Thread(target=take, args=(each,)) for each in takers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted(map(str, range(200)))


def age(store: PostgresStore) -> float:
    """Returns for how long a broker has not shown itself, in seconds."""
    row = store._connection.execute(
        "select extract(epoch from clock_timestamp() - seen_at) from search_brokers where name = %s",
        (store._broker,),
    ).fetchone()
    assert row is not None
    return float(row[0])


def test_a_database_that_does_not_answer_is_named() -> None:
    with pytest.raises(StoreError, match=r"(?s)broker: .*refused.*start it again when"):
        PostgresStore("postgresql://nobody:secret@127.0.0.1:1/none", "broker")


def test_a_broker_takes_over_from_one_that_is_killed_under_load(url: str, tmp_path: Path) -> None:
    count, notes = 1500, tmp_path / "notes"
    timing = Timing(lease_s=4.0, beat_s=0.4, silence_s=1.5, patience_s=1.5, poll_s=1.0)
    program = lp.Program("takeover")
    parts = add_parts(
        program, workers=3, brokers=2, label="search", options=BrokerOptions(timing, database=url)
    )
    model = program.add_node(
        lp.CourierNode(
            ModelNode,
            Counting(count, notes, 0.01),
            parts.name_server,
            parts.brokers,
            timing,
            200,
            True,
        ),
        label="model",
    )
    # What is killed does not come back soon.
    restart = lp.RestartPolicy("on_failure", backoff_s=600, max_backoff_s=600)
    running = lp.launch(program, "test_mp", restart={"search_broker": restart})
    client = model.dereference()
    poll_until(lambda: client.status().done > 200, timeout_s=30)
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute(
            "select broker from search_tasks where owner like 'model%' group by broker"
        ).fetchone()
    assert row is not None
    (pid,) = [node.pid for node in running.status() if node.name == row[0]]
    assert pid is not None
    outstanding = count - client.status().done
    os.kill(pid, signal.SIGKILL)
    poll_until(lambda: client.status().is_over, timeout_s=60)
    told = client.model().told
    running.stop()
    running.wait()
    assert told == collections.Counter(range(count))
    runs = collections.Counter(map(int, notes.read_text().split()))
    assert len(runs) == count
    # Only what workers had at that time is run again.
    again = sum(runs.values()) - count
    assert again < min(outstanding, 200), runs.most_common(3)


def test_a_second_search_is_refused_by_what_holds_the_database(url: str) -> None:
    with store_in_use(url), pytest.raises(StoreInUseError) as refused:
        search.run(Tasks(), database=url, launcher="local_mt", timing=QUICK)
    assert f"another search uses it, by held, process {os.getpid()} on " in str(refused.value)
    run = functools.partial(search.run, database=url, launcher="local_mt", timing=QUICK, workers=1)
    for _ in range(2):  # a search that has ended holds nothing
        assert run(Tasks(Call(abs, -1))).model.results == [1]


def test_of_two_searches_that_begin_at_the_same_time_one_is_refused(url: str) -> None:
    holds, is_over = threading.Barrier(2), threading.Event()
    refused: list[str] = []

    def begin() -> None:
        holds.wait()
        try:
            with held_database(url, 0.3):
                assert is_over.wait(20), "none was refused"
        except StoreInUseError as error:
            refused.append(str(error))
            is_over.set()

    threads = [threading.Thread(target=begin) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 1
    assert f"another search uses it, by its script, process {os.getpid()} on " in refused[0]
    with held_database(url, 0.3):
        pass


def test_tasks_of_a_search_whose_folder_is_another_one_are_given_up(
    url: str, open_store: Open, tmp_path: Path
) -> None:
    store = open_store("search_broker[0]")
    store.write(new(task("old", owner="search_model[0]")))
    store.close()
    model = Tasks(Call(abs, -1))
    run = functools.partial(search.run, launcher="local_mt", timing=QUICK, workers=1)
    assert len(run(model, database=url, folder=tmp_path).trials) == 1
    assert "old" not in ids(open_store("search_broker[0]"))
    assert search.load(tmp_path).state == "complete"


@contextlib.contextmanager
def store_in_use(url: str) -> Iterator[PostgresStore]:
    """Has a broker show that it is there, again and again."""
    store, ended = PostgresStore(url, "held"), threading.Event()

    def beat() -> None:
        while not ended.wait(0.1):
            store.beat()

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield store
    finally:
        ended.set()
        thread.join()
        store.close()
