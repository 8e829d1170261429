"""Where workers of map-reduce keep data: in memory up to a limit, and on disk beyond."""

import os
import tempfile
import threading
from collections.abc import Iterator
from typing import IO, Any

from launchpad_lite.engines.errors import EngineError, SpillError

#: A pickle, or file, offset and size of one.
_Chunk = bytes | tuple[IO[bytes], int, int]


def _read(chunk: _Chunk) -> bytes:
    if isinstance(chunk, bytes):
        return chunk
    file, offset, size = chunk
    return os.pread(file.fileno(), size, offset)


#: Whose data it is: a life, which `MissingError` names, and what it is for.
Owner = tuple[str, int]


class MissingError(EngineError):
    """What a task needs is not there (any more), because the life that it belongs to is over."""

    def __init__(self, life: str) -> None:
        super().__init__(life)
        self.life = life


class Store:
    """Pickled chunks of items: in memory up to a limit, and in a file that has no name beyond.

    Nothing is added to, or read of, an owner that is not open or was dropped: `MissingError`.
    """

    def __init__(self, memory_bytes: int, folder: str | None) -> None:
        self._limit = memory_bytes
        self._folder = folder
        self._used = 0
        self._lock = threading.Lock()
        self._kept: dict[Owner, dict[Any, list[_Chunk]]] = {}
        #: One for each owner, so that its room is free once the owner is gone.
        self._files: dict[Owner, IO[bytes]] = {}

    def __del__(self) -> None:
        for file in self._files.values():
            file.close()

    def open(self, owner: Owner) -> None:
        """Lets data be added."""
        with self._lock:
            self._kept.setdefault(owner, {})

    def _of(self, owner: Owner) -> dict[Any, list[_Chunk]]:
        try:
            return self._kept[owner]
        except KeyError:
            raise MissingError(owner[0]) from None

    def add(self, owner: Owner, key: Any, data: bytes) -> None:
        with self._lock:
            chunks = self._of(owner).setdefault(key, [])
            if self._used + len(data) <= self._limit:
                self._used += len(data)
                chunks.append(data)
                return
            try:
                if owner not in self._files:
                    # Without a name: nothing is left of it, even after a SIGKILL. Without a buffer:
                    # what did not fit is not tried again when the file is closed.
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
            chunks.append((file, offset, len(data)))

    def get(self, owner: Owner, key: Any) -> list[bytes]:
        with self._lock:
            return [_read(each) for each in self._of(owner).get(key, ())]

    def stream(self, owner: Owner, key: Any) -> Iterator[bytes]:
        """Yields what `get` returns; of what is on disk, one chunk is in memory at a time."""
        with self._lock:
            kept = self._of(owner)
            chunks = list(kept.get(key, ()))
        for each in chunks:
            with self._lock:
                if self._of(owner) is not kept:  # dropped and opened again
                    raise MissingError(owner[0])
                data = _read(each)
            yield data

    def has(self, owner: Owner, key: Any) -> bool:
        with self._lock:
            return key in self._kept.get(owner, ())

    def mark(self, owner: Owner, key: Any) -> None:
        """Notes that there is something, if only nothing."""
        with self._lock:
            self._of(owner).setdefault(key, [])

    def remove(self, owner: Owner, key: Any) -> None:
        """Forgets what was added; its room on disk is free with that of its owner."""
        with self._lock:
            self._release(self._of(owner).pop(key, []))

    def drop(self, owner: Owner) -> None:
        """Frees what an owner has, and closes it."""
        with self._lock:
            for chunks in self._kept.pop(owner, {}).values():
                self._release(chunks)
            if owner in self._files:
                self._files.pop(owner).close()

    def drop_all(self, life: str) -> None:
        """Frees what all owners of a life have."""
        with self._lock:
            owners = [owner for owner in self._kept if owner[0] == life]
        for owner in owners:
            self.drop(owner)

    def _release(self, chunks: list[_Chunk]) -> None:
        self._used -= sum(len(data) for data in chunks if isinstance(data, bytes))
