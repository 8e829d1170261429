"""Nodes on the hosts of a Slurm cluster."""

import contextlib
import dataclasses
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from launchers.hosts.arrival import pythons
from launchers.hosts.host_options import HostOptions, Tunnel, read_requirements
from launchers.hosts.orders import pack
from launchers.hosts.placement import PlacementChoice, Strategy, mistakes_in_choice
from launchers.hosts.shipping import pack_up
from launchers.hosts.trust import Authority
from launchers.slurm import _client as slurm
from launchers.slurm._folder import WORK, JobOrder, RunFolder
from launchers.slurm._job import Allocation
from launchers.slurm._program import SlurmProgram
from launchers.slurm._script import Submission, batch_script, components_of, path_mistake
from launchers.supervision.run_folder import run_name
from launchpad_lite.errors import LaunchError
from launchpad_lite.launching import (
    Executable,
    Finding,
    Launcher,
    LaunchOptions,
    LaunchPlan,
    RunningProgram,
)

#: Environment variable that all processes in an allocation have.
_IN_ALLOCATION = "SLURM_JOB_ID"
#: Where run folders are made, below the working directory.
_RUNS = "launchpad_runs"
#: Seconds, beyond the program's notice, between the request to stop and Slurm's time limit.
_SPARE_S = 20


class SlurmLauncher(Launcher):
    """Runs nodes in a job of Slurm.

    On a login node it submits a job. The supervisor runs in the job, and this process only watches.
    Inside an allocation (`salloc`, or a script of the user) it uses that allocation, and this process
    is the supervisor. As over SSH, hosts need only Python, and all connections between nodes are
    under TLS.

    All hosts must see the folder of the run: the job reads the program there, and writes the output of
    each node there, as `logs/<label>/<replica>.log`.
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

        The arguments before `python` are for jobs that are submitted. Inside an allocation they have
        no effect.

        Args:
            nodes: How many hosts, which Slurm calls nodes: in all, or by group (`{"actor": 4}`). By
                default one for each resource shape, that is, for all nodes with the same
                `resources=`. Each shape becomes a component of one heterogeneous job.
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
        self._submission = Submission(
            {
                "partition": partition,
                "account": account,
                "qos": qos,
                "time": str(time) if isinstance(time, int) else time,
                "constraint": constraint,
            },
            gres,
            signal_s if signal_s is not None else _SPARE_S,
            requeue,
            tuple(shlex.split(extra) if isinstance(extra, str) else extra),
        )
        self._detach = detach
        self._folder = Path(_RUNS if folder is None else folder)
        text = read_requirements(requirements)
        self._wanted = HostOptions(
            placement, Strategy(strategy), Tunnel(tunnel), python, text, cache, silence_s
        )
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
        return [*found, *self._wanted.mistakes()]

    def mistakes(self, executables: Sequence[Executable]) -> Sequence[str]:
        """Returns why the program cannot be made into a job."""
        if _IN_ALLOCATION in os.environ:
            return ()
        try:
            components_of(executables, self._nodes)
        except ValueError as error:
            return [str(error)]
        return mistakes_in_choice(executables, self._wanted.placement)

    def notes(self, executables: Sequence[Executable]) -> Sequence[str]:
        """Returns the hosts that the launcher asks Slurm for."""
        if _IN_ALLOCATION in os.environ:
            return ()
        return [f"Slurm is asked for {each}" for each in components_of(executables, self._nodes)]

    def checks(self) -> Mapping[str, Callable[[], Finding]]:
        """Returns a check that asks Slurm's controller about its hosts."""
        return {"slurm": _check}

    def start(self, plan: LaunchPlan, options: LaunchOptions) -> RunningProgram:
        """Starts all nodes; returns when their addresses are known and bound.

        On a login node, that is after the job has begun, however long it is pending; the launcher
        prints what the job waits for. Ctrl-C cancels the job. With `detach` this returns at once.
        """
        if _IN_ALLOCATION in os.environ:
            allocation = Allocation(pythons(self._wanted.python))
            return allocation.deploy(plan, options, self._wanted, pack_up(plan.executables))
        folder = RunFolder(self._run_folder(plan, options))
        folder.write_submission(self.emit(plan, dataclasses.replace(options, log_dir=folder.path)))
        job = _submit(folder)
        if self._detach:
            program = SlurmProgram(plan, options, folder, job, is_launch=False)
            program.detach("job", job, f"is submitted; its folder is {folder.path}")
            return program
        program = SlurmProgram(plan, options, folder, job)
        program.watch()
        program.await_up()
        return program

    def emit(self, plan: LaunchPlan, options: LaunchOptions) -> Mapping[str, bytes]:
        """Returns what `start` would submit: `job.sh` for sbatch, and the files beside it.

        The `log_dir` of the options is where the files are going to be.
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
        python = self._wanted.python or sys.executable
        notice_s = self._signal_s
        if notice_s is None:
            notice_s = _SPARE_S + max(0, round(options.notice_s))
        submission = dataclasses.replace(self._submission, notice_s=notice_s)
        script = batch_script(plan.program, folder, directory, python, components, submission)
        order = JobOrder(
            plan=plan.outline(),
            # Quiet, because the process that watches the files shows what nodes print.
            options=dataclasses.replace(options, log_dir=RunFolder(folder).logs, quiet=True),
            components=components,
            wanted=dataclasses.replace(self._wanted, python=python),
            requeue=submission.requeue,
        )
        files, work = pack(order, plan, shipment, (str(folder), WORK), self._wanted.cache)
        return {"job.sh": script.encode(), **files, WORK: work}

    def _run_folder(self, plan: LaunchPlan, options: LaunchOptions) -> Path:
        if options.log_dir is not None:
            return options.log_dir.absolute()
        name = run_name(re.sub(r"[^A-Za-z0-9_.-]", "_", plan.program))
        return (self._folder / name).absolute()

    def attach(self, reference: str) -> RunningProgram:
        """Returns the program of a job, by its number, or of the folder of a run."""
        folder = RunFolder(Path(reference).absolute())
        if reference.isdecimal():
            state = slurm.look_at(reference)
            if state is None or not state.output:
                raise LaunchError(
                    f"Slurm does not know a job {reference} (any more); give the folder of its run"
                )
            folder = RunFolder(Path(state.output).parent)
        folder.check_owner()
        job = folder.read("job", str)
        if job is None:
            raise LaunchError(f"the run in {folder.path} was not submitted; sbatch {folder.script}")
        order = folder.read_order()
        program = SlurmProgram(order.plan, order.options, folder, job, is_launch=False)
        program.watch()
        return program


def _check() -> Finding:
    if shutil.which("sbatch") is None:
        return Finding("none", "there is no sbatch on the PATH")
    Authority("doctor")  # raises if the package for certificates is missing
    hosts = slurm.call("sinfo", "--noheader", "--format=%D %T", limit_s=20).splitlines()
    text = f"the controller answers; hosts: {', '.join(map(str.strip, hosts)) or 'none'}"
    is_usable = re.search(r"\b(idle|mixed|allocated|completing)\b", text)
    return Finding("ok", text) if is_usable else Finding("warn", text, "Jobs would wait")


def _submit(folder: RunFolder) -> str:
    """Submits the job of a folder; returns its number, and cancels the job on any error."""
    with ThreadPoolExecutor(1) as pool:
        # In a thread, so that a Ctrl-C does not lose the number of a job that is being submitted.
        submission = pool.submit(slurm.submit, folder.script)
        try:
            job = submission.result()
            folder.write("job", job)
        except BaseException:
            with contextlib.suppress(LaunchError):
                slurm.call("scancel", submission.result())
            folder.forget()
            raise
    return job
