"""Map-reduce: lazy datasets, computed by workers that stay up between jobs."""

import collections
import contextlib
import gc
import gzip
import itertools
import operator
import os
import random
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, strategies as st

import launchpad_lite as lp
from launchpad_lite import engines
from launchpad_lite.engines import map_reduce
from launchpad_lite.engines._operations import Lines, lines_blocks, stable_hash
from launchpad_lite.testing import Fault, Monkey, poll_until
from tests.engines import needs_dask, needs_root, needs_spark


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
    memory_bytes = 20_000 if request.param == "spilled" else None
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


@given(
    text=st.text(alphabet="ab\n\ré€", max_size=60),
    block_bytes=st.integers(1, 70),
)
def test_files_are_cut_into_blocks_at_line_ends(
    tmp_path_factory: pytest.TempPathFactory, text: str, block_bytes: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "cut.txt"
    path.write_bytes(text.encode())
    blocks = lines_blocks([path], block_bytes)
    lines = Lines("lines", len(blocks), blocks=blocks)
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
    with pytest.raises(FileNotFoundError, match=r"no file matches '.*\.csv'"):
        mr.load(tmp_path / "*.csv")


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
    assert not list((tmp_path / "failed").glob(".*"))


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


def test_keys_without_an_order_are_there_once(mr: engines.MapReduce) -> None:
    nan = float("nan")
    pairs = [(nan if number % 3 else float(number), number) for number in range(200)]
    found = mr.load(pairs).sort_by_key().collect()
    assert sorted(value for _, value in found) == list(range(200))
    sets = [(frozenset([number % 8, number % 8 + 8]), number) for number in range(64)]
    sets += [(frozenset([number % 8 + 8, number % 8]), number) for number in range(64)]
    assert mr.load(sets).group_by_key().count() == 8


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


_POINT = """
import dataclasses, operator
from launchpad_lite import engines

@dataclasses.dataclass
class Point:
    x: int

if __name__ == "__main__":
    with engines.MapReduce(2, progress=False) as mr:
        points = mr.load(range(10)).map(lambda x: (x % 2, Point(x)))
        print(sorted((key, len(group)) for key, group in points.group_by_key().collect()))
"""


def test_items_may_be_of_a_class_in_a_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_POINT)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert "[(0, 5), (1, 5)]" in done.stdout, done.stderr
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


_SENT: list[str] = []
_LOCK = threading.Lock()


class Sent:
    def __reduce__(self) -> Any:
        _SENT.append("once more")
        return Sent, ()


def test_a_broadcast_reaches_each_worker_once() -> None:
    _SENT.clear()
    with engines.MapReduce(2, launcher="local_mt") as mr:
        value = mr.broadcast([Sent(), {3, 5}])
        for _ in range(4):
            assert mr.load(range(100)).filter(lambda x: x in value.value[1]).collect() == [3, 5]
    assert len(_SENT) <= 2


class Held:
    """Something whose copies in this process can be counted."""

    alive: "weakref.WeakSet[Held]" = weakref.WeakSet()

    def __init__(self) -> None:
        self.alive.add(self)

    def __reduce__(self) -> Any:
        return Held, ()


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
            r"\S: stage 1 .*map\(<lambda>\) → collect\), partition \d+: ZeroDivisionError: [\w ]+$",
        ),
        (
            lambda d: d.map(lambda _: _LOCK).count(),
            TypeError,
            r"map\(<lambda>\)",
        ),
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
        (lambda d: d.map(None), TypeError, "map takes a function, not None"),
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
    mr: engines.MapReduce,
    use: Callable[[Any], object],
    error: type[Exception],
    message: str,
) -> None:
    dataset = mr.load(range(10), partitions=2)
    with pytest.raises(error, match=message):
        use(dataset)
    assert dataset.count() == 10  # the engine is as good as before


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


@given(st.recursive(st.none() | st.text() | st.binary() | st.integers() | st.floats(), st.tuples))
def test_equal_keys_have_the_same_hash(key: Any) -> None:
    assert stable_hash(key) == stable_hash(key)
    assert stable_hash(1) == stable_hash(1.0) == stable_hash(True)


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
    backend: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(_HERE.format(backend=backend))
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=60, check=False
    )
    result, children = done.stdout.splitlines()
    assert result == "18", done.stderr
    assert len(children.split()) >= 2
    poll_until(lambda: not any(map(psutil.pid_exists, map(int, children.split()))))
