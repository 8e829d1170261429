"""The state of a training: things that users keep, and the place in its code.

After a restart the code runs again from its beginning. So its calls are numbered in their order,
and a saved course says which of them are over, and in which one the training goes on.
"""

import contextlib
import operator
import pickle
import threading
import time
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from launchpad_lite.parts import nests
from launchpad_lite.replicas import _payload
from launchpad_lite.replicas._kept import taken_from
from launchpad_lite.replicas._payload import Payload
from launchpad_lite.replicas.errors import ReplicaError

_FILE = "training.pickle"
#: The part of the time that snapshots for other replicas may take.
_GUARD_SHARE = 0.02


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


class Snapshot(NamedTuple):
    """A training after some steps: the place in its code, and each kept thing by name, packed."""

    step: int
    places: Sequence[LoopPlace]
    kept: Mapping[str, Payload]


def packed(name: str, thing: Any) -> Payload:
    """Returns the value of a kept thing for `_payload.unpack`; shares its arrays and tensors."""
    try:
        return _payload.pack(taken_from(thing))
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise TypeError(f"{name} cannot be kept: it cannot be pickled: {error}") from error


def _arrays_of_jax(thing: Any) -> list[Any]:
    """Returns those in dicts and lists: code that replaces them may not tell these."""
    return [leaf for _, leaf in nests.leaves(thing) if nests.kind(leaf) == "jax"]


def _copied(payload: Payload) -> Payload:
    return [part.copy() for part in payload]


class Training:
    """The progress of a training, on replica 0 with its newest snapshot. Thread-safe.

    `course` is the place in its code. `is_saved` says whether there are checkpoints; without them,
    one that `is_guard` takes snapshots by itself. `kept` has the kept things, by name.
    """

    def __init__(self, *, is_saved: bool = False) -> None:
        self.step = 0
        self.course = Course()
        self.is_saved, self.is_guard = is_saved, False
        self.kept: Mapping[str, Any] = {}
        #: The newest snapshot in memory; and its file if that was freed.
        self._snapshot: Snapshot | None = None
        self._file: IO[bytes] | None = None
        self._wanted = threading.Event()
        self._changed = threading.Condition()
        #: Held while a snapshot is taken or written, so that there are not two copies.
        self._writing = threading.Lock()
        #: Whether code of the user makes steps, after which a new snapshot comes.
        self._is_running = False
        self._next_guard_at = 0.0
        #: Arrays of JAX when they were kept, by name, and after how many steps.
        self._first_arrays: dict[str, tuple[int, list[weakref.ref[Any]]]] = {}

    def begin(self) -> None:
        self.step, self.course, self.kept = 0, Course(), {}
        self._first_arrays.clear()

    def go_on_at(self, step: int, places: Sequence[LoopPlace]) -> None:
        """Lets the code go on from a snapshot, once it reaches its place again."""
        self.step, self.course.saved = step, list(places)

    def newest(self) -> Snapshot | None:
        with self._changed:
            if self._snapshot is not None or self._file is None:
                return self._snapshot
            self._file.seek(0)
            return Snapshot(*pickle.load(self._file))

    def claimed(self, found: Snapshot, names: Collection[str], *, is_first: bool) -> Any:
        """Returns copies of the values of things at a snapshot, by name.

        The names were not kept before in this generation. `is_first`: nothing was; later things may
        be newer than the snapshot. ReplicaError: the snapshot has not all of them.
        """
        known = [name for name in names if name in found.kept]
        if len(known) < len(names) and (is_first or known):
            raise ReplicaError(
                f"the newest checkpoint has no {', '.join(names - found.kept.keys())}, but "
                f"{', '.join(found.kept)}; keep things by the same names, or begin with another folder "
                "for checkpoints"
            )
        own = _copied if found is self._snapshot else list
        return {name: own(found.kept[name]) for name in known}

    def note_kept(self, name: str, thing: Any) -> None:
        """Notes the value of a thing before steps change it."""
        self._first_arrays[name] = self.step, [weakref.ref(each) for each in _arrays_of_jax(thing)]

    def begin_steps(self) -> None:
        with self._changed:
            self._is_running = True

    def end_steps(self) -> None:
        """Steps have ended, by an error perhaps."""
        with self._changed:
            self._is_running = False
            self._changed.notify_all()

    def between_steps(self) -> None:
        """Takes a snapshot if one is wanted, or it is time for another one."""
        if self._wanted.is_set() or (self.is_guard and time.monotonic() >= self._next_guard_at):
            self.take()

    def take_at_end(self) -> None:
        if self.is_saved or self.is_guard:
            self.take()

    def take(self) -> None:
        """Takes a snapshot, which does not share memory with kept things."""
        begun_at = time.monotonic()
        self._check_changes()
        kept = {name: packed(name, thing) for name, thing in self.kept.items()}
        with self._writing:
            with self._changed:
                self._forget()  # first, so that there is only one copy at a time
            kept = {name: _copied(payload) for name, payload in kept.items()}
            with self._changed:
                self._snapshot = Snapshot(self.step, self.course.places, kept)
                self._wanted.clear()
                self._changed.notify_all()
        now = time.monotonic()
        self._next_guard_at = now + (now - begun_at) / _GUARD_SHARE

    def _forget(self) -> None:
        self._snapshot = None
        if self._file is not None:
            self._file.close()
        self._file = None

    __del__ = _forget

    def _check_changes(self) -> None:
        for name in [name for name, (at, _) in self._first_arrays.items() if at < self.step]:
            _, firsts = self._first_arrays.pop(name)
            now = _arrays_of_jax(self.kept.get(name))
            if now and all(map(operator.is_, now, [first() for first in firsts])):
                raise ReplicaError(
                    f"{name} has the arrays of JAX that it had when it was kept, so what the steps "
                    "compute is not in it: arrays of JAX do not change, they are replaced. Write "
                    "state = repl.state(params=params) in place of keep, and state.params = ..."
                )

    def save(self, folder: Path) -> None:
        """Writes a snapshot that is taken from now on; the last one, if no steps are made.

        Steps go on meanwhile.
        """
        with self._changed:
            before = self._snapshot
            self._wanted.set()
            self._changed.wait_for(lambda: self._snapshot is not before or not self._is_running)
            self._wanted.clear()
        with self._writing:
            found = self.newest()
            if found is None:
                return
            with (folder / _FILE).open("wb") as file:
                pickle.dump(tuple(found), file, protocol=5)
            with self._changed:
                self._forget()
            self.restore(folder)

    def restore(self, folder: Path) -> None:
        """Reads the file of `save` when it is needed."""
        if (folder / _FILE).exists():
            # Kept open, because the checkpoint is renamed later, and removed at some time.
            self._file = (folder / _FILE).open("rb")
