"""Nodes that are programs of any language, and services that run already."""

import codecs
import collections
import concurrent.futures
import contextlib
import copy
import ctypes
import dataclasses
import functools
import math
import os
import re
import selectors
import signal
import socket
import string
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import courier
from courier.lowlevel import split_address, surviving
from launchpad_lite.errors import CommandError
from launchpad_lite.graph.python_process import PythonProcess, check_text
from launchpad_lite.nodes.base import DeclaredHandle, Handle, Node, PlanContext, Task
from launchpad_lite.nodes.external import ExternalHandle
from launchpad_lite.parts.marks import marked
from launchpad_lite.process.forcing import ForcedExit
from launchpad_lite.worker.address import Address
from launchpad_lite.worker.runtime import NodeRuntime, keep_client

T = TypeVar("T")

_POLL_S = 0.02
#: Seconds after SIGTERM that a command has to end, where a program has no notice.
_TERMINATE_S = 2.0
_LAST_LINES = 20
_READ_BYTES = 1 << 16
#: Longer lines are searched in pieces.
_LONGEST_LINE_BYTES = 1 << 16
_LONGEST_SHOWN = 1000
#: Marks the environment of a command, and so of all its child processes.
_MARK = "LAUNCHPAD_LITE_COMMAND"
_PR_SET_PDEATHSIG = 1
#: Made here, because code between fork and exec must do little.
_die_with_parent = (
    functools.partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if sys.platform == "linux"
    else None
)


class Endpoint(str):
    """`host:port` of a service, as text; its parts are `host` and `port`.

    Example:
        def connect(endpoint):
            return redis.Redis(host=endpoint.host, port=endpoint.port)
    """

    __slots__ = ()

    @property
    def host(self) -> str:
        """The name or number, which of IPv6 is without the brackets here."""
        return split_address(self)[0]

    @property
    def port(self) -> int:
        """The port."""
        return split_address(self)[1]


class EndpointHandle(Handle[Endpoint]):
    """A handle to a CommandNode; dereferences to the `Endpoint` where the command listens."""

    def __init__(self, node: "CommandNode") -> None:
        super().__init__(node)
        self.address = next(iter(node._work.addresses.values()), None)
        self._control = node._work.control
        self._description = node.description
        self._waits = True

    def dereference(self) -> Endpoint:
        """Waits until the command is ready; returns where it listens.

        Raises:
            CourierError: The command failed, or the program stops, before it was ready.
        """
        if self.address is None:
            raise TypeError(
                f"{self._description} listens nowhere; say CommandNode(..., listens=['http']) and "
                "use {http} in its arguments"
            )
        if self._waits:
            table = self._control.table()
            client: Any = courier.Client(
                self._control.resolve(), secret=table.secret, tls=table.tls
            )
            keep_client(client, table)
            try:
                while True:
                    # It may restart; if not, its calls fail.
                    with contextlib.suppress(courier.ServerLostError):
                        client.wait_until_ready()
                        break
            finally:
                courier.close(client)
        return Endpoint(self.address.resolve())


def _without_waiting(handle: Handle[Any]) -> Handle[Any]:
    """Returns a handle that gives an endpoint at once, and not a client, if it can."""
    if isinstance(handle, DeclaredHandle) and handle.target is not None:
        handle = handle.target
    # Two commands may use each other.
    if isinstance(handle, EndpointHandle):
        twin = copy.copy(handle)
        twin._waits = False
        return twin
    if isinstance(handle, ExternalHandle):
        return handle.with_client(Endpoint)
    return handle


class CommandNode(Node[Endpoint]):
    """Runs a program of any language as a node.

    In its arguments and environment `{name}` stands for `host:port`, and `{name.host}` and
    `{name.port}` for the parts, of an address of its own (`listens`) or of another node (`uses`).
    Braces are doubled, as for `str.format`.

    Its output is that of the node, its input is empty. When the node is to end, the command and its
    child processes get SIGTERM, and after the notice SIGKILL; children that it leaves behind when
    it ends by itself get 2 s. A command that ends with another code than 0, or before it was ready,
    fails the node with a `CommandError`. One that listens only serves: the program does not wait
    for its end.

    Example:
        store = program.add_node(
            lp.CommandNode(["redis-server", "--port", "{redis.port}"], listens=["redis"]),
            label="store",
        )
        program.add_node(lp.CourierNode(Worker, store), label="worker")  # gets "127.0.0.1:4711"
    """

    def __init__(
        self,
        command: Sequence[str | os.PathLike[str]] | str,
        *,
        listens: Sequence[str] = (),
        uses: Mapping[str, Handle[Any]] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        ready: str | None = None,
        ready_timeout_s: float = 60.0,
    ) -> None:
        """Describes the node.

        Args:
            command: The program and its arguments; one string is given to the shell.
            listens: Names of addresses of its own, lower-case letters and digits. The handle gives
                the first. The node is ready when a process listens at all of them, by IPv4.
            uses: Handles of other nodes by the names they have in the arguments.
            env: Added to the environment.
            cwd: Its folder.
            ready: A regular expression: the node is ready when it is found in a line of output,
                once that is complete, and a process listens. Many programs buffer their lines when
                they print to no terminal.
            ready_timeout_s: Seconds after which a command that is not ready fails the node.

        Raises:
            TypeError: The command is no text, or something in `uses` is no handle.
            ValueError: The command is empty, an address has no proper name, or a name in braces is
                unknown, or `ready` no regular expression.
        """
        super().__init__()
        argv = _argv_of(command)
        self._named_after = Path(command.split()[0] if isinstance(command, str) else argv[0]).name
        if isinstance(listens, str):
            raise TypeError(f"listens is a list of names, as in listens=[{listens!r}]")
        if len(set(listens)) < len(listens):
            raise ValueError(f"the names in listens are not all different: {list(listens)}")
        addresses = {name: Address(name, is_foreign=True) for name in listens}
        used = dict(uses or {})
        for name, handle in used.items():
            if not isinstance(handle, Handle):
                raise TypeError(
                    f"uses[{name!r}] is a handle, as add_node() returns it, not {handle!r}"
                )
            if name in addresses:
                raise ValueError(f"{name!r} is both an address of the command and one it uses")
        env = {str(name): str(value) for name, value in (env or {}).items()}
        folder = None if cwd is None else os.fspath(cwd)
        if ready is not None:
            try:
                re.compile(ready)
            except re.error as error:
                raise ValueError(f"ready={ready!r} is no regular expression: {error}") from None
        if not ready_timeout_s > 0:
            raise ValueError(f"ready_timeout_s={ready_timeout_s} is not above 0")
        for text in (*argv, *env.values()):
            _check_names(text, {*addresses, *used})
        for text in argv:
            check_text(f"the argument {text!r}", text)
        PythonProcess(env=env)  # refuses impossible values
        self._work = CommandWork(
            tuple(argv), addresses, Address("ready"), used, env, folder, ready, ready_timeout_s
        )
        # Its own name, if it has one, is shown in place of ours.
        self._own_addresses = (self._work.control, *addresses.values())

    def create_handle(self) -> EndpointHandle:
        """Returns a new handle; in a running node it becomes the endpoint."""
        return EndpointHandle(self)

    def to_executables(self, context: PlanContext) -> Sequence[Task]:  # noqa: ARG002
        """Returns one task."""
        # By now, all nodes that were declared are known.
        uses = {name: _without_waiting(handle) for name, handle in self._work.uses.items()}
        work = dataclasses.replace(self._work, uses=uses)
        return [Task(work, self.addresses, self.description)]


def _argv_of(command: object) -> list[str]:
    argv: list[Any]
    if isinstance(command, str):
        argv = ["/bin/sh", "-c", command] if command.strip() else []
    elif isinstance(command, Sequence) and not isinstance(command, bytes | bytearray):
        argv = [os.fspath(part) if isinstance(part, os.PathLike) else part for part in command]
    else:
        raise TypeError(
            f"a command is a list of a program and its arguments, or one text, not {command!r}"
        )
    if other := [part for part in argv if not isinstance(part, str)]:
        raise TypeError(f"an argument of a command is text, not {other[0]!r}")
    if not argv or not argv[0]:
        raise ValueError("CommandNode takes a program and its arguments; there is none")
    return argv


def _check_names(text: str, known: set[str]) -> None:
    try:
        parsed = list(string.Formatter().parse(text))
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}; a brace itself is written twice") from None
    for _, name, spec, conversion in parsed:
        if name is None:
            continue
        first, dot, part = name.partition(".")
        is_part = part in ("host", "port") if dot else True
        if first not in known or not is_part or spec or conversion:
            listed = ", ".join(sorted(known)) or "none"
            shown = (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
            raise ValueError(
                f"{text!r}: {{{name}{shown}}} is unknown; names of addresses are: {listed}, each also with "
                ".host and .port. A brace itself is written twice"
            )


@dataclass(frozen=True)
class CommandWork:
    """Runs a command."""

    argv: tuple[str, ...]
    addresses: Mapping[str, Address]
    control: Address
    uses: Mapping[str, Any]
    env: Mapping[str, str]
    cwd: str | None
    ready: str | None
    ready_timeout_s: float

    def __call__(self, runtime: NodeRuntime) -> None:
        """Does it."""
        names = {name: Endpoint(address.resolve()) for name, address in self.addresses.items()}
        names.update({name: _endpoint_of(name, used) for name, used in self.uses.items()})
        argv = [part.format_map(names) for part in self.argv]
        env = {name: value.format_map(names) for name, value in self.env.items()}
        own = [names[name] for name in self.addresses]
        readiness = _Readiness()
        server = runtime.make_server(self.control, readiness)
        server.start()
        try:
            stop = runtime.listen()
            with _Command(argv, env, self.cwd, self.ready, runtime) as command:
                if command.wait_until_ready(own, self.ready_timeout_s, stop):
                    readiness._ready.set_result(None)
                    with runtime.at_work(runs=not self.addresses, serves=self.control):
                        command.wait(stop)
                else:
                    command.wait(stop)
                    return  # its progress does not matter any more
            command.check()
        finally:
            # Callers that wait for a failed command must get the error at once.
            server.stop(0.0)

    def parts(self) -> Mapping[str, object]:
        """Returns the nodes that it uses, by name."""
        return {f"uses[{name!r}]": handle for name, handle in self.uses.items()}


class _Readiness:
    """Informs other nodes when the command is ready."""

    def __init__(self) -> None:
        self._ready: concurrent.futures.Future[None] = concurrent.futures.Future()

    def wait_until_ready(self) -> "concurrent.futures.Future[None]":
        return self._ready


def _endpoint_of(name: str, used: object) -> Endpoint:
    if isinstance(used, courier.Client):
        return Endpoint(used.address)
    if isinstance(used, Endpoint):
        return used
    raise TypeError(f"uses[{name!r}] is a {type(used).__qualname__}, which is at no single address")


class _Command:
    """A command that runs; nothing is left of it at the end of the block."""

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str | None,
        pattern: str | None,
        runtime: NodeRuntime,
    ) -> None:
        if cwd is not None and not Path(cwd).is_dir():
            raise CommandError(
                f"the command {argv[0]!r} cannot be started: its folder {cwd!r} is none on this host"
            )
        self._argv = argv
        # A worker process is killed with its group, so the command stays in that group. Other
        # processes, which may lead a group in a shell, run nodes in threads: there the command gets
        # a group of its own, which can be ended alone.
        in_worker = (
            threading.current_thread() is threading.main_thread() and os.getpgid(0) == os.getpid()
        )
        self._has_group = not in_worker
        self._mark = uuid.uuid4().hex
        self._was_asked = self._has_ended = False
        self._forcing = runtime.forcing
        with self._forcing.held_back():
            self._process = self._start(env, cwd, has_output=pattern is not None)
            self._output: _CommandOutput | None = None
            if pattern is not None:
                assert self._process.stdout is not None
                self._output = _CommandOutput(self._process.stdout, re.compile(pattern))
            # For a thread that was forced out of ending it.
            runtime.end_with_node(functools.partial(self._end, 0.0))

    def _start(
        self, env: Mapping[str, str], cwd: str | None, *, has_output: bool
    ) -> "subprocess.Popen[bytes]":
        try:
            return subprocess.Popen(
                self._argv,
                env={**os.environ, **env, _MARK: self._mark},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if has_output else None,
                stderr=subprocess.STDOUT if has_output else None,
                bufsize=0,
                start_new_session=self._has_group,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - one system call, found beforehand
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            raise CommandError(
                f"the command {self._argv[0]!r} cannot be started: {error}. Is it installed on this "
                "host, and on the PATH of the node?"
            ) from None

    def __enter__(self) -> "_Command":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        # By then it has had its notice.
        self._end(0.0 if kind is not None and issubclass(kind, ForcedExit) else _TERMINATE_S)

    def wait_until_ready(
        self, endpoints: Sequence[Endpoint], timeout_s: float, stop: threading.Event
    ) -> bool:
        """Waits until it listens, and has printed `ready`; returns False if it is to end before."""
        give_up_at = time.monotonic() + timeout_s
        silent = list(endpoints)
        while not stop.is_set():
            has_ended = self._poll() is not None
            if has_ended and self._output is not None:
                self._signal(signal.SIGKILL)  # its children may hold its output open
                self._output.finish()
            silent = [endpoint for endpoint in silent if not _listens(endpoint)]
            if silent:
                missing = f"listened at {silent[0]}"
            elif self._output is not None and not self._output.has_matched:
                missing = f"printed a line that matches {self._output.pattern.pattern!r}"
            else:
                return True
            if has_ended:
                raise self._error(f"{self._how_it_ended()} before it was ready: it never {missing}")
            if time.monotonic() > give_up_at:
                raise self._error(
                    f"was not ready within ready_timeout_s={timeout_s:g}: it runs, but never {missing}"
                )
            stop.wait(_POLL_S)
        return False

    def wait(self, stop: threading.Event) -> None:
        """Waits for its end; asks for it when the node is to end."""
        # In small steps: a thread that is ended by force notices it only between two of them.
        while self._poll() is None and not stop.wait(_POLL_S):
            pass
        if stop.is_set() and self._is_alive():
            self._ask()
            # Its children may have work to finish, too.
            while self._is_alive():
                time.sleep(_POLL_S)

    def check(self) -> None:
        """Raises if it ended with another code than 0, or by a signal, and was not asked to."""
        if self._process.returncode and not self._was_asked:
            raise self._error(self._how_it_ended())

    def _poll(self) -> int | None:
        # Forced out of it, a thread would leave a lock of the process closed.
        with self._forcing.held_back():
            return self._process.poll()

    def _marked(self) -> list[int]:
        # Forced out of it, a thread would leave a file open.
        with self._forcing.held_back():
            return [*marked(_MARK, self._mark)]

    def _how_it_ended(self) -> str:
        code = self._process.returncode
        if code >= 0:
            return f"ended with code {code}"
        names = {each.value: each.name for each in signal.Signals}  # real-time signals have none
        return f"was ended by {names.get(-code, f'signal {-code}')}"

    def _error(self, what: str) -> CommandError:
        lines = self._output.last_lines() if self._output is not None else ()
        last = "".join(f"\n  {line}" for line in lines)
        return CommandError(f"the command {self._argv[0]!r} {what}" + (f":{last}" if last else ""))

    def _ask(self) -> None:
        # If it had ended by then, it did so by itself.
        self._was_asked = self._poll() is None
        self._signal(signal.SIGTERM)

    def _is_alive(self) -> bool:
        return self._poll() is None or bool(self._marked())

    def _signal(self, signum: int) -> None:
        found = set(self._marked())
        if self._poll() is None:
            # Between fork and exec it has no mark.
            found.add(self._process.pid)
        if self._has_group and signum == signal.SIGKILL:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signum)
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signum)

    def _end(self, grace_s: float) -> None:
        if self._has_ended:
            return
        if self._is_alive():
            if grace_s and not self._was_asked:
                self._ask()
            give_up_at = time.monotonic() + grace_s
            while self._is_alive() and time.monotonic() < give_up_at:
                time.sleep(_POLL_S)
        # In a loop, because processes that are being ended may start others.
        give_up_at = time.monotonic() + _TERMINATE_S
        self._signal(signal.SIGKILL)
        while self._is_alive() and time.monotonic() < give_up_at:
            time.sleep(_POLL_S)
            self._signal(signal.SIGKILL)
        if self._output is not None:
            self._output.finish()
        self._has_ended = True


class _CommandOutput:
    """Passes output on as that of the node, and searches it for a line."""

    def __init__(self, stream: IO[bytes], pattern: "re.Pattern[str]") -> None:
        self.pattern = pattern
        self.has_matched = False
        self._stream = stream
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._unfinished = bytearray()
        self._lines: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
        self._lock = threading.Lock()
        self._is_finishing = threading.Event()
        self._thread = threading.Thread(target=self._read, name="command-output", daemon=True)
        self._thread.start()

    def last_lines(self) -> Sequence[str]:
        """Returns the last lines of output, each without its end."""
        with self._lock:
            return [*self._lines]

    def finish(self) -> None:
        """Reads the rest. The command has ended, but others may hold its output open."""
        self._is_finishing.set()
        self._thread.join()

    def _read(self) -> None:
        with self._stream, selectors.DefaultSelector() as selector:
            selector.register(self._stream, selectors.EVENT_READ)
            give_up_at = math.inf
            while time.monotonic() < give_up_at:
                is_finishing = self._is_finishing.is_set()
                if is_finishing and give_up_at == math.inf:
                    # A daemon of the command may go on printing for ever.
                    give_up_at = time.monotonic() + _TERMINATE_S
                if selector.select(_POLL_S):
                    data = os.read(self._stream.fileno(), _READ_BYTES)
                    if not data:
                        break
                    # The command must not wait for a reader.
                    with surviving("the thread that passes on what a command prints", 0.0):
                        self._look_at(data)
                        self._pass_on(data)
                elif is_finishing:
                    break
        if self._unfinished:
            self._keep(bytes(self._unfinished))

    def _look_at(self, data: bytes) -> None:
        self._unfinished += data
        *complete, rest = self._unfinished.split(b"\n")
        for line in complete:
            self._keep(bytes(line))
        while len(rest) > _LONGEST_LINE_BYTES:
            self._keep(bytes(rest[:_LONGEST_LINE_BYTES]))
            del rest[:_LONGEST_LINE_BYTES]
        self._unfinished = rest

    def _keep(self, data: bytes) -> None:
        line = data.decode("utf-8", "replace").rstrip("\r")
        if not self.has_matched and self.pattern.search(line):
            self.has_matched = True
        with self._lock:
            self._lines.append(line[:_LONGEST_SHOWN])

    def _pass_on(self, data: bytes) -> None:
        # It may have no reader, but the command must not wait for one.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream = sys.stdout
            if hasattr(stream, "buffer"):
                stream.flush()
                stream.buffer.write(data)
            else:
                stream.write(self._decode(data))
            stream.flush()


def _listens(endpoint: Endpoint) -> bool:
    try:
        with socket.create_connection((endpoint.host, endpoint.port), 1.0) as sock:
            # Where no process listens, TCP may connect a client to itself.
            return bool(sock.getsockname() != sock.getpeername())
    except OSError:
        return False
