"""The supervisor of a program, inside its job: what the batch script becomes."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from launchers import _slurm_client as slurm
from launchers._deployment import Deployment, allow_many_files, deploy
from launchers._elsewhere import StopSignals
from launchers._hosts import HostSpec
from launchers._slurm_folder import NOTE_S, End, JobOrder, RunFolder
from launchers._slurm_script import Component, node_lists, srun_command, unique_names
from launchers.host.arrival import Arrival, Hello, host_command
from launchpad_lite.errors import LaunchpadError
from launchpad_lite.launching import Outcome, ProgramResult, RunningProgram

#: Seconds in which Slurm starts the agent on a host. A host that is not well makes srun wait.
_ARRIVE_S = 60.0
#: Seconds in which Slurm ends a job that it is to start again.
_REQUEUE_S = 60.0
#: Seconds between attempts to write down how the program ended.
_END_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0)
#: How a script ends that could not do its work.
_FAILED = 1


class Allocation:
    """The hosts that Slurm has given to this process."""

    def __init__(
        self, pythons: Sequence[str], components: Sequence[Component] | None = None
    ) -> None:
        """Asks Slurm for their names.

        Args:
            pythons: Interpreters to try there.
            components: What was asked for, if that is known.

        Raises:
            SlurmError: Slurm does not tell.
        """
        self._pythons = pythons
        self._components = components
        self._places = unique_names(
            (group, name)
            for group, expression in node_lists(os.environ)
            for name in slurm.host_names(expression)
        )

    def _component(self, group: int | None) -> Component | None:
        return self._components[group or 0] if self._components is not None else None

    @property
    def specs(self) -> tuple[HostSpec, ...]:
        """The hosts, with what was asked for on each."""
        found = []
        for name, (group, _) in self._places.items():
            component = self._component(group)
            found.append(
                HostSpec(name)
                if component is None
                else HostSpec(
                    name, cpu=component.cpu, ram_gib=component.limit_gib, gpu=component.gpu
                )
            )
        return tuple(found)

    def choice(self) -> dict[str, list[str]]:
        """Returns on which hosts each executable may run: those of its component."""
        return {
            node: [name for name, (group, _) in self._places.items() if (group or 0) == number]
            for number, component in enumerate(self._components or ())
            for node in component.executables
        }

    def reach(self, spec: HostSpec, hello: Hello) -> Arrival:
        """Starts an interpreter on a host."""
        return Arrival(spec.name, self.command(spec), hello)

    def command(self, spec: HostSpec) -> list[str]:
        """Returns the command that reaches a host. Pure."""
        group, name = self._places[spec.name]
        component = self._component(group)
        cpu = component.cpu if component else None
        return srun_command(name, group, cpu, host_command(self._pythons))


def main(folder: str, trees: Sequence[str]) -> int:
    """Runs the program and returns the exit code of the job.

    Args:
        folder: Of the run.
        trees: Folders with the code, in the order of the path.
    """
    allow_many_files()
    run = RunFolder(Path(folder))
    run.clear()
    order = run.read_order()
    # SIGTERM is Slurm's notice. The launcher sends SIGINT and leaves word why, or SIGQUIT: at once.
    signals = StopSignals(
        {
            signal.SIGINT: lambda program: program.request_stop(*run.read_stop()),
            signal.SIGQUIT: lambda program: program.kill(),
        }
    )
    try:
        order.stand_in()
        program = _launch(order, run, trees)
    except LaunchpadError as error:
        run.write("failure", str(error).encode())
        print(error, file=sys.stderr)  # noqa: T201 - goes to the job's own output
        return _FAILED
    signals.guard(program)
    _look_after(program, run)
    result = program.result
    assert result is not None
    if (
        order.requeue
        and signals.received <= {signal.SIGTERM}
        and _is_slurms(result)
        and _begins_anew()
    ):
        return 0
    with contextlib.suppress(OSError):
        run.write_status(program.status())
    _write_end(run, End(result, program.crash_dir))
    if result.outcome is Outcome.FAILED:
        print(program.failure(), file=sys.stderr)  # noqa: T201
    return result.exit_code


def _launch(order: JobOrder, run: RunFolder, trees: Sequence[str]) -> RunningProgram:
    allocation = Allocation([order.python], order.components)
    # A user who names hosts knows the cluster; other nodes stay with their component.
    choice = {**allocation.choice(), **_by_node(order)}
    deployment = Deployment(
        plan=run.read_work(),
        options=order.options,
        specs=allocation.specs,
        choice=choice,
        strategy=order.strategy,
        shipment=order.shipment(dict(zip(order.trees, trees, strict=True))),
        tunnel=order.tunnel,
        silence_s=order.silence_s,
        requirements=order.requirements,
        cache=order.cache,
    )
    return deploy(deployment, allocation.reach, _ARRIVE_S)


def _by_node(order: JobOrder) -> Mapping[str, str | Sequence[str]]:
    choice = order.choice or {}
    return {
        each.name: choice.get(each.name, choice.get(each.label, ()))
        for each in order.plan.executables
        if each.name in choice or each.label in choice
    }


def _look_after(program: RunningProgram, run: RunFolder) -> None:
    """Keeps the launcher informed until the program has ended."""
    published: dict[str, str] = {}
    while True:
        # A disk that is full for a while must not end the job whose state is written.
        with contextlib.suppress(OSError):
            addresses = program.plan.addresses
            if addresses and (table := addresses[0].table()).endpoints != published:
                run.write_addresses(table)
                published = dict(table.endpoints)
            run.write_status(program.status())
            run.write_stacks(program.stacks)
        if program.join(NOTE_S):
            return


def _write_end(run: RunFolder, end: End) -> None:
    """Writes how the program ended, if need be when the disk has room again."""
    for pause_s in _END_PAUSES_S:
        with contextlib.suppress(OSError):
            run.write_end(end)
            return
        time.sleep(pause_s)
    run.write_end(end)


def _is_slurms(result: ProgramResult) -> bool:
    """Returns whether a program ended by its notice or by the loss of a host: a new run may do better."""
    return result.signum == signal.SIGTERM or any(each.host_lost for each in result.failures[:1])


def _begins_anew() -> bool:
    """Makes Slurm run the job again after its notice, and waits until it does.

    A job that a user cancelled also ends by SIGTERM, and so does one that Slurm itself starts
    again: both are not running any more.
    """
    job = os.environ["SLURM_JOB_ID"]
    try:
        state = slurm.look_at(job)
        if state is None or state.state != "RUNNING":
            return state is not None and state.waits
        slurm.requeue(job)
    except slurm.SlurmError as error:
        print(f"the job is not run again: {error}", file=sys.stderr)  # noqa: T201
        return False
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Event().wait(_REQUEUE_S)
    return True
