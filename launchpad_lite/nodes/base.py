"""Nodes and handles: the base types of every kind of node."""

import abc
import copy
import inspect
import typing
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, SupportsIndex, TypeVar

from courier.lowlevel import signature_of
from launchpad_lite.errors import UnresolvedAddressError
from launchpad_lite.graph.resources import Resources
from launchpad_lite.life.policies import RestartPolicy
from launchpad_lite.parts.arguments import name_of
from launchpad_lite.worker.address import Address
from launchpad_lite.worker.runtime import NodeRuntime

__all__ = ["DeclaredHandle", "Handle", "Node", "NodeRuntime", "PlanContext", "Task", "Work"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Handle(abc.ABC, Generic[T_co]):
    """A reference to a node that does not run yet.

    Put it anywhere into the arguments of another node: that draws the edge,
    and the running node finds a client in its place.

    Example:
        learner = program.add_node(lp.CourierNode(Learner), label="learner")
        program.add_node(lp.CourierNode(Actor, learner), label="actor")  # draws the edge
    """

    def __init__(self, node: "Node[Any]") -> None:
        #: Names the node in the program, also after pickling.
        self.node_key = node.key

    @abc.abstractmethod
    def dereference(self) -> T_co:
        """Returns the client, in a running node or in the launching process.

        Raises:
            UnresolvedAddressError: The program does not run (yet).
        """

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Pickles as a client, in a call for instance, once the program runs."""
        try:
            return _as_it_is, (self.dereference(),)
        except (UnresolvedAddressError, TypeError, ValueError):  # or it cannot be called
            return super().__reduce_ex__(protocol)

    def __copy__(self) -> "Handle[T_co]":
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> "Handle[T_co]":
        copied = copy.copy(self)
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied


def _as_it_is(client: T) -> T:
    return client


class DeclaredHandle(Handle[Any]):
    """A handle to a node that is added later; see `Program.declare`."""

    def __init__(self, label: str, replica: int) -> None:
        self.name = f"{label}[{replica}]"
        self.node_key = ""
        #: The handle that it stands for.
        self.target: Handle[Any] | None = None

    def bind(self, target: Handle[Any]) -> None:
        """Sets its node."""
        self.target = target
        self.node_key = target.node_key

    # The node may be added after arguments were copied that hold this handle.

    def __copy__(self) -> "DeclaredHandle":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "DeclaredHandle":
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name})"

    def dereference(self) -> Any:
        """Returns the client; raises a ValueError if no such node was added."""
        if self.target is None:
            raise ValueError(f"{self.name} was declared, but never added to the program")
        return self.target.dereference()


class Work(Protocol):
    """The work of a worker: a picklable callable."""

    def __call__(self, runtime: NodeRuntime, /) -> None:
        """Does it; returns when the node has ended."""

    def parts(self) -> Mapping[str, object]:
        """Returns the user's objects in it, by names for messages."""


class PlanContext(NamedTuple):
    """The context in which a node is turned into executables.

    Attributes:
        launcher: Its name; for messages, not for decisions.
        keeps_state: Whether the launch gives the node a folder for checkpoints.
    """

    launcher: str
    label: str
    replica: int
    resources: Resources
    keeps_state: bool = False


@dataclass(frozen=True)
class Task:
    """A worker that a node wants: an executable that is not placed yet.

    Attributes:
        stands_for: Keys of nodes that it runs, besides the one it comes from.
        together: Tasks with the same word run on one host.
        restart: When it is restarted, unless `launch` sets that.
        may_keep_state: Whether its object may have `save` and `restore`.
    """

    work: Work
    addresses: Sequence[Address]
    description: str
    stands_for: tuple[str, ...] = ()
    together: str | None = None
    restart: RestartPolicy | None = None
    may_keep_state: bool = True


class Node(abc.ABC, Generic[T]):
    """The description of a service; `T` is what its clients look like.

    Making one runs nothing.

    Example:
        def start(node: lp.Node, program: lp.Program) -> lp.Handle:
            return program.add_node(node, label="evaluator")
    """

    #: What its description names: its class or function, for instance.
    _named_after = ""
    _own_addresses: Sequence[Address] = ()
    #: The name of the program that it was added to.
    _added_to = ""

    def __init__(self) -> None:
        #: Identity of the node; the address of its own service has it too.
        self.key = Address().key
        NODES[self.key] = self

    @abc.abstractmethod
    def create_handle(self) -> Handle[T]:
        """Returns a new handle to this node; works before and after it is added."""

    @abc.abstractmethod
    def to_executables(self, context: PlanContext) -> Sequence[Task]:
        """Returns the tasks of this node; several, or none, are fine.

        Raises:
            ValueError: The node is not complete; the message becomes a mistake of the program.
        """

    @property
    def addresses(self) -> Sequence[Address]:
        """Where the node will listen."""
        return self._own_addresses

    @property
    def description(self) -> str:
        """A text that describes the node where nothing is run for it."""
        name = type(self).__name__
        return f"{name}({self._named_after})" if self._named_after else name

    def __repr__(self) -> str:
        return self.description

    @property
    def inner_nodes(self) -> "Sequence[Node[Any]]":
        """Nodes that are run as parts of this one."""
        return ()

    def with_inner(self) -> "Iterator[Node[Any]]":
        """Yields the node and all that are run as parts of it."""
        yield self
        for node in self.inner_nodes:
            yield from node.with_inner()


#: The nodes of this process, by their keys.
NODES: "weakref.WeakValueDictionary[str, Node[Any]]" = weakref.WeakValueDictionary()


def named_arguments(
    callee: str, function: object, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, object]:
    """Names the arguments of a node, for messages."""
    parts: dict[str, object] = {f"{callee} {name_of(function)}": function}
    parts.update({f"argument {index}": value for index, value in enumerate(args)})
    parts.update({f"argument {name!r}": value for name, value in kwargs.items()})
    return parts


def yields(function: object) -> bool:
    """Returns whether a function is a generator, async or not."""
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def check_arguments(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, runs: bool
) -> None:
    """Raises a ValueError if arguments clearly do not fit the signature or annotations of a function.

    It may be a class. If `runs`, the `run` of its objects must take no arguments, and not yield.
    """
    function = typing.get_origin(function) or function  # the class of `Buffer[int]`
    try:
        signature = signature_of(function)
    except (TypeError, ValueError):  # written in C
        return
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ValueError(f"{name_of(function)}{signature}: {error}") from None
    from launchpad_lite.nodes._annotations import contradictions  # nodes that run do not need it

    if wrong := "; ".join(contradictions(function, bound)):
        raise ValueError(f"{name_of(function)}: {wrong}")
    if runs and inspect.isclass(function):
        _check_run(function)


def _check_run(constructor: type) -> None:
    run = inspect.getattr_static(constructor, "run", None)
    if not inspect.isfunction(run):
        return
    if yields(run):
        raise ValueError(
            f"{name_of(constructor)}.run yields: calling it would run nothing of it. Remove the yield"
        )
    try:
        signature_of(run).bind(None)
    except TypeError as error:
        raise ValueError(
            f"{name_of(constructor)}.run{signature_of(run)} is called without arguments: {error}. "
            "Give them to the constructor"
        ) from None
