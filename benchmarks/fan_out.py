"""Queries per second against the number of requesters: figure 2 of the Launchpad paper.

    python -m benchmarks.fan_out --seconds=2

A parameter server answers `get_value` in 1 ms, one call at a time. Requesters call it without a
pause: one server, ten servers (each requester takes turns among them), and one server behind a
cacher. Requesters are threads, in at most eight processes. With `--write` the table and the plot go
to docs/benchmarks.md.
"""

import argparse
import contextlib
import math
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import launchpad_lite as lp
from benchmarks import page

_REQUESTERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000)
_PROCESSES = 8
_REFRESH_MS, _STALE_MS = 50, 200
_SOON_S = 0.5
TOPOLOGIES = ("1 partition", "10 partitions", "1 partition + 1 cacher")


class Server:
    """Takes 1 ms to answer."""

    def get_value(self) -> int:
        """Returns something."""
        time.sleep(0.001)
        return 7


class Requesters:
    """Some of the requesters: threads that call without a pause."""

    def __init__(self, servers: Sequence[Any]) -> None:
        self._servers = servers

    def count(self, first: int, threads: int, start_at: float, seconds: float) -> int:
        """Returns how many calls are answered in a window of time.

        Args:
            first: Number of the first requester here.
            threads: How many there are.
            start_at: Monotonic time at which they begin.
            seconds: How long they go on.
        """
        counts = [0] * threads

        def request(index: int) -> None:
            servers = self._servers
            turn = first + index
            time.sleep(max(0.0, start_at - time.monotonic()))
            while True:
                servers[turn % len(servers)].get_value()
                if time.monotonic() > start_at + seconds:
                    return  # with a thousand requesters, what was under way then is a lot
                turn += 1
                counts[index] += 1

        running = [threading.Thread(target=request, args=(index,)) for index in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        return sum(counts)


@contextlib.contextmanager
def launched(topology: str) -> Iterator[list[Any]]:
    """Runs a topology; gives clients of the processes that hold the requesters."""
    program = lp.Program("figure-2")
    one_at_a_time = {"thread_pool_size": 1}
    with program.group("server"):
        servers = [
            program.add_node(lp.CourierNode(Server, courier_kwargs=one_at_a_time))
            for _ in range(10 if topology == "10 partitions" else 1)
        ]
    if "cacher" in topology:
        cacher = lp.CacherNode(servers[0], _REFRESH_MS, _STALE_MS)
        servers = [program.add_node(cacher, label="cacher")]
    with program.group("requesters"):
        handles = [program.add_node(lp.CourierNode(Requesters, servers)) for _ in range(_PROCESSES)]
    with lp.launch(program, "test_mp"):
        yield [handle.dereference() for handle in handles]


def queries_per_second(clients: Sequence[Any], requesters: int, seconds: float) -> float:
    """Runs so many requesters; returns the rate of all together."""
    start_at = time.monotonic() + _SOON_S
    used = min(len(clients), requesters)
    shares = [requesters // used + (index < requesters % used) for index in range(used)]
    firsts = [sum(shares[:index]) for index in range(used)]
    futures = [
        client.futures.count(first, share, start_at, seconds)
        for client, first, share in zip(clients, firsts, shares, strict=False)
    ]
    return sum(future.result() for future in futures) / seconds


def call_cost(seconds: float) -> tuple[float, float]:
    """Returns the median seconds of a call of a server that answers at once, and of its cacher."""
    program = lp.Program("call-cost")
    plain = program.add_node(lp.CourierNode(_Prompt), label="server")
    cached = program.add_node(lp.CacherNode(plain, _REFRESH_MS, _STALE_MS), label="cacher")
    with lp.launch(program, "test_mp"):
        clients = [plain.dereference(), cached.dereference()]
        took: list[list[float]] = [[], []]
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for client, times in zip(clients, took, strict=True):
                for _ in range(50):
                    started_at = time.perf_counter()
                    client.get_value()
                    times.append(time.perf_counter() - started_at)
    return statistics.median(took[0]), statistics.median(took[1])


class _Prompt:
    def get_value(self) -> int:
        return 7


def table(rates: dict[str, list[float]]) -> str:
    """Returns the rates as Markdown, beside what one requester of one server gets."""
    unit = rates[TOPOLOGIES[0]][0]
    lines = [
        "| requesters | " + " | ".join(TOPOLOGIES) + " |",
        "| --: |" + " --: |" * len(TOPOLOGIES),
    ]
    for index, requesters in enumerate(_REQUESTERS):
        cells = [f"{rates[t][index]:,.0f} ({rates[t][index] / unit:.1f})" for t in TOPOLOGIES]
        lines.append(f"| {requesters:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 720, 420, 70, 360
_COLOURS = ("#0072b2", "#009e73", "#d55e00")
_TEXT, _LINE = "#808890", "#80889055"


def svg(rates: dict[str, list[float]]) -> str:
    """Draws the rates over the number of requesters, both on logarithmic axes."""
    unit = rates[TOPOLOGIES[0]][0]
    top = math.ceil(math.log10(max(max(each) for each in rates.values()) / unit))

    def place(requesters: float, rate: float) -> tuple[float, float]:
        x = _LEFT + math.log10(requesters) / 3 * (_WIDTH - _LEFT - 30)
        return x, _BOTTOM - math.log10(rate / unit) / top * (_BOTTOM - 60)

    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="{_TEXT}">'
    )
    parts = [head, "<title>Queries per second against the number of requesters</title>"]
    for exponent in range(4):
        x, _ = place(10**exponent, unit)
        parts.append(f'<line x1="{x:.1f}" y1="60" x2="{x:.1f}" y2="{_BOTTOM}" stroke="{_LINE}"/>')
        label = f'<text x="{x:.1f}" y="{_BOTTOM + 20}" text-anchor="middle">{10**exponent:,}</text>'
        parts.append(label)
    for exponent in range(top + 1):
        _, y = place(1, unit * 10**exponent)
        parts.append(
            f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - 30}" y2="{y:.1f}" stroke="{_LINE}"/>'
        )
        parts.append(
            f'<text x="{_LEFT - 10}" y="{y + 4:.1f}" text-anchor="end">{10**exponent}</text>'
        )
    for index, (topology, colour) in enumerate(zip(TOPOLOGIES, _COLOURS, strict=True)):
        points = [place(n, rate) for n, rate in zip(_REQUESTERS, rates[topology], strict=True)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in points]
        left = _LEFT + 10 + index * 200
        parts.append(f'<circle cx="{left}" cy="32" r="5" fill="{colour}"/>')
        parts.append(f'<text x="{left + 12}" y="36.5">{topology}</text>')
    parts.append(
        f'<text x="{_WIDTH - 30}" y="{_HEIGHT - 12}" text-anchor="end" font-size="11">requesters; '
        "queries per second, one requester of one server being 1</text>"
    )
    return "\n".join([*parts, "</svg>", ""])


def write(text: str, picture: str) -> None:
    """Puts the results into the docs."""
    page.put("figure 2", f"\n{text}")
    page.PAGE.with_name("figure-2.svg").write_text(picture, encoding="utf-8")


def main() -> None:
    """Measures, prints, and writes if wanted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="for each point")
    parser.add_argument("--write", action="store_true", help="puts the results into docs/")
    chosen = parser.parse_args()
    rates: dict[str, list[float]] = {}
    for topology in TOPOLOGIES:
        with launched(topology) as clients:
            queries_per_second(clients, 1, 0.2)
            rates[topology] = []
            for requesters in _REQUESTERS:
                rates[topology].append(queries_per_second(clients, requesters, chosen.seconds))
                print(
                    f"{topology}: {requesters} requesters, {rates[topology][-1]:,.0f}/s", flush=True
                )
    plain_s, cached_s = call_cost(chosen.seconds)
    text = (
        f"{table(rates)}\nIn brackets: one requester of one server is 1. A call that a cacher answers "
        f"takes {cached_s / plain_s:.2f} times a plain one ({cached_s * 1e6:.0f} and "
        f"{plain_s * 1e6:.0f} µs).\n\n![Queries per second](figure-2.svg)\n"
    )
    print(text)
    if chosen.write:
        write(text, svg(rates))


if __name__ == "__main__":
    main()
