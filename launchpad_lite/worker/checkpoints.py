"""Checkpoints on disk: the options of users, and the folder of one node.

This module writes checkpoints atomically, finds damaged ones, and removes old and unfinished ones.
Other modules decide when a node saves, and what its state is.

The folder of a node:

    .lock                           held while a process saves, restores or tidies up
    .launchpad-checkpoint-k3x9_2ab  being written or removed; a leftover if the lock is free
    00000007/                       a complete checkpoint: its name is given once all is on disk
        manifest.json               what `state` must hold
        state/                      the folder that the node's `save` and `restore` are given

The manifest stands beside the state, so that no name is taken from the node and its `restore` finds
exactly what its `save` wrote. Digests find damage. They do not prove who wrote a checkpoint: anyone who
can write to the folder can change the state.
"""

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from launchpad_lite._version import __version__
from launchpad_lite.errors import CheckpointError
from launchpad_lite.parts.private_files import check_own_folder, make_own_folder
from launchpad_lite.parts.settings import check_number, check_quantity

_LOGGER = logging.getLogger(__name__)

_LOCK = ".lock"
_TEMPORARY = ".launchpad-checkpoint-"
_MANIFEST = "manifest.json"
_STATE = "state"
_FORMAT = 1
_VERSION = re.compile(r"[0-9]{8,}")

_BLOCK = 1 << 20  # bytes that are read at a time

_MAKE_ROOM = "Free some space there, keep fewer checkpoints, or give lp.Checkpoints another folder."
_ALLOW = "Make it writable for this user, or give lp.Checkpoints another folder."
_ADVICE = {
    errno.ENOSPC: _MAKE_ROOM,
    errno.EDQUOT: _MAKE_ROOM,
    errno.EACCES: _ALLOW,
    errno.EPERM: _ALLOW,
    errno.EROFS: _ALLOW,
}


@dataclass(frozen=True)
class Checkpoints:
    """Where the state of nodes is kept, how often it is saved, and how many checkpoints stay.

    Attributes:
        folder: The folder, in which each node has its own. Made when it is first needed. A relative
            path is resolved at once, so that all processes of a program use the same.
        period_s: Seconds between checkpoints. None: only at an orderly stop, and when a node asks;
            a kill loses all work since.
        keep: How many stay of each node, the newest ones.

    Example:
        lp.launch(program, checkpoints=lp.Checkpoints("/data/run7", period_s=300), restart="on_failure")
    """

    folder: Path
    period_s: float | None = 60.0
    keep: int = 2

    if TYPE_CHECKING:
        # For type checkers: users may give a string, but `folder` is a Path.
        def __init__(
            self, folder: str | os.PathLike[str], period_s: float | None = 60.0, keep: int = 2
        ) -> None: ...

    def __post_init__(self) -> None:
        folder: object = self.folder
        if not isinstance(folder, str | os.PathLike) or not isinstance(os.fspath(folder), str):
            raise TypeError(f"folder is a path, not {folder!r}")
        if not os.fspath(folder):
            raise ValueError("folder cannot be empty; '.' is the current one")
        object.__setattr__(self, "folder", Path(os.fspath(folder)).absolute())
        if self.period_s is not None:
            period_s = check_quantity("period_s", self.period_s, positive=True)
            object.__setattr__(self, "period_s", period_s)
        check_number("keep", self.keep, 1)


class CheckpointStore:
    """The checkpoints of one node, in a folder of their own.

    Thread-safe, and safe against other processes on the same host that use the same folder: one
    saves or restores at a time, the others wait, and a warning is logged when the wait is for
    another process. On network file systems this holds as far as their `flock` does.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep
        # Reentrant, so that a `save` that saves gets an error, and does not wait for itself.
        self._one_thread = threading.RLock()
        self._at_work = False  # whether the thread that holds the lock is at work here already

    def save(self, write: Callable[[Path], object]) -> Path:
        """Makes a checkpoint of the files of `write`, atomically; returns their folder.

        Returns when it is safe on disk, and removes the oldest complete ones beyond `keep`. If
        anything fails, existing checkpoints stay unchanged. What `write` raises passes.

        `write` is called with an empty folder, whose path changes afterwards. All must be written
        when it returns. It may write files, folders, links that stay inside, and nothing.
        """
        import tempfile

        with self._explained("saved"):
            _make_folder(self._folder)
        with self._alone():
            with self._explained("saved"):
                self._remove_leftovers()
                temporary = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=self._folder))
                state = temporary / _STATE
                state.mkdir(mode=0o700)
            try:
                write(state)
                with self._explained("saved"):
                    entries = self._checked_listing(state)
                    _write_manifest(temporary, _sealed(state, entries))
                    newest = max((int(path.name) for path in self.versions()), default=0)
                    checkpoint = self._folder / f"{newest + 1:08}"
                    temporary.rename(checkpoint)
                    _sync_folder(self._folder)
            except BaseException:
                # Also at the end of the thread or process, because gigabytes must not stay.
                _remove(temporary)
                raise
            self._remove_surplus()
            return checkpoint / _STATE

    def restore(self, read: Callable[[Path], object]) -> Path | None:
        """Gives `read` the folder of the newest intact checkpoint; returns it, None without one.

        Damaged ones are skipped with a warning in the log; they stay where they are. Raises
        CheckpointError if all are damaged, or if `read` raised, which is the cause. `read` must not
        change the folder.
        """
        with self._explained("restored"):
            if not self.versions() and not self._leftovers():
                return None
        with self._alone():
            with self._explained("restored"):
                self._remove_leftovers()
                checkpoints = self.versions()
            damages: list[str] = []
            for checkpoint in reversed(checkpoints):
                if damage := _damage(checkpoint, thoroughly=True):
                    damages.append(f"{checkpoint}: {damage}")
                    _LOGGER.warning("%s: skipped this checkpoint: %s", checkpoint, damage)
                    continue
                try:
                    read(checkpoint / _STATE)
                except Exception as error:
                    raise CheckpointError(
                        f"{checkpoint}: restoring this checkpoint raised {type(error).__name__}: "
                        f"{error}. Its files are intact, so that either `restore` has a mistake or "
                        "other code wrote them. To start from the checkpoint before it, if there "
                        "is one, remove this folder."
                    ) from error
                return checkpoint / _STATE
        if damages:  # beginning without state would lose repairable data
            raise CheckpointError(
                f"{self._folder}: all checkpoints are damaged. {'; '.join(damages)}. Repair one from "
                "a copy. To start without their state, remove these folders."
            )
        return None

    def renew(self, name: str) -> Path:
        """Makes an older checkpoint the newest one, by a copy; returns the folder of that."""
        import shutil

        old = self._folder / name
        if damage := _damage(old, thoroughly=True):
            known = ", ".join(each.name for each in self.versions())
            raise CheckpointError(f"{old}: {damage}. There are: {known or 'none'}")

        def write(state: Path) -> None:
            with self._explained("copied"):  # a running node may have removed it
                shutil.copytree(old / _STATE, state, symlinks=True, dirs_exist_ok=True)

        return CheckpointStore(self._folder, keep=sys.maxsize).save(write).parent

    def discard_incomplete(self) -> None:
        """Removes leftovers of killed saves, and nothing else.

        Does nothing while a process saves or restores here, because unfinished files may be in use.
        Never raises for the state of the folder; logs what it cannot remove.
        """
        try:
            if self._leftovers():
                with self._alone(wait=False) as alone:
                    if alone:
                        self._remove_leftovers()
        except (OSError, CheckpointError) as error:
            _LOGGER.warning("%s: cannot be tidied up: %s", self._folder, error)

    def versions(self) -> list[Path]:
        """Returns the folders of all checkpoints, oldest first, damaged ones included."""
        found = [path for path in _children(self._folder) if _VERSION.fullmatch(path.name)]
        # As numbers: names grow longer after the 99,999,999th.
        return sorted(found, key=lambda path: int(path.name))

    @contextlib.contextmanager
    def _alone(self, *, wait: bool = True) -> Iterator[bool]:
        """Locks out other threads and processes in a block; gives whether it did not wait."""
        if not self._one_thread.acquire(blocking=wait):
            yield False
            return
        try:
            if self._at_work:
                raise CheckpointError(
                    f"{self._folder}: a node's `save` and `restore` cannot save or restore "
                    "checkpoints themselves"
                )
            self._at_work = True
            try:
                with self._locked(wait=wait) as locked:
                    yield locked
            finally:
                self._at_work = False
        finally:
            self._one_thread.release()

    @contextlib.contextmanager
    def _locked(self, *, wait: bool) -> Iterator[bool]:
        with self._explained("trusted"):
            check_own_folder(self._folder)  # its content is restored, or removed
        with self._explained("locked"):
            descriptor = self._open_lock()
        if descriptor is None:
            yield True
            return
        with contextlib.ExitStack() as held:
            held.callback(os.close, descriptor)
            with self._explained("locked"):
                locked = self._lock(descriptor, wait=wait)
            if locked:
                # Closing is not enough: a process that was forked meanwhile holds a copy.
                held.callback(fcntl.flock, descriptor, fcntl.LOCK_UN)
            yield locked

    def _open_lock(self) -> int | None:
        """Opens the file to lock; None where there is none and none can be made."""
        path = self._folder / _LOCK
        try:
            # NFS gives exclusive locks only on files that are open for writing.
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode=0o600)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
        # State can be restored from a folder that is only readable.
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None

    def _lock(self, descriptor: int, *, wait: bool) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                return False
            _LOGGER.warning(
                "%s: waiting for another process that saves or restores checkpoints here. If a "
                "program runs twice at a time, give each run a folder of its own.",
                self._folder,
            )
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        return True

    @contextlib.contextmanager
    def _explained(self, done: str) -> Iterator[None]:
        """Turns errors of the file system into errors with advice."""
        try:
            yield
        except OSError as error:
            advice = _ADVICE.get(error.errno or 0, "Give lp.Checkpoints a folder that works.")
            raise CheckpointError(
                f"{self._folder}: the state cannot be {done}: {error}. {advice}"
            ) from error

    def _checked_listing(self, state: Path) -> "dict[str, _StateEntry]":
        """Returns the entries of a folder; raises if a checkpoint cannot hold one of them."""
        if state.is_symlink() or not state.is_dir():
            raise CheckpointError(
                f"{self._folder}: `save` removed or replaced the folder it was given. It must "
                "write into that folder."
            )
        entries = _listing(state)
        real_state = os.path.realpath(state)
        for path, entry in entries.items():
            if entry.kind == _OTHER:
                raise CheckpointError(
                    f"{self._folder}: {path!r} is no file, folder or link, so that a checkpoint "
                    "cannot hold it. Write state as files."
                )
            if entry.kind != _LINK:
                continue
            leads_to = Path(os.path.realpath(state / path))
            if Path(entry.target).is_absolute() or not leads_to.is_relative_to(real_state):
                raise CheckpointError(
                    f"{self._folder}: the link {path!r} leads to {entry.target!r}, out of its "
                    "checkpoint, whose folder changes its name. Copy the file, or make the link "
                    "relative."
                )
        return entries

    def _remove_surplus(self) -> None:
        try:
            # One that lost its files must not displace an older one that has them. Digests are not
            # compared: reading all files with each save would take too long.
            complete = [path for path in self.versions() if not _damage(path, thoroughly=False)]
            for checkpoint in complete[: -self._keep]:
                # Renamed first, so that a half removed one never looks like a damaged one.
                leftover = self._folder / f"{_TEMPORARY}{checkpoint.name}"
                checkpoint.rename(leftover)
                _remove(leftover)
        except OSError as error:
            # The new checkpoint is safe, so the save has not failed; the next one tries again.
            _LOGGER.warning("%s: old checkpoints cannot be removed: %s", self._folder, error)

    def _leftovers(self) -> list[Path]:
        return [
            path
            for path in _children(self._folder)
            if path.name.startswith(_TEMPORARY) and path.is_dir() and not path.is_symlink()
        ]

    def _remove_leftovers(self) -> None:
        for leftover in self._leftovers():
            _remove(leftover)


_FILE, _FOLDER, _LINK, _OTHER = "file", "folder", "link", "other"


@dataclass(frozen=True)
class _StateEntry:
    """The entry at one path of a state."""

    kind: str  # `"file"`, `"folder"`, `"link"`, or `"other"`: sockets, for instance
    size: int = 0
    target: str = ""  # where the link leads, as written in it
    #: Digest of the file, 32 bytes in hexadecimal. Not compared, because that takes reading the
    #: file.
    blake2b: str = field(default="", compare=False)

    def __str__(self) -> str:
        if self.kind == _FILE:
            return f"a file of {self.size} bytes"
        return f"a link to {self.target!r}" if self.kind == _LINK else f"a {self.kind}"


def _listing(state: Path) -> dict[str, _StateEntry]:
    """Returns the entries of a folder, by relative path, without reading the files."""
    entries: dict[str, _StateEntry] = {}
    unseen = [""]
    trusted = (0, os.geteuid(), state.stat().st_uid)
    while unseen:
        parent = unseen.pop()
        with os.scandir(state / parent) as children:
            for child in children:
                path = f"{parent}{child.name}"
                status = child.stat(follow_symlinks=False)
                if status.st_uid not in trusted:
                    raise CheckpointError(f"{path!r} belongs to user {status.st_uid}")
                if child.is_symlink():
                    entries[path] = _StateEntry(_LINK, target=str(Path(child.path).readlink()))
                elif child.is_dir():
                    entries[path] = _StateEntry(_FOLDER)
                    unseen.append(f"{path}/")
                elif child.is_file():
                    entries[path] = _StateEntry(_FILE, size=status.st_size)
                else:
                    entries[path] = _StateEntry(_OTHER)
    return entries


def _sealed(state: Path, entries: dict[str, _StateEntry]) -> dict[str, _StateEntry]:
    """Returns the entries with their digests, once all that they name is safe on disk."""
    sealed = {
        path: dataclasses.replace(entry, blake2b=_digest(state / path, entry.size, sync=True))
        if entry.kind == _FILE
        else entry
        for path, entry in sorted(entries.items())
    }
    for path, entry in entries.items():
        if entry.kind == _FOLDER:
            _sync_folder(state / path)
    _sync_folder(state)
    return sealed


def _digest(path: Path, size: int, *, sync: bool) -> str:
    """Returns the digest of a file, in hexadecimal; with `sync`, once it is safe on disk."""
    digest = hashlib.blake2b(digest_size=32)
    block = memoryview(bytearray(min(size, _BLOCK) or 1))
    total = 0
    with path.open("rb", buffering=0) as file:
        while length := file.readinto(block):
            digest.update(block[:length])
            total += length
        if total != size:
            raise CheckpointError(
                f"{path}: changed from {size} to {total} bytes while the checkpoint was made. "
                "`save` must have written all when it returns."
            )
        if sync:
            os.fsync(file.fileno())
    return digest.hexdigest()


def _write_manifest(folder: Path, entries: dict[str, _StateEntry]) -> None:
    manifest = {
        "format": _FORMAT,
        "launchpad_lite": __version__,
        "time": datetime.now(timezone.utc).isoformat(),
        "entries": {path: dataclasses.asdict(entry) for path, entry in entries.items()},
    }
    with (folder / _MANIFEST).open("x", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(folder)


def _read_manifest(folder: Path) -> dict[str, _StateEntry]:
    """Returns the expected entries of a checkpoint; the text of a ValueError says what is wrong."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_bytes())
        if manifest["format"] == _FORMAT:
            return {path: _StateEntry(**entry) for path, entry in manifest["entries"].items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"its manifest is damaged ({error})") from None
    raise ValueError(
        f"its manifest has the format {manifest['format']}, written by launchpad-lite "
        f"{manifest.get('launchpad_lite')}; this is {__version__}, which reads {_FORMAT}"
    )


def _damage(checkpoint: Path, *, thoroughly: bool) -> str:
    """Returns the damage of a checkpoint, or ""; `thoroughly` reads files, not only their sizes."""
    try:
        wanted = _read_manifest(checkpoint)
    except FileNotFoundError:
        return "it has no manifest" if checkpoint.exists() else "it is not there"
    except OSError as error:
        return f"its manifest cannot be read: {error}"
    except ValueError as error:
        return str(error)
    try:
        return _difference(checkpoint / _STATE, wanted, thoroughly=thoroughly)
    except (OSError, CheckpointError) as error:
        return f"it cannot be read: {error}"


def _difference(state: Path, wanted: dict[str, _StateEntry], *, thoroughly: bool) -> str:
    found = _listing(state)
    for path in sorted(wanted.keys() | found.keys()):
        if path not in found:
            return f"{path!r} is missing"
        if path not in wanted:
            return f"{path!r} was added"
        if found[path] != wanted[path]:
            return f"{path!r} is {found[path]}, and was {wanted[path]}"
    if thoroughly:
        for path, entry in wanted.items():
            if entry.kind == _FILE and (
                _digest(state / path, entry.size, sync=False) != entry.blake2b
            ):
                return f"the content of {path!r} has changed"
    return ""


def _children(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []


def _make_folder(folder: Path) -> None:
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    make_own_folder(folder)
    for each in missing:
        # A folder may be writable and not readable.
        with contextlib.suppress(PermissionError):
            _sync_folder(each.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot do this with folders, and do not need it.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _remove(folder: Path) -> None:
    """Removes a folder of ours with all in it; logs if it cannot."""
    import shutil

    try:
        _make_removable(folder)
        shutil.rmtree(folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        _LOGGER.warning("%s: cannot be removed: %s. Remove it by hand.", folder, error)


def _make_removable(folder: Path) -> None:
    """Makes folders that were copied with their read-only mode removable."""
    for parent, children, _ in os.walk(folder):
        for name in children:
            child = Path(parent, name)
            # Before `walk` reads it, which may be forbidden, too.
            if stat.S_IMODE(child.lstat().st_mode) & 0o700 != 0o700 and not child.is_symlink():
                child.chmod(0o700)
