"""What nodes ask of their host, and get: cores, memory, devices, environment, interpreter."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from absl import flags

import launchpad_lite as lp

linux = pytest.mark.skipif(sys.platform != "linux", reason="binds and limits processes")


def look(folder: Path, name: str) -> None:
    found: dict[str, Any] = {
        "cores": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [],
        "devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "variable": os.environ.get("A_VARIABLE"),
        "home": os.environ.get("HOME"),
        "hash": hash("text"),
        "interpreter": sys.executable,
        "arguments": sys.argv[1:],
        "pid": os.getpid(),
        "path": sys.path,
        "flag": flags.FLAGS["a_test_flag"].value if "a_test_flag" in flags.FLAGS else None,
    }
    (folder / name).write_text(json.dumps(found))


def looking(folder: Path, **groups: int) -> lp.Program:
    program = lp.Program("looking")
    for label, count in groups.items():
        with program.group(label):
            for index in range(count):
                program.add_node(lp.PyNode(look, folder, f"{label}{index}"))
    return program


def seen(folder: Path, name: str) -> dict[str, Any]:
    return dict(json.loads((folder / name).read_text()))


@pytest.fixture
def _flag() -> Iterator[None]:
    flags.DEFINE_integer("a_test_flag", 1, "For this test.")
    yield
    del flags.FLAGS.a_test_flag


@linux
@pytest.mark.usefixtures("_flag")
def test_nodes_get_devices_cores_environment_and_flags_of_their_own(
    launch_program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-7")
    monkeypatch.setenv("HOME", str(tmp_path))
    available = sorted(os.sched_getaffinity(0))
    several = len(available) > 1  # one core cannot be divided
    cores = {"actor": {"cpu": 0.25}, "actor[1]": {"cpu": 1}} if several else {}
    processes = {
        "learner": lp.PythonProcess(args={"a_test_flag": 5}),
        "actor": {"env": {"A_VARIABLE": "group", "HOME": None}},
        "actor[1]": lp.PythonProcess(env={"A_VARIABLE": "single"}),
        "other": {"args": {"on": True, "off": False, "many": ["1", "2"]}},
    }
    launch_program(
        looking(tmp_path, learner=2, actor=2, other=1),
        "test_mp",
        resources={"learner": {"gpu": 1}, **cores},
        processes=processes,
    ).wait()
    actor, single, other = (seen(tmp_path, name) for name in ("actor0", "actor1", "other0"))
    devices = {seen(tmp_path, f"learner{index}")["devices"] for index in range(2)}
    assert devices == {"5", "GPU-7"}
    assert actor["devices"] == other["devices"] == ""
    if several:
        assert len(actor["cores"]) == len(single["cores"]) == 1
        assert actor["cores"] != single["cores"]
    assert other["cores"] == available
    assert (actor["variable"], actor["home"]) == ("group", None)
    assert (single["variable"], single["home"]) == ("single", str(tmp_path))
    assert (other["variable"], other["home"]) == (None, str(tmp_path))
    # Flags are as if its command line said them.
    assert [seen(tmp_path, name)["flag"] for name in ("learner0", "actor0")] == [5, 1]
    assert other["arguments"][-4:] == ["--on", "--nooff", "--many=1", "--many=2"]


def take(mib: int, folder: Path) -> None:
    _block = bytearray(mib << 20)
    (folder / f"took{mib}").touch()


@linux
def test_a_node_that_takes_more_memory_than_it_asked_for_is_told_so(
    launch_program: Any, tmp_path: Path
) -> None:
    program = lp.Program("memory")
    program.add_node(lp.PyNode(take, 50, tmp_path), label="modest")
    program.add_node(lp.PyNode(take, 900, tmp_path), label="greedy")
    running = launch_program(program, "test_mp", resources={"greedy": {"ram": 0.5}})
    with pytest.raises(lp.NodeFailedError, match=r"greedy\[0\].*MemoryError.*ram_gib=0.5"):
        running.wait()
    assert not (tmp_path / "took900").exists()


@linux
def test_arguments_that_are_more_than_a_node_may_have_are_told_so(launch_program: Any) -> None:
    program = lp.Program("memory")
    program.add_node(lp.PyNode(len, bytes(150 << 20)), label="greedy")
    running = launch_program(program, "test_mp", resources={"greedy": {"ram": 0.1}})
    with pytest.raises(lp.NodeFailedError, match=r"greedy\[0\].*MemoryError.*ram_gib=0.1"):
        running.wait()


def test_more_than_there_is_is_a_mistake_of_the_plan() -> None:
    with pytest.raises(lp.ProgramError, match="actor 3 x 1000 = 3000 cores"):
        lp.plan(looking(Path(), actor=3), "test_mp", {"actor": {"cpu": 1000}})


def test_threads_say_in_the_plan_that_they_cannot_have_their_own(tmp_path: Path) -> None:
    plan = lp.plan(
        looking(tmp_path, actor=1, other=1),
        "test_mt",
        {"actor": {"cpu": 1000}},
        processes={"other": {"env": {"A": "1"}}},
    )
    resources, process = plan.notes
    assert resources.startswith("resources of actor: threads of one process share all that it has")
    assert process == (
        "environment, flags and interpreter of other: threads have those of this process"
    )


@pytest.fixture
def wrap(tmp_path: Path) -> Callable[[str], Path]:
    """Makes an interpreter of this version at another path; the text comes before its options."""

    def make(before: str, *options: str) -> Path:
        path = tmp_path / "python"
        command = " ".join([f"{before} exec {sys.executable}", *options])
        path.write_text(f'#!/bin/sh\n{command} "$@"\n')
        path.chmod(0o755)
        return path

    return make


@pytest.mark.slow
def test_a_group_may_have_another_interpreter_and_what_that_reads_when_it_starts(
    launch_program: Any, tmp_path: Path, wrap: Any
) -> None:
    (tmp_path / "beside").mkdir()
    variables = {"PYTHONHASHSEED": "7", "PYTHONPATH": str(tmp_path / "beside")}
    processes = {"a": {"env": variables}, "b": {"interpreter": wrap("A_VARIABLE=wrapped")}}
    launch_program(looking(tmp_path, a=1, b=1, c=1), "test_mp", processes=processes).wait()
    first, wrapped, other = (seen(tmp_path, name) for name in ("a0", "b0", "c0"))
    ask = [sys.executable, "-S", "-c", "print(hash('text'))"]
    assert first["hash"] == int(subprocess.check_output(ask, env={"PYTHONHASHSEED": "7"}))
    assert str(tmp_path / "beside") in first["path"]
    assert first["interpreter"] == other["interpreter"]
    assert wrapped["variable"] == "wrapped"


def test_an_interpreter_that_cannot_do_says_what_to_do(
    launch_program: Any, tmp_path: Path, wrap: Any
) -> None:
    processes = {"actor": {"interpreter": str(wrap("", "-I", "-S"))}}
    # By the original's name of the argument.
    running = launch_program(looking(tmp_path, actor=1), "test_mp", local_resources=processes)
    with pytest.raises(lp.NodeFailedError, match="-m pip install launchpad-lite"):
        running.wait()


class Steadfast:
    """Works in a new interpreter as in a forked one: it serves, hears the stop, and restarts."""

    def __init__(self, folder: Path) -> None:
        self._first = folder / "first"

    def answer(self) -> tuple[int, int]:
        return lp.restart_count(), os.getpid()

    def run(self) -> None:
        if not self._first.exists():
            self._first.touch()
            raise ValueError("once")
        lp.wait_for_stop()


def ask(steadfast: Any, folder: Path) -> None:
    # A failure after the stop would be one of the program, so the first start must be over.
    while not (answer := steadfast.answer())[0]:
        lp.wait_for_stop(0.01)
    (folder / "answer").write_text(str(answer[1]))
    lp.stop()


@pytest.mark.slow
def test_a_new_interpreter_serves_restarts_and_stops_as_a_forked_worker_does(
    launch_program: Any, tmp_path: Path
) -> None:
    program = lp.Program("steadfast")
    node = lp.CourierNode(Steadfast, tmp_path)
    handle = program.add_node(node, label="steadfast")
    program.add_node(lp.PyNode(ask, handle, tmp_path), label="asking")
    running = launch_program(
        program,
        "test_mp",
        processes={"steadfast": {"env": {"PYTHONHASHSEED": "1"}}},
        restart=lp.RestartPolicy(max_restarts=50, backoff_s=0.01),
    )
    running.wait()
    assert int((tmp_path / "answer").read_text()) != os.getpid()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"environment": {}}, "unknown setting 'environment'; known are args, env, interpreter"),
        ({"env": {"A": 1}}, "the environment variable A is a str or None, not 1"),
        ({"env": {"A=B": "1"}}, "env cannot have the name 'A=B'"),
        ({"env": "A=1"}, "env is a dict by name, not 'A=1'"),
        ({"env": {"A": "\0"}}, "the environment variable A holds a zero byte"),
        ({"env": {"A": "\ud800"}}, "the environment variable A: 'utf-8' codec can't encode"),
        ({"env": {"\ud800": "1"}}, "the name '\\ud800' in env: 'utf-8' codec can't encode"),
        ("python3", "expected lp.PythonProcess or a dict, got 'python3'"),
    ],
)
def test_settings_that_cannot_be_are_mistakes_of_the_plan(given: Any, message: str) -> None:
    with pytest.raises(lp.ProgramError) as caught:
        lp.plan(looking(Path(), actor=1), "test_mp", processes={"actor": given, "nobody": {}})
    assert f"processes of group 'actor': {message}" in str(caught.value)
    assert "processes for an unknown group 'nobody'" in str(caught.value)


def test_why_a_process_could_not_begin_is_told(launch_program: Any, tmp_path: Path) -> None:
    process = lp.PythonProcess(env={"A": "1"})
    object.__setattr__(process, "env", {"A": "\ud800"})  # as if it had not been looked at
    running = launch_program(looking(tmp_path, actor=1), "test_mp", processes={"actor": process})
    with pytest.raises(lp.NodeFailedError, match="surrogates not allowed"):
        running.wait()


def test_an_interpreter_that_is_not_there_is_a_mistake_of_the_plan() -> None:
    processes = {"actor": {"interpreter": "/nowhere/python"}}
    with pytest.raises(lp.ProgramError, match="no interpreter '/nowhere/python'"):
        lp.plan(looking(Path(), actor=1), "test_mp", processes=processes)


def test_plans_show_the_names_of_variables_and_keep_their_values() -> None:
    processes = {"actor": {"env": {"API_KEY": "secret"}, "args": {"batch": 8}}}
    text = str(lp.plan(looking(Path(), actor=1), "test_mp", processes=processes))
    assert "env API_KEY; --batch=8" in text
    assert "secret" not in text
