"""The dispatcher: runs a named method with packed arguments, and returns an outcome.

The half of a server that knows no transport: every carrier hands its calls to
one `Dispatcher`. Arguments come here only after their sender has been checked.
"""

import concurrent.futures
import contextvars
import inspect
import logging
import types
from collections.abc import Callable, Generator, Mapping, Sequence
from threading import get_ident
from time import perf_counter
from typing import Any, TypeVar

from courier.calls import records
from courier.calls.context import CallContext, enter_call
from courier.calls.marks import grpc_paths, is_idempotent
from courier.calls.outcomes import (
    Answer,
    End,
    Failure,
    Given,
    Item,
    Items,
    Kind,
    Later,
    Outcome,
    Refusal,
    Value,
    packed,
)
from courier.calls.tasks import AsyncGeneratorItems, Tasks, answer
from courier.errors import SerializationError
from courier.threads.locks import Lock
from courier.values.annotations import signature_of
from courier.values.parcel import Parcel, unpack
from courier.values.shared import unwrapped
from courier.values.texts import shortened

_log = logging.getLogger(__name__)

R = TypeVar("R")

#: Answered by every server; the name cannot be that of a public method.
LIST_METHODS = "__courier_methods__"
#: Answered likewise: the docstring and signature of a method.
DESCRIBE_METHOD = "__courier_describe__"
#: More names would make each connection slower to begin.
_MOST_LISTED = 1000
_BAD_ARGUMENTS = Kind.BAD_ARGUMENTS
#: A method faster than this, on average, saves two hops between threads.
FAST_S = 0.0005
#: Fast runs of methods below this are not recorded, because recording takes time, too.
VERY_FAST_S = 0.0001
#: The assumed cost of a method before its first call: not fast.
_UNKNOWN_S = 0.001
#: The cost of one run counts no more than this, so that a slow one does not outweigh many fast
#: ones.
_SLOWEST_S = 0.01
_WEIGHT = 0.2
#: For so long, what was seen of running calls is told again: many may be over at once.
_SEEN_S = 0.05
_MOST_TOLD = 1000  # characters


class _Text(str):
    """Stands in a signature for a value whose type the caller may lack."""

    __slots__ = ()
    __repr__ = str.__str__


def _as_text(value: Any, shown: Callable[[Any], str] = inspect.formatannotation) -> Any:
    return value if value is inspect.Parameter.empty else _Text(shortened(shown(value)))


class _Generator(Items):
    def __init__(
        self,
        iterator: Generator[Any, Any, Any],
        context: contextvars.Context,
        give: Callable[[Any], Any],
    ) -> None:
        self._iterator = iterator
        self._context = context
        self._give = give

    def next_item(self) -> Item:
        """Runs the generator up to its next item. Never raises."""
        outcome: Item = self._context.run(self._step)
        return outcome

    def _step(self) -> Any:
        try:
            return self._give(next(self._iterator))
        except StopIteration:
            return End()
        except BaseException as error:  # noqa: BLE001 - the caller gets it, the server lives on
            self.has_failed = True
            return Failure.of(error, skip_frames=1)

    def close(self) -> None:
        """Ends it early, so that its `finally` blocks run. Never raises: exceptions are logged."""
        try:
            self._context.run(self._iterator.close)
        except BaseException:  # noqa: BLE001 - the server lives on
            _log.exception("a generator failed when its reader had left")


class _SerialGenerator(AsyncGeneratorItems):
    """One of which each step counts as a running handler."""

    is_async = False
    begin = Items.begin


class Dispatcher:
    """The methods of a server, and how one is run. Thread-safe."""

    def __init__(self, *, serial: bool = False) -> None:
        """Makes one without methods. `serial`: an async method holds a thread of the pool."""
        self.tasks = Tasks()
        self._serial = serial
        self._lock = Lock()
        self._methods: dict[str, Callable[..., Any]] = {}
        #: By name: whether the method is idempotent, and the paths of gRPC calls that it answers.
        self._marks: dict[str, tuple[bool, list[str]]] = {}
        #: Returns where the methods are that answer calls now; set by those who can read stacks.
        self.places: Callable[[Dispatcher], Mapping[CallContext, str]] = lambda _: {}
        #: When that was last asked, its answer, and by method why calls are answered later.
        self._seen: tuple[float, Mapping[CallContext, str], Mapping[str, str]] = 0.0, {}, {}
        self._context = contextvars.copy_context()
        #: What its calls are counted for.
        self.scope = records.SCOPE.get()
        self._numbers: dict[str, records.MethodNumbers] = {}
        records.USERS.add(self)

    def bind(self, name: str, method: Callable[..., Any]) -> None:
        marks = is_idempotent(method), grpc_paths(method)  # may run code of the object: no lock
        # A method that answers later holds no thread of the server meanwhile.
        method = getattr(method, "__courier_call__", method)
        if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
            # Imported now, not with the first call: a child that another thread forks meanwhile
            # could never import it.
            import asyncio  # noqa: F401
        with self._lock:
            self._methods[name] = method
            self._marks[name] = marks

    def unbind(self, name: str) -> None:
        with self._lock:
            self._methods.pop(name, None)
            self._marks.pop(name, None)

    def method_of_path(self, path: str) -> str | None:
        with self._lock:
            return next((name for name, (_, paths) in self._marks.items() if path in paths), None)

    def names(self) -> list[str]:
        with self._lock:
            return sorted(self._methods)

    def describe(self, method: str) -> tuple[str | None, inspect.Signature]:
        signature = signature_of(self._methods[method])
        parameters = [
            each.replace(default=_as_text(each.default, repr), annotation=_as_text(each.annotation))
            for each in signature.parameters.values()
        ]
        result = _as_text(signature.return_annotation)
        signature = inspect.Signature(parameters, return_annotation=result)
        return inspect.getdoc(self._methods[method]), signature

    def listed_names(self) -> list[str]:
        """Returns the names that clients get when they connect; empty if there are too many."""
        names = self.names()
        return names if len(names) <= _MOST_LISTED else []

    def idempotent_names(self) -> list[str]:
        with self._lock:
            return sorted(name for name, (harmless, _) in self._marks.items() if harmless)

    def waiting(self) -> list[tuple[str, str, str]]:
        """Returns of each call to answer later its method, the server it waits for or "", and why."""
        with self._lock:
            methods: list[tuple[str, Any]] = list(self._methods.items())
        # By types: other callable objects may answer any name of an attribute, by code of the user.
        owners: list[tuple[str, Any]] = [
            (name, m.__self__) for name, m in methods if type(m) is types.MethodType
        ]
        return [
            (name, *each)
            for name, owner in owners
            if hasattr(type(owner), "__courier_waits__")
            for each in owner.__courier_waits__(name)
        ]

    def whereabouts(self, call: CallContext) -> str:
        """Returns what became of a call so far, as text. Takes about a millisecond. Never raises."""
        now = perf_counter()
        try:
            if now - self._seen[0] > _SEEN_S:
                later = {
                    name: (f" and waits for {server}" if server else "") + f" ({why})"
                    for name, server, why in self.waiting()
                }
                self._seen = now, self.places(self), later
            _, places, reasons = self._seen
            if call.began:
                place = places.get(call) or reasons.get(call.method, "")
                text = f"it has run for {now - call.began:.3g} s{place}"
            else:
                text = "it waits for a thread of the server"
                if oldest := min(places, key=lambda each: each.began, default=None):
                    ran_s = now - oldest.began
                    text += f"; {oldest.method} has run for {ran_s:.3g} s{places[oldest]}"
        except Exception:  # noqa: BLE001 - the call is over anyway, and others go on
            _log.exception("a courier server does not know where its calls are")
            return ""
        return shortened(text, _MOST_TOLD)

    def run(self, method: str, arguments: Parcel, call: CallContext) -> Answer | Later:
        """Runs a method in the current thread. Never raises.

        The handler sees the context variables of the thread that made the
        server: a server belongs to the code that made it.
        """
        function = self._find(method)
        if function is None:
            return self._refuse_unknown(method)
        try:
            args, kwargs = unpack(arguments)
        except SerializationError as error:
            return Refusal(_BAD_ARGUMENTS, f"{method}: {error}")
        except (TypeError, ValueError):
            return Refusal(_BAD_ARGUMENTS, f"{method}: they are not a tuple and a dict")
        except KeyboardInterrupt:  # raised by user code: a Ctrl-C reaches the main thread only
            return Refusal(_BAD_ARGUMENTS, f"{method}: KeyboardInterrupt")
        context = self._context.copy()
        numbers = self._numbers.get(method) or self._numbers_of(method)
        call.began = began = call.began or perf_counter()
        record = numbers.begin(began, call.tag, call.number, get_ident())
        outcome: Answer | Later = context.run(
            self._run_method, function, args, kwargs, call, context, packed
        )
        if type(outcome) is Value:
            numbers.end(record, began, call.came and began - call.came)
            return outcome
        return self._ended(outcome, call, numbers, record)

    def _numbers_of(self, method: str) -> records.MethodNumbers:
        numbers = records.numbers_of(self.scope, None, method)
        if method in self._methods:  # not what callers make up
            self._numbers[method] = numbers
        return numbers

    def _ended(
        self, outcome: R, call: CallContext, numbers: records.MethodNumbers, record: int
    ) -> R:
        """Returns an outcome, and records its end: now, or when it is known."""

        def end(how: int) -> None:
            numbers.end(record, call.began, call.came and call.began - call.came, how)

        if isinstance(outcome, Later):
            outcome.before(lambda answer: self._ended(answer, call, numbers, record))
        elif isinstance(outcome, Items):
            call.on_end(lambda: end(Kind.FAILURE if outcome.has_failed else Kind.END))
        else:
            end(records.how_ended(outcome))
        return outcome

    def run_shared(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], call: CallContext
    ) -> Outcome | Later:
        """As `run`, for callers of the same process that share objects with the method."""
        function = self._find(method)
        if function is None:
            return self._refuse_unknown(method)
        # The other side of a call receives the value itself, here too.
        try:
            args = tuple(map(unwrapped, args))
            kwargs = {name: unwrapped(value) for name, value in kwargs.items()}
        except BaseException as error:  # noqa: BLE001 - as in `_run_method`
            return Failure.of(error, skip_frames=1)
        context = self._context.copy()
        numbers = self._numbers.get(method) or self._numbers_of(method)
        call.began = began = perf_counter()
        record = numbers.begin(began, call.tag, call.number, get_ident())
        outcome: Outcome | Later = context.run(
            self._run_method, function, args, kwargs, call, context, _give
        )
        return self._ended(outcome, call, numbers, record)

    def _run_method(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: CallContext,
        context: contextvars.Context,
        give: Callable[[Any], Any],
    ) -> Any:
        enter_call(call)
        try:
            result = function(*args, **kwargs)
            kind = type(result)
            if kind is types.GeneratorType:
                return _Generator(result, context, give)
            if kind is types.CoroutineType or kind is types.AsyncGeneratorType:
                return self._run_async(result, call, give)
            # Inspecting or pickling a result runs code of its class.
            if isinstance(result, concurrent.futures.Future):
                return Later(result, lambda done: _outcome_of(done, give))
            return give(result)
        except BaseException as error:  # noqa: BLE001 - the caller gets it, the server lives on
            return Failure.of(error, skip_frames=1)

    def _run_async(self, result: Any, call: CallContext, give: Callable[[Any], Any]) -> Any:
        if type(result) is types.AsyncGeneratorType:
            kind = _SerialGenerator if self._serial else AsyncGeneratorItems
            return kind(result, give, self.tasks, call)
        try:
            future = self.tasks.submit(answer(result, give, call), call)
        except BaseException:
            result.close()  # so that Python does not complain of it
            raise
        future.add_done_callback(lambda _: result.close())  # the same, if it has not begun
        if self._serial:
            return _outcome_of(future)
        return Later(future, _outcome_of)

    def _find(self, method: str) -> Callable[..., Any] | None:
        # No lock: reading a dict is atomic.
        if method == LIST_METHODS:
            return self.names
        return self.describe if method == DESCRIBE_METHOD else self._methods.get(method)

    def _refuse_unknown(self, method: str) -> Refusal:
        return Refusal(Kind.UNKNOWN_METHOD, describe_unknown(method, self.names()))


class MethodCosts(dict[str, float]):
    """Recent costs of methods, in seconds, to find the fast ones. Thread-safe: lost updates do no harm."""

    def __missing__(self, method: str) -> float:
        return _UNKNOWN_S

    def learn(self, method: str, took_s: float) -> None:
        """Records one run in an exponential average with a limit."""
        cost = self[method]
        self[method] = cost + _WEIGHT * (min(took_s, _SLOWEST_S) - cost)


def describe_unknown(method: str, names: Sequence[str]) -> str:
    import difflib  # only mistakes need it

    nearest = difflib.get_close_matches(method, names, 1)
    return (
        f"no public method {method!r}"
        + (f" (did you mean {nearest[0]!r}?)" if nearest else "")
        + f"; there are: {', '.join(names) or 'none'}"
    )


def _give(result: Any) -> Given:
    return Given(unwrapped(result))


def _outcome_of(
    future: "concurrent.futures.Future[Any]", give: Callable[[Any], Answer] | None = None
) -> Answer:
    """Returns the outcome that `give` makes of a result; without it, the result is one."""
    try:
        # Not raised here: it may belong to many futures, and would grow a traceback for each.
        error = future.exception()
        if error is None:
            return future.result() if give is None else give(future.result())
    except BaseException as failure:  # noqa: BLE001 - the caller gets it, the server lives on
        error = failure
    return Failure.of(error, skip_frames=1)
