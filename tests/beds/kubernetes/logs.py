"""Logs of containers, read from what their runtime writes, as the kubelet serves them."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

_LOOK_S = 0.02


@dataclass(frozen=True)
class Log:
    """A container's log as its runtime writes it, and whether more may come."""

    path: Path
    open: Callable[[], bool]


def _time(text: str) -> float:
    """Seconds since 1970; Python's parser takes six digits, the runtime writes nine."""
    date, _, rest = text.replace("Z", "+00:00").partition(".")
    if not rest:
        return datetime.fromisoformat(date).timestamp()
    digits = rest[: len(rest) - 6] if "+" in rest or "-" in rest else rest
    whole = datetime.fromisoformat(date).replace(tzinfo=timezone.utc).timestamp()
    return whole + float(f"0.{digits}")


def read(path: Path, is_open: Callable[[], bool], query: Mapping[str, str]) -> Iterator[bytes]:
    """The bytes of a log as a request wants them.

    Args:
        path: Each line is a time, "stdout" or "stderr", "F" for a full line or "P" for a part, and
            the text.
        is_open: Whether more may come.
        query: Of the request: follow, sinceSeconds, tailLines, timestamps.

    Yields:
        Pieces; an empty one whenever there is nothing new.
    """
    since = 0.0
    if "sinceSeconds" in query:
        since = time.time() - int(query["sinceSeconds"])
    stamps = query.get("timestamps", "").lower() == "true"
    follow = query.get("follow", "").lower() == "true"
    begins = True

    def shown(line: bytes) -> bytes:
        nonlocal begins
        date, _, rest = line.partition(b" ")
        _, _, rest = rest.partition(b" ")
        mark, _, text = rest.partition(b" ")
        if since and _time(date.decode()) < since:
            return b""
        prefix = date + b" " if stamps and begins else b""
        begins = mark.startswith(b"F")
        return prefix + text + (b"\n" if begins else b"")

    with path.open("rb") as file:
        lines = file.read().split(b"\n")
        rest = lines.pop()
        if "tailLines" in query:
            lines = lines[-int(query["tailLines"]) :]
        while True:
            piece = b"".join(map(shown, lines))
            if piece:
                yield piece
            more_may_come = is_open()
            data = file.read()
            if not data:
                if not follow or not more_may_come:
                    return
                yield b""
                time.sleep(_LOOK_S)
            lines = (rest + data).split(b"\n")
            rest = lines.pop()
