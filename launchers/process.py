"""Nodes as processes of this machine: one host agent, workers forked from it."""

from collections.abc import Sequence

from courier import Secret
from launchers._allotment import allot
from launchers._ports import endpoint
from launchers.host.agent_link import start_agent_here
from launchers.host.machine import Machine
from launchpad_lite._timing import DEFAULT, Timing
from launchpad_lite.errors import LaunchError
from launchpad_lite.launching import (
    AddressTable,
    Executable,
    Launcher,
    LaunchOptions,
    LaunchPlan,
    RunningProgram,
)


class ProcessLauncher(Launcher):
    """Runs each node in a process of its own on this machine.

    The output of each node goes to `<log_dir>/<label>/<replica>.log` and, line by line with the
    node's name before it, to standard output.
    """

    description = "processes of this machine"
    shows_output = True

    def __init__(self, *, timing: Timing = DEFAULT) -> None:
        """Prepares it.

        Args:
            timing: How long its programs wait for what; for tests.
        """
        self._timing = timing

    def mistakes(self, executables: Sequence[Executable]) -> Sequence[str]:
        """Returns what this machine does not have, or not as often as is asked for."""
        return allot(executables, Machine.here()).mistakes

    def notes(self, executables: Sequence[Executable]) -> Sequence[str]:
        """Returns what this system cannot honour."""
        return allot(executables, Machine.here()).notes

    def start(self, plan: LaunchPlan, options: LaunchOptions) -> RunningProgram:
        """Starts all nodes; returns when their ports are held.

        Raises:
            LaunchError: A port that was asked for is taken, the agent cannot be started, or the
                machine has less than when this was planned.
        """
        allotment = allot(plan.executables, Machine.here())
        if allotment.mistakes:  # the machine has changed since it was planned
            raise LaunchError(f"program {plan.program!r}: {'; '.join(allotment.mistakes)}")
        link = start_agent_here("localhost")
        # Loaded while the agent comes up.
        from launchers._console import Console
        from launchers._payloads import payloads
        from launchers._run_folder import make_run_folder
        from launchers._supervisor import SupervisedProgram
        from launchers.host.remote import AgentHost

        console = Console() if self.shows_output and not options.quiet else None
        host = AgentHost("localhost", link, console)
        try:
            reserved = host.reserve(plan.addresses)
            endpoints = {key: endpoint(port) for key, port in reserved.items()}
            table = AddressTable(endpoints, Secret.generate())
            # The working directory of the agent is that of the launch, whatever comes later.
            log_dir = make_run_folder(plan.program, options.log_dir)
            program = SupervisedProgram(
                plan,
                options,
                table,
                log_dir,
                tells_logs=console is not None,
                timing=self._timing,
            )
            for node, payload in payloads(plan, table, options).items():
                host.take(node, payload, allotment.grants[node])
            host.listen(program, log_dir, None, options.log_limit_bytes)
        except BaseException:  # an interrupt, too
            host.close()
            raise
        program.supervise(host)
        return program


class QuietProcessLauncher(ProcessLauncher):
    """The same for tests: the output is kept in files and not shown."""

    description = "processes of this machine, silent"
    shows_output = False
