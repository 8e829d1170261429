"""A real Slurm cluster on the hosts of a bed: its controller on h0, a slurmd on each host."""

import contextlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from launchpad_lite.testing import poll_until
from tests.beds.bed import Bed
from tests.beds.ssh_hosts import LAUNCHER, SshHosts, end, find_program, remove

_DAEMONS = ("slurmd", "slurmstepd")


class SlurmCluster(Bed):
    """Slurm with one partition, `main`, of all hosts; a context manager. Needs the hosts' root.

    Each node claims 4 CPUs and 4000 MB, whatever the machine has. Clients run on h0; as on a network
    drive, batch scripts write to `hosts.shared`.

    Not thread-safe.

    Args:
        hosts: They are up, and outlive the cluster.
    """

    def __init__(self, hosts: SshHosts) -> None:
        self.hosts = hosts
        self._folder = hosts.shared.parent / "slurm"
        super().__init__()

    @property
    def environment(self) -> dict[str, str]:
        """Our environment, with what Slurm's commands need on h0; hosts have another /tmp."""
        ours = {name: value for name, value in os.environ.items() if name != "TMPDIR"}
        return {**ours, "SLURM_CONF": str(self._config)}

    def run(self, command: Sequence[str], **popen_options: Any) -> "subprocess.Popen[Any]":
        """Starts a command on h0, the login node, as `SshHosts.run` does."""
        return self.hosts.run(command, **{"env": self.environment, **popen_options})

    def crash(self, name: str) -> None:
        """Kills a host. The controller takes it for down after about 20 s."""
        self.hosts.crash(name)

    def boot(self, name: str) -> None:
        """Starts a host that crashed, and its slurmd; waits until the controller counts on it.

        That may take 30 s if a job had just ended there, or was about to: the controller waits for it.
        """
        self.hosts.boot(name)
        self._start(name)
        self._await([name], {"idle", "mix", "alloc"})

    def leftovers(self) -> list[str]:
        """What runs on any host, and jobs that are not over, as "job 7 RUNNING train"."""
        jobs = self._call("squeue", "-h", "-o", "job %i %T %j").splitlines()
        return [*self.hosts.leftovers(), *jobs]

    def restore(self) -> None:
        """Ends all jobs and makes the hosts as they were at the start."""
        self._call("scancel", "--signal=KILL", "--full", "--user=root")
        self._call("scancel", "--user=root")
        self.hosts.restore()
        for name in self.hosts.names:
            if not self._daemons(name):
                # Or the controller would wait for the end of jobs of which the node knows nothing.
                self._call("scontrol", "update", f"node={name}", "state=down", "reason=crash")
                self._start(name)
                self._call("scontrol", "update", f"node={name}", "state=resume")
        self._await(self.hosts.names, {"idle"})

    @property
    def _config(self) -> Path:
        return self._folder / "slurm.conf"

    def _build(self, stack: contextlib.ExitStack) -> None:
        for part in ("state", "log", "spool"):
            (self._folder / part).mkdir(parents=True)
        stack.callback(remove, self._folder)
        key = self._folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        nodes = [
            f"NodeName={name} NodeAddr={self.hosts.addresses[name]} CPUs=4 RealMemory=4000\n"
            for name in self.hosts.names
        ]
        address = self.hosts.addresses[LAUNCHER]
        self._config.write_text(
            _CONFIG.format(
                folder=self._folder,
                launcher=LAUNCHER,
                address=address,
                families="EnableIPv6,DisableIPv4" if ":" in address else "NoInAddrAny",
            )
            + "".join(nodes)
        )
        stack.callback(self._end_daemons)
        files = {
            "--socket": "munge.sock",
            "--key-file": "munge.key",
            "--pid-file": "munged.pid",
            "--log-file": "log/munged.log",
            "--seed-file": "munge.seed",
        }
        options = [f"{option}={self._folder / name}" for option, name in files.items()]
        munged = self.hosts.run_service(
            [find_program("munged") or "munged", "--foreground", "--force", *options]
        )
        stack.callback(end, munged)
        poll_until((self._folder / "munge.sock").exists)
        controller = self.hosts.run_service(
            [find_program("slurmctld") or "slurmctld", "-D", "-f", str(self._config)]
        )
        stack.callback(end, controller)
        for name in self.hosts.names:
            self._start(name)
        self._await(self.hosts.names, {"idle"})

    def _start(self, name: str) -> None:
        log = self._folder / "log" / f"slurmd-{name}.log"
        log.unlink(missing_ok=True)
        (self._folder / "spool" / name).mkdir(exist_ok=True)
        self.hosts.run_on(name, find_program("slurmd") or "slurmd", "-f", str(self._config))
        poll_until(lambda: log.exists() and "slurmd started" in log.read_text())

    def _await(self, names: Sequence[str], states: set[str]) -> None:
        def reached() -> bool:
            answer = self._call("sinfo", "-h", "-N", "-o", "%N %t")
            # A star marks a node that does not answer.
            found = dict(line.split() for line in answer.splitlines())
            return all(found.get(name) in states for name in names)

        if not poll_until(reached, 80.0, must=False):
            state = self._call("sinfo", "-N", "-l")
            log = (self._folder / "log" / "slurmctld.log").read_text()[-2000:]
            raise RuntimeError(f"not all of {', '.join(names)} are {states}:\n{state}\n{log}")

    def _call(self, *command: str) -> str:
        with self.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as client:
            try:
                return str(client.communicate(timeout=30)[0])
            except subprocess.TimeoutExpired:  # Slurm's commands wait long for its controller
                client.kill()
                return ""

    def _daemons(self, name: str) -> list[psutil.Process]:
        found = []
        for process in [*self.hosts.daemons(name), *self.hosts.processes(name)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name() in _DAEMONS:
                    found.append(process)
        return found

    def _end_daemons(self) -> None:
        for name in self.hosts.names:
            daemons = self._daemons(name)
            for daemon in daemons:
                with contextlib.suppress(psutil.NoSuchProcess):
                    daemon.kill()
            psutil.wait_procs(daemons, timeout=30)


# What is not said otherwise is the shortest time that Slurm allows or works with.
_CONFIG = """ClusterName=bed
SlurmctldHost={launcher}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdSpoolDir={folder}/spool/%n
SlurmdPidFile={folder}/slurmd-%h.pid
SlurmdLogFile={folder}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=200
SchedulerParameters=sched_interval=1,bf_interval=1
MpiDefault=none
ReturnToService=2
SlurmdTimeout=8
KillWait=10
MinJobAge=300
InactiveLimit=0
CommunicationParameters=NoCtldInAddrAny,{families}
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
PartitionName=main Nodes=ALL Default=YES MaxTime=60 State=UP
"""
