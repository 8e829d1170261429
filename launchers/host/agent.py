"""The host agent: starts, watches and ends the workers of one program on one host.

A single thread with an event loop. Commands come in as frames on one
descriptor, events go out on another:

    in    reserve, start, stop, signal, quit
    out   reserved or taken, started or refused, output, constructed, failed, stop, exited,
          terminated

It imports what workers share and forks them from itself, so a worker costs
milliseconds. When its input ends (the launcher is gone, however), it ends all
workers and itself. It ends nothing that it did not start.
"""

import atexit
import contextlib
import ctypes
import errno
import faulthandler
import gc
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

# Imported here so that every forked worker has them; importing touches no grpc core, and the
# agent makes no channel and no server: after those a fork would hang.
import courier._grpc.client
import courier._grpc.server  # noqa: F401
from launchers._ports import PortReservations, PortTakenError
from launchers.host.link import Frame, FrameDecoder, Outbox
from launchers.host.sweep import MARK, Warden
from launchers.host.worker import leave, run_worker
from launchpad_lite.launching import Address

#: When the launcher is gone: seconds workers have between the request and the end by force.
_ORPHAN_NOTICE_S = 1.0
#: Output that waits for a slow launcher; beyond it, only the log files get more.
_MAX_WAITING_BYTES = 16 << 20
_READ_BYTES = 1 << 16
#: What may still be on its way from a dead worker: more than any pipe or socket holds.
_MAX_LAST_READS = 64
_PR_SET_PDEATHSIG = 1


@dataclass
class _Worker:
    name: str
    pid: int
    control: socket.socket
    output_fd: int
    log_fd: int
    decoder: FrameDecoder = field(default_factory=FrameDecoder)
    skipped_bytes: int = 0

    def close(self) -> None:
        self.control.close()
        os.close(self.output_fd)
        os.close(self.log_fd)


class Agent:
    """The event loop and its state."""

    def __init__(self, input_fd: int, output_fd: int, launcher: int, warden: Warden) -> None:
        self._pid = os.getpid()
        self._input_fd = input_fd
        self._commands = FrameDecoder()
        self._out = Outbox(output_fd)
        self._selector = selectors.DefaultSelector()
        self._workers: dict[str, _Worker] = {}
        self._ports = PortReservations()
        self._quitting = False
        self._terminated_by = 0
        self._warden = warden
        self._launcher_fd = self._watch_launcher(launcher)
        self._wake_read, self._wake_write = os.pipe()
        for fd in (input_fd, output_fd, self._wake_read, self._wake_write):
            os.set_blocking(fd, False)
        self._selector.register(input_fd, selectors.EVENT_READ, self._on_input)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._on_wake)
        signal.signal(signal.SIGCHLD, _do_nothing)
        # Asked to end from outside (a terminal, a batch system): the launcher decides.
        signal.signal(signal.SIGTERM, self._on_terminate)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)

    def _watch_launcher(self, pid: int) -> int | None:
        """Notices the launcher's end even if a child of its still holds the input open."""
        if not hasattr(os, "pidfd_open"):
            return None
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._quitting = True
            return None
        except OSError:  # an old kernel, or a sandbox
            return None
        self._selector.register(fd, selectors.EVENT_READ, self._on_launcher_end)
        return fd

    def _on_launcher_end(self) -> None:
        self._quitting = True
        assert self._launcher_fd is not None
        self._unwatch(self._launcher_fd)

    def run(self) -> None:
        """Works until told to quit or left alone."""
        try:
            while not self._quitting:
                self._step(None)
        finally:
            self._end_all()
            self._ports.close()
            self._warden.dismiss()
            self._out.flush()

    def _step(self, timeout_s: float | None) -> None:
        self._watch_for_room()
        for key, _ in self._selector.select(timeout_s):
            # What came before it in this round may have closed it.
            if self._selector.get_map().get(key.fd) == key:
                key.data()

    def _watch_for_room(self) -> None:
        """Wakes up when the launcher takes more, if there is more."""
        watched = self._out.fd in self._selector.get_map()
        if len(self._out) and not watched:
            self._selector.register(self._out.fd, selectors.EVENT_WRITE, self._out.flush)
        elif watched and not len(self._out):
            self._selector.unregister(self._out.fd)

    # What comes in

    def _on_input(self) -> None:
        data = _read(self._input_fd)
        if data is None:
            return
        if not data:
            self._quitting = True
            return
        for frame in self._commands.feed(data):
            self._obey(frame)

    def _obey(self, frame: Frame) -> None:
        commands: dict[str, Callable[[Frame], None]] = {
            "reserve": self._reserve,
            "start": self._start,
            "stop": self._stop,
            "signal": self._signal,
            "quit": self._quit,
        }
        commands[frame.op](frame)

    def _reserve(self, frame: Frame) -> None:
        addresses = []
        for key, port in frame["addresses"]:
            address = Address(port=port)
            address.key = key
            addresses.append(address)
        try:
            self._out.put(Frame("reserved", {"ports": self._ports.reserve_all(addresses)}))
        except PortTakenError as error:
            self._out.put(Frame("taken", {"text": str(error)}))

    def _stop(self, frame: Frame) -> None:
        if (worker := self._workers.get(frame["node"])) is not None:
            self._ask_to_end(worker)

    def _ask_to_end(self, worker: _Worker) -> None:
        # A few bytes into an empty socket buffer: they fit, or the worker is gone.
        with contextlib.suppress(OSError):
            worker.control.send(Frame("stop").encode())

    def _signal(self, frame: Frame) -> None:
        if (worker := self._workers.get(frame["node"])) is not None:
            _signal_group(worker.pid, frame["signum"])

    def _quit(self, frame: Frame) -> None:  # noqa: ARG002 - all commands look alike
        self._quitting = True

    def _on_terminate(self, signum: int, stack: object) -> None:  # noqa: ARG002
        # Anything may be under way, a write to the launcher for one: `_on_wake` goes on with it.
        self._terminated_by = signum

    # Workers

    def _start(self, frame: Frame) -> None:
        try:
            self._fork(frame)
        except OSError as error:  # no such folder, too many files, too many processes
            text = f"its process could not be started: {error}"
            self._out.put(Frame("refused", {"node": frame["node"], "text": text}))

    def _fork(self, frame: Frame) -> None:
        log_fd = _open_log(Path(frame["log"]))
        ours, theirs = socket.socketpair()
        output_read, output_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._become_worker(frame, theirs, ours, output_write, log_fd)
        theirs.close()
        os.close(output_write)
        ours.setblocking(False)
        os.set_blocking(output_read, False)
        worker = _Worker(frame["node"], pid, ours, output_read, log_fd)
        self._workers[worker.name] = worker
        self._selector.register(
            ours.fileno(), selectors.EVENT_READ, lambda: self._on_control(worker)
        )
        self._selector.register(output_read, selectors.EVENT_READ, lambda: self._on_output(worker))
        self._out.put(Frame("started", {"node": worker.name, "pid": pid}))

    def _become_worker(
        self, frame: Frame, control: socket.socket, other: socket.socket, out: int, log_fd: int
    ) -> NoReturn:
        code = 1
        try:
            os.setsid()
            _die_with_parent(self._pid)
            self._forget_all()
            other.close()
            os.close(log_fd)
            os.dup2(out, 1)
            os.dup2(out, 2)
            os.close(out)
            _reset_interpreter()
            code = run_worker(frame.body, control.fileno())
        finally:
            leave(code)
            raise AssertionError("leave() does not return")

    def _forget_all(self) -> None:
        """In a forked worker: closes what belongs to the agent and to other workers."""
        signal.set_wakeup_fd(-1)
        self._selector.close()
        self._warden.abandon()
        if self._launcher_fd is not None:
            os.close(self._launcher_fd)
        for fd in (self._input_fd, self._out.fd, self._wake_read, self._wake_write):
            os.close(fd)
        for worker in self._workers.values():
            worker.close()
        self._ports.close()

    def _on_control(self, worker: _Worker) -> bool:
        """Takes in what the worker says; returns whether there may be more."""
        data = self._take(worker.control.fileno())
        for frame in worker.decoder.feed(data):
            self._out.put(Frame(frame.op, {**frame.fields, "node": worker.name}, frame.body))
        return bool(data)

    def _on_output(self, worker: _Worker) -> bool:
        """Takes in what the worker prints; returns whether there may be more."""
        data = self._take(worker.output_fd)
        if data:
            self._keep_output(worker, data)
        return bool(data)

    def _take(self, fd: int) -> bytes:
        """Reads what is there, and watches the descriptor no longer if it is at its end."""
        data = _read(fd)
        if data == b"":
            self._unwatch(fd)
        return data or b""

    def _unwatch(self, fd: int) -> None:
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def _keep_output(self, worker: _Worker, data: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk must not end the program
            os.write(worker.log_fd, data)
        if len(self._out) > _MAX_WAITING_BYTES:
            worker.skipped_bytes += len(data)
            return
        self._tell_skipped(worker)
        self._out.put(Frame("output", {"node": worker.name}, data))

    def _tell_skipped(self, worker: _Worker) -> None:
        if worker.skipped_bytes:
            note = f"\n[{worker.skipped_bytes} bytes are only in the log file]\n"
            worker.skipped_bytes = 0
            self._out.put(Frame("output", {"node": worker.name}, note.encode()))

    def _on_wake(self) -> None:
        _read(self._wake_read)
        if self._terminated_by:
            self._out.put(Frame("terminated", {"signum": self._terminated_by}))
            self._terminated_by = 0
        self._reap()

    def _reap(self) -> None:
        for worker in list(self._workers.values()):
            if _has_ended(worker.pid):
                self._bury(worker)

    def _bury(self, worker: _Worker) -> None:
        # Its children first: until it is reaped, the group's number cannot be anybody else's.
        _signal_group(worker.pid, signal.SIGKILL)
        _, status = os.waitpid(worker.pid, 0)
        self._drain(worker)
        self._tell_skipped(worker)
        del self._workers[worker.name]
        code = os.waitstatus_to_exitcode(status)
        self._out.put(Frame("exited", {"node": worker.name, "status": code}))
        worker.close()

    def _drain(self, worker: _Worker) -> None:
        """Takes in what a dead worker still had to say, and no more than that."""
        # A child that left the group may go on printing for ever.
        for _ in range(_MAX_LAST_READS):
            if not self._on_output(worker):
                break
        while self._on_control(worker):
            pass
        self._unwatch(worker.output_fd)
        self._unwatch(worker.control.fileno())

    def _end_all(self) -> None:
        if not self._workers:
            return
        for worker in self._workers.values():
            self._ask_to_end(worker)
        give_up_at = time.monotonic() + _ORPHAN_NOTICE_S
        while self._workers and (left := give_up_at - time.monotonic()) > 0:
            self._step(left)
        for worker in list(self._workers.values()):
            _signal_group(worker.pid, signal.SIGKILL)
            self._bury(worker)


def _do_nothing(signum: int, stack: object) -> None:
    """Makes SIGCHLD wake the event loop: an ignored signal does not."""


def _read(fd: int) -> bytes | None:
    """Returns what is there, b"" at the end, None if there is nothing yet."""
    try:
        return os.read(fd, _READ_BYTES)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _has_ended(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def _signal_group(pgid: int, signum: int) -> None:
    try:
        os.killpg(pgid, signum)
    except ProcessLookupError:
        # Between fork and setsid there is no group yet, only the process.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pgid, signum)
    except PermissionError as error:
        if error.errno != errno.EPERM:  # zombies only, as some systems say it
            raise


def _open_log(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def _die_with_parent(parent: int) -> None:
    """Second belt, for workers that cannot run Python code: the kernel ends them."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the belt was on
        os._exit(1)


def _reset_interpreter() -> None:
    """In a forked worker: what a fresh interpreter would have."""
    for signum in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit._clear()
    gc.unfreeze()
    gc.enable()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()


def main(launcher: int) -> None:
    """The agent's process: its link is where standard input and output were.

    Args:
        launcher: Process without which there is nothing to do.
    """
    input_fd, output_fd = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.close(null)
    # What anybody prints here by mistake must not get into the link.
    os.dup2(2, 1)
    # Workers share these pages with the agent; a collection would copy them.
    gc.collect()
    gc.freeze()
    warden = Warden(os.environ[MARK])
    Agent(input_fd, output_fd, launcher, warden).run()
    leave(0)
