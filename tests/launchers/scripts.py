"""Launching scripts in tests: run in interpreters of their own, and all they start is found."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from launchpad_lite.testing import poll_until

_TAG = "LAUNCHERS_TEST_TAG"


class Script:
    """A script in a folder of its own; a context manager that ends what is left of it."""

    def __init__(self, folder: Path, source: str, name: str = "script.py") -> None:
        self.folder = folder
        self.logs = folder / "logs"
        self.path = folder / name
        self.path.write_text(textwrap.dedent(source))
        self.tag = uuid.uuid4().hex
        self.process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Script":
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        if self.process is not None:
            self.process.wait()
            for stream in (self.process.stdout, self.process.stderr):
                if stream is not None:
                    stream.close()

    def start(
        self,
        *arguments: str,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        command: Sequence[str] = (),
        output: int = subprocess.PIPE,
    ) -> subprocess.Popen[str]:
        self.process = subprocess.Popen(
            [*(command or (sys.executable, str(self.path))), *arguments],
            cwd=cwd or self.folder,
            env={
                **os.environ,
                "LAUNCHPAD_LOGGING_DIR": str(self.logs),
                "TMPDIR": str(self.folder),
                _TAG: self.tag,
                **(env or {}),
            },
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.stdin = None
        return self.process

    def run(self, *arguments: str, timeout_s: float = 90, **options: object) -> "Ended":
        process = self.start(*arguments, **options)  # type: ignore[arg-type]
        stdout, stderr = process.communicate(timeout=timeout_s)
        return Ended(process.returncode, stdout, stderr)

    def processes(self) -> list[psutil.Process]:
        """All processes that the script started and that are alive, itself included."""
        return list(_tagged(self.tag))

    def agent(self) -> psutil.Process | None:
        """The agent, once it is there."""
        reaper = self.reaper()
        with contextlib.suppress(psutil.Error):
            for child in reaper.children() if reaper is not None else ():
                return child
        return None

    def reaper(self) -> psutil.Process | None:
        """The agent's parent, once it is there."""
        assert self.process is not None
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.process.pid).children():
                if child.name() == "launchpad-reap":
                    return child
        return None

    def log(self, node: str) -> bytes:
        """The log of a node, wherever its folder is."""
        label, _, replica = node.rstrip("]").partition("[")
        (path,) = self.logs.glob(f"*/{label}/{replica}.log")
        return path.read_bytes()

    def wait_for(self, name: str, count: int = 1) -> None:
        """Waits until nodes have written files of this name: `touch(name)` in the script."""
        poll_until(lambda: len(list(self.folder.glob(f"{name}*"))) >= count, 60)

    def assert_gone(self, timeout_s: float = 30.0) -> None:
        assert self.process is not None
        poll_until(lambda: not self.processes(), timeout_s, must=False)
        left = [_portrait(each) for each in self.processes()]
        assert not left, "\n".join(left)


def without_logs_line(stderr: str) -> str:
    """What was said on standard error, less where the logs of programs are that ended well."""
    return re.sub(r"^\S+: (completed|stopped); logs in \S+\n", "", stderr, flags=re.MULTILINE)


class Ended:
    """How a script ended."""

    def __init__(self, code: int, stdout: str, stderr: str) -> None:
        self.code = code
        self.stdout = stdout
        self.stderr = stderr


def _portrait(process: psutil.Process) -> str:
    """All that tells why a process is still there."""
    with contextlib.suppress(psutil.Error, OSError):
        where = Path(f"/proc/{process.pid}/wchan").read_text()
        times = process.cpu_times()
        return (
            f"{process.pid} of {process.ppid()}: {process.status()} in {where}, "
            f"{times.user + times.system:.2f} s of CPU, {process.num_threads()} threads, children "
            f"{[child.pid for child in process.children()]}: {process.cmdline()}"
        )
    return f"{process.pid} has ended just now"


def _tagged(tag: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(_TAG) == tag:
                yield process


def kill(process: "psutil.Process | subprocess.Popen[str]") -> None:
    """As `kill -9`."""
    with contextlib.suppress(psutil.Error, ProcessLookupError):
        process.send_signal(signal.SIGKILL)
