"""The pods of a program as one host: a node whose pod is lost waits for the one in its place."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from launchers._console import warn
from launchers._deployment import Starter
from launchers._fleet import Fleet
from launchers._kubernetes.exchange import Exchange
from launchers._supervisor import SupervisedProgram
from launchers.host.remote import AgentHost
from launchpad_lite._events import Ended, Kill, NodeAction, Placed, RequestStop, Start, Terminate
from launchpad_lite.errors import LaunchError
from launchpad_lite.launching import NodeFailure

#: How often a thread is looked at that is to end.
_LOOK_S = 0.1
#: Seconds between the loss of a pod that was to take the place of another, and the wait for the next.
_PAUSE_S = 0.2

_LOGGER = logging.getLogger(__name__)


@dataclass(eq=False)
class _Return:
    """A node on its way into the pod that takes the place of a lost one."""

    start: Start
    cancelled: threading.Event = field(default_factory=threading.Event)


class PodFleet(Fleet):
    """Pods with their agents, one for each node. Implements `launchers._supervisor.Host`.

    Kubernetes makes a new pod of the same name and address for one that is lost. The new one calls
    as the first did; only then can its node be started.
    """

    def __init__(
        self,
        starter: Starter,
        program: SupervisedProgram,
        wait_s: float,
        exchange: Exchange,
        comes_back: Callable[[], bool],
    ) -> None:
        """Puts them together.

        Args:
            starter: Has brought them up.
            program: Whose pods they are.
            wait_s: Seconds within which a new pod must have come; infinity: as long as it takes.
            exchange: Where pods call.
            comes_back: Asked at the end: whether the program is going to start again, so that pods
                must not take this end for good.
        """
        super().__init__(starter.hosts, starter.placement, starter, (starter.release,))
        self._starter = starter
        self._wait_s = wait_s
        self._exchange = exchange
        self._comes_back = comes_back
        self._program = program
        self._lock = threading.Lock()
        self._returns: dict[str, _Return] = {}
        #: The newest of each host that has waited for a pod.
        self._threads: dict[str, threading.Thread] = {}
        self._is_closed = False

    def perform(self, action: NodeAction) -> None:
        """Does what was decided about a node, in its pod; one without a pod ends by giving it up."""
        is_end = isinstance(action, RequestStop | Terminate | Kill)
        if not (is_end and self._cancel(action.node)):
            super().perform(action)

    def _start(self, action: Start) -> None:
        """Starts a worker, in the next pod if its own is lost, or about to go."""
        host = self._of(action.node)
        if not host.is_lost and not host.is_departing:
            host.perform(action)
            return
        coming = _Return(action)
        with self._lock:
            before = self._threads.get(host.name)
            thread = threading.Thread(
                target=self._await,
                args=(host, coming, before),
                name=f"launchpad-return-{host.name}",
            )
            self._returns[action.node] = coming
            self._threads[host.name] = thread
        host.post(Placed(action.node, action.attempt, is_there=False))
        thread.start()

    def _await(self, host: AgentHost, coming: _Return, before: threading.Thread | None) -> None:
        """Waits for the next pod of a host and starts a node in it."""
        if before is not None:
            self._end(host.name, before)
        node = coming.start.node
        give_up_at = time.monotonic() + self._wait_s
        warn(_LOGGER, "%s waits for a new pod in place of %s", node, host.name)
        try:
            # Not asked to quit: to Kubernetes, the pod would have ended well, and no other would come.
            host.hang_up()
            host.close()
            again = self._readmit(host, coming, give_up_at)
        except Exception as error:  # noqa: BLE001 - it is reported
            # A mistake of ours must not become a wait without end.
            if not isinstance(error, LaunchError):
                warn(_LOGGER, "the return of %s", node, error=error)
            lost = (
                f"{host.name} is lost" if coming.start.cause is None else coming.start.cause.summary
            )
            failure = NodeFailure(
                node, host.name, f"{lost}; no pod could take its place: {error}", host_lost=True
            )
            with self._lock:
                if self._take(coming):
                    host.post(Ended(node, coming.start.attempt, failure, for_good=True))
            return
        with self._lock:
            is_wanted = self._take(coming) and not self._is_closed
            if is_wanted:
                self.hosts[host.name] = again
                self._tell_ended_before(node)
                host.post(Placed(node, coming.start.attempt, is_there=True))
                again.perform(coming.start)
            may_come_back = not self._is_closed or self._comes_back()
        if not is_wanted:
            if may_come_back:
                again.hang_up()
            again.close()

    def _take(self, coming: _Return) -> bool:
        """Takes a node's return, with the lock; returns whether this is the first time."""
        if self._returns.get(coming.start.node) is not coming:
            return False
        del self._returns[coming.start.node]
        return True

    def _readmit(self, host: AgentHost, coming: _Return, give_up_at: float) -> AgentHost:
        while True:
            left_s = max(0.0, give_up_at - time.monotonic())
            try:
                return self._starter.readmit(host, self._program, left_s)
            except LaunchError:
                # The new one may be lost before it is of use; then there is another one.
                if not self._exchange.is_open:
                    raise LaunchError("the supervisor takes no calls any more") from None
                if time.monotonic() >= give_up_at or coming.cancelled.wait(_PAUSE_S):
                    raise

    def _end(self, host: str, thread: threading.Thread) -> None:
        """Waits for a thread whose wait is given up, or has been for nothing."""
        thread.join(_LOOK_S)
        while thread.is_alive():
            # Again and again: it may have been about to begin its wait.
            self._exchange.give_up(host)
            thread.join(_LOOK_S)

    def _cancel(self, node: str) -> bool:
        """Gives up a node that has no pod yet; returns whether it had none."""
        with self._lock:
            coming = self._returns.pop(node, None)
            if coming is None:
                return False
            coming.cancelled.set()
        host = self._of(node)
        self._exchange.give_up(host.name)
        host.post(Ended(node, coming.start.attempt, None))
        return True

    def close(self) -> None:
        """Ends all agents, and all that is left of their workers. May be repeated."""
        with self._lock:
            self._is_closed = True
            coming = list(self._returns.values())
            self._returns.clear()
            threads = list(self._threads.items())
        for each in coming:
            each.cancelled.set()
            self._exchange.give_up(self._placement[each.start.node])
        with contextlib.ExitStack() as stack:
            for name, thread in threads:
                stack.callback(self._end, name, thread)
            stack.callback(super().close)
            if self._comes_back():
                for host in self.hosts.values():
                    host.hang_up()
