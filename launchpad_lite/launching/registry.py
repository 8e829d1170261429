"""The list of running programs of this user, and the requests of other shells to them.

The process that launched a program serves an `Inspector` of it on loopback. An entry, a file that only
this user can read, holds the address and the secret that clients need. The process keeps the entry
locked while the program runs. An unlocked entry was left by a killed process: the next command or
launch removes it. The folder goes with the last entry. Files that are no entries of this version
are passed over.
"""

import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import re
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_type_hints

import courier
from launchpad_lite.launching import NodeStatus, RunningProgram
from launchpad_lite.parts import private_files

_LOGGER = logging.getLogger(__name__)
#: Seconds in which a client must reach the process of a program.
_REACH_S = 5.0
#: Seconds after the end of the program in which calls can still return its result.
_LAST_WORDS_S = 2.0
_NAME = re.compile(r"\d+-[0-9a-f]{8}\.json")


class Inspector:
    """Serves requests of other shells to a running program. Thread-safe."""

    def __init__(
        self, running: RunningProgram, look_s: float = 0.0, unlisted: threading.Event | None = None
    ) -> None:
        self._running = running
        #: Seconds in which it notices that it has ended already.
        self._look_s = look_s
        #: Set once it has ended and is not listed any more; None if it never was.
        self._unlisted = unlisted
        # Answered by the program itself.
        self.output, self.follow, self.join = running.output, running.follow, running.join
        self.ask, self.stacks = running.ask, running.stacks
        self.why, self.wait_graph = running.why, running.wait_graph
        self.plan = running.plan.as_json

    def status(self) -> tuple[str, list[NodeStatus]]:
        """Returns the state of the program, in one line, and of each of its nodes."""
        # First: some programs learn from the states whether they have ended.
        nodes = self._running.status()
        self._running.join(self._look_s)
        if self._running.result is not None:
            return self._ending(), self._running.status()
        # Nodes that are starting may have to wait, as for an image.
        is_up = any(each.state not in ("pending", "starting") for each in nodes)
        how = "running" if is_up else "not all nodes have started"
        return f"{self._running.plan.program}: {how}", nodes

    def stop(self) -> str:
        """Asks all nodes to end, waits until they have, and returns how the program ended."""
        self._running.request_stop("`stop` in another shell")
        self._running.join()
        if self._unlisted is not None:  # the next command must not find it any more
            self._unlisted.wait()
        return self._ending()

    def _ending(self) -> str:
        result = self._running.result
        assert result is not None
        return f"{self._running.plan.program}: {result.summary}"


@dataclass(frozen=True)
class RegistryEntry:
    """A running program, as a file lists it.

    The process `pid` launched it, and serves its `Inspector` at `address`, for clients with the
    `secret`, which is in hexadecimal digits. `started_at` is in seconds since 1970.
    """

    program: str
    launcher: str
    pid: int
    started_at: float
    nodes: int
    log_dir: str | None
    address: str
    secret: str

    @contextlib.contextmanager
    def inspector(self) -> Iterator[Inspector]:
        """Gives a client of its `Inspector`; a CourierError if its process does not answer."""
        secret = courier.Secret(bytes.fromhex(self.secret))
        # It was served before the entry was written: a server that does not answer now never will.
        client = courier.Client(self.address, secret=secret, wait_for_ready=False)
        try:
            courier.list_methods(courier.with_timeout(client, _REACH_S))
            yield cast("Inspector", client)
        finally:
            courier.close(client)


def publish(running: RunningProgram, launcher: str, unlisted: Callable[..., object]) -> None:
    """Lists a program until it ends, so that other shells of this user find it.

    If it cannot be listed, the reason is logged. Calls `unlisted` with it once it is not.
    """
    withdraw = contextlib.ExitStack()
    withdraw.callback(unlisted, running)
    try:
        secret = courier.Secret.generate()
        is_unlisted = threading.Event()
        server = courier.Server(Inspector(running, unlisted=is_unlisted), secret=secret)
        server.start()
        withdraw.callback(server.stop, _LAST_WORDS_S)
        withdraw.callback(is_unlisted.set)
        log_dir = running.log_dir
        entry = RegistryEntry(
            running.plan.program,
            launcher,
            os.getpid(),
            time.time(),
            len(running.plan.executables),
            None if log_dir is None else str(log_dir),
            server.address,
            secret.reveal().hex(),
        )
        withdraw.callback(_write(entry))
        # Not a daemon: the interpreter waits for the program, and then for this.
        threading.Thread(
            target=_close_at_end, args=(running, withdraw), name="launchpad-registry", daemon=False
        ).start()
    except (OSError, RuntimeError, courier.CourierError) as error:
        withdraw.close()
        _LOGGER.warning(
            "%s: `status`, `logs`, `stop` and `stack` in another shell will not find it: %s",
            running.plan.program,
            error,
        )
    except BaseException:  # an interrupt
        withdraw.close()
        raise


def _close_at_end(running: RunningProgram, withdraw: contextlib.ExitStack) -> None:
    with withdraw:
        running.join()


def _write(entry: RegistryEntry) -> Callable[[], None]:
    """Writes and locks an entry; returns a function that removes it."""
    running_programs()  # removes entries of killed processes
    content = json.dumps(dataclasses.asdict(entry)).encode()
    name = f"{entry.pid}-{uuid.uuid4().hex[:8]}.json"
    while True:
        folder = _make_folder()
        # The folder may go with another entry.
        with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as undo:
            at = private_files.open_own_folder(folder)
            undo.callback(os.close, at)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            descriptor = os.open(name, flags, 0o600, dir_fd=at)
            undo.callback(os.close, descriptor)
            undo.callback(_remove, folder, at, name)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            with os.fdopen(descriptor, "wb", closefd=False) as file:
                file.write(content)
            # Another process may have removed it before it was locked.
            if os.fstat(descriptor).st_nlink:
                return undo.pop_all().close


def _remove(folder: Path, at: int, name: str) -> None:
    """Removes an entry, and the folder with the last one."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=at)
    with contextlib.suppress(OSError):  # other entries are in it
        folder.rmdir()


def running_programs() -> tuple[list[RegistryEntry], list[str]]:
    """Returns the running programs of this user, the newest first; and files passed over."""
    passed_over: list[str] = []
    entries = [entry for folder in _folders() for entry in _entries(folder, passed_over)]
    return sorted(entries, key=lambda entry: entry.started_at, reverse=True), passed_over


def _entries(folder: Path, passed_over: list[str]) -> Iterator[RegistryEntry]:
    try:
        at = private_files.open_own_folder(folder)
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            passed_over.append(str(error))
        return
    for name in os.listdir(at):  # noqa: PTH208 - of a descriptor
        try:
            if _NAME.fullmatch(name) and (entry := _read(folder, at, name)):
                yield entry
        except FileNotFoundError:  # it ended meanwhile
            pass
        except (OSError, ValueError, TypeError, RecursionError) as error:
            passed_over.append(f"{folder / name}, no entry of this version ({error})")
    os.close(at)


def _read(folder: Path, at: int, name: str) -> RegistryEntry | None:
    """Returns an entry; None if it was left behind: removes it then. Raises if it is no entry."""
    with os.fdopen(private_files.open_to_read(folder / name, dir_fd=at), "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            entry = RegistryEntry(**json.load(file))
            kinds = get_type_hints(RegistryEntry)
            if all(isinstance(getattr(entry, name), kind) for name, kind in kinds.items()):
                return entry
            raise TypeError("values of other kinds") from None
        _remove(folder, at, name)  # under the lock, for which its process would wait
    return None


def _folders() -> list[Path]:
    """Returns the folders for entries: first the user's runtime folder, which some systems lack."""
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}"
    fallback = f"launchpad_lite-{private_files.user_name()}-running"
    return [Path(runtime, "launchpad_lite"), Path(tempfile.gettempdir(), fallback)]


def _make_folder() -> Path:
    runtime, fallback = _folders()
    with contextlib.suppress(OSError):
        if runtime.parent.is_dir():  # else we must not make it
            return private_files.make_own_folder(runtime)
    return private_files.make_own_folder(fallback)
