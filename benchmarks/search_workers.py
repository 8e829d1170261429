"""Measures the broker and the name server of a search with up to 1,000 workers, over real connections.

    python -m benchmarks.search_workers

Broker and name server are processes; the broker keeps its tasks in a file. Workers are simulated, in
a few other processes: each has its own connections to both, shows itself each second, and waits in
place of running its task. Tasks are submitted one by one, for 70 % of the workers, so that some are
always free. The delay of a task is from its submission to its start at a worker. All run on this
machine: where it has few cores, the delay is also that of the simulated workers, whose use of the
processor is shown. Calls are late that have no answer 2 s after it was due; workers ask again. The table
is printed.
"""

import argparse
import asyncio
import pickle
import statistics
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import psutil

import courier
import launchpad_lite as lp
from benchmarks.environments import machine, revision
from launchpad_lite.search._messages import (
    PYTHON,
    Life,
    Load,
    SearchMember,
    TaskOutcome,
    TaskState,
    TaskSubmission,
)
from launchpad_lite.search._parts import BrokerOptions, add_parts
from launchpad_lite.search._timing import Timing

_TIMING = Timing()
_BROKER = "search_broker[0]"
_PROCESSES = 4
_LOAD = 0.7
#: Seconds until all workers wait for a task, and until most have one.
_CONNECT_S = 10.0
_FILL_S = 5.0


class Seen(NamedTuple):
    """What simulated workers have seen in a window of time: delays, heartbeats sent, late answers."""

    delays: Sequence[float]
    beats: int
    late: int


@dataclass(frozen=True)
class Window:
    """A time in which to measure: monotonic, in seconds."""

    begin: float
    end: float

    def __contains__(self, now: float) -> bool:
        return self.begin <= now < self.end


class Workers:
    """Some of the simulated workers."""

    def __init__(self, name_server: Any, broker: Any) -> None:
        self._servers = name_server, broker

    def simulate(self, numbers: Sequence[int], task_s: float, window: Window) -> Seen:
        """Works until the end of the window; returns what was seen in it."""
        return asyncio.run(self._simulate(numbers, task_s, window))

    async def _simulate(self, numbers: Sequence[int], task_s: float, window: Window) -> Seen:
        workers = [_Worker(number, *self._servers, task_s, window) for number in numbers]
        await asyncio.gather(*[each.run() for each in workers])
        delays = [delay for each in workers for delay in each.delays]
        beats = sum(each.beats for each in workers)
        return Seen(delays, beats, sum(each.late for each in workers))


def _own_client(shared: Any) -> Any:
    """Returns a client with a connection of its own."""
    timeout_s = _TIMING.poll_s + 2 * _TIMING.beat_s
    return courier.with_timeout(pickle.loads(pickle.dumps(shared)), timeout_s)


class _Worker:
    def __init__(
        self, number: int, name_server: Any, broker: Any, task_s: float, window: Window
    ) -> None:
        self._name_server, self._broker = map(_own_client, (name_server, broker))
        self._me = Life(f"worker[{number}]", uuid.uuid4().hex)
        self._task_s = task_s
        self._window = window
        self._held: dict[str, str] = {}
        self.delays: list[float] = []
        self.beats = 0
        self.late = 0

    async def run(self) -> None:
        member = SearchMember("worker", self._me, version=lp.__version__)
        await self._name_server.aio.register(member)
        beating = asyncio.create_task(self._beat())
        await self._work()
        await beating
        for client in (self._name_server, self._broker):
            courier.close(client)

    async def _work(self) -> None:
        outcomes: list[TaskOutcome] = []
        while time.monotonic() < self._window.end:
            try:
                found = await self._broker.aio.work(
                    self._me, (), outcomes, (PYTHON,), 1, _TIMING.poll_s
                )
            except courier.CallTimeoutError:  # asks again, as workers do
                self.late += 1
                continue
            outcomes = []
            for each in found:
                now = time.monotonic()
                if now in self._window:
                    self.delays.append(now - pickle.loads(each.payload))
                self._held = {each.id: each.token}
                await asyncio.sleep(self._task_s)
                outcomes = [TaskOutcome(each.id, each.token, TaskState.DONE, worker=self._me.name)]
                self._held = {}

    async def _beat(self) -> None:
        at = time.monotonic()
        while at < self._window.end:
            try:
                if held := self._held:
                    await self._broker.aio.beat(self._me, held, ())
                    self.beats += at in self._window
                await self._name_server.aio.beat("worker", self._me, Load(), _BROKER)
                self.beats += at in self._window
            except courier.CallTimeoutError:
                self.late += 1
            at += _TIMING.beat_s
            await asyncio.sleep(max(0.0, at - time.monotonic()))


async def _submit(broker: Any, rate: float, end: float) -> None:
    """Submits tasks, without waiting for the answers."""
    calls = set[asyncio.Task[int]]()
    at = time.monotonic()
    while at < end:
        payload = pickle.dumps(time.monotonic())
        submissions = [TaskSubmission(uuid.uuid4().hex, payload)]
        call = asyncio.create_task(broker.aio.submit("model", submissions))
        calls.add(call)
        call.add_done_callback(calls.discard)
        at += 1 / rate
        await asyncio.sleep(max(0.0, at - time.monotonic()))
    await asyncio.gather(*calls)


async def _collect(broker: Any, end: float) -> None:
    acknowledged: list[str] = []
    while time.monotonic() < end:
        found = await broker.aio.collect("model", "session", acknowledged, (), _TIMING.poll_s)
        acknowledged = [outcome.id for outcome in found.outcomes]
        await asyncio.sleep(0.1)


async def _used(pids: Sequence[int], window: Window) -> list[float]:
    """Returns which share of a core processes use in a window."""
    processes = [psutil.Process(pid) for pid in pids]

    def seconds() -> list[float]:
        return [sum(each.cpu_times()[:2]) for each in processes]

    await asyncio.sleep(window.begin - time.monotonic())
    before = seconds()
    await asyncio.sleep(window.end - time.monotonic())
    passed = window.end - window.begin
    return [(after - begun) / passed for after, begun in zip(seconds(), before, strict=True)]


async def _measure(
    running: lp.RunningProgram, parts: Sequence[Any], workers: int, task_s: float, seconds: float
) -> str:
    """Returns a row of the table."""
    broker, *simulators = parts
    begin = time.monotonic() + _CONNECT_S + _FILL_S
    window = Window(begin, begin + seconds)
    nodes = {node.name: node.pid or 0 for node in running.status()}
    servers = [psutil.Process(nodes[name]) for name in (_BROKER, "search_name_server[0]")]
    others = [pid for name, pid in nodes.items() if name.startswith("workers")]
    numbers = [range(index, workers, len(simulators)) for index in range(len(simulators))]
    seen = [
        asyncio.ensure_future(each.aio.simulate(mine, task_s, window))
        for each, mine in zip(simulators, numbers, strict=True)
    ]
    await asyncio.sleep(_CONNECT_S)
    there = await broker.aio.load()
    assert there.idle == workers, f"{there} of {workers} workers after {_CONNECT_S:g} s"
    used, _, _ = await asyncio.gather(
        _used([*[each.pid for each in servers], *others], window),
        _submit(broker, _LOAD * workers / task_s, window.end),
        _collect(broker, window.end),
    )
    connections = servers[0].num_fds()
    assert connections > workers, f"{connections} descriptors of {workers} workers"
    memory = [each.memory_info().rss >> 20 for each in servers]
    found = await asyncio.gather(*seen)
    delays = sorted(delay for each in found for delay in each.delays)
    beats = sum(each.beats for each in found) / seconds
    longest = statistics.quantiles(delays, n=100)[-1]
    return (
        f"| {workers:,} | {used[0]:.1%} | {memory[0]} MiB | {used[1]:.1%} | {memory[1]} MiB "
        f"| {beats:,.0f} | {len(delays):,} | {1000 * statistics.median(delays):.1f} ms "
        f"| {1000 * longest:.1f} ms | {sum(each.late for each in found)} | {sum(used[2:]):.0%} |"
    )


def _run(folder: str, workers: int, task_s: float, seconds: float) -> str:
    program = lp.Program("search-workers")
    kept = BrokerOptions(_TIMING, folder)
    parts = add_parts(program, workers=0, brokers=1, label="search", options=kept)
    broker = parts.brokers[_BROKER]
    with program.group("workers"):
        handles = [
            program.add_node(lp.CourierNode(Workers, parts.name_server, broker))
            for _ in range(_PROCESSES)
        ]
    with lp.launch(program, "test_mp") as running:
        clients = [each.dereference() for each in (broker, *handles)]
        for client in clients:
            courier.wait_until_ready(client, 60)
        return asyncio.run(_measure(running, clients, workers, task_s, seconds))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 100, 300, 1000])
    parser.add_argument("--task-s", type=float, default=3.0)
    parser.add_argument("--seconds", type=float, default=25.0, help="to measure, for each number")
    options = parser.parse_args()
    print(f"Tasks of {options.task_s:g} s, commit {revision()}, {machine()}.\n")
    print(
        "| workers | broker | | name server | | heartbeats/s | tasks | median | 99 % | late | simulated |"
    )
    print("|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    for workers in options.workers:
        with tempfile.TemporaryDirectory() as folder:
            print(_run(folder, workers, options.task_s, options.seconds), flush=True)


if __name__ == "__main__":
    main()
