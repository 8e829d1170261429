"""Several hosts as one: each node runs on one of them, and may move when that host is lost."""

import logging
import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from launchers.host.usage import Usage
from launchers.supervision.console import warn
from launchers.supervision.remote import AgentHost, EndingError, close_all
from launchpad_lite.errors import LaunchError
from launchpad_lite.launching import NodeFailure
from launchpad_lite.life.events import Ended, NodeAction, ServersLost, ServersMoved, Start

if TYPE_CHECKING:
    from launchers.hosts.deployment import Starter

_LOGGER = logging.getLogger(__name__)


class Fleet:
    """Hosts with their agents. Implements `launchers.supervision.Host`."""

    def __init__(self, starter: "Starter") -> None:
        self.hosts = {host.name: host for host in starter.hosts}
        self.placement = dict(starter.placement)  # host of each node
        self._starter = starter

    def living(self) -> list[AgentHost]:
        return [host for host in self.hosts.values() if not host.is_lost]

    def host_of(self, node: str) -> str:
        return self.placement[node]

    def _of(self, node: str) -> AgentHost:
        return self.hosts[self.placement[node]]

    def perform(self, action: NodeAction) -> None:
        match action:
            case Start():
                self._start(action)
            case ServersLost() | ServersMoved():
                for host in self.living():
                    host.perform(action)
            case _:
                self._of(action.node).perform(action)

    def _start(self, action: Start) -> None:
        """Starts a worker, on another host if its own is lost."""
        node, attempt, cause = action.node, action.attempt, action.cause
        while (host := self._of(node)).is_lost:
            try:
                self._starter.move(node, self)
            except EndingError:
                host.post(Ended(node, attempt, None))
                return
            except LaunchError as error:
                if self._of(node) is not host and self._of(node).is_lost:
                    continue  # the new host was lost meanwhile, too; another may be left
                lost = f"{host.name} is lost" if cause is None else cause.summary
                failure = NodeFailure(node, host.name, f"{lost}; it cannot move: {error}")
                host.post(Ended(node, attempt, failure, for_good=True))
                return
            warn(_LOGGER, "%s moves from %s to %s", node, host.name, self._of(node).name)
        self._of(node).perform(action)

    def pids(self) -> Mapping[str, int]:
        return {
            node: pid
            for host in self.hosts.values()
            for node, pid in host.pids().items()
            if self.placement[node] == host.name
        }

    def usage(self) -> Mapping[str, Usage]:
        return {node: usage for host in self.living() for node, usage in host.usage().items()}

    def stacks(self) -> Mapping[str, str]:
        return {node: text for host in self.hosts.values() for node, text in host.stacks().items()}

    def ask(
        self, question: str, argument: Any, nodes: Collection[str] | None, timeout_s: float
    ) -> Mapping[str, Any]:
        give_up_at = time.monotonic() + timeout_s
        asked = [host.begin_to_ask(question, argument, nodes) for host in self.living()]
        found: dict[str, Any] = {}
        for await_answers in asked:
            found.update(await_answers(max(0.0, give_up_at - time.monotonic())))
        return found

    def close(self) -> None:
        """Ends all agents, and all that is left of their workers. May be repeated."""
        try:
            close_all(self.hosts.values())
        finally:
            self._starter.close()
