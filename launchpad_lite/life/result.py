"""The result of a program, as data."""

import enum
import errno
import os
import re
import signal
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import courier
from courier import ExceptionReport
from courier.lowlevel import shortened

#: Python's message when the system gives no more threads.
_NO_THREAD = "can't start new thread"
_ADVICE = (
    ": this user, or container, may have no more processes and threads. "
    "Raise the limit (ulimit -u, pids.max, TasksMax=), or run less"
)
_PDB = re.compile(r'File ".*[/\\]pdb\.py", line')
_NO_DEBUGGER = (
    ": its debugger has ended, because processes of nodes have no terminal. breakpoint() has that of "
    "the launch; see docs/debugging.md"
)


def advice_on(error: BaseException) -> str:
    """Returns advice for an error: how to get more processes or threads, if it is about these."""
    is_process = isinstance(error, OSError) and error.errno == errno.EAGAIN
    is_thread = isinstance(error, RuntimeError) and str(error) == _NO_THREAD
    return _ADVICE if is_process or is_thread else ""


#: How many of the last calls of a node a failure shows.
MOST_CALLS = 10
#: The reason for ending a program whose result the script has.
WORK_DONE = "the work that it was launched for is done"


class Outcome(enum.Enum):
    """Why a program ended."""

    COMPLETED = "completed"  # every node that had something to run has ended; or `RunningProgram.complete()`
    STOPPED = "stopped"  # `lp.stop()`, or `RunningProgram.stop()`
    FAILED = "failed"  # a node failed
    INTERRUPTED = "interrupted"  # a signal


@dataclass(frozen=True)
class NodeFailure:
    """How one node failed.

    Attributes:
        node: `label[replica]`.
        host: Where it ran.
        summary: One line: what happened.
        report: The exception, if it raised one.
        exit_status: As of `subprocess`: negative for a signal; None for a thread.
        is_consequence: Whether it failed only because another node was gone.
        last_output: The last lines it printed, if its process died without a report.
        stacks: Where its threads were, if it was hung.
        calls: The last calls that it answered and made, a line each.
        attempt: How many restarts of the node came before.
        at_s: Seconds after the launch.
        restarts: Its restarts, if its policy allowed no more.
        host_lost: Whether only the loss of its host is known; `summary` says how.

    Example:
        result = running.stop()
        for failure in result.failures:
            print(failure.node, failure.summary)
    """

    node: str
    host: str
    summary: str
    report: ExceptionReport | None = None
    exit_status: int | None = None
    is_consequence: bool = False
    last_output: str = ""
    stacks: str = ""
    calls: str = ""
    attempt: int = 0
    at_s: float = 0.0
    restarts: "tuple[Restart, ...]" = ()
    host_lost: bool = False

    @classmethod
    def of_exception(cls, node: str, host: str, report: ExceptionReport) -> "NodeFailure":
        message = report.message.strip().splitlines()
        summary = f"{report.type_name}: {message[0]}" if message else report.type_name
        summary = shortened(summary, 1000)
        # Since Python 3.14 a debugger that has no more input ends with SystemExit.
        left_pdb = summary == "SystemExit: 1" and _PDB.search(report.traceback)
        if left_pdb or summary == "bdb.BdbQuit":
            summary += _NO_DEBUGGER
        elif summary == f"RuntimeError: {_NO_THREAD}":
            summary += _ADVICE
        return cls(node, host, summary, report, is_consequence=_is_consequence(report))

    @classmethod
    def of_exit(
        cls,
        node: str,
        host: str,
        status: int,
        *,
        last_output: str = "",
        peak_mib: float | None = None,
        out_of_memory: bool = False,
    ) -> "NodeFailure":
        """Describes a worker process that ended without a report; `status` as of `subprocess`."""
        if status < 0:
            name = signal.Signals(-status).name if -status in set(signal.Signals) else str(-status)
            text = f"its process was killed by {name}"
            if -status == signal.SIGKILL and out_of_memory:
                text = "its process was killed by SIGKILL: out of memory"
            if -status == signal.SIGKILL and peak_mib is not None:
                text += f" (it had up to {peak_mib:,.0f} MiB)"
        else:
            text = f"its process ended by itself with exit code {status}"
            text += ", to start again" if status == os.EX_TEMPFAIL else ""
        return cls(node, host, text, exit_status=status, last_output=last_output)

    def headline(self) -> str:
        """One line for people."""
        return f"{self.node} on {self.host} failed: {self.summary}"

    def describe(self) -> str:
        """The headline, and the details of the cause."""
        return "\n\n".join([self.headline(), *self.details()])

    def details(self) -> list[str]:
        parts = []
        if self.report is not None:
            parts.append(indented(self.report.traceback))
        if self.stacks:
            parts.append(f"Its threads were here:\n\n{indented(self.stacks)}")
        if self.report is None:
            parts += self.last_calls()
        if self.last_output:
            parts.append(f"The last lines it printed:\n\n{indented(self.last_output)}")
        if self.restarts:
            lines = "\n".join(restart.describe() for restart in self.restarts)
            parts.append(
                f"Its restart policy allows no more than {len(self.restarts)}; they were after:\n\n"
                f"{lines}"
            )
        return parts

    def last_calls(self) -> list[str]:
        head = "Its last calls began, in seconds before its end:"
        return [f"{head}\n\n{indented(self.calls)}"] if self.calls else []


_MAX_NAMED = 3  # nodes of a lost host that a headline names


def gathered(failures: Iterable[NodeFailure]) -> list[list[NodeFailure]]:
    """Groups nodes that were lost with one host, at the first of them; others stay alone."""
    groups: dict[object, list[NodeFailure]] = {}
    for number, each in enumerate(failures):
        key = (each.host, each.summary) if each.host_lost else number
        groups.setdefault(key, []).append(each)
    return list(groups.values())


def headline(group: Sequence[NodeFailure]) -> str:
    """Returns one line for people, for failures that belong together."""
    nodes = named([each.node for each in group], _MAX_NAMED)
    return f"{nodes} on {group[0].host} failed: {group[0].summary}"


def named(names: Sequence[str], most: int) -> str:
    """Returns names for people; of many, the first, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def description(group: Sequence[NodeFailure]) -> str:
    """Returns the headline, and the details of the cause, once."""
    first, *others = group
    if not others:
        return first.describe()
    names = ", ".join(each.node for each in group)
    names = textwrap.fill(names, 98, break_long_words=False, break_on_hyphens=False)
    parts = [
        f"{len(group)} nodes on {first.host} failed: {first.summary}",
        f"They were:\n\n{indented(names)}",
    ]
    for each in group:
        parts += [f"{each.node}: {detail}" for detail in each.details()]
    return "\n\n".join(parts)


@dataclass(frozen=True)
class Restart:
    """A node was restarted.

    Attributes:
        node: `label[replica]`.
        attempt: 1 for the first restart of this node.
        at_s: Seconds after the launch at which it had ended.
        delay_s: Seconds until it was restarted.
        failure: How it had ended; None if it ended well and is always restarted.

    Example:
        for restart in running.stop().restarts:
            print(restart.node, restart.attempt, restart.delay_s, restart.failure)
    """

    node: str
    attempt: int
    at_s: float
    delay_s: float
    failure: NodeFailure | None

    def describe(self) -> str:
        """One line for people."""
        why = "it had ended well" if self.failure is None else self.failure.summary
        return f"{self.at_s:8.1f} s  {self.node}: {why}"


def indented(text: str) -> str:
    return textwrap.indent(text.rstrip(), "  ")


#: Errors of calls whose other side was lost: no failure of the caller's own.
CONSEQUENCES = (courier.ServerGoneError, courier.CallCancelledError)
_NAMES = frozenset(
    f"{kind.__module__}.{kind.__qualname__}"
    for kind in (*courier.ServerGoneError.__subclasses__(), courier.CallCancelledError)
)


def _is_consequence(report: ExceptionReport) -> bool:
    # `raise MyError(...) from error` names its cause itself.
    return not _NAMES.isdisjoint((report.type_name, *report.causes))


@dataclass(frozen=True)
class ProgramResult:
    """How a program ended.

    Attributes:
        outcome: Why it ended.
        failures: The first cause first, then what followed.
        reason: The cause of its end, as text.
        signum: The signal, when interrupted.
        killed: Nodes that did not end within the notice and were ended by force; threads, which
            cannot be, were left behind.
        restarts: The restarts of nodes, in order; of very many, the newest.
        cut_short: Nodes that ended, without failing, by a call that failed while the program
            stopped. Their unsent results are lost.

    Example:
        result = running.wait()
        assert result.outcome is lp.Outcome.COMPLETED, result.reason
    """

    outcome: Outcome
    failures: tuple[NodeFailure, ...] = ()
    reason: str = ""
    signum: int | None = None
    killed: tuple[str, ...] = ()
    restarts: tuple[Restart, ...] = ()
    cut_short: tuple[NodeFailure, ...] = ()

    @property
    def summary(self) -> str:
        """One line: how it ended, and why."""
        return f"{self.outcome.value}, {self.reason}"

    @property
    def exit_code(self) -> int:
        """0 for a normal end and `lp.stop`, 128 + n for signal n, 1 for a failure."""
        if self.outcome is Outcome.FAILED:
            return 1
        if self.outcome is Outcome.INTERRUPTED and self.signum is not None:
            return 128 + self.signum
        return 0
