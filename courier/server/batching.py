"""Methods that answer many calls at once.

A model on an accelerator answers a batch in the time of one. Callers see an ordinary method; the
server merges calls that come within a short time. No thread waits for an answer: there may be more
callers than threads.
"""

import collections
import concurrent.futures
import contextvars
import datetime as dt
import functools
import inspect
import logging
import operator
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from courier._timing import DEFAULT, Timing
from courier.calls.context import CallContext, current_call, enter_call, is_in_call
from courier.calls.marks import idempotent, is_idempotent
from courier.errors import ServerBusyError
from courier.threads.forks import survive
from courier.threads.handler_pool import HandlerPool
from courier.threads.locks import Condition, Lock

Future = concurrent.futures.Future

_log = logging.getLogger(__name__)

#: Marks a missing argument: None and all numbers have a meaning.
_NOT_GIVEN: Any = object()


def batched_handler(
    batch_size: int,
    max_parallelism: int = 1,
    timeout_s: dt.timedelta | float | None = 0.2,
    pad_batch: bool = False,
    *,
    timeout: dt.timedelta | float | None = _NOT_GIVEN,
    timing: Timing = DEFAULT,
) -> Callable[[Callable[..., Any]], "BatchedHandler"]:
    """Makes a function answer several calls at once.

    Each argument is merged with those of the other calls: numbers and arrays are stacked along a
    new first axis (numpy), tuples and dicts are merged inside, everything else becomes a list. The
    function returns one item per call: a list, an array, or a tuple or dict of these. If it raises,
    all callers of the batch get the exception. Calls with other shapes or other names of arguments
    go into batches of their own.

    Served by a courier server, calls that wait hold no thread. Called from the same process, it
    blocks. Decorates methods, too: each object has batches of its own. Thread-safe.

    Args:
        batch_size: How many calls make a batch.
        max_parallelism: Batches that run at the same time. Meanwhile the next one fills up.
        timeout_s: How long the first call of a batch waits for others, in seconds or as a timedelta;
            0 does not wait, None waits until the batch is full.
        pad_batch: Whether the first call of a batch is repeated until it has its full size, for
            functions that are compiled for one shape.
        timeout: Launchpad's name of `timeout_s`.
        timing: How soon its threads leave.

    Raises:
        TypeError: A number is not whole, the timeout is no time, or the decorated object cannot be
            called, or is `async` or a generator.
        ValueError: A number is below 1, or the timeout below 0.

    Example:
        class Inference:
            def __init__(self):
                self.act = lp.batched_handler(batch_size=32)(self._act)

            def _act(self, observations):  # [32, ...]
                return self._network(observations)
    """
    if callable(batch_size):
        raise TypeError("batched_handler takes its numbers first: @batched_handler(batch_size=8)")
    batch_size, max_parallelism = operator.index(batch_size), operator.index(max_parallelism)
    if batch_size < 1 or max_parallelism < 1:
        raise ValueError("batch_size and max_parallelism are at least 1")
    given = timeout_s if timeout is _NOT_GIVEN else timeout
    wait_s = given.total_seconds() if isinstance(given, dt.timedelta) else given
    if wait_s is not None and not isinstance(wait_s, int | float):
        raise TypeError(f"a timeout is a number of seconds or a timedelta, not {given!r}")
    if wait_s is not None and not wait_s >= 0:
        raise ValueError(f"a batch cannot wait for {wait_s} s")

    def decorate(function: Callable[..., Any]) -> BatchedHandler:
        if not callable(function):
            raise TypeError(f"batched_handler takes a function, not {function!r}")
        kinds = (
            inspect.iscoroutinefunction,
            inspect.isasyncgenfunction,
            inspect.isgeneratorfunction,
        )
        if any(is_kind(function) for is_kind in kinds):
            raise TypeError(
                f"batched_handler takes a function that returns its items; {function!r} is async or "
                "yields. Make it an ordinary function: it runs in a thread of its own"
            )
        return BatchedHandler(function, options)

    options = _Options(batch_size, max_parallelism, wait_s, pad_batch, timing)
    return decorate


class _Options(NamedTuple):
    batch_size: int
    max_parallelism: int
    timeout_s: float | None
    pad_batch: bool
    timing: Timing


class _BatchedCall:
    __slots__ = ("args", "came_at", "form", "future", "in_call", "kwargs")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args = args
        self.kwargs = kwargs
        # In the caller's thread: if unusual arguments make it fail, other callers are not affected.
        self.form = _form_of((args, kwargs))
        self.in_call = is_in_call()
        self.future: Future[Any] = Future()
        self.came_at = time.monotonic()


class BatchedHandler:
    """A function with `batched_handler`."""

    def __init__(self, function: Callable[..., Any], options: _Options) -> None:
        # Not its attributes: they could have the names of ours.
        functools.update_wrapper(self, function, updated=())
        if is_idempotent(function):
            idempotent(self)
        self._function = function
        self._options = options
        #: The context of the thread that made it, as for the methods of a server.
        self._context = contextvars.copy_context()
        self._name = ""
        self._survive_fork()
        survive(self)

    def _survive_fork(self) -> None:
        self._changed = Condition(Lock())
        #: Calls that fit together, in the order of arrival; no list is empty.
        self._waiting: dict[Any, collections.deque[_BatchedCall]] = {}
        #: Whether a thread gathers a batch, or will as soon as one is free.
        self._gathers = False
        self._threads = HandlerPool(
            "courier-batch",
            self._options.max_parallelism,
            1,
            idle_s=self._options.timing.batch_idle_s,
        )

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, obj: object, owner: type | None = None) -> "BatchedHandler":
        bind = getattr(self._function, "__get__", None)
        if obj is None or bind is None or not self._name:
            return self
        # Later look-ups find it there.
        found: BatchedHandler = vars(obj).setdefault(
            self._name, BatchedHandler(bind(obj, owner), self._options)
        )
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.submit(*args, **kwargs).result()

    def submit(self, *args: Any, **kwargs: Any) -> "Future[Any]":
        request = _BatchedCall(args, kwargs)
        with self._changed:
            self._look_after(1 + len(self._waiting.get(request.form, ())))
            self._waiting.setdefault(request.form, collections.deque()).append(request)
        if request.in_call:
            current_call().on_end(lambda: self._forget(request))
        return request.future

    def __courier_waits__(self, _: str) -> list[tuple[str, str]]:
        sizes = [len(group) for group in tuple(self._waiting.values())]
        text = f"its batch has %d of {self._options.batch_size} calls"
        return [("", text % size) for size in sizes for _ in range(size)]

    #: Served instead of the object itself; see `courier.calls.dispatch`.
    __courier_call__ = submit

    def __reduce__(self) -> Any:
        # One in the body of a class is pickled with it, as classes of `__main__` are. Others belong
        # to an object, whose calls must not be split between two.
        if not self._name or not inspect.isfunction(self._function):
            raise TypeError(
                "a batched handler cannot be pickled, but as a decorator in the body of a class; "
                "make it in the constructor of the served object"
            )
        # Not by the constructor: the function may refer to its class, which refers to this object.
        state = (self._function, self._options, self._name, is_idempotent(self))
        return object.__new__, (BatchedHandler,), state

    def __setstate__(self, state: Any) -> None:
        function, options, name, is_harmless = state
        BatchedHandler.__init__(self, function, options)
        self._name = name
        if is_harmless:
            idempotent(self)

    def _look_after(self, count: int) -> None:
        """Sees to it that a thread gathers, and hears of so many calls that fit together."""
        if self._gathers:
            if count >= self._options.batch_size:
                self._changed.notify()
        elif self._threads.submit(self._run).cancelled():
            raise ServerBusyError("no thread can be started to run a batch; nothing was run")
        else:
            self._gathers = True

    def _forget(self, request: _BatchedCall) -> None:
        # Answered or cancelled.
        with self._changed:
            group = self._waiting.get(request.form)
            if group is None or request not in group:
                return
            group.remove(request)
            if not group:
                del self._waiting[request.form]
            self._changed.notify()
        # Not under the lock: its callbacks may call this object.
        request.future.cancel()
        _settle(request.future)

    def _run(self) -> None:
        self._answer(self._gather())

    def _gather(self) -> list[_BatchedCall]:
        """Returns the next batch; empty if no caller waits any more. For the gathering thread."""
        with self._changed:
            while self._waiting and (left := min(map(self._time_of, self._waiting.values()))) > 0:
                self._changed.wait(left)
            batch = self._take() if self._waiting else []
            self._gathers = False
            if self._waiting:
                self._look_after(0)
            return batch

    def _time_of(self, group: Sequence[_BatchedCall]) -> float:
        """Returns how long calls that fit together still wait for others."""
        if len(group) >= self._options.batch_size:
            return 0.0
        if self._options.timeout_s is None:
            return threading.TIMEOUT_MAX
        left = group[0].came_at + self._options.timeout_s - time.monotonic()
        return min(left, threading.TIMEOUT_MAX)

    def _take(self) -> list[_BatchedCall]:
        # The oldest that is due: one kind of call must not keep others waiting for ever.
        due = [group for group in self._waiting.values() if self._time_of(group) <= 0]
        group = min(due, key=lambda group: group[0].came_at)
        form = group[0].form
        batch = [group.popleft() for _ in range(min(len(group), self._options.batch_size))]
        if not group:
            del self._waiting[form]
        return batch

    def _answer(self, batch: Sequence[_BatchedCall]) -> None:
        if not batch:
            return
        try:
            count = self._options.batch_size if self._options.pad_batch else len(batch)
            padding = [batch[0]] * (count - len(batch))
            args, kwargs = _merge([(each.args, each.kwargs) for each in (*batch, *padding)])
            in_call = any(request.in_call for request in batch)
            result = self._context.copy().run(self._run_function, args, kwargs, in_call=in_call)
            results = _split(result, count)
        except BaseException as error:  # noqa: BLE001 - the callers get it
            for request in batch:
                _settle(request.future, error=error)
            return
        for request, item in zip(batch, results, strict=False):
            _settle(request.future, item)

    def _run_function(self, args: Sequence[Any], kwargs: dict[str, Any], *, in_call: bool) -> Any:
        if not in_call and not is_in_call():  # it may have been made in an earlier call
            return self._function(*args, **kwargs)
        # A context of its own: the end of one caller must not end calls for others.
        name = getattr(self._function, "__name__", type(self._function).__name__)
        call = CallContext(name, "several callers", None)
        enter_call(call)
        try:
            return self._function(*args, **kwargs)
        finally:
            call.end()


def _settle(future: "Future[Any]", result: Any = None, error: BaseException | None = None) -> None:
    try:
        if not future.set_running_or_notify_cancel():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)
    except BaseException:  # noqa: BLE001 - a callback of one caller must not affect the others
        _log.exception("the answer to a call in a batch could not be given")


def _form_of(value: Any) -> Any:
    """Returns a hashable key, which is equal for values that can be merged."""
    if isinstance(value, dict):
        return dict, frozenset((name, _form_of(inner)) for name, inner in value.items())
    if isinstance(value, tuple):
        return type(value), tuple(map(_form_of, value))
    if _is_number(value):
        return "number"
    if _is_array(value):
        return "array", tuple(value.shape), str(value.dtype)
    return "other"


def _merge(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, dict):
        return {name: _merge([value[name] for value in values]) for name in first}
    if isinstance(first, tuple):
        return _tuple_like(first, map(_merge, zip(*values, strict=True)))
    if _is_number(first) or _is_array(first):
        try:
            import numpy as np
        except ImportError:
            return list(values)
        return np.stack([np.asarray(value) for value in values])
    return list(values)


def _split(result: Any, count: int) -> Sequence[Any]:
    """Returns the items of a result, one per call; TypeError or ValueError for others."""
    if isinstance(result, dict):
        columns = {name: _split(inner, count) for name, inner in result.items()}
        return [{name: items[index] for name, items in columns.items()} for index in range(count)]
    if isinstance(result, tuple):
        parts = [_split(inner, count) for inner in result]
        return [_tuple_like(result, (part[index] for part in parts)) for index in range(count)]
    # A table has a shape, too, but its items are columns.
    is_array = hasattr(result, "shape") and hasattr(result, "dtype")
    if is_array and not len(result.shape):
        raise TypeError(
            f"a batched handler returns one item per call: {count}, but there is a single number "
            f"({type(result).__qualname__})"
        )
    if is_array or isinstance(result, list):
        items = list(result)
        if len(items) != count:
            raise ValueError(
                f"a batched handler returns one item per call: {count}, but there are {len(items)}"
            )
        return items
    raise TypeError(
        "a batched handler returns a list or an array with one item per call, or a tuple or dict of "
        f"these, not {type(result).__qualname__}"
    )


def _tuple_like(kind: tuple[Any, ...], items: Iterable[Any]) -> Any:
    make = getattr(kind, "_make", tuple)  # of a named tuple
    return make(items)


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float)


def _is_array(value: Any) -> bool:
    # Also arrays of other libraries, which stay of their type; imports none of them.
    return hasattr(value, "__array__") and hasattr(value, "dtype") and "numpy" in sys.modules
