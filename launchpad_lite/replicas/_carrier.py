"""What moves flat arrays between replicas: the interface, and the one for a single replica."""

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from launchpad_lite.replicas._call import Call

if TYPE_CHECKING:
    import numpy as np

#: How values are combined.
Op = Literal["sum", "mean", "max", "min", "product"]
#: Seconds after which the loss of another replica is known to all.
NEWS_S = 5.0


class Carrier(abc.ABC):
    """Moves flat arrays between replicas, which make the same calls in the same order.

    One thread calls at a time; `abort` comes from another one.

    Attributes:
        rank: Which replica this is.
        size: How many there are.
        aside: The kind of leaves, as `_nests.kind`, that `all_reduce` and `broadcast` take as they
            are: a list of them in the place of a flat array, whose items they replace.
    """

    rank: int
    size: int
    aside: str = ""

    def takes(self, device: Any, call: Call) -> bool:  # noqa: ARG002
        """Returns whether `all_reduce` and `broadcast` take tensors on this GPU. All replicas ask together."""
        return False

    @abc.abstractmethod
    def all_reduce(self, array: Any, op: Op, call: Call) -> None:
        """Combines the arrays of all replicas; each gets the result in place, bit by bit the same.

        Args:
            array: Contiguous, of one dimension and any dtype that can be added: a numpy array, or
                what the carrier is for. The same dtype and length in all replicas.
            op: How. The mean is of floating-point numbers only.
            call: What is called. If another replica calls something else, all raise.

        Raises:
            CollectiveMismatchError: Replicas made different calls.
            ReplicaLostError: One of them is lost.
        """

    @abc.abstractmethod
    def all_gather(self, value: Any, call: Call) -> Sequence[Any]:
        """Returns what each replica gave, by rank: values that can be pickled, of any size.

        Large arrays in them travel without being copied into a pickle.

        Raises:
            CollectiveMismatchError: Replicas made different calls.
            ReplicaLostError: One of them is lost.
        """

    @abc.abstractmethod
    def broadcast(self, array: Any, source: int, call: Call) -> None:
        """Gives all replicas the array of one of them, in place.

        Raises:
            CollectiveMismatchError: Replicas made different calls.
            ReplicaLostError: One of them is lost.
        """

    @abc.abstractmethod
    def buffer(self, nbytes: int) -> "np.ndarray[Any, Any]":
        """Returns zeroed memory as uint8 that `all_reduce` and `broadcast` are fastest with.

        All replicas call it in the same order with the same sizes. The memory is the caller's.
        """

    @abc.abstractmethod
    def abort(self, error: Exception) -> None:
        """Has calls in flight, and all later ones, raise this error soon. Thread-safe."""

    @abc.abstractmethod
    def close(self) -> None:
        """Frees what it has."""


class AloneCarrier(Carrier):
    """Of a single replica."""

    rank = 0
    size = 1

    def takes(self, device: Any, call: Call) -> bool:  # noqa: ARG002
        """Takes all."""
        return True

    def all_reduce(self, array: Any, op: Op, call: Call) -> None:
        """Leaves the array as it is."""

    def all_gather(self, value: Any, call: Call) -> Sequence[Any]:  # noqa: ARG002
        """Returns the only value."""
        return [value]

    def broadcast(self, array: Any, source: int, call: Call) -> None:
        """Leaves the array as it is."""

    def buffer(self, nbytes: int) -> "np.ndarray[Any, Any]":
        """Returns memory."""
        import numpy as np

        return np.zeros(nbytes, np.uint8)

    def abort(self, error: Exception) -> None:
        """Does nothing: it never waits."""

    def close(self) -> None:
        """Does nothing."""
