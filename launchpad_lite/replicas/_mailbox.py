"""What replicas send each other over courier: where it arrives, and who waits for it."""

import concurrent.futures
import threading
from collections.abc import Callable, Sequence
from typing import Any

from launchpad_lite.replicas.errors import ReplicaLostError

#: From what all gave, in the order of their indices, to what all get.
Join = Callable[[Sequence[Any]], Any]


class _Meeting:
    """Several replicas give something, and all get what becomes of it."""

    def __init__(self) -> None:
        self.items: dict[int, Any] = {}
        self.answers: list[concurrent.futures.Future[Any]] = []
        self.join: Join | None = None
        self.size = 0


class Box:
    """Holds what has arrived at one replica. Thread-safe.

    What belongs to an earlier generation is refused, and what belongs to a later one is kept until
    this replica is there.
    """

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._generation = -1
        self._error: Exception | None = None
        self._meetings: dict[tuple[int, int], _Meeting] = {}
        self._items: dict[tuple[int, Any], Any] = {}

    def begin(self, generation: int) -> None:
        """Forgets what belongs to earlier generations; those who wait for it get an error."""
        with self._lock:
            self._generation = generation
            self._error = None
            self._items = {key: item for key, item in self._items.items() if key[0] >= generation}
            past = [key for key in self._meetings if key[0] < generation]
            meetings = [self._meetings.pop(key) for key in past]
        _fail(meetings, _past(generation))

    def fail(self, error: Exception) -> None:
        """Has all who wait for something of this generation get this error."""
        with self._lock:
            self._error = error
            ended = [key for key in self._meetings if key[0] <= self._generation]
            meetings = [self._meetings.pop(key) for key in ended]
            self._lock.notify_all()
        _fail(meetings, error)

    def meet(
        self, generation: int, turn: int, index: int, item: Any, host: tuple[Join, int] | None
    ) -> "concurrent.futures.Future[Any]":
        """Takes part in a meeting here.

        Args:
            generation: Of the one who takes part.
            turn: Which meeting.
            index: Who takes part.
            item: What it gives.
            host: Of the replica that this belongs to: what becomes of the items, and how many there
                are. It is told by that replica alone, so no code comes from others.

        Returns:
            What became of the items.
        """
        answer: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._lock:
            error = self._refusal(generation)
            if error is None:
                meeting = self._meetings.setdefault((generation, turn), _Meeting())
                meeting.items[index] = item
                meeting.answers.append(answer)
                if host is not None:
                    meeting.join, meeting.size = host
                is_complete = meeting.join is not None and len(meeting.items) == meeting.size
                if is_complete:
                    del self._meetings[generation, turn]
        if error is not None:
            answer.set_exception(error)
        elif is_complete:
            _close(meeting)
        return answer

    def put(self, generation: int, key: Any, item: Any) -> None:
        """Keeps something until it is taken.

        Raises:
            ReplicaLostError: It is of an earlier generation.
        """
        with self._lock:
            error = self._refusal(generation)
            if error is not None:
                raise error
            self._items[generation, key] = item
            self._lock.notify_all()

    def take(self, generation: int, key: Any) -> Any:
        """Waits for something, and removes it."""
        with self._lock:
            while (generation, key) not in self._items:
                error = self._refusal(generation)
                if error is not None:
                    raise error
                self._lock.wait()
            return self._items.pop((generation, key))

    def _refusal(self, generation: int) -> Exception | None:
        if generation < self._generation:
            return _past(self._generation)
        return self._error if generation == self._generation else None


class Mailbox:
    """What the node of a replica serves, beside methods of the user, for the carriers of the others."""

    def __init__(self, box: Box) -> None:
        self._box = box

    def replica_meet(
        self, generation: int, turn: int, index: int, item: Any
    ) -> "concurrent.futures.Future[Any]":
        """Takes part in a meeting at this replica. Holds no thread of the server."""
        return self._box.meet(generation, turn, index, item, None)

    def replica_put(self, generation: int, key: Any, item: Any) -> None:
        """Leaves something for this replica.

        Raises:
            ReplicaLostError: This replica is in a later generation.
        """
        self._box.put(generation, key, item)


def _close(meeting: _Meeting) -> None:
    assert meeting.join is not None
    try:
        result = meeting.join([meeting.items[index] for index in sorted(meeting.items)])
    except Exception as error:  # noqa: BLE001 - all who take part get it
        _fail([meeting], error)
        return
    for answer in meeting.answers:
        if answer.set_running_or_notify_cancel():
            answer.set_result(result)


def _fail(meetings: Sequence[_Meeting], error: Exception) -> None:
    for meeting in meetings:
        for answer in meeting.answers:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(error)


def _past(generation: int) -> ReplicaLostError:
    return ReplicaLostError(
        f"the other replicas are in generation {generation} by now: one was lost, and they began again"
    )
