"""What the peers of `benchmarks.all_reduce` have in common: ranks that add up arrays together."""

import functools
import json
import multiprocessing.connection
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import harness

_KEY = b"reductions"
#: Where this rank is, and the folder of its certificates, if they are to be used.
HOST = os.environ.get("RANK_HOST", "127.0.0.1")
TLS = os.environ.get("RANK_TLS")


class Rank:
    """One of the processes that add up arrays."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def address(self) -> Any:
        """Returns what the others need to know of this rank."""

    def join(self, addresses: Sequence[Any]) -> None:
        """Connects to the others."""
        raise NotImplementedError

    def array(self, nbytes: int) -> Any:
        """Returns an array of float32 ones, of the kind that is fastest."""
        import numpy as np

        return np.ones(nbytes // 4, np.float32)

    def reduce(self, array: Any) -> Any:
        """Returns the sum of the arrays of all ranks; or writes it into the array."""
        raise NotImplementedError

    def fill(self, array: Any, value: float) -> None:
        """Makes all numbers of an array the same."""
        array[:] = value


def _prepare(rank: Rank, nbytes: int) -> Any:
    array = rank.array(nbytes)
    for _ in range(2):
        rank.fill(array, 1.0)
        result = rank.reduce(array)
        result = array if result is None else result
        assert float(result[0]) == float(result[-1]) == rank.size, result
    return array


class Ranks:
    """The ranks, as this process sees them: each has a connection."""

    def __init__(self, connections: Sequence[Any]) -> None:
        self._connections = connections

    def all(self, do: str, argument: Any) -> list[Any]:
        """Has each rank do something; returns what came of it."""
        for connection in self._connections:
            connection.send((do, argument))
        answers = [connection.recv() for connection in self._connections]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers


def serve_rank(make: Callable[[int, int], Rank], rank: int, size: int, address: str) -> None:
    """Does what the starter asks for, as one rank, until nothing more is asked."""
    own = make(rank, size)  # before the starter waits for this one: some wait for all others
    with multiprocessing.connection.Client(address, authkey=_KEY) as connection:
        array: Any = None
        connection.send((own.rank, own.address()))
        while True:
            try:
                do, argument = connection.recv()
            except EOFError:
                os._exit(0)
            try:
                result: Any = None
                if do == "join":
                    own.join(argument)
                elif do == "prepare":
                    array = None
                    array = _prepare(own, argument) if argument else None
                else:
                    result = _times(own, array, argument)
            except Exception as error:  # noqa: BLE001 - the starter raises it
                result = RuntimeError(f"rank {rank}: {error!r}")
            connection.send(result)


def _times(rank: Rank, array: Any, calls: int) -> tuple[float, float]:
    """Returns seconds and page faults per call."""
    rank.fill(array, 0.0)  # so that sums stay what they are
    rank.reduce(array)
    faults = _page_faults()
    began_at = time.perf_counter()
    for _ in range(calls):
        rank.reduce(array)
    took = time.perf_counter() - began_at
    return took / calls, (_page_faults() - faults) / calls


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def main(
    make: Callable[[int, int], Rank], launch: Callable[[int, str], None] | None = None
) -> None:
    """Plays the starter of the ranks, or one of them.

    Args:
        make: Makes a rank, from its number and how many there are.
        launch: Starts so many ranks, which call `serve_rank` with an address. By default each is
            this script.
    """
    if len(sys.argv) > 1:
        serve_rank(make, int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
        return
    answers = harness.open_answers()
    hosts = json.loads(sys.stdin.readline()).get("hosts", [])
    started: list[Ranks] = []

    def start(workers: int) -> None:
        started.append(Ranks(_start(workers, launch or functools.partial(run_script, hosts=hosts))))

    def prepare(size: int) -> None:
        started[0].all("prepare", size)

    def measure(calls: int) -> tuple[float, float]:
        """Returns seconds and page faults per call, of the slowest rank."""
        return tuple(map(max, zip(*started[0].all("measure", calls), strict=True)))

    calls = {"start": start, "prepare": prepare, "measure": measure}
    for line in sys.stdin:
        request = json.loads(line)
        call = calls[request.pop("do")]
        harness.answer(answers, lambda call=call, request=request: call(**request))


def run_script(workers: int, address: str, hosts: Sequence[Any]) -> None:
    """Starts ranks that run this script; on each host, by its command and with its variables."""
    for rank in range(workers):
        prefix, variables = hosts[rank] if hosts else ((), {})
        command = [*prefix, sys.executable, sys.argv[0], str(rank), str(workers), address]
        subprocess.Popen(command, env={**os.environ, **variables})


def _start(workers: int, launch: Callable[[int, str], None]) -> list[Any]:
    """Starts the ranks; returns their connections, in order, when they are connected."""
    with multiprocessing.connection.Listener(backlog=64, authkey=_KEY) as listener:
        launch(workers, str(listener.address))
        connections, addresses = {}, {}
        for _ in range(workers):
            connection = listener.accept()
            rank, addresses[rank] = connection.recv()
            connections[rank] = connection
    ranks = [connections[rank] for rank in range(workers)]
    Ranks(ranks).all("join", [addresses[rank] for rank in range(workers)])
    return ranks
