"""Carriers under test: several at a time, in threads or processes, over real servers."""

import concurrent.futures
import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import courier
from launchpad_lite.replicas._carrier import Carrier
from launchpad_lite.replicas._courier_carrier import CourierCarrier
from launchpad_lite.replicas._mailbox import Box, Mailbox

#: Makes so many carriers that know each other, and closes them.
Makers = Callable[[int], "contextlib.AbstractContextManager[Sequence[Carrier]]"]

_TIMEOUT_S = 30.0


def one_machine(size: int) -> list[str]:
    """All share memory."""
    return ["here"] * size


def apart(size: int) -> list[str]:
    """None shares memory."""
    return [f"host{rank}" for rank in range(size)]


def two_machines(size: int) -> list[str]:
    """Groups of different sizes, not in order."""
    return ["far" if rank % 3 == 1 else "here" for rank in range(size)]


def courier_carriers(machines: Callable[[int], list[str]]) -> Makers:
    """Returns what makes carriers over courier in this process."""

    @contextlib.contextmanager
    def make(size: int) -> Iterator[Sequence[Carrier]]:
        with contextlib.ExitStack() as stack:
            boxes = [Box() for _ in range(size)]
            clients = []
            for box in boxes:
                server = stack.enter_context(courier.Server(Mailbox(box), in_process="wire"))
                clients.append(courier.Client(server.address))
                stack.callback(courier.close, clients[-1])
            made = [
                CourierCarrier(rank, box, clients, machines(size)) for rank, box in enumerate(boxes)
            ]
            for carrier in made:
                stack.callback(carrier.close)
            yield made

    return make


def shared_memories() -> int:
    """Returns how many descriptors of shared memory this process has."""
    found = 0
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            found += each.readlink().name.startswith("memfd:launchpad-replica")
    return found


def run(
    carriers: Sequence[Carrier], function: Callable[[Carrier], Any], timeout_s: float = _TIMEOUT_S
) -> list[Any]:
    """Calls a function with each carrier at the same time; returns results or errors, by rank."""
    with concurrent.futures.ThreadPoolExecutor(len(carriers)) as pool:
        futures = [pool.submit(function, carrier) for carrier in carriers]
        done, late = concurrent.futures.wait(futures, timeout_s)
        for carrier in carriers if late else []:
            carrier.abort(TimeoutError("the test takes too long"))
        assert not late, f"{len(late)} of {len(futures)} hang"
        assert len(done) == len(carriers)
        return [future.exception() or future.result() for future in futures]


class Process:
    """A replica in a process of its own. It is told what to do through a pipe."""

    def __init__(self, machine: str) -> None:
        context = multiprocessing.get_context("fork")
        self.machine = machine
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.address: str = self._pipe.recv()

    def connect(self, rank: int, addresses: Sequence[str], machines: Sequence[str]) -> None:
        """Tells it of the others."""
        self._pipe.send((rank, addresses, machines))

    def begin(self, function: Callable[[Carrier], Any]) -> None:
        """Has it call a function, which can be pickled, with its carrier."""
        self._pipe.send(function)

    def result(self, timeout_s: float = _TIMEOUT_S) -> Any:
        """Returns what became of it, or the error."""
        assert self._pipe.poll(timeout_s), "a replica hangs"
        return self._pipe.recv()

    def end(self) -> None:
        """Ends it."""
        self._pipe.close()
        self.process.kill()
        self.process.join()


@contextlib.contextmanager
def processes(machines: Sequence[str]) -> Iterator[list[Process]]:
    """Starts a process for each replica."""
    with contextlib.ExitStack() as stack:
        made = []
        for machine in machines:
            made.append(Process(machine))
            stack.callback(made[-1].end)
        for rank, process in enumerate(made):
            process.connect(rank, [each.address for each in made], machines)
        yield made


def call_all(members: Sequence[Process], function: Callable[[Carrier], Any]) -> list[Any]:
    """Has each call a function at the same time; returns results or errors."""
    for each in members:
        each.begin(function)
    return [each.result() for each in members]


def _serve(pipe: Any) -> None:
    box = Box()
    with courier.Server(Mailbox(box)) as server:
        pipe.send(server.address)
        rank, addresses, machines = pipe.recv()
        clients = [courier.Client(address) for address in addresses]
        carrier = CourierCarrier(rank, box, clients, machines)
        with contextlib.suppress(EOFError, OSError):
            while True:
                function = pipe.recv()
                try:
                    result = function(carrier)
                except Exception as error:  # noqa: BLE001 - the test looks at it
                    result = error
                pipe.send(result)
    os._exit(0)
