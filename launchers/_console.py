"""The merged output of all nodes, for people."""

import sys
import threading
from typing import Protocol

#: A longer line is shown in pieces: progress bars may never end theirs.
_MAX_LINE_BYTES = 1 << 20
_COLOURS = (36, 33, 32, 35, 34, 31, 96, 93, 92, 95, 94, 91)


class Output(Protocol):
    """Shows what nodes print. Thread-safe."""

    def show(self, node: str, data: bytes) -> None:
        """Takes in output of a node."""

    def finish(self, node: str) -> None:
        """Shows what a node said without ending the line."""


class Console:
    """Prints lines of many nodes, each with the node's name. Thread-safe.

    Coloured on a terminal, plain elsewhere. Lines are never torn: a piece without an end waits
    for the rest.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unfinished: dict[str, bytes] = {}
        self._colours: dict[str, int] = {}

    def show(self, node: str, data: bytes) -> None:
        """Takes in output of a node and prints the lines that are complete."""
        with self._lock:
            *lines, rest = (self._unfinished.pop(node, b"") + data).split(b"\n")
            if len(rest) > _MAX_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            if rest:
                self._unfinished[node] = rest
            self._print(node, lines)

    def finish(self, node: str) -> None:
        """Prints what a node said without ending the line."""
        with self._lock:
            if rest := self._unfinished.pop(node, b""):
                self._print(node, [rest])

    def _print(self, node: str, lines: list[bytes]) -> None:
        if not lines:
            return
        stream = sys.stdout
        if stream is None:  # as a service may have it
            return
        try:
            prefix = self._prefix(node)
            text = "".join(f"{prefix} {line.decode(errors='replace')}\n" for line in lines)
            encoding = getattr(stream, "encoding", None) or "utf-8"
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            stream.flush()
        except (OSError, ValueError):
            pass  # nobody looks any more; the log files have it all

    def _prefix(self, node: str) -> str:
        if not sys.stdout.isatty():
            return f"[{node}]"
        label = node.partition("[")[0]
        colour = self._colours.setdefault(label, _COLOURS[len(self._colours) % len(_COLOURS)])
        return f"\x1b[{colour}m[{node}]\x1b[0m"
