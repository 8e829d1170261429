"""Machines that fall silent: both sides notice, and the client comes back by itself."""

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import courier
from tests.courier.scripts import started

_ROOT = Path(__file__).resolve().parents[2]
_KEEPALIVE_S = 2
#: Well below what the system would need without being told, and below what is the default.
_SOON_S = 18.0
_SERVER_IP, _CLIENT_IP = "10.213.77.1", "10.213.77.2"


def _ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20)


def _must(*words: str) -> None:
    done = _ip(*words)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


def _why_not() -> str:
    if shutil.which("ip") is None:
        return "needs iproute2"
    if os.geteuid() != 0:
        return "needs root to make network namespaces"
    probe = f"lp{os.getpid()}p"
    made = _ip("netns", "add", probe)
    if made.returncode != 0:
        return f"cannot make network namespaces here: {made.stderr.strip()}"
    _ip("netns", "del", probe)
    return ""


class Machines:
    """Two machines, as far as the network goes, and the cable between them."""

    def __init__(self) -> None:
        self.server, self.client = f"lp{os.getpid()}s", f"lp{os.getpid()}c"
        self._cable = (f"lps{os.getpid()}", f"lpc{os.getpid()}")

    def make(self) -> None:
        ends = self._cable
        for space in (self.server, self.client):
            _must("netns", "add", space)
        _must("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for space, end, address in (
            (self.server, ends[0], _SERVER_IP),
            (self.client, ends[1], _CLIENT_IP),
        ):
            _must("link", "set", end, "netns", space)
            _must("-n", space, "addr", "add", f"{address}/24", "dev", end)
            _must("-n", space, "link", "set", end, "up")
            _must("-n", space, "link", "set", "lo", "up")

    def plug(self, state: str) -> None:
        """Pulls the cable ("down"), or puts it back ("up"), at both ends."""
        for space, end in zip((self.server, self.client), self._cable, strict=True):
            _must("-n", space, "link", "set", end, state)

    def remove(self) -> None:
        for space in (self.server, self.client):
            _ip("netns", "del", space)
        _ip("link", "del", self._cable[0])


@pytest.fixture
def machines() -> Iterator[Machines]:
    if reason := _why_not():
        assert os.environ.get("CI") != "true", f"CI checks this: {reason}"
        pytest.skip(reason)
    made = Machines()
    try:
        made.make()
        yield made
    finally:
        made.remove()


Run = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def run(tmp_path: Path, secret: courier.Secret) -> Iterator[Run]:
    """Runs source code on one of the machines."""
    numbers = itertools.count()

    def start(space: str, source: str, *args: object) -> subprocess.Popen[str]:
        path = tmp_path / f"script_{next(numbers)}.py"
        path.write_text(
            f"import sys; sys.path.insert(0, {str(_ROOT)!r})\n"
            "import threading, time\nimport numpy as np\nimport courier\n"
            f"secret = courier.Secret({secret.reveal()!r})\n"
            "def say(*words):\n    print(*words, flush=True)\n" + source
        )
        command = ["ip", "netns", "exec", space, sys.executable, str(path), *map(str, args)]
        return run(command)

    with started() as run:
        yield start


_SERVER = f"""
class Obj:
    def hold(self):
        say("held")
        began = time.monotonic()
        gone = courier.current_call().wait_cancelled(60)
        say("noticed" if gone else "missed", time.monotonic() - began)
    def swallow(self, array):
        return len(array)
    def pour(self):
        say("pours")
        while not courier.current_call().cancelled:
            yield np.ones(1 << 20, np.uint8)
    def alive(self):
        return "yes"
server = courier.Server(
    Obj(), host={_SERVER_IP!r}, secret=secret, keepalive_s={_KEEPALIVE_S}
)
server.start()
say(server.address)
threading.Event().wait()
"""

_CLIENT = f"""
client = courier.Client(sys.argv[1], secret=secret, keepalive_s={_KEEPALIVE_S})
def wait():
    client.hold()
def send():
    array = np.ones(8 << 20, np.uint8)
    while True:
        client.swallow(array)
def take():
    for item in client.pour():
        pass
say(client.alive())
def work():
    try:
        {{"wait": wait, "send": send, "take": take}}[sys.argv[2]]()
    except courier.CourierError as error:
        say(type(error).__name__)
thread = threading.Thread(target=work)
thread.start()
sys.stdin.readline()
thread.join()
say(client.alive())
"""


def said(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    return line.split()


@pytest.mark.slow
@pytest.mark.parametrize("doing", ["wait", "send", "take"])
def test_a_connection_whose_other_machine_is_silent_is_lost_for_both_sides(
    machines: Machines, run: Run, doing: str
) -> None:
    server = run(machines.server, _SERVER)
    (address,) = said(server)
    client = run(machines.client, _CLIENT, address, doing)
    assert said(client) == ["yes"]
    if doing == "wait":
        assert said(server) == ["held"]
    elif doing == "take":
        assert said(server) == ["pours"]
    machines.plug("down")
    with contextlib.ExitStack() as stack:
        stack.callback(machines.plug, "up")
        timer = _Deadline(client, server)
        stack.callback(timer.cancel)
        assert said(client) == ["ServerLostError"]
        if doing == "wait":
            verdict, after_s = said(server)
            assert verdict == "noticed"
            assert float(after_s) < _SOON_S
    assert client.stdin is not None
    client.stdin.write("\n")
    client.stdin.flush()
    assert said(client) == ["yes"]


class _Deadline:
    """Kills those who did not notice in time, so that whoever reads from them hears of it."""

    def __init__(self, *processes: subprocess.Popen[str]) -> None:
        self._timer = threading.Timer(_SOON_S, lambda: [p.kill() for p in processes])
        self._timer.start()

    def cancel(self) -> None:
        self._timer.cancel()
