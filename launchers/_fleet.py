"""Several hosts as one: each node is on one of them, and may move when that is lost."""

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from launchers._console import warn
from launchers.host.remote import AgentHost, EndingError
from launchers.host.usage import Usage
from launchpad_lite._events import Ended, NodeAction, Start
from launchpad_lite.errors import LaunchError
from launchpad_lite.launching import NodeFailure

_LOGGER = logging.getLogger(__name__)


class Mover(Protocol):
    """Finds another host for a node."""

    def move(self, node: str, fleet: "Fleet") -> None:
        """Makes a node that has lost its host one of another, and tells all where it listens.

        Raises:
            LaunchError: No host has room for it, or the one that has cannot take it.
        """


class Fleet:
    """Hosts with their agents. Implements `launchers._supervisor.Host`."""

    def __init__(
        self,
        hosts: Sequence[AgentHost],
        placement: Mapping[str, str],
        mover: Mover,
        release: Sequence[Callable[[], None]],
    ) -> None:
        """Puts them together.

        Args:
            hosts: All hosts; their names differ.
            placement: Name of the host of each node.
            mover: Finds a new host for a node whose host is lost.
            release: Called when all have ended.
        """
        self.name = ", ".join(host.name for host in hosts)
        self.hosts = {host.name: host for host in hosts}
        self._placement = dict(placement)
        self._mover = mover
        self._release = release
        #: Addresses of servers that have ended, by the nodes that call them.
        self._ended: dict[str, list[str]] = {}

    @property
    def placement(self) -> Mapping[str, str]:
        """Name of the host of each node."""
        return dict(self._placement)

    def place(self, node: str, host: str) -> None:
        """Notes that a node is on a host now."""
        self._placement[node] = host

    def living(self) -> list[AgentHost]:
        """Returns the hosts that are not lost."""
        return [host for host in self.hosts.values() if not host.is_lost]

    def host_of(self, node: str) -> str:
        """Returns the name of the host where a node runs."""
        return self._placement[node]

    def _of(self, node: str) -> AgentHost:
        return self.hosts[self._placement[node]]

    def perform(self, action: NodeAction) -> None:
        """Does what was decided about a node, on its host."""
        if isinstance(action, Start):
            self._start(action)
        else:
            self._of(action.node).perform(action)

    def _start(self, action: Start) -> None:
        """Starts a worker, on another host if its own is lost."""
        node, attempt, cause = action.node, action.attempt, action.cause
        while (host := self._of(node)).is_lost:
            try:
                self._mover.move(node, self)
            except EndingError:
                host.post(Ended(node, attempt, None))
                return
            except LaunchError as error:
                if self._of(node) is not host and self._of(node).is_lost:
                    continue  # the new one was lost meanwhile, too; there may be others
                lost = f"{host.name} is lost" if cause is None else cause.summary
                failure = NodeFailure(node, host.name, f"{lost}; it cannot move: {error}")
                host.post(Ended(node, attempt, failure, for_good=True))
                return
            warn(_LOGGER, "%s moves from %s to %s", node, host.name, self._of(node).name)
            self._tell_ended_before(node)
        self._of(node).perform(action)

    def _tell_ended_before(self, node: str) -> None:
        """Sends a host that is new to a node what the one before knew."""
        if keys := self._ended.get(node):
            self._of(node).tell_ended([node], keys)

    def tell_ended(self, callers: Sequence[str], keys: Sequence[str]) -> None:
        """Informs workers, later ones too, that the servers at these addresses have ended."""
        for caller in callers:
            self._ended.setdefault(caller, []).extend(keys)
        for host in self.living():
            mine = [caller for caller in callers if self._placement[caller] == host.name]
            if mine:
                host.tell_ended(mine, keys)

    def tell_lost(self, keys: Sequence[str]) -> None:
        """Fails calls in flight to these addresses, whose host is lost."""
        for host in self.living():
            host.tell_lost(keys)

    def pids(self) -> Mapping[str, int]:
        """Returns the process of each node that was started, on its host."""
        return {
            node: pid
            for host in self.hosts.values()
            for node, pid in host.pids().items()
            if self._placement[node] == host.name
        }

    def usage(self) -> Mapping[str, Usage]:
        """Returns what workers use, as it was reported last."""
        return {node: usage for host in self.living() for node, usage in host.usage().items()}

    def stacks(self) -> Mapping[str, str]:
        """Returns where the threads of workers were that were asked for it."""
        return {node: text for host in self.hosts.values() for node, text in host.stacks().items()}

    def look(self, timeout_s: float) -> Mapping[str, str]:
        """Returns where the threads of nodes are now; not of those that do not answer in time."""
        give_up_at = time.monotonic() + timeout_s
        asked = [(host, host.ask_for_look()) for host in self.living()]
        found: dict[str, str] = {}
        for host, nodes in asked:
            found.update(host.await_look(nodes, max(0.0, give_up_at - time.monotonic())))
        return found

    def close(self) -> None:
        """Ends all agents, and all that is left of their workers. May be repeated."""
        with contextlib.ExitStack() as stack:
            for release in self._release:
                stack.callback(release)
            for host in self.hosts.values():
                stack.callback(host.close)
                host.begin_to_close()  # all at once, then one is waited for after the other
