"""Moves values between replicas that are threads of one process."""

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from launchpad_lite.replicas._call import CollectiveCall, check_same
from launchpad_lite.replicas._carrier import Carrier, Op
from launchpad_lite.replicas._mailbox import Box
from launchpad_lite.replicas._operations import ArrayOperation, check_flat

T = TypeVar("T")


class Turn(NamedTuple):
    """The call of one thread, and its value.

    Attributes:
        call: The call.
        what: What else must be the same.
        value: Its value.
    """

    call: CollectiveCall
    what: str
    value: Any


class ThreadExchange:
    """The meeting of the threads at each of their calls. Thread-safe.

    Attributes:
        size: How many threads there are.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._box = Box()
        self._box.begin(0)

    def meet(
        self, number: int, index: int, mine: Turn, combine: Callable[[list[Any]], T], first: int
    ) -> T:
        """Waits for the call of each thread; returns the result of their values, which one makes.

        Args:
            number: The number of the call, from 1.
            index: The index of this thread.
            mine: Its call and value.
            combine: Takes the values of all threads, in order. They wait meanwhile.
            first: The replica number of the first thread.

        Raises:
            CollectiveMismatchError: They call different things.
        """

        def join(turns: Sequence[Turn]) -> T:
            calls = [turn.call for turn in turns]
            check_same(calls, first)
            check_same(
                [
                    call._replace(signature=f"{call.signature} ({turn.what})")
                    for call, turn in zip(calls, turns, strict=True)
                ],
                first,
            )
            return combine([turn.value for turn in turns])

        answer = self._box.meet(0, number, index, mine, (join, self.size))
        if (error := answer.exception()) is not None:
            raise copy.copy(error) from error.__cause__  # a traceback belongs to one thread
        result: T = answer.result()
        return result

    def abort(self, error: Exception) -> None:
        """Makes all calls raise this error."""
        self._box.fail(error)


class MemoryCarrier(Carrier):
    """Between threads of one process; and to other processes through a carrier that they share."""

    def __init__(self, index: int, exchange: ThreadExchange, outer: Carrier | None = None) -> None:
        """Makes that of one thread.

        Args:
            index: Which thread.
            exchange: Of all of them.
            outer: Between processes with as many threads each; None: there is one process.
        """
        self._outer = outer or Carrier()
        self._index = index
        self._number = 0
        self._exchange = exchange
        self._first = self._outer.rank * exchange.size
        self.rank = self._first + index
        self.size = self._outer.size * exchange.size

    def all_reduce(self, array: Any, op: Op, call: CollectiveCall) -> None:
        check_flat(array)
        operation = ArrayOperation(op, array.dtype, self._exchange.size)

        def combine(arrays: list[Any]) -> Any:
            total = arrays[0].copy()
            operation.combine([total, *arrays[1:]], total, last=True)
            self._outer.all_reduce(total, op, call)
            return total

        what = f"all_reduce({op}) of {array.dtype.str}[{len(array)}]"
        array[...] = self._meet(Turn(call, what, array), combine)

    def all_gather(self, value: Any, call: CollectiveCall) -> Sequence[Any]:
        """Returns copies: no two replicas share an object."""

        def combine(pickles: list[bytes]) -> list[bytes]:
            return [each for part in self._outer.all_gather(pickles, call) for each in part]

        mine = Turn(call, "all_gather", pickle.dumps(value, protocol=5))
        return [pickle.loads(each) for each in self._meet(mine, combine)]

    def broadcast(self, array: Any, source: int, call: CollectiveCall) -> None:
        check_flat(array)
        node, index = self._place(source)

        def combine(arrays: list[Any]) -> Any:
            sent = arrays[index].copy()  # its owner may change it while others still read
            self._outer.broadcast(sent, node, call)
            return sent

        what = f"broadcast from {source} of {array.dtype.str}[{len(array)}]"
        array[...] = self._meet(Turn(call, what, array), combine)

    def abort(self, error: Exception) -> None:
        self._outer.abort(error)
        self._exchange.abort(error)

    def _place(self, source: int) -> tuple[int, int]:
        """Returns the process and the thread of a replica."""
        if not 0 <= source < self.size:
            raise ValueError(f"no replica {source}: they are numbered from 0 to {self.size - 1}")
        return divmod(source, self._exchange.size)

    def _meet(self, mine: Turn, combine: Callable[[list[Any]], T]) -> T:
        self._number += 1
        return self._exchange.meet(self._number, self._index, mine, combine, self._first)
