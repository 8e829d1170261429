"""The input of replicas: a pipeline each, or one for all replicas of a worker."""

import concurrent.futures
import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from courier.lowlevel import signature_of
from launchpad_lite.parts import nests
from launchpad_lite.parts.threads import start_thread
from launchpad_lite.replicas import _devices
from launchpad_lite.replicas.errors import InputSplitError

#: Batches that a worker keeps for replicas that have not fetched theirs.
_KEPT = 4
#: Seconds between checks whether the thread that waits for a batch is to end.
_LOOK_S = 0.2
#: Batches that take so many seconds are worth a thread, which takes 0.1 ms to wake.
_WORTH_S = 5e-4
#: Seconds that the end of a run waits for a batch that is being fetched.
_PATIENCE_S = 1.0


class Batch(NamedTuple):
    """An item of a pipeline; `may_overlap`: the next may be fetched during a step with this one."""

    is_there: bool
    value: Any = None
    may_overlap: bool = False


#: Identifies a pipeline: its generation, the depth of its run, and its number.
Key = tuple[int, int, int]


def split_leading(batch: Any, parts: int) -> list[Any]:
    """Returns a batch in equal parts along the first dimension of each leaf."""
    for path, leaf in nests.leaves(batch):
        where = f"{path} of the batch" if path else "the batch"
        if not nests.kind(leaf) or not getattr(leaf, "shape", ()):
            raise InputSplitError(
                f"{where} has no first dimension to divide among {parts} replicas: it is "
                f"{type(leaf).__name__}; give input_split_fn="
            )
        if leaf.shape[0] % parts:
            raise InputSplitError(
                f"{where} has {leaf.shape[0]} examples, which {parts} replicas cannot share evenly; "
                "drop the rest, choose another batch size, or give input_split_fn="
            )

    def part(index: int) -> Any:
        def cut(leaf: Any) -> Any:
            length = leaf.shape[0] // parts
            return leaf[index * length : (index + 1) * length]

        return nests.rebuilt(batch, cut)

    return [part(index) for index in range(parts)]


def examples_in(batch: Any) -> int:
    """Returns how many examples a batch has: the length of its first array; 0 without leaves."""
    shapes = [getattr(leaf, "shape", ()) for _, leaf in nests.leaves(batch)]
    return int(next((shape[0] for shape in shapes if shape), bool(shapes)))


class Pipeline:
    """Batches of the user's code, one after the other."""

    def __init__(self, next_batch: Callable[[], Any], *, is_iterable: bool = False) -> None:
        """Makes one; `next_batch` returns the next batch, or raises StopIteration."""
        self._next_batch = next_batch
        #: The first batch, until the second one is there.
        self._first: Any = None
        self._may_overlap: bool | None = None if is_iterable else False

    def take(self) -> Batch:
        try:
            value = self._next_batch()
        except StopIteration:
            return Batch(False)
        if self._may_overlap is None and self._first is not None:
            # An iterable that reuses memory would change the batch of a step.
            self._may_overlap = not _addresses(self._first) & _addresses(value)
        self._first = value if self._may_overlap is None else None
        return Batch(True, value, bool(self._may_overlap))


def _addresses(batch: Any) -> set[int]:
    leaves = [leaf for _, leaf in nests.leaves(batch)]
    arrays = {leaf.ctypes.data for leaf in leaves if hasattr(leaf, "ctypes")}
    return arrays | {leaf.data_ptr() for leaf in leaves if nests.kind(leaf) == "torch"} - {0}


def opened(input_fn: Callable[..., Any], index: int, step: int) -> Pipeline:
    """Opens a pipeline at the step where a training goes on.

    `input_fn` takes the index of the replica or the worker, and perhaps the step. If it does not,
    as many batches are dropped first. TypeError: it returns no iterable and no callable.
    """
    takes_step = "step" in signature_of(input_fn).parameters
    pipeline = input_fn(index, step=step) if takes_step else input_fn(index)
    if hasattr(pipeline, "__iter__") or hasattr(pipeline, "__next__"):
        iterator = itertools.islice(pipeline, 0 if takes_step else step, None)
        return Pipeline(iterator.__next__, is_iterable=True)
    if not callable(pipeline):
        raise TypeError(
            f"input_fn returned {type(pipeline).__name__}: it returns an iterable of batches, or a "
            "callable that returns the next one"
        )
    return Pipeline(pipeline)


class SharedPipeline:
    """A pipeline for a worker, with a part of each batch for each of its replicas. Thread-safe."""

    def __init__(
        self, pipeline: Pipeline, parts: int, split: Callable[[Any, int], Sequence[Any]]
    ) -> None:
        self._pipeline = pipeline
        self._parts = parts
        self._split = split
        self._lock = threading.Lock()
        self._batches: dict[int, Sequence[Batch]] = {}

    def take(self, position: int, part: int) -> Batch:
        with self._lock:
            if position not in self._batches:  # all replicas ask for each of them, until the end
                self._batches[position] = self._fetch()
                self._batches.pop(position - _KEPT, None)
            return self._batches[position][part]

    def _fetch(self) -> Sequence[Batch]:
        batch = self._pipeline.take()
        if not batch.is_there:
            return [batch] * self._parts
        parts = [batch._replace(value=part) for part in self._split(batch.value, self._parts)]
        if len(parts) != self._parts:
            raise InputSplitError(
                f"input_split_fn returned {len(parts)} parts for {self._parts} replicas"
            )
        return parts


class Inputs:
    """The input of one replica, batch by batch. `last` is the last batch that was fetched."""

    def __init__(self, take: Callable[[], Batch]) -> None:
        self.last: Any = None
        self._take = take
        self._took_s = 0.0
        self._next: Batch | None = None
        #: The next batch, if the thread fetches it; and the requests to the thread.
        self._later: Future[Batch] | None = None
        self._asked: queue.SimpleQueue[Future[Batch] | None] = queue.SimpleQueue()
        #: Fetches batches during steps; None: not decided, or not worth it.
        self._thread: threading.Thread | None = None
        self._is_decided = False

    def has_next(self) -> bool:
        """Fetches another batch; returns whether there is one."""
        if self._later is not None:
            while not self._later.done():
                concurrent.futures.wait([self._later], _LOOK_S)
            self._next, self._later = self._later.result(), None
        elif self._next is None:
            begun_at = time.monotonic()
            self._next = self._take()
            self._took_s = time.monotonic() - begun_at
        if self._next.is_there:
            self.last = self._next.value
        return self._next.is_there

    def next(self, *, is_last: bool) -> Any:
        """Returns the next batch, after `has_next`; begins to fetch the one after it, if allowed.

        Without a next one, returns the last one again. `is_last` says that no other one is needed.
        """
        if self._next is not None and self._next.is_there:
            may_overlap, self._next = self._next.may_overlap, None
            if may_overlap and not is_last:
                self._fetch_later()
        return self.last

    def close(self) -> None:
        """Waits for a batch that is being fetched, but not for long."""
        self._asked.put(None)
        if self._thread is not None:
            self._thread.join(_PATIENCE_S)

    def _fetch_later(self) -> None:
        if not self._is_decided and self._took_s > _WORTH_S:
            # A batch that is not needed may never come: it is a daemon.
            self._thread = start_thread(self._serve, _devices.like_here(), name="replica-input")
        self._is_decided = True
        if self._thread is not None:
            self._later = Future()
            self._asked.put(self._later)

    def _serve(self, device: contextlib.AbstractContextManager[Any]) -> None:
        with device:
            for later in iter(self._asked.get, None):
                try:
                    later.set_result(self._take())
                except BaseException as error:  # noqa: BLE001 - raised to the waiting caller
                    later.set_exception(error)
