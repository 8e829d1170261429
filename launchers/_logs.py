"""The output of nodes in files, kept by the launcher where their hosts do not keep it."""

import contextlib
import threading
from pathlib import Path
from typing import BinaryIO

from launchpad_lite.errors import LaunchError


def log_path(folder: Path, node: str) -> Path:
    """Returns where the output of a node goes: `<label>/<replica>.log`.

    Args:
        folder: Folder of the run.
        node: `label[replica]`.
    """
    label, _, replica = node.rstrip("]").rpartition("[")
    return folder / label / f"{replica}.log"


class NodeLogs:
    """Log files of many nodes. Thread-safe."""

    def __init__(self, folder: Path, nodes: list[str]) -> None:
        """Opens them all, so that a folder that cannot be written to is told of at once.

        Raises:
            LaunchError: A file cannot be written.
        """
        self._lock = threading.Lock()
        self._files: dict[str, BinaryIO] = {}
        try:
            for node in nodes:
                path = log_path(folder, node)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch(mode=0o600)
                self._files[node] = path.open("ab", buffering=0)
        except OSError as error:
            self.close()
            raise LaunchError(
                f"cannot write logs: {error}; name another folder in log_dir="
            ) from error

    def write(self, node: str, data: bytes) -> None:
        """Adds output of a node."""
        # A full disk must not end the program; what comes after the end is nobody's any more.
        with self._lock, contextlib.suppress(OSError, KeyError):
            self._files[node].write(data)

    def close(self) -> None:
        """Closes them all. May be repeated."""
        with self._lock:
            for file in self._files.values():
                with contextlib.suppress(OSError):
                    file.close()
            self._files.clear()
