"""The end of a script that launched programs and did not wait for them."""

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable
from types import CodeType
from typing import TYPE_CHECKING, Any, NoReturn

from launchpad_lite.errors import LaunchError
from launchpad_lite.parts.escapes import shown
from launchpad_lite.process.interrupts import is_interactive

if TYPE_CHECKING:
    from launchpad_lite.launching import RunningProgram

#: Programs that the script may not have waited for; kept for the report at exit.
_uncollected: "list[RunningProgram]" = []
# Cleared in a forked child, which has launched none of them.
os.register_at_fork(after_in_child=_uncollected.clear)
_excepthooks: list[Callable[..., object]] = []
_telling: list[BaseException] = []  # an entry for each of our hooks that runs now
_script_failed = threading.Event()  # set when the script ends with an error
_left_behind: list[threading.Thread] = []  # threads of nodes that did not end with their program
_asked_code = [0]  # the last argument of `sys.exit`, since a thread was left behind
_TOOL_ID = 4  # the tool id for `sys.monitoring`, which debuggers, coverage and profilers do not use
_SOON_S = 1.0  # seconds that a script waits before its end for a program that it has just launched


def report_at_exit(running: "RunningProgram") -> None:
    """Makes the interpreter exit with the program's code, unless the script waits for it before."""
    _uncollected[:] = [program for program in _uncollected if not program.collected]
    _uncollected.append(running)
    if not _excepthooks:  # the first launch
        # The last registered function is called first, and then no more can be registered: without
        # this import, nodes as threads could use no executor while the script waits for them.
        import concurrent.futures.thread  # noqa: F401

        threading._register_atexit(_wait_at_exit)  # type: ignore[attr-defined]
    if sys.excepthook is not _tell_of_error:  # one of others may have taken its place since
        _excepthooks.append(sys.excepthook)
        sys.excepthook = _tell_of_error
    if sys.version_info[:2] == (3, 12):
        _wait_when_the_script_ends()


def leave_behind(thread: threading.Thread) -> None:
    """Makes the interpreter exit even if a thread of a node still runs then."""
    _left_behind[:] = [each for each in _left_behind if each.is_alive()]
    _left_behind.append(thread)
    if sys.exit is not _exit:
        sys.exit = _exit


def _exit(status: Any = None, /) -> NoReturn:
    """As `sys.exit`; keeps the code for an end without the interpreter's clean-up."""
    if threading.current_thread() is threading.main_thread():
        note_exit_code(0 if status is None else status if isinstance(status, int) else 1)
    raise SystemExit(status)


def note_exit_code(code: int) -> None:
    _asked_code[0] = code


def _tell_of_error(kind: type[BaseException], error: BaseException, tb: Any) -> None:
    """Prints, after the traceback of a script, that its program continues."""
    _script_failed.set()
    # The error may come from a node. Other hooks may want it unchanged.
    text = "".join(traceback.format_exception(kind, error, tb))
    _telling.append(error)
    try:
        hook = _excepthooks[-len(_telling)]  # one of others may call ours, which stood before it
        if hook is sys.__excepthook__ and (safe := shown(text)) != text:
            print(safe, file=sys.stderr, end="")  # noqa: T201 - as the hook does
        else:
            hook(kind, error, tb)
    finally:
        _telling.pop()
    if _telling:
        return
    names = [repr(each.plan.program) for each in _uncollected if each.result is None]
    if names and isinstance(error, Exception) and not is_interactive():
        text = f"launchpad: the script failed; waiting for {', '.join(names)}. Ctrl-C stops it"
        print(text, file=sys.stderr)  # noqa: T201 - as the traceback


def _wait_at_exit() -> None:
    """Ends programs of prompts and tests, waits for others, and says why these do not end."""
    for program in [each for each in _uncollected if each.result is None]:
        program.before_wait()
        if program.ends_with_script or is_interactive():
            program.request_stop("the interpreter exits")
        elif not program.join(_SOON_S) and _only_serves(program):
            text = f"launchpad: the nodes of {program.plan.program!r} only serve; Ctrl-C stops them"
            print(text, file=sys.stderr)  # noqa: T201 - the script is over
    for program in _uncollected:
        program.join()


def _only_serves(program: "RunningProgram") -> bool:
    try:
        return all(node.state == "serving" for node in program.status())
    except LaunchError:  # the cluster does not answer; this is only a hint
        return False


@atexit.register
def _exit_as_programs_ended() -> None:
    """Gives a script that only launched the exit code of its program.

    Threads that supervise programs are awaited before atexit functions run, so all have ended.
    """
    left = any(thread.is_alive() for thread in _left_behind)
    # The script's own end is known only in part; programs that it has waited for tell more.
    results = [each.result for each in _uncollected if left or not each.collected]
    for program in _uncollected:
        if not program.collected and _failed(program):
            print(f"\n{program.failure()}", file=sys.stderr)  # noqa: T201 - the script's last words
    codes = [result.exit_code for result in results if result is not None]
    code = max(codes, default=0)
    if left and not code:
        code = int(_script_failed.is_set()) or _asked_code[0]
    # The clean-up of the interpreter may hang on a thread that could not be ended, as Reverb's
    # writers.
    if code or left:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # a service may have none
                stream.flush()
        # Exceptions in atexit functions do not change the exit code; this was registered first,
        # when the package was imported, so it runs last and skips nothing.
        os._exit(code)


def _failed(program: "RunningProgram") -> bool:
    from launchpad_lite.life.result import Outcome

    return program.result is not None and program.result.outcome is Outcome.FAILED


def _wait_when_the_script_ends() -> None:
    """Waits for programs a moment before the interpreter begins to end.

    Python 3.12 alone starts no threads after the end of the script, even while it waits for running
    ones (python/cpython#113964 and others); but running programs need threads.
    """
    if threading.current_thread() is not threading.main_thread() or is_interactive():
        return
    # Exists from 3.12 on, unknown to the oldest Python for which types are checked.
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
    tool = _TOOL_ID
    if monitoring.get_tool(tool) is not None:
        return  # this script is watched already
    monitoring.use_tool_id(tool, "launchpad_lite")
    *_, (outermost, _) = traceback.walk_stack(sys._getframe())
    script = outermost.f_code

    def wait(code: CodeType, offset: int, value: object) -> None:  # noqa: ARG001
        if code is not script:
            return
        monitoring.set_events(tool, 0)
        monitoring.set_local_events(tool, script, 0)
        monitoring.free_tool_id(tool)
        if isinstance(value, BaseException) and not isinstance(value, SystemExit):
            _wait_after_the_traceback()
            return
        if isinstance(value, SystemExit) and not isinstance(value.code, int | None):
            # Else the interpreter would print it only after the wait.
            print(value.code, file=sys.stderr)  # noqa: T201 - what sys.exit was given
            value.code = 1
        _wait_at_exit()

    monitoring.register_callback(tool, monitoring.events.PY_RETURN, wait)
    monitoring.set_local_events(tool, script, monitoring.events.PY_RETURN)
    # For sys.exit and errors. There is no such event for single code objects.
    monitoring.register_callback(tool, monitoring.events.PY_UNWIND, wait)
    monitoring.set_events(tool, monitoring.events.PY_UNWIND)


def _wait_after_the_traceback() -> None:
    tell = sys.excepthook

    def tell_and_wait(*error: Any) -> None:
        tell(*error)
        _wait_at_exit()

    sys.excepthook = tell_and_wait
