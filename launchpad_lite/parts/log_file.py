"""The log of a node, within a limit: its beginning and its end.

Three files, of a third of the limit each: `0.log.first`, which stays, `0.log.1`, and `0.log`, which is
added to. Lines between the first two are lost if there were more.
"""

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from launchpad_lite.parts.private_files import make_folder, make_own_folder, open_private, user_name

#: The default folder for the folders of runs; the original's name.
LOG_DIR_VARIABLE = "LAUNCHPAD_LOGGING_DIR"
_PIECES = 3
#: A file may be longer by so much, so that no shorter line is split.
_LONGEST_LINE_BYTES = 1 << 20
#: In place of lines that were dropped before they were read.
_MISSED = b"[lines were not shown: they came faster than they were read]\n"
_GAP = b"[what followed was not kept (log_limit_mib): the last of it is in %b.1]\n"


def folder_of_runs() -> Path:
    """Returns the default folder for the folders of runs."""
    if named := os.environ.get(LOG_DIR_VARIABLE):
        return Path(named)
    # Not XDG_RUNTIME_DIR, which is in memory, and removed with the session.
    if state := os.environ.get("XDG_STATE_HOME"):
        return Path(state, "launchpad_lite")
    import tempfile

    return Path(tempfile.gettempdir(), f"launchpad_lite-{user_name()}")


def make_folder_of_runs() -> Path:
    """Makes and returns the same; it is this user's own, unless the user has named it."""
    # Everybody can guess its name, and may have been there first.
    make = make_folder if os.environ.get(LOG_DIR_VARIABLE) else make_own_folder
    make(folder_of_runs())
    return folder_of_runs()


def log_pieces(path: Path) -> list[Path]:
    """Returns the existing files of a log, the oldest first."""
    return [each for each in (_first(path), _previous(path), path) if each.exists()]


def end_of(file: BinaryIO, most_bytes: int) -> bytes:
    """Returns the last bytes of a file, at most so many."""
    file.seek(max(0, os.fstat(file.fileno()).st_size - most_bytes))
    return file.read()


def log_path(folder: Path, node: str) -> Path:
    """Returns where the output of a node goes, in the folder of a run: `<label>/<replica>.log`."""
    label, _, replica = node.rstrip("]").rpartition("[")
    return folder / label / f"{replica}.log"


def find_logs(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yields the nodes that have a log in the folder of a run, by `label[replica]`, and its newest file."""
    for path in sorted(folder.glob("*/*.log")):
        yield f"{path.parent.name}[{path.stem}]", path


def read_log(path: Path) -> Iterator[bytes]:
    """Yields the kept lines of a log."""
    for piece in log_pieces(path):
        with piece.open("rb") as lines:
            yield from lines


def _first(path: Path) -> Path:
    return path.with_name(f"{path.name}.first")


def _previous(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


class FollowedLog:
    """A log that grows, for one reader. For one thread. Its files may come later."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None

    def read(self) -> Iterator[bytes]:
        """Yields new lines, at first all kept ones; one line in place of lost ones."""
        with contextlib.suppress(OSError):
            if self._file is None:
                for piece in log_pieces(self._path)[:-1]:
                    yield piece.read_bytes()
                self._file = self._path.open("rb")
            yield from self._rest()
            if not os.path.samestat(os.fstat(self._file.fileno()), self._path.stat()):
                yield from self._read_on()

    def _rest(self) -> Iterator[bytes]:
        while self._file is not None and (data := self._file.read(1 << 20)):
            yield data

    def _read_on(self) -> Iterator[bytes]:
        """Goes on with the next file of a log that has reached its limit."""
        assert self._file is not None
        yield from self._rest()
        pieces = [piece.stat() for piece in log_pieces(self._path)]
        new = self._path.open("rb")
        if not os.path.samestat(os.fstat(new.fileno()), pieces[-1]):
            new.close()
            return  # there is another file by now: the next read finds it
        with self._file as file:
            old = os.fstat(file.fileno())
        self._file = new
        if len(pieces) > 1 and not os.path.samestat(old, pieces[-2]):
            yield _MISSED
        yield from self._rest()

    def finish(self) -> Iterator[bytes]:
        """Yields the rest, and closes it."""
        yield from self.read()
        if self._file is not None:
            # Opened again, because a network drive may show more only then.
            with self._file as file, contextlib.suppress(OSError), self._path.open("rb") as again:
                again.seek(file.tell())
                yield again.read()


class FollowedLogs:
    """The logs of a run that grow, for one reader. For one thread. Logs may come later."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._logs: dict[str, FollowedLog] = {}

    def read(self, *, is_last: bool = False) -> Iterator[tuple[str, bytes]]:
        """Yields new lines of each node, by `label[replica]`; at last it closes the logs."""
        for node, path in find_logs(self._folder):
            log = self._logs.setdefault(node, FollowedLog(path))
            yield from ((node, data) for data in (log.finish() if is_last else log.read()))


class LogFile:
    """A log, open for appending. For one thread."""

    def __init__(self, path: Path, limit_bytes: float) -> None:
        """Opens it, in a folder that was checked. A link is an OSError; infinity is no limit."""
        self._path = path
        self._most = limit_bytes / _PIECES
        self._descriptor = open_private(path)
        self._bytes = 0 if math.isinf(limit_bytes) else os.fstat(self._descriptor).st_size

    def write(self, data: bytes) -> None:
        """Appends to it."""
        while len(data) > self._most - self._bytes and (cut := self._cut(data)) is not None:
            self._append(data[:cut])
            data = data[cut:]
            self._begin_anew()
        self._append(data)

    def _cut(self, data: bytes) -> int | None:
        """Returns how much still belongs to this file; None: all, because no line ends in it."""
        room = max(0, int(self._most - self._bytes))
        if cut := data.rfind(b"\n", 0, room) + 1 or data.find(b"\n", room) + 1:
            return cut
        most = max(0, int(self._most - self._bytes) + _LONGEST_LINE_BYTES)
        return None if len(data) <= most else most

    def _append(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            written = os.write(self._descriptor, view)
            view = view[written:]
            self._bytes += written

    def _begin_anew(self) -> None:
        first, previous = _first(self._path), _previous(self._path)
        with contextlib.suppress(FileNotFoundError):  # another process has tidied up
            if not first.exists():
                self._path.rename(first)
            else:
                if previous.exists():
                    self._note_gap(first)
                self._path.replace(previous)
        descriptor = open_private(self._path)
        os.close(self._descriptor)
        self._descriptor, self._bytes = descriptor, 0

    def _note_gap(self, first: Path) -> None:
        """Notes a gap once, at its beginning."""
        note = _GAP % self._path.name.encode()
        with first.open("rb") as file:
            file.seek(-min(len(note), first.stat().st_size), os.SEEK_END)
            if file.read() == note:
                return
        with os.fdopen(open_private(first), "ab") as file:
            file.write(note)

    def close(self) -> None:
        os.close(self._descriptor)
