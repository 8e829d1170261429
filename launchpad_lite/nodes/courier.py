"""The node most programs are made of: an object that other nodes can call."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar, cast

import courier
from launchpad_lite.nodes.base import (
    DeclaredHandle,
    Handle,
    Node,
    PlanContext,
    Task,
    check_arguments,
)
from launchpad_lite.nodes.python import ClassWork, RunSwitch, refuse_async, require_callable
from launchpad_lite.parts.arguments import name_of
from launchpad_lite.parts.settings import check_number
from launchpad_lite.worker.address import Address
from launchpad_lite.worker.runtime import NodeRuntime, keep_client
from launchpad_lite.worker.state import check_state_methods, may_have_state

T = TypeVar("T")

_SERVER_OPTIONS = ("port", "thread_pool_size", "queue_size", "in_process")
_CLIENT_OPTIONS = ("call_timeout_s", "call_timeout", "wait_for_ready", "compress")


class CourierHandle(Handle[T]):
    """A handle to a CourierNode; dereferences to a client that looks like the object.

    Typed as the object itself, so that type checkers check each call.

    Example:
        learner = program.add_node(lp.CourierNode(Learner), label="learner")  # this is the handle
        running = lp.launch(program)
        learner.dereference().step()  # in a node it becomes a client automatically
    """

    def __init__(self, node: "CourierNode[T]") -> None:
        super().__init__(node)
        self._address = node._address
        self._options = dict(node._client_options)
        #: The node, for people.
        self.of = node.description
        #: The name of the class whose object is served, or of the function that makes it.
        self._serves = name_of(node._constructor)

    @property
    def address(self) -> Address:
        """Where the node will listen."""
        return self._address

    def set_client_kwargs(self, **kwargs: Any) -> None:
        """Sets options of the clients made from this handle: see `courier.Client`."""
        self._options = _checked_options("courier_client_kwargs", kwargs, _CLIENT_OPTIONS)

    def dereference(self) -> T:
        """Returns a client of the node.

        Raises:
            UnresolvedAddressError: The program does not run (yet).
        """
        table = self._address.table()
        client = courier.Client(
            self._address.resolve(),
            secret=table.secret,
            tls=table.tls,
            name=self._address.node,
            serves=self._serves,
            **self._options,
        )
        keep_client(client, table)
        return cast("T", client)

    def __repr__(self) -> str:
        # Before its node is added, there is no name to show.
        where = f"{self._address.node}: " if self._address.node else ""
        return f"{type(self).__name__}({where}{self._serves})"

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)  # for pickle and copy
        raise AttributeError(
            f"a handle has no {name!r}: it stands for {self.of}, which does not run yet. "
            "Pass the handle to another node, which finds a client in its place, or call "
            "handle.dereference() after launch()"
        )


def describe_target(handle: object, who: str) -> str:
    """Returns the node of a handle, as text; a TypeError if `who` wanted one that can be called."""
    if isinstance(handle, CourierHandle):
        return handle.of
    if isinstance(handle, DeclaredHandle):
        return handle.name
    raise TypeError(
        f"{who} takes handles of nodes that can be called, as add_node() returns them for "
        f"CourierNodes, not {handle!r}"
    )


class CourierNode(RunSwitch, Node[T], Generic[T]):
    """Constructs an object, serves its public methods, and runs its `run()` if it has one.

    The server starts when the constructor has returned. With a `run` the node
    ends, and stops serving, when that returns; without, it serves until the
    program ends. `run` itself is not served while the node executes it, nor are
    `save` and `restore` where the node keeps checkpoints.

    Methods run in up to 16 threads at the same time, and beside `run`: protect what they share with
    a lock, or pass `serial=True`, and no method runs at the same time as another one. `run` runs
    beside methods even then, because it usually loops until the end.

    `async def run()`, async methods and async generators work, on one event loop: in the main
    thread while an async `run` runs, otherwise in a thread that starts with the first of them. One
    that blocks delays all others. At the stop, `run` has the notice as any other; after that, it is
    cancelled. `await asyncio.to_thread(lp.wait_for_stop)` waits for the stop.

    An object with a method `set_courier_server(server)` gets its server before
    it is started, and starts it itself.

    Example:
        learner = program.add_node(lp.CourierNode(Learner, learning_rate=0.1), label="learner")
        program.add_node(lp.CourierNode(Actor, learner), label="actor")
    """

    def __init__(
        self,
        constructor: Callable[..., T],
        /,
        *args: Any,
        courier_kwargs: Mapping[str, Any] | None = None,
        courier_client_kwargs: Mapping[str, Any] | None = None,
        serial: bool = False,
        **kwargs: Any,
    ) -> None:
        """Describes the node.

        Args:
            constructor: A class, or a function that returns an object.
            *args: Its arguments; handles in them become clients.
            courier_kwargs: Options of the server: `port`, `thread_pool_size` (handlers that run
                at the same time, 16 by default), `queue_size`, `in_process`; see `courier.Server`.
            courier_client_kwargs: Options of its clients: `call_timeout_s`, `wait_for_ready`,
                `compress`; see `courier.Client`.
            serial: Whether methods never run at the same time as each other; see `courier.Server`.
            **kwargs: Arguments of the constructor by name. Pass one with the name of an option here
            by `functools.partial`.

        Raises:
            TypeError: `constructor` cannot be called or is async, or an option is unknown.
            ValueError: The port is none, or a size is below 1, or not 1 with `serial`.
        """
        super().__init__()
        require_callable(type(self), constructor)
        refuse_async(type(self), constructor)
        self._constructor = constructor
        self._named_after = name_of(constructor)
        self._args = args
        self._kwargs: Mapping[str, Any] = kwargs
        self._server_options = _checked_options(
            "courier_kwargs", courier_kwargs or {}, _SERVER_OPTIONS
        )
        if serial and self._server_options.get("thread_pool_size", 1) != 1:
            raise ValueError(
                "serial=True runs one method at a time; courier_kwargs has "
                f"thread_pool_size={self._server_options['thread_pool_size']}. Give one of them"
            )
        if serial:
            self._server_options["serial"] = True
        self._client_options = _checked_options(
            "courier_client_kwargs", courier_client_kwargs or {}, _CLIENT_OPTIONS
        )
        self._address = Address("courier", self._server_options.pop("port", None))
        self._own_addresses = (self._address,)

    def configure(self, *args: Any, **kwargs: Any) -> None:
        """Replaces the constructor's arguments: the way to draw a cycle.

        Make the node without arguments, pass its handle on, then configure it
        with the other's handle.
        """
        self._args = args
        self._kwargs = kwargs

    @property
    def courier_address(self) -> Address:
        """Where the node will listen."""
        return self._address

    def create_handle(self) -> CourierHandle[T]:
        """Returns a new handle to this node; works before and after it is added."""
        return CourierHandle(self)

    def to_executables(self, context: PlanContext) -> Sequence[Task]:
        """Returns one task."""
        check_arguments(self._constructor, self._args, self._kwargs, runs=self._run)
        if context.keeps_state:
            check_state_methods(self._constructor)
        work = CourierWork(
            self._constructor,
            self._args,
            self._kwargs,
            self._run,
            self._address,
            self._server_options,
        )
        may_keep_state = may_have_state(self._constructor)
        return [Task(work, self.addresses, self.description, may_keep_state=may_keep_state)]


@dataclass(frozen=True)
class CourierWork(ClassWork):
    """Constructs an object, serves it and runs it."""

    address: Address
    server_options: Mapping[str, Any]

    def _run(self, instance: Any, runtime: NodeRuntime) -> None:
        # Its state was restored before calls, and is saved after them.
        run = getattr(instance, "run", None)
        runs = self.run_enabled and callable(run)
        hidden = ("set_courier_server", *runtime.state.methods, *(["run"] if runs else []))
        server = runtime.make_server(self.address, instance, hidden=hidden, **self.server_options)
        take_server = getattr(instance, "set_courier_server", None)
        if callable(take_server):
            take_server(server)
        else:
            server.start()
        grace_s = max(0.0, runtime.setup.notice_s)
        try:
            serves = self.address if server.has_started else None
            with runtime.at_work(runs=runs, serves=serves):
                if runs:
                    assert run is not None
                    result = run()
                    if inspect.iscoroutine(result):
                        server.dispatcher.tasks.run(result)
                else:
                    runtime.wait_for_stop()
        except BaseException as error:
            if not runtime.leaves_in_order(error):
                grace_s = 0.0  # calls in flight would only delay the report
            raise
        finally:
            if server.has_started:
                server.stop(grace_s)


def _checked_options(name: str, given: Mapping[str, Any], known: Sequence[str]) -> dict[str, Any]:
    if unknown := sorted(set(given) - set(known)):
        raise TypeError(f"{name}: unknown option {unknown[0]!r}; known are {', '.join(known)}")
    for size in ("thread_pool_size", "queue_size"):
        check_number(f"{name}: {size}", given.get(size, 1), 1)
    return dict(given)
