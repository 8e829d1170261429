"""Messages while a program stops: that it does, and which nodes it waits for."""

from collections.abc import Callable, Mapping

from launchpad_lite._result import named

#: Seconds after a signal until it is said who is waited for, and between two such messages.
_FIRST_S, _BETWEEN_S = 1.0, 5.0
#: When it is said of who has no limit that it still runs.
_LONG_S = 10.0
#: Nodes that a message names.
MAX_NAMED = 4


class StopNotices:
    """Prints what a stop waits for, at most every few seconds. Knows no clock."""

    def __init__(self, program: str, notice_s: float, say: Callable[[str], None]) -> None:
        """Prepares it.

        Args:
            program: Its name.
            notice_s: Seconds that nodes have to end; below 0 for ever.
            say: Takes each message.
        """
        self._program = program
        self._notice_s = notice_s
        self._say = say
        self._began_at: float | None = None
        self._said: list[str] = []
        self._half_at = 0.0
        self._is_hinted = False
        #: When to look again; None: never.
        self.due: float | None = None

    def begin(self, reason: str, is_interrupt: bool, is_signal: bool, now: float) -> None:
        """Takes note that the program stops. Only the first time counts.

        Args:
            reason: Why: the name of a signal, or text.
            is_interrupt: Whether it was Ctrl-C.
            is_signal: Whether it was a signal.
            now: Seconds of a clock that never goes back.
        """
        if self._began_at is not None:
            return
        self._began_at = now
        if is_signal:
            hint = "; a second Ctrl-C ends it at once" if is_interrupt else ""
            self._say(f"stopping {self._program!r} ({reason}){hint}")
        if self._notice_s != 0:
            self._half_at = now + (self._notice_s / 2 if self._notice_s > 0 else _LONG_S)
            self.due = min(now + _FIRST_S, self._half_at) if is_signal else self._half_at

    def is_due(self, now: float) -> bool:
        """Returns whether it is time to `look`."""
        return self.due is not None and now >= self.due

    def look(self, waited_for: Mapping[str, bool], now: float) -> None:
        """Prints which nodes are waited for, if that is new. Not before `begin`.

        Args:
            waited_for: The nodes that were asked to end and have not, and whether each looks at that.
            now: Seconds of the same clock.
        """
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
