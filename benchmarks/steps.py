"""Counts what one blocking echo over the unix socket takes, on the side of the client and the server.

    python -m benchmarks.steps --calls=2000

Prints a table for docs/architecture.md: counts over all calls, divided by the calls. Each kind is
counted in new processes, because counting would appear in the other figures. System calls need
`strace`, and objects a C compiler; objects from Python's free lists are not allocated. Locks are those
of Python code. `--functions` lists the functions, too.
"""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.cases import FULL, Session
from benchmarks.environments import Installed, Peer
from benchmarks.processes import PeerError, Process

_TIMEOUT_S = 120.0
_KINDS = ("functions", "locks", "objects", "system calls", "CPU")
#: What is rarer is caused by timers and by the questions of this tool.
_RARE = 0.02


@contextlib.contextmanager
def _strace(process: Process, counts: dict[str, int]) -> Iterator[None]:
    command = ["strace", "-fc", "-Ucalls,name", f"-p{process.family()[0].pid}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
        assert tracer.stderr is not None
        first = tracer.stderr.readline()
        if "attached" not in first:
            raise PeerError(first.strip())
        try:
            yield
        finally:
            tracer.send_signal(signal.SIGINT)
        for count, name in re.findall(r"^ *(\d+) (\w+)$", tracer.stderr.read(), re.MULTILINE):
            counts["system calls" if name == "total" else f"- {name}"] = int(count)


def _measure(kind: str, calls: int) -> list[dict[str, float]]:
    """Returns what one call takes: on the client's side, and on the server's."""
    variables = {**os.environ, "COUNTED": kind}
    counted = Installed(Peer("steps", "courier"), Path(sys.executable), variables)
    with Session(counted, FULL) as session:
        server, client = session.start_pair()
        before = [side.ask("count", _TIMEOUT_S) for side in (client, server)]
        traced: tuple[dict[str, int], ...] = ({}, {})
        with contextlib.ExitStack() as stack:
            if kind == "system calls":
                stack.enter_context(_strace(client, traced[0]))
                stack.enter_context(_strace(server, traced[1]))
            client.ask("warm", _TIMEOUT_S, calls=calls)
            after = [side.ask("count", _TIMEOUT_S) for side in (client, server)]
    return [
        {name: (count - old.get(name, 0)) / calls for name, count in (new | seen).items()}
        for old, new, seen in zip(before, after, traced, strict=True)
    ]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--functions", action="store_true", help="lists the functions, too")
    options = parser.parse_args()
    print("| one blocking echo | client | server |\n| --- | --: | --: |")
    for kind in _KINDS:
        try:
            client, server = _measure(kind, options.calls)
        except (PeerError, OSError) as error:
            print(f"| {kind} | not counted: {error} | |", flush=True)
            continue
        for name in sorted(client | server, key=lambda name: (name[0] == "-", name)):
            figures = [side.get(name, 0.0) for side in (client, server)]
            listed = options.functions or kind != "functions" or name[0] != "-"
            if listed and max(figures) >= _RARE:
                print(f"| {name} | {figures[0]:.2f} | {figures[1]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
