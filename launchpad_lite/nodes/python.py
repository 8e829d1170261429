"""Nodes that run Python code and serve nothing."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, TypeVar

from courier.lowlevel import Tasks
from launchpad_lite.nodes.base import (
    Handle,
    Node,
    PlanContext,
    Task,
    check_arguments,
    named_arguments,
    yields,
)
from launchpad_lite.parts.arguments import name_of
from launchpad_lite.worker.runtime import NodeRuntime
from launchpad_lite.worker.state import check_state_methods, may_have_state

T = TypeVar("T")

#: Seconds that an event loop has to end.
_LOOP_END_S = 1.0


class SilentHandle(Handle[None]):
    """The handle of a node that serves nothing; it can be held, not dereferenced."""

    def __init__(self, node: Node[Any]) -> None:
        super().__init__(node)
        self.description = node.description

    def dereference(self) -> NoReturn:
        """Always raises a TypeError."""
        raise TypeError(
            f"{self.description} serves nothing that could be called; use lp.CourierNode for a "
            "node that other nodes call"
        )


class PyNode(Node[None]):
    """Runs `function(*args, **kwargs)`; the node ends when it returns.

    An `async def` function is awaited, on an event loop in the main thread of the node.

    Example:
        def evaluate(learner, episodes):
            print(learner.params(), episodes)

        program.add_node(lp.PyNode(evaluate, learner, episodes=10), label="evaluator")
    """

    #: Whether it constructs an object whose `run` is called.
    _run = False

    def __init__(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        """Describes the node.

        Args:
            function: The function.
            *args: Its arguments; handles in them become clients.
            **kwargs: The same by name.

        Raises:
            TypeError: `function` cannot be called, or is a generator.
        """
        super().__init__()
        require_callable(type(self), function)
        if yields(function):
            raise TypeError(
                f"{name_of(function)} yields: calling it would run nothing of it. Remove the yield"
            )
        self._function = function
        self._may_keep_state = not inspect.isfunction(function)
        self._named_after = name_of(function)
        self._args = args
        self._kwargs = kwargs

    def create_handle(self) -> SilentHandle:
        """Returns a handle that only names the node."""
        return SilentHandle(self)

    def to_executables(self, context: PlanContext) -> Sequence[Task]:
        """Returns one task."""
        check_arguments(self._function, self._args, self._kwargs, runs=self._run)
        if context.keeps_state:
            check_state_methods(self._function)
        return [Task(self._work(), (), self.description, may_keep_state=self._may_keep_state)]

    def _work(self) -> "FunctionWork | ClassWork":
        return FunctionWork(self._function, self._args, self._kwargs)


class RunSwitch:
    """A mixin for nodes that construct an object, whose `run` they call."""

    _run = True

    def disable_run(self) -> None:
        """The `run` of the object is not called; a CourierNode only serves then."""
        self._run = False

    def enable_run(self) -> None:
        """Takes `disable_run` back."""
        self._run = True


class PyClassNode(RunSwitch, PyNode):
    """Constructs an object and runs its `run()`; the node ends when that returns.

    An `async def run()` is awaited, on an event loop in the main thread of the node.

    Example:
        class Evaluator:
            def __init__(self, learner):
                self._learner = learner

            def run(self):
                print(self._learner.params())

        program.add_node(lp.PyClassNode(Evaluator, learner), label="evaluator")
    """

    def __init__(self, constructor: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        """Describes the node.

        Args:
            constructor: A class, or a function that returns an object.
            *args: Its arguments; handles in them become clients.
            **kwargs: The same by name.

        Raises:
            TypeError: `constructor` cannot be called, or is async.
        """
        super().__init__(constructor, *args, **kwargs)
        refuse_async(type(self), constructor)
        self._may_keep_state = may_have_state(constructor)

    def _work(self) -> "ClassWork":
        return ClassWork(self._function, self._args, self._kwargs, self._run)


class FunctionWork(NamedTuple):
    """Calls a function."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def __call__(self, runtime: NodeRuntime) -> None:
        """Does it."""
        # A function may be a callable object, with a state.
        with runtime.state.kept(self.function), runtime.at_work(runs=True):
            _finish(self.function(*self.args, **self.kwargs))

    def parts(self) -> Mapping[str, object]:
        """Returns the function and its arguments by name."""
        return named_arguments("function", self.function, self.args, self.kwargs)


@dataclass(frozen=True)
class ClassWork:
    """Constructs an object and runs it."""

    constructor: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    run_enabled: bool

    def __call__(self, runtime: NodeRuntime) -> None:
        """Does it."""
        instance = self.constructor(*self.args, **self.kwargs)
        with runtime.state.kept(instance):
            self._run(instance, runtime)

    def _run(self, instance: Any, runtime: NodeRuntime) -> None:
        with runtime.at_work(runs=True):
            run = getattr(instance, "run", None)
            if self.run_enabled and callable(run):
                _finish(run())

    def parts(self) -> Mapping[str, object]:
        """Returns the constructor and its arguments by name."""
        return named_arguments("constructor", self.constructor, self.args, self.kwargs)


def _finish(result: object) -> None:
    """Awaits the result of a node, if it is a coroutine."""
    if inspect.iscoroutine(result):
        tasks = Tasks()
        try:
            tasks.run(result)
        finally:
            tasks.end(_LOOP_END_S)


def refuse_async(kind: type, constructor: Callable[..., Any]) -> None:
    """Raises a TypeError if `constructor` is an `async def` or a generator, and so makes no object."""
    made_by = constructor.__init__ if inspect.isclass(constructor) else constructor
    if inspect.iscoroutinefunction(made_by) or yields(made_by):
        raise TypeError(
            f"{kind.__name__} takes a class, or a function that returns an object; "
            f"{name_of(constructor)} is async or yields. An async function is run by PyNode; what an "
            "object awaits goes into its `async def run(self)`"
        )


def require_callable(kind: type, function: object) -> None:
    """Raises a TypeError if the function cannot be called, where the mistake is made."""
    if not callable(function):
        raise TypeError(
            f"{kind.__name__} takes a class or function and then its arguments, as in "
            f"{kind.__name__}(Learner, batch_size=32); {function!r} cannot be called. "
            "An object that exists already cannot become a node"
        )
