"""Who says hello for whom, so that a thousand calls at once need one session only."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from courier._grpc.client_call import GrpcCall


class Greetings:
    """The calls of one lane that say hello, and those that wait for them.

    Not thread-safe; the lane holds its lock.
    """

    def __init__(self) -> None:
        self._waiting: dict[GrpcCall, list[GrpcCall]] = {}
        #: Of those that say hello, the one that others wait for.
        self._leader: GrpcCall | None = None

    def join(self, call: "GrpcCall", *, alone: bool) -> bool:
        """Returns True if the call shall say hello; otherwise it waits for another one that does.

        Args:
            call: Has no session.
            alone: Do not wait for another's hello.
        """
        leader = self._leader
        if leader is None or call is leader:
            self._leader = call
        elif not alone and leader.deadline.is_no_later_than(call.deadline):
            # Never for one with more time: nothing would tell this call that its own is over.
            self._waiting[leader].append(call)
            return False
        elif call.deadline.is_no_later_than(leader.deadline):
            self._leader = call
        self._waiting.setdefault(call, [])
        return True

    def greeters(self) -> "list[GrpcCall]":
        """Returns the calls that say hello."""
        return list(self._waiting)

    def leave(self, call: "GrpcCall") -> "list[GrpcCall]":
        """Takes out a call; returns those that waited for its hello."""
        if self._leader is call:
            self._leader = None
        return self._waiting.pop(call, [])

    def release(self) -> "list[GrpcCall]":
        """Returns all calls that wait for a hello: they need none any more."""
        released = [call for waiting in self._waiting.values() for call in waiting]
        for waiting in self._waiting.values():
            waiting.clear()
        return released
