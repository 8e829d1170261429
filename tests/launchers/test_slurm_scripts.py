"""What Slurm is told, and how its answers are read: recorded, without a cluster."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import launchpad_lite as lp
from launchers._slurm_script import (
    Component,
    JobState,
    Submission,
    batch_script,
    components_of,
    node_lists,
    path_mistake,
    read_job,
    srun_command,
    unique_names,
)
from launchers.slurm import SlurmLauncher
from launchpad_lite.launching import Executable, LaunchOptions, get_launcher


class Idle:
    def run(self) -> None: ...


def executables(
    groups: Mapping[str, int], resources: Any = None, *, together: bool = False
) -> tuple[Executable, ...]:
    program = lp.Program("program")
    for label, count in groups.items():
        for _ in range(count):
            program.add_node(lp.PyClassNode(Idle), label=label)
    plan = lp.plan(program, "slurm", resources)
    if together:
        return tuple(dataclasses.replace(each, together="one") for each in plan.executables)
    return plan.executables


LEARNER = Component(("learner[0]",), 1, cpu=8, ram_gib=16, gpu=2)
ACTORS = Component(("actor[0]", "actor[1]"), 2, cpu=1)


def test_the_script_of_a_heterogeneous_job() -> None:
    submission = Submission(
        partition="gpu",
        account="lab",
        time="2:00:00",
        qos="high",
        constraint="a100|h100",
        notice_s=60,
        requeue=True,
        extra=("--exclusive", "--comment=two words"),
    )
    script = batch_script(
        "actor learner",
        Path("/shared/runs/1"),
        Path("/home/me"),
        "/opt/my python",
        [LEARNER, ACTORS],
        submission,
    )
    assert (
        script
        == """\
#!/bin/sh
#SBATCH --job-name=actor_learner
#SBATCH --chdir=/home/me
#SBATCH --output=/shared/runs/1/job.out
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@60
#SBATCH --requeue
#SBATCH --partition=gpu
#SBATCH --account=lab
#SBATCH --qos=high
#SBATCH --time=2:00:00
#SBATCH --constraint=a100|h100
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=16896M
#SBATCH --gres=gpu:2
#SBATCH --exclusive
#SBATCH --comment="two words"
#SBATCH hetjob
#SBATCH --partition=gpu
#SBATCH --account=lab
#SBATCH --qos=high
#SBATCH --time=2:00:00
#SBATCH --constraint=a100|h100
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --exclusive
#SBATCH --comment="two words"
exec '/opt/my python' /shared/runs/1/begin.py
"""
    )


def test_the_script_of_a_plain_job_says_no_more_than_it_must() -> None:
    script = batch_script(
        "p", Path("/r"), Path("/d"), "/python", [Component(("a[0]",), 3)], Submission()
    )
    assert script.splitlines() == [
        "#!/bin/sh",
        "#SBATCH --job-name=p",
        "#SBATCH --chdir=/d",
        "#SBATCH --output=/r/job.out",
        "#SBATCH --open-mode=append",
        "#SBATCH --signal=B:TERM@30",
        "#SBATCH --no-requeue",
        "#SBATCH --nodes=3",
        "#SBATCH --ntasks-per-node=1",
        "exec /python /r/begin.py",
    ]


def test_a_kind_of_accelerator_is_asked_for_where_some_are_wanted_only() -> None:
    submission = Submission(gres="gpu:a100:2")
    assert "#SBATCH --gres=gpu:a100:2" in submission.lines(LEARNER)
    assert not any("gres" in line for line in submission.lines(ACTORS))


def test_the_command_that_reaches_a_host() -> None:
    assert srun_command("h3", 1, 4, ["sh", "-c", "exec python"]) == [
        "srun",
        "--het-group=1",
        "--nodes=1",
        "--ntasks=1",
        "--export=ALL",
        "--nodelist=h3",
        "--cpus-per-task=4",
        "--overlap",
        "--mem=0",
        "--unbuffered",
        "--input=0",
        "--kill-on-bad-exit=0",
        "--quiet",
        "--job-name=agent",
        "sh",
        "-c",
        "exec python",
    ]
    plain = srun_command("h3", None, None, [])
    assert not any("het-group" in part or "cpus-per-task" in part for part in plain)


# Shapes


def test_the_plan_shows_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    program = lp.Program("shown")
    for label, count in (("actor", 3), ("learner", 1)):
        with program.group(label):
            for _ in range(count):
                program.add_node(lp.PyNode(print))
    plan = lp.plan(program, "slurm", resources={"learner": {"cpu": 4, "gpu": 1}}, nodes=3)
    assert plan.notes == (
        "Slurm is asked for 2 hosts: 3 x actor",
        "Slurm is asked for 1 host, each cpu=4, gpu=1: 1 x learner",
    )


def test_nodes_that_ask_for_the_same_are_one_component() -> None:
    found = executables({"actor": 5, "learner": 1}, {"actor": {"cpu": 2, "ram": 1.5}})
    assert components_of(found, 3) == [
        Component(tuple(f"actor[{i}]" for i in range(5)), 2, cpu=6, ram_gib=4.5),
        Component(("learner[0]",), 1),
    ]


def test_each_shape_has_one_host_unless_more_are_asked_for() -> None:
    found = executables({"actor": 5, "learner": 1}, {"learner": {"gpu": 1}})
    assert [each.nodes for each in components_of(found, None)] == [1, 1]
    assert [each.nodes for each in components_of(found, 5)] == [4, 1]


def test_groups_that_are_given_hosts_are_components_of_their_own() -> None:
    found = components_of(executables({"actor": 4, "store": 1, "other": 1}), {"actor": 2})
    assert [(each.executables[0], each.nodes) for each in found] == [
        ("actor[0]", 2),
        ("store[0]", 1),
    ]


@pytest.mark.parametrize(("each", "gpus"), [(0.5, 2), (0.6, 3), (0.3, 1), (1, 3), (2, 6)])
def test_accelerators_are_shared_by_nodes_that_ask_for_a_part(each: float, gpus: int) -> None:
    (component,) = components_of(executables({"a": 3}, {"a": {"gpu": each}}), 1)
    assert component.gpu == gpus


def test_nodes_that_share_a_host_ask_for_the_sum() -> None:
    resources = {"a": {"cpu": 1}, "b": {"cpu": 2, "gpu": 1}}
    (component,) = components_of(executables({"a": 1, "b": 1}, resources, together=True), None)
    assert (component.nodes, component.cpu, component.gpu) == (1, 3, 1)


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        (1, "2 groups of nodes that ask for different resources"),
        (4, "there are only 3 nodes to place"),
        ({"actors": 2}, "'actors'; the groups are: actor, learner"),
        ({"actor": 3}, "gives 3 hosts to 2"),
    ],
)
def test_numbers_of_hosts_that_do_not_fit_are_refused(nodes: Any, words: str) -> None:
    found = executables({"actor": 2, "learner": 1}, {"learner": {"cpu": 2}})
    with pytest.raises(ValueError, match=words):
        components_of(found, nodes)
    assert words in SlurmLauncher(nodes).mistakes(found)[0]


# Mistakes


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"partition": "main\n#SBATCH --wrap=id"}, "partition is a text"),
        ({"partition": 'a" --wrap="id'}, "partition is a text"),
        ({"account": ""}, "account is a text"),
        ({"time": "1\r2"}, "time is a text"),
        ({"extra": ["wrap"]}, "is no option"),
        ({"extra": ["--wrap=`id`"]}, "is no option"),
        ({"extra": "-n 4"}, "'-n' is no option"),
        ({"signal_s": 0}, "1 to 65535"),
        ({"nodes": 0}, "nodes is a number"),
        ({"nodes": True}, "nodes is a number"),
        ({"silence_s": 0.5}, "at least 1 s"),
        ({"python": "py\nthon"}, "python is a path"),
        ({"strategy": "scatter"}, "scatter"),
    ],
)
def test_options_that_would_mean_something_else_are_refused(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        get_launcher("slurm", options)


@pytest.mark.parametrize("path", ["/a b", "/a%j", "/a\nb", "/a\\b", '/a"', "/$HOME", "relative"])
def test_paths_that_sbatch_reads_differently_are_refused(path: str) -> None:
    mistake = path_mistake(Path(path))
    assert mistake is not None
    assert "name a folder" in mistake


# Emitting


def test_what_is_emitted_is_the_same_each_time_and_holds_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program = lp.Program("program")
    program.add_node(lp.PyClassNode(Idle), label="idle")
    launcher = get_launcher("slurm")
    plan, options = lp.plan(program, launcher), LaunchOptions(log_dir=tmp_path / "run")
    files = launcher.emit(plan, options)
    assert files == launcher.emit(plan, options)
    assert {"job.sh", "begin.py", "order.json", "order.pickle", "work.pickle"} < set(files)
    assert files["job.sh"].decode().endswith(f"{tmp_path}/run/begin.py\n")
    assert not (tmp_path / "run").exists()


def test_a_program_in_a_folder_with_a_strange_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strange = tmp_path / "a folder"
    strange.mkdir()
    monkeypatch.chdir(strange)
    program = lp.Program("program")
    program.add_node(lp.PyClassNode(Idle), label="idle")
    launcher = get_launcher("slurm", {"folder": tmp_path})
    with pytest.raises(lp.LaunchError, match="a folder' has characters"):
        launcher.emit(lp.plan(program, launcher), LaunchOptions())


# Answers

# Slurm 22.05, shortened at the right.
RUNNING = (
    "JobId=7 JobName=counting UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=4294901753 "
    "Nice=0 Account=(null) QOS=(null) JobState=RUNNING Reason=None Dependency=(null) Requeue=0 "
    "Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0 RunTime=00:00:03 NodeList=h[1-3] BatchHost=h1 "
    "StdErr=/shared/run/job.out StdIn=/dev/null StdOut=/shared/run/job.out Power="
)


def test_the_state_of_a_job_is_read() -> None:
    state = read_job(RUNNING)
    assert state == JobState("RUNNING", "None", "0:0", "h1", "/shared/run/job.out")
    assert not state.is_over
    assert not state.waits
    assert state.describe() == "RUNNING"


def test_of_several_components_the_one_that_failed_is_told() -> None:
    first = RUNNING.replace("RUNNING", "CANCELLED")
    other = RUNNING.replace("RUNNING Reason=None", "NODE_FAIL Reason=NodeDown")
    assert read_job(f"{first}\n{other}\n").describe() == "NODE_FAIL (NodeDown)"
    assert read_job(f"{RUNNING}\n{other}\n").state == "RUNNING"


@pytest.mark.parametrize("answer", ["\n", "slurm_load_jobs error", "JobId=7"])
def test_what_is_no_answer_is_no_state(answer: str) -> None:
    with pytest.raises(ValueError, match=r"said nothing|is no job"):
        read_job(answer)


def test_the_hosts_of_an_allocation_are_read_from_the_environment() -> None:
    assert node_lists({"SLURM_JOB_NODELIST": "h[1-3]"}) == [(None, "h[1-3]")]
    heterogeneous = {
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_NODELIST": "h1",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "h1",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "h[2-3]",
    }
    assert node_lists(heterogeneous) == [(0, "h1"), (1, "h[2-3]")]


def test_a_host_that_two_components_share_has_two_names() -> None:
    assert unique_names([(0, "h1"), (1, "h1"), (1, "h2")]) == {
        "h1-component0": (0, "h1"),
        "h1-component1": (1, "h1"),
        "h2": (1, "h2"),
    }
