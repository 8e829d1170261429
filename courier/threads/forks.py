"""Resets what forked children inherit: locks that the parent's threads hold, threads, sockets."""

import os
import weakref
from typing import Protocol


class Survivor(Protocol):
    """An object that a forked child inherits."""

    def _survive_fork(self) -> None:
        """Forgets the parent's resources, in the child."""


_survivors: "weakref.WeakSet[Survivor]" = weakref.WeakSet()


def survive(survivor: Survivor) -> None:
    """Calls an object in forked children; does not keep it alive."""
    _survivors.add(survivor)


def _tell_all() -> None:
    for survivor in list(_survivors):
        survivor._survive_fork()


os.register_at_fork(after_in_child=_tell_all)
