"""For authors of launchers: the contract between a program and where it runs.

A launcher turns a plan into a running program. Yours is found by name through the
entry-point group `launchpad_lite.launchers`:

    [project.entry-points."launchpad_lite.launchers"]
    mine = "my_package.launcher:MyLauncher"

Test it by subclassing `launchpad_lite.testing.LauncherContract`.
"""

import abc
import functools
import inspect
import pkgutil
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from courier.lowlevel import loaded_module, stand_in
from launchpad_lite.errors import (
    LauncherLoadError,
    LaunchError,
    NodeFailedError,
    UnknownLauncherError,
)
from launchpad_lite.graph.freeze import UnfreezableError, freeze
from launchpad_lite.graph.python_process import PythonProcess
from launchpad_lite.graph.resources import Resources
from launchpad_lite.life.policies import Liveness, RestartPolicy, RestartWhen
from launchpad_lite.life.result import WORK_DONE, NodeFailure, Outcome, ProgramResult, Restart
from launchpad_lite.parts.arguments import parameters_of
from launchpad_lite.parts.devices import VISIBLE_DEVICES, visible_devices
from launchpad_lite.parts.log_file import find_logs, read_log
from launchpad_lite.parts.own_packages import refuse_original
from launchpad_lite.parts.settings import check_quantity, did_you_mean
from launchpad_lite.planning.plan import Executable, LaunchPlan
from launchpad_lite.process.flags import parse_script_arguments
from launchpad_lite.process.interrupts import interrupt
from launchpad_lite.process.signal_waker import SIGNAL_WAKER
from launchpad_lite.worker.address import Address, AddressTable

__all__ = [
    "VISIBLE_DEVICES",
    "Address",
    "AddressTable",
    "Executable",
    "Finding",
    "LaunchOptions",
    "LaunchPlan",
    "Launcher",
    "Liveness",
    "NodeFailure",
    "NodeStatus",
    "Outcome",
    "ProgramResult",
    "PythonProcess",
    "Resources",
    "Restart",
    "RestartPolicy",
    "RestartWhen",
    "RunningProgram",
    "UnfreezableError",
    "freeze",
    "get_launcher",
    "installed_launchers",
    "loaded_module",
    "parse_script_arguments",
    "refuse_original",
    "stand_in",
    "visible_devices",
]

GROUP = "launchpad_lite.launchers"
#: The version of `Launcher`, `RunningProgram` and their arguments.
INTERFACE = 1
#: Seconds that nodes have to say what they do.
LOOK_S = 1.5
#: Our own launchers are not looked up among all installed packages, which would double the time
#: until a launch starts an agent. So no other launcher can have these names.
_BUILT_IN = {
    "kubernetes": "launchers.kubernetes:KubernetesLauncher",
    "local_mp": "launchers.process:ProcessLauncher",
    "local_mt": "launchers.thread:ThreadLauncher",
    "slurm": "launchers.slurm:SlurmLauncher",
    "ssh": "launchers.ssh:SshLauncher",
    "test_mp": "launchers.process:QuietProcessLauncher",
    "test_mt": "launchers.thread:CopyingThreadLauncher",
}


@dataclass(frozen=True)
class LaunchOptions:
    """Options of a launch, for every launcher.

    Attributes:
        notice_s: Seconds nodes have to end after they were asked; 0 ends them by force at once,
            below 0 never.
        log_dir: Folder for the output of the nodes, and for reports of a failure; None lets the
            launcher choose.
        quiet: Do not show the output of the nodes.
        log_limit_mib: MiB that are kept of the log of each node: its beginning and its end.
            Infinity: all.
    """

    notice_s: float = 10.0
    log_dir: Path | None = None
    quiet: bool = False
    log_limit_mib: float = 100.0

    def __post_init__(self) -> None:
        limit = check_quantity("log_limit_mib", self.log_limit_mib, positive=True, infinite=True)
        object.__setattr__(self, "log_limit_mib", limit)

    @property
    def log_limit_bytes(self) -> float:
        """The limit of each log in bytes; infinity: none."""
        return self.log_limit_mib * (1 << 20)


@dataclass(frozen=True)
class NodeStatus:
    """A node of a running program.

    Attributes:
        name: `label[replica]`.
        state: `pending` (its job waits for hosts), `starting`, `running`, `serving`, `restarting`,
            `ended`, or `failed`: beyond its policy, so that the program ends.
        host: Where it runs.
        pid: Its process; None before it started.
        endpoints: Where it listens: `host:port` by name of the address.
        restarts: How often it was restarted.
        cpu: Cores that it has kept busy lately, with its child processes; None: not known.
        memory_mib: Main memory that they hold; None: not known.
        waits_for: The reason why a node is pending, if that is known.
        since: When it came into its state, in seconds since 1970; None: not known.
        gpu_memory_mib: GPU memory that it and its child processes hold; None: none, or not known.
    """

    name: str
    state: str
    host: str
    pid: int | None
    endpoints: Mapping[str, str]
    restarts: int = 0
    cpu: float | None = None
    memory_mib: float | None = None
    waits_for: str = ""
    since: float | None = None
    gpu_memory_mib: float | None = None


class Finding(NamedTuple):
    """The result of a check of this machine, for `doctor`.

    Attributes:
        verdict: `ok`; `warn`: some programs would fail; `fail`: all would, of this launcher; `none`:
            what is checked is not here.
        text: What was found, and where.
        remedy: What to do about it.
    """

    verdict: str
    text: str
    remedy: str = ""


class RunningProgram(abc.ABC):
    """A launched program. Thread-safe.

    As a context manager it stops the program at the end of the block and raises what `wait`
    raises.

    Example:
        running = lp.launch(program)
        for node in running.status():
            print(node.name, node.state)
        result = running.stop()
    """

    def __init__(self, plan: LaunchPlan) -> None:
        self.plan = plan
        #: Whether the script knows how the program ended.
        self.collected = False
        #: Whether it is stopped at the end of the script, which otherwise waits for it.
        self.ends_with_script = False
        #: Called at the end of the script, before it waits.
        self.before_wait: Callable[[], object] = lambda: None
        #: The link to its page; None if this process does not serve it.
        self.page_url: str | None = None
        self._interrupts = 0
        #: The time at which this process launched it.
        self._began_at = time.monotonic()

    # Implemented by launchers

    @property
    @abc.abstractmethod
    def result(self) -> ProgramResult | None:
        """How the program ended; None while it runs."""

    @property
    @abc.abstractmethod
    def log_dir(self) -> Path | None:
        """Where the output of the nodes is kept; None if it is not."""

    @property
    def crash_dir(self) -> Path | None:
        """Folder with the reports of a failure; None without one."""
        return None

    @abc.abstractmethod
    def request_stop(self, reason: str, signum: int | None = None) -> None:
        """Asks all nodes to end. Does not block; safe in signal handlers; may be repeated."""

    @abc.abstractmethod
    def kill(self) -> None:
        """Ends all nodes by force. Does not block; safe in signal handlers."""

    @abc.abstractmethod
    def status(self) -> list[NodeStatus]:
        """Returns the state of each node."""

    @abc.abstractmethod
    def join(self, timeout_s: float | None = None) -> bool:
        """Waits until all has ended and is cleaned up; returns whether it has. Raises nothing."""

    def output(self) -> Iterator[tuple[str, bytes]]:
        """Yields the kept output of nodes so far: `label[replica]` and lines.

        Raises:
            LaunchError: It cannot be had.
        """
        for node, path in find_logs(self.log_dir) if self.log_dir is not None else ():
            for line in read_log(path):
                yield node, line

    def follow(self) -> Iterator[tuple[str, bytes]]:
        """Yields the output of nodes, as `output` does, until the program ends.

        Raises:
            LaunchError: It cannot be had.
        """
        return self.output()

    def ask(
        self,
        question: str,
        argument: Any = None,  # noqa: ARG002
        *,
        nodes: Collection[str] | None = None,  # noqa: ARG002
        timeout_s: float = LOOK_S,  # noqa: ARG002
    ) -> Mapping[str, Any]:
        """Returns what nodes answer to a question about themselves, by `label[replica]`.

        For commands and pages; `stacks` and `why` are for users. A node that cannot answer has
        `{"error": text}`; one that does not within `timeout_s` seconds is missing.

        Args:
            question: One of `worker.questions`.
            argument: What JSON can hold.
            nodes: The nodes to ask; None: all.
            timeout_s: Seconds that they have.

        Raises:
            LaunchError: This launcher cannot ask.
        """
        raise LaunchError(f"{self.plan.program!r}: its launcher cannot ask nodes: {question}")

    def stacks(self) -> Mapping[str, str]:
        """Returns where the threads of each node are now, by `label[replica]`: user code first.

        Raises:
            LaunchError: This launcher cannot tell.
        """
        raise LaunchError(
            f"{self.plan.program!r}: its launcher cannot tell where the threads of nodes are"
        )

    def why(self) -> str:
        """Returns who waits for whom: deadlocks, what others wait for, and where that is.

        Example:
            print(running.why())  # deadlock: a[0].run → b[0].pong → a[0].ping → ...

        Raises:
            LaunchError: This launcher cannot tell.
        """
        raise LaunchError(f"{self.plan.program!r}: its launcher cannot tell who waits for whom")

    def wait_graph(self) -> Mapping[str, Any]:
        """Returns what `why` says as `text`, and what it is made of, as `why --json` prints it.

        Raises:
            LaunchError: This launcher cannot tell.
        """
        raise LaunchError(f"{self.plan.program!r}: its launcher cannot tell who waits for whom")

    # Called by users

    def profile(self, node: str, seconds: float = 5.0, output: str | Path | None = None) -> str:
        """Returns where the threads of a node compute and wait: the hottest lines, of some seconds.

        Args:
            node: `label[replica]`.
            seconds: How long it takes.
            output: A file to write: flame graph (.svg, .html), .speedscope.json, folded (.txt).

        Raises:
            LaunchError: The node does not answer, or this launcher cannot ask.
            ValueError: The file is of another kind.

        Example:
            print(running.profile("actor[0]", seconds=5, output="actor.svg"))
        """
        from launchpad_lite.launching.flame_graph import take_profile

        return take_profile(self.ask, [node], seconds, output)

    def trace(self, output: str | Path) -> None:
        """Writes a trace of the calls of all nodes to a file, once the program has ended.

        The newest 300,000, and those of the last second of a node that was killed are missing. The
        script waits for it at its end, and a line tells what the file has. See docs/debugging.md.

        Args:
            output: A file for <https://ui.perfetto.dev>: .json or .json.gz.

        Raises:
            ValueError: The file is of another kind.

        Example:
            running = lp.launch(program)
            running.trace("run.json.gz")
        """
        from launchpad_lite.launching.call_trace import RunTrace

        RunTrace(self, output)

    def wait(self, timeout_s: float | None = None) -> ProgramResult:
        """Waits for the end of the program.

        Args:
            timeout_s: Seconds to wait; None waits for ever.

        Returns:
            The result, if the program ended well.

        Raises:
            NodeFailedError: A node failed. Names the first cause, with its traceback.
            TimeoutError: It still runs after `timeout_s`.
            KeyboardInterrupt: SIGINT ended it. One that leaves the script shows no traceback.
            SystemExit: Another signal ended it; the code is 128 + its number.
        """
        if not self._join_through_interrupts(timeout_s):
            raise TimeoutError(f"program {self.plan.program!r} still runs after {timeout_s} s")
        self.collected = True
        result = self.result
        assert result is not None
        if result.outcome is Outcome.FAILED:
            report = result.failures[0].report
            cause = None if report is None else report.rebuild()
            if cause is not None:
                # The message has its traceback, which Python would print once more.
                cause.__cause__ = None
            raise self.failure() from cause
        if result.outcome is Outcome.INTERRUPTED:
            if result.signum == signal.SIGINT:
                raise interrupt()
            raise SystemExit(result.exit_code)
        return result

    def stop(self, timeout_s: float | None = None) -> ProgramResult:
        """Asks all nodes to end and waits until they have. Raises as `wait`."""
        self.request_stop("stop() was called")
        return self.wait(timeout_s)

    def complete(self, timeout_s: float | None = None) -> ProgramResult:
        """Ends a program whose work is done: as `stop`, but the outcome is `COMPLETED`. Raises as `wait`."""
        self.request_stop(WORK_DONE)
        return self.wait(timeout_s)

    def handle_signal(self, signum: int) -> None:
        """Stops the program in order; a second SIGINT ends it at once."""
        if signum == signal.SIGINT:
            self._interrupts += 1
        if self._interrupts > 1:
            self.kill()
        else:
            self.request_stop(signal.Signals(signum).name, signum)

    def failure(self) -> NodeFailedError:
        """Returns the error for a failed program."""
        result = self.result
        assert result is not None
        first, *rest = result.failures
        folder = self.crash_dir or self.log_dir
        return NodeFailedError(first, rest, str(folder or ""))

    def _join_through_interrupts(self, timeout_s: float | None) -> bool:
        SIGNAL_WAKER.install()  # an event loop that has ended may have removed it
        while True:
            try:
                return self.join(timeout_s)
            except KeyboardInterrupt:
                # Where we do not handle signals (notebooks, handlers of users), Ctrl-C arrives here
                # as an exception and means the same.
                self.handle_signal(signal.SIGINT)
                timeout_s = None

    def __repr__(self) -> str:
        result = self.result
        count = len(self.plan.executables)
        nodes = f"{count} node{'' if count == 1 else 's'}"
        running = f"running {time.monotonic() - self._began_at:.0f} s"
        state = running if result is None else result.outcome.value
        return f"RunningProgram({self.plan.program!r}, {nodes}, {state})"

    def _ipython_display_(self) -> None:
        from launchpad_lite.launching.status_table import show

        show(self)

    def __enter__(self) -> "RunningProgram":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self.request_stop("the end of its `with` block")
        if kind is None:
            self.wait()
        else:
            # The error of the block hides that of the program.
            self.join()
            self.collected = True


class _NameOfType:
    """The value of a text attribute that was not set: the name of the type."""

    def __get__(self, instance: object, owner: type) -> str:
        return owner.__name__


class Launcher(abc.ABC):
    """Starts programs, and finds running ones again."""

    #: Its name in the entry points; else the name of its type.
    name: str = cast("str", _NameOfType())
    #: What it starts where, as text.
    description: str
    #: The version of this interface for which it was written: `interface = 1` in your class. Other
    #: versions of ours refuse it, with an error.
    interface: int | None = None
    #: Whether nodes live in this process, so that their arguments need not be copied.
    shares_memory: bool = False

    def mistakes(self, executables: Sequence[Executable]) -> Sequence[str]:  # noqa: ARG002
        """Returns mistakes that prevent the start; nothing is started then."""
        return ()

    def notes(self, executables: Sequence[Executable]) -> Sequence[str]:  # noqa: ARG002
        """Returns notes on requests that the launcher cannot fulfil; shown with the plan."""
        return ()

    def placement(self, executables: Sequence[Executable]) -> Mapping[str, str]:  # noqa: ARG002
        """Returns the host of each by its name; nothing if there is only one place.

        Asked only if there are no mistakes.
        """
        return {}

    def checks(self) -> Mapping[str, Callable[[], Finding]]:
        """Returns checks of this machine and of hosts, by name, for `doctor`.

        Each runs in a thread of its own, for 30 s at most. An error that it raises is a `fail`.
        """
        return {}

    @abc.abstractmethod
    def start(self, plan: LaunchPlan, options: LaunchOptions) -> RunningProgram:
        """Starts a program; returns as soon as its addresses are known and bound.

        Raises:
            LaunchError: It could not be started; nothing of it is left.
        """

    def emit(self, plan: LaunchPlan, options: LaunchOptions) -> Mapping[str, bytes]:  # noqa: ARG002
        """Returns the files that `start` would hand to another system, for review: content by name.

        Args:
            plan: The plan to launch.
            options: The options; `log_dir` is the folder for the files.

        Raises:
            LaunchError: There is nothing to review, or it cannot be made.
        """
        raise LaunchError(f"the launcher {self.name!r} hands nothing to others that it could write")

    def attach(self, reference: str) -> RunningProgram:  # noqa: ARG002
        """Returns a program that was launched before and runs without its launcher.

        Args:
            reference: The reference that the launch printed.

        Raises:
            LaunchError: There is no such program, or programs end with their launcher.
        """
        raise LaunchError(
            f"programs of the launcher {self.name!r} end with the process that launched them, so "
            "there is none to find again"
        )


def installed_launchers() -> list[str]:
    """Returns the names of all launchers, sorted."""
    import importlib.metadata

    entries = importlib.metadata.entry_points(group=GROUP)
    return sorted({*_BUILT_IN, *(entry.name for entry in entries)})


def _find(name: str) -> tuple[str, Callable[[], Any]]:
    """Returns the place of a launcher, as `module:attribute`, and a function that loads it."""
    if (where := _BUILT_IN.get(name)) is not None:
        return where, functools.partial(pkgutil.resolve_name, where)
    import importlib.metadata

    entries = importlib.metadata.entry_points(group=GROUP, name=name)
    found = {entry.value: entry.load for entry in entries}
    if not found:
        known = installed_launchers()
        meant = did_you_mean(name, known)
        raise UnknownLauncherError(
            f"no launcher named {name!r}{meant}. Installed: {', '.join(known)}"
        )
    if len(found) > 1:
        raise UnknownLauncherError(
            f"several launchers are named {name!r}: {', '.join(sorted(found))}; remove one of "
            "the packages"
        )
    return found.popitem()


def load_launcher(name: str) -> Any:
    """Returns the factory of a launcher, mostly its class. Loads only its own code."""
    where, load = _find(name)
    try:
        return load()
    except Exception as error:
        raise LauncherLoadError(
            f"the launcher {name!r} ({where}) cannot be imported: {error}"
        ) from error


def options_of(name: str) -> Mapping[str, inspect.Parameter]:
    """Returns the options of a launcher, which are arguments of its class, by name."""
    maker = load_launcher(name)
    if not callable(maker):
        return {}
    # `timing` is for tests, and no text.
    return {option: each for option, each in parameters_of(maker).items() if option != "timing"}


def get_launcher(name: str, options: Mapping[str, Any] | None = None) -> Launcher:
    """Returns a launcher by its name in the entry points; `options` are arguments of its class."""
    launcher_class = load_launcher(name)
    launcher = launcher_class(**(options or {})) if callable(launcher_class) else launcher_class
    if not isinstance(launcher, Launcher):
        wrong = f"is no launchpad_lite.launching.Launcher but {launcher!r}"
    elif name not in _BUILT_IN and launcher.interface != INTERFACE:
        wrong = (
            f"says interface = {launcher.interface}; launchers have version {INTERFACE} of their "
            "interface here. Install versions of both packages that fit; if it is yours, see "
            f"docs/writing_a_launcher.md and set interface = {INTERFACE}"
        )
    else:
        launcher.name = name
        return launcher
    raise LauncherLoadError(f"the launcher {name!r} ({_find(name)[0]}) {wrong}")
