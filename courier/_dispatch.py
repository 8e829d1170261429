"""From a named method and its packed arguments to an outcome.

The half of a server that knows no transport: every carrier hands its calls to
one `Dispatcher`. Arguments come here only after their sender has been checked.
"""

import concurrent.futures
import contextvars
import inspect
import logging
import threading
import types
from collections.abc import Callable, Generator, Sequence
from typing import Any

from courier._context import CallContext, enter_call
from courier._idempotence import is_idempotent
from courier._kinds import Kind
from courier._outcomes import (
    Answer,
    End,
    Failure,
    Given,
    Item,
    Items,
    Later,
    Outcome,
    Refusal,
    Step,
    packed,
)
from courier._parcel import Parcel, unpack
from courier._pool import HandlerPool
from courier._services import grpc_paths
from courier._shared import unwrapped
from courier._tasks import Steps, Tasks, answer
from courier.errors import SerializationError

_log = logging.getLogger(__name__)

#: Answered by every server; the name cannot be that of a public method.
LIST_METHODS = "__courier_methods__"
#: More names would make each connection slower to begin.
_MOST_LISTED = 1000
_BAD_ARGUMENTS = Kind.BAD_ARGUMENTS


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
            item = next(self._iterator)
        except StopIteration:
            return End()
        except BaseException as error:  # noqa: BLE001 - the caller gets it, the server lives on
            return Failure.of(error, skip_frames=1)
        try:
            return self._give(item)
        except BaseException as error:  # noqa: BLE001 - as above
            return Failure.of(error, skip_frames=1)

    def close(self) -> None:
        """Ends the generator early, so that its `finally` blocks run. Never raises.

        No caller is left to receive what they raise, so it is logged.
        """
        try:
            self._context.run(self._iterator.close)
        except BaseException:  # noqa: BLE001 - the server lives on
            _log.exception("a generator failed when its reader had left")


class _AsyncGenerator(Items):
    """The method is an async generator. Its steps hold no thread."""

    is_async = True

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def next_item(self) -> Item:
        """Runs the generator up to its next item, and waits for that."""
        step: Step[Item] = Step()
        self._steps.ask(step)
        return step.result()

    def begin(self, handlers: HandlerPool, then: Callable[["Step[Any]"], object]) -> None:  # noqa: ARG002
        """Takes one step, and calls back in the thread of the loop."""
        step: Step[Item] = Step()
        step.add_done_callback(then)
        self._steps.ask(step)

    def close(self) -> None:
        """Ends the generator early. Never raises, and does not wait for its `finally` blocks."""
        self._steps.close()


class _SerialGenerator(_AsyncGenerator):
    """As `_AsyncGenerator`, but that a step counts as a handler that runs."""

    is_async = False
    begin = Items.begin


class Dispatcher:
    """The methods of a server, and how one is run. Thread-safe."""

    def __init__(self, *, serial: bool = False) -> None:
        """Makes one without methods.

        Args:
            serial: Whether a call of an async method is to hold the thread that runs it.
        """
        self.tasks = Tasks()
        self._serial = serial
        self._lock = threading.Lock()
        self._methods: dict[str, Callable[..., Any]] = {}
        self._idempotent: set[str] = set()
        #: Names of those that answer gRPC services, by the path of a call.
        self._paths: dict[str, str] = {}
        self._context = contextvars.copy_context()

    def bind(self, name: str, method: Callable[..., Any]) -> None:
        """Adds or replaces a method."""
        harmless = is_idempotent(method)  # may run code of the object: not under the lock
        paths = grpc_paths(method)  # as above
        # What answers later holds no thread of the server meanwhile.
        method = getattr(method, "__courier_call__", method)
        if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
            # Not with the first call: a child that another thread forks meanwhile could never import it.
            import asyncio  # noqa: F401
        with self._lock:
            self._forget(name)
            self._methods[name] = method
            if harmless:
                self._idempotent.add(name)
            self._paths.update(dict.fromkeys(paths, name))

    def unbind(self, name: str) -> None:
        """Removes a method if there is one."""
        with self._lock:
            self._forget(name)

    def _forget(self, name: str) -> None:
        self._methods.pop(name, None)
        self._idempotent.discard(name)
        self._paths = {path: each for path, each in self._paths.items() if each != name}

    def method_of_path(self, path: str) -> str | None:
        """Returns the method that answers a call of a gRPC service, if one does."""
        with self._lock:
            return self._paths.get(path)

    def names(self) -> list[str]:
        """Returns the names of all methods, sorted."""
        with self._lock:
            return sorted(self._methods)

    def listed_names(self) -> list[str]:
        """Returns the names that clients get when they connect; empty if there are too many."""
        names = self.names()
        return names if len(names) <= _MOST_LISTED else []

    def idempotent_names(self) -> list[str]:
        """Returns the names of the methods that may run twice, sorted."""
        with self._lock:
            return sorted(self._idempotent)

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
        except KeyboardInterrupt:  # raised by code of theirs: a Ctrl-C hits the main thread only
            return Refusal(_BAD_ARGUMENTS, f"{method}: KeyboardInterrupt")
        context = self._context.copy()
        outcome: Answer | Later = context.run(
            self._run_method, function, args, kwargs, call, context, packed
        )
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
        outcome: Outcome | Later = context.run(
            self._run_method, function, args, kwargs, call, context, _give
        )
        return outcome

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
                return self._run_async(result, call, context, give)
            # To look at a result, or to pickle it, runs code of its class.
            if isinstance(result, concurrent.futures.Future):
                return _later_of(result, give)
            return give(result)
        except BaseException as error:  # noqa: BLE001 - the caller gets it, the server lives on
            return Failure.of(error, skip_frames=1)

    def _run_async(
        self,
        result: Any,
        call: CallContext,
        context: contextvars.Context,
        give: Callable[[Any], Any],
    ) -> Any:
        if type(result) is types.AsyncGeneratorType:
            steps = Steps(result, context, give, self.tasks, call)
            return _SerialGenerator(steps) if self._serial else _AsyncGenerator(steps)
        try:
            future = self.tasks.submit(answer(result, give), context, call)
        except BaseException:
            result.close()  # so that Python does not complain of it
            raise
        future.add_done_callback(lambda _: result.close())  # as above, if it has not begun
        if self._serial:
            return _answer_of(future)
        later = Later()
        future.add_done_callback(lambda done: later.settle(_answer_of(done)))
        return later

    def _find(self, method: str) -> Callable[..., Any] | None:
        # No lock: a dict gives one of its values or none, whatever others do to it.
        return self.names if method == LIST_METHODS else self._methods.get(method)

    def _refuse_unknown(self, method: str) -> Refusal:
        return Refusal(Kind.UNKNOWN_METHOD, describe_unknown(method, self.names()))


def describe_unknown(method: str, names: Sequence[str]) -> str:
    """Returns the message for a missing method: which one may be meant, and which there are."""
    import difflib  # only mistakes need it

    nearest = difflib.get_close_matches(method, names, 1)
    return (
        f"no public method {method!r}"
        + (f" (did you mean {nearest[0]!r}?)" if nearest else "")
        + f"; there are: {', '.join(names) or 'none'}"
    )


def _answer_of(future: "concurrent.futures.Future[Any]") -> Answer:
    error = future.exception()
    return future.result() if error is None else Failure.of(error)


def _give(result: Any) -> Given:
    return Given(unwrapped(result))


def _later_of(future: "concurrent.futures.Future[Any]", give: Callable[[Any], Answer]) -> Later:
    later = Later()
    future.add_done_callback(lambda done: later.settle(_outcome_of(done, give)))
    return later


def _outcome_of(future: "concurrent.futures.Future[Any]", give: Callable[[Any], Answer]) -> Answer:
    try:
        # Not raised here: it may be that of many futures, and would grow a traceback for each.
        error = future.exception()
        if error is None:
            return give(future.result())
    except BaseException as failure:  # noqa: BLE001 - the caller gets it, the server lives on
        error = failure
    return Failure.of(error, skip_frames=1)
