"""Mailboxes: where items of other replicas arrive over courier, and callers wait for them."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from courier.lowlevel import take_stream
from launchpad_lite.replicas.errors import ReplicaLostError

#: What the end of a stream that was taken over sends, and its key in the box.
STREAM_IS_TAKEN = b"!"
#: Makes the result for all from the items of all, in the order of their indices.
Join = Callable[[Sequence[Any]], Any]


class _Gathering:
    def __init__(self) -> None:
        self.items: dict[int, Any] = {}
        #: For all that take part. Marked as running, so that none of them can cancel it.
        self.answer: Future[Any] = Future()
        self.answer.set_running_or_notify_cancel()
        self.join: Join | None = None
        self.size = 0


class Box:
    """Holds the items that have arrived at one replica. Thread-safe.

    Items of an earlier generation are refused, and those of a later one are kept until this replica
    is there.
    """

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._generation = 0
        self._error: Exception | None = None
        self._meetings: dict[tuple[int, int], _Gathering] = {}
        self._items: dict[tuple[int, Any], Any] = {}

    def begin(self, generation: int) -> None:
        """Forgets items of earlier generations; callers that wait for them get an error."""
        with self._lock:
            self._generation = generation
            self._error = None
            self._items = {key: item for key, item in self._items.items() if key[0] >= generation}
            past = [key for key in self._meetings if key[0] < generation]
            meetings = [self._meetings.pop(key) for key in past]
        for meeting in meetings:
            meeting.answer.set_exception(_past(generation))

    def fail(self, error: Exception) -> None:
        """Ends all waits of this generation with this error."""
        with self._lock:
            error = self._error = self._error or error
            ended = [key for key in self._meetings if key[0] <= self._generation]
            meetings = [self._meetings.pop(key) for key in ended]
            self._lock.notify_all()
        for meeting in meetings:
            meeting.answer.set_exception(error)

    def meet(
        self, generation: int, turn: int, index: int, item: Any, host: tuple[Join, int] | None
    ) -> Future[Any]:
        """Takes part in a meeting here; returns its result.

        `index` is the replica that takes part. `host` is given by the replica that owns this, and
        only by that one, so that no code comes from others: it makes the result, and how many take
        part.
        """
        with self._lock:
            self._check(generation)
            meeting = self._meetings.setdefault((generation, turn), _Gathering())
            meeting.items[index] = item
            if host is not None:
                meeting.join, meeting.size = host
            if meeting.join is None or len(meeting.items) < meeting.size:
                return meeting.answer
            del self._meetings[generation, turn]
        try:
            result = meeting.join([meeting.items[index] for index in sorted(meeting.items)])
        except Exception as error:  # noqa: BLE001 - all that take part get it
            meeting.answer.set_exception(error)
        else:
            meeting.answer.set_result(result)
        return meeting.answer

    def put(self, generation: int, key: Any, item: Any) -> None:
        """Keeps something until it is taken; ReplicaLostError: it is of an earlier generation."""
        with self._lock:
            self._check(generation)
            self._items[generation, key] = item
            self._lock.notify_all()

    def take(self, generation: int, key: Any) -> Any:
        """Waits for something, and removes it."""
        with self._lock:
            while (generation, key) not in self._items:
                self._check(generation)
                self._lock.wait()
            return self._items.pop((generation, key))

    def _check(self, generation: int) -> None:
        if generation < self._generation:
            raise _past(self._generation)
        if generation == self._generation and self._error is not None:
            raise self._error


class Mailbox:
    """Methods that the node of a replica serves for the carriers of the others."""

    def __init__(self, box: Box) -> None:
        self._box = box

    def replica_meet(self, generation: int, turn: int, index: int, item: Any) -> Future[Any]:
        """Takes part in a meeting at this replica. Holds no thread of the server."""
        return self._box.meet(generation, turn, index, item, None)

    def __courier_waits__(self, method: str) -> list[tuple[str, str]]:
        meetings = tuple(self._box._meetings.values()) if method == "replica_meet" else ()
        # Copies: more may come meanwhile.
        there = [sorted(each.items) for each in meetings]
        calls = [each for each in there for _ in each]
        return [("", f"of the replicas in this step, only {each} are there") for each in calls]

    def replica_put(self, generation: int, key: Any, item: Any) -> None:
        """Leaves something for this replica; ReplicaLostError: that is in a later generation."""
        self._box.put(generation, key, item)

    def replica_stream(self, generation: int) -> None:
        """Becomes the stream from the replica before this one in the ring."""
        stream = take_stream()
        self._box.put(generation, STREAM_IS_TAKEN, stream)
        stream.send(STREAM_IS_TAKEN)


def _past(generation: int) -> ReplicaLostError:
    return ReplicaLostError(
        f"the other replicas are in generation {generation} by now: one was lost, and they began again"
    )
