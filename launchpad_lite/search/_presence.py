"""How workers and models find brokers: through the name server, or without it while it is lost."""

import contextlib
import os
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

import courier
import launchpad_lite as lp
from launchpad_lite.search._messages import Life, Load, MembersView, SearchMember
from launchpad_lite.search._timing import RETRY_S, Timing
from launchpad_lite.search.errors import LOST


class Presence:
    """One worker or model, as the name server knows it. Thread-safe, if `beat` is called by one."""

    def __init__(
        self,
        role: str,
        name: str,
        name_server: Any,
        brokers: Mapping[str, Any],
        timing: Timing,
        connect: Callable[[str], Any] | None = None,
    ) -> None:
        """Makes one in this process; the name server hears of it with the first heartbeat.

        Of the clients, `brokers` are there already; `connect` makes others for addresses, by default
        those of this program.
        """
        python = f"{sys.version_info[0]}.{sys.version_info[1]}"
        who = Life(name, os.urandom(16).hex())
        self.member = SearchMember(role, who, version=lp.__version__, python=python)
        self._name_server = courier.with_timeout(name_server, 2 * timing.beat_s)
        self.timing = timing
        self._of_program = frozenset(brokers)
        self._clients = dict(brokers)
        self._addresses: dict[str, str] = {}
        self._connect = connect
        self.view = MembersView(False, {})

    def beat(self, broker: str = "") -> bool:
        """Sends a heartbeat, and keeps the brokers in the answer; returns whether one came."""
        role, who = self.member.role, self.member.who
        try:
            view = self._name_server.beat(role, who, Load(), broker)
            if not view.is_known:
                self._name_server.register(self.member)
                view = self._name_server.beat(role, who, Load(), broker)
        except LOST:
            return False
        self.view = view
        return True

    def leave(self) -> None:
        try:
            self._name_server.leave(self.member.role, self.member.who)
        except (*LOST, courier.CallCancelledError):
            pass  # it notices the silence

    def end_search(self, wait_for_stop: Callable[[float], bool]) -> None:
        """Ends the search: all brokers, once their workers have left.

        It tells those that start again meanwhile once more, until `wait_for_stop` says that the
        program stops.
        """
        left = dict(self._clients)
        while left:
            with contextlib.suppress(*LOST):
                self._name_server.close()
            for name, broker in list(left.items()):
                try:
                    courier.with_timeout(broker, self.timing.beat_s).close()
                except courier.ServerUnreachableError:  # it has ended for good
                    del left[name]
                except LOST:
                    pass
            if wait_for_stop(RETRY_S):
                break

    def choose(self, avoid: Collection[str] = ()) -> str:
        """Returns a broker to use, of `avoid` if there is no other; empty: none is known."""
        known = self._known()
        if len(known) == 1 and not self.view.is_closed:
            return known.pop()  # it may not have started yet
        try:
            name: str = self._name_server.place(self.member.role, self.member.who, avoid)
        except LOST:
            import random  # few ever need it

            others = sorted(self.view.brokers or self._clients)
            fit = [each for each in others if each not in avoid] or others
            name = random.choice(fit) if fit else ""  # noqa: S311 - no secret
        if name and name not in self._known():
            self.beat()  # to learn its address
        return name if name in self._known() else ""

    def has_choice(self) -> bool:
        """Returns whether the name server must say which broker to use."""
        return len(self._known()) != 1

    def _known(self) -> set[str]:
        return {*self._clients, *self.view.brokers}

    def is_crowded(self, broker: str) -> bool:
        """Returns whether another broker has clearly fewer workers."""
        workers = {name: load.workers for name, (_, load) in self.view.brokers.items()}
        return broker in workers and workers[broker] > min(workers.values()) + 1

    def has_ended(self, ended: Collection[str]) -> bool:
        return not self._known().difference(ended)

    def client(self, name: str) -> Any:
        """Returns a client of a broker that `choose` has returned."""
        # Clients of the program follow a broker to a new address; one without may be back at once.
        address, _ = self.view.brokers.get(name, ("", None))
        is_new = address and self._addresses.get(name) != address
        if is_new and name not in self._of_program:
            self._clients[name] = (self._connect or courier.Client)(address)
            self._addresses[name] = address
        return self._clients[name]
