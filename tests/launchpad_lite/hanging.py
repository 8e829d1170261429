"""Which cause `why` names of programs that hang, and after how many seconds.

    python -m tests.launchpad_lite.hanging --launcher=local_mp [--only=philosophers]
    python -m tests.launchpad_lite.hanging --launcher=ssh --option hosts=h1,h2
    python -m tests.launchpad_lite.hanging --launcher=kubernetes --option image=IMAGE

Each program hangs in a way of its own. Seconds are counted from when the launch returns until `why` first
names the true cause. Beside them is when all nodes were seen to have started; inf: not before that.
"""

import argparse
import asyncio
import contextlib
import math
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

import courier
import launchpad_lite as lp
from launchpad_lite import engines, rollouts
from launchpad_lite.launching import RunningProgram

#: Seconds after which a cause that is not named counts as not found.
_GIVE_UP_S = 20.0


class Part:
    """Does what a scenario says, and calls others."""

    def __init__(self, others: Sequence[Any], does: str = "") -> None:
        self._others, self._does = others, does
        self._lock = threading.RLock()

    def run(self) -> None:
        if self._does:
            getattr(self, self._does)()
        lp.wait_for_stop()

    # What hangs in calls

    def ask(self) -> None:
        self._others[0].ask()

    def ask_slow(self) -> None:
        self._others[0].slow()

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
        time.sleep(3600)

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
            time.sleep(3600)
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


def _philosophers() -> lp.Program:
    """Five forks, each of which serves one at a time, and five who hold one and wait for the next."""
    program = lp.Program("hangs")
    forks = [lp.CourierNode(Fork, serial=True) for _ in range(5)]
    with program.group("fork"):
        taken = [program.add_node(each) for each in forks]
    with program.group("philosopher"):
        for index in range(5):
            program.add_node(lp.CourierNode(Philosopher, taken[index], taken[(index + 1) % 5]))
    return program


class Fork:
    """Is taken while what its taker does next runs."""

    def take(self, other: Any) -> None:
        time.sleep(0.2)
        other.take(None)


class Philosopher:
    """Takes its left fork, and then the right one."""

    def __init__(self, left: Any, right: Any) -> None:
        self._left, self._right = left, right

    def run(self) -> None:
        self._left.take(self._right)


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
        program.add_node(lp.CourierNode(Part, [lp.Pool(late)], "ask_slow"))
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


#: By name: what makes the program, and what `why` must say.
SCENARIOS: dict[str, tuple[Callable[[], lp.Program], str]] = {
    "two": (lambda: _parts(("ask", [1]), ("", [0]), serial=True), r"deadlock: .*a\[0\].ask → b\[0\].ask → a\[0\].ask|deadlock: .*b\[0\].ask → a\[0\].ask → b\[0\].ask"),
    "three": (lambda: _parts(("ask", [1]), ("", [2]), ("", [0]), serial=True), r"deadlock: (.\[0\].ask → ){3}"),
    "colocation": (_colocated, r"deadlock: (.*ask → ){2}"),
    "philosophers": (_philosophers, r"deadlock: (.*fork\[.\].take → ){5}"),
    "airport": (_airport, r"deadlock: (.*ask → ){3}"),
    "threads": (lambda: _parts(("ask_in_threads", [1]), ("", []), thread_pool_size=1), r"waits? for b\[0\].slow, which waits"),
    "stream": (lambda: _parts(("read_one", [1]), ("", [])), r"a\[0\].run waits for b\[0\].slow"),
    "compute": (lambda: _parts(("ask_slow", [1]), ("compute", [])), r"a\[0\].run waits for b\[0\].slow"),
    "computing": (lambda: _parts(("compute", [])), r"a\[0\].run computes \(hanging.py:\d+: (sum|while)"),
    "interpreter": (lambda: _parts(("ask_slow", [1]), ("hold_interpreter", [])), r"b\[0\], which does not answer: .*holds the (GIL|interpreter lock)"),
    "sleep": (lambda: _parts(("sleep", [])), r"a\[0\].run sleeps \(hanging.py:\d+: time.sleep"),
    "input": (lambda: _parts(("read_input", [])), r"a\[0\].run reads .*\(hanging.py:\d+: os.read"),
    "process": (lambda: _parts(("wait_for_process", [])), r"a\[0\].run waits for .*process.*\(hanging.py:\d+: child.wait"),
    "queue": (lambda: _parts(("wait_for_queue", [])), r"a\[0\].run waits for an item of a queue.*\(hanging.py:\d+: queue"),
    "lock": (lambda: _parts(("wait_for_lock", [])), r"a\[0\].run waits for a lock that .*keeper.* holds"),
    "stopped": (lambda: _parts(("ask_slow", [1]), ("stop_itself", [])), r"b\[0\], which does not answer: it was stopped"),
    "starting": (lambda: _given(lp.CourierNode(Late), "ask_slow"), r"a\[0\].run waits for b\[0\].__init__, which sleeps"),
    "pause": (lambda: _given(lp.CourierNode(Fails), "ask_again"), r"a\[0\].run waits for b\[0\], which is restarting"),
    "task": (lambda: _parts(("ask_by_a_task", [1]), ("", [])), r"a\[0\].* waits? for b\[0\].slow"),
    "wait_for": (lambda: _parts(("ask_in_a_task", [1]), ("", [])), r"a\[0\].* waits? for b\[0\].slow"),
    "batch": (lambda: _given(lp.CourierNode(Batch), "act"), r"a\[0\].run waits for b\[0\].act, which waits \(its batch has 1 of 3 calls"),
    "pool": (_pool_without_replicas, r"a\[0\].run waits for b\[\d\].__init__, which sleeps"),
    "barrier": (_lagging, r"ps_worker\[0\].run.* waits? for ps_worker\[1\].push, which sleeps"),
    "group": (_short_group, r"trainer\[0\].run waits? for generator\[\d\](.generate, which sleeps| \(the trainer has)"),
}  # fmt: skip
#: What threads cannot do: they share their process with the supervisor.
_NOT_AS_THREADS = ("interpreter", "stopped")


def scenarios(launcher: str) -> list[str]:
    """Returns what can hang so under a launcher."""
    threads = launcher in ("local_mt", "test_mt")
    return [name for name in SCENARIOS if not threads or name not in _NOT_AS_THREADS]


def named_after(name: str, launcher: str, **options: Any) -> tuple[float, float, str]:
    """Returns seconds until all nodes had started, until the cause was named, and what `why` said last."""
    make, wanted = SCENARIOS[name]
    restart = {"b": lp.RestartPolicy(backoff_s=3600, max_restarts=9)} if name == "pause" else None
    running = lp.launch(make(), launcher, notice_s=0, restart=restart, **options)
    running.collected = True
    try:
        return _named_after(running, wanted)
    finally:
        for node in running.status():
            # On hosts, other processes here have these numbers.
            if name == "stopped" and launcher.endswith("_mp") and node.pid is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(node.pid, signal.SIGCONT)
        running.kill()
        running.join()


def _named_after(running: RunningProgram, wanted: str) -> tuple[float, float, str]:
    began_at = time.monotonic()
    started_s, text = math.inf, ""
    while (now_s := time.monotonic() - began_at) < _GIVE_UP_S:
        if all(each.state not in ("pending", "starting") for each in running.status()):
            started_s = min(started_s, now_s)
        text = running.why()
        if re.search(wanted, text):
            return started_s, time.monotonic() - began_at, text
        time.sleep(0.05)
    return started_s, math.inf, text


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--launcher", default="local_mp")
    parser.add_argument("--only", default="")
    parser.add_argument("--option", action="append", default=[], help="of the launcher, NAME=VALUE")
    asked = parser.parse_args()
    options = dict(each.split("=", 1) for each in asked.option)
    found = 0
    chosen = [name for name in scenarios(asked.launcher) if asked.only in name]
    for name in chosen:
        started_s, named_s, text = named_after(name, asked.launcher, **options)
        found += named_s < math.inf
        print(f"{name:13} {started_s:6.2f} {named_s:6.2f}  {text.splitlines()[0]}", flush=True)
        if named_s == math.inf:
            print("   NOT NAMED\n   " + "\n   ".join(text.splitlines()[:8]), flush=True)
    print(f"{found} of {len(chosen)}")


if __name__ == "__main__":
    main()
