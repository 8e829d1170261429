"""Nodes as processes of this machine: one host agent, workers forked from it."""

import sys

from courier import Secret
from launchers._console import Console
from launchers._ports import endpoint
from launchers._run_folder import make_run_folder
from launchers._supervisor import SupervisedProgram
from launchers.host.remote import AgentHost
from launchers.host.worker import Payload
from launchpad_lite._flag_values import FlagSnapshot
from launchpad_lite.launching import (
    AddressTable,
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
            # The working directory of the agent is that of the launch, whatever comes later.
            log_dir = (options.log_dir or make_run_folder(plan.program)).absolute()
            program = SupervisedProgram(plan, options, table, log_dir)
            host.listen(program, _payloads(plan, table, options), log_dir)
        except BaseException:  # an interrupt, too
            host.close()
            raise
        program.supervise(host)
        return program


class QuietProcessLauncher(ProcessLauncher):
    """The same for tests: the output is kept in files and not shown."""

    description = "processes of this machine, silent"
    shows_output = False


def _payloads(plan: LaunchPlan, table: AddressTable, options: LaunchOptions) -> dict[str, Payload]:
    flags = FlagSnapshot.take()
    return {
        each.name: Payload(
            setup=each.setup(plan.program, 0, options.notice_s),
            work=each.work,
            endpoints=dict(table.endpoints),
            secret=table.secret.reveal(),
            argv=list(sys.argv),
            flags=flags,
        )
        for each in plan.executables
    }
