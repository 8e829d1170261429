"""Programs that run, as other shells of the same user see them."""

import contextlib
import fcntl
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import launchpad_lite as lp
from launchpad_lite.cli._run_commands import AskOptions, ask_listed
from launchpad_lite.parts.private_files import user_name
from launchpad_lite.testing import poll_until

#: Runs one command line after the other, as a shell would, and prints what each returned.
_SHELL = """
import runpy, sys
for words in sys.argv[1:]:
    sys.argv = ["launch", *words.split()]
    try:
        runpy.run_module("launchpad_lite.launch", run_name="__main__")
    except SystemExit as ended:
        print("exit code", ended.code, flush=True)
"""

Shell = Callable[..., "tuple[str, str]"]


class Buffer:
    def wait(self, event: Any) -> None:
        print("waits")
        event.wait() if event is not None else lp.wait_for_stop()


class Actor:
    def __init__(self, buffer: Any, event: Any = None) -> None:
        self._buffer = buffer
        self._event = event

    def run(self) -> None:
        print("one\ntwo", flush=True)
        self._buffer.wait(self._event)


def make_program(name: str = "demo") -> lp.Program:
    program = lp.Program(name)
    buffer = program.add_node(lp.CourierNode(Buffer), label="buffer")
    with program.group("actor"):
        for _ in range(2):
            program.add_node(lp.CourierNode(Actor, buffer))
    return program


def launch_waiting() -> lp.RunningProgram:
    """Launches a program of one thread that waits for the stop."""
    program = lp.Program("demo")
    program.add_node(lp.PyNode(lp.wait_for_stop), label="a")
    return lp.launch(program, "test_mt")


@pytest.fixture(autouse=True)
def runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's runtime folder, where nothing else is listed."""
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return folder


@pytest.fixture
def environment(
    environment: dict[str, str], runtime_folder: Path, tmp_path: Path
) -> dict[str, str]:
    """The environment of other shells of the user."""
    return {**environment, "XDG_RUNTIME_DIR": str(runtime_folder), "TMPDIR": str(tmp_path)}


@pytest.fixture
def shell(environment: dict[str, str]) -> Shell:
    """Runs command lines in another process; returns what it printed, and its errors."""

    def run(*lines: str) -> tuple[str, str]:
        command = [sys.executable, "-c", _SHELL, *lines]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        return done.stdout, done.stderr

    return run


@pytest.fixture
def running() -> Iterator[lp.RunningProgram]:
    """A program of processes whose actors call the buffer."""
    running = lp.launch(make_program(), "test_mp")
    while len(list(running.output())) < 6:
        assert not running.join(0.02)
    yield running
    running.kill()
    running.join()


def test_another_shell_sees_reads_and_stops_a_program(
    running: lp.RunningProgram, shell: Shell
) -> None:
    shown, told = shell(
        "status", "logs actor[1]", f"stack {os.getpid()} buffer", "stop demo", "status"
    )
    status, logs, stack, stop, after = shown.split("exit code 0\n")[:5]
    assert told == ""
    assert status.splitlines()[1].split()[:3] == ["demo", "test_mp", str(os.getpid())]
    columns = ["node", "state", "since", "host", "pid", "restarts", "cores", "MiB"]
    assert status.splitlines()[4].split() == columns
    assert [line.split()[:2] for line in status.splitlines()[5:8]] == [
        ["buffer[0]", "serving"],
        ["actor[0]", "running"],
        ["actor[1]", "running"],
    ]
    assert f"logs: {running.log_dir}" in status
    assert logs == "[actor[1]] one\n[actor[1]] two\n"
    assert stack.startswith("buffer[0]\n")
    assert "in wait\n" in stack
    assert "in _invoke" not in stack
    assert stop == "demo: stopped, `stop` in another shell\n"
    assert "no program of this user runs" in after
    assert running.wait().outcome is lp.Outcome.STOPPED


def test_what_another_shell_sees_can_be_had_as_json(
    running: lp.RunningProgram, shell: Shell
) -> None:
    commands = ("status", "status demo actor", "logs actor[1]", "stack buffer", "why")
    shown, told = shell(*(f"{command} --json" for command in commands))
    assert told == ""
    programs, status, *logs, stack, why = (
        json.loads(line) for line in shown.replace("exit code 0\n", "").splitlines()
    )
    (entry,) = programs["programs"]
    assert (entry["program"], entry["pid"], entry["nodes"]) == ("demo", os.getpid(), 3)
    assert not {"secret", "address"} & entry.keys()
    assert (status["format"], status["summary"]) == (1, "demo: running")
    assert status["log_dir"] == str(running.log_dir)
    nodes = [(each["name"], each["state"], each["restarts"]) for each in status["nodes"]]
    assert nodes == [("actor[0]", "running", 0), ("actor[1]", "running", 0)]
    assert logs == [{"node": "actor[1]", "line": word} for word in ("one", "two")]
    assert stack["stacks"].keys() == {"buffer[0]"}
    waiting = [each for each in why["threads"] if each["node"] == "actor[0]"]
    assert [(each["server"], each["method"]) for each in waiting] == [("buffer[0]", "wait")]
    (target, *_) = waiting[0]["waits_for"]
    assert (why["threads"][target]["node"], why["threads"][target]["runs"]) == ("buffer[0]", "wait")
    assert {each["name"] for each in why["nodes"]} == {"buffer[0]", "actor[0]", "actor[1]"}
    assert why["deadlocks"] == []
    assert why["text"].startswith("actor[0].run, actor[1].run wait for buffer[0].wait")


class Failing:
    def __init__(self, token: str) -> None:
        raise KeyError("no such thing")


def _inside(path: Path) -> dict[str, str]:
    assert path.stat().st_mode & 0o777 == 0o600
    with zipfile.ZipFile(path) as file:
        return {name: file.read(name).decode() for name in file.namelist()}


def test_a_report_holds_what_is_known_but_no_arguments(
    running: lp.RunningProgram, shell: Shell, tmp_path: Path
) -> None:
    failing = lp.Program("failing")
    failing.add_node(lp.PyClassNode(Failing, "open sesame"), label="bad")
    bad = lp.launch(failing, "test_mp", processes={"bad": {"args": {"token": "sesame"}}})
    with pytest.raises(lp.NodeFailedError):
        bad.wait()
    assert bad.crash_dir is not None
    one, two = tmp_path / "one.zip", tmp_path / "two.zip"
    shown, told = shell(f"report demo --output={one}", f"report {bad.crash_dir} --output={two}")
    assert told == ""
    found = _inside(one)
    assert shown.startswith(f"{one}\nenvironment.txt\nstatus.json\nplan.json\n")
    assert json.loads(found["plan.json"])["nodes"][1]["calls"] == ["buffer[0]"]
    assert json.loads(found["why.json"])["deadlocks"] == []
    assert "in wait" in json.loads(found["stacks.json"])["buffer[0]"]
    assert found["logs/actor/1.log"] == "one\ntwo\n"
    assert f"launchpad-lite {lp.__version__}\n" in found["versions.txt"]
    assert "LAUNCHPAD_LOGGING_DIR\n" in found["environment.txt"]
    found = _inside(two)
    assert {"plan.json", "logs/bad/0.log"} < found.keys()
    assert "KeyError: 'no such thing'" in found["report.txt"]
    assert "sesame" not in str(found)
    assert "arguments: " not in found["versions.txt"]


def test_processes_have_the_names_of_their_nodes(running: lp.RunningProgram) -> None:
    names = ["buffer[0]", "actor[0]", "actor[1]"]
    processes = [psutil.Process(each.pid) for each in running.status()]
    assert [each.name() for each in processes] == names
    agent = processes[0].parent()
    assert agent is not None
    assert [agent.name(), agent.parent().name()] == ["launchpad-agent", "launchpad-reap"]
    if importlib.util.find_spec("setproctitle") is not None:  # and their mark is left whole
        assert " ".join(processes[1].cmdline()).strip() == "actor[0] of demo"
        assert {"LAUNCHPAD_LITE_PROGRAM", "PATH"} < processes[1].environ().keys()
    running.stop()


class Rude:
    def run(self) -> None:
        threading.current_thread().name = "\x1bc"
        print("\x1b]0;title\x07 \x9b2J", flush=True)
        lp.wait_for_stop()


def test_another_shell_passes_no_orders_of_nodes_to_its_terminal(shell: Shell) -> None:
    program = lp.Program("rude")
    program.add_node(lp.PyClassNode(Rude), label="rude")
    running = lp.launch(program, "test_mp")
    while not list(running.output()):
        assert not running.join(0.02)
    shown, told = shell("logs", "stack", "why", "stop")
    assert told == ""
    assert shown.startswith("[rude[0]] \\x1b]0;title\\x07 \\x9b2J\n")
    assert "\\x1bc:\n" in shown
    assert (
        "no node waits in a call of another\nrude[0].run waits for an event (test_running_programs.py:"
        in shown
    )
    assert shown.replace("\n", "").isprintable()


def test_logs_are_followed_until_the_program_ends(
    running: lp.RunningProgram, environment: dict[str, str]
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _SHELL, "logs -f actor"],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as shell:
        assert shell.stdout is not None
        lines = [shell.stdout.readline() for _ in range(4)]
        assert shell.poll() is None
        running.request_stop("enough")
        assert shell.stdout.read() == "exit code 0\n"
    assert sorted(lines) == [
        f"[actor[{replica}]] {word}\n" for replica in (0, 1) for word in ("one", "two")
    ]


def test_nodes_that_are_threads_show_where_they_are(shell: Shell) -> None:
    event = threading.Event()
    program = lp.Program("threads")
    program.add_node(lp.CourierNode(Actor, Buffer(), event), label="actor")
    running = lp.launch(program, "local_mt")
    while "in wait" not in running.stacks()["actor[0]"]:
        assert not running.join(0.02)
    shown, told = shell("stack actor", "logs")
    event.set()
    running.wait()
    assert "self._buffer.wait(self._event)" in shown
    assert "what its nodes print is not kept" in told


def test_the_newest_is_meant_but_not_stopped_and_what_is_not_there_is_told(shell: Shell) -> None:
    older, newer = (lp.launch(make_program(name), "test_mt") for name in ("older", "newer"))
    shown, told = shell("status", "stack nothing", "stop", "stop newer actor", "stop newer")
    assert newer.wait().outcome is lp.Outcome.STOPPED
    assert older.result is None
    older.stop()
    rows = [line.split()[0] for line in shown.splitlines()[:3]]
    assert rows == ["program", "newer", "older"]
    assert "there is no program or node 'nothing'. Nodes: buffer[0], actor[0], actor[1]" in told
    both = ", ".join(f"{name} of process {os.getpid()}" for name in ("newer", "older"))
    assert f"which one is to stop? Name it, or its process: {both}" in told
    assert "newer: running; `stop` ends whole programs, not nodes: actor" in told


def test_a_program_that_ends_while_it_is_asked_has_ended(
    runtime_folder: Path, shell: Shell
) -> None:
    with launch_waiting():
        (entry,) = (runtime_folder / "launchpad_lite").iterdir()
        late = entry.with_name("1-abcdef01.json")
        late.write_bytes(entry.read_bytes())
    # Its process still holds the entry, and serves no more.
    with late.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        shown, told = shell("status demo", "stack", "logs", "logs -f", "stop")
    ended = f"'demo' of process {os.getpid()} has ended meanwhile"
    assert [line for line in told.splitlines() if line] == [ended] * 2
    assert shown.count("demo: has ended\nexit code 0\n") == 3


class Slow:
    def __init__(self, event: threading.Event) -> None:
        event.wait()


def test_a_program_whose_nodes_have_not_started_yet_is_seen_too(shell: Shell) -> None:
    event = threading.Event()
    program = lp.Program("slow")
    program.add_node(lp.CourierNode(Slow, event), label="node")
    running = lp.launch(program, "local_mt")
    shown, told = shell("status")
    event.set()
    running.stop()
    assert "slow: not all nodes have started" in shown, told
    assert any(line.split()[:2] == ["node[0]", "starting"] for line in shown.splitlines())


def test_a_process_that_was_killed_leaves_no_entry(
    environment: dict[str, str], runtime_folder: Path, shell: Shell
) -> None:
    source = (
        "import launchpad_lite as lp, os, signal\n"
        "program = lp.Program('short')\n"
        "program.add_node(lp.PyNode(lp.wait_for_stop), label='a')\n"
        "lp.launch(program, 'local_mt')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", source], env=environment, timeout=60)
    assert done.returncode == -signal.SIGKILL
    (left,) = (runtime_folder / "launchpad_lite").iterdir()
    assert left.stat().st_mode & 0o777 == 0o600
    assert "no program of this user runs" in "".join(shell("status"))
    assert not left.parent.exists()


def test_a_folder_that_others_may_write_to_is_not_used(
    runtime_folder: Path, caplog: pytest.LogCaptureFixture, shell: Shell
) -> None:
    (runtime_folder / "launchpad_lite").mkdir()
    (runtime_folder / "launchpad_lite").chmod(0o777)
    with launch_waiting():
        assert "demo: running" in shell("status")[0]
        assert list((runtime_folder / "launchpad_lite").iterdir()) == []
    assert caplog.text == ""


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _link(path: Path) -> None:
    path.symlink_to("/etc/passwd")


#: An entry as this version writes it.
_ENTRY: dict[str, Any] = {
    "program": "other", "launcher": "local_mp", "pid": 1, "started_at": 1.5, "nodes": 1,
    "log_dir": None, "address": "127.0.0.1:1", "secret": "00",
}  # fmt: skip


def _text(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text)


@pytest.mark.parametrize(
    "make",
    [
        _fifo,
        _link,
        Path.mkdir,
        _text(json.dumps({**_ENTRY, "user": "me"})),
        _text(json.dumps({**_ENTRY, "started_at": "today"})),
        _text('{"program": "other"}'),
        _text(json.dumps(_ENTRY)[:50]),
        _text("[" * 10_000),
        _text(""),
    ],
    ids=["FIFO", "link", "folder", "more", "other kind", "less", "cut", "nested", "empty"],
)
def test_what_is_no_entry_of_this_version_is_passed_over(
    make: Callable[[Path], object],
    runtime_folder: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = runtime_folder / "launchpad_lite"
    folder.mkdir(mode=0o700)
    other = folder / "1-abcdef01.json"
    make(other)
    with contextlib.ExitStack() as held:
        if other.is_file() and not other.is_symlink():  # its program runs
            fcntl.flock(held.enter_context(other.open()), fcntl.LOCK_EX)
        with launch_waiting():
            ask_listed("status", [], AskOptions())
    assert caplog.text == ""
    shown = capsys.readouterr()
    assert shown.out.splitlines()[1].startswith("demo ")
    assert shown.err.startswith(f"passed over 1: {other}, no entry of this version (")
    assert shown.err.count("\n") == 1
    assert other.name in [each.name for each in folder.iterdir()]


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to others: needs root")
@pytest.mark.parametrize("how", ["its own", "a link to ours"])
def test_nothing_is_read_or_removed_in_a_folder_that_a_stranger_has_made(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o1777)
    planted = tmp_path / f"launchpad_lite-{user_name()}-running"
    target = planted if how == "its own" else tmp_path / "ours"
    target.mkdir(mode=0o755)
    (target / "1-abcdef01.json").write_text("{}")
    _fifo(target / "2-abcdef01.json")
    if target != planted:
        planted.symlink_to(target)
    os.chown(planted, 4711, -1, follow_symlinks=False)
    ask_listed("status", [], AskOptions())
    assert len(list(target.iterdir())) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"passed over 1: {planted}: others could replace what is there")


def test_an_entry_that_is_taken_for_left_behind_is_written_again(
    runtime_folder: Path, monkeypatch: pytest.MonkeyPatch, shell: Shell
) -> None:
    lock, taken = fcntl.flock, []

    def lock_late(file: Any, how: int) -> None:
        if how == fcntl.LOCK_EX and not taken:  # another shell looks before it is locked
            taken.append("".join(shell("status")))
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    with launch_waiting():
        assert len(list((runtime_folder / "launchpad_lite").iterdir())) == 1
    assert "no program of this user runs" in taken[0]
    poll_until(lambda: not (runtime_folder / "launchpad_lite").exists())


_ENDED_BUT_LISTED = """
import os, signal, threading, time
import launchpad_lite as lp
from launchers.thread import ThreadLauncher

listed = threading.Event()

class Launcher(ThreadLauncher):
    def start(self, plan, options):
        running = super().start(plan, options)
        join = running.join
        # It stays in the list for a while after its end.
        running.join = lambda timeout_s=None: listed.wait(timeout_s) and join(timeout_s)
        return running

program = lp.Program("short")
program.add_node(lp.PyNode(print, "ran"), label="a")
running = lp.launch(program, Launcher())
while running.result is None:
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGTERM)
print("it waits", flush=True)
listed.set()
signal.pause()
"""


def test_a_signal_that_comes_at_the_end_of_a_program_leaves_no_entry(
    environment: dict[str, str], runtime_folder: Path
) -> None:
    command = [sys.executable, "-c", _ENDED_BUT_LISTED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGTERM
    assert done.stdout == "ran\nit waits\n"
    assert list(runtime_folder.rglob("*")) == []
