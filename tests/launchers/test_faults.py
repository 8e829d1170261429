"""However a program ends: who did it is named, the exit code tells, and nothing is left.

One program for all faults: nodes that serve, and with processes each a family of every kind of
child. One fault each, then the same questions. `docs/promises.md` has the table.
"""

import contextlib
import os
import re
import signal
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

import launchpad_lite as lp
from launchpad_lite.parts.marks import MARK
from launchpad_lite.testing import poll_until
from tests.launchers.running import program_of, states
from tests.launchers.scripts import Script, kill, without_logs_line

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

_PROGRAM = """
    import ctypes, faulthandler, multiprocessing, os, pathlib, signal, subprocess, sys, time
    from multiprocessing import shared_memory
    import launchpad_lite as lp

    LAUNCHER, ACT, TAG = sys.argv[1:4]
    SHARER = '''
    import pathlib, sys, time
    from multiprocessing import shared_memory
    memory = shared_memory.SharedMemory(sys.argv[1], create=True, size=100)
    pathlib.Path(sys.argv[2]).touch()
    time.sleep(1000)
    '''.replace("    ", "")

    def record(kind, pid):
        pathlib.Path("pids", f"{kind}-{pid}").touch()

    def start_family(index):
        sleep = ["sleep", "1000"]
        record("plain", subprocess.Popen(sleep).pid)
        record("session", subprocess.Popen(sleep, start_new_session=True).pid)
        record("cleared", subprocess.Popen(sleep, start_new_session=True, env={}).pid)
        deaf = ["sh", "-c", "trap '' TERM; exec sleep 1000"]
        record("deaf", subprocess.Popen(deaf, start_new_session=True).pid)
        middle = os.fork()
        if middle == 0:
            os.setsid()
            if os.fork() == 0:
                record("daemon", os.getpid())
                os.execve("/bin/sleep", sleep, {})
            os._exit(0)
        os.waitpid(middle, 0)
        memory = shared_memory.SharedMemory(f"{TAG}-node{index}", create=True, size=100)
        child = multiprocessing.Process(target=time.sleep, args=(1000,), daemon=True)
        child.start()
        record("multiprocessing", child.pid)
        sharer = subprocess.Popen(
            [sys.executable, "-c", SHARER, f"{TAG}-session{index}", f"sharing{index}"],
            start_new_session=True,
        )
        record("sharer", sharer.pid)
        return memory

    class Server:
        def ping(self):
            return "here"

    class Node:
        def __init__(self, index, server):
            self.index, self.server = index, server
            if LAUNCHER.endswith("mp"):
                record(f"node{index}", os.getpid())
                self.memory = start_family(index)

        def run(self):
            self.server.ping()
            pathlib.Path(f"up{self.index}").touch()
            while not os.path.exists("go"):
                lp.heartbeat()
                if lp.wait_for_stop(0.01):
                    return self.asked()
            if ACT in ACTS and (self.index == 0 or ACT == "returns"):
                pathlib.Path("acting").touch()
                ACTS[ACT]()
            lp.wait_for_stop()
            self.asked()

        def asked(self):
            pathlib.Path("asked").touch()

    class ServingNode(Node):
        def ping(self):
            return self.index

    def returns():
        sys.exit(0)

    def stops():
        lp.stop()

    def raises():
        raise ValueError("the cause")

    def leaves():
        os._exit(3)

    def segfaults():
        faulthandler.disable()
        ctypes.string_at(0)

    def is_deaf():
        if LAUNCHER.endswith("mp"):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            try:
                time.sleep(0.01)
            except BaseException:
                pass

    def holds_the_gil():
        mutex = ctypes.create_string_buffer(100)
        for _ in range(2):  # a deadlock: unlike in a sleep, no signal ends the second one
            ctypes.PyDLL(None).pthread_mutex_lock(mutex)

    acts = (returns, stops, raises, leaves, segfaults, is_deaf, holds_the_gil)
    ACTS = {act.__name__: act for act in acts}
    program = lp.Program("faults")
    server = program.add_node(lp.CourierNode(Server), label="server")
    with program.group("node"):
        program.add_node(lp.CourierNode(ServingNode, 0, server))
        program.add_node(lp.PyClassNode(Node, 1, server))
    running = lp.launch(
        program,
        launcher=LAUNCHER,
        notice_s=float(sys.argv[4]),
        liveness=lp.Liveness(health_s=8.0) if ACT == "returns" else None,
    )
    try:
        pathlib.Path("launched").touch()
        running.wait()
    finally:
        print("ended by force:", *running.result.killed)
"""

#: Seconds that nodes have to end where one of them takes them all.
_NOTICE_S = 1.0
#: The same elsewhere: a slow machine needs some of them.
_LONG_NOTICE_S = 10.0
#: What the promise adds to the notice.
_PROMISED_S = 2.0
#: What a machine that does many things at a time may take longer.
_LOADED_S = 15.0
_NODES = 2
#: Of each node, itself included.
_FAMILY = 8


class Faulty:
    """A program in an interpreter of its own, with all that it may leave behind."""

    def __init__(self, folder: Path, launcher: str, act: str, notice_s: float) -> None:
        self._script = Script(folder, _PROGRAM)
        self._folder = folder
        self._has_children = launcher == "local_mp"
        self._temporary = folder / "tmp"
        self._pids = folder / "pids"
        for each in (self._temporary, self._pids):
            each.mkdir()
        self._listening: set[tuple[int, int]] = set()
        self._family: dict[str, list[psutil.Process]] = {}
        arguments = (launcher, act, self._script.tag, str(notice_s))
        self._env = dict.fromkeys(("TMPDIR", "XDG_RUNTIME_DIR"), str(self._temporary))
        self.process = self._script.start(*arguments, env=self._env)
        #: When the fault came.
        self.since = time.monotonic()

    def wait_until_up(self) -> None:
        self.wait_for("up", _NODES)
        self.wait_for("launched")  # from then on, signals are for the program
        if self._has_children:
            self.wait_for("sharing", _NODES)
            self.wait_for("pids/daemon", _NODES)  # nobody waits for it there
            assert len(self._segments()) == 2 * _NODES
        for path in self._pids.iterdir():
            kind, _, pid = path.name.partition("-")
            # Knows when it was started: its number may be another's later.
            self._family.setdefault(kind, []).append(psutil.Process(int(pid)))
        known = sum(len(each) for each in self._family.values())
        assert known == (_NODES * _FAMILY if self._has_children else 0)
        ports = {
            connection.laddr.port
            for process in self._script.processes()
            for connection in _connections(process)
            if connection.status == psutil.CONN_LISTEN
        }
        self._listening = {each for each in _listening() if each[0] in ports}
        assert len({port for port, _ in self._listening}) >= _NODES  # those that serve

    def wait_for(self, name: str, count: int = 1) -> None:
        self._script.wait_for(name, count)

    def go(self) -> None:
        self.since = time.monotonic()
        (self._folder / "go").touch()

    def signal(self, signum: signal.Signals, to: psutil.Process | None = None) -> None:
        self.since = time.monotonic()
        (to or self.process).send_signal(signum)

    def agent_if_up(self) -> psutil.Process | None:
        return self._script.agent()

    def agent(self) -> psutil.Process:
        agent = self.agent_if_up()
        assert agent is not None
        return agent

    def reaper(self) -> psutil.Process:
        reaper = self._script.reaper()
        assert reaper is not None
        return reaper

    def processes(self) -> list[psutil.Process]:
        return self._script.processes()

    def worker(self) -> psutil.Process:
        (number,) = {each.name.partition("-")[2] for each in self._pids.glob("node0-*")}
        return psutil.Process(int(number))

    def _segments(self) -> list[Path]:
        return list(Path("/dev/shm").glob(f"{self._script.tag}*"))

    def left(self) -> list[str]:
        """Processes and shared memory of it that are there."""
        left = [repr(each) for each in self._script.processes()]
        left += [
            f"{kind} {process.pid}"
            for kind, processes in self._family.items()
            for process in processes
            if _is_alive(process)
        ]
        return left + [str(path) for path in self._segments()]

    def end(self) -> tuple[float, str, str]:
        """Waits until it has ended and nothing is left; returns after how long, and its output."""
        limit_s = _NOTICE_S + _PROMISED_S + _LOADED_S
        poll_until(lambda: self.process.poll() is not None, limit_s, must=False)
        poll_until(lambda: not self.left(), self.since + limit_s - time.monotonic(), must=False)
        took_s = time.monotonic() - self.since
        assert self.left() == []
        assert took_s < limit_s
        return took_s, *self.process.communicate(timeout=30)

    def kill_early(self) -> None:
        """Kills the launcher before all may be up, and waits until no process is left."""
        kill(self.process)
        self.process.communicate(timeout=30)
        self._script.assert_gone()
        for path in self._pids.iterdir():
            with contextlib.suppress(psutil.NoSuchProcess):
                family = psutil.Process(int(path.name.partition("-")[2]))
                poll_until(lambda: not _is_alive(family), must=False)  # noqa: B023 - at once
                assert not _is_alive(family), path.name

    def died(self) -> bool:
        """Tells whether its process ended at once, without a word."""
        return self.process.returncode in (3, -signal.SIGKILL, -signal.SIGSEGV)

    def assert_no_port_or_file_is_left(self) -> None:
        # The ports themselves may be another's by now.
        assert not self._listening & _listening()
        if self.died():  # who looks next removes its entry in the list of programs
            command = [sys.executable, "-m", "launchpad_lite.launch", "status"]
            shown = subprocess.check_output(command, env={**os.environ, **self._env}, text=True)
            assert shown == "no program of this user runs on this machine\n"
        assert list(self._temporary.rglob("*")) == []
        files = [*self._folder.rglob("*")]
        assert [path for path in files if stat.S_ISSOCK(path.lstat().st_mode)] == []

    def close(self) -> None:
        self._script.__exit__()
        for process in (each for processes in self._family.values() for each in processes):
            if _is_alive(process):
                kill(process)
        for path in self._segments():
            path.unlink()


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _listening() -> set[tuple[int, int]]:
    """Port and inode, which tells it from others, of each socket of the machine that listens."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {(int(row[1].partition(":")[2], 16), int(row[9])) for row in rows if row[3] == "0A"}


def _connections(process: psutil.Process) -> list[Any]:
    # The name before psutil 6.
    return list((getattr(process, "net_connections", None) or process.connections)("tcp"))


# What can happen


def _signalled(signum: signal.Signals) -> Callable[[Faulty], None]:
    return lambda run: run.signal(signum)


def _becomes_stuck(run: Faulty) -> None:
    run.go()
    run.wait_for("acting")


def _stuck_and_stopped(run: Faulty) -> None:
    _becomes_stuck(run)
    run.signal(signal.SIGTERM)


def _stuck_and_stopped_in_vain(run: Faulty) -> None:
    _stuck_and_stopped(run)
    with pytest.raises(subprocess.TimeoutExpired):
        run.process.wait(_NOTICE_S)
    run.signal(signal.SIGKILL)


def _stuck_and_killed(of: Callable[[Faulty], psutil.Process | None]) -> Callable[[Faulty], None]:
    def happens(run: Faulty) -> None:
        _becomes_stuck(run)
        run.signal(signal.SIGKILL, of(run))

    return happens


def _interrupted_twice(run: Faulty) -> None:
    _becomes_stuck(run)
    run.signal(signal.SIGINT)
    run.wait_for("asked")  # two of the same at one moment are one
    run.signal(signal.SIGINT)


def _asleep(run: Faulty) -> None:
    run.signal(signal.SIGSTOP)
    time.sleep(9)  # longer than any limit of the nodes
    run.signal(signal.SIGCONT)
    run.go()


def _agent_stopped(run: Faulty) -> None:
    run.signal(signal.SIGSTOP, run.agent())
    run.signal(signal.SIGTERM)


def _hang_up_all(run: Faulty) -> None:
    """As the end of a session does that tells all its processes."""
    for process in run.processes():
        for signum in (signal.SIGHUP, signal.SIGTERM):
            with contextlib.suppress(psutil.NoSuchProcess):
                run.signal(signum, process)


def _without_reaper(run: Faulty) -> None:
    run.signal(signal.SIGKILL, run.reaper())
    run.go()


@dataclass(frozen=True)
class Fault:
    """One way to end.

    Attributes:
        happens: Makes it so, in a program that is up.
        codes: Exit codes of the script, any of them; negative: killed by that signal.
        says: What its output must match.
        act: What `node[0]` does when it may go.
        forced: Nodes that were ended by force.
        notice_s: Seconds that nodes have to end; None: few where one of them takes them all.
    """

    happens: Callable[[Faulty], None]
    codes: tuple[int, ...]
    says: str = ""
    act: str = "waits"
    forced: str = ""
    notice_s: float | None = None


#: An interpreter that is left by KeyboardInterrupt ends by the signal; shells say 130.
_INTERRUPTED = (130, -signal.SIGINT)

_ANYWHERE: Mapping[str, Fault] = {
    "normal end": Fault(Faulty.go, (0,), act="returns"),
    "lp.stop": Fault(Faulty.go, (0,), act="stops"),
    "exception": Fault(
        Faulty.go, (1,), r"NodeFailedError: node\[0\] on .* failed: ValueError: the cause", "raises"
    ),
    "SIGINT": Fault(_signalled(signal.SIGINT), _INTERRUPTED, r"stopping 'faults' \(SIGINT\)"),
    "SIGTERM": Fault(_signalled(signal.SIGTERM), (143,)),
    "SIGHUP": Fault(_signalled(signal.SIGHUP), (129,)),
    "SIGKILL of the launcher": Fault(_signalled(signal.SIGKILL), (-signal.SIGKILL,)),
    "node that ignores SIGTERM": Fault(_stuck_and_stopped, (143,), act="is_deaf", forced="node[0]"),
    "node that ignores SIGTERM, SIGINT twice": Fault(
        # What the second one puts an end to is long.
        _interrupted_twice,
        _INTERRUPTED,
        act="is_deaf",
        forced="node[0]",
        notice_s=60.0,
    ),
    "sleep of the launcher": Fault(_asleep, (0,), act="returns"),
}
_PROCESSES: Mapping[str, Fault] = {
    **_ANYWHERE,
    "SIGKILL of the agent": Fault(
        lambda run: run.signal(signal.SIGKILL, run.agent()), (1,), "the agent of localhost died"
    ),
    "SIGKILL of the agent, stuck node": Fault(
        _stuck_and_killed(Faulty.agent), (1,), "the agent of localhost died", "holds_the_gil"
    ),
    "SIGKILL of the launcher, node that ignores SIGTERM": Fault(
        _stuck_and_killed(lambda _: None), (-signal.SIGKILL,), act="is_deaf"
    ),
    "SIGSTOP of the agent, SIGTERM": Fault(_agent_stopped, (143,), forced="server[0]"),
    # What comes when the program has ended is for the script, which it ends.
    "SIGHUP and SIGTERM to all processes": Fault(_hang_up_all, (129, 143, -1, -15)),
    "SIGTERM to the agent": Fault(lambda run: run.signal(signal.SIGTERM, run.agent()), (143,)),
    "SIGKILL of the reaper": Fault(_without_reaper, (0,), act="returns"),
    "SIGKILL of a worker": Fault(
        lambda run: run.signal(signal.SIGKILL, run.worker()),
        (1,),
        r"NodeFailedError: node\[0\] on localhost failed: its process was killed by SIGKILL",
    ),
    "os._exit": Fault(
        Faulty.go,
        (1,),
        r"node\[0\] on localhost failed: its process ended by itself with exit code 3",
        "leaves",
    ),
    "segmentation fault": Fault(
        Faulty.go, (1,), r"node\[0\] on localhost failed: .*killed by SIGSEGV", "segfaults"
    ),
    "stuck in C": Fault(_stuck_and_stopped, (143,), act="holds_the_gil", forced="node[0]"),
}
_THREADS: Mapping[str, Fault] = {
    **_ANYWHERE,
    # There the node is a part of the script.
    "os._exit": Fault(Faulty.go, (3,), act="leaves"),
    "segmentation fault": Fault(Faulty.go, (-signal.SIGSEGV,), act="segfaults"),
    "stuck in C": Fault(_stuck_and_stopped_in_vain, (-signal.SIGKILL,), act="holds_the_gil"),
}
_FAULTS = {"local_mp": _PROCESSES, "local_mt": _THREADS}


@pytest.fixture(scope="module")
def bystanders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[psutil.Process]]:
    """Processes that look like ours and are not: another program, a namesake, a marked one."""
    source = """
        import pathlib
        import launchpad_lite as lp

        def wait(index):
            pathlib.Path(f"up{index}").touch()
            lp.wait_for_stop()

        program = lp.Program("faults")
        with program.group("node"):
            for index in range(2):
                program.add_node(lp.PyNode(wait, index))
        lp.launch(program, "test_mp")
    """
    namesake = "import time; time.sleep(1000)  # launchers.host.agent script.py"
    with Script(tmp_path_factory.mktemp("bystander"), source) as script:
        script.start(output=subprocess.DEVNULL)
        namesakes = [
            subprocess.Popen([sys.executable, "-c", namesake], env={**os.environ, **more})
            for more in ({}, {MARK: uuid.uuid4().hex})
        ]
        try:
            script.wait_for("up", 2)
            others = script.processes()
            assert len(others) == 5  # launcher, agent, reaper, workers
            yield [*others, *(psutil.Process(each.pid) for each in namesakes)]
        finally:
            for each in namesakes:
                each.kill()
                each.wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "name"),
    [(launcher, name) for launcher, faults in _FAULTS.items() for name in faults],
)
def test_nothing_is_left_and_who_did_it_is_named(
    tmp_path: Path, bystanders: list[psutil.Process], launcher: str, name: str
) -> None:
    fault = _FAULTS[launcher][name]
    notice_s = fault.notice_s or (_NOTICE_S if fault.forced else _LONG_NOTICE_S)
    with contextlib.closing(Faulty(tmp_path, launcher, fault.act, notice_s)) as run:
        run.wait_until_up()
        fault.happens(run)
        took_s, stdout, stderr = run.end()
        print(f"{name}, {launcher}: nothing left after {took_s:.2f} s")  # for docs/promises.md
        assert run.process.returncode in fault.codes, stderr
        assert re.search(fault.says, stderr)
        if not run.died():
            (line,) = re.findall("^ended by force:(.*)$", stdout, re.MULTILINE)
            assert fault.forced in line if fault.forced else not line
        run.assert_no_port_or_file_is_left()
        assert [each for each in bystanders if not _is_alive(each)] == []


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.0, 0.1, 0.3, 0.5, 0.8, 1.2])
@pytest.mark.parametrize("also_agent", [False, True])
def test_nothing_is_left_when_the_launcher_is_killed_at_any_moment(
    tmp_path: Path, also_agent: bool, delay_s: float
) -> None:
    with contextlib.closing(Faulty(tmp_path, "local_mp", "waits", _LONG_NOTICE_S)) as run:
        agent = poll_until(run.agent_if_up, 60) if also_agent else None
        time.sleep(delay_s)  # the moment is what is tested
        if agent is not None:
            kill(agent)
        run.kill_early()


@pytest.mark.slow
def test_nothing_is_left_if_a_child_of_the_killed_launcher_holds_its_pipes(tmp_path: Path) -> None:
    source = """
        import os, pathlib, time
        import launchpad_lite as lp

        def wait():
            pathlib.Path("up").touch()
            lp.wait_for_stop()

        program = lp.Program("pipes")
        program.add_node(lp.PyNode(wait), label="node")
        running = lp.launch(program)
        child = os.fork()
        if child == 0:
            time.sleep(1000)
        pathlib.Path("child.tmp").write_text(str(child))
        os.rename("child.tmp", "child")
        running.wait()
    """
    with Script(tmp_path, source) as script:
        process = script.start(output=subprocess.DEVNULL)
        script.wait_for("up")
        script.wait_for("child")
        child = int((tmp_path / "child").read_text())
        kill(process)
        process.wait()
        poll_until(lambda: {each.pid for each in script.processes()} == {child})


def test_children_of_a_node_end_with_it_while_the_program_goes_on(
    launch_program: Any, tmp_path: Path
) -> None:
    program = lp.Program("children")
    program.add_node(lp.PyNode(_leave_a_child, tmp_path / "child"), label="short")
    program.add_node(lp.PyNode(lp.wait_for_stop), label="long")
    running = launch_program(program, "test_mp")
    poll_until((tmp_path / "child").exists)
    pid = int((tmp_path / "child").read_text())
    poll_until(lambda: not psutil.pid_exists(pid))
    assert running.running.result is None


def _leave_a_child(file: Path) -> None:
    child = subprocess.Popen(["sleep", "1000"])
    file.with_suffix(".tmp").write_text(str(child.pid))
    file.with_suffix(".tmp").rename(file)


# Many at a time, again and again, and at the worst moment


def _agent_here() -> psutil.Process:
    """The agent of the only program that was launched by this process."""

    def find() -> psutil.Process | None:
        for child in psutil.Process().children():
            # One that an earlier test left may end meanwhile.
            with contextlib.suppress(psutil.Error):
                if child.name() == "launchpad-reap":
                    return next(iter(child.children()), None)
        return None

    agent = poll_until(find, 20)
    assert agent is not None
    return agent


def _many(count: int) -> lp.Program:
    program = lp.Program("many")
    with program.group("node"):
        for _ in range(count):
            program.add_node(lp.PyNode(lp.wait_for_stop))
    return program


def _zombies_of(parent: psutil.Process) -> list[psutil.Process]:
    found = []
    for child in parent.children():
        with contextlib.suppress(psutil.Error):  # it comes and goes
            if child.status() == psutil.STATUS_ZOMBIE:
                found.append(child)
    return found


def _leaves_an_orphan() -> None:
    subprocess.run(["sh", "-c", "true &"], check=True)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_hundred_restarts_leave_the_agent_as_it_was(launch_program: Any) -> None:
    program = program_of("restarts", node=lp.PyNode(_leaves_an_orphan))
    policy = lp.RestartPolicy("always", backoff_s=0.01, max_backoff_s=0.01)
    running = launch_program(program, "test_mp", restart=policy)
    agent = _agent_here()
    poll_until(lambda: running.running.status()[0].restarts > 3)
    before = agent.num_fds()
    poll_until(lambda: running.running.status()[0].restarts > 103, 300)
    # A worker that lives just now has some.
    poll_until(lambda: agent.num_fds() <= before)
    poll_until(lambda: not _zombies_of(agent))


def _fails_beside_a_daemon_that_prints() -> None:
    if lp.restart_count() < 3:
        # Inherits the node's output, and would go on for ever.
        subprocess.Popen(["yes"], start_new_session=True)
        raise ValueError("the cause")
    lp.wait_for_stop()


@pytest.mark.slow
def test_what_a_dead_worker_left_may_print_for_ever(launch_program: Any) -> None:
    program = program_of(node=lp.PyNode(_fails_beside_a_daemon_that_prints))
    policy = lp.RestartPolicy(backoff_s=0.01)
    running = launch_program(program, "test_mp", restart=policy)
    poll_until(lambda: running.running.status()[0].restarts == 3, 30)
    poll_until(lambda: states(running) == {"running"}, 30)
    started = time.monotonic()
    assert running.stop(30).outcome is lp.Outcome.STOPPED
    assert time.monotonic() - started < _PROMISED_S + _LOADED_S


@pytest.mark.slow
def test_two_hundred_workers_killed_at_once_are_one_failure(launch_program: Any) -> None:
    running = launch_program(_many(200), "test_mp")
    poll_until(lambda: states(running) == {"running"}, 60)
    pids = [each.pid for each in running.running.status()]
    assert None not in pids
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # the first is known to be dead, maybe
            os.kill(pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(lp.NodeFailedError, match="killed by SIGKILL"):
        running.wait(60)
    assert time.monotonic() - started < _PROMISED_S + _LOADED_S


@pytest.mark.parametrize(("up", "notice_s"), [(0, 2.0), (8, 0.0), (16, 2.0)])
def test_a_stop_while_nodes_are_started_ends_all(
    launch_program: Any, up: int, notice_s: float
) -> None:
    running = launch_program(_many(30), "test_mp", notice_s=notice_s)
    poll_until(lambda: sum(each.pid is not None for each in running.running.status()) >= up)
    started = time.monotonic()
    assert running.stop(30).outcome is lp.Outcome.STOPPED
    assert time.monotonic() - started < notice_s + _PROMISED_S + _LOADED_S


@pytest.mark.parametrize("restart", ["never", "on_failure"])
def test_a_worker_that_is_killed_while_it_is_started_is_named(
    launch_program: Any, restart: str
) -> None:
    running = launch_program(_many(4), "test_mp", restart=restart)
    agent = _agent_here()
    kill(poll_until(agent.children, 20)[0])
    if restart == "never":
        with pytest.raises(lp.NodeFailedError, match=r"node\[.\] .* killed by SIGKILL"):
            running.wait(30)
    else:
        poll_until(lambda: any(each.restarts for each in running.running.status()), 30)
        poll_until(lambda: states(running) == {"running"}, 30)
        (again,) = running.stop().restarts
        assert "SIGKILL" in again.failure.summary


# What docs/promises.md says

_PROMISES = (Path(__file__).parents[2] / "docs" / "promises.md").read_text(encoding="utf-8")
_SNIPPETS = {
    found[2]: found[1]
    for found in re.finditer(
        r"^```python\n(# (\w+\.py)\n.*?)^```$", _PROMISES, re.DOTALL | re.MULTILINE
    )
}
_PRINTED = {
    # The stop may come a step or more after it was asked for.
    "stop.py": [r"\[learner\[0\]\] got [1-9]\d+ steps", "stopped, by force: 0"],
    "failure.py": [r"train\[0\]: ValueError: no data"],
    "restart.py": [r"\[search\[0\]\] \[0, 1, 4, 9\]", "restarts: 1"],
    "state.py": [r"\[counter\[0\]\] run 1", r"\[counter\[0\]\] run 2"],
    "liveness.py": [r"it is hung: it did not call lp\.heartbeat\(\) for 0\.5 s"],
    "preemption.py": [r"\[work\[0\]\] came back", "it was asked from outside to end, by SIGTERM"],
}
#: What a launch prints besides, as a pattern.
_TOLD = {
    "liveness.py": r"liveness: work\[0\] is hung, and ended by force: .*\n"
    r"work\[0\]\.work sleeps \(liveness\.py:\d+: .*\)\n"
}


def test_the_table_has_a_line_for_each_fault() -> None:
    (table,) = re.findall(r"^\| fault \| `local_mp`.*?\n((?:\|.*\n)+)", _PROMISES, re.MULTILINE)
    lines = [line.split("|")[1].strip() for line in table.splitlines()[1:]]
    assert lines == sorted(lines, key=lines.index)
    assert set(lines) == {name for faults in _FAULTS.values() for name in faults}


@pytest.mark.parametrize(("file", "test"), re.findall(r"`(test_\w+\.py)::(\w+)`", _PROMISES))
def test_the_tests_that_the_table_names_exist(file: str, test: str) -> None:
    assert f"\ndef {test}(" in (Path(__file__).parent / file).read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("name", _PRINTED)
def test_the_code_that_shows_a_promise_runs(tmp_path: Path, name: str) -> None:
    assert _SNIPPETS.keys() == _PRINTED.keys()
    with Script(tmp_path, _SNIPPETS[name], name) as script:
        ended = script.run()
        assert ended.code == 0
        told = without_logs_line(ended.stderr)
        assert re.fullmatch(_TOLD.get(name, ""), told), told
        for line in _PRINTED[name]:
            assert re.search(f"^{line}$", ended.stdout, re.MULTILINE), ended.stdout
