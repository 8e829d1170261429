"""Processes that are killed in the middle: nothing of them is left, and others go on."""

import concurrent.futures
import contextlib
import gc
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import courier
from tests.courier.conftest import Script, Serve
from tests.courier.fuzzing import nothing_left, segments
from tests.courier.waiting import wait_until

_MIB = 1 << 20
#: How memory and semaphores with a name would be called; others of this machine have some, too.
_NAMES = ("courier", "psm_", "sem.mp-")
#: Of an array that lies in shared memory.
_BYTES = 64 * _MIB


def traces() -> set[str]:
    """Returns what a process could leave behind in the file system."""
    shared = Path("/dev/shm").iterdir()
    found = {str(path) for path in shared if any(name in path.name for name in _NAMES)}
    for path in Path("/tmp").iterdir():
        with contextlib.suppress(OSError):
            if path.is_socket() or "courier" in path.name:
                found.add(str(path))
    for line in Path("/proc/net/unix").read_text().splitlines():
        name = line.split()[-1]
        if "courier" in name and not name.startswith("@"):
            found.add(name)
    return found


@pytest.fixture(autouse=True)
def _nothing_is_left_on_this_machine() -> Iterator[None]:
    before = traces()
    yield
    wait_until(lambda: traces() <= before)  # others of this machine come and go


class Holder:
    """Keeps what it was given until nobody waits for the answer any more."""

    def __init__(self) -> None:
        self.held = 0
        self.let_go = 0
        self.closed = 0

    def hold(self, array: Any) -> int:
        assert array[-1] == 7
        self.held += 1
        assert courier.current_call().wait_cancelled(60)
        self.let_go += 1
        return len(array)

    def echo(self, array: Any) -> Any:
        return array

    def items(self, count: int) -> Iterator[Any]:
        try:
            for index in range(count):
                yield np.full(_MIB, index, np.uint8)
        finally:
            self.closed += 1

    def alive(self) -> str:
        return "yes"


_CLIENT = f"""
import numpy as np, threading
array = np.full({_BYTES}, 7, np.uint8)
client = courier.Client(sys.argv[1], secret=secret)
assert client.echo(array)[-1] == 7
pending = [client.futures.hold(array) for _ in range(3)]
items = client.items(100_000)
next(items)
def churn():
    mine = courier.Client(sys.argv[1], secret=secret)
    while True:
        mine.echo(array)
threading.Thread(target=churn, daemon=True).start()
print("ready", flush=True)
threading.Event().wait()
"""


@pytest.mark.slow
def test_a_killed_client_leaves_no_memory_and_its_handlers_hear_of_it(
    serve: Serve, script: Script
) -> None:
    holder = Holder()
    server, client = serve(holder, in_process="wire", client={"call_timeout": 30})
    assert client.alive() == "yes"
    before = segments()  # other tests in this process may have left some
    with nothing_left(slack_bytes=2 * _BYTES):
        for turn in range(1, 3):
            victim = script(_CLIENT, server.address)
            assert victim.line() == "ready"
            wait_until(lambda turn=turn: holder.held == 3 * turn)
            assert segments(victim.pid)
            victim.send_signal(signal.SIGKILL)  # in the middle of sending
            victim.communicate()
            wait_until(lambda turn=turn: holder.let_go == 3 * turn)
            wait_until(lambda turn=turn: holder.closed == turn)
            assert client.alive() == "yes"
            gc.collect()  # what was on its way is held by exceptions and their tracebacks
            wait_until(lambda: len(segments()) <= len(before))
    wait_until(lambda: server.handlers.is_idle)


_SERVER = f"""
import numpy as np, os, threading
class Obj:
    def __init__(self):
        self.kept = []
    def pid(self):
        return os.getpid()
    def keep(self, array):
        self.kept.append(array)
        return len(self.kept)
    def hold(self, array):
        print("held\\n", end="", flush=True)  # in one piece
        threading.Event().wait(60)
    def big(self):
        return np.full({_BYTES}, 7, np.uint8)
    def items(self):
        for index in range(1000):
            yield np.full({_MIB}, index % 200, np.uint8)
    def alive(self):
        return "yes"
server = courier.Server(Obj(), secret=secret, port=int(sys.argv[1]), share_port=True)
server.start()
print(server.port, flush=True)
threading.Event().wait()
"""


@pytest.mark.slow
def test_a_killed_server_is_noticed_at_once_and_its_successor_found(
    script: Script, connect: Callable[..., Any], reserve: Callable[[], int]
) -> None:
    port = reserve()
    first = script(_SERVER, port)
    assert int(first.line()) == port
    client = connect(f"127.0.0.1:{port}", call_timeout=60)
    array = np.full(_BYTES, 7, np.uint8)
    assert client.keep(array) == 1
    with nothing_left(slack_bytes=4 * _BYTES), concurrent.futures.ThreadPoolExecutor() as pool:
        waits = pool.submit(client.hold, array)
        future = client.futures.hold(array)
        items = client.items()
        next(items)
        result = client.big()
        for _ in range(2):
            assert first.line() == "held"
        assert segments()
        first.send_signal(signal.SIGKILL)
        began = time.monotonic()
        for pending in (waits, future):
            with pytest.raises(courier.ServerLostError):
                pending.result(30)
        with pytest.raises(courier.ServerLostError):
            list(items)
        assert time.monotonic() - began < 15
        first.communicate()
        # What was received stays, though its sender is gone.
        assert result[0] == result[-1] == 7
        del result
        second = script(_SERVER, port)
        assert int(second.line()) == port
        assert client.alive() == "yes"
        assert client.pid() == second.pid
        del items, waits, future, pending
        gc.collect()
        wait_until(lambda: not segments())
