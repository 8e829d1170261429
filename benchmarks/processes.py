"""The processes of the peers: started, asked in JSON lines, watched, and ended for sure."""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_END_S = 3.0


class PeerError(Exception):
    """A peer gave no result; the text says why."""


class HungError(PeerError):
    """It did not answer in time."""


class UnsupportedError(PeerError):
    """It has no such feature."""


class Process:
    """A process of a peer and all that it starts."""

    def __init__(
        self, command: Sequence[str], variables: dict[str, str], setup: dict[str, Any], log: Path
    ) -> None:
        self._log = log
        self._unread = b""
        #: Whether it was asked something and has not answered.
        self._busy = False
        with log.open("ab") as errors:
            self._popen = subprocess.Popen(
                command,
                env=variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                start_new_session=True,
            )
        self._send(setup)

    def ask(self, do: str, timeout_s: float, **arguments: Any) -> Any:
        """Has a client do something and waits for its answer."""
        self.begin(do, **arguments)
        return self.answer(timeout_s)

    def begin(self, do: str, **arguments: Any) -> None:
        """Has a client do something."""
        self._busy = True
        self._send({"do": do, **arguments})

    def answer(self, timeout_s: float) -> Any:
        """Waits for the next answer.

        Raises:
            PeerError: There is none, or it is no result.
        """
        answer = json.loads(self._read_line(time.monotonic() + timeout_s))
        self._busy = False
        if "unsupported" in answer:
            raise UnsupportedError(answer["unsupported"])
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer["value"]

    def _send(self, message: dict[str, Any]) -> None:
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the missing answer tells
            self._popen.stdin.write(json.dumps(message).encode() + b"\n")

    def _read_line(self, deadline: float) -> bytes:
        assert self._popen.stdout is not None
        while b"\n" not in self._unread:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self._popen.stdout], [], [], left)[0]:
                raise HungError("hung")
            read = os.read(self._popen.stdout.fileno(), 1 << 16)
            if not read:
                lines = self._log.read_text(errors="replace").strip().splitlines()
                raise PeerError(f"died: {lines[-1] if lines else 'without a word'}")
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def family(self) -> list[psutil.Process]:
        """Returns the process and all descendants."""
        try:
            own = psutil.Process(self._popen.pid)
            return [own, *own.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def end(self) -> None:
        """Asks the process to end; kills what does not, and what is busy at once."""
        family = self.family()
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(0.0 if self._busy else _END_S)
        _kill(family)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()
        assert self._popen.stdout is not None
        self._popen.stdout.close()


def adopt_orphans() -> None:
    """Makes what peers leave behind children of this process, so that it can be ended."""
    # Who ends this process means the peers, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_orphans() -> None:
    """Kills all descendants: between two measurements there should be none."""
    _kill(psutil.Process().children(recursive=True))


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=_END_S)


def cpu_seconds(processes: Sequence[Process]) -> float:
    """Returns what processes and their descendants have computed so far."""
    total = 0.0
    for process in processes:
        for member in process.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = member.cpu_times()
                total += times.user + times.system
    return total


def memory_mib(members: Sequence[psutil.Process]) -> float:
    """Returns resident memory; a page that several processes have is divided among them."""
    total = 0
    for member in members:
        with contextlib.suppress(psutil.Error):
            memory = member.memory_full_info()
            # Only Linux divides.
            total += getattr(memory, "pss", memory.uss)
    return total / 2**20


class MemoryWatch:
    """The most memory that processes have while it runs.

    Those that they start meanwhile count if it `grows`; finding them takes some milliseconds.
    """

    def __init__(
        self, processes: Sequence[Process], interval_s: float = 0.01, *, grows: bool = False
    ) -> None:
        self._processes = processes
        self._members = None if grows else self._family()
        self._interval_s = interval_s
        self._stop = threading.Event()
        self.peak_mib = 0.0

    def sample(self) -> float:
        """Checks once more; returns the memory now."""
        now = memory_mib(self._family() if self._members is None else self._members)
        self.peak_mib = max(self.peak_mib, now)
        return now

    def _family(self) -> list[psutil.Process]:
        return [member for process in self._processes for member in process.family()]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Checks again and again."""
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self.sample()
