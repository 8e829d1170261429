"""The original's `launch`, on every launcher of launchpad-lite."""

import inspect
import logging
import os
import traceback
import unittest
from collections.abc import Mapping, Sequence
from pathlib import Path

import launchpad_lite as lp
from launchpad.context import LaunchType
from launchpad.flags import FLAGS
from launchpad.launch import serialization, terminals
from launchpad.launch.worker_manager import WorkerManager
from launchpad_lite.launching import Launcher, get_launcher, parse_script_arguments
from launchpad_lite.parts.log_file import LOG_DIR_VARIABLE

_LOGGER = logging.getLogger(__name__)

#: Launchers of launchpad-lite by type of the original. Threads share their arguments with the
#: script; in tests, too, if these are known to be picklable.
_LAUNCHERS = {
    LaunchType.LOCAL_MULTI_THREADING: "local_mt",
    LaunchType.LOCAL_MULTI_PROCESSING: "local_mp",
    LaunchType.TEST_MULTI_THREADING: "local_mt",
    LaunchType.TEST_MULTI_PROCESSING: "test_mp",
}
_THREADS = (LaunchType.LOCAL_MULTI_THREADING, LaunchType.TEST_MULTI_THREADING)
_TESTS = (LaunchType.TEST_MULTI_THREADING, LaunchType.TEST_MULTI_PROCESSING)


def launch(
    programs: lp.Program | Sequence[lp.Program],
    launch_type: LaunchType | str | None = None,
    xm_resources: object = None,
    local_resources: Mapping[str, lp.PythonProcess] | None = None,
    test_case: unittest.TestCase | None = None,
    terminal: str | None = None,
    *,
    serialize_py_nodes: bool | None = None,
    controller_xm_requirements: object = None,
) -> WorkerManager:
    """Starts a program and returns at once. The script waits for its end, unless it is a test.

    Args:
        programs: The program; of several, the first.
        launch_type: The type; by default that of `--lp_launch_type`, or else `local_mt`.
            `--launcher` on the command line overrides both, so that a script which cannot be
            changed runs anywhere: `--launcher=ssh --hosts=h1,h2`.
        xm_resources: Has no effect: there is no XManager.
        local_resources: Options of the processes of nodes, by group.
        test_case: The program ends with this test, which fails if a node has. Without it, programs of
            test types end with the test that is found on the stack, or else with the script.
        terminal: Where the output of processes goes: see `launchpad.launch.terminals`.
        serialize_py_nodes: Whether nodes that are threads must be picklable, or else are a
            RuntimeError; by default in tests only.
        controller_xm_requirements: As `xm_resources`.
    """
    parse_script_arguments()
    program = _first(programs)
    launcher, kind = _choose(launch_type)
    if xm_resources is not None or controller_xm_requirements is not None:
        text = "xm_resources= and controller_xm_requirements= have no effect: there is no XManager here"
        _LOGGER.warning("%s. --launcher=kubernetes runs in pods", text)
    if kind in _THREADS and (kind in _TESTS if serialize_py_nodes is None else serialize_py_nodes):
        serialization.check_program(program)
    if kind is LaunchType.LOCAL_MULTI_PROCESSING:
        terminal = terminals.choose(terminal)
        if terminal is not None:  # nothing is shown here
            launcher = _named(get_launcher("test_mp"), kind)
    folder = os.environ.get(LOG_DIR_VARIABLE)
    running = lp.launch(
        program, launcher, local_resources=_known(program, local_resources), log_dir=folder or None
    )
    manager = WorkerManager(running, shares_memory=kind in _THREADS)
    if folder and kind not in _THREADS:
        _link_logs(running, Path(folder))
    if terminal is not None and kind is LaunchType.LOCAL_MULTI_PROCESSING:
        terminals.show(terminal, running)
    if test_case is None and kind in _TESTS:
        running.ends_with_script = True
        test_case = _test_on_the_stack()
    if test_case is not None:
        test_case.addCleanup(manager.cleanup_after_test, test_case)
    return manager


def _first(programs: lp.Program | Sequence[lp.Program]) -> lp.Program:
    program, *others = [programs] if isinstance(programs, lp.Program) else programs
    if others:
        _LOGGER.warning(
            "launch was given %d programs; only the first, %r, runs", 1 + len(others), program.name
        )
    return program


def _choose(launch_type: LaunchType | str | None) -> tuple[Launcher | None, LaunchType | None]:
    """Returns a launcher and its type in the original; None twice: what `--launcher` says."""
    if FLAGS["launcher"].value:
        return None, None
    kind = LaunchType(launch_type or FLAGS.lp_launch_type)
    if kind not in _LAUNCHERS:
        raise ValueError(
            f"launch type {kind.value!r} is not there: use --launcher=kubernetes (or slurm, ssh), with "
            "launchpad-lite's docs/kubernetes.md"
        )
    return _named(get_launcher(_LAUNCHERS[kind]), kind), kind


def _named(launcher: Launcher, kind: LaunchType) -> Launcher:
    launcher.name = kind.value
    return launcher


def _known(
    program: lp.Program, resources: Mapping[str, lp.PythonProcess] | None
) -> dict[str, lp.PythonProcess]:
    """Returns the entries for existing groups, as the original; warns of others."""
    known = {}
    for label, process in (resources or {}).items():
        if not isinstance(process, lp.PythonProcess):
            raise ValueError(f"local_resources[{label!r}] must be a PythonProcess, not {process!r}")
        if label in program.groups:
            known[label] = process
        else:
            _LOGGER.warning(
                "local_resources[%r] has no effect: the groups are %s", label, [*program.groups]
            )
    return known


def _link_logs(running: lp.RunningProgram, folder: Path) -> None:
    """Makes the output of each node be at `<folder>/<label>/<i>`, as in the original."""
    for node in running.plan.executables:
        (folder / node.label).mkdir(parents=True, exist_ok=True)
        link = folder / node.label / str(node.replica)
        link.unlink(missing_ok=True)
        link.symlink_to(f"{node.replica}.log")


def _test_on_the_stack() -> unittest.TestCase | None:
    """Returns the test case of a calling method."""
    frames = traceback.walk_stack(inspect.currentframe())
    owners = (frame.f_locals.get("self") for frame, _ in frames)
    return next((each for each in owners if isinstance(each, unittest.TestCase)), None)
