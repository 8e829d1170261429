"""Inside a worker process: from its payload to its exit code."""

import atexit
import contextlib
import os
import pickle
import signal
import sys
import threading
from dataclasses import dataclass, field

import cloudpickle

from courier import ExceptionReport, Secret
from launchers.host.link import Frame, read_frames, write_all
from launchpad_lite._flag_values import FlagSnapshot
from launchpad_lite._freeze import FrozenWork
from launchpad_lite._runtime import NodeRuntime
from launchpad_lite._stop_handlers import STOP_HANDLERS
from launchpad_lite._worker import run_node
from launchpad_lite.launching import AddressTable
from launchpad_lite.nodes.base import Work


@dataclass(frozen=True)
class Payload:
    """All that a worker must know. Travels through pipes only: it holds the secret."""

    program: str
    label: str
    replica: int
    work: FrozenWork = field(repr=False)
    endpoints: dict[str, str]
    secret: bytes = field(repr=False)
    notice_s: float
    argv: list[str]
    flags: FlagSnapshot | None

    def encode(self) -> bytes:
        """Pickles it; classes of the user's script travel by value."""
        return bytes(cloudpickle.dumps(self, protocol=5))


class _Link:
    """How a worker speaks to its agent. Thread-safe."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._lock = threading.Lock()

    def constructed(self, runs: bool) -> None:
        self.send(Frame("constructed", {"runs": runs}))

    def ask_stop(self) -> None:
        self.send(Frame("stop"))

    def send(self, frame: Frame) -> None:
        with self._lock:
            write_all(self.fd, frame.encode())


def run_worker(data: bytes, control_fd: int) -> int:
    """Runs one node in this process; returns the exit code.

    Args:
        data: An encoded `Payload`.
        control_fd: The socket to the agent, blocking.
    """
    link = _Link(control_fd)
    try:
        runtime, payload = _prepare(data, link)
    except BaseException as error:  # noqa: BLE001 - the launcher reports it
        _send_failure(link, error)
        return 1
    report = run_node(_WithFlags(payload), runtime)
    if report is None:
        return 0
    link.send(Frame("failed", body=pickle.dumps(report)))
    sys.stderr.write(report.traceback)
    return 1


def _prepare(data: bytes, link: _Link) -> tuple[NodeRuntime, Payload]:
    payload: Payload = pickle.loads(data)
    sys.argv[:] = payload.argv
    table = AddressTable(payload.endpoints, Secret(payload.secret))
    runtime = NodeRuntime(
        payload.label, payload.replica, payload.program, table, link, payload.notice_s
    )
    watcher = threading.Thread(
        target=_watch_agent, args=(link.fd, runtime), name="launchpad-control", daemon=True
    )
    watcher.start()
    return runtime, payload


def _send_failure(link: _Link, error: BaseException) -> None:
    report = ExceptionReport.of(error, skip_frames=1)
    link.send(Frame("failed", body=pickle.dumps(report)))
    sys.stderr.write(report.traceback)


class _WithFlags:
    """Loads the work, which imports the user's modules, then gives their flags values."""

    def __init__(self, payload: Payload) -> None:
        self._payload = payload

    def thaw(self) -> Work:
        work = self._payload.work.thaw()
        if self._payload.flags is not None:
            self._payload.flags.apply()
        return work


def _watch_agent(fd: int, runtime: NodeRuntime) -> None:
    for frame in read_frames(fd):
        if frame.op == "stop":
            # They may block; the end of the agent must be noticed all the same. Started before
            # the node can end, and no daemon: the process ends when they have returned.
            with contextlib.suppress(RuntimeError):  # the interpreter ends already
                threading.Thread(
                    target=STOP_HANDLERS.call_all, name="launchpad-stop-handlers", daemon=False
                ).start()
            runtime.request_stop()
    # The agent is gone, and nobody looks after this process and its children any more.
    os.killpg(os.getpgrp(), signal.SIGKILL)


def leave(code: int) -> None:
    """Ends a forked worker as an interpreter ends: threads, exit functions, streams.

    It goes no further: above is the agent's stack.
    """
    with contextlib.suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)
