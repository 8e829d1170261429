"""The common part of programs that a thread of this process supervises, or watches elsewhere."""

import abc
import logging
import queue
import signal
import threading
from pathlib import Path
from typing import Any

from courier import ExceptionReport
from launchers.supervision.console import show_rest, tell, warn
from launchpad_lite.errors import LaunchError
from launchpad_lite.launching import (
    LaunchOptions,
    LaunchPlan,
    NodeFailure,
    Outcome,
    ProgramResult,
    RunningProgram,
)
from launchpad_lite.life.events import Event, KillAsked, StopAsked

#: The longest single wait of a thread: systems limit it, and a notice may be longer.
_LONGEST_WAIT_S = 3600.0

_LOGGER = logging.getLogger(__name__)


class WatchedProgram(RunningProgram):
    """A program with a thread that follows it until its end."""

    def __init__(
        self,
        plan: LaunchPlan,
        options: LaunchOptions,
        log_dir: Path | None,
        *,
        is_launch: bool = True,
        tells_logs: bool = True,
    ) -> None:
        """Prepares it; a process that launched it prints what happens, and ends only after it."""
        super().__init__(plan)
        self._options = options
        self._log_dir = log_dir
        self._crash_dir: Path | None = None
        self._is_launch = is_launch
        self._tells_logs = tells_logs and not options.quiet
        self._is_in_hurry = False  # whether it was asked to end at once
        self._was_asked = False  # whether this process has asked it to end
        #: Put from any thread and from signal handlers: only a SimpleQueue allows that.
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._asking = threading.Lock()  # one question at a time, to a supervisor elsewhere
        self._result: ProgramResult | None = None
        self._failure: str | None = None  # why it could not be launched
        #: Set when it runs in its job or cluster, and when it has ended.
        self._is_known = threading.Event()
        self._ended = threading.Event()
        # Not a daemon after a launch, so that the interpreter waits for the program before it ends.
        self._thread = threading.Thread(
            target=self._run, name=f"launchpad-{plan.program}", daemon=not is_launch
        )

    def watch(self) -> None:
        self._thread.start()

    def await_up(self) -> None:
        """Waits until it runs, however long it is pending.

        Raises LaunchError if it ended before. After a KeyboardInterrupt, no part of the program is
        left.
        """
        try:
            self._is_known.wait()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                self.handle_signal(signal.SIGINT)  # so that the next one is the second
            else:
                self.request_stop("the launch was interrupted")
            self._join_through_interrupts(self._give_up_s())
            raise
        if self._failure is not None:
            self.join()
            self.collected = True
            raise LaunchError(self._failure)

    def post(self, event: Event) -> None:
        self._events.put(event)

    def request_stop(self, reason: str, signum: int | None = None) -> None:
        self._was_asked = True
        self.post(StopAsked(reason, signum))

    def kill(self) -> None:
        self._is_in_hurry = self._was_asked = True
        self.post(KillAsked())

    @property
    def result(self) -> ProgramResult | None:
        return self._result

    @property
    def log_dir(self) -> Path | None:
        return self._log_dir

    @property
    def crash_dir(self) -> Path | None:
        return self._crash_dir

    def join(self, timeout_s: float | None = None) -> bool:
        # Not Thread.join: if Ctrl-C interrupts it, it counts the thread as ended (Python < 3.13).
        if not self._ended.wait(timeout_s):
            return False
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()
        return True

    def _give_up_s(self) -> float:
        """Returns the seconds that a launch which is given up has to end."""
        return 0.0

    # Its thread

    @abc.abstractmethod
    def _follow(self) -> ProgramResult:
        """Returns how the program ended, when it has."""

    def _broken(self, error: BaseException) -> ProgramResult:
        """Returns how the program ended if following it raised this."""
        failure = NodeFailure.of_exception("supervisor", "this process", ExceptionReport.of(error))
        return ProgramResult(Outcome.FAILED, (failure,), failure.summary)

    def _close(self, result: ProgramResult) -> None:
        """Ends the parts of the program in this process; prints errors."""

    def _run(self) -> None:
        program = self.plan.program
        try:
            result = self._follow()
        except BaseException as error:  # noqa: BLE001 - it is reported
            # An internal error must leave neither nodes nor an endless wait.
            warn(_LOGGER, "the thread that watches %r failed", program, error=error)
            result = WatchedProgram._broken(self, error)
            try:
                result = self._broken(error)
            except Exception as also:  # noqa: BLE001 - it is reported
                warn(_LOGGER, "the failure of %r cannot be described", program, error=also)
        try:
            self._close(result)
            if self._is_launch:
                last = ""  # after a failure, the error says where the logs are
                if self._tells_logs and self._log_dir and result.outcome is not Outcome.FAILED:
                    last = f"{program}: {result.outcome.value}; logs in {self._log_dir}"
                show_rest(self._options.notice_s, lambda: self._is_in_hurry, last)
        except BaseException as error:  # noqa: BLE001 - it is reported
            warn(_LOGGER, "an error at the end of %r", program, error=error)
        if self._fails_launch(result):
            self._failure = self._why(result)
        self._result = result
        self._ended.set()
        self._is_known.set()

    def _fails_launch(self, result: ProgramResult) -> bool:
        """Returns whether the launch has failed, by this end. A launch that another process stops has not."""
        others_stopped_it = result.outcome is Outcome.STOPPED and not self._was_asked
        ends_well = result.outcome is Outcome.COMPLETED or others_stopped_it
        return not (self._is_known.is_set() or ends_well)

    def _why(self, result: ProgramResult) -> str:
        return result.reason

    def _next(self, timeout_s: float) -> Any:
        """Waits for what other threads post, at most so long; None: nothing came."""
        try:
            return self._events.get(timeout=min(max(timeout_s, 0.0), _LONGEST_WAIT_S))
        except queue.Empty:
            return None

    def _tell(self, text: str) -> None:
        if self._is_launch and not self._options.quiet:
            tell(f"launchpad: {text}")
