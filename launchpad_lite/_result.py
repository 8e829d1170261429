"""How a program ended, as data."""

import enum
import signal
from dataclasses import dataclass

from courier import ExceptionReport


class Outcome(enum.Enum):
    """Why a program ended."""

    COMPLETED = "completed"  # every node that had something to run has ended
    STOPPED = "stopped"  # `lp.stop()`, or `RunningProgram.stop()`
    FAILED = "failed"  # a node failed
    INTERRUPTED = "interrupted"  # a signal to the launcher


@dataclass(frozen=True)
class NodeFailure:
    """How one node failed.

    Attributes:
        node: `label[replica]`.
        host: Where it ran.
        summary: One line: what happened.
        report: The exception, if it raised one.
        exit_status: As of `subprocess`: negative for a signal; None for a thread.
        is_consequence: Whether it failed only since another node was gone.
    """

    node: str
    host: str
    summary: str
    report: ExceptionReport | None = None
    exit_status: int | None = None
    is_consequence: bool = False

    @classmethod
    def of_exception(cls, node: str, host: str, report: ExceptionReport) -> "NodeFailure":
        """Describes a node whose code raised."""
        message = report.message.strip().splitlines()
        summary = f"{report.type_name}: {message[0]}" if message else report.type_name
        return cls(node, host, summary, report, is_consequence=_is_consequence(report))

    @classmethod
    def of_exit(cls, node: str, host: str, status: int) -> "NodeFailure":
        """Describes a worker process that ended without saying why."""
        if status < 0:
            name = signal.Signals(-status).name if -status in set(signal.Signals) else str(-status)
            text = f"its process was killed by {name}"
            if -status == signal.SIGKILL:
                text += " (somebody killed it, or the machine ran out of memory)"
        else:
            text = f"its process ended by itself with exit code {status}"
        return cls(node, host, text, exit_status=status)

    def headline(self) -> str:
        """One line for people."""
        return f"{self.node} on {self.host} failed: {self.summary}"

    def describe(self) -> str:
        """The headline, and the traceback in the node."""
        if self.report is None:
            return self.headline()
        indented = "".join(
            f"  {line}" for line in self.report.traceback.rstrip().splitlines(keepends=True)
        )
        return f"{self.headline()}\n\n{indented}"


_CONSEQUENCES = frozenset(
    f"courier.errors.{name}"
    for name in ("ServerLostError", "ServerUnreachableError", "CallCancelledError")
)


def _is_consequence(report: ExceptionReport) -> bool:
    return report.type_name in _CONSEQUENCES


@dataclass(frozen=True)
class ProgramResult:
    """How a program ended.

    Attributes:
        outcome: Why it ended.
        failures: The first cause first, then what followed.
        reason: Who or what ended it, for people.
        signum: The signal, when interrupted.
        killed: Nodes that did not end within the notice and were ended by force, or, being
            threads that cannot be, were given up.
    """

    outcome: Outcome
    failures: tuple[NodeFailure, ...] = ()
    reason: str = ""
    signum: int | None = None
    killed: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 for a normal end and `lp.stop`, 128 + n for signal n, 1 for a failure."""
        if self.outcome is Outcome.FAILED:
            return 1
        if self.outcome is Outcome.INTERRUPTED and self.signum is not None:
            return 128 + self.signum
        return 0
