"""The runtime of a node: its program, its addresses, the stop.

Each worker has one `NodeRuntime` for its node. Code finds it through a context variable, which
server handlers inherit; threads that a node started have none, and fall back to the only program in
the process.
"""

import collections
import contextlib
import contextvars
import dataclasses
import hashlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import courier
from courier import lowlevel
from launchpad_lite.errors import NoProgramError
from launchpad_lite.life.events import (
    Constructed,
    CutShort,
    Failed,
    Healthy,
    Heartbeat,
    Leaving,
    Looked,
    Request,
    RequestStop,
    Said,
    ServersEnded,
    ServersLost,
    ServersMoved,
    StopAsked,
    StopReceived,
    Tell,
)
from launchpad_lite.life.policies import Liveness
from launchpad_lite.life.result import CONSEQUENCES, MOST_CALLS, NodeFailure
from launchpad_lite.parts.arguments import one_of
from launchpad_lite.process.forcing import ForcedExit, Forcing
from launchpad_lite.process.stop_handlers import STOP_HANDLERS, StopHandler, StopHandlers
from launchpad_lite.worker._clients import Clients
from launchpad_lite.worker._liveness import SignsOfLife
from launchpad_lite.worker.address import Address, AddressTable, enter_table
from launchpad_lite.worker.state import NodeCheckpoints, NodeState

if TYPE_CHECKING:
    from launchpad_lite.worker.debugger import NodeDebugger

_LOGGER = logging.getLogger(__name__)
#: Seconds that a node which has ended waits for what others want to hear of it.
_FOLLOWERS_S = 2.0


class NodeSetup(NamedTuple):
    """The settings of a node for its worker, besides its work and the addresses."""

    program: str
    label: str
    replica: int
    attempt: int = 0  # how many restarts of it came before
    notice_s: float = 10.0  # seconds it has to end after a request
    liveness: Liveness = Liveness()  # how it shows that it is not hung
    checkpoints: NodeCheckpoints | None = None  # where its state is kept, if it is
    seed: int = 0  # of the program
    restarts: bool = False  # whether it is started again when it fails
    host: str = ""  # its host, for messages
    ram_bytes: int | None = None  # limit of its main memory, if there is one
    is_traced: bool = False  # whether somebody will ask for its calls, however short its life is
    has_terminal: bool = False  # whether `breakpoint()` has the terminal of the launch

    @property
    def name(self) -> str:
        return f"{self.label}[{self.replica}]"

    def failure(self, report: courier.ExceptionReport) -> NodeFailure:
        failure = NodeFailure.of_exception(self.name, self.host, report)
        if self.ram_bytes is None or "MemoryError" not in report.type_name:
            return failure
        asked = f"it asked for ram_gib={self.ram_bytes / (1 << 30):g}, and may have no more"
        return dataclasses.replace(failure, summary=f"{failure.summary} ({asked})")


class CurrentNode(NamedTuple):
    """The calling node.

    Attributes:
        name: `label[replica]`.
        label: Its group.
        replica: Its index in the group.
        program: Name of its program.
        seed: For its random numbers: 32 bits, made of the seed of the program and its name. It is the
            same after each restart of the node, and in each run with `lp.launch(program, seed=...)`.
        restarts: Whether it is started again when it fails.
        keeps_state: Whether it has checkpoints.
        is_interrupted: Whether it must end because of a signal or a failure, maybe before its work
            is done.
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
    """The runtime of one node. Thread-safe."""

    def __init__(
        self,
        setup: NodeSetup,
        table: AddressTable,
        post: Callable[[Said], object],
        *,
        has_process: bool = False,
    ) -> None:
        """Prepares it.

        `post` takes events of the node, from any thread, and does not block for long. `has_process`
        says whether the process belongs to the node alone, and ends when its stop handlers have
        returned; otherwise they are left behind.
        """
        self.setup = setup
        self.table = table
        self.has_process = has_process
        #: When it was made, by `perf_counter`: its calls begin later.
        self.made_at = time.perf_counter()
        #: What its calls are counted for, where nodes share a process.
        self._calls = object()
        self._post = post
        #: Set when the node is asked to end, and when it has ended.
        self.stop_event = threading.Event()
        #: Set when the node has ended; when a thread knows it that says what is left to say; such threads.
        self._has_ended, self._is_followed = threading.Event(), threading.Event()
        self._followers: list[threading.Thread] = []
        self._may_go = threading.Event()  # set when the node may stop serving after its work
        #: Whether it was asked to end, and whether because of a signal or a failure.
        self.is_asked = self.is_interrupted = False
        self.state = NodeState(setup.name, setup.checkpoints, self.leaves_well)
        self._servers: list[courier.Server] = []
        self._signs = SignsOfLife(
            setup.liveness,
            lambda: self.say(Healthy),
            lambda: self.say(Heartbeat),
            lambda: [server.handlers.load() for server in self._all_servers()],
        )
        #: Whether its object has something to run; None until that is constructed.
        self.runs: bool | None = None
        #: Whether the node's code has checked for the stop, and so will notice it.
        self._listens = False
        self._hearing = threading.Lock()
        self.debugger: NodeDebugger | None = None  # made when it is first needed
        #: Stop handlers of this node; where nodes share a process, each has its own.
        self.stop_handlers = StopHandlers()
        #: They may block, so they run in a thread of their own.
        self._handlers = threading.Thread(
            target=self._run_stop_handlers, name="launchpad-stop-handlers", daemon=not has_process
        )
        self.clients = Clients()  # end with the node
        self.forcing = Forcing()  # where the node is a thread
        self._ends: list[Callable[[], object]] = []
        self._hosted: list[NodeRuntime] = []  # runtimes of nodes that run as parts of this one
        self._host: NodeRuntime | None = None  # the runtime of the node that this one is a part of
        #: Whether new calls are refused, unless the node's code has checked for the stop.
        self._calls_end = False
        #: Held while an action is passed on to all parts, so that a new part gets it once. Shared
        #: by a node, its parts, and theirs.
        self._telling = threading.Lock()

    @property
    def name(self) -> str:
        return self.setup.name

    @property
    def whole(self) -> "NodeRuntime":
        """The node that this one is a part of; itself if it is none."""
        return self if self._host is None else self._host.whole

    def say(self, kind: Callable[..., Said], *details: Any) -> None:
        self._post(kind(self.name, self.setup.attempt, *details))

    def constructed(self, *, runs: bool, serves: Address | None = None) -> None:
        """Reports that the object is constructed, or has nothing to run any more; begins health checks.

        They ask the server at `serves`. None: the process, which lives while it reports.
        """
        endpoint = None if serves is None else self.table.endpoints[serves.key]
        self._signs.start(endpoint, self.table.tls)
        self.runs = runs
        self.say(Constructed, runs)
        if self.stop_event.is_set():
            self._report_stop_received()  # earlier reports are out of date

    @contextlib.contextmanager
    def at_work(self, *, runs: bool, serves: Address | None = None) -> Iterator[None]:
        """Reports that the object is constructed and, after the block, that its work ended."""
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
            # No code may be left that shows progress, while calls in flight or a last checkpoint
            # take time.
            self.say(Leaving)
            if is_well and runs and serves is not None:
                # The program may be stopping, and callers may still have results to hand in.
                self._may_go.wait()

    def _wait_for_futures(self) -> None:
        notice_s = self.setup.notice_s
        limit_s = None if notice_s < 0 else notice_s / 2  # servers need time to stop, too
        for call, count in collections.Counter(self.clients.wait_for_futures(limit_s)).items():
            text = (
                "%s ends, and %d of its calls got no answer within %g s and may not have run: %s; "
                "read or cancel futures before the node ends"
            )
            _LOGGER.warning(text, self.name, count, limit_s, call)

    def ask_stop(self) -> None:
        self._post(StopAsked(f"lp.stop() in {self.name}"))

    def heartbeat(self) -> None:
        self.whole._signs.heartbeat()  # signs of life belong to the whole

    def obey(self, request: Request) -> None:
        match request:
            case RequestStop():
                self.request_stop(interrupts=request.interrupts)
            case Tell():
                getattr(self, request.method)()
            case ServersEnded():
                endpoints = [self.table.endpoints[key] for key in request.keys]
                self._tell_clients(lambda clients: clients.note_ended(endpoints))
            case ServersLost():
                endpoints = [self.table.endpoints[key] for key in request.keys]
                self._tell_clients(lambda clients: clients.note_lost(endpoints))
            case ServersMoved():
                moves = self.table.move(request.endpoints)
                self._tell_clients(lambda clients: clients.note_moved(moves))

    def _tell_clients(self, tell: Callable[[Clients], object]) -> None:
        with self._telling:
            for runtime in self._with_parts():
                tell(runtime.clients)

    def _run_stop_handlers(self) -> None:
        self.stop_event.wait()  # set for handlers
        self.stop_handlers.call_all()

    def join_stop_handlers(self, timeout_s: float) -> None:
        if self._handlers.is_alive():
            self._handlers.join(timeout_s)

    def request_stop(self, *, interrupts: bool = False) -> None:
        """Asks the node to end, as `RequestStop` does. For supervisors. May be repeated."""
        with self._hearing:
            if not self.is_asked:
                self.is_interrupted = interrupts
                # Before the node can end, and its process with it.
                with contextlib.suppress(RuntimeError):  # the interpreter ends already
                    self._handlers.start()
            self.is_asked = True  # first: a woken thread may read it
        self.stop_event.set()
        self._may_go.set()
        # Before calls fail: the clients of parts may be this node's.
        for hosted in self._hosted:
            hosted.request_stop(interrupts=self.is_interrupted)
        # Its callees end, too, and do not come back.
        self.clients.do(lowlevel.stop_waiting)
        self._report_stop_received()

    def prepare_force(self) -> None:
        """Prevents further saves, before the node is ended by force. For supervisors."""
        for runtime in self._with_parts():
            runtime.state.tear()

    def force(self) -> None:
        """Ends the node's thread at its next step of Python code. For supervisors of threads."""
        self.clients.close(f"{self.name} is ended by force")
        self.prepare_force()
        self.forcing.force()

    def _with_parts(self) -> Iterator["NodeRuntime"]:
        yield self
        for hosted in self._hosted:
            yield from hosted._with_parts()

    def _report_stop_received(self) -> None:
        with self._hearing:  # so that the last report is right
            # A node that is being constructed, or only serves, has no code that could check.
            self.say(StopReceived, self._listens or not self.runs)

    def let_go(self) -> None:
        """Lets a node that has done its work stop serving; while all stop, the request to end does that."""
        self._may_go.set()

    def end_calls(self) -> None:
        """Refuses new calls, unless the node has checked for the stop meanwhile.

        Code that checks for it may go on to call, to hand in its results. Other code would go on
        for ever, as `while True: learner.step()` does.
        """
        for runtime in self._with_parts():
            runtime._calls_end = True
            if not runtime._listens:
                runtime.clients.do(lowlevel.stop_calling)

    @contextlib.contextmanager
    def hosting(self, runtimes: Iterable["NodeRuntime"]) -> Iterator[None]:
        """Passes on all actions on this node, also earlier ones, to its parts."""
        hosted = list(runtimes)
        with self._telling:
            for runtime in hosted:
                runtime._host = self
                runtime._telling = self._telling
                runtime.clients.begin_as(self.clients)
            self._hosted = hosted
        if self.stop_event.is_set():
            self.request_stop(interrupts=self.is_interrupted)
        if self._calls_end:
            self.end_calls()
        try:
            yield
        finally:
            self._hosted = []

    def listen(self) -> threading.Event:
        """Returns the event of the stop; code that takes it counts as checking for the stop."""
        if not self._listens:
            self._listens = True
            if self.stop_event.is_set():
                self._report_stop_received()
        return self.stop_event

    def leaves_in_order(self, error: BaseException) -> bool:
        """Returns whether an exception that ends the node is no failure."""
        if isinstance(error, ForcedExit):
            return True  # it was ended by force
        if isinstance(error, SystemExit):
            # Programs use this to leave when they are asked to stop.
            return self.is_asked or error.code in (None, 0)
        # Others stop too, and calls to them fail.
        return isinstance(error, CONSEQUENCES) and self.is_asked

    def note_cut_short(self, error: BaseException) -> None:
        """Reports an exception that ends the node in order, if it comes from an unanswered call."""
        # A call that this node itself refused was never made: so `while True` loops end.
        if isinstance(error, CONSEQUENCES) and not isinstance(error, courier.CallCancelledError):
            self.say(CutShort, self.setup.failure(courier.ExceptionReport.of(error)))

    def note_failed(self, report: courier.ExceptionReport) -> None:
        failure = self.setup.failure(report)
        self.say(Failed, dataclasses.replace(failure, calls=self.last_calls()))

    def last_calls(self) -> str:
        """Returns the last calls of this node, a line each, for a failure."""
        now = time.perf_counter()
        calls = lowlevel.call_records.newest_calls(MOST_CALLS, self.call_scopes())
        return "\n".join(each.describe(now) for each in calls)

    def leaves_well(self, error: BaseException) -> bool:
        """Returns whether an exception that ends the node leaves its state whole."""
        # Ended by force, its code may have been anywhere.
        return self.leaves_in_order(error) and not isinstance(error, ForcedExit)

    def wait_for_stop(self, timeout_s: float | None = None) -> bool:
        return self.listen().wait(timeout_s)

    def make_server(
        self, address: Address, obj: object, *, hidden: Collection[str] = (), **options: Any
    ) -> "courier.Server":
        """Returns a server, not started, for one of the node's addresses."""
        endpoint = self.table.endpoints[address.key]
        host, port = lowlevel.split_address(endpoint)
        server = courier.Server(
            obj,
            host=self.table.listen_host,
            advertised_host=host,
            port=port,
            secret=self.table.secret,
            tls=self.table.tls,
            hidden=hidden,
            # The supervisor holds the port, so that no other process takes it before we start or restart.
            share_port=True,
            **options,
        )
        self._servers.append(server)
        server.dispatcher.places = _places
        self.end_with_node(lambda: server.has_started and server.stop(0.0))
        return server

    def threads_of_calls(self) -> set[int]:
        servers = self._all_servers()
        found = {each for server in servers for each in server.handlers.busy_threads()}
        loops = (server.dispatcher.tasks.thread_ident for server in servers)
        return found.union(ident for ident in loops if ident is not None)

    def look(self, doing: Mapping[int, str], idents: Collection[int] | None = None) -> Looked:
        """Returns what the node does now; `idents` are its threads, None: all of this process."""
        from launchpad_lite.process.activity import activities
        from launchpad_lite.process.stacks import describe_threads

        servers = self._all_servers()
        return Looked(
            self.name,
            describe_threads(idents),
            activities(doing, idents, [server.dispatcher for server in servers]),
            any(server.handlers.load()[0] for server in servers),
        )

    def _all_servers(self) -> "list[courier.Server]":
        return [server for runtime in self._with_parts() for server in runtime._servers]

    def call_scopes(self) -> list[object] | None:
        """Returns what calls of this node are counted for; None: all of this process are its own."""
        return None if self.has_process else [each._calls for each in self._with_parts()]

    def wait_for_end(self, timeout_s: float) -> None:
        """Waits for the end of the node, which waits for what one of such threads says then."""
        followers = filter(threading.Thread.is_alive, self._followers)
        self._followers = [*followers, threading.current_thread()]
        if self._has_ended.wait(timeout_s):
            self._is_followed.set()

    def end_with_node(self, end: Callable[[], object]) -> None:
        """Registers a function to call when the node's code has ended, maybe in another thread."""
        self._ends.append(end)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Makes this the runtime of the current thread in a block."""
        token, scope = _current.set(self), lowlevel.call_records.SCOPE.set(self._calls)
        enter_table(self.table)
        _shorten_errors_of_threads()
        with _active_lock:
            _active.append(self)
        try:
            yield
        finally:
            with _active_lock:
                _active.remove(self)
            # Threads of the node that wait for the stop, as in `asyncio.to_thread`, would delay the
            # end of its process.
            self.stop_event.set()
            self._signs.stop()
            with contextlib.ExitStack() as rest:
                rest.callback(self.clients.close, f"{self.name} has ended")
                for end in self._ends:
                    rest.callback(end)
            self._has_ended.set()
            if self._followers or self.setup.is_traced:
                self._is_followed.wait(_FOLLOWERS_S)
            for each in self._followers:
                each.join(_FOLLOWERS_S)
            _current.reset(token)
            lowlevel.call_records.SCOPE.reset(scope)
            lowlevel.call_records.forget(self._calls)


def _places(dispatcher: object) -> Mapping[courier.CallContext, str]:
    from launchpad_lite.process.activity import places

    return places(dispatcher)


_current: contextvars.ContextVar[NodeRuntime | None] = contextvars.ContextVar(
    "launchpad_lite_node", default=None
)
#: Nodes in this process: one in a worker process, many with the thread launcher.
_active: list[NodeRuntime] = []
_active_lock = threading.Lock()


def _shorten_errors_of_threads() -> None:
    """Makes threads that a cancelled call has ended at the stop tell that in one line."""
    before = threading.excepthook
    if getattr(before, "is_ours", False):
        return

    def tell(failure: threading.ExceptHookArgs) -> None:
        kind = failure.exc_type
        with _active_lock:
            is_stopping = bool(_active) and all(runtime.is_asked for runtime in _active)
        cancelled = issubclass(kind, courier.CallCancelledError)
        if not cancelled and not (issubclass(kind, CONSEQUENCES) and is_stopping):
            before(failure)
            return
        name = "a thread" if failure.thread is None else failure.thread.name
        text = f"{name} has ended: {kind.__name__}: {failure.exc_value}"
        print(text, file=sys.stderr)  # noqa: T201 - as Python does

    tell.is_ours = True  # type: ignore[attr-defined]
    threading.excepthook = tell


def keep_client(client: "courier.Client", table: AddressTable | None = None) -> None:
    """Makes a client end with the running node, or else with the program of the table, if any."""
    owner = _current.get() or table
    if owner is not None:
        owner.clients.keep(client)


def current_runtime(*, any_node: bool = False) -> NodeRuntime:
    """Returns the runtime of the calling node; with `any_node`, or one of the only program here."""
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
    """Returns the names of this node and its program, whether it restarts, and a seed of its own.

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


def save_checkpoint() -> Path | None:
    """Saves the state of this node now, by the `save` of its object, in the calling thread.

    Returns:
        The folder; None if the program was launched without `checkpoints` for this node.

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
    SIGTERM ends the process, as these do without a handler.

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
    # A thread without a node belongs to the whole, if several nodes are parts of one.
    whole = [each for each in owners if each._host is None] if len(owners) > 1 else owners
    handlers = whole[0].stop_handlers if len(whole) == 1 else STOP_HANDLERS
    handlers.add(handler, catch_signals=not owners)
    # All of them count as checking for the stop, because the thread's node is not known.
    stopping = [runtime.listen().is_set() for runtime in owners]
    if any(stopping):
        # The stop came first; it will not be called later.
        handlers.call_all()


def unregister_stop_handler(handler: StopHandler) -> None:
    """Undoes `register_stop_handler`; ignores unknown handlers.

    Example:
        lp.register_stop_handler(file.flush)
        lp.unregister_stop_handler(file.flush)
    """
    for handlers in (*(runtime.stop_handlers for runtime in _owners()), STOP_HANDLERS):
        handlers.remove(handler)


def _owners() -> list[NodeRuntime]:
    """Returns the node of the calling thread, or else all nodes here."""
    runtime = _current.get()
    if runtime is not None:
        return [runtime]
    with _active_lock:
        return list(_active)
