"""Map-reduce: lazy datasets, computed by workers that stay up between jobs.

After Dean and Ghemawat, "MapReduce" (CACM 2008), with the operations of the Actor engine of Owl
("OCaml Scientific Computing"), and lineage in place of replicas: Zaharia et al., "Resilient
Distributed Datasets" (NSDI 2012).
"""

import copy
import functools
import heapq
import itertools
import math
import operator
import os
import random
import shutil
import signal
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import launchpad_lite as lp
from launchpad_lite.engines._computing import JobStage
from launchpad_lite.engines._jobs import Backend, Broadcast, dump
from launchpad_lite.engines._map_reduce_driver import Driver
from launchpad_lite.engines._map_reduce_worker import MapReduceWorker
from launchpad_lite.engines._operations import (
    Cached,
    ItemsSource,
    LinesSource,
    Narrow,
    Operation,
    Shuffled,
    Some,
    Union,
    lines_blocks,
    operations_of,
    shuffles_of,
    sort,
)
from launchpad_lite.engines._user_code import Named
from launchpad_lite.engines.errors import EmptyError, EngineError
from launchpad_lite.parts.arguments import name_of

if TYPE_CHECKING:
    from launchpad_lite.launching import Launcher

A = TypeVar("A")
B = TypeVar("B")
K = TypeVar("K")
V = TypeVar("V")
N = TypeVar("N", int, float)

#: Text files are cut into blocks of so many bytes.
_BLOCK_BYTES = 16 << 20
#: Partitions for each worker: a quick one gets more of them.
_PER_WORKER = 4
#: Keys that are sampled to find the borders of a sort, for each partition.
_SAMPLED = 40
_AT_ONCE = 4096
#: Seconds between two lines of progress where there is no terminal.
_LINE_S = 10.0

#: Errors of functions that are called here, where others come from signals.
_OF_FUNCTIONS = Exception, GeneratorExit

#: Workers that are lost come back.
_RESTART = lp.RestartPolicy("on_failure", max_restarts=1000, max_backoff_s=1.0)


class Dataset(Generic[A]):
    """Items in partitions: a plan, which an action (`collect`, `count`, `save`, ..) computes.

    Operations return new datasets and compute nothing. Functions must be picklable; lambdas are. They
    must give the same each time, because what is lost is computed again.

    Example:
        with engines.MapReduce(workers=4) as mr:
            words = mr.load("books/*.txt").flat_map(str.split)
            counts = words.map(lambda word: (word, 1)).reduce_by_key(operator.add)
            print(counts.sort_by_key().collect())
    """

    def __init__(self, engine: "MapReduce", plan: Operation) -> None:
        self._engine = engine
        self._plan = plan

    # Item by item.

    def map(
        self,
        function: Callable[[A], B],
        on_error: Callable[[A, Exception], Iterable[B]] | None = None,
    ) -> "Dataset[B]":
        """Returns what a function returns for each item.

        Where it raises, `on_error` gets the item and the exception, and returns the items to have instead:
        `[]` sets the item aside, `[function(item)]` tries it again.
        """
        if on_error is None:
            return self._narrow("map", function)
        _check_function("map: on_error", on_error)

        def attempted(item: A) -> Iterable[B]:
            try:
                return [function(item)]
            except Exception as error:  # noqa: BLE001 - the user decides
                return on_error(item, error)

        return self._narrow("map", function, "flat_map", attempted)

    def flat_map(self, function: Callable[[A], Iterable[B]]) -> "Dataset[B]":
        """Returns all items of what a function returns for each item."""
        return self._narrow("flat_map", function)

    def filter(self, function: Callable[[A], object]) -> "Dataset[A]":
        """Returns the items for which a function is true."""
        return self._narrow("filter", function)

    def map_partitions(self, function: Callable[[Iterator[A]], Iterable[B]]) -> "Dataset[B]":
        """Returns all items of what a function returns for the iterator of each partition."""
        return self._narrow("map_partitions", function)

    def sample(self, fraction: float, seed: int = 0) -> "Dataset[A]":
        """Returns each item with the same probability, from 0 to 1 (else a ValueError), by a seed."""
        if not 0 <= fraction <= 1:
            raise ValueError(f"sample: fraction is from 0 to 1, not {fraction!r}")

        def drawn(partition: int, items: Iterator[A]) -> Iterator[A]:
            rng = random.Random(f"{seed} {partition}")  # noqa: S311 - no secret
            return (item for item in items if rng.random() < fraction)

        return self._narrow("sample", drawn, "numbered")

    def zip_with_index(self) -> "Dataset[tuple[A, int]]":
        """Returns each item with its place, from 0. Counts the items now: cache what takes long."""
        starts = [0, *itertools.accumulate(self._run(_count, "count"))]
        return self._narrow(
            "zip_with_index", lambda n, items: zip(items, itertools.count(starts[n])), "numbered"
        )

    def distinct(self, partitions: int | None = None) -> "Dataset[A]":
        """Returns one of each kind of equal items, in any order; `partitions` as for `reduce_by_key`."""
        alone = self.map(lambda item: (item, None))
        return alone.reduce_by_key(lambda one, _: one, partitions).map(operator.itemgetter(0))

    def sort_by(
        self, key: Callable[[A], Any], *, reverse: bool = False, partitions: int | None = None
    ) -> "Dataset[A]":
        """Returns the items in the order of what a function returns for each; else as `sort_by_key`."""
        _check_function("sort_by", key)
        return self._sorted(f"sort_by({name_of(key)})", key, reverse, partitions)

    def union(self, other: "Dataset[A]") -> "Dataset[A]":
        """Returns the items of both, these first."""
        self._check_same(other)
        plans = self._plan, other._plan
        return Dataset(self._engine, Union("union", sum(plan.partitions for plan in plans), plans))

    def cache(self) -> "Dataset[A]":
        """Returns the same items; once computed, they stay with the workers until `uncache`.

        For datasets that several actions use, as in iterative algorithms. What is lost is computed
        again.
        """
        return Dataset(self._engine, Cached("cache", self._plan.partitions, (self._plan,)))

    def uncache(self) -> None:
        """Drops what `cache` has kept.

        Raises:
            ValueError: This is not what `cache` has returned.
        """
        if not isinstance(self._plan, Cached):
            raise ValueError(f"uncache: {self._plan.title} is no dataset that cache() has returned")
        self._engine.backend.forget([self._plan.number])

    # By key: items are pairs of a key and a value.

    def map_values(
        self: "Dataset[tuple[K, V]]", function: Callable[[V], B]
    ) -> "Dataset[tuple[K, B]]":
        """Returns each key with what a function returns for its value."""
        return self._narrow("map_values", function, "map", lambda it: (it[0], function(it[1])))

    def reduce_by_key(
        self: "Dataset[tuple[K, V]]", function: Callable[[V, V], B], partitions: int | None = None
    ) -> "Dataset[tuple[K, B]]":
        """Returns each key once, with its values combined; they are combined before they are sent, too.

        Args:
            function: Combines two values; associative.
            partitions: How many there are to be; by default several for each worker.
        """
        _check_function("reduce_by_key", function)
        return self._wide("reduce_by_key", "reduce", partitions, function=function)

    def group_by_key(
        self: "Dataset[tuple[K, V]]", partitions: int | None = None
    ) -> "Dataset[tuple[K, list[V]]]":
        """Returns each key once, with the list of its values, in their order. A list fits into memory.

        `partitions` is as for `reduce_by_key`, here and below.
        """
        return self._wide("group_by_key", "group", partitions)

    def join(
        self: "Dataset[tuple[K, V]]", other: "Dataset[tuple[K, B]]", partitions: int | None = None
    ) -> "Dataset[tuple[K, tuple[V, B]]]":
        """Returns key and both values for each pair of items that have the same key."""
        self._check_same(other)
        return self._wide("join", "join", partitions, other._plan)

    def cogroup(
        self: "Dataset[tuple[K, V]]", other: "Dataset[tuple[K, B]]", partitions: int | None = None
    ) -> "Dataset[tuple[K, tuple[list[V], list[B]]]]":
        """Returns each key once, with the lists of its values here and in the other. As `group_by_key`."""
        self._check_same(other)
        ours: Dataset[Any] = self.map_values(lambda value: (0, value))
        both = ours.union(other.map_values(lambda value: (1, value))).group_by_key(partitions)

        def sides(values: list[tuple[int, Any]]) -> Any:
            return tuple([value for which, value in values if which == side] for side in (0, 1))

        return both.map_values(sides)

    def left_join(
        self: "Dataset[tuple[K, V]]", other: "Dataset[tuple[K, B]]", partitions: int | None = None
    ) -> "Dataset[tuple[K, tuple[V, B | None]]]":
        """Returns what `join` does, and `(key, (value, None))` for keys that the other does not have."""
        groups: Dataset[Any] = self.cogroup(other, partitions)
        return groups.flat_map(
            lambda it: ((it[0], pair) for pair in itertools.product(it[1][0], it[1][1] or [None]))
        )

    def sort_by_key(
        self: "Dataset[tuple[K, V]]", *, reverse: bool = False, partitions: int | None = None
    ) -> "Dataset[tuple[K, V]]":
        """Returns the items in the order of their keys. Items of the same key keep their order.

        A sample is computed now, to find the borders between partitions. Items whose key is NaN come
        last, also if `reverse`: then the largest comes first.

        Raises:
            OrderError: Keys cannot be compared, as None and numbers; a TypeError. If the sample does
                not show it, the action raises it.
        """
        return self._sorted("sort_by_key", operator.itemgetter(0), reverse, partitions)

    def _sorted(
        self, title: str, key: Callable[[A], Any], reverse: bool, partitions: int | None
    ) -> "Dataset[A]":
        count = self._engine.wide_partitions(partitions)
        if partitions is None:  # as large files have: what is sorted at a time is small
            count = max(count, min(self._plan.partitions, 4 * count))
        # Reads as many of our partitions as there will be, evenly spaced: enough if ours are sorted
        # already.
        chosen = range(0, self._plan.partitions, max(1, self._plan.partitions // count))
        plan = Some("some partitions", len(chosen), (self._plan,), chosen=chosen)
        action = functools.partial(_sampled, max(1, _SAMPLED * count // len(chosen)), key)
        parts = self._engine.backend.run(plan, action, "sample of keys")
        with Named(f"{title}: {self._plan.title}", _OF_FUNCTIONS):
            keys = list(itertools.chain.from_iterable(parts))
            sort(keys, lambda key: key, reverse=False)
        places = range(1, count) if keys else ()
        bounds = tuple(keys[len(keys) * place // count] for place in places)
        return self._wide(title, "sort", count, key=key, bounds=bounds, reverse=reverse)

    def shuffle(self, seed: int = 0, partitions: int | None = None) -> "Dataset[A]":
        """Returns the items spread over all partitions at random; a seed decides where they go."""
        return self._wide("shuffle", "spread", partitions, seed=seed)

    def repartition(self, partitions: int) -> "Dataset[A]":
        """Returns the items in so many partitions, spread at random as by `shuffle`."""
        return self.shuffle(partitions=partitions)

    # Actions.

    def collect(self) -> list[A]:
        """Returns all items, in the order of the partitions."""
        return list(itertools.chain.from_iterable(self._run(_collected, "collect")))

    def __iter__(self) -> Iterator[A]:
        """Returns all items. One partition after the other is computed, and in memory here."""
        return itertools.chain.from_iterable(self._in_turn(lambda: _collected, "iterate"))

    def take(self, count: int) -> list[A]:
        """Returns the first items, at most so many. Computes no more partitions than that needs."""
        some = self.map_partitions(lambda items: itertools.islice(items, count))
        return list(itertools.islice(some, count))

    def first(self) -> A:
        """Returns the first item; raises EmptyError if there is none."""
        for item in self.take(1):
            return item
        raise EmptyError("the dataset has no items")

    def top(self, count: int, key: Callable[[A], Any] | None = None) -> list[A]:
        """Returns the largest items, at most so many, from the largest on; `key` is as for `sorted`."""
        largest = functools.partial(heapq.nlargest, count, key=key)
        parts = self.map_partitions(lambda items: [largest(items)])
        return parts.reduce(lambda one, two: largest([*one, *two]))

    def foreach(self, function: Callable[[A], object]) -> None:
        """Calls a function with each item, in the workers; again if one is lost meanwhile."""
        self.map(function).count()

    def sum(self: "Dataset[N]") -> N:
        """Returns the sum of the items; 0 if there are none."""
        return self.map_partitions(lambda items: [sum(items)]).reduce(operator.add)

    def mean(self: "Dataset[N]") -> float:
        """Returns the mean of the items; raises EmptyError if there are none."""
        ones = self.map(lambda item: (item, 1))
        total, count = ones.reduce(lambda one, two: (one[0] + two[0], one[1] + two[1]))
        return total / count

    def min(self, key: Callable[[A], Any] | None = None) -> A:
        """Returns the least item; `key` is as for `sorted`. Raises EmptyError if there is none."""
        return self.reduce(functools.partial(min, key=key))

    def max(self, key: Callable[[A], Any] | None = None) -> A:
        """Returns the largest item, as `min` does the least."""
        return self.reduce(functools.partial(max, key=key))

    def count(self) -> int:
        """Returns how many items there are."""
        return sum(self._run(_count, "count"))

    def reduce(self, function: Callable[[A, A], A]) -> A:
        """Returns all items combined to one.

        Args:
            function: Combines two items; associative.

        Raises:
            EmptyError: There is no item.
        """
        _check_function("reduce", function)
        parts = self._run(functools.partial(_reduced, function), "reduce")
        found = list(itertools.chain.from_iterable(parts))
        if not found:
            raise EmptyError("the dataset has no items; fold takes a first value")
        with Named("reduce, of the results of all partitions", _OF_FUNCTIONS):
            return functools.reduce(function, found)

    def fold(
        self, function: Callable[[B, A], B], first: B, combine: Callable[[B, B], B] | None = None
    ) -> B:
        """Returns `function(.. function(function(first, item0), item1) .., itemN)`.

        Without `combine` one partition is folded after the other, as that needs. With it, all are
        folded at the same time, each from `first`, and their results are combined.

        Args:
            function: Takes what there is so far, and an item.
            first: Where it begins; each partition gets a copy.
            combine: Combines the results of two partitions; `first` must be neutral for it.
        """
        if combine is not None:
            parts = self._run(functools.partial(_folded, function, first), "fold")
            with Named("fold, of the results of all partitions", _OF_FUNCTIONS):
                return functools.reduce(combine, parts)
        so_far = first
        results = self._in_turn(lambda: functools.partial(_folded, function, so_far), "fold")
        for result in results:
            so_far = result
        return so_far

    def save(self, folder: "str | os.PathLike[str]", line: Callable[[A], str] = str) -> list[Path]:
        """Writes each partition as a text file, `part-00000` and so on, and returns their paths.

        Files are written aside, and renamed when all are complete. Workers on several hosts must see
        the same folder.

        Args:
            folder: Is made if there is none; must have no such files.
            line: Returns the line of an item.

        Raises:
            FileExistsError: There are such files.
        """
        target = Path(folder).absolute()
        target.mkdir(parents=True, exist_ok=True)
        if found := sorted(target.glob("part-*")):
            raise FileExistsError(f"{target} has {found[0].name} already; choose another folder")
        aside = target / f".saving-{uuid.uuid4().hex}"
        aside.mkdir()
        try:
            paths = self._run(functools.partial(_saved, str(aside), line), "save")
            return [path.rename(target / path.name) for path in paths]
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def explain(self, form: str = "text") -> str:
        """Returns the stages of the plan: "text" as a tree, "mermaid" as a flowchart.

        Raises:
            ValueError: There is no such form.
        """
        if form not in ("text", "mermaid"):
            raise ValueError(f"explain has the forms 'text' and 'mermaid', not {form!r}")
        return "\n".join(_tree(self._plan) if form == "text" else _flow(self._plan))

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Dataset cannot be used in the functions of a pipeline; collect it, or broadcast what it has"
        )

    def __repr__(self) -> str:
        return f"Dataset({self._plan.title}, {self._plan.partitions} partitions)"

    # How they are made.

    def _narrow(
        self, name: Any, function: Callable[..., Any], how: Any = None, applied: Any = None
    ) -> "Dataset[Any]":
        _check_function(name, function)
        title, plan = f"{name}({name_of(function)})", self._plan
        narrow = Narrow(
            title, plan.partitions, (plan,), how=how or name, function=applied or function
        )
        return Dataset(self._engine, narrow)

    def _wide(
        self, title: str, kind: Any, partitions: int | None, *others: Operation, **options: Any
    ) -> "Dataset[Any]":
        count = self._engine.wide_partitions(partitions)
        if options.get("function") is not None:
            title = f"{title}({name_of(options['function'])})"
        plan = Shuffled(title, count, (self._plan, *others), kind=kind, **options)
        return Dataset(self._engine, plan)

    def _run(self, action: Callable[[int, Iterator[A]], B], title: str) -> list[B]:
        return self._engine.backend.run(self._plan, action, title)

    def _in_turn(self, action: Callable[[], Any], title: str) -> Iterator[Any]:
        """Yields the result of one partition after the other, each of an action made when it begins."""
        backend = self._engine.backend
        try:
            for index in range(self._plan.partitions):
                plan = Some(f"partition {index}", 1, (self._plan,), chosen=(index,))
                # The earlier stages are computed once for all partitions.
                yield backend.run(plan, action(), title, keep=True)[0]
        finally:
            if self._engine._backend is backend:  # it may have ended
                backend.forget([each.number for each in shuffles_of(self._plan)])

    def _check_same(self, other: object) -> None:
        if not isinstance(other, Dataset):
            raise TypeError(f"expected a Dataset, not {other!r}")
        if other._engine is not self._engine:
            raise ValueError("these datasets belong to different MapReduce engines")


class MapReduce:
    """Workers that compute datasets. They start with the `with` block, and stop with it.

    Workers stay up between jobs, so an iterative algorithm starts nothing again. A worker that is
    lost comes back; what it had is computed again, and counted once. Used by one thread at a time.

    Example:
        with engines.MapReduce(workers=4) as mr:
            print(mr.load(range(1000)).map(lambda x: x * x).reduce(operator.add))
    """

    def __init__(
        self,
        workers: int | None = None,
        *,
        backend: Literal["launchpad_lite", "dask", "spark"] = "launchpad_lite",
        address: str | None = None,
        launcher: "str | Launcher" = "local_mp",
        memory_bytes: int | None = None,
        spill_folder: "str | os.PathLike[str] | None" = None,
        progress: bool = True,
        **launch_options: Any,
    ) -> None:
        """Describes the workers; nothing starts before the `with` block.

        Args:
            workers: How many; by default as many as this process may use cores. With an address: how
                many partitions are planned for; by default as many as the cluster has cores.
            backend: Who runs the workers: we, Dask or Spark. The last two need the packages
                `launchpad-lite[dask]` or `launchpad-lite[spark]`, also on their hosts.
            address: Of the scheduler of Dask, as `tcp://host:8786`, or the master of Spark, as
                `spark://host:7077`. By default they run on this machine.
            launcher: Where our workers run, as for `lp.launch`.
            memory_bytes: For what each worker computes at a time. By default their parts of half of the
                machine's memory.
            spill_folder: Where the rest is, with the output of stages for the next one; by default
                the system's folder for temporary files.
            progress: Whether to show how far a stage is: a bar on a terminal, a line every 10 s elsewhere.
            **launch_options: As for `lp.launch`: `hosts`, `resources`, ..

        Raises:
            ValueError: A number is below 1, there is no such backend, or an argument is not for it.
        """
        if backend not in ("launchpad_lite", "dask", "spark"):
            raise ValueError(
                f"MapReduce: backend is 'launchpad_lite', 'dask' or 'spark', not {backend!r}"
            )
        if backend == "launchpad_lite" and address is not None:
            raise ValueError("MapReduce: address is for backend='dask' and backend='spark'")
        if backend != "launchpad_lite" and (launch_options or launcher != "local_mp"):
            raise ValueError(f"MapReduce: backend={backend!r} launches nothing; it takes address=")
        self._kind = backend
        self._address = address
        self._asked = workers
        self._workers = len(os.sched_getaffinity(0)) if workers is None else workers
        self._launcher = launcher
        self._options = _worker_options(self._workers, memory_bytes, spill_folder)
        self._launch_options = launch_options
        self._progress = progress
        self._shown_at, self._line = time.monotonic(), "no stage yet"
        #: Returns workers that run.
        self._start: Callable[[], Backend] = self._start_own
        self._backend: Backend | None = None

    @classmethod
    def add_to(
        cls,
        program: lp.Program,
        *,
        workers: int,
        label: str = "map_reduce",
        memory_bytes: int | None = None,
        spill_folder: "str | os.PathLike[str] | None" = None,
    ) -> "MapReduceHandle":
        """Adds workers to a program; returns a handle, which becomes a `MapReduce` in another node.

        Launch with `restart={"map_reduce": "on_failure"}` to have workers come back that are lost.
        Data that a node leaves with the workers, such as a cache, is freed at the end of its `with`
        block, and when the node has ended or is lost.

        Their group is `label`; other arguments are as for `MapReduce`.

        Raises:
            ValueError: A number is below 1, or the program has such a group.
        """
        if label in program.groups:
            raise ValueError(f"the program has a group {label!r}; give another label=")
        options = _worker_options(workers, memory_bytes, spill_folder)
        nodes = [lp.CourierNode(MapReduceWorker) for _ in range(workers)]
        handles = [node.create_handle() for node in nodes]
        with program.group(label):
            for index, node in enumerate(nodes):
                peers = [None if other == index else handle for other, handle in enumerate(handles)]
                node.configure(index, peers, **options)
                program.add_node(node)
        return MapReduceHandle(MapReduce.of, *handles)

    @classmethod
    def of(cls, *workers: Any) -> "MapReduce":
        """Returns one of clients of workers that run. For the engine."""
        engine = cls(len(workers))
        lp.metrics.view("engine", lambda: engine._line)
        driver = Driver(workers, engine._show)
        engine._start = lambda: driver
        return engine.__enter__()

    def __enter__(self) -> "MapReduce":
        if self._backend is None:
            self._backend = self._start()
        return self

    def __exit__(self, *_: object) -> None:
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.close()

    def _start_own(self) -> Backend:
        if self._kind == "dask":
            from launchpad_lite.engines._dask import DaskBackend

            workers = self._workers if self._address is None else self._asked
            return DaskBackend(self._address, workers, self._show, **self._options)
        if self._kind == "spark":
            from launchpad_lite.engines._spark import SparkBackend

            bar = self._progress and sys.stderr.isatty()
            return SparkBackend(self._address, self._asked, progress=bar, **self._options)
        program = lp.Program("map_reduce")
        handle = self.add_to(program, workers=self._workers, label="worker", **self._options)
        options = {"restart": _RESTART, **self._launch_options}
        on_interrupt = signal.getsignal(signal.SIGINT)
        running = lp.launch(program, self._launcher, **options)
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and on_interrupt is not None:  # None: it is not Python's
            # A Ctrl-C interrupts an action, as any other code, and does not stop the workers.
            signal.signal(signal.SIGINT, on_interrupt)
        clients = [worker.dereference() for worker in handle.args]
        return Driver(clients, self._show, running.complete)

    @property
    def backend(self) -> Backend:
        """Runs the jobs. For the engine."""
        if self._backend is None:
            raise EngineError("the workers do not run: use the engine in a `with` block")
        return self._backend

    def load(
        self,
        source: "str | os.PathLike[str] | Iterable[Any] | Dataset[Any]",
        *,
        partitions: int | None = None,
        block_bytes: int = _BLOCK_BYTES,
        encoding: str = "utf-8",
    ) -> Dataset[Any]:
        """Returns a dataset of the lines of files, or of the items of an iterable.

        Args:
            source: A path, or a pattern as `logs/*.txt`: the lines of all these files, without
                their ends. They are cut into blocks at line ends; those that end in `.gz` are
                unpacked, each as one block. Workers must see the same files. Any other iterable: its
                items, which are sent to the workers.
            partitions: Of an iterable; by default several for each worker.
            block_bytes: The size of the blocks.
            encoding: Of the files; its line end must be the byte 10.

        Raises:
            FileNotFoundError: No file matches.
            ValueError: A number is below 1.
            TypeError: The source is nothing of these, or an item cannot be pickled.
        """
        if isinstance(source, Dataset):
            return source
        if isinstance(source, str | os.PathLike):
            if block_bytes < 1:
                raise ValueError(f"block_bytes is at least 1, not {block_bytes}")
            pattern = Path(source).absolute()
            found = Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor)))
            paths = [path for path in sorted(found) if not path.is_dir()]
            if pattern.is_file():  # whatever its name looks like
                paths = [pattern]
            if not paths:
                hint = f"; it is a folder: write {f'{pattern}/*'!r}" if pattern.is_dir() else ""
                raise FileNotFoundError(f"no file matches {os.fspath(source)!r}{hint}")
            blocks = lines_blocks(paths, block_bytes)
            title = f"lines({os.fspath(source)})"
            return Dataset(self, LinesSource(title, len(blocks), blocks=blocks, encoding=encoding))
        if not isinstance(source, Iterable):
            raise TypeError(
                f"load takes a path, a pattern, an iterable or a Dataset, not {source!r}"
            )
        items = list(source)
        if items and all(isinstance(each, str) and os.path.isfile(each) for each in items[:3]):  # noqa: PTH113 - false of any text
            text = f"load has {items[0]!r} as an item, not as a file; its lines: load({items[0]!r})"
            warnings.warn(f"{text}, or a pattern. Path({items[0]!r}) means the name", stacklevel=2)
        count = self.wide_partitions(partitions)
        if partitions is None:
            count = max(1, min(count, len(items)))
        ends = [len(items) * index // count for index in range(count + 1)]
        parts = tuple(dump(items[start:end])[0] for start, end in itertools.pairwise(ends))
        return Dataset(self, ItemsSource(f"items({len(items)})", count, chunks=parts))

    def broadcast(self, value: V) -> Broadcast[V]:
        """Returns something for functions to refer to, whose `value` each worker gets once.

        Once nothing refers to it any more, the workers drop the value with their next job.
        """
        return Broadcast(value)

    def wide_partitions(self, asked: int | None) -> int:
        """Returns how many partitions a wide operation has. For the engine."""
        if asked is not None and (asked < 1 or asked % 1):
            raise ValueError(f"partitions is a number from 1, not {asked!r}")
        workers = self._workers if self._backend is None else self._backend.workers
        return asked or workers * _PER_WORKER

    def _show(self, stage: JobStage, done: int, total: int) -> None:
        bar = "█" * (24 * done // total)
        self._line = f"stage {stage.number}/{stage.count} [{bar:<24}] {done}/{total} {stage.title}"
        if not self._progress:
            return
        line = self._line[:100]
        if sys.stderr.isatty():
            end = "\r\x1b[K" if stage.number == stage.count and done == total else ""
            sys.stderr.write(f"\r{line}\x1b[K{end}")
        elif time.monotonic() >= self._shown_at + _LINE_S:
            self._shown_at = time.monotonic()
            sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


class MapReduceHandle(lp.Deferred[MapReduce]):
    """A handle of the workers of map-reduce: becomes a `MapReduce` in a running node.

    Example:
        mr = engines.MapReduce.add_to(program, workers=4)
        program.add_node(lp.CourierNode(Report, mr), label="report")
    """


def _worker_options(
    workers: int, memory_bytes: int | None, spill_folder: "str | os.PathLike[str] | None"
) -> dict[str, Any]:
    if workers < 1:
        raise ValueError(f"MapReduce: workers is at least 1, not {workers}")
    if memory_bytes is not None and memory_bytes < 1:
        raise ValueError(f"MapReduce: memory_bytes is at least 1, not {memory_bytes}")
    folder = None if spill_folder is None else os.fspath(spill_folder)
    return {"memory_bytes": memory_bytes, "spill_folder": folder}


def _check_function(what: str, function: object) -> None:
    if not callable(function):
        raise TypeError(f"{what} takes a function, not {function!r}")


# Functions of the actions, which the workers call with the items of a partition.


def _collected(partition: int, items: Iterator[A]) -> list[A]:  # noqa: ARG001
    return list(items)


def _count(partition: int, items: Iterator[Any]) -> int:  # noqa: ARG001
    return sum(1 for _ in items)


def _reduced(function: Callable[[A, A], A], partition: int, items: Iterator[A]) -> list[A]:  # noqa: ARG001
    for first in items:
        return [functools.reduce(function, items, first)]
    return []


def _folded(function: Callable[[B, A], B], first: B, partition: int, items: Iterator[A]) -> B:  # noqa: ARG001
    return functools.reduce(function, items, copy.deepcopy(first))


def _sampled(count: int, key: Callable[[A], K], partition: int, items: Iterator[A]) -> list[K]:
    """Returns the keys of some items, each with the same probability.

    Reservoir sampling that skips: "Algorithm L" of Li, 1994.
    """
    rng = random.Random(partition)  # noqa: S311 - no secret
    chosen = list(itertools.islice(items, count))
    weight = 1.0
    while True:
        weight *= (1 - rng.random()) ** (1 / count)
        skipped = int(math.log(1 - rng.random()) / math.log1p(-weight))
        for item in itertools.islice(items, skipped, skipped + 1):
            chosen[rng.randrange(count)] = item
            break
        else:
            return [key(item) for item in chosen]


def _saved(folder: str, line: Callable[[A], str], partition: int, items: Iterator[A]) -> Path:
    path = Path(folder, f"part-{partition:05}")
    # A worker that was taken for lost may still write it.
    aside = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    with aside.open("w", encoding="utf-8") as file:
        while some := [line(item) for item in itertools.islice(items, _AT_ONCE)]:
            file.write("\n".join([*some, ""]))
    return aside.rename(path)


# How a plan is shown.


def _tree(plan: Operation) -> Iterator[str]:
    waiting = [(plan, 0)]
    while waiting:
        plan, depth = waiting.pop()
        yield f"{'  ' * depth}{plan.title}  [{plan.partitions}]" + (
            "  <- all partitions" if isinstance(plan, Shuffled) else ""
        )
        waiting += [(parent, depth + 1) for parent in reversed(plan.parents)]


def _flow(plan: Operation) -> Iterator[str]:
    yield "flowchart LR"
    names: dict[int, int] = {}
    for each in operations_of(plan):
        name = names[each.number] = len(names)
        title = each.title.replace('"', "'").replace("<", "&lt;").replace(">", "&gt;")
        yield f'  n{name}["{title}<br/>{each.partitions} partitions"]'
        arrow = "==>" if isinstance(each, Shuffled) else "-->"
        for parent in dict.fromkeys(each.parents):
            yield f"  n{names[parent.number]} {arrow} n{name}"
