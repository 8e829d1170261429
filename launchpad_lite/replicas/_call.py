"""Calls of replicas, which are compared, so that no replica mixes up its calls."""

from collections.abc import Sequence
from typing import NamedTuple

from launchpad_lite.replicas.errors import CollectiveMismatchError


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
