"""Commands as nodes: how they get ready, fail and end, and that nothing of them is left."""

import os
import re
import signal
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import courier
import launchpad_lite as lp
from launchpad_lite.nodes.base import Handle
from launchpad_lite.testing import poll_until
from tests.launchers.marks import Marked
from tests.launchers.running import first_pid, states
from tests.launchers.scripts import Script

both = pytest.mark.parametrize("launcher", ["test_mt", "test_mp"])

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


def _goes_on(pid: int, marked: Marked) -> bool:
    """Whether it sleeps and was not ended; by force, which a slow machine may not have done yet."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    pending = int(status.partition("SigPnd:")[2].split()[0], 16)
    return pid in marked.sleepers() and not pending >> (signal.SIGKILL - 1) & 1


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
    """Writes down what it got in place of a handle."""

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


def _launch_up(
    launch_program: Any, folder: Path, command: str, launcher: str = "test_mt", **options: Any
) -> Any:
    """Launches a command, and waits until it has made a file `up`."""
    running = launch_program(_program(lp.CommandNode(command, cwd=folder)), launcher, **options)
    poll_until((folder / "up").exists, 20)
    return running


# Its start


def test_a_command_without_addresses_is_waited_for(launch_program: Any, tmp_path: Path) -> None:
    shell = ["sh", "-c", 'sleep 0.3; echo "$1" > "$2"', "sh"]
    command: Any = [*shell, "{{a b}} $HOME", tmp_path / "out"]
    result = launch_program(_program(lp.CommandNode(command)), "test_mp").wait()
    assert result.outcome is lp.Outcome.COMPLETED
    assert (tmp_path / "out").read_text() == "{a b} $HOME\n"


def test_a_text_is_given_to_the_shell_and_runs_in_its_folder_without_input(
    launch_program: Any, tmp_path: Path
) -> None:
    command = 'echo "$A:${{B:-none}}" > out && pwd >> out && wc -c >> out'
    node = lp.CommandNode(command, env={"A": "x"}, cwd=tmp_path)
    launch_program(_program(node)).wait()
    assert (tmp_path / "out").read_text().split() == ["x:none", str(tmp_path), "0"]


@pytest.mark.parametrize(
    ("command", "options", "words"),
    [
        ("/no/such/program", {}, "'/no/such/program' cannot be started"),
        ("/no/such/program", {"ready": "never"}, "installed"),
        ("text", {}, "Permission denied"),
        ("true", {"cwd": "missing"}, "its folder '{folder}/missing'"),
    ],
)
def test_a_command_that_cannot_be_started_fails_and_says_why(
    launch_program: Any, tmp_path: Path, command: str, options: dict[str, str], words: str
) -> None:
    (tmp_path / "text").write_text("text")
    if "cwd" in options:
        options = {"cwd": str(tmp_path / options["cwd"])}
    path = str(tmp_path / command) if command == "text" else command
    error = _error_of(launch_program(_program(lp.CommandNode([path], **options))))  # type: ignore[arg-type]
    assert words.format(folder=tmp_path) in error


def test_addresses_are_in_arguments_and_environment(launch_program: Any, tmp_path: Path) -> None:
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
    running = launch_program(program, "test_mp")
    assert running.wait().outcome is lp.Outcome.COMPLETED
    at = {each.name: each.endpoints for each in running.running.status()}
    server_at, web_at = at["server[0]"]["courier"], at["web[0]"]["http"]
    port = server_at.rpartition(":")[2]
    text = f"{server_at} {web_at} db.example:1 {port}/{web_at}/{{}}\n"
    assert (tmp_path / "out").read_text() == text


def test_a_node_gets_the_endpoint_of_a_command_that_listens(
    launch_program: Any, tmp_path: Path
) -> None:
    program = lp.Program("web")
    web = program.add_node(lp.CommandNode(_WEB, listens=["http"], cwd=tmp_path), label="web")
    program.add_node(lp.PyClassNode(Reads, web, str(tmp_path / "status")), label="reader")
    result = launch_program(program, notice_s=20).wait()
    # The server continues for ever; the program ended all the same.
    assert result.outcome is lp.Outcome.COMPLETED
    assert result.killed == ()
    assert (tmp_path / "status").read_text() == "200"


def test_a_command_is_ready_when_it_listens_everywhere(launch_program: Any, tmp_path: Path) -> None:
    (tmp_path / "listen.py").write_text(_LISTEN)
    gate = tmp_path / "gate"
    # An address may have any name.
    command: Any = [sys.executable, tmp_path / "listen.py", gate, "{ready.port}", "{two.port}"]
    node = lp.CommandNode(command, listens=["ready", "two"])
    running = launch_program(_program(node))
    poll_until(lambda: running.running.status()[0].pid)
    assert states(running) == {"starting"}
    gate.touch()
    endpoint = running.client("node")
    assert isinstance(endpoint, lp.Endpoint)
    assert running.running.status()[0].endpoints["ready"] == endpoint
    poll_until(lambda: states(running) == {"serving"}, 20)


def test_a_line_of_output_says_that_a_command_is_ready(launch_program: Any, tmp_path: Path) -> None:
    # Much follows at once, and does not hide it.
    command = "echo; echo 'now READY for 5'; seq 1 1000; exec sleep 1000"
    running = launch_program(_program(lp.CommandNode(command, ready=r"READY for \d")))
    poll_until(lambda: states(running) == {"running"}, 20)
    assert running.stop().outcome is lp.Outcome.STOPPED


@pytest.mark.parametrize(
    ("ending", "waits_for"),
    [("exit 0", "line"), ("exit 3", "address"), ("kill -9 $$", "line"), ("kill -9 $$", "address")],
)
def test_a_command_that_ends_before_it_is_ready_fails(
    launch_program: Any, tmp_path: Path, ending: str, waits_for: str
) -> None:
    program = lp.Program("early")
    options: Any = {"ready": "never"} if waits_for == "line" else {"listens": ["http"]}
    node = lp.CommandNode(f"echo something; sleep 1000 & {ending}", **options)
    handle = program.add_node(node, label="node")
    if waits_for == "address":
        program.add_node(lp.PyClassNode(Writes, handle, str(tmp_path / "out")), label="other")
    error = _error_of(launch_program(program))
    how = {
        "exit 0": "ended with code 0",
        "exit 3": "ended with code 3",
        "kill -9 $$": "was ended by SIGKILL",
    }
    assert f"{how[ending]} before it was ready: it never" in error
    if waits_for == "line":
        assert "printed a line that matches 'never':\n  something" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_command_that_never_prints_the_line_fails_after_its_time(launch_program: Any) -> None:
    node = lp.CommandNode("echo up; exec sleep 1000", ready="READY", ready_timeout_s=6)
    error = _error_of(launch_program(_program(node)))
    assert "ready_timeout_s=6: it runs, but never printed a line that matches 'READY'" in error
    assert error.endswith("\n  up")


def test_a_command_that_never_listens_fails_after_its_time(launch_program: Any) -> None:
    node = lp.CommandNode(["sleep", "1000"], listens=["http"], ready_timeout_s=0.5)
    error = _error_of(launch_program(_program(node)))
    assert re.search(r"it runs, but never listened at 127\.0\.0\.1:\d+", error)


@pytest.mark.slow
def test_a_program_stops_while_a_command_gets_ready(launch_program: Any, tmp_path: Path) -> None:
    program = lp.Program("stops")
    node = lp.CommandNode("touch up; exec sleep 1000", listens=["http"], cwd=tmp_path)
    handle = program.add_node(node, label="node")
    program.add_node(lp.PyClassNode(Writes, handle, str(tmp_path / "out")), label="other")
    running = launch_program(program, notice_s=20)
    poll_until((tmp_path / "up").exists, 20)
    result = running.stop()
    assert result.outcome is lp.Outcome.STOPPED
    assert result.killed == ()
    assert not (tmp_path / "out").exists()


def test_commands_may_use_each_other(launch_program: Any, tmp_path: Path) -> None:
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
    running = launch_program(program)
    at_a, at_b = running.client("a"), running.client("b")
    assert (tmp_path / "a").read_text() == f"{at_b}\n"
    assert (tmp_path / "b").read_text() == f"{at_a}\n"


# Its end


@pytest.mark.parametrize(
    ("command", "ready", "words"),
    [
        ("exit 7", None, r"'/bin/sh' ended with code 7"),
        ("echo oh dear >&2; exit 7", "up", r"'/bin/sh' ended with code 7.*:\n  up\n  oh dear$"),
        ("kill -TERM $$", None, "was ended by SIGTERM"),
        ("kill -40 $$", None, "was ended by signal 40"),
    ],
)
def test_a_failure_says_how_the_command_ended(
    launch_program: Any, command: str, ready: str | None, words: str
) -> None:
    node = lp.CommandNode(f"echo up; {command}", ready=ready)
    error = _error_of(launch_program(_program(node)))
    assert re.search(words, error, re.DOTALL), error


@pytest.mark.parametrize("notice_s", [20.0, 0.0, -1.0])
def test_a_command_that_is_asked_to_end_may_end_with_any_code(
    launch_program: Any, tmp_path: Path, marked: Marked, notice_s: float
) -> None:
    command = "trap 'touch asked; exit 5' TERM; touch up; while :; do sleep 0.05; done"
    result = _launch_up(launch_program, tmp_path, command, notice_s=notice_s).stop()
    assert result.outcome is lp.Outcome.STOPPED
    if notice_s:
        assert result.killed == ()
        assert (tmp_path / "asked").exists()
    marked.assert_gone()


def test_what_a_shell_started_has_time_to_end_too(launch_program: Any, tmp_path: Path) -> None:
    inner = "trap 'sleep 0.5; touch asked; exit' TERM; touch up; while :; do sleep 0.05; done"
    _launch_up(launch_program, tmp_path, f'sh -c "{inner}"; true', notice_s=20).stop()
    assert (tmp_path / "asked").exists()


def _fail_another(running: Any, folder: Path) -> None:
    (folder / "fail").touch()
    with pytest.raises(lp.NodeFailedError, match="another node"):
        running.wait(60)


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
    "another's failure": (_FAMILY + _GO_ON, _fail_another),
    "a kill": (
        _FAMILY + "sleep 1000",
        lambda running, _: (running.running.kill(), running.running.join(60)),
    ),
}


@pytest.mark.parametrize(("launcher", "ready"), [("test_mt", None), ("test_mp", "^")])
@pytest.mark.parametrize("way", _WAYS)
def test_nothing_of_a_command_is_left_after(
    launch_program: Any, launcher: str, tmp_path: Path, marked: Marked, ready: str | None, way: str
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
    marked.assert_gone()


def test_children_of_a_command_end_with_it_while_the_program_goes_on(
    launch_program: Any, tmp_path: Path, marked: Marked
) -> None:
    program = _program(lp.CommandNode("sleep 1000 & setsid sleep 1000 & touch up", cwd=tmp_path))
    program.add_node(lp.PyNode(lp.wait_for_stop), label="long")
    running = launch_program(program)
    poll_until((tmp_path / "up").exists, 20)
    poll_until(lambda: not marked.sleepers(), 20)
    assert running.running.result is None


def test_children_of_a_command_whose_worker_is_killed_end_before_it_comes_back(
    launch_program: Any, tmp_path: Path, marked: Marked
) -> None:
    command = 'sleep 1000 & echo $! > "pid$(ls pid* 2>/dev/null | wc -l)"; sleep 1000'
    program = _program(lp.CommandNode(command, cwd=tmp_path))
    running = launch_program(program, "test_mp", restart="on_failure")
    poll_until(lambda: (tmp_path / "pid0").exists() and (tmp_path / "pid0").read_text(), 20)
    # The worker may be faster than the launcher takes note of it.
    os.kill(first_pid(running), signal.SIGKILL)
    poll_until((tmp_path / "pid1").exists, 20)
    assert not _goes_on(int((tmp_path / "pid0").read_text()), marked)
    running.stop()
    marked.assert_gone()


def test_a_command_that_is_forced_to_end_before_it_is_ready_leaves_nothing(
    launch_program: Any, tmp_path: Path, marked: Marked
) -> None:
    command = "trap '' TERM; touch up; while :; do sleep 1000; done"
    node = lp.CommandNode(command, listens=["http"], ready="never", cwd=tmp_path)
    running = launch_program(_program(node), notice_s=0.3)
    poll_until((tmp_path / "up").exists, 20)
    assert running.stop().killed == ("node[0]",)
    marked.assert_gone()


@pytest.mark.slow
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


def test_a_command_is_started_anew_at_the_same_address(launch_program: Any, tmp_path: Path) -> None:
    program = lp.Program("again")
    node = lp.CommandNode(
        ["sh", "-c", 'echo $$ > pid; exec "$@"', "sh", *_WEB], listens=["http"], cwd=tmp_path
    )
    program.add_node(node, label="node")
    running = launch_program(program, "test_mp", restart="on_failure")
    first = running.client("node")
    pid = int((tmp_path / "pid").read_text())
    os.kill(pid, signal.SIGKILL)
    poll_until(lambda: running.running.status()[0].restarts == 1, 20)
    assert running.client("node") == first
    with urllib.request.urlopen(f"http://{first}/") as page:
        assert page.status == 200
    assert int((tmp_path / "pid").read_text()) != pid
    assert running.stop().outcome is lp.Outcome.STOPPED


def test_who_waits_for_a_command_waits_through_its_restart(
    launch_program: Any, tmp_path: Path
) -> None:
    program = lp.Program("again")
    command = 'if [ -e first ]; then exec "$@"; fi; touch first; sleep 0.5; exit 1'
    node = lp.CommandNode(["sh", "-c", command, "sh", *_WEB], listens=["http"], cwd=tmp_path)
    web = program.add_node(node, label="web")
    program.add_node(lp.PyClassNode(Reads, web, str(tmp_path / "status")), label="reader")
    running = launch_program(program, restart={"web": "on_failure"})
    assert running.wait().outcome is lp.Outcome.COMPLETED
    assert (tmp_path / "status").read_text() == "200"


def test_commands_may_share_a_process(launch_program: Any, tmp_path: Path, marked: Marked) -> None:
    program = lp.Program("together")
    commands = [
        lp.CommandNode(f"sleep 1000 & touch up{index}; {_GO_ON}", cwd=tmp_path)
        for index in range(2)
    ]
    program.add_node(lp.ColocationNode(commands), label="node")
    running = launch_program(program, "test_mp", notice_s=20)
    poll_until(lambda: len(list(tmp_path.glob("up*"))) == 2, 20)
    assert running.stop().killed == ()
    marked.assert_gone()


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


def test_a_courier_server_outside_is_called_by_nodes(launch_program: Any, tmp_path: Path) -> None:
    with courier.Server(Server()) as server:
        program = lp.Program("outside")
        node: Any = lp.ExternalNode(f"127.0.0.1:{server.port}")
        outside = program.add_node(node, label="outside")
        program.add_node(lp.PyClassNode(Calls, outside, str(tmp_path / "out")), label="node")
        assert launch_program(program, "test_mp").wait().outcome is lp.Outcome.COMPLETED
        assert (tmp_path / "out").read_text() == "1"


class Calls:
    def __init__(self, server: Any, file: str) -> None:
        self._server = server
        self._file = Path(file)

    def run(self) -> None:
        self._file.write_text(str(self._server.ping()))


def test_a_service_outside_has_the_client_one_wants(launch_program: Any, tmp_path: Path) -> None:
    program = lp.Program("outside")
    outside = program.add_node(lp.ExternalNode("db:1", client=lp.Endpoint), label="outside")
    program.add_node(lp.PyClassNode(Writes, outside, str(tmp_path / "out")), label="node")
    launch_program(program).wait()
    assert (tmp_path / "out").read_text() == "Endpoint db:1"


def test_a_client_without_one_address_cannot_be_used(launch_program: Any) -> None:
    program = lp.Program("odd")
    odd = program.add_node(OddNode("db:1"), label="odd")
    program.add_node(lp.CommandNode("echo {odd}", uses={"odd": odd}), label="node")
    with pytest.raises(lp.NodeFailedError, match="is a dict, which is at no single address"):
        launch_program(program).wait()


class OddHandle(Handle[Any]):
    def dereference(self) -> Any:
        return {}


class OddNode(lp.ExternalNode[Any]):
    def create_handle(self) -> Any:
        return OddHandle(self)


def test_a_program_of_services_outside_only_ends_at_once(launch_program: Any) -> None:
    program = lp.Program("outside")
    node: Any = lp.ExternalNode("db:1")
    program.add_node(node, label="outside")
    assert launch_program(program).wait().outcome is lp.Outcome.COMPLETED
