"""What a process has called and answered is counted, on all ways."""

import contextlib
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from courier.lowlevel import call_numbers, call_records
from tests.courier.conftest import Script, Serve
from tests.courier.grpc_client import GrpcClient
from tests.courier.served import Node
from tests.courier.waiting import wait_until


class Counted(Node):
    async def later(self) -> str:
        return "later"

    async def letters(self) -> Any:
        yield "a"


def _numbers(side: str, name: str, scopes: list[object]) -> tuple[int, int, int, int, int]:
    found = call_numbers(scopes)[side].get(name)
    if found is None:
        return 0, 0, 0, 0, 0
    ended = sum(found["delays"])
    return found["calls"], ended, found["errors"], found["running"], found["queued"]


@pytest.fixture
def scopes() -> Any:
    scope = object()
    token = call_records.SCOPE.set(scope)
    yield [scope]
    call_records.SCOPE.reset(token)
    call_records.forget(scope)


@pytest.mark.parametrize("way", ["copy", "share", "wire"])
def test_calls_are_counted_on_both_sides_until_they_end(
    way: str, serve: Serve, scopes: list[object]
) -> None:
    node = Counted()
    _, client = serve(node, in_process=way, thread_pool_size=1, client={"name": "node"})

    def numbers(method: str) -> list[tuple[int, int, int, int, int]]:
        return [_numbers("served", method, scopes), _numbers("made", f"node: {method}", scopes)]

    for number in range(5):
        client.echo(number)
    client.futures.echo(5).result()
    client.later()
    assert list(client.letters()) == ["a"]
    stream = client.count(3)
    next(stream)
    assert numbers("count")[1][3] == 1, "an open stream runs"
    list(stream)
    for fails in (client.fail, lambda: list(client.fail_later())):
        with pytest.raises(KeyError):
            fails()
    expected = {"echo": (6, 6, 0), "later": (1, 1, 0), "letters": (1, 1, 0), "count": (1, 1, 0)}
    expected |= {"fail": (1, 1, 1), "fail_later": (1, 1, 1)}
    both = {method: [(*counts, 0, 0)] * 2 for method, counts in expected.items()}
    wait_until(lambda: {method: numbers(method) for method in both} == both)

    calls = [client.futures.block(), client.futures.block()]
    node.await_calls()
    wait_until(lambda: numbers("block") == [(1, 0, 0, 1, 1), (2, 0, 0, 2, 0)])
    node.release.set()
    for call in calls:
        call.result()
    wait_until(lambda: numbers("block") == [(2, 2, 0, 0, 0)] * 2)


def test_calls_of_other_clients_are_counted(serve: Serve, scopes: list[object]) -> None:
    server, _ = serve(Node())
    with contextlib.closing(GrpcClient(server.address, server.secret)) as client:
        client.call("echo", 1)
    assert _numbers("served", "echo", scopes) == (1, 1, 0, 0, 0)


_VICTIM = """
import os, signal
from courier.lowlevel import call_records
class Served:
    def echo(self, value):
        return value
    def die(self):
        child = os.fork()
        if not child:
            client.echo(2)  # the records of a child are its own
            os._exit(0)
        os.waitpid(child, 0)
        os.kill(os.getpid(), signal.SIGKILL)
call_records.keep_in(os.open(sys.argv[1], os.O_RDWR))
server = courier.Server(Served(), secret=secret, in_process="wire")
server.start()
client = courier.Client(server.address, secret=secret, name="served")
client.echo(1)
client.die()
"""


def test_the_last_calls_of_a_process_outlive_its_sigkill(script: Script, tmp_path: Path) -> None:
    with (tmp_path / "memory").open("wb+") as memory:
        memory.truncate(call_records.MEMORY_BYTES)
        assert call_records.calls_in(memory.fileno(), 10) == []
        victim = script(_VICTIM, memory.name)
        assert victim.wait(30) == -signal.SIGKILL
        calls = call_records.calls_in(memory.fileno(), 10)
    made = [(each.peer, each.method, each.end) for each in calls if not each.is_served]
    assert made == [("served", "echo", "ok"), ("served", "die", "runs")]
    peer = f"process {victim.pid} of this machine"
    served = [(each.method, each.end) for each in calls if each.is_served and each.peer == peer]
    assert served == [("echo", "ok"), ("die", "runs")]
    sides = {each.is_served: (each.tag, each.number) for each in calls if each.method == "die"}
    assert sides[True] == sides[False], "one number on both sides"


def test_names_of_clients_that_are_gone_make_room_for_others() -> None:
    for number in range(call_records._NAMES + 10):
        call_records.numbers_of(None, f"gone-{number}", "call")
    call_records.numbers_of(None, "newest", "call").begin(time.perf_counter(), 0, 0, 0)
    assert call_numbers()["made"]["newest: call"]["calls"] == 1


def test_a_record_that_an_interrupt_kept_from_being_written_hides_no_later_one() -> None:
    next(call_records._count)
    numbers = call_records.numbers_of(None, "later", "call")
    numbers.begin(time.perf_counter(), 0, 0, 1)
    assert [each.method for each in call_records.newest_calls(1)] == ["call"]
