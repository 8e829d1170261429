"""Where workers of map-reduce keep data: in files that have no names.

The system keeps what they have in memory as long as there is room; it counts for no process.
"""

import os
import tempfile
import threading
from collections.abc import Iterator
from typing import IO, Any

from launchpad_lite.engines.errors import EngineError, SpillError

#: Offset and size of a pickle in the file of its owner.
_Chunk = tuple[int, int]


class MissingError(EngineError):
    """The input of a task is not there (any more), because the life that it belongs to is over."""

    def __init__(self, life: str) -> None:
        super().__init__(life)
        self.life = life


class ChunkStore:
    """Pickled chunks of items, by the number of the operation that owns them. Thread-safe.

    Nothing is added to, or read of, an owner that is not open or was dropped: `MissingError`, which
    names the life of the store.
    """

    def __init__(self, folder: str | None, life: str = "") -> None:
        self._folder = folder
        self.life = life
        self._lock = threading.Lock()
        self._kept: dict[int, dict[Any, list[_Chunk]]] = {}
        #: One for each owner, so that its room is free once the owner is gone.
        self._files: dict[int, IO[bytes]] = {}

    def __del__(self) -> None:
        for file in self._files.values():
            file.close()

    def open(self, owner: int) -> None:
        """Lets data be added."""
        with self._lock:
            self._kept.setdefault(owner, {})

    def _of(self, owner: int) -> dict[Any, list[_Chunk]]:
        try:
            return self._kept[owner]
        except KeyError:
            raise MissingError(self.life) from None

    def add(self, owner: int, key: Any, data: bytes) -> None:
        with self._lock:
            chunks = self._of(owner).setdefault(key, [])
            try:
                if owner not in self._files:
                    # Without a name: nothing is left of it, even after a SIGKILL. Without a buffer:
                    # closing the file does not try again to write what did not fit.
                    self._files[owner] = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115
                file = self._files[owner]
                offset = file.seek(0, os.SEEK_END)
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(file.fileno(), rest) :]
            except OSError as error:
                raise SpillError(
                    f"{len(data):,} bytes could not be spilled to "
                    f"{self._folder or tempfile.gettempdir()}: {error}; choose another spill_folder="
                ) from error
            chunks.append((offset, len(data)))

    def stream(self, owner: int, key: Any) -> Iterator[bytes]:
        """Yields what was added; one chunk is in memory at a time."""
        with self._lock:
            kept = self._of(owner)
            chunks = list(kept.get(key, ()))
        for offset, size in chunks:
            with self._lock:
                if self._of(owner) is not kept:  # dropped and opened again
                    raise MissingError(self.life)
                data = os.pread(self._files[owner].fileno(), size, offset)
            yield data

    def has(self, owner: int, key: Any) -> bool:
        with self._lock:
            return key in self._kept.get(owner, ())

    def mark(self, owner: int, key: Any) -> None:
        """Notes that there is output, even if it is empty."""
        with self._lock:
            self._of(owner).setdefault(key, [])

    def remove(self, owner: int, key: Any) -> None:
        """Forgets what was added; its room on disk is free with that of its owner."""
        with self._lock:
            self._of(owner).pop(key, None)

    def drop(self, owner: int) -> None:
        """Frees what an owner has, and closes it."""
        with self._lock:
            self._kept.pop(owner, None)
            if owner in self._files:
                self._files.pop(owner).close()

    def drop_all(self) -> None:
        for owner in list(self._kept):
            self.drop(owner)
