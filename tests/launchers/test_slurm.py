"""Programs in jobs of a real Slurm cluster, launched from h0, which runs no worker."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launchpad_lite.testing import poll_until
from tests.beds.slurm import SlurmCluster
from tests.engines import needs_slurm

pytestmark = [needs_slurm, pytest.mark.slow]

CHECKOUT = Path(__file__).resolve().parents[2]

PROGRAM = """
import json, os, socket, sys
import launchpad_lite as lp

class Counter:
    def __init__(self):
        self.count = 0

    def add(self):
        self.count += 1
        return self.count

    def where(self):
        return socket.gethostname()

    def save(self, folder):
        (folder / "count").write_text(str(self.count))

    def restore(self, folder):
        self.count = int((folder / "count").read_text())

class Worker:
    def __init__(self, counter):
        self._counter = counter

    def run(self):
        print("worker on", socket.gethostname(), "counts", self._counter.add(), flush=True)
        lp.wait_for_stop()
        print("worker leaves", flush=True)

def make_program(workers: int = 2):
    program = lp.Program("counting")
    with program.group("counter"):
        counter = program.add_node(lp.CourierNode(Counter))
    with program.group("worker"):
        for _ in range(workers):
            program.add_node(lp.PyClassNode(Worker, counter))
    return program

if __name__ == "__main__":
    program = make_program()
    options = json.loads(sys.argv.pop(1))
    running = lp.launch(program, "slurm", **options)
    counter = program.groups["counter"][0].create_handle().dereference()
    print("the counter is on", counter.where(), flush=True)
    running.wait()
"""


class Command:
    """A command on the login node, with what it has printed so far."""

    def __init__(self, cluster: SlurmCluster, *command: str) -> None:
        folder = cluster.hosts.shared
        (folder / "counting.py").write_text(PROGRAM)
        self.process = cluster.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            cwd=folder,
            env={**_environment(cluster), "PYTHONPATH": str(CHECKOUT)},
        )
        self.output = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with self.process.stdout as lines:
            for line in lines:
                self.output += line

    def until(self, words: str, timeout_s: float = 60.0) -> None:
        poll_until(
            lambda: words in self.output or not self._reader.is_alive(), timeout_s, must=False
        )
        assert words in self.output, self.output

    def end(self, timeout_s: float = 60.0) -> int:
        code = self.process.wait(timeout_s)
        self._reader.join(timeout_s)
        return code

    @property
    def job(self) -> str:
        found = re.search(r"job (\d+)", self.output)
        assert found, self.output
        return found[1]


def _environment(cluster: SlurmCluster) -> dict[str, str]:
    kept = {
        name: value
        for name, value in cluster.environment.items()
        if not name.startswith(("PYTEST_", "SLURM_JOB"))
    }
    return {**kept, "PYTHONUNBUFFERED": "1"}


class Login:
    """What users do on the login node."""

    def __init__(self, cluster: SlurmCluster) -> None:
        self.cluster = cluster
        self.commands: list[Command] = []

    def run(self, *command: str) -> Command:
        self.commands.append(Command(self.cluster, *command))
        return self.commands[-1]

    def launch(self, **options: Any) -> Command:
        """Launches the program; returns when both workers have counted."""
        options = {"nodes": 3, **options}
        command = self.run(sys.executable, "counting.py", json.dumps(options))
        command.until("counts 2")
        return command

    def command_line(self, *arguments: str) -> Command:
        module = ("-m", "launchpad_lite.launch", "--launcher=slurm")
        return self.run(sys.executable, *module, *arguments)

    def slurm(self, *command: str) -> str:
        done = self.run(*command)
        assert done.end() == 0, done.output
        return done.output


@pytest.fixture
def login(slurm: SlurmCluster) -> Iterator[Login]:
    here = Login(slurm)
    yield here
    for command in here.commands:
        with contextlib.suppress(ProcessLookupError):
            command.process.kill()
        command.end()


def assert_nothing_is_left(login: Login) -> None:
    assert poll_until(lambda: not login.cluster.leftovers(), 30.0, must=False), (
        login.cluster.leftovers()
    )


def assert_no_process_is_left(login: Login, but: Command | None = None) -> None:
    spared = [f"h0: {but.process.pid} "] if but is not None else []

    def left() -> list[str]:
        return [
            line
            for line in login.cluster.hosts.leftovers()
            if not line.startswith(tuple(spared)) and "slurmstepd: " not in line  # Slurm's own
        ]

    assert poll_until(lambda: not left(), 30.0, must=False), left()


# The examples


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("examples.consumer_producers.program", "[consumer[0]] total: 190"),
        ("examples.map_reduce.program", "100%"),
        ("examples.actor_learner.program", "475 reached"),
    ],
)
def test_examples_run_unchanged_on_three_nodes(login: Login, program: str, words: str) -> None:
    example = login.command_line("--nodes=3", program)
    assert example.end(60) == 0, example.output
    assert words in example.output
    assert_nothing_is_left(login)


def test_a_launching_process_calls_nodes_and_ctrl_c_stops_them_in_order(login: Login) -> None:
    launch = login.launch()
    launch.until("the counter is on h")
    assert "the counter is on h0" not in launch.output
    launch.process.send_signal(signal.SIGINT)
    assert launch.end() == -signal.SIGINT
    assert launch.output.count("worker leaves") == 2
    assert_nothing_is_left(login)


# Ends


def test_a_job_that_is_cancelled_ends_in_order_and_its_launch_says_so(login: Login) -> None:
    launch = login.launch()
    login.slurm("scancel", launch.job)
    assert launch.end() == 128 + signal.SIGTERM
    assert "CANCELLED" in launch.output
    assert launch.output.count("worker leaves") == 2
    assert_nothing_is_left(login)


def test_a_host_that_crashes_is_named(login: Login) -> None:
    launch = login.launch()
    login.cluster.crash("h3")
    assert launch.end() == 1
    assert "on h3 failed" in launch.output
    assert_no_process_is_left(login)
    login.cluster.boot("h3")  # Slurm waits for it until it takes the job for over


def test_when_the_host_of_the_supervisor_crashes_the_others_end_what_they_run(login: Login) -> None:
    launch = login.launch()
    login.cluster.crash("h1")
    assert_no_process_is_left(login, but=launch)
    # What Slurm does by itself when it has heard nothing of the host for long enough.
    login.slurm("scontrol", "update", "NodeName=h1", "State=DOWN", "Reason=crashed")
    assert launch.end() == 1
    assert "Slurm ended it: NODE_FAIL" in launch.output


def test_the_end_of_the_supervisor_ends_the_job_and_is_told(login: Login) -> None:
    launch = login.launch()
    supervisor = next(
        process
        for process in login.cluster.hosts.processes("h1")
        if process.cmdline()[1:] and process.cmdline()[1].endswith("begin.py")
    )
    supervisor.kill()
    assert launch.end() == 1
    assert "Slurm ended it: FAILED" in launch.output
    assert_nothing_is_left(login)


def test_a_job_outlives_its_launch_and_can_be_found_again(login: Login) -> None:
    launch = login.launch()
    launch.process.kill()
    stop = login.command_line("stop", launch.job)
    assert stop.end() == 0, stop.output
    assert "counting: stopped, stop() was called" in stop.output
    assert_nothing_is_left(login)


def test_a_detached_program_is_looked_at_and_stopped_from_another_shell(login: Login) -> None:
    launch = login.command_line("--nodes=3", "--detach", "counting.py", "--workers=2")
    assert launch.end() == 0, launch.output
    assert f"status {launch.job}" in launch.output

    def told(command: str) -> str:
        done = login.command_line(command, launch.job)
        assert done.end() == 0, done.output
        return done.output

    # The program and two workers.
    poll_until(lambda: told("status").count("running") == 3, 60.0)
    assert re.search(r"^counter\[0\] +serving +h\d +\d+ +0 ", told("status"), re.MULTILINE)
    poll_until(lambda: "[worker[1]] worker on h" in told("logs"))
    folder = re.search(r"its folder is (.*)", launch.output)
    assert folder
    stop = login.command_line("stop", folder[1])
    assert stop.end() == 0, stop.output
    assert "counting: stopped" in told("status")
    assert_nothing_is_left(login)


# Beginning anew


def test_a_requeued_job_goes_on_from_its_checkpoints(login: Login) -> None:
    folder = str(login.cluster.hosts.shared / "checkpoints")
    launch = login.launch(requeue=True, checkpoints=folder)
    login.slurm("scontrol", "requeue", launch.job)
    launch.until("is pending (BeginTime)")
    login.slurm("scontrol", "update", f"JobId={launch.job}", "StartTime=now")
    launch.until("counts 4")
    launch.process.send_signal(signal.SIGINT)
    assert launch.end() == -signal.SIGINT
    assert_nothing_is_left(login)


@pytest.mark.timeout(180)
def test_before_its_time_limit_a_program_saves_its_state_and_begins_anew(login: Login) -> None:
    folder = str(login.cluster.hosts.shared / "checkpoints")
    launch = login.launch(requeue=True, checkpoints=folder, time=2, signal_s=75)
    launch.until("worker leaves", 70)  # Slurm looks at its clock every 30 s
    launch.until("is pending (BeginTime)")
    login.slurm("scontrol", "update", f"JobId={launch.job}", "StartTime=now")
    launch.until("counts 4")
    launch.process.send_signal(signal.SIGINT)
    assert launch.end() == -signal.SIGINT
    assert_nothing_is_left(login)


def test_a_job_that_loses_a_host_begins_anew_without_it(login: Login) -> None:
    folder = str(login.cluster.hosts.shared / "checkpoints")
    launch = login.launch(nodes=2, requeue=True, checkpoints=folder)
    login.cluster.crash("h2")
    launch.until("counts 4")
    launch.process.send_signal(signal.SIGINT)
    assert launch.end() == -signal.SIGINT
    assert_nothing_is_left(login)


# Other ways in


def test_inside_an_allocation_no_job_is_submitted(login: Login) -> None:
    options = json.dumps({})
    launch = login.run("salloc", "-N2", "-Q", sys.executable, "counting.py", options)
    launch.until("counts 2")
    launch.until("the counter is on h")
    assert len(login.slurm("squeue", "-h").splitlines()) == 1
    assert "pending" not in launch.output
    launcher = next(
        process
        for process in login.cluster.hosts.processes("h0")
        if "counting.py" in process.cmdline() and "salloc" not in process.cmdline()
    )
    launcher.send_signal(signal.SIGINT)
    launch.end()
    assert launch.output.count("worker leaves") == 2
    assert_nothing_is_left(login)


def test_each_resource_shape_has_hosts_of_its_own(login: Login) -> None:
    resources = {"counter": {"cpu": 2, "ram": 0.1}, "worker": {"cpu": 1, "ram": 0.1}}
    launch = login.launch(nodes=3, resources=resources)
    launch.until("the counter is on h")
    counter = re.search(r"the counter is on (h\d)", launch.output)
    workers = re.findall(r"worker on (h\d)", launch.output)
    assert counter
    assert len({counter[1], *workers}) == 3
    launch.process.send_signal(signal.SIGINT)
    assert launch.end() == -signal.SIGINT
    assert_nothing_is_left(login)


def test_what_is_emitted_is_what_is_submitted(login: Login) -> None:
    source = """
import launchpad_lite as lp, counting, sys
from pathlib import Path
from launchpad_lite.launching import LaunchOptions, get_launcher
launcher = get_launcher("slurm", {"nodes": 2, "time": 5})
plan = lp.plan(counting.make_program(), launcher)
options = LaunchOptions(log_dir=Path("run").absolute())
emitted = launcher.emit(plan, options)
running = launcher.start(plan, options)
submitted = {name: Path("run", name).read_bytes() for name in emitted}
print("same", emitted == submitted)
running.stop()
"""
    (login.cluster.hosts.shared / "emits.py").write_text(source)
    command = login.run(sys.executable, "emits.py")
    assert command.end() == 0, command.output
    assert "same True" in command.output
    assert_nothing_is_left(login)


def test_a_script_that_was_emitted_can_be_submitted_by_hand(login: Login) -> None:
    program = "examples.consumer_producers.program"
    emit = login.command_line("--nodes=3", "emit", program, "--output=review")
    assert emit.end() == 0, emit.output
    login.slurm("sbatch", "--wait", "review/job.sh")
    logs = login.command_line("logs", "review")
    assert logs.end() == 0
    assert "[consumer[0]] total: 190" in logs.output
    assert_nothing_is_left(login)


# Mistakes


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"partition": "nowhere"}, "invalid partition"),
        ({"nodes": 4}, "nodes=4, but there are only 3"),
        ({"partition": "main\n#SBATCH --wrap=id"}, "on one line"),
        ({"extra": ["wrap"]}, "is no option of sbatch"),
        ({"folder": "/dev/null/runs"}, "Name one that all hosts of the cluster see"),
        ({"python": "/no/such/python"}, "python="),
    ],
)
def test_a_job_that_cannot_be_is_explained(
    login: Login, options: dict[str, Any], words: str
) -> None:
    launch = login.run(sys.executable, "counting.py", json.dumps(options))
    assert launch.end() == 1
    assert words in launch.output
    assert_nothing_is_left(login)


def test_a_folder_that_hosts_do_not_see_is_named(login: Login, tmp_path: Path) -> None:
    launch = login.run(sys.executable, "counting.py", json.dumps({"folder": str(tmp_path)}))
    assert launch.end(60) == 1
    assert f"does every host of the cluster see {tmp_path}" in launch.output
    assert_nothing_is_left(login)


def test_ctrl_c_cancels_a_job_that_is_pending(login: Login) -> None:
    options = {"extra": ["--begin=now+3600"]}
    launch = login.run(sys.executable, "counting.py", json.dumps(options))
    launch.until("is pending (BeginTime)")
    launch.process.send_signal(signal.SIGINT)
    assert launch.end() == -signal.SIGINT
    assert_nothing_is_left(login)
