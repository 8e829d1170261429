"""The place of a training in its code: its runs and loops over epochs, and the steps in them.

After a restart the code runs again from its beginning. So its calls are numbered in their order,
and a saved course says which of them are over, and in which one the training goes on.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from launchpad_lite.replicas.errors import ReplicaError


@dataclass
class LoopPlace:
    """A run, or a loop over epochs.

    The number counts the calls in the same epoch, or outside of all, from 1. `made` counts steps,
    or epochs that have ended. It `is_over` when the user's code has left it.
    """

    kind: str
    number: int
    made: int = 0
    is_over: bool = False


class Course:
    """The place of a training in its code, which goes on at the `saved` ones. Not thread-safe."""

    def __init__(self, saved: Sequence[LoopPlace] = ()) -> None:
        self.saved = list(saved)
        #: The loop over epochs, in it the last call that began in the newest epoch, and so on.
        self._path: list[LoopPlace] = []
        self._open_loops = 0

    @property
    def places(self) -> list[LoopPlace]:
        return [LoopPlace(**vars(place)) for place in self._path]

    @property
    def name(self) -> str:
        """A name of the last call that began, the same for all replicas and after restarts."""
        *loops, last = self._path
        epochs = [f"call {each.number}, epoch {each.made}, " for each in loops]
        return f"{''.join(epochs)}call {last.number}"

    @property
    def is_left(self) -> bool:
        """Whether the user's code has left the last run, or the loop around it, before its end."""
        return any(place.is_over for place in self._path)

    def enter(self, kind: str) -> LoopPlace:
        level = self._open_loops
        number = self._path[level].number + 1 if level < len(self._path) else 1
        place = LoopPlace(kind, number)
        if level < len(self.saved):
            saved = self.saved[level]
            if number == saved.number:
                if kind != saved.kind:
                    raise ReplicaError(
                        f"call {number} is repl.{kind}, but was repl.{saved.kind} at the checkpoint: "
                        "begin with another folder for checkpoints"
                    )
                place.made, place.is_over = saved.made, saved.is_over
            elif number < saved.number:
                place.is_over = True
            else:
                del self.saved[level:]  # all later ones begin from their start
        self._path[level:] = [place]
        return place

    @contextlib.contextmanager
    def in_loop(self) -> Iterator[None]:
        """Counts calls in a block as those of an epoch of a loop."""
        level = self._open_loops
        self._open_loops += 1
        try:
            yield
        finally:
            self._open_loops = level

    def end_epoch(self, place: LoopPlace) -> None:
        """Ends an epoch; in the next one, all begins from its start."""
        place.made += 1
        del self.saved[self._open_loops :], self._path[self._open_loops :]
