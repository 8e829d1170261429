"""How Slurm's answers are read, and what is told to `srun`: recorded, without a cluster."""

import shlex
from pathlib import Path

import pytest

from launchers.slurm._script import (
    JobState,
    node_lists,
    path_mistake,
    read_job,
    srun_command,
    unique_names,
)


def test_the_command_that_reaches_a_host() -> None:
    assert shlex.join(srun_command("h3", 1, 4, ["sh", "-c", "exec python"])) == (
        "srun --het-group=1 --nodes=1 --ntasks=1 --export=ALL --nodelist=h3 --cpus-per-task=4 "
        "--overlap --mem=0 --unbuffered --input=0 --kill-on-bad-exit=0 --quiet --job-name=agent "
        "sh -c 'exec python'"
    )
    plain = srun_command("h3", None, None, [])
    assert not any("het-group" in part or "cpus-per-task" in part for part in plain)


@pytest.mark.parametrize("path", ["/a b", "/a%j", "/a\nb", "/a\\b", '/a"', "/$HOME", "relative"])
def test_paths_that_sbatch_reads_differently_are_refused(path: str) -> None:
    mistake = path_mistake(Path(path))
    assert mistake is not None
    assert "name a folder" in mistake


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
