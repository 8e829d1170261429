"""Map-reduce: lazy datasets, computed by workers that stay up between jobs."""

import asyncio
import collections
import contextlib
import gc
import gzip
import itertools
import linecache
import operator
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, strategies as st

import courier
import launchpad_lite as lp
from launchpad_lite import engines
from launchpad_lite.engines import map_reduce
from launchpad_lite.engines._computing import memory_of
from launchpad_lite.engines._map_reduce_driver import Driver
from launchpad_lite.engines._map_reduce_worker import NotPreparedError
from launchpad_lite.engines._operations import ItemsSource, LinesSource, lines_blocks
from launchpad_lite.engines._store import ChunkStore, MissingError
from launchpad_lite.testing import Fault, Monkey, poll_until
from tests.engines import needs_dask, needs_root, needs_spark
from tests.launchpad_lite.conftest import Run
from tests.launchpad_lite.engines.test_hashing import ODD, Caseless, are_equal


@pytest.fixture(scope="module")
def dask() -> Iterator[engines.MapReduce]:
    import distributed

    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=":0"
        ) as cluster,
        engines.MapReduce(backend="dask", address=cluster.scheduler_address) as engine,
    ):
        yield engine


@pytest.fixture(scope="module")
def spark() -> Iterator[engines.MapReduce]:
    with engines.MapReduce(backend="spark", address="local[2]", memory_bytes=20_000) as engine:
        yield engine


@pytest.fixture(
    params=[
        "in memory",
        "spilled",
        pytest.param("dask", marks=[pytest.mark.slow, pytest.mark.xdist_group("dask"), needs_dask]),
        pytest.param(
            "spark", marks=[pytest.mark.slow, pytest.mark.xdist_group("spark"), needs_spark]
        ),
    ]
)
def mr(request: pytest.FixtureRequest) -> Iterator[engines.MapReduce]:
    """All of these give the same results."""
    if request.param in ("dask", "spark"):
        yield request.getfixturevalue(request.param)
        return
    memory_bytes = 60_000 if request.param == "spilled" else None
    with engines.MapReduce(3, launcher="local_mt", memory_bytes=memory_bytes) as engine:
        yield engine


_PAIRS = [(f"key{number % 97}", number) for number in random.Random(1).sample(range(5000), 3000)]


def test_operations_give_what_plain_python_gives(mr: engines.MapReduce) -> None:
    numbers = mr.load(range(2000))
    assert numbers.map(lambda x: x * x).collect() == [x * x for x in range(2000)]
    assert numbers.filter(lambda x: x % 3).count() == sum(1 for x in range(2000) if x % 3)
    assert numbers.flat_map(lambda x: [x] * (x % 3)).collect() == [
        x for x in range(2000) for _ in range(x % 3)
    ]
    assert sum(numbers.map_partitions(lambda items: [sum(items)]).collect()) == sum(range(2000))
    assert numbers.union(numbers).collect() == [*range(2000), *range(2000)]
    assert numbers.reduce(operator.add) == sum(range(2000))
    assert numbers.fold(lambda text, x: text + str(x % 10), "") == "0123456789" * 200
    assert numbers.fold(operator.add, 0, operator.add) == sum(range(2000))
    # Each partition begins with a copy, also if the function changes it.
    assert numbers.fold(_appended, [], operator.add) == list(range(2000))
    assert numbers.fold(_appended, []) == list(range(2000))
    few = mr.broadcast({3, 5})
    assert numbers.filter(lambda x: x in few.value).collect() == [3, 5]


def test_operations_by_key_give_what_plain_python_gives(mr: engines.MapReduce) -> None:
    pairs = mr.load(_PAIRS)
    groups: dict[str, list[int]] = {}
    for key, value in _PAIRS:
        groups.setdefault(key, []).append(value)
    sums = pairs.reduce_by_key(operator.add)
    assert sorted(sums.collect()) == sorted((key, sum(values)) for key, values in groups.items())
    largest = pairs.reduce_by_key(max, partitions=2)
    assert dict(largest.collect()) == {key: max(values) for key, values in groups.items()}
    assert dict(pairs.group_by_key().collect()) == groups
    other = [(f"key{number}", str(number)) for number in range(50, 150)]
    joined = pairs.join(mr.load(other)).collect()
    assert collections.Counter(joined) == collections.Counter(
        (key, (value, text)) for key, text in other for value in groups.get(key, ())
    )
    # Stable, and of several stages.
    for reverse in (False, True):
        ordered = sorted(_PAIRS, key=operator.itemgetter(0), reverse=reverse)
        assert pairs.sort_by_key(reverse=reverse).collect() == ordered
    assert sums.sort_by_key().map(operator.itemgetter(0)).collect() == sorted(groups)


def _appended(so_far: list[int], x: int) -> list[int]:
    so_far.append(x)
    return so_far


def test_equal_keys_meet_and_others_do_not(mr: engines.MapReduce) -> None:
    pairs = [(key, place) for place, key in enumerate(ODD)]
    groups: list[list[int]] = []
    for key, place in pairs:
        for group in groups:
            if are_equal(key, ODD[group[0]]):
                group.append(place)
                break
        else:
            groups.append([place])
    keyed = mr.load(pairs, partitions=7)
    found = sorted(values for _, values in keyed.group_by_key().collect())
    assert found == sorted(groups)
    joined = [pair for _, pair in keyed.join(keyed).collect()]
    expected = [(left, right) for group in groups for left in group for right in group]
    assert sorted(joined) == sorted(expected)
    counted = keyed.map(lambda pair: (pair[0], 1)).reduce_by_key(operator.add)
    assert sorted(count for _, count in counted.collect()) == sorted(map(len, groups))
    with pytest.raises(engines.TaskError, match=r"Caseless cannot be the type of a key"):
        mr.load([(Caseless("a"), 1)]).group_by_key().count()


class UnsayableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    "error",
    [
        StopIteration,
        GeneratorExit,
        KeyboardInterrupt,
        asyncio.CancelledError,
        SystemExit,
        UnsayableError,
    ],
)
def test_whatever_a_function_raises_is_a_task_error(
    mr: engines.MapReduce, error: type[BaseException]
) -> None:
    def fail(x: Any, *_: Any) -> Any:
        if x == 9:
            raise error
        return x

    def combine(left: int, right: int) -> int:
        return fail(9 if right == 9 else left)

    numbers = mr.load(range(10), partitions=2)  # 9 is the last item of its partition
    chain = numbers
    for _ in range(200):
        chain = chain.map(lambda x: x)
    pairs = numbers.map(lambda x: (0, x))
    for use in (
        lambda: numbers.map(fail).collect(),
        lambda: numbers.filter(lambda x: fail(x) >= 0).collect(),
        lambda: numbers.flat_map(lambda x: [fail(x)]).collect(),
        lambda: numbers.map_partitions(lambda items: [fail(x) for x in [*items, 9]]).collect(),
        lambda: chain.map(fail).collect(),
        lambda: numbers.sort_by(fail).collect(),
        lambda: numbers.reduce(combine),
        lambda: numbers.fold(combine, 0),
        lambda: numbers.map(fail).cache().count(),
        lambda: pairs.reduce_by_key(combine).collect(),
    ):
        with pytest.raises(
            engines.TaskError, match=rf"stage \d .*, partition \d.*: .*{error.__name__}"
        ):
            use()
    if error in (StopIteration, GeneratorExit, UnsayableError):  # others may come from signals
        with pytest.raises(engines.TaskError, match=f"of all partitions: {error.__name__}"):
            numbers.reduce(lambda left, right: fail(9) if right == 35 else left + right)
    assert numbers.count() == 10


def test_what_has_no_order_is_named_and_nan_is_last(mr: engines.MapReduce) -> None:
    keys: list[Any] = list(range(20_000))
    random.Random(1).shuffle(keys)
    for odd in (None, (1, float("nan"))):
        pairs = [(key, 0) for key in [*keys[:100], odd]] if odd else [(key, 0) for key in keys]
        pairs[77] = (odd, 0)
        with pytest.raises(TypeError, match=r"have no order") as caught:
            mr.load(pairs, partitions=1).sort_by_key().collect()
        assert isinstance(caught.value, engines.OrderError)
    nan = [float("nan")] * 9000  # so many that some partitions begin with them
    for reverse in (False, True):
        floats = mr.load([(float(key), key) for key in [*keys[:3000], *nan, *keys[3000:6000]]])
        found = [key for key, _ in floats.sort_by_key(reverse=reverse).collect()]
        assert found[:6000] == sorted(map(float, keys[:6000]), reverse=reverse)
        assert sum(key != key for key in found[6000:]) == len(nan)


def test_what_dask_bag_and_spark_have_gives_what_plain_python_gives(mr: engines.MapReduce) -> None:
    items = [number % 100 for number in random.Random(2).sample(range(1000), 1000)]
    numbers = mr.load(items, partitions=7)
    assert numbers.take(3) == items[:3]
    assert numbers.take(500) == items[:500]
    assert numbers.take(0) == []
    assert numbers.take(10_000) == list(numbers) == items
    assert numbers.first() == items[0]
    assert numbers.top(5) == sorted(items, reverse=True)[:5]
    assert numbers.top(3, key=lambda x: -x) == [0, 0, 0]
    assert sorted(numbers.distinct().collect()) == list(range(100))
    assert numbers.sum() == sum(items)
    assert numbers.mean() == sum(items) / 1000
    assert (numbers.min(), numbers.max()) == (0, 99)
    assert numbers.min(key=lambda x: abs(x - 42)) == 42
    assert numbers.sort_by(lambda x: x % 10).collect() == sorted(items, key=lambda x: x % 10)
    assert numbers.sort_by(str, reverse=True).collect() == sorted(items, key=str, reverse=True)
    assert numbers.zip_with_index().collect() == [(x, place) for place, x in enumerate(items)]
    again = numbers.repartition(5)
    assert len(again.map_partitions(lambda some: [sum(1 for _ in some)]).collect()) == 5
    assert sorted(again.collect()) == sorted(items)


def test_a_sample_has_each_item_with_the_same_probability(mr: engines.MapReduce) -> None:
    numbers = mr.load(range(2000))
    chosen = numbers.sample(0.3).collect()
    assert chosen == numbers.sample(0.3).collect() != numbers.sample(0.3, seed=1).collect()
    assert chosen == sorted(set(chosen))
    assert 450 < len(chosen) < 750  # by chance once in 10**12 times
    assert (numbers.sample(0).count(), numbers.union(numbers).sample(1.0).count()) == (0, 4000)
    with pytest.raises(ValueError, match="fraction is from 0 to 1, not 10"):
        numbers.sample(10)


def test_groups_of_two_datasets_give_what_plain_python_gives(mr: engines.MapReduce) -> None:
    left, right = [("a", 1), ("b", 2), ("a", 3)], [("a", "x"), ("c", "y"), ("a", "z")]
    ours, others = mr.load(left), mr.load(right)
    assert ours.map_values(lambda x: 2 * x).collect() == [("a", 2), ("b", 4), ("a", 6)]
    assert sorted(ours.cogroup(others).collect()) == [
        ("a", ([1, 3], ["x", "z"])),
        ("b", ([2], [])),
        ("c", ([], ["y"])),
    ]
    assert sorted(ours.left_join(others).collect()) == [
        ("a", (1, "x")),
        ("a", (1, "z")),
        ("a", (3, "x")),
        ("a", (3, "z")),
        ("b", (2, None)),
    ]


def test_only_partitions_that_are_needed_are_computed(
    mr: engines.MapReduce, tmp_path: Path
) -> None:
    def note(x: int) -> int:
        (tmp_path / str(x)).touch()
        return x

    numbers = mr.load(range(100), partitions=10).map(note)
    assert numbers.take(15) == list(range(15))
    assert len(list(tmp_path.iterdir())) == 20
    for item in numbers:
        if item == 25:
            break
    assert len(list(tmp_path.iterdir())) == 30
    counts = numbers.map(lambda x: (x % 3, 1)).reduce_by_key(operator.add)
    # Another job may run meanwhile.
    assert sum(value for _, value in counts for _ in range(counts.count())) == 300
    with engines.MapReduce(1, launcher="local_mt") as other:
        one_after_the_other = iter(other.load(range(3)))
        assert next(one_after_the_other) == 0
    del one_after_the_other  # the engine has ended already: that is no error


def test_items_that_a_function_cannot_take_are_set_aside_or_tried_again(
    mr: engines.MapReduce,
) -> None:
    texts = mr.load(["1", "x", "3", ""])
    assert texts.map(int, on_error=lambda text, error: []).collect() == [1, 3]
    parsed = texts.map(int, on_error=lambda text, error: [(text, type(error))])  # type: ignore[list-item]
    assert parsed.filter(lambda item: isinstance(item, tuple)).collect() == [
        ("x", ValueError),
        ("", ValueError),
    ]
    firsts = texts.map(lambda t: next(iter(t)), on_error=lambda text, _: [text or "none"])
    assert firsts.collect() == ["1", "x", "3", "none"]
    with pytest.raises(engines.TaskError, match="ZeroDivisionError"):
        texts.map(int, on_error=lambda text, error: [1 // 0]).collect()


def test_a_chain_may_have_thousands_of_operations(mr: engines.MapReduce) -> None:
    plan = mr.load(range(50))
    for _ in range(2000):
        plan = plan.map(lambda x: x + 1)
    assert plan.collect() == list(range(2000, 2050))
    assert len(plan.explain().splitlines()) == 2001
    assert len(plan.explain("mermaid").splitlines()) == 1 + 2001 + 2000
    mixed = mr.load(range(50))
    for number in range(200):
        mixed = mixed.flat_map(lambda x: [x, x + 1]).filter(lambda x, odd=number % 2: x % 2 == odd)
    expected = list(range(50))
    for number in range(200):
        pairs = [y for x in expected for y in (x, x + 1)]
        expected = [x for x in pairs if x % 2 == number % 2]
    assert mixed.collect() == expected
    bad = plan.map(lambda x: 1 // (x - 2007))
    with pytest.raises(engines.TaskError, match=r"items\(50\) → .* 1994 more → .* ZeroDivision"):
        bad.collect()


def test_a_shuffle_spreads_items_at_random_and_by_its_seed(mr: engines.MapReduce) -> None:
    numbers = mr.load(range(1000))
    once, again, other = (numbers.shuffle(seed).collect() for seed in (1, 1, 2))
    assert sorted(once) == list(range(1000))
    assert once == again != other
    assert once != list(range(1000))


@given(text=st.text(alphabet="ab\n\ré€", max_size=60), block_bytes=st.integers(1, 70))
def test_files_are_cut_into_blocks_at_line_ends(
    tmp_path_factory: pytest.TempPathFactory, text: str, block_bytes: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "cut.txt"
    path.write_bytes(text.encode())
    blocks = lines_blocks([path], block_bytes)
    lines = LinesSource("lines", len(blocks), blocks=blocks)
    found = [line for number in range(len(blocks)) for line in lines.compute(number)]
    expected = text.split("\n")
    if not expected[-1]:
        expected.pop()
    assert found == [line.removesuffix("\r") for line in expected]


def test_files_are_found_by_pattern_and_unpacked(mr: engines.MapReduce, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\r\n")
    (tmp_path / "b.txt").write_text("three")
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"four\nfive\n"))
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder.txt").mkdir()
    lines = mr.load(f"{tmp_path}/*.txt*", block_bytes=2)
    assert lines.collect() == ["one", "two", "three", "four", "five"]
    (tmp_path / "b.txt").unlink()
    with pytest.raises(engines.TaskError, match=r"b\.txt bytes \d-\d\): FileNotFoundError"):
        lines.collect()
    with pytest.raises(FileNotFoundError, match=r"no file matches '.*\.csv'$"):
        mr.load(tmp_path / "*.csv")
    with pytest.raises(FileNotFoundError, match=rf"it is a folder: write '{tmp_path}/\*'"):
        mr.load(tmp_path)


def test_names_of_files_are_items_and_it_is_said_so(mr: engines.MapReduce, tmp_path: Path) -> None:
    paths = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for path in paths:
        path.touch()
    names = list(map(str, paths))
    with pytest.warns(UserWarning, match=r"load has '.*a\.txt' as an item, not as a file") as told:
        assert mr.load(names).collect() == names
    assert told[0].filename == __file__
    assert mr.load(paths).collect() == paths
    assert mr.load(["a" * 10_000, "\0"]).count() == 2


def test_each_partition_is_saved_as_one_file(mr: engines.MapReduce, tmp_path: Path) -> None:
    numbers = mr.load(range(100), partitions=3)
    paths = numbers.save(tmp_path / "out", line=lambda x: f"<{x}>")
    assert sorted(path.name for path in paths) == ["part-00000", "part-00001", "part-00002"]
    assert sorted((tmp_path / "out").iterdir()) == sorted(paths)
    assert "".join(path.read_text() for path in paths) == "".join(f"<{x}>\n" for x in range(100))
    with pytest.raises(FileExistsError, match="has part-00000 already"):
        numbers.save(tmp_path / "out")
    with pytest.raises(engines.TaskError, match="ZeroDivisionError"):
        numbers.map(lambda x: 1 // (50 - x)).save(tmp_path / "failed")
    assert not list((tmp_path / "failed").iterdir())
    assert len(numbers.save(tmp_path / "failed")) == 3


def test_what_is_cached_is_computed_once(mr: engines.MapReduce, tmp_path: Path) -> None:
    computed = tmp_path / "computed"

    def note(x: int) -> tuple[int, int]:
        with computed.open("a") as file:
            file.write(f"{x}\n")
        return x % 7, x

    cached = mr.load(range(100)).map(note).reduce_by_key(operator.add).cache()
    for _ in range(3):
        assert cached.count() == 7
        assert cached.map(operator.itemgetter(1)).reduce(operator.add) == sum(range(100))
    assert sorted(map(int, computed.read_text().split())) == list(range(100))
    cached.uncache()
    assert cached.count() == 7
    assert len(computed.read_text().split()) == 200


def test_what_was_cached_of_a_partition_that_failed_does_not_count(
    mr: engines.MapReduce, tmp_path: Path
) -> None:
    def fail_once(x: int) -> int:
        if x == 9000 and not (tmp_path / "failed").exists():
            (tmp_path / "failed").touch()
            raise RuntimeError("once")
        return x

    cached = mr.load(range(10_000), partitions=1).map(fail_once).cache()
    with pytest.raises(engines.TaskError, match="once"):
        cached.count()
    assert cached.count() == 10_000


def test_what_is_cached_outlives_what_it_was_computed_from(mr: engines.MapReduce) -> None:
    first = mr.load(_PAIRS).reduce_by_key(operator.add).cache()
    second = first.map(operator.itemgetter(1)).cache()
    total = sum(value for _, value in _PAIRS)
    assert second.reduce(operator.add) == total
    first.uncache()
    assert second.reduce(operator.add) == total
    assert sum(value for _, value in first.collect()) == total


def test_nodes_that_share_workers_do_not_share_data(tmp_path: Path) -> None:
    program = lp.Program("two")
    mr = engines.MapReduce.add_to(program, workers=2)
    for number in range(2):
        program.add_node(lp.PyNode(_keep_cached, mr, number, tmp_path), label=f"node{number}")
    lp.launch(program, "test_mp").wait()
    assert [(tmp_path / name).read_text() for name in "01"] == [
        "[0, 1, 2, 3]",
        "[100, 101, 102, 103]",
    ]


def _keep_cached(mr: engines.MapReduce, number: int, folder: Path) -> None:
    items = mr.load(range(100 * number, 100 * number + 4), partitions=2).cache()
    (folder / str(number)).write_text(str(items.collect()))


def test_workers_drop_what_a_driver_left_that_was_killed(tmp_path: Path) -> None:
    program = lp.Program("killed")
    mr = engines.MapReduce.add_to(program, workers=2, memory_bytes=1000, spill_folder=tmp_path)
    program.add_node(lp.PyNode(_cache_and_die, mr, tmp_path), label="driver")
    restart = {"driver": lp.RestartPolicy("on_failure", max_restarts=1, max_backoff_s=0.1)}
    lp.launch(program, "test_mp", restart=restart).wait()
    assert [path.name for path in tmp_path.iterdir()] == ["was here"]


def _cache_and_die(mr: engines.MapReduce, folder: Path) -> None:
    pids = set(mr.load(range(100)).map(lambda _: os.getpid()).collect())

    def spilled() -> list[str]:
        files = []
        for link in [each for pid in pids for each in Path(f"/proc/{pid}/fd").iterdir()]:
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                files.append(str(link.readlink()))
        return [file for file in files if file.startswith(f"{folder}/")]

    if not (folder / "was here").exists():
        with mr:
            mr.load(range(10_000)).cache().count()
            assert spilled()
        poll_until(lambda: not spilled())
        with mr:
            mr.load(range(10_000)).cache().count()
            assert spilled()
            (folder / "was here").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    poll_until(lambda: not spilled())


def test_a_broadcast_and_a_cache_survive_a_worker_that_was_lost_between_jobs() -> None:
    with engines.MapReduce(2, launcher="test_mp") as mr:
        few = mr.broadcast({3, 5})
        pids = mr.load(range(8)).map(lambda _: os.getpid())
        cached = mr.load(_PAIRS).reduce_by_key(operator.add).cache()
        chosen = mr.load(range(100)).filter(lambda x: x in few.value)
        for _ in range(3):
            assert cached.count() == 97
            assert chosen.collect() == [3, 5]
            os.kill(pids.collect()[0], signal.SIGKILL)


def test_nothing_is_added_to_what_was_dropped_or_read_of_it() -> None:
    owner = 1
    store = ChunkStore(None, "life")
    with pytest.raises(MissingError, match="life"):
        store.add(owner, 0, b"early")
    store.open(owner)
    for _ in range(5):
        store.add(owner, 0, b"12345")
    other, reading = store.stream(owner, 0), store.stream(owner, 0)
    assert next(reading) == b"12345"
    store.drop(owner)
    store.open(owner)  # by another task
    with pytest.raises(MissingError):
        next(reading)
    assert list(other) == []  # begun later
    store.drop_all()
    with pytest.raises(MissingError):
        store.add(owner, 0, b"late")


class Restarted:
    """A worker that was started again after two tasks were sent to it; their answers come apart."""

    def __init__(self) -> None:
        self.lives = 0
        self.left: list[str] = []
        self._has_begun = threading.Event()

    async def stay(self) -> AsyncIterator[str]:
        self.lives += 1
        life = str(self.lives)
        try:
            yield life
            await asyncio.Event().wait()
        finally:
            self.left.append(life)

    def prepare(self, life: str, job: str, payload: bytes, broadcasts: Sequence[str]) -> None:
        pass

    def forget(self, life: str, jobs: Sequence[str], owners: Sequence[int]) -> None:
        pass

    def compute(self, life: str, task: Any) -> str:
        if life == "1":
            if task.step.partition == 1:  # looked at when the next life has a task already
                self._has_begun.wait()
            raise NotPreparedError(task.job)
        self._has_begun.set()
        return f"{life} {task.step.partition}"


def test_an_answer_of_an_old_life_does_not_end_the_new_one() -> None:
    worker = Restarted()
    with courier.Server(worker) as server:
        client = courier.Client(server.address)
        driver = Driver([client], lambda *_: None)
        plan = ItemsSource("items", 3, chunks=(b"", b"", b""))
        assert driver.run(plan, _none, "test") == ["2 0", "2 1", "2 2"]
        poll_until(lambda: worker.left == ["1"])
        driver.close()
        poll_until(lambda: worker.left == ["1", "2"])


def _none(partition: int, items: Iterator[Any]) -> None:
    pass


_POINT = """
import dataclasses, enum, operator
from launchpad_lite import engines

@dataclasses.dataclass(frozen=True)
class Point:
    x: int

class Colour(enum.Enum):
    RED = 1

if __name__ == "__main__":
    with engines.MapReduce(2, progress=False) as mr:
        points = mr.load(range(10)).map(lambda x: (x % 2, Point(x)))
        print(sorted((key, len(group)) for key, group in points.group_by_key().collect()))
        keys = mr.load([(Point(1), 1), (Colour.RED, 1)] * 5).union(points.map(lambda p: (p[1], 1)))
        print(sorted(count for _, count in keys.reduce_by_key(operator.add).collect()))
"""


def test_items_may_be_of_a_class_in_a_script(run_script: Run) -> None:
    done = run_script(_POINT)
    assert "[(0, 5), (1, 5)]" in done.stdout, done.stderr
    assert "[1, 1, 1, 1, 1, 1, 1, 1, 1, 5, 6]" in done.stdout, done.stderr
    assert "map_reduce: completed; logs in" in done.stderr


def test_a_long_stage_prints_a_line_now_and_then_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with engines.MapReduce(2, launcher="local_mt") as mr:
        mr.load(range(4), partitions=2).count()
        assert "stage" not in capsys.readouterr().err  # it did not take long
        monkeypatch.setattr(map_reduce, "_LINE_S", 0.0)
        mr.load(range(4), partitions=2).count()
    assert "2/2 items(4) → count\n" in capsys.readouterr().err


_LOCK = threading.Lock()


class Held:
    """Something whose copies in this process can be counted."""

    alive: "weakref.WeakSet[Held]" = weakref.WeakSet()
    sent = 0

    def __init__(self) -> None:
        self.alive.add(self)

    def __reduce__(self) -> Any:
        Held.sent += 1
        return Held, ()


def test_a_broadcast_reaches_each_worker_once() -> None:
    Held.sent = 0
    with engines.MapReduce(2, launcher="local_mt") as mr:
        value = mr.broadcast([Held(), {3, 5}])
        for _ in range(4):
            assert mr.load(range(100)).filter(lambda x: x in value.value[1]).collect() == [3, 5]
    assert Held.sent <= 2


def test_workers_drop_a_broadcast_that_nobody_refers_to() -> None:
    with engines.MapReduce(2, launcher="local_mt") as mr:
        for _ in range(3):
            value = mr.broadcast(Held())
            kept = mr.broadcast(7)
            found = mr.load(range(8)).map(lambda x, a=value, b=kept: (x, a.value, b.value)[2])
            assert found.collect() == [7] * 8
        del value, found

        def are_gone() -> bool:
            assert mr.load(range(8)).map(lambda _, b=kept: b.value).collect() == [7] * 8
            gc.collect()
            return not Held.alive

        poll_until(are_gone)


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (
            lambda d: d.map(lambda x: 1 // (x - 7)).collect(),
            engines.TaskError,
            r"\S: stage 1 .*map\(<lambda>\) → collect\), partition \d+: ZeroDivisionError: [\w ]+ \(.*:\d+ in <.*\)$",
        ),
        (lambda d: d.map(lambda _: _LOCK).count(), TypeError, r"map\(<lambda>\)"),
        (
            lambda d: d.map_partitions(lambda _: [threading.Lock()]).collect(),
            engines.TaskError,
            r"stage 1 \(.*→ collect\), partition \d+: .*cannot pickle '_thread.lock'",
        ),
        (
            lambda d: d.map(lambda x: (x, threading.Lock())).group_by_key().count(),
            engines.TaskError,
            r"stage 1 \(.*→ group_by_key\), partition \d+: .*cannot pickle '_thread.lock'",
        ),
        (lambda d: d.filter(lambda _: False).reduce(max), engines.EmptyError, "has no items"),
        (lambda d: d.filter(lambda _: False).first(), engines.EmptyError, "has no items"),
        (lambda d: d.filter(lambda _: False).mean(), engines.EmptyError, "has no items"),
        (lambda d: d.map(None), TypeError, "map takes a function, not None"),
        (
            lambda d: d.map(int, on_error="skip"),
            TypeError,
            "map: on_error takes a function, not 'skip'",
        ),
        (
            lambda d: d.flat_map(lambda _: (next(iter([])) for _ in "a")).count(),
            engines.TaskError,
            r"RuntimeError: generator raised StopIteration \(.*test_map_reduce\.py:\d+ in <",
        ),
        (
            lambda d: d.map(lambda x: d.count()).count(),
            TypeError,
            "cannot be used in the functions",
        ),
        (lambda d: d.map(lambda x: sys.exit(1)).count(), engines.TaskError, "SystemExit: 1"),
        (lambda d: d.uncache(), ValueError, r"items\(10\) is no dataset that cache"),
        (lambda d: d.union([1]), TypeError, "expected a Dataset"),
        (lambda d: d.shuffle(partitions=0), ValueError, "partitions is a number from 1, not 0"),
        (
            lambda d: d.map(lambda x: ([x], x)).reduce_by_key(max).count(),
            engines.TaskError,
            "unhashable",
        ),
        (lambda d: d.explain("dot"), ValueError, "'text' and 'mermaid', not 'dot'"),
    ],
)
def test_what_goes_wrong_is_named(
    mr: engines.MapReduce, use: Callable[[Any], object], error: type[Exception], message: str
) -> None:
    dataset = mr.load(range(10), partitions=2)
    with pytest.raises(error, match=message):
        use(dataset)
    assert dataset.count() == 10  # the engine is as good as before


_PARSE = """
def parse(text):
    return int(text)  # a comment
"""


def test_an_error_shows_file_and_line_of_a_script_that_workers_do_not_have(
    mr: engines.MapReduce, tmp_path: Path
) -> None:
    script, names = tmp_path / "script.py", {"__name__": "__main__"}
    script.write_text(_PARSE)
    exec(compile(_PARSE, script, "exec"), names)
    linecache.getlines(str(script))
    script.unlink()
    shown = re.escape(f"({script}:3 in parse: return int(text)  # a comment)")
    with pytest.raises(engines.TaskError, match=rf"'x' {shown}$"):
        mr.load(["1", "x"]).map(names["parse"]).collect()  # type: ignore[arg-type]


def test_an_engine_that_does_not_run_or_makes_no_sense_is_refused() -> None:
    with pytest.raises(engines.EngineError, match="use the engine in a `with` block"):
        engines.MapReduce(1).load([1]).collect()
    with pytest.raises(ValueError, match="workers is at least 1, not -1"):
        engines.MapReduce(-1)
    with pytest.raises(ValueError, match="memory_bytes is at least 1"):
        engines.MapReduce(1, memory_bytes=0)
    with pytest.raises(ValueError, match="'launchpad_lite', 'dask' or 'spark', not 'ray'"):
        engines.MapReduce(backend="ray")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="address is for backend='dask'"):
        engines.MapReduce(address="tcp://host:8786")
    with pytest.raises(ValueError, match="backend='spark' launches nothing; it takes address="):
        engines.MapReduce(backend="spark", hosts="hosts.toml")
    with (
        engines.MapReduce(1, launcher="local_mt") as one,
        engines.MapReduce(1, launcher="local_mt") as two,
        pytest.raises(ValueError, match="different MapReduce engines"),
    ):
        one.load([1]).union(two.load([2]))


class Large:
    """An item of 1 MB; counts how many are there at a time."""

    most = 0
    alive: "weakref.WeakSet[Large]" = weakref.WeakSet()

    def __init__(self, number: int) -> None:
        self.number = number
        self._data = bytes([number]) * 1_000_000
        self.alive.add(self)
        Large.most = max(self.most, len(self.alive))

    def __reduce__(self) -> Any:
        return _rebuilt, (self.number, self._data)


def _rebuilt(number: int, _: bytes) -> Large:
    return Large(number)


def _text(number: int) -> Any:
    return f"key{number * 7919 % 1000003:08}", "word " * 12 + str(number)


def _number(number: int) -> Any:
    return number * 7919 % 1000003, number * 1.5


def _nested(number: int) -> Any:
    return number, {"name": str(number), "at": {"x": number, "y": number + 0.5}, "tags": ["a", "b"]}


def _array(number: int) -> Any:
    import numpy as np

    return number, np.arange(256) + number


@pytest.mark.parametrize("make", [_text, _number, _nested, _array])
def test_the_memory_of_items_is_measured(make: Callable[[int], Any]) -> None:
    make(0)
    tracemalloc.start()
    items = [make(number) for number in range(20_000)]
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.8 < memory_of(items) / taken < 1.25


def test_what_items_have_in_common_counts_once() -> None:
    common = [str(number) for number in range(10_000)]
    alone = memory_of([common])
    assert memory_of([(number, common) for number in range(1000)]) < 1.5 * alone


class Fields:
    """Has attributes by name; raises KeyError for others."""

    def __init__(self, **fields: object) -> None:
        self.__dict__["fields"] = fields

    def __getattr__(self, name: str) -> object:
        return self.__dict__["fields"][name]


def test_memory_is_measured_without_the_attributes_that_a_class_makes() -> None:
    assert memory_of([Fields(x="a" * 10_000)]) > 10_000


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.parametrize(
    ("make", "count"), [(_text, 300_000), (_number, 600_000), (_nested, 100_000), (_array, 30_000)]
)
def test_a_worker_takes_no_more_memory_than_its_limit_and_a_half(
    make: Callable[[int], Any], count: int
) -> None:
    def peak_mib(_: int) -> float:
        make(0)  # what it imports counts as the interpreter
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024

    with engines.MapReduce(1, launcher="test_mp", memory_bytes=32 << 20) as mr:
        [before] = mr.load([0]).map(peak_mib).collect()
        starts = mr.load(range(8), partitions=4)
        items = starts.flat_map(lambda start: map(make, range(start, count, 8)))
        assert items.sort_by_key(partitions=4).count() == count
        assert items.group_by_key(partitions=4).count() <= count
        [after] = mr.load([0]).map(peak_mib).collect()
    assert after - before <= 1.5 * 32


@pytest.mark.parametrize("how", ["cache", "sort_by_key"])
def test_what_was_spilled_is_read_back_in_parts(how: str) -> None:
    with engines.MapReduce(1, launcher="local_mt", memory_bytes=64_000_000) as mr:
        numbers = mr.load(range(100), partitions=1).map(lambda x: (-x, Large(x)))
        plan = numbers.cache() if how == "cache" else numbers.sort_by_key(partitions=1)
        assert plan.count() == 100
        Large.most = 0
        assert plan.map(lambda pair: pair[1].number).reduce(operator.add) == sum(range(100))
        assert Large.most <= 32


def test_a_disk_that_takes_nothing_is_named() -> None:
    with engines.MapReduce(1, launcher="local_mt", memory_bytes=100, spill_folder="/nowhere") as mr:
        pairs = mr.load(range(1000)).map(lambda x: (x, x))
        with pytest.raises(
            engines.SpillError, match=r"worker\[0\]: .* spilled to /nowhere: .*No such"
        ):
            pairs.group_by_key().collect()


@pytest.mark.slow
@needs_root
def test_a_full_disk_is_named_and_the_engine_goes_on(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", tmp_path], check=True)
    try:
        with engines.MapReduce(
            2, launcher="local_mt", memory_bytes=20_000, spill_folder=tmp_path
        ) as mr:
            pairs = mr.load(range(100_000)).map(lambda x: (x, x))
            for _ in range(2):
                with pytest.raises(engines.SpillError, match=f"spilled to {tmp_path}: .*No space"):
                    pairs.group_by_key().collect()
                assert pairs.filter(lambda pair: pair[0] < 3000).group_by_key().count() == 3000
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_plan_is_explained() -> None:
    with engines.MapReduce(2, launcher="local_mt") as mr:
        counts = (
            mr.load(["a b"]).flat_map(str.split).map(lambda w: (w, 1)).reduce_by_key(operator.add)
        )
        assert counts.explain() == (
            "reduce_by_key(add)  [8]  <- all partitions\n"
            "  map(<lambda>)  [1]\n"
            "    flat_map(split)  [1]\n"
            "      items(1)  [1]"
        )
        lines = counts.explain("mermaid").splitlines()
    assert lines[0] == "flowchart LR"
    assert sum("==>" in line for line in lines) == 1
    assert sum("-->" in line for line in lines) == 2


class AlarmError(Exception):
    """Raised by the handler of a signal."""


_LONG = threading.Event()


def _wait_long(_: int) -> bool:
    return _LONG.wait(60)


def _raise_alarm(*_: object) -> None:
    raise AlarmError


@pytest.mark.parametrize("launcher", ["test_mp", "local_mt"])
def test_an_action_that_is_interrupted_leaves_nothing_that_others_wait_for(
    launcher: str, caplog: pytest.LogCaptureFixture
) -> None:
    previous = signal.signal(signal.SIGALRM, _raise_alarm)
    try:
        with engines.MapReduce(2, launcher=launcher) as mr:
            cached = mr.load(range(100)).map(lambda x: x + 1).cache()
            assert cached.count() == 100
            forever = mr.load([0]).map(_wait_long)
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            began = time.monotonic()
            with pytest.raises(AlarmError):
                forever.collect()
            assert time.monotonic() - began < 30  # not until the task ends
            if launcher == "local_mt":
                assert "is a thread of this process and cannot be ended" in caplog.text
                _LONG.set()
            assert cached.count() == 100
            assert mr.load(range(100)).count() == 100
    finally:
        signal.signal(signal.SIGALRM, previous)


_INTERRUPTED = """
import os, signal, threading, time
from launchpad_lite import engines

if __name__ == "__main__":
    with engines.MapReduce(1, progress=False) as mr:
        cached = mr.load(range(10)).cache()
        print(cached.count())
        threading.Timer(1, os.killpg, (0, signal.SIGINT)).start()
        began = time.monotonic()
        try:
            mr.load([0]).map(lambda _: time.sleep(60)).collect()
        except KeyboardInterrupt:
            print("interrupted", time.monotonic() - began < 2)
        print(cached.count())
"""


@pytest.mark.slow
def test_a_ctrl_c_interrupts_an_action_and_the_engine_goes_on(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_INTERRUPTED)
    done = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        start_new_session=True,
    )
    own = [line for line in done.stdout.splitlines() if not line.startswith("[worker")]
    assert own == ["10", "interrupted True", "10"], done.stderr


class Counting:
    """Counts words in a node, again and again."""

    def __init__(self, mr: engines.MapReduce, folder: Path) -> None:
        self._mr = mr
        self._folder = folder

    def run(self) -> None:
        words = [f"word{number % 89}" for number in range(20_000)]
        expected = collections.Counter(words)
        cached = self._mr.load(words, partitions=16).map(lambda word: (word, 1)).cache()
        for number in itertools.count():
            counts = cached.reduce_by_key(operator.add)
            assert dict(counts.collect()) == expected
            assert counts.join(counts).count() == len(expected)
            (self._folder / "jobs").write_text(str(2 * number))
            if (self._folder / "stop").exists():
                return


@pytest.mark.slow
def test_workers_are_killed_at_random_and_each_item_counts_once(tmp_path: Path) -> None:
    program = lp.Program("counting")
    mr = engines.MapReduce.add_to(program, workers=3, memory_bytes=200_000)
    program.add_node(lp.CourierNode(Counting, mr, tmp_path), label="counting")
    restart = lp.RestartPolicy("on_failure", max_restarts=100, max_backoff_s=0.2)
    running = lp.launch(program, "test_mp", restart={"map_reduce": restart})
    poll_until((tmp_path / "jobs").exists)
    faults, labels = (Fault.KILL,), ["map_reduce"]
    with Monkey(running, seed=2, faults=faults, labels=labels, mean_interval_s=0.3) as monkey:
        poll_until(lambda: len(monkey.injected) >= 12, timeout_s=60)
    (tmp_path / "stop").touch()
    assert running.wait().outcome is lp.Outcome.COMPLETED
    assert int((tmp_path / "jobs").read_text()) > 0


@pytest.mark.slow
def test_code_that_ends_its_worker_is_named_and_the_engine_goes_on() -> None:
    with engines.MapReduce(2, launcher="test_mp") as mr:
        numbers = mr.load(range(20))
        for partition in range(3, 5):
            bad = 20 * partition // 8
            with pytest.raises(
                engines.TaskError, match=rf"partition {partition} of .* may be what ends them"
            ):
                numbers.map(lambda x, bad=bad: os._exit(1) if x == bad else x).collect()
        assert numbers.count() == 20


_HERE = """
import psutil
from launchpad_lite import engines

if __name__ == "__main__":
    with engines.MapReduce(2, backend={backend!r}) as mr:
        print(mr.load(range(10)).map(lambda x: 2 * x).reduce(max))
        print(*(child.pid for child in psutil.Process().children(recursive=True)))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", [pytest.param("dask", marks=needs_dask), pytest.param("spark", marks=needs_spark)]
)
def test_backends_run_on_this_machine_without_an_address_and_leave_nothing(
    backend: str, run_script: Run
) -> None:
    done = run_script(_HERE.format(backend=backend))
    result, children = done.stdout.splitlines()
    assert result == "18", done.stderr
    assert len(children.split()) >= 2
    poll_until(lambda: not any(map(psutil.pid_exists, map(int, children.split()))))
