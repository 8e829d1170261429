"""The interface of a transport.

A client asks a `Lane` to carry calls and knows nothing else about transport.
`courier._local` chooses: the same process, or the engine, which in turn chooses
how bytes travel (see `courier._engine.dialing`).
"""

from collections.abc import Callable
from typing import Any, Protocol

from courier._outcomes import Outcome
from courier._parcel import Parcel


class PendingCall(Protocol):
    """A call on its way. Thread-safe."""

    @property
    def where(self) -> str:
        """The server and the method, for messages."""

    @property
    def is_settled(self) -> bool:
        """Whether it has ended."""

    def wait(self) -> Outcome:
        """Waits for the answer; a KeyboardInterrupt cancels the call. Raises CourierError."""

    def wait_until(self, deadline: float | None) -> bool:
        """Waits until a monotonic time at most; returns whether the answer is here."""

    def when_done(self, callback: Callable[["PendingCall"], None]) -> None:
        """Calls back once, soon after the answer came; `wait` then returns at once."""

    def hurry(self) -> None:
        """Notes that the answer must be reported even though no thread waits for it."""

    def cancel(self) -> bool:
        """Gives the call up; False if the answer is already here."""


class Lane(Protocol):
    """Carries calls to one server. Thread-safe."""

    #: Methods that the server listed last; None if it has listed none. It may have
    #: others by now.
    methods: frozenset[str] | None

    def submit(
        self,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout_s: float | None,
        *,
        blocking: bool,
    ) -> PendingCall:
        """Sends a call.

        Args:
            method: Which.
            args: Its arguments.
            kwargs: Its arguments.
            timeout_s: Seconds it may take; None is for ever.
            blocking: Whether the caller is going to wait at once.

        Raises:
            SerializationError: The arguments cannot be pickled.
        """

    def ask(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Parcel | PendingCall:
        """Sends a call for a caller who waits at once and for ever; the quickest way.

        Returns:
            What the method returned, if that came at once, in this thread. Otherwise as `submit`.

        Raises:
            SerializationError: The arguments cannot be pickled.
        """

    def forward(self, method: str, arguments: Parcel, timeout_s: float | None) -> PendingCall:
        """As `submit`, of arguments that are packed already, for a caller who does not wait."""

    def open_futures(self) -> list[PendingCall]:
        """Returns the calls that have not ended and that no thread was going to wait for."""

    def stop_waiting(self) -> None:
        """From now on, calls fail with ServerUnreachableError where no server answers."""

    def move(self, address: str) -> Callable[[], None]:
        """From now on, calls go to the server at another address, those too that wait for one.

        Returns:
            Finishes the move: gives up the connection, whose calls raise ServerLostError. Not done
            by `move` itself, because their callers may call again; so call it without locks.
        """

    def close(self, reason: str) -> None:
        """Fails all pending calls with CallCancelledError and gives back what it holds."""

    def drop(self) -> None:
        """Forgets its connection in a forked child; the parent continues with it."""
