"""What Slurm is asked for: scripts and components of jobs, without a cluster."""

import dataclasses
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import launchpad_lite as lp
from launchers.slurm import SlurmLauncher
from launchers.slurm._folder import RunFolder
from launchpad_lite.launching import LaunchOptions


class Idle:
    def run(self) -> None: ...


@pytest.fixture(autouse=True)
def outside_of_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.chdir(tmp_path)


def make_program(groups: Mapping[str, int], name: str = "program") -> lp.Program:
    program = lp.Program(name)
    for label, count in groups.items():
        for _ in range(count):
            program.add_node(lp.PyClassNode(Idle), label=label)
    return program


def asked(groups: Mapping[str, int], resources: Any = None, nodes: Any = None) -> list[str]:
    """Returns the components of a job, as a plan shows them."""
    notes = lp.plan(make_program(groups), SlurmLauncher(nodes), resources).notes
    return [note.removeprefix("Slurm is asked for ") for note in notes]


def script(program: lp.Program, resources: Any = None, **options: Any) -> str:
    launcher = SlurmLauncher(**options)
    plan = lp.plan(program, launcher, resources)
    files = launcher.emit(plan, LaunchOptions(log_dir=Path("run")))
    return files["job.sh"].decode().replace(str(Path.cwd()), "/here")


_LEARNER = {"cpu": 8, "ram_gib": 16, "gpu": 2}


def test_the_script_of_a_heterogeneous_job() -> None:
    written = script(
        make_program({"learner": 1, "actor": 2}, "actor learner"),
        {"learner": _LEARNER, "actor": {"cpu": 1}},
        nodes=3,
        partition="gpu",
        account="lab",
        time="2:00:00",
        qos="high",
        constraint="a100|h100",
        signal_s=60,
        requeue=True,
        extra="--exclusive '--comment=two words'",
        python="/opt/my python",
    )
    assert (
        written
        == """\
#!/bin/sh
#SBATCH --job-name=actor_learner
#SBATCH --chdir=/here
#SBATCH --output=/here/run/job.out
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
exec '/opt/my python' /here/run/begin.py
"""
    )


def test_the_script_of_a_plain_job_says_no_more_than_it_must() -> None:
    assert script(make_program({"a": 3}), nodes=3, python="/python").splitlines() == [
        "#!/bin/sh",
        "#SBATCH --job-name=program",
        "#SBATCH --chdir=/here",
        "#SBATCH --output=/here/run/job.out",
        "#SBATCH --open-mode=append",
        "#SBATCH --signal=B:TERM@30",
        "#SBATCH --no-requeue",
        "#SBATCH --nodes=3",
        "#SBATCH --ntasks-per-node=1",
        "exec /python /here/run/begin.py",
    ]


def test_a_kind_of_accelerator_is_asked_for_where_some_are_wanted_only() -> None:
    resources = {"learner": _LEARNER, "actor": {"cpu": 1}}
    written = script(make_program({"learner": 1, "actor": 1}), resources, gres="gpu:a100:2")
    learner, actor = written.split("hetjob")
    assert "#SBATCH --gres=gpu:a100:2\n" in learner
    assert "gres" not in actor


# Components


@pytest.mark.parametrize(
    ("groups", "resources", "nodes", "components"),
    [
        # Nodes that ask for the same are one component.
        (
            {"actor": 5, "learner": 1},
            {"actor": {"cpu": 2, "ram": 1.5}},
            3,
            ["2 hosts, each cpu=6, ram_gib=4.5: 5 x actor", "1 host: 1 x learner"],
        ),
        # Each has one host unless more are asked for.
        (
            {"actor": 5, "learner": 1},
            {"learner": {"cpu": 4, "gpu": 1}},
            None,
            ["1 host: 5 x actor", "1 host, each cpu=4, gpu=1: 1 x learner"],
        ),
        (
            {"actor": 5, "learner": 1},
            {"learner": {"gpu": 1}},
            5,
            ["4 hosts: 5 x actor", "1 host, each gpu=1: 1 x learner"],
        ),
        # Groups that are given hosts are components of their own.
        (
            {"actor": 4, "store": 1, "other": 1},
            None,
            {"actor": 2},
            ["2 hosts: 4 x actor", "1 host: 1 x store, 1 x other"],
        ),
        # Accelerators are shared by nodes that ask for a part.
        *(
            ({"a": 3}, {"a": {"gpu": each}}, 1, [f"1 host, each gpu={gpus}: 3 x a"])
            for each, gpus in [(0.5, 2), (0.6, 3), (0.3, 1), (1, 3), (2, 6)]
        ),
    ],
)
def test_slurm_is_asked_for_components(
    groups: Mapping[str, int], resources: Any, nodes: Any, components: list[str]
) -> None:
    assert asked(groups, resources, nodes) == components


def test_nodes_that_share_a_host_ask_for_the_sum() -> None:
    resources = {"a": {"cpu": 1}, "b": {"cpu": 2, "gpu": 1}}
    plan = lp.plan(make_program({"a": 1, "b": 1}), "slurm", resources)
    shared = [dataclasses.replace(each, together="one") for each in plan.executables]
    (note,) = SlurmLauncher().notes(shared)
    assert note == "Slurm is asked for 1 host, each cpu=3, gpu=1: 1 x a, 1 x b"


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
    with pytest.raises(lp.ProgramError, match=words):
        asked({"actor": 2, "learner": 1}, {"learner": {"cpu": 2}}, nodes)


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
        ({"python": "py\nthon"}, "python is a command"),
        ({"cache": "-rf"}, "cache is a command or a path, .* not .-rf"),
        ({"strategy": "scatter"}, "scatter"),
    ],
)
def test_options_that_would_mean_something_else_are_refused(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        SlurmLauncher(**options)


# Emitting


def test_what_is_emitted_is_the_same_each_time_and_so_holds_no_secret(tmp_path: Path) -> None:
    launcher, options = SlurmLauncher(), LaunchOptions(log_dir=tmp_path / "run")
    plan = lp.plan(make_program({"idle": 1}), launcher)
    files = launcher.emit(plan, options)
    assert files == launcher.emit(plan, options)
    assert set(files) == {"job.sh", "begin.py", "order.json", "work.pickle"}
    assert not (tmp_path / "run").exists()


def test_what_runs_before_our_packages_are_there_has_all_that_it_names(tmp_path: Path) -> None:
    launcher, options = SlurmLauncher(), LaunchOptions(log_dir=tmp_path)
    # Joined of texts, which no type checker sees as one.
    begin = launcher.emit(lp.plan(make_program({"idle": 1}), launcher), options)["begin.py"]
    check = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=F821", "-"]
    done = subprocess.run(check, input=begin, capture_output=True)
    assert done.returncode == 0, done.stdout.decode()


@pytest.mark.parametrize(
    ("file", "before", "after", "words"),
    [
        ("work.pickle", b"idle", b"late", "its digest differs"),
        ("order.json", b'"python": [\n    3', b'"python": [\n    4', "name another interpreter"),
        ("order.json", b"{", b"", "JSONDecodeError"),
    ],
)
def test_a_supervisor_that_cannot_begin_leaves_word_why(
    tmp_path: Path, file: str, before: bytes, after: bytes, words: str
) -> None:
    launcher, options = SlurmLauncher(), LaunchOptions(log_dir=tmp_path)
    files = dict(launcher.emit(lp.plan(make_program({"idle": 1}), launcher), options))
    assert before in files[file]
    files[file] = files[file].replace(before, after)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    begun = [sys.executable, tmp_path / "begin.py"]
    done = subprocess.run(begun, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert words in done.stderr
    assert words in RunFolder(tmp_path).read("failure", str)


def test_a_program_in_a_folder_with_a_strange_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strange = tmp_path / "a folder"
    strange.mkdir()
    monkeypatch.chdir(strange)
    launcher = SlurmLauncher(folder=tmp_path)
    with pytest.raises(lp.LaunchError, match="a folder' has characters"):
        launcher.emit(lp.plan(make_program({"idle": 1}), launcher), LaunchOptions())
