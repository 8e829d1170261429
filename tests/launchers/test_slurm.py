"""Programs in jobs of a real Slurm cluster, beside what all engines do; h0 runs no worker."""

import contextlib
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launchpad_lite.testing import poll_until
from tests.beds.slurm import SlurmCluster
from tests.beds.ssh_hosts import SshHosts
from tests.engines import needs_slurm
from tests.launchers.host_engines import CHECKOUT, MAIN, PROGRAM, Command, SlurmDesk, desk_on

pytestmark = [needs_slurm, pytest.mark.timeout(300)]


def stop(launch: Command) -> None:
    """Ends a program by Ctrl-C, and checks that nothing of it is left."""
    launch.send(signal.SIGINT)
    assert launch.end() == -signal.SIGINT
    assert isinstance(launch.desk, SlurmDesk)
    launch.desk.assert_nothing_is_left()


@pytest.mark.slow
def test_doctor_asks_the_controller(slurm: SlurmDesk) -> None:
    command = [sys.executable, "-m", "launchpad_lite.launch", "--launcher=slurm", "doctor"]
    with slurm.popen(command, stdout=subprocess.PIPE, text=True, cwd=CHECKOUT) as doctor:
        told, _ = doctor.communicate(timeout=60)
    assert doctor.returncode == 0
    assert re.search(r"^ok    slurm: the controller answers; hosts: \d idle$", told, re.MULTILINE)


# Ends


@pytest.mark.slow
def test_a_job_that_is_cancelled_ends_in_order_and_its_launch_says_so(slurm: SlurmDesk) -> None:
    # Slurm tells all processes at once: the store may leave before its callers.
    launch = slurm.begin(how={"patient": True})
    slurm.slurm("scancel", launch.job)
    assert launch.end() == 128 + signal.SIGTERM
    assert "CANCELLED" in launch.output
    assert launch.output.count(" calls, ") == 2
    slurm.assert_nothing_is_left()


@pytest.mark.slow
def test_when_the_host_of_the_supervisor_crashes_the_others_end_what_they_run(
    slurm: SlurmDesk,
) -> None:
    launch = slurm.begin()
    slurm.cluster.crash("h1")
    poll_until(lambda: not slurm.processes(but=launch), 30, must=False)
    assert not slurm.processes(but=launch)
    # What Slurm does by itself when it has heard nothing of the host for long enough.
    slurm.slurm("scontrol", "update", "NodeName=h1", "State=DOWN", "Reason=crashed")
    assert launch.end() == 1
    assert "Slurm ended it: NODE_FAIL" in launch.output


@pytest.mark.slow
def test_the_end_of_the_supervisor_ends_the_job_and_is_told(slurm: SlurmDesk) -> None:
    launch = slurm.begin()
    supervisor = next(
        process
        for process in slurm.hosts.processes("h1")
        if process.cmdline()[1:] and process.cmdline()[1].endswith("begin.py")
    )
    supervisor.kill()
    assert launch.end() == 1
    assert "Slurm ended it: FAILED" in launch.output
    slurm.assert_nothing_is_left()


# Beginning anew


def await_second_run(launch: Command) -> None:
    """Waits until callers are at work again, with the state that was saved; ends all."""
    launch.until(r"^\[store\[0\]\] restored \d+$")
    launch.await_calls()
    stop(launch)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        pytest.param(["scontrol", "requeue"], id="requeued"),
        # What Slurm sends the script before its time limit.
        pytest.param(["scancel", "--batch", "--signal=TERM"], id="warned of its time limit"),
    ],
)
def test_a_job_saves_its_state_and_begins_anew_with_it(slurm: SlurmDesk, how: list[str]) -> None:
    checkpoints = [str(slurm.there / "state"), None]
    launch = slurm.begin(requeue=True, checkpoints=checkpoints, placement=None)
    slurm.slurm(*how, launch.job)
    launch.until(r"is pending \(BeginTime\)")
    # Slurm itself waits two minutes; a host on which the first run still ends takes no second one.
    poll_until(lambda: not any(f"[{launch.job}." in each for each in slurm.hosts.leftovers()))
    slurm.slurm("scontrol", "update", f"JobId={launch.job}", "StartTime=now")
    await_second_run(launch)


@pytest.mark.long
def test_a_job_that_loses_a_host_begins_anew_without_it(slurm: SlurmDesk) -> None:
    checkpoints = [str(slurm.there / "state"), 0.2]
    launch = slurm.begin(nodes=2, requeue=True, checkpoints=checkpoints, placement=None)
    slurm.cluster.crash("h2")
    launch.until("pending", 90)
    await_second_run(launch)


# Other ways in


@pytest.mark.slow
def test_inside_an_allocation_no_job_is_submitted(slurm: SlurmDesk) -> None:
    script = str(slurm.write(PROGRAM + MAIN))
    launch = slurm.run("salloc", "-N2", "-Q", sys.executable, script, nodes=None, placement=None)
    launch.await_calls()
    assert len(slurm.slurm("squeue", "-h").splitlines()) == 1
    assert "pending" not in launch.output
    launcher = next(
        process
        for process in slurm.hosts.processes("h0")
        if script in process.cmdline() and "salloc" not in process.cmdline()
    )
    launcher.send_signal(signal.SIGINT)
    launch.end()
    assert launch.output.count(" calls, 0 lost") == 2
    slurm.assert_nothing_is_left()


@pytest.mark.slow
def test_each_resource_shape_has_hosts_of_its_own(slurm: SlurmDesk) -> None:
    resources = {"store": {"cpu": 2, "ram": 0.1}, "caller": {"cpu": 1, "ram": 0.1}}
    launch = slurm.begin(placement=None, resources=resources)
    assert len({host for _, host, *_ in launch.status().values()}) == 3
    stop(launch)


@pytest.mark.slow
def test_what_is_emitted_is_what_is_submitted(slurm: SlurmDesk) -> None:
    source = """
        from pathlib import Path
        from launchpad_lite.launching import LaunchOptions, get_launcher
        launcher = get_launcher("slurm", {"nodes": 2, "time": 5})
        plan = lp.plan(make_program(), launcher)
        options = LaunchOptions(log_dir=Path("run").absolute())
        emitted = launcher.emit(plan, options)
        running = launcher.start(plan, options)  # as lp.launch() does
        submitted = {name: Path("run", name).read_bytes() for name in emitted}
        print("same", emitted == submitted)
        running.stop()
    """
    assert "same True" in slurm.launch(source).check()
    slurm.assert_nothing_is_left()


@pytest.mark.slow
def test_a_script_that_was_emitted_can_be_submitted_by_hand(slurm: SlurmDesk) -> None:
    program = str(CHECKOUT / "examples" / "consumer_producers" / "program.py")
    slurm.command_line("--nodes=3", "emit", program, "--output=review").check()
    slurm.slurm("sbatch", "--wait", "review/job.sh")
    logs = slurm.command_line("logs", "review").check()
    assert "[consumer[0]] total: 190" in logs
    slurm.assert_nothing_is_left()


@pytest.mark.slow
def test_nodes_that_have_ipv6_alone_call_each_other() -> None:
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(SshHosts(2, ipv6=True))
        cluster = stack.enter_context(SlurmCluster(hosts))
        desk = stack.enter_context(desk_on(cluster, lambda: SlurmDesk(cluster)))
        output = desk.launch(how={"brief": True}, nodes=2, placement=None).check()
    assert "[caller[0]] 0 on h2 called h1" in output


# Mistakes


@pytest.mark.slow
def test_jobs_that_cannot_be_are_explained(slurm: SlurmDesk, tmp_path: Path) -> None:
    mistakes = {
        "partition": ("nowhere", "invalid partition"),
        "folder": ("/dev/null/runs", "Name one that all hosts of the cluster see"),
        "python": ("/no/such/python", "python="),
    }
    source = f"""
        for name, (value, words) in {mistakes!r}.items():
            try:
                lp.launch(make_program(), LAUNCHER, nodes=3, **{{name: value}})
            except (lp.LaunchError, ValueError) as error:
                print("refused" if words in str(error) else f"WRONG {{name}}: {{error}}", flush=True)
    """
    output = slurm.launch(source).check()
    assert output.count("refused") == len(mistakes), output
    slurm.assert_nothing_is_left()

    refusal = slurm.launch(folder=str(tmp_path)).refusal()
    assert f"does every host of the cluster see {tmp_path}" in refusal
    slurm.assert_nothing_is_left()


@pytest.mark.slow
def test_ctrl_c_cancels_a_job_that_is_pending(slurm: SlurmDesk) -> None:
    launch = slurm.launch(extra=["--begin=now+3600"])
    launch.until(r"is pending \(BeginTime\)")
    stop(launch)
