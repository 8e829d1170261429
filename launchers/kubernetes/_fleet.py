"""The pods of a program as one host: a node whose pod is lost waits for the new pod."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from launchers.hosts.deployment import Starter
from launchers.hosts.fleet import Fleet
from launchers.kubernetes._exchange import PodExchange
from launchers.supervision.console import warn
from launchers.supervision.remote import AgentHost
from launchers.supervision.supervised_program import SupervisedProgram
from launchpad_lite.errors import LaunchError
from launchpad_lite.launching import NodeFailure
from launchpad_lite.life.events import (
    Ended,
    Kill,
    NodeAction,
    Placed,
    RequestStop,
    ServersEnded,
    Start,
    Terminate,
)

#: Seconds between two attempts to end a thread.
_LOOK_S = 0.1
#: Seconds of pause after a new pod is lost as well, before the wait for the next one.
_PAUSE_S = 0.2

_LOGGER = logging.getLogger(__name__)


@dataclass(eq=False)
class _Return:
    """A node on its way into the pod that takes the place of a lost one."""

    start: Start
    cancelled: threading.Event = field(default_factory=threading.Event)
    #: Events that its node must get first.
    ended: list[ServersEnded] = field(default_factory=list)


class PodFleet(Fleet):
    """Pods with their agents, one for each node. Implements `launchers.supervision.Host`.

    Kubernetes makes a new pod of the same name and address for one that is lost. The new one calls
    as the first did; only then can its node be started.
    """

    def __init__(
        self,
        starter: Starter,
        program: SupervisedProgram,
        wait_s: float,
        exchange: PodExchange,
        comes_back: Callable[[], bool],
    ) -> None:
        """Puts them together.

        A new pod must have come within `wait_s`. `comes_back` returns, at the end, whether the
        program will start again. Then pods must not treat this end as final.
        """
        super().__init__(starter)
        self._wait_s = wait_s
        self._exchange = exchange
        self._comes_back = comes_back
        self._program = program
        self._lock = threading.Lock()
        self._returns: dict[str, _Return] = {}
        #: The newest thread that waits for a pod, by host.
        self._threads: dict[str, threading.Thread] = {}
        self._is_closed = False

    def perform(self, action: NodeAction) -> None:
        """Does what was decided about a node, in its pod; to end a node without a pod, gives it up."""
        if isinstance(action, ServersEnded):
            with self._lock:
                if (coming := self._returns.get(action.node)) is not None:
                    coming.ended.append(action)
                    return
        if isinstance(action, RequestStop | Terminate | Kill) and self._cancel(action.node):
            return
        super().perform(action)

    def _start(self, action: Start) -> None:
        """Starts a worker; in the next pod if its own is lost, or is being deleted."""
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
        if before is not None:
            self._end(host.name, before)
        node = coming.start.node
        give_up_at = time.monotonic() + self._wait_s
        warn(_LOGGER, "%s waits for a new pod in place of %s", node, host.name)
        try:
            # Hang up, and do not ask it to quit: Kubernetes would count the pod as completed and make no
            # new one.
            host.hang_up()
            host.close()
            again = self._readmit(host, coming, give_up_at)
        except Exception as error:  # noqa: BLE001 - it is reported
            # A bug in the launcher must not lead to an endless wait.
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
                host.post(Placed(node, coming.start.attempt, is_there=True))
                again.perform(coming.start)
                for each in coming.ended:
                    again.perform(each)
            may_come_back = not self._is_closed or self._comes_back()
        if not is_wanted:
            if may_come_back:
                again.hang_up()
            again.close()

    def _take(self, coming: _Return) -> bool:
        """Takes a node's return; returns whether this is the first time. The caller holds the lock."""
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
                # The new pod may be lost before it is used. Then Kubernetes makes another one.
                if not self._exchange.is_open:
                    raise LaunchError("the supervisor takes no calls any more") from None
                if time.monotonic() >= give_up_at or coming.cancelled.wait(_PAUSE_S):
                    raise

    def _end(self, host: str, thread: threading.Thread) -> None:
        """Ends a thread that waits for a pod, and waits until it has ended."""
        thread.join(_LOOK_S)
        while thread.is_alive():
            # Repeated, because the thread may begin its wait only now.
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
        """Ends all agents and the rest of their workers. May be repeated."""
        with self._lock:
            self._is_closed = True
            coming = list(self._returns.values())
            self._returns.clear()
            threads = list(self._threads.items())
        for each in coming:
            each.cancelled.set()
            self._exchange.give_up(self.placement[each.start.node])
        with contextlib.ExitStack() as stack:
            for name, thread in threads:
                stack.callback(self._end, name, thread)
            stack.callback(super().close)
            if self._comes_back():
                for host in self.hosts.values():
                    host.hang_up()
