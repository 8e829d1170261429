"""Nodes as processes of this machine: one host agent, workers forked from it."""

from collections.abc import Sequence

from courier import Secret
from launchers.host.machine import Machine
from launchers.supervision.agent_link import start_agent_here
from launchers.supervision.allotment import allot
from launchpad_lite.errors import LaunchError
from launchpad_lite.launching import (
    AddressTable,
    Executable,
    Launcher,
    LaunchOptions,
    LaunchPlan,
    RunningProgram,
)
from launchpad_lite.life.timing import DEFAULT, Timing


class ProcessLauncher(Launcher):
    """Runs each node in a process of its own on this machine.

    The output of each node goes to `<log_dir>/<label>/<replica>.log` and, line by line with the
    node's name before it, to standard output.
    """

    description = "processes of this machine"
    shows_output = True

    def __init__(self, *, timing: Timing = DEFAULT) -> None:
        self._timing = timing  # only tests set it

    def mistakes(self, executables: Sequence[Executable]) -> Sequence[str]:
        """Returns the requests that this machine cannot fulfil."""
        return allot(executables, Machine.here()).mistakes

    def notes(self, executables: Sequence[Executable]) -> Sequence[str]:
        """Returns notes on requests that this system ignores."""
        return allot(executables, Machine.here()).notes

    def start(self, plan: LaunchPlan, options: LaunchOptions) -> RunningProgram:
        """Starts all nodes; returns when their ports are held, or raises LaunchError."""
        allotment = allot(plan.executables, Machine.here())
        if allotment.mistakes:  # the machine has changed since it was planned
            raise LaunchError(f"program {plan.program!r}: {'; '.join(allotment.mistakes)}")
        link = start_agent_here()
        # Imported while the agent starts, with what is needed once nodes start: by then all cores are busy.
        from courier import Client, Server  # noqa: F401
        from courier.lowlevel import join_address, loopback
        from launchers.host.worker import payloads
        from launchers.supervision.breakpoints import has_terminal
        from launchers.supervision.console import Console
        from launchers.supervision.remote import AgentHost
        from launchers.supervision.run_folder import make_run_folder
        from launchers.supervision.supervised_program import SupervisedProgram
        from launchpad_lite.insight import history  # noqa: F401

        console = Console() if self.shows_output and not options.quiet else None
        host = AgentHost("localhost", link, console)
        try:
            reserved = host.reserve(plan.addresses)
            here = loopback()
            endpoints = {key: join_address(here, port) for key, port in reserved.items()}
            table = AddressTable(endpoints, Secret.generate())
            # An absolute path: the agent keeps the working directory of the launch, even if this process
            # changes its own.
            log_dir = make_run_folder(plan.program, options.log_dir)
            tells_logs, timing = console is not None, self._timing
            program = SupervisedProgram(
                plan, options, table, log_dir, tells_logs=tells_logs, timing=timing
            )
            leads_here = console is not None and has_terminal()
            host.payloads.update(payloads(plan, table, options, has_terminal=leads_here))
            host.grants.update(allotment.grants)
            host.listen(program, log_dir, None, options.log_limit_bytes)
        except BaseException:  # an interrupt, too
            host.close()
            raise
        program.supervise(host)
        return program


class QuietProcessLauncher(ProcessLauncher):
    """A process launcher for tests: it keeps the output in files and does not show it."""

    description = "processes of this machine, silent"
    shows_output = False
