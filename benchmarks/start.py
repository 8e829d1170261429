"""How long until every node of a program has answered its first call.

    python -m benchmarks.start --nodes=50 --rounds=5
    python -m benchmarks.start --executor --imports=numpy --rounds=10

The second is how long until an executor has its first result, beside a `ProcessPoolExecutor` that spawns:
a script with these imports, whose function needs them.

Each round is a new interpreter, so that its own start and all imports count: the
clock starts before the interpreter and stops when the last first call is
answered. Beside it, in the same round, a floor: as many forked children that
each answer once over a pipe.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import launchpad_lite as lp

#: A script for each executor; it prints when it has its first result.
_SCRIPT = """
import time
{imports}
{executor}

def work(x):
    {uses}
    return x

if __name__ == "__main__":
    with executor() as running:
        running.submit(work, 1).result()
        print(time.time())
"""
_EXECUTORS = {
    "search.Executor": """
from launchpad_lite import search
def executor(): return search.Executor(workers=2, launcher="test_mp")
""",
    "ProcessPoolExecutor, spawn": """
import concurrent.futures, multiprocessing
def executor():
    context = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(2, mp_context=context)
""",
}


class Echo:
    """Answers."""

    def ping(self) -> int:
        """Returns its process."""
        return os.getpid()


def measure_once(nodes: int, started_at: float) -> None:
    """Launches echo nodes, calls each, prints the seconds that took and those of the stop."""
    program = lp.Program("start")
    with program.group("echo"):
        handles = [program.add_node(lp.CourierNode(Echo)) for _ in range(nodes)]
    running = lp.launch(program, "test_mp")
    clients: list[Any] = [handle.dereference() for handle in handles]
    pids = {future.result() for future in [client.futures.ping() for client in clients]}
    answered_at = time.time()
    assert len(pids) == nodes
    running.stop()
    print(answered_at - started_at, time.time() - answered_at)


def floor_once(nodes: int) -> float:
    """Forks as many children that each write one byte; returns the seconds that took."""
    started_at = time.perf_counter()
    read, write = os.pipe()
    pids = []
    for _ in range(nodes):
        pid = os.fork()
        if pid == 0:
            os.write(write, b"x")
            os._exit(0)
        pids.append(pid)
    received = 0
    while received < nodes:
        received += len(os.read(read, nodes))
    took = time.perf_counter() - started_at
    for pid in pids:
        os.waitpid(pid, 0)
    os.close(read)
    os.close(write)
    return took


def measure_executors(imports: Sequence[str], rounds: int) -> None:
    """Prints how long both executors take to the first result of a script, in turns."""
    found: dict[str, list[float]] = {name: [] for name in _EXECUTORS}
    lines = "\n".join(f"import {each}" for each in imports)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # it would compile all of ours each time
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(rounds + 1):
            for name, made in _EXECUTORS.items():
                script = Path(folder, f"script{len(name)}.py")
                uses = "; ".join([*imports, "pass"])
                script.write_text(_SCRIPT.format(imports=lines, executor=made, uses=uses))
                began_at = time.time()
                output = subprocess.check_output(
                    [sys.executable, script], text=True, env=environment
                )
                if turn:  # the first one has compiled
                    found[name].append(float(output) - began_at)
    medians = {name: statistics.median(values) for name, values in found.items()}
    print(f"first result, script imports {', '.join(imports) or 'nothing'}; median of {rounds}")
    for name, median in medians.items():
        print(f"  {name:36s} {median:6.3f} s  (at least {min(found[name]):.3f})")
    ours, theirs = medians.values()
    print(f"  ratio {ours / theirs:.2f}")


def main() -> None:
    """Runs the rounds and prints medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--started-at", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--executor", action="store_true")
    parser.add_argument("--imports", default="", help="modules with commas between")
    options = parser.parse_args()
    if options.executor:
        measure_executors([each for each in options.imports.split(",") if each], options.rounds)
        return
    if options.started_at is not None:
        measure_once(options.nodes, options.started_at)
        return
    firsts, stops, floors = [], [], []
    for _ in range(options.rounds):
        floors.append(floor_once(options.nodes))
        command = [sys.executable, "-m", "benchmarks.start", f"--nodes={options.nodes}"]
        output = subprocess.run(
            [*command, f"--started-at={time.time()}"], capture_output=True, text=True, check=True
        ).stdout
        first, stop = map(float, output.split())
        firsts.append(first)
        stops.append(stop)
    print(f"{options.nodes} nodes, median of {options.rounds} rounds (all)")
    for name, values in (
        ("first call answered by every node", firsts),
        ("stop, all processes gone", stops),
        ("floor: fork and one byte", floors),
    ):
        shown = " ".join(f"{value:.2f}" for value in values)
        print(f"  {name:36s} {statistics.median(values):6.2f} s  ({shown})")
    ratio = statistics.median(firsts) / statistics.median(floors)
    print(f"  ratio to the floor {ratio:.1f}")


if __name__ == "__main__":
    main()
