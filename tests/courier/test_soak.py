"""Many clients, all kinds of calls, for long: each answer is its call's, and nothing is left."""

import json
import sys
from collections import Counter
from typing import Any

import pytest

from tests.courier.conftest import Script
from tests.courier.fuzzing import descriptors, resident_bytes, segments
from tests.courier.scripts import Process
from tests.courier.test_kills import traces
from tests.courier.waiting import wait_until

_CLIENTS = 8
_THREADS = 2

_CHECK = """
import zlib

def check(value):
    if isinstance(value, dict):
        return sum(check(value[key]) for key in value)
    if isinstance(value, (list, tuple)):
        return sum(check(item) for item in value)
    return zlib.crc32(memoryview(value).cast("B"))
"""

_SERVER = (
    _CHECK
    + """
import gc, json, threading, time
class Obj:
    def echo(self, tag, value):
        return tag, check(value), value
    def fail(self, tag):
        raise KeyError(tag)
    def items(self, tag, values):
        for index, value in enumerate(values):
            yield tag, index, check(value), value
    def wait(self, tag):
        return tag, courier.current_call().wait_cancelled(30)
server = courier.Server(Obj(), secret=secret, thread_pool_size=8)
server.start()
print(server.address, flush=True)
for line in sys.stdin:
    gc.collect()
    names = [t.name for t in threading.enumerate() if not t.name.startswith("courier-handler")]
    print(json.dumps(names), flush=True)
"""
)

_CLIENT = (
    _CHECK
    + """
import collections, gc, json, queue, random, threading, time, traceback
import numpy as np

ADDRESS, SEED, SECONDS = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
client = courier.Client(ADDRESS, secret=secret, call_timeout=100)
counts = collections.Counter()
wrong = []

def make(chance, limit):
    size = int(2 ** chance.uniform(0, limit)) - 1
    kind = chance.randrange(4)
    if kind == 0:
        return chance.randbytes(min(size, 1 << 22))
    if kind == 1:
        return bytearray(min(size, 1 << 22))
    first = chance.randrange(1 << 30)
    array = np.arange(first, first + size // 4, dtype=np.uint32)
    if kind == 2:
        return array
    return {"a": array, "b": [chance.randbytes(40), {"c": array[: len(array) // 2]}], "c": b""}

def expect(condition, what):
    if not condition:
        wrong.append(what)

def same(reply, tag, value):
    expect(reply[0] == tag and reply[1] == check(value), ("echo sent", tag))
    expect(check(reply[2]) == reply[1], ("echo came", tag))

def blocking(chance, tag):
    value = make(chance, 26 if chance.random() < 0.05 else 18)
    same(client.echo(tag, value), tag, value)

def futures(chance, tag):
    values = [make(chance, 16) for _ in range(8)]
    pending = [client.futures.echo((*tag, n), value) for n, value in enumerate(values)]
    order = list(enumerate(pending))
    chance.shuffle(order)
    for n, future in order:
        same(future.result(), (*tag, n), values[n])

def callbacks(chance, tag):
    heard = queue.Queue()
    values = {(*tag, n): make(chance, 14) for n in range(4)}
    for key, value in values.items():
        client.futures.echo(key, value).add_done_callback(heard.put)
    for _ in range(4):
        reply = heard.get(timeout=100).result()
        same(reply, reply[0], values.pop(reply[0]))

def items(chance, tag):
    values = [make(chance, 20) for _ in range(chance.randrange(6))]
    stop = chance.randrange(6) if chance.random() < 0.3 else 99
    got = client.items(tag, values)
    seen = 0
    for index, reply in enumerate(got):
        expect(reply[1] == index, ("order", tag))
        same((reply[0], reply[2], reply[3]), tag, values[index])
        seen += 1
        if index == stop:
            got.close()
            return
    expect(seen == len(values), ("items", tag))

def cancels(chance, tag):
    future = client.futures.wait(tag)
    if chance.random() < 0.5:
        time.sleep(chance.random() * 0.01)
    expect(future.cancel(), ("cancel", tag))

def times_out(chance, tag):
    mine = courier.with_timeout(client, 0.02)
    try:
        mine.wait(tag)
        expect(False, ("no timeout", tag))
    except courier.CallTimeoutError:
        pass
    finally:
        courier.close(mine)

def fails(chance, tag):
    try:
        client.fail(tag)
        expect(False, ("no error", tag))
    except KeyError as error:
        expect(error.args == (tag,), ("error", tag))

WAYS = [blocking, blocking, blocking, futures, callbacks, items, items, cancels, times_out, fails]

def work(thread):
    chance = random.Random(SEED * 100 + thread)
    number = 0
    try:
        while time.monotonic() < end and not wrong:
            way = chance.choice(WAYS)
            number += 1
            way(chance, (SEED * 100 + thread, number))
            counts[way.__name__] += 1
    except BaseException as error:
        wrong.append(traceback.format_exc())
        raise

def state():
    gc.collect()
    print(json.dumps({"counts": counts, "wrong": list(map(str, wrong[:5]))}), flush=True)
    sys.stdin.readline()

end = time.monotonic() + SECONDS
threads = [threading.Thread(target=work, args=(n,)) for n in range(int(sys.argv[4]))]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
state()
courier.close(client)
give_up_at = time.monotonic() + 20
while time.monotonic() < give_up_at:
    gc.collect()
    if not [t for t in threading.enumerate() if t.name.startswith("courier")]:
        break
    time.sleep(0.05)
counts["threads"] = len([t for t in threading.enumerate() if t.name.startswith("courier")])
state()
"""
)


def ask(process: Process, *, say: bool = True) -> Any:
    if say:
        process.say()
    return json.loads(process.line())


@pytest.mark.serial  # eight processes, each with all the memory that it can use
@pytest.mark.timeout(1_000)
@pytest.mark.parametrize(
    "seconds", [pytest.param(15, marks=pytest.mark.slow), pytest.param(600, marks=pytest.mark.long)]
)
def test_every_answer_is_its_calls_and_nothing_is_left(script: Script, seconds: float) -> None:
    before = traces()
    server = script(_SERVER)
    address = server.line()
    warm = script(_CLIENT, address, 99, 1, 1)
    ask(warm, say=False)
    ask(warm)
    warm.communicate("\n")
    wait_until(lambda: not segments(server.pid))
    threads, files = ask(server), len(descriptors(server.pid))
    memory = resident_bytes(server.pid)
    clients = [script(_CLIENT, address, n, seconds, _THREADS) for n in range(_CLIENTS)]
    done = [ask(client, say=False) for client in clients]
    wrong = [text for client in done for text in client["wrong"]]
    assert not wrong, "\n".join(wrong)
    print("calls:", sum(sum(client["counts"].values()) for client in done), file=sys.stderr)
    for client in done:
        assert {"blocking", "futures", "items"} <= client["counts"].keys()
    for process in clients:
        assert ask(process)["counts"]["threads"] == 0
        assert segments(process.pid) == []
        process.communicate("\n")
    wait_until(lambda: len(descriptors(server.pid)) <= files)
    # Its watch comes with the first fast call; a poller that was replaced ends by itself.
    allowed: Counter[str] = Counter(threads)
    allowed |= Counter(["courier-watch"])
    wait_until(lambda: not Counter(ask(server)) - allowed)
    wait_until(lambda: not segments(server.pid))
    wait_until(lambda: resident_bytes(server.pid) < memory + (150 << 20))
    server.kill()
    server.communicate()
    wait_until(lambda: traces() <= before)  # others of this machine come and go
