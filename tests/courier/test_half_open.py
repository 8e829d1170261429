"""Machines that fall silent: both sides notice, and the client comes back by itself."""

import contextlib
import os
import threading
from collections.abc import Iterator

import pytest

from tests.courier.conftest import Script
from tests.courier.machines import SERVER_IP, Machines, why_not

_KEEPALIVE_S = 2
#: Well below what the system would need without being told, and below what is the default.
_SOON_S = 18.0


_SAY = """
import threading, time
import numpy as np
def say(*words):
    print(*words, flush=True)
"""

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
    Obj(), host={SERVER_IP!r}, secret=secret, keepalive_s={_KEEPALIVE_S}
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


@pytest.fixture
def machines() -> Iterator[Machines]:
    if reason := why_not():
        assert os.environ.get("CI") != "true", f"CI checks this: {reason}"
        pytest.skip(reason)
    with contextlib.closing(Machines()) as made:
        made.make()
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("doing", ["wait", "send", "take"])
def test_a_connection_whose_other_machine_is_silent_is_lost_for_both_sides(
    machines: Machines, script: Script, doing: str
) -> None:
    server = script(_SAY + _SERVER, within=machines.on_server)
    address = server.line()
    client = script(_SAY + _CLIENT, address, doing, within=machines.on_client)
    assert client.line() == "yes"
    if doing == "wait":
        assert server.line() == "held"
    elif doing == "take":
        assert server.line() == "pours"
    machines.plug("down")
    with contextlib.ExitStack() as stack:
        stack.callback(machines.plug, "up")
        # Kills those who do not notice in time, so that whoever reads from them hears of it.
        timer = threading.Timer(_SOON_S, lambda: [each.kill() for each in (client, server)])
        timer.start()
        stack.callback(timer.cancel)
        assert client.line() == "ServerLostError"
        if doing == "wait":
            verdict, after_s = server.line().split()
            assert verdict == "noticed"
            assert float(after_s) < _SOON_S
    client.say()
    assert client.line() == "yes"
