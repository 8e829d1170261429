"""What moves values between replicas that are threads of one process."""

import copy
import pickle
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from launchpad_lite.replicas._call import Call, check_same
from launchpad_lite.replicas._carrier import AloneCarrier, Carrier, Op
from launchpad_lite.replicas._operations import Operation, check_flat

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")


class Turn(NamedTuple):
    """What one thread calls, and gives.

    Attributes:
        call: What it calls.
        what: What must be the same besides.
        value: What it gives.
    """

    call: Call
    what: str
    value: Any


class _Round:
    """One call of all threads."""

    def __init__(self) -> None:
        self.turns: dict[int, Turn] = {}
        self.is_over = False
        self.result: Any = None
        self.error: Exception | None = None


class Exchange:
    """Where the threads meet at each of their calls. Thread-safe.

    Attributes:
        size: How many threads there are.
    """

    def __init__(self, size: int) -> None:
        """Makes one.

        Args:
            size: How many threads there are.
        """
        self.size = size
        self._changed = threading.Condition()
        self._round = _Round()
        self._end: Exception | None = None

    def meet(self, index: int, mine: "Turn", combine: Callable[[list[Any]], T], first: int) -> T:
        """Waits for the call of each thread; returns what one of them makes of their values.

        Args:
            index: Which thread this is.
            mine: What it calls, and gives.
            combine: Takes the values of all threads, in order. They wait meanwhile.
            first: Which replica the first thread is.

        Raises:
            CollectiveMismatchError: They call different things.
        """
        with self._changed:
            if self._end is not None:
                raise copy.copy(self._end)  # a traceback belongs to one thread
            its = self._round
            its.turns[index] = mine
            if len(its.turns) == self.size:
                self._round = _Round()
                _finish(its, combine, first)
                self._changed.notify_all()
            self._changed.wait_for(lambda: its.is_over or self._end is not None)
            if its.is_over and its.error is None:
                result: T = its.result
                return result
            error = its.error or self._end
            assert error is not None
        raise copy.copy(error) from error.__cause__

    def abort(self, error: Exception) -> None:
        """Has all calls raise this error."""
        with self._changed:
            self._end = self._end or error
            self._changed.notify_all()


def _finish(its: _Round, combine: Callable[[list[Any]], Any], first: int) -> None:
    turns = [its.turns[index] for index in sorted(its.turns)]
    try:
        check_same([turn.call for turn in turns], first)
        check_same(
            [
                turn.call._replace(signature=f"{turn.call.signature} ({turn.what})")
                for turn in turns
            ],
            first,
        )
        its.result = combine([turn.value for turn in turns])
    except Exception as error:  # noqa: BLE001 - all threads raise it
        its.error = error
    its.is_over = True


class MemoryCarrier(Carrier):
    """Between threads of one process; and beyond it through another carrier, which they share."""

    def __init__(self, index: int, exchange: Exchange, outer: Carrier | None = None) -> None:
        """Makes that of one thread.

        Args:
            index: Which thread.
            exchange: Of all of them.
            outer: Between processes with as many threads each; None: there is one process.
        """
        self._outer = outer or AloneCarrier()
        self._index = index
        self._exchange = exchange
        self._first = self._outer.rank * exchange.size
        self.rank = self._first + index
        self.size = self._outer.size * exchange.size

    def all_reduce(self, array: Any, op: Op, call: Call) -> None:
        """Adds up in the order of the replicas."""
        check_flat(array)
        operation = Operation(op, array.dtype, self._exchange.size)

        def combine(arrays: list[Any]) -> Any:
            total = arrays[0].copy()
            operation.combine([total, *arrays[1:]], total, last=True)
            self._outer.all_reduce(total, op, call)
            return total

        what = f"all_reduce({op}) of {array.dtype.str}[{len(array)}]"
        array[...] = self._meet(Turn(call, what, array), combine)

    def all_gather(self, value: Any, call: Call) -> Sequence[Any]:
        """Returns copies: no two replicas share an object."""

        def combine(pickles: list[bytes]) -> list[bytes]:
            return [each for part in self._outer.all_gather(pickles, call) for each in part]

        mine = Turn(call, "all_gather", pickle.dumps(value, protocol=5))
        return [pickle.loads(each) for each in self._meet(mine, combine)]

    def broadcast(self, array: Any, source: int, call: Call) -> None:
        """Copies the array of one of them."""
        check_flat(array)
        node, index = self._place(source)

        def combine(arrays: list[Any]) -> Any:
            sent = arrays[index].copy()  # its owner may change it while others still read
            self._outer.broadcast(sent, node, call)
            return sent

        what = f"broadcast from {source} of {array.dtype.str}[{len(array)}]"
        array[...] = self._meet(Turn(call, what, array), combine)

    def buffer(self, nbytes: int) -> "np.ndarray[Any, Any]":
        """Returns memory."""
        import numpy as np

        return np.zeros(nbytes, np.uint8)

    def abort(self, error: Exception) -> None:
        """Ends the calls of all threads."""
        self._outer.abort(error)
        self._exchange.abort(error)

    def close(self) -> None:
        """Does nothing: what is outside of this process belongs to its node."""

    def _place(self, source: int) -> tuple[int, int]:
        """Returns the process and the thread of a replica."""
        if not 0 <= source < self.size:
            raise ValueError(f"no replica {source}: they are numbered from 0 to {self.size - 1}")
        return divmod(source, self._exchange.size)

    def _meet(self, mine: Turn, combine: Callable[[list[Any]], T]) -> T:
        return self._exchange.meet(self._index, mine, combine, self._first)
