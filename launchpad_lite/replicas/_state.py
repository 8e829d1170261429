"""The state of a training: what users keep, taken between two steps and put back."""

import copy
import io
import pickle
import threading
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import courier
from launchpad_lite.replicas import _nests
from launchpad_lite.replicas.errors import ReplicaError

_FILE = "training.pickle"


class Snapshot(NamedTuple):
    """A training after some steps.

    Attributes:
        step: How many were made.
        kept: What each kept thing was, by name.
    """

    step: int
    kept: dict[str, Any]


def taken_from(thing: Any) -> Any:
    """Returns what a kept thing is now."""
    if hasattr(thing, "state_dict"):
        return thing.state_dict()
    return thing


def put_into(name: str, thing: Any, value: Any) -> None:
    """Makes a kept thing what it was."""
    if hasattr(thing, "load_state_dict"):
        thing.load_state_dict(value)
    elif isinstance(thing, MutableMapping):
        thing.clear()
        thing.update(value)
    elif _nests.kind(thing) == "numpy" and thing.shape == getattr(value, "shape", None):
        thing[...] = value
    elif isinstance(thing, list):
        thing[:] = value
    else:
        raise ReplicaError(f"{name} is not what it was at the checkpoint: {type(thing).__name__}")


def check_can_be_kept(name: str, thing: Any) -> None:
    """Checks that a thing can be taken and put back.

    Raises:
        TypeError: It cannot.
    """
    has_state = hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")
    if not has_state and not isinstance(thing, (MutableMapping, list)):
        if _nests.kind(thing) != "numpy" or not hasattr(thing, "__setitem__"):  # as scalars
            raise TypeError(
                f"{name}: a {type(thing).__name__} cannot be kept: give something with state_dict() "
                "and load_state_dict(), a dict, a list, or an array of numpy"
            )


class Training:
    """How far a training is, on replica 0 with its newest snapshot. Thread-safe."""

    def __init__(self) -> None:
        """Makes one that has not begun."""
        self.step = 0
        self.snapshot: Snapshot | None = None
        self._wanted = threading.Event()
        self._changed = threading.Condition()
        #: Whether code of the user makes steps, so that a new snapshot will come.
        self._is_running = False
        self._kept: Mapping[str, Any] = {}

    def newest(self, names: Sequence[str], *, is_first: bool) -> Snapshot | None:
        """Returns a copy of what things were at the newest snapshot; None if they begin now.

        Args:
            names: Of the things.
            is_first: Whether none was kept before in this generation. Later ones may have come to
                be kept only after the snapshot.

        Raises:
            ReplicaError: It has not all of them.
        """
        if self.snapshot is None or not self.snapshot.kept:
            return None
        kept = self.snapshot.kept
        missing = [name for name in names if name not in kept]
        if not missing:
            wanted = {name: kept[name] for name in names}
            return Snapshot(self.snapshot.step, copy.deepcopy(wanted))
        if len(missing) == len(names) and not is_first:
            return None
        raise ReplicaError(
            f"the newest checkpoint has no {', '.join(missing)}, but {', '.join(kept)}; keep things by "
            "the same names, or begin with another folder for checkpoints"
        )

    def begin(self, kept: Mapping[str, Any]) -> None:
        """Notes what is kept; steps begin."""
        self._kept = kept
        with self._changed:
            self._is_running = True

    def end(self) -> None:
        """Steps have ended, by an error perhaps."""
        with self._changed:
            self._is_running = False
            self._changed.notify_all()

    def between_steps(self) -> None:
        """Takes a snapshot if somebody waits for one."""
        if self._wanted.is_set():
            self.take()

    def take(self) -> None:
        """Takes a snapshot, which later changes of what is kept do not change."""
        kept = {name: taken_from(thing) for name, thing in self._kept.items()}
        copied = pickle.loads(pickle.dumps(kept, protocol=5))
        with self._changed:
            self.snapshot = Snapshot(self.step, copied)
            self._wanted.clear()
            self._changed.notify_all()

    def save(self, folder: Path) -> None:
        """Writes a snapshot that is taken from now on; the last one, if no steps are made."""
        with self._changed:
            before = self.snapshot
            self._wanted.set()
            self._changed.wait_for(lambda: self.snapshot is not before or not self._is_running)
            snapshot = self.snapshot
        if snapshot is not None:
            (folder / _FILE).write_bytes(courier.dumps(snapshot))

    def restore(self, folder: Path) -> None:
        """Reads what `save` has written."""
        if (folder / _FILE).exists():
            self.snapshot = pickle.load(io.BytesIO((folder / _FILE).read_bytes()))
