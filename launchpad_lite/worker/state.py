"""The state of a running node, saved in checkpoints.

After the paper's argument: a framework does not know a service's state, so it cannot recover it
exactly, but it can make cheap checkpoints easy. So the node's object defines its state, by
`save(folder)` and `restore(folder)`, and this module does the rest.
"""

import contextlib
import functools
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from courier.lowlevel import signature_of
from launchpad_lite.parts.arguments import name_of
from launchpad_lite.parts.threads import start_thread
from launchpad_lite.process.forcing import ForcedExit

_LOGGER = logging.getLogger(__name__)

_METHODS = ("save", "restore")


class NodeCheckpoints(NamedTuple):
    """Where and when the state of one node is kept."""

    folder: Path
    period_s: float | None  # seconds between checkpoints; None: only when it ends, and when it asks
    keep: int
    required: bool  # whether it is a mistake if the node's object has no `save` and `restore`

    def of_part(self, index: int) -> "NodeCheckpoints":
        """Returns where one of several objects of the node is kept."""
        folder = self.folder.with_name(f"{self.folder.name}.{index}")
        return self._replace(folder=folder, required=False)


class NodeState:
    """Saves and restores the object of one node, if `checkpoints` say so. Thread-safe."""

    def __init__(
        self,
        node: str,
        checkpoints: NodeCheckpoints | None,
        leaves_well: Callable[[BaseException], bool],
    ) -> None:
        """Keeps the state of a node; `leaves_well` says whether an exception leaves it whole."""
        self._node = node
        self._checkpoints = checkpoints
        self._leaves_well = leaves_well
        store = None
        if checkpoints is not None:
            from launchpad_lite.worker.checkpoints import CheckpointStore

            store = CheckpointStore(checkpoints.folder, checkpoints.keep)
        self._store = store
        self._write: Callable[[Path], object] | None = None
        self._node_ended = threading.Event()
        #: Whether the node's code calls `checkpoint_here`, and whether the period is over.
        self._has_points = self._is_due = False
        self._is_torn = False  # whether the node's code may have been interrupted anywhere

    def _restore(self, instance: object) -> None:
        if self._checkpoints is None or self._store is None:
            return
        if not all(callable(getattr(instance, name, None)) for name in _METHODS):
            if self._checkpoints.required:
                raise TypeError(
                    f"{self._node}: checkpoints were asked for, but {name_of(instance)} does not "
                    "have both save(folder) and restore(folder)"
                )
            return
        try:
            check_state_methods(instance)
        except ValueError as error:
            raise TypeError(f"{self._node}: {error}") from None
        held: Any = instance
        restored = self._store.restore(lambda folder: held.restore(folder=folder))
        if restored is not None:
            # Users first want to see whether a run continues or begins.
            print(f"{self._node}: restored {restored.parent}", file=sys.stderr)  # noqa: T201
        self._write = lambda folder: held.save(folder=folder)

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the object's methods that only this class calls."""
        return () if self._write is None else _METHODS

    def save(self) -> Path | None:
        """Writes a checkpoint and returns its folder; None if the node keeps none."""
        write = self._write
        if self._store is None or write is None:
            return None

        def write_whole(folder: Path) -> None:
            write(folder)
            # Now: it may have waited for a lock of the interrupted code.
            if self._is_torn:
                raise ForcedExit

        return self._store.save(write_whole)

    def save_if_due(self) -> None:
        """Writes a checkpoint if the period is over; after the first call, only here."""
        self._has_points = True
        if self._is_due:
            self._is_due = False
            self._save_or_log()

    def tear(self) -> None:
        """Prevents further saves, before the node's code is interrupted at any point."""
        self._is_torn = True

    @contextlib.contextmanager
    def kept(self, instance: object) -> Iterator[None]:
        """Restores a new object, saves it on a period, and when the block leaves its state whole."""
        self._restore(instance)
        saver = None
        period_s = None if self._checkpoints is None else self._checkpoints.period_s
        if self._write is not None and period_s is not None:
            saver = start_thread(self._save_on_period, period_s, name="launchpad-checkpoints")
        try:
            try:
                yield
            finally:
                self._node_ended.set()
                if saver is not None:
                    saver.join()
        except BaseException as error:
            # Now: while the last save ended, the node may have been asked to end.
            if self._leaves_well(error):
                self.save()
            raise
        else:
            self.save()

    def _save_on_period(self, period_s: float) -> None:
        while not self._node_ended.wait(period_s):
            if self._has_points:
                self._is_due = True
                continue
            try:
                self._save_or_log()
            except ForcedExit:
                return

    def _save_or_log(self) -> None:
        try:
            self.save()
        except Exception:
            # A full disk must not end the node; the last save, whose failure loses state, does.
            _LOGGER.exception("%s: a checkpoint could not be written", self._node)


def check_state_methods(owner: object) -> None:
    """Raises ValueError if `save` and `restore` of an object are for something else than its state.

    Other methods of these names are common: for a document, or a model by its path. Only the name
    of the argument differs. `owner` is the object, or its constructor.
    """
    while isinstance(owner, functools.partial):
        owner = owner.func
    methods = [(name, _signature(owner, name)) for name in _METHODS]
    if not all(known for _, (known, _) in methods):
        return
    for name in _METHODS:
        if inspect.iscoroutinefunction(getattr(owner, name)):
            raise ValueError(
                f"checkpoints were asked for, but {name_of(owner)}.{name} is async, and would not be "
                "awaited: it is called from a thread, also while the event loop runs. Make it `def`"
            )
    if all(signature is not None and _takes_folder(signature) for _, (_, signature) in methods):
        return
    has = " and ".join(f"{name}{signature or '(...)'}" for name, (_, signature) in methods)
    raise ValueError(
        f"checkpoints were asked for, but {name_of(owner)} has {has}, not save(folder) and "
        "restore(folder). If they are for its state, name their argument `folder`; if not, ask "
        'for checkpoints of other nodes only: checkpoints={"label": folder}'
    )


def may_have_state(constructor: object) -> bool:
    """Returns whether the constructed object may have `save` and `restore`."""
    while isinstance(constructor, functools.partial):
        constructor = constructor.func
    if not inspect.isclass(constructor) or hasattr(constructor, "__getattr__"):
        return True
    return all(hasattr(constructor, name) for name in _METHODS)


def _signature(owner: object, name: str) -> tuple[bool, inspect.Signature | None]:
    """Returns whether a method certainly exists, and its signature if that is known."""
    method = getattr(owner, name, None)
    if not callable(method):
        return False, None
    if inspect.isclass(owner):
        found = inspect.getattr_static(owner, name)
        if inspect.isfunction(found):
            method = functools.partial(method, None)  # in the place of `self`
        elif not isinstance(found, classmethod | staticmethod):
            return False, None  # only the object knows
    try:
        return True, signature_of(method)
    except (TypeError, ValueError):  # written in C
        return True, None


def _takes_folder(signature: inspect.Signature) -> bool:
    try:
        signature.bind(folder=None)
    except TypeError:
        return False
    return True
