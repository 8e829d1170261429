"""`why` names the true cause of each program that hangs in its own way."""

import asyncio
import concurrent.futures
import contextlib
import os
import queue
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import courier
import launchpad_lite as lp
from launchpad_lite import engines, rollouts
from launchpad_lite.testing import poll_until

# Nodes as threads are ended by force, which may hit a finaliser, where Python ignores it.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Part:
    """Does what a scenario says: a method of its own, or `other.` and one of the next."""

    def __init__(self, others: Sequence[Any], does: str = "") -> None:
        self._others, self._does = others, does
        self._lock = threading.RLock()

    def run(self) -> None:
        *of_other, method = self._does.split(".")
        if method:
            getattr(self._others[0] if of_other else self, method)()
        lp.wait_for_stop()

    # What hangs in calls

    def ask(self) -> None:
        self._others[0].ask()

    def ask_by_future(self) -> None:
        self._others[0].futures.ask_by_future().result()

    def wait_for_all(self) -> None:
        concurrent.futures.wait([self._others[0].futures.wait_for_all()])

    async def ask_async(self) -> None:
        await self._others[0].aio.ask_async()

    async def sleep_async(self) -> None:
        await asyncio.sleep(3600)

    def items(self) -> Iterator[int]:
        yield from self._others[0].items()

    def read(self) -> None:
        next(self._others[0].items())

    def have_computed(self) -> None:
        self._others[0].compute()

    def ask_again(self) -> None:
        while not lp.stop_event().is_set():
            with contextlib.suppress(courier.CourierError):
                self._others[0].slow()

    def ask_in_a_task(self) -> None:
        async def main() -> None:
            await asyncio.gather(asyncio.wait_for(self._others[0].aio.slow(), 3600))

        asyncio.run(main())

    def ask_by_a_task(self) -> None:
        async def main() -> None:
            await asyncio.gather(asyncio.create_task(self._others[0].aio.slow()))

        asyncio.run(main())

    def ask_in_threads(self) -> None:
        threads = [threading.Thread(target=self._others[0].slow) for _ in range(3)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()

    def act(self) -> None:
        self._others[0].act(1)

    def slow(self) -> None:
        lp.stop_event().wait(3600)

    def stream(self) -> Iterator[bytes]:
        while True:
            yield bytes(1 << 20)

    def read_one(self) -> None:
        items = self._others[0].stream()
        next(items)
        self._others[0].slow()

    # What hangs in a node

    def compute(self) -> None:
        while not lp.stop_event().is_set():
            sum(range(1000))

    def hold_interpreter(self) -> None:
        re.match(r"(a+)+$", "a" * 64 + "b")

    def sleep(self) -> None:
        time.sleep(3600)

    def read_input(self) -> None:
        descriptor = os.dup(os.pipe()[0])
        os.read(descriptor, 1)

    def wait_for_process(self) -> None:
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as child:
            child.wait()  # ends with this process

    def wait_for_queue(self) -> None:
        queue.Queue[int]().get()

    def wait_for_lock(self) -> None:
        taken = threading.Event()

        def keep() -> None:
            with self._lock:
                taken.set()
                time.sleep(3600)

        threading.Thread(target=keep, name="keeper", daemon=True).start()
        taken.wait()
        with self._lock:
            pass

    def stop_itself(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


class Batch:
    """Answers three calls together."""

    def __init__(self) -> None:
        self.act = lp.batched_handler(batch_size=3, timeout_s=None)(list)


class Late:
    """Is never constructed."""

    def __init__(self) -> None:
        lp.stop_event().wait(3600)

    def slow(self) -> None:
        pass


class Fails:
    """Fails again and again."""

    def run(self) -> None:
        raise RuntimeError("again")

    def slow(self) -> None:
        pass


class Lagging(engines.ParameterServer):
    """One of its workers makes no step."""

    def initial(self) -> dict[str, int]:
        return {"a": 0}

    def push(self, worker: str, values: Any) -> Any:
        if lp.current_node().replica == 1:
            lp.stop_event().wait(3600)
        return values


class Generator:
    """Never ends its last rollout."""

    def generate(self, prompt: int, weights: Any) -> int:
        if prompt == 3:
            time.sleep(3600)
        return prompt


class Trainer:
    """Trains until the end of the prompts."""

    def __init__(self, made: rollouts.RolloutsClient) -> None:
        self._made = made

    def run(self) -> None:
        self._made.publish({"w": np.zeros(1)})
        for _ in self._made.batches(groups=4):
            self._made.publish({"w": np.zeros(1)})


def _parts(*parts: tuple[str, Sequence[int]], **options: Any) -> lp.Program:
    """Returns a program of nodes a, b, ...: what each does, and the others that it is given."""
    program = lp.Program("hangs")
    nodes = [lp.CourierNode(Part, None, does, **options) for does, _ in parts]
    handles = [node.create_handle() for node in nodes]
    for index, (node, (does, others)) in enumerate(zip(nodes, parts, strict=True)):
        node.configure([handles[each] for each in others], does)
        with program.group("abcdefgh"[index]):
            program.add_node(node)
    return program


def _given(node: lp.CourierNode[Any], does: str) -> lp.Program:
    """Returns a program in which a calls b, which is this node."""
    program = lp.Program("hangs")
    with program.group("b"):
        other = program.add_node(node)
    with program.group("a"):
        program.add_node(lp.CourierNode(Part, [other], does))
    return program


def _colocated() -> lp.Program:
    program = lp.Program("hangs")
    nodes = [lp.CourierNode(Part, None, "ask" * (not index), serial=True) for index in range(2)]
    for index, node in enumerate(nodes):
        node.configure([nodes[1 - index].create_handle()], "ask" * (not index))
    first = lp.PyNode(lp.wait_for_stop)
    with program.group("both"):
        program.add_node(lp.ColocationNode([nodes[0], first]))
    with program.group("b"):
        program.add_node(nodes[1])
    return program


def _airport() -> lp.Program:
    """Towers, gates and planes: each serves one call at a time, and asks the next."""
    return _parts(
        ("ask", [1]), ("", [2]), ("", [3]), ("", [1]), ("ask", [1]), ("ask", [2]), serial=True
    )


def _pool_without_replicas() -> lp.Program:
    program = lp.Program("hangs")
    with program.group("b"):
        late = [program.add_node(lp.CourierNode(Late)) for _ in range(2)]
    with program.group("a"):
        program.add_node(lp.CourierNode(Part, [lp.Pool(late)], "other.slow"))
    return program


def _lagging() -> lp.Program:
    program = lp.Program("hangs")
    Lagging().add_to(program, workers=2, progress_s=None)
    return program


def _short_group() -> lp.Program:
    program = lp.Program("hangs")
    made = rollouts.Rollouts(range(4), group_size=1, max_staleness=0).add_to(
        program, generator=Generator, generators=2
    )
    program.add_node(lp.CourierNode(Trainer, made), label="trainer")
    return program


#: By name: what makes the program, and what `why` must say, in lines of its own if it is several.
SCENARIOS: dict[str, tuple[Callable[[], lp.Program], str]] = {
    "futures": (lambda: _parts(("ask_by_future", [1]), ("", [0]), serial=True), r"deadlock: (.\[0\].ask_by_future → ){2}"),
    "tasks": (lambda: _parts(("other.ask_async", [1]), ("", [0]), serial=True), r"deadlock: (.\[0\].ask_async → ){2}"),
    "all": (lambda: _parts(("wait_for_all", [1]), ("", [0]), serial=True), r"deadlock: (.\[0\].wait_for_all → ){2}"),
    "streams": (lambda: _parts(("read", [1]), ("", [0])), r"deadlock: (.\[0\].items → ){2}"),
    "three": (lambda: _parts(("ask", [1]), ("", [2]), ("", [0]), serial=True), r"deadlock: (.\[0\].ask → ){3}(.*\n)+  b\[0\].ask waits for c\[0\]: ask \(test_hangs.py:(.*\n)+.* which waits for a thread: all run ask \(test_hangs.py:"),
    "colocation": (_colocated, r"deadlock: (.*ask → ){2}"),
    "airport": (_airport, r"deadlock: (.*ask → ){3}"),
    "threads": (lambda: _parts(("ask_in_threads", [1]), ("", []), thread_pool_size=1), r"waits? for b\[0\].slow, which waits for an event, for some time at most \(test_hangs.py:"),
    "stream": (lambda: _parts(("read_one", [1]), ("", [])), r"a\[0\].run waits for b\[0\].slow"),
    "computing": (lambda: _parts(("compute", [])), r"a\[0\].run computes \(test_hangs.py:\d+: (sum|while)"),
    "callers": (lambda: _parts(("other.have_computed", [1]), ("", [2]), ("", [])), r"a\[0\].run, b\[0\].have_computed wait for c\[0\].compute, which computes \(test_hangs.py:"),
    "interpreter": (lambda: _parts(("other.slow", [1]), ("hold_interpreter", [])), r"b\[0\], which does not answer: .*holds the (GIL|interpreter lock)"),
    "sleep": (lambda: _parts(("sleep", [])), r"a\[0\].run sleeps \(test_hangs.py:\d+: time.sleep"),
    "async sleep": (lambda: _parts(("other.sleep_async", [1]), ("", [])), r"a\[0\].run waits for b\[0\].sleep_async, which sleeps \(test_hangs.py:"),
    "input": (lambda: _parts(("read_input", [])), r"a\[0\].run reads .*\(test_hangs.py:\d+: os.read"),
    "process": (lambda: _parts(("wait_for_process", [])), r"a\[0\].run waits for .*process.*\(test_hangs.py:\d+: child.wait"),
    "queue": (lambda: _parts(("wait_for_queue", [])), r"a\[0\].run waits for an item of a queue.*\(test_hangs.py:\d+: queue"),
    "lock": (lambda: _parts(("wait_for_lock", [])), r"a\[0\].run waits for a lock that .*keeper.* holds"),
    "stopped": (lambda: _parts(("other.slow", [1]), ("stop_itself", [])), r"b\[0\], which does not answer: it was stopped by a signal, and goes on"),
    "starting": (lambda: _given(lp.CourierNode(Late), "other.slow"), r"a\[0\].run waits for b\[0\].__init__, which waits for an event, for some time at most \(test_hangs.py:"),
    "pause": (lambda: _given(lp.CourierNode(Fails), "ask_again"), r"a\[0\].run waits for b\[0\], which is restarting"),
    "task": (lambda: _parts(("ask_by_a_task", [1]), ("", [])), r"a\[0\].* waits? for b\[0\].slow"),
    "wait_for": (lambda: _parts(("ask_in_a_task", [1]), ("", [])), r"a\[0\].* waits? for b\[0\].slow"),
    "batch": (lambda: _given(lp.CourierNode(Batch), "act"), r"a\[0\].run waits for b\[0\].act, which waits \(its batch has 1 of 3 calls"),
    "pool": (_pool_without_replicas, r"a\[0\].run waits for b\[\d\].__init__, which waits for an event, for some time at most"),
    "barrier": (_lagging, r"ps_worker\[0\].run.* waits? for ps_worker\[1\].push, which waits for an event, for some time at most \(test_hangs.py:"),
    "group": (_short_group, r"trainer\[0\].run waits? for generator\[\d\](.generate, which sleeps| \(the trainer has)"),
}  # fmt: skip
#: What threads cannot do: they share their process with the supervisor.
_NOT_AS_THREADS = ("interpreter", "stopped")
#: One of each kind.
_FAST = (
    "futures", "tasks", "all", "streams", "three", "callers", "async sleep", "stopped", "starting",
    "batch", "barrier",
)  # fmt: skip


@pytest.mark.parametrize(
    ("launcher", "name"),
    [
        pytest.param(launcher, name, marks=() if name in _FAST else pytest.mark.slow)
        for launcher in ("test_mt", "test_mp")
        for name in SCENARIOS
        if launcher == "test_mp" or name not in _NOT_AS_THREADS
    ],
)
def test_the_cause_of_a_hang_is_named(launcher: str, name: str) -> None:
    make, wanted = SCENARIOS[name]
    restart = {"b": lp.RestartPolicy(backoff_s=3600, max_restarts=9)} if name == "pause" else None
    running = lp.launch(make(), launcher, notice_s=0, restart=restart)
    running.collected = True
    text = ""

    def is_named() -> bool:
        nonlocal text
        text = running.why()
        return re.search(wanted, text) is not None

    try:
        poll_until(is_named, 20, must=False)
    finally:
        for node in running.status():
            if name == "stopped" and node.pid is not None:
                os.kill(node.pid, signal.SIGCONT)
        running.kill()
        running.join()
    assert re.search(wanted, text), text
    assert text.count("deadlock: ") <= 1
