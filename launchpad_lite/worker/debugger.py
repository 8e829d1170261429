"""A debugger in a running node: pdb, whose lines come and go with the question `debug`."""

import collections
import io
import pdb  # noqa: T100 - this is the debugger
import shlex
import sys
import threading
import time
from collections.abc import Collection
from pathlib import Path
from types import FrameType
from typing import Any, TextIO, cast

from launchpad_lite.life.events import Debugged
from launchpad_lite.life.policies import Liveness
from launchpad_lite.process.stacks import is_of_user, stacks_of_threads, walk_threads
from launchpad_lite.worker.runtime import NodeRuntime

_TURN_S = 0.5  # seconds for which an answer waits for more output
_TICK_S = 0.2  # seconds between two signs of life of a node whose thread waits for a line
#: Seconds after the last line, and after the last sign of its terminal, until a debugger that looks is
#: taken for forgotten.
_USED_S, _GONE_S = 600.0, 10.0
_OURS = ("launchpad_lite.*", "courier.*", "launchers.*")  # modules in which no step ends
_MOST_CHARACTERS = 1 << 20  # of an answer
_lock = threading.Lock()
_RUNS_ON = (
    "The thread runs on, so it cannot be stepped; see its variables, `up`, `down` and `thread`."
)

_BOUND = f"Limits of liveness rest while you look, until {_USED_S / 60:.0f} minutes after your last line."


class NodeDebugger(io.TextIOBase):
    """The debugger of a node, and the stream that it reads and writes. Thread-safe.

    Several threads may stop; one at a time writes, and waits for lines.
    """

    def __init__(self, runtime: NodeRuntime) -> None:
        self.runtime = runtime
        self._changed = threading.Condition()
        self._output: list[str] = []
        self._lines: collections.deque[str] = collections.deque()
        self._asks = False  # whether a thread waits for a line
        self._is_over = True
        #: Whether it looks only; when its last line came, and when its terminal was last heard of.
        self._looks, self._used_at, self._heard_at = False, 0.0, 0.0
        self.turn = threading.Lock()  # of the thread that writes and reads
        self._own = threading.local()  # the debugger of each thread, which has its breakpoints
        self._told: set[str] = set()  # places of breakpoints that did not stop

    def stop(self, frame: FrameType, *, is_child: bool) -> None:
        """Stops the calling thread, at the next line of a frame. To be called last: it traces.

        Without a terminal, or in a child process, it only says so, once for each place.
        """
        place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        setup = self.runtime.setup
        if self.runtime.stop_event.is_set():
            return
        if setup.has_terminal and not is_child:
            if not hasattr(self._own, "pdb"):
                self._own.pdb = _StoppedPdb(self)
            self._own.pdb.set_trace(frame)
        elif place not in self._told:
            self._told.add(place)
            command = f"attach {shlex.quote(setup.program)} {shlex.quote(setup.name)}"
            sys.stderr.write(
                f"launchpad: breakpoint() at {place} does not stop {setup.name}, to which no terminal "
                f"leads. To look into it: python -m launchpad_lite.launch {command}\n"
            )

    def look(self, idents: Collection[int] | None) -> None:
        """Begins to look at the threads `idents` (None: all), unless a thread waits for a line."""
        with self._changed:
            self._used_at = time.monotonic()
            if self._asks:
                self._output.append("A thread has stopped, or is looked at: see `where`.\n(Pdb) ")
                return
            self._is_over, self._looks = False, True
        name = "launchpad-debugger"
        threading.Thread(target=self._look, args=(idents,), name=name, daemon=True).start()

    def _look(self, idents: Collection[int] | None) -> None:
        debugger = _LookingPdb(self, idents)
        first = threading.main_thread().name if idents is None else self.runtime.name
        try:
            if (frame := debugger.find(first)) is None:
                return self.end()
            if self.runtime.setup.liveness != Liveness():
                debugger.message(_BOUND)
            return debugger.interaction(frame, None)
        except BaseException:
            self.end()
            raise

    def begin(self, stopped: FrameType | None) -> None:
        """Begins to write; `stopped`: where the calling thread has stopped, if it has."""
        with self._changed:
            self._is_over, self._looks = False, stopped is None
        if stopped is not None:
            self.write(f"--- {self.runtime.name}, {threading.current_thread().name}\n")
            self.runtime.say(Debugged, f"{stopped.f_code.co_filename}:{stopped.f_lineno}")

    def exchange(self, line: str | None) -> dict[str, Any]:
        """Takes a line; returns the output, when a line is awaited, it is over, or time has passed."""
        with self._changed:
            self._heard_at = time.monotonic()
            if line is not None:
                self._used_at = self._heard_at
            self._tell_alive()
            if line is not None:
                self._lines.append(f"{line}\n")
                self._asks = False
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._asks or self._is_over, _TURN_S)
            text, self._output = "".join(self._output)[-_MOST_CHARACTERS:], []
            return {"output": text, "asks": self._asks, "over": self._is_over}

    def end(self) -> None:
        with self._changed:
            self._is_over, self._asks = True, False
            self._lines.clear()
            self._changed.notify_all()

    def write(self, text: str) -> int:
        with self._changed:
            self._output.append(text)
        return len(text)

    def readline(self, size: int | None = -1) -> str:  # type: ignore[override]  # noqa: ARG002
        """Returns the next line; "" if the node is to end."""
        with self._changed:
            self._asks = not self._lines
            self._changed.notify_all()
            while not self._lines:
                if self.runtime.stop_event.is_set():
                    return ""
                self._tell_alive()
                self._changed.wait(_TICK_S)
            return self._lines.popleft()

    def _tell_alive(self) -> None:
        now = time.monotonic()
        is_used = now - self._used_at < _USED_S and now - self._heard_at < _GONE_S
        if self.runtime.setup.liveness != Liveness() and (is_used or not self._looks):
            self.runtime.say(Debugged, "")


class _StoppedPdb(pdb.Pdb):
    """The debugger of a thread that has stopped."""

    def __init__(self, lines: NodeDebugger) -> None:
        stream = cast("TextIO", lines)
        super().__init__(skip=_OURS, stdin=stream, stdout=stream, nosigint=True, readrc=False)
        self._lines = lines
        self._stops = True

    def interaction(self, frame: FrameType | None, *of_exception: Any) -> None:
        with self._lines.turn:
            self._lines.begin(frame if self._stops else None)
            super().interaction(frame, *of_exception)

    def get_stack(self, f: FrameType | None, t: Any) -> Any:
        """Leaves out what runs the node, below the code of the user."""
        stack, index = super().get_stack(f, t)
        files = [frame.f_code.co_filename for frame, _ in stack]
        begin = next((i for i in range(1, index) if is_of_user(files[i])), index)  # 0: of the agent
        return stack[begin:], index - begin

    def do_continue(self, arg: str) -> bool | None:
        """Go on, to the next breakpoint."""
        self._lines.end()
        return super().do_continue(arg)

    def do_quit(self, arg: str) -> bool | None:
        """Go on, without the breakpoints that were set here."""
        self.clear_all_breaks()
        return self.do_continue(arg)

    do_c = do_cont = do_continue
    do_q = do_exit = do_EOF = do_quit  # noqa: N815 - names of pdb


class _LookingPdb(_StoppedPdb):
    """Looks at threads that run on."""

    def __init__(self, lines: NodeDebugger, idents: Collection[int] | None) -> None:
        super().__init__(lines)
        self._stops, self._idents = False, idents
        self.reset()

    def setup(self, f: FrameType | None, tb: Any) -> Any:
        with stacks_of_threads():  # it walks along the stack
            return super().setup(f, tb)

    def find(self, wanted: str) -> FrameType | None:
        """Returns the innermost frame of the user in a thread; "": writes where each one is."""
        for ident, name, stack in walk_threads(self._idents):
            if ident is None:  # a task
                continue
            users = [each for each in stack if is_of_user(each[0].f_code.co_filename)]
            frame, line = (users or stack)[-1]
            if name == wanted:
                return frame
            if users and not wanted:
                self.message(f"{name}  {frame.f_code.co_filename}:{line} {frame.f_code.co_name}")
        if wanted:
            self.error(f"no thread is {wanted!r}: see `thread`")
        return None

    def do_thread(self, arg: str) -> None:
        """Look at a thread where it is now: thread NAME; or list those that run your code: thread."""
        if (frame := self.find(arg)) is not None:
            self.setup(frame, None)
            self.print_stack_entry(self.stack[self.curindex])

    def _refuse(self, arg: str, temporary: Any = 0) -> Any:  # noqa: ARG002
        """Stops and steps: not for threads that run on."""
        self.message(_RUNS_ON)

    do_n = do_next = do_s = do_step = do_r = do_return = do_unt = do_until = _refuse
    do_j = do_jump = do_b = do_break = do_tbreak = do_run = do_restart = do_debug = _refuse


def debugger_of(runtime: NodeRuntime) -> NodeDebugger:
    with _lock:
        runtime.debugger = runtime.debugger or NodeDebugger(runtime)
        return runtime.debugger


def debug(runtime: NodeRuntime, idents: Collection[int] | None, argument: str | None) -> Any:
    """Answers the question `debug`: begins with None; "" is for more output, others are a line, after `=`."""
    debugger = debugger_of(runtime)
    if argument is None:
        debugger.look(idents)
    return debugger.exchange(argument[1:] if argument else None)
