"""The supervisor of a program, inside its job: the process that the batch script starts."""

import contextlib
import dataclasses
import functools
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from launchers.hosts.arrival import Arrival, Hello, host_command, pythons
from launchers.hosts.deployment import Deployment, deploy
from launchers.hosts.elsewhere import FAILED, ProgramEnd, StopSignals, SupervisorChannel, supervise
from launchers.hosts.host_list import HostSpec
from launchers.hosts.host_options import HostOptions
from launchers.hosts.placement import hosts_chosen
from launchers.hosts.shipping import Shipment
from launchers.slurm import _client as slurm
from launchers.slurm._folder import NOTE_S, JobOrder, RunFolder
from launchers.slurm._script import Component, node_lists, srun_command, unique_names
from launchpad_lite.launching import LaunchOptions, LaunchPlan, Outcome, RunningProgram
from launchpad_lite.life.events import StopAsked
from launchpad_lite.worker.address import OpenTable

#: Seconds in which Slurm must start the agent on a host. `srun` waits for a host that is not well.
_ARRIVE_S = 60.0
#: Seconds in which Slurm ends a job that it will start again.
_REQUEUE_S = 60.0
#: Seconds between attempts to write down how the program ended.
_END_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0)
#: Of an allocation that we did not ask for.
_UNKNOWN = Component((), 1)


class Allocation:
    """The hosts that Slurm has given to this process."""

    def __init__(
        self, pythons: Sequence[str], components: Sequence[Component] | None = None
    ) -> None:
        """Asks Slurm for their names. `components` are the hosts that were asked for, if known."""
        self._pythons = pythons
        self._components = components
        self._places = unique_names(
            (group, name)
            for group, expression in node_lists(os.environ)
            for name in slurm.call("scontrol", "show", "hostnames", expression).split()
        )

    def _component(self, group: int | None) -> Component:
        return self._components[group or 0] if self._components is not None else _UNKNOWN

    @property
    def specs(self) -> tuple[HostSpec, ...]:
        """The hosts, with what was asked for on each."""
        own = {name: self._component(group) for name, (group, _) in self._places.items()}
        return tuple(
            HostSpec(name, cpu=each.cpu, ram_gib=each.limit_gib, gpu=each.gpu)
            for name, each in own.items()
        )

    def placement(self) -> dict[str, str | Sequence[str]]:
        return {
            node: [name for name, (group, _) in self._places.items() if (group or 0) == number]
            for number, component in enumerate(self._components or ())
            for node in component.executables
        }

    def deploy(
        self, plan: LaunchPlan, options: LaunchOptions, wanted: HostOptions, shipment: Shipment
    ) -> RunningProgram:
        deployment = Deployment(plan, options, self.specs, wanted, shipment, self._reach)
        return deploy(deployment, _ARRIVE_S)

    def _reach(self, spec: HostSpec, hello: Hello) -> Arrival:
        return Arrival(spec.name, self.command(spec), hello)

    def command(self, spec: HostSpec) -> list[str]:
        group, name = self._places[spec.name]
        cpu = self._component(group).cpu
        return srun_command(name, group, cpu, host_command(self._pythons))


def main(folder: str, members: dict[str, bytes]) -> int:
    """Runs the program and returns the exit code of the job."""
    run = RunFolder(Path(folder))
    run.begin(os.environ["SLURM_JOB_ID"])
    order: JobOrder = pickle.loads(members["order"])

    def stop(program: RunningProgram) -> None:
        asked = run.read("stop", StopAsked) or StopAsked("SIGINT")
        program.request_stop(asked.reason, asked.signum)

    # SIGTERM is Slurm's notice. The launcher sends SIGINT and writes the reason to a file, or it sends
    # SIGQUIT to end the program at once.
    signals = StopSignals({signal.SIGINT: stop, signal.SIGQUIT: lambda program: program.kill()})
    channel = _Notes(run)
    launch = functools.partial(_launch, order)
    program = supervise(order, members, launch, channel, signals)
    if program is None:
        return FAILED
    result = program.result
    assert result is not None
    if (
        order.requeue
        and signals.received <= {signal.SIGTERM}
        # Slurm's notice, or the loss of a host, ended the program.
        and (result.signum == signal.SIGTERM or any(each.host_lost for each in result.failures[:1]))
        and _begins_anew()
    ):
        return 0
    with contextlib.suppress(OSError):
        run.write("status", program.status())
    channel.end(ProgramEnd(result, crash_dir=program.crash_dir))
    if result.outcome is Outcome.FAILED:
        print(program.failure(), file=sys.stderr)  # noqa: T201 - goes to the job's own output
    return result.exit_code


def _launch(order: JobOrder, plan: LaunchPlan, shipment: Shipment) -> RunningProgram:
    allocation = Allocation(pythons(order.wanted.python), order.components)
    # A user who names hosts knows the cluster; other nodes stay with their component.
    placement = allocation.placement()
    for each in plan.executables:
        if (hosts := hosts_chosen(order.wanted.placement, each)) is not None:
            placement[each.name] = hosts
    wanted = dataclasses.replace(order.wanted, placement=placement)
    return allocation.deploy(plan, order.options, wanted, shipment)


class _Notes(SupervisorChannel):
    """Files in the folder of the run."""

    look_s = NOTE_S

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._published: Mapping[str, str] = {}

    def tell(self, program: RunningProgram) -> None:
        addresses = program.plan.addresses
        if addresses and (table := addresses[0].table()).endpoints != self._published:
            self._run.write("addresses", OpenTable.of(table))
            self._published = dict(table.endpoints)
        self._run.write("status", program.status())

    def question(self) -> str:
        return self._run.read("question", str) or ""

    def answer(self, question: str, text: str) -> None:
        self._run.write("answer", {question: text})

    def fail(self, text: str) -> None:
        self._run.write("failure", text)
        print(text, file=sys.stderr)  # noqa: T201 - goes to the job's own output

    def end(self, end: ProgramEnd) -> None:
        """Writes how the program ended; tries again later if the disk is full."""
        for pause_s in _END_PAUSES_S:
            with contextlib.suppress(OSError):
                self._run.write("result", end)
                return
            time.sleep(pause_s)
        self._run.write("result", end)


def _begins_anew() -> bool:
    """Makes Slurm run the job again after its notice, and waits until it does.

    A job that a user cancelled also ends by SIGTERM, and so does a job that Slurm starts again by
    itself. The state of both is no longer RUNNING.
    """
    job = os.environ["SLURM_JOB_ID"]
    try:
        state = slurm.look_at(job)
        if state is None or state.state != "RUNNING":
            return state is not None and state.waits
        slurm.call("scontrol", "requeue", job)
    except slurm.SlurmError as error:
        print(f"the job is not run again: {error}", file=sys.stderr)  # noqa: T201
        return False
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Event().wait(_REQUEUE_S)
    return True
