"""How an agent gets onto a host that has nothing but Python: the launcher's side of `boot`.

Whatever reaches the host (ssh, srun) is a command that starts an interpreter there and passes bytes
on both ways. All else goes through these pipes: nothing is in an argument that others could read.
"""

import collections
import contextlib
import math
import platform
import shlex
import subprocess
import sys
import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launchers.host import boot
from launchers.host.agent_link import AgentLink
from launchers.host.link import SIGNS_PER_SILENCE, Frame, FrameReader, Reach, write_all
from launchers.host.sweep import MARK
from launchers.host.timing import DEFAULT, Timing
from launchpad_lite.errors import LaunchError

#: Reads a line with a length and then a program so long; nothing that it reads is buffered. One line
#: without single quotes, so that it passes through shells unchanged and stays readable.
LOADER = (
    "import sys;sys.version_info>(3,6) or "
    'sys.exit("Python %d.%d is too old. Say which one to use: python="%sys.version_info[:2]);'
    'i=open(0,"rb",0,closefd=False);n=int(i.readline());s=b"";'
    'exec("while len(s)<n:s+=i.read(n-len(s)) or sys.exit(1)");'
    "sys.path[:]=[p for p in sys.path if p];exec(s.decode())"
)
#: Starts the first interpreter among the arguments that is there, with argument 0 as its program.
_SCRIPT = (
    'for p; do case $p in "~/"*) p=$HOME/${p#"~/"};; esac; '
    'command -v "$p" >/dev/null 2>&1 && exec "$p" -c "$0"; done; '
    'echo "there is no $*" >&2; exit 127'
)
#: Lines of what a host's programs complained of, for messages.
_MESSAGES = 20
#: Seconds that the command has to end by SIGTERM.
_END_S = 5.0
#: What the shell of a host says to a program that is not there.
_NO_PYTHON = 127


@dataclass(frozen=True)
class Facts:
    """What a bare interpreter tells of a host and of itself."""

    python: tuple[int, ...]
    implementation: str
    executable: str
    platform: tuple[str, ...]
    host: str
    packages: Mapping[str, str | None]
    missing: tuple[str, ...]

    @classmethod
    def here(cls) -> "Facts":
        """Returns the same of this process, as far as it must agree."""
        return cls(
            sys.version_info[:3],
            platform.python_implementation(),
            sys.executable,
            (sys.platform, platform.machine(), platform.libc_ver()[0]),
            platform.node(),
            {},
            (),
        )


@dataclass(frozen=True)
class Hello:
    """What a host must know before it can tell anything.

    Attributes:
        trees: Keys of the trees of code that are needed there, in the order of the path.
        packages: Names of the packages that are needed there.
        silence_s: Seconds after which it takes a launcher that says nothing for gone.
        requirements: Text for `pip install --requirement`; None: its Python has what is needed.
        cache: Folder there for code; None: the user's.
        in_pod: Whether it is the pod of one node.
    """

    trees: tuple[str, ...]
    packages: tuple[str, ...]
    silence_s: float
    requirements: str | None = None
    cache: str | None = None
    in_pod: bool = False

    def encode(self) -> bytes:
        """Returns the program and what it reads first."""
        source = Path(boot.__file__).read_text()
        program = f"{source}\nSOURCE = {source!r}\nmain()\n".encode()
        fields: dict[str, Any] = {
            "trees": self.trees,
            "packages": self.packages,
            "silence_s": self.silence_s,
            "requirements": self.requirements,
            "cache": self.cache,
            "in_pod": self.in_pod,
            "folder": str(Path.cwd()),
            "mark_variable": MARK,
            "mark": uuid.uuid4().hex,
        }
        return b"%d\n" % len(program) + program + Frame("hello", fields).encode()


class HostError(LaunchError):
    """A host cannot be reached, or cannot run nodes."""


def pythons(python: str | None) -> list[str]:
    """Returns interpreters to try on hosts.

    Args:
        python: The one that the user wants.
    """
    return [python] if python else [sys.executable, f"python3.{sys.version_info.minor}", "python3"]


def host_command(pythons: Sequence[str]) -> list[str]:
    """Returns what a host is to run: the first of these interpreters that is there.

    Args:
        pythons: Paths, or names on the path of that host.
    """
    return ["sh", "-c", _SCRIPT, LOADER, *pythons]


def shell_command(pythons: Sequence[str]) -> str:
    """Returns the same for a shell there, whichever the user has.

    Args:
        pythons: Paths, or names on the path of that host.
    """
    return f"exec {shlex.join(host_command(pythons))}"


def _start(name: str, command: Sequence[str]) -> "subprocess.Popen[bytes]":
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C in the terminal is for the launcher, which stops the program in order.
            start_new_session=True,
            bufsize=0,
        )
    except OSError as error:
        raise HostError(f"{name}: {command[0]!r} cannot be started: {error}") from error


class Arrival:
    """A host on which the agent is coming up."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        hello: Hello,
        process: Reach | None = None,
        *,
        timing: Timing = DEFAULT,
    ) -> None:
        """Starts the command; it comes up while the caller continues.

        Args:
            name: The host.
            command: Starts an interpreter there and passes bytes on.
            hello: What to tell it.
            process: What does so already, in place of the command.
            timing: How long it waits for complaints.

        Raises:
            HostError: There is no such command.
        """
        self.name = name
        self.command = tuple(command)
        self._hello = hello
        self._timing = timing
        self._ping_s = hello.silence_s / SIGNS_PER_SILENCE
        self._taken_over = threading.Event()
        self._sending = threading.Lock()
        self._pinger = threading.Thread(
            target=self._keep_awake, name=f"launchpad-ping-{name}", daemon=True
        )
        self.process = _start(name, command) if process is None else process
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.messages: collections.deque[str] = collections.deque(maxlen=_MESSAGES)
        self._complaints = threading.Thread(
            target=self._listen, name=f"launchpad-messages-{name}", daemon=True
        )
        self._complaints.start()
        self._reading = threading.Lock()
        self.frames = FrameReader(self.process.stdout.fileno(), boot.MARKER)
        write_all(self.process.stdin.fileno(), hello.encode())

    def _listen(self) -> None:
        assert self.process.stderr is not None
        with contextlib.suppress(OSError, ValueError), self.process.stderr:
            for line in self.process.stderr:
                self.messages.append(line.decode(errors="replace").rstrip())

    def facts(self, give_up_at: float) -> Facts:
        """Waits for what the host tells of itself.

        Args:
            give_up_at: Monotonic time. What has to be installed may take longer.

        Raises:
            HostError: It cannot be reached, or has no Python.
        """
        with self._failures():
            self.frames.begin(give_up_at)
        # An installation takes as long as it takes. A link that breaks meanwhile ends the command.
        installs = self._hello.requirements is not None
        fields = self._read("facts", math.inf if installs else give_up_at).fields
        self._pinger.start()
        lists = {name: tuple(fields[name]) for name in ("python", "platform", "missing")}
        return Facts(**{**fields, **lists})

    def ship(self, archives: Mapping[str, bytes]) -> None:
        """Sends code.

        Args:
            archives: What is missing there, by key.
        """
        assert self.process.stdin is not None
        sizes = {key: len(archive) for key, archive in archives.items()}
        data = Frame("ship", {"sizes": sizes}).encode() + b"".join(archives.values())
        with self._sending:
            write_all(self.process.stdin.fileno(), data)

    def await_agent(self, give_up_at: float) -> None:
        """Waits until the agent is there.

        Raises:
            HostError: It cannot come up.
        """
        self._read("ready", give_up_at)

    def _keep_awake(self) -> None:
        """Speaks with a host that waits until others are as far: silence would be our end to it."""
        assert self.process.stdin is not None
        while not self._taken_over.wait(self._ping_s):
            with self._sending:
                write_all(self.process.stdin.fileno(), Frame("ping").encode())

    def _stop_pinging(self) -> None:
        self._taken_over.set()
        if self._pinger.ident is not None:
            self._pinger.join()

    def _read(self, op: str, give_up_at: float) -> Frame:
        with self._failures():
            while (frame := self.frames.read(give_up_at)) is not None:
                if frame.op == op:
                    return frame
                if frame.op == "failed":
                    raise HostError(f"{self.name}: {frame['text']}")
                self.messages.append(str(frame["text"]))
            raise EOFError

    @contextlib.contextmanager
    def _failures(self) -> Any:
        try:
            with self._reading:
                yield
        except TimeoutError:
            raise HostError(f"{self.name}: it did not answer in time{self.explanation()}") from None
        except EOFError:
            raise HostError(f"{self.name}: {self._end()}") from None

    def _end(self) -> str:
        code = self.process.wait()
        self._complaints.join(self._timing.last_words_s)
        said = self.explanation()
        if self._hello.in_pod:
            return f"its pod ended{said}"
        if code == _NO_PYTHON:
            return f"no Python was found{said}. Say which one to use: python="
        return f"{self.command[0]} ended with exit code {code}{said}"

    def explanation(self) -> str:
        """Returns what programs complained of, to end a message with."""
        # Who refuses may say so where the host's Python would speak: a forced command, for one.
        said = self.frames.decoder.prologue.decode(errors="replace").splitlines()[-_MESSAGES:]
        told = [*self.messages, *filter(None, map(str.strip, said))]
        return f": {'; '.join(told)}" if told else ""

    def link(self, silence_s: float) -> AgentLink:
        """Returns how the agent is reached that is there now.

        Args:
            silence_s: Seconds after which it is taken for lost.
        """
        self._stop_pinging()
        return AgentLink(
            self.process,
            self.frames,
            silence_s,
            self.command[0],
            keeps_logs=False,
            explain=self.explanation,
            release=self.close,
            failure_code=1 if self._hello.in_pod else 0,
        )

    def close(self) -> None:
        """Ends it. May be repeated."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._taken_over.set()
        # At the host, the end of its input ends all. First of all, because a thread that writes there may be
        # held up by a link that is slow, or stuck.
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._stop_pinging()
        with self._sending, contextlib.suppress(OSError):
            self.process.stdin.close()
        # A thread that still reads there sees the end now; closed before, it would wait without end.
        with self._reading, contextlib.suppress(OSError):
            self.process.stdout.close()
        self._complaints.join(self._timing.close_s)
