"""The state of a running node, kept in checkpoints that outlive it.

After the paper's argument: a framework that cannot know what a service's state is cannot recover
it exactly, but it can make cheap checkpoints easy. So the node's object says what its state is, by
`save(folder)` and `restore(folder)`, and everything else happens here.
"""

import contextlib
import contextvars
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launchpad_lite._checkpoints import CheckpointStore

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodeCheckpoints:
    """Where and when the state of one node is kept.

    Attributes:
        folder: The node's own.
        period_s: Seconds between checkpoints; None: only when it ends, and when it asks.
        keep: How many stay.
        required: Whether it is a mistake if the node's object has no `save` and `restore`.
    """

    folder: Path
    period_s: float | None
    keep: int
    required: bool

    def of_part(self, index: int) -> "NodeCheckpoints":
        """Returns where one of several objects of the node is kept."""
        folder = self.folder.with_name(f"{self.folder.name}.{index}")
        return dataclasses.replace(self, folder=folder, required=False)


class NodeState:
    """Saves and restores the object of one node. Thread-safe."""

    def __init__(self, node: str, checkpoints: NodeCheckpoints | None) -> None:
        """Prepares it; touches no file yet.

        Args:
            node: `label[replica]`.
            checkpoints: Where and when; None: never.
        """
        self._node = node
        self._checkpoints = checkpoints
        self._store = CheckpointStore(checkpoints.folder, checkpoints.keep) if checkpoints else None
        self._write: Callable[[Path], object] | None = None
        self._node_ended = threading.Event()

    def _restore(self, instance: object) -> None:
        if self._checkpoints is None or self._store is None:
            return
        write, read = _hooks(instance)
        if write is None or read is None:
            if self._checkpoints.required:
                what = getattr(instance, "__name__", None) or type(instance).__name__
                raise TypeError(
                    f"{self._node}: checkpoints were asked for, but {what} has no methods "
                    "save(folder) and restore(folder)"
                )
            return
        self._store.restore(read)
        self._write = write

    def save(self) -> Path | None:
        """Writes a checkpoint and returns its folder; None if the node keeps none.

        Raises:
            CheckpointError: It could not be written. What `save` raises passes.
        """
        if self._store is None or self._write is None:
            return None
        return self._store.save(self._write)

    @contextlib.contextmanager
    def kept(
        self, instance: object, leaves_well: Callable[[BaseException], bool]
    ) -> Iterator[None]:
        """Restores an object, just constructed, saves it on a period, and when the block ends well.

        Args:
            instance: What has the state.
            leaves_well: Tells of an exception whether it leaves the state whole.

        Raises:
            TypeError: Checkpoints were asked for, and the object has no `save` and `restore`.
            CheckpointError: The `restore` of the object raised; or as `save`.
        """
        self._restore(instance)
        try:
            with self._saved_on_period():
                yield
        except BaseException as error:
            if leaves_well(error):
                self.save()
            raise
        else:
            self.save()

    @contextlib.contextmanager
    def _saved_on_period(self) -> Iterator[None]:
        if self._write is None or self._checkpoints is None or self._checkpoints.period_s is None:
            yield
            return
        saver = threading.Thread(
            # In the context of the node, whose `save` may use what nodes can.
            target=contextvars.copy_context().run,
            args=(self._save_on_period,),
            name="launchpad-checkpoints",
            daemon=True,
        )
        saver.start()
        try:
            yield
        finally:
            self._node_ended.set()
            saver.join()

    def _save_on_period(self) -> None:
        assert self._checkpoints is not None
        while not self._node_ended.wait(self._checkpoints.period_s):
            try:
                self.save()
            except Exception:
                # A disk that is full for a while must not end the node; the last save, whose
                # failure loses something, does.
                _LOGGER.exception("%s: a checkpoint could not be written", self._node)


def _hooks(
    instance: Any,
) -> tuple[Callable[[Path], object] | None, Callable[[Path], object] | None]:
    write, read = getattr(instance, "save", None), getattr(instance, "restore", None)
    return (write, read) if callable(write) and callable(read) else (None, None)
