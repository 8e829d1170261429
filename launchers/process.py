"""Nodes as processes of this machine: one host agent, workers forked from it."""

import datetime as dt
import getpass
import os
import sys
import tempfile
import uuid
from pathlib import Path

from courier import Secret
from launchers._console import Console
from launchers._ports import endpoint
from launchers._supervisor import SupervisedProgram
from launchers.host.remote import AgentHost
from launchers.host.worker import Payload
from launchpad_lite._flag_values import FlagSnapshot
from launchpad_lite.errors import LaunchError
from launchpad_lite.launching import (
    AddressTable,
    Executable,
    Launcher,
    LaunchOptions,
    LaunchPlan,
    RunningProgram,
)

#: Where logs go, unless the launch says otherwise; the original's name.
LOG_DIR_VARIABLE = "LAUNCHPAD_LOGGING_DIR"


class ProcessLauncher(Launcher):
    """Runs each node in a process of its own on this machine.

    The output of each node goes to `<log_dir>/<label>/<replica>.log` and, line by line with the
    node's name before it, to standard output.
    """

    description = "processes of this machine"
    shows_output = True

    def start(self, plan: LaunchPlan, options: LaunchOptions) -> RunningProgram:
        """Starts all nodes; returns when their ports are held.

        Raises:
            LaunchError: A port that was asked for is taken, or the agent cannot be started.
        """
        console = Console() if self.shows_output and not options.quiet else None
        host = AgentHost("localhost", console)
        try:
            reserved = host.reserve(plan.addresses)
            endpoints = {key: endpoint(port) for key, port in reserved.items()}
            table = AddressTable(endpoints, Secret.generate())
            flags = FlagSnapshot.take()
            payloads = [
                _payload(plan, executable, table, options, flags).encode()
                for executable in plan.executables
            ]
            # The working directory of the agent is that of the launch, whatever comes later.
            log_dir = (options.log_dir or _new_log_dir(plan.program)).absolute()
        except BaseException:  # an interrupt, too
            host.close()
            raise
        program = SupervisedProgram(plan, options, table, log_dir)
        program.supervise(host)
        try:
            host.listen(program)
            for executable, payload in zip(plan.executables, payloads, strict=True):
                log = log_dir / executable.label / f"{executable.replica}.log"
                host.start(executable.name, payload, log)
        except BaseException:
            program.kill()
            program.join()
            raise
        return program


class QuietProcessLauncher(ProcessLauncher):
    """The same for tests: the output is kept in files and not shown."""

    description = "processes of this machine, silent"
    shows_output = False


def _payload(
    plan: LaunchPlan,
    executable: Executable,
    table: AddressTable,
    options: LaunchOptions,
    flags: FlagSnapshot | None,
) -> Payload:
    return Payload(
        program=plan.program,
        label=executable.label,
        replica=executable.replica,
        work=executable.work,
        endpoints=dict(table.endpoints),
        secret=table.secret.reveal(),
        notice_s=options.notice_s,
        argv=list(sys.argv),
        flags=flags,
    )


def _new_log_dir(program: str) -> Path:
    base = os.environ.get(LOG_DIR_VARIABLE)
    root = Path(base) if base else Path(tempfile.gettempdir()) / f"launchpad_lite-{_user()}"
    now = dt.datetime.now(dt.timezone.utc).astimezone()
    folder = root / f"{program}-{now:%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:6]}"
    # Output may hold anything, so it is nobody else's to read.
    try:
        folder.mkdir(parents=True, mode=0o700)
    except OSError as error:
        raise LaunchError(
            f"cannot make the folder for logs: {error}. Name another in {LOG_DIR_VARIABLE}, or "
            "pass log_dir="
        ) from error
    return folder


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return str(os.getuid())
