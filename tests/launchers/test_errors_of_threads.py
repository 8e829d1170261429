"""One error ends no thread of a launcher or a worker that others depend on."""

import errno
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

import launchpad_lite as lp
from courier import Secret
from launchers.host import worker
from launchers.host.link import LinkFrame, LinkReader, write_all
from launchers.host.worker import _Control, _LinkToAgent, _Termination
from launchpad_lite.launching import AddressTable
from launchpad_lite.life.events import (
    RequestStop,
    ServersEnded,
    StopReceived,
    from_fields,
    to_fields,
)
from launchpad_lite.testing import poll_until
from launchpad_lite.worker.runtime import NodeRuntime, NodeSetup
from tests.launchers.running import program_of


def test_a_worker_hears_of_the_stop_after_something_that_it_cannot_obey(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    ours, theirs = socket.socketpair()
    link = _LinkToAgent(theirs.fileno())
    runtime = NodeRuntime(NodeSetup("p", "node", 0), AddressTable({}, Secret.generate()), link.post)
    # Its end is that of the process.
    monkeypatch.setattr(os, "killpg", lambda *_: None)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    def leave(*_: Any) -> None:
        raise SystemExit

    monkeypatch.setattr(os, "kill", leave)
    try:
        _Control(link, runtime, _Termination(), -1).start()
        for action in (ServersEnded("node[0]", ("of nobody",)), RequestStop("node[0]")):
            write_all(ours.fileno(), LinkFrame(*to_fields(action)).encode())
        assert runtime.stop_event.wait(10)
        heard = LinkReader(ours.fileno()).read(float("inf"))
        assert heard is not None
        assert isinstance(from_fields(heard.op, heard.fields), StopReceived)
    finally:
        signal.signal(signal.SIGTERM, before)
        ours.close()
        for thread in threading.enumerate():
            if thread.name == "launchpad-control":
                thread.join(10)
        theirs.close()


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has the system give no threads whose names begin so, as with a small `ulimit -u`."""

    def begin(name: str) -> None:
        start = threading.Thread.start

        def start_or_raise(thread: threading.Thread) -> None:
            if thread.name.startswith(name):
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", start_or_raise)

    return begin


def _program() -> lp.Program:
    return program_of(node=lp.PyNode(print), other=lp.PyNode(lp.wait_for_stop))


@pytest.mark.parametrize("name", ["node[0]", "launchpad-node[0]"])
def test_a_node_fails_to_which_the_system_gives_no_thread(
    refuse: Callable[[str], None], name: str
) -> None:
    refuse(name)
    with pytest.raises(RuntimeError, match=r"(?s)node\[0\].*can't start new thread.*ulimit -u"):
        lp.launch(_program(), launch_type="test_mt").wait()


@pytest.mark.parametrize(
    ("launch_type", "name"),
    [
        ("test_mp", "launchpad-send"),
        ("test_mp", "launchpad-link"),
        ("test_mp", "launchpad-stop-handlers"),
        ("test_mp", "launchpad-p"),
        ("test_mt", "launchpad-p"),
    ],
)
def test_a_launch_says_what_to_do_where_the_system_gives_no_thread(
    refuse: Callable[[str], None], launch_type: str, name: str
) -> None:
    before = set(psutil.Process().children(recursive=True))
    refuse(name)
    with pytest.raises(lp.LaunchError, match="ulimit -u"):
        lp.launch(_program(), launch_type=launch_type)
    poll_until(lambda: not set(psutil.Process().children(recursive=True)) - before)


def test_a_launch_says_what_to_do_where_the_system_gives_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(lp.LaunchError, match=r"agent of localhost.*ulimit -u"):
        lp.launch(_program(), launch_type="test_mp")


class CallsFromThread:
    """Calls all the time from a thread of its own, which nobody stops."""

    def __init__(self, other: Any) -> None:
        self._other = other

    def run(self) -> None:
        threading.Thread(target=self._call, name="prefetches", daemon=True).start()
        self._other.wait_for_calls(10)
        lp.stop()

    def _call(self) -> None:
        while True:
            self._other.call()


class Called:
    def __init__(self) -> None:
        self._calls = 0

    def call(self) -> None:
        self._calls += 1

    def wait_for_calls(self, number: int) -> None:
        poll_until(lambda: self._calls >= number)


@pytest.mark.parametrize("launcher", ["test_mt", "test_mp"])
def test_a_thread_whose_calls_the_stop_ends_is_told_in_one_line(
    launch_program: Any, launcher: str, capfd: pytest.CaptureFixture[str]
) -> None:
    program = lp.Program("threads")
    called = program.add_node(lp.CourierNode(Called), label="called")
    program.add_node(lp.CourierNode(CallsFromThread, called), label="calls")
    running = launch_program(program, launcher)
    running.wait()
    told = capfd.readouterr().err + "".join(
        line.decode() for _, line in running.running.output() if line
    )
    assert "Traceback" not in told


class LeavesThread:
    def run(self) -> None:
        worker._LINGERING_S = 0.1
        threading.Thread(target=time.sleep, args=(0.5,), name="loads").start()


def test_a_node_that_has_ended_says_which_threads_its_process_waits_for(
    launch_program: Any,
) -> None:
    running = launch_program(program_of(node=lp.CourierNode(LeavesThread)), "test_mp")
    assert running.wait().outcome is lp.Outcome.COMPLETED
    told = "".join(line.decode() for _, line in running.running.output() if line)
    assert "the node has ended, but its process waits for loads" in told
