"""A node that answers for another one, for many readers of the same values."""

from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar, cast

import courier
from launchpad_lite.nodes.base import Handle
from launchpad_lite.nodes.courier import CourierNode, describe_target
from launchpad_lite.parts.arguments import one_of

T = TypeVar("T")


class CacherNode(CourierNode[T]):
    """Answers any method of its target, from memory if that is not too old.

    Put some between a server and its many readers (Launchpad paper, section 5.1): the server then
    answers each cacher once per interval, whatever the number of readers. An answer is kept per
    method and arguments. If no answer is fresh enough, all concurrent callers share one call of the
    target. Exceptions and generators are passed on, but not kept.

    Call methods with side effects, as one that counts, on the target itself.

    Example:
        learner = program.add_node(lp.CourierNode(Learner), label="learner")
        cacher = program.add_node(lp.CacherNode(learner, refresh_s=1, stale_s=10), label="cacher")
        program.add_node(lp.CourierNode(Actor, cacher), label="actor")  # called as the learner is
    """

    def __init__(
        self,
        target_handle: Handle[T],
        refresh_interval_ms: float | None = None,
        stale_after_ms: float | None = None,
        *,
        refresh_s: float | None = None,
        stale_s: float | None = None,
        max_bytes: int = 1 << 30,
        max_entries: int = 1024,
        courier_kwargs: Mapping[str, Any] | None = None,
        courier_client_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Describes the node.

        Args:
            target_handle: Of the node to answer for.
            refresh_interval_ms: `refresh_s` as the original has it, in milliseconds.
            stale_after_ms: `stale_s` as the original has it, in milliseconds.
            refresh_s: Seconds within which the target gets the same call once at most, and only if
                a caller makes it; that caller gets the old answer. Must be given.
            stale_s: Older answers are not returned: the target is asked again. Must be
                given.
            max_bytes: Memory for answers; the least recently used goes first.
            max_entries: The same for their number.
            courier_kwargs: As for `CourierNode`.
            courier_client_kwargs: As for `CourierNode`.

        Raises:
            TypeError: `target_handle` is no handle of a node that can be called; or a time is
                missing, or given under both names.
            ValueError: A number is below 0, or `stale_s` below `refresh_s`.
        """
        target = describe_target(target_handle, "CacherNode")
        refresh_s = one_of(
            "refresh_s", refresh_s, "refresh_interval_ms", _seconds(refresh_interval_ms)
        )
        stale_s = one_of("stale_s", stale_s, "stale_after_ms", _seconds(stale_after_ms))
        if refresh_s is None or stale_s is None:
            raise TypeError("CacherNode takes refresh_s= and stale_s=, in seconds")
        if not refresh_s >= 0 or not stale_s >= 0:
            raise ValueError("refresh_s and stale_s cannot be below 0")
        if stale_s < refresh_s:
            raise ValueError(
                f"stale_s={stale_s:g} is below refresh_s={refresh_s:g}: all would be stale before "
                "it may be refreshed"
            )
        if max_bytes < 0 or max_entries < 0:
            raise ValueError("a cacher cannot hold less than nothing")
        super().__init__(
            cast("Any", courier.Cache),
            target_handle,
            courier_kwargs=courier_kwargs,
            courier_client_kwargs=courier_client_kwargs,
            refresh_s=refresh_s,
            stale_s=stale_s,
            max_bytes=max_bytes,
            max_entries=max_entries,
        )
        self._named_after = f"for {target}"

    def configure(self, *args: Any, **kwargs: Any) -> NoReturn:  # noqa: ARG002
        """Refused by a TypeError: its target is given when it is made."""
        raise TypeError(
            "a CacherNode cannot be configured: pass its target to the constructor; "
            "program.declare(label) is a handle to a node that comes later"
        )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
