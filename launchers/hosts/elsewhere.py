"""The common part of supervisors that run in a job or in a pod, and of programs that watch them.

Processes that watch a program get its state and send their questions through a channel: files that both
sides see, or the log and the annotations of a pod.
"""

import abc
import contextlib
import json
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from launchers.hosts.orders import Order
from launchers.hosts.shipping import Shipment
from launchers.supervision.watched import WatchedProgram
from launchpad_lite.errors import LaunchError, LaunchpadError
from launchpad_lite.launching import LOOK_S, LaunchPlan, Outcome, ProgramResult, RunningProgram
from launchpad_lite.process.signal_waker import SIGNAL_WAKER

#: Exit code of a supervisor that could not do its work.
FAILED = 1
#: What of a program others may ask.
_ASKED = ("ask", "stacks", "wait_graph", "why")
#: Seconds between two checks for an answer.
_LOOK_S = 0.25


@dataclass(frozen=True)
class ProgramEnd:
    """How a program ended."""

    result: ProgramResult
    stacks: Mapping[str, str] = field(default_factory=dict)  # unless a folder holds them
    crash_dir: Path | None = None


class ProgramElsewhere(WatchedProgram):
    """A program whose supervisor runs elsewhere, and answers questions within `answer_s`."""

    answer_s: float
    launcher: str

    def detach(self, kind: str, reference: str, how: str) -> None:
        """Counts it as ended here, where it is not watched, and tells how to find it."""
        self._result = ProgramResult(
            Outcome.COMPLETED, reason=f"it continues as {kind} {reference}"
        )
        self._ended.set()
        command = f"python -m launchpad_lite.launch --launcher={self.launcher}"
        print(f"{kind} {reference} {how}")  # noqa: T201 - for the user
        for verb in ("status", "logs", "stop"):
            print(f"  {command} {verb} {reference}")  # noqa: T201

    def ask(
        self,
        question: str,
        argument: Any = None,
        *,
        nodes: Collection[str] | None = None,
        timeout_s: float = LOOK_S,
    ) -> Mapping[str, Any]:
        """Returns what nodes answer to a question; LaunchError if no supervisor answers."""
        only = None if nodes is None else sorted(nodes)
        asked = {"question": question, "argument": argument, "nodes": only, "timeout_s": timeout_s}
        found: Mapping[str, Any] = self._answer_to("ask", timeout_s, **asked)
        return found

    def stacks(self) -> Mapping[str, str]:
        found: Mapping[str, str] = self._answer_to("stacks")
        return found

    def why(self) -> str:
        return str(self._answer_to("why"))

    def wait_graph(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._answer_to("wait_graph")
        return found

    def _answer_to(self, method: str, more_s: float = 0.0, /, **arguments: Any) -> Any:
        question = json.dumps([secrets.token_hex(8), method, arguments])
        with self._asking:  # a supervisor knows only the newest question
            self._ask_supervisor(question)
            give_up_at = time.monotonic() + self.answer_s + more_s
            while (found := self._answer(question)) is None:
                if self.join(_LOOK_S) or time.monotonic() >= give_up_at:
                    raise LaunchError(f"{self.plan.program!r} has no answer from its supervisor")
        answer = json.loads(found)
        if answer["error"]:
            raise LaunchError(answer["error"])
        return answer["value"]

    @abc.abstractmethod
    def _ask_supervisor(self, question: str) -> None:
        """Sends a question to the supervisor."""

    @abc.abstractmethod
    def _answer(self, question: str) -> str | None:
        """Returns the answer to a question; None: there is none yet."""


class SupervisorChannel(abc.ABC):
    """Carries messages of a supervisor, which looks for them every `look_s`, and its watchers."""

    look_s: float

    @abc.abstractmethod
    def tell(self, program: RunningProgram) -> None:
        """Reports the state of a program, as often as the channel allows; ends a program that no process waits for."""

    @abc.abstractmethod
    def question(self) -> str:
        """Returns the newest question; "" if there is none."""

    @abc.abstractmethod
    def answer(self, question: str, text: str) -> None:
        """Sends the answer to a question."""

    @abc.abstractmethod
    def fail(self, text: str) -> None:
        """Reports that the program could not be started, and why."""

    @abc.abstractmethod
    def end(self, end: ProgramEnd) -> None:
        """Reports how the program ended. Nothing is reported after it."""


class StopSignals:
    """Handles signals that ask this process to end; `received` are those that have come so far."""

    def __init__(self, obey: Mapping[int, Callable[[RunningProgram], None]] | None = None) -> None:
        """Handles SIGTERM and SIGINT as programs do, and the signals in `obey` as that says."""
        self.received = set[int]()
        self._obey = obey or {}
        self._program: RunningProgram | None = None
        for signum in {signal.SIGTERM, signal.SIGINT, *self._obey}:
            signal.signal(signum, self._handle)
        SIGNAL_WAKER.install()

    def guard(self, program: RunningProgram) -> None:
        """Makes signals stop this program from now on; until now they stopped its start."""
        self._program = program

    def _handle(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002 - as Python calls it
        self.received.add(signum)
        if self._program is None:
            # SystemExit undoes what was started so far.
            sys.exit(128 + signum)
        if (do := self._obey.get(signum)) is not None:
            do(self._program)
        else:
            self._program.handle_signal(signum)


def supervise(
    order: Order,
    members: dict[str, bytes],
    launch: Callable[[LaunchPlan, Shipment], RunningProgram],
    channel: SupervisorChannel,
    signals: StopSignals,
) -> RunningProgram | None:
    """Starts a program and tells those who watch it of its state; returns it when it has ended.

    None: it could not be started, which the channel was told.
    """
    from launchers.host.agent import allow_many_files  # not for programs that only watch

    allow_many_files()
    order.stand_in()
    try:
        program = launch(order.with_work(members), order.shipment(members))
    except LaunchpadError as error:
        channel.fail(str(error))
        return None
    signals.guard(program)
    asked = ""

    def reply(question: str) -> None:
        with contextlib.suppress(OSError):
            channel.answer(question, answer_for(program, question))

    while True:
        # A disk that is full for a while must not end the program.
        with contextlib.suppress(OSError):
            channel.tell(program)
            if (question := channel.question()) not in ("", asked):
                asked = question
                # A profile may take minutes, in which others ask, or end the program.
                name = "launchpad-reply"
                thread = threading.Thread(target=reply, args=(question,), name=name, daemon=True)
                with contextlib.suppress(RuntimeError):  # the system gives no more: no answer comes
                    thread.start()
        if program.join(channel.look_s):
            return program


def answer_for(program: RunningProgram, question: str) -> str:
    """Returns the answer of a program to a question, of whatever version; neither may end it."""
    value, error = None, ""
    try:
        _, method, arguments = json.loads(question)
        if method not in _ASKED:
            raise LaunchError(f"a supervisor of this version is not asked for {method!r}")
        value = getattr(program, method)(**arguments)
    except LaunchError as refused:
        error = str(refused)
    except Exception as refused:  # noqa: BLE001 - it is reported
        error = repr(refused)
    return json.dumps({"value": value, "error": error})
