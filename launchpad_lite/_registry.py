"""Running programs of this user: where they are listed, and what another shell may ask of them.

The process that launched a program serves an `Inspector` of it on loopback. An entry, a file that only
this user can read, holds the address and the secret that clients need. The process keeps the entry
locked while the program runs. An entry that is not locked was left by a process that was killed; who
looks next, or lists a program, removes it. Their folder goes with the last entry.
"""

import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import courier
from launchpad_lite._private_files import make_own_folder, open_private, user_name
from launchpad_lite.launching import NodeStatus, RunningProgram

_LOGGER = logging.getLogger(__name__)
#: Seconds in which a client must reach the process of a program.
_REACH_S = 5.0
#: Seconds that calls still have once the program has ended, to tell how.
_LAST_WORDS_S = 2.0
_SUFFIX = ".json"


class Inspector:
    """What another shell may ask of a running program. Thread-safe."""

    def __init__(
        self,
        running: RunningProgram,
        look_s: float = 0.0,
        unlisted: threading.Event | None = None,
    ) -> None:
        """Wraps a program.

        Args:
            running: The program.
            look_s: Seconds that it takes `running` to find out that it has ended already.
            unlisted: Set once the program has ended and is listed no more; None if it never was.
        """
        self._running = running
        self._look_s = look_s
        self._unlisted = unlisted

    def status(self) -> tuple[str, list[NodeStatus]]:
        """Returns how the program is, in one line, and each of its nodes."""
        # First: some must read how a run is before they know whether it has ended.
        nodes = self._running.status()
        self._running.join(self._look_s)
        if self._running.result is not None:
            return self._ending(), self._running.status()
        # Nodes that are only on their way may have been told to wait, as for an image.
        is_up = any(each.state not in ("pending", "starting") for each in nodes)
        how = "running" if is_up else "not all nodes have started"
        return f"{self._running.plan.program}: {how}", nodes

    def output(self) -> Iterator[tuple[str, bytes]]:
        """Yields what nodes printed so far: `label[replica]` and lines of it."""
        return self._running.output()

    def join(self, timeout_s: float) -> bool:
        """Waits until all is over; returns whether it is."""
        return self._running.join(timeout_s)

    def stacks(self) -> Mapping[str, str]:
        """Returns where the threads of each node are now."""
        return self._running.stacks()

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
class Entry:
    """A running program.

    Attributes:
        program: Its name.
        launcher: Name of its launcher.
        pid: The process that launched it.
        started_at: When, in seconds since 1970.
        nodes: How many it has.
        log_dir: Folder with the output of its nodes; None if none is kept.
        address: Where its `Inspector` is served.
        secret: What clients of that must hold, in hexadecimal digits.
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
        """Gives a client of its `Inspector`.

        Raises:
            courier.ServerUnreachableError: It has ended; calls raise this, too.
            courier.CourierError: Its process does not answer.
        """
        secret = courier.Secret(bytes.fromhex(self.secret))
        # It was served before the entry was written: who is not there now will not come.
        client = courier.Client(self.address, secret=secret, wait_for_ready=False)
        try:
            courier.list_methods(courier.with_timeout(client, _REACH_S))
            yield cast("Inspector", client)
        finally:
            courier.close(client)


def publish(running: RunningProgram, launcher: str) -> None:
    """Lists a program until it ends, so that other shells of this user find it.

    Without an entry the program runs all the same; the reason is logged.

    Args:
        running: The program.
        launcher: Name of its launcher.
    """
    withdraw = contextlib.ExitStack()
    try:
        secret = courier.Secret.generate()
        unlisted = threading.Event()
        server = courier.Server(Inspector(running, unlisted=unlisted), secret=secret)
        server.start()
        withdraw.callback(server.stop, _LAST_WORDS_S)
        withdraw.callback(unlisted.set)
        log_dir = running.log_dir
        entry = Entry(
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


def _write(entry: Entry) -> Callable[[], None]:
    """Writes and locks an entry; returns what removes it."""
    running_programs()  # removes what was left behind
    while True:
        path = _make_folder() / f"{entry.pid}-{uuid.uuid4().hex[:8]}{_SUFFIX}"
        new = path.with_suffix(".new")
        with contextlib.suppress(FileNotFoundError):  # the folder went with another entry
            descriptor = open_private(new, is_new=True)
            break
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, json.dumps(dataclasses.asdict(entry)).encode())
        new.rename(path)  # complete and locked
    except BaseException:
        new.unlink(missing_ok=True)
        os.close(descriptor)
        raise

    def remove() -> None:
        _remove(path)
        os.close(descriptor)

    return remove


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # others are in it
        path.parent.rmdir()


def running_programs() -> list[Entry]:
    """Returns the running programs of this user, the newest first."""
    paths = [path for folder in _folders() for path in folder.glob(f"*{_SUFFIX}")]
    entries = [entry for path in paths if (entry := _read(path)) is not None]
    return sorted(entries, key=lambda entry: entry.started_at, reverse=True)


def _read(path: Path) -> Entry | None:
    """Returns an entry; None if it was left behind, and removes it then."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                return None
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return Entry(**json.load(file))
        _remove(path)
    except FileNotFoundError:  # it ended meanwhile
        pass
    return None


def _folders() -> list[Path]:
    """Returns where entries may be: the runtime folder of the user first, which some systems lack."""
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}"
    fallback = f"launchpad_lite-{user_name()}-running"
    return [Path(runtime, "launchpad_lite"), Path(tempfile.gettempdir(), fallback)]


def _make_folder() -> Path:
    runtime, fallback = _folders()
    with contextlib.suppress(OSError):
        if runtime.parent.is_dir():  # else it is not for us to make
            return make_own_folder(runtime)
    return make_own_folder(fallback)
