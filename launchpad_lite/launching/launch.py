"""`plan` and `launch`: from a program to a running one."""

import contextlib
import inspect
import os
import pkgutil
import signal
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from launchpad_lite.errors import LaunchError, ProgramError
from launchpad_lite.graph.program import Program
from launchpad_lite.launching import (
    Launcher,
    LaunchOptions,
    RunningProgram,
    get_launcher,
    load_launcher,
    options_of,
)
from launchpad_lite.life.result import advice_on
from launchpad_lite.parts.arguments import convert, kinds_of, one_of
from launchpad_lite.parts.settings import did_you_mean, nearest
from launchpad_lite.planning.plan import (
    CheckpointsChoice,
    LaunchPlan,
    LaunchSettings,
    LivenessChoice,
    Planner,
    ProcessesByGroup,
    ResourcesByGroup,
    RestartChoice,
)
from launchpad_lite.process import flags
from launchpad_lite.process.agent_process import occupy_standard_descriptors
from launchpad_lite.process.exit import report_at_exit
from launchpad_lite.process.interrupts import is_interactive
from launchpad_lite.process.script import carry_by_value, importer
from launchpad_lite.process.signal_waker import SIGNAL_WAKER
from launchpad_lite.worker.checkpoints import Checkpoints

_FLAG = f"--{flags.LAUNCHER_OPTION.name}"
_OURS = "launchpad_lite."  # modules of this package

LauncherChoice = str | Launcher | None


def plan(
    program: Program,
    launcher: LauncherChoice = None,
    resources: ResourcesByGroup | None = None,
    *,
    restart: RestartChoice = None,
    liveness: LivenessChoice = None,
    checkpoints: CheckpointsChoice = None,
    processes: ProcessesByGroup | None = None,
    seed: int | None = None,
    **launcher_options: Any,
) -> LaunchPlan:
    """Returns the plan: what `launch` would start, and where; starts nothing.

    Takes a program, and arguments of `launch`.

    Raises:
        ProgramError: The program has mistakes; all are listed.
        UnknownLauncherError: No such launcher is installed.

    Example:
        print(lp.plan(program, resources={"learner": {"gpu": 1}}))
    """
    chosen = find_launcher(launcher, launcher_options)
    settings = _filled(LaunchSettings(resources, restart, liveness, checkpoints, processes, seed))
    return Planner(program, chosen, settings).plan()


def launch(
    programs: Program | Sequence[Program],
    launcher: LauncherChoice | ResourcesByGroup = None,
    resources: ResourcesByGroup | None = None,
    *,
    launch_type: LauncherChoice = None,
    restart: RestartChoice = None,
    liveness: LivenessChoice = None,
    checkpoints: CheckpointsChoice = None,
    processes: ProcessesByGroup | None = None,
    local_resources: ProcessesByGroup | None = None,
    seed: int | None = None,
    notice_s: float | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    log_limit_mib: float = 100.0,
    **launcher_options: Any,
) -> RunningProgram:
    """Starts a program and returns at once; `wait()` on the result waits for its end.

    A script may simply end after launch: the interpreter waits for the program, and its exit code
    tells how the program ended. SIGINT, SIGTERM and SIGHUP (the terminal is gone) stop the program
    in order, a second SIGINT at once, if the main thread launches; other threads may launch as well.

    Args:
        programs: What to run; a list of one program is fine too.
        launcher: Name of a launcher, or a launcher. By default as `--launcher` or
            `--lp_launch_type` on the command line say, else `local_mp`.
        resources: The needs of each node of a group: `lp.Resources` or dicts like `{"cpu": 2,
            "ram": 2, "gpu": 1}`, by group (`"actor"`) or single node (`"actor[3]"`). May also stand
            in place of `launcher`.
        launch_type: Another name for `launcher`.
        restart: When nodes that end are restarted: `"never"` (the default), `"on_failure"`,
            `"always"` or an `lp.RestartPolicy`, for all nodes or as a dict by group (`"actor"`)
            and single node (`"actor[3]"`). By default what `--lp_restart` says.
        liveness: How nodes show that they are not hung: an `lp.Liveness`, for all nodes or as a
            dict by group and single node.
        checkpoints: Where the state of nodes is kept, if their objects have `save(folder)` and
            `restore(folder)`: a folder or an `lp.Checkpoints`, for all nodes or as a dict by group
            and single node. By default what `--lp_checkpoints` says.
        processes: Options of the processes of nodes: `lp.PythonProcess`, or dicts like `{"env":
            {"OMP_NUM_THREADS": "1"}}`, by group or single node.
        local_resources: Another name for `processes`, the original's.
        seed: Of the program, from which each node gets its own (`lp.current_node().seed`). By default
            what `--lp_seed` says, or a random one: `running.plan.seed`.
        notice_s: Seconds nodes have to end after they were asked; by default what
            `--lp_termination_notice_secs` says. 0 ends them by force at once, below 0 never.
        log_dir: Folder for the output of the nodes; by default what `--lp_log_dir` says.
        log_limit_mib: MiB that are kept of the log of each node: its beginning and its end.
            `math.inf` keeps all.
        **launcher_options: Arguments of the launcher's class.

    Raises:
        ProgramError: The program has mistakes; all are listed and nothing was started.
        UnknownLauncherError: No such launcher is installed.
        LaunchError: It could not be started; nothing of it is left. Or the script that launches is
            only imported: by a node, a child of `multiprocessing`, or a command such as `plan`.
        TypeError: The launcher does not take such options, or two names of one argument are given.
        ValueError: An option has a value that cannot be.

    Example:
        running = lp.launch(program, restart={"actor": "on_failure"}, checkpoints="/data/run7")
        result = running.wait()
    """
    _refuse_to_launch_again()
    occupy_standard_descriptors()
    carry_by_value()
    if isinstance(launcher, Mapping):  # Listing 1 of the paper: launch(program, resources)
        if resources is not None:
            raise TypeError(
                "resources= are given by name and as the second argument; once is enough"
            )
        resources = launcher
        launcher = None
    program = _one_program(programs)
    choice: LauncherChoice = one_of("launcher", launcher, "launch_type", launch_type)
    chosen = find_launcher(choice, launcher_options)
    processes = one_of("processes", processes, "local_resources", local_resources)
    settings = _filled(LaunchSettings(resources, restart, liveness, checkpoints, processes, seed))
    ready = Planner(program, chosen, settings).plan()
    folder = flags.given_or_flag("log_dir", log_dir, flags.LOG_DIR, flags.LOG_DIR.value)
    notice = flags.TERMINATION_NOTICE_SECS
    options = LaunchOptions(
        flags.given_or_flag("notice_s", notice_s, notice, notice.value),
        Path(folder) if folder else None,
        log_limit_mib=log_limit_mib,
    )
    try:
        with SIGNALS.leaving():
            running = chosen.start(ready, options)
    except RuntimeError as error:
        if not (advice := advice_on(error)):
            raise
        raise LaunchError(f"program {ready.program!r}: {error}{advice}") from error
    try:
        SIGNALS.watch(running)
        program.note_run(running)
        from launchpad_lite.launching.registry import publish  # loaded while the nodes come up

        publish(running, chosen.name, SIGNALS.unlist)
        report_at_exit(running)
        if flags.TRACE.value:
            running.trace(flags.TRACE.value)
        if flags.DASHBOARD.value:
            serve = pkgutil.resolve_name("launchpad_lite.insight.dashboard:serve")
            running.page_url = serve(running)
            print(f"{ready.program}: {running.page_url}", flush=True)  # noqa: T201 - it was asked for
    except BaseException:  # a Ctrl-C before signals were watched
        running.kill()
        SIGNALS.unlist(running)
        raise
    return running


def _refuse_to_launch_again() -> None:
    if (who := importer()) is not None:
        caller: FrameType | None = sys._getframe(2)
        while caller is not None and str(caller.f_globals.get("__name__")).startswith(_OURS):
            caller = caller.f_back  # an executor or a search launches for a script
        assert caller is not None
        raise LaunchError(
            f"{caller.f_code.co_filename}:{caller.f_lineno}: the script is imported by {who}, which needs "
            "only what it defines; it cannot launch the program once more. Put lp.launch, and what else "
            'is to happen once, below: if __name__ == "__main__":'
        )


def _one_program(programs: Program | Sequence[Program]) -> Program:
    match programs:
        case Program() as program:
            return program
        case [Program() as program]:
            return program
        case _:
            raise ProgramError("launch", [f"launch takes one lp.Program, not {programs!r}"])


def _filled(given: LaunchSettings) -> LaunchSettings:
    """Fills in options of the command line that the call does not give."""
    folder, period_s = flags.CHECKPOINTS.value, flags.CHECKPOINT_PERIOD_SECS.value or None
    kept = Checkpoints(folder, period_s) if folder else None
    if flags.CHECKPOINT_PERIOD_SECS.present and kept is None:
        name = flags.CHECKPOINT_PERIOD_SECS.name
        raise LaunchError(
            f"--{name} is the period of --{flags.CHECKPOINTS.name}=FOLDER, which is missing"
        )
    restart = flags.given_or_flag("restart", given.restart, flags.RESTART, flags.chosen_restart())
    checkpoints = flags.given_or_flag("checkpoints", given.checkpoints, flags.CHECKPOINTS, kept)
    seed = flags.given_or_flag("seed", given.seed, flags.SEED, flags.SEED.value)
    return given._replace(restart=restart, checkpoints=checkpoints, seed=seed)


def find_launcher(choice: LauncherChoice, options: Mapping[str, Any]) -> Launcher:
    """Returns a launcher, with the options and hosts that the command line gives.

    Mistakes there are a LaunchError, those in `options` a TypeError or ValueError.
    """
    flags.parse_script_arguments()
    named = choice.name if isinstance(choice, Launcher) else choice or None
    name = flags.given_or_flag("launcher", named, flags.launcher_flag(), flags.chosen_launcher())
    if isinstance(choice, Launcher):
        if options:
            raise TypeError(
                f"{', '.join(f'{option}=' for option in options)}: options are for launchers that are "
                f"named; give them to {type(choice).__name__}(...) when you make it"
            )
        if given := flags.LAUNCHER_OPTION.value:
            raise LaunchError(
                f"{_FLAG}={given[0]}: options are for launchers that are named, and the script passes "
                f"{type(choice).__name__}(...), made already"
            )
        return choice
    _check_options(name, options)
    options = _with_options_of_flag(name, options)
    hosts = flags.HOSTS.value
    if hosts is None or "hosts" in options:
        return get_launcher(name, options)
    try:
        return get_launcher(name, {"hosts": hosts, **options})
    except TypeError as error:
        raise LaunchError(f"--hosts={hosts}: the launcher {name!r} takes no hosts") from error
    except ValueError as error:
        raise LaunchError(f"--launcher={name}: {error}") from error


def _with_options_of_flag(name: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fills in the options of a launcher that a flag gives where the call does not."""
    filled = dict(options)
    for given in flags.LAUNCHER_OPTION.value:
        option, _, text = given.partition("=")
        option = option.replace("-", "_")
        known = options_of(name)
        if option not in known:
            raise LaunchError(
                f"{_FLAG}={given}: unknown option {option!r}{did_you_mean(option, known)}; "
                f"the launcher {name!r} takes {', '.join(known) or 'none'}"
            )
        try:
            value = convert(text, kinds_of(load_launcher(name), option))
        except ValueError as error:
            raise LaunchError(f"{_FLAG}={given}: {error}") from None
        filled[option] = flags.given_or_flag(
            option, options.get(option), flags.LAUNCHER_OPTION, value, shown=given
        )
    return filled


def _check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raises the error of options that neither `launch` nor the launcher takes."""
    if not options:
        return
    taken = options_of(name)
    if any(each.kind is each.VAR_KEYWORD for each in taken.values()):
        return
    ours = [each for each in inspect.signature(launch).parameters if each != "launcher_options"]
    for option in options:
        if option not in taken and option != "timing":
            near = nearest(option, [*ours, *taken])
            raise TypeError(
                f"unknown option {option}="
                + (f" (did you mean {near}=?)" if near else "")
                + f". launch takes {', '.join(ours)}; the launcher {name!r} "
                + (f"takes {', '.join(taken)}" if taken else "takes no others")
            )


class _LaunchSignals:
    """SIGINT, SIGTERM and SIGHUP stop what runs. Handlers are set in the main thread only."""

    def __init__(self) -> None:
        #: By id: those of launchers of others need not be hashable.
        self._watched: weakref.WeakValueDictionary[int, RunningProgram] = (
            weakref.WeakValueDictionary()
        )
        #: Programs that other shells can find, as numbers; signals that end the process without them.
        self._listed: set[int] = set()
        self._late: set[int] = set()
        self._previous: dict[int, Any] = {}

    def watch(self, running: RunningProgram) -> None:
        """Makes signals stop a program, if this is the main thread of a script.

        At a prompt, Ctrl-C interrupts the last input; it stops a program only in `wait`.
        """
        SIGNAL_WAKER.install()
        if threading.current_thread() is not threading.main_thread() or is_interactive():
            return
        self._watched[id(running)] = running
        self._listed.add(id(running))
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            current = signal.getsignal(signum)
            # A script that ignores the end of the terminal, as under nohup, goes on without it.
            stays = signum == signal.SIGHUP and current == signal.SIG_IGN
            if current not in (self._on_signal, None) and not stays:
                self._previous[signum] = signal.signal(signum, self._on_signal)

    def unlist(self, running: RunningProgram) -> None:
        """Sends this process signals again that came while an ended program was still listed."""
        self._listed.discard(id(running))
        for signum in list(self._late):
            self._late.discard(signum)
            signal.pthread_kill(threading.main_thread().ident or 0, signum)

    @contextlib.contextmanager
    def leaving(self) -> Iterator[None]:
        """Makes SIGTERM and the end of the terminal raise SystemExit in a block, unless the user handles them.

        A launch may be pending for hours, and no other process would cancel it. Programs that this
        process launched before are stopped as well.
        """

        def leave(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001 - as Python calls it
            self.stop(signum)
            raise SystemExit(128 + signum)

        before: dict[int, Any] = {}
        SIGNAL_WAKER.install()
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGTERM, signal.SIGHUP):
                # Ours stays after the last program.
                if signal.getsignal(signum) in (signal.SIG_DFL, self._on_signal):
                    before[signum] = signal.signal(signum, leave)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def stop(self, signum: int) -> bool:
        """Makes a signal stop running programs; returns whether there are any."""
        # A list of references: any thread may forget a program now.
        watched = (ref() for ref in self._watched.valuerefs())
        alive = [each for each in watched if each is not None and each.result is None]
        for program in alive:
            program.handle_signal(signum)
        return bool(alive)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.stop(signum):
            return
        previous = self._previous.get(signum)
        if callable(previous):
            previous(signum, frame)
        elif previous == signal.SIG_DFL:
            self._late.add(signum)  # first: it may be unlisted at any moment
            if not self._listed:
                signal.signal(signum, signal.SIG_DFL)
                signal.raise_signal(signum)


SIGNALS = _LaunchSignals()
