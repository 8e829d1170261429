"""Injects faults into running programs, to show that yours survives them.

psutil sends the signals: it hits no other process that has got the number of a worker meanwhile.
"""

import asyncio
import enum
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import psutil

from launchpad_lite.launching import RunningProgram
from launchpad_lite.testing.programs import LaunchedProgram

#: How long a DELAY stops its victim, and lets it go on in between, in seconds.
_BURST_S = (0.02, 0.2)
_BURSTS = (3, 6)  # how often a DELAY does so
_WATCH_S = 0.02  # the accuracy of the time at which a worker came up
_UP = ("running", "serving")


class Fault(enum.Enum):
    """A kind of fault of a worker."""

    KILL = "kill"  # it ends without notice (SIGKILL)
    PAUSE = "pause"  # it stands still for a while, as on a machine that swaps (SIGSTOP)
    DELAY = "delay"  # it is slow: some short pauses, one after the other


@dataclass(frozen=True)
class Injected:
    """A fault that took place.

    Attributes:
        fault: Its kind.
        node: `label[replica]`.
        attempt: How often the node had been restarted before; of a `NodeFailure` that the
            fault led to, it is the same.
        pid: The process of the worker.
        at_s: Seconds since the beginning of the block.

    Example:
        for injected in monkey.injected:
            print(injected.at_s, injected.fault, injected.node)
    """

    fault: Fault
    node: str
    attempt: int
    pid: int
    at_s: float


class Monkey:
    """Injects faults into the workers of a running program, from `with` to the end of the block.

    The faults come at random times. Victims are drawn from the nodes that are up and under no
    fault at the moment; there may be none, and then nothing happens. The seed decides which faults
    come when; the program decides which nodes they can hit.

    At the end of the block no worker is left paused. Errors of the monkey are raised there, unless
    the block raises one.

    Hits only descendants of this process that the program reports as its workers. One thread; use
    it as a context manager, once.

    Example:
        with Monkey(running, seed=1, faults=[Fault.KILL], labels={"actor"}) as monkey:
            time.sleep(10)
        print(monkey.injected)
    """

    def __init__(
        self,
        running: RunningProgram | LaunchedProgram,
        *,
        seed: int,
        faults: Sequence[Fault] = tuple(Fault),
        mean_interval_s: float = 1.0,
        labels: Collection[str] | None = None,
        max_pause_s: float = 1.0,
        minimum_uptime_s: float = 0.0,
    ) -> None:
        """Chooses the faults; none comes before the block.

        Args:
            running: The program.
            seed: Decides which faults come when.
            faults: Which may come; one named twice comes twice as often.
            mean_interval_s: Seconds between two faults, on average (exponentially distributed).
            labels: Groups whose nodes may be hit; None means all.
            max_pause_s: The longest PAUSE, in seconds.
            minimum_uptime_s: Seconds for which a worker that has started, or restarted, is left
                alone.

        Raises:
            TypeError: Nodes are threads of this process, or run on other machines.
            ValueError: No fault is named, a label is unknown, or a time makes no sense.
        """
        self._running = running.running if isinstance(running, LaunchedProgram) else running
        self._faults = tuple(faults)
        known = {executable.label for executable in self._running.plan.executables}
        self._labels = known if labels is None else {*labels}
        if unknown := sorted(self._labels - known):
            raise ValueError(f"no group {unknown[0]!r}; there are: {', '.join(sorted(known))}")
        if not self._faults:
            raise ValueError("a monkey needs at least one fault")
        if mean_interval_s <= 0 or max_pause_s <= 0 or minimum_uptime_s < 0:
            raise ValueError(
                "mean_interval_s and max_pause_s are above 0 and minimum_uptime_s is not below, "
                f"not {mean_interval_s}, {max_pause_s} and {minimum_uptime_s}"
            )
        self._mean_interval_s = mean_interval_s
        self._max_pause_s = max_pause_s
        self._minimum_uptime_s = minimum_uptime_s
        self._random = random.Random(seed)  # noqa: S311 - faults, no secrets
        self._injected: list[Injected] = []
        #: Workers under a fault that has not ended; a KILL never does, but takes a moment.
        self._afflicted: set[_Name] = set()
        self._workers: dict[_Name, _RunningWorker] = {}  # workers that are up
        #: Faults that have not ended.
        self._faulty: set[asyncio.Future[None]] = set()
        self._began_at = 0.0
        self._error: BaseException | None = None
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._work, name="launchpad-monkey", daemon=True)
        self._nodes_up()

    @property
    def injected(self) -> list[Injected]:
        """The faults so far, in order. From any thread."""
        return list(self._injected)

    def __enter__(self) -> "Monkey":
        self._began_at = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self._leaving.set()
        self._thread.join()
        if self._error is not None and kind is None:
            raise self._error

    # Its thread

    def _work(self) -> None:
        try:
            asyncio.run(self._inject())
        except BaseException as error:  # noqa: BLE001 - raised at the end of the block
            self._error = error

    async def _inject(self) -> None:
        """Notes workers that come up, and when, while faults are injected."""
        strikes = asyncio.ensure_future(self._strike_again_and_again())
        while not self._leaving.is_set():
            workers = {name: self._workers.get(name) or _sight(name) for name in self._nodes_up()}
            self._workers = {name: worker for name, worker in workers.items() if worker is not None}
            await asyncio.wait({strikes, *self._faulty}, timeout=_WATCH_S)
            for each in [task for task in (strikes, *self._faulty) if task.done()]:
                self._faulty.discard(each)
                each.result()
        # The end of the loop cancels all faults, which undoes them.

    async def _strike_again_and_again(self) -> None:
        while True:
            await asyncio.sleep(self._random.expovariate(1 / self._mean_interval_s))
            fault = self._random.choice(self._faults)
            # Its own generator, so that the draws of one fault do not change later faults.
            draw = random.Random(self._random.getrandbits(64))  # noqa: S311
            if victims := self._victims():
                inflicting = self._inflict(fault, draw.choice(victims), draw)
                self._faulty.add(asyncio.ensure_future(inflicting))

    def _victims(self) -> "list[_RunningWorker]":
        latest = time.monotonic() - self._minimum_uptime_s
        return [
            worker
            for worker in self._workers.values()
            if worker.label in self._labels
            and worker.name not in self._afflicted
            and worker.up_since <= latest
        ]

    def _nodes_up(self) -> "list[_Name]":
        nodes = [(node, node.pid) for node in self._running.status() if node.pid is not None]
        for node, pid in nodes:
            if pid == os.getpid():
                raise TypeError(
                    f"{node.name} is a thread of this process; a monkey needs nodes that are "
                    "processes: launch with test_mp or local_mp"
                )
            if node.host not in ("localhost", socket.gethostname()):
                raise TypeError(
                    f"{node.name} runs on {node.host}; a monkey reaches this machine only"
                )
        return [_Name(node.name, node.restarts, pid) for node, pid in nodes if node.state in _UP]

    async def _inflict(self, fault: Fault, worker: "_RunningWorker", draw: random.Random) -> None:
        first = signal.SIGKILL if fault is Fault.KILL else signal.SIGSTOP
        if worker.name not in self._nodes_up() or not worker.signal(first):
            return
        self._afflicted.add(worker.name)
        try:
            at_s = time.monotonic() - self._began_at
            self._injected.append(Injected(fault, *worker.name, at_s))
            if fault is Fault.PAUSE:
                await asyncio.sleep(draw.uniform(0.0, self._max_pause_s))
            elif fault is Fault.DELAY:
                await _bursts(worker, draw)
        finally:
            if fault is not Fault.KILL:
                self._afflicted.discard(worker.name)
                worker.signal(signal.SIGCONT)


class _Name(NamedTuple):
    """Identifies one worker among all of the program."""

    node: str
    attempt: int
    pid: int


@dataclass(frozen=True)
class _RunningWorker:
    """A worker that is up."""

    name: _Name
    #: Knows its start time, so that another process with its number is not taken for it.
    process: psutil.Process
    up_since: float  # when it was first seen up, in seconds of the monotonic clock

    @property
    def label(self) -> str:
        return self.name.node.partition("[")[0]

    def signal(self, signum: int) -> bool:
        """Sends a signal; returns whether the process was still there. A zombie is not."""
        try:
            if self.process.status() == psutil.STATUS_ZOMBIE:
                return False
            self.process.send_signal(signum)
        except psutil.Error:
            return False
        return True


def _sight(name: _Name) -> _RunningWorker | None:
    """Returns a worker; None if its process has ended, or does not descend from this one."""
    try:
        process = psutil.Process(name.pid)
        ours = any(parent.pid == os.getpid() for parent in process.parents())
    except psutil.Error:
        return None
    return _RunningWorker(name, process, time.monotonic()) if ours else None


async def _bursts(worker: _RunningWorker, draw: random.Random) -> None:
    """Goes on after a first stop that was sent already."""
    for burst in range(draw.randint(*_BURSTS)):
        if burst and not worker.signal(signal.SIGSTOP):
            return
        await asyncio.sleep(draw.uniform(*_BURST_S))
        worker.signal(signal.SIGCONT)
        await asyncio.sleep(draw.uniform(*_BURST_S))
