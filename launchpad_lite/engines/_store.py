"""Where workers of map-reduce keep data: in memory up to a limit, and on disk beyond."""

import os
import tempfile
import threading
from collections.abc import Iterator
from typing import IO, Any

from launchpad_lite.engines.errors import SpillError

#: A pickle, or file, offset and size of one.
_Chunk = bytes | tuple[IO[bytes], int, int]


def _read(chunk: _Chunk) -> bytes:
    if isinstance(chunk, bytes):
        return chunk
    file, offset, size = chunk
    return os.pread(file.fileno(), size, offset)


class Store:
    """Pickled chunks of items: in memory up to a limit, and in a file that has no name beyond."""

    def __init__(self, memory_bytes: int, folder: str | None) -> None:
        self._limit = memory_bytes
        self._folder = folder
        self._used = 0
        self._lock = threading.Lock()
        self._chunks: dict[Any, list[_Chunk]] = {}
        #: One for each owner, so that its room is free once the owner is gone.
        self._files: dict[Any, IO[bytes]] = {}

    def __del__(self) -> None:
        for file in self._files.values():
            file.close()

    def add(self, owner: Any, key: Any, data: bytes) -> None:
        with self._lock:
            chunks = self._chunks.setdefault((owner, key), [])
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

    def get(self, owner: Any, key: Any) -> list[bytes]:
        with self._lock:
            chunks = list(self._chunks.get((owner, key), ()))
            return [_read(each) for each in chunks]

    def stream(self, owner: Any, key: Any) -> Iterator[bytes]:
        """Yields what `get` returns; of what is on disk, one chunk is in memory at a time."""
        with self._lock:
            chunks = list(self._chunks.get((owner, key), ()))
        for each in chunks:
            with (
                self._lock
            ):  # or its file could be closed meanwhile, and another one have its number
                data = _read(each)
            yield data

    def has(self, owner: Any, key: Any) -> bool:
        with self._lock:
            return (owner, key) in self._chunks

    def mark(self, owner: Any, key: Any) -> None:
        """Notes that there is something, if only nothing."""
        with self._lock:
            self._chunks.setdefault((owner, key), [])

    def remove(self, owner: Any, key: Any) -> None:
        """Forgets what was added; its room on disk is free with that of its owner."""
        with self._lock:
            chunks = self._chunks.pop((owner, key), ())
            self._used -= sum(len(data) for data in chunks if isinstance(data, bytes))

    def drop(self, owner: Any) -> None:
        with self._lock:
            for each in [each for each in self._chunks if each[0] == owner]:
                self._used -= sum(
                    len(data) for data in self._chunks.pop(each) if isinstance(data, bytes)
                )
            if owner in self._files:
                self._files.pop(owner).close()
