"""What a running node can reach: its program, its addresses, the stop.

Each worker has one `NodeRuntime` for its node. Code finds it through a context
variable, which server handlers inherit; threads that a node started by itself
have none, and fall back to the only program that runs in the process.
"""

import collections
import contextlib
import contextvars
import hashlib
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import courier
from launchpad_lite._address import Address, AddressTable, enter_table
from launchpad_lite._arguments import one_of
from launchpad_lite._clients import Clients
from launchpad_lite._forcing import ForcedExit, Forcing
from launchpad_lite._liveness import SignsOfLife
from launchpad_lite._policies import Liveness
from launchpad_lite._result import CONSEQUENCES
from launchpad_lite._state import NodeCheckpoints, NodeState
from launchpad_lite._stop_handlers import STOP_HANDLERS, StopHandler, StopHandlers
from launchpad_lite._thread_errors import tell_shortly
from launchpad_lite.errors import NoProgramError

_LOGGER = logging.getLogger(__name__)


class WorkerLink:
    """How a worker speaks to its supervisor, who learns what is overridden. Thread-safe, never blocks for long."""

    def constructed(self, runs: bool) -> None:
        """The object is there; `runs`: it has something to run, rather than only to serve."""

    def ask_stop(self) -> None:
        """The node wants the program to stop."""

    def leaving(self) -> None:
        """The node's work is done; `NodeRuntime.let_go` follows, or the request to stop."""

    def failing(self, report: courier.ExceptionReport) -> None:
        """The node fails; `report`: how, as far as that is known before its worker ends."""

    def cut_short(self, report: courier.ExceptionReport) -> None:
        """A call failed while the program stops, and ends the node."""

    def stop_received(self, listens: bool) -> None:
        """The node was asked to end; `listens`: its code looks at that."""

    def healthy(self) -> None:
        """The node has answered a health check."""

    def heartbeat(self) -> None:
        """The node's code makes progress."""

    def restart(self, reason: str, *, is_expected: bool) -> NoReturn:  # noqa: ARG002 - of processes
        """The node's process ends; `is_expected`: to be started again, else it fails."""
        raise RuntimeError(f"only a node with a process of its own can be ended: {reason}")


class NodeSetup(NamedTuple):
    """What a worker must know of its node, besides what it does and where others are.

    Attributes:
        program: Name of the program.
        label: The node's group.
        replica: Its index in the group.
        attempt: How many restarts of it came before.
        notice_s: Seconds it has to end after it was asked.
        liveness: How it must show that it is not hung.
        checkpoints: Where its state is kept, if it is.
        seed: Of the program.
        restarts: Whether it is started again when it fails.
    """

    program: str
    label: str
    replica: int
    attempt: int = 0
    notice_s: float = 10.0
    liveness: Liveness = Liveness()
    checkpoints: NodeCheckpoints | None = None
    seed: int = 0
    restarts: bool = False

    @property
    def name(self) -> str:
        """`label[replica]`."""
        return f"{self.label}[{self.replica}]"


class CurrentNode(NamedTuple):
    """The node that asks.

    Attributes:
        name: `label[replica]`.
        label: Its group.
        replica: Its index in the group.
        program: Name of its program.
        seed: For its random numbers: 32 bits, made of the seed of the program and its name. It is the
            same after each restart of the node, and in each run with `lp.launch(program, seed=...)`.
        restarts: Whether it is started again when it fails.
        keeps_state: Whether it has checkpoints.
        is_interrupted: Whether it is to end by a signal or a failure, so that its work may not be done.
    """

    name: str
    label: str
    replica: int
    program: str
    seed: int
    restarts: bool
    keeps_state: bool
    is_interrupted: bool


class NodeRuntime:
    """The surroundings of one running node. Thread-safe."""

    def __init__(self, setup: NodeSetup, table: AddressTable, link: WorkerLink) -> None:
        self.setup = setup
        self.table = table
        #: Set when the node is asked to end, and when it has ended.
        self.stop_event = threading.Event()
        #: Whether the node may stop to serve once its work is done.
        self._may_go = threading.Event()
        #: Whether it was asked to end, and whether by a signal or a failure.
        self.is_asked = self.is_interrupted = False
        #: Keeps the state of the node's object.
        self.state = NodeState(setup.name, setup.checkpoints)
        self._link = link
        self._servers: list[courier.Server] = []
        self._signs = SignsOfLife(
            setup.liveness,
            link.healthy,
            link.heartbeat,
            lambda: [server.handlers.load() for server in self._all_servers()],
        )
        #: None until the node's object is there.
        self._runs: bool | None = None
        #: Whether the node's code has looked at the stop, and so will notice it.
        self._listens = False
        self._hearing = threading.Lock()
        #: Of this node; where nodes share a process, each has its own.
        self.stop_handlers = StopHandlers()
        #: End with the node.
        self.clients = Clients()
        #: Where the node is a thread.
        self.forcing = Forcing()
        self._ends: list[Callable[[], object]] = []
        #: Of nodes that run as parts of this one.
        self._hosted: list[NodeRuntime] = []
        #: Of the node that this one runs as a part of.
        self._host: NodeRuntime | None = None
        #: Whether new calls are refused, unless the node's code has looked at the stop.
        self._calls_end = False
        #: Held while something is passed on to all parts; a part that begins meanwhile gets it once. One
        #: for a node, its parts, and theirs.
        self._telling = threading.Lock()

    @property
    def name(self) -> str:
        """`label[replica]`."""
        return self.setup.name

    def constructed(self, *, runs: bool, serves: Address | None = None) -> None:
        """Reports that the node's object is there.

        Args:
            runs: Whether it has something to run; a program ends when all such nodes have ended.
            serves: Where a courier server answers for it, for health checks.
        """
        self._runs = runs
        self._link.constructed(runs)
        if self.stop_event.is_set():
            self._report_stop_received()  # what was said before its code began does not hold any more
        self._signs.start(
            None if serves is None else self.table.endpoints[serves.key], self.table.tls
        )

    def only_serves(self) -> None:
        """Reports that the node has run, and continues to serve."""
        self._runs = False
        self._link.constructed(False)
        if self.stop_event.is_set():
            self._report_stop_received()

    @contextlib.contextmanager
    def at_work(self, *, runs: bool, serves: Address | None = None) -> Iterator[None]:
        """Reports that the node's object is there and, at the end of the block, that its work is done.

        Args:
            runs: As for `constructed`.
            serves: As for `constructed`.
        """
        self.constructed(runs=runs, serves=serves)
        is_well = True
        try:
            yield
        except BaseException as error:
            is_well = self.leaves_well(error)
            raise
        finally:
            if is_well:
                self._wait_for_futures()
            # No code may be left to show progress, while calls in flight or a last
            # checkpoint take their time.
            self._link.leaving()
            if is_well and runs and serves is not None:
                # The program may be stopping, and callers still have something to hand in.
                self._may_go.wait()

    def _wait_for_futures(self) -> None:
        """Waits for calls that the node has sent and whose answers it did not read."""
        notice_s = self.setup.notice_s
        limit_s = None if notice_s < 0 else notice_s / 2  # servers need time to stop, too
        for call, count in collections.Counter(self.clients.wait_for_futures(limit_s)).items():
            text = (
                "%s ends, and %d of its calls got no answer within %g s and may not have run: %s; "
                "read or cancel futures before the node ends"
            )
            _LOGGER.warning(text, self.name, count, limit_s, call)

    def let_go(self) -> None:
        """Lets the node stop to serve once its work is done. For supervisors."""
        self._may_go.set()

    def ask_stop(self) -> None:
        """Asks for the end of the whole program."""
        self._link.ask_stop()

    def heartbeat(self) -> None:
        """Shows that the node's code makes progress."""
        # The check of signs of life does not know parts.
        if self._host is not None:
            self._host.heartbeat()
        else:
            self._signs.heartbeat()

    @property
    def is_hosted(self) -> bool:
        """Whether it runs as a part of another node."""
        return self._host is not None

    def run_stop_handlers(self) -> None:
        """Calls the node's stop handlers once it is asked to stop, which they can see. Blocks.

        For a thread that is started before `request_stop`: the node may end at once then.
        """
        self.stop_event.wait()
        self.stop_handlers.call_all()

    def request_stop(self, *, interrupts: bool = False) -> None:
        """Asks the node to end. For supervisors. May be repeated.

        Args:
            interrupts: Whether a signal or a failure is why, so that its work may not be done.
        """
        if not self.is_asked:
            self.is_interrupted = interrupts
        self.is_asked = True  # first: who wakes may look at it
        self.stop_event.set()
        self._may_go.set()
        # Whom it calls is ending too, and does not come back.
        self.clients.do(courier.stop_waiting)
        self._report_stop_received()
        for hosted in list(self._hosted):
            hosted.request_stop(interrupts=self.is_interrupted)

    def prepare_force(self) -> None:
        """Has nothing saved any more, before the node is ended by force. For supervisors."""
        self.state.tear()
        for hosted in list(self._hosted):
            hosted.prepare_force()

    def force(self) -> None:
        """Ends the node's thread at its next step of Python code. For supervisors of threads."""
        self.clients.close(f"{self.name} is ended by force")
        self.prepare_force()
        self.forcing.force()

    def note_ended(self, keys: Iterable[str]) -> None:
        """Informs the node which servers have ended for good. For supervisors.

        Args:
            keys: Of addresses.
        """
        endpoints = [self.table.endpoints[key] for key in keys]
        with self._telling:
            for runtime in self._with_parts():
                runtime.clients.note_ended(endpoints)

    def note_lost(self, keys: Iterable[str]) -> None:
        """Informs the node that servers are lost with their host. For supervisors.

        Args:
            keys: Of their addresses.
        """
        endpoints = {self.table.endpoints[key] for key in keys}
        with self._telling:
            for runtime in self._with_parts():
                runtime.clients.note_lost(endpoints)

    def note_moved(self, endpoints: Mapping[str, str]) -> None:
        """Informs the node where services of the program listen from now on. For supervisors.

        Args:
            endpoints: `host:port` by address key.
        """
        with self._telling:
            moves = self.table.move(endpoints)
            for runtime in self._with_parts():
                runtime.clients.note_moved(moves)

    def _with_parts(self) -> Iterator["NodeRuntime"]:
        yield self
        for hosted in list(self._hosted):
            yield from hosted._with_parts()

    def _report_stop_received(self) -> None:
        with self._hearing:  # so that what is said last is what holds
            # Who is still being constructed, or only serves, has nothing that could look at it.
            self._link.stop_received(self._listens or not self._runs)

    def end_calls(self) -> None:
        """Refuses new calls, unless the node has looked at the stop meanwhile. For supervisors.

        Code that looks at it may go on to call, to hand in what it has. Other code would go on for
        ever, as `while True: learner.step()` does.
        """
        self._calls_end = True
        if not self._listens:
            self.clients.do(courier.stop_calling)
        for hosted in list(self._hosted):
            hosted.end_calls()

    @contextlib.contextmanager
    def hosting(self, runtimes: Iterable["NodeRuntime"]) -> Iterator[None]:
        """Passes on to other nodes, which run as parts of this one, all that it gets to know, or knows."""
        hosted = list(runtimes)
        with self._telling:
            for runtime in hosted:
                runtime._host = self
                runtime._telling = self._telling
                runtime.clients.begin_as(self.clients)
                self.stop_handlers.add(runtime.stop_handlers.call_all, catch_signals=False)
            self._hosted = hosted
        if self.stop_event.is_set():
            self.request_stop(interrupts=self.is_interrupted)
        if self._calls_end:
            self.end_calls()
        try:
            yield
        finally:
            self._hosted = []
            for runtime in hosted:
                self.stop_handlers.remove(runtime.stop_handlers.call_all)

    def listen(self) -> threading.Event:
        """Returns the event that is set when the node is to end; code that takes it counts as looking at the stop."""
        if not self._listens:
            self._listens = True
            if self.stop_event.is_set():
                self._report_stop_received()
        return self.stop_event

    def leaves_in_order(self, error: BaseException) -> bool:
        """Returns whether an exception that ends the node is no failure."""
        if isinstance(error, ForcedExit):
            return True  # who ended it knows why
        if isinstance(error, SystemExit):
            # A way to leave that programs use when they are asked to stop.
            return self.is_asked or error.code in (None, 0)
        # Others stop too, and calls to them fail.
        return isinstance(error, CONSEQUENCES) and self.is_asked

    def note_cut_short(self, error: BaseException) -> None:
        """Reports an exception that ends the node in order, if it is of a call that got no answer."""
        # A call that this node itself refused was never made; `while True` loops end so.
        if isinstance(error, CONSEQUENCES) and not isinstance(error, courier.CallCancelledError):
            self._link.cut_short(courier.ExceptionReport.of(error))

    def tell_failing(self, report: courier.ExceptionReport) -> None:
        """Reports what is known so far of an exception that ends the node."""
        self._link.failing(report)

    def leaves_well(self, error: BaseException) -> bool:
        """Returns whether an exception that ends the node leaves its state whole."""
        # Ended by force, it may have been anywhere.
        return self.leaves_in_order(error) and not isinstance(error, ForcedExit)

    def wait_for_stop(self, timeout_s: float | None = None) -> bool:
        """Waits until the node is to end; returns whether it is."""
        return self.listen().wait(timeout_s)

    def grace_s(self) -> float:
        """Seconds that calls in flight have when the node ends."""
        return max(0.0, self.setup.notice_s)

    def make_server(
        self, address: Address, obj: object, *, hidden: Collection[str] = (), **options: Any
    ) -> courier.Server:
        """Returns a server, not started, for one of the node's addresses."""
        endpoint = self.table.endpoints[address.key]
        host, _, port = endpoint.rpartition(":")
        server = courier.Server(
            obj,
            host=self.table.listen_host,
            advertised_host=host,
            port=int(port),
            secret=self.table.secret,
            tls=self.table.tls,
            hidden=hidden,
            # The supervisor holds the port, so that no other process takes it before we start or restart.
            share_port=True,
            **options,
        )
        self._servers.append(server)
        self.end_with_node(lambda: server.has_started and server.stop(0.0))
        return server

    def threads_of_calls(self) -> set[int]:
        """Returns the idents of the threads that run calls of its servers now."""
        servers = self._all_servers()
        found = {each for server in servers for each in server.handlers.busy_threads()}
        loops = (server.dispatcher.tasks.thread_ident for server in servers)
        return found.union(ident for ident in loops if ident is not None)

    def _all_servers(self) -> list[courier.Server]:
        return [server for runtime in self._with_parts() for server in runtime._servers]

    def end_with_node(self, end: Callable[[], object]) -> None:
        """Registers what to call when the node's code has ended, or was forced out of ending it.

        Args:
            end: Is called in the thread that supervises the node, if that is another one.
        """
        self._ends.append(end)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Makes this the runtime of the current thread and of what it calls."""
        token = _current.set(self)
        enter_table(self.table)
        tell_shortly(_is_stopping)
        with _active_lock:
            _active.append(self)
        try:
            yield
        finally:
            with _active_lock:
                _active.remove(self)
            # Threads of the node that wait for it, as those of `asyncio.to_thread`, would hold up
            # the end of its process.
            self.stop_event.set()
            self._signs.stop()
            with contextlib.ExitStack() as rest:
                rest.callback(self.clients.close, f"{self.name} has ended")
                for end in self._ends:
                    rest.callback(end)
            _current.reset(token)


_current: contextvars.ContextVar[NodeRuntime | None] = contextvars.ContextVar(
    "launchpad_lite_node", default=None
)
#: Nodes that run in this process. A worker process has one; the thread launcher has many.
_active: list[NodeRuntime] = []
_active_lock = threading.Lock()


def _is_stopping() -> bool:
    with _active_lock:
        return bool(_active) and all(runtime.is_asked for runtime in _active)


def keep_client(client: courier.Client, table: AddressTable) -> None:
    """Ties a client to the life of the running node, or else of the program."""
    runtime = _current.get()
    (table.clients if runtime is None else runtime.clients).keep(client)


def keep_own_client(client: courier.Client) -> None:
    """Ties a client of a service outside of the program to the life of the running node, if any."""
    runtime = _current.get()
    if runtime is not None:
        runtime.clients.keep(client)


def current_runtime(*, any_node: bool = False) -> NodeRuntime:
    """Returns the runtime of the calling node.

    Args:
        any_node: In a thread that belongs to no node, another node of the only program that runs
            here will do.

    Raises:
        NoProgramError: No node runs here, or several do and the calling thread belongs to none.
    """
    runtimes = _owners()
    if not runtimes:
        raise NoProgramError(
            "no program runs in this process; this works in nodes only. The script that launched a "
            "program has what lp.launch returned"
        )
    programs = {id(runtime.table) for runtime in runtimes}
    if len(runtimes) == 1 or (any_node and len(programs) == 1):
        return runtimes[-1]
    what = "programs" if len(programs) > 1 else "nodes"
    raise NoProgramError(
        f"several {what} run in this process and this thread belongs to none of them; "
        "start it with contextvars.copy_context().run"
    )


def stop() -> None:
    """Ends the program: all its nodes are asked to stop. Returns at once; may be repeated.

    Works anywhere in a node: in `run`, in methods that others call, in threads of its own.

    Raises:
        NoProgramError: No program runs here.

    Example:
        class Learner:
            def run(self):
                for _ in range(1000):
                    self.step()
                lp.stop()
    """
    current_runtime(any_node=True).ask_stop()


def stop_event() -> threading.Event:
    """Returns the event that is set when this node is to end.

    Raises:
        NoProgramError: No program runs here.

    Example:
        class Actor:
            def run(self):
                stop = lp.stop_event()
                while not stop.is_set():
                    self.step()
    """
    return current_runtime(any_node=True).listen()


def wait_for_stop(timeout_s: float | None = None, *, timeout_secs: float | None = None) -> bool:
    """Waits until this node is to end; returns whether it is.

    Args:
        timeout_s: Seconds to wait; None waits for ever.
        timeout_secs: The original's name of that.

    Raises:
        NoProgramError: No program runs here.
        TypeError: Both names are given.

    Example:
        class Evaluator:
            def run(self):
                while not lp.wait_for_stop(60):  # every minute
                    self.evaluate()
    """
    timeout_s = one_of("timeout_s", timeout_s, "timeout_secs", timeout_secs)
    return current_runtime(any_node=True).wait_for_stop(timeout_s)


def heartbeat() -> None:
    """Shows that this node makes progress; cheap enough for every step of a loop.

    With `lp.Liveness(heartbeat_s=...)` at launch, a node that does not call it so often is hung.

    Raises:
        NoProgramError: No program runs here.

    Example:
        class Learner:
            def run(self):
                while not lp.stop_event().is_set():
                    self.step()
                    lp.heartbeat()
    """
    current_runtime().heartbeat()


def current_node() -> CurrentNode:
    """Returns what this node is called in its program, and a seed of its own.

    Raises:
        NoProgramError: No program runs here.

    Example:
        class Actor:
            def run(self):
                me = lp.current_node()
                rng = np.random.default_rng(me.seed)
                print(f"{me.name} is replica {me.replica}")
    """
    runtime = current_runtime()
    setup = runtime.setup
    text = f"{setup.seed} {setup.name}".encode()
    return CurrentNode(
        setup.name,
        setup.label,
        setup.replica,
        setup.program,
        seed=int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big"),
        restarts=setup.restarts,
        keeps_state=setup.checkpoints is not None,
        is_interrupted=runtime.is_interrupted,
    )


def restart_count() -> int:
    """Returns how often this node was restarted: 0 at its first start.

    Raises:
        NoProgramError: No program runs here.

    Example:
        class Actor:
            def run(self):
                if lp.restart_count() > 0:
                    print("begins again")
    """
    return current_runtime().setup.attempt


def restart_node(reason: str) -> NoReturn:
    """Ends the process of this node at once, to start again; that is a failure only if it is not restarted.

    Args:
        reason: For people.

    Raises:
        NoProgramError: No program runs here.
        RuntimeError: The node has no process of its own.

    Example:
        def watch(self):  # in a thread of a node
            if not self.simulator.answers():
                lp.restart_node("the simulator hangs")
    """
    runtime = current_runtime()
    runtime._link.restart(reason, is_expected=runtime.setup.restarts)


def save_checkpoint() -> Path | None:
    """Saves the state of this node now, by the `save` of its object, in the calling thread.

    Returns:
        Where; None if the program was launched without `checkpoints` for this node.

    Raises:
        NoProgramError: No program runs here.
        CheckpointError: It could not be written. What `save` raises passes.

    Example:
        class Learner:
            def run(self):
                self.step()
                lp.save_checkpoint()  # calls self.save(folder)
    """
    return current_runtime().state.save()


def checkpoint_here() -> None:
    """Saves the state of this node, in the calling thread, if the period of its checkpoints is over.

    Without it, `save` runs in a thread of its own beside `run`, and may see a state that is half changed.
    A node that calls it, where its state is whole, is saved on the period at these points only. A failure
    is logged, as on the period.

    Raises:
        NoProgramError: No program runs here.

    Example:
        class Learner:
            def run(self):
                while not lp.wait_for_stop(0):
                    self.step()
                    lp.checkpoint_here()  # every 60 s, it calls self.save(folder)
    """
    current_runtime().state.save_if_due()


def register_stop_handler(handler: StopHandler) -> None:
    """Registers a function to be called, once, when the program stops.

    Called at once if the program is stopping already.
    Works from any thread, and in scripts that launch nothing: there it is called when SIGINT or
    SIGTERM ends the process, which they do as if there were no handler.

    Args:
        handler: Called with (signal number, frame) or, if it takes none, without arguments.

    Raises:
        TypeError: It cannot be called, or is async.

    Example:
        class Writer:
            def __init__(self, path):
                self._file = open(path, "w")
                lp.register_stop_handler(self._file.flush)
    """
    owners = _owners()
    # A thread that belongs to none of several nodes that are parts of one belongs to that one.
    whole = [owner for owner in owners if not owner.is_hosted] if len(owners) > 1 else owners
    handlers = whole[0].stop_handlers if len(whole) == 1 else STOP_HANDLERS
    handlers.add(handler, catch_signals=not owners)
    # All of them look at the stop, because it is not known which one this thread belongs to.
    stopping = [runtime.listen().is_set() for runtime in owners]
    if any(stopping):
        # The stop came first; it will not be called later.
        handlers.call_all()


def unregister_stop_handler(handler: StopHandler) -> None:
    """Takes `register_stop_handler` back; unknown handlers are ignored.

    Example:
        lp.register_stop_handler(file.flush)
        lp.unregister_stop_handler(file.flush)
    """
    for handlers in (*(runtime.stop_handlers for runtime in _owners()), STOP_HANDLERS):
        handlers.remove(handler)


def _owners() -> list[NodeRuntime]:
    """Returns the node that the calling thread belongs to, or else all that run here."""
    runtime = _current.get()
    if runtime is not None:
        return [runtime]
    with _active_lock:
        return list(_active)
