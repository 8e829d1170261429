"""Waits until any of many descriptors is ready: epoll where there is one, poll elsewhere.

Other threads may change the watched descriptors, and wake the polling thread, at any time.
"""

import contextlib
import os
import select
from collections.abc import Callable
from time import perf_counter

READ = select.POLLIN
WRITE = select.POLLOUT
#: The peer has closed the connection while no thread reads. Where the system cannot tell, a later read does.
HANG_UP = getattr(select, "EPOLLRDHUP", 0)
#: The longest wait that poll takes; the thread waits again.
_LONGEST_S = 1e6
#: How long it spins: the time of sleeping and waking, on both sides together.
_SPIN_S = 100e-6
#: After spinning was in vain, at most so many waits go by without it.
_LONGEST_REST = 64

#: Descriptors and their events; empty if nothing has come.
Events = list[tuple[int, int]]

_let_others_run: Callable[[], object] = getattr(os, "sched_yield", lambda: None)


class Spin:
    """Decides whether to poll for a moment (spin) before a thread sleeps. For one at a time.

    Sleeping and being woken by another core takes longer than a small call: some 25 µs on a virtual
    machine, on either side. A thread that spins for about that time before it sleeps takes at most
    twice the time of the best choice (A. Karlin et al., "Empirical studies of competitive spinning
    for a shared-memory multiprocessor", SOSP 1991). After each time in vain, twice as many waits go
    by before the next one.

    Example:
        events = spin.look(poll.poll) or poll.poll()
    """

    __slots__ = ("_next_rest", "_now", "_rest")

    def __init__(self, now: Callable[[], float] = perf_counter) -> None:
        self._now = now
        #: Waits that still go by without spinning.
        self._rest = 0
        self._next_rest = 1

    def look(self, poll: Callable[[float], Events]) -> Events:
        """Returns the events that `poll(0)` finds within a moment; none if it does not spin."""
        if self._rest:
            self._rest -= 1
            return []
        now = self._now
        until = now() + _SPIN_S
        while True:
            found = poll(0)
            # So late, another thread had the core or the interpreter for long: only a sleeping
            # thread gets another core, and releases the interpreter.
            if now() > until:
                break
            if found:
                self._next_rest = 1
                return found
            # Lets the other side run and answer if it shares this core.
            _let_others_run()
        self._rest = self._next_rest
        self._next_rest = min(2 * self._next_rest, _LONGEST_REST)
        return found


def poll_once(descriptor: int, events: int, timeout_s: float | None) -> bool:
    """Waits for a socket; returns whether it is ready. One that was closed is."""
    if descriptor < 0:
        return True
    poll = select.poll()
    poll.register(descriptor, events)
    return bool(poll.poll(None if timeout_s is None else min(timeout_s, _LONGEST_S) * 1000))


def poll_of(descriptor: int) -> Callable[[float], Events]:
    """Returns a function that polls a socket for reading, given milliseconds. For one thread."""
    poll = select.poll()
    poll.register(descriptor, READ)
    return poll.poll


class EpollWatcher:
    """Watches descriptors on Linux, in constant time. Only `poll` is for one thread."""

    def __init__(self, spin: Spin | None) -> None:
        self._spin = spin
        self._epoll = select.epoll()
        self._alarm = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._alarm, select.EPOLLIN)
        self._poll = self._epoll.poll

    def watch(self, descriptor: int, events: int, *, once: bool = False) -> None:
        """Sets the events to notice for a descriptor, from now on or once."""
        wanted = events | (select.EPOLLONESHOT if once else 0)
        # The descriptor, or the watcher, was closed meanwhile.
        with contextlib.suppress(OSError, ValueError):
            try:
                self._epoll.modify(descriptor, wanted)
            except FileNotFoundError:
                self._epoll.register(descriptor, wanted)

    def forget(self, descriptor: int) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(descriptor)

    def poll(self, timeout_s: float | None) -> Events:
        """Waits; returns descriptors with their events, maybe none."""
        found = self._spin.look(self._poll) if self._spin is not None else None
        events = found or self._poll(timeout_s)
        for event in events:
            if event[0] == self._alarm:
                events.remove(event)
                with contextlib.suppress(OSError):
                    os.eventfd_read(self._alarm)
                break
        return events

    def wake(self) -> None:
        """Makes `poll` return. Safe in finalisers and signal handlers."""
        with contextlib.suppress(OSError):
            os.eventfd_write(self._alarm, 1)

    def close(self) -> None:
        self._epoll.close()
        os.close(self._alarm)


class PollWatcher:
    """The same on other systems."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._once: set[int] = set()
        self._alarm, self._bell = os.pipe()
        for end in (self._alarm, self._bell):
            os.set_blocking(end, False)
        self._poll.register(self._alarm, READ)

    def watch(self, descriptor: int, events: int, *, once: bool = False) -> None:
        if descriptor < 0:
            return
        if once:
            self._once.add(descriptor)
        else:
            self._once.discard(descriptor)
        self._poll.register(descriptor, events)
        self.wake()  # a poll that has begun does not see it

    def forget(self, descriptor: int) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._poll.unregister(descriptor)

    def poll(self, timeout_s: float | None) -> Events:
        found = []
        for descriptor, events in self._poll.poll(timeout_s and timeout_s * 1000):
            if descriptor == self._alarm:
                with contextlib.suppress(OSError):
                    os.read(self._alarm, 4096)
            elif events & select.POLLNVAL:  # closed
                self.forget(descriptor)
            else:
                if descriptor in self._once:
                    with contextlib.suppress(OSError):  # forgotten meanwhile
                        self._poll.modify(descriptor, 0)
                found.append((descriptor, events))
        return found

    def wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._bell, b"!")

    def close(self) -> None:
        os.close(self._alarm)
        os.close(self._bell)


Watcher = EpollWatcher | PollWatcher


def make_watcher(spin: Spin | None = None) -> Watcher:
    """Returns the best watcher that this system has; with epoll, `spin` polls before it sleeps."""
    if hasattr(select, "epoll") and hasattr(os, "eventfd"):
        return EpollWatcher(spin)
    return PollWatcher()
