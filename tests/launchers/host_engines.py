"""Real host engines as their users see them: a desk where programs are launched, for each engine.

A desk launches scripts, knows what they have told, and does to hosts and nodes what tests ask for.
What every engine must do is in `host_contract`.
"""

import abc
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil

from launchers.kubernetes._names import Names
from launchpad_lite.testing import poll_until
from tests.beds.kubernetes.cluster import IMAGE, KubernetesCluster
from tests.beds.slurm import SlurmCluster
from tests.beds.ssh_hosts import LAUNCHER, Bed, SshHosts, lend
from tests.launchers.kubernetes_access import documented_role

CHECKOUT = Path(__file__).resolve().parents[2]
#: For what takes seconds; the rest is for a machine that is busy.
WITHIN_S = 90.0

PROGRAM = """
import json, os, pathlib, re, signal, socket, subprocess, sys, threading, time
import courier
import launchpad_lite as lp

LAUNCHER, OPTIONS, HOW = json.loads(os.environ.get("LAUNCH", '["", {}, {}]'))


class Trouble(LookupError):
    pass


def start_family():
    subprocess.Popen(["sleep", "1000"])
    subprocess.Popen(["setsid", "sleep", "1000"])
    subprocess.Popen(["env", "-i", "setsid", "sh", "-c", "trap : TERM; sleep 1000 & sleep 1000"])


def tell(folder, name, value):
    aside = folder / f"{name}.{os.getpid()}.{threading.get_ident()}"
    aside.write_text(json.dumps(value))
    os.replace(aside, folder / name)


def note(folder, words):
    with (folder / "notes").open("a") as notes:
        notes.write(f"{words}\\n")
    print(words, flush=True)


class Store:
    def __init__(self, how):
        self.shared = pathlib.Path(how["shared"])
        self.total = 0
        if how.get("family"):
            start_family()
        lp.register_stop_handler(self.leave)

    def leave(self):
        note(self.shared, "the store leaves")

    def add(self):
        self.total += 1
        while (self.shared / "hold").exists():
            time.sleep(0.02)
        if (self.shared / "eat").exists():
            (self.shared / "eat").unlink()
            kept = []
            while True:
                kept.append(b"x" * (1 << 24))
        return socket.gethostname(), self.total

    def save(self, folder):
        (pathlib.Path(folder) / "total").write_text(str(self.total))

    def restore(self, folder):
        self.total = int((pathlib.Path(folder) / "total").read_text())
        print("restored", self.total, flush=True)


class Caller:
    def __init__(self, store, index, how):
        self.store, self.index, self.how = store, index, how
        self.shared = pathlib.Path(how["shared"])
        # Callers that are to be patient go on when a call fails, as learners do.
        self.gone = courier.ServerGoneError if how.get("patient") else ()

    def run(self):
        if self.how.get("family"):
            start_family()
        self.calls = self.lost = 0
        while not lp.wait_for_stop(0.02):
            if (self.shared / "finish").exists() or (self.how.get("brief") and self.calls):
                break
            self.work()
        else:
            self.leave()
        print(f"{self.calls} calls, {self.lost} lost", flush=True)

    def work(self):
        if (self.shared / "stop").exists():
            lp.stop()
        if (self.shared / f"fail{self.index}").exists():
            raise Trouble("no data")
        if (self.shared / "talk").exists():
            print("a line of output " * 4, flush=True)
        try:
            there, total = self.store.add()
        except self.gone:
            self.lost += 1
            return
        self.calls += 1
        here = socket.gethostname()
        if self.calls == 1:
            print(f"{self.index} on {here} called {there}", flush=True)
            print(f"a complaint of {self.index}", file=sys.stderr, flush=True)
        told = {"here": here, "there": there, "total": total, "calls": self.calls}
        tell(self.shared, f"caller{self.index}", {**told, "at": time.time()})

    def leave(self):
        if self.how.get("deaf"):
            tell(self.shared, f"asked{self.index}", True)
            threading.Event().wait()
        try:
            self.store.add()
        except courier.CourierError:
            return  # there may be a reason for the stop
        note(self.shared, "the caller leaves")


def make_program(callers: int = 2):
    program = lp.Program("counting")
    with program.group("store"):
        store = program.add_node(lp.CourierNode(Store, HOW))
    with program.group("caller"):
        for index in range(callers):
            program.add_node(lp.CourierNode(Caller, store, index, HOW))
    return program
"""
MAIN = """
def watch():
    while running.result is None:
        tell(HERE, "status", {
            n.name: [n.state, n.host, n.restarts, n.pid, n.cpu, n.memory_mib]
            for n in running.status()
        })
        time.sleep(0.1)


if __name__ == "__main__":
    HERE = pathlib.Path.cwd()
    if "checkpoints" in OPTIONS:
        OPTIONS["checkpoints"] = lp.Checkpoints(*OPTIONS["checkpoints"])
    if isinstance(OPTIONS.get("restart"), int):
        OPTIONS["restart"] = lp.RestartPolicy("on_failure", max_restarts=OPTIONS["restart"])
    program = make_program(HOW["callers"])
    running = lp.launch(program, LAUNCHER, **OPTIONS)
    print("LAUNCHED\\n", end="", flush=True)  # in one piece, whatever else is printed
    threading.Thread(target=watch, daemon=True).start()
    try:
        if HOW.get("calls"):
            store = program.groups["store"][0].create_handle().dereference()
            print("THE SCRIPT CALLED", store.add()[0], flush=True)
        running.wait()
    except lp.NodeFailedError as error:
        cause = error.__cause__
        print("CAUSE", repr(cause), type(cause).__mro__[1:2], flush=True)
        print("FOLDER", error.folder, flush=True)
        raise
    finally:
        result = running.result
        tell(HERE, "result", {
            "outcome": result.outcome.name,
            "reason": result.reason,
            "killed": list(result.killed),
            "states": {each.name: each.state for each in running.status()},
            "failures": [[each.node, each.host, each.summary] for each in result.failures],
            "restarts": [
                [each.node, each.failure and each.failure.summary] for each in result.restarts
            ],
        })
"""
#: What users may choose is for clusters, which tell pods late of changes.
_IMPATIENT = """
from launchers import kubernetes as _kubernetes
from launchers.kubernetes._timing import Timing as _Timing

_kubernetes._seconds_mistakes = lambda *_: ()
OPTIONS["timing"] = _Timing(**HOW["timing"])
"""


class Command:
    """A command of the user, with what it has printed and its program has told so far."""

    def __init__(self, desk: "Desk", process: "subprocess.Popen[str]", callers: int) -> None:
        self.desk = desk
        self.process = process
        self.callers = callers
        self.output = ""
        self.struck_at = time.monotonic()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.output += line

    # What the user sees

    def said(self, pattern: str) -> bool:
        return re.search(pattern, self.output, re.MULTILINE) is not None

    def until(self, pattern: str, timeout_s: float = WITHIN_S) -> None:
        """Waits until something was printed."""
        poll_until(lambda: self.said(pattern) or not self._reader.is_alive(), timeout_s, must=False)
        assert self.said(pattern), self.story
        self.note(f"{pattern!r} was told")

    def end(self, timeout_s: float = 90.0) -> int:
        """Waits for the end of the command; returns its exit code."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it continues after {timeout_s} s:\n{self.story}") from None
        self._reader.join(timeout_s)
        self.note(f"it ended with {code}")
        print(f"\n{self.output}")
        return code

    def check(self, timeout_s: float = 90.0) -> str:
        """Waits for a good end; returns what was printed."""
        assert self.end(timeout_s) == 0, self.story
        return self.output

    def refusal(self, timeout_s: float = 90.0) -> str:
        """Waits for the end by an error; returns its text."""
        assert self.end(timeout_s) == 1, self.story
        return self.output.partition("errors.LaunchError: ")[2] or self.output

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        self._reader.join()

    @property
    def story(self) -> str:
        """All that tells what went on."""
        return "\n".join([self.output, *self.desk.events()])

    @property
    def job(self) -> str:
        """The number of its job in Slurm."""
        found = re.search(r"job (\d+)", self.output)
        assert found, self.output
        return found[1]

    # What its program tells

    def told(self, name: str) -> Any:
        """What a node told last under a name; None: nothing yet."""
        return _read_json(self.desk.shared / name)

    def notes(self) -> list[str]:
        """What nodes have noted, in the order in which they did; output of hosts may overtake."""
        return (self.desk.shared / "notes").read_text().splitlines()

    def status(self) -> dict[str, list[Any]]:
        """State, host, restarts, pid, cores, MiB of each node, as the launcher knows them."""
        return _read_json(self.desk.folder / "status") or {}

    @property
    def result(self) -> Any:
        return _read_json(self.desk.folder / "result")

    def host(self, node: str) -> str:
        return str(self.status()[node][1])

    def await_calls(self, timeout_s: float = WITHIN_S) -> None:
        """Waits until each caller has got answers, from now on, and the launch has returned."""
        now = time.time()

        def all_do() -> bool:
            assert self.process.poll() is None, self.story
            told = [self.told(f"caller{index}") for index in range(self.callers)]
            return all(each and each["at"] > now for each in told) and bool(self.status())

        if not poll_until(all_do, timeout_s, must=False):
            raise AssertionError(f"no calls, {self.status()}:\n{self.story}")
        self.note("calls went on")

    def await_restart(self, node: str, host: str | None = None, restarts: int = 1) -> None:
        """Waits until a node is at work after so many restarts."""

        def there() -> bool:
            assert self.process.poll() is None, self.story
            state, where, count, *_ = self.status()[node]
            at_work = state in ("running", "serving") and host in (None, where)
            return at_work and count == restarts

        if not poll_until(there, WITHIN_S, must=False):
            raise AssertionError(f"{self.status()}:\n{self.story}")
        self.note(f"{node} is at work again")

    # Faults

    def strike(self) -> None:
        """Starts the clock."""
        self.struck_at = time.monotonic()

    def note(self, what: str) -> None:
        """Shows how long something took, from the fault on; `pytest -s` shows it."""
        print(f"\n{what} after {time.monotonic() - self.struck_at:.1f} s", end="")

    def kill_at_random(self, *groups: str, kills: int, seed: int = 1) -> list[str]:
        """Kills processes of nodes, each once it is at work; returns which, once all are back."""
        chance = random.Random(seed)
        killed: list[str] = []

        def at_work() -> list[str]:
            return [
                node
                for node, (state, _, restarts, pid, *_) in self.status().items()
                if node.startswith(groups)
                and state in ("running", "serving")
                and pid
                and restarts == killed.count(node)
            ]

        for _ in range(kills):
            time.sleep(chance.uniform(0.2, 1.2))
            poll_until(at_work, 60)
            victim = chance.choice(at_work())
            self.desk.kill_worker(self, victim)
            killed.append(victim)
        for node in set(killed):
            self.await_restart(node, restarts=killed.count(node))
        return killed

    def send(self, signum: signal.Signals) -> None:
        self.strike()
        self.process.send_signal(signum)

    def say(self, name: str) -> None:
        """Tells the program to `finish`, `stop`, `talk`, `fail0` or `eat`."""
        self.strike()
        (self.desk.shared / name).touch()

    def finish(self) -> None:
        """Has the program end by itself, and checks that it ends well and leaves nothing."""
        self.say("finish")
        self.check()
        self.desk.assert_nothing_is_left()


class Desk(abc.ABC):
    """Where somebody launches programs on an engine.

    Attributes:
        folder: Where commands run; hosts need not see it.
        shared: A folder that nodes see as well, as `there`.
    """

    launcher: str
    #: What every launch has.
    options: Mapping[str, Any]
    #: What becomes of a worker that gets SIGKILL, as a pattern.
    killed: str
    #: What the failure of a node whose host is gone says.
    lost: str
    #: What a command line has that launches.
    command_line_options: Sequence[str]
    #: Whether nodes start processes which must not be left.
    has_family = False
    #: Whether the launching process reaches the nodes.
    calls_nodes = True

    def __init__(self, folder: Path, shared: Path, there: Path) -> None:
        self.folder = folder
        self.shared = shared
        self.there = there
        self.commands: list[Command] = []

    @abc.abstractmethod
    def popen(self, command: Sequence[str], **options: Any) -> "subprocess.Popen[str]":
        """Starts a command where users launch."""

    @abc.abstractmethod
    def leftovers(self) -> list[str]:
        """What there is of programs."""

    @abc.abstractmethod
    def kill_worker(self, run: Command, node: str) -> None:
        """Kills the process of a node."""

    @abc.abstractmethod
    def lose_host(self, host: str) -> None:
        """Makes a host of nodes go, as they are named in the status."""

    def events(self) -> list[str]:
        """What else may tell why a test fails."""
        return []

    def environment(self) -> dict[str, str]:
        """That of commands; nothing of tests or of Slurm's own jobs."""
        ours = ("PYTEST_", "SLURM_JOB")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        return {**kept, "LAUNCHPAD_LOGGING_DIR": str(self.folder / "logs"), "PYTHONUNBUFFERED": "1"}

    def write(self, source: str, name: str = "script.py") -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        return path

    def run(self, *command: str, how: Mapping[str, Any] | None = None, **options: Any) -> Command:
        """Starts a command.

        Args:
            *command: The program and its arguments.
            how: What `PROGRAM` is to do; `brief`: callers end when they have called.
            **options: Of `lp.launch`, beside those that every launch has; None: leave that out.
        """
        chosen = {name: value for name, value in options.items() if value is not None}
        kept = {name: value for name, value in self.options.items() if name not in options}
        doing = {"callers": 2, "family": self.has_family, **(how or {})}
        launch = [self.launcher, {**kept, **chosen}, {**doing, "shared": str(self.there)}]
        process = self.popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
            env={**self.environment(), "LAUNCH": json.dumps(launch)},
            start_new_session=True,
        )
        self.commands.append(Command(self, process, doing["callers"]))
        return self.commands[-1]

    def launch(
        self,
        *source: str,
        base: str = PROGRAM,
        how: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Command:
        """Runs a script: `PROGRAM`, what is given, and `MAIN` unless it launches by itself."""
        text = "".join(map(textwrap.dedent, (base, *source)))
        impatient = _IMPATIENT if how and "timing" in how else ""
        launches = "lp.launch(" in text or "search.run(" in text
        script = self.write(text + impatient + ("" if launches else MAIN))
        for name in ("status", "result", "shared/notes"):
            (self.folder / name).unlink(missing_ok=True)
        return self.run(sys.executable, str(script), how=how, **options)

    def begin(self, *source: str, **options: Any) -> Command:
        """Launches, and waits until all nodes are at work."""
        run = self.launch(*source, **options)
        run.await_calls()
        states = ("running", "serving")
        poll_until(lambda: all(state in states for state, *_ in run.status().values()), WITHIN_S)
        run.strike()
        return run

    def command_line(self, *arguments: str, **options: Any) -> Command:
        module = ("-m", "launchpad_lite.launch", f"--launcher={self.launcher}")
        return self.run(sys.executable, *module, *arguments, **options)

    def log(self, node: str) -> str:
        """What is kept of a node's output, as "caller/0"."""
        (path,) = self.folder.rglob(f"{node}.log")
        return path.read_text()

    def assert_nothing_is_left(self, within_s: float = WITHIN_S) -> None:
        poll_until(lambda: not self.leftovers(), within_s, must=False)
        left = self.leftovers()
        assert not left, "\n".join([*left, *(each.story for each in self.commands)])

    def leave(self) -> None:
        """Ends what still runs; what commands printed is shown beside a failed test."""
        for command in self.commands:
            command.kill()
            print(command.output)


D = TypeVar("D", bound=Desk)


@contextlib.contextmanager
def desk_on(bed: Bed, make: Callable[[], D]) -> Iterator[D]:
    """A desk for one test, which must leave the bed as it was."""
    with contextlib.contextmanager(lend)(bed):
        desk = make()
        try:
            yield desk
        finally:
            desk.leave()


class _HostDesk(Desk):
    """For engines on the hosts of a bed."""

    hosts: SshHosts
    has_family = True
    killed = "its process was killed by SIGKILL"

    def kill_worker(self, run: Command, node: str) -> None:
        _, host, _, pid, *_ = run.status()[node]
        self.hosts.run_on(host, "kill", "-9", str(pid))


#: One node on each host, and none where Slurm runs the supervisor but a caller.
PLACEMENT = {"store": "h2", "caller[0]": "h1", "caller[1]": "h3"}


class SshDesk(_HostDesk):
    """At h0, whose hosts are reached by ssh."""

    launcher = "ssh"
    #: What goes between may not get a turn for a while on a machine that is busy. And not 5: by then
    #: ssh, which asks every full second, has given up itself.
    silence_s = 6.0
    options = {"hosts": ["h1", "h2", "h3"], "placement": PLACEMENT, "silence_s": silence_s}
    command_line_options = ("--hosts=h1,h2,h3",)
    lost = "h2 is lost: the link to it broke"

    def __init__(self, hosts: SshHosts, folder: Path) -> None:
        super().__init__(folder, hosts.shared, hosts.shared)
        self.hosts = hosts

    def popen(self, command: Sequence[str], **options: Any) -> "subprocess.Popen[str]":
        return self.hosts.run(command, **options)

    def leftovers(self) -> list[str]:
        return self.hosts.leftovers()

    def lose_host(self, host: str) -> None:
        self.hosts.crash(host)

    def victim(self, what: str, host: str) -> psutil.Process:
        """One process by its part: ssh, sshd, reaper, agent or worker."""
        if what == "ssh":  # the client that holds the link to the host
            (found,) = (
                each
                for each in self.hosts.processes(LAUNCHER)
                if each.name() == "ssh" and host in each.cmdline()
            )
            return found
        ours = self.hosts.processes(host)
        pids = {each.pid for each in ours}
        (reaper,) = (each for each in ours if is_python(each) and each.ppid() not in pids)
        if what == "sshd":  # which serves the link
            session = reaper.parent()
            assert session is not None
            return session
        if what == "reaper":
            return reaper
        (agent,) = filter(is_python, reaper.children())
        return agent if what == "agent" else next(filter(is_python, agent.children()))

    def interpreters(self, host: str) -> int:
        """How many there are: the arrival, then reaper and agent, then workers."""
        return sum(map(is_python, self.hosts.processes(host)))

    def await_clean(self, host: str, within_s: float = WITHIN_S) -> None:
        """Waits until nothing of a program is left on one host."""
        poll_until(lambda: not self.hosts.processes(host), within_s, must=False)
        left = [line for line in self.leftovers() if line.startswith(f"{host}: ")]
        assert not left, "\n".join(left)


class SlurmDesk(_HostDesk):
    """At the login node, h0; folders are those of the network drive."""

    launcher = "slurm"
    options = {"nodes": 3, "placement": PLACEMENT}
    command_line_options = ("--nodes=3",)
    lost = "h2 is lost: "

    def __init__(self, cluster: SlurmCluster) -> None:
        self.cluster = cluster
        self.hosts = cluster.hosts
        folder = self.hosts.shared / "desk"
        folder.mkdir()
        super().__init__(folder, folder, folder)

    def popen(self, command: Sequence[str], **options: Any) -> "subprocess.Popen[str]":
        return self.cluster.run(command, **options)

    def environment(self) -> dict[str, str]:
        return {**super().environment(), **_only(self.cluster.environment, "SLURM_CONF")}

    def leftovers(self) -> list[str]:
        return self.cluster.leftovers()

    def processes(self, but: Command | None = None) -> list[str]:
        """What runs on hosts but one command, and Slurm's own."""
        spared = f"h0: {but.process.pid} " if but is not None else "none"
        return [
            line
            for line in self.hosts.leftovers()
            if not line.startswith(spared) and "slurmstepd: " not in line
        ]

    def lose_host(self, host: str) -> None:
        self.cluster.crash(host)

    def slurm(self, *command: str) -> str:
        return self.run(*command).check()


class KubernetesDesk(Desk):
    """Of somebody at this machine who may do in the cluster what the documentation asks for."""

    launcher = "kubernetes"
    killed = "its pod counting-store-0 was killed by SIGKILL"
    lost = "counting-store-0"
    command_line_options = (f"--image={IMAGE}",)
    calls_nodes = False
    #: Of which an ordinary run consists.
    kinds = ("Job", "Service", "Secret", "NetworkPolicy")

    def __init__(self, cluster: KubernetesCluster, folder: Path) -> None:
        shared = folder / "shared"
        shared.mkdir()
        shared.chmod(0o777)
        for each in (folder, *folder.parents[:2]):
            each.chmod(0o755)
        super().__init__(folder, shared, Path("/shared"))
        self.cluster = cluster
        self.kubeconfig = cluster.limited(documented_role())
        self.options = {"image": IMAGE, "name": "counting", "silence_s": 8, "pods": self.pods()}

    def pods(self, **groups: Mapping[str, Any]) -> dict[str, Any]:
        """The option `pods`, with what each group is to have; nodes see the shared folder."""
        volume = {"hostPath": {"path": str(self.shared)}, "mount": "/shared"}
        return {"*": {"volumes": {"shared": volume}}, **groups}

    def popen(self, command: Sequence[str], **options: Any) -> "subprocess.Popen[str]":
        return subprocess.Popen(command, **options)

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "KUBECONFIG": str(self.kubeconfig)}

    def events(self) -> list[str]:
        return self.cluster.events()

    def leftovers(self) -> list[str]:
        return self.cluster.leftovers()

    def kill_worker(self, run: Command, node: str) -> None:
        self.cluster.kill_container(self.pod(node))

    def lose_host(self, host: str) -> None:
        (pod,) = (
            pod["metadata"]["name"]
            for pod in self.cluster.pods()
            if pod["spec"].get("hostname") == host
        )
        self.cluster.cut(pod)

    def assert_no_object_is_left(self) -> None:
        """What a launch promises when it returns; containers end a moment after their objects."""
        left = [
            f"{kind} {each['metadata']['name']}"
            for kind in ("Pod", *self.kinds)
            for each in self.cluster.objects(kind)
        ]
        assert not left, "\n".join([*left, *self.events()])

    def pod(self, node: str) -> str:
        """Name of the pod of a node, or of the `supervisor`, that runs now."""

        def names() -> list[str]:
            return [
                each["metadata"]["name"]
                for each in self.cluster.pods()
                if each["status"].get("phase") == "Running"
                and "deletionTimestamp" not in each["metadata"]
                and _is_of(each, node)
            ]

        # Its node may be at work before its kubelet has said that it runs.
        assert poll_until(lambda: len(names()) == 1, must=False), self.events()
        return names()[0]

    def machine(self, node: str) -> str:
        """The machine of the pod that runs now."""
        name = self.pod(node)
        (pod,) = (each for each in self.cluster.pods() if each["metadata"]["name"] == name)
        return str(pod["spec"]["nodeName"])

    def job_has_succeeded(self, name: str) -> bool:
        return any(
            each["status"].get("succeeded") and each["metadata"]["name"] == name
            for each in self.cluster.objects("Job")
        )


def is_python(process: psutil.Process) -> bool:
    """Whether it runs Python by now; psutil would still tell the shell that it was before."""
    with contextlib.suppress(OSError):  # it has ended
        program = Path(f"/proc/{process.pid}/exe").readlink()
        return program.name.startswith("python")  # a worker has the name of its node
    return False


def _is_of(pod: dict[str, Any], node: str) -> bool:
    labels = pod["metadata"]["labels"]
    if node == "supervisor":
        return bool(labels.get("launchpad-lite/role") == node)
    group, replica = node.rstrip("]").split("[")
    slug = Names.of("", [group], "counting").slug(group)
    is_group = labels.get("launchpad-lite/group") == slug
    return is_group and str(pod["spec"]["hostname"]).endswith(f"-{replica}")


def _only(values: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: values[name] for name in names}


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
