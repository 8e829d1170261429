"""Calls made while their server is down wait for the next one, and find it soon."""

import concurrent.futures
import signal
import statistics
import time
from typing import Any

import pytest

from tests.courier.conftest import Connect, Reserve, Script

_SERVER = """
import time
class Clock:
    def now(self): return time.monotonic()
server = courier.Server(Clock(), secret=secret, port=int(sys.argv[1]), share_port=True)
server.start()
print(time.monotonic(), flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.serial
def test_a_call_made_while_the_server_is_down_is_answered_soon_after_the_next_is_up(
    script: Script, connect: Connect, reserve: Reserve
) -> None:
    port = reserve()
    client = connect(f"127.0.0.1:{port}", call_timeout=60)
    delays_s: list[float] = []
    for _ in range(5):
        waiting = client.futures.now()
        process = script(_SERVER, port)
        assert process.stdout is not None
        answered_at = waiting.result(60)  # one machine, one monotonic clock
        delays_s.append(answered_at - float(process.stdout.readline()))
        process.send_signal(signal.SIGKILL)
        process.wait()
        _notice_the_loss(client)
    assert statistics.median(delays_s) < 1.0


def _notice_the_loss(client: Any) -> None:
    """Returns when calls wait, instead of being sent into the old connection and lost."""
    give_up_at = time.monotonic() + 20
    while time.monotonic() < give_up_at:
        future = client.futures.now()
        try:
            future.exception(0.2)
        except concurrent.futures.TimeoutError:
            future.cancel()
            return
    raise AssertionError("the connection outlives its server")
