"""What all programs have in common that a thread of this process supervises, or watches elsewhere."""

import abc
import logging
import threading
from pathlib import Path

from launchers._console import show_rest, tell, warn
from launchers._run_folder import closing_line
from launchpad_lite.errors import LaunchError
from launchpad_lite.launching import (
    LaunchOptions,
    LaunchPlan,
    NodeFailure,
    Outcome,
    ProgramResult,
    RunningProgram,
)

_LOGGER = logging.getLogger(__name__)


class WatchedProgram(RunningProgram):
    """A program with a thread that knows how it is, and in the end how it ended."""

    def __init__(
        self,
        plan: LaunchPlan,
        options: LaunchOptions,
        log_dir: Path | None,
        *,
        is_launch: bool = True,
        tells_logs: bool = True,
    ) -> None:
        """Prepares it.

        Args:
            plan: What is launched.
            options: How.
            log_dir: Where the output of the nodes is kept, if it is.
            is_launch: Whether this process launched it: it tells what happens, and its end waits
                for that of the program.
            tells_logs: Whether to print at a good end where that output is.
        """
        super().__init__(plan)
        self._options = options
        self._log_dir = log_dir
        self._crash_dir: Path | None = None
        self._is_launch = is_launch
        self._tells_logs = tells_logs
        #: Whether it was asked to end at once.
        self._is_in_hurry = False
        self._result: ProgramResult | None = None
        #: Why it could not be launched.
        self._failure: str | None = None
        #: Set when it runs in its job or cluster, and at the end of all.
        self._is_known = threading.Event()
        self._ended = threading.Event()
        # Not a daemon: an interpreter that has nothing else to do waits for programs that it launched.
        self._thread = threading.Thread(
            target=self._run, name=f"launchpad-{plan.program}", daemon=not is_launch
        )

    def watch(self) -> None:
        """Begins to watch it."""
        self._thread.start()

    def await_up(self) -> None:
        """Waits until it runs, however long it is pending.

        Raises:
            LaunchError: It ended before; says how.
            KeyboardInterrupt: It was interrupted, and nothing of it is left.
        """
        try:
            self._is_known.wait()
        except BaseException as error:
            self._give_up(error)
            raise
        if self._failure is not None:
            self.join()
            self.collected = True
            raise LaunchError(self._failure)

    def detach(self, where: str) -> None:
        """Ends it for this process, which does not watch it: requests to end it do nothing.

        Args:
            where: How it goes on, for people.
        """
        self._result = ProgramResult(Outcome.COMPLETED, reason=f"it continues as {where}")
        self._ended.set()

    @property
    def result(self) -> ProgramResult | None:
        """How the program ended; None while it runs or is pending."""
        return self._result

    @property
    def log_dir(self) -> Path | None:
        """Where the output of the nodes is kept; None if it is not kept here."""
        return self._log_dir

    @property
    def crash_dir(self) -> Path | None:
        """Folder with all that is known of a failure; None without one."""
        return self._crash_dir

    def join(self, timeout_s: float | None = None) -> bool:
        """Waits until all is over."""
        # Not Thread.join: interrupted by Ctrl-C it takes the thread for ended (Python < 3.13).
        if not self._ended.wait(timeout_s):
            return False
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()
        return True

    def _give_up(self, error: BaseException) -> None:  # noqa: ARG002
        """Ends a launch whose caller no longer waits for it."""
        self.request_stop("the launch was interrupted")

    # Its thread

    @abc.abstractmethod
    def _follow(self) -> ProgramResult:
        """Returns how the program ended, when it has."""

    @abc.abstractmethod
    def _broken(self, error: BaseException) -> ProgramResult:
        """Returns how the program ended if following it raised this."""

    def _close(self, result: ProgramResult) -> None:
        """Ends what of the program is in this process; errors are told."""

    def _run(self) -> None:
        try:
            result = self._follow()
        except BaseException as error:  # noqa: BLE001 - it is reported
            # A mistake of ours must leave no nodes behind, nor a wait without end.
            warn(_LOGGER, "what watches %r failed", self.plan.program, error=error)
            text = f"{type(error).__name__}: {error}"
            failure = NodeFailure("supervisor", "this process", text)
            result = ProgramResult(Outcome.FAILED, (failure,), text)
            try:
                result = self._broken(error)
            except Exception as also:  # noqa: BLE001 - it is reported
                warn(_LOGGER, "what %r says of it", self.plan.program, error=also)
        try:
            self._close(result)
            if self._is_launch:
                log_dir = self._log_dir if self._tells_logs else None
                last = closing_line(self.plan.program, result, log_dir)
                show_rest(self._options.notice_s, lambda: self._is_in_hurry, last)
        except BaseException as error:  # noqa: BLE001 - it is reported
            warn(_LOGGER, "the end of %r", self.plan.program, error=error)
        self._result = result
        self._ended.set()
        self._is_known.set()

    def _tell(self, text: str) -> None:
        if self._is_launch and not self._options.quiet:
            tell(f"launchpad: {text}")
