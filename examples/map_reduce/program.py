"""Counts words with mappers and reducers: Listings 5 and 9 of the Launchpad paper.

The text is that of the Python standard library, which every machine has, if
not in the same folder: mappers are told names in it. Each file has a mapper,
which counts its words and sends the counts, by batches, to the reducer that is
responsible for the word. A reducer that has heard the end of all mappers sends
what it has to the reporter.
"""

import collections
import concurrent.futures
import json
import queue
import re
import sys
import sysconfig
import threading
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import courier
import launchpad_lite as lp

#: Lines whose words are counted before they are sent: one call a word would be all overhead.
LINES_PER_BATCH = 2000
#: How many words are shown at the end.
SHOWN_WORDS = 20

#: Two letters or more: single ones are mostly names in code.
_WORD = re.compile(r"[^\W\d_]{2,}")
_NOT_TEXT = {"__pycache__", "dist-packages", "site-packages", "test", "tests"}
#: Parts of the library that Linux distributions leave out, or have in packages of their own.
_NOT_EVERYWHERE = {
    "distutils",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "msilib",
    "tkinter",
    "turtle",
    "turtledemo",
}


@dataclass(frozen=True)
class Mapped:
    """A mapper has counted its file, and all of that has arrived at the reducers."""

    path: Path
    words: int


@dataclass(frozen=True)
class Reduced:
    """A reducer has heard the end of all mappers."""

    counts: dict[str, int]


class Reporter:
    """Shows progress and, when all reducers are done, the result; then the program ends."""

    def __init__(self, num_mappers: int, num_reducers: int, output: Path | None) -> None:
        self._num_mappers = num_mappers
        self._num_reducers = num_reducers
        self._output = output
        self._events: queue.SimpleQueue[Mapped | Reduced | None] = queue.SimpleQueue()

    def report(self, event: Mapped | Reduced) -> None:
        """Takes a report of a mapper or a reducer."""
        self._events.put(event)

    def run(self) -> None:
        """Waits for all of them."""
        # None wakes it up when the program is stopped before the end; perhaps it was already.
        lp.register_stop_handler(self._give_up)
        if lp.stop_event().is_set():
            return
        counts: collections.Counter[str] = collections.Counter()
        files = words = reducers = 0
        while files < self._num_mappers or reducers < self._num_reducers:
            event = self._events.get()
            if event is None:
                return
            if isinstance(event, Reduced):
                reducers += 1
                counts.update(event.counts)
            else:
                files += 1
                words += event.words
                bar = f"{files / self._num_mappers:4.0%} {files:3}/{self._num_mappers} files"
                print(f"{bar} {words:9,} words   {event.path.parent.name}/{event.path.name}")
        lp.unregister_stop_handler(self._give_up)
        self._finish(counts)

    def _give_up(self) -> None:
        self._events.put(None)

    def _finish(self, counts: collections.Counter[str]) -> None:
        if self._output is not None:
            self._output.write_text(json.dumps(counts, ensure_ascii=False), encoding="utf-8")
        else:
            print(table(counts))


class Reducer:
    """Adds up the counts of the words it is responsible for."""

    def __init__(self, num_mappers: int, reporter: Reporter) -> None:
        # Told, not counted: a mapper may well have ended before another begins.
        self._running_mappers = num_mappers
        self._reporter = reporter
        self._counts: collections.Counter[str] = collections.Counter()
        # Calls come in several threads.
        self._lock = threading.Lock()

    def reduce(self, counts: dict[str, int]) -> None:
        """Adds a batch."""
        with self._lock:
            self._counts.update(counts)

    def mapper_done(self) -> None:
        """Hears that one more mapper has sent all it had."""
        with self._lock:
            self._running_mappers -= 1
            if self._running_mappers:
                return
        self._reporter.report(Reduced(dict(self._counts)))


class Mapper:
    """Counts the words of a file.

    Args:
        path: Of the file; below the standard library of the Python that runs the mapper, unless
            it is absolute.
        reducers: The nodes that add up the counts.
        reporter: The node that gets the result.
    """

    # Handles become clients; annotated with the classes they stand for, each call is checked.
    def __init__(self, path: Path, reducers: Sequence[Reducer], reporter: Reporter) -> None:
        # An absolute path stays as it is.
        self._path = library() / path
        self._reducers = reducers
        self._reporter = reporter
        self._batch: collections.Counter[str] = collections.Counter()
        self._words = 0

    def run(self) -> None:
        """Reads the file once and sends its counts as it goes."""
        with self._path.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, start=1):
                self._batch.update(words_of(line))
                if number % LINES_PER_BATCH == 0:
                    self._send_batch()
        self._send_batch()
        _wait_for([courier.submit(reducer.mapper_done) for reducer in self._reducers])
        self._reporter.report(Mapped(self._path, self._words))

    def _send_batch(self) -> None:
        self._words += self._batch.total()
        shares: list[dict[str, int]] = [{} for _ in self._reducers]
        for word, count in self._batch.items():
            shares[reducer_of(word, len(shares))][word] = count
        self._batch.clear()
        # All reducers work at the same time. Waiting for them keeps a fast mapper from
        # flooding slow reducers.
        _wait_for(
            [
                courier.submit(reducer.reduce, share)
                for reducer, share in zip(self._reducers, shares, strict=True)
            ]
        )


def _wait_for(calls: Iterable[concurrent.futures.Future[None]]) -> None:
    for call in calls:
        call.result()


def words_of(line: str) -> list[str]:
    """Returns the words of a line in lower case."""
    return _WORD.findall(line.lower())


def reducer_of(word: str, num_reducers: int) -> int:
    """Returns which reducer is responsible for a word, the same in every process.

    `hash()` differs between processes.
    """
    return zlib.crc32(word.encode()) % num_reducers


def table(counts: dict[str, int]) -> str:
    """Returns the most frequent words as a table."""
    # Equal counts in the order of the alphabet, so that all runs show the same.
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:SHOWN_WORDS]
    width = max((len(word) for word, _ in ranked), default=0)
    rows = [
        f"{rank:4}  {word:<{width}}  {count:7,}" for rank, (word, count) in enumerate(ranked, 1)
    ]
    return "\n".join([f"rank  {'word':<{width}}    count", *rows])


def library() -> Path:
    """Returns the folder of the standard library, of the Python that runs here."""
    return Path(sysconfig.get_path("stdlib"))


def default_paths(num_files: int) -> list[Path]:
    """Returns the largest sources of the standard library, as paths below its folder.

    Only what every Python of this minor version has: hosts and images may have another build.

    Args:
        num_files: How many.
    """
    root = library()
    sizes = {
        path.relative_to(root): path.stat().st_size
        for path in root.rglob("*.py")
        if _is_everywhere(path.relative_to(root)) and path.is_file()
    }
    return sorted(sizes, key=lambda path: (-sizes[path], path.as_posix()))[:num_files]


def _is_everywhere(path: Path) -> bool:
    top = path.parts[0].removesuffix(".py")
    # Besides modules there is what was written when this Python was built or installed.
    is_module = top in sys.stdlib_module_names and top not in _NOT_EVERYWHERE
    return is_module and _NOT_TEXT.isdisjoint(path.parts)


def make_program(
    num_files: int = 24,
    num_reducers: int = 3,
    output: Path | None = None,
    paths: Sequence[Path] = (),
) -> lp.Program:
    """Describes the program; nothing runs yet.

    Args:
        num_files: How many files of the standard library to read, the largest first.
        num_reducers: Among how many reducers the words are divided.
        output: Where all counts are written as JSON; None prints the most frequent words.
        paths: Files to read instead, which must have the same paths wherever a mapper may run.
    """
    paths = [path.absolute() for path in paths] or default_paths(num_files)
    if not paths or num_reducers < 1:
        raise ValueError("map_reduce needs at least one file and one reducer")
    program = lp.Program("map_reduce")
    reporter = program.add_node(
        lp.CourierNode(Reporter, len(paths), num_reducers, output), label="reporter"
    )
    with program.group("reducer"):
        reducers = [
            program.add_node(lp.CourierNode(Reducer, len(paths), reporter))
            for _ in range(num_reducers)
        ]
    with program.group("mapper"):
        for path in paths:
            program.add_node(lp.PyClassNode(Mapper, path, reducers, reporter))
    return program
