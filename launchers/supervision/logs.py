"""Log files of nodes, which the launcher keeps if the hosts do not."""

import contextlib
import os
import threading
from pathlib import Path

from launchpad_lite.errors import LaunchError
from launchpad_lite.parts.log_file import LogFile, log_path
from launchpad_lite.parts.private_files import make_folder, open_private

#: Ends the names of files with the last calls of nodes that have failed.
CALLS = ".calls.txt"


class NodeLogs:
    """Log files of many nodes. Thread-safe."""

    def __init__(self, folder: Path, nodes: list[str], limit_bytes: float) -> None:
        """Creates all files, so that a folder which cannot be written to is an error at once."""
        self._lock = threading.Lock()
        self._limit_bytes = limit_bytes
        self._paths: dict[str, Path] = {}
        try:
            for node in nodes:
                path = self._paths[node] = log_path(folder, node)
                make_folder(path.parent)
                os.close(open_private(path))
        except OSError as error:
            raise LaunchError(
                f"cannot write logs: {error}; name another folder in log_dir="
            ) from error

    def write(self, node: str, data: bytes) -> None:
        # Opened each time: there may be more nodes than files that a process may hold open. A full
        # disk must not end the program.
        with (
            self._lock,
            contextlib.suppress(OSError),
            contextlib.closing(LogFile(self._paths[node], self._limit_bytes)) as file,
        ):
            file.write(data)
