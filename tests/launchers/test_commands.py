"""Commands as nodes: how they get ready, fail and end, and that nothing of them is left."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import courier
import launchpad_lite as lp
from launchpad_lite.nodes import command
from launchpad_lite.nodes.base import Handle
from launchpad_lite.nodes.command import _Command
from launchpad_lite.testing import poll_until
from tests.launchers.scripts import Script, kill

both = pytest.mark.parametrize("launcher", ["test_mt", "test_mp"])
_TAG = "COMMANDS_TEST_TAG"

_WEB = [sys.executable, "-m", "http.server", "{http.port}", "--bind", "{http.host}"]

#: Listens at the addresses it is given, one after the other, when a file is there.
_LISTEN = """
import os, socket, sys, time
gate, *ports = sys.argv[1:]
held = []
for port in ports:
    while gate and not os.path.exists(gate):
        time.sleep(0.01)
    held.append(socket.create_server(("127.0.0.1", int(port))))
while True:
    held[-1].accept()[0].close()
"""


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Marks all that a test starts, whoever adopts it; ends what is left after the test."""
    value = uuid.uuid4().hex
    monkeypatch.setenv(_TAG, value)
    yield value
    for pid in _marked(value):
        with contextlib.suppress(ProcessLookupError):  # it was about to end
            os.kill(pid, signal.SIGKILL)


def _marked(mark: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(_TAG) == mark:
                found.append(process.pid)
        except (psutil.Error, OSError):
            pass
    return found


def _sleepers(mark: str) -> list[int]:
    found = []
    for pid in _marked(mark):
        try:
            if psutil.Process(pid).cmdline()[:1] == ["sleep"]:
                found.append(pid)
        except psutil.Error:
            pass
    return found


def _goes_on(pid: int, mark: str) -> bool:
    """Whether it sleeps and was not ended; by force, which a slow machine may not have done yet."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    pending = int(status.partition("SigPnd:")[2].split()[0], 16)
    return pid in _sleepers(mark) and not pending >> (signal.SIGKILL - 1) & 1


def _make_nothing(address: str) -> Any:
    raise AssertionError(address)


class Server:
    def ping(self) -> int:
        return 1


class Fails:
    """Fails when a file is there."""

    def __init__(self, file: str) -> None:
        self._file = Path(file)

    def run(self) -> None:
        while not self._file.exists():
            time.sleep(0.01)
        raise KeyError("another node")


class Writes:
    """Writes down what it got in the place of a handle."""

    def __init__(self, thing: object, file: str) -> None:
        self._thing = thing
        self._file = Path(file)

    def run(self) -> None:
        self._file.write_text(f"{type(self._thing).__name__} {self._thing}")


class Reads:
    def __init__(self, web: lp.Endpoint, file: str) -> None:
        self._web = web
        self._file = Path(file)

    def run(self) -> None:
        with urllib.request.urlopen(f"http://{self._web.host}:{self._web.port}/") as page:
            self._file.write_text(str(page.status))


def _program(node: Any, *, name: str = "commands") -> lp.Program:
    program = lp.Program(name)
    program.add_node(node, label="node")
    return program


def _error_of(running: Any) -> str:
    with pytest.raises(lp.NodeFailedError) as failed:
        running.wait(60)
    assert isinstance(failed.value.__cause__, lp.CommandError), failed.value
    assert failed.value.failure.node == "node[0]"
    return str(failed.value.__cause__)


def _states(running: Any) -> list[str]:
    return [each.state for each in running.running.status()]


# Its start


@both
def test_a_command_without_addresses_is_waited_for(
    launch_program: Any, launcher: str, tmp_path: Path
) -> None:
    command: Any = [
        "sh",
        "-c",
        'sleep 0.3; echo "$1" > "$2"',
        "sh",
        "{{a b}} $HOME",
        tmp_path / "out",
    ]
    result = launch_program(_program(lp.CommandNode(command)), launcher).wait()
    assert result.outcome is lp.Outcome.COMPLETED
    assert (tmp_path / "out").read_text() == "{a b} $HOME\n"


@both
def test_a_text_is_given_to_the_shell_and_runs_in_its_folder(
    launch_program: Any, launcher: str, tmp_path: Path
) -> None:
    node = lp.CommandNode(
        'echo "$A:${{B:-none}}" > out && pwd >> out', env={"A": "x"}, cwd=tmp_path
    )
    launch_program(_program(node), launcher).wait()
    assert (tmp_path / "out").read_text() == f"x:none\n{tmp_path}\n"


@both
def test_standard_input_is_empty(launch_program: Any, launcher: str, tmp_path: Path) -> None:
    node = lp.CommandNode("wc -c > in", cwd=tmp_path)
    launch_program(_program(node), launcher).wait()
    assert (tmp_path / "in").read_text().strip() == "0"


@both
@pytest.mark.parametrize("ready", [None, "never"])
def test_a_command_that_is_not_there_fails_and_says_so(
    launch_program: Any, launcher: str, ready: str | None
) -> None:
    node = lp.CommandNode(["/no/such/program"], ready=ready)
    error = _error_of(launch_program(_program(node), launcher))
    assert "'/no/such/program' cannot be started" in error
    assert "installed" in error


@both
def test_a_command_that_is_no_program_fails_and_says_so(
    launch_program: Any, launcher: str, tmp_path: Path
) -> None:
    (tmp_path / "text").write_text("text")
    error = _error_of(launch_program(_program(lp.CommandNode([tmp_path / "text"])), launcher))
    assert "Permission denied" in error


@both
def test_a_folder_that_is_not_there_is_to_blame(
    launch_program: Any, launcher: str, tmp_path: Path
) -> None:
    node = lp.CommandNode(["true"], cwd=tmp_path / "missing")
    error = _error_of(launch_program(_program(node), launcher))
    assert f"its folder '{tmp_path / 'missing'}'" in error


@both
def test_addresses_are_in_arguments_and_environment(
    launch_program: Any, launcher: str, tmp_path: Path
) -> None:
    program = lp.Program("uses")
    server = program.add_node(lp.CourierNode(Server), label="server")
    web = program.add_node(lp.CommandNode(_WEB, listens=["http"], cwd=tmp_path), label="web")
    db = program.add_node(lp.ExternalNode("db.example:1", client=_make_nothing), label="db")
    node = lp.CommandNode(
        'echo "{server} {web.host}:{web.port} {db}" "$A" > out',
        uses={"server": server, "web": web, "db": db},
        env={"A": "{server.port}/{web}/{{}}"},
        cwd=tmp_path,
    )
    program.add_node(node, label="node")
    running = launch_program(program, launcher)
    assert running.wait().outcome is lp.Outcome.COMPLETED
    at = {each.name: each.endpoints for each in running.running.status()}
    server_at, web_at = at["server[0]"]["courier"], at["web[0]"]["http"]
    port = server_at.rpartition(":")[2]
    text = f"{server_at} {web_at} db.example:1 {port}/{web_at}/{{}}\n"
    assert (tmp_path / "out").read_text() == text


@both
def test_a_node_gets_the_endpoint_of_a_command_that_listens(
    launch_program: Any, launcher: str, tmp_path: Path
) -> None:
    program = lp.Program("web")
    web = program.add_node(lp.CommandNode(_WEB, listens=["http"], cwd=tmp_path), label="web")
    program.add_node(lp.PyClassNode(Reads, web, str(tmp_path / "status")), label="reader")
    result = launch_program(program, launcher, notice_s=20).wait()
    # The server goes on for ever; the program ended all the same.
    assert result.outcome is lp.Outcome.COMPLETED
    assert result.killed == ()
    assert (tmp_path / "status").read_text() == "200"


@both
def test_the_launching_process_waits_too_until_a_command_is_ready(
    launch_program: Any, launcher: str, tmp_path: Path
) -> None:
    running = launch_program(
        _program(lp.CommandNode(_WEB, listens=["http"], cwd=tmp_path)), launcher, notice_s=20
    )
    endpoint = running.client("node")
    assert isinstance(endpoint, lp.Endpoint)
    with urllib.request.urlopen(f"http://{endpoint}/") as page:
        assert page.status == 200
    assert running.stop().killed == ()


@both
def test_a_command_is_ready_when_it_listens_everywhere(
    launch_program: Any, launcher: str, tmp_path: Path
) -> None:
    (tmp_path / "listen.py").write_text(_LISTEN)
    gate = tmp_path / "gate"
    command: Any = [sys.executable, tmp_path / "listen.py", gate, "{one.port}", "{two.port}"]
    node = lp.CommandNode(command, listens=["one", "two"])
    running = launch_program(_program(node), launcher)
    poll_until(lambda: running.running.status()[0].pid)
    assert _states(running) == ["starting"]
    gate.touch()
    endpoint = running.client("node")
    (status,) = running.running.status()
    assert status.endpoints["one"] == endpoint
    poll_until(lambda: _states(running) == ["serving"], 20)


@both
def test_an_address_may_have_any_name(launch_program: Any, launcher: str, tmp_path: Path) -> None:
    command = [each.replace("http", "ready") if "{" in each else each for each in _WEB]
    node = lp.CommandNode(command, listens=["ready"], cwd=tmp_path)
    running = launch_program(_program(node), launcher)
    endpoint = running.client("node")
    assert running.running.status()[0].endpoints["ready"] == endpoint


@both
def test_a_line_of_output_says_that_a_command_is_ready(
    launch_program: Any, launcher: str, tmp_path: Path
) -> None:
    program = lp.Program("line")
    # Much follows at once, and does not hide it.
    command = "echo; echo 'now READY for 5'; seq 1 1000; exec sleep 1000"
    node = program.add_node(lp.CommandNode(command, ready=r"READY for \d"), label="node")
    del node
    running = launch_program(program, launcher)
    poll_until(lambda: _states(running) == ["running"], 20)
    assert running.stop().outcome is lp.Outcome.STOPPED


@both
@pytest.mark.parametrize("ending", ["exit 0", "exit 3", "kill -9 $$"])
@pytest.mark.parametrize("waits_for", ["line", "address"])
def test_a_command_that_ends_before_it_is_ready_fails(
    launch_program: Any, launcher: str, tmp_path: Path, ending: str, waits_for: str
) -> None:
    program = lp.Program("early")
    options: Any = {"ready": "never"} if waits_for == "line" else {"listens": ["http"]}
    node = lp.CommandNode(f"echo something; sleep 1000 & {ending}", **options)
    handle = program.add_node(node, label="node")
    if waits_for == "address":
        program.add_node(lp.PyClassNode(Writes, handle, str(tmp_path / "out")), label="other")
    error = _error_of(launch_program(program, launcher))
    how = {
        "exit 0": "ended with code 0",
        "exit 3": "ended with code 3",
        "kill -9 $$": "was ended by SIGKILL",
    }
    assert f"{how[ending]} before it was ready: it never" in error
    if waits_for == "line":
        assert "printed a line that matches 'never':\n  something" in error
    assert not (tmp_path / "out").exists()


@both
def test_a_command_that_never_prints_the_line_fails_after_its_time(
    launch_program: Any, launcher: str
) -> None:
    node = lp.CommandNode("echo up; exec sleep 1000", ready="READY", ready_timeout_s=6)
    error = _error_of(launch_program(_program(node), launcher))
    assert "ready_timeout_s=6: it runs, but never printed a line that matches 'READY'" in error
    assert error.endswith("\n  up")


@both
def test_a_command_that_never_listens_fails_after_its_time(
    launch_program: Any, launcher: str
) -> None:
    node = lp.CommandNode(["sleep", "1000"], listens=["http"], ready_timeout_s=0.5)
    error = _error_of(launch_program(_program(node), launcher))
    assert re.search(r"it runs, but never listened at 127\.0\.0\.1:\d+", error)


@both
def test_a_program_stops_while_a_command_gets_ready(
    launch_program: Any, launcher: str, tmp_path: Path
) -> None:
    program = lp.Program("stops")
    node = lp.CommandNode("touch up; exec sleep 1000", listens=["http"], cwd=tmp_path)
    handle = program.add_node(node, label="node")
    program.add_node(lp.PyClassNode(Writes, handle, str(tmp_path / "out")), label="other")
    running = launch_program(program, launcher, notice_s=20)
    poll_until((tmp_path / "up").exists, 20)
    result = running.stop()
    assert result.outcome is lp.Outcome.STOPPED
    assert result.killed == ()
    assert not (tmp_path / "out").exists()


@both
def test_commands_may_use_each_other(launch_program: Any, launcher: str, tmp_path: Path) -> None:
    program = lp.Program("cycle")
    there = program.declare("b")
    web = ["sh", "-c", 'echo "$1" > "$2"; shift 2; exec "$@"', "sh"]
    a = lp.CommandNode(
        [*web, "{b}", tmp_path / "a", *_WEB], listens=["http"], uses={"b": there}, cwd=tmp_path
    )
    handle = program.add_node(a, label="a")
    b = lp.CommandNode(
        [*web, "{a}", tmp_path / "b", *_WEB], listens=["http"], uses={"a": handle}, cwd=tmp_path
    )
    program.add_node(b, label="b")
    running = launch_program(program, launcher)
    at_a, at_b = running.client("a"), running.client("b")
    assert (tmp_path / "a").read_text() == f"{at_b}\n"
    assert (tmp_path / "b").read_text() == f"{at_a}\n"


# Its end


@both
@pytest.mark.parametrize("ready", [None, "up"])
def test_a_failure_says_how_the_command_ended(
    launch_program: Any, launcher: str, ready: str | None
) -> None:
    node = lp.CommandNode("echo up; echo oh dear >&2; exit 7", ready=ready)
    error = _error_of(launch_program(_program(node), launcher))
    assert "'/bin/sh' ended with code 7" in error
    if ready:
        assert error.endswith(":\n  up\n  oh dear")


@both
@pytest.mark.parametrize(
    ("signum", "words"), [("TERM", "was ended by SIGTERM"), ("40", "was ended by signal 40")]
)
def test_a_failure_says_which_signal_ended_the_command(
    launch_program: Any, launcher: str, signum: str, words: str
) -> None:
    node = lp.CommandNode(f"kill -{signum} $$")
    assert words in _error_of(launch_program(_program(node), launcher))


@both
def test_a_command_that_is_asked_to_end_may_end_with_any_code(
    launch_program: Any, launcher: str, tmp_path: Path
) -> None:
    command = "trap 'touch asked; exit 5' TERM; touch up; while :; do sleep 0.05; done"
    running = launch_program(_program(lp.CommandNode(command, cwd=tmp_path)), launcher, notice_s=20)
    poll_until((tmp_path / "up").exists, 20)
    result = running.stop()
    assert result.outcome is lp.Outcome.STOPPED
    assert result.killed == ()
    assert (tmp_path / "asked").exists()


@both
def test_what_a_shell_started_has_time_to_end_too(
    launch_program: Any, launcher: str, tmp_path: Path
) -> None:
    inner = "trap 'sleep 0.5; touch asked; exit' TERM; touch up; while :; do sleep 0.05; done"
    running = launch_program(
        _program(lp.CommandNode(f'sh -c "{inner}"; true', cwd=tmp_path)), launcher, notice_s=20
    )
    poll_until((tmp_path / "up").exists, 20)
    running.stop()
    assert (tmp_path / "asked").exists()


def _fail_another(running: Any, folder: Path) -> None:
    (folder / "fail").touch()
    running.running.join(60)


_FAMILY = "sleep 1000 & setsid sleep 1000 & touch up; "
#: Goes on without starting another process, which would not be asked if the shell were just then.
_GO_ON = "exec sleep 1000"
_WAYS: dict[str, tuple[str, Callable[[Any, Path], object]]] = {
    "its own end": (_FAMILY + "exit 0", lambda running, _: running.wait()),
    "a stop": (_FAMILY + _GO_ON, lambda running, _: running.stop()),
    "a stop it ignores": (
        "trap '' TERM; " + _FAMILY + "while :; do sleep 1000; done",
        lambda running, _: running.stop(),
    ),
    "its failure": (_FAMILY + "exit 1", lambda running, _: _error_of(running)),
    "another's failure": (
        _FAMILY + _GO_ON,
        _fail_another,
    ),
    "a kill": (
        _FAMILY + "sleep 1000",
        lambda running, _: (running.running.kill(), running.running.join(60)),
    ),
}


@both
@pytest.mark.parametrize("ready", [None, "^"])
@pytest.mark.parametrize("way", _WAYS)
def test_nothing_of_a_command_is_left_after(
    launch_program: Any, launcher: str, tmp_path: Path, mark: str, ready: str | None, way: str
) -> None:
    command, end = _WAYS[way]
    program = _program(lp.CommandNode("echo; " + command, cwd=tmp_path, ready=ready))
    if way == "another's failure":
        program.add_node(lp.PyClassNode(Fails, str(tmp_path / "fail")), label="fails")
    # On a busy machine, also what ends when it is told to takes its time.
    running = launch_program(program, launcher, notice_s=0.5 if "ignores" in way else 20.0)
    poll_until((tmp_path / "up").exists, 20)
    end(running, tmp_path)
    assert running.running.result is not None
    assert running.running.result.killed == (
        ("node[0]",) if way in ("a stop it ignores", "a kill") else ()
    )
    poll_until(lambda: not _marked(mark), 20, must=False)
    assert _marked(mark) == []


def _take_time(file: Path, seconds: float) -> None:
    """Says where a thread is, and gives others the time to force it out of there."""
    file.mkdir()  # not touch: forced out of that, a thread leaves the file open
    give_up_at = time.monotonic() + seconds
    while time.monotonic() < give_up_at:
        time.sleep(0.01)


@pytest.mark.parametrize("ready", [None, "^"])
def test_nothing_is_left_of_a_command_whose_thread_is_forced_out_of_its_start(
    launch_program: Any,
    tmp_path: Path,
    mark: str,
    ready: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class SlowPopen(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            _take_time(tmp_path / "starts", 1.0)

    monkeypatch.setattr(subprocess, "Popen", SlowPopen)
    node = lp.CommandNode(_FAMILY + "sleep 1000", cwd=tmp_path, ready=ready)
    running = launch_program(_program(node), "test_mt", notice_s=20.0)
    for file in ("up", "starts"):
        poll_until((tmp_path / file).exists, 20)
    running.running.kill()
    running.running.join(60)
    assert running.running.result.killed == ("node[0]",)
    poll_until(lambda: not _marked(mark), 20, must=False)
    assert _marked(mark) == []


def test_a_thread_that_is_forced_out_of_a_look_at_processes_leaves_no_file_open(
    launch_program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marked = command._marked

    def look_slowly(mark: str) -> list[int]:
        file = (tmp_path / "looks").open("w")
        if threading.current_thread().name == "node[0]" and not (tmp_path / "slow").exists():
            _take_time(tmp_path / "slow", 1.0)
        file.close()
        return marked(mark)

    monkeypatch.setattr(command, "_marked", look_slowly)
    node = lp.CommandNode("touch up; exec sleep 1000", cwd=tmp_path)
    running = launch_program(_program(node), "test_mt", notice_s=20.0)
    poll_until((tmp_path / "up").exists, 20)
    running.running.request_stop("the test")
    poll_until((tmp_path / "slow").exists, 20)
    running.running.kill()
    running.running.join(60)


def test_nothing_is_left_of_a_command_whose_thread_is_forced_out_of_its_end(
    launch_program: Any, tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[float] = []
    end = _Command._end

    def slow_end(self: Any, grace_s: float) -> None:
        ends.append(grace_s)
        if len(ends) == 1:
            _take_time(tmp_path / "ends", 60.0)
        end(self, grace_s)

    monkeypatch.setattr(_Command, "_end", slow_end)
    node = lp.CommandNode(_FAMILY + "exit 0", cwd=tmp_path)
    running = launch_program(_program(node), "test_mt", notice_s=20.0)
    poll_until((tmp_path / "ends").exists, 20)
    running.running.kill()
    running.running.join(60)
    # A thread that comes to it late is not waited for.
    poll_until(lambda: len(ends) > 1, 20)
    assert ends == [2.0, 0.0]
    poll_until(lambda: not _marked(mark), 20, must=False)
    assert _marked(mark) == []


@both
def test_children_of_a_command_end_with_it_while_the_program_goes_on(
    launch_program: Any, launcher: str, tmp_path: Path, mark: str
) -> None:
    program = _program(lp.CommandNode("sleep 1000 & setsid sleep 1000 & touch up", cwd=tmp_path))
    program.add_node(lp.PyNode(lp.wait_for_stop), label="long")
    running = launch_program(program, launcher)
    poll_until((tmp_path / "up").exists, 20)
    poll_until(lambda: not _sleepers(mark), 20)
    assert running.running.result is None


def test_nothing_of_a_command_is_left_when_its_worker_is_killed(
    launch_program: Any, tmp_path: Path, mark: str
) -> None:
    program = _program(lp.CommandNode("sleep 1000 & touch up; sleep 1000", cwd=tmp_path))
    program.add_node(lp.PyNode(lp.wait_for_stop), label="long")
    running = launch_program(program, "test_mp")
    poll_until((tmp_path / "up").exists, 20)
    # The worker may be faster than the launcher takes note of it.
    pid = poll_until(lambda: running.running.status()[0].pid, 20)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(lp.NodeFailedError, match="SIGKILL"):
        running.wait(60)
    poll_until(lambda: not _marked(mark), 20)


def test_children_of_a_command_whose_worker_is_killed_end_before_it_comes_back(
    launch_program: Any, tmp_path: Path, mark: str
) -> None:
    command = 'sleep 1000 & echo $! > "pid$(ls pid* 2>/dev/null | wc -l)"; sleep 1000'
    program = _program(lp.CommandNode(command, cwd=tmp_path))
    running = launch_program(program, "test_mp", restart="on_failure")
    poll_until(lambda: (tmp_path / "pid0").exists() and (tmp_path / "pid0").read_text(), 20)
    # The worker may be faster than the launcher takes note of it.
    pid = poll_until(lambda: running.running.status()[0].pid, 20)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    poll_until((tmp_path / "pid1").exists, 20)
    assert not _goes_on(int((tmp_path / "pid0").read_text()), mark)
    running.stop()
    poll_until(lambda: not _marked(mark), 20)


@both
@pytest.mark.parametrize("notice_s", [0, -1])
def test_a_command_ends_with_no_notice_and_with_one_without_end(
    launch_program: Any, launcher: str, tmp_path: Path, mark: str, notice_s: float
) -> None:
    command = "trap 'touch asked; exit' TERM; touch up; while :; do sleep 0.05; done"
    running = launch_program(
        _program(lp.CommandNode(command, cwd=tmp_path)), launcher, notice_s=notice_s
    )
    poll_until((tmp_path / "up").exists, 20)
    result = running.stop()
    assert result.outcome is lp.Outcome.STOPPED
    if notice_s < 0:
        assert result.killed == ()
        assert (tmp_path / "asked").exists()
    poll_until(lambda: not _marked(mark), 20)


@both
def test_a_command_that_is_forced_to_end_before_it_is_ready_leaves_nothing(
    launch_program: Any, launcher: str, tmp_path: Path, mark: str
) -> None:
    command = "trap '' TERM; touch up; while :; do sleep 1000; done"
    node = lp.CommandNode(command, listens=["http"], ready="never", cwd=tmp_path)
    running = launch_program(_program(node), launcher, notice_s=0.3)
    poll_until((tmp_path / "up").exists, 20)
    assert running.stop().killed == ("node[0]",)
    poll_until(lambda: not _marked(mark), 20)


@both
def test_a_node_ends_the_program_and_a_command_that_serves_ends_with_it(
    launch_program: Any, launcher: str, tmp_path: Path, mark: str
) -> None:
    program = _program(lp.CommandNode(_WEB, listens=["http"], cwd=tmp_path))
    program.add_node(lp.PyNode(lp.stop), label="stops")
    assert launch_program(program, launcher).wait().outcome is lp.Outcome.STOPPED
    poll_until(lambda: not _marked(mark), 20)


@pytest.mark.parametrize("launcher", ["local_mt", "local_mp"])
def test_a_script_ends_with_the_failure_of_its_command(tmp_path: Path, launcher: str) -> None:
    source = f"""
        import launchpad_lite as lp

        program = lp.Program("script")
        program.add_node(lp.CommandNode("echo hello; exit 4"), label="node")
        lp.launch(program, "{launcher}")
    """
    with Script(tmp_path, source) as script:
        ended = script.run()
        assert ended.code == 1
        assert "hello" in ended.stdout
        assert "the command '/bin/sh' ended with code 4" in ended.stderr
        script.assert_gone(20)


@pytest.mark.parametrize("launcher", ["local_mt", "local_mp"])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_script_that_is_interrupted_leaves_nothing_of_its_command(
    tmp_path: Path, launcher: str, signum: int
) -> None:
    source = f"""
        import pathlib
        import launchpad_lite as lp

        program = lp.Program("script")
        program.add_node(lp.CommandNode("sleep 1000 & touch up; {_GO_ON}"), label="node")
        running = lp.launch(program, "{launcher}", notice_s=20)
        pathlib.Path("launched").touch()
        running.wait()
    """
    with Script(tmp_path, source) as script:
        process = script.start(quiet=True)
        script.wait_for("up")
        script.wait_for("launched")  # the command may be faster than who listens to signals
        process.send_signal(signum)
        process.wait(60)
        script.assert_gone(20)


def test_threads_in_a_shell_of_their_own_leave_nothing_of_a_command(tmp_path: Path) -> None:
    # The process leads its group, as in a shell with job control.
    source = """
        import time, pathlib
        import launchpad_lite as lp

        program = lp.Program("leader")
        program.add_node(lp.CommandNode("env -i sleep 1000 & touch up; sleep 1000"), label="node")
        running = lp.launch(program, "local_mt")
        while not pathlib.Path("up").exists():
            time.sleep(0.01)
        print(running.stop().outcome)
    """
    with Script(tmp_path, source) as script:
        ended = script.run()
        assert "STOPPED" in ended.stdout.upper(), ended.stderr
        script.assert_gone(20)


def test_nothing_of_a_command_is_left_when_the_launcher_is_killed(tmp_path: Path) -> None:
    source = """
        import launchpad_lite as lp

        program = lp.Program("killed")
        command = "sleep 1000 & setsid sleep 1000 & touch up; sleep 1000"
        program.add_node(lp.CommandNode(command), label="node")
        lp.launch(program, "local_mp")
    """
    with Script(tmp_path, source) as script:
        process = script.start(quiet=True)
        script.wait_for("up")
        kill(process)
        process.wait()
        script.assert_gone(20)


@both
def test_a_command_is_started_anew_at_the_same_address(
    launch_program: Any, launcher: str, tmp_path: Path
) -> None:
    program = lp.Program("again")
    node = lp.CommandNode(
        ["sh", "-c", 'echo $$ > pid; exec "$@"', "sh", *_WEB], listens=["http"], cwd=tmp_path
    )
    program.add_node(node, label="node")
    running = launch_program(program, launcher, restart="on_failure")
    first = running.client("node")
    pid = int((tmp_path / "pid").read_text())
    os.kill(pid, signal.SIGKILL)
    poll_until(lambda: running.running.status()[0].restarts == 1, 20)
    assert running.client("node") == first
    with urllib.request.urlopen(f"http://{first}/") as page:
        assert page.status == 200
    assert int((tmp_path / "pid").read_text()) != pid
    assert running.stop().outcome is lp.Outcome.STOPPED


@both
def test_who_waits_for_a_command_waits_through_its_restart(
    launch_program: Any, launcher: str, tmp_path: Path
) -> None:
    program = lp.Program("again")
    command = 'if [ -e first ]; then exec "$@"; fi; touch first; sleep 0.5; exit 1'
    node = lp.CommandNode(["sh", "-c", command, "sh", *_WEB], listens=["http"], cwd=tmp_path)
    web = program.add_node(node, label="web")
    program.add_node(lp.PyClassNode(Reads, web, str(tmp_path / "status")), label="reader")
    running = launch_program(program, launcher, restart={"web": "on_failure"})
    assert running.wait().outcome is lp.Outcome.COMPLETED
    assert (tmp_path / "status").read_text() == "200"


@both
def test_commands_may_share_a_process(
    launch_program: Any, launcher: str, tmp_path: Path, mark: str
) -> None:
    program = lp.Program("together")
    commands = [
        lp.CommandNode(f"sleep 1000 & touch up{index}; {_GO_ON}", cwd=tmp_path)
        for index in range(2)
    ]
    program.add_node(lp.ColocationNode(commands), label="node")
    running = launch_program(program, launcher, notice_s=20)
    poll_until(lambda: len(list(tmp_path.glob("up*"))) == 2, 20)
    assert running.stop().killed == ()
    poll_until(lambda: not _marked(mark), 20)


# Its output

_PRINTS = r"""
import os, sys
os.write(1, b"ready\n")
os.write(2, b"to stderr\n")
os.write(1, b"\xff\xfe caf\xc3\xa9\n")
for _ in range(64):
    os.write(1, b"x" * (1 << 16))
os.write(1, b"\nno end of line")
"""


@pytest.mark.parametrize("ready", [None, "^ready$"])
def test_output_of_a_command_is_that_of_the_node_whatever_it_is(
    launch_program: Any, tmp_path: Path, ready: str | None
) -> None:
    (tmp_path / "prints.py").write_text(_PRINTS)
    node = lp.CommandNode([sys.executable, tmp_path / "prints.py"], ready=ready)
    running = launch_program(_program(node), "test_mp", log_dir=tmp_path / "logs")
    running.wait()
    (log,) = (tmp_path / "logs").rglob("0.log")
    long = b"x" * (64 << 16)
    expected = b"ready\nto stderr\n\xff\xfe caf\xc3\xa9\n" + long + b"\nno end of line"
    assert log.read_bytes() == expected


@pytest.mark.parametrize("ready", [None, "^ready$"])
def test_output_of_a_command_in_a_thread_is_that_of_the_process(
    launch_program: Any, tmp_path: Path, ready: str | None, capfdbinary: Any
) -> None:
    (tmp_path / "prints.py").write_text(_PRINTS)
    node = lp.CommandNode([sys.executable, tmp_path / "prints.py"], ready=ready)
    launch_program(_program(node), "test_mt").wait()
    stdout, stderr = capfdbinary.readouterr()
    assert b"to stderr\n" in stdout + stderr
    assert stdout.replace(b"to stderr\n", b"").startswith(b"ready\n\xff\xfe caf\xc3\xa9\nxxx")
    assert stdout.endswith(b"x\nno end of line")
    assert stdout.count(b"x") == 64 << 16


def test_output_that_nobody_can_take_does_not_hold_a_command_up(
    launch_program: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    node = lp.CommandNode("echo up; seq 1 100000; touch done", ready="up", cwd=tmp_path)
    monkeypatch.setattr(sys, "stdout", None)
    launch_program(_program(node), "test_mt").wait()
    assert (tmp_path / "done").exists()


# Services outside of the program


@both
def test_a_courier_server_outside_is_called_by_nodes(
    launch_program: Any, launcher: str, tmp_path: Path
) -> None:
    with courier.Server(Server()) as server:
        program = lp.Program("outside")
        node: Any = lp.ExternalNode(f"127.0.0.1:{server.port}")
        outside = program.add_node(node, label="outside")
        program.add_node(lp.PyClassNode(Calls, outside, str(tmp_path / "out")), label="node")
        assert launch_program(program, launcher).wait().outcome is lp.Outcome.COMPLETED
        assert (tmp_path / "out").read_text() == "1"


class Calls:
    def __init__(self, server: Any, file: str) -> None:
        self._server = server
        self._file = Path(file)

    def run(self) -> None:
        self._file.write_text(str(self._server.ping()))


@both
def test_a_service_outside_has_the_client_one_wants(
    launch_program: Any, launcher: str, tmp_path: Path
) -> None:
    program = lp.Program("outside")
    outside = program.add_node(lp.ExternalNode("db:1", client=lp.Endpoint), label="outside")
    program.add_node(lp.PyClassNode(Writes, outside, str(tmp_path / "out")), label="node")
    launch_program(program, launcher).wait()
    assert (tmp_path / "out").read_text() == "Endpoint db:1"


@both
def test_a_client_without_one_address_cannot_be_used(launch_program: Any, launcher: str) -> None:
    program = lp.Program("odd")
    odd = program.add_node(OddNode("db:1"), label="odd")
    program.add_node(lp.CommandNode("echo {odd}", uses={"odd": odd}), label="node")
    with pytest.raises(lp.NodeFailedError, match="is a dict, which is at no single address"):
        launch_program(program, launcher).wait()


class OddHandle(Handle[Any]):
    def dereference(self) -> Any:
        return {}


class OddNode(lp.ExternalNode[Any]):
    def create_handle(self) -> Any:
        return OddHandle(self)


@both
def test_a_program_of_services_outside_only_ends_at_once(
    launch_program: Any, launcher: str
) -> None:
    program = lp.Program("outside")
    node: Any = lp.ExternalNode("db:1")
    program.add_node(node, label="outside")
    assert launch_program(program, launcher).wait().outcome is lp.Outcome.COMPLETED
