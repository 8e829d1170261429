"""What supervisors have in common that run elsewhere: in a job, in a pod."""

import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType

from launchpad_lite._flag_values import FlagSnapshot
from launchpad_lite._script import Script
from launchpad_lite._signal_waker import SIGNAL_WAKER
from launchpad_lite.launching import LaunchOptions, LaunchPlan, RunningProgram


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a supervisor is to run. The work of the nodes is beside it: it needs the user's code.

    Attributes:
        plan: What is launched, without work.
        options: How.
        argv: Command line of the launching process.
        script: What that was started with.
        flags: Its absl flags.
        requires: Packages that are needed where nodes run.
        silence_s: Seconds after which a host that says nothing is lost.
    """

    plan: LaunchPlan
    options: LaunchOptions
    argv: tuple[str, ...]
    script: Script
    flags: FlagSnapshot
    requires: Mapping[str, str]
    silence_s: float

    def stand_in(self) -> None:
        """Makes this process as the launching one was, for the user's code."""
        sys.argv[:] = self.argv
        self.script.stand_in()
        self.flags.apply()


class StopSignals:
    """What this process does when it is asked to end.

    Attributes:
        received: What it was asked by, so far.
    """

    def __init__(self, obey: Mapping[int, Callable[[RunningProgram], None]] | None = None) -> None:
        """Sets handlers of SIGTERM, SIGINT and what else is named.

        Args:
            obey: What to do with a program at these signals, other than `handle_signal`.
        """
        self.received = set[int]()
        self._obey = obey or {}
        self._program: RunningProgram | None = None
        for signum in {signal.SIGTERM, signal.SIGINT, *self._obey}:
            signal.signal(signum, self._handle)
        SIGNAL_WAKER.install()

    def guard(self, program: RunningProgram) -> None:
        """Makes signals stop a program, no longer its start."""
        self._program = program

    def _handle(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002 - as Python calls it
        self.received.add(signum)
        if self._program is None:
            # What was started so far is undone on the way out.
            sys.exit(128 + signum)
        if (do := self._obey.get(signum)) is not None:
            do(self._program)
        else:
            self._program.handle_signal(signum)
