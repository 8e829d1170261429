"""A program in a Slurm job, as seen from outside of it: from the process that submitted it, or later.

All that this process knows comes from the folder of the run and from Slurm. The program does not
depend on it: when it goes, the job continues.
"""

import contextlib
import dataclasses
import logging
import math
import queue
import signal
import time
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from launchers import _slurm_client as slurm
from launchers._console import Console, warn
from launchers._logs import log_path
from launchers._slurm_folder import NOTE_S, End, RunFolder
from launchers._watched import WatchedProgram
from launchpad_lite._log_file import FollowedLog
from launchpad_lite.errors import LaunchError
from launchpad_lite.launching import (
    AddressTable,
    LaunchOptions,
    LaunchPlan,
    NodeFailure,
    NodeStatus,
    Outcome,
    ProgramResult,
)

if TYPE_CHECKING:
    from launchers._slurm_script import JobState

#: Seconds between two looks into the folder.
_LOOK_S = 0.25
#: Seconds between two questions to Slurm, whose controller serves the whole cluster: at first, later,
#: and while the supervisor shows that it is well.
_FIRST_QUESTION_S, _QUESTION_S, _RARE_QUESTION_S = 1.0, 10.0, 30.0
#: Seconds after which a supervisor that writes nothing may have ended.
_SILENT_S = 3 * NOTE_S
#: Seconds until a network drive shows what a job has written that is over.
_FOLDER_S = 5.0
#: The same where Slurm says that it ended well, so that there is a result: NFS may take so long.
_RESULT_S = 35.0
#: Seconds that a program may take beyond its notice, or to be killed, until Slurm ends the job.
_PATIENCE_S = 20.0
_KILL_S = 5.0
#: Seconds for a job to end that is cancelled because its launch was interrupted.
_CANCEL_S = 10.0
#: Seconds in which a job tells where its threads are.
_STACKS_S = 15.0
#: How much of the job's own output is shown with a failure.
_LAST_BYTES = 2000

_LOGGER = logging.getLogger(__name__)


class SlurmProgram(WatchedProgram):
    """A program in a job.

    Attributes:
        job: Its number.
        folder: Of the run.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        options: LaunchOptions,
        folder: RunFolder,
        job: str,
        *,
        is_launch: bool = True,
    ) -> None:
        """Prepares to watch it.

        Args:
            plan: Work is not needed.
            options: How it was launched.
            folder: Of the run.
            job: Its number.
            is_launch: Whether this process launched it: it tells what happens, and its end waits
                for that of the program.
        """
        tells = is_launch and not options.quiet
        super().__init__(plan, options, folder.logs, is_launch=is_launch, tells_logs=tells)
        self.job = job
        self.folder = folder
        self._output = FollowedLogs(folder, plan) if tells else None
        self._table: AddressTable | None = None
        self._state: JobState | None = None
        #: Whether Slurm said that it does not know the job (any more).
        self._is_forgotten = False
        #: Put from signal handlers, too: only a SimpleQueue allows that.
        self._asked: queue.SimpleQueue[tuple[str, int | None] | None] = queue.SimpleQueue()
        self._stop: tuple[str, int | None] | None = None
        self._cancel_at = math.inf

    # What a RunningProgram can do

    def request_stop(self, reason: str, signum: int | None = None) -> None:
        """Asks all nodes to end; a job that is pending is cancelled."""
        self._asked.put((reason, signum))

    def kill(self) -> None:
        """Ends all nodes by force."""
        self._is_in_hurry = True
        self._asked.put(None)

    def status(self) -> list[NodeStatus]:
        """Returns how each node was a few seconds ago."""
        if (state := self._state) is not None and state.waits:
            known = []  # those of an earlier run of the job
        else:
            known = self.folder.read_status()
        before = "pending" if state is not None and state.waits else "starting"
        return known or [
            NodeStatus(each.name, before, "", None, {}) for each in self.plan.executables
        ]

    def stacks(self) -> Mapping[str, str]:
        """Returns where the threads of each node are, by `label[replica]`: user code first.

        Raises:
            LaunchError: The job is pending, has ended, or does not answer.
        """
        question = uuid.uuid4().hex
        self.folder.ask_for_stacks(question)
        give_up_at = time.monotonic() + _STACKS_S
        while (found := self.folder.read_stacks(question)) is None:
            if self.join(_LOOK_S) or time.monotonic() > give_up_at:
                raise LaunchError(f"job {self.job} does not tell where its threads are")
        return found

    def _give_up(self, error: BaseException) -> None:
        super()._give_up(error)
        self._ended.wait(_CANCEL_S)  # the job is cancelled

    # Its thread

    def _broken(self, error: BaseException) -> ProgramResult:
        return self._failed(f"{type(error).__name__}: {error}")

    def _close(self, result: ProgramResult) -> None:
        if self._output is not None:
            self._output.finish()
        if self._table is not None:
            self._table.clients.close(f"program {self.plan.program!r} has ended: {result.summary}")

    def _follow(self) -> ProgramResult:
        ask_at, pause_s, over_at = 0.0, _FIRST_QUESTION_S, math.inf
        stamp, changed_at = None, -math.inf
        while True:
            if self._output is not None:
                self._output.show()
            self._learn_addresses()
            now = time.monotonic()
            if stamp is not None and not self.plan.addresses:
                self._is_known.set()  # it runs, and cannot be called from here
            if stamp != (stamp := self.folder.stamp("status")):
                changed_at = now
            elif changed_at != -math.inf and now > changed_at + _SILENT_S:
                changed_at, ask_at, pause_s = -math.inf, now, _FIRST_QUESTION_S
            if now >= ask_at:
                before = self._state
                self._ask()
                if self._state != before:
                    self._tell_state()
                    pause_s = _FIRST_QUESTION_S
                ask_at = now + pause_s
                is_well = changed_at != -math.inf
                pause_s = min(pause_s * 1.5, _RARE_QUESTION_S if is_well else _QUESTION_S)
                if self._is_over:
                    over_at = min(over_at, now)
                else:
                    over_at = math.inf
            if over_at < math.inf:
                self.folder.refresh()
            if (end := self.folder.read_end()) is not None:
                if (result := self._result_of(end)) is not None:
                    return result
                ask_at = min(ask_at, now + _FIRST_QUESTION_S)
            if (failure := self.folder.read("failure")) is not None and self._table is None:
                self._failure = self._explained(failure.decode(errors="replace"))
                return self._failed(self._failure)
            ended_well = self._state is not None and self._state.state == "COMPLETED"
            if now > over_at + (_RESULT_S if ended_well else _FOLDER_S):
                return self._conclude()
            if now > self._cancel_at:
                self._cancel_at = math.inf
                self._attempt(lambda: slurm.cancel(self.job))
            with contextlib.suppress(queue.Empty):
                self._obey(self._asked.get(timeout=_LOOK_S))
                ask_at = 0.0

    def _ask(self) -> None:
        try:
            self._state = slurm.look_at(self.job)
            self._is_forgotten = self._state is None
        except slurm.SlurmError as error:
            # A controller that restarts is no end of the program.
            _LOGGER.debug("job %s: %s", self.job, error)

    @property
    def _is_over(self) -> bool:
        return self._is_forgotten or (self._state is not None and self._state.is_over)

    def _tell_state(self) -> None:
        state = self._state
        if state is not None and state.waits:
            self._tell(f"job {self.job} is {state.state.lower()} ({state.reason})")
        elif state is not None and state.is_over and state.state != "COMPLETED":
            self._tell(f"job {self.job} ended: {state.describe()}")
        elif state is not None and state.state == "RUNNING":
            self._tell(f"job {self.job} runs; its first host is {state.batch_host}")

    def _learn_addresses(self) -> None:
        table = self.folder.read_new_addresses()
        if table is None:
            return
        if self._table is not None and self._table.secret == table.secret:
            self._table.clients.note_moved(self._table.move(table.endpoints))
            return
        if self._table is not None:
            # The job has started again: the old servers are gone, and so is their secret.
            self._table.clients.close("its job has started again; make a new client")
        self._table = table
        for address in self.plan.addresses:
            address.bind(table)
        self._is_known.set()

    def _result_of(self, end: End) -> ProgramResult | None:
        """Returns how the program ended; None if it is not known whether that is for good."""
        result, state = end.result, self._state
        if result.signum == signal.SIGTERM and self._stop is None and state is not None:
            # Slurm did it: it may be about to start the job again.
            if not state.is_over:
                return None
            reason = f"{result.reason}: job {self.job} is {state.describe()}"
            result = dataclasses.replace(result, reason=reason)
        self._crash_dir = end.crash_dir
        return result

    def _obey(self, asked: tuple[str, int | None] | None) -> None:
        """Passes on to the job that it is to end."""
        now = time.monotonic()
        self._ask()
        if asked is not None and self._stop is None:
            self._stop = asked
            with contextlib.suppress(OSError):
                self.folder.write_stop(*asked)
        if self._is_over:
            return
        if (self._state is not None and self._state.waits) or self.folder.read("begun") is None:
            self._attempt(lambda: slurm.cancel(self.job))
        elif asked is None:
            self._stop = self._stop or ("kill() was called", None)
            self._attempt(lambda: slurm.signal_script(self.job, "QUIT"))
            self._cancel_at = min(self._cancel_at, now + _KILL_S)
        else:
            self._attempt(lambda: slurm.signal_script(self.job, "INT"))
            if self._options.notice_s >= 0:
                limit = now + self._options.notice_s + _PATIENCE_S
                self._cancel_at = min(self._cancel_at, limit)

    def _attempt(self, do: Callable[[], None]) -> None:
        try:
            do()
        except slurm.SlurmError as error:
            warn(_LOGGER, "job %s: %s", self.job, error)
            self._cancel_at = time.monotonic() + _KILL_S  # and again, until it is gone

    def _conclude(self) -> ProgramResult:
        """Returns how a program ended of which there is no word."""
        state = self._state
        if self._stop is not None:
            reason, signum = self._stop
            outcome = Outcome.STOPPED if signum is None else Outcome.INTERRUPTED
            if self._table is None:
                self._failure = f"{reason}; job {self.job} was cancelled"
            return ProgramResult(outcome, reason=reason, signum=signum)
        if state is None:
            how = "Slurm does not know it any more, and it left no result"
        elif self.folder.read("begun") is None:
            how = (
                f"{state.describe()}. Its script did not begin: does every host of the cluster see "
                f"{self.folder.path}, and the Python that it names? Name another folder in folder=, "
                "another interpreter in python="
            )
        elif (failure := self.folder.read("failure")) is not None:
            how = failure.decode(errors="replace")  # of a job that could not start again
        else:
            how = f"Slurm ended it: {state.describe()}"
        text = self._explained(f"job {self.job}: {how}")
        if self._table is None:
            self._failure = text
        return self._failed(text)

    def _failed(self, text: str) -> ProgramResult:
        host = self._state.batch_host if self._state is not None else ""
        summary = text.splitlines()[0]
        failure = NodeFailure(
            f"job {self.job}", host or "Slurm", summary, last_output=self._last_words()
        )
        return ProgramResult(Outcome.FAILED, (failure,), summary)

    def _explained(self, text: str) -> str:
        return f"{text}\nThe job's own output is in {self.folder.output}"

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            return self.folder.output.read_bytes()[-_LAST_BYTES:].decode(errors="replace")
        return ""


class FollowedLogs:
    """Shows what nodes print as their files grow."""

    def __init__(self, folder: RunFolder, plan: LaunchPlan) -> None:
        self._logs = {
            each.name: FollowedLog(log_path(folder.logs, each.name)) for each in plan.executables
        }
        self._console = Console()

    def show(self) -> None:
        """Shows what is new."""
        for node, log in self._logs.items():
            for data in log.read():
                self._console.show(node, data)

    def finish(self) -> None:
        """Shows the rest."""
        for node, log in self._logs.items():
            for data in log.finish():
                self._console.show(node, data)
            self._console.finish(node)
