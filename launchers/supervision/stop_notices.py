"""Messages while a program stops: that it stops, and which nodes it waits for."""

import signal
from collections.abc import Callable, Mapping

from launchpad_lite.life.events import Event, StopAsked
from launchpad_lite.life.result import named

#: Seconds from a signal to the first message on nodes that are waited for, and between two such messages.
_FIRST_S, _BETWEEN_S = 1.0, 5.0
_LONG_S = 10.0  # seconds after which, without a limit, a message says which nodes still run
MAX_NAMED = 4  # nodes that a message names


class StopNotices:
    """Prints what a stop waits for, at most every few seconds. Callers pass the time."""

    def __init__(self, program: str, notice_s: float, say: Callable[[str], None]) -> None:
        self._program = program
        self._notice_s = notice_s
        self._say = say
        self._began_at: float | None = None
        self._said: list[str] = []
        self._half_at = 0.0
        self._is_hinted = False
        self.due: float | None = None  # when to look again; None: never

    def begin(self, cause: Event, now: float) -> None:
        """Takes note that the program stops. Only the first time counts."""
        if self._began_at is not None:
            return
        self._began_at = now
        signum = cause.signum if isinstance(cause, StopAsked) else None
        if isinstance(cause, StopAsked) and signum is not None:
            hint = "; a second Ctrl-C ends it at once" if signum == signal.SIGINT else ""
            self._say(f"stopping {self._program!r} ({cause.reason}){hint}")
        if self._notice_s != 0:
            self._half_at = now + (self._notice_s / 2 if self._notice_s > 0 else _LONG_S)
            self.due = self._half_at if signum is None else min(now + _FIRST_S, self._half_at)

    def is_due(self, now: float) -> bool:
        return self.due is not None and now >= self.due

    def look(self, waited_for: Mapping[str, bool], now: float) -> None:
        """Prints which nodes are waited for, if they have changed. `begin` must come first."""
        assert self._began_at is not None
        names = list(waited_for)
        left_s = self._began_at + self._notice_s - now
        limit = f"{max(0.0, left_s):.0f} s at most" if self._notice_s > 0 else "without a limit"
        if names and names != self._said:
            self._say(f"waiting for {named(names, MAX_NAMED)} ({limit})")
            self._said = names
        if now < self._half_at:
            self.due = min(self._half_at, now + _BETWEEN_S)
            return
        unaware = [name for name, looks in waited_for.items() if not looks]
        if unaware and not self._is_hinted:
            self._say(
                f"{named(unaware, MAX_NAMED)}: asked to stop, and still running without a look at it. "
                "Long loops end in time if they look at lp.stop_event() or lp.wait_for_stop(0), async code "
                "if a task of it awaits asyncio.to_thread(lp.wait_for_stop)"
            )
        self._is_hinted = True
        self.due = now + _BETWEEN_S
