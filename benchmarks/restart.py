"""How long a node that was killed is gone, and how long a program takes to stop.

    python -m benchmarks.restart --kills=40 --nodes=50 --rounds=7

Restart: from the SIGKILL of a worker until a client of its node has the answer to its next call.
Beside it a floor: to kill, to fork, and to connect, with nothing in between. Stop: from `stop()`
until all processes are gone, of nodes that call one another in different ways.
"""

import argparse
import contextlib
import os
import signal
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import courier
import launchpad_lite as lp

#: As the default policy, but each failure is forgotten at once, so that the delay does not grow.
DEFAULT = lp.RestartPolicy(window_s=0.001)
AT_ONCE = lp.RestartPolicy(window_s=0.001, backoff_s=0.0)


class Target:
    """Knows since when it is there."""

    def __init__(self) -> None:
        # All processes of a machine have the same monotonic clock.
        self._since = time.monotonic()

    @courier.idempotent  # in the moment of the kill it may go to the old connection still
    def since(self) -> float:
        """Returns when it was constructed."""
        return self._since

    def wait(self) -> None:
        """Answers too late."""
        time.sleep(3600)


def restart_times(policy: lp.RestartPolicy, kills: int) -> Iterator[tuple[float, float, float]]:
    """Yields seconds from a kill until a caller is told, the object is there again, and answers."""
    program = lp.Program("restart")
    handle = program.add_node(lp.CourierNode(Target), label="target")
    with lp.launch(program, "test_mp", restart=policy) as running:
        client: Any = handle.dereference()
        for _ in range(kills):
            client.since()
            lost = client.futures.wait()
            time.sleep(0.1)  # it has arrived
            (node,) = running.status()
            assert node.pid is not None
            os.kill(node.pid, signal.SIGKILL)
            killed_at = time.monotonic()
            with contextlib.suppress(courier.ServerLostError):
                lost.result()
            told_at = time.monotonic()
            since = client.since()
            yield told_at - killed_at, since - killed_at, time.monotonic() - killed_at


def floor_times(kills: int) -> Iterator[float]:
    """Yields seconds from the kill of a process until the next one answers with one byte."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        pid = _fork_answering(server)
        for _ in range(kills):
            started_at = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            pid = _fork_answering(server)
            with socket.create_connection(server.getsockname()) as client:
                client.recv(1)
            yield time.monotonic() - started_at
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _fork_answering(server: socket.socket) -> int:
    pid = os.fork()
    if pid == 0:
        while True:
            server.accept()[0].send(b"x")
    return pid


class Link:
    """A node that may call another one."""

    def __init__(self, other: Any = None) -> None:
        self._other = other

    def reach(self) -> int:
        """Returns how many links there are from here to the end."""
        return 1 if self._other is None else 1 + int(self._other.reach())


class Caller(Link):
    """Calls on and on."""

    def run(self) -> None:
        """Calls."""
        while not lp.wait_for_stop(0.1):
            self._other.reach()


def stop_time(shape: str, nodes: int) -> float:
    """Returns the seconds that a program takes to stop after all its nodes have been called."""
    program = lp.Program("stop")
    handles: list[Any] = []
    with program.group("link"):
        for index in range(nodes):
            node: lp.CourierNode[Any] = lp.CourierNode(Link)
            if index and shape == "star":
                node = lp.CourierNode(Caller, handles[0])
            elif index and shape == "chain":
                node = lp.CourierNode(Link, handles[-1])
            handles.append(program.add_node(node))
    with lp.launch(program, "test_mp") as running:
        for future in [handle.dereference().futures.reach() for handle in handles]:
            future.result()
        started_at = time.monotonic()
        running.stop()
        return time.monotonic() - started_at


def main() -> None:
    """Measures and prints medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--nodes", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()

    print(f"restart, median of {options.kills} kills (fastest to slowest)")
    for name, policy in (("without back-off", AT_ONCE), ("default back-off", DEFAULT)):
        told, there, answers = zip(*restart_times(policy, options.kills), strict=True)
        print(f"  {name}")
        _show("  the call in flight has failed", told)
        _show("  the object is there again", there)
        _show("  the next call is answered", answers)
    _show("floor: kill, fork, connect", list(floor_times(options.kills)))

    print(f"stop of {options.nodes} nodes, median of {options.rounds} rounds")
    for shape, name in (
        ("independent", "they do not call each other"),
        ("star", "all but one call that one"),
        ("chain", "each calls the next"),
    ):
        _show(name, [stop_time(shape, options.nodes) for _ in range(options.rounds)])


def _show(name: str, seconds: Sequence[float]) -> None:
    fastest, median, slowest = min(seconds), statistics.median(seconds), max(seconds)
    print(f"  {name:36s} {median:7.3f} s  ({fastest:.3f} to {slowest:.3f})")


if __name__ == "__main__":
    main()
