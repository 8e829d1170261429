"""A forked child may use what it inherited, and disturbs nobody."""

import os
import signal
import socket
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import courier
from tests.courier.conftest import Script, Serve


class Counter:
    def __init__(self) -> None:
        self.total = 0

    def add(self, by: int) -> int:
        self.total += by
        return self.total

    def wait(self, seconds: float) -> str:
        courier.current_call().wait_cancelled(seconds)
        return "waited"


_USE = """
import os, pickle, threading
client = courier.Client(sys.argv[1], secret=secret)
assert client.add(1) == 1
pending = client.futures.wait(1.0)
items = pickle.dumps(client)
child = os.fork()
if not child:  # just exits, and ends no call of its parent
    del client, pending
    import gc; gc.collect()
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
children = []
for number in range(4):
    child = os.fork()
    if not child:
        mine = pickle.loads(items) if number % 2 else client
        mine.add(10)
        done = threading.Event()
        mine.futures.add(10).add_done_callback(lambda _: done.set())
        assert done.wait(20)
        if number < 2: courier.close(mine)
        os._exit(0)
    children.append(child)
    client.add(100)
assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
print(pending.result(20), client.add(0))
"""


def test_children_use_an_inherited_or_pickled_client_beside_their_parent_or_just_exit(
    serve: Serve, script: Script
) -> None:
    server, _ = serve(Counter())
    assert script(_USE, server.address).output() == "waited 481"


_SERVE = """
import os, time
port = int(sys.argv[2])
server = courier.Server(
    os.getpid, secret=secret, in_process=sys.argv[1], port=port, share_port=True
)
server.start()
client = courier.Client(server.address, secret=secret)
assert client() == os.getpid()
child = os.fork()
if not child:
    assert client() == os.getppid()
    os.write(1, b"called\\n")
    time.sleep(60)
    os._exit(0)
# In one piece: where Python does not buffer, print() writes each word by itself.
os.write(1, f"{os.getpid()} {child}\\n".encode())
sys.stdin.readline()
os._exit(0)
"""


@pytest.mark.parametrize("in_process", ["wire", "copy", "share"])
def test_a_child_that_outlives_its_server_does_not_keep_the_port_or_the_clients(
    script: Script,
    serve: Serve,
    connect: Callable[..., Any],
    reserve: Callable[[], int],
    in_process: str,
) -> None:
    port = reserve()
    process = script(_SERVE, in_process, port)
    words = [*process.line().split(), *process.line().split()]
    assert "called" in words
    words.remove("called")
    parent, child = map(int, words)
    try:
        client = connect(f"127.0.0.1:{port}", call_timeout=20)
        assert client() == parent
        process.say()
        process.wait(20)
        os.kill(child, 0)
        with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            pass
        serve(lambda: "next", port=port, share_port=True)
        assert client() == "next"
    finally:
        os.kill(child, signal.SIGKILL)


_STOP = """
import os
first = courier.Server(lambda: 'parent', secret=secret, in_process='wire')
first.start()
there = courier.Client(first.address, secret=secret)
there()
child = os.fork()
if not child:
    with courier.Server(lambda: 'child', secret=secret) as server:
        here = courier.Client(server.address, secret=secret)
        print(here(), here.futures().result(20), there(), flush=True)
    first.stop(0)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(there(), courier.Client(first.address, secret=secret)())
"""


def test_a_child_serves_and_stops_its_copy_of_a_server_which_does_not_stop_the_server(
    script: Script,
) -> None:
    assert script(_STOP).output() == "child child parent\nparent parent"


def test_forks_while_calls_run_leave_them_alone(serve: Serve, script: Script) -> None:
    server, _ = serve(Counter())
    process = script(
        "import os, threading, time\n"
        "client = courier.Client(sys.argv[1], secret=secret)\n"
        "stop = threading.Event()\n"
        "errors = []\n"
        "def call():\n"
        "    try:\n"
        "        while not stop.is_set(): client.add(1); client.futures.add(1).result(20)\n"
        "    except BaseException as error: errors.append(error)\n"
        "threads = [threading.Thread(target=call, daemon=True) for _ in range(3)]\n"
        "for thread in threads: thread.start()\n"
        "for _ in range(15):\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        client.add(0)\n"
        "        os._exit(0)\n"
        "    give_up_at = time.monotonic() + 30\n"
        "    while not (ended := os.waitpid(child, os.WNOHANG))[0]:\n"
        "        if time.monotonic() > give_up_at:\n"
        "            os.kill(child, 9)\n"
        "            errors.append('a child is stuck')\n"
        "            give_up_at += 1e9\n"
        "        time.sleep(0.01)\n"
        "    if errors or ended[1]: break\n"
        "stop.set()\n"
        "for thread in threads: thread.join(20)\n"
        "print(errors, flush=True)\n"
        "os._exit(0)\n",
        server.address,
    )
    assert process.output() == "[]"


def test_a_child_closes_what_belongs_to_its_parents_connections(
    serve: Serve, script: Script
) -> None:
    server, _ = serve(Counter())
    process = script(
        "import os\n"
        "def sockets():\n"
        "    found = 0\n"
        "    for name in os.listdir('/proc/self/fd'):\n"
        "        try: found += os.readlink(f'/proc/self/fd/{name}').startswith('socket')\n"
        "        except OSError: pass\n"
        "    return found\n"
        "client = courier.Client(sys.argv[1], secret=secret)\n"
        "client.add(1)\n"
        "mine = courier.Server(print, secret=secret)\n"
        "mine.start()\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    os._exit(sockets())\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n",
        server.address,
    )
    assert process.output() == "0"


def test_a_child_does_not_wait_for_calls_of_the_parent_within_its_process(script: Script) -> None:
    process = script(
        "import os, threading\n"
        "end = threading.Event()\n"
        "with courier.Server(end.wait, secret=secret) as server:\n"
        "    client = courier.Client(server.address, secret=secret)\n"
        "    future = client.futures(20)\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        courier.wait_for_futures(client)\n"
        "        os._exit(0)\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), future.done())\n"
        "    end.set()\n"
    )
    assert process.output() == "0 False"


_SERVE_GRPC = """
import gc, multiprocessing, time
server = courier.Server(lambda: 1, secret=secret)
server.start()
print(server.address, flush=True)
sys.stdin.readline()

def work():
    gc.collect()
    time.sleep(0.1)

fork = multiprocessing.get_context("fork")
for _ in range(5):
    children = [fork.Process(target=work) for _ in range(3)]
    for child in children: child.start()
    for child in children: child.join(20)
    print(*(child.exitcode for child in children), flush=True)
server.stop()
"""


def test_children_of_a_server_with_grpc_clients_live(script: Script) -> None:
    process = script(_SERVE_GRPC)
    with grpc.insecure_channel(process.line()) as channel:
        watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        next(iter(watching))
        assert process.output("\n").split() == ["0"] * 15


_SERVE_TWICE = """
import os, threading
server = courier.Server(lambda: 1, secret=secret)
server.start()
print(server.address, flush=True)
sys.stdin.readline()
child = os.fork()
if not child:
    again = courier.Server(lambda: 2, secret=secret)
    again.start()
    print(again.address, flush=True)
    sys.stdin.readline()
    os._exit(len(again.stop()))
print("child:", os.waitpid(child, 0)[1], flush=True)
server.stop()
"""


def test_a_forked_child_says_that_it_cannot_serve_grpc_beside_its_parent(script: Script) -> None:
    """gRPC of the child would serve the connections of its parent."""
    process = script(_SERVE_TWICE)
    with grpc.insecure_channel(process.line()) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        assert check(health_pb2.HealthCheckRequest(), timeout=20).status
        process.say()
        with grpc.insecure_channel(process.line()) as other, pytest.raises(grpc.RpcError):
            health_pb2_grpc.HealthStub(other).Check(health_pb2.HealthCheckRequest(), timeout=20)
        assert check(health_pb2.HealthCheckRequest(), timeout=20).status
        out, err = process.communicate("\n", timeout=60)
    assert out == "child: 0\n"
    assert "forkserver" in err
