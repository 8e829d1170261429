"""Calls between two hosts under TLS, beside a bare TLS socket there, and how long hosts take to start.

    python -m benchmarks.hosts h1 h2 --rounds=7
    python -m benchmarks.hosts --bed --hosts=30

With `--bed` (Linux, root, sshd) the hosts are network namespaces of this machine, as in the tests: no
wire lies between them, so what is measured is what the programs cost. Each round measures both, one
right after the other; printed are medians and ratios. With `--write` the tables go to
docs/benchmarks.md.
"""

import argparse
import contextlib
import os
import socket
import ssl
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import courier
import launchpad_lite as lp
from benchmarks import page
from launchers.hosts.trust import Authority

_MIB = 1 << 20
_HEAD_BYTES = 8
_ANY = "0.0.0.0"  # noqa: S104 - a bed or a cluster of one's own, and under TLS

Pem = tuple[bytes, bytes, bytes]


class Far:
    """On one host: answers calls, and echoes bytes of a bare TLS socket."""

    def __init__(self, pem: Pem, size: int) -> None:
        self._size = size
        certificate, key, authority = pem
        self._tls = courier.TlsCredentials(certificate=certificate, key=key, authority=authority)
        self._listener = socket.create_server((_ANY, 0))

    def echo(self, data: Any) -> Any:
        """Returns it."""
        return data

    def raw_port(self) -> int:
        """Begins to echo the bytes of one TLS connection; returns its port."""
        threading.Thread(target=self._echo_raw, daemon=True).start()
        return int(self._listener.getsockname()[1])

    def _echo_raw(self) -> None:
        plain, _ = self._listener.accept()
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._tls.server_context().wrap_socket(plain, server_side=True) as sock:
            buffer = memoryview(bytearray(self._size))
            with contextlib.suppress(OSError):
                # All there, then all back, as a call is.
                while head := sock.recv(_HEAD_BYTES):
                    size = int.from_bytes(head, "big")
                    _read_all(sock, buffer[:size])
                    sock.sendall(buffer[:size])


class Near:
    """On the other host: measures."""

    def __init__(self, far: Any, pem: Pem, size: int) -> None:
        self._far = far
        certificate, key, authority = pem
        self._tls = courier.TlsCredentials(certificate=certificate, key=key, authority=authority)
        import numpy as np

        self._payload = np.frombuffer(os.urandom(size), np.uint8)

    def calls(self, count: int) -> tuple[float, float]:
        """Returns the median seconds of an empty call and of echoing the payload."""
        return _median(count, lambda: self._far.echo(None)), _median(
            max(3, count // 100), lambda: self._far.echo(self._payload)
        )

    def raw(self, host: str, count: int) -> tuple[float, float]:
        """Returns the same of a bare TLS socket: one byte there and back, and the payload."""
        with self._connect(host) as sock:
            sent = memoryview(self._payload)
            buffer = memoryview(bytearray(len(sent)))

            def echo(size: int) -> None:
                sock.sendall(size.to_bytes(_HEAD_BYTES, "big"))
                sock.sendall(sent[:size])
                _read_all(sock, buffer[:size])

            return _median(count, lambda: echo(1)), _median(
                max(3, count // 100), lambda: echo(len(sent))
            )

    def _connect(self, host: str) -> ssl.SSLSocket:
        plain = socket.create_connection((host, self._far.raw_port()))
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self._tls.client_context().wrap_socket(plain)


def _read_all(sock: ssl.SSLSocket, view: memoryview) -> None:
    while view:
        view = view[sock.recv_into(view) :]


def _median(count: int, do: Any) -> float:
    times = []
    for _ in range(count):
        started_at = time.perf_counter()
        do()
        times.append(time.perf_counter() - started_at)
    return statistics.median(times)


def measure_calls(hosts: Sequence[str], rounds: int, count: int, size: int) -> str:
    """Measures calls between two hosts; returns a table."""
    program = lp.Program("between-hosts")
    authority = Authority("benchmark")
    pems = []
    for name in ("far", "near"):
        tls = authority.issue(name)
        pems.append((tls.certificate, tls.key, tls.authority))
    far = program.add_node(lp.CourierNode(Far, pems[0], size), label="far")
    near = program.add_node(lp.CourierNode(Near, far, pems[1], size), label="near")
    placement = {"far": hosts[0], "near": hosts[1]}
    running = lp.launch(program, "ssh", hosts=list(hosts[:2]), placement=placement)
    with running:
        (address,) = {each.endpoints["courier"] for each in running.status() if "far" in each.name}
        client: Any = near.dereference()
        client.calls(count // 10)  # what is done once only
        ours, raw = [], []
        for _ in range(rounds):
            ours.append(client.calls(count))
            raw.append(client.raw(address.rpartition(":")[0], count))
        running.request_stop("measured")
    return _table(ours, raw, size)


def _table(
    ours: Sequence[tuple[float, float]], raw: Sequence[tuple[float, float]], size: int
) -> str:
    lines = ["| | courier | bare TLS socket | ratio |", "| --- | --: | --: | --: |"]
    (call, echo), (ping, stream) = (
        [statistics.median(column) for column in zip(*rows, strict=True)] for rows in (ours, raw)
    )
    lines.append(
        f"| one call, there and back | {call * 1e6:.0f} µs | {ping * 1e6:.0f} µs | "
        f"{call / ping:.1f} |"
    )
    ours_mib, raw_mib = size / _MIB / echo, size / _MIB / stream
    lines.append(
        f"| echo of an array of {size // _MIB} MiB | {ours_mib:,.0f} MiB/s | {raw_mib:,.0f} MiB/s | "
        f"{ours_mib / raw_mib:.2f} |"
    )
    return "\n".join(lines) + "\n"


class _Echo:
    def ping(self) -> int:
        return os.getpid()


def measure_start(hosts: Sequence[str], rounds: int) -> str:
    """Measures from the launch until a node on each host has answered; returns a line."""
    starts, stops = [], []
    for _ in range(rounds):
        program = lp.Program("start")
        with program.group("echo"):
            handles = [program.add_node(lp.CourierNode(_Echo)) for _ in hosts]
        started_at = time.perf_counter()
        running = lp.launch(program, "ssh", hosts=list(hosts))
        clients: list[Any] = [handle.dereference() for handle in handles]
        for future in [client.futures.ping() for client in clients]:
            future.result()
        starts.append(time.perf_counter() - started_at)
        started_at = time.perf_counter()
        running.stop()
        stops.append(time.perf_counter() - started_at)
    return (
        f"A node on each of {len(hosts)} hosts: all have answered after "
        f"{statistics.median(starts):.1f} s, all is gone {statistics.median(stops):.2f} s after the "
        "stop.\n"
    )


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="HOST", help="two or more hosts")
    parser.add_argument("--bed", action="store_true", help="use namespaces of this machine")
    parser.add_argument("--hosts", type=int, default=3, help="how many, with --bed (default 3)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--count", type=int, default=1000, help="calls in a round")
    parser.add_argument("--mib", type=int, default=64, help="size of what is echoed")
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    options = parser.parse_args()
    if options.bed:
        sys.exit(_run_in_bed(options))
    if len(options.names) < 2:
        parser.error("name two hosts, or say --bed")
    text = measure_start(options.names, min(3, options.rounds)) + "\n"
    text += measure_calls(options.names, options.rounds, options.count, options.mib * _MIB)
    print(text)
    if options.write:
        page.put("hosts", text.rstrip("\n"))


def _run_in_bed(options: argparse.Namespace) -> int:
    from tests.beds.ssh_hosts import SshHosts  # needs what tests need

    with SshHosts(options.hosts) as bed:
        again = [argument for argument in sys.argv[1:] if argument != "--bed"]
        command = [sys.executable, "-m", "benchmarks.hosts", *again, *bed.names]
        process = bed.run(command)
        return process.wait()


if __name__ == "__main__":
    main()
