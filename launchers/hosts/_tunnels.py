"""Connections between hosts that do not reach each other: the launcher forwards what agents relay."""

import functools
import threading
from collections.abc import Mapping

from launchers.host.link import LinkFrame
from launchers.hosts.reachability import LAUNCHER
from launchers.supervision.agent_link import start_agent_here
from launchers.supervision.remote import AgentHost


class Tunnels:
    """Forwards relayed connections from host to host. Thread-safe."""

    def __init__(self, hosts: Mapping[str, AgentHost]) -> None:
        #: With `LAUNCHER`, once it calls through a tunnel: an agent of this machine.
        self._hosts = dict(hosts)
        self._lock = threading.Lock()
        #: The two ends of each connection.
        self._ends: dict[str, tuple[str, str]] = {}
        #: The endpoint that stands for a port of a host, by caller, host and port.
        self._known: dict[tuple[str, str, int], str] = {}
        for name, host in hosts.items():
            host.pass_relayed_to(functools.partial(self._pass_on, name))

    def endpoint(self, caller: str, host: str, port: int) -> str:
        """Returns `host:port` at which a caller reaches a port of a host."""
        way = (caller, host, port)
        if way in self._known:
            return self._known[way]
        if caller not in self._hosts:
            own = AgentHost("this machine", start_agent_here(), None)
            self._hosts[LAUNCHER] = own
            own.pass_relayed_to(functools.partial(self._pass_on, LAUNCHER))
        answer = self._hosts[caller].ask_agent(LinkFrame("relay", {"host": host, "port": port}))
        self._known[way] = str(answer["endpoint"])
        return self._known[way]

    def _pass_on(self, source: str, frame: LinkFrame | None) -> None:
        if frame is None:
            self._end_all_of(source)
            return
        key: str = frame["key"]
        with self._lock:
            if frame.op == "relay_open":
                self._ends[key] = (source, frame["host"])
            ends = self._ends.get(key)
            if frame.op == "relay_end":
                self._ends.pop(key, None)
        if ends is not None:
            other = self._hosts[_other(ends, source)]
            if not other.relay(frame) and frame.op != "relay_end":
                with self._lock:
                    self._ends.pop(key, None)
                self._hosts[source].relay(LinkFrame("relay_end", {"key": key}))

    def _end_all_of(self, lost: str) -> None:
        """Closes the connections of a lost host at their other ends."""
        with self._lock:
            broken = {key: ends for key, ends in self._ends.items() if lost in ends}
            for key in broken:
                del self._ends[key]
        for key, ends in broken.items():
            self._hosts[_other(ends, lost)].relay(LinkFrame("relay_end", {"key": key}))

    def close(self) -> None:
        """Ends the agent of this machine, if there is one. May be repeated."""
        if LAUNCHER in self._hosts:
            self._hosts[LAUNCHER].close()


def _other(ends: tuple[str, str], one: str) -> str:
    return ends[1] if ends[0] == one else ends[0]
