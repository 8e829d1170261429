"""A debugger in a running node: pdb, whose lines come and go with the question `debug`."""

import collections
import contextlib
import io
import pdb  # noqa: T100 - this is the debugger
import shlex
import sys
import threading
import weakref
from collections.abc import Collection, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TextIO, cast

from launchpad_lite.life.events import Debugged
from launchpad_lite.life.policies import Liveness
from launchpad_lite.process.stacks import frames_of_threads, is_of_user, walk_threads
from launchpad_lite.worker.runtime import NodeRuntime

#: Seconds for which an answer waits for more output.
_TURN_S = 0.5
#: Seconds between two signs of life of a node whose thread waits for a line.
_TICK_S = 0.2
#: Modules in which no step ends.
_OURS = ("launchpad_lite.*", "courier.*", "launchers.*")
_RUNS_ON = (
    "The thread runs on, so it cannot be stepped. `p`, `pp` and statements work on its variables, `up` and "
    "`down` move, `where` shows the stack, `threads` lists the others, `thread NAME` looks at one."
)


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
        self._turn = threading.Lock()
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
        if is_child or not setup.has_terminal:
            command = f"attach {shlex.quote(setup.program)} {shlex.quote(setup.name)}"
            if place not in self._told:
                self._told.add(place)
                sys.stderr.write(
                    f"launchpad: breakpoint() at {place} does not stop {setup.name}, to which no terminal "
                    f"leads. To look into it: python -m launchpad_lite.launch {command}\n"
                )
            return
        if not hasattr(self._own, "pdb"):
            self._own.pdb = _StoppedPdb(self)
        self._own.pdb.set_trace(frame)

    def look(self, idents: Collection[int] | None) -> None:
        """Begins to look at the threads `idents` (None: all), unless a thread waits for a line."""
        with self._changed:
            if self._asks:
                self._output.append("A thread has stopped, or is looked at: see `where`.\n(Pdb) ")
                return
            self._is_over = False
        thread = threading.Thread(
            target=self._look, args=(idents,), name="launchpad-debugger", daemon=True
        )
        thread.start()

    def _look(self, idents: Collection[int] | None) -> None:
        try:
            debugger = _LookingPdb(self, idents)
            first = threading.main_thread().name if idents is None else self.runtime.name
            if (frame := debugger.find(first)) is not None:
                debugger.interaction(frame, None)
        finally:
            self.end()

    @contextlib.contextmanager
    def turn(self, stopped: FrameType | None) -> Iterator[None]:
        """Has the calling thread write and ask in a block; `stopped`: where it has stopped, if so."""
        with self._turn:
            with self._changed:
                self._is_over = False
            if stopped is not None:
                name = threading.current_thread().name
                self.write(f"--- {self.runtime.name}, {name}\n")
                self.runtime.say(Debugged, f"{stopped.f_code.co_filename}:{stopped.f_lineno}")
            yield

    def exchange(self, line: str | None) -> dict[str, Any]:
        """Takes a line; returns the output, when a line is awaited, it is over, or time has passed."""
        self._tell_alive()
        with self._changed:
            if line is not None:
                self._lines.append(f"{line}\n")
                self._asks = False
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._asks or self._is_over, _TURN_S)
            text, self._output = "".join(self._output), []
            return {"output": text, "asks": self._asks, "over": self._is_over}

    def end(self) -> None:
        with self._changed:
            self._is_over, self._asks = True, False
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
        if self.runtime.setup.liveness != Liveness():
            self.runtime.say(Debugged, "")


class _StoppedPdb(pdb.Pdb):
    """The debugger of a thread that has stopped."""

    def __init__(self, lines: NodeDebugger) -> None:
        stream = cast("TextIO", lines)
        super().__init__(skip=_OURS, stdin=stream, stdout=stream, nosigint=True, readrc=False)
        self._lines = lines
        self._stops = True

    def interaction(self, frame: FrameType | None, *of_exception: Any) -> None:
        with self._lines.turn(frame if self._stops else None):
            super().interaction(frame, *of_exception)

    def get_stack(self, f: FrameType | None, t: Any) -> Any:
        """Leaves out what runs the node, below the code of the user."""
        stack, index = super().get_stack(f, t)
        begin = next((i for i in range(index) if _is_of_user(stack[i][0])), index)
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


def _is_of_user(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return is_of_user(file) and file != "<string>"  # how an agent is started


class _LookingPdb(_StoppedPdb):
    """Looks at threads that run on."""

    def __init__(self, lines: NodeDebugger, idents: Collection[int] | None) -> None:
        super().__init__(lines)
        self._stops, self._idents = False, idents
        self.reset()

    def setup(self, f: FrameType | None, tb: Any) -> Any:
        with frames_of_threads():  # it walks along the stack
            return super().setup(f, tb)

    def find(self, wanted: str) -> FrameType | None:
        """Returns the innermost frame of the user in a thread; "": writes where all of them are."""
        for ident, name, stack in walk_threads(self._idents):
            if ident is None:  # a task
                continue
            users = [each for each in stack if _is_of_user(each[0])]
            frame, line = (users or stack)[-1]
            if name == wanted:
                return frame
            if not wanted:
                self.message(f"{name}  {frame.f_code.co_filename}:{line} {frame.f_code.co_name}")
        if wanted:
            self.error(f"no thread is {wanted!r}: see `threads`")
        return None

    def do_threads(self, arg: str) -> None:  # noqa: ARG002
        """List the threads of the node."""
        self.find("")

    def do_thread(self, arg: str) -> None:
        """Look at another thread, or again at this one, where it is now: thread NAME."""
        if (frame := self.find(arg)) is not None:
            self.setup(frame, None)
            self.print_stack_entry(self.stack[self.curindex])

    def _refuse(self, arg: str, temporary: Any = 0) -> Any:  # noqa: ARG002
        """Stops and steps: not for threads that run on."""
        self.message(_RUNS_ON)

    do_n = do_next = do_s = do_step = do_r = do_return = do_unt = do_until = _refuse
    do_j = do_jump = do_b = do_break = do_tbreak = do_run = do_restart = do_debug = _refuse


_debuggers: "weakref.WeakKeyDictionary[NodeRuntime, NodeDebugger]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def debugger_of(runtime: NodeRuntime) -> NodeDebugger:
    with _lock:
        return _debuggers.setdefault(runtime, NodeDebugger(runtime))


def debug(runtime: NodeRuntime, idents: Collection[int] | None, argument: str | None) -> Any:
    """Answers the question `debug`: begins with None; "" is for more output, others are a line, after `=`."""
    debugger = debugger_of(runtime)
    if argument is None:
        debugger.look(idents)
    return debugger.exchange(argument[1:] if argument else None)
