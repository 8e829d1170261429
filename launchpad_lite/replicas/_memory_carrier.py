"""Moves values between replicas that are threads of one process."""

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from launchpad_lite.replicas._call import CollectiveCall, check_same
from launchpad_lite.replicas._carrier import Carrier, Op
from launchpad_lite.replicas._mailbox import Box
from launchpad_lite.replicas._operations import ArrayOperation

T = TypeVar("T")


class ThreadExchange:
    """The meeting of `size` threads at each of their calls. Thread-safe."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.box = Box()
        self.box.begin(0)

    def abort(self, error: Exception) -> None:
        """Makes all calls raise this error."""
        self.box.fail(error)


class MemoryCarrier(Carrier):
    """Between threads of one process; and to other processes through a carrier that they share."""

    def __init__(self, index: int, exchange: ThreadExchange, outer: Carrier | None = None) -> None:
        """Makes that of one thread; `outer` is between processes with as many threads each."""
        self._outer = outer or Carrier()
        self._index = index
        self._number = 0
        self._exchange = exchange
        self._first = self._outer.rank * exchange.size
        self.rank = self._first + index
        self.size = self._outer.size * exchange.size

    def all_reduce(self, array: Any, op: Op, call: CollectiveCall) -> None:
        operation = ArrayOperation(op, array.dtype, self._exchange.size)

        def combine(arrays: list[Any]) -> Any:
            total = arrays[0].copy()
            operation.combine([total, *arrays[1:]], total, last=True)
            self._outer.all_reduce(total, op, call)
            return total

        facts = f"all_reduce({op}) of {array.dtype.str}[{len(array)}]"
        array[...] = self._meet(call, facts, array, combine)

    def all_gather(self, value: Any, call: CollectiveCall) -> Sequence[Any]:
        """Returns copies: no two replicas share an object."""

        def combine(pickles: list[bytes]) -> list[bytes]:
            return [each for part in self._outer.all_gather(pickles, call) for each in part]

        mine = pickle.dumps(value, protocol=5)
        return [pickle.loads(each) for each in self._meet(call, "all_gather", mine, combine)]

    def broadcast(self, array: Any, source: int, call: CollectiveCall) -> None:
        node, index = divmod(source, self._exchange.size)

        def combine(arrays: list[Any]) -> Any:
            sent = arrays[index].copy()  # its owner may change it while others still read
            self._outer.broadcast(sent, node, call)
            return sent

        facts = f"broadcast from {source} of {array.dtype.str}[{len(array)}]"
        array[...] = self._meet(call, facts, array, combine)

    def abort(self, error: Exception) -> None:
        self._outer.abort(error)
        self._exchange.abort(error)

    def _meet(
        self, call: CollectiveCall, facts: str, value: Any, combine: Callable[[list[Any]], T]
    ) -> T:
        """Waits for the same call of each thread; returns the result of their values.

        One of the threads makes it by `combine`, from the values in order. The others wait
        meanwhile.
        """

        def join(turns: Sequence[tuple[CollectiveCall, Any]]) -> T:
            calls, values = zip(*turns, strict=True)
            check_same(calls, self._first)
            return combine(list(values))

        self._number += 1
        mine = call._replace(facts=facts), value
        host = join, self._exchange.size
        answer = self._exchange.box.meet(0, self._number, self._index, mine, host)
        if (error := answer.exception()) is not None:
            raise copy.copy(error) from error.__cause__  # a traceback belongs to one thread
        result: T = answer.result()
        return result
