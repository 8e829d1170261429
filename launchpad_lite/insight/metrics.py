"""Numbers of a node: counters, gauges and histograms, values that it logs, views, and its calls.

All functions are thread-safe and work in nodes only: elsewhere they raise NoProgramError. A name has up
to 100 letters, digits and `_ . / -`, begins with a letter, and is of one kind; a node has at most
1,000 of them. All else is a ValueError, also values that are not finite; what is no number is a
TypeError. Parts of a colocation share the metrics of their node. `top` and the page show them.

Example:
    lp.metrics.counter("episodes").add()
    lp.metrics.gauge("epsilon").set(0.1)
    lp.metrics.histogram("return").observe(12.5)
"""

import contextlib
import itertools
import logging
import math
import re
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from courier import lowlevel
from launchpad_lite.life.events import Logged
from launchpad_lite.parts.threads import has_returned
from launchpad_lite.worker.runtime import NodeRuntime, current_runtime

__all__ = [
    "CounterMetric",
    "GaugeMetric",
    "HistogramMetric",
    "counter",
    "gauge",
    "histogram",
    "log",
    "view",
]

_NAME = re.compile(r"[a-zA-Z][a-zA-Z0-9_./-]{0,99}")
#: So that names made of data do not fill the memory.
_MOST = 1000
#: Characters of a view that are shown, and bars.
_MOST_TEXT, _MOST_BARS = 4000, 50
#: Seconds between two lines that a node prints for `lp.log`, and between two messages with its values.
_PRINT_S, _TELL_S = 10.0, 1.0
_VIEWS_S = 2.0  # seconds that the views of a node have at its end

_LOGGER = logging.getLogger(__name__)


def _number(name: str, value: Any) -> float:
    try:
        if not isinstance(value, str | bytes):
            return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # a tensor of several values
        pass
    raise TypeError(f"{name!r} is a number, not {lowlevel.shortened(repr(value))}")


class _Metric:
    kind: str
    value: Any = None

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()

    def _finite(self, value: Any) -> float:
        if math.isfinite(number := _number(self.name, value)):
            return number
        raise ValueError(f"{self.name!r} is a finite number, not {number}")


class CounterMetric(_Metric):
    """A sum that only grows: what has happened so often. `value` is the sum."""

    kind = "counter"
    value: float = 0.0

    def add(self, amount: float = 1) -> None:
        """Adds an amount from 0 up."""
        if (amount := self._finite(amount)) < 0:
            raise ValueError(f"the counter {self.name!r} only grows, and cannot add {amount:g}")
        with self._lock:
            self.value += amount


class GaugeMetric(_Metric):
    """How much there is now. `value` is None before it is set."""

    kind = "gauge"
    value: float | None = None

    def set(self, value: float) -> None:
        """Sets the value."""
        self.value = self._finite(value)


class HistogramMetric(_Metric):
    """How values are distributed.

    `value` has their `count` and `sum`, and `buckets`: pairs of a power of two and how many values are
    below it, but not below its half. Those up to 0 are in the bucket 0.
    """

    kind = "histogram"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._sum = 0.0
        self._buckets: dict[float, int] = {}

    def observe(self, value: float) -> None:
        """Counts a value."""
        value = self._finite(value)
        bound = 2.0 ** min(math.frexp(value)[1], 1023) if value > 0 else 0.0
        with self._lock:
            self._sum += value
            self._buckets[bound] = self._buckets.get(bound, 0) + 1

    @property
    def value(self) -> dict[str, Any]:
        """What was observed so far."""
        with self._lock:
            buckets = [[*each] for each in sorted(self._buckets.items())]
            return {
                "count": sum(count for _, count in buckets),
                "sum": self._sum,
                "buckets": buckets,
            }


class _View(_Metric):
    kind = "view"
    read: Callable[[], object] = str

    @property
    def value(self) -> Any:
        """What the function returns now; None while an earlier call of it has not returned."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            if not isinstance(found := self.read(), Mapping):
                return str(found)[:_MOST_TEXT]
            # First all of them: another thread may change the mapping.
            bars = list(itertools.islice(found.items(), _MOST_BARS))
            return {str(name)[:_MOST_TEXT]: self._finite(value) for name, value in bars}
        except Exception as error:  # noqa: BLE001 - it is shown
            # Whose own text may fail.
            return "".join(traceback.format_exception_only(error)).strip()[:_MOST_TEXT]
        finally:
            self._lock.release()


_AnyMetric = TypeVar("_AnyMetric", CounterMetric, GaugeMetric, HistogramMetric, _View)


class _NodeNumbers:
    """All numbers of one node."""

    def __init__(self, runtime: NodeRuntime) -> None:
        self._runtime = weakref.ref(runtime)
        self._title = "" if runtime.has_process else f"{runtime.name} "  # threads share an output
        self._lock = threading.Lock()
        self._metrics: dict[str, Any] = {}
        self.logged: dict[str, float] = {}
        self._step: int | None = None
        #: Names that were logged and neither printed nor told; when that was done last.
        self._to_print: set[str] = set()
        self._to_tell: set[str] = set()
        self._printed_at = self._told_at = -math.inf
        self._ended = threading.Event()
        self._flushes = False
        runtime.end_with_node(self._end)

    def metric(self, kind: type[_AnyMetric], name: str) -> _AnyMetric:
        found = self._metrics.get(name)
        if found is None:
            self.check(name, self._metrics)
            with self._lock:
                found = self._metrics.setdefault(name, kind(name))
        if type(found) is not kind:
            raise ValueError(f"{name!r} is a {found.kind} of this node already")
        return found

    @staticmethod
    def check(name: Any, known: Collection[str]) -> None:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(
                f"{lowlevel.shortened(repr(name))} is no name of a metric: up to 100 letters, digits "
                "and _ . / - that begin with a letter"
            )
        if len(known) >= _MOST and name not in known:
            raise ValueError(
                f"this node has {_MOST} metrics already, without {name!r}: names are for kinds of "
                "things, not for each of them"
            )

    def log(self, values: Mapping[str, float], step: int | None) -> None:
        with self._lock:
            self.logged.update(values)
            self._to_print.update(values)
            self._to_tell.update(values)
            self._step = step
            self._flush(time.monotonic())
            if self._flushes or not (self._to_print or self._to_tell):
                return
            self._flushes = True
        threading.Thread(target=self._run, name="launchpad-log", daemon=True).start()

    def _run(self) -> None:
        """Prints and tells what came within an interval, at its end."""
        while not self._ended.wait(_TELL_S):
            with self._lock:
                self._flush(time.monotonic())
                if not self._to_print and not self._to_tell:
                    self._flushes = False
                    return

    def _flush(self, now: float) -> None:
        if self._to_tell and now >= self._told_at + _TELL_S:
            self._told_at = now
            if (runtime := self._runtime()) is not None:
                told = {name: self.logged[name] for name in sorted(self._to_tell)}
                runtime.say(Logged, told, self._step, {})
            self._to_tell.clear()
        if self._to_print and now >= self._printed_at + _PRINT_S:
            self._printed_at = now
            at = "" if self._step is None else f"step {self._step}: "
            shown = " ".join(f"{name}={self.logged[name]:.6g}" for name in sorted(self._to_print))
            self._to_print.clear()
            with contextlib.suppress(OSError, ValueError):  # nobody reads it, or it is closed
                print(f"{self._title}{at}{shown}", flush=True)  # noqa: T201 - what it is for

    def _end(self) -> None:
        self._ended.set()
        with self._lock:
            self._flush(math.inf)
        if not has_returned(self._tell_views, _VIEWS_S):
            metrics = list(self._metrics.values())
            late = [each.name for each in metrics if each.kind == "view" and each._lock.locked()]
            _LOGGER.warning("views that do not return: %s. Their node ends without them", late)
        self._metrics.clear()  # the functions of views may refer to the node

    def _tell_views(self) -> None:
        # So that the folder of the run has them, also where nobody looked.
        if (views := self.read()["view"]) and (runtime := self._runtime()) is not None:
            runtime.say(Logged, {}, None, views)

    def read(self) -> dict[str, Any]:
        kinds = "counter", "gauge", "histogram", "view"
        found: dict[str, dict[str, Any]] = {kind: {} for kind in kinds}
        for name, each in list(self._metrics.items()):
            found[each.kind][name] = each.value
        found["log"] = self.logged.copy()
        for kind in ("counter", "gauge", "log"):
            for name, value in found[kind].items():  # sums may be too large, and JSON has no inf
                found[kind][name] = value if value is None or math.isfinite(value) else None
        return {**found, "step": self._step}


_numbers: "weakref.WeakKeyDictionary[NodeRuntime, _NodeNumbers]" = weakref.WeakKeyDictionary()
_numbers_lock = threading.Lock()


def _here() -> _NodeNumbers:
    runtime = current_runtime().whole
    with _numbers_lock:
        if (found := _numbers.get(runtime)) is None:
            found = _numbers[runtime] = _NodeNumbers(runtime)
        return found


def counter(name: str) -> CounterMetric:
    """Returns the counter of this node with a name. Raises as the module says."""
    return _here().metric(CounterMetric, name)


def gauge(name: str) -> GaugeMetric:
    """Returns the gauge of this node with a name. Raises as the module says."""
    return _here().metric(GaugeMetric, name)


def histogram(name: str) -> HistogramMetric:
    """Returns the histogram of this node with a name. Raises as the module says."""
    return _here().metric(HistogramMetric, name)


def view(name: str, read: Callable[[], object]) -> None:
    """Shows text of this node on the page and in `top`, or numbers as bars.

    Args:
        name: The name of the view; the view of this name that was there before is replaced.
        read: Returns numbers by name, of which 50 are shown; anything else is shown as text, by `str`.
            Called in another thread, once a second while somebody looks, and at the end of the node.
            It returns soon, because other numbers of the node wait for it, and the end of the node up
            to 2 s. What it raises is shown.

    Raises:
        NoProgramError: No program runs here.
        ValueError: The name is not valid.

    Example:
        lp.metrics.view("queue", lambda: f"{len(self.queue)} waiting, {self.done} done")
    """
    _here().metric(_View, name).read = read


def log(values: Mapping[str, float], step: int | None = None) -> None:
    """Shows values of this node: a line in its output, and a curve on the page. Thread-safe.

    At most one line is printed in 10 s, with the newest value of each name, and the last one when
    the node ends. One value of each second is kept in the folder of the run.

    Args:
        values: Numbers, or arrays and tensors of one number, by name.
        step: What they belong to, if anything.

    Raises:
        NoProgramError: No program runs here.
        TypeError: A value is no number, or the step is no whole number.
        ValueError: A name is not valid.

    Example:
        lp.log({"loss": 0.3, "accuracy": 0.9}, step=100)  # prints "step 100: accuracy=0.9 loss=0.3"
    """
    if not isinstance(values, Mapping):
        raise TypeError(f"lp.log takes values by name, as {{'loss': 0.3}}, not {values!r}")
    if step is not None and not hasattr(step, "__index__"):
        raise TypeError(f"lp.log: step is a whole number, not {step!r}")
    here = _here()
    known = {*here.logged}
    for name in values:
        here.check(name, known)
        known.add(name)
    numbers = {name: _number(name, value) for name, value in values.items()}
    here.log(numbers, None if step is None else step.__index__())


def numbers(runtime: NodeRuntime, idents: Collection[int] | None, argument: object) -> Any:  # noqa: ARG001
    """Answers the question `numbers`: the `calls` and `metrics` of the node."""
    found = _numbers.get(runtime)
    calls = lowlevel.call_numbers(runtime.call_scopes())
    return {"calls": calls, "metrics": {} if found is None else found.read()}
