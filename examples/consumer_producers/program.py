"""A consumer that calls several producers: Listing 2 of the Launchpad paper."""

from collections.abc import Sequence

import launchpad_lite as lp

NUMBERS_EACH = 10


class Range:
    """Produces the numbers from `start` up to `end`, one a call."""

    def __init__(self, start: int, end: int) -> None:
        self._numbers = iter(range(start, end))
        self._size = end - start

    def size(self) -> int:
        """Returns how many numbers there are."""
        return self._size

    def produce(self) -> int:
        """Returns the next number."""
        return next(self._numbers)


class Consumer:
    """Adds up all numbers of all producers."""

    # The program passes handles; what arrives in the running node are clients. Annotated as
    # `Sequence[Range]`, a type checker would check each call, and `courier.submit(p.produce)`
    # would be its spelling of `p.futures.produce()`; see examples/map_reduce.
    def __init__(self, producers: Sequence[lp.CourierClient]) -> None:
        self._producers = producers

    def run(self) -> None:
        """Consumes everything, prints the total and ends."""
        # A call looks like one on the object itself: it blocks and returns the result.
        sizes = [producer.size() for producer in self._producers]
        total = sum(producer.produce() for producer in self._producers)
        print("first numbers of all:", total)

        # Futures: all producers work at the same time.
        for _ in range(1, min(sizes, default=0)):
            futures = [producer.futures.produce() for producer in self._producers]
            numbers = [future.result() for future in futures]
            print("consumed", *numbers)
            total += sum(numbers)
        print("total:", total)


def make_program(num_producers: int = 2) -> lp.Program:
    """Describes the program; nothing runs yet.

    Args:
        num_producers: How many there are, with ten numbers each.
    """
    program = lp.Program("consumer_producers")
    with program.group("producer"):
        producers = [
            program.add_node(
                lp.CourierNode(Range, index * NUMBERS_EACH, (index + 1) * NUMBERS_EACH)
            )
            for index in range(num_producers)
        ]
    program.add_node(lp.CourierNode(Consumer, producers), label="consumer")
    return program
