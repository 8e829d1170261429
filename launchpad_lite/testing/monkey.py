"""Faults for running programs: proof that yours survives what its machines will do to it.

    def test_it_survives(launch_program):
        running = launch_program(make_program(), "test_mp")
        with Monkey(running, seed=7, labels=("evaluator",)) as monkey:
            result = running.wait()
        assert monkey.injected

Linux only: each signal goes through a pidfd, so that it can hit no process that
got the number of one that ended.
"""

import contextlib
import enum
import heapq
import itertools
import os
import random
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import psutil

from launchpad_lite.launching import RunningProgram
from launchpad_lite.testing.programs import LaunchedProgram

#: How long a DELAY stops its victim, and lets it go on in between, in seconds.
_BURST_S = (0.02, 0.2)
#: How often a DELAY does so.
_BURSTS = (3, 6)
#: How exactly the time is known at which a worker came up.
_WATCH_S = 0.02
_UP = ("running", "serving")

#: What is to be done, a piece at a time; yields the seconds until the next.
_Steps = Generator[float, None, None]


class Fault(enum.Enum):
    """What can happen to a worker."""

    KILL = "kill"  # it is gone, without a last word (SIGKILL)
    PAUSE = "pause"  # it does nothing for a while, as on a machine that swaps (SIGSTOP)
    DELAY = "delay"  # it is slow: some short pauses, one after the other


@dataclass(frozen=True)
class Injected:
    """A fault that took place.

    Attributes:
        fault: What it was.
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
    fault at the moment; there may be none, and then nothing happens. The seed decides which
    faults come when; what the program does decides whom they can hit.

    At the end of the block no worker is left paused. An error of the monkey's own is raised there,
    unless the block raises one.

    Hits only processes on this machine that descend from this one and that the program says are
    its workers. One thread; use it as a context manager, once.

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
        """Chooses what may happen; nothing does before the block begins.

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
            NotImplementedError: This system has no pidfds.
            TypeError: Nodes are threads of this process, or run on other machines.
            ValueError: No fault is named, a label is unknown, or a time makes no sense.
        """
        _require_pidfds()
        self._running = running.running if isinstance(running, LaunchedProgram) else running
        self._faults = tuple(faults)
        self._labels = _checked_labels(self._running, labels)
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
        #: Those under a fault that has not ended; a KILL never does, but takes a moment.
        self._afflicted: set[_Name] = set()
        #: Those that are up.
        self._workers: dict[_Name, _Worker] = {}
        #: What is to be done when; the number in the middle decides between equals.
        self._agenda: list[tuple[float, int, _Steps]] = []
        self._numbers = itertools.count()
        self._began_at = 0.0
        self._error: BaseException | None = None
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._work, name="launchpad-monkey", daemon=True)
        self._nodes_up()

    @property
    def injected(self) -> list[Injected]:
        """What took place so far, in order. From any thread."""
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
            self._advance(self._watch())
            self._advance(self._strike_again_and_again())
            while not self._leaving.wait(max(0.0, self._agenda[0][0] - time.monotonic())):
                self._advance(heapq.heappop(self._agenda)[2])
        except BaseException as error:  # noqa: BLE001 - raised where the block ends
            self._error = error
        finally:
            self._undo_all()

    def _undo_all(self) -> None:
        # Each undoes what it did when it is closed, whatever comes of closing the others.
        with contextlib.ExitStack() as undo:
            for _, _, steps in self._agenda:
                undo.callback(steps.close)

    def _advance(self, steps: _Steps) -> None:
        with contextlib.suppress(StopIteration):
            again_at = time.monotonic() + next(steps)
            heapq.heappush(self._agenda, (again_at, next(self._numbers), steps))

    def _watch(self) -> _Steps:
        """Notes who comes up, and when."""
        while True:
            workers = {name: self._workers.get(name) or _sight(name) for name in self._nodes_up()}
            self._workers = {name: worker for name, worker in workers.items() if worker is not None}
            yield _WATCH_S

    def _strike_again_and_again(self) -> _Steps:
        while True:
            yield self._random.expovariate(1 / self._mean_interval_s)
            fault = self._random.choice(self._faults)
            # Of its own, so that what this fault draws, or does not, leaves the next as they are.
            draw = random.Random(self._random.getrandbits(64))  # noqa: S311
            if victims := self._victims():
                self._advance(self._inflict(fault, draw.choice(victims), draw))

    def _victims(self) -> "list[_Worker]":
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

    def _inflict(self, fault: Fault, worker: "_Worker", draw: random.Random) -> _Steps:
        with self._hold(worker) as process:
            if process is None:
                return
            self._afflicted.add(worker.name)
            try:
                if not process.signal(signal.SIGKILL if fault is Fault.KILL else signal.SIGSTOP):
                    return
                at_s = time.monotonic() - self._began_at
                self._injected.append(Injected(fault, *worker.name, at_s))
                if fault is Fault.PAUSE:
                    yield draw.uniform(0.0, self._max_pause_s)
                elif fault is Fault.DELAY:
                    yield from _bursts(process, draw)
            finally:
                if fault is not Fault.KILL:
                    self._afflicted.discard(worker.name)
                    process.signal(signal.SIGCONT)

    @contextlib.contextmanager
    def _hold(self, worker: "_Worker") -> Iterator["_Process | None"]:
        """Gives a hold on a worker's process; None if it has ended."""
        try:
            fd = os.pidfd_open(worker.pid)
        except ProcessLookupError:
            yield None
            return
        try:
            process = _Process(fd)
            # Asked in this order: the owner of the number is known only because we hold a process, and
            # it is the one we hold only if that one has not ended when we have asked.
            is_it = (
                worker.name in self._nodes_up()
                and worker.process.is_running()
                and process.is_alive()
            )
            yield process if is_it else None
        finally:
            os.close(fd)


class _Name(NamedTuple):
    """What tells one worker from all others of the program."""

    node: str
    attempt: int
    pid: int


@dataclass(frozen=True)
class _Worker:
    """A worker that is up.

    Attributes:
        process: Knows, besides the pid, when its process was started, which tells it from others
            that get the number later.
        up_since: When it was first seen up, in seconds of the monotonic clock.
    """

    name: _Name
    process: psutil.Process
    up_since: float

    @property
    def pid(self) -> int:
        return self.name.pid

    @property
    def label(self) -> str:
        return self.name.node.partition("[")[0]


def _sight(name: _Name) -> _Worker | None:
    """Makes the acquaintance of a worker; None if its process has ended, or is not of our making."""
    try:
        process = psutil.Process(name.pid)
        ours = any(parent.pid == os.getpid() for parent in process.parents())
    except psutil.Error:
        return None
    return _Worker(name, process, time.monotonic()) if ours else None


class _Process:
    """A process that cannot be mistaken for another."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def is_alive(self) -> bool:
        """Whether it runs; a zombie does not."""
        # A pidfd can be read, so to speak, when its process has ended, reaped or not.
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return not poll.poll(0)

    def signal(self, signum: int) -> bool:
        """Sends a signal; returns whether the process was still there."""
        try:
            signal.pidfd_send_signal(self._fd, signum)
        except ProcessLookupError:
            return False
        return True


def _bursts(process: _Process, draw: random.Random) -> _Steps:
    """Goes on with a first stop that has been made already."""
    for burst in range(draw.randint(*_BURSTS)):
        if burst and not process.signal(signal.SIGSTOP):
            return
        yield draw.uniform(*_BURST_S)
        process.signal(signal.SIGCONT)
        yield draw.uniform(*_BURST_S)


def _checked_labels(running: RunningProgram, labels: Collection[str] | None) -> frozenset[str]:
    known = {executable.label for executable in running.plan.executables}
    if labels is None:
        return frozenset(known)
    if unknown := sorted(set(labels) - known):
        raise ValueError(f"no group {unknown[0]!r}; there are: {', '.join(sorted(known))}")
    return frozenset(labels)


def _require_pidfds() -> None:
    if hasattr(os, "pidfd_open") and hasattr(signal, "pidfd_send_signal"):
        try:
            os.close(os.pidfd_open(os.getpid()))
        except OSError as error:  # an old kernel, or a sandbox
            reason = f"os.pidfd_open fails: {error}"
        else:
            return
    else:
        reason = f"this Python on {sys.platform} has no os.pidfd_open"
    raise NotImplementedError(f"a monkey needs pidfds, so Linux 5.3 or newer; {reason}")
