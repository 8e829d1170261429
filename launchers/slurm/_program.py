"""A program in a Slurm job, watched by the process that submitted it, or by one that attached later.

This process learns all from the folder of the run and from Slurm. The program does not depend on this
process: when it ends, the job continues.
"""

import contextlib
import dataclasses
import logging
import math
import signal
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from launchers.hosts.elsewhere import ProgramElsewhere, ProgramEnd
from launchers.slurm import _client as slurm
from launchers.slurm._folder import NOTE_S, RunFolder
from launchers.supervision.console import Console, warn
from launchpad_lite.launching import (
    AddressTable,
    LaunchOptions,
    LaunchPlan,
    NodeFailure,
    NodeStatus,
    Outcome,
    ProgramResult,
)
from launchpad_lite.life.events import KillAsked, StopAsked
from launchpad_lite.parts.log_file import FollowedLogs
from launchpad_lite.worker.address import OpenTable

if TYPE_CHECKING:
    from launchers.slurm._script import JobState

#: Seconds between two looks into the folder.
_LOOK_S = 0.25
#: Seconds between two requests to Slurm, whose controller serves the whole cluster: after a change,
#: later, and while the supervisor writes its status regularly.
_FIRST_QUESTION_S, _QUESTION_S, _RARE_QUESTION_S = 1.0, 10.0, 30.0
#: Seconds without a write after which the supervisor may have ended.
_SILENT_S = 3 * NOTE_S
#: Seconds until a network drive shows the last files of a job that has ended.
_FOLDER_S = 5.0
#: The same if Slurm says that the job completed: then there is a result, and NFS may take so long.
_RESULT_S = 35.0
#: Seconds that a program may take beyond its notice, and to be killed, before Slurm ends the job.
_PATIENCE_S = 20.0
_KILL_S = 5.0
#: Seconds in which a job ends after an interrupted launch has cancelled it.
_CANCEL_S = 10.0
_LAST_BYTES = 2000

_LOGGER = logging.getLogger(__name__)


class SlurmProgram(ProgramElsewhere):
    launcher = "slurm"
    answer_s = 15.0

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

        If this process launched it, it tells what happens, and ends only after the program.
        """
        super().__init__(plan, options, folder.logs, is_launch=is_launch)
        self.job = job
        self.folder = folder
        self._logs = FollowedLogs(folder.logs)
        self._console = Console() if is_launch and not options.quiet else None
        self._table: AddressTable | None = None
        #: Stamps of the files that were read last.
        self._addresses_stamp = self._status_stamp = (-1, -1)
        #: Until then the supervisor counts as well, by its last write.
        self._is_well_until = -math.inf
        self._state: JobState | None = None
        #: Whether Slurm said that it does not know the job (any more).
        self._is_forgotten = False
        self._stop: StopAsked | None = None
        self._cancel_at = math.inf

    # What a RunningProgram can do

    def status(self) -> list[NodeStatus]:
        """Returns how each node was a few seconds ago."""
        waits = self._state is not None and self._state.waits
        if not waits:  # else the file is of an earlier run of the job
            known = self.folder.read("status", tuple[NodeStatus, ...])
            if known:
                return list(known)
        before = "pending" if waits else "starting"
        return [NodeStatus(each.name, before, "", None, {}) for each in self.plan.executables]

    def _ask_supervisor(self, question: str) -> None:
        self.folder.write("question", question)

    def _answer(self, question: str) -> str | None:
        answers: Mapping[str, str] = self.folder.read("answer", Mapping[str, str]) or {}
        return answers.get(question)

    def _give_up_s(self) -> float:
        return _CANCEL_S

    # Its thread

    def _close(self, result: ProgramResult) -> None:
        self._show_logs(is_last=True)
        if self._console is not None:
            for each in self.plan.executables:
                self._console.finish(each.name)
        if self._table is not None:
            self._table.clients.close(f"program {self.plan.program!r} has ended: {result.summary}")

    def _follow(self) -> ProgramResult:
        ask_at, pause_s, over_at, was_well = 0.0, _FIRST_QUESTION_S, math.inf, False
        while True:
            now = time.monotonic()
            self._show_logs()
            end = self.folder.read("result", ProgramEnd)
            self._look(now)  # after the result: a program that has ended has written its addresses
            is_well = now < self._is_well_until
            if was_well and not is_well:
                ask_at, pause_s = now, _FIRST_QUESTION_S
            was_well = is_well
            if now >= ask_at:
                before = self._state
                self._ask()
                if self._state != before:
                    self._tell_state()
                    pause_s = _FIRST_QUESTION_S
                ask_at = now + pause_s
                pause_s = min(pause_s * 1.5, _RARE_QUESTION_S if is_well else _QUESTION_S)
                over_at = min(over_at, now) if self._is_over else math.inf
            if self._is_over:
                self.folder.refresh()
            if end is not None:
                if (result := self._result_of(end)) is not None:
                    return result
                ask_at = min(ask_at, now + _FIRST_QUESTION_S)
            if self._table is None and (failure := self.folder.read("failure", str)) is not None:
                return self._failed(failure)
            ended_well = self._state is not None and self._state.state == "COMPLETED"
            if now > over_at + (_RESULT_S if ended_well else _FOLDER_S):
                return self._conclude()
            if now > self._cancel_at:
                self._cancel_at = math.inf
                self._attempt("scancel", self.job)
            if (asked := self._next(_LOOK_S)) is not None:
                self._obey(asked)
                ask_at = 0.0

    def _show_logs(self, *, is_last: bool = False) -> None:
        if self._console is not None:
            for node, data in self._logs.read(is_last=is_last):
                self._console.show(node, data)

    def _look(self, now: float) -> None:
        if (stamp := self.folder.stamp("addresses")) not in (None, self._addresses_stamp):
            if (published := self.folder.read("addresses", OpenTable)) is not None:
                self._addresses_stamp = stamp
                self._learn_addresses(published.table())
        if (stamp := self.folder.stamp("status")) not in (None, self._status_stamp):
            self._status_stamp = stamp
            self._is_well_until = now + _SILENT_S
            if not self.plan.addresses:
                self._is_known.set()  # the program runs, and has no addresses to wait for

    def _learn_addresses(self, table: AddressTable) -> None:
        if self._table is not None and self._table.secret == table.secret:
            self._table.clients.note_moved(self._table.move(table.endpoints))
            return
        if self._table is not None:
            # The job has started again, with new servers and a new secret.
            self._table.clients.close("its job has started again; make a new client")
        self._table = table
        for address in self.plan.addresses:
            address.bind(table)
        self._is_known.set()

    def _ask(self) -> None:
        try:
            self._state = slurm.look_at(self.job)
            self._is_forgotten = self._state is None
        except slurm.SlurmError as error:
            # The controller may only be restarting: that does not end the program.
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

    def _result_of(self, end: ProgramEnd) -> ProgramResult | None:
        """Returns how the program ended; None as long as Slurm may start it again."""
        result, state = end.result, self._state
        if result.signum == signal.SIGTERM and self._stop is None and state is not None:
            # Slurm ended the program, and may be about to start the job again.
            if not state.is_over:
                return None
            reason = f"{result.reason}: job {self.job} is {state.describe()}"
            result = dataclasses.replace(result, reason=reason)
        self._crash_dir = end.crash_dir
        return result

    def _obey(self, asked: StopAsked | KillAsked) -> None:
        now = time.monotonic()
        self._ask()
        if self._stop is None:
            killed = StopAsked("kill() was called")
            self._stop = killed if isinstance(asked, KillAsked) else asked
            with contextlib.suppress(OSError):
                self.folder.write("stop", self._stop)
        if self._is_over:
            return
        waits = self._state is not None and self._state.waits
        if waits or self.folder.stamp("begun") is None:
            self._attempt("scancel", self.job)
        elif isinstance(asked, KillAsked):  # --batch: the signal goes only to the script
            self._attempt("scancel", "--signal=QUIT", "--batch", self.job)
            self._cancel_at = min(self._cancel_at, now + _KILL_S)
        else:
            self._attempt("scancel", "--signal=INT", "--batch", self.job)
            if self._options.notice_s >= 0:
                limit = now + self._options.notice_s + _PATIENCE_S
                self._cancel_at = min(self._cancel_at, limit)

    def _attempt(self, *command: str) -> None:
        try:
            slurm.call(*command)
        except slurm.SlurmError as error:
            warn(_LOGGER, "job %s: %s", self.job, error)
            self._cancel_at = time.monotonic() + _KILL_S  # repeated until the job is gone

    def _conclude(self) -> ProgramResult:
        state, asked = self._state, self._stop
        if asked is not None:
            how = "" if self._is_known.is_set() else f"; job {self.job} was cancelled"
            return ProgramResult(asked.outcome, reason=f"{asked.reason}{how}", signum=asked.signum)
        if state is None:
            how = "Slurm does not know it any more, and it left no result"
        elif self.folder.stamp("begun") is None:
            how = (
                f"{state.describe()}. Its script did not begin: does every host of the cluster see "
                f"{self.folder.path}, and the Python that it names? Name another folder in folder=, "
                "another interpreter in python="
            )
        else:  # a job that could not start again has written a failure
            how = self.folder.read("failure", str) or f"Slurm ended it: {state.describe()}"
        return self._failed(f"job {self.job}: {how}")

    def _failed(self, text: str) -> ProgramResult:
        host = self._state.batch_host if self._state is not None else ""
        summary, last = text.splitlines()[0], b""
        with contextlib.suppress(OSError):
            last = self.folder.output.read_bytes()[-_LAST_BYTES:]
        failure = NodeFailure(
            f"job {self.job}", host or "Slurm", summary, last_output=last.decode(errors="replace")
        )
        text = f"{text}\nThe job's own output is in {self.folder.output}"
        return ProgramResult(Outcome.FAILED, (failure,), text)
