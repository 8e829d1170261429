"""Nodes on the hosts of a Slurm cluster."""

import contextlib
import dataclasses
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from launchers import _slurm_client as slurm
from launchers._deployment import Deployment, Tunnel, deploy, read_requirements
from launchers._hosts import mistakes_in_words
from launchers._placement import PlacementChoice, Strategy
from launchers._run_folder import run_name
from launchers._shipping import pack_up
from launchers._signals import ended_by_signals
from launchers._slurm_folder import JobOrder, RunFolder, submission_files
from launchers._slurm_job import Allocation
from launchers._slurm_program import SlurmProgram
from launchers._slurm_script import Submission, batch_script, components_of, path_mistake
from launchers.host.arrival import pythons
from launchpad_lite._flag_values import FlagSnapshot
from launchpad_lite._script import Script
from launchpad_lite.errors import LaunchError
from launchpad_lite.launching import (
    Executable,
    Launcher,
    LaunchOptions,
    LaunchPlan,
    RunningProgram,
)

#: In the environment of all that runs in an allocation.
_IN_ALLOCATION = "SLURM_JOB_ID"
#: Where run folders are made, below the working directory.
_RUNS = "launchpad_runs"
#: Seconds, beside the program's notice, that are left before Slurm's time limit.
_SPARE_S = 20
#: Seconds in which Slurm starts the agent on a host of an allocation.
_ARRIVE_S = 60.0


class SlurmLauncher(Launcher):
    """Runs nodes in a job of Slurm.

    From a login node it submits a job, in which the program is supervised: this process only
    watches. Inside an allocation (`salloc`, a script of the user's own) it uses that, and
    supervises itself. As over SSH, hosts need nothing but Python, and all connections between nodes
    are under TLS.

    The folder of the run must be the same on all hosts: the job reads there what it is to run, and
    writes there the output of each node, as `logs/<label>/<replica>.log`.
    """

    def __init__(
        self,
        nodes: int | Mapping[str, int] | None = None,
        *,
        partition: str | None = None,
        account: str | None = None,
        time: str | int | None = None,
        constraint: str | None = None,
        gres: str | None = None,
        qos: str | None = None,
        signal_s: int | None = None,
        requeue: bool = False,
        extra: str | Sequence[str] = (),
        detach: bool = False,
        folder: str | Path | None = None,
        python: str | None = None,
        requirements: str | Path | None = None,
        cache: str | None = None,
        placement: PlacementChoice = None,
        strategy: str = "spread",
        tunnel: str = "auto",
        silence_s: float = 8.0,
    ) -> None:
        """Prepares it; asks Slurm nothing yet.

        What stands before `python` is for
        jobs that are submitted, and means nothing inside an allocation.

        Args:
            nodes: How many hosts, which Slurm calls nodes: in all, or by group (`{"actor": 4}`). By
                default one for each resource shape: nodes that ask for the same `resources=`.
                Each shape becomes a component of one heterogeneous job.
            partition: As of `sbatch`, for all components.
            account: As of `sbatch`.
            time: Limit, as of `sbatch`: minutes, or like `"1-12:00:00"`.
            constraint: As of `sbatch`.
            gres: As of `sbatch`, where nodes ask for accelerators; by default `gpu:N`.
            qos: As of `sbatch`.
            signal_s: Seconds before the time limit at which nodes are asked to end; by default 20
                more than the program's notice. Slurm may be up to 60 s early.
            requeue: Whether the job may run again: after its time limit, preemption or the loss of
                a host. Nodes go on from their checkpoints.
            extra: Further options of `sbatch`, like `["--exclusive"]` or `"--exclusive --nice"`.
            detach: Return as soon as the job is submitted; it continues without this process.
            folder: Where the folder of the run is made; by default `launchpad_runs` below the
                working directory. A launch with `log_dir=` uses exactly that one.
            python: Interpreter on the hosts; by default this process's.
            requirements: File for `pip install --requirement`, for the nodes.
            cache: Folder for code; by default `~/.cache/launchpad_lite`.
            placement: Which nodes may run where, by Slurm's names of the hosts.
            strategy: `"spread"` the others over the hosts, or `"pack"` them onto few.
            tunnel: When calls between hosts go by way of the supervisor: `"auto"` where a host does
                not reach another, `"always"` or `"never"`.
            silence_s: Seconds after which a host that says nothing is lost.

        Raises:
            ValueError: Options are malformed; all mistakes are listed.
        """
        self._nodes = nodes
        self._signal_s = signal_s
        options = shlex.split(extra) if isinstance(extra, str) else tuple(extra)
        limit = str(time) if isinstance(time, int) else time
        self._submission = Submission(
            partition,
            account,
            limit,
            constraint,
            gres,
            qos,
            notice_s=signal_s if signal_s is not None else _SPARE_S,
            requeue=requeue,
            extra=tuple(options),
        )
        self._detach = detach
        self._folder = Path(_RUNS if folder is None else folder)
        self._python = python
        self._requirements = None if requirements is None else Path(requirements)
        self._cache = cache
        self._choice = placement
        self._strategy = Strategy(strategy)
        self._tunnel = Tunnel(tunnel)
        self._silence_s = silence_s
        if mistakes := list(self._mistakes()):
            raise ValueError("; ".join(mistakes))
        self.description = (
            f"the allocation of job {os.environ[_IN_ALLOCATION]}"
            if _IN_ALLOCATION in os.environ
            else "a job of Slurm"
        )

    def _mistakes(self) -> list[str]:
        found = self._submission.mistakes()
        counts = self._nodes.values() if isinstance(self._nodes, Mapping) else [self._nodes]
        found += [
            f"nodes is a number of hosts, 1 or more, or such numbers by group, not {self._nodes!r}"
            for count in counts
            if count is not None and (type(count) is not int or count < 1)
        ][:1]
        if not self._silence_s >= 1:
            found.append(f"silence_s is at least 1 s, not {self._silence_s}")
        return [*found, *mistakes_in_words(python=self._python, cache=self._cache)]

    def mistakes(self, executables: Sequence[Executable]) -> Sequence[str]:
        """Returns what no job can be made of."""
        if _IN_ALLOCATION in os.environ:
            return ()
        choice: object = self._choice  # users are not all checked by mypy
        if choice is not None and not isinstance(choice, Mapping):
            return [f"placement is a dict of hosts by group or node, not {choice!r}"]
        groups = dict.fromkeys(each.label for each in executables)
        known = {*groups, *(each.name for each in executables)}
        if wrong := [repr(key) for key in self._choice or () if key not in known]:
            return [f"placement of unknown {', '.join(wrong)}; the groups are: {', '.join(groups)}"]
        try:
            components_of(executables, self._nodes)
        except ValueError as error:
            return [str(error)]
        return ()

    def notes(self, executables: Sequence[Executable]) -> Sequence[str]:
        """Returns what Slurm is asked for."""
        if _IN_ALLOCATION in os.environ:
            return ()
        return [f"Slurm is asked for {each}" for each in components_of(executables, self._nodes)]

    def start(self, plan: LaunchPlan, options: LaunchOptions) -> RunningProgram:
        """Starts all nodes; returns when their addresses are known and bound.

        From a login node that is when the job has begun, however long it is pending; what it waits
        for is printed. Ctrl-C cancels it. With `detach` it returns at once.

        Raises:
            LaunchError: Slurm does not take the job, or the program cannot be started in it.
        """
        if _IN_ALLOCATION in os.environ:
            return self._start_here(plan, options)
        folder = RunFolder(self._run_folder(plan, options))
        folder.write_submission(self.emit(plan, dataclasses.replace(options, log_dir=folder.path)))
        with ended_by_signals():
            job = _submit(folder)
            if self._detach:
                sys.stdout.write(_DETACHED.format(job=job, folder=folder.path))
                program = SlurmProgram(plan, options, folder, job, is_launch=False)
                program.detach(f"job {job}")
                return program
            program = SlurmProgram(plan, options, folder, job)
            program.watch()
            program.await_up()
        return program

    def _start_here(self, plan: LaunchPlan, options: LaunchOptions) -> RunningProgram:
        allocation = Allocation(pythons(self._python))
        deployment = Deployment(
            plan=plan,
            options=options,
            specs=allocation.specs,
            choice=self._choice,
            strategy=self._strategy,
            shipment=pack_up(plan.executables),
            tunnel=self._tunnel,
            silence_s=self._silence_s,
            requirements=read_requirements(self._requirements),
            cache=self._cache,
        )
        return deploy(deployment, allocation.reach, _ARRIVE_S)

    def emit(self, plan: LaunchPlan, options: LaunchOptions) -> Mapping[str, bytes]:
        """Returns what `start` would submit: `job.sh` for sbatch, and the files beside it.

        Args:
            plan: What to launch.
            options: How; `log_dir` is where the files are going to be.

        Raises:
            LaunchError: No job can be made of it.
        """
        folder = self._run_folder(plan, options)
        directory = Path.cwd()
        if mistakes := [text for path in (folder, directory) if (text := path_mistake(path))]:
            raise LaunchError("; ".join(mistakes))
        try:
            components = tuple(components_of(plan.executables, self._nodes))
        except ValueError as error:
            raise LaunchError(str(error)) from error
        shipment = pack_up(plan.executables)
        python = self._python or sys.executable
        notice_s = self._signal_s
        if notice_s is None:
            notice_s = _SPARE_S + max(0, round(options.notice_s))
        submission = dataclasses.replace(self._submission, notice_s=notice_s)
        script = batch_script(plan.program, folder, directory, python, components, submission)
        order = JobOrder(
            plan=plan.outline(),
            # The process that watches the files shows what nodes print.
            options=dataclasses.replace(options, log_dir=RunFolder(folder).logs, quiet=True),
            argv=tuple(sys.argv),
            script=Script.here(),
            flags=FlagSnapshot.take(),
            components=components,
            choice=self._choice,
            strategy=self._strategy,
            tunnel=self._tunnel,
            silence_s=self._silence_s,
            python=python,
            requirements=read_requirements(self._requirements),
            cache=self._cache,
            requeue=self._submission.requeue,
            trees={tree.key: (tuple(sorted(tree.files)), tree.size) for tree in shipment.trees},
            requires=shipment.requires,
        )
        return submission_files(script, order, plan, shipment)

    def _run_folder(self, plan: LaunchPlan, options: LaunchOptions) -> Path:
        if options.log_dir is not None:
            return options.log_dir.absolute()
        name = run_name(re.sub(r"[^A-Za-z0-9_.-]", "_", plan.program))
        return (self._folder / name).absolute()

    def attach(self, reference: str) -> RunningProgram:
        """Returns a program that was launched before, by this process or another.

        Args:
            reference: Number of its job, or folder of its run.

        Raises:
            LaunchError: There is none.
        """
        folder = RunFolder(Path(reference).absolute())
        if reference.isdecimal():
            state = slurm.look_at(reference)
            if state is None or not state.output:
                raise LaunchError(
                    f"Slurm does not know a job {reference} (any more); give the folder of its run"
                )
            folder = RunFolder(Path(state.output).parent)
        folder.check_owner()
        job = (folder.read("job") or b"").decode()
        if not job:
            raise LaunchError(f"the run in {folder.path} was not submitted; sbatch {folder.script}")
        order = folder.read_order()
        program = SlurmProgram(order.plan, order.options, folder, job, is_launch=False)
        program.watch()
        return program


def _submit(folder: RunFolder) -> str:
    """Submits what is in a folder; returns the number of the job, of which nothing is lost.

    Raises:
        LaunchError: Slurm does not take it.
    """
    with ThreadPoolExecutor(1) as pool:
        # A thread of its own: a Ctrl-C must not make us forget a job that is being submitted.
        submission = pool.submit(slurm.submit, folder.script)
        try:
            job = submission.result()
            folder.write("job", job.encode())
        except BaseException:
            with contextlib.suppress(LaunchError):
                slurm.cancel(submission.result())
            folder.forget()
            raise
    return job


_DETACHED = """\
job {job} is submitted; its folder is {folder}
  python -m launchpad_lite.launch --launcher=slurm status {job}
  python -m launchpad_lite.launch --launcher=slurm logs {job}
  python -m launchpad_lite.launch --launcher=slurm stop {job}
"""
