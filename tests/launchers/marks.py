"""Finding all that a test started, whoever adopted it, by a mark in its environment."""

import contextlib
import os
import signal
import uuid
from collections.abc import Iterator

import psutil
import pytest

from launchpad_lite.parts.marks import marked
from launchpad_lite.testing import poll_until

MARK = "LAUNCHERS_TESTMARK"


class Marked:
    """The processes that bear a mark."""

    def __init__(self, mark: str) -> None:
        self._mark = mark

    def processes(self) -> list[psutil.Process]:
        """All that are alive, but for the one that asks."""
        found = []
        for pid in marked(MARK, self._mark):
            with contextlib.suppress(psutil.Error):
                found.append(psutil.Process(pid))
        return [process for process in found if process.pid != os.getpid()]

    def sleepers(self) -> list[int]:
        """Those that run `sleep`."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if process.cmdline()[:1] == ["sleep"]:
                    found.append(process.pid)
        return found

    def kill(self) -> None:
        """Kills all at the same time, as the end of a machine does: none sees another one go."""
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in self.processes():
                with contextlib.suppress(ProcessLookupError):  # it was about to end
                    os.kill(process.pid, number)

    def assert_gone(self) -> None:
        """Waits until there are none."""
        poll_until(lambda: not self.processes(), 20, must=False)
        assert self.processes() == []


def mark_all(monkeypatch: pytest.MonkeyPatch) -> Iterator[Marked]:
    """Marks all that a test starts; ends what is left after the test."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    found = Marked(mark)
    yield found
    found.kill()
