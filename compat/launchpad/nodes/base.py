"""The additions of the original's nodes to those of launchpad-lite."""

import contextvars
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import courier
import launchpad_lite as lp
from launchpad.address import Address
from launchpad.context import LaunchContext, LaunchType, set_context
from launchpad_lite import Handle, Node
from launchpad_lite.launching import AddressTable, freeze
from launchpad_lite.life.events import Leaving, RequestStop, Said, StopAsked, Tell
from launchpad_lite.life.timing import DEFAULT
from launchpad_lite.nodes.base import NodeRuntime, PlanContext, Task, Work
from launchpad_lite.worker.runtime import NodeSetup

_LOGGER = logging.getLogger(__name__)

if TYPE_CHECKING:
    from launchpad_lite.nodes.python import ClassWork

__all__ = ["Handle", "Node", "OriginalClassNode", "OriginalNode", "RunningNode", "running_node"]


@dataclass(frozen=True)
class RunningNode:
    """A node that runs here, and where it may listen."""

    runtime: NodeRuntime
    addresses: Sequence[lp.Address]


_running: contextvars.ContextVar[RunningNode | None] = contextvars.ContextVar(
    "launchpad_running_node", default=None
)


def running_node() -> RunningNode | None:
    """Returns the calling node; None outside of nodes."""
    return _running.get()


class OriginalNode(Node[Any]):
    """A mixin: the node's code finds a launch context, and the node may allocate addresses."""

    def allocate_address(self, address: Address) -> None:
        """Makes an address one of this node's; a ValueError if another node has it."""
        address.assign(self)

    def to_executables(self, context: PlanContext) -> Sequence[Task]:
        """Returns the tasks of the node, with a launch context around each."""
        return [
            dataclasses.replace(
                task,
                work=_InContext(self.wrapped(task.work), context.launcher, tuple(self.addresses)),
                addresses=tuple(self.addresses),
            )
            for task in super().to_executables(context)  # type: ignore[safe-super] # of the kind
        ]

    def wrapped(self, work: Work) -> Work:
        """Returns the work in place of `work`."""
        return work

    def run(self) -> None:
        """Runs the node in this thread, without a program: for tests, after `bind_addresses`."""
        (task,) = self.to_executables(PlanContext("test_mt", "alone", 0, lp.Resources()))
        name = self.description
        here = task.addresses
        table = here[0].table() if here else AddressTable({}, courier.Secret.generate())

        def supervise(said: Said) -> None:
            """Ends the node when its work is done, or when it asks for the stop."""
            if isinstance(said, Leaving):
                runtime.obey(Tell(name, "let_go"))
            elif isinstance(said, StopAsked):
                runtime.obey(RequestStop(name))

        def run() -> None:
            with runtime.active():
                freeze(task.work, share=True).thaw()(runtime)
            runtime.join_stop_handlers(DEFAULT.handlers_s)

        runtime = NodeRuntime(NodeSetup("alone", name, 0), table, supervise)
        contextvars.copy_context().run(run)


class OriginalClassNode(OriginalNode):
    """A mixin for nodes that construct an object: subclasses may override its methods.

    In the worker, `run` is called of a copy of the node, whose attributes have the original's names.
    """

    _constructor: Any
    _args: Any
    _kwargs: Any
    _run: bool
    #: The work of the node if nothing is overridden.
    _default_work: "ClassWork"

    @property
    def _should_run(self) -> bool:
        return self._run

    def _construct_instance(self) -> Any:
        """Returns the object; it is constructed once."""
        if "_instance" not in vars(self):
            self._instance = self._constructor(*self._args, **self._kwargs)
            if (node := running_node()) is not None:
                runs = self._should_run and callable(getattr(self._instance, "run", None))
                node.runtime.constructed(runs=runs)
        return self._instance

    def run(self) -> None:
        """Constructs the object, serves it if others can call it, and runs it."""
        if (node := running_node()) is None:
            super().run()
            return
        make = self._construct_instance
        dataclasses.replace(self._default_work, constructor=make, args=(), kwargs={})(node.runtime)

    def wrapped(self, work: Work) -> Work:
        """Returns what is to be done in place of `work`: what a subclass overrides, if it does."""
        kind, plain = type(self), OriginalClassNode
        if kind.run is plain.run and kind._construct_instance is plain._construct_instance:
            return work
        return _Overridden(kind, {**vars(self), "_default_work": work})


@dataclass(frozen=True)
class _Overridden:
    """Runs a node that overrides what nodes of its kind do."""

    kind: type[OriginalClassNode]
    attributes: Mapping[str, Any]

    def __call__(self, runtime: Any) -> None:  # noqa: ARG002 - who needs it asks `running_node`
        node = object.__new__(self.kind)
        vars(node).update(self.attributes)
        node.run()

    def parts(self) -> Mapping[str, object]:
        return {f"attribute {name!r}": value for name, value in self.attributes.items()}


@dataclass(frozen=True)
class _InContext:
    """Does something where `launchpad.context.get_context()` finds how the node was launched."""

    work: Work
    launcher: str
    addresses: Sequence[lp.Address]

    def __call__(self, runtime: Any) -> None:
        known = self.launcher in {each.value for each in LaunchType}
        context = LaunchContext()
        context.initialize(
            LaunchType(self.launcher) if known else LaunchType.LOCAL_MULTI_PROCESSING, None, lp.stop
        )
        set_context(context)
        _running.set(RunningNode(runtime, self.addresses))
        try:
            self.work(runtime)
        except Exception as error:
            # As in the original. Its programs raise SystemExit in their threads when they stop, at any
            # step, of which code written in C makes other errors.
            if not runtime.is_asked or runtime.leaves_in_order(error):
                raise
            text = "%s: an error that came after the stop, and so does not count"
            _LOGGER.warning(text, runtime.name, exc_info=True)

    def parts(self) -> Mapping[str, object]:
        return self.work.parts()
