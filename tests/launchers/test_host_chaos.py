"""Programs on real hosts reach their end through faults at random, and other tests of minutes."""

import contextlib
import random
import signal
import time

import psutil
import pytest

from tests.engines import needs_kubernetes, needs_slurm, needs_ssh_hosts
from tests.launchers.host_engines import KubernetesDesk, SlurmDesk, SshDesk
from tests.launchers.test_ssh_faults import FAULTS, STAGES, check_fault_during_the_start

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


@needs_ssh_hosts
@pytest.mark.parametrize("seed", range(2))
def test_hosts_links_and_processes_fail_at_random(ssh: SshDesk, seed: int) -> None:
    chance = random.Random(seed)
    policy = {"when": "on_failure", "max_restarts": 1000, "max_backoff_s": 1}
    run = ssh.begin(
        restart={"store": policy, "caller": policy},
        how={"patient": True, "callers": 6},
        placement=None,
    )
    give_up_at = time.monotonic() + 60
    whole = list(ssh.hosts.names)
    while time.monotonic() < give_up_at:
        victim = chance.choice(whole)
        faults = ["worker"] * 30
        if len(whole) > 1:  # the last one must not be lost
            faults += ["ssh", "agent", "reaper", "sshd", "crash", "cut"]
        fault = chance.choice(faults)
        print(f"{fault} {victim}")
        if fault in ("crash", "cut"):
            getattr(ssh.hosts, fault)(victim)
        else:
            with contextlib.suppress(psutil.Error, ValueError, StopIteration):
                ssh.victim(fault, victim).kill()
        if fault != "worker":
            whole.remove(victim)
        run.await_calls()
    run.finish()


@needs_ssh_hosts
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("stage", STAGES)
def test_any_fault_in_any_stage_of_the_start_leaves_nothing(
    ssh: SshDesk, stage: str, fault: str
) -> None:
    check_fault_during_the_start(ssh, stage, fault)


@needs_kubernetes
def test_pods_are_killed_at_random(kubernetes: KubernetesDesk) -> None:
    run = kubernetes.begin(
        restart=100,
        checkpoints=[str(kubernetes.there / "state"), 0.2],
        how={"patient": True, "callers": 3},
    )
    killed = run.kill_at_random("store", "caller", kills=12, seed=8)
    run.strike()
    run.await_calls()
    run.finish()
    assert sorted(node for node, _ in run.result["restarts"]) == sorted(killed)


@needs_slurm
def test_before_the_time_limit_of_its_job_a_program_begins_anew(slurm: SlurmDesk) -> None:
    checkpoints = [str(slurm.there / "state"), None]
    options = {"requeue": True, "time": 2, "signal_s": 75, "checkpoints": checkpoints}
    launch = slurm.begin(placement=None, **options)
    launch.until("the caller leaves", 70)  # Slurm looks at its clock every 30 s
    launch.until(r"is pending \(BeginTime\)")
    slurm.slurm("scontrol", "update", f"JobId={launch.job}", "StartTime=now")
    launch.until(r"^\[store\[0\]\] restored \d+$")
    launch.send(signal.SIGINT)
    launch.end()
