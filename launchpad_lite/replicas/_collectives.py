"""Collectives on nested values: the same calls, in the same order, in all replicas."""

import os
import pickle
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar, get_args

import courier
from launchpad_lite.launching import loaded_module
from launchpad_lite.replicas._carrier import NEWS_S, Array, Carrier, CollectiveCall, Op
from launchpad_lite.replicas._operations import leave_out
from launchpad_lite.replicas._packing import Packed

T = TypeVar("T")

_HERE = str(Path(__file__).parent)
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_OPS = get_args(Op)


class Collectives:
    """Calls that replicas make together. Thread-safe: calls run in the order in which they begin.

    `averages` has those of gradients by optimizer; each key lives as long as its parameters.
    `seconds` is the time spent waiting for others and moving data, so far. The values of replicas
    in `idle` are left out.

    Calls raise `CollectiveMismatchError` if replicas make different ones, and `ReplicaLostError` if
    one is lost.
    """

    def __init__(self, carrier: Carrier) -> None:
        self.rank, self.size = carrier.rank, carrier.size
        self.averages: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self.seconds = 0.0
        #: The newest call.
        self.last: CollectiveCall | None = None
        self.idle: Collection[int] = ()
        self._carrier = carrier
        self._takes: dict[Any, bool] = {}
        #: Held while a call gets its number and its place in the order.
        self._lock = threading.RLock()
        self._number = 0
        #: Runs calls in the background; made at the first use.
        self._background: ThreadPoolExecutor | None = None
        #: The last call in the background.
        self._last: Future[None] | None = None
        #: The last call for which `result_of` waits.
        self._awaited: Any = None
        #: Has the error of `abort`.
        self._aborted: Future[Any] = Future()

    def all_reduce(self, nest: Any, op: Op = "sum", label: str = "") -> Any:
        """Returns a nested value in which each leaf is combined over the replicas."""
        if op not in _OPS:
            raise ValueError(f"op is one of {', '.join(_OPS)}, not {op!r}")
        packed = Packed(nest, op, self._carrier.aside)

        def reduce(call: CollectiveCall) -> None:
            for array in packed.arrays.values():
                self._reduce(array, op, call, self.idle)

        self._now(reduce, f"all_reduce({op})", label, packed.text)
        return packed.unpacked()

    def all_gather(self, value: Any, label: str = "") -> list[Any]:
        """Returns the value of each replica, by rank: any values that can be pickled."""

        def gather(call: CollectiveCall) -> list[Any]:
            try:
                return list(self._carrier.all_gather(value, call))
            except (TypeError, AttributeError, pickle.PicklingError) as error:
                raise TypeError(
                    f"replica {self.rank}: {label or 'a value'} cannot be gathered: {error}"
                ) from error

        return self._now(gather, "all_gather", label)

    def broadcast(self, nest: Any, source: int = 0, label: str = "") -> Any:
        """Returns the nested value of one replica; the others' have the same types and shapes."""
        if not 0 <= source < self.size:
            raise ValueError(f"source is a replica, 0 to {self.size - 1}, not {source}")
        packed = Packed(nest, aside=self._carrier.aside)

        def send(call: CollectiveCall) -> None:
            for array in packed.arrays.values():
                self._carrier.broadcast(array, source, call)

        self._now(send, f"broadcast from {source}", label, packed.text)
        return packed.unpacked()

    def fill(self, array: Array, source: int, label: str) -> None:
        """Fills a flat array with that of one replica, which has the same type and size."""
        self._now(
            lambda call: self._carrier.broadcast(array, source, call),
            f"broadcast from {source}",
            label,
            f"{array.dtype}[{len(array)}]",
        )

    def takes(self, device: Any) -> bool:
        """Returns whether `reduce_later` takes tensors on this GPU. All replicas ask together."""
        if device not in self._takes:
            self._takes[device] = self._now(
                lambda call: self._carrier.takes(device, call), "compare GPUs", ""
            )
        return self._takes[device]

    def buffer(self, nbytes: int) -> Array:
        return self._carrier.buffer(nbytes)

    def reduce_later(self, array: Any, op: Op, label: str) -> Future[None]:
        """Combines a flat array in place, in the background; returns a future for `finish`."""
        text = f"{array.dtype}[{len(array)}]"
        with self._lock:
            call = self._call(f"all_reduce({op})", label, text)
            if self._background is None:
                self._background = ThreadPoolExecutor(1, "replica-collectives")
            self._last = self._background.submit(self._reduce, array, op, call, self.idle)
            return self._last

    def finish(self, later: Future[None]) -> None:
        begun_at = time.monotonic()
        try:
            later.result()
        finally:
            self.seconds += time.monotonic() - begun_at

    def abort(self, error: Exception) -> None:
        if not self._aborted.done():
            self._aborted.set_exception(error)
        if self._awaited is not None:
            self._awaited.cancel()
        self._carrier.abort(error)

    def result_of(self, call: Any) -> Any:
        """Returns the answer of another replica to a call, a future; `abort` ends the wait."""
        self._awaited = call
        if self._aborted.done():
            call.cancel()
            return self._aborted.result()
        try:
            # Not `wait`, in which a thread of courier would read the answer, some ms later.
            return call.result()
        except CancelledError:
            if not self._aborted.done():
                raise
        except courier.ServerLostError:
            # That replica is lost, and this generation ends soon; or its answer needs one that is.
            wait([self._aborted], NEWS_S)
            if not self._aborted.done():
                raise
        return self._aborted.result()

    def close(self) -> None:
        """Ends the thread, and frees the memory of the carrier."""
        if self._background is not None:
            self._background.shutdown(cancel_futures=True)
        self._carrier.close()

    def _reduce(self, array: Any, op: Op, call: CollectiveCall, idle: Collection[int]) -> None:
        if not idle:
            self._carrier.all_reduce(array, op, call)
            return
        if self.rank in idle:
            leave_out(array, op)
        # Divided before the sum, which may be too large for float16.
        if op == "mean" and isinstance(array, list):
            array[:] = [leaf / (self.size - len(idle)) for leaf in array]
        elif op == "mean":
            array /= self.size - len(idle)
        self._carrier.all_reduce(array, "sum" if op == "mean" else op, call)

    def _now(self, work: Callable[[CollectiveCall], T], kind: str, label: str, text: str = "") -> T:
        with self._lock:
            call = self._call(kind, label, text)
            begun_at = time.monotonic()
            try:
                if self._last is not None:
                    self._last.exception()  # calls in the background come first
                    self._last = None
                return work(call)
            finally:
                self.seconds += time.monotonic() - begun_at

    def _call(self, kind: str, label: str, text: str) -> CollectiveCall:
        self._number += 1
        signature = kind + (f" of {label}" if label else "") + (f": {text}" if text else "")
        self.last = CollectiveCall(self._number, signature, _site())
        return self.last


def _site() -> str:
    """Returns the line of the user's code that makes a call; empty if no such code does."""
    torch = loaded_module("torch")  # it calls hooks, in the backward pass and in step()
    others = _HERE if torch is None else (_HERE, torch.__path__[0] + os.sep)
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(others):
        frame = frame.f_back
    # None in the backward pass of a GPU, or where nodes gather the results of functions.
    if frame is None or frame.f_code.co_filename.startswith(_PACKAGE):
        return ""
    code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
