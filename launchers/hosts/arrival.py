"""Installs an agent on a host that has only Python: the launcher's side of `boot`.

A command (ssh, srun) starts an interpreter on the host and carries bytes both ways. The launcher sends
everything else through these pipes, because other users could read arguments.
"""

import collections
import contextlib
import dataclasses
import json
import math
import subprocess
import sys
import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from launchers.host import boot
from launchers.host.link import LinkFrame, LinkReader, Reach, write_all
from launchers.supervision.agent_link import AgentLink
from launchpad_lite.errors import LaunchError
from launchpad_lite.parts.as_json import from_json
from launchpad_lite.parts.marks import MARK

#: Reads a line with a length, then a program of that length. It buffers nothing, because that program reads
#: on from the same input. It is one line without single quotes, so that shells pass it unchanged and people
#: can read it.
LOADER = (
    "import sys;sys.version_info>(3,8) or "
    'sys.exit("Python %d.%d is too old. Say which one to use: python="%sys.version_info[:2]);'
    'i=open(0,"rb",0,closefd=False);n=int(i.readline());s=b"";'
    'exec("while len(s)<n:s+=i.read(n-len(s)) or sys.exit(1)");'
    "sys.path[:]=[p for p in sys.path if p];exec(s.decode())"
)
#: Starts the first of the interpreters in its arguments that exists, with argument 0 as the program.
_SCRIPT = (
    'for p; do case $p in "~/"*) p=$HOME/${p#"~/"};; esac; '
    'command -v "$p" >/dev/null 2>&1 && exec "$p" -c "$0"; done; '
    'echo "there is no $*" >&2; exit 127'
)
#: How many lines of error output of a host's programs a message quotes.
_MESSAGES = 20
#: Seconds that the command has to end after SIGTERM.
_END_S = 5.0
#: Seconds to wait for the error output of a host's programs, for a message. The pipe may stay open: ssh
#: leaves a process in the background for other sessions (ControlPersist).
_LAST_WORDS_S = 3.0
#: The same when no message needs the output.
_CLOSE_S = 0.5
#: Exit code of a shell that does not find the program.
_NO_PYTHON = 127


@dataclass(frozen=True)
class Facts:
    """What a bare interpreter reports about its host and itself."""

    python: tuple[int, ...]
    implementation: str
    executable: str
    platform: tuple[str, ...]
    packages: Mapping[str, str | None] = field(default_factory=dict)
    missing: tuple[str, ...] = ()

    @classmethod
    def here(cls) -> "Facts":
        """Returns the facts of this process that must agree with those of a host."""
        facts: Facts = from_json(cls, {**boot.facts(()), "missing": ()})
        return facts


@dataclass(frozen=True)
class Hello:
    """What the launcher tells a host first."""

    trees: tuple[str, ...]  # keys, in the order of `sys.path`
    packages: tuple[str, ...]  # whose versions the host is to report
    silence_s: float  # after which each side counts the other as gone
    requirements: str | None = None  # text for `pip install --requirement`
    cache: str | None = None
    in_pod: bool = False

    def encode(self) -> bytes:
        """Returns the bytes to send: the program, and before it its length."""
        fields = {
            **dataclasses.asdict(self),
            "folder": str(Path.cwd()),
            "mark_variable": MARK,
            "mark": uuid.uuid4().hex,
        }
        source = Path(boot.__file__).read_text()
        start = f"\nSOURCE = {source!r}\nmain(json.loads({json.dumps(fields)!r}))\n"
        program = f"{source}{start}".encode()
        return b"%d\n" % len(program) + program


def pythons(python: str | None) -> list[str]:
    """Returns interpreters to try on hosts: the one that the user wants, or those like this one."""
    return [python] if python else [sys.executable, f"python3.{sys.version_info.minor}", "python3"]


def host_command(pythons: Sequence[str]) -> list[str]:
    """Returns the command for a host: it runs the first of these interpreters that exists there."""
    return ["sh", "-c", _SCRIPT, LOADER, *pythons]


def _start(name: str, command: Sequence[str]) -> Reach:
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C in the terminal must reach only the launcher, which stops the program in order.
            start_new_session=True,
            bufsize=0,
        )
    except OSError as error:
        raise LaunchError(f"{name}: {command[0]!r} cannot be started: {error}") from error
    return cast("Reach", process)


class Arrival:
    """A host whose agent is starting."""

    def __init__(
        self, name: str, command: Sequence[str], hello: Hello, process: Reach | None = None
    ) -> None:
        """Starts the command, unless a `process` already carries bytes to the host and back."""
        self.name = name
        self.command = tuple(command)
        self._hello = hello
        self._sending = threading.Lock()
        self.process = _start(name, command) if process is None else process
        self.messages: collections.deque[str] = collections.deque(maxlen=_MESSAGES)
        self._complaints = threading.Thread(
            target=self._listen, name=f"launchpad-messages-{name}", daemon=True
        )
        self._complaints.start()
        self._reading = threading.Lock()
        self.frames = LinkReader(self.process.stdout.fileno(), boot.MARKER)
        write_all(self.process.stdin.fileno(), hello.encode())

    def _listen(self) -> None:
        with contextlib.suppress(OSError, ValueError), self.process.stderr:
            for line in self.process.stderr:
                self.messages.append(line.decode(errors="replace").rstrip())

    def facts(self, give_up_at: float) -> Facts:
        """Waits until a monotonic time for the facts; requirements may take longer to install."""
        with self._failures():
            self.frames.begin(give_up_at)
        # An installation has no time limit. If the link breaks meanwhile, the command ends.
        installs = self._hello.requirements is not None
        told = self._read("facts", math.inf if installs else give_up_at)
        facts: Facts = from_json(Facts, told.fields)
        return facts

    def ship(self, archives: Mapping[str, bytes]) -> None:
        """Sends the trees that the host lacks, by key."""
        sizes = {key: len(archive) for key, archive in archives.items()}
        data = LinkFrame("ship", {"sizes": sizes}).encode() + b"".join(archives.values())
        with self._sending:
            write_all(self.process.stdin.fileno(), data)

    def await_agent(self, give_up_at: float) -> None:
        """Waits until the agent runs. Raises LaunchError if it cannot start."""
        self._read("ready", give_up_at)

    def _read(self, op: str, give_up_at: float) -> LinkFrame:
        with self._failures():
            while (frame := self.frames.read(give_up_at)) is not None:
                if frame.op == op:
                    return frame
                if frame.op == "failed":
                    raise LaunchError(f"{self.name}: {frame['text']}")
                self.messages.append(str(frame["text"]))
            raise EOFError

    @contextlib.contextmanager
    def _failures(self) -> Any:
        try:
            with self._reading:
                yield
        except TimeoutError:
            raise LaunchError(
                f"{self.name}: it did not answer in time{self.explanation()}"
            ) from None
        except EOFError:
            raise LaunchError(f"{self.name}: {self._end()}") from None

    def _end(self) -> str:
        code = self.process.wait()
        said = self.last_words()
        if self._hello.in_pod:
            return f"its pod ended{said}"
        if code == _NO_PYTHON:
            return f"no Python was found{said}. Say which one to use: python="
        return f"{self.command[0]} ended with exit code {code}{said}"

    def explanation(self) -> str:
        """Returns the error output of the host's programs, as the end of a message."""
        # A program that refuses, such as a forced command of sshd, may print this to standard output.
        said = self.frames.decoder.prologue.decode(errors="replace").splitlines()[-_MESSAGES:]
        told = [*self.messages, *filter(None, map(str.strip, said))]
        return f": {'; '.join(told)}" if told else ""

    def last_words(self) -> str:
        """Waits for the last error output of the host's programs, then returns `explanation()`."""
        self._complaints.join(_LAST_WORDS_S)
        return self.explanation()

    def link(self) -> AgentLink:
        """Returns the link to the agent, which runs by now."""
        return AgentLink(
            self.process,
            self.frames,
            self._hello.silence_s,
            self.command[0],
            keeps_logs=False,
            explain=self.last_words,
            release=self.close,
            failure_code=1 if self._hello.in_pod else 0,
        )

    def close(self) -> None:
        """Ends the command, and so all that it started on the host. May be repeated."""
        # On the host, the end of the input ends everything. This comes first, because a slow or stuck link
        # may block a thread that writes to it.
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        with self._sending, contextlib.suppress(OSError):
            self.process.stdin.close()
        # A thread that still reads there has seen the end by now. Closed earlier, it would wait forever.
        with self._reading, contextlib.suppress(OSError):
            self.process.stdout.close()
        self._complaints.join(_CLOSE_S)
