"""Moves values between replicas that are threads of one process."""

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from launchpad_lite.replicas._carrier import Carrier, CollectiveCall, Op, check_same
from launchpad_lite.replicas._mailbox import Box
from launchpad_lite.replicas._operations import ArrayOperation

T = TypeVar("T")


class MemoryCarrier(Carrier):
    """Between threads of one process; and to other processes through a carrier that they share."""

    def __init__(self, index: int, threads: int, box: Box, outer: Carrier | None = None) -> None:
        """Makes that of one of several threads, which meet in a box of generation 0.

        `outer` is between processes with as many threads each.
        """
        self._outer = outer or Carrier()
        self._index = index
        self._number = 0
        self._threads = threads
        self._box = box
        self._first = self._outer.rank * threads
        self.rank = self._first + index
        self.size = self._outer.size * threads

    def all_reduce(self, array: Any, op: Op, call: CollectiveCall) -> None:
        operation = ArrayOperation(op, array.dtype, self._threads)

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
        node, index = divmod(source, self._threads)

        def combine(arrays: list[Any]) -> Any:
            sent = arrays[index].copy()  # its owner may change it while others still read
            self._outer.broadcast(sent, node, call)
            return sent

        facts = f"broadcast from {source} of {array.dtype.str}[{len(array)}]"
        array[...] = self._meet(call, facts, array, combine)

    def abort(self, error: Exception) -> None:
        self._outer.abort(error)
        self._box.fail(error)

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
        try:
            answer = self._box.meet(0, self._number, self._index, mine, (join, self._threads))
            result: T = answer.result()
        except Exception as error:  # noqa: BLE001 - a traceback belongs to one thread
            raise copy.copy(error) from error.__cause__
        return result
