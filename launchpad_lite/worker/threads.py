"""Nodes as threads of this process: runs them, and does actions on them."""

import abc
import contextlib
import contextvars
import threading
from collections.abc import Callable

from courier import ExceptionReport
from launchpad_lite.life.events import (
    Ask,
    DumpStacks,
    Ended,
    Event,
    Kill,
    NodeAction,
    ServersLost,
    ServersMoved,
    Start,
    Terminate,
)
from launchpad_lite.life.result import NodeFailure, advice_on
from launchpad_lite.parts.threads import start_thread
from launchpad_lite.process.exit import leave_behind
from launchpad_lite.process.forcing import ForcedExit, settle
from launchpad_lite.process.stacks import describe_threads
from launchpad_lite.worker.runtime import NodeRuntime


class NodeThread:
    """One start of a node: a thread that supervises another, in which the user's code runs."""

    def __init__(self, runtime: NodeRuntime, body: Callable[[], object], name: str = "") -> None:
        self.runtime = runtime
        self._body = body
        self._name = name or runtime.name
        #: May be ended at any point; the supervising thread cleans up.
        self._runner: threading.Thread | None = None
        #: Whether it answers questions: also when its code has ended, while others want to hear of it.
        self.answers = False

    def run(self, handlers_s: float) -> None:
        """Runs the node to its end, in its own thread; then stop handlers have `handlers_s`."""
        with contextlib.ExitStack() as ends, self.runtime.active():
            self.answers = True
            ends.callback(setattr, self, "answers", False)
            context = contextvars.copy_context()
            self._runner = threading.Thread(
                target=context.run, args=(self._run_body,), name=self._name, daemon=True
            )
            self._runner.start()
            self._runner.join()
        self.runtime.join_stop_handlers(handlers_s)

    def _run_body(self) -> None:
        # It may be forced before it begins, or after its end.
        with contextlib.suppress(ForcedExit):
            self.runtime.forcing.run(self._body)

    @property
    def is_alive(self) -> bool:
        return self._runner is not None and self._runner.is_alive()

    def threads(self) -> set[int]:
        own = self._runner.ident if self._runner is not None else None
        return self.runtime.threads_of_calls() | ({own} if own is not None else set())

    def force(self) -> None:
        """Acts as SIGTERM on a process: waiting calls fail, Python code gets ForcedExit."""
        # Its clean-up may check for the stop.
        self.runtime.request_stop(interrupts=True)
        self.runtime.force()

    def leave_behind(self) -> None:
        """Lets the interpreter exit while the node's code runs."""
        assert self._runner is not None
        leave_behind(self._runner)


class ThreadHost(abc.ABC):
    """Does actions on nodes as threads. Calls come from one thread; it posts from any."""

    def __init__(self, name: str, post: Callable[[Event], object], handlers_s: float) -> None:
        self.name = name
        self._post = post
        self._handlers_s = handlers_s
        self.nodes: dict[str, NodeThread] = {}  # by name; only the last start of each
        self._seen: dict[str, tuple[str, str]] = {}  # stacks and last calls of nodes, as asked for

    @abc.abstractmethod
    def make(self, start: Start) -> NodeThread:
        """Returns the executable to start."""

    def perform(self, action: NodeAction) -> None:
        match action:
            case Start():
                self._start(action)
            case DumpStacks():
                asked = self.nodes[action.node]
                stacks = describe_threads(asked.threads())
                self._seen[action.node] = stacks, asked.runtime.last_calls()
            case Terminate() | Kill():
                self.nodes[action.node].force()
            case ServersLost() | ServersMoved() | Ask():
                pass  # this process is neither lost nor moved while it runs, and is asked directly
            case _:
                if (node := self.nodes.get(action.node)) is not None:
                    node.runtime.obey(action)

    def _start(self, start: Start) -> None:
        node = self.nodes[start.node] = self.make(start)
        self._seen.pop(start.node, None)
        try:
            start_thread(self._look_after, node, start, name=f"launchpad-{start.node}")
        except RuntimeError as error:  # the system gives no more
            text = f"it cannot be started: {error}{advice_on(error)}"
            failure = NodeFailure(start.node, self.name, text)
            self._post(Ended(start.node, start.attempt, failure))

    def _look_after(self, node: NodeThread, start: Start) -> None:
        failure = None
        try:
            node.run(self._handlers_s)
        except BaseException as error:  # noqa: BLE001 - the supervisor would wait for ever
            report = ExceptionReport.of(error)
            failure = NodeFailure.of_exception(start.node, self.name, report)
        stacks, calls = self._seen.get(start.node, ("", ""))
        self._post(Ended(start.node, start.attempt, failure, stacks, calls))

    def stacks(self) -> dict[str, str]:
        return {name: stacks for name, (stacks, _) in self._seen.items()}

    def close(self) -> None:
        """Ends running nodes, or leaves them behind."""
        for node in self.nodes.values():
            if node.is_alive:  # given up, or the supervisor failed
                node.force()
                node.leave_behind()
                settle()
