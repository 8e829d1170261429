"""The terminal of a launch, for nodes that have stopped at a breakpoint: one after the other."""

import collections
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from launchers.supervision.console import tell
from launchpad_lite.process.interrupts import is_interactive

#: Milliseconds between two checks of whether a node still waits for a line.
_LOOK_MS = 500
_ANSWER_S = 86400.0  # a node may compute long, or be stopped; nobody else would serve it later
_STDIN = 0


def has_terminal() -> bool:
    """Returns whether a person can type lines for nodes where this process was started."""
    try:
        is_terminal = sys.stdin.fileno() == _STDIN and sys.stdin.isatty() and sys.stderr.isatty()
    except (AttributeError, OSError, ValueError):  # closed, none, or that of a notebook
        return False
    return is_terminal and not is_interactive()


class Breakpoints:
    """Passes on lines from the terminal to stopped nodes, and their output to it. Thread-safe.

    `ask` asks nodes, as `Host.ask` does.
    """

    def __init__(self, ask: Callable[[str, Any, Any, float], Mapping[str, Any]]) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._waiting: collections.OrderedDict[str, str] = collections.OrderedDict()
        self._current: str | None = None  # the node that has the terminal

    def announce(self, node: str, place: str) -> None:
        """Gives a node that has stopped the terminal, or says that it waits for it."""
        with self._lock:
            is_first = not self._waiting and self._current is None
            is_new = node not in self._waiting and node != self._current
            self._waiting[node] = place
            if is_first:
                threading.Thread(target=self._work, name="launchpad-terminal", daemon=True).start()
                self._current = node
            elif is_new:
                tell(f"launchpad: {node} has stopped at {place}, and waits for the terminal")

    def _work(self) -> None:
        while True:
            with self._lock:
                self._current = None
                if not self._waiting:
                    return
                self._current, _ = self._waiting.popitem(last=False)
            self._serve(self._current)

    def _serve(self, node: str) -> None:
        """Serves a node until it goes on, or others wait while it runs."""
        argument = ""
        while True:
            answer = self._ask("debug", argument, [node], _ANSWER_S).get(node)
            if answer is None or "error" in answer:
                return  # it has ended
            if answer["output"]:
                tell(answer["output"], end="")
            if answer["over"] or (self._waiting and not answer["asks"]):
                return
            argument = ""
            if answer["asks"] and (line := self._read_line()) is not None:
                argument = f"={line}"

    def _read_line(self) -> str | None:
        """Returns a line of the terminal; None if there is none yet."""
        ready = select.poll()
        ready.register(_STDIN, select.POLLIN)
        if not ready.poll(_LOOK_MS):
            return None
        if os.tcgetpgrp(_STDIN) != os.getpgrp():  # in the background a read would stop this process
            time.sleep(_LOOK_MS / 1000)
            return None
        text = os.read(_STDIN, 1 << 16).decode(sys.stdin.encoding or "utf-8", "replace")
        return text.rstrip("\n") if text else "quit"  # Ctrl-D
