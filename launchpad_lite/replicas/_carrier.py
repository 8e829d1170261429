"""Carriers move flat arrays between replicas: the interface, that of a single replica, and its calls.

The calls of all are compared, so that no replica mixes up its own.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from launchpad_lite.replicas.errors import CollectiveMismatchError

if TYPE_CHECKING:
    import numpy as np

#: A text, because numpy is imported only where it is used.
Array: TypeAlias = "np.ndarray[Any, Any]"
#: How values are combined.
Op = Literal["sum", "mean", "max", "min", "product"]
#: Seconds after which all know that another replica is lost.
NEWS_S = 5.0


class CollectiveCall(NamedTuple):
    """A collective that a replica takes part in.

    Attributes:
        number: How many calls the replica made before, in this generation.
        signature: The same in all replicas: kind, label, types and shapes, as text, such as
            `all_reduce(sum) of loss: float32[64]`.
        site: The place of the call, as `train.py:41 in step_fn`. May differ.
        facts: What the carrier is to do; the same in all, too. Messages show it if the signatures
            are the same.
    """

    number: int
    signature: str
    site: str = ""
    facts: str = ""


def check_same(calls: Sequence[CollectiveCall], first: int = 0) -> None:
    """Raises CollectiveMismatchError unless all replicas, from `first` on, make the same call."""
    kinds = [(call.number, call.signature, call.facts) for call in calls]
    if kinds.count(kinds[0]) == len(kinds):
        return
    most = max(kinds, key=kinds.count)
    look_alike = len({call.signature for call in calls}) == 1
    lines = [
        f"  replica {rank}: {call.signature}"
        + (f" ({call.facts})" if look_alike else "")
        + f", its call {call.number}"
        + (f", at {call.site}" if call.site else "")
        for rank, call in enumerate(calls, first)
    ]
    wrong = [str(rank) for rank, kind in enumerate(kinds, first) if kind != most]
    raise CollectiveMismatchError(
        f"replica {', '.join(wrong)} calls something else than the others; all replicas make the "
        "same calls in the same order:\n" + "\n".join(lines)
    )


class Carrier:
    """Moves flat arrays between replicas, which make the same calls in the same order.

    One thread calls at a time; `abort` comes from another one. This class is for a single replica.

    Calls raise `CollectiveMismatchError` in all replicas that make different ones,
    `ReplicaLostError` if a replica is lost, and `TypeError` for a dtype that cannot be combined.

    `aside` is a kind of leaves, as `nests.kind`, that `all_reduce` and `broadcast` take as they
    are: a list of them in place of a flat array, whose items are replaced.
    """

    rank: int = 0
    size: int = 1
    aside: str = ""

    def takes(self, device: Any, call: CollectiveCall) -> bool:  # noqa: ARG002 - others ask each other
        """Returns whether `all_reduce` takes tensors on this GPU. All replicas ask together."""
        return self.size == 1

    def all_reduce(self, array: Any, op: Op, call: CollectiveCall) -> None:
        """Combines the arrays of all replicas in place; the result is bit by bit the same in each.

        The array is contiguous, of one dimension, and has the same dtype and length in all
        replicas: a numpy array, or another kind that the carrier takes. The mean is of
        floating-point numbers only.
        """

    def all_gather(self, value: Any, call: CollectiveCall) -> Sequence[Any]:  # noqa: ARG002 - others compare it
        """Returns the value of each replica, by rank: values that can be pickled, of any size.

        Large arrays in them are not copied into the pickle. With several replicas, each result is a
        copy.
        """
        return [value]

    def broadcast(self, array: Any, source: int, call: CollectiveCall) -> None:
        """Gives all other replicas the array of one of them, in place."""

    def buffer(self, nbytes: int) -> Array:
        """Returns zeroed memory as uint8; `all_reduce` is fastest with arrays at its beginning.

        All replicas call it in the same order with the same sizes, and reduce the same one at the
        same time. The memory is the caller's.
        """
        import numpy as np

        return np.zeros(nbytes, np.uint8)

    def abort(self, error: Exception) -> None:
        """Makes calls in flight, and all later ones, raise this error soon. Thread-safe."""

    def close(self) -> None:
        """Frees its resources."""
